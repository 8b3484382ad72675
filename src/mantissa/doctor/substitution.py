"""Where a gap comes from, by scoring the same tokens again in other ways: which way gives back what was seen?

With d = learner's log-prob - rollout's of each token, as a dump has them. Each side is scored by our own kernels as its
declared formats say (the *base*), in fp32, and under one *hypothesis* after another (logits in bf16, temperature not
applied, weights of another version, ...). What a hypothesis changes in the predicted d is a column e; what the base's
rounding contributes is a column too. Then d is fitted by the columns taken in, each with a weight between 0 and 1:

    d = sum_k beta_k e_k + r,    0 <= beta_k <= 1

1 where a side's numbers come back as they were, less where a source is right and its rounding errors fall out another
way (another order of sums), 0 where it has no part in it. A column's share of sum d^2 is
(2 beta_k e_k.d - beta_k e_k.d^) / d.d with d^ the fit: the shares and the unexplained r.r / d.d add up to 1, and for
a hypothesis that is all of it the share is 1. Hypotheses are taken in greedily, and each next one is tried on top of
those already in.

Why rounding of the base is a column of its own: two computations in bf16 that differ anywhere differ in nearly every
rounding after that, so half of sum d^2 is the learner's rounding and half the rollout's. Whatever shakes the rollout's
roundings, right or wrong, takes the learner's own half away from d. Without that column every hypothesis would explain
a quarter of any gap, and "the rollout is fp32" half of it.

By the same token nothing is explained by *less* rounding on a side: that hypothesis (fp32 where bf16 was declared) is
taken in where that side's log-probs themselves come back, to a quarter of the squared rounding that it denies.

Honesty with some fifty hypotheses: half of the sequences choose, the other half measure. What is chosen must explain
``LEAST`` of the held-out sum, with a 95% interval above zero (a jackknife over sequences, whole prompts where the dump
knows them); the first that does not ends the search. All shares are those of the held-out half.

Legend: N tokens, K columns, U units (sequences or prompts) of a half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.doctor import habits, words
from mantissa.doctor.diagnosis import Cause, CauseKind, Which
from mantissa.doctor.dump import Settings
from mantissa.doctor.facts import CAUSES, DAMAGED, FEWEST_OF_HALF, LEAST, MUCH, ONE_SIGN, REPRODUCED, SMALL, facts
from mantissa.doctor.habits import Habit
from mantissa.doctor.sides import AnyModel, AnyShape, Array, Cache, Scores, Side, Softmax, Weights
from mantissa.mismatch.intervals import Estimate, jackknife_interval
from mantissa.model import Decoder, ModelConfig, base_parameters, policy_weights
from mantissa.model.decoder import AdaptedProjection, merge
from mantissa.precision import E4M3, format_named, round_to_format


@dataclass(frozen=True)
class Hypothesis:
    """One side computes in another way than declared: ``change``, fields of ``Side`` (``habits`` are added).

    ``what``: words for the change, where its fields do not say it.
    """

    kind: CauseKind
    which: Which
    change: Mapping[str, Any]
    what: str = ""

    @property
    def name(self) -> str:
        return words.cause(self.kind, self.which, self.change, self.what)

    def applied(self, side: Side) -> Side:
        """``side`` under the hypothesis."""
        change = dict(self.change)
        if "habits" in change:
            change["habits"] = side.habits | change["habits"]
        return replace(side, **change)


@dataclass(frozen=True)
class Trial:
    """What one hypothesis explains on its own, of the held-out half, beyond the declared formats' rounding; none that
    says that a side rounds less."""

    name: str
    share: Estimate


@dataclass(frozen=True)
class Substitution:
    """``causes``: by share, the unexplained last; they add up to 1. ``trials``: every hypothesis on its own.

    ``learner``, ``rollout``: the base. ``found``: both sides with the causes in, which is what the dump looks like.
    ``rms``: in nats, of d, and of what is left of each side's own log-probs under the base and under ``found``.
    """

    causes: tuple[Cause, ...]
    trials: tuple[Trial, ...]
    learner: Side
    rollout: Side
    found: tuple[Side, Side]
    rms: Mapping[str, float]
    tokens: int
    units: int

    @property
    def explained(self) -> float:
        """Of sum d^2 of the held-out half."""
        return 1.0 - self.causes[-1].share


def declared(scores: Scores, settings: Settings) -> tuple[Side, Side]:
    """Both sides, learner first, as a dump says; plain where it is silent.

    A format that is not said is the other side's; where neither is, the wide one whose log-probs are nearest to the
    learner's. vLLM's raw log-probs are those of temperature 1. Only ``processed_logprobs`` have a top-k or top-p, or
    are of the tokens that the dump says were kept.
    """
    temperature = settings.temperature or 1.0
    named = [settings.learner_format or settings.rollout_format, settings.rollout_format or settings.learner_format]
    if named[0] is None or named[1] is None:
        sides = [Side(name, temperature=temperature) for name in ("fp32", "bf16", "fp16")]
        distances = [float(np.square(scores.learner - scored).sum()) for scored in scores.all(sides)]
        named = [sides[int(np.nanargmin(distances))].format] * 2
    learner, rollout = (Side(_role(name), temperature=temperature) for name in named if name is not None)
    if settings.logprobs_mode == "raw_logprobs":
        rollout = replace(rollout, temperature=1.0)
    elif settings.logprobs_mode == "processed_logprobs":
        cut: dict[str, Any] = {"top_k": settings.top_k or 0, "top_p": settings.top_p or 1.0}
        rollout = replace(rollout, **({"kept": True} if any(k is not None for k in scores.kept) else cut))
        learner = replace(learner, **cut) if settings.renormalised else learner
    return learner, rollout


def _role(name: str) -> str:
    """A role's format: fp8 whatever its kind."""
    return "fp8" if name.startswith(("fp8", "e4m3")) else format_named(name).name


