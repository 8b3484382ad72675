"""The table against the real verl: which keys its tree has, which file reads them, and that every recipe composes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from verl_rehearsals import KINDS, command

import mantissa
from mantissa.launch import Plan, launch_file, load_options
from mantissa.launch.export import export
from mantissa.launch.facts import FACTS, Engine, Fact
from mantissa.launch.rehearsal import rehearse
from mantissa.rl import load_recipe

pytestmark = pytest.mark.verl
CLUSTER = Path(__file__).parents[3] / "recipes" / "cluster"
ON_VERL = sorted([*CLUSTER.glob("*.yaml"), *(CLUSTER.parent / "models").glob("*flowrl*.yaml")])
GROUP = {"fsdp": "dp", "fsdp2": "dp", "megatron": "megatron", "mantissa_fsdp2": "dp", "mantissa": "dp"}
Compose = Callable[[Sequence[str]], Any]


@pytest.fixture(scope="module")
def trees(compose: Compose) -> dict[str, Any]:
    """verl's defaults, by the learner's engine."""
    made = {group: compose([f"model_engine={group}"]) for group in ("dp", "megatron")}
    return {engine: made[group] for engine, group in GROUP.items()}


def has(tree: Any, key: str) -> bool:
    """Whether the tree has the key, null or not."""
    from omegaconf import DictConfig

    node = tree
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in list(node.keys()):
            return False
        node = node._get_node(part)
        if node is not None and node._is_interpolation():
            node = node._dereference_node()
    return True


def test_the_file_that_is_said_to_read_a_key_names_it(verl_folder: Path, verl_version: str) -> None:
    def named(fact: Fact) -> bool:
        ours = fact.read_in.startswith("mantissa/")  # the plugin's own
        place = (Path(mantissa.__file__).parents[1] if ours else verl_folder) / fact.read_in
        files = place.rglob("*.py") if place.is_dir() else [place]
        return any(fact.token in file.read_text() for file in files)

    assert [key for key, fact in FACTS.items() if verl_version in fact.versions and not named(fact)] == []


def test_nobody_but_megatron_s_engines_reads_a_key_called_dtype(verl_folder: Path) -> None:
    """The no-op that ``check-verl`` is for: FSDP's engine never looks at ``engine_config.dtype``."""
    engine = verl_folder / "workers" / "engine"
    assert "engine_config.dtype" in (engine / "megatron" / "transformer_impl.py").read_text()
    for file in (engine / "fsdp").glob("*.py"):
        assert "engine_config.dtype" not in file.read_text(), file.name


def test_flowrl_s_loss_and_the_modules_of_its_recipe_are_not_there(verl_folder: Path) -> None:
    """Why the exporter refuses it; a verl that has either again would need another answer."""
    losses = re.findall(
        r'register_policy_loss\("(\w+)"\)', (verl_folder / "trainer" / "ppo" / "core_algos.py").read_text()
    )
    assert "gspo" in losses
    assert "flowrl" not in losses
    workers = verl_folder / "workers"
    assert (workers / "engine_workers.py").is_file()
    assert not (workers / "fsdp_workers.py").exists()
    assert not (workers / "actor" / "dp_actor.py").exists()


def validated(tree: Any) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        reference = need_reference_policy(tree)
    except (TypeError, AttributeError):  # 0.8 asks for its roles
        reference = bool(tree.algorithm.use_kl_in_reward or tree.actor_rollout_ref.actor.use_kl_loss)
    assert not need_critic(tree)
    validate_config(tree, reference, False)


def says(tree: Any, plan: Plan) -> None:
    """Every override is in the tree, with its value."""
    from omegaconf import OmegaConf

    for one in plan.overrides:
        if one.key == "model_engine":
            continue
        got = OmegaConf.select(tree, one.key)
        got = OmegaConf.to_container(got) if OmegaConf.is_config(got) else got
        wanted = list(one.value) if isinstance(one.value, tuple) else one.value
        assert got == wanted, one
        assert type(got) is type(wanted), one


@pytest.mark.parametrize("path", ON_VERL, ids=lambda path: path.stem)
def test_every_recipe_composes_and_passes_verl_s_validation(path: Path, compose: Compose, verl_version: str) -> None:
    file = launch_file(path) if launch_file(path).is_file() else None
    given = {} if file else {"engine": "mantissa_fsdp2"}
    options = load_options(file, {"version": verl_version} | given)
    overrides = ["rollout.dynamic=null"] if verl_version == "0.8.0" else []
    if verl_version == "0.8.0" and "flowrl" in path.stem:
        pytest.skip("0.8 has no plugin points, and the exporter refuses it")
    plan = export(load_recipe(path, overrides), options)
    tree = compose([str(one) for one in plan.overrides])
    validated(tree)
    says(tree, plan)


