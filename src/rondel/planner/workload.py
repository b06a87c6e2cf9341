"""What a plan is asked: one model on some devices, the work of a step, and who else needs
memory. From a recipe, from what-ifs, or both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rondel.core.errors import ConfigError, UserError
from rondel.core.registry import suggest_name
from rondel.planner.format_bits import FORMAT_BITS
from rondel.planner.hardware import Hardware, find_hardware
from rondel.planner.resolve import MOST_MICRO, micro_tokens
from rondel.planner.shapes import ModelShape, hub_cache, model_shape, of_recipe
from rondel.planner.stored_bytes import encoded_bytes, nf4_bytes

if TYPE_CHECKING:
    from rondel.core.config.job import Job

# rows of the table that need one as they stand
CRITICS, TEACHERS, REFERENCES = (
    {"ppo", "turn_ppo"},
    {"opd", "iw_opd", "sdar", "sdft", "opsd", "sdpo", "rlsd"},
    {"online_dpo", "a_star_po"},
)
IMAGE = 1024  # tokens of an image whose size nobody says: some 900 x 900 pixels
ON_THIS_CPU = "device = auto is planned as this machine's CPU; --what-if hardware=h100 plans another"
PROXIMAL = {"clip_cov", "kl_cov", "forking", "m2po", "online_dpo", "real", "otb", "opsa"}


@dataclass(frozen=True, slots=True)
class OtherPolicy:
    """Weights of their own for some agents. `on_base`: an adapter on the main policy's base, or that base as it is."""

    name: str
    shape: ModelShape
    frozen: bool = False
    on_base: bool = False


HALVED = ("llama", "mistral", "qwen2", "qwen3")  # as models/blocks.py: LIKE_LLAMA
HALVES_UNIT = 16  # of which all sizes are multiples there, as in models/layer_halves.py


