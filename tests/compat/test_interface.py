"""The interface that code written for the old utility relies on: names, arguments, defaults, attributes, keys."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mantissa import compat
from mantissa.compat import (
    ExtendedFP16Config,
    ExtendedFP16Trainer,
    FP16Trainer,
    FP16TrainingConfig,
    PrecisionMode,
)
from mantissa.errors import MantissaError
from old_trainers import basic, extended, sgd
from toys import Batch, cross_entropy, data, fragile, mlp, same, state, trainer_of

BASIC_STATS = {"training_steps", "overflow_steps", "overflow_rate", "fp16_enabled", "current_scale"}
MORE_STATS = {"update_steps", "accumulated_steps", "precision_mode", "precision_active", "device", "world_size", "rank"}


def test_names_arguments_and_defaults() -> None:
    assert FP16TrainingConfig(True, 65536.0, 2.0, 0.5, 2000) == FP16TrainingConfig()
    defaults = {f.name: f.default for f in dataclasses.fields(ExtendedFP16Config)}
    assert list(defaults.items())[:11] == [
        ("precision_mode", PrecisionMode.MIXED_FP16),
        ("enabled", True),
        ("loss_scale", 65536.0),
        ("growth_factor", 2.0),
        ("backoff_factor", 0.5),
        ("growth_interval", 2000),
        ("gradient_accumulation_steps", 1),
        ("max_grad_norm", 1.0),
        ("use_ddp", False),
        ("find_unused_parameters", False),
        ("broadcast_buffers", True),
    ]
    assert [mode.value for mode in PrecisionMode] == ["fp32", "fp16", "bfloat16", "mixed_fp16", "mixed_bf16"]
    assert PrecisionMode.BF16 is PrecisionMode.BFLOAT16
    assert list(inspect.signature(FP16Trainer).parameters) == ["model", "optimizer", "config"]
    assert list(inspect.signature(ExtendedFP16Trainer).parameters)[3:] == ["device", "rank", "world_size"]
    assert list(inspect.signature(FP16Trainer.training_step).parameters) == ["self", "batch", "loss_fn"]
    assert list(inspect.signature(compat.init_distributed).parameters) == ["backend"]
    for method in ("save_checkpoint", "load_checkpoint"):
        assert list(inspect.signature(getattr(FP16Trainer, method)).parameters) == ["self", "path"]


def test_code_written_for_the_old_utility_runs(tmp_path: Path) -> None:
    """Its loop as people wrote it: losses summed as numbers, the scaler read, a scheduler, epochs, eval, a file."""
    model = mlp(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 12, 0.5)
    trainer = FP16Trainer(model, optimizer, FP16TrainingConfig(loss_scale=1024.0))
    assert trainer.model is model
    assert trainer.optimizer is optimizer
    assert trainer.config == FP16TrainingConfig(loss_scale=1024.0)
    batches = data(8)
    batches = [(x, (x[:, 0] > 0).long()) for x, _ in batches]
    means = []
    for _ in range(3):
        model.train()
        total = 0.0
        for batch in batches:
            optimizer.zero_grad()
            loss = trainer.training_step(batch, cross_entropy)
            assert loss.dtype == torch.float32
            assert loss.grad_fn is not None
            if trainer.backward_and_step(loss):
                schedule.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            evaluated = trainer.training_step(batches[0], cross_entropy)
        assert evaluated.grad_fn is None
        means.append(total / len(batches))
    assert means[-1] < 0.7 * means[0]
    assert (trainer.training_steps, trainer.overflow_steps) == (24, 0)
    if trainer.scaler is not None:
        assert trainer.scaler.get_scale() == 1024.0
    trainer.save_checkpoint(str(tmp_path / "model.pt"))
    fresh = mlp(9)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True)["model_state_dict"])
    assert same(state(fresh), state(model))


@pytest.mark.parametrize("kind", [basic, extended])
def test_adaptive_clipping_is_precision_trainers(kind) -> None:
    ours, theirs = mlp(), mlp()
    trainer = kind(ours, adaptive_clip=0.01)
    oracle = trainer_of(theirs, "fp16", adaptive_clip=0.01, max_grad_norm=1.0)
    assert trainer.get_stats()["clipped_fraction"] is None
    for batch in data(3):
        trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
        outcome = oracle.step(batch, cross_entropy)
    assert 0 < trainer.get_stats()["clipped_fraction"] == outcome.clipped <= 1
    assert same(state(ours), state(theirs))
    with pytest.raises(MantissaError, match=r"adaptive_clip=0: expected more than 0, or None"):
        kind(adaptive_clip=0)


def test_backward_and_step_says_whether_the_optimiser_stepped() -> None:
    """While gradients accumulate it has not, so that a scheduler behind it moves once a step, as there."""
    model, trap = fragile()
    trainer = extended(model, gradient_accumulation_steps=3)
    answers = []
    for i, batch in enumerate(data(9)):
        trap.limit = 0.0 if i == 4 else math.inf
        answers.append(trainer.backward_and_step(trainer.training_step(batch, cross_entropy)))
    assert answers == [False, False, True, False, False, False, False, False, True]
    stats = trainer.get_stats()
    assert (stats["update_steps"], stats["overflow_steps"], stats["training_steps"]) == (2, 1, 9)


def test_stats_have_the_known_keys() -> None:
    assert basic().get_stats().keys() >= BASIC_STATS
    trainer = extended(gradient_accumulation_steps=2)
    trainer.backward_and_step(trainer.training_step(data(1)[0], cross_entropy))
    stats = trainer.get_stats()
    assert stats.keys() >= BASIC_STATS | MORE_STATS
    assert (stats["accumulated_steps"], stats["update_steps"]) == (1, 0)
    assert (stats["precision_mode"], stats["precision_active"], stats["precision_in_use"]) == (
        "mixed_fp16",
        True,
        "fp16",
    )
    assert (stats["device"], stats["rank"], stats["world_size"]) == (str(trainer.device), 0, 1)
    assert stats["current_scale"] == trainer.scaler.get_scale() == 65536.0
    plain = extended(precision_mode="fp32").get_stats()
    assert plain["current_scale"] == 1.0  # the documented usage reads it in every mode
    assert plain["precision_active"] is False


MODES = [
    ("fp32", torch.float32, None),
    ("fp16", torch.float16, 65536.0),
    ("bfloat16", torch.bfloat16, None),
    ("mixed_fp16", torch.float16, 65536.0),
    ("mixed_bf16", torch.bfloat16, None),
]


@pytest.mark.parametrize(("mode", "dtype", "scale"), MODES)
def test_each_mode_computes_in_its_format(mode: str, dtype: torch.dtype, scale: float | None) -> None:
    seen: list[torch.dtype] = []

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0])
        seen.append(logits.dtype)
        return nn.functional.cross_entropy(logits, batch[1])

    trainer = extended(precision_mode=mode)
    trainer.model.eval()  # no batch norm statistics: a plain function, so that losses can be compared
    losses = []
    for _ in range(20):
        loss = trainer.training_step(data(1)[0], loss_fn)
        losses.append(loss.item())
        assert trainer.backward_and_step(loss)
    assert set(seen) == {dtype}
    assert losses[-1] < 0.8 * losses[0]
    assert (None if trainer.scaler is None else trainer.scaler.get_scale()) == scale
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    expected = cross_entropy(mlp().eval(), data(1)[0]).item()
    assert losses[0] == pytest.approx(expected, rel=1e-6 if mode == "fp32" else 2e-2)
    assert (losses[0] == expected) == (mode == "fp32")


def test_enabled_false_is_fp32_in_every_mode() -> None:
    for trainer in (basic(enabled=False), *(extended(precision_mode=mode, enabled=False) for mode in PrecisionMode)):
        assert trainer.get_stats()["precision_in_use"] == "fp32"
        assert trainer.scaler is None
        assert trainer.effective_config == trainer.config


def test_the_scaler_reads_as_gradscaler_does() -> None:
    oracle = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    oracle.scale(torch.ones(()))  # it makes its state on first use
    trainer = basic(loss_scale=512.0, growth_interval=7)
    assert trainer.scaler is not None
    for name in ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled"):
        assert getattr(trainer.scaler, name)() == getattr(oracle, name)()
    for batch in data(3):
        trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
    assert trainer.scaler.state_dict() == oracle.state_dict() | {"_growth_tracker": 3}
    oracle.load_state_dict(trainer.scaler.state_dict())
    other = basic()
    other.scaler.load_state_dict(oracle.state_dict())
    assert other.scaler.state_dict()["_growth_tracker"] == 3
    assert not hasattr(trainer.scaler, "step")
    with pytest.raises(AttributeError, match=r"scaler\.unscale_: not here; backward_and_step"):
        trainer.scaler.unscale_(trainer.optimizer)


def test_two_trainers_do_not_meet() -> None:
    """On one model with two optimisers (as GANs are trained): each sees its own loss's gradients only."""
    ours, plain = mlp().eval(), mlp().eval()
    first = FP16Trainer(ours, torch.optim.SGD(ours[0].parameters(), lr=0.1), FP16TrainingConfig(enabled=False))
    second = FP16Trainer(ours, torch.optim.SGD(ours[4].parameters(), lr=0.1), FP16TrainingConfig(enabled=False))
    optimizers = [torch.optim.SGD(plain[i].parameters(), lr=0.1) for i in (0, 4)]
    for i, batch in enumerate(data(6)):
        trainer = (first, second)[i % 2]
        trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
        plain.zero_grad()
        cross_entropy(plain, batch).backward()
        torch.nn.utils.clip_grad_norm_(plain[(0, 4)[i % 2]].parameters(), 1.0)
        optimizers[i % 2].step()
    assert same(state(ours), state(plain))
    assert first.scaler is None
    a, b = basic(loss_scale=8.0), basic(loss_scale=16.0)
    assert (a.scaler.get_scale(), b.scaler.get_scale()) == (8.0, 16.0)


