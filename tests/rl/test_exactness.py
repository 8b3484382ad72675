"""Exact kernels in a run: nothing differs, and whatever is made to differ on one side is caught, named and replayed."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from mantissa.base.errors import MantissaError
from mantissa.cli import app
from mantissa.kernels import ExactBf16Kernels, ExactKernels, Kernels, NativeKernels, Planned, cpu, plan_exact
from mantissa.model import Decoder, ModelConfig, load_model
from mantissa.precision import E4M3, FP32, PrecisionPolicy, round_to_format
from mantissa.rl import assemble, replay, session
from mantissa.rl import step as steps
from mantissa.rl.experience import Experience, Sequences
from mantissa.rl.learner import Learner
from mantissa.rl.probes import Exactness
from mantissa.rl.replay import Case, read_case, write_case
from mantissa.rl.run import Run
from mantissa.rl.score import forward
from mantissa.rollout import Call, NativeEngine, Request, SamplingParams, generation
from mantissa.rollout.sampling import sample, uniforms
from mantissa.runs.directory import RunDirectory

Train = Callable[..., RunDirectory]
QUICK = ("steps=2", "warm_start.steps=6", "warm_start.evaluate_every=6", "task.reward=prefix", "evaluation=null")
EXACT = (*QUICK, "precision.kernels=exact")
SHORT = (*EXACT, "steps=1", "warm_start=null", "rollout.prompts=2", "checkpoint.every=9")


@pytest.mark.parametrize(
    "more",
    [
        ("precision=fp32", "optimizer.updates_per_batch=1", "algorithm.correction=bypass"),
        ("precision=bf16", "optimizer.micro_batch_tokens=40", "rollout.slots=5"),
        ("precision=fp8",),
        (
            "precision.kv_cache=bf16",
            "model.lora={rank: 4, alpha: 8}",
            "algorithm={reference: {}, kl: {coefficient: 0.1}}",
        ),
    ],
    ids=["fp32", "bf16", "fp8", "fp16 with adapters, a reference and a coarser cache"],
)
def test_no_log_prob_differs(train: Train, more: tuple[str, ...]) -> None:
    rows = train(*EXACT, *more).metrics.read()
    for row in rows:
        assert row["exact/mismatched_tokens"] == row["exact/update_mismatched_tokens"] == 0
        assert row["exact/checked_tokens"] == row["gap/tokens"] > 50
        for name, value in row.items():
            if name.startswith("gap/") and name not in ("gap/tokens", "gap/seq_log_ratio_slope"):
                nothing = 1.0 if name in ("gap/ess", "gap/pearson", "gap/ppl_ratio", "gap/equal_fraction") else 0.0
                assert value == nothing, name
        assert row["correction/weight_mean"] == row["correction/weight_max"] == 1.0
        if "precision=fp32" in more:  # the anchor is the rollout's log-prob
            assert (row["policy/ratio_max"], row["policy/ratio_mean"], row["policy/kl_old"]) == (1, 1, 0)
    if "precision.kv_cache=bf16" in more:
        assert rows[0]["reference/kl"] == 0  # as the learner: equal weights, equal bits


def test_unchecked_steps_learn_the_same_without_the_forward(train: Train) -> None:
    every = train(*EXACT, "steps=4", "precision.check_every=1")
    some = train(*EXACT, "steps=4", "precision.check_every=2")
    rows = some.metrics.read()
    assert [row.get("exact/mismatched_tokens") for row in rows] == [0, None, 0, 0]  # the last one always
    for row in rows:
        checked = "exact/checked_tokens" in row
        measured = ("gap/k3_kl" in row, "policy/entropy" in row, "time/learner_logp" in row)
        assert measured == (checked, checked, checked)  # what was not measured is not logged
    one, other = (load_model(run.policy_path).state_dict() for run in (every, some))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(row["learner_logp"] is None for row in some.read_rollouts(2))
    assert all(row["learner_logp"] == row["rollout_logp"] for row in some.read_rollouts(4))


# Mutations: one side is given an operation that is correct, and not the other's


class Silu(ExactKernels):
    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        return F.silu(gate_NE) * up_NE * (1 + 2**-10)  # seen in a log-prob of any policy, whatever silu a CPU has


class PerTensor(ExactKernels):
    def linear(self, x_NE: Tensor, weight_FE: Any, bias_F: Tensor | None = None, layer: str = "") -> Tensor:
        assert self.fp8 is not None
        if not self.fp8.quantizes(layer):
            return super().linear(x_NE, weight_FE, bias_F, layer)
        scale = x_NE.abs().amax() / E4M3.largest  # of everybody in the batch
        values = round_to_format(x_NE / scale, E4M3) * scale
        return round_to_format(self.product(values, weight_FE, bias_F), self.format)


def mutated(kind: Any) -> Callable[..., Kernels]:
    made = assemble.rollout_kernels

    def build(precision: Any, plan: Any = None) -> Kernels:
        kernels = made(precision, plan)
        assert isinstance(kernels, Planned)
        kernels.__class__ = kind
        return kernels

    return build


class SiluOfBf16(ExactBf16Kernels):
    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        return F.silu(gate_NE) * up_NE * (1 + 2**-6)


class LogSoftmax(ExactKernels):
    """A log-prob that is right, and another: x_t - logsumexp(x)."""

    def token_logprob(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> Tensor:
        picked = logits_NV.gather(-1, tokens_N.unsqueeze(-1)).squeeze(-1)
        return picked / temperature - torch.logsumexp(logits_NV / temperature, -1)


class Weighed(ExactKernels):
    """Experts whose weights are a little off."""

    def scale(self, x_NE: Tensor, weight_N: Tensor) -> Tensor:
        return super().scale(x_NE, weight_N * (1 + 2**-10))


MIXTURE = (
    "model.fresh={family: qwen3_moe, experts: 4, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16, \
intermediate_size: 24, max_positions: 64, initializer_range: 0.1}"
)
MUTATIONS = [  # numbers of every operation are compared on the way to the last one
    (Silu, "fp32", r"swiglu after model\.layers\.0\.mlp\.up_proj"),
    (PerTensor, "fp8", r"model\.layers\.0\.self_attn\.[qkv]_proj"),
    (LogSoftmax, "fp16", r"token_logprob"),
    (SiluOfBf16, "bf16", r"swiglu after model\.layers\.0\.mlp\.up_proj"),
    (Weighed, "fp32", r"experts (after|before) model\.layers\.\d\.self_attn\.\w+"),
]


def replayed(file: Path) -> tuple[int, str]:
    """Exit code and output, on one line, of ``mantissa replay``."""
    found = CliRunner().invoke(app, ["replay", str(file), "--device", "cpu"])
    assert found.exception is None or isinstance(found.exception, SystemExit)
    return found.exit_code, found.output.replace("\n", " ")


@pytest.mark.parametrize(("kind", "precision", "said"), MUTATIONS, ids=lambda value: getattr(value, "__name__", None))
def test_what_differs_on_one_side_is_caught_named_and_replayed(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, precision: str, said: str, request: Any
) -> None:
    if kind is SiluOfBf16:
        request.getfixturevalue("bf16_is_own")
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(kind))  # what is probed, and what samples
    if kind is PerTensor:
        with pytest.raises(MantissaError, match="fp8 is not active in the PerTensor on cpu"):
            train(*SHORT, f"precision={precision}")  # the probe sees it first
        monkeypatch.setattr(assemble, "prove", lambda *given: {})
    # Without opinions q, k and v round alike.
    opinions = MIXTURE if kind is Weighed else "model.fresh.initializer_range=0.1"
    with pytest.raises(MantissaError) as caught:
        train(*SHORT, f"precision={precision}", opinions)
    message = str(caught.value)
    assert message.startswith("step 1: exact kernels, and yet ")
    found = re.search(rf"they part in {said} at position \d+: \d+ of \d+ numbers differ", message)
    assert found, message
    (file,) = tmp_path.glob("run-*/mismatch-step-1.safetensors")
    assert f"mantissa replay {file}" in message

    code, out = replayed(file)  # kernels without the mutation
    assert (code, "not reproduced here (cpu): every operation gives both sides the same numbers" in out) == (0, True)
    assert re.search(r"run's two sides: [1-9]\d* of \d+ .* rollout, here against the run: [1-9]\d* of", out)
    assert "the learner, here against the run: 0 of " in out  # which says whose numbers the run's rollout lost
    monkeypatch.setattr(replay, "rollout_kernels", mutated(kind))
    code, out = replayed(file)
    assert (code, "reproduced here (cpu): they part in" in out) == (1, True)
    assert found.group() in out
    assert "the rollout, here against the run: 0 of " in out
    assert message.partition("; replay it")[0] in out
    assert read_case(file).precision.kernels == "exact"


def test_a_case_keeps_what_its_tokens_were_drawn_from(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(Silu))
    with pytest.raises(MantissaError, match="they part in swiglu"):
        train(*SHORT, "rollout.top_k=5", "rollout.top_p=0.9")
    (file,) = tmp_path.glob("run-*/mismatch-step-1.safetensors")
    assert read_case(file).case.part.support is not None
    code, out = replayed(file)
    assert (code, "the learner, here against the run: 0 of " in out) == (0, True)
    monkeypatch.setattr(replay, "rollout_kernels", mutated(Silu))
    assert replayed(file)[0] == 1

    def other(facts: Any, tensors: Any) -> None:
        tensors["support.words"] = torch.zeros_like(tensors["support.words"])

    with pytest.raises(MantissaError, match="supports: they are not those of the responses"):
        read_case(damaged(file, tmp_path / "other.safetensors", other))


def test_recorded_tokens_are_forced(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another uniform for every draw: whoever sampled again would trace other sequences than those recorded."""
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(Silu))
    with pytest.raises(MantissaError) as caught:
        train(*SHORT)
    (file,) = tmp_path.glob("run-*/mismatch-step-1.safetensors")
    named = re.search(r"they part in (.*?);", str(caught.value))
    stored = read_case(file)
    assert stored.case.call.tokens[stored.case.job] == stored.case.response
    assert len(stored.case.call.tokens) == 8
    assert None not in stored.case.call.tokens
    monkeypatch.setattr(generation, "uniforms", lambda keys, positions: uniforms(keys ^ 12345, positions))
    assert replayed(file)[0] == 0
    monkeypatch.setattr(replay, "rollout_kernels", mutated(Silu))
    code, out = replayed(file)
    assert (code, named is not None and named.group(1) in out) == (1, True)
    assert "the rollout, here against the run: 0 of " in out

    # A file of version 1 holds neither the tokens of batch mates nor log-probs.
    with safe_open(file, "pt") as handle:
        facts = json.loads(handle.metadata()["mantissa_case"])
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    old = {name: tensor for name, tensor in tensors.items() if not name.startswith(("call.", "logp."))}
    save_file(old, file, {"mantissa_case": json.dumps({**facts, "version": 1})})
    code, out = replayed(file)
    assert (code, named is not None and named.group(1) in out, "the file is of version 1" in out) == (1, True, True)


