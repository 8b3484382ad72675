"""One forward of sequences through a policy: the log-probs of their responses, for whoever needs them.

The learner, the reference and the measure of an engine's share come here: the same packing, the same projection, the
same log-prob function at the same temperature. What may differ is the weights and the kernels, and so those alone make
a difference.

With a large vocabulary the logits are the largest tensor of a step: 10,000 response tokens of 49,152 words are 2 GB,
and autograd keeps their log-softmax beside them. Beyond a bound they are computed part by part, in the backward pass
once more, so that one part is all that exists of them: the head's product is taken four times in a step, not three.

Legend: B sequences, U distinct prompts, P prompt tokens right-padded, N response tokens flat, E features, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mantissa.kernels import Kernels, Traced
from mantissa.model import Decoder
from mantissa.precision.numerics import entropy
from mantissa.ranks import ALONE, Ranks
from mantissa.rl.experience import Packed, Sequences

_LOGITS_AT_ONCE = 1 << 25  # 128 MiB of fp32
_ENTROPY_AT_ONCE = 1 << 21  # values: what a cache holds

Look = Callable[[int, Tensor], None]  # is shown logits (n,V, detached) of the response tokens from this number on


@dataclass(frozen=True)
class Forward:
    """What a forward gives: ``logp_N`` (fp32, differentiable), and where it was asked for the rest (fp32).

    ``entropy_N``: of the distributions that the log-probs are of, without gradient. ``prompt_BE``: the mean of the
    final hidden states over each sequence's prompt.
    """

    logp_N: Tensor
    entropy_N: Tensor | None = None
    prompt_BE: Tensor | None = None


def forward(
    model: Decoder,
    kernels: Kernels,
    sequences: Sequences,
    temperature: float,
    *,
    prompts: bool = False,
    entropies: bool = False,
    look: Look | None = None,
) -> Forward:
    """Log-prob of each response token, with ``prompts`` each prompt's mean hidden state, with ``entropies`` those too.

    ``look`` is shown the logits, once, part by part.

    A prompt that several sequences share is computed once, and only positions that predict a response token reach the
    output projection.
    """
    position_N, token_N = sequences.response_tokens()
    packed = Packed.of(sequences)

    def work() -> tuple[Tensor, Tensor | None, Tensor | None]:
        hidden_ME = packed.hidden(model, kernels)
        hidden_NE = F.embedding(packed.packed_BT.flatten()[position_N], hidden_ME)
        logp_N, entropy_N = _head(model.head_weight, kernels, hidden_NE, token_N, temperature, entropies, look)
        return logp_N, entropy_N, prompt_mean(packed, hidden_ME, sequences.prompt_length_B) if prompts else None

    return Forward(*model.within(work))


def _head(
    weight_VE: Tensor,
    kernels: Kernels,
    hidden_NE: Tensor,
    token_N: Tensor,
    temperature: float,
    entropies: bool,
    look: Look | None,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each token after its hidden state, and the entropy there where it is asked for; ``Forward``'s."""

    shown: set[int] = set()  # a backward pass computes a part once more

    def part(start: int, hidden_nE: Tensor, token_n: Tensor) -> tuple[Tensor, Tensor | None]:
        logits_nV = kernels.logits(hidden_nE, weight_VE)
        if look is not None and start not in shown:
            shown.add(start)
            look(start, logits_nV.detach())
        logp_n = kernels.token_logprob(logits_nV, token_n, temperature)
        if not entropies:
            return logp_n, None
        some = logits_nV.detach().split(max(1, _ENTROPY_AT_ONCE // len(weight_VE)))
        return logp_n, torch.cat([entropy(logits, temperature) for logits in some])

    parts = -(-len(token_N) * len(weight_VE) // _LOGITS_AT_ONCE)
    if parts <= 1 or isinstance(kernels, Traced):  # who takes notes sees each operation once
        return part(0, hidden_NE, token_N)
    done, start = [], 0
    for hidden_nE, token_n in zip(hidden_NE.tensor_split(parts), token_N.tensor_split(parts), strict=True):
        done.append(checkpoint(part, start, hidden_nE, token_n, use_reentrant=False, preserve_rng_state=False))
        start += len(token_n)
    return torch.cat([logp_n for logp_n, _ in done]), torch.cat([h for _, h in done]) if entropies else None


def score(
    model: Decoder,
    kernels: Kernels,
    sequences: Sequences,
    temperature: float,
    *,
    micro_batch_tokens: int,
    ranks: Ranks = ALONE,
) -> Tensor:
    """Log-prob of every response token under a policy that every rank holds whole; B, R, fp32, 0 at padding.

    ``micro_batch_tokens``: padded tokens that a forward holds. Ranks share the rows, and all of them get all of it.
    """
    logp_BR = torch.zeros(sequences.mask_BR.shape, dtype=torch.float32, device=sequences.mask_BR.device)
    rows_B = torch.arange(len(sequences), device=sequences.mask_BR.device)
    with torch.no_grad():
        for rows in sequences.micro_batches(rows_B, micro_batch_tokens, ranks):
            if not len(rows):
                continue  # a whole policy: no exchange to take part in
            part = sequences.select(rows)
            row, column = part.mask_BR.nonzero(as_tuple=True)
            logp_BR[rows[row], column] = forward(model, kernels, part, temperature).logp_N
    ranks.join_rows(logp_BR)
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
