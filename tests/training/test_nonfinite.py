"""The first operation whose result is not finite: module, operation, largest input, and which format would hold it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mantissa import first_nonfinite


class Block(nn.Module):
    """Two products and what is between; the second overflows fp16 where ``factor`` is large."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.up_proj.weight.fill_(1.0)
            self.down_proj.weight.fill_(factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.up_proj(x)))


def test_it_names_the_product_that_overflows_and_the_formats_that_would_hold_it() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(1.0), Block(1000.0)])}).half()
    with first_nonfinite(model) as seen:
        x = torch.ones(2, 8, dtype=torch.float16)
        for layer in model["layers"]:
            x = layer(x)
        x.sum()
    found = seen.found
    assert found is not None
    assert (found.module, found.phase, found.dtype) == ("layers.1.down_proj", "forward", torch.float16)
    assert found.operation in ("aten::mm", "aten::addmm", "aten::linear")
    assert (found.largest_input, found.needed) == (1000.0, 64 * 8 * 8 * 1000.0)  # 8, 64, 512 come out of the products
    assert (found.count, found.total, found.inherited) == (16, 16, False)
    assert "fp32 would hold and fp16 (65504) would not" in str(seen)


def test_a_cast_needs_what_it_was_given() -> None:
    model = nn.Identity()
    with first_nonfinite(model) as seen:
        model(torch.tensor([1e5, 2.0])).half()
    assert seen.found is not None
    assert seen.found.needed == pytest.approx(1e5)
    assert seen.found.module == "the loop, outside of the model,"


def test_what_no_format_holds() -> None:
    model = nn.Linear(2, 2)
    with first_nonfinite(model) as seen:
        torch.log(model(torch.ones(1, 2)) * 0)
    assert seen.found is not None
    assert seen.found.operation == "aten::log"
    assert "no format holds it" in str(seen)


def test_in_a_backward_it_names_the_module_whose_gradient_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[1].weight.fill_(1e38)
    with first_nonfinite(model) as seen:
        (model(torch.full((1, 4), 1e-38)).sum() * 1e10).backward()
    assert seen.found is not None
    assert (seen.found.module, seen.found.phase) == ("1", "backward")
    assert seen.found.needed == pytest.approx(1e48, rel=1e-5)
    assert "fp32 (3.4028e+38) would not" in str(seen)


def test_a_bad_parameter_is_not_blamed_on_an_operation() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with first_nonfinite(model) as seen:
        model(torch.ones(1, 2))
    assert seen.found is not None
    assert seen.found.inherited
    assert "its input was not finite already" in str(seen)


class Masked(nn.Module):
    """Attention with a mask of -inf, an in-place update and memory that nobody wrote."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.T + torch.full((4, 4), float("-inf")).triu(1)
        scores = scores.masked_fill(torch.eye(4, dtype=torch.bool) & False, float("-inf"))
        out = torch.empty(4, 4)
        out.copy_(scores.softmax(-1))
        return out.mul_(2.0) @ x


def test_masks_and_unwritten_memory_are_nothing_and_the_model_is_as_it_was() -> None:
    model = Masked()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain = model(x)
    with first_nonfinite(model) as seen:
        watched = model(x)
        watched.sum().backward()
    assert seen.found is None
    assert str(seen) == "every result was finite"
    assert torch.equal(watched, plain)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_what_is_raised_inside_comes_out_and_hooks_are_gone() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shapes"), first_nonfinite(model):
        model(torch.ones(1, 3))
    assert not model._forward_hooks
    with first_nonfinite(model) as seen:
        model(torch.ones(1, 2))
    assert seen.place[1] == "code"
