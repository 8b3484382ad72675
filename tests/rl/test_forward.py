"""The shared forward: packed against padded, prompts against single ones, and one graph for score and update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiences import learned, made_up
from mantissa.kernels import Kernels, NativeKernels, SimulatedKernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import BF16, FP16, FP32, token_logprob, values
from mantissa.rl import score as module
from mantissa.rl.assemble import Parts
from mantissa.rl.experience import Scored, Sequences
from mantissa.rl.learner import Learner, Update
from mantissa.rl.score import Packed, forward, score

CONFIG = ModelConfig("qwen3", 13, 32, 48, 2, 4, 2, 8, qk_norm=True, initializer_range=0.3)
Pair = tuple[list[int], list[int]]
ANSWERS = st.lists(st.integers(0, 12), max_size=6)
PROMPTS = [[1, 2, 3], [4], [1, 2, 3], [5, 6, 7, 8, 9, 10, 11], [1, 2], [1, 2, 3]]  # shared, nested, of many lengths
RESPONSES = [[3, 4], [5, 6, 7], [8], [9, 1], [2, 2, 2], [3, 4]]


def build(pairs: list[Pair]) -> Sequences:
    return Sequences.build([prompt for prompt, _ in pairs], [answer for _, answer in pairs], torch.device("cpu"))


@pytest.fixture
def model() -> Decoder:
    return Decoder(CONFIG).initialize(torch.Generator().manual_seed(3))


def drawn(seed: int, prompts: int = 4, samples: int = 5) -> Sequences:
    """Groups of samples with prompts and responses of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, 13, (length,), generator=generator).tolist()

    return build([(prompt, draw(1, 12)) for prompt in [draw(1, 9) for _ in range(prompts)] for _ in range(samples)])


# Packing


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([[1], [1, 2], [1, 2, 3], [2, 1]]), ANSWERS), min_size=1, max_size=8))
def test_positions_are_the_distinct_ones_and_lead_back(pairs: list[Pair]) -> None:
    packed = Packed.of(build(pairs))
    distinct = {prompt: len(prompt) for prompt in {tuple(prompt) for prompt, _ in pairs}}
    # A prompt is there whole, also where all its responses are empty; a response's last token predicts nothing.
    answers = sum(max(len(response) - 1, 0) for _, response in pairs)
    assert len(packed.tokens_N) == sum(distinct.values()) + answers
    for row, (prompt, response) in enumerate(pairs):
        for column, token in enumerate([*prompt, *response[:-1]]):
            n = int(packed.packed_BT[row, column])
            assert (int(packed.tokens_N[n]), int(packed.positions_N[n])) == (token, column)
            source_row, source_column = divmod(int(packed.source_N[n]), packed.packed_BT.shape[1])
            assert column == source_column
            assert (source_row == row) or (column < len(prompt) and pairs[source_row][0] == prompt)
        owner_prompt, owner_response = pairs[int(packed.owner_B[row])]
        assert owner_prompt == prompt
        assert bool(owner_response) == any(r for p, r in pairs if p == prompt)


# Empty responses: an aborted request has none


def alone(model: Decoder, pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Of one sequence by itself, neither packed nor padded: its log-probs, entropies, and its prompt's mean state."""
    (prompt, response), kernels = pair, NativeKernels(FP32)
    hidden_TE = model(torch.tensor([[*prompt, *response]]), kernels)[0]
    law = model.logits(hidden_TE, kernels).log_softmax(-1)[len(prompt) - 1 : len(prompt) + len(response) - 1]
    logp = law.gather(1, torch.tensor(response, dtype=torch.int64).unsqueeze(1)).squeeze(1)
    return logp, -(law.exp() * law).sum(-1), hidden_TE[: len(prompt)].mean(0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([[1], [1, 2], [1, 2, 3], [2, 1]]), ANSWERS), min_size=1, max_size=7))
