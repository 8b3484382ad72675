"""Mantissa: reinforcement learning of language models in the precision you choose for each role.

What is exported here is the public interface: ``examples/rl_loop.py`` is RL in one page by these names alone, and
``docs/api.md`` explains each. Importing this package is cheap: a name's room is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mantissa.base.version import __version__

if TYPE_CHECKING:
    from mantissa.adopted import adopt
    from mantissa.algorithms import (
        CorrectionConfig,
        PPOClipConfig,
        advantage,
        aggregation_scale,
        correction,
    )
    from mantissa.base.ranks import be_deterministic
    from mantissa.base.seeds import derive_seed, generator, stream_slice
    from mantissa.dropin import PrecisionTrainer
    from mantissa.guard import GuardConfig
    from mantissa.kernels import learner_kernels, rollout_kernels
    from mantissa.kernels.roles import emulated
    from mantissa.mismatch.metrics import gap_metrics
    from mantissa.model import policy_weights
    from mantissa.precision import PrecisionPolicy
    from mantissa.rl import RunConfig, load_recipe, resume, start
    from mantissa.rl.experience import Experience
    from mantissa.rl.policy import ModelSource, load_policy
    from mantissa.rl.score import forward, forward_transformers, scatter, score
    from mantissa.rollout import NativeEngine, Request, SamplingParams
    from mantissa.rollout.transformers import TransformersEngine, load_transformers
    from mantissa.tasks import Grader, build_task
    from mantissa.training import (
        OptimizerStep,
        ScalerConfig,
        adamw,
        audit,
        distribute,
        first_nonfinite,
        learning_rate,
        scaler_for,
    )

_HOMES = {
    "adopted": ["adopt"],
    "algorithms": ["CorrectionConfig", "PPOClipConfig", "advantage", "aggregation_scale", "correction"],
    "base.ranks": ["be_deterministic"],
    "base.seeds": ["derive_seed", "generator", "stream_slice"],
    "dropin": ["PrecisionTrainer"],
    "guard": ["GuardConfig"],
    "kernels": ["Emulation", "learner_kernels", "resolve", "rollout_kernels"],
    "kernels.roles": ["emulated"],
    "mismatch.metrics": ["gap_metrics"],
    "model": ["policy_weights"],
    "precision": ["PrecisionPolicy"],
    "rl": ["RunConfig", "load_recipe", "resume", "start"],
    "rl.experience": ["Experience"],
    "rl.policy": ["ModelSource", "load_policy"],
    "rl.score": ["forward", "forward_transformers", "scatter", "score"],
    "rollout": ["NativeEngine", "Request", "SamplingParams"],
    "rollout.transformers": ["TransformersEngine", "load_transformers"],
    "tasks": ["Grader", "build_task"],
    "training": [
        "OptimizerStep",
        "ScalerConfig",
        "adamw",
        "audit",
        "distribute",
        "first_nonfinite",
        "learning_rate",
        "scaler_for",
    ],
}
__all__ = [
    "CorrectionConfig",
    "Emulation",
    "Experience",
    "Grader",
    "GuardConfig",
    "ModelSource",
    "NativeEngine",
    "OptimizerStep",
    "PPOClipConfig",
    "PrecisionPolicy",
    "PrecisionTrainer",
    "Request",
    "RunConfig",
    "SamplingParams",
    "ScalerConfig",
    "TransformersEngine",
    "__version__",
    "adamw",
    "adopt",
    "advantage",
    "aggregation_scale",
    "audit",
    "be_deterministic",
    "build_task",
    "correction",
    "derive_seed",
    "distribute",
    "emulated",
    "first_nonfinite",
    "forward",
    "forward_transformers",
    "gap_metrics",
    "generator",
    "learner_kernels",
    "learning_rate",
    "load_policy",
    "load_recipe",
    "load_transformers",
    "policy_weights",
    "resolve",
    "resume",
    "rollout_kernels",
    "scaler_for",
    "scatter",
    "score",
    "start",
    "stream_slice",
]


def __getattr__(name: str) -> Any:
    for room, names in _HOMES.items():
        if name in names:
            try:
                return getattr(importlib.import_module(f"mantissa.{room}"), name)
            except ModuleNotFoundError as error:
                from mantissa.base.errors import missing

                raise ImportError(f"mantissa.{name}: {missing(error) or error}", name=error.name) from error
    raise AttributeError(f"module 'mantissa' has no attribute {name!r}")
