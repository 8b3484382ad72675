"""The shared forward: a prompt's mean hidden state against a loop over single prompts, value and gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from mantissa.kernels import Kernels, NativeKernels, SimulatedKernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import BF16, FP16, FP32
from mantissa.rl import score as module
from mantissa.rl.experience import Sequences
from mantissa.rl.score import forward, scatter

CONFIG = ModelConfig("qwen3", 13, 32, 48, 2, 4, 2, 8, qk_norm=True, initializer_range=0.3)
PROMPTS = [[1, 2, 3], [4], [1, 2, 3], [5, 6, 7, 8, 9, 10, 11], [1, 2], [1, 2, 3]]  # shared, nested, of many lengths
RESPONSES = [[3, 4], [5, 6, 7], [8], [9, 1], [2, 2, 2], [3, 4]]


@pytest.fixture
def model() -> Decoder:
    return Decoder(CONFIG).initialize(torch.Generator().manual_seed(3))


def sequences() -> Sequences:
    return Sequences.build(PROMPTS, RESPONSES, torch.device("cpu"))


def means_of(model: Decoder, kernels: Kernels, batch: Sequences) -> Tensor:
    means = forward(model, kernels, batch, 1.0, prompts=True).prompt_BE
    assert means is not None
    return means


def one_by_one(model: Decoder, kernels: Kernels) -> Tensor:
    """Each prompt alone, its states averaged in float64."""
    return torch.stack([model(torch.tensor([prompt]), kernels)[0].double().mean(0) for prompt in PROMPTS])


def gradients(model: Decoder, means_BE: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, means_BE.numel(), dtype=means_BE.dtype).view(means_BE.shape)
    (means_BE * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_means_and_their_gradients_are_those_of_single_prompts(model: Decoder) -> None:
    kernels = NativeKernels(FP32)
    got, want = means_of(model, kernels, sequences()), one_by_one(model, kernels)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    got_grads, want_grads = gradients(model, got), gradients(model, want)
    assert got_grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        error = (got_grads[name] - grad).norm() / grad.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "kernels", [SimulatedKernels(FP16), SimulatedKernels(BF16), NativeKernels(BF16)], ids=["fp16", "bf16", "native"]
)
def test_in_half_the_states_are_of_the_format_and_their_mean_is_fp32(model: Decoder, kernels: Kernels) -> None:
    got, want = means_of(model, kernels, sequences()), one_by_one(model, kernels)
    assert got.dtype == torch.float32
    assert bool(((got[3].to(kernels.format.dtype).float()) != got[3]).any())  # a mean of seven is off the format's grid
    # the same states up to the roundings that another batch flips
    torch.testing.assert_close(got.double(), want, rtol=0, atol=8 * kernels.format.epsilon)
    assert all(bool(grad.isfinite().all()) for grad in gradients(model, got).values())


def test_any_selection_of_rows_has_the_same_means(model: Decoder) -> None:
    kernels, whole = NativeKernels(FP32), sequences()
    everything = means_of(model, kernels, whole)
    for rows in ([0], [3, 1], [5, 4, 2]):
        part = means_of(model, kernels, whole.select(torch.tensor(rows)))
        torch.testing.assert_close(part, everything[rows], rtol=0, atol=2e-6)


def test_asking_for_prompts_changes_no_log_prob_and_costs_no_forward(model: Decoder) -> None:
    calls: list[int] = []
    hidden = Decoder.hidden
    model.hidden = lambda *a, **k: (calls.append(1), hidden(model, *a, **k))[1]  # type: ignore[method-assign]
    plain = forward(model, NativeKernels(FP32), sequences(), 0.7)
    more = forward(model, NativeKernels(FP32), sequences(), 0.7, prompts=True)
    assert plain.prompt_BE is None
    assert torch.equal(plain.logp_N, more.logp_N)
    assert len(calls) == 2


def test_scatter_puts_each_response_token_where_the_mask_says() -> None:
    mask_BR = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    values_N = torch.arange(1.0, 7.0, requires_grad=True)
    got = scatter(values_N, mask_BR)
    assert got.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    got[0, 1].backward()
    assert values_N.grad is not None
    assert values_N.grad.tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "kernels", [NativeKernels(FP32), SimulatedKernels(FP16), SimulatedKernels(BF16)], ids=["fp32", "fp16", "bf16"]
)
def test_logits_in_parts_are_the_whole_ones(model: Decoder, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs, entropies and gradients against float64, and no more logits at a time than the bound allows."""
    hidden, weight, token = torch.randn(29, 32), torch.randn(300, 32), torch.randint(0, 300, (29,))
    pull, seen, logits = torch.randn(29), [], kernels.logits

    def watched(x: Tensor, w: Tensor) -> Tensor:
        seen.append(len(x))
        return logits(x, w)

    def of(compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]], *leaves: Tensor) -> list[Tensor]:
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        logp, entropies = compute(*given)
        assert entropies is not None
        assert not entropies.requires_grad
        (logp * pull.to(logp.dtype)).sum().backward()
        return [logp.detach(), entropies, *(leaf.grad for leaf in given if leaf.grad is not None)]

    def oracle(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(x @ w.t() / 0.7, -1)
        return logp[torch.arange(29), token], -(logp.exp() * logp).sum(-1).detach()

    monkeypatch.setattr(kernels, "logits", watched)
    monkeypatch.setattr(module, "_ENTROPY_AT_ONCE", 700)
    looked: list[tuple[int, int]] = []

    def look(start: int, part: Tensor) -> None:
        looked.append((start, len(part)))

    head = partial(module._head, kernels=kernels, token_N=token, temperature=0.7, entropies=True, look=look)
    values = [kernels.weight(leaf) for leaf in (hidden, weight)]
    expected = of(oracle, *(leaf.double() for leaf in values))
    for bound, rows in ((29 * 300, 29), (7 * 300, 6)):
        monkeypatch.setattr(module, "_LOGITS_AT_ONCE", bound)
        seen.clear()
        looked.clear()
        got = of(lambda x, w: head(w, hidden_NE=x), *values)
        assert max(seen) == rows
        assert [at for start, count in looked for at in range(start, start + count)] == list(range(29))  # each once
        for one, other in zip(got, expected, strict=True):
            bound_ = 1e-6 if kernels.format is FP32 else 2 * kernels.format.epsilon
            assert (one.double() - other).norm() <= bound_ * other.norm()
