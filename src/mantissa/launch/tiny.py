"""A policy and problems small enough for a rehearsal: random weights that are right now and then.

A random policy that never earns anything has no gradient, and dynamic sampling would wait for it for ever. So a tenth
of the vocabulary are whole answers, in every form that a verifier reads, and problems are sums of one digit: a response
of sixteen tokens is right in one of some twelve times.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
_CHARACTERS = string.digits + string.ascii_letters + " +-*/=.?!:\n"
ANSWERS = tuple(f"\nAnswer: \\boxed{{{digit}}}\n" for digit in range(10))


def write_policy(folder: Path, *, answers: Sequence[str] = ANSWERS, head_dim: int = 16) -> None:
    """A Hugging Face folder: a Qwen3 of two layers and 64 features, and a tokenizer of characters and answers."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *_CHARACTERS, *answers))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    wrapped.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    wrapped.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        # transformers makes the pad token's row zero, and a random policy samples it as any other.
        model.model.embed_tokens.weight.data[0].normal_(0, 0.02)
    model.save_pretrained(folder)


def write_problems(train: Path, heldout: Path) -> None:
    """The 55 sums of one digit in DAPO's columns, some of them held out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sums = [(a, b) for a in range(10) for b in range(10 - a)]
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"{a}+{b}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, (a, b) in enumerate(sums)
    ]
    pq.write_table(pa.Table.from_pylist(rows[7:]), train)
    pq.write_table(pa.Table.from_pylist(rows[:7]), heldout)
