"""``+trainer.certify=N``: a job keeps the batch of step N as each side saw it, for ``mantissa certify JOB``.

The trainer names the step to the learner's ranks, beside the batch that they learn from. Each rank writes what its
first update is of, into ``certify/step-N/rank-R.json`` in the checkpoints' folder: tokens, the seed of their draws, the
rollout's log-probs, verl's ``old_log_probs``, and those of the update's own forward. The weights that all of them are
of lie in the checkpoint before that step, or are the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mantissa.base.files import disk_errors, write_atomically
from mantissa.bench.certificate import Kept, Sampling, Sequence, hexed
from mantissa.verl.batch import Rows
from mantissa.verl.options import EngineOptions, fsdp2_options
from mantissa.verl.refusals import get
from mantissa.verl.serving import request_seed, seed_of
from mantissa.verl.wire import Setup

KEY = "trainer.certify"
BESIDE = "mantissa_keep"  # its name beside a batch
_NAMED = ("global_steps", "index", "session_id")  # of each sample: what its seed is made of


def named_beside(config: Any, step: int) -> dict[str, Any]:
    """What goes beside the batch of ``step``: nothing but for the one to be kept. ``config``: verl's, whole."""
    asked = get(config, KEY)
    if asked is None or int(asked) != step:
        return {}
    section = config.actor_rollout_ref
    said = {
        "folder": str(Path(config.trainer.default_local_dir).absolute() / "certify" / f"step-{step}"),
        "step": step,
        "precision": _precision(section),
        "seed": int(get(section.rollout, "seed", 42)),
        "sampling": {
            "temperature": float(section.rollout.temperature),
            "max_tokens": int(section.rollout.response_length),
        },
    }
    return {BESIDE: said}


def _precision(section: Any) -> dict[str, Any]:
    """Both sides' formats, as a recipe says them."""
    engine = section.actor.fsdp_config
    if section.actor.strategy == "mantissa":
        return EngineOptions.of(get(engine, "mixed_precision")).policy(str(engine.dtype)).model_dump(mode="json")
    rollout = section.rollout
    setup = Setup.of_keys(str(rollout.dtype), get(rollout, "quantization"), int(rollout.response_length))
    return {**setup.policy, "train": fsdp2_options(get(engine, "mixed_precision")).format.name}


class Keeper:
    """Of one rank of the learner, whose model began as what lies at ``model``: the first update of the step that is to
    be kept, for later ones have other weights. ``begin``, ``add`` what each forward is of, ``write``."""

    def __init__(self, model: str, rank: int) -> None:
        self.model, self.rank = model, rank
        self._asked: Mapping[str, Any] = {}  # of the update that goes on; empty where it is not kept
        self._written = 0  # the step
        self._sequences: list[Sequence] = []

    def begin(self, asked: Any) -> None:
        """An update. ``asked``: what is beside its batch, or False."""
        self._asked = asked if asked and asked["step"] != self._written else {}

    @property
    def keeps(self) -> bool:
        """Whether the update that goes on is kept."""
        return bool(self._asked)

    def anew(self) -> None:
        """A backward, which may be repeated: its forwards are added again."""
        self._sequences = []

    def add(self, micro: Any, rows: Rows, logp_N: Tensor) -> None:
        """A micro-batch, and the log-probs of its response tokens. Left out are rows with tokens that the policy did
        not write."""
        if not self.keeps:
            return
        lengths = rows.sequences.mask_BR.sum(1).tolist()
        sides = (micro["rollout_log_probs"].values(), micro["old_log_probs"].values(), logp_N.detach())
        columns = [each.float().cpu().split(lengths) for each in sides]
        written = [bool(each.all()) for each in micro["response_mask"].unbind()]
        fields = [[_plain(each) for each in micro[name]] for name in _NAMED]
        prompts, responses = ([each.tolist() for each in micro[name].unbind()] for name in ("prompts", "responses"))
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if not written[row] or not response:
                continue
            sample = dict(zip(_NAMED, (each[row] for each in fields), strict=True))
            rollout, rescoring, update = (hexed(each[row].tolist()) for each in columns)
            self._sequences.append(
                Sequence(
                    prompt=tuple(prompt), seed=request_seed(self._asked["seed"], seed_of(sample), prompt),
                    response=tuple(response), rollout=rollout, rescoring=rescoring, update=update,
                )
            )  # fmt: skip

    def write(self) -> None:
        """The rank's file, whole or not at all; none where it has no sequence."""
        asked, self._asked = self._asked, {}
        if not asked:
            return
        self._written = asked["step"]
        if not self._sequences:
            return
        kept = Kept(
            kept="mantissa kept batch",
            version=1,
            step=asked["step"],
            model=self.model,
            precision=asked["precision"],
            threads=torch.get_num_threads(),
            sampling=Sampling(**asked["sampling"]),
            sequences=tuple(self._sequences),
        )
        path = Path(asked["folder"]) / f"rank-{self.rank}.json"
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, kept.model_dump_json(indent=1) + "\n")


def _plain(value: Any) -> Any:
    """A value as the agent loop had it: what travels beside tensors comes back wrapped."""
    from verl.utils.tensordict_utils import unwrap_non_tensor_data

    value = unwrap_non_tensor_data(value)
    return value.item() if isinstance(value, Tensor | np.generic) else value
