"""Faults of known kind, put into real rollouts: what the doctor is tried on, and never sees.

A ``Bench`` holds a policy, samples with the native engine and scores with the learner's kernels, each side with a
mistake or without. What a fault does to a log-prob is so computed by the model wherever a model can be wrong (another
temperature, top-k, stale or damaged weights, another adapter, a cache in fp8, logits in half, a rounded rotary table,
dropout, another prompt); only what goes wrong after it is done to the arrays (a shift, rows in another order, zeros, an
export in bf16, a router's flips, for which a dense model has no router).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from doctor_strangers import Rolled, cut, dump, plain
from torch import Tensor

from mantissa.doctor.dump import Scored
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.model import Decoder
from mantissa.precision import token_logprob
from mantissa.precision.formats import BF16, E4M3, FP16, FP32, NumberFormat, round_to_format
from mantissa.rl.experience import Sequences
from mantissa.rl.score import forward, score
from mantissa.rollout import NativeEngine, Request, SamplingParams

_MICRO_BATCH = 1024
Weights = Mapping[str, Tensor]


class FaultyKernels(SimulatedKernels):
    """The learner's kernels with a mistake: keys, values or the rotary table on a coarser grid, or dropout left on."""

    kv_format: NumberFormat = FP32
    rope_format: NumberFormat = FP32
    dropout = 0.0

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        if self.kv_format is not FP32:
            k_BKTD, v_BKTD = round_to_format(k_BKTD, self.kv_format), round_to_format(v_BKTD, self.kv_format)
        return super().causal_attention(q_BHTD, k_BKTD, v_BKTD)

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        cos, sin = (round_to_format(each, self.rope_format) for each in (cos_BTD, sin_BTD))
        return super().rotate(x_BHTD, cos, sin)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        out = super().swiglu(gate_NE, up_NE)
        return torch.nn.functional.dropout(out, self.dropout) if self.dropout else out


def faulty(fmt: NumberFormat, logits_format: NumberFormat = FP32, **mistakes: Any) -> FaultyKernels:
    """Kernels in ``fmt`` with these mistakes; none: the learner's own, to the bit."""
    kernels = FaultyKernels(fmt, logits_format)
    for name, value in mistakes.items():
        setattr(kernels, name, value)
    return kernels


class Bench:
    """One policy in one pair of formats."""

    def __init__(self, model: Decoder, prompts: Sequence[Sequence[int]], stop: Sequence[int], max_tokens: int,
                 fmt: NumberFormat = BF16, samples: int = 4) -> None:  # fmt: skip
        self.model, self.fmt, self.samples, self.max_tokens = model, fmt, samples, max_tokens
        self.prompts, self.stop = [list(prompt) for prompt in prompts], tuple(stop)

    def roll(self, weights: Weights | None = None, *, seed: int = 0, kv_format: NumberFormat | None = None,
             logits_format: NumberFormat = FP32, **params: Any) -> Rolled:  # fmt: skip
        """Sample every prompt ``samples`` times with the engine, with a mistake or none."""
        kernels = SimulatedKernels(self.fmt, logits_format, weights_on_grid=True)
        longest = max(map(len, self.prompts)) + self.max_tokens
        count = len(self.prompts) * self.samples
        engine = NativeEngine(self.model.config, kernels, kv_format=kv_format or self.fmt, slots=min(64, count),
                              max_length=longest)  # fmt: skip
        engine.sync(weights or dict(self.model.named_parameters()), 0)
        requests = [Request(tuple(p), 1000 * seed + n, self.samples) for n, p in enumerate(self.prompts)]
        groups = engine.generate(requests, SamplingParams(self.max_tokens, stop_token_ids=self.stop, **params), 0)
        flat = [(number, each) for number, group in enumerate(groups) for each in group]
        return Rolled(
            [self.prompts[number] for number, _ in flat], [list(each.tokens) for _, each in flat],
            [each.logp_T.double().numpy() for _, each in flat], [number for number, _ in flat],
        )  # fmt: skip

    def score(self, rolled: Rolled, kernels: FaultyKernels | None = None, temperature: float = 1.0, *,
              prompts: Sequence[Sequence[int]] | None = None,
              of: Callable[[Tensor, Tensor], Tensor] | None = None) -> list[np.ndarray]:  # fmt: skip
        """The learner's log-probs of what was sampled. ``of``: log-probs from (logits, tokens) in another way."""
        kernels = kernels or faulty(self.fmt)
        sequences = Sequences.build(prompts or rolled.prompts, rolled.responses, torch.device("cpu"))

        def each(part: Sequences, _: Tensor) -> Any:
            found: list[Tensor] = []
            tokens = part.response_tokens()[1]

            def look(start: int, logits: Tensor) -> None:
                found.append(of(logits, tokens[start : start + len(logits)]))  # type: ignore[misc]

            passed = forward(self.model, kernels, part, temperature, look=look if of else None)
            return replace(passed, logp_N=torch.cat(found)) if of else passed

        with torch.no_grad():
            logp_BR = score(each, sequences, _MICRO_BATCH)[0]
        return [row[: len(r)].double().numpy() for row, r in zip(logp_BR, rolled.responses, strict=True)]


