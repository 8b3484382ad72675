"""What ``check-verl`` finds in other people's overrides and scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mantissa.errors import MantissaError
from mantissa.launch import Plan, Report, check_verl
from mantissa.launch.script import read_words

FSDP_FP16 = "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16"
ROLLOUT = "actor_rollout_ref.rollout."


def active(report: Report) -> dict[str, str]:
    return {role.name: role.active for role in report.roles}


def verdicts(*overrides: str) -> list[tuple[str, str]]:
    return [(setting.verdict, setting.instead) for setting in check_verl(overrides).settings]


def test_the_one_key_that_does_nothing() -> None:
    report = check_verl(["actor_rollout_ref.actor.fsdp_config.dtype=float16"])
    (setting,) = report.wrong
    assert setting.verdict == "ignored"
    assert setting.instead == FSDP_FP16
    roles = active(report)
    assert (roles["learner"], roles["rollout"], roles["logits"]) == ("bf16", "bf16", "bf16")
    assert roles["loss scaling"] == "none"
    assert "it would be bf16" in next(role.why for role in report.roles if role.name == "reference")
    meant = {line.split("=")[0]: line.split("=")[1] for line in report.meant}
    assert meant == {
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp16",
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "fp16",
        ROLLOUT + "dtype": "float16",
    }


def test_what_was_meant_then_takes_effect() -> None:
    """Following the advice leaves nothing to advise."""
    first = check_verl(["actor_rollout_ref.actor.fsdp_config.dtype=float16"])
    report = check_verl([*first.meant, "actor_rollout_ref.actor.use_kl_loss=true"])
    assert report.wrong == []
    assert report.meant == ()
    roles = active(report)
    assert {roles[name] for name in ("learner", "reference", "rollout", "logits")} == {"fp16"}
    assert roles["loss scaling"].startswith("ShardedGradScaler")
    assert "gap" not in roles


@pytest.mark.parametrize(
    ("overrides", "verdict", "instead"),
    [
        (["actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16"], "refused by hydra", FSDP_FP16),
        ([FSDP_FP16.replace("fp16", "half16")], "wrong value", ""),
        (["+" + ROLLOUT + "dtype=float16"], "refused by hydra", ROLLOUT + "dtype=float16"),
        ([ROLLOUT + "dtype=fp16"], "wrong value", ""),
        ([ROLLOUT + "quantization=fp4"], "wrong value", ""),
        (["actor_rollout_ref.actor.megatron.dtype=float16"], "refused by hydra", FSDP_FP16),
        (["+actor_rollout_ref.actor.megatron.dtype=float16"], "ignored", FSDP_FP16),
        (["actor_rollout_ref.actor.grad_clip=1.0"], "ignored", "actor_rollout_ref.actor.optim.clip_grad=1.0"),
        (["+actor_rollout_ref.actor.autocast=fp16"], "unknown", ""),
        (["++" + ROLLOUT + "dtype=float16"], "takes effect", ""),
        ([FSDP_FP16], "takes effect", ""),
    ],
)
def test_verdicts(overrides: list[str], verdict: str, instead: str) -> None:
    assert verdicts(*overrides) == [(verdict, instead)]


def test_on_megatron_the_same_key_is_the_right_one() -> None:
    for how in (["model_engine=megatron"], ["--config-name=ppo_megatron_trainer.yaml"]):
        report = check_verl([*how, "actor_rollout_ref.actor.megatron.dtype=float16"])
        assert report.wrong == []
        roles = active(report)
        assert (roles["learner"], roles["loss scaling"], roles["rollout"]) == ("fp16", "Megatron's", "bf16")
        assert roles["gap"] == "fp16 learner, bf16 rollout"


def test_fp8_on_megatron_without_its_variable_is_noticed() -> None:
    overrides = ["model_engine=megatron", "+actor_rollout_ref.actor.megatron.override_transformer_config.fp8=hybrid",
                 "+actor_rollout_ref.actor.megatron.override_transformer_config.fp8_recipe=blockwise"]  # fmt: skip
    report = check_verl(overrides)
    assert [role.active for role in report.roles if role.name == "its products"] == ["fp8 (hybrid, blockwise)"]


def test_casts_on_the_way() -> None:
    quiet = check_verl([ROLLOUT + "dtype=float16"]).casts
    assert quiet == ("verl.model_merger: the policy that it exports from a checkpoint is bf16",)
    for override, cast in {
        ROLLOUT + "checkpoint_engine.backend=delta_sharded": "takes the delta in bf16 only",
        "actor_rollout_ref.model.lora.merge=true": "merged weights are cast to bf16",
        "actor_rollout_ref.model.lora_rank=16": "adapters are cast to the base weights' format",
        ROLLOUT + "quantization=fp8": "then to e4m3",
    }.items():
        assert any(cast in line for line in check_verl([override, ROLLOUT + "dtype=float16"]).casts), override


def test_what_the_exporter_writes_takes_effect(planned: Callable[..., Plan]) -> None:
    """The two directions agree: nothing that ``launch`` writes is without effect, and the roles are the policy's."""
    for features, engine, wanted in (
        ("precision=fp16", "fsdp2", "fp16"), ("precision=bf16", "fsdp", "bf16"), ("precision=fp16", "megatron", "fp16"),
        ("precision=fp8", "megatron", "bf16"), ("algorithm.correction=icepop", "fsdp2", "bf16"),
    ):  # fmt: skip
        report = check_verl([str(one) for one in planned(features, engine=engine).overrides])
        assert report.wrong == [], features
        assert report.meant == (), features
        roles = active(report)
        assert (roles["learner"], roles["rollout"]) == (wanted, wanted), features


