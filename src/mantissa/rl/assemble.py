"""From a configuration to the parts of a run: device, precision (proven), policy, engine (built, or served), task,
learner; and what differs between engines."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.base.bounds import require_memory
from mantissa.base.errors import MantissaError, on_failure
from mantissa.base.ranks import ALONE, Ranks, be_deterministic, choose_device
from mantissa.kernels import (
    WAYS,
    ExactPlan,
    Kernels,
    ModelShapes,
    NativeKernels,
    ResolvedPrecision,
    Way,
    check_invariance,
    cpu,
    learner_kernels,
    plan_exact,
    probe,
    reference_kernels,
    resolve,
    rollout_kernels,
)
from mantissa.kernels.roles import emulated
from mantissa.model import (
    Decoder,
    ModelConfig,
    Tokenizer,
    base_digest,
    policy_weights,
    save_model,
)
from mantissa.model.decoder import place
from mantissa.precision import PrecisionPolicy
from mantissa.rl.ahead import shares
from mantissa.rl.batch import Sampler
from mantissa.rl.config.run import RunConfig
from mantissa.rl.config.sections import LossScalingConfig, RolloutConfig
from mantissa.rl.engines import as_policy, on_vllm, open_transformers, proven, vllm_start
from mantissa.rl.learner import Learner
from mantissa.rl.policy import load_policy, open_policy, policy_folder
from mantissa.rl.score import ReferencePolicy
from mantissa.rollout import CopiedPolicy, NativeEngine, RolloutEngine, VllmEngine, require_vllm
from mantissa.rollout.transformers import (
    CopiedTransformers,
    PolicyEngine,
    TransformersPolicy,
    positions_of,
    save_transformers,
)
from mantissa.tasks import DatasetConfig, DatasetTask, Grader, Problem, Task, build_task
from mantissa.training import LossScaler

_BYTES_A_COMPLETION = 1000  # objects in Python, without their text and tokens
_BYTES_A_PROBLEM = 500


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that one run works with."""

    device: torch.device
    precision: ResolvedPrecision
    evidence: dict[str, str]
    tokenizer: Tokenizer
    model: Decoder | TransformersPolicy
    task: Task
    learner: Learner
    sampler: Sampler
    scaling: LossScalingConfig
    reference: ReferencePolicy | None
    ranks: Ranks
    twin: ExactTwin | None = None  # where an engine samples that is not this package's
    plan: ExactPlan | None = None
    replan: Callable[[Way], ExactPlan | None] | None = None  # where there is a plan: another one; collective
    beside: Mapping[str, Parts] = field(default_factory=dict)  # of policies that play with this one, by name

    @property
    def exact(self) -> list[str]:
        """What exact kernels compute by, for a screen; none where kernels are fast."""
        adopted = self.model.adopted if isinstance(self.model, TransformersPolicy) else None
        return self.plan.lines() if self.plan else [] if adopted is None else adopted.lines

    def save(self, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the policy as a Hugging Face folder. ``weights``: of a sharded one, gathered first."""
        if isinstance(self.model, TransformersPolicy):
            save_transformers(self.model, self.tokenizer, path)
        else:
            save_model(self.model, self.tokenizer, path, weights=weights)

    def new_scaler(self) -> LossScaler:
        """A loss scaler for the learner's format, at its first scale."""
        return self.scaling.scaler(self.precision.learner.active)

    def close(self) -> None:
        """End the verifier's processes, and the engine's where it has some."""
        self.sampler.grader.close()
        self.sampler.engine.close()
        for other in self.beside.values():
            other.close()


def assemble(
    config: RunConfig, ranks: Ranks = ALONE, task: Task | None = None, products: cpu.CpuProducts | None = None
) -> Parts:
    """Build every part; nothing is written yet, so a mistake in the recipe leaves no folder behind.

    ``task``: in the place of the recipe's own, of a policy that plays with another. ``products``: of a run that is
    gone on with, how its processor multiplies.
    """
    device, vllm = choose_device(config.device), config.rollout.engine == "vllm"
    _check_bill(config)
    be_deterministic(device)
    given, task = task is not None, task or build_task(config.task, config.seed)
    _held_out(config, task)  # before a model is loaded
    if config.rollout.engine == "transformers":
        return _by_transformers(config, task, device, ranks)
    model, tokenizer = load_policy(config.model, task, config.seed)
    named = config.precision.of_layers(model.config.num_hidden_layers)
    config = config.model_copy(update={"precision": named})
    precision = _precision(config, device, ranks, products)
    _check_shape(config, model)
    model = place(model, device, ranks)
    longest = model.config.max_position_embeddings  # of a dialogue, which grows as it is played
    if not given:
        longest = _longest(config, task, longest)
    rows = max(config.rollout.slots, config.optimizer.micro_batch_tokens)

    def planned(fastest: Way = WAYS[0]) -> ExactPlan | None:  # found by probing, and one for all ranks
        return ranks.broadcast(exact_plan(precision, model, device, longest, rows, fastest))

    plan = planned()
    evidence = prove(precision, device, plan, vllm)
    twin = exact_twin(config, model, device, longest, rows, ranks) if vllm else None
    scaling = config.loss_scaling or LossScalingConfig()
    scaler = scaling.scaler(precision.learner.active)
    reference = _reference(config, precision, plan, model, tokenizer, longest, ranks)
    learner = new_learner(config, model, learner_kernels(precision, plan), scaler, ranks, reference)
    kernels = (twin and twin.kernels) or rollout_kernels(precision, plan)

    def engine() -> RolloutEngine:
        return build_engine(config.rollout, precision, kernels, model.config, tokenizer, device, ranks)

    sampler = _sampler(config, task, engine, model.config.max_position_embeddings, tokenizer, ranks)
    if sampler.engine.evidence:
        evidence["rollout"] = sampler.engine.evidence
    return Parts(
        device=device,
        precision=precision,
        evidence=evidence,
        tokenizer=tokenizer,
        model=model,
        task=task,
        learner=learner,
        sampler=sampler,
        scaling=scaling,
        reference=reference,
        ranks=ranks,
        twin=twin,
        plan=plan,
        replan=planned if plan else None,
    )


def _by_transformers(config: RunConfig, task: Task, device: torch.device, ranks: Ranks) -> Parts:
    """Those of a policy by transformers' own code."""
    assert config.model.path is not None  # the configuration's own check
    model, tokenizer = open_transformers(config.model.path)
    positions, reference = positions_of(model), None
    section, longest = config.algorithm.reference, _longest(config, task, positions)
    asked, named = section is not None, f"model.path={config.model.path}"
    policy, precision = as_policy(config.precision, model, device, longest, reference=asked, named=named)
    scaling = config.loss_scaling or LossScalingConfig()
    kernels = NativeKernels(policy.format)  # whose format alone is asked: transformers' code multiplies
    engine = PolicyEngine(policy, precision.rollout, config.rollout.slots, tokenizer.decode)
    copies = None
    if section is not None and (role := precision.reference) is not None:
        copies = CopiedTransformers(policy, role)
        reference = ReferencePolicy(
            copies, NativeKernels(role.active), temperature=config.rollout.temperature,
            micro_batch_tokens=config.optimizer.micro_batch_tokens, refresh_every=section.refresh_every, ranks=ranks,
        )  # fmt: skip
    learner = new_learner(config, policy, kernels, scaling.scaler(policy.format), ranks, reference)
    evidence = proven(precision, policy, engine, copies, device)
    sampler = _sampler(config, task, lambda: engine, positions, tokenizer, ranks)
    return Parts(
        device=device,
        precision=precision,
        evidence=evidence,
        tokenizer=tokenizer,
        model=policy,
        task=task,
        learner=learner,
        sampler=sampler,
        scaling=scaling,
        reference=reference,
        ranks=ranks,
    )


def _reference(
    config: RunConfig,
    precision: ResolvedPrecision,
    plan: ExactPlan | None,
    model: Decoder,
    tokenizer: Tokenizer,
    longest: int,
    ranks: Ranks,
) -> ReferencePolicy | None:
    """The frozen policy that the recipe asks for: the teacher, whose weights it takes here, or later the learner's."""
    section = config.algorithm.reference
    if section is None:
        return None
    teacher = None if section.path is None else _teacher(section.path, model, tokenizer, longest)
    kernels, device = reference_kernels(precision, plan), next(model.parameters()).device
    reference = ReferencePolicy(
        CopiedPolicy((teacher or model).config, kernels, device, "reference"),
        kernels,
        temperature=config.rollout.temperature,
        micro_batch_tokens=config.optimizer.micro_batch_tokens,
        refresh_every=section.refresh_every,
        teacher=None if teacher is None else base_digest(teacher),
        ranks=ranks,
    )
    if teacher is not None:
        reference.take(policy_weights(teacher), 0)
    return reference


def _teacher(path: str, model: Decoder, tokenizer: Tokenizer, longest: int) -> Decoder:
    """The model that ``algorithm.reference.path`` names; of the policy's vocabulary, or an error."""
    teacher, its = open_policy(policy_folder(path), None, 0)
    where, rows, own = f"algorithm.reference.path={path}", teacher.config.vocab_size, model.config.vocab_size
    if rows != own or its.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise MantissaError(
            f"{where}: its vocabulary ({rows} rows) is not the policy's ({own}), so its log-probs are of other tokens; "
            "use a model of the same tokenizer"
        )
    if longest > (positions := teacher.config.max_position_embeddings):
        raise MantissaError(
            f"{where}: it has {positions} positions, and this run's sequences may have {longest} tokens; lower "
            "rollout.max_tokens, or use another"
        )
    return teacher


def _precision(
    config: RunConfig, device: torch.device, ranks: Ranks, products: cpu.CpuProducts | None
) -> ResolvedPrecision:
    """What each role uses here, the rollout's as the engine has it that samples; the same on all ranks."""
    rollout = config.rollout
    if device.type == "cpu":
        products = ranks.broadcast(products or cpu.products())  # a measurement: one for all
    reference = config.algorithm.reference is not None
    precision = resolve(config.precision, device, reference=reference, products=products)
    if rollout.engine == "vllm":
        if rollout.vllm.server is None:
            require_vllm()
        return on_vllm(precision)
    return precision if rollout.emulate is None else emulated(precision, rollout.emulate)


def _check_shape(config: RunConfig, model: Decoder) -> None:
    """Refuse a cache that memory cannot hold, and layers that fp8 cannot."""
    shape, slots = model.config, config.rollout.slots
    row = 4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim  # one position, two bytes a value
    require_memory(slots * row, f"rollout.slots={slots:,}", "lower it")
    if config.precision.fp8 is not None:
        config.precision.fp8.check(model.projections)
    if (quantized := config.precision.quantized) is not None:
        quantized.of("mxfp8").check(model.projections)
    mixtures = shape.experts
    if config.rollout.emulate is not None:
        config.rollout.emulate.check(shape.num_attention_heads, shape.intermediate_size)
        if mixtures is not None:
            config.rollout.emulate.check(shape.num_attention_heads, mixtures.moe_intermediate_size)
    if mixtures is None and config.rollout.replay_routing is not None:
        raise MantissaError("rollout.replay_routing does nothing: this policy has no mixture of experts; leave it out")
    if mixtures is not None and config.rollout.engine == "vllm":
        raise MantissaError(
            "rollout.engine=vllm: a policy with mixtures of experts is not sent to vLLM: it keeps experts fused, so "
            "they cannot be read back and compared; 0.32 tells its routing on GPUs alone; set rollout.engine=native"
        )


def new_learner(
    config: RunConfig,
    model: Decoder | TransformersPolicy,
    kernels: Kernels,
    scaler: LossScaler,
    ranks: Ranks,
    reference: ReferencePolicy | None,
) -> Learner:
    """The learner of these masters."""
    exact = config.precision.kernels == "exact"
    return Learner(
        model,
        kernels,
        config.algorithm,
        config.optimizer,
        scaler,
        temperature=config.rollout.temperature,
        aggregation_length=config.algorithm.aggregation_length or float(config.rollout.max_tokens),
        seed=config.seed,
        steps=config.steps,
        ranks=ranks,
        replay=config.rollout.replay_routing,
        reference=reference,
        reuse_scoring=not exact or (config.precision.check_every or 1) == 1,  # of checked steps and others alike
        # What becomes of a gradient that is not finite is a guard's decision, where there is one.
        on_nonfinite="stop" if config.guard is None else "skip",
    )


def _sampler(
    config: RunConfig,
    task: Task,
    built: Callable[[], RolloutEngine],
    positions: int,
    tokenizer: Tokenizer,
    ranks: Ranks,
) -> Sampler:
    """Engine and verifier, at work; what the task holds that would stop the run later is found here."""
    grading = config.grading
    grader = Grader(task.verifier, grading.timeout_s, grading.workers, grading.memory_gib)
    grader.start()  # a reward function that is not there shows now
    with on_failure(grader.close):
        engine = built()
        with on_failure(engine.close):
            sampler = Sampler(engine, tokenizer, grader, ranks)
            check_task(config, task, sampler, positions)
    return sampler


def _check_bill(config: RunConfig) -> None:
    """Refuse now what would fill the memory of this machine, by the least that it could take."""
    rollout, task = config.rollout, config.task
    what = f"rollout.prompts={rollout.prompts:,} with samples={rollout.samples:,} completions each"
    require_memory(rollout.prompts * rollout.samples * _BYTES_A_COMPLETION, what, "lower one of them")
    if not isinstance(task, DatasetConfig):
        problems = sum(task.sizes.values())
        require_memory(problems * _BYTES_A_PROBLEM, f"task: {problems:,} problems", "lower its sizes")


def check_task(config: RunConfig, task: Task, sampler: Sampler, max_length: int) -> None:
    """Find now what would stop the run later: no held-out problems, prompts too long or impossible to write.

    Where the recipe says so, problems with prompts that are too long are left out of the task here."""
    room = max_length - config.rollout.max_tokens
    if (
        isinstance(task, DatasetTask)
        and isinstance(config.task, DatasetConfig)
        and config.task.on_long_prompt == "skip"
    ):
        task.leave_out(lambda problem: most_tokens(problem) > room and len(sampler.encode(problem)) > room)
    splits = [task.split("train")]
    if config.warm_start is not None:
        solved = task.split("warm_start")  # raises where the task has no solutions
        unsolved = [f"problem {problem.id} has none" for problem in solved if problem.solution is None]
        if unsolved or not solved:
            what = (*unsolved, "the task has no warm_start problems")[0]
            raise MantissaError(f"warm_start needs solutions to learn from, and {what}; set warm_start=null")
    splits += _held_out(config, task)
    for problems in splits:
        sampler.encode(problems[0])  # no chat template, or an alphabet that lacks a letter
    for problem in itertools.chain(*splits):
        if most_tokens(problem) > room and (tokens := len(sampler.encode(problem))) > room:
            raise MantissaError(
                f"problem {problem.id}: its {tokens} prompt tokens and rollout.max_tokens={config.rollout.max_tokens} "
                f"exceed the model's {max_length} positions; lower rollout.max_tokens, or of a dataset set "
                "task.on_long_prompt=skip"
            )


def _held_out(config: RunConfig, task: Task) -> list[Any]:
    """The held-out problems of each that asks for some; ``MantissaError`` where there are none."""
    splits: list[Any] = []
    for name, asked in {"evaluation": config.evaluation, "warm_start": config.warm_start}.items():
        if asked is None:
            continue
        splits.append(task.split("heldout")[: asked.problems])
        if not splits[-1]:
            raise MantissaError(
                f"{name}.problems={asked.problems}, but the task has no held-out problems; hold some out, or set "
                f"{name}=null"
            )
    return splits


def most_tokens(problem: Problem) -> int:
    """A bound on a prompt's tokens that needs no tokenizer: a token is a byte at least; 256 for a template's own."""
    texts = [problem.prompt] if isinstance(problem.prompt, str) else [message.content for message in problem.prompt]
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + 256 * len(texts)


def _longest(config: RunConfig, task: Task, room: int) -> int:
    """A bound on any sequence of the run, of a model with ``room`` positions: exact kernels refuse longer ones."""
    evaluation, warm = config.evaluation, config.warm_start
    problems = [*task.split("train"), *(task.split("heldout") if evaluation or warm else ())]
    bounds = [most_tokens(problem) + config.rollout.max_tokens for problem in problems]
    for problem in task.split("warm_start") if warm else ():
        bounds.append(most_tokens(problem) + len((problem.solution or "").encode("utf-8", "surrogatepass")) + 1)
    return min(room, max(bounds, default=room))


def build_engine(
    rollout: RolloutConfig,
    precision: ResolvedPrecision,
    kernels: Kernels,
    model: ModelConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> RolloutEngine:
    """The engine that the recipe names, still without weights. vLLM's processes run from here on: ``close`` them.

    ``kernels``: the rollout's; of vLLM only their format and their copies of the masters are used, by this package's
    exact ones too, where they measure its share of the gap. Collective.
    """
    if rollout.engine == "vllm":
        start = vllm_start(rollout, precision, model, device)
        if rollout.max_policy_lag > 0 and device.type == "cpu":  # it works beside the learner, on the same cores
            start = dataclasses.replace(start, threads=shares(torch.get_num_threads())[1])
        server, timeout_s = rollout.vllm.server, rollout.vllm.timeout_s
        return VllmEngine(start, kernels, server=server, timeout_s=timeout_s, decode_text=tokenizer.decode, ranks=ranks)
    return NativeEngine(
        model,
        kernels,
        kv_format=precision.kv_cache.active,
        slots=rollout.slots,
        max_length=model.max_position_embeddings,
        device=device,
        decode_text=tokenizer.decode,
        expert_weights=rollout.replay_routing == "weights",
    )


def prove(
    precision: ResolvedPrecision, device: torch.device, plan: ExactPlan | None = None, vllm: bool = False
) -> dict[str, str]:
    """Probe every role's kernels on a device; returns what each probe saw, by role. Exact kernels need their plan.

    ``vllm``: the rollout's are vLLM's, which its engine tries itself.
    """
    evidence = {"learner": probe(learner_kernels(precision, plan), device)}
    if not vllm:
        evidence["rollout"] = probe(rollout_kernels(precision, plan), device)
    if precision.reference is not None:
        evidence["reference"] = probe(reference_kernels(precision, plan), device)
    return evidence


def exact_plan(
    precision: ResolvedPrecision,
    model: Decoder,
    device: torch.device,
    length: int,
    rows: int,
    fastest: Way = WAYS[0],
) -> ExactPlan | None:
    """How exact kernels will compute this model here, found by probing; None where no role is exact.

    On CUDA there is nothing to choose: None too, but the kernels are probed, and ``MantissaError`` names what fails.

    ``length``: positions of the longest sequence to look at. ``rows``: positions of the largest product. ``fastest``:
    the fastest way to compute that may be chosen.
    """
    if not precision.learner.exact:
        return None
    config = model.config
    shapes = ModelShapes.of(
        dict(model.named_parameters()),
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        length,
        rows,
    )
    if device.type != "cpu":
        check_invariance(rollout_kernels(precision), shapes, device)
        return None
    learner, reference = precision.learner, precision.reference
    other = reference is not None and (reference.active, reference.fp8) != (learner.active, learner.fp8)
    return plan_exact(shapes, learner, device, fastest, other, precision.products)


@dataclass(frozen=True)
class ExactTwin:
    """The rollout's exact kernels; None where there are none. ``said``: what they are, or why there are none.

    ``every``: steps between measurements. ``evidence``: what the probe saw of the kernels.
    """

    kernels: Kernels | None
    said: str
    every: int
    evidence: str = ""

    @property
    def line(self) -> str:
        """One line for the screen."""
        if self.kernels is None:
            return f"engine's share of the gap: not measured, {self.said}"
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        return f"engine's share of the gap: measured {steps} by {self.said}"

    def facts(self, engine: RolloutEngine) -> dict[str, Any]:
        """What the run's folder keeps for the report: engine, format of both, what measures or why nothing does."""
        return {
            "engine": engine.release,
            "format": engine.format_name,
            "every": self.every,
            "measured": self.kernels is not None,
            "kernels" if self.kernels is not None else "reason": self.said,
        } | ({"evidence": self.evidence} if self.evidence else {})


def exact_policy(policy: PrecisionPolicy) -> PrecisionPolicy:
    """The rollout's precision under exact kernels, as a policy of its own: what the native engine would be given."""
    fp8 = policy.fp8 if policy.rollout == "fp8" else None
    alone = {"preset": None, "train": policy.rollout, "reference": None, "fp8": fp8, "quantized": None}
    return PrecisionPolicy(**dict(policy) | alone | {"kernels": "exact", "backend": "auto", "fallback": "error"})


def exact_twin(
    config: RunConfig, model: Decoder, device: torch.device, length: int, rows: int, ranks: Ranks
) -> ExactTwin:
    """Exact kernels for the rollout's format, proven here; or why there are none, and then nobody measures.

    ``length``, ``rows``: as in ``exact_plan``.
    """
    policy, every = config.precision, config.rollout.vllm.share_every
    if every == 0:
        return ExactTwin(None, "rollout.vllm.share_every=0", every)
    if policy.rollout == "fp8" and device.type == "cpu":
        return ExactTwin(None, "a rollout in fp8 is sent as codes, and exact kernels on a CPU hold values", every)
    if config.rollout.max_policy_lag > 0:
        return ExactTwin(None, "rollout.max_policy_lag above 0: newer weights than sampled a batch are held", every)
    plan, evidence, failed = None, "", None
    try:
        exact = resolve(exact_policy(policy), device)
        plan = exact_plan(exact, model, device, length, rows)
        evidence = probe(rollout_kernels(exact, plan), device)
    except MantissaError as error:
        failed = str(error).rpartition("; ")[0] or str(error)  # its advice is for a recipe that asks for them
    failed = ranks.first_of(failed)  # none measures where one cannot
    if failed is not None:
        return ExactTwin(None, failed, every)
    kernels = rollout_kernels(exact, ranks.broadcast(plan))
    return ExactTwin(kernels, f"{exact.rollout.kernels} kernels in {exact.rollout.name}", every, evidence)
