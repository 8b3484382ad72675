"""What a verl run with given overrides really computes in, and which of its precision settings nobody reads.

verl does not say: a key that the chosen engine ignores is accepted, and so is a wrong value. Each setting that is about
precision gets a verdict from the exporter's own table (``facts.py``), and then every role is worked out from what is
set and from verl's defaults, which are bf16 throughout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, get_args

from mantissa.base.errors import MantissaError
from mantissa.base.readers.yaml import parse_yaml
from mantissa.launch.facts import (
    AROUND,
    FACTS,
    FSDPS,
    HANDED_KEYS,
    IGNORED,
    NEEDED,
    PLUGIN,
    VERSIONS,
    Engine,
    Fact,
    Ignored,
    Needed,
    Rollout,
    Version,
    full,
    reader_of,
    short,
)
from mantissa.launch.scripts import Override, Words, read_overrides
from mantissa.launch.settings import Answer, Role, Setting, State, roles_text, settings_text
from mantissa.launch.verl_tree import Tree, as_yaml, defaults, every, groups, nearest, not_at_default, trainers, tree

_SHORT = {"float16": "fp16", "half": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "float32": "fp32",
          "float": "fp32", "fp32": "fp32"}  # fmt: skip
_LONG = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_ABOUT_PRECISION = re.compile(
    r"(dtype|fp4|fp8|fp16|bf16|fp32|quant|precision|loss_scale|scaler|autocast|amp\b|logprobs_mode|calculate_log_probs"
    r"|half\b|veto|rollout_correction|grad_clip|clip_grad|qat|mbridge\b|^trainer\.gate$)"
)
# What starts a trainer that has verl's own workers, and the configuration that it takes where none is named.
_ENTRIES = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
_ENTRY = next(iter(_ENTRIES))
_MODULES = {"main_ppo": _ENTRY}  # by the name that hydra gives a job
_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")
_PARTS = {"actor.": "learner", "ref.": "reference", "rollout.": "rollout", "algorithm.": "correction"}
_SECTIONS = ("actor_rollout_ref.", "actor.", "ref.", "rollout.")
_OF_LEARNER = ("loss scaling", "gradients", "masters", "logits", "gap")
_SECTION = "actor.fsdp_config.mixed_precision"
_GATE = "trainer.gate"
_ALIKE = 0.9  # difflib's ratio, from which a key is taken for a misspelt one
_ADDED = re.compile(r"\+{1,2}([\w.@/-]+)=")
_IN_RUNTIME_ENV = "+ray_kwargs.ray_init.runtime_env.env_vars."
_CASTING = {
    "delta_sharded": "weights are cast to bf16, and vLLM takes the delta in bf16 only",
    "kimi_ckpt_engine": "weights are cast to bf16 (its rollout_dtype, which has no key of its own)",
    "mooncake": "weights are cast to bf16 unless engine_kwargs.mooncake.rollout_dtype says otherwise",
}


@dataclass(frozen=True)
class Report(Answer):
    """The answer for verl. ``meant``: the overrides still missing for the format that settings without effect name.
    ``refused``: overrides of anything for which hydra ends the job; ``foreign``: keys among them of no verl known here;
    ``fork``: they are so many, or so far from any key, that the configuration is another program's. ``apart``: it is
    of another kind (SFT), which has no learner and rollout in those sections.
    """

    version: Version
    engine: Engine
    rollout: Rollout
    assumed: tuple[str, ...]
    casts: tuple[str, ...]
    meant: tuple[str, ...]
    refused: tuple[Setting, ...] = ()
    foreign: tuple[str, ...] = ()
    fork: bool = False
    apart: bool = False

    @property
    def state(self) -> State:
        """As of any answer; ``wrong`` where hydra ends the job, whatever the setting was about."""
        if self.fork or self.apart:
            return "unknown"
        return "wrong" if self.refused else super().state

    @property
    def text(self) -> str:
        """What ``mantissa check`` prints."""
        lines = [f"verl {self.version}" + ("" if self.apart else f", {self.engine} learner, {self.rollout} rollout")]
        lines += [f"  taken for granted: {said}" for said in self.assumed]
        if self.fork:
            lines += ["", f"a fork of verl's, or a version before {VERSIONS[0]}: no verl known here has"]
            lines += [*(f"  {key}" for key in self.foreign), "  so what runs is not known, and nothing is refused"]
        elif self.refused:
            count = len(self.refused)
            lines += ["", f"this will not start: hydra refuses {count} override{'s' if count > 1 else ''}"]
            lines += [f"  {each.given}\n      {each.why}" for each in self.refused]
        if self.foreign and not self.fork:
            lines += [f"  no verl known here has {', '.join(self.foreign)}: a fork's, or another version's"]
        lines += settings_text({
            "refused before the job has a worker": self.that("refused"),
            "precision settings without effect": [e for e in self.wrong if e.verdict not in ("unknown", "refused")],
            "what these do is not known": self.that("unknown"),
            "precision settings that take effect": self.that("takes effect"),
            "handed to another program as they are": self.that("handed on"),
        })  # fmt: skip
        lines += roles_text(self.roles)
        lines += ["", "what is cast on the way", *(f"  {cast}" for cast in self.casts)] if self.casts else []
        if self.meant:
            lines += ["", "for the format that was asked for, in every role", *(f"  {one}" for one in self.meant)]
        if self.others:
            lines += ["", f"not about precision: {self.others} other setting{'s' * (self.others != 1)}"]
        return "\n".join(lines)


def check_verl(arguments: Sequence[str], version: Version = "0.9.1") -> Report:
    """Say what overrides (or a shell script that holds them) do. Raises ``MantissaError`` where there is none."""
    words = read_overrides(arguments)
    words.overrides = {short(key): given for key, given in words.overrides.items()}
    return _answer(words, version)


def check_verl_job(
    settings: Mapping[str, str], overrides: Sequence[str], entry: str, version: str | None = None
) -> Report:
    """Say what a job's whole configuration does. ``overrides``: as they were given to hydra, which took them;
    ``entry``: the program that it was started by, or an empty text. ``version``: the one whose tree fits best."""
    group = settings.get("model_engine", "dp")
    known = version or nearest(settings, group)
    if known not in VERSIONS:
        raise MantissaError(f"verl {known}: expected one of {', '.join(VERSIONS)}")
    changed = not_at_default(settings, known, group)
    added = {_ADDED.match(each)[1] for each in overrides if _ADDED.match(each)}  # type: ignore[index]
    known_tree = tree(known, group if group in groups(known) else "dp")
    words = Words(
        {short(key): Override(key, value, "++") for key, value in changed.items()},
        saved={short(key): value for key, value in settings.items()},
        modules=[_MODULES.get(entry, entry)] if entry else [],
    )
    strange = [key for key in changed if not known_tree.may_have(key) and key not in added and short(key) not in FACTS]
    words.strangers = list(_in_no_tree(strange))
    found = _answer(words, known)
    return replace(found, settings=tuple(replace(each, given=replace(each.given, mark="")) for each in found.settings))


def _answer(words: Words, version: Version) -> Report:
    engine, rollout, assumed, strange = _engines(words)
    name = _config_name(words)
    foreign = _foreign(words, name, version)
    assumed += foreign
    if apart := bool(foreign) and not any(each.key.startswith(_SECTIONS) for each in words.overrides.values()):
        strange |= dict.fromkeys(_PARTS.values(), words.modules[-1] if words.modules else name)
        assumed = foreign
    leaves = defaults(version, _group(words, engine, version), "" if name in _CONFIGS or foreign else name)
    job = Tree(leaves | {full(key): value for key, value in words.saved.items()})
    refused = _refused(words, job) if not foreign else []
    refusal = {short(each.given.key): each for each in refused}
    of_no_verl = _of_no_verl(refused) or tuple(words.strangers)
    if fork := _is_fork(of_no_verl):
        strange |= dict.fromkeys(_PARTS.values(), of_no_verl[0])
    about = [
        given
        for key, given in words.overrides.items()
        if (_ABOUT_PRECISION.search(key) or key in HANDED_KEYS) and not key.startswith(_IN_RUNTIME_ENV[1:])
    ]
    judged = [_judged(given, engine, rollout, version) for given in about]
    judged = [_by_hydra(setting, refusal) for setting in judged]
    judged = [_of_strange(setting, strange, bool(foreign)) for setting in judged]
    judged = [_by_plugin(setting, words, engine) for setting in judged] if engine in PLUGIN else judged
    judged = [_by_gate(setting, words) if short(setting.given.key) == _GATE else setting for setting in judged]
    good = {
        short(s.given.key): s.given.value for s in judged if s.verdict == "takes effect" and s.given.value != "null"
    }
    ours = {key: each for key, each in _by_the_plugin(words, job).items() if key not in refusal}
    judged = [*(each for each in judged if short(each.given.key) not in ours), *ours.values()]
    settings = (*judged, *_variables(words, good, rollout))
    roles, casts = (
        _known(_roles(words, good, engine, rollout, version), settings, strange),
        [] if fork or apart else _casts(words, good, engine),
    )
    meant, others = _meant(settings, good, engine), len(words.overrides.keys() - {short(s.given.key) for s in judged})
    return Report(settings, tuple(roles), others, version, engine, rollout, tuple(assumed), tuple(casts), tuple(meant),
                  tuple(refused), of_no_verl, fork, apart)  # fmt: skip


def _refused(words: Words, job: Tree) -> list[Setting]:
    """Every override for which hydra ends the job; ``job`` has the others in it then."""
    whys = [job.apply(each) for each in words.order]
    return [Setting(each, "refused by hydra", why) for each, why in zip(words.order, whys, strict=True) if why]


def _by_the_plugin(words: Words, job: Tree) -> dict[str, Setting]:
    """By key, what the plugin's engines and rollout end the job at before it has a worker: of what is set, and of what
    is not and has such a default."""
    from mantissa.verl.refusals import refused

    found = {each.key: each for each in refused(lambda key: job.value(full(key)))}
    return {
        key: Setting(words.overrides.get(key, Override(full(key), each.given)), "refused", f"{each.by}: {each.said}")
        for key, each in found.items()
    }


def _group(words: Words, engine: Engine, version: Version) -> str:
    named = words.value("model_engine")
    return named if named in groups(version) else "megatron" if engine == "megatron" else "dp"


def _of_no_verl(refused: Sequence[Setting]) -> tuple[str, ...]:
    known = {*FACTS, *(row.key for row in IGNORED)}
    return _in_no_tree(
        [each.given.key for each in refused if not each.given.mark and short(each.given.key) not in known]
    )


def _is_fork(foreign: Sequence[str]) -> bool:
    """Whether keys of no verl are another program's, and no misspelling: two that are like none, or one in a section
    that is like none."""
    if not foreign:
        return False
    keys = {key for leaves in every() for key in leaves}
    sections = {key.rpartition(".")[0] for key in keys}
    unlike = [key for key in foreign if not get_close_matches(key, keys, 1, _ALIKE)]
    apart = [key for key in unlike if not get_close_matches(key.rpartition(".")[0], sections, 1, _ALIKE)]
    return len(unlike) > 1 or bool(apart)


def _in_no_tree(keys: Sequence[str]) -> tuple[str, ...]:
    """The keys that no version has, with no model engine."""
    trees = [Tree(leaves) for leaves in every()] if keys else []
    return tuple(key for key in dict.fromkeys(keys) if not any(each.has(key) for each in trees))


def _config_name(words: Words) -> str:
    """The configuration that the job begins with: as given, or the entry point's own."""
    own = next((_ENTRIES[each] for each in words.modules if each in _ENTRIES), _CONFIGS[0])
    return (words.config_name or own).removesuffix(".yaml")


