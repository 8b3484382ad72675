"""A batch of completions as tensors: what the learner trains on.

Legend: B completions, T prompt and response tokens right-padded, R response tokens right-padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mantissa.rollout.types import Completion


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

    def micro_batches(self, rows: Tensor, tokens: int) -> list[Tensor]:
        """Split ``rows`` (indices) into parts of at most ``tokens`` padded tokens, similar lengths together.

        At least one row a part. The order is a function of the lengths alone: stable sort, longest first.
        """
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
