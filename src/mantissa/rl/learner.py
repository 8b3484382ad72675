"""The policy that learns: fp32 masters, kernels in the training format, and the one optimiser step.

One update of a batch of completions:

1. ``score``: log-probs (and entropy) of every sampled token under the weights before the update. This is ``old``;
   against the rollout's log-probs it is the gap, and the correction weights come from it. No gradient is needed, except
   where the batch is learned from in one step and fits in one micro-batch: that step's forward is this very one, so
   its graph is kept, and the forward is not done twice.
2. for each of ``updates_per_batch`` parts: the loss over that part, in micro-batches whose gradients add up to those of
   the whole part, whatever the split; then ``OptimizerStep``, which may repeat the backward at a lower loss scale.

A completion whose advantage is exactly zero adds nothing to a gradient, so it is left out of the second pass (it still
counts in the aggregation): late in training that is most of them.

Legend: B completions, R response tokens right-padded, N response tokens flat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.algorithms import Tally, advantage, aggregation_scale, correction, merge, policy_loss
from mantissa.kernels import Kernels, NativeKernels
from mantissa.model import Decoder, policy_weights, trained_parameters
from mantissa.precision import FP32
from mantissa.precision.numerics import entropy, token_logprob
from mantissa.rl.config import AlgorithmConfig, OptimizerConfig
from mantissa.rl.experience import Experience, Sequences
from mantissa.rl.packing import Packed
from mantissa.rl.seeds import generator
from mantissa.training import (
    Backward,
    LossScaler,
    OptimizerStep,
    StepOutcome,
    adamw,
    first_nonfinite,
    flushed_fraction,
    gradients_of,
    learning_rate,
)


@dataclass(frozen=True)
class Update:
    """What one batch did: the outcome of each optimiser step, tallies of the loss and correction, and advantages."""

    outcomes: tuple[StepOutcome, ...]
    tallies: Mapping[str, Tally]
    advantage_B: Tensor
    trained_tokens: int
    flushed_fraction: float | None


class Learner:
    """Owns the master weights and everything that changes them."""

    def __init__(
        self,
        model: Decoder,
        kernels: Kernels,
        algorithm: AlgorithmConfig,
        config: OptimizerConfig,
        scaler: LossScaler,
        *,
        temperature: float,
        aggregation_length: float,
        seed: int,
        steps: int,
    ) -> None:
        self.model, self.kernels = model, kernels
        self.algorithm, self.config = algorithm, config
        self.temperature, self.seed = temperature, seed
        norm = algorithm.aggregation == "seq_mean_token_sum_norm"
        self.aggregation_length = aggregation_length if norm else None
        self._kept: _Kept | None = None
        decay_until = steps * config.updates_per_batch if config.decay == "linear" else None
        self.step = self.optimizer_step(learning_rate(config.lr, config.warmup, decay_until), scaler)

    def optimizer_step(self, lr_at: Callable[[int], float], scaler: LossScaler) -> OptimizerStep:
        """A fresh optimiser over the masters, behind the one optimiser step."""
        optimizer = adamw(
            self.model, betas=self.config.betas, eps=self.config.eps, weight_decay=self.config.weight_decay
        )

        def diagnose(backward: Backward) -> str:
            return first_nonfinite(self.model, lambda: backward(scaler.scale))

        return OptimizerStep(
            dict(self.model.named_parameters()),
            optimizer,
            scaler,
            self.kernels.format,
            lr_at,
            self.config.max_grad_norm,
            diagnose,
        )

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The policy's fp32 weights by name: the masters, or with adapters the merged ones, made when asked for."""
        return policy_weights(self.model)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The fp32 masters that train, by name: every weight, or the adapters alone."""
        return {name: parameter.detach() for name, parameter in trained_parameters(self.model).items()}

    @property
    def version(self) -> int:
        """The policy's version: optimiser steps applied. A skipped step does not advance it."""
        return self.step.updates

    def logp(self, sequences: Sequences, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """Log-prob of each response token (N, fp32, differentiable) and the logits they came from (N, V, fp32).

        A prompt that several sequences share is computed once, and only positions that predict a response token reach
        the output projection.
        """
        position_N, token_N = sequences.response_tokens()
        packed = Packed.of(sequences)
        hidden = F.embedding(packed.packed_BT.flatten()[position_N], packed.hidden(self.model, kernels))
        logits_NV = self.model.logits(hidden, kernels)
        return token_logprob(logits_NV, token_N, self.temperature), logits_NV

    def score(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every response token under the current weights; B, R, fp32, 0 at padding."""
        logp_BR = torch.zeros(sequences.mask_BR.shape, dtype=torch.float32, device=sequences.mask_BR.device)
        entropy_BR = torch.zeros_like(logp_BR)
        parts = sequences.micro_batches(self._all_rows(sequences), self.config.micro_batch_tokens)
        keep = len(parts) == 1 and self.config.updates_per_batch == 1
        self._kept = None  # before the forward: two graphs at a time would be one too many
        for rows in parts:
            part = sequences.select(rows)
            with torch.set_grad_enabled(keep):
                logp_N, logits_NV = self.logp(part, self.kernels)
            row, column = part.mask_BR.nonzero(as_tuple=True)
            if keep:
                graph_BR = logp_BR.index_put((rows[row], column), logp_N)
                self._kept = _Kept(sequences, self.version, graph_BR)
            logp_BR[rows[row], column] = logp_N.detach()
            entropy_BR[rows[row], column] = entropy(logits_NV.detach(), self.temperature)
        return logp_BR, entropy_BR

    def update(self, experience: Experience, step: int, probe: bool) -> Update:
        """Learn from one scored batch. ``step`` keys the split into parts; ``probe`` measures flushed gradients too."""
        old_logp_BR = experience.old_logp_BR
        assert old_logp_BR is not None, "score the experience first"
        sequences = experience.sequences
        advantage_B, tallies = advantage(experience.reward_B, experience.group_B, self.algorithm.advantage)
        weight_BR, valid_BR, weights = correction(
            old_logp_BR, experience.rollout_logp_BR, sequences.mask_BR, self.algorithm.correction
        )
        data = _Batch(experience, old_logp_BR, advantage_B, weight_BR, valid_BR)
        order = torch.randperm(len(sequences), generator=generator(self.seed, "update", step))
        parts = [part.to(advantage_B.device) for part in order.tensor_split(self.config.updates_per_batch)]
        outcomes, losses, trained, flushed = [], [], 0, None
        for index, rows in enumerate(parts):
            batches = self._micro_batches(data, rows)
            trained += sum(int(valid_BR[micro.rows].sum()) for micro in batches)
            if probe and index == 0 and batches:
                flushed = self._flushed(data, batches[0])
            if batches:  # else every advantage is zero, and momentum alone must not move the policy
                outcome, tally = self._step(data, batches)
                outcomes.append(outcome)
                losses.append(tally)
        merged = merge(losses)
        # Where the loss made its own weights (reinforce), their tallies in ``merged`` replace those of ``old``.
        return Update(tuple(outcomes), {**tallies, **weights, **merged}, advantage_B, trained, flushed)

    def _micro_batches(self, data: _Batch, rows: Tensor) -> list[_MicroBatch]:
        """The micro-batches of one optimiser step: rows that carry a gradient, with the step's aggregation weights."""
        sequences = data.experience.sequences
        scale_BR = aggregation_scale(data.valid_BR[rows], self.algorithm.aggregation, self.aggregation_length)
        alive = (data.advantage_B[rows] != 0).nonzero().squeeze(1)
        if len(alive) == 0:
            return []
        place = {int(row): i for i, row in enumerate(rows.tolist())}
        parts = sequences.micro_batches(rows[alive], self.config.micro_batch_tokens)
        return [_MicroBatch(part, scale_BR[[place[int(row)] for row in part.tolist()]]) for part in parts]

    def _step(self, data: _Batch, batches: list[_MicroBatch]) -> tuple[StepOutcome, dict[str, Tally]]:
        """One optimiser step over its micro-batches."""
        tallies: list[dict[str, Tally]] = []
        kept, self._kept = self._kept, None
        graphs = [kept.logp_BR] if kept is not None and self._usable(kept, data, batches) else []
        del kept  # what is not used must not hold its memory through the step

        def backward(scale: float) -> None:
            tallies.clear()  # a repeated backward counts once
            for micro in batches:
                graph_BR = graphs.pop() if graphs else None  # serves one backward, which frees it
                loss, tally = self._loss(data, micro, self.kernels, graph_BR)
                tallies.append(tally)
                (loss * scale).backward()

        outcome = self.step.run(backward)
        return outcome, merge(tallies)

    def _usable(self, kept: _Kept, data: _Batch, batches: list[_MicroBatch]) -> bool:
        """Whether the scoring's graph is of this batch and these weights, and cheaper than a forward of its own.

        It holds all rows, so its backward (two thirds of the work) is of all rows: cheaper than forward and backward of
        the rows that carry a gradient where these are more than two thirds.
        """
        same = kept.sequences is data.experience.sequences and kept.version == self.version
        return same and len(batches) == 1 and 3 * len(batches[0].rows) > 2 * len(kept.logp_BR)

    def _loss(
        self, data: _Batch, micro: _MicroBatch, kernels: Kernels, graph_BR: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tally]]:
        """Loss of a micro-batch; ``graph_BR``: the whole batch's differentiable log-probs, where they exist already."""
        sequences = data.experience.sequences.select(micro.rows)
        responses = sequences.mask_BR.shape[1]
        if graph_BR is not None:
            logp_BR = graph_BR[micro.rows, :responses]
        else:
            logp_N, _ = self.logp(sequences, kernels)
            empty_BR = torch.zeros(sequences.mask_BR.shape, dtype=torch.float32, device=logp_N.device)
            logp_BR = empty_BR.index_put(sequences.mask_BR.nonzero(as_tuple=True), logp_N)
        weight_BR = data.weight_BR[micro.rows, :responses]
        weights: dict[str, Tally] = {}
        if self.algorithm.loss.kind == "reinforce":
            # No ratio in this loss: its importance weight is of the current policy, not of the one before the update.
            rollout_logp_BR = data.experience.rollout_logp_BR[micro.rows, :responses]
            weight_BR, _, weights = correction(
                logp_BR.detach(), rollout_logp_BR, sequences.mask_BR, self.algorithm.correction
            )
        loss, tallies = policy_loss(
            logp_BR,
            data.old_logp_BR[micro.rows, :responses],
            data.advantage_B[micro.rows],
            data.valid_BR[micro.rows, :responses],
            weight_BR,
            micro.scale_BR[:, :responses],
            self.algorithm.loss,
        )
        return loss, {**tallies, **weights}

    def _flushed(self, data: _Batch, micro: _MicroBatch) -> float | None:
        """Fraction of gradients that the format flushes to zero, on up to 8 completions, against fp32 kernels."""
        if self.kernels.format is FP32:
            return None
        small = _MicroBatch(micro.rows[:8], micro.scale_BR[:8])
        scale = self.step.scaler.scale

        def work(kernels: Kernels) -> Callable[[], None]:
            return lambda: (self._loss(data, small, kernels)[0] * scale).backward()

        low = gradients_of(self.model, work(self.kernels))
        return flushed_fraction(low, gradients_of(self.model, work(NativeKernels(FP32))))

    @staticmethod
    def _all_rows(sequences: Sequences) -> Tensor:
        return torch.arange(len(sequences), device=sequences.tokens_BT.device)


@dataclass(frozen=True)
class _Kept:
    """The differentiable log-probs of a scoring, and what they are of."""

    sequences: Sequences
    version: int
    logp_BR: Tensor


@dataclass(frozen=True)
class _Batch:
    """A scored batch with what the loss needs of each completion."""

    experience: Experience
    old_logp_BR: Tensor
    advantage_B: Tensor
    weight_BR: Tensor
    valid_BR: Tensor


@dataclass(frozen=True)
class _MicroBatch:
    """Rows of the batch that go through the model together, and their tokens' weights in the step's loss."""

    rows: Tensor
    scale_BR: Tensor
