"""Adaptive clipping against a float64 loop over units; shards against whole tensors, on two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mantissa.errors import MantissaError
from mantissa.training.step import adaptive_clip_

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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1e-3, 1e-2, 1.0, 1e4])
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


def test_one_row_does_not_change_another() -> None:
    """What a global bound cannot do: the exploded row is cut, the others keep every bit."""
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.grad = torch.full((3, 4), 1e-3)
    parameter.grad[1] = 1e6
    assert float(adaptive_clip_([parameter], 0.01)) == pytest.approx(1 / 3)
    assert torch.equal(parameter.grad[0], torch.full((4,), 1e-3))
    assert float(parameter.grad[1].norm()) == pytest.approx(0.01 * 2.0)  # ||row of ones|| = 2


def test_zero_weights_may_move_and_zero_gradients_stay() -> None:
    weight = nn.Parameter(torch.zeros(2, 4))
    weight.grad = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert float(adaptive_clip_([weight], 0.1, eps=0.5)) == 0.5
    torch.testing.assert_close(weight.grad[0], torch.tensor([0.03, 0.04, 0.0, 0.0]))  # norm 0.1 * 0.5
    assert torch.equal(weight.grad[1], torch.zeros(4))


def test_a_parameter_without_a_gradient_is_passed_over() -> None:
    idle, busy = nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.ones(2, 2))
    busy.grad = torch.full((2, 2), 100.0)
    assert float(adaptive_clip_([idle, busy], 0.01)) == 1.0
    assert idle.grad is None
    assert float(adaptive_clip_([idle], 0.01)) == 0.0


@pytest.mark.parametrize("wrong", [{"factor": 0.0}, {"factor": float("nan")}, {"factor": 0.01, "eps": 0.0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(MantissaError, match=r"adaptive clipping: .*expected positive numbers"):
        adaptive_clip_([], **wrong)


RANK = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from mantissa.errors import MantissaError
from mantissa.training.step import adaptive_clip_

torch.set_num_threads(1)
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
generator = torch.Generator().manual_seed(3)
whole, split = [], []
for shape, placement in [((5, 4), Shard(0)), ((3, 2, 2), Shard(0)), ((7,), Shard(0)), ((4, 2), Replicate()),
                         ((1, 6), Shard(0)), ((3,), Replicate())]:
    weight = torch.randn(shape, generator=generator)
    grad = torch.randn(shape, generator=generator) * torch.exp2(4 * torch.randn(shape[0], generator=generator)).reshape(
        -1, *[1] * (len(shape) - 1)) * 0.02
    plain = nn.Parameter(weight.clone()); plain.grad = grad.clone()
    placed = nn.Parameter(distribute_tensor(weight, mesh, [placement]))
    placed.grad = distribute_tensor(grad, mesh, [placement])
    whole.append(plain); split.append(placed)
expected, got = adaptive_clip_(whole, 0.01), adaptive_clip_(split, 0.01)
assert 0 < float(expected) < 1, expected
assert float(expected) == float(got), (expected, got)
for plain, placed in zip(whole, split):
    torch.testing.assert_close(placed.grad.full_tensor(), plain.grad, rtol=1e-6, atol=0.0)
columns = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
columns.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
try:
    adaptive_clip_([columns], 0.01)
except MantissaError as error:
    assert "dimension 0" in str(error)
else:
    raise AssertionError("columns were accepted")
dist.barrier()
os._exit(0)  # gloo's threads abort the interpreter's own exit now and then, which is not what is tested here
"""


def test_shards_are_clipped_as_the_whole_is(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors.decode()[-2000:]
