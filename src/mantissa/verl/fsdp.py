"""verl's FSDP2 engine on a CPU, and ``mantissa_fsdp2``: the same engine with Mantissa's optimiser step.

verl's own step loses the batch where fp16 overflows, has no scale in its checkpoints, and without a CUDA device does
not scale at all (its scaler disables itself). Here ``training.OptimizerStep`` takes the step: the backward of the same
batch is repeated at a lower scale, and given up and counted only beyond the retries; every rank decides alike; the
scale is saved and comes back. The forward, the sharding, the optimiser, the schedule, the clipping's bound and the
checkpoint of weights are verl's.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.utils import model as models
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.metric import Metric
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from mantissa.base.errors import MantissaError
from mantissa.base.files import write_atomically
from mantissa.base.ranks import Ranks, named_parameters
from mantissa.base.readers.json import read_json
from mantissa.training import OptimizerStep, StepOutcome
from mantissa.verl.batch import Rows
from mantissa.verl.flowrl import FlowRL
from mantissa.verl.kept import BESIDE, Keeper
from mantissa.verl.options import fsdp2_options
from mantissa.verl.refusals import of_section, refuse

_LOG = logging.getLogger(__name__)
STATE = "mantissa.json"  # in the actor's folder of a checkpoint: counts and the scaler


class _OnCpu:
    """verl's own engine on a CPU: a frozen model's weights are not pinned for a GPU that is not there."""

    engine_config: Any

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if engine_config.strategy == "fsdp":
            raise MantissaError(
                f"{'critic' if model_config.model_type == 'value_model' else 'actor'}.strategy=fsdp on a CPU: FSDP1 "
                "sends its weights to a GPU; set it to fsdp2"
            )
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)  # type: ignore[call-arg]

    def _build_fsdp_module(self, module: Any) -> Any:
        mine = self.engine_config
        if get_device_name() == "cpu" and mine.forward_only:
            # CPUOffloadPolicy(pin_memory=True) is what verl gives a frozen model, and a CPU has nothing to pin for.
            self.engine_config = dataclasses.replace(mine, forward_only=False)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = mine


class CpuFsdp2(_OnCpu, FSDPEngineWithLMHead):
    """verl's own actor or reference on a CPU."""


class CpuFsdp2Critic(_OnCpu, FSDPEngineWithValueHead):
    """verl's own critic on a CPU, with the attention that ``critic.model.override_config`` names: verl's function asks
    for flash attention whatever that says."""

    def _build_module(self) -> Any:
        theirs = models.load_valuehead_model
        models.load_valuehead_model = _value_model
        try:
            return super()._build_module()
        finally:
            models.load_valuehead_model = theirs


