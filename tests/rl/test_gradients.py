"""Log-probs and the gradient of every loss against transformers in float64, sequence by sequence; nothing is learned.

The oracle shares no code with the learner: another implementation of the model, no padding, no micro-batches, formulas
written out per token. All learners here are of one policy, which no test changes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from experiences import dry_update, gradients, hugging_face, naive_sequences, sampled
from mantissa.base.ranks import ALONE
from mantissa.model.partition import kept_units
from mantissa.precision import values
from mantissa.rl.assemble import Parts, assemble, new_learner
from mantissa.rl.experience import Scored
from mantissa.rl.learner import Learner, weigh
from mantissa.rl.terms.small import PREFIX, Partition
from small_run import configure

BASE = (
    "precision=fp32",
    "model.fresh.initializer_range=0.2",
    "optimizer.updates_per_batch=1",
    "algorithm.reference={}",
)
SPLITS = (1, 25, 16384)  # a row a micro-batch, some, everything at once


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    parts = assemble(configure(*BASE))
    parts.sampler.engine.sync(parts.learner.weights, 0)
    assert parts.reference is not None
    parts.reference.take(parts.learner.weights, 0)
    yield parts
    parts.close()


@pytest.fixture(scope="module")
def model(parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hugging_face(parts, tmp_path_factory.mktemp("oracle"))


def learner_of(parts: Parts, *overrides: str) -> Learner:
    """A learner of that policy with other options."""
    known = parts.model, parts.learner.kernels, parts.new_scaler(), ALONE, parts.reference
    return new_learner(configure(*BASE, *overrides), *known)


def split_by(learner: Learner, tokens: int) -> Learner:
    learner.config = learner.config.model_copy(update={"micro_batch_tokens": tokens})
    return learner


def of_model(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, what: object = "") -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        wanted = expected[name].double()
        error = (gradient.double() - wanted).norm() / wanted.norm().clamp(min=1e-9)
        assert error < tolerance, f"{what} {name}: relative error {error:.2e}"


def grouped(experience: Scored, one: bool = False) -> dict[int, list[float]]:
    """The rewards of each group; ``one``: of the batch as a group."""
    groups: dict[int, list[float]] = {}
    for group, reward in zip(experience.group_B.tolist(), experience.reward_B.tolist(), strict=True):
        groups.setdefault(0 if one else group, []).append(reward)
    return groups


def test_scores_are_those_of_a_loop_over_sequences(parts: Parts, model: Any) -> None:
    learner = learner_of(parts, "optimizer.micro_batch_tokens=30", "rollout.temperature=0.7")
    experience = sampled(parts)
    logp_BR, entropy_BR = learner.score(experience)
    with torch.no_grad():
        each = list(naive_sequences(model, experience, 0.7))
    mask = experience.mask_BR
    assert len({len(logp) for _, logp, _ in each}) > 1  # padded, and padding is 0
    assert (logp_BR[~mask] == 0).all()
    assert (entropy_BR[~mask] == 0).all()
    torch.testing.assert_close(logp_BR[mask].double(), torch.cat([logp for _, logp, _ in each]), rtol=0, atol=4e-6)
    torch.testing.assert_close(entropy_BR[mask].double(), torch.cat([h for *_, h in each]), rtol=0, atol=4e-6)


ADVANTAGES: dict[str, Callable[[list[float]], list[float]]] = {
    "dr_grpo": lambda group: [r - sum(group) / len(group) for r in group],
    "grpo": lambda group: [(r - sum(group) / len(group)) / (float(torch.tensor(group).std()) + 1e-6) for r in group],
    "rloo": lambda group: [r - (sum(group) - r) / (len(group) - 1) for r in group],
}
ADVANTAGES["reinforce_pp"] = ADVANTAGES["grpo"]  # of the batch as one group
LOSSES = [  # each loss, each aggregation, each advantage, each kind of correction
    ("ppo_clip", "token_mean", "dr_grpo", "token_tis"),
    ("ppo_clip", "seq_mean_token_mean", "grpo", "none"),
    ("ppo_clip", "seq_mean_token_sum_norm", "rloo", "icepop"),
    ("reinforce", "token_mean", "reinforce_pp", "sequence_rejection"),
    ("reinforce", "seq_mean_token_sum_norm", "dr_grpo", "sequence_mis"),
    ("dapo", "token_mean", "grpo", "sequence_is"),
    ("gspo", "seq_mean_token_mean", "grpo", "bypass"),
    ("cispo", "seq_mean_token_sum_norm", "dr_grpo", "bypass"),
    ("gmpo", "seq_mean_token_mean", "grpo", "sequence_is"),
    ("sapo", "seq_mean_token_mean", "grpo", "token_tis"),
    ("dppo", "token_mean", "dr_grpo", "bypass"),
]


def naive_term(loss: str, logp: Tensor, anchor: Tensor, j: int, a: float) -> Tensor:
    """Minus the loss of token j of a sequence, without weight and scale."""
    if loss == "reinforce":
        return a * logp[j]
    log_ratio = (logp - anchor).mean() if loss in ("gspo", "gmpo") else logp[j] - anchor[j]
    ratio = log_ratio.exp()
    if loss == "gmpo":  # its clip is at 0.4, far from the gaps here
        return ratio * a
    if loss == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
    if loss == "dppo":
        moved = float((logp[j].exp() - anchor[j].exp()).detach())
        kept = moved <= 0.15 if a > 0 else moved >= -0.15
        return a * logp[j] * float(ratio.detach()) * kept
    if loss == "cispo":
        return a * logp[j] * min(float(ratio.detach()), 1.28)
    low, high = {"ppo_clip": (0.8, 1.2), "dapo": (0.8, 1.28), "gspo": (1 - 3e-4, 1 + 4e-4)}[loss]
    value = min(ratio * a, ratio.clamp(low, high) * a)
    return max(value, torch.tensor(10.0 * a, dtype=torch.float64)) if loss == "dapo" and a < 0 else value


def naive_loss(model: Any, experience: Scored, loss: str, aggregation: str, kind: str, corrected: str) -> Tensor:
    """The loss of a whole batch, written out token by token. theta is old, so but for bypass the ratio's value is 1."""
    logps = [logp for _, logp, _ in naive_sequences(model, experience)]
    groups = grouped(experience, one=kind == "reinforce_pp")
    advantages = [a for group in groups.values() for a in ADVANTAGES[kind](group)]
    rollouts = [experience.rollout_logp_BR[row, : len(logp)].double() for row, logp in enumerate(logps)]
    products = [float((logp.detach() - x).sum().exp()) for logp, x in zip(logps, rollouts, strict=True)]
    kept = [corrected != "sequence_rejection" or 0.5 <= s <= 2.0 for s in products]
    assert corrected != "sequence_rejection" or len(set(kept)) == 2
    tokens = sum(len(logp) for logp, k in zip(logps, kept, strict=True) if k)
    total = torch.zeros((), dtype=torch.float64)
    for row, logp in enumerate(logps):
        s, anchor = products[row], rollouts[row] if corrected == "bypass" else logp.detach()
        for j in range(len(logp) if kept[row] else 0):
            r = math.exp(float(logp[j].detach() - rollouts[row][j]))
            weight = {
                "none": 1.0,
                "bypass": 1.0,
                "token_tis": min(r, 2.0),
                "icepop": r if 0.5 <= r <= 5.0 else 0.0,
                "sequence_is": s,
                "sequence_mis": s if s <= 3.0 else 0.0,
                "sequence_rejection": s,  # what is kept is at most 2 already
            }[corrected]
            scale = {
                "token_mean": 1 / tokens,
                "seq_mean_token_mean": 1 / (sum(kept) * len(logp)),
                "seq_mean_token_sum_norm": 1 / (sum(kept) * 6),
            }[aggregation]
            total = total - weight * scale * naive_term(loss, logp, anchor, j, advantages[row])
    return total


