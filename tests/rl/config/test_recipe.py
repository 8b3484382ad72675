"""Recipes: overrides, presets before fields, one clear line for each mistake, and what may change at a resume."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mantissa.algorithms import GSPOConfig
from mantissa.base.errors import MantissaError
from mantissa.base.readers.yaml import Limits, parse_yaml
from mantissa.rl import RunConfig, resumed_config
from mantissa.rl.config.run import apply_overrides, load_recipe, make_config
from mantissa.rl.config.sections import AlgorithmConfig
from mantissa.rl.session import joined
from mantissa.runs.directory import RunDirectory

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
Configure = Callable[..., RunConfig]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_validates_says_what_it_is_for_and_survives_its_own_file(recipe: Path) -> None:
    config = load_recipe(recipe)
    assert recipe.read_text().startswith("# ")
    plain = config.model_dump(mode="json", exclude={"run_dir"})
    assert make_config(yaml.safe_load(yaml.safe_dump(plain)), "again") == config


def test_a_field_comes_after_the_preset_and_nothing_given_is_touched() -> None:
    original = {"precision": "fp32", "optimizer": {"lr": 1.0}}
    before = copy.deepcopy(original)
    for overrides in (["precision=fp16", "precision.rollout=bf16"], ["precision.rollout=bf16", "precision=fp16"]):
        values = apply_overrides(original, [*overrides, "optimizer.lr=1e-4"])
        assert values == {"precision": {"preset": "fp16", "rollout": "bf16"}, "optimizer": {"lr": 1e-4}}
    assert original == before


def test_null_leaves_out_what_was_set_before_it_and_nothing_later() -> None:
    before, after = "warm_start.steps=4", "warm_start=null"
    assert apply_overrides({"warm_start": {"batch": 8}}, [before, after]) == {"warm_start": None}
    assert apply_overrides({"warm_start": {"batch": 8}}, [after, before]) == {"warm_start": {"steps": 4}}


def test_a_loss_by_name_takes_fields_and_brings_what_its_definition_says(configure: Configure) -> None:
    def algorithm(*overrides: str) -> Any:
        return configure(*(f"algorithm.{override}" for override in overrides)).algorithm

    assert algorithm("loss=ppo_clip", "loss.clip_high=0.3").loss.clip_high == 0.3
    gspo = algorithm("loss=gspo")
    assert (gspo.loss.clip_low, gspo.loss.clip_high, gspo.aggregation) == (3e-4, 4e-4, "seq_mean_token_mean")
    assert algorithm("loss={kind: gspo, clip_high: 1e-3}").aggregation == "seq_mean_token_mean"
    assert algorithm("loss=gspo", "aggregation=token_mean").aggregation == "token_mean"
    assert AlgorithmConfig(loss=GSPOConfig()).aggregation == "seq_mean_token_mean"
    dapo = algorithm("loss=dapo", "loss.dual_clip=5")
    assert (dapo.loss.clip_high, dapo.loss.dual_clip, dapo.aggregation) == (0.28, 5.0, "token_mean")
    assert algorithm("loss=cispo", "correction=geometric_token_tis").aggregation == "token_mean"
    flowrl = algorithm("reference={}", "loss=flowrl", "loss.beta=5")
    assert (flowrl.loss.kind, flowrl.advantage, flowrl.aggregation) == ("flowrl", "grpo", "seq_mean_token_mean")
    assert (flowrl.loss.beta, flowrl.reference.refresh_every) == (5, None)
    assert configure("rollout.samples=1", "algorithm.advantage=reinforce_pp").algorithm.advantage == "reinforce_pp"


@pytest.mark.parametrize(
    ("said", "preset"), [("float16", "fp16"), ("half", "fp16"), ("bfloat16", "bf16"), ("{preset: half}", "fp16")]
)
def test_torchs_names_for_formats_are_understood_and_ours_recorded(
    configure: Configure, said: str, preset: str
) -> None:
    config = configure(f"precision={said}")
    assert config.precision.train == config.precision.rollout == preset
    recorded = config.model_dump(mode="json")
    assert recorded["precision"] == {"preset": preset}
    assert make_config(recorded, "config.yaml") == config
    roles = configure("precision.train=bfloat16", "precision.rollout=half").precision
    assert (roles.train, roles.rollout) == ("bf16", "fp16")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("2E5", 2e5), ("-1.5e-2", -0.015), ("3", 3), ("null", None), ("[a, b]", ["a", "b"])],
)
def test_numbers_as_people_write_them(text: str, value: Any) -> None:
    assert parse_yaml(text, "test") == value


def test_a_number_has_at_most_64_bits() -> None:
    assert parse_yaml(f"a: {2**64 - 1}", "test") == {"a": 2**64 - 1}
    with pytest.raises(MantissaError, match="line 1: a number of more than 64 bits"):
        parse_yaml(f"a: {2**64}", "test")


def test_values_are_counted_with_aliases_written_out() -> None:
    nine = Limits(99, 9, 9)
    assert parse_yaml("{a: &a [1, 2], b: *a}", "test", nine) == {"a": [1, 2], "b": [1, 2]}  # 1 + 2 keys + 3 + 3
    with pytest.raises(MantissaError, match="line 1: more than 9 values"):
        parse_yaml("{a: &a [1, 2, 3], b: *a}", "test", nine)


FLOWRL = "algorithm.reference={} & algorithm.loss=flowrl"
VLLM = "rollout.engine=vllm"
TOKEN_REJECTION = "algorithm.correction={reject_unit: token, reject_by: k3, reject_high: 0.1}"
GDPO = "task.reward=[{verifier: task}, {function: 'a:b'}] & algorithm.advantage=gdpo"
DISTILLATION = "algorithm.advantage=distillation & algorithm.reference={path: teacher}"
MISTAKES = [  # overrides, with " & " between them, and what is said
    ("optimizer.learning_rate=1", r"unknown key 'optimizer\.learning_rate'.*known here: lr, warmup"),
    ("optimiser.lr=1", r"unknown key 'optimiser'; did you mean 'optimizer'\?"),
    ("task.max_digit=3", r"unknown key 'task\.max_digit'; did you mean 'max_digits'\?"),
    ("algorithm.loss.clip_hi=3", r"unknown key 'algorithm\.loss\.clip_hi'; did you mean 'clip_high'\?"),
    ("algorithm.loss=dapo & algorithm.loss.clip_hi=3", r"'algorithm\.loss\.clip_hi'; did you mean 'clip_high'"),
    ("model.fresh.hidden=3", r"unknown key 'model\.fresh\.hidden'; did you mean 'hidden_size'\?"),
    ("model.lora={rnk: 4}", "unknown key 'model.lora.rnk'; did you mean 'rank'"),
    ("rollout.dynamic.max_batches=3", r"unknown key 'rollout\.dynamic\.max_batches'"),
    ("task.reward=[{functio: a:b}]", r"'task.reward.0.functio'; did you mean 'function'\? \(known here: function,"),
    ("precision.rolout=bf16", r"unknown key 'precision\.rolout'; did you mean 'rollout'\?"),
    ("guard={windw: 3}", "unknown key 'guard.windw'; did you mean 'window'"),
    ("precision=fp15", r"unknown precision preset 'fp15'.*did you mean 'fp16'\?"),
    ("precision.fp8.base=fp16", r"precision: fp8 does nothing where no role is fp8"),
    ("precision.rollout=int3", r"precision\.rollout: unknown number format.*, got 'int3'"),
    ("steps=0", r"steps: input should be greater than or equal to 1, got 0"),
    ("steps=many", r"steps: expected a number, without quotes, got 'many'"),
    ("steps", r"override 'steps': expected key=value"),
    ("=3", r"override '=3': expected key=value"),
    ("steps={", r"override 'steps=\{'.*not valid YAML"),
    ("steps.more=1", r"override steps\.more: steps is 4, which has no fields"),
    ("name.more=1", r"override name\.more: name is 'small', which has no field 'more'"),
    ("trackers=[tensorbord]", r"trackers\.0: input should be 'tensorboard' or 'wandb', got 'tensorbord'"),
    ("task.kind=sudoku", r"task: .*'sudoku'"),
    # the model, and where its adapters are
    ("model.path=x", r"exactly one of model\.path and model\.fresh"),
    ("model={path: x, tokenizer: bytes}", "model.tokenizer does nothing beside model.path"),
    ("model.lora={rank: 4}", "model.lora: expected alpha"),
    ("model.lora={rank: 4, alpha: 8, targets: [q_prj]}", "no projection is called 'q_prj'; did you mean 'q_proj'"),
    ("model.lora={rank: 4, alpha: 8, dropout: 0.05}", "with dropout the learner would score"),
    ("model.lora={path: somewhere}", "model.lora.path belongs to a base"),
    # precision and its scale
    ("loss_scaling.rule=auto & loss_scaling.growth_interval=100", "loss_scaling.growth_interval does nothing with"),
    ("precision=bf16 & loss_scaling.initial=1024", "loss_scaling does nothing for a bf16 learner"),
    ("precision.reference=bf16", r"precision\.reference=bf16 does nothing without a reference policy"),
    ("precision.kernels=exact & rollout.max_policy_lag=4", r"precision\.kernels=exact with rollout\.max_policy_lag=4"),
    ("rollout.emulate=serving", "rollout: emulate does nothing with engine=native"),
    (
        "rollout={engine: emulated, emulate: {nrom: fused}, max_tokens: 6}",
        "'rollout.emulate.nrom'; did you mean 'norm'",
    ),
    ("rollout.engine=emulated & rollout.emulate=vllm", "rollout.emulate: expected serving, or switches .* got 'vllm'"),
    ("rollout.engine=emulated & rollout.emulate={}", "rollout.emulate: no switch is on"),
    (
        "rollout.engine=emulated & rollout.emulate.norm=half",
        "rollout.emulate.norm: input should be 'fused', got 'half'",
    ),
    ("rollout.engine=emulated & rollout.emulate.tensor_parallel=1", "tensor_parallel: .* greater than or equal to 2"),
    ("rollout.engine=emulated & rollout.vllm.share_every=2", "rollout: vllm does nothing with engine=emulated"),
    ("rollout.engine=emulated & precision.kernels=exact", "rollout.engine=emulated with precision.kernels=exact"),
    ("rollout.engine=emulated & precision.backend=native", "rollout.engine=emulated with precision.backend=native"),
    # rewards, guard
    ("task.reward=[{function: a.b}]", "task.reward.0.function: expected package.module:function, .* got 'a.b'"),
    ("task.reward=exat", "task.reward: input should be 'exact', 'prefix' or 'result', got 'exat'"),
    ("task.reward=[{verifier: task, weight: x}]", "task.reward.0.weight: expected a number, without quotes, got 'x'"),
    ("task={kind: code} & grading.timeout_s=2", r"task.time_limit_s=2 is not below grading.timeout_s=2"),
    ("guard={to: fp16}", "guard.to: input should be 'bf16' or 'fp32', got 'fp16'"),
    ("guard={accuracy_warn: 0.1}", r"guard: accuracy_fall_back=0.05: expected a number from accuracy_warn=0.1"),
    ("guard={reward_fall_back: 5}", "guard.reward_fall_back: input should be less than or equal to 1, got 5"),
    ("guard=3", "guard: input should be a valid dictionary"),
    # what is maximised
    ("algorithm.aggregation_length=3", "aggregation_length does nothing with aggregation=token_mean"),
    ("algorithm.correction=tis", r"unknown correction 'tis'"),
    ("algorithm.correction.truncate_at=2", "truncate_at: correction is 'token_tis'"),
    ("algorithm.loss=dapo & algorithm.aggregation=seq_mean_token_mean", "loss=dapo is a mean over all tokens"),
    (f"algorithm.loss=gspo & {TOKEN_REJECTION}", "one ratio for a whole sequence"),
    ("algorithm.loss=reinforce & algorithm.correction=bypass", "bypass does nothing with loss=reinforce"),
    ("algorithm.loss=reinforce & algorithm.correction=token_tis_normalized", "one micro-batch at a time"),
    ("algorithm.correction={bypass: true, mode: mask, level: token, mask_high: 2}", "bypass takes no weights"),
    ("algorithm.loss=flowrl", r"tilts a reference policy.*there is none; set algorithm\.reference=\{\}"),
    ("algorithm.kl.coefficient=0.1", r"algorithm\.kl is the distance from a reference policy, and there is none"),
    (f"{FLOWRL} & algorithm.advantage=dr_grpo", "takes the group-normalised reward, got advantage=dr_gr"),
    (f"{FLOWRL} & algorithm.aggregation=token_mean", "loss=flowrl is a mean over sequences"),
    (f"{FLOWRL} & algorithm.kl.coefficient=0.1", "would hold the policy to the reference twice"),
    (f"{FLOWRL} & {TOKEN_REJECTION}", "about whole responses"),
    (f"{FLOWRL} & algorithm.loss.bounds=[2, 3]", r"two bounds with 1 between them.*got \[2\.0, 3\.0\]"),
    ("algorithm.reference.refresh_every=0", r"algorithm\.reference\.refresh_every: input should be greater than"),
    ("algorithm.reference.refresh=3", r"'algorithm\.reference\.refresh'; did you mean 'refresh_every'"),
    # how much is sampled, and how late
    ("rollout.samples=1 & algorithm.advantage=rloo", r"needs rollout\.samples of 2 or more"),
    ("rollout.samples=1", r"advantage=dr_grpo needs rollout\.samples of 2 or more: .* every advantage is 0"),
    ("optimizer.updates_per_batch=33", "updates_per_batch: expected at most one update a completion"),
    (
        "rollout.samples=1 & rollout.prompts=1 & optimizer.updates_per_batch=1 & algorithm.advantage=reinforce_pp",
        r"reinforce_pp compares completions, and a step has one; raise rollout\.prompts",
    ),
    ("rollout.dynamic={} & rollout.samples=1", "rollout: dynamic drops groups .*use 2 or more"),
    ("rollout.dynamic.when_exhausted=stop", r"rollout\.dynamic\.when_exhausted: .*got 'stop'"),
    ("rollout.overlong.buffer=6", r"rollout: overlong\.buffer=6: expected less than max_tokens=6"),
    (
        f"{GDPO} & rollout.overlong.buffer=4",
        r"advantage=gdpo with rollout\.overlong: each reward is divided by",
    ),
    (
        f"{DISTILLATION} & rollout.overlong.buffer=4",
        r"rollout\.overlong does nothing with algorithm\.advantage=distillation",
    ),
    (
        "task.reward=[{verifier: task, weight: 3}] & algorithm.advantage=grpo",
        r"task\.reward: the weight 3 of the only term does nothing with algorithm\.advantage=grpo",
    ),
    (
        "task.reward=[{verifier: task, weight: 0.5}, {function: 'a:b', weight: 0}] & "
        "algorithm.advantage=reinforce_pp_baseline",
        r"task\.reward: the weight 0\.5 of the only term does nothing",
    ),
    (
        "task.reward=[{verifier: task}, {function: 'a:b', weight: 0}] & algorithm.advantage=gdpo",
        r"gdpo normalises several rewards apart, and task\.reward is one",
    ),
    ("rollout.overlong.factor=1", r"missing key 'rollout\.overlong\.buffer'"),
    ("rollout.max_policy_lag=1", r"max_policy_lag=1 does nothing with optimizer\.updates_per_batch=2"),
    ("rollout.max_policy_lag=-1", r"rollout\.max_policy_lag: .*got -1"),
    # processes
    ("parallel=fsdp2", "parallel=fsdp2 does nothing with nproc=1"),
    ("nproc=9", "nproc=9, but rollout.prompts=8"),
    ("nproc=2 & rollout.max_policy_lag=4", "max_policy_lag=4 with nproc=2: sampling beside learning is for one"),
    ("nproc=2 & parallel=fsdp2 & model.lora={rank: 2, alpha: 4}", "parallel=fsdp2 with model.lora"),
    ("nproc=2 & parallel=fsdp2 & optimizer.moments=8bit", "parallel=fsdp2 with optimizer.moments=8bit"),
    ("nproc=2 & parallel=horovod", "parallel: input should be 'ddp' or 'fsdp2', got 'horovod'"),
    # vLLM, and what is its own
    ("rollout.vllm.share_every=2", "vllm does nothing with engine=native; leave it out"),
    (f"{VLLM} & rollout.vllm.share_every=-1", "share_every"),
    (f"{VLLM} & rollout.vllm.timeout_s=60", r"rollout\.vllm: timeout_s does nothing without a server; leave it out"),
    (f"{VLLM} & rollout.vllm.server=http://x:1 & guard={{}}", "guard: the server samples in the format that it was"),
    (f"{VLLM} & rollout.vllm.sleep=true & rollout.max_policy_lag=4", "sleep=true and rollout.max_policy_lag=4: it sam"),
]
NOT_ON_VLLM = [  # good natively
    ("precision={preset: fp16, kernels: exact}", r"precision\.kernels=exact: vLLM's kernels add in another"),
    ("precision={preset: fp16, kv_cache: bf16}", r"precision\.kv_cache=bf16: vLLM's cache is kept in .* fp16"),
    ("precision={preset: fp16, logits: bf16}", r"precision\.logits=bf16: vLLM holds logits in fp32 or .* fp16"),
    (
        "precision={preset: fp8-rollout, kv_cache: fp16, fp8: {base: fp16}, logits: bf16}",
        r"precision\.logits=bf16: vLLM holds logits in fp32 or in the rollout's fp16",
    ),
    ("precision={preset: fp16, backend: simulated}", r"precision\.backend=simulated: vLLM computes in fp16"),
    ("rollout.temperature=0.005", r"rollout\.temperature=0\.005: vLLM would sample at 0\.01"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES)
def test_mistakes_are_one_clear_line(configure: Configure, overrides: str, message: str) -> None:
    with pytest.raises(MantissaError, match=message) as caught:
        configure(*overrides.split(" & "))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "task.reward=[{verifier: task, weight: 3}] & algorithm.advantage=dr_grpo",  # a longer step, before Adam
        "task.reward=[{verifier: task, weight: 3}] & algorithm.advantage=grpo & rollout.overlong.buffer=4",
        "task.reward=[{verifier: task, weight: -1}] & algorithm.advantage=grpo",
        "task.reward=[{verifier: task, weight: 3}, {function: 'a:b'}] & algorithm.advantage=grpo",
        GDPO.replace("{verifier: task}", "{verifier: task, weight: 3}"),
    ],
)
def test_weights_that_do_something_are_accepted(configure: Configure, overrides: str) -> None:
    configure(*overrides.split(" & "))


@pytest.mark.parametrize(("override", "message"), NOT_ON_VLLM)
def test_what_vllm_is_refused(configure: Configure, override: str, message: str) -> None:
    configure(override)
    with pytest.raises(MantissaError, match=rf"rollout\.engine=vllm with {message}.*or set rollout\.engine=native"):
        configure(override, VLLM)


@pytest.mark.parametrize(
    "overrides",
    [
        "precision={preset: fp16, kv_cache: fp16, logits: fp16} & nproc=2 & parallel=fsdp2",
        "precision={preset: bf16, kv_cache: fp8} & rollout.max_policy_lag=4",
        "precision={preset: fp8-rollout, kv_cache: bf16} & rollout.vllm.sleep=true & guard={}",
        "precision={train: bf16, rollout: fp32, backend: simulated} & rollout.vllm={server: http://x:1, timeout_s: 60}",
    ],
)
def test_what_vllm_can_is_accepted(configure: Configure, overrides: str) -> None:
    config = configure(VLLM, *overrides.split(" & "))
    assert config.rollout.engine == "vllm"
    assert RunConfig(**config.model_dump(mode="json")) == config  # as a resume reads it


def test_a_run_by_the_auto_rule_can_be_resumed(configure: Configure) -> None:
    """Its own file names the growth keys too, with their defaults."""
    config = configure("precision=fp16", "loss_scaling.rule=auto")
    assert make_config(config.model_dump(mode="json", exclude={"run_dir"}), "again") == config


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match="no recipe at"):
        load_recipe(tmp_path / "absent.yaml")
    for text, message in (
        ("steps: [1", "line 1.*not valid YAML"),
        ("- a list", "expected keys and values, got list"),
        ("steps: 1\nsteps: 2", "line 1: the key 'steps' is given twice"),
        ("name: x", r"missing key 'steps' \(and \d+ more\)"),
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(MantissaError, match=message):
            load_recipe(path)


# How many processes, and what may be another at a resume


def test_nproc_is_the_number_of_processes_or_an_error(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(MantissaError, match="nproc=2, but this is one of 1 processes: start them with mantissa train"):
        joined(configure("nproc=2"), cpu).__enter__()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(MantissaError, match="nproc=2, but this is one of 3 processes"):
        joined(configure("nproc=2"), cpu).__enter__()


def test_torchruns_number_stands_where_the_recipe_does_not_say(small: dict[str, Any], tmp_path: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small))
    assert load_recipe(path).nproc == 1
    assert load_recipe(path, nproc=3).nproc == 3
    assert load_recipe(path, ["nproc=2"], nproc=3).nproc == 2  # which ``joined`` then refuses


def test_a_resumed_run_may_have_another_number(configure: Configure, tmp_path: Any) -> None:
    plain = configure("nproc=2", "parallel=fsdp2").model_dump(mode="json", exclude={"run_dir"})
    RunDirectory.create(tmp_path / "run", plain, {}).close()

    def found(*overrides: str, world: int | None = None) -> tuple[int, str | None]:
        config = resumed_config(tmp_path / "run", overrides, world)
        return config.nproc, config.parallel

    assert found() == (2, "fsdp2")
    assert found("nproc=3") == found(world=3) == found("nproc=3", world=4) == (3, "fsdp2")
    assert found("nproc=3", "parallel=ddp") == (3, "ddp")
    assert found("nproc=1") == (1, None)
    with pytest.raises(MantissaError, match="parallel=ddp does nothing"):
        found("nproc=1", "parallel=ddp")


def test_a_resumed_run_may_have_another_server_and_nothing_else(configure: Configure, tmp_path: Any) -> None:
    old, new = "rollout.vllm.server=http://a:1", "rollout.vllm.server=http://b:2"
    plain = configure("rollout.engine=vllm", old).model_dump(mode="json", exclude={"run_dir"})
    RunDirectory.create(tmp_path / "run", plain, {}).close()
    found = resumed_config(tmp_path / "run", [new])
    assert found.rollout.vllm.server == "http://b:2"
    assert found.model_dump(exclude={"rollout"}) == resumed_config(tmp_path / "run").model_dump(exclude={"rollout"})
    assert found.rollout.samples == resumed_config(tmp_path / "run").rollout.samples
    with pytest.raises(MantissaError, match=r"\(but for nproc, parallel, rollout\.vllm\.server\): leave steps out"):
        resumed_config(tmp_path / "run", ["steps=9"])
