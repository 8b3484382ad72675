"""8-bit moments: torchao's optimiser against a naive one in numpy and against fp32, its checkpoints, its refusals.

The library runs its update through torch.compile, which refuses to work under a dispatch mode such as strict promotion.
So these tests run the same Python eagerly (torch's own switch), inside strict promotion, which thus sees every
operation of the library's; one slow test compiles it, outside of the mode, and holds the result against the eager one.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from mantissa.base.errors import MantissaError
from mantissa.precision import FP16
from mantissa.training import (
    Checkpoint,
    LossScaler,
    OptimizerStep,
    ScalerConfig,
    adamw,
    learning_rate,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from mantissa.training.optimizer import described

LR = 1e-2


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library without torch.compile; skips where the library is not installed."""
    pytest.importorskip("torchao.optim", reason="needs torchao")
    monkeypatch.setenv("CXX", sys.executable)  # nothing is compiled, so any program will do
    with torch.compiler.set_stance("force_eager"):
        yield


def layers(seed: int = 0) -> nn.Sequential:
    """Two matrices that become 8-bit (8192 and 4096 values), and three small tensors that do not."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False))


def make(model: nn.Module, moments: str, lr: float = LR, **options) -> OptimizerStep:
    optimizer = adamw(model, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, moments=moments)
    lr_at = options.pop("lr_at", learning_rate(lr, 3))
    return OptimizerStep(dict(model.named_parameters()), optimizer, LossScaler.disabled(), FP16, lr_at, **options)


def draws(model: nn.Module, step: int) -> list[Tensor]:
    """Gradients of one step: a direction that stays, and noise as large; rows of very different magnitude."""
    found = []
    for index, parameter in enumerate(model.parameters()):
        fixed, moving = (torch.Generator().manual_seed(1000 * index + key) for key in (999, step))
        size = torch.logspace(-2, 1, len(parameter)).view(-1, *[1] * (parameter.dim() - 1))
        shape = parameter.shape
        found.append(size * (torch.randn(shape, generator=fixed) + torch.randn(shape, generator=moving)))
    return found


def advance(step: OptimizerStep, model: nn.Module, first: int, last: int) -> None:
    for index in range(first, last):

        def backward(scale: float, index: int = index) -> None:
            for parameter, gradient in zip(model.parameters(), draws(model, index), strict=True):
                parameter.grad = gradient * scale

        assert step.run(backward).kind == "stepped"


def everything(step: OptimizerStep) -> dict[str, Tensor]:
    weights = {f"w/{name}": p.detach().clone() for name, p in step.parameters.items()}
    return weights | {f"o/{k}": v.clone() for k, v in step.optimizer_tensors().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# The naive optimiser


def levels(signed: bool) -> np.ndarray:
    """The map, from the paper's words: decade d of seven has 2^d levels a sign (2^(d+1) unsigned), at midpoints."""
    positive = []
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        positive += list(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)
    negative = [-value for value in positive] if signed else []
    return np.sort(np.array([*positive, *negative, 0.0, 1.0]))


def rounded(value: np.ndarray, signed: bool) -> np.ndarray:
    """What is left of a moment after it was kept in 8 bits, by search of the nearest level in every block."""
    blocks = value.reshape(-1, 256)
    scale = np.maximum(np.abs(blocks).max(1, keepdims=True), 1e-12)
    table = levels(signed)
    above = np.clip(np.searchsorted(table, blocks / scale), 1, 255)
    lower, upper = table[above - 1], table[above]
    nearest = np.where(blocks / scale - lower >= (upper - lower) / 2, upper, lower)
    return (nearest * scale).reshape(value.shape)


def naive(model: nn.Module, steps: int, lr: float = LR, quantize: bool = True) -> list[np.ndarray]:
    """AdamW in float64 with moments rounded after each step where the tensor is whole blocks of 256 and large."""
    weights = [parameter.detach().double().numpy().copy() for parameter in model.parameters()]
    moments = [(np.zeros_like(weight), np.zeros_like(weight)) for weight in weights]
    for t in range(1, steps + 1):
        rate = lr * min(1.0, t / 3)
        for i, gradient in enumerate(draws(model, t - 1)):
            g = gradient.double().numpy()
            m = 0.9 * moments[i][0] + 0.1 * g
            v = 0.99 * moments[i][1] + 0.01 * g**2
            decay = 0.1 if g.ndim == 2 else 0.0
            step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
            weights[i] = weights[i] * (1 - rate * decay) - rate * step
            small = g.size < 4096 or g.size % 256
            moments[i] = (m, v) if small or not quantize else (rounded(m, True), rounded(v, False))
    return weights


