"""Every key of verl's tree: what ``strategy=mantissa`` and ``rollout.name=mantissa`` make of it. The trainer's hook,
each engine, each server and ``mantissa check`` ask one table (``verl/keys.yaml``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from mantissa.base.errors import MantissaError
from mantissa.base.readers.yaml import parse_yaml
from mantissa.launch import check_verl
from mantissa.launch.facts import FACTS, full, short
from mantissa.launch.scripts import Override
from mantissa.launch.verl_tree import Tree, defaults
from mantissa.verl import refusals
from mantissa.verl.refusals import Refused, before_workers, idle, refused, rows

OURS = {"actor.strategy": "mantissa", "rollout.name": "mantissa", "rollout.tensor_model_parallel_size": "1"}
FSDP2 = {"actor.strategy": "mantissa_fsdp2", "rollout.name": "vllm"}
CRITIC = {"algorithm.adv_estimator": "gae", "critic.strategy": "mantissa"}
MIXED = "actor.fsdp_config.mixed_precision"
SECTIONS = ("actor.", "ref.", "model.", "rollout.")
# Of a leaf's default, another value that somebody may set.
OTHERS = {
    "actor.fsdp_config.model_dtype": "bf16", "ref.fsdp_config.model_dtype": "bf16", "actor.optim.optimizer": "SGD",
    "actor.optim.optimizer_impl": "torchao.optim", "actor.fsdp_config.fsdp_size": "4", "rollout.top_k": "50",
    "ref.fsdp_config.fsdp_size": "4", "actor.optim.override_optimizer_config": "{eps:1e-6}", "rollout.dtype": "float16",
    "rollout.logprobs_mode": "raw_logprobs", "rollout.quantization": "torchao", "rollout.top_p": "0.9",
}  # fmt: skip


def tree(given: Mapping[str, str], version: str = "0.9.1") -> Tree:
    made = Tree(defaults(version, "dp"))
    for key, value in given.items():
        assert made.apply(Override(full(key), value, "++")) == ""
    return made


def found(given: Mapping[str, str], version: str = "0.9.1") -> dict[str, Refused]:
    made = tree(given, version)
    return {each.key: each for each in refused(lambda key: made.value(full(key)))}


def changed(key: str, default: Any) -> str:
    """Another value than the default's."""
    if key in OTHERS:
        return OTHERS[key]
    if default in (True, False):
        return str(not default)
    if isinstance(default, str) and default.startswith("${"):
        return "True" if default.lower().endswith("false}") else "2"
    return {"disabled": "R3"}.get(str(default), "x") if not isinstance(default, (int, float)) else str(default + 1)


@pytest.mark.parametrize("version", ["0.9.0", "0.9.1"])
def test_each_key_of_the_tree_is_read_or_refused_or_said_to_change_nothing(version: str) -> None:
    """None is taken in silence, and none that does something is said to do nothing."""
    assert found(OURS, version) == {}
    leaves = {short(key): default for key, default in defaults(version, "dp").items()}
    leaves = {key: default for key, default in leaves.items() if key.startswith(SECTIONS)}
    assert len(leaves) > 350
    wrong = {}
    for key, default in leaves.items():
        fact = FACTS.get(key)
        read = fact is not None and "mantissa" in fact.engines and "mantissa" in fact.rollouts
        read = read and version in fact.versions
        ends = key in found({**OURS, key: changed(key, default)}, version)
        if (read or ends) == bool(idle(key)):
            wrong[key] = (read, ends, idle(key))
    assert wrong == {}


