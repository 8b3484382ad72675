"""Did the weights arrive: two sides' tensors compared under the second one's own rounding, each difference explained.

The trainer holds w, the engine e. With r the engine's rounding (to a half; to e4m3 codes under the scales it has; to a
GGUF grid) a tensor arrived where e = r(w), bit for bit. Of one that did not, what else it is: each explanation is
computed from what is there and must give e, again bit for bit (``SCALED`` and ``PART`` to the rounding of e):

| | e is |
|---|---|
| ``STALE`` | r(v), v the weights before the update |
| ``PART`` | r(v + c (w - v)): c of the update |
| ``ELSEWHERE`` | r of another tensor of the trainer |
| ``TRANSPOSED``, ``ROWS``, ``COLUMNS`` | r(w) turned, or with rows or columns in another order |
| ``SHARD`` | one rank's part of r(w) |
| ``TWICE`` | r(q(w)), q another format on the way |
| ``SCALED`` | c w |
| ``SCALES`` | the codes of w under the scales of something else |
| ``BASE``, ``ADAPTED_TWICE``, ``COARSE`` | of w = b + a: r(b); r(b + 2 a); r(r(b) + r(a)) |
| ``ZERO``, ``NOT_FINITE`` | 0; a NaN or an infinity somewhere |

They are tried on the rows that differ, so half a tensor that is stale is found too. Names are matched past what wraps
a model (``module.``, ``_orig_mod.``, ``base_model.model.``, ``language_model.``) and past what an engine fuses (q, k
and v; gate and up; experts); a head that is tied is the embedding.

Legend: w, e, v as above; R rows that differ.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from mantissa.base.tensors import Digest, digest
from mantissa.doctor.held import Held, Stored
from mantissa.model.gguf import on_grid
from mantissa.precision import E4M3, SQUARE, dequantize, quantize

_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
_FRONT = re.compile(r"^(base_model\.model\.)?((model|language_model|transformer|policy|actor)\.)*")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",),
            "w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}  # fmt: skip
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_STEPS = 2.0  # of the rounding of e, that a scaled tensor may be off
# Relative rounding (root mean square) of a grid that the gguf package cannot make, by its bits.
_GRID = {2: 0.4, 3: 0.25, 4: 0.12, 5: 0.06, 6: 0.03, 8: 0.01}
_HALVES = (torch.bfloat16, torch.float16)
_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # no grid, no scales
_UNREAD = "by its digest alone; run this on the engine's machine to be told which"


class Fate(StrEnum):
    """What became of one tensor. The first two arrived."""

    EQUAL = "equal"
    ON_GRID = "on the grid"
    MISSING = "missing"
    EXTRA = "unknown to the trainer"
    SHAPE = "another shape"
    NOT_FINITE = "not finite"
    ZERO = "zero"
    STALE = "stale"
    PART = "part of the update"
    BASE = "adapter not merged"
    ADAPTED_TWICE = "adapter merged twice"
    COARSE = "adapter merged in the engine's format"
    ELSEWHERE = "another tensor's values"
    TRANSPOSED = "transposed"
    ROWS = "rows in another order"
    COLUMNS = "columns in another order"
    SHARD = "one rank's part"
    TWICE = "rounded twice"
    SCALED = "scaled"
    SCALES = "another's scales"
    OTHER = "other values"


DO = {
    Fate.MISSING: "the engine keeps whatever it had; look at the names that its loader skips",
    Fate.EXTRA: "the trainer never sends it; it is what the engine was started with",
    Fate.SHAPE: "another model, or weights padded for a kernel",
    Fate.NOT_FINITE: "look at the trainer's own first (mantissa doctor); then at the scale of fp8 weights",
    Fate.ZERO: "memory that nothing was written to: a sleeping engine woken without a sync, or a dummy load",
    Fate.STALE: "the last sync left it out: a skipped bucket, an early return, a reload that was cached",
    Fate.PART: "an average of weights, or an update that was added twice",
    Fate.BASE: "merge the adapter before the sync, or load it in the engine",
    Fate.ADAPTED_TWICE: "the merge was not undone after the last sync, or the engine adds the adapter again",
    Fate.COARSE: "merge in fp32 and round once: W + s B A, then the engine's format",
    Fate.ELSEWHERE: "the order of parts of a fused matrix, or of a bucket's tensors",
    Fate.TRANSPOSED: "the engine's layout of a matrix is (inputs, outputs)",
    Fate.ROWS: "the order of heads, of rotary pairs or of gate and up that the engine expects",
    Fate.COLUMNS: "the order of heads in the matrix after attention",
    Fate.SHARD: "gather the shards before the sync (full_tensor())",
    Fate.TWICE: "send the fp32 masters, or what was rounded once to the engine's format",
    Fate.SCALED: "a scale that is applied elsewhere: of the loss, of an adapter, of muP, of fp8",
    Fate.SCALES: "send a weight's codes and its scales together",
    Fate.OTHER: "give --before: what is stale is then named; else compare the model's own folder",
}
ARRIVED = frozenset({Fate.EQUAL, Fate.ON_GRID})


@dataclass(frozen=True)
class Outcome:
    """``detail``: in words, the same for tensors that share a fault. ``differing``: of ``weights`` values; ``size``:
    root mean square of e - r(w) over that of r(w)."""

    name: str
    fate: Fate
    detail: str = ""
    weights: int = 0
    differing: int = 0
    size: float = 0.0
    dtype: str = ""


@dataclass(frozen=True)
class Update:
    """What the update since the weights before did: of ``weights``, how many ``moved`` in the trainer's own format, how
    many are still ``seen`` once rounded as the engine rounds."""

    weights: int
    moved: int
    seen: int


@dataclass(frozen=True)
class Comparison:
    """Of each tensor what became of it; ``update``: where the weights before are known."""

    trainer: str
    engine: str
    outcomes: tuple[Outcome, ...]
    update: Update | None = None

    @property
    def arrived(self) -> bool:
        """Whether every tensor did."""
        return all(each.fate in ARRIVED for each in self.outcomes)


def compare(
    trainer: Held, engine: Held, before: Held | None = None, say: Callable[[str], None] = lambda line: None
) -> Comparison:
    """What became of each of the trainer's tensors in the engine. ``before``: the weights before the last update."""
    pairs = list(_pairs(trainer, engine))
    old = {} if before is None else {pair.name: pair.engine for pair in _pairs(trainer, before) if pair.engine}
    search = _Search(trainer, pairs)
    outcomes, updates = list[Outcome](), list[Update]()
    for number, pair in enumerate(pairs, start=1):
        say(f"{number} of {len(pairs)} tensors")
        outcomes.append(_outcome(pair, old.get(pair.name), search, updates))
    whole = Update(*map(sum, zip(*map(astuple, updates), strict=True))) if updates else None
    return Comparison(trainer.where, engine.where, tuple(outcomes), whole)