FEATURES = [
    (),
    ("precision=fp16",),
    ("precision=fp16", "loss_scaling.retries=0"),
    ("precision=bf16-train-fp16-rollout", "algorithm.correction=icepop"),
    ("precision=fp8-rollout", "algorithm.correction=geometric_token_tis"),
    ("algorithm.loss=dapo", "algorithm.loss.dual_clip=.inf", "rollout.overlong={buffer: 128}"),
    ("algorithm.loss=gspo", "algorithm.correction=sequence_mis"),
    ("algorithm.loss=cispo", "algorithm.correction=token_tis_normalized"),
    ("algorithm.loss=reinforce", "algorithm.correction=sequence_is"),
    ("algorithm.correction=bypass_k3_rejection",),
    ("algorithm.correction=none", "algorithm.advantage=dr_grpo", "algorithm.aggregation=seq_mean_token_sum_norm"),
    ("algorithm.reference={}", "algorithm.kl={coefficient: 0.001}", "algorithm.advantage=rloo"),
    ("algorithm.reference={}", "algorithm.kl={where: reward, estimator: k1, coefficient: 0.01}", "precision=fp16"),
    ("evaluation=null", "run_dir=/runs/one", "task.limit=64", "optimizer.max_grad_norm=.inf", "trackers=[wandb]"),
    ("task.files=[/data/a b.parquet, \"/data/it's.parquet\"]", "name=it's a 5_0 name", "seed=7"),
]  # fmt: skip


@pytest.fixture
def composed(planned: Callable[..., Plan], compose: Compose, verl_version: str) -> Callable[..., Any]:
    """verl's tree for a recipe's features and launch options, validated; it says what the plan says."""

    def made(*features: str, **options: Any) -> Any:
        plan = planned(*features, version=verl_version, **options)
        tree = compose([str(one) for one in plan.overrides])
        validated(tree)
        says(tree, plan)
        return tree

    return made


@pytest.mark.parametrize(
    ("engine", "rollout"),
    [("fsdp", "sglang"), ("fsdp2", "vllm"), ("megatron", "vllm"), ("mantissa_fsdp2", "vllm"), ("mantissa", "mantissa")],
)
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: " ".join(features) or "plain")
def test_every_feature_composes_on_every_engine(
    features: tuple[str, ...], engine: Engine, rollout: str, composed: Callable[..., Any], verl_version: str
) -> None:
    if verl_version == "0.8.0" and "mantissa" in engine:
        pytest.skip("0.8 has no plugin points, and the exporter refuses it")

    composed(*features, engine=engine, rollout=rollout)


def test_lora_composes(composed: Callable[..., Any]) -> None:
    tree = composed("model.lora={rank: 16, alpha: 32, targets: [q_proj, v_proj]}", rollout="sglang")
    assert list(tree.actor_rollout_ref.model.target_modules) == ["q_proj", "v_proj"]


def test_fp8_on_megatron_reaches_the_reference_too(composed: Callable[..., Any]) -> None:
    recipe = ("precision=fp8", "algorithm.reference={}", "algorithm.kl={coefficient: 0.001}")
    tree = composed(*recipe, engine="megatron")
    for role in ("actor", "ref"):
        fp8 = tree.actor_rollout_ref[role].megatron.override_transformer_config
        assert (fp8.fp8, fp8.fp8_recipe) == ("hybrid", "blockwise"), role


def test_options_of_the_cluster_reach_the_tree(composed: Callable[..., Any]) -> None:
    router = "actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype"
    tree = composed(
        engine="megatron", nodes=2, tensor_parallel=2, pipeline_parallel=2, expert_parallel=2, offload=True,
        rollout_tensor_parallel=4, overrides={"actor_rollout_ref.rollout.max_num_seqs": 128, f"+{router}": "fp32"},
    )  # fmt: skip
    assert tree.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 2  # inherited
    assert tree.actor_rollout_ref.rollout.max_num_seqs == 128


def test_verl_itself_accepts_nonsense(compose: Compose) -> None:
    """Why the exporter owns a table of values: verl's own validation passes these."""
    tree = compose(
        ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm",
         "actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.rollout.dtype=bogus",
         "actor_rollout_ref.rollout.quantization=bogus", "algorithm.rollout_correction.rollout_is=bogus"]
    )  # fmt: skip
    validated(tree)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_rehearsal_composes(kind: str, tmp_path: Path, compose: Compose, verl_version: str) -> None:
    """With what a processor needs beside it: platform, Ray, sizes."""
    if verl_version == "0.8.0":
        pytest.skip("0.8 has no plugin points")
    words = command(kind, tmp_path / "run")
    recipe = Path(words[words.index("launch") + 1])
    engine = KINDS[kind].engine
    file = launch_file(recipe) if launch_file(recipe).is_file() else None
    overrides = [f"run_dir={tmp_path}/run", *KINDS[kind].overrides]
    plan = rehearse(recipe, overrides, file, {} if engine is None else {"engine": engine}).plan
    tree = compose([str(one) for one in plan.overrides])
    validated(tree)
    says(tree, plan)
    assert tree.ray_kwargs.ray_init.num_gpus == 1
