"""A step's micro-batches dealt out to ranks: whatever rank computes which, their gradients sum to the step's.

A micro-batch carries its tokens' weights in the whole step, so whoever holds the batch's rewards and log-probs (small
next to the work) can compute any of them. A rank may have none, and then adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from experiences import learned, sampled
from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.rl.experience import Experience
from mantissa.rl.learner import Learner
from mantissa.training import StepOutcome

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
LOSSES = [
    *(("reinforce", "sequence_is", kind) for kind in AGGREGATIONS),
    *(("ppo_clip", "token_tis", kind) for kind in AGGREGATIONS),
    *(("cispo", "icepop", kind) for kind in AGGREGATIONS),
    *(("gspo", "token_tis_normalized", kind) for kind in AGGREGATIONS),
    ("dapo", "sequence_rejection", "token_mean"),
    ("flowrl", "sequence_mis", "seq_mean_token_mean"),
]
Deal = Callable[[list[Any]], list[Any]]


@pytest.fixture
def learn(configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]) -> Callable[..., Parts]:
    """Parts of the small recipe with a reference, two updates a batch, and weights large enough to have opinions."""

    def build(*overrides: str) -> Parts:
        parts = parts_of(
            configure(
                "precision=fp32", "model.fresh.initializer_range=0.2", "algorithm.reference={}",
                "optimizer.micro_batch_tokens=25", "optimizer.updates_per_batch=2", *overrides,
            )
        )  # fmt: skip
        parts.sampler.engine.sync(parts.learner.weights, 0)
        assert parts.reference is not None
        parts.reference.take(parts.learner.weights, 0)
        return parts

    return build


def gradients(
    learner: Learner, experience: Experience, deal: Deal, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Tensor]]:
    """Of each optimiser step, the gradients of the micro-batches that ``deal`` gives this rank; no step is taken."""
    found: list[dict[str, Tensor]] = []
    whole = Learner._step

    def run(backward: Callable[[float], None]) -> StepOutcome:
        learner.step.optimizer.zero_grad(set_to_none=True)
        backward(1.0)
        found.append({name: p.grad for name, p in learner.step.parameters.items() if p.grad is not None})
        learner.step.optimizer.zero_grad(set_to_none=True)
        return StepOutcome("stepped", 0, 1.0, 1.0, 0.0, 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(learner.step, "run", run)
        patch.setattr(learner, "_step", lambda data, batches, step: whole(learner, data, deal(batches), step))
        patch.setattr("mantissa.rl.learner.merge", lambda rows: {})  # metrics: tests/algorithms/test_ranks.py
        learned(learner, experience)
    return found


@pytest.mark.parametrize(("loss", "corrected", "kind"), LOSSES)
def test_gradients_of_dealt_micro_batches_sum_to_the_steps(
    learn: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch, loss: str, corrected: str, kind: str
) -> None:
    estimator = "grpo" if loss == "flowrl" else "reinforce_pp"
    options = (f"loss={loss}", f"correction={corrected}", f"aggregation={kind}", f"advantage={estimator}")
    parts = learn(*(f"algorithm.{option}" for option in options))
    experience = sampled(parts, problems=6, equal=False, reference=True)
    whole = gradients(parts.learner, experience, lambda batches: batches, monkeypatch)
    sizes: list[int] = []
    deals: dict[str, list[Deal]] = {
        "two, unequal": [lambda batches: batches[:1], lambda batches: batches[1:]],
        "three, in turn": [lambda batches, rank=rank: batches[rank::3] for rank in range(3)],
        "three, one idle": [lambda batches: batches[::2], lambda batches: [], lambda batches: batches[1::2]],
    }
    assert len(whole) == 2
    for name, ranks in deals.items():
        apart = [gradients(parts.learner, experience, deal, monkeypatch) for deal in ranks]
        for step, expected in enumerate(whole):
            mine = [found[step] for found in apart]
            sizes.append(sum(bool(gradient) for gradient in mine))
            for parameter, gradient in expected.items():
                summed = sum(g[parameter].double() for g in mine if parameter in g)
                error = (summed - gradient.double()).norm() / gradient.double().norm().clamp(min=1e-9)
                assert error < 2e-6, f"{name}, {parameter}: relative error {float(error):.1e}"
    assert set(sizes) == {2, 3}  # ranks with work; rejection can leave too few micro-batches for three
