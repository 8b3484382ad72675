"""A number format for any torch module: its forward and loss, and the backward pass of what they computed.

``Kernels`` give our own model its operations one by one. A module written by someone else calls torch, so precision has
to come from around it. Parameters stay fp32 masters; ``Autocast`` has two contexts:

    with autocast.forward():
        loss = loss_fn(model, batch)
    with autocast.backward():
        loss.backward()

native: ``torch.amp.autocast`` of the device type in the forward pass. The backward pass runs in the types that the
forward pass chose, so nothing is needed there.

simulated: the same, on any device, with CUDA's choice of types and with a tensor core's arithmetic
(``rounded``), in both passes. Tensors are half tensors, so overflow beyond 65504 and the flush below 2^-25 are
torch's own casts, in activations and in gradients.

fp32: autocast switched off, so that one around the caller does not leak in.

What is not in a product keeps CUDA's autocast types: softmax, norms and losses fp32, embeddings fp32, element-wise
operations in the type they are given. Weights are cast once for each forward pass and their gradients arrive in fp32,
rounded to the format.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels.probe import first_row, product_checks, proved
from mantissa.kernels.roles import ResolvedRole
from mantissa.kernels.rounded import HALF, RoundedOps, floating, rounded_attention, rounding
from mantissa.precision import FP32, NumberFormat
from mantissa.precision.policy import Backend

LOWER = str.split("""
    _convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell
    addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose einsum
    gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell
    scaled_dot_product_attention
