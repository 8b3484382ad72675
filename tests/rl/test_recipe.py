"""Recipes: overrides, presets before fields, and one clear line for each mistake, with the nearest right key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mantissa.errors import MantissaError
from mantissa.rl.recipe import apply_overrides, load_recipe, make_config, parse_yaml

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_validates_and_says_what_it_is_for(recipe: Path) -> None:
    load_recipe(recipe)
    assert recipe.read_text().startswith("# ")


def test_configuration_survives_its_own_file(small: dict[str, Any]) -> None:
    config = make_config(small, "test")
    plain = config.model_dump(mode="json", exclude={"run_dir"})
    assert make_config(yaml.safe_load(yaml.safe_dump(plain)), "again") == config


def test_a_field_comes_after_the_preset_whatever_the_order() -> None:
    for overrides in (["precision=fp16", "precision.rollout=bf16"], ["precision.rollout=bf16", "precision=fp16"]):
        values = apply_overrides({"precision": "fp32"}, overrides)
        assert values["precision"] == {"preset": "fp16", "rollout": "bf16"}


def test_overrides_do_not_touch_what_they_were_given() -> None:
    original = {"optimizer": {"lr": 1.0}}
    assert apply_overrides(original, ["optimizer.lr=1e-4"]) == {"optimizer": {"lr": 1e-4}}
    assert original == {"optimizer": {"lr": 1.0}}


def test_a_loss_given_by_name_takes_fields(small: dict[str, Any]) -> None:
    small["algorithm"]["loss"] = "ppo_clip"
    config = make_config(apply_overrides(small, ["algorithm.loss.clip_high=0.3"]), "test")
    assert config.algorithm.loss.clip_high == 0.3


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("2E5", 2e5), ("-1.5e-2", -0.015), ("3", 3), ("null", None), ("[a, b]", ["a", "b"])],
)
def test_numbers_as_people_write_them(text: str, value: Any) -> None:
    assert parse_yaml(text, "test") == value


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.learning_rate=1"], r"unknown key 'optimizer\.learning_rate'.*known here: lr, warmup"),
        (["optimiser.lr=1"], r"unknown key 'optimiser'; did you mean 'optimizer'\?"),
        (["task.max_digit=3"], r"unknown key 'task\.max_digit'; did you mean 'max_digits'\?"),
        (["algorithm.loss.clip_hi=3"], r"unknown key 'algorithm\.loss\.clip_hi'; did you mean 'clip_high'\?"),
        (["model.fresh.hidden=3"], r"unknown key 'model\.fresh\.hidden'; did you mean 'hidden_size'\?"),
        (["rollout.top_p=0.9"], r"unknown key 'rollout\.top_p'"),
        (["precision.rolout=bf16"], r"unknown key precision\.rolout; did you mean 'rollout'\?"),
        (["precision=fp15"], r"unknown precision preset 'fp15'.*did you mean 'fp16'\?"),
        (["precision=fp8"], "no role runs in fp8 yet"),
        (["precision.rollout=int4"], r"precision\.rollout: unknown number format 'int4'"),
        (["steps=0"], r"steps: input should be greater than or equal to 1, got 0"),
        (["steps=many"], r"steps: input should be a valid integer.*got 'many'"),
        (["steps"], r"override 'steps': expected key=value"),
        (["steps.more=1"], r"override steps\.more: steps is 4, which has no fields"),
        (["name.more=1"], r"override name\.more: name is 'small', which has no field 'more'"),
        (["model.path=x"], r"exactly one of model\.path and model\.fresh"),
        (
            ["precision=fp16", "loss_scaling.rule=auto", "loss_scaling.growth_interval=100"],
            "loss_scaling.growth_interval does nothing with loss_scaling.rule=auto",
        ),
        (["precision=bf16", "loss_scaling.initial=1024"], "loss_scaling does nothing for a bf16 learner"),
        (["algorithm.aggregation_length=3"], "aggregation_length does nothing with aggregation=token_mean"),
        (["algorithm.correction=tis"], r"unknown correction 'tis'"),
        (["algorithm.correction.truncate_at=2"], "truncate_at: correction is 'token_tis'"),
        (["rollout.samples=1", "algorithm.advantage=rloo"], r"needs rollout\.samples of 2 or more"),
        (["task.kind=sudoku"], r"task: .*'sudoku'"),
        (["steps={"], r"override 'steps=\{'.*not valid YAML"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path: Path, small: dict[str, Any], overrides: list[str], message: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(small))
    with pytest.raises(MantissaError, match=message) as caught:
        load_recipe(recipe, overrides)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match="no recipe at"):
        load_recipe(tmp_path / "absent.yaml")
    for text, message in (
        ("steps: [1", "line 1.*not valid YAML"),
        ("- a list", "expected keys and values, got list"),
        ("steps: 1\nsteps: 2", "line 1: the key 'steps' is given twice"),
        ("name: x", r"missing key 'steps' \(and \d+ more\)"),
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(MantissaError, match=message):
            load_recipe(path)
