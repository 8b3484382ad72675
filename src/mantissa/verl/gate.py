"""``+trainer.gate=stop``: the doctor inside verl's trainer, which compares the log-probs of rollout and learner.

    actor_rollout_ref.model.external_lib=mantissa.verl.plugin  +trainer.gate=stop      # or warn; stop:10: each 10 steps

Looked at are the batches of the first steps of a job, also of a resumed one (each comes after a sync of weights), and
then of every 25th step: in verl's newer trainers (``trainer.ppo.v1``) where ``old_log_prob`` has been computed, whose
batch lies in the TransferQueue with prompts, responses and both sides' log-probs; in the older ones (``main_ppo_v0``,
``fully_async_policy``) before the actor learns from it. In ``bypass_mode`` verl takes the rollout's log-probs for the
old ones; then the batches that are looked at are scored once more for the gate. ``one_step_off_policy`` always samples
one update ahead: there the next batch is waited for at the steps that are looked at, and scored before the update.

Each sync of weights is looked at too, the first five and then every 25th: ``sync.py``.

A trainer that has none of these places is refused before it starts (``hooks`` is how each finds the gate). A fault ends
the job with its name and what to set (``warn`` only says it); each diagnosis is a line and a page,
``doctor/step-N/doctor.html`` in the checkpoints' folder, and ``mantissa/gate_fault`` (0 or 1) and the gap's size join
verl's metrics.

The gate's measure, its first healthy size, stays in the checkpoints' folder (``mantissa_gate.json``), and a resumed job
is held to it.

Not seen are validation, what the policy did not sample itself (tools' answers), and, of a trainer that runs ahead, what
older weights sampled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mantissa.base.errors import MantissaError, say
from mantissa.base.files import write_atomically
from mantissa.base.readers.json import read_json
from mantissa.doctor.diagnosis import Diagnosis, Verdict
from mantissa.doctor.dump import caps, routes
from mantissa.doctor.gate import Gate
from mantissa.doctor.record import ScoredBatch, write_batch
from mantissa.verl.refusals import get
from mantissa.verl.sync import SyncGate

KEY = "trainer.gate"
ROWS = "MANTISSA_GATE_ROWS"  # a folder, in a job's environment: what is looked at is written there too, step-N.jsonl
KEPT = "mantissa_gate.json"  # beside verl's latest_checkpointed_iteration.txt
FIRST = 5  # steps after a start or a resume whose every batch is looked at
_FIELDS = ("prompts", "responses", "response_mask", "rollout_log_probs")
_FREE = "fsdp_config.mixed_precision"
_FSDPS = ("fsdp", "fsdp2", "mantissa_fsdp2")  # which read no fsdp_config.dtype
_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def parse(asked: str, written: str = "") -> tuple[str, int]:
    """``stop`` or ``warn``, and every how many steps: of ``stop``, ``warn:10``. ``MantissaError`` for anything else.

    ``written``: how it stands where it was asked for, if not as the key of verl's configuration.
    """
    on_fault, _, every = str(asked).partition(":")
    if on_fault not in ("stop", "warn") or not (every or "25").isdecimal() or int(every or "25") < 1:
        written = written or f"{KEY}={asked}"
        raise MantissaError(f"{written}: expected stop or warn, or one with a number of steps, such as stop:10")
    return on_fault, int(every or "25")


class TrainerGate:
    """The gate of one trainer (``verl.trainer.ppo.v1``). ``config``: verl's, whole."""

    def __init__(self, config: Any, asked: str) -> None:
        on_fault, every = parse(asked)
        self.rollout = config.actor_rollout_ref.rollout
        if not self.rollout.calculate_log_probs:
            raise MantissaError(
                f"{KEY}={asked}: the rollout's log-probs are not kept; set "
                "actor_rollout_ref.rollout.calculate_log_probs=True"
            )
        self.bypassed = bool(get(config, "algorithm.rollout_correction.bypass_mode", False))
        self.ahead = self._runs_ahead(config)
        self.trainer = config.trainer
        self.folder = Path(config.trainer.default_local_dir) / "doctor"
        self.formats = _formats(config.actor_rollout_ref)
        self.experts, self.soft_cap = _model(get(config, "actor_rollout_ref.model.path"))
        self.lines: list[str] = []
        self.looked = 0
        self.gate = Gate(every, "stop" if on_fault == "stop" else "warn", framework="verl", say=self._say)
        self.sync = SyncGate(every, on_fault == "stop", KEY, lambda line: say(line, err=True))

    def _runs_ahead(self, config: Any) -> bool:
        return bool(get(config, "trainer.v1.trainer_mode", "sync") != "sync")

    def _say(self, line: str) -> None:
        self.lines.append(line)
        say(line, err=True)

    def due(self, step: int) -> bool:
        """Whether a batch of this step would be looked at."""
        return self.looked < FIRST or self.gate.due(step)

    def look(self, trainer: Any, batch: Any, step: int | None = None) -> dict[str, float]:
        """Of a batch that is to be learned from: metrics. ``MantissaError`` where a fault is to stop the job.

        ``step``: of the batch, if it is not the trainer's. verl numbers weights by the step after which they were sent.
        """
        return self.sync.metrics() | self._looked(trainer, batch, self._step(trainer) if step is None else step)

    def _looked(self, trainer: Any, batch: Any, step: int) -> dict[str, float]:
        if self.looked == 0:
            self._recall(step)
        if self.looked < FIRST:
            self.gate.after_sync()
        if not self.gate.due(step):
            return {}
        self.looked += 1
        rows = self._rows(trainer, batch, step - 1)
        if not rows:
            return {}
        try:
            prompts, tables = self._read(trainer, batch, rows)
        except (KeyError, ValueError, RuntimeError) as error:
            self._say(f"mantissa doctor: the batch of step {step} cannot be read ({error}); the training goes on")
            return {}
        if ROWS in os.environ:
            settings = {"framework": "verl", "temperature": float(self.rollout.temperature)}
            responses, mask, rollout, learner = tables
            seen = ScoredBatch(prompts, responses, mask, rollout, learner, settings)
            write_batch(Path(os.environ[ROWS]) / f"step-{step}.jsonl", seen)
        versions = self._versions(batch)
        found = self.gate.check(
            step,
            prompts,
            *tables,
            temperature=float(self.rollout.temperature),
            **self.formats,
            experts=self.experts,
            soft_cap=self.soft_cap,
            rollout_version=[versions[row] for row in rows],
            learner_version=step - 1,
        )
        return {} if found is None else self._answer(step, found)

    def _answer(self, step: int, found: Diagnosis) -> dict[str, float]:
        page = self.gate.write_page(self.folder / f"step-{step}")
        if found.verdict not in (Verdict.FAULT, Verdict.LARGE):  # those have been said
            self._say(f"mantissa doctor: step {step}: {found.headline}")
        if self.gate.stop:
            raise MantissaError(f"{self.lines[-1]}. Page: {page}. {KEY}=warn goes on in spite of it")
        write_atomically(self.folder.parent / KEPT, json.dumps(self.gate.state_dict()))
        return {
            "mantissa/gate_fault": float(self.gate.wrong(found)),
            "mantissa/gate_size_of_u": float(found.figures["u_rms"]),
            "mantissa/gate_tokens": float(found.figures["tokens"]),
        }

    def _recall(self, step: int) -> None:
        """Of a resumed job: the measure that lies beside the checkpoint which it goes on from."""
        if step <= 1:
            return  # whatever lies there is of another job
        explicit = get(self.trainer, "resume_mode") == "resume_path"
        folder = Path(self.trainer.resume_from_path).parent if explicit else self.folder.parent
        kept = folder / KEPT
        if not kept.is_file():
            return
        try:
            self.gate.load_state_dict(read_json(kept))
        except MantissaError as error:
            self._say(f"mantissa doctor: {kept} cannot be read ({error}); the gap is measured anew")

    def _step(self, trainer: Any) -> int:
        return int(trainer.global_steps)

    def _versions(self, batch: Any) -> Sequence[int | None]:
        """Of the weights that sampled each row, as the rollout says them."""
        return [tag.get("min_global_steps") for tag in batch.tags]

    def _rows(self, trainer: Any, batch: Any, newest: int) -> list[int]:
        """Which of the batch to compare. Of a trainer that runs ahead (``trainer.v1.trainer_mode``): those that the
        newest weights sampled, for an older one's gap is what was learned since."""
        rows = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        if self.bypassed and trainer.__dict__.get("local_trigger_step"):
            return []  # the learner has gone on from the weights of this batch
        if self.ahead:
            rows = [row for row in rows if batch.tags[row].get("min_global_steps") == newest]
        return rows

    def _read(self, trainer: Any, batch: Any, rows: list[int]) -> tuple[list[list[int]], list[Tensor]]:
        """The prompts, and four tables: responses, mask, both sides' log-probs."""
        import transfer_queue as tq

        learner = "old_log_probs"
        if self.bypassed:
            batch.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=self.rollout.temperature)
            trainer.actor_rollout_wg.compute_log_prob(batch)
            learner = "log_probs"
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*_FIELDS, learner])
        if self.bypassed:
            from verl.workers.utils.padding import response_from_nested

            data[learner] = response_from_nested(data[learner], data["response_mask"])
        prompts = data["prompts"].unbind()
        padded = [data[name] for name in ("responses", "response_mask", "rollout_log_probs", learner)]
        tables = [each.to_padded_tensor(0.0) if each.is_nested else each for each in padded]
        return [prompts[row].tolist() for row in rows], [table[rows] for table in tables]


