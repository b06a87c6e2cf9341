"""Files for SLURM and Kubernetes: what they say fits the cluster, and their syntax is what the other side reads."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kits.submits import RECIPE, layout
from rondel.cli import main, read_job
from rondel.core.config.job import Job
from rondel.core.errors import UserError
from rondel.planner.cluster_layout import ClusterLayout
from rondel.planner.kubernetes_job import PodSettings, indexed_job, kuberay
from rondel.planner.slurm_script import limit_seconds, slurm_script
from rondel.runtime.cluster.schedulers import submitted_job

ROOT = Path(__file__).parents[2]
# https://ray-project.github.io/kuberay/reference/api/ (v1.4; authOptions: since
# v1.5.1), required: of the CRDs since v1.0
FIELDS = {
    "RayJobSpec": set(["activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata", "clusterSelector", "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML", "jobId", "submissionMode", "entrypointResources", "entrypointNumCpus", "entrypointNumGpus", "ttlSecondsAfterFinished", "shutdownAfterJobFinishes", "suspend"]),
    "RayClusterSpec": set(["authOptions", "suspend", "managedBy", "autoscalerOptions", "headServiceAnnotations", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec", "rayVersion", "workerGroupSpecs"]),
    "HeadGroupSpec": set(["template", "headService", "enableIngress", "rayStartParams", "serviceType"]),
    "WorkerGroupSpec": set(["suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "idleTimeoutSeconds", "rayStartParams", "template", "scaleStrategy", "numOfHosts"]),
}  # fmt: skip
REQUIRED = {
    "RayJobSpec": {"entrypoint", "rayClusterSpec"},
    "RayClusterSpec": {"headGroupSpec"},
    "HeadGroupSpec": {"rayStartParams", "template"},
    "WorkerGroupSpec": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def trained(text: str) -> Job:
    """The recipe that the file's command means, of the words that a shell would hand over."""
    line = next(line for line in text.replace("\\\n", " ").splitlines() if " train " in line)
    words = shlex.split(line.partition("rondel train ")[2])
    words = [w for w in words if w.startswith("--")]
    return read_job(str(RECIPE), *words)[0]


