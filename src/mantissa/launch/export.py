"""From a recipe to what verl is to be told: ``export(config, options)``.

Advantage, loss, aggregation, correction, reference and KL in verl's words.

Two directions to mind. Bounds on weights are on learner / rollout in verl as here; bounds on k1, its rejection, are on
rollout / learner, so those are inverted and swapped. And a bound that is absent here is written as one that no ratio
reaches, since verl has defaults of its own: a dual clip of 3 even for plain PPO, a lower clip even for CISPO.

0.9's trainer reads ``rollout_correction.loss_type`` and, with ``bypass_mode``, ``rollout_rs`` nowhere: the loss reads
its own copy below ``policy_loss``, which the trainer before filled in. So the exporter fills it in.

The precision policy in verl's words.

Three roles, and in verl each is set in a place of its own: the learner by ``mixed_precision`` (FSDP) or ``dtype``
(Megatron), the reference by the same keys below ``ref``, which inherits neither, and the rollout by ``rollout.dtype``
and ``rollout.quantization``. Every one of them is bf16 where it is not set. So all three are always written, bf16 too.

Model, problems, sampling, optimiser, evaluation and the loop in verl's words.

verl counts in prompts where Mantissa counts in optimiser steps: ``updates_per_batch`` becomes a mini-batch of prompts.
Its learning rate moves once an RL step, so a warm-up is counted in those. It keeps what it grades in files: problems
must be in DAPO's schema (``mantissa data dapo``), and what is held out in files of its own.
"""

from __future__ import annotations

import math

from mantissa.algorithms import CorrectionConfig, FlowRLConfig
from mantissa.launch.facts import FSDPS, SINCE_09
from mantissa.launch.hardware import CUDA_FOR_BLOCKWISE, cuda_version
from mantissa.launch.options import LaunchOptions
from mantissa.launch.plan import NO_BOUND, Draft, Plan, finite
from mantissa.model import LoraConfig
from mantissa.model.hub import is_gguf
from mantissa.precision.policy import Fp8Policy
from mantissa.rl.config import RunConfig
from mantissa.tasks import DatasetConfig

_IS = "algorithm.rollout_correction."
_BYPASSED = "actor.policy_loss.rollout_correction."
_NO_LOW = 1e-9  # below exp(-20), where every log-ratio is clamped
_UNITS = {
    "token": "token",
    "sequence_sum": "seq_sum",
    "sequence_mean": "seq_mean",
    "sequence_max": "seq_max",
}
# Read in lu-jun-yu/verl at d242388, recipe/flowrl/flowrl_actor.py and flowrl_fsdp_worker.py: a copy of verl 0.7.0.dev
# from before recipes moved to verl-project/verl-recipe, whose README at 0ad0455 has verl v0.4.0 for this one. The
# autocast stands in volcengine/verl at 40dc8ef too, and in Xuekai-Zhu/FlowRL at 6059a0b (dp_actor.py). What verl itself
# lacks is tested on the real one.
FLOWRL = (
    "flowrl: verl has no such loss. The published recipe, recipe.flowrl, is built on workers/fsdp_workers.py and "
    "workers/actor/dp_actor.py, which verl 0.8.0 took out; and on the verl that it needs, its actor computes under "
    "autocast to bf16, written into the code (fsdp_config.dtype=float16 starts a loss scaler around that and no more), "
    "as are beta and the ratio's bound, and no weight between rollout and learner enters its loss. Train it with "
    "mantissa train"
)


def algorithm(draft: Draft) -> None:
    """Write what is maximised, and how the gap between rollout and learner is corrected."""
    _advantage(draft)
    _loss(draft)
    _aggregation(draft)
    _correction(draft)
    _reference_and_kl(draft)


def _advantage(draft: Draft) -> None:
    source, kind = "algorithm.advantage", draft.config.algorithm.advantage
    if kind == "reinforce_pp":
        draft.refuse(
            source,
            "reinforce_pp: verl normalises over tokens, so that a long response counts more often; here each response "
            "counts once; use grpo, dr_grpo or rloo",
        )
        return
    if draft.config.rollout.samples == 1:
        draft.refuse(source, f"{kind} with rollout.samples=1: verl takes the reward itself for the advantage")
    draft.set("algorithm.adv_estimator", "rloo" if kind == "rloo" else "grpo", source)
    if kind != "rloo":
        draft.set("algorithm.norm_adv_by_std_in_grpo", kind == "grpo", source)


