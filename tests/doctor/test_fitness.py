"""``mantissa fitness``: what fp16 has room for, against hooks, against fp16 itself, and with faults put in."""

from __future__ import annotations

import copy
from typing import Any

import families
import numpy as np
import pytest
import torch
from torch import Tensor

import injected as made
from mantissa.base.errors import MantissaError
from mantissa.doctor.dump import Scored
from mantissa.doctor.fitness import MARGIN, Range, fitness
from mantissa.precision import FP16


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: transformers' own code mixes dtypes."""


def of_family(name: str) -> Any:
    return families.make(name, vocab_size=64, eos_token_id=2)


@pytest.mark.parametrize("family", ["llama", "olmo2", "gpt2", "gemma3_text", "qwen3_moe"])
def test_what_it_sees_is_what_hooks_see(family: str) -> None:
    """The largest value that each product makes, and of its gradient; and the model is left as it was."""
    model, texts = of_family(family), made.texts(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = fitness(model, texts)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())

    half = copy.deepcopy(model).to(torch.bfloat16).requires_grad_(True)
    made_by: dict[str, float] = {}
    returned: dict[str, float] = {}

    def note(of: dict[str, float], name: str, value: Tensor) -> None:
        of[name] = max(of.get(name, 0.0), float(value.detach().abs().max()))

    def hook(name: str) -> Any:
        def seen(module: Any, args: Any, out: Tensor) -> None:
            note(made_by, name, out)
            out.register_hook(lambda gradient: note(returned, name, gradient))

        return seen

    kinds = [(name, each) for name, each in half.named_modules() if type(each).__name__ in ("Linear", "Conv1D")]
    for name, module in kinds:
        module.register_forward_hook(hook(name))
    tokens = sum(len(each.tokens) - each.prompt_length for each in texts)
    for number, each in enumerate(texts, start=1):
        token_T, at = torch.as_tensor(each.tokens), each.prompt_length
        logits_TV = half(input_ids=token_T[None], attention_mask=torch.ones_like(token_T)[None], use_cache=False).logits
        logp = logits_TV[0, at - 1 : -1].float().log_softmax(-1).gather(-1, token_T[at:, None])
        ((-1) ** (number + 1) * logp.sum() / tokens).backward()
    assert len(made_by) > 4
    for name, largest in made_by.items():
        place = found.places[name]
        assert place.activations.largest == largest, name
        # torch may hand a module's hook the gradient of a view of what its product made: the same numbers
        assert place.gradients.largest == pytest.approx(returned[name], rel=2**-7), name
    assert found.fits
    assert found.largest_gradient(found.scale) <= FP16.largest / 2**MARGIN
    assert found.scale == 24 or found.largest_gradient(found.scale + 1) > FP16.largest / 2**MARGIN
    assert found.lost(0) >= found.lost(found.scale)


def test_lost_is_what_fp16_rounds_to_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    x = (2.0 ** torch.empty(5000).uniform_(-45, 2, generator=generator)).bfloat16()
    x[:100] = 0
    seen = Range()
    seen.see(x, "drawn")
    for exponent in (-7, 0, 1, 9, 15):
        scaled = x.float() * 2.0**exponent
        gone = (scaled.half() == 0) & (x != 0) & (scaled != 2**-25)  # half of the smallest, to even: counted as kept
        assert seen.scaled(exponent).lost == pytest.approx(float(gone.sum()) / float((x != 0).sum()))
        assert seen.scaled(exponent).largest == float(scaled.max())
    assert seen.headroom == pytest.approx(np.log2(65504 / float(x.max())))
    seen.see(torch.tensor([1.0, float("inf")]), "divided")
    assert (seen.infinite, seen.headroom) == (1, -np.inf)
    masked = Range()
    masked.see(torch.tensor([3.0, torch.finfo(torch.bfloat16).min, -float("inf")]), "add")
    assert (masked.largest, masked.infinite) == (3.0, 0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_layer_that_fp16_cannot_hold_is_named(family: str) -> None:
    model = of_family(family)
    name = "model.layers.1.mlp.down_proj" if family == "llama" else "transformer.h.1.mlp.c_proj"
    weight = model.get_submodule(name).weight
    weight.data *= 1e7 / float(weight.detach().abs().max())
    found = fitness(model, made.texts(4))
    assert not found.fits
    assert name in found.beyond(0.0)
    assert not any(".0." in each for each in found.beyond(0.0))  # what lies before it is as it was
    assert found.tried  # and fp16 itself says so
    assert found.weights.headroom < 0
    assert found.weights.what == f"{name}.weight"


def test_eager_attention_masks_are_no_activations() -> None:
    model = of_family("llama")
    model.set_attn_implementation("eager")
    found = fitness(model, made.texts(4))
    assert found.fits
    assert max(place.activations.largest for place in found.places.values()) < 100


def test_a_steps_tokens_move_the_gradients_of_activations_and_not_of_parameters() -> None:
    model, texts = of_family("llama"), made.texts(4)
    one = fitness(model, texts)
    other = fitness(model, texts, step_tokens=one.tokens * 1024)
    assert (one.moved, other.moved) == (0, -10)
    name = "model.layers.0.mlp.up_proj"
    for exponent in (0, 5):
        place = other.places[name]
        expected = max(one.places[name].gradients.largest / 1024, one.places[name].parameters.largest)
        assert place.at(exponent, other.moved).largest == expected * 2**exponent
    assert other.scale >= one.scale
    assert other.lost(0) > one.lost(0)


def test_nothing_to_score_is_refused() -> None:
    nothing = Scored(np.arange(5), 5, np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool))
    with pytest.raises(MantissaError, match="no response token to take a gradient of"):
        fitness(of_family("llama"), [nothing])
