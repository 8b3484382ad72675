"""How each of verl's trainers has its configuration judged before it has a worker (``refusals``), and finds the gate
that it asks for (``gate``) and what it names: the rollout, and on a CPU verl's own engines.

verl imports ``model.external_lib`` where it reads the model's configuration, which is not in every trainer's process:
that of ``fully_async_policy`` never does. Its entry points it loads in every process, but before any trainer is there.
So the classes are changed as they are imported, whoever imports them, and at once where they are there already.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.verl.version import plugin_points

Change = Callable[[ModuleType], None]
_GATE = "mantissa_gate"  # a trainer's attribute
_QUESTIONS = ("mantissa_weights", "mantissa_write")  # of WeightReader, to vLLM's workers
_THIS: dict[str, Any] = {}  # of this process: its trainer's gate


class _AsImported(MetaPathFinder):
    """Calls ``changes`` of a module, by its name, once it has been imported."""

    def __init__(self, changes: dict[str, Change]) -> None:
        self.changes, self._finding = changes, False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if self._finding or fullname not in self.changes:
            return None
        self._finding = True  # the others are asked
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            loader, run = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.changes[fullname](module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Have each of verl's trainers look at its own ``trainer.gate``. What is registered already stays as it is."""
    if any(isinstance(finder, _AsImported) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _AsImported(_CHANGES))
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])


