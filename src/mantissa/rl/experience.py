"""A batch of completions as tensors, from the sampler's answer to the step's metrics: flat, a row a completion.

Which rows belong to one prompt is said by their group's number, and nothing is ever regrouped. A step's batch is an
``Experience`` where it was sampled, ``Scored`` with the log-probs, ``Weighed`` with advantages and the weights of
tokens: each has what the one before it has, whole. What an engine tells besides, or a term of the objective finds out,
is a column of its own: there, or not.

Legend: B completions, T prompt and response tokens right-padded, R response tokens right-padded.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from mantissa.base.ranks import ALONE, Ranks
from mantissa.precision import Accumulator, masked_mean
from mantissa.rollout.engine import most_probable, supports, told
from mantissa.rollout.sampling import Completion
from mantissa.rollout.support import Support

Tallies = Mapping[str, Accumulator]
S = TypeVar("S", bound="Sequences")


@dataclass(frozen=True)
class Sequences:
    """Whole sequences, and where their responses are.

    ``tokens_BT``: int64, right-padded with 0. ``prompt_length_B``, ``length_B``: int64, prompt tokens and all tokens.
    ``mask_BR``: bool, True at response tokens. The log-prob of response token j is read at position
    ``prompt_length + j - 1``, the one that predicts it. ``support``: of each sequence, what its response tokens were
    chosen from; whoever scores the sequences renormalises over it. Empty: from the whole vocabulary.

    ``columns``: what else is known of each row, by names that end in their dimensions. From an engine:
    ``experts_BTLK`` and ``expert_weights_BTLK``, of a policy with mixtures of experts, those that the rollout's
    positions passed, as in ``Completion`` (-1, and weights of 0, where it passed none).
    """

    tokens_BT: Tensor
    prompt_length_B: Tensor
    length_B: Tensor
    mask_BR: Tensor
    support: tuple[Support, ...] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)

    @staticmethod
    def build(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], device: torch.device) -> Sequences:
        """Pad and stack prompts and their responses."""
        whole = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        tokens = torch.zeros(len(whole), max(map(len, whole)), dtype=torch.int64)
        for row, ids in zip(tokens, whole, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        response_length_B = torch.tensor([len(response) for response in responses])
        mask_BR = torch.arange(int(response_length_B.max())) < response_length_B.unsqueeze(1)
        prompt_length_B = torch.tensor([len(prompt) for prompt in prompts])
        length_B = prompt_length_B + response_length_B
        known = tokens, prompt_length_B, length_B, mask_BR
        tokens_BT, prompt_B, length_B, mask_BR = (each.to(device) for each in known)
        return Sequences(tokens_BT, prompt_B, length_B, mask_BR)

    def __len__(self) -> int:
        return self.tokens_BT.shape[0]

    @property
    def rows(self) -> Tensor:
        """The indices of all rows."""
        return torch.arange(len(self), device=self.tokens_BT.device)

    def having(self, **columns: Tensor) -> Self:
        """With these columns too, or in the place of those of the same names."""
        return replace(self, columns={**self.columns, **columns})

    def column(self, name: str) -> Tensor:
        """One of ``columns``; ``LookupError`` where nobody has made it."""
        if name not in self.columns:
            raise LookupError(f"this batch has no {name}: it was not made by whoever should; it has {[*self.columns]}")
        return self.columns[name]

    def select(self, rows: Tensor) -> Self:
        """These rows of every field, with padding trimmed to the longest of them."""
        widths = {"T": int(self.length_B[rows].max()), "R": int(self.mask_BR[rows].sum(1).max())}

        def chosen(name: str, value: Tensor) -> Tensor:
            width = widths.get(name.rpartition("_")[2][1:2])  # a name ends in its dimensions, rows first
            return value[rows] if width is None else value[rows, :width]

        known = {each.name: getattr(self, each.name) for each in fields(self)}
        some: dict[str, Any] = {name: chosen(name, x) for name, x in known.items() if isinstance(x, Tensor)}
        some["columns"] = {name: chosen(name, value) for name, value in self.columns.items()}
        if self.support:
            some["support"] = tuple(self.support[row] for row in rows.tolist())
        return replace(self, **some)

    def response_tokens(self) -> tuple[Tensor, Tensor]:
        """For the N response tokens in row order: the flat B*T position that predicts each, and the token itself."""
        row, j = self.mask_BR.nonzero(as_tuple=True)
        target = row * self.tokens_BT.shape[1] + self.prompt_length_B[row] + j
        return target - 1, self.tokens_BT.flatten()[target]

    def micro_batches(self, rows: Tensor, tokens: int, ranks: Ranks = ALONE) -> list[Tensor]:
        """The parts of ``rows`` (indices) that this rank computes: one row each, or at most ``tokens`` padded tokens.

        Ranks get equal numbers of tokens, as nearly as whole sequences allow, and equal numbers of parts, for each
        part is an exchange with the others where the learner is sharded. A part without rows is one only in number:
        its rank computes what it likes, and nothing of it may count.
        """
        if ranks.alone:
            return self._split(rows, tokens)
        shares = balanced(self.length_B[rows].tolist(), ranks.world)
        parts = [self._split(rows[torch.tensor(share, dtype=torch.int64).to(rows.device)], tokens) for share in shares]
        here = parts[ranks.rank]
        return here + [rows[:0]] * (max(map(len, parts)) - len(here))

    def part_with(self, row: int, tokens: int, ranks: Ranks) -> Tensor:
        """The part of all rows, on whatever rank, in which ``row`` is computed."""
        shares = (self.micro_batches(self.rows, tokens, replace(ranks, rank=rank)) for rank in range(ranks.world))
        return next(part for share in shares for part in share if bool((part == row).any()))

    def _split(self, rows: Tensor, tokens: int) -> list[Tensor]:
        """Similar lengths together, in an order that is a function of them alone: stable sort, longest first."""
        order = rows[torch.sort(self.length_B[rows], descending=True, stable=True).indices]
        parts: list[Tensor] = []
        start = 0
        while start < len(order):
            count = max(1, tokens // int(self.length_B[order[start]]))
            parts.append(order[start : start + count])
            start += count
        return parts


@dataclass(frozen=True, kw_only=True)
class Experience(Sequences):
    """Sequences with what the sampler tells of each completion; floats are fp32.

    ``rollout_logp_BR``, from the engine; ``reward_B``; ``terms_BK`` and ``term_weights_BK``, its K summands and their
    weights; ``group_B`` (int64), its prompt's number in the batch; ``version_B`` (int64), the weights that sampled it.

    Columns: ``key_B`` (int64), of the uniforms that drew it, where a native engine did; ``top_ids_BRK`` (int32) and
    ``top_logp_BRK``, the sampler's most probable tokens (-inf: fewer than K), where they were asked for.
    """

    rollout_logp_BR: Tensor
    reward_B: Tensor
    terms_BK: Tensor
    term_weights_BK: Tensor
    group_B: Tensor
    version_B: Tensor

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        groups: Sequence[int],
        rewards: Sequence[float],
        device: torch.device,
        terms: Sequence[Sequence[tuple[float, float]]] = (),
    ) -> Experience:
        """Pad and stack completions, each with its prompt, its group's number, its reward, and that one's terms (none:
        the reward is its own)."""
        sequences = Sequences.build(prompts, [c.tokens for c in completions], device)
        logp_BR = torch.zeros(sequences.mask_BR.shape, dtype=torch.float32)
        for row, completion in zip(logp_BR, completions, strict=True):
            row[: len(completion.tokens)] = completion.logp_T
        summands = [[*each] for each in terms] if any(terms) else [[(reward, 1.0)] for reward in rewards]
        terms_BK2 = torch.tensor(summands, dtype=torch.float32, device=device)
        told = _told(prompts, completions, *sequences.tokens_BT.shape)
        return _grown(
            Experience,
            sequences,
            support=tuple(supports(completions) or ()),
            columns={name: column.to(device) for name, column in told.items()},
            rollout_logp_BR=logp_BR.to(device),
            reward_B=torch.tensor(rewards, dtype=torch.float32, device=device),
            terms_BK=terms_BK2[..., 0],
            term_weights_BK=terms_BK2[..., 1],
            group_B=torch.tensor(groups, device=device),
            version_B=torch.tensor([completion.policy_version for completion in completions], device=device),
        )

    def with_learner(self, logp_BR: Tensor, entropy_BR: Tensor | None = None) -> Scored:
        """Scored by the learner; ``entropy_BR``: of what the log-probs are of, where it was taken: a column."""
        scored = _grown(Scored, self, old_logp_BR=logp_BR)
        return scored if entropy_BR is None else scored.having(entropy_BR=entropy_BR)


@dataclass(frozen=True, kw_only=True)
class Scored(Experience):
    """With log-probs: ``old_logp_BR``, the learner's before the update (with exact kernels a step that is not checked
    has the rollout's there).

    Columns: ``entropy_BR``, where the learner scored it; ``ref_logp_BR`` and ``value_BR``, a reference's and a value
    model's, where there is one.
    """

    old_logp_BR: Tensor

    @property
    def by_learner(self) -> bool:
        """Whether the learner scored it, or its log-probs are the rollout's."""
        return "entropy_BR" in self.columns

    def with_weights(
        self,
        advantage: Tensor,
        weight_BR: Tensor,
        valid_BR: Tensor,
        tallies: Tallies | None = None,
    ) -> Weighed:
        """Weighed by advantages, of completions (B) or of their tokens (B,R), and the correction's weights."""
        each = advantage if advantage.dim() == 2 else advantage.unsqueeze(-1)
        return _grown(
            Weighed,
            self,
            advantage_B=masked_mean(advantage, self.mask_BR, -1) if advantage.dim() == 2 else advantage,
            advantage_BR=torch.where(self.mask_BR, each, 0.0),
            weight_BR=weight_BR,
            valid_BR=valid_BR,
            tallies=tallies or {},
        )


