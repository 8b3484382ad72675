"""Which groups carry a gradient: the judgement behind DAPO's dynamic sampling (arXiv 2503.14476, section 3.2).

A group whose rewards are all equal has advantages of exactly 0: it costs its share of the batch and teaches nothing,
and as a policy improves most groups become so. Dynamic sampling drops them and samples further prompts until the batch
is full, so that every step learns from as many groups. What is kept is the first ``rollout.prompts`` good groups in the
order of the prompts, not of completion: short responses are not favoured. Groups beyond them (the surplus of the last
generation batch) are dropped as well; a later step would train on them with older weights.

Which prompts a policy sees then depends on the policy: accuracy over what was trained on is pulled towards one half,
and says little. ``reward/accuracy`` is over everything sampled; ``reward/accuracy_trained`` is the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

from mantissa.errors import MantissaError
from mantissa.rl.config_rollout import DynamicConfig
from mantissa.tasks import Reward

Fate = Literal["kept", "all_right", "all_wrong", "equal"]


def fate(graded: Sequence[Reward], shaped: Sequence[Reward]) -> Fate:
    """Whether a group is kept, and if not why.

    Kept where its rewards differ as the verifier gave them (``graded``) and as advantages see them (``shaped``), both
    in fp32, as the learner compares them. So a group of wrong answers is not kept for its lengths alone, nor one whose
    penalties happen to even its rewards out. ``all_right``, ``all_wrong``: by the verdicts; ``equal``: some of each.
    """
    if _differ(graded) and _differ(shaped):
        return "kept"
    right = sum(reward.correct for reward in graded)
    return "all_wrong" if right == 0 else "all_right" if right == len(graded) else "equal"


def chosen(fates: Sequence[Fate], wanted: int, config: DynamicConfig) -> list[int]:
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
    """How much was sampled for ``trained`` groups, and what became of the others."""
    count = Counter(fates)
    return {
        "dynamic/generation_batches": generation_batches,
        "dynamic/prompts": len(fates),
        "dynamic/all_right": count["all_right"],
        "dynamic/all_wrong": count["all_wrong"],
        "dynamic/equal": count["equal"],
        "dynamic/kept_fraction": count["kept"] / len(fates),
        "dynamic/surplus": max(0, count["kept"] - trained),
        "dynamic/trained": min(count["kept"], trained),
    }


def _differ(rewards: Sequence[Reward]) -> bool:
    return len({np.float32(reward.value) for reward in rewards}) > 1
