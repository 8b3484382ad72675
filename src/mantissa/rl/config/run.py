"""The run's configuration: one frozen value made from a recipe's YAML and ``key=value`` overrides, with one clear line
for each mistake; and what in it does not go together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from mantissa.algorithms import ADVANTAGES, LOSSES, AdvantageKind, FlowRLConfig, OfTeacher, ReinforceConfig
from mantissa.base.bounds import LARGEST_SEED, boundary
from mantissa.base.config import PLAIN, Config, Refusals
from mantissa.base.errors import MantissaError, nearest
from mantissa.base.readers.yaml import find_recipe, parse_yaml, read_yaml
from mantissa.guard import GuardConfig
from mantissa.precision import DIAL, SCHEMES, PrecisionPolicy
from mantissa.rl.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    GradingConfig,
    LossScalingConfig,
    OptimizerConfig,
    PerfectibleConfig,
    RolloutConfig,
    WarmStartConfig,
)
from mantissa.rl.config.waltz import WaltzConfig, check_feedback, published, waltz_refusals
from mantissa.rl.policy import ModelSource
from mantissa.rollout import LEAST_TEMPERATURE, MOST_TOLD, untold_support
from mantissa.rollout.support import ignored
from mantissa.tasks import CodeConfig, TaskConfig
from mantissa.training.optimizer import check_masters


class DoctorConfig(Config):
    """The doctor in a run: a diagnosis of the step's log-probs in the run's folder and report (docs/doctor.md)."""

    every: int = Field(10, ge=1, description="Steps between diagnoses; the first and the last step always have one.")


class RunConfig(Config):
    """A whole run."""

    name: str = Field("run", min_length=1, description="Names the run's folder.")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="Every random draw is a function of this and a position.")
    steps: int = Field(ge=1, description="RL steps.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one.")
    run_dir: str | None = Field(None, description="The run's folder; runs/<name>-<time> where not given.")
    nproc: int = Field(
        1,
        ge=1,
        le=4096,
        description="Processes, one a GPU; mantissa train starts them, under torchrun it is their number.",
    )
    parallel: Literal["ddp", "fsdp2"] | None = Field(
        None, description="ddp (what null stands for): every process holds the learner; fsdp2: each holds a slice."
    )
    precision: PrecisionPolicy = Field(
        PrecisionPolicy(preset="fp32"), description="A preset's name, or fields with a preset."
    )
    model: ModelSource
    task: TaskConfig
    warm_start: WarmStartConfig | None = Field(None, description="None: RL starts from the model as it is.")
    perfectible: PerfectibleConfig | None = Field(None, description="None: every training prompt is used.")
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig
    loss_scaling: LossScalingConfig | None = Field(None, description="Only for an fp16 learner; has defaults.")
    evaluation: EvaluationConfig | None = Field(EvaluationConfig(), description="None: never evaluate.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig | None = Field(
        None,
        description="{} or settings of docs/production.md, such as {to: fp32}: thresholds at which the run goes back "
        "to its last good checkpoint and on in a wider format. null: no guard.",
    )
    doctor: DoctorConfig | None = Field(None, description="{every: n}: diagnose one step of n. null: none.")
    waltz: WaltzConfig | None = Field(None, description="A second policy, which gives feedback and trains beside it.")
    grading: GradingConfig = GradingConfig()
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(("tensorboard",), description="tensorboard, wandb.")

    @property
    def steps_behind(self) -> int:
        """RL steps that sampling is behind: as many as ``rollout.max_policy_lag`` optimiser steps surely hold."""
        return self.rollout.max_policy_lag // self.optimizer.updates_per_batch

    @model_validator(mode="before")
    @classmethod
    def _published(cls, values: Any) -> Any:
        return published(values) if isinstance(values, dict) and values.get("waltz") is not None else values

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        check_together(self)
        if self.waltz is not None:
            check_feedback(self)
        return self


def check_together(config: RunConfig) -> None:
    """Raise ``MantissaError`` at the first pair of fields that do not go together."""
    checks = [_precision_refusals, _rollout_refusals, _process_refusals]
    if (lacking := _LACKING.get(config.rollout.engine)) is not None:
        checks.insert(2, lacking)
    if config.waltz is not None:
        checks.insert(0, waltz_refusals)
    policy, lora = config.precision, config.model.lora is not None
    check_masters(config.optimizer.masters, policy.format_of(policy.train), lora)
    for refused, why in itertools.chain.from_iterable(check(config) for check in checks):
        if refused:
            raise MantissaError(why)
    if isinstance(config.task, CodeConfig) and config.task.time_limit_s >= config.grading.timeout_s:
        raise MantissaError(
            f"task.time_limit_s={config.task.time_limit_s:g} is not below grading.timeout_s="
            f"{config.grading.timeout_s:g}, which would count a slow program as a verifier error; raise the latter"
        )


def _precision_refusals(config: RunConfig) -> Refusals:
    policy, lag = config.precision, config.rollout.max_policy_lag
    yield (
        config.loss_scaling is not None and not policy.format_of(policy.train).needs_loss_scaling,
        f"loss_scaling does nothing for a {policy.train} learner (its exponent range is that of fp32); leave it out, "
        "or set loss_scaling=null",
    )
    yield (
        policy.reference is not None and config.algorithm.reference is None,
        f"precision.reference={policy.reference} does nothing without a reference policy; leave it out, or set "
        "algorithm.reference={}",
    )
    yield (
        config.guard is not None and not (DIAL.keys() | SCHEMES.keys()).isdisjoint({policy.train, policy.rollout}),
        f"guard with train={policy.train} and rollout={policy.rollout}: no format is wider than one of the dial in all "
        "that it has, and a scaled one is a choice of its own; set guard=null",
    )
    yield (
        policy.kernels == "exact" and config.rollout.support == "ignored",
        "precision.kernels=exact with rollout.support=ignored: the learner's log-probs are of another distribution "
        "than the rollout's; set rollout.support=kept",
    )
    reference = config.algorithm.reference
    yield (
        policy.kernels == "exact" and reference is not None and reference.path is not None,
        "precision.kernels=exact with algorithm.reference.path: exact kernels are planned for the policy's own shape; "
        "set precision.kernels=fast",
    )
    yield (
        policy.kernels == "exact" and lag,
        f"precision.kernels=exact with rollout.max_policy_lag={lag}: completions of other weights have other "
        "log-probs, so there is nothing that must be equal; set rollout.max_policy_lag=0",
    )


def _process_refusals(config: RunConfig) -> Refusals:
    nproc, prompts, lag = config.nproc, config.rollout.prompts, config.rollout.max_policy_lag
    several, fsdp2 = nproc > 1, config.parallel == "fsdp2"
    yield (
        not several and config.parallel is not None,
        f"parallel={config.parallel} does nothing with nproc=1; leave it out, or raise nproc",
    )
    yield (
        several and nproc > prompts,
        f"nproc={nproc}, but rollout.prompts={prompts}: processes share a step by prompts, so some would have none; "
        "lower nproc or raise rollout.prompts",
    )
    yield (
        several and lag,
        f"rollout.max_policy_lag={lag} with nproc={nproc}: sampling beside learning is for one process (two threads "
        "of each would talk to the others at once); set rollout.max_policy_lag=0",
    )
    yield (
        fsdp2 and config.optimizer.moments == "8bit",
        "parallel=fsdp2 with optimizer.moments=8bit: blocks of a slice are not those of the whole, so another number "
        "of processes could not resume; use parallel=ddp, or optimizer.moments=fp32",
    )
    yield (
        fsdp2 and config.model.lora is not None,
        "parallel=fsdp2 with model.lora: adapters are merged into whole matrices, and what would be divided, gradients "
        "and moments, they hardly have; use parallel=ddp",
    )


def _rollout_refusals(config: RunConfig) -> Refusals:
    rollout, updates, kind = config.rollout, config.optimizer.updates_per_batch, config.algorithm.advantage
    completions, lag = rollout.prompts * rollout.samples, rollout.max_policy_lag
    yield updates > completions, "optimizer.updates_per_batch: expected at most one update a completion"
    yield (
        0 < lag < updates,
        f"rollout.max_policy_lag={lag} does nothing with optimizer.updates_per_batch={updates}: a step makes {updates} "
        f"versions, so sampling one step ahead needs {updates} or more; raise it, or set it to 0",
    )
    yield (
        kind == "distillation" and rollout.overlong is not None,
        "rollout.overlong does nothing with algorithm.advantage=distillation, which learns from the teacher and only "
        "logs rewards; leave it out",
    )
    if config.algorithm.of_tokens:  # no completions are compared
        return
    estimator = ADVANTAGES[cast(AdvantageKind, kind)]
    yield (
        not estimator.of_batch and rollout.samples < 2,
        f"algorithm.advantage={kind} needs rollout.samples of 2 or more: it compares the completions of a prompt, and "
        "of one alone every advantage is 0; raise it, or use reinforce_pp, which compares the whole batch",
    )
    reward = getattr(config.task, "reward", None)
    weights = [term.weight for term in reward if term.weight] if isinstance(reward, tuple) else [1.0]
    yield (
        estimator.decoupled and len(weights) < 2,
        f"algorithm.advantage={kind} normalises several rewards apart, and task.reward is one; give task.reward a list "
        "of terms with a weight, or use grpo",
    )
    yield (
        estimator.decoupled and rollout.overlong is not None,
        f"algorithm.advantage={kind} with rollout.overlong: each reward is divided by its own spread, so the penalty's "
        "size (overlong.factor) would be lost, and one of a few tokens be as much as a wrong answer; leave overlong "
        "out, or use grpo, to which the penalty is part of the one reward",
    )
    beside = rollout.overlong is not None or (config.algorithm.kl is not None and config.algorithm.kl.where == "reward")
    yield (
        estimator.normalises and len(weights) == 1 and abs(weights[0]) != 1 and not beside,
        f"task.reward: the weight {weights[0] if weights else 0:g} of the only term does nothing with "
        f"algorithm.advantage={kind}, which divides by the rewards' spread; leave it out",
    )
    yield (
        estimator.decoupled and rollout.dynamic is not None,
        f"algorithm.advantage={kind} with rollout.dynamic: that drops groups whose sums are equal, in which the "
        "rewards apart may differ; leave one of them out",
    )
    yield (
        rollout.replay_routing is not None and config.precision.kernels == "exact",
        "rollout.replay_routing does nothing with precision.kernels=exact: rollout and learner choose the same "
        "experts; leave one of them out",
    )
    yield completions < 2, f"algorithm.advantage={kind} compares completions, and a step has one; raise rollout.prompts"


def _vllm_refusals(config: RunConfig) -> Refusals:
    """What vLLM cannot do, or what nobody has tried with it."""
    rollout, lag = config.rollout, config.rollout.max_policy_lag
    untold, loss = untold_support(rollout.top_k, rollout.top_p), config.algorithm.loss
    centred = loss.centering or 0 if isinstance(loss, ReinforceConfig) else 0
    refusals = (
        *_vllm_formats(config.precision),
        (
            centred > MOST_TOLD,
            f"algorithm.loss.centering={centred}: vLLM tells at most {MOST_TOLD} tokens; lower it",
        ),
        (
            bool(untold),
            f"rollout.{untold} (a {ignored(rollout.top_k, rollout.top_p)})",
        ),
        (
            config.guard is not None and rollout.vllm.server is not None,
            "guard: the server samples in the format that it was started in, and a fall back would leave it; leave "
            "rollout.vllm.server or guard out",
        ),
        (
            rollout.vllm.sleep and lag > 0,
            f"rollout.vllm.sleep=true and rollout.max_policy_lag={lag}: it samples while the learner works, so it "
            "never sleeps; leave one of them out",
        ),
        (
            rollout.temperature < LEAST_TEMPERATURE,
            f"rollout.temperature={rollout.temperature:g}: vLLM would sample at {LEAST_TEMPERATURE}; raise it to that",
        ),
    )
    for refused, why in refusals:
        yield refused, f"rollout.engine=vllm with {why}, or set rollout.engine=native"


def _vllm_formats(policy: PrecisionPolicy) -> Refusals:
    """Of what it computes in."""
    base = policy.format_of(policy.rollout).name
    yield from (
        (
            policy.kernels == "exact",
            "precision.kernels=exact: vLLM's kernels add in another order than the learner's, so their log-probs are "
            "not equal to the last bit; use kernels=fast and read the gap",
        ),
        (
            policy.kv_cache not in (None, base, "fp8"),
            f"precision.kv_cache={policy.kv_cache}: vLLM's cache is kept in the rollout's own format, {base}, or in "
            "fp8; leave it out",
        ),
        (
            policy.logits not in ("fp32", base),
            f"precision.logits={policy.logits}: vLLM holds logits in fp32 or in the rollout's {base}; choose one of "
            "them",
        ),
        (
            policy.backend == "simulated" and policy.rollout != "fp32",
            f"precision.backend=simulated: vLLM computes in {policy.rollout} itself; leave backend out",
        ),
        (
            policy.rollout in SCHEMES,
            f"precision.rollout={policy.rollout}: it is simulated here, and vLLM's kernels are its own; choose fp32, "
            "bf16, fp16 or fp8",
        ),
        (
            policy.rollout in DIAL,
            f"precision.rollout={policy.rollout}: a format of the dial is simulated, and vLLM's kernels are its own; "
            "choose fp32, bf16, fp16 or fp8",
        ),
    )


def _emulated_refusals(config: RunConfig) -> Refusals:
    """What no emulation can do."""
    policy = config.precision
    yield (
        policy.kernels == "exact",
        "rollout.engine=emulated with precision.kernels=exact: it rounds at other places than the learner, so that "
        "their log-probs differ; set precision.kernels=fast, or rollout.engine=native",
    )
    yield (
        policy.backend == "native",
        "rollout.engine=emulated with precision.backend=native: its values are rounded in fp32; leave "
        "precision.backend out, or set rollout.engine=native",
    )


def _transformers_refusals(config: RunConfig) -> Refusals:
    """What a policy by transformers' own code does not have."""
    policy, algorithm, rollout = config.precision, config.algorithm, config.rollout
    formats = f"train={policy.train} and rollout={policy.rollout}"
    refusals = (
        (config.model.path is None, "model.fresh: it has no folder; give model.path"),
        (config.model.lora is not None, "model.lora: these adapters are for our own decoder; leave it out"),
        (config.nproc > 1, f"nproc={config.nproc}: it runs in one process; set nproc=1"),
        (
            rollout.max_policy_lag > 0,
            f"rollout.max_policy_lag={rollout.max_policy_lag}: it samples in turn; set it to 0",
        ),
        (rollout.replay_routing is not None, "rollout.replay_routing: its experts are not told; leave it out"),
        (config.waltz is not None, "waltz: two policies share a base of our own decoder; leave it out"),
        (config.guard is not None, "guard: it does not change its format on the way; leave it out"),
        (
            algorithm.reference is not None and algorithm.reference.path is not None,
            "algorithm.reference.path: its reference is a copy of itself; leave path out",
        ),
        (
            policy.kernels == "exact" and policy.reference not in (None, policy.train),
            f"precision.reference={policy.reference}: one adopted model has one format; leave it out",
        ),
        (
            isinstance(algorithm.loss, OfTeacher),
            f"algorithm.loss={algorithm.loss.kind}: a teacher's whole distributions",
        ),
        (algorithm.critic is not None, "algorithm.critic: its hidden states are not told; leave it out"),
        (isinstance(algorithm.loss, FlowRLConfig), "algorithm.loss.partition: its hidden states are not told"),
        (policy.logits != "fp32", f"precision.logits={policy.logits}: its head is its own; leave it out"),
        (policy.kv_cache is not None, f"precision.kv_cache={policy.kv_cache}: its cache is its own; leave it out"),
        (policy.backend != "auto", f"precision.backend={policy.backend}: its kernels are its own; leave it out"),
        (policy.kernels == "exact" and policy.train != policy.rollout, f"{formats}: one adopted model has one format"),
    )
    for refused, why in refusals:
        yield refused, f"rollout.engine=transformers with {why}, or set rollout.engine=native"


