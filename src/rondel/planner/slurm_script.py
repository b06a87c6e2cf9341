"""A batch script for SLURM. Text from a recipe; nothing is started here.

What is submitted again goes on from its last checkpoint: the run folder is on storage that every node sees.
"""

from __future__ import annotations

import re
import shlex

from rondel.core.errors import UserError
from rondel.planner.cluster_layout import ClusterLayout

PORT = 6379  # of Ray's head, and Ray's own default
BEFORE_THE_END = 300  # seconds before --time is over at which the run is asked for its last checkpoint
LIMITS = "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, or DAYS-HOURS with :MINUTES and :SECONDS or without"
WAIT = """\
code=0
for one in "${run[@]}"; do
    status=0
    wait "$one" || status=$?
    while kill -0 "$one" 2> /dev/null; do # a signal ended the wait early
        status=0
        wait "$one" || status=$?
    done
    ((status == 0)) || code=$status
done
if ((again)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def slurm_script(
    layout: ClusterLayout, *, way: str, bin_folder: str = "", directives: dict[str, str] | None = None, stage: str = ""
) -> str:
    """A script for sbatch. `way`: torchrun or ray; `bin_folder`: where `rondel` is, if it is in an environment of
    its own; `directives`: partition, account, time and others; `stage`: a folder of
    each node's own disk, where the models are copied first.
    """
    directives = directives or {}
    before = min(BEFORE_THE_END, limit_seconds(directives.get("time", "0")) // 4 or BEFORE_THE_END)
    asked = {
        "job-name": layout.name,
        "nodes": str(layout.nodes),
        "ntasks-per-node": "1",
        **({"gpus-per-node": str(layout.gpus)} if layout.gpus else {}),
        "mem": "0",  # all of it: --exclusive alone is all CPUs, and the memory of a job that names none
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"B:USR1@{before}",
        **directives,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items()] + [
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
    ]
    folder = shlex.quote(layout.job.run.folder)
    gpus = f" --gpus-per-node={layout.gpus}" * bool(layout.gpus)
    path = f"export PATH={shlex.quote(bin_folder)}:$PATH\n" * bool(bin_folder)
    return (
        "#!/bin/bash\n"
        + "\n".join(lines)
        + f"""
# Ranks of the trainer: {layout.ranks}, engines: {layout.engine_count}, by {way}.
# Submitted again, requeued, or out of time, it goes on from the last checkpoint.
set -euo pipefail
{path}
fail() {{ echo "error: $1" >&2; exit 1; }}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${{nodes[0]}}
on() {{ srun --nodes=1 --ntasks=1 --overlap{gpus} -w "$@"; }}
trap 'fail "the time of the job was over before the run began: ask for more of it with --time"' USR1

# every node has rondel and sees the run folder
folder={folder}
mkdir -p "$folder"
seen="$folder/.job-$SLURM_JOB_ID"
touch "$seen"
for node in "${{nodes[@]}}"; do
    on "$node" bash -c 'command -v rondel > /dev/null' ||
        fail "rondel is not on the PATH of $node: install it on storage that every node sees, and submit from its environment"
    # shellcheck disable=SC2016
    on "$node" bash -c 'for _ in {{1..30}}; do test -e "$0" && exit; sleep 1; done; exit 1' "$seen" ||
        fail "$node does not see $folder of $first: set run.folder to a path on storage that every node sees"
done
rm -f "$seen"
"""
        + (_stage_models(layout, stage) if stage else "")
        + (_with_torchrun(layout, before) if way == "torchrun" else _with_ray(layout))
        + _wait_for_the_run(way)
    )


def limit_seconds(limit: str) -> int:
    """Of SLURM's --time: limit_seconds("1-12") = 129600; 0: no limit."""
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return 0
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not found:
        raise UserError(f"--time {limit} is no time that SLURM reads: {LIMITS}")
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part]
    if days is None and len(numbers) < 3:  # minutes first
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _stage_models(layout: ClusterLayout, stage: str) -> str:
    command = shlex.join(["rondel", "prepare", str(layout.recipe), *layout.overrides])
    return f"""
# what has to be converted is converted once; then every node copies the models to its own disk
export RONDEL_MODELS={shlex.quote(stage)}
on "$first" {command}
copies=()
for node in "${{nodes[@]}}"; do
    on "$node" {command} --stage {shlex.quote(stage)} &
    copies+=("$!")
done
for one in "${{copies[@]}}"; do
    wait "$one"
done
"""


def _with_torchrun(layout: ClusterLayout, before: int) -> str:
    return f"""
# the time to write a checkpoint when the job is asked to end
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={before * 4 // 5}
port=$((20000 + SLURM_JOB_ID % 20000))
run=()
for ((i = 0; i < ${{#nodes[@]}}; i++)); do
    ranks={layout.ranks_of(1)}
    ((i > 0)) || ranks={layout.ranks_of(0)}
    on "${{nodes[i]}}" torchrun --nnodes {layout.nodes} --node-rank "$i" --nproc-per-node "$ranks" \\
        --master-addr "$first" --master-port "$port" --no-python \\
        {layout.train_command(str(layout.recipe), "torchrun")} &
    run+=("$!")
done
"""


def _with_ray(layout: ClusterLayout) -> str:
    gpus = f" --num-gpus={layout.gpus}" * bool(layout.gpus)
    return f"""
# of this job alone: without a token whoever reaches a port of Ray could run code (Ray 2.52 or newer)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')

# as others see a node: its own name may lead to a loopback address there (Debian's 127.0.1.1)
address_of() {{
    local address
    read -r address _ < <(on "$2" getent ahosts "$1")
    echo "$address"
}}
head=$(address_of "$first" "${{nodes[-1]}}")

on "$first" ray start --head --node-ip-address="$head" --port={PORT}{gpus} --block &
started=$!
head="$head:{PORT}"
until on "$first" ray status --address "$head" > /dev/null 2>&1; do
    kill -0 "$started" # ends the job if the head has ended
    sleep 2
done
join() {{ # again if Ray did not come up, or went: the run takes a node that is back
    for _ in {{1..3}}; do
        on "$1" ray start --address="$head" --node-ip-address="$2"{gpus} --block && return
    done
}}
for node in "${{nodes[@]:1}}"; do
    join "$node" "$(address_of "$node" "$first")" &
done

# no step of srun, which could not be asked to end without Ray
{layout.train_command(str(layout.recipe), "ray:auto")} &
run=("$!")
"""


def _wait_for_the_run(way: str) -> str:
    """Till it ends. Shortly before the job's time is over it writes a checkpoint, and the job is put in line again.

    srun does not hand on a SIGTERM but kills what it has started; scancel signals every step, and not the script.
    """
    ask = 'scancel --signal=TERM "$SLURM_JOB_ID"' if way == "torchrun" else 'kill -TERM "${run[@]}"'
    return (
        f"""
again=0
trap 'again=1; {ask} || true' USR1
"""
        + WAIT
    )
