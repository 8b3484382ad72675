"""Which projections can be fp8 in the rollout, or the learner, while the gap between them stays within a budget.

The learner computes in a half, ``base``; so does the rollout, but for the projections chosen, whose products have fp8
operands. Both score the same tokens at the same weights, so d = learner's log-prob - rollout's is what fp8 does there.
With the learner in their place d turns its sign, which is the same to the first figure and not to the second. (What fp8
does to gradients is no gap, and not seen here.) The budget bounds one of

    seq_std   the standard deviation over sequences of S / T, S = sum of d over the T response tokens of one: the noise
              in the logarithm of a length-normalised sequence ratio
    k3        the mean over tokens of exp(d) - 1 - d, which estimates KL(rollout || learner)

Projections that engines multiply as one (q, k, v; gate, up) go together, and layers in blocks of neighbours, so that a
*group* is what one forward measures. A group's sensitivity is the mean of d^2 when it alone is fp8, less the *floor*:
what d^2 is where nothing is fp8 and the rollout's kernels round as a serving engine's do (emulated). For every engine
has that gap, whatever stays in the half; and whatever is changed, in a half nearly every later rounding falls out
another way, so that each group alone would bring the floor with it, which is paid once. Sensitivity divided by
parameters is the price of a byte. What fp8 saves of a group is one byte a parameter wherever weights are read, which
is what a decode step's time goes by, and half of the time of its products: both grow with parameters, so those count.

Groups are taken in the order of price, as many as the budget allows. That sensitivities add up decides nothing but the
order: how many are taken is found by scoring whole sets (bisection), on the half of the sequences that chose, and the
set is then measured on the other half. The same is done along other orders, so that the method has something to beat:
layers from the middle outwards (the first and last stay in the half longest), and by the weights' own rounding error
||Q(W) - W||^2 / ||W||^2, smallest first.

Legend: N tokens, B sequences, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mantissa.base.bounds import outside
from mantissa.base.errors import MantissaError
from mantissa.doctor.sides import AnyModel, Array, Scores, Side
from mantissa.doctor.substitution import OF_ANY, SERVING
from mantissa.mismatch.intervals import Estimate, jackknife_interval
from mantissa.model import Decoder
from mantissa.precision import E4M3, SQUARE, Fp8Policy, round_in_blocks

Figure = Literal["seq_std", "k3"]
Role = Literal["rollout", "learner"]
_JOINED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_SHORT = {"self_attn.qkv": "qkv", "self_attn.o_proj": "o", "mlp.gate_up": "gate_up", "mlp.down_proj": "down"}
_OUR_ENDS = ("model.embed_tokens", "lm_head")
_FEWEST = 8  # sequences: half choose, half measure
_LARGEST_BUDGET = 20.0


@dataclass(frozen=True)
class Group:
    """``projections`` that are in one format, those of a ``kind`` in ``layers``. ``parameters``: of their weights."""

    kind: str
    layers: tuple[int, ...]
    projections: tuple[str, ...]
    parameters: int

    @property
    def patterns(self) -> tuple[str, ...]:
        """The same as ``precision.fp8.exclude`` names them, without what all names begin with."""
        return tuple(f"layers.{_layer(name)}.{_inside(name)}" for name in self.projections)

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        return f"{self.kind} of layer{f' {first}' if first == last else f's {first} to {last}'}"


def _layer(name: str) -> int:
    """Of a projection, by its name: model.layers.3.mlp.up_proj."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1])


def _inside(name: str) -> str:
    """Its name within the layer."""
    parts = name.split(".")
    return ".".join(parts[parts.index("layers") + 2 :])


def _kind(name: str) -> str:
    """What it is in every layer, with those of one product; experts together."""
    *path, last = [part for part in _inside(name).split(".") if not part.isdecimal()]
    kind = ".".join((*path, _JOINED.get(last, last)))
    return _SHORT.get(kind, kind)


