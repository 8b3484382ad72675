"""The interface of a well-known FP16 training utility, on Mantissa's trainer: change the import, keep the code.

    from mantissa.dropin.compat import FP16Trainer, FP16TrainingConfig

    trainer = FP16Trainer(model, optimizer, FP16TrainingConfig())
    for batch in loader:
        loss = trainer.training_step(batch, loss_fn)
        stepped = trainer.backward_and_step(loss)          # False: this batch overflowed and was given up

What differs, each time because the old behaviour loses something:

- The model's parameters are fp32 (master weights) while it trains; every forward computes on fp16 copies of them. So
  it does in the modes named ``fp16`` and ``bfloat16``, which there meant ``model.half()``: Adam in pure half loses most
  updates. ``cast_model_to_fp16`` casts, and the masters come back for the next step.
- Without a GPU it trains in fp32, with a warning, as there; ``backend="simulated"`` rounds to fp16 on a CPU,
  ``fallback="error"`` refuses.
- Overflow is read from the gradients, the same on every rank; a step that overflowed leaves nothing behind.
- The caller's configuration is never changed; what is in force is ``effective_config``, and in ``get_stats()``.
- Clipping is an argument (1.0, as there; None, 0 and inf measure and never clip).
- While gradients accumulate, ``training_step`` returns the batch's mean loss; dividing it is ``backward_and_step``'s
  affair.
- ``use_ddp`` works on a CPU too. Ranks are those of the process group, and only rank 0 writes files.

The world model that came with it is ``mantissa.genesis.worldmodel``'s, with its names and arguments:
``docs/evolution.md``.

``growth_interval="auto"`` is ``PrecisionTrainer(scale="auto")``: the scale follows the gradients' observed range. For
retry on the same batch, weights of batches and the rest, use ``mantissa.PrecisionTrainer``.

Sources: P. Micikevicius et al., "Mixed precision training" (2018), arXiv:1710.03740, for masters and loss scaling;
``torch.amp.GradScaler`` for the dynamic rule and its defaults.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import Ranks, is_ddp, joined
from mantissa.dropin import PrecisionTrainer
from mantissa.dropin.environment import ENVIRONMENT, FP16Config, FP16TrainingConfig, switched_off
from mantissa.dropin.trainer import LossFunction
from mantissa.training import distribute

__all__ = [
    "ENVIRONMENT",
    "ExtendedFP16Config",
    "ExtendedFP16Trainer",
    "FP16Trainer",
    "FP16TrainingConfig",
    "PrecisionMode",
    "ScalerView",
    "cleanup_distributed",
    "init_distributed",
]
_LOG = logging.getLogger(__name__)


class PrecisionMode(StrEnum):
    """What the forward computes in. ``fp16`` and ``mixed_fp16`` are one thing here, as are the two of bf16: fp32
    masters, low-precision compute."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bfloat16"
    BFLOAT16 = "bfloat16"
    MIXED_FP16 = "mixed_fp16"
    MIXED_BF16 = "mixed_bf16"

    @property
    def number_format(self) -> str:
        """The number format's name: ``fp32``, ``fp16`` or ``bf16``."""
        return self.value.removeprefix("mixed_").replace("bfloat16", "bf16")


@dataclass(frozen=True)
class ExtendedFP16Config(FP16Config):
    """Adds modes, accumulation and several processes (``use_ddp``, whose other two fields go to torch's DDP).

    ``precision_mode``: a ``PrecisionMode`` or its value. The rest is ``FP16TrainingConfig``'s.
    """

    precision_mode: PrecisionMode = PrecisionMode.MIXED_FP16
    enabled: bool = True
    loss_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int | Literal["auto"] = 2000
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = 1.0
    use_ddp: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    adaptive_clip: float | None = field(default=None, kw_only=True)
    backend: Literal["auto", "native", "simulated"] = field(default="auto", kw_only=True)
    fallback: Literal["error", "warn"] = field(default="warn", kw_only=True)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "precision_mode", PrecisionMode(self.precision_mode))
        except ValueError:
            modes = ", ".join(PrecisionMode)
            raise MantissaError(f"precision_mode={self.precision_mode!r}: expected one of {modes}") from None
        super().__post_init__()

    @property
    def number_format(self) -> str:
        return self.precision_mode.number_format if self.enabled else "fp32"

    @property
    def accumulate(self) -> int:
        return self.gradient_accumulation_steps