def _foreign(words: Words, name: str, version: Version) -> list[str]:
    """What starts the job where it is none of verl's trainers, whose keys and readers are another's. ``name``: of its
    configuration."""
    if words.strangers:
        some = ", ".join(words.strangers[:4]) + (" and others" if len(words.strangers) > 4 else "")
        return [f"no verl known here has {some}: a fork's, or another version's"]
    found = [
        each for each in words.modules if each.startswith(("verl.", "recipe.")) or each.rpartition(".")[2][:4] == "main"
    ]
    if found and not any(each in _ENTRIES for each in found):
        return [f"the entry point {found[-1]} is none that is known here ({', '.join(_ENTRIES)}): only what is common"
                " to them is judged"]  # fmt: skip
    if name not in (*_CONFIGS, *trainers(version)):
        return [f"the configuration {name} is none of verl's own: whether its tree has a key is not known"]
    return []


def _by_hydra(setting: Setting, refusal: Mapping[str, Setting]) -> Setting:
    """The verdict where hydra refuses the override, with what the table would have instead."""
    refused = refusal.get(short(setting.given.key))
    given = setting.given
    if refused is None:  # the table alone says so: hydra takes it, and nobody reads it
        untaken = setting.verdict == "refused by hydra"
        return Setting(given, "ignored", setting.why, setting.instead) if untaken else setting
    if setting.verdict == "refused by hydra":
        return setting
    mark = "" if given.mark == "+" else "+"
    instead = setting.instead if setting.verdict == "ignored" else f"{mark}{full(given.key)}={given.value}"
    return Setting(given, "refused by hydra", refused.why, instead)