# Of the engines that lack something; one that does all that a recipe can ask has no entry.
_LACKING = {"vllm": _vllm_refusals, "emulated": _emulated_refusals, "transformers": _transformers_refusals}


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, nproc: int | None = None) -> RunConfig:
    """Read a recipe and apply ``key=value`` overrides (dotted keys, YAML values), then validate the whole.

    ``path``: a YAML file, or the name of a recipe that comes with Mantissa, such as ``demo``.
    ``nproc``: where the recipe does not say, there are this many processes.

    Relative paths of datasets and models in a recipe are relative to the current folder, as on a command line.
    Raises ``MantissaError`` for a missing file, bad YAML, unknown keys (with the nearest right one) and bad values.
    """
    with boundary(f"recipe {path}", "expected a YAML file of UTF-8 text, such as recipes/demo.yaml"):
        path = find_recipe(path)
        values = read_yaml(path)
    if not isinstance(values, dict):
        raise MantissaError(f"{path}: expected keys and values, got {type(values).__name__}")
    there = {} if nproc is None else {"nproc": nproc}
    return make_config(there | apply_overrides(values, overrides), str(path))


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set ``a.b.c=value`` in nested mappings; shorter keys first: ``precision=fp16`` comes before its fields.

    ``warm_start=null`` leaves out what an override before it set there.
    """
    result = dict(values)
    pairs: list[tuple[list[str], Any]] = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise MantissaError(f"override {item!r}: expected key=value, such as steps=20 or precision.rollout=bf16")
        keys, value = key.split("."), parse_yaml(text, f"override {item!r}")
        if value is None:
            pairs = [(other, before) for other, before in pairs if other[: len(keys)] != keys]
        pairs.append((keys, value))
    for keys, value in sorted(pairs, key=lambda pair: len(pair[0])):
        _set(result, keys, value, ".".join(keys))
    return result


def _set(values: dict[str, Any], keys: list[str], value: Any, dotted: str) -> None:
    """Set one nested key, copying mappings on the way; a name in a mapping's place becomes that mapping."""
    if len(keys) == 1:
        values[keys[0]] = value
        return
    inner = values.get(keys[0])
    if isinstance(inner, str):
        # precision: fp16 and loss: ppo_clip are names that stand for a mapping.
        names = {"precision": "preset", "loss": "kind"}
        if keys[0] not in names:
            raise MantissaError(f"override {dotted}: {keys[0]} is {inner!r}, which has no field {keys[1]!r}")
        inner = {names[keys[0]]: inner}
    if inner is not None and not isinstance(inner, dict):
        raise MantissaError(f"override {dotted}: {keys[0]} is {inner!r}, which has no fields")
    values[keys[0]] = dict(inner or {})
    _set(values[keys[0]], keys[1:], value, dotted)