def hypotheses(scores: Scores, learner: Side, rollout: Side, settings: Settings) -> list[Hypothesis]:
    """Everything that is tried beside the base ``learner`` and ``rollout``; the versions of weights are those known."""
    found = []
    both: tuple[tuple[Which, Side], ...] = (("rollout", rollout), ("learner", learner))
    for which, side in both:
        found += _formats(which, side) + _distribution(which, side, settings) + _support(which, side, settings, scores)
        found += (_fused(which) if isinstance(scores.model, AnyModel) else []) + _softmaxes(which, side)
        found += [Hypothesis(CauseKind.WEIGHTS, which, {"weights": name}) for name in scores.versions]
    sides = dict(both)
    found += _engine(rollout, scores.model.config)
    return [each for each in found if scores.computes(each.applied(sides[each.which]))]


def _formats(which: Which, side: Side) -> list[Hypothesis]:
    found = []
    for name in ("fp32", "bf16", "fp16", "fp8"):
        base = side.format if side.format in ("bf16", "fp16") else "bf16"
        if name != side.format:
            found.append(Hypothesis(CauseKind.FORMAT, which, {"format": name, "base": base}))
    for name in ("fp32", "bf16", "fp16"):
        # A half that is not the side's own would be a conversion that nobody makes.
        possible = name == "fp32" or side.format in ("fp32", name) or side.format == "fp8"
        if name != side.logits and possible:
            found.append(Hypothesis(CauseKind.LOGITS, which, {"logits": name}))
    return found


def _distribution(which: Which, side: Side, settings: Settings) -> list[Hypothesis]:
    """Other temperatures and supports; those that were asked for, and where a dump does not say, common ones."""
    asked = settings.temperature
    if asked is None:
        wanted = {f"temperature {t:g}": t for t in (0.6, 0.7, 0.8, 0.9, 1.2)}
    else:
        wanted = {"temperature not applied": 1.0, "temperature applied twice": asked * asked, "temperature": asked}
    return [
        Hypothesis(CauseKind.TEMPERATURE, which, {"temperature": value}, what)
        for what, value in wanted.items()
        if value != side.temperature and value > 0
    ]


