"""``actor.strategy=mantissa``: verl's training engine over Mantissa's own learner.

verl gives a batch as nested tensors, each row a prompt and its response without padding, and a loss that takes
log-probs (and entropy) to a number; what is between the two is ours: the model, its kernels in the format of each role,
the backward, the optimiser's step with its loss scale. A model of a family that our decoder does not know runs by
transformers' own code: adopted where kernels are exact, as it is where they are fast.

Three things are otherwise than in verl's engines:

- a backward that overflows is repeated at a lower loss scale on the same batch (``train_batch``), which verl's losses
  bear: they are functions of the batch;
- verl's losses are made for gradients that are averaged over ranks, and ours are summed: each rank's loss is divided by
  their number;
- the learning rate is a function of verl's count of steps (``Schedule``), kept in the checkpoint.

A token's log-prob stands one position before it, as everywhere in verl, and at other positions than those there is 0.

Legend: B rows, T tokens of a row, R response tokens right-padded, N response tokens flat.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from mantissa.adopted import Plans
from mantissa.algorithms.losses.flowrl import FlowRLConfig
from mantissa.base.errors import MantissaError
from mantissa.base.hub import find_model
from mantissa.base.ranks import Ranks, be_deterministic
from mantissa.kernels import ExactPlan, Kernels, NativeKernels, ResolvedPrecision, learner_kernels, resolve
from mantissa.model import Decoder, load_model, policy_weights
from mantissa.model.decoder import place
from mantissa.rl.assemble import exact_plan, prove
from mantissa.rl.config.sections import LossScalingConfig
from mantissa.rl.engines import as_policy, on_grid
from mantissa.rl.policy import load_any, refused_by_ours
from mantissa.rl.score import Entropies, Forward, forward
from mantissa.rl.terms.small import Flow
from mantissa.rollout.transformers import TransformersPolicy, place_transformers, positions_of
from mantissa.training import Backward, OptimizerStep, adamw, master_weights, where_nonfinite
from mantissa.verl.batch import Rows, by_temperature
from mantissa.verl.checkpoint import Checkpoints
from mantissa.verl.flowrl import FlowRL
from mantissa.verl.kept import BESIDE, Keeper
from mantissa.verl.options import EngineOptions, Schedule
from mantissa.verl.refusals import (
    get,
    of_batch,
    of_checkpoint,
    of_engine,
    of_model,
    of_optimizer,
    of_section,
    refuse,
)
from mantissa.verl.wire import TENSOR, Setup

_CALLED = "actor.strategy=mantissa"
_FLAGS = (
    "calculate_entropy",
    "calculate_sum_pi_squared",
    "distillation_use_topk",
    "enable_routing_replay",
    "return_model_output",
)
_LEAST_ROWS = 2048
_LENGTH = 4096  # tokens that a model by transformers' own code is proven for, where the options do not say

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]
# The setup of this process's learner, for the adapter of a hybrid rollout, which verl makes without telling it of one.
LEARNER: dict[str, Setup] = {}


class _Context(BaseEngineCtx):
    """verl's train and eval modes. Nothing is moved: weights stay where they compute."""

    def _context_switch(self, device: str) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self.mode == "train" and self.zero_grad_on_exit:
            self.engine.optimizer_zero_grad()