""")
IN_FP32 = str.split("""
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
    cosine_similarity cumprod cumsum dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss
    huber_loss kl_div l1_loss layer_norm linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log log10
    log1p log2 log_softmax.int logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    native_layer_norm nll_loss nll_loss2d norm.Scalar norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim pdist
    poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod prod.dim_int reciprocal renorm rms_norm rsqrt
    sinh smooth_l1_loss soft_margin_loss softmax.int softplus sum sum.dim_IntList tan triplet_margin_loss
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
""")
PROMOTED = str.split("addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot")

_KEEPS_GIVEN_DTYPE = ("sum", "prod", "cumsum", "cumprod", "softmax", "log_softmax", "linalg_vector_norm")
_RECURRENT = [f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")]

Choose = Callable[[tuple[Any, ...], dict[str, Any], torch.dtype], torch.dtype | None]


@functools.cache
def follow_cuda(device_type: str) -> torch.library.Library:
    """Register the rules that ``device_type`` lacks, once for the process; the library that holds them.

    Which operation autocast runs in half, in fp32 or in the widest type of its operands is decided per device type,
    and the CPU's lists are shorter than CUDA's: on a CPU ``softmax``, ``layer_norm``, ``exp`` or ``pow`` of a half
    tensor stay half. A simulation that promises what a GPU does must follow the GPU. The tables above hold CUDA's
    rules by operator; ``follow_cuda`` registers, at the dispatcher's autocast key of the CPU, those rules that torch
    has only for CUDA. A registration is for the process; it acts only inside ``RoundedOps`` and otherwise hands the
    operation on as if it were not there, so that native autocast on a CPU stays what it was.

    Being at the dispatcher, above autograd, a rule's cast is differentiable, what the backward pass saves is the cast
    tensor, and operations that C++ code calls (``cross_entropy`` calls ``log_softmax``) are met too: as on CUDA.

    Three operators are replaced rather than cast. ``scaled_dot_product_attention`` is ``rounded_attention``: the CPU's
    kernels either do not round probabilities or round scores. Recurrent layers run step by step on half tensors with
    torch's composite code: the CPU's fused layer would hide its products from the simulation, and so would CUDA's.
    ``dropout`` of half tensors is the fused operator that CUDA uses: the CPU's rounds 1/(1-p) to half before it
    multiplies.

    Left as the CPU's lists have it, fp32 where CUDA has half: pooling and padding in three dimensions, padding by
    reflection, ``grid_sample``, ``fft`` and linear algebra. Only a selection or a sum of few terms depends on it.

    Source: the list in torch's documentation of ``torch.amp``, and the operators torch registers for ``AutocastCUDA``,
    which a test compares with these tables.
    """
    library = torch.library.Library("aten", "IMPL")
    key = f"Autocast{device_type.upper()}"
    for name in _RECURRENT:
        library.impl(
            name,
            _rule(name, key, lambda args, kwargs, half: half, _without_fused_layers(device_type)),
            key,
            with_keyset=True,
        )
    if device_type != "cpu":
        return library  # its autocast has the other rules, and its attention rounds as a tensor core does
    on_cuda, on_cpu = (
        set(torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{d}")) for d in ("CUDA", "CPU")
    )
    choices: tuple[tuple[list[str], Choose], ...] = (
        (LOWER, lambda args, kwargs, half: half), (IN_FP32, lambda *_: torch.float32), (PROMOTED, _to_widest)
    )  # fmt: skip
    for names, choose in choices:
        for name in names:
            if f"aten::{name}" in on_cuda - on_cpu:
                library.impl(name, _rule(name, key, choose), key, with_keyset=True)
    attention = _attention(torch.library.get_kernel("aten::scaled_dot_product_attention", key))
    library.impl("dropout", _dropout, key, with_keyset=True)
    with warnings.catch_warnings():  # torch says that it had a kernel there, which ours calls outside RoundedOps
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        library.impl("scaled_dot_product_attention", attention, key, with_keyset=True, allow_override=True)
    return library


def _to_widest(args: tuple[Any, ...], kwargs: dict[str, Any], half: torch.dtype) -> torch.dtype | None:
    dtypes = {t.dtype for t in floating(args, kwargs)}
    return torch.float32 if torch.float32 in dtypes and dtypes & set(HALF) else None


def _rule(name: str, key: str, choose: Choose, run: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The kernel of ``name`` at the autocast key: cast where ``RoundedOps`` is active, else hand on."""
    op = _overload(name)
    takes_dtype = name.split(".")[0] in _KEEPS_GIVEN_DTYPE

    def kernel(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        mode = rounding()
        if mode is None:
            return op.redispatch(keyset.remove(getattr(torch._C.DispatchKey, key)), *args, **kwargs)
        dtype = choose(args, kwargs, torch.get_autocast_dtype(key.removeprefix("Autocast").lower()))
        if takes_dtype and _given_dtype(args, kwargs):
            dtype = None  # ``sum(x, dtype=...)`` says itself what it computes in
        if dtype is not None:
            args = tuple(_cast(a, dtype, mode) for a in args)
            kwargs = {name: _cast(a, dtype, mode) for name, a in kwargs.items()}
        with _excluded(key):
            return op(*args, **kwargs) if run is None else run(op, args, kwargs)

    return kernel


def _excluded(key: str) -> Any:
    """The context in which what is called inside an operation is not cast again."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)))


def _attention(of_torch: Any) -> Callable[..., Tensor]:
    """The rule for attention: all operands in half, and our arithmetic; what we leave to torch goes to its own rule."""

    def kernel(keyset: torch.DispatchKeySet, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mode, half = rounding(), torch.get_autocast_dtype("cpu")
        named = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)), **kwargs}
        both_masks = named.get("attn_mask") is not None and named.get("is_causal")  # torch says what is wrong with it
        plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.dim() > 1 and t.numel() for t in (q, k, v))
        wide = any(t.dtype == torch.float64 or not t.is_floating_point() for t in (q, k, v))
        if mode is None or both_masks or not plain or wide or q.is_nested:
            return of_torch.call_boxed(keyset, q, k, v, *args, **kwargs)
        q, k, v = (_cast(t, half, mode) for t in (q, k, v))
        with _excluded("AutocastCPU"):
            return rounded_attention(q, k, v, **{name: _cast(a, half, mode) for name, a in named.items()})

    return kernel


def _dropout(keyset: torch.DispatchKeySet, x: Tensor, p: float, train: bool) -> Tensor:
    if train and rounding() is not None and x.dtype in HALF:
        return torch.native_dropout(x, p, train)[0]
    return torch.ops.aten.dropout.default.redispatch(keyset.remove(torch._C.DispatchKey.AutocastCPU), x, p, train)


def _without_fused_layers(device_type: str) -> Callable[..., Any]:
    """Run a recurrent layer with torch's composite code, whose products are dispatched one by one."""
    library = "mkldnn" if device_type == "cpu" else "cudnn"
    enabled = getattr(torch._C, f"_get_{library}_enabled")
    enable = getattr(torch._C, f"_set_{library}_enabled")  # torch.backends.mkldnn.flags would set TF32 too, and warn

    def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = enabled()
        enable(False)
        try:
            return op(*args, **kwargs)
        finally:
            enable(before)

    return run


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _given_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)