def _support(which: Which, side: Side, settings: Settings, scores: Scores) -> list[Hypothesis]:
    """Log-probs after a top-k or top-p that the other side's have not.

    They are higher at every token, so these are tried only where d has one sign nearly everywhere: each costs a sort.
    Where the dump says which tokens were kept, no cut is guessed: those are the support.
    """
    found, kept = [], list[tuple[str, dict[str, Any]]]()
    if (side.top_k, side.top_p, side.kept) != (0, 1.0, False):
        raw = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "kept": False}
        found.append(Hypothesis(CauseKind.RAW, which, raw))
    if any(ids is not None for ids in scores.kept):
        change = {"kept": not side.kept, "top_k": 0, "top_p": 1.0}
        what = "the whole support" if side.kept else "the kept tokens alone"
        return [*found, Hypothesis(CauseKind.SUPPORT, which, change, what)]
    if np.sign(scores.d).mean() * (1 if which == "learner" else -1) < ONE_SIGN:
        return found
    if settings.top_k is None and settings.top_p is None:
        kept = [("top-p 0.9", {"top_p": 0.9}), ("top-p 0.95", {"top_p": 0.95}), ("top-k 50", {"top_k": 50})]
    elif (settings.top_k or 0, settings.top_p or 1.0) != (0, 1.0):
        kept = [("top-k and top-p", {"top_k": settings.top_k or 0, "top_p": settings.top_p or 1.0})]
    for what, change in kept:
        if (side.top_k, side.top_p) != (change.get("top_k", 0), change.get("top_p", 1.0)):
            found.append(Hypothesis(CauseKind.SUPPORT, which, change, what))
    return found


# Of our own decoder as a serving engine, by what it does otherwise (``Emulation``).
_HABITS: dict[str, tuple[CauseKind, dict[str, str | int]]] = {
    "fused residual norms": (CauseKind.NORM, {"norm": "fused"}),
    "a rotary table in the model's format": (CauseKind.ROTARY, {"rope": "half"}),
    "split products": (CauseKind.KERNELS, {"products": "split"}),
    "attention in blocks": (CauseKind.KERNELS, {"attention": "blocks"}),
    "activation in fp32": (CauseKind.ACTIVATION, {"activation": "fp32"}),
}
SERVING = {name: value for _, habit in _HABITS.values() for name, value in habit.items()}
OF_ANY: dict[str, Any] = {"habits": frozenset({("products", "split")}), "eager": True}  # what any model's code can do
# Of transformers' own code, on either side: a fused kernel may be the learner's (habits.py).
_FUSED: dict[str, tuple[CauseKind, Habit]] = {
    "rotary products in fp32": (CauseKind.ROTARY, habits.ROPE),
    "the activation in fp32 until it is multiplied": (CauseKind.ACTIVATION, habits.ACTIVATION),
    "norms in fp32 until they are scaled": (CauseKind.NORM, habits.NORM),
    "norms in the half format": (CauseKind.NORM, habits.HALF_NORM),
    "routers in fp32": (CauseKind.ROUTER, habits.ROUTER),
    "the output projection in fp32": (CauseKind.HEAD, habits.HEAD),
}
_SOFTMAXES = {
    Softmax.DIVIDED: "logits divided by the temperature in the half format",
    Softmax.LSE: "the log-sum-exp in the half format",
    Softmax.HALF: "the log-softmax in the half format",
}
_SHARDS = (2, 4, 8)


def _engine(rollout: Side, model: ModelConfig | AnyShape) -> list[Hypothesis]:
    """What a serving engine may do otherwise: its cache and its kernels' habits, each and all."""
    caches = [Cache.FP8, Cache.UNSCALED, Cache.CUT_OFF]
    caches += [Cache.BF16] if rollout.format in ("fp32", "fp16") else []
    found = [Hypothesis(CauseKind.CACHE, "rollout", {"cache": each}) for each in caches if each != rollout.cache]
    own = {**_HABITS}
    own["a serving engine's kernels (norm, rope, products, attention, activation)"] = CauseKind.KERNELS, SERVING
    for shards in _SHARDS:
        if not (model.num_attention_heads % shards or model.intermediate_size % shards):
            own[f"tensor parallelism over {shards}"] = CauseKind.KERNELS, {"tensor_parallel": shards}
    found.append(Hypothesis(CauseKind.KERNELS, "rollout", {"eager": True}, "attention by transformers' eager"))
    return found + [
        Hypothesis(kind, "rollout", {"habits": frozenset(habit.items())}, what) for what, (kind, habit) in own.items()
    ]


