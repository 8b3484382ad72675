"""Half tensors with a tensor core's arithmetic on any device: wide inside, one rounding of each result.

Torch's autocast makes real half tensors, so every cast, overflow and flush to zero is torch's own. What is missing on a
CPU is the arithmetic of a tensor core. ``RoundedOps`` is a dispatch mode, so it sees the operations below autograd, in
the forward and in the backward pass, and changes three kinds of them where half tensors come in:

1. Products (``mm``, ``convolution``, ...). Operands are widened to fp32, which is exact; the product of two half
   significands is exact in fp32 (22 bits at most); the sum is fp32; the result is rounded once. This is what a tensor
   core does up to the order of the sum. A CPU's own half products take 5 to 200 times as long.
2. Operations whose half kernel on a CPU rounds more than once, or adds up in half, where CUDA's does not: batch norm,
   the backward passes of pooling, of sigmoid in fp16 and of gated units, ``x + scalar`` (which rounds the scalar). The
   same treatment. All others are left to torch: it computes them in fp32 and rounds once (a test holds each to that).
3. Element-wise operations that mix half and fp32 (a residual stream in fp32, say). Torch would promote silently; here
   the widening is explicit, with the same result.

Everything else passes: integers, complex numbers, fp32, optimisers' lists of tensors, collectives. Tensor subclasses
get the operation first; what they compute on their plain tensors comes back here.

Scaled dot-product attention of half tensors as a flash kernel computes it: fp32 inside, rounded where it rounds.

Operands are half. Scores q k^T * scale, the mask and the softmax are fp32; the probabilities are rounded, because they
are the operand of the second product; the result is rounded once. Backward: probabilities are recomputed from q and k;
dS is rounded, because it is an operand; each gradient is rounded once.

``CausalAttention`` is the special case of a decoder, on fp32 tensors that hold the grid's values. This one takes what
``torch.nn.functional.scaled_dot_product_attention`` takes: masks, dropout, scale, shared key heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mantissa.kernels import cpu

HALF = (torch.float16, torch.bfloat16)

_PRODUCTS = str.split("""
    mm bmm addmm addbmm baddbmm mv addmv addr dot vdot linear linear_backward matmul_backward _addmm_activation
    convolution convolution_overrideable convolution_backward convolution_backward_overrideable
    conv_tbc conv_tbc_backward _trilinear
""")
_SWITCHED = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm")}
_ONE_ROUNDING = str.split("""
    sigmoid_backward glu_backward logit logit_backward logsumexp prod _softmax _log_softmax
    avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    embedding_dense_backward _cdist_forward _cdist_backward col2im unfold_backward
    rrelu_with_noise native_dropout native_dropout_backward
""")
_SCALAR_ROUNDS = str.split("add sub rsub")
_FIRST_RESULT_HALF = str.split("""
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit
    _batch_norm_with_update batch_norm_backward log_sigmoid_forward log_sigmoid_backward
