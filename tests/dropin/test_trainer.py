"""The drop-in trainer: against plain torch, retry of the very same batch, weights of batches, what it leaves behind."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.dropin import PrecisionTrainer
from mantissa.training import LossScaler, ScalerConfig
from toys import Batch, cross_entropy, data, fragile, mlp, quiet, same, state, trainer_of


def test_fp32_is_plain_torch_to_the_last_bit() -> None:
    ours, plain = mlp(), mlp()
    trainer = trainer_of(ours, max_grad_norm=0.5)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for batch in data(10):
        outcome = trainer.step(batch, cross_entropy)
        optimizer.zero_grad()
        loss = cross_entropy(plain, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert outcome.kind == "stepped"
        assert torch.equal(outcome.loss, loss.detach())
        assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-6)
    assert same(state(ours), state(plain))


@pytest.mark.parametrize(("accumulate", "poisoned", "halves"), [(1, 2, True), (2, 2, False), (2, 3, False)])
def test_a_nan_loss_with_finite_gradients_costs_its_step_and_no_more(
    accumulate: int, poisoned: int, halves: bool
) -> None:
    """Whichever of a window's batches it comes from; the others are learned from as if that window had not been."""
    ours, plain, batches = mlp(), mlp(), data(6)
    trainer = trainer_of(ours, "fp16", accumulate=accumulate)
    scale = ScalerConfig(initial=2.0**15)  # the scale after the skip; 2^16 and 2^15 round alike here
    oracle = trainer_of(plain, "fp16", accumulate=accumulate, scale=scale)
    for index, batch in enumerate(batches):

        def loss_fn(model: nn.Module, batch: Batch, index: int = index) -> Tensor:
            return cross_entropy(model, batch) + (math.nan if index == poisoned else 0.0)

        if halves:
            trainer.backward_step(trainer.forward_loss(batch, loss_fn))
        else:
            trainer.step(batch, loss_fn)
        if index // accumulate != poisoned // accumulate:
            oracle.step(batch, cross_entropy)
    assert (trainer.skipped, trainer.updates) == (1, 6 // accumulate - 1)
    assert same(state(ours), state(plain))


@pytest.mark.parametrize("halves", [False, True], ids=["step", "forward, backward"])
def test_accumulation_is_the_mean_over_micro_batches(halves: bool) -> None:
    ours, plain = nn.Linear(6, 3), nn.Linear(6, 3)
    plain.load_state_dict(ours.state_dict())
    trainer = trainer_of(ours, accumulate=4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    kinds = []
    for i, batch in enumerate(data(8)):
        if halves:
            loss = trainer.forward_loss(batch, cross_entropy)
            if i % 4 == 0:
                ours.weight.grad = torch.ones_like(ours.weight)  # of something between, which is not this loss's
            kinds.append(str(trainer.backward_step(loss)))
        else:
            kinds.append(str(trainer.step(batch, cross_entropy)))
        (cross_entropy(plain, batch) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert kinds == ["accumulated", "accumulated", "accumulated", "stepped"] * 2
    assert (trainer.steps, trainer.updates, trainer.batches_seen) == (2, 2, 8)
    assert same(state(ours), state(plain))


def test_weights_make_uneven_micro_batches_the_mean_over_samples() -> None:
    """Four rows, then one: with weights 1 and 1/4 the step is that of the five rows together (float64 oracle)."""
    rows, labels = torch.randn(5, 6), torch.randint(0, 3, (5,))
    ours = nn.Linear(6, 3)
    oracle = nn.Linear(6, 3).double()
    oracle.load_state_dict(ours.state_dict())
    trainer = trainer_of(ours, lr=1.0, accumulate=2)
    trainer.step((rows[:4], labels[:4]), cross_entropy)
    outcome = trainer.step((rows[4:], labels[4:]), cross_entropy, weight=0.25)
    loss = F.cross_entropy(oracle(rows.double()), labels)
    loss.backward()
    torch.testing.assert_close(outcome.loss.double(), loss.detach(), rtol=1e-6, atol=0)
    expected = oracle.weight.detach() - oracle.weight.grad
    torch.testing.assert_close(ours.weight.detach().double(), expected, rtol=0, atol=1e-6)


def test_a_short_last_window_is_the_mean_of_what_it_has() -> None:
    batches = data(3)
    short, full = nn.Linear(6, 3), nn.Linear(6, 3)
    full.load_state_dict(short.state_dict())
    first, second = trainer_of(short, accumulate=4), trainer_of(full, accumulate=3)
    for batch in batches:
        first.step(batch, cross_entropy)
        second.step(batch, cross_entropy)
    outcome = first.flush()
    assert outcome is not None
    assert outcome.kind == "stepped"
    torch.testing.assert_close(short.weight, full.weight, rtol=1e-6, atol=1e-7)
    assert first.flush() is None


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_retried_window_ends_as_if_the_scale_had_been_right_at_once(accumulate: int) -> None:
    """Powers of two are exact in fp32: dropout draws the same masks, batch norm counts each batch once, to the bit."""
    (ours, trap), (control, _) = fragile(), fragile()
    trainer, calm = trainer_of(ours, accumulate=accumulate), trainer_of(control, accumulate=accumulate)
    trainer.optimizer_step.scaler = LossScaler(ScalerConfig(initial=2.0**10, retries=6))
    kinds, batches = [], data(2 * accumulate)
    torch.manual_seed(9)
    for i, batch in enumerate(batches):
        trap.limit = 2.0**7 / 8 / accumulate if i < accumulate else math.inf
        kinds.append(trainer.step(batch, cross_entropy).kind)
    torch.manual_seed(9)
    for batch in batches:
        calm.step(batch, cross_entropy)
    assert (kinds[accumulate - 1], kinds[-1]) == ("retried", "stepped")
    assert same(state(ours), state(control))
    assert int(ours[0][1].num_batches_tracked) == len(batches)
    assert not torch.equal(torch.rand(3), torch.rand(3))  # the generator went on


def test_a_skipped_batch_leaves_weights_buffers_and_optimiser_alone() -> None:
    model, trap = fragile()
    trainer = trainer_of(model, "fp16", scale=ScalerConfig(retries=1))
    batches = data(3)
    trainer.step(batches[0], cross_entropy)
    before, momentum = state(model), [v["momentum_buffer"].clone() for v in trainer.optimizer.state.values()]
    trap.limit = 0.0
    outcome = trainer.step(batches[1], cross_entropy)
    assert (outcome.kind, outcome.overflows, outcome.applied) == ("skipped", 2, False)
    assert same(before, state(model))
    assert all(
        torch.equal(a, b["momentum_buffer"]) for a, b in zip(momentum, trainer.optimizer.state.values(), strict=True)
    )
    trap.limit = math.inf
    assert trainer.step(batches[2], cross_entropy).applied
    assert (trainer.steps, trainer.updates, trainer.skipped) == (3, 2, 1)
    assert trainer.stats()["overflow_rate"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_scaling_cannot_cure_stops_and_names_the_module(precision: str) -> None:
    model, trap = fragile(dropout=0.0)
    trap.limit = 0.0
    trainer = trainer_of(model, precision)
    before = state(model)
    with pytest.raises(MantissaError, match="first non-finite value: the gradient of the output of 1"):
        trainer.step(data(1)[0], cross_entropy)
    assert same(before, state(model))
    assert all(p.grad is None for p in model.parameters())
    skipping = trainer_of(model, precision, on_nonfinite="skip")
    assert skipping.step(data(1)[0], cross_entropy).kind == "skipped"


def test_a_backward_apart_cannot_be_repeated_to_look_for_the_module() -> None:
    model, trap = fragile(dropout=0.0)
    trap.limit = 0.0
    trainer = trainer_of(model)
    with pytest.raises(MantissaError, match="first non-finite value: not known, for this batch's forward cannot be"):
        trainer.backward_step(trainer.forward_loss(data(1)[0], cross_entropy))
    assert all(p.grad is None for p in model.parameters())


def test_anomaly_mode_adds_the_line_of_the_forward() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch[0]) * 0.0).sqrt().mean()  # the gradient of sqrt at 0 is inf, and inf * 0 is NaN

    trainer = trainer_of(mlp(), detect_anomaly=True)
    with pytest.raises(MantissaError, match=r"anomaly mode: .*MulBackward0.*nan values.*test_trainer.py"):
        trainer.step(data(1)[0], loss_fn)


def test_the_schedule_moves_with_updates_only() -> None:
    model, trap = fragile()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    trainer = PrecisionTrainer(model, optimizer, "fp16", scheduler=schedule, retries=0, say=quiet)
    rates = []
    for i, batch in enumerate(data(4)):
        trap.limit = 0.0 if i == 1 else math.inf
        rates.append(trainer.step(batch, cross_entropy).lr)
    assert rates == [1.0, 0.0, 0.5, 0.25]


def test_an_exception_in_the_loss_leaves_no_window_open() -> None:
    def broken(model: nn.Module, batch: Batch) -> Tensor:
        raise KeyError("answer")

    model = mlp()
    trainer = trainer_of(model, accumulate=2)
    batches = data(3)
    trainer.step(batches[0], cross_entropy)
    with pytest.raises(KeyError):
        trainer.step(batches[1], broken)
    assert all(p.grad is None for p in model.parameters())
    assert trainer.step(batches[2], cross_entropy).kind == "accumulated"


BAD_LOSSES: list[tuple[Callable[[nn.Module, Batch], object], str]] = [
    (lambda m, b: m(b[0]), r"scalar floating-point tensor; got shape \(8, 3\)"),
    (lambda m, b: 1.0, "got float"),
    (lambda m, b: cross_entropy(m, b).detach(), "without a gradient"),
]


@pytest.mark.parametrize(("loss_fn", "message"), BAD_LOSSES)
def test_a_loss_that_cannot_be_learnt_from_is_refused(loss_fn, message: str) -> None:
    with pytest.raises(MantissaError, match=message):
        trainer_of(mlp()).step(data(1)[0], loss_fn)


BAD_OPTIONS = [
    ({"accumulate": 0}, "accumulate=0"),
    ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ({"adaptive_clip": -1.0}, "adaptive_clip"),
    ({"on_nonfinite": "ignore"}, "on_nonfinite"),
    ({"precision": "fp17"}, "fp17"),
    ({"precision": "fp8"}, "fp8"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_options_that_mean_nothing_are_refused(options: dict, message: str) -> None:
    with pytest.raises(MantissaError, match=message):
        trainer_of(mlp(), **options)


def test_a_half_model_and_a_foreign_optimiser_are_refused() -> None:
    with pytest.raises(MantissaError, match="master weights are fp32"):
        trainer_of(mlp().half(), "fp16")
    with pytest.raises(MantissaError, match="none of the model's parameters"):
        PrecisionTrainer(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1), say=quiet)
    model = mlp()
    with pytest.raises(MantissaError, match="LBFGS"):
        PrecisionTrainer(model, torch.optim.LBFGS(model.parameters()), say=quiet)


def test_precision_is_told_with_its_reason_and_a_fallback_is_opted_into() -> None:
    said: list[str] = []
    trainer = trainer_of(mlp(), "fp16", say=said.append)
    assert said == [f"precision: fp16 asked, fp16 active, simulated ({trainer.precision.reason})"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = PrecisionTrainer(model, optimizer, "fp16", fallback="warn", say=quiet)
    assert "it runs in fp32" in str(caught[0].message)
    assert caught[0].filename == __file__
    stats = plain.stats()
    assert (stats["precision_requested"], stats["precision_active"]) == ("fp16", "fp32")


def test_step_none_needs_a_batch_to_take_part_with() -> None:
    trainer = trainer_of(mlp())
    with pytest.raises(MantissaError, match="no batch yet"):
        trainer.step(None, cross_entropy)
    with pytest.raises(MantissaError, match="weight"):
        trainer.step(data(1)[0], cross_entropy, weight=math.nan)
    trainer.step(data(1)[0], cross_entropy)
    with pytest.raises(MantissaError, match="nothing to learn from"):
        trainer.step(None, cross_entropy)
    assert list(trainer.batches([1, 2])) == [1, 2]


def test_gradients_from_elsewhere_are_not_learnt_from() -> None:
    """Someone called backward for a look: those gradients have no scale, and the step is not theirs."""
    ours, plain = mlp().eval(), mlp().eval()
    trainer, calm = trainer_of(ours), trainer_of(plain)
    for batch in data(3):
        cross_entropy(ours, data(1, seed=9)[0]).backward()
        trainer.step(batch, cross_entropy)
        calm.step(batch, cross_entropy)
    assert same(state(ours), state(plain))


def test_a_model_that_has_moved_is_refused() -> None:
    trainer = trainer_of(mlp(), "fp16")
    trainer.model.to("meta")
    with pytest.raises(MantissaError, match="was on cpu and is now on meta: move it first"):
        trainer.step(data(1)[0], cross_entropy)


def test_the_flush_probe_counts_what_fp16_loses_and_disturbs_nothing() -> None:
    """Half of the gradients are far below 2^-24 at scale 1: the probe finds those, and the run is as without it."""
    weight = torch.tensor([1.0, 1e-6])  # the second half's gradients are a millionth of the first's

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
            self.dropout = nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            return weight[0] * self.dropout(x @ self.first).sum() + weight[1] * self.dropout(x @ self.second).sum()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x) * 1e-3

    states = []
    for probe_every in (0, 2):
        torch.manual_seed(3)
        trainer = trainer_of(Product(), "fp16", scale=ScalerConfig(initial=1.0), probe_every=probe_every, accumulate=2)
        found = []
        for _ in range(8):
            trainer.step(torch.randn(16, 4), loss_fn)
            found.append(trainer.stats()["flushed_fraction"])
        states.append(state(trainer.model))
        assert found[3::4] == ([None, None] if probe_every == 0 else [0.5, 0.5])
        assert found[1::4] == [None, None]
    assert same(*states)
