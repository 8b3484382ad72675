"""Both sides of one policy, opened to be compared: the engine that samples, and the learner that scores and learns.

The three sets of log-probs of what was sampled are a run's own: the engine's, the learner's scoring, and the forward of
its update, up to where the first weight would change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError, on_failure
from mantissa.base.seeds import derive_seed
from mantissa.bench import certificate as made_of
from mantissa.bench.certificate import hexed, unhexed
from mantissa.bench.gap import parse_pair, read_prompts
from mantissa.kernels import (
    Emulation,
    ExactPlan,
    NativeKernels,
    ResolvedPrecision,
    learner_kernels,
    resolve,
    rollout_kernels,
)
from mantissa.kernels.roles import emulated
from mantissa.model import Decoder, Tokenizer, policy_weights, trained_parameters
from mantissa.precision import PrecisionPolicy
from mantissa.rl.assemble import build_engine, exact_plan, prove
from mantissa.rl.config.run import RunConfig, make_config
from mantissa.rl.config.sections import AlgorithmConfig, LossScalingConfig, OptimizerConfig, RolloutConfig
from mantissa.rl.engines import as_policy, on_vllm, open_transformers
from mantissa.rl.experience import Experience, Scored
from mantissa.rl.learner import Learner
from mantissa.rl.policy import FrozenBase, load_policy, open_any, policy_folder
from mantissa.rollout import Completion, Request, RolloutEngine, SamplingParams
from mantissa.rollout.transformers import PolicyEngine, TransformersPolicy, positions_of
from mantissa.runs.directory import RunDirectory
from mantissa.tasks import Task, build_task
from mantissa.training import load_checkpoint, load_weights

_SLOTS, _MICRO_BATCH = 64, 2048  # rows decoded together; padded tokens of one forward
_MOST_ROUNDS = 64  # of sampling, where completions end at once


@dataclass(frozen=True)
class Opened:
    """A policy as it was found: a ``Decoder``, or transformers' own model; of a run with its recipe and version, of a
    verl job with what it kept."""

    model: Any
    tokenizer: Tokenizer
    config: RunConfig | None = None
    version: int | None = None
    task: Task | None = None
    kept: made_of.Kept | None = None

    @property
    def by_transformers(self) -> bool:
        return not isinstance(self.model, Decoder)

    @property
    def positions(self) -> int:
        return positions_of(self.model) if self.by_transformers else int(self.model.config.max_position_embeddings)

    @property
    def weights(self) -> dict[str, Tensor]:
        """All that the policy holds, adapters merged, buffers that are saved too; by name, one of two that are tied."""
        if isinstance(self.model, Decoder):
            return dict(policy_weights(self.model))
        state: dict[str, Tensor] = self.model.state_dict()
        places = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(list(state.items()))}
        return {name: state[name] for name in places.values()}


def open_policy_of(path: str, by_transformers: bool = False) -> Opened:
    """What ``path`` names: a run at its newest checkpoint, its ``step-N``, a verl job's folder, or any model.

    ``by_transformers``: of a model, by transformers' own code also where our decoder knows it.
    ``MantissaError``: neither, a run without a checkpoint, or one that is half written.
    """
    folder = Path(path)
    if (folder / "state.json").is_file() and folder.name.startswith("step-"):
        return _open_run(folder.parent.parent, int(folder.name.removeprefix("step-")))
    if (folder / "config.yaml").is_file():
        return _open_run(folder, None)
    if kept := sorted(folder.glob("certify/step-*"), key=lambda each: int(each.name.removeprefix("step-"))):
        return _open_job(folder, made_of.read_kept(kept[-1]))
    if by_transformers:
        return Opened(*open_transformers(path))
    model, tokenizer, _ = open_any(policy_folder(path))
    return Opened(model if isinstance(model, Decoder) else model.eval(), tokenizer)


def _open_run(folder: Path, step: int | None) -> Opened:
    run = RunDirectory.open(folder)
    config = make_config(run.config, str(run.path / "config.yaml"))
    steps = run.checkpoint_steps()
    if not steps:
        raise MantissaError(f"{folder}: a run without a checkpoint yet; wait for one, or certify a model's folder")
    checkpoint = load_checkpoint(run.checkpoints, steps[-1] if step is None else step)
    task = build_task(config.task, config.seed)
    model: Any
    if config.rollout.engine == "transformers":
        assert config.model.path is not None  # the configuration's own check
        model, tokenizer = open_transformers(config.model.path)
        load_weights({name: weight.detach() for name, weight in model.named_parameters()}, checkpoint.policy)
    else:
        model, tokenizer = load_policy(config.model, task, config.seed)
        FrozenBase(config.model, model, tokenizer, run).restore(checkpoint.state)
        load_weights(trained_parameters(model), checkpoint.policy)
    return Opened(model, tokenizer, config, int(checkpoint.state["step"]["updates"]), task)


def _open_job(folder: Path, kept: made_of.Kept) -> Opened:
    """A verl job's policy as it was when the batch was sampled: the checkpoint before that step, or its model."""
    actor = folder / f"global_step_{kept.step - 1}" / "actor"
    if kept.step > 1 and not actor.is_dir():
        raise MantissaError(f"{actor} is not there, and it sampled the batch that was kept; keep its checkpoint")
    whole = actor / "huggingface"
    ours = kept.step > 1 and (actor / "mantissa").is_dir()
    if kept.step > 1 and not ours and not list(whole.glob("*.safetensors")):
        raise MantissaError(
            f"{whole} holds no weights; run the job with hf_model among actor.checkpoint.save_contents, or with "
            "+trainer.certify=1, whose weights are the model's own"
        )
    model, tokenizer, _ = open_any(policy_folder(kept.model if ours or kept.step == 1 else str(whole)))
    version = None if kept.step > 1 else 0
    if ours:
        checkpoint = load_checkpoint(actor / "mantissa")
        version = int(checkpoint.state["step"]["updates"])
        named = policy_weights(model) if isinstance(model, Decoder) else dict(model.named_parameters())
        load_weights({name: weight.detach() for name, weight in named.items()}, checkpoint.policy)
    return Opened(model if isinstance(model, Decoder) else model.eval(), tokenizer, version=version, kept=kept)