SCRIPT = r"""#!/usr/bin/env bash
set -x
dtype=${DTYPE:-float16}   # the format
export NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1
# actor_rollout_ref.rollout.quantization=fp8
PRECISION=(
    actor_rollout_ref.actor.megatron.dtype=${dtype}
    "actor_rollout_ref.rollout.dtype=$dtype"
)
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer' \
    data.train_files="['$HOME/a.parquet']" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.dtype=bfloat16 "${PRECISION[@]}" \
    algorithm.rollout_correction.rollout_is=token $@
"""


def test_a_script_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    words = read_words([str(path)])
    assert words.config_name == "ppo_megatron_trainer"
    assert words.value("actor_rollout_ref.actor.megatron.dtype") == "float16"
    assert words.value(ROLLOUT + "quantization") is None
    assert words.value(ROLLOUT + "dtype") == "bfloat16"  # the last in the file
    assert words.variables["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
    report = check_verl([str(path)])
    assert (report.engine, report.rollout) == ("megatron", "sglang")
    assert active(report)["gap"] == "fp16 learner, bf16 rollout"
    assert active(report)["correction"] == "by token, 2.0"


def test_variables_and_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("A=float16\nB=${UNSET:-bfloat16}\nrun actor_rollout_ref.rollout.dtype=${A} x.y=$B z.w=${NOBODY}\n")
    words = read_words([str(path)])
    assert {key: given.value for key, given in words.overrides.items()} == {
        ROLLOUT + "dtype": "float16", "x.y": "bfloat16", "z.w": "${NOBODY}"}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [("echo 'no end", "cannot be read as a shell script"), ("echo hello", "found no override")],
)
def test_scripts_that_are_none(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(text)
    with pytest.raises(MantissaError, match=reason):
        check_verl([str(path)])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["missing.sh"], "expected overrides such as"), (["a.b=1", "what"], "'what': expected key=value"),
     (["actor_rollout_ref.actor.strategy=veomni"], "this check knows fsdp, fsdp2, megatron"),
     (["actor_rollout_ref.rollout.name=hf"], "this check knows vllm, sglang")],
)  # fmt: skip
def test_arguments_that_are_wrong(arguments: list[str], reason: str) -> None:
    with pytest.raises(MantissaError, match=reason):
        check_verl(arguments)
