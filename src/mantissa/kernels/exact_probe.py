"""The probe behind ``kernels=exact`` on a CPU: which ways of computing give a row the same bits wherever it stands.

Nothing is taken from a table of processors or libraries. Each way of ``exact_plan`` is run on the model's own shapes,
on full fp32 significands (values on a half grid would hide differences), with one thread and with as many as are set,
and each row's result is compared bit by bit with the same row's among others. The first way without a difference is
chosen, for each product and for the attention. What has no second way (norms, SwiGLU, softmax, rotation) must pass.

A probe samples: it can refute a way, not prove it. So the loop compares every sampled token's log-prob as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.kernels import exact_attention, exact_products, probe_fp8
from mantissa.kernels.exact import ExactKernels
from mantissa.kernels.exact_plan import WAYS, Choice, ExactPlan, ModelShapes, Way
from mantissa.precision import FP32, ResolvedRole

PRODUCTS = (Choice("padded rows", 16), Choice("row tiles", 64), Choice("fp64", 16))
ATTENTION = (Choice("padded rows", 4), Choice("padded rows", 16), Choice("row tiles", 16), Choice("fp64", 16))
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 19, 31, 33, 37, 47, 64, 65, 97, 129, 200, 255, 509)
_FEW = (1, 5, 17, 33)  # where a row is dear: a head of 150,000 words
_OPERATIONS = 1.5e10  # floating-point operations that the products' probe may spend: 0.15 s at 100 GFLOP/s
_SMALL: tuple[int, ...] = (8, 8)  # the products by which ``probe`` proves a format; fp8 has its own


def plan_exact(
    shapes: ModelShapes, role: ResolvedRole, device: torch.device | str, only: Way | None = None
) -> ExactPlan:
    """Probe this machine over ``shapes`` and choose. ``only`` restricts the choice to one way (for tests).

    Torch's number of threads is restored. ``MantissaError`` where not even the last way gives equal rows.
    """
    device = torch.device(device)
    if device.type != "cpu" or not role.exact:
        raise ValueError(f"plan_exact is for an exact role on a CPU, not for {role.kernels} {role.role} on {device}")
    if only is not None and only not in WAYS:
        raise ValueError(f"only={only!r}: expected one of {', '.join(WAYS)}")
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    sizes = {**shapes.sizes, _SMALL: "", **({} if role.fp8 is None else {probe_fp8.WEIGHT: ""})}
    budget = _OPERATIONS / len(sizes)
    with torch.no_grad():
        products: dict[tuple[int, ...], Choice] = {}
        for size, names in sizes.items():
            check = _product_check(size, shapes.rows, budget, generator)
            products[size] = _first(f"the product {names} {size[1]}x{size[0]}", PRODUCTS, check, only, role)
        attention = _first("attention", ATTENTION, _attention_check(shapes, generator), only, role)
        plan = ExactPlan(products, attention, shapes.sizes)
        checked = _check_rest(shapes, ExactKernels(FP32, plan), role, generator)
    threads = " and ".join(str(n) for n in _thread_counts())
    seconds = time.perf_counter() - started
    return ExactPlan(
        products, attention, shapes.sizes, f"row-invariant too: {checked}; {threads} threads; probed in {seconds:.1f} s"
    )


Check = Callable[[Choice], tuple[str, str]]  # gives what was compared, and where it first differed ("" for nowhere)


def _first(what: str, choices: tuple[Choice, ...], check: Check, only: Way | None, role: ResolvedRole) -> Choice:
    """The first choice without a difference."""
    failures: list[str] = []
    for choice in choices:
        if only is not None and choice.way != only:
            continue
        compared, difference = check(choice)
        if not difference:
            return Choice(choice.way, choice.rows, "; ".join([*failures, f"equal over {compared}"]))
        failures.append(f"{choice} differ at {difference}")
    raise MantissaError(
        f"precision.kernels=exact: on this CPU no way of computing {what} gives a row the same bits wherever it "
        f"stands, in {role.active} ({'; '.join(failures)}); choose kernels=fast, or another torch build"
    )


def _product_check(size: tuple[int, ...], rows: int, budget: float, generator: torch.Generator) -> Check:
    """Rows among 1 to ``rows`` others, at two offsets, with the weight at another alignment in memory."""
    outputs, inputs = size
    affordable = int(budget / (2 * inputs * outputs))  # rows in all: two thread counts, two offsets
    spent = 4 * sum(_COUNTS)
    most = max(_FEW[-1] + 3, min(rows, (affordable - spent) // 4))
    counts = [n for n in (_COUNTS if affordable > spent else _FEW) if n < most] + [most]
    x_ME = torch.randn(most, inputs, generator=generator)
    shifted = torch.randn(outputs * inputs + 1, generator=generator)[1:].view(outputs, inputs)
    aligned = shifted.clone()

    def check(choice: Choice) -> tuple[str, str]:
        expected_MF = exact_products.product(x_ME, aligned, choice)
        for threads in _each_thread_count():
            for count in counts:
                for start in {0, min(3, most - count)}:
                    weight = shifted if start else aligned
                    got = exact_products.product(x_ME[start : start + count], weight, choice)
                    if not torch.equal(got, expected_MF[start : start + count]):
                        return "", f"{count} rows, {threads} threads"
        return f"1 to {most} rows", ""

    return check


def _attention_check(shapes: ModelShapes, generator: torch.Generator) -> Check:
    """Rows of a causal pass against passes of fewer sequences and positions, and against a cache of any length."""
    kv_heads = min(shapes.kv_heads, 4)
    heads, size = kv_heads * (shapes.heads // shapes.kv_heads), shapes.head_dim
    length = min(shapes.length, 200)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = drawn(3, heads, length, size), drawn(3, kv_heads, length, size), drawn(3, kv_heads, length, size)
    lengths = sorted({n for n in (1, 2, 5, 16, 17, 40, 64, 65, 129, length) if n <= length})
    long_q, long_kv = drawn(1, heads, 64, size), drawn(2, 1, kv_heads, shapes.length + 64, size)

    def check(choice: Choice) -> tuple[str, str]:
        expected = _causal(q, k, v, choice)
        for threads in _each_thread_count():
            for n in lengths:
                for rows in (slice(0, 3), slice(1, 2)):
                    got = _causal(q[rows, :, :n], k[rows, :, :n], v[rows, :, :n], choice)
                    if not torch.equal(got, expected[rows, :, :n]):
                        return "", f"{n} positions of {rows.stop - rows.start} sequences, {threads} threads"
            failed = _cache_differs(q, k, v, expected, choice, generator)
            failed = failed or _long_differs(long_q, long_kv, shapes.length, choice)
            if failed:
                return "", f"{failed}, {threads} threads"
        return f"1 to {length} positions, caches to {shapes.length + 64}", ""

    return check


def _causal(q: Tensor, k: Tensor, v: Tensor, choice: Choice) -> Tensor:
    return exact_attention.ExactAttention.apply(q, k, v, FP32, FP32, choice)


def _cache_differs(
    q: Tensor, k: Tensor, v: Tensor, expected: Tensor, choice: Choice, generator: torch.Generator
) -> str:
    """Decode rows in batches of 1 to 33, each at its own position, in caches of several lengths with rubbish behind."""
    for count in (1, 2, 3, 8, 33):
        row = torch.randint(0, q.shape[0], (count,), generator=generator)
        position = torch.randint(0, q.shape[2], (count,), generator=generator)
        longest = -(-(int(position.max()) + 1) // exact_attention.KEYS) * exact_attention.KEYS
        for keys in (longest, longest + 16, longest + 144):
            kept = min(keys, k.shape[2])
            cache = torch.randn(2, count, k.shape[1], keys, k.shape[3], generator=generator)
            cache[0, :, :, :kept], cache[1, :, :, :kept] = k[row, :, :kept], v[row, :, :kept]
            got = exact_attention.cached(q[row, :, position], cache[0], cache[1], position + 1, FP32, choice)
            if not torch.equal(got, expected[row, :, position]):
                return f"decode of {count} rows in a cache of {keys}"
    return ""


def _long_differs(q: Tensor, kv: Tensor, length: int, choice: Choice) -> str:
    """The last positions of a sequence of ``length``, as training or a chunk has them, and from a longer cache."""
    count = min(q.shape[2], length)
    expected = exact_attention.causal(q[:, :, :count], kv[0, :, :, :length], kv[1, :, :, :length], FP32, choice)
    for i in sorted({0, count // 2, count - 1}):
        position = length - count + i
        got = exact_attention.cached(q[:, :, i], kv[0], kv[1], torch.tensor([position + 1]), FP32, choice)
        if not torch.equal(got, expected[:, :, i]):
            return f"decode at position {position}"
    return ""


def _check_rest(shapes: ModelShapes, kernels: ExactKernels, role: ResolvedRole, generator: torch.Generator) -> str:
    """Everything that has one way only: each row alone, and among others, must be the same."""
    widths = sorted({inputs for _, inputs, _ in shapes.products} | {shapes.head_dim})
    checks: list[tuple[str, int, Callable[[Tensor], Tensor]]] = []
    for width in widths:
        weight = torch.randn(width, generator=generator)
        checks.append((f"rms_norm {width}", width, lambda x, w=weight: kernels.rms_norm(x, w, 1e-6)))  # type: ignore[misc]
    wide = max(widths)
    checks.append((f"swiglu {wide}", wide, lambda x: kernels.swiglu(x * 8, x)))
    checks.append((f"softmax {shapes.vocabulary}", shapes.vocabulary, lambda x: torch.softmax(x * 4, -1)))
    checks.append((f"log_softmax {shapes.vocabulary}", shapes.vocabulary, lambda x: torch.log_softmax(x * 4, -1)))
    half = shapes.head_dim // 2
    checks.append((f"rotation {half}", half, lambda x: torch.cat(((x * 999).cos(), (x * 999).sin()), -1)))
    for name, width, function in checks:
        most = max(5, min(517, 2_000_000 // width))
        x = torch.randn(most, width, generator=generator)
        expected = function(x)
        for threads in _each_thread_count():
            for count in (n for n in (1, 2, 3, 5, 16, 17, 33, 129, most) if n <= most):
                for start in {0, min(3, most - count)}:
                    if not torch.equal(function(x[start : start + count]), expected[start : start + count]):
                        raise MantissaError(
                            f"precision.kernels=exact: on this CPU {name} gives a row other bits among {count} rows "
                            f"than among {most}, {threads} threads, and has no other way, in {role.active}; choose "
                            "kernels=fast, or another torch build"
                        )
    return ", ".join(name for name, _, _ in checks)


def _thread_counts() -> list[int]:
    return sorted({1, torch.get_num_threads()})


def _each_thread_count() -> Iterator[int]:
    """1 and the present number, set in turn; the present one is restored."""
    before = torch.get_num_threads()
    try:
        for threads in _thread_counts():
            torch.set_num_threads(threads)
            yield threads
    finally:
        torch.set_num_threads(before)
