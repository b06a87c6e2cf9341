"""Rows of an algorithm for rollouts that are tried without one."""

from types import SimpleNamespace

NO_ROWS = SimpleNamespace(all_rows=())