@dataclass(frozen=True)
class Row:
    """One set of projections in fp8, measured. ``taken``: its groups, empty for none.

    ``chosen``, ``measured``: the figure on the half that chose, and on the other with its interval. ``within``: whether
    the measured one is inside the budget. ``share``: of the decoder layers' parameters. ``saved``: bytes of weights
    that a decode step reads less, of all that it reads with every weight in the half (the head, not the embedding); 0
    where the fp8 is the learner's.
    """

    name: str
    taken: tuple[Group, ...]
    chosen: float
    measured: Estimate
    within: bool
    share: float
    saved: float


@dataclass(frozen=True)
class Tuned:
    """``rows``: the tuned set first, then what it is compared with. ``sensitivity``: of each group, mean d^2 when it
    alone is fp8, the floor included; ``floor``: mean d^2 of the half alone on an engine's kernels.

    ``exclude``: for ``precision.fp8``, of the tuned set; None where nothing or everything is in fp8. ``head``: the
    name of the output projection. ``transformers``: whether the model runs by transformers' own code.
    """

    rows: tuple[Row, ...]
    sensitivity: dict[Group, float]
    floor: float
    base: str
    budget: float
    figure: Figure
    exclude: tuple[str, ...]
    tokens: int
    sequences: int
    role: Role = "rollout"
    head: str = "lm_head"
    transformers: bool = False

    def recipe(self) -> dict[str, Any]:
        """The recipe's ``precision`` section, and ``rollout.engine`` where it is not our own; as plain values."""
        engine: dict[str, Any] = {"rollout": {"engine": "transformers"}} if self.transformers else {}
        if not self.rows[0].taken:
            return {"precision": {"train": self.base, "rollout": self.base}} | engine
        fp8: dict[str, Any] = {"base": self.base} | ({"exclude": list(self.exclude)} if self.exclude else {})
        formats = {"train": self.base, "rollout": self.base} | {"train" if self.role == "learner" else "rollout": "fp8"}
        return {"precision": formats | {"fp8": fp8}} | engine

    def kept(self) -> list[str]:
        """Every projection that stays in the half, by the checkpoint's names, and the head."""
        taken = {name for group in self.rows[0].taken for name in group.projections}
        names = [name for group in self.sensitivity for name in group.projections if name not in taken]
        return [*sorted(names, key=lambda name: (_layer(name), name)), self.head]

    def vllm(self) -> dict[str, Any]:
        """``quantization_config`` in vLLM's keys: of a checkpoint's config.json, or in ``--hf-overrides``."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "ignored_layers": self.kept(),
        }

    def verl(self) -> list[str]:
        """Overrides of verl 0.9: what goes to ``engine_kwargs`` takes the place of verl's own ``hf_overrides``."""
        under, half = "actor_rollout_ref", "bfloat16" if self.base == "bf16" else "float16"
        if not self.rows[0].taken or self.role == "learner":
            return [f"{under}.rollout.dtype={half}"]
        config = json.dumps(self.vllm()).replace('"', "").replace(" ", "")
        return [
            f"{under}.rollout.dtype={half}",
            f"{under}.rollout.quantization=fp8",
            f"+{under}.rollout.engine_kwargs.vllm.hf_overrides.quantization_config={config}",
        ]


def groups(model: Decoder | AnyModel, blocks: int) -> list[Group]:
    """Every kind of projection in every one of ``blocks`` blocks of neighbouring layers."""
    count, projections = model.config.num_hidden_layers, [name for name in model.projections if "layers" in name]
    if not projections:
        raise MantissaError(
            "fp8 is chosen by names such as layers.0.mlp.up_proj, and no product of this model is of a weight inside "
            "layers so named; nothing of it can be fp8"
        )
    if not 1 <= blocks <= count:
        raise MantissaError(f"--blocks {blocks}: expected 1 to {count}, the model's layers")
    weights, found = _weights(model), []
    for block in np.array_split(np.arange(count), blocks):
        here = [name for name in projections if _layer(name) in block]
        for kind in dict.fromkeys(map(_kind, here)):
            names = tuple(name for name in here if _kind(name) == kind)
            layers = tuple(dict.fromkeys(map(_layer, names)))
            found.append(Group(kind, layers, names, sum(weights[name].numel() for name in names)))
    return found


