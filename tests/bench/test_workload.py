"""Factories: what a user gets wrong is one line that says what was expected, what came and what to do."""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from mantissa.bench.workload import Source, Workload, called, factory_named, parse_size, short, to_device
from mantissa.errors import MantissaError

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
