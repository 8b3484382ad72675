"""From a configuration to the parts of a run: device, precision (proven), policy, engine, task, learner."""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mantissa.base.bounds import require_memory
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import ALONE, Ranks, world_size
from mantissa.base.seeds import generator
from mantissa.kernels import (
    ExactPlan,
    Kernels,
    ModelShapes,
    Way,
    check_invariance,
    learner_kernels,
    plan_exact,
    probe,
    reference_kernels,
    rollout_kernels,
)
from mantissa.model import Decoder, ModelConfig, Tokenizer, attach, byte_tokenizer, character_tokenizer
from mantissa.precision import E4M3, Emulation, PrecisionPolicy, ResolvedPrecision, resolve
from mantissa.precision.policy import Backend
from mantissa.rl.adapters import open_policy, policy_folder
from mantissa.rl.collect.sampler import Sampler
from mantissa.rl.collect.source import shares
from mantissa.rl.config.run import LossScalingConfig, ModelSource, RolloutConfig, RunConfig
from mantissa.rl.learner import Learner
from mantissa.rl.score import Reference
from mantissa.rollout import NativeEngine, RolloutEngine, VllmEngine, VllmStart, require_vllm, serve_vllm
from mantissa.tasks import DatasetConfig, Grader, Problem, Task, build_task
from mantissa.training import LossScaler

_BYTES_A_WEIGHT = 10  # fp32, its gradient, and two moments of 8 bits
_BYTES_A_COMPLETION, _BYTES_A_PROBLEM = 1000, 500  # objects in Python, without their text and tokens


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that one run works with."""

    device: torch.device
    precision: ResolvedPrecision
    evidence: dict[str, str]
    tokenizer: Tokenizer
    model: Decoder
    task: Task
    learner: Learner
    sampler: Sampler
    scaling: LossScalingConfig
    reference: Reference | None
    ranks: Ranks
    twin: ExactTwin | None  # where an engine samples that is not this package's
    plan: ExactPlan | None
    replan: Callable[[Way], ExactPlan | None] | None  # where there is a plan: another one; collective
    feedback: Parts | None = None  # the second policy's, where two play

    def new_scaler(self) -> LossScaler:
        """A loss scaler for the learner's format, at its first scale."""
        return self.scaling.scaler(self.precision.learner.active)

    def close(self) -> None:
        """End the verifier's processes, and the engine's where it has some."""
        self.sampler.grader.close()
        close_engine(self.sampler.engine)
        if self.feedback is not None:
            self.feedback.close()


def assemble(config: RunConfig, ranks: Ranks = ALONE, task: Task | None = None) -> Parts:
    """Build every part; nothing is written yet, so a mistake in the recipe leaves no folder behind.

    ``task``: in the place of the recipe's own, of a policy that plays with another.
    """
    device, vllm = choose_device(config.device), config.rollout.engine == "vllm"
    _check_bill(config)
    be_deterministic(device)
    precision = _precision(config, device)
    given, task = task is not None, task or build_task(config.task, config.seed)
    model, tokenizer = load_policy(config.model, task, config.seed)
    _check_shape(config, model)
    model = place(model, device, ranks)
    longest = model.config.max_position_embeddings  # of a dialogue, which grows as it is played
    if not given:
        longest = _longest(config, task, longest)
    rows = max(config.rollout.slots, config.optimizer.micro_batch_tokens)

    def planned(way: Way | None = None) -> ExactPlan | None:  # found by probing, and one for all ranks
        return ranks.broadcast(exact_plan(precision, model, device, longest, rows, way))

    plan = planned()
    evidence = prove(precision, device, plan, vllm)
    twin = exact_twin(config, model, device, longest, rows, ranks) if vllm else None
    scaling, section = config.loss_scaling or LossScalingConfig(), config.algorithm.reference
    scaler = scaling.scaler(precision.learner.active)
    learner = new_learner(config, model, learner_kernels(precision, plan), scaler, ranks)
    kernels = (twin and twin.kernels) or rollout_kernels(precision, plan)
    sampler = _sampler(config, task, precision, kernels, model.config, tokenizer, device, ranks)
    if isinstance(sampler.engine, VllmEngine):
        evidence["rollout"] = evidence_of(sampler.engine, ranks)
    reference = None
    if section is not None:
        reference = Reference(
            model.config,
            reference_kernels(precision, plan),
            temperature=config.rollout.temperature,
            micro_batch_tokens=config.optimizer.micro_batch_tokens,
            refresh_every=section.refresh_every,
            device=device,
            ranks=ranks,
        )
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


