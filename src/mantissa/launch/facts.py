"""What verl's configuration keys really do: one table, which the exporter, ``check-verl`` and the documentation share.

verl validates almost nothing. An unknown key stops hydra, but a known key that the chosen engine does not read is
accepted in silence, and so is a value like ``dtype=bogus``. So each key that is written stands here with the engines
and versions that read it and the file that does; a test looks it up in the real verl, in the tree and in that file.

Keys are written without ``actor_rollout_ref.`` where they begin with ``actor.``, ``rollout.``, ``ref.`` or ``model.``.
``new``: the key is not in the tree, so hydra wants ``+key=value``. ``read_in``: the file of verl, below ``verl/``,
in which the key's last name (or ``as_``) occurs, or a folder of such a file. ``trap``: what surprises people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["fsdp", "fsdp2", "megatron"]
Rollout = Literal["vllm", "sglang"]
Version = Literal["0.8.0", "0.9.0", "0.9.1"]

FSDPS: tuple[Engine, ...] = ("fsdp", "fsdp2")
MEGATRON: tuple[Engine, ...] = ("megatron",)
ENGINES: tuple[Engine, ...] = (*FSDPS, *MEGATRON)
VLLM: tuple[Rollout, ...] = ("vllm",)
ROLLOUTS: tuple[Rollout, ...] = ("vllm", "sglang")
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
    trap: str = ""

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
         trap="the reference inherits it; dimensions must be multiples of 128"),
    Fact("actor.megatron.override_transformer_config.fp8_recipe", "how operands are scaled", _MEGATRON,
         as_="override_transformer_config", engines=MEGATRON, new=True,
         values=("blockwise", "delayed", "tensorwise", "mxfp8"), trap="blockwise wants CUDA 12.9"),
    Fact("actor.optim.override_optimizer_config.fp8_recipe", "tells the optimizer how weights are scaled",
         _MCORE_OPTIM, as_="override_optimizer_config", engines=MEGATRON, new=True,
         values=("blockwise", "delayed", "tensorwise", "mxfp8")),
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
         values=("fp8", "torchao"), trap="on SGLang a tensor that fails is logged and left unquantised"),
    Fact("rollout.logprobs_mode", "which log-probs vLLM returns", _VLLM, rollouts=VLLM,
         values=("processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"),
         trap="raw ones are before temperature, top-k and top-p"),
    Fact("rollout.calculate_log_probs", "whether the rollout's log-probs are kept", _TRAINER,
         trap="without it the gap is not measured and no correction is possible; false by default before 0.9"),
    Fact("rollout.checkpoint_engine.backend", "how weights travel to the rollout", "workers/engine_workers.py"),
    Fact("model.lora.merge", "send merged weights instead of adapters", "workers/engine_workers.py", as_="merge"),
)  # fmt: skip

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

FACTS: dict[str, Fact] = {fact.key: fact for fact in (*_PRECISION, *_LAYOUT, *_DATA, *_SAMPLING, *_ALGORITHM, *_LOOP)}
PRECISION_KEYS: frozenset[str] = frozenset(fact.key for fact in _PRECISION)


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
    Ignored("rollout.logprobs_mode", "SGLang's adapter does not read it", rollouts=("sglang",)),
    Ignored("algorithm.rollout_correction.rollout_is_veto_threshold", "verl has no veto any more", new=True),
    Ignored("algorithm.rollout_correction.rollout_token_veto_threshold", "verl has no veto any more", new=True),
)  # fmt: skip
