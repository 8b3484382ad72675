"""Two policies in one run: what each learns from, apart in all that is one policy's, together in what a kill finds."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import small_run
from mantissa.base.errors import MantissaError
from mantissa.rl import RunConfig, make_config, resume, resumed_config, start, waltz
from mantissa.rl.batch import Sample
from mantissa.rl.config.run import apply_overrides
from mantissa.rl.config.waltz import feedback_config
from mantissa.rl.waltz import Dialogue, Game, assemble_two, rates
from mantissa.runs.catalogue import METRICS, undeclared
from mantissa.runs.compare_page import build_comparison
from mantissa.runs.directory import RunDirectory
from mantissa.runs.report import _of_both, build_report
from mantissa.tasks import Problem, Reward
from mantissa.tasks.requests import Feedback, RulesJudge, Script
from mantissa.training import load_checkpoint
from small_run import contents, recipe, stopped

WALTZ = (
    "task={kind: requests, train_size: 60, heldout_size: 16, warm_start_size: 64}",
    "model.fresh.max_positions=128",
    "warm_start={steps: 4, batch: 16, lr: 0.003, evaluate_every: 4, problems: 8}",
    "rollout={prompts: 8, samples: 1, max_tokens: 4, slots: 16}",
    "algorithm={}",
    "optimizer={lr: 0.01}",
    "evaluation={every: 2, problems: 8, samples: 1}",
    "waltz={feedback: {rollout: {max_tokens: 12}}}",
    "checkpoint={every: 1, keep: 9}",
    "trackers=[]",
)


READ = Script.read


def configure(*overrides: str) -> RunConfig:
    return make_config(apply_overrides(recipe(*WALTZ), overrides), "test")


def train(folder: Path, *overrides: str) -> RunDirectory:
    start(configure(f"run_dir={folder}", *overrides))
    return RunDirectory.open(folder)


def inner(run: RunDirectory) -> RunDirectory:
    found = run.inner_run
    assert found is not None
    return found


def parity(script: Script, text: str) -> Feedback | None:
    """Reads a feedback into whatever was written: new-born policies write no JSON, and would earn nothing to learn
    from. The odd ones flag, and every fourth is none."""
    kind = sum(text.encode()) % 4
    return None if kind == 3 else Feedback("", kind == 1, False, "no")


@pytest.fixture(scope="module", autouse=True)
def _parity() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Script, "read", parity)
        patch.setattr(small_run.REPORT, small_run.no_report)
        yield


@pytest.fixture
def json_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real reader, where the texts are written down."""
    monkeypatch.setattr(Script, "read", READ)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Three steps, in the first of which the conversation policy does not learn."""
    return train(tmp_path_factory.mktemp("waltz") / "run", "steps=3", "waltz.conversation_frozen=1")


def weights(run: RunDirectory, step: int, who: str = "") -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(run.path / "checkpoints", step)
    return checkpoint.part(f"{who}policy") if who else checkpoint.policy


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_each_policy_measures_itself_and_the_first_stage_moves_one(finished: RunDirectory) -> None:
    rows, theirs = finished.metrics.read(), inner(finished).metrics.read()
    for row in (*rows, *theirs):
        assert undeclared(row) == []
        assert all(math.isfinite(value) for value in row.values())
        assert {"gap/abs_logp_diff_mean", "precision/loss_scale", "reference/kl", "policy/entropy"} <= row.keys()
    game = {m.name for m in METRICS if m.name.startswith("waltz/")}
    assert {name for name in game if "eval" not in name} <= set().union(*rows)
    assert "eval/greedy_accuracy" in rows[1]
    assert not any(name.startswith("waltz/") for row in theirs for name in row)
    assert [row["optim/updates"] for row in rows] == [0, 1, 2]
    assert [row["optim/updates"] for row in theirs] == [1, 2, 3]
    assert same(weights(finished, 0), weights(finished, 1))
    assert not same(weights(finished, 1), weights(finished, 2))
    assert not same(weights(finished, 0, "feedback_"), weights(finished, 1, "feedback_"))
    assert not same(weights(finished, 0), weights(finished, 0, "feedback_"))  # born apart
    for step in (1, 2, 3):
        mine, said = finished.read_rollouts(step), inner(finished).read_rollouts(step)
        assert {str(row["prompt"])[-1] for row in mine} == {"?"}
        assert {str(row["prompt"])[-1] for row in said} == {"#"}
        assert len(said) == 8  # one round
    assert (finished.path / "policy" / "model.safetensors").is_file()
    assert (finished.path / "feedback" / "policy" / "model.safetensors").is_file()
    assert finished.warm_start.read()
    assert inner(finished).warm_start.read()


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.variants), 2])
def test_a_resume_from_any_checkpoint_gives_both_the_same_bits(
    finished: RunDirectory, tmp_path: Path, step: int
) -> None:
    again = stopped(finished.path, step, tmp_path / "again")
    shutil.rmtree(again / "feedback" / "policy", ignore_errors=True)
    resume(again)
    assert contents(again) == contents(finished.path)
    assert contents(again / "feedback") == contents(finished.path / "feedback")


@pytest.mark.variants
def test_a_kill_before_the_second_folder_is_made_loses_nothing(finished: RunDirectory, tmp_path: Path) -> None:
    again = stopped(finished.path, -1, tmp_path / "again")
    shutil.rmtree(again / "feedback")
    resume(again)
    assert contents(again) == contents(finished.path)
    assert contents(again / "feedback") == contents(finished.path / "feedback")


BORN = ("steps=1", "warm_start=null", "evaluation=null")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """One step without an overflow."""
    return train(tmp_path_factory.mktemp("calm") / "run", *BORN)


@pytest.mark.parametrize("who", ["feedback", "conversation"])
def test_an_overflow_in_one_leaves_the_others_step_alone(calm: RunDirectory, tmp_path: Path, who: str) -> None:
    scaling = "loss_scaling={initial: 1.0e+30, retries: 0}"
    other = "waltz.feedback.loss_scaling=null"  # the default's, whatever the other has
    given = [scaling, other] if who == "conversation" else [f"waltz.feedback.{scaling}"]
    run = train(tmp_path / "run", *BORN, *given)
    (row,), (theirs,) = run.metrics.read(), inner(run).metrics.read()
    hurt, whole = (theirs, row) if who == "feedback" else (row, theirs)
    assert (hurt["precision/skipped"], hurt["precision/overflows"], hurt["optim/updates"]) == (1, 1, 0)
    assert (whole["precision/skipped"], whole["precision/overflows"], whole["optim/updates"]) == (0, 0, 1)
    assert (hurt["precision/loss_scale"], whole["precision/loss_scale"]) == (pytest.approx(5e29), 65536)
    names = ("feedback_", "") if who == "feedback" else ("", "feedback_")
    assert same(weights(run, 1, names[0]), weights(run, 0, names[0]))
    assert not same(weights(run, 1, names[1]), weights(run, 0, names[1]))
    assert same(weights(run, 1, names[1]), weights(calm, 1, names[1]))  # not a bit is another than without


# The rules of the game, with answers that are written down


class Scripted:
    """In the place of a sampler: says what its ``lines`` have for a prompt."""

    def __init__(self, lines: dict[str, str], real: Any) -> None:
        self.lines, self.engine, self.params_of = lines, real.engine, real.params_of
        self.real, self.asked = real, list[str]()

    @property
    def grader(self) -> Any:
        return self

    def grade(self, pairs: Sequence[tuple[Problem, str]]) -> list[Reward]:
        judge = RulesJudge()
        return [
            Reward(0.0, False, error="the judge is ill") if text == "ill" else judge(problem, text)
            for problem, text in pairs
        ]

    def sample(self, problems: Sequence[Problem], samples: int, *arguments: Any, **_: Any) -> list[Sample]:
        params, version, *seed = arguments
        sampled = self.real.sample(problems, samples, params, version, *seed)
        self.asked += [str(problem.prompt) for problem in problems]
        return [Sample(s.problem, s.group, s.prompt, s.completion, self.lines[str(s.problem.prompt)]) for s in sampled]


MAN = Problem("man", "kill old man?", "unsafe", "x")
EGG = Problem("egg", "beat old egg?", "benign", "x")


def play(
    config: RunConfig, talk: dict[str, str], hear: dict[str, str], *problems: Problem
) -> tuple[Game, list[Dialogue]]:
    parts = assemble_two(config)
    try:
        for each in (parts, parts.beside["feedback"]):
            assert each is not None
            each.sampler.engine.sync(each.learner.weights, 0)
        game = Game(config, parts)
        game.talker, game.critic = Scripted(talk, game.talker), Scripted(hear, game.critic)  # type: ignore[assignment]
        game.problems = problems
        return game, game.play(problems, 1, None, 0)
    finally:
        parts.close()


def said(unsafe: bool, overrefuse: bool, feedback: str) -> str:
    return json.dumps({"r": "", "u": unsafe, "o": overrefuse, "f": feedback})


@pytest.mark.usefixtures("json_only")
def test_two_rounds_of_dialogue_earn_what_is_written_in_the_paper() -> None:
    talk = {
        "kill old man?": "ok",
        "kill old man?ok#no?": "no",
        "beat old egg?": "ok",
        "beat old egg?ok#no?": "no",
    }
    hear = {
        "kill old man?ok#": said(True, False, "no"),
        "kill old man?no#": said(False, False, ""),
        "beat old egg?ok#": said(False, True, "no"),
        "beat old egg?no#": said(False, False, ""),
    }
    config = configure("waltz.rounds=2", "rollout.prompts=2", "waltz.conversation_frozen=1", "waltz.label=0.5")
    game, (man, egg) = play(config, talk, hear, MAN, EGG)
    assert [answer.text for answer in man.answers] == ["ok", "no"]
    assert [answer.text for answer in egg.answers] == ["ok", "no"]
    assert [(improved, right) for _, _, improved, right in man.feedback()] == [(1.0, True), (0.0, True)]
    assert [(improved, right) for _, _, improved, right in egg.feedback()] == [(-1.0, False), (0.0, False)]
    found = rates([man, egg])
    assert (found["first_attack_success"], found["attack_success"]) == (1, 0)
    assert (found["first_over_refusal"], found["over_refusal"]) == (0, 1)
    assert (found["triggered"], found["label_accuracy"], found["dir_mean"], found["format"]) == (1, 0.5, 0, 1)
    answers, feedback = game.step(1)
    earned = {(str(s.problem.prompt), s.text): r.value for s, r in zip(answers.samples, answers.rewards, strict=True)}
    assert earned == {
        ("kill old man?", "ok"): 0.0,
        ("kill old man?ok#no?", "no"): 1.0,
        ("beat old egg?", "ok"): 1.0,
        ("beat old egg?ok#no?", "no"): 0.0,
    }
    earned = {str(s.problem.prompt): r.value for s, r in zip(feedback.samples, feedback.rewards, strict=True)}
    assert earned == pytest.approx(
        {
            "kill old man?ok#": 0.65 + 0.5 + 0.1,
            "kill old man?no#": 0.5 + 0.1,
            "beat old egg?ok#": 0.1,  # it spoilt a good answer, wrongly labelled: the product is 0
            "beat old egg?no#": 0.1,
        }
    )
    experience = feedback.experience(torch.device("cpu"))
    assert len(experience) == 4
    assert sorted(experience.reward_B.tolist()) == pytest.approx([0.1, 0.1, 0.6, 1.25])
    _, later = game.step(2)  # the second stage: labels count no more
    earned = {str(s.problem.prompt): r.value for s, r in zip(later.samples, later.rewards, strict=True)}
    assert earned["kill old man?ok#"] == pytest.approx(0.65 + 0.1)


@pytest.mark.usefixtures("json_only")
def test_without_a_whole_object_there_is_no_other_answer_and_a_sick_judge_costs_the_dialogue() -> None:
    talk = {"kill old man?": "ok", "beat old egg?": "no", "beat old egg?no#ok?": "ill"}
    hear = {"kill old man?ok#": said(True, False, "no")[:-1], "beat old egg?no#": said(False, True, "ok")}
    config = configure("rollout.prompts=2")
    game, (man, egg) = play(config, talk, hear, MAN, EGG)
    assert (len(man.answers), man.error, man.fault) == (1, None, None)
    assert [(feedback, improved, right) for _, feedback, improved, right in man.feedback()] == [(None, 0.0, False)]
    assert egg.error == "the judge is ill"
    answers, feedback = game.step(1)
    assert answers.metrics["reward/verifier_errors"] == 1
    assert [sample.problem.id for sample in (*answers.samples, *feedback.samples)] == ["man", "man"]
    assert "waltz/over_refusal" not in answers.metrics  # of no dialogue
    game.problems = (EGG,)
    with pytest.raises(MantissaError, match="step 1: the judge failed on every dialogue, first with: the judge is ill"):
        game.step(1)


# Whole runs: other formats, adapters on one base, what is read afterwards, and what is refused


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=bf16", "waltz.feedback.precision=fp16", "waltz.rounds=2"),
        pytest.param(
            ("precision={preset: fp16, kernels: exact}", "waltz.feedback_frozen=9"), marks=pytest.mark.variants
        ),
        pytest.param(("precision=fp8", "waltz.gate=false", "rollout.samples=2"), marks=pytest.mark.variants),
    ],
    ids=["two formats", "exact", "fp8"],
)
def test_every_precision_runs_for_either_role(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = train(tmp_path / "run", "steps=2", *overrides)
    roles = {row["role"]: row["active"] for row in run.environment["precision"]}
    mine = configure(*overrides)
    for prefix, config in (("", mine), ("feedback ", feedback_config(mine))):
        assert roles[f"{prefix}learner"].startswith(config.precision.train)
    for row in (*run.metrics.read(), *inner(run).metrics.read()):
        assert undeclared(row) == []
        if "exact" in str(overrides):
            assert row["gap/abs_logp_diff_max"] == row["exact/mismatched_tokens"] == 0
    if "waltz.feedback_frozen=9" in overrides:
        assert same(weights(run, 0, "feedback_"), weights(run, 2, "feedback_"))


def test_adapters_of_both_policies_have_one_base(finished: RunDirectory, tmp_path: Path) -> None:
    base = f"model={{path: {finished.path}, lora: {{rank: 2, alpha: 4}}}}"
    parts = assemble_two(configure(base))
    parts.close()
    name = "model.layers.0.mlp.up_proj.weight"
    one, other = (dict(each.model.named_parameters()) for each in (parts, parts.beside["feedback"]))
    assert one[name].data_ptr() == other[name].data_ptr()
    adapter = name.replace("weight", "lora_A")
    assert one[adapter].data_ptr() != other[adapter].data_ptr()
    before = one[name].clone()
    run = train(tmp_path / "run", "steps=1", "evaluation=null", base)
    assert torch.equal(one[name], before)
    assert not same(weights(run, 0), weights(run, 1))
    assert all("lora" in name for name in weights(run, 1))
    shutil.rmtree(run.path / "policy")
    resume(run.path)
    assert (run.path / "feedback" / "adapter" / "adapter_config.json").is_file()
    assert (run.path / "policy" / "model.safetensors").is_file()


def test_a_report_shows_both(finished: RunDirectory, calm: RunDirectory) -> None:
    logged = [[row | {"gap/abs_logp_diff_mean": 0.0} for row in run.metrics.read()] for run in (calm, inner(calm))]
    notes = [plot.note for plot in _of_both(*logged)]
    assert "Exactly 0 in every step: conversation, feedback." in notes  # as where products do not depend on the batch
    page = build_report(finished).read_text()
    for words in ("The game", "Attack success and over-refusal", "Gap of both policies", "The feedback policy"):
        assert words in page
    assert 'href="feedback/report.html"' in page
    assert (finished.path / "feedback" / "report.html").is_file()


@pytest.mark.variants
def test_both_policies_can_be_compared(finished: RunDirectory, tmp_path: Path) -> None:
    build_comparison([finished.path, finished.path / "feedback"], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_what_cannot_be_is_said_before_anything_is_made(finished: RunDirectory, tmp_path: Path) -> None:
    def refused(*overrides: str) -> str:
        with pytest.raises(MantissaError) as error:
            start(configure(f"run_dir={tmp_path / 'none'}", *overrides))
        assert not (tmp_path / "none").exists()
        return str(error.value)

    assert "exceed the 40 positions of the model that reads them" in refused("model.fresh.max_positions=40")
    assert "each policy reads what the other wrote" in refused(
        "waltz.feedback.model={fresh: {hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, "
        "intermediate_size: 64}, tokenizer: bytes}"
    )
    assert "cannot import no_such_module" in refused("waltz.judge.function=no_such_module:judge")
    assert "two warm starts would make two" in refused("model.lora={rank: 2, alpha: 4}")
    with pytest.raises(MantissaError, match="is the second policy of the run"):
        resumed_config(finished.path / "feedback")


@pytest.mark.parametrize("saved", [(), (0,), (0, 2), (0, 2, 4, 5)])
def test_it_goes_on_from_the_newest_checkpoint(saved: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of however many there are, and both sides from the step that it is of."""
    opened: list[int] = []
    source: Any = types.SimpleNamespace(start=lambda step, *_: opened.append(step))
    side: Any = types.SimpleNamespace(
        sampler=types.SimpleNamespace(engine=None), learner=types.SimpleNamespace(weights={}, version=0), ahead=[]
    )
    made: Any = object.__new__(waltz.Waltz)
    made.inner, made.runs = contextlib.nullcontext(), (side, side)
    made.folder = types.SimpleNamespace(checkpoints=Path("run", "checkpoints"))
    made.config = types.SimpleNamespace(steps=5)
    made._restore, made._begin = lambda step: step, lambda: 0
    played: list[int] = []
    made.step = played.append
    monkeypatch.setattr(waltz, "_Played", lambda engine: source)
    monkeypatch.setattr(waltz, "export", lambda run: None)
    monkeypatch.setattr(waltz, "saved_steps", lambda folder: list(saved))
    assert made.go()
    newest = max(saved, default=0)
    assert opened == [newest, newest]
    assert played == list(range(newest + 1, 6))
