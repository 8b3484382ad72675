"""The optimiser step: order of unscale, overflow, clip and step; retry; skip without side effects; the floor."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.kernels import SimulatedKernels
from mantissa.precision import BF16, FP16, FP32, NumberFormat
from mantissa.precision.formats import is_on_grid
from mantissa.training import (
    LossScaler,
    OptimizerStep,
    ScalerConfig,
    adamw,
    learning_rate,
    master_weights,
    where_nonfinite,
)
from mantissa.training.audit import audit


def make_step(model: nn.Module, scaler: LossScaler, **options) -> OptimizerStep:
    optimizer = adamw(model, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    lr_at = options.pop("lr_at", lambda update: 1e-2)
    return OptimizerStep(dict(model.named_parameters()), optimizer, scaler, FP16, lr_at, **options)


def gradients(model: nn.Module, values: list[float], limit: float = math.inf):
    """A backward that gives every parameter a scaled gradient, inf where |scale x value| leaves the format."""

    def backward(scale: float) -> None:
        for parameter, value in zip(model.parameters(), values, strict=True):
            scaled = value * scale
            filled = torch.full_like(parameter, scaled if abs(scaled) <= limit else math.copysign(math.inf, scaled))
            parameter.grad = filled if parameter.grad is None else parameter.grad + filled

    return backward


def snapshot(step: OptimizerStep) -> dict[str, Tensor]:
    weights = {f"w/{name}": p.detach().clone() for name, p in step.parameters.items()}
    return weights | {f"o/{k}": v.clone() for k, v in step.optimizer_tensors().items()}


def test_clip_bound_holds_after_unscaling() -> None:
    """Clipping scaled gradients at an unscaled bound would always clip, and far too much."""
    model = nn.Linear(1, 1, bias=False)
    step = make_step(model, LossScaler(ScalerConfig(initial=1024.0)), max_grad_norm=0.5)
    seen: list[float] = []
    step.optimizer.register_step_pre_hook(lambda *_: seen.append(float(model.weight.grad)))
    assert step.run(gradients(model, [4.0])).grad_norm == pytest.approx(4.0)
    assert seen == [pytest.approx(0.5, rel=1e-5)]


def test_overflow_repeats_the_same_batch_at_a_lower_scale() -> None:
    model, control = nn.Linear(2, 2), nn.Linear(2, 2)
    control.load_state_dict(model.state_dict())
    step = make_step(model, LossScaler(ScalerConfig(initial=65536.0)))
    outcome = step.run(gradients(model, [3.0, 5.0], limit=65504.0))
    assert (outcome.kind, outcome.overflows, outcome.scale) == ("retried", 3, 8192.0)
    assert outcome.max_scaled_grad == pytest.approx(5 * 8192 / 65504)
    make_step(control, LossScaler.disabled()).run(gradients(control, [3.0, 5.0]))
    for ours, theirs in zip(model.parameters(), control.parameters(), strict=True):
        assert torch.equal(ours, theirs)  # scales are powers of two: the update is the same to the bit
    assert step.updates == 1


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_skipped_step_leaves_nothing_behind(poison: float) -> None:
    model = nn.Linear(2, 2)
    step = make_step(model, LossScaler(ScalerConfig(retries=2)), lr_at=learning_rate(1e-2, 4))
    step.run(gradients(model, [1.0, 1.0]))
    before, updates = snapshot(step), step.updates
    outcome = step.run(gradients(model, [1.0, poison]))
    assert (outcome.kind, outcome.overflows, outcome.lr) == ("skipped", 3, 0.0)
    assert outcome.retries == 2  # the third overflow ended the step
    assert not outcome.applied
    after = snapshot(step)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (step.updates, step.skipped) == (updates, 1)
    assert step.scaler.scale == 65536.0 / 8
    assert all(p.grad is None for p in model.parameters())
    assert step.run(gradients(model, [1.0, 1.0])).lr == pytest.approx(2 * 1e-2 / 4)  # the schedule did not move


@pytest.mark.parametrize(
    ("loss", "scale", "action"),
    [
        (math.nan, 1024.0, "stop"),
        (math.inf, 1024.0, "skip"),
        (-math.inf, 1.0, "stop"),
        (math.nan, 1.0, "stop"),
        (math.nan, 1.0, "skip"),
    ],
)
def test_a_loss_that_is_not_finite_is_no_step_whatever_its_gradients(loss: float, scale: float, action: str) -> None:
    model = nn.Linear(2, 2)
    step = make_step(model, LossScaler(ScalerConfig(initial=scale)), on_nonfinite=action)
    finite = gradients(model, [1.0, 1.0])
    assert step.run(lambda scale: (finite(scale), torch.tensor(0.5))[1]).kind == "stepped"
    before, tries = snapshot(step), []

    def backward(scale: float) -> Tensor:
        tries.append(scale)
        finite(scale)
        return torch.tensor(loss)

    if scale == 1.0 and action == "stop":
        with pytest.raises(MantissaError, match="non-finite loss at loss scale 1, which is the floor"):
            step.run(backward)
    else:
        outcome = step.run(backward)
        assert (outcome.kind, outcome.overflows, len(tries)) == ("skipped", 1, 1)  # repeating would find the same
        assert (step.updates, step.skipped, step.scaler.scale) == (1, 1, max(scale / 2, 1.0))
    assert all(torch.equal(value, before[name]) for name, value in snapshot(step).items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_overflow_at_the_floor_stops_and_names_the_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.fill_(10.0)
        model[1].weight.fill_(3e38)
    x = torch.ones(4, 2)

    def backward(scale: float) -> None:
        (model(x).sum() * scale).backward()

    step = make_step(
        model,
        LossScaler(ScalerConfig(initial=1.0)),
        diagnose=lambda backward: str(where_nonfinite(model, lambda: backward(1.0))),
    )
    with pytest.raises(MantissaError, match=r"floor.*the output of 1 \("):
        step.run(backward)


def test_found_overflow_of_simulated_fp16_is_the_format_s_own() -> None:
    """A gradient that fits fp32 and not fp16 becomes inf in the simulated kernels, is found, and costs one back-off."""
    weight = nn.Parameter(torch.ones(8, 8))
    holder = nn.Module()
    holder.weight = weight
    kernels, x = SimulatedKernels(FP16), torch.ones(4, 8)
    step = make_step(holder, LossScaler(ScalerConfig(initial=2.0**15)))
    outcome = step.run(lambda scale: (kernels.linear(x, weight).sum() * scale).backward())
    assert (outcome.kind, outcome.overflows) == ("retried", 2)  # 4 rows x 2^15 and x 2^14 leave the format, 2^13 fits
    assert outcome.max_scaled_grad == pytest.approx(4 * 2**13 / 65504)


def test_state_continues_bit_for_bit() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 3)
    step = make_step(model, LossScaler(ScalerConfig(growth_interval=3)), lr_at=learning_rate(1e-2, 5))

    def work(target: nn.Module, n: int):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(n))
        return lambda scale: (target(x).square().sum() * scale).backward()

    for n in range(4):
        step.run(work(model, n))
    other = copy.deepcopy(model)
    resumed = make_step(other, LossScaler(ScalerConfig(growth_interval=3)), lr_at=learning_rate(1e-2, 5))
    resumed.load_state_dict(copy.deepcopy(step.state_dict()))
    resumed.load_optimizer_tensors(step.optimizer_tensors())
    for n in range(4, 9):
        assert step.run(work(model, n)) == resumed.run(work(other, n))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert step.state_dict() == resumed.state_dict()
    assert {key.rpartition("/")[2] for key in step.optimizer_tensors()} == {"step", "exp_avg", "exp_avg_sq"}


def test_optimizer_state_of_another_model_is_refused() -> None:
    step = make_step(nn.Linear(2, 2), LossScaler())
    with pytest.raises(MantissaError, match=r"names 'other\.weight'"):
        step.load_optimizer_tensors({"other.weight/exp_avg": torch.zeros(2, 2)})


def test_learning_rate_rises_then_stays_or_falls_to_zero() -> None:
    constant, falling = learning_rate(1.0, 4), learning_rate(1.0, 2, decay_until=10)
    assert [constant(n) for n in (0, 1, 3, 4, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert [falling(n) for n in (0, 1, 5, 9, 10, 11)] == pytest.approx([0.5, 0.9, 0.5, 0.1, 0.0, 0.0])
    assert learning_rate(0.5, 0)(0) == 0.5


def test_a_group_with_a_scale_of_its_own_moves_by_that_much_more() -> None:
    """Adam's first step is the rate itself; the outcome reports the first group's."""
    parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in "ab"}
    groups = [{"params": [parameters["a"]]}, {"params": [parameters["b"]], "lr_scale": 20.0}]
    step = OptimizerStep(parameters, torch.optim.AdamW(groups, lr=0.0), LossScaler.disabled(), FP32, lambda n: 1e-3)
    outcome = step.run(lambda scale: (scale * sum(p.sum() for p in parameters.values())).backward())  # type: ignore
    assert outcome.lr == 1e-3
    torch.testing.assert_close(parameters["a"].detach(), torch.full((3,), -1e-3))
    torch.testing.assert_close(parameters["b"].detach(), torch.full((3,), -2e-2))


def test_a_step_over_named_parameters_follows_its_optimizer() -> None:
    """A head joins, and an exchanged weight takes its place and its name: as torch's GradScaler steps them."""
    torch.manual_seed(7)
    model, head = nn.Linear(4, 4), nn.Linear(4, 2)
    plain, other = copy.deepcopy(model), copy.deepcopy(head)
    optimizer, theirs = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain))
    step = OptimizerStep(
        dict(model.named_parameters()), optimizer, LossScaler(ScalerConfig(initial=512.0)), FP32, None, 0.5,
        names=lambda: [*model.named_parameters(), *((f"head.{name}", p) for name, p in head.named_parameters())],
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1000)

    def change(turn: int, model: nn.Linear, head: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        if turn == 1:
            optimizer.add_param_group({"params": list(head.parameters())})
        if turn == 2:
            model.weight = nn.Parameter(torch.full((4, 4), 0.1))
            optimizer.add_param_group({"params": [model.weight]})

    for turn in range(4):
        x = torch.randn(8, 4)
        change(turn, model, head, optimizer)
        change(turn, plain, other, theirs)

        def backward(scale: float, x: Tensor = x) -> None:
            (head(model(x)).square().mean() * scale).backward()

        outcome = step.run(backward)
        theirs.zero_grad()
        scaler.scale(other(plain(x)).square().mean()).backward()
        scaler.unscale_(theirs)
        held = [p for group in theirs.param_groups for p in group["params"]]
        assert outcome.grad_norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(held, 0.5)), rel=1e-5)
        scaler.step(theirs)
        scaler.update()
    for ours, expected in zip(
        [*model.parameters(), *head.parameters()], [*plain.parameters(), *other.parameters()], strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
    assert list(step.parameters) == ["optimizer.param_groups[0][0]", "bias", "head.weight", "head.bias", "weight"]
    saved = {name: value.clone() for name, value in step.optimizer_tensors().items()}
    assert torch.equal(saved["weight/exp_avg"], optimizer.state[model.weight]["exp_avg"])
    del optimizer.param_groups[0]["params"][0]  # what no model has
    with pytest.raises(MantissaError, match="which this model does not have"):
        step.load_optimizer_tensors(saved)
    kept = {name: value for name, value in saved.items() if not name.startswith("optimizer")}
    step.load_optimizer_tensors(kept)
    assert step.optimizer_tensors().keys() == kept.keys()


def test_masters_that_a_step_was_given_and_its_rule_was_not_stay_fp32() -> None:
    """As FlowRL's head beside a policy of bf16; a group that is added later is rounded."""
    model = nn.ModuleDict({"policy": nn.Linear(3, 3), "head": nn.Linear(3, 1), "late": nn.Linear(3, 1)})
    policy = dict(model["policy"].named_parameters(prefix="policy"))
    head = dict(model["head"].named_parameters(prefix="head"))
    optimizer = torch.optim.SGD([*policy.values(), *head.values()], lr=0.01)
    masters = master_weights("bf16_nearest", policy, FP32)
    step = OptimizerStep(policy | head, optimizer, LossScaler.disabled(), FP32, None, masters=masters)
    optimizer.add_param_group({"params": list(model["late"].parameters())})
    step.run(lambda scale: (sum(p.square().sum() for p in model.parameters()) * scale).backward())
    on_grid = {name: bool(is_on_grid(p.detach(), BF16).all()) for name, p in model.named_parameters()}
    assert on_grid == {name: not name.startswith("head") for name in on_grid}
    seen = audit(model["policy"], step)
    assert (seen.idle, len(seen.foreign)) == ((), 2)  # the late ones; the head was given by name


def exact_step(gradient: Tensor, bound: float) -> Tensor:
    """What SGD at rate 1 makes of zeros with a gradient that torch's formula clips to ``bound``, in float64."""
    exact = gradient.double()
    return -exact * min(1.0, bound / (float(exact.norm()) + 1e-6))


@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e-12, 1.0, 1e12, 3e19, 1e30, 3e38])
@pytest.mark.parametrize("bound", [1e-30, 0.5])
def test_norm_and_clipping_where_fp32_has_no_squares(size: float, bound: float) -> None:
    model = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(model.weight)
    gradient = torch.tensor([[1.0, -0.5, 0.25], [0.0, 0.125, -1.0]]) * size
    step = OptimizerStep(
        {"w": model.weight}, torch.optim.SGD(model.parameters(), lr=1.0), LossScaler.disabled(), FP32, None, bound
    )

    def backward(scale: float) -> None:
        model.weight.grad = gradient.clone()

    outcome = step.run(backward)
    assert outcome.kind == "stepped"
    assert outcome.grad_norm == pytest.approx(float(gradient.double().norm()), rel=1e-5, abs=0.0)
    last = 2.0**-149  # of a subnormal number
    expected = exact_step(gradient, bound)
    torch.testing.assert_close(model.weight.detach().double(), expected, rtol=3e-6, atol=2 * last)


