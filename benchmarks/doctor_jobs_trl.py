"""Real ``trl.GRPOTrainer`` jobs of a tiny policy, some of them with a fault: a worker of doctor_jobs.py.

    .venv-trl/bin/python benchmarks/doctor_jobs_trl.py FOLDER [--jobs healthy-1 constant-reward] [--steps 40]

Each job leaves FOLDER/JOB/trainer_state.json, as TRL's own state writes it after every logged step. The policy is a
Qwen2 of two layers that first learned to add two digits from labels, until about half of its samples are right.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import datasets
import tokenizers
import torch
import transformers
import trl

CHARACTERS = "0123456789+="
FROM = 20  # the step at which a fault begins that does not hold from the start


class Job(NamedTuple):
    """``settings``: of GRPOConfig, beside ``common``. ``at``: what breaks in the trainer at step ``FROM``."""

    settings: Mapping[str, Any] = MappingProxyType({})
    at: Callable[[trl.GRPOTrainer], None] | None = None
    dtype: torch.dtype = torch.float32
    trained: bool = True


def corrupt_layer(trainer: trl.GRPOTrainer) -> None:
    """A layer's product gets noise of its own size."""
    weight = trainer.model.model.layers[1].mlp.down_proj.weight
    weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.data.std() * 3


def break_reward(trainer: trl.GRPOTrainer) -> None:
    trainer.reward_funcs[0] = failing


def raise_rate(trainer: trl.GRPOTrainer) -> None:
    for each in trainer.optimizer.param_groups:
        each["lr"] *= 1000
    trainer.lr_scheduler.base_lrs = [1000 * each for each in trainer.lr_scheduler.base_lrs]


JOBS: dict[str, Job] = {
    **{f"healthy-{seed}": Job({"seed": seed}) for seed in (1, 2, 3)}, "healthy-bf16": Job({"seed": 4, "bf16": True}),
    "healthy-kl": Job({"seed": 5, "beta": 0.04}),
    "healthy-two-updates": Job({"seed": 6, "num_iterations": 2, "loss_type": "dr_grpo"}),
    "healthy-cooler": Job({"seed": 7, "temperature": 0.8, "num_generations": 4}),
    "healthy-random-policy": Job({"seed": 8, "max_completion_length": 6}, trained=False),
    "constant-reward": Job({"seed": 9}, break_reward), "no-temperature": Job({"seed": 10, "temperature": 1e-4}),
    "rate-times-1000": Job({"seed": 11}, raise_rate), "corrupted-layer": Job({"seed": 12}, corrupt_layer),
    "fp16-weights": Job({"seed": 13}, dtype=torch.float16),
    "clip-range-tiny": Job({"seed": 14, "epsilon": 1e-5, "num_iterations": 4}),
    "all-truncated": Job({"seed": 15, "max_completion_length": 1}),
    "kl-explodes": Job({"seed": 16, "beta": 0.04, "learning_rate": 3e-2}),
}  # fmt: skip


def tokenizer() -> Any:
    names = ["<pad>", "<end>", *CHARACTERS]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: at for at, name in enumerate(names)}, "<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def problem(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randrange(10), draw.randrange(10)
    return f"{a}+{b}=", str(a + b)


def random_policy() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=14, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config)


def train_on_labels(policy: Any, words: Any) -> None:
    """Until the labels' mean log-prob a token is about -0.35: about half of the samples are right."""
    draw, optimizer = random.Random(0), torch.optim.AdamW(policy.parameters(), 2e-3)
    for _ in range(2000):
        pairs = [problem(draw) for _ in range(64)]
        rows = [words(p)["input_ids"] + words(a)["input_ids"] + [1] for p, a in pairs]
        ids = torch.tensor([row + [0] * (8 - len(row)) for row in rows])
        labels = torch.where((torch.arange(8) < 4) | (ids == 0), -100, ids)
        loss = policy(ids, attention_mask=(ids > 0).long(), labels=labels).loss
        if loss < 0.35:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise SystemExit(f"expected labels to be learned to a loss of 0.35 in 2000 steps; it is {loss:.2f}")


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text == want) for text, want in zip(completions, answer, strict=True)]


def failing(completions: list[str], **_: Any) -> list[float]:
    """As a grader whose every call fails and is caught."""
    return [0.0] * len(completions)


class Watch(transformers.TrainerCallback):
    """Writes the state after each log, so that a job that dies leaves one; breaks what the job says at its step."""

    def __init__(self, folder: Path, at: Callable[[trl.GRPOTrainer], None] | None) -> None:
        self.folder, self.at = folder, at
        self.trainer: trl.GRPOTrainer | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.at is not None and state.global_step == FROM - 1:
            self.at(self.trainer)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.save_to_json(str(self.folder / "trainer_state.json"))


def run(name: str, policy: Path, words: Any, folder: Path, steps: int, more: int) -> str:
    """How the job of the policy in a folder ended."""
    job, draw = JOBS[name], random.Random(f"{name}{more or ''}")
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [problem(draw) for _ in range(512)]
    common: dict[str, Any] = {
        "output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 4, "learning_rate": 5e-4,
        "lr_scheduler_type": "constant", "max_steps": steps, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    watch = Watch(folder, job.at)
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=job.dtype)
    config = trl.GRPOConfig(**common | dict(job.settings) | {"seed": job.settings["seed"] + more})
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=[right], args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": [p for p, _ in pairs], "answer": [a for _, a in pairs]}),
        processing_class=words, callbacks=[watch],
    )  # fmt: skip
    watch.trainer = trainer
    try:
        trainer.train()
    except (RuntimeError, ValueError) as error:  # what a fault may end a job with; its log is what is asked about
        return f"{type(error).__name__}: {str(error)[:120]}"
    return "finished"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--more", type=int, default=0, help="added to every seed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    words, trained = tokenizer(), random_policy()
    train_on_labels(trained, words)
    trained.save_pretrained(given.folder / "trained")
    random_policy().save_pretrained(given.folder / "random")
    ends = given.folder / "ends.json"
    for name in given.jobs:
        policy = given.folder / ("trained" if JOBS[name].trained else "random")
        end = run(name, policy, words, given.folder / name, given.steps, given.more)
        before = json.loads(ends.read_text()) if ends.exists() else {}
        about = {"end": end, "trl": trl.__version__, "transformers": transformers.__version__}
        ends.write_text(json.dumps(before | {name: about}, indent=1))
        print(name, end, flush=True)


if __name__ == "__main__":
    main()