def _loss(draft: Draft) -> None:
    loss, source = draft.config.algorithm.loss, "algorithm.loss"
    draft.fixed("algorithm.loss.kind", "said by policy_loss.loss_mode")
    draft.set("actor.entropy_coeff", 0, source)
    if isinstance(loss, FlowRLConfig):
        draft.refuse(source, FLOWRL)
        return
    bypass = draft.config.algorithm.correction.bypass
    if bypass and loss.kind not in ("ppo_clip", "dapo"):
        draft.refuse(
            "algorithm.correction.bypass", f"with loss={loss.kind}: verl's bypass has the clipped loss of ppo_clip only"
        )
    mode = {"gspo": "gspo", "cispo": "cispo", "reinforce": "bypass_mode"}.get(loss.kind, "vanilla")
    draft.set("actor.policy_loss.loss_mode", "bypass_mode" if bypass else mode, "algorithm.loss.kind")
    if loss.kind == "reinforce":
        draft.set(_BYPASSED + "loss_type", "reinforce", source)
        return
    if loss.kind == "cispo":
        draft.set("actor.clip_ratio_low", 1.0, "algorithm.loss")  # the ratio is above 0, so this clips nothing
    else:
        draft.set("actor.clip_ratio_low", loss.clip_low, "algorithm.loss.clip_low")
    draft.set("actor.clip_ratio_high", loss.clip_high, "algorithm.loss.clip_high")
    if loss.kind == "dapo":
        draft.set("actor.clip_ratio_c", finite(loss.dual_clip), "algorithm.loss.dual_clip")
    elif loss.kind == "ppo_clip":
        draft.set("actor.clip_ratio_c", NO_BOUND, source)


def _aggregation(draft: Draft) -> None:
    config, source = draft.config.algorithm, "algorithm.aggregation"
    draft.set("actor.loss_agg_mode", config.aggregation.replace("_", "-"), source)
    if config.aggregation == "seq_mean_token_sum_norm":
        length = config.aggregation_length or draft.config.rollout.max_tokens
        if length != int(length):
            draft.refuse("algorithm.aggregation_length", f"{length}: verl takes whole tokens")
        draft.set("actor.loss_scale_factor", int(length), "algorithm.aggregation_length")
    else:
        draft.unused("algorithm.aggregation_length", f"belongs to seq_mean_token_sum_norm, not {config.aggregation}")


def _correction(draft: Draft) -> None:
    correction, source = draft.config.algorithm.correction, "algorithm.correction"
    inside = correction.bypass or draft.config.algorithm.loss.kind == "reinforce"
    draft.set("rollout.calculate_log_probs", True, source)
    draft.set(_IS + "bypass_mode", inside, source + ".bypass")
    if correction.bypass:
        draft.set(_BYPASSED + "loss_type", "ppo_clip", source + ".bypass")
    _weights(draft, correction, _BYPASSED if inside else _IS)
    _rejection(draft, correction, _BYPASSED if inside else _IS)
    if correction.veto_below is not None:
        draft.refuse(
            source + ".veto_below",
            f"{correction.veto_below}: verl has no veto any more; reject by sequence_max of k3 instead",
        )
    else:
        draft.fixed(source + ".veto_below", "verl has no veto")


def _weights(draft: Draft, correction: CorrectionConfig, where: str) -> None:
    """The weights' level and bounds. A mask's ``low_high`` zeroes what lies outside, as here."""
    source = "algorithm.correction."
    if correction.mode == "none":
        draft.set(where + "rollout_is", None, source + "mode")
        for name in ("level", "truncate_at", "mask_low", "mask_high", "normalize"):
            draft.unused(source + name, "mode=none has no weights")
        return
    draft.set(where + "rollout_is", correction.level, f"{source}mode, {source}level")
    bounds = f"{source}truncate_at, {source}mask_low, {source}mask_high"
    if correction.mode == "truncate":
        assert correction.truncate_at is not None
        draft.set(where + "rollout_is_threshold", finite(correction.truncate_at), bounds)
    else:
        low = correction.mask_low or _NO_LOW
        high = finite(correction.mask_high) if correction.mask_high is not None else NO_BOUND
        draft.set(where + "rollout_is_threshold", f"{low!r}_{high!r}", bounds)
    draft.set(where + "rollout_is_batch_normalize", correction.normalize, source + "normalize")


def _rejection(draft: Draft, correction: CorrectionConfig, where: str) -> None:
    source = "algorithm.correction."
    names = ("reject_unit", "reject_by", "reject_low", "reject_high")
    if correction.reject_unit is None:
        draft.set(where + "rollout_rs", None, ", ".join(source + name for name in names))
        return
    unit, by = _UNITS[correction.reject_unit], correction.reject_by
    if (unit, by) == ("seq_max", "k1"):
        draft.refuse(source + "reject_unit", "sequence_max by k1: verl has seq_max of k2 and k3 only; use one of them")
        for name in names[1:]:
            draft.unused(source + name, "the rejection is refused")
        return
    draft.set(where + "rollout_rs", f"{unit}_{by}", f"{source}reject_unit, {source}reject_by")
    bound: float | str
    if by == "k1":  # on rollout / learner there
        low = 1 / correction.reject_high if correction.reject_high is not None else 1 / _FAR
        high = 1 / correction.reject_low if correction.reject_low is not None else _FAR
        bound = f"{low!r}_{high!r}"
    else:
        assert correction.reject_high is not None
        bound = correction.reject_high
    draft.set(where + "rollout_rs_threshold", bound, f"{source}reject_low, {source}reject_high")
    draft.differs(
        source + "reject_unit", "what is dropped leaves the loss here; verl keeps it in the loss's denominator"
    )


_FAR = 1e300  # a sum over a sequence is not clamped in verl


