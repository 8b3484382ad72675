"""``mantissa gap``: how far a model's sampling policy is from its learning policy in each pair of formats, no training.

For each pair the rollout engine samples completions of the same prompts from the same seeds, and the learner's kernels
score the very tokens that it sampled, at the same weights. So nothing has been learned between the two log-probs of a
token, and all of their difference is kernels and formats. Each pair samples for itself, for the gap is one of the
policy that samples: after some tokens two pairs write different texts, and their figures are of the same prompts and
not of the same tokens.

The masters are loaded once, fp32. Beside them lies one copy, the engine's of the pair at hand, and the logits of one
micro-batch.
"""

from __future__ import annotations

import copy
import importlib.resources
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.adopted import adopt
from mantissa.base.errors import MantissaError
from mantissa.base.files import own, remove_leftovers
from mantissa.base.provenance import stamp
from mantissa.base.ranks import be_deterministic
from mantissa.base.seeds import derive_seed
from mantissa.bench.command import new_folder
from mantissa.bench.options import PAIRS, GapConfig
from mantissa.doctor.dump import routes
from mantissa.kernels import Emulation, ResolvedPrecision, learner_kernels, resolve, rollout_kernels
from mantissa.kernels.roles import emulated
from mantissa.mismatch.estimates import gap_estimates
from mantissa.model import Tokenizer, policy_weights
from mantissa.precision import SCHEMES, PrecisionPolicy
from mantissa.rl.assemble import build_engine, exact_plan, prove
from mantissa.rl.config.sections import RolloutConfig
from mantissa.rl.engines import on_vllm
from mantissa.rl.experience import Experience
from mantissa.rl.policy import open_any, policy_folder
from mantissa.rl.score import Scorer, forward_transformers, score
from mantissa.rollout import (
    LEAST_TEMPERATURE,
    Completion,
    Request,
    SamplingParams,
    require_vllm,
)
from mantissa.rollout.transformers import (
    TransformersEngine,
    in_role,
    positions_of,
)
from mantissa.runs import rows as rows_of
from mantissa.runs.directory import RunDirectory
from mantissa.runs.gap_page import COMPLETIONS, FOLDER, PAGE, ROWS, write_gap_page
from mantissa.runs.report import build_report
from mantissa.runs.rows import Row

_SLOTS = 64  # rows decoded together
_MICRO_BATCH = 1024  # padded tokens of one scoring forward: 200 MB of fp32 logits at 49,152 words
_MOST_PROMPTS, _MOST_BYTES = 10_000, 64 << 20


def policies_of(config: GapConfig) -> dict[str, Pair]:
    """Each pair's precision, and what its rollout emulates, by its name."""
    policies = {name: parse_pair(name) for name in config.pairs}
    exact = [name for name, (policy, _) in policies.items() if policy.kernels == "exact"]
    if exact and config.engine == "vllm":
        raise MantissaError(
            f"--pairs {exact[0]}: vLLM's kernels add in another order than the learner's, so nothing is equal to "
            "the last bit; leave it out, or use --engine native"
        )
    if config.engine == "vllm" and (named := [name for name, (_, emulation) in policies.items() if emulation]):
        raise MantissaError(
            f"--pairs {named[0]}: vLLM computes as it does, and emulates nothing; leave the switches out, or use "
            "--engine native"
        )
    return policies


Pair = tuple[PrecisionPolicy, Emulation | None]
Sampler = Callable[[Sequence[Request], SamplingParams, int], list[list[Completion]]]