def test_each_row_is_of_a_key_that_somebody_may_set() -> None:
    """In a tree of verl's, or one that its sections take beside it; and no reason stands for nothing."""
    beside = {f"{role}.fsdp_config.router_replay.mode" for role in ("actor", "ref")} | {
        "rollout.repetition_penalty", "rollout.limit_images", "rollout.engine_kwargs.mantissa",
        "rollout.mtp.enable", "rollout.qat.enable"}  # fmt: skip
    leaves = {short(key) for version in ("0.9.0", "0.9.1") for key in defaults(version, "dp")}
    assert {row.key for row in rows()} - leaves == beside
    reasons = [pattern for pattern in refusals._table()[1] if "override_config" not in pattern]
    assert [each for each in reasons if not any(refusals.fnmatchcase(key, each) for key in leaves)] == []


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ({**OURS, "model.lora_rank": "8"}, "model.lora_rank", "expected 0: LoRA"),
        ({**OURS, "model.lora_adapter_path": "/a"}, "model.lora_adapter_path", "expected null: LoRA"),
        ({**OURS, **CRITIC}, "critic.strategy", "expected fsdp2: a critic has no engine here"),
        ({**FSDP2, **CRITIC, "critic.strategy": "mantissa_fsdp2"}, "critic.strategy", "expected fsdp2"),
        ({**OURS, "rollout.top_p": "0.9"}, "rollout.top_p", "which tokens were kept"),
        ({**OURS, "rollout.top_k": "20"}, "rollout.top_k", "expected -1 or 0"),
        ({**OURS, "actor.router_replay.mode": "R2"}, "actor.router_replay.mode", "expected disabled"),
        ({**OURS, "rollout.enable_rollout_routing_replay": "True"}, "rollout.enable_rollout_routing_replay", "routes"),
        ({**OURS, "actor.fsdp_config.param_offload": "True"}, "actor.fsdp_config.param_offload", "mantissa_fsdp2"),
        ({**OURS, "actor.fsdp_config.offload_policy": "true"}, "actor.fsdp_config.offload_policy", "expected false"),
        ({**OURS, "actor.ulysses_sequence_parallel_size": "2"}, "actor.ulysses_sequence_parallel_size", "expected 1"),
        ({**OURS, "trainer.n_gpus_per_node": "8", "actor.fsdp_config.fsdp_size": "4"}, "actor.fsdp_config.fsdp_size",
         "expected -1 or 8"),
        ({**OURS, "model.path": "/m", "model.tokenizer_path": "/t"}, "model.tokenizer_path", "expected /m"),
        ({**OURS, "model.override_config.rope_theta": "1"}, "model.override_config.rope_theta", "own configuration"),
        ({**OURS, "actor.checkpoint.save_contents": "[model,weights]"}, "actor.checkpoint.save_contents", "extra"),
        ({**OURS, f"{MIXED}.precision": "fp16", "rollout.dtype": "float32"}, "rollout.dtype", "expected fp16"),
        ({**OURS, f"{MIXED}.precision": "bf16", "actor.fsdp_config.dtype": "float16"}, "actor.fsdp_config.dtype",
         "expected bf16"),
        ({**OURS, "rollout.quantization": "fp8"}, "rollout.quantization", "precision.rollout says it"),
        ({**OURS, "rollout.tensor_model_parallel_size": "2"}, "rollout.tensor_model_parallel_size", "one process"),
        ({**OURS, "actor.policy_loss.loss_mode": "flowrl"}, "actor.policy_loss.loss_mode", "mixed_precision.flowrl={}"),
        ({**OURS, f"{MIXED}.flowrl": "{beta: 15}"}, "actor.policy_loss.loss_mode", "expected flowrl"),
        ({**OURS, "trainer.certify": "0"}, "trainer.certify", "expected the number of a step"),
        ({**OURS, "trainer.certify": "3", "trainer.save_freq": "4"}, "trainer.certify", "the step after a checkpoint"),
        ({**OURS, "trainer.certify": "2", "trainer.save_freq": "-1"}, "trainer.certify", "the step after a checkpoint"),
        ({**OURS, "trainer.certify": "1", "trainer.use_v1": "False"}, "trainer.certify", "trainer.use_v1=true"),
        ({**FSDP2, "trainer.certify": "1", "rollout.name": "vllm"}, "trainer.certify", "rollout.name=mantissa"),
        ({**FSDP2, "actor.fsdp_config.qat.enable": "True"}, "actor.fsdp_config.qat.enable", "strategy=fsdp2"),
        ({**FSDP2, "actor.fsdp_config.model_dtype": "bf16"}, "actor.fsdp_config.model_dtype", "masters"),
        ({"actor.strategy": "fsdp2", "ref.strategy": "mantissa", "ref.fsdp_config.param_offload": "True"},
         "ref.fsdp_config.param_offload", "leave it out"),
    ],
)  # fmt: skip
def test_check_and_the_trainer_refuse_the_same(given: dict[str, str], key: str, said: str) -> None:
    """In one line with what was expected, what came and what to do, from verl's own kind of configuration too."""
    assert next(iter(found(given))) == key
    line = found(given)[key].text
    assert re.match(r"\S+=mantissa\S*: " + re.escape(full(key)) + "=", line)
    assert said in line
    answer = check_verl([f"++{full(name)}={value}" for name, value in given.items()])
    setting = answer.that("refused")[0]
    assert short(setting.given.key) == key
    assert said in setting.why
    assert "refused before the job has a worker" in answer.text
    with pytest.raises(MantissaError, match=re.escape(line)):
        before_workers(sections(given))


