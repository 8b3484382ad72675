"""From a real file to the report: two steps on jsonl, on a parquet file of the DAPO schema, and on the real sets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mantissa.rl.config import RunConfig
from mantissa.rl.session import start
from mantissa.runs.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("with_report")

QUICK = (
    "steps=2",
    "warm_start=null",
    "rollout={prompts: 3, samples: 2, max_tokens: 8, slots: 8}",
    "evaluation={every: 2, problems: 2, samples: 1}",
    "trackers=[]",
)
BYTES = ("model.tokenizer=bytes", "model.fresh.max_positions=4096")


def plain_file(folder: Path) -> Path:
    path = folder / "sums.jsonl"
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dapo_file(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "dapo.parquet"
    rows = [
        {
            "data_source": "made_up",
            "prompt": [{"role": "user", "content": f"What is {n} squared? End with Answer: and the number."}],
            "reward_model": {"ground_truth": str(n * n), "style": "rule"},
        }
        for n in range(30)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def two_steps(configure: Callable[..., RunConfig], folder: Path, task: str, *more: str) -> tuple[RunDirectory, str]:
    """The finished run and its report's text, without its markup."""
    report = start(configure(f"run_dir={folder}", f"task={task}", *QUICK, *more))
    return RunDirectory.open(folder), " ".join(re.sub(r"<[^>]*>", " ", report.read_text()).split())


def test_a_plain_file_with_math_verify(
    configure: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = f"{{kind: dataset, files: {plain_file(tmp_path)}, verifier: math_verify, heldout_fraction: 0.2}}"
    run, report = two_steps(configure, tmp_path / "run", task, *BYTES)
    assert "sums.jsonl: 30 rows, 30 problems, 0 duplicates" in " ".join(capsys.readouterr().out.split())
    rows = run.read_metrics()
    assert [row["reward/accuracy"] for row in rows] == [0, 0]  # a policy of random bytes
    assert [row["reward/verifier_errors"] for row in rows] == [0, 0]
    assert rows[-1]["optim/updates"] == 0
    assert rows[-1]["eval/greedy_accuracy"] == 0
    assert re.search("No completion was correct, on any step", report)
    rollout = run.read_rollouts(1)[0]
    number = re.search(r"What is (\d+) \+", rollout["prompt"])
    assert number is not None
    assert rollout["answer"] == str(2 * int(number[1]))


def test_the_dapo_schema_needs_a_chat_template_and_then_runs(
    configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    from mantissa.errors import MantissaError
    from mantissa.model import Decoder, byte_tokenizer, save_model

    task = f"{{kind: dataset, files: {dapo_file(tmp_path)}, verifier: dapo, heldout_fraction: 0.2}}"
    with pytest.raises(MantissaError, match=r"problem made_up-\w+: tokenizer: .* no chat template"):
        two_steps(configure, tmp_path / "refused", task, *BYTES)
    assert not (tmp_path / "refused").exists()
    tokenizer = byte_tokenizer()
    tokenizer.backend.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    fresh = configure("model.fresh.max_positions=2048").model.fresh
    assert fresh is not None
    model = Decoder(fresh.model(tokenizer.vocab_size)).initialize(torch.Generator().manual_seed(0))
    save_model(model, tokenizer, tmp_path / "model")
    run, report = two_steps(configure, tmp_path / "run", task, f"model={{path: {tmp_path / 'model'}}}")
    rollout = run.read_rollouts(2)[0]
    assert rollout["reward"] == -1  # DAPO's rule: 1 or -1
    assert [row["reward/mean"] for row in run.read_metrics()] == [-1, -1]
    assert re.search("No completion was correct, on any step", report)


@pytest.mark.shared_data
def test_two_steps_on_math500(configure: Callable[..., RunConfig], tmp_path: Path, shared_data: Path) -> None:
    task = f"{{kind: dataset, files: {shared_data / 'math500.parquet'}, verifier: math_verify, limit: 12}}"
    run, report = two_steps(configure, tmp_path / "run", task, *BYTES)
    rows = run.read_metrics()
    assert [row["reward/accuracy"] for row in rows] == [0, 0]
    assert [row["reward/verifier_errors"] for row in rows] == [0, 0]
    assert re.search("No completion was correct, on any step", report)