""")
_COMPOSITE_OR_OWN = ("CompositeImplicitAutograd", "CPU", "CUDA")
_MIXES = str.split("cat stack where index_put scatter_add index_copy index_add dot vdot lerp addcmul addcdiv")

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class RoundedOps(TorchDispatchMode):
    """Within this mode, operations on half tensors compute in fp32 and round each result once.

    ``keep_casts``: cast a parameter to half once for the lifetime of this mode, as autocast does in a forward pass.
    """

    supports_higher_order_operators = True  # they pass, and what they call comes here

    def __init__(self, keep_casts: bool = False) -> None:
        super().__init__()
        self._casts: dict[int, tuple[Tensor, Tensor]] | None = {} if keep_casts else None

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` in ``dtype``. Uses of one parameter then share one cast, and their gradients are added up in half."""
        is_parameter = x.is_leaf and x.requires_grad and not x._is_view()
        if self._casts is None or not is_parameter or not torch.is_grad_enabled():
            return x.to(dtype)
        kept = self._casts.get(id(x))
        if kept is None or kept[1].dtype != dtype:
            kept = self._casts[id(x)] = (x, x.to(dtype))  # with x itself, so that its id stays its own
        return kept[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if kind is not Tensor and kind is not torch.nn.Parameter:
                # A wrapper (DTensor) computes on plain tensors, which come back here; others (fake tensors) do not.
                return NotImplemented if hasattr(kind, "__tensor_flatten__") else func(*args, **(kwargs or {}))
        rule = _RULES.get(func)
        if rule is None:
            rule = _RULES[func] = _rule_of(func)
        if rule is _decompose:
            with self:
                return _decompose(func, args, kwargs or {})
        return rule(func, args, kwargs or {})


def rounding() -> RoundedOps | None:
    """The innermost ``RoundedOps`` that is active, on autograd's threads too."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, RoundedOps)), None)


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Under ``torch.inference_mode`` operations made of others arrive whole (``matmul``, ``conv2d``): take them apart,
    as autograd's dispatch does elsewhere, so that their parts come here. By torch's own kernel for it: ``decompose``
    would prefer a reference in Python, with other roundings. (``linear`` arrives whole too and rounds once, where a
    recurrent layer's product and bias round apart: there the last bit may differ from ``no_grad``'s.)"""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _pass(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _round_once(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where every floating-point operand has one half dtype: the fp32 operation, its results rounded to that dtype."""
    dtypes = {t.dtype for t in floating(args, kwargs)}
    if len(dtypes) != 1:
        return func(*args, **kwargs)  # fp32, or a mixture that torch refuses in its own words
    (dtype,) = dtypes
    if dtype not in HALF:
        return func(*args, **kwargs)
    with cpu.switched(dtype is torch.bfloat16 and func._schema.name in _SWITCHED and _gains(args)):
        return _widened(func, args, kwargs, torch.float32, lambda i, out: _narrow(out, dtype))


def _gains(args: tuple[Any, ...]) -> bool:
    """Whether this CPU multiplies matrices of these sizes faster where oneDNN may take their values for bf16's."""
    x, y = args[-2:]  # what is added stands before them
    rows, values = x.shape[-2], y.shape[-2] * y.shape[-1]
    return x.device.type == "cpu" and cpu.products().way("bf16", "heads", rows, values) == cpu.BF16


def _round_unless_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x + y of half tensors needs no help; with a Python number in it, torch's CPU kernel rounds the number first."""
    if kwargs.get("alpha", 1) == 1 and len(args) == 2 and isinstance(args[1], Tensor):
        return _promote(func, args, kwargs)
    dtypes = {t.dtype for t in floating(args, kwargs)}
    return _round_once(func, args, kwargs) if len(dtypes) == 1 else _promote(func, args, kwargs)


def _round_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As CUDA's batch norm: half activations, and everything else in fp32, given or saved for the backward pass."""
    dtype = args[0].dtype
    if dtype not in HALF:
        return func(*args, **kwargs)
    return _widened(func, args, kwargs, torch.float32, lambda i, out: _narrow(out, dtype) if i == 0 else out)


def _promote(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Half and wider operands together: the half ones are widened here, where torch would do it silently."""
    found = None
    for t in floating(args, kwargs):
        if t.dim() > 0:
            if found is None:
                found = t.dtype
            elif t.dtype != found:
                break
    else:
        return func(*args, **kwargs)
    dtypes = {t.dtype for t in floating(args, kwargs) if t.dim() > 0}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    return _widened(func, args, kwargs, wide, lambda i, out: out)


def _widened(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wide: torch.dtype, finish: Callable[[int, Any], Any]
) -> Any:
    """``func`` on half operands widened to ``wide``; operands that it writes to get the result rounded into them."""
    wide_args = [_widen(a, wide) for a in args]
    wide_kwargs = {name: _widen(a, wide) for name, a in kwargs.items()}
    result = func(*wide_args, **wide_kwargs)
    written: dict[int, Tensor] = {}
    for key in _written_by(func):
        given, used = _operand(key, args, kwargs), _operand(key, wide_args, wide_kwargs)
        if given is not None and used is not None and used is not given:
            if given.shape != used.shape:  # an ``out=`` that the operation has resized
                given.resize_(used.shape)
            written[id(used)] = given.copy_(used)
    if isinstance(result, (tuple, list)):
        done = [written[id(r)] if id(r) in written else finish(i, r) for i, r in enumerate(result)]
        return tuple(done) if isinstance(result, tuple) else done
    return written[id(result)] if id(result) in written else finish(0, result)


def _operand(key: int | str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor at a position or with a name, if it was given."""
    if isinstance(key, int):
        return args[key] if key < len(args) else None
    return kwargs.get(key)


def _widen(value: Any, wide: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(wide) if value.dtype in HALF else value
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return type(value)([_widen(v, wide) for v in value])
    return value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def floating(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The floating-point tensors among an operation's operands, alone or in a list."""
    for values in (args, kwargs.values()) if kwargs else (args,):
        for value in values:
            if isinstance(value, Tensor):
                if value.is_floating_point():
                    yield value
            elif isinstance(value, (list, tuple)):
                yield from (v for v in value if isinstance(v, Tensor) and v.is_floating_point())


_RULES: dict[Any, Rule] = {}
_WRITTEN: dict[Any, tuple[int | str, ...]] = {}


def _written_by(func: Any) -> tuple[int | str, ...]:
    """Which operands ``func`` writes to: positions, or names where they can only be given by name."""
    if func not in _WRITTEN:
        _WRITTEN[func] = tuple(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        if func._schema.name == "aten::native_batch_norm":
            _WRITTEN[func] = (3, 4)  # the running statistics, which its schema does not mention
    return _WRITTEN[func]


def _rule_of(func: Any) -> Rule:
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return _pass
    name = func._schema.name.removeprefix("aten::")
    plain = name if name.startswith("__") else name.removesuffix("_")
    if plain.startswith("_foreach") or plain in ("copy", "_to_copy", "to"):
        return _pass
    if plain in _FIRST_RESULT_HALF:
        return _round_first
    if plain in _SCALAR_ROUNDS:
        return _round_unless_plain
    if plain in ("index_put", "_index_put_impl", "put"):
        return _index_put
    if plain in _PRODUCTS or plain in _ONE_ROUNDING:
        return _round_once
    if plain in _MIXES or torch.Tag.pointwise in func.tags:
        return _promote
    has = [torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in _COMPOSITE_OR_OWN]
    return _decompose if has == [True, False, False] else _pass


def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adding into a half tensor: the additions are fp32, as CUDA makes them. Without adding nothing is rounded."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return (_round_once if accumulate else _promote)(func, args, kwargs)


_BLOCK_SCORES = 2**20  # scores at a time: 4 MiB, about what a cache holds
_CAUSAL_BLOCK = 64  # queries at a time where there is a future to skip


def rounded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """dropout(softmax(q k^T * scale + mask)) v for q (..., T, D), k (..., S, D), v (..., S, E): (..., T, E), half.

    Arguments as in ``torch.nn.functional.scaled_dot_product_attention``; a query that may see no key gives zeros.
    ``enable_gqa``: each key head serves several query heads; its gradient is the rounded sum of their rounded
    gradients, as flash attention makes it. Differentiable once, in q, k, v and a floating-point mask.
    Memory is linear in T, plus one byte per score with dropout.
    """
    if enable_gqa:
        group = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _RoundedAttention.apply(q, k, v, attn_mask, float(dropout_p), is_causal, scale)


class _RoundedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
    ) -> Tensor:
        call = _Call(q, k, v, mask, is_causal, scale)
        out = q.new_empty(call.rows, call.queries, v.shape[-1])
        kept = None
        if dropout_p > 0:
            kept = torch.empty(call.rows, call.queries, call.keys, dtype=torch.bool, device=q.device)
            kept.bernoulli_(1 - dropout_p)
        for start, stop, seen in call.blocks:
            p = call.probabilities(start, stop, seen)
            if kept is not None:
                p.mul_(_dropout_factor(kept[:, start:stop, :seen], dropout_p))
            out[:, start:stop] = p.to(q.dtype).float() @ call.v[:, :seen]  # the copy into a half tensor rounds
        out = out.view(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, mask, out, kept)
        ctx.dropout_p, ctx.is_causal, ctx.scale = dropout_p, is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, kept = ctx.saved_tensors
        call = _Call(q, k, v, mask, ctx.is_causal, ctx.scale)
        grad_out, out = (x.reshape(call.rows, call.queries, -1).float() for x in (grad, out))
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
        wants_mask = ctx.needs_input_grad[3]
        grad_mask = call.q.new_zeros(call.rows, call.queries, call.keys) if wants_mask else None
        for start, stop, seen in call.blocks:
            p = call.probabilities(start, stop, seen)
            d_out = grad_out[:, start:stop]
            d_p, p_used = d_out @ call.v[:, :seen].transpose(1, 2), p
            if kept is not None:
                factor = _dropout_factor(kept[:, start:stop, :seen], ctx.dropout_p)
                d_p, p_used = d_p.mul_(factor), p * factor
            d_scores = d_p.sub_(delta[:, start:stop]).mul_(p)
            if grad_mask is not None:
                grad_mask[:, start:stop, :seen] = d_scores
            p_rounded, d_rounded = p_used.to(q.dtype).float(), d_scores.to(q.dtype).float()
            grad_v[:, :seen] += p_rounded.transpose(1, 2) @ d_out
            grad_k[:, :seen] += d_rounded.transpose(1, 2) @ call.q[:, start:stop]
            grad_q[:, start:stop] = d_rounded @ call.k[:, :seen]
        if grad_mask is not None:
            grad_mask = grad_mask.view(*q.shape[:-1], call.keys).sum_to_size(mask.shape).to(mask.dtype)
        grads = (grad_q.mul_(ctx.scale).to(q.dtype), grad_k.mul_(ctx.scale).to(k.dtype), grad_v.to(v.dtype))
        return *(g.view(x.shape) for g, x in zip(grads, (q, k, v), strict=True)), grad_mask, None, None, None


class _Call:
    """Operands widened to fp32 with all leading dimensions in one, and the blocks of queries."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> None:
        self.queries, self.keys = q.shape[-2], k.shape[-2]
        self.q, self.k, self.v = (x.float().reshape(-1, *x.shape[-2:]) for x in (q, k, v))
        self.rows = self.q.shape[0]
        self.mask = None if mask is None else mask.expand(*q.shape[:-1], self.keys)
        self.is_causal, self.scale = is_causal, scale
        block = max(16, _BLOCK_SCORES // max(1, self.rows * self.keys))
        if is_causal:
            block = min(block, _CAUSAL_BLOCK)
        starts = range(0, self.queries, block)
        stops = [min(start + block, self.queries) for start in starts]
        seen = [min(stop, self.keys) if is_causal else self.keys for stop in stops]
        self.blocks = list(zip(starts, stops, seen, strict=True))  # first query, last + 1, keys that it may see

    def probabilities(self, start: int, stop: int, seen: int) -> Tensor:
        """softmax(q k^T * scale + mask) of queries start..stop over the first ``seen`` keys, fp32, zeros if all hidden.

        Shape (rows, stop - start, seen).
        """
        q, k_t = self.q[:, start:stop], self.k[:, :seen].transpose(1, 2)
        scores = torch.baddbmm(self._bias(start, stop, seen), q, k_t, alpha=self.scale)
        return torch.softmax(scores, -1) if self.mask is None else torch._safe_softmax(scores, -1)

    def _bias(self, start: int, stop: int, seen: int) -> Tensor:
        """What is added to the scores: 0 or the mask's values, and -inf where a query may not look."""
        if self.mask is not None:
            mask = self.mask[..., start:stop, :seen].reshape(self.rows, stop - start, seen)
            if mask.dtype != torch.bool:
                return mask.float()
            return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask.logical_not(), float("-inf"))
        if self.is_causal:
            hidden = torch.full((stop - start, seen), float("-inf"), device=self.q.device)
            return hidden.triu_(start + 1)
        return self.q.new_zeros(())


def _dropout_factor(kept: Tensor, dropout_p: float) -> Tensor:
    return kept.float().mul_(1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
