"""What ``check-verl`` finds in other people's overrides and scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mantissa.base.errors import MantissaError
from mantissa.launch import Plan, Report, check_verl
from mantissa.launch.scripts import read_overrides

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
        (["model_engine=dp", "actor_rollout_ref.actor.megatron.dtype=float16"], "refused by hydra", FSDP_FP16),
        (["model_engine=dp", "+actor_rollout_ref.actor.megatron.dtype=float16"], "ignored", FSDP_FP16),
        (["actor_rollout_ref.actor.grad_clip=1.0"], "ignored", "actor_rollout_ref.actor.optim.clip_grad=1.0"),
        (["+actor_rollout_ref.actor.autocast=fp16"], "unknown", ""),
        (["++" + ROLLOUT + "dtype=float16"], "takes effect", ""),
        ([FSDP_FP16], "takes effect", ""),
        (["+trainer.gate=stop:10"], "takes effect", ""),
        (["trainer.gate=stop"], "refused by hydra", "+trainer.gate=stop"),
        (["+trainer.gate=halt"], "wrong value", ""),
    ],
)
def test_verdicts(overrides: list[str], verdict: str, instead: str) -> None:
    assert verdicts(*overrides) == [(verdict, instead)]


def test_the_gate_without_what_it_compares_ends_the_job() -> None:
    given = ROLLOUT + "calculate_log_probs=False", "+trainer.gate=stop"
    assert ("wrong value", ROLLOUT + "calculate_log_probs=True") in verdicts(*given)


@pytest.mark.parametrize(
    "override",
    [FSDP_FP16.replace("fp16", "null"), "actor_rollout_ref.actor.fsdp_config.model_dtype=null",
     "model_engine=megatron actor_rollout_ref.actor.megatron.dtype=null",
     "model_engine=megatron +actor_rollout_ref.actor.megatron.override_transformer_config.fp8=null"],
)  # fmt: skip
def test_null_is_as_if_it_were_not_given(override: str) -> None:
    *engine, _ = override.split()
    assert check_verl(override.split()).roles == check_verl([*engine, "actor_rollout_ref.rollout.n=8"]).roles


def test_on_megatron_the_same_key_is_the_right_one() -> None:
    for how in (["model_engine=megatron"], ["--config-name=ppo_megatron_trainer.yaml"]):
        report = check_verl([*how, "actor_rollout_ref.actor.megatron.dtype=float16"])
        assert report.wrong == []
        roles = active(report)
        assert (roles["learner"], roles["loss scaling"], roles["rollout"]) == ("fp16", "Megatron's", "bf16")
        assert roles["gap"] == "fp16 learner, bf16 rollout"


MEGATRON = "actor_rollout_ref.actor.megatron."
TRANSFORMER = f"+{MEGATRON}override_transformer_config."
OPTIMIZER = "+actor_rollout_ref.actor.optim.override_optimizer_config."
IN_RUNTIME_ENV = "+ray_kwargs.ray_init.runtime_env.env_vars."
FP8 = ["model_engine=megatron", f"{TRANSFORMER}fp8=hybrid", f"{TRANSFORMER}fp8_recipe=blockwise",
       ROLLOUT + "name=vllm", ROLLOUT + "quantization=fp8"]  # fmt: skip
VARIABLES = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}


def test_fp8_without_its_variables_is_noticed() -> None:
    report = check_verl(FP8)
    products = [role.active for role in report.roles if role.name == "its products"]
    assert products == ["fp8 (hybrid, blockwise)", "fp8 (e4m3)"]
    assert {str(s.given): s.verdict for s in report.wrong} == {f"{n}={v}": "missing" for n, v in VARIABLES.items()}
    assert "powers of two" in report.wrong[0].why
    assert report.wrong[0].instead == f"{IN_RUNTIME_ENV}NVTE_FP8_BLOCK_SCALING_FP32_SCALES='1'"
    assert check_verl([*FP8, *(s.instead.replace("'", "") for s in report.wrong)]).wrong == []  # the advice, followed
    assert check_verl([*FP8, *(f"{n}={v}" for n, v in VARIABLES.items())]).wrong == []
    wrong = check_verl([*FP8, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=0", "VLLM_USE_DEEP_GEMM=1"]).wrong
    assert [(s.given.key[:4], s.verdict) for s in wrong] == [("NVTE", "wrong value"), ("VLLM", "missing")]
    sglang = check_verl([*FP8, ROLLOUT + "name=sglang", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1"])
    assert sglang.wrong == []  # vLLM's variables are vLLM's


IN_DICTIONARIES: list[tuple[str, str, str, str]] = [
    ("megatron", f"{TRANSFORMER}fp8=e4m3", "takes effect", "e4m3 forwards and backwards"),
    ("megatron", f"{TRANSFORMER}fp8=hybrid", "takes effect", "e5m2"),
    ("megatron", f"{OPTIMIZER}use_precision_aware_optimizer=True", "takes effect", "by itself it narrows none"),
    ("megatron", f"{OPTIMIZER}exp_avg_dtype=bf16", "ignored", "a word here stays a word"),
    ("megatron", f"{OPTIMIZER}some_new_dtype=bf16", "handed on", "the optimizer's constructor"),
    ("megatron", "actor_rollout_ref.actor.optim.exp_avg_dtype=bf16", "takes effect", "Adam's first moment"),
    ("megatron", f"{TRANSFORMER}moe_router_dtype=fp32", "takes effect", "the rollout's router has its own"),
    ("megatron", f"{TRANSFORMER}moe_router_dtype=fp16", "wrong value", "fp32, fp64"),
    ("megatron", f"{TRANSFORMER}some_new_dtype=fp16", "handed on", "Megatron's TransformerConfig"),
    ("megatron", f"+{MEGATRON}override_ddp_config.grad_reduce_in_fp32=False", "takes effect", "verl sets it"),
    ("megatron", MEGATRON + "vanilla_mbridge=True", "takes effect", "the old mbridge"),
    ("megatron", MEGATRON + "use_mbridge=False", "wrong value", "expected one of True"),
    ("megatron", MEGATRON + "qat.mode=w4a4", "wrong value", "w4a16"),
    ("megatron", "actor_rollout_ref.actor.qat.enable=True", "ignored", "read by nobody"),
    ("dp", "actor_rollout_ref.actor.fsdp_config.qat.mode=w4a4", "takes effect", "activations too"),
    ("dp", "actor_rollout_ref.actor.fsdp_config.qat.mode=w4a8", "wrong value", "w4a16, w4a4"),
    ("dp", f"{OPTIMIZER}eps=1e-6", "", ""),  # not about precision
    ("dp", f"+{ROLLOUT}engine_kwargs.vllm.kv_cache_dtype=fp8", "takes effect", "round what the learner does not"),
    ("dp", f"+{ROLLOUT}engine_kwargs.vllm.new_quant=1", "handed on", "vLLM's command line"),
    ("dp", f"+{ROLLOUT}engine_kwargs.sglang.kv_cache_dtype=fp8", "ignored", "the vllm rollout does not read it"),
]


@pytest.mark.parametrize(("engine", "override", "verdict", "why"), IN_DICTIONARIES, ids=lambda value: str(value)[-40:])
def test_what_is_handed_on_in_a_dictionary(engine: str, override: str, verdict: str, why: str) -> None:
    settings = check_verl([f"model_engine={engine}", ROLLOUT + "name=vllm", override]).settings
    assert [s.verdict for s in settings] == ([verdict] if verdict else [])
    assert all(why in s.why for s in settings)


def test_what_the_rollout_computes_in() -> None:
    """The engine's own dictionary wins over verl's key; weights of 4 bits are told."""
    report = check_verl([ROLLOUT + "dtype=bfloat16", f"+{ROLLOUT}engine_kwargs.vllm.dtype=float16"])
    assert active(report)["rollout"] == "fp16"
    for name, weights in (("vllm", "learner and rollout"), ("sglang", "in the learner alone")):
        report = check_verl(["actor_rollout_ref.actor.fsdp_config.qat.enable=True", ROLLOUT + f"name={name}"])
        assert weights in active(report)["weights"]


def test_rollouts_beside_vllm_and_sglang() -> None:
    trtllm = check_verl([ROLLOUT + "name=trtllm", ROLLOUT + "quantization=torchao", ROLLOUT + "dtype=float16"])
    assert (trtllm.rollout, [s.verdict for s in trtllm.settings]) == ("trtllm", ["wrong value", "takes effect"])
    dynamo = check_verl([ROLLOUT + "name=dynamo", ROLLOUT + "dtype=float16"])
    assert (dynamo.rollout, dynamo.wrong) == ("vllm", [])
    assert "recipe.dynamo registers it" in "".join(dynamo.assumed)


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
        plan = planned(features, engine=engine)
        report = check_verl([*map(str, plan.overrides), *(f"{one.name}={one.value}" for one in plan.environment)])
        assert report.wrong == [], features
        assert report.meant == (), features
        roles = active(report)
        assert (roles["learner"], roles["rollout"]) == (wanted, wanted), features


def test_the_command_of_a_dry_run_is_clean_as_a_script(planned: Callable[..., Plan], tmp_path: Path) -> None:
    """Its variables stand in ``--runtime-env-json``."""
    path = tmp_path / "submit.sh"
    path.write_text(planned("precision=fp8", engine="megatron").submit_command(None, None))
    report = check_verl([str(path)])
    assert report.wrong == []
    found = {s.given.key: s.why for s in report.settings if s.given.key in VARIABLES}
    assert found == dict.fromkeys(VARIABLES, "in the job's runtime_env")


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
    words = read_overrides([str(path)])
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
    words = read_overrides([str(path)])
    assert {key: given.value for key, given in words.overrides.items()} == {
        ROLLOUT + "dtype": "float16", "x.y": "bfloat16", "z.w": "${NOBODY}"}  # fmt: skip


# Shapes of scripts that people publish, in our own words: arrays, a last line that ends in a backslash, a job's
# runtime_env, a program kept in a here-document.
SHAPES: dict[str, tuple[str, list[str]]] = {
    "arrays of a submitted job, ending in a backslash": (r"""
export NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1
WHERE=${WHERE:-"$PWD"}
RUNTIME_ENV=${RUNTIME_ENV:-"${WHERE}/no/runtime_env.yaml"}
long=$((1024 * 20))
NARROW=(
    +actor_rollout_ref.actor.megatron.override_transformer_config.fp8="e4m3"
    +actor_rollout_ref.actor.megatron.override_transformer_config.fp8_recipe="blockwise"
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
    +actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True
)
ray job submit --runtime-env="${RUNTIME_ENV}" -- python3 -m verl.trainer.main_ppo model_engine=megatron \
    data.max_response_length=${long} actor_rollout_ref.rollout.name=vllm \
    "${NARROW[@]}" \
""", ["missing: exported, but a submitted job has its runtime_env only ($PWD/no/runtime_env.yaml"]),
    "a job whose runtime_env is there": (r"""
ray job submit --runtime-env env.yaml -- python3 -m verl.trainer.main_ppo model_engine=megatron \
    actor_rollout_ref.rollout.name=vllm \
    +actor_rollout_ref.actor.megatron.override_transformer_config.fp8_recipe=blockwise""", []),
    "a job whose runtime_env is on its line": (r"""
ray job submit --runtime-env-json '{"env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}}' -- python3 x.py \
    model_engine=megatron actor_rollout_ref.rollout.name=vllm \
    +actor_rollout_ref.actor.megatron.override_transformer_config.fp8_recipe=blockwise""", []),
    "4-bit weights, patterns with quotes": (r"""