def _reference_and_kl(draft: Draft) -> None:
    reference, kl = draft.config.algorithm.reference, draft.config.algorithm.kl
    if reference is None:
        draft.unused("algorithm.reference", "there is none")
    elif reference.refresh_every is not None:
        draft.refuse("algorithm.reference.refresh_every", "verl's reference is the policy as training began, for good")
    elif kl is None and not isinstance(draft.config.algorithm.loss, FlowRLConfig):
        draft.unused("algorithm.reference.refresh_every", "verl measures no distance that no penalty uses")
    else:
        draft.fixed("algorithm.reference.refresh_every", "the reference is the policy as training began")
    in_loss, in_reward = (kl is not None and kl.where == where for where in ("loss", "reward"))
    draft.set("actor.use_kl_loss", in_loss, "algorithm.kl")
    draft.set("algorithm.use_kl_in_reward", in_reward, "algorithm.kl")
    if kl is None:
        return
    source = "algorithm.kl."
    draft.fixed(source + "where", "said by use_kl_loss and use_kl_in_reward")
    if in_loss:
        draft.set("actor.kl_loss_type", kl.estimator, source + "estimator")
        draft.set("actor.kl_loss_coef", kl.coefficient, source + "coefficient")
        if draft.config.algorithm.correction.mode != "none":
            draft.differs(source + "where", "the correction weighs the penalty here, and not in verl")
    else:
        draft.set("algorithm.kl_penalty", kl.estimator, source + "estimator")
        draft.set("algorithm.kl_ctrl.type", "fixed", source + "coefficient")
        draft.set("algorithm.kl_ctrl.kl_coef", kl.coefficient, source + "coefficient")
    if kl.estimator == "k3":
        draft.differs(source + "estimator", "k3 is clamped to 10 nats a token in verl")


_LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def precision(draft: Draft) -> None:
    """Write the learner, the reference and the rollout, and say what becomes of the rest of the policy."""
    _hardware(draft)
    _learner(draft)
    _reference(draft)
    _rollout(draft)
    _fp8(draft)
    _kernels(draft)
    _between(draft)


def _hardware(draft: Draft) -> None:
    policy, options = draft.policy, draft.options
    in_fp8 = [name for name in ("train", "rollout") if getattr(policy, name) == "fp8"]
    if not in_fp8:
        return
    source = f"precision.{in_fp8[0]}"
    if options.gpu is None:
        draft.refuse(source, "fp8 needs a Hopper or Blackwell GPU; say which the cluster has by --hardware h100")
    elif not options.gpu.blockwise_fp8:
        draft.refuse(
            source,
            f"{options.gpu.name} is {options.gpu.family}, which has no products of fp8 operands scaled block by block "
            "(Hopper and Blackwell have); use bf16 or fp16 on it",
        )
    if "train" in in_fp8 and draft.megatron:
        needed = ".".join(map(str, CUDA_FOR_BLOCKWISE))
        if options.cuda is None:
            draft.refuse("precision.train", f"an fp8 learner needs CUDA {needed}; say what the nodes have by --cuda")
        elif cuda_version(options.cuda) < CUDA_FOR_BLOCKWISE:
            draft.refuse(
                "precision.train", f"blockwise fp8 needs CUDA {needed} or later, and the nodes have {options.cuda}"
            )


def _learner(draft: Draft) -> None:
    train, engine = draft.policy.train, draft.options.engine
    source = "precision.train"
    if train == "fp32":
        why = (
            "Megatron's engine takes bfloat16 and float16 only"
            if draft.megatron
            else "verl packs sequences with flash attention, which has no fp32"
        )
        draft.refuse(source, f"an fp32 learner cannot run: {why}; use fp16 or bf16")
    elif train == "fp8" and engine in FSDPS:
        draft.refuse(source, f"verl's {engine} engine has no fp8 products; use engine=megatron, or fp8-rollout")
    elif draft.megatron:
        assert draft.policy.fp8 is not None or train != "fp8"
        base = draft.policy.fp8.base if train == "fp8" and draft.policy.fp8 else train
        draft.set("actor.megatron.dtype", _LONG[base], source)
    else:
        draft.set("actor.fsdp_config.mixed_precision.param_dtype", train, source)
        draft.set("actor.fsdp_config.mixed_precision.reduce_dtype", "fp32", source)
        if engine == "fsdp":
            draft.set("actor.fsdp_config.mixed_precision.buffer_dtype", "fp32", source)
        draft.set("actor.fsdp_config.model_dtype", "fp32", source)


def _reference(draft: Draft) -> None:
    policy, source = draft.policy, "precision.reference"
    if draft.config.algorithm.kl is None:
        draft.unused(source, "verl has a reference only where a KL penalty uses one")
        return
    wanted = policy.reference or policy.train
    if wanted == "fp32" or policy.train == "fp32":
        if wanted == "fp32" != policy.train:
            draft.refuse(source, "an fp32 reference cannot run on verl's engines; use the learner's format")
        else:
            draft.unused(source, "as the learner, which is refused")
    elif (wanted == "fp8") != (policy.train == "fp8") or (wanted == "fp8" and not draft.megatron):
        why = (
            "Megatron's reference takes the learner's override_transformer_config, fp8 or not"
            if draft.megatron
            else "verl's FSDP engine has no fp8 products"
        )
        draft.refuse(source, f"{wanted} beside a learner in {policy.train}: {why}")
    elif draft.megatron:
        base = policy.fp8.base if wanted == "fp8" and policy.fp8 else wanted
        draft.set("ref.megatron.dtype", _LONG[base], source)
    else:
        draft.set("ref.fsdp_config.mixed_precision.param_dtype", wanted, source)
        draft.set("ref.fsdp_config.model_dtype", "fp32", source)


