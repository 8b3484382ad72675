"""Recurrences of an adopted model: one form for a whole sequence and for a step, the one that steps.

Transformers computes a state space or a delta rule in chunks for a whole sequence, and step by step when it decodes:
two orders of the same sums. While the model runs, functions of its file are replaced:

- a gated delta rule's form in chunks (Qwen3.5, Qwen3-Next, OLMo hybrid) by one in steps, here, in fp32, with the sums
  over the key's values, k of length 1 and q too, less the root of their number; Kimi's by its file's own;

      s' = exp(g) s,    s'' = s' + k (v - s' k)^T beta,    y = s'' q

- Mamba's two forms by one step, here, of which a scan is a loop. State and sums are fp32, as in the chunks;

      s' = exp(dt A) s + (dt x) B,    y = sum over N of s' C, + D x,    dt = softplus(dt + bias)

All operations are routed like any other. It takes longer over a whole sequence: one pass of the loop a position. What
is differentiated is the form in chunks, computed once more in the backward pass: no state is kept for each position.

Legend: B sequences, T positions, H heads of P channels (Mamba 1: I channels, each with a decay of its own), G groups
of heads that share B and C, N values of state a channel.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.adopted.route import RUNNING

Replaced = list[tuple[Any, str, Any]]  # module of Python, name, what stands there while the model runs


def replacements(model: nn.Module) -> Replaced:
    """What the files of a model's modules have two forms of."""
    homes = {id(home): home for module in model.modules() if (home := sys.modules.get(type(module).__module__))}
    found: Replaced = []
    for home in homes.values():
        for chunked, stepped in _STEPPED_BESIDE.items():
            if hasattr(home, chunked) and hasattr(home, stepped):
                own = getattr(home, stepped)
                if chunked == _DELTA:
                    own = functools.partial(_delta_rule, own)
                    found.append((home, stepped, own))
                found.append((home, chunked, _differentiated(getattr(home, chunked), own)))
        for name, own in _OWN.items():
            if hasattr(home, name):
                # Mamba 1's scan of transformers takes minutes where it is differentiated: its steps are.
                by = {"mamba2_chunk_scan": getattr(home, name), "mamba_selective_scan": own}.get(name)
                found.append((home, name, own if by is None else _differentiated(by, own)))
        limits = {tuple(limit) for module in model.modules() if (limit := _limit(module, home)) is not None}
        if len(limits) == 1:  # which a file's scan is given, and its step is not (NemotronH of transformers 5.23)
            step = functools.partial(_mamba2_update, dt_limit=limits.pop())
            found = [(at, name, step if own is _mamba2_update and at is home else own) for at, name, own in found]
    return found


def _differentiated(chunked: Callable[..., Any], stepped: Callable[..., Any]) -> Callable[..., Any]:
    """``stepped``, with the gradient of ``chunked``, which takes the same arguments and gives the same results."""

    def call(*args: Any, **kwargs: Any) -> Any:
        signature = inspect.signature(chunked)
        given = signature.bind(*args, **kwargs).arguments
        rest_of = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        given |= given.pop(rest_of, {})
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        if not torch.is_grad_enabled() or not any(each.requires_grad for each in tensors.values()):
            return stepped(**given)
        rest = {name: value for name, value in given.items() if name not in tensors}
        results: list[Any] = []
        outs = _Stepped.apply(chunked, stepped, rest, results, tuple(tensors), *tensors.values())
        (result,) = results
        return outs if isinstance(result, Tensor) else (outs[0], outs[1] if len(outs) > 1 else result[1])

    return call


class _Stepped(torch.autograd.Function):
    """A recurrence over a whole sequence in steps, of tensors by name; its gradient is that of the form in chunks."""

    @staticmethod
    def forward(
        ctx: Any, chunked: Any, stepped: Any, rest: dict[str, Any], results: list[Any], names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(*tensors)
        ctx.chunked, ctx.rest, ctx.names = chunked, rest, names
        result = stepped(**rest, **dict(zip(names, tensors, strict=True)))
        results.append(result)
        return result if isinstance(result, Tensor) else tuple(each for each in result if each is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[5:]
        leaves = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad():
            result = ctx.chunked(**ctx.rest, **dict(zip(ctx.names, leaves, strict=True)))
        outs = [result] if isinstance(result, Tensor) else [each for each in result if each is not None]
        pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None and out.requires_grad]
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        given, of = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(given, wanted, of, allow_unused=True))
        return (*[None] * 5, *(next(found) if need else None for need in needs))