@pytest.mark.parametrize(("share", "scale"), [(4.0, 1.0), (1.0, 0.25)])
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_a_gradient_that_leaves_fp32_when_it_is_unscaled_is_an_overflow(
    share: float, scale: float, action: str
) -> None:
    model = nn.Linear(2, 1, bias=False)
    scaler = LossScaler(ScalerConfig(initial=scale, floor=scale))
    step = make_step(model, scaler, on_nonfinite=action, max_grad_norm=1.0)
    before, tries = snapshot(step), []

    def backward(scale: float) -> None:
        tries.append(scale)
        model.weight.grad = torch.tensor([[1e38, 2e38]])

    if action == "stop":
        with pytest.raises(MantissaError, match="non-finite gradient"):
            step.run(backward, share=share)
    else:
        assert step.run(backward, share=share).kind == "skipped"
    assert len(tries) == 1  # no scale changes it
    assert all(torch.equal(value, before[name]) for name, value in snapshot(step).items())


def test_a_reported_norm_is_that_before_every_clipping() -> None:
    """Which adaptive clipping, or a hook in its place, comes before the bound; the bound is of what is left."""
    model = nn.Linear(1, 1, bias=False)

    def clip() -> Tensor:
        model.weight.grad.mul_(0.1)
        return torch.ones(())

    seen: list[float] = []
    for bound, expected in ((math.inf, 0.4), (0.3, 0.3), (1.0, 0.4)):
        step = make_step(model, LossScaler(ScalerConfig(initial=256.0)), max_grad_norm=bound, clip=clip)
        step.optimizer.register_step_pre_hook(lambda *_: seen.append(float(model.weight.grad)))
        assert step.run(gradients(model, [4.0])).grad_norm == pytest.approx(4.0)
        assert seen.pop() == pytest.approx(expected, rel=1e-5)