class OldTrainerGate(TrainerGate):
    """Of verl's older trainers, ``RayPPOTrainer`` and what derives from it: their batch is a ``DataProto`` that the
    driver holds. ``score``: a trainer and a batch to the ``old_log_probs`` of the weights that the trainer has, B,R."""

    def __init__(self, config: Any, asked: str, score: Callable[[Any, Any], Tensor]) -> None:
        super().__init__(config, asked)
        self.score = score

    def _runs_ahead(self, config: Any) -> bool:
        return get(config, "async_training") is not None  # fully_async_policy

    def _step(self, trainer: Any) -> int:
        """Of a trainer that sends its weights after several steps: the number of sends, by which it numbers them."""
        return int(getattr(trainer, "current_param_version", trainer.global_steps - 1)) + 1

    def _versions(self, batch: Any) -> Sequence[int | None]:
        known = batch.non_tensor_batch.get("min_global_steps")
        return [None] * len(batch.batch["responses"]) if known is None else list(known)

    def _rows(self, trainer: Any, batch: Any, newest: int) -> list[int]:
        if self.bypassed and getattr(trainer, "local_trigger_step", 1) > 1:
            return []  # the learner has gone on from the weights of this batch
        versions = self._versions(batch)
        return [row for row, version in enumerate(versions) if not self.ahead or version == newest]

    def _read(self, trainer: Any, batch: Any, rows: list[int]) -> tuple[list[list[int]], list[Tensor]]:
        data = batch.batch
        known = None if self.bypassed else data.get("old_log_probs")
        learner = self.score(trainer, batch) if known is None else known
        prompts = data["prompts"]
        real = data["attention_mask"][:, : prompts.shape[1]].bool()
        tables = [data[name] for name in ("responses", "response_mask", "rollout_log_probs")]
        return [prompts[row][real[row]].tolist() for row in rows], [table[rows] for table in (*tables, learner)]


