"""Each framework's own dump is read to the last bit; what is damaged or hostile is one error, and runs nothing."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import zipfile
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
from mantissa.base.errors import MantissaError
from mantissa.base.readers import pickles
from mantissa.doctor import readers
from mantissa.doctor.isolated import Reading
from mantissa.doctor.readers import read_dump

SEQUENCES = dumps.healthy(prompts=3, samples=2, length=5)


def written(framework: str, folder: Path) -> Path:
    """The same six sequences as this framework writes them."""
    return {
        "plain": lambda: dumps.write_plain(folder / "x.jsonl", SEQUENCES, temperature=0.7, rollout_format="bf16"),
        "nemo-rl": lambda: dumps.write_nemo(folder / "train_data_step3.jsonl", SEQUENCES),
        "prime-rl": lambda: dumps.write_prime(folder, SEQUENCES),
        "slime": lambda: dumps.write_slime(folder, SEQUENCES),
        "skyrl": lambda: dumps.write_skyrl(folder / "global_step_3.pkl", SEQUENCES),
    }[framework]()


@pytest.mark.parametrize("framework", ["plain", "nemo-rl", "prime-rl", "slime", "skyrl"])
def test_reads_what_each_framework_writes(framework: str, tmp_path: Path) -> None:
    dump = read_dump(written(framework, tmp_path))
    assert dump.framework == framework
    assert len(dump.sequences) == len(SEQUENCES)
    for found, expected in zip(dump.sequences, SEQUENCES, strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        assert found.prompt_length == 3
        assert found.mask.all()
        narrow = np.float32 if framework in ("slime", "skyrl") else np.float64
        np.testing.assert_array_equal(found.rollout_logp, expected.rollout_logp.astype(narrow).astype(float))
        np.testing.assert_array_equal(found.learner_logp, expected.learner_logp.astype(narrow).astype(float))
    assert read_dump(written_again(framework, tmp_path), framework).framework == framework
    if framework == "plain":
        assert (dump.settings.temperature, dump.settings.rollout_format, dump.settings.top_p) == (0.7, "bf16", None)
    if framework == "slime":
        assert {each.rollout_version for each in dump.sequences} == {5}
    if framework in ("plain", "skyrl"):
        assert [each.group for each in dump.sequences] == [0, 0, 1, 1, 2, 2]


def test_miles_ranks_are_joined_and_its_slices_refused(tmp_path: Path) -> None:
    """Each rank has a file; what context parallelism cut into pieces has no whole sequence."""
    dump = read_dump(dumps.write_miles(tmp_path / "whole", SEQUENCES))
    assert dump.framework == "miles"
    assert {each.rollout_version for each in dump.sequences} == {5}
    found = sorted(each.learner_logp.sum() for each in dump.sequences)
    np.testing.assert_allclose(found, sorted(each.learner_logp.sum() for each in SEQUENCES), rtol=1e-6)
    error = attempt(read_dump, dumps.write_miles(tmp_path / "cut", SEQUENCES, cp_size=2))
    assert error is not None
    assert "context parallelism" in str(error)


def test_rolls_dump_is_named(tmp_path: Path) -> None:
    """A pickle of its own class, which is neither imported nor made."""
    (tmp_path / "1.pkl").write_bytes(b"\x80\x04croll.distributed.scheduler.protocol\nDataProto\n(tR.")
    error = attempt(read_dump, tmp_path / "1.pkl")
    assert error is not None
    assert "ROLL's rollout dump" in str(error)


def written_again(framework: str, folder: Path) -> Path:
    shutil.rmtree(folder)
    folder.mkdir()
    return written(framework, folder)


def test_parquet_is_read_as_jsonl_is(tmp_path: Path) -> None:
    sampled = [each.tokens[each.prompt_length :].tolist() for each in SEQUENCES]
    wrote = dumps.write_plain(tmp_path / "x.jsonl", SEQUENCES).read_text().splitlines()
    rows = [json.loads(line) | {"kept": [[t, 7, 9] for t in ids[:-1]] + [None]}
            for line, ids in zip(wrote, sampled, strict=True)]  # fmt: skip
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    one, other = read_dump(tmp_path / "x.jsonl"), read_dump(tmp_path / "x.parquet")
    for a, b in zip(one.sequences, other.sequences, strict=True):
        np.testing.assert_array_equal(a.learner_logp, b.learner_logp)
        np.testing.assert_array_equal(a.tokens, b.tokens)
        assert a.kept is not None
        assert b.kept is not None
        assert a.kept[-1] is b.kept[-1] is None
        np.testing.assert_array_equal(a.kept[:-1], b.kept[:-1])


def test_masked_and_padded_positions_are_not_compared(tmp_path: Path) -> None:
    row = {"token_ids": [5, 6, 7, 8, 0, 0], "input_lengths": [4], "token_loss_mask": [0, 1, 0, 1, 1, 1],
           "sample_loss_mask": [1], "generation_logprobs": [0, -1, -2, -3, -9, -9],
           "prev_logprobs": [0, -1, -2, -3, 0, 0]}  # fmt: skip
    left_out = row | {"sample_loss_mask": [0]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(left_out) + "\n")
    kept, dropped = read_dump(tmp_path / "x.jsonl").sequences
    assert kept.prompt_length == 1
    assert kept.mask.tolist() == [True, False, True]
    assert kept.rollout_logp.tolist() == [-1, -2, -3]
    assert not dropped.mask.any()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input": "2+2=", "output": "4", "gts": "4", "score": 1.0, "step": 1}, "verl's rollout dump"),
        ({"step": 1, "prompt": "2+2=", "completion": "4", "advantage": 0.5}, "TRL's completion log"),
        ({"task_id": 1, "sample_idx": 0, "seqlen": 9, "prompt_len": 4, "head_version": 1, "tail_version": 1,
          "reward": 1.0, "prompt": "2+2=", "completion": "4"}, "AReaL's trajectory dump"),
    ],
)  # fmt: skip
def test_dumps_without_logprobs_are_named_with_what_to_add(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    error = attempt(read_dump, tmp_path / "1.jsonl")
    assert error is not None
    assert said in str(error)
    assert "record" in str(error) or "write_batch" in str(error)


PLAIN = {"tokens": [1, 2, 3], "prompt_length": 1, "rollout_logp": [-1.0, -2.0], "learner_logp": [-1.0, -2.0]}


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "[]", "7", '"text"', "null", "[" * 100_000, '{"a":' * 50_000, "{}", "\x00\x01", '{"tokens": 1}',
        *(json.dumps(PLAIN | more) for more in (
            {"tokens": "abc"}, {"tokens": [-1, 2, 3]}, {"tokens": [1.5, 2, 3]}, {"tokens": [10**400, 2, 3]},
            {"tokens": [[1], [2]]}, {"tokens": {"a": 1}}, {"prompt_length": 9}, {"prompt_length": -1},
            {"prompt_length": "x"}, {"rollout_logp": [-1.0]}, {"learner_logp": [-1.0] * 5}, {"learner_logp": None},
            {"rollout_logp": ["a", "b"]}, {"rollout_logp": [None, None]}, {"mask": [True]}, {"mask": [False, False]},
            {"temperature": -1}, {"temperature": "hot"}, {"top_p": 7}, {"policy_version": -3}, {"policy_version": 2.5},
            {"rollout_experts": [[1]], "learner_experts": [[1]]},
            {"kept": [[2]]}, {"kept": [[2], [2]]}, {"kept": [[2], [3, -1]]}, {"kept": [[2], 3]}, {"kept": "all"},
            {"tokens": [], "rollout_logp": [], "learner_logp": []},
            {"tokens": [2**63, 1, 2]}, {"prompt_length": True}, {"rollout_logp": [float("inf")] * 2},
        )),
        json.dumps({"token_ids": [1], "input_lengths": [-1], "generation_logprobs": [0], "prev_logprobs": [0]}),
        json.dumps({"token_ids": [1, 2], "loss_mask": [1], "inference_logprobs": [0, 0], "trainer_logprobs": [0, 0]}),
    ],
)  # fmt: skip
def test_a_damaged_line_is_one_error(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(line + "\n")
    assert attempt(read_dump, tmp_path / "x.jsonl") is not None


def test_files_that_are_none_are_one_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.csv").write_text("a,b\n")
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + b"\xff" * 100 + b"PAR1")
    for name in ("pipe.jsonl", "empty", "x.csv", "x.parquet", "nothing", "a\0b"):
        assert attempt(read_dump, tmp_path / name) is not None
    assert attempt(read_dump, tmp_path, "vllm") is not None


def test_claims_of_a_billion_rows_are_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = pyarrow.array([[1] * 1000] * 500)  # run-length encoded: a few bytes claim half a million values
    pyarrow.parquet.write_table(pyarrow.table(dict.fromkeys(PLAIN, values)), tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_size < 100_000
    monkeypatch.setattr(readers, "_TABLE", readers._TABLE._replace(values=400_000))
    error = attempt(read_dump, tmp_path / "x.parquet")
    assert error is not None
    assert "2,000,000" in str(error)
    monkeypatch.setattr(readers, "_LINE", readers._LINE._replace(bytes=1000))
    (tmp_path / "x.jsonl").write_text(json.dumps(PLAIN | {"text": "a" * 5000}) + "\n")
    assert "longer than" in str(attempt(read_dump, tmp_path / "x.jsonl"))


# pickles


def test_tensors_of_every_kind_come_out_as_they_went_in(tmp_path: Path) -> None:
    saved = {
        "a": torch.randn(3, 4), "t": torch.arange(6).view(2, 3).t(), "h": torch.randn(4).bfloat16(),
        "n": [1, None, "x"],
        "f": torch.randn(2).half(), "b": torch.tensor([True, False]), "s": torch.tensor(2.5), "e": torch.zeros(0, 3),
        "np": np.arange(4.0), "i": np.int64(7),
    }  # fmt: skip
    torch.save(saved, tmp_path / "x.pt")
    found = pickles.load(tmp_path / "x.pt")
    for name in ("a", "t", "f", "b", "s", "e"):
        np.testing.assert_array_equal(found[name], saved[name].numpy())  # type: ignore[attr-defined]
    np.testing.assert_array_equal(found["h"], saved["h"].float().numpy())  # type: ignore[attr-defined]
    np.testing.assert_array_equal(found["np"], saved["np"])
    assert found["n"] == [1, None, "x"]
    assert found["i"] == 7


@pytest.mark.parametrize(
    "call",
    [
        dumps.Call(os.system, ("touch {}",)), dumps.Call(subprocess.call, (["touch", "{}"],)),
        dumps.Call(builtins.eval, ("open('{}', 'w')",)), dumps.Call(builtins.exec, ("open('{}', 'w')",)),
        dumps.Call(getattr, ("", "upper")), dumps.Call(builtins.__import__, ("os",)),
        dumps.Call(torch.load, ("{}",)), dumps.Call(shutil.rmtree, ("{}",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["pkl", "pt", "inside", "state"])
def test_a_hostile_pickle_runs_nothing(call: dumps.Call, where: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    def aimed(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(aimed(each) for each in value)
        return value.replace("{}", str(mark)) if isinstance(value, str) else value

    armed: Any = dumps.Call(call.function, aimed(call.arguments))
    path = tmp_path / ("x.pkl" if where in ("pkl", "state") else "x.pt")
    if where == "pkl":
        path.write_bytes(pickle.dumps({"sequences": armed, "response_mask": 1}))
    elif where == "state":
        path.write_bytes(dumps.write_skyrl(path, SEQUENCES, armed).read_bytes())
    else:
        torch.save({"samples": [{"tokens": [1], "more": [armed] if where == "inside" else armed}]}, path)
    error = attempt(read_dump, path)
    assert error is not None
    assert "nothing of it was run" in str(error)
    assert not mark.exists()


def archive(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return buffer.getvalue()


class Stored:
    """A tensor of claims: a storage of so few numbers, and of what size it says it is."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...], claimed: int, offset: int = 0) -> None:
        self.parts = (size, stride, claimed, offset)

    def bytes(self) -> bytes:
        size, stride, claimed, offset = self.parts
        buffer = io.BytesIO()

        class Pickler(pickle.Pickler):
            def persistent_id(self, value: Any) -> Any:
                return ("storage", torch.FloatStorage, "0", "cpu", claimed) if value == "here" else None

        from torch._utils import _rebuild_tensor_v2

        Pickler(buffer, 2).dump(dumps.Call(_rebuild_tensor_v2, ("here", offset, size, stride, False, {})))
        return archive({"x/data.pkl": buffer.getvalue(), "x/data/0": b"\0" * 16})


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"hello",
    "truncated zip": lambda: truncated(Stored((4,), (1,), 4).bytes()),
    "truncated pickle": lambda: truncated(pickle.dumps({"samples": list(range(1000))})),
    "zip bomb": lambda: archive({"x/data.pkl": pickle.dumps(b"\0" * 50_000_000)}, zipfile.ZIP_DEFLATED),
    "no data.pkl": lambda: archive({"x/other": b"1"}),
    "missing storage": lambda: archive({"x/data.pkl": b"\x80\x02(X\x07\x00\x00\x00storageq\x00tQ."}),
    "claims more than is there": lambda: Stored((10**9,), (1,), 10**9).bytes(),
    "reaches beyond": lambda: Stored((4,), (1,), 4, offset=2).bytes(),
    "negative strides": lambda: Stored((4,), (-1,), 4, offset=3).bytes(),
    "a billion of one number": lambda: Stored((10**5, 10**5), (0, 0), 4).bytes(),
    "memo at 2^31": lambda: b"\x80\x02]r\xff\xff\xff\x7f.",
    "nested": lambda: b"\x80\x02" + b"]" * 30_000 + b"a" * 29_999 + b".",
    "itself": lambda: b"\x80\x02}q\x00(X\x07\x00\x00\x00samplesh\x00u.",
    "extension": lambda: b"\x80\x02\x82\x01.",
    "object array": lambda: pickle.dumps({"samples": np.array([{}], dtype=object)}),
    "not a dictionary": lambda: pickle.dumps([1, 2, 3]),
    "samples of nothing": lambda: pickle.dumps(
        {"samples": [{"tokens": [1, 2], "log_probs": [0.1], "response_length": 9}]}
    ),
    "lengths that do not fit": lambda: pickle.dumps(
        {"samples": [{"tokens": [1, 2], "log_probs": [0.1], "rollout_log_probs": [0.1, 0.2], "response_length": 1}]}
    ),
    "shapes that do not fit": lambda: pickle.dumps(
        {name: [[1]] for name in ("sequences", "response_mask", "rollout_logprobs", "action_log_probs")}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_pickle_is_one_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(HOSTILE[name]())
    assert attempt(read_dump, tmp_path / "x.pt") is not None


def text(said: str) -> bytes:
    return b"X" + len(said).to_bytes(4, "little") + said.encode()


def stored(pickled: bytes) -> bytes:
    return archive({"x/data.pkl": pickled, "x/data/0": b"\0" * 16})


STORAGE = b"\x80\x02(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
EMPTY = pickle.dumps(np.empty((1 << 28, 0), np.float32), 3)[2:-1]  # an array of as many rows, and of no number
DOUBLED = b"]" + b"".join(b"q%c" % n + b"]h%c" % n + b"ah%c" % n + b"a" for n in range(60))  # 2^60 lists in 600 bytes
FORGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "another array in a storage": (
        lambda: stored(STORAGE + b"}" + text("values") + EMPTY + b"sb."),
        "it changes a values",
    ),
    "a slot of a storage": (
        lambda: stored(STORAGE + b"N}" + text("values") + b"Ns\x86b."),
        "it changes a values",
    ),
    "another function": (lambda: b"\x80\x02ctorch\nSize\n}" + text("a") + b"K\x01sb.", "it changes a function"),
    "a list as a size": (lambda: b"\x80\x02" + DOUBLED + b"ctorch\nSize\nh\x3b\x85R.", "not made of numbers and words"),
    "a list in lists": (lambda: b"\x80\x02" + DOUBLED + b".", r"more than [\d,]+ values"),
    "keys of one hash": (
        lambda: pickle.dumps({n * ((1 << 61) - 1): n for n in range(1, 20_000)}, 2), "an integer of more than 64 bits"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_pickle_can_change_nothing_and_make_little_of_less(name: str, tmp_path: Path) -> None:
    make, said = FORGED[name]
    (tmp_path / "x.pt").write_bytes(make())
    assert re.search(said, str(attempt(read_dump, tmp_path / "x.pt")))


def skyrl(fields: dict[str, bytes]) -> bytes:
    """A SkyRL batch whose fields are these bytes."""
    batch = b"cskyrl.batch\nTrainingInputBatch\n)\x81"
    inner = b"}" + b"".join(text(name) + pickle.dumps(data, 3)[2:-1] + b"s" for name, data in fields.items())
    return b"\x80\x03" + batch + b"}" + text("batch_dict") + inner + b"sb."


def test_files_within_a_file_share_its_budget(tmp_path: Path) -> None:
    """Each field claims 1.6 GB of one number; none of them alone is too much."""
    large = Stored((20_000, 10_000), (0, 0), 4).bytes()
    (tmp_path / "x.pkl").write_bytes(skyrl({f"field{n}": large for n in range(3)}))
    assert "bytes in memory for what one command reads in all" in str(attempt(read_dump, tmp_path / "x.pkl"))
    within = skyrl({"a": archive({"x/data.pkl": skyrl({})})})
    (tmp_path / "x.pkl").write_bytes(within)
    assert "a batch within a field of a batch" in str(attempt(read_dump, tmp_path / "x.pkl"))


def test_the_rollouts_half_of_slimes_dump_says_where_the_other_is(tmp_path: Path) -> None:
    dumps.write_slime(tmp_path, SEQUENCES)
    with pytest.raises(MantissaError, match=r"train_data/7\.pt"):
        read_dump(tmp_path / "rollout_data" / "7.pt")


def test_a_file_of_several_pairs_is_read_as_so_many_dumps(tmp_path: Path) -> None:
    """As ``mantissa gap`` writes it: each pair with formats of its own, one after another."""
    rows = dumps.healthy(prompts=8)
    fine = dumps.write_plain(tmp_path / "fine.jsonl", rows, pair="fp32", rollout_format="fp32", learner_format="fp32")
    half = dumps.write_plain(tmp_path / "half.jsonl", rows, pair="bf16", rollout_format="bf16", learner_format="bf16")
    both = tmp_path / "completions.jsonl"
    both.write_text(fine.read_text() + half.read_text())
    dump = Reading(both).dump()
    assert [(name, how.rollout_format) for name, how in dump.pairs] == [("fp32", "fp32"), ("bf16", "bf16")]
    parts = dump.by_pair()
    assert {name: (len(each.sequences), each.settings.learner_format) for name, each in parts.items()} == {
        "fp32": (len(rows), "fp32"), "bf16": (len(rows), "bf16")}  # fmt: skip
    assert Reading(fine).dump().pairs == ()  # one pair is a dump like any
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(fine.read_text().replace('"pair": "fp32", ', "", 1) + half.read_text())
    assert Reading(mixed).dump().by_pair().keys() == {""}


@pytest.mark.parametrize("pair", ["3", '["a"]', f'"{"x" * 500}"'])
def test_a_pair_without_a_name_is_refused(tmp_path: Path, pair: str) -> None:
    row = f'{{"tokens": [1, 2], "prompt_length": 1, "rollout_logp": [-1], "learner_logp": [-1], "pair": {pair}}}\n'
    (tmp_path / "odd.jsonl").write_text(row)
    with pytest.raises(MantissaError, match="line 1: pair is"):
        read_dump(tmp_path / "odd.jsonl")