def _value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    """A model with one value a token, as verl's function of this signature gives it."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


class MantissaFsdp2(CpuFsdp2):
    """``strategy=mantissa_fsdp2``, on CPU and CUDA. A frozen model (the reference) is verl's own.

    Raises ``MantissaError`` for options that are unknown or do nothing, and for what this engine does not do.
    """

    step: OptimizerStep
    flowrl: FlowRL | None = None

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.options = fsdp2_options(engine_config.mixed_precision)
        _refuse(self.options, model_config, engine_config)
        # the name by which verl's code knows what to build
        engine_config = dataclasses.replace(engine_config, strategy="fsdp2")
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.keeper = Keeper(str(model_config.local_path), self.rank)

    def initialize(self) -> None:
        super().initialize()
        if self.engine_config.forward_only:
            return
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if self.flowrl is not None:
            named |= self.flowrl.parameters
        self.step = OptimizerStep(
            named,
            self.optimizer,
            self.options.loss_scaling.scaler(self.options.format),
            self.options.format,
            None,  # the rate is verl's schedule's
            self.optimizer_config.clip_grad,
            on_nonfinite=self.options.on_nonfinite,
            ranks=Ranks.here(),
            given_up_level=logging.WARNING,
            names=lambda: named_parameters(self.module).items(),
        )
        self.scaler = _Scale(self.step)

    def _build_optimizer(self, module: Any) -> Any:
        optimizer = super()._build_optimizer(module)
        if self.options.flowrl is not None:
            self.flowrl = FlowRL(self.options.flowrl, module, self.engine_config.seed, self.use_remove_padding)
            self.flowrl.join(optimizer, self.optimizer_config.lr)
        return optimizer

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """One optimiser step on a mini-batch; what verl expects of it, and ``mantissa/...`` among its metrics."""
        maybe_fix_3d_position_ids(data)
        draws = _Draws() if self.options.format.needs_loss_scaling else None
        outputs: dict[str, Any] = {}
        self.keeper.begin(tu.get_non_tensor_data(data=data, key=BESIDE, default=False))

        def backward(scale: float) -> Tensor:
            if draws is not None:
                draws.again()
            self.keeper.anew()
            outputs.clear()  # what a repeated backward says counts once
            outputs.update(self.forward_backward_batch(data, loss_function, forward_only=False))
            if self.flowrl is not None:
                self.flowrl.average_gradients(self.step.ranks)
            return torch.tensor(outputs["loss"]).sum()

        outcome = self.step.run(backward)
        self.keeper.write()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"] |= {"grad_norm": outcome.grad_norm, **_metrics(outcome, self.step)}
        return outputs

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        if self.flowrl is None or forward_only or loss_function is None:
            found = super().forward_step(micro_batch, loss_function, forward_only)
        else:
            wrapped = self.flowrl.wrap(loss_function, self.step.updates)
            with self.flowrl.watching():
                found = super().forward_step(micro_batch, wrapped, forward_only)
        if self.keeper.keeps:
            rows = Rows.of(micro_batch)
            self.keeper.add(micro_batch, rows, found[1]["model_output"]["log_probs"].values()[rows.place_N])
        return found

    def optimizer_step(self) -> float:
        """For a caller that runs its own backward: one step on the gradients that are there, which cannot be redone."""
        if self.flowrl is not None:
            self.flowrl.average_gradients(self.step.ranks)
        return self.step.run(lambda scale: None, accumulated=True, repeatable=False).grad_norm

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)
        if self.rank == 0:
            write_atomically(Path(local_path) / STATE, json.dumps(self.step.state_dict()))
            if self.flowrl is not None:
                self.flowrl.save(Path(local_path))
        torch.distributed.barrier()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """verl's, and the scale and the counts; a checkpoint of verl's own engine has none, which is said."""
        state = Path(local_path) / STATE
        if state.exists():
            self.step.load_state_dict(read_json(state))
        elif self.rank == 0:
            _LOG.warning("%s has no %s: the loss scale begins at %g", local_path, STATE, self.step.scaler.scale)
        if self.flowrl is not None:
            self.flowrl.load(Path(local_path))
        torch.distributed.barrier()  # verl may delete the folder
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load, **kwargs)


class _Scale:
    """What verl's backward calls a scaler: it multiplies the loss, and the rest is ``OptimizerStep``'s."""

    def __init__(self, step: OptimizerStep) -> None:
        self.step = step

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.step.scaler.scale


class _Draws:
    """The generators as they were before a batch: a repeated forward drops the same units."""

    def __init__(self) -> None:
        self.device: Any = get_torch_device()
        self.states, self.first = (torch.get_rng_state(), self.device.get_rng_state()), True

    def again(self) -> None:
        if not self.first:
            torch.set_rng_state(self.states[0])
            self.device.set_rng_state(self.states[1])
        self.first = False


def _metrics(outcome: StepOutcome, step: OptimizerStep) -> dict[str, Metric]:
    """One optimiser step's; verl averages them over those of a step, and puts ``actor/`` before their names."""
    found = {
        "loss_scale": outcome.scale,
        "overflows": float(outcome.overflows),
        "retried": float(outcome.kind == "retried"),
        "skipped": float(outcome.kind == "skipped"),
        "lost_so_far": float(step.skipped),
    }
    return Metric.from_dict({f"mantissa/{name}": value for name, value in found.items()}, aggregation="max")


_DTYPES = {"param_dtype", "reduce_dtype", "buffer_dtype"}  # what verl reads of the section


def _refuse(options: Any, model_config: Any, engine_config: Any) -> None:
    """``MantissaError`` for what this engine does not do, before anything is loaded."""
    role = "ref" if engine_config.forward_only else "actor"
    refuse("strategy=mantissa_fsdp2", of_section(f"{role}.fsdp_config", engine_config, by="mantissa_fsdp2"))
    refused = [
        (
            engine_config.forward_only and not options.model_fields_set <= _DTYPES,
            "ref.fsdp_config.mixed_precision: a frozen model takes param_dtype, reduce_dtype and buffer_dtype alone",
        ),
    ]
    if options.flowrl is not None:
        refused += [
            (
                model_config.use_fused_kernels,
                "model.use_fused_kernels=True with flowrl: it hides the hidden states",
            ),
            (engine_config.ulysses_sequence_parallel_size > 1, "ulysses_sequence_parallel_size > 1 with flowrl"),
            (model_config.lora_rank > 0, "model.lora_rank > 0 with flowrl: not tried"),
        ]
    for when, what in refused:
        if when:
            raise MantissaError(f"strategy=mantissa_fsdp2 does not take {what}")


EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(CpuFsdp2)
EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")(CpuFsdp2Critic)
EngineRegistry.register(model_type="language_model", backend="mantissa_fsdp2", device=["cpu", "cuda"])(MantissaFsdp2)
