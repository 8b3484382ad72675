"""The policy that learns: fp32 masters, kernels in the training format, the one optimiser step, and what it minimises:
a weighed batch's loss, the policy's and its terms'.

One update of a batch of completions:

1. ``score``: log-probs (and entropy) of every sampled token under the weights before the update. This is ``old``;
   against the rollout's log-probs it is the gap, and the correction weights come from it. No gradient is needed, except
   where the batch is learned from in one step and fits in one micro-batch: that step's forward is this very one, so
   its graph is kept, and the forward is not done twice.
2. for each of ``updates_per_batch`` parts: the loss over that part, in micro-batches whose gradients add up to those of
   the whole part, whatever the split; then ``OptimizerStep``, which may repeat the backward at a lower loss scale.

A completion whose advantage is exactly zero adds nothing to a gradient, so it is left out of the second pass (it still
counts in the aggregation): late in training that is most of them. So is one of which rejection left no token (that one
does not count). Where neither leaves any, there is no step.

A batch meets the reference in up to three places: in the reward (``algorithm.kl.where: reward``), in the loss (``where:
loss``), or inside FlowRL's own loss. Wherever it does, and where it is only there to be measured, ``reference/kl`` and
its like are of the weights before the update, over every response token. With ``bypass`` the loss's ratio is to the
rollout's log-probs, not to ``old``: the gap is measured and rejection decided as in every other run.

On several processes each computes its share of the rows, in scoring and in every part; ``mantissa.base.ranks`` says
what that changes (the order of sums) and what it does not.

Legend: B completions of a batch or micro-batch, R response tokens right-padded, N response tokens flat, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from mantissa.algorithms import (
    FlowRLConfig,
    OfTeacher,
    ReinforceConfig,
    Selecting,
    advantage,
    aggregation_scale,
    correction,
    distillation,
    gae,
    importance_weights,
    kl_reward,
    of_rewards,
    off_policy_mask,
    reference_drift,
)
from mantissa.base.ranks import ALONE, Ranks
from mantissa.base.seeds import derive_seed, generator
from mantissa.kernels import Kernels, NativeKernels
from mantissa.model import Decoder, Replay, policy_weights, trained_parameters
from mantissa.precision import FP32, Accumulator, merge
from mantissa.rl.config.sections import AlgorithmConfig, OptimizerConfig
from mantissa.rl.experience import Scored, Sequences, Weighed
from mantissa.rl.score import Forward, OnTokenLogits, ReferencePolicy, forward, scatter, score, together
from mantissa.rl.terms.base import Made, Micro, Tallies, Term
from mantissa.rl.terms.critic import Critic
from mantissa.rl.terms.small import Centering, EntropyBonus, Partition, Penalty, Reference, Selection, Teacher
from mantissa.rollout.transformers import TransformersPolicy
from mantissa.training import (
    Backward,
    LossScaler,
    OptimizerStep,
    StepOutcome,
    adamw,
    adaptive_clip_,
    flushed_fraction,
    gradients_of,
    learning_rate,
    master_weights,
    where_nonfinite,
)

T = TypeVar("T", bound=Term)


@dataclass(frozen=True)
class Update:
    """What one batch did: the outcome of each optimiser step, tallies of weighing and loss, and metrics of what trains
    beside the policy."""

    outcomes: tuple[StepOutcome, ...]
    tallies: Mapping[str, Accumulator]
    trained_tokens: int
    beside: Mapping[str, float] = field(default_factory=dict)


# A step, its batch, and the log-probs (B,R) that its first optimiser step's own forward gave: the batch's old ones
# where it computed none. Before the weights change, on every rank.
Verify = Callable[[int, Weighed, Tensor], None]


class Learner:
    """Owns the master weights and everything that changes them. ``terms``: what is minimised besides the policy's loss.

    ``replay``: what of the rollout's choice of experts its forwards take, of a policy that has some. ``reference``: the
    frozen policy that the recipe asks for. ``reuse_scoring``: False where an update must not depend on how its batch
    was scored. ``on_nonfinite``: ``OptimizerStep``'s.
    """

    def __init__(
        self,
        model: Decoder | TransformersPolicy,
        kernels: Kernels,
        algorithm: AlgorithmConfig,
        config: OptimizerConfig,
        scaler: LossScaler,
        *,
        temperature: float,
        aggregation_length: float,
        seed: int,
        steps: int,
        ranks: Ranks = ALONE,
        replay: Replay | None = None,
        reference: ReferencePolicy | None = None,
        reuse_scoring: bool = True,
        on_nonfinite: Literal["stop", "skip"] = "stop",
    ) -> None:
        self.model, self.kernels, self.ranks = model, kernels, ranks
        self.algorithm, self.config = algorithm, config
        self.temperature, self.seed, self.steps, self.replay = temperature, seed, steps, replay
        self.router_flips: float | None = None  # of the batch last scored: see the metric gap/router_flips
        algorithm.loss.prepare()
        norm = algorithm.aggregation == "seq_mean_token_sum_norm"
        self.aggregation_length = aggregation_length if norm else None
        self.on_nonfinite = on_nonfinite
        self._first_scaler = deepcopy(scaler)  # as it is now, for each that trains beside the policy
        self.terms = terms_of(
            Made(
                algorithm=algorithm,
                model=model,
                kernels=kernels,
                temperature=temperature,
                aggregation_length=self.aggregation_length,
                micro_batch_tokens=config.micro_batch_tokens,
                seed=seed,
                ranks=ranks,
                step_of=self._step_of,
                reference=reference,
            )
        )
        # Keep the graph of ``score`` for the update, where it can serve: it has log-probs and prompts alone.
        self.reuse_scoring = reuse_scoring and not any(term.entropies or term.numbers for term in self.terms)
        self._kept: _Kept | None = None
        self._seen: _Seen | None = None
        self.step = self.optimizer_step(self._rate(config.lr), scaler, self.terms, on_nonfinite=on_nonfinite)

    def _rate(self, lr: float) -> Callable[[int], float]:
        """The run's schedule, from this rate."""
        decay_until = self.steps * self.config.updates_per_batch if self.config.decay == "linear" else None
        return learning_rate(lr, self.config.warmup, decay_until)

    def _step_of(self, module: nn.Module, lr: float) -> OptimizerStep:
        """An optimiser step over another module that trains beside the policy, on its schedule."""
        known = self._rate(lr), deepcopy(self._first_scaler)
        return self.optimizer_step(*known, purpose="critic", module=module, on_nonfinite=self.on_nonfinite)

    @property
    def most_probable(self) -> int:
        """How many of the sampler's most probable tokens each token is to come with; 0: none."""
        return max((term.most_probable for term in self.terms), default=0)

    def term(self, kind: type[T]) -> T:
        """The term of this kind; ``LookupError`` where the recipe asks for none."""
        for term in self.terms:
            if isinstance(term, kind):
                return term
        raise LookupError(f"no {kind.__name__} among the terms {[type(term).__name__ for term in self.terms]}")

    def optimizer_step(
        self,
        lr_at: Callable[[int], float],
        scaler: LossScaler,
        terms: Sequence[Term] = (),
        purpose: str = "update",
        module: nn.Module | None = None,
        on_nonfinite: Literal["stop", "skip"] = "stop",
    ) -> OptimizerStep:
        """A fresh optimiser over the masters (and what of ``terms`` joins them), behind the one optimiser step.

        ``purpose``: of other updates than these, whose roundings are other draws. ``module``: another than the policy.
        """
        model = self.model if module is None else module
        optimizer = adamw(
            model,
            betas=self.config.betas,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
            moments=self.config.moments,
        )

        parameters = dict(model.named_parameters())
        seed = derive_seed(self.seed, "masters", purpose)
        masters = master_weights(self.config.masters, parameters, self.kernels.format, seed)
        for term in terms:
            parameters |= term.join(optimizer, self.config.lr)
        joined = {name: module for term in terms for name, module in term.modules.items()}
        watched = nn.ModuleDict({"policy": model, **joined}) if joined else model

        def diagnose(backward: Backward) -> str:
            return str(where_nonfinite(watched, lambda: backward(scaler.scale), self.ranks))

        clipped = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("lm_head")]
        factor = self.config.adaptive_clip
        return OptimizerStep(
            parameters,
            optimizer,
            scaler,
            self.kernels.format,
            lr_at,
            self.config.max_grad_norm,
            diagnose,
            clip=None if factor is None else partial(adaptive_clip_, clipped, factor),
            on_nonfinite=on_nonfinite,
            ranks=self.ranks,
            masters=masters,
        )

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The policy's fp32 weights by name: the masters, or with adapters the merged ones, made when asked for."""
        if isinstance(self.model, TransformersPolicy):
            return self.trained
        return policy_weights(self.model)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The fp32 masters that train, by name: every weight, or the adapters alone."""
        return {name: parameter.detach() for name, parameter in trained_parameters(self.model).items()}

    @property
    def beside(self) -> dict[str, Mapping[str, Tensor]]:
        """What terms keep, by name: saved in checkpoints, never exported or synced."""
        return {name: tensors for term in self.terms for name, tensors in term.tensors.items()}

    @property
    def version(self) -> int:
        """The policy's version: optimiser steps applied. A skipped step does not advance it."""
        return self.step.updates

    def forward(self, sequences: Sequences, kernels: Kernels, **also: Any) -> Forward:
        """One differentiable forward of the current weights; see ``score.py``, for what ``also`` asks as well."""
        also |= {"prompts": any(term.prompts for term in self.terms), "replay": self.replay}
        return forward(self.model, kernels, sequences, self.temperature, **also)

    def logp(self, sequences: Sequences, kernels: Kernels) -> Tensor:
        """Log-prob of each response token: N, fp32, differentiable."""
        return self.forward(sequences, kernels).logp_N

    def score(self, sequences: Sequences, look: OnTokenLogits | None = None) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every response token under the current weights; B, R, fp32, 0 at padding.

        ``look`` is shown the logits of what this rank scores.
        """
        tokens = self.config.micro_batch_tokens
        parts = sequences.micro_batches(sequences.rows, tokens, self.ranks)
        alone = self.reuse_scoring and self.ranks.alone
        keep = alone and len(parts) == 1 and self.config.updates_per_batch == 1
        self._kept = None  # before the forward: two graphs at a time would be one too many
        flips, choices = 0.0, 0

        def each(part: Sequences, rows: Tensor) -> Forward:
            nonlocal flips, choices
            row_N, column_N = part.mask_BR.nonzero(as_tuple=True)

            shown = _placed(look, rows[row_N], column_N) if look is not None and len(rows) else None
            with torch.set_grad_enabled(keep):
                passed = self.forward(part, self.kernels, entropies=True, look=shown)
            if keep:
                graph_BR = torch.zeros(sequences.mask_BR.shape, dtype=torch.float32, device=rows.device)
                graph_BR = graph_BR.index_put((rows[row_N], column_N), passed.logp_N)
                self._kept = _Kept(sequences.tokens_BT, self.version, graph_BR, rows, passed.prompt_BE)
            if passed.route is not None and len(rows):
                flips, choices = flips + float(passed.route.flips), choices + passed.route.choices
            return passed

        scored = score(each, sequences, tokens, self.ranks, entropies=True, exchanges=True)
        flips, compared = self.ranks.sum_of(flips), self.ranks.sum_of(choices)
        self.router_flips = flips / compared if compared else None
        return scored

    def learn(self, experience: Weighed, step: int, verify: Verify | None = None) -> Update:
        """Learn from one weighed batch. ``step`` keys the split into parts. ``verify`` is shown its first forward."""
        beside: dict[str, float] = {}
        for term in self.terms:
            beside |= term.learn(experience, self._parts(experience, step))
        if any(term.holds(step) for term in self.terms):
            return Update((), experience.tallies, 0, beside)
        self._seen = None if verify is None else _Seen(verify, experience.old_logp_BR.clone())
        outcomes: list[StepOutcome] = []
        losses, trained = [], 0
        experience = self.with_choice(experience, step)
        for rows in self._parts(experience, step):
            batches = self._micro_batches(experience, rows, self.ranks)
            trained += sum(int(experience.valid_BR[micro.rows].sum()) for micro in batches if micro.counts)
            if batches:  # else there is no gradient, and momentum alone must not move the policy
                outcome, tally = self._step(experience, batches, step)
                self._seen = None  # later steps' forwards are of other weights
                outcomes.append(outcome)
                losses.append(tally)
        self._seen = None
        losses = [tally for parts_of_one in self.ranks.gather(losses) for tally in parts_of_one if tally]
        # Where the loss made its own weights (reinforce), their tallies replace those of ``old``. The distance from the
        # reference stays that of the weights before the update.
        before = {name: tally for name, tally in experience.tallies.items() if name.startswith("reference/")}
        tallies = {**experience.tallies, **merge(losses), **before}
        return Update(tuple(outcomes), tallies, int(self.ranks.sum_of(trained)), beside)

    def with_choice(self, experience: Weighed, step: int) -> Weighed:
        """With what terms choose of each whole optimiser step."""
        for term in self.terms:
            experience = experience.having(**term.choose(experience, self._parts(experience, step), step))
        return experience

    def _parts(self, experience: Weighed, step: int) -> list[Tensor]:
        """The rows of each optimiser step on a batch."""
        order = torch.randperm(len(experience), generator=generator(self.seed, "update", step))
        device = experience.tokens_BT.device
        return [part.to(device) for part in order.tensor_split(self.config.updates_per_batch)]

    def _micro_batches(self, experience: Weighed, rows: Tensor, ranks: Ranks) -> list[_MicroBatch]:
        """This rank's micro-batches of one optimiser step: rows that carry a gradient, with their weights in the step.

        Where there is such a row at all, every rank has as many micro-batches, if need be of weight 0.
        """
        valid_BR = experience.valid_BR
        scale_BR = aggregation_scale(valid_BR[rows], self.algorithm.aggregation, self.aggregation_length)
        pulled_B = (experience.advantage_BR[rows] != 0).any(1) | self.algorithm.every_completion
        alive = (pulled_B & valid_BR[rows].any(1)).nonzero().squeeze(1)
        if len(alive) == 0:
            return []
        place = {int(row): i for i, row in enumerate(rows.tolist())}
        parts = experience.micro_batches(rows[alive], self.config.micro_batch_tokens, ranks)
        idle = _MicroBatch(rows[alive[:1]], torch.zeros_like(scale_BR[:1]), counts=False)
        return [
            _MicroBatch(part, scale_BR[[place[int(row)] for row in part.tolist()]]) if len(part) else idle
            for part in parts
        ]

    def _step(
        self, experience: Weighed, batches: list[_MicroBatch], step: int
    ) -> tuple[StepOutcome, dict[str, Accumulator]]:
        """One optimiser step over its micro-batches."""
        tallies: list[dict[str, Accumulator]] = []
        kept, self._kept = self._kept, None
        graphs = [kept] if kept is not None and self._usable(kept, experience, batches) else []
        del kept  # what is not used must not hold its memory through the step

        def backward(scale: float) -> Tensor:
            tallies.clear()  # a repeated backward counts once
            total = torch.zeros((), device=experience.tokens_BT.device)
            for micro in batches:
                graph = graphs.pop() if graphs else None  # serves one backward, which frees it
                loss, tally = self._loss(experience, micro, self.kernels, step, graph)
                del graph
                if micro.counts:
                    tallies.append(tally)
                    total += loss.detach()
                (loss * scale).backward()
            self.ranks.sum_gradients(self.step.parameters.values())
            if (seen := self._seen) is not None:
                seen.verify(step, experience, seen.logp_BR)  # raises while the weights are still the old ones
            return total

        outcome = self.step.run(backward)
        merged = merge(tallies)
        if not self.ranks.alone:  # they will travel
            merged = {name: replace(tally, parts=tally.parts.cpu()) for name, tally in merged.items()}
        return outcome, merged

    def _usable(self, kept: _Kept, experience: Weighed, batches: list[_MicroBatch]) -> bool:
        """Whether the scoring's graph is of this batch and these weights, and cheaper than a forward of its own.

        It holds all rows, so its backward (two thirds of the work) is of all rows: cheaper than forward and backward of
        the rows that carry a gradient where these are more than two thirds.
        """
        same = kept.tokens_BT is experience.tokens_BT and kept.version == self.version
        return same and len(batches) == 1 and 3 * len(batches[0].rows) > 2 * len(kept.logp_BR)

    def _loss(
        self, experience: Weighed, micro: _MicroBatch, kernels: Kernels, step: int, kept: _Kept | None = None
    ) -> tuple[Tensor, dict[str, Accumulator]]:
        """Loss of a micro-batch; ``kept``: the scoring's graph, where it can serve."""
        rows, batch = micro.rows, experience.select(micro.rows)
        responses = batch.mask_BR.shape[1]
        if kept is not None:
            logp_BR, passed = kept.logp_BR[rows, :responses], kept.of_prompts(rows)
            numbers_BRM = logp_BR.new_zeros(*logp_BR.shape, 0)
        else:
            asked = [term for term in self.terms if term.numbers]
            also = together([term.of_logits(batch) for term in asked]) if asked else None
            entropies = "differentiable" if any(term.entropies for term in self.terms) else False
            done = self.forward(batch, kernels, entropies=entropies, also=also)
            logp_BR, passed = scatter(done.logp_N, batch.mask_BR), done.passed(batch.mask_BR)
            numbers_BRM = passed.pop("numbers_BRM", logp_BR.new_zeros(*logp_BR.shape, 0))
        if self._seen is not None:
            self._seen.logp_BR[rows, :responses] = logp_BR.detach()
        below_BR = batch.rollout_logp_BR if self.algorithm.correction.bypass else batch.old_logp_BR
        seen = Micro(
            batch=batch, step=step, logp_BR=logp_BR, below_BR=below_BR, weight_BR=batch.weight_BR,
            scale_BR=micro.scale_BR[:, :responses], passed=passed,
        )  # fmt: skip
        numbers = numbers_BRM.split([term.numbers if numbers_BRM.shape[-1] else 0 for term in self.terms], -1)
        return micro_loss(seen, self.algorithm, [*zip(self.terms, numbers, strict=True)])

    def flushed(self, experience: Weighed, step: int) -> float | None:
        """Fraction of gradients that the format flushes to zero, on up to 8 completions of a weighed batch's first
        optimiser step, against fp32 kernels; None where there is no gradient, the format is fp32, or transformers' own
        code computes.

        Every rank computes the same ones: the figure does not depend on their number.
        """
        experience = self.with_choice(experience, step)
        batches = self._micro_batches(experience, self._parts(experience, step)[0], ALONE)
        if self.kernels.format is FP32 or not batches or not isinstance(self.model, Decoder):
            return None
        small = _MicroBatch(batches[0].rows[:8], batches[0].scale_BR[:8])
        scale = self.step.scaler.scale

        def work(kernels: Kernels) -> Callable[[], None]:
            return lambda: (self._loss(experience, small, kernels, step)[0] * scale).backward()

        low = gradients_of(self.model, work(self.kernels))
        return flushed_fraction(low, gradients_of(self.model, work(NativeKernels(FP32))), self.ranks)


