"""What a model's owner changes while a training goes on: followed as torch's GradScaler does, or refused untouched."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from mantissa import audit
from mantissa.base.errors import MantissaError
from mantissa.dropin import PrecisionTrainer
from mantissa.dropin.compat import ExtendedFP16Config, ExtendedFP16Trainer
from mantissa.dropin.window import HeldScheduler
from mantissa.guard import GuardConfig
from mantissa.precision import BF16
from mantissa.precision.formats import is_on_grid
from mantissa.training import ScalerConfig, adaptive_clip_
from toys import Batch, cross_entropy, data, mlp, quiet, same, state, trainer_of


class Tower(nn.Module):
    """Three layers, of which a schedule of unfreezing trains more and more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.low, self.middle, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.low(x)))))


def change_groups(model: Tower, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Frozen at first; a layer joins, and at last the one that began leaves, as an owner's own code does it."""
    if step == 0:
        model.low.requires_grad_(False)
        model.middle.requires_grad_(False)
    if step == 2:
        model.middle.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.middle.parameters()), "lr": 0.3})
    if step == 4:
        model.low.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.low.parameters())})
        model.head.requires_grad_(False)
        del optimizer.param_groups[0]


@pytest.mark.parametrize("clip", ["norm", "adaptive"])
def test_groups_that_come_and_go_are_unscaled_and_clipped_as_by_gradscaler(clip: str) -> None:
    ours, plain = Tower(), Tower()
    optimizer = torch.optim.SGD(ours.head.parameters(), lr=0.5)
    change_groups(ours, optimizer, 0)
    options = {"max_grad_norm": 0.1} if clip == "norm" else {"adaptive_clip": 0.02}
    trainer = PrecisionTrainer(ours, optimizer, "fp32", scale=4096.0, say=quiet, **options)
    other = torch.optim.SGD(plain.head.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=1000)
    for step, batch in enumerate(data(6)):
        if step:
            change_groups(ours, optimizer, step)
        change_groups(plain, other, step)
        outcome = trainer.step(batch, cross_entropy)
        other.zero_grad()
        scaler.scale(cross_entropy(plain, batch)).backward()
        scaler.unscale_(other)
        held = [p for group in other.param_groups for p in group["params"]]
        if clip == "norm":
            norm = torch.nn.utils.clip_grad_norm_(held, 0.1)
            assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
        else:
            assert outcome.clipped == pytest.approx(float(adaptive_clip_(held, 0.02)))
        scaler.step(other)
        scaler.update()
        for name, value in state(ours).items():
            torch.testing.assert_close(value, state(plain)[name], rtol=1e-5, atol=1e-7)


def test_an_overflow_in_a_new_group_alone_is_retried() -> None:
    """A gradient of the new layer is inf above a scale: the batch is repeated, as if the scale had been lower."""

    def trained(initial: float, trap: bool) -> tuple[Tower, list[str]]:
        model = Tower()
        model.low.requires_grad_(False)
        held = [*model.middle.parameters(), *model.head.parameters()]
        optimizer = torch.optim.SGD(held, lr=0.1)
        trainer = PrecisionTrainer(model, optimizer, "fp16", scale=ScalerConfig(initial=initial), say=quiet)
        batches, kinds = data(3), []
        kinds.append(str(trainer.step(batches[0], cross_entropy)))
        model.low.requires_grad_(True)
        if trap:
            above = torch.full_like(model.low.bias, math.inf)
            model.low.bias.register_hook(lambda grad: above if trainer.scaler.scale > 2.0**8 else grad)
        optimizer.add_param_group({"params": list(model.low.parameters())})
        kinds += [str(trainer.step(batch, cross_entropy)) for batch in batches[1:]]
        return model, kinds

    ours, kinds = trained(2.0**10, trap=True)
    lower, _ = trained(2.0**8, trap=False)
    assert kinds == ["stepped", "retried(2)", "stepped"]
    for name, value in state(ours).items():
        torch.testing.assert_close(value, state(lower)[name], rtol=1e-3, atol=1e-5)  # the first step's scale differs