def make_config(values: dict[str, Any], where: str) -> RunConfig:
    """Validate plain values into a ``RunConfig``; the first mistake becomes a ``MantissaError``."""
    with boundary(where, "expected a recipe's keys and values"):
        try:
            return RunConfig.model_validate(values)
        except ValidationError as error:
            raise MantissaError(f"{where}: {_describe(error)}") from None


def widened(config: RunConfig, to: str) -> RunConfig:
    """``config`` with learner and rollout at least as wide as ``to``, checked as any recipe is.

    The reference stays what it is, format and all: what the policy is held to does not move.
    """
    policy = config.precision

    def wide(role: str) -> str:
        return "fp32" if "fp32" in (role, to) else to

    values: dict[str, Any] = {"train": wide(policy.train), "rollout": wide(policy.rollout)}
    kept = ("kernels", "on_mismatch", "check_every", "backend", "fallback")
    values |= {name: value for name, value in policy if name in kept}
    if config.algorithm.reference is not None:
        values["reference"] = policy.reference or policy.train
    if values.get("reference") == "fp8" and policy.fp8 is not None:
        values["fp8"] = policy.fp8
    if values.get("reference") in SCHEMES and policy.quantized is not None:
        values["quantized"] = policy.quantized
    if {values["train"], values["rollout"], values.get("reference", "fp32")} == {"fp32"}:
        values["backend"] = "auto"  # fp32 is never simulated
    plain = config.model_dump(mode="json") | {"precision": values, "loss_scaling": None}
    return make_config(plain, "the run after a fall back of its guard")