@dataclass(frozen=True)
class Asked:
    """How a policy is to compute: ``backend`` of its precision only where the machine is the certificate's.

    ``vllm``: that samples, in processes of its own that are started here; else the engine is this package's.
    """

    precision: PrecisionPolicy
    emulation: Emulation | None
    temperature: float
    max_tokens: int
    vllm: bool = False


def asked_of(opened: Opened, pair: str | None, max_tokens: int | None) -> Asked:
    """Of a run what its recipe says, of a job what it kept; of a model ``pair``, as ``mantissa gap`` names it, by
    default exact in bf16."""
    config, kept = opened.config, opened.kept
    if kept is not None:
        if pair is not None or max_tokens is not None:
            raise MantissaError("--precision and --max-tokens: a verl job has its own; leave them out")
        return Asked(PrecisionPolicy.parse(kept.precision), None, kept.sampling.temperature, kept.sampling.max_tokens)
    if config is None:
        return Asked(*parse_pair(pair or "exact"), 1.0, max_tokens or 32)
    if pair is not None:
        raise MantissaError("--precision: a run has its recipe's; leave it out, or certify its policy/ folder")
    rollout = config.rollout
    return Asked(
        config.precision,
        rollout.emulate,
        rollout.temperature,
        max_tokens or rollout.max_tokens,
        vllm=rollout.engine == "vllm",
    )