def _precision(config: RunConfig, device: torch.device) -> ResolvedPrecision:
    """What each role uses here, the rollout's as the engine has it that samples."""
    rollout = config.rollout
    precision = resolve(config.precision_policy, device, reference=config.algorithm.reference is not None)
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
    if config.precision_policy.fp8 is not None:
        config.precision_policy.fp8.check(model.projections)
    if config.rollout.emulate is not None:
        config.rollout.emulate.check(shape.num_attention_heads, shape.intermediate_size)


def new_learner(config: RunConfig, model: Decoder, kernels: Kernels, scaler: LossScaler, ranks: Ranks) -> Learner:
    """The learner of these masters."""
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
    )


def _sampler(
    config: RunConfig,
    task: Task,
    precision: ResolvedPrecision,
    kernels: Kernels,
    model: ModelConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    ranks: Ranks,
) -> Sampler:
    """Engine and verifier, at work; what the task holds that would stop the run later is found here."""
    grading = config.grading
    grader = Grader(task.verifier, grading.timeout_s, grading.workers, grading.memory_gib)
    grader.start()  # a reward function that is not there shows now
    engine = None
    try:
        engine = build_engine(config.rollout, precision, kernels, model, tokenizer, device, ranks)
        sampler = Sampler(engine, tokenizer, grader, ranks)
        check_task(config, task, sampler, model.max_position_embeddings)
    except BaseException:
        grader.close()
        close_engine(engine)
        raise
    return sampler


def choose_device(name: str) -> torch.device:
    """``auto`` is cuda where there is one; cuda where there is none is an error, never a CPU.

    One of several processes gets a GPU to itself, by its number on this machine.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise MantissaError(f"device={name}: expected auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise MantissaError("device=cuda, but torch sees no CUDA device here; use device=cpu or device=auto")
    if name == "cpu" or world_size() is None:
        return torch.device(name)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank >= torch.cuda.device_count():
        raise MantissaError(
            f"nproc: process {rank + 1} of this machine has no GPU, for torch sees {torch.cuda.device_count()}; lower "
            "nproc, or set device=cpu"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def be_deterministic(device: torch.device) -> None:
    """Ask torch for kernels that give the same bits every time; an operation that has none raises when it is used.

    On CUDA also: half products are accumulated in fp32 throughout (torch lets cuBLAS combine partial sums in half).
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS makes its handle
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(True)
    # That mode also fills every new tensor with NaN before the operation that made it writes it: a tenth of the time of
    # a simulated step, and no operation here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


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
    only: Way | None = None,
) -> ExactPlan | None:
    """How exact kernels will compute this model here, found by probing; None where no role is exact.

    On CUDA there is nothing to choose: None too, but the kernels are probed, and ``MantissaError`` names what fails.

    ``length``: positions of the longest sequence to look at. ``rows``: positions of the largest product. ``only``: one
    way to compute, and no faster one.
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
    return plan_exact(shapes, precision.learner, device, only)


def exact_policy(policy: PrecisionPolicy) -> PrecisionPolicy:
    """The rollout's precision under exact kernels, as a policy of its own: what the native engine would be given."""
    return dataclasses.replace(
        policy,
        train=policy.rollout,
        reference=None,
        fp8=policy.fp8 if policy.rollout == "fp8" else None,
        kernels="exact",
        backend="auto",
        fallback="error",
    )


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

    def facts(self, engine: VllmEngine) -> dict[str, Any]:
        """What the run's folder keeps for the report: engine, format of both, what measures or why nothing does."""
        return {
            "engine": engine.release,
            "format": engine.start.format.name if engine.start.fp8 is None else f"fp8 on {engine.start.format}",
            "every": self.every,
            "measured": self.kernels is not None,
            "kernels" if self.kernels is not None else "reason": self.said,
        } | ({"evidence": self.evidence} if self.evidence else {})


