"""Commands that tests fork begin with everything imported."""

import pytest

from kits import forked

HAS = """
import os, sys
print([name in sys.modules for name in ("kits.preloaded", "torch", "transformers", "rondel.driver.controller")], os.environ.get("PYTHONPATH"))
"""


@pytest.mark.slow
def test_a_forked_command_imports_nothing_again(tmp_path, monkeypatch):
    """Otherwise each of some hundred tests takes seconds to import torch once more, and nothing says so."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "has.py").write_text(HAS)
    assert forked.run([], script=tmp_path / "has.py").stdout.split(" None")[0] == str([True] * 4)
