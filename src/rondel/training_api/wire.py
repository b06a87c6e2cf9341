"""What clients send of data and are sent of it: forward_backward comes as protobuf, samples and losses go as protobuf,
all else is JSON.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondel.core.errors import UserError
from rondel.training_api.backend import Example, Losses, Sampled, SampleSettings
from rondel.training_api.protobuf import (
    Message,
    decode_message,
    encode_message,
    packed_varints,
    read_bytes,
    read_int,
    read_messages,
    read_text,
    read_varints,
)

PROTOBUF = "application/x-protobuf"
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<i8"),
    3: np.dtype("<i4"),
}  # of the enum; 4 is bfloat16
EMPTY = -99999.0  # a log-probability that was not asked for
TARGETS = "target_tokens"
NUMBERS = 1 << 24  # of all tensors of a request: sparse ones are made dense


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    model: str
    number: int
    examples: list[Example]
    loss: str
    config: dict[str, float]
    backward: bool


def read_forward_request(body: bytes) -> ForwardRequest:
    sent = decode_message(body)
    config = {read_text(entry, 1): _double(entry, 2) for entry in read_messages(sent, 5)}
    if words := [read_text(e, 1) for e in read_messages(sent, 7) for value in read_messages(e, 2) if 2 in value]:
        raise UserError(f"loss_fn_config['{words[0]}'] is a text: no loss here reads one")
    return ForwardRequest(
        read_text(sent, 1),
        read_int(sent, 2),
        _read_examples(read_messages(sent, 3)),
        read_text(sent, 4),
        config,
        not read_int(sent, 6),
    )


def read_place(body: bytes) -> tuple[str, int]:
    """Model and number of a request that could not be read otherwise."""
    try:
        sent = decode_message(body)
        return read_text(sent, 1), read_int(sent, 2)
    except UserError:
        return "", 0


def _double(message: Message, number: int) -> float:
    eight = read_bytes(message, number) or bytes(8)
    if len(eight) != 8:
        raise UserError(f"field {number} of loss_fn_config has {len(eight)} bytes and should be a double, of 8")
    return float(struct.unpack("<d", eight)[0])


def _read_examples(data: list[Message]) -> list[Example]:
    out, numbers = [], 0
    for i, datum in enumerate(data):
        out.append(_read_example(i, datum, NUMBERS - numbers))
        numbers += out[-1].targets.size + sum(array.size for array in out[-1].inputs.values())
    return out


def _read_example(i: int, datum: Message, room: int) -> Example:
    tokens: list[int] = []
    for chunk in read_messages(datum, 1):
        if 1 not in chunk:
            raise UserError(f"example {i} has an image or a sound: this server trains on text alone")
        tokens += _array(read_bytes(decode_message(read_bytes(chunk, 1)), 1), DTYPES[3]).tolist()
    inputs: dict[str, np.ndarray] = {}
    for entry in read_messages(datum, 2):
        tensor = _read_tensor(i, decode_message(read_bytes(entry, 2)), room)
        inputs[read_text(entry, 1)], room = tensor, room - tensor.size
    if TARGETS not in inputs:
        raise UserError(f"example {i} has no loss_fn_inputs['{TARGETS}']")
    targets = _whole_numbers(i, inputs.pop(TARGETS))
    return Example(tokens, targets, {key: array.astype(np.float32) for key, array in inputs.items()})


def _whole_numbers(i: int, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.floor(array)).all()):
        raise UserError(f"example {i}: {TARGETS} has a number that is no token")
    return array.astype(np.int64)


def _read_tensor(i: int, sent: Message, room: int) -> np.ndarray:
    kind, shape = read_int(sent, 3), read_varints(sent.get(4, []))
    if kind == 4:
        raw = _array(read_bytes(sent, 1), np.dtype("<u2"))
        dense = (raw.astype(np.uint32) << 16).view(np.float32)
    elif kind not in DTYPES:
        raise UserError(f"example {i} has a tensor of an unknown dtype")
    elif 2 in sent:
        return _from_csr(i, decode_message(read_bytes(sent, 2)), DTYPES[kind], shape, room)
    else:
        dense = _array(read_bytes(sent, 1), DTYPES[kind])
    if not shape:
        return dense
    if dense.size != np.prod(shape, dtype=object):
        raise UserError(f"example {i} has a tensor of {dense.size} numbers that says it has the shape {shape}")
    return dense.reshape(shape)


def _from_csr(i: int, csr: Message, dtype: np.dtype[Any], shape: list[int], room: int) -> np.ndarray:
    """A sparse matrix by rows; what is not listed is 0."""
    values, ends, columns = (_array(read_bytes(csr, n), d) for n, d in ((1, dtype), (2, DTYPES[2]), (3, DTYPES[2])))
    fits = (
        len(shape) == 2
        and len(ends) == shape[0] + 1
        and int(ends[0]) == 0
        and len(columns) == len(values) == (int(ends[-1]) if len(ends) else -1)
        and bool((np.diff(ends) >= 0).all())
        and (not len(columns) or (columns.min() >= 0 and columns.max() < shape[1]))
    )
    if not fits:
        raise UserError(f"example {i} has a sparse tensor whose indices do not fit its shape {shape}")
    if shape[0] * shape[1] > room:
        raise UserError(
            f"a request whose tensors have more than {NUMBERS} numbers, at example {i}: send fewer at a time"
        )
    out = np.zeros(shape, dtype)
    out[np.repeat(np.arange(shape[0]), np.diff(ends)), columns] = values
    return out


def _array(data: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise UserError(f"{len(data)} bytes are no array of {dtype}")
    return np.frombuffer(data, dtype)


def forward_reply(losses: Losses) -> bytes:
    """ForwardBackwardOutput; examples of equal trailing shape lie in one record."""
    fields: list[tuple[int, int | float | bytes]] = [(1, b"ArrayRecord")]
    for part in _alike(losses.outputs):
        record: list[tuple[int, int | float | bytes]] = [(1, b"ArrayRecord")]
        for name in part[0]:
            arrays = [np.ascontiguousarray(output[name], "<f4") for output in part]
            ends = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8")
            tensor: list[tuple[int, int | float | bytes]] = [
                (1, b"".join(a.tobytes() for a in arrays)),
                (2, ends.tobytes()),
                (3, 1),
                (4, packed_varints(arrays[0].shape[1:])),
            ]
            record.append((2, encode_message([(1, name.encode()), (2, encode_message(tensor))])))
        fields.append((2, encode_message([*record, (3, len(part))])))
    for name, value in losses.metrics.items():
        fields.append((3, encode_message([(1, name.encode()), (2, float(value))])))
    return encode_message(fields)


def _alike(outputs: Sequence[dict[str, np.ndarray]]) -> Iterator[list[dict[str, np.ndarray]]]:
    part: list[dict[str, np.ndarray]] = []
    for output in outputs:
        if part and any(array.shape[1:] != part[0][name].shape[1:] for name, array in output.items()):
            yield part
            part = []
        part.append(output)
    if part:
        yield part


def sample_reply(sampled: Sampled, top: int) -> bytes:
    """SampleResponse"""
    fields: list[tuple[int, int | float | bytes]] = []
    for tokens, logprobs, reason in sampled.sequences:
        sequence: list[tuple[int, int | float | bytes]] = [(1, int(reason == "length"))]
        sequence += [(2, np.array(tokens, "<i4").tobytes()), (3, np.array(logprobs, "<f4").tobytes())]
        fields.append((1, encode_message(sequence)))
    if sampled.prompt_logprobs is not None:
        told = [np.nan if p is None else p for p in sampled.prompt_logprobs]
        fields.append((2, np.array(told, "<f4").tobytes()))
    if sampled.top_prompt_logprobs is not None and top:
        ids = np.zeros((len(sampled.top_prompt_logprobs), top), "<i4")
        values = np.full(ids.shape, EMPTY, "<f4")
        for row, likely in enumerate(sampled.top_prompt_logprobs):
            for column, (token, logprob) in enumerate((likely or [])[:top]):
                ids[row, column], values[row, column] = token, logprob
        fields.append((3, encode_message([(1, ids.tobytes()), (2, values.tobytes()), (3, top), (4, len(ids))])))
    return encode_message(fields)


def read_prompt(sent: Any) -> list[int]:
    chunks = sent.get("chunks") if isinstance(sent, dict) else None
    if not isinstance(chunks, list):
        raise UserError("prompt is no ModelInput: it has no chunks")
    tokens: list[int] = []
    for chunk in chunks:
        own = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(own, list) or not all(type(t) is int for t in own):
            raise UserError("the prompt has a chunk that is no text: this server reads text alone")
        tokens += own
    if not tokens:
        raise UserError("the prompt has no tokens")
    return tokens


REFUSED = {
    "topk_sample_logprobs": "the likeliest tokens beside drawn ones",
    "target_prompt_logprobs": "log-probabilities of other prompt tokens than its own; ask forward of a training client",
    "prompt_alt_tokens_k": "alternatives to prompt tokens",
}


def read_sample_settings(sent: Mapping[str, Any]) -> SampleSettings:
    for name, what in REFUSED.items():
        if sent.get(name):
            raise UserError(f"{name}: this server does not tell {what}")
    if sent.get("record_stability_info"):
        raise UserError("record_stability_info belongs to the loss 'stable_reinforce', whose formula is not published")
    given = sent.get("sampling_params")
    given = given if isinstance(given, dict) else {}
    stop = given.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(type(one) in (str, int) for one in stops):
        raise UserError(f"sampling_params.stop = {str(stop)[:80]!r}; it is a text, or a list of texts or of token ids")
    if stop is not None and not stops:
        raise UserError(
            "sampling_params.stop = []: this server always stops at the model's own end tokens; leave it out"
        )
    numbers = given | {name: sent.get(name) for name in ("num_samples", "topk_prompt_logprobs")}
    for name in ("num_samples", "topk_prompt_logprobs", "max_tokens", "seed", "top_k", "temperature", "top_p"):
        value = numbers.get(name)
        if value is not None and not (is_number(value) and (name in ("temperature", "top_p") or value == int(value))):
            raise UserError(f"{name} = {str(value)[:80]!r}; it must be a number, or left out")
    return SampleSettings(
        n=1 if numbers["num_samples"] is None else int(numbers["num_samples"]),
        max_tokens=None if given.get("max_tokens") is None else int(given["max_tokens"]),
        temperature=float(1.0 if given.get("temperature") is None else given["temperature"]),
        top_p=float(1.0 if given.get("top_p") is None else given["top_p"]),
        top_k=int(-1 if given.get("top_k") is None else given["top_k"]),
        seed=None if given.get("seed") is None else int(given["seed"]),
        stop_texts=[s for s in stops if isinstance(s, str)],
        stop_tokens=[s for s in stops if isinstance(s, int)],
        prompt_logprobs=bool(sent.get("prompt_logprobs")),
        top_prompt_logprobs=int(numbers["topk_prompt_logprobs"] or 0),
    )


def is_number(value: Any) -> bool:
    """Whether JSON gave a number that a double can hold, neither NaN nor infinite."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
