"""The data that check is made of, made anew by the verl that is installed."""

from __future__ import annotations

import json
from pathlib import Path

from mantissa.launch.scripts import Override
from mantissa.launch.verl_tree import defaults, refusals
from verl_facts import CORPUS, TREE, accepted, accepted_by, composed, tree_of

N = "actor_rollout_ref.rollout."
HAND = [f"+{N}dtype=x", f"+{N}quantization=fp8", f"+{N}quantization=fp8", f"{N}dtype=null", f"+{N}dtype=x", "a.b=1",
        "++a.b=1", "a.b=2", "a.c=2", "+d={b: 1}", "d.b=2", "d={c:1}", "+d={c:1}", f"~{N}name", f"{N}name=x",
        f"{N}n.x=1", f"+{N}n.x=1"]  # fmt: skip


def _override(text: str) -> Override:
    key, _, value = text.partition("=")
    bare = key.lstrip("+~")
    return Override(bare, value, key.removesuffix(bare))


def test_the_tree_is_the_program_s(verl_folder: Path, verl_version: str) -> None:
    assert tree_of(verl_folder / "trainer" / "config") == json.loads(TREE.read_text())[verl_version]


def test_hydra_answers_as_its_rules_are_told_here(verl_folder: Path, verl_version: str) -> None:
    keys = list(defaults(verl_version, "megatron"))[::9]
    for texts in (HAND, [f"+{key}=1" for key in keys], [f"{key}=1" for key in keys], [f"~{key}" for key in keys]):
        ours = [not why for why in refusals(verl_version, "megatron", list(map(_override, texts)))]
        assert ours == accepted(verl_folder / "trainer" / "config", "megatron", texts)


def test_the_stored_verdicts_are_hydra_s(verl_folder: Path, verl_version: str) -> None:
    """Every eighth script of the corpus; ``make facts`` does all."""
    corpus = json.loads(CORPUS.read_text())
    if corpus["verl"] != verl_version:
        return
    bases = {
        name: composed(verl_folder / "trainer" / "config", [f"model_engine={name}"]) for name in ("dp", "megatron")
    }
    for script in [each for each in corpus["scripts"] if each["engine"] in bases][::8]:
        assert accepted_by(bases[script["engine"]], script["overrides"]) == script["accepted"], script["file"]
