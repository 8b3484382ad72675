"""TRL's GRPO trainer with the doctor beside it: a gate while it trains, and log-probs to look at afterwards.

python examples/trl_doctor.py MODEL           # transformers' generate samples, TRL's default
python examples/trl_doctor.py MODEL colocate  # vLLM in the trainer's process; on a GPU, as server
python examples/trl_doctor.py MODEL server    # vLLM elsewhere: trl vllm-serve --model MODEL

MODEL: a name on the Hugging Face hub or a folder. Then: mantissa doctor logps --out diagnosis
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from mantissa.dropin.trl import gate, record_logps


def brevity(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def main(model: str, sampler: str = "generate", folder: str = "logps", steps: str = "2") -> None:
    on_vllm = {} if sampler == "generate" else {"use_vllm": True, "vllm_mode": sampler}
    config = GRPOConfig(
        output_dir="out", max_steps=int(steps), per_device_train_batch_size=16, num_generations=4,
        max_completion_length=24, use_cpu=not torch.cuda.is_available(), save_strategy="no", report_to=[], **on_vllm,
    )  # fmt: skip
    prompts = [f"Here is a long story about {n} ducks:" for n in range(64)]
    trainer = GRPOTrainer(model, brevity, config, Dataset.from_dict({"prompt": prompts}))
    record_logps(trainer, folder)
    watching = gate(trainer, every=25, on_fault="stop", sequences=32)
    trainer.train()
    print("the gate said:", watching.last and watching.last.headline)


if __name__ == "__main__":
    main(*sys.argv[1:])
