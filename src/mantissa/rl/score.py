"""One forward of sequences through a policy: the log-probs of their responses, for whoever needs them.

The learner, the reference and the measure of an engine's share come here: the same packing, the same projection, the
same log-prob function at the same temperature, the same loop over micro-batches. What may differ is the weights and the
kernels, and so those alone make a difference.

Sequences go in without their repetitions: each distinct prompt once, no padding, no last token of a response. The
samples of a group share their prompt, and under a causal model the prompt's hidden states are the same in each. So what
is done position by position (products, norms, feed-forward: nearly all of the work) is done on a packed row of distinct
positions, and queries, keys and values are spread out to whole sequences for attention alone. With 8 samples of 24
tokens on prompts of 16 that is 0.63 of the positions of a padded batch. The gradient of a shared position is the sum
over the sequences that share it, taken in fp32 by the embedding lookup's backward; in a simulated format it is rounded
by the operation that reads it, like every sum of gradients. A response may be empty: its prompt is computed whole.

With a large vocabulary the logits are the largest tensor of a step: 10,000 response tokens of 49,152 words are 2 GB,
and autograd keeps their log-softmax beside them. Beyond a bound they are computed part by part, in the backward pass
once more, so that one part is all that exists of them: the head's product is taken four times in a step, not three.

The reference is a frozen copy of the policy that some algorithms hold the learner to, in a precision of its own. It is
taken from the fp32 masters when RL begins (after any warm start), rounded once to its format and kept in its kernels'
dtype: on a GPU a bf16 reference takes two bytes a weight. The learner rounds the same masters by the same rule where it
uses them, so in the learner's own format an unchanged policy and its reference have equal log-probs to the last bit,
and their KL begins at exactly 0. In another format it begins at the rounding error of the two. ``refresh_every`` makes
it follow: after that many optimiser steps it becomes a copy of the policy as it then is. What it is a copy of is part
of a checkpoint, tensors and all: they cannot be had from the masters of a later step.

Legend: B sequences, T positions of the longest, R response tokens right-padded, N packed positions or flat response
tokens, U distinct prompts, P prompt tokens right-padded, E features, V words, H heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mantissa.base.bounds import count
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import ALONE, Ranks
from mantissa.kernels import Kernels, Traced
from mantissa.kernels.compiled import Spans
from mantissa.model import Decoder, Replay, Replayed, Route
from mantissa.precision import entropy
from mantissa.rl.experience import Sequences
from mantissa.rollout import CopiedPolicy
from mantissa.rollout.support import Support, truncated
from mantissa.rollout.transformers import CopiedTransformers, TransformersPolicy, logprob_on
from mantissa.training import load_weights

_LOGITS_AT_ONCE = 1 << 26  # 256 MiB of fp32; beyond, each part is computed once more in the backward
_ENTROPY_AT_ONCE = 1 << 21  # values: what a cache holds

Entropies = bool | Literal["differentiable"]
# Of the logits (n,V) of the response tokens from this number on, numbers of each: n,M, differentiable.
OfLogits = Callable[[int, Tensor], Tensor]
# Row and column (N) of each response token that was scored, and its logits (N,V), of the whole vocabulary.
OnTokenLogits = Callable[[Tensor, Tensor, Tensor], None]
OnLogits = Callable[[int, Tensor], None]  # is shown logits (n,V, detached) of the response tokens from this number on


@dataclass(frozen=True)
class Packed:
    """Distinct positions of ``sequences``, and the way there and back.

    ``tokens_N``, ``positions_N``: each packed position's token and its place in its sequence. ``source_N``: a flat B*T
    position it stands for. ``packed_BT``: the packed position of each one; 0 where there is none (padding and last
    tokens), which no position that counts sees. ``owner_B``: the first sequence with the same prompt, one with a
    response where there is one, for of an empty one's last position an engine says nothing.
    ``prompt_length_B``, ``length_B``: the sequences'.
    """

    tokens_N: Tensor
    positions_N: Tensor
    source_N: Tensor
    packed_BT: Tensor
    owner_B: Tensor
    prompt_length_B: Tensor
    length_B: Tensor

    @staticmethod
    def of(sequences: Sequences) -> Packed:
        """Pack by content: equal prompts are one, wherever they come from."""
        tokens_BT = sequences.tokens_BT
        (rows, width), device = tokens_BT.shape, tokens_BT.device
        column_1T = torch.arange(width, device=device).unsqueeze(0)
        prompt_BT = column_1T < sequences.prompt_length_B.unsqueeze(1)
        real_BT = prompt_BT | (column_1T < sequences.length_B.unsqueeze(1) - 1)  # the last of a response predicts none
        owner_B = _first_alike(tokens_BT.masked_fill(~prompt_BT, -1), sequences.length_B > sequences.prompt_length_B)
        own_B1 = (owner_B == torch.arange(rows, device=device)).unsqueeze(1)
        kept_BT = real_BT & (own_B1 | ~prompt_BT)
        source_N = kept_BT.flatten().nonzero().squeeze(1)
        number_BT = (kept_BT.flatten().cumsum(0) - 1).view(rows, width)
        packed_BT = torch.where(prompt_BT, number_BT[owner_B], number_BT).masked_fill_(~real_BT, 0)
        lengths = sequences.prompt_length_B, sequences.length_B
        return Packed(tokens_BT.flatten()[source_N], source_N % width, source_N, packed_BT, owner_B, *lengths)

    def hidden(self, model: Decoder, kernels: Kernels, route: Route | None = None) -> Tensor:
        """Final hidden states of the packed positions, N,E."""
        rows, width = self.packed_BT.shape
        packed = self.packed_BT.flatten()

        def spread(x_1HND: Tensor) -> Tensor:
            _, heads, count, size = x_1HND.shape
            x_NE = x_1HND.transpose(1, 2).reshape(count, heads * size)
            return F.embedding(packed, x_NE).view(rows, width, heads, size).transpose(1, 2)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out_1HND = kernels.packed_attention(q, k, v, lambda: self.spans)
            if out_1HND is not None:
                return out_1HND
            out_BHTD = kernels.causal_attention(spread(q), spread(k), spread(v))
            _, heads, _, size = out_BHTD.shape
            out_NE = F.embedding(self.source_N, out_BHTD.transpose(1, 2).reshape(rows * width, heads * size))
            return out_NE.view(1, -1, heads, size).transpose(1, 2)

        tokens_1N, positions_1N = self.tokens_N.unsqueeze(0), self.positions_N.unsqueeze(0)
        return model.hidden(tokens_1N, kernels, positions_1N, attend, route).squeeze(0)

    @functools.cached_property
    def spans(self) -> Spans:
        """Where each prompt and each response lies: side by side, since rows are packed one after another."""
        packed_BT, prompt_B, owner_B = self.packed_BT.cpu(), self.prompt_length_B.cpu(), self.owner_B.cpu()
        predict_B = (self.length_B.cpu() - prompt_B - 1).clamp(min=0)  # the last of a response predicts none
        last = packed_BT.shape[1] - 1
        begin_B = packed_BT.gather(1, prompt_B.clamp(max=last).unsqueeze(1)).squeeze(1)
        owner_U, count_U = torch.unique(owner_B, return_counts=True)
        stop_U, order_B = count_U.cumsum(0), owner_B.argsort(stable=True)
        prompts_U4 = torch.stack((packed_BT[owner_U, 0], prompt_B[owner_U], stop_U - count_U, stop_U), 1)
        return Spans(prompts_U4, torch.stack((begin_B, predict_B), 1)[order_B].contiguous())

    def replayed(self, sequences: Sequences, replay: Replay | None) -> Replayed | None:
        """The rollout's experts of the packed positions, to be taken as ``replay`` says or only compared with."""
        if "experts_BTLK" not in sequences.columns:
            return None
        experts_NLK = sequences.column("experts_BTLK").flatten(0, 1)[self.source_N]
        weights = sequences.columns.get("expert_weights_BTLK")
        weights_NLK = weights.flatten(0, 1)[self.source_N] if replay == "weights" and weights is not None else None
        return Replayed(experts_NLK, weights_NLK, only_count=replay is None)


