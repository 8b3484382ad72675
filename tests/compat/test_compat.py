"""The interface that code written for the old utility relies on, and the defects which that utility had.

Its environment variables are in ``test_environment``, its ranks in ``test_processes``, torch's scaler as the oracle in
``test_oracle``; old checkpoints are in ``training/test_trainer_file``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mantissa import compat
from mantissa.compat import ExtendedFP16Config, ExtendedFP16Trainer, FP16Trainer, FP16TrainingConfig, PrecisionMode
from mantissa.errors import MantissaError
from old_trainers import basic, extended, learn, sgd
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

    model = mlp().to(device).eval()  # no batch norm statistics: a plain function, so that losses can be compared
    trainer = ExtendedFP16Trainer(model, sgd(model), ExtendedFP16Config(precision_mode=mode), device)
    batch = tuple(tensor.to(device) for tensor in data(1)[0])
    losses = []
    for _ in range(20):
        loss = trainer.training_step(batch, loss_fn)
        losses.append(loss.item())
        assert trainer.backward_and_step(loss)
    assert set(seen) == {dtype}
    assert losses[-1] < 0.8 * losses[0]
    assert (None if trainer.scaler is None else trainer.scaler.get_scale()) == scale
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    expected = cross_entropy(mlp().eval(), data(1)[0]).item()
    assert losses[0] == pytest.approx(expected, rel=1e-6 if mode == "fp32" else 2e-2)
    assert device == "cuda" or (losses[0] == expected) == (mode == "fp32")


@pytest.mark.parametrize(("mode", "fields"), [("fp32", {}), ("mixed_bf16", {}), ("mixed_fp16", {"loss_scale": 1.0})])
def test_an_overflow_is_seen_where_the_scale_stays(mode: str, fields: dict[str, float]) -> None:
    """It was guessed from a falling scale: without a scaler, or at the floor, there is none."""
    model, trap = fragile()
    trainer = extended(model, precision_mode=mode, **fields)
    trap.limit = 0.0
    before = state(model)
    assert learn(trainer, data(1)[0]) is False
    assert (trainer.get_stats()["current_scale"], trainer.overflow_steps) == (1.0, 1)
    assert same(before, state(model))


@pytest.mark.parametrize(("kind", "accumulate"), [(basic, 1), (extended, 1), (extended, 3)])
def test_the_overflow_rate_is_skipped_over_attempted_steps(kind: Any, accumulate: int) -> None:
    """In all three, as ever; and the scaler lives as long as the trainer: there each call of train() made another."""
    model, trap = fragile()
    trainer = kind(model, **({} if accumulate == 1 else {"gradient_accumulation_steps": accumulate}))
    scaler = trainer.scaler
    assert trainer.get_stats()["overflow_rate"] == 0.0
    for i, batch in enumerate(data(8 * accumulate)):
        trap.limit = 0.0 if i // accumulate in (1, 5, 6) else math.inf
        learn(trainer, batch)
    stats = trainer.get_stats()
    attempted = stats["training_steps"] if kind is basic else stats["update_steps"] + stats["overflow_steps"]
    assert stats["overflow_rate"] == 3 / 8 == stats["overflow_steps"] / attempted
    assert trainer.scaler is scaler
    assert scaler.get_scale() == 65536.0 / 8


BAD_CONFIGS = [
    *(({"loss_scale": value}, f"loss_scale={value}: expected a finite") for value in (0.0, -1.0, math.inf, math.nan)),
    *(({"backoff_factor": value}, "an overflow lowers the scale") for value in (0.0, 1.0, 2.0)),
    ({"growth_factor": 0.5}, "growth_factor=0.5"),
    ({"growth_interval": 0}, "growth_interval=0"),
    ({"growth_interval": 2.5}, "growth_interval=2.5"),
    ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
    ({"enabled": "yes"}, "enabled='yes'"),
]


@pytest.mark.parametrize("kind", [FP16TrainingConfig, ExtendedFP16Config])
@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS)
def test_a_config_that_means_nothing_is_refused_when_it_is_made(kind: type, fields: dict, message: str) -> None:
    with pytest.raises(MantissaError, match=f"{kind.__name__}: .*{message}"):
        kind(**fields)


WHERE = ("the batch", "the loss", "a loss of nan", "an activation's gradient", "one weight's gradient")


@settings(max_examples=40, deadline=None)
@given(
    where=st.sampled_from(WHERE),
    at=st.integers(0, 5),
    element=st.integers(0, 47),
    accumulate=st.sampled_from([1, 2]),
    mode=st.sampled_from(["mixed_fp16", "mixed_bf16", "fp32"]),
    adam=st.booleans(),
)
def test_one_injected_inf_costs_at_most_one_step(
    where: str, at: int, element: int, accumulate: int, mode: str, adam: bool
) -> None:
    model, trap = fragile()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if adam else sgd(model)
    config = ExtendedFP16Config(precision_mode=mode, gradient_accumulation_steps=accumulate)
    trainer = ExtendedFP16Trainer(model, optimizer, config)
    weight = model[0][0].weight
    for i, (x, y) in enumerate(data(6 * accumulate)):
        bad = i == at * accumulate
        x = x.clone()
        handle = None
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
            parameters = [name for name, _ in model.named_parameters()]
            assert all(torch.equal(before[name], state(model)[name]) for name in parameters)
        elif last:
            assert not torch.equal(before["0.0.weight"], weight)
    stats = trainer.get_stats()
    assert (stats["overflow_steps"], stats["update_steps"]) == (1, 5)
    assert all(value.isfinite().all() for value in state(model).values())  # batch norm's statistics among them


def test_growth_and_overflow_that_cancel_in_the_scale_are_both_seen() -> None:
    """With an interval of 1 a clean step doubles the scale and an overflow halves it: over two steps nothing moves."""
    model, trap = fragile()
    trainer = basic(model, growth_interval=1, loss_scale=256.0)
    scales, answers = [], []
    for i, batch in enumerate(data(6)):
        trap.limit = 0.0 if i % 2 else math.inf
        answers.append(learn(trainer, batch))
        scales.append(trainer.scaler.get_scale())
    assert answers == [True, False] * 3
    assert scales == [512.0, 256.0] * 3
    assert trainer.overflow_steps == 3


def test_a_scale_that_someone_lowers_is_no_overflow() -> None:
    """What is read is the gradients, not the scale: it may fall for another reason, here between backward's hooks."""
    trainer = basic()
    first = next(trainer.model.parameters())
    lower = {"scale": 8.0, "_growth_tracker": 0}

    def meddle(grad: Tensor) -> Tensor:
        trainer.scaler.load_state_dict(lower)
        return grad

    handle = first.register_hook(meddle)
    assert learn(trainer, data(1)[0]) is True
    handle.remove()
    assert trainer.overflow_steps == 0


