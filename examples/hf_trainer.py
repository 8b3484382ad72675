"""Hugging Face's Trainer in Mantissa's precision, with its telemetry in the log.

python examples/hf_trainer.py        # needs: pip install 'mantissa-rl[accelerate]'
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from mantissa.dropin import MantissaTrainerMixin


class PrecisionHFTrainer(MantissaTrainerMixin, Trainer):
    pass


def counting(count: int, length: int = 24, digits: int = 8) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards from any digit, modulo ``digits``."""
    rows = [torch.arange(start, start + length) % digits for start in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            learning_rate=0.01,
            num_train_epochs=2,
            logging_steps=20,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = PrecisionHFTrainer(model=model, args=arguments, train_dataset=counting(640), precision="fp16")
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {float(entry['loss']):.3f}, scale {entry['precision/loss_scale']:g}")


if __name__ == "__main__":
    main()