class Pair(nn.Module):
    """Two vectors whose gradients are the batch itself, so that an oracle needs no network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Parameter(torch.randn(500)), nn.Parameter(torch.randn(500))


def products(model: Pair, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = model.a @ batch[0]
    return loss + model.b @ batch[1] if model.b.requires_grad else loss


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(500), torch.randn(500)) for _ in range(count)]


@pytest.mark.parametrize("how", ["a group", "unfrozen"])
@pytest.mark.parametrize("kind", ["bf16_nearest", "bf16_stochastic", "bf16_kahan"])
def test_bf16_masters_take_in_what_comes_later(kind: str, how: str, tmp_path: Path) -> None:
    """As one that was there from the start and whose gradients were zero; and a checkpoint goes on from there."""

    def made(late: bool) -> PrecisionTrainer:
        model = Pair()
        model.b.requires_grad_(not late)
        held = [model.a] if late and how == "a group" else [model.a, model.b]
        optimizer = torch.optim.SGD(held, lr=0.003)
        return PrecisionTrainer(model, optimizer, "fp32", masters=kind, say=quiet)  # type: ignore[arg-type]

    def unfreeze(trainer: PrecisionTrainer) -> None:
        trainer.model.b.requires_grad_(True)
        if how == "a group":
            trainer.optimizer.add_param_group({"params": [trainer.model.b]})

    late, early, batches = made(late=True), made(late=False), pairs(8)
    for step, (x, y) in enumerate(batches):
        if step == 3:
            unfreeze(late)
        if step == 6:
            late.save_checkpoint(tmp_path / "late.pt")
        late.step((x, y), products)
        early.step((x, y if step >= 3 else torch.zeros(500)), products)
    assert bool(is_on_grid(late.model.b.detach(), BF16).all())
    assert same(state(late.model), state(early.model))
    resumed = made(late=True)
    unfreeze(resumed)
    resumed.load_checkpoint(tmp_path / "late.pt")
    for batch in batches[6:]:
        resumed.step(batch, products)
    assert same(state(resumed.model), state(late.model))
    assert same(resumed.optimizer_step.masters.compensation, late.optimizer_step.masters.compensation)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
@pytest.mark.parametrize("accumulated", [0, 1])
def test_weights_of_another_type_are_refused_before_anything_moves(cast: str, accumulated: int) -> None:
    trainer, batches = trainer_of(mlp(), "fp16", accumulate=2), data(3)
    for batch in batches[:accumulated]:
        trainer.step(batch, cross_entropy)
    getattr(trainer.model, cast)()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with pytest.raises(MantissaError, match=r"master weights are fp32.*model\.float\(\)"):
        trainer.step(batches[1], cross_entropy)
    assert all(map(torch.equal, trainer.model.parameters(), before))
    assert (trainer.steps, trainer.updates, trainer.optimizer.state) == (0, 0, {})
    trainer.model.float()
    kinds = [str(trainer.step(batch, cross_entropy)) for batch in batches[:2]]
    assert kinds == ["accumulated", "stepped"]


def test_an_exchanged_layer_is_said_once_listed_by_audit_and_learns_when_added() -> None:
    """An embedding for a larger vocabulary, as resize_token_embeddings makes it."""
    words = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(24, 3))
    trainer = trainer_of(words, "fp16")
    batch = (torch.randint(0, 10, (8, 4)), torch.randint(0, 3, (8,)))
    trainer.step(batch, cross_entropy)
    assert (audit(words, trainer.optimizer).idle, audit(words, trainer.optimizer).foreign) == ((), ())
    words[0] = nn.Embedding(12, 6)
    with pytest.warns(UserWarning, match=r"in no optimiser: 0\.weight.*not the model's: optimizer.param_groups\[0\]"):
        trainer.step(batch, cross_entropy)
    trainer.step(batch, cross_entropy)  # said once; a second warning would be an error here
    seen = audit(words, trainer.optimizer)
    assert (seen.idle, seen.foreign) == (("0.weight",), ("optimizer.param_groups[0][0]",))
    assert "0.weight" in str(seen)
    before = words[0].weight.detach().clone()
    trainer.optimizer.add_param_group({"params": [words[0].weight]})
    assert str(trainer.step(batch, cross_entropy)) == "stepped"
    assert not torch.equal(before, words[0].weight)
    assert list(trainer.optimizer_step.parameters)[-1] == "0.weight"
    assert audit(words, trainer.optimizer).idle == ()


def test_a_loss_with_weights_of_its_own_is_no_stray_but_unfrozen_ones_are() -> None:
    model, temperature = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), nn.Parameter(torch.ones(()))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([*model[1].parameters(), temperature], lr=0.1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]) * temperature, batch[1])

    trainer = PrecisionTrainer(model, optimizer, "fp16", say=quiet)
    trainer.step(data(1)[0], loss)
    assert float(temperature.detach()) != 1.0
    assert audit(model, optimizer).foreign == ("optimizer.param_groups[0][2]",)
    model[0].requires_grad_(True)
    with pytest.warns(UserWarning, match=r"in no optimiser: 0\.weight, 0\.bias"):
        trainer.step(data(1)[0], loss)
    with pytest.warns(UserWarning, match=r"in no optimiser: 0\.weight, 0\.bias"):
        PrecisionTrainer(model, optimizer, "fp16", say=quiet)


def test_an_optimiser_of_nothing_that_the_model_still_has_is_refused() -> None:
    trainer = trainer_of(nn.Sequential(nn.Linear(6, 3)), "bf16")
    trainer.model[0] = nn.Linear(6, 3)
    with pytest.raises(MantissaError, match="holds none of the model's parameters"):
        trainer.step(data(1)[0], cross_entropy)


def test_buffers_of_a_layer_that_came_later_are_put_back_too() -> None:
    """A batch norm that was exchanged counts a repeated batch once, and forgets one that was given up."""

    def trained(poisoned: bool) -> dict[str, Tensor]:
        model = mlp()
        trainer = trainer_of(model, "fp16", on_nonfinite="skip")
        model[1] = copy.deepcopy(model[1]).requires_grad_(False)
        batches = data(3)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return cross_entropy(model, batch) + (math.nan if batch is batches[1] else 0.0)

        with pytest.warns(UserWarning, match="not the model's"):
            trainer.step(batches[0], loss)
        if poisoned:
            assert str(trainer.step(batches[1], loss)) == "skipped"
        trainer.step(batches[2], loss)
        return dict(model[1].named_buffers())

    assert same(trained(poisoned=True), trained(poisoned=False))


class Lazy(nn.Module):
    """A layer whose statistic is made by its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.seen = mean if self.seen is None else self.seen + mean
        return self.linear(x)


