"""What is said of TRL's settings, against what TRL's own configuration objects hold (``make facts``)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mantissa.launch.facts import frameworks
from mantissa.launch.scripts import Given, plain
from mantissa.launch.settings import Checked, check_settings
from trl_facts import ANSWERS

STORED = json.loads(ANSWERS.read_text())


def checked(**settings: object) -> Checked:
    return check_settings(Given({key: plain(value) for key, value in settings.items()}), "trl")


@pytest.mark.parametrize(("case", "resolved"), STORED["cases"], ids=str)
def test_the_learner_s_format_is_what_trl_resolves(case: dict[str, Any], resolved: Any) -> None:
    found = checked(**case)
    if isinstance(resolved, str):
        assert {each.verdict for each in found.wrong} == {"refused"}
        return
    assert found.wrong == []
    learner = next(role.active for role in found.roles if role.name == "learner")
    name = "fp16" if resolved["fp16"] else "bf16" if resolved["bf16"] else "the weights' format (float32)"
    assert learner.startswith(name)


def test_the_table_s_defaults_are_trl_s() -> None:
    table = frameworks()["trl"]
    assert table.version == STORED["trl"]
    known = {key: fact.default for key, fact in table.keys.items() if key in STORED["fields"] and fact.read != ""}
    assert len(known) > 15
    assert known == {key: plain(STORED["fields"][key][0]) for key in known}
    assert STORED["model"]["dtype"][0] == "float32"


@pytest.mark.parametrize("key", ["model_init_kwargs.dtype", "dtype", "torch_dtype"])
def test_masters_are_float32_unless_said(key: str) -> None:
    assert next(role.active for role in checked(bf16=True).roles if role.name == "masters") == "float32"
    found = checked(**{"bf16": True, key: "bfloat16"})
    assert next(role.active for role in found.roles if role.name == "masters") == "bfloat16"
    assert [(each.given.key, each.verdict) for each in found.wrong] == [(key, "harmful")]
    fp16 = checked(**{"fp16": True, key: "float16"})
    assert {each.given.key for each in fp16.wrong} == {"fp16", key}
    assert all("unscale FP16 gradients" in each.why for each in fp16.wrong)


def test_a_format_that_was_not_understood_is_not_stated() -> None:
    roles = {role.name: role.active for role in checked(use_vllm=True, vllm_fp8_mode="on", amp_level="O2").roles}
    assert (roles["rollout"], roles["learner"]) == ("not known (vllm_fp8_mode)", "not known (amp_level)")
