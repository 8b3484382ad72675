"""Model, problems, sampling, optimiser, evaluation and the loop in verl's words.

verl counts in prompts where Mantissa counts in optimiser steps: ``updates_per_batch`` becomes a mini-batch of prompts.
Its learning rate moves once an RL step, so a warm-up is counted in those. It keeps what it grades in files: problems
must be in DAPO's schema (``mantissa data dapo``), and what is held out in files of its own.
"""

from __future__ import annotations

import math

from mantissa.launch.facts import SINCE_09
from mantissa.launch.plan import Draft
from mantissa.model import LoraConfig
from mantissa.model.hub import is_gguf
from mantissa.tasks import DatasetConfig

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
