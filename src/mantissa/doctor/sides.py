"""How one side of a dump computes its log-probs, as a value; and the log-probs that it would give the dump's tokens.

A side is a forward (format, cache, an engine's habits, weights) and what is made of its logits (their format,
temperature, support). Sides that share the forward are scored together: a temperature costs a softmax and no model.
Scores are kept, so that a side that is asked for again costs nothing.

Weights are fp32 masters, rounded where they are used, as in a learner: the values are those of a rollout's copy. One
model is held, and while another version of its weights is looked at, those too.

Legend: B sequences, T positions, N compared response tokens of all sequences, E features, V words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mantissa.adopted.altered import Altered
from mantissa.base.errors import MantissaError
from mantissa.doctor.dump import Scored
from mantissa.doctor.habits import ALL as HABITS
from mantissa.doctor.habits import Habit, habits
from mantissa.kernels import EmulatedKernels, Emulation, Kernels, learner_kernels, resolve
from mantissa.kernels.emulated import SPLITS
from mantissa.model import Decoder, ModelConfig
from mantissa.model.decoder import Attend
from mantissa.precision import (
    BF16,
    E4M3,
    Fp8Policy,
    NumberFormat,
    PrecisionPolicy,
    format_named,
    round_cached,
    round_to_format,
)
from mantissa.rollout import SamplingParams
from mantissa.rollout.sampling import filter_logits
from mantissa.rollout.transformers import positions_of

Array = NDArray[np.float64]
Weights = Mapping[str, Tensor]  # fp32 masters by name; may read each as it is asked for
MICRO_BATCH = 4096  # padded tokens of one forward: each rounds all weights once more
_HEAD_ROWS = 128  # logits at a time: 25 MB at 49,152 words
_TRIED = 16  # tokens of a forward that finds the products with weights
_SPLIT = ("products", "split")
_ATTENTION = "_attn_implementation_internal"  # of transformers' configurations


class Fed(StrEnum):
    """What was fed in place of a prompt: its ``OWN``, or what its words say (``fed``)."""

    OWN = ""
    NO_FIRST = "without its first token"
    FIRST_TWICE = "with its first token twice"
    NO_FIRST_HALF = "without its first half"
    PADDED = "padded on the left without a mask"


class Cache(StrEnum):
    """What keys and values are rounded to: no further (``OWN``), a half, or fp8 with a scale for each vector
    (``FP8``), with none, or so and ``CUT_OFF``, towards zero in place of the nearest."""

    OWN = ""
    BF16 = "bf16"
    FP8 = "fp8"
    UNSCALED = "fp8 of scale 1"
    CUT_OFF = "fp8 of scale 1, cut off"


class Softmax(StrEnum):
    """Of half logits: ``FP32`` throughout, ``DIVIDED`` by the temperature in the half, with a log-sum-exp (``LSE``)
    that is rounded to it, or with the log-prob itself (``HALF``)."""

    FP32 = "fp32"
    DIVIDED = "divided"
    LSE = "lse"
    HALF = "half"


@dataclass(frozen=True)
class Side:
    """What computes one side's log-probs.

    ``format``: fp32, bf16, fp16, or fp8 with ``base`` between its products. ``exclude``: projections that stay in the
    base, as in ``precision.fp8``. ``logits``: their format. ``cache``: what keys and values are rounded to.
    ``habits``: of a serving engine, switches of ``Emulation`` with their
    values. ``temperature``, ``top_k``, ``top_p``: of the distribution that the log-probs are of; ``kept``: of the
    tokens alone that the dump says were kept. ``cap``: logits are cap * tanh(logits / cap), 0: as they are.
    ``weights``: which version, ``""`` the declared one. ``layer``: the one layer whose weights are of that version;
    None: all. ``prompt``: what it was computed with. ``moved``: added to the positions
    of responses. ``theta``: factor of the rotary base. ``eager``: attention by transformers' plain products.
    """

    format: str = "fp32"
    base: str = "bf16"
    exclude: tuple[str, ...] = ()
    logits: str = "fp32"
    cache: Cache = Cache.OWN
    habits: frozenset[tuple[str, str | int]] = frozenset()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    kept: bool = False
    cap: float = 0.0
    weights: str = ""
    layer: int | None = None
    prompt: Fed = Fed.OWN
    moved: int = 0
    theta: float = 1.0
    eager: bool = False
    softmax: Softmax = Softmax.FP32

    def __str__(self) -> str:
        """In a few words."""
        said = [self.format, f"logits {self.logits}"]
        said += [f"cache {self.cache}"] * bool(self.cache)
        said += [f"temperature {self.temperature:g}"] * (self.temperature != 1) + ["of the kept tokens"] * self.kept
        said += [f"top-k {self.top_k}"] * bool(self.top_k) + [f"top-p {self.top_p:g}"] * (self.top_p < 1)
        said += [f"logits soft-capped at {self.cap:g}"] * bool(self.cap)
        said += [f"weights of {self.weights}"] * bool(self.weights) + [f"prompt {self.prompt}"] * bool(self.prompt)
        said += ["attention eager"] * self.eager + [f"softmax {self.softmax}"] * (self.softmax is not Softmax.FP32)
        return ", ".join(said + [f"{name}={value}" for name, value in sorted(self.habits)])

    @property
    def forward(self) -> Side:
        """The part that the hidden states depend on."""
        return replace(
            self, logits="fp32", temperature=1.0, top_k=0, top_p=1.0, kept=False, cap=0.0, softmax=Softmax.FP32
        )

    @property
    def half(self) -> NumberFormat:
        """What a half format is here: its own, or bf16 beside fp8."""
        return format_named(self.base if self.format == "fp8" else self.format)

    @property
    def fp8(self) -> Fp8Policy | None:
        """Which products have fp8 operands; None in another format."""
        if self.format != "fp8":
            return None
        return Fp8Policy(base="fp16" if self.base == "fp16" else "bf16", exclude=self.exclude)

    def kernels(self, device: torch.device | str) -> Kernels:
        """A learner's kernels in this side's formats (weights given are masters), with its habits."""
        # On a CPU simulated, whatever this one multiplies itself: layers of two sides are put together in fp32 tensors.
        here = torch.device(device).type == "cpu" and self.format != "fp32"
        policy = PrecisionPolicy(
            train=self.format,
            rollout=self.format,
            logits=self.logits,
            fp8=self.fp8,
            backend="simulated" if here else "auto",
        )
        resolved = resolve(policy, device)
        emulated = self.habits - set(HABITS)
        if not emulated:
            return learner_kernels(resolved)
        role, logits = resolved.learner, resolved.logits.active
        return EmulatedKernels(role.active, Emulation(**dict(emulated)), logits, fp8=role.fp8)


def cached(x: Tensor, kind: Cache) -> Tensor:
    """Keys or values (..., D) as a cache of ``kind`` gives them back."""
    if kind == Cache.OWN:
        return x
    if kind in (Cache.FP8, Cache.BF16):
        return round_cached(x, E4M3 if kind == Cache.FP8 else BF16)
    if kind == Cache.UNSCALED:
        return round_to_format(x, E4M3)
    bounded = x.float().clamp(-E4M3.largest, E4M3.largest)
    smallest = E4M3.smallest_subnormal
    cut = (bounded.view(torch.int32) & -(1 << 20)).view(torch.float32)  # sign, exponent and three bits are kept
    below = (bounded / smallest).trunc() * smallest
    return torch.where(bounded.abs() < E4M3.smallest_normal, below, cut).to(x.dtype)


def fed(kind: Fed, prompt: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    """What a side of ``kind`` was given for a prompt; ``longest``: of the dump's. A prompt never vanishes."""
    if kind is Fed.FIRST_TWICE:
        return np.concatenate([prompt[:1], prompt])
    if kind is Fed.PADDED:
        return np.concatenate([np.zeros(longest - len(prompt), np.int64), prompt])
    start = {Fed.NO_FIRST: 1, Fed.NO_FIRST_HALF: len(prompt) // 2}.get(kind, 0)
    return prompt[start:] if len(prompt) > start else prompt


def attention(kernels: Kernels, side: Side) -> Attend:
    """How a side's positions see others: whole sequences at once, keys and values as its cache gives them back."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.causal_attention(q, cached(k, side.cache), cached(v, side.cache))

    return attend


@dataclass(frozen=True)
class Batch:
    """Sequences of one forward. ``row_N``, ``column_N``: where each compared token stands; ``places``: its number."""

    tokens_BT: Tensor
    positions_BT: Tensor
    row_N: Tensor
    column_N: Tensor
    places: NDArray[np.int64]

    @property
    def tokens(self) -> Tensor:
        """The compared tokens, N."""
        return self.tokens_BT[self.row_N, self.column_N]

    def before(self, x_BTE: Tensor) -> Tensor:
        """What stands at the position that predicts each compared token; N,E."""
        return x_BTE[self.row_N, self.column_N - 1]


class AnyModel:
    """A causal language model of transformers, by its own code, in the place of our decoder.

    Its head is its own, so what stands for a final hidden state is the logits there, in the format of the forward.
    """

    lora = None

    def __init__(self, model: Any) -> None:
        self.model, text = model, model.config.get_text_config()
        self.config = AnyShape(
            text.vocab_size, positions_of(model), text.num_hidden_layers, text.num_attention_heads,
            getattr(text, "intermediate_size", None) or 1, model.config,
        )  # fmt: skip

    def parameters(self) -> Iterator[Tensor]:
        """Its weights: fp32 masters."""
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """By transformers' names."""
        return self.model.named_parameters()

    @cached_property
    def projections(self) -> list[str]:
        """The names of what fp8 would quantise: seen in products inside the decoder's layers."""
        if not any("layers" in name.split(".") for name, _ in self.named_parameters()):
            return []
        altered = Altered(self.model, BF16, Fp8Policy())
        tokens_1T = torch.arange(_TRIED, device=next(self.parameters()).device).unsqueeze(0) % self.config.vocab_size
        with torch.no_grad(), altered:
            self.model(input_ids=tokens_1T, use_cache=False)
        return [name for name in altered.names.values() if name in altered.quantized]

    @cached_property
    def habits(self) -> frozenset[Habit]:
        """Those of ``habits.py`` that its code can take on, and that change something: tried in bf16 on few tokens."""
        tokens_1T = torch.arange(_TRIED, device=next(self.parameters()).device).unsqueeze(0) % self.config.vocab_size
        places_1T, found = torch.arange(_TRIED, device=tokens_1T.device).unsqueeze(0), set[Habit]()
        with torch.no_grad():
            plain = self.logits_of(tokens_1T, places_1T, Side("bf16"), BF16)
            for habit in HABITS:
                with contextlib.suppress(RuntimeError):  # torch's, where this family's code mixes no dtypes
                    side = Side("bf16", habits=frozenset({habit}))
                    if not torch.equal(self.logits_of(tokens_1T, places_1T, side, BF16), plain):
                        found.add(habit)
        return frozenset(found)

    @property
    def ends(self) -> tuple[str, str]:
        """The names of its embedding and of its output projection."""
        names = {id(module): name for name, module in self.model.named_modules()}
        return names[id(self.model.get_input_embeddings())], names[id(self.model.get_output_embeddings())]

    def logits_of(self, tokens_BT: Tensor, positions_BT: Tensor, side: Side, fmt: NumberFormat) -> Tensor:
        """Its logits as ``side`` computes them, its weights cast to ``fmt`` where they are used; B,T,V, fp32."""
        given = {"input_ids": tokens_BT, "attention_mask": torch.ones_like(tokens_BT), "position_ids": positions_BT}
        with self.computing(side, fmt):
            return self.model(**given, use_cache=False).logits.float()

    @contextmanager
    def computing(self, side: Side, fmt: NumberFormat) -> Iterator[None]:
        """Within this, what is called of it computes as ``side`` does."""
        altered = Altered(self.model, fmt, side.fp8, SPLITS if _SPLIT in side.habits else 1)
        attention = _eager(self.model) if side.eager else contextlib.nullcontext()
        with attention, habits(self.model, side.habits, altered), altered:
            yield

    @property
    def layers(self) -> list[Any]:
        """Its decoder layers. ``MantissaError``: none are a list as long as its configuration says."""
        count = self.config.num_hidden_layers
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if not lists:
            raise MantissaError(f"--by-layer: {type(self.model).__name__} has no list of {count} layers; leave it out")
        return list(lists[0])

    def computes(self, side: Side) -> bool:
        """Whether transformers' own code can be made to compute so."""
        if side.format == "fp8" and not self.projections:
            return False
        known = side.format in ("fp32", "bf16", "fp16", "fp8") and not side.cache and side.theta == 1
        own = side.habits - {_SPLIT}
        return known and (not own or (side.format != "fp32" and own <= self.habits))

    def logits(self, logits_NV: Tensor, kernels: Kernels) -> Tensor:
        """In the format that ``kernels`` has for them."""
        return round_to_format(logits_NV, kernels.logits_format)


@dataclass(frozen=True)
class AnyShape:
    """What is asked of such a model's configuration, and the configuration."""

    vocab_size: int
    max_position_embeddings: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    text_config: Any


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Within this the model's attention is transformers' plain products, whatever it is else."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), _ATTENTION)}
    before = [(config, getattr(config, _ATTENTION)) for config in configs.values()]
    for config, _ in before:
        setattr(config, _ATTENTION, "eager")
    try:
        yield
    finally:
        for config, name in before:
            setattr(config, _ATTENTION, name)


class Scores:
    """Log-probs of a dump's compared tokens under any side.

    ``versions``: other weights by name, beside the model's own. ``tick`` is called with a line for each forward of the
    dump. A token counts where both log-probs are finite and its mask says so; sequences without one are left out.
    """

    def __init__(
        self,
        model: Decoder | AnyModel,
        sequences: Sequence[Scored],
        versions: Mapping[str, Weights] | None = None,
        tick: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.versions, self.tick = model, dict(versions or {}), tick
        self.device = next(iter(model.parameters())).device
        # Of another's model all logits are kept, not hidden states.
        self._at_once = MICRO_BATCH // 4 if isinstance(model, AnyModel) else MICRO_BATCH
        counted = [(each, _counts(number, each)) for number, each in enumerate(sequences)]
        self.sequences = [each for each, counts in counted if counts.any()]
        if not self.sequences:
            raise MantissaError("the dump has no token with a finite log-prob on both sides: nothing can be compared")
        self._counts = [counts for _, counts in counted if counts.any()]
        self._check()
        self.of_sequence = np.repeat(np.arange(len(self.sequences)), [int(c.sum()) for c in self._counts])
        self.positions = np.concatenate(
            [s.prompt_length + c.nonzero()[0] for s, c in zip(self.sequences, self._counts, strict=True)]
        )
        self.rollout, self.learner = (
            np.concatenate([getattr(s, f"{side}_logp")[c] for s, c in zip(self.sequences, self._counts, strict=True)])
            for side in ("rollout", "learner")
        )
        kept = [
            None if s.kept is None else s.kept[place]
            for s, c in zip(self.sequences, self._counts, strict=True) for place in c.nonzero()[0].tolist()
        ]  # fmt: skip
        self.kept = [None if ids is None else torch.from_numpy(ids) for ids in kept]
        self._known: dict[Side, Array] = {}

    def _check(self) -> None:
        config = self.model.config
        for number, each in enumerate(self.sequences):
            ids = np.concatenate([each.tokens, *(kept for kept in each.kept or () if kept is not None)])
            low, high, length = int(ids.min()), int(ids.max()), len(each.tokens)
            if low < 0 or high >= config.vocab_size:
                raise MantissaError(
                    f"sequence {number} holds token {low if low < 0 else high}, and the model knows 0 to "
                    f"{config.vocab_size - 1}: the dump is of another model; give the one that made it"
                )
            if length > config.max_position_embeddings or each.prompt_length < 1:
                raise MantissaError(
                    f"sequence {number} has {length} tokens after a prompt of {each.prompt_length}; the model takes 1 "
                    f"prompt token or more and {config.max_position_embeddings} in all"
                )

    @property
    def decoder(self) -> Decoder:
        """The model, for what follows our own decoder's layers."""
        assert isinstance(self.model, Decoder)
        return self.model

    @property
    def d(self) -> Array:
        """logp_learner - logp_rollout of each compared token, as the dump has them."""
        return self.learner - self.rollout

    def __call__(self, side: Side) -> Array:
        """float64 [N]; not finite where ``side`` gives a token probability 0."""
        return self.all([side])[0]

    def all(self, sides: Sequence[Side]) -> list[Array]:
        """Those of several sides, which share the forwards that they can."""
        todo: dict[Side, list[Side]] = {}
        for side in dict.fromkeys(sides):
            if side not in self._known:
                todo.setdefault(side.forward, []).append(side)
        for number, (forward, heads) in enumerate(todo.items(), start=1):
            self.tick(f"scoring {number} of {len(todo)}")
            with torch.no_grad(), self.weights_of(forward):
                self._known.update(self._scored(forward, heads))
        return [self._known[side] for side in sides]

    def _scored(self, forward: Side, heads: Sequence[Side]) -> dict[Side, Array]:
        kernels = forward.kernels(self.device)
        of_head = {head: head.kernels(self.device) for head in heads}
        found = {head: np.zeros(len(self.of_sequence)) for head in heads}
        for batch in self.batches(forward):
            hidden_NE = self.before(batch, forward, kernels)
            for head, own in of_head.items():
                found[head][batch.places] = self.logp(own, head, hidden_NE, batch)
        return found

    def before(self, batch: Batch, side: Side, kernels: Kernels) -> Tensor:
        """What the head is given for each of the batch's tokens: final hidden states, N,E."""
        if isinstance(self.model, AnyModel):
            return batch.before(self.model.logits_of(batch.tokens_BT, batch.positions_BT, side, kernels.format))
        attend = attention(kernels, side)
        return batch.before(self.model.hidden(batch.tokens_BT, kernels, batch.positions_BT, attend))

    def computes(self, side: Side) -> bool:
        """Whether this model can be computed so."""
        return (
            self.model.computes(side)
            if isinstance(self.model, AnyModel)
            else not side.eager and side.habits.isdisjoint(HABITS)
        )

    def logp(self, kernels: Kernels, head: Side, hidden_NE: Tensor, batch: Batch) -> Array:
        """Log-prob of each of the batch's tokens after its final hidden state."""
        params = SamplingParams(1, head.temperature, head.top_k, head.top_p)
        found = []
        parts = (each.split(_HEAD_ROWS) for each in (hidden_NE, batch.tokens, torch.from_numpy(batch.places)))
        for hidden, token, places in zip(*parts, strict=True):
            logits = self.model.logits(hidden, kernels)
            if head.cap:
                logits = head.cap * torch.tanh(logits / head.cap)
            logits = filter_logits(logits, params)
            for row, place in enumerate(places.tolist() if head.kept else ()):
                if (ids := self.kept[place]) is not None:
                    cut = torch.ones_like(logits[row], dtype=torch.bool).index_fill(0, ids.to(logits.device), False)
                    logits[row] = logits[row].masked_fill(cut, -torch.inf)
            found.append(_log_prob(logits, token, head, kernels).double().cpu())
        return torch.cat(found).numpy()

    def above(self, side: Side) -> tuple[Array, Array]:
        """Probability of all words that are likelier than each compared token, and the token's own; float64 [N]."""
        above, own = np.zeros(len(self.of_sequence)), np.zeros(len(self.of_sequence))
        kernels = side.kernels(self.device)
        with torch.no_grad(), self.weights_of(side):
            for batch in self.batches(side):
                hidden_NE = self.before(batch, side, kernels)
                parts = (each.split(_HEAD_ROWS) for each in (hidden_NE, batch.tokens, torch.from_numpy(batch.places)))
                for hidden, token, places in zip(*parts, strict=True):
                    law = torch.softmax(self.model.logits(hidden, kernels).double() / side.temperature, -1)
                    p = law.gather(1, token.unsqueeze(1))
                    above[places], own[places] = (law * (law > p)).sum(1).cpu().numpy(), p[:, 0].cpu().numpy()
        return above, own

    def batches(self, side: Side | None = None) -> Iterator[Batch]:
        """Sequences of like length together, ``MICRO_BATCH`` padded tokens at most or one sequence; with the prompts
        and positions of ``side``, its own where none is given."""
        starts = np.concatenate([[0], np.cumsum([int(c.sum()) for c in self._counts])])
        order = sorted(range(len(self.sequences)), key=lambda row: -len(self.sequences[row].tokens))
        start = 0
        while start < len(order):
            count = max(1, self._at_once // len(self.sequences[order[start]].tokens))
            rows = order[start : start + count]
            places = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
            yield self._batch(rows, places, side or Side())
            start += count

    def _batch(self, rows: Sequence[int], places: NDArray[np.int64], side: Side) -> Batch:
        longest = max(each.prompt_length for each in self.sequences)
        given = []
        for row in rows:
            prompt, response = np.split(self.sequences[row].tokens, [self.sequences[row].prompt_length])
            given.append((fed(side.prompt, prompt, longest), response))
        width = max(len(prompt) + len(response) for prompt, response in given)
        tokens_BT = torch.zeros(len(rows), width, dtype=torch.int64)
        positions_BT = torch.arange(width).repeat(len(rows), 1)
        row_N, column_N = [], []
        for place, (row, (prompt, response)) in enumerate(zip(rows, given, strict=True)):
            tokens_BT[place, : len(prompt) + len(response)] = torch.from_numpy(np.concatenate([prompt, response]))
            positions_BT[place, len(prompt) :] += side.moved
            columns = len(prompt) + torch.from_numpy(self._counts[row].nonzero()[0])
            row_N.append(torch.full_like(columns, place))
            column_N.append(columns)
        where = tokens_BT.to(self.device), positions_BT.to(self.device)
        return Batch(*where, torch.cat(row_N), torch.cat(column_N), places)

    @contextmanager
    def weights_of(self, side: Side, prefix: str = "") -> Iterator[None]:
        """The model with the weights of ``side`` in place, as far as their names begin with ``prefix``."""
        kept: dict[str, Tensor] = {}
        parameters, config = dict(self.model.named_parameters()), self.model.config
        layer = "." if side.layer is None else f".layers.{side.layer}."
        try:
            if side.theta != 1:
                assert isinstance(config, ModelConfig)
                self.model.config = replace(config, rope_theta=config.rope_theta * side.theta)
            for name, parameter in parameters.items() if side.weights else ():
                if layer in f".{name}" and name.startswith(prefix):
                    value = self.versions[side.weights][name].to(parameter.device, torch.float32)
                    kept[name], parameter.data = parameter.data, value
            yield
        finally:
            self.model.config = config
            for name, value in kept.items():
                parameters[name].data = value


def _log_prob(logits_NV: Tensor, token_N: Tensor, head: Side, kernels: Kernels) -> Tensor:
    """Of each token, as ``head`` has it; [N]."""
    if head.softmax is Softmax.FP32:
        return kernels.token_logprob(logits_NV, token_N, head.temperature)
    scaled_NV = round_to_format(round_to_format(logits_NV.float(), head.half) / head.temperature, head.half)
    own_N = scaled_NV.gather(1, token_N.unsqueeze(1))[:, 0]
    lse_N = torch.logsumexp(scaled_NV, -1)
    if head.softmax is Softmax.LSE:
        lse_N = round_to_format(lse_N, head.half)
    logp_N = own_N - lse_N
    return round_to_format(logp_N, head.half) if head.softmax is Softmax.HALF else logp_N


def _counts(number: int, each: Scored) -> NDArray[np.bool_]:
    """Which response tokens are compared."""
    response = len(each.tokens) - each.prompt_length
    if not len(each.mask) == len(each.rollout_logp) == len(each.learner_logp) == response:
        raise MantissaError(
            f"sequence {number}: {len(each.tokens)} tokens after a prompt of {each.prompt_length} with "
            f"{len(each.rollout_logp)} and {len(each.learner_logp)} log-probs: expected one a response token"
        )
    finite = np.isfinite(each.rollout_logp) & np.isfinite(each.learner_logp)
    return np.asarray(each.mask, dtype=bool) & finite


def evenly_spaced(sequences: Sequence[Scored], most: int) -> list[Scored]:
    """At most so many sequences, evenly spaced over the dump, of those with a token to compare."""
    useful = [each for number, each in enumerate(sequences) if _counts(number, each).any()]
    if len(useful) <= most:
        return useful
    return [useful[place] for place in np.unique(np.linspace(0, len(useful) - 1, most).round().astype(int))]
