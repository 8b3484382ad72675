"""Whether a rollout has the trainer's weights after a sync, by digests of both sides while a job runs.

Digests decide that a tensor arrived. Of one that did not they know three things: it is zero, it is the trainer's after
a sync before, it is another tensor's. For any other the values of that tensor alone are read on both sides, and
``weights.compare`` says what it is; codes of fp8 are read at every look, for their scales are the engine's own.

Looked at are the first five syncs, and then every n-th. The trainer's digests of the sync before are taken too, so that
what is stale by one update is known as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mantissa.base.tensors import Digest
from mantissa.doctor.weights import ARRIVED, DO, Fate, Outcome, plain_name, said_of

FIRST = 5  # syncs that are looked at, whatever the distance that was asked for
_KEPT = 64  # sets of digests of the trainer's, for what is stale
_SHOWN = 4  # kinds of faults in one line
_SCALES = ("_scale_inv", "_scale")  # of codes in fp8, after the weight's name
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Seen:
    """What became of one server's tensors: of ``tensors`` and ``weights`` in all, ``lost`` did not arrive; those of
    ``unknown`` are to be read (they are in ``lost`` as other values); ``alone``: the trainer has none of that name."""

    tensors: int
    weights: int
    lost: tuple[Outcome, ...] = ()
    unknown: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


def wanted(engine: Mapping[str, Digest]) -> dict[str, str]:
    """What a trainer is to be asked for: the engine's dtypes by plain names, of tensors that are no codes or scales."""
    return {name: each.dtype for name, each in _plain(engine).items() if not _is_coded(each)}


def with_scales(names: Iterable[str], engine: Mapping[str, Digest]) -> list[str]:
    """An engine's own names of these tensors, and of the scales that belong to codes."""
    own = {plain_name(name): name for name in engine}
    found = [own[name] for name in names]
    return found + [f"{name}{end}" for name in found for end in _SCALES if f"{name}{end}" in engine]


def _plain(engine: Mapping[str, Digest]) -> dict[str, Digest]:
    """Without scales, by plain names."""
    scales = {f"{name}{end}" for name in engine for end in _SCALES}
    return {plain_name(name): each for name, each in engine.items() if name not in scales}


def _is_coded(each: Digest) -> bool:
    """Whether it is of codes of fp8, whose values lie with their scales."""
    return each.dtype.startswith("float8")


def source_of(name: str, there: Mapping[str, object]) -> str:
    """The plain name under which the trainer has a tensor: a head that is tied is its embedding."""
    return EMBEDDING if name == HEAD and name not in there else name


class SyncProof:
    """``every``: syncs between two looks."""

    def __init__(self, every: int = 25) -> None:
        self.every, self.count = every, 0
        self._before: list[Mapping[str, Digest]] = []

    def began(self) -> tuple[bool, bool]:
        """Count a sync: whether it is to be looked at, and whether the trainer's digests alone are needed."""
        self.count += 1
        due = self.count <= FIRST or self.count % self.every == 0
        return due, not due and (self.count + 1) % self.every == 0

    def keep(self, trainer: Mapping[str, Digest]) -> None:
        """The trainer's digests of this sync, by plain names: later ones know by them what is stale."""
        self._before = [*self._before[-_KEPT:], trainer]

    def look(self, trainer: Mapping[str, Digest], engine: Mapping[str, Digest]) -> Seen:
        """One server's digests beside the trainer's, which are of the same dtypes and by plain names."""
        theirs = _plain(engine)
        shared = [name for name in theirs if name in trainer or _is_coded(theirs[name])]
        alone = [name for name in theirs if name not in shared]
        lost, unknown = list[Outcome](), list[str]()
        holders = {each: name for name, each in trainer.items()}
        for name in shared:
            found, mine = theirs[name], trainer.get(name)
            if mine == found:
                continue
            fate, detail = (Fate.OTHER, "") if mine is None else self._named(name, found, mine, holders)
            lost.append(Outcome(name, fate, detail, found.weights, found.weights, 0.0, found.dtype))
            if fate is Fate.OTHER:
                unknown.append(name)
        weights = sum(theirs[name].weights for name in shared)
        return Seen(len(shared), weights, tuple(lost), tuple(unknown), tuple(alone))

    def _named(self, name: str, found: Digest, mine: Digest, holders: Mapping[Digest, str]) -> tuple[Fate, str]:
        if found.shape != mine.shape:
            return Fate.SHAPE, f"{mine.shape} became {found.shape}"
        if not found.total:
            return Fate.ZERO, ""
        for ago, before in enumerate(reversed(self._before), start=1):
            if before.get(name) == found:
                return Fate.STALE, "as at the sync before" if ago == 1 else f"as {ago} looks before"
        if (holder := holders.get(found)) is not None:
            return Fate.ELSEWHERE, f"those of {holder}"
        return Fate.OTHER, ""


def verdict(seen: Seen, outcomes: Mapping[str, Outcome], which: str) -> str:
    """One line of what did not arrive. ``outcomes``: of tensors that were read, which replace what digests said;
    ``which``: the server, in words. Empty where all arrived."""
    lost = [outcomes.get(each.name, each) for each in seen.lost]
    lost = [each for each in lost if each.fate not in ARRIVED]
    if not lost:
        return ""
    share = sum(each.weights for each in lost) / max(1, seen.weights)
    lines = said_of(lost)
    more = f"; and {len(lines) - _SHOWN} more kinds" if len(lines) > _SHOWN else ""
    helps = "; ".join(dict.fromkeys(DO[each.fate] for each in lost))
    return (
        f"{which} does not have the trainer's weights: {len(lost)} of {seen.tensors} tensors, {share:.2%} of the "
        f"weights: {'; '.join(lines[:_SHOWN])}{more}. What helps: {helps}"
    )