@pytest.mark.parametrize(("loss", "aggregation", "kind", "corrected"), LOSSES)
def test_the_gradient_is_that_of_a_hand_written_loss_whatever_the_split(
    parts: Parts, model: Any, loss: str, aggregation: str, kind: str, corrected: str
) -> None:
    options = (f"loss={loss}", f"aggregation={aggregation}", f"advantage={kind}", f"correction={corrected}")
    learner = learner_of(parts, *(f"algorithm.{option}" for option in options))
    experience = sampled(parts)
    expected = of_model(model, naive_loss(model, experience, loss, aggregation, kind, corrected))
    weighed = weigh(experience, learner.algorithm)
    advantage_B, valid_BR = weighed.advantage_B, weighed.valid_BR
    alive = advantage_B != 0
    assert alive.tolist()[-4:] == [kind == "reinforce_pp"] * 4
    for tokens in SPLITS:
        found, update = dry_update(split_by(learner, tokens), experience)
        close(found, expected, 2e-5, tokens)
        assert update.trained_tokens == int(valid_BR[alive].sum())  # what has no advantage is left out of the pass


# FlowRL

BETA = 3.0


def naive_head(weights: dict[str, Tensor], state_E: Tensor, key: Tensor, dropout: float) -> Tensor:
    """log Z, written out: two blocks of Linear, GELU, LayerNorm, Dropout, then Linear to 1."""
    x = state_E
    for block in (0, 1):
        name = f"blocks.{block}."
        x = F.gelu(x @ weights[name + "weight"].t() + weights[name + "bias"])
        x = F.layer_norm(x, x.shape, weights[name + "norm_weight"], weights[name + "norm_bias"])
        x = x * kept_units(key[None], block, len(x), dropout)[0] / (1 - dropout)
    return (weights["weight"] @ x + weights["bias"]).squeeze()