@example([([1, 2, 3], []), ([1, 2, 3], [4, 5]), ([1, 2, 3], [])])  # first and last of a group
@example([([1], []), ([2, 1], [3]), ([1], [])])  # all of a group, with a prompt of one token
@example([([1], []), ([1], [])])  # all of a batch
@example([([1], [])])
def test_each_sequence_has_its_own_log_probs_whatever_empty_ones_are_beside_it(pairs: list[Pair]) -> None:
    """Value and gradient, against each sequence by itself; nothing of an empty one is missing or not finite."""
    model = Decoder(CONFIG).initialize(torch.Generator().manual_seed(3))
    sequences, single = build(pairs), [alone(model, pair) for pair in pairs]
    logp_N, entropy_N = (torch.cat([each[i] for each in single]) for i in (0, 1))
    mean_BE = [mean_E for _, _, mean_E in single]
    passed = forward(model, NativeKernels(FP32), sequences, 1.0, prompts=True, entropies=True)
    assert passed.entropy_N is not None
    assert passed.prompt_BE is not None
    close: dict[str, float] = {"rtol": 0, "atol": 2e-5}
    torch.testing.assert_close(passed.logp_N, logp_N, **close)
    torch.testing.assert_close(passed.entropy_N, entropy_N, **close)
    torch.testing.assert_close(passed.prompt_BE, torch.stack(mean_BE), **close)
    found = gradients(model, torch.cat([passed.logp_N, passed.prompt_BE.flatten()]))
    wanted = gradients(model, torch.cat([logp_N, *mean_BE]))
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()) + 1e-6)

    scored, entropy_BR = score(
        lambda part, _: forward(model, NativeKernels(FP32), part, 1.0, entropies=True), sequences, 8, entropies=True
    )
    torch.testing.assert_close(scored[sequences.mask_BR], passed.logp_N.detach(), **close)
    torch.testing.assert_close(entropy_BR[sequences.mask_BR], passed.entropy_N.detach(), **close)
    assert not bool(scored[~sequences.mask_BR].any())


