"""What is said of hydra's verdicts, against those of hydra itself, which ``make facts`` stores."""

from __future__ import annotations

import json
import re

import pytest

from mantissa.doctor.facts import facts
from mantissa.launch import check_verl
from mantissa.launch.facts import ENGINES, FACTS, IGNORED, Engine, full
from mantissa.launch.scripts import Override
from mantissa.launch.verl_tree import Tree, defaults, groups, refusals
from verl_facts import CORPUS, TREE

TREES = json.loads(TREE.read_text())
N = "actor_rollout_ref.rollout."
CORPUS_ = json.loads(CORPUS.read_text())


def test_public_scripts_are_refused_where_hydra_refuses_them() -> None:
    """Every override of verl's and verl-recipe's published scripts that start its trainer, as check answers."""
    assert sum(len(script["overrides"]) for script in CORPUS_["scripts"]) >= 1_500
    differing = []
    for script in CORPUS_["scripts"]:
        taken = zip(script["overrides"], script["accepted"], strict=True)
        report = check_verl([f"model_engine={script['engine']}", *script["overrides"]], CORPUS_["verl"])
        said, hydra = [str(each.given) for each in report.refused], [text for text, accepted in taken if not accepted]
        differing += [(script["file"], said, hydra)] if said != hydra else []
        told = {str(each.given) for each in report.that("refused by hydra")}
        differing += [(script["file"], told, said)] if not {text.partition("=")[0] for text in told} <= {
            text.partition("=")[0] for text in said} else []  # fmt: skip
    assert differing == []


@pytest.mark.parametrize("mark", ["", "+", "++"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_table_s_keys_are_refused_where_hydra_refuses_them(engine: Engine, mark: str) -> None:
    """Every key of the table, on every engine: its verdict is hydra's."""
    keys = [full(key) for key in dict.fromkeys((*FACTS, *(row.key for row in IGNORED)))]
    keys = [key for key in keys if key not in ("actor_rollout_ref.actor.strategy", N + "name")]
    group = "megatron" if engine == "megatron" else "dp"
    start = [f"model_engine={group}", *([] if engine == "megatron" else [f"actor_rollout_ref.actor.strategy={engine}"])]
    order = [Override(key, "x", mark) for key in keys]
    report = check_verl([*start, *map(str, order)])
    whys = refusals("0.9.1", group, order)
    hydra = {key for key, why in zip(keys, whys, strict=True) if why}
    about = {each.given.key for each in report.settings if each.given.key in keys}
    assert {each.given.key for each in report.that("refused by hydra")} == hydra & about
    assert {each.given.key for each in report.refused} == hydra


@pytest.mark.parametrize(("version", "group"), [(v, g) for v in TREES for g in groups(v)])
def test_references_to_null_are_those_that_hydra_resolves_to_null(version: str, group: str) -> None:
    tree = Tree(defaults(version, group))
    referring = [key for key, value in defaults(version, group).items() if isinstance(value, str) and "${" in value]
    assert {key for key in referring if tree.is_null(key)} == set(TREES[version]["nulls"][group])


def test_the_table_s_keys_that_the_tree_has_not_stand_in_free_sections() -> None:
    """A key that is written wrong would be new in a section whose keys verl has."""
    sections = {fact.key.rpartition(".")[0] for fact in FACTS.values() if fact.new and fact.kind != "handed"}
    assert {section.rpartition(".")[2] for section in sections} == {
        "mixed_precision", "trainer", "sampler_kwargs", "override_transformer_config",
        "override_config", "override_optimizer_config", "reward_kwargs", "overlong_buffer_cfg",
        "rollout_correction"}  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ([Override(N + "dtype", "x", "+")], [True]),
        ([Override(N + "quantization", "fp8", "+"), Override(N + "quantization", "fp8", "+")], [False, True]),
        ([Override(N + "dtype", "null"), Override(N + "dtype", "x", "+")], [False, False]),
        ([Override("a.b", "1"), Override("a.b", "1", "++"), Override("a.b", "2"), Override("a.c", "2")],
         [True, False, False, True]),
        ([Override("a", "{b: 1}", "+"), Override("a.b", "2"), Override("a", "{c:1}"), Override("a", "{c:1}", "+")],
         [False, False, True, False]),
        ([Override(N + "dtype", "", "~"), Override(N + "dtype", "x"), Override(N + "dtype", "", "~")],
         [False, True, True]),
        ([Override(N + "dtype.x", "1"), Override(N + "dtype.x", "1", "+")], [True, False]),
    ],
)  # fmt: skip
def test_hydra_s_rules(overrides: list[Override], refused: list[bool]) -> None:
    """A test in verl's environment has hydra's own answers to the same: ``real/test_facts.py``."""
    assert [bool(why) for why in refusals("0.9.1", "dp", overrides)] == refused


def _overrides_of(text: str) -> list[Override]:
    """The overrides that a remedy's keys for verl spell out."""
    found = re.finditer(r"(?:^|\s)(\+{0,2})((?:[a-z_]\w*\.)+\w+)=(\S+)", text)
    return [Override(match[2], match[3], match[1]) for match in found]


def test_hydra_takes_each_key_that_the_doctor_names_for_verl() -> None:
    texts = [text for row in facts().remedies.values() for text in row.keys.get("verl", ())]
    named = [override for text in texts for override in _overrides_of(text)]
    assert len(named) > 12
    for override in named:
        whys = [refusals("0.9.1", group, [override])[0] for group in groups("0.9.1")]
        assert "" in whys, f"{override}: {whys}"
    wrong = Override("actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion", "False")
    assert refusals("0.9.1", "megatron", [wrong]) == ["the key is not in verl's tree"]