# what can go wrong, by kind

Dumped = list[Scored]
Draw = np.random.Generator


class Pool:
    """The healthy rollouts of a bench and what several faults share, each made once."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self._rolled, self._scored = bench, {}, {}
        self.weights = {name: weight.detach().clone() for name, weight in bench.model.named_parameters()}

    def rolled(self, **how: Any) -> Rolled:
        """Samples of the policy itself, by the engine's settings; without any, the healthy ones."""
        key = repr(sorted(how.items()))
        if key not in self._rolled:
            self._rolled[key] = self.bench.roll(**{"seed": len(self._rolled)} | how)
        return self._rolled[key]

    def healthy(self, **how: Any) -> Dumped:
        key = repr(sorted(how.items()))
        if key not in self._scored:
            self._scored[key] = self.bench.score(self.rolled(**how), temperature=how.get("temperature", 1.0))
        return dump(self.rolled(**how), self._scored[key])

    def other_weights(self, strength: float) -> dict[str, Tensor]:
        """Every matrix moved by ``strength`` of its own standard deviation."""
        draw = torch.Generator().manual_seed(7)
        return {
            name: w + strength * w.std() * torch.randn(w.shape, generator=draw) if w.dim() == 2 else w
            for name, w in self.weights.items()
        }


class Kept(Pool):
    """What a finished run kept, as the healthy dump; for faults of arrays."""

    def __init__(self, dumped: Dumped) -> None:
        self._dumped = dumped

    def healthy(self, **how: Any) -> Dumped:
        return list(self._dumped)


def _both(pool: Pool, change: Callable[[Scored], tuple[np.ndarray, np.ndarray]]) -> Dumped:
    """The healthy dump with another pair of (rollout, learner) in each sequence."""
    made = [(each, *change(each)) for each in pool.healthy()]
    return [replace(each, rollout_logp=x, learner_logp=y) for each, x, y in made]


def _scored(pool: Pool, rolled: Rolled | None = None, **how: Any) -> Dumped:
    """Scored otherwise than it was sampled; by default the healthy samples."""
    rolled = rolled or pool.rolled()
    return dump(rolled, pool.bench.score(rolled, **how))


def _finite(dumped: Dumped) -> Dumped:
    """Tokens that a cut law would never have drawn are not compared."""
    return [replace(each, mask=np.isfinite(each.learner_logp)) for each in dumped]


def _cut(top_k: int = 0, top_p: float = 1.0) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, tokens: plain(cut(logits, top_k, top_p), tokens, tokens)


def _rounded_logits(fmt: NumberFormat) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, tokens: token_logprob(round_to_format(logits, fmt), tokens, 1.0)


def _logits_in(fmt: NumberFormat) -> Callable[[Pool, float, Draw], Dumped]:
    return lambda pool, _, draw: _scored(pool, of=_rounded_logits(fmt))


def _raw(pool: Pool, t: float, draw: Draw) -> Dumped:
    raw = _scored(pool, pool.rolled(temperature=t))
    return [
        replace(each, rollout_logp=each.rollout_logp + one.learner_logp - each.learner_logp)
        for each, one in zip(pool.healthy(temperature=t), raw, strict=True)
    ]


def _shift(pool: Pool, by: float, draw: Draw) -> Dumped:
    """The learner's log-prob of token t + ``by``; at the ends what a neighbour would give."""
    return _both(pool, lambda each: (each.rollout_logp, np.roll(each.learner_logp, -int(by))))


def _rows(pool: Pool, share: float, draw: Draw) -> Dumped:
    dumped = pool.healthy()
    for length in {len(each.mask) for each in dumped}:
        same = [n for n, each in enumerate(dumped) if len(each.mask) == length and draw.random() < share]
        moved = [dumped[n].learner_logp for n in same]
        for n, learner in zip(same, moved[1:] + moved[:1], strict=True):
            dumped[n] = replace(dumped[n], learner_logp=learner)
    return dumped


