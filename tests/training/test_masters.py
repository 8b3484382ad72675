"""Weights of bf16 without fp32 masters: roundings against arithmetic and float64, draws, checkpoints, refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.base.seeds import GOLDEN
from mantissa.dropin import PrecisionTrainer
from mantissa.precision import BF16, DIAL, FP16, FP32, is_on_grid, round_by_arithmetic, round_stochastically
from mantissa.training import LossScaler, OptimizerStep, adamw, check_masters, learning_rate, master_weights
from mantissa.training.optimizer import random_bits

KINDS = ("bf16_stochastic", "bf16_kahan")
CPU = torch.device("cpu")


# The roundings


def test_the_mean_over_all_random_numbers_is_the_number_itself() -> None:
    """Not within an error: the 65536 results add up to 65536 x, in float64, where that sum is exact."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.linspace(-130, 100, 40)) * torch.randn(40, generator=generator)  # subnormals among them
    chosen = torch.tensor([2 - 2.0**-23, -(1 + 2.0**-20), 2.0**-149, -(2.0**-126) + 2.0**-149, 255.75])
    every = torch.arange(1 << 16, dtype=torch.int32)
    for x in torch.cat([size, chosen]):
        found = round_stochastically(x.expand(1 << 16).contiguous(), every)
        assert bool(is_on_grid(found, BF16).all())
        assert len(found.unique()) <= 2
        assert float((found.double() * 2.0**100).sum()) == float(x.double() * 2.0**116)


def test_values_of_bf16_and_what_is_not_finite_stay() -> None:
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)  # all that there are
    for random in (0, 1, 20000, 65535):
        found = round_stochastically(every, torch.full_like(every, random, dtype=torch.int32))
        assert torch.equal(found.view(torch.int32), every.view(torch.int32))
    top = torch.tensor([torch.finfo(torch.float32).max])
    assert round_stochastically(top, torch.tensor([65535], dtype=torch.int32)).isinf().all()  # as to nearest


