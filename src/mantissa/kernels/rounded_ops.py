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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

HALF = (torch.float16, torch.bfloat16)

_PRODUCTS = str.split("""
    mm bmm addmm addbmm baddbmm mv addmv addr dot vdot linear linear_backward matmul_backward _addmm_activation
    convolution convolution_overrideable convolution_backward convolution_backward_overrideable
    conv_tbc conv_tbc_backward _trilinear
""")
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
    dtypes = {t.dtype for t in _floating(args, kwargs)}
    if len(dtypes) != 1:
        return func(*args, **kwargs)  # fp32, or a mixture that torch refuses in its own words
    (dtype,) = dtypes
    if dtype not in HALF:
        return func(*args, **kwargs)
    return _widened(func, args, kwargs, torch.float32, lambda i, out: _narrow(out, dtype))


def _round_unless_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x + y of half tensors needs no help; with a Python number in it, torch's CPU kernel rounds the number first."""
    if kwargs.get("alpha", 1) == 1 and len(args) == 2 and isinstance(args[1], Tensor):
        return _promote(func, args, kwargs)
    dtypes = {t.dtype for t in _floating(args, kwargs)}
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
    for t in _floating(args, kwargs):
        if t.dim() > 0:
            if found is None:
                found = t.dtype
            elif t.dtype != found:
                break
    else:
        return func(*args, **kwargs)
    dtypes = {t.dtype for t in _floating(args, kwargs) if t.dim() > 0}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    return _widened(func, args, kwargs, wide, lambda i, out: out)


def _widened(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wide: torch.dtype,
    finish: Callable[[int, Any], Any],
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


def _floating(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
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