def _fused(which: Which) -> list[Hypothesis]:
    """Where a side rounds otherwise than transformers' code."""
    return [Hypothesis(kind, which, {"habits": frozenset({habit})}, what) for what, (kind, habit) in _FUSED.items()]


def _softmaxes(which: Which, side: Side) -> list[Hypothesis]:
    """How far a half format reaches into the log-softmax, as a sampler or a learner may have it by its version."""
    if side.format == "fp32":
        return []
    tried = [each for each in _SOFTMAXES if each is not Softmax.DIVIDED or side.temperature != 1]
    return [Hypothesis(CauseKind.SOFTMAX, which, {"softmax": each}, _SOFTMAXES[each]) for each in tried]


class _Made(Mapping[str, Tensor]):
    """A model's weights after ``made``, each as it is asked for."""

    def __init__(self, model: Decoder | AnyModel, made: Callable[[str, Tensor], Tensor]) -> None:
        own = dict(model.named_parameters()) if isinstance(model, AnyModel) else base_parameters(model)
        self._made, self._of = made, {name: weight.detach() for name, weight in own.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._made(name, self._of[name])

    def __iter__(self) -> Any:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


def adapter_versions(model: Decoder) -> dict[str, Weights]:
    """What the weights of a policy with low-rank adapters are where an engine merges them otherwise; else nothing."""
    if model.lora is None:
        return {}
    shape = model.lora
    scales = {"alpha / sqrt(rank)": shape.alpha / math.sqrt(shape.rank), "alpha / rank": shape.alpha / shape.rank}
    scales |= {"alpha": shape.alpha, "1": 1.0}
    versions: dict[str, Weights] = {"the base without its adapter": base_parameters(model)}
    for name, scale in scales.items():
        if scale != shape.scale:
            versions[f"the adapter scaled by {name}"] = _Made(model, _rescaled(model, scale))
    return versions


def _rescaled(model: Decoder, scale: float) -> Callable[[str, Tensor], Tensor]:
    adapted = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, AdaptedProjection)}

    def made(name: str, weight: Tensor) -> Tensor:
        if name not in adapted:
            return weight
        module = adapted[name]
        return merge(weight, module.lora_A.detach(), module.lora_B.detach(), scale)

    return made


def plain_policy(model: Decoder) -> Decoder:
    """A decoder of the policy's own weights, adapters merged in; ``model`` itself where it has none."""
    if model.lora is None:
        return model
    plain = Decoder(model.config).requires_grad_(False)
    plain.load_state_dict(dict(policy_weights(model)))
    return plain


def damages(model: Decoder | AnyModel) -> dict[str, Weights]:
    """What one layer's weights may have become on their way: versions that every dump is tried with."""
    unscaled = _Made(model, lambda _, master: round_to_format(master, E4M3) if master.dim() == 2 else master)
    return {"zeros": _Made(model, lambda _, master: torch.zeros_like(master)), "e4m3 without scales": unscaled}


def substitute(
    scores: Scores,
    base: tuple[Side, Side],
    tried: Sequence[Hypothesis],
    say: Callable[[str], None] = lambda line: None,
) -> Substitution:
    """Take in hypotheses until none explains more; where much is left, try single layers of the rollout's weights.

    Those of each version that ``scores`` knows, and where more is left than rounding makes, of what damage makes of a
    layer on its way to the engine (``damages``): a forward for each layer and kind.
    """
    search = _Search(scores, base)
    scores.all([each.applied(search.sides[each.which]) for each in tried])
    alone = [each for each in tried if not search.finer(each) and search.column(each).any()]
    trials = tuple(Trial(each.name, search.gain(each, held_out=True)) for each in alone)
    search.run(tried, say)
    much, names = search.left_over(), list(scores.versions)
    if much and not any("weights" in each.change for each in search.taken):
        if much > DAMAGED:
            scores.versions |= damages(scores.model)
            names = list(scores.versions)
        layers = range(scores.model.config.num_hidden_layers)
        search.run([
            Hypothesis(CauseKind.LAYER, "rollout", {"weights": name, "layer": layer}) for name in names
            for layer in layers
        ], say)  # fmt: skip
    return search.result(trials)


