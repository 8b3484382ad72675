"""Mistakes of known kind in what a policy samples and scores (``doctor_strangers.py``): a dump for each.

A ``Case`` says which signatures name its mistake. Where log-probs alone cannot tell it from another, ``right`` holds
both, and an answer that names the pair and what decides is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from doctor_strangers import Array, Change, Family, Head, Policy, Rolled, cut, dump, plain
from torch import Tensor

from mantissa.doctor.dump import Scored

_WEIGHTS = ("weights",)
_PROMPT = ("prompt",)
_NOISE = ("too_large",)  # dropout, or a coarser cache or rotary table: log-probs cannot tell them apart


@dataclass(frozen=True)
class Case:
    """``right``: the signatures that name it; empty: healthy, as are log-probs of the whole law where
    the samples alone are cut (``--model`` sees that). ``temperature``: what the dump says was sampled at.
    """

    name: str
    right: tuple[str, ...]
    sequences: list[Scored]
    temperature: float = 1.0


class Mistake(NamedTuple):
    """A case that is made when it is asked for."""

    name: str
    right: tuple[str, ...]
    make: Callable[[], list[Scored]]
    temperature: float = 1.0


class Pool(NamedTuple):
    """What was sampled, who scores it, and the healthy log-probs: what mistakes are made of."""

    policy: Policy
    rolled: Rolled
    healthy: list[Array]

    def dump(self, learner: Sequence[Array]) -> list[Scored]:
        return dump(self.rolled, learner)

    def scored(self, **how: Any) -> Callable[[], list[Scored]]:
        return lambda: self.dump(self.policy.plain(self.rolled, **how))

    def prompts(self, change: Callable[[list[int]], list[int]]) -> Callable[[], list[Scored]]:
        return self.scored(prompts=[change(prompt) for prompt in self.rolled.prompts])

    def weights(self, change: Change) -> Callable[[], list[Scored]]:
        return lambda: self.dump(self.policy.under(self.rolled, change))

    def mixed(self, bad: Callable[[int], bool], change: Change) -> Callable[[], list[Scored]]:
        """Other weights in some rows."""

        def made() -> list[Scored]:
            other = self.policy.under(self.rolled, change)
            return self.dump([o if bad(n) else y for n, (o, y) in enumerate(zip(other, self.healthy, strict=True))])

        return made


# mistakes in what is made of the logits


def _soft_cap(cap: float) -> Head:
    return lambda z, t, b: plain(cap * torch.tanh(z / cap), t, b)


def _penalised(by: float) -> Head:
    def head(z: Tensor, tokens: Tensor, before: Tensor) -> Tensor:
        first, z = len(before) - len(tokens), z.clone()
        for at in range(len(tokens)):
            seen = before[: first + at].unique()
            z[at, seen] = torch.where(z[at, seen] > 0, z[at, seen] / by, z[at, seen] * by)
        return plain(z, tokens, before)

    return head


def _dropped(top_p: float) -> Head:
    """Minus infinity for what top-p leaves out, and the whole law's log-prob for the others."""

    def head(z: Tensor, tokens: Tensor, before: Tensor) -> Tensor:
        kept = cut(z, 0, top_p).gather(1, tokens[:, None])[:, 0]
        return torch.where(kept.isfinite(), plain(z, tokens, before), -torch.inf)

    return head


def _half(dtype: torch.dtype) -> Head:
    return lambda z, t, b: plain(z.to(dtype).float(), t, b)


def at_temperature(temperature: float) -> Head:
    return lambda z, t, b: plain(z / temperature, t, b)


