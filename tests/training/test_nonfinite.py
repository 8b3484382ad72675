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


INF = float("inf")


class Scores(nn.Module):
    """Weights of values by a softmax of what ``mask`` makes of the scores."""

    def __init__(self, mask) -> None:
        super().__init__()
        self.mask, self.lin = mask, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.mask(self.lin(x)).softmax(-1).square().sum()


HIDDEN = torch.tensor([[True, False, False], [False, False, True]])


@pytest.mark.parametrize(
    "mask",
    [
        lambda s: s + torch.zeros(2, 3).masked_fill(HIDDEN, -INF),
        lambda s: s.masked_fill(HIDDEN, -INF),
        lambda s: torch.where(HIDDEN, -INF, s),
        lambda s: s + (~HIDDEN).float().log(),  # -inf of finite numbers, which the softmax makes 0
        lambda s: s.scatter(1, torch.tensor([[0], [2]]), -INF),
        lambda s: s.index_put((HIDDEN,), torch.tensor(-INF)),
        lambda s: torch.nn.functional.pad(s, (0, 1), value=-INF),
        lambda s: s * s.detach().exp().log().exp() + torch.tensor([0.0, -INF, 0.0]),  # as a batch has it
        lambda s: -torch.where(HIDDEN, INF, -s),
    ],
)
def test_a_mask_of_minus_infinity_is_nothing_wherever_it_comes_from(mask) -> None:
    model = Scores(mask)
    with first_nonfinite(model) as seen:
        model(torch.ones(2, 3)).backward()
    assert seen.found is None
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_labels_that_are_missing_and_left_out_are_nothing_and_others_are_not_blamed_on_an_operation() -> None:
    model = nn.Linear(2, 1)
    labels = torch.tensor([[1.0], [float("nan")]])
    with first_nonfinite(model) as seen:
        error = (model(torch.ones(2, 2)) - labels).square()
        error.nan_to_num(0.0).sum()
    assert seen.found is None
    with first_nonfinite(model) as seen:
        (model(torch.ones(2, 2)) - labels).square().mean().backward()
    assert seen.found is not None
    assert (seen.found.operation, seen.found.inherited) == ("aten::sub", True)
    assert "made none of them" in str(seen)


def test_the_operation_that_makes_one_is_named_although_the_batch_had_another() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with first_nonfinite(model) as seen:
        model[0](torch.tensor([float("nan"), 1.0])).add(1.0)
        torch.full((2,), 3e38).mul(model[1](torch.tensor([1.0, 10.0])))
    assert seen.found is not None
    assert (seen.found.operation, seen.found.inherited) == ("aten::mul", False)


def test_a_row_that_is_masked_as_a_whole_is_the_softmax_s() -> None:
    model = Scores(lambda s: s.masked_fill(torch.tensor([[True] * 3, [False] * 3]), -INF))
    with first_nonfinite(model) as seen:
        model(torch.ones(2, 3))
    assert seen.found is not None
    assert seen.found.operation == "aten::_softmax"
    assert not seen.found.inherited


def test_the_entropy_of_a_certain_choice_is_the_logarithm_s() -> None:
    """0 log 0: the product is NaN, and the infinity before it is what was first."""
    p = nn.Parameter(torch.tensor([0.0, 1.0]))
    with first_nonfinite(nn.Identity()) as seen:
        -(p * p.log()).sum()
    assert seen.found is not None
    assert seen.found.operation == "aten::log"


def test_the_loss_s_own_backward_is_not_the_model_s() -> None:
    """sqrt(0): finite forwards, infinite backwards; in a second step too, where a module was the last of the first."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with first_nonfinite(model) as seen:
        model(torch.ones(1, 2)).square().sum().backward()
        out = model(torch.ones(1, 2))
        assert seen.place[1] == "code"
        (out - out.detach()).sum().abs().sqrt().backward()
    assert seen.found is not None
    assert seen.found.phase == "backward"
    assert seen.found.module == "the loss, outside of the model,"
    assert seen.found.operation == "aten::div"


def test_a_loss_inside_of_the_model_is_the_model_s() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x * 0).sub(self.lin.bias).sum().sqrt()

    model = WithLoss()
    with first_nonfinite(model) as seen:
        model(torch.ones(1, 2)).backward()
    assert seen.found is not None
    assert (seen.found.module, seen.found.phase) == ("WithLoss", "backward")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_that_torch_cannot_compare_change_nothing_of_what_is_computed() -> None:
    model = nn.EmbeddingBag(5, 2, sparse=True, mode="sum")
    with first_nonfinite(model) as seen:
        model(torch.tensor([[1, 1, 3]])).sum().backward()
        torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn).float().sum()
        torch.eye(2).to_sparse_csr().values().sum()
    assert seen.found is None
    torch.nn.init.zeros_(model.weight)
    torch.testing.assert_close(model.weight.grad.to_dense()[:, 0], torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0]))
    with first_nonfinite(model) as seen:
        (model(torch.tensor([[1, 1, 3]])).sum() * 3e38).backward()
    assert seen.found is not None
    assert seen.found.phase == "backward"  # two entries of 3e38 for one row