mode=${mode:-w4a8}
python3 -m verl.trainer.main_ppo --config-path "$PWD/config" --config-name own_trainer \
    actor_rollout_ref.actor.fsdp_config.qat.enable=True actor_rollout_ref.actor.fsdp_config.qat.mode=${mode} \
    'actor_rollout_ref.actor.fsdp_config.qat.ignore_patterns=["lm_head", "re:.*gate$"]' \
    actor_rollout_ref.rollout.name=vllm""", ["wrong value: expected one of w4a16, w4a4"]),
    "TensorRT-LLM": (r"""
for v in $(env | awk -F= '/^(PMI|SLURM)_/{print $1}'); do unset "$v"; done
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' \
    actor_rollout_ref.rollout.name=trtllm actor_rollout_ref.rollout.mode="async" \
    +actor_rollout_ref.rollout.engine_kwargs.trtllm.batch_wait_timeout_iters=32 \
    actor_rollout_ref.actor.megatron.use_mbridge=True actor_rollout_ref.rollout.calculate_log_probs=True "${@:2}"
""", []),
    "Dynamo, in a here-document": (r"""#!/bin/bash
#SBATCH --nodes=2
# that isn't closed: '
read -r -d '' program <<EOF
python3 own.py \\
    actor_rollout_ref.rollout.name=dynamo \\
    actor_rollout_ref.actor.fsdp_config.dtype=float16
