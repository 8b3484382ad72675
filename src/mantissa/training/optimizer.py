"""The optimiser: its learning rate, its moments, and whose a parameter is: its own, by the name in the model.

Parameters may change while a training goes on (layers that are unfrozen and added as a group, an embedding that is
replaced), so whose they are is asked again at each step, as torch's ``GradScaler`` does.

Adam's moments in 8 bits, block by block, by torchao's AdamW8bit: which tensors, what it needs, how they are stored.

In 8 bits a moment is a code (uint8) for each value and an fp32 scale for each block of 256 neighbours:
value = map[code] * scale, the scale being the block's largest magnitude (Dettmers et al., arXiv 2110.02861). The map's
256 levels are closer where numbers are small: signed for the mean m, unsigned for the mean square v. Each step makes
both moments fp32, updates the weights with those, and rounds them back; masters, gradients and the update itself stay
fp32. So the 8 bytes a parameter of two moments become 2 + 8/256, and what is lost is what rounding loses:

- Where v is below 1.6e-7 of its block's largest it becomes zero: an element whose gradients g stay below 4e-4 of the
  largest in its block. Its next step is m / (|g| sqrt(1 - beta2) + eps) before bias correction, not m / (|g| + eps): up
  to 1 / sqrt(1 - beta2) times as long (32 at 0.999), and longer where g shrinks; only Adam's eps bounds it.
- A change of v that is less than half a level is rounded away, unless the block's scale moves.

The library leaves tensors of fewer than 4096 values, and those that are not whole blocks, in fp32; ``described`` says
how many. It compiles its update with ``torch.compile``, once for each shape: on a CPU that needs a C++ compiler.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError, pip_install
from mantissa.base.ranks import is_dtensor, named_parameters, shard_like
from mantissa.base.tensors import check_tensor


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


Moments = Literal["fp32", "8bit"]
BLOCK = 256
SMALLEST = 4096
_INNER = ("codes", "scale", "qmap")
_MISSING = (
    f"optimizer.moments=8bit needs torchao 0.18 or later, which is not installed; {pip_install('lowbit')}, or "
    "set optimizer.moments=fp32"
)


def eight_bit_adamw(groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """torchao's AdamW8bit over parameter groups, each with its weight decay; the rate is 0 until a step sets it.

    Raises ``MantissaError`` where torchao or what compiles its update is missing, and where no tensor would be 8-bit.
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