# words


def said_of(lost: Sequence[Outcome]) -> list[str]:
    """A line for each kind of fault: tensors of one name in all layers together, those with most weights first."""
    groups: dict[tuple[Fate, str, str], list[Outcome]] = defaultdict(list)
    for each in lost:
        groups[each.fate, _kind(each.name), re.sub(r"layers\.\d+\.", "", each.detail)].append(each)
    lines = sorted(groups.items(), key=lambda item: -sum(each.differing for each in item[1]))
    return [f"{fate.value}: {kind}{_layers(group)}{_detail(group)}" for (fate, kind, _), group in lines]


def _kind(name: str) -> str:
    """A tensor's name without its layer."""
    return re.sub(r"\.(layers|h|blocks)\.\d+\.", ".", f".{name}").lstrip(".").removeprefix("model.")


def _layers(of: Sequence[Outcome]) -> str:
    """Which layers, as ranges."""
    numbers = sorted({int(found[1]) for each in of if (found := re.search(r"(?:layers|h|blocks)\.(\d+)\.", each.name))})
    ranges = list[list[int]]()
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    if not ranges:
        return ""
    said = ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in ranges)
    return f" of layer{'s' if len(numbers) > 1 else ''} {said}"


def _detail(of: Sequence[Outcome]) -> str:
    said = f" ({of[0].detail})" if of[0].detail else ""
    return f"{said}, {sum(each.differing for each in of):,} weights"