def _first_alike(rows_BT: Tensor, rather_B: Tensor) -> Tensor:
    """For each row, the index of the first row that equals it, of those with ``rather_B`` if it can be. int64, B."""
    _, kind_B = torch.unique(rows_BT, dim=0, return_inverse=True)
    count, index_B = len(rows_BT), torch.arange(len(rows_BT), device=rows_BT.device)
    rank_B = torch.where(rather_B, index_B, index_B + count)
    first_B = torch.full_like(index_B, 2 * count).scatter_reduce_(0, kind_B, rank_B, "amin")
    return first_B[kind_B] % count


@dataclass(frozen=True)
class Forward:
    """What a forward gives: ``logp_N`` (fp32, differentiable), and where it was asked for the rest (fp32).

    ``entropy_N``: of the distributions that the log-probs are of, without gradient unless that was asked for.
    ``prompt_BE``: the mean of the final hidden states over each sequence's prompt. ``also_NM``: what was asked for of
    the logits. ``route``: of a policy with mixtures of experts, how its choices compare with the rollout's.
    """

    logp_N: Tensor
    entropy_N: Tensor | None = None
    prompt_BE: Tensor | None = None
    also_NM: Tensor | None = None
    route: Replayed | None = None

    def passed(self, mask_BR: Tensor) -> dict[str, Tensor]:
        """What was asked for beside the log-probs, by name: ``prompt_BE``, ``entropy_BR``, ``numbers_BRM``."""
        found = {} if self.prompt_BE is None else {"prompt_BE": self.prompt_BE}
        for name, each_N in {"entropy_BR": self.entropy_N, "numbers_BRM": self.also_NM}.items():
            found |= {} if each_N is None else {name: scatter(each_N, mask_BR)}
        return found


