"""What cannot run is refused while the parts are made, in one line, before a folder exists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import be_deterministic, choose_device
from mantissa.model import byte_tokenizer, save_model
from mantissa.rl.assemble import Parts
from mantissa.rl.config.run import RunConfig
from mantissa.rl.policy import policy_folder
from mantissa.rl.session import _uncorrected, start


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_never_replaced_by_a_cpu() -> None:
    with pytest.raises(MantissaError, match="device=cuda, but torch sees no CUDA device here"):
        choose_device("cuda")
    with pytest.raises(MantissaError, match="device=tpu: expected auto, cpu or cuda"):
        choose_device("tpu")
    assert choose_device("auto") == torch.device("cpu")


def test_an_operation_without_one_result_raises() -> None:
    torch.use_deterministic_algorithms(False)
    be_deterministic(torch.device("cpu"))
    assert torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.ones(3).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_mistakes_leave_no_folder_behind(configure: Callable[..., RunConfig], tmp_path: Path) -> None:
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text("steps: 1\n")

    def on(name: str, *more: str) -> list[str]:
        task = f"task={{kind: dataset, files: {tmp_path / name}}}"
        return [task, "warm_start=null", "model.tokenizer=bytes", *more]

    dataset = on("problems.jsonl")
    fresh = "model={fresh: {hidden_size: 32, layers: 1, max_positions: 64}}"
    cases: list[tuple[list[str], str]] = [
        ([*dataset, "model.tokenizer=characters"], "task dataset has no alphabet of its own; use bytes"),
        ([f"model={{path: {tmp_path / 'absent'}}}"], "absent"),
        ([f"model={{path: {tmp_path / 'unfinished'}}}"], "is a run without a policy yet.*resume the run first"),
        ([*dataset, "warm_start={}"], "no warm_start split: its files hold answers, not solutions"),
        ([*dataset, "task.heldout_fraction=0.0"], "evaluation.problems=16, but .* no held-out problems"),
        (["task.heldout_size=0"], r"\w+\.problems=16, but the task has no held-out problems"),
        (["task.warm_start_size=0"], "warm_start needs solutions.*the task has no warm_start problems"),
        ([*dataset, fresh], r"problem \S+: its \d+ prompt tokens and rollout.max_tokens=6 exceed"),
        (on("nowhere.jsonl"), "nowhere.jsonl"),
        (["loss_scaling.initial=0.5"], "loss_scaling: initial=0.5: expected at least the floor, 1"),
    ]
    for number, (overrides, message) in enumerate(cases):
        folder = tmp_path / f"run-{number}"
        with pytest.raises(MantissaError, match=message) as caught:
            start(configure(f"run_dir={folder}", *overrides))
        assert "\n" not in str(caught.value), message
        assert not folder.exists(), message


def test_a_policy_loads_as_the_masters_that_were_saved_unless_its_tokenizer_is_anothers(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], tmp_path: Path
) -> None:
    first, model = parts_of(configure("seed=3")), tmp_path / "model"
    save_model(first.model, first.tokenizer, model)
    second = parts_of(configure("seed=4", f"model={{path: {model}}}"))
    weights: dict[str, Any] = second.learner.weights
    assert all(torch.equal(weight, weights[name]) for name, weight in first.learner.weights.items())
    byte_tokenizer().save(model)  # 258 ids over an embedding of a dozen rows
    with pytest.raises(MantissaError, match="wrong tokenizer: it has ids up to 257 but the model embeds only 13"):
        parts_of(configure(f"model={{path: {model}}}"))


def test_a_run_stands_for_its_policy(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    assert policy_folder(str(tmp_path)) == str(tmp_path)
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    assert policy_folder(str(tmp_path)) == str(tmp_path / "policy")


@pytest.mark.parametrize("precision", ["fp8", "int4"])
def test_the_first_layers_stay_in_the_base(made: Callable[..., Parts], precision: str) -> None:
    """On both sides: what is sampled is what is scored, and the first layer's products are the base's."""
    section = "fp8" if precision == "fp8" else "quantized"
    parts = made("warm_start=null", f"precision={precision}", f"precision.{section}.first=1")
    for kernels in (parts.learner.kernels, parts.sampler.engine.kernels):  # type: ignore[attr-defined]
        assert kernels.fp8.exclude == ("layers.0",)
    with pytest.raises(MantissaError, match="leave none of the model's 2 layers"):
        made("warm_start=null", f"precision={precision}", f"precision.{section}={{first: 1, last: 1}}")


@pytest.mark.parametrize(
    ("learner", "rollout", "overrides", "warned"),
    [
        ("bf16", "fp8", ("algorithm.correction=none",), True),
        ("bf16", "fp8", ("algorithm.correction=token_tis",), False),
        ("bf16", "bf16", ("algorithm.correction=none",), False),
    ],
)
def test_formats_that_differ_without_a_correction_are_told_what_to_add(
    configure: Callable[..., RunConfig], learner: str, rollout: str, overrides: tuple[str, ...], warned: bool
) -> None:
    rows = [{"role": "learner", "active": learner}, {"role": "rollout", "active": rollout}]
    said = _uncorrected(configure(*overrides), rows)
    assert bool(said) is warned
    assert ("the learner is in bf16, the rollout in fp8" in said) is warned
    assert ("add algorithm.correction=token_tis" in said) is warned