def _at(place: int, change: Callable[[float], float]) -> Callable[[Scored], tuple[np.ndarray, np.ndarray]]:
    def both(each: Scored) -> tuple[np.ndarray, np.ndarray]:
        learner = each.learner_logp.copy()
        learner[place] = change(learner[place])
        return each.rollout_logp, learner

    return both


def _spans(value: float) -> Callable[[Pool, float, Draw], Dumped]:
    """A stretch of some responses, as of a tool's answer, that the learner does not score."""

    def make(pool: Pool, share: float, draw: Draw) -> Dumped:
        def both(each: Scored) -> tuple[np.ndarray, np.ndarray]:
            learner, count = each.learner_logp.copy(), max(1, len(each.mask) // 3)
            if draw.random() < share:
                start = int(draw.integers(0, len(learner) - count + 1))
                learner[start : start + count] = value
            return each.rollout_logp, learner

        return _both(pool, both)

    return make


def _of_both(function: Callable[[np.ndarray], np.ndarray], rollout: bool = False) -> Callable[..., Dumped]:
    """``function`` of one side's log-probs."""

    def make(pool: Pool, _: float, draw: Draw) -> Dumped:
        return _both(pool, lambda e: (function(e.rollout_logp), e.learner_logp) if rollout
                     else (e.rollout_logp, function(e.learner_logp)))  # fmt: skip

    return make


def _bf16(values: np.ndarray) -> np.ndarray:
    return torch.tensor(values).bfloat16().double().numpy()


def _prompts(change: Callable[[list[int]], list[int]]) -> Callable[[Pool, float, Draw], Dumped]:
    return lambda pool, _, draw: _scored(pool, prompts=[change(prompt) for prompt in pool.rolled().prompts])


def _other_weights(pool: Pool, strength: float, draw: Draw) -> Dumped:
    """The rollout samples with other weights than the learner's."""
    return _scored(pool, pool.bench.roll(pool.other_weights(strength), seed=77))


def _stale(pool: Pool, strength: float, draw: Draw) -> Dumped:
    """Every other prompt was sampled by weights that are two updates older."""
    old, new = _other_weights(pool, strength, draw), pool.healthy()
    return [
        replace(each, rollout_version=4 if each.group % 2 else 6, learner_version=6)
        for each in (*(e for e in old if e.group % 2), *(e for e in new if not e.group % 2))
    ]


def _one_engine(pool: Pool, share: float, draw: Draw) -> Dumped:
    """One engine of several has other weights."""
    other, new = _other_weights(pool, 0.4, draw), pool.healthy()
    bad = draw.random(len(new)) < share
    return [o if b else n for o, n, b in zip(other, new, bad, strict=True)]


def _flips(pool: Pool, share: float, draw: Draw) -> Dumped:
    """At few tokens another network scored: the log-odds moved by a normal of 1.5 nats."""

    def both(each: Scored) -> tuple[np.ndarray, np.ndarray]:
        y = each.learner_logp
        odds = y - np.log(np.maximum(-np.expm1(np.minimum(y, -1e-9)), 1e-9)) + draw.normal(0, 1.5, len(y))
        return each.rollout_logp, np.where(draw.random(len(y)) < share, -np.logaddexp(0, -odds), y)

    return _both(pool, both)


@dataclass(frozen=True)
class Fault:
    """A kind of mistake: ``names``, any of which is right for it, and how it is made at a strength. ``undecided``: the
    numbers cannot tell it from what is no mistake, and saying so is right too.

    ``rolls``: it needs samples of its own, which a large model takes minutes for.
    """

    names: tuple[str, ...]
    strengths: tuple[float, ...]
    make: Callable[[Pool, float, Draw], Dumped]
    rolls: bool = False
    undecided: bool = False

    @property
    def arrays(self) -> bool:
        """Whether it is made of a healthy dump alone, without the model."""
        return not set(self.names) & {"temperature", "support", "half_logits", "nondeterministic", "too_large", "stale",
                                      "some_sequences"}  # fmt: skip


_LARGE = ("too_large", "weights", "prompt", "nondeterministic", "position")
_PROMPT = (*_LARGE, "first_token")  # whose answer names the prompt too
FAULTS: dict[str, Fault] = {
    "temperature left out by the learner": Fault(("temperature",), (0.7, 0.9),
                                                 lambda p, t, d: _scored(p, p.rolled(temperature=t)), True),
    "raw log-probs from the engine": Fault(("temperature",), (0.7, 0.9), _raw, True),
    "temperature applied twice": Fault(("temperature",), (0.7, 0.9),
                                       lambda p, t, d: _scored(p, p.rolled(temperature=t), temperature=t * t), True),
    "temperature a little other": Fault(("temperature",), (0.9, 0.95, 1.1), lambda p, t, d: _scored(p, temperature=t)),
    "top-k of the rollout alone": Fault(("support",), (5, 20),
                                        lambda p, k, d: _scored(p, p.rolled(top_k=int(k))), True),
    "top-p of the rollout alone": Fault(("support",), (0.9, 0.95), lambda p, q, d: _scored(p, p.rolled(top_p=q)), True),
    "top-k of the learner alone": Fault(("support",), (5, 20), lambda p, k, d: _finite(_scored(p, of=_cut(int(k))))),
    "top-p of the learner alone": Fault(("support",), (0.9, 0.95), lambda p, q, d: _finite(_scored(p, of=_cut(0, q)))),
    "shift to the left": Fault(("shift",), (1, 2), _shift),
    "shift to the right": Fault(("shift",), (-1, -2), _shift),
    "rows in another order": Fault(("rows",), (0.5, 1.0), _rows),
    "end token masked by the learner": Fault(("end_token",), (0.0,), lambda p, s, d: _both(p, _at(-1, lambda y: 0.0))),
    "end token another one": Fault(("end_token",), (1.0, 4.0), lambda p, s, d: _both(p, _at(-1, lambda y: y - s))),
    "first token after another boundary": Fault(("first_token",), (1.0, 4.0),
                                                lambda p, s, d: _both(p, _at(0, lambda y: y - s))),
    "zeros where a tool answered": Fault(("unscored",), (0.1, 0.5), _spans(0.0)),
    "no numbers where a tool answered": Fault(("unscored",), (0.1, 0.5), _spans(np.nan)),
    "logarithm of base 2": Fault(("units",), (0.0,), _of_both(lambda y: y / np.log(2))),
    "logarithm of base 10": Fault(("units",), (0.0,), _of_both(lambda y: y / np.log(10), True)),
    "probabilities saved": Fault(("not_logprobs",), (0.0,), _of_both(np.exp)),
    "losses saved": Fault(("not_logprobs",), (0.0,), _of_both(lambda y: -y, True)),
    "log-probs exported in bf16": Fault(("coarse_logprobs",), (0.0,), _of_both(_bf16, True)),
    "log-probs printed with 3 decimals": Fault(("coarse_logprobs",), (0.0,), _of_both(lambda y: np.round(y, 3))),
    "the learner's logits in bf16": Fault(("half_logits",), (0.0,), _logits_in(BF16)),
    "the rollout's logits in bf16": Fault(("half_logits",), (0.0,),
                                          lambda p, s, d: _scored(p, p.rolled(logits_format=BF16)), True),
    "the learner's logits in fp16": Fault(("half_logits",), (0.0,), _logits_in(FP16)),
    "BOS or first token missing": Fault(_PROMPT, (0.0,), _prompts(lambda prompt: prompt[1:])),
    "prompt cut in half": Fault(_PROMPT, (0.0,), _prompts(lambda prompt: prompt[len(prompt) // 2 :])),
    "template applied twice": Fault(_PROMPT, (0.0,), _prompts(lambda prompt: [*prompt[:2], *prompt])),
    "stale weights, versions known": Fault(("stale",), (0.2, 0.4), _stale, True),
    "one engine of several": Fault(("some_sequences",), (0.125, 0.25), _one_engine, True),
    "other weights": Fault(_LARGE, (0.05, 0.2, 0.4), _other_weights, True),
    "cache in fp8": Fault(_LARGE, (0.0,), lambda p, s, d: _scored(p, p.rolled(kv_format=E4M3)), True),
    "rotary table in fp8": Fault(_LARGE, (0.0,),
                                lambda p, s, d: _scored(p, kernels=faulty(p.bench.fmt, rope_format=E4M3))),
    "dropout left on": Fault(("nondeterministic",), (0.1, 0.3),
                             lambda p, s, d: _scored(p, kernels=faulty(p.bench.fmt, dropout=s))),
    "routers that disagree": Fault(("experts",), (0.003, 0.01), _flips, undecided=True),
}  # fmt: skip
