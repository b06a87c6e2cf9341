"""The kernels of a CPU against torch's own operations: values, gradients, and bits that depend on no neighbour."""

from __future__ import annotations

import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kits.engine import SIZE
from rondel.algos.divergence import Divergence
from rondel.core.errors import EngineError, UserError
from rondel.core.events import Warned, subscribe
from rondel.core.types import Sampling
from rondel.generate.engine.builtin.sampler import draw_from, read_draws, sampling_weights, weighed_rows
from rondel.models import cpu_kernels, native_library
from rondel.models.cpu_kernels import attend_masked, takes_mask
from rondel.models.dense_attention import ScoreRule, dense_attention
from rondel.models.head import LMHead
from rondel.models.linear import modules_alone
from rondel.models.load import load_model
from rondel.models.names import DigestSums, tensor_digest
from rondel.models.native_library import SIGNATURES
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.paged_layout import DecodeBatch
from rondel.train import logprobs
from rondel.train.sampling_mask import SupportMask
from rondel.train.teacher_distributions import TeacherDistribution, TeacherOpinion

pytestmark = pytest.mark.skipif(native_library.native_library() is None, reason="needs a C++ compiler")
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [(FP32, FP32), (FP32, BF16), (BF16, BF16)]  # of a stream and of the weights


@pytest.fixture
def plain(monkeypatch):
    """From its call on torch's operations compute everything."""
    return lambda: monkeypatch.setattr(cpu_kernels, "_loaded", None)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "_loaded", native_library.native_library())


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = FP32, wide: float = 1.0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * wide
    return x.to(dtype).requires_grad_()


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of a number of its size."""
    assert a.dtype == b.dtype and a.shape == b.shape
    step = 2e-6 if dtype == FP32 else 1e-2
    torch.testing.assert_close(a, b, rtol=step, atol=step * float(b.abs().max()))


def gradients(run, *inputs: torch.Tensor) -> list[torch.Tensor]:
    out = run(*inputs)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, pull)]


@pytest.mark.parametrize(("stream", "weights"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 576), (3, 100), (130, 48)])
def test_norm(stream, weights, shape):
    norm = LlamaRMSNorm(shape[-1], eps=1e-5)
    x, weight = drawn(*shape, dtype=stream, wide=3), drawn(shape[-1], seed=1, dtype=weights)

    def theirs(x, weight):
        norm.weight = torch.nn.Parameter(torch.empty(0))
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (weight * normed.to(x.dtype)).to(weight.dtype)

    ours = gradients(lambda x, w: cpu_kernels.rms_norm(x, w, 1e-5), x, weight)
    for got, want in zip(ours, gradients(theirs, x, weight), strict=True):
        close(got, want, weights if weights == stream else BF16)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(7, 1536), (3, 100), (1, 1)])
def test_gate(dtype, shape):
    gate, up = drawn(*shape, dtype=dtype, wide=6), drawn(*shape, seed=1, dtype=dtype)
    ours, theirs = (gradients(f, gate, up) for f in (cpu_kernels.swiglu, lambda g, u: F.silu(g) * u))
    for got, want in zip(ours, theirs, strict=True):
        close(got, want, dtype)


def test_gradients_that_lie_in_another_order():
    """As those of a norm over heads, which are transposed behind it: their copy lives until it was read."""
    x, weight, pull = drawn(40, 6, 16), drawn(16, seed=1), drawn(6, 40, 16, seed=2).detach()
    for run in (lambda x: cpu_kernels.rms_norm(x, weight, 1e-6), lambda x: cpu_kernels.swiglu(x, x)):
        across, along = (
            torch.autograd.grad(out, x, grad)[0]
            for out, grad in ((run(x).transpose(0, 1), pull), (run(x), pull.transpose(0, 1).contiguous()))
        )
        assert torch.equal(across, along) and across.any()


def test_gate_of_extreme_numbers():
    gate = torch.tensor([0.0, -0.0, 88.0, -88.0, 200.0, -200.0, float("inf"), float("nan"), 1e-30, 3e38])
    ours, theirs = cpu_kernels.swiglu(gate, torch.ones(10)), F.silu(gate)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-34, equal_nan=True)


@pytest.mark.parametrize(("angles", "dtype"), DTYPES)
def test_rotation_has_the_plain_bits(angles, dtype):
    """As modules rotate and `rondel_attention` rounds; the gradient is that of bfloat16 numbers, not of fp32 ones."""
    t, heads, size = 13, 3, 64
    q, k = drawn(1, t, heads, size, dtype=dtype), drawn(1, t, 1, size, seed=1, dtype=dtype)
    turns = torch.arange(t)[None, :, None] * torch.rand(size // 2, generator=torch.Generator().manual_seed(2))
    turns = torch.cat([turns, turns], -1)
    cosine, sine = turns.cos().to(angles), turns.sin().to(angles)

    def rotated(function):
        def run(q, k):
            q, k = function(q.transpose(1, 2), k.transpose(1, 2), cosine, sine)
            return torch.cat([q.to(dtype), k.to(dtype)], 1)

        return gradients(run, q, k)

    ours = rotated(lambda *args: cpu_kernels.rotate_pair(refuse, *args))
    theirs = rotated(apply_rotary_pos_emb)
    assert torch.equal(ours[0], theirs[0]) and ours[0].any()
    for got, want in zip(ours[1:], theirs[1:], strict=True):
        close(got, want, dtype)


def refuse(*args, **kwargs):
    raise AssertionError("the kernel computes this")


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("many", [1, 3])
def test_attention_of_training(dtype, many):
    """Three segments, six query heads over two key heads, 5 queries each on 9 keys."""
    q, k, v = (drawn(3, heads, n, 16, seed=i, dtype=dtype) for i, (heads, n) in enumerate([(6, 5), (2, 9), (2, 9)]))
    mask = torch.rand(many, 1, 5, 9, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[..., 0] = True
    rule = ScoreRule(0.3)
    assert takes_mask(q, k, v, rule) and not takes_mask(q, k, v.double(), rule)
    ours = gradients(lambda q, k, v: attend_masked(q, k, v, mask, rule.scale), q, k, v)
    found = ours, gradients(lambda q, k, v: dense_attention(q, k, v, rule, mask, None, False), q, k, v)
    for got, want in zip(*found, strict=True):
        close(got, want, dtype)


def decode_batch(shared: bool) -> DecodeBatch:
    """Four requests of 3, 70, 5 and 4 tokens, of which the first and the third share two, the others one."""
    generator = torch.Generator().manual_seed(3)
    slots, lengths = torch.randperm(300, generator=generator)[:280].view(4, 70), torch.tensor([3, 70, 5, 4])
    slots[2, :2], slots[3, 0] = slots[0, :2], slots[1, 0]
    if not shared:
        return DecodeBatch(slots, lengths)
    above = torch.tensor([2, 1, 2, 1])
    own = torch.stack([row.roll(-int(n)) for row, n in zip(slots, above)])[:, :69]
    prefix = torch.stack([slots[0, :2], torch.stack([slots[1, 0], slots[9 % 4, 5]])])
    grid, place = torch.tensor([[0, 2], [1, 3]]), torch.tensor([0, 2, 1, 3])
    return DecodeBatch(own, lengths - above, prefix, torch.tensor([2, 1]), grid, place)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("reach", [{}, {"window": 4}, {"window": 23}, {"chunk": 3}, {"window": 20, "chunk": 16}])
def test_attention_of_a_decode_step(reach, dtype, plain):
    q, keys, values = (
        drawn(*s, seed=i, dtype=dtype).detach() for i, s in enumerate([(4, 6, 64), (2, 300, 64), (2, 300, 64)])
    )
    rule = ScoreRule(0.125, **reach)
    whole, families = (decode_batch(shared).attend(q, keys, values, rule) for shared in (False, True))
    assert torch.equal(whole, families)
    batch = decode_batch(False)
    for row in range(4):
        alone = DecodeBatch(batch.own[row : row + 1, : batch.lengths[row]], batch.lengths[row : row + 1])
        assert torch.equal(alone.attend(q[row : row + 1], keys, values, rule)[0], whole[row])
    plain()
    for shared in (False, True):
        close(whole, decode_batch(shared).attend(q, keys, values, rule), dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rows_at_once", [100, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_logprobs_and_entropies(dtype, rows_at_once, biased, plain, monkeypatch):
    monkeypatch.setattr(logprobs, "LOGITS", rows_at_once * 100)
    hidden, weight = drawn(11, 16, wide=2), drawn(100, 16, seed=1, dtype=dtype, wide=2)
    bias = drawn(100, seed=2, dtype=dtype) if biased else None
    head, target = LMHead(weight, bias, scale=0.5), torch.arange(0, 99, 9)
    found = []

    def both(hidden, weight, *bias):
        return torch.cat(logprobs.logprob_and_entropy(hidden, target, head, temperature=0.7))

    for is_plain in (False, True):
        if is_plain:
            plain()
        found.append(gradients(both, hidden, weight, *([bias] if biased else [])))
    for got, want in zip(*found, strict=True):
        close(got, want, dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_gradients_of_logits_take_their_place(rows):
    """bfloat16 rows are written over fp32 ones that nobody reads any more, whatever the number of threads."""
    z, target, before = drawn(rows, 301, wide=3).detach(), torch.arange(rows), torch.get_num_threads()
    terms = cpu_kernels.logprob_terms(z, target, 0.7)
    pulls = drawn(rows, seed=1).detach(), drawn(rows, seed=2).detach()
    want = cpu_kernels.logit_gradients(z.clone(), target, terms, pulls, 0.5, 0.7, dtype=FP32)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        own = z.clone()
        got = cpu_kernels.logit_gradients(own, target, terms, pulls, 0.5, 0.7, dtype=BF16)
        assert got.data_ptr() == own.data_ptr() and torch.equal(got, want.bfloat16())
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows_at_once", [100, 4])
def test_every_pass_of_a_step_has_the_same_bits(rows_at_once, plain, monkeypatch):
    """A token's log-probability and entropy in a pass under truncated support, with teachers, with more tokens and with
    the likeliest one are those of a pass without, and so a ratio of two of them is 1; gradients are torch's.
    """
    monkeypatch.setattr(logprobs, "LOGITS", rows_at_once * 100)
    hidden, weight, target = drawn(11, 16, wide=2), drawn(100, 16, seed=1, wide=2), torch.arange(0, 99, 9)
    head, more = LMHead(weight), torch.stack([target, target + 1], -1)
    some = SupportMask(torch.tensor([9, 10, 11, 36, 40]), torch.tensor([1, 1, 1, 4, 4]))  # of tokens 1 and 4
    teacher = TeacherOpinion(LMHead(drawn(100, 16, seed=2).detach()), hidden.detach(), torch.arange(11), torch.ones(11))
    taught = TeacherDistribution([teacher], 0.7)

    def distances(how):
        return logprobs.logprob_entropy_and_kl(hidden, target, head, taught, temperature=0.7, apart_by=how)

    passes = {
        "support": lambda: logprobs.logprob_and_entropy(hidden, target, head, temperature=0.7, kept=some),
        "teacher": lambda: distances(Divergence()),
        "another divergence": lambda: distances(Divergence(0.3, 4)),
        "more tokens": lambda: logprobs.logprob_entropy_and_top(hidden, target, head, more, temperature=0.7),
    }
    found = []
    for is_plain in (False, True):
        if is_plain:
            plain()
        alone = logprobs.logprob_and_entropy(hidden, target, head, temperature=0.7)
        for name, run in passes.items():
            told = run()
            whole = [t for t in range(11) if name != "support" or t not in some.row]
            assert all(torch.equal(told[i][whole], alone[i][whole]) for i in range(2)), name
            pulls = [torch.randn(x.shape, generator=torch.Generator().manual_seed(9)) for x in told]
            loss = sum((x * pull).sum() for x, pull in zip(told, pulls))
            found.append([*(x.detach() for x in told), *torch.autograd.grad(loss, [hidden, weight])])
        best = logprobs.logprob_and_best(hidden, target, head, temperature=0.7)
        assert is_plain or (torch.equal(best[0], alone[0]) and torch.equal(told[2][:, 0], alone[0]))
        found.append([*best])
    for ours, theirs in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        for got, want in zip(ours, theirs, strict=True):
            close(got, want, FP32)


@pytest.mark.parametrize("size", [1, 63, 70_001])
def test_numbers_that_are_rounded_into_their_place(size):
    exact = torch.randn(size, generator=torch.Generator().manual_seed(size))
    exact[0] = float("inf")
    exact[3:4] = 1e-40  # which AVX-512's instruction rounds to 0
    held = exact.bfloat16()
    assert cpu_kernels.round_into(held, exact) == 0
    moved = exact * torch.where(torch.arange(size) % 3 == 1, 1.1, 1.0)
    wanted, before = moved.bfloat16(), held.clone()
    changed = cpu_kernels.round_into(held, moved)
    assert torch.equal(held.view(torch.int16), wanted.view(torch.int16))
    assert changed == int((before.view(torch.int16) != wanted.view(torch.int16)).sum()) and (changed > 0 or size == 1)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("size", [1, 65, 70_001])
def test_numbers_of_which_a_rounded_copy_and_the_rest_are_kept(size, plain, monkeypatch):
    """To the bit, ties among them: of one that was rounded down, 16 bits say what of one that was rounded up."""
    if plain:
        monkeypatch.setattr(cpu_kernels, "has_kernels", lambda *tensors: False)
    exact = torch.randn(size, generator=torch.Generator().manual_seed(size))
    bits = exact.view(torch.int32)
    bits[::61] = bits[::61] & -65536 | 0x8000  # half way between two numbers of bfloat16
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, -1e-45, 3.4e38, 1.0])
    exact[-min(size, 8) :] = odd[: min(size, 8)]
    held, before = torch.ones_like(exact, dtype=BF16), torch.ones(1, dtype=BF16)
    changed, (low, ties) = cpu_kernels.split_bits(held, exact)
    assert torch.equal(held.view(torch.int16), exact.bfloat16().view(torch.int16))
    assert changed == int((held.view(torch.int16) != before.view(torch.int16)).sum())
    assert low.dtype == torch.int16 and len(ties) == int(
        ((bits - (held.view(torch.int16).int() << 16)) == 1 << 15).sum()
    )
    assert size < 65 or len(ties) > 0
    again = torch.full_like(exact, 7.0)
    cpu_kernels.join_bits(again, held, low, ties)
    assert torch.equal(again.view(torch.int32), exact.view(torch.int32))
    assert cpu_kernels.split_bits(held, exact, low)[1][0] is low
    bits.copy_(0x3F808000)  # 1 and a half step, which is rounded down
    assert cpu_kernels.split_bits(held, exact)[1] is None or size < 1100, "more than chance has"


def test_gradient_that_is_added():
    total, grad = drawn(70, 3).detach(), drawn(70, 3, seed=1, dtype=BF16).detach()
    want = total + grad.float()
    cpu_kernels.add_gradient(total, grad)
    assert torch.equal(total, want)
    other = drawn(70, 3, seed=2, dtype=BF16).detach()
    assert torch.equal(cpu_kernels.join_halves(grad, other), grad.float() + other.float())


@pytest.mark.parametrize(("stream", "weights"), DTYPES)
def test_a_row_has_the_same_bits_among_others_and_on_two_threads(stream, weights):
    x, weight = drawn(300, 100, dtype=stream).detach(), drawn(100, seed=1, dtype=weights).detach()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        norm, gate = cpu_kernels.rms_norm(x, weight, 1e-6), cpu_kernels.swiglu(x, x)
        torch.set_num_threads(1)
        assert torch.equal(cpu_kernels.rms_norm(x, weight, 1e-6), norm)
        assert torch.equal(cpu_kernels.swiglu(x, x), gate)
    finally:
        torch.set_num_threads(threads)
    for row in (0, 17, 299):
        assert torch.equal(cpu_kernels.rms_norm(x[row], weight, 1e-6), norm[row])
        assert torch.equal(cpu_kernels.swiglu(x[row], x[row]), gate[row])


@pytest.mark.parametrize(
    "kind", [{"random": "llama", **SIZE}, {"random": "mlp_policy", "observation_size": 4, "action_size": 2}]
)
def test_every_kind_of_model_computes_by_them(plain, kind):
    """Else a step of a policy had other bits after a model of text was loaded beside it, and its replay failed."""
    plain()
    load_model(kind)
    assert cpu_kernels.library() is native_library.chosen_library()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_kernels_is_the_model_without(dtype, plain):
    loaded = load_model({"random": "llama", **SIZE, "seed": 3}, dtype=dtype)
    tokens, layout = (
        torch.arange(3, 23),
        PackedLayout([PackedSegment(0, 12), PackedSegment(12, 5, 0), PackedSegment(17, 3, 0)]),
    )
    positions = torch.cat([torch.arange(12), torch.arange(12, 17), torch.arange(12, 15)])
    library, calls, found = cpu_kernels.library(), [], []
    counted = SimpleNamespace(
        **{name: lambda *args, name=name: (calls.append(name), getattr(library, name)(*args))[1] for name in SIGNATURES}
    )
    cpu_kernels.use_library(counted)
    for is_plain in (False, True):
        if is_plain:
            plain()
        with modules_alone():
            hidden = loaded.hidden_states(tokens, positions, layout)
        hidden.float().sin().sum().backward()
        found.append([hidden.detach(), *(p.grad.clone() for p in loaded.model.parameters() if p.grad is not None)])
        loaded.model.zero_grad()
    layers = len(loaded.model.model.layers)
    assert calls.count("rondel_norm_forward") == calls.count("rondel_norm_backward") == 2 * layers + 1
    assert calls.count("rondel_gate_forward") == calls.count("rondel_gate_backward") == layers
    assert calls.count("rondel_rotate") == 4 * layers  # q and k, forward and backward
    assert calls.count("rondel_softmax") == calls.count("rondel_softmax_backward") > 0
    assert len(found[0]) == len(found[1]) > 10
    for got, want in zip(*found, strict=True):
        assert float((got - want).norm()) <= (1e-5 if dtype == "float32" else 2e-2) * float(want.norm())


@pytest.fixture
def warnings():
    told: list[str] = []
    forget = subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    yield told
    forget()


def test_a_compiler_that_fails_is_told_once_and_torch_computes(monkeypatch, tmp_path, warnings):
    def fail(command, **options):
        raise subprocess.CalledProcessError(1, command, stderr="x.cpp:1: error: no such instruction")

    monkeypatch.setenv("RONDEL_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", fail)
    assert native_library.native_library.__wrapped__() is None
    assert len(warnings) == 1 and "no such instruction" in warnings[0] and "RONDEL_CPU_KERNELS=0" in warnings[0]


def test_without_a_compiler_one_line_says_how_to_get_one(monkeypatch, warnings):
    monkeypatch.setenv("PATH", "")
    assert native_library.native_library.__wrapped__() is None
    assert len(warnings) == 1 and "apt install g++" in warnings[0] and "\n" not in warnings[0]


def test_workers_that_come_at_once_compile_once(monkeypatch, tmp_path):
    """The others wait for the first one, and later processes read its file and start no compiler."""
    compiled = []

    def compile_slowly(command, **options):
        compiled.append(command)
        time.sleep(0.05)
        Path(command[command.index("-o") + 1]).write_bytes(b"made")

    monkeypatch.setenv("RONDEL_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", compile_slowly)
    with ThreadPoolExecutor(4) as workers:
        files = {*workers.map(native_library._compiled, [shutil.which("c++")] * 4)}
    assert len(files) == 1 and files.pop().read_bytes() == b"made"
    sources = [word for command in compiled for word in command if word.endswith(".cpp")]
    assert sorted(sources) == sorted(map(str, native_library.SOURCES)), "each once"
    assert [command for command in compiled if "-shared" in command] == compiled[-1:], "joined once, behind them"


def test_the_environment_chooses_and_old_processors_have_torch(monkeypatch):
    found = {}
    for said in ("0", "1", ""):
        monkeypatch.setenv("RONDEL_CPU_KERNELS", said)
        for flags in ("sse4_2 avx", "avx2 fma"):
            monkeypatch.setattr(native_library, "_processor", lambda flags=flags: f"flags : {flags}\nmodel name : x")
            found[said, flags] = native_library.chosen_library() is not None
    assert [*found.values()] == [False, False, True, True, False, True]
    monkeypatch.setenv("RONDEL_CPU_KERNELS", "yes")
    with pytest.raises(UserError, match="write 0 for torch's operations, or 1"):
        native_library.chosen_library()


@pytest.mark.parametrize("size", [3, 8 * 1023, 8 * 1023 * 5 + 8 * 77 + 5, 8 * 1023 * 200 + 64])
def test_a_digest_with_and_without_the_loops(size, plain):
    whole = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    pieces = DigestSums(size, device=whole.device)
    for start in range(0, size, 8 * 1500 + 3):  # rows that begin anywhere
        pieces.add_bytes(start, whole[start : start + 8 * 1500 + 3])
    by_loops = tensor_digest(whole)
    plain()
    assert by_loops == pieces.digest() == tensor_digest(whole)


@pytest.mark.parametrize("size", [40, 256, 1000, 4096 + 77])
def test_draws_are_those_of_the_sampler(size):
    """Tokens, log-probabilities and masses of torch's operations, greedy rows and cut tokens among them; a row has its
    bits whoever is beside it.
    """
    generator = torch.Generator().manual_seed(size)
    samplings = [Sampling(temperature=t) for t in (1.0, 0.7, 0.0, 1.6, 1.0, 0.0)]
    every = list(range(len(samplings)))
    for wide in (1.0, 8.0, 60.0):
        logits = torch.randn(len(samplings), size, generator=generator) * wide
        logits[4, torch.rand(size, generator=generator) < 0.8] = -torch.inf
        noise = torch.rand(len(samplings), generator=generator, dtype=torch.float64).tolist()
        assert weighed_rows(logits, samplings) == []
        drawn, none = draw_from(logits, samplings, noise, [])
        by_torch, weights = draw_from(logits.clone(), samplings, noise, every)
        assert len(none) == 0 and torch.equal(weights, sampling_weights(logits.clone(), samplings))
        assert torch.equal(drawn[0], by_torch[0])
        torch.testing.assert_close(drawn[1:], by_torch[1:], rtol=1e-6, atol=1e-6)
        mixed, some = draw_from(logits.clone(), samplings, noise, [1, 4])
        assert torch.equal(some, weights[[1, 4]])
        assert torch.equal(mixed[:, [1, 4]], by_torch[:, [1, 4]])
        assert torch.equal(mixed[:, [0, 2, 3, 5]], drawn[:, [0, 2, 3, 5]])
        for u in (0.0, 1 - 2.0**-53):  # never a token that was cut
            chosen = draw_from(logits, samplings, [u] * len(samplings), [])[0][0].long()
            assert bool(logits.gather(1, chosen[:, None]).isfinite().all())


def test_draws_of_logits_that_are_not_finite_or_cut():
    for odd in (torch.nan, torch.inf):
        logits = torch.zeros(1, 300)
        logits[0, 17] = odd
        with pytest.raises(EngineError, match="not finite"):
            read_draws(draw_from(logits, [Sampling()], [0.3], [])[0])
    with pytest.raises(EngineError, match="not finite"):
        read_draws(draw_from(torch.full((1, 300), -torch.inf), [Sampling()], [0.3], [])[0])
    cuts = [Sampling(), Sampling(top_p=0.9), Sampling(top_p=0.9, temperature=0)]
    assert weighed_rows(torch.zeros(3, 300), cuts) == [1]
    assert weighed_rows(torch.zeros(3, 300, dtype=torch.float64), cuts) == [0, 1, 2]


def test_how_far_cores_are_from_each_other_is_told_where_two_compute():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert 0.0 <= cpu_kernels.hop_ns() < 5e7
        torch.set_num_threads(1)
        assert cpu_kernels.hop_ns() == 0.0
    finally:
        torch.set_num_threads(before)
