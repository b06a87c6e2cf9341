"""What a run says of itself as it starts: machine, software, model, tasks, loss; the
run card and `rondel diagnose` read it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from rondel.algos.explanation import explain_objective
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, UserError
from rondel.core.events import Warned, emit
from rondel.core.types import POLICY, Task
from rondel.models.cpu_kernels import LOOPS, PLAIN_KERNELS
from rondel.models.native_library import SWITCH
from rondel.planner.flow_cost import flow_memory_bills
from rondel.planner.flow_shape import is_planned_flow
from rondel.planner.flow_workload import flow_of_job
from rondel.planner.memory import memory_bills
from rondel.planner.workload import of_job
from rondel.runtime.cluster import torchrun
from rondel.runtime.journal.log import read
from rondel.text.unicode import write_json

if TYPE_CHECKING:
    from rondel.assemble.run_components import Components


def facts_of(parts: Components) -> dict[str, Any]:
    """What the run card says about the machine and the software, as measured or read."""
    from importlib.metadata import version

    job, known = parts.job, parts.model_info
    on_gpu = torch.cuda.is_available() and job.place.device != "cpu"
    return {
        "versions": {
            "rondel": version("rondel"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu ({platform.machine()})",
        "devices": devices_of(job),
        **({"device_bytes": torch.cuda.get_device_properties(0).total_memory} if on_gpu else {}),
        "place": parts.placed.where,
        "mesh": str(job.place.mesh.to_mesh(job.place.ranks)) if job.place.ranks > 1 else "",
        "dtypes": {
            "compute": str(known.dtype).removeprefix("torch."),
            "master": "float32",
            "logprobs": "float32",
            "adapter": parts.resolved["model.adapter"],
        },
        "arithmetic": known.arithmetic,
        "mismatch_bound": parts.mismatch_bound,
        "model": {"name": known.name, "parameters": known.parameters},
        **({"policies": policies_of(parts)} if job.policies else {}),
        "memory_planned": planned_memory(job),
        "batch": batch_line(job),
        "tasks": {
            "train": len(parts.tasks.train),
            "held_out": len(parts.tasks.held_out),
            "duplicates": parts.tasks.duplicates,
            "leaked": parts.tasks.leaked,
            "too_long": parts.tasks.too_long,
            "digests": {"train": tasks_digest(parts.tasks.train), "held_out": tasks_digest(parts.tasks.held_out)}
            | {name: tasks_digest(own) for name, own in parts.tasks.sets.items()},
        },
        "seed": job.loop.seed,
        "algorithm": parts.row.name,
        "loss": explain_objective(parts.row),
        **(
            {
                "losses": {
                    name: f"{weight:g} · {explain_objective(row)}" for name, (row, weight) in parts.rows.of.items()
                }
            }
            if parts.rows.of
            else {}
        ),
        "needs": sorted(parts.rows.needs),
        "corrects": all(row.corrects_staleness for row in parts.rows.all_rows),
        "resolved": parts.resolved,
    }


def policies_of(parts: Components) -> dict[str, dict[str, Any]]:
    """Who plays whom, with which weights."""
    job = parts.job
    told: dict[str, dict[str, Any]] = {}
    for name, known in {POLICY: parts.model_info, **parts.placed.others}.items():
        own = job.policies.get(name)
        told[name] = {
            "agents": [agent for agent, plays in job.agent_policies.items() if plays == name],
            "model": known.name,
            "parameters": known.parameters,
            "lr": job.of_policy(name).trainer.lr,
            "frozen": own is not None and own.frozen,
        }
    return told


def planned_memory(job: Job) -> dict[str, int]:
    """The planner's bill of a training device, in the words in which a trainer tells what it
    holds; empty for families that it does not know.
    """
    names = {
        "policy weights": "weights",
        "masters": "masters",
        "gradients": "gradients",
        "moments": "moments",
        "engine weights": "engine weights",
        "KV cache": "kv_cache",
    }
    try:
        flow = is_planned_flow(job.model.path)
        bill = flow_memory_bills(flow_of_job(job)) if flow else memory_bills(of_job(job))
    except (ConfigError, UserError):
        return {}
    rows = [
        (names[tenant], phases.get("generate", 0.0) if tenant == "engine weights" else phases["train"])
        for pool in bill
        for tenant, phases in pool.rows.items()
        if tenant in names
    ]
    return {name: round(max(n for other, n in rows if other == name)) for name in dict(rows)}


def batch_line(job: Job) -> str:
    p, g, u = job.loop.groups_per_step, job.algo.group_size, job.loop.updates_per_step * job.loop.epochs
    return f"{p} groups x {g} samples = {p * g} trajectories a step, {u} optimizer update{'s' * (u > 1)}"


def devices_of(job: Job) -> int:
    """That this run holds while it lasts; what serves elsewhere under a url is not counted."""
    if job.place.kind == "shared":
        return job.place.ranks
    ranks = torchrun.rank_and_size()[1] if job.place.cluster == "torchrun" else job.place.ranks
    others = sum(1 if policy.frozen else 2 for policy in job.policies.values())
    return ranks + (job.place.engine_count * job.place.engine_processes if job.engine.kind == "builtin" else 0) + others


def tasks_digest(tasks: Iterable[Task]) -> str:
    """Of ids and contents, in whatever order they came: two runs with equal digests had the same tasks."""
    each = sorted(blake2b(write_json([t.id, t.env, t.data]).encode(), digest_size=16).digest() for t in tasks)
    return blake2b(b"".join(each), digest_size=16).hexdigest()


def warn_of_other_arithmetic(what: str, folder: Path, now: dict[str, Any], step: int | None = None) -> None:
    """Where the run in `folder` was computed with other last bits than those of the facts `now`.

    what    what happens with it: "the run goes on"
    step    of several starts of the run the one that did this step; None: the last one
    """
    begun: dict[str, Any] | None = None
    for event in read(folder):
        if event["kind"] == "RunStarted":
            begun = event["facts"]
        elif event["kind"] == "StepDone" and event["step"] == step:
            break
    if begun is None:
        return
    was, here = begun.get("arithmetic"), now.get("arithmetic", {})
    if was is None:  # before 2026-11-28 a run named its kernels alone, and earlier ones had torch's operations
        was = {"kernels": begun.get("cpu_kernels", PLAIN_KERNELS)}
    changes = [f"{name}: {here[name]}, and was {was[name]}" for name in was if here.get(name, was[name]) != was[name]]
    if not changes:
        return
    remedies = ""
    if "kernels" in was and here.get("kernels") != was["kernels"]:
        remedies += (
            f". {SWITCH}={int(was['kernels'] == LOOPS)} in the environment takes the old ones, where a compiler is"
        )
    if "threads" in was and here.get("threads") != was["threads"]:
        remedies += f". OMP_NUM_THREADS={was['threads']} takes as many threads"
    emit(Warned(f"{what} with other arithmetic ({'; '.join(changes)}): equal to rounding, not bit for bit{remedies}"))
