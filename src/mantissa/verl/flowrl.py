"""FlowRL inside verl: ``actor.policy_loss.loss_mode=flowrl``, for any engine that carries its head.

verl gives a policy loss neither the reference's log-probs nor the prompt's hidden state. So the engine holds a
``FlowRL``: the head of log Z beside its model, and the two that are missing handed to the loss, which is registered
under its name and is ``mantissa.algorithms``' own. What an engine does with it:

    flowrl = FlowRL(config, model, seed, packed)
    flowrl.join(optimizer, lr)                      # before verl's schedule is made
    with flowrl.watching():                         # around the model's forward
        ... wrapped = flowrl.wrap(loss_function, updates) ...
    flowrl.average_gradients(ranks)                 # after the backward: the head is whole on every rank
    flowrl.save(folder), flowrl.load(folder)

An engine whose forward gives the prompts' mean states itself calls ``wrap(..., states=...)`` and needs no watching.

Legend: B rows of a micro-batch, T tokens, R response tokens right-padded, E hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.utils.metric import Metric
from verl.workers.config import ActorConfig

from mantissa.algorithms.losses.flowrl import FlowRLConfig
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import Ranks
from mantissa.base.readers.safetensors import read_tensors
from mantissa.base.seeds import derive_seed
from mantissa.base.tensors import write_tensors
from mantissa.precision import Accumulator
from mantissa.rl.terms.small import Flow

HEAD = "partition.safetensors"  # in the actor's folder of a checkpoint


@dataclass
class _Handed:
    """What verl's registry does not hand to a policy loss; and back, what the loss counted."""

    config: FlowRLConfig
    ref_logp_BR: Tensor
    log_z_B: Tensor
    tallies: dict[str, Accumulator] = field(default_factory=dict)


_HANDED: ContextVar[_Handed | None] = ContextVar("flowrl", default=None)


