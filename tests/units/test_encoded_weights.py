"""Weights in a number format travel as codes and scales: what an engine holds after an update is decode(encode(W)), bit for
bit, by every transport, and a broken part is noticed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product

import pytest
import torch

from kits.engine import ask, engine, idle, prompt, twin
from kits.families import model as family
from kits.sweeps import covering
from kits.train import model
from rondel.core.errors import SyncError
from rondel.core.types import Begin, Commit, Route
from rondel.formats import FORMATS, format_of
from rondel.models import names
from rondel.models.encoded_linear import encoded_layers
from rondel.models.encoded_weights import part_name, part_shapes
from rondel.models.names import encoding_of
from rondel.models.rounded_weights import WeightFormat
from rondel.models.weight_formats import (
    apply_rollout_format,
    formatted_parameters,
    hold_format,
    send_rollout_format,
)
from rondel.sync.delta import Delta
from rondel.sync.from_disk import FromDisk
from rondel.sync.from_distributed import FromDistributed
from rondel.sync.from_ipc import FromIpc
from rondel.sync.from_tensor import FromTensor
from rondel.sync.update import WeightUpdate
from rondel.train.parallel import ALONE, WeightPublisher

KINDS = ["tensor", "ipc", "disk", "delta", "distributed"]
MODELS = {
    "bf16": lambda: model("llama", "bfloat16"),
    "llama": lambda: model("llama"),
    "qwen3_moe": lambda: twin(family("qwen3_moe")),
    "gpt2": lambda: twin(family("gpt2")),
    "gpt_oss": lambda: twin(family("gpt_oss")),
}


class TrainerEnd:
    """A trainer that publishes as ours does, and whose weights move without training."""

    def __init__(self, loaded, transport):
        self.loaded, self.transport, self.version = loaded, transport, 0
        self.publisher = WeightPublisher(loaded, ALONE, transport)

    async def publish(self, route):
        return self.publisher.publish(route, self.version)

    async def send(self, route):
        await asyncio.to_thread(self.publisher.send, route)

    def train(self):
        self.version += 1
        g = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for p in self.loaded.model.parameters():
                p.mul_((1 + 0.05 * torch.randn(p.shape, generator=g)).to(p.dtype))


def transport(kind, folder):
    if kind in ("disk", "delta"):
        return {"disk": FromDisk, "delta": Delta}[kind](folder / "weights")
    if kind == "distributed":
        return FromDistributed(bucket=20_000, deadline=30.0)
    return {"tensor": FromTensor, "ipc": FromIpc}[kind]()


async def in_thread(f, *args):
    return await asyncio.to_thread(f, *args)


def both_ends(kind, loaded, form, folder, *, held=False):
    """`held`: the engine keeps codes and scales."""
    served = twin(loaded)
    send_rollout_format(loaded.model, form)
    (hold_format if held else apply_rollout_format)(served.model, form)
    trainer = TrainerEnd(loaded, transport(kind, folder))
    e = engine(served, transports={kind: transport(kind, folder)}, run=in_thread)
    return trainer, e, WeightUpdate(trainer.transport, probe=[], score=None, tolerance=1.0, moved=lambda: True)


def rounded(loaded, form):
    """What an engine is to hold, without anything of the package but the format itself."""
    chosen = formatted_parameters(loaded.model)
    for name, p in names.named_weights(loaded.model):
        if name not in chosen:
            yield name, p
        elif chosen[name]:
            yield name, format_of(form).fake(p.mT.contiguous()).mT
        else:
            yield name, format_of(form).fake(p)


def close(trainer, e):
    trainer.transport.close()
    for way in e.arrivals._transports.values():
        way.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "form"),
    covering(
        product(KINDS, MODELS, FORMATS),
        [  # every way, model and format; experts by each way that sends parts
            *[("tensor", "bf16", "fp8"), ("ipc", "llama", "int4"), ("distributed", "gpt_oss", "mxfp4")],
            *(("disk", "qwen3_moe", form) for form in FORMATS),
            *[("ipc", "gpt_oss", "fp8"), ("ipc", "qwen3_moe", "int4"), ("delta", "gpt2", "nvfp4")],
        ],
    ),
)
def test_an_engine_holds_what_is_decoded(kind, name, form, tmp_path):
    trainer, e, sync = both_ends(kind, MODELS[name](), form, tmp_path)

    async def main():
        for version in (1, 2):
            trainer.train()
            assert await sync(trainer, e) == version == e.version
            held = dict(names.named_weights(e.loaded.model))
            for own, expected in rounded(trainer.loaded, form):
                assert torch.equal(held[own], expected), own
        told = await e.generate(ask(prompt(2, 9), n=4))
        fresh = await engine(twin(e.loaded)).generate(ask(prompt(2, 9), n=4))
        assert told.tokens == fresh.tokens and told.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
        idle(e)

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.parametrize("kind", ["ipc", "disk", "distributed"])
def test_an_update_has_the_bytes_of_the_format(kind, tmp_path):
    """What travels is counted: codes and scales of the matrices, the rest as it is."""
    loaded = model("llama", "bfloat16")
    whole = sum(p.nbytes for _, p in names.named_weights(loaded.model))
    trainer, e, sync = both_ends(kind, loaded, "int4", tmp_path)
    chosen = formatted_parameters(loaded.model)
    expected = sum(
        format_of("int4").stored_bytes(tuple(p.shape)) if n in chosen else p.nbytes
        for n, p in names.named_weights(loaded.model)
    )

    async def main():
        trainer.train()
        await sync(trainer, e)
        status = await e.status()
        files = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.name.startswith("model"))
        assert expected <= status.bytes_copied == (files or expected) < expected + 20_000 and expected < 0.6 * whole
        if kind != "disk":
            assert status.bytes_copied == expected

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "form"),
    covering(
        product(KINDS, ["bf16", "llama", "qwen3_moe"], FORMATS),
        [
            *[("tensor", "bf16", "fp8"), ("disk", "bf16", "nvfp4"), ("distributed", "bf16", "mxfp4")],
            *(("ipc", "llama", form) for form in FORMATS),
            ("delta", "qwen3_moe", "int4"),
        ],
    ),
)
def test_an_engine_that_holds_codes_draws_the_same(kind, name, form, tmp_path):
    """Beside one that holds what they decode to: the same weights, tokens and logprobs, in the bytes of the format, at every
    update; what is mapped from a trainer's memory is not copied.
    """
    trainer, e, sync = both_ends(kind, MODELS[name](), form, tmp_path, held=True)
    layers = encoded_layers(e.loaded.model)
    chosen = {
        n: p for n, p in trainer.loaded.model.named_parameters() if n in formatted_parameters(trainer.loaded.model)
    }
    assert layers and set(layers) == {n for n in chosen if "experts" not in n}

    async def main():
        for version in (1, 2):
            trainer.train()
            assert await sync(trainer, e) == version == e.version
            truth = twin(trainer.loaded)
            with torch.no_grad():
                for own, expected in rounded(trainer.loaded, form):
                    truth.model.get_parameter(own).copy_(expected)
                    if own in layers:
                        assert torch.equal(layers[own].weight, expected), own
            told = await e.generate(ask(prompt(2, 9), n=6))
            other = await engine(truth).generate(ask(prompt(2, 9), n=6))
            near = 1e-5 if name != "bf16" else 0.02
            assert told.tokens == other.tokens and told.logprobs == pytest.approx(other.logprobs, abs=near)
        idle(e)
        whole = sum(p.nbytes for _, p in names.named_weights(trainer.loaded.model))
        saved = sum(p.nbytes - format_of(form).stored_bytes(tuple(p.shape)) for n, p in chosen.items() if n in layers)
        room = 4096 + 4 * 64 * len(chosen)  # a segment's head, and where its tensors may begin
        assert (await e.status()).memory["weights"] == pytest.approx(whole - saved, abs=room)
        assert room < saved / 2

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.parametrize("beside", [True, False])
def test_a_broken_part_of_what_is_held(beside):
    loaded = model("llama")
    trainer, e, _ = both_ends("tensor", loaded, "int4", None, held=True)
    trainer.train()
    manifest, route = trainer.publisher.publish(Route("tensor"), 1)
    name = next(n for n in reversed(route.data) if n.endswith("weight_scale"))
    before = {n: {p: t.clone() for p, t in layer.parts.items()} for n, layer in encoded_layers(e.loaded.model).items()}

    async def main():
        with pytest.raises(SyncError, match="other bits"):
            await e.receive(Begin(manifest, beside=beside))
            await e.receive(replace(route, data=route.data | {name: route.data[name] * 2}))
            await e.receive(Commit(manifest.version, manifest.root))
        after = encoded_layers(e.loaded.model)
        same = all(torch.equal(t, after[n].parts[p]) for n, parts in before.items() for p, t in parts.items())
        assert same == beside, "beside the old version it goes on serving; over it, the engine refuses"

    asyncio.run(main())


def test_shapes_of_parts_are_told_without_a_weight():
    for form in FORMATS:
        for transposed, shape in product((False, True), [(48, 80), (3, 33, 50)]):
            how, weight = (
                WeightFormat(format_of(form), transposed),
                torch.randn(shape, generator=torch.Generator().manual_seed(0)),
            )
            found = {name: names.shape_of(part) for name, part in how.encode(weight).items()}
            assert found == part_shapes(how, shape), form


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("what", ["flipped", "missing", "another format"])
def test_a_broken_part_leaves_no_new_version(what, beside):
    """By digest, by name, by shape: beside the old version, it goes on serving; over it, the engine refuses."""
    loaded = model("llama")
    trainer, e, _ = both_ends("tensor", loaded, "fp8", None)
    trainer.train()
    manifest, route = trainer.publisher.publish(Route("tensor"), 1)
    name = next(n for n in route.data if n.endswith("weight_scale_inv"))
    data = dict(route.data)
    if what == "flipped":
        data[name] = data[name] * 2
    elif what == "missing":
        del data[name]
    else:
        send_rollout_format(loaded.model, "int4")
        manifest, route = trainer.publisher.publish(Route("tensor"), 1)
        data = dict(route.data)
    before = {n: p.clone() for n, p in names.named_weights(e.loaded.model)}

    async def main():
        with pytest.raises(
            SyncError, match={"flipped": "other bits", "missing": "did not travel"}.get(what, "missing")
        ):
            await e.receive(Begin(manifest, beside=beside))
            await e.receive(replace(route, data=data))
            await e.receive(Commit(manifest.version, manifest.root))
        assert e.version == 0
        if beside or what == "another format":
            assert all(torch.equal(before[n], p) for n, p in names.named_weights(e.loaded.model))

    asyncio.run(main())


def test_names_of_parts():
    assert part_name("model.layers.0.q_proj.weight", "weight_scale") == "model.layers.0.q_proj.weight_scale"
    assert part_name("model.layers.0.experts.gate_up_proj", "weight") == "model.layers.0.experts.gate_up_proj.weight"
    loaded = model("llama")
    assert encoding_of(loaded.model) is None
    send_rollout_format(loaded.model, "int4")
    assert encoding_of(loaded.model).forms.keys() == formatted_parameters(loaded.model).keys()
