"""Models of transformers under Triton's kernels: on a GPU, or interpreted on a CPU with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys

import pytest
import torch
from families import FAMILIES, VOCABULARY, make

import mantissa
import mantissa.adopted.adopt  # the module
from mantissa.base.errors import MantissaError
from triton_interpreter import DEVICE, INTERPRETED, needs_a_device

pytestmark = needs_a_device
FEW = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "lfm2", "gpt2", "cohere", "bamba"]


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: transformers' own code mixes dtypes."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["mantissa.adopted.adopt"], "_on_gpu", lambda device: True)


def batch(length: int):
    tokens = torch.randint(3, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    return tokens, mask


def logits(model, tokens, mask):
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", FEW if INTERPRETED else FAMILIES)
def test_each_family_is_exact_and_near_its_own(name: str, precision: str) -> None:
    length = 14 if INTERPRETED else 150
    model, (tokens, mask) = make(name).to(DEVICE), batch(length)
    with torch.no_grad():
        before = logits(model, tokens, mask)
    adopted = mantissa.adopt(model, precision, length=length)  # which compares its batches, paddings, orders, decoding
    assert "logits equal" in adopted.lines[-1]
    assert "Triton's" in str(adopted)
    real, near = mask.bool(), {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.5}[precision]
    routed = logits(model, tokens, mask)
    assert float((routed.detach() - before)[real].abs().mean()) < near * float(before[real].abs().mean())
    torch.log_softmax(routed[real], -1)[:, 5].sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert sum(p.grad is not None for p in model.parameters()) > 10


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "olmo"])
def test_gradients_are_near_to_float64_s(name: str) -> None:
    (tokens, mask), found = batch(14), []
    for kind in ("float64", "adopted"):
        model = make(name).to(DEVICE)
        if kind == "float64":
            model = model.double()
        else:
            mantissa.adopt(model, "fp32", length=14)
        out = model(input_ids=tokens, attention_mask=torch.ones_like(mask), use_cache=False).logits
        torch.log_softmax(out, -1)[..., 5].sum().backward()
        found.append([p.grad.double() for p in model.parameters() if p.grad is not None])
    for exact, own in zip(*found, strict=True):
        assert float((exact - own).norm()) < 1e-4 * float(exact.norm()) + 1e-6


@pytest.mark.skipif(INTERPRETED, reason="a model of some size")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_what_generate_samples_has_the_learner_s_log_probs(name: str, precision: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12,
             "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048}  # fmt: skip
    if name != "llama":
        sizes["layer_types"] = ["sliding_attention", "full_attention"] * 3
    model = make(name, dtype, **sizes).to(DEVICE)
    mantissa.adopt(model)
    tokens, mask = batch(400)
    out = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=200, min_new_tokens=200, do_sample=True,
        output_logits=True, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    sampled = torch.stack(out.logits, 1)
    every = torch.cat((mask, torch.ones(3, 200, dtype=torch.long, device=DEVICE)), 1)
    with torch.no_grad():
        assert torch.equal(sampled, logits(model, out.sequences, every)[:, 399:-1])


def test_scaled_formats_are_refused() -> None:
    with pytest.raises(MantissaError, match="is for a CPU so far"):
        mantissa.adopt(make("llama").to(DEVICE), "fp8", length=14)
