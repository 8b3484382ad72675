"""Recipes, overrides and arguments that nobody should write: one line each, or what they say they are."""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import strategies as st

from hostile import attempt, fuzz, sizes
from mantissa.dropin import PrecisionTrainer
from mantissa.dropin.compat import ExtendedFP16Config, FP16TrainingConfig
from mantissa.rl.config.run import RunConfig, apply_overrides, load_recipe, make_config
from mantissa.training import ScalerConfig
from toys import mlp

RECIPE = """
name: small
steps: 4
model: {fresh: {hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16, intermediate_size: 64}}
task: {kind: running_sum, min_digits: 1, max_digits: 3, train_size: 200}
rollout: {prompts: 8, samples: 4, max_tokens: 6}
optimizer: {lr: 1e-3}
"""
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))
# Whole files, and what must be in the error.
FILES: dict[str, tuple[bytes, str]] = {
    "nul": (b"name: a\0b", "special characters are not allowed|expected"),
    "escape": (b"name: \x1b[2J", "special characters are not allowed|expected"),
    "utf-16": (RECIPE.encode("utf-16"), "UnicodeDecodeError.*UTF-8"),
    "surrogate": (rb'name: "\ud800"', "unicode string"),
    "date": (b"name: 2001-99-99", "line 1: '2001-99-99' is no timestamp"),
    "binary": (b"steps: 0b_", "'0b_' is no int"),
    "digits": (b"steps: " + b"9" * 5000, "is no int"),
    "hex": (b"steps: 0x" + b"f" * 5000, "more than 64 bits"),
    "bool": (b"steps: !!bool x", "'x' is no bool"),
    "map": (b"steps: !!map [1]", "expected a mapping"),
    "python": (b"steps: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "nested": (b"steps: " + b"[" * 900 + b"]" * 900, "200 brackets"),
    "nested lines": (b"- " * 900, "nested too deeply"),
    "bomb": (BOMB.encode(), "more than 5,000 values"),
    "merge bomb": (MERGES.encode(), "more than 5,000 values"),
    "itself": (b"a: &a [*a]", "an alias of what it is inside of"),
    "many": (b"a: [" + b"1," * 8_000 + b"]", "more than 5,000 values"),
    "long": (b"a: " + b"x" * 200_000, "more than 20,000 characters"),
    "infinite precision": (RECIPE.encode() + b"precision: -.inf", r"precision: expected a preset's name"),
    "numbers as keys": (RECIPE.encode() + b"precision: {1: 2}", "precision.1: Keys should be strings"),
    "a list as a key": (RECIPE.encode() + b"? [1, 2]\n: 3", "unhashable"),
    "nothing": (b"", "expected keys and values, got NoneType"),
    "two documents": (b"a: 1\n---\nb: 2", "found another document"),
}
# Values that are nonsense where they stand.
REFUSED = [
    "steps=true", "steps='20'", "steps=1e30", "steps=0x" + "f" * 5000, "steps=2001-01-01", "seed=1e30", "seed=-1",
    "optimizer.lr='1e-3'", "optimizer.lr=.nan", "optimizer.lr=.inf", "optimizer.lr=true", "optimizer.lr=1e-300",
    "optimizer.eps=.inf", "optimizer.eps=1e-300", "optimizer.betas=[0.9, 1.0]", "optimizer.betas=[-0.1, 0.9]",
    "optimizer.betas=[0.9, .nan]", "optimizer.betas=['0.9', 0.99]", "optimizer.max_grad_norm=1e-300",
    "optimizer.max_grad_norm=.nan", "optimizer.warmup=1e30", "rollout.temperature=.inf", "rollout.temperature=1e-300",
    "rollout.temperature=1e300", "rollout.prompts=1e12", "rollout.max_tokens=1e30", "model.fresh.rope_theta=.inf",
    "model.fresh.layers=1e30", "model.fresh.layers=100000", "model.fresh.hidden_size=1e30", "grading.workers=1e30",
    "grading.memory_gib=.inf", "grading.timeout_s=.inf", "nproc=1e9", "checkpoint.keep=1e30", "run_dir=\"a\\0b\"",
    "name=\"a\\0b\"", "precision=-.inf", "precision=[1]", "precision.check_every=true", "evaluation.samples=true",
    "algorithm.loss={kind: [a]}", "algorithm.loss=[a]", "algorithm.loss.clip_high=.inf", "task.kind=[x]",
    "algorithm.correction=[1, 2]", "trackers=[[1]]", "trackers=5", "model.fresh.heads=.nan", "rollout.stop=[\"\\0\"]",
]  # fmt: skip
ALLOWED = ["optimizer.max_grad_norm=.inf", "seed=9223372036854775807", "steps=20.0", "optimizer.lr=1"]
SCALING = ["growth_factor=.inf", "growth_factor='2'", "initial=.inf", "backoff_factor=true", "retries=1e30"]


def recipe(*overrides: str) -> RunConfig:
    return make_config(apply_overrides(yaml.safe_load(RECIPE.replace("1e-3", "0.001")), overrides), "recipe")


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    content, message = FILES[name]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    assert re.search(message, str(attempt(load_recipe, path, [])))
    assert attempt(load_recipe, path, ["steps=3", "a.b=1"]) is not None


def test_paths() -> None:
    for path in ("x" * 5000, "a\0b", "~nobody-of-this-name/x", "/dev/zero", "/", "\ud800"):
        assert attempt(load_recipe, path) is not None


def test_nonsense_is_refused_and_what_has_a_meaning_is_kept() -> None:
    for override in [*REFUSED, *(f"loss_scaling.{each}" for each in SCALING)]:
        assert attempt(recipe, "precision=fp16", override) is not None, override
    recipe(*ALLOWED)


WORDS = ["steps", "name", "model", "fresh", "layers", "task", "kind", "precision", "preset", "fp8", "exclude", "loss",
         "algorithm", "correction", "rollout", "prompts", "stop", "optimizer", "betas", "lr", "reward", "function",
         "verifier", "loss_scaling", "rule", "auto", "chain", "code", "dataset", "files", "path", "lora", "rank",
         "targets", "trackers", "warm_start", "perfectible", "evaluation", "grpo", "flowrl", "gspo", "fp16", "bf16",
         "<<", "&a", "*a", "!!int", "!!binary", "!!set", "!!omap", "!!timestamp", "!!float", "!!null", "|", ">", "?",
         "- ", ": ", "\n", "\n  ", "{", "}", "[", "]", ",", "'", '"', "#", "%", "0x", "0b_", "1:30", ".inf", "-.nan",
         "2001-99-99", "1e400", "\0", "\x1b", "\ud800", "\ufeff", "\u2028", "true", "~", "9" * 50]  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(WORDS),
    st.sampled_from([math.inf, -math.inf, math.nan, 1e300, 1e-300, 10**400, -1, 0, 2**31, 2**63]), st.dates(),
    st.binary(max_size=4),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(WORDS), scalars), inner, max_size=4)
    ),
    max_leaves=8,
)