# names


def plain_name(name: str) -> str:
    """A tensor's name without what wraps a model."""
    return _key(name)


@dataclass(frozen=True)
class _View:
    """A tensor, or a part of one that holds several."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Stored]
    digest: Digest | None = None
    readable: bool = True

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class _Pair:
    name: str
    trainer: _View | None
    engine: _View | None
    base: _View | None = None


def _pairs(trainer: Held, engine: Held) -> Iterator[_Pair]:
    mine, theirs = _views(trainer), _views(engine)
    _tie(mine, theirs)
    _unfuse(theirs, mine)
    _unfuse(mine, theirs)
    below = {} if trainer.base is None else _views(trainer.base)
    for key, view in mine.items():
        yield _Pair(view.name, view, theirs.get(key), below.get(key))
    for key, view in theirs.items():
        if key not in mine:
            yield _Pair(view.name, None, view)


def _views(held: Held) -> dict[str, _View]:
    """By names without what wraps a model; by their own where two would be one."""
    keys = [_key(name) for name in held.shapes]
    unique = len(set(keys)) == len(keys)

    def view(name: str, shape: tuple[int, ...]) -> _View:
        return _View(name, shape, lambda: held.read(name), held.digests.get(name), held.readable)

    return {key if unique else name: view(name, held.shapes[name]) for key, name in zip(keys, held.shapes, strict=True)}


def _key(name: str) -> str:
    parts = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return _FRONT.sub("", parts)


def _tie(mine: dict[str, _View], theirs: dict[str, _View]) -> None:
    """A head that one side does not store is its embedding."""
    for one, other in ((mine, theirs), (theirs, mine)):
        if _HEAD in other and _HEAD not in one and _EMBEDDING in one:
            tied = one[_EMBEDDING]
            one[_HEAD] = replace(tied, name=f"{_HEAD} (tied)")


def _unfuse(held: dict[str, _View], other: Mapping[str, _View]) -> None:
    """Take apart what ``held`` has in one and ``other`` in several."""
    for key in [key for key in held if key not in other]:
        parts = dict(_apart(key, held[key], other))
        if parts:
            del held[key]
            held |= parts


def _apart(key: str, view: _View, other: Mapping[str, _View]) -> Iterator[tuple[str, _View]]:
    stem, _, last = key.rpartition(".")
    module = stem.rpartition(".")[2]
    if last in ("weight", "bias") and module in _FUSED:
        names = [f"{stem.removesuffix(module)}{part}.{last}" for part in _FUSED[module]]
        if all(name in other for name in names):
            yield from _sliced(view, names, [other[name].shape[0] for name in names])
    elif last in _EXPERTS and module == "experts" and len(view.shape) == 3:
        for expert in range(view.shape[0]):
            names = [f"{stem}.{expert}.{part}.weight" for part in _EXPERTS[last]]
            if not all(name in other for name in names):
                return
            yield from _sliced(view, names, [other[name].shape[0] for name in names], expert)


def _sliced(view: _View, names: list[str], sizes: list[int], expert: int | None = None) -> Iterator[tuple[str, _View]]:
    shape = view.shape if expert is None else view.shape[1:]
    if sum(sizes) != shape[0]:
        return
    start = 0
    for name, size in zip(names, sizes, strict=True):

        def read(start: int = start, size: int = size) -> Stored:
            whole = view.read()

            def part(tensor: Tensor | None) -> Tensor | None:
                if tensor is None:
                    return None
                return (tensor if expert is None else tensor[expert])[start : start + size]

            values = part(whole.values)
            assert values is not None
            return Stored(values, part(whole.codes), part(whole.scales), whole.grid)

        inside = f"{view.name}[{start}:{start + size}]" if expert is None else f"{view.name}[{expert}]"
        yield name, _View(inside, (size, *shape[1:]), read)
        start += size


# rounding, as the engine does it


def _rounded(w: Tensor, like: Stored) -> Tensor | None:
    """r(w): the values that the engine would hold of ``w``; None where only its own program makes its grid."""
    if like.codes is not None:
        assert like.scales is not None
        return _codes(w, like.codes.dtype, like.scales).float() * like.scales
    if like.grid is not None:
        return on_grid(w, like.grid)
    return w.to(like.values.dtype)


def _codes(w: Tensor, dtype: torch.dtype, scales: Tensor) -> Tensor:
    most = torch.finfo(dtype).max
    return (w.float() / scales).clamp(-most, most).to(dtype)


def _between(low: Tensor | None, x: Tensor, high: Tensor | None) -> bool:
    """Whether each value lies between two others, as what is rounded from between them does: rounding keeps order."""
    if low is None or high is None or x.shape != low.shape:
        return False
    return bool(((low.float() <= x.float()) & (x.float() <= high.float())).all())


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and torch.equal(one, other)


# one tensor


def _outcome(pair: _Pair, old: _View | None, search: _Search, updates: list[Update]) -> Outcome:
    if pair.engine is None or pair.trainer is None:
        there = pair.engine or pair.trainer
        assert there is not None
        return Outcome(pair.name, Fate.MISSING if pair.engine is None else Fate.EXTRA, "", there.count, there.count)
    mine = pair.trainer.read()
    w = mine.values
    v = None if old is None or old.shape != pair.trainer.shape else old.read().values
    if (known := _by_digest(pair, w, v, search, updates)) is not None:
        return known
    e = pair.engine.read()
    if v is not None:
        updates += _update(w, v, e)
    how = {"weights": e.values.numel(), "dtype": str((e.codes if e.codes is not None else e.values).dtype)[6:]}
    if e.grid is not None:
        how["dtype"] = e.grid
    if pair.engine.shape != pair.trainer.shape:
        fate, detail = _of_another_shape(w, e)
        return Outcome(pair.name, fate, detail, differing=e.values.numel(), **how)  # type: ignore[arg-type]
    if not w.is_floating_point() or not e.values.is_floating_point() or not w.numel() or not w.ndim:
        fate = Fate.EQUAL if _same(w, e.values) else Fate.OTHER  # a counter, a table of ids
        return Outcome(pair.name, fate, differing=int((w != e.values).sum()), **how)  # type: ignore[arg-type]
    expected = _rounded(w, e)
    if _same(expected, e.values):
        return Outcome(pair.name, Fate.EQUAL, **how)  # type: ignore[arg-type]
    if mine.slack is not None and _between(_rounded(w - mine.slack, e), e.values, _rounded(w + mine.slack, e)):
        return Outcome(pair.name, Fate.EQUAL, "in another order of the merge's sums", **how)  # type: ignore[arg-type]
    nearest = w.float() if expected is None else expected.float()
    apart = (e.values.float() - nearest).double()
    whole = float(nearest.double().square().mean().sqrt())
    size = float(apart.square().mean().sqrt()) / whole if whole else float("inf")
    if e.grid is not None and expected is None and size <= _GRID.get(_bits(e.grid), 0.0):
        return Outcome(pair.name, Fate.ON_GRID, f"within {e.grid}'s rounding", size=size, **how)  # type: ignore[arg-type]
    case = _Case(pair, w, e, nearest, v, search, torch.zeros(()) if mine.slack is None else mine.slack)
    fate, detail = case.explained()
    return Outcome(pair.name, fate, detail, differing=int(apart.count_nonzero()), size=size, **how)  # type: ignore[arg-type]


def _by_digest(pair: _Pair, w: Tensor, v: Tensor | None, search: _Search, updates: list[Update]) -> Outcome | None:
    """What the engine's digest says: that the tensor arrived; where it cannot be read, also what else it is. None where
    it has to be read."""
    assert pair.engine is not None
    found, whole = pair.engine.digest, pair.engine.readable
    if found is None or (plain := _PLAIN.get(found.dtype)) is None:
        return None if whole else Outcome(pair.name, Fate.OTHER, _UNREAD, pair.engine.count, pair.engine.count)
    how = {"weights": found.weights, "dtype": found.dtype}
    if found.shape != w.shape:
        said = f"{tuple(w.shape)} became {found.shape}"
        return None if whole else Outcome(pair.name, Fate.SHAPE, said, differing=found.weights, **how)  # type: ignore[arg-type]
    if digest(w.to(plain)) == found:
        if v is not None:
            updates += _update(w, v, Stored(torch.empty(0, dtype=plain)))
        return Outcome(pair.name, Fate.EQUAL, **how)  # type: ignore[arg-type]
    if whole:
        return None
    fate, detail = Fate.OTHER, _UNREAD
    if not found.total:
        fate, detail = Fate.ZERO, ""
    elif v is not None and digest(v.to(plain)) == found:
        fate, detail = Fate.STALE, "as before the update"
    elif (name := search.holder(pair.name, found)) is not None:
        fate, detail = Fate.ELSEWHERE, f"those of {name}"
    return Outcome(pair.name, fate, detail, differing=found.weights, **how)  # type: ignore[arg-type]


def _bits(grid: str) -> int:
    return int(next(iter(re.findall(r"\d+", grid)), "0"))


def _of_another_shape(w: Tensor, e: Stored) -> tuple[Fate, str]:
    said = f"{tuple(w.shape)} became {tuple(e.values.shape)}"
    if w.ndim == 2 and e.codes is None and e.grid is None:
        if _same(w.T.to(e.values.dtype), e.values):
            return Fate.TRANSPOSED, said
        for axis in (0, 1):
            ranks, rest = divmod(w.shape[axis], max(1, e.values.shape[axis]))
            if rest or ranks < 2:
                continue
            for rank, part in enumerate(w.to(e.values.dtype).chunk(ranks, axis)):
                if _same(part, e.values):
                    return Fate.SHARD, f"part {rank + 1} of {ranks} by {'rows' if axis == 0 else 'columns'}"
    return Fate.SHAPE, said


@dataclass
class _Case:
    """One tensor that differs. ``expected``: r(w) as fp32; ``slack``: of ``w``, as ``Stored`` has it."""

    pair: _Pair
    w: Tensor
    e: Stored
    expected: Tensor
    v: Tensor | None
    search: _Search
    slack: Tensor
    rows: Tensor = field(init=False)

    def __post_init__(self) -> None:
        apart = self.e.values.float() != self.expected
        self.rows = (apart if apart.ndim < 2 else apart.flatten(1).any(1)).nonzero().flatten()

    def explained(self) -> tuple[Fate, str]:
        """The first explanation that gives what the engine has."""
        if not bool(self.e.values.float().isfinite().all()):
            bad = int((~self.e.values.float().isfinite()).sum())
            return Fate.NOT_FINITE, f"{bad:,} values"
        for fate, detail in self._by_rows():
            return fate, detail + self._where()
        for fate, detail in self._whole():
            return fate, detail
        for fate, detail in self._by_measure():
            return fate, detail + self._where()
        return Fate.OTHER, self._other() + self._where()

    def _is(self, candidate: Tensor | None) -> bool:
        """Whether r(candidate), rounded already, is what the engine has where it differs."""
        if candidate is None or candidate.shape != self.e.values.shape:
            return False
        return torch.equal(candidate.float()[self.rows], self.e.values.float()[self.rows])

    def _by_rows(self) -> Iterator[tuple[Fate, str]]:
        if not bool(self.e.values[self.rows].float().any()):
            yield Fate.ZERO, ""
        if self.v is not None and self._is(_rounded(self.v, self.e)):
            yield Fate.STALE, "as before the update"
        yield from self._of_adapters()
        for said, w in self._on_the_way():
            if self._is(_rounded(w, self.e)):
                yield Fate.TWICE, said
        if self._is(_rounded(-self.w.float(), self.e)):
            yield Fate.SCALED, "by -1"
        if self.e.codes is not None and self.w.ndim == 2:
            own = quantize(self.w, E4M3, SQUARE, False, self.pair.name)
            if torch.equal(own.codes.float()[self.rows], self.e.codes.float()[self.rows]):
                yield Fate.SCALES, "the codes are right"

    def _of_adapters(self) -> Iterator[tuple[Fate, str]]:
        if self.pair.base is None:
            return
        b, w = self.pair.base.read().values.float(), self.w.float()
        kind = self.e.values.dtype

        def is_merged(merge: Callable[[Tensor], Tensor | None]) -> bool:
            """Whether it is what ``merge`` makes of the adapter, whatever the order of its sums."""
            low, high = merge(w - b - 2 * self.slack), merge(w - b + 2 * self.slack)
            if low is None or high is None:
                return False
            return _between(low[self.rows], self.e.values[self.rows], high[self.rows])

        if self._is(_rounded(b, self.e)):
            yield Fate.BASE, ""
        if is_merged(lambda a: _rounded(b + 2 * a, self.e)):
            yield Fate.ADAPTED_TWICE, ""
        if kind in _HALVES and is_merged(lambda a: b.to(kind) + a.to(kind)):
            update = (w - b).double()
            lost = 1 - float(((self.e.values.double() - b.double()) * update).sum() / update.square().sum())
            yield Fate.COARSE, f"the merge lost {lost:.1%} of the adapter"

    def _on_the_way(self) -> Iterator[tuple[str, Tensor]]:
        """Formats through which the weights may have gone before the engine's."""
        kind = self.e.values.dtype
        for other, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            if other != kind:
                yield f"{name} on the way", self.w.to(other).float()
        if self.w.ndim == 2 and bool(self.w.isfinite().all()):
            yield "fp8 on the way", dequantize(quantize(self.w, E4M3, SQUARE, False, self.pair.name), SQUARE)

    def _whole(self) -> Iterator[tuple[Fate, str]]:
        """Explanations of all of a tensor."""
        e = self.e.values
        plain = self.e.codes is None and self.e.grid is None and e.dtype in _PLAIN.values()
        if plain and (name := self.search.holder(self.pair.name, digest(e))) is not None:
            yield Fate.ELSEWHERE, f"those of {name}"
        if self.w.ndim != 2:
            return
        if self.w.shape[0] == self.w.shape[1] and _same(self.expected.T, e.float()):
            yield Fate.TRANSPOSED, "a square matrix"
        for fate, mine, theirs in ((Fate.ROWS, self.expected, e), (Fate.COLUMNS, self.expected.T, e.T)):
            if said := _order(mine.float(), theirs.float()):
                yield fate, said

    def _by_measure(self) -> Iterator[tuple[Fate, str]]:
        """Explanations with a number in them, to the engine's own rounding."""
        e, w = self.e.values.float()[self.rows].double(), self.w.float()[self.rows].double()
        if self.v is not None:
            v = self.v.float()[self.rows].double()
            if (share := _multiple(e - v, w - v, self._step(e))) is not None:
                yield Fate.PART, f"{share:.3g} of it"
        if (times := _multiple(e, w, self._step(e))) is not None:
            yield Fate.SCALED, f"by {times:.6g}"

    def _step(self, e: Tensor) -> Tensor:
        """The root mean square of what rounding to the engine's format leaves."""
        kind = self.e.codes.dtype if self.e.codes is not None else self.e.values.dtype
        relative = torch.finfo(kind).eps / 2 if self.e.grid is None else _GRID.get(_bits(self.e.grid), 0.0)
        return (e.square().mean().sqrt() * relative).clamp_min(torch.finfo(torch.float32).tiny)

    def _where(self) -> str:
        """Which rows differ, where not all do."""
        count = len(self.expected)
        if len(self.rows) == count or self.expected.ndim < 2:
            return ""
        first, last = int(self.rows[0]), int(self.rows[-1])
        if first == last:
            return f"; row {first:,} of {count:,} alone"
        if last - first + 1 == len(self.rows):
            return f"; rows {first:,} to {last:,} of {count:,} alone"
        return f"; {len(self.rows):,} of {count:,} rows"

    def _other(self) -> str:
        e, w = self.e.values.float().double(), self.expected.double()
        size = float(((e - w).square().mean() / w.square().mean().clamp_min(1e-300)).sqrt())
        if size < 0.1:
            return f"near them, {size:.2g} apart: an update or more, or another rounding"
        angle = float((e * w).sum() / (e.norm() * w.norm()).clamp_min(1e-300))
        return f"{size:.2g} apart, at a cosine of {angle:.2f}"


