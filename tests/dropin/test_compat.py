"""The interface that code written for the old utility relies on, and the defects which that utility had.

Its ranks are in ``test_processes``; old checkpoints are in ``training/test_trainer_file``. At the end a ``.env`` file
in the working directory: read for the documented variables, below the process's own.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.dropin import PrecisionTrainer, compat
from mantissa.dropin.compat import (
    ENVIRONMENT,
    ExtendedFP16Config,
    ExtendedFP16Trainer,
    FP16Trainer,
    FP16TrainingConfig,
    PrecisionMode,
)
from mantissa.dropin.environment import current_environment, switch, switched_off
from mantissa.kernels import autocast_for, resolve
from mantissa.precision import PRESETS
from old_trainers import basic, extended, learn, sgd
from toys import Batch, cross_entropy, data, fragile, mlp, same, state, trainer_of

BASIC_STATS = {"training_steps", "overflow_steps", "overflow_rate", "fp16_enabled", "current_scale"}
MORE_STATS = {"update_steps", "accumulated_steps", "precision_mode", "precision_active", "device", "world_size", "rank"}
KEYS = {"model_state_dict", "optimizer_state_dict", "training_steps", "overflow_steps", "fp16_active"}


def test_names_arguments_and_defaults() -> None:
    assert FP16TrainingConfig(True, 65536.0, 2.0, 0.5, 2000) == FP16TrainingConfig()
    positional = (PrecisionMode.MIXED_FP16, True, 65536.0, 2.0, 0.5, 2000, 1, 1.0, False, False, True)
    assert ExtendedFP16Config(*positional) == ExtendedFP16Config()
    names = [field.name for field in dataclasses.fields(ExtendedFP16Config)][5:11]
    assert names[:3] == ["growth_interval", "gradient_accumulation_steps", "max_grad_norm"]
    assert names[3:] == ["use_ddp", "find_unused_parameters", "broadcast_buffers"]
    assert [mode.value for mode in PrecisionMode] == ["fp32", "fp16", "bfloat16", "mixed_fp16", "mixed_bf16"]
    assert PrecisionMode.BF16 is PrecisionMode.BFLOAT16
    assert list(inspect.signature(FP16Trainer).parameters) == ["model", "optimizer", "config"]
    assert list(inspect.signature(ExtendedFP16Trainer).parameters)[3:] == ["device", "rank", "world_size"]
    assert list(inspect.signature(FP16Trainer.training_step).parameters) == ["self", "batch", "loss_fn"]
    assert list(inspect.signature(compat.init_distributed).parameters) == ["backend"]
    for method in (FP16Trainer.save_checkpoint, FP16Trainer.load_checkpoint):
        assert list(inspect.signature(method).parameters) == ["self", "path"]


def test_code_written_for_the_old_utility_runs(tmp_path: Path) -> None:
    """Its loop as people wrote it: losses summed as numbers, the scaler read, a scheduler, epochs, eval, a file."""
    model = mlp(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 12, 0.5)
    trainer = FP16Trainer(model, optimizer, FP16TrainingConfig(loss_scale=1024.0, backend="simulated"))
    assert (trainer.model, trainer.optimizer, trainer.config.loss_scale) == (model, optimizer, 1024.0)
    batches = [(x, (x[:, 0] > 0).long()) for x, _ in data(8)]
    means = []
    for _ in range(3):
        model.train()
        total = 0.0
        for batch in batches:
            optimizer.zero_grad()
            loss = trainer.training_step(batch, cross_entropy)
            assert loss.dtype == torch.float32
            if trainer.backward_and_step(loss):
                schedule.step()
            total += loss.item()
        means.append(total / len(batches))
        model.eval()
        with torch.no_grad():
            evaluated, exact = trainer.training_step(batches[0], cross_entropy), cross_entropy(model, batches[0])
        assert evaluated.grad_fn is None
        assert evaluated.dtype == torch.float32
        assert torch.equal(evaluated, trainer.training_step(batches[0], cross_entropy).detach())
        assert not torch.equal(evaluated, exact)  # it is in the precision too
    assert means[-1] < 0.7 * means[0]
    assert (trainer.training_steps, trainer.overflow_steps) == (24, 0)
    if trainer.scaler is not None:
        assert trainer.scaler.get_scale() == 1024.0
    trainer.save_checkpoint(str(tmp_path / "model.pt"))
    fresh = mlp(9)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True)["model_state_dict"])
    assert same(state(fresh), state(model))


# torch.amp.GradScaler("cpu") with clip_grad_norm_(1.0), on one sequence

Trace = list[tuple[float, bool, dict[str, Tensor]]]


def limits(steps: int) -> list[float]:
    """How large an activation's scaled gradient may be, step by step: mostly anything, sometimes little or nothing."""
    draws = torch.rand(steps, generator=torch.Generator().manual_seed(0))
    return [0.0 if d < 0.1 else 64.0 if d < 0.25 else math.inf for d in draws.tolist()]


