"""What verl can be asked and Mantissa's engines and rollout do not do: refused by its key, before a job has a worker.

Which keys those are is data (``keys.yaml``), with those that change nothing of what is computed and why. A trainer's
configuration is judged as a whole (``before_workers``), and each engine and server judges its own sections again, for
a program that makes them by itself. ``mantissa check`` asks the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from mantissa.base.config import Refusals
from mantissa.base.errors import MantissaError
from mantissa.base.readers.yaml import read_shipped

_ROOT = "actor_rollout_ref."
_UNDER_ROOT = ("actor.", "ref.", "model.", "rollout.")
_ACTOR, _MODEL = f"{_ROOT}actor", f"{_ROOT}model"
_NULL = "null"
_PLUGIN = "mantissa.verl.plugin"
_VERL_S = "bfloat16"  # verl's default of every dtype, which may stand beside what decides
_SHORT = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
_RANKS = ("trainer.nnodes", "trainer.n_gpus_per_node")

_CERTIFIED = {
    "rollout.name": ("mantissa",),
    "rollout.top_p": ("1",),
    "rollout.top_k": ("-1", "0"),
    "trainer.use_v1": ("true",),
    "trainer.v1.trainer_mode": ("sync",),
    "algorithm.rollout_correction.bypass_mode": ("false",),
}  # what a job must have that keeps a batch

Value = Callable[[str], Any]  # of a key, without ``actor_rollout_ref.``; None where there is none


@dataclass(frozen=True)
class Row:
    """A key that ends a job where its value is neither ``fine`` nor null. ``engines``: by which."""

    key: str
    why: str
    fine: tuple[Any, ...]
    engines: tuple[str, ...]

    def said(self, value: Value) -> str:
        """What was expected and what to do, where the key's value ends the job; else an empty text."""
        given, fine = _word(value(self.key)), [_word(_meant(each, value)) for each in self.fine]
        return "" if given in (*fine, _NULL) else f"expected {' or '.join(fine)}: {self.why}"


@dataclass(frozen=True)
class Refused:
    """A key that ends a job: its value, who refuses it (the setting that chose it), and what was expected."""

    key: str
    given: str
    by: str
    said: str

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.by}: {_full(self.key)}={self.given}: {self.said}"


def _word(value: Any) -> str:
    """A value as hydra prints it: the same for ``1.0``, ``1`` and "1", for null, what is empty and no key."""
    if value is None or (isinstance(value, str) and value.lower() in ("", "none", _NULL)):
        return _NULL
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"{value:g}"
    if not isinstance(value, str):
        return str(value) if len(value) else _NULL
    try:
        return f"{float(value):g}"
    except ValueError:
        return value.lower() if value.lower() in ("true", "false") else value


def _meant(fine: Any, value: Value) -> Any:
    """A value of the table, ``=ranks`` and ``=KEY`` put in."""
    if not isinstance(fine, str) or not fine.startswith("="):
        return fine
    if fine != "=ranks":
        return value(fine[1:])
    sizes = [_word(value(key)) for key in _RANKS]
    return int(sizes[0]) * int(sizes[1]) if all(map(str.isdigit, sizes)) else None


@cache
def _table() -> tuple[tuple[Row, ...], dict[str, str]]:
    table = read_shipped(Path(__file__).with_name("keys.yaml"))
    made = []
    for group in table["refused"]:
        engines = tuple(group.get("engines", ("mantissa",)))
        for under in group["under"]:
            for name, said in group["keys"].items():
                made.append(Row(f"{under}.{name}", said["why"], tuple(said["fine"]), engines))
    return tuple(made), table["idle"]


def rows() -> tuple[Row, ...]:
    """Every key that may end a job."""
    return _table()[0]


def idle(key: str) -> str:
    """Why a key of verl's tree changes nothing of what ``strategy=mantissa`` computes; an empty text also for one that
    may end a job."""
    if any(row.key == key for row in rows()):
        return ""
    return next((why for pattern, why in _table()[1].items() if fnmatchcase(key, pattern)), "")


def _judges(key: str, value: Value) -> list[str]:
    """The settings that choose who reads a key."""
    section = key.partition(".")[0]
    if section == "critic" and not _needs_critic(value):
        return []
    chosen = {"model": ["actor.strategy", "rollout.name"], "rollout": ["rollout.name"]}
    return chosen.get(section, [f"{section}.strategy"])


def _needs_critic(value: Value) -> bool:
    """verl's own rule."""
    asked = _word(value("critic.enable"))
    return asked == "true" if asked != _NULL else _word(value("algorithm.adv_estimator")) == "gae"


