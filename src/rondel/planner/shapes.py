"""How large a model is: the numbers of its config.json, and what they say of weights, arithmetic and cache. No torch.

D hidden  L layers  H heads  K key-value heads  d head size  F feed-forward  V vocabulary  E experts, k of them a token
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rondel.core.errors import ModelError
from rondel.core.registry import suggest_name
from rondel.planner import tower
from rondel.planner.families import DEFAULTS, MODELS, PUBLIC
from rondel.planner.mixers import (
    NO_INDEXER,
    NO_STATE,
    IndexerShape,
    RecurrentShape,
    indexer_shape,
    recurrent_shape,
)
from rondel.planner.tower import VisionTower


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434): what is cached is `kv` compressed
    numbers and `rope` rotary ones a token.
    """

    q: int | None
    kv: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model: `shape("70b").parameter_count` is 70,553,706,496.

    dense    layers with a feed-forward of `intermediate`; the others have `experts`
    biases   numbers a layer that are no matrix: biases of the projections
    norms    norms of width D a layer;  qk_norm: and one of width d for queries and one for keys
    recurrent  layers whose attention is linear; they keep a state of fixed size instead of keys and values
    indexer  layers that choose the keys they attend to, with a key a token of their own
    gate     the attention's output is gated: queries are twice as wide
    bits     of a stored weight: 16, or what the config's quantization says
    tower    its eye; None for a model that reads text alone
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    vocab: int
    tied: bool = False
    norms: int = 2
    qk_norm: bool = False
    biases: int = 0
    experts: int = 0
    per_token: int = 0
    expert: int = 0
    shared: int = 0
    shared_gate: bool = False
    dense: int = 0
    latent: LatentAttention | None = None
    recurrent: RecurrentShape = NO_STATE
    indexer: IndexerShape = NO_INDEXER
    gate: bool = False
    family: str = ""
    tower: VisionTower | None = None
    bits: float = 16
    source: str = ""

    # -- numbers ---------------------------------------------------------------------------------

    @property
    def attention_shapes(self) -> dict[str, tuple[int, int]]:
        """The matrices of one attention, (in, out)."""
        if (m := self.latent) is not None:
            q = {"q_proj": (self.hidden, self.heads * (m.nope + m.rope))}
            if m.q is not None:
                q = {"q_a_proj": (self.hidden, m.q), "q_b_proj": (m.q, self.heads * (m.nope + m.rope))}
            return {
                **q,
                "kv_a_proj_with_mqa": (self.hidden, m.kv + m.rope),
                "kv_b_proj": (m.kv, self.heads * (m.nope + m.value)),
                "o_proj": (self.heads * m.value, self.hidden),
            }
        q_size, kv_size = self.heads * self.head, self.kv_heads * self.head
        return {
            "q_proj": (self.hidden, q_size * (2 if self.gate else 1)),
            "k_proj": (self.hidden, kv_size),
            "v_proj": (self.hidden, kv_size),
            "o_proj": (q_size, self.hidden),
        }

    @property
    def attention_parameters(self) -> int:
        """Numbers of one attention's matrices."""
        return sum(i * o for i, o in self.attention_shapes.values())

    @property
    def attention_layers(self) -> int:
        """Those that cache keys and values."""
        return self.layers - self.recurrent.layers

    @property
    def dense_layers(self) -> int:
        return self.dense if self.experts else self.layers

    def _feed_forward(self, experts: int) -> int:
        """Of all layers, with so many experts counted in each of those that have any."""
        one = 3 * self.hidden
        mixed = (self.layers - self.dense_layers) * (
            experts * one * self.expert + one * self.shared + self.hidden * (self.experts + self.shared_gate)
        )
        return self.dense_layers * one * self.intermediate + mixed

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def body_parameters(self) -> int:
        """Numbers of all layers and the last norm: without embedding and head."""
        return self._count_body(self.experts)

    def _count_body(self, experts: int) -> int:
        inside = 2 * self.head * self.qk_norm + self.biases
        if self.latent is not None:
            inside += self.latent.kv + (self.latent.q or 0)
        norms = self.layers * self.norms * self.hidden
        mixing = self.attention_layers * (self.attention_parameters + inside)
        mixing += self.recurrent.layers * self.recurrent.numbers + self.indexer.layers * self.indexer.numbers
        return mixing + norms + self._feed_forward(experts) + self.hidden

    @property
    def parameter_count(self) -> int:
        """All of them; those of its eye are looked through once an image, and by no token."""
        return (
            self.body_parameters
            + self.embedding_parameters * (1 if self.tied else 2)
            + (self.tower.parameter_count if self.tower else 0)
        )

    @property
    def active_parameters(self) -> int:
        """Numbers that one token is multiplied with: body and head, k experts of E."""
        return self._count_body(self.per_token) + self.embedding_parameters

    @property
    def expert_parameters(self) -> int:
        """What expert parallelism divides."""
        return (self.layers - self.dense_layers) * self.experts * 3 * self.hidden * self.expert

    def kv_bytes(self, bytes_each: float = 2, *, tensor: int = 1) -> int:
        """Cache of one token in all layers, on each of `tensor` devices that share the heads: 2·L·K·d·bytes between
        them. Latents and the keys of indexers are read by all heads, so every device has all of them.
        """
        heads, every = 2 * self.kv_heads * self.head, 0
        if (m := self.latent) is not None:
            heads, every = 0, m.kv + m.rope
        shared = self.attention_layers * every + self.indexer.layers * self.indexer.key
        return int((self.attention_layers * heads / tensor + shared) * bytes_each)

    def trained_kv_bytes(self, bytes_each: float = 2) -> int:
        """Keys and values of one token in all layers, as training makes them: of latents, too."""
        m, each = self.latent, 2 * self.kv_heads * self.head
        if m is not None:
            each = self.heads * (m.nope + m.rope + m.value)
        return int(self.attention_layers * each * bytes_each)

    def state_bytes(self, bytes_each: float = 2) -> int:
        """Recurrent states of one sequence in all layers."""
        own = self.recurrent
        return int(own.layers * (4 * own.state + bytes_each * own.window))

    @property
    def linear_shapes(self) -> dict[str, tuple[tuple[int, int], int]]:
        """{name: ((in, out), how many)} of the linear layers inside that are no experts."""
        matrices = {name: (size, self.attention_layers) for name, size in self.attention_shapes.items()}
        for name, (i, o) in {"gate_proj": (0, 1), "up_proj": (0, 1), "down_proj": (1, 0)}.items():
            sides = (self.hidden, self.intermediate)
            matrices[name] = ((sides[i], sides[o]), self.dense_layers)
        return matrices

    @property
    def matrix_parameters(self) -> int:
        """Numbers in matrices of layers and experts: what a number format of weights is applied to."""
        return self.expert_parameters + sum(i * o * count for (i, o), count in self.linear_shapes.values())

    def lora_parameters(self, rank: int, targets: str | list[str] = "all-linear") -> int:
        """Numbers of an adapter: sum of r·(d_in + d_out) over the matrices it stands beside.  arXiv:2106.09685."""
        matrices = self.linear_shapes
        chosen = list(matrices) if targets == "all-linear" else list(targets)
        if unknown := [name for name in chosen if name not in matrices]:
            raise ModelError(
                f"no linear layer '{unknown[0]}' in {self.name}.{suggest_name(unknown[0], list(matrices))}"
            )
        return sum(rank * sum(matrices[name][0]) * matrices[name][1] for name in chosen)