def naive_flowrl(
    model: Any,
    head: dict[str, Tensor],
    experience: Scored,
    keys: Tensor,
    dropout: float,
    corrected: str,
    detach: bool,
) -> Tensor:
    """mean_i w_i * (log Z + mean logp - beta * r_hat - mean logp_ref)^2, one unpadded sequence at a time."""
    groups = grouped(experience)
    total, rows = torch.zeros((), dtype=torch.float64), len(experience)
    for row, (states, logp, _) in enumerate(naive_sequences(model, experience)):
        prompt, count, reward = int(experience.prompt_length_B[row]), len(logp), float(experience.reward_B[row])
        rewards = groups[int(experience.group_B[row])]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        state = states[:prompt].mean(0)
        log_z = naive_head(head, state.detach() if detach else state, keys[row], dropout)
        ref = experience.column("ref_logp_BR")[row, :count].double().mean()
        delta = log_z + logp.mean() - BETA * (reward - mean) / (std + 1e-6) - ref
        gap = [float(logp[j].detach()) - float(experience.rollout_logp_BR[row, j]) for j in range(count)]
        whole = math.exp(sum(gap))
        weight = {
            "none": 1.0,
            "token_tis": sum(min(math.exp(g), 2.0) for g in gap) / count,
            "sequence_mis": whole if whole <= 3.0 else 0.0,
        }[corrected]
        total = total + weight * delta.square() / rows
    return total