def _placed(look: OnTokenLogits, row_N: Tensor, column_N: Tensor) -> Callable[[int, Tensor], None]:
    """``look`` with the places of the tokens whose logits are shown, from the ``start``-th on."""
    return lambda start, logits_nV: look(
        row_N[start : start + len(logits_nV)], column_N[start : start + len(logits_nV)], logits_nV
    )


@dataclass(frozen=True)
class _Kept:
    """The differentiable log-probs of a scoring, and what they are of.

    ``prompt_BE``: the prompts' mean states, with FlowRL, in the order of ``order_B`` (rows of the batch).
    """

    tokens_BT: Tensor
    version: int
    logp_BR: Tensor
    order_B: Tensor
    prompt_BE: Tensor | None

    def of_prompts(self, rows: Tensor) -> dict[str, Tensor]:
        """The mean states of these rows of the batch, where there are some."""
        return {} if self.prompt_BE is None else {"prompt_BE": self.prompt_BE[self.order_B.argsort()[rows]]}


@dataclass(frozen=True)
class _Seen:
    """Who is shown the log-probs of the first optimiser step's own forward, and what takes them."""

    verify: Verify
    logp_BR: Tensor


@dataclass(frozen=True)
class _MicroBatch:
    """Rows of the batch that go through the model together, and their tokens' weights in the step's loss.

    ``counts``: False for one that is only there for the exchange with other ranks.
    """

    rows: Tensor
    scale_BR: Tensor
    counts: bool = True