def refused(value: Value) -> Iterator[Refused]:
    """Each key for which a job's configuration is refused."""
    for row in rows():
        names = {setting: _word(value(setting)) for setting in _judges(row.key, value)}
        by = next((f"{setting}={name}" for setting, name in names.items() if name in row.engines), "")
        if by and (said := row.said(value)):
            yield Refused(row.key, _word(value(row.key)), by, said)
    ours = [setting for setting in _judges("model", value) if _word(value(setting)) == "mantissa"]
    if ours:
        for key, given, said in _overridden(value("model.override_config")):
            yield Refused(key, given, f"{ours[0]}=mantissa", said)
    if "actor.strategy" in ours:
        for key, given, said in _unknown_contents(value("actor.checkpoint")):
            yield Refused(key, given, "actor.strategy=mantissa", said)
    for role in ("actor", "ref"):
        if _word(value(f"{role}.strategy")) == "mantissa":
            yield from _other_formats(role, value)
    yield from _without_head(value)
    yield from _not_certified(value)


def _other_formats(role: str, value: Value) -> Iterator[Refused]:
    """verl's keys of a format that name another than what runs, where the options of a role's engine decide."""
    from mantissa.verl.options import EngineOptions  # needs torch, and most scripts ask for nothing of ours

    try:
        options = EngineOptions.of(value(f"{role}.fsdp_config.mixed_precision"), learns=role == "actor")
        policy = options.policy(value(f"{role}.fsdp_config.dtype") or _VERL_S)
    except MantissaError:  # a mistake in the options, which is said for itself
        return
    by, precision = f"{role}.strategy=mantissa", f"{role}.fsdp_config.mixed_precision.precision"
    formats = {f"{role}.fsdp_config.dtype": policy.train}
    if role == "actor" and _word(value("rollout.name")) == "mantissa":
        formats["rollout.dtype"] = policy.rollout
        if (given := _word(value("rollout.quantization"))) != _NULL:
            yield Refused(
                "rollout.quantization", given, by, f"expected null: {precision}.rollout says it; leave it out"
            )
    for key, active in formats.items():
        given = _word(value(key))
        if given not in (_VERL_S, _NULL) and _SHORT.get(given, given) != active:
            yield Refused(key, given, by, f"expected {active}, as {precision} has it: leave it out, or change that")


def _without_head(value: Value) -> Iterator[Refused]:
    """FlowRL's loss where no engine carries its head of log Z, and a head that no loss reads."""
    engine, loss = (_word(value(key)) for key in ("actor.strategy", "actor.policy_loss.loss_mode"))
    ours, head = engine in ("mantissa", "mantissa_fsdp2"), "actor.fsdp_config.mixed_precision.flowrl"
    there = ours and hasattr(value("actor.fsdp_config.mixed_precision"), "get") and value(head) is not None
    if loss == "flowrl" and not there and (ours or _word(value("model.external_lib")) == _PLUGIN):
        said = f"expected a head of log Z: set +{_full(head)}={{}}" + ("" if ours else " and strategy=mantissa_fsdp2")
        yield Refused("actor.policy_loss.loss_mode", loss, f"actor.strategy={engine}", said)
    if there and loss != "flowrl":
        said = f"expected flowrl, as {head} is set: set it to flowrl, or leave that out"
        yield Refused("actor.policy_loss.loss_mode", loss, f"actor.strategy={engine}", said)


def _overridden(section: Any) -> Iterator[tuple[str, str, str]]:
    """Key, value and what was expected of each setting that would change the model's own configuration."""
    for name, given in section.items() if hasattr(section, "items") else ():
        if name != "attn_implementation" and _word(given) != _NULL:
            yield f"model.override_config.{name}", _word(given), "the model's own configuration is used; leave it out"


def _unknown_contents(checkpoint: Any) -> Iterator[tuple[str, str, str]]:
    """Key, value and what was expected of each list of what a checkpoint is to hold, or a job to take from it, that
    names what none has."""
    known = ("extra", "hf_model", "model", "optimizer")
    for name in ("save_contents", "load_contents"):
        named = get(checkpoint, name) or ()
        unknown = sorted(set(named) - set(known)) if not isinstance(named, str) else []
        if unknown:
            yield f"actor.checkpoint.{name}", ", ".join(unknown), f"expected some of {', '.join(known)}"


