"""runtime/termination.py: the first signal asks a run to end, the second ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from rondel.runtime.termination import ONE

ASKED = """
import asyncio, sys
from rondel.runtime.termination import GracefulStop

async def work(ending):
    asyncio.get_running_loop().call_soon(lambda: print("works", flush=True))  # once it waits
    await ending.wait()
    print("asked", flush=True)
    await asyncio.sleep(60)

with GracefulStop() as ending:
    if sys.argv[1] == "starting":
        print("works", flush=True)
        try:
            __import__("time").sleep(60)
        except Exception as error:
            sys.exit(str(error))
    asyncio.run(work(ending))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends(number):
    with subprocess.Popen([sys.executable, "-c", ASKED, "running"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "works\n"
        process.send_signal(number)
        process.send_signal(number)  # forwarded by a launcher
        assert process.stdout.readline() == "asked\n"
        time.sleep(ONE + 0.1)  # what comes later was meant
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(10) == 128 + number


def test_before_there_is_anything_to_keep_one_signal_is_enough():
    with subprocess.Popen(
        [sys.executable, "-c", ASKED, "starting"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "works\n"
        process.terminate()
        assert (
            "stopped by SIGTERM while it was starting; continue with the same command"
            in process.communicate(timeout=10)[1]
        )