def parse_pair(name: str) -> Pair:
    """``PRESET``, ``TRAIN/ROLLOUT`` (the learner of one preset and the rollout of another), either with ``+exact`` for
    exact kernels, or with ``+serving`` or ``+SWITCH`` for an emulated rollout; ``exact`` is ``bf16+exact``."""
    formats, *words = ("bf16+exact" if name == "exact" else name).split("+")
    train, slash, rollout = formats.partition("/")
    exact = words == ["exact"]
    try:
        learner, sampler = (PrecisionPolicy.parse(side) for side in (train, rollout if slash else train))
        sides: dict[str, Any] = {
            "train": learner.train,
            "rollout": sampler.rollout,
            "kernels": "exact" if exact else "fast",
        }
        for section, formats_of in (("fp8", {"fp8"}), ("quantized", set(SCHEMES))):
            found = ((learner, learner.train), (sampler, sampler.rollout))
            sections = [getattr(side, section) for side, used in found if used in formats_of]
            if len(set(map(repr, sections))) > 1:
                raise MantissaError("one side has it in all layers and the other in some; choose one for both")
            sides |= {section: sections[0]} if sections else {}
        policy = PrecisionPolicy(**sides)
        return policy, Emulation.parse(words) if words and not exact else None
    except MantissaError as error:
        said = "a pair is a preset or TRAIN/ROLLOUT of two, either with +exact, or with +serving or +SWITCH"
        raise MantissaError(f"--pairs {name}: {error} ({said})") from None


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a text file, one a line, empty lines left out; the package's own where there is no path."""
    if path is None:
        return importlib.resources.files("mantissa.bench").joinpath("gap_prompts.txt").read_text("utf-8").splitlines()
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not there"
        hint = "; it takes no count: without it our own prompts are asked" if path.name.isdecimal() else ""
        raise MantissaError(f"--prompts {path} is {what}: expected a text file with one prompt a line{hint}")
    if path.stat().st_size > _MOST_BYTES:
        raise MantissaError(f"--prompts {path}: more than {_MOST_BYTES >> 20} MiB; choose some dozens of its prompts")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (UnicodeDecodeError, OSError) as error:
        raise MantissaError(
            f"--prompts {path}: not readable as UTF-8 text ({error}); expected one prompt a line"
        ) from None
    prompts = [line.rstrip("\r") for line in lines if line.strip()]
    if not prompts or len(prompts) > _MOST_PROMPTS:
        raise MantissaError(f"--prompts {path}: {len(prompts):,} prompts; expected 1 to {_MOST_PROMPTS:,}, one a line")
    return prompts


@dataclass
class GapResult:
    """``folder`` holds gap.jsonl, completions.jsonl and gap.html; ``failed``: why a pair has no row, or a wrong one."""

    folder: Path
    rows: list[Row] = field(default_factory=list)
    completions: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    report: Path | None = None  # of the run in whose folder this is


def run_gap(
    config: GapConfig, say: Callable[[str], None], measured: Callable[[Row], None] = lambda row: None
) -> GapResult:
    """Measure every pair and write the rows as they are made, then the page; in a run's folder also its report anew.

    ``say`` is told what is at work, ``measured`` each row as it is made."""
    policies, texts = policies_of(config), read_prompts(config.prompts)
    if config.prompts is None:
        texts = texts[: config.own]
    least = LEAST_TEMPERATURE if config.engine == "vllm" else 0.0
    if not (config.temperature > 0 and least <= config.temperature < math.inf):
        more = f"{least} or more for vLLM" if least else "more than 0, for a greedy choice has no log-prob"
        raise MantissaError(f"--temperature {config.temperature:g}: expected {more}")
    run = config.out if config.out is not None and (config.out / "config.yaml").is_file() else None
    if config.engine == "vllm":
        require_vllm()
    say(f"loading {config.model}")
    device = torch.device(config.device)
    be_deterministic(device)
    model, tokenizer, refused = open_any(policy_folder(config.model))
    if refused:
        if config.engine == "vllm":
            raise MantissaError(f"{refused}; --engine vllm samples what our own decoder knows")
        say(f"{config.model}: by transformers' own code, since our decoder says: {refused}")
        if config.pairs == PAIRS:
            policies = {name: parse_pair(name) for name in TRANSFORMERS_PAIRS}
    for _, emulation in policies.values():
        if emulation is not None and not refused:
            emulation.check(model.config.num_attention_heads, model.config.intermediate_size)
    model = model.to(device)
    positions = positions_of(model) if refused else model.config.max_position_embeddings
    kind = _TransformersBench if refused else _Bench
    bench = kind(config, model, tokenizer, encode(texts, tokenizer, positions, config))
    # The page comes last, so rows without one are what a killed measurement left: they are written anew.
    result = GapResult(new_folder(own(run / FOLDER) if run else config.out, "gap", PAGE))
    if run:
        remove_leftovers(result.folder)  # which is this command's alone
    for number, (name, (policy, emulation)) in enumerate(policies.items(), start=1):
        say(f"{name} ({number} of {len(policies)})")
        try:
            row, completions = bench.measure(name, policy, emulation)
        except MantissaError as error:
            result.failed.append(f"{name}: {error}")
            continue
        if policy.kernels == "exact" and row["differing"]:
            result.failed.append(f"{name}: {row['differing']} of {row['tokens']} log-probs differ, and none may")
        result.rows.append(row)
        measured(row)
        result.completions += completions
        rows_of.write(result.folder / ROWS, result.rows)
        rows_of.write(result.folder / COMPLETIONS, result.completions)
    if run and result.rows:
        result.report = build_report(RunDirectory.open(run))
    if result.rows:
        write_gap_page(result.folder)
    return result


