"""A plugin of pytest that writes what became of each test, one JSON line each: loaded by PYTEST_ADDOPTS in the box that
grades. A test has passed if all of its phases have.
"""

import json
import os

_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report):
    before = _outcomes.get(report.nodeid)
    now = report.outcome
    if now == "passed" and (before is not None or report.when != "call"):
        now = before  # setup and teardown pass: the call decides
    elif now == "skipped" and hasattr(report, "wasxfail"):
        now = "xfailed"
    if now is not None and before != "failed":
        _outcomes[report.nodeid] = now


def pytest_sessionfinish(session):
    with open(os.environ["RONDEL_REPORT"], "w") as file:
        json.dump(_outcomes, file)
