"""What an adopted model's routes compute by on a GPU: Triton's products, sums and attention (``kernels/triton``).

Of torch's own kernels there, a function of each value is one sequence of instructions wherever the value stands, and is
left as it is. A sum over a row is cut by how many rows there are, or by how a row lies in memory: what has one is
computed of ``row_sums``, in fp32, and rounded once, as torch's is. Gradients are those of torch's own function.

Legend: N rows of any leading shape, E features in, F features out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Form = Callable[..., Tensor]


class _Formed(torch.autograd.Function):
    """``form`` of tensors; its gradient is that of ``own``, which is computed again."""

    @staticmethod
    def forward(ctx: Any, form: Form, own: Form, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.own = own
        return form(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        leaves = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needs, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.own(*leaves)
        wanted = [x for x, need in zip(leaves, needs, strict=True) if x is not None and need]
        found = iter(torch.autograd.grad(out, wanted, grads[0]))
        return None, None, *(next(found) if need else None for need in needs)


class _Sums(torch.autograd.Function):
    """The sum of each row, fp32, as a dimension of one."""

    @staticmethod
    def forward(ctx: Any, x_NE: Tensor) -> Tensor:
        from mantissa.kernels.triton.rows import row_sums

        ctx.shape, ctx.dtype = x_NE.shape, x_NE.dtype
        return row_sums(x_NE).unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].to(ctx.dtype).expand(ctx.shape)


def of_rows(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``func`` over the last dimension of ``x``: a reduction or a softmax, with torch's other arguments."""
    form = _FORMS.get(func.__name__)
    if form is None:  # the largest of some: the same in any order
        return func(x, -1, *args, **kwargs)
    dtype = kwargs.get("dtype") or next((a for a in args if isinstance(a, torch.dtype)), x.dtype)
    out = form(x.float()).to(dtype)
    kept = func.__name__ in _WHOLE or kwargs.get("keepdim", bool(args) and args[0] is True)
    return out if kept else out.squeeze(-1)


def _mean(x_NE: Tensor) -> Tensor:
    return _Sums.apply(x_NE) / x_NE.shape[-1]


def _below(x_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Less its row's largest, which is given too: what it is changes no result, so no gradient passes through it."""
    largest = x_NE.detach().amax(-1, keepdim=True)
    return x_NE - largest, largest


def _softmax(x_NE: Tensor) -> Tensor:
    powers = torch.exp(_below(x_NE)[0])
    return powers / _Sums.apply(powers)


def _log_softmax(x_NE: Tensor) -> Tensor:
    below, _ = _below(x_NE)
    return below - torch.log(_Sums.apply(torch.exp(below)))


def _logsumexp(x_NE: Tensor) -> Tensor:
    below, largest = _below(x_NE)
    return largest + torch.log(_Sums.apply(torch.exp(below)))


_FORMS: dict[str, Form] = {
    "sum": _Sums.apply, "mean": _mean, "softmax": _softmax, "log_softmax": _log_softmax, "logsumexp": _logsumexp,
}  # fmt: skip
_WHOLE = ("softmax", "log_softmax")  # whose result is as long as the row
REDUCTIONS = (*_FORMS, "amax", "amin")


def norm(
    func: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    """``layer_norm`` or ``rms_norm`` over the last dimension."""
    centred = func.__name__ == "layer_norm"
    if not centred and isinstance(bias, float):  # rms_norm's fourth argument
        bias, eps = None, bias
    eps = (1e-5 if centred else torch.finfo(input.dtype).eps) if eps is None else eps

    def formed(x_NE: Tensor, weight_E: Tensor | None, bias_E: Tensor | None) -> Tensor:
        x = x_NE.float()
        x = x - _mean(x) if centred else x
        x = x * torch.rsqrt(_mean(x * x) + eps)
        x = x if weight_E is None else x * weight_E.float()
        return (x if bias_E is None else x + bias_E.float()).to(x_NE.dtype)

    def own(x_NE: Tensor, weight_E: Tensor | None, bias_E: Tensor | None) -> Tensor:
        return func(x_NE, normalized_shape, weight_E, *((bias_E,) if centred else ()), eps)

    return _Formed.apply(formed, own, input, weight, bias)


def length(x: Tensor, keepdim: bool = False) -> Tensor:
    """A vector's length, over the last dimension."""

    def formed(x_NE: Tensor) -> Tensor:
        x = x_NE.float()
        out = torch.sqrt(_Sums.apply(x * x)).to(x_NE.dtype)
        return out if keepdim else out.squeeze(-1)

    return _Formed.apply(formed, lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=keepdim), x)


def product(x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x @ weight^T + bias, summed in fp32, rounded once to ``dtype``. Without gradients."""
    from mantissa.kernels.triton.products import matmul

    out_MF = matmul(x_NE.reshape(-1, x_NE.shape[-1]), weight_FE, bias_F, dtype)
    return out_MF if x_NE.dim() == 2 else out_MF.view(*x_NE.shape[:-1], -1)
