"""The same tokens scored by two policies, as any framework may have saved them: what every part of the doctor reads.

Legend: S sequences, N response positions of all of them, d = log-prob by the learner - log-prob by the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

_WORDS = ("expert", "moe")
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Scored:
    """One sequence. T tokens, prompt included; R = T - ``prompt_length`` response positions.

    ``tokens``: int64 [T]. ``rollout_logp``, ``learner_logp``: float64 [R], nats, as they were saved; NaN where a side
    gave none. ``mask``: bool [R], False where a position is not to be compared (a tool's answer, padding).
    ``rollout_version``, ``learner_version``: of each side's weights. ``group``: what shares a prompt. ``flipped``: bool
    [R], where the two sides chose other experts. ``kept``: int64 ids of the tokens that the rollout's top-k and top-p
    left, for each position; None where nothing was cut. ``pair``: the number of its pair in the dump's ``pairs``. Each
    of the last six is None where the file does not say.
    """

    tokens: np.ndarray
    prompt_length: int
    rollout_logp: np.ndarray
    learner_logp: np.ndarray
    mask: np.ndarray
    rollout_version: int | None = None
    learner_version: int | None = None
    group: int | None = None
    flipped: np.ndarray | None = None
    kept: Sequence[np.ndarray | None] | None = None
    pair: int | None = None


@dataclass(frozen=True)
class Settings:
    """How the log-probs came to be, as far as the file says; None is "it does not say".

    ``temperature``, ``top_k`` (0 is off), ``top_p``: of the sampling; ``renormalised``: the learner's log-probs are of
    the tokens that those kept as well. ``logprobs_mode``: vLLM's word, ``raw_logprobs`` or ``processed_logprobs``.
    ``rollout_format``, ``learner_format``: names of number formats. ``experts``: whether the policy is a mixture of
    experts. ``healthy_size``: of u in the same job when it was healthy, which says more than the formats' table.
    ``soft_cap``: whether the policy caps its logits.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    logprobs_mode: str | None = None
    rollout_format: str | None = None
    learner_format: str | None = None
    renormalised: bool = False
    experts: bool | None = None
    healthy_size: float | None = None
    soft_cap: bool | None = None


@dataclass(frozen=True)
class Dump:
    """What a file or a run holds. ``framework``: who wrote it (``mantissa``, ``nemo-rl``, ..., ``plain``).

    ``path``: where it was read. ``run``: the run's folder where it is one of ours. ``notes``: what was left out.
    ``mapped``: which columns were taken for which part, of a file that is no program's that is known; else empty.
    ``pairs``: of a file that holds several policies beside one another (``mantissa gap``), each one's name and
    settings.
    """

    framework: str
    path: Path
    sequences: Sequence[Scored]
    settings: Settings = field(default_factory=Settings)
    run: Path | None = None
    notes: tuple[str, ...] = ()
    pairs: tuple[tuple[str, Settings], ...] = ()
    mapped: tuple[str, ...] = ()

    def by_pair(self) -> dict[str, Dump]:
        """The sequences of each pair by its name; the whole under "" where the file holds no pairs."""
        if not self.pairs:
            return {"": self}
        return {
            name: replace(self, sequences=[each for each in self.sequences if each.pair == n], settings=how, pairs=())
            for n, (name, how) in enumerate(self.pairs)
        }

    @property
    def whose(self) -> str:
        """Whose fields it has, in words."""
        if self.mapped:
            return "no program's fields"
        return "the plain schema" if self.framework == "plain" else self.framework

    @property
    def routed(self) -> bool:
        """Whether something says that the policy routes to experts."""
        return bool(self.settings.experts) or any(each.flipped is not None for each in self.sequences)


def routes(config: Any) -> bool | None:
    """Whether a model's configuration (an object, or the mapping of a config.json) shows experts: a number above one
    under a name that speaks of them. False where it tells its layers and no such number; None where it tells nothing.
    """
    given = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    if getattr(config, "experts", None) is not None and not isinstance(config, Mapping):
        return True
    inner = [found for each in given.values() if isinstance(each, Mapping) or hasattr(each, "to_dict")
             if (found := routes(each)) is not None]  # fmt: skip
    named = (value for name, value in given.items() if any(word in str(name) for word in _WORDS))
    if any(inner) or any(type(value) is int and value > 1 for value in named):
        return True
    return False if inner or any(name in given for name in _LAYERS) else None


def caps(config: Any) -> bool:
    """Whether a model's configuration (as for ``routes``) soft-caps its logits: cap * tanh(logits / cap)."""
    given = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    inner = (each for each in given.values() if isinstance(each, Mapping) or hasattr(each, "to_dict"))
    return any(given.get(name) for name in _CAPS) or any(map(caps, inner))
