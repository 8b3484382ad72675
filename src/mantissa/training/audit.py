"""What training really computes in: masters, gradients, moments and the update, measured and not assumed.

A dtype says what a tensor could hold, not what it holds: an fp32 tensor may have been rounded to bf16, and an optimiser
over bf16 weights drops most updates of a small learning rate without a word. So two things are measured.

*Values.* Of each kind of tensor: the dtype it is stored in, and the narrowest format that all its values are of. A
tensor of fp32 with values of bf16 alone is bf16 in a larger box.

*The update*, by a probe: an optimiser of the same class and options over one parameter of the weights' own dtype, all
ones, which takes one step at each of many rates. The smallest relative update that moves a weight of 1 is half its
spacing, 2^-24 in fp32 and 2^-9 in bf16 for one that makes it smaller. Then 64 steps of an eighth of that: whether small
updates add up (a master copy, compensation or stochastic rounding somewhere) or are lost one by one. Nothing of the
model or the optimiser is touched.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.base.ranks import local, named_parameters
from mantissa.precision.formats import BF16, E4M3, E5M2, FP16, FP32, is_on_grid
from mantissa.training.optimizer import Masters, held, is_eight_bit, master_weights, strays
from mantissa.training.step import OptimizerStep

_NARROW_FIRST = (E5M2, E4M3, BF16, FP16, FP32)
_LOOKED_AT = 1 << 16  # values of each tensor


@dataclass(frozen=True)
class AuditRow:
    """``role``: weights, gradients, or a moment by the optimiser's own name. ``dtype``: stored as. ``holds``: the
    narrowest format that has all the values looked at; empty where they are all zero."""

    role: str
    dtype: str
    holds: str
    tensors: int
    values: int


@dataclass(frozen=True)
class Audit:
    """``rows``: what is stored. ``smallest``: the smallest relative update that moved a weight of 1; None where the
    optimiser could not be probed, and ``unprobed`` says why. ``adds_up``: whether smaller ones add up over steps.
    ``idle``: the model's parameters that train and are in no group of the optimiser; ``foreign``: the optimiser's that
    are not the model's, by their places in its groups. ``warnings``: what of it loses updates or digits, a sentence
    each."""

    rows: tuple[AuditRow, ...]
    smallest: float | None = None
    adds_up: bool | None = None
    unprobed: str = ""
    idle: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        cells = [("role", "stored as", "holds", "tensors", "values")]
        cells += [(r.role, r.dtype, r.holds or "zeros", f"{r.tensors:,}", f"{r.values:,}") for r in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        probed = "" if self.smallest is None else " (probed)"
        return "\n".join([*lines, f"update: {self.update}{probed}", *(f"warning: {text}" for text in self.warnings)])

    @property
    def update(self) -> str:
        """One sentence about the update."""
        if self.smallest is None:
            return f"not probed: {self.unprobed}"
        below = "smaller ones add up over steps" if self.adds_up else "smaller ones are lost"
        return f"the smallest that moves a weight is 2^{math.log2(self.smallest):.0f} of it; {below}"


def audit(model: nn.Module, optimizer: torch.optim.Optimizer | OptimizerStep | None = None) -> Audit:
    """Measure what ``model`` is trained in; see the module. ``print(audit(model, optimizer))`` is a table.

    Gradients are there between a backward and the step that consumes them, moments after a first step. Of a sharded
    model this rank's shards are looked at. An ``OptimizerStep`` (``learner.step``) stands for its optimiser and for
    what it does to the weights afterwards. Reads up to 65,536 values of each tensor.
    """
    step = optimizer if isinstance(optimizer, OptimizerStep) else None
    bare = step.optimizer if step is not None else optimizer
    assert bare is None or isinstance(bare, torch.optim.Optimizer)
    trained = [p for p in named_parameters(model).values() if p.requires_grad]
    rows = [*_rows("weights", trained), *_rows("gradients", [p.grad for p in trained if p.grad is not None])]
    if bare is None:
        return Audit(tuple(rows), unprobed="no optimiser was given", warnings=tuple(_warnings(rows, None, None)))
    owned, mine = held(bare), {id(p) for p in trained}
    idle, foreign = strays(model, bare, () if step is None else step.given.values())
    if owned and not any(id(p) in mine for p in owned):
        rows += _rows("masters", owned)
        if any(p.dtype != torch.float32 for p in trained):
            idle, foreign = [], []  # wider copies of all that train
    for name, tensors in _moments(bare).items():
        rows += _rows(f"moment {name}", tensors)
    smallest, adds_up, why = _probed(bare, step, owned[0].dtype if owned else torch.float32)
    warned = (*_warnings(rows, smallest, adds_up), *_stray(idle, foreign))
    return Audit(tuple(rows), smallest, adds_up, why, tuple(idle), tuple(foreign), warned)


def _rows(role: str, tensors: Iterable[Tensor]) -> Iterator[AuditRow]:
    """A row for each dtype."""
    by_dtype: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        kind = str(tensor.dtype).removeprefix("torch.")
        if hasattr(tensor, "codes"):  # a block-scaled tensor of torchao's, which calls itself fp32
            kind = f"{tensor.codes.element_size() * 8}-bit codes"
        by_dtype.setdefault(kind, []).append(tensor)
    for dtype, alike in by_dtype.items():
        holds = dtype if "codes" in dtype else _narrowest(alike)
        yield AuditRow(role, dtype, holds, len(alike), sum(local(t).numel() for t in alike))


def _narrowest(tensors: list[Tensor]) -> str:
    """The narrowest format that holds every value that is looked at."""
    left = list(_NARROW_FIRST)
    seen = False
    for tensor in tensors:
        values = local(tensor).detach().flatten()[:_LOOKED_AT].float()
        values = values[(values != 0) & values.isfinite()]
        seen = seen or len(values) > 0
        left = [fmt for fmt in left if bool(is_on_grid(values, fmt).all())]
    return left[0].name if seen and left else ("" if not seen else "fp32")


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """The optimiser's tensors by name, but for counts of steps."""
    found: dict[str, list[Tensor]] = {}
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and value.dim() and value.is_floating_point():
                found.setdefault(str(name), []).append(value)
    return found


