"""How many attacks the tests carry out, counted where they are made. `python tests/kits/attack_counts.py` prints them;
with `-- run` behind it all of them are carried out, and timed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).parents[1]
SUITE = [
    "e2e/test_sandbox.py", "units/test_poisons.py", "units/test_foreign_text.py", "units/test_gateway_bodies.py",
    "e2e/test_serve.py::test_malformed_requests_are_told_and_never_break_it", "e2e/test_broken_inputs.py", "e2e/test_disk.py",
    "e2e/test_sockets.py",
]  # fmt: skip
WANTED = {
    "attempts on the native wall": 150,
    "attempts on bubblewrap": 150,
    "poisoned answers to the code reward": 60,
    "doors for text": 40,
    "texts with half characters or control tokens, through every door": 40,
    "malformed bodies": 5000,
    "broken inputs": 200,
    "moments of SIGKILL": 20,
    "moments of a full disk": 20,
    "moments of a read-only disk": 20,
}


def attack_counts() -> Counter[str]:
    """Of different ones: a case that is there twice counts once."""
    sys.path[:0] = [str(TESTS), str(TESTS / "e2e"), str(TESTS / "units")]
    import test_broken_inputs
    import test_disk
    import test_foreign_text
    import test_gateway_bodies
    import test_serve

    from kits.poisoned_answers import POISONS
    from kits.sandbox_attacks import ATTACKS

    found: Counter[str] = Counter()
    for wall, name in (("native", "the native wall"), ("bubblewrap", "bubblewrap")):
        found[f"attempts on {name}"] = len({attack.code for attack in ATTACKS if attack.only in ("", wall)})
    found["poisoned answers to the code reward"] = len(set(POISONS.values()))
    found["doors for text"] = len(test_foreign_text.DOORS)
    found["texts with half characters or control tokens, through every door"] = len(test_foreign_text.DOORS) * len(
        set(test_foreign_text.TEXTS.values())
    )
    bodies = {(path, body) for path in test_gateway_bodies.BODIES for body in test_gateway_bodies.bodies_for(path)}
    found["malformed bodies"] = len(bodies) + len(
        {(path, body, str(headers)) for path, body, headers in test_serve.bad_requests()}
    )
    found["broken inputs"] = len(test_broken_inputs.CASES)
    for disk in ("SIGKILL", "a full disk", "a read-only disk"):
        found[f"moments of {disk}"] = test_disk.MOMENTS
    return found


def main() -> None:
    found = attack_counts()
    for name, wanted in WANTED.items():
        print(f"{found[name]:6d}  {name} (at least {wanted})")
    if sys.argv[-1] == "run":
        began = time.perf_counter()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what a test's process leaves counts, too
        every = ["-m", "sweep or not sweep"]  # each moment, and not the few of `make test`
        ended = subprocess.run([sys.executable, "-m", "pytest", "-q", *every, *(str(TESTS / name) for name in SUITE)])
        seconds = time.perf_counter() - began
        with suppress(ChildProcessError):
            while True:
                os.wait()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{seconds:6.0f}  seconds for all of them, on one core; {used.ru_utime + used.ru_stime:.0f} s of it busy")
        sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
