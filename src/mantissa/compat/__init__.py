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
- The caller's configuration is never changed; what is in force is ``effective_config``, and in ``get_stats()``.
- Clipping is an argument (1.0, as there; None, 0 and inf measure and never clip).
- While gradients accumulate, ``training_step`` returns the batch's mean loss; dividing it is ``backward_and_step``'s
  affair.
- ``use_ddp`` works on a CPU too. Ranks are those of the process group, and only rank 0 writes files.

The world model that came with it is ``mantissa.worldmodel``'s, with its names and arguments: ``docs/worldmodel.md``.

For retry on the same batch, weights of batches, ``scale="auto"`` and the rest, use ``mantissa.training``'s
``PrecisionTrainer``.
"""

from mantissa.compat.trainer import (
    ExtendedFP16Config,
    ExtendedFP16Trainer,
    FP16Trainer,
    PrecisionMode,
    ScalerView,
    cleanup_distributed,
    init_distributed,
)
from mantissa.training.environment import ENVIRONMENT, FP16TrainingConfig
from mantissa.worldmodel import Prediction, ReplayBuffer, Trajectory, WorldModel

__all__ = [
    "ENVIRONMENT",
    "ExtendedFP16Config",
    "ExtendedFP16Trainer",
    "FP16Trainer",
    "FP16TrainingConfig",
    "PrecisionMode",
    "Prediction",
    "ReplayBuffer",
    "ScalerView",
    "Trajectory",
    "WorldModel",
    "cleanup_distributed",
    "init_distributed",
]