def _of_strange(setting: Setting, strange: Mapping[str, str], foreign: bool) -> Setting:
    """Not known, where the engine, rollout or entry point that reads the key is none of those known."""
    part = _part(short(setting.given.key))
    if part in strange:
        return Setting(setting.given, "unknown", f"{strange[part]} is none that is known here")
    if foreign and setting.verdict == "ignored":
        return Setting(setting.given, "unknown", f"with {_ENTRY}: {setting.why}; this entry point is another")
    return setting


def _part(key: str) -> str:
    return next((part for start, part in _PARTS.items() if key.startswith(start)), "")


def _known(roles: Sequence[Role], settings: Sequence[Setting], strange: Mapping[str, str]) -> list[Role]:
    """The roles, one whose setting is not known said as such."""
    unread = {_part(short(s.given.key)): s.given.key for s in settings if s.verdict == "unknown"} | dict(strange)
    unread |= {role: unread["learner"] for role in _OF_LEARNER if "learner" in unread}
    return [
        Role(role.name, f"not known ({unread[role.name]})", "a key about it was not understood")
        if role.name in unread else role for role in roles
    ]  # fmt: skip


def _variables(words: Words, good: dict[str, str], rollout: Rollout) -> Iterator[Setting]:
    """The environment variables that these settings need on every node: there, missing, or with another value."""
    job = {key.removeprefix(_IN_RUNTIME_ENV[1:]): given.value for key, given in words.overrides.items()} | words.job
    for row in NEEDED:
        if good.get(row.key) not in row.values or rollout not in row.rollouts:
            continue
        value = job.get(row.name) or words.variables.get(row.name)
        reaches = row.name in job or not words.submitted
        if words.saved and value is None:
            why = "not in the job's runtime_env; whether the shell set it no file of the job says. Without it "
            why += row.without
            yield Setting(Override(row.name, row.value), "unknown", why)
        elif value is None or not reaches:
            instead = f"{_IN_RUNTIME_ENV}{row.name}='{row.value}'"
            yield Setting(Override(row.name, row.value), "missing", _why_missing(row, words), instead)
        elif value != row.value:
            yield Setting(Override(row.name, value), "wrong value", f"expected {row.value}: {row.without}")
        else:
            where = "set where the driver starts; on several nodes put it into runtime_env"
            yield Setting(
                Override(row.name, value), "takes effect", "in the job's runtime_env" if row.name in job else where
            )