@dataclass(frozen=True, kw_only=True)
class Weighed(Scored):
    """What is learned from: ``advantage_BR``, 0 at padding, and ``advantage_B``, a completion's (where each token has
    its own, their mean); ``weight_BR`` and ``valid_BR`` (bool), the correction's; ``tallies``, what weighing counted.

    Columns: ``target_BR``, what a value model learns; ``chosen_BR`` (bool), the tokens that a loss which selects some
    has chosen of each optimiser step.
    """

    advantage_B: Tensor
    advantage_BR: Tensor
    weight_BR: Tensor
    valid_BR: Tensor
    tallies: Tallies = field(default_factory=dict)


def _grown(stage: type[S], batch: Sequences, **more: Any) -> S:
    """``batch`` as a later stage; or as this one anew."""
    return stage(**{each.name: getattr(batch, each.name) for each in fields(stage) if hasattr(batch, each.name)} | more)


def _told(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], rows: int, width: int
) -> dict[str, Tensor]:
    """The columns of what an engine tells besides; on the CPU. ``width``: positions of the longest sequence."""
    told: dict[str, Tensor] = {}
    for name, routes in zip(("experts_BTLK", "expert_weights_BTLK"), routes_of(prompts, completions), strict=True):
        if routes is not None:
            told[name] = torch.stack([_lengthened(route, width) for route in routes])
    keys = [completion.key for completion in completions if completion.key is not None]
    if len(keys) == len(completions):
        told["key_B"] = torch.tensor(keys)
    if (tops := most_probable(completions)) is not None:
        count, responses = tops[0].ids_TK.shape[1], max(len(each.tokens) for each in completions)
        told["top_ids_BRK"] = torch.zeros(rows, responses, count, dtype=torch.int32)
        told["top_logp_BRK"] = torch.full((rows, responses, count), -torch.inf)
        for row, top in enumerate(tops):
            told["top_ids_BRK"][row, : len(top.ids_TK)] = top.ids_TK
            told["top_logp_BRK"][row, : len(top.ids_TK)] = top.logp_TK
    return told


