"""Mistakes of known kind in rollouts and scores of transformers' models (``doctor_strangers.py``): a dump for each.

A ``Case`` says which signatures name its mistake. Where log-probs alone cannot tell it from another, ``right`` holds
both, and an answer that names the pair and what decides is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from doctor_strangers import Array, Family, Head, Rolled, cut, dump, plain, roll, scores
from torch import Tensor

from mantissa.doctor.dump import Scored

_WEIGHTS = ("weights",)
_PROMPT = ("prompt",)
_NOISE = ("too_large",)  # dropout, or a coarser cache or rotary table: log-probs cannot tell them apart

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


HEADS: dict[str, tuple[tuple[str, ...], Head]] = {
    "temperature 0.7": (("temperature",), lambda z, t, b: plain(z / 0.7, t, b)),
    "temperature 1.3": (("temperature",), lambda z, t, b: plain(z / 1.3, t, b)),
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


# mistakes in the weights or the forward


@contextlib.contextmanager
def _weights(family: Family, change: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """Every parameter that ``change`` gives another value has it here."""
    kept = {}
    for name, weight in family.model.named_parameters():
        made = change(name, weight.detach().float())
        if made is not None:
            kept[name], weight.data = weight.data, made.to(weight.dtype)
    try:
        yield
    finally:
        for name, weight in family.model.named_parameters():
            if name in kept:
                weight.data = kept[name]


def _normal(name: str, shape: Any, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(map(ord, name))))


def noisier(strength: float) -> Callable[[str, Tensor], Tensor | None]:
    return lambda name, w: w + strength * w.std() * _normal(name, w.shape) if w.dim() >= 2 else None


def _inner(name: str, w: Tensor) -> bool:
    """A matrix of a layer, and not a router's, the embedding or the head."""
    inner = "layers." in name or ".h." in name
    return w.dim() >= 2 and inner and "gate.weight" not in name and "router" not in name


def adapter(scale: float) -> Callable[[str, Tensor], Tensor | None]:
    """What an adapter of rank 4 adds to every matrix of the layers."""

    def change(name: str, w: Tensor) -> Tensor | None:
        if not _inner(name, w):
            return None
        a, b = _normal(name, (*w.shape[:-1], 4)), _normal(name + "b", (4, w.shape[-1]))
        return w + scale * w.std() * (a @ b) / 2

    return change


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


def _has(family: Family, what: str) -> bool:
    """Whether the model has ``experts`` (matrices by expert) or a ``rope`` table of frequencies."""
    if what == "experts":
        return any(w.dim() == 3 for w in family.model.parameters())
    return any(name.endswith("inv_freq") for name, _ in family.model.named_buffers())


def by_weights(family: Family, rolled: Rolled, change: Callable[[str, Tensor], Tensor | None]) -> list[Array]:
    with _weights(family, change):
        return scores(family, rolled, {"": plain})[""]


def _head_adapter(family: Family, rolled: Rolled) -> list[Array]:
    """What a head's adapter adds, missing on one side; a tied one is added to the logits alone."""
    head = family.model.get_output_embeddings()
    kept, w = head.weight, head.weight.detach().float()
    a, b = _normal("head", (w.shape[0], 4)), _normal("headb", (4, w.shape[1]))
    try:
        head.weight = torch.nn.Parameter((w + 0.4 * w.std() * (a @ b) / 2).to(w.dtype).to(kept.dtype), False)
        return scores(family, rolled, {"": plain})[""]
    finally:
        head.weight = kept


def _untied(family: Family, rolled: Rolled) -> list[Array]:
    """A head that was to be the embedding (or was not) is another matrix of its statistics, partly right."""
    head = family.model.get_output_embeddings()
    kept, w = head.weight, head.weight.detach().float()
    try:
        head.weight = torch.nn.Parameter((0.5 * w + 0.5 * w.std() * _normal("untied", w.shape)).to(kept.dtype), False)
        return scores(family, rolled, {"": plain})[""]
    finally:
        head.weight = kept