def _limit(module: nn.Module, home: Any) -> Any:
    """What a mixer's time steps are clamped to; None of what has none."""
    return getattr(module, "time_step_limit", None) if sys.modules.get(type(module).__module__) is home else None


@contextlib.contextmanager
def replaced(found: Replaced) -> Iterator[None]:
    """Within this, what was computed in two forms is computed in steps."""
    before = [(home, name, getattr(home, name)) for home, name, _ in found]
    try:
        for home, name, stepped in found:
            setattr(home, name, stepped)
        yield
    finally:
        for home, name, own in before:
            setattr(home, name, own)


def _by_kernels() -> bool:
    """Whether sums over a row are the routes' of a GPU: what the model was adopted for says so, and not where a tensor
    lies, for Triton's kernels are interpreted on a CPU too."""
    return RUNNING.modes[-1].gpu


@contextlib.contextmanager
def _stepping() -> Iterator[None]:
    """Within this torch's own products, sums of two and sums over a row: on a CPU exact as they are."""
    with torch.no_grad(), RUNNING.modes[-1].routing(), torch._C.DisableTorchFunction():
        yield


_PART = 64  # positions


def _delta_rule(
    stepped: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    chunk_size: int = 0, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gated delta rule over B,T,H,K queries and keys, B,T,H,V values, B,T,H decays g and betas; as ``stepped``."""
    if _by_kernels():
        how = {"initial_state": initial_state, "output_final_state": output_final_state}
        return stepped(query, key, value, g, beta, **how, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (query, key))
    query, key, value, beta, g = (x.transpose(1, 2).float().contiguous() for x in (query, key, value, beta, g))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    query, decay = query / query.shape[-1] ** 0.5, torch.exp(g)
    shape = *value.shape[:2], value.shape[3], key.shape[3]
    state = value.new_zeros(shape) if initial_state is None else initial_state.to(value).transpose(2, 3).contiguous()
    out, scratch = torch.empty_like(value), torch.empty_like(state)
    with _stepping():
        for at in range(value.shape[2]):
            k, q = key[:, :, at].unsqueeze(2), query[:, :, at].unsqueeze(2)
            state.mul_(decay[:, :, at, None, None])
            known = torch.mul(state, k, out=scratch).sum(-1)
            delta = (value[:, :, at] - known).mul_(beta[:, :, at, None])
            state.add_(torch.mul(delta.unsqueeze(3), k, out=scratch))
            out[:, :, at] = torch.mul(state, q, out=scratch).sum(-1)
    last = state.transpose(2, 3).contiguous() if output_final_state else None
    return out.transpose(1, 2).contiguous().to(dtype), last


def _time_step(
    dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float] = (0.0, float("inf"))
) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if softplus else dt
    return torch.clamp(dt, min=limit[0], max=limit[1]).float()


def _mamba2_step(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """State B,H,P,N and x B,H,P; dt B,H; a H; b and c B,G,N. Returns the next state and y, all fp32."""
    b, c = (each.float().repeat_interleave(x.shape[1] // each.shape[1], dim=1).unsqueeze(2) for each in (b, c))
    state = state * torch.exp(dt * a)[..., None, None] + (x * dt.unsqueeze(-1)).unsqueeze(-1) * b
    return state, (state * c).sum(-1)


def _mamba2_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int = 0, D: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """``mamba2_chunk_scan``: x B,T,H,P, dt B,T,H, B and C B,T,G,N; y as x, fp32, and the last state."""
    (batch, length, heads, size), states = hidden_states.shape, B.shape[-1]
    dt, x = _time_step(dt, dt_bias, dt_softplus, dt_limit), hidden_states.float()
    state = x.new_zeros(batch, heads, size, states) if initial_states is None else initial_states.float()
    if _by_kernels():
        found = []
        for at in range(length):
            state, y = _mamba2_step(state, x[:, at], dt[:, at], A.float(), B[:, at], C[:, at])
            found.append(y)
        y = torch.stack(found, 1)
    else:
        decay, moved = torch.exp(dt * A.float()), x * dt.unsqueeze(-1)
        b, c = (each.float().repeat_interleave(heads // each.shape[2], dim=2).unsqueeze(3) for each in (B, C))
        state, y = state.clone(), torch.empty_like(x)
        scratch = torch.empty_like(state)
        with _stepping():
            for at in range(length):  # ``_mamba2_step``
                state.mul_(decay[:, at, :, None, None])
                state.add_(torch.mul(moved[:, at].unsqueeze(-1), b[:, at], out=scratch))
                y[:, at] = torch.mul(state, c[:, at], out=scratch).sum(-1)
    y = y if D is None else y + D.float().unsqueeze(-1) * x
    return (y, state) if return_final_states else y


def _mamba2_update(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> Tensor:  # fmt: skip
    """``mamba2_selective_state_update``: dt, A, D and its bias come once more for each channel and state."""
    bias = None if dt_bias is None else dt_bias[..., 0]
    step, x = _time_step(dt[..., 0], bias, dt_softplus, dt_limit), hidden_states.float()
    moved, y = _mamba2_step(state.float(), x, step, A[:, 0, 0].float(), B, C)
    state.copy_(moved)
    y = y if D is None else y + D.float() * x
    return y if z is None else y * F.silu(z)


def _mamba_step(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """State B,I,N; x and dt B,I; a I,N; b and c B,N. Returns the next state and y, all fp32."""
    state = state * torch.exp(dt.unsqueeze(-1) * a) + (x * dt).unsqueeze(-1) * b.float().unsqueeze(1)
    return state, (state * c.float().unsqueeze(1)).sum(-1)


def _mamba_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """``mamba_selective_scan``: x, dt and z B,I,T, B and C B,N,T; y as x, and the last state, fp32."""
    x = hidden_states.float()
    dt = _time_step(dt, None if delta_bias is None else delta_bias.unsqueeze(-1), delta_softplus)
    state, differentiable = x.new_zeros(*x.shape[:2], A.shape[-1]), torch.is_grad_enabled()
    if differentiable or _by_kernels():
        found = []
        for at in range(x.shape[2]):
            state, y = _mamba_step(state, x[..., at], dt[..., at], A.float(), B[..., at], C[..., at])
            found.append(y)
        y = torch.stack(found, -1)
    else:
        moved, y, scratch = x * dt, torch.empty_like(x), torch.empty_like(state)
        b, c = (each.float().transpose(1, 2).unsqueeze(2).contiguous() for each in (B, C))
        for start in range(0, x.shape[2], _PART):  # the decays of a part: I,N values a position
            decay = torch.exp(dt[..., start : start + _PART].transpose(1, 2).unsqueeze(-1) * A.float())
            with _stepping():
                for at in range(start, min(start + _PART, x.shape[2])):  # ``_mamba_step``
                    state.mul_(decay[:, at - start])
                    state.add_(torch.mul(moved[..., at].unsqueeze(-1), b[:, at], out=scratch))
                    y[..., at] = torch.mul(state, c[:, at], out=scratch).sum(-1)
    y = y if D is None else y + D.float().unsqueeze(-1) * x
    y = (y if z is None else y * F.silu(z.float())).to(hidden_states.dtype)
    return (y, state) if return_last_state else y


def _mamba_update(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """``mamba_selective_state_update``: the same of one position."""
    x = hidden_states.float()
    moved, y = _mamba_step(state.float(), x, _time_step(dt, dt_bias, dt_softplus), A.float(), B, C)
    state.copy_(moved)
    y = y if D is None else y + D.float() * x
    return (y if z is None else y * F.silu(z.float())).to(hidden_states.dtype)


_DELTA = "torch_chunk_gated_delta_rule"
_STEPPED_BESIDE = {
    _DELTA: "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
_OWN: dict[str, Callable[..., Any]] = {
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_selective_state_update": _mamba2_update,
    "mamba_selective_scan": _mamba_scan,
    "mamba_selective_state_update": _mamba_update,
}