def ours(config: FP16TrainingConfig, steps: int) -> Trace:
    model, trap = fragile(dropout=0.2)
    trainer = FP16Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)
    assert trainer.scaler is not None
    torch.manual_seed(0)
    trace = []
    for batch, trap.limit in zip(data(steps), limits(steps), strict=True):
        trace.append((learn(trainer, batch), trainer.scaler.get_scale(), state(model)))
    assert trainer.overflow_steps == [stepped for stepped, _, _ in trace].count(False)
    return trace


def oracle(config: FP16TrainingConfig, steps: int) -> Trace:
    """The loop of torch's documentation. Its steps are seen by whether Adam counted one."""
    model, trap = fragile(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    autocast = autocast_for(resolve(PRESETS["fp16"], "cpu").learner, "cpu")
    scaler = torch.amp.GradScaler("cpu", init_scale=config.loss_scale, growth_interval=config.growth_interval)
    torch.manual_seed(0)
    trace, counts = [], [0]
    for batch, trap.limit in zip(data(steps), limits(steps), strict=True):
        optimizer.zero_grad()
        with autocast.forward():
            loss = cross_entropy(model, batch)
        with autocast.backward():
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        counts.append(max((int(kept["step"]) for kept in optimizer.state.values()), default=0))
        trace.append((counts[-1] > counts[-2], scaler.get_scale(), state(model)))
    return trace


@pytest.mark.parametrize("interval", [1, 4])  # 1: growth and overflow cancel in the scale, and both are seen
def test_scales_steps_and_weights_are_gradscalers(interval: int) -> None:
    config = FP16TrainingConfig(loss_scale=2.0**12, growth_interval=interval, backend="simulated")
    parameters = [name for name, _ in fragile()[0].named_parameters()]  # buffers of a batch given up: ours go back
    a, b = ours(config, 40), oracle(config, 40)
    for (stepped, scale, weights), (applied, expected, theirs) in zip(a, b, strict=True):
        assert (stepped, scale) == (applied, expected)
        assert all(torch.equal(weights[name], theirs[name]) for name in parameters)
    assert {stepped for stepped, _, _ in a} == {True, False}


def test_the_scaler_reads_as_gradscaler_does() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    theirs.scale(torch.ones(()))  # it makes its state on first use
    trainer = basic(loss_scale=512.0, growth_interval=7)
    scaler = trainer.scaler
    assert scaler is not None
    for name in ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled"):
        assert getattr(scaler, name)() == getattr(theirs, name)()
    for batch in data(3):
        learn(trainer, batch)
    assert trainer.scaler is scaler  # it lives as long as the trainer
    assert scaler.state_dict() == theirs.state_dict() | {"_growth_tracker": 3}
    theirs.load_state_dict(scaler.state_dict())
    other = basic()
    other.scaler.load_state_dict(theirs.state_dict())
    assert other.scaler.state_dict()["_growth_tracker"] == 3
    assert not hasattr(scaler, "step")
    with pytest.raises(AttributeError, match=r"scaler\.unscale_: not here; backward_and_step"):
        scaler.unscale_(trainer.optimizer)


# what is told


@pytest.mark.parametrize(("kind", "accumulate"), [(basic, 1), (extended, 1), (extended, 3)])
def test_answers_and_stats(kind: Any, accumulate: int) -> None:
    """While gradients accumulate nothing has stepped, so that a scheduler behind it moves once a step, as there."""
    model, trap = fragile()
    trainer = kind(model, **({} if accumulate == 1 else {"gradient_accumulation_steps": accumulate}))
    assert trainer.get_stats()["overflow_rate"] == 0.0
    answers = []
    for i, batch in enumerate(data(8 * accumulate)):
        trap.limit = 0.0 if i // accumulate in (1, 5, 6) else math.inf
        answers.append(learn(trainer, batch))
    turns = [i // accumulate for i, answer in enumerate(answers) if answer]
    assert turns == [0, 2, 3, 4, 7]
    assert all(i % accumulate == accumulate - 1 for i, answer in enumerate(answers) if answer)
    stats = trainer.get_stats()
    assert stats["overflow_rate"] == 3 / 8
    assert (stats["overflow_steps"], stats["training_steps"]) == (3, 8 * accumulate)
    assert stats["current_scale"] == trainer.scaler.get_scale() == 65536.0 / 8
    assert stats.keys() >= (BASIC_STATS if kind is basic else BASIC_STATS | MORE_STATS)
    if kind is extended:
        assert (stats["update_steps"], stats["precision_mode"], stats["precision_active"]) == (5, "mixed_fp16", True)
        assert (stats["device"], stats["rank"], stats["world_size"]) == (str(trainer.device), 0, 1)
        assert stats["precision_in_use"] == "fp16"


@pytest.mark.parametrize(
    "trainer",
    [
        lambda: basic(enabled=False),
        lambda: extended(precision_mode="fp32"),
        lambda: extended(precision_mode="mixed_bf16", enabled=False),
    ],
)
def test_fp32_has_no_scaler_and_a_scale_of_one(trainer: Any) -> None:
    made = trainer()
    stats = made.get_stats()
    assert (stats["precision_in_use"], stats["precision_active"], stats["fp16_enabled"]) == ("fp32", False, False)
    assert stats["current_scale"] == 1.0  # the documented usage reads it in every mode
    assert made.scaler is None
    assert made.effective_config is made.config


@pytest.mark.parametrize("kind", [FP16TrainingConfig, ExtendedFP16Config])
def test_a_fallback_is_the_default_and_told_apart_from_the_frozen_configuration(kind: Any) -> None:
    config = kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.enabled = False
    model = mlp().eval()
    made = FP16Trainer if kind is FP16TrainingConfig else ExtendedFP16Trainer
    with pytest.warns(UserWarning, match=r"fp16 was asked, but no GPU here.*it runs in fp32"):
        trainer = made(model, sgd(model), config)
    assert trainer.config is config
    assert trainer.effective_config == kind(enabled=False)
    batch = data(1)[0]
    assert torch.equal(trainer.training_step(batch, cross_entropy), cross_entropy(model, batch))
    stats = trainer.get_stats()
    assert (stats["precision_requested"], stats["precision_in_use"]) == ("fp16", "fp32")
    assert "fallback" in stats["reason"]
    strict = made(model, sgd(model), kind(fallback="error"))  # on a CPU there is nothing to refuse: it simulates
    assert strict.get_stats()["precision_in_use"] == "fp16"


# what a step does


@pytest.mark.parametrize("kind", [basic, extended])
def test_adaptive_clipping_is_precision_trainers(kind: Any) -> None:
    ours, theirs = mlp(), mlp()
    trainer = kind(ours, adaptive_clip=0.01)
    expected = trainer_of(theirs, "fp16", adaptive_clip=0.01, max_grad_norm=1.0)
    assert trainer.get_stats()["clipped_fraction"] is None
    for batch in data(3):
        learn(trainer, batch)
        outcome = expected.step(batch, cross_entropy)
    assert 0 < trainer.get_stats()["clipped_fraction"] == outcome.clipped <= 1
    assert same(state(ours), state(theirs))


@pytest.mark.parametrize("bound", [1.0, 0.05, None, 0.0])
def test_the_clipping_bound_is_an_argument(bound: float | None) -> None:
    fields = {} if bound == 1.0 else {"max_grad_norm": bound}
    for trainer in (basic(enabled=False, **fields), extended(precision_mode="fp32", **fields)):
        plain = mlp().eval()
        plain.load_state_dict(trainer.model.eval().state_dict())
        optimizer = sgd(plain)
        for batch in data(3):
            trainer.backward_and_step(trainer.training_step(batch, lambda m, b: 20 * cross_entropy(m, b)))
            optimizer.zero_grad()
            (20 * cross_entropy(plain, batch)).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), bound or math.inf)
            assert norm > 1.5  # every bound above has something to do
            optimizer.step()
        assert same(state(trainer.model), state(plain))


