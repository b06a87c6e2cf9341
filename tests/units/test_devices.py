"""The thread of a device, and how many of its own it takes."""

import asyncio
import os

import pytest
import torch

from rondel.runtime.devices import Device, default_threads

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("said", "threads"), [("1", 1), ("3", 3), (" 2,1 ", 2), ("", None), ("0", None), ("-1", None), ("many", None)]
)
def test_threads_are_those_of_the_environment_or_all_cores(monkeypatch, said, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert default_threads() == (threads or CORES)


def test_a_device_computes_with_as_many(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert asyncio.run(Device().run(torch.get_num_threads)) == 1
    assert Device(threads=2).call(torch.get_num_threads) == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert Device().call(torch.get_num_threads) == CORES