@pytest.mark.parametrize(
    ("corrected", "dropout", "detach"), [("none", 0.1, False), ("token_tis", 0.1, True), ("sequence_mis", 0.5, False)]
)
def test_gradients_of_policy_and_head_are_those_of_a_hand_written_loss_whatever_the_split(
    parts: Parts, model: Any, corrected: str, dropout: float, detach: bool
) -> None:
    loss = f"{{kind: flowrl, beta: {BETA}, partition_dropout: {dropout}, detach_partition: {str(detach).lower()}}}"
    learner = learner_of(parts, f"algorithm.loss={loss}", f"algorithm.correction={corrected}")
    experience = sampled(parts, reference=True)
    flow = learner.term(Partition).flow
    head = {name: weight.double().requires_grad_() for name, weight in flow.weights.items()}
    keys = flow.keys(experience.group_B, 1)
    expected = of_model(model, naive_flowrl(model, head, experience, keys, dropout, corrected, detach))
    expected |= {PREFIX + name: weight.grad for name, weight in head.items() if weight.grad is not None}
    for tokens in SPLITS:
        split_by(learner, tokens)
        if tokens == SPLITS[-1]:  # and then by the scoring's own graph
            experience = experience.with_learner(*learner.score(experience))
        found, update = dry_update(learner, experience)
        close(found, expected, 3e-5, tokens)
        assert update.trained_tokens == int(experience.mask_BR.sum())  # also without an advantage
    assert bool((weigh(experience, learner.algorithm).advantage_B[-4:] == 0).all())


# The distance from the reference: in the loss, in the reward, and measured

ESTIMATE: dict[str, Callable[[float], float]] = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}
SLOPE: dict[str, Callable[[float], float]] = {  # by logp, of which log r is minus that
    "k1": lambda x: 1.0,
    "k2": lambda x: -x,
    "k3": lambda x: 1 - math.exp(x),
}


def log_r(experience: Scored) -> list[list[float]]:
    """logp_ref - logp of each completion's tokens."""
    rows = (experience.column("ref_logp_BR").double() - experience.old_logp_BR.double()).tolist()
    return [row[: int(count)] for row, count in zip(rows, experience.mask_BR.sum(1), strict=True)]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_in_the_loss_it_adds_its_gradient_to_every_completions(parts: Parts, kind: str) -> None:
    """By the chain rule in float64: d loss / d logp of each token is -A + coefficient * slope, over the token count."""
    options = (f"algorithm.kl={{where: loss, estimator: {kind}, coefficient: 0.7}}", "algorithm.correction=none")
    learner, experience = learner_of(parts, *options), sampled(parts, reference=True)
    tokens = int(experience.mask_BR.sum())
    advantages = [a for group in grouped(experience).values() for a in ADVANTAGES["dr_grpo"](group)]
    slopes = [
        (-a + 0.7 * SLOPE[kind](x)) / tokens for a, row in zip(advantages, log_r(experience), strict=True) for x in row
    ]
    weights = dict(parts.model.named_parameters())
    logp_N = learner.logp(experience, learner.kernels)
    expected = dict(
        zip(weights, torch.autograd.grad(logp_N, list(weights.values()), torch.tensor(slopes)), strict=True)
    )
    for budget in SPLITS:
        found, update = dry_update(split_by(learner, budget), experience)
        close(found, expected, 2e-5, budget)
        penalty = sum(0.7 * ESTIMATE[kind](x) / tokens for row in log_r(experience) for x in row)
        assert float(values(update.tallies)["reference/penalty"]) == pytest.approx(penalty, rel=1e-5)
        assert update.trained_tokens == tokens  # the group without an advantage too


@pytest.mark.parametrize(("kind", "estimator"), [("k1", "dr_grpo"), ("k2", "rloo"), ("k3", "rloo")])
def test_in_the_reward_it_comes_before_the_advantages(parts: Parts, kind: str, estimator: str) -> None:
    kl = f"algorithm.kl={{where: reward, estimator: {kind}, coefficient: 0.2}}"
    learner, experience = learner_of(parts, kl, f"algorithm.advantage={estimator}"), sampled(parts, reference=True)
    taken = [0.2 * sum(map(ESTIMATE[kind], row)) for row in log_r(experience)]
    shaped = [float(r) - t for r, t in zip(experience.reward_B, taken, strict=True)]
    _, update = dry_update(learner, experience)
    advantage_B = weigh(experience, learner.algorithm).advantage_B
    expected = [a for start in range(0, 20, 4) for a in ADVANTAGES[estimator](shaped[start : start + 4])]
    assert advantage_B.tolist() == pytest.approx(expected, abs=2e-6)
    tallies = {name: float(value) for name, value in values(update.tallies).items()}
    assert tallies["reference/penalty"] == pytest.approx(sum(taken), rel=1e-5)
    assert tallies["advantage/degenerate_group_fraction"] == 0  # equal rewards, but not equally near the reference
    assert tallies["reward/mean"] == pytest.approx(float(experience.reward_B.mean()))  # the task's, not the shaped one


