"""The interface of a well-known FP16 training utility, on Mantissa's trainer: change the import, keep the code.

    from mantissa.compat import FP16Trainer, FP16TrainingConfig

    trainer = FP16Trainer(model, optimizer, FP16TrainingConfig())
    for batch in loader:
        loss = trainer.training_step(batch, loss_fn)
        stepped = trainer.backward_and_step(loss)          # False: this batch overflowed and was given up

What differs, each time because the old behaviour loses something:

- The model's parameters stay fp32 (master weights); every forward computes on fp16 copies of them. So it does in the
  modes named ``fp16`` and ``bfloat16``, which there meant ``model.half()``: Adam in pure half loses most updates.
- On a CPU fp16 is really simulated, and refused where it cannot be had; ``fallback="warn"`` opts into fp32.
- Overflow is read from the gradients, the same on every rank; a step that overflowed leaves nothing behind.
- The caller's configuration is never changed; what is active is in ``get_stats()``.
- Clipping is an argument (1.0, as there; inf measures and never clips).

For retry on the same batch, weights of batches, ``scale="auto"`` and the rest, use ``mantissa.PrecisionTrainer``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mantissa.errors import MantissaError
from mantissa.training import LossScaler, PrecisionTrainer, ScalerConfig, distribute

LossFunction = Callable[[nn.Module, Any], Tensor]


class PrecisionMode(StrEnum):
    """What the forward computes in. ``fp16`` and ``mixed_fp16`` are one thing here, as are the two of bf16: fp32
    masters, low-precision compute."""

    FP32 = "fp32"
    FP16 = "fp16"
    BFLOAT16 = "bfloat16"
    MIXED_FP16 = "mixed_fp16"
    MIXED_BF16 = "mixed_bf16"

    @property
    def number_format(self) -> str:
        """The number format's name: ``fp32``, ``fp16`` or ``bf16``."""
        return {"fp32": "fp32", "fp16": "fp16", "mixed_fp16": "fp16"}.get(self.value, "bf16")


# Environment variable -> field of the configuration; ``from_environment`` reads each, and the docs' table is this one.
ENVIRONMENT: dict[str, str] = {
    "ENABLE_FP16_TRAINING": "enabled",
    "FP16_LOSS_SCALE": "loss_scale",
    "FP16_GROWTH_FACTOR": "growth_factor",
    "FP16_BACKOFF_FACTOR": "backoff_factor",
    "FP16_GROWTH_INTERVAL": "growth_interval",
}


@dataclass(frozen=True)
class FP16TrainingConfig:
    """``enabled``: fp16, else fp32. ``loss_scale``: the first scale; the other three are the dynamic rule.

    ``max_grad_norm``: bound on the unscaled gradient's norm. ``backend`` and ``fallback``: as ``PrecisionTrainer``.
    """

    enabled: bool = True
    loss_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    max_grad_norm: float = 1.0
    backend: Literal["auto", "native", "simulated"] = "auto"
    fallback: Literal["error", "warn"] = "error"

    def __post_init__(self) -> None:
        self.scaler_config()  # refuses what makes no sense now, not at the first step

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, **fields: Any) -> Any:
        """The configuration with every variable of ``ENVIRONMENT`` that is set; ``fields`` come first."""
        types = {field.name: type(field.default) for field in dataclasses.fields(FP16TrainingConfig)}
        for variable, name in ENVIRONMENT.items():
            if variable in environment and name not in fields:
                fields[name] = _parsed(variable, environment[variable], types[name])
        return cls(**fields)

    def scaler_config(self) -> ScalerConfig:
        return ScalerConfig(
            initial=self.loss_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            floor=min(1.0, self.loss_scale),
            retries=0,
        )


@dataclass(frozen=True)
class ExtendedFP16Config(FP16TrainingConfig):
    """Adds modes, accumulation and several processes (``use_ddp``, whose other two fields go to torch's DDP)."""

    precision_mode: PrecisionMode = PrecisionMode.MIXED_FP16
    gradient_accumulation_steps: int = 1
    use_ddp: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True


