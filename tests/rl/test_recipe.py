"""Recipes: overrides, presets before fields, and one clear line for each mistake, with the nearest right key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mantissa.algorithms import GSPOConfig
from mantissa.errors import MantissaError
from mantissa.rl.config import AlgorithmConfig
from mantissa.rl.recipe import apply_overrides, load_recipe, make_config, parse_yaml

TOKEN_REJECTION = "{reject_unit: token, reject_by: k3, reject_high: 0.1}"
REINFORCE_PP = "algorithm.advantage=reinforce_pp"
FLOWRL = ("algorithm.reference={}", "algorithm.loss=flowrl")
RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))


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


def test_a_loss_by_name_brings_the_aggregation_of_its_definition(small: dict[str, Any]) -> None:
    def algorithm(*overrides: str) -> Any:
        return make_config(apply_overrides(small, overrides), "test").algorithm

    gspo = algorithm("algorithm.loss=gspo")
    assert (gspo.loss.clip_low, gspo.loss.clip_high, gspo.aggregation) == (3e-4, 4e-4, "seq_mean_token_mean")
    assert algorithm("algorithm.loss={kind: gspo, clip_high: 1e-3}").aggregation == "seq_mean_token_mean"
    assert algorithm("algorithm.loss=gspo", "algorithm.aggregation=token_mean").aggregation == "token_mean"
    assert AlgorithmConfig(loss=GSPOConfig()).aggregation == "seq_mean_token_mean"
    dapo = algorithm("algorithm.loss=dapo", "algorithm.loss.dual_clip=5")
    assert (dapo.loss.clip_high, dapo.loss.dual_clip, dapo.aggregation) == (0.28, 5.0, "token_mean")
    assert algorithm("algorithm.loss=cispo", "algorithm.correction=geometric_token_tis").aggregation == "token_mean"
    assert algorithm("rollout.samples=1", "algorithm.advantage=reinforce_pp").advantage == "reinforce_pp"


def test_the_name_flowrl_stands_for_all_that_it_is(small: dict[str, Any]) -> None:
    config = make_config(apply_overrides(small, [*FLOWRL, "algorithm.loss.beta=5"]), "test").algorithm
    assert (config.loss.kind, config.advantage, config.aggregation) == ("flowrl", "grpo", "seq_mean_token_mean")
    assert config.loss.beta == 5
    assert config.reference is not None
    assert config.reference.refresh_every is None


@pytest.mark.parametrize(
    ("said", "preset"),
    [("float16", "fp16"), ("half", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32"), ("{preset: half}", "fp16")],
)
def test_torchs_names_for_formats_are_understood_and_ours_recorded(
    small: dict[str, Any], said: str, preset: str
) -> None:
    config = make_config(apply_overrides(small, [f"precision={said}"]), "test")
    assert config.precision == {"preset": preset}
    assert config.precision_policy.train == config.precision_policy.rollout == preset
    roles = make_config(
        apply_overrides(small, ["precision.train=bfloat16", "precision.rollout=half"]), "test"
    ).precision_policy
    assert (roles.train, roles.rollout) == ("bf16", "fp16")


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
        (["precision.fp8.base=fp16"], r"precision\.fp8 does nothing where no role is fp8"),
        (["precision.rollout=int4"], r"precision\.rollout: unknown number format 'int4'"),
        (["steps=0"], r"steps: input should be greater than or equal to 1, got 0"),
        (["steps=many"], r"steps: expected a number, without quotes, got 'many'"),
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
        (["algorithm.loss=dapo", "algorithm.aggregation=seq_mean_token_mean"], "loss=dapo is a mean over all tokens"),
        (["algorithm.loss=dapo", "algorithm.loss.clip_hi=3"], r"'algorithm\.loss\.clip_hi'; did you mean 'clip_high'"),
        (["algorithm.loss=gspo", f"algorithm.correction={TOKEN_REJECTION}"], "one ratio for a whole sequence"),
        (["algorithm.loss=reinforce", "algorithm.correction=bypass"], "bypass does nothing with loss=reinforce"),
        (["algorithm.loss=reinforce", "algorithm.correction=token_tis_normalized"], "one micro-batch at a time"),
        (["algorithm.correction={bypass: true, mode: mask, level: token, mask_high: 2}"], "bypass takes no weights"),
        (["algorithm.correction.truncate_at=2"], "truncate_at: correction is 'token_tis'"),
        (["precision.reference=bf16"], r"precision\.reference=bf16 does nothing without a reference policy"),
        (["algorithm.loss=flowrl"], r"tilts a reference policy.*there is none; set algorithm\.reference=\{\}"),
        (["algorithm.kl.coefficient=0.1"], r"algorithm\.kl is the distance from a reference policy, and there is none"),
        (
            [*FLOWRL, "algorithm.advantage=dr_grpo"],
            "loss=flowrl takes the group-normalised reward, got advantage=dr_gr",
        ),
        ([*FLOWRL, "algorithm.aggregation=token_mean"], "loss=flowrl is a mean over sequences"),
        ([*FLOWRL, "algorithm.kl.coefficient=0.1"], "would hold the policy to the reference twice"),
        (
            [*FLOWRL, "algorithm.correction={reject_unit: token, reject_by: k1, reject_high: 2}"],
            "about whole responses",
        ),
        ([*FLOWRL, "algorithm.loss.bounds=[2, 3]"], r"two bounds with 1 between them.*got \[2\.0, 3\.0\]"),
        ([*FLOWRL, "algorithm.loss.betta=3"], r"unknown key 'algorithm\.loss\.betta'; did you mean 'beta'\?"),
        (
            ["algorithm.reference.refresh=3"],
            r"unknown key 'algorithm\.reference\.refresh'; did you mean 'refresh_every'",
        ),
        (["algorithm.reference.refresh_every=0"], r"algorithm\.reference\.refresh_every: input should be greater than"),
        (["rollout.samples=1", "algorithm.advantage=rloo"], r"needs rollout\.samples of 2 or more"),
        (["rollout.samples=1"], r"advantage=dr_grpo needs rollout\.samples of 2 or more: .* every advantage is 0"),
        (
            [*["rollout.samples=1", "rollout.prompts=1", "optimizer.updates_per_batch=1"], REINFORCE_PP],
            r"reinforce_pp compares completions, and a step has one; raise rollout\.prompts",
        ),
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