def test_a_buffer_that_a_forward_makes_is_taken_back_with_its_batch() -> None:
    model, batches = Lazy(), data(2)
    trainer = trainer_of(model, "fp16", on_nonfinite="skip")
    trainer.step(batches[0], lambda m, b: cross_entropy(m, b) * math.nan)
    assert model.seen is None
    trainer.step(batches[1], cross_entropy)
    assert torch.equal(model.seen, batches[1][0].mean(0))


def go_on_after(change: Callable[[PrecisionTrainer], object], message: str, at_once: bool) -> None:
    """``change`` in an open window is refused, at once or by the next batch, and the window is not lost by it."""
    ours, plain, batches = mlp(), mlp(), data(3)
    trainer, oracle = (trainer_of(model, "fp16", accumulate=3) for model in (ours, plain))
    trainer.step(batches[0], cross_entropy)
    scale = trainer.scaler.scale
    if at_once:
        with pytest.raises(MantissaError, match=message):
            change(trainer)
    else:
        change(trainer)
        with pytest.raises(MantissaError, match=message):
            trainer.step(batches[1], cross_entropy)
    assert trainer.accumulated == 1
    trainer.scaler.scale = scale
    for batch in batches[1:]:
        trainer.step(batch, cross_entropy)
    for batch in batches:
        oracle.step(batch, cross_entropy)
    assert (trainer.updates, trainer.scaler.scale) == (1, oracle.scaler.scale)
    assert same(state(ours), state(plain))