def _not_certified(value: Value) -> Iterator[Refused]:
    """A batch that is to be kept (``kept.py``) where nobody could compute it again."""
    key = "trainer.certify"
    given = _word(value(key))
    if given == _NULL:
        return
    said = ""
    saved = _word(value("trainer.save_freq"))
    if not given.isdecimal() or int(given) < 1:
        said = "expected the number of a step"
    elif int(given) > 1 and saved.lstrip("-").isdecimal() and (int(saved) < 1 or (int(given) - 1) % int(saved)):
        said = f"expected 1, or the step after a checkpoint, and trainer.save_freq={saved}"
    elif value("actor.strategy") not in ("mantissa", "mantissa_fsdp2"):
        said = "expected actor.strategy=mantissa or mantissa_fsdp2, which keep it"
    for name, fine in _CERTIFIED.items():
        found = _word(value(name))
        if not said and found not in (*fine, _NULL):
            said = f"expected {_full(name)}={fine[0]}, for its draws and scores are made again; it is {found}"
    if said:
        yield Refused(key, given, f"actor.strategy={_word(value('actor.strategy'))}", said)


def before_workers(config: Any) -> None:
    """Judge a trainer's whole configuration. ``MantissaError`` with the first that is refused, a mistake in the options
    of a plugin's engine included."""

    def value(key: str) -> Any:
        return get(config, _full(key))

    for found in refused(value):
        raise MantissaError(found.text)
    for role in ("actor", "ref"):
        engine = _word(value(f"{role}.strategy"))
        if engine == "mantissa":
            from mantissa.verl.options import EngineOptions

            EngineOptions.of(value(f"{role}.fsdp_config.mixed_precision"), learns=role == "actor")
        elif engine == "mantissa_fsdp2":
            from mantissa.verl.options import fsdp2_options

            fsdp2_options(value(f"{role}.fsdp_config.mixed_precision"))


def _full(key: str) -> str:
    return _ROOT + key if key.startswith(_UNDER_ROOT) else key


def of_section(under: str, section: Any, by: str = "mantissa", ranks: int | None = None) -> Refusals:
    """The table's rows about one of verl's sections, for the engine or rollout ``by``."""

    def value(key: str) -> Any:
        if key in _RANKS:
            return ranks if key == _RANKS[0] else 1
        return get(section, key.removeprefix(f"{under}."))

    for row in rows():
        if row.key.startswith(f"{under}.") and by in row.engines:
            said = row.said(value)
            yield said, f"{_full(row.key)}={_word(value(row.key))}: {said}"


def get(section: Any, path: str, default: Any = None) -> Any:
    """A value of one of verl's sections, whether those are dataclasses or mappings; ``default`` where there is none."""
    for name in path.split("."):
        section = section.get(name) if hasattr(section, "get") else getattr(section, name, None)
        if section is None:
            return default
    return section


def refuse(called: str, refusals: Refusals) -> None:
    """Raise ``MantissaError`` with the first that applies. ``called``: what of Mantissa's refuses it."""
    for applies, text in refusals:
        if applies:
            raise MantissaError(f"{called}: {text}")


def of_model(model: Any) -> Refusals:
    """Of ``actor_rollout_ref.model``."""
    yield from of_section("model", model)
    vision = [name for name in ("vision_config", "audio_config") if get(model, f"hf_config.{name}") is not None]
    yield vision, f"{_MODEL}.path: a multimodal model ({' and '.join(vision)}) is not supported"
    for key, given, said in _overridden(get(model, "override_config")):
        yield True, f"{_full(key)}={given}: {said}"


def of_engine(engine: Any, ranks: int) -> Refusals:
    """Of ``actor.fsdp_config`` (or ``ref.fsdp_config``)."""
    role = "ref" if get(engine, "forward_only", False) else "actor"
    return of_section(f"{role}.fsdp_config", engine, ranks=ranks)


def of_optimizer(optim: Any) -> Refusals:
    """Of ``actor.optim``."""
    return of_section("actor.optim", optim)


def of_checkpoint(checkpoint: Any) -> Refusals:
    """Of ``actor.checkpoint``."""
    yield from of_section("actor.checkpoint", checkpoint)
    for key, given, said in _unknown_contents(checkpoint):
        yield True, f"{_full(key)}={given}: {said}"


def of_batch(flags: dict[str, Any], keys: set[str]) -> Refusals:
    """Of one batch: what verl asks a forward to give besides log-probs and entropy. ``keys``: those of its tensors."""
    yield flags.get("calculate_sum_pi_squared"), f"{_ACTOR}.calculate_sum_pi_squared is not supported"
    yield flags.get("distillation_use_topk"), "distillation from a teacher's top-k logits is not supported"
    yield flags.get("enable_routing_replay") or "routed_experts" in keys, "router replay is not supported"
    yield (
        not {"prompts", "responses"} <= keys,
        "a batch without prompts and responses is not RL's; SFT is not supported",
    )


def of_rollout(rollout: Any) -> Refusals:
    """Of ``actor_rollout_ref.rollout``."""
    return of_section("rollout", rollout)
