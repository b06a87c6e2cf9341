"""Which cores each worker gets, and what is said where there are too few."""

import pytest

from rondel.assemble import worker_devices
from rondel.core.events import Warned, subscribe


@pytest.mark.parametrize(
    ("cores", "ranks", "engines", "said"),
    [
        (2, 40, 1, "2 cores for 40 trainer processes (place.ranks or place.mesh): they take turns"),
        (1, 1, 4, "1 core for 4 engine processes (place.engines): they take turns"),
        (4, 8, 5, "4 cores for 8 trainer processes (place.ranks or place.mesh) and 5 engine processes (place.engines)"),
        (4, 4, 4, None),
    ],
)
def test_more_ranks_than_cores_are_warned_of_once(monkeypatch, cores, ranks, engines, said):
    """As many of each as there are cores is how a run of one machine is arranged, and nothing is said of it."""
    monkeypatch.setattr(worker_devices, "usable_processors", lambda: cores)
    told = []
    stop = subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    try:
        worker_devices.warn_if_crowded(ranks, engines)
    finally:
        stop()
    assert len(told) == (said is not None)
    assert not said or (said in told[0] and f"Use at most {cores}" in told[0])
