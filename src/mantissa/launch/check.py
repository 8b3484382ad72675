"""What a verl run with given overrides really computes in, and which of its precision settings nobody reads.

verl does not say: a key that the chosen engine ignores is accepted, and so is a wrong value. Each setting that is about
precision gets a verdict from the exporter's own table (``facts.py``), and then every role is worked out from what is
set and from verl's defaults, which are bf16 throughout.

Overrides stand on a command line, or somewhere in a shell script. A script is not run. Its words are looked at:
variables that it sets are put in where they are used, and what looks like an override (a dotted key, then ``=``) is
one, wherever it stands, arrays included. Of a key given twice the last counts.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

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
from mantissa.launch.plugin_options import SECTION, mistake, options_in

_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_]\w*(?:\.[\w@/-]+)+|model_engine)=(.*)", re.S)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_CONFIG_NAME = re.compile(r"--config-name(?:=(.*))?")
_COMMENT = re.compile(r"(^|\s)#[^\n]*", re.M)
_ENDS_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\s*\Z")
_PRINTS = ("echo", "printf")
_DEEPEST, _LONGEST = 4, 100_000
_SUCH_AS = "actor_rollout_ref.rollout.dtype=float16"
_USE = re.compile(r"\$\{([A-Za-z_]\w*|\d+)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Given:
    """One override as it was written: ``mark`` is what stood before it, ``+``, ``++`` or nothing."""

    key: str
    value: str
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.mark}{self.key}={self.value}"


@dataclass
class Words:
    """What was found: overrides by key, the name of the configuration, environment variables."""

    overrides: dict[str, Given] = field(default_factory=dict)
    config_name: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    submitted: bool = False  # through ``ray job submit``, which leaves the shell's variables behind
    job: dict[str, str] = field(default_factory=dict)  # what its runtime_env holds
    runtime_env_file: str | None = None  # named, and not found

    def value(self, key: str) -> str | None:
        """The value given for a key, or None."""
        return self.overrides[key].value if key in self.overrides else None


def read_words(arguments: Sequence[str]) -> Words:
    """Overrides from ``arguments``: a script's path, or the overrides themselves.

    Raises ``MantissaError`` where there is none, and for a script whose quotes do not close.
    """
    if len(arguments) == 1 and "=" not in arguments[0]:
        path = Path(arguments[0])
        if not path.is_file():
            raise MantissaError(f"{path}: expected overrides such as {_SUCH_AS}, or a script")
        split = _split(path)
        words = _found(split, script=True)
        _job(words, [_expanded(word, words.variables) for word in split], path.parent)
        if not words.overrides:
            raise MantissaError(f"{path}: found no override, such as {_SUCH_AS}")
        return words
    return _found(list(arguments), script=False)


def script_words(path: Path) -> list[str]:
    """The words of a shell script, variables put in where they are known, comments left out."""
    variables: dict[str, str] = {}
    words = []
    for word in _split(path):
        word = _expanded(word, variables)
        if match := _VARIABLE.fullmatch(word):
            variables[match[1]] = match[2].lstrip("(")
        words.append(word)
    return words


def _split(path: Path) -> list[str]:
    text = _COMMENT.sub(r"\1", path.read_text(errors="replace").replace("\\\n", " "))
    if _ENDS_ESCAPED.search(text):  # a last line that was to go on, with nothing after it
        text = text.rstrip()[:-1]
    try:
        words = shlex.split(text)
        inner = [shlex.split(word) if before == "-c" else [word] for before, word in pairwise(["", *words])]
    except ValueError as error:
        raise MantissaError(f"{path}: cannot be read as a shell script: {error}") from None
    # What is printed sets nothing; what is given to bash -c is a script too.
    return [word for each, before in zip(inner, ["", *words], strict=False) if before not in _PRINTS for word in each]


def _found(words: list[str], script: bool) -> Words:
    result = Words()
    named = False
    for word in words:
        word = _expanded(word, result.variables) if script else word
        name = _CONFIG_NAME.fullmatch(word)
        if named or (name and name[1]):
            result.config_name, named = (word if named else str(name and name[1])), False
        elif name:
            named = True
        elif match := _OVERRIDE.fullmatch(word.rstrip(")") if word.count("(") < word.count(")") else word):
            mark, key, value = match.groups()
            if mark != "~":
                result.overrides[key] = Given(key, value.strip("'\""), mark or "")
        elif match := _VARIABLE.fullmatch(word):
            result.variables[match[1]] = match[2].lstrip("(")
        elif not script:
            raise MantissaError(f"{word!r}: expected key=value, such as {_SUCH_AS}")
    return result


def _job(words: Words, split: list[str], folder: Path) -> None:
    """What a ``ray job submit`` in the script gives to every node."""
    words.submitted = any(split[i : i + 3] == ["ray", "job", "submit"] for i in range(len(split)))
    for word, following in zip(split, [*split, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        value = value if equals else following
        if option == "--runtime-env-json":
            words.job |= _variables_of(value)
        elif option == "--runtime-env":
            found = next((path for path in (folder / value, value) if os.path.isfile(path)), None)
            words.runtime_env_file = None if found else value
            words.job |= _variables_of(Path(found).read_text(errors="replace")) if found else {}


def _variables_of(text: str) -> dict[str, str]:
    """``env_vars`` of a runtime_env in YAML or JSON; none where it is neither."""
    try:
        held = parse_yaml(text, "runtime_env")
    except MantissaError:
        return {}
    held = held.get("env_vars") if isinstance(held, dict) else None
    return {str(name): str(value) for name, value in held.items()} if isinstance(held, dict) else {}


def _expanded(word: str, variables: dict[str, str]) -> str:
    """The word with the variables that are known put in; a default where one is not, else as it stands."""

    def known(match: re.Match[str]) -> str:
        default = match[2] if match[2] is not None else match[0]
        return variables.get(match[1] or match[3], default)

    for _ in range(_DEEPEST):  # a default may hold a variable
        if len(word) + sum(len(known(match)) for match in _USE.finditer(word)) > _LONGEST:
            break  # before it is made: variables that double each other would fill the memory
        put_in = _USE.sub(known, word)
        if put_in == word:
            break
        word = put_in
    return word


_SHORT = {"float16": "fp16", "half": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "float32": "fp32",
          "float": "fp32", "fp32": "fp32"}  # fmt: skip
_LONG = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_ABOUT_PRECISION = re.compile(
    r"(dtype|fp4|fp8|fp16|bf16|fp32|quant|precision|loss_scale|scaler|autocast|amp\b|logprobs_mode|calculate_log_probs"
    r"|veto|rollout_correction|grad_clip|clip_grad|qat|mbridge\b)"
)
_IN_RUNTIME_ENV = "+ray_kwargs.ray_init.runtime_env.env_vars."
_CASTING = {
    "delta_sharded": "weights are cast to bf16, and vLLM takes the delta in bf16 only",
    "kimi_ckpt_engine": "weights are cast to bf16 (its rollout_dtype, which has no key of its own)",
    "mooncake": "weights are cast to bf16 unless engine_kwargs.mooncake.rollout_dtype says otherwise",
}
KeyEffect = Literal["takes effect", "handed on", "ignored", "refused by hydra", "wrong value", "unknown", "missing"]


@dataclass(frozen=True)
class Setting:
    """One precision setting and what becomes of it; ``instead``: what would do what was meant."""

    given: Given
    verdict: KeyEffect
    why: str
    instead: str = ""


@dataclass(frozen=True)
class Role:
    """What one part of the run computes in, and why."""

    name: str
    active: str
    why: str


@dataclass(frozen=True)
class Report:
    """The whole answer. ``meant``: the overrides still missing for the format that settings without effect name.

    ``others``: settings that are about something else.
    """

    version: Version
    engine: Engine
    rollout: Rollout
    assumed: tuple[str, ...]
    settings: tuple[Setting, ...]
    roles: tuple[Role, ...]
    casts: tuple[str, ...]
    meant: tuple[str, ...]
    others: int

    @property
    def wrong(self) -> list[Setting]:
        """Settings that do not do what they say."""
        return [setting for setting in self.settings if setting.verdict not in ("takes effect", "handed on")]


def check_verl(arguments: Sequence[str], version: Version = "0.9.1") -> Report:
    """Say what overrides (or a shell script that holds them) do. Raises ``MantissaError`` where there is none."""
    words = read_words(arguments)
    words.overrides = {short(key): given for key, given in words.overrides.items()}
    engine, rollout, assumed = _engines(words)
    about = [
        given
        for key, given in words.overrides.items()
        if (_ABOUT_PRECISION.search(key) or key in HANDED_KEYS) and not key.startswith(_IN_RUNTIME_ENV[1:])
    ]
    judged = [_judged(given, engine, rollout, version) for given in about]
    judged = [_by_plugin(setting, words, engine) for setting in judged] if engine in PLUGIN else judged
    good = {
        short(s.given.key): s.given.value for s in judged if s.verdict == "takes effect" and s.given.value != "null"
    }
    settings = (*judged, *_variables(words, good, rollout))
    roles, casts = _roles(words, good, engine, rollout), _casts(words, good, engine)
    meant, others = _meant(settings, good, engine), len(words.overrides) - len(about)
    return Report(version, engine, rollout, tuple(assumed), settings, tuple(roles), tuple(casts), tuple(meant), others)


def report_text(report: Report) -> str:
    """What ``check-verl`` prints."""
    lines = [f"verl {report.version}, {report.engine} learner, {report.rollout} rollout"]
    lines += [f"  taken for granted: {said}" for said in report.assumed]
    for title, settings in (
        ("precision settings without effect", report.wrong),
        ("precision settings that take effect", [s for s in report.settings if s.verdict == "takes effect"]),
        ("handed to another program as they are", [s for s in report.settings if s.verdict == "handed on"]),
    ):
        if not settings:
            continue
        lines += ["", title]
        for setting in settings:
            verdict = "" if setting.verdict in ("takes effect", "handed on") else f"{setting.verdict}: "
            lines += [f"  {setting.given}", f"      {verdict}{setting.why}"]
            if setting.instead:
                lines.append(f"      instead: {setting.instead}")
    lines += ["", "what runs"]
    width = max(len(role.name) for role in report.roles)
    lines += [f"  {role.name:<{width}}  {role.active}  ({role.why})" for role in report.roles]
    lines += ["", "what is cast on the way", *(f"  {cast}" for cast in report.casts)]
    if report.meant:
        lines += ["", "for the format that was asked for, in every role", *(f"  {one}" for one in report.meant)]
    if report.others:
        lines += ["", f"{report.others} other settings are not about precision"]
    return "\n".join(lines)


def _variables(words: Words, good: dict[str, str], rollout: Rollout) -> Iterator[Setting]:
    """The environment variables that these settings need on every node: there, missing, or with another value."""
    job = {key.removeprefix(_IN_RUNTIME_ENV[1:]): given.value for key, given in words.overrides.items()} | words.job
    for row in NEEDED:
        if good.get(row.key) not in row.values or rollout not in row.rollouts:
            continue
        value = job.get(row.name) or words.variables.get(row.name)
        reaches = row.name in job or not words.submitted
        if value is None or not reaches:
            instead = f"{_IN_RUNTIME_ENV}{row.name}='{row.value}'"
            yield Setting(Given(row.name, row.value), "missing", _why_missing(row, words), instead)
        elif value != row.value:
            yield Setting(Given(row.name, value), "wrong value", f"expected {row.value}: {row.without}")
        else:
            where = "set where the driver starts; on several nodes put it into runtime_env"
            yield Setting(
                Given(row.name, value), "takes effect", "in the job's runtime_env" if row.name in job else where
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


def _engines(words: Words) -> tuple[Engine, Rollout, list[str]]:
    assumed = []
    group = words.value("model_engine") or ("megatron" if "megatron" in (words.config_name or "") else "dp")
    engine = "megatron" if group == "megatron" else words.value("actor.strategy") or ""
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
    for name, value, known in (
        ("actor.strategy", engine, get_args(Engine)),
        ("rollout.name", rollout, (*get_args(Rollout), *AROUND)),
    ):
        if value not in known:
            raise MantissaError(f"{name}={value}: this check knows {', '.join(known)}")
    return engine, rollout, assumed  # type: ignore[return-value]


def _judged(given: Given, engine: Engine, rollout: Rollout, version: Version) -> Setting:
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
    if fact.new and not given.mark:
        return Setting(given, "refused by hydra", "the key is not in verl's tree", f"+{full(key)}={given.value}")
    if not fact.new and given.mark == "+":
        return Setting(given, "refused by hydra", "the key is in verl's tree already", f"{full(key)}={given.value}")
    values = fact.understood(engine, rollout)
    if values and given.value not in values and given.value != "null":
        return Setting(given, "wrong value", f"expected one of {', '.join(values)}; verl itself does not check")
    said = fact.says.get(given.value) or fact.says.get(given.value.capitalize())
    meaning = f"{fact.what}: {said}" if said else fact.what
    return Setting(given, "takes effect", meaning + (f"; {fact.trap}" if fact.trap else ""))


def _by_plugin(setting: Setting, words: Words, engine: Engine) -> Setting:
    """What the plugin itself says of an option of its engine, or of what stands below one."""
    key = short(setting.given.key)
    if key != SECTION and not key.startswith(f"{SECTION}."):
        return setting
    options = options_in({name: given.value for name, given in words.overrides.items()})
    names = [key.removeprefix(SECTION).split(".")[1]] if key != SECTION else list(options)
    wrong = next(filter(None, (mistake(options, engine, name) for name in names)), "")
    if wrong:
        return Setting(setting.given, "wrong value", wrong)
    if setting.verdict == "unknown":
        what = "; ".join(FACTS[fact].what for fact in (f"{SECTION}.{name}" for name in names) if fact in FACTS)
        return Setting(setting.given, "takes effect" if setting.given.mark else "refused by hydra", what)
    return setting


def _ignored(given: Given, row: Ignored) -> Setting:
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


def _roles(words: Words, good: dict[str, str], engine: Engine, rollout: Rollout) -> list[Role]:
    if engine == "mantissa":
        return _roles_of_plugin(words, good)
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
    roles.append(_correction(words, good))
    return roles


def _roles_of_plugin(words: Words, good: dict[str, str]) -> list[Role]:
    """Of Mantissa's own learner and rollout, whose formats one policy says."""
    from mantissa.verl.engine_options import EngineOptions

    try:
        options = EngineOptions.of(options_in({key: given.value for key, given in words.overrides.items()}))
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
        _correction(words, good),
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
        return Role("loss scaling", "Megatron's", "begins at 32768; override_optimizer_config sets its figures")
    return Role("loss scaling", "ShardedGradScaler(growth_interval=400)", "by no key; in no checkpoint, in no metric")


def _master(good: dict[str, str], engine: Engine) -> list[Role]:
    if engine == "megatron":
        return [Role("masters", "fp32", "Megatron's distributed optimizer")]
    reduce = _SHORT[good.get("actor.fsdp_config.mixed_precision.reduce_dtype", "fp32")]
    dtype = _SHORT[good.get("actor.fsdp_config.model_dtype", "fp32")]
    lost = "" if dtype == "fp32" else ": most updates at a learning rate of 1e-6 are lost in it"
    return [Role("gradients", reduce, "reduced over ranks in it"), Role("masters", dtype, "model_dtype" + lost)]


def _correction(words: Words, good: dict[str, str]) -> Role:
    level = good.get("algorithm.rollout_correction.rollout_is", "null")
    if (words.value("rollout.calculate_log_probs") or "").lower() == "false":
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
