"""``mantissa doctor --model`` and ``mantissa tune``, as a user calls them, on the small run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import injected as made
from dumps import write_plain
from html_page import Page
from mantissa.base.errors import MantissaError
from mantissa.doctor.readers import read_dump
from mantissa.doctor.sides import Scores, Side
from mantissa.model import load_model
from mantissa.precision import PrecisionPolicy
from mantissa.rl.doctor_model import open_for_doctor
from mantissa.training.checkpoint import load_checkpoint

Mantissa = Callable[..., Any]
FP16 = Side("fp16")


@pytest.fixture(scope="module")
def dump(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another framework's log-probs of the run's policy: the rollout's logits were in fp16."""
    model = load_model(finished / "policy")
    sequences = made.texts(16, words=model.config.vocab_size)
    both = Scores(model, sequences).all([FP16, replace(FP16, logits="fp16")])
    path = tmp_path_factory.mktemp("dump") / "dump.jsonl"
    settings = {"rollout_format": "fp16", "learner_format": "fp16", "temperature": 1.0}
    return write_plain(path, made.with_logps(sequences, *both), **settings)


def test_causes_and_layers_are_on_the_screen_and_the_page(
    mantissa: Mantissa, finished: Path, dump: Path, tmp_path: Path
) -> None:
    said = mantissa("doctor", dump, "--model", finished, "--by-layer", "--out", tmp_path / "page")
    assert said.code in (0, 1), said
    words = " ".join(said.out.split())
    assert "100.0% (100.0% to 100.0%) logits in fp16 in the rollout: its numbers come back as they were" in words
    assert "precision.logits" not in words  # of a plain dump nothing is known of the framework
    assert '--hf-overrides \'{"head_dtype": "float32"}\'' in words
    assert words.index("log-probs") > words.index("layer 0")
    row = json.loads((tmp_path / "page" / "doctor.json").read_text())
    assert [cause["name"] for cause in row["causes"]] == ["logits in fp16 in the rollout", "unexplained"]
    text = (tmp_path / "page" / "doctor.html").read_text()
    assert "Each hypothesis on its own" in text
    assert "Where the difference enters, by layer" in text
    assert Page(text)