def init_distributed(backend: str | None = None) -> tuple[int, int]:
    """Join the process group that ``torchrun`` describes; returns rank and world size, (0, 1) where there is but one.

    ``backend``: by default nccl where there is CUDA, else gloo.
    """
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ and not dist.is_initialized():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before nccl's first message
    ranks = joined(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    return ranks.rank, ranks.world


def cleanup_distributed() -> None:
    """Leave the process group, if there is one. In a ``finally`` too: while an exception is on its way, it waits for
    nobody, so that the other ranks learn of the failure instead of waiting for this one."""
    if dist.is_initialized():
        if sys.exc_info()[0] is None:
            dist.barrier()  # a rank that leaves early can abort another that still listens to it
        dist.destroy_process_group()


def _buffers(broadcast: bool) -> dict[str, Any]:
    """DDP's option for buffers, where it is not the default: torch 2.13 gave it another name."""
    if broadcast:
        return {}
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def placed(
    model: nn.Module,
    config: ExtendedFP16Config,
    device: torch.device | str | None,
    rank: int | None,
    world_size: int | None,
) -> nn.Module:
    """The model on its device, in DDP where that is asked for, once it is clear which processes there are.

    ``device`` None: this process's own GPU (by ``LOCAL_RANK``), else the CPU.
    """
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    if config.use_ddp and not is_ddp(model):
        options = _buffers(config.broadcast_buffers) | {"find_unused_parameters": config.find_unused_parameters}
        model = distribute(model, "ddp", device=device, **options)
    here = Ranks.here()
    asked = (here.rank if rank is None else rank, here.world if world_size is None else world_size)
    if asked != (here.rank, here.world):
        raise MantissaError(
            f"rank {asked[0]} of {asked[1]} was asked for, but this process is rank {here.rank} of {here.world}: "
            "start it with torchrun, call init_distributed() first, and hand on what that returns"
        )
    if not here.alone and not is_ddp(model):
        raise MantissaError(f"{here.world} processes would each train a model of their own: set use_ddp=True")
    return model.to(device)


class ScalerView:
    """What code that knows ``torch.amp.GradScaler`` reads of a scaler, under its names.

    Scaling, unscaling and stepping are the trainer's, in ``backward_and_step``.
    """

    def __init__(self, trainer: PrecisionTrainer) -> None:
        self._trainer = trainer

    def get_scale(self) -> float:
        return self._trainer.scaler.scale

    def get_growth_factor(self) -> float:
        return self._trainer.scaler.config.growth_factor

    def get_backoff_factor(self) -> float:
        return self._trainer.scaler.config.backoff_factor

    def get_growth_interval(self) -> int:
        return self._trainer.scaler.config.growth_interval

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, float | int]:
        """In the layout of ``torch.amp.GradScaler``."""
        return {
            "scale": self.get_scale(),
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
            "_growth_tracker": self._trainer.scaler.clean_steps,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Take over the scale and its age; the rule is the configuration's. Refused while gradients accumulate."""
        self._trainer.check_closed("scaler.load_state_dict")
        scaler = self._trainer.scaler
        scaler.load_state_dict({"scale": state["scale"], "clean_steps": state["_growth_tracker"]})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.scaler.{name}: not here; backward_and_step(loss) scales, unscales, looks for overflow and steps"
        )