HEADS: dict[str, tuple[tuple[str, ...], Head]] = {
    "temperature 0.7": (("temperature",), at_temperature(0.7)),
    "temperature 1.3": (("temperature",), at_temperature(1.3)),
    "soft-capped logits": (("soft_cap",), _soft_cap(4.0)),
    "argmax in place of the token": (("argmax",), lambda z, t, b: torch.log_softmax(z, -1).amax(-1)),
    "logit minus the largest": (("unnormalised",), lambda z, t, b: z.gather(1, t[:, None])[:, 0] - z.amax(-1)),
    "top-k 20 renormalised": (("support",), lambda z, t, b: plain(cut(z, 20, 1.0), t, b)),
    "top-p 0.9 renormalised": (("support",), lambda z, t, b: plain(cut(z, 0, 0.9), t, b)),
    "top-k 20, others infinite": (("cut_off", "support"), lambda z, t, b: plain(cut(z, 20, 1.0), t, b)),
    "top-p 0.9, others infinite, not renormalised": (("cut_off", "support"), _dropped(0.9)),
    "repetition penalty 1.2": (("repetition",), _penalised(1.2)),
    "logits in bf16": (("half_logits",), _half(torch.bfloat16)),
}
MORE_HEADS = {
    "temperature 0.95": (("temperature",), at_temperature(0.95)),
    "logits in fp16": (("half_logits",), _half(torch.float16)),
}


# mistakes in the weights or the forward


def _normal(name: str, shape: Any, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(map(ord, name))))


def noisier(strength: float) -> Change:
    return lambda name, w: w + strength * w.std() * _normal(name, w.shape) if w.dim() >= 2 else None


def _inner(name: str, w: Tensor) -> bool:
    """A matrix of a layer, and not a router's, the embedding or the head."""
    inner = "layers." in name or ".h." in name
    return w.dim() >= 2 and inner and "gate.weight" not in name and "router" not in name


def _low_rank(name: str, w: Tensor, scale: float) -> Tensor:
    """What an adapter of rank 4 adds."""
    a, b = _normal(name, (*w.shape[:-1], 4)), _normal(name + "b", (4, w.shape[-1]))
    return w + scale * w.std() * (a @ b) / 2


def adapter(scale: float) -> Change:
    """An adapter on every matrix of the layers."""
    return lambda name, w: _low_rank(name, w, scale) if _inner(name, w) else None


def _signs(strength: float) -> Change:
    """An optimiser's update: every weight moves as far."""
    return lambda name, w: w + strength * _normal(name, w.shape).sign()


def _corrupt_experts(name: str, w: Tensor) -> Tensor | None:
    """One layer's products back into the stream are a hundred times too large."""
    inward = ("down_proj", "w2", "dense_4h_to_h", "c_proj.weight", "experts", "fc2", "fc_out", "output_linear")
    second = "layers.1." in name or ".h.1." in name
    return w * 100 if second and any(part in name for part in inward) and w.dim() >= 2 else None


def _of_one_rank(name: str, w: Tensor) -> Tensor | None:
    """Every fourth expert of each layer is another matrix: what one rank of expert parallelism of four holds."""
    if w.dim() != 3:
        return None
    made = w.clone()
    made[1::4] += w.std() * _normal(name, w[1::4].shape)
    return made


def _another_head(pool: Pool, change: Callable[[Tensor], Tensor]) -> Callable[[], list[Scored]]:
    """One side's head is another matrix; of a tied one the embedding stays."""

    def made() -> list[Scored]:
        head = pool.policy.model.get_output_embeddings()
        kept = head.weight
        try:
            head.weight = torch.nn.Parameter(change(kept.detach().float()).to(kept.dtype), False)
            return pool.scored()()
        finally:
            head.weight = kept

    return made


def _another_theta(pool: Pool, factor: float) -> list[Scored]:
    """Rotary frequencies of another theta: theta^(-2i/d) with theta times ``factor``."""
    tables = [(m, name, getattr(m, name)) for m in pool.policy.model.modules()
              for name, _ in m.named_buffers(recurse=False) if name.endswith("inv_freq")]  # fmt: skip
    try:
        for m, name, table in tables:
            setattr(m, name, table * factor ** -(torch.arange(len(table)) / len(table)))
        return pool.scored()()
    finally:
        for m, name, table in tables:
            setattr(m, name, table)


def _last(pool: Pool) -> list[Scored]:
    """Log-probs of a forward that sees only the last token at every place but the first: a cache that was dropped."""
    found = []
    for p, r, healthy in zip(pool.rolled.prompts, pool.rolled.responses, pool.healthy, strict=True):
        whole = p + r
        windows = torch.tensor([whole[at - 1 : at] for at in range(len(p), len(whole))])
        with torch.no_grad():
            z = pool.policy.model(windows).logits[:, -1].float()
        y = plain(z, torch.tensor(r), windows).double().numpy()
        found.append(np.concatenate([healthy[:1], y[1:]]))
    return pool.dump(found)


