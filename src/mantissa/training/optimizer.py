"""The optimiser, and in which precision it keeps what it has learnt: its moments, and the weights that it updates.

Whose a parameter is, the optimiser's by its name in the model or one that only one of the two has, may change while a
training goes on (layers that are unfrozen and added as a group, an embedding that is replaced), so it is asked again at
each step, as torch's ``GradScaler`` does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError, pip_install
from mantissa.base.ranks import is_dtensor, local, named_parameters, shard_like
from mantissa.base.seeds import GOLDEN, mix, signed
from mantissa.base.tensors import check_tensor
from mantissa.precision import BF16, NumberFormat, round_stochastically, round_to_format

Moments = Literal["fp32", "8bit"]
BLOCK = 256
SMALLEST = 4096
_INNER = ("codes", "scale", "qmap")
_MISSING = (
    f"optimizer.moments=8bit needs torchao 0.18 or later, which is not installed; {pip_install('lowbit')}, or "
    "set optimizer.moments=fp32"
)

Masters = Literal["fp32", "bf16_nearest", "bf16_stochastic", "bf16_kahan"]
COMPENSATION = "compensation"
_PART = 1 << 16  # values rounded at a time, so that each part stays in the cache; whole words of random bits


def adamw(
    model: nn.Module,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    moments: Moments = "fp32",
) -> torch.optim.Optimizer:
    """AdamW over a model's parameters that train; weight decay on matrices only (norms and biases are left alone).

    Slices (FSDP2) and whole parameters are groups apart: no fused update takes both.

    ``moments``: fp32, or 8bit block by block by torchao, which keeps each group's rate as a tensor.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = []
    for sliced in dict.fromkeys(map(is_dtensor, trained)):
        matrices = [p for p in trained if is_dtensor(p) is sliced and p.dim() >= 2]
        vectors = [p for p in trained if is_dtensor(p) is sliced and p.dim() < 2]
        groups += [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if moments == "8bit":
        return eight_bit_adamw(groups, betas=betas, eps=eps)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def learning_rate(lr: float, warmup: int, decay_until: int | None = None) -> Callable[[int], float]:
    """Learning rate of update n, as a function of applied updates: a skipped step does not move it.

    lr * min(1, (n + 1) / warmup), and with ``decay_until`` also times max(0, 1 - n / decay_until): linear to zero.
    """

    def lr_at(update: int) -> float:
        rising = min(1.0, (update + 1) / warmup) if warmup else 1.0
        falling = max(0.0, 1 - update / decay_until) if decay_until else 1.0
        return lr * rising * falling

    return lr_at


def eight_bit_adamw(groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """torchao's AdamW8bit over parameter groups, each with its weight decay; the rate is 0 until a step sets it.

    Raises ``MantissaError`` where torchao or what compiles its update is missing, and where no tensor would be 8-bit.

    A moment is a code (uint8) for each value and an fp32 scale for each block of 256 neighbours: value = map[code]
    * scale, the scale being the block's largest magnitude (Dettmers et al., arXiv 2110.02861). The map's 256 levels
    are closer where numbers are small: signed for the mean m, unsigned for the mean square v. Each step makes both
    moments fp32, updates the weights with those, and rounds them back; masters, gradients and the update itself
    stay fp32. So the 8 bytes a parameter of two moments become 2 + 8/256, and what is lost is what rounding loses:

    - Where v is below 1.6e-7 of its block's largest it becomes zero: an element whose gradients g stay below 4e-4
      of the largest in its block. Its next step is m / (|g| sqrt(1 - beta2) + eps) before bias correction, not m /
      (|g| + eps): up to 1 / sqrt(1 - beta2) times as long (32 at 0.999), and longer where g shrinks; only Adam's
      eps bounds it.
    - A change of v that is less than half a level is rounded away, unless the block's scale moves.

    The library leaves tensors of fewer than 4096 values, and those that are not whole blocks, in fp32;
    ``described`` says how many. It compiles its update with ``torch.compile``, once for each shape: on a CPU that
    needs a C++ compiler.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise MantissaError(_MISSING) from None
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not any(map(_whole_blocks, parameters)):
        raise MantissaError(
            f"optimizer.moments=8bit does nothing here: of the {len(parameters)} tensors that train, none has "
            f"{SMALLEST} values or more in whole blocks of {BLOCK}; set optimizer.moments=fp32"
        )
    _check_compiler(parameters[0].device)
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=0.0, betas=betas, eps=eps, block_size=BLOCK)
    return optimizer


def _check_compiler(device: torch.device) -> None:
    """torch.compile would otherwise find out in the first step, after a batch was sampled."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        found = shutil.which(compiler) is not None
        what = f"a C++ compiler, and {compiler} is not there; install it, set CXX"
    else:
        found = importlib.util.find_spec("triton") is not None
        what = "triton, which is not installed; install it"
    if not found:
        raise MantissaError(
            f"optimizer.moments=8bit: torchao compiles its update, which on {device.type} takes {what}, or set "
            "optimizer.moments=fp32"
        )


def _whole_blocks(parameter: nn.Parameter) -> bool:
    """The library's own rule for what becomes 8-bit."""
    return parameter.numel() >= SMALLEST and parameter.numel() % BLOCK == 0


def is_eight_bit(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is torchao's optimiser; nothing is one before its library was imported."""
    library = sys.modules.get("torchao.optim")
    return library is not None and isinstance(optimizer, library.AdamW8bit)


def refuses_sparse(optimizer: Any, parameter: Tensor) -> str | None:
    """Why a torch optimiser, or torchao's, takes no sparse gradient of ``parameter``; None: it does, or is another's.

    Torch's own refusals come in the middle of a step, when the groups before have moved.
    """
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):  # accelerate's, around torch's
        optimizer = optimizer.optimizer
    advice = "take SparseAdam, SGD or Adagrad, or set sparse=False in the embedding"
    owner = next((kind for kind in type(optimizer).__mro__ if "step" in vars(kind)), object)
    takes = owner in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)
    if is_eight_bit(optimizer) or (f"{owner.__module__}.".startswith("torch.optim.") and not takes):
        return f"{type(optimizer).__name__} does not take; {advice}"
    group: dict[str, Any] = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {})
    for option, off in (("weight_decay", 0), ("fused", False)):
        if takes and group.get(option):
            return f"{type(optimizer).__name__} does not take with {option}={group[option]}; set {option}={off} for it"
    return None


