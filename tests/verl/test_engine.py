"""Our engine against verl's own FSDP2 engine on the same batch, in fp32; and what it keeps in a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_job import make_inputs

pytestmark = [pytest.mark.verl, pytest.mark.slow]

ROWS = [([2, 5, 6], [7, 8, 9, 1]), ([2, 10], [11, 0]), ([2, 5, 6], [12, 13, 14, 15, 16]), ([2, 20, 21, 22], [23])]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The tiny model, one of a family that only transformers knows, and a process group of one."""
    os.environ["VERL_PLATFORM"] = "cpu"
    import mantissa.verl.plugin  # noqa: F401

    folder = tmp_path_factory.mktemp("engine")
    found = {}
    for family in ("qwen3", "olmo2"):
        make_inputs(folder / family, family=family)
        found[family] = folder / family / "model"
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield found
    torch.distributed.destroy_process_group()
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def model(models: dict[str, Path]) -> Path:
    return models["qwen3"]


def engine_of(model: Path, strategy: str, options: dict[str, Any] | None = None, **optim: Any) -> Any:
    """An engine as verl makes it."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    hf = HFModelConfig(
        path=str(model),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    config = FSDPEngineConfig(use_torch_compile=False, mixed_precision=options, micro_batch_size_per_gpu=4)
    object.__setattr__(config, "strategy", strategy)
    made = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=hf,
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.0, "clip_grad": 1e9, **optim}),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def ours(model: Path, **optim: Any) -> Any:
    return engine_of(model, "mantissa", {"precision": "fp32", "length": 16}, **optim)


def theirs(model: Path, **optim: Any) -> Any:
    return engine_of(model, "fsdp2", {"param_dtype": "fp32"}, **optim)


def batch(temperature: Any = 0.7, rows: int = 4) -> Any:
    """One as verl's trainer gives it, with made-up log-probs and advantages."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    draw = torch.Generator().manual_seed(0)

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    pairs = ROWS[:rows]
    responses = [torch.tensor(response) for _, response in pairs]
    whole = [torch.tensor(prompt + response) for prompt, response in pairs]
    fields = {
        "input_ids": nested(whole),
        "position_ids": nested([torch.arange(len(each)) for each in whole]),
        "prompts": nested([torch.tensor(prompt) for prompt, _ in pairs]),
        "responses": nested(responses),
        "response_mask": nested([torch.ones_like(each) for each in responses]),
        "loss_mask": nested([torch.ones_like(each) for each in responses]),
        "old_log_probs": nested([-4.0 - torch.rand(len(each), generator=draw) for each in responses]),
        "ref_log_prob": nested([-4.0 - torch.rand(len(each), generator=draw) for each in responses]),
        "advantages": nested([torch.randn(len(each), generator=draw) for each in responses]),
    }
    data = TensorDict(fields, batch_size=[rows])
    if isinstance(temperature, torch.Tensor):
        data["temperature"] = temperature
    else:
        tu.assign_non_tensor(data, temperature=temperature)
    tu.assign_non_tensor(
        data,
        calculate_entropy=True,
        global_batch_size=rows,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        use_remove_padding=False,
        use_fused_kernels=False,
    )
    return data