def _lost_page(pool: Pool) -> list[Array]:
    """From a token of the whole sequence on, the keys and values before it are gone (a page, a chunk)."""
    both = list(zip(pool.rolled.prompts, pool.rolled.responses, strict=True))
    at = int(np.median([len(p) + len(r) / 2 for p, r in both]))  # in a response: in a prompt it would be a cut prompt
    found = []
    for (p, r), healthy in zip(both, pool.healthy, strict=True):
        start, y = max(at, len(p)), healthy.copy()  # within the response
        if start < len(p) + len(r) - 1:
            whole = torch.tensor([p + r])
            with torch.no_grad():
                z = pool.policy.model(whole[:, at:]).logits[0].float()
            tokens = whole[0, start + 1 :]
            y[start + 1 - len(p) :] = plain(z[start - at : -1], tokens, tokens).double().numpy()
        found.append(y)
    return found


# one dump for each mistake


def cases(
    policy: Policy, wanted: Callable[[str], bool] = lambda name: True, learner: Policy | None = None, *,
    more: bool = False,
) -> Iterator[Case]:  # fmt: skip
    """The healthy dump, then every mistake that this policy can have. ``learner``: the same model in another format.
    ``more``: some further forms of the same mistakes."""
    rolled, scoring = policy.roll(), learner or policy
    # A model in bf16 has its logits in bf16 on both sides.
    heads = {name: head for name, head in (HEADS | (MORE_HEADS if more else {})).items()
             if wanted(name) and name != f"logits in {policy.format}"}  # fmt: skip
    by_head = scoring.scores(rolled, {"": plain} | {name: head for name, (_, head) in heads.items()})
    pool = Pool(scoring, rolled, by_head.pop(""))
    yield Case("healthy", (), healthy := pool.dump(pool.healthy))
    for name, logps in by_head.items():
        sequences = pool.dump(logps)
        yield Case(name, heads[name][0], _missing(sequences) if "infinite" in name else _finite(sequences))
    for each in (*_forwards(pool), *of_arrays(healthy, policy.seed), *_pairs(pool), *_sampled(policy, scoring),
                 *(_further(pool) if more else ())):  # fmt: skip
        if wanted(each.name):
            yield Case(each.name, each.right, each.make(), each.temperature)


def _finite(sequences: list[Scored]) -> list[Scored]:
    """Tokens that a cut law would never have drawn are not compared."""
    return [replace(each, mask=each.mask & np.isfinite(each.learner_logp)) for each in sequences]


def _missing(sequences: list[Scored]) -> list[Scored]:
    """What is infinite is read as no number, as from a file."""
    return [replace(s, learner_logp=np.where(np.isfinite(s.learner_logp), s.learner_logp, np.nan)) for s in sequences]


