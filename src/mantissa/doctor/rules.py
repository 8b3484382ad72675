"""What only one side's law obeys: words that are ruled out, an end that may not come yet, a bias on some words.

**One side only.** A law that leaves words out shares their probability among the others: wherever it differs, its
log-prob is the larger one. No error does so. Of a law p that a law q estimates with an error of the logits, differences
of +a are exp(-a) times as frequent as those of -a or exp(a) times, by which of the two was sampled from: the rarer sign
has 1 / (1 + exp a) of them at the least. So of tokens that differ by a_i, the sum of these is expected to have the
other sign. A word counts once, for what other weights do to it they do wherever it stands; and what differs by more
than 1.5 nats is not counted, for there one sign alone is likely.

Legend: N tokens, V different words among those that differ far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mantissa.doctor.chances import poisson_up_to
from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence, few, untested
from mantissa.doctor.facts import COUNTED, FEWEST, NOISE, ONE_SIDED, WORDS, of
from mantissa.doctor.sample import SIDES, Array, Tokens


@dataclass(frozen=True)
class OneSided:
    """Of tokens that differ far (``far``, bool [N]): ``above``, the side whose log-probs are the larger at most words;
    ``others``, the words of which the other side's are; ``wrong``, tokens whose sign is not their word's; ``p`` of as
    few such words as ``others`` in an error."""

    far: Array
    above: str
    others: Array
    wrong: int
    words: int
    p: float


def one_sided(t: Tokens, word_N: Array, usual: float) -> OneSided:
    """Of which sign the differences are that are far beyond noise."""
    squares = [float(np.square(t.u[part]).sum()) for part in (t.d < 0, t.d > 0)]
    noise = float(np.sqrt(min(squares) / max(int((t.d < 0 if squares[0] < squares[1] else t.d > 0).sum()), 1)))
    far = np.abs(t.u) > min(ONE_SIDED[0] * usual, max(ONE_SIDED[1] * noise, ONE_SIDED[2] * usual))
    words, word = np.unique(word_N[far], return_inverse=True)
    d, count = t.d[far], np.maximum(np.bincount(word, minlength=len(words)), 1)
    down = np.bincount(word, d < 0, len(words)) > count / 2
    most_down = bool(down.sum() * 2 >= len(words))
    wrong = int(((d < 0) != down[word]).sum())
    counted = np.abs(d) < COUNTED
    rarer = np.bincount(word, np.where(counted, 1 / (1 + np.exp(np.minimum(np.abs(d), 50.0))), 0.0), len(words)) / count
    known = np.bincount(word, counted, len(words)) > 0
    others = (down != most_down) & known
    p = poisson_up_to(int(others.sum()), float(rarer[known].sum())) if known.sum() >= WORDS else 1.0
    return OneSided(far, SIDES[not most_down], words[down != most_down], wrong, len(words), p)


def is_noise(t: Tokens, usual: float) -> bool:
    """Whether what is of the wrong sign is noise."""
    return t.size <= usual and float(np.abs(t.u).max(initial=0.0)) <= NOISE * max(usual, 1e-6)


def min_tokens(e: Evidence, tests: int) -> Finding:
    """One side is above at the first tokens alone, where no sequence ends; the end's probability went to the others.

    H0: the tokens that differ far fall among the first by chance.
    """
    t = e.clean.telling
    if t.units < FEWEST:
        return few("min_tokens", t.units)
    found = one_sided(t, e.texts[e.places[e.telling]], e.usual)
    until = int(t.position[found.far].max(initial=-1)) + 1
    ends = e.all.position[e.all.left == 0]
    early = t.position < until
    if until < of("min_tokens").tokens or early.all() or found.words < WORDS:
        return untested("min_tokens", "no first tokens differ from the others")
    sign = -1.0 if found.above == SIDES[0] else 1.0
    quiet = is_noise(t.where(early & (sign * t.d < 0)), e.usual) and is_noise(t.where(~early), e.usual)
    holds = quiet and not len(found.others) and not found.wrong and int(ends.min(initial=until)) >= until - 1
    count, share = int(found.far.sum()), float(early.mean())
    p = max(found.p, min(1.0, share**count * until))
    said = f"the {found.above}'s log-probs are above at {count} of the first {until} tokens, and nowhere else"
    rest = np.where((e.clean.position < until) & (sign * e.clean.d > 0), 0.0, e.clean.d)
    return Finding("min_tokens", True, p if holds else 1.0, float(until), "tokens", None, said, rest=rest)


def logit_bias(e: Evidence, tests: int) -> Finding:
    """d = log Z - b at words of a bias b and log Z elsewhere: a few words differ to one side, all others to the other.

    Z, the sum of the biased law, is on one side of 1 where all biases have one sign.
    """
    t, b = e.clean.telling, of("logit_bias")
    if t.units < FEWEST:
        return few("logit_bias", t.units)
    word = e.texts[e.places[e.telling]]
    found = one_sided(t, word, e.usual)
    if found.words < WORDS or not len(found.others):
        return untested("logit_bias", "no words differ to one side while others differ to the other")
    own = np.isin(word, found.others)
    sign = np.where(own, -1.0, 1.0) * (-1.0 if found.above == SIDES[0] else 1.0)
    few_words = len(found.others) <= max(1.0, b.words * found.words) and (own & found.far).sum() >= b.fewest
    pure = found.wrong <= (1 - b.pure) * found.far.sum()
    holds = few_words and pure and is_noise(t.where(sign * t.d < 0), b.noise * e.usual)
    listed = ", ".join(map(str, found.others[:5].tolist())) + ", ..." * (len(found.others) > 5)
    said = (f"at {len(found.others)} words (ids {listed}) the {found.above}'s log-probs are below the other side's, at "
            f"{found.words - len(found.others)} others that differ far they are above")  # fmt: skip
    words, down = e.texts[e.places], e.clean.d < 0 if found.above == SIDES[1] else e.clean.d > 0
    own = np.isin(words, found.others)
    rest = np.where(own == down, 0.0, e.clean.d)
    at = np.flatnonzero(own & e.telling)
    # A bias moves a word's log-odds by one number: what other sequences foretell is explained, and no sign alone.
    odds, sequence = logit(e.clean.y[at]) - logit(e.clean.x[at]), e.clean.sequence[at]
    by, told = foretold(words[at], odds, sequence)
    rest[at[told]] = e.clean.y[at[told]] + np.logaddexp(0.0, -logit(e.clean.x[at[told]]) - by[told])
    return Finding("logit_bias", True, found.p if holds else 1.0, len(found.others) / found.words, "of words", None,
                   said, rest=rest)  # fmt: skip


def foretold(key: Array, value: Array, sequence: Array) -> tuple[Array, Array]:
    """float64 [N] and bool [N]: the mean of the same key's values in other sequences, where there are any."""
    _, key = np.unique(key, return_inverse=True)
    _, cell = np.unique(np.stack([key, sequence]), axis=1, return_inverse=True)
    cell = cell.reshape(-1)
    sums, counts = (np.bincount(key, each)[key] - np.bincount(cell, each)[cell] for each in (value, np.ones(len(key))))
    return sums / np.maximum(counts, 1), counts > 0


def logit(x: Array) -> Array:
    """log(p / (1 - p)) of log p."""
    clipped = np.minimum(x, -1e-9)
    return clipped - np.log(-np.expm1(clipped))
