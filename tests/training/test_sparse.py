"""Sparse gradients in the optimiser step, against the same gradients made dense and torch's GradScaler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mantissa import audit
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import grad_norm
from mantissa.precision import BF16, FP16
from mantissa.training import (
    LossScaler,
    OptimizerStep,
    ScalerConfig,
    adaptive_clip_,
    flushed_fraction,
    gradients_of,
    master_weights,
    where_nonfinite,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's own
IDS = torch.tensor([4, 1, 4, 4, 7])  # an entry of its own for each: those of 4 are one gradient


class Bag(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Embedding(9, 4, sparse=sparse, _weight=torch.randn(9, 4, generator=generator))
        self.out = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.out.weight.copy_(torch.randn(1, 4, generator=generator))


def loss_of(model: Bag) -> Tensor:
    return (model.out(model.table(IDS)).squeeze(-1) * torch.arange(1.0, 6.0)).square().sum()


def step_of(model: Bag, optimizer: Any, scaler: LossScaler | None = None, **options: Any) -> OptimizerStep:
    scaler = scaler or LossScaler(ScalerConfig(initial=2.0**10))
    return OptimizerStep(dict(model.named_parameters()), optimizer, scaler, FP16, None, **options)


def work(model: Bag):
    def backward(scale: float) -> Tensor:
        loss = loss_of(model)
        (loss * scale).backward()
        return loss.detach()

    return backward


TAKES = [
    lambda p: torch.optim.SGD(p, lr=0.01),
    lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
]


@pytest.mark.parametrize("make", TAKES)
def test_updates_are_those_of_torch_s_grad_scaler(make) -> None:
    ours, theirs = Bag(), Bag()
    step, optimizer = step_of(ours, make(ours.parameters())), make(theirs.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        assert step.run(work(ours)).kind == "stepped"
        optimizer.zero_grad()
        scaler.scale(loss_of(theirs)).backward()
        scaler.step(optimizer)
        scaler.update()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"clip": 0.01}, {"clip": 0.01, "max_grad_norm": 0.05}])
def test_norms_and_clipping_are_those_of_the_dense_gradient(options: dict[str, float]) -> None:
    found = []
    for sparse in (True, False):
        model, given = Bag(sparse), dict(options)
        factor = given.pop("clip", None)
        clip = None if factor is None else (lambda m=model, f=factor: adaptive_clip_(m.parameters(), f))
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=1.0), clip=clip, **given)
        outcome = step.run(work(model))
        found.append((outcome.grad_norm, outcome.clipped, outcome.max_scaled_grad, copy.deepcopy(model.state_dict())))
    (norm, clipped, largest, weights), (dense_norm, dense_clipped, dense_largest, dense_weights) = found
    assert norm == pytest.approx(dense_norm, rel=1e-6)
    assert largest == pytest.approx(dense_largest, rel=1e-6)
    assert clipped == dense_clipped
    for name, value in weights.items():
        torch.testing.assert_close(value, dense_weights[name], rtol=1e-5, atol=1e-7)


def test_entries_of_one_row_that_overflow_together_are_an_overflow() -> None:
    model = Bag()
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=1.0), on_nonfinite="skip")
    before = copy.deepcopy(model.state_dict())

    def backward(scale: float) -> None:
        (model.table(torch.tensor([2, 2])) * (2e38 * scale / 1024)).sum().backward()

    outcome = step.run(backward)
    assert (outcome.kind, outcome.overflows) == ("retried", 1)  # 4e38, and then 2e38
    assert not torch.equal(model.table.weight[2], before["table.weight"][2])
    assert torch.equal(model.table.weight[3], before["table.weight"][3])


@pytest.mark.parametrize("kind", ["bf16_nearest", "bf16_stochastic", "bf16_kahan"])
def test_weights_of_bf16_are_rounded_alike(kind: Any) -> None:
    left = []
    for sparse in (True, False):
        model = Bag(sparse)
        masters = master_weights(kind, dict(model.named_parameters()), BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-9)
        step = OptimizerStep(
            dict(model.named_parameters()), optimizer, LossScaler.disabled(), BF16, None, masters=masters
        )
        for _ in range(2):
            step.run(lambda scale, m=model: m.table(IDS).sum().mul(scale).backward())  # exact sums: 3 and 1
        left.append(model.table.weight.detach().clone())
    assert torch.equal(*left)


def dense_only() -> list[Any]:
    takes = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.LBFGS, torch.optim.Optimizer)
    known = [each for each in vars(torch.optim).values() if isinstance(each, type) and each not in takes]
    return [lambda p, kind=kind: kind(p, lr=0.1) for kind in known if issubclass(kind, torch.optim.Optimizer)] + [
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    ]


@pytest.mark.parametrize("make", dense_only())
def test_what_torch_refuses_in_the_middle_of_a_step_is_refused_before_it(make) -> None:
    """Torch's own refusal is the oracle that there is one; its first group has often moved then."""
    model = Bag()
    work(model)(1.0)
    with pytest.raises(RuntimeError, match="sparse"):
        make([{"params": [model.table.weight]}]).step()
    model = Bag()
    groups = [{"params": [model.out.weight]}, {"params": [model.table.weight]}]
    step, before = step_of(model, make(groups)), copy.deepcopy(model.state_dict())
    with pytest.raises(MantissaError, match=r"table\.weight has a sparse gradient"):
        step.run(work(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert step.updates == 0


def test_an_optimiser_of_another_s_decides_for_itself() -> None:
    class Own(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad.to_dense())

    model = Bag()
    assert step_of(model, Own(model.parameters())).run(work(model)).kind == "stepped"


def test_a_gradient_that_is_sparse_in_each_number_is_no_row() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    weight.grad = torch.eye(3).to_sparse()
    with pytest.raises(MantissaError, match="sparse in 2 dimensions: expected one"):
        adaptive_clip_([weight], 0.01)


def test_whoever_looks_at_gradients_takes_sparse_ones() -> None:
    model, dense = Bag(), Bag(sparse=False)
    optimizer = torch.optim.SparseAdam([model.table.weight], lr=0.1)
    for each in (model, dense):
        work(each)(1.0)
    assert float(grad_norm(p.grad for p in model.parameters())) == pytest.approx(
        float(grad_norm(p.grad for p in dense.parameters())), rel=1e-6
    )
    found = audit(model, optimizer)
    assert next(row for row in found.rows if row.role == "gradients").values == 3 * 4 + 4
    assert found.smallest == pytest.approx(2.0**-24, rel=1e-3)  # probed by what SparseAdam takes: fp32 weights
    summed = where_nonfinite(model, lambda: (model.table(IDS) * 2e38).sum().backward())
    assert str(summed) == "the gradient of table.weight (4 of 12 values)"  # three entries of one row


def test_flushed_gradients_of_rows_are_counted_once_a_row() -> None:
    model = Bag()

    def backward(factor: float):
        return lambda: (model.table(IDS) * torch.tensor([factor, 1.0, 1.0, 1.0])).sum().backward()

    low, exact = gradients_of(model, backward(0.0)), gradients_of(model, backward(1e-30))
    assert flushed_fraction(low, exact) == 1 / 4