@dataclass(frozen=True)
class Sides:
    """Engine and learner of one policy, ``version`` 0 of its weights loaded; ``close`` ends the engine's processes."""

    opened: Opened
    policy: Decoder | TransformersPolicy
    learner: Learner
    engine: RolloutEngine
    precision: ResolvedPrecision
    plan: tuple[str, ...]
    asked: Asked

    @property
    def engine_name(self) -> Literal["native", "transformers", "vllm"]:
        if self.asked.vllm:
            return "vllm"
        return "transformers" if self.opened.by_transformers else "native"

    def close(self) -> None:
        self.engine.close()

    @property
    def projections(self) -> list[str]:
        """Names of linear maps, those of the middle layers first."""
        if isinstance(self.policy, Decoder):
            names = self.policy.projections
        else:
            head = self.policy.model.get_output_embeddings()
            names = [name for name, each in self.policy.model.named_modules() if each is not head and _is_linear(each)]
        middle = len(names) / 2
        return sorted(names, key=lambda name: abs(names.index(name) - middle))


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def open_sides(opened: Opened, asked: Asked, longest: int, device: torch.device) -> Sides:
    """Build both sides. ``longest``: tokens of a sequence. ``MantissaError``: a format or kernels that are not to be
    had, and weights that they cannot hold."""
    if longest > opened.positions:
        raise MantissaError(
            f"sequences of up to {longest} tokens, and the model has {opened.positions} positions; lower --max-tokens, "
            "or shorten the prompts"
        )
    optimizer = OptimizerConfig(lr=1e-6, micro_batch_tokens=_MICRO_BATCH)
    how: dict[str, Any] = {"temperature": asked.temperature, "aggregation_length": 1.0, "seed": 0, "steps": 1}
    if opened.by_transformers:
        if asked.emulation is not None:
            raise MantissaError("an engine's habits are emulated for the families that our decoder knows alone")
        policy, precision = as_policy(asked.precision, opened.model, device, longest)
        scaler = LossScalingConfig().scaler(policy.format)
        learner = Learner(policy, NativeKernels(policy.format), AlgorithmConfig(), optimizer, scaler, **how)
        engine: RolloutEngine = PolicyEngine(policy, precision.rollout, _SLOTS, opened.tokenizer.decode)
        plans = {} if policy.adopted is None else policy.adopted.plans
        plan = tuple(line for heads, each in sorted(plans.items()) for line in _calls(each, f"{heads}: "))
        sides = Sides(opened, policy, learner, engine, precision, plan, asked)
    else:
        sides = _native(opened, asked, longest, device, optimizer, how)
    sides.learner.reuse_scoring = False  # the update makes a forward of its own
    with on_failure(sides.close):
        sides.engine.sync(sides.learner.weights, 0)
    return sides


def _native(
    opened: Opened, asked: Asked, longest: int, device: torch.device, optimizer: OptimizerConfig, how: dict[str, Any]
) -> Sides:
    model: Decoder = opened.model.to(device)
    named = asked.precision.of_layers(model.config.num_hidden_layers)
    precision = on_vllm(resolve(named, device)) if asked.vllm else resolve(named, device)
    if asked.emulation is not None:
        asked.emulation.check(model.config.num_attention_heads, model.config.intermediate_size)
        precision = emulated(precision, asked.emulation)
    if named.fp8 is not None:
        named.fp8.check(model.projections)
    if named.quantized is not None:
        named.quantized.of("mxfp8").check(model.projections)
    plan = exact_plan(precision, model, device, longest, max(_MICRO_BATCH, longest))
    prove(precision, device, plan, asked.vllm)
    rollout = RolloutConfig(max_tokens=asked.max_tokens, slots=_SLOTS, engine="vllm" if asked.vllm else "native")
    engine = build_engine(rollout, precision, rollout_kernels(precision, plan), model.config, opened.tokenizer, device)
    scaler = LossScalingConfig().scaler(precision.learner.active)
    learner = Learner(model, learner_kernels(precision, plan), AlgorithmConfig(), optimizer, scaler, **how)
    return Sides(opened, model, learner, engine, precision, () if plan is None else tuple(_calls(plan)), asked)


def _calls(plan: ExactPlan, before: str = "") -> Iterator[str]:
    for products in (plan.bf16, plan.products):
        for (outputs, inputs), choice in products.items():
            yield f"{before}{inputs}x{outputs}: {choice}"
    yield f"{before}attention: {plan.attention}"