def route_bytes(shape: ModelShape, pages: int) -> int:
    """Record of the choices of one token, two bytes each (models/routing_tape.py): experts, and keys of indexers in an
    engine of more `pages` than an indexer chooses.
    """
    if not shape.experts:
        return 0
    rows, width = shape.layers - shape.dense_layers, shape.indexer.count
    if pages > width:
        rows += shape.indexer.layers * -(-width // shape.per_token)
    return 2 * rows * shape.per_token


# -- where a shape comes from ------------------------------------------------------------------------


def model_shape(model: str | dict[str, Any]) -> ModelShape:
    """Of a folder, a model.path as a recipe has it, or a name such as "70b", "qwen3-8b" or "Qwen/Qwen3-8B"."""
    if isinstance(model, dict):
        kind = model.get("random", model.get("model_type"))
        numbers = {k: v for k, v in model.items() if k not in ("random", "seed")}
        # as models/random_vision.py makes it: the eye says what the language model reads
        if "random" in model and kind in tower.DEFAULTS:
            numbers.setdefault("tie_word_embeddings", False)
            wide = numbers.get("hidden_size", DEFAULTS[kind]["hidden_size"])
            reads = {"hidden_size": wide} if kind == "qwen2_vl" else {"out_hidden_size": wide}
            numbers["vision_config"] = {**reads, **(numbers.get("vision_config") or {})}
        vocabulary = 109 if kind in tower.DEFAULTS else 105  # with the marks of images
        return of_config(
            {"vocab_size": vocabulary, **numbers, "model_type": kind} if "random" in model else model,
            name=f"random-{kind}",
        )
    if (file := _config_in(model)) is not None:
        try:
            return of_config(json.loads(file.read_text(encoding="utf-8")), name=Path(model).name)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"{file} is no config of a model: {type(error).__name__}: {error}") from error
    word = model.lower().rpartition("/")[2].removesuffix("-instruct").removesuffix("-base")
    word = PUBLIC.get(word, word)
    if word in MODELS:
        numbers, source = MODELS[word]
        return replace(of_config(numbers, name=word), source=source)
    known = sorted({*MODELS, *PUBLIC})
    raise ModelError(
        f"no shape is known of '{model[:200]}'.{suggest_name(word, known)} Give a folder with a config.json, or one of "
        f"{', '.join(known)}"
    )