def _rollout(draft: Draft) -> None:
    policy, source = draft.policy, "precision.rollout"
    if policy.rollout != "fp8":
        draft.set("rollout.dtype", _LONG[policy.rollout], source)
        return
    assert policy.fp8 is not None
    draft.set("rollout.dtype", _LONG[policy.fp8.base], source)
    draft.set("rollout.quantization", "fp8", source)
    draft.differs(source, "weights are quantised from the format of rollout.dtype, here from the fp32 masters")
    if draft.options.rollout == "vllm":
        family = draft.options.gpu.family if draft.options.gpu else None
        if family == "Hopper":
            draft.variable("VLLM_USE_DEEP_GEMM", "1", source)
            draft.variable("VLLM_USE_DEEP_GEMM_E8M0", "0", source)
    else:
        draft.differs(source, "SGLang's adapter logs a tensor that it cannot quantise and loads it as it is")


def _fp8(draft: Draft) -> None:
    policy, options = draft.policy, draft.options
    if policy.fp8 is None:
        draft.unused("precision.fp8", "no role is fp8")
        return
    fp8, learner = policy.fp8, policy.train == "fp8"
    _fp8_base(draft, fp8, learner)
    if not learner:
        draft.unused("precision.fp8.backward", f"the learner is {policy.train}")
    elif fp8.backward == "high":
        draft.refuse("precision.fp8.backward", "high: Megatron's fp8 products have fp8 gradients; use e5m2 or e4m3")
    elif draft.megatron:
        form = {"e5m2": "hybrid", "e4m3": "e4m3"}[fp8.backward]
        draft.set("actor.megatron.override_transformer_config.fp8", form, "precision.fp8.backward")
    else:
        draft.unused("precision.fp8.backward", "an fp8 learner is refused on this engine")
    if learner and draft.megatron:
        draft.set("actor.megatron.override_transformer_config.fp8_recipe", "blockwise", "precision.train")
        draft.set("actor.optim.override_optimizer_config.fp8_recipe", "blockwise", "precision.train")
        draft.differs("precision.train", "a dimension that 128 does not divide is an error, here it is padded")
        if policy.rollout != "fp8":
            draft.differs("precision.rollout", "the learner's fp8 rounding is not the rollout's: a gap by design")
    _fp8_scale(draft, fp8, learner)
    if fp8.exclude:
        draft.refuse(
            "precision.fp8.exclude",
            f"{', '.join(fp8.exclude)}: verl has no list of layers to leave out that learner and rollout would share",
        )
    else:
        draft.fixed("precision.fp8.exclude", "embedding, head, norms and routers stay out of fp8 there too")
    if learner and options.gpu and options.gpu.family == "Blackwell" and options.pipeline_parallel > 1:
        draft.refuse("precision.train", "blockwise fp8 on Blackwell runs with pipeline_parallel=1 only")


def _fp8_base(draft: Draft, fp8: Fp8Policy, learner: bool) -> None:
    if fp8.base == "fp16" and learner:
        draft.refuse("precision.fp8.base", "fp16: Megatron's fp8 learner is used with bfloat16 only; use base=bf16")
    elif fp8.base == "fp16" and draft.options.rollout == "sglang":
        draft.refuse(
            "precision.fp8.base", "fp16: SGLang's adapter quantises from the model file's own format; use vllm"
        )
    else:
        draft.fixed("precision.fp8.base", "said by rollout.dtype" + (" and megatron.dtype" if learner else ""))


def _fp8_scale(draft: Draft, fp8: Fp8Policy, learner: bool) -> None:
    source = "precision.fp8.scale"
    blackwell = draft.options.gpu is not None and draft.options.gpu.family == "Blackwell"
    if fp8.scale == "power_of_two" and draft.policy.rollout == "fp8":
        draft.refuse(source, "power_of_two: verl quantises the rollout's weights with fp32 scales; use scale=fp32")
    elif learner and draft.megatron and fp8.scale == "fp32" and blackwell:
        draft.refuse(source, "fp32: Blackwell's fp8 products take scales that are powers of two; use a bf16 learner")
    elif learner and draft.megatron:
        draft.variable("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1" if fp8.scale == "fp32" else "0", source)
    else:
        draft.fixed(source, "verl quantises the rollout's weights with fp32 scales")


def _kernels(draft: Draft) -> None:
    policy = draft.policy
    if policy.kernels == "exact":
        draft.refuse(
            "precision.kernels",
            "exact: verl's learner and rollout are two engines with kernels of their own, and no key makes their "
            "log-probs equal; use kernels=fast and a correction",
        )
    else:
        draft.fixed("precision.kernels", "the engines' own kernels")
    draft.unused("precision.on_mismatch", "belongs to kernels=exact")
    draft.unused("precision.check_every", "belongs to kernels=exact")
    if policy.backend == "simulated":
        draft.refuse("precision.backend", "simulated: verl computes natively on its GPUs; leave backend out")
    else:
        draft.fixed("precision.backend", "native")
    if policy.fallback == "warn":
        draft.refuse("precision.fallback", "warn: verl never falls back to fp32; leave fallback out")
    else:
        draft.fixed("precision.fallback", "a format that a GPU lacks is an error there too")