def described(optimizer: torch.optim.Optimizer) -> str | None:
    """One line: how many values have 8-bit moments and why the others have not; None where all moments are fp32."""
    if not is_eight_bit(optimizer):
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = [parameter for parameter in parameters if _whole_blocks(parameter)]
    values, total = sum(p.numel() for p in whole), sum(p.numel() for p in parameters)
    text = f"{values:,} of {total:,} values ({len(whole)} of {len(parameters)} tensors), in blocks of {BLOCK}"
    if values < total:
        text += f"; the others, below {SMALLEST:,} values or not whole blocks, stay fp32"
    return text


def flattened(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """One parameter's optimiser state as plain tensors: an 8-bit field as ``<field>.codes``, ``.scale``, ``.qmap``."""
    plain: dict[str, Tensor] = {}
    for field, value in state.items():
        if hasattr(value, "codes"):
            plain |= {f"{field}.{inner}": getattr(value, inner) for inner in _INNER}
        else:
            plain[field] = torch.as_tensor(value)
    return plain


def restored(
    optimizer: torch.optim.Optimizer, name: str, parameter: nn.Parameter, plain: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of ``flattened``, bit for bit, on the parameter's device, and sharded as the parameter is.

    ``MantissaError`` where the tensors hold fp32 moments and the optimiser would make 8-bit ones, or the reverse.
    """
    _check_state(name, parameter, plain)
    ours = is_eight_bit(optimizer) and _whole_blocks(parameter)
    theirs = any("." in field for field in plain)
    if ours != theirs:
        kinds: tuple[Moments, Moments] = ("fp32", "8bit")
        raise MantissaError(
            f"checkpoint's moments of {name} are {kinds[theirs]}, this run's are {kinds[ours]}; set "
            f"optimizer.moments={kinds[theirs]}, or start a new run with model.path set to that run's folder"
        )
    counted_there = is_eight_bit(optimizer)  # the library counts steps on the host, fused AdamW beside the moments
    state: dict[str, Tensor] = {}
    for key, value in plain.items():
        field, _, inner = key.partition(".")
        if value.dim() and is_dtensor(parameter):  # fp32: a slice has no blocks of its own
            state[field] = shard_like(value, parameter.detach())
        elif inner in ("", "codes"):
            device = torch.device("cpu") if field == "step" and counted_there else parameter.device
            state[field] = _eight_bit(plain, field, device) if inner else value.to(device, copy=True)
    return state


def _check_state(name: str, parameter: nn.Parameter, plain: Mapping[str, Tensor]) -> None:
    """AdamW's three fields, whole, finite, of the parameter's shape (a fused step reads past the end of others)."""
    fields = {"step": torch.Size(()), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
    if {key.partition(".")[0] for key in plain} != fields.keys():
        raise MantissaError(f"checkpoint's moments of {name} are {', '.join(plain)}; expected {', '.join(fields)}")
    for key, value in plain.items():
        field, _, inner = key.partition(".")
        shape = {"scale": torch.Size((parameter.numel() // BLOCK,)), "qmap": torch.Size((256,))}.get(inner)
        dtype = torch.uint8 if inner == "codes" else torch.float32
        check_tensor(f"checkpoint's {key} of {name}", value, shape or fields[field], dtype)
        if (field == "step" or (field == "exp_avg_sq" and inner != "codes")) and bool((value < 0).any()):
            raise MantissaError(f"checkpoint's {key} of {name} has values below 0; it is broken")


def _eight_bit(plain: Mapping[str, Tensor], field: str, device: torch.device) -> Tensor:
    """One moment from its parts; the map is the checkpoint's own, so codes mean what they meant."""
    from torchao.optim.subclass_8bit import OptimState8bit

    codes, scale, qmap = (plain[f"{field}.{inner}"].to(device, copy=True) for inner in _INNER)
    moment: Tensor = OptimState8bit(codes, scale, qmap, bool((qmap < 0).any()), dtype=torch.float32)
    return moment


def held(optimizer: Any) -> list[nn.Parameter]:
    """The parameters in an optimiser's groups, as they are now."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named(
    optimizer: Any, before: Iterable[nn.Parameter], *names: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, nn.Parameter]:
    """The optimiser's parameters by name: those of ``before`` in its order, and then the others by their groups.

    A parameter has its name in the first of ``names`` that knows it and gives no other one that name, else its place in
    the groups.
    """
    owned = {id(parameter): parameter for parameter in held(optimizer)}
    known = {id(parameter): parameter for parameter in before if id(parameter) in owned}
    called: dict[int, str] = {}
    for source in names:
        taken = set(called.values())
        for name, parameter in source:
            if id(parameter) in owned and id(parameter) not in called and name not in taken:
                called[id(parameter)] = name
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            called.setdefault(id(parameter), f"optimizer.param_groups[{g}][{i}]")
    return {called[key]: parameter for key, parameter in (known | owned).items()}


def strays(model: nn.Module, optimizer: Any, others: Iterable[nn.Parameter] = ()) -> tuple[list[str], list[str]]:
    """Names of the model's parameters that train and are in no group, and of the optimiser's that are neither the
    model's nor ``others``."""
    owned, inside = {id(p) for p in held(optimizer)}, named_parameters(model)
    idle = [name for name, p in inside.items() if p.requires_grad and id(p) not in owned]
    known = {id(p) for p in (*inside.values(), *others)}
    foreign = [name for name, p in named(optimizer, (), inside.items()).items() if id(p) not in known]
    return idle, foreign


def listed(names: list[str]) -> str:
    """A few of many names."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def check_masters(masters: str, learner: NumberFormat, lora: bool = False) -> None:
    """``MantissaError`` where the learner would not see the weights that are stored.

    ``learner``: the format it computes in, of fp8 the base. ``lora``: whether adapters train.
    """
    if masters == "fp32":
        return
    if masters not in get_args(Masters):
        raise MantissaError(f"masters={masters!r}: expected {', '.join(get_args(Masters))}")
    if learner.exponent_bits < BF16.exponent_bits or learner.mantissa_bits < BF16.mantissa_bits:
        raise MantissaError(
            f"optimizer.masters={masters} with a {learner} learner: not every value of bf16 is one of {learner}, so "
            "it would learn with other weights than are stored; set precision.train=bf16 or fp32, or "
            "optimizer.masters=fp32"
        )
    if lora:
        raise MantissaError(
            f"optimizer.masters={masters} with model.lora: adapters are merged in fp32 and rounded once with their "
            "base, so the learner would not see what is stored; set optimizer.masters=fp32"
        )


class MasterWeights:
    """fp32 masters: what the optimiser does is what is kept. The others are subclasses."""

    kind: Masters = "fp32"
    reason = ""  # in the precision table

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}  # those whose updates are rounded
        self.compensation: dict[str, Tensor] = {}

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take these as the optimiser's: bf16 kinds round those that are new and train, and forget those that left."""

    def step(self, optimizer: torch.optim.Optimizer, update: int) -> None:
        """The optimiser's step, number ``update`` (0 for the first), and the rounding of what it did."""
        optimizer.step()

    def check_kind(self, kind: object) -> None:
        """``MantissaError`` where a checkpoint is of another kind of masters."""
        if kind != self.kind:
            raise MantissaError(
                f"checkpoint is of masters={kind}, this run has masters={self.kind}; set optimizer.masters={kind} "
                "(PrecisionTrainer: masters=), or start a new run from that one's weights"
            )

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's compensation by parameter, laid out as here, to be set as ``compensation``; or an error."""
        if not tensors or not self.compensation:
            if bool(tensors) != bool(self.compensation):
                self.check_kind("bf16_kahan" if tensors else "fp32, bf16_nearest or bf16_stochastic")
            return {}
        for name in self.compensation.keys() ^ tensors.keys():
            raise MantissaError(f"checkpoint's compensation does not fit this model: {name} is in one of them alone")
        for name, here in self.compensation.items():
            check_tensor(f"checkpoint's compensation of {name}", tensors[name], here.shape, torch.bfloat16)
        return {name: shard_like(tensors[name].clone(), here) for name, here in self.compensation.items()}


class _Bf16(MasterWeights, ABC):
    """Weights on bf16's grid. ``parameters`` that train are rounded to it once, to nearest, when they come in.

    A bf16 number has 8 significant bits, so to nearest every update below |w| / 512 is lost: at a rate of 3e-5 most
    of Adam's are, and the weights stand still: that is ``bf16_nearest``, what an optimiser over a bf16 model does,
    to compare with. Two known ways out, both without an fp32 copy of the weights. Let u be what the optimiser would
    add in fp32, u = fp32(w + update) - w; its moments and the gradient are as they are with masters.

    - ``bf16_stochastic``:  w' = bf16(w + u), up or down with a probability that is the distance from the other
      neighbour: E[w'] = w + u. What an update lacks in size it has in probability; the price is noise, of variance
      d (s - d) for a remainder d below a spacing s.
    - ``bf16_kahan``:  y = u + c;  w' = bf16(w + y);  c' = bf16(y - (w' - w)). What rounding took is kept in c, also
      bf16, and added to the next update. That is not fp32's precision: c itself is rounded to nearest, so that
      updates below 2^-18 |w| are lost once c is as large as it gets, half a spacing of w.

    The random bits are a hash of the seed, the parameter's name, the count of updates and the element's number in
    the whole tensor: no generator has a state that could be lost, ranks agree, and a shard draws what the whole
    would.

    The weights are *simulated* bf16: values of bf16 in fp32 tensors, which gradients and kernels are made for. A
    bf16 or fp32 learner multiplies exactly them. No memory is saved: it is the arithmetic of training without
    masters, for those who want to know what that costs in learning. Only c, 2 bytes a weight, is bf16 in memory
    too.

    Sources: W. Kahan, "Further remarks on reducing truncation errors", CACM 8 (1965) 40; P. Zamirai, J. Zhang, C.
    R. Aberger, C. De Sa, "Revisiting bfloat16 training" (2020), arXiv:2010.06192, algorithms 1 (stochastic) and 2
    (Kahan).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.follow(parameters)

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name in [name for name, mine in self.parameters.items() if parameters.get(name) is not mine]:
            del self.parameters[name]
            self.compensation.pop(name, None)
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in self.parameters:
                self._adopt(name, parameter)
                self.parameters[name] = parameter

    @torch.no_grad()
    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        here = local(parameter)
        here.copy_(round_to_format(here, BF16))

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, update: int) -> None:
        moved = {name: p for name, p in self.parameters.items() if p.grad is not None}
        before = {name: local(p).to(torch.bfloat16) for name, p in moved.items()}  # exact: they are on the grid
        optimizer.step()
        for name, parameter in moved.items():
            here = local(parameter)
            flat, old = here.reshape(-1), before.pop(name).reshape(-1)  # a copy where it is not contiguous
            for start in range(0, len(flat), _PART):
                part = slice(start, start + _PART)
                flat[part] = self._kept(name, part, old[part].float(), flat[part], update)
            if flat.data_ptr() != here.data_ptr():
                here.copy_(flat.view_as(here))

    @abstractmethod
    def _kept(self, name: str, part: slice, old: Tensor, new: Tensor, update: int) -> Tensor:
        """What becomes of a part of a tensor that the optimiser took from ``old`` to ``new``, all fp32."""


class _Nearest(_Bf16):
    kind: Masters = "bf16_nearest"
    reason = "values of bf16 in fp32 tensors (no memory saved); an update below half a spacing is lost"

    def _kept(self, name: str, part: slice, old: Tensor, new: Tensor, update: int) -> Tensor:
        return round_to_format(new, BF16)


class _Stochastic(_Bf16):
    kind: Masters = "bf16_stochastic"
    reason = "values of bf16 in fp32 tensors (no memory saved); fp32 updates, rounded up or down by chance"

    def __init__(self, parameters: Mapping[str, nn.Parameter], seed: int) -> None:
        self._seed = seed
        self._keys: dict[str, int] = {}
        self._first: dict[str, int] = {}
        super().__init__(parameters)

    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        self._first[name] = first_element(name, parameter)
        self._keys[name] = _key(self._seed, name)
        super()._adopt(name, parameter)

    def _kept(self, name: str, part: slice, old: Tensor, new: Tensor, update: int) -> Tensor:
        key = signed(self._keys[name] + (update + 1) * GOLDEN)
        return round_stochastically(new, random_bits(key, self._first[name] + part.start, len(new), new.device))


class _Kahan(_Bf16):
    kind: Masters = "bf16_kahan"
    reason = "values of bf16 in fp32 tensors (no memory saved), and 2 bytes a weight for what rounding took"

    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        super()._adopt(name, parameter)
        self.compensation[name] = torch.zeros_like(
            parameter.detach(), dtype=torch.bfloat16, memory_format=torch.contiguous_format
        )

    def _kept(self, name: str, part: slice, old: Tensor, new: Tensor, update: int) -> Tensor:
        c = local(self.compensation[name]).view(-1)[part]
        y = (new - old) + c.float()  # the names of the formula, above
        kept = round_to_format(old + y, BF16)
        c.copy_((y - (kept - old)).to(torch.bfloat16))
        return kept


def master_weights(
    kind: Masters, parameters: Mapping[str, nn.Parameter], learner: NumberFormat, seed: int = 0
) -> MasterWeights:
    """The rule of this ``kind`` for these named parameters, which bf16 kinds round at once. ``seed``: of the draws.

    ``learner`` and errors: ``check_masters``.
    """
    check_masters(kind, learner)
    if kind == "bf16_nearest":
        return _Nearest(parameters)
    if kind == "bf16_stochastic":
        return _Stochastic(parameters, seed)
    return _Kahan(parameters) if kind == "bf16_kahan" else MasterWeights()


def _key(seed: int, name: str) -> int:
    """63 bits of SHA-256: names of parameters are text, and the hash of the draws is of integers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def random_bits(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """16 random bits for each of the elements ``start`` to ``start + count`` of a key's stream: int32, 0 to 65535.

    Element i has the (i mod 4)-th quarter of word i // 4, which is mix(mix(key) + (i // 4 + 1) g) of ``base/seeds.py``.
    """
    first, end = start // 4, -(-(start + count) // 4)
    word = mix(torch.arange(first + 1, end + 1, device=device) * GOLDEN + mix(torch.tensor(key, device=device)))
    return word.view(torch.int16)[start - 4 * first :][:count].to(torch.int32) & 0xFFFF


def first_element(name: str, parameter: Any) -> int:
    """The number, in the whole tensor, of the first element that this rank holds; its others follow in order."""
    if not is_dtensor(parameter):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements, mesh = parameter.placements, parameter.device_mesh
    if not all(placement.is_shard(0) or placement.is_replicate() for placement in placements):
        raise MantissaError(
            f"optimizer.masters=bf16_stochastic: {name} is placed {placements}; expected shards of dimension 0, whose "
            "elements follow each other; shard on dimension 0, or set optimizer.masters=bf16_kahan"
        )
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return int(offset[0]) * math.prod(parameter.shape[1:]) if offset else 0
