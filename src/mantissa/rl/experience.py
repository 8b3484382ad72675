"""A batch of completions as tensors: what the learner trains on.

Legend: B completions, T prompt and response tokens right-padded, R response tokens right-padded.

Sequences without their repetitions: each distinct prompt once, no padding, no last token.

The samples of a group share their prompt, and under a causal model the prompt's hidden states are the same in each. So
the learner computes what is done position by position (products, norms, feed-forward: nearly all of the work) on a
packed row of distinct positions, and spreads queries, keys and values out to whole sequences for attention alone. With
8 samples of 24 tokens on prompts of 16 that is 0.63 of the positions of a padded batch. Attention's kernel, and what a
position sees, are the same as ever.

The gradient of a shared position is the sum over the sequences that share it, taken in fp32 by the embedding lookup's
backward; in a simulated format it is rounded by the operation that reads it, like every sum of gradients.

Legend: B sequences, T positions of the longest, N packed positions, E features, H heads, D head size.

FlowRL's log-partition head in a run: its weights beside the policy's, its dropout, its place in the optimiser.

The head is fp32, whatever the learner's kernels are. It reads the mean hidden state of each prompt from the forward
that computes the log-probs anyway, and its gradient flows back into the policy through that state (unless
``detach_partition``). It is trained by the learner's own optimiser step, so it overflows, is retried, clipped and
skipped together with the policy; its learning rate follows the same schedule, from a value of its own if one is given.
It has no weight decay: log Z is a number to be found, and nothing says that it is near 0.

All samples of a prompt see the same log Z: dropout is a function of the run's seed, the step and the prompt's group,
so a repeated backward, another split into micro-batches and a resumed run drop the same units.

Legend: B completions, E hidden size.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.algorithms import FlowRLConfig
from mantissa.kernels import Kernels
from mantissa.model import Decoder, LogPartition
from mantissa.ranks import ALONE, Ranks
from mantissa.rl.seeds import derive_seed, generator
from mantissa.rollout.types import Completion
from mantissa.training import load_weights


@dataclass(frozen=True)
class Packed:
    """Distinct positions of ``sequences``, and the way there and back.

    ``tokens_N``, ``positions_N``: each packed position's token and its place in its sequence. ``source_N``: a flat B*T
    position it stands for. ``packed_BT``: the packed position of each one; 0 where there is none (padding and last
    tokens), which no position that counts sees. ``owner_B``: the first sequence with the same prompt.
    """

    tokens_N: Tensor
    positions_N: Tensor
    source_N: Tensor
    packed_BT: Tensor
    owner_B: Tensor

    @staticmethod
    def of(sequences: Sequences) -> Packed:
        """Pack by content: equal prompts are one, wherever they come from."""
        tokens_BT = sequences.tokens_BT
        (rows, width), device = tokens_BT.shape, tokens_BT.device
        column_1T = torch.arange(width, device=device).unsqueeze(0)
        prompt_BT = column_1T < sequences.prompt_length_B.unsqueeze(1)
        real_BT = column_1T < sequences.length_B.unsqueeze(1) - 1  # the last token of a sequence predicts nothing
        owner_B = _first_alike(tokens_BT.masked_fill(~prompt_BT, -1))
        own_B1 = (owner_B == torch.arange(rows, device=device)).unsqueeze(1)
        kept_BT = real_BT & (own_B1 | ~prompt_BT)
        source_N = kept_BT.flatten().nonzero().squeeze(1)
        number_BT = (kept_BT.flatten().cumsum(0) - 1).view(rows, width)
        packed_BT = torch.where(prompt_BT, number_BT[owner_B], number_BT).masked_fill_(~real_BT, 0)
        return Packed(tokens_BT.flatten()[source_N], source_N % width, source_N, packed_BT, owner_B)

    def hidden(self, model: Decoder, kernels: Kernels) -> Tensor:
        """Final hidden states of the packed positions, N,E."""
        rows, width = self.packed_BT.shape
        packed = self.packed_BT.flatten()

        def spread(x_1HND: Tensor) -> Tensor:
            _, heads, count, size = x_1HND.shape
            x_NE = x_1HND.transpose(1, 2).reshape(count, heads * size)
            return F.embedding(packed, x_NE).view(rows, width, heads, size).transpose(1, 2)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out_BHTD = kernels.causal_attention(spread(q), spread(k), spread(v))
            _, heads, _, size = out_BHTD.shape
            out_NE = F.embedding(self.source_N, out_BHTD.transpose(1, 2).reshape(rows * width, heads * size))
            return out_NE.view(1, -1, heads, size).transpose(1, 2)

        tokens_1N, positions_1N = self.tokens_N.unsqueeze(0), self.positions_N.unsqueeze(0)
        return model.hidden(tokens_1N, kernels, positions_1N, attend).squeeze(0)


def _first_alike(rows_BT: Tensor) -> Tensor:
    """For each row, the index of the first row that equals it. int64, B."""
    _, kind_B = torch.unique(rows_BT, dim=0, return_inverse=True)
    index_B = torch.arange(len(rows_BT), device=rows_BT.device)
    first_B = torch.full_like(index_B, len(rows_BT)).scatter_reduce_(0, kind_B, index_B, "amin")
    return first_B[kind_B]


@dataclass(frozen=True)
class Sequences:
    """Whole sequences, and where their responses are.

    ``tokens_BT``: int64, right-padded with 0. ``prompt_length_B``, ``length_B``: int64, prompt tokens and all tokens.
    ``mask_BR``: bool, True at response tokens. The log-prob of response token j is read at position
    ``prompt_length + j - 1``, the one that predicts it.
    """

    tokens_BT: Tensor
    prompt_length_B: Tensor
    length_B: Tensor
    mask_BR: Tensor

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
        return Sequences(*(t.to(device) for t in (tokens, prompt_length_B, length_B, mask_BR)))

    def __len__(self) -> int:
        return self.tokens_BT.shape[0]

    def select(self, rows: Tensor) -> Sequences:
        """These rows, with padding trimmed to the longest of them."""
        width, responses = int(self.length_B[rows].max()), int(self.mask_BR[rows].sum(1).max())
        return Sequences(
            self.tokens_BT[rows, :width],
            self.prompt_length_B[rows],
            self.length_B[rows],
            self.mask_BR[rows, :responses],
        )

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

    def part_with(self, row: int, rows: Tensor, tokens: int, ranks: Ranks) -> Tensor:
        """The part, on whatever rank, in which ``row`` is computed."""
        for rank in range(ranks.world):
            for part in self.micro_batches(rows, tokens, replace(ranks, rank=rank)):
                if bool((part == row).any()):
                    return part
        raise ValueError(f"row {row} is not among the rows")

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


@dataclass(frozen=True)
class Experience:
    """Sequences with what is known of each completion.

    ``rollout_logp_BR``: fp32, from the engine. ``reward_B``: fp32. ``group_B``: int64, the prompt within the batch.
    ``old_logp_BR`` and ``entropy_BR``: fp32, the learner's before the update; None until ``with_learner`` fills them.
    With exact kernels a step that is not checked has the rollout's log-probs there, and no entropy.
    ``ref_logp_BR``: fp32, the reference's; None where there is no reference. ``key_B``: int64, of the uniforms that
    drew each response; None where another engine did.
    """

    sequences: Sequences
    rollout_logp_BR: Tensor
    reward_B: Tensor
    group_B: Tensor
    old_logp_BR: Tensor | None = None
    entropy_BR: Tensor | None = None
    ref_logp_BR: Tensor | None = None
    key_B: Tensor | None = None

    @staticmethod
    def build(
        prompts: Sequence[Sequence[int]],
        groups: Sequence[Sequence[Completion]],
        rewards: Sequence[float],
        device: torch.device,
    ) -> Experience:
        """Flatten groups of completions (one group a prompt); ``rewards`` are in the flattened order."""
        completions = [completion for group in groups for completion in group]
        group_B = torch.tensor([g for g, group in enumerate(groups) for _ in group], device=device)
        repeated = [prompts[g] for g, group in enumerate(groups) for _ in group]
        sequences = Sequences.build(repeated, [c.tokens for c in completions], device)
        logp_BR = torch.zeros(sequences.mask_BR.shape, dtype=torch.float32)
        for row, completion in zip(logp_BR, completions, strict=True):
            row[: len(completion.tokens)] = completion.logp_T
        reward_B = torch.tensor(rewards, dtype=torch.float32, device=device)
        keys = [completion.key for completion in completions if completion.key is not None]
        key_B = torch.tensor(keys, device=device) if len(keys) == len(completions) else None
        return Experience(sequences, logp_BR.to(device), reward_B, group_B, key_B=key_B)

    def with_learner(self, logp_BR: Tensor, entropy_BR: Tensor | None) -> Experience:
        return replace(self, old_logp_BR=logp_BR, entropy_BR=entropy_BR)

    def with_reference(self, logp_BR: Tensor) -> Experience:
        return replace(self, ref_logp_BR=logp_BR)


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


PREFIX = "partition."  # of its parameters' names among the optimiser step's: no decoder has any that begin so


class Flow:
    """The head of one run. ``seed``: the run's; the first weights and every dropout follow from it."""

    def __init__(self, hidden_size: int, config: FlowRLConfig, seed: int, device: torch.device) -> None:
        self.config, self.seed = config, seed
        head = LogPartition(hidden_size, config.partition_dropout)
        self.head = head.initialize(generator(seed, "partition")).to(device)

    def keys(self, group_B: Tensor, step: int) -> Tensor:
        """What names each row's dropout: int64, B; equal within a group, different between groups and steps."""
        names, index_B = torch.unique(group_B, return_inverse=True)
        keys = [derive_seed(self.seed, "partition dropout", step, group) for group in names.tolist()]
        return torch.tensor(keys, dtype=torch.int64, device=group_B.device)[index_B]

    def log_z(self, prompt_BE: Tensor, key_B: Tensor) -> Tensor:
        """log Z of each row's prompt, fp32, B, differentiable; ``prompt_BE``: the prompts' mean hidden states."""
        one_B1 = torch.ones(len(prompt_BE), 1, dtype=torch.bool, device=prompt_BE.device)
        log_z_B: Tensor = self.head(prompt_BE.unsqueeze(1), one_B1, key_B, detach=self.config.detach_partition)
        return log_z_B

    def join(self, optimizer: torch.optim.Optimizer, lr: float) -> dict[str, nn.Parameter]:
        """Add the head to the policy's optimiser, whose rate is ``lr``; returns its parameters under their names."""
        scale = 1.0 if self.config.partition_lr is None else self.config.partition_lr / lr
        parameters = {PREFIX + name: parameter for name, parameter in self.head.named_parameters()}
        optimizer.add_param_group({"params": list(parameters.values()), "weight_decay": 0.0, "lr_scale": scale})
        return parameters

    @property
    def weights(self) -> dict[str, Tensor]:
        """The head's fp32 weights by name, for a file beside the policy's."""
        return {name: parameter.detach() for name, parameter in self.head.named_parameters()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``weights``."""
        load_weights(self.weights, tensors)
