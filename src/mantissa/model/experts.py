"""A feed-forward block that is a mixture of experts, as Qwen2-MoE and Qwen3-MoE define it.

    p = softmax(W_router x)                            fp32, over X experts
    E = the K experts of the largest p
    w = p[E], divided by its sum where the model says so (``norm_topk_prob``)
    y = sum over e in E, by number: round(w_e * expert_e(x)), each sum rounded
        + round(sigmoid(w_shared x) * shared(x))       Qwen2-MoE alone

The router's product takes operands of the format and keeps its fp32 sum, and softmax and weights are fp32: what
Megatron and verl call a router in fp32. Its weight is never quantised to 8 bits or fewer.

Which experts a position takes is a jump: a difference in the last bit between two engines can send a token through
another network. So how they are chosen is an argument, a ``Route``: the largest (the block's ``own``); those that
another engine took (``Replayed``); and a rollout notes what it took (``Recorded``).

Every position's sum is of its own experts, ascending by number, so it depends on nothing else: with exact kernels a
mixture is as exact as a dense block. Where there is a gradient, experts that no position chose take part with no row:
their gradient is then zero and not missing, on every rank and in every split into micro-batches.

Legend: N positions (any leading shape, flattened), E hidden size, X experts, K chosen ones, M = N * K rows, one for
each position and chosen expert, expert after expert; L mixtures of the model.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.kernels import Kernels, Traced

Replay = Literal["ids", "weights"]


class Routing(NamedTuple):
    """The experts of each position (int64) and their weights (fp32), the most probable first; both N,K."""

    experts_NK: Tensor
    weights_NK: Tensor


class Choice(Protocol):
    """What a ``Route`` is told of a block: its own choice, and the weights that it gives to any other."""

    def own(self, probs_NX: Tensor) -> Routing: ...

    def weigh(self, probs_NX: Tensor, experts_NK: Tensor) -> Tensor: ...


class Route(Protocol):
    """Which experts the positions of a forward take in mixture ``number`` (from 0, of the model's mixtures)."""

    def __call__(self, number: int, block: Choice, probs_NX: Tensor) -> Routing: ...


class Router(nn.Module):
    """A linear map without bias that chooses or gates; unlike a projection it is never quantised nor adapted."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))


class Mixture:
    """The arithmetic of a mixture: a block's numbers, without its weights."""

    def __init__(self, per_token: int, normalised: bool) -> None:
        self.per_token, self.normalised = per_token, normalised

    def own(self, probs_NX: Tensor) -> Routing:
        """The experts of the largest probabilities."""
        experts_NK = torch.topk(probs_NX.detach(), self.per_token, dim=-1).indices
        return Routing(experts_NK, self.weigh(probs_NX, experts_NK))

    def weigh(self, probs_NX: Tensor, experts_NK: Tensor) -> Tensor:
        """The weights of these experts, differentiable."""
        weights_NK = probs_NX.gather(-1, experts_NK)
        return weights_NK / weights_NK.sum(-1, keepdim=True) if self.normalised else weights_NK


def mixed(x_NE: Tensor, routing: Routing, experts: nn.ModuleList, kernels: Kernels) -> Tensor:
    """The weighted sum of each position's experts, N,E."""
    experts_NK, order_NK = routing.experts_NK.sort(-1)
    weights_NK = routing.weights_NK.gather(-1, order_NK)
    chosen_M = experts_NK.flatten()
    row_M = chosen_M.argsort(stable=True)
    counts = torch.bincount(chosen_M, minlength=len(experts)).tolist()
    x_ME = F.embedding(row_M // experts_NK.shape[1], x_NE)
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in experts.parameters())
    given = [expert(x, kernels) for expert, x in zip(experts, x_ME.split(counts), strict=True) if len(x) or trains]
    out_NKE = F.embedding(row_M.argsort().view(experts_NK.shape), torch.cat(given))
    total_NE = kernels.scale(out_NKE[:, 0], weights_NK[:, 0])
    for k in range(1, experts_NK.shape[1]):
        total_NE = kernels.add(total_NE, kernels.scale(out_NKE[:, k], weights_NK[:, k]))
    return total_NE


class Recorded:
    """Notes the block's own choice. ``with_weights``: their weights too.

    ``take`` gives and forgets: experts as int16, and weights as fp32 or None, both N,L,K on the CPU.
    """

    def __init__(self, with_weights: bool) -> None:
        self._with_weights = with_weights
        self._seen: list[Routing] = []

    def __call__(self, number: int, block: Choice, probs_NX: Tensor) -> Routing:
        routing = block.own(probs_NX)
        self._seen.append(routing)
        return routing

    def take(self) -> tuple[Tensor, Tensor | None]:
        seen, self._seen = self._seen, []
        experts_NLK = torch.stack([routing.experts_NK.to(torch.int16) for routing in seen], 1).cpu()
        if not self._with_weights:
            return experts_NLK, None
        return experts_NLK, torch.stack([routing.weights_NK for routing in seen], 1).cpu()


class Replayed:
    """Takes the experts that another engine took, and counts where the block's own would have been others.

    ``experts_NLK``: int16; -1 at positions where it took none, whose experts are the block's own. ``weights_NLK``: its
    weights too, or None: then the block's own of those experts. Replayed weights have the recorded values and the
    gradient of the block's own. ``only_count``: take the block's own.

    ``flips``, ``choices``: how many of all choices (a position in a mixture) are of another set of experts.
    """

    def __init__(self, experts_NLK: Tensor, weights_NLK: Tensor | None, only_count: bool = False) -> None:
        self._experts, self._weights, self._only_count = experts_NLK, weights_NLK, only_count
        self.flips = torch.zeros((), dtype=torch.int64, device=experts_NLK.device)
        self.choices = 0
        self._known_N1 = experts_NLK[:, 0, :1] >= 0
        self._known = int(self._known_N1.sum())

    def __call__(self, number: int, block: Choice, probs_NX: Tensor) -> Routing:
        own = block.own(probs_NX)
        experts_NK = torch.where(self._known_N1, self._experts[:, number].to(torch.int64), own.experts_NK)
        others_N = (own.experts_NK.sort(-1).values != experts_NK.sort(-1).values).any(-1)
        self.flips, self.choices = self.flips + others_N.sum(), self.choices + self._known
        if self._only_count:
            return own
        weights_NK = block.weigh(probs_NX, experts_NK)
        if self._weights is not None:
            recorded_NK = self._weights[:, number] + (weights_NK - weights_NK.detach())
            weights_NK = torch.where(self._known_N1, recorded_NK, weights_NK)
        return Routing(experts_NK, weights_NK)


def quiet(kernels: Kernels) -> Kernels:
    """The family itself where it is watched: what an expert gives belongs to no position's place in a batch."""
    return kernels.unwatched if isinstance(kernels, Traced) else kernels