def loss() -> Any:
    """verl's PPO loss with an entropy bonus and a KL term."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.2,
        clip_ratio_low=5.0,
        clip_ratio_high=5.0,
    )
    return partial(ppo_loss, config=config)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.get_per_tensor_param(layered_summon=False)[0]}


@pytest.mark.parametrize(
    ("family", "kernels", "temperature"),
    [
        pytest.param("qwen3", "fast", 0.7, id="one"),
        pytest.param("qwen3", "fast", torch.tensor([0.7, 1.0, 1.3, 0.7]), id="by row"),
        pytest.param("olmo2", "fast", torch.tensor([0.7, 1.0, 1.3, 0.7]), id="transformers' own"),
        pytest.param("olmo2", "exact", 0.7, id="adopted"),
    ],
)
def test_an_update_is_verl_s_own(models: dict[str, Path], family: str, kernels: str, temperature: Any) -> None:
    """Log-probs, entropies, loss, the gradient's norm and the weights after a step, at every temperature."""
    model = models[family]
    options = {"precision": {"train": "fp32", "rollout": "fp32", "kernels": kernels}, "length": 16}
    engines = [engine_of(model, "mantissa", options), theirs(model)]
    with torch.no_grad():
        scored = [engine.infer_batch(batch(temperature))["model_output"] for engine in engines]
    for name in ("log_probs", "entropy"):
        a, b = (torch.nested.to_padded_tensor(each[name], 0.0) for each in scored)
        row = [slice(len(prompt) - 1, len(prompt) + len(response) - 1) for prompt, response in ROWS]
        for i, part in enumerate(row):
            torch.testing.assert_close(a[i, part], b[i, part], atol=2e-6, rtol=0)
    outputs = []
    for engine in engines:
        with engine.train_mode():
            outputs.append(engine.train_batch(batch(temperature), loss()))
    assert sum(outputs[0]["loss"]) == pytest.approx(sum(outputs[1]["loss"]), abs=1e-6)
    assert outputs[0]["metrics"]["grad_norm"] == pytest.approx(outputs[1]["metrics"]["grad_norm"], rel=1e-5)
    assert outputs[0]["metrics"]["mantissa/skipped"] == [0]
    mine, other = weights(engines[0]), weights(engines[1])
    assert mine.keys() == other.keys()
    before = weights(ours(model))
    for name, value in mine.items():
        # Adam's first step is lr * sign(gradient) where the gradient is not near its epsilon
        close = (value - other[name]).abs() < 1e-4
        assert close.float().mean() > 0.999, name
    pad = "model.embed_tokens.weight"
    assert torch.equal(mine[pad][0], before[pad][0]), "the pad token was sampled, and its embedding learns nothing"
    assert torch.equal(other[pad][0], before[pad][0])


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_a_policy_goes_on_from_a_checkpoint_bit_for_bit(models: dict[str, Path], tmp_path: Path, family: str) -> None:
    """Weights, moments, scaler and schedule: three updates, the last two again after a load into a fresh engine."""
    model = models[family]
    optim = {"lr_scheduler_type": "cosine", "total_training_steps": 6, "lr_warmup_steps": 2}
    options = {"precision": {"train": "fp16", "rollout": "fp16", "kernels": "exact"}, "length": 16}
    first = engine_of(model, "mantissa", options, **optim)

    def update(engine: Any) -> float:
        with engine.train_mode():
            engine.train_batch(batch(), loss())
        return engine.lr_scheduler_step()

    update(first)
    first.step.scaler.scale = 1024.0
    first.save_checkpoint(str(tmp_path / "global_step_1" / "actor"), global_step=1)
    rates = [update(first), update(first)]
    second = engine_of(model, "mantissa", options, **optim)
    second.load_checkpoint(str(tmp_path / "global_step_1" / "actor"))
    assert second.step.scaler.scale == 1024.0
    assert [update(second), update(second)] == rates
    a, b = weights(first), weights(second)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert first.step.state_dict() == second.step.state_dict()


def test_rates_are_those_of_verl_s_schedules(model: Path) -> None:
    """Each kind, by verl's own functions."""
    from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    cosine = {"lr_scheduler_type": "cosine", "total_training_steps": 9, "lr_warmup_steps": 3, "min_lr_ratio": 0.1}
    for optim, schedule in (
        ({"lr_warmup_steps": 3}, get_constant_schedule_with_warmup(optimizer, 3)),
        (cosine, get_cosine_schedule_with_warmup(optimizer, 3, 9, 0.1)),
        (
            cosine | {"zero_indexed_step": False},
            get_cosine_schedule_with_warmup(optimizer, 3, 9, 0.1, zero_indexed_step=False),
        ),
    ):
        engine = ours(model, **optim)
        for step in range(9):
            assert engine.schedule.rate(step) == pytest.approx(1e-2 * schedule.lr_lambdas[0](step), abs=1e-12)


def test_a_checkpoint_of_another_engine_is_refused(model: Path, tmp_path: Path) -> None:
    from mantissa.base.errors import MantissaError

    with pytest.raises(MantissaError, match="written by another engine"):
        ours(model).load_checkpoint(str(tmp_path))


