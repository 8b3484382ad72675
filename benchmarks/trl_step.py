"""TRL's side of the RL step: a worker (see workers.py) around ``GRPOTrainer.train``. Runs in TRL's own environment.

    .venv-trl/bin/python benchmarks/trl_step.py FOLDER --threads 2 [--work pretrained --model MODEL] [--fp16 | --bf16]

The time of a step is that between the trainer's own ``on_step_begin`` and ``on_step_end``: sampling with
``generate``, reward, loss, backward, clip, AdamW. Before each step the callback waits for its turn. What is set away
from TRL's defaults, in TRL's favour or to make the work equal: gradient checkpointing off, bf16 off but with
``--bf16`` (weights in fp32, products under autocast), no tracker, no saving, the end token suppressed
(``min_new_tokens``), all samples in one forward, one optimiser step a batch.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from typing import Any

import datasets
import torch
import transformers
import trl
from rl_problem import WORKS, Work, reward, worker_arguments
from workers import say


class Turns(transformers.TrainerCallback):
    """Waits for a line before each step, and reports the step's time after it."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self._started = self._cpu = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            say(self._about)
        if not sys.stdin.readline():
            control.should_training_stop = True
            raise SystemExit(0)
        self._started, self._cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        took = {"seconds": time.perf_counter() - self._started, "cpu": time.process_time() - self._cpu}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        say(took | {"peak_memory": peak, **self._about["seen"]})


def settings(output: str, work: Work, fp16: bool, bf16: bool) -> trl.GRPOConfig:
    return trl.GRPOConfig(
        output_dir=output, use_cpu=True, bf16=bf16, fp16=fp16, gradient_checkpointing=False,
        per_device_train_batch_size=work.rows, gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=1,
        num_generations=work.samples, max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens}, temperature=1.0, beta=0.0,
        learning_rate=work.learning_rate, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        max_steps=1_000_000, save_strategy="no", logging_steps=1_000_000, report_to="none", disable_tqdm=True, seed=0,
    )  # fmt: skip


def main() -> None:
    parser = worker_arguments(__doc__)
    parser.add_argument("--fp16", action="store_true", help="set the trainer's fp16 flag, to see what it does")
    parser.add_argument("--bf16", action="store_true", help="set the trainer's bf16 flag, as TRL does by itself")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    work, source = WORKS[arguments.work], arguments.model or arguments.folder / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, padding_side="left")
    prompts = json.loads((arguments.folder / "prompts.json").read_text())
    lengths = {len(ids) for ids in tokenizer(prompts)["input_ids"]}
    assert lengths == {work.prompt_tokens}, f"prompts have {lengths} tokens, not {work.prompt_tokens}"
    seen: dict[str, str] = {}  # the formats that products really came out in
    model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, inputs, output: seen.update({"active": str(output.dtype).removeprefix("torch.")})
    )

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert all(len(ids) == work.new_tokens for ids in completion_ids), "a completion ended early"
        return [reward(text) for text in completions]

    about = {
        "trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__,
        "threads": torch.get_num_threads(), "seen": seen,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="trl_step-") as output:
        trainer = trl.GRPOTrainer(
            model=model, reward_funcs=score, args=settings(output, work, arguments.fp16, arguments.bf16),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
            callbacks=[Turns(about)],
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