def together(asked: Sequence[OfLogits]) -> OfLogits:
    """What several ask of the logits, side by side."""
    return lambda start, logits_nV: torch.cat([each(start, logits_nV) for each in asked], -1)


def forward(
    model: Decoder | TransformersPolicy,
    kernels: Kernels,
    sequences: Sequences,
    temperature: float,
    *,
    prompts: bool = False,
    entropies: Entropies = False,
    look: OnLogits | None = None,
    also: OfLogits | None = None,
    replay: Replay | None = None,
) -> Forward:
    """Log-prob of each response token, with ``prompts`` each prompt's mean hidden state, with ``entropies`` those too.

    Entropies have a gradient only where they are asked for as ``differentiable``. ``look`` is shown the logits, once,
    part by part, of the whole vocabulary; log-probs, entropies and what is ``also`` asked for are of the sequences'
    supports where they have some. ``replay``: what of the rollout's choice of experts is taken; None: the model's own.

    A prompt that several sequences share is computed once, and only positions that predict a response token reach the
    output projection. A policy by transformers' own code computes as that does (``forward_transformers``).
    """
    if isinstance(model, TransformersPolicy):
        assert not prompts
        assert replay is None
        return forward_transformers(model, sequences, temperature, entropies=entropies, look=look, also=also)
    position_N, token_N = sequences.response_tokens()
    packed = Packed.of(sequences)
    support = Support.join(sequences.support) if sequences.support else None
    route = packed.replayed(sequences, replay)

    def work() -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        hidden_ME = packed.hidden(model, kernels, route)
        hidden_NE = F.embedding(packed.packed_BT.flatten()[position_N], hidden_ME)
        given = (model.head_weight, kernels, hidden_NE, token_N, temperature, entropies, look, support, also)
        logp_N, entropy_N, also_NM = _head(*given)
        prompt_BE = prompt_mean(packed, hidden_ME, sequences.prompt_length_B) if prompts else None
        return logp_N, entropy_N, prompt_BE, also_NM

    return Forward(*model.within(work), route)


def forward_transformers(
    model: Any,
    sequences: Sequences,
    temperature: float,
    *,
    entropies: Entropies = False,
    look: OnLogits | None = None,
    also: OfLogits | None = None,
) -> Forward:
    """``forward`` by a causal language model of transformers, its own code: rows padded to the right, all logits kept.

    Of an adopted model (``mantissa.adopt``) the log-probs are those of ``TransformersEngine``, to the last bit.
    ``MantissaError``: sequences with experts to replay, which that engine never gives.
    """
    if "experts_BTLK" in sequences.columns:
        raise MantissaError("a model of transformers is scored by its own choice of experts")
    position_N, token_N = sequences.response_tokens()
    mask_BT = torch.arange(sequences.tokens_BT.shape[1], device=token_N.device) < sequences.length_B.unsqueeze(1)
    positions_BT = (mask_BT.long().cumsum(-1) - 1).clamp_min(0)
    logits_BTV = model(
        input_ids=sequences.tokens_BT, attention_mask=mask_BT.long(), position_ids=positions_BT, use_cache=False
    ).logits
    logits_NV = logits_BTV.flatten(0, 1)[position_N].float()
    if look is not None:
        look(0, logits_NV.detach())
    support = Support.join(sequences.support) if sequences.support else None
    logprob = logprob_on(logits_NV.device)
    logp_N, entropy_N, also_NM = _of_logits(0, logits_NV, token_N, temperature, entropies, support, also, logprob)
    return Forward(logp_N, entropy_N, also_NM=also_NM)


