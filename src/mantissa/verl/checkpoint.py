"""The engine's part of verl's checkpoint ``global_step_N/actor``.

- ``mantissa/step-N``   our own checkpoint (``training/checkpoint.py``): fp32 masters, FlowRL's head (``partition``)
  where there is one, the optimiser's tensors, and the counters, loss scale and schedule as plain numbers; all or
  nothing, with digests, and no pickle
- ``huggingface``       config and tokenizer, and with ``hf_model`` in ``actor.checkpoint.save_contents`` the weights:
  the folder that ``mantissa sample`` and transformers load

verl's own parts (data position, its list of checkpoints) stand beside. Tensors are whole whatever the number of ranks,
so a job may go on with another number, and a kill leaves the checkpoint before it: verl names one its latest after it
was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from mantissa.base.bounds import boundary, count
from mantissa.base.errors import MantissaError
from mantissa.base.files import remove
from mantissa.base.ranks import Ranks
from mantissa.model import Decoder, load_tokenizer, save_model
from mantissa.precision import PrecisionPolicy
from mantissa.rl.terms.small import Flow
from mantissa.rollout.transformers import TransformersPolicy, save_transformers
from mantissa.training import Checkpoint, OptimizerStep, load_checkpoint, load_weights, save_checkpoint
from mantissa.verl.refusals import get

_DEFAULT = ("model", "optimizer", "extra")


class _Head(Protocol):
    """FlowRL's part, of which log Z is learned."""

    flow: Flow


class _Engine(Protocol):
    """What a checkpoint is of."""

    module: Decoder | TransformersPolicy
    ranks: Ranks
    policy: PrecisionPolicy
    step: OptimizerStep
    trainer_steps: int
    model_config: Any

    @property
    def flowrl(self) -> _Head | None: ...

    def weights(self) -> Mapping[str, Tensor]: ...

    def whole_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class Checkpoints:
    """Writes and reads one engine's checkpoints, and keeps as many as verl asks for."""

    def __init__(self, engine: _Engine, config: Any) -> None:
        self.engine = engine
        self.saved = set(get(config, "save_contents") or _DEFAULT)
        self.loaded = set(get(config, "load_contents") or _DEFAULT)
        self._written: list[Path] = []

    def save(self, local_path: str, hdfs_path: str | None, step: int, keep: int | None) -> None:
        """All that a resume needs. Collective; rank 0 writes."""
        _refuse_hdfs(hdfs_path)
        engine, folder = self.engine, Path(local_path)
        weights = dict(engine.weights())
        engine.ranks.check_alike(weights)
        policy = engine.whole_tensors(weights)
        optimizer = engine.whole_tensors(engine.step.optimizer_tensors())
        more = {} if engine.flowrl is None else {"partition": engine.flowrl.flow.weights}
        state = {
            "step": engine.step.state_dict(),
            "trainer_steps": engine.trainer_steps,
            "precision": engine.policy.model_dump(),
        }

        def write() -> None:
            if not engine.ranks.rank0:
                return
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "mantissa").mkdir(exist_ok=True)
            save_checkpoint(folder / "mantissa", Checkpoint(step, policy, optimizer, state, more), keep=1)
            self._huggingface(folder / "huggingface", policy)
            self._forget(folder, keep)

        engine.ranks.agreed(write)

    def _huggingface(self, folder: Path, weights: dict[str, Any]) -> None:
        model = self.engine.module
        if "hf_model" in self.saved:
            tokenizer = load_tokenizer(self.engine.model_config.local_path, model.config.vocab_size)
            if isinstance(model, TransformersPolicy):
                save_transformers(model, tokenizer, folder, weights)
            else:
                save_model(model, tokenizer, folder, weights=weights)
        else:
            self.engine.model_config.hf_config.save_pretrained(folder)
            self.engine.model_config.tokenizer.save_pretrained(folder)

    def _forget(self, folder: Path, keep: int | None) -> None:
        """Delete this job's oldest checkpoints beyond ``keep``, as verl's own engines do."""
        self._written.append(folder)
        while keep and len(self._written) > keep:
            remove(self._written.pop(0))

    def load(self, local_path: str, hdfs_path: str | None) -> None:
        """The inverse of ``save``; a checkpoint of another format, model or optimiser is an error. Collective."""
        if local_path is None:
            return
        _refuse_hdfs(hdfs_path)
        folder = Path(local_path) / "mantissa"
        if not folder.is_dir():
            raise MantissaError(
                f"{local_path} holds no checkpoint of actor.strategy=mantissa: it was written by another engine; "
                "resume it with that one, or set actor_rollout_ref.model.path to its policy and start anew"
            )
        checkpoint = load_checkpoint(folder)
        with boundary(f"checkpoint {folder}", "it is damaged, or of another job; resume from an earlier one"):
            self._take(checkpoint)
        if dist.is_initialized():
            dist.barrier()

    def _take(self, checkpoint: Checkpoint) -> None:
        engine, state = self.engine, checkpoint.state
        steps = count(state["trainer_steps"], "checkpoint's trainer_steps")
        if "optimizer" in self.loaded:
            engine.step.load_optimizer_tensors(checkpoint.optimizer)
        if "extra" in self.loaded:
            engine.step.load_state_dict(state["step"])
            engine.trainer_steps = steps
        if "model" in self.loaded:
            if engine.flowrl is not None:
                engine.flowrl.flow.load(checkpoint.part("partition"))
            load_weights(engine.weights(), checkpoint.policy)


def _refuse_hdfs(path: str | None) -> None:
    if path is not None:
        raise MantissaError(f"trainer.default_hdfs_dir: {path}: checkpoints are written to a folder; leave it out")
