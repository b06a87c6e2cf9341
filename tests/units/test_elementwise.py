"""Activations whose bits do not depend on where a number lies, nor on how many threads there are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2CLS, ACT2FN

from rondel.models.elementwise import fill_activations, in_whole_vectors, sigmoid, silu, softplus

PLAIN = {silu: F.silu, sigmoid: torch.sigmoid, softplus: F.softplus}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("function", PLAIN)
def test_a_number_has_the_same_bits_wherever_it_lies(function, dtype):
    """Of a tensor cut anywhere, of its parts, and with its gradient; the values are torch's, but for the last bit."""
    x = torch.randn(700, generator=torch.Generator().manual_seed(0)).to(dtype) * 4
    whole = function(x)
    torch.testing.assert_close(whole, PLAIN[function](x))
    for n in (1, 15, 31, 35, 48, 80, 317, 699):
        assert torch.equal(function(x[:n]), whole[:n]) and torch.equal(function(x[-n:]), whole[-n:])
    leaf, rows = x.clone().requires_grad_(), x[:694].view(2, 347).clone().requires_grad_()
    function(leaf).sum().backward()
    function(rows).sum().backward()
    assert torch.equal(rows.grad.flatten(), leaf.grad[:694]) and not torch.equal(leaf.grad, torch.zeros_like(x))
    odd = torch.stack([x, x])[:, ::2]
    assert torch.equal(function(odd)[0], whole[::2]) and function(x[:0]).shape == (0,)


def test_threads_change_no_bit():
    """Shares of a large tensor end inside a vector where its size is no multiple of their number."""
    x = torch.randn((1 << 16) + 7, generator=torch.Generator().manual_seed(1))
    before, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(silu(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_every_activation_of_transformers_is_filled_once():
    model = nn.ModuleDict({name: ACT2FN[name] for name in ACT2CLS if name not in ("xielu", "gelu_10")})
    x = torch.randn(97, generator=torch.Generator().manual_seed(2))
    plain = {name: act(x) for name, act in model.items()}
    for _ in range(2):
        fill_activations(model)
    for name, act in model.items():
        torch.testing.assert_close(act(x), plain[name])
        if name != "prelu":
            assert act.forward.func is in_whole_vectors and act.forward.args[0].__name__ == "forward", name
            assert all(torch.equal(act(x[:n]), act(x)[:n]) for n in (1, 3, 47, 96)), name