@pytest.mark.usefixtures("eager")
def test_it_is_adamw_with_moments_rounded_block_by_block() -> None:
    """Against float64: schedule, weight decay on matrices alone, blocks and map. In fp32 a tie may fall elsewhere."""
    model = layers()
    expected, unrounded = naive(model, 10), naive(model, 10, quantize=False)
    advance(make(model, "8bit"), model, 0, 10)
    for index, (ours, theirs) in enumerate(zip(model.parameters(), expected, strict=True)):
        off = np.abs(ours.detach().double().numpy() - theirs)
        assert np.median(off) < 1e-6  # fp32's own rounding of weights of about 0.1, ten times
        assert (off > 1e-5).mean() < 2e-3, index
        assert off.max() < 0.2 * LR
        if ours.numel() >= 4096:  # the oracle can tell: without the rounding most weights are elsewhere
            assert (np.abs(ours.detach().double().numpy() - unrounded[index]) > 1e-5).mean() > 0.9


@pytest.mark.usefixtures("eager")
def test_moments_take_a_quarter_of_the_bytes() -> None:
    count: dict[str, int] = {}
    for moments in ("fp32", "8bit"):
        model = nn.Linear(512, 512, bias=False)
        step = make(model, moments)
        advance(step, model, 0, 1)
        count[moments] = sum(t.untyped_storage().nbytes() for k, t in step.optimizer_tensors().items() if "exp" in k)
    values = 512 * 512
    assert count["fp32"] == 8 * values
    assert count["8bit"] == 2 * (values + 4 * values // 256 + 1024)  # codes, scales and each tensor's own map
    assert 0.25 < count["8bit"] / count["fp32"] < 0.256


@pytest.mark.usefixtures("eager")
def test_which_tensors_are_8_bit_is_said_as_the_library_does_it() -> None:
    sizes = [4095, 4096, 4097, 4224, 4352, 256, 2560, 65536]
    model = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])
    step = make(model, "8bit")
    told = described(step.optimizer)
    advance(step, model, 0, 1)
    tensors = step.optimizer_tensors()
    library = [size for i, size in enumerate(sizes) if f"{i}/exp_avg.codes" in tensors]
    assert library == [4096, 4352, 65536]
    assert told == (
        f"{sum(library):,} of {sum(sizes):,} values (3 of 8 tensors), in blocks of 256; the others, below 4,096 values "
        "or not whole blocks, stay fp32"
    )
    assert described(make(model, "fp32").optimizer) is None
    assert described(make(nn.Linear(64, 64, bias=False), "8bit").optimizer) == (
        "4,096 of 4,096 values (1 of 1 tensors), in blocks of 256"
    )


def test_fp32_is_the_default_and_the_bits_of_torchs_fused_adamw() -> None:
    ours, theirs = layers(), layers()
    step = make(ours, "fp32")
    default = adamw(layers(), betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    assert type(step.optimizer) is type(default) is torch.optim.AdamW
    assert default.defaults == step.optimizer.defaults
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), eps=1e-8, fused=True)
    for index in range(5):
        advance(step, ours, index, index + 1)
        for group in reference.param_groups:
            group["lr"] = LR * min(1.0, (index + 1) / 3)
        for parameter, gradient in zip(theirs.parameters(), draws(theirs, index), strict=True):
            parameter.grad = gradient
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


# The rate, and steps that are given up


@pytest.mark.usefixtures("eager")
def test_each_group_steps_at_its_own_scale_of_the_schedules_rate() -> None:
    """A group that joins later, as FlowRL's head does: the first step of Adam is the rate times the gradient's sign."""
    model, head = nn.Linear(128, 64, bias=False), nn.Linear(64, 64, bias=False)
    optimizer = adamw(model, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, moments="8bit")
    optimizer.add_param_group({"params": list(head.parameters()), "weight_decay": 0.0, "lr_scale": 5.0})
    rates = [group["lr"] for group in optimizer.param_groups]
    both = nn.ModuleDict({"model": model, "head": head})
    step = OptimizerStep(
        dict(both.named_parameters()), optimizer, LossScaler.disabled(), FP16, learning_rate(1e-3, 4), 1.0
    )
    before = [parameter.detach().clone() for parameter in both.parameters()]

    def backward(scale: float) -> None:
        for parameter in both.parameters():
            parameter.grad = torch.ones_like(parameter)

    assert step.run(backward).lr == pytest.approx(1e-3 / 4)
    for then, now, rate in zip(before, both.parameters(), (1e-3 / 4, 5e-3 / 4), strict=True):
        torch.testing.assert_close(then - now.detach(), torch.full_like(then, rate), rtol=1e-3, atol=0)
    step.run(backward)
    kept = [group["lr"] for group in optimizer.param_groups]
    assert all(rate is same for rate, same in zip(rates, kept, strict=True))  # compiled code reads this very tensor
    assert [float(rate) for rate in kept] == pytest.approx(
        [2e-3 / 4, 2e-3 / 4, 1e-2 / 4]
    )  # matrices, no vectors, the head


