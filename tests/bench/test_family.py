"""The known best loss, against float64 and Monte Carlo; every member of the family contains the teacher."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from mantissa.bench.workload import (
    BEST_LOSS,
    NOISE_STD,
    ResidualMLP,
    family_workload,
    loss_fn,
    make_batch,
    teacher,
    width_for,
)


def containing(width: int) -> ResidualMLP:
    """A student in float64 whose first coordinates are the teacher and whose other weights are 0."""
    student, original = ResidualMLP(width).double(), teacher()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
        for name in ("first", "blocks.0", "last"):
            new, old = student.get_submodule(name), original.get_submodule(name)
            rows, columns = old.weight.shape
            new.weight[:rows, :columns] = old.weight.double()
            new.bias[:rows] = old.bias.double()
    return student.requires_grad_(False)


def samples(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    inputs, targets = make_batch(count, torch.Generator().manual_seed(seed))
    return inputs.double(), targets.double()


@pytest.mark.parametrize("width", [16, 104])
def test_a_student_of_any_width_contains_the_teacher_and_reaches_the_best_loss(width: int) -> None:
    inputs, targets = samples(20_000)
    prediction = containing(width)(inputs)
    assert torch.allclose(prediction, copy.deepcopy(teacher()).double()(inputs), atol=1e-12, rtol=0)
    squares = (prediction - targets).square()
    # 160,000 squared noises: mean s^2, standard deviation s^2 sqrt(2 / n)
    assert squares.mean().item() == pytest.approx(BEST_LOSS, abs=5 * BEST_LOSS * (2 / squares.numel()) ** 0.5)


def test_what_a_model_is_above_the_best_loss_is_its_distance_from_the_teacher() -> None:
    inputs, targets = samples(50_000, seed=2)
    student = containing(16)
    truth = student(inputs)
    student.last.weight.mul_(0.7)
    prediction = student(inputs)
    loss = (prediction - targets).square().mean().item()
    distance = (prediction - truth).square().mean().item()
    assert distance == pytest.approx(0.3**2, rel=0.03)  # the teacher's mean square is 1
    noise = 4 * 2 * NOISE_STD * distance**0.5 / targets.numel() ** 0.5 + 4 * BEST_LOSS * (2 / targets.numel()) ** 0.5
    assert loss == pytest.approx(BEST_LOSS + distance, abs=noise)
    assert targets.square().mean().item() == pytest.approx(1 + BEST_LOSS, rel=0.02)  # what predicting zero would have


def test_a_model_that_has_seen_nothing_does_not_reach_the_best_loss_and_training_comes_closer() -> None:
    torch.manual_seed(0)
    workload = family_workload(30_000)
    optimizer = workload.make_optimizer(workload.model.parameters())
    held_out = make_batch(2048, torch.Generator().manual_seed(9))
    before = loss_fn(workload.model, held_out).item()
    for seed in range(150):
        loss_fn(workload.model, make_batch(128, torch.Generator().manual_seed(100 + seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before > 1.1
    assert BEST_LOSS * 0.97 < loss_fn(workload.model, held_out).item() < BEST_LOSS + 0.15


def test_a_batch_comes_from_its_generator_alone() -> None:
    first = make_batch(4, torch.Generator().manual_seed(5))
    torch.manual_seed(123)
    again = make_batch(4, torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], make_batch(4, torch.Generator().manual_seed(6))[0])


@pytest.mark.parametrize("wanted", [10_000, 30_000, 1_000_000, 1_000_000_000])
def test_the_width_is_the_multiple_of_eight_with_the_closest_count(wanted: int) -> None:
    width = width_for(wanted)

    def count(w: int) -> int:  # by hand, layer by layer
        return (32 * w + w) + 4 * (w * w + w) + (8 * w + 8)

    if wanted <= 1_000_000:
        assert count(width) == sum(p.numel() for p in ResidualMLP(width).parameters())
    distances = {w: abs(count(w) - wanted) for w in range(16, 16_400, 8)}
    assert distances[width] == min(distances.values())
    assert abs(count(width) / wanted - 1) < 0.16
