"""Data: what a device can do, from its maker's data sheet; and this machine, as measured by `rondel plan --calibrate`.

memory bytes · flops dense bf16 with fp32 sums, a second · bandwidth of its memory, bytes a
second · link to its neighbours in the node, bytes a second one way · network of the
node, bytes a second for one device of it
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rondel.core.errors import ConfigError
from rondel.core.registry import suggest_name
from rondel.system.files import make_folder, replace_file

GB, TERA = 10**9, 10**12


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device.

    efficiency  share of `flops` that training reaches (MFU);  stream, decode_efficiency: of
                `bandwidth` and `flops` that decoding reaches
    overhead    seconds of a layer's decode step that no size explains: calls, launches;
                calls: of a layer's training pass
    answer      seconds of an answer in the loop, the engine's book-keeping and the reward;  row: of
                packing one.  All are assumptions until calibrated
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    in_node: int
    efficiency: float = 0.4
    stream: float = 0.6
    decode_efficiency: float = 0.5
    overhead: float = 0.0
    calls: float = 0.0
    answer: float = 0.0
    row: float = 0.0
    source: str = ""

    @property
    def on_gpu(self) -> bool:
        """It has memory of its own, which no other process of the machine uses."""
        return self.name not in SHARED


SHARED = (
    "cpu",
    "cpu-2core",
    "laptop-8core",
    "m2-max",
    "m3-max",
    "m4-max",
)  # whose memory is the machine's, and where Rondel computes on the CPU
_APPLE = (
    "from memory of Apple's newsroom for bandwidth and memory; TFLOP/s of its GPU are no figure of Apple's "
    "(32-bit, shader cores x clock). Rondel computes on the CPU there, which is slower"
)

# An IB or RoCE port of 400 Gbit/s a device is what reference designs give (DGX H100); 200 for A100,
# 100 Gbit/s Ethernet a node for cards in PCIe slots.
DEVICES = {
    "rtx3090": Hardware(
        "rtx3090",
        24 * GB,
        71e12,
        936 * GB,
        16 * GB,
        3 * GB,
        2,
        source="NVIDIA Ampere GA102 whitepaper; PCIe 4.0 x16 in practice",
    ),
    "rtx4090": Hardware(
        "rtx4090",
        24 * GB,
        165e12,
        1008 * GB,
        16 * GB,
        3 * GB,
        2,
        source="NVIDIA Ada whitepaper; PCIe 4.0 x16 in practice",
    ),
    "a100-40": Hardware("a100-40", 40 * GB, 312e12, 1555 * GB, 300 * GB, 25 * GB, 8, source="NVIDIA A100 data sheet"),
    "a100-80": Hardware("a100-80", 80 * GB, 312e12, 2039 * GB, 300 * GB, 25 * GB, 8, source="NVIDIA A100 data sheet"),
    "h100": Hardware(
        "h100", 80 * GB, 989e12, 3350 * GB, 450 * GB, 50 * GB, 8, source="NVIDIA H100 SXM data sheet, without sparsity"
    ),
    "h200": Hardware(
        "h200", 141 * GB, 989e12, 4800 * GB, 450 * GB, 50 * GB, 8, source="NVIDIA H200 SXM data sheet, without sparsity"
    ),
    "b200": Hardware(
        "b200",
        180 * GB,
        2250e12,
        8000 * GB,
        900 * GB,
        50 * GB,
        8,
        source="NVIDIA DGX B200 data sheet, without sparsity",
    ),
    "h20": Hardware(
        "h20",
        96 * GB,
        148e12,
        4000 * GB,
        450 * GB,
        25 * GB,
        8,
        source="vendors' sheets of the H20; NVIDIA publishes none",
    ),
    "rtx5090": Hardware(
        "rtx5090",
        32 * GB,
        209.5e12,
        1792 * GB,
        32 * GB,
        3 * GB,
        2,
        source="from memory of NVIDIA's RTX Blackwell whitepaper, with fp32 sums; PCIe 5.0 x16 in practice",
    ),
    "mi300x": Hardware(
        "mi300x",
        192 * GB,
        1307e12,
        5300 * GB,
        448 * GB,
        50 * GB,
        8,
        source="from memory of AMD's MI300X data sheet, without sparsity; 7 links of 64 GB/s one way",
    ),
    "m2-max": Hardware("m2-max", 96 * GB, 13.6e12, 400 * GB, 5 * GB, 1 * GB, 1, source=_APPLE),
    "m3-max": Hardware("m3-max", 128 * GB, 14.3e12, 400 * GB, 5 * GB, 1 * GB, 1, source=_APPLE),
    "m4-max": Hardware("m4-max", 128 * GB, 17.2e12, 546 * GB, 5 * GB, 1 * GB, 1, source=_APPLE),
    "cpu-2core": Hardware(
        "cpu-2core",
        8 * GB,
        200e9,
        25 * GB,
        5 * GB,
        1 * GB,
        1,
        0.5,
        0.6,
        0.5,
        0.0003,
        0.003,
        0.0005,
        0.0003,
        source="a guess of two cores of a server with bf16, not measured",
    ),
    "laptop-8core": Hardware(
        "laptop-8core",
        16 * GB,
        1.8e12,
        76.8 * GB,
        5 * GB,
        1 * GB,
        1,
        0.5,
        0.6,
        0.5,
        0.0003,
        0.003,
        0.0005,
        0.0003,
        source="arithmetic: 8 cores x 3.5 GHz x 32 fp32 operations (AVX2), two channels of DDR5-4800; counted twice "
        "for bf16, which such a CPU has not",
    ),
    "cpu": Hardware(
        "cpu",
        16 * GB,
        200e9,
        25 * GB,
        5 * GB,
        1 * GB,
        1,
        0.5,
        0.6,
        0.5,
        0.0003,
        0.003,
        0.0005,
        0.0003,
        source="a guess of two cores with bf16; `rondel plan --calibrate` measures this machine",
    ),
}
ALIASES = {
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "a100": "a100-80",
    "a100-80gb": "a100-80",
    "a100-40gb": "a100-40",
}


def find_hardware(name: str) -> Hardware:
    word = ALIASES.get(name.lower(), name.lower())
    if word == "cpu":
        return this_machine()
    if word not in DEVICES:
        raise ConfigError(
            f"hardware = '{name}': it is one of {', '.join(DEVICES)}.{suggest_name(word, [*DEVICES, *ALIASES])}"
        )
    return DEVICES[word]


# -- this machine ------------------------------------------------------------------------------------


def calibration_file() -> Path:
    """What was measured: in $RONDEL_CACHE or ~/.cache/rondel."""
    return Path(os.environ.get("RONDEL_CACHE", Path.home() / ".cache" / "rondel")) / "machine.json"


def this_machine() -> Hardware:
    """The calibrated row if there is one, else the guess; memory is always this machine's."""
    found = DEVICES["cpu"]
    if (file := calibration_file()).is_file():
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            found = Hardware(**{k: known[k] for k in asdict(found)})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file} cannot be read ({type(error).__name__}: {error}): delete it, or run `rondel plan --calibrate`"
            ) from error
    return replace(found, memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def save_calibration(measured: Hardware) -> Path:
    file = calibration_file()
    make_folder(file.parent)
    replace_file(file, json.dumps(asdict(measured), indent=1))
    return file