MODES = [
    ("fp32", torch.float32, None),
    ("fp16", torch.float16, 65536.0),
    ("bfloat16", torch.bfloat16, None),
    ("mixed_fp16", torch.float16, 65536.0),
    ("mixed_bf16", torch.bfloat16, None),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("mode", "dtype", "scale"), MODES)
def test_each_mode_computes_in_its_format(mode: str, dtype: torch.dtype, scale: float | None, device: str) -> None:
    """The old CUDA path raised (the wrong autocast class); and what it called fp16 elsewhere was fp32."""
    seen: list[torch.dtype] = []

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0])
        seen.append(logits.dtype)
        return nn.functional.cross_entropy(logits, batch[1])

    backend = "simulated" if device == "cpu" and mode != "fp32" else "auto"
    model = mlp().to(device).eval()  # no batch norm statistics: a plain function, so that losses can be compared
    trainer = ExtendedFP16Trainer(model, sgd(model), ExtendedFP16Config(precision_mode=mode, backend=backend), device)
    batch = tuple(tensor.to(device) for tensor in data(1)[0])
    losses = []
    for _ in range(8):
        loss = trainer.training_step(batch, loss_fn)
        losses.append(loss.item())
        assert trainer.backward_and_step(loss)
    assert set(seen) == {dtype}
    assert losses[-1] < losses[0]
    assert (None if trainer.scaler is None else trainer.scaler.get_scale()) == scale
    assert trainer.get_stats()["precision_in_use"] == mode.removeprefix("mixed_").replace("bfloat16", "bf16")
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    expected = cross_entropy(mlp().eval(), data(1)[0]).item()
    assert losses[0] == pytest.approx(expected, rel=1e-6 if mode == "fp32" else 2e-2)
    assert device == "cuda" or (losses[0] == expected) == (mode == "fp32")


