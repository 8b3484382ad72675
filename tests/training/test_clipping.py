"""Adaptive clipping against a float64 loop over units; shards against whole tensors are in ``test_distributed``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.training.clipping import adaptive_clip_

SHAPES = [(6, 5), (4, 3, 2, 2), (7,), (), (1, 9)]


def naive(weight: Tensor, grad: Tensor, factor: float, eps: float) -> tuple[Tensor, int]:
    """The formula, one unit at a time, in float64: the clipped gradient and how many units were clipped."""
    weight, grad = weight.detach().double(), grad.double().clone()
    units = [(weight[i], grad[i]) for i in range(len(weight))] if weight.ndim > 1 else [(weight, grad)]
    count = 0
    for w, g in units:
        bound = factor * max(float(w.square().sum().sqrt()), eps)
        norm = float(g.square().sum().sqrt())
        if norm > bound:
            g *= bound / norm
            count += 1
    return grad, count


def make(seed: int, size: float) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in SHAPES:
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        rows = (shape[0],) + (1,) * (len(shape) - 1) if len(shape) > 1 else ()
        spread = torch.exp2(torch.randn(rows, generator=generator) * 3)  # units of very different sizes
        parameter.grad = torch.randn(shape, generator=generator) * spread * size
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize(("seed", "size"), [(0, 1e-3), (1, 1e-2), (2, 1.0), (3, 1e4)])
def test_follows_the_formula(seed: int, size: float) -> None:
    parameters = make(seed, size)
    expected = [naive(p, p.grad, 0.01, 1e-3) for p in parameters]
    fraction = adaptive_clip_(parameters, 0.01)
    for parameter, (grad, _) in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad.double(), grad, rtol=1e-6, atol=0.0)
    units = 6 + 4 + 1 + 1 + 1
    assert fraction.dtype == torch.float32
    assert fraction.shape == ()
    assert float(fraction) == pytest.approx(sum(count for _, count in expected) / units)


def test_units_within_their_bound_are_not_touched() -> None:
    parameters = make(0, 1e-7)
    before = [p.grad.clone() for p in parameters]
    assert float(adaptive_clip_(parameters, 0.01)) == 0.0
    for parameter, grad in zip(parameters, before, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_one_row_does_not_change_another_and_zero_weights_may_move() -> None:
    """What a global bound cannot do: the exploded row is cut, the others keep every bit, a row of zeros stays zero."""
    idle, weight = nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.ones(4, 4))
    weight.data[2] = 0.0
    weight.grad = torch.full((4, 4), 1e-3)
    weight.grad[1], weight.grad[2], weight.grad[3] = 1e6, torch.tensor([3.0, 4.0, 0.0, 0.0]), 0.0
    assert float(adaptive_clip_([idle, weight], 0.01, eps=0.5)) == 0.5
    assert idle.grad is None
    assert torch.equal(weight.grad[0], torch.full((4,), 1e-3))
    assert float(weight.grad[1].norm()) == pytest.approx(0.01 * 2.0)  # ||row of ones|| = 2
    torch.testing.assert_close(weight.grad[2], torch.tensor([0.003, 0.004, 0.0, 0.0]))  # norm 0.01 * 0.5
    assert torch.equal(weight.grad[3], torch.zeros(4))
    assert float(adaptive_clip_([idle], 0.01)) == 0.0


@pytest.mark.parametrize("wrong", [{"factor": 0.0}, {"factor": float("nan")}, {"factor": 0.01, "eps": 0.0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(MantissaError, match=r"adaptive clipping: .*expected positive numbers"):
        adaptive_clip_([], **wrong)


@pytest.mark.parametrize("size", [1e19, 1e25, 3e38])
def test_a_unit_whose_squares_leave_fp32_keeps_its_direction(size: float) -> None:
    matrix, vector = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.zeros(2))
    matrix.grad = torch.tensor([[1.0, -0.5], [1e-30, 0.0], [0.0, -1.0]]) * size
    vector.grad = torch.tensor([0.5, 1.0]) * size
    expected = [naive(p, p.grad, 0.01, 1e-3) for p in (matrix, vector)]
    assert float(adaptive_clip_([matrix, vector], 0.01)) == pytest.approx(sum(n for _, n in expected) / 4)
    for parameter, (grad, _) in zip((matrix, vector), expected, strict=True):
        torch.testing.assert_close(parameter.grad.double(), grad, rtol=1e-6, atol=2.0**-148)
