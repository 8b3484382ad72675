"""How verl's trainers find their gate: as modules are imported; and in verl's own classes, without a job."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mantissa.base.errors import MantissaError

ROWS, PROMPT, LONG = 96, 4, 8


@pytest.mark.parametrize("there_already", [False, True])
def test_a_module_is_changed_once_it_is_imported(
    there_already: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mantissa.verl import hooks

    name = f"hooked_{there_already}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, hooks._AsImported)])
    seen: list[int] = []
    monkeypatch.setattr(hooks, "_CHANGES", {name: lambda module: seen.append(module.value)})
    if there_already:
        importlib.import_module(name)
    hooks.register()
    hooks.register()  # of which the second does nothing
    assert seen == ([1] if there_already else [])
    assert importlib.util.find_spec(name) is not None  # looking for it imports nothing
    module = importlib.import_module(name)
    assert seen == [1]
    assert module.__spec__ is not None
    assert module.__spec__.origin == str(tmp_path / f"{name}.py")
    monkeypatch.delitem(sys.modules, name)


def configured(kind: Any, folder: Path, asked: str, **more: Any) -> Any:
    """A trainer of verl's class that has its configuration and nothing else."""
    from omegaconf import OmegaConf

    rollout = {"name": "vllm", "dtype": "bfloat16", "temperature": 0.7, "calculate_log_probs": True, "n": 4}
    rollout |= {"multi_turn": {"enable": False}} | more.pop("rollout", {})
    actor = {"strategy": "fsdp2", "fsdp_config": {"dtype": "bfloat16"}, "calculate_entropy": False, "entropy_coeff": 0}
    actor |= {"ppo_mini_batch_size": 24, "ppo_epochs": 1, "data_loader_seed": 1, "shuffle": False}
    sections = {
        "actor_rollout_ref": {"rollout": rollout, "actor": actor},
        "trainer": {"gate": asked, "default_local_dir": str(folder)},
        "algorithm": {"rollout_correction": {"bypass_mode": more.pop("bypass", False)}},
    }
    trainer = object.__new__(kind)
    trainer.config, trainer.global_steps = OmegaConf.create(sections | more), 1
    return trainer


