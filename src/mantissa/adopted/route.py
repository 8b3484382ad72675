"""What an adopted model's operations are computed by: the same bits for a position, whatever stands beside it.

A model of transformers is left as it is written. While it runs, a ``TorchFunctionMode`` sees each function of torch
that its code calls and computes those whose bits depend on what stands beside a value in another way:

- a product with a weight: in tiles of rows, by the calls that the plan allows (``kernels/exact/plan.py``);
- a pointwise function that is not rounded correctly (exp, tanh, silu, ...): torch's vector loop and its scalar
  remainder round differently, so on flat, contiguous tensors whose length every thread divides into whole vectors;
- a reduction, a softmax, a norm: over the last, contiguous dimension, where torch takes row by row;
- a depthwise convolution: as a sum of shifted products, in one order.

What is rounded correctly (sums of two, products, comparisons) or moves values (views, gathers) is torch's own. What is
neither, ``census.py`` refuses. Attention is transformers' ``AttentionInterface``'s: ``attention.py``.

In a half format the parameters may be fp32 masters: they are cast where they are used, and autograd casts back.

Legend: N rows of any leading shape, E features in, F features out, V vocabulary, B sequences, C channels, T positions.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mantissa.adopted import gpu
from mantissa.base.errors import MantissaError
from mantissa.kernels import compiled, cpu
from mantissa.kernels.cpu import Products
from mantissa.kernels.exact.kernels import product
from mantissa.kernels.exact.plan import Choice, ExactPlan
from mantissa.kernels.simulated import Product, ProductOf, ScaledLinear, weight_values
from mantissa.precision import FP32, Fp8Policy, NumberFormat, round_to_format

Head = tuple[int, int, int]  # of an attention: query heads, key heads, head size
_VECTOR = 64  # values: a whole pass of torch's vector loops, two vectors of the widest kind, in each dtype
_PRODUCTS = Products()  # of gradients, by the library that is faster
_GRAINS = (32768, 2048)  # values that torch gives a thread at least: most functions, and those of a vector library


@functools.lru_cache(maxsize=4096)
def padded_length(count: int, threads: int) -> int:
    """The least length from ``count`` on that torch's loops divide among their threads in whole vectors."""
    length = count
    while True:
        shares = math.lcm(*(min(threads, -(-length // grain)) for grain in _GRAINS))
        whole = -(-length // (_VECTOR * shares)) * _VECTOR * shares
        if whole == length:
            return length
        length = whole


def flat(x: Tensor) -> Tensor:
    """``x`` as a contiguous vector with zeros behind it, on which a pointwise function is one loop of whole vectors."""
    count = x.numel()
    room = padded_length(count, torch.get_num_threads()) - count
    x = x.contiguous().view(-1)
    return x if not room else F.pad(x, (0, room))


class _Product(ProductOf):
    """``ProductOf`` of rows, whose gradients are fp32 products where the processor has none in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x_NE, weight_FE)
        return product(x_NE, weight_FE, bias_F)  # no view of it: a model may go on in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors  # once: a checkpoint computes them for it
        if x.dtype is torch.float32 or x.is_cuda or (x.dtype is torch.bfloat16 and _has_bf16()):
            return ProductOf.backward(_Saved((x, weight), ctx.needs_input_grad), *grads)
        wide = _Saved((x.float(), weight.float()), ctx.needs_input_grad)
        grad_x, grad_weight, grad_bias, _ = ProductOf.backward(wide, grads[0].to(x.dtype))

        def rounded(grad: Tensor | None) -> Tensor | None:
            return None if grad is None else grad.to(x.dtype)

        return rounded(grad_x), rounded(grad_weight), rounded(grad_bias), None


class _Saved:
    """What ``ProductOf.backward`` reads."""

    def __init__(self, saved: tuple[Tensor, ...], needs: tuple[bool, ...]) -> None:
        self.saved_tensors, self.needs_input_grad = saved, needs


@functools.cache
def _has_bf16() -> bool:
    return cpu.has_bf16()


_ROUTERS = ("gate", "router", "shared_expert_gate")  # what chooses experts is never quantised


def quantizes(policy: Fp8Policy, name: str) -> bool:
    """Whether the product with the parameter of this name has quantised operands."""
    return policy.quantizes(name) and name.rpartition(".")[2] not in _ROUTERS


def check_layers(policy: Fp8Policy, model: nn.Module) -> None:
    """``MantissaError`` where the policy names no layer of a model, or quantises none."""
    layers = [name.removesuffix(".weight") for name, p in model.named_parameters() if p.dim() > 1]
    policy.check(layers)
    if not any(quantizes(policy, name) for name in layers):
        raise MantissaError(
            f"{policy.kind} quantises no layer of {type(model).__name__}, whose projections are in no layers that are "
            "named so; choose fp32, bf16 or fp16"
        )


class Copies:
    """Copies of weights, made once each, for as long as no weight changes: each one's version is looked at."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, int, Tensor]] = {}
        self.made: set[int] = set()  # ids of the copies

    def of(self, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """The copy of ``source``, which is held, so that its id stays its own."""
        known = self._of.get(id(source))
        if known is None or known[1] != source._version:
            known = self._of[id(source)] = source, source._version, make()
            self.made.add(id(known[2]))
        return known[2]


class Routed(TorchFunctionMode):
    """The operations of one adopted model in ``fmt``. Entered while the model runs, and nested where its layers are.

    ``cast``: parameters are fp32 masters of a half format. ``plans``: by the shape of an attention, of which the first
    has the products; None while a model is only read (``census.py``): ``seen`` then gathers what it multiplies.
    ``gpu``: by ``gpu.py``'s forms, for which nothing is planned.
    """

    def __init__(
        self, fmt: NumberFormat, cast: bool, logits_format: NumberFormat = FP32, fp8: Fp8Policy | None = None,
        gpu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.format, self.cast, self.logits_format, self.fp8, self.gpu = fmt, cast, logits_format, fp8, gpu
        self.plans: dict[Head, ExactPlan] | None = None
        self.length = 0  # of the longest sequence
        self.products: dict[tuple[tuple[int, int], bool], str] = {}  # seen: a weight's shape, whether wide: its name
        self.heads: set[Head] = set()
        self.names: dict[int, str] = {}  # of the model's parameters, by id
        self.inside = 0  # how many routed functions are on their way
        self.copies: Copies | None = None  # while weights do not change
        self.routes = ROUTES

    @property
    def plan(self) -> ExactPlan:
        assert self.plans is not None
        return next(iter(self.plans.values()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.cast:
            if func == _DTYPE:
                dtype = func(*args)
                return self.format.dtype if isinstance(args[0], nn.Parameter) and dtype is torch.float32 else dtype
            if func in _PICKED:  # first, so that no more is cast than what is used
                picked = func(*args, **kwargs)
                if self.fp8 is not None and func is not F.embedding and picked.dim() == 2:
                    return picked  # an expert's weight: quantised from its master
                return picked.to(self.format.dtype) if _is_master(args[0]) or _is_master(args[-1]) else picked
            if func not in _AS_THEY_ARE:
                args, kwargs = self.cast_all(args), {name: self.cast_one(x) for name, x in kwargs.items()}
        route = self.routes.get(func)
        if route is None:
            return func(*args, **kwargs)
        with self.routing():
            return route(self, func, *args, **kwargs)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Within this, no weight changes: what a product reads of it is made once."""
        before, self.copies = self.copies, self.copies or Copies()
        try:
            yield
        finally:
            self.copies = before

    @contextlib.contextmanager
    def routing(self) -> Iterator[None]:
        """Within this, what torch is asked for is what a route computes by."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @contextlib.contextmanager
    def unrouted(self) -> Iterator[None]:
        """Within this, what torch is asked for is its own way, for the census to see."""
        before, self.inside = self.inside, 0
        try:
            yield
        finally:
            self.inside = before

    def cast_all(self, args: Any) -> Any:
        """Masters among the arguments of a function, in the format."""
        return tuple([self.cast_one(x) for x in args]) if self.cast else args

    def cast_one(self, x: Any) -> Any:
        """The same of one, or of a list of some."""
        if isinstance(x, nn.Parameter):
            return self._half(x) if x.dtype is torch.float32 else x
        return type(x)([self.cast_one(each) for each in x]) if type(x) in (list, tuple) else x

    def _half(self, master: Tensor) -> Tensor:
        if self.copies is None or torch.is_grad_enabled():
            half = master.to(self.format.dtype)
        else:
            half = self.copies.of(master, lambda: master.detach().to(self.format.dtype))
        half._of_a_weight = self.names.get(id(master), "a weight")  # type: ignore[attr-defined]
        return half

    def by_weight(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """x @ weight^T + bias, of a weight that is a parameter or a part of one: quantised where the policy says so."""
        if self.fp8 is not None and x_NE.is_floating_point():
            name = self.names.get(id(base_of(weight_FE)))
            if name is None:
                raise MantissaError(
                    f"adopt: in {self.fp8.kind} each weight must be one that the model had when it was adopted; a "
                    "copy, or a sharded model, is adopted itself"
                )
            if quantizes(self.fp8, name):
                return self._quantized(x_NE, weight_FE, bias_F)
        x_NE, weight_FE, bias_F = self.cast_all((x_NE, weight_FE, bias_F))
        if self.cast and _is_master(base_of(weight_FE)) and weight_FE.dtype is torch.float32:
            weight_FE = weight_FE.to(self.format.dtype)  # a part of one
        return self.linear(x_NE, weight_FE, bias_F)

    def _quantized(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        """``ScaledLinear`` of the master, by the products of the plan: rounded once to the base format."""
        assert self.fp8 is not None
        if self.plans is None:
            return self.linear(x_NE, weight_FE.to(x_NE.dtype), None if bias_F is None else bias_F.to(x_NE.dtype))
        bias_F = None if bias_F is None else round_to_format(bias_F.float(), self.format)
        kept = self.copies is not None and isinstance(weight_FE, nn.Parameter) and not torch.is_grad_enabled()
        policy, values_FE = self.fp8, weight_FE.float()
        if kept and self.copies is not None:
            values_FE = self.copies.of(weight_FE, lambda: weight_values(weight_FE.detach().float(), policy))
        how = self.fp8, self.format, self._wide, _PRODUCTS, kept
        return ScaledLinear.apply(x_NE.float(), values_FE, bias_F, *how).to(x_NE.dtype)

    def linear(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None, wide: bool = False) -> Tensor:
        """x @ weight^T + bias, rounded once to the dtype of ``x``; with ``wide`` not rounded: fp32, as logits are."""
        if x_NE.dtype is not weight_FE.dtype or x_NE.shape[-1] != weight_FE.shape[-1]:
            return F.linear(x_NE, weight_FE, bias_F)  # whose error says it best
        wide = wide or x_NE.dtype is torch.float32
        if self.plans is None:
            base = base_of(weight_FE)
            name = getattr(base, "_of_a_weight", None) or self.names.get(id(base), "a product")
            self.products.setdefault(((weight_FE.shape[0], weight_FE.shape[1]), wide), name)
            return F.linear(x_NE, weight_FE, bias_F)
        how = self._wide if wide else self._rounded
        if not torch.is_grad_enabled():
            return how(x_NE, weight_FE, bias_F)
        out_NF = _Product.apply(x_NE.reshape(-1, x_NE.shape[-1]), weight_FE, bias_F, how)
        return out_NF if x_NE.dim() == 2 else out_NF.view(*x_NE.shape[:-1], -1)

    def _wide(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        if self.gpu:
            return gpu.product(x_NE, weight_FE, bias_F, torch.float32)
        plan = self.plan
        plan.check_threads(torch.get_num_threads())
        choice = plan.products.get(tuple(weight_FE.shape))
        if choice is None:
            raise MantissaError(
                f"adopt: a product with a weight of {tuple(weight_FE.shape)} was not there when the model was adopted; "
                "add adapters first, then adopt the model"
            )
        out_NF = product(x_NE.float(), self._prepared(weight_FE, choice), choice)
        return out_NF if bias_F is None else out_NF + bias_F.float()

    def _rounded(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        if self.gpu:
            return gpu.product(x_NE, weight_FE, bias_F, x_NE.dtype)
        plan = self.plan
        choice = plan.bf16.get(tuple(weight_FE.shape)) if x_NE.dtype is torch.bfloat16 else None
        if choice is None or not choice.bf16:
            return self._wide(x_NE, weight_FE, bias_F).to(x_NE.dtype)
        plan.check_threads(torch.get_num_threads())
        return product(x_NE, self._prepared(weight_FE, choice), choice, bias_F)

    def _prepared(self, weight_FE: Tensor, choice: Choice) -> Tensor:
        """The weight as the product reads it: widened, and while copies are kept, laid out for its product."""
        dtype = torch.bfloat16 if choice.bf16 else torch.float32
        if self.copies is None or not (isinstance(weight_FE, nn.Parameter) or id(weight_FE) in self.copies.made):
            return weight_FE.to(dtype)

        def made() -> Tensor:
            plain = weight_FE.detach().to(dtype)
            if choice.way == "in order":
                return compiled.lay(plain, "pairs" if choice.bf16 else "fp32")
            return cpu.packed(plain) if choice.onednn and cpu.packable(tuple(plain.shape)) else plain

        return self.copies.of(weight_FE, made)


def pointwise(func: Callable[..., Tensor], x: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of each value: on whole vectors. What is not of one floating tensor is left as it is."""
    others = (*args, *kwargs.values())
    if not isinstance(x, Tensor) or not x.is_floating_point() or any(isinstance(y, Tensor) for y in others):
        return func(x, *args, **kwargs)
    if x.is_cuda:  # a GPU's loops have no scalar remainder
        return func(x, *args, **kwargs)
    return func(flat(x), *args, **kwargs)[: x.numel()].view(x.shape)


def _pointwise(mode: Routed, func: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("inplace", None)
    return pointwise(func, *args, **kwargs)


def _powers(mode: Routed, func: Any, x: Any, power: Any, *args: Any, **kwargs: Any) -> Any:
    if mode.gpu:
        return func(x, power, *args, **kwargs)
    if isinstance(x, Tensor) and isinstance(power, Tensor):
        x, power = torch.broadcast_tensors(x, power)
        return func(flat(x), flat(power))[: x.numel()].view(x.shape)
    if isinstance(power, Tensor):  # a number to the power of a tensor
        return func(x, flat(power), *args, **kwargs)[: power.numel()].view(power.shape)
    return pointwise(func, x, power, *args, **kwargs)


def _times(mode: Routed, func: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    """A complex product by real ones: torch's loop and its remainder may fuse them otherwise."""
    if kwargs or not (_is_complex(x) or _is_complex(y)):
        with mode.unrouted():
            return func(x, y, **kwargs)
    if not _is_complex(y):
        return torch.complex(x.real * y, x.imag * y)
    if not _is_complex(x):
        return torch.complex(x * y.real, x * y.imag)
    return torch.complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def _is_complex(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_complex()


def _polar(mode: Routed, func: Any, abs: Tensor, angle: Tensor) -> Tensor:
    return torch.complex(abs * pointwise(torch.cos, angle), abs * pointwise(torch.sin, angle))


def _linear(mode: Routed, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight is not _head():
        return mode.by_weight(input, weight, bias)
    input, weight, bias = mode.cast_all((input, weight, bias))
    return round_to_format(mode.linear(input, weight, bias, wide=True).float(), mode.logits_format)


def _matmul(mode: Routed, func: Any, input: Any, other: Any, **kwargs: Any) -> Any:
    x, y = input, other
    if isinstance(x, Tensor) and isinstance(y, Tensor) and not kwargs:
        if x.dim() >= 2 and y.dim() >= 2 and x.shape[-1] == 1:  # an outer product: no sum
            x, y = mode.cast_all((x, y))
            return x * y
        if mode.fp8 is None:
            x, y = mode.cast_all((x, y))
        if x.dim() >= 2 and y.dim() == 2:
            return mode.by_weight(x, y.t())
        if x.dim() == 2 and y.dim() == 3 and _is_weight(x):
            return mode.by_weight(y.transpose(1, 2), x).transpose(1, 2)
        if x.dim() == y.dim() == 3 and len(x) == len(y) and _is_weight(y):  # each expert's rows
            return torch.stack([mode.by_weight(rows, weight.t()) for rows, weight in zip(x, y, strict=True)])
    with mode.unrouted():
        return func(*mode.cast_all((input, other)), **kwargs)


def _addmm(mode: Routed, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, **kwargs: Any) -> Tensor:
    if kwargs or input.dim() != 1:
        with mode.unrouted():
            return func(*mode.cast_all((input, mat1, mat2)), **kwargs)
    if mode.fp8 is None:
        mat1, mat2 = mode.cast_all((mat1, mat2))
    return mode.by_weight(mat1, mat2.t(), input)


def _is_master(x: Any) -> bool:
    return isinstance(x, nn.Parameter) and x.dtype is torch.float32


def _is_weight(x: Tensor) -> bool:
    return isinstance(base_of(x), nn.Parameter) or hasattr(base_of(x), "_of_a_weight")


def base_of(x: Tensor) -> Tensor:
    """The tensor that ``x`` is a view of, or itself."""
    return x if x._base is None else x._base


def _rows(mode: Routed, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A reduction or a softmax over one dimension, taken to the last place."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return func(x, *args, **kwargs)
    dim, args = (kwargs.pop("dim"), args) if "dim" in kwargs else (args[0], args[1:]) if args else (None, ())
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    if type(dim) is not int:
        with mode.unrouted():
            return func(x, *args, **kwargs) if dim is None else func(x, dim, *args, **kwargs)
    at = dim % x.dim()
    if mode.gpu and func.__name__ not in gpu.REDUCTIONS:
        with mode.unrouted():
            return func(x, dim, *args, **kwargs)
    over = functools.partial(gpu.of_rows, func) if mode.gpu else lambda x, *rest, **more: func(x, -1, *rest, **more)
    if at == x.dim() - 1:
        return over(x.contiguous(), *args, **kwargs)
    out = over(x.movedim(at, -1).contiguous(), *args, **kwargs)
    return out.movedim(-1, at) if out.dim() == x.dim() else out


def _length(mode: Routed, func: Any, x: Tensor, p: Any = 2, *args: Any, **kwargs: Any) -> Tensor:
    """A vector's length, over the last dimension."""
    dim = kwargs.get("dim", args[0] if args else None)
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    if mode.gpu and dim in (-1, x.dim() - 1) and p in (2, "fro"):
        return gpu.length(x.contiguous(), bool(kwargs.get("keepdim", len(args) > 1 and args[1])))
    with contextlib.nullcontext() if dim in (-1, x.dim() - 1) and not mode.gpu else mode.unrouted():
        return func(x.contiguous(), p, *args, **kwargs)


def _norms(mode: Routed, func: Any, input: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Tensor:
    if mode.gpu and len(normalized_shape) == 1:
        return gpu.norm(func, input.contiguous(), normalized_shape, *args, **kwargs)
    with contextlib.nullcontext() if len(normalized_shape) == 1 else mode.unrouted():
        return func(input.contiguous(), normalized_shape, *args, **kwargs)


def _normalize(mode: Routed, func: Any, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    last = dim % input.dim() == input.dim() - 1
    if mode.gpu and last and p == 2:
        return input / gpu.length(input.contiguous(), keepdim=True).clamp_min(eps)
    with contextlib.nullcontext() if last and not mode.gpu else mode.unrouted():
        return func(input.contiguous(), p, dim, eps)


def _conv1d(
    mode: Routed, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """A depthwise convolution (B,C,T) * (C,1,K): products of each tap, added from the first on."""
    stride, padding, dilation = (x[0] if isinstance(x, list | tuple) else x for x in (stride, padding, dilation))
    if (stride, dilation, groups) != (1, 1, weight.shape[0]) or weight.shape[1] != 1 or type(padding) is not int:
        with mode.unrouted():
            return func(input, weight, bias, stride, padding, dilation, groups)
    x, taps = F.pad(input, (padding, padding)) if padding else input, weight.shape[-1]
    length = x.shape[-1] - taps + 1
    out = x[..., :length] * weight[:, 0, 0, None]
    for tap in range(1, taps):
        out = out + x[..., tap : tap + length] * weight[:, 0, tap, None]
    return out if bias is None else out + bias[:, None]


def _dropout(
    mode: Routed, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if training and p > 0:
        raise MantissaError(
            f"adopt: the model drops out values (p={p}) while it trains, which no rollout would repeat; "
            "set its dropout to 0, or call model.eval() first"
        )
    return input


def _names(names: str, *homes: Any) -> set[Any]:
    return {getattr(home, name) for name in names.split() for home in homes if hasattr(home, name)}


_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_AS_THEY_ARE = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "device", "requires_grad", "is_cuda", "grad", "data", "layout", "ndim", "_base", "is_leaf")
} | _names("size dim numel stride is_floating_point is_contiguous data_ptr register_hook", torch.Tensor)
# Whose routes cast: they must know the head, and the master of what is quantised.
_AS_THEY_ARE |= {F.linear} | _names("matmul mm bmm __matmul__ addmm", torch, torch.Tensor)
_PICKED = {F.embedding, torch.Tensor.__getitem__, torch.Tensor.select, torch.select}
_POINTWISE = (
    "exp exp2 expm1 log log2 log10 log1p sigmoid tanh cos sin tan acos asin atan cosh sinh erf erfc rsqrt silu gelu "
    "softplus logsigmoid mish elu selu celu hardswish hardsigmoid hardtanh leaky_relu relu6 logit"
)
_REDUCTIONS = "sum mean amax amin var std prod softmax log_softmax logsumexp"
ROUTES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_names(_POINTWISE, torch, torch.Tensor, F, torch._C._nn, torch.special), _pointwise),
    **dict.fromkeys(_names("pow __pow__ __rpow__ float_power", torch, torch.Tensor), _powers),
    **dict.fromkeys(_names(_REDUCTIONS, torch, torch.Tensor, F), _rows),
    **dict.fromkeys(_names("layer_norm rms_norm", torch, F), _norms),
    **dict.fromkeys(_names("matmul mm bmm __matmul__", torch, torch.Tensor), _matmul),
    **dict.fromkeys(_names("addmm", torch, torch.Tensor), _addmm),
    **dict.fromkeys(_names("conv1d", torch, F), _conv1d),
    **dict.fromkeys(_names("dropout", torch, F), _dropout),
    **dict.fromkeys(_names("mul __mul__ __rmul__ multiply", torch, torch.Tensor), _times),
    **dict.fromkeys((torch.norm, torch.Tensor.norm, torch.linalg.vector_norm), _length),
    torch.polar: _polar,
    F.linear: _linear,
    F.normalize: _normalize,
}


class _Running(threading.local):
    """The modes that a thread is in, with what a root knows of the call: its head and where its rows begin."""

    def __init__(self) -> None:
        self.heads: list[Tensor | None] = []
        self.places: list[Any] = []
        self.modes: list[Routed] = []


RUNNING = _Running()


def _head() -> Tensor | None:
    return RUNNING.heads[-1] if RUNNING.heads else None