def test_a_run_is_scored_at_the_version_that_sampled(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = read_dump(finished)
    monkeypatch.setattr("mantissa.rl.doctor_model._version", lambda run, step: step - 1)
    dump = replace(dump, sequences=[
        replace(each, rollout_version=number % 3, learner_version=number % 3)
        for number, each in enumerate(dump.sequences)
    ])  # fmt: skip
    policy = open_for_doctor(str(finished), dump, None, torch.device("cpu"))
    assert {each.rollout_version for each in policy.dump.sequences} == {1}  # of 2 there is no checkpoint
    saved = [load_checkpoint(finished / "checkpoints", step).policy for step in (1, 2)]
    assert list(policy.versions) == ["version 0 (this is version 1)"]
    for weights, expected in ((policy.versions["version 0 (this is version 1)"], saved[0]),
                              (dict(policy.model.named_parameters()), saved[1])):  # fmt: skip
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_run_scores_as_it_sampled(finished: Path) -> None:
    policy = open_for_doctor(str(finished), read_dump(finished), None, torch.device("cpu"))
    scores = Scores(policy.model, policy.dump.sequences, policy.versions)
    assert scores(FP16) == pytest.approx(scores.rollout, abs=1e-3)


def test_a_run_without_a_gap_has_no_causes(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    said = mantissa("doctor", finished, "--model", finished, "--out", tmp_path / "page")
    assert "causes were not looked for: d is" in " ".join(said.out.split()), said
    assert json.loads((tmp_path / "page" / "doctor.json").read_text())["causes"] == []


def test_a_run_whose_checkpoints_sampled_nothing_is_refused(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for step in (1, 2):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    with pytest.raises(MantissaError, match=r"checkpoints are of versions none, samples of 0"):
        open_for_doctor(str(run), read_dump(run), None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine", "http://127.0.0.1:9"), "--engine needs the model"),
        (("--by-layer",), "--by-layer needs the model"),
        (("--model", "MODEL", "--engine", "ftp://x"), "expected a server's address"),
        (("--model", "MODEL", "--engine", "http://127.0.0.1:9"), "that is running there"),
        (("--model", "MODEL", "--other", "OTHER"), "other names or shapes"),
        (("--model", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_error(
    mantissa: Mantissa, finished: Path, dump: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    other = tmp_path / "other"
    if "OTHER" in options:
        from mantissa.model import load_tokenizer, save_model

        model = made.model(config=replace(load_model(finished / "policy").config, num_hidden_layers=2))
        save_model(model, load_tokenizer(finished / "policy", model.config.vocab_size), other)
    named = [{"MODEL": str(finished), "OTHER": str(other)}.get(option, option) for option in options]
    assert said in mantissa("doctor", dump, "--out", tmp_path / "page", *named).error()
    assert not (tmp_path / "page").exists()


def test_tune_writes_a_recipe_that_is_one(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{number}=\n" for number in range(12, 24)))
    options = ("--prompts", prompts, "--max-tokens", 4, "--blocks", 1, "--out", tmp_path / "tuned")
    said = mantissa("tune", finished, "--budget", 0.002, *options)
    assert said.code == 0, said
    cells = [line.split("  ")[0].strip() for line in said.out.splitlines()]  # the table's first column, wrapped
    assert "tuned: sensitivity of the gap" in " ".join(cells), said.out
    assert {path.name for path in (tmp_path / "tuned").iterdir()} >= {"tune.yaml", "tune.jsonl", "verl.txt"}
    recipe = yaml.safe_load((tmp_path / "tuned" / "tune.yaml").read_text())
    policy = PrecisionPolicy.parse(recipe["precision"])
    rows = [json.loads(line) for line in (tmp_path / "tuned" / "tune.jsonl").read_text().splitlines()]
    sets = {row["set"]: row for row in rows if "set" in row}
    taken = [row["group"] for row in rows if row.get("fp8")]
    assert (policy.rollout == "fp8") == bool(taken)
    assert sets["everything in fp8"]["fp8_share"] == 1.0
    assert sets["tuned: sensitivity of the gap"]["fp8_share"] == pytest.approx(
        sum(row["parameters"] for row in rows if row.get("fp8")) / sum(row.get("parameters", 0) for row in rows)
    )
    for words, expected in (
        (("--budget", 0), "--budget 0"), (("--figure", "std"), "--figure std"), (("--base", "fp32"), "--base fp32"),
        (("--blocks", 2), "--blocks 2"), (("--max-tokens", 0), "Invalid value for '--max-tokens'"),
    ):  # fmt: skip
        assert expected in mantissa("tune", finished, *options, *words).error()


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_fitness_says_whether_fp16_holds_a_model(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    from mantissa.model import load_tokenizer, save_model

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{number}=\n" for number in range(12, 16)))
    options = ("--prompts", prompts, "--max-tokens", 4)
    said = mantissa("fitness", finished, *options)
    assert said.code == 0, said
    assert "fp16 has room for all that was seen" in " ".join(said.out.split())
    recipe = yaml.safe_load(said.out.split("for a recipe\n")[1])
    assert PrecisionPolicy.parse(recipe["precision"]).train == "fp16"
    said = mantissa("fitness", finished, *options, "--json", "--step-tokens", 4096)
    whole, *rows = [json.loads(line) for line in said.out.splitlines()]
    assert (whole["fits"], whole["step_tokens"], whole["not_finite_in_fp16"]) == (True, 4096, None)
    assert whole["scale"] == recipe["loss_scaling"]["initial"] or whole["scale"] > 0
    assert {"model.layers.0.mlp.down_proj", "lm_head"} <= {row["module"] for row in rows}

    model = load_model(finished / "policy")
    model.get_parameter("model.layers.0.mlp.down_proj.weight").data *= 1e8
    save_model(model, load_tokenizer(finished / "policy", model.config.vocab_size), tmp_path / "large")
    said = mantissa("fitness", tmp_path / "large", *options)
    assert said.code == 1, said
    assert "modules go beyond 65,504; train in bf16" in " ".join(said.out.split())
    assert "for a recipe" not in said.out
    assert "nowhere" in mantissa("fitness", "nowhere", *options).error()