@pytest.mark.parametrize(
    "given",
    [
        {**OURS, "model.path": "/m", "model.tokenizer_path": "/m"},
        {**OURS, "trainer.n_gpus_per_node": "4", "trainer.nnodes": "2", "actor.fsdp_config.fsdp_size": "8"},
        {**OURS, **CRITIC, "algorithm.adv_estimator": "grpo"},  # nobody makes one
        {**OURS, **CRITIC, "critic.strategy": "fsdp2"},
        {**OURS, f"{MIXED}.precision": "fp16", "rollout.dtype": "float16", "actor.fsdp_config.dtype": "float16"},
        {**FSDP2, "actor.fsdp_config.param_offload": "True", "model.lora_rank": "8"},
        {"actor.strategy": "fsdp2", "rollout.name": "vllm", "rollout.top_p": "0.9"},
        {**OURS, "actor.policy_loss.loss_mode": "flowrl", f"{MIXED}.flowrl": "{}"},
        {"actor.strategy": "megatron", "rollout.name": "vllm", "actor.policy_loss.loss_mode": "flowrl"},  # a fork's
        {**OURS, "ref.strategy": "fsdp2", "ref.fsdp_config.param_offload": "True"},
        {**OURS, "trainer.certify": "5", "trainer.save_freq": "4"},
    ],
)
def test_what_is_right_for_its_engine_is_refused_by_nobody(given: dict[str, str]) -> None:
    assert found(given) == {}
    before_workers(sections(given))
    assert check_verl([f"++{full(name)}={value}" for name, value in given.items()]).that("refused") == []


def test_flowrl_is_refused_on_an_engine_that_carries_no_head() -> None:
    """Megatron's and verl's own, where the plugin is loaded, whose loss that is."""
    flow = {"actor.policy_loss.loss_mode": "flowrl", "model.external_lib": "mantissa.verl.plugin"}
    for engine in ("megatron", "fsdp2"):
        (each,) = found({"actor.strategy": engine, "rollout.name": "vllm", **flow}).values()
        assert each.text.startswith(f"actor.strategy={engine}: actor_rollout_ref.actor.policy_loss.loss_mode=flowrl: ")
        assert each.text.endswith("and strategy=mantissa_fsdp2")


def test_a_wrong_option_of_an_engine_ends_a_job_before_its_workers() -> None:
    for given, said in (
        ({**OURS, f"{MIXED}.lenght": "32"}, "did you mean 'length'"),
        ({**OURS, "ref.fsdp_config.mixed_precision.moments": "8bit"}, "a reference takes no step"),
    ):
        with pytest.raises(MantissaError, match=said):
            before_workers(sections(given))


def sections(given: Mapping[str, str]) -> dict[str, Any]:
    """A whole configuration as a trainer holds it: references followed, values as hydra reads them."""
    made = tree(given)

    def plain(node: Any, at: str) -> Any:
        if isinstance(node, dict) and node:
            return {name: plain(inner, f"{at}.{name}".lstrip(".")) for name, inner in node.items()}
        value = made.value(at)
        return parse_yaml(value, at) if isinstance(value, str) and value[:1] not in "$" else value

    whole: dict[str, Any] = plain(made._root, "")
    return whole
