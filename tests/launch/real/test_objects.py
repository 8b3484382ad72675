"""The exported values, as the objects that verl's workers read: not only in the tree."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mantissa.launch import Plan
from mantissa.launch.facts import Engine

pytestmark = pytest.mark.verl
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def worker(
    planned: Callable[..., Plan], compose: Callable[[Sequence[str]], Any], verl_version: str
) -> Callable[..., Any]:
    """What ``ActorRolloutRefWorker.init_model`` makes of the exported configuration: actor, ref and rollout objects."""

    def made(*features: str, **options: Any) -> SimpleNamespace:
        plan = planned(*features, version=verl_version, **options)
        return objects(compose([str(one) for one in plan.overrides]))

    return made


def objects(tree: Any) -> SimpleNamespace:
    """verl's dataclasses, made as its worker makes them: it renames four keys of the reference first."""
    from omegaconf import open_dict
    from verl.utils.config import omega_conf_to_dataclass

    part = tree.actor_rollout_ref
    with open_dict(part.ref):
        for old, new in (("log_prob_micro_batch_size", "ppo_micro_batch_size"),
                         ("log_prob_micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu"),
                         ("log_prob_use_dynamic_bsz", "use_dynamic_bsz"),
                         ("log_prob_max_token_len_per_gpu", "ppo_max_token_len_per_gpu")):  # fmt: skip
            part.ref[new] = part.ref.pop(old)
    return SimpleNamespace(
        actor=omega_conf_to_dataclass(part.actor),
        ref=omega_conf_to_dataclass(part.ref),
        rollout=omega_conf_to_dataclass(part.rollout),
    )


