"""The packed batch against the padded one: same log-probs, same gradients, and only the distinct positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.kernels import Kernels, NativeKernels, SimulatedKernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import BF16, FP16, FP32
from mantissa.precision.numerics import token_logprob
from mantissa.rl.experience import Sequences
from mantissa.rl.score import Packed

CONFIG = ModelConfig("qwen3", 13, 32, 48, 2, 4, 2, 8, qk_norm=True, initializer_range=0.3)
CPU = torch.device("cpu")
Pair = tuple[list[int], list[int]]
tokens = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def build(pairs: list[Pair]) -> Sequences:
    return Sequences.build([prompt for prompt, _ in pairs], [response for _, response in pairs], CPU)


def group(seed: int, prompts: int = 4, samples: int = 5) -> Sequences:
    """Groups of samples with prompts and responses of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, 13, (length,), generator=generator).tolist()

    drawn = [draw(1, 9) for _ in range(prompts)]
    return build([(prompt, draw(1, 12)) for prompt in drawn for _ in range(samples)])


def logp_and_gradients(
    model: Decoder, kernels: Kernels, sequences: Sequences, packed: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of the response tokens, and the gradients of a weighted sum of them."""
    position_N, token_N = sequences.response_tokens()
    if packed:
        pack = Packed.of(sequences)
        hidden = pack.hidden(model, kernels)[pack.packed_BT.flatten()[position_N]]
    else:
        hidden = model(sequences.tokens_BT, kernels).flatten(0, 1)[position_N]
    logp_N = token_logprob(model.logits(hidden, kernels), token_N)
    model.zero_grad(set_to_none=True)
    (logp_N * torch.linspace(-1, 1, len(logp_N))).sum().backward()
    return logp_N.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def model() -> Decoder:
    return Decoder(CONFIG).initialize(torch.Generator().manual_seed(3))


@pytest.mark.parametrize("seed", range(3))
def test_fp32_log_probs_and_gradients_are_those_of_the_padded_batch(seed: int) -> None:
    decoder, sequences = model(), group(seed)
    want, want_grads = logp_and_gradients(decoder, NativeKernels(FP32), sequences, packed=False)
    got, got_grads = logp_and_gradients(decoder, NativeKernels(FP32), sequences, packed=True)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
def test_simulated_packed_errs_no_more_than_simulated_padded(fmt: object) -> None:
    """Against fp32, the distance of the packed gradient is that of the padded one: no precision is lost in the sums."""
    decoder, sequences = model(), group(7)
    kernels = SimulatedKernels(fmt)  # type: ignore[arg-type]
    exact, exact_grads = logp_and_gradients(decoder, NativeKernels(FP32), sequences, packed=False)
    padded, padded_grads = logp_and_gradients(decoder, kernels, sequences, packed=False)
    got, got_grads = logp_and_gradients(decoder, kernels, sequences, packed=True)
    assert 0 < float((got - exact).abs().mean()) < 1.5 * float((padded - exact).abs().mean())

    def distance(grads: dict[str, torch.Tensor]) -> float:
        return sum(float((grads[n] - g).double().square().sum()) for n, g in exact_grads.items()) ** 0.5

    assert 0 < distance(got_grads) < 1.5 * distance(padded_grads)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([[1], [1, 2], [1, 2, 3], [2, 1]]), tokens), min_size=1, max_size=8))
def test_positions_are_the_distinct_ones_and_lead_back(pairs: list[Pair]) -> None:
    pairs = [(list(prompt), response) for prompt, response in pairs]
    packed = Packed.of(build(pairs))
    distinct = {prompt: len(prompt) for prompt in {tuple(prompt) for prompt, _ in pairs}}
    # A prompt's last token always predicts something; a response's last token never does.
    assert len(packed.tokens_N) == sum(distinct.values()) + sum(len(response) - 1 for _, response in pairs)
    for row, (prompt, response) in enumerate(pairs):
        whole = [*prompt, *response]
        for column, token in enumerate(whole[:-1]):
            n = int(packed.packed_BT[row, column])
            assert (int(packed.tokens_N[n]), int(packed.positions_N[n])) == (token, column)
            source_row, source_column = divmod(int(packed.source_N[n]), packed.packed_BT.shape[1])
            assert column == source_column
            assert (source_row == row) or (column < len(prompt) and pairs[source_row][0] == prompt)


def test_a_prompt_that_begins_another_is_not_shared() -> None:
    packed = Packed.of(build([([1, 2], [3, 4]), ([1, 2, 3], [4])]))
    assert len(packed.tokens_N) == 3 + 3