def test_the_bits_are_splitmix64_of_an_elements_number() -> None:
    mask = (1 << 64) - 1

    def mixed(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
        return word ^ (word >> 31)

    def oracle(key: int, i: int) -> int:
        return mixed((mixed(key & mask) + (i // 4 + 1) * (GOLDEN & mask)) & mask) >> 16 * (i % 4) & 0xFFFF

    found = random_bits(12345, 0, 1003, CPU)
    assert found.tolist() == [oracle(12345, i) for i in range(1003)]
    for start, count in ((0, 3), (5, 6), (8, 1), (999, 4), (6, 0)):  # a shard draws what the whole does
        assert torch.equal(random_bits(12345, start, count, CPU), found[start : start + count])
    many = random_bits(-7, 0, 1 << 20, CPU).double()
    assert abs(float(many.mean()) - 32767.5) < 4 * 18918 / 1024  # of uniforms: 65536 / sqrt(12) / sqrt(2^20)
    assert abs(float(many.std()) / 18918 - 1) < 2e-3


def by_nearest(w: Tensor, u: Tensor) -> Tensor:
    """What plain bf16 weights keep."""
    return round_by_arithmetic(w + u, BF16)


def test_tiny_updates_are_lost_by_plain_bf16_kept_on_average_by_chance_and_all_by_kahan() -> None:
    """200 updates of 2^-12 to 2^-10 of a weight, none of half a spacing, against their sum in float64."""
    w0 = torch.exp2(torch.randint(-8, 3, (1024,), generator=torch.Generator().manual_seed(1)).float())
    u = w0 * torch.exp2(-12 + 2 * torch.rand(1024, generator=torch.Generator().manual_seed(2)))
    true = w0.double() + 200 * u.double()
    plain, rules = w0.clone(), {}
    for kind in ("bf16_nearest", *KINDS):
        weight = nn.Parameter(w0.clone())
        rules[kind] = master_weights(kind, {"w": weight}, BF16), torch.optim.SGD([weight], lr=1.0), weight
    for update in range(200):
        plain = by_nearest(plain, u)
        for rule, optimizer, weight in rules.values():
            weight.grad = -u
            rule.step(optimizer, update)
    assert torch.equal(plain, w0)
    assert torch.equal(rules["bf16_nearest"][2], plain)
    rule, _, kahan = rules["bf16_kahan"]
    off = (kahan.detach().double() + rule.compensation["w"].double() - true).abs() / true
    assert float(off.max()) < 200 * 2.0**-17  # at most one rounding of c an update
    assert float(((kahan.detach().double() - true).abs() / true).max()) < 2.0**-8 + 200 * 2.0**-17
    by_chance = rules["bf16_stochastic"][2].detach().double()
    relative = (by_chance - true) / true
    assert abs(float(relative.mean())) < 4 * float(relative.std()) / 32
    assert 2.0**-9 < float(relative.std()) < 2.0**-5  # it is a random walk, and the oracle can tell
    assert bool(is_on_grid(by_chance.float(), BF16).all())


def test_one_update_by_chance_is_unbiased() -> None:
    weight = nn.Parameter(torch.ones(1 << 18))
    rule = master_weights("bf16_stochastic", {"w": weight}, BF16, seed=3)
    weight.grad = torch.full_like(weight, -3e-4)
    rule.step(torch.optim.SGD([weight], lr=1.0), 0)
    share = 3e-4 * 128  # of a spacing, which is 2^-7
    moved = float((weight.detach() - 1).double().mean()) * 128
    assert abs(moved - share) < 4 * (share * (1 - share)) ** 0.5 / 512
    assert weight.detach().unique().tolist() == [1.0, 1.0 + 2.0**-7]


def test_what_kahan_cannot_keep_is_as_small_as_is_said() -> None:
    """At w = 1 c ends at half a spacing, 2^-8, below which its own half spacing is 2^-17."""
    for power, updates, moves in ((-16, 300, True), (-18, 1100, False)):
        weight = nn.Parameter(torch.ones(1))
        rule = master_weights("bf16_kahan", {"w": weight}, BF16)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for update in range(updates):
            weight.grad = torch.full((1,), -(2.0**power))
            rule.step(optimizer, update)
        assert (float(weight.detach()) > 1) == moves


# The step


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 7))


def make(model: nn.Module, masters: str, **options: Any) -> OptimizerStep:
    optimizer = adamw(model, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, **options)
    named = dict(model.named_parameters())
    rule = master_weights(masters, named, BF16, seed=11)
    return OptimizerStep(named, optimizer, LossScaler.disabled(), BF16, learning_rate(1e-3, 3), 1.0, masters=rule)


def advance(step: OptimizerStep, first: int, last: int, bad: Callable[[int], bool] = lambda n: False) -> None:
    for index in range(first, last):

        def backward(scale: float, index: int = index) -> None:
            generator = torch.Generator().manual_seed(index)
            for parameter in step.parameters.values():
                grad = torch.randn(parameter.shape, generator=generator)
                parameter.grad = torch.full_like(grad, torch.inf) if bad(index) else grad

        step.on_nonfinite = "skip"
        step.run(backward)


def everything(step: OptimizerStep) -> dict[str, Tensor]:
    weights = {f"w/{name}": p.detach().clone() for name, p in step.parameters.items()}
    return weights | {f"o/{k}": v.clone() for k, v in step.optimizer_tensors().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_an_update_is_the_formula_on_what_the_optimiser_does_in_fp32() -> None:
    """Bit for bit: torch's optimiser on an fp32 copy of the weights, then Kahan's three lines by the reference."""
    model, copy = layers(), layers()
    step = make(model, "bf16_kahan")
    copy.load_state_dict(model.state_dict())  # rounded once
    assert all(bool(is_on_grid(p, BF16).all()) for p in copy.parameters())
    other = make(copy, "fp32")
    c = [torch.zeros_like(p) for p in copy.parameters()]
    for index in range(5):
        before = [p.detach().clone() for p in copy.parameters()]
        advance(step, index, index + 1)
        advance(other, index, index + 1)
        with torch.no_grad():
            for i, (w, p) in enumerate(zip(before, copy.parameters(), strict=True)):
                y = (p - w) + c[i]
                p.copy_(round_by_arithmetic(w + y, BF16))
                c[i] = round_by_arithmetic(y - (p - w), BF16)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))
    kept = step.masters.compensation.values()
    assert all(torch.equal(a.float(), b) for a, b in zip(kept, c, strict=True))
    assert {tensor.dtype for tensor in kept} == {torch.bfloat16}
    assert any(bool(tensor.any()) for tensor in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_not_contiguous_and_one_of_several_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for part, layout in ((1 << 16, torch.contiguous_format), (16, torch.channels_last)):
        monkeypatch.setattr("mantissa.training.optimizer._PART", part)
        weight = nn.Parameter(layers()[0].weight.detach().clone(memory_format=layout))
        rule = master_weights(kind, {"w": weight}, BF16)
        for update in range(3):
            grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(update)) * 1e-4
            weight.grad = torch.empty_like(weight).copy_(grad)
            rule.step(torch.optim.SGD([weight], lr=1.0), update)
        found.append((weight, *rule.compensation.values()))
    assert found[0][0].is_contiguous() != found[1][0].is_contiguous()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_given_up_moves_nothing_and_takes_no_draw(kind: str) -> None:
    calm, other = make(layers(), kind), make(layers(), kind)
    advance(calm, 0, 2)
    advance(calm, 3, 4)
    advance(other, 0, 4, bad=lambda n: n == 2)
    assert other.skipped == 1
    assert same(everything(calm), everything(other))


def test_draws_are_of_seed_update_and_parameter() -> None:
    def moved(seed: int, update: int) -> list[list[float]]:
        named = {name: nn.Parameter(torch.ones(64)) for name in ("a", "b")}
        rule = master_weights("bf16_stochastic", named, BF16, seed)
        for parameter in named.values():
            parameter.grad = torch.full((64,), -(2.0**-8))
        rule.step(torch.optim.SGD(named.values(), lr=1.0), update)
        return [parameter.detach().tolist() for parameter in named.values()]

    found = [tensor for seed in (0, 1) for update in (0, 1) for tensor in moved(seed, update)]
    assert len({tuple(tensor) for tensor in found}) == 8
    assert moved(1, 1) == moved(1, 1)


def test_with_moments_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao.optim", reason="needs torchao")
    monkeypatch.setenv("CXX", sys.executable)  # nothing is compiled, so any program will do
    with torch.compiler.set_stance("force_eager"):
        whole, first, second = (make(nn.Linear(64, 64), "bf16_kahan", moments="8bit") for _ in range(3))
        for step in (first, second):
            for (_, here), (_, there) in zip(step.parameters.items(), whole.parameters.items(), strict=True):
                here.data.copy_(there.data)
        advance(whole, 0, 4)
        advance(first, 0, 2)
        go_on(first, second)
        advance(second, 2, 4)
    assert same(everything(whole), everything(second))


# Checkpoints


def go_on(first: OptimizerStep, second: OptimizerStep) -> None:
    for name, parameter in second.parameters.items():
        parameter.data.copy_(first.parameters[name].data)
    second.load_optimizer_tensors({name: value.clone() for name, value in first.optimizer_tensors().items()})
    second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 2])