@pytest.mark.parametrize("way", ["ray", "torchrun"])
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (2, 8), (16, 4)])
def test_a_batch_script_is_good_shell_and_fills_the_cluster(tmp_path, way, nodes, gpus):
    text = slurm_script(layout(nodes, gpus, "--loop.steps=7", way=way), way=way)
    (tmp_path / "job.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], capture_output=True, text=True).stderr == ""
    if found := shutil.which("shellcheck"):
        done = subprocess.run([found, "--severity=style", tmp_path / "job.sh"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert (asked["nodes"], asked["gpus-per-node"], asked["ntasks-per-node"]) == (str(nodes), str(gpus), "1")
    assert asked["mem"] == "0", "all of a node's memory, which --exclusive is not"
    assert text.index("#SBATCH --output") < text.index("set -euo"), "sbatch reads no directive behind the first command"
    job = trained(text)
    assert (job.place.kind, job.place.cluster.partition(":")[0], job.place.engines, job.loop.steps) == (
        "split",
        way,
        1,
        7,
    )
    if way == "ray":
        assert job.place.ranks + job.place.engines == nodes * gpus and text.count("ray start") == 2
    else:
        assert f"|| ranks={gpus - 1}\n" in text and f"--nnodes {nodes}" in text


def test_engines_of_several_processes_take_as_many_gpus_of_the_first_node():
    engines = "--place.engines={ count = 2, tp = 2 }"
    text = slurm_script(layout(2, 8, engines, way="torchrun"), way="torchrun")
    place = trained(text).place
    assert "|| ranks=4\n" in text and (place.engine_count, place.engine_tp) == (2, 2)
    apart = trained(
        slurm_script(layout(2, 8, "--place.engines={ dp = 2, ep = 2 }", way="torchrun"), way="torchrun")
    ).place
    assert (apart.engine_count, apart.engine_tp, apart.engine_dp, apart.engine_experts_apart) == (1, 1, 2, True)
    with pytest.raises(UserError, match=r"which Ray does not promise: use --with torchrun, or place\.engines = 2"):
        layout(2, 8, engines, way="ray")


FAKES = {  # what the scripts call, each writing down what it was asked
    "scontrol": 'printf "n0\\nn1\\nn2\\n"',
    "srun": 'while [ "$1" != -w ]; do shift; done; node=$2; shift 2; echo "$node $* ${RAY_AUTH_MODE:-} ${RAY_AUTH_TOKEN:-}" >> "$CALLS"; "$@"',
    "getent": 'case "$2" in n0) echo "10.0.0.7 STREAM n0";; *) echo "10.0.0.1${2#n} STREAM $2";; esac',
    "ray": 'if [ "$1" = start ]; then sleep 1; fi',
    "torchrun": "exit 0",
    "rondel": 'echo "rondel $* ${RAY_AUTH_MODE:-} ${RAY_AUTH_TOKEN:-}" >> "$CALLS"',
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ray", "torchrun"])
def test_a_batch_script_starts_what_it_should_where_it_should(tmp_path, way):
    """Run by bash with stand-ins for SLURM, Ray and torchrun."""
    for name, body in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(slurm_script(layout(3, 4, "--place.engines=2", way=way), way=way))
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "n[0-2]",
        "CALLS": str(tmp_path / "calls"),
    }
    done = subprocess.run(
        ["bash", tmp_path / "job.sh"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert not list(tmp_path.glob("runs/quickstart/.job-*"))
    if way == "torchrun":
        told = {
            c.split()[0]: (c.split("--node-rank ")[1].split()[0], c.split("--nproc-per-node ")[1].split()[0])
            for c in calls
            if "torchrun" in c
        }
        assert told == {"n0": ("0", "2"), "n1": ("1", "4"), "n2": ("2", "4")}
        assert all(
            "--master-addr n0 --master-port 20041" in c and "--place.engines=2" in c for c in calls if "torchrun" in c
        )
    else:
        started = sorted(c for c in calls if "ray start" in c)
        assert [c.split()[0] for c in started] == ["n0", "n1", "n2"] and "--head --node-ip-address=10.0.0.7" in started[
            0
        ]
        for c, own in zip(started[1:], ("10.0.0.11", "10.0.0.12")):
            assert f"--address=10.0.0.7:6379 --node-ip-address={own} --num-gpus=4" in c
        asked = [c.split()[:4] for c in calls if "getent" in c]
        assert ["n2", "getent", "ahosts", "n0"] in asked, "the address by which others reach it"
        (run,) = (c for c in calls if "rondel train" in c)
        token = re.search(r" token ([0-9a-f]{64})$", run)
        assert token and all(c.endswith(token[0]) for c in started), "who has no token runs no code on the nodes"
        assert run.startswith("rondel train") and "--place.ranks=10" in run and "--place.cluster=ray:auto" in run


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_ray_job_has_what_its_definition_requires_and_nothing_else(nodes):
    told = kuberay(layout(nodes, 8, "--place.engines=2"), PodSettings("registry/rondel:1", "disk", "keys"))
    config, job = yaml.safe_load_all(told)
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    parts = [("RayJobSpec", spec), ("RayClusterSpec", cluster), ("HeadGroupSpec", cluster["headGroupSpec"])]
    parts += [("WorkerGroupSpec", group) for group in cluster.get("workerGroupSpecs", [])]
    for kind, part in parts:
        assert REQUIRED[kind] <= part.keys() <= FIELDS[kind], kind
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"] in told.splitlines()[1]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert (
        re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"]) and len(job["metadata"]["name"]) <= 47
    )
    groups = cluster.get("workerGroupSpecs", [])
    assert sum(g["replicas"] for g in groups) == nodes - 1 and all(g["minReplicas"] == g["maxReplicas"] for g in groups)
    for part in [cluster["headGroupSpec"], *groups]:
        assert all(isinstance(v, str) for v in part["rayStartParams"].values())
        (container,), volumes = part["template"]["spec"]["containers"], part["template"]["spec"]["volumes"]
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        assert container["image"] == "registry/rondel:1" and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert (
            [m["name"] for m in container["volumeMounts"]] == [v["name"] for v in volumes] == ["recipe", "runs", "shm"]
        )
        assert (
            volumes[0]["configMap"]["name"] == config["metadata"]["name"]
            and volumes[1]["persistentVolumeClaim"]["claimName"] == "disk"
        )
    assert config["data"] == {"quickstart.toml": RECIPE.read_text()}
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["rondel", "train", "/recipe/quickstart.toml"]
    told_job = read_job(str(RECIPE), *words[3:])[0]
    assert (told_job.place.on_ray, told_job.place.ray_address, told_job.run.folder) == (
        True,
        "auto",
        "/runs/quickstart",
    )
    assert told_job.place.ranks + told_job.place.engines == 8 * nodes


@pytest.mark.parametrize(
    ("nodes", "gpus", "more", "way", "said"),
    [
        (1, 1, [], "ray", "0 ranks and 1 engines do not fit"),
        (1, 4, ["--place.ranks=4"], "ray", "4 ranks and 1 engines do not fit on 1 x 4 GPUs"),
        (2, 2, ["--place.engines=2"], "torchrun", "leave no GPU of 2"),
        (2, 4, ["--place.ranks=3"], "torchrun", "Leave place.ranks out"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(nodes, gpus, more, way, said):
    with pytest.raises(UserError, match=said):
        layout(nodes, gpus, *more, way=way)


def test_an_indexed_job_has_a_pod_a_node_and_lets_no_other_pod_in():
    told = indexed_job(layout(3, 8, "--place.engines=2", way="torchrun"), PodSettings())
    _, service, fence, job = yaml.safe_load_all(told)
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert spec["completions"] == spec["parallelism"] == 3
    pod = spec["template"]
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == fence["spec"]["podSelector"]["matchLabels"] == labels
    assert fence["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"], "a pod's name is INDEX of the job, in this domain"
    ((shell, flag, script),) = [c["command"] for c in pod["spec"]["containers"]]
    ran = [
        subprocess.run(
            [shell, flag, script.replace("exec torchrun", "echo")],
            env={"JOB_COMPLETION_INDEX": str(index), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        ).stdout
        for index in range(3)
    ]
    assert [re.search(r"--node-rank (\d) --nproc-per-node (\d)", words).groups() for words in ran] == [
        ("0", "6"),
        ("1", "8"),
        ("2", "8"),
    ]
    assert all("--master-addr quickstart-0.quickstart " in words for words in ran)
    assert trained(script).run.folder == "/runs/quickstart"


def test_models_are_staged_on_every_node_before_anything_starts(capsys):
    submit(str(RECIPE), "--to", "slurm", "--nodes", "2", "--stage", "/local/models", "--loop.steps=3", "--dry-run")
    text = capsys.readouterr().out
    assert "export RONDEL_MODELS=/local/models\n" in text
    once, each = (line for line in text.splitlines() if "rondel prepare" in line)
    assert once.startswith('on "$first"') and "--loop.steps=3" in once and "--stage" not in once
    assert each.strip().startswith('on "$node"') and each.endswith("--stage /local/models &")
    assert text.index("rondel prepare") < text.index("ray start")
    assert "--stage is for --to slurm" in refused(capsys, str(RECIPE), "--to", "kuberay", "--stage", "/local")


def test_nodes_without_gpus_share_the_ranks_of_the_recipe():
    text = slurm_script(layout(2, 0, "--place.ranks=4", way="torchrun"), way="torchrun")
    assert "gpus" not in text and "ranks=2\n" in text and trained(text).place.ranks == 4
    with pytest.raises(UserError, match=r"3 ranks on 2 nodes do not, so set place\.ranks to a multiple of 2"):
        layout(2, 0, "--place.ranks=3", way="torchrun")


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("30", 1800), ("30:15", 1815), ("2:00:01", 7201), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:5", 86405)],
)
def test_the_run_is_asked_for_its_checkpoint_before_the_time_is_over(limit, seconds):
    assert limit_seconds(limit) == seconds, "the formats of sbatch(1)"
    text = slurm_script(layout(2, 8, way="torchrun"), way="torchrun", directives={"time": limit})
    before = int(re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)[1])
    assert before == min(300, seconds // 4) and f"SHUTDOWN_TIMEOUT={before * 4 // 5}\n" in text
    with pytest.raises(UserError, match="--time 1h is no time that SLURM reads: MINUTES"):
        limit_seconds("1h")


@pytest.mark.parametrize(
    "words",
    [
        "--run.folder=https://me:secret@host/runs",
        "--model.path=hf_abcdefghijklmnopqrstuvwx",
        "--task.reward={ kind = 'judge', api_key = 'x1' }",
    ],
)
def test_a_secret_comes_into_no_script(words):
    with pytest.raises(UserError, match="holds what looks like a secret"):
        ClusterLayout(RECIPE, read_job(str(RECIPE))[0], 2, 8, (words,)).check_layout("ray")


def submit(*words: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["submit", *words])
    assert not end.value.code, words


def refused(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["submit", *words])
    assert end.value.code == 1
    return capsys.readouterr().err


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder of stand-ins that is the whole PATH; `put(name, body)` adds one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()

    def put(name: str, body: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> "{tmp_path}/calls"\n{body}\n')
        path.chmod(0o755)

    (tmp_path / "bin" / "tail").symlink_to(shutil.which("tail", path="/usr/bin:/bin"))
    return put


def test_a_job_of_slurm_is_submitted_asked_about_and_cancelled(tools, tmp_path, capfd):
    given = [str(RECIPE), "--run.folder=runs/a", "--nodes", "2", "--to", "slurm"]
    assert "sbatch is not on the PATH: submit from a login node" in refused(capfd, *given)
    assert "was not submitted from here" in refused(capfd, *given[:2], "--status") and not (tmp_path / "runs").exists()
    tools("sbatch", "echo '41;cluster'")
    tools("squeue", "echo 'RUNNING 0:12 of 1:00:00, 2 nodes, n[0-1]'")
    tools("scancel", "exit 0")
    submit(*given, "--partition", "gpu", "--time", "1:00:00")
    assert "slurm job 41, by runs/a/submit/job.sh" in capfd.readouterr().out
    script = (tmp_path / "runs/a/submit/job.sh").read_text()
    assert "#SBATCH --partition=gpu\n" in script and "#SBATCH --time=1:00:00\n" in script and "--account" not in script
    submit("runs/a", "--status")
    assert "slurm job 41, submitted" in (said := capfd.readouterr().out) and "RUNNING 0:12" in said
    assert "runs/a has job 41 already (RUNNING" in refused(capfd, *given)
    submit("runs/a", "--cancel")
    tools("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert "Unable to contact" in refused(capfd, *given), "a job that one cannot ask about is not over"
    tools("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")  # forgotten
    tools("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    submit("runs/a", "--status")
    assert "no longer in the queue" in capfd.readouterr().out
    tools("sacct", "echo ' COMPLETED      0:0   00:10:02 '")
    (tmp_path / "runs/a/submit/slurm-41.log").write_text("step 1\n")
    submit(*given[:2], "--logs")
    assert "step 1" in capfd.readouterr().out
    submit("runs/a", "--status")
    assert "COMPLETED 0:0 00:10:02" in capfd.readouterr().out
    tools("squeue", "echo 'CANCELLED 0:12 of 1:00:00, 2 nodes, n[0-1]'")  # for some minutes
    submit("runs/a", "--status")
    assert "CANCELLED 0:12" in capfd.readouterr().out
    tools("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert "sbatch --parsable refused (exit 1): sbatch: error: invalid partition" in refused(capfd, *given)
    calls = (tmp_path / "calls").read_text()
    assert "sbatch --parsable --output=runs/a/submit/slurm-%j.log runs/a/submit/job.sh\n" in calls
    assert "scancel 41\n" in calls and submitted_job(tmp_path / "runs/a").id == "41"


def test_a_log_is_followed_until_the_job_is_over(tools, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("rondel.cli.submit.BETWEEN", 0.1)
    monkeypatch.setattr("rondel.cli.submit.REST", 0.5)
    given = [str(RECIPE), "--run.folder=runs/a", "--nodes", "2", "--to", "slurm"]
    tools("sbatch", "echo 41")
    submit(*given)
    log = tmp_path / "runs/a/submit/slurm-41.log"
    first = f"if [ -e {log} ]; then echo step 2 >> {log}; echo COMPLETED; else echo step 1 > {log}; echo RUNNING; fi"
    tools("squeue", first)
    submit("runs/a", "--logs")
    assert capfd.readouterr().out.endswith("step 1\nstep 2\n")


@pytest.mark.parametrize(
    ("to", "kind", "running", "ended"),
    [
        (
            "kubernetes",
            "job",
            '{"active": 2, "ready": 1}',
            '{"succeeded": 2, "conditions": [{"type": "Complete", "status": "True"}]}',
        ),
        (
            "kuberay",
            "rayjob",
            '{"jobDeploymentStatus": "Running"}',
            '{"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}',
        ),
    ],
)
def test_a_job_of_kubernetes_is_submitted_asked_about_and_cancelled(tools, tmp_path, capfd, to, kind, running, ended):
    given = [str(RECIPE), "--run.folder=runs/a", "--nodes", "2", "--to", to, "--namespace", "team"]
    tools("kubectl", "exit 0")
    assert "there is no volume claim 'runs'" in refused(capfd, *given)
    answer = 'case "$*" in *pvc*) echo pvc/runs;; *"get {kind}"*) echo \'{{"status": {status}}}\';; *logs*) echo step 1;; esac'
    tools("kubectl", answer.format(kind=kind, status=running))
    assert f"{kind} quickstart is there already" in refused(capfd, *given)
    tools("kubectl", answer.format(kind=kind, status=ended))
    submit(*given)
    submit("runs/a", "--status")
    assert {"job": "Complete · 2 succeeded", "rayjob": "Complete, SUCCEEDED"}[kind] in capfd.readouterr().out
    submit("runs/a", "--logs")
    assert "step 1" in capfd.readouterr().out
    tools("kubectl", answer.format(kind=kind, status=running))
    assert "runs/a has job quickstart already" in refused(capfd, *given)
    submit("runs/a", "--cancel")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all("--namespace=team" in c for c in calls)
    applied = next(i for i, c in enumerate(calls) if " apply " in c)
    assert f" delete {kind} quickstart" in calls[applied - 1] and f" delete {kind} quickstart" in calls[-1]


def test_a_ray_job_runs_a_script_that_every_node_sees(tools, tmp_path, capfd):
    given = [str(RECIPE), "--run.folder=runs/a", "--nodes", "2", "--gpus", "4", "--to", "ray"]
    assert "which Ray cluster? Name its dashboard" in refused(capfd, *given)
    tools(
        "ray", 'if [ "$2" = status ]; then echo "Status for job: RUNNING"; fi; if [ "$2" = logs ]; then echo step 1; fi'
    )
    submit(*given, "--address", "http://head:8265")
    submit("runs/a", "--status")
    submit("runs/a", "--logs")
    said = capfd.readouterr().out
    assert "Status for job: RUNNING" in said and "step 1" in said
    submit("runs/a", "--cancel")
    calls, job = (tmp_path / "calls").read_text().splitlines(), submitted_job(tmp_path / "runs/a")
    script = tmp_path / "runs/a/submit/job.sh"
    assert calls[0].endswith(f"--submission-id {job.id} --no-wait -- bash {script}") and calls[-1].endswith(job.id)
    assert all("--address http://head:8265" in c for c in calls) and f"\ncd {tmp_path}\n" in script.read_text()
    assert trained(script.read_text()).place.ranks == 7


def test_what_is_asked_of_a_job_stands_alone(capsys):
    assert "--status, --logs and --cancel stand alone" in refused(capsys, str(RECIPE), "--status", "--logs")
    assert "where to? --to slurm" in refused(capsys, str(RECIPE))


def test_a_dry_run_prints_the_file(capsys):
    submit(
        "--to", "slurm", str(RECIPE), "--nodes", "2", "--gpus", "4", "--with", "torchrun", "--loop.steps=9", "--dry-run"
    )
    assert "--loop.steps=9" in capsys.readouterr().out
    submit("--to", "kuberay", str(RECIPE), "--nodes", "2", "--dry-run")
    assert len(list(yaml.safe_load_all(capsys.readouterr().out))) == 2


def test_recipes_for_a_machine_and_for_a_ray_cluster_differ_by_three_lines():
    """The pair that docs/place.md shows."""
    text = (ROOT / "docs" / "place.md").read_text()
    one, two = re.findall(r"```toml\n(# (?:one machine|a Ray cluster).*?)```", text, re.DOTALL)
    lines = [
        {line.strip() for line in block.splitlines() if line.strip() and not line.startswith("#")}
        for block in (one, two)
    ]
    assert len(lines[1] - lines[0]) == 3 and not lines[0] - lines[1]
    jobs = [Job.parse(over_tiny(block), "docs/place.md") for block in (one, two)]
    trees = [job.to_dict() for job in jobs]
    places = [tree.pop("place") for tree in trees]
    assert trees[0] == trees[1] and places[0]["cluster"] == "local" and places[1]["cluster"] == "ray:auto"


def over_tiny(block: str) -> dict:
    """Over the tiny recipe, as test_law_16_docs.py reads pieces of recipes."""
    import tomllib

    tree = tomllib.loads((ROOT / "recipes" / "tiny.toml").read_text())
    for section, keys in tomllib.loads(block).items():
        tree[section] = tree.get(section, {}) | keys
    return tree
