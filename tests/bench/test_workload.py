"""The family, whose best loss is known, against float64; and what a user's factory gets wrong, in one line."""

from __future__ import annotations

import copy
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.bench.workload import (
    BEST_LOSS,
    NOISE_STD,
    ResidualMLP,
    Source,
    Workload,
    called,
    factory_named,
    family_workload,
    loss_fn,
    make_batch,
    parse_size,
    short,
    teacher,
    to_device,
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


MODULE = """
import torch
from mantissa.bench import Workload
def make_batch(n, generator): return torch.randn(n, 3, generator=generator)
def loss_fn(model, batch): return model(batch).square().mean()
def good(): return torch.nn.Linear(3, 2), make_batch, loss_fn
def whole(): return Workload(*good(), best_loss=0.0)
def pair(): return good()[:2]
def nothing(): pass
def swapped(): return make_batch, torch.nn.Linear(3, 2), loss_fn
def uncallable(): return torch.nn.Linear(3, 2), 5, loss_fn
def frozen(): return torch.nn.Linear(3, 2).requires_grad_(False), make_batch, loss_fn
number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with a user's module of an unusual name."""
    (tmp_path / "users_models_a7.py").write_text(MODULE)
    (tmp_path / "needs_more_a7.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("users_models_a7", "needs_more_a7"):
        sys.modules.pop(name, None)


def load(name: str) -> Workload:
    spec = f"users_models_a7:{name}"
    return called(spec, factory_named(spec))


def test_a_factory_of_the_current_folder_is_found_and_the_path_is_left_alone(mine: Path) -> None:
    path = list(sys.path)
    workload = load("good")
    assert workload.parameters == 8
    assert workload.best_loss is None
    assert sys.path == path
    assert load("whole").best_loss == 0.0


def test_a_source_builds_the_same_weights_from_the_same_seed(mine: Path) -> None:
    source = Source("users_models_a7:good")

    def weights(seed: int) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(source.build(seed, "cpu").model.parameters()).detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert str(source) == "users_models_a7:good"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (":good", "expected pkg.module:factory"),
        ("users_models_a7:", "expected pkg.module:factory"),
        ("no_such_module_a7:good", "no module no_such_module_a7 in .*start the command in the folder"),
        ("users_models_a7.sub:good", "no module users_models_a7.sub"),
        ("needs_more_a7:good", "needs_more_a7 itself imports a_package_that_is_not_there"),
        ("users_models_a7:number", "number is a int; expected a function"),
        ("users_models_a7:pair", "returned a tuple of 2"),
        ("users_models_a7:nothing", "returned a NoneType"),
        ("users_models_a7:swapped", "its model is a function, not a torch module"),
        ("users_models_a7:uncallable", "its make_batch is a int, not a function"),
        ("users_models_a7:frozen", "no parameter to train"),
    ],
)
def test_a_factory_that_cannot_be_had_or_returns_something_else(mine: Path, spec: str, words: str) -> None:
    with pytest.raises(MantissaError, match=f"^--model {spec}: .*{words}"):
        called(spec, factory_named(spec))


def test_a_mistake_inside_the_users_module_keeps_its_traceback(mine: Path) -> None:
    (mine / "users_models_a7.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        factory_named("users_models_a7:good")


def test_a_batch_moves_with_its_structure() -> None:
    Pair = namedtuple("Pair", "left right")
    x = torch.ones(2)
    moved = to_device({"a": (x, [x, "text"]), "b": Pair(x, 3)}, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["b"].left.is_meta
    assert (moved["a"][1][1], type(moved["b"]), moved["b"].right, x.is_meta) == ("text", Pair, 3, False)


def test_sizes_are_read_and_written_short() -> None:
    sizes = {"10k": 10_000, "1.2M": 1_200_000, "1B": 10**9, "65536": 65_536, "3m": 3_000_000}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "k", "ten", "1T", "-5k", "999", "1e30", "nan", "inf", "30B"):
        with pytest.raises(MantissaError, match="size"):
            parse_size(text)
    counts = {9_880: "9.88k", 999_400: "999k", 999_600: "1M", 1_006_392: "1.01M", 1.2e9: "1.2B", 640: "0.64k"}
    assert {count: short(count) for count in counts} == counts