def test_gradients_that_came_from_elsewhere_are_not_mixed_in() -> None:
    ours, control = mlp().eval(), mlp().eval()
    trainer, calm = basic(ours), basic(control)
    batches = data(4)
    for batch in batches:
        loss = trainer.training_step(batch, cross_entropy)
        cross_entropy(ours, batches[0]).backward()  # someone looks at gradients in between
        trainer.backward_and_step(loss)
        calm.backward_and_step(calm.training_step(batch, cross_entropy))
    assert same(state(ours), state(control))


def test_the_caller_may_add_to_the_loss() -> None:
    """A penalty from outside gets the same scale, and is unscaled with the rest."""
    ours, plain = mlp().eval(), mlp().eval()
    trainer = basic(ours, max_grad_norm=None)
    trainer.backward_and_step(trainer.training_step(data(1)[0], cross_entropy) + 0.1 * ours[0].weight.square().sum())
    optimizer = sgd(plain)
    (cross_entropy(plain, data(1)[0]) + 0.1 * plain[0].weight.square().sum()).backward()
    optimizer.step()
    torch.testing.assert_close(ours[0].weight, plain[0].weight, rtol=0, atol=1e-4)


def test_without_gradients_a_training_step_is_an_evaluation_in_the_same_precision() -> None:
    trainer = basic(mlp().eval())
    batch = data(1)[0]
    with torch.no_grad():
        evaluated = trainer.training_step(batch, cross_entropy)
        exact = cross_entropy(trainer.model, batch)
    assert torch.equal(evaluated, trainer.training_step(batch, cross_entropy).detach())
    assert not torch.equal(evaluated, exact)
    assert evaluated.dtype == torch.float32


