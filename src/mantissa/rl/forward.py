"""One forward of sequences through a policy: the log-probs of their responses, for whoever needs them.

The learner, the reference and the measure of an engine's share come here: the same packing, the same projection, the
same log-prob function at the same temperature. What may differ is the weights and the kernels, and so those alone make
a difference.

Legend: B sequences, U distinct prompts, P prompt tokens right-padded, N response tokens flat, E features, V words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import Kernels
from mantissa.model import Decoder
from mantissa.rl.experience import Sequences
from mantissa.rl.packing import Packed
from mantissa.rl.team import ALONE, Team


@dataclass(frozen=True)
class Forward:
    """What a forward gives: ``logp_N`` and the ``logits_NV`` it came from (fp32, differentiable), and the prompts.

    ``prompt_BE``: fp32, the mean of the final hidden states over each sequence's prompt; None where not asked for.
    """

    logp_N: Tensor
    logits_NV: Tensor
    prompt_BE: Tensor | None = None


def forward(
    model: Decoder, kernels: Kernels, sequences: Sequences, temperature: float, *, prompts: bool = False
) -> Forward:
    """Log-prob of each response token, and with ``prompts`` each prompt's mean hidden state, in one pass.

    A prompt that several sequences share is computed once, and only positions that predict a response token reach the
    output projection.
    """
    position_N, token_N = sequences.response_tokens()
    packed = Packed.of(sequences)

    def work() -> tuple[Tensor, Tensor | None]:
        hidden_ME = packed.hidden(model, kernels)
        logits_NV = model.logits(F.embedding(packed.packed_BT.flatten()[position_N], hidden_ME), kernels)
        return logits_NV, prompt_mean(packed, hidden_ME, sequences.prompt_length_B) if prompts else None

    logits_NV, mean_BE = model.within(work)
    return Forward(kernels.token_logprob(logits_NV, token_N, temperature), logits_NV, mean_BE)


def score(
    model: Decoder,
    kernels: Kernels,
    sequences: Sequences,
    temperature: float,
    *,
    micro_batch_tokens: int,
    team: Team = ALONE,
) -> Tensor:
    """Log-prob of every response token under a policy that every rank holds whole; B, R, fp32, 0 at padding.

    ``micro_batch_tokens``: padded tokens that a forward holds. Ranks share the rows, and all of them get all of it.
    """
    logp_BR = torch.zeros(sequences.mask_BR.shape, dtype=torch.float32, device=sequences.mask_BR.device)
    rows_B = torch.arange(len(sequences), device=sequences.mask_BR.device)
    with torch.no_grad():
        for rows in team.micro_batches(sequences, rows_B, micro_batch_tokens):
            if not len(rows):
                continue  # a whole policy: no exchange to take part in
            part = sequences.select(rows)
            row, column = part.mask_BR.nonzero(as_tuple=True)
            logp_BR[rows[row], column] = forward(model, kernels, part, temperature).logp_N
    team.join_rows(logp_BR)
    return logp_BR


def prompt_mean(packed: Packed, hidden_ME: Tensor, prompt_length_B: Tensor) -> Tensor:
    """Mean over a prompt's tokens of the packed hidden states (M of them), for each sequence. fp32, B,E.

    Summed in fp32 whatever the format of ``hidden_ME``: a thousand bf16 values lose their last digits in a bf16 sum.
    Prompts that are shared are averaged once.
    """
    owner_U, index_B = torch.unique(packed.owner_B, return_inverse=True)
    length_U = prompt_length_B[owner_U]
    width = int(length_U.max())
    beyond_UP = torch.arange(width, device=length_U.device) >= length_U.unsqueeze(1)
    states_UPE = F.embedding(packed.packed_BT[owner_U, :width], hidden_ME)
    kept_UPE = states_UPE.to(torch.float32).masked_fill(beyond_UP.unsqueeze(-1), 0.0)
    return F.embedding(index_B, kept_UPE.sum(1) / length_U.unsqueeze(1))


def scatter(values_N: Tensor, mask_BR: Tensor) -> Tensor:
    """Flat response tokens to B, R, 0 at padding; differentiable."""
    empty_BR = torch.zeros(mask_BR.shape, dtype=values_N.dtype, device=values_N.device)
    return empty_BR.index_put(mask_BR.nonzero(as_tuple=True), values_N)