@dataclass(frozen=True)
class _Column:
    """One column of the fit: its values and the bounds of its weight; equal bounds are a weight that is given.

    Without a ``hypothesis`` it is the rounding of ``side`` as declared, of both sides where ``low`` is below 0.
    """

    side: Which
    values: Array
    low: float = 0.0
    high: float = 1.0
    hypothesis: Hypothesis | None = None


class _Search:
    def __init__(self, scores: Scores, base: tuple[Side, Side]) -> None:
        self.scores, self.base, self.d = scores, base, scores.d
        self.sides: dict[Which, Side] = {"learner": base[0], "rollout": base[1]}
        self.taken: list[Hypothesis] = []
        self.unit_N = _units(scores)
        self.held_N = self.unit_N % 2 == 1
        units = int(self.unit_N.max()) + 1
        if units // 2 < FEWEST_OF_HALF:
            raise MantissaError(
                f"{units} sequences (or prompts) with log-probs of both sides: expected {2 * FEWEST_OF_HALF} or more, "
                "for half of them choose among the hypotheses and the others measure"
            )
        self.columns = self._rounding()

    def _rounding(self) -> list[_Column]:
        """Each side's rounding as declared; one column for both where the two are declared alike."""
        found, both = list[_Column](), ("learner", "rollout")  # type: list[_Column], tuple[Which, Which]
        for which in both:
            side = self.sides[which]
            wide = replace(
                side, format="fp32", logits="fp32", cache=Cache.OWN, habits=frozenset(), softmax=Softmax.FP32
            )
            scored, plain = self.scores.all([side, wide])
            values = _finite(scored - plain) * (1 if which == "learner" else -1)
            if values.any():
                found.append(_Column(which, values))
        if len(found) == 2 and np.array_equal(found[0].values, -found[1].values):
            return [replace(found[0], low=-1.0)]
        return found

    # one hypothesis

    def scored(self, hypothesis: Hypothesis) -> Array:
        """The side's log-probs under it, on top of what is taken in; the present ones where it has no answer."""
        present = self.sides[hypothesis.which]
        found, now = self.scores.all([hypothesis.applied(present), present])
        return np.where(np.isfinite(found), found, now)

    def column(self, hypothesis: Hypothesis) -> Array:
        """What it changes in the predicted d."""
        now = self.scores(self.sides[hypothesis.which])
        change = np.where(np.isfinite(now), self.scored(hypothesis), 0.0) - _finite(now)
        return _finite(change) * (1 if hypothesis.which == "learner" else -1)

    def gain(self, hypothesis: Hypothesis, held_out: bool) -> Estimate:
        """The share of sum d^2 that it explains beyond the columns; weights are those of the choosing half."""
        more = [*self.columns, self._as_column(hypothesis)]
        before, after = self._left(self.columns), self._left(more)
        rows = self.held_N if held_out else ~self.held_N
        return self._share(before**2 - after**2, rows)

    def _as_column(self, hypothesis: Hypothesis) -> _Column:
        low = 1.0 if self.finer(hypothesis) else 0.0
        return _Column(hypothesis.which, self.column(hypothesis), low, 1.0, hypothesis)

    def finer(self, hypothesis: Hypothesis) -> bool:
        """Whether it says that a side rounds less than it does at present."""
        present = self.sides[hypothesis.which]
        then = hypothesis.applied(present)
        wider = _digits(then.format) > _digits(present.format) or _digits(then.logits) > _digits(present.logits)
        return wider or bool((then.habits - present.habits) & habits.LESS_ROUNDING)

    def reproduced(self, hypothesis: Hypothesis) -> bool:
        """Whether the side's own log-probs are nearer to a finer format's than rounding would leave them."""
        saved = getattr(self.scores, hypothesis.which)
        then, now = self.scored(hypothesis), self.scores(self.sides[hypothesis.which])
        for half in (self.held_N, ~self.held_N):
            if not np.square(saved - then)[half].sum() < REPRODUCED * np.square(now - then)[half].sum():
                return False
        return True

    def distance(self, hypothesis: Hypothesis) -> float:
        """Root mean square of what it leaves of its side's own log-probs."""
        return _rms(getattr(self.scores, hypothesis.which) - self.scored(hypothesis))

    def towards(self, hypothesis: Hypothesis) -> bool:
        """Whether it moves the side that it is about towards that side's own log-probs, in the choosing half."""
        saved, now = getattr(self.scores, hypothesis.which), self.scores(self.sides[hypothesis.which])
        moved = np.where(np.isfinite(now), self.scored(hypothesis), 0.0) - _finite(now)
        return bool((moved * (saved - _finite(now)))[~self.held_N].sum() > 0)

    # the search

    def run(self, tried: Sequence[Hypothesis], say: Callable[[str], None]) -> None:
        while len(self.taken) < CAUSES and not self._all_explained():
            left = [each for each in tried if self._possible(each)]
            if not left:
                return
            by_side = [each.applied(self.sides[each.which]) for each in left]
            self.scores.all(by_side)
            finer = [each for each in left if self.finer(each) and self.reproduced(each)]
            found = min(finer, key=self.distance, default=None)
            if found is None:
                ordinary = [each for each in left if not self.finer(each) and self.towards(each)]
                gains = {each.name: self.gain(each, held_out=False).value for each in ordinary}
                found = max(ordinary, key=lambda each: gains[each.name], default=None)
                if found is None or gains[found.name] < LEAST:
                    return
                gain = self.gain(found, held_out=True)
                if gain.value < LEAST or gain.low is None or gain.low <= 0:
                    return
            say(f"found: {found.name}")
            self._take(found)

    def _all_explained(self) -> bool:
        """Whether less is left in the choosing half than a cause must explain. Of a base whose rounding is itself the
        mistake (a finer format than declared), the columns leave nothing: that is looked at first."""
        left = float(np.square(self._left(self.columns))[~self.held_N].sum())
        return bool(self.taken) and left < LEAST * float(np.square(self.d)[~self.held_N].sum())

    def _possible(self, hypothesis: Hypothesis) -> bool:
        """Whether it changes anything, and nothing that is settled."""
        present = self.sides[hypothesis.which]
        then = hypothesis.applied(present)
        if then == present or len(dict(then.habits)) < len(then.habits):  # the same, or a switch with two values
            return False
        settled = {key for each in self.taken if each.which == hypothesis.which for key in each.change}
        return not settled & {key for key in hypothesis.change if key != "habits"}

    def _take(self, hypothesis: Hypothesis) -> None:
        column, finer = self._as_column(hypothesis), self.finer(hypothesis)
        if finer:  # what was declared was not so: its rounding is no column any more
            self.columns = [c for c in self.columns if c.hypothesis or c.side != hypothesis.which]
        self.columns.append(column)
        self.taken.append(hypothesis)
        self.sides[hypothesis.which] = hypothesis.applied(self.sides[hypothesis.which])

    def left_over(self) -> float:
        """Root mean square of what is not explained, in units of the declared rounding's; 0 where it is little of d."""
        left = np.square(self._left(self.columns)).mean()
        if not left > MUCH * np.square(self.d).mean():
            return 0.0
        rounding = sum(float(np.square(column.values).mean()) for column in self.columns if not column.hypothesis)
        return float(np.sqrt(left / max(rounding, SMALL**2)))

    # the fit

    def _weights(self, columns: Sequence[_Column]) -> Array:
        """Least squares within the bounds, on the choosing half."""
        from scipy.optimize import lsq_linear

        weights = np.array([column.low for column in columns])
        free = [k for k, column in enumerate(columns) if column.low < column.high]
        x = np.stack([columns[k].values for k in free], -1)[~self.held_N] if free else np.zeros((1, 0))
        sizes = np.sqrt(np.square(x).sum(0))
        free = [k for k, size in zip(free, sizes, strict=True) if size > 0]
        if not free:
            return weights
        x = x[:, sizes > 0]
        given = sum(
            (columns[k].values * weights[k] for k in range(len(columns)) if k not in free), np.zeros_like(self.d)
        )
        bounds = ([columns[k].low for k in free], [columns[k].high for k in free])
        # Equations of K unknowns in place of N: the same minimum.
        orthogonal, triangle = np.linalg.qr(x)
        weights[free] = lsq_linear(triangle, orthogonal.T @ (self.d - given)[~self.held_N], bounds, method="bvls").x
        return weights

    def _left(self, columns: Sequence[_Column]) -> Array:
        """d less the fit, all tokens."""
        left = self.d.copy()
        for column, weight in zip(columns, self._weights(columns), strict=True):
            left -= weight * column.values
        return left

    def _share(self, part_N: Array, rows: Any) -> Estimate:
        """sum part / sum d^2 over the units of ``rows``, with the jackknife's interval."""
        unit = np.unique(self.unit_N[rows], return_inverse=True)[1]
        part_U, whole_U = (np.bincount(unit, x[rows]) for x in (part_N, self.d**2))
        whole = whole_U.sum()
        if not whole > 0:
            return Estimate(0.0, 0.0, 0.0)
        value, rest_U = float(part_U.sum() / whole), whole - whole_U
        known_U = rest_U > 1e-9 * whole  # where one unit holds all of it, nothing is known without that one
        without_U = np.divide(part_U.sum() - part_U, rest_U, where=known_U, out=np.zeros_like(rest_U))
        return Estimate(value, *jackknife_interval(value, without_U))

    def result(self, trials: tuple[Trial, ...]) -> Substitution:
        weights, left = self._weights(self.columns), self._left(self.columns)
        fit, rest, causes = self.d - left, self.d**2, []
        for column, weight in zip(self.columns, weights, strict=True):
            part = weight * column.values
            of_column = 2 * part * self.d - part * fit
            share = self._share(of_column, self.held_N)
            if column.hypothesis or abs(share.value) >= LEAST:
                causes.append(self._cause(column, float(weight), share))
                rest = rest - of_column
        causes.sort(key=lambda cause: -cause.share)
        share = self._share(rest, self.held_N)
        name, ends = words.cause(CauseKind.UNEXPLAINED, None, {}), (share.low or 0.0, share.high or 0.0)
        note = words.UNEXPLAINED_NOTE
        causes.append(Cause(CauseKind.UNEXPLAINED, None, name, share.value, *ends, note=note))
        found = (self.sides["learner"], self.sides["rollout"])
        rms = {"d": _rms(self.d), "left": _rms(left)}
        for which, base, now in zip(("learner", "rollout"), self.base, found, strict=True):
            saved = getattr(self.scores, which)
            rms |= {f"{which} base": _rms(saved - self.scores(base)), f"{which} found": _rms(saved - self.scores(now))}
        counts = (len(self.d), int(self.unit_N.max()) + 1)
        return Substitution(tuple(causes), trials, *self.base, found, rms, *counts)

    def _cause(self, column: _Column, weight: float, share: Estimate) -> Cause:
        kind, side, what, note = CauseKind.ROUNDING, column.side, "", ""
        change: Mapping[str, Any] = {"format": self.base[column.side == "rollout"].format}
        if column.hypothesis is not None:
            kind, change, what = column.hypothesis.kind, column.hypothesis.change, column.hypothesis.what
            note = words.came_back(weight)
        elif column.low < 0:
            side = "rollout" if weight < 0 else "learner"
        known, ends = facts().causes[kind], (share.low or 0.0, share.high or 0.0)
        name = words.cause(kind, side, change, what)
        return Cause(kind, side, name, share.value, *ends, known.helps(side), note, known.fault)


def _units(scores: Scores) -> Any:
    """For each token its prompt's number, where there are enough of them and all are known; else its sequence's."""
    groups = [each.group for each in scores.sequences]
    if all(group is not None for group in groups) and len(set(groups)) >= 2 * FEWEST_OF_HALF:
        return np.unique(np.array(groups), return_inverse=True)[1][scores.of_sequence]
    return scores.of_sequence


def _digits(name: str) -> int:
    return E4M3.mantissa_bits if name == "fp8" else format_named(name).mantissa_bits


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def _rms(x: Array) -> float:
    return float(np.sqrt(np.square(_finite(x)).mean()))
