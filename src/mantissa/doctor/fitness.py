"""Whether a model can be trained in fp16: what of its activations and gradients the format has room for.

fp16 holds 2^-24 to 65,504. The model runs in bf16, which has the same operations in a half and fp32's range, by
transformers' own code: every result that is a bf16 tensor would be an fp16 one, and what the code computes in fp32
(norms, softmax) stays so. What is seen of each, and of the gradient that comes back for it, is its largest value and
how many have which binary exponent. From these follow

    headroom   log2(65504 / largest), in bits: below 0 fp16 has an infinity there
    lost       the share of values other than 0 that fp16 rounds to 0 at a loss scale S: |S x| < 2^-25
    S          the first loss scale: the largest power of two that leaves ``MARGIN`` bits above the largest gradient

The loss is that of a policy gradient with advantages of +1 and -1 by turns over the sequences, -A log p averaged over
the response tokens of a step. An activation's gradient goes with 1 / tokens of a step, a parameter's does not, so
``step_tokens`` moves the first: what was measured on a few hundred tokens says what a step of many thousands loses.

At last one sequence goes forward and backward in fp16 itself at S: whether all is finite there is no estimate.

Legend: T tokens, E binary exponents, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mantissa.base.errors import MantissaError
from mantissa.doctor.dump import Scored
from mantissa.precision import FP16

MARGIN = 3  # bits left above the largest gradient that was seen: the next batch's may be larger
CLOSE = 2.0  # bits of headroom from which on an activation is said to be close
_LOWEST, _HIGHEST = -160, 160  # exponents counted: fp32's and a step's tokens
_MASK = 127 + 100  # bf16's exponent, biased, of values that are an attention mask's: it adds -3e38
_LEAST_SCALE, _MOST_SCALE = 0, 24  # log2: beyond 2^24 nothing that fp16 can hold is won


@dataclass
class Range:
    """The values of some tensors: ``largest`` magnitude, ``count_E`` by the exponent floor(log2 |x|), zeros left out.

    ``infinite``: values that are NaN or infinite even in bf16. ``what``: the operation that made the largest.
    """

    largest: float = 0.0
    what: str = ""
    infinite: int = 0
    count_E: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(_HIGHEST - _LOWEST, dtype=np.int64))

    def see(self, x: Tensor, what: str) -> None:
        """Add a tensor's values, by the bits of bf16: eight of exponent over seven of mantissa."""
        bits = x.detach().bfloat16().contiguous().view(torch.int16).flatten() & 0x7FFF
        count_256 = np.asarray(torch.bincount(bits >> 7, minlength=256).cpu())
        if count_256[-1]:  # minus infinity is a mask's: bf16 itself ends where fp32 does
            self.infinite += int(count_256[-1]) - int((x == -math.inf).sum())
        if count_256[_MASK:].any():
            bits = torch.where(bits >> 7 < _MASK, bits, 0)
        most = float(bits.max().view(torch.bfloat16)) if len(bits) else 0.0
        if most > self.largest:
            self.largest, self.what = most, what
        self.count_E[1 - 127 - _LOWEST : _MASK - 127 - _LOWEST] += count_256[1:_MASK]  # 0: zeros and below 2^-126

    def scaled(self, exponent: int) -> Range:
        """The same values times 2^``exponent``."""
        moved = np.zeros_like(self.count_E)
        low, high = max(0, exponent), min(len(moved), len(moved) + exponent)
        moved[low:high] = self.count_E[low - exponent : high - exponent]
        return replace(self, largest=math.ldexp(self.largest, exponent), count_E=moved)

    @property
    def headroom(self) -> float:
        """Bits between the largest value and fp16's; infinite where no value is but 0."""
        if self.infinite:
            return -math.inf
        return math.log2(FP16.largest / self.largest) if self.largest else math.inf

    @property
    def lost(self) -> float:
        """The share of values that fp16 rounds to 0."""
        total = int(self.count_E.sum())
        return float(self.count_E[: -25 - _LOWEST].sum()) / total if total else 0.0


@dataclass
class Place:
    """One module: what it makes, and the gradients that come back for it; and for its own parameters."""

    activations: Range = field(default_factory=Range)
    gradients: Range = field(default_factory=Range)
    parameters: Range = field(default_factory=Range)

    def at(self, exponent: int, moved: int) -> Range:
        """Its gradients at a loss scale of 2^``exponent``, those of activations another 2^``moved``."""
        one, other = self.gradients.scaled(exponent + moved), self.parameters.scaled(exponent)
        more = one if one.largest >= other.largest else other
        return replace(more, count_E=one.count_E + other.count_E, infinite=one.infinite + other.infinite)


