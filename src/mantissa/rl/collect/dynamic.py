"""Which groups carry a gradient, and what a response that is too long costs.

**The price of length** (``OverlongConfig``): a response that is cut off earns nothing however good its beginning was,
which punishes sound reasoning without saying why. A penalty that grows over the last tokens says it. It is added to the
reward that advantages are made of; the verdict (``Reward.correct``), and with it every accuracy, knows nothing of it.

**Dynamic sampling** (``DynamicConfig``): a group whose rewards are all equal has advantages of exactly 0. It costs its
share of the batch and teaches nothing, and as a policy improves most groups become so. Dynamic sampling drops them and
samples further prompts until the batch is full, so that every step learns from as many groups. What is kept is the
first ``rollout.prompts`` good groups in the order of the prompts, not of completion: short responses are not favoured.
Groups beyond them (the surplus of the last generation batch) are dropped as well; a later step would train on them with
older weights.

Accuracy over what was trained on is then pulled towards one half, and says little. ``reward/accuracy`` is over
everything sampled; ``reward/accuracy_trained`` is the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from mantissa.base.errors import MantissaError
from mantissa.rl.config.sections import DynamicConfig, OverlongConfig
from mantissa.tasks import Reward


def overlong_penalty(length: int, max_tokens: int, config: OverlongConfig | None) -> float:
    """The penalty (0 or less) of a response of ``length`` tokens, its stop token included; 0 without ``config``."""
    if config is None:
        return 0.0
    excess = length - (max_tokens - config.buffer)
    return -excess / config.buffer * config.factor if excess > 0 else 0.0


def with_penalty(reward: Reward, penalty: float) -> Reward:
    """``reward`` with the penalty in its value and the same verdict; the very same one where there is none.

    Its terms are those of the reward without the penalty, which an advantage of each term by itself does not go with.
    """
    return replace(reward, value=reward.value + penalty) if penalty else reward


Fate = Literal["kept", "all_right", "all_wrong", "equal"]


def fate(graded: Sequence[Reward], shaped: Sequence[Reward]) -> Fate:
    """Whether a group is kept, and if not why.

    Kept where its rewards differ as the verifier gave them (``graded``) and as advantages see them (``shaped``), both
    in fp32, as the learner compares them. So a group of wrong answers is not kept for its lengths alone, nor one whose
    penalties happen to even its rewards out. ``all_right``, ``all_wrong``: by the verdicts; ``equal``: some of each.
    """
    if all(len({np.float32(reward.value) for reward in rewards}) > 1 for rewards in (graded, shaped)):
        return "kept"
    right = sum(reward.correct for reward in graded)
    return "all_wrong" if right == 0 else "all_right" if right == len(graded) else "equal"


def groups_to_train(fates: Sequence[Fate], wanted: int, config: DynamicConfig) -> list[int]:
    """The groups to train on, once enough are kept or the tries are used up: the first ``wanted`` that were kept.

    Fewer are an error, or with ``when_exhausted: continue`` what there is. Where that is none at all, the first
    ``wanted`` groups stand in: they carry no gradient, so the step measures and moves nothing.
    """
    kept = [index for index, fate_ in enumerate(fates) if fate_ == "kept"][:wanted]
    if len(kept) < wanted and config.when_exhausted == "error":
        count = Counter(fates)
        raise MantissaError(
            f"rollout.dynamic: {len(kept)} of {wanted} groups have a gradient after {config.max_generation_batches} "
            f"generation batches ({len(fates)} prompts: {count['all_right']} all right, {count['all_wrong']} all "
            f"wrong, {count['equal']} with equal rewards); use easier or harder prompts, raise max_generation_batches, "
            "or set rollout.dynamic.when_exhausted=continue"
        )
    return kept or list(range(min(wanted, len(fates))))


def dynamic_metrics(fates: Sequence[Fate], trained: int, generation_batches: int) -> dict[str, float]:
    """How much was sampled for ``trained`` groups that were kept, and what became of the others."""
    count = Counter(fates)
    return {
        "dynamic/generation_batches": generation_batches,
        "dynamic/prompts": len(fates),
        "dynamic/kept_fraction": count["kept"] / len(fates),
        "dynamic/surplus": count["kept"] - trained,
        "dynamic/trained": trained,
    } | {f"dynamic/{name}": count[name] for name in ("all_right", "all_wrong", "equal")}