def _change_v1(module: ModuleType) -> None:
    """``PPOTrainer``: its gate is made before the first step, and looks where old log-probs have been computed; its
    learner hears which batch to keep."""
    with plugin_points():
        trainer: Any = module.PPOTrainer
        score, fit, init = trainer._compute_old_log_prob, trainer.fit, trainer.init
        update = trainer._update_actor

    @functools.wraps(init)
    def judged_init(self: Any) -> Any:
        _judge(self.config)
        _set_v1_gate(self)
        return init(self)

    @functools.wraps(fit)
    def gated_fit(self: Any, *arguments: Any, **named: Any) -> Any:
        if not hasattr(self, _GATE):
            _set_v1_gate(self)
        return fit(self, *arguments, **named)

    @functools.wraps(score)
    def gated_score(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        scored = score(self, batch, metrics)
        if getattr(self, _GATE, None) is not None:
            metrics.update(getattr(self, _GATE).look(self, scored))
        return scored

    @functools.wraps(update)
    def kept_update(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        from mantissa.verl.kept import named_beside

        batch.extra_info.update(named_beside(self.config, self.global_steps))
        return update(self, batch, metrics)

    trainer.init, trainer.fit, trainer._compute_old_log_prob = judged_init, gated_fit, gated_score
    trainer._update_actor = kept_update


def _set_v1_gate(trainer: Any) -> None:
    from mantissa.verl.gate import TrainerGate, of_config

    _set_gate(trainer, of_config(trainer.config, TrainerGate))


def _set_gate(trainer: Any, gate: Any) -> None:
    """Of a trainer, and of each sync in its process."""
    setattr(trainer, _GATE, gate)
    _THIS[_GATE] = gate


def _change_v0(module: ModuleType) -> None:
    """``RayPPOTrainer``: its gate is made before its workers are, and looks before the actor learns from a batch."""
    with plugin_points():
        trainer: Any = module.RayPPOTrainer
        score, update, init = trainer._compute_old_log_prob, trainer._update_actor, trainer.init_workers

    def scored(self: Any, batch: Any) -> Any:
        batch.meta_info.setdefault("temperature", self.config.actor_rollout_ref.rollout.temperature)
        return score(self, batch)[0].batch["old_log_probs"]

    @functools.wraps(init)
    def gated_init(self: Any) -> Any:
        _judge(self.config)
        _make_gate(self, scored)
        return init(self)

    @functools.wraps(update)
    def gated_update(self: Any, batch: Any) -> Any:
        gate = getattr(self, _GATE, None)
        found = {} if gate is None else gate.look(self, batch)
        output = update(self, batch)
        output.meta_info["metrics"].update({name: [value] for name, value in found.items()})  # a row for each update
        return output

    trainer.init_workers, trainer._update_actor = gated_init, gated_update
    trainer._mantissa_score = staticmethod(scored)


def _change_separate(module: ModuleType) -> None:
    """``SeparateRayPPOTrainer``, whose ``init_workers`` derived classes have of their own: what they all call."""
    with plugin_points():
        trainer: Any = module.SeparateRayPPOTrainer
        pools = trainer._init_resource_pools

    @functools.wraps(pools)
    def gated_pools(self: Any) -> Any:
        _judge(self.config)
        _make_gate(self, self._mantissa_score)
        return pools(self)

    trainer._init_resource_pools = gated_pools


def _change_one_step(module: ModuleType) -> None:
    """``OneStepOffRayTrainer`` learns from what the last but one weights sampled. Before it learns from one batch it
    has the weights that sample the next: that one is looked at then, and the very first where it comes."""
    with plugin_points():
        trainer: Any = module.OneStepOffRayTrainer
        generate, ungated = trainer._fit_generate, trainer._update_actor.__wrapped__

    @functools.wraps(generate)
    async def gated_generate(self: Any, *arguments: Any) -> Any:
        batch, following = await generate(self, *arguments)
        gate = getattr(self, _GATE, None)
        if gate is None:
            return batch, following
        if gate.looked == 0:
            self.metrics.update(gate.look(self, batch))
        step = self.global_steps + 1
        if following is not None and gate.due(step) and (found := await following) is not None:
            self.metrics.update(gate.look(self, found[3], step))
        return batch, following

    trainer._fit_generate, trainer._update_actor = gated_generate, ungated


def _change_replicas(module: ModuleType) -> None:
    """``rollout.name=mantissa``, which ``one_step_off_policy`` looks up before it reads any model's configuration."""

    def replica() -> Any:
        from mantissa.verl.rollout import MantissaReplica

        return MantissaReplica

    with plugin_points():
        module.RolloutReplicaRegistry.register("mantissa", replica)


def _change_validation(module: ModuleType) -> None:
    """verl's own validation of a job, which most entry points ask before they start Ray: of the plugin's parts too."""
    with plugin_points():
        validate = module.validate_config

    @functools.wraps(validate)
    def validated(config: Any, *arguments: Any, **named: Any) -> Any:
        _judge(config)
        return validate(config, *arguments, **named)

    module.validate_config = validated  # type: ignore[attr-defined]
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    if package is not None and hasattr(package, "validate_config"):
        package.validate_config = validated  # type: ignore[attr-defined]


def _change_engines(module: ModuleType) -> None:
    """verl's own engines on a CPU, also in a critic's process, which reads no model's configuration."""
    if os.environ.get("VERL_PLATFORM") == "cpu":
        importlib.import_module("mantissa.verl.fsdp")


def _change_syncs(module: ModuleType) -> None:
    """``CheckpointEngineManager``, by which every trainer sends its weights: each sync is looked at once it is done."""
    with plugin_points():
        manager: Any = module.CheckpointEngineManager
        update, both_ways = manager.update_weights.__wrapped__, module.auto_await  # awaited or called, as verl has it

    @functools.wraps(update)
    async def proven(self: Any, global_steps: int | None = None) -> Any:
        result, gate = await update(self, global_steps=global_steps), _THIS.get(_GATE)
        if gate is not None:
            gate.sync.after_sync(list(self.actor_wg._workers), self.replicas, global_steps)
        return result

    manager.update_weights = both_ways(proven)


def _change_vllm_server(module: ModuleType) -> None:
    """vLLM's server of verl's: what its workers answer to a question of ours goes on to who asked."""
    with plugin_points():
        server: Any = module.vLLMHttpServer
        call = server.collective_rpc

    @functools.wraps(call)
    async def answering(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        if method in _QUESTIONS:
            return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)
        return await call(self, method, timeout=timeout, args=args, kwargs=kwargs)

    server.collective_rpc = answering


def _change_vllm_worker(module: ModuleType) -> None:
    """verl's part of vLLM's worker: it can also say what it computes with."""
    from mantissa.rollout.vllm.worker import WeightReader

    with plugin_points():
        worker: Any = module.vLLMColocateWorkerExtension
    for name in _QUESTIONS:
        setattr(worker, name, vars(WeightReader)[name])


_CHANGES: dict[str, Change] = {
    "verl.checkpoint_engine.base": _change_syncs,
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _change_vllm_server,
    "verl.workers.rollout.vllm_rollout.utils": _change_vllm_worker,
    "verl.workers.engine": _change_engines,
    "verl.utils.config": _change_validation,
    "verl.workers.rollout.replica": _change_replicas,
    "verl.trainer.ppo.v1.trainer_base": _change_v1,
    "verl.trainer.ppo.ray_trainer": _change_v0,
    "verl.experimental.separation.ray_trainer": _change_separate,
    "verl.experimental.one_step_off_policy.ray_trainer": _change_one_step,
}


def _judge(config: Any) -> None:
    """``MantissaError`` for what a job asks of the plugin's parts that they do not do."""
    from mantissa.verl.refusals import before_workers  # which imports more than each process of a job needs

    before_workers(config)


def _make_gate(trainer: Any, score: Callable[[Any, Any], Any]) -> None:
    """A trainer's gate, if its configuration asks for one. ``MantissaError`` before it has a worker for one that
    learns where no gate looks, in a loop of its own."""
    from mantissa.verl.gate import KEY, OldTrainerGate, of_config

    gate = of_config(trainer.config, lambda config, asked: OldTrainerGate(config, asked, score))
    kind = type(trainer)
    if gate is not None and not _learns_by_update(kind):
        raise MantissaError(
            f"{KEY}: {kind.__module__}.{kind.__name__} has its actor learn without RayPPOTrainer._update_actor, before "
            f"which the gate looks; expected a trainer that calls it. Leave {KEY} out, or run verl.trainer.main_ppo"
        )
    _set_gate(trainer, gate)


def _learns_by_update(kind: type) -> bool:
    """Whether some method that objects of this class have calls ``_update_actor``."""
    methods = (getattr(kind, name, None) for name in dir(kind) if name != "_update_actor")
    functions = (inspect.unwrap(each) for each in methods if isinstance(each, FunctionType))  # Ray wraps an actor's
    return any("_update_actor" in each.__code__.co_names for each in functions)