def test_alone_a_reference_is_measured_and_changes_nothing(parts: Parts) -> None:
    learner, experience = learner_of(parts), sampled(parts, reference=True)
    with_it, update = dry_update(learner, experience)
    kept = {name: column for name, column in experience.columns.items() if name != "ref_logp_BR"}
    without, bare = dry_update(learner, dataclasses.replace(experience, columns=kept))
    assert all(torch.equal(gradient, without[name]) for name, gradient in with_it.items())
    every = [x for row in log_r(experience) for x in row]
    tallies = {name: float(value) for name, value in values(update.tallies).items()}
    assert tallies["reference/kl"] == pytest.approx(-sum(every) / len(every), rel=1e-9)
    assert tallies["reference/k3_kl"] == pytest.approx(sum(map(ESTIMATE["k3"], every)) / len(every), rel=1e-9)
    assert not [name for name in bare.tallies if name.startswith("reference/")]


# What is left out, and who computes what


@pytest.mark.parametrize("loss", ["gspo", "flowrl", "ppo_clip"])
def test_an_unknown_log_prob_takes_its_sequence_from_a_loss_about_sequences(parts: Parts, loss: str) -> None:
    """What is left of a sequence is another sequence: its ratio and its delta are not those of the whole."""
    learner, experience = learner_of(parts, f"algorithm.loss={loss}"), sampled(parts, reference=True)
    row = int(experience.mask_BR.sum(1).argmax())
    found = []
    for tokens in (slice(0, 1), slice(None)):
        rollout = experience.rollout_logp_BR.clone()
        rollout[row, tokens] = torch.where(experience.mask_BR[row, tokens], math.nan, 0.0)
        each = gradients(learner, dataclasses.replace(experience, rollout_logp_BR=rollout))
        found.append(torch.cat([gradient.flatten() for gradient in each.values()]))
    one, whole = found
    assert bool(one.isfinite().all())
    assert bool((one - whole).norm() < 1e-4 * whole.norm()) == (loss != "ppo_clip")


@pytest.mark.parametrize(
    ("loss", "corrected", "kind"),
    [
        ("reinforce", "sequence_is", "token_mean"),
        ("ppo_clip", "sequence_rejection", "seq_mean_token_sum_norm"),
        ("gspo", "token_tis_normalized", "seq_mean_token_mean"),
        ("flowrl", "sequence_mis", "seq_mean_token_mean"),
    ],
)
def test_gradients_of_dealt_micro_batches_sum_to_the_steps(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, loss: str, corrected: str, kind: str
) -> None:
    """Whatever rank computes which: a micro-batch carries its tokens' weights in the step. A rank may have none."""
    estimator = "grpo" if loss == "flowrl" else "reinforce_pp"
    options = (f"loss={loss}", f"correction={corrected}", f"aggregation={kind}", f"advantage={estimator}")
    learner = split_by(learner_of(parts, *(f"algorithm.{option}" for option in options)), 25)
    experience = sampled(parts, problems=6, equal=False, reference=True)
    step = learner._step
    monkeypatch.setattr("mantissa.rl.learner.merge", lambda rows: {})  # metrics: tests/algorithms/test_ranks.py

    def dealt(deal: Callable[[list[Any]], list[Any]]) -> dict[str, Tensor]:
        monkeypatch.setattr(learner, "_step", lambda data, batches, number: step(data, deal(batches), number))
        return gradients(learner, experience)

    whole = dealt(lambda batches: batches)
    for deals in (
        [lambda batches: batches[:1], lambda batches: batches[1:]],  # two, unequal
        [lambda batches: batches[::2], lambda batches: [], lambda batches: batches[1::2]],  # three, one idle
    ):
        apart = [dealt(deal) for deal in deals]
        assert sum(bool(found) for found in apart) == 2
        summed = {name: sum(found[name].double() for found in apart if name in found) for name in whole}
        close(summed, whole, 2e-6)  # type: ignore[arg-type]


