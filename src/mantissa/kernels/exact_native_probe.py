"""The probe behind ``kernels=exact`` on a GPU: does a row get the same bits wherever it stands, in this model's shapes?

The Triton kernels have one way each, so nothing is chosen here: what differs is an error. As on a CPU a probe samples,
and can refute a kernel but not prove it; so the loop compares every sampled token's log-prob as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.kernels.exact_plan import ModelShapes
from mantissa.kernels.interface import Kernels

_COUNTS = (1, 2, 3, 5, 16, 17, 33, 129, 300)  # rows
_VALUES = 1 << 28  # that a product may give: 1 GiB of fp32 logits
_LONGEST = 1100  # positions of a sequence: more than two chunks of keys


def check_invariance(kernels: Kernels, shapes: ModelShapes, device: torch.device | str) -> str:
    """Compare each row among few with the same row among many, bit by bit; returns what was compared.

    Products, norms, SwiGLU, the log-prob, and attention, of whole sequences against a cache. ``MantissaError`` names
    the first that differs.
    """
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(kernels.dtype)

    compared = []
    with torch.no_grad():
        for name, width, most, work in _operations(kernels, shapes, drawn, generator):
            x = drawn(most, width)
            whole = work(x, 0)
            for count in (*(n for n in _COUNTS if n < most), most):
                for start in {0, min(3, most - count)}:
                    if not torch.equal(work(x[start : start + count], start), whole[start : start + count]):
                        raise _refuted(f"{name} gives a row other bits among {count} rows than among {most}", kernels)
            compared.append(name)
        compared.append(_attention(kernels, shapes, drawn))
    return "row-invariant: " + ", ".join(compared)


Work = Callable[[Tensor, int], Tensor]  # rows, and the place of the first among all


def _operations(
    kernels: Kernels, shapes: ModelShapes, drawn: Callable[..., Tensor], generator: torch.Generator
) -> Iterator[tuple[str, int, int, Work]]:
    """What is computed row by row: its name, a row's width, how many rows there are at most, and how."""
    few = _COUNTS[-1]
    for (outputs, inputs), names in shapes.sizes.items():
        weight = drawn(outputs, inputs)
        multiply = kernels.logits if outputs == shapes.vocabulary else kernels.linear
        most = max(few, min(shapes.rows, _VALUES // outputs))
        yield f"{names} {inputs}x{outputs}", inputs, most, lambda x, _, f=multiply, w=weight: f(x, w)  # type: ignore[misc]
    widths = sorted({inputs for _, inputs, _ in shapes.products} | {shapes.head_dim})
    for width in widths:
        scale = drawn(width)
        yield f"rms_norm {width}", width, few, lambda x, _, w=scale: kernels.rms_norm(x, w, 1e-6)  # type: ignore[misc]
    yield f"swiglu {widths[-1]}", widths[-1], few, lambda x, _: kernels.swiglu(x * 8, x)
    words, device = shapes.vocabulary, generator.device
    tokens = torch.randint(0, words, (few,), generator=generator, device=device)
    yield (
        f"token_logprob {words}",
        words,
        few,
        lambda x, start: kernels.token_logprob(x.float() * 4, tokens[start : start + len(x)], 0.7),
    )


def _attention(kernels: Kernels, shapes: ModelShapes, drawn: Callable[..., Tensor]) -> str:
    length, size = min(shapes.length, _LONGEST), shapes.head_dim
    q, k, v = (drawn(3, heads, length, size) for heads in (shapes.heads, shapes.kv_heads, shapes.kv_heads))
    whole = kernels.causal_attention(q, k, v)
    for kept in {1, min(65, length), length - 1} - {0}:
        few = kernels.causal_attention(*(x[1:2, :, :kept] for x in (q, k, v)))
        if not torch.equal(few, whole[1:2, :, :kept]):
            raise _refuted(f"attention gives {kept} positions of one sequence other bits than of three", kernels)
    for at in sorted({n - 1 for n in (1, 2, 64, 65, 129, 512, 513, 700, length) if n <= length}):
        keys, values = (torch.cat((x[:, :, : at + 1], drawn(3, x.shape[1], 70, size)), 2) for x in (k, v))
        lengths = torch.full((3,), at + 1, device=q.device)
        if not torch.equal(kernels.cached_attention(q[:, :, at], keys, values, lengths), whole[:, :, at]):
            raise _refuted(f"attention gives position {at} other bits from a cache than in its sequence", kernels)
    return f"attention of 1 to {length} positions"


def _refuted(what: str, kernels: Kernels) -> MantissaError:
    return MantissaError(
        f"precision.kernels=exact: on this GPU {what}, in {kernels.format}; choose kernels=fast, or another build of "
        "Triton"
    )