@pytest.mark.parametrize("bound", [1.0, 0.05, None, 0.0, math.inf])
def test_the_clipping_bound_is_an_argument(bound: float | None) -> None:
    ours, plain = mlp().eval(), mlp().eval()
    fields = {} if bound == 1.0 else {"max_grad_norm": bound}
    for trainer in (basic(ours, enabled=False, **fields), extended(mlp(), precision_mode="fp32", **fields)):
        optimizer = sgd(plain)
        plain.load_state_dict(trainer.model.eval().state_dict())
        for batch in data(4):
            trainer.backward_and_step(trainer.training_step(batch, lambda m, b: 20 * cross_entropy(m, b)))
            optimizer.zero_grad()
            (20 * cross_entropy(plain, batch)).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), bound or math.inf)
            assert norm > 1.5  # every bound above has something to do
            optimizer.step()
        assert same(state(trainer.model), state(plain))


def test_bf16_that_the_gpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Old GPU")
    monkeypatch.setattr("mantissa.training.trainer.device_of", lambda model: torch.device("cuda"))
    model = mlp()
    with pytest.raises(MantissaError, match="asked for bf16, but Old GPU has no bf16 arithmetic"):
        ExtendedFP16Trainer(model, sgd(model), ExtendedFP16Config(precision_mode="mixed_bf16"), device="cpu")