def _describe(error: ValidationError) -> str:
    """The first mistake in words: an unknown key if there is one (the others often follow from it), else the first."""
    mistakes = error.errors(include_url=False)
    first = next((m for m in mistakes if m["type"] == "extra_forbidden"), mistakes[0])
    path = [str(part) for part in first["loc"]]
    key = ".".join(part for part in path if part not in _UNION_TAGS)
    more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _siblings(path)
        listed = f" (known here: {', '.join(known)})" if known else ""
        return f"unknown key {key!r}{nearest(path[-1], known)}{listed}{more}"
    if first["type"] == "missing":
        return f"missing key {key!r}{more}"
    if first["type"] == PLAIN:
        return f"{key + '.' if key else ''}{first['msg']}{more}"
    message = first["msg"].removeprefix("Value error, ").strip()
    given = first["input"]
    got = f", got {given!r}" if isinstance(given, (str, int, float, bool, type(None))) and key else ""
    message = message[0].lower() + message[1:] if message.startswith(("Input", "Expected")) else message
    return f"{key + ': ' if key else ''}{message}{got}{more}"


_REWARDS = {"name", "terms"}  # a reward by its name, or as a list
_UNION_TAGS = {"running_sum", "addition", "chain", "countdown", "requests", "code", "dataset", *LOSSES, *_REWARDS}


def _siblings(path: list[str]) -> list[str]:
    """The keys that are known beside the last part of an error's path."""
    model: Any = RunConfig
    options: list[type[BaseModel]] = []
    for part in path[:-1]:
        if part in model.model_fields:
            options = _models_in(model.model_fields[part].annotation)
            model = options[0] if options else model
        elif part in _UNION_TAGS:
            kinds = [m for m in options if "kind" in m.model_fields]  # a list of terms has none
            model = next((m for m in kinds if part in get_args(m.model_fields["kind"].annotation)), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Every configuration model inside an annotation: ``X | None``, ``Annotated[A | B, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
