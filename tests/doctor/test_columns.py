"""Files that are nobody's: obvious columns are taken and said, what may be two things is refused, one side says how to
have the other."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

import dumps
from hostile import attempt
from mantissa.base.readers.npz import read_npz
from mantissa.doctor.columns import OBVIOUS, Part, mapped
from mantissa.doctor.dump import Dump, Scored
from mantissa.doctor.sources import read_source

SEQUENCES = dumps.healthy(prompts=4, samples=3, length=7)


def rows(**names: str) -> list[dict[str, Any]]:
    """A row a sequence, its columns by the names of their parts."""
    found = []
    for place, each in enumerate(SEQUENCES):
        prompt, response = each.tokens[: each.prompt_length].tolist(), each.tokens[each.prompt_length :].tolist()
        parts = {"learner": each.learner_logp.tolist(), "rollout": each.rollout_logp.tolist(), "prompt": prompt,
                 "response": response, "tokens": [*prompt, *response], "group": f"problem {place // 3}",
                 "prompt_length": len(prompt)}  # fmt: skip
        found.append({column: parts[part] for part, column in names.items()})
    return found


def token_rows() -> list[dict[str, Any]]:
    found = []
    for n, each in enumerate(SEQUENCES):
        tokens = each.tokens[each.prompt_length :]
        for t, (token, x, y) in enumerate(zip(tokens, each.rollout_logp, each.learner_logp, strict=True)):
            found.append({"sample": n, "position": t, "token": int(token), "vllm_logprobs": float(x),
                          "old_logprobs": float(y), "group": n // 3})  # fmt: skip
    return found[::-1]


def table(width: int = 9) -> dict[str, np.ndarray]:
    """A batch as verl's: prompts padded on the left, responses on the right."""
    count, before = len(SEQUENCES), 5
    made = {"prompts": np.zeros((count, before), np.int64), "responses": np.zeros((count, width), np.int64),
            "attention_mask": np.zeros((count, before + width), np.int64),
            "response_mask": np.zeros((count, width), np.int64),
            "old_log_probs": np.zeros((count, width)), "rollout_log_probs": np.zeros((count, width))}  # fmt: skip
    for n, each in enumerate(SEQUENCES):
        p, r = each.prompt_length, len(each.rollout_logp)
        made["prompts"][n, before - p :] = each.tokens[:p]
        made["responses"][n, :r] = each.tokens[p:]
        made["attention_mask"][n, before - p : before + r] = 1
        made["response_mask"][n, :r] = 1
        made["old_log_probs"][n, :r], made["rollout_log_probs"][n, :r] = each.learner_logp, each.rollout_logp
    return made


def jsonl(path: Path, every: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in every))
    return path


def as_json(path: Path, every: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(every))
    return path


def parquet(path: Path, every: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(every), path)
    return path


def table_csv(path: Path, every: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, every[0])
        out.writeheader()
        out.writerows(every)
    return path


def dump_of(path: Path, mapping: str = "", framework: str | None = None) -> Dump:
    found = read_source(path, framework, mapping)
    assert isinstance(found, Dump)
    return found


def same(found: Dump, prompt: bool = True, narrow: type = np.float64) -> None:
    """The sequences are those that were written."""
    by_sum = sorted(found.sequences, key=lambda each: each.rollout_logp.sum())
    written = sorted(SEQUENCES, key=lambda each: each.rollout_logp.sum())
    assert len(by_sum) == len(written)
    for one, other in zip(by_sum, written, strict=True):
        np.testing.assert_array_equal(one.rollout_logp, other.rollout_logp.astype(narrow).astype(float))
        np.testing.assert_array_equal(one.learner_logp, other.learner_logp.astype(narrow).astype(float))
        np.testing.assert_array_equal(response(one), response(other))
        assert one.mask.all()
        if prompt:
            np.testing.assert_array_equal(one.tokens, other.tokens)


def response(each: Scored) -> np.ndarray:
    return each.tokens[each.prompt_length :]


NAMES = {"learner": "old_log_probs", "rollout": "vllm_logprobs", "prompt": "prompt_ids", "response": "completion_ids",
         "group": "uid"}  # fmt: skip
LAYOUTS: dict[str, tuple[Callable[[Path], Path], bool, type]] = {
    "jsonl": (lambda p: jsonl(p / "x.jsonl", rows(**NAMES)), True, np.float64),
    "json": (lambda p: as_json(p / "x.json", rows(**NAMES)), True, np.float64),
    "parquet": (lambda p: parquet(p / "x.parquet", rows(**NAMES)), True, np.float64),
    "csv": (lambda p: table_csv(p / "x.csv", rows(**NAMES)), True, np.float64),
    "a row a token, csv": (lambda p: table_csv(p / "x.csv", token_rows()), False, np.float64),
    "a row a token, jsonl": (lambda p: jsonl(p / "x.jsonl", token_rows()), False, np.float64),
    "a row a token, parquet": (lambda p: parquet(p / "x.parquet", token_rows()), False, np.float64),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYOUTS)