def _between(draft: Draft) -> None:
    """Logits and the key-value cache."""
    policy = draft.policy
    half = policy.fp8.base if policy.train == "fp8" and policy.fp8 else policy.train
    draft.only(
        "precision.logits",
        policy.logits,
        half,
        f"verl's learner rounds logits to {half}, its compute format, before the fp32 log-softmax",
    )
    if policy.kv_cache is None or policy.kv_cache == policy.rollout != "fp8":
        draft.fixed("precision.kv_cache", "as the rollout's dtype")
    else:
        draft.refuse(
            "precision.kv_cache",
            f"{policy.kv_cache}: the rollout engines scale their cache in ways of their own, by no key of verl; "
            "leave it out",
        )


REWARD = "pkg://mantissa.launch.verl_reward"
_FOREVER = 1_000_000  # epochs: total_training_steps is what ends a run
_FSDP_SCALER = {"rule": "dynamic", "initial": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5,
                "growth_interval": 400}  # fmt: skip


def run(draft: Draft) -> None:
    """Write everything but precision and algorithm."""
    _layout(draft)
    _model(draft)
    _task(draft)
    _sampling(draft)
    _optimizer(draft)
    _batches(draft)
    _loss_scaling(draft)
    _evaluation(draft)
    _loop(draft)


def _layout(draft: Draft) -> None:
    options = draft.options
    if draft.megatron:
        draft.group("model_engine", "megatron", "--engine")
        for name in ("tensor", "pipeline", "expert", "context"):
            key = f"actor.megatron.{name}_{'' if name == 'context' else 'model_'}parallel_size"
            draft.set(key, getattr(options, f"{name}_parallel"), f"{name}_parallel")
        draft.set("actor.megatron.param_offload", options.offload, "offload")
        draft.set("actor.megatron.optimizer_offload", options.offload, "offload")
    else:
        draft.set("actor.strategy", options.engine, "--engine")
        draft.set("actor.fsdp_config.ulysses_sequence_parallel_size", options.sequence_parallel, "sequence_parallel")
        if draft.config.algorithm.kl is not None:
            draft.set("ref.fsdp_config.ulysses_sequence_parallel_size", options.sequence_parallel, "sequence_parallel")
        draft.set("actor.fsdp_config.param_offload", options.offload, "offload")
        draft.set("actor.fsdp_config.optimizer_offload", options.offload, "offload")
    draft.set("trainer.nnodes", options.nodes, "--nodes")
    draft.set("trainer.n_gpus_per_node", options.gpus, "--gpus")
    draft.set("rollout.name", options.rollout, "--rollout")
    draft.set("rollout.tensor_model_parallel_size", options.rollout_tensor_parallel, "rollout_tensor_parallel")
    draft.set("rollout.gpu_memory_utilization", options.rollout_memory, "rollout_memory")
    if draft.config.device == "cpu":
        draft.refuse("device", "cpu: verl trains on GPUs; leave device out")
    elif options.version in SINCE_09:
        draft.set("trainer.device", "cuda", "device")
    else:
        draft.fixed("device", "verl finds CUDA itself")


def _model(draft: Draft) -> None:
    model = draft.config.model
    if model.path is None:
        draft.refuse("model.fresh", "verl starts from a pretrained model; give model.path")
        draft.unused("model.path", "the policy is a fresh one")
    elif is_gguf(model.path):
        draft.refuse("model.path", f"{model.path}: verl loads Hugging Face folders; give the original model's")
        draft.unused("model.fresh", "the policy comes from model.path")
    else:
        draft.set("model.path", model.path, "model.path")
        draft.unused("model.fresh", "the policy comes from model.path")
    draft.unused("model.tokenizer", "belongs to a fresh policy")
    if model.lora is None:
        draft.fixed("model.lora", "every weight trains")
    else:
        _lora(draft, model.lora)
    if draft.config.warm_start is not None:
        draft.refuse("warm_start", "verl has no supervised start; train it with mantissa train and give its policy/")
    else:
        draft.fixed("warm_start", "training starts from the model as it is")
    if draft.config.perfectible is not None:
        draft.refuse("perfectible", "verl does not choose prompts; choose them beforehand and give the file")
    else:
        draft.fixed("perfectible", "every training prompt is used")


def _lora(draft: Draft, lora: LoraConfig) -> None:
    source = "model.lora."
    if draft.megatron:
        draft.refuse(
            "model.lora", "Megatron adapts fused projections (linear_qkv, linear_fc1), which are other adapters"
        )
        return
    for name, value in (("rslora", lora.rslora), ("path", lora.path)):
        if value:
            draft.refuse(source + name, f"{value}: not exported; leave it out, or train with mantissa train")
        else:
            draft.fixed(source + name, "not used")
    draft.fixed(source + "dropout", "none")
    if lora.rank is not None and lora.alpha is not None:
        draft.set("model.lora_rank", lora.rank, source + "rank")
        if lora.alpha != int(lora.alpha):
            draft.refuse(source + "alpha", f"{lora.alpha}: verl takes whole numbers")
        draft.set("model.lora_alpha", int(lora.alpha), source + "alpha")
        targets = "all-linear" if lora.targets is None else list(lora.targets)
        draft.set("model.target_modules", targets, source + "targets")
        draft.differs(source + "rank", "the rollout adds adapters to rounded weights; here they are merged in fp32")
    else:
        draft.refuse("model.lora", "rank and alpha are needed where no adapters are loaded")


