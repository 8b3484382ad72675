"""The price of length: DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4).

A response that is cut off earns nothing however good its beginning was, which punishes sound reasoning without saying
why. A penalty that grows over the last ``buffer`` tokens says it:

    penalty = min(0, -(length - (max_tokens - buffer)) / buffer * factor)

from 0 at ``max_tokens - buffer`` tokens to ``-factor`` at ``max_tokens``. It is added to the reward that advantages are
made of; the verdict (``Reward.correct``), and with it every accuracy, knows nothing of it.
"""

from __future__ import annotations

from dataclasses import replace

from mantissa.rl.config_rollout import OverlongConfig
from mantissa.tasks import Reward


def overlong_penalty(length: int, max_tokens: int, config: OverlongConfig | None) -> float:
    """The penalty (0 or less) of a response of ``length`` tokens, its stop token included; 0 without ``config``."""
    if config is None:
        return 0.0
    excess = length - (max_tokens - config.buffer)
    return -excess / config.buffer * config.factor if excess > 0 else 0.0


def shaped(reward: Reward, penalty: float) -> Reward:
    """``reward`` with the penalty in its value and the same verdict; the very same one where there is none."""
    return replace(reward, value=reward.value + penalty) if penalty else reward
