"""Recurrences of an adopted model: one form for a whole sequence and for a step, the one that steps.

Transformers computes a state space or a delta rule in chunks for a whole sequence, and step by step when it decodes:
two orders of the same sums. While the model runs, functions of its file are replaced:

- a gated delta rule's form in chunks by the file's own form in steps (Qwen3.5, Qwen3-Next, Kimi);
- Mamba's two forms by one step, here, of which a scan is a loop. State and sums are fp32, as in the chunks;

      s' = exp(dt A) s + (dt x) B,    y = sum over N of s' C, + D x,    dt = softplus(dt + bias)

All operations are routed like any other. It takes longer over a whole sequence: one pass of the loop a position.

Legend: B sequences, T positions, H heads of P channels (Mamba 1: I channels, each with a decay of its own), G groups
of heads that share B and C, N values of state a channel.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Replaced = list[tuple[Any, str, Any]]  # module of Python, name, what stands there while the model runs


def replacements(model: nn.Module) -> Replaced:
    """What the files of a model's modules have two forms of."""
    homes = {id(home): home for module in model.modules() if (home := sys.modules.get(type(module).__module__))}
    found: Replaced = []
    for home in homes.values():
        for chunked, stepped in _STEPPED_BESIDE.items():
            if hasattr(home, chunked) and hasattr(home, stepped):
                found.append((home, chunked, getattr(home, stepped)))
        found += [(home, name, own) for name, own in _OWN.items() if hasattr(home, name)]
        limits = {tuple(limit) for module in model.modules() if (limit := _limit(module, home)) is not None}
        if len(limits) == 1:  # which a file's scan is given, and its step is not (NemotronH of transformers 5.23)
            step = functools.partial(_mamba2_update, dt_limit=limits.pop())
            found = [(at, name, step if own is _mamba2_update and at is home else own) for at, name, own in found]
    return found


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
    found = []
    for at in range(length):
        state, y = _mamba2_step(state, x[:, at], dt[:, at], A.float(), B[:, at], C[:, at])
        found.append(y)
    y = torch.stack(found, 1)
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
    state = x.new_zeros(*x.shape[:2], A.shape[-1])
    found = []
    for at in range(x.shape[2]):
        state, y = _mamba_step(state, x[..., at], dt[..., at], A.float(), B[..., at], C[..., at])
        found.append(y)
    y = torch.stack(found, -1)
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


_STEPPED_BESIDE = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
_OWN: dict[str, Callable[..., Any]] = {
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_selective_state_update": _mamba2_update,
    "mamba_selective_scan": _mamba_scan,
    "mamba_selective_state_update": _mamba_update,
}