def _task(draft: Draft) -> None:
    task, options = draft.config.task, draft.options
    if not isinstance(task, DatasetConfig):
        draft.refuse("task", f"{task.kind}: verl reads problems from files; use kind=dataset")
        for field in ("grading", "rollout.overlong"):
            draft.unused(field, "the task is refused")
        return
    draft.fixed("task.kind", "said by data.train_files")
    draft.set("data.train_files", list(task.files), "task.files")
    if task.row_schema == "plain":
        draft.refuse("task.row_schema", "plain: verl reads DAPO's schema; write it by mantissa data dapo")
    else:
        draft.fixed("task.row_schema", "verl reads DAPO's schema, which mantissa data dapo writes")
    for name in ("template", "chat"):
        if getattr(task, name):
            draft.refuse(f"task.{name}", "belongs to plain rows; write the prompt by mantissa data dapo --template")
        else:
            draft.fixed(f"task.{name}", "the file's prompts are messages for the chat template")
    draft.unused("task.on_bad_row", "verl reads rows as they are; mantissa data dapo checks them")
    draft.set("data.train_max_samples", task.limit if task.limit is not None else -1, "task.limit")
    draft.set("data.max_prompt_length", options.max_prompt_tokens, "max_prompt_tokens")
    draft.set("data.filter_overlong_prompts", True, "max_prompt_tokens")
    _held_out(draft, task)
    _grading(draft, task)


def _held_out(draft: Draft, task: DatasetConfig) -> None:
    if task.heldout_files:
        draft.set("data.val_files", list(task.heldout_files), "task.heldout_files")
        draft.unused("task.heldout_fraction", "heldout_files are given")
        return
    if task.heldout_fraction != 0:
        share = 0.05 if task.heldout_fraction is None else task.heldout_fraction
        draft.refuse(
            "task.heldout_fraction",
            f"{share:g}: verl holds nothing out of a file; give task.heldout_files, or heldout_fraction=0",
        )
    elif draft.config.evaluation is not None:
        draft.fixed("task.heldout_fraction", "nothing is held out")
        draft.refuse("task.heldout_files", "evaluation needs files of its own on verl; give them, or evaluation=null")
    else:
        draft.fixed("task.heldout_fraction", "nothing is held out")
    draft.set("data.val_files", list(task.files), "task.heldout_files")  # verl loads some even if it evaluates never


def _grading(draft: Draft, task: DatasetConfig) -> None:
    """Mantissa's own verifiers, in verl's reward workers: the package travels with the job."""
    if task.reward is not None:
        draft.refuse("task.reward", "a sum of terms is not exported; give task.verifier, or train with mantissa train")
    else:
        draft.fixed("task.reward", "the verifier's verdict")
    verifier, kwargs = task.verifier or "math_verify", "reward.custom_reward_function.reward_kwargs."
    if verifier == "code":
        draft.refuse("task.verifier", "code: programs run in a sandbox that verl's reward workers cannot promise")
    draft.set("reward.custom_reward_function.path", REWARD, "task.verifier")
    draft.set("reward.custom_reward_function.name", "compute_score", "task.verifier")
    draft.set(kwargs + "verifier", verifier, "task.verifier")
    draft.set(kwargs + "timeout_s", draft.config.grading.timeout_s, "grading.timeout_s")
    draft.set(kwargs + "memory_gib", draft.config.grading.memory_gib, "grading.memory_gib")
    draft.set("reward.num_workers", draft.config.grading.workers, "grading.workers")
    overlong, source = draft.config.rollout.overlong, "rollout.overlong"
    draft.set("reward.reward_manager.name", "naive" if overlong is None else "dapo", source)
    if overlong is not None:
        place = "reward.reward_kwargs.overlong_buffer_cfg."
        draft.set(place + "enable", True, source)
        draft.set(place + "len", overlong.buffer, source + ".buffer")
        draft.set(place + "penalty_factor", overlong.factor, source + ".factor")
        draft.set(place + "log", True, source)
        draft.set("reward.reward_kwargs.max_resp_len", draft.config.rollout.max_tokens, "rollout.max_tokens")


