"""What verl's configuration keys really do: one table, which the exporter, ``check-verl`` and the documentation share.

verl validates almost nothing. An unknown key stops hydra, but a known key that the chosen engine does not read is
accepted in silence, and so is a value like ``dtype=bogus``. So each key that is written stands here with the engines
and versions that read it and the file that does; a test looks it up in the real verl, in the tree and in that file.

Keys are written without ``actor_rollout_ref.`` where they begin with ``actor.``, ``rollout.``, ``ref.`` or ``model.``.
``new``: the key is not in the tree, so hydra wants ``+key=value``. ``read_in``: the file of verl, below ``verl/``,
in which the key's last name (or ``as_``) occurs, or a folder of such a file. ``trap``: what surprises people.

What verl hands on unread, in a dictionary to Megatron or to the rollout's engine, is here too; who reads it there was
read in Megatron-Core 0.16.1, Megatron-Bridge 0.3.1 and vLLM's and Transformer Engine's documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Engine = Literal["fsdp", "fsdp2", "megatron"]
Rollout = Literal["vllm", "sglang", "trtllm"]
Version = Literal["0.8.0", "0.9.0", "0.9.1"]

FSDPS: tuple[Engine, ...] = ("fsdp", "fsdp2")
MEGATRON: tuple[Engine, ...] = ("megatron",)
ENGINES: tuple[Engine, ...] = (*FSDPS, *MEGATRON)
VLLM: tuple[Rollout, ...] = ("vllm",)
SGLANG: tuple[Rollout, ...] = ("sglang",)
TRTLLM: tuple[Rollout, ...] = ("trtllm",)
ROLLOUTS: tuple[Rollout, ...] = ("vllm", "sglang", "trtllm")
# Rollouts that a recipe outside verl registers around one of verl's own, which is how they are judged.
AROUND: dict[str, tuple[Rollout, str]] = {"dynamo": ("vllm", "recipe.dynamo registers it around verl's vLLM server")}
VERSIONS: tuple[Version, ...] = ("0.8.0", "0.9.0", "0.9.1")
SINCE_09: tuple[Version, ...] = ("0.9.0", "0.9.1")

_ROOT = "actor_rollout_ref."
_UNDER_ROOT = ("actor.", "rollout.", "ref.", "model.")
_FSDP = "workers/engine/fsdp/transformer_impl.py"
_MEGATRON = "workers/engine/megatron/transformer_impl.py"
_MCORE_OPTIM = "utils/megatron/optimizer.py"
_ENGINE_CONFIG = "workers/config/engine.py"
_OPTIM = "workers/config/optimizer.py"
_CORE = "trainer/ppo/core_algos.py"
_LOSSES = "workers/utils/losses.py"
_CORRECTION = "trainer/ppo/rollout_corr_helper.py"
_VLLM = "workers/rollout/vllm_rollout/vllm_async_server.py"
_SGLANG = "workers/rollout/sglang_rollout/async_sglang_server.py"
_TRTLLM = "workers/rollout/trtllm_rollout/trtllm_async_server.py"
_TRAINER = "trainer"
_V1 = "trainer/ppo/v1/trainer_base.py"
_DATASET = "utils/dataset/rl_dataset.py"
_DAPO = "experimental/reward_loop/reward_manager/dapo.py"
_TORCH_NAMES = ("fp16", "float16", "bf16", "bfloat16", "fp32", "float32")


def full(key: str) -> str:
    """The key as verl knows it."""
    return _ROOT + key if key.startswith(_UNDER_ROOT) else key


def short(key: str) -> str:
    """The key as it stands in the table."""
    return key.removeprefix(_ROOT)


@dataclass(frozen=True)
class Fact:
    """One key that somebody reads."""

    key: str
    what: str
    read_in: str
    as_: str | None = None
    engines: tuple[Engine, ...] = ENGINES
    rollouts: tuple[Rollout, ...] = ROLLOUTS
    versions: tuple[Version, ...] = VERSIONS
    new: bool = False
    values: tuple[str, ...] = ()  # those that its reader understands; any where empty
    values_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by engine or rollout, where they differ
    says: Mapping[str, str] = field(default_factory=dict)  # what a value means, where that is not plain
    trap: str = ""

    def understood(self, engine: Engine, rollout: Rollout) -> tuple[str, ...]:
        """The values that the reader among ``engine`` and ``rollout`` understands; any where empty."""
        return self.values_by.get(engine) or self.values_by.get(rollout) or self.values

    @property
    def token(self) -> str:
        return self.as_ or self.key.rpartition(".")[2]


_SCALER = (
    "brings ShardedGradScaler(growth_interval=400): fixed, in no checkpoint, in no metric; the learning rate moves on "
    "over a skipped step"
)

_PRECISION = (
    Fact("actor.strategy", "the learner's engine", "workers/engine_workers.py", as_="strategy"),
    Fact("actor.fsdp_config.mixed_precision.param_dtype", "the learner's compute format, and autocast's", _FSDP,
         engines=FSDPS, new=True, values=_TORCH_NAMES, trap="bf16 where not given; fp16 " + _SCALER),
    Fact("actor.fsdp_config.mixed_precision.reduce_dtype", "the format in which gradients are reduced", _FSDP,
         engines=FSDPS, new=True, values=_TORCH_NAMES),
    Fact("actor.fsdp_config.mixed_precision.buffer_dtype", "the format of buffers", _FSDP, engines=("fsdp",),
         new=True, values=_TORCH_NAMES),
    Fact("actor.fsdp_config.model_dtype", "the format of master weights and Adam's moments", _FSDP, engines=FSDPS,
         values=_TORCH_NAMES, trap="bf16 here loses most updates at a learning rate of 1e-6"),
    Fact("actor.megatron.dtype", "the learner's compute format", _MEGATRON, as_="engine_config.dtype",
         engines=MEGATRON, values=("bfloat16", "float16"),
         trap="float16 begins its loss scale at 32768; the reference does not inherit it"),
    Fact("actor.megatron.override_transformer_config.fp8", "which operands are 8 bits wide", _MEGATRON,
         as_="override_transformer_config", engines=MEGATRON, new=True, values=("hybrid", "e4m3"),
         says={"hybrid": "e4m3 forwards, e5m2 (2 bits of mantissa) for the gradients of activations",
               "e4m3": "e4m3 forwards and backwards (3 bits), as verl's own 30B recipe: a scale for each block covers "
                       "the range of gradients"},
         trap="the reference inherits it; dimensions must be multiples of 128"),
    Fact("actor.megatron.override_transformer_config.fp8_recipe", "how operands are scaled", _MEGATRON,
         as_="override_transformer_config", engines=MEGATRON, new=True,
         values=("blockwise", "delayed", "tensorwise", "mxfp8"),
         says={"blockwise": "128 x 128 of a weight and 1 x 128 of an activation share a scale, as in verl's rollout",
               "delayed": "one scale for a tensor, from earlier steps", "tensorwise": "one scale for a tensor",
               "mxfp8": "32 numbers share a power of two; Blackwell only"},
         trap="blockwise wants CUDA 12.9; delayed where fp8 is set and this is not"),
    Fact("actor.optim.override_optimizer_config.fp8_recipe", "tells the optimizer how weights are scaled",
         _MCORE_OPTIM, as_="override_optimizer_config", engines=MEGATRON, new=True,
         values=("blockwise", "delayed", "tensorwise", "mxfp8"),
         trap="the same as override_transformer_config.fp8_recipe: it decides who keeps the masters"),
    Fact("actor.megatron.use_mbridge", "build and export the model through a bridge", _MEGATRON, engines=MEGATRON,
         values=("True", "true"), trap="verl's engine asserts it"),
    Fact("actor.megatron.vanilla_mbridge", "which bridge", _MEGATRON, engines=MEGATRON,
         says={"False": "Megatron-Bridge", "True": "the old mbridge, which takes no QAT and has no fp8 recipes"},
         trap="true by default in 0.8, false since 0.9, where true is deprecated"),
    Fact("ref.fsdp_config.mixed_precision.param_dtype", "the reference's compute format", _FSDP, engines=FSDPS,
         new=True, values=_TORCH_NAMES, trap="bf16 where not given; the actor's is not inherited"),
    Fact("ref.fsdp_config.model_dtype", "the format in which the reference's weights are held", _FSDP, engines=FSDPS,
         values=_TORCH_NAMES, trap="null means bf16 for a reference, fp32 for a learner"),
    Fact("ref.megatron.dtype", "the reference's compute format", _MEGATRON, as_="engine_config.dtype",
         engines=MEGATRON, values=("bfloat16", "float16"), trap="bfloat16 where not given, whatever the actor's is"),
    Fact("rollout.dtype", "the format that the rollout computes in", _VLLM, as_="self.config.dtype",
         values=("auto", "half", "float16", "bfloat16", "float", "float32"),
         trap="bfloat16 where not given, whatever the learner's is"),
    Fact("rollout.quantization", "8-bit weights (128 x 128) and activations (1 x 128)", _VLLM,
         values=("fp8", "torchao", "ascend"), values_by={"sglang": ("fp8",), "trtllm": ("fp8",)},
         trap="on SGLang a tensor that fails is logged and left unquantised; TensorRT-LLM wants load_format=dummy"),
    Fact("rollout.logprobs_mode", "which log-probs vLLM returns", _VLLM, rollouts=VLLM,
         values=("processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"),
         trap="raw ones are before temperature, top-k and top-p"),
    Fact("rollout.calculate_log_probs", "whether the rollout's log-probs are kept", _TRAINER,
         trap="without it the gap is not measured and no correction is possible; false by default before 0.9"),
    Fact("rollout.checkpoint_engine.backend", "how weights travel to the rollout", "workers/engine_workers.py"),
    Fact("model.lora.merge", "send merged weights instead of adapters", "workers/engine_workers.py", as_="merge"),
)  # fmt: skip

_TRANSFORMER = "actor.megatron.override_transformer_config"
_DDP = "actor.megatron.override_ddp_config"
_ADAM = "actor.optim.override_optimizer_config"


def _handed(prefix: str, read_in: str, rows: Mapping[str, tuple[str, str]], **about: Any) -> tuple[Fact, ...]:
    """Keys inside a dictionary that verl hands on: name -> (what it decides, what surprises people)."""
    inside = "engine_kwargs" if "engine_kwargs" in prefix else prefix.rpartition(".")[2]
    return tuple(
        Fact(f"{prefix}.{name}", what, read_in, as_=inside, new=True, trap=trap, **about)
        for name, (what, trap) in rows.items()
    )


_WINS = "verl puts this dictionary after its own arguments, so it wins over"
_HANDED = (
    *_handed(_TRANSFORMER, _MEGATRON, {
        "fp8_param": ("keep the weights themselves in 8 bits", "verl's export to the rollout expects 16"),
        "fp8_wgrad": ("false: the gradient of weights is a product in 16 bits", ""),
        "fp8_margin": ("bits of headroom in the scale", "of the delayed recipe only"),
        "fp8_interval": ("nothing: Transformer Engine ignores it since 1.8", ""),
        "fp8_amax_history_len": ("steps that a scale remembers", "of the delayed recipe only"),
        "fp8_amax_compute_algo": ("which of them decides", "of the delayed recipe only"),
        "fp8_dot_product_attention": ("attention's products in 8 bits too", "the rollout's attention stays as it is"),
        "fp8_multi_head_attention": ("all of attention in 8 bits", "the rollout's attention stays as it is"),
        "tp_only_amax_red": ("which GPUs agree on a scale", ""),
        "first_last_layers_bf16": ("the outermost layers stay 16 bits", "the rollout quantises them "
                                   "unless its quantization_config names them: a gap of its own"),
        "num_layers_at_start_in_bf16": ("how many first layers", "with first_last_layers_bf16 only"),
        "num_layers_at_end_in_bf16": ("how many last layers", "with first_last_layers_bf16 only"),
        "moe_router_padding_for_fp8": ("pads an expert's tokens to what 8-bit products take", ""),
        "attention_softmax_in_fp32": ("attention's softmax in fp32", "true where not given"),
        "apply_query_key_layer_scaling": ("divides scores by the layer's number, for fp16; softmax then in fp32", ""),
        "fp32_residual_connection": ("the residual stream in fp32", "the rollout's stays in rollout.dtype"),
        "fp16": ("the model's format", "actor.megatron.dtype says it for the optimizer too; use that"),
        "bf16": ("the model's format", "actor.megatron.dtype says it for the optimizer too; use that"),
        "params_dtype": ("the format of weights", "actor.megatron.dtype says it for the optimizer too; use that"),
    }, engines=MEGATRON),
    *_handed(_TRANSFORMER, _MEGATRON, {
        "moe_router_dtype": ("the format of routing and of the weighted mean of experts",
                             "the learner's where not given; the rollout's router has its own, and an expert chosen "
                             "otherwise there is a gap that no format closes"),
    }, engines=MEGATRON, values=("fp32", "fp64")),
    *_handed(_TRANSFORMER, _MEGATRON, {"fp4": ("4-bit products (NVFP4, Blackwell)", "not together with fp8")},
             engines=MEGATRON, values=("e2m1",)),
    *_handed(_DDP, _MEGATRON, {
        "grad_reduce_in_fp32": ("gradients summed over ranks in fp32", "true where not given: verl sets it"),
        "fp8_param_gather": ("weights gathered in 8 bits", "with fp8_param only"),
        "reuse_grad_buf_for_mxfp8_param_ag": ("weights gathered through the gradients' buffer",
                                              "mxfp8 with fp8_param_gather only; the optimizer's must say the same"),
        "keep_fp8_transpose_cache": ("memory for speed", "Megatron-FSDP only"),
    }, engines=MEGATRON),
    *_handed(_ADAM, _MCORE_OPTIM, {
        "use_precision_aware_optimizer": (
            "lets masters, gradients and moments be narrower than fp32, in Transformer Engine's Adam",
            "by itself it narrows none of them: each has a dtype of its own (actor.optim.exp_avg_dtype, ...); verl's "
            "fp16 turns it on"),
        "store_param_remainders": ("a bf16 weight's master is kept as the 16 bits that the weight lacks",
                                   "exact; precision-aware only; off for fp16"),
        "loss_scale": ("a fixed loss scale instead of the dynamic one", "fp16 only"),
        "reuse_grad_buf_for_mxfp8_param_ag": ("weights gathered through the gradients' buffer",
                                              "mxfp8 with fp8_param_gather only"),
    }, engines=MEGATRON),
    *(Fact(f"actor.optim.{name}", what, _MCORE_OPTIM, engines=MEGATRON, versions=SINCE_09, values=values, trap=trap)
      for name, what, values, trap in (
        ("use_precision_aware_optimizer", "lets gradients and moments be narrower than fp32", (), "bf16 only"),
        *((name, what, ("fp32", "bf16"), "with use_precision_aware_optimizer only") for name, what in (
            ("main_grads_dtype", "the format in which gradients add up and are reduced"),
            ("exp_avg_dtype", "the format of Adam's first moment"),
            ("exp_avg_sq_dtype", "the format of Adam's second moment"))))),
    *_handed("rollout.engine_kwargs.vllm", _VLLM, {
        "dtype": ("the format that vLLM computes in", f"{_WINS} rollout.dtype"),
        "quantization": ("vLLM's own quantisation", f"{_WINS} rollout.quantization, and weights that arrive later are "
                         "not quantised by verl then"),
        "logprobs_mode": ("which log-probs vLLM returns", f"{_WINS} rollout.logprobs_mode"),
        "kv_cache_dtype": ("the format of vLLM's key-value cache", "8 bits there round what the learner does not: more "
                           "gap, and no key of verl tells it"),
        "calculate_kv_scales": ("scales for an 8-bit cache from the first batch", "1 where not given"),
        "mamba_cache_dtype": ("the format of a state-space model's state", ""),
        "mamba_ssm_cache_dtype": ("the format of a state-space model's state", ""),
    }, rollouts=VLLM),
    *_handed("rollout.engine_kwargs.sglang", _SGLANG, {
        "dtype": ("the format that SGLang computes in", f"{_WINS} rollout.dtype"),
        "quantization": ("SGLang's own quantisation", f"{_WINS} rollout.quantization"),
        "kv_cache_dtype": ("the format of SGLang's key-value cache", "8 bits there round what the learner does not"),
        "fp8_gemm_runner_backend": ("which kernels multiply in 8 bits", ""),
        "enable_fp32_lm_head": ("logits in fp32", "the learner's are rounded to its format"),
    }, rollouts=SGLANG),
    *_handed("rollout.engine_kwargs.trtllm", _TRTLLM, {
        "dtype": ("the format that TensorRT-LLM computes in", f"{_WINS} rollout.dtype"),
        "kv_cache_config.dtype": ("the format of its key-value cache", "8 bits there round what the learner does not"),
    }, rollouts=TRTLLM),
    *(Fact(f"actor.{place}.qat.{name}", what, reader, engines=engines, as_=as_, trap=trap,
           values=() if name != "mode" else ("w4a16", "w4a4") if engines is FSDPS else ("w4a16",))
      for place, engines, reader in (("fsdp_config", FSDPS, _FSDP), ("megatron", MEGATRON, _MEGATRON))
      for name, as_, what, trap in (
        ("enable", "_qat_config", "train on weights rounded to 4 bits (NVFP4), masters and gradients as they are",
         "vLLM reads the same section and serves them rounded; SGLang and TensorRT-LLM do not"),
        ("mode", "_qat_config.mode", "w4a16: weights alone; w4a4: activations too",
         "w4a4 is experimental in verl's words; any other word is an error at start"),
        ("group_size", "_qat_config", "weights that share a scale", "NVFP4 has 16"),
        ("ignore_patterns", "_qat_config", "layers left out", "overrides the list in quantization_config_path"),
        ("activation_observer", "_qat_config", "how activations are ranged", "w4a4 only"),
        ("quantization_config_path", "_qat_config", "what vLLM is told", "required by the rollout"))),
)  # fmt: skip

# Dictionaries that verl hands on unread, by the beginning of the key, and who reads what is in them.
READERS: dict[str, str] = {
    _TRANSFORMER: "Megatron's TransformerConfig (an attribute of Megatron-Bridge's provider, a wrong name included)",
    "ref.megatron.override_transformer_config": "Megatron's TransformerConfig of the reference",
    _DDP: "Megatron's DistributedDataParallelConfig, where a wrong name is an error",
    "actor.megatron.override_mcore_model_config": "verl's own builder of Megatron models",
    _ADAM: "the optimizer's constructor, where a wrong name is an error",
    "rollout.engine_kwargs.vllm": "vLLM's command line, after verl's own arguments",
    "rollout.engine_kwargs.sglang": "SGLang's ServerArgs, after verl's own arguments",
    "rollout.engine_kwargs.trtllm": "TensorRT-LLM's LLM, after verl's own arguments",
    "rollout.checkpoint_engine.engine_kwargs": "the checkpoint engine's constructor",
    "model.override_config": "the model's Hugging Face configuration",
}


def reader_of(key: str) -> str | None:
    """Who reads a key that verl hands on unread in a dictionary, or None."""
    return next((reader for prefix, reader in READERS.items() if key.startswith(prefix + ".")), None)


_LAYOUT = (
    Fact("trainer.nnodes", "machines", _TRAINER),
    Fact("trainer.n_gpus_per_node", "GPUs of each", _TRAINER),
    Fact("trainer.device", "the device", "trainer/ppo/v1/trainer_base.py", versions=SINCE_09),
    Fact("rollout.name", "the rollout's engine", "workers/engine_workers.py", as_="rollout_config.name"),
    Fact("rollout.tensor_model_parallel_size", "GPUs that share one rollout", _VLLM),
    Fact("rollout.gpu_memory_utilization", "share of GPU memory for the rollout", _VLLM),
    Fact("actor.fsdp_config.ulysses_sequence_parallel_size", "GPUs that share one sequence", _FSDP, engines=FSDPS),
    Fact("ref.fsdp_config.ulysses_sequence_parallel_size", "the same, for the reference", _FSDP, engines=FSDPS),
    Fact("actor.fsdp_config.param_offload", "weights to the CPU between uses", _FSDP, engines=FSDPS),
    Fact("actor.fsdp_config.optimizer_offload", "moments to the CPU between uses", _FSDP, engines=FSDPS),
    Fact("actor.megatron.tensor_model_parallel_size", "tensor parallel size", _MEGATRON, engines=MEGATRON),
    Fact("actor.megatron.pipeline_model_parallel_size", "pipeline stages", _MEGATRON, engines=MEGATRON),
    Fact("actor.megatron.expert_model_parallel_size", "expert parallel size", _MEGATRON, engines=MEGATRON),
    Fact("actor.megatron.context_parallel_size", "context parallel size", _MEGATRON, engines=MEGATRON),
    Fact("actor.megatron.param_offload", "weights to the CPU between uses", _MEGATRON, engines=MEGATRON),
    Fact("actor.megatron.optimizer_offload", "moments to the CPU between uses", _MEGATRON, engines=MEGATRON),
)

_DATA = (
    Fact("model.path", "the policy", "workers/config/model.py"),
    Fact("model.lora_rank", "rank of adapters", _FSDP, engines=FSDPS,
         trap="adapters are cast to the base weights' format"),
    Fact("model.lora_alpha", "scale of adapters", _FSDP, engines=FSDPS),
    Fact("model.target_modules", "which projections have adapters", _FSDP, engines=FSDPS),
    Fact("data.train_files", "training problems", _TRAINER),
    Fact("data.val_files", "held-out problems", _TRAINER, trap="loaded even where nothing is evaluated"),
    Fact("data.train_max_samples", "how many training problems", _TRAINER),
    Fact("data.val_max_samples", "how many held-out problems", _TRAINER),
    Fact("data.max_prompt_length", "longest prompt, in tokens", _DATASET),
    Fact("data.max_response_length", "longest response, in tokens", "trainer/config/rollout/rollout.yaml"),
    Fact("data.filter_overlong_prompts", "leave longer prompts out", _DATASET,
         trap="truncation=error would end the run at the first one"),
    Fact("data.train_batch_size", "prompts of a step", _TRAINER),
    Fact("data.seed", "the order of problems", _TRAINER, trap="null draws another order each time"),
    Fact("reward.custom_reward_function.path", "who grades", "trainer/ppo/reward.py"),
    Fact("reward.custom_reward_function.name", "who grades", "trainer/ppo/reward.py"),
    Fact("reward.custom_reward_function.reward_kwargs.verifier", "by which verifier", "trainer/ppo/reward.py",
         as_="reward_kwargs", new=True),
    Fact("reward.custom_reward_function.reward_kwargs.timeout_s", "limit on one sample", "trainer/ppo/reward.py",
         as_="reward_kwargs", new=True),
    Fact("reward.custom_reward_function.reward_kwargs.memory_gib", "limit on a grader", "trainer/ppo/reward.py",
         as_="reward_kwargs", new=True),
    Fact("reward.num_workers", "graders", "experimental/reward_loop/reward_loop.py"),
    Fact("reward.reward_manager.name", "what is done with a grade", "trainer/ppo/reward.py",
         as_="reward_manager_cfg.name"),
    Fact("reward.reward_kwargs.overlong_buffer_cfg.enable", "soft overlong punishment", _DAPO, new=True),
    Fact("reward.reward_kwargs.overlong_buffer_cfg.len", "its buffer", _DAPO, as_="overlong_buffer_cfg.len",
         new=True),
    Fact("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor", "its factor", _DAPO, new=True),
    Fact("reward.reward_kwargs.overlong_buffer_cfg.log", "log it", _DAPO, as_="overlong_buffer_cfg.log", new=True),
    Fact("reward.reward_kwargs.max_resp_len", "the length it ends at", _DAPO, new=True),
)  # fmt: skip

_SAMPLING = (
    Fact("rollout.n", "responses to each prompt", _TRAINER, as_="rollout.n"),
    Fact("rollout.temperature", "divides the logits, in rollout and learner alike", _TRAINER),
    Fact("rollout.top_p", "1: no nucleus", "experimental/agent_loop/agent_loop.py"),
    Fact("rollout.top_k", "-1: no top-k", "experimental/agent_loop/agent_loop.py"),
    Fact("rollout.seed", "the rollout's draws", _VLLM, as_="self.config", versions=SINCE_09),
    Fact("rollout.val_kwargs.n", "samples of each held-out problem", _TRAINER),
    Fact("rollout.val_kwargs.do_sample", "sample them, or be greedy", _TRAINER),
    Fact("rollout.val_kwargs.temperature", "at this temperature", "experimental/agent_loop/agent_loop.py"),
    Fact("algorithm.filter_groups.enable", "dynamic sampling", _V1, versions=SINCE_09,
         trap="0.9's own trainer does it; 0.8 reads it only in recipe.dapo, which is another repository"),
    Fact("algorithm.filter_groups.metric", "what a group must differ in", _V1, versions=SINCE_09),
    Fact("trainer.use_v1", "the trainer that reads filter_groups", "trainer/main_ppo.py", versions=SINCE_09),
)  # fmt: skip

_ALGORITHM = (
    Fact("algorithm.adv_estimator", "the advantage", _TRAINER),
    Fact("algorithm.norm_adv_by_std_in_grpo", "divide by the group's standard deviation", _TRAINER),
    Fact("algorithm.use_kl_in_reward", "take the KL off the reward", _TRAINER),
    Fact("algorithm.kl_penalty", "its estimator", _TRAINER),
    Fact("algorithm.kl_ctrl.type", "fixed or adaptive", _CORE),
    Fact("algorithm.kl_ctrl.kl_coef", "its coefficient", _CORE),
    Fact("actor.use_kl_loss", "add the KL to the loss", _LOSSES, trap="not weighed by the correction"),
    Fact("actor.kl_loss_type", "its estimator", _LOSSES, trap="k3 is clamped to 10 nats"),
    Fact("actor.kl_loss_coef", "its coefficient", _LOSSES),
    Fact("actor.policy_loss.loss_mode", "the loss", _LOSSES),
    Fact("actor.clip_ratio_low", "lower clip", _CORE),
    Fact("actor.clip_ratio_high", "upper clip", _CORE),
    Fact("actor.clip_ratio_c", "dual clip", _CORE, trap="3 where not given: ppo_clip has it too"),
    Fact("actor.loss_agg_mode", "how token losses become one number", _LOSSES),
    Fact("actor.loss_scale_factor", "the length of seq-mean-token-sum-norm", _LOSSES),
    Fact("actor.entropy_coeff", "entropy bonus", _LOSSES),
    Fact("algorithm.rollout_correction.rollout_is", "level of weights", _CORRECTION,
         values=("token", "sequence", "null"), trap="verl accepts any word until the first step"),
    Fact("algorithm.rollout_correction.rollout_is_threshold", "their bound", _CORRECTION),
    Fact("algorithm.rollout_correction.rollout_is_batch_normalize", "divide them by their mean", _CORRECTION),
    Fact("algorithm.rollout_correction.rollout_rs", "what is rejected", _CORRECTION),
    Fact("algorithm.rollout_correction.rollout_rs_threshold", "beyond which bound", _CORRECTION,
         trap="k1 bounds are on rollout / learner; what is dropped stays in the loss's denominator"),
    Fact("algorithm.rollout_correction.bypass_mode", "old log-probs := the rollout's", _TRAINER,
         trap="0.9's trainer then ignores loss_type and rollout_rs beside it: only policy_loss is read"),
    *(Fact(f"actor.policy_loss.rollout_correction.{name}", f"the same {name}, where the loss reads it", _CORE, new=True)
      for name in ("loss_type", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs",
                   "rollout_rs_threshold")),
)  # fmt: skip

_LOOP = (
    Fact("actor.optim.lr", "learning rate", _OPTIM),
    Fact("actor.optim.lr_warmup_steps", "warm-up", _OPTIM, trap="counted in RL steps, not in optimiser steps"),
    Fact("actor.optim.lr_scheduler_type", "what follows", _FSDP, engines=FSDPS, values=("constant", "cosine")),
    Fact("actor.optim.lr_decay_style", "what follows", _MCORE_OPTIM, engines=MEGATRON),
    Fact("actor.optim.betas", "Adam's decay rates", _OPTIM, engines=FSDPS, trap="Megatron's engine does not read it"),
    Fact("actor.optim.override_optimizer_config.eps", "Adam's epsilon", _OPTIM, as_="override_optimizer_config",
         engines=FSDPS, new=True),
    *(Fact(f"actor.optim.override_optimizer_config.{name}", what, _MCORE_OPTIM, as_="override_optimizer_config",
           engines=MEGATRON, new=True)
      for name, what in (("adam_beta1", "Adam's decay rate"), ("adam_beta2", "Adam's decay rate"),
                         ("adam_eps", "Adam's epsilon"), ("initial_loss_scale", "first loss scale"),
                         ("min_loss_scale", "its floor"), ("loss_scale_window", "clean steps before it grows"),
                         ("hysteresis", "overflows before it falls"))),
    Fact("actor.optim.weight_decay", "weight decay", _OPTIM, trap="on FSDP, of norms and biases too"),
    Fact("actor.optim.clip_grad", "clip bound", _OPTIM, trap="actor.grad_clip is read by nobody"),
    Fact("actor.ppo_mini_batch_size", "prompts of an optimiser step", _TRAINER),
    Fact("actor.ppo_epochs", "passes over a batch", _TRAINER),
    Fact("actor.shuffle", "shuffle between mini-batches", _TRAINER),
    Fact("actor.use_dynamic_bsz", "micro-batches by tokens", "workers/engine_workers.py"),
    Fact("actor.ppo_max_token_len_per_gpu", "tokens of a micro-batch", "workers/engine_workers.py"),
    Fact("actor.data_loader_seed", "seed of mini-batches", _TRAINER),
    Fact("actor.fsdp_config.seed", "seed of the learner", _FSDP, engines=FSDPS),
    Fact("actor.megatron.seed", "seed of the learner", _MEGATRON, engines=MEGATRON),
    Fact("trainer.total_training_steps", "RL steps", _TRAINER),
    Fact("trainer.total_epochs", "epochs at most", _TRAINER),
    Fact("trainer.test_freq", "RL steps between evaluations", _TRAINER),
    Fact("trainer.val_before_train", "evaluate first", _TRAINER),
    Fact("trainer.save_freq", "RL steps between checkpoints", _TRAINER,
         trap="the loss scaler is in none; an fp16 run resumes at 65536"),
    Fact("trainer.max_actor_ckpt_to_keep", "newest checkpoints kept", _TRAINER),
    Fact("trainer.logger", "trackers", _TRAINER),
    Fact("trainer.project_name", "project in trackers", _TRAINER),
    Fact("trainer.experiment_name", "run in trackers", _TRAINER),
    Fact("trainer.default_local_dir", "where checkpoints go", _TRAINER),
)  # fmt: skip

FACTS: dict[str, Fact] = {
    fact.key: fact for fact in (*_PRECISION, *_HANDED, *_LAYOUT, *_DATA, *_SAMPLING, *_ALGORITHM, *_LOOP)
}
PRECISION_KEYS: frozenset[str] = frozenset(fact.key for fact in _PRECISION)
HANDED_KEYS: frozenset[str] = frozenset(fact.key for fact in _HANDED)


@dataclass(frozen=True)
class Needed:
    """An environment variable that every node needs where ``key`` has one of ``values``; ``without``: what else."""

    name: str
    value: str
    key: str
    values: tuple[str, ...]
    without: str
    rollouts: tuple[Rollout, ...] = ROLLOUTS


NEEDED: tuple[Needed, ...] = (
    Needed("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", f"{_TRANSFORMER}.fp8_recipe", ("blockwise",),
           "Transformer Engine rounds the learner's scales up to powers of two, and the rollout's weights have fp32 "
           "scales. Blackwell has no other: it wants 0"),
    Needed("VLLM_USE_DEEP_GEMM", "1", "rollout.quantization", ("fp8",),
           "vLLM before 0.11 leaves DeepGEMM's blockwise products off; later ones use it where it is installed",
           rollouts=VLLM),
    Needed("VLLM_USE_DEEP_GEMM_E8M0", "0", "rollout.quantization", ("fp8",),
           "vLLM rounds the scales of activations up to powers of two, on Hopper too; Blackwell wants 1",
           rollouts=VLLM),
)  # fmt: skip


@dataclass(frozen=True)
class Ignored:
    """A precision key that verl accepts and that the given engines do not read; ``instead`` is what they read."""

    key: str
    why: str
    instead: str = ""
    engines: tuple[Engine, ...] = ENGINES
    rollouts: tuple[Rollout, ...] = ROLLOUTS
    new: bool = False  # not in the tree: accepted only with a plus


_ONLY_MEGATRON = "FSDP reads mixed_precision.param_dtype; only Megatron's engine reads a key called dtype"
IGNORED: tuple[Ignored, ...] = (
    Ignored("actor.fsdp_config.dtype", _ONLY_MEGATRON,
            "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype", engines=FSDPS),
    Ignored("ref.fsdp_config.dtype", _ONLY_MEGATRON,
            "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype", engines=FSDPS),
    Ignored("ref.fsdp_config.mixed_precision.reduce_dtype", "a reference has no gradients", new=True),
    Ignored("actor.fsdp_config.mixed_precision.buffer_dtype", "FSDP2 has no format for buffers", engines=("fsdp2",),
            new=True),
    Ignored("actor.grad_clip", "the engine clips at optim.clip_grad", "actor_rollout_ref.actor.optim.clip_grad",
            engines=FSDPS),
    Ignored("actor.fsdp_config.fp16", "no engine has this key", "+actor_rollout_ref.actor.fsdp_config."
            "mixed_precision.param_dtype", new=True),
    Ignored("rollout.logprobs_mode", "this rollout's adapter does not read it", rollouts=(*SGLANG, *TRTLLM)),
    *(Ignored(f"actor.qat.{name}", "declared, and read by nobody: engines read the section in their own configuration",
              f"actor_rollout_ref.actor.{place}.qat.{name}", engines=engines)
      for place, engines in (("fsdp_config", FSDPS), ("megatron", MEGATRON))
      for name in ("enable", "mode", "group_size", "ignore_patterns", "activation_observer",
                   "quantization_config_path")),
    *(Ignored(f"{_ADAM}.{name}", "a word here stays a word where Megatron wants a dtype: an error at start",
              f"actor_rollout_ref.actor.optim.{name}", engines=MEGATRON, new=True)
      for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
    Ignored("algorithm.rollout_correction.rollout_is_veto_threshold", "verl has no veto any more", new=True),
    Ignored("algorithm.rollout_correction.rollout_token_veto_threshold", "verl has no veto any more", new=True),
)  # fmt: skip
