"""What a generation multiplies by is laid out for its product once, not at each token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mantissa
from mantissa.kernels import compiled, exact_probe

pytestmark = pytest.mark.skipif(not compiled.kinds(), reason=f"nothing is compiled here: {compiled.why_not()}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_weight_is_laid_out_once_a_generation(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setattr(exact_probe, "_compiled_parts", lambda table: compiled.parts())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    mantissa.adopt(model, precision=precision)  # type: ignore[arg-type]
    laid, lay = list[tuple[int, ...]](), compiled.lay

    def counted(weight: torch.Tensor, kind: Any) -> Any:
        laid.append(tuple(weight.shape))
        return lay(weight, kind)

    monkeypatch.setattr(compiled, "lay", counted)
    with torch.no_grad():
        model.generate(torch.randint(1, 128, (2, 5)), max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    assert len(laid) == 2 * 7 + 1