def _config_in(folder: str) -> Path | None:
    """Its config.json. What can be no path has none."""
    try:
        file = Path(folder).expanduser() / "config.json"
        return file if file.is_file() else None
    except (OSError, RuntimeError):  # longer than a name may be; the home of nobody
        return None


SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
DEEPEST = 10_000  # layers


def refuse_sizes(kind: str, given: Mapping[str, Any]) -> None:
    """Numbers of which no model can be made, by the name they have in config.json."""
    for name in SIZES:
        size = given.get(name)
        if size is None or isinstance(size, list | tuple):
            continue
        # a mixture may have no dense layer
        least = 0 if name == "intermediate_size" and any("expert" in key for key in given) else 1
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ModelError(f"a {kind} of {name} = {size!r} cannot be made: it is a whole number of at least {least}")
    if given.get("max_position_embeddings") == 0:  # -1 is xlnet's word for no limit
        raise ModelError(f"a {kind} of max_position_embeddings = 0 cannot be made: it is a whole number of at least 1")
    heads, shared = given.get("num_attention_heads"), given.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ModelError(
            f"a {kind} of num_attention_heads = {heads} and num_key_value_heads = {shared} cannot be made: the first "
            f"must be a multiple of the second"
        )
    if isinstance(head := given.get("head_dim"), int) and head % 2:
        raise ModelError(f"a {kind} of head_dim = {head} cannot be made: a head of rotary positions has an even width")
    if (layers := given.get("num_hidden_layers") or 0) > DEEPEST:
        raise ModelError(f"a {kind} of num_hidden_layers = {layers} cannot be made: at most {DEEPEST}")


