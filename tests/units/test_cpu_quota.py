"""What a container's quota leaves of a machine's processors, read from folders that stand in for those of the kernel."""

import os
from pathlib import Path

import pytest

from rondel.runtime.devices import default_threads
from rondel.system import cpu_quota
from rondel.system.cpu_quota import find_cpu_quota, usable_processors


def made(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "fs"


V1 = "9:name=systemd:/box\n4:cpu,cpuacct:/box/job\n3:cpuset:/box\n"
CASES = {  # /proc/self/cgroup, files, the quota and whose it is
    "v2": ("0::/box\n", {"box/cpu.max": "150000 100000\n"}, 1.5, "box"),
    "v2, of a parent": (
        "0::/box/job\n",
        {"box/job/cpu.max": "max 100000\n", "box/cpu.max": "50000 100000\n"},
        0.5,
        "box",
    ),
    "v2, its own is the root": ("0::/\n", {"cpu.max": "350000 100000\n"}, 3.5, "."),
    "v2, none": ("0::/box\n", {"box/cpu.max": "max 100000\n"}, None, ""),
    "v1": (
        V1,
        {"cpu,cpuacct/box/job/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/box/job/cpu.cfs_period_us": "100000\n"},
        1.5,
        "cpu,cpuacct/box/job",
    ),
    "v1, seen from inside": (
        V1,
        {"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "50000\n"},
        0.5,
        "cpu",
    ),
    "v1, none": (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None, ""),
    "hybrid": (
        V1 + "0::/box\n",
        {
            "unified/box/cgroup.procs": "1\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        2.0,
        "cpu,cpuacct",
    ),
    "no control groups": ("", {}, None, ""),
    "what nobody can read": ("0::/box\n", {"box/cpu.max": "plenty\n"}, None, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_quota_on_the_way_up(tmp_path, name):
    groups, files, processors, where = CASES[name]
    (tmp_path / "cgroup").write_text(groups)
    found = find_cpu_quota(made(tmp_path, files), tmp_path / "cgroup")
    assert found == (None if processors is None else (processors, tmp_path / "fs" / where))


def test_seconds_that_a_group_has_used(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "cpuacct.usage").write_text("2500000000\n")
    (tmp_path / "v1" / "cpu.stat").write_text("nr_periods 3\nnr_throttled 1\nthrottled_time 9\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\nthrottled_usec 900000\n")
    used = [cpu_quota.CpuQuota(1.0, folder).used_seconds() for folder in (tmp_path, tmp_path / "v1")]
    assert used == [1.5, 2.5]


@pytest.mark.parametrize("quota, threads", [(0.4, 1), (1.5, 1), (2.0, 2), (3.9, 3), (200.0, 64), (None, 64)])
def test_threads_on_a_large_machine_are_those_of_the_quota(monkeypatch, tmp_path, quota, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    (tmp_path / "cgroup").write_text("0::/box\n")
    text = "max 100000" if quota is None else f"{quota * 100000:.0f} 100000"
    monkeypatch.setattr(cpu_quota, "MOUNT", made(tmp_path, {"box/cpu.max": text}))
    monkeypatch.setattr(cpu_quota, "GROUPS", tmp_path / "cgroup")
    assert usable_processors() == default_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert default_threads() == 7