def fsdp_engine(config: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What verl's FSDP engine hands to torch: its own ``_build_fsdp_module``, with torch's wrapping left out."""
    from verl.workers.engine.fsdp import transformer_impl

    seen: dict[str, Any] = {}

    def fsdp1(module: Any, **kwargs: Any) -> Any:
        seen["mixed_precision"] = kwargs["mixed_precision"]
        return module

    def fsdp2(module: Any, kwargs: dict[str, Any], config: Any) -> None:
        seen["mixed_precision"] = kwargs["mp_policy"]

    monkeypatch.setattr(transformer_impl, "FSDP", fsdp1)
    monkeypatch.setattr(transformer_impl, "apply_fsdp2", fsdp2)
    monkeypatch.setattr(transformer_impl, "fsdp2_load_full_state_dict", lambda *_: None)
    monkeypatch.setattr(transformer_impl, "get_fsdp_wrap_policy", lambda **_: None)
    monkeypatch.setattr(transformer_impl, "get_sharding_strategy", lambda *_, **__: None)
    monkeypatch.setattr(transformer_impl, "fsdp_version", lambda _: 0)
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    # without a GPU torch switches every scaler off, and its figures with it
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    engine = object.__new__(transformer_impl.FSDPEngine)
    engine.engine_config = config
    engine.model_config = SimpleNamespace(lora_rank=0, enable_activation_offload=False)
    engine.device_mesh = None
    engine._build_fsdp_module(torch.nn.Linear(2, 2))
    return SimpleNamespace(autocast=engine._autocast_dtype, scaler=engine.scaler, **seen)


@pytest.mark.parametrize("engine", ["fsdp", "fsdp2"])
@pytest.mark.parametrize(
    ("features", "learner", "rollout", "quantization"),
    [
        (("precision=bf16-train-fp16-rollout",), "bf16", "float16", None),
        (("precision=fp16", "precision.rollout=bf16"), "fp16", "bfloat16", None),
        (("precision=fp16", "precision.rollout=fp32"), "fp16", "float32", None),
        (("precision=fp8-rollout",), "bf16", "bfloat16", "fp8"),
        (("precision=fp8-rollout", "precision.train=fp16", "precision.fp8={base: fp16}"), "fp16", "float16", "fp8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_precision_reaches_fsdp_s_policy_the_scaler_and_the_rollout(
    engine: Engine, features: tuple[str, ...], learner: str, rollout: str, quantization: str | None,
    worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made = worker(*features, engine=engine)
    assert made.actor.strategy == engine
    assert made.actor.engine.strategy == engine
    assert made.actor.engine.model_dtype == "fp32"
    built = fsdp_engine(made.actor.engine, monkeypatch)
    assert built.mixed_precision.param_dtype is DTYPES[learner]
    assert built.mixed_precision.reduce_dtype is torch.float32
    assert built.autocast is DTYPES[learner]
    if learner == "fp16":
        assert type(built.scaler).__name__ == "ShardedGradScaler"
        assert (built.scaler._init_scale, built.scaler._growth_interval) == (65536.0, 400)
        assert (built.scaler._growth_factor, built.scaler._backoff_factor) == (2.0, 0.5)
    else:
        assert built.scaler is None
    assert (made.rollout.dtype, made.rollout.quantization) == (rollout, quantization)
    assert made.rollout.calculate_log_probs is True
    assert made.rollout.logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize("engine", ["fsdp", "fsdp2"])
def test_the_reference_computes_in_the_learner_s_format_unless_it_is_told_otherwise(
    engine: Engine, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kl = ("algorithm.reference={}", "algorithm.kl={coefficient: 0.01}", "precision=fp16")
    for features, wanted in ((kl, "fp16"), ((*kl, "precision.reference=bf16"), "bf16")):
        made = worker(*features, engine=engine)
        assert made.ref.engine.forward_only
        assert made.ref.engine.strategy == engine
        built = fsdp_engine(made.ref.engine, monkeypatch)
        assert built.mixed_precision.param_dtype is DTYPES[wanted]
        assert fsdp_engine(made.actor.engine, monkeypatch).autocast is torch.float16


@pytest.mark.parametrize("engine", ["fsdp", "fsdp2"])
def test_the_no_op_that_check_verl_reports_is_one(
    engine: Engine, compose: Callable[[Sequence[str]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``actor.fsdp_config.dtype=float16`` and nothing else: bf16 everywhere, and no scaler."""
    overrides = ["actor_rollout_ref.actor.fsdp_config.dtype=float16", "actor_rollout_ref.actor.use_dynamic_bsz=true",
                 f"actor_rollout_ref.actor.strategy={engine}", "actor_rollout_ref.rollout.name=vllm"]  # fmt: skip
    made = objects(compose(overrides))
    assert made.actor.engine.dtype == "float16"
    built = fsdp_engine(made.actor.engine, monkeypatch)
    assert built.mixed_precision.param_dtype is torch.bfloat16
    assert built.autocast is torch.bfloat16
    assert built.scaler is None
    assert made.rollout.dtype == "bfloat16"
    assert fsdp_engine(made.ref.engine, monkeypatch).autocast is torch.bfloat16


def test_the_optimizer_that_fsdp_builds_has_our_figures(worker: Callable[..., Any]) -> None:
    from verl.workers.config.optimizer import build_optimizer

    made = worker("optimizer.eps=1e-7", "optimizer.betas=[0.8, 0.95]", "optimizer.weight_decay=0.3",
                  "optimizer.lr=2e-6", "optimizer.max_grad_norm=0.7", "optimizer.warmup=10")  # fmt: skip
    group = build_optimizer(torch.nn.Linear(2, 2).parameters(), made.actor.optim).param_groups[0]
    assert (group["lr"], group["eps"], tuple(group["betas"]), group["weight_decay"]) == (2e-6, 1e-7, (0.8, 0.95), 0.3)
    assert made.actor.optim.clip_grad == 0.7
    assert made.actor.optim.lr_warmup_steps == 3  # RL steps: 10 updates, 4 a step
    assert made.actor.ppo_mini_batch_size == 8


def megatron_optimizer(actor: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's own ``OptimizerConfig``, as verl's engine makes it where Transformer Engine is installed."""
    config = pytest.importorskip("megatron.core.optimizer.optimizer_config")
    from verl.utils.megatron.optimizer import init_megatron_optim_config
    from verl.utils.torch_dtypes import PrecisionType

    def fused_adam(
        master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
    ) -> None:
        """What Megatron looks at: its arguments' names."""

    monkeypatch.setattr(config, "is_te_min_version", lambda *_: True)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(FusedAdam=fused_adam))
    dtype = PrecisionType.to_dtype(actor.engine.dtype)
    asked = {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16}
    known = inspect.signature(init_megatron_optim_config).parameters  # 0.8 asks for fp16 alone
    return init_megatron_optim_config(actor.optim, **{name: value for name, value in asked.items() if name in known})


def test_fp16_reaches_megatron_s_optimizer_with_the_recipe_s_loss_scale(
    worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worker("precision=fp16", "loss_scaling={initial: 4096, growth_interval: 250, floor: 2, retries: 0}",
                  "optimizer.eps=1e-7", "optimizer.betas=[0.8, 0.95]", "optimizer.max_grad_norm=.inf",
                  engine="megatron")  # fmt: skip
    assert made.actor.engine.dtype == "float16"
    built = megatron_optimizer(made.actor, monkeypatch)
    assert (built.fp16, built.bf16, built.params_dtype) == (True, False, torch.float16)
    assert (built.initial_loss_scale, built.loss_scale_window, built.min_loss_scale) == (4096, 250, 2)
    assert built.hysteresis == 1
    assert (built.adam_beta1, built.adam_beta2, built.adam_eps) == (0.8, 0.95, 1e-7)
    assert built.clip_grad == 0.0  # never
    assert made.rollout.dtype == "float16"


def test_fp8_reaches_megatron_s_optimizer_and_transformer(
    worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worker("precision=fp8", engine="megatron")
    built = megatron_optimizer(made.actor, monkeypatch)
    assert (built.bf16, built.fp8_recipe) == (True, "blockwise")
    from megatron.core.transformer import TransformerConfig

    overrides = dict(made.actor.engine.override_transformer_config)
    fields = TransformerConfig.__dataclass_fields__
    assert {"fp8", "fp8_recipe"} <= fields.keys()
    assert (overrides["fp8"], overrides["fp8_recipe"]) == ("hybrid", "blockwise")
    assert (made.rollout.dtype, made.rollout.quantization) == ("bfloat16", "fp8")


def test_megatron_s_reference_does_not_inherit_fp16(
    worker: Callable[..., Any], compose: Callable[[Sequence[str]], Any]
) -> None:
    """A trap, and the exporter's way around it."""
    tree = compose(["model_engine=megatron", "actor_rollout_ref.actor.megatron.dtype=float16"])
    assert tree.actor_rollout_ref.ref.megatron.dtype == "bfloat16"
    kl = ("algorithm.reference={}", "algorithm.kl={coefficient: 0.01}", "precision=fp16")
    made = worker(*kl, engine="megatron")
    assert made.ref.engine.dtype == "float16"
    assert worker(*kl, "precision.reference=bf16", engine="megatron").ref.engine.dtype == "bfloat16"


def test_dynamic_sampling_reaches_the_buffer_that_does_it(
    planned: Callable[..., Plan], compose: Callable[[Sequence[str]], Any], verl_version: str
) -> None:
    if verl_version == "0.8.0":
        pytest.skip("0.8 has none, and the exporter refuses it")
    pytest.importorskip("transfer_queue", reason="verl's trainer needs TransferQueue")
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    plan = planned("rollout.dynamic={}", version=verl_version)
    trainer = SimpleNamespace(config=compose([str(one) for one in plan.overrides]))
    assert PPOTrainer._resolve_filter_groups_metric(trainer) == "acc"
