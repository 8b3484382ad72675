"""The precision policy in verl's words.

Three roles, and in verl each is set in a place of its own: the learner by ``mixed_precision`` (FSDP) or ``dtype``
(Megatron), the reference by the same keys below ``ref``, which inherits neither, and the rollout by ``rollout.dtype``
and ``rollout.quantization``. Every one of them is bf16 where it is not set. So all three are always written, bf16 too.
"""

from __future__ import annotations

from mantissa.launch.facts import FSDPS
from mantissa.launch.hardware import CUDA_FOR_BLOCKWISE, cuda_version
from mantissa.launch.plan import Draft
from mantissa.precision.fp8 import Fp8Policy

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