class FlowRL:
    """The head of log Z (fp32, replicated: the same on every rank) and its place in an engine.

    ``model``: a Hugging Face causal model, sharded or not. ``packed``: its forward's batch is one row of all tokens
    (``use_remove_padding``). ``seed``: of the head's first weights and its dropout.
    """

    def __init__(self, config: FlowRLConfig, model: nn.Module, seed: int, packed: bool) -> None:
        self.config, self.packed = config, packed
        self._projection: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        device = next(model.parameters()).device
        self.flow = Flow(self._projection.weight.shape[1], config.partition, seed, device)
        self.parameters: dict[str, nn.Parameter] = {}
        self._hidden: Tensor | None = None

    def join(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        """Add the head to the optimiser as a group with its own rate, which a schedule made afterwards scales."""
        self.parameters = self.flow.join(optimizer, lr)
        optimizer.param_groups[-1]["lr"] = self.config.partition_lr or lr

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward: keep what the output projection is given, the final hidden states."""

        def keep(_: nn.Module, given: tuple[Any, ...]) -> None:
            self._hidden = given[0]

        hook = self._projection.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()
            self._hidden = None

    def wrap(
        self, loss_function: Callable[..., Any], updates: int, states: Callable[[Any], Tensor] | None = None
    ) -> Callable[..., Any]:
        """verl's loss function with what FlowRL's needs. ``updates``: names the step's dropout, the same in a retry.

        ``states``: of a micro-batch, the prompts' mean final hidden states (fp32, B by E, differentiable); by default
        from what ``watching`` kept.
        """

        def wrapped(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
            if "ref_log_prob" not in data.keys():  # noqa: SIM118 - a TensorDict iterates over rows
                raise MantissaError(
                    "loss_mode=flowrl needs the reference's log-probs, and verl computes them only where it is told: "
                    "set actor.use_kl_loss=True actor.kl_loss_coef=0"
                )
            device = model_output["log_probs"].device.type
            with torch.autocast(device, enabled=False):
                state_BE = (states or self._states)(data)
                log_z_B = self.flow.log_z(state_BE, self._keys(data["prompts"], updates))
                ref_BR = torch.nested.to_padded_tensor(data["ref_log_prob"], 0.0)
                handed = _Handed(self.config, ref_BR, log_z_B)
                token = _HANDED.set(handed)
                try:
                    loss, metrics = loss_function(model_output=model_output, data=data, dp_group=dp_group)
                finally:
                    _HANDED.reset(token)
            if not handed.tallies:
                raise MantissaError(
                    "mixed_precision.flowrl is set, and actor.policy_loss.loss_mode is another loss: set it to flowrl, "
                    "or leave flowrl out"
                )
            return loss, metrics | _metrics(handed.tallies)

        return wrapped

    def _states(self, data: Any) -> Tensor:
        """The mean of each prompt's final hidden states, fp32, B by E."""
        if self._hidden is None:
            raise MantissaError(
                "flowrl: the model's forward did not call its output projection, so the hidden states were not seen; "
                "set model.use_fused_kernels=False"
            )
        prompt_B = data["prompts"].offsets().diff()
        if self.packed:  # 1, T, E: rows end to end, as in input_ids
            hidden_TE, start_B = self._hidden[0].float(), data["input_ids"].offsets()[:-1]
            return torch.stack(
                [hidden_TE[a : a + n].mean(0) for a, n in zip(start_B.tolist(), prompt_B.tolist(), strict=True)]
            )
        hidden_BTE = self._hidden.float()
        of_prompt_BT = torch.arange(hidden_BTE.shape[1], device=prompt_B.device) < prompt_B.unsqueeze(1)
        total_BE = torch.where(of_prompt_BT.unsqueeze(-1), hidden_BTE, 0.0).sum(1)
        return total_BE / prompt_B.unsqueeze(1).to(total_BE.dtype)

    def _keys(self, prompts: Tensor, updates: int) -> Tensor:
        """What names each row's dropout: the same for all samples of a prompt, another for each step."""
        texts = [" ".join(map(str, prompt.tolist())) for prompt in prompts.unbind()]
        keys = {text: derive_seed(self.flow.seed, "partition dropout", updates, text) for text in set(texts)}
        return torch.tensor([keys[text] for text in texts], dtype=torch.int64, device=prompts.device)

    def average_gradients(self, ranks: Ranks) -> None:
        """The head's gradients as FSDP's: a mean over ranks. Collective."""
        ranks.sum_gradients(self.parameters.values())
        if not ranks.alone:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= ranks.world

    def save(self, folder: Path) -> None:
        """The head's weights beside the policy's; its moments are in the optimiser's state."""
        write_tensors(folder / HEAD, {name: value.cpu() for name, value in self.flow.weights.items()})

    def load(self, folder: Path) -> None:
        """The inverse of ``save``. ``MantissaError`` for a checkpoint without a head."""
        if not (folder / HEAD).exists():
            raise MantissaError(
                f"{folder} has no {HEAD}: it was not saved by a FlowRL job; start without it "
                "(trainer.resume_mode=disable), with the policy as actor_rollout_ref.model.path"
            )
        self.flow.load(read_tensors(folder / HEAD))


@register_policy_loss("flowrl")
def flowrl_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """``FlowRLConfig``'s loss of verl's micro-batch: its sum over rows over the global batch, for a mean over ranks.

    All (B, R). ``advantages``: GRPO's normalised reward, the same at each token of a row. ``rollout_is_weights``:
    verl's correction of the rollout's distribution, which multiplies in. ``config``: verl's actor section. Raises
    ``MantissaError`` where an engine hands over no head, and for settings that make it another loss.
    """
    handed = _HANDED.get()
    if handed is None:
        raise MantissaError(
            "loss_mode=flowrl has a head of its own, which this engine does not carry: set "
            "actor.strategy=mantissa_fsdp2 and +actor.fsdp_config.mixed_precision.flowrl={}"
        )
    mask_BR, info = response_mask.bool(), config.global_batch_info
    reward_B = _reward(advantages, mask_BR)
    _check(config, loss_agg_mode)
    weight_BR = torch.ones_like(log_prob) if rollout_is_weights is None else rollout_is_weights.to(log_prob.dtype)
    share = info["dp_size"] / info["global_batch_size"]
    scale_BR = mask_BR.to(log_prob.dtype) / mask_BR.sum(-1, keepdim=True).clamp(min=1) * share
    old_BR, ref_BR = old_log_prob.to(log_prob.dtype), handed.ref_logp_BR.to(log_prob.dtype)
    loss, tallies = handed.config.loss(
        log_prob, old_BR, reward_B, mask_BR, weight_BR, scale_BR, ref_logp_BT=ref_BR, log_z_B=handed.log_z_B
    )
    handed.tallies.update(tallies)
    return loss, {}


def _reward(advantages: Tensor, mask_BR: Tensor) -> Tensor:
    """The one advantage of each row, fp32; 0 where it has no token."""
    high = torch.where(mask_BR, advantages.float(), -torch.inf).amax(-1)
    low = torch.where(mask_BR, advantages.float(), torch.inf).amin(-1)
    some_B = mask_BR.any(-1)
    if not torch.equal(high[some_B], low[some_B]):
        raise MantissaError(
            "loss_mode=flowrl takes one normalised reward a response, and the advantages differ between its tokens: "
            "set algorithm.adv_estimator=grpo"
        )
    return torch.where(some_B, high, 0.0)


def _check(config: Any, loss_agg_mode: str) -> None:
    if loss_agg_mode != "seq-mean-token-mean":
        raise MantissaError(
            f"loss_mode=flowrl is a mean over responses, got actor.loss_agg_mode={loss_agg_mode}: set "
            "actor.loss_agg_mode=seq-mean-token-mean"
        )
    if config.use_kl_loss and config.kl_loss_coef != 0:
        raise MantissaError(
            f"loss_mode=flowrl holds the policy to the reference by itself, got actor.kl_loss_coef="
            f"{config.kl_loss_coef}: set it to 0, and a lower flowrl.beta to stay nearer"
        )
    for each in fields(ActorConfig):
        given = getattr(config, each.name, each.default)
        if each.name.startswith("clip_ratio") and given != each.default:
            raise MantissaError(
                f"loss_mode=flowrl does not read actor.{each.name}={given}: leave it out; its ratio's bounds are "
                "+actor.fsdp_config.mixed_precision.flowrl.bounds='[0.8,1.28]'"
            )


def _metrics(tallies: dict[str, Accumulator]) -> dict[str, Metric]:
    """verl's kind of metric: largest values by their maximum, sums added, means as the mean over micro-batches."""
    kinds = {"max": "max", "min": "min", "sum": "sum"}
    return {
        name: Metric(value=float(tally.value()), aggregation=kinds.get(tally.kind, "mean"))
        for name, tally in tallies.items()
        if name.startswith("flowrl/")
    }
