"""The reference: a frozen policy whose log-probs are the learner's own where their formats are, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import NativeKernels, SimulatedKernels, reference_kernels
from mantissa.precision import FP16, FP32, is_on_grid, round_to_format, token_logprob
from mantissa.rl.assemble import Parts
from mantissa.rl.config.run import RunConfig
from mantissa.rl.experience import Sequences
from mantissa.rl.score import ReferencePolicy
from mantissa.runs.directory import RunDirectory
from mantissa.training import load_checkpoint
from small_run import QUICK

Build = Callable[..., Parts]


@pytest.fixture
def build(made: Build) -> Build:
    """Parts with a reference of the learner's initial weights, which are large enough to have opinions."""
    return lambda *overrides: made("algorithm.reference={}", *overrides)


def reference_of(parts: Parts) -> ReferencePolicy:
    assert parts.reference is not None
    return parts.reference


def sequences(seed: int = 1, prompts: int = 5, samples: int = 3) -> Sequences:
    """Groups of mixed lengths, tokens below 10."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=draw))
        return torch.randint(0, 10, (length,), generator=draw).tolist()

    drawn = [tokens(1, 8) for _ in range(prompts)]
    repeated = [prompt for prompt in drawn for _ in range(samples)]
    return Sequences.build(repeated, [tokens(1, 9) for _ in repeated], torch.device("cpu"))


@pytest.mark.parametrize(
    ("precision", "tokens"),
    [("fp32", 40), ("bf16", 16384), ("fp16", 40), ("{preset: bf16-train-fp16-rollout, backend: native}", 16384)],
)
def test_an_unchanged_policy_has_its_reference_log_probs_to_the_last_bit(
    build: Build, precision: str, tokens: int
) -> None:
    parts = build(f"precision={precision}", f"optimizer.micro_batch_tokens={tokens}", "rollout.temperature=0.7")
    reference, batch = reference_of(parts), sequences()
    logp_BR, _ = parts.learner.score(batch)
    assert logp_BR.abs().max() > 1
    assert torch.equal(reference.score(batch), logp_BR)
    if "native" in precision:
        assert {weight.dtype for weight in reference.weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("train", "reference"), [("fp16", "bf16"), ("fp32", "fp16"), ("bf16", "fp32")])
def test_its_format_is_its_own(build: Build, train: str, reference: str) -> None:
    parts = build(f"precision={{train: {train}, rollout: {train}, reference: {reference}}}")
    frozen = reference_of(parts)
    assert parts.precision.reference is not None
    assert parts.precision.reference.active is frozen.kernels.format
    assert frozen.kernels.format.name == reference
    assert "rounds 1+u/4 to 1" in parts.evidence["reference"]
    assert all(bool(is_on_grid(weight, frozen.kernels.format).all()) for weight in frozen.weights.values())
    batch = sequences()
    got = frozen.score(batch)
    assert not torch.equal(got, parts.learner.score(batch)[0])
    error = float((got - unrounded(parts, batch)).abs().max())
    low, high = {"fp32": (0, 1e-5), "fp16": (1e-4, 2e-2), "bf16": (1e-3, 1.6e-1)}[reference]
    assert low <= error < high  # as far from the unrounded policy as its format, and not another, puts it


def unrounded(parts: Parts, batch: Sequences) -> Tensor:
    """The log-probs in fp32 with the masters themselves, sequence by sequence, without packing."""
    logp_BR = torch.zeros(batch.mask_BR.shape)
    with torch.no_grad():
        for row in range(len(batch)):
            prompt, length = int(batch.prompt_length_B[row]), int(batch.length_B[row])
            tokens = batch.tokens_BT[row : row + 1, :length]
            kernels = NativeKernels(FP32)
            logits = parts.model.logits(parts.model(tokens, kernels), kernels)[0, prompt - 1 : length - 1]
            logp_BR[row, : length - prompt] = token_logprob(logits, tokens[0, prompt:])
    return logp_BR


def test_it_stays_where_the_policy_moves_on_and_is_taken_anew_when_due(build: Build) -> None:
    parts = build("precision=fp16", "algorithm.reference={refresh_every: 3}")
    learner, reference, batch = parts.learner, reference_of(parts), sequences()
    first = reference.score(batch)
    with torch.no_grad():
        for weight in learner.weights.values():
            weight.mul_(1.3)
    assert torch.equal(reference.score(batch), first)
    for version, due in ((1, False), (2, False), (3, True), (5, False), (7, True)):  # 7: two updates a batch
        assert reference.follow(learner.weights, version) == due
    assert (reference.version, reference.refreshes) == (7, 2)
    assert not reference_of(build()).follow({}, 10**6)  # without refreshing it never moves
    assert torch.equal(reference.score(batch), learner.score(batch)[0])
    assert not torch.equal(reference.score(batch), first)


def test_weights_it_cannot_hold_and_weights_it_does_not_have(build: Build) -> None:
    parts = build("precision=bf16", "precision.reference=fp16")
    reference, weights = reference_of(parts), parts.learner.weights
    with pytest.raises(MantissaError, match=r"reference: weight model\.embed_tokens\.weight is missing"):
        reference.take({"other": torch.zeros(1)}, 1)
    with torch.no_grad():
        weights["model.norm.weight"][3] = 70000.0
    with pytest.raises(MantissaError, match=r"reference: weight model\.norm\.weight holds 70000, which fp16 cannot"):
        reference.take(weights, 1)
    with pytest.raises(RuntimeError, match="holds no weights"):
        reference.score(sequences())


def test_its_kernels_round_no_weight_twice_and_there_are_none_without_it(build: Build) -> None:
    parts = build("precision=fp16")
    kernels = reference_kernels(parts.precision)
    assert isinstance(kernels, SimulatedKernels)
    assert kernels.weights_on_grid
    assert kernels.format is FP16
    masters, copy = parts.learner.weights, reference_of(parts).weights
    assert all(torch.equal(copy[name], round_to_format(master, FP16)) for name, master in masters.items())


def test_without_a_reference_there_is_no_role(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]
) -> None:
    parts = parts_of(configure())
    assert parts.reference is None
    assert parts.precision.reference is None
    assert set(parts.evidence) == {"learner", "rollout"}
    with pytest.raises(ValueError, match="without a reference policy"):
        reference_kernels(parts.precision)


def test_a_run_counts_refreshes_and_keeps_what_it_was_held_to(train: Callable[..., RunDirectory]) -> None:
    """First the policy after the warm start, then what it is at each refresh."""
    run = train(*QUICK, "algorithm.reference={refresh_every: 4}", "steps=5", "checkpoint={every: 1, keep: 6}")
    rows: list[dict[str, Any]] = run.metrics.read()
    folder = run.checkpoints
    held_to, taken_at, refreshes = 0, 0, 0  # version and step of what is the reference now
    for row in rows:
        step = row["step"]
        assert row["reference/version"] == held_to
        if row["optim/updates"] - held_to >= 4:  # by how many, two a step, is up to the rewards
            held_to, taken_at, refreshes = row["optim/updates"], step, refreshes + 1
        assert row["reference/refreshes"] == refreshes
        stored, policy = load_checkpoint(folder, step).more["reference"], load_checkpoint(folder, taken_at).policy
        assert all(torch.equal(stored[name], round_to_format(master, FP16)) for name, master in policy.items()), step
    assert refreshes >= 1