class FP16Trainer:
    """Train ``model`` in fp16. Without ``config`` the environment decides (see ``ENVIRONMENT``); with one too, where it
    switches fp16 off.

    ``scaler``: the one scaler, as long as the trainer lives, read as ``torch.amp.GradScaler`` is; None where the format
    needs none. ``training_steps``: optimiser steps attempted; ``overflow_steps``: given up because a gradient was not
    finite.
    """

    _config_type: ClassVar[type[FP16TrainingConfig] | type[ExtendedFP16Config]] = FP16TrainingConfig

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: FP16TrainingConfig | ExtendedFP16Config | None = None,
    ) -> None:
        self.config = self._checked(config)
        self._off = self.config.enabled and switched_off()
        if self._off:
            _LOG.warning("ENABLE_FP16_TRAINING is off: training in fp32, not in %s", self.config.number_format)
        self._trainer = PrecisionTrainer(
            model,
            optimizer,
            "fp32" if self._off else self.config.number_format,
            backend=self.config.backend,
            fallback=self.config.fallback,
            scale=self.config.scale,
            retries=0,  # one overflow gives a batch up, as there
            accumulate=self.config.accumulate,
            max_grad_norm=self.config.max_grad_norm or math.inf,
            adaptive_clip=self.config.adaptive_clip,
            on_nonfinite="skip",
        )
        self._trainer.optimizer_step.given_up_level = logging.WARNING  # as there
        self.scaler = ScalerView(self._trainer) if self._trainer.precision.active.needs_loss_scaling else None
        self._masters: dict[str, Tensor] = {}  # fp32 weights and buffers, while the model itself is fp16

    @property
    def model(self) -> nn.Module:
        return self._trainer.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._trainer.optimizer

    @classmethod
    def _checked(cls, config: Any) -> Any:
        if config is None:
            return cls._config_type.from_environment()
        if not isinstance(config, cls._config_type):
            expected = cls._config_type.__name__
            raise MantissaError(f"{cls.__name__}: expected a {expected} or None, got a {type(config).__name__}")
        return config

    @property
    def effective_config(self) -> FP16TrainingConfig | ExtendedFP16Config:
        """The configuration that is in force: ``config``, but not enabled where a fallback, or the environment's
        switch, chose fp32."""
        fell_back = self._off or (self.config.enabled and self._trainer.precision.fell_back)
        return dataclasses.replace(self.config, enabled=False) if fell_back else self.config

    @property
    def training_steps(self) -> int:
        return self._trainer.steps

    @property
    def overflow_steps(self) -> int:
        return self._trainer.skipped

    def training_step(self, batch: Any, loss_fn: LossFunction) -> Tensor:
        """``loss_fn(model, batch)`` in the precision; the loss is fp32, with its graph for ``backward_and_step``.

        Under ``torch.no_grad()`` it is an evaluation and has none.
        """
        self._take_masters_back()
        if torch.is_grad_enabled():
            return self._trainer.forward_loss(batch, loss_fn)
        with self._trainer.forward():
            return loss_fn(self.model, batch).float()  # the loss is fp32, whatever the model returned

    def backward_and_step(self, loss: Tensor) -> bool:
        """Backward, and at the optimiser's turn unscale, clip and step. True: the optimiser stepped.

        False: a gradient was not finite, so that the batch was given up, gradients are cleared and the scale was
        lowered (``overflow_steps`` tells); or, where gradients accumulate, it is not the optimiser's turn yet.
        """
        return self._trainer.backward_step(loss).applied

    def cast_model_to_fp16(self) -> nn.Module:
        """Cast the model's weights and buffers to fp16, in place, to serve or to save it; returns the model.

        Where fp16 is not active, it warns and casts nothing, as there. The fp32 masters are kept: ``training_step``,
        ``save_checkpoint`` and ``load_checkpoint`` take them back first, but for tensors that were changed meanwhile,
        so no small update is lost. ``torch.save(trainer.cast_model_to_fp16().state_dict(), path)`` saves half weights.
        """
        if self._trainer.precision.active.name != "fp16":
            active = self._trainer.precision.active
            warnings.warn(f"cast_model_to_fp16: training is in {active}, so nothing is cast", stacklevel=2)
        elif self._trainer.accumulated:
            raise MantissaError(
                f"cast_model_to_fp16: {self._trainer.accumulated} of {self._trainer.accumulate} batches are "
                "accumulated, with gradients of the fp32 weights; cast after the optimiser's turn"
            )
        elif not self._masters:
            tensors = (*self.model.named_parameters(), *self.model.named_buffers())
            self._masters = {name: each.data for name, each in tensors if each.is_floating_point()}
            self.model.half()
            self.model.zero_grad(set_to_none=True)  # those of fp32 weights
        return self.model

    def _take_masters_back(self) -> None:
        present = {*dict(self.model.named_parameters()), *dict(self.model.named_buffers())}
        for name, master in self._masters.items():
            if name not in present:
                continue  # its module was taken away meanwhile
            place, _, own = name.rpartition(".")
            module = self.model.get_submodule(place)
            here = getattr(module, own).data
            kept = master if torch.equal(here, master.half()) else here.to(master.dtype)
            if own in module._parameters:
                getattr(module, own).data = kept  # the optimiser knows this very parameter
            else:
                setattr(module, own, kept)
        self._masters = {}

    def get_stats(self) -> dict[str, Any]:
        """Counters, what is active, and the scale (1 where the format needs none). ``clipped_fraction``: units that
        adaptive clipping shortened in the last step; None where it is off. ``overflow_rate``: skipped / attempted
        optimiser steps. ``precision_active``: whether a low precision is; ``precision_requested`` and
        ``precision_in_use`` are the formats' names."""
        stats = self._trainer.stats()
        active = stats["precision_active"]
        same = ("overflow_rate", "precision_requested", "backend", "reason", "clipped_fraction")
        return {name: stats[name] for name in same} | {
            "training_steps": self.training_steps,
            "overflow_steps": self.overflow_steps,
            "fp16_enabled": active == "fp16",
            "precision_active": active != "fp32",
            "precision_in_use": active,
            "current_scale": stats["loss_scale"],
        }

    def save_checkpoint(self, path: str | Path) -> None:
        """One file, atomically, by rank 0; see ``mantissa.training.checkpoint`` for its keys. On several ranks call
        it on all. Gradients that wait for the optimiser's turn are no part of it: where there are some, it warns."""
        self._take_masters_back()
        if self._trainer.accumulated:
            warnings.warn(
                f"checkpoint {path}: {self._trainer.accumulated} of {self._trainer.accumulate} batches are accumulated "
                "and their gradients are not saved; whoever goes on from it starts a new window",
                stacklevel=2,
            )
        self._trainer.save_checkpoint(path, open_window="leave out")

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a file of ``save_checkpoint``, or of either old layout."""
        self._take_masters_back()
        self._trainer.load_checkpoint(path)


class ExtendedFP16Trainer(FP16Trainer):
    """``FP16Trainer`` with modes, accumulation and DDP. ``device``, ``rank``, ``world_size``: where it runs.

    The model is moved to ``device``: by default this process's GPU, or the CPU without one. ``rank`` and
    ``world_size`` are the process group's, which ``init_distributed`` joins; given, they must agree with it.
    ``training_steps`` counts batches here, as there; ``update_steps`` + ``overflow_steps`` are the optimiser's turns.
    """

    _config_type: ClassVar = ExtendedFP16Config

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: ExtendedFP16Config | None = None,
        device: torch.device | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        config = self._checked(config)
        super().__init__(placed(model, config, device, rank, world_size), optimizer, config)

    @property
    def device(self) -> torch.device:
        return self._trainer.device

    @property
    def rank(self) -> int:
        return self._trainer.ranks.rank

    @property
    def world_size(self) -> int:
        return self._trainer.ranks.world

    @property
    def training_steps(self) -> int:
        return self._trainer.batches_seen

    @property
    def update_steps(self) -> int:
        """Optimiser steps applied."""
        return self._trainer.updates

    @property
    def accumulated_steps(self) -> int:
        """Batches whose gradients wait for the optimiser's turn."""
        return self._trainer.accumulated

    def get_stats(self) -> dict[str, Any]:
        """As ``FP16Trainer.get_stats``, and: ``update_steps`` (applied), ``accumulated_steps`` (batches that wait for
        the optimiser's turn), ``precision_mode`` (asked), device, world_size, rank."""
        return super().get_stats() | {
            "update_steps": self.update_steps,
            "accumulated_steps": self.accumulated_steps,
            "precision_mode": self.config.precision_mode.value,
            "device": str(self.device),
            "world_size": self.world_size,
            "rank": self.rank,
        }

    @staticmethod
    def init_distributed(backend: str | None = None) -> tuple[int, int]:
        """``mantissa.dropin.compat.init_distributed``."""
        return init_distributed(backend)

    @staticmethod
    def cleanup_distributed() -> None:
        """``mantissa.dropin.compat.cleanup_distributed``."""
        cleanup_distributed()