def _model(path: str | None) -> tuple[bool | None, bool | None]:
    """Whether the policy in a folder is a mixture of experts, and whether it caps its logits, by its config.json;
    None where it cannot be read here."""
    file = Path(path or "") / "config.json"
    if not path or not file.is_file():
        return None, None
    config = read_json(file)
    return routes(config), caps(config)


def _formats(section: Any) -> dict[str, str | None]:
    """The formats of both sides as verl's keys say them: by them a gap is judged. None of an engine whose keys say
    nothing of it."""
    actor, rollout = section.actor, section.rollout
    sampled = "fp8" if get(rollout, "quantization") == "fp8" else str(rollout.dtype)
    learner: Any = None
    if actor.strategy == "mantissa":
        from mantissa.verl.options import EngineOptions

        policy = EngineOptions.of(get(actor, _FREE)).policy(str(actor.fsdp_config.dtype))
        learner, sampled = policy.train, policy.rollout if rollout.name == "mantissa" else sampled
    elif actor.strategy in _FSDPS:
        learner = get(actor, f"{_FREE}.param_dtype", "bfloat16")
    elif actor.strategy == "megatron":
        learner = "fp8" if get(actor, "megatron.override_transformer_config.fp8") else actor.megatron.dtype
    return {
        "learner_format": None if learner is None else _NAMES.get(str(learner), str(learner)),
        "rollout_format": _NAMES.get(sampled, sampled),
    }


def of_config(config: Any, made: Callable[[Any, str], TrainerGate]) -> TrainerGate | None:
    """The gate that a trainer's configuration asks for. ``MantissaError`` where it cannot be had."""
    asked = get(config, KEY)
    return None if asked is None else made(config, asked)
