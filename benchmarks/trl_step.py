"""TRL's side of the RL step: a worker (see workers.py) around ``GRPOTrainer.train``. Runs in TRL's own environment.

    .venv-trl/bin/python benchmarks/trl_step.py FOLDER --threads 2 [--fp16]

The time of a step is that between the trainer's own ``on_step_begin`` and ``on_step_end``: sampling with
``generate``, reward, loss, backward, clip, AdamW. Before each step the callback waits for its turn. What is set away
from TRL's defaults, in TRL's favour or to make the work equal: gradient checkpointing off, bf16 off, no tracker, no
saving, the end token suppressed (``min_new_tokens``), all 512 samples in one forward, one optimiser step a batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from rl_problem import LEARNING_RATE, NEW_TOKENS, PROMPTS, SAMPLES, reward
from workers import say


class Turns(transformers.TrainerCallback):
    """Waits for a line before each step, and reports the step's time after it."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            say(self._about)
        if not sys.stdin.readline():
            control.should_training_stop = True
            raise SystemExit(0)
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        say({"seconds": time.perf_counter() - self._started, **self._about["seen"]})


def settings(output: str, fp16: bool) -> trl.GRPOConfig:
    return trl.GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        fp16=fp16,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        temperature=1.0,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=1_000_000,
        save_strategy="no",
        logging_steps=1_000_000,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fp16", action="store_true", help="set the trainer's fp16 flag, to see what it does")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.folder / "model", padding_side="left")
    prompts = json.loads((arguments.folder / "prompts.json").read_text())
    seen: dict[str, str] = {}  # the formats that products really came out in
    model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, inputs, output: seen.update({"active": str(output.dtype).removeprefix("torch.")})
    )

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert all(len(ids) == NEW_TOKENS for ids in completion_ids), "a completion ended early"
        return [reward(text) for text in completions]

    about = {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seen": seen,
    }
    with tempfile.TemporaryDirectory(prefix="trl_step-") as output:
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=settings(output, arguments.fp16),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[Turns(about)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