def test_two_scales_or_divisors_never_meet_in_a_window() -> None:
    def other_scale(trainer: PrecisionTrainer) -> None:
        trainer.scaler.load_state_dict({"scale": 64.0, "clean_steps": 3})

    def other_count(trainer: PrecisionTrainer) -> None:
        trainer.accumulate = 2

    go_on_after(lambda trainer: trainer.use("fp32"), r"use\('fp32'\) with 1 of 3 micro-batches", True)
    go_on_after(other_count, "accumulate=2 with 1 of 3 micro-batches", True)
    go_on_after(other_scale, "loss scale was 65536 .* and is 64 now", False)


def test_groups_changed_in_an_open_window_are_refused_and_a_flush_follows_them() -> None:
    """The flush computes the window again, as a trainer does that has had the new group all along."""
    ours, plain, batches = Tower(), Tower(), data(2)
    ours.low.requires_grad_(False)
    optimizer = torch.optim.SGD([*ours.middle.parameters(), *ours.head.parameters()], lr=0.1)
    trainer = PrecisionTrainer(ours, optimizer, "fp32", scale=256.0, accumulate=2, say=quiet)
    trainer.step(batches[0], cross_entropy)
    ours.low.requires_grad_(True)
    optimizer.add_param_group({"params": list(ours.low.parameters())})
    with pytest.raises(MantissaError, match="groups have changed while gradients accumulate"):
        trainer.step(batches[1], cross_entropy)
    assert str(trainer.flush()) == "stepped"
    cross_entropy(plain, batches[0]).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for name, value in state(ours).items():
        torch.testing.assert_close(value, state(plain)[name], rtol=1e-5, atol=1e-7)


def test_a_scale_between_forward_and_backward_is_that_of_the_backward() -> None:
    ours, plain = mlp(), mlp()
    trainer, oracle = trainer_of(ours, "fp32", scale=64.0, accumulate=2), trainer_of(plain, accumulate=2)
    first, second = data(2)
    trainer.backward_step(trainer.forward_loss(first, cross_entropy))
    loss = trainer.forward_loss(second, cross_entropy)
    trainer.scaler.scale = 128.0
    with pytest.raises(MantissaError, match=r"loss scale was 64 .* and is 128 now"):
        trainer.backward_step(loss)
    trainer.scaler.scale = 64.0
    trainer.backward_step(loss)
    for batch in (first, second):
        oracle.step(batch, cross_entropy)
    for name, value in state(ours).items():
        torch.testing.assert_close(value, state(plain)[name], rtol=1e-6, atol=1e-8)


def test_the_older_trainer_keeps_its_scale_while_it_accumulates() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ExtendedFP16Trainer(model, optimizer, ExtendedFP16Config(gradient_accumulation_steps=2, fallback="error"))
    saved = trainer.scaler.state_dict() | {"scale": 4.0}
    trainer.backward_and_step(trainer.training_step(data(1)[0], cross_entropy))
    with pytest.raises(MantissaError, match=r"scaler\.load_state_dict with 1 of 2 micro-batches"):
        trainer.scaler.load_state_dict(saved)
    trainer.backward_and_step(trainer.training_step(data(1)[0], cross_entropy))
    trainer.scaler.load_state_dict(saved)
    assert trainer.scaler.get_scale() == 4.0
    with pytest.raises(AttributeError):
        trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[misc]


def test_a_frozen_layer_may_leave_while_the_older_trainer_lends_its_model_in_fp16() -> None:
    model = mlp()
    model.add_module("unused", nn.Linear(2, 2).requires_grad_(False))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    trainer = ExtendedFP16Trainer(model, optimizer, ExtendedFP16Config(fallback="error"))
    masters = state(model)
    trainer.cast_model_to_fp16()
    assert model[0].weight.dtype == torch.float16
    del model.unused
    with torch.no_grad():
        trainer.training_step(data(1)[0], lambda m, b: m[0](b[0]).sum())
    assert same(state(model), {name: value for name, value in masters.items() if "unused" not in name})