def test_obvious_columns_are_taken_and_said(kind: str, tmp_path: Path) -> None:
    write, prompt, narrow = LAYOUTS[kind]
    dump = dump_of(write(tmp_path))
    same(dump, prompt, narrow)
    assert dump.framework == "plain"
    assert any("rollout = vllm_logprobs" in note and "learner = old_log" in note for note in dump.mapped)
    groups = [each.group for each in dump.sequences]
    assert len(set(groups)) == 4
    assert all(groups.count(group) == 3 for group in groups)


def test_verls_batch_as_tensors_and_as_arrays(tmp_path: Path) -> None:
    batch = table()
    torch.save({name: torch.from_numpy(each) for name, each in batch.items()}, tmp_path / "x.pt")
    np.savez(tmp_path / "x.npz", **batch)  # type: ignore[arg-type]
    for name in ("x.pt", "x.npz"):
        dump = dump_of(tmp_path / name)
        same(dump)
        assert "rollout = rollout_log_probs" in dump.mapped[0]
    with_tool = batch | {"response_mask": batch["response_mask"].copy()}
    with_tool["response_mask"][:, 2] = 0
    np.savez(tmp_path / "tool.npz", **with_tool)
    assert not any(each.mask[2] for each in dump_of(tmp_path / "tool.npz").sequences)


def test_trls_batch(tmp_path: Path) -> None:
    batch = table()
    names = {"prompts": "prompt_ids", "responses": "completion_ids", "response_mask": "completion_mask",
             "old_log_probs": "old_per_token_logps", "rollout_log_probs": "sampling_per_token_logps"}  # fmt: skip
    made = {names[name]: each for name, each in batch.items() if name in names}
    np.savez(tmp_path / "x.npz", prompt_mask=batch["attention_mask"][:, :5], **made)
    same(dump_of(tmp_path / "x.npz"))


def test_log_probs_of_all_tokens_and_a_mask(tmp_path: Path) -> None:
    made = []
    for each in SEQUENCES:
        p, whole = each.prompt_length, np.zeros(each.prompt_length)
        made.append({"input_ids": each.tokens.tolist(), "loss_mask": [0] * p + [1] * len(each.rollout_logp),
                     "trainer_logprobs": [*whole, *each.learner_logp],
                     "sampling_logprobs": [*whole, *each.rollout_logp]})  # fmt: skip
    same(dump_of(jsonl(tmp_path / "x.jsonl", made)))


def test_an_engine_s_objects_are_the_rollout_s(tmp_path: Path) -> None:
    made = rows(learner="old_logprobs", tokens="token_ids")
    for row, each in zip(made, SEQUENCES, strict=True):
        row["logprobs"] = {"content": [{"token": "x", "logprob": x} for x in each.rollout_logp]}
    dump = dump_of(jsonl(tmp_path / "x.jsonl", made))
    same(dump)
    assert "rollout = logprobs" in dump.mapped[0]


def test_other_names_are_mapped(tmp_path: Path) -> None:
    made = rows(learner="a", rollout="b", tokens="c")
    path = jsonl(tmp_path / "x.jsonl", made)
    assert "nobody's fields" in str(attempt(read_source, path))
    same(dump_of(path, "learner=a,rollout=b,tokens=c"))
    names = {"prompts": "p", "responses": "r", "attention_mask": "m", "old_log_probs": "x", "rollout_log_probs": "y"}
    np.savez(tmp_path / "x.npz", **{names[name]: each for name, each in table().items() if name in names})  # type: ignore[arg-type]
    assert "no log-probs by their names" in str(attempt(read_source, tmp_path / "x.npz"))
    same(dump_of(tmp_path / "x.npz", "learner=x,rollout=y,prompt=p,response=r,attention=m"))


def test_a_prompt_s_length_is_held_to(tmp_path: Path) -> None:
    """Of log-probs of the response it must fit; of log-probs of all tokens it says where the response begins."""
    made = rows(learner="old_logprobs", rollout="vllm_logprobs", tokens="token_ids", prompt_length="prompt_length")
    same(dump_of(jsonl(tmp_path / "x.jsonl", made)))
    wrong = [row | {"prompt_length": row["prompt_length"] + 1} for row in made]
    assert "a prompt of 4 tokens" in str(attempt(read_source, jsonl(tmp_path / "y.jsonl", wrong)))
    whole = [
        row | {name: [0.0] * row["prompt_length"] + row[name] for name in ("old_logprobs", "vllm_logprobs")}
        for row in made
    ]
    same(dump_of(jsonl(tmp_path / "z.jsonl", whole)))


def test_without_ids_no_token_is_another(tmp_path: Path) -> None:
    dump = dump_of(jsonl(tmp_path / "x.jsonl", rows(learner="old_logprobs", rollout="vllm_logprobs")))
    every = np.concatenate([each.tokens for each in dump.sequences])
    assert len(set(every.tolist())) == len(every)
    assert "no token ids" in dump.mapped[0]


