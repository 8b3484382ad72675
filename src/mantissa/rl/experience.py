"""A batch of completions as tensors, from the sampler's answer to the step's metrics: flat, a row a completion.

Which rows belong to one prompt is said by their group's number, and nothing is ever regrouped. A step's batch is an
``Experience`` where it was sampled, ``Scored`` with the log-probs, ``Weighed`` with advantages and the weights of
tokens: each has what the one before it has. A field that may be None is one that a recipe or an engine does without.

Legend: B completions, T prompt and response tokens right-padded, R response tokens right-padded.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from mantissa.algorithms import Accumulator
from mantissa.base.ranks import ALONE, Ranks
from mantissa.precision.numerics import masked_mean
from mantissa.rollout.most_probable import MostProbable
from mantissa.rollout.sampling import Completion, most_probable, supports, told
from mantissa.rollout.support import Support

Tallies = Mapping[str, Accumulator]
S = TypeVar("S", bound="Sequences")


@dataclass(frozen=True)
class Sequences:
    """Whole sequences, and where their responses are.

    ``tokens_BT``: int64, right-padded with 0. ``prompt_length_B``, ``length_B``: int64, prompt tokens and all tokens.
    ``mask_BR``: bool, True at response tokens. The log-prob of response token j is read at position
    ``prompt_length + j - 1``, the one that predicts it. ``support``: of each sequence, what its response tokens were
    chosen from; whoever scores the sequences renormalises over it. None: from the whole vocabulary.

    ``experts_BTLK``, ``expert_weights_BTLK``: of a policy with mixtures of experts, those that the rollout's positions
    passed, as in ``Completion``; -1, and weights of 0, where it passed none. None where the engine does not tell.
    """

    tokens_BT: Tensor
    prompt_length_B: Tensor
    length_B: Tensor
    mask_BR: Tensor
    support: tuple[Support, ...] | None = None
    experts_BTLK: Tensor | None = field(default=None, kw_only=True)
    expert_weights_BTLK: Tensor | None = field(default=None, kw_only=True)

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

    def select(self, rows: Tensor) -> Self:
        """These rows of every field, with padding trimmed to the longest of them."""
        widths = {"BT": int(self.length_B[rows].max()), "BR": int(self.mask_BR[rows].sum(1).max())}
        widths["BTLK"] = widths["BT"]
        chosen: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, tuple):  # one of each sequence
                chosen[each.name] = tuple(value[row] for row in rows.tolist())
        for each in fields(self):
            value, layout = getattr(self, each.name), each.name.rpartition("_")[2]  # a name ends in its dimensions
            if isinstance(value, Tensor):
                chosen[each.name] = value[rows, : widths[layout]] if layout in widths else value[rows]
        return replace(self, **chosen)

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
    weights, None where it is one number; ``group_B`` (int64), its prompt's number in the batch; ``version_B`` (int64),
    the weights that sampled it; ``key_B`` (int64), of the uniforms that drew it, None where another engine did;
    ``most_probable``, the sampler's most probable tokens, of a loss that needs them.
    """

    rollout_logp_BR: Tensor
    reward_B: Tensor
    group_B: Tensor
    version_B: Tensor
    most_probable: tuple[MostProbable, ...] | None = None
    terms_BK: Tensor | None = None
    term_weights_BK: Tensor | None = None
    key_B: Tensor | None = None

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        groups: Sequence[int],
        rewards: Sequence[float],
        device: torch.device,
        terms: Sequence[Sequence[tuple[float, float]]] = (),
    ) -> Experience:
        """Pad and stack completions, each with its prompt, its group's number, its reward, and that one's terms."""
        sequences = Sequences.build(prompts, [c.tokens for c in completions], device)
        logp_BR = torch.zeros(sequences.mask_BR.shape, dtype=torch.float32)
        for row, completion in zip(logp_BR, completions, strict=True):
            row[: len(completion.tokens)] = completion.logp_T
        keys = [completion.key for completion in completions if completion.key is not None]
        width = sequences.tokens_BT.shape[1]
        known: dict[str, Any] = {}
        for name, routes in zip(("experts_BTLK", "expert_weights_BTLK"), routes_of(prompts, completions), strict=True):
            known[name] = None if routes is None else _padded(routes, width, device)
        known["support"] = None if (found := supports(completions)) is None else tuple(found)
        tops = most_probable(completions)
        summands = torch.tensor([list(each) for each in terms], dtype=torch.float32, device=device)
        return _grown(
            Experience,
            sequences,
            **known,
            most_probable=None if tops is None else tuple(tops),
            rollout_logp_BR=logp_BR.to(device),
            reward_B=torch.tensor(rewards, dtype=torch.float32, device=device),
            terms_BK=summands[..., 0] if summands.numel() else None,
            term_weights_BK=summands[..., 1] if summands.numel() else None,
            group_B=torch.tensor(groups, device=device),
            version_B=torch.tensor([completion.policy_version for completion in completions], device=device),
            key_B=torch.tensor(keys, device=device) if len(keys) == len(completions) else None,
        )

    def with_learner(self, logp_BR: Tensor, entropy_BR: Tensor | None = None) -> Scored:
        """Scored by the learner."""
        return _grown(Scored, self, old_logp_BR=logp_BR, entropy_BR=entropy_BR)


@dataclass(frozen=True, kw_only=True)
class Scored(Experience):
    """With log-probs: ``old_logp_BR`` and ``entropy_BR``, the learner's before the update (with exact kernels a step
    that is not checked has the rollout's log-probs there, and no entropy); ``ref_logp_BR``, the reference's, None
    without one; ``value_BR``, the value model's, None without one."""

    old_logp_BR: Tensor
    entropy_BR: Tensor | None = None
    ref_logp_BR: Tensor | None = None
    value_BR: Tensor | None = None

    def with_weights(
        self,
        advantage: Tensor,
        weight_BR: Tensor,
        valid_BR: Tensor,
        tallies: Tallies | None = None,
        target_BR: Tensor | None = None,
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
            target_BR=target_BR,
            tallies=tallies or {},
        )


@dataclass(frozen=True, kw_only=True)
class Weighed(Scored):
    """What is learned from: ``advantage_BR``, 0 at padding, and ``advantage_B``, a completion's (where each token has
    its own, their mean); ``weight_BR`` and ``valid_BR`` (bool), the correction's; ``tallies``, what weighing counted.

    ``target_BR``: of a value model, what it learns. ``chosen_BR`` (bool): the tokens that a loss which selects some has
    chosen of each optimiser step.
    """

    advantage_B: Tensor
    advantage_BR: Tensor
    weight_BR: Tensor
    valid_BR: Tensor
    target_BR: Tensor | None = None
    chosen_BR: Tensor | None = None
    tallies: Tallies = field(default_factory=dict)


def _grown(stage: type[S], batch: Sequences, **more: Any) -> S:
    """``batch`` as a later stage; or as this one anew."""
    return stage(**{each.name: getattr(batch, each.name) for each in fields(stage) if hasattr(batch, each.name)} | more)


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


def _padded(routes: Sequence[Tensor], width: int, device: torch.device) -> Tensor:
    """Stacked, each lengthened to ``width`` positions."""
    return torch.stack([_lengthened(route, width) for route in routes]).to(device)


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
