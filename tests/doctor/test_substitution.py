"""Faults put in by our own kernels are found by name; noise of no known source is called unexplained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import injected as made
from injected import CONFIG
from mantissa.base.errors import MantissaError
from mantissa.doctor.diagnosis import CauseKind
from mantissa.doctor.dump import Settings
from mantissa.doctor.sides import Cache, Scores, Side, cached
from mantissa.doctor.substitution import (
    Substitution,
    adapter_versions,
    damages,
    declared,
    hypotheses,
    plain_policy,
    substitute,
)
from mantissa.kernels import resolve
from mantissa.model import LoraShape, attach
from mantissa.precision import PrecisionPolicy
from mantissa.rl.experience import Sequences
from mantissa.rl.score import Scorer

BF16 = Side("bf16")
HOT = Settings(temperature=0.7)
POLICY = made.model()
LATER = {"step 3": made.moved(POLICY)}


def found(dump: Any, base: tuple[Side, Side] = (BF16, BF16), settings: Settings = HOT, model: Any = POLICY,
          versions: Any = LATER) -> Substitution:  # fmt: skip
    scores = Scores(model, dump, versions)
    return substitute(scores, base, hypotheses(scores, *base, settings))


def named(result: Substitution) -> dict[str, float]:
    return {cause.name: cause.share for cause in result.causes}


def habit(name: str, value: Any) -> dict[str, Any]:
    return {"habits": frozenset({(name, value)})}


FAULTS = {
    "the rollout in fp32": (CauseKind.FORMAT, "rollout", {"format": "fp32"}),
    "the learner in fp16": (CauseKind.FORMAT, "learner", {"format": "fp16"}),
    "the rollout in fp8": (CauseKind.FORMAT, "rollout", {"format": "fp8"}),
    "logits in bf16 in the rollout": (CauseKind.LOGITS, "rollout", {"logits": "bf16"}),
    "logits in bf16 in the learner": (CauseKind.LOGITS, "learner", {"logits": "bf16"}),
    "the rollout's cache in fp8": (CauseKind.CACHE, "rollout", {"cache": Cache.FP8}),
    "the rollout's cache in fp8 of scale 1, cut off": (CauseKind.CACHE, "rollout", {"cache": Cache.CUT_OFF}),
    "fused residual norms in the rollout": (CauseKind.NORM, "rollout", habit("norm", "fused")),
    "attention in blocks in the rollout": (
        CauseKind.KERNELS,
        "rollout",
        habit("attention", "blocks"),
    ),
    "tensor parallelism over 4 in the rollout": (
        CauseKind.KERNELS,
        "rollout",
        habit("tensor_parallel", 4),
    ),
    "temperature not applied in the rollout": (CauseKind.TEMPERATURE, "rollout", {"temperature": 1.0}),
    "temperature applied twice in the learner": (CauseKind.TEMPERATURE, "learner", {"temperature": 0.7 * 0.7}),
    "weights of step 3 in the rollout": (CauseKind.WEIGHTS, "rollout", {"weights": "step 3"}),
    "layer 1 with weights of step 3 in the rollout": (CauseKind.LAYER, "rollout", {"weights": "step 3", "layer": 1}),
}


QUICK = ("the rollout in fp32", "logits in bf16 in the rollout", "the rollout's cache in fp8 of scale 1, cut off",
         "fused residual norms in the rollout", "temperature applied twice in the learner",
         "layer 1 with weights of step 3 in the rollout")  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.variants) for name in FAULTS]
)
def test_one_fault_is_found_by_name_with_all_of_the_gap(name: str) -> None:
    kind, which, change = FAULTS[name]
    base = replace(BF16, temperature=0.7)
    sides = {"learner": base, "rollout": base} | {which: replace(base, **change)}
    result = found(made.injected(POLICY, **sides, versions=LATER), (base, base))
    assert (result.causes[0].kind, result.causes[0].side, result.causes[0].name) == (kind, which, name)
    assert result.causes[0].share == pytest.approx(1.0, abs=1e-6)
    assert named(result)["unexplained"] == pytest.approx(0.0, abs=1e-6)
    assert {"learner": result.found[0], "rollout": result.found[1]} == sides
    assert result.rms[f"{which} found"] < 1e-6 < 1e-4 < result.rms[f"{which} base"]


@pytest.mark.parametrize("kind", ["zeros", "e4m3 without scales"])
def test_a_damaged_layer_is_found(kind: str) -> None:
    dump = made.injected(POLICY, BF16, replace(BF16, weights=kind, layer=0), damages(POLICY))
    result = found(dump, versions=None)
    assert named(result) == pytest.approx({f"layer 0 with weights of {kind} in the rollout": 1, "unexplained": 0})
    assert result.causes[0].fault


def test_a_truncated_support_is_found_where_the_dump_does_not_say() -> None:
    result = found(made.injected(POLICY, BF16, replace(BF16, top_p=0.9)), settings=Settings())
    assert named(result) == pytest.approx({"top-p 0.9 in the rollout": 1, "unexplained": 0})


def test_the_tokens_that_a_dump_says_were_kept_are_its_support() -> None:
    """No top-k or top-p could be guessed here: at each position other tokens were dropped, and none at every third."""
    draw = np.random.default_rng(0)
    sequences = []
    for each in made.texts():
        sampled = each.tokens[each.prompt_length :]
        kept = [np.union1d(draw.choice(CONFIG.vocab_size, 20), [t]) if n % 3 else None for n, t in enumerate(sampled)]
        sequences.append(replace(each, kept=kept))
    scores = Scores(POLICY, sequences)
    whole, cut = scores.all([BF16, replace(BF16, kept=True)])
    gained = cut - whole  # -log p(kept)
    thirds = np.concatenate([np.arange(len(each.mask)) % 3 == 0 for each in sequences])
    assert (gained[thirds] == 0).all()
    assert (gained[~thirds] > 0.1).all()
    result = found(made.with_logps(sequences, whole, cut), settings=Settings())
    assert named(result) == pytest.approx({"the kept tokens alone in the rollout": 1, "unexplained": 0})
    processed = Settings(logprobs_mode="processed_logprobs", top_k=5)
    assert declared(Scores(POLICY, made.with_logps(sequences, whole, cut)), processed)[1].kept


def test_two_sources_share_the_gap_and_the_shares_add_up() -> None:
    dump = made.injected(
        POLICY, replace(BF16, cache=Cache.OWN), replace(BF16, logits="bf16", weights="step 3"), LATER, 48
    )
    one, other = (made.injected(POLICY, BF16, replace(BF16, **change), LATER, 48) for change in (
        {"logits": "bf16"}, {"weights": "step 3"}))  # fmt: skip
    sizes = [sum(float(np.square(s.learner_logp - s.rollout_logp)[s.mask].sum()) for s in d) for d in (one, other)]
    result = found(dump, settings=Settings(temperature=1.0))
    shares = named(result)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["weights of step 3 in the rollout"] == pytest.approx(sizes[1] / sum(sizes), abs=0.02)
    faint = sizes[0] / sum(sizes)  # logits are no cause that is worth a name here, unless their share is
    assert ("logits in bf16 in the rollout" in shares) == (faint > 0.01)


def test_half_of_a_gap_of_two_roundings_is_the_learners() -> None:
    """A rollout that rounds as coarsely, elsewhere: nothing that merely shakes its roundings may explain anything."""
    sequences = made.texts(64)
    learner, plain = Scores(POLICY, sequences).all([BF16, Side("fp32")])
    draw = np.random.default_rng(0)
    rounding = learner - plain
    dump = made.with_logps(sequences, learner, plain + draw.permutation(rounding))
    result = found(dump, versions=None)
    assert [(cause.kind, cause.side) for cause in result.causes] == [
        (CauseKind.ROUNDING, "learner"), (CauseKind.UNEXPLAINED, None)]  # fmt: skip
    assert result.causes[0].share == pytest.approx(0.5, abs=0.1)
    assert result.causes[0].low < 0.5 < result.causes[0].high


@pytest.mark.parametrize("seed", range(2))
def test_noise_of_no_source_is_unexplained(seed: int) -> None:
    sequences = made.texts(seed=seed)
    learner = Scores(POLICY, sequences)(BF16)
    heavy = np.random.default_rng(seed).standard_t(2.5, len(learner)) * 0.02
    result = found(made.with_logps(sequences, learner, learner + heavy))
    assert named(result) == pytest.approx({"unexplained": 1.0}, abs=1e-9)


def test_equal_sides_have_nothing_to_explain() -> None:
    result = found(made.injected(POLICY, BF16, BF16))
    assert named(result) == {"unexplained": 0.0}
    assert result.rms["d"] == 0.0


def test_adapters_that_were_left_out_are_found() -> None:
    policy = made.model()
    attach(policy, LoraShape(4, 8.0, ("q_proj", "down_proj"), False), torch.Generator().manual_seed(1))
    for name, parameter in policy.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(2))
    versions, whole = adapter_versions(policy), plain_policy(policy)
    for name in ("the base without its adapter", "the adapter scaled by alpha / sqrt(rank)"):
        dump = made.injected(whole, BF16, replace(BF16, weights=name), versions)
        result = found(dump, model=whole, versions=versions)
        assert named(result) == pytest.approx({f"weights of {name} in the rollout": 1, "unexplained": 0}, abs=1e-6)
    assert plain_policy(POLICY) is POLICY
    assert adapter_versions(POLICY) == {}


# scores


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
def test_scores_are_those_of_the_learners_own_forward(name: str) -> None:
    sequences = made.texts(6)
    flat = Scores(POLICY, sequences)(Side(name, temperature=0.8))
    prompts = [s.tokens[: s.prompt_length].tolist() for s in sequences]
    answers = [s.tokens[s.prompt_length :].tolist() for s in sequences]
    policy = PrecisionPolicy(train=name, rollout=name)
    batch = Sequences.build(prompts, answers, torch.device("cpu"))
    logp_BR = Scorer(POLICY, Side(name).kernels("cpu"), 0.8, 4096)(batch)
    assert resolve(policy, "cpu").learner.name == resolve(policy, "cpu").rollout.name
    assert flat == pytest.approx(logp_BR[batch.mask_BR].double().numpy(), abs=2e-5 if name == "fp32" else 0.05)
    assert np.median(np.abs(flat - logp_BR[batch.mask_BR].double().numpy())) < 1e-5


def test_tokens_without_both_log_probs_are_left_out() -> None:
    dump = made.injected(POLICY, BF16, replace(BF16, logits="bf16"))
    dump[2].rollout_logp[1], dump[3].mask[0] = np.nan, False
    dump[4].learner_logp[:] = -np.inf
    scores = Scores(POLICY, dump)
    left_out = 2 + len(dump[4].mask)
    assert len(scores.d) == sum(len(each.mask) for each in dump) - left_out
    assert scores(BF16) == pytest.approx(scores.learner, abs=1e-6)


def test_a_version_is_looked_at_and_put_back() -> None:
    sequences = made.texts(4)
    scores = Scores(POLICY, sequences, LATER)
    before = {name: parameter.clone() for name, parameter in POLICY.named_parameters()}
    later = made.model()
    later.load_state_dict(LATER["step 3"])
    assert scores(Side("fp32", weights="step 3")) == pytest.approx(Scores(later, sequences)(Side("fp32")), abs=1e-6)
    assert all(torch.equal(before[name], parameter) for name, parameter in POLICY.named_parameters())


def test_caches_round_as_they_say() -> None:
    x = torch.cat([torch.linspace(-500, 500, 4001), torch.linspace(-0.02, 0.02, 801)]).view(2, -1)
    nearest, cut = cached(x, Cache.UNSCALED), cached(x, Cache.CUT_OFF)
    bounded = x.clamp(-448, 448)
    assert torch.equal(nearest, bounded.to(torch.float8_e4m3fn).float())
    assert torch.equal(cut, cut.to(torch.float8_e4m3fn).float())
    assert bool((cut.abs() <= bounded.abs()).all())
    assert bool((cut * bounded >= 0).all())
    step = torch.where(bounded.abs() < 2.0**-6, 2.0**-9, 2.0 ** (bounded.abs().log2().floor() - 3))
    assert bool((bounded.abs() - cut.abs() < step).all())
    assert cached(x, Cache.OWN) is x


def test_what_a_dump_does_not_say_is_read_from_the_learners_log_probs() -> None:
    fp16 = Side("fp16")
    scores = Scores(POLICY, made.injected(POLICY, fp16, replace(fp16, logits="fp16")))
    assert declared(scores, Settings()) == (fp16, fp16)
    assert declared(scores, Settings(rollout_format="fp8_e4m3", learner_format="bfloat16")) == (BF16, Side("fp8"))
    raw = Settings(learner_format="bf16", temperature=0.7, logprobs_mode="raw_logprobs", top_p=0.9)
    assert declared(scores, raw) == (Side("bf16", temperature=0.7), BF16)
    processed = replace(raw, logprobs_mode="processed_logprobs")
    assert declared(scores, processed)[1] == Side("bf16", temperature=0.7, top_p=0.9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda each: replace(each, tokens=each.tokens + 60), "the dump is of another model"),
        (lambda each: replace(each, tokens=each.tokens - 60), "the dump is of another model"),
        (lambda each: made.longer(each, 60), "the model takes"),
        (lambda each: made.longer(each, 0, 0), "1 prompt token or more"),
        (lambda each: replace(each, rollout_logp=each.rollout_logp * np.nan), "no token with a finite log-prob"),
        (lambda each: replace(each, rollout_logp=each.rollout_logp[1:]), "log-probs"),
    ],
)
def test_a_dump_that_is_not_the_models_is_refused(change: Any, said: str) -> None:
    with pytest.raises(MantissaError, match=said):
        Scores(POLICY, [change(each) for each in made.texts(9)])


def test_too_few_sequences_are_refused() -> None:
    with pytest.raises(MantissaError, match="expected 8 or more"):
        found(made.injected(POLICY, BF16, replace(BF16, logits="bf16"), count=7))
