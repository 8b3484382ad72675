"""``mantissa sample`` and ``mantissa report``: what they print is what the policy says."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make

from mantissa.kernels import NativeKernels
from mantissa.model import byte_tokenizer, load_model, load_tokenizer
from mantissa.precision import FP32

Mantissa = Callable[..., Any]
LINE = re.compile(r" *(-?[\d.]+)  (stop  |length)  (.*)")


def completions(result: Any) -> list[tuple[float, str, str]]:
    """(log-prob, why it ended, text) of each line."""
    assert result.code == 0, result
    assert result.err.startswith("rollout in "), result
    matches = [LINE.fullmatch(line) for line in result.out.splitlines()]
    return [(float(m[1]), m[2].strip(), m[3]) for m in matches if m]


def test_the_seed_decides(mantissa: Mantissa, finished: Path) -> None:
    first, again, other = (
        completions(mantissa("sample", finished, "12=", "-n", 5, "--max-tokens", 6, "--seed", seed))
        for seed in (1, 1, 2)
    )
    assert len(first) == 5
    assert first == again != other
    assert completions(mantissa("sample", finished, "12=", "-n", 2, "--max-tokens", 6, "--seed", 1)) == first[:2]


def test_the_log_prob_is_that_of_the_text(mantissa: Mantissa, finished: Path) -> None:
    temperature = 0.5
    model, tokenizer = load_model(finished / "policy"), load_tokenizer(finished / "policy")
    argv = ("--max-tokens", 6, "--temperature", temperature)
    checked = 0
    for logp, why, text in completions(mantissa("sample", finished / "policy", "12=", "-n", 30, *argv)):
        answer = tokenizer.encode(text)
        if why == "stop" or len(answer) < 6:
            continue  # it may hold padding tokens, which a text does not show
        checked += 1
        tokens = torch.tensor([tokenizer.encode("12=") + answer])
        with torch.no_grad():
            hidden = model(tokens, NativeKernels(FP32))
            distribution = (model.logits(hidden[0], NativeKernels(FP32)).double() / temperature).log_softmax(-1)
        expected = sum(float(distribution[2 + j, token]) for j, token in enumerate(answer))
        assert logp == pytest.approx(expected, abs=1e-4)
    assert checked > 3


def test_greedy_and_top_k_of_one_agree(mantissa: Mantissa, finished: Path) -> None:
    greedy = completions(mantissa("sample", finished, "12=", "--temperature", 0, "--max-tokens", 6))
    one = completions(mantissa("sample", finished, "12=", "--top-k", 1, "--max-tokens", 6, "-n", 3))
    tiny = completions(mantissa("sample", finished, "12=", "--top-p", 1e-6, "--max-tokens", 6))
    assert {text for _, _, text in [*one, *tiny]} == {greedy[0][2]}
    assert {logp for logp, _, _ in one} == {0.0}  # renormalised over what is kept: certain


def test_stop_strings_end_a_completion(mantissa: Mantissa, finished: Path) -> None:
    argv = ("sample", finished, "12=", "-n", 20, "--max-tokens", 12)
    stopped = completions(mantissa(*argv, "--stop", "3", "--stop", "7"))
    assert any(text.endswith(("3", "7")) for _, why, text in stopped if why == "stop")
    assert not any(letter in text[:-1] for _, _, text in stopped for letter in "37")
    assert any("3" in text[:-1] for _, _, text in completions(mantissa(*argv)))


def test_the_roles_format_is_said_and_used(mantissa: Mantissa, finished: Path) -> None:
    argv = ("sample", finished, "12=", "-n", 3, "--max-tokens", 6)
    fp32, bf16 = mantissa(*argv), mantissa(*argv, "--precision", "bf16")
    assert fp32.err.startswith("rollout in fp32 (native kernels)")
    assert bf16.err.startswith("rollout in bf16 (")
    assert fp32.out != bf16.out


def test_a_report_of_a_run_that_has_not_ended(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "policy")
    (run / "report.html").unlink()
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + '\n{"step": 2, "rew')  # killed in the middle of a line
    result = mantissa("report", run)
    assert (result.code, result.out) == (0, f"report: {run / 'report.html'}\n")
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    for name in ("metrics.jsonl", "warm_start.jsonl"):
        (run / name).unlink()
    assert mantissa("report", run).code == 0  # killed before its first step


def test_a_family_that_only_transformers_knows(mantissa: Mantissa, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    make("gemma3_text", vocab_size=tokenizer.vocab_size).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    first, again = (completions(mantissa("sample", tmp_path, "Say", "-n", 2, "--max-tokens", 5)) for _ in range(2))
    assert first == again
    assert len(first) == 2
    scaled = completions(mantissa("sample", tmp_path, "Say", "--precision", "fp8", "-n", 2, "--max-tokens", 5))
    assert len(scaled) == 2
    assert scaled != first
    assert "fp8 or a scaled format" in mantissa("sample", tmp_path, "Say", "--precision", "e8m4").error()
    one, two = (mantissa("sample", tmp_path, "Say", "--top-k", 1, "--seed", seed).out for seed in (1, 2))
    assert one == two  # of one token there is no choice