def test_steps_a_checkpoint_and_steps_are_all_of_them(kind: str, at: int) -> None:
    whole, first, second = make(layers(), kind), make(layers(), kind), make(layers(5), kind)
    advance(whole, 0, 4)
    advance(first, 0, at)
    advance(second, 7, 8)  # a state of its own, which must go
    go_on(first, second)
    assert same(everything(first), everything(second))
    advance(second, at, 4)
    assert same(everything(whole), everything(second))


@pytest.mark.parametrize("theirs", ["fp32", *KINDS])
@pytest.mark.parametrize("ours", ["fp32", *KINDS])
def test_masters_of_another_kind_are_an_error(theirs: str, ours: str) -> None:
    writer, reader = make(layers(), theirs), make(layers(), ours)
    advance(writer, 0, 1)
    if theirs == ours:
        assert ("masters" in writer.state_dict()) == (theirs != "fp32")  # as checkpoints have always been
        go_on(writer, reader)
        return
    before = everything(reader)
    with pytest.raises(MantissaError, match=rf"checkpoint is of masters=.*{theirs}.*, this run has masters={ours}; se"):
        go_on(writer, reader)
    if "bf16_kahan" in (theirs, ours):
        assert {k: v for k, v in everything(reader).items() if k[0] == "o"}.keys() == {k for k in before if k[0] == "o"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t | {"0.weight/compensation": t["0.weight/compensation"].float()}, "is float32, expected bfloat16"),
        (lambda t: t | {"0.bias/compensation": t["0.weight/compensation"]}, "has shape"),
        (lambda t: t | {"0.bias/compensation": t["0.bias/compensation"] * torch.inf}, "not finite"),
        (lambda t: {k: v for k, v in t.items() if k != "0.bias/compensation"}, "0.bias is in one of them alone"),
    ],
)
def test_a_damaged_compensation_is_one_clear_error(damage: Callable[[Any], Any], said: str) -> None:
    step = make(layers(), "bf16_kahan")
    advance(step, 0, 2)
    before = everything(step)
    with pytest.raises(MantissaError, match=said):
        step.load_optimizer_tensors(damage(step.optimizer_tensors()))
    assert same(before, everything(step))


