"""Run by test_trl.py in TRL's own environment: its GRPO trainer for one step, with its batches recorded."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from mantissa.dropin.trl import adopt, gate, record_logps

torch.manual_seed(0)
words = {f"w{n}": n for n in range(30)} | {"<pad>": 30, "<eos>": 31}
backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
kind = sys.argv[2] if len(sys.argv) > 2 else ""
wide = {"hidden_size": 128, "num_hidden_layers": 3} if kind == "bf16" else {"hidden_size": 16, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, intermediate_size=32, num_attention_heads=2,
                                     max_position_embeddings=64, **wide))  # fmt: skip
if kind == "bf16":  # as a checkpoint in bf16 is loaded; with logits of some size
    model.bfloat16().lm_head.weight.data *= 20.0


if kind.startswith("adopted "):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import families

    model = families.make(kind.split()[1], vocab_size=32, pad_token_id=30, bos_token_id=29, eos_token_id=31)

if kind == "folder":
    model.save_pretrained(sys.argv[1] + "/model")
    tokenizer.save_pretrained(sys.argv[1] + "/model")
    sys.exit()


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


steps = {"stop": 6, "resume": 2, "bf16": 2, "unwatched": 2, "watched": 2}.get(
    kind, 2 if kind.startswith("adopted ") else 1
)
config = GRPOConfig(output_dir=sys.argv[1] + "/trl", per_device_train_batch_size=8, num_generations=4,
                    max_steps=steps, max_completion_length=5, learning_rate=1e-3,
                    temperature=0.8, report_to=[], use_cpu=True, save_strategy="steps" if kind == "resume" else "no",
                    save_steps=1, generation_kwargs={"temperature": 0.4} if kind == "hot" else None,
                    logging_strategy="no", disable_tqdm=True, bf16=kind == "bf16")  # fmt: skip
trainer = GRPOTrainer(model, lambda completions, **_: [float(len(each) % 3) for each in completions], config,
                      Dataset.from_dict({"prompt": [f"w{n} w{n + 1} w3" for n in range(8)]}),
                      processing_class=tokenizer, rollout_func=None if kind else rollout)  # fmt: skip
if kind.startswith("adopted "):
    print(adopt(trainer, kind.split()[2], length=64))
if kind == "unwatched":
    trainer.train()
else:
    record_logps(trainer, Path(sys.argv[1]) / "logps")
    watching = gate(trainer, every=5, on_fault="stop", sequences=8)
    looked: list[int] = []
    check = watching.check
    watching.check = lambda step, *args, **named: looked.append(step) or check(step, *args, **named)
    if kind == "stop":  # a learner whose log-probs are three times what they should be
        scored = trainer._get_per_token_logps_and_entropies

        def hot(*args, **named):
            logps, *more = scored(*args, **named)
            return (logps * 3.0, *more)

        trainer._get_per_token_logps_and_entropies = hot
    if kind == "broken":  # a recorder that cannot score: the training goes on
        trainer._get_per_token_logps_and_entropies = None
        trainer.compute_loss = lambda model, inputs, **_: next(model.parameters()).sum() * 0.0
    if kind == "resume":  # eight sequences are too few for a measure of their own
        watching.load_state_dict({"healthy": [{"size_of_u": 0.0125, "temperature": 0.8}]})
    trainer.train()
    if kind == "resume":
        looked.clear()
        kept = watching.state_dict()
        watching._own.clear()  # as in another process
        trainer.args.max_steps = 3
        trainer.train(resume_from_checkpoint=True)
        print("its measure", len(kept["healthy"]), watching.state_dict() == kept)
    print("looked", looked, "stop", watching.stop, watching.last and watching.last.headline)
print(
    "steps",
    trainer.state.global_step,
    "weights",
    sum(each.detach().double().abs().sum().item() for each in model.parameters()),
)
