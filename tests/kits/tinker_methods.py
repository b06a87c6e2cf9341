"""Every public method of the tinker SDK's clients, called once: what answers it gets."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import warnings
from typing import Any

import numpy as np

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
REFUSED = "not offered by this server"


def methods() -> list[tuple[str, str]]:
    import tinker

    found = []
    for client in CLIENTS:
        for name, value in vars(getattr(tinker, client)).items():
            if not name.startswith("_") and (callable(value) or isinstance(value, staticmethod | classmethod)):
                found.append((client, name))
    return found


def call_all(address: str, key: str, base: str) -> dict[tuple[str, str], str]:
    """{(client, method): "answered", "refused: why", or what went wrong}"""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=address, api_key=key)
    training = service.create_lora_training_client(base, rank=4).result()
    rest = service.create_rest_client()
    run = training.get_info().model_id
    tokens = list(range(10, 22))
    n = len(tokens) - 1
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
                "weights": types.TensorData.from_numpy(np.ones(n, np.float32)),
            },
        )
    ]
    names = iter(range(1000))

    def state() -> str:
        return training.save_state(f"s{next(names)}").result().path

    kept, sampled = state(), training.save_weights_for_sampler("sampler").result().path
    external = training.save_weights_external("external").result().path
    os.environ["TINKER_PROJECT_ID"] = "mine"
    sampler = service.create_sampling_client(model_path=sampled).result()
    session = sampler.get_sampler_handle()
    session_id = rest.list_sessions().result().sessions[0]
    prompt, params = types.ModelInput.from_ints(tokens), types.SamplingParams(max_tokens=3)

    def own(data: Any, logprobs: Any) -> Any:
        return sum(z.sum() for z in logprobs), {}

    def traced(logprobs: Any) -> Any:
        loss = -logprobs.sum()
        return loss, {"custom/mine:sum": loss}

    usual: dict[str, tuple[Any, ...]] = {
        "forward": (data, "cross_entropy"),
        "forward_backward": (data, "cross_entropy"),
        "forward_backward_custom": (data, own),
        "optim_step": (types.AdamParams(),),
        "load_state": (kept,),
        "load_state_with_optimizer": (kept,),
        "create_lora_training_client": (base, 4),
        "create_training_client_from_state": (kept,),
        "create_training_client_from_state_with_optimizer": (kept,),
        "create_custom_loss": (traced, {"logprobs": 1}),
        "close": ("success",),
        "sample": (prompt, 1, params),
        "compute_logprobs": (prompt,),
        "get_training_run": (run,),
        "get_training_run_by_tinker_path": (kept,),
        "get_weights_info_by_tinker_path": (kept,),
        "list_checkpoints": (run,),
        "get_external_weights_urls": (external,),
        "publish_checkpoint_from_tinker_path": (kept,),
        "unpublish_checkpoint_from_tinker_path": (kept,),
        "set_checkpoint_ttl_from_tinker_path": (kept, 7200),
        "get_session": (session_id,),
        "assign_session_project": (session_id, "mine"),
        "export_session_trace": (session_id,),
        "get_sampler": (sampler._sampling_session_id,),
        "get_audit_log": ("checkpoint.published", None),
        "get_billing_usage": ("2026-01-01", "2026-02-01"),
        "get_current_checkpoint_storage_usage": (),
        "search_sessions": (types.SessionSearchRequest(),),
    }

    def arguments(client: str, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        plain = name.removesuffix("_async")
        match client, plain:
            case _, "save_state" | "save_weights_for_sampler" | "save_weights_external":
                return (f"m{next(names)}",), {}
            case "ServiceClient", "create_sampling_client":
                return (), {"base_model": base}
            case "TrainingClient", "create_sampling_client":
                return (sampled,), {}
            case _, "copy_weights":
                return ((kept, "archive"), {}) if client == "RestClient" else ((kept,), {})
            case _, "delete_checkpoint":
                return (run, "weights/" + state().rpartition("/")[2]), {}
            case _, "delete_checkpoint_from_tinker_path":
                return (state(),), {}
            case "SamplingClient", "create":
                return (service.holder,), {"base_model": base}
            case "SamplingClient", "from_sampler_handle":
                return (session,), {"api_key": key}
            case "SamplingClient", "on_queue_state_change":
                from tinker.lib.api_future_impl import QueueState

                return (QueueState.ACTIVE, None), {}
        return usual.get(plain, ()), {}

    async def awaited(value: Any) -> Any:
        value = await value
        return await value if hasattr(value, "__await__") else value

    def call(client: str, name: str) -> str:
        owner = {"ServiceClient": service, "TrainingClient": training, "SamplingClient": sampler, "RestClient": rest}[
            client
        ]
        given, named = arguments(client, name)
        try:
            if "optim_step" in name:
                training.forward_backward(data, "cross_entropy").result()
            value = getattr(owner, name)(*given, **named)
            if name.endswith("_async"):
                asyncio.run(awaited(value))
            elif hasattr(value, "result") and not inspect.iscoroutine(value):
                value.result()
        except Exception as error:
            text = str(error)
            if REFUSED in text:
                return "refused: " + text.partition(REFUSED)[2].lstrip(": ").partition("'}")[0].partition('"}')[0][:120]
            return f"{type(error).__name__}: {text[:200]}"
        return "answered"

    out = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = ("ServiceClient", "close")
        for client, name in [*(m for m in methods() if m != last), last]:
            out[client, name] = call(client, name)
    _close_clients()
    return out


def _close_clients() -> None:
    """All of this process, also those that a handle made: one that is left knocks at the door of a server that has ended."""
    from tinker.lib.internal_client_holder import InternalClientHolder

    for found in gc.get_objects():
        if type(found) is InternalClientHolder:
            found.close()
