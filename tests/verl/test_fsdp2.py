"""``mantissa_fsdp2`` beside verl's own ``fsdp2``: the same engine, another step. One and two ranks, no Ray."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from verl_engine_worker import see

pytestmark = [pytest.mark.verl, pytest.mark.slow]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def spikes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return see("spikes", tmp_path_factory.mktemp("spikes"), request.param)


def test_a_spike_costs_no_batch_where_verl_loses_each(spikes: dict[str, Any]) -> None:
    seen = spikes
    # verl's own, as it is on a CPU: nothing is scaled, and nothing is said; as it is on a GPU: each batch is lost
    assert seen["verl's scaler is on"] is False
    assert [step["changed"] for step in seen["verl"]] == [0, 0, 0, 0]
    assert all(math.isnan(step["norm"]) for step in seen["verl"])
    # and its checkpoint forgets what the scale was
    assert (seen["verl's scale"], seen["verl's scale, resumed"]) == (4096, 65536)
    # ours, on the same batches
    for engine in ("ours", "mantissa"):
        assert len(seen[engine]) == 4
        for step in seen[engine]:
            assert step["changed"] == step["of"]
            assert step["finite"]
            assert step["skipped"] == 0
        assert (seen[engine][0]["retried"], seen[engine][0]["overflows"] > 0) == (1, True)
    assert seen["as if the scale had been lower"], "a step after retries is the step of the lower scale, bit for bit"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_ranks_say_of_their_slices_is_what_each_engine_sends(ranks: int, tmp_path: Path) -> None:
    """By digests that add up, in two formats, after a step; and tensor by tensor where they are asked for."""
    for name, found in see("sync", tmp_path, ranks).items():
        assert found["tensors"] == 25, name
        assert found["wrong"] == [], name
        assert found["whole"], name


def test_ways_of_verl_s_to_share_and_hold_a_learner_are_those_without_them(tmp_path: Path) -> None:
    """Two ranks. In fp32 the weights after three steps are those of verl's engine to the bit, and with Ulysses those
    without it but for rounding; in fp16 a spike costs no batch, and a resumed engine goes on bit for bit."""
    seen = see("variants", tmp_path, 2)
    moved = seen.pop("moved")
    assert moved > 1e-3
    assert {"plain", "ulysses", "offload", "a sum a micro-batch"} <= set(seen)
    for way, found in seen.items():
        assert found["verl's bits"], way
        assert found["goes on equal"], way
        for step in found["louder"]:
            assert (step["changed"], step["finite"], step["skipped"]) == (step["of"], True, 0), way
        assert (found["louder"][0]["retried"], found["louder"][0]["overflows"] > 0) == (1, True), way
    assert seen["offload"]["gap"] == 0
    for way in ("ulysses", "a sum a micro-batch"):
        assert seen[way]["gap"] < 1e-4 * moved, way
    if "8-bit AdamW" in seen:
        assert 0 < seen["8-bit AdamW"]["gap"] < moved


def test_what_no_scale_cures_is_skipped_and_counted_and_the_scale_is_saved(spikes: dict[str, Any]) -> None:
    seen = spikes
    given_up = seen["given up"]
    assert (given_up["changed"], given_up["skipped"], given_up["lost_so_far"]) == (0, 1, 1)
    assert seen["state, resumed"] == seen["state"]
    assert seen["state"]["scaler"]["scale"] < 65536
    assert seen["goes on equal"], "the resumed engine's next step is the other's, bit for bit"


def test_mistakes_are_named_before_or_in_the_first_step(tmp_path: Path) -> None:
    seen = see("refusals", tmp_path)
    said = {
        "unknown": "unknown setting 'param_dtpye'; did you mean 'param_dtype'?",
        "nested": "unknown setting 'loss_scaling.growth'",
        "no effect": "loss_scaling does nothing with param_dtype=bf16",
        "no head": "set actor.strategy=mantissa_fsdp2",
        "no reference": "set actor.use_kl_loss=True actor.kl_loss_coef=0",
        "another loss": "set it to flowrl, or leave flowrl out",
        "another mean": "set actor.loss_agg_mode=seq-mean-token-mean",
        "not grpo": "set algorithm.adv_estimator=grpo",
        "a penalty": "actor.kl_loss_coef=0.1: set it to 0",
        "a clip": "does not read actor.clip_ratio_high=0.28: leave it out; its ratio's bounds are",
    }
    for name, text in said.items():
        assert text in seen[name], name
    assert set(seen) == set(said)


def test_a_step_in_fp32_is_verl_s_own_and_costs_as_much(tmp_path: Path) -> None:
    """On a tiny model, where the step's own work is a larger part than anywhere; a bound that load does not break."""
    seen = see("overhead", tmp_path)
    assert seen["same bits"], "three steps on, the weights are verl's"
    assert median(seen["mantissa_fsdp2"][10:]) < 1.25 * median(seen["fsdp2"][10:])
