"""Models' folders, tokenizers, chat templates and data files that others made: one error each, soon."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from hostile import attempt, ends, fuzz, sizes
from mantissa.base.bounds import available_memory
from mantissa.base.errors import MantissaError
from mantissa.base.hub import find_model
from mantissa.model import Decoder, byte_tokenizer, load_model, load_tokenizer, save_model
from mantissa.model.config import FreshModelConfig, parse_config
from mantissa.rl import make_config
from mantissa.rl.assemble import assemble
from mantissa.rl.config.run import apply_overrides
from mantissa.runs.directory import RunDirectory
from mantissa.tasks.datasets import read_problems
from mantissa.training import Checkpoint, save_checkpoint

MESSAGES = [{"role": "user", "content": "hello"}]
SMALL = {"hidden_size": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "intermediate_size": 8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("models") / "model", byte_tokenizer()
    config = FreshModelConfig(**SMALL).model(tokenizer.vocab_size)  # type: ignore[arg-type]
    save_model(Decoder(config).initialize(torch.Generator().manual_seed(0)), tokenizer, path)
    (path / "digests.json").unlink()
    load_tokenizer(path).encode_prompt("imports what it needs, once")
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": []}, r"model_type \[\] is not supported"),
    ({"layer_types": 5}, "layer_types=5: expected a list"),
    ({"layer_types": {"a": 1}}, "expected a list"),
    ({"num_hidden_layers": 10**6}, "at most 10,000"),
    ({"num_hidden_layers": 1e6}, "num_hidden_layers=1000000.0: expected a whole number"),
    ({"hidden_size": 10**30}, "hidden_size=1000"),
    ({"hidden_size": 2**30, "num_attention_heads": 8}, "bytes at least, and .* are available"),
    ({"vocab_size": 2**31 - 1, "hidden_size": 2**20}, "bytes at least, and .* are available"),
    ({"rope_theta": float("inf"), "rope_parameters": None}, "rope_theta=inf: expected a finite number"),
    ({"rms_norm_eps": 1e-300}, "rms_norm_eps=1e-300"),
    ({"max_window_layers": "x", "use_sliding_window": True}, "TypeError"),
    ({"auto_map": 5}, "auto_map=5"),
    ({"rope_scaling": [1]}, "rope_scaling=.*expected an object"),
    ({"rope_parameters": {"rope_type": {"a": 1}}}, "settings for 'rope_type' alone"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "for 'full_attention' alone"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), CONFIGS, ids=[str(values)[:40] for values, _ in CONFIGS])
def test_configs(values: dict[str, Any], message: str, folder: Path) -> None:
    edit(folder / "config.json", **values)
    assert re.search(message, str(attempt(load_model, folder)))


def test_eos_ids_of_odd_types(folder: Path) -> None:
    for eos in ([[]], "2", 2.0, True, {"a": 1}, [257, "x"], -1, 10**30, [None]):
        edit(folder / "generation_config.json", eos_token_id=eos)
        assert attempt(load_tokenizer, folder) is not None or eos == [None], eos


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "x"])
def test_a_pipe_in_the_folder(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for load in (load_model, load_tokenizer):
        assert "a pipe or a device" in str(attempt(load, folder))


def test_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for path in ("x" * 5000, "a\0b", "\ud800", "/dev/null", "~nobody-of-this-name/x"):
        assert attempt(find_model, path) is not None
        assert attempt(RunDirectory.open, path) is not None
        assert attempt(read_problems, [path]) is not None
        assert attempt(read_problems, [path + ".jsonl"]) is not None
        if path[0] != "~":  # which is a name like another to a folder that is made
            assert attempt(RunDirectory.create, Path(path) / "run", {}, {}) is not None
    assert list(tmp_path.iterdir()) == []


LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
TEMPLATES = [
    LOOP, "{{ 1 / 0 }}", "{{ messages[99].content }}", "{{ raise_exception('no') }}", "{{ 9 ** 99999999 }}", "{% if %}",
    "{{ messages.x.y }}", "{{ 'a' * 10 ** 13 }}",
    "{{ '%0999999999d' % 1 }}", "{{ 'a' * 9999999999 }}", "{{ 1 | tojson(indent=999999999) }}",
    "{% set n = namespace(a='a') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "{{ range(10 ** 9) | list }}", "{{ [1] + 'a' }}", "{{ none() }}",
    "{{ 'x' | nope }}", "{% include 'x' %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages | tojson(indent=[]) }}", "{{ '%s' % (1, 2) }}", "{{ 'a' | int('b') + [] }}", "{{ cycler() }}",
    "{{ '\\ud800' }}",
]  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_that_raise_or_never_end(template: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    assert attempt(lambda: load_tokenizer(folder).encode_prompt(MESSAGES)) is not None


def test_a_template_ends_in_another_thread_too_and_the_next_one_is_not_hurt(folder: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{% generation %}!{% endgeneration %}")
    tokenizer = load_tokenizer(folder)
    slow = load_tokenizer(folder)
    slow.backend.chat_template = LOOP
    with ThreadPoolExecutor(1) as pool:
        with ends(), pytest.raises(MantissaError, match="took longer than 2 s"):
            pool.submit(slow.encode_prompt, MESSAGES).result()
        assert pool.submit(tokenizer.encode_prompt, MESSAGES).result() == list(b"hello!")


@pytest.mark.parametrize(
    "pattern", ["(x+x+)+y", "(?=(x+))*y", "(", "[", "(?<!x+)y", "x{1,100000}{1,100000}", r"((x*)*)*\Z.y", "\\k<1>"]
)
def test_regex_bombs_in_a_tokenizer(pattern: str, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    attempt(lambda: load_tokenizer(folder).encode("x" * 50 + "z"))


SLOW = {"pattern": {"Regex": "(x*)(x*)(x*)(x*)y"}}  # below its library's limit, and yet: length^4


@pytest.mark.parametrize("part", ["pre_tokenizer", "decoder"])
def test_a_regex_that_stays_below_its_librarys_limit(part: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mantissa.model.tokenizer._MOST_S", 0.1)
    content, text = json.loads((folder / "tokenizer.json").read_text()), "x" * 110 + "zy"
    ids = load_tokenizer(folder).encode(text)
    if part == "decoder":
        slow = {"type": "Replace", "content": "q"} | SLOW
        content[part] = {"type": "Sequence", "decoders": [content[part], {"type": "Fuse"}, slow]}
    else:
        content[part] = {"type": "Split", "behavior": "Isolated", "invert": False} | SLOW
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    error = attempt(tokenizer.decode, ids) if part == "decoder" else attempt(tokenizer.encode, text)
    assert "took longer than 0.1" in str(error)


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "((x*)*)*\\Z.y"])
def test_a_decoders_regex_that_its_library_gives_up(pattern: str, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    slow = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "q"}
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], {"type": "Fuse"}, slow]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert "it cannot decode these tokens" in str(attempt(tokenizer.decode, tokenizer.encode("x" * 50 + "zy")))


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
        st.sampled_from([0, -1, 2**31, 10**30, "full_attention", "llama", "default", "linear", float("inf")]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "x"]), inner, max_size=3),
    ),
    max_leaves=5,
)  # fmt: skip


@sizes(150, 2000)
def test_any_value_in_a_config(count: int, whole: Path) -> None:
    raw = json.loads((whole / "config.json").read_text())
    keys = [*raw, "rope_scaling", "layer_types", "use_sliding_window", "sliding_window", "auto_map", "hidden_act"]
    changes = st.dictionaries(st.sampled_from(keys), json_values, min_size=1, max_size=3)
    fuzz(count, changes, lambda values: attempt(parse_config, {**raw, **values}, "config.json"))


@sizes(4, 250)
def test_any_damage_to_a_tokenizer(count: int, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "model")
    names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]

    def body(change: tuple[str, int, bytes]) -> None:
        name, at, new = change
        content = bytearray((whole / name).read_bytes())
        at %= len(content)
        content[at : at + len(new)] = new
        (tmp_path / "model" / name).write_bytes(content)
        attempt(lambda: load_tokenizer(tmp_path / "model").encode("text"))
        shutil.copy(whole / name, tmp_path / "model" / name)

    fuzz(count, st.tuples(st.sampled_from(names), st.integers(0, 10**4), st.binary(min_size=1, max_size=4)), body)


@sizes(20, 700)
def test_any_damage_to_weights(count: int, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "model")
    content = (whole / "model.safetensors").read_bytes()

    def body(change: tuple[int, bytes]) -> None:
        damaged = bytearray(content)
        damaged[change[0] : change[0] + len(change[1])] = change[1]
        (tmp_path / "model" / "model.safetensors").write_bytes(damaged)
        attempt(load_model, tmp_path / "model")

    fuzz(count, st.tuples(st.integers(0, 1500), st.binary(min_size=1, max_size=4)), body)


ROWS = [
    b'{"problem": "a", "answer": ' + b"9" * 5000 + b"}", b'{"problem": "a", "answer": 1e400}', b"[" * 10**5, b"\xff",
    b'{"problem": ["a"], "answer": {}}', b'{"problem": "\\ud800", "answer": "\\ud800"}', b"NaN", b'"x"', b"{}",
    b'{"problem": "a", "answer": NaN}', b'{"problem": "a", "answer": "' + b"." * 2000 + b'"}', b"\0" * 100,
    b'{"prompt": [[]], "reward_model": 5}', b'{"prompt": [{"role": [], "content": 1}], "reward_model": {}}',
    b'{"prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": 1' + b"0" * 400 + b"}}",
    b'{"problem": "a", "answer": 1' + b"0" * 400 + b"}", b"", b"PAR1", b"PAR1" * 9,
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{suffix}"
    for row in ROWS:
        path.write_bytes(row)
        for on_bad_row in ("error", "skip"):
            attempt(read_problems, [path], on_bad_row=on_bad_row)


@sizes(60, 1200)
def test_any_row(count: int, tmp_path: Path) -> None:
    keys = st.sampled_from(["problem", "question", "answer", "prompt", "reward_model", "data_source", "extra_info"])
    rows = st.dictionaries(keys, json_values, max_size=5)
    path = tmp_path / "data.jsonl"

    def body(found: list[Any]) -> None:
        path.write_text("\n".join(json.dumps(row) for row in found))
        attempt(read_problems, [path], on_bad_row="skip")

    fuzz(count, st.lists(st.one_of(rows, json_values), max_size=4), body)


@sizes(30, 700)
def test_any_damage_to_parquet(count: int, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "data.parquet"
    rows = [{"problem": f"p{i}", "answer": str(i)} for i in range(20)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    content = path.read_bytes()

    def body(change: tuple[int, bytes]) -> None:
        damaged = bytearray(content)
        at = change[0] % len(damaged)
        damaged[at : at + len(change[1])] = change[1]
        path.write_bytes(damaged)
        attempt(read_problems, [path], on_bad_row="skip")

    fuzz(count, st.tuples(st.integers(0, 10**5), st.binary(min_size=1, max_size=4)), body)


BILLS = ["rollout.prompts=100000000", "task.train_size=2000000000",
         "model.fresh.hidden_size=2000000000", "rollout.slots=2000000000"]  # fmt: skip


@pytest.mark.parametrize("override", BILLS)
def test_what_no_machine_could_hold_is_refused_with_both_numbers(override: str) -> None:
    recipe = {
        "steps": 1, "model": {"fresh": dict(SMALL)}, "task": {"kind": "chain"}, "optimizer": {"lr": 1e-3},
        "rollout": {"prompts": 4, "samples": 2, "max_tokens": 4}, "device": "cpu",
    }  # fmt: skip
    config = make_config(apply_overrides(recipe, [override]), "recipe")
    assert "available here" in str(attempt(assemble, config))
    assert available_memory() is not None


def test_a_run_that_is_renamed_while_it_writes(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {}, {})
    run.path.rename(tmp_path / "elsewhere")
    for write in (
        lambda: run.metrics.append({"step": 1}),
        lambda: run.write_rollouts(1, []),
        lambda: save_checkpoint(run.path / "checkpoints", Checkpoint(1, {"a": torch.ones(1)}, {}, {}), keep=1),
    ):
        assert "a folder is gone; if it was renamed" in str(attempt(write))
    assert not run.path.exists()
    run.close()