def _why_missing(row: Needed, words: Words) -> str:
    if row.name in words.variables:
        where = f" ({words.runtime_env_file} was not found to look into)" if words.runtime_env_file else ""
        return f"exported, but a submitted job has its runtime_env only{where}. Without it {row.without}"
    return f"{short(row.key)} needs it on every node. Without it {row.without}"


def _format_key(role: str, engine: Engine) -> str:
    """The key of a role's format: of ``actor`` and ``ref`` in the words of their engine."""
    if role == "rollout":
        return "rollout.dtype"
    if engine == "mantissa":
        return f"{role}.fsdp_config.dtype"
    return f"{role}.{'megatron.dtype' if engine == 'megatron' else 'fsdp_config.mixed_precision.param_dtype'}"


def _advised(key: str, fmt: str) -> str:
    """The override that sets a format, as its reader spells it: FSDP ``fp16``, the others ``float16``."""
    value = fmt if key.endswith("param_dtype") else _LONG.get(fmt, fmt)
    return f"{'+' if FACTS[key].new else ''}{full(key)}={value}"


def _meant(settings: Sequence[Setting], good: dict[str, str], engine: Engine) -> list[str]:
    """Every role in the half format that a setting without effect asked for."""
    asked = {_SHORT[s.given.value] for s in settings if s.verdict != "takes effect" and s.given.value in _SHORT}
    if len(asked) != 1 or asked == {"fp32"}:
        return []
    (fmt,) = asked
    keys = (_format_key(role, engine) for role in ("actor", "ref", "rollout"))
    return [_advised(key, fmt) for key in keys if _SHORT.get(good.get(key, "")) != fmt]