def _of_logits(
    start: int,
    logits_nV: Tensor,
    token_n: Tensor,
    temperature: float,
    entropies: Entropies,
    support: Support | None,
    also: OfLogits | None,
    logprob: Callable[[Tensor, Tensor, float], Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What is asked for of the logits of the response tokens from number ``start`` on."""
    if support is not None:
        kept_nV = support.mask(start, start + len(token_n), logits_nV.shape[1], logits_nV.device)
        logits_nV = truncated(logits_nV, kept_nV)
    logp_n = logprob(logits_nV, token_n, temperature)
    also_nM = None if also is None else also(start, logits_nV)
    if not entropies:
        return logp_n, None, also_nM
    watched_nV = logits_nV if entropies == "differentiable" else logits_nV.detach()
    some = watched_nV.split(max(1, _ENTROPY_AT_ONCE // logits_nV.shape[1]))
    return logp_n, torch.cat([entropy(logits, temperature) for logits in some]), also_nM


def _head(
    weight_VE: Tensor,
    kernels: Kernels,
    hidden_NE: Tensor,
    token_N: Tensor,
    temperature: float,
    entropies: Entropies,
    look: OnLogits | None,
    support: Support | None = None,
    also: OfLogits | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-prob of each token after its hidden state, the entropy there and more where asked for; ``Forward``'s."""

    shown: set[int] = set()  # a backward pass computes a part once more

    def part(start: int, hidden_nE: Tensor, token_n: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logits_nV = kernels.logits(hidden_nE, weight_VE)
        if look is not None and start not in shown:
            shown.add(start)
            look(start, logits_nV.detach())
        return _of_logits(start, logits_nV, token_n, temperature, entropies, support, also, kernels.token_logprob)

    parts = -(-len(token_N) * len(weight_VE) // _LOGITS_AT_ONCE)
    if parts <= 1 or isinstance(kernels, Traced):  # who takes notes sees each operation once
        return part(0, hidden_NE, token_N)
    done, start = [], 0
    for hidden_nE, token_n in zip(hidden_NE.tensor_split(parts), token_N.tensor_split(parts), strict=True):
        done.append(checkpoint(part, start, hidden_nE, token_n, use_reentrant=False, preserve_rng_state=False))
        start += len(token_n)
    logp, entropy_, numbers = zip(*done, strict=True)
    return torch.cat(logp), torch.cat(entropy_) if entropies else None, torch.cat(numbers) if also else None


def score(
    each: Callable[[Sequences, Tensor], Forward],
    sequences: Sequences,
    micro_batch_tokens: int,
    ranks: Ranks = ALONE,
    *,
    entropies: bool = False,
    exchanges: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every response token; B, R, fp32, 0 at padding, entropy 0 throughout where not asked for.

    ``each``: the forward of a micro-batch, given with its rows. ``micro_batch_tokens``: padded tokens that one holds.
    Ranks share the rows, and all of them get all of it. ``exchanges``: each forward is one with the other ranks, so one
    that has no row left takes part with a row that does not count.
    """
    device = sequences.mask_BR.device
    logp_BR = torch.zeros(sequences.mask_BR.shape, dtype=torch.float32, device=device)
    entropy_BR = torch.zeros_like(logp_BR)
    for rows in sequences.micro_batches(sequences.rows, micro_batch_tokens, ranks):
        if not len(rows):
            if exchanges:
                each(sequences.select(sequences.rows[:1]), rows)
            continue
        part = sequences.select(rows)
        row, column = part.mask_BR.nonzero(as_tuple=True)
        passed = each(part, rows)
        logp_BR[rows[row], column] = passed.logp_N.detach()
        if passed.entropy_N is not None:
            entropy_BR[rows[row], column] = passed.entropy_N
    ranks.join_rows(logp_BR, *([entropy_BR] if entropies else []))
    return logp_BR, entropy_BR


@dataclass(frozen=True)
class Scorer:
    """How one policy that every rank holds whole scores a batch. ``micro_batch_tokens``: as in ``score``."""

    model: Decoder | TransformersPolicy
    kernels: Kernels
    temperature: float
    micro_batch_tokens: int
    ranks: Ranks = ALONE

    def __call__(self, sequences: Sequences) -> Tensor:
        """Log-prob of every response token; B, R, fp32, 0 at padding."""
        with torch.no_grad():
            return score(
                lambda part, _: forward(self.model, self.kernels, part, self.temperature),
                sequences,
                self.micro_batch_tokens,
                self.ranks,
            )[0]


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
    """Flat response tokens to B, R, 0 at padding (or N, M to B, R, M); differentiable."""
    shape = (*mask_BR.shape, *values_N.shape[1:])
    empty_BR = torch.zeros(shape, dtype=values_N.dtype, device=values_N.device)
    return empty_BR.index_put(mask_BR.nonzero(as_tuple=True), values_N)


class ReferencePolicy:
    """A frozen policy, in ``copies``. ``version``: the learner's version that it is of; -1 before the first ``take``.

    ``teacher``: the digest of the weights where it is another model, which it stays; None: it is the policy's copy.
    ``refresh_every``: optimiser steps after which it is taken anew; None: never. ``refreshes``: how often it was.
    ``micro_batch_tokens``: padded tokens that a forward holds.
    """

    def __init__(
        self,
        copies: CopiedPolicy | CopiedTransformers,
        kernels: Kernels,
        *,
        temperature: float,
        micro_batch_tokens: int,
        refresh_every: int | None = None,
        teacher: str | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.kernels, self.refresh_every, self.teacher = kernels, refresh_every, teacher
        self._copies = copies
        self._scorer = Scorer(self._copies.decoder, kernels, temperature, micro_batch_tokens, ranks)
        self.version, self.refreshes = -1, 0

    def take(self, masters: Mapping[str, Tensor], version: int) -> None:
        """Become a copy of the policy with these fp32 masters, rounded or quantised once.

        A master that the format cannot hold is an error: comparing with such a policy would compare with nothing.
        """
        self.version = -1  # until every tensor is there: half a copy is nobody's policy
        self._copies.take(masters)
        self.version = version

    def follow(self, masters: Mapping[str, Tensor], version: int) -> bool:
        """Be taken anew where ``refresh_every`` updates have passed since the last time; whether it was."""
        if self.refresh_every is None or version - self.version < self.refresh_every:
            return False
        self.take(masters, version)
        self.refreshes += 1
        return True

    def score(self, sequences: Sequences) -> Tensor:
        """Log-prob of every response token under the reference; B, R, fp32, 0 at padding."""
        if self.version < 0:
            raise RuntimeError("the reference holds no weights yet: take it first")
        return self._scorer(sequences)

    def logits(self, sequences: Sequences) -> Callable[[int, int], Tensor]:
        """Its logits after the prefixes of the response tokens from one number to before another; fp32, no gradient.

        Hidden states are computed here, once, and logits whenever they are asked for: a part at a time.
        """
        if self.version < 0:
            raise RuntimeError("the reference holds no weights yet: take it first")
        model, position_N = self._copies.decoder, sequences.response_tokens()[0]
        assert isinstance(model, Decoder)
        packed = Packed.of(sequences)
        with torch.no_grad():
            hidden_ME = packed.hidden(model, self.kernels)
            hidden_NE = F.embedding(packed.packed_BT.flatten()[position_N], hidden_ME)

        def part(start: int, stop: int) -> Tensor:
            with torch.no_grad():
                return self.kernels.logits(hidden_NE[start:stop], model.head_weight)

        return part

    @property
    def weights(self) -> dict[str, Tensor]:
        """The copy, by parameter name, as the kernels hold it."""
        return self._copies.weights

    @property
    def kept(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold of it: the copy; of another model nothing, which is read again."""
        return {} if self.teacher is not None else self.weights

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the tensors are ``kept``."""
        return {"version": self.version, "refreshes": self.refreshes, "teacher": self.teacher}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``state_dict`` and ``kept``, bit for bit."""
        if state.get("teacher") != self.teacher:
            raise MantissaError(
                "algorithm.reference.path is not the model that this run began with: its weights differ; put the "
                "original back to resume, or start a new run"
            )
        if self.teacher is not None:
            return
        version, refreshes = (count(state[name], f"reference's {name}") for name in ("version", "refreshes"))
        self._copies.make_room(tensors)
        load_weights(self.weights, tensors)
        self.version, self.refreshes = version, refreshes
