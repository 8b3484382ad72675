"""What is benchmarked: a model, its data and its loss, and where they come from.

The built-in models and their task, whose best loss is known.

Models. A residual MLP of width w: h = W_in x + b, then 4 times h = h + gelu(W h + b), then y = W_out h + b; inputs 32,
outputs 8. One number, the width, takes it from 10 thousand parameters, where a step is the cost of launching its
operations, to a billion, where it is matrix products.

Task. Regression on a teacher with noise: x ~ N(0, I), y = t(x) + s e with e ~ N(0, I) and s = 0.5, and the loss is the
mean square over samples and outputs. For any prediction f that does not see the noise,

    E |f(x) - y|^2 / outputs = s^2 + E |f(x) - t(x)|^2 / outputs >= s^2

so the best loss is s^2 = 0.25 and what a model is above it (its excess loss) is its own distance from the teacher. The
bound is attained: the teacher is a residual MLP of width 16 with one block, and there is no normalisation over the
width, so every member of the family that is at least as wide *contains* it (the rest of its weights 0, and gelu(0) is
0). The teacher's outputs have mean square 1, so a model that predicts 0 has a loss of 1.25. Losses are measured on
samples not trained on: a model of ten million parameters learns the noise of 512 samples by heart, and its training
loss would fall below the best.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mantissa.base.errors import MantissaError, nearest

INPUTS, OUTPUTS, BLOCKS = 32, 8, 4
NOISE_STD = 0.5
BEST_LOSS = NOISE_STD**2
_TEACHER_WIDTH = 16
_BASE_LR, _BASE_WIDTH = 3e-3, 64


class ResidualMLP(nn.Module):
    """See the module's text. Input (batch, 32), output (batch, 8)."""

    def __init__(self, width: int, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.last = nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + F.gelu(block(h))
        return self.last(h)


def width_for(parameters: int) -> int:
    """The width, a multiple of 8 for the GPU's half kernels, whose parameters come closest to ``parameters``.

    n(w) = 4 w^2 + (4 + 32 + 1 + 8) w + 8, solved for w.
    """
    linear = BLOCKS + INPUTS + 1 + OUTPUTS
    exact = (-linear + math.sqrt(linear**2 + 4 * BLOCKS * max(0, parameters - OUTPUTS))) / (2 * BLOCKS)
    low = max(_TEACHER_WIDTH, 8 * int(exact / 8))
    return min((low, low + 8), key=lambda width: abs(BLOCKS * width**2 + linear * width + OUTPUTS - parameters))


@functools.cache
def teacher() -> ResidualMLP:
    """The one teacher, in fp32 on the CPU; its outputs have mean square 1 over 65,536 inputs."""
    generator = torch.Generator().manual_seed(20_260)
    with torch.random.fork_rng(devices=()):  # what a module's making draws from torch's own generator is given back
        model = ResidualMLP(_TEACHER_WIDTH, blocks=1).requires_grad_(False)
    for layer in (model.first, *model.blocks, model.last):
        assert isinstance(layer, nn.Linear)
        torch.randn(layer.weight.shape, generator=generator, out=layer.weight)
        layer.weight.mul_(layer.in_features**-0.5)
        layer.bias.zero_()
    inputs = torch.randn(65_536, INPUTS, generator=generator)
    model.last.weight.div_(model(inputs).square().mean().sqrt())
    return model


def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``batch_size`` inputs (batch, 32) and noisy targets (batch, 8), fp32."""
    inputs = torch.randn(batch_size, INPUTS, generator=generator)
    noise = torch.randn(batch_size, OUTPUTS, generator=generator)
    return inputs, teacher()(inputs) + NOISE_STD * noise


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean square error over samples and outputs, in fp32 whatever the model computed in."""
    inputs, targets = batch
    return F.mse_loss(model(inputs).float(), targets)


def family_workload(parameters: int, device: torch.device | str = "cpu") -> Workload:
    """The member of the family with about ``parameters``, on ``device``, with weights from torch's global generator.

    The learning rate of AdamW is 3e-3 at width 64 and falls with 1/width, as its update of a layer's output grows with
    the width (Yang et al. 2022, Tensor Programs V, table 3).
    """
    width = width_for(parameters)
    with torch.device(device):
        model = ResidualMLP(width)
    lr = _BASE_LR * min(1.0, _BASE_WIDTH / width)
    return Workload(model, make_batch, loss_fn, BEST_LOSS, functools.partial(adamw, lr=lr))


LossFn = Callable[[nn.Module, Any], Tensor]
MakeBatch = Callable[[int, torch.Generator], Any]


def adamw(parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> torch.optim.Optimizer:
    """AdamW in one kernel, so that a small model's step is not the optimiser's launches."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


@dataclass(frozen=True)
class Workload:
    """What a factory returns. ``factory()`` may also return the first three as a tuple.

    ``model``: parameters in fp32. ``make_batch(batch_size, generator)``: a batch of fresh samples on the CPU (a tensor,
    or tuples, lists and dicts of them), drawn from ``generator`` only. ``loss_fn(model, batch)``: a scalar, the mean
    over the batch. ``best_loss``: the lowest expected loss that any model can reach, where it is known.
    ``make_optimizer(parameters)``: AdamW at 1e-3 unless given.
    """

    model: nn.Module
    make_batch: MakeBatch
    loss_fn: LossFn
    best_loss: float | None = None
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


@dataclass(frozen=True)
class Source:
    """Where a workload comes from; small, so that another process can be told to build the same.

    ``spec``: ``pkg.module:factory``; where it is None, a member of the built-in family with about ``parameters``.
    """

    spec: str | None = None
    parameters: int = 0

    def __str__(self) -> str:
        return self.spec or f"residual MLP of {short(self.parameters)}"

    def build(self, seed: int, device: torch.device | str) -> Workload:
        """The workload with the weights of ``seed``, its model on ``device``."""
        torch.manual_seed(seed)
        if self.spec is None:
            return family_workload(self.parameters, device)
        workload = called(self.spec, factory_named(self.spec))
        workload.model.to(device)
        return workload


def factory_named(spec: str) -> Callable[[], Any]:
    """The factory that ``pkg.module:name`` names; modules of the current folder are found last."""
    module_name, colon, name = spec.partition(":")
    if not (colon and module_name and name):
        raise MantissaError(f"--model {spec}: expected pkg.module:factory, such as mine.bench:small_model")
    here = os.getcwd()
    sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise MantissaError(
                f"--model {spec}: {module_name} itself imports {missing}, which is not installed"
            ) from None
        raise MantissaError(
            f"--model {spec}: no module {missing} in {here} or among the installed packages; start the command in the "
            "folder that holds it, or install it"
        ) from None
    finally:
        sys.path.pop()
    factory = getattr(module, name, None)
    if factory is None:
        raise MantissaError(f"--model {spec}: {module_name} has no {name}{nearest(name, vars(module))}")
    if not callable(factory):
        raise MantissaError(
            f"--model {spec}: {name} is a {type(factory).__name__}; expected a function of no arguments"
        )
    return factory


def called(spec: str, factory: Callable[[], Any]) -> Workload:
    """``factory()`` as a workload, checked: what is wrong with it is said here and not in the middle of a step."""
    made = factory()
    if isinstance(made, tuple) and len(made) == 3:
        made = Workload(*made)
    expected = "expected (model, make_batch, loss_fn) or a mantissa.bench.Workload"
    if not isinstance(made, Workload):
        came = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise MantissaError(f"--model {spec}: it returned {came}; {expected}")
    for what, value, wanted, good in (
        ("model", made.model, "a torch module", isinstance(made.model, nn.Module)),
        ("make_batch", made.make_batch, "a function", callable(made.make_batch)),
        ("loss_fn", made.loss_fn, "a function", callable(made.loss_fn)),
    ):
        if not good:
            raise MantissaError(f"--model {spec}: its {what} is a {type(value).__name__}, not {wanted}; {expected}")
    if not any(p.requires_grad for p in made.model.parameters()):
        raise MantissaError(f"--model {spec}: its model has no parameter to train")
    return made


def to_device(batch: Any, device: torch.device | str) -> Any:
    """``batch`` with every tensor in it on ``device``."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}


def parse_size(text: str) -> int:
    """A number of parameters: ``10k``, ``1.2M``, ``1B`` or plain digits."""
    digits, unit = (text[:-1], _UNITS[text[-1].lower()]) if text and text[-1].lower() in _UNITS else (text, 1)
    try:
        size = round(float(digits) * unit)
    except (ValueError, OverflowError):
        raise MantissaError(f"size {text!r}: expected a number of parameters such as 10k, 1.2M or 1B") from None
    if not 1000 <= size <= 20 * 10**9:
        raise MantissaError(f"size {text}: expected from 1k to 20B parameters")
    return size


def short(count: float) -> str:
    """A number of parameters in three digits at most: 9.9k, 1.21M, 1B."""
    for letter, unit in (("B", 1e9), ("M", 1e6)):
        if round(count / (unit / 1e3)) >= 1000:
            return f"{count / unit:.3g}{letter}"
    return f"{count / 1e3:.3g}k"
