"""``Autocast``: modules of other people's making, in each format, forward and backward, and what may surround them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mantissa.kernels import Autocast
from mantissa.kernels.autocast import Backend
from mantissa.kernels.rounded import rounding
from mantissa.precision import BF16, FP16, FP32, NumberFormat, is_on_grid, round_by_arithmetic

both = pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
every = pytest.mark.parametrize("fmt", [FP32, FP16, BF16], ids=str)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def simulated(fmt: NumberFormat, device: str = "cpu") -> Autocast:
    return Autocast(fmt, "simulated", device)


def step(autocast: Autocast, model: nn.Module, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, loss and gradients of one forward and backward pass."""
    model.zero_grad()
    with autocast.forward():
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        loss = (out.float() ** 2).mean()
    with autocast.backward():
        (loss * scale).backward()
    return out.detach(), loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8),
            nn.ConvTranspose2d(8, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 8),
        )  # fmt: skip


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.1), nn.SiLU(), nn.Linear(64, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(16, 32)),
    "convolutions and norms": (Convolutional, lambda: torch.randn(6, 3, 14, 14)),
    "gru": (lambda: nn.GRU(8, 16, 2, batch_first=True), lambda: torch.randn(4, 7, 8)),
    "lstm": (lambda: nn.LSTM(8, 16, bidirectional=True), lambda: torch.randn(7, 4, 8)),
    "rnn": (lambda: nn.RNN(8, 16), lambda: torch.randn(7, 4, 8)),
    "lstm cell": (lambda: nn.LSTMCell(8, 16), lambda: torch.randn(4, 8)),
    "transformer": (Transformer, lambda: torch.randint(0, 11, (4, 9))),
    "layer norm between": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.PReLU(), nn.Linear(16, 4)),
        lambda: torch.randn(9, 8),
    ),
}


# Each model in one of the two formats, by turns.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "fmt"), list(zip(MODELS, [FP16, BF16] * 4, strict=True)), ids=str)
def test_models_run_in_the_format_and_differ_from_fp32_by_its_rounding(
    name: str, fmt: NumberFormat, device: str
) -> None:
    """Half results, gradients in fp32 that are on the format's grid, and an error of the order of its epsilon. In
    strict promotion, so that no operation mixes types in silence."""
    make, data = MODELS[name]
    model, x = make().to(device), data().to(device)
    for module in model.modules():  # on a GPU attention in a half draws its dropout by another kernel than fp32's
        if device == "cuda" and isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    torch.manual_seed(1)
    want, _, exact = step(simulated(FP32, device), model, x)
    torch.manual_seed(1)
    out, loss, gradients = step(simulated(fmt, device), model, x)
    assert out.dtype == fmt.dtype
    assert loss.dtype == torch.float32
    assert want.dtype == torch.float32
    assert 0.02 * fmt.epsilon < _relative(out, want) < 4 * fmt.epsilon
    difference = _relative(torch.cat([g.flatten() for g in gradients]), torch.cat([g.flatten() for g in exact]))
    assert 0.02 * fmt.epsilon < difference < 16 * fmt.epsilon
    for parameter, grad in zip(model.parameters(), gradients, strict=True):
        assert parameter.dtype == grad.dtype == torch.float32
    if name in ("mlp", "gru", "lstm", "rnn", "lstm cell"):  # norms have their gradients in fp32, as on CUDA
        assert all(bool(is_on_grid(g, fmt).all()) for g in gradients)


