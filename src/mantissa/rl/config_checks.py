"""What a configuration's fields must not say together: keys that would do nothing, wishes that exclude each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mantissa.errors import MantissaError
from mantissa.rollout import LEAST_TEMPERATURE
from mantissa.tasks import CodeConfig

if TYPE_CHECKING:
    from mantissa.rl.config import RunConfig


def check_together(config: RunConfig) -> None:
    """Raise ``MantissaError`` at the first pair of fields that do not go together."""
    _check_precision(config)
    _check_rollout(config)
    if config.rollout.engine == "vllm":
        _check_vllm(config)
    _check_processes(config)
    if isinstance(config.task, CodeConfig) and config.task.time_limit_s >= config.grading.timeout_s:
        raise MantissaError(
            f"task.time_limit_s={config.task.time_limit_s:g} is not below grading.timeout_s="
            f"{config.grading.timeout_s:g}, which would count a slow program as a verifier error; raise the latter"
        )


def _check_precision(config: RunConfig) -> None:
    policy = config.policy
    if config.loss_scaling is not None and not policy.format_of(policy.train).needs_loss_scaling:
        raise MantissaError(
            f"loss_scaling does nothing for a {policy.train} learner (its exponent range is that of fp32); "
            "leave it out, or set loss_scaling=null"
        )
    if policy.reference is not None and config.algorithm.reference is None:
        raise MantissaError(
            f"precision.reference={policy.reference} does nothing without a reference policy; leave it out, "
            "or set algorithm.reference={}"
        )
    if policy.kernels == "exact" and config.rollout.max_policy_lag:
        raise MantissaError(
            f"precision.kernels=exact with rollout.max_policy_lag={config.rollout.max_policy_lag}: completions of "
            "other weights have other log-probs, so there is nothing that must be equal; set rollout.max_policy_lag=0"
        )


def _check_processes(config: RunConfig) -> None:
    if config.nproc == 1:
        if config.parallel is not None:
            raise MantissaError(f"parallel={config.parallel} does nothing with nproc=1; leave it out, or raise nproc")
        return
    if config.nproc > config.rollout.prompts:
        raise MantissaError(
            f"nproc={config.nproc}, but rollout.prompts={config.rollout.prompts}: processes share a step by prompts, "
            "so some would have none; lower nproc or raise rollout.prompts"
        )
    if config.rollout.max_policy_lag:
        raise MantissaError(
            f"rollout.max_policy_lag={config.rollout.max_policy_lag} with nproc={config.nproc}: sampling beside "
            "learning is for one process (two threads of each would talk to the others at once); set "
            "rollout.max_policy_lag=0"
        )
    if config.parallel == "fsdp2" and config.optimizer.moments == "8bit":
        raise MantissaError(
            "parallel=fsdp2 with optimizer.moments=8bit: blocks of a slice are not those of the whole, so another "
            "number of processes could not resume; use parallel=ddp, or optimizer.moments=fp32"
        )
    if config.parallel == "fsdp2" and config.model.lora is not None:
        raise MantissaError(
            "parallel=fsdp2 with model.lora: adapters are merged into whole matrices, and what would be divided, "
            "gradients and moments, they hardly have; use parallel=ddp"
        )


def _check_rollout(config: RunConfig) -> None:
    rollout, updates = config.rollout, config.optimizer.updates_per_batch
    if updates > rollout.prompts * rollout.samples:
        raise MantissaError("optimizer.updates_per_batch: expected at most one update a completion")
    if 0 < rollout.max_policy_lag < updates:
        raise MantissaError(
            f"rollout.max_policy_lag={rollout.max_policy_lag} does nothing with optimizer.updates_per_batch={updates}: "
            f"a step makes {updates} versions, so sampling one step ahead needs {updates} or more; raise it, or set it "
            "to 0"
        )
    kind = config.algorithm.advantage
    if kind != "reinforce_pp" and rollout.samples < 2:
        raise MantissaError(
            f"algorithm.advantage={kind} needs rollout.samples of 2 or more: it compares the completions of a prompt, "
            "and of one alone every advantage is 0; raise it, or use reinforce_pp, which compares the whole batch"
        )
    if rollout.prompts * rollout.samples < 2:
        raise MantissaError(
            f"algorithm.advantage={kind} compares completions, and a step has one; raise rollout.prompts"
        )


def _check_vllm(config: RunConfig) -> None:
    """What vLLM cannot do, or what nobody has tried with it."""
    policy, rollout = config.policy, config.rollout
    base = policy.format_of(policy.rollout).name
    refusals = (
        (
            policy.kernels == "exact",
            "precision.kernels=exact: vLLM's kernels add in another order than the learner's, so their log-probs are "
            "not equal to the last bit; use kernels=fast and read the gap",
        ),
        (
            policy.kv_cache not in (None, base, "fp8"),
            f"precision.kv_cache={policy.kv_cache}: vLLM's cache is kept in the rollout's own format, {base}, or in "
            "fp8; leave it out",
        ),
        (
            policy.logits not in ("fp32", base),
            f"precision.logits={policy.logits}: vLLM holds logits in fp32 or in the rollout's {base}; choose one of "
            "them",
        ),
        (
            policy.backend == "simulated" and policy.rollout != "fp32",
            f"precision.backend=simulated: vLLM computes in {policy.rollout} itself; leave backend out",
        ),
        (
            config.guard is not None and rollout.vllm.server is not None,
            "guard: the server samples in the format that it was started in, and a fall back would leave it; leave "
            "rollout.vllm.server or guard out",
        ),
        (
            rollout.vllm.sleep and rollout.max_policy_lag > 0,
            f"rollout.vllm.sleep=true and rollout.max_policy_lag={rollout.max_policy_lag}: it samples while the "
            "learner works, so it never sleeps; leave one of them out",
        ),
        (
            rollout.temperature < LEAST_TEMPERATURE,
            f"rollout.temperature={rollout.temperature:g}: vLLM would sample at {LEAST_TEMPERATURE}; raise it to that",
        ),
    )
    for refused, why in refusals:
        if refused:
            raise MantissaError(f"rollout.engine=vllm with {why}, or set rollout.engine=native")