def another_law(**changed: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """``sample`` by other parameters, with the log-probs of the right ones."""

    def law(logits: Tensor, params: Any, uniform: Tensor, logprob: Any, forced: Any) -> tuple[Tensor, Tensor]:
        tokens, _ = sample(logits, dataclasses.replace(params, **changed), uniform, forced_B=forced)
        return tokens, logprob(logits, tokens, params.temperature)

    return law


def test_tokens_drawn_from_another_law_are_caught(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their log-probs are the learner's, to the bit; it is the draw that is another's."""
    monkeypatch.setattr(generation, "sample", another_law(top_k=6))
    with pytest.raises(MantissaError, match=r"1: \d+ of \d+ tokens are not those that their uniforms select") as said:
        train(*SHORT, "rollout.temperature=0.8")
    assert re.search(r"response token \d+ is \d+, and the uniform 0\.\d+ selects \d+", str(said.value))
    (file,) = tmp_path.glob("run-*/mismatch-step-1.safetensors")
    code, out = replayed(file)
    assert (code, "drawn anew, it comes out the same" in out, "run's two sides: 0 of" in out) == (1, True, True)
    monkeypatch.setattr(generation, "sample", sample)
    code, out = replayed(file)
    assert (code, "drawn anew, it comes out otherwise" in out, "not reproduced here" in out) == (0, True, True)
    monkeypatch.setattr(replay, "drawn_otherwise", lambda logits, *_: torch.arange(len(logits)) >= 2)
    assert "response token 2 is" in replayed(file)[1]  # the first of those


def test_what_does_not_come_back_is_written_too(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A bit that flips on the way from the engine; and a step whose call nobody kept."""
    built = Experience.of

    def flip(*given: Any) -> Experience:
        experience = built(*given)
        experience.rollout_logp_BR.view(torch.int32)[3, 0] ^= 1
        return experience

    monkeypatch.setattr(Experience, "of", staticmethod(flip))
    with pytest.raises(MantissaError, match=r"1 of \d+ log-probs differ.*; not reproduced; the run's two sides: 1 of"):
        train(*SHORT)
    (file,) = tmp_path.glob("run-0/mismatch-step-1.safetensors")
    code, out = replayed(file)
    assert (code, "the rollout, here against the run: 1 of" in out, "not reproduced here" in out) == (0, True, True)
    monkeypatch.setattr(NativeEngine, "calls", property(lambda self: [], lambda self, value: None), raising=False)
    with pytest.raises(MantissaError, match="not reproduced"):
        train(*SHORT)
    (file,) = tmp_path.glob("run-1/mismatch-step-1.safetensors")
    assert (replayed(file)[0], read_case(file).case.key) == (0, None)


def on_other_kernels(self: Learner, sequences: Any, kernels: Any, **also: Any) -> Any:
    """The learner's forward, but with gradients on on kernels of its own."""
    if torch.is_grad_enabled():
        kernels = copy.copy(kernels)
        kernels.__class__ = Silu
    return forward(self.model, kernels, sequences, self.temperature, **also)


def test_the_update_s_own_forward_is_compared(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(Learner, "forward", on_other_kernels)
    with pytest.raises(MantissaError, match=r"update's own forward, .* gives \d+ log-probs .* has other kernels"):
        train(*SHORT, "precision=fp32")
    assert (tmp_path / "run-0" / "mismatch-step-1.safetensors").exists()
    rows = train(*SHORT, "precision=fp32", "precision.on_mismatch=warn").metrics.read()
    assert rows[0]["exact/update_mismatched_tokens"] > 0
    assert rows[0]["exact/mismatched_tokens"] == rows[0]["exact/misdrawn_tokens"] == 0
    assert "warning: step 1: the update's own forward" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("broken", "step", "said"), [(Silu, 2, "own forward"), (another_law(temperature=1.7), 3, "uniforms")]
)
def test_a_fault_between_checks_and_in_the_last_step(
    train: Train, monkeypatch: pytest.MonkeyPatch, broken: Any, step: int, said: str
) -> None:
    """Of three steps the first and last are checked; the update of the second compares what it computes anyway."""
    stepped = steps.take_step

    def break_and_step(run: Run, number: int) -> dict[str, Any]:
        if number == step and broken is Silu:
            run.sampler.engine.kernels.__class__ = Silu  # type: ignore[attr-defined]
        elif number == step:
            monkeypatch.setattr(generation, "sample", broken)
        return stepped(run, number)

    monkeypatch.setattr(session, "take_step", break_and_step)
    with pytest.raises(MantissaError, match=f"step {step}: .*{said}"):
        train(*EXACT, "steps=3", "precision=fp32", "precision.check_every=9")  # warm, so that some rewards differ


def test_a_warning_goes_on_and_counts(train: Train, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(Silu))
    rows = train(*EXACT, "precision=fp32", "precision.on_mismatch=warn").metrics.read()
    assert all(0 < row["exact/mismatched_tokens"] <= row["exact/checked_tokens"] for row in rows)
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("warning: step") == 2
    assert "they part in swiglu" in out


def test_a_log_prob_changed_after_it_was_taken(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(*arguments: Any) -> tuple[Tensor, Tensor]:
        tokens, logp = sample(*arguments)
        return tokens, torch.nextafter(logp, torch.tensor(-math.inf))

    monkeypatch.setattr(generation, "sample", off_by_one)
    with pytest.raises(MantissaError, match="they part in what a side makes of token_logprob, which agrees, at"):
        train(*SHORT)


def test_a_file_that_is_no_case(tmp_path: Path) -> None:
    path = tmp_path / "mismatch.safetensors"
    for content in (None, b"", b"not safetensors at all"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(MantissaError, match=r"expected the file that a run with precision\.kernels=exact wrote"):
            read_case(path)


def damaged(file: Path, to: Path, change: Any) -> Path:
    """``file`` with its facts and tensors changed."""
    with safe_open(file, "pt") as handle:
        facts = json.loads(handle.metadata()["mantissa_case"])
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    change(facts, tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, to, {"mantissa_case": json.dumps(facts)})
    return to


DAMAGE: dict[str, Callable[[Any, Any], Any]] = {
    "a newer version": lambda f, t: f.update(version=3),
    "an odd version": lambda f, t: f.update(version=[["x"] * 500]),
    "no engine": lambda f, t: f.pop("engine"),
    "no temperature": lambda f, t: f.pop("temperature"),
    "an infinite temperature": lambda f, t: f.update(temperature=float("inf")),
    "requests that are none": lambda f, t: f.update(requests=7),
    "a million samples": lambda f, t: f["requests"][0].update(samples=1 << 40),
    "a prompt outside the vocabulary": lambda f, t: f["requests"][0].update(prompt_tokens=[10**6]),
    "a job that there is not": lambda f, t: f.update(job=99),
    "a row that there is not": lambda f, t: f.update(row=-1),
    "a model of a million layers": lambda f, t: f["model"].update(num_hidden_layers=10**6),
    "a model of no known kind": lambda f, t: f["model"].update(surprise=1),
    "no model": lambda f, t: f.update(model=None),
    "an unknown precision": lambda f, t: f["precision"].update(train="fp7"),
    "slots beyond memory": lambda f, t: f["engine"].update(slots=1 << 50),
    "slots of another type": lambda f, t: f["engine"].update(slots=[1]),
    "max_tokens beyond memory": lambda f, t: f["params"].update(max_tokens=1 << 50),
    "no embedding": lambda f, t: t.pop("weights.model.embed_tokens.weight"),
    "a weight too many": lambda f, t: t.update({"weights.other": torch.zeros(3)}),
    "a misshapen weight": lambda f, t: t.update({"weights.model.norm.weight": torch.zeros(3)}),
    "a weight of NaN": lambda f, t: t["weights.model.norm.weight"].fill_(math.nan),
    "a weight in half": lambda f, t: t.update({"weights.model.norm.weight": torch.zeros(32).half()}),
    "no tokens": lambda f, t: t.pop("part.tokens_BT"),
    "tokens outside the vocabulary": lambda f, t: t["part.tokens_BT"].fill_(10**6),
    "tokens as floats": lambda f, t: t.update({"part.tokens_BT": t["part.tokens_BT"].float()}),
    "lengths beyond the tokens": lambda f, t: t["part.length_B"].fill_(10**6),
    "a mask of another shape": lambda f, t: t.update({"part.mask_BR": torch.ones(1, 1, dtype=torch.bool)}),
    "a mask with holes": lambda f, t: t["part.mask_BR"].fill_(False),
    "answers cut short": lambda f, t: t.update({"call.tokens": t["call.tokens"][:-1]}),
    "negative lengths": lambda f, t: t["call.lengths"].neg_(),
    "a word that there is none of": lambda f, t: t["call.tokens"][-1:].fill_(1 << 20),
    "a word below the first": lambda f, t: t["call.tokens"][-1:].fill_(-1),
    "another answer": lambda f, t: t["call.tokens"].fill_(1),
    "fewer log-probs": lambda f, t: t.update({"logp.rollout": t["logp.rollout"][:-1]}),
    "log-probs in half": lambda f, t: t.update({"logp.learner": t["logp.learner"].half()}),
    "no log-probs": lambda f, t: t.pop("logp.learner"),
}


@pytest.fixture(scope="module")
def case_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as a run writes it, of a policy that nobody trained."""
    folder = tmp_path_factory.mktemp("case")
    model = Decoder(ModelConfig("llama", 13, 32, 24, 1, 2, 1, 16, max_position_embeddings=32)).initialize(
        torch.Generator().manual_seed(0)
    )
    policy = PrecisionPolicy(train="fp32", rollout="fp32", kernels="exact")
    call = Call((Request((1, 2), 5, 2),), SamplingParams(4), ((3, 4, 5), (6,)))
    part = Sequences.build([(1, 2), (1, 2)], [(3, 4, 5), (6,)], torch.device("cpu"))
    engine = NativeEngine(model.config, NativeKernels(FP32), kv_format=FP32, slots=2, max_length=16)
    case = Case(call, 0, part, 0, 1.0, torch.zeros(3), torch.zeros(3), call.keys[0])
    write_case(folder / "case.safetensors", case, model.config, policy, engine, model.state_dict(), "a note")
    return folder / "case.safetensors"


def test_a_case_comes_back(case_file: Path) -> None:
    stored = read_case(case_file)
    assert stored.case.call.tokens == ((3, 4, 5), (6,))
    assert (stored.case.response, stored.slots, stored.note) == ((3, 4, 5), 2, "a note")
    code, out = replayed(case_file)  # its tokens were not drawn, its log-probs are not the policy's
    assert (code, "selects" in out, "the learner, here against the run: 3 of 3" in out) == (0, True, True)


@pytest.mark.parametrize("row", [0, 1])
def test_a_case_whose_micro_batch_has_an_empty_response_comes_back(case_file: Path, tmp_path: Path, row: int) -> None:
    """The sequence that differs beside one without a token, before it or after; by itself an empty one has no case."""
    answers = [(3, 4, 5), ()] if row == 0 else [(), (3, 4, 5)]
    stored = read_case(case_file)
    part = Sequences.build([(1, 2), (1, 2)], answers, torch.device("cpu"))
    engine = NativeEngine(stored.model, NativeKernels(FP32), kv_format=FP32, slots=2, max_length=16)
    for place in (row, 1 - row):
        logp = torch.zeros(len(answers[place]))
        case = dataclasses.replace(stored.case, part=part, row=place, rollout_logp_T=logp, learner_logp_T=logp.clone())
        write_case(tmp_path / "case", case, stored.model, stored.precision, engine, stored.weights, "a note")
        if place == row:
            assert read_case(tmp_path / "case").case.response == (3, 4, 5)
            assert replayed(tmp_path / "case")[0] == 0
            continue
        with pytest.raises(MantissaError, match="part: what it holds does not fit together"):
            read_case(tmp_path / "case")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_case_is_one_clear_error(case_file: Path, tmp_path: Path, damage: str) -> None:
    path = damaged(case_file, tmp_path / "case.safetensors", DAMAGE[damage])
    with pytest.raises(MantissaError, match=rf"^{re.escape(str(path))}: ") as caught:
        read_case(path)
    assert len(str(caught.value)) < len(str(path)) + 500


@pytest.mark.parametrize("token", [0, 1, 2])
def test_a_log_prob_that_alone_differs_is_named_by_its_place_in_the_sequence(
    case_file: Path, monkeypatch: pytest.MonkeyPatch, token: int
) -> None:
    """The first such token's, of a prompt of 2 and a response of 3: the position that predicts it, from 0."""
    stored = read_case(case_file)
    learner_T, rollout_T = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.0, -3.0])
    rollout_T[token:] += 0.5
    alike: Any = types.SimpleNamespace(digests={}, names=())
    monkeypatch.setattr(replay, "_both", lambda *_: (alike, alike, rollout_T, learner_T, torch.zeros(3, 13)))
    monkeypatch.setattr(replay, "first_difference", lambda *_: None)
    nobody: Any = None
    culprit = replay.examine(nobody, nobody, nobody, dataclasses.replace(stored.case, key=None)).culprit
    assert culprit is not None
    assert culprit.position == 1 + token
    assert (culprit.rollout.tolist(), culprit.learner.tolist()) == ([rollout_T[token]], [learner_T[token]])


class ShakyBf16(ExactBf16Kernels):
    """The same of a processor's own bf16: the step is sampled again, on weights that were laid out for other calls."""

    def _rounded(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        out_NF = super()._rounded(x_NE, weight_FE, bias_F)
        small = weight_FE.shape == (8, 8)
        return out_NF if small or self.plan.way != "tiles" else out_NF * (1 + 2**-6)


@pytest.mark.usefixtures("bf16_is_own")
def test_a_run_over_the_processors_own_bf16_is_resumed_to_the_same_bits(
    train: Train, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = (*EXACT, "precision=bf16", "checkpoint.every=1", "checkpoint.keep=9", "rollout.slots=5")
    run = train(*recipe)
    assert [row["exact/mismatched_tokens"] for row in run.metrics.read()] == [0, 0]
    assert {row["kernels"] for row in run.environment["precision"] if row["role"] in ("learner", "rollout")} == {
        "exact native"
    }
    assert "by bf16 products" in run.environment["exact"][0]
    before = load_model(run.policy_path).state_dict()
    shutil.rmtree(run.checkpoints / "step-2")
    monkeypatch.setattr(cpu, "products", lambda: cpu.CpuProducts(1.0))  # elsewhere; what is written in the run holds
    session.resume(run.path)
    after = load_model(run.policy_path).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)

    monkeypatch.setattr(cpu, "products", lambda: cpu.CpuProducts(0.5))
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(ShakyBf16))
    capsys.readouterr()
    again = train(*recipe)
    assert len(re.findall(PLANNED_ANEW, " ".join(capsys.readouterr().out.split()))) == 1
    assert [(row["exact/replans"], row["exact/mismatched_tokens"]) for row in again.metrics.read()] == [(1, 0), (1, 0)]


PLANNED_ANEW = "all kernels compute by (?:one tile|fp64) from here on, step 1 again"


class Shaky(ExactKernels):
    """Another library's path, which the probe did not meet, until the kernels compute in tiles of one size."""

    def product(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        out_NF = super().product(x_NE, weight_FE, bias_F)
        small = weight_FE.shape == (8, 8)  # the probe of the format
        if small or self.plan.way != "tiles":
            return out_NF
        return torch.nextafter(out_NF, torch.full_like(out_NF, math.inf))


def test_a_first_difference_moves_to_the_safer_plan_before_anything_is_learned(
    train: Train, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(Shaky))
    recipe = (*EXACT, "precision=fp32", "warm_start=null", "checkpoint.every=1", "checkpoint.keep=9")
    run = train(*recipe)
    out = " ".join(capsys.readouterr().out.split())
    assert len(re.findall(PLANNED_ANEW, out)) == 1
    rows = run.metrics.read()
    assert [(row["exact/replans"], row["exact/mismatched_tokens"]) for row in rows] == [(1, 0), (1, 0)]

    monkeypatch.setattr(assemble, "plan_exact", lambda *given: plan_exact(*given[:3], "one tile"))
    safe = train(*recipe)  # from the beginning: the same prompts and uniforms, so the same weights in the end
    assert [row["exact/replans"] for row in safe.metrics.read()] == [0, 0]
    one, other = (load_model(each.policy_path).state_dict() for each in (run, safe))
    assert all(torch.equal(one[name], other[name]) for name in one)

    monkeypatch.undo()
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(Shaky))
    shutil.rmtree(run.checkpoints / "step-2")
    session.resume(run.path)  # from step 1, with the plan that was then in use
    assert [row["exact/replans"] for row in run.metrics.read()] == [1, 1]
    again = load_model(run.policy_path).state_dict()
    assert all(torch.equal(again[name], other[name]) for name in again)


def test_no_second_plan_where_it_is_not_asked_for_or_something_was_learned(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(Shaky))
    with pytest.raises(MantissaError, match=r"step 1: .* log-probs differ"):
        train(*SHORT, "precision=fp32", "precision.on_mismatch=stop")
    observe = Exactness.observe
    monkeypatch.setattr(Exactness, "observe", lambda self, step, batch: {} if step == 1 else observe(self, step, batch))
    with pytest.raises(MantissaError, match=r"step 2: the update's own forward"):  # of a step that nobody compared
        train(*EXACT, "steps=3", "precision=fp32", "precision.check_every=2")