EOF
srun bash -c "$program"
""", ["ignored: FSDP reads mixed_precision.param_dtype; only Megatron's engine reads a key called dtype"]),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_published_scripts(shape: str, tmp_path: Path) -> None:
    text, found = SHAPES[shape]
    (tmp_path / "env.yaml").write_text("env_vars: {NVTE_FP8_BLOCK_SCALING_FP32_SCALES: 1}\n")
    path = tmp_path / "train.sh"
    path.write_text(text.rstrip("\n"))
    said = [f"{setting.verdict}: {setting.why}" for setting in check_verl([str(path)]).wrong]
    assert len(said) == len(found), said
    assert all(line.startswith(start) for line, start in zip(said, found, strict=True)), said


def test_a_word_that_grows_without_end_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    doubling = "\n".join(f"v{i + 1}=$v{i}$v{i}" for i in range(60))
    path.write_text(f"v0=ab\n{doubling}\nrun actor_rollout_ref.rollout.dtype=$v60\n")
    words = read_overrides([str(path)])
    held = sum(map(len, words.variables.values()))
    assert len(words.overrides[ROLLOUT + "dtype"].value) < 200_000
    assert held < 64e6, "each of its 60 variables may hold 0.1 MB"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [("missing.sh", "expected overrides such as"), ("a.b=1 what", "'what': expected key=value"),
     ("open.sh", "cannot be read as a shell script"), ("none.sh", "found no override")],
)  # fmt: skip
def test_arguments_and_scripts_that_are_wrong(
    arguments: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("open.sh", "echo 'no end"), ("none.sh", "echo hello")):
        (tmp_path / name).write_text(text)
    with pytest.raises(MantissaError, match=reason):
        check_verl(arguments.split())


@pytest.mark.parametrize("text", ["", "\n", "# a comment\n", "\\", "ray", "--runtime-env", "''"])
def test_a_script_with_next_to_nothing_in_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(MantissaError, match="found no override"):
        read_overrides([str(tmp_path / "run.sh")])


FREE = "+actor_rollout_ref.actor.fsdp_config.mixed_precision"
OURS = ("actor_rollout_ref.actor.strategy=mantissa", "actor_rollout_ref.rollout.name=mantissa",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1")  # fmt: skip
OUR_FSDP2 = ("actor_rollout_ref.actor.strategy=mantissa_fsdp2", f"{FREE}.param_dtype=fp16")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((*OURS, f"{FREE}={{precision:{{train:fp16,rollout:fp16}},lenght:32}}"), "unknown setting 'lenght'"),
        ((*OURS, f"{FREE}={{precision:fp17}}"), "fp17"),
        ((*OURS, f"{FREE}.param_dtype=fp16"), "param_dtype, reduce_dtype and buffer_dtype are FSDP's"),
        ((*OURS, f"{FREE}.shard=zero3"), "expected 'fsdp2' or 'ddp'"),
        ((*OUR_FSDP2, f"{FREE}.loss_scale=1024"), "unknown setting 'loss_scale'; did you mean 'loss_scaling'?"),
        ((*OUR_FSDP2, f"{FREE}.loss_scaling.growth_intervall=400"), "growth_intervall"),
        ((*OUR_FSDP2[:1], f"{FREE}.param_dtype=bf16", f"{FREE}.loss_scaling.retries=3"), "does nothing with param"),
    ],
)  # fmt: skip
def test_a_wrong_option_of_the_plugin_s_engines_is_named(overrides: tuple[str, ...], said: str) -> None:
    (wrong,) = check_verl(overrides).wrong
    assert wrong.verdict in ("wrong value", "ignored", "unknown")
    assert said in wrong.why


def test_what_the_plugin_s_engines_compute_in() -> None:
    """The exporter's own keys, and the same options said deeper or whole."""
    whole = (*OURS, f"{FREE}={{precision:{{train:fp16,rollout:fp16,kernels:exact}},length:32}}",
             f"{FREE}.loss_scaling.growth_interval=400")  # fmt: skip
    report = check_verl(whole)
    assert report.wrong == []
    roles = active(report)
    assert (roles["learner"], roles["rollout"], roles["loss scaling"]) == ("fp16", "fp16", "Mantissa's")
    plain = active(check_verl((*OURS, "actor_rollout_ref.actor.fsdp_config.dtype=float16")))
    assert (plain["learner"], plain["rollout"]) == ("fp16", "fp16")
    flow = (f"{FREE}.flowrl={{beta:15}}", "actor_rollout_ref.actor.policy_loss.loss_mode=flowrl")
    fsdp2 = check_verl((*OUR_FSDP2, f"{FREE}.loss_scaling={{growth_interval:400}}", *flow))
    assert fsdp2.wrong == []
    assert active(fsdp2)["loss scaling"] == "Mantissa's"