def _cast(value: Any, dtype: torch.dtype, mode: RoundedOps) -> Any:
    """Floating-point tensors in ``dtype``, alone or in a list; double precision, integers and complex stay."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dtype not in (dtype, torch.float64):
            return mode.cast(value, dtype)
        return value
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return [_cast(v, dtype, mode) for v in value]
    return value


_HALF_FORMATS = ("fp16", "bf16")


class Autocast:
    """How modules that are not ours compute in ``format`` on ``device_type``; ``backend`` as in ``ResolvedRole``.

    Both contexts may be entered any number of times, inside each other too, and under ``torch.no_grad``. With
    activation checkpointing the recomputation happens inside ``backward()``, in the format. Thread-local, but for two
    switches of torch that are global: the fast path of ``nn.MultiheadAttention`` is off within a simulated
    ``forward()``, the fused recurrent layers while a recurrent layer runs.

    Raises ``MantissaError`` for a format that has no autocast (fp8) and a device type that torch cannot autocast.
    """

    def __init__(self, fmt: NumberFormat, backend: Backend, device_type: str) -> None:
        if fmt != FP32 and fmt.name not in _HALF_FORMATS:
            raise MantissaError(f"precision={fmt}: modules run in fp32, {' or '.join(_HALF_FORMATS)}, not in fp8")
        if not torch.amp.autocast_mode.is_autocast_available(device_type):
            raise MantissaError(f"device={device_type}: torch has no autocast for it; choose cpu or cuda")
        self.format = fmt
        self.backend = backend
        self.device_type = device_type

    def __repr__(self) -> str:
        return f"Autocast({self.format}, {self.backend}, {self.device_type})"

    @property
    def _simulates(self) -> bool:
        return self.backend == "simulated" and self.format != FP32

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The context of the model's forward pass and of its loss."""
        with ExitStack() as stack:
            if self._simulates:
                follow_cuda(self.device_type)
                stack.enter_context(_no_attention_fast_path())
                _enter_rounding(stack, keep_casts=True)
            dtype, enabled = (None, False) if self.format == FP32 else (self.format.dtype, True)
            stack.enter_context(torch.autocast(self.device_type, dtype=dtype, enabled=enabled))
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The context of the backward pass of what ``forward()`` computed. An autocast around it does not leak in."""
        with ExitStack() as stack:
            if self._simulates:
                _enter_rounding(stack, keep_casts=False)
            stack.enter_context(torch.autocast(self.device_type, enabled=False))
            yield


def autocast_for(role: ResolvedRole, device: torch.device | str) -> Autocast:
    """The ``Autocast`` of a role's active format and backend on ``device``."""
    return Autocast(role.active, role.backend, torch.device(device).type)


def _enter_rounding(stack: ExitStack, keep_casts: bool) -> None:
    if rounding() is None:  # once is enough: a second mode would only look at what the first has done
        stack.enter_context(RoundedOps(keep_casts))


@contextmanager
def _no_attention_fast_path() -> Iterator[None]:
    """``nn.MultiheadAttention`` leaves autocast out in its fast path for evaluation, except under CUDA's autocast."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def probe_autocast(autocast: Autocast, device: torch.device | str) -> str:
    """Check rounding, accumulation, overflow and the gradients' rounding of modules; return one line of evidence.

    The products' checks are those of ``product_checks``. An operand of 1 + u/4 becomes 1. The output and a
    convolution's have the format's dtype. For fp32 the first check is what TF32 and an autocast left on would fail.
    Raises ``MantissaError`` naming the check that failed.
    """
    fmt = autocast.format

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        with autocast.forward():
            return F.linear(x, weight)

    def grad(*args: Any) -> tuple[Tensor, ...]:
        with autocast.backward():
            return torch.autograd.grad(*args)

    checks = product_checks(fmt, linear, device, grad)
    with torch.no_grad():
        operand = linear(first_row([1 + fmt.epsilon / 4], device), first_row([1.0], device))[0, 0].item()
        checks.append(("rounds a master of 1+u/4 to 1" if fmt != FP32 else "keeps 1+u/4", operand, 1.0))
        with autocast.forward():
            image = F.conv2d(torch.ones(1, 8, 8, 8, device=device), torch.ones(8, 8, 3, 3, device=device))
    bits = torch.finfo(fmt.dtype).bits
    checks.append(("holds a convolution in the format", torch.finfo(image.dtype).bits, bits))
    return proved(checks, str(fmt), f"under {autocast} on {device}", ", an autocast around the caller,")