def _weights(model: Decoder | AnyModel) -> dict[str, Any]:
    """By the names of their projections."""
    return {name.removesuffix(".weight"): weight.detach() for name, weight in model.named_parameters()}


def exclude_patterns(taken: Sequence[Group], every: Sequence[Group]) -> tuple[str, ...]:
    """``precision.fp8.exclude`` that leaves exactly ``taken`` in fp8: whole kinds and layers in one word each."""
    left, names = [group for group in every if group not in taken], [n for group in every for n in group.projections]
    kept = {name for group in left for name in group.projections}
    whole = {group.kind for group in left} - {group.kind for group in taken}
    found = list(
        dict.fromkeys(_word(n, names, kept) for group in left if group.kind in whole for n in group.projections)
    )
    rest = [group for group in left if group.kind not in whole]
    for layer in dict.fromkeys(layer for group in rest for layer in group.layers):
        if all(name in kept for name in names if _layer(name) == layer):
            found.append(f"layers.{layer}")
        else:
            found += [p for group in rest for p in group.patterns if p.split(".")[1] == str(layer)]
    return tuple(found)


def _word(name: str, names: Sequence[str], kept: Collection[str]) -> str:
    """The shortest end of a projection's name that excludes none but those to be kept."""
    parts = _inside(name).split(".")
    for start in range(len(parts) - 1, -1, -1):
        word = ".".join(parts[start:])
        policy = Fp8Policy(exclude=(word,))
        if not any(part.isdecimal() for part in parts[start:]) and all(n in kept or policy.quantizes(n) for n in names):
            return word
    return ".".join(parts)


