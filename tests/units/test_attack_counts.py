"""There are as many attacks as docs/security.md says."""

from __future__ import annotations

import pytest

from kits.attack_counts import SUITE, TESTS, WANTED, attack_counts


@pytest.mark.slow
def test_there_are_enough_of_each():
    found = attack_counts()
    assert {name: found[name] for name, wanted in WANTED.items() if found[name] < wanted} == {}
    assert all((TESTS / name.partition("::")[0]).is_file() for name in SUITE)