def routes_of(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> tuple[list[Tensor] | None, list[Tensor] | None]:
    """The experts of each sequence's positions but its last, and their weights; None where the engine does not tell.

    Where it does not of an empty response alone: -1, and weights of 0.
    """
    found = (
        told(completions, "experts", lambda each: each.experts_SLK, lambda one: one[:0]),
        told(completions, "weights of experts", lambda each: each.expert_weights_SLK, lambda one: one[:0]),
    )
    ends = [len(prompt) + len(each.tokens) - 1 for prompt, each in zip(prompts, completions, strict=True)]
    first, second = (
        None if routes is None else [_lengthened(route, end) for route, end in zip(routes, ends, strict=True)]
        for routes in found
    )
    return first, second


def _lengthened(route: Tensor, positions: int) -> Tensor:
    """A route with positions that passed no expert at its end."""
    more = positions - len(route)
    return torch.cat([route, route.new_full((more, *route.shape[1:]), 0 if route.is_floating_point() else -1)])


def balanced(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """Indices into ``lengths`` in ``shares`` shares of nearly equal sums: the longest first, to whoever has least.

    A function of its arguments alone. Each share is ascending.
    """
    heap = [(0, share) for share in range(shares)]
    result: list[list[int]] = [[] for _ in range(shares)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        total, share = heapq.heappop(heap)
        result[share].append(index)
        heapq.heappush(heap, (total + lengths[index], share))
    return [sorted(share) for share in result]
