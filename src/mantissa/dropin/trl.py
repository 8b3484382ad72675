"""TRL's GRPO trainer: log-probs of both sides recorded, looked at while it trains, or made equal to the last bit.

    from mantissa.dropin.trl import adopt, gate, record_logps

    adopt(trainer, "bf16")                      # before trainer.train(): generate and the learner by exact kernels
    gate(trainer, every=25, on_fault="stop")    # a verdict at once, then every 25 steps
    record_logps(trainer, "logps")              # or keep them, for `mantissa doctor logps`

The sampler's log-probs are those that vLLM (or a ``rollout_func``) delivers. Where transformers' ``generate`` samples,
TRL's default, they are taken from it as it samples: of logits / the temperature that it samples with, after penalties
and before top-k and top-p. The learner's are those of the model before its update, as TRL computes them. Training is
not changed, to the last bit, and nothing here stops it but ``on_fault="stop"``, which ends it as TRL's own callbacks
do, after a step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from mantissa.adopted import Adopted
from mantissa.adopted import adopt as adopted_model
from mantissa.base.errors import MantissaError, on_failure
from mantissa.base.tensors import Digest, digest
from mantissa.doctor.dump import caps, routes
from mantissa.doctor.gate import Gate
from mantissa.doctor.held import Held, Source, Stored, held
from mantissa.doctor.record import ScoredBatch, write_batch
from mantissa.doctor.sync import SyncProof, source_of, verdict, wanted
from mantissa.doctor.weights import compare, plain_name
from mantissa.rollout.vllm.worker import weights as vllm_weights

_FORMATS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def adopt(trainer: Any, precision: str | None = None, length: int | None = None) -> Adopted:
    """Have ``trainer`` (trl.GRPOTrainer, whose model samples by transformers' ``generate``) sample and learn by exact
    kernels: a token's log-prob is then the same number on both sides. Call it before ``trainer.train()``.

    ``precision``, ``length`` and the result: as of ``mantissa.adopt``. TRL's fused head, which multiplies outside the
    model, is replaced by the model's own and TRL's log-softmax and entropy of its logits. ``MantissaError``, nothing
    changed, where something else samples (vLLM, a ``rollout_func``), under autocast, or for what ``mantissa.adopt``
    refuses.
    """
    args = trainer.args
    if args.use_vllm or trainer.rollout_func is not None:
        raise MantissaError("adopt: vLLM or a rollout_func samples, by kernels of its own; expected use_vllm=False")
    if args.bf16 or args.fp16:
        name = "bf16" if args.bf16 else "fp16"
        raise MantissaError(
            f"adopt: {name}=True is autocast, which rounds at other places in generate and in the learner; expected "
            f"GRPOConfig(bf16=False, fp16=False), and adopt(trainer, {name!r})"
        )
    own = getattr(trainer.model, "get_base_model", None)  # peft's
    model = trainer.model if own is None else own()
    fused = vars(model).pop("forward", None)
    with on_failure(lambda: vars(model).update({} if fused is None else {"forward": fused})):
        adopted = adopted_model(model, precision, length)
    if fused is not None:
        model.forward = types.MethodType(_with_log_probs(type(model).forward, args.temperature), model)
    return adopted


def _with_log_probs(whole: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    """A model's forward that also does what TRL's fused head is asked: log-probs and entropy of the labels."""

    @functools.wraps(whole)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return whole(self, *args, **kwargs, **({} if labels is None else {"labels": labels}))
        from trl.trainer.utils import FusedCausalLMOutput, entropy_from_logits, selective_log_softmax

        kwargs.pop("num_items_in_batch", None)
        out = whole(self, *args, **kwargs | {"use_cache": False})
        logits, labels = out.logits[:, :-1] / temperature, labels[:, 1:]
        mask = labels != -100
        log_probs = selective_log_softmax(logits, labels.clamp(min=0)).masked_fill(~mask, 0.0)
        entropy = entropy_from_logits(logits).masked_fill(~mask, 0.0)
        loss = -log_probs.sum() / mask.sum().clamp(min=1)
        aux = getattr(out, "aux_loss", None)
        return FusedCausalLMOutput(loss=loss, log_probs=log_probs, entropy=entropy, label_mask=mask, aux_loss=aux)

    return forward


def record_logps(trainer: Any, folder: Path | str) -> None:
    """Have ``trainer`` (trl.GRPOTrainer) write every batch that it scores into ``folder``, in the plain schema.

    Call it before ``trainer.train()``; then ``mantissa doctor FOLDER``. A row also has temperature, top_p, top_k, the
    formats of both sides, the versions of their weights (the step) and of the libraries. A batch that cannot be written
    is one warning.
    """
    folder, batches = Path(folder), [0]
    libraries = {name: _version(name) for name in ("trl", "transformers", "torch", "vllm")}

    def write(batch: ScoredBatch) -> None:
        batches[0] += 1
        name = f"step-{trainer.state.global_step}-{batches[0]}-rank-{trainer.accelerator.process_index}.jsonl"
        settings = {**batch.settings, "libraries": {name: each for name, each in libraries.items() if each}}
        write_batch(folder / name, ScoredBatch(batch.prompts, *_tables(batch), settings))

    _watch(trainer, write, lambda: True)


def gate(
    trainer: Any, *, every: int = 25, on_fault: Literal["warn", "stop"] = "warn", sequences: int = 64,
    engine: Source | None = None,
) -> Gate:  # fmt: skip
    """Have the doctor look at ``trainer``'s batches while it trains: the first ones of a run or a resumed run, those
    after the first update, then every ``every`` steps.

    ``on_fault``: ``warn`` says it; ``stop`` ends the training after the step, as ``control.should_training_stop`` does,
    on every rank where one rank found it. Returns the gate; its ``last`` is the newest diagnosis. Its measure, the
    first healthy size, is in each checkpoint (``trainer_state.json``), and a run resumed from there is held to it.

    Where another engine samples, its weights are compared with the trainer's too, once it has sampled the batch of an
    update: of the first five, then of every ``every``-th. ``engine``: what ``mantissa.doctor.held`` reads, as a model
    that a ``rollout_func`` samples from, or the address of a vLLM; None: the vLLM in the trainer's process, if there is
    one. What cannot be read is said at the start.
    """
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    made = Gate(every, on_fault, sequences=sequences, framework="trl")
    begun, syncs = [-1], _Syncs(trainer, every, engine, made.say)

    class MantissaGate(TrainerCallback, ExportableState):
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"measure": made.state_dict()}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            _recall(made, state.stateful_callbacks.get(MantissaGate.__name__))
            made.after_sync()
            begun[0] = state.global_step

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == begun[0] + 1:
                made.after_sync()  # the sampler got weights that were trained for the first time
            stop = _on_any_rank(trainer, made.stop or (on_fault == "stop" and syncs.lost))
            control.should_training_stop = control.should_training_stop or stop

    def look(batch: ScoredBatch) -> None:
        names = ("temperature", "rollout_format", "learner_format", "experts", "soft_cap")
        given = {name: batch.settings.get(name) for name in names}
        version = batch.settings.get("rollout_version")
        made.check(trainer.state.global_step, batch.prompts, *_tables(batch), rollout_version=version, **given)

    trainer.add_callback(MantissaGate())
    _watch(trainer, look, lambda: _on_any_rank(trainer, made.due(trainer.state.global_step)))
    syncs.watch()
    return made


class _Syncs:
    """What samples beside what is trained, compared once a batch of new weights was sampled. ``lost``: whether some of
    the weights did not arrive."""

    def __init__(self, trainer: Any, every: int, engine: Source | None, say: Callable[[str], None]) -> None:
        self.trainer, self.engine, self.say = trainer, engine, say
        self.proof, self.step, self.lost, self.seconds = SyncProof(every), -1, False, 0.0
        reason = self._reason()
        self.off = reason is not None
        if reason:
            say(f"mantissa doctor: after syncs only log-probs are compared, no weights: {reason}")

    def _reason(self) -> str | None:
        """Why nothing is compared; empty where the trained model itself samples; None where something is."""
        args = self.trainer.args
        if self.engine is not None:
            held(self.engine)  # an error in what was given is the caller's, and at once
        elif self.trainer.rollout_func is not None:
            return "what a rollout_func samples from is not known; give it as gate(trainer, engine=...)"
        elif not args.use_vllm:
            return ""
        elif _vllm_model(self.trainer) is None:
            return "a vLLM server's are not known; give its address as gate(trainer, engine=...)"
        if self.trainer.accelerator.num_processes > 1:
            return "the trainer runs in several processes"
        return None

    def watch(self) -> None:
        """Look once each batch of another update has been sampled."""
        if self.off:
            return
        original = self.trainer._generate_and_score_completions

        def looked(inputs: Any) -> Any:
            output = original(inputs)
            if self.trainer.model.training and self.trainer.state.global_step != self.step:
                self.step = self.trainer.state.global_step
                self._look()
            return output

        self.trainer._generate_and_score_completions = looked

    def _look(self) -> None:
        if self.off:
            return
        due, before = self.proof.began()
        if not (due or before):
            return
        begun = time.perf_counter()
        try:
            line = self._compared(due)
        except Exception as error:  # noqa: BLE001 - whatever it is, a training of days must not end by it
            self.off, line = True, f"no weights are compared any more: {error}"
        self.seconds = time.perf_counter() - begun
        if line:
            self.say(f"mantissa doctor: step {self.step}: {line}")

    def _compared(self, due: bool) -> str:
        theirs = _of_vllm(_vllm_model(self.trainer)) if self.engine is None else held(self.engine)
        known = theirs.digests or {name: _digest_of(theirs.read(name)) for name in theirs.shapes}
        mine = held(self.trainer.accelerator.unwrap_model(self.trainer.model))
        names = {plain_name(name): name for name in mine.shapes}
        trainer = {}
        for name, dtype in wanted(known).items():
            own = names.get(source_of(name, names))
            if own is not None:
                trainer[name] = digest(mine.read(own).values.to(getattr(torch, dtype)))
        found = ""
        if due:
            seen = self.proof.look(trainer, known)
            outcomes = {}
            if seen.unknown:
                part, there = (_only(side, seen.unknown) for side in (mine, theirs))
                outcomes = {plain_name(each.name): each for each in compare(part, there).outcomes}
            found = verdict(seen, outcomes, "the engine")
            self.lost = self.lost or bool(found)
        self.proof.keep(trainer)
        return found


def _digest_of(stored: Stored) -> Digest:
    return digest(stored.values if stored.codes is None else stored.codes)


def _only(side: Held, names: Sequence[str]) -> Held:
    """``side`` with the tensors of these plain names."""
    there = {plain_name(name): name for name in side.shapes}
    own = {there[source_of(name, there)]: None for name in names if source_of(name, there) in there}
    return replace(side, shapes={name: side.shapes[name] for name in own})


def _vllm_model(trainer: Any) -> Any:
    """The model of the vLLM in the trainer's process; None: there is none."""
    engine = getattr(getattr(getattr(trainer, "vllm_generation", None), "llm", None), "llm_engine", None)
    worker = getattr(getattr(engine, "model_executor", None), "driver_worker", None)
    return getattr(getattr(worker, "model_runner", None), "model", None)


def _of_vllm(model: Any) -> Held:
    """What it computes with, by what its products do."""

    def read(name: str) -> Stored:
        with torch.inference_mode():
            found = dict(vllm_weights(model, {name}))[name]
        if not isinstance(found, torch.Tensor):
            raise MantissaError(f"vLLM's {name} cannot be read: {found}")
        return Stored(found.cpu())

    with torch.inference_mode():
        digests = {name: digest(each) for name, each in vllm_weights(model) if isinstance(each, torch.Tensor)}
    return Held("vLLM", {name: each.shape for name, each in digests.items()}, read, digests=digests)


def _recall(made: Gate, kept: Any) -> None:
    """The measure that a checkpoint's state of the callback holds, of a run that is resumed from it; ``kept`` is None
    where that run had no gate."""
    if kept is None:
        return
    try:
        made.load_state_dict(kept["attributes"]["measure"])
    except (MantissaError, KeyError, TypeError) as error:
        made.say(f"mantissa doctor: the gate's measure in this checkpoint cannot be read ({error}); it is taken anew")


def _tables(batch: ScoredBatch) -> tuple[Any, Any, Any, Any]:
    return batch.responses, batch.mask, batch.rollout, batch.learner


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _on_any_rank(trainer: Any, here: bool) -> bool:
    """Whether it is so on one rank at least: what ranks do together, they must all do."""
    if trainer.accelerator.num_processes == 1:
        return here
    return bool(trainer.accelerator.gather(torch.tensor([here], device=trainer.accelerator.device)).any())


def _watch(trainer: Any, take: Callable[[ScoredBatch], None], wanted: Callable[[], bool]) -> None:
    """Call ``take`` with each batch that ``trainer`` scores, where it is ``wanted``; what goes wrong is one warning."""
    original, said = trainer._generate_and_score_completions, [False]

    def watched(inputs: Any) -> Any:
        if not trainer.model.training or not wanted():  # an evaluation's samples are not trained on
            return original(inputs)
        with _sampled() as sampled:
            output = original(inputs)
        try:
            take(_batch(trainer, output, sampled))
        except Exception as error:  # noqa: BLE001 - whatever it is, a training of days must not end by it
            if not said[0]:
                said[0] = True
                line = f"mantissa doctor: TRL's batch is left out, and the training goes on: {error}"
                warnings.warn(line, stacklevel=2)
        return output

    trainer._generate_and_score_completions = watched


def _batch(trainer: Any, output: Any, sampled: _Sampled) -> ScoredBatch:
    ids, args, step = output["completion_ids"], trainer.args, trainer.state.global_step
    rollout = output.get("sampling_per_token_logps")
    temperature, version = args.temperature, getattr(trainer, "_last_loaded_step", step) if args.use_vllm else step
    if rollout is None:
        rollout, temperature = sampled.table(ids), sampled.temperature
    if rollout is None:
        raise MantissaError(
            "neither the sampler nor transformers' generate gave log-probs of these tokens; expected use_vllm=True, "
            f"a rollout_func that returns logprobs, or one call of generate a batch{sampled.why}"
        )
    learner = output.get("old_per_token_logps")
    learner = _scored(trainer, output) if learner is None else learner
    rows = zip(output["prompt_ids"], output["prompt_mask"], strict=True)
    config = getattr(trainer.model, "config", None)
    settings = {"framework": "trl", "temperature": temperature, "top_p": args.top_p, "top_k": args.top_k or 0,
                "rollout_version": version, "learner_version": step,
                "experts": routes(config), "soft_cap": caps(config), **_formats(trainer)}  # fmt: skip
    mask = output["completion_mask"] * output.get("tool_mask", 1)
    return ScoredBatch([row[real.bool()].tolist() for row, real in rows], ids, mask, rollout, learner, settings)


def _formats(trainer: Any) -> dict[str, str]:
    """The learner's format: autocast's, or the weights'. The rollout's: the same where the same model samples, and what
    vLLM's engine says; left out where neither is so."""
    own = _FORMATS.get(str(next(trainer.model.parameters()).dtype))
    cast = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else own
    samples = _vllm_format(trainer) if trainer.args.use_vllm else None if trainer.rollout_func is not None else cast
    found = {"learner_format": cast, "rollout_format": samples}
    return {name: value for name, value in found.items() if value is not None}


def _vllm_format(trainer: Any) -> str | None:
    """The format that vLLM beside the trainer computes in; None of a server, which is asked nothing here."""
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    config = getattr(getattr(engine, "llm_engine", None), "vllm_config", None)
    return _FORMATS.get(str(getattr(getattr(config, "model_config", None), "dtype", None)))


class _Sampled:
    """A logits processor of ``generate``: the log-prob of each token as it is sampled. B,R after it has ended.

    ``temperature``: that of the sampling. ``why``: what went wrong, if something did.
    """

    def __init__(self) -> None:
        self.temperature, self.calls, self.why = 1.0, 0, ""
        self._scores: Any = None
        self._logps: list[Any] = []

    def begin(self, config: Any) -> None:
        self.calls, self._scores, self._logps = self.calls + 1, None, []
        self.temperature = float(getattr(config, "temperature", None) or 1.0)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """``scores``: logits before the temperature, B,V. They are returned as they are."""
        try:
            self._take(input_ids)
            self._scores = scores.float()
        except Exception as error:  # noqa: BLE001 - as where memory runs out: the sampling must go on
            self._scores, self.why = None, f": {error}"
        return scores

    def _take(self, ids: Any) -> None:
        """By TRL's own function of logits, which is the learner's: equal logits have equal log-probs."""
        if self._scores is not None:
            from trl.trainer.utils import selective_log_softmax

            logits, tokens = self._scores.unsqueeze(1) / self.temperature, ids[:, -1:].to(self._scores.device)
            self._logps.append(selective_log_softmax(logits, tokens))

    def end(self, found: Any) -> None:
        self._take(getattr(found, "sequences", found))
        self._scores = None

    def table(self, ids: Any) -> Any:
        """The log-probs of ``ids``, B,R; None where ``generate`` was not called once for just these rows."""
        unfit = self.calls != 1 or not self._logps or len(self._logps[0]) != len(ids)
        if unfit or self.why or len(self._logps) < ids.shape[1]:
            return None
        return torch.cat(self._logps, 1)[:, : ids.shape[1]].to(ids.device)


@contextlib.contextmanager
def _sampled() -> Iterator[_Sampled]:
    """While open, whatever transformers' ``generate`` samples is seen."""
    from transformers import GenerationMixin

    seen, original = _Sampled(), GenerationMixin.generate

    def generate(self: Any, *args: Any, **named: Any) -> Any:
        seen.begin(named.get("generation_config"))
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
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    with torch.no_grad(), torch.random.fork_rng([ids.device] if ids.is_cuda else []):  # dropout draws its own numbers
        size = trainer.args.per_device_train_batch_size
        return trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, output["completion_ids"].size(1), batch_size=size
        )[0]