class _Head(FlowRL):
    """FlowRL's head beside our decoder, whose forward gives the prompts' mean states itself."""

    def __init__(self, config: FlowRLConfig, hidden_size: int, seed: int, device: torch.device) -> None:
        self.config = config
        self.flow = Flow(hidden_size, config.partition, seed, device)
        self.parameters = {}

    def join(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        """Add the head to the optimiser; its rate follows the schedule, from ``partition_lr``."""
        self.parameters = self.flow.join(optimizer, lr)


class MantissaEngine(BaseEngine):
    """The learner of one rank. Made by verl with its own four sections; ``initialize`` loads the model."""

    is_param_offload_enabled = is_optimizer_offload_enabled = False
    module: Decoder | TransformersPolicy
    kernels: Kernels

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.ranks = Ranks.here()
        refuse(_CALLED, of_model(model_config))
        refuse(_CALLED, of_engine(engine_config, self.ranks.world))
        self.frozen = bool(get(engine_config, "forward_only", False))
        if not self.frozen:
            refuse(_CALLED, of_optimizer(optimizer_config))
            refuse(_CALLED, of_checkpoint(checkpoint_config))
        self.options = EngineOptions.of(get(engine_config, "mixed_precision"), learns=not self.frozen)
        self.ranks = Ranks(self.ranks.rank, self.ranks.world, self.ranks.device, self.options.shard)
        self.policy = self.options.policy(engine_config.dtype)
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self.flowrl: _Head | None = None
        self.sent = -1  # updates of the weights that were last given to a rollout
        self.keeper = Keeper(str(model_config.local_path), self.ranks.rank)
        self.device = torch.device("cpu" if get_device_name() == "cpu" else f"cuda:{torch.cuda.current_device()}")

    # made

    def initialize(self) -> None:
        be_deterministic(self.device)
        precision = resolve(self.policy, self.device)  # a reference is a learner that does not learn
        folder = find_model(self.model_config.local_path)
        refused = refused_by_ours(folder)
        self.setup = self._by_transformers(folder, refused) if refused else self._by_ours(precision, folder)
        if self.frozen:
            self.module.requires_grad_(False)
            return
        LEARNER["setup"] = self.setup
        self.schedule, self.trainer_steps = Schedule.of(self.optimizer_config), 0
        scaling = self.options.loss_scaling or LossScalingConfig()
        self.step = self._optimizer_step(scaling.scaler(precision.learner.active))
        self.checkpoints = Checkpoints(self, self.checkpoint_config)

    def _by_ours(self, precision: ResolvedPrecision, folder: Path) -> Setup:
        """The model by our own decoder."""
        module = load_model(folder)
        if precision.learner.fp8 is not None:
            precision.learner.fp8.check(module.projections)
        positions = module.config.max_position_embeddings
        length = min(self.options.length or positions, positions)
        module.padding_row = _padding_row(self.model_config.hf_config, module.config.vocab_size)
        self.module = module = place(module, self.device, self.ranks)
        plan = self.ranks.broadcast(exact_plan(precision, module, self.device, length, self._rows(length)))
        self.evidence = prove(precision, self.device, plan)
        self.kernels = learner_kernels(precision, plan)
        return self._setup(length, plan)

    def _by_transformers(self, folder: Path, refused: str) -> Setup:
        """The model by transformers' own code, adopted where kernels are exact. ``refused``: why not by our decoder."""
        refuse(_CALLED, self.options.by_transformers(self.policy, refused))
        model = load_any(folder, refused)
        length = min(self.options.length or _LENGTH, positions_of(model))

        def opened(plans: Plans | None) -> TransformersPolicy:
            return as_policy(self.policy, model, self.device, length, plans)[0]

        first = self.ranks.agreed(lambda: opened(None) if self.ranks.rank0 else None)
        plans = self.ranks.broadcast(None if first is None or first.adopted is None else first.adopted.plans)
        module = self.ranks.agreed(lambda: first or opened(plans))
        self.kernels = NativeKernels(module.format)  # whose format alone is asked: transformers' code multiplies
        self.evidence = {"learner": self._evidence(module)}
        self.module = place_transformers(module, self.device, self.ranks)
        return self._setup(length, plans=plans)

    def _evidence(self, policy: TransformersPolicy) -> str:
        if policy.adopted is not None:
            return policy.adopted.lines[-1]
        return on_grid("learner", policy, policy.format, self.device)

    def _setup(self, length: int, plan: ExactPlan | None = None, plans: Plans | None = None) -> Setup:
        return Setup(self.policy.model_dump(), plan, torch.get_num_threads(), length, plans)

    def _rows(self, length: int) -> int:
        """Positions of the largest product: of the largest micro-batch that verl's keys allow."""
        if self.options.rows is not None:
            return self.options.rows
        engine = self.engine_config
        tokens = [get(engine, name, 0) for name in ("max_token_len_per_gpu", "infer_max_token_len_per_gpu")]
        rows = [get(engine, name, 0) for name in ("micro_batch_size_per_gpu", "infer_micro_batch_size_per_gpu")]
        return max(_LEAST_ROWS, max(tokens) if get(engine, "use_dynamic_bsz") else max(rows) * length)

    def _optimizer_step(self, scaler: Any) -> OptimizerStep:
        optim, parameters = self.optimizer_config, dict(self.module.named_parameters())
        optimizer = adamw(
            self.module,
            betas=tuple(optim.betas),
            eps=self.options.eps,
            weight_decay=optim.weight_decay,
            moments=self.options.moments,
        )
        seed = int(get(self.engine_config, "seed", 42))
        masters = master_weights(self.options.masters, parameters, self.kernels.format, seed)
        watched: nn.Module = self.module
        if self.options.flowrl is not None:
            assert isinstance(self.module, Decoder)  # ``by_transformers`` refuses others
            self.flowrl = _Head(self.options.flowrl, self.module.config.hidden_size, seed, self.device)
            self.flowrl.join(optimizer, optim.lr)
            parameters |= self.flowrl.parameters
            watched = nn.ModuleDict({"policy": self.module, "partition": self.flowrl.flow.head})

        def diagnose(backward: Backward) -> str:
            return str(where_nonfinite(watched, lambda: backward(scaler.scale), self.ranks))

        clip = float("inf") if optim.clip_grad is None else float(optim.clip_grad)
        return OptimizerStep(
            parameters,
            optimizer,
            scaler,
            self.kernels.format,
            lambda _: self.schedule.rate(self.trainer_steps),
            clip,
            diagnose,
            on_nonfinite=self.options.on_nonfinite,
            ranks=self.ranks,
            given_up_level=logging.WARNING,
            masters=masters,
        )

    # what verl asks of every engine

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Context(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Context(self, "eval", **kwargs)

    def get_data_parallel_size(self) -> int:
        return self.ranks.world

    def get_data_parallel_rank(self) -> int:
        return self.ranks.rank

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Nothing to do: nothing is offloaded."""

    def optimizer_zero_grad(self) -> None:
        if not self.frozen:
            self.step.optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        raise MantissaError(f"{_CALLED}: an update is one call of train_batch, which may repeat its backward")

    def lr_scheduler_step(self) -> float:
        """Count a step of verl's trainer; the next one's learning rate."""
        self.trainer_steps += 1
        return self.schedule.rate(self.trainer_steps)

    # a batch

    def train_batch(self, data: Any, loss_function: LossFunction) -> dict[str, Any]:
        """One update of the optimiser. verl's output of it: ``loss`` and ``metrics`` of each micro-batch, in lists."""
        maybe_fix_3d_position_ids(data)
        micro_batches, indices = self._split(data)
        outputs: list[dict[str, Any]] = []
        self.keeper.begin(self._flag(data, BESIDE))

        def backward(scale: float) -> Tensor:
            self.keeper.anew()
            outputs.clear()  # a repeated backward counts once
            total = torch.zeros((), device=self.device)
            for micro in micro_batches:
                loss, output = self.forward_step(micro, loss_function)
                if not self._flag(data, "return_model_output"):
                    output.pop("model_output")
                outputs.append(output)
                total += loss.detach()
                (loss * (scale / self.ranks.world)).backward()
            self.ranks.sum_gradients(self.step.parameters.values())
            return total

        outcome = self.step.run(backward)
        self.keeper.write()
        output: dict[str, Any] = postprocess_batch_func(output_lst=outputs, indices=indices, data=data)
        for name in [name for name in output["metrics"] if name.startswith("mantissa/logprobs_")]:
            output["metrics"][name] = [self.ranks.sum_of(sum(output["metrics"][name]))]  # verl takes a mean
        output["metrics"] |= {
            "grad_norm": outcome.grad_norm,
            "mantissa/loss_scale": [outcome.scale],
            "mantissa/overflows": [outcome.overflows],
            "mantissa/retried": [int(outcome.kind == "retried")],
            "mantissa/skipped": [int(not outcome.applied)],
            "mantissa/lost_so_far": [self.step.skipped],
            "mantissa/max_scaled_grad": [outcome.max_scaled_grad],
        }
        return output

    def forward_backward_batch(self, data: Any, loss_function: LossFunction | None, forward_only: bool = False) -> Any:
        """Log-probs (and entropy, and a loss) of a batch, without a gradient."""
        if not forward_only:
            raise MantissaError(
                f"{_CALLED}: a backward alone is not supported, for it may be repeated; use train_batch"
            )
        micro_batches, indices = self._split(data)
        outputs = [self.forward_step(micro, loss_function)[1] for micro in micro_batches]
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _split(self, data: Any) -> tuple[list[Any], Any]:
        """verl's own micro-batches; each rank has as many."""
        flags = {name: self._flag(data, name) for name in _FLAGS}
        refuse(_CALLED, of_batch(flags, set(data.keys())))
        tokens = data["loss_mask"].sum().to(self.device)
        self.ranks.sum_(tokens)
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.ranks.world)
        micro_batches, indices = prepare_micro_batches(
            data=data, dp_group=self.get_data_parallel_group(), same_micro_num_in_dp=True
        )
        return micro_batches, indices

    @staticmethod
    def _flag(data: Any, name: str) -> Any:
        return tu.get_non_tensor_data(data=data, key=name, default=False)

    def forward_step(self, micro: Any, loss_function: LossFunction | None) -> tuple[Tensor, dict[str, Any]]:
        """One forward: the loss with its gradient (1 without a function), and verl's record of it (detached)."""
        micro = micro.to(self.device)
        rows = Rows.of(micro)
        entropies: Entropies = bool(self._flag(micro, "calculate_entropy"))
        if entropies and torch.is_grad_enabled():
            entropies = "differentiable"  # for verl's entropy_coeff
        learns = self.flowrl is not None and loss_function is not None and torch.is_grad_enabled()
        passed = self._forward(rows, micro["temperature"], entropies, prompts=learns)
        head, prompt_BE = self.flowrl, passed.prompt_BE
        if head is not None and loss_function is not None and prompt_BE is not None:
            loss_function = head.wrap(loss_function, self.step.updates, lambda _: prompt_BE)
        given = {"log_probs": rows.jagged(passed.logp_N)}
        self.keeper.add(micro, rows, passed.logp_N)
        if passed.entropy_N is not None:
            given["entropy"] = rows.jagged(passed.entropy_N)
        loss = torch.ones((), device=self.device)
        metrics: dict[str, Any] = {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=given, data=micro, dp_group=self.get_data_parallel_group())
            metrics |= self._unlike(micro, rows, passed.logp_N.detach())
        kept = {name: nested.detach() for name, nested in given.items()}
        return loss, {"model_output": kept, "loss": float(loss.detach()), "metrics": metrics}

    def _unlike(self, micro: Any, rows: Rows, logp_N: Tensor) -> dict[str, float]:
        """How many log-probs of what the policy wrote differ from the rollout's, and from verl's ``old_log_probs``.

        Only while the weights are those that were last sent to the rollout: later ones differ rightly.
        """
        if self.sent != self.step.updates or "rollout_log_probs" not in micro.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            return {}
        written_N = micro["response_mask"].values().bool()
        found: dict[str, float] = {"mantissa/logprobs_compared": float(written_N.sum())}
        for key, name in {"rollout_log_probs": "rollout", "old_log_probs": "old"}.items():
            theirs_N = micro[key].values().float()
            found[f"mantissa/logprobs_unlike_{name}"] = float((theirs_N != logp_N)[written_N].sum())
        return found

    def _forward(self, rows: Rows, temperature: Any, entropies: Entropies, prompts: bool) -> Forward:
        """A forward for each temperature that occurs; of sharded weights each rank has as many, for each is an
        exchange."""
        parts = by_temperature(temperature, len(rows.sequences))
        wanted = int(self.ranks.max_of(float(len(parts)))) if self.ranks.sharded else len(parts)
        if wanted == 1:
            return forward(self.module, self.kernels, rows.sequences, parts[0][0], entropies=entropies, prompts=prompts)
        if prompts:
            raise MantissaError(f"{_CALLED}: loss_mode=flowrl with {wanted} temperatures in a batch; sample with one")
        logp_BR = torch.zeros(rows.sequences.mask_BR.shape, dtype=torch.float32, device=self.device)
        entropy_BR = torch.zeros_like(logp_BR)
        for number in range(wanted):
            value, chosen = parts[min(number, len(parts) - 1)]
            part = rows.sequences.select(chosen.to(self.device))
            passed = forward(self.module, self.kernels, part, value, entropies=entropies)
            if number >= len(parts):  # only for the exchange with the other ranks: it counts nothing
                logp_BR = logp_BR + 0.0 * passed.logp_N.sum()
                continue
            row_N, column_N = part.mask_BR.nonzero(as_tuple=True)
            place_N = (chosen.to(self.device)[row_N], column_N)
            logp_BR = logp_BR.index_put(place_N, passed.logp_N)
            if passed.entropy_N is not None:
                entropy_BR = entropy_BR.index_put(place_N, passed.entropy_N)
        mask = rows.sequences.mask_BR
        return Forward(logp_BR[mask], entropy_BR[mask] if entropies else None)

    # weights out, checkpoints

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """The fp32 masters one by one, whole; collective where they are sharded.

        verl calls it with arguments for a rollout in this process, and without for a checkpoint engine, which carries
        nothing but tensors: then the setup goes first, as one.
        """
        self.sent = self.step.updates
        return self._weights(with_setup=not kwargs), None

    def _weights(self, with_setup: bool) -> Iterator[tuple[str, Tensor]]:
        if with_setup:
            yield TENSOR, self.setup.to_tensor().to(self.device)
        for name, tensor in self.weights().items():
            yield name, whole(tensor)

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's fp32 masters by Hugging Face's names, in slices where they are sharded."""
        if isinstance(self.module, TransformersPolicy):
            return {name: parameter.detach() for name, parameter in self.module.model.named_parameters()}
        return policy_weights(self.module)

    def whole_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as a checkpoint holds them; on rank 0 alone where they are sharded."""
        return self.ranks.whole(tensors)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write ``local_path``; see ``checkpoint.py``. Collective."""
        self.checkpoints.save(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Go on from ``local_path``, bit for bit. Collective."""
        self.checkpoints.load(local_path, hdfs_path)

    def disable_adapter(self) -> Any:
        return contextlib.nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's whole value; collective."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def _padding_row(config: Any, vocabulary: int) -> int | None:
    """The token whose embedding transformers gives no gradient (``padding_idx``), so that neither do we."""
    pad = get(config, "pad_token_id")
    return int(pad) if pad is not None and 0 <= int(pad) < vocabulary else None


class RefusedValueEngine(BaseEngine):
    """There is no critic here; verl's own can stand beside our actor."""

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        by = str(engine_config.strategy)
        refuse(f"critic.strategy={by}", of_section("critic", {"strategy": by}, by))


_PLUGIN = ["mantissa", "mantissa_fsdp2"]
EngineRegistry.register(model_type="language_model", backend="mantissa", device=["cpu", "cuda"])(MantissaEngine)
EngineRegistry.register(model_type="value_model", backend=_PLUGIN, device=["cpu", "cuda"])(RefusedValueEngine)