def logp_and_gradients(
    model: Decoder, kernels: Kernels, sequences: Sequences, packed: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the response tokens, and the gradients of a weighted sum of them."""
    position_N, token_N = sequences.response_tokens()
    if packed:
        pack = Packed.of(sequences)
        hidden = pack.hidden(model, kernels)[pack.packed_BT.flatten()[position_N]]
    else:
        hidden = model(sequences.tokens_BT, kernels).flatten(0, 1)[position_N]
    logp_N = token_logprob(model.logits(hidden, kernels), token_N)
    return logp_N.detach(), gradients(model, logp_N)


def gradients(model: Decoder, out: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("seed", range(2))
def test_fp32_log_probs_and_gradients_are_those_of_the_padded_batch(model: Decoder, seed: int) -> None:
    sequences, kernels = drawn(seed), NativeKernels(FP32)
    want, want_grads = logp_and_gradients(model, kernels, sequences, packed=False)
    got, got_grads = logp_and_gradients(model, kernels, sequences, packed=True)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
def test_simulated_packed_errs_no_more_than_simulated_padded(model: Decoder, fmt: Any) -> None:
    """Against fp32, the distance of the packed gradient is that of the padded one: no precision is lost in the sums."""
    sequences = drawn(7)
    exact, exact_grads = logp_and_gradients(model, NativeKernels(FP32), sequences, packed=False)
    padded, padded_grads = logp_and_gradients(model, SimulatedKernels(fmt), sequences, packed=False)
    got, got_grads = logp_and_gradients(model, SimulatedKernels(fmt), sequences, packed=True)
    assert 0 < float((got - exact).abs().mean()) < 1.5 * float((padded - exact).abs().mean())

    def distance(grads: dict[str, Tensor]) -> float:
        return sum(float((grads[n] - g).double().square().sum()) for n, g in exact_grads.items()) ** 0.5

    assert 0 < distance(got_grads) < 1.5 * distance(padded_grads)


# Prompts' mean states, and the head


def means_of(model: Decoder, kernels: Kernels, batch: Sequences) -> Tensor:
    means = forward(model, kernels, batch, 1.0, prompts=True).prompt_BE
    assert means is not None
    return means


@pytest.mark.parametrize(
    "kernels",
    [NativeKernels(FP32), SimulatedKernels(FP16), SimulatedKernels(BF16), NativeKernels(BF16)],
    ids=["fp32", "fp16", "bf16", "native"],
)
def test_means_and_their_gradients_are_those_of_single_prompts(model: Decoder, kernels: Kernels) -> None:
    """Each prompt alone, its states averaged in float64; in half the states are of the format, their mean is fp32."""
    whole = build(list(zip(PROMPTS, RESPONSES, strict=True)))
    got = means_of(model, kernels, whole)
    want = torch.stack([model(torch.tensor([prompt]), kernels)[0].double().mean(0) for prompt in PROMPTS])
    assert got.dtype == torch.float32
    got_grads = gradients(model, got)
    if kernels.format is not FP32:
        assert bool((got[3].to(kernels.format.dtype).float() != got[3]).any())  # a mean of seven is off the grid
        # the same states up to the roundings that another batch flips
        torch.testing.assert_close(got.double(), want, rtol=0, atol=8 * kernels.format.epsilon)
        assert all(bool(grad.isfinite().all()) for grad in got_grads.values())
        return
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    want_grads = gradients(model, want)
    assert got_grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        error = (got_grads[name] - grad).norm() / grad.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"
    for rows in ([0], [3, 1], [5, 4, 2]):
        part = means_of(model, kernels, whole.select(torch.tensor(rows)))
        torch.testing.assert_close(part, got[rows], rtol=0, atol=2e-6)


def test_asking_for_prompts_changes_no_log_prob_and_costs_no_forward(model: Decoder) -> None:
    calls: list[int] = []
    hidden, batch = Decoder.hidden, drawn(1)
    model.hidden = lambda *a, **k: (calls.append(1), hidden(model, *a, **k))[1]  # type: ignore[method-assign]
    plain, more = (forward(model, NativeKernels(FP32), batch, 0.7, prompts=asked) for asked in (False, True))
    assert plain.prompt_BE is None
    assert torch.equal(plain.logp_N, more.logp_N)
    assert len(calls) == 2


@pytest.mark.parametrize("kernels", [NativeKernels(FP32), SimulatedKernels(BF16)], ids=["fp32", "bf16"])
def test_logits_in_parts_are_the_whole_ones(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
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
    leaves = [kernels.weight(leaf) for leaf in (hidden, weight)]
    expected = of(oracle, *(leaf.double() for leaf in leaves))
    for bound, rows in ((29 * 300, 29), (7 * 300, 6)):
        monkeypatch.setattr(module, "_LOGITS_AT_ONCE", bound)
        seen.clear()
        looked.clear()
        got = of(lambda x, w: head(w, hidden_NE=x)[:2], *leaves)
        assert max(seen) == rows
        assert [at for start, count in looked for at in range(start, start + count)] == list(range(29))  # each once
        for one, other in zip(got, expected, strict=True):
            bound_ = 1e-6 if kernels.format is FP32 else 2 * kernels.format.epsilon
            assert (one.double() - other).norm() <= bound_ * other.norm()


# One step a batch: the scoring's graph serves the update, to the same weights, and only where it may

Build = Callable[..., Learner]


@pytest.fixture
def learner(made: Callable[..., Parts]) -> Build:
    base = ("precision=fp32", "optimizer.updates_per_batch=1", "model.fresh.layers=1")
    return lambda *overrides: made(*base, *overrides).learner


def scored(learner: Learner, alive: int = 10, seed: int = 5) -> Scored:
    batch = made_up(alive, seed)
    return batch.with_learner(*learner.score(batch))


def update_of(learner: Learner, batch: Scored) -> tuple[Update, dict[str, Tensor], int]:
    """What learning gave, the weights after it, and how many forwards it did."""
    calls: list[Any] = []
    real = learner.forward
    learner.forward = lambda *given, **also: (calls.append(given), real(*given, **also))[1]  # type: ignore[method-assign]
    update = learned(learner, batch)
    return update, {n: p.detach().clone() for n, p in learner.model.named_parameters()}, len(calls)


def both_ways(learner: Build, *options: str, atol: float) -> tuple[Any, Any]:
    """The update with the scoring's graph and without, of which the weights are alike."""
    found = []
    for forget in (False, True):
        mine = learner(*options)
        batch = scored(mine)
        if forget:
            mine._kept = None
        found.append(update_of(mine, batch))
    for name, weight in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], weight, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    return found[0], found[1]


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_the_update_is_that_of_a_forward_of_its_own(learner: Build, loss: str) -> None:
    options = (f"algorithm.loss={loss}", "optimizer.eps=1e-3")  # eps: Adam divides by what is noise
    (kept, weights, forwards), (alone, _, own) = both_ways(learner, *options, atol=1e-7)
    assert (forwards, own) == (0, 1)
    assert kept.outcomes[0].grad_norm == pytest.approx(alone.outcomes[0].grad_norm, rel=1e-5)
    before = learner(*options).weights
    assert max(float((weights[n] - before[n]).abs().max()) for n in before) > 1e-5  # there was something to compare
    figures = [{n: float(v) for n, v in values(update.tallies).items()} for update in (kept, alone)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4, abs=1e-6)