def _engines(words: Words) -> tuple[Engine, Rollout, list[str], dict[str, str]]:
    """Learner and rollout, what was taken for granted, and by role the setting that names one which is not known."""
    assumed = ["every branch of the script is read"] if words.branches else []
    strange = {}
    group = words.value("model_engine") or ("megatron" if "megatron" in (words.config_name or "") else "dp")
    engine = "megatron" if group == "megatron" else words.value("actor.strategy") or ""
    if group not in ("dp", "megatron"):
        strange["learner"], engine = f"model_engine={group}", "fsdp"
    sections = {key.split(".")[1] for key in words.overrides if key.startswith(("actor.", "ref."))}
    if not engine and words.value("model_engine") is None and "megatron" in sections and "fsdp_config" not in sections:
        engine, said = "megatron", "learner on Megatron, as actor.megatron.* says; verl wants model_engine=megatron too"
        assumed.append(said)
    if not engine:
        engine, said = "fsdp", "learner on FSDP: neither model_engine nor actor.strategy is given"
        assumed.append(said)
    rollout = words.value("rollout.name") or ""
    if rollout in AROUND:
        inner, why = AROUND[rollout]
        assumed.append(f"rollout.name={rollout} is none of verl's own: {why}, and is judged as {inner}")
        rollout = inner
    if not rollout:
        rollout = "vllm"
        assumed.append("rollout on vLLM: rollout.name is not given, and verl will ask for it")
    if engine not in get_args(Engine):
        strange["learner"], engine = f"actor.strategy={engine}", "fsdp"
    if rollout not in get_args(Rollout):
        strange["rollout"], rollout = f"rollout.name={rollout}", "vllm"
    return engine, rollout, assumed, strange  # type: ignore[return-value]


def _judged(given: Override, engine: Engine, rollout: Rollout, version: Version) -> Setting:
    key = short(given.key)
    fact = FACTS.get(key)
    for row in IGNORED:
        if row.key == key and engine in row.engines and rollout in row.rollouts:
            return _ignored(given, row)
    if fact is None and (reader := reader_of(key)):
        why = f"verl hands it unread to {reader}; what it does there this table does not say"
        return Setting(given, "handed on", why)
    if fact is None:
        return Setting(given, "unknown", "not a key that this version of mantissa has seen verl read")
    if version not in fact.versions:
        return Setting(given, "unknown", f"verl {version} does not read it; {fact.versions[0]} and later do")
    if engine not in fact.engines:
        why = f"the {engine} engine does not read it; {' and '.join(fact.engines)} does"
        instead = _for_engine(fact, engine, given.value)
        if given.mark:
            return Setting(given, "ignored", why, instead)
        return Setting(given, "refused by hydra", f"not in the tree of {engine}", instead)
    if rollout not in fact.rollouts:
        return Setting(given, "ignored", f"the {rollout} rollout does not read it; {' and '.join(fact.rollouts)} does")
    values = fact.understood(engine, rollout)
    if values and given.value not in values and given.value != "null":
        return Setting(given, "wrong value", f"expected one of {', '.join(values)}; verl itself does not check")
    said = fact.says.get(given.value) or fact.says.get(given.value.capitalize())
    meaning = f"{fact.what}: {said}" if said else fact.what
    return Setting(given, "takes effect", meaning + (f"; {fact.trap}" if fact.trap else ""))