@pytest.mark.parametrize("engine", ["mantissa_fsdp2", "mantissa"])
@pytest.mark.parametrize("precision", ["fp16", "bf16-train-fp16-rollout"])
def test_what_is_exported_to_the_plugin_has_nothing_to_complain_of(
    engine: str, precision: str, planned: Callable[..., Plan]
) -> None:
    flow = ("algorithm.reference={}", "algorithm.loss=flowrl", f"precision={precision}")
    report = check_verl([str(one) for one in planned(*flow, engine=engine).overrides])
    assert report.wrong == []
    assert active(report)["learner"] == ("fp16" if precision == "fp16" else "bf16")


@pytest.mark.parametrize(
    ("overrides", "role", "active_"),
    [
        (["actor_rollout_ref.actor.strategy=veomni"], "learner", "not known (actor.strategy=veomni)"),
        ([ROLLOUT + "name=hf", ROLLOUT + "dtype=float16"], "rollout", "not known (rollout.name=hf)"),
        (["model_engine=torchtitan"], "learner", "not known (model_engine=torchtitan)"),
        ([f"+{ROLLOUT}half=True"], "rollout", "not known (actor_rollout_ref.rollout.half)"),
        (["+actor_rollout_ref.actor.fp8_mode=x"], "learner", "not known (actor_rollout_ref.actor.fp8_mode)"),
    ],
)
def test_not_known_is_an_answer(overrides: list[str], role: str, active_: str) -> None:
    """And the rest is checked all the same."""
    roles = active(check_verl(overrides))
    assert roles[role] == active_
    other = "rollout" if role == "learner" else "learner"
    assert roles[other] == "bf16"


def test_a_plus_before_a_key_that_is_null_appends() -> None:
    report = check_verl([f"+{ROLLOUT}quantization=fp8", "+algorithm.rollout_correction.rollout_is=token"])
    assert [s.verdict for s in report.settings if s.given.mark] == ["takes effect"] * 2
    assert active(report)["correction"] == "by token, 2.0"
    assert report.refused == ()


def test_one_refused_key_of_any_kind_ends_the_job() -> None:
    report = check_verl(["model_engine=megatron", "actor_rollout_ref.actor.megatron.grad_offload=True",
                         "actor_rollout_ref.rollout.n=8"])  # fmt: skip
    (refused,) = report.refused
    assert refused.given.key == "actor_rollout_ref.actor.megatron.grad_offload"
    assert report.foreign == ()  # verl 0.8 has it
    assert check_verl(["actor_rollout_ref.actor.own=1"]).foreign == ("actor_rollout_ref.actor.own",)
    assert "this will not start" in report.text