def _probed(
    optimizer: torch.optim.Optimizer, step: OptimizerStep | None, dtype: torch.dtype
) -> tuple[float | None, bool | None, str]:
    """The smallest relative update that moves a weight, whether smaller ones add up, or why that is not known."""
    if is_eight_bit(optimizer):
        return None, None, "torchao compiles its update for each shape, and this takes minutes; its updates are fp32"
    masters: Masters = "fp32" if step is None else step.masters.kind

    def moves(rate: float, steps: int) -> bool:
        """Whether weights of 1 move by at least half of what they would in exact arithmetic."""
        exact = abs(_moved(optimizer, "fp32", torch.float64, rate, steps))
        return abs(_moved(optimizer, masters, dtype, rate, steps)) >= exact / 2 > 0

    try:
        with torch.random.fork_rng(devices=[]):  # one that rounds stochastically draws
            rate = next((2.0**-k for k in range(30, 0, -1) if moves(2.0**-k, 1)), None)
            if rate is None:
                return None, None, "no rate below 1/2 moved a weight of 1"
            smallest = abs(_moved(optimizer, "fp32", torch.float64, rate, 1))
            return smallest, moves(rate / 8, 64), ""
    except Exception as error:  # noqa: BLE001 - a foreign optimiser may ask for anything
        return None, None, f"{type(optimizer).__name__} over one parameter raised {type(error).__name__}: {error}"


def _moved(optimizer: torch.optim.Optimizer, masters: Masters, dtype: torch.dtype, rate: float, steps: int) -> float:
    """How far weights of 1 move on average, in steps that are ``rate`` each in exact arithmetic."""
    weight = nn.Parameter(torch.ones(32, 32, dtype=dtype))  # two dimensions, which some want
    group = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[0].items() if k not in ("params", "initial_lr")}
    group |= {name: 0.0 for name in ("weight_decay", "momentum", "dampening") if name in group}
    group |= {name: False for name in ("fused", "foreach", "capturable", "nesterov") if name in group}
    known = inspect.signature(type(optimizer)).parameters
    kwargs: dict[str, Any] = {name: value for name, value in group.items() if name in known}
    kwargs |= {"lr": rate} if "lr" in group else {}
    one = type(optimizer)([{"params": [weight], **group}], **kwargs)
    for name, value in vars(optimizer).items():  # what it was made with and keeps beside its groups
        if isinstance(value, (bool, int, float, str)) and name in vars(one):
            setattr(one, name, value)
    for each in one.param_groups:
        each["lr"] = torch.tensor(rate) if isinstance(group.get("lr"), Tensor) else rate
    kept = master_weights(masters, {"probe": weight}, BF16)
    for number in range(steps):
        ones = torch.ones_like(weight)
        weight.grad = ones.to_sparse(1) if isinstance(one, torch.optim.SparseAdam) else ones  # it takes no other
        kept.step(one, number)
    return float((weight.detach().double() - 1).mean())


def _warnings(rows: list[AuditRow], smallest: float | None, adds_up: bool | None) -> Iterator[str]:
    if smallest is not None and smallest > 2.0**-20 and not adds_up:
        yield (
            f"updates below 2^{math.log2(smallest):.0f} of a weight are lost: at a learning rate of 1e-6 nearly all of "
            "Adam's; keep fp32 weights (PrecisionTrainer, optimizer.masters), or add compensation"
        )
    for row in rows:
        if row.role.startswith("moment") and row.dtype in ("bfloat16", "float16"):
            yield f"{row.role} is {row.dtype}: its decay of 1 - beta is rounded away where beta is 0.999"
        if (
            row.dtype == "float32"
            and row.holds in ("bf16", "fp16", "e4m3", "e5m2")
            and row.role in ("weights", "masters")
        ):
            yield f"{row.role} are float32 tensors, but all their values are {row.holds}'s: they were rounded"


def _stray(idle: list[str], foreign: list[str]) -> Iterator[str]:
    if idle:
        yield (
            f"in no group of the optimiser, so that they stay as they are: {', '.join(idle)}; add them "
            "(optimizer.add_param_group), or freeze them (requires_grad_(False))"
        )
    if foreign:
        yield (
            f"in the optimiser and not in the model: {', '.join(foreign)}; where a module was replaced after the "
            "optimiser was made, make it again"
        )
