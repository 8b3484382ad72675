"""What the tests' verl jobs import as ``model.external_lib``: our plugin, another rollout, and a loss that spikes."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

import mantissa.verl.plugin  # noqa: F401
import verl_test_servers


def _replica() -> Any:
    from verl_hf_rollout import HfReplica

    return HfReplica


RolloutReplicaRegistry.register("hf_test", _replica)
_ROLLOUT_REGISTRY[("hf_test", "async")] = "verl_hf_rollout.ServerAdapter"

_FAULT = os.environ.get("MANTISSA_TEST_FAULT", "")
if _FAULT and importlib.util.find_spec("vllm") is not None:
    verl_test_servers.spoil_vllm(_FAULT)


@register_policy_loss("spike")
def spike(**arguments: Any) -> Any:
    """verl's own loss times ``MANTISSA_TEST_SPIKE``: its gradients overflow fp16 at the first scale."""
    loss, metrics = get_policy_loss_fn("vanilla")(**arguments)
    return loss * float(os.environ.get("MANTISSA_TEST_SPIKE", "1")), metrics