def _multiple(e: Tensor, w: Tensor, step: Tensor) -> float | None:
    """c where e is c w to ``step``; None where no c is, or where it is 1."""
    whole = float(w.square().sum())
    if not whole:
        return None
    c = float((e * w).sum()) / whole
    left = (e - c * w).square().mean().sqrt()
    far = abs(c - 1) * float(w.square().mean().sqrt()) > _STEPS * float(step)
    return c if left <= _STEPS * step and far and abs(c) > 1e-6 else None


def _order(mine: Tensor, theirs: Tensor) -> str:
    """How the rows of one matrix lie in the other; empty where they are not the same rows."""
    one, other = _row_digests(mine), _row_digests(theirs)
    (a, at), (b, to) = one.sort(), other.sort()
    if not torch.equal(a, b):
        return ""
    source = torch.empty_like(at)
    source[to] = at  # row i of theirs is row source[i] of mine
    count = len(source)
    steps = torch.arange(count)
    if count % 2 == 0 and torch.equal(source, (steps + count // 2) % count):
        return "its halves are swapped"
    for width in (2 * 2**n for n in range(12)):
        if count % width == 0:
            halves = torch.arange(width).view(2, -1).T.flatten()
            blocks = (steps // width) * width
            if torch.equal(source, blocks + halves[steps % width]):
                return f"halves of {width} rows are interleaved, as rotary pairs that are neighbours"
            if torch.equal(source, blocks + halves.argsort()[steps % width]):
                return f"neighbours lie apart in {width} rows, as rotary pairs half a head apart"
    return f"{int((source != steps).sum()):,} of {count:,} have moved"


def _row_digests(x: Tensor) -> Tensor:
    """A number for the bits of each row, modulo 2^64; -0 counts as 0."""
    bits = (x.float() + 0.0).contiguous().view(torch.int32).long()
    return (bits * _factors(x.shape[1])).sum(1)


def _factors(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 62), 1 << 62, (count,), generator=draw, dtype=torch.int64) | 1


class _Search:
    """Which of the trainer's tensors has what the engine has: by digests, of one shape and rounding at a time."""

    def __init__(self, trainer: Held, pairs: Iterable[_Pair]) -> None:
        self._views = [(pair.name, pair.trainer) for pair in pairs if pair.trainer is not None]
        self._made: dict[Any, dict[int, str]] = {}

    def holder(self, name: str, e: Digest) -> str | None:
        """Its name, None where there is none."""
        kind = (_PLAIN[e.dtype], e.shape)
        if kind not in self._made:
            self._made[kind] = {
                digest(view.read().values.to(kind[0])).total: each
                for each, view in self._views
                if view.shape == kind[1]
            }
        found = self._made[kind].get(e.total)
        return None if found == name else found


def _update(w: Tensor, v: Tensor, e: Stored) -> Iterator[Update]:
    """Of one tensor, where the engine's rounding can be done here."""
    now, then = _rounded(w, e), _rounded(v, e)
    if now is not None and then is not None and now.shape == then.shape:
        yield Update(w.numel(), int((w != v).sum()), int((now != then).sum()))