BAD_LOSSES = [
    (lambda t: t.backward_and_step(torch.zeros(())), "without a gradient"),
    (lambda t: t.backward_and_step(torch.zeros(3, requires_grad=True)), r"got shape \(3,\)"),
    (lambda t: t.training_step(data(1)[0], lambda m, b: 1.0), "got float"),
]


@pytest.mark.parametrize(("call", "message"), BAD_LOSSES)
def test_a_loss_that_cannot_be_learnt_from_is_one_clear_error(call, message: str) -> None:
    trainer = basic()
    with pytest.raises(MantissaError, match=message):
        call(trainer)
    assert trainer.backward_and_step(trainer.training_step(data(1)[0], cross_entropy))


BAD_CONFIGS = [
    ({"loss_scale": 0.0}, "loss_scale=0.0: expected a finite number above 0"),
    ({"loss_scale": -1.0}, "loss_scale=-1.0"),
    ({"loss_scale": math.inf}, "loss_scale=inf"),
    ({"loss_scale": math.nan}, "loss_scale=nan"),
    ({"growth_factor": 0.5}, "growth_factor=0.5"),
    ({"growth_interval": 0}, "growth_interval=0"),
    ({"growth_interval": 2.5}, "growth_interval=2.5"),
    ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
    ({"enabled": "yes"}, "enabled='yes'"),
]


@pytest.mark.parametrize("kind", [FP16TrainingConfig, ExtendedFP16Config])
@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS)
def test_a_config_that_means_nothing_is_refused_when_it_is_made(kind: type, fields: dict, message: str) -> None:
    with pytest.raises(MantissaError, match=f"{kind.__name__}: {message}"):
        kind(**fields)


def test_what_the_extended_trainer_refuses() -> None:
    with pytest.raises(MantissaError, match="precision_mode='fp8': expected one of fp32, fp16, bfloat16"):
        ExtendedFP16Config(precision_mode="fp8")
    with pytest.raises(MantissaError, match="gradient_accumulation_steps=0"):
        ExtendedFP16Config(gradient_accumulation_steps=0)
    model = mlp()
    with pytest.raises(MantissaError, match="expected a ExtendedFP16Config or None, got a FP16TrainingConfig"):
        ExtendedFP16Trainer(model, sgd(model), FP16TrainingConfig())
    with pytest.raises(MantissaError, match="got a dict"):
        FP16Trainer(model, sgd(model), {"enabled": True})
    with pytest.raises(MantissaError, match="rank 1 of 2 was asked for, but this process is rank 0 of 1"):
        ExtendedFP16Trainer(model, sgd(model), rank=1, world_size=2)
    assert ExtendedFP16Trainer(model, sgd(model), device="cpu", rank=0, world_size=1).device.type == "cpu"
    assert compat.init_distributed() == (0, 1)
    compat.cleanup_distributed()


def test_a_model_moved_after_the_trainer_was_made_is_refused() -> None:
    """Autocast of the old device would do nothing on the new one: fp32 without a word."""
    trainer = basic()
    trainer.model.to("meta")
    with pytest.raises(MantissaError, match="was on cpu and is now on meta"):
        trainer.training_step(data(1)[0], cross_entropy)