# The entropy bonus, and the mask of what was left behind


def test_the_entropy_bonus_has_the_entropys_own_gradient_whatever_the_split(parts: Parts, model: Any) -> None:
    """By transformers in float64: of whole distributions, on every response token, of a group without advantage too."""
    learner = learner_of(parts, "algorithm.entropy={coefficient: 0.5}", "algorithm.correction=none")
    assert not learner.reuse_scoring
    experience = sampled(parts)
    tokens = int(experience.mask_BR.sum())
    entropies = torch.cat([h for _, _, h in naive_sequences(model, experience)])
    loss = naive_loss(model, experience, "ppo_clip", "token_mean", "dr_grpo", "none") - 0.5 * entropies.sum() / tokens
    expected = of_model(model, loss)
    for budget in SPLITS:
        found, update = dry_update(split_by(learner, budget), experience)
        close(found, expected, 2e-5, budget)
        bonus = float(values(update.tallies)["policy/entropy_bonus"])
        assert bonus == pytest.approx(0.5 * float(entropies.detach().mean()), rel=1e-5)
        assert update.trained_tokens == tokens


def test_a_masked_sequence_has_no_gradient_and_stays_in_the_denominator(parts: Parts) -> None:
    learner = learner_of(parts, "algorithm.correction={mask_negative_above: 0.05}")
    experience = sampled(parts)
    advantage_B = weigh(experience, learner.algorithm).advantage_B
    gaps = (experience.rollout_logp_BR - experience.old_logp_BR).sum(1) / experience.mask_BR.sum(1)
    masked = (advantage_B < 0) & (gaps > 0.05)
    assert 0 < int(masked.sum()) < int((advantage_B < 0).sum())
    found, update = dry_update(learner, experience)
    share = float(values(update.tallies)["correction/off_policy_masked_fraction"])
    assert share == pytest.approx(float(masked.sum()) / int((advantage_B != 0).sum()))
    weights = dict(parts.model.named_parameters())
    slopes = torch.where(masked, 0.0, -advantage_B).unsqueeze(1).expand_as(experience.mask_BR)[experience.mask_BR]
    logp_N, tokens = learner.logp(experience, learner.kernels), int(experience.mask_BR.sum())
    gradient = torch.autograd.grad(logp_N, list(weights.values()), slopes / tokens)
    close(found, dict(zip(weights, gradient, strict=True)), 2e-5)


@pytest.mark.parametrize("loss", ["{kind: kl_cov, share: 0.2}", "{kind: clip_cov, share: 0.3, low: 0.0}"])
def test_tokens_are_chosen_of_a_whole_step_whatever_the_split(parts: Parts, loss: str) -> None:
    learner = learner_of(parts, f"algorithm.loss={loss}", "optimizer.updates_per_batch=2")
    experience = sampled(parts)
    rollout = experience.rollout_logp_BR  # half a nat from old: a ratio, so that what is held has a gradient
    experience = dataclasses.replace(experience, old_logp_BR=rollout)
    weighed = learner.with_choice(weigh(experience, learner.algorithm), 1)
    chosen, valid = weighed.column("chosen_BR"), weighed.valid_BR
    assert chosen is not None
    for rows in learner._parts(weighed, 1):
        assert 0 < int(chosen[rows].sum()) <= max(0.3 * int(valid[rows].sum()), 1)
    assert not bool((chosen & ~valid).any())
    found = [gradients(split_by(learner, tokens), experience) for tokens in SPLITS]
    for other in found[1:]:
        close(other, {name: gradient.double() for name, gradient in found[0].items()}, 1e-5)
    plain = gradients(learner_of(parts, "optimizer.updates_per_batch=2"), experience)
    assert any(not torch.allclose(plain[name], found[0][name], rtol=1e-3) for name in plain)
