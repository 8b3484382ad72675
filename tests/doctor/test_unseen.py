"""Faults of public reports that no set of dumps had, by a small attention policy of our own: each has a name that is
true of it, or none; never another's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

import dumps
from mantissa.doctor.diagnosis import Basis, Diagnosis, Verdict
from mantissa.doctor.dump import Scored
from mantissa.doctor.examine import examine

WORDS, WIDTH, LENGTH, SAMPLES, PROMPTS = 28, 24, 24, 4, 16
TOOL = slice(9, 12)  # a tool's answer in every response, which is not compared
Array = np.ndarray
Weights = dict[str, Array]


@dataclass(frozen=True)
class Pass:
    """How one side passes over a sequence. ``prefix``: the weights that the prompt's keys and values are of."""

    weights: Weights
    prefix: Weights | None = None
    window: int = 1000
    stretch: float = 1.0  # of positions
    begin: int = 0  # the first position
    jump: int = 0  # of positions, behind a tool's answer
    cache: float = 0.0  # the step of a grid that keys and values are on
    dropped: float = 0.0  # of the hidden states' entries
    cap: float = 0.0  # soft cap of logits
    blind: int = 0  # first tokens that are not attended to
    block: int = 0  # tokens of a block, beyond which nothing is attended to

    def logits(self, tokens: Array, prompt: int) -> Array:
        """[rows, T, WORDS] of tokens [rows, T]."""
        w, count, draw = self.weights, tokens.shape[1], np.random.default_rng(tokens.sum())
        at = np.arange(count)
        where = (self.begin + at + self.jump * (at >= prompt + TOOL.stop)) * self.stretch
        sees = (at[:, None] >= at) & (at[:, None] - at < self.window) & ((at >= self.blind) | (at == at[:, None]))
        if self.block:
            sees &= at[:, None] // self.block == at // self.block
        h, old = w["words"][tokens], None if self.prefix is None else self.prefix["words"][tokens]
        for layer in range(2):
            h = self._layer(layer, w, h, where, sees, None if old is None else (self.prefix, old, prompt))
            if old is not None:
                old = self._layer(layer, self.prefix, old, where, sees, None)
            h = h * (draw.random(h.shape) >= self.dropped) / (1 - self.dropped)
        z = h @ w["head"]
        return self.cap * np.tanh(z / self.cap) if self.cap else z

    def _layer(self, n: int, w: Weights, h: Array, where: Array, sees: Array, older: object) -> Array:
        q, k, v = (_normed(h) @ w[f"{name}{n}"] for name in "qkv")
        if isinstance(older, tuple):
            theirs, old, prompt = older
            k[:, :prompt], v[:, :prompt] = ((_normed(old) @ theirs[f"{name}{n}"])[:, :prompt] for name in "kv")
        q, k = _turned(q, where), _turned(k, where)
        if self.cache:
            k, v = (np.round(each / self.cache) * self.cache for each in (k, v))
        scores = np.where(sees, q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        h = h + p / p.sum(-1, keepdims=True) @ v @ w[f"o{n}"]
        return h + np.tanh(_normed(h) @ w[f"up{n}"]) @ w[f"down{n}"]


def _normed(h: Array) -> Array:
    return h / np.sqrt(np.square(h).mean(-1, keepdims=True) + 1e-6)


def _turned(x: Array, where: Array) -> Array:
    angle = where[:, None] * 100.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
    one, other = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([one * cos - other * sin, one * sin + other * cos], -1)


def drawn(seed: int) -> Weights:
    draw = np.random.default_rng(seed)
    shapes = {"words": (WORDS, WIDTH), "head": (WIDTH, WORDS)}
    for n in range(2):
        shapes |= {f"{name}{n}": (WIDTH, WIDTH) for name in ("q", "k", "v", "o", "up", "down")}
    return {name: draw.normal(0, 1 if name == "words" else 1.3 / np.sqrt(WIDTH), size) for name, size in shapes.items()}


def moved(w: Weights, by: float) -> Weights:
    draw = np.random.default_rng(7)
    return {name: each + by * each.std() * draw.normal(0, 1, each.shape) for name, each in w.items()}


WEIGHTS = drawn(0)
PLAIN = Pass(WEIGHTS)
Law = Callable[[Array, Array], Array]  # (log-probs [rows, WORDS], the response's tokens so far [rows, t]) -> log-probs


def normal(z: Array) -> Array:
    return z - np.logaddexp.reduce(z, -1, keepdims=True)


@functools.cache
def sampled(law: Law | None = None) -> tuple[list[tuple[Array, int]], list[Array]]:
    """Each prompt's (tokens [SAMPLES, T], prompt's length), and log-probs [SAMPLES, LENGTH] by the rollout's law."""
    draw, made, logps = np.random.default_rng(3), [], []
    for _ in range(PROMPTS):
        prompt = int(draw.integers(4, 10))
        tokens = np.tile(draw.integers(0, WORDS, prompt), (SAMPLES, 1))
        rows = []
        for _ in range(LENGTH):
            p = normal(PLAIN.logits(tokens, prompt)[:, -1])
            p = p if law is None else law(p, tokens[:, prompt:])
            word = (np.exp(p).cumsum(-1) < draw.random((SAMPLES, 1)) * (1 - 1e-9)).sum(-1)
            rows.append(p[np.arange(SAMPLES), word])
            tokens = np.concatenate([tokens, word[:, None]], 1)
        made.append((tokens, prompt))
        logps.append(np.stack(rows, 1))
    return made, logps


def scored(side: Pass, tokens: Array, prompt: int, law: Law | None = None) -> Array:
    """[rows, LENGTH]: the log-probs of a response."""
    noise = np.random.default_rng(tokens.sum() + 1)
    z = side.logits(tokens, prompt)[:, prompt - 1 : -1]
    p = normal(z + 0.01 * noise.normal(0, 1, z.shape))
    if law is not None:
        p = np.stack([law(p[:, t], tokens[:, prompt : prompt + t]) for t in range(LENGTH)], 1)
    return np.take_along_axis(p, tokens[:, prompt:, None], -1)[..., 0]


Learner = Callable[[Array, int, int], Array]  # tokens, prompt's length, the prompt's number


def by(side: Pass, law: Law | None = None) -> Learner:
    return lambda tokens, prompt, _: scored(side, tokens, prompt, law)


def with_prompt(change: Callable[[Array], Array], side: Pass = PLAIN) -> Learner:
    """The learner has another prompt than the rollout."""

    def learner(tokens: Array, prompt: int, number: int) -> Array:
        other = change(tokens[:, :prompt])
        return scored(side, np.concatenate([other, tokens[:, prompt:]], 1), other.shape[1])

    return learner


def padded(tokens: Array, prompt: int, number: int) -> Array:
    """Left padding that is attended to."""
    pads = np.zeros((len(tokens), 10 - prompt), dtype=int)
    return scored(PLAIN, np.concatenate([pads, tokens], 1), 10)


def drafted(tokens: Array, prompt: int, number: int) -> Array:
    """The draft model's log-probs, where its tokens were accepted."""
    own, draft = scored(PLAIN, tokens, prompt), scored(Pass(moved(WEIGHTS, 0.4)), tokens, prompt)
    return np.where(np.random.default_rng(number).random(own.shape) < 0.5, draft, own)


def encoded_again_late(tokens: Array, prompt: int, number: int) -> Array:
    """In a few rows what follows a place of its own is of other tokens."""
    own = scored(PLAIN, tokens, prompt)
    if number % 2:
        row, at = number % len(own), 9 + 5 * number % 11
        own[row, at:] = scored(Pass(drawn(5)), tokens, prompt)[row, at:]
    return own


def encoded_again(tokens: Array, prompt: int, number: int) -> Array:
    """Two tokens became one in every other row, and the numbers are laid side by side by their place."""
    own = scored(PLAIN, tokens, prompt)
    for row in range(number % 2, len(own), 2):
        at = 4 + (number + 5 * row) % 12
        own[row, at:-1] = own[row, at + 1 :]
    return own


def counted(x: Array, before: Array, by: float, once: bool) -> Array:
    count = np.stack([(before == word).sum(-1) for word in range(WORDS)], -1)
    return normal(x - by * (np.minimum(count, 1) if once else count))


def least(x: Array, share: float) -> Array:
    return normal(np.where(x < x.max(-1, keepdims=True) + np.log(share), -np.inf, x))


def without(x: Array, words: int) -> Array:
    return normal(np.where(np.arange(WORDS) < words, -np.inf, x))


def half(x: Array) -> Array:
    """bf16's grid."""
    step = 2.0 ** (np.floor(np.log2(np.abs(x) + 1e-12)) - 7)
    return np.round(x / step) * step


CONTEXT = ("prompt", "padding", "first_token", "onset", "position", "mid_sequence", "turn")
OTHER = ("weights", "stale", "unrelated")
# Kind: true names; the learner, beside the plain rollout.
LEARNERS: dict[str, tuple[tuple[str, ...], Learner]] = {
    "no BOS": (CONTEXT, with_prompt(lambda p: p[:, 1:])),
    "template twice": (CONTEXT, with_prompt(lambda p: np.concatenate([p, p], 1))),
    "padding attended": (CONTEXT, padded),
    "first tokens masked": (CONTEXT, by(replace(PLAIN, blind=3))),
    "positions jump after a tool": (CONTEXT, by(replace(PLAIN, jump=1))),
    "positions far apart after a tool": (CONTEXT, by(replace(PLAIN, jump=20))),
    "sliding window": (CONTEXT, by(replace(PLAIN, window=12))),
    "rope scaled": (CONTEXT, by(replace(PLAIN, stretch=0.5))),
    "rope scaled by much": (CONTEXT, by(replace(PLAIN, stretch=0.1))),
    "blocks": (CONTEXT, by(replace(PLAIN, block=16))),
    "old prompt's cache": ((*CONTEXT, *OTHER), by(replace(PLAIN, prefix=moved(WEIGHTS, 0.2)))),
    "another model's prompt cache": ((*CONTEXT, *OTHER), by(replace(PLAIN, prefix=drawn(5)))),
    "cache on a grid": ((*CONTEXT, "weights"), by(replace(PLAIN, cache=0.5))),
    "dropout": (("nondeterministic",), by(replace(PLAIN, dropped=0.1))),
    "much dropout": (("nondeterministic", "unrelated"), by(replace(PLAIN, dropped=0.4))),
    "untied head": (OTHER, by(Pass(WEIGHTS | {"head": moved(WEIGHTS, 0.3)["head"]}))),
    "another head": (OTHER, by(Pass(WEIGHTS | {"head": drawn(9)["head"]}))),
    "no second layer's output": (OTHER, by(Pass(WEIGHTS | {"o1": 0 * WEIGHTS["o1"]}))),
    "soft cap": (("soft_cap", "temperature"), by(replace(PLAIN, cap=5.0))),
    "temperature twice": (("temperature",), by(PLAIN, lambda x, _: normal(x / 0.7))),
    "padded words": (("support", "temperature"), by(PLAIN, lambda x, _: x - np.logaddexp(0, np.log(4) - 5 - x.mean(
        -1, keepdims=True)))),
    "last chunk left out": (("support", "not_logprobs", "unnormalised"), by(PLAIN, lambda x, _: x - np.logaddexp.reduce(
        x[:, :-6], -1, keepdims=True))),
    "a draft's": (("single_tokens", *OTHER), drafted),
    "encoded again": (("moved_from", "shift", "mid_sequence", "some_sequences", "onset"), encoded_again),
    "encoded again late": (("moved_from", "shift", "mid_sequence", "some_sequences", "onset"), encoded_again_late),
    "sums in half": (("half_logits", "coarse_logprobs"), by(PLAIN, lambda x, _: normal(half(x)))),
}  # fmt: skip
# Kind: true names; the rollout's law, that the learner does not know.
LAWS: dict[str, tuple[tuple[str, ...], Law]] = {
    "frequency penalty": (("repetition",), lambda x, before: counted(x, before, 0.8, once=False)),
    "presence penalty": (("repetition",), lambda x, before: counted(x, before, 1.0, once=True)),
    "min-p": (("support",), lambda x, _: least(x, 0.1)),
    "banned words": (("support", "logit_bias"), lambda x, _: without(x, 3)),
    "a bias up": (("logit_bias",), lambda x, _: normal(x + 2.0 * (np.arange(WORDS) < 2))),
    "a bias on half": (("logit_bias", "weights"), lambda x, _: normal(x + 1.0 * (np.arange(WORDS) < WORDS // 2))),
    "penalty and temperature": (
        ("repetition", "temperature"),
        lambda x, b: counted(normal(x / 0.8), b, 0.8, once=True),
    ),
}


def told(made: list[tuple[Array, int]], logps: list[Array], learner: Learner) -> Diagnosis:
    rows = []
    mask = np.ones(LENGTH, dtype=bool)
    mask[TOOL] = False
    for number, ((tokens, prompt), x) in enumerate(zip(made, logps, strict=True)):
        y = learner(tokens, prompt, number)
        rows += [Scored(*each, mask, group=number)
                 for each in zip(tokens, [prompt] * len(tokens), x, y, strict=True)]  # fmt: skip
    return examine(dumps.dump_of(rows, rollout_format="bf16", learner_format="bf16", experts=False, temperature=1.0))


def right(found: Diagnosis, names: tuple[str, ...]) -> bool:
    """Whether the name is true, or there is none; a healthy answer's own limit must be above what there is."""
    if found.fault is not None and found.verdict is Verdict.FAULT:
        return bool({found.fault.name, *found.fault.also} & set(names))
    if found.verdict is not Verdict.HEALTHY:
        return True
    size = next(each.detectable for each in found.findings if each.name == "too_large")
    return found.basis is Basis.ROUNDING and size is not None and found.figures["u_rms"] <= size


def test_the_policy_is_healthy_beside_itself() -> None:
    found = told(*sampled(), by(PLAIN))
    assert found.verdict is Verdict.HEALTHY, found.headline


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_learner_that_computes_otherwise_has_no_wrong_name(kind: str) -> None:
    names, learner = LEARNERS[kind]
    found = told(*sampled(), learner)
    assert right(found, names), found.headline


@pytest.mark.parametrize("kind", LAWS)
def test_a_rollout_of_another_law_has_no_wrong_name(kind: str) -> None:
    names, law = LAWS[kind]
    found = told(*sampled(law), by(PLAIN))
    assert right(found, names), found.headline