def _by_plugin(setting: Setting, words: Words, engine: Engine) -> Setting:
    """What the plugin itself says of an option of its engine, or of what stands below one."""
    key = short(setting.given.key)
    if setting.verdict == "refused by hydra" or (key != _SECTION and not key.startswith(f"{_SECTION}.")):
        return setting
    options = _plugin_options({name: given.value for name, given in words.overrides.items()})
    names = [key.removeprefix(_SECTION).split(".")[1]] if key != _SECTION else list(options)
    wrong = next(filter(None, (_mistake(options, engine, name) for name in names)), "")
    if wrong:
        return Setting(setting.given, "wrong value", wrong)
    if setting.verdict == "unknown":
        what = "; ".join(FACTS[fact].what for fact in (f"{_SECTION}.{name}" for name in names) if fact in FACTS)
        return Setting(setting.given, "takes effect", what)
    return setting


def _by_gate(setting: Setting, words: Words) -> Setting:
    """What the gate itself says as a trainer makes it."""
    from mantissa.verl.gate import parse

    if setting.verdict != "takes effect":
        return setting
    try:
        parse(setting.given.value)
    except MantissaError as error:
        return Setting(setting.given, "wrong value", str(error))
    if (words.value("rollout.calculate_log_probs") or "").lower() == "false":
        why = "the gate ends the job as it starts: rollout.calculate_log_probs=false, and it compares those log-probs"
        return Setting(setting.given, "wrong value", why, full("rollout.calculate_log_probs=True"))
    return setting


def _plugin_options(overrides: Mapping[str, str]) -> dict[str, Any]:
    """The free dictionary of a plugin's engine that overrides (value by key) make together, said whole, option by
    option or deeper (``.loss_scaling.retries=8``): nested, later ones over earlier."""
    found: dict[str, Any] = {}
    for key, text in overrides.items():
        if key != _SECTION and not key.startswith(f"{_SECTION}."):
            continue
        value, path = _plugin_value(text), key.removeprefix(_SECTION).lstrip(".").split(".")
        node = found
        for part in path[:-1]:
            inner = node.get(part)
            node[part] = inner = dict(inner) if isinstance(inner, dict) else {}
            node = inner
        if path[-1]:
            node[path[-1]] = value
        elif isinstance(value, dict):
            node |= value
    return found


def _mistake(options: Mapping[str, Any], engine: Engine, name: str) -> str:
    """What the plugin's own class, and so a job, would say of the option ``name``, or an empty text."""
    from mantissa.verl.options import EngineOptions, Fsdp2Options

    known = {"param_dtype"} if engine == "mantissa_fsdp2" else set()  # beside which others do something or nothing
    given = {key: options[key] for key in (*known, name) if key in options}
    try:
        made = EngineOptions.of(given) if engine == "mantissa" else Fsdp2Options(**given)
        if isinstance(made, EngineOptions):
            made.policy("bfloat16")
    except MantissaError as error:
        return str(error)
    return ""


def _plugin_value(text: str) -> Any:
    text = as_yaml(text) if text.startswith("{") else text
    try:
        return parse_yaml(text, "value")
    except MantissaError:
        return text


def _ignored(given: Override, row: Ignored) -> Setting:
    if row.new and not given.mark:
        return Setting(given, "refused by hydra", f"not in verl's tree: {row.why}", row.instead)
    value = _SHORT.get(given.value, given.value) if row.instead.startswith("+") else given.value
    return Setting(given, "ignored", row.why, f"{row.instead}={value}" if row.instead else "")