def encode(texts: Sequence[str], tokenizer: Tokenizer, positions: int, config: GapConfig) -> list[list[int]]:
    """The prompts' tokens: as a user's message where the tokenizer has a chat template, else as they stand."""
    chat = bool(tokenizer.backend.chat_template)
    prompts = []
    for number, text in enumerate(texts, start=1):
        prompt = tokenizer.encode_prompt([{"role": "user", "content": text}] if chat else text)
        if not prompt or len(prompt) + config.max_tokens > positions:
            raise MantissaError(
                f"prompt {number} has {len(prompt)} tokens, and with --max-tokens {config.max_tokens} the model's "
                f"{positions} positions allow 1 to {positions - config.max_tokens}; change the prompt or --max-tokens"
            )
        prompts.append(prompt)
    return prompts


@dataclass
class _Bench:
    """What all pairs share."""

    config: GapConfig
    model: Any  # a Decoder
    tokenizer: Tokenizer
    prompts: list[list[int]]

    def measure(self, name: str, policy: PrecisionPolicy, emulation: Emulation | None) -> tuple[Row, list[Row]]:
        """One pair: its row, and a row for each completion."""
        config, vllm = self.config, self.config.engine == "vllm"
        device = torch.device(config.device)
        precision = resolve(policy, device)
        precision = on_vllm(precision) if vllm else precision
        if emulation is not None:
            precision = emulated(precision, emulation)
        if policy.fp8 is not None:
            policy.fp8.check(self.model.projections)
        if policy.quantized is not None:
            policy.quantized.of("mxfp8").check(self.model.projections)
        longest = max(map(len, self.prompts)) + config.max_tokens
        plan = exact_plan(precision, self.model, device, longest, _MICRO_BATCH)
        evidence = prove(precision, device, plan, vllm)
        started = time.perf_counter()
        count = len(self.prompts) * config.samples
        rollout = RolloutConfig(max_tokens=config.max_tokens, slots=min(count, _SLOTS), engine=config.engine)
        kernels = rollout_kernels(precision, plan)
        engine = build_engine(rollout, precision, kernels, self.model.config, self.tokenizer, device)
        release = engine.release or config.engine
        try:
            if engine.evidence:
                evidence["rollout"] = engine.evidence
            engine.sync(policy_weights(self.model), 0)
            groups = self._sample(engine.generate)
        finally:
            engine.close()
        sampled = time.perf_counter()
        experience = self._experience(groups)
        learner_BR = Scorer(self.model, learner_kernels(precision, plan), config.temperature, _MICRO_BATCH)(experience)
        seconds = {"sample_seconds": sampled - started, "score_seconds": time.perf_counter() - sampled}
        row = self._row(name, precision, experience, learner_BR, release) | seconds
        return row | {"evidence": "; ".join(evidence.values())}, self._completions(name, precision, groups, learner_BR)

    def _experience(self, groups: Sequence[Sequence[Completion]]) -> Experience:
        completions = [completion for group in groups for completion in group]
        owners = [number for number, group in enumerate(groups) for _ in group]
        prompts = [self.prompts[owner] for owner in owners]
        return Experience.of(prompts, completions, owners, [0.0] * len(owners), torch.device(self.config.device))

    def _sample(self, generate: Sampler) -> list[list[Completion]]:
        config = self.config
        requests = [
            Request(tuple(prompt), derive_seed(config.seed, "gap", index), config.samples)
            for index, prompt in enumerate(self.prompts)
        ]
        params = SamplingParams(config.max_tokens, config.temperature, stop_token_ids=tuple(self.tokenizer.eos_ids))
        return generate(requests, params, 0)

    def _row(
        self, name: str, precision: ResolvedPrecision, experience: Experience, learner_BR: Tensor, engine: str
    ) -> Row:
        config, roles = self.config, (precision.learner, precision.rollout)
        mask_BR = experience.mask_BR
        measured = gap_estimates(experience.rollout_logp_BR, learner_BR, mask_BR, experience.group_B)
        row: Row = {
            "pair": name,
            "requested": "/".join(role.requested for role in roles),
            "active": "/".join(role.requested if role.fp8 else role.active.name for role in roles),
            "kernels": "/".join(dict.fromkeys(role.kernels for role in roles)),
            "engine": engine,
            "emulated": str(precision.rollout.emulation or ""),
            "model": config.model,
            "weights": getattr(self.model.config, "weights_note", ""),
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "prompts": len(self.prompts),
            "completions": len(mask_BR),
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "seed": config.seed,
            "tokens": measured.tokens,
            "differing": measured.differing,
            "nonfinite": measured.nonfinite,
            "interval_over": measured.unit,
        }
        for figure, estimate in measured.figures.items():
            row |= estimate.fields(figure)
        return row | stamp(config.device) | {"time": datetime.now(UTC).isoformat(timespec="seconds")}

    def _completions(
        self, name: str, precision: ResolvedPrecision, groups: Sequence[Sequence[Completion]], learner_BR: Tensor
    ) -> list[Row]:
        """Each completion's tokens with both log-probs, None where one is not finite."""
        flat = [(index, completion) for index, group in enumerate(groups) for completion in group]
        rows, experts = [], routes(self.model.config)
        for (index, completion), learner in zip(flat, learner_BR.cpu(), strict=True):
            count = len(completion.tokens)
            both = {"rollout_logp": completion.logp_T, "learner_logp": learner[:count]}
            rows.append(
                {
                    "pair": name,
                    "prompt": index,
                    "prompt_length": len(self.prompts[index]),
                    "tokens": [*self.prompts[index], *completion.tokens],
                    "temperature": self.config.temperature,
                    "learner_format": precision.learner.active.name,
                    "rollout_format": precision.rollout.active.name,
                    "experts": experts,
                    "finish_reason": completion.finish_reason,
                    "text": self.tokenizer.decode(completion.tokens),
                }
                | {key: [x if math.isfinite(x) else None for x in logp.tolist()] for key, logp in both.items()}
            )
        return rows