@dataclass(frozen=True, slots=True)
class Workload:
    """`Workload(shape("70b"), hardware("h100"), gpus=64)`.

    gpus      devices in all;  trainers: those of them that train, where place is "split"
    tensor    devices of one engine that share every matrix
    data      or that share the experts of a mixture, each with requests and a cache of its own
    encoders  devices of one engine that encode its pictures and do nothing else
    prefills  or that compute its prompts, as many as decode meanwhile, with parts of the model alike
    prompts   P groups a step, of `group` answers: to a prompt of `prompt` tokens at most
              `output` and on average `mean` tokens
    micro     tokens of one forward and backward pass;  running: requests decoded together by one engine
    others    models beside the policy: reference, reward model, teacher, critic, by name
    base_reference  the reference is the policy without its adapter: a pass, and no weights of its own
    width     bytes of a weight that computes; packed_width: of a copy for products (models/linear.py)
    widened   products are computed in fp32 and rounded: a CPU without those of 16 bits. Copies for oneDNN are in fp32
              then, panels of bfloat16 on a CPU with AVX2 alone are not
    tiles     a CPU whose products are those of cpu_tiles.h (models/layer_halves.py, models/tree_loops.py)
    splits_masters  a CPU on which a bf16 weight is half of its master between two steps (train/optim.py)
    policies  those beside the main one, each with an engine and a trainer of its own
    rank      of an adapter, 0 for none;  four_bits: its base lies as NF4, and is decoded layer by layer for every pass
    sent_bits  of a matrix's weight on its way to an engine, in a number format; 0: it travels as it computes
    engine_rounds  the engine alone computes in that format, with weights of its own wherever it is;
    engine_holds_codes  it keeps its linear layers so, and decodes each for a product
    megatron  the trainer's layers compute as Megatron-Core's;  overlap: rows of tp travel beside products (async TP)
    ring      keys and values of cp go round a ring and are not gathered
    activations  where inputs of layers wait;  host_optimizer: masters, gradients and moments lie in host memory
    teachers  of the size of the largest, that lie in memory at the same time
    replays   the engine records experts and chosen keys, and the trainer repeats them
    prefill   tokens of prompts that an engine reads in one step;  sync: sync.kind of the recipe
    image     tokens of the one image of a prompt, which are among its `prompt`, where the model
              sees;  tower: whether its eye learns, too
    generate_rate, train_rate   tokens a second of one device, where they were measured; 0: they are estimated
    """

    shape: ModelShape
    hardware: Hardware
    gpus: int = 1
    place: str = "shared"
    trainers: int = 0
    tensor: int = 1
    data: int = 1
    prompts: int = 16
    group: int = 8
    prompt: int = 512
    output: int = 2048
    mean: float = 1024
    micro: int = 16384
    running: int = 256
    staleness: int = 0
    oversamples: bool = False
    in_flight: str = "hold"
    updates: int = 1
    epochs: int = 1
    width: int = 2
    packed_width: int = 2
    widened: bool = False
    tiles: bool = False
    splits_masters: bool = False
    rank: int = 0
    four_bits: bool = False
    sent_bits: float = 0.0
    engine_rounds: bool = False
    engine_holds_codes: bool = False
    targets: str | tuple[str, ...] = "all-linear"
    offload: bool = False
    recompute: str = "none"
    megatron: bool = False
    overlap: bool = False
    ring: bool = False
    activations: str = "device"
    host_optimizer: bool = False
    optimizer: str = "adamw"
    reference: ModelShape | None = None
    base_reference: bool = False
    reward: ModelShape | None = None
    teacher: ModelShape | None = None
    teachers: int = 1
    critic: ModelShape | None = None
    proximal: bool = False
    policies: tuple[OtherPolicy, ...] = ()
    pages: int = 0
    replays: bool = True
    prefill: int = 2048
    sync: str = "auto"
    image: int = 0
    tower: bool = False
    encoders: int = 0
    prefills: int = 0
    generate_rate: float = 0.0
    train_rate: float = 0.0
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        experts = self.shape.experts
        if self.data > 1 and (self.tensor > 1 or not experts or experts % self.data):
            raise ConfigError(
                f"place.engines.dp (data) = {self.data} shares the experts of a mixture, as many on each device, and "
                f"not with tp: {self.shape.name} has {experts or 'no'} experts, and tp (tensor) = {self.tensor}",
                page="docs/place.md#engines-of-several-processes",
            )

        if self.prefills not in (0, self.tensor):
            raise ConfigError(
                f"prefills = {self.prefills} beside tensor = {self.tensor}: as many devices compute prompts as decode; "
                f"ask for prefills={self.tensor}",
                page="docs/place.md#engines-of-several-processes",
            )
        if self.encoders and self.shape.tower is None:
            raise ConfigError(
                f"place.engines.encoders = {self.encoders} encodes pictures, and {self.shape.name} reads text alone: "
                "leave it out",
                page="docs/place.md#engines-of-several-processes",
            )

    @property
    def split(self) -> bool:
        return self.place == "split"

    @property
    def train_devices(self) -> int:
        return self.trainers if self.split else self.gpus

    @property
    def engine_devices(self) -> int:
        return self.gpus - self.trainers if self.split else self.gpus

    @property
    def engine_count(self) -> int:
        return max(1, self.engine_devices // self.engine_unit)

    @property
    def engine_size(self) -> int:
        """Devices of one engine over which its language model lies."""
        return self.tensor * self.data

    @property
    def engine_unit(self) -> int:
        """All devices of one engine."""
        return self.engine_size + self.encoders + self.prefills

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def new_tokens(self) -> float:
        return self.samples * self.mean

    @property
    def in_halves(self) -> bool:
        """Whether layers are computed in halves, and not by oneDNN."""
        s = self.shape
        sizes = (s.hidden, s.heads * s.head, s.kv_heads * s.head, s.intermediate)
        fits = s.family in HALVED and not any(size % HALVES_UNIT for size in sizes)
        return fits and self.tiles and not (self.rank or self.megatron or self.train_devices > 1)

    @property
    def attends_in_tree(self) -> bool:
        """Whether attention of packed training is that of models/tree_loops.py."""
        return self.tiles and not self.shape.head % 32

    @property
    def packed_tokens(self) -> float:
        """Of one step in training: answers, and each group's prompt once."""
        return self.new_tokens + self.prompts * self.prompt

    @property
    def weight_bytes(self) -> float:
        """Bytes of one whole copy that computes, without an adapter."""
        return nf4_bytes(self.shape, self.width) if self.four_bits else self.shape.parameter_count * self.width

    @property
    def sync_bytes(self) -> float:
        """Bytes of one version of the weights that an update sends: those of the adapter alone where there is one,
        codes and scales of a number format.
        """
        if self.sent_bits and not self.rank:
            return encoded_bytes(self.shape, self.sent_bits, self.width)
        return (self.trained_parameters if self.rank else self.shape.parameter_count) * self.width

    @property
    def engine_weight_bytes(self) -> float:
        """Bytes of a whole copy as an engine keeps it: in a number format without the experts, which it decodes as they
        come.
        """
        if not self.engine_holds_codes:
            return self.weight_bytes
        s, held = self.shape, self.shape.matrix_parameters - self.shape.expert_parameters
        return held * self.sent_bits / 8 + (s.parameter_count - held) * self.width

    @property
    def engine_share(self) -> float:
        """Of a copy of the weights what lies on one device of an engine: of each matrix a part, or of the experts; a
        tower lies whole on each.
        """
        apart = self.shape.expert_parameters * self.width * (1 - 1 / self.data)
        tower = 0 if self.shape.tower is None else self.shape.tower.parameter_count * self.width
        return ((self.engine_weight_bytes - apart - tower) / self.tensor + tower) / self.engine_weight_bytes

    @property
    def has_one_module(self) -> bool:
        """Whether engine and trainer compute with the same tensors."""
        return not self.split and self.gpus == 1 and not self.engine_rounds

    @property
    def unit(self) -> str:
        """What an engine draws, one after the other."""
        return "tokens"

    def on_devices(self, **more: Any) -> Workload:
        """The same on other devices."""
        return fill_defaults(more, self)

    @property
    def trained_parameters(self) -> int:
        """Numbers that the optimizer moves."""
        if self.rank:
            return self.shape.lora_parameters(
                self.rank, self.targets if isinstance(self.targets, str) else list(self.targets)
            )
        eye = self.shape.tower
        return self.shape.parameter_count - (eye.parameter_count if eye is not None and not self.tower else 0)


# -- from a recipe -----------------------------------------------------------------------------------


def of_job(job: Job, device: str = "") -> Workload:
    """What the recipe says; `device` names hardware, else it is the place's."""
    model = of_recipe(job.model.path, hub_cache())
    where = find_hardware(device or ("h100" if job.place.device.startswith("cuda") else "cpu"))
    on_cpu = not where.on_gpu
    half = job.model.dtype == "float16"  # no CPU has products of it here
    width = {"float32": 4, "auto": 2 if not on_cpu or _has_bf16() else 4}.get(job.model.dtype, 2)
    widened = on_cpu and width == 2 and (half or not _has_bf16())
    adapter, row, split = job.model.adapter, job.algo.kind, job.place.kind == "split"
    image = 0
    if model.tower is not None:
        image = (64 if on_cpu else IMAGE) if job.model.vision.image_tokens == "auto" else job.model.vision.image_tokens
    prompt = (64 if on_cpu else 512) + image
    assumed = [
        f"prompts of {prompt} tokens{f', {image} of them an image' * bool(image)}",
        "answers half as long as sampling.max_tokens on average",
    ]
    if not device and job.place.device == "auto":
        assumed.append(ON_THIS_CPU)
    wants_reference = bool(job.algo.kl.get("coef")) or row in REFERENCES
    output = job.engine.sampling.max_tokens
    one_base = job.may_share_base and all(p.model in (None, job.model.path) for p in job.policies.values())
    others = tuple(
        OtherPolicy(
            name,
            of_recipe(policy.model, hub_cache()) if policy.model is not None else model,
            policy.frozen,
            on_base=one_base,
        )
        for name, policy in job.policies.items()
    )
    if others:
        beside = ", on devices beside these" if split else ""
        assumed.append(
            f"{', '.join(o.name for o in others)}: memory is counted for each policy, time as if the main one wrote "
            f"and trained all{beside}"
        )
    return Workload(
        model,
        where,
        gpus=job.place.ranks + (job.place.engine_count * job.place.engine_processes if split else 0),
        tensor=job.place.engine_tp if split else 1,
        data=job.place.engine_dp if split else 1,
        encoders=job.place.engine_encoders if split else 0,
        prefills=job.place.engine_tp if split and job.place.engine_prefill else 0,
        policies=others,
        trainers=job.place.ranks if split else 0,
        prompt=prompt,
        output=output,
        mean=max(1, output / 2),
        micro=planned_micro(job, where, model, prompt + job.algo.group_size * output),
        width=width,
        packed_width=4 if widened and (half or not _has_avx2_alone()) else width,
        widened=widened,
        tiles=on_cpu and not half and _has_tiles(),
        splits_masters=on_cpu and width == 2 and not half and job.model.trained_format == "none",
        rank=adapter.rank if adapter.kind != "off" else 0,
        four_bits=adapter.kind == "qlora",
        sent_bits=FORMAT_BITS.get(job.model.engine_format, 0.0),
        engine_rounds=job.model.rollout_format != "none",
        engine_holds_codes=job.model.engine_holds_codes,
        targets=adapter.targets if isinstance(adapter.targets, str) else tuple(adapter.targets),
        offload=job.trainer.memory.offload,
        megatron=job.place.mesh.layers == "megatron",
        overlap=job.place.mesh.overlap,
        ring=job.place.mesh.cp_attention == "ring",
        activations=job.trainer.memory.activations,
        host_optimizer=job.trainer.memory.optimizer == "host",
        optimizer=job.trainer.optimizer.kind,
        reference=model if wants_reference and adapter.kind == "off" else None,
        base_reference=wants_reference and adapter.kind != "off",
        teacher=max(
            (of_recipe(t.path, hub_cache()) for t in job.model.teachers if t.path is not None),
            key=lambda s: s.parameter_count,
            default=None,
        ),
        teachers=1
        if job.trainer.memory.teachers == "one"
        else max(1, sum(t.path is not None for t in job.model.teachers)),
        critic=of_recipe(job.trainer.critic.path or job.model.path, hub_cache()) if row in CRITICS else None,
        proximal=row in PROXIMAL or job.loop.updates_per_step * job.loop.epochs > 1,
        pages=0 if job.engine.kv_pages == "auto" else int(job.engine.kv_pages),
        replays=job.trainer.routing_replay is not False,
        prefill=job.engine.prefill_tokens,
        image=image,
        tower=job.model.vision.tower == "trained",
        assumed=tuple(assumed),
        oversamples=job.loop.oversample.groups > 0,
        **loop_fields(job),
    )


def loop_fields(job: Job) -> dict[str, Any]:
    """What a recipe says of its loop, as the fields of a Workload or a FlowWorkload."""
    return {
        "place": job.place.kind,
        "prompts": job.loop.groups_per_step,
        "group": job.algo.group_size,
        "running": job.engine.max_running,
        "staleness": job.loop.max_staleness,
        "in_flight": job.loop.in_flight,
        "updates": job.loop.updates_per_step,
        "epochs": job.loop.epochs,
        "recompute": job.trainer.memory.recompute,
        "sync": job.sync.kind,
    }


def planned_micro(job: Job, where: Hardware, model: ModelShape, group: int) -> int:
    """Tokens of a micro-batch; `group`: of one at its longest."""
    budget = job.trainer.micro_budget
    chosen = int(micro_tokens(budget, on_gpu=where.on_gpu, vocab=model.vocab).value)
    return chosen if where.on_gpu or budget != "auto" else max(chosen, min(group, MOST_MICRO))


def _has_bf16() -> bool:
    """As `models.load.pick_dtype` asks torch."""
    return bool(_cpu_flags() & {"avx512_bf16", "amx_bf16"})


def _has_tiles() -> bool:
    """As models/processor.py asks torch, of float32 and bfloat16."""
    return _has_avx2_alone() or "avx512_bf16" in _cpu_flags()


def _has_avx2_alone() -> bool:
    """As models/processor.py asks torch."""
    return "avx2" in _cpu_flags() and "avx512f" not in _cpu_flags()


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo") as file:
            return frozenset(file.read().split())
    except OSError:
        return frozenset()


# -- what if -----------------------------------------------------------------------------------------


MOST = 1 << 40  # of anything that is counted


def _parse_count(text: str) -> int:
    """16k -> 16384, 1.5k -> 1536, 300 -> 300."""
    number = float(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)
    if number < 0:
        raise ValueError("it cannot be less than 0")
    if not number <= MOST:
        raise ValueError(f"it is at most {MOST}")
    return int(number)


def _positive_count(text: str) -> int:
    if (number := _parse_count(text)) < 1:
        raise ValueError("it is at least 1")
    return number


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError("it is yes or no")
    return text.lower() in ("true", "yes", "1")


def _parse_recompute(text: str) -> str:
    if text not in ("none", "mlp", "layers"):
        raise ValueError("it is none, mlp or layers")
    return text


def _parse_activations(text: str) -> str:
    if text not in ("device", "host", "disk"):
        raise ValueError("it is device, host or disk")
    return text


def _parse_optimizer(text: str) -> str:
    if text not in ("adamw", "adamw_8bit", "muon"):
        raise ValueError("it is adamw, adamw_8bit or muon")
    return text


def _parse_model(text: str) -> ModelShape | None:
    return None if text.lower() in ("none", "no", "false") else model_shape(text)


def _parse_place(text: str) -> str:
    if text not in ("shared", "split"):
        raise ValueError("it is shared or split")
    return text


QUESTIONS: dict[str, tuple[str, Any]] = {  # --what-if NAME=VALUE -> the field, and how it is read
    "model": ("shape", model_shape),
    "hardware": ("hardware", find_hardware),
    "gpus": ("gpus", _positive_count),
    "place": ("place", _parse_place),
    "trainers": ("trainers", _parse_count),
    "tensor": ("tensor", _positive_count),
    "data": ("data", _positive_count),
    "encoders": ("encoders", _parse_count),
    "prefills": ("prefills", _parse_count),
    "prompts": ("prompts", _positive_count),
    "group": ("group", _positive_count),
    "prompt": ("prompt", _parse_count),
    "output": ("output", _positive_count),
    "mean": ("mean", _positive_count),
    "micro": ("micro", _positive_count),
    "running": ("running", _positive_count),
    "staleness": ("staleness", _parse_count),
    "updates": ("updates", _positive_count),
    "epochs": ("epochs", _positive_count),
    "lora": ("rank", _parse_count),
    "nf4": ("four_bits", _parse_bool),
    "offload": ("offload", _parse_bool),
    "recompute": ("recompute", _parse_recompute),
    "megatron": ("megatron", _parse_bool),
    "overlap": ("overlap", _parse_bool),
    "ring": ("ring", _parse_bool),
    "activations": ("activations", _parse_activations),
    "optimizer": ("optimizer", _parse_optimizer),
    "host_optimizer": ("host_optimizer", _parse_bool),
    "reference": ("reference", _parse_model),
    "image": ("image", _parse_count),
    "tower": ("tower", _parse_bool),
    "reward": ("reward", _parse_model),
    "teacher": ("teacher", _parse_model),
    "critic": ("critic", _parse_model),
    "generate_rate": ("generate_rate", _positive_count),
    "train_rate": ("train_rate", _positive_count),
}


def what_if(words: list[str], start: Workload | None = None) -> Workload:
    """["model=70b", "gpus=64"] laid over a recipe's setting, or over nothing: then model is
    needed, and the rest is chosen and told.
    """
    return fill_defaults(parse_questions(words), start)


def parse_questions(words: list[str]) -> dict[str, Any]:
    """["gpus=64", "output=16k"] -> {"gpus": 64, "output": 16384}, by the names of fields."""
    given: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in QUESTIONS or not equals:
            raise ConfigError(
                f"--what-if {word}: it is NAME=VALUE with NAME one of "
                f"{', '.join(QUESTIONS)}.{suggest_name(name, list(QUESTIONS))}"
            )
        field, read = QUESTIONS[name]
        try:
            given[field] = read(text)
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise ConfigError(f"--what-if {word[:200]}: '{text[:200]}' is not a value of {name}: {error}") from error
    return given


def fill_defaults(given: dict[str, Any], start: Workload | None) -> Workload:
    """The rest of the setting, chosen by rule; what was chosen stands in `assumed`."""
    assumed = [text for text in start.assumed if text != ON_THIS_CPU or "hardware" not in given] if start else []
    if start is None:
        if "shape" not in given:
            raise ConfigError("without a recipe --what-if needs a model: --what-if model=7b")
        given.setdefault("hardware", find_hardware("h100"))
        for name, why in (
            ("prompt", "prompts of 512 tokens"),
            ("output", "answers of at most 2048 tokens"),
            ("prompts", "16 groups a step"),
            ("group", "8 answers a group"),
        ):
            if name not in given:
                assumed.append(why)
        setting = Workload(given["shape"], given["hardware"])
    else:
        setting = start
    setting = replace(setting, **given)
    if setting.four_bits and (setting.shape.experts or not setting.rank):
        raise ConfigError(
            "nf4 = yes: a base in 4 bits is for an adapter over dense layers: give it one, lora=16"
            if not setting.shape.experts
            else f"nf4 = yes: {setting.shape.name} is a mixture of experts, whose experts cannot lie in 4 bits"
        )
    if setting.shape.tower is None:
        if "image" in given or "tower" in given:
            raise ConfigError(f"image and tower: {setting.shape.name} reads text alone")
        setting = replace(setting, image=0, tower=False)
    elif not setting.image and "image" not in given:
        setting = replace(setting, image=IMAGE, prompt=setting.prompt + IMAGE)
        assumed.append(f"an image of {IMAGE} tokens beside each prompt (image=...)")
    elif "image" in given and "prompt" not in given:
        setting = replace(setting, prompt=setting.prompt + setting.image - (start.image if start else 0))
    if "mean" not in given and ("output" in given or start is None):
        setting = replace(setting, mean=max(1, setting.output / 2))
        assumed.append("answers half as long as their limit on average (mean=...)")
    if "gpus" in given and "place" not in given:
        setting = replace(setting, place="shared" if setting.gpus <= 64 else "split")
        assumed.append(f"place = {setting.place}: up to 64 devices together, beyond apart (arXiv:2409.19256)")
    if setting.place == "shared" and setting.gpus > 1 and setting.offload:
        assumed.append("offload of several ranks is not in Rondel yet: it is planned as one rank does it")
    if setting.split and not 0 < setting.trainers < setting.gpus:
        if setting.gpus < 2:
            raise ConfigError("place = split needs at least 2 devices: gpus=2")
        setting = replace(setting, trainers=max(1, setting.gpus // 4))
        assumed.append(f"{setting.trainers} of {setting.gpus} devices train (trainers=...)")
    if setting.activations != "device" and setting.recompute != "layers":
        raise ConfigError(f"activations = {setting.activations} moves the inputs of layers: add recompute=layers")
    if "host" in (setting.activations, "host" if setting.host_optimizer else "") and not setting.hardware.on_gpu:
        raise ConfigError(
            f"activations = host and host_optimizer = yes save memory of a GPU, and {setting.hardware.name} is a CPU"
        )
    if setting.host_optimizer and setting.train_devices > 1:
        raise ConfigError(f"host_optimizer = yes is for one device that trains, and these are {setting.train_devices}")
    if setting.engine_unit > setting.engine_devices:
        beside = setting.encoders or setting.prefills
        key = "encoders" if setting.encoders else "prefills" if beside else "data" if setting.data > 1 else "tensor"
        raise ConfigError(
            f"{key} = {beside or setting.engine_size}, but only {setting.engine_devices} devices serve"
            + f", and an engine is {setting.engine_unit}" * bool(beside)
        )
    if "tensor" not in given and setting.data == 1 and (tensor := _min_tensor_parallel(setting)) > setting.tensor:
        setting = replace(setting, tensor=tensor, prefills=tensor if setting.prefills else 0)
        assumed.append(
            f"an engine is {tensor} devices: the fewest whose memory holds the weights and a third more for the cache"
        )
    return replace(setting, assumed=tuple(dict.fromkeys(assumed)))


def _min_tensor_parallel(setting: Workload) -> int:
    tensor, needed, each = 1, setting.weight_bytes * 4 / 3, 2 if setting.prefills else 1
    while tensor * setting.hardware.memory < needed and 2 * tensor * each <= setting.engine_devices:
        tensor *= 2
    return tensor