REFUSED: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "two learners": (lambda p: jsonl(p / "x.jsonl", [{"old_logprobs": [-1.0], "trainer_logprobs": [-1.0],
                                                     "vllm_logprobs": [-1.0]}]), "",
                     "old_logprobs and trainer_logprobs may each be learner's; say which: --map learner=old_logprobs"),
    "either side's": (lambda p: jsonl(p / "x.jsonl", [{"logprobs": [-1.0], "vllm_logprobs": [-1.0]}]), "",
                      "logprobs may be either side's; say whose: --map learner=logprobs"),
    "two of either": (lambda p: jsonl(p / "x.jsonl", [{"logprobs": [-1.0], "log_probs": [-1.0]}]), "",
                      "logprobs and log_probs may be either side's"),
    "rollout alone": (lambda p: jsonl(p / "x.jsonl", rows(rollout="sampling_per_token_logps")), "",
                      "holds the rollout's log-probs only (sampling_per_token_logps); the learner's are missing. "
                      "Record both: in TRL: mantissa.dropin.trl.record_logps"),
    "learner alone": (lambda p: jsonl(p / "x.jsonl", rows(learner="old_log_probs")), "",
                      "the rollout's are missing. Record both: in verl: VERL_USE_EXTERNAL_MODULES"),
    "an engine's answers": (lambda p: as_json(p / "x.json", [{"choices": [{"logprobs": {"content": []}}]}]), "",
                            "holds the rollout's log-probs only"),
    "a row a token without sequences": (lambda p: jsonl(p / "x.jsonl", [{"old_logprobs": -1.0, "vllm_logprobs": -1.0}]),
                                        "", "no column that tells sequences apart: --map sequence=NAME"),
    "no such column": (lambda p: jsonl(p / "x.jsonl", rows(learner="a", rollout="bcd")), "learner=a,rollout=bcde",
                       "no such column; did you mean 'bcd'?"),
    "no such side": (lambda p: jsonl(p / "x.jsonl", rows(learner="a")), "lerner=a", "did you mean 'learner'?"),
    "lengths": (lambda p: jsonl(p / "x.jsonl", [{"old_logprobs": [-1.0], "vllm_logprobs": [-1.0, -2.0]}]), "",
                "2 log-probs of the rollout and 1 of the learner"),
    "more log-probs than tokens": (lambda p: jsonl(p / "x.jsonl", [
        {"old_logprobs": [-1.0, -1.0], "vllm_logprobs": [-1.0, -2.0], "token_ids": [1]}]), "",
                                   "2 log-probs of 1 tokens"),
    "texts": (lambda p: jsonl(p / "x.jsonl", [{"old_logprobs": "a", "vllm_logprobs": "b"}]), "", "no list of"),
    "objects": (lambda p: jsonl(p / "x.jsonl", [{"old_logprobs": [{}], "vllm_logprobs": [[]]}]), "", "row 1"),
    "no mask": (lambda p: _npz(p, {n: e for n, e in table().items() if "mask" not in n}), "", "--map mask=NAME"),
    "shapes": (lambda p: _npz(p, table() | {"old_log_probs": np.zeros((3, 2))}), "", "old_log_probs"),
    "objects in npz": (lambda p: _npz(p, {"old_log_probs": np.array([{}], dtype=object)}), "", "holds objects"),
    "compressed npz": (lambda p: _npz(p, table(), np.savez_compressed), "", "not savez_compressed"),
}  # fmt: skip


def _npz(folder: Path, arrays: dict[str, Any], save: Callable[..., None] = np.savez) -> Path:
    save(folder / "x.npz", **arrays)
    return folder / "x.npz"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_may_be_two_things_or_is_one_side_is_refused(kind: str, tmp_path: Path) -> None:
    write, mapping, said = REFUSED[kind]
    error = attempt(read_source, write(tmp_path), None, mapping)
    assert said in str(error), error


def test_a_mapping_decides_what_is_refused(tmp_path: Path) -> None:
    made = rows(learner="old_logprobs", rollout="logprobs", tokens="token_ids")
    same(dump_of(jsonl(tmp_path / "x.jsonl", made), "rollout=logprobs"))


def test_no_name_is_obvious_for_two_parts() -> None:
    names = [name for obvious in OBVIOUS.values() for name in obvious]
    assert len(set(names)) == len(names)
    for part in (Part.LEARNER, Part.ROLLOUT):
        other = next(each for each in (Part.ROLLOUT, Part.LEARNER) if each is not part)
        for name in OBVIOUS[part]:
            assert mapped("x", [name, OBVIOUS[other][0]], {})[part] == name


def test_a_lying_npz_is_one_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(8))
    data = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "y.npz").write_bytes(data.replace(b"(8,)", b"(9**9,)"[:4]))
    (tmp_path / "z.npz").write_bytes(data[:100])
    for name in ("y.npz", "z.npz"):
        assert attempt(read_npz, tmp_path / name) is not None


def test_the_command_prints_the_mapping(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", rows(**NAMES))
    done = subprocess.run(
        [sys.executable, "-m", "mantissa", "doctor", str(path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "learner = old_log_probs, rollout = vllm_logprobs" in " ".join(done.stdout.split())