def test_casting_casts_and_the_next_step_learns_on_the_masters(tmp_path: Path) -> None:
    def small() -> tuple[nn.Module, FP16Trainer]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        return model, FP16Trainer(model, optimizer, FP16TrainingConfig(backend="simulated"))

    (model, trainer), (other, never_cast) = small(), small()
    for batch in data(2):
        assert learn(trainer, batch) == learn(never_cast, batch)
    before = state(model)
    assert trainer.cast_model_to_fp16() is model is trainer.cast_model_to_fp16()
    halves = state(model)
    assert all(not value.is_floating_point() or value.dtype == torch.float16 for value in halves.values())
    assert all(torch.equal(value, before[name].to(value.dtype)) for name, value in halves.items())
    assert model.eval()(data(1)[0][0].half()).dtype == torch.float16  # it serves
    model.train()
    for batch in data(3):
        assert learn(trainer, batch) == learn(never_cast, batch)
    assert same(state(model), state(other))  # to the bit, although no half weight would have moved
    assert torch.equal(model[0].weight.half(), halves["0.weight"])
    assert not torch.equal(model[0].weight, before["0.weight"])
    trainer.cast_model_to_fp16()
    with torch.no_grad():
        model[0].bias.fill_(0.25)  # somebody's own change stands
    trainer.save_checkpoint(tmp_path / "a.pt")
    saved = torch.load(tmp_path / "a.pt", weights_only=True)["model_state_dict"]
    assert torch.equal(saved["0.weight"], other[0].weight)
    assert torch.equal(saved["0.bias"], torch.full_like(other[0].bias, 0.25))