@pytest.mark.usefixtures("eager")
def test_a_skipped_step_leaves_the_codes_as_they_were() -> None:
    model = layers()
    step = make(model, "8bit")
    step.scaler = LossScaler(ScalerConfig(retries=1))
    advance(step, model, 0, 2)
    before = everything(step)

    def overflow(scale: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.inf)

    assert step.run(overflow).kind == "skipped"
    assert same(before, everything(step))


# Checkpoints


@pytest.mark.usefixtures("eager")
def test_two_steps_a_checkpoint_and_two_steps_are_four_steps(tmp_path: Path) -> None:
    calm = layers()
    whole = make(calm, "8bit")
    advance(whole, calm, 0, 4)
    first = layers()
    step = make(first, "8bit")
    advance(step, first, 0, 2)
    weights = {name: parameter.detach() for name, parameter in first.named_parameters()}
    saved = step.optimizer_tensors()
    assert {type(tensor) for tensor in saved.values()} == {Tensor}  # nothing of the library's in the file
    assert saved["0.weight/exp_avg.codes"].unique().numel() > 100
    save_checkpoint(tmp_path, Checkpoint(2, weights, saved, step.state_dict()), keep=1)
    checkpoint, second = load_checkpoint(tmp_path), layers(seed=5)
    resumed = make(second, "8bit")
    advance(resumed, second, 7, 8)  # a state of its own, which must go
    load_weights({name: parameter.detach() for name, parameter in second.named_parameters()}, checkpoint.policy)
    resumed.load_state_dict(checkpoint.state)
    resumed.load_optimizer_tensors(checkpoint.optimizer)
    assert same(everything(step), everything(resumed))
    advance(resumed, second, 2, 4)
    assert same(everything(whole), everything(resumed))
    advance(step, first, 2, 4)  # what was loaded is a copy: steps of one do not move the other
    assert same(everything(step), everything(resumed))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("theirs", "ours"), [("fp32", "8bit"), ("8bit", "fp32")])
def test_moments_of_another_precision_are_an_error(theirs: str, ours: str) -> None:
    written, model = layers(), layers()
    writer, reader = make(written, theirs), make(model, ours)
    advance(writer, written, 0, 2)
    advance(reader, model, 0, 1)
    before = everything(reader)
    with pytest.raises(
        MantissaError,
        match=rf"^checkpoint's moments of 0\.weight are {theirs}, this run's are {ours}; set "
        rf"optimizer\.moments={theirs}, or start a new run with model\.path set to that run's folder$",
    ):
        reader.load_optimizer_tensors(writer.optimizer_tensors())
    assert same(before, everything(reader))


# Refusals


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(MantissaError, match=r"which is not installed; pip install 'mantissa-rl\[lowbit\]', or"):
        make(layers(), "8bit")
    make(layers(), "fp32")


@pytest.mark.usefixtures("eager")
def test_without_a_compiler_it_is_known_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MantissaError, match=r"on cpu takes a C\+\+ compiler, and no-such-compiler is not there; inst"):
        make(layers(), "8bit")


@pytest.mark.usefixtures("eager")
def test_where_no_tensor_would_be_8_bit_it_is_refused() -> None:
    with pytest.raises(MantissaError, match=r"does nothing here: of the 2 tensors that train, none has 4096 values or"):
        make(nn.Linear(63, 64), "8bit")


# The compiled update


@contextlib.contextmanager
def outside_strict_promotion() -> Iterator[None]:
    """torch.compile refuses to run under a dispatch mode, and torch warns while its compiler is imported."""
    with _disable_current_modes(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_it_does_what_it_does_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused multiply-add may move a last bit, and with it a tie between two codes."""
    pytest.importorskip("torchao.optim", reason="needs torchao")
    monkeypatch.delenv("CXX", raising=False)
    compiled, interpreted = layers(), layers()
    with outside_strict_promotion():
        one = make(compiled, "8bit")
        advance(one, compiled, 0, 5)
    with torch.compiler.set_stance("force_eager"):
        other = make(interpreted, "8bit")
        advance(other, interpreted, 0, 5)
    for ours, theirs in zip(compiled.parameters(), interpreted.parameters(), strict=True):
        off = (ours - theirs).detach().abs()
        assert float(off.median()) < 1e-7
        assert float(off.max()) < 0.2 * LR
    ours, theirs = (step.optimizer_tensors()["0.weight/exp_avg.codes"].int() for step in (one, other))
    assert int((ours - theirs).abs().max()) <= 1
    assert float((ours != theirs).float().mean()) < 1e-3