def tune(
    scores: Scores,
    *,
    budget: float,
    base: str = "fp16",
    figure: Figure = "seq_std",
    blocks: int = 6,
    role: Role = "rollout",
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Find the set, and what it is compared with. ``scores``: of sequences; their own log-probs are not looked at."""
    if outside(budget, 0.0, _LARGEST_BUDGET) or not budget > 0:
        raise MantissaError(f"--budget {budget:g}: expected nats, above 0 and at most {_LARGEST_BUDGET:g}")
    if len(scores.sequences) < _FEWEST:
        raise MantissaError(
            f"{len(scores.sequences)} sequences: expected {_FEWEST} or more, for half choose and the others measure"
        )
    return _Tuner(scores, budget, base, figure, groups(scores.model, blocks), role, say).run()


class _Tuner:
    def __init__(
        self, scores: Scores, budget: float, base: str, figure: Figure, every: list[Group], role: Role,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.scores, self.every, self.say = scores, every, say
        self.budget, self.base, self.figure, self.role = budget, base, figure, role
        half, own = Side(base, base=base), isinstance(scores.model, Decoder)
        self.learner = scores(half)
        self.engine = self.learner - scores(
            replace(half, **({"habits": frozenset(SERVING.items())} if own else OF_ANY))
        )
        self.held_B = np.arange(len(scores.sequences)) % 2 == 1
        self.layers = sum(group.parameters for group in every)
        embedding, self.head = scores.model.ends if isinstance(scores.model, AnyModel) else _OUR_ENDS
        weights = _weights(scores.model)
        tied = self.head not in weights
        self.read = 2 * sum(weight.numel() for name, weight in weights.items() if tied or name != embedding)

    def run(self) -> Tuned:
        sensitivity = {}
        for number, group in enumerate(self.every, start=1):
            self.say(f"group {number} of {len(self.every)}: {group}")
            sensitivity[group] = float(np.square(self.d((group,))[self._of(~self.held_B)]).mean())
        floor = float(np.square(self.engine[self._of(~self.held_B)]).mean())
        orders = {
            "tuned: sensitivity of the gap": sorted(
                self.every,
                key=lambda group: (max(sensitivity[group] - floor, 0.0) / group.parameters, sensitivity[group]),
            ),
            "first and last layers kept": self._outwards(),
            "by the weights' rounding error": sorted(self.every, key=self._weight_error),
        }
        rows = []
        for name, order in orders.items():
            self.say(f"{name}: how many groups the budget allows")
            rows.append(self._row(name, order[: self._most(order)]))
        rows.append(self._row("everything in fp8", self.every))
        rows.append(self._row(f"everything in {self.base}, an engine's kernels (emulated)", (), self.engine))
        exclude = exclude_patterns(rows[0].taken, self.every) if rows[0].taken else ()
        counts = (len(self.learner), len(self.scores.sequences))
        theirs = isinstance(self.scores.model, AnyModel)
        of = (self.base, self.budget, self.figure, exclude, *counts, self.role, self.head, theirs)
        return Tuned(tuple(rows), sensitivity, floor, *of)

    def d(self, taken: Sequence[Group]) -> Array:
        """Of every token, with these groups in fp8."""
        if not taken:
            return np.zeros_like(self.learner)
        kept = tuple(name for group in self.every if group not in taken for name in group.patterns)
        of_rollout = self.learner - self.scores(Side("fp8", base=self.base, exclude=kept))
        return of_rollout if self.role == "rollout" else -of_rollout

    def _of(self, chosen_B: Any) -> Any:
        return chosen_B[self.scores.of_sequence]

    def _most(self, order: Sequence[Group]) -> int:
        """How many groups of ``order`` the choosing half allows, by bisection: the figure grows with the set."""
        low, high = 0, len(order) + 1  # ``low`` is allowed, ``high`` is not
        while high - low > 1:
            middle = (low + high) // 2
            inside = self.measured(self.d(order[:middle]), ~self.held_B).value <= self.budget
            low, high = (middle, high) if inside else (low, middle)
        return low

    def measured(self, d: Array, rows_B: Any) -> Estimate:
        """The figure on some of the sequences, with the jackknife's interval over them."""
        count = len(self.scores.sequences)
        tokens_B = np.bincount(self.scores.of_sequence, minlength=count)[rows_B]
        terms = d if self.figure == "seq_std" else np.expm1(d) - d
        sums_B = np.bincount(self.scores.of_sequence, terms, minlength=count)[rows_B]
        value = _figure(self.figure, sums_B, tokens_B)
        without_B = np.array([
            _figure(self.figure, np.delete(sums_B, b), np.delete(tokens_B, b)) for b in range(len(sums_B))
        ])  # fmt: skip
        if not (value > 0 and (without_B > 0).all()):
            return Estimate(value, value, value)
        low, high = jackknife_interval(float(np.log(value)), np.log(without_B))
        return Estimate(value, float(np.exp(low)), float(np.exp(high)))

    def _row(self, name: str, taken: Sequence[Group], d: Array | None = None) -> Row:
        d = self.d(taken) if d is None else d
        measured = self.measured(d, self.held_B)
        parameters = sum(group.parameters for group in taken)
        return Row(
            name,
            tuple(taken),
            self.measured(d, ~self.held_B).value,
            measured,
            measured.value <= self.budget,
            parameters / self.layers,
            parameters / self.read if self.role == "rollout" else 0.0,
        )

    def _outwards(self) -> list[Group]:
        """Layers from the middle: the first and last are taken last."""
        middle = (self.scores.model.config.num_hidden_layers - 1) / 2
        return sorted(self.every, key=lambda group: abs(sum(group.layers) / len(group.layers) - middle))

    def _weight_error(self, group: Group) -> float:
        weights = _weights(self.scores.model)
        error = size = 0.0
        for name in group.projections:
            for weight in weights[name].reshape(-1, *weights[name].shape[-2:]):  # of each expert
                error += float((round_in_blocks(weight, E4M3, SQUARE) - weight).double().square().sum())
                size += float(weight.double().square().sum())
        return error / size


def _figure(figure: Figure, sums_B: Array, tokens_B: Any) -> float:
    return float((sums_B / tokens_B).std()) if figure == "seq_std" else float(sums_B.sum() / tokens_B.sum())


def check(tuned: Tuned, projections: Sequence[str]) -> None:
    """That the recipe's policy is the set that was measured; an assertion, for programmers."""
    taken = {name for group in tuned.rows[0].taken for name in group.projections}
    if taken:
        policy = Fp8Policy(base="fp16" if tuned.base == "fp16" else "bf16", exclude=tuned.exclude)
        policy.check(projections)
        assert {name for name in projections if policy.quantizes(name)} == taken
