"""optimizer.masters in whole runs: resumed bit for bit, seen by the learner as stored, said on the screen, refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mantissa.base.errors import MantissaError
from mantissa.precision import BF16, is_on_grid
from mantissa.rl import learner
from mantissa.rl.session import resume
from mantissa.runs.directory import RunDirectory
from small_run import configure, contents, stopped

SHORT = ("task.reward=prefix", "evaluation=null", "optimizer.lr=2e-4")
WARM = ("warm_start.steps=4", "warm_start.evaluate_every=4")
KINDS = ("bf16_nearest", "bf16_stochastic", "bf16_kahan")
Train = Callable[..., RunDirectory]


def saved(path: Path, step: int, name: str = "policy") -> dict[str, torch.Tensor]:
    return load_file(path / "checkpoints" / f"step-{step}" / f"{name}.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_bits_of_one_left_alone(
    kind: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*SHORT, *WARM, "steps=3", "precision=bf16", f"optimizer.masters={kind}", "checkpoint.keep=9")
    assert f"precision master: asked for {kind}, active bf16 (simulated kernels); values of" in capsys.readouterr().out
    row = next(row for row in run.environment["precision"] if row["role"] == "master")
    assert "no memory saved" in row["reason"]
    weights = [saved(run.path, step) for step in (0, 2, 3)]
    for name, tensor in weights[0].items():  # from the warm start on
        assert all(bool(is_on_grid(later[name], BF16).all()) for later in weights)
        assert tensor.dim() == 1 or not torch.equal(tensor, weights[2][name])
    kept = [key for key in saved(run.path, 3, "optimizer") if key.endswith("/compensation")]
    assert len(kept) == (len(weights[0]) if kind == "bf16_kahan" else 0)
    again = stopped(run.path, 2, tmp_path / "again")
    resume(again)
    assert contents(again) == contents(run.path)


def test_exact_kernels_see_what_is_stored_and_flowrls_head_stays_fp32(train: Train) -> None:
    flowrl = ("algorithm={loss: flowrl, reference: {}, correction: token_tis}", "optimizer.updates_per_batch=1")
    exact = ("precision={preset: bf16, kernels: exact}", "optimizer.masters=bf16_kahan", "checkpoint.every=1")
    run = train(*SHORT, *exact, *flowrl, "warm_start=null", "steps=2")
    for row in run.metrics.read():
        assert row["exact/mismatched_tokens"] == row["exact/update_mismatched_tokens"] == 0
    heads = [saved(run.path, step, "partition") for step in (1, 2)]
    assert any(not bool(is_on_grid(tensor, BF16).all()) for tensor in heads[1].values())
    assert any(not torch.equal(tensor, heads[0][name]) for name, tensor in heads[1].items())
    assert not any(key.startswith("partition.") for key in saved(run.path, 2, "optimizer") if "comp" in key)


def test_the_warm_start_rounds_by_other_draws(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    made = learner.master_weights

    def watched(kind: Any, parameters: Any, fmt: Any, seed: int) -> Any:
        seeds.append(seed)
        return made(kind, parameters, fmt, seed)

    monkeypatch.setattr(learner, "master_weights", watched)
    train(*SHORT, *WARM, "steps=1", "precision=bf16", "optimizer.masters=bf16_stochastic")
    assert len(seeds) == len(set(seeds)) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("precision=fp16",), r"masters=bf16_kahan with a fp16 learner: .*; set precision\.train=bf16 or fp32, or opt"),
        (("precision={preset: fp8, fp8: {base: fp16}}",), "with a fp16 learner"),
        (("precision={train: e8m4, rollout: bf16}",), "with a e8m4 learner"),
        (("precision=bf16", "model.lora={rank: 2, alpha: 4}"), r"with model\.lora: .*; set optimizer\.masters=fp32"),
    ],
)
def test_what_the_learner_would_not_see_is_refused(more: tuple[str, ...], said: str) -> None:
    with pytest.raises(MantissaError, match=said):
        configure("optimizer.masters=bf16_kahan", *more)


@pytest.mark.parametrize("precision", ["fp32", "fp8", "{train: bf16, rollout: fp16}"])
def test_formats_that_hold_every_value_of_bf16_go(precision: str) -> None:
    assert configure("optimizer.masters=bf16_kahan", f"precision={precision}").optimizer.masters == "bf16_kahan"
