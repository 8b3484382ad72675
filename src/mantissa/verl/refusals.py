"""What verl can be asked and Mantissa's engine or rollout does not do: each is refused by its key before a step.

A key that would do nothing is refused as well, but for those that only trade memory for time in verl's own engine
(``enable_gradient_checkpointing``, ``forward_prefetch``, ``use_torch_compile`` and their like): they are on by default,
and change no number.
"""

from __future__ import annotations

from typing import Any

from mantissa.base.config import Refusals
from mantissa.base.errors import MantissaError
from mantissa.precision import PrecisionPolicy
from mantissa.rollout.support import ignored
from mantissa.verl.engine_options import WHERE, EngineOptions

_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"


def get(section: Any, path: str, default: Any = None) -> Any:
    """A value of one of verl's sections, whether those are dataclasses or mappings; ``default`` where there is none."""
    for name in path.split("."):
        section = section.get(name) if hasattr(section, "get") else getattr(section, name, None)
        if section is None:
            return default
    return section


def refuse(called: str, refusals: Refusals) -> None:
    """Raise ``MantissaError`` with the first that applies. ``called``: what of Mantissa's refuses it."""
    for applies, text in refusals:
        if applies:
            raise MantissaError(f"{called}: {text}")


def of_model(model: Any) -> Refusals:
    """Of ``actor_rollout_ref.model``."""
    yield get(model, "lora_rank", 0) > 0 or get(model, "lora.rank", 0) > 0, f"{_MODEL}.lora_rank: LoRA is not supported"
    yield get(model, "lora_adapter_path"), f"{_MODEL}.lora_adapter_path: LoRA is not supported"
    vision = [name for name in ("vision_config", "audio_config") if get(model, f"hf_config.{name}") is not None]
    yield vision, f"{_MODEL}.path: a multimodal model ({' and '.join(vision)}) is not supported"
    yield get(model, "mtp.enable"), f"{_MODEL}.mtp: multi-token prediction is not supported"
    for name in ("use_liger", "use_fused_kernels", "tiled_mlp.enabled", "enable_activation_offload"):
        yield get(model, name), f"{_MODEL}.{name} does nothing with kernels that are not transformers'; leave it out"
    given = set(get(model, "override_config") or {}) - {"attn_implementation", "model_config"}
    yield given, f"{_MODEL}.override_config.{next(iter(sorted(given)), '')}: the model's own configuration is used"


def of_family(policy: PrecisionPolicy, options: EngineOptions, why: str) -> Refusals:
    """Of a model that runs by transformers' own code. ``why``: what our decoder does not know of it."""
    given, own = f"{WHERE}.precision", f"the model runs by transformers' own code ({why})"
    yield options.flowrl is not None, f"{WHERE}.flowrl: {own}, whose hidden states are not told; leave it out"
    yield policy.logits != "fp32", f"{given}.logits={policy.logits}: {own}, its head too; leave it out"
    yield policy.kv_cache is not None, f"{given}.kv_cache={policy.kv_cache}: {own}, its cache too; leave it out"
    yield policy.backend != "auto", f"{given}.backend={policy.backend}: {own}; leave it out"
    yield (
        options.rows is not None,
        f"{WHERE}.rows={options.rows}: {own}, whose products are proven for any number; leave it out",
    )


def of_engine(engine: Any, ranks: int) -> Refusals:
    """Of ``actor.fsdp_config`` (or ``ref.fsdp_config``)."""
    section = f"{_ACTOR}.fsdp_config"
    for name in ("param_offload", "optimizer_offload", "offload_policy"):
        yield get(engine, name), f"{section}.{name}: offloading is not supported"
    sequence = get(engine, "ulysses_sequence_parallel_size", 1)
    yield sequence > 1, f"{section}.ulysses_sequence_parallel_size={sequence}: sequence parallelism is not supported"
    size = get(engine, "fsdp_size", -1)
    yield size not in (-1, ranks), f"{section}.fsdp_size={size}: shards are over all {ranks} ranks; leave it out"
    yield get(engine, "qat.enable"), f"{section}.qat: verl's own quantisation is not supported; use precision"
    mode = get(engine, "router_replay.mode", "disabled")
    yield mode != "disabled", f"router_replay.mode={mode}: router replay is not supported"
    yield get(engine, "pad_to_length"), f"{section}.pad_to_length does nothing: sequences are packed; leave it out"
    yield get(engine, "model_dtype", "fp32") not in ("fp32", "float32"), f"{section}.model_dtype: masters are fp32"