def _relative(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


@both
def test_lstm_rounds_each_operation_of_each_step(fmt: NumberFormat) -> None:
    """Against a plain loop in float64 that rounds where a half tensor is made; few values may fall across a tie."""

    def r(x: Tensor) -> Tensor:
        return round_by_arithmetic(x, fmt)

    lstm, x = nn.LSTM(8, 16), torch.randn(6, 4, 8)
    with simulated(fmt).forward(), torch.no_grad():
        out, (_, cell) = lstm(x)
    w_x, w_h, b_x, b_h = (r(p.detach().double()) for p in lstm.parameters())
    h = c = torch.zeros(4, 16, dtype=torch.float64)
    want = []
    for x_t in r(x.double()):
        gates = r(r(h @ w_h.t() + b_h) + r(x_t @ w_x.t() + b_x))
        i, f, g, o = gates.chunk(4, -1)
        c = r(r(r(f.sigmoid()) * c) + r(r(i.sigmoid()) * r(g.tanh())))
        h = r(r(o.sigmoid()) * r(c.tanh()))
        want.append(h)
    expected = torch.stack(want)
    assert (out.double() != expected).double().mean() < 0.02
    assert torch.allclose(out.double(), expected, rtol=0, atol=2 * fmt.epsilon)
    assert (cell[0].double() != c).double().mean() < 0.02


@both
def test_mlp_gradients_bit_for_bit(fmt: NumberFormat) -> None:
    """Small whole numbers: every sum is exact, so only the roundings can show, at the places where half tensors are."""
    model = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4, bias=False))
    for p in model.parameters():
        p.data = torch.randint(-9, 10, p.shape).float()
    x, seed = torch.randint(-30, 31, (8, 16)).float(), torch.randint(-50, 51, (8, 4)).float()
    with simulated(fmt).forward():
        out = model(x)
    with simulated(fmt).backward():
        gradients = torch.autograd.grad(out, list(model.parameters()), seed.to(out.dtype))
    w1, b1, w2, x64, s = (t.detach().double() for t in (*model.parameters(), x, seed))
    h = round_by_arithmetic(x64 @ w1.t() + b1, fmt).relu()
    d_h = round_by_arithmetic(s @ w2, fmt) * (h > 0)
    expected = [d_h.t() @ x64, d_h.sum(0), s.t() @ h]
    assert torch.equal(out.detach().double(), round_by_arithmetic(h @ w2.t(), fmt))
    for got, want in zip(gradients, expected, strict=True):
        assert torch.equal(got.double(), round_by_arithmetic(want, fmt))
    assert not torch.equal(gradients[0].double(), expected[0])


@both
def test_an_autocast_around_the_caller_does_not_leak_in(fmt: NumberFormat) -> None:
    model, x = mlp().eval(), torch.randn(16, 32)
    alone = step(Autocast(FP32, "native", "cpu"), model, x)
    kept = [g.clone() for g in alone[2]]
    with torch.autocast("cpu", fmt.dtype):
        around = step(Autocast(FP32, "native", "cpu"), model, x)
    with simulated(fmt).forward():
        inside = step(Autocast(FP32, "native", "cpu"), model, x)
    for out, loss, gradients in (around, inside):
        assert torch.equal(out, alone[0])
        assert torch.equal(loss, alone[1])
        assert all(torch.equal(a, b) for a, b in zip(gradients, kept, strict=True))


@pytest.mark.parametrize("backend", ["native", "simulated"])
@every
def test_the_backward_pass_has_the_arithmetic_and_no_autocast(fmt: NumberFormat, backend: Backend) -> None:
    """Seen from a hook on the way back, with somebody's autocast around it all."""
    autocast, x, seen = Autocast(fmt, backend, "cpu"), torch.randn(4, 8, requires_grad=True), []

    def look(grad: Tensor) -> None:
        seen.append((grad.dtype, rounding() is not None, torch.is_autocast_enabled("cpu")))

    with torch.autocast("cpu", torch.bfloat16):
        with autocast.forward():
            hidden = F.linear(x, torch.randn(8, 8))
            hidden.register_hook(look)
            loss = hidden.float().sum()
        with autocast.backward():
            loss.backward()
    assert seen == [(fmt.dtype, backend == "simulated" and fmt is not FP32, False)]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.lstm, self.reentrant, self.active = nn.LSTM(16, 16, batch_first=True), reentrant, False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.active else block(x)
        run = self.lstm
        return checkpoint(lambda y: run(y)[0], x, use_reentrant=self.reentrant) if self.active else run(x)[0]


@pytest.mark.parametrize(("fmt", "reentrant"), [(FP16, False), (BF16, True)], ids=str)
def test_checkpointing_recomputes_in_the_format(fmt: NumberFormat, reentrant: bool) -> None:
    """Bit for bit the gradients without checkpointing; recomputed in fp32 or unrounded, they would differ."""
    model, x = Checkpointed(reentrant), torch.randn(2, 5, 16, requires_grad=True)
    results = []
    for active in (False, True):
        model.active, x.grad = active, None
        torch.manual_seed(3)
        out, _, gradients = step(simulated(fmt), model, x)
        results.append([out, *(g.clone() for g in gradients), x.grad])
    for plain, recomputed in zip(*results, strict=True):
        assert plain is not None
        assert torch.equal(plain, recomputed)


