"""The probe behind ``kernels=exact``: which calls of a CPU's library give a row the same bits wherever it stands.

Nothing is taken from a table of processors or libraries. Products and attention are made of a few shapes of calls
(``exact/plan.py``), and here each of them is tried on the model's own sizes, on full fp32 significands (values on a
half grid would hide differences): one size is the reference, in which a row must be the same at every place, and every
other must give all its rows the reference's bits, with the number of threads in use, at two places in memory. A shape
that does not is not used. What has no second way (norms, SwiGLU, softmax, rotation) must pass.

Whether one thread gives these very bits too is tried as well: where it does, the plan holds for both numbers.

A product of bf16 tensors shows 8 bits of its fp32 sum, which would hide nearly every other order. So half of the sums
tried cancel: their large terms stand there twice, once with each sign, at random places. What is left, a few small
terms and what the additions rounded away, has as few digits as bf16 holds, and others in another order. A sum that is
kept in less than fp32 leaves more, and is refused. The other half do not cancel, and show how the result is rounded.
Where the model has biases all are tried with one as well, for the library adds it within its product.

The numbers are random: two orders of a sum that agree on all of some thousand sums are taken to be one. So the loop
compares every sampled token's log-prob as well.

On a GPU the Triton kernels have one way each, so ``check_invariance`` chooses nothing: what differs is an error.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import compiled, cpu
from mantissa.kernels import probe as probes
from mantissa.kernels.compiled import Kind, Part
from mantissa.kernels.cpu import Products, packable, packed
from mantissa.kernels.exact.bf16 import ExactBf16Kernels
from mantissa.kernels.exact.kernels import (
    BLOCK,
    KEYS,
    ExactAttention,
    ExactKernels,
    batched,
    cached,
    causal,
    product,
)
from mantissa.kernels.exact.plan import WAYS, AttentionChoice, Choice, ExactPlan, ModelShapes, Way
from mantissa.kernels.interface import Kernels
from mantissa.kernels.roles import ResolvedRole
from mantissa.precision import BF16, FP16, FP32, round_to_format

_FEW = (4, 8)  # rows of a decode step that holds a few sequences: 0.6 of the time of 16 (576 x 1536, Zen 5)
_TILES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
_OPERATIONS = 8e9  # floating-point operations of the largest tile: larger ones are hardly faster
_CALLS = 16  # of one size, at most: a call of two threads takes milliseconds on a busy machine, however small it is
_ENOUGH = 48  # rows of a tile that is large enough not to give up the small ones for larger: few rows are dear in it
_SMALL: tuple[int, ...] = (8, 8)  # the products by which ``probe`` proves a format; fp8 has its own


def plan_exact(
    shapes: ModelShapes,
    role: ResolvedRole,
    device: torch.device | str,
    fastest: Way = WAYS[0],
    simulated_too: bool = False,
    table: cpu.CpuProducts | None = None,
    masked: bool = False,
) -> ExactPlan:
    """Probe this machine over ``shapes`` and choose: for each product, and for attention, ``fastest`` or a safer way.

    ``simulated_too``: the plan of a role in the processor's own bf16 serves a simulated one beside it as well.
    ``table``: what was measured of compiled products; None: on this machine. ``masked``: attention may have any mask,
    which the compiled one has not.

    Torch's number of threads is restored. ``MantissaError`` where not even the last way gives equal rows.
    """
    device = torch.device(device)
    if device.type != "cpu" or not role.exact:
        raise ValueError(f"plan_exact is for an exact role on a CPU, not for {role.kernels} {role.role} on {device}")
    if fastest not in WAYS:
        raise ValueError(f"fastest={fastest!r}: expected one of {', '.join(WAYS)}")
    started, generator = time.perf_counter(), torch.Generator().manual_seed(0)
    own = role.active is BF16 and role.backend == "native"
    small = {_SMALL: "", **({} if role.fp8 is None else {probes.WEIGHT: ""})}
    wide = shapes.wide if own and not simulated_too else shapes.sizes
    multiplied = [(False, *each) for each in (wide | small).items()]
    multiplied += [(True, *each) for each in (shapes.rounded | small).items()] if own else []
    ways = WAYS[WAYS.index(fastest) :]
    faster = _compiled_parts(table)
    # What multiplies bf16 pairs, and what does not.
    in_order = own and "pairs" in faster, ("fp32" if simulated_too else _kind_of(role)) in faster
    present, agree = torch.get_num_threads(), True
    with torch.no_grad():
        products: dict[bool, dict[tuple[int, ...], Choice]] = {True: {}, False: {}}
        for bf16, size, names in multiplied:
            pairs = own and (bf16 or not simulated_too)
            tried = _Product(size, shapes, generator, bf16, pairs, in_order[not pairs])
            choice = tried.choose(f"the product {names} {size[1]}x{size[0]}", ways, role)
            products[bf16][size] = dataclasses.replace(choice, names=names)
            if present > 1:
                with threads(1):
                    agree = agree and tried.holds(choice)
        attends = not masked and "attention" in faster and compiled.computes(shapes.head_dim, role.active)
        heads, attention = _planned_attention(
            shapes, ways, role, generator, own and not simulated_too and cpu.has_bf16(), attends
        )
        if present > 1:
            with threads(1):
                agree = agree and heads.holds(attention)
        proven = tuple(sorted({1, present})) if agree else (present,)
        length = -(-shapes.length // BLOCK) * BLOCK  # attention rounds a number of keys up to a block at most
        plan = ExactPlan(products[False], attention, products[True], "", proven, length)
        wide_plan = dataclasses.replace(plan, attention=dataclasses.replace(attention, bf16=False))
        checked = _check_rest(shapes, ExactKernels(FP32, wide_plan, table=table), role, generator)
        if own:  # whose operations begin with fp32's, and round
            _check_rows(ExactBf16Kernels(plan, table=table), shapes, [], role, generator)
    numbers, seconds = " and ".join(map(str, proven)), time.perf_counter() - started
    checked = f"row-invariant too: {checked}; {numbers} threads; probed in {seconds:.1f} s"
    return dataclasses.replace(plan, checked=checked)


def _compiled_parts(table: cpu.CpuProducts | None) -> tuple[Part, ...]:
    """What was measured to be faster; nothing by a table without attention, of a run that began with tiles."""
    faster = (cpu.products() if table is None else table).compiled
    return faster if "attention" in faster else ()


def _kind_of(role: ResolvedRole) -> Kind:
    if role.fp8 is not None:
        return "fp32"
    return "bf16" if role.active is BF16 else "fp16" if role.active is FP16 else "fp32"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within this, torch uses ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _refuted(what: str) -> MantissaError:
    return MantissaError(f"precision.kernels=exact: on this CPU {what}; choose kernels=fast, or another torch build")


def _none_holds(what: str, failures: list[str], role: ResolvedRole) -> MantissaError:
    why = f"gives a row the same bits wherever it stands, in {role.active} ({'; '.join(failures)})"
    return _refuted(f"no way of computing {what} {why}")


def _why(left_out: list[str]) -> str:
    return f"all shapes tried agree but {', '.join(left_out)}" if left_out else "all shapes tried agree"


class _Drawn(NamedTuple):
    """Rows, the ways in which they are called (the row that a call begins with, and its weight), and a bias."""

    x_ME: Tensor
    placed: tuple[tuple[int, Tensor], ...]
    bias_F: Tensor | None = None

    @staticmethod
    def of(x_ME: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> _Drawn:
        """The weight as it is, elsewhere in memory, and in oneDNN's own layout."""
        shifted = weight_FE.new_empty(weight_FE.numel() + 1)[1:].view(weight_FE.shape).copy_(weight_FE)
        return _Drawn(x_ME, ((0, weight_FE), (1, shifted), (0, packed(weight_FE))), bias_F)