def test_an_entry_point_that_is_not_known_is_judged_in_what_is_common(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    text = "python3 -m {} actor_rollout_ref.actor.grad_clip=1.0 actor_rollout_ref.own=1"
    path.write_text(text.format("recipe.flowrl.main_flowrl"))
    report = check_verl([str(path)])
    assert [s.verdict for s in report.settings] == ["unknown"]
    assert report.refused == ()
    assert "recipe.flowrl.main_flowrl" in "".join(report.assumed)
    path.write_text(text.format("verl.trainer.main_ppo"))
    report = check_verl([str(path)])
    assert [s.verdict for s in report.settings] == ["ignored"]
    assert [s.given.key for s in report.refused] == ["actor_rollout_ref.own"]


ASYNC = "python3 -m verl.experimental.{} actor_rollout_ref.actor.grad_clip=0.5 rollout.nnodes=2 {}"


@pytest.mark.parametrize(
    ("entry", "more", "refused"),
    [
        ("one_step_off_policy.main_ppo --config-name='one_step_off_ppo_trainer.yaml'", "rollout.n_gpus_per_node=2", []),
        ("one_step_off_policy.main_ppo", "async_training.require_batches=4", ["async_training.require_batches"]),
        ("fully_async_policy.fully_async_main", "async_training.require_batches=4", []),
        ("fully_async_policy.fully_async_main", "trainer.gate=stop rollout.test_freq=10",
         ["trainer.gate", "rollout.test_freq"]),
    ],
)  # fmt: skip
def test_verl_s_other_trainers_have_trees_of_their_own(
    tmp_path: Path, entry: str, more: str, refused: list[str]
) -> None:
    """And the same workers, by which what the actor's keys do is as known as there. The refusals are hydra's."""
    (tmp_path / "run.sh").write_text(ASYNC.format(entry, more))
    report = check_verl([str(tmp_path / "run.sh")])
    assert [s.given.key for s in report.refused] == refused
    (clip,) = [s for s in report.settings if s.given.key.endswith("grad_clip")]
    assert (clip.verdict, active(report)["learner"]) == ("ignored", "bf16")
    assert not report.fork


def test_of_a_program_without_verl_s_sections_no_format_is_stated(tmp_path: Path) -> None:
    """SFT has no rollout, and its engine's keys are others."""
    (tmp_path / "run.sh").write_text("torchrun -m verl.trainer.sft_trainer engine.dtype=float16 model.lora_rank=8")
    report = check_verl([str(tmp_path / "run.sh")])
    assert (report.apart, report.state, report.casts) == (True, "unknown", ())
    assert {role.active for role in report.roles} == {"not known (verl.trainer.sft_trainer)"}
    assert "rollout on vLLM" not in report.text


FORK = """python3 -m verl.trainer.main_ppo retriever.topk=3 data.max_start_length=2048 algorithm.no_think_rl=false \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n_agent=5 actor_rollout_ref.rollout.dtype=float16"""


def test_a_fork_is_told_by_keys_that_verl_never_had(tmp_path: Path) -> None:
    """Of it no format is stated, and nothing is said to be refused: its own tree decides."""
    (tmp_path / "run.sh").write_text(FORK)
    report = check_verl([str(tmp_path / "run.sh")])
    assert (report.fork, report.state, report.casts) == (True, "unknown", ())
    assert "retriever.topk" in report.foreign
    assert {role.active for role in report.roles} == {"not known (retriever.topk)"}
    assert "a fork of verl's" in report.text
    assert "will not start" not in report.text
    for misspelt in ("actor_rollout_ref.actor.optim.lrr=1", "actor_rollout_ref.actor.optimm.lr=1", "trainer.nnodess=1"):
        report = check_verl([misspelt])
        assert (report.fork, report.state) == (False, "wrong"), misspelt