def test_flowrl_s_update_is_that_of_the_other_engine(model: Path, tmp_path: Path) -> None:
    """Loss, norm and head beside ``mantissa_fsdp2``'s, in fp32; and the head comes back from a checkpoint."""
    from verl_engines import batch as flowrl_batch
    from verl_engines import loss_of

    def loss_function() -> Any:
        return loss_of("flowrl", "seq-mean-token-mean", use_kl_loss=True, kl_loss_coef=0.0)

    numbers = {"partition_lr": 5e-2}
    mine = engine_of(model, "mantissa", {"precision": "fp32", "length": 32, "flowrl": numbers})
    other = engine_of(model, "mantissa_fsdp2", {"param_dtype": "fp32", "flowrl": numbers})
    outputs = []
    for engine in (mine, other):
        head = engine.flowrl.flow.weights["weight"].clone()
        with engine.train_mode():
            outputs.append(engine.train_batch(flowrl_batch(), loss_function()))
        assert not torch.equal(engine.flowrl.flow.weights["weight"], head)
    assert sum(outputs[0]["loss"]) == pytest.approx(sum(outputs[1]["loss"]), rel=1e-6)
    assert outputs[0]["metrics"]["grad_norm"] == pytest.approx(outputs[1]["metrics"]["grad_norm"], rel=1e-5)
    for name, value in mine.flowrl.flow.weights.items():
        close = (value - other.flowrl.flow.weights[name]).abs() < 1e-3 * 5e-2
        assert close.float().mean() > 0.95, name
    mine.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    again = engine_of(model, "mantissa", {"precision": "fp32", "length": 32, "flowrl": numbers})
    again.load_checkpoint(str(tmp_path / "actor"))
    for name, value in mine.flowrl.flow.weights.items():
        assert torch.equal(value, again.flowrl.flow.weights[name])
    assert again.step.optimizer_tensors().keys() == mine.step.optimizer_tensors().keys()


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("mantissa", {"precision": "fp32", "length": 16}), ("mantissa_fsdp2", {"param_dtype": "fp32"})],
)
def test_the_first_update_of_a_step_that_is_asked_for_is_kept(
    model: Path, tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    """Whole: its tokens, the seeds of their draws, and the log-probs that the update's own forward gave."""
    from tensordict import NonTensorStack
    from verl.utils import tensordict_utils as tu

    from mantissa.bench.certificate import read_kept, unhexed
    from mantissa.verl.kept import BESIDE
    from mantissa.verl.serving import request_seed, seed_of

    engine, data = engine_of(model, strategy, options), batch()
    data["rollout_log_probs"] = data["old_log_probs"]
    data["response_mask"] = torch.nested.as_nested_tensor(
        [*data["response_mask"].unbind()[:3], torch.zeros(1, dtype=torch.int64)], layout=torch.jagged
    )  # the last response is a tool's
    for name, values in {"index": list("abcd"), "session_id": [0, 1, 2, 3], "global_steps": [2] * 4}.items():
        data[name] = NonTensorStack(*values)
    sampling = {"temperature": 0.7, "max_tokens": 5}
    asked = {"folder": str(tmp_path / "step-2"), "step": 2, "precision": {"train": "fp32"}, "seed": 3}
    with engine.eval_mode():
        scored = engine.infer_batch(data, None)["model_output"]["log_probs"]
    for times in range(2):  # the second update has other weights
        tu.assign_non_tensor(data, **{BESIDE: asked | {"sampling": sampling}})
        with engine.train_mode():
            engine.train_batch(data, loss())
        kept = read_kept(tmp_path / "step-2")
        assert [(list(each.prompt), list(each.response)) for each in kept.sequences] == ROWS[:3], times
        for row, each in enumerate(kept.sequences):
            named = {"global_steps": 2, "index": "abcd"[row], "session_id": row}
            assert each.seed == request_seed(3, seed_of(named), each.prompt)
            first = len(each.prompt) - 1
            expected = scored.unbind()[row][first : first + len(each.response)]
            assert torch.allclose(torch.tensor(unhexed(each.update)), expected, atol=1e-6)
            assert unhexed(each.rollout) == data["old_log_probs"].unbind()[row].tolist()