def _sampling(draft: Draft) -> None:
    rollout, options = draft.config.rollout, draft.options
    draft.set("data.train_batch_size", rollout.prompts, "rollout.prompts")
    draft.set("rollout.n", rollout.samples, "rollout.samples")
    draft.set("data.max_response_length", rollout.max_tokens, "rollout.max_tokens")
    draft.set("rollout.temperature", rollout.temperature, "rollout.temperature")
    draft.set("rollout.top_p", 1.0, "rollout")
    draft.set("rollout.top_k", -1, "rollout")
    if options.rollout == "vllm":
        draft.set("rollout.logprobs_mode", "processed_logprobs", "rollout.temperature")
    if rollout.stop:
        draft.refuse("rollout.stop", "verl's sampling takes no stop strings; the end token ends a response")
    else:
        draft.fixed("rollout.stop", "the end token ends a response")
    draft.unused("rollout.engine", "--rollout chooses verl's engine")
    draft.unused("rollout.vllm", "is about a vLLM that Mantissa starts or holds; verl has its own")
    draft.unused("rollout.slots", "is about Mantissa's own engine; verl's schedule their rows themselves")
    if rollout.max_policy_lag:
        draft.refuse("rollout.max_policy_lag", "verl's asynchronous trainers bound the lag in other units; set it to 0")
    else:
        draft.fixed("rollout.max_policy_lag", "it samples and learns in turn")
    dynamic, source = rollout.dynamic, "rollout.dynamic"
    if dynamic is None:
        draft.fixed(source, "every group sampled is trained on")
    elif options.version not in SINCE_09:
        draft.refuse(
            source, f"verl {options.version} has no dynamic sampling (filter_groups is read by nobody); use 0.9"
        )
    else:
        draft.set("algorithm.filter_groups.enable", True, source)
        draft.set("algorithm.filter_groups.metric", "acc", source)
        draft.set("trainer.use_v1", True, source)
        draft.unused(source + ".batch_prompts", "verl refills prompt by prompt")
        draft.unused(source + ".max_generation_batches", "verl samples until the batch is full, without a limit")
        if dynamic.when_exhausted == "continue":
            draft.refuse(source + ".when_exhausted", "continue: verl always fills the batch; use error")
        else:
            draft.unused(source + ".when_exhausted", "there is no limit that could be exhausted")
        if rollout.overlong is not None:
            draft.differs(
                source, "a group that only the overlong penalty makes equal is trained on; here it is dropped"
            )


def _optimizer(draft: Draft) -> None:
    config, where = draft.config.optimizer, "actor.optim."
    draft.set(where + "lr", config.lr, "optimizer.lr")
    steps = math.ceil(config.warmup / config.updates_per_batch)
    draft.set(where + "lr_warmup_steps", steps if steps else -1, "optimizer.warmup")
    if config.warmup:
        draft.differs("optimizer.warmup", "the rate moves once an RL step, not once an update")
    override = where + "override_optimizer_config."
    if draft.megatron:
        draft.set(where + "lr_decay_style", "linear" if config.decay == "linear" else "constant", "optimizer.decay")
        draft.set(override + "adam_beta1", config.betas[0], "optimizer.betas")
        draft.set(override + "adam_beta2", config.betas[1], "optimizer.betas")
        draft.set(override + "adam_eps", config.eps, "optimizer.eps")
        bound = config.max_grad_norm if math.isfinite(config.max_grad_norm) else 0.0  # Megatron's "never"
    else:
        if config.decay == "linear":
            draft.refuse("optimizer.decay", "linear: verl's FSDP engines know constant and cosine; use decay=none")
        draft.set(where + "lr_scheduler_type", "constant", "optimizer.decay")
        draft.set(where + "betas", list(config.betas), "optimizer.betas")
        draft.set(override + "eps", config.eps, "optimizer.eps")
        bound = config.max_grad_norm
        if config.weight_decay:
            draft.differs("optimizer.weight_decay", "norms and biases decay too")
    if config.moments == "8bit":
        draft.refuse("optimizer.moments", "8bit: nothing was found that both verl's learners read; leave it out")
    else:
        draft.fixed("optimizer.moments", "fp32")
    if config.adaptive_clip is not None:
        draft.refuse("optimizer.adaptive_clip", "verl clips by the whole gradient's norm alone; leave it out")
    else:
        draft.fixed("optimizer.adaptive_clip", "not used")
    draft.set(where + "weight_decay", config.weight_decay, "optimizer.weight_decay")
    draft.set(where + "clip_grad", bound, "optimizer.max_grad_norm")


def _batches(draft: Draft) -> None:
    config, rollout, options = draft.config.optimizer, draft.config.rollout, draft.options
    prompts, rest = divmod(rollout.prompts, config.updates_per_batch)
    source = "optimizer.updates_per_batch"
    if rest:
        draft.refuse(
            source,
            f"{config.updates_per_batch} does not divide rollout.prompts={rollout.prompts}; verl updates by prompts",
        )
    elif prompts * rollout.samples % options.data_parallel:
        draft.refuse(
            source,
            f"an update of {prompts} prompts x {rollout.samples} samples cannot be shared by {options.data_parallel} "
            "data-parallel ranks; change the batch or the layout",
        )
    draft.set("actor.ppo_mini_batch_size", max(prompts, 1), source)
    draft.set("actor.ppo_epochs", 1, source)
    draft.set("actor.shuffle", False, source)
    longest = options.max_prompt_tokens + rollout.max_tokens
    if config.micro_batch_tokens * options.sequence_gpus < longest:
        draft.refuse(
            "optimizer.micro_batch_tokens",
            f"{config.micro_batch_tokens} on each of {options.sequence_gpus} GPUs: a sequence may have {longest} "
            "tokens (max_prompt_tokens + rollout.max_tokens); raise it, or let more GPUs share a sequence",
        )
    draft.set("actor.use_dynamic_bsz", True, "optimizer.micro_batch_tokens")
    draft.set("actor.ppo_max_token_len_per_gpu", config.micro_batch_tokens, "optimizer.micro_batch_tokens")


