"""``trainer.gate`` beside a trainer that has only what it asks for: no verl, which ``test_gate_jobs.py`` has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.verl.gate import FIRST, KEPT, TrainerGate, parse

ROWS, LONG = 96, 16


class Section(dict[str, Any]):
    """omegaconf's: keys as attributes, and ``get``."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return Section(value) if isinstance(value, dict) else value


class Struct(Section):
    """As hydra gives it to a trainer: a key that is not there is an error as an attribute."""

    def __getattr__(self, name: str) -> Any:
        value = self[name]
        return Struct(value) if isinstance(value, dict) else value


def config(folder: Path, **changed: Any) -> Section:
    rollout = {"name": "vllm", "dtype": "bfloat16", "temperature": 1.0, "calculate_log_probs": True}
    actor = {"strategy": "fsdp2", "fsdp_config": {"dtype": "bfloat16"}}
    return Section(
        actor_rollout_ref={"rollout": rollout | changed.pop("rollout", {}), "actor": actor},
        trainer={"default_local_dir": str(folder), "v1": {"trainer_mode": changed.pop("mode", "sync")}},
        algorithm={"rollout_correction": {"bypass_mode": changed.pop("bypass", False)}},
    )


def nested(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A batch in the transfer queue: ``size`` is of the learner's error, ``lag`` of the weights that sampled."""

    def made(step: int, size: float = 0.01, lag: int = 0, padding: int = 0) -> Any:
        draw = torch.Generator().manual_seed(step)
        lengths = [8 + row % 8 for row in range(ROWS)]
        rollout = [-3.0 - 3 * torch.rand(n, generator=draw) for n in lengths]
        learner = [each + size * torch.randn(len(each), generator=draw) * (1 - each.exp()) for each in rollout]
        fields = {
            "prompts": nested([torch.tensor([1, row // 4]) for row in range(ROWS)]),
            "responses": nested([torch.randint(0, 50, (n,), generator=draw) for n in lengths]),
            "response_mask": nested([torch.ones(n, dtype=torch.int64) for n in lengths]),
            "rollout_log_probs": nested(rollout),
            "old_log_probs": nested(learner),
        }

        def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
            assert (len(keys), partition_id) == (ROWS, "train")
            return {name: fields[name] for name in select_fields}

        monkeypatch.setitem(sys.modules, "transfer_queue", SimpleNamespace(kv_batch_get=get))
        tags = [{"min_global_steps": step - 1 - lag, "is_padding": row >= ROWS - padding} for row in range(ROWS)]
        return SimpleNamespace(
            keys=[str(n) for n in range(ROWS)], partition_id="train", tags=tags, extra_info={}, fields=fields
        )

    return made


FREE = {"precision": {"train": "fp8", "rollout": "bf16"}}


@pytest.mark.parametrize(
    ("actor", "rollout", "formats"),
    [
        ({"strategy": "fsdp2", "fsdp_config": {"dtype": "float16"}}, {}, ("bf16", "bf16")),  # which nobody reads
        ({"strategy": "mantissa_fsdp2", "fsdp_config": {"mixed_precision": {"param_dtype": "float16"}}},
         {"dtype": "float16"}, ("fp16", "fp16")),
        ({"strategy": "fsdp", "fsdp_config": {}}, {"quantization": "fp8"}, ("bf16", "fp8")),
        ({"strategy": "mantissa", "fsdp_config": {"dtype": "bfloat16", "mixed_precision": FREE}}, {}, ("fp8", "bf16")),
        ({"strategy": "mantissa", "fsdp_config": {"dtype": "float16"}}, {"name": "mantissa"}, ("fp16", "fp16")),
        ({"strategy": "megatron", "megatron": {"dtype": "float16"}}, {}, ("fp16", "bf16")),
        ({"strategy": "megatron", "megatron": {"dtype": "bfloat16", "override_transformer_config": {"fp8": "hybrid"}}},
         {}, ("fp8", "bf16")),
        ({"strategy": "veomni", "veomni": {"mixed_precision": True}}, {}, (None, "bf16")),
    ],
)  # fmt: skip
def test_it_judges_by_the_formats_that_run(
    tmp_path: Path, actor: dict[str, Any], rollout: dict[str, Any], formats: tuple[str | None, str]
) -> None:
    """Of each engine by the keys that it reads, whose section is the only one that its tree has."""
    made = Struct(config(tmp_path))
    made["actor_rollout_ref"]["actor"] = actor
    made["actor_rollout_ref"]["rollout"] |= rollout
    gate = TrainerGate(made, "warn")
    assert (gate.formats["learner_format"], gate.formats["rollout_format"]) == formats


def trainer(step: int) -> Any:
    return SimpleNamespace(global_steps=step)


def test_it_looks_at_each_of_the_first_steps_and_then_now_and_then(tmp_path: Path, batch: Any) -> None:
    gate = TrainerGate(config(tmp_path), "stop:10")
    looked = [step for step in range(1, 32) if gate.look(trainer(step), batch(step))]
    assert looked == [*range(1, FIRST + 1), 10, 20, 30]
    assert sorted(int(each.name[5:]) for each in (tmp_path / "doctor").iterdir()) == looked
    resumed = TrainerGate(config(tmp_path), "stop:10")
    assert resumed.look(trainer(13), batch(13))["mantissa/gate_fault"] == 0


@pytest.mark.parametrize(
    ("resumed", "mode", "held"),
    [
        (True, "auto", True), (True, "resume_path", True), (False, "auto", False), (True, "broken", False),
        (True, "resume_path elsewhere", False),
    ],
)  # fmt: skip
def test_a_resumed_job_is_held_to_its_own_measure(
    resumed: bool, mode: str, held: bool, tmp_path: Path, batch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gap of ten times its own, which the formats' table allows; where a job begins, what lies there is another's."""
    first = TrainerGate(config(tmp_path), "stop")
    assert first.look(trainer(1), batch(1, size=0.004))["mantissa/gate_fault"] == 0
    asked = config(tmp_path / "new" if mode.startswith("resume_path") else tmp_path)
    elsewhere = tmp_path / "other" if mode.endswith("elsewhere") else tmp_path
    asked["trainer"] |= {"resume_mode": mode.split()[0], "resume_from_path": str(elsewhere / "global_step_3")}
    if mode == "broken":
        (tmp_path / KEPT).write_text('{"healthy": [')
    gate, step = TrainerGate(asked, "stop"), 4 if resumed else 1
    if held:
        with pytest.raises(MantissaError, match=r"step 4: .* was its own, so something changed"):
            gate.look(trainer(step), batch(step, size=0.04))
    else:
        assert gate.look(trainer(step), batch(step, size=0.04))["mantissa/gate_fault"] == 0
    assert ("the gap is measured anew" in capsys.readouterr().err) is (mode == "broken")


def test_a_fault_stops_or_is_said(tmp_path: Path, batch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        MantissaError, match=r"step 1: not known: the gap is .* What helps: .* Page: .*step-1/doctor.html"
    ):
        TrainerGate(config(tmp_path), "stop").look(trainer(1), batch(1, size=0.6))
    found = TrainerGate(config(tmp_path), "warn").look(trainer(1), batch(1, size=0.6))
    assert found["mantissa/gate_fault"] == 1
    assert found["mantissa/gate_size_of_u"] > 0.4
    assert capsys.readouterr().err.count("mantissa doctor: step 1: ") == 2


def scaled(fields: dict[str, Any], ratio: float = 0.9) -> None:
    """In the place of a batch's log-probs those of laws of twelve words, whose logits the learner has times a ratio."""
    draw, sides, tokens = torch.Generator().manual_seed(0), ([], []), []  # type: ignore[var-annotated]
    for row, mask in enumerate(fields["response_mask"].unbind()):
        prompt = torch.Generator().manual_seed(row // 4)
        z = 2 * torch.randn(len(mask), 12, generator=prompt)
        drawn = torch.multinomial(z.softmax(-1), 1, generator=draw)
        tokens.append(drawn[:, 0])
        for side, logits in zip(sides, (z, ratio * z), strict=True):
            side.append(logits.log_softmax(-1).gather(-1, drawn)[:, 0])
    for name, rows in (("responses", tokens), ("rollout_log_probs", sides[0]), ("old_log_probs", sides[1])):
        fields[name] = nested(rows)


@pytest.mark.parametrize("capped", [True, False])
def test_a_temperature_may_be_a_lost_cap_where_the_model_has_one(capped: bool, tmp_path: Path, batch: Any) -> None:
    """A cap far above the logits bends them by less than noise: log-probs alone do not tell its loss from a scale."""
    given, asked = batch(1), config(tmp_path)
    scaled(given.fields)
    shape = {"num_hidden_layers": 2} | ({"final_logit_softcapping": 30.0} if capped else {})
    (tmp_path / "config.json").write_text(json.dumps({"text_config": shape}))
    asked["actor_rollout_ref"]["model"] = {"path": str(tmp_path)}
    with pytest.raises(MantissaError) as said:
        TrainerGate(asked, "stop").look(trainer(1), given)
    assert "a temperature that only one side applies" in str(said.value)
    assert ("logits that only one side soft-caps" in str(said.value)) is capped


def test_stale_weights_have_their_name(tmp_path: Path, batch: Any) -> None:
    gate = TrainerGate(config(tmp_path), "stop")
    gate.look(trainer(1), batch(1))
    with pytest.raises(MantissaError, match=r"step 2: a fault: either stale weights .*parameter_sync_step=1"):
        gate.look(trainer(2), batch(2, size=0.6, lag=1))


def test_of_a_trainer_that_runs_ahead_only_fresh_responses_are_compared(tmp_path: Path, batch: Any) -> None:
    gate = TrainerGate(config(tmp_path, mode="separate_async"), "stop")
    assert gate.look(trainer(2), batch(2, size=0.6, lag=1)) == {}
    assert gate.look(trainer(3), batch(3))["mantissa/gate_fault"] == 0


def test_rows_that_only_fill_a_batch_are_left_out(tmp_path: Path, batch: Any) -> None:
    found = TrainerGate(config(tmp_path), "warn").look(trainer(1), batch(1, padding=8))
    whole = TrainerGate(config(tmp_path), "warn").look(trainer(1), batch(1))
    assert found["mantissa/gate_tokens"] < whole["mantissa/gate_tokens"]


def test_a_batch_that_cannot_be_read_is_said_and_the_training_goes_on(
    tmp_path: Path, batch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = batch(1)
    del lacking.fields["rollout_log_probs"]
    assert TrainerGate(config(tmp_path), "stop").look(trainer(1), lacking) == {}
    assert "cannot be read ('rollout_log_probs'); the training goes on" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["halt", "stop:0", "stop:x", "warn:-1", "stop:", True])
def test_what_is_no_wish_is_refused(asked: Any) -> None:
    if asked == "stop:":
        assert parse(asked) == ("stop", 25)
        return
    with pytest.raises(MantissaError, match="expected stop or warn"):
        parse(asked)


def test_without_the_rollout_s_log_probs_it_says_which_key(tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match=r"rollout\.calculate_log_probs=True"):
        TrainerGate(config(tmp_path, rollout={"calculate_log_probs": False}), "stop")


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("updates", [None, 0, 1])
def test_with_bypass_only_weights_that_have_not_gone_on_score(
    bypass: bool, updates: int | None, tmp_path: Path, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``local_trigger_step``: how many updates a trainer that runs ahead has made since its weights were the sampler's.

    Old log-probs are of those weights whatever came since; with bypass there are none, and today's would be scored.
    """
    padding = ModuleType("verl.workers.utils.padding")
    padding.response_from_nested = lambda values, mask: values  # type: ignore[attr-defined]
    for name in ("verl", "verl.workers", "verl.workers.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, padding.__name__, padding)
    given, scored = batch(1), []

    def score(what: Any) -> None:
        scored.append(what)
        given.fields["log_probs"] = given.fields["old_log_probs"]

    known = {} if updates is None else {"local_trigger_step": updates}
    asked = SimpleNamespace(global_steps=1, actor_rollout_wg=SimpleNamespace(compute_log_prob=score), **known)
    found = TrainerGate(config(tmp_path, bypass=bypass), "stop").look(asked, given)
    gone_on = bypass and updates == 1
    assert ("mantissa/gate_fault" in found) is not gone_on
    assert len(scored) == int(bypass and not gone_on)