class Wants:
    """A schedule by epochs, as some libraries have them: its step cannot be called without one."""

    def step(self, epoch: int) -> None:
        raise AssertionError

    def state_dict(self) -> dict[str, Any]:
        return {}

    load_state_dict = step


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), "ReduceLROnPlateau, whose step.. wants more"),
        (
            lambda o: HeldScheduler(lr_scheduler.ReduceLROnPlateau(o), lambda: True),
            "ReduceLROnPlateau, whose step.. wants",
        ),
        (lambda o: Wants(), "Wants, whose step.. wants more"),
        (lambda o: (lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)), "is a tuple of 2: expected one"),
        (lambda o: lr_scheduler.StepLR(torch.optim.Adam([nn.Parameter(torch.ones(2))]), 1), "another optimiser .Adam"),
        (lambda o: "cosine", "is a str: expected one of torch"),
    ],
)
def test_a_schedule_that_cannot_be_stepped_is_refused_when_given(make: Callable[[Any], Any], message: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = make(optimizer)
    with pytest.raises(MantissaError, match=message):
        PrecisionTrainer(model, optimizer, "fp16", scheduler=schedule, say=quiet)
    trainer = PrecisionTrainer(model, optimizer, "fp16", say=quiet)
    with pytest.raises(MantissaError, match=message):
        trainer.scheduler = schedule
    assert trainer.scheduler is None


def one_cycle(o: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(o, 0.1, total_steps=3)


def then_one_cycle(o: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(o, 0.5, 1), lr_scheduler.OneCycleLR(o, 0.1, total_steps=2)]
    return lr_scheduler.SequentialLR(o, parts, [1])


def with_one_cycle(o: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([lr_scheduler.OneCycleLR(o, 0.1, total_steps=3)], o)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*:UserWarning")  # torch's, of its own SequentialLR
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step..`:UserWarning")
@pytest.mark.parametrize("make", [one_cycle, then_one_cycle, with_one_cycle])
def test_a_schedule_past_its_end_is_refused_before_the_weights_move(make: Callable[[Any], Any]) -> None:
    """After as many updates as the schedule itself takes in torch's own loop."""
    plain = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    schedule, last = make(optimizer), 0
    with contextlib.suppress(ValueError):
        while last < 10:
            optimizer.step()
            schedule.step()
            last += 1
    trainer = trainer_of(mlp(), "fp16")
    trainer.scheduler = make(trainer.optimizer)
    batch = data(1)[0]
    for _ in range(last):
        trainer.step(batch, cross_entropy)
    before, rate = state(trainer.model), trainer.optimizer.param_groups[0]["lr"]
    with pytest.raises(MantissaError, match="OneCycleLR is past its end"):
        trainer.step(batch, cross_entropy)
    assert same(state(trainer.model), before)
    assert (trainer.steps, trainer.updates) == (last, last)
    assert trainer.optimizer.param_groups[0]["lr"] == rate
    trainer.scheduler = None
    assert trainer.step(batch, cross_entropy).applied


SCHEDULES: dict[str, tuple[Any, ...]] = {
    "LambdaLR": (lambda n: 0.9**n,),
    "MultiplicativeLR": (lambda n: 0.9,),
    "StepLR": (1, 0.5),
    "MultiStepLR": ([1],),
    "ConstantLR": (),
    "LinearLR": (),
    "ExponentialLR": (0.9,),
    "PolynomialLR": (),
    "CosineAnnealingLR": (5,),
    "CosineAnnealingWarmRestarts": (5,),
    "CyclicLR": (0.01, 0.1),
    "OneCycleLR": (0.1, 10),
}
_NOT_ALONE = {"LRScheduler", "_LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"}


def test_every_schedule_of_torch_is_among_those_tried() -> None:
    kinds = {name for name, kind in vars(lr_scheduler).items()
             if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)}  # fmt: skip
    assert kinds - _NOT_ALONE == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_group_that_a_schedule_does_not_know_is_refused_where_torch_would_fail(name: str) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return getattr(lr_scheduler, name)(optimizer, *SCHEDULES[name])

    def unfrozen() -> tuple[Tower, torch.optim.Optimizer, Any]:
        model = Tower()
        model.low.requires_grad_(False)
        optimizer = torch.optim.SGD([*model.middle.parameters(), *model.head.parameters()], lr=0.1, momentum=0.9)
        return model, optimizer, make(optimizer)

    model, optimizer, schedule = unfrozen()
    optimizer.step()
    optimizer.add_param_group({"params": list(model.low.parameters())})
    try:
        schedule.step()
        fails = False
    except (ValueError, KeyError, IndexError):
        fails = True
    model, optimizer, schedule = unfrozen()
    trainer = PrecisionTrainer(model, optimizer, "fp16", scheduler=schedule, say=quiet)
    trainer.step(data(1)[0], cross_entropy)
    model.low.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.low.parameters())})
    before = state(model)
    with pytest.raises(MantissaError, match=r"of 1 parameter groups.* 2 now") if fails else contextlib.nullcontext():
        trainer.step(data(1)[0], cross_entropy)
    assert same(state(model), before) is fails
    assert trainer.updates == 2 - fails


def test_counts_are_right_where_an_owners_own_schedule_raises() -> None:
    def rate(update: int) -> float:
        return [1.0, 0.5][update]

    trainer = trainer_of(mlp(), "fp16")
    trainer.scheduler = lr_scheduler.LambdaLR(trainer.optimizer, rate)
    batches = data(2)
    trainer.step(batches[0], cross_entropy)
    with pytest.raises(IndexError):
        trainer.step(batches[1], cross_entropy)
    assert (trainer.steps, trainer.updates, trainer.accumulated) == (2, 2, 0)


def test_several_optimisers_are_refused() -> None:
    model = mlp()
    with pytest.raises(MantissaError, match="is a list of 2: expected one"):
        PrecisionTrainer(model, [torch.optim.SGD(model.parameters(), lr=0.1)] * 2, "fp16", say=quiet)  # type: ignore[arg-type]
    with pytest.raises(MantissaError, match=r"is a dict: expected a torch\.optim\.Optimizer"):
        PrecisionTrainer(model, {}, "fp16", say=quiet)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [math.nan, -1.0, math.inf, "1", None, True, torch.ones(2)])
def test_a_weight_that_is_none_is_refused_and_the_window_stays(weight: Any) -> None:
    ours, plain, batches = mlp(), mlp(), data(2)
    trainer, oracle = trainer_of(ours, accumulate=2), trainer_of(plain, accumulate=2)
    trainer.step(batches[0], cross_entropy)
    with pytest.raises(MantissaError, match=r"step\(weight=.*: expected a finite number, 0 or more"):
        trainer.step(batches[1], cross_entropy, weight=weight)
    loss = trainer.forward_loss(batches[1], cross_entropy)
    with pytest.raises(MantissaError, match=r"backward_step\(weight=.*: expected a finite number, 0 or more"):
        trainer.backward_step(loss, weight=weight)
    assert (trainer.accumulated, trainer.batches_seen) == (1, 1)
    trainer.backward_step(loss, weight=np.float32(1.0))
    for batch in batches:
        oracle.step(batch, cross_entropy, weight=torch.ones(()))
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))


def test_a_model_that_joins_other_processes_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(mlp(), "fp16")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    with pytest.raises(MantissaError, match="2 processes, and there were 1"):
        trainer.step(data(1)[0], cross_entropy)


def test_a_checkpoint_that_does_not_fit_leaves_the_precision_and_the_scale(tmp_path: Path) -> None:
    """Of a guarded run that has fallen back: the file says bf16, and is another model's."""
    other = trainer_of(nn.Linear(6, 3), "bf16")
    other.save_checkpoint(tmp_path / "other.pt")
    guard = GuardConfig(to="bf16")
    trainer = trainer_of(mlp(), "fp16", accumulate=2, run_dir=tmp_path / "run", guard=guard)
    trainer.step(data(1)[0], cross_entropy)
    scaler = trainer.scaler
    with pytest.raises(MantissaError, match="do not fit"):
        trainer.load_checkpoint(tmp_path / "other.pt")
    assert (trainer.precision.active.name, trainer.scaler, trainer.accumulated) == ("fp16", scaler, 1)
