"""``mantissa weights``, as a user calls it, on the small run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

Mantissa = Callable[..., Any]


def test_a_run_and_what_an_engine_has_of_it(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    now = load_file(finished / "policy" / "model.safetensors")
    engine = {name: w.bfloat16() for name, w in now.items()}
    save_file(engine, tmp_path / "engine.safetensors")
    said = mantissa("weights", finished, tmp_path / "engine.safetensors")
    assert said.code == 0, said
    assert f"The weights arrived: {len(now)} of {len(now)} tensors" in said.out
    skipped = [name for name in engine if name.endswith("o_proj.weight")]
    save_file({name: w + 1 for name, w in now.items()}, tmp_path / "before.safetensors")
    save_file(engine | {name: (now[name] + 1).bfloat16() for name in skipped}, tmp_path / "engine.safetensors")
    said = mantissa("weights", finished, tmp_path / "engine.safetensors", "--before", tmp_path / "before.safetensors")
    words = " ".join(said.out.split())
    assert said.code == 1, said
    assert f"Not all weights arrived: {len(skipped)} of {len(now)} tensors did not" in words
    assert "stale: self_attn.o_proj.weight of layer" in words
    assert "- stale: the last sync left it out" in words
    rows = mantissa("weights", finished, tmp_path / "engine.safetensors", "--json").out.splitlines()
    whole, *tensors = map(json.loads, rows)
    assert whole["arrived"] is False
    assert {each["name"] for each in tensors if each["fate"] != "equal"} == set(skipped)


def test_nowhere_is_one_line(mantissa: Mantissa, finished: Path) -> None:
    said = mantissa("weights", finished, "nowhere")
    assert said.code == 2
    assert "nowhere: no such folder" in said.error()