def test_casting_where_there_is_nothing_to_cast_or_gradients_wait() -> None:
    trainer = basic(enabled=False)
    with pytest.warns(UserWarning, match="training is in fp32, so nothing is cast"):
        assert next(trainer.cast_model_to_fp16().parameters()).dtype == torch.float32
    waiting = extended(gradient_accumulation_steps=2)
    learn(waiting, data(1)[0])
    with pytest.raises(MantissaError, match="1 of 2 batches are accumulated"):
        waiting.cast_model_to_fp16()


def test_a_growth_interval_that_adapts_is_the_automatic_rule() -> None:
    (ours, trap), (theirs, other_trap) = fragile(dropout=0.0), fragile(dropout=0.0)
    trainer = basic(ours, growth_interval="auto")
    expected = trainer_of(theirs, "fp16", scale="auto", retries=0, max_grad_norm=1.0, on_nonfinite="skip")
    for i, batch in enumerate(data(12)):
        trap.limit = other_trap.limit = 0.0 if i == 5 else math.inf
        learn(trainer, batch)
        expected.step(batch, cross_entropy)
    assert trainer.scaler.get_scale() == expected.scaler.scale != 65536.0
    assert trainer.overflow_steps == 1
    assert same(state(ours), state(theirs))


WHERE = ("the batch", "the loss", "a loss of nan", "an activation's gradient", "one weight's gradient")


