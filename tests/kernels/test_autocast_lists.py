"""CUDA's types on a CPU: the tables against what torch registers for CUDA, and every rule by the dtype it gives."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import Autocast
from mantissa.kernels.autocast import IN_FP32, LOWER, PROMOTED
from mantissa.precision import BF16, FP16, NumberFormat

both = pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
CUDA_LIST = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
REFUSED = ["binary_cross_entropy"]  # on CUDA autocast raises and names the safe loss; a CPU computes it in fp32
TARGET = torch.randint(0, 7, (6,))


def test_tables_hold_every_operator_that_torch_lists_for_cuda() -> None:
    known = {*LOWER, *IN_FP32, *PROMOTED, *REFUSED}
    layers = ("lstm.", "gru.", "rnn_tanh.", "rnn_relu.")  # ours, where an earlier test has simulated on CUDA
    listed = {name.removeprefix("aten::") for name in CUDA_LIST}
    # torch up to 2.12: forms for named tensors, and cuDNN's own layer, which only runs inside those of ``layers``
    listed = {name for name in listed if not re.search("dimname|names_|_cudnn_rnn", name.lower())}
    assert {name for name in listed if not name.startswith(layers)} <= known
    assert len(known) == len(LOWER) + len(IN_FP32) + len(PROMOTED) + len(REFUSED), "an operator is in two tables"


IN_FP32_CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "softmax method": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmin": lambda x: F.softmin(x, -1),
    "cross_entropy": lambda x: F.cross_entropy(x, TARGET),
    "nll_loss": lambda x: F.nll_loss(x, TARGET),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x)),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    "kl_div": lambda x: F.kl_div(x, torch.full_like(x, 0.5), reduction="batchmean"),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.detach().flip(0)),
    "normalize": lambda x: F.normalize(x, dim=-1) if x.dtype == torch.float32 else F.normalize(x, dim=-1).float(),
    "layer_norm": lambda x: F.layer_norm(x, (7,)),
    "group_norm": lambda x: F.group_norm(x.view(6, 7, 1), 7),
    "rms_norm": lambda x: F.rms_norm(x, (7,)),
    "norm": lambda x: x.norm(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "dist": lambda x: torch.dist(x, x.detach().flip(0)),
    "cdist": lambda x: torch.cdist(x, x.detach().flip(0)),
    "pdist": F.pdist,
    "sum of rows": lambda x: x.sum(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    **{
        name: getattr(torch, name)
        for name in str.split("exp expm1 log log10 log1p log2 reciprocal rsqrt sinh cosh tan acos asin erfinv sum prod")
    },
    "pow": lambda x: x**3,
    "pow of number": lambda x: 2**x,
    "softplus": F.softplus,
    "upsample": lambda x: F.interpolate(x.view(1, 1, 6, 7), scale_factor=2, mode="bilinear"),
}


@both
@pytest.mark.parametrize("name", IN_FP32_CASES)
def test_what_cuda_computes_in_fp32_is_fp32_here(name: str, fmt: NumberFormat) -> None:
    """Dtype, value and gradient: those of the fp32 operation on the widened operand, the gradient rounded once."""
    if name == "rms_norm" and "aten::rms_norm" not in CUDA_LIST:
        pytest.skip("this torch computes rms_norm in the type it is given, on CUDA too")
    function = IN_FP32_CASES[name]
    x = (torch.rand(6, 7) * 0.8 + 0.1).to(fmt.dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    want = function(wide)
    seed = torch.randn(want.shape)
    autocast = Autocast(fmt, "simulated", "cpu")
    with autocast.forward():
        got = function(x)
    with autocast.backward():
        (grad,) = torch.autograd.grad(got, x, seed)
    (want_grad,) = torch.autograd.grad(want, wide, seed)
    assert got.dtype == torch.float32
    if name == "normalize":  # a division of half by an fp32 norm, in Python code
        assert torch.allclose(grad.float(), want_grad, rtol=4 * fmt.epsilon, atol=4 * fmt.epsilon)
        return
    assert torch.equal(got, want)
    assert torch.equal(grad, want_grad.to(fmt.dtype))


LOWER_CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x.t(),
    "addmm": lambda x: torch.addmm(torch.zeros(8, 8), x, x.t()),
    "mv": lambda x: torch.mv(x, torch.ones(8)),
    "addmv": lambda x: torch.addmv(torch.ones(8), x, torch.ones(8)),
    "addr": lambda x: torch.addr(x, torch.ones(8), torch.ones(8)),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "chain_matmul": lambda x: torch.linalg.multi_dot([x, x, x]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "conv1d": lambda x: F.conv1d(x[None], x[:, :, None]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[None, None], x[None, None]),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.25)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "lstm_cell": lambda x: torch.nn.LSTMCell(8, 8)(x)[1],
    "gru_cell": lambda x: torch.nn.GRUCell(8, 8)(x),
    "lstm": lambda x: torch.nn.LSTM(8, 8)(x)[1][1],
    "gru": lambda x: torch.nn.GRU(8, 8)(x)[1],
    "rnn": lambda x: torch.nn.RNN(8, 8)(x)[1],
}


@both
@pytest.mark.parametrize("name", LOWER_CASES)
def test_what_cuda_computes_in_half_is_half_here(name: str, fmt: NumberFormat) -> None:
    x = torch.randn(8, 8)
    with Autocast(fmt, "simulated", "cpu").forward():
        assert LOWER_CASES[name](x).dtype == fmt.dtype
        assert LOWER_CASES[name](x.to(fmt.dtype)).dtype == fmt.dtype


@both
def test_other_operations_keep_the_type_they_are_given(fmt: NumberFormat) -> None:
    half, full = torch.rand(6, 7).to(fmt.dtype), torch.rand(6, 7)
    with Autocast(fmt, "simulated", "cpu").forward():
        for function in (F.gelu, F.silu, torch.relu, torch.tanh, torch.sigmoid, torch.mean, F.dropout, torch.sqrt):
            assert function(half).dtype == fmt.dtype
            assert function(full).dtype == torch.float32
        assert F.embedding(TARGET, torch.rand(7, 4)).dtype == torch.float32
        assert (half + full).dtype == torch.float32
        assert torch.dot(half[0], full[0]).dtype == torch.float32
        assert torch.dot(half[0], half[0]).dtype == fmt.dtype
        assert half.sum(dtype=torch.float64).dtype == torch.float64
        assert half.sum(dtype=fmt.dtype).dtype == fmt.dtype
        assert torch.equal(F.softmax(full.double(), -1), torch.softmax(full.double(), -1))
        assert torch.equal(torch.arange(4).sum(), torch.tensor(6))
        assert torch.exp(full.to(torch.complex64)).dtype == torch.complex64


def test_native_autocast_on_a_cpu_is_not_changed_by_the_registrations() -> None:
    """The same results before and after, in a process of its own, because the registrations stay."""
    program = (
        "import runpy, sys, torch; torch.set_num_threads(1)\n"
        "results = runpy.run_path(sys.argv[1])['native_results']\n"
        "before = results()\n"
        "from mantissa.kernels.autocast import follow_cuda; follow_cuda('cpu')\n"
        "for a, b in zip(before, results(), strict=True): assert a.dtype == b.dtype and torch.equal(a, b)\n"
        "print(len(before), [str(a.dtype) for a in before].count('torch.bfloat16'))"
    )
    done = subprocess.run([sys.executable, "-c", program, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12", "10"], "half results, as a CPU's autocast makes them, with softmax among them"


def native_results() -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 8, requires_grad=True)
    lstm = torch.nn.LSTM(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        half = F.linear(x, torch.eye(8))
        results = [half, F.softmax(half, -1), half.exp(), half**2, half.sum(), F.layer_norm(half, (8,))]
        try:
            results.append(lstm(x)[0])
        except RuntimeError as error:  # oneDNN has no LSTM in bf16 without AVX-512: refused before and after alike
            if "LSTM forward propagation primitive" not in str(error):
                raise
            results.append(torch.zeros_like(half))
        results += [F.dropout(half, 0.5), F.cross_entropy(half[0], torch.ones(8).long())]
        results += [F.scaled_dot_product_attention(x, x, x)]
        results += [F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3)]
    total = torch.stack([r.float().sum() for r in results]).sum()
    return [*(r.detach() for r in results), torch.autograd.grad(total, x)[0]]