def terms_of(made: Made) -> list[Term]:
    """The terms that a recipe asks for, in the order in which they are added up. A new one is a file in ``terms/``, and
    here the line that says when it is one."""
    algorithm, loss, policy, reference = made.algorithm, made.algorithm.loss, made.model, made.reference
    terms: list[Term] = []
    if algorithm.critic is not None:
        assert isinstance(policy, Decoder)  # the configuration's own check, as of the next
        terms.append(Critic(policy, algorithm.critic, made))
    if isinstance(loss, FlowRLConfig):
        assert isinstance(policy, Decoder)
        terms.append(Partition(policy, loss, made.seed))
    if isinstance(loss, Selecting):
        terms.append(Selection(loss, made.seed))
    if isinstance(loss, ReinforceConfig) and loss.centering is not None:
        terms.append(Centering(loss.centering, algorithm.correction, made.temperature))
    if reference is not None:
        terms.append(Reference(reference))
        if isinstance(loss, OfTeacher):
            terms.append(Teacher(reference, loss, made.temperature))
    if algorithm.kl is not None and algorithm.kl.where == "loss":
        terms.append(Penalty(algorithm.kl))
    if algorithm.entropy is not None:
        terms.append(EntropyBonus(algorithm.entropy))
    return terms


def weigh(experience: Scored, algorithm: AlgorithmConfig) -> Weighed:
    """A scored batch with its advantages, each token's correction weight, and which tokens count; with what it counted.

    Advantages are after the KL penalty where it is taken off the reward; ``reward/...`` is before it.
    """
    old, ref, mask = experience.old_logp_BR, experience.columns.get("ref_logp_BR"), experience.mask_BR
    kind = algorithm.advantage
    if kind == "distillation":
        advantages, tallies = distillation(old, ref, mask, experience.reward_B)
    elif kind == "gae":
        critic, value_BR = algorithm.critic, experience.column("value_BR")
        assert critic is not None  # the configuration's own check
        advantages, target_BR, tallies = gae(experience.reward_B, value_BR, mask, critic.gamma, critic.lam)
        experience, tallies = experience.having(target_BR=target_BR), {**tallies, **of_rewards(experience.reward_B)}
    else:
        terms = experience.terms_BK, experience.term_weights_BK
        advantages, tallies = advantage(experience.reward_B, experience.group_B, kind, *terms)
        if algorithm.kl is not None and algorithm.kl.where == "reward":
            shaped_B, penalty = kl_reward(experience.reward_B, old, ref, mask, algorithm.kl)
            advantages, shaped = advantage(shaped_B, experience.group_B, kind)
            tallies = {**shaped, **of_rewards(experience.reward_B), **penalty}
    weight_BR, valid_BR, weights = correction(
        old, experience.rollout_logp_BR, mask, algorithm.correction, whole=algorithm.loss.of_sequences
    )
    drift = {} if ref is None else reference_drift(old, ref, mask)
    return experience.with_weights(advantages, weight_BR, valid_BR, {**tallies, **weights, **drift})