def _drawn_fp32(rows: int, size: tuple[int, ...], generator: torch.Generator) -> _Drawn:
    return _Drawn.of(torch.randn(rows, size[1], generator=generator), torch.randn(size, generator=generator))


def _drawn_bf16(rows: int, size: tuple[int, ...], generator: torch.Generator) -> _Drawn:
    """Values of bf16 such that every second row's sums cancel but for a few small terms, and a bias as small."""
    (outputs, inputs), small = size, 2.0**-18
    pairs = (inputs - max(1, inputs // 4)) // 2
    x_ME, weight_FE = torch.randn(rows, inputs, generator=generator), torch.randn(size, generator=generator)
    weight_FE[:, pairs : 2 * pairs] = -weight_FE[:, :pairs]
    x_ME[::2, pairs : 2 * pairs] = x_ME[::2, :pairs]
    x_ME[::2, 2 * pairs :] *= small
    order, bias_F = torch.randperm(inputs, generator=generator), torch.randn(outputs, generator=generator) * small
    return _Drawn.of(x_ME[:, order].bfloat16(), weight_FE[:, order].bfloat16(), bias_F.bfloat16())


class _Product:
    """One product's tiles. Rows are drawn once; row r of the reference stands in no tile twice at the same place.

    ``bf16``: operands and result are bf16 tensors; where no tiles of such products agree, fp32 ones of the widened.
    ``pairs``: compiled ones are of bf16 values, multiplied as such. ``in_order``: they were measured to be fast.
    """

    def __init__(
        self,
        size: tuple[int, ...],
        shapes: ModelShapes,
        generator: torch.Generator,
        bf16: bool,
        pairs: bool,
        in_order: bool,
    ) -> None:
        (outputs, inputs), self.biased, self.rounded = size, shapes.biased, bf16
        fits = in_order and compiled.fits(size, "pairs" if pairs else "fp32")
        self.in_order = Choice("in order", (), bf16=pairs) if fits else None
        self.sizes = [
            n for n in _TILES if n <= 64 or (n < 2 * shapes.rows and 2.0 * n * inputs * outputs <= _OPERATIONS)
        ]
        self.size, self.generator = size, generator
        # How the library is called, from the fastest to the safest.
        self.libraries = [Choice("tiles", (), onednn=True)] if packable(size) else []
        self.libraries.append(Choice("tiles", ()))
        self.missing = bf16 and not cpu.has_bf16()
        if bf16 and not self.missing:
            self.libraries.insert(0, Choice("tiles", (), onednn=True, bf16=True))
        self._drawn: dict[bool, _Drawn] = {}
        self.reference_MF, self._reference = torch.empty(0), Choice("tiles", ())

    def drawn(self, bf16: bool) -> _Drawn:
        """The operands in fp32 or bf16; drawn where they are needed."""
        if bf16 not in self._drawn:
            draw = _drawn_bf16 if bf16 else _drawn_fp32
            self._drawn[bf16] = draw(self.sizes[-1] + 1, self.size, self.generator)
        return self._drawn[bf16]

    def choose(self, what: str, ways: tuple[Way, ...], role: ResolvedRole) -> Choice:
        failures = ["this processor has no products of bf16 tensors"] if self.missing else []
        for way in ways:
            if way == "in order":
                if self.in_order is not None and self._any_rows(self.in_order):
                    return dataclasses.replace(self.in_order, why="each output is one sum over the inputs in order")
                continue
            for library in self.libraries if way != "fp64" else self.libraries[-1:]:
                found: list[Choice] = []
                for base in (16, 64) if way == "tiles" else (64,):
                    if not found or found[0].sizes[-1] < _ENOUGH:
                        found += self._from(dataclasses.replace(library, way=way, sizes=(base,)), failures)
                if found:
                    best = max(found, key=lambda choice: choice.sizes[-1])  # the first of equals: it serves few rows
                    self._refer_to(dataclasses.replace(best, sizes=best.sizes[:1], why=""))
                    return dataclasses.replace(best, why="; ".join([*failures, best.why]))
        raise _none_holds(what, failures, role)

    def _from(self, base: Choice, failures: list[str]) -> list[Choice]:
        """The tiles that agree with those of ``base``; none where these do not agree among themselves."""
        self._refer_to(dataclasses.replace(base, why=""))
        if not self._agrees(base):
            failures.append(f"{base} differ")
            return []
        if base.bf16 and not self._keeps_sums():
            failures.append(f"{base} add in less than fp32")
            return []
        if base.way != "tiles":
            return [dataclasses.replace(base, why="a row is the same at every place")]
        others = [*_FEW, *(n for n in self.sizes if n > base.sizes[0])]
        good = [n for n in others if self._agrees(dataclasses.replace(base, sizes=(n,)))]
        why = _why([str(n) for n in others if n not in good])
        return [dataclasses.replace(base, sizes=tuple(sorted((*base.sizes, *good))), why=why)]

    def _refer_to(self, base: Choice) -> None:
        if self._reference != base:
            self._reference, self.reference_MF = base, self._computed(base, 0, None, self.drawn(base.bf16).placed[0][1])

    def _computed(self, choice: Choice, start: int, stop: int | None, weight_FE: Tensor) -> Tensor:
        """Some rows' results; with a bias's beside them where there is one."""
        x_ME, _, bias_F = self.drawn(choice.bf16)
        if choice.bf16 and not self.rounded:  # values of bf16, and an fp32 result
            x_ME, bias_F = x_ME.float(), None
        plain_MF = product(x_ME[start:stop], weight_FE, choice)
        if bias_F is None or not self.biased:
            return plain_MF
        return torch.cat((plain_MF, product(x_ME[start:stop], weight_FE, choice, bias_F)), 1)

    def _any_rows(self, choice: Choice) -> bool:
        """Whether rows among few have the bits that they have among many, and in bf16 the sums are fp32's."""
        drawn = self.drawn(choice.bf16)
        weight_FE = compiled.lay(drawn.placed[0][1], "pairs" if choice.bf16 else "fp32")

        def work(x: Tensor, start: int) -> Tensor:
            return self._computed(choice, start, start + len(x), weight_FE)

        x_ME = drawn.x_ME[: ROWS[-1] + 4]
        if self._reference != choice:
            self._reference, self.reference_MF = choice, work(x_ME, 0)
        return not other_bits(work, x_ME, self.reference_MF) and not (choice.bf16 and not self._keeps_sums())

    def holds(self, choice: Choice) -> bool:
        """Whether ``choice`` gives the reference's bits here and now."""
        if choice.way == "in order":
            return self._any_rows(self._reference)
        return all(self._agrees(dataclasses.replace(choice, sizes=(size,))) for size in choice.sizes)

    def _agrees(self, choice: Choice) -> bool:
        """Tiles of one size, as the reference's stand and one row further on, with each weight.

        A row that is the same one place further on, at every place, is the same at all places; and a weight in another
        layout that gives each place the same row's bits gives them at all places too.
        """
        x_ME, placed, _ = self.drawn(choice.bf16)
        size = choice.sizes[0]
        last = min(len(x_ME) - 1 - (len(x_ME) - 1) % size, _CALLS * size)
        for start, weight_FE in placed:
            if weight_FE.is_mkldnn and not choice.onednn:
                continue
            got_MF = self._computed(choice, start, start + last, weight_FE)
            if not torch.equal(got_MF, self.reference_MF[start : start + last]):
                return False
        return True

    def _keeps_sums(self) -> bool:
        """Whether sums that cancel are off by what fp32 rounds away, some 2^-24 of the terms' magnitudes, and bf16's
        rounding of the result, but no more."""
        x_ME, placed, _ = self.drawn(True)
        x_RE, weight_FE, got_RF = x_ME[:16].double(), placed[0][1].double(), self.reference_MF[:16, : self.size[0]]
        exact_RF, terms_RF = x_RE @ weight_FE.t(), x_RE.abs() @ weight_FE.abs().t()
        return bool(((got_RF.double() - exact_RF).abs() <= exact_RF.abs() * 2.0**-8 + terms_RF * 2.0**-18).all())


class _Call(NamedTuple):
    """One shape of attention's two products: so many heads, query rows and keys."""

    heads: int
    rows: int
    keys: int

    def __str__(self) -> str:
        return f"{self.heads} heads x {self.rows} queries x {self.keys} keys"


def _planned_attention(
    shapes: ModelShapes, ways: tuple[Way, ...], role: ResolvedRole, generator: torch.Generator, own: bool, attends: bool
) -> tuple[_Attention, AttentionChoice]:
    """The fastest way that holds: compiled where that ``attends``; where ``own``, by products of bf16 values before
    fp32 ones. ``MantissaError`` if none does."""
    failures: list[str] = []
    if ways[0] == "in order":
        ways = ways[1:]
        heads, in_order = _Attention(shapes, generator, False), AttentionChoice("in order", why="a row is its own")
        difference = heads.together(in_order) if attends else ""
        if attends and not difference:
            return heads, in_order
        failures += [f"in order differ at {difference}"] if attends else []
    for bf16 in (True, False) if own and ways[0] != "fp64" else (False,):
        heads = _Attention(shapes, generator, bf16)
        for way in ways[:1] if bf16 else ways:
            choice = heads.found(way)
            difference = "" if choice is None else heads.together(choice)
            if choice is not None and not difference:
                return heads, dataclasses.replace(choice, why="; ".join([*failures, choice.why]))
            what = f"{way} by bf16 products differ" if bf16 else f"{way} differ"
            failures.append(f"{what} at {difference}" if difference else what)
    raise _none_holds("attention", failures, role)


class _Attention:
    """The calls of attention: each (heads, rows, keys) against (16 heads, 16 positions, a whole block).

    ``bf16``: of values of bf16, multiplied as such. Their sums are fp32, so any values will do.

    Legend: N heads of a call, M query rows, P rows drawn, U heads drawn.
    """

    def __init__(self, shapes: ModelShapes, generator: torch.Generator, bf16: bool) -> None:
        self.shapes, self.group, self.bf16 = shapes, shapes.heads // shapes.kv_heads, bf16
        size, most = shapes.head_dim, 32 * self.group
        self.sizes = [n for n in _HEADS if n <= 16 or 2.0 * n * most * BLOCK * size <= 1.25e8]
        self.q_UPD = self._rounded(torch.randn(4, most, size, generator=generator))
        # A block of a longer cache, as it is met: the keys before it are others'.
        keys_2USD = self._rounded(torch.randn(2, 4, KEYS + BLOCK, size, generator=generator))
        self.k_USD, self.v_USD = keys_2USD[:, :, KEYS:]
        # Rows of a longer matrix, as they are met.
        p_UPS = self._rounded(torch.rand(4, most, BLOCK + KEYS, generator=generator))
        seen = torch.rand(4, most, 1, generator=generator)
        # By the number of keys of a call: rows that see some of them, and the rest of a block as zeros.
        self.p_UPS = {
            keys: p_UPS.masked_fill(torch.arange(BLOCK + KEYS) >= (keys * seen).ceil().clamp(min=1), 0.0)
            for keys in range(KEYS, BLOCK + 1, KEYS)
        }
        self.scores_UPS, self.values_UPD = torch.empty(0), dict[int, Tensor]()

    def _rounded(self, x: Tensor) -> Tensor:
        return round_to_format(x, BF16) if self.bf16 else x

    def found(self, way: Way) -> AttentionChoice | None:
        """The calls of this way that agree; None where they do not."""
        choice = self._tiles() if way == "tiles" else self._only(way)
        return None if choice is None else dataclasses.replace(choice, bf16=self.bf16)

    def holds(self, choice: AttentionChoice) -> bool:
        """Whether the calls of ``choice`` give the reference's bits here and now."""
        if choice.way == "in order":
            return not self.together(choice)
        calls = self._calls(choice.heads, choice.rows, choice.positions, choice.keys)
        return all(self._agrees(choice.way, call) for call in calls) and not self.together(choice)

    def _only(self, way: Way) -> AttentionChoice | None:
        """Calls of one shape: 16 heads, the queries of 16 positions, a whole block of keys."""
        self._refer_to(way)
        if not self._agrees(way, _Call(16, 16 * self.group, BLOCK)):
            return None
        return AttentionChoice(way, (16,), 16 * self.group, (16,), BLOCK, "a row is the same at every place")

    def _tiles(self) -> AttentionChoice | None:
        """The shapes that agree, leaving out first what costs least to do without."""
        self._refer_to("tiles")
        if not self._agrees("tiles", _Call(16, 16 * self.group, BLOCK)):
            return None
        out: list[str] = []

        def good(call: _Call) -> bool:
            agrees = self._agrees("tiles", call)
            if not agrees:
                out.append(str(call))
            return agrees

        heads = tuple(n for n in self.sizes if good(_Call(n, 16 * self.group, BLOCK)))
        wide = all(good(_Call(n, 32 * self.group, BLOCK)) for n in heads)
        positions = (16, 32) if wide else (16,)
        short = all(good(call) for call in self._calls(heads, None, positions, KEYS))
        keys = KEYS if short else BLOCK
        for rows in (4, 16, 16 * self.group):
            if all(good(call) for call in self._calls(heads, rows, (), keys)):
                return AttentionChoice("tiles", heads, rows, positions, keys, _why(out))
        return None

    def _calls(
        self, heads: tuple[int, ...], rows: int | None, positions: tuple[int, ...], keys: int
    ) -> Iterator[_Call]:
        """Every call that attention with these numbers can make."""
        queries = [self.group * n for n in positions]
        if rows is not None:
            queries.append(-(-self.group // rows) * rows)
        for count in heads:
            for query in queries:
                yield from (_Call(count, query, n) for n in range(keys, BLOCK + 1, keys))

    def _drawn(self, call: _Call) -> tuple[Tensor, Tensor]:
        """Which head and which of its rows stand where in a call: N, and N by M, every head's rows at other places."""
        head_N = torch.arange(call.heads) % 4
        row_NM = (torch.arange(call.rows) + 7 * torch.arange(call.heads).unsqueeze(1)) % self.q_UPD.shape[1]
        return head_N, row_NM

    def _refer_to(self, way: Way) -> None:
        """What every row gives in the reference's calls: 16 heads, the queries of 16 positions, a whole block."""

        def whole(x_UPE: Tensor, y_UEF: Tensor) -> Tensor:
            y = y_UEF.repeat(4, 1, 1)
            parts = [batched(x.repeat(4, 1, 1), y, self._alone(way, 16))[:4] for x in x_UPE.split(16 * self.group, 1)]
            return torch.cat(parts, 1)

        self.scores_UPS = whole(self.q_UPD, self.k_USD.transpose(1, 2))
        self.values_UPD = {keys: whole(p_UPS[:, :, :BLOCK], self.v_USD) for keys, p_UPS in self.p_UPS.items()}

    def _agrees(self, way: Way, call: _Call) -> bool:
        """Whether a call gives the reference's scores and values, in every bit."""
        choice, (head_N, row_NM) = self._alone(way, call.heads), self._drawn(call)
        at, keys = (head_N.unsqueeze(1), row_NM), slice(call.keys)
        scores = batched(self.q_UPD[at], self.k_USD[head_N][:, keys].transpose(1, 2), choice)
        if not torch.equal(scores, self.scores_UPS[at][:, :, keys]):
            return False
        return torch.equal(
            batched(self.p_UPS[call.keys][at][:, :, keys], self.v_USD[head_N][:, keys], choice),
            self.values_UPD[call.keys][at],
        )

    def together(self, choice: AttentionChoice) -> str:
        """The parts as one: some rows of whole passes against a chunk's and a cache's; "" where they agree."""
        kv_heads, size = min(self.shapes.kv_heads, 4), self.shapes.head_dim
        generator = torch.Generator().manual_seed(1)
        for length in sorted({min(n, self.shapes.length) for n in (40, 200, 520)}):
            q = self._rounded(torch.randn(2, kv_heads * self.group, length, size, generator=generator))
            k, v = self._rounded(torch.randn(2, 2, kv_heads, length, size, generator=generator))
            whole = ExactAttention.apply(q, k, v, FP32, Products(), FP32, choice)
            half = length // 2
            if not torch.equal(causal(q[:, :, half:], k, v, FP32, choice), whole[:, :, half:]):
                return f"a chunk of {length} positions"
            for position in {0, 15 % length, half, length - 1}:
                room = -(-(position + 1) // KEYS) * KEYS + KEYS
                cache = self._rounded(torch.randn(2, 2, kv_heads, room, size, generator=generator))
                cache[0, :, :, : position + 1], cache[1, :, :, : position + 1] = (
                    x[:, :, : position + 1] for x in (k, v)
                )
                got = cached(q[:, :, position], cache[0], cache[1], torch.full((2,), position + 1), FP32, choice)
                if not torch.equal(got, whole[:, :, position]):
                    return f"decode at position {position}"
        return ""

    def _alone(self, way: Way, heads: int) -> AttentionChoice:
        return AttentionChoice(way, (heads,), 16, (16,), KEYS, bf16=self.bf16)


ROWS = (1, 2, 3, 5, 16, 17, 33, 129)  # among so many rows each row is compared with itself among all
Work = Callable[[Tensor, int], Tensor]  # of rows, and the place of the first among all


def row_operations(
    kernels: Kernels, shapes: ModelShapes, drawn: Callable[..., Tensor]
) -> Iterator[tuple[str, int, Work]]:
    """What is computed row by row in one way only, beside products: its name, a row's width, and how."""
    widths, words = sorted({inputs for _, inputs, _ in shapes.products} | {shapes.head_dim}), shapes.vocabulary
    for width in widths:
        scale = drawn(width)
        yield f"rms_norm {width}", width, lambda x, _, w=scale: kernels.rms_norm(x, w, 1e-6)  # type: ignore[misc]
    yield f"swiglu {widths[-1]}", widths[-1], lambda x, _: kernels.swiglu(x * 8, x)

    for experts in sorted({outputs for name, _, outputs in shapes.products if name.endswith(".mlp.gate")}):
        yield f"routing by {experts}", experts, _routing
        yield "sigmoid", 1, lambda x, _: kernels.sigmoid(x)

    def logprob(x: Tensor, start: int) -> Tensor:
        tokens = torch.arange(start, start + len(x), device=x.device) * 7 % words
        return kernels.token_logprob(x.float() * 4, tokens, 0.7)

    yield f"token_logprob {words}", words, logprob


def _routing(x_NX: Tensor, _: int) -> Tensor:
    """A router's probabilities, and the weights of several numbers of chosen experts, normalised."""
    probs_NX = torch.softmax(x_NX.float() * 4, -1)
    tops = [torch.topk(probs_NX, k, -1).values for k in (2, 4, 8, 16) if k <= x_NX.shape[1]]
    return torch.cat([probs_NX, *(top / top.sum(-1, keepdim=True) for top in tops)], -1)


def other_bits(work: Work, x: Tensor, whole: Tensor) -> int:
    """Among how many rows a row of ``x`` has other bits than in ``whole``, which is of all; 0 where it never has."""
    for count in (*(n for n in ROWS if n < len(x)), len(x)):
        for start in {0, min(3, len(x) - count)}:
            if not torch.equal(work(x[start : start + count], start), whole[start : start + count]):
                return count
    return 0


def _check_rest(shapes: ModelShapes, kernels: ExactKernels, role: ResolvedRole, generator: torch.Generator) -> str:
    """Everything that has one way only: each row alone, and among others, must be the same."""
    half, words = shapes.head_dim // 2, shapes.vocabulary
    torchs_own: list[tuple[str, int, Work]] = [
        (f"softmax {words}", words, lambda x, _: torch.softmax(x * 4, -1)),
        (f"rotation {half}", half, lambda x, _: torch.cat(((x * 999).cos(), (x * 999).sin()), -1)),
    ]
    names = _check_rows(kernels, shapes, torchs_own, role, generator)
    if kernels.plan.attention.way == "in order":
        return ", ".join(names)
    scores = torch.randn(3, kernels.plan.length, generator=generator) * 4
    seen = torch.rand(3, 1, generator=generator)
    for keys in range(2 * KEYS, kernels.plan.length + 1, KEYS):
        # What a row does not see changes nothing: with the last keys unseen, as without them; and so on from there.
        part = scores[:, :keys].masked_fill(torch.arange(keys) >= (seen * (keys - KEYS)).ceil(), float("-inf"))
        if not torch.equal(torch.softmax(part, -1)[:2, : keys - KEYS], torch.softmax(part[:2, : keys - KEYS], -1)):
            raise _refuted(
                f"softmax over {keys} keys gives other bits than over those of them that are seen, and has no other way"
            )
    return ", ".join([*names, f"softmax of {KEYS} to {kernels.plan.length} keys"])


def _check_rows(
    kernels: ExactKernels | ExactBf16Kernels,
    shapes: ModelShapes,
    more: list[tuple[str, int, Work]],
    role: ResolvedRole,
    generator: torch.Generator,
) -> list[str]:
    """What is computed row by row, and ``more``, with each number of threads; returns the names."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(kernels.dtype)

    names = []
    for name, width, work in (*row_operations(kernels, shapes, drawn), *more):
        x = drawn(max(5, min(517, 2_000_000 // width)), width)
        expected = work(x, 0)
        for number in sorted({1, torch.get_num_threads()}):
            with threads(number):
                count = other_bits(work, x, expected)
            if count:
                raise _refuted(
                    f"{name} gives a row other bits among {count} rows than among {len(x)}, {number} threads, and has "
                    f"no other way, in {role.active}"
                )
        names.append(name)
    return names


_GPU_ROWS = 300  # that are compared with themselves among fewer
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

    def products() -> Iterator[tuple[str, int, int, Work]]:
        for (outputs, inputs), names in shapes.sizes.items():
            weight = drawn(outputs, inputs)
            multiply = kernels.logits if outputs == shapes.vocabulary else kernels.linear
            most = max(_GPU_ROWS, min(shapes.rows, _VALUES // outputs))
            yield f"{names} {inputs}x{outputs}", inputs, most, lambda x, _, f=multiply, w=weight: f(x, w)  # type: ignore[misc]

    compared = []
    with torch.no_grad():
        others = ((name, width, _GPU_ROWS, work) for name, width, work in row_operations(kernels, shapes, drawn))
        for name, width, most, work in itertools.chain(products(), others):
            x = drawn(most, width)
            count = other_bits(work, x, work(x, 0))
            if count:
                raise _differs(f"{name} gives a row other bits among {count} rows than among {most}", kernels)
            compared.append(name)
        compared.append(_cached_against_whole(kernels, shapes, drawn))
    return "row-invariant: " + ", ".join(compared)


def _cached_against_whole(kernels: Kernels, shapes: ModelShapes, drawn: Callable[..., Tensor]) -> str:
    length, size = min(shapes.length, _LONGEST), shapes.head_dim
    q, k, v = (drawn(3, heads, length, size) for heads in (shapes.heads, shapes.kv_heads, shapes.kv_heads))
    whole = kernels.causal_attention(q, k, v)
    for kept in {1, min(65, length), length - 1} - {0}:
        few = kernels.causal_attention(*(x[1:2, :, :kept] for x in (q, k, v)))
        if not torch.equal(few, whole[1:2, :, :kept]):
            raise _differs(f"attention gives {kept} positions of one sequence other bits than of three", kernels)
    for at in sorted({n - 1 for n in (1, 2, 64, 65, 129, 512, 513, 700, length) if n <= length}):
        keys, values = (torch.cat((x[:, :, : at + 1], drawn(3, x.shape[1], 70, size)), 2) for x in (k, v))
        lengths = torch.full((3,), at + 1, device=q.device)
        if not torch.equal(kernels.cached_attention(q[:, :, at], keys, values, lengths), whole[:, :, at]):
            raise _differs(f"attention gives position {at} other bits from a cache than in its sequence", kernels)
    return f"attention of 1 to {length} positions"


def _differs(what: str, kernels: Kernels) -> MantissaError:
    return MantissaError(
        f"precision.kernels=exact: on this GPU {what}, in {kernels.format}; choose kernels=fast, or another build of "
        "Triton"
    )