def of_optimizer(optim: Any) -> Refusals:
    """Of ``actor.optim``."""
    section = f"{_ACTOR}.optim"
    name, library = get(optim, "optimizer", "AdamW"), get(optim, "optimizer_impl", "torch.optim")
    yield (
        (name, library) != ("AdamW", "torch.optim"),
        f"{section}.optimizer={library}.{name}: AdamW is the optimiser; 8-bit moments are mixed_precision.moments=8bit",
    )
    yield (
        get(optim, "override_optimizer_config"),
        f"{section}.override_optimizer_config: not supported; Adam's epsilon is mixed_precision.eps",
    )


def of_checkpoint(checkpoint: Any) -> Refusals:
    """Of ``actor.checkpoint``."""
    section = f"{_ACTOR}.checkpoint"
    yield get(checkpoint, "async_save"), f"{section}.async_save is not supported; a checkpoint is written at once"
    known = {"model", "optimizer", "extra", "hf_model"}
    for name in ("save_contents", "load_contents"):
        unknown = sorted(set(get(checkpoint, name) or ()) - known)
        yield unknown, f"{section}.{name}: {', '.join(unknown)}: expected some of {', '.join(sorted(known))}"


def of_batch(flags: dict[str, Any], keys: set[str]) -> Refusals:
    """Of one batch: what verl asks a forward to give besides log-probs and entropy. ``keys``: those of its tensors."""
    yield flags.get("calculate_sum_pi_squared"), f"{_ACTOR}.calculate_sum_pi_squared is not supported"
    yield flags.get("distillation_use_topk"), "distillation from a teacher's top-k logits is not supported"
    yield flags.get("enable_routing_replay") or "routed_experts" in keys, "router replay is not supported"
    yield (
        not {"prompts", "responses"} <= keys,
        "a batch without prompts and responses is not RL's; SFT is not supported",
    )


def of_rollout(rollout: Any) -> Refusals:
    """Of ``actor_rollout_ref.rollout``."""
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        size = get(rollout, name, 1)
        yield size > 1, f"{_ROLLOUT}.{name}={size}: a server is one process; set it to 1"
    penalty = get(rollout, "repetition_penalty", 1.0)
    yield penalty != 1.0, f"{_ROLLOUT}.repetition_penalty={penalty}: not supported, for the learner knows none; set 1.0"
    quantization = get(rollout, "quantization")
    yield quantization not in (None, "fp8"), f"{_ROLLOUT}.quantization={quantization}: only fp8 is supported"
    yield get(rollout, "mtp.enable"), f"{_ROLLOUT}.mtp: multi-token prediction is not supported"
    yield get(rollout, "qat.enable"), f"{_ROLLOUT}.qat: verl's own quantisation is not supported"
    yield get(rollout, "enable_rollout_routing_replay"), f"{_ROLLOUT}.enable_rollout_routing_replay is not supported"
    yield get(rollout, "disaggregation.enabled"), f"{_ROLLOUT}.disaggregation is not supported"
    yield get(rollout, "limit_images"), f"{_ROLLOUT}.limit_images: multimodal prompts are not supported"
    top_k, top_p = max(get(rollout, "top_k", -1), 0), get(rollout, "top_p", 1.0)
    yield (
        top_k > 0 or top_p < 1,
        f"{_ROLLOUT}.{'top_k' if top_k else 'top_p'}={top_k or top_p:g}: verl's {ignored(top_k, top_p)}; leave it out "
        "(val_kwargs may have one)",
    )
    mode = get(rollout, "logprobs_mode", "processed_logprobs")
    yield (
        mode not in (None, "processed_logprobs"),
        f"{_ROLLOUT}.logprobs_mode={mode}: log-probs are of the distribution drawn from; set processed_logprobs",
    )
    yield get(rollout, "engine_kwargs.mantissa"), f"{_ROLLOUT}.engine_kwargs.mantissa: there are none; leave it out"