def _for_engine(fact: Fact, engine: Engine, value: str) -> str:
    """The other engine's key for the same thing, where there is one."""
    role = fact.key.partition(".")[0]
    if role == "rollout" or all(fact.key != _format_key(role, other) for other in get_args(Engine)):
        return ""
    return _advised(_format_key(role, engine), _SHORT.get(value, value))


def _on(words: Words, key: str) -> bool:
    return (words.value(key) or "").lower() in ("true", "1", "yes", "on")


def _roles(words: Words, good: dict[str, str], engine: Engine, rollout: Rollout, version: Version) -> list[Role]:
    if engine == "mantissa":
        return _roles_of_plugin(words, good, version)
    learner, why = _learner(good, "actor", engine)
    roles = [Role("learner", learner, why)]
    fp8 = good.get("actor.megatron.override_transformer_config.fp8")
    if engine == "megatron" and fp8:
        recipe = good.get("actor.megatron.override_transformer_config.fp8_recipe", "delayed")
        roles.append(Role("its products", f"fp8 ({fp8}, {recipe})", "override_transformer_config"))
    roles += [_scaler(learner, engine), *_master(good, engine)]
    roles.append(Role("logits", learner, "rounded to the learner's format before the fp32 log-softmax"))
    if _on(words, "actor.use_kl_loss") or _on(words, "algorithm.use_kl_in_reward"):
        reference, why = _learner(good, "ref", engine)
        roles.append(Role("reference", reference, why))
    else:
        roles.append(Role("reference", "none", "no KL is used (it would be bf16, whatever the actor is)"))
    dtype = good.get(f"rollout.engine_kwargs.{rollout}.dtype") or good.get("rollout.dtype")
    active = "the model file's" if dtype == "auto" else _SHORT.get(dtype or "bfloat16", "bf16")
    roles.append(Role("rollout", active, "rollout.dtype" if dtype else "rollout.dtype is not set: bfloat16"))
    if "rollout.quantization" in good:
        name = good["rollout.quantization"]
        roles.append(Role("its products", "fp8 (e4m3)" if name == "fp8" else name, "rollout.quantization"))
    roles += _rounded_to_4_bits(good, engine, rollout)
    if learner != active:
        roles.append(Role("gap", f"{learner} learner, {active} rollout", "two roundings of one policy"))
    roles.append(_correction(words, good, version))
    return roles


def _roles_of_plugin(words: Words, good: dict[str, str], version: Version) -> list[Role]:
    """Of Mantissa's own learner and rollout, whose formats one policy says."""
    from mantissa.verl.options import EngineOptions

    try:
        options = EngineOptions.of(_plugin_options({key: given.value for key, given in words.overrides.items()}))
        policy = options.policy(good.get("actor.fsdp_config.dtype", "bfloat16"))
    except MantissaError:
        return [Role("learner", "none", "the job ends at once, with what is said above")]
    why = "mixed_precision.precision" if options.precision is not None else "actor.fsdp_config.dtype, exact kernels"
    scales = (
        "repeats the batch at a lower scale, which is in the checkpoint" if policy.train == "fp16" else "fp16 alone"
    )
    reads = _on(words, "actor.use_kl_loss") or _on(words, "algorithm.use_kl_in_reward")
    reference = _SHORT.get(good.get("ref.fsdp_config.dtype", "bfloat16"), "bf16")
    if "ref.fsdp_config.mixed_precision.precision" in good:
        reference = "as its mixed_precision.precision says"
    return [
        Role("learner", policy.train, why),
        Role("loss scaling", "Mantissa's" if policy.train == "fp16" else "none", scales),
        Role("masters", options.masters, "mixed_precision.masters"),
        Role("logits", policy.logits, "before the fp32 log-softmax"),
        Role("reference", reference if reads else "none", "in kernels as the learner's" if reads else "no KL is used"),
        Role("rollout", policy.rollout, f"{why}; kernels={policy.kernels}"),
        _correction(words, good, version),
    ]