@both
def test_attention_has_no_way_around_in_evaluation(fmt: NumberFormat) -> None:
    """The fast path of ``nn.TransformerEncoderLayer`` would give another result; its switch comes back as it was."""
    model, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    with simulated(fmt).forward():
        with_gradients = model(x).detach()
        with torch.no_grad():
            without = model(x)
        weights = nn.MultiheadAttention(16, 2, batch_first=True)(x, x, x, need_weights=True)[1]
        assert torch.backends.mha.get_fastpath_enabled() is False
    assert torch.backends.mha.get_fastpath_enabled() is True
    assert torch.equal(without, with_gradients)
    assert weights is not None
    assert torch.allclose(weights.sum(-1), torch.ones(2, 5), atol=1e-6)  # its softmax is fp32, as on CUDA


@both
def test_contexts_may_be_entered_again_and_inside_each_other(fmt: NumberFormat) -> None:
    model, x, autocast = mlp().eval(), torch.randn(16, 32), simulated(fmt)
    once, _, gradients = step(autocast, model, x)
    gradients = [g.clone() for g in gradients]
    with autocast.forward(), torch.no_grad():
        with autocast.forward():
            inner = model(x)
        assert torch.equal(inner, once)
        assert torch.equal(model(x), once)
    assert rounding() is None
    with autocast.forward():
        again, _, twice = step(autocast, model, x)
    assert torch.equal(again, once)
    assert all(torch.equal(a, b) for a, b in zip(twice, gradients, strict=True))
    with pytest.raises(KeyError, match="left"), autocast.forward():
        raise KeyError("left")
    assert rounding() is None
    assert not torch.is_autocast_enabled("cpu")


@both
def test_code_of_users_that_writes_in_place_or_holds_half_weights(fmt: NumberFormat) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8).to(fmt.dtype)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h += x  # half += fp32
            h = h.relu_()
            h = self.b(h.to(fmt.dtype)).mul_(2).clamp_(-4, 4)
            spectrum = torch.fft.rfft(x).abs().mean()
            counts = (x > 0).sum(-1, keepdim=True)
            return h * spectrum + counts

    model = Odd()
    out, _, gradients = step(simulated(fmt), model, torch.randn(5, 8))
    assert out.dtype == torch.float32 or out.dtype == fmt.dtype
    assert [g.dtype for g in gradients] == [torch.float32, torch.float32, fmt.dtype, fmt.dtype]
    assert all(bool(g.isfinite().all()) and int(g.count_nonzero()) for g in gradients)


@both
def test_a_parameter_used_twice_is_cast_once_and_its_gradients_meet_in_half(fmt: NumberFormat) -> None:
    cell, x = nn.GRUCell(4, 4), torch.randn(3, 2, 4)
    big = 40000.0
    with simulated(fmt).forward():
        h = torch.zeros(2, 4)
        for x_t in x:
            h = cell(x_t, h)
        weight = torch.ones(1, requires_grad=True)
        product = F.prelu(torch.full((1, 1), -1.0), weight) + F.prelu(torch.full((1, 1), -1.0), weight)
    with simulated(fmt).backward():
        (grad,) = torch.autograd.grad(product, weight, torch.full_like(product, -big))
    assert h.dtype == fmt.dtype
    expected = math.inf if fmt is FP16 else round_by_arithmetic(torch.tensor(2 * big), fmt).item()
    assert grad.item() == expected  # 80000 is no value of fp16


class Product(nn.Module):
    """x @ W, which reaches the dispatcher whole under inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


INFERENCE = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8)), (32, 64), True),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3)), (4, 3, 16, 16), True),
    "product": (Product, (32, 64), True),
    "transformer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (4, 10, 32), True),
    "gru": (lambda: nn.GRU(16, 32, batch_first=True), (4, 10, 16), False),  # comes apart into other products there
}


@pytest.mark.parametrize(("name", "fmt"), list(zip(INFERENCE, [FP16, BF16, FP16, BF16, FP16], strict=True)), ids=str)
def test_inference_mode_rounds_as_no_grad_does(name: str, fmt: NumberFormat) -> None:
    make, shape, exact = INFERENCE[name]
    model, x = make().eval(), torch.randn(shape)
    autocast = Autocast(fmt, "simulated", "cpu")
    with autocast.forward(), torch.no_grad():
        expected = model(x)
    with torch.inference_mode(), autocast.forward():
        got = model(x)
    expected, got = ((y[0] if isinstance(y, tuple) else y).float() for y in (expected, got))
    if exact:
        assert torch.equal(got, expected)
    else:
        assert (got - model(x)[0]).abs().max() > 0  # it did round
        torch.testing.assert_close(got, expected, rtol=0, atol=2 * fmt.epsilon)
