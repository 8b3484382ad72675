"""What Megatron's optimiser and verl's engine over it do with a gradient that overflows fp16: as docs/verl.md tells.

Megatron places what its scaler holds on a GPU, and takes only such parameters: here they are on the CPU under a GPU's
name, and a step is Megatron's own from its copy of the gradients to its copy of the weights. Its distributed optimiser,
its kernels and its groups of several ranks are not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.verl

INITIAL, FLOOR, INTERVAL = 65536.0, 16384.0, 2


class OnCPU(TorchFunctionMode):
    """A CPU's tensors under a GPU's name: made for one they are the CPU's, and they say a GPU's type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron's optimiser over AdamW, of one fp16 weight, put together with a ``hysteresis`` as its factory does."""
    module = pytest.importorskip("megatron.core.optimizer.optimizer", reason="needs megatron-core: make test-verl")
    from megatron.core import parallel_state
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def made(hysteresis: int = 1) -> Any:
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float16))
        scaler = DynamicGradScaler(INITIAL, FLOOR, 2.0, 0.5, INTERVAL, hysteresis)
        config = OptimizerConfig(fp16=True, params_dtype=torch.float16, clip_grad=1.0)
        adam = torch.optim.AdamW([weight], lr=0.25)
        built = module.Float16OptimizerWithFloat16Params(adam, config, scaler, lambda *_: None)
        return SimpleNamespace(optimizer=built, weight=weight)

    try:
        with OnCPU():
            yield made
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def step(made: Any, gradient: float) -> tuple[bool, float | None, float]:
    """A step whose loss has this gradient, through the scale; whether it was one, its norm, the scale after it."""
    made.weight.main_grad = (made.optimizer.scale_loss(torch.tensor([gradient, 0.0]))).half()
    done, norm, _ = made.optimizer.step()
    return done, norm, made.optimizer.get_loss_scale().item()


def test_a_gradient_that_overflows_is_skipped_and_lowers_the_scale(megatron: Any) -> None:
    made = megatron()
    before = made.weight.detach().clone()
    assert step(made, 2.0) == (False, None, INITIAL / 2)
    assert step(made, math.nan) == (False, None, FLOOR)
    assert step(made, math.inf) == (False, None, FLOOR), "never below the floor"
    assert torch.equal(made.weight, before)
    done, norm, scale = step(made, 2.0)
    assert (done, norm, scale) == (True, pytest.approx(2.0, rel=1e-6), FLOOR)
    assert made.weight[0].item() == pytest.approx(0.75, abs=0.01), "a step of AdamW at its rate"
    assert step(made, 1.0)[2] == 2 * FLOOR, "doubled after so many steps that fit"
    assert made.optimizer.state_dict()["grad_scaler"]["scale"].item() == 2 * FLOOR


def test_a_scale_from_the_checkpoint_is_gone_on_with(megatron: Any) -> None:
    made, other = megatron(), megatron()
    step(made, 2.0)
    other.optimizer.grad_scaler.load_state_dict(made.optimizer.state_dict()["grad_scaler"])
    assert other.optimizer.get_loss_scale().item() == INITIAL / 2


def test_with_megatron_s_default_only_the_second_overflow_lowers_the_scale(megatron: Any) -> None:
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    made = megatron(OptimizerConfig.hysteresis)
    assert [step(made, 2.0)[2] for _ in range(2)] == [INITIAL, INITIAL / 2]


def test_verl_s_engine_ends_the_job_at_a_skipped_step(megatron: Any) -> None:
    """Where a later verl goes on, docs/verl.md must be told."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    made = megatron()
    made.weight.main_grad = torch.tensor([math.inf, 0.0], dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="Megatron optimizer step failed"):
        MegatronEngine.optimizer_step(made)
    made.weight.main_grad = torch.tensor([0.5 * INITIAL / 2, 0.0], dtype=torch.float16)
    assert MegatronEngine.optimizer_step(made) == pytest.approx(0.5, rel=1e-6)


def test_without_a_gpu_megatron_s_scaler_cannot_be_made() -> None:
    """Why the others have it on the CPU under a GPU's name: where this no longer fails, they need not."""
    scaler = pytest.importorskip("megatron.core.optimizer.grad_scaler")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((AssertionError, RuntimeError)):
        scaler.DynamicGradScaler(INITIAL, FLOOR, 2.0, 0.5, INTERVAL, 1)