def exact_twin(
    config: RunConfig, model: Decoder, device: torch.device, length: int, rows: int, ranks: Ranks
) -> ExactTwin:
    """Exact kernels for the rollout's format, proven here; or why there are none, and then nobody measures.

    ``length``, ``rows``: as in ``exact_plan``.
    """
    policy, every = config.precision_policy, config.rollout.vllm.share_every
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


def _check_bill(config: RunConfig) -> None:
    """Refuse now what would fill the memory of this machine, by the least that it could take."""
    rollout, task = config.rollout, config.task
    what = f"rollout.prompts={rollout.prompts:,} with samples={rollout.samples:,} completions each"
    require_memory(rollout.prompts * rollout.samples * _BYTES_A_COMPLETION, what, "lower one of them")
    if not isinstance(task, DatasetConfig):
        problems = sum(task.sizes.values())
        require_memory(problems * _BYTES_A_PROBLEM, f"task: {problems:,} problems", "lower its sizes")


def place(model: Decoder, device: torch.device, ranks: Ranks) -> Decoder:
    """The learner's model, whole on ``device`` or with a slice of each tensor there. Before its optimiser is made.

    A layer is gathered for its forward and again for its backward; what belongs to no layer (embedding, last norm,
    head) likewise around ``Decoder.within``.
    """
    if not ranks.sharded:
        return model.to(device)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (ranks.world,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # a sum: each rank's loss is a part of the batch's
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    register_fsdp_forward_method(model, "within")
    # Exact kernels' logits are a view of a larger tensor. FSDP2 fears in-place changes of it; nobody makes any.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")
    return model


def load_policy(source: ModelSource, task: Task, seed: int) -> tuple[Decoder, Tokenizer]:
    """The policy's fp32 masters, adapters attached where the recipe asks for them, and its tokenizer."""
    if source.path is not None:
        return open_policy(policy_folder(source.path), source.lora, seed)
    assert source.fresh is not None  # the configuration's own check
    tokenizer = byte_tokenizer()
    if source.tokenizer == "characters":
        if task.alphabet is None:
            raise MantissaError(f"model.tokenizer=characters: task {task.name} has no alphabet of its own; use bytes")
        tokenizer = character_tokenizer(task.alphabet)
    shape = source.fresh.model(tokenizer.vocab_size)
    what = f"model.fresh: {shape.parameters:,} parameters with gradients and moments"
    require_memory(_BYTES_A_WEIGHT * shape.parameters, what, "make it smaller")
    model = Decoder(shape).initialize(generator(seed, "weights"))
    if source.lora is not None:
        attach(model, source.lora.shape(), generator(seed, "lora"))
    return model, tokenizer


def check_task(config: RunConfig, task: Task, sampler: Sampler, max_length: int) -> None:
    """Find now what would stop the run later: no held-out problems, prompts too long or impossible to write."""
    splits = [task.split("train")]
    if config.warm_start is not None:
        solved = task.split("warm_start")  # raises where the task has no solutions
        unsolved = [f"problem {problem.id} has none" for problem in solved if problem.solution is None]
        if unsolved or not solved:
            what = (*unsolved, "the task has no warm_start problems")[0]
            raise MantissaError(f"warm_start needs solutions to learn from, and {what}; set warm_start=null")
    for name, section in {"evaluation": config.evaluation, "warm_start": config.warm_start}.items():
        if section is None:
            continue
        splits.append(task.split("heldout")[: section.problems])
        if not splits[-1]:
            raise MantissaError(
                f"{name}.problems={section.problems}, but the task has no held-out problems; hold some out, or set "
                f"{name}=null"
            )
    for problems in splits:
        sampler.encode(problems[0])  # no chat template, or an alphabet that lacks a letter
    room = max_length - config.rollout.max_tokens
    for problem in itertools.chain(*splits):
        if most_tokens(problem) > room and (tokens := len(sampler.encode(problem))) > room:
            raise MantissaError(
                f"problem {problem.id}: its {tokens} prompt tokens and rollout.max_tokens={config.rollout.max_tokens} "
                f"exceed the model's {max_length} positions; lower rollout.max_tokens, or leave the problem out"
            )


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


# Which engine samples, and what the precision table says of it


def on_vllm(precision: ResolvedPrecision) -> ResolvedPrecision:
    """The same formats, where the rollout's are vLLM's own arithmetic and not this package's kernels."""
    rollout = "vLLM's own kernels and sum order"
    if (fp8 := precision.rollout.fp8) is not None:
        rollout = (
            f"vLLM's own fp8 kernels: products of e4m3 in blocks of 128, base {fp8.base}; weights of our quantising"
        )
    logits = "half operands, fp32 result, fp32 log-softmax; vLLM's head is told to be fp32"
    if precision.logits.active.name != "fp32":
        logits = f"asked for: rounded to {precision.logits.active} on both sides, by vLLM's head too"
    cache = "vLLM's cache, in the rollout's format"
    if precision.kv_cache.active is E4M3:
        cache = "asked for: vLLM's e4m3 cache without scales, so beyond 448 saturated" + (
            "; digits cut off, not rounded" if precision.device == "cpu" else ""
        )
    said = {"rollout": rollout, "logits": logits, "kv_cache": cache}
    roles: dict[str, Any] = {
        role: dataclasses.replace(getattr(precision, role), backend="native", reason=why) for role, why in said.items()
    }
    return dataclasses.replace(precision, **roles)


def emulated(precision: ResolvedPrecision, emulation: Emulation) -> ResolvedPrecision:
    """The same formats, where the rollout's kernels have a serving engine's habits; the table says which."""
    role, active = precision.rollout, precision.rollout.active
    why = f"a serving engine's arithmetic, emulated: {emulation}; values on their grids in fp32"
    if idle := emulation.idle(active):
        why += f"; in {active} {', '.join(idle)} {'does' if len(idle) == 1 else 'do'} nothing"
    rollout = dataclasses.replace(role, backend="simulated", reason=why, emulation=emulation)
    logits = precision.logits
    if emulation.logits is not None and active is not logits.active:
        logits = dataclasses.replace(logits, reason=f"{logits.reason}; but the rollout's are rounded to {active}")
    held: Backend = (
        "native" if precision.kv_cache.active.name == "fp32" else "simulated"
    )  # on a GPU too: rounded in fp32
    cache = dataclasses.replace(precision.kv_cache, backend=held)
    return dataclasses.replace(precision, rollout=rollout, logits=logits, kv_cache=cache)


def vllm_start(
    rollout: RolloutConfig, precision: ResolvedPrecision, model: ModelConfig, device: torch.device
) -> VllmStart:
    """What the recipe asks a vLLM to be."""
    return VllmStart(
        model,
        precision.rollout.active,
        precision.logits.active,
        slots=rollout.slots,
        max_length=model.max_position_embeddings,
        device=device,
        sleeps=rollout.vllm.sleep,
        cache=precision.kv_cache.active,
        fp8=precision.rollout.fp8,
    )


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
    )


def serve_engine(
    rollout: RolloutConfig,
    precision: ResolvedPrecision,
    model: ModelConfig,
    device: torch.device,
    *,
    host: str,
    port: int,
    folder: str | None,
    ready: Callable[[str], None],
) -> int:
    """A vLLM server for runs of a recipe, until it ends or is interrupted; returns its exit code."""
    with torch.device("meta"):
        shapes = {name: weight.to(precision.rollout.active.dtype) for name, weight in Decoder(model).named_parameters()}
    start = vllm_start(rollout, precision, model, device)
    return serve_vllm(start, shapes, host=host, port=port, folder=folder, ready=ready)


def evidence_of(engine: VllmEngine, ranks: Ranks) -> str:
    """What was seen of vLLM at the start, and by how many."""
    if ranks.alone:
        return engine.evidence
    each = "one server for" if engine.served else "one such vLLM for each of"
    return f"{engine.evidence}; {each} {ranks.world} processes"


def close_engine(engine: RolloutEngine | None) -> None:
    """End the processes of an engine that has some."""
    if isinstance(engine, VllmEngine):
        engine.close()