def micro_loss(
    micro: Micro, algorithm: AlgorithmConfig, terms: Sequence[tuple[Term, Tensor]] = ()
) -> tuple[Tensor, Tallies]:
    """Loss of a weighed micro-batch, and tallies; losses and gradients of all of a step's micro-batches add up.

    ``terms``: with the numbers of the logits that each asked for; B,R,M, 0 at padding, M 0 where it asked for none.
    """
    given = {name: tensor for term, numbers in terms for name, tensor in term.gives(micro, numbers).items()}
    micro, value, tallies = _policy_loss(micro, algorithm, given)
    for term, numbers in terms:
        if (added := term.adds(micro, numbers)) is not None:
            value, tallies = value + added[0], {**tallies, **added[1]}
    return value, tallies


def _policy_loss(micro: Micro, algorithm: AlgorithmConfig, given: dict[str, Tensor]) -> tuple[Micro, Tensor, Tallies]:
    """The policy's loss, and the micro-batch with the weights that it took. ``given``: what it needs besides."""
    loss, batch, logp_BR = algorithm.loss, micro.batch, micro.logp_BR
    rollout_BR, mask_BR, valid_BR = batch.rollout_logp_BR, batch.mask_BR, batch.valid_BR
    parts = loss.ratio_parts(logp_BR, batch.old_logp_BR, rollout_BR, batch.advantage_BR, mask_BR, valid_BR)
    weights: Tallies = {}
    if loss.weighs_itself:
        # No ratio in this loss: its importance weight is of the current policy, not of the one before the update.
        weight_BR, weights = importance_weights(logp_BR.detach(), rollout_BR, mask_BR, valid_BR, algorithm.correction)
        micro = replace(micro, weight_BR=weight_BR)
    kept_BR = micro.weight_BR
    if (above := algorithm.correction.mask_negative_above) is not None:
        kept_B, masked = off_policy_mask(logp_BR, rollout_BR, batch.advantage_B, mask_BR, above)
        kept_BR, weights = torch.where(kept_B.unsqueeze(-1), kept_BR, 0.0), {**weights, **masked}
    known = (logp_BR, micro.below_BR, batch.advantage_BR, valid_BR, kept_BR, micro.scale_BR)
    value, tallies = loss.loss(*known, **given)
    return micro, value, {**tallies, **parts, **weights}