def data(step: int, size: float = 0.01, version: int | None = None) -> Any:
    """verl's own batch, prompts padded on the left; ``size`` is of the learner's error."""
    import numpy as np

    from verl import DataProto

    draw = torch.Generator().manual_seed(step)
    mask = torch.ones(ROWS, PROMPT + LONG, dtype=torch.int64)
    mask[:, 0] = 0
    prompts = torch.tensor([[0, 1, 2, row // 4] for row in range(ROWS)])
    responses = torch.randint(0, 50, (ROWS, LONG), generator=draw)
    rollout = -3.0 - 3 * torch.rand(ROWS, LONG, generator=draw)
    learner = rollout + size * torch.randn(ROWS, LONG, generator=draw) * (1 - rollout.exp())
    tensors = {"prompts": prompts, "responses": responses, "attention_mask": mask, "rollout_log_probs": rollout}
    tensors |= {"input_ids": torch.cat([prompts, responses], 1), "position_ids": mask.cumsum(1) - 1}
    tensors |= {"response_mask": mask[:, PROMPT:], "old_log_probs": learner}
    others = {} if version is None else {"min_global_steps": np.array([version] * ROWS, dtype=object)}
    return DataProto.from_dict(tensors=tensors, non_tensors=others)


def learning(trainer: Any) -> list[Any]:
    """Give it workers whose update is only noted, and whose forward finds what the batch says."""
    from verl.utils import tensordict_utils as tu

    learned: list[Any] = []

    def update_actor(batch: Any) -> Any:
        learned.append(batch)
        return tu.get_tensordict({}, non_tensor_dict={"metrics": {"loss": [1.0], "mfu": [0.5]}})

    trainer.actor_rollout_wg = SimpleNamespace(update_actor=update_actor)
    return learned


@pytest.fixture
def old() -> Any:
    return pytest.importorskip("verl.trainer.ppo.ray_trainer").RayPPOTrainer


def started(trainer: Any) -> Any:
    """As far as a trainer makes its gate; what follows wants workers."""
    from mantissa.verl.hooks import _make_gate

    _make_gate(trainer, type(trainer)._mantissa_score)
    return trainer


@pytest.mark.verl
def test_each_sync_of_verl_s_is_looked_at_and_its_vllm_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By verl's own manager of checkpoint engines, awaited and not."""
    base = pytest.importorskip("verl.checkpoint_engine.base")
    from mantissa.verl import hooks

    seen: list[Any] = []
    gate = SimpleNamespace(sync=SimpleNamespace(after_sync=lambda *given: seen.append(given)))
    monkeypatch.setitem(hooks._THIS, hooks._GATE, gate)
    monkeypatch.setattr(base.ray, "get", lambda refs: refs)
    manager = object.__new__(base.CheckpointEngineManager)
    sent: list[Any] = []
    manager.actor_wg = SimpleNamespace(_workers=["worker"], update_weights=lambda **given: sent.append(given))
    manager.backend, manager.replicas = "naive", ["replica"]
    assert manager.update_weights(3) == {}

    async def awaited() -> Any:
        return await manager.update_weights(global_steps=4)

    assert asyncio.run(awaited()) == {}
    assert seen == [(["worker"], ["replica"], 3), (["worker"], ["replica"], 4)]
    assert [each["global_steps"] for each in sent] == [3, 4]


@pytest.mark.verl
def test_every_trainer_of_verl_s_is_hooked_as_it_is_imported(old: Any) -> None:
    """By the entry point alone: nothing here imports the plugin."""
    from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from mantissa.verl.hooks import _learns_by_update

    asynchronous = FullyAsyncTrainer.__ray_metadata__.modified_class
    for method in (
        PPOTrainer.fit, PPOTrainer._compute_old_log_prob, old.init_workers, old._update_actor,
        SeparateRayPPOTrainer._init_resource_pools, asynchronous._init_resource_pools, asynchronous._update_actor,
        OneStepOffRayTrainer._init_resource_pools, OneStepOffRayTrainer._fit_generate,
    ):  # fmt: skip
        assert hasattr(method, "__wrapped__"), method
    assert not hasattr(OneStepOffRayTrainer._update_actor, "__wrapped__")
    assert all(map(_learns_by_update, (old, asynchronous, OneStepOffRayTrainer)))


@pytest.mark.verl
def test_a_wrong_key_ends_each_trainer_before_its_workers(old: Any, tmp_path: Path) -> None:
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer

    with pytest.raises(MantissaError, match=r"trainer\.gate=halt: expected stop or warn"):
        configured(old, tmp_path, "halt").init_workers()
    lacking = {"calculate_log_probs": False}
    with pytest.raises(MantissaError, match=r"rollout\.calculate_log_probs=True"):
        configured(OneStepOffRayTrainer, tmp_path, "stop", rollout=lacking).init_workers()


@pytest.mark.verl
def test_what_the_plugin_does_not_do_ends_each_trainer_before_its_workers(old: Any, tmp_path: Path) -> None:
    """verl's validation, which comes before Ray; and trainers of programs that do without it."""
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
    from verl.trainer.main_ppo import validate_config
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    model = {"actor_rollout_ref": {"model": {"lora_rank": 8}, "actor": {"strategy": "mantissa"}}}
    line = r"actor\.strategy=mantissa: actor_rollout_ref\.model\.lora_rank=8: expected 0: LoRA is not supported"
    for begun in (
        lambda: validate_config(configured(old, tmp_path, "stop", **model).config, False, False),
        configured(old, tmp_path, "stop", **model).init_workers,
        configured(OneStepOffRayTrainer, tmp_path, "stop", **model).init_workers,
        lambda: PPOTrainer.init(configured(old, tmp_path, "stop", **model)),
    ):
        with pytest.raises(MantissaError, match=line):
            begun()


@pytest.mark.verl
def test_a_trainer_with_a_loop_of_its_own_is_refused(old: Any, tmp_path: Path) -> None:
    class Own(old):  # type: ignore[misc]
        def fit(self) -> None:
            self.actor_rollout_wg.update_actor(None)

    with pytest.raises(MantissaError, match=r"Own has its actor learn without RayPPOTrainer\._update_actor"):
        configured(Own, tmp_path, "stop").init_workers()
    with pytest.raises(AttributeError):  # without the key it is not looked at: verl's own next line fails here
        configured(Own, tmp_path, None).init_workers()


@pytest.mark.verl
def test_the_older_trainer_is_stopped_before_its_actor_learns(old: Any, tmp_path: Path) -> None:
    trainer = started(configured(old, tmp_path, "stop"))
    learned = learning(trainer)
    metrics = trainer._update_actor(data(1)).meta_info["metrics"]
    assert metrics["mantissa/gate_fault"] == [0.0]
    assert metrics["actor/loss"] == [1.0]
    assert len(learned) == 1
    trainer.global_steps = 2
    with pytest.raises(MantissaError, match=r"mantissa doctor: step 2: .*Page: .*doctor/step-2/doctor.html"):
        trainer._update_actor(data(2, size=0.6))
    assert len(learned) == 1


@pytest.mark.verl
def test_with_bypass_the_older_trainer_scores_for_the_gate(old: Any, tmp_path: Path) -> None:
    from mantissa.verl.gate import OldTrainerGate

    trainer, batch = configured(old, tmp_path, "stop", bypass=True), data(1, size=0.6)
    learner = batch.batch["old_log_probs"].clone()
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]  # as verl has it there
    gate = OldTrainerGate(trainer.config, "stop", lambda trainer, batch: learner)
    with pytest.raises(MantissaError, match="step 1: "):
        gate.look(trainer, batch)


@pytest.mark.verl
def test_of_an_asynchronous_trainer_what_its_own_weights_sampled_is_compared(old: Any, tmp_path: Path) -> None:
    """Its versions are numbered by how often weights were sent, and its gate's steps with them."""
    trainer = started(configured(old, tmp_path, "warn", async_training={}))
    trainer.current_param_version, trainer.local_trigger_step, trainer.global_steps = 3, 1, 13
    learning(trainer)
    stale = trainer._update_actor(data(1, size=0.6, version=2)).meta_info["metrics"]
    assert "mantissa/gate_fault" not in stale
    fresh = trainer._update_actor(data(2, version=3)).meta_info["metrics"]
    assert fresh["mantissa/gate_fault"] == [0.0]
    assert [each.name for each in (tmp_path / "doctor").iterdir()] == ["step-4"]


@pytest.mark.verl
def test_one_step_ahead_each_batch_is_scored_by_the_weights_that_sampled_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very first where it comes, and each next one before the update after which it is learned from."""
    module = pytest.importorskip("verl.experimental.one_step_off_policy.ray_trainer")
    kind = module.OneStepOffRayTrainer
    trainer, events = configured(kind, tmp_path, "stop:100", bypass=True), []
    trainer.metrics = {}

    def score(trainer: Any, batch: Any) -> Any:
        events.append(("scored", batch.meta_info["number"], trainer.global_steps))
        return batch.batch["old_log_probs"]

    monkeypatch.setattr(kind, "_mantissa_score", staticmethod(score))
    started(trainer)

    async def next_batch(number: int) -> Any:
        batch = data(number)
        batch.meta_info.update(number=number, timing={})
        return {}, {}, 0, batch, None

    async def train(steps: int) -> None:
        following = asyncio.ensure_future(next_batch(1))
        for step in range(1, steps + 1):
            trainer.global_steps, trainer.is_last_step, trainer.timing_raw = step, step == steps, {}
            batch, following = await trainer._fit_generate(following, iter(range(99)))
            events.append(("learned", batch.meta_info["number"], step))

    monkeypatch.setattr(kind, "_fit_update_weights", lambda self: None)
    monkeypatch.setattr(kind, "_async_gen_next_batch", lambda self, data: next_batch(self.global_steps + 1))
    asyncio.run(train(8))
    expected = [("scored", 1, 1)]
    for step in range(1, 9):
        expected += [("scored", step + 1, step)] if step < 5 else []
        expected.append(("learned", step, step))
    assert events == expected