def of_config(config: dict[str, Any], *, name: str = "model") -> ModelShape:
    """What a config.json says; what it leaves out is as transformers has it."""
    kind = config.get("model_type")
    eye = tower.of_config(kind, config) if kind in tower.DEFAULTS else None
    outer, config = config, config.get("text_config") or config
    if eye is None:
        kind = config.get("model_type")
    if kind not in DEFAULTS:
        raise ModelError(
            f"the planner does not know the layers of model type '{kind}'.{suggest_name(str(kind), list(DEFAULTS))} It "
            f"knows {', '.join(sorted(DEFAULTS))}"
        )
    refuse_sizes(str(kind), config)
    numbers: dict[str, Any] = {**DEFAULTS[kind], **{k: v for k, v in config.items() if v is not None}}

    def get(key: str) -> Any:
        return numbers.get(key)

    hidden, heads, layers = get("hidden_size"), get("num_attention_heads"), get("num_hidden_layers")
    kv_heads = get("num_key_value_heads") or heads
    head = config.get("head_dim") or get("own_head_dim") or hidden // heads
    # one number, two spellings: what the file says comes first
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((found[key] for found in (config, DEFAULTS[kind]) for key in names if found.get(key)), 0)
    expert = get("moe_intermediate_size") or get("intermediate_size")
    dense = 0
    if experts:
        sparse_every, first = get("decoder_sparse_step") or 1, get("first_k_dense_replace") or 0
        plain = set(get("mlp_only_layers") or ())
        dense = sum(i < first or i in plain or (i + 1) % sparse_every != 0 for i in range(layers))
        if listed := config.get("mlp_layer_types"):
            dense = sum(kind == "dense" for kind in listed)
    latent = None
    if get("kv_lora_rank"):
        latent = LatentAttention(
            config.get("q_lora_rank", get("q_lora_rank")),
            get("kv_lora_rank"),
            get("qk_rope_head_dim"),
            get("qk_nope_head_dim"),
            get("v_head_dim"),
        )
    biases = heads if get("sinks") else 0
    if get("expert_bias"):
        biases += experts * (2 * expert + hidden + 1)
    shared = (
        (get("num_shared_experts") or get("n_shared_experts") or 0) * expert
        + (get("shared_expert_intermediate_size") or 0)
        if experts
        else 0
    )
    if get("qkv_bias") or get("attention_bias"):
        biases += (heads + 2 * kv_heads) * head
    if get("attention_bias") and get("o_bias") is not False:
        biases += hidden
    if get("mlp_bias"):
        biases += 2 * get("intermediate_size") + hidden
    quantized = config.get("quantization_config") or {}
    bits = quantized.get("bits") or {
        "fp8": 8,
        "mxfp4": 4.25,
        "bitsandbytes": 4 if quantized.get("load_in_4bit") else 8,
    }.get(quantized.get("quant_method", ""), 16)
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        intermediate=get("intermediate_size") or 0,
        vocab=get("vocab_size"),
        tied=bool(
            get("tie_word_embeddings") if eye is None else outer.get("tie_word_embeddings", get("tie_word_embeddings"))
        ),
        norms=get("norms") or 2,
        qk_norm=bool(get("qk_norm") or get("use_qk_norm")),
        biases=biases,
        experts=experts,
        per_token=get("num_experts_per_token") or get("num_experts_per_tok") or 0 if experts else 0,
        expert=expert if experts else 0,
        shared=shared,
        shared_gate=bool(get("shared_expert_gate") and experts),
        dense=dense,
        latent=latent,
        recurrent=recurrent_shape(get, hidden, layers, head),
        indexer=indexer_shape(get, hidden, layers),
        gate=bool(get("output_gate")),
        family=str(kind),
        tower=eye,
        bits=bits,
    )


def of_recipe(model: str | dict[str, Any], cache: Path) -> ModelShape:
    """Of a recipe's model.path: also a wheel's demo model, a GGUF that was converted, a hub id whose files are here."""
    if isinstance(model, str) and _config_in(model) is None:
        here = cache / f"models--{model.replace('/', '--')}" / "snapshots"
        for found in sorted(here.glob("*/config.json")):
            return model_shape(str(found.parent))
    return model_shape(model)


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it has fetched."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