@settings(max_examples=25, deadline=None)
@given(
    where=st.sampled_from(WHERE),
    at=st.integers(0, 3),
    element=st.integers(0, 47),
    accumulate=st.sampled_from([1, 2]),
    mode=st.sampled_from(["mixed_fp16", "mixed_bf16", "fp32"]),
    scale=st.sampled_from([65536.0, 1.0]),
)
def test_one_injected_inf_costs_at_most_one_step(
    where: str, at: int, element: int, accumulate: int, mode: str, scale: float
) -> None:
    """Where there is no scaler too, and at its floor: there was a guess from a falling scale."""
    model, trap = fragile()
    config = ExtendedFP16Config(mode, True, scale, gradient_accumulation_steps=accumulate, backend="simulated")
    trainer = ExtendedFP16Trainer(model, torch.optim.Adam(model.parameters(), lr=0.01), config)
    weight, names = model[0][0].weight, [name for name, _ in model.named_parameters()]
    for i, (x, y) in enumerate(data(4 * accumulate)):
        bad, handle, x = i == at * accumulate, None, x.clone()
        if bad and where == "the batch":
            x.view(-1)[element] = math.inf
        if bad and where == "one weight's gradient":
            handle = weight.register_hook(
                lambda g: g.flatten().index_fill(0, torch.tensor(element), math.inf).view_as(g)
            )
        trap.limit = 0.0 if bad and where == "an activation's gradient" else math.inf
        factor = {"the loss": math.inf, "a loss of nan": math.nan}.get(where, 1.0) if bad else 1.0
        before = state(model)
        loss = trainer.training_step((x, y), lambda m, b, f=factor: cross_entropy(m, b) * f)
        stepped = trainer.backward_and_step(loss)
        if handle is not None:
            handle.remove()
        last = i % accumulate == accumulate - 1
        assert stepped == (last and i // accumulate != at)
        if last and not stepped:
            assert all(p.grad is None for p in model.parameters())
            assert all(torch.equal(before[name], state(model)[name]) for name in names)
        elif last:
            assert not torch.equal(before["0.0.weight"], weight)
    assert (trainer.overflow_steps, trainer.update_steps) == (1, 3)
    assert all(value.isfinite().all() for value in state(model).values())  # batch norm's statistics among them


# refusals


BAD_CONFIGS = [
    *(({"loss_scale": value}, f"loss_scale={value}: expected a finite") for value in (0.0, -1.0, math.inf, math.nan)),
    *(({"backoff_factor": value}, "an overflow lowers the scale") for value in (0.0, 1.0)),
    ({"growth_factor": 0.5}, "growth_factor=0.5"),
    ({"growth_interval": 0}, "growth_interval=0"),
    ({"growth_interval": 2.5}, "growth_interval=2.5"),
    ({"growth_interval": "often"}, "growth_interval='often': expected a whole number from 1 on, or 'auto'"),
    ({"growth_interval": "auto", "loss_scale": 8.0}, "loss_scale does nothing with growth_interval='auto'"),
    ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
    ({"adaptive_clip": 0}, "adaptive_clip=0: expected more than 0, or None"),
    ({"enabled": "yes"}, "enabled='yes'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS)
def test_a_config_that_means_nothing_is_refused_when_it_is_made(fields: dict, message: str) -> None:
    for kind in (FP16TrainingConfig, ExtendedFP16Config):
        with pytest.raises(MantissaError, match=f"{kind.__name__}: .*{message}"):
            kind(**fields)


def test_what_the_trainers_refuse() -> None:
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
        ExtendedFP16Trainer(model, sgd(model), ExtendedFP16Config("fp32"), rank=1, world_size=2)
    assert ExtendedFP16Trainer(model, sgd(model), ExtendedFP16Config("fp32"), "cpu", 0, 1).device.type == "cpu"
    assert compat.init_distributed() == (0, 1)
    compat.cleanup_distributed()
    trainer = basic()
    with pytest.raises(MantissaError, match="without a gradient"):
        trainer.backward_and_step(torch.zeros(()))
    with pytest.raises(MantissaError, match="got float"):
        trainer.training_step(data(1)[0], lambda m, b: 1.0)
    assert learn(trainer, data(1)[0])


# files


def test_the_checkpoint_has_the_known_keys_and_goes_on_from_an_open_window(tmp_path: Path) -> None:
    model, trap = fragile()
    trainer, batches = extended(model, gradient_accumulation_steps=2, growth_interval=3), data(8)
    for i, batch in enumerate(batches[:7]):
        trap.limit = 0.0 if i == 2 else math.inf
        learn(trainer, batch)
    with pytest.warns(UserWarning, match="1 of 2 batches are accumulated") as caught:
        trainer.save_checkpoint(tmp_path / "a.pt")
    assert caught[0].filename == __file__
    assert trainer.accumulated_steps == 1  # and training goes on where it was
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert content.keys() >= KEYS
    assert same(content["model_state_dict"], state(model))
    assert (content["training_steps"], content["overflow_steps"], content["fp16_active"]) == (3, 1, True)
    assert content["scaler_state_dict"]["scale"] == trainer.scaler.get_scale() == 32768.0
    other = extended(fragile(3)[0], gradient_accumulation_steps=2, growth_interval=3)
    other.load_checkpoint(tmp_path / "a.pt")
    assert same(state(other.model), state(model))
    assert other.get_stats() == trainer.get_stats() | {"accumulated_steps": 0, "clipped_fraction": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(trainer, batches[7])
        trainer.save_checkpoint(tmp_path / "a.pt")


# the environment: the old guides documented its variables and no code read them

GIVEN = {
    "ENABLE_FP16_TRAINING": ("false", False),
    "FP16_LOSS_SCALE": ("1024", 1024.0),
    "FP16_GROWTH_FACTOR": ("4.0", 4.0),
    "FP16_BACKOFF_FACTOR": ("0.25", 0.25),
    "FP16_GROWTH_INTERVAL": ("100", 100),
}


@pytest.mark.parametrize("variable", GIVEN)
def test_each_variable_is_read_by_both_trainers(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GIVEN.keys() == ENVIRONMENT.keys()
    (text, value), name = GIVEN[variable], ENVIRONMENT[variable]
    monkeypatch.setenv(variable, text)
    model = mlp()
    for made, kind in ((FP16Trainer, FP16TrainingConfig), (ExtendedFP16Trainer, ExtendedFP16Config)):
        assert made._checked(None) == dataclasses.replace(kind(), **{name: value})  # without a configuration
        trainer = made(model, sgd(model), kind.from_environment(backend="simulated"))
        if trainer.scaler is None:
            assert variable == "ENABLE_FP16_TRAINING"
        else:
            assert trainer.scaler.state_dict()[name.replace("loss_scale", "scale")] == value
    # who writes a configuration has the last word, but for the switch
    config = FP16TrainingConfig(backend="simulated")
    assert FP16Trainer(model, sgd(model), config).config is config
    assert FP16TrainingConfig.from_environment(**{name: getattr(FP16TrainingConfig(), name)}) == FP16TrainingConfig()


WORDS = {"true": True, "1": True, "YES": True, " on": True, "false": False, "0": False, "No": False, "off": False}


@pytest.mark.parametrize("word", WORDS)
def test_the_switch_reaches_every_trainer(
    word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those with a configuration too, which is left as it is."""
    monkeypatch.setenv("ENABLE_FP16_TRAINING", word)
    model = mlp()
    simulated = {"backend": "simulated"}
    for trainer in (
        FP16Trainer(model, sgd(model), FP16TrainingConfig(**simulated)),
        ExtendedFP16Trainer(model, sgd(model), ExtendedFP16Config("mixed_bf16", **simulated), device="cpu"),
        FP16Trainer(model, sgd(model), FP16TrainingConfig(enabled=False)),
    ):
        asked = trainer.config
        low = WORDS[word] and asked.enabled
        assert trainer.get_stats()["precision_in_use"] == (asked.number_format if low else "fp32")
        assert trainer.effective_config == dataclasses.replace(asked, enabled=low)
    told = ["fp32, not in fp16", "fp32, not in bf16"]  # of the two that asked for more than they get
    expected = [] if WORDS[word] else told
    assert [record.message.partition("training in ")[2] for record in caplog.records] == expected
    assert switch() is FP16TrainingConfig.from_environment().enabled is WORDS[word]


def test_a_growth_interval_of_the_environment_adapts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert switch({}) is None
    assert FP16TrainingConfig.from_environment({"FP16_GROWTH_INTERVAL": " auto"}).scale == "auto"


def test_overflows_and_changes_of_scale_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model, trap = fragile()
    trainer = basic(model, growth_interval=2)
    with caplog.at_level("INFO", "mantissa"):
        for i, batch in enumerate(data(4)):
            trap.limit = 0.0 if i == 1 else math.inf
            learn(trainer, batch)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "after 1 updates: overflow at loss scale 65536: the batch is given up, the scale now 32768"),
        ("INFO", "after 3 updates: loss scale 32768, now 65536"),
    ]


BAD = [
    ("ENABLE_FP16_TRAINING", "maybe", "ENABLE_FP16_TRAINING='maybe': expected true or false"),
    ("FP16_LOSS_SCALE", "big", "FP16_LOSS_SCALE='big': expected a number"),
    ("FP16_LOSS_SCALE", "-1", r"loss_scale=-1.0: expected a finite number above 0 .*FP16_LOSS_SCALE='-1'"),
    ("FP16_GROWTH_FACTOR", "nan", r"growth_factor=nan: .*FP16_GROWTH_FACTOR='nan'"),
    ("FP16_GROWTH_INTERVAL", "2000.5", "FP16_GROWTH_INTERVAL='2000.5': expected a whole number"),
]


@pytest.mark.parametrize(("variable", "text", "message"), BAD)
def test_a_bad_value_is_one_clear_error(
    variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    for config in (FP16TrainingConfig, ExtendedFP16Config):
        with pytest.raises(MantissaError, match=message) as caught:
            config.from_environment()
        assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_is_read_and_the_process_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["# ours", "ENABLE_FP16_TRAINING=false", 'export FP16_LOSS_SCALE="1024" # small', "OTHER=$HOME", ""]
    (folder / ".env").write_text("\n".join(lines))
    assert current_environment() == {"ENABLE_FP16_TRAINING": "false", "FP16_LOSS_SCALE": "1024"}
    config = FP16TrainingConfig.from_environment()
    assert (config.enabled, config.loss_scale, switched_off()) == (False, 1024.0, True)
    monkeypatch.setenv("ENABLE_FP16_TRAINING", "true")
    config = FP16TrainingConfig.from_environment()
    assert (config.enabled, config.loss_scale, switched_off()) == (True, 1024.0, False)
    (folder / ".env").write_text("FP16_LOSS_SCALE=large")
    with pytest.raises(MantissaError, match="FP16_LOSS_SCALE='large': expected a number"):
        FP16TrainingConfig.from_environment()


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("FP16_LOSS_SCALE=8", "8"), ("  export FP16_LOSS_SCALE = 8  ", "8"), ("FP16_LOSS_SCALE='8' # so", "8"),
        ('FP16_LOSS_SCALE="8 # no"', "8 # no"), ("FP16_LOSS_SCALE=8 # so", "8"), ("FP16_LOSS_SCALE=8#9", "8#9"),
        ("FP16_LOSS_SCALE=", ""), ("FP16_LOSS_SCALE=1\r\nFP16_LOSS_SCALE=2\r", "2"),
        ("\ufeffFP16_LOSS_SCALE=8", "8"), ("FP16_LOSS_SCALE=$HOME", "$HOME"),
        ("# FP16_LOSS_SCALE=8", None), ("MY_FP16_LOSS_SCALE=8", None), ("FP16_LOSS_SCALE", None),
        ("FP16_LOSS_SCALE= " + " " * 100_000 + "#", ""), ("DATABASE_URL='a\nb'", None),
    ],
)  # fmt: skip
def test_the_lines_of_a_file(folder: Path, line: str, value: str | None) -> None:
    (folder / ".env").write_bytes(line.encode())
    started = time.perf_counter()
    assert current_environment().get("FP16_LOSS_SCALE") == value
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(("word", "active"), [("false", "fp32"), ("true", "fp16")])
def test_the_switch_is_the_precision_trainers_too(folder: Path, word: str, active: str) -> None:
    (folder / ".env").write_text(f"ENABLE_FP16_TRAINING={word}")
    said: list[str] = []
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = PrecisionTrainer(model, optimizer, "fp16", say=said.append)
    assert trainer.precision.active.name == active
    assert any("ENABLE_FP16_TRAINING is off: training in fp32, not in fp16" in line for line in said) == (
        word == "false"
    )


def test_a_loss_that_is_no_number_is_called_that(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 1)
    trainer = PrecisionTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", on_nonfinite="skip")
    with caplog.at_level("INFO", "mantissa.training.step"):
        trainer.step(torch.ones(1, 2), lambda model, batch: model(batch).sum() * math.nan)
    assert "the loss is not finite (NaN): the batch is given up" in caplog.text
    assert "scale" not in caplog.text


def test_what_is_no_such_file(folder: Path) -> None:
    (folder / ".env").write_text("FP16_LOSS_SCALE='8")
    with pytest.raises(MantissaError, match=r"\.env: FP16_LOSS_SCALE has a quote that nothing closes"):
        current_environment()
    (folder / ".env").write_bytes(b"FP16_LOSS_SCALE=\xff")
    with pytest.raises(MantissaError, match=r"\.env: UnicodeDecodeError"):
        current_environment()
    (folder / ".env").unlink()
    os.mkfifo(folder / ".env")
    with pytest.raises(MantissaError, match="found a pipe"):
        current_environment()
    (folder / ".env").unlink()
    (folder / ".env").mkdir()
    assert current_environment() == {}