@pytest.mark.parametrize("mode", ["mixed_fp16", "mixed_bf16"])
def test_without_a_gpu_the_format_is_real_and_fp32_is_opted_into(mode: str) -> None:
    batch = data(1)[0]
    exact = cross_entropy(mlp().eval(), batch).item()
    model = mlp().eval()
    trainer = ExtendedFP16Trainer(model, sgd(model), ExtendedFP16Config(precision_mode=mode), device="cpu")
    assert trainer.training_step(batch, cross_entropy).item() != exact
    stats = trainer.get_stats()
    asked = mode.removeprefix("mixed_")
    assert (stats["precision_requested"], stats["precision_in_use"], stats["backend"]) == (asked, asked, "simulated")

    config = ExtendedFP16Config(precision_mode=mode, fallback="warn")
    with pytest.warns(UserWarning, match=rf"{asked} was asked, but no GPU here.*it runs in fp32"):
        plain = ExtendedFP16Trainer(model, sgd(model), config, device="cpu")
    assert plain.training_step(batch, cross_entropy).item() == exact
    stats = plain.get_stats()
    assert (stats["precision_requested"], stats["precision_in_use"]) == (asked, "fp32")
    assert (stats["precision_active"], stats["fp16_enabled"]) == (False, False)
    assert stats["current_scale"] == 1.0
    assert "fallback" in stats["reason"]


def test_the_configuration_is_frozen_and_what_is_in_force_is_told_apart() -> None:
    for config in (FP16TrainingConfig(fallback="warn"), ExtendedFP16Config(fallback="warn", use_ddp=True)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.enabled = False
        kept = dataclasses.replace(config)
        model = mlp()
        kind = FP16Trainer if isinstance(config, FP16TrainingConfig) else ExtendedFP16Trainer
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = kind(model, sgd(model), config) if kind is FP16Trainer else kind(model, sgd(model), config, "cpu")
        assert trainer.config is config
        assert config == kept
        assert trainer.effective_config == dataclasses.replace(config, enabled=False)
    trainer = basic()
    assert trainer.effective_config is trainer.config


def test_casting_keeps_fp32_masters_and_small_updates() -> None:
    model = mlp().eval()
    trainer = FP16Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), FP16TrainingConfig())
    assert trainer.cast_model_to_fp16() is model
    before = state(model)
    for batch in data(3):
        assert learn(trainer, batch)
    weight = model[0].weight
    moved = (weight - before["0.weight"]).abs()
    assert weight.dtype == torch.float32
    assert 0 < moved.max() < 1e-5
    assert torch.equal(weight.half(), before["0.weight"].half())  # in half not one weight would have moved


KEYS = {
    "model_state_dict",
    "optimizer_state_dict",
    "training_steps",
    "overflow_steps",
    "fp16_active",
    "scaler_state_dict",
}


def test_the_checkpoint_has_the_known_keys_and_loads_safely(tmp_path: Path) -> None:
    model, trap = fragile()
    trainer = basic(model, growth_interval=3)
    for i, batch in enumerate(data(6)):
        trap.limit = 0.0 if i == 2 else math.inf
        trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
    trainer.save_checkpoint(tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert content.keys() >= KEYS
    assert same(content["model_state_dict"], state(model))
    assert (content["training_steps"], content["overflow_steps"], content["fp16_active"]) == (6, 1, True)
    assert content["scaler_state_dict"]["scale"] == trainer.scaler.get_scale() == 65536.0
    other = basic(fragile(3)[0], growth_interval=3)
    other.load_checkpoint(tmp_path / "a.pt")
    assert same(state(other.model), state(model))
    assert other.get_stats() == trainer.get_stats()


def test_saving_in_an_open_window_saves_and_says_what_is_missing(tmp_path: Path) -> None:
    trainer = extended(gradient_accumulation_steps=4)
    batches = data(8)
    for batch in batches[:6]:
        trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
    with pytest.warns(UserWarning, match="2 of 4 batches are accumulated") as caught:
        trainer.save_checkpoint(tmp_path / "a.pt")
    assert caught[0].filename == __file__
    assert trainer.get_stats()["accumulated_steps"] == 2  # and training goes on where it was
    other = extended(mlp(3), gradient_accumulation_steps=4)
    other.load_checkpoint(tmp_path / "a.pt")
    assert same(state(other.model), state(trainer.model))
    assert (other.update_steps, other.accumulated_steps) == (1, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches[6:]:
            trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
        trainer.save_checkpoint(tmp_path / "a.pt")