def _rounded_to_4_bits(good: dict[str, str], engine: Engine, rollout: Rollout) -> list[Role]:
    section = f"actor.{'megatron' if engine == 'megatron' else 'fsdp_config'}.qat"
    if good.get(f"{section}.enable", "").lower() != "true":
        return []
    mode = good.get(f"{section}.mode", "w4a16")
    if rollout != "vllm":
        return [Role("weights", f"NVFP4 ({mode}) in the learner alone", f"{section}; {rollout} does not read it")]
    return [Role("weights", f"NVFP4 ({mode}), learner and rollout", section)]


def _learner(good: dict[str, str], role: str, engine: Engine) -> tuple[str, str]:
    key = _format_key(role, engine)
    if key in good:
        return _SHORT[good[key]], key + ("" if engine == "megatron" else ", and autocast with it")
    if engine == "megatron":
        return "bf16", f"{key} is not set: bfloat16"
    return "bf16", "mixed_precision.param_dtype is not set: parameters are cast to bf16, under autocast to bf16"


def _scaler(learner: str, engine: Engine) -> Role:
    if learner != "fp16":
        return Role("loss scaling", "none", f"the learner is {learner}; verl makes a scaler for fp16 alone")
    if engine == "mantissa_fsdp2":
        return Role("loss scaling", "Mantissa's", "repeats the batch at a lower scale, which is in the checkpoint")
    if engine == "megatron":
        why = "begins at 32768 (override_optimizer_config); where a gradient overflows, verl 0.9.1 ends the job"
        return Role("loss scaling", "Megatron's", why)
    return Role("loss scaling", "ShardedGradScaler(growth_interval=400)", "by no key; in no checkpoint, in no metric")


def _master(good: dict[str, str], engine: Engine) -> list[Role]:
    if engine == "megatron":
        return [Role("masters", "fp32", "Megatron's distributed optimizer")]
    reduce = _SHORT[good.get("actor.fsdp_config.mixed_precision.reduce_dtype", "fp32")]
    dtype = _SHORT[good.get("actor.fsdp_config.model_dtype", "fp32")]
    lost = "" if dtype == "fp32" else ": most updates at a learning rate of 1e-6 are lost in it"
    return [Role("gradients", reduce, "reduced over ranks in it"), Role("masters", dtype, "model_dtype" + lost)]


def _correction(words: Words, good: dict[str, str], version: Version) -> Role:
    level = good.get("algorithm.rollout_correction.rollout_is", "null")
    default = defaults(version, "dp")[full("rollout.calculate_log_probs")]  # false before 0.9
    if (words.value("rollout.calculate_log_probs") or str(default)).lower() == "false":
        return Role("correction", "none", "rollout.calculate_log_probs=false: the gap is not even measured")
    if level in ("token", "sequence"):
        bound = words.value("algorithm.rollout_correction.rollout_is_threshold") or "2.0"
        return Role("correction", f"by {level}, {bound}", "algorithm.rollout_correction")
    return Role("correction", "none", "algorithm.rollout_correction.rollout_is is not set")


def _casts(words: Words, good: dict[str, str], engine: Engine) -> list[str]:
    """Where weights become bf16 on their way, whatever the formats at both ends."""
    found = []
    backend = words.value("rollout.checkpoint_engine.backend") or "naive"
    if backend in _CASTING:
        found.append(f"checkpoint_engine.backend={backend}: {_CASTING[backend]}")
    if _on(words, "model.lora.merge") and engine in FSDPS:
        found.append("model.lora.merge=true: merged weights are cast to bf16 before they are sent")
    rank = words.value("model.lora_rank") or words.value("model.lora.rank") or "0"
    if rank not in ("0", "") and engine in FSDPS:
        found.append("LoRA: adapters are cast to the base weights' format (model_dtype)")
    if good.get("rollout.quantization") == "fp8":
        found.append("rollout.quantization=fp8: weights are rounded to rollout.dtype, then to e4m3")
    found.append("verl.model_merger: the policy that it exports from a checkpoint is bf16")
    return found