# The drop-in


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def trainer(masters: str, precision: str = "bf16", **options: Any) -> PrecisionTrainer:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return PrecisionTrainer(model, optimizer, precision, masters=masters, say=lambda line: None, **options)


def batches(first: int, last: int) -> list[Tensor]:
    return [torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(n)) for n in range(first, last)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_accumulates_saves_and_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole, first, second = (trainer(kind, accumulate=2) for _ in range(3))
    for batch in batches(0, 8):
        whole.step(batch, loss_fn)
    for batch in batches(0, 4):
        first.step(batch, loss_fn)
    first.save_checkpoint(tmp_path / "x.pt")
    for batch in batches(20, 24):  # what it learns here must go
        second.step(batch, loss_fn)
    second.load_checkpoint(tmp_path / "x.pt")
    for batch in batches(4, 8):
        second.step(batch, loss_fn)
    assert same(everything(whole.optimizer_step), everything(second.optimizer_step))
    weights = list(whole.model.parameters())
    assert all(bool(is_on_grid(weight, BF16).all()) for weight in weights)
    other = trainer("fp32")
    with pytest.raises(MantissaError, match=f"checkpoint is of masters=.*{kind}.*, this run has masters=fp32"):
        other.load_checkpoint(tmp_path / "x.pt")
    assert all(torch.equal(a, b) for a, b in zip(other.model.parameters(), layers().parameters(), strict=True))


def test_a_file_from_before_there_was_a_choice_is_of_fp32(tmp_path: Path) -> None:
    other = trainer("fp32")
    other.save_checkpoint(tmp_path / "x.pt")
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    del content["masters"]
    torch.save(content, tmp_path / "old.pt")
    other.load_checkpoint(tmp_path / "old.pt")
    with pytest.raises(MantissaError, match="checkpoint is of masters=fp32, this run has masters=bf16_stochastic"):
        trainer("bf16_stochastic").load_checkpoint(tmp_path / "old.pt")


def test_what_the_learner_would_not_see_is_refused_before_anything_is_rounded() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(MantissaError, match=r"masters=bf16_kahan with a fp16 learner: .*; set precision\.train=bf16"):
        PrecisionTrainer(model, optimizer, "fp16", masters="bf16_kahan", say=lambda line: None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), layers().parameters(), strict=True))
    going = trainer("bf16_stochastic")
    with pytest.raises(MantissaError, match="masters=bf16_stochastic with a fp16 learner"):
        going.use("fp16")
    assert going.precision.active is BF16
    going.use("fp32")
    with pytest.raises(MantissaError, match="masters='bf16': expected fp32, bf16_nearest, bf16_stochastic, bf16_kahan"):
        trainer("bf16")
    for learner in (BF16, FP32, DIAL["e8m8"]):
        check_masters("bf16_kahan", learner)
    for learner in (FP16, DIAL["e8m6"], DIAL["e5m10"]):
        with pytest.raises(MantissaError, match=f"with a {learner} learner"):
            check_masters("bf16_kahan", learner)
    check_masters("fp32", FP16, lora=True)
