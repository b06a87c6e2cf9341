"""A model is checked once a process only where nothing that the check could see differs."""

import types

import pytest
import torch

from kits import checked_once
from kits.engine import tiny
from rondel.models import load_check

pytestmark = pytest.mark.slow


@pytest.fixture
def checks():
    """What was really checked while the test runs, in a process that has checked nothing."""
    real, proven, made = checked_once._real, dict(checked_once._proven), []
    checked_once._proven.clear()
    checked_once._real = lambda model, *how: (made.append(model), real(model, *how))[1]
    yield made
    checked_once._real = real
    checked_once._proven.update(proven)


def asked_again(model) -> tuple[int, int]:
    model.set_attn_implementation("eager")
    return load_check.check_attention(model, "tiny", None, None, [])


def test_equal_models_are_checked_once_and_no_other(checks):
    model = tiny().model
    assert len(checks) == 1
    again = tiny().model
    assert len(checks) == 1 and again is not model and again.config._attn_implementation == load_check.NAME
    before = asked_again(model)  # with what loading adds behind the check
    assert len(checks) == 2 and asked_again(again) == before and len(checks) == 2
    with torch.no_grad():
        again.lm_head.weight[0, 0] += 1e-3
    asked_again(again)
    assert len(checks) == 3, "other bits"
    model.config.attention_bias = not model.config.attention_bias
    asked_again(model)
    assert len(checks) == 4, "other settings"
    layer = model.model.layers[0].mlp
    layer.forward = types.MethodType(lambda self, x: type(self).forward(self, x), layer)
    asked_again(model)
    assert len(checks) == 5, "other code"


def test_who_replaces_something_has_checks_of_its_own(checks, monkeypatch):
    tiny()
    tiny()
    assert len(checks) == 2


def test_a_refused_model_is_refused_again(checks):
    model = tiny().model
    layer = model.model.layers[0].self_attn
    layer.forward = types.MethodType(lambda self, hidden_states, **_: (hidden_states, None), layer)
    for _ in range(2):
        with pytest.raises(load_check.ModelError):
            asked_again(model)
    assert len(checks) == 3
