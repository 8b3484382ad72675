"""FlowRL on verl's FSDP2 engine: equal to the native learner's step, and to the fixed point of its loss. No Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_engine_worker import see

pytestmark = [pytest.mark.verl, pytest.mark.slow]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_the_native_learner_s(tmp_path: Path, ranks: int) -> None:
    """Loss, norm, and every gradient (as Adam's first moment) of policy and head, on the same rows and weights."""
    seen = see("flowrl", tmp_path, ranks)
    assert seen["loss"] == pytest.approx(seen["native"]["loss"], rel=1e-6)
    assert seen["norm"] == pytest.approx(seen["native"]["norm"], rel=1e-6)
    assert seen["same names"]
    # gradients: no farther from float64's than the native learner's are, and the two as near to each other as that
    assert seen["gap to float64"] < 1.5 * seen["native's gap to float64"]
    assert seen["native's gap to float64"] < 5e-6
    assert seen["gap to native"] < 5e-6
    assert seen["rates"] == [1e-3, 3e-3], "the head has a rate of its own"
    for dtype in ("bf16", "fp16"):
        assert seen[dtype]["changed"] == seen[dtype]["of"]
        assert seen[dtype]["skipped"] == 0
    assert seen["fp16"]["norm"] == pytest.approx(seen["bf16"]["norm"], rel=0.02)
    louder = seen["fp16, louder"]
    assert (louder["retried"], louder["skipped"]) == (1, 0)
    assert seen["goes on equal"], "policy, head, moments and scale come back from the checkpoint"
    assert seen["one head"], "the head is the same on every rank"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.variants)])
def test_its_loss_has_the_tilted_reference_as_fixed_point(tmp_path: Path, ranks: int) -> None:
    """delta, in nats, goes to 0 for every response of a batch that is learned over and over, and the gradient with it:
    on both engines, in each format."""
    seen = see("fixed_point", tmp_path, ranks, seconds=900)
    assert len(seen) == 6
    for name, each in seen.items():
        print(name, ranks, each["delta"][0], min(each["delta"][-10:]), each["norm"][0], min(each["norm"][-10:]))
        assert each["delta"][0] > 0.5, name
        assert min(each["delta"][-10:]) < 0.05 * each["delta"][0], name
        assert min(each["norm"][-10:]) < 0.1 * each["norm"][0], name