def _rope(family: Family, rolled: Rolled, factor: float) -> list[Array]:
    """Rotary frequencies of another theta: theta^(-2i/d) with theta times ``factor``."""
    tables = [(m, name) for m in family.model.modules() for name, _ in m.named_buffers(recurse=False)
              if name.endswith("inv_freq")]  # fmt: skip
    kept = [getattr(m, name) for m, name in tables]
    try:
        for (m, name), table in zip(tables, kept, strict=True):
            setattr(m, name, table * factor ** -(torch.arange(len(table)) / len(table)))
        return scores(family, rolled, {"": plain})[""]
    finally:
        for (m, name), table in zip(tables, kept, strict=True):
            setattr(m, name, table)


def _dropout(family: Family, rolled: Rolled, rate: float) -> list[Array]:
    """Dropout after every down projection of attention and of the feed-forward layers."""

    def drop(module: Any, inputs: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return (torch.nn.functional.dropout(out[0], rate), *out[1:])
        return torch.nn.functional.dropout(out, rate)

    torch.manual_seed(4)
    hooks = [m.register_forward_hook(drop) for n, m in family.model.named_modules()
             if n.endswith(("self_attn", "mlp", "block_sparse_moe", "attention"))]  # fmt: skip
    try:
        return scores(family, rolled, {"": plain})[""]
    finally:
        for hook in hooks:
            hook.remove()


def _last(family: Family, rolled: Rolled, keep: int) -> list[Array]:
    """Log-probs of a forward that sees only the last ``keep`` tokens at every place: a cache that was dropped."""
    found = []
    for p, r in zip(rolled.prompts, rolled.responses, strict=True):
        whole = p + r
        windows = torch.tensor([whole[at - keep : at] for at in range(max(len(p), keep), len(whole))])
        with torch.no_grad():
            z = family.model(windows).logits[:, -1].float()
        y = plain(z, torch.tensor(whole[len(whole) - len(z) :]), windows).double().numpy()
        found.append(np.concatenate([np.full(len(r) - len(y), np.nan), y]))
    return found


def _from_token(family: Family, rolled: Rolled, healthy: list[Array], at: int) -> list[Array]:
    """From token ``at`` of the whole sequence on, the keys and values before ``at`` are gone (a page, a chunk)."""
    found = []
    for p, r, y in zip(rolled.prompts, rolled.responses, healthy, strict=True):
        start, y = max(at, len(p)), y.copy()  # within the response
        whole = torch.tensor([p + r])
        if start < len(p) + len(r) - 1:
            begin = min(at, start)
            with torch.no_grad():
                z = family.model(whole[:, begin:]).logits[0].float()
            tokens = whole[0, start + 1 :]
            y[start + 1 - len(p) :] = plain(z[start - begin : -1], tokens, tokens).double().numpy()
        found.append(y)
    return found


# one dump for each mistake


@dataclass(frozen=True)
class Case:
    """``right``: the signatures that name it; empty: healthy, as are log-probs of the whole law where
    the samples alone are cut (``--model`` sees that). ``temperature``: what the dump says was sampled at.
    """

    name: str
    right: tuple[str, ...]
    sequences: list[Scored]
    temperature: float = 1.0


def cases(
    family: Family, wanted: Callable[[str], bool] = lambda name: True, learner: Family | None = None
) -> Iterator[Case]:
    """The healthy dump, then every mistake that this family can have. ``learner``: the same model in another format."""
    rolled, scoring = roll(family), learner or family
    # A model in bf16 has its logits in bf16 on both sides.
    possible = {name: head for name, (_, head) in HEADS.items() if (family.format, name) != ("bf16", "logits in bf16")}
    by_head = scores(scoring, rolled, {"": plain, **{name: head for name, head in possible.items() if wanted(name)}})
    healthy = by_head.pop("")
    yield Case("healthy", (), dump(rolled, healthy))
    for name, logps in by_head.items():
        sequences = dump(rolled, logps)
        yield Case(name, HEADS[name][0], _missing(sequences) if "infinite" in name else _finite(sequences))
    for name, right, made in (*_forwards(scoring, rolled, healthy), *_arrays(scoring, rolled, healthy),
                              *_pairs(scoring, rolled, healthy)):  # fmt: skip
        if wanted(name):
            yield Case(name, right, made())
    for name, right, made, temperature in _sampled(family, scoring):
        if wanted(name):
            yield Case(name, right, made(), temperature)


def _finite(sequences: list[Scored]) -> list[Scored]:
    """Tokens that a cut law would never have drawn are not compared."""
    return [replace(each, mask=each.mask & np.isfinite(each.learner_logp)) for each in sequences]


def _missing(sequences: list[Scored]) -> list[Scored]:
    """What is infinite is read as no number, as from a file."""
    return [replace(s, learner_logp=np.where(np.isfinite(s.learner_logp), s.learner_logp, np.nan)) for s in sequences]


def _forwards(family: Family, rolled: Rolled, healthy: list[Array]) -> Iterator[tuple[str, Any, Any]]:
    def weights(change: Any) -> Callable[[], list[Scored]]:
        return lambda: dump(rolled, by_weights(family, rolled, change))

    def prompts(change: Callable[[list[int]], list[int]]) -> Callable[[], list[Scored]]:
        return lambda: dump(rolled, scores(family, rolled, {"": plain},
                                           prompts=[change(p) for p in rolled.prompts])[""])  # fmt: skip

    def mixed(bad: Callable[[int], bool], change: Any) -> Callable[[], list[Scored]]:
        def made() -> list[Scored]:
            other = by_weights(family, rolled, change)
            return dump(rolled, [o if bad(n) else y for n, (o, y) in enumerate(zip(other, healthy, strict=True))])

        return made

    yield "weights not synced", _WEIGHTS, weights(noisier(0.15))
    yield "stale by one update", ("stale", *_WEIGHTS), weights(lambda n, w: w + 1e-3 * _normal(n, w.shape).sign())
    yield "adapter lost", _WEIGHTS, weights(adapter(0.3))
    yield "adapter on the head missing", _WEIGHTS, lambda: dump(rolled, _head_adapter(family, rolled))
    yield "a head that is not the right one", _WEIGHTS, lambda: dump(rolled, _untied(family, rolled))
    yield "weights corrupt", _WEIGHTS, weights(noisier(1.0))
    if _has(family, "experts"):
        yield "one rank of four has other experts", ("experts", *_WEIGHTS), weights(_of_one_rank)
    if _has(family, "rope"):
        yield "rope theta 100 times", ("position", *_WEIGHTS, *_NOISE), lambda: dump(
            rolled, _rope(family, rolled, 100.0))  # fmt: skip
    yield "responses' positions moved by 3", ("onset", *_PROMPT), lambda: dump(
        rolled, scores(family, rolled, {"": plain}, move=3)[""])  # fmt: skip
    yield "padding without a mask", ("padding", *_PROMPT), lambda: dump(
        rolled, scores(family, rolled, {"": plain}, left=True)[""])  # fmt: skip
    yield "BOS missing", ("first_token", *_PROMPT), prompts(lambda p: p[1:])
    yield "prompt cut in half", ("first_token", *_PROMPT), prompts(lambda p: p[len(p) // 2 :])
    yield "dropout left on", ("nondeterministic", *_NOISE), lambda: dump(rolled, _dropout(family, rolled, 0.1))
    yield "a cache dropped", ("onset",), lambda: dump(rolled, _first_kept(family, rolled, healthy))
    both = zip(rolled.prompts, rolled.responses, strict=True)
    at = int(np.median([len(p) + len(r) / 2 for p, r in both]))  # in a response: in a prompt it would be a cut prompt
    yield "a page lost from one token on", ("onset",), lambda: dump(
        rolled, _from_token(family, rolled, healthy, at))  # fmt: skip
    yield "a quarter of rows of other weights", ("some_sequences",), mixed(
        lambda n: (n * 2654435761) % 4294967296 < 2**30, noisier(0.3))  # fmt: skip
    yield "one rank in four of corrupt experts", ("some_sequences", "nonfinite"), mixed(
        lambda n: n % 4 == 1, _corrupt_experts)  # fmt: skip
    yield "one block of four has an old adapter", ("some_sequences",), mixed(
        lambda n: n < len(healthy) // 4, adapter(0.4))  # fmt: skip
    yield from _in_time(family, rolled, healthy)


def _in_time(family: Family, rolled: Rolled, healthy: list[Array]) -> Iterator[tuple[str, Any, Any]]:
    """Dumps of several steps, whose versions of weights are known: every other prompt is of the later ones."""
    late = [group % 2 == 1 for group in rolled.groups]

    def after(change: Any, versions: Callable[[bool], tuple[int, int]]) -> Callable[[], list[Scored]]:
        def made() -> list[Scored]:
            other = by_weights(family, rolled, change)
            rows = dump(rolled, [o if bad else y for o, y, bad in zip(other, healthy, late, strict=True)])
            numbers = [versions(bad) for bad in late]
            return [replace(s, rollout_version=x, learner_version=y)
                    for s, (x, y) in zip(rows, numbers, strict=True)]  # fmt: skip

        return made

    yield "adapter lost after a sync", ("after_sync",), after(adapter(0.3), lambda bad: (int(bad), int(bad)))
    yield "weights corrupt after a sync", ("after_sync",), after(noisier(1.0), lambda bad: (int(bad), int(bad)))
    yield "half of the prompts stale by one update", ("stale",), after(
        lambda n, w: w + 3e-3 * _normal(n, w.shape).sign(), lambda bad: (5 - bad, 5))  # fmt: skip


def _first_kept(family: Family, rolled: Rolled, healthy: list[Array]) -> list[Array]:
    found = _last(family, rolled, 1)
    return [np.concatenate([y[:1], x[1:]]) for x, y in zip(found, healthy, strict=True)]


def _arrays(family: Family, rolled: Rolled, healthy: list[Array]) -> Iterator[tuple[str, Any, Any]]:
    draw = np.random.default_rng(31 + family.seed)

    def each(change: Callable[[Array], Array]) -> Callable[[], list[Scored]]:
        return lambda: dump(rolled, [change(y.copy()) for y in healthy])

    def at(place: int, by: float) -> Callable[[Array], Array]:
        def change(y: Array) -> Array:
            y[place] += by
            return y

        return change

    def permuted(within: bool, share: float) -> Callable[[], list[Scored]]:
        def made() -> list[Scored]:
            order = np.arange(len(healthy))
            blocks = np.split(order, len(order) // family.samples) if within else [order]
            for block in blocks:
                moved = block[draw.random(len(block)) < share]
                order[moved] = np.roll(moved, 1) if within else draw.permutation(moved)
            rows = [
                healthy[other] for other in order
            ]  # rows of a padded table: cut, or filled with what padding scores
            fits = [np.concatenate([row, np.full(max(0, len(x) - len(row)), -7.5)])[: len(x)]
                    for row, x in zip(rows, healthy, strict=True)]  # fmt: skip
            return dump(rolled, fits)

        return made

    def overflow(y: Array) -> Array:
        if draw.random() < 0.2:
            y[int(draw.integers(0, len(y))) :] = np.nan
        return y

    yield "shifted to the left", ("shift",), each(lambda y: np.roll(y, -1))
    yield "shifted to the right", ("shift",), each(lambda y: np.roll(y, 1))
    yield "rows shuffled in the batch", ("rows",), permuted(False, 1.0)
    yield "half of the rows shuffled", ("rows",), permuted(False, 0.5)
    yield "rows rolled within a prompt", ("rows",), permuted(True, 1.0)
    yield "base-2 logarithm", ("units",), each(lambda y: y / np.log(2))
    yield "negated", ("not_logprobs",), each(lambda y: -y)
    yield "probabilities", ("not_logprobs",), each(np.exp)
    yield "overflow in one side", ("nonfinite",), each(overflow)
    yield "end token otherwise", ("end_token",), each(at(-1, -3.0))
    yield "first token otherwise", ("first_token",), each(at(0, -3.0))
    yield "printed with 2 decimals", ("coarse_logprobs",), each(lambda y: np.round(y, 2))
    yield "a tool's answer not scored", ("unscored",), each(
        lambda y: np.where((np.arange(len(y)) >= 5) & (np.arange(len(y)) < 11), 0.0, y))  # fmt: skip


def _pairs(family: Family, rolled: Rolled, healthy: list[Array]) -> Iterator[tuple[str, Any, Any]]:
    """Two mistakes at once."""

    def end(y: Array) -> Array:
        return np.concatenate([y[:-1], y[-1:] - 3.0])

    def quarter() -> list[Scored]:
        heads = {"": HEADS["temperature 1.3"][1]}
        good = scores(family, rolled, heads)[""]
        with _weights(family, noisier(0.4)):
            bad = scores(family, rolled, heads)[""]
        return dump(rolled, [b if n % 4 == 2 else g for n, (b, g) in enumerate(zip(bad, good, strict=True))])

    def lost() -> list[Scored]:
        both = zip(rolled.prompts, rolled.responses, strict=True)
        at = int(np.median([len(p) + len(r) / 2 for p, r in both]))
        return dump(rolled, [end(y) for y in _from_token(family, rolled, healthy, at)])

    yield "end token otherwise, and base 2", ("units+end_token",), lambda: dump(
        rolled, [end(y) / np.log(2) for y in healthy])  # fmt: skip
    yield "temperature 1.3, and a quarter of rows of other weights", ("temperature+some_sequences",), quarter
    yield "a page lost from one token on, and the end token otherwise", ("onset+end_token", "end_token+onset"), lost


def _sampled(family: Family, scoring: Family) -> Iterator[tuple[str, Any, Any, float]]:
    """Those whose samples are themselves of another law, or whose decoding differs."""

    def learner(rolled: Rolled, temperature: float) -> list[Array]:
        return scores(scoring, rolled, {"": lambda z, t, b: plain(z / temperature, t, b)})[""]

    def of(t: float, scored: float, **how: Any) -> Callable[[], list[Scored]]:
        def made() -> list[Scored]:
            rolled = roll(family, t, seed=9, **how)
            return dump(rolled, learner(rolled, scored))

        return made

    def ended() -> list[Scored]:
        rolled = roll(family, 0.7, seed=9)
        y = [np.concatenate([row[:-1], row[-1:] - 3.0]) for row in learner(rolled, 1.0)]
        return dump(rolled, y)

    fp8 = torch.float8_e4m3fn
    yield "healthy at 0.7", (), of(0.7, 0.7), 0.7
    yield "temperature 0.7 left out", ("temperature",), of(0.7, 1.0), 0.7
    yield "temperature 0.7 twice", ("temperature",), of(0.7, 0.49), 0.7
    yield "top-p 0.9 of the sampler alone", ("support",), of(1.0, 1.0, top_p=0.9), 1.0
    yield "top-k 20 of the sampler alone", ("support",), of(1.0, 1.0, top_k=20), 1.0
    yield "top-p 0.9 drawn, log-probs of the whole law", (), of(1.0, 1.0, top_p=0.9, whole=True), 1.0
    yield "keys and values in fp8 where it decodes", ("position", *_NOISE), of(1.0, 1.0, cache_format=fp8), 1.0
    yield "temperature left out, and the end token otherwise", ("temperature+end_token",), ended, 0.7


# what engines and trainers do


def engine_cases(family: Family, learner: Family | None = None) -> Iterator[Case]:
    """What engines and trainers do to one side, and the healthy dump. ``learner``: the same model in another format."""
    scoring = learner or family
    rolled = roll(family)
    healthy = scores(scoring, rolled, {"": plain})[""]
    yield Case("healthy", (), dump(rolled, healthy))
    yield from _fillers(rolled, healthy)
    yield from _encoded_again(scoring, rolled, healthy)
    yield from _ruled_out(family, scoring)
    yield from _updated(scoring, rolled, healthy)


def _fillers(rolled: Rolled, healthy: list[Array]) -> Iterator[Case]:
    draw = np.random.default_rng(5)

    def filled(value: float, where: Callable[[int], Array], both: bool = False) -> list[Scored]:
        rows = dump(rolled, healthy)
        found = []
        for row in rows:
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


def _encoded_again(family: Family, rolled: Rolled, healthy: list[Array]) -> Iterator[Case]:
    """A text that is encoded again has, from a token on, one token more or less."""
    words = family.model.config.vocab_size

    def made(by: int, share: float) -> list[Scored]:
        draw = np.random.default_rng(11 + by)
        responses = []
        for r in rolled.responses:
            at, new = int(draw.integers(3, max(4, len(r) - 8))), draw.integers(3, words, 2).tolist()
            other = r[:at] + new[: 1 if by < 0 else 2] + r[at + (2 if by < 0 else 1) :]
            responses.append([*other, 2][: len(r)] if draw.random() < share else r)
        again = scores(family, replace(rolled, responses=responses), {"": plain})[""]
        same = [a == b for a, b in zip(responses, rolled.responses, strict=True)]
        return dump(rolled, [y if own else z for y, z, own in zip(healthy, again, same, strict=True)])

    yield Case("one token more from a place on, in a quarter", ("moved_from",), made(1, 0.27))
    yield Case("one token less from a place on, in half", ("moved_from",), made(-1, 0.5))


def _probable(family: Family, rolled: Rolled, count: int) -> Tensor:
    """The ids that were drawn most."""
    drawn = torch.tensor([token for row in rolled.responses for token in row])
    return torch.bincount(drawn, minlength=family.model.config.vocab_size).argsort(descending=True)[:count]


def _ruled_out(family: Family, scoring: Family) -> Iterator[Case]:
    words, usual = family.model.config.vocab_size, _probable(family, roll(family), 12)

    def without(ids: Tensor, by: float = -torch.inf) -> Callable[[Tensor, int], Tensor]:
        return lambda z, at: z.index_fill(1, ids, by) if by == -torch.inf else z.index_add(
            1, ids, torch.full((len(z), len(ids)), by))  # fmt: skip

    def only(ids: Tensor) -> Callable[[Tensor, int], Tensor]:
        kept = torch.full((words,), -torch.inf).index_fill(0, ids, 0.0)
        return lambda z, at: z + kept

    def guided(z: Tensor, at: int) -> Tensor:
        return z if at % 3 else only(torch.arange(at * 7 % 100, words, 3))(z, at)

    def of(law: Callable[[Tensor, int], Tensor], end: int = 2) -> list[Scored]:
        rolled = roll(family, seed=3, law=law, end=end)
        return dump(rolled, scores(scoring, rolled, {"": plain})[""])

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


def _updated(family: Family, rolled: Rolled, healthy: list[Array]) -> Iterator[Case]:
    """Weights are exchanged while sequences are sampled, at a token of each one's own; keys and values of the old."""
    for strength in (0.03, 0.1):
        newer = by_weights(family, rolled, noisier(strength))
        draw = np.random.default_rng(23)
        places = [int(draw.integers(0, 2 * len(r))) for r in rolled.responses]  # half of the sequences end before
        mixed = [np.concatenate([y[:at], z[at:]]) for y, z, at in zip(healthy, newer, places, strict=True)]
        yield Case(f"an update of {strength:g} on the way, scored by the older", ("mid_sequence",),
                   dump(rolled, healthy, mixed))  # fmt: skip
        with _weights(family, noisier(strength)):
            second = roll(family, seed=8)
            own = scores(family, second, {"": plain})[""]
        older = scores(family, second, {"": plain})[""]
        places = [int(draw.integers(0, len(r))) for r in second.responses]
        mixed = [np.concatenate([z[:at], x[at:]]) for z, x, at in zip(older, second.logps, places, strict=True)]
        yield Case(
            f"an update of {strength:g} on the way, scored by the newer", ("mid_sequence",), dump(second, own, mixed)
        )
