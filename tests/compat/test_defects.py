"""One test or more for each defect that the old utility had: each fails if the defect comes back.

Its checkpoints are in ``test_checkpoint``, its environment variables in ``test_environment``, its ranks in
``test_processes``.
"""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mantissa.compat import ExtendedFP16Config, ExtendedFP16Trainer, FP16Trainer, FP16TrainingConfig
from mantissa.errors import MantissaError
from old_trainers import basic, extended, learn, sgd
from toys import Batch, cross_entropy, data, fragile, mlp, same, state

# the CUDA path raised: the wrong autocast class


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", [FP16Trainer, ExtendedFP16Trainer])
def test_every_device_type_trains_in_fp16(device: str, kind: type) -> None:
    model = mlp().to(device).eval()
    trainer = kind(model, sgd(model))
    batch = tuple(t.to(device) for t in data(1)[0])
    seen = []

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        seen.append((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), model(batch[0]).dtype))
        return cross_entropy(model, batch)

    losses = []
    for _ in range(20):
        loss = trainer.training_step(batch, loss_fn)
        losses.append(loss.item())
        assert trainer.backward_and_step(loss)
    assert set(seen) == {(True, torch.float16, torch.float16)}
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.get_stats()["backend"] == ("native" if device == "cuda" else "simulated")


# gradients were kept after an overflow, so that one inf killed every later step


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


# overflow was guessed from a falling scale


def test_an_overflow_at_the_floor_is_seen_though_the_scale_stays() -> None:
    model, trap = fragile()
    trainer = basic(model, loss_scale=1.0)
    trap.limit = 0.0
    before = state(model)
    assert learn(trainer, data(1)[0]) is False
    assert trainer.scaler.get_scale() == 1.0
    assert trainer.overflow_steps == 1
    assert same(before, state(model))


@pytest.mark.parametrize("mode", ["fp32", "mixed_bf16"])
def test_an_overflow_without_a_scaler_is_seen(mode: str) -> None:
    model, trap = fragile()
    trainer = extended(model, precision_mode=mode)
    trap.limit = 0.0
    before = state(model)
    assert learn(trainer, data(1)[0]) is False
    assert (trainer.scaler, trainer.overflow_steps) == (None, 1)
    assert same(before, state(model))


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


# two denominators for one rate


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_overflow_rate_is_skipped_over_attempted_steps(accumulate: int) -> None:
    model, trap = fragile()
    trainer = extended(model, gradient_accumulation_steps=accumulate)
    for i, batch in enumerate(data(8 * accumulate)):
        trap.limit = 0.0 if i // accumulate in (1, 5, 6) else math.inf
        learn(trainer, batch)
    stats = trainer.get_stats()
    assert (
        stats["overflow_rate"] == 3 / 8 == stats["overflow_steps"] / (stats["update_steps"] + stats["overflow_steps"])
    )
    model, trap = fragile()
    plain = basic(model)
    assert plain.get_stats()["overflow_rate"] == 0.0
    for i, batch in enumerate(data(8)):
        trap.limit = 0.0 if i in (1, 5, 6) else math.inf
        learn(plain, batch)
    stats = plain.get_stats()
    assert stats["overflow_rate"] == 3 / 8 == stats["overflow_steps"] / stats["training_steps"]


# clipping at 1.0 and zero_grad inside; accumulation


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


def test_accumulated_batches_are_one_large_batch() -> None:
    ours, plain = mlp().eval(), mlp().eval()
    trainer = extended(ours, gradient_accumulation_steps=4, precision_mode="fp32")
    optimizer = sgd(plain)
    batches = data(8)
    for batch in batches:
        learn(trainer, batch)
    for part in (batches[:4], batches[4:]):
        optimizer.zero_grad()
        cross_entropy(plain, (torch.cat([x for x, _ in part]), torch.cat([y for _, y in part]))).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    for name, value in state(ours).items():
        torch.testing.assert_close(value, state(plain)[name], rtol=0, atol=1e-6)
    assert (trainer.update_steps, trainer.training_steps) == (2, 8)


# bf16 unsupported became fp16, no CUDA became fp32, silently


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


# the trainer changed the caller's configuration


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


# a new scaler on every train() call


def test_the_scaler_lives_as_long_as_the_trainer() -> None:
    model, trap = fragile()
    trainer = basic(model)
    scaler = trainer.scaler
    for epoch in range(3):
        model.train()
        for i, batch in enumerate(data(4)):
            trap.limit = 0.0 if i == 0 else math.inf
            learn(trainer, batch)
        model.eval()
        assert trainer.scaler is scaler
        assert trainer.scaler.get_scale() == 65536.0 / 2 ** (epoch + 1)


# model.half() with a scaler that refuses fp16 gradients


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


def test_a_half_model_is_refused_with_the_reason() -> None:
    with pytest.raises(MantissaError, match=r"is torch\.float16: master weights are fp32"):
        basic(mlp().half())


# guides that disagree whether an overflow raises or lowers the scale


def test_an_overflow_lowers_the_scale_and_no_setting_says_otherwise() -> None:
    model, trap = fragile()
    trainer = basic(model, backoff_factor=0.25)
    trap.limit = 0.0
    learn(trainer, data(1)[0])
    assert trainer.scaler.get_scale() == 65536.0 / 4
    for factor in (1.0, 2.0, 0.0):
        with pytest.raises(MantissaError, match="an overflow lowers the scale"):
            FP16TrainingConfig(backoff_factor=factor)


# a "speed-up" of fp32 over fp32


def test_no_number_comes_under_a_name_that_is_not_its_own() -> None:
    """What a benchmark would call fp16 is rounded to fp16: logits are on its grid, and in fp32 they are not."""
    for enabled in (True, False):
        logits: list[Tensor] = []

        def loss_fn(model: nn.Module, batch: Batch, logits: list[Tensor] = logits) -> Tensor:
            logits.append(model(batch[0]).detach().float())
            return cross_entropy(model, batch)

        trainer = basic(mlp().eval(), enabled=enabled)
        trainer.training_step(data(1)[0], loss_fn)
        on_grid = torch.equal(logits[0], logits[0].half().float())
        assert on_grid == enabled == trainer.get_stats()["fp16_enabled"]
