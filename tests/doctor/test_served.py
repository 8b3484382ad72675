"""A running vLLM's weights beside the trainer's: read by what they do, in the words that files have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from fake_vllm import START, Fault, install, masters
from fake_vllm_server import FakeServer
from mantissa.base.errors import MantissaError
from mantissa.base.tensors import write_tensors
from mantissa.cli import app
from mantissa.doctor.held import ServedWeights, held
from mantissa.doctor.weights import Comparison, Fate, compare

TRAINED = {name: each.contiguous() for name, each in masters(3).items()}
BEFORE = {name: each.contiguous() + 0.5 for name, each in masters(5).items()}
Q, K, V, OUT = (f"model.layers.1.self_attn.{one}_proj.weight" for one in "qkvo")
DOWN, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    install(monkeypatch, Fault())
    (tmp_path / "served").mkdir()
    made = FakeServer(START, TRAINED, tmp_path / "served")
    yield made
    made.close()


def serve(server: FakeServer, weights: dict[str, Tensor]) -> None:
    write_tensors(server.folder.path / "model.safetensors", weights)
    server.restart()
    server.asked.clear()


def found(server: FakeServer, before: dict[str, Tensor] | None = None, remote: bool = False) -> Comparison:
    old = None if before is None else held(before)
    return compare(held(TRAINED), held(server.url, remote=remote), old)


def test_what_arrived_is_known_by_digests_alone(server: FakeServer) -> None:
    serve(server, TRAINED)
    result = found(server, BEFORE)
    assert result.arrived
    assert {each.name.removesuffix(" (tied)") for each in result.outcomes} == set(TRAINED)
    assert server.asked == ["/collective_rpc"]
    assert result.update is not None
    assert result.update.moved == result.update.seen == sum(each.numel() for each in TRAINED.values())


FAULTS: dict[str, tuple[dict[str, Any], Fate, str]] = {
    "stale": ({OUT: lambda w: BEFORE[OUT]}, Fate.STALE, "as before the update"),
    "half stale": ({OUT: lambda w: torch.cat([w[:16], BEFORE[OUT][16:]])}, Fate.STALE, "rows 16 to 31 of 32 alone"),
    "zero": ({DOWN: torch.zeros_like}, Fate.ZERO, ""),
    "scaled": ({DOWN: lambda w: w * 1.25}, Fate.SCALED, "by 1.25"),
    "rows": ({Q: lambda w: w.flip(0)}, Fate.ROWS, "32 of 32 have moved"),
    "k and v": ({K: lambda w: TRAINED[V], V: lambda w: TRAINED[K]}, Fate.ELSEWHERE, "those of"),
    "a norm": ({NORM: torch.zeros_like}, Fate.ZERO, ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_the_name_that_files_give_it(fault: str, server: FakeServer) -> None:
    """Only what differs is read. By digests alone it is known too, and named where all of a tensor is something."""
    changes, fate, detail = FAULTS[fault]
    wrong = TRAINED | {name: change(TRAINED[name]) for name, change in changes.items()}
    serve(server, wrong)
    live, file = found(server, BEFORE), compare(held(TRAINED), held(wrong), held(BEFORE))
    assert live.outcomes == file.outcomes
    lost = [each for each in live.outcomes if each.fate is not Fate.EQUAL]
    assert [each.name for each in lost] == sorted(changes, key=list(TRAINED).index)
    assert all(each.fate is fate and detail in each.detail for each in lost)
    assert len(server.asked) == 1 + len(changes)
    server.asked.clear()
    far = [each for each in found(server, BEFORE, remote=True).outcomes if each.fate is not Fate.EQUAL]
    assert server.asked == ["/collective_rpc"]
    assert [each.name for each in far] == [each.name for each in lost]
    whole = fate in (Fate.ZERO, Fate.ELSEWHERE) or fault == "stale"
    assert {each.fate for each in far} == {fate if whole else Fate.OTHER}


def test_what_cannot_be_asked_is_one_line(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, said in ((404, "lets no worker be asked"), (500, "has no mantissa_weights, or failed"),
                         (401, "wants its key; set VLLM_API_KEY")):  # fmt: skip
        server.refuse["/collective_rpc"] = status
        with pytest.raises(MantissaError, match=said) as error:
            held(server.url)
        assert "\n" not in str(error.value)
    server.refuse.clear()
    for results in ([{}, {}], [], ["text"]):
        monkeypatch.setattr(server, "answer", lambda *_, results=results: {"results": results})
        with pytest.raises(MantissaError, match="one is expected; start it with --tensor-parallel-size 1"):
            held(server.url)
    monkeypatch.setattr(server, "answer", lambda *_: {"results": [{"a.weight": "another layout"}]})
    with pytest.raises(MantissaError, match=r"its a\.weight cannot be read: another layout"):
        held(server.url)
    monkeypatch.setattr(server, "answer", lambda *_: {"other": 1})
    with pytest.raises(MantissaError, match="no answer of vLLM's"):
        held(server.url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://10.1.2.3:8000", "another machine; run mantissa weights there, or give --remote"),
        ("https://127.0.0.1:8000", "expected a vLLM's address"),
        ("http://127.0.0.1:8000/v1/models", "expected a vLLM's address"),
        ("http://127.0.0.1:9", r"no vLLM answers \(.*\); start one: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"),
    ],
)
def test_no_server_there_is_one_line(url: str, said: str) -> None:
    with pytest.raises(MantissaError, match=said):
        held(url)


def test_an_engine_that_writes_elsewhere_says_so(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, TRAINED | {OUT: TRAINED[OUT] * 2})
    answer = server.answer

    def elsewhere(path: str, query: Any, body: Any) -> Any:
        return {"results": [{}]} if body["method"] == "mantissa_write" else answer(path, query, body)

    monkeypatch.setattr(server, "answer", elsewhere)
    with pytest.raises(MantissaError, match="the engine has another file system"):
        found(server)
    assert ServedWeights.at(server.url).digests()


def test_the_command_compares_a_run_with_a_server(server: FakeServer, tmp_path: Path) -> None:
    write_tensors(tmp_path / "trainer.safetensors", TRAINED)
    serve(server, TRAINED)
    run = CliRunner().invoke(app, ["weights", str(tmp_path / "trainer.safetensors"), server.url])
    assert run.exit_code == 0, run.output
    assert "The weights arrived" in run.output
    serve(server, TRAINED | {OUT: TRAINED[OUT] * 2})
    run = CliRunner().invoke(app, ["weights", str(tmp_path / "trainer.safetensors"), server.url, "--json"])
    assert run.exit_code == 1
    rows = [json.loads(line) for line in run.output.splitlines() if line.startswith("{")]
    assert {row["name"]: row["fate"] for row in rows[1:] if row["fate"] != "equal"} == {OUT: "scaled"}
    write_tensors(tmp_path / "other.safetensors", {name: each[..., :8] for name, each in TRAINED.items()})
    run = CliRunner().invoke(app, ["weights", str(tmp_path / "other.safetensors"), server.url])
    assert run.exit_code == 1
    assert "Another model" in run.output
    assert "another shape" not in run.output
    run = CliRunner().invoke(app, ["weights", server.url, server.url, "--remote"])
    assert run.exit_code != 0
    assert "expected the trainer's weights in files here" in str(run.exception)