@dataclass
class _TransformersBench(_Bench):
    """``model`` is one of transformers, in fp32: by its own code on both sides, adopted for exact kernels."""

    def measure(self, name: str, policy: PrecisionPolicy, emulation: Emulation | None) -> tuple[Row, list[Row]]:
        precision, config = resolve(policy, self.config.device), self.config
        precision = precision if emulation is None else emulated(precision, emulation)
        sides = (precision.learner, precision.rollout)
        started, adopted = time.perf_counter(), None
        if policy.kernels == "exact":
            longest = max(map(len, self.prompts)) + config.max_tokens
            adopted = adopt(self.model, policy, longest)
            sampler = learner = self.model
        else:
            sampler, learner = (in_role(copy.deepcopy(self.model), role) for role in reversed(sides))
        try:
            engine = TransformersEngine(sampler, adopted, _SLOTS)
            groups = self._sample(engine.generate)
            sampled = time.perf_counter()
            experience = self._experience(groups)
            with torch.no_grad():
                learner_BR, _ = score(
                    lambda part, _: forward_transformers(learner, part, config.temperature), experience, _MICRO_BATCH
                )
        finally:
            if adopted is not None:
                adopted.release()
        seconds = {"sample_seconds": sampled - started, "score_seconds": time.perf_counter() - sampled}
        row = self._row(name, precision, experience, learner_BR, "transformers") | seconds
        kernels = {"kernels": "transformers" if adopted is None else "exact, adopted"}
        evidence = {"evidence": "" if adopted is None else adopted.lines[-1]}
        return row | kernels | evidence, self._completions(name, precision, groups, learner_BR)


TRANSFORMERS_PAIRS = ("fp32", "bf16", "fp16", "bf16/fp16", "fp32+exact", "exact")
