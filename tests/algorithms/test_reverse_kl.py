"""Reverse KL from a teacher's distribution: against torch's own in float64, sums by hand, finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from mantissa.algorithms import ReverseKLConfig, reverse_kl
from mantissa.base.errors import MantissaError
from mantissa.rl.config.sections import AlgorithmConfig

V, N = 23, 11


def logits(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return 2 * torch.randn(N, V, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def by_hand(student: list[float], teacher: list[float], temperature: float, support: int) -> float:
    """Sums of exponentials, token by token; what is not among the teacher's ``support`` is one event."""

    def probabilities(row: list[float]) -> list[float]:
        each = [math.exp(x / temperature) for x in row]
        return [x / math.fsum(each) for x in each]

    p, t = probabilities(student), probabilities(teacher)
    order = sorted(range(len(t)), key=lambda v: -t[v])
    events = [[v] for v in order[:support]] + ([order[support:]] if support < len(t) else [])
    masses = [(math.fsum(p[v] for v in event), math.fsum(t[v] for v in event)) for event in events]
    return math.fsum(a * math.log(a / b) for a, b in masses if a > 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_over_the_whole_vocabulary_it_is_torchs(temperature: float) -> None:
    student, teacher = logits(0), logits(1)
    log_p, log_t = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    expected = torch.nn.functional.kl_div(log_t, log_p, reduction="none", log_target=True).sum(-1)
    for support in (None, V, V + 5):
        torch.testing.assert_close(reverse_kl(student, teacher, temperature, support), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("support", [1, 4, 22])
def test_over_a_support_it_is_the_sum_over_what_is_told_apart(support: int) -> None:
    student, teacher = logits(2), logits(3)
    found = reverse_kl(student, teacher, 0.8, support)
    for row in range(N):
        expected = by_hand(student[row].tolist(), teacher[row].tolist(), 0.8, support)
        assert float(found[row]) == pytest.approx(expected, abs=1e-12)
    whole = reverse_kl(student, teacher, 0.8)
    assert bool((found <= whole + 1e-12).all())  # data processing
    assert bool((found >= -1e-12).all())
    single = reverse_kl(student.float(), teacher.float(), 0.8, support)
    torch.testing.assert_close(single.double(), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("support", [None, 1, 6])
def test_its_gradient_is_the_finite_difference(support: int | None) -> None:
    student, teacher = logits(4).requires_grad_(), logits(5)
    assert torch.autograd.gradcheck(lambda x: reverse_kl(x, teacher, 0.9, support), student)
    assert bool((reverse_kl(teacher, teacher, 1.0, support).abs() < 1e-12).all())
    (still,) = torch.autograd.grad(
        reverse_kl(same := teacher.clone().requires_grad_(), teacher, 1.0, support).sum(), same
    )
    assert float(still.abs().max()) < 1e-12


def test_mass_outside_of_the_support_is_drawn_back() -> None:
    """Where the teacher has nearly all on one token, the policy's others lose, though they are not told apart."""
    teacher = torch.full((1, V), -4.0, dtype=torch.float64)
    teacher[0, 0] = 4.0
    student = torch.zeros(1, V, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(reverse_kl(student, teacher, 1.0, 1).sum(), student)
    assert gradient[0, 0] < 0
    assert bool((gradient[0, 1:] > 0).all())


@pytest.mark.parametrize("support", [None, 3, 8])
def test_what_truncation_left_out_is_nobodys(support: int | None) -> None:
    """As if the vocabulary were what was kept; no gradient there, and none that is not finite."""
    kept = torch.randperm(V, generator=torch.Generator().manual_seed(0))[:7].sort().values
    student, teacher = logits(6), logits(7)
    masked = torch.full_like(student, -torch.inf)
    masked[:, kept] = student[:, kept]
    masked.requires_grad_()
    found = reverse_kl(masked, teacher, 1.0, support)
    torch.testing.assert_close(found, reverse_kl(student[:, kept], teacher[:, kept], 1.0, support))
    (gradient,) = torch.autograd.grad(found.sum(), masked)
    assert bool(gradient.isfinite().all())
    left_out = torch.ones(V, dtype=torch.bool)
    left_out[kept] = False
    assert float(gradient[:, left_out].abs().max()) == 0


@pytest.mark.parametrize("support", [None, 4, V - 1])
def test_what_the_teacher_never_says_costs_without_end(support: int | None) -> None:
    """And is not left out, by which the sum would fall below 0."""
    student, teacher = logits(6), logits(7)
    teacher[0, 3:] = -torch.inf
    found = reverse_kl(student, teacher, 1.0, support)
    assert float(found[0]) == math.inf
    assert bool(found[1:].isfinite().all())


def test_the_loss_is_a_sum_over_tokens_and_shows_what_is_not_finite() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    divergence = torch.tensor(
        [[1.0, 2.0, math.nan], [4.0, math.nan, math.nan]], dtype=torch.float64, requires_grad=True
    )
    zeros, scale = torch.zeros(2, 3, dtype=torch.float64), torch.full((2, 3), 0.5, dtype=torch.float64)
    given = (zeros, zeros, zeros, mask, torch.ones_like(zeros), scale)
    value, metrics = ReverseKLConfig().loss(*given, divergence_BT=divergence)
    assert value.item() == 3.5
    (gradient,) = torch.autograd.grad(value, divergence)
    assert torch.equal(gradient, torch.where(mask, 0.5, 0.0).double())
    assert float(metrics["reference/reverse_kl"].value()) == pytest.approx(7 / 3)
    with torch.no_grad():
        divergence[0, 0] = math.inf
    assert not bool(ReverseKLConfig().loss(*given, divergence_BT=divergence)[0].isfinite())
    with pytest.raises(MantissaError, match="needs the divergence from the teacher"):
        ReverseKLConfig().loss(*given)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "learns from a teacher"),
        ({"reference": {}, "advantage": "grpo"}, "advantage=grpo would do nothing"),
        ({"reference": {}, "correction": "token_tis"}, "weights are of the sampled tokens"),
        ({"reference": {}, "correction": {"bypass": True}}, "weights are of the sampled tokens"),
        ({"reference": {}, "kl": {"coefficient": 0.1}}, "the same divergence twice"),
        ({"reference": {}, "loss": {"kind": "reverse_kl", "support": 0}}, "support"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises((MantissaError, ValueError), match=said):
        AlgorithmConfig(**{"loss": "reverse_kl", **fields})  # type: ignore[arg-type]
    assert AlgorithmConfig(loss="reverse_kl", reference={}).advantage == "distillation"  # type: ignore[arg-type]