def sample(sides: Sides, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[made_of.Sequence]:
    """Completions of the prompts, again from the first where they are too few, until there are so many tokens; their
    log-probs are the rollout's alone."""
    found: list[made_of.Sequence] = []
    for _ in range(_MOST_ROUNDS):
        left = tokens - sum(len(each.response) for each in found)
        if left <= 0:
            break
        first = len(found)
        count = -(-left // sides.asked.max_tokens)
        asked = [
            (tuple(prompts[index % len(prompts)]), derive_seed(seed, "certify", index))
            for index in range(first, first + count)
        ]
        found += [_drawn(*each, new) for each, new in zip(asked, generated(sides, asked), strict=True)]
    return found


def drawn_again(sides: Sides, sequences: Sequence[made_of.Sequence]) -> list[made_of.Sequence]:
    """What the engine gives for the same prompts and seeds, all in one batch; its log-probs alone."""
    drawn = generated(sides, [(each.prompt, each.seed) for each in sequences])
    return [_drawn(each.prompt, each.seed, new) for each, new in zip(sequences, drawn, strict=True)]


def _drawn(prompt: tuple[int, ...], seed: int, new: Completion) -> made_of.Sequence:
    return made_of.Sequence(
        prompt=prompt, seed=seed, response=new.tokens, rollout=hexed(new.logp_T.tolist()), rescoring=(), update=()
    )


def generated(sides: Sides, asked: Sequence[tuple[tuple[int, ...], int]]) -> list[Completion]:
    """A completion of each prompt, drawn from its seed."""
    stop = tuple(sides.opened.tokenizer.eos_ids)
    params = SamplingParams(sides.asked.max_tokens, sides.asked.temperature, stop_token_ids=stop)
    return [group[0] for group in sides.engine.generate([Request(*each) for each in asked], params, 0)]


def _experience(sides: Sides, sequences: Sequence[made_of.Sequence]) -> Experience:
    completions = [
        Completion(each.response, torch.tensor(unhexed(each.rollout)), "length", 0) for each in sequences
    ]  # without the experts that a mixture passed: either side chooses for itself
    count, device = len(sequences), next(sides.policy.parameters()).device
    prompts = [each.prompt for each in sequences]
    return Experience.of(prompts, completions, range(count), [1.0] * count, device)


def rescored(sides: Sides, sequences: Sequence[made_of.Sequence]) -> list[tuple[str, ...]]:
    """The learner's log-probs of each response, before an update."""
    return _split(sides.learner.score(_experience(sides, sequences))[0], sequences)


class _Seen(Exception):  # noqa: N818
    """Ends an update before it changes a weight, with what its forward gave."""

    def __init__(self, logp_BR: Tensor) -> None:
        super().__init__()
        self.logp_BR = logp_BR


def updated(
    sides: Sides, sequences: Sequence[made_of.Sequence], old: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """The log-probs that the update's own forward gives, with its graph, and after its backward: no weight changes.

    ``old``: the rescoring's. ``RuntimeError``: the update made no forward.
    """

    def verify(_: int, __: Scored, seen_BR: Tensor) -> None:
        raise _Seen(seen_BR)

    learner, experience = sides.learner, _experience(sides, sequences)
    old_BR = torch.zeros_like(experience.rollout_logp_BR)
    for row, texts in zip(old_BR, old, strict=True):
        row[: len(texts)] = torch.tensor(unhexed(texts))
    scored = experience.with_learner(old_BR)
    weighed = scored.with_weights(torch.ones_like(scored.reward_B), scored.mask_BR.float(), scored.mask_BR)
    try:
        learner.learn(weighed, 1, verify)
    except _Seen as seen:
        return _split(seen.logp_BR, sequences)
    finally:
        for parameter in learner.step.parameters.values():
            parameter.grad = None
    raise RuntimeError("the update made no forward")


def _split(logp_BR: Tensor, sequences: Sequence[made_of.Sequence]) -> list[tuple[str, ...]]:
    return [hexed(row[: len(each.response)]) for row, each in zip(logp_BR.cpu().tolist(), sequences, strict=True)]


def complete(sides: Sides, sequences: Sequence[made_of.Sequence]) -> list[made_of.Sequence]:
    """With the other two sides' log-probs."""
    old = rescored(sides, sequences)
    both = zip(sequences, old, updated(sides, sequences, old), strict=True)
    return [each.model_copy(update={"rescoring": first, "update": second}) for each, first, second in both]


def prompts_of(opened: Opened, path: Path | None, tokens: int) -> list[list[int]]:
    """Token ids of prompts: of a file, of the run's own problems, or of the package's, no more than tokens; of a verl
    job those that it kept."""
    if opened.kept is not None:
        if path is not None:
            raise MantissaError(f"--prompts {path}: a verl job is certified by the batch that it kept; leave it out")
        return [list(each.prompt) for each in opened.kept.sequences]
    if path is None and opened.task is not None:
        problems = opened.task.split("train")[:tokens]
        texts: list[Any] = [each.prompt for each in problems]
        asked = [
            text if isinstance(text, str) else [{"role": m.role, "content": m.content} for m in text] for text in texts
        ]
    else:
        chat = bool(opened.tokenizer.backend.chat_template)
        lines = read_prompts(path)[:tokens]
        asked = [[{"role": "user", "content": line}] if chat else line for line in lines]
    return [opened.tokenizer.encode_prompt(prompt) for prompt in asked]