class FP16Trainer:
    """Train ``model`` in fp16. Without ``config`` the environment decides (see ``ENVIRONMENT``)."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: FP16TrainingConfig | None = None
    ) -> None:
        self.config = config if config is not None else self._default_config()
        self.optimizer = optimizer
        self.model = self._placed(model)
        self._trainer = PrecisionTrainer(
            self.model,
            optimizer,
            self._format(),
            backend=self.config.backend,
            fallback=self.config.fallback,
            scale=self.config.scaler_config(),
            accumulate=self._accumulate(),
            max_grad_norm=self.config.max_grad_norm,
            on_nonfinite="skip",
        )

    @staticmethod
    def _default_config() -> FP16TrainingConfig:
        return FP16TrainingConfig.from_environment()

    def _placed(self, model: nn.Module) -> nn.Module:
        return model

    def _format(self) -> str:
        return "fp16" if self.config.enabled else "fp32"

    def _accumulate(self) -> int:
        return 1

    @property
    def scaler(self) -> LossScaler:
        """The one scaler, as long as the trainer lives."""
        return self._trainer.scaler

    @property
    def training_steps(self) -> int:
        """Optimiser steps attempted."""
        return self._trainer.steps

    @property
    def overflow_steps(self) -> int:
        """Optimiser steps given up because a gradient was not finite."""
        return self._trainer.skipped

    def training_step(self, batch: Any, loss_fn: LossFunction) -> Tensor:
        """``loss_fn(model, batch)`` in the precision; the loss is fp32, with its graph for ``backward_and_step``."""
        return self._trainer.forward_loss(batch, loss_fn)

    def backward_and_step(self, loss: Tensor) -> bool:
        """Backward, unscale, clip, step. True: the optimiser stepped, or (where steps accumulate) waits for more.
        False: a gradient was not finite; the batch was given up, gradients are cleared, the scale was lowered."""
        return self._trainer.backward_step(loss).kind != "skipped"

    def cast_model_to_fp16(self) -> nn.Module:
        """The model as it is: its parameters stay fp32, and every forward in ``training_step`` already computes on
        fp16 copies. Casting them would leave Adam nothing but half precision to add small updates to."""
        return self.model

    def get_stats(self) -> dict[str, Any]:
        """Counters, what is active, and the scale while it is in use. ``overflow_rate``: skipped / attempted."""
        role, stats = self._trainer.precision, self._trainer.stats()
        shown = {
            "training_steps": self.training_steps,
            "overflow_steps": self.overflow_steps,
            "overflow_rate": stats["overflow_rate"],
            "fp16_enabled": role.active.name == "fp16",
            "precision_requested": role.requested,
            "precision_active": role.active.name,
            "backend": role.backend,
            "reason": role.reason,
        }
        return shown | ({"current_scale": self.scaler.scale} if role.active.needs_loss_scaling else {})

    def save_checkpoint(self, path: str | Path) -> None:
        """One file, atomically, by rank 0; see ``mantissa.training.trainer_file`` for its keys."""
        self._trainer.save_checkpoint(path)

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a file of ``save_checkpoint``, or of either old layout."""
        self._trainer.load_checkpoint(path)


class ExtendedFP16Trainer(FP16Trainer):
    """``FP16Trainer`` with modes, accumulation and DDP. ``device``, ``rank``, ``world_size``: where it runs."""

    config: ExtendedFP16Config

    @staticmethod
    def _default_config() -> ExtendedFP16Config:
        config: ExtendedFP16Config = ExtendedFP16Config.from_environment()
        return config

    def _placed(self, model: nn.Module) -> nn.Module:
        if not self.config.use_ddp:
            return model
        return distribute(
            model,
            "ddp",
            device=next(model.parameters()).device,
            find_unused_parameters=self.config.find_unused_parameters,
            broadcast_buffers=self.config.broadcast_buffers,
        )

    def _format(self) -> str:
        return self.config.precision_mode.number_format if self.config.enabled else "fp32"

    def _accumulate(self) -> int:
        return self.config.gradient_accumulation_steps

    @property
    def device(self) -> torch.device:
        return self._trainer.device

    @property
    def rank(self) -> int:
        return self._trainer.ranks.rank

    @property
    def world_size(self) -> int:
        return self._trainer.ranks.world

    def get_stats(self) -> dict[str, Any]:
        """As ``FP16Trainer.get_stats``, and: ``update_steps`` (applied), ``accumulated_steps`` (batches that wait for
        the optimiser's turn), ``precision_mode`` (asked), ``precision_active``, device, world_size, rank."""
        return super().get_stats() | {
            "update_steps": self._trainer.updates,
            "accumulated_steps": self._trainer.accumulated,
            "precision_mode": self.config.precision_mode.value,
            "device": str(self.device),
            "world_size": self.world_size,
            "rank": self.rank,
        }

    @staticmethod
    def init_distributed(backend: str | None = None) -> tuple[int, int]:
        """Join the processes that ``torchrun`` started; returns rank and world size, (0, 1) where there is but one."""
        return init_distributed(backend)

    @staticmethod
    def cleanup_distributed() -> None:
        cleanup_distributed()


def init_distributed(backend: str | None = None) -> tuple[int, int]:
    """Join the process group that ``torchrun`` describes (nccl where there is CUDA, else gloo); (rank, world size)."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    if not dist.is_initialized():
        dist.init_process_group(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    return dist.get_rank(), dist.get_world_size()


def cleanup_distributed() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early can abort another that still listens to it
        dist.destroy_process_group()


def _parsed(variable: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise MantissaError(f"{variable}={text!r}: expected true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise MantissaError(f"{variable}={text!r}: expected {expected}") from None
