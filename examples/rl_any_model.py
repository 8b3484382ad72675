"""``rl_loop.py`` with any causal language model of transformers: its own code samples and learns, by exact kernels.

    python examples/rl_any_model.py FOLDER [STEPS] [fp32|bf16|fp16]

One model is both policies: it samples from its cache, and learns in whole forwards. Adopted, both have the same
log-probs to the last bit, so every importance ratio is 1 and there is no gap to correct. Masters stay fp32. A model
that cannot be adopted is refused (docs/exactness.md says which can).
"""

import sys
from functools import partial
from pathlib import Path

import torch
from rl_loop import MAX_TOKENS, MICRO_BATCH_TOKENS, SEED, TASK, collect, weigh
from torch import Tensor

# fmt: off
from mantissa import (
    Grader, OptimizerStep, PPOClipConfig, SamplingParams, ScalerConfig, TransformersEngine, adamw, adopt,
    aggregation_scale, be_deterministic, build_task, forward_transformers, gap_metrics, learning_rate,
    load_transformers, scaler_for, scatter, score,
)
from mantissa.model import load_tokenizer

# fmt: on


def main(folder: Path, steps: int, precision: str) -> torch.nn.Module:
    """Train for ``steps``; returns the model, with the classes and settings that it came with."""
    be_deterministic(torch.device("cpu"))
    task = build_task(TASK, SEED)
    model = load_transformers(folder)
    tokenizer = load_tokenizer(folder, model.config.get_text_config().vocab_size)
    with adopt(model, precision, length=256) as adopted, Grader(task.verifier) as grader:
        print(adopted)
        engine = TransformersEngine(model, adopted)
        sampling = SamplingParams(MAX_TOKENS, stop_token_ids=tuple(tokenizer.eos_ids))
        step = OptimizerStep(
            dict(model.named_parameters()), adamw(model), scaler_for(ScalerConfig(), adopted.format), adopted.format,
            learning_rate(2e-3, warmup=5), max_grad_norm=1.0,
        )  # fmt: skip
        each = lambda part, rows: forward_transformers(model, part, 1.0, entropies=True)  # noqa: E731
        for number in range(1, steps + 1):
            engine.version = step.updates
            batch, accuracy = collect(task.split("train"), tokenizer, engine, sampling, grader, number)
            with torch.no_grad():
                batch = batch.with_learner(*score(each, batch, MICRO_BATCH_TOKENS, entropies=True))
            gap = gap_metrics(batch.rollout_logp_BR, batch.old_logp_BR, batch.mask_BR)["gap/abs_logp_diff_mean"]
            batch = weigh(batch)
            rows = batch.rows[(batch.advantage_B != 0) & batch.valid_BR.any(1)]
            outcome = step.run(partial(backward, model, batch, rows)) if len(rows) else "nothing to learn"
            print(f"step {number}: accuracy {accuracy:.3f}, gap |dlogp| {float(gap):.1e}, {outcome}")
    return model


def backward(model: torch.nn.Module, batch, rows: Tensor, loss_scale: float) -> Tensor:
    """``rl_loop.py``'s, by the model's own forward."""
    scale_BR, total = aggregation_scale(batch.valid_BR, "token_mean"), torch.zeros(())
    for part in batch.micro_batches(rows, MICRO_BATCH_TOKENS):
        inside = batch.select(part)
        logp_BR = scatter(forward_transformers(model, inside, 1.0).logp_N, inside.mask_BR)
        loss, _ = PPOClipConfig().loss(
            logp_BR, inside.old_logp_BR, inside.advantage_BR, inside.valid_BR, inside.weight_BR,
            scale_BR[part, : logp_BR.shape[1]],
        )  # fmt: skip
        (loss * loss_scale).backward()
        total += loss.detach()
    return total


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0]), int(given[1]) if given[1:] else 90, given[2] if given[2:] else "fp32")
