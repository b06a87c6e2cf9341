"""Bytes beside the devices of one machine: what `trainer.memory.activations` and `trainer.memory.optimizer` send there.

host   inputs of layers, pinned · masters, gradients and moments of the policy and of a critic · beside GPUs the record
       of experts and chosen keys, of each cached token and of the samples of a step
disk   inputs of layers, in a file in the folder of the run

traffic of an update   a gradient of each number from each micro-batch, and its weight back, over the link to the host
"""

from __future__ import annotations

from rondel.planner.hardware import GB
from rondel.planner.memory import bytes_per_number, micro_batch_tokens, route_record_bytes
from rondel.planner.workload import Workload


def bytes_beside(setting: Workload) -> dict[str, dict[str, float]]:
    """{"host" or "disk": {what: bytes}}, empty where everything stays on the devices."""
    found: dict[str, dict[str, float]] = {}
    if setting.activations != "device":
        found[setting.activations] = {"layer inputs": layer_input_bytes(setting) * setting.train_devices}
    if setting.host_optimizer:
        state, numbers = bytes_per_number(setting), setting.trained_parameters
        critic = setting.critic
        numbers += critic.body_parameters + critic.embedding_parameters if critic is not None else 0
        each = {"masters": 4, "gradients": state.gradient, "moments": state.moments}
        found.setdefault("host", {}).update({name: size * numbers for name, size in each.items()})
    if setting.hardware.on_gpu and any((routes := route_record_bytes(setting)).values()):
        routes["routes of cached tokens"] *= setting.engine_count
        found.setdefault("host", {}).update(routes)
    return found


def layer_input_bytes(setting: Workload) -> float:
    """Of the largest micro-batch of one device."""
    return 4 * setting.shape.layers * setting.shape.hidden * micro_batch_tokens(setting)


def sentences_beside(setting: Workload) -> list[str]:
    places = {"host": "host memory beside the devices", "disk": "in the folder of the run, while it trains"}
    return [
        f"{places[where]}: {sum(rows.values()) / GB:.2f} GB ("
        + ", ".join(f"{name} {size / GB:.2f}" for name, size in rows.items())
        + ")"
        for where, rows in bytes_beside(setting).items()
    ]