def test_an_overflow_is_retried_with_a_forward_of_its_own(learner: Build) -> None:
    options = ("precision=fp16", "loss_scaling={initial: 1.0e+9, retries: 30}", "optimizer.eps=1e-3")
    # the graph served a try that overflowed; the rest is the same forward
    (kept, _, forwards), (alone, _, own) = both_ways(learner, *options, atol=1e-5)
    assert kept.outcomes[0].kind == "retried"
    assert kept.outcomes[0].overflows == alone.outcomes[0].overflows == forwards == own - 1


@pytest.mark.parametrize(
    ("overrides", "alive"),
    [(("optimizer.updates_per_batch=2",), 10), (("optimizer.micro_batch_tokens=20",), 10), ((), 8)],
    ids=["two updates", "several micro-batches", "two thirds alive"],
)
def test_it_is_not_used_where_it_does_not_pay(learner: Build, overrides: tuple[str, ...], alive: int) -> None:
    mine = learner(*overrides)
    assert update_of(mine, scored(mine, alive))[2] >= 1


def test_a_graph_of_other_weights_or_another_batch_is_not_used_and_is_let_go(learner: Build) -> None:
    mine = learner()
    first, second = scored(mine, seed=5), scored(mine, seed=6)
    assert mine._kept is not None
    assert mine._kept.logp_BR.requires_grad
    assert torch.equal(mine._kept.logp_BR.detach(), second.old_logp_BR)
    assert not second.old_logp_BR.requires_grad
    assert not second.column("entropy_BR").requires_grad
    assert update_of(mine, first)[2] == 1  # the graph is of ``second``
    assert mine._kept is None
    other = learner()
    first = scored(other)
    other.step.updates += 1  # as if a step had been taken since
    assert update_of(other, first)[2] == 1


# Entropy's gradient, and a row that learns nothing


@pytest.mark.parametrize("parts", [1, 3])
def test_an_entropy_asked_for_as_differentiable_has_its_gradient(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """Against autograd through a plain forward in float64; in one part, and with logits computed again."""
    sequences = build([(PROMPTS[i], RESPONSES[i]) for i in range(4)])
    tokens = int(sequences.mask_BR.sum())
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", -(-tokens * 13 // parts))
    monkeypatch.setattr(module, "_ENTROPY_AT_ONCE", 13 * 2)
    weight_N = torch.rand(tokens, generator=torch.Generator().manual_seed(1))
    assert forward(model, NativeKernels(FP32), sequences, 0.7, entropies=True).entropy_N.requires_grad is False
    passed = forward(model, NativeKernels(FP32), sequences, 0.7, entropies="differentiable")
    (passed.entropy_N * weight_N).sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    position_N, _ = sequences.response_tokens()
    hidden_BTE = model(sequences.tokens_BT, NativeKernels(FP32))
    logits_NV = model.logits(hidden_BTE.flatten(0, 1)[position_N], NativeKernels(FP32)).double()
    expected_N = torch.distributions.Categorical(logits=logits_NV / 0.7).entropy()
    torch.testing.assert_close(passed.entropy_N.double(), expected_N, atol=1e-6, rtol=0)
    (expected_N * weight_N.double()).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_the_padding_row_learns_as_a_head_alone(tied: bool) -> None:
    """As with ``padding_idx``: its embedding has no gradient, and where the head is tied its product still has one."""
    config = ModelConfig("llama", 13, 32, 48, 2, 4, 2, 8, tie_word_embeddings=tied, initializer_range=0.3)
    model = Decoder(config).initialize(torch.Generator().manual_seed(3))
    sequences = build([([1, 2], [4, 4, 3]), ([4, 1], [5, 6])])

    def gradient(row: int | None) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        model.padding_row = row
        logp_N = forward(model, NativeKernels(FP32), sequences, 1.0).logp_N
        logp_N.sum().backward()
        return logp_N.detach(), model.model.embed_tokens.weight.grad.clone()

    (logp_N, plain), (same_N, ours) = gradient(None), gradient(4)
    assert torch.equal(logp_N, same_N)
    others = torch.arange(13) != 4
    assert torch.equal(plain[others], ours[others])
    assert not torch.equal(plain[4], ours[4])
    assert bool(ours[4].any()) is tied