def _loss_scaling(draft: Draft) -> None:
    scaling, source = draft.config.loss_scaling, "loss_scaling"
    if draft.policy.train != "fp16":
        draft.unused(source, f"the learner is {draft.policy.train}")
        return
    if scaling is None:
        _default_scaler(draft)
        return
    if scaling.rule == "auto":
        draft.refuse(source + ".rule", "auto: verl has the dynamic rule only")
    else:
        draft.fixed(source + ".rule", "dynamic")
    for name, value in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
        draft.only(f"{source}.{name}", getattr(scaling, name), value, f"verl multiplies by {value}")
    draft.only(source + ".retries", scaling.retries, 0, "verl gives a batch up at its first overflow")
    if draft.megatron:
        place = "actor.optim.override_optimizer_config."
        draft.set(place + "initial_loss_scale", scaling.initial, source + ".initial")
        draft.set(place + "min_loss_scale", scaling.floor, source + ".floor")
        draft.set(place + "loss_scale_window", scaling.growth_interval, source + ".growth_interval")
        draft.set(place + "hysteresis", 1, source)
        return
    draft.only(source + ".initial", scaling.initial, 65536.0, "verl's scaler begins at 65536, by no key")
    draft.only(source + ".growth_interval", scaling.growth_interval, 400, "verl's scaler grows after 400, by no key")
    draft.only(source + ".floor", scaling.floor, 0.0, "verl's scaler has no floor: it halves for ever, in silence")


def _default_scaler(draft: Draft) -> None:
    source = "loss_scaling"
    if draft.megatron:
        place = "actor.optim.override_optimizer_config."
        for name, value in (("initial_loss_scale", 65536.0), ("min_loss_scale", 1.0), ("loss_scale_window", 400),
                            ("hysteresis", 1)):  # fmt: skip
            draft.set(place + name, value, source)
    draft.differs(source, "an overflow costs the batch there; here the backward pass is repeated on it")
    if not draft.megatron:
        draft.differs(source, "the same scale and growth, but no floor: it halves for ever, in silence")


def _evaluation(draft: Draft) -> None:
    evaluation, source = draft.config.evaluation, "evaluation"
    draft.set("trainer.val_before_train", False, source)
    draft.set("trainer.test_freq", -1 if evaluation is None else evaluation.every, source + ".every" if evaluation else
              source)  # fmt: skip
    if evaluation is None:
        draft.set("data.val_max_samples", 1, source)
        return
    draft.set("data.val_max_samples", evaluation.problems, source + ".problems")
    sampled = evaluation.samples > 0
    draft.set("rollout.val_kwargs.n", max(evaluation.samples, 1), source + ".samples")
    draft.set("rollout.val_kwargs.do_sample", sampled, source + ".samples")
    draft.set("rollout.val_kwargs.temperature", draft.config.rollout.temperature if sampled else 0, source + ".samples")
    if sampled:
        draft.differs(source + ".samples", "verl evaluates in one way: avg@k, without the greedy answer")


def _loop(draft: Draft) -> None:
    config = draft.config
    draft.set("trainer.total_training_steps", config.steps, "steps")
    draft.set("trainer.total_epochs", _FOREVER, "steps")
    draft.set("trainer.save_freq", config.checkpoint.every, "checkpoint.every")
    draft.set("trainer.max_actor_ckpt_to_keep", config.checkpoint.keep, "checkpoint.keep")
    draft.set("trainer.logger", ["console", *config.trackers], "trackers")
    draft.set("trainer.project_name", "mantissa", "name")
    draft.set("trainer.experiment_name", config.name, "name")
    if config.guard is not None:
        draft.refuse("guard", "verl does not leave a format by itself; leave it out, or train with mantissa train")
    else:
        draft.fixed("guard", "not used")
    draft.unused("nproc", "--nodes and --gpus say how many processes")
    draft.unused("parallel", "--engine says how the learner is held")
    if config.run_dir is None:
        draft.unused("run_dir", "verl writes to checkpoints/mantissa/NAME")
    else:
        draft.set("trainer.default_local_dir", config.run_dir, "run_dir")
    draft.set("data.seed", config.seed, "seed")
    if draft.options.version in SINCE_09:
        draft.set("rollout.seed", config.seed, "seed")
    draft.set("actor.data_loader_seed", config.seed, "seed")
    draft.set("actor.megatron.seed" if draft.megatron else "actor.fsdp_config.seed", config.seed, "seed")
    draft.differs("seed", "the same seed draws other samples: verl's draws depend on the machines and their number")


def export(config: RunConfig, options: LaunchOptions) -> Plan:
    """Translate every field of a recipe to keys that this verl, with these engines, reads.

    Raises ``MantissaError`` with every reason at once where something that the recipe asks for would be ignored there,
    is hard-coded, or is beyond the hardware.
    """
    draft = Draft(config, options)
    precision(draft)
    algorithm(draft)
    run(draft)
    return draft.finish()