def paths(tree: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The keys of every value in nested mappings, inner and outer."""
    pairs = tree.items() if isinstance(tree, dict) else ()
    inner = [path for key, value in pairs for path in paths(value, (*prefix, key))]
    return [prefix, *inner]


def replaced(tree: Any, path: tuple[str, ...], value: Any) -> Any:
    return {**tree, path[0]: replaced(tree[path[0]], path[1:], value)} if path else value


@sizes(60, 3000)
def test_any_value_anywhere(count: int) -> None:
    plain = recipe("precision=fp16", "loss_scaling={}", "algorithm.reference={}", "warm_start={}").model_dump(
        mode="json"
    )
    keys = [path for path in paths(plain | {"model": {"fresh": plain["model"]["fresh"]}}) if path]
    fuzz(
        count, st.tuples(st.sampled_from(keys), values), lambda pair: attempt(make_config, replaced(plain, *pair), "x")
    )


@sizes(60, 2000)
def test_any_text(count: int, tmp_path: Path) -> None:
    def body(text: str) -> None:
        (tmp_path / "recipe.yaml").write_text(text, errors="surrogatepass")
        attempt(load_recipe, tmp_path / "recipe.yaml")

    words = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=30).map("".join)
    fuzz(count, words, body)


@sizes(60, 2000)
def test_any_override(count: int) -> None:
    keys = ["steps", "precision.rollout", "optimizer.betas", "task.kind", "algorithm.loss", "name.x", "", ".", "a..b"]
    words = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=8).map("".join)
    texts = st.one_of(words, st.tuples(st.sampled_from(keys), words).map("=".join))
    fuzz(count, st.lists(texts, max_size=3), lambda overrides: attempt(recipe, *overrides))


@sizes(50, 1000)
def test_any_damage(count: int, tmp_path: Path) -> None:
    whole = (Path(__file__).parents[2] / "recipes" / "demo.yaml").read_bytes()

    def body(changes: list[tuple[int, bytes]]) -> None:
        damaged = bytearray(whole)
        for at, new in changes:
            damaged[at : at + len(new)] = new
        (tmp_path / "recipe.yaml").write_bytes(damaged)
        attempt(load_recipe, tmp_path / "recipe.yaml")

    places = st.integers(0, len(whole) - 1)
    fuzz(count, st.lists(st.tuples(places, st.binary(max_size=5)), min_size=1, max_size=5), body)


# the constructors of the drop-in

NONSENSE: list[Any] = ["2", None, True, math.nan, -1, [], 1e300, 10**400]
OPTIONS: dict[Any, list[str]] = {
    ScalerConfig: ["initial", "growth_factor", "backoff_factor", "growth_interval", "floor", "retries"],
    FP16TrainingConfig: ["loss_scale", "growth_factor", "backoff_factor", "growth_interval"],
    ExtendedFP16Config: ["loss_scale", "growth_factor", "backoff_factor", "growth_interval"],
    PrecisionTrainer: ["max_grad_norm", "accumulate", "probe_every"],
}
INFINITE = {"growth_factor": math.inf, "growth_interval": 1.5, "floor": 0.0, "retries": 0.5}


@pytest.mark.parametrize("kind", OPTIONS)
def test_nonsense_is_refused_by_constructors(kind: Any) -> None:
    more_nonsense = INFINITE.items() if kind is ScalerConfig else ()  # which is finite and counts in whole numbers
    for name, value in [*product(OPTIONS[kind], NONSENSE), *more_nonsense]:
        model = mlp()
        given = (model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32") if kind is PrecisionTrainer else ()
        more = {"say": print} if given else {}
        assert attempt(kind, *given, **more, **{name: value}), (name, value)
