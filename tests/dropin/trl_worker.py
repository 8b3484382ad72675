"""Run by test_trl.py in TRL's own environment: its GRPO trainer for one step, with its batches recorded."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from mantissa.dropin.trl import gate, record_logps

torch.manual_seed(0)
words = {f"w{n}": n for n in range(30)} | {"<pad>": 30, "<eos>": 31}
backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, max_position_embeddings=64))  # fmt: skip


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[list[float]]]:
    """A sampler with a head in bf16: what it samples, and its log-probs."""
    answers: dict[str, list[list[float]]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        out: list[int] = []
        logps: list[float] = []
        for _ in range(5):
            with torch.no_grad():
                z = trainer.model(torch.tensor([ids + out])).logits[0, -1].bfloat16().float()
            logp = torch.log_softmax(z / trainer.args.temperature, -1)
            out.append(int(torch.multinomial(logp.exp(), 1)))
            logps.append(float(logp[out[-1]]))
        for name, value in (("prompt_ids", ids), ("completion_ids", out), ("logprobs", logps)):
            answers[name].append(value)
    return answers


kind = sys.argv[2] if len(sys.argv) > 2 else ""
given = None if kind else rollout
config = GRPOConfig(output_dir=sys.argv[1] + "/trl", per_device_train_batch_size=8, num_generations=4,
                    max_steps=6 if kind == "stop" else 1, max_completion_length=5,
                    temperature=0.8, report_to=[], use_cpu=True, save_strategy="no",
                    logging_strategy="no", disable_tqdm=True, bf16=False)  # fmt: skip
trainer = GRPOTrainer(model, lambda completions, **_: [float(len(each)) for each in completions], config,
                      Dataset.from_dict({"prompt": [f"w{n} w{n + 1} w3" for n in range(8)]}),
                      processing_class=tokenizer, rollout_func=given)  # fmt: skip
record_logps(trainer, Path(sys.argv[1]) / "logps")
watching = gate(trainer, every=1, on_fault="stop", sequences=16)
if kind == "stop":  # a learner whose log-probs are three times what they should be
    scored = trainer._get_per_token_logps_and_entropies

    def hot(*args, **named):
        logps, *more = scored(*args, **named)
        return (logps * 3.0, *more)

    trainer._get_per_token_logps_and_entropies = hot
trainer.train()
print("steps", trainer.state.global_step, "stop", watching.stop, watching.last and watching.last.headline)