@dataclass(frozen=True)
class Fitness:
    """``places`` by module. ``tokens``: response tokens measured. ``step_tokens``: of a training step. ``weights``: of
    all parameters. ``scale``: log2 of the first loss scale. ``tried``: what fp16 itself gave at it, or ""."""

    places: dict[str, Place]
    weights: Range
    tokens: int
    step_tokens: int
    scale: int
    tried: str = ""

    @property
    def moved(self) -> int:
        """log2 of how much smaller an activation's gradient is in a training step than as measured, rounded."""
        return round(math.log2(self.tokens / self.step_tokens))

    @property
    def fits(self) -> bool:
        """Whether fp16 has room for all that was seen, and what ran in fp16 was finite."""
        made = [place.activations for place in self.places.values()]
        returned = [place.at(self.scale, self.moved) for place in self.places.values()]
        return all(each.headroom >= 0 for each in (self.weights, *made, *returned)) and not self.tried

    def beyond(self, bits: float) -> list[str]:
        """The modules whose activations have less than so many bits of headroom, the least first."""
        named = sorted((place.activations.headroom, name) for name, place in self.places.items())
        return [name for headroom, name in named if headroom < bits]

    def largest_gradient(self, exponent: int) -> float:
        """At a loss scale of 2^``exponent``."""
        return max((place.at(exponent, self.moved).largest for place in self.places.values()), default=0.0)

    def steepest(self, exponent: int) -> str:
        """The module that has it, and of what it is; "" where no gradient came back."""
        most = max(self.places, key=lambda name: self.places[name].at(exponent, self.moved).largest, default="")
        what = self.places[most].at(exponent, self.moved).what if most else ""
        return f"{most} ({what})" if what else ""

    def lost(self, exponent: int) -> float:
        """The share of all gradients' values that fp16 rounds to 0 at this scale."""
        total = sum((place.at(exponent, self.moved).count_E for place in self.places.values()), Range().count_E)
        return Range(count_E=total).lost

    def kinds(self) -> list[tuple[str, str, Place]]:
        """(a module's name with N for numbers, the one of them whose activation is largest, what is known of it)."""
        found: dict[str, tuple[float, str]] = {}
        for name, place in self.places.items():
            kind = re.sub(r"\b\d+\b", "N", name)
            found[kind] = min(found.get(kind, (math.inf, name)), (place.activations.headroom, name))
        return [(kind, name, self.places[name]) for kind, (_, name) in sorted(found.items(), key=lambda each: each[1])]


class _Seen(TorchFunctionMode):
    """Looks at every result in a half that a gradient goes back to, and at that gradient, by the module at work."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.places: dict[str, Place] = {}
        self.names = {id(module): name for name, module in model.named_modules()}
        self.stack = [""]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor) or out.dtype != torch.bfloat16 or not out.requires_grad:
            return out
        what = getattr(func, "__name__", "").strip("_")
        if any(isinstance(x, Tensor) and x is not out and _same_memory(x, out) for x in args):
            return out  # a view: what it shows was seen where it was made. In place, the result is the argument itself
        place = self.place(self.stack[-1])
        place.activations.see(out, what)
        out.register_hook(lambda gradient: place.gradients.see(gradient, f"of {what}"))
        return out

    def place(self, name: str) -> Place:
        return self.places.setdefault(name, Place())

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Within this, it knows which module is at work."""

        def enter(module: nn.Module, args: Any) -> None:
            self.stack.append(self.names.get(id(module), self.stack[-1]))

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            self.stack.pop()

        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def fitness(
    model: Any,
    sequences: Sequence[Scored],
    *,
    step_tokens: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Fitness:
    """What fp16 has room for in ``model``, a causal language model of transformers in fp32, on these sequences.

    ``step_tokens``: response tokens that a training step averages over; as many as measured where not given. The model
    is left as it is. ``MantissaError``: no response tokens.
    """
    if not (tokens := sum(map(_responses, sequences))):
        raise MantissaError("no response token to take a gradient of; give other prompts, or more tokens")
    half = copy.deepcopy(model).to(torch.bfloat16).requires_grad_(True)
    seen = _Seen(half)
    for number, each in enumerate(sequences, start=1):
        say(f"sequence {number} of {len(sequences)} forward and backward")
        with seen.of(half):
            loss = _loss(half, each, 1 - 2 * (number % 2), tokens)
        loss.backward()
    for name, parameter in half.named_parameters():
        if parameter.grad is not None:
            seen.place(name.rpartition(".")[0]).parameters.see(parameter.grad, f"of its {name.rpartition('.')[2]}")
    weights = Range()
    for name, parameter in model.named_parameters():
        weights.see(parameter, name)
    found = Fitness(seen.places, weights, tokens, step_tokens or tokens, 0)
    most = found.largest_gradient(0)
    wanted = math.floor(math.log2(FP16.largest / most)) - MARGIN if most else _MOST_SCALE
    found = replace(found, scale=max(_LEAST_SCALE, min(wanted, _MOST_SCALE)))
    say("one sequence in fp16")
    return replace(found, tried=_tried(half, max(sequences, key=_responses), found))


def _responses(each: Scored) -> int:
    return len(each.tokens) - each.prompt_length


def _loss(model: Any, each: Scored, advantage: int, tokens: int) -> Tensor:
    """-A log p over a sequence's response, divided by the tokens of all."""
    device = next(model.parameters()).device
    token_T = torch.as_tensor(each.tokens, device=device)
    given = {"input_ids": token_T.unsqueeze(0), "attention_mask": torch.ones_like(token_T).unsqueeze(0)}
    logits_TV = model(**given, use_cache=False).logits[0, each.prompt_length - 1 : -1].float()
    logp_T = logits_TV.log_softmax(-1).gather(-1, token_T[each.prompt_length :].unsqueeze(-1))
    return -advantage * logp_T.sum() / tokens


def _tried(half: Any, each: Scored, found: Fitness) -> str:
    """What is not finite when a sequence goes forward and backward in fp16 at the scale found; "" where all is."""
    half.zero_grad(set_to_none=True)
    half.to(torch.float16)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in half.parameters()):
        return "a weight"
    loss = _loss(half, each, 1, found.step_tokens)
    if not bool(torch.isfinite(loss)):
        return "the log-probs"
    (loss * 2.0**found.scale).backward()
    grads = [(name, parameter.grad) for name, parameter in half.named_parameters() if parameter.grad is not None]
    bad = [name for name, grad in grads if not bool(torch.isfinite(grad).all())]
    return f"the gradient of {bad[0]}" if bad else ""