def test_gradients_that_a_hook_puts_in_others_place_are_the_ones_that_are_bounded() -> None:
    model = nn.Linear(1, 1, bias=False)

    def replaced() -> Tensor:
        model.weight.grad = torch.full_like(model.weight, 30.0)
        return torch.zeros(())

    def removed() -> Tensor:
        model.weight.grad = None
        return torch.zeros(())

    seen: list[Tensor | None] = []
    for clip in (replaced, removed):
        step = make_step(model, LossScaler.disabled(), max_grad_norm=2.0, clip=clip)
        step.optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad))
        assert step.run(gradients(model, [4.0])).grad_norm == pytest.approx(4.0)
    assert float(seen[0]) == pytest.approx(2.0, rel=1e-5)
    assert seen[1] is None


@pytest.mark.parametrize("fmt", [FP16, BF16, FP32])
@pytest.mark.parametrize("bound", [1.0, math.inf])
def test_a_step_without_any_gradient_is_refused_in_every_format(fmt: NumberFormat, bound: float) -> None:
    """As by GradScaler, which asserts that something was searched; nothing has moved, the scale and counts neither."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    scaler = LossScaler(ScalerConfig(initial=1024.0)) if fmt is FP16 else LossScaler.disabled()
    step = OptimizerStep(
        dict(model.named_parameters()), adamw(model), scaler, fmt, lambda update: 1e-2, bound, on_nonfinite="skip"
    )
    before, state = snapshot(step), step.state_dict()

    def backward(scale: float) -> Tensor:
        loss = other(torch.ones(1, 2)).sum()
        (loss * scale).backward()
        return loss.detach()

    with pytest.raises(MantissaError, match="no parameter of the optimiser has a gradient"):
        step.run(backward)
    assert step.state_dict() == state
    assert all(torch.equal(value, before[name]) for name, value in snapshot(step).items())
    assert step.run(lambda scale: (model(torch.ones(1, 2)).sum() * 0 * scale).backward()).grad_norm == 0.0


def test_one_parameter_with_a_gradient_is_enough() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    outcome = make_step(model, LossScaler()).run(lambda s: (model(torch.ones(1, 2)).sum() * s).backward())
    assert outcome.kind == "stepped"
