"""How each of verl's trainers has its configuration judged before it has a worker (``refusals``), finds the gate that it
asks for (``gate``), and the rollout by its name.

verl imports ``model.external_lib`` where it reads the model's configuration, which is not in every trainer's process:
that of ``fully_async_policy`` never does. Its entry points it loads in every process, but before any trainer is there.
So the classes are changed as they are imported, whoever imports them, and at once where they are there already.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
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
    """``PPOTrainer``: its gate is made before the first step, and looks where old log-probs have been computed."""
    with plugin_points():
        trainer: Any = module.PPOTrainer
        score, fit, init = trainer._compute_old_log_prob, trainer.fit, trainer.init

    @functools.wraps(init)
    def judged_init(self: Any) -> Any:
        _judge(self.config)
        return init(self)

    @functools.wraps(fit)
    def gated_fit(self: Any, *arguments: Any, **named: Any) -> Any:
        from mantissa.verl.gate import TrainerGate, of_config

        setattr(self, _GATE, of_config(self.config, TrainerGate))
        return fit(self, *arguments, **named)

    @functools.wraps(score)
    def gated_score(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        scored = score(self, batch, metrics)
        if getattr(self, _GATE, None) is not None:
            metrics.update(getattr(self, _GATE).look(self, scored))
        return scored

    trainer.init, trainer.fit, trainer._compute_old_log_prob = judged_init, gated_fit, gated_score


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


_CHANGES: dict[str, Change] = {
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
    setattr(trainer, _GATE, gate)


def _learns_by_update(kind: type) -> bool:
    """Whether some method that objects of this class have calls ``_update_actor``."""
    methods = (getattr(kind, name, None) for name in dir(kind) if name != "_update_actor")
    functions = (inspect.unwrap(each) for each in methods if isinstance(each, FunctionType))  # Ray wraps an actor's
    return any("_update_actor" in each.__code__.co_names for each in functions)
