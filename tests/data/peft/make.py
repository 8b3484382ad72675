"""Made ``base``, ``adapter`` and ``logits.safetensors`` here with the real peft; run it where peft is installed."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    base = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    base.save_pretrained(HERE / "base")
    lora = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "o_proj", "down_proj"], use_rslora=True)
    model = get_peft_model(base, lora).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(HERE / "adapter")
    (HERE / "adapter" / "README.md").unlink(missing_ok=True)
    tokens_BT = torch.randint(0, 20, (2, 12))
    with torch.no_grad():
        save_file({"tokens": tokens_BT, "logits": model.double()(tokens_BT).logits}, HERE / "logits.safetensors")


if __name__ == "__main__":
    main()
