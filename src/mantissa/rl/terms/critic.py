"""The value model of PPO in a run: a policy's body and one output, trained by an optimiser step of its own.

It is what the learner is: fp32 masters, the learner's kernels, the same packed forward, micro-batches and ranks (with
fsdp2 in slices, its output alone whole), the same ``OptimizerStep`` behind a loss scaler of its own. It begins as a
copy of the policy where RL begins, after any warm start and with any adapters merged, with an output of zeros: every
value is 0 until it has learned. A value is of one hidden state, in fp32. All of it trains, also where of the policy
only adapters do.

Legend: B completions, R response tokens right-padded, N response tokens flat, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.algorithms import CriticConfig, aggregation_scale, value_loss
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import Ranks, shard_like, whole
from mantissa.kernels import Kernels
from mantissa.model import Decoder, policy_weights
from mantissa.model.decoder import place
from mantissa.precision import Accumulator, merge, values
from mantissa.rl.experience import Sequences, Weighed
from mantissa.rl.score import Forward, Packed, scatter, score
from mantissa.rl.terms.base import Made, Term
from mantissa.training import Checkpoint, StepOutcome, load_weights


class ValueModel(nn.Module):
    """``body``: a decoder without a head of its own. ``value``: one number of each final hidden state."""

    def __init__(self, policy: Decoder, ranks: Ranks) -> None:
        super().__init__()
        device = next(policy.parameters()).device
        body = Decoder(policy.config)
        body.lm_head, body.padding_row = None, policy.padding_row  # the output projection has no part in a value
        self.body = place(body, device, ranks)
        self.value = nn.Linear(body.config.hidden_size, 1, device=device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, sequences: Sequences, kernels: Kernels) -> Tensor:
        """The value where each response token is predicted; N, fp32, differentiable."""
        position_N, _ = sequences.response_tokens()
        packed = Packed.of(sequences)

        def states() -> Tensor:
            return F.embedding(packed.packed_BT.flatten()[position_N], packed.hidden(self.body, kernels))

        hidden_NE = self.body.within(states)
        return F.linear(hidden_NE.float(), self.value.weight, self.value.bias).squeeze(-1)


class Critic(Term):
    """Owns the value model's masters and everything that changes them."""

    phase = "critic"

    def __init__(self, policy: Decoder, config: CriticConfig, made: Made) -> None:
        self.config, self.aggregation, self.length = config, made.algorithm.aggregation, made.aggregation_length
        self.kernels, self.micro_batch_tokens, self.ranks = made.kernels, made.micro_batch_tokens, made.ranks
        self.model = ValueModel(policy, made.ranks)
        self.take(policy_weights(policy))
        self.step = made.step_of(self.model, config.lr)

    def begin(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.take(weights)

    def take(self, masters: Mapping[str, Tensor]) -> None:
        """Become the policy with these masters, values 0; where RL begins. Collective where they are sharded."""
        own = {name: parameter.detach() for name, parameter in self.model.body.named_parameters()}
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(shard_like(whole(masters[name]), parameter))

    def score(self, scored: Sequences) -> Mapping[str, Tensor]:
        """The value before each response token: ``value_BR``, fp32, 0 at padding."""
        with torch.no_grad():
            value_BR, _ = score(
                lambda part, _: Forward(self.model(part, self.kernels)),
                scored,
                self.micro_batch_tokens,
                self.ranks,
                exchanges=self.ranks.sharded,
            )
        return {"value_BR": value_BR}

    def holds(self, step: int) -> bool:
        return step <= self.config.warmup

    def learn(self, batch: Weighed, parts: Sequence[Tensor]) -> Mapping[str, float]:
        outcomes: list[StepOutcome] = []
        tallies: list[dict[str, Accumulator]] = []
        for rows in parts:
            outcome, found = self._step(batch, rows)
            outcomes.append(outcome)
            tallies += found
        merged = merge([each for found in self.ranks.gather(tallies) for each in found])
        row = {name: float(value) for name, value in values(merged).items()}
        applied = [outcome for outcome in outcomes if outcome.applied]
        row["critic/loss_scale"] = self.step.scaler.scale
        row["critic/overflows"] = sum(outcome.overflows for outcome in outcomes)
        row["critic/skipped"] = sum(not outcome.applied for outcome in outcomes)
        if applied:
            row["critic/grad_norm"] = sum(outcome.grad_norm for outcome in applied) / len(applied)
        return row

    def _step(self, experience: Weighed, rows: Tensor) -> tuple[StepOutcome, list[dict[str, Accumulator]]]:
        tallies: list[dict[str, Accumulator]] = []
        whole_BR = torch.zeros(experience.mask_BR.shape, device=rows.device)
        whole_BR[rows] = aggregation_scale(experience.mask_BR[rows], self.aggregation, self.length)

        def backward(scale: float) -> Tensor:
            tallies.clear()  # a repeated backward counts once
            total = torch.zeros((), device=rows.device)
            for micro in experience.micro_batches(rows, self.micro_batch_tokens, self.ranks):
                counts = len(micro) > 0
                if not counts and not self.ranks.sharded:
                    continue  # who has no rows waits at the sum
                micro = micro if counts else rows[:1]
                batch = experience.select(micro)
                value_BR = scatter(self.model(batch, self.kernels), batch.mask_BR)
                scale_BR = whole_BR[micro, : batch.mask_BR.shape[1]]
                scale_BR = scale_BR if counts else torch.zeros_like(scale_BR)
                before_BR, target_BR = batch.column("value_BR"), batch.column("target_BR")
                given = (before_BR, target_BR, batch.mask_BR, scale_BR, self.config.clip)
                loss, found = value_loss(value_BR, *given)
                if counts:
                    tallies.append({name: replace(each, parts=each.parts.cpu()) for name, each in found.items()})
                    total += loss.detach()
                (loss * scale).backward()
            self.ranks.sum_gradients(self.step.parameters.values())
            return total

        return self.step.run(backward), tallies

    # saved with the policy

    @property
    def weights(self) -> dict[str, Tensor]:
        """The fp32 masters by name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @property
    def alike(self) -> Mapping[str, Tensor]:
        return self.weights

    @property
    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"critic": self.weights, "critic_optimizer": self.step.optimizer_tensors()}

    @property
    def state(self) -> Mapping[str, Mapping[str, object]]:
        return {"critic": self.step.state_dict()}

    def load(self, checkpoint: Checkpoint) -> None:
        weights, optimizer = checkpoint.part("critic"), checkpoint.part("critic_optimizer")
        state = checkpoint.state.get("critic")
        if not isinstance(state, dict):
            raise MantissaError("checkpoint has no critic; it is damaged, or of a run without one")
        self.step.load_optimizer_tensors(optimizer)
        self.step.load_state_dict(state)
        load_weights(self.weights, weights)
