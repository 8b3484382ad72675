"""TRL's GRPO trainer and the doctor: log-probs of both sides recorded, or looked at while it trains.

    from mantissa.dropin.trl import gate, record_logps

    gate(trainer, every=25, on_fault="stop")    # before trainer.train(): a verdict at once, then every 25 steps
    record_logps(trainer, "logps")              # or keep them, for `mantissa doctor logps`

The sampler's log-probs are those that vLLM (or a ``rollout_func``) delivers. Where transformers' ``generate`` samples,
TRL's default, they are taken from it as it samples: of logits / temperature, before top-k and top-p, as TRL's own
learner scores. The learner's are those of the model before its update. Training is not changed, and nothing here stops
it but ``on_fault="stop"``, which ends it as TRL's own callbacks do, after a step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from mantissa.base.errors import MantissaError
from mantissa.doctor.gate import Gate
from mantissa.doctor.record import ScoredBatch, write_batch

_LATER = (MantissaError, OSError, ValueError, TypeError, KeyError, IndexError, RuntimeError, AttributeError)


def record_logps(trainer: Any, folder: Path | str) -> None:
    """Have ``trainer`` (trl.GRPOTrainer) write every batch that it scores into ``folder``, in the plain schema.

    Call it before ``trainer.train()``; then ``mantissa doctor FOLDER``. A batch that cannot be written is one warning.
    """
    folder, batches = Path(folder), [0]

    def write(batch: ScoredBatch) -> None:
        batches[0] += 1
        name = f"step-{trainer.state.global_step}-{batches[0]}-rank-{trainer.accelerator.process_index}.jsonl"
        write_batch(folder / name, batch)

    _watch(trainer, write, lambda: True)


def gate(trainer: Any, *, every: int = 25, on_fault: Literal["warn", "stop"] = "warn", sequences: int = 64) -> Gate:
    """Have the doctor look at ``trainer``'s batches while it trains: the first ones, then every ``every`` steps.

    ``on_fault``: ``warn`` says it; ``stop`` ends the training after the step, as ``control.should_training_stop`` does.
    Returns the gate; its ``last`` is the newest diagnosis.
    """
    from transformers import TrainerCallback

    made = Gate(every, on_fault, sequences=sequences, framework="trl")

    class Stopping(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            made.after_sync()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = control.should_training_stop or made.stop

    def look(batch: ScoredBatch) -> None:
        named = {name: batch.settings.get(name) for name in ("temperature", "rollout_format", "learner_format")}
        tables = batch.responses, batch.mask, batch.rollout, batch.learner
        made.check(trainer.state.global_step, batch.prompts, *tables, **named)

    trainer.add_callback(Stopping())
    _watch(trainer, look, lambda: made.due(trainer.state.global_step))
    return made


def _watch(trainer: Any, take: Callable[[ScoredBatch], None], wanted: Callable[[], bool]) -> None:
    """Call ``take`` with each batch that ``trainer`` scores, where it is ``wanted``; what goes wrong is one warning."""
    original, said = trainer._generate_and_score_completions, [False]

    def watched(inputs: Any) -> Any:
        if not wanted() or not trainer.model.training:  # an evaluation's samples are not trained on
            return original(inputs)
        with _sampled(float(trainer.args.temperature)) as sampled:
            output = original(inputs)
        try:
            take(_batch(trainer, output, sampled))
        except _LATER as error:
            if not said[0]:
                said[0] = True
                warnings.warn(
                    f"mantissa doctor: TRL's batch is left out, and the training goes on: {error}", stacklevel=2
                )
        return output

    trainer._generate_and_score_completions = watched


def _batch(trainer: Any, output: Any, sampled: _Sampled) -> ScoredBatch:
    ids = output["completion_ids"]
    rollout = output.get("sampling_per_token_logps")
    rollout = sampled.table(ids) if rollout is None else rollout
    if rollout is None:
        raise MantissaError(
            "neither the sampler nor transformers' generate gave log-probs of these tokens; expected use_vllm=True, "
            "a rollout_func that returns logprobs, or one call of generate a batch"
        )
    learner = output.get("old_per_token_logps")
    learner = _scored(trainer, output) if learner is None else learner
    rows = zip(output["prompt_ids"], output["prompt_mask"], strict=True)
    args = trainer.args
    settings: dict[str, Any] = {"framework": "trl", **_formats(trainer)}
    settings |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k or 0}
    mask = output["completion_mask"] * output.get("tool_mask", 1)
    return ScoredBatch([row[real.bool()].tolist() for row, real in rows], ids, mask, rollout, learner, settings)


def _formats(trainer: Any) -> dict[str, str]:
    """The learner's format: autocast's, or the weights'. The rollout's is known where the same model samples."""
    names = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    own = names.get(str(next(trainer.model.parameters()).dtype))
    cast = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else own
    found = {"learner_format": cast, "rollout_format": None if trainer.args.use_vllm else cast}
    return {name: value for name, value in found.items() if value is not None}


class _Sampled:
    """A logits processor of ``generate``: the log-prob of each token as it is sampled. B,R after it has ended."""

    def __init__(self, temperature: float) -> None:
        self.temperature, self.calls = temperature, 0
        self._law: Any = None
        self._logps: list[Any] = []

    def begin(self) -> None:
        self.calls, self._law, self._logps = self.calls + 1, None, []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """``scores``: logits before the temperature, B,V. They are returned as they are."""
        self._take(input_ids)
        self._law = (scores.float() / self.temperature).log_softmax(-1)
        return scores

    def _take(self, ids: Any) -> None:
        if self._law is not None:
            self._logps.append(self._law.gather(1, ids[:, -1:].to(self._law.device)))

    def end(self, found: Any) -> None:
        self._take(getattr(found, "sequences", found))
        self._law = None

    def table(self, ids: Any) -> Any:
        """The log-probs of ``ids``, B,R; None where ``generate`` was not called once for just these rows."""
        import torch

        if self.calls != 1 or not self._logps or len(self._logps[0]) != len(ids) or len(self._logps) < ids.shape[1]:
            return None
        return torch.cat(self._logps, 1)[:, : ids.shape[1]].to(ids.device)


@contextlib.contextmanager
def _sampled(temperature: float) -> Iterator[_Sampled]:
    """While open, whatever transformers' ``generate`` samples is seen."""
    from transformers import GenerationMixin

    seen, original = _Sampled(temperature), GenerationMixin.generate

    def generate(self: Any, *args: Any, **named: Any) -> Any:
        seen.begin()
        named["logits_processor"] = [*(named.get("logits_processor") or []), seen]
        found = original(self, *args, **named)
        seen.end(found)
        return found

    GenerationMixin.generate = generate
    try:
        yield seen
    finally:
        GenerationMixin.generate = original


def _scored(trainer: Any, output: Any) -> Any:
    """The learner's log-probs where this batch's training would take them from its own forward."""
    import torch

    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    with torch.no_grad():
        size = trainer.args.per_device_train_batch_size
        return trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, output["completion_ids"].size(1), batch_size=size
        )[0]