def _forwards(pool: Pool) -> Iterator[Mistake]:
    healthy = pool.healthy
    yield Mistake("weights not synced", _WEIGHTS, pool.weights(noisier(0.15)))
    yield Mistake("stale by one update", ("stale", *_WEIGHTS), pool.weights(_signs(1e-3)))
    yield Mistake("adapter lost", _WEIGHTS, pool.weights(adapter(0.3)))
    yield Mistake("weights corrupt", _WEIGHTS, pool.weights(noisier(1.0)))
    if any(w.dim() == 3 for w in pool.policy.model.parameters()):  # matrices by expert
        yield Mistake("one rank of four has other experts", ("experts", *_WEIGHTS), pool.weights(_of_one_rank))
    yield Mistake("BOS missing", ("first_token", *_PROMPT), pool.prompts(lambda p: p[1:]))
    yield Mistake("prompt cut in half", ("first_token", *_PROMPT), pool.prompts(lambda p: p[len(p) // 2 :]))
    yield Mistake("dropout left on", ("nondeterministic", *_NOISE), pool.scored(dropout=0.1))
    yield Mistake("a quarter of rows of other weights", ("some_sequences",),
                  pool.mixed(lambda n: (n * 2654435761) % 4294967296 < 2**30, noisier(0.3)))  # fmt: skip
    yield Mistake("one rank in four of corrupt experts", ("some_sequences", "nonfinite"),
                  pool.mixed(lambda n: n % 4 == 1, _corrupt_experts))  # fmt: skip
    yield Mistake("one block of four has an old adapter", ("some_sequences",),
                  pool.mixed(lambda n: n < len(healthy) // 4, adapter(0.4)))  # fmt: skip
    yield from _in_time(pool)
    if isinstance(pool.policy, Family):
        yield from _inside(pool)


def _inside(pool: Pool) -> Iterator[Mistake]:
    """Those that reach into a model of transformers."""
    yield Mistake("adapter on the head missing", _WEIGHTS, _another_head(pool, lambda w: _low_rank("head", w, 0.4)))
    yield Mistake("a head that is not the right one", _WEIGHTS,  # another matrix of its statistics, partly right
                  _another_head(pool, lambda w: 0.5 * w + 0.5 * w.std() * _normal("untied", w.shape)))  # fmt: skip
    if any(name.endswith("inv_freq") for name, _ in pool.policy.model.named_buffers()):
        right = ("position", *_WEIGHTS, *_NOISE)
        yield Mistake("rope theta 100 times", right, lambda: _another_theta(pool, 100.0))
    yield Mistake("responses' positions moved by 3", ("onset", *_PROMPT), pool.scored(move=3))
    yield Mistake("padding without a mask", ("padding", *_PROMPT), pool.scored(left=True))
    yield Mistake("a cache dropped", ("onset",), lambda: _last(pool))
    yield Mistake("a page lost from one token on", ("onset",), lambda: pool.dump(_lost_page(pool)))
    yield Mistake("a page lost from one token on, and the end token otherwise", ("onset+end_token", "end_token+onset"),
                  lambda: pool.dump([_ended(y) for y in _lost_page(pool)]))  # fmt: skip


def _in_time(pool: Pool) -> Iterator[Mistake]:
    """Dumps of several steps, whose versions of weights are known: every other prompt is of the later ones."""
    late = [group % 2 == 1 for group in pool.rolled.groups]

    def after(change: Change, versions: Callable[[bool], tuple[int, int]]) -> Callable[[], list[Scored]]:
        def made() -> list[Scored]:
            rows = zip(pool.mixed(late.__getitem__, change)(), map(versions, late), strict=True)
            return [replace(row, rollout_version=x, learner_version=y) for row, (x, y) in rows]

        return made

    synced = ("after_sync",)
    yield Mistake("adapter lost after a sync", synced, after(adapter(0.3), lambda bad: (int(bad), int(bad))))
    yield Mistake("weights corrupt after a sync", synced, after(noisier(1.0), lambda bad: (int(bad), int(bad))))
    yield Mistake("half of the prompts stale by one update", ("stale",), after(_signs(3e-3), lambda bad: (5 - bad, 5)))


Edit = Callable[[Array], Array]


def _edited(rows: Sequence[Scored], edit: Edit) -> Callable[[], list[Scored]]:
    return lambda: [replace(row, learner_logp=edit(row.learner_logp.copy())) for row in rows]


def _added(place: int, by: float) -> Edit:
    def edit(y: Array) -> Array:
        y[place] += by
        return y

    return edit


def _filled(value: float, start: int, stop: int) -> Edit:
    return lambda y: np.where((np.arange(len(y)) >= start) & (np.arange(len(y)) < stop), value, y)


def of_arrays(rows: list[Scored], seed: int = 0) -> Iterator[Mistake]:
    """What goes wrong after the log-probs are there, in any healthy dump."""
    draw = np.random.default_rng(31 + seed)

    def permuted(within: bool, share: float) -> Callable[[], list[Scored]]:
        def made() -> list[Scored]:
            order, groups = np.arange(len(rows)), np.array([row.group for row in rows])
            for block in [np.flatnonzero(groups == group) for group in dict.fromkeys(groups)] if within else [order]:
                moved = block[draw.random(len(block)) < share]
                order[moved] = np.roll(moved, 1) if within else draw.permutation(moved)
            found = []
            for row, other in zip(rows, order, strict=True):  # of a padded table: cut, or filled with what padding has
                y, width = rows[other].learner_logp, len(row.mask)
                found.append(replace(row, learner_logp=np.append(y, np.full(max(0, width - len(y)), -7.5))[:width]))
            return found

        return made

    def overflow(y: Array) -> Array:
        if draw.random() < 0.2:
            y[int(draw.integers(0, len(y))) :] = np.nan
        return y

    yield Mistake("shifted to the left", ("shift",), _edited(rows, lambda y: np.roll(y, -1)))
    yield Mistake("shifted to the right", ("shift",), _edited(rows, lambda y: np.roll(y, 1)))
    yield Mistake("rows shuffled in the batch", ("rows",), permuted(False, 1.0))
    yield Mistake("half of the rows shuffled", ("rows",), permuted(False, 0.5))
    yield Mistake("rows rolled within a prompt", ("rows",), permuted(True, 1.0))
    yield Mistake("base-2 logarithm", ("units",), _edited(rows, lambda y: y / np.log(2)))
    yield Mistake("negated", ("not_logprobs",), _edited(rows, lambda y: -y))
    yield Mistake("probabilities", ("not_logprobs",), _edited(rows, np.exp))
    yield Mistake("overflow in one side", ("nonfinite",), _edited(rows, overflow))
    yield Mistake("end token otherwise", ("end_token",), _edited(rows, _added(-1, -3.0)))
    yield Mistake("first token otherwise", ("first_token",), _edited(rows, _added(0, -3.0)))
    yield Mistake("printed with 2 decimals", ("coarse_logprobs",), _edited(rows, lambda y: np.round(y, 2)))
    yield Mistake("a tool's answer not scored", ("unscored",), _edited(rows, _filled(0.0, 5, 11)))


def more_arrays(rows: list[Scored]) -> Iterator[Mistake]:
    """Further forms of the same."""
    draw = np.random.default_rng(41)

    def flipped(y: Array) -> Array:
        """At few tokens another network scored, as where routers disagree: the log-odds moved by 1.5 nats."""
        odds = y - np.log(np.maximum(-np.expm1(np.minimum(y, -1e-9)), 1e-9)) + draw.normal(0, 1.5, len(y))
        return np.where(draw.random(len(y)) < 0.01, -np.logaddexp(0, -odds), y)

    yield Mistake("shifted by two", ("shift",), _edited(rows, lambda y: np.roll(y, -2)))
    yield Mistake("base-10 logarithm", ("units",), _edited(rows, lambda y: y / np.log(10)))
    yield Mistake("exported in bf16", ("coarse_logprobs",), _edited(
        rows, lambda y: torch.tensor(y).bfloat16().double().numpy()))  # fmt: skip
    yield Mistake("end token masked", ("end_token",), _edited(rows, lambda y: np.append(y[:-1], 0.0)))
    yield Mistake("no numbers where a tool answered", ("unscored",), _edited(rows, _filled(np.nan, 5, 11)))
    yield Mistake("routers that disagree", ("experts",), _edited(rows, flipped))


def _further(pool: Pool) -> Iterator[Mistake]:
    yield from more_arrays(pool.dump(pool.healthy))
    yield Mistake("template applied twice", ("first_token", *_PROMPT), pool.prompts(lambda p: [*p[:2], *p]))
    if not isinstance(pool.policy, Family):
        right = ("position", "prompt", "nondeterministic", *_WEIGHTS, *_NOISE)
        yield Mistake("rotary table in fp8", right, pool.scored(rope=torch.float8_e4m3fn))


def _ended(y: Array) -> Array:
    return np.concatenate([y[:-1], y[-1:] - 3.0])


def _pairs(pool: Pool) -> Iterator[Mistake]:
    """Two mistakes at once."""

    def quarter() -> list[Scored]:
        heads = {"": at_temperature(1.3)}
        good = pool.policy.scores(pool.rolled, heads)[""]
        with pool.policy.changed(noisier(0.4)):
            bad = pool.policy.scores(pool.rolled, heads)[""]
        return pool.dump([b if n % 4 == 2 else g for n, (b, g) in enumerate(zip(bad, good, strict=True))])

    yield Mistake("end token otherwise, and base 2", ("units+end_token",),
                  lambda: pool.dump([_ended(y) / np.log(2) for y in pool.healthy]))  # fmt: skip
    yield Mistake("temperature 1.3, and a quarter of rows of other weights", ("temperature+some_sequences",), quarter)


def _sampled(policy: Policy, scoring: Policy) -> Iterator[Mistake]:
    """Those whose samples are themselves of another law, or whose decoding differs."""

    def of(t: float, scored: float, edit: Edit = lambda y: y, **how: Any) -> Callable[[], list[Scored]]:
        def made() -> list[Scored]:
            rolled = policy.roll(t, seed=9, **how)
            return dump(rolled, [edit(y) for y in scoring.scores(rolled, {"": at_temperature(scored)})[""]])

        return made

    yield Mistake("healthy at 0.7", (), of(0.7, 0.7), 0.7)
    yield Mistake("temperature 0.7 left out", ("temperature",), of(0.7, 1.0), 0.7)
    yield Mistake("temperature 0.7 twice", ("temperature",), of(0.7, 0.49), 0.7)
    yield Mistake("top-p 0.9 of the sampler alone", ("support",), of(1.0, 1.0, top_p=0.9))
    yield Mistake("top-k 20 of the sampler alone", ("support",), of(1.0, 1.0, top_k=20))
    if isinstance(policy, Family):  # our engine's log-probs are always of the law that it samples from
        yield Mistake("top-p 0.9 drawn, log-probs of the whole law", (), of(1.0, 1.0, top_p=0.9, whole=True))
    yield Mistake("keys and values in fp8 where it decodes", ("position", *_NOISE),
                  of(1.0, 1.0, cache_format=torch.float8_e4m3fn))  # fmt: skip
    yield Mistake("temperature left out, and the end token otherwise", ("temperature+end_token",),
                  of(0.7, 1.0, _ended), 0.7)  # fmt: skip


# what engines and trainers do


def engine_cases(family: Family, learner: Family | None = None) -> Iterator[Case]:
    """What engines and trainers do to one side, and the healthy dump. ``learner``: the same model in another format."""
    scoring, rolled = learner or family, family.roll()
    pool = Pool(scoring, rolled, scoring.plain(rolled))
    yield Case("healthy", (), pool.dump(pool.healthy))
    yield from _fillers(pool)
    yield from _encoded_again(pool)
    yield from _ruled_out(family, scoring)
    yield from _updated(pool)


def _fillers(pool: Pool) -> Iterator[Case]:
    draw = np.random.default_rng(5)

    def filled(value: float, where: Callable[[int], Array], both: bool = False) -> list[Scored]:
        found = []
        for row in pool.dump(pool.healthy):
            at = where(len(row.mask))
            x, y = row.rollout_logp.copy(), row.learner_logp.copy()
            x[at] = value
            if both:
                y[at] = value
            found.append(replace(row, rollout_logp=x, learner_logp=y))
        return found

    def span(n: int) -> Array:
        start = int(draw.integers(1, n - 6))
        return np.arange(start, start + 5) if draw.random() < 0.4 else np.arange(0)

    def scattered(n: int) -> Array:
        return np.flatnonzero(draw.random(n) < 0.03)

    yield Case("-9999 in spans", ("unscored",), filled(-9999.0, span))
    yield Case("-1e9 here and there", ("unscored",), filled(-1e9, scattered))
    yield Case("-100 in spans", ("unscored",), filled(-100.0, span))
    yield Case("the lowest fp32 here and there", ("unscored",), filled(float(np.finfo(np.float32).min), scattered))
    yield Case("-1e38 at first tokens", ("unscored",), filled(-1e38, lambda n: np.arange(int(draw.random() < 0.5))))
    yield Case("log 1e-10 in spans", ("unscored",), filled(float(np.log(np.float32(1e-10))), span))
    yield Case("-9999 at last tokens", ("end_token",), filled(-9999.0, lambda n: np.array([n - 1])))
    yield Case("-9999 on both sides", (), filled(-9999.0, span, both=True))


def _encoded_again(pool: Pool) -> Iterator[Case]:
    """A text that is encoded again has, from a token on, one token more or less."""
    words, rolled = pool.policy.model.config.vocab_size, pool.rolled

    def made(by: int, share: float) -> list[Scored]:
        draw = np.random.default_rng(11 + by)
        responses = []
        for r in rolled.responses:
            at, new = int(draw.integers(3, max(4, len(r) - 8))), draw.integers(3, words, 2).tolist()
            other = r[:at] + new[: 1 if by < 0 else 2] + r[at + (2 if by < 0 else 1) :]
            responses.append([*other, 2][: len(r)] if draw.random() < share else r)
        again = pool.policy.plain(replace(rolled, responses=responses))
        same = [a == b for a, b in zip(responses, rolled.responses, strict=True)]
        return pool.dump([y if own else z for y, z, own in zip(pool.healthy, again, same, strict=True)])

    yield Case("one token more from a place on, in a quarter", ("moved_from",), made(1, 0.27))
    yield Case("one token less from a place on, in half", ("moved_from",), made(-1, 0.5))


def _ruled_out(family: Family, scoring: Family) -> Iterator[Case]:
    words = family.model.config.vocab_size
    drawn = torch.tensor([token for row in family.roll().responses for token in row])
    usual = torch.bincount(drawn, minlength=words).argsort(descending=True)[:12]  # what is drawn most

    def without(ids: Tensor, by: float = -torch.inf) -> Callable[[Tensor, int], Tensor]:
        return lambda z, at: z.index_fill(1, ids, by) if by == -torch.inf else z.index_add(
            1, ids, torch.full((len(z), len(ids)), by))  # fmt: skip

    def only(ids: Tensor) -> Callable[[Tensor, int], Tensor]:
        kept = torch.full((words,), -torch.inf).index_fill(0, ids, 0.0)
        return lambda z, at: z + kept

    def guided(z: Tensor, at: int) -> Tensor:
        return z if at % 3 else only(torch.arange(at * 7 % 100, words, 3))(z, at)

    def of(law: Callable[[Tensor, int], Tensor], end: int = 2) -> list[Scored]:
        rolled = family.roll(seed=3, law=law, end=end)
        return dump(rolled, scoring.plain(rolled))

    end = int(usual[0])

    def at_least(n: int) -> Callable[[Tensor, int], Tensor]:
        return lambda z, at: without(torch.tensor([end]))(z, at) if at < n else z

    ruled = ("support",)
    yield Case("min_tokens 8", ("min_tokens",), of(at_least(8), end))
    yield Case("min_tokens 14", ("min_tokens",), of(at_least(14), end))
    yield Case("five usual words banned", ruled, of(without(usual[1:6])))
    yield Case("two less usual words banned", ruled, of(without(usual[8:10])))
    yield Case("a twentieth of the words banned", ruled, of(without(torch.arange(7, words, 20))))
    yield Case("a fifth of the words allowed", ruled, of(only(torch.arange(3, words, 5))))
    yield Case("guided at every third token", ruled, of(guided))
    yield Case("logit bias of -100 on eight words", ruled, of(without(usual[2:10], -100.0)))
    yield Case("logit bias of +4 on one word", ("logit_bias",), of(without(usual[3:4], 4.0)))
    yield Case("logit bias of -3 on six words", ("logit_bias", *ruled), of(without(usual[1:7], -3.0)))


def _updated(pool: Pool) -> Iterator[Case]:
    """Weights are exchanged while sequences are sampled, at a token of each one's own; keys and values of the old."""
    right = ("mid_sequence",)
    for strength in (0.03, 0.1):
        newer = pool.policy.under(pool.rolled, noisier(strength))
        draw = np.random.default_rng(23)
        places = [int(draw.integers(0, 2 * len(r))) for r in pool.rolled.responses]  # half of them end before
        mixed = [np.concatenate([y[:at], z[at:]]) for y, z, at in zip(pool.healthy, newer, places, strict=True)]
        yield Case(f"an update of {strength:g} on the way, scored by the older", right,
                   dump(pool.rolled, pool.healthy, mixed))  # fmt: skip
        with pool.policy.changed(noisier(strength)):
            second = pool.policy.roll(seed=8)
            own = pool.policy.plain(second)
        older = pool.policy.plain(second)
        places = [int(draw.integers(0, len(r))) for r in second.responses]
        mixed = [np.concatenate([z[:at], x[at:]]) for z, x, at in zip(older, second.logps, places, strict=True)]
        yield Case(f"an update of {strength:g} on the way, scored by the newer", right, dump(second, own, mixed))
