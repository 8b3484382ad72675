"""The page of every framework's precision keys, from the tables that ``mantissa check`` is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tables import table

_NAMES = {"trl": "TRL", "openrlhf": "OpenRLHF", "nemo-rl": "NeMo-RL", "skyrl": "SkyRL", "areal": "AReaL",
          "ms-swift": "ms-swift", "ms-swift-megatron": "ms-swift on Megatron", "slime": "slime", "miles": "miles",
          "prime-rl": "prime-rl"}  # fmt: skip
_HEADER = ("key", "default", "what it does", "what to mind", "read in")
_WORDS = {"set": "is set", "unset": "is not set"}


def verl_check() -> str:
    """Every key about precision that verl reads or ignores, with the newest version's default."""
    from mantissa.launch.facts import FACTS, IGNORED, VERSIONS

    version = VERSIONS[-1]
    rows = [[_verl_key(fact), _verl_default(fact, version), fact.what, fact.trap, f"verl/{fact.read_in}"]
            for fact in FACTS.values() if fact.kind in ("precision", "handed")]  # fmt: skip
    ignored = [[_verl_key(row), _verl_default(row, version), "nothing", _ignored(row), ""] for row in IGNORED]
    return table(_HEADER, [*rows, *ignored])


def _ignored(row: Any) -> str:
    return f"ignored: {row.why}" + (f"; instead `{row.instead}`" if row.instead else "")


def _verl_key(row: Any) -> str:
    from mantissa.launch.facts import ENGINES

    engines = "" if row.engines == ENGINES else f" ({', '.join(row.engines)})"
    return f"`{'+' if row.new else ''}{row.key}`{engines}"


def _verl_default(row: Any, version: str) -> str:
    from mantissa.launch.facts import full
    from mantissa.launch.scripts import plain
    from mantissa.launch.verl_tree import defaults

    tree = defaults(version, "megatron" if row.engines == ("megatron",) else "dp")
    return f"`{plain(tree[full(row.key)])}`" if full(row.key) in tree else ""


def frameworks_check() -> str:
    """A section for each of the other frameworks."""
    from mantissa.launch.facts import frameworks

    return "\n\n".join("\n".join(_section(name, framework)) for name, framework in frameworks().items())


def _section(name: str, framework: Any) -> Iterator[str]:
    from mantissa.launch.facts import about_precision, programs

    program = programs()[name]
    yield from (f"## {_NAMES[name]}", "", f"Read in {framework.project} {framework.version}; its options, in"
                f" {program.version}. `--framework {name}`.", "")  # fmt: skip
    keys = [*framework.keys, *dict.fromkeys(key for rule in framework.rules for key in rule.about)]
    lines = []
    for key in dict.fromkeys(keys):
        fact = framework.keys.get(key)
        minds = [_mind(rule) for rule in framework.rules if key in rule.about]
        if fact is None or minds or about_precision(key):
            default = f"`{fact.default}`" if fact else ""
            lines.append([f"`{key}`", default, fact.what if fact else "", "; ".join(minds), fact.read if fact else ""])
    yield table(_HEADER, lines)
    others = [key for key in program.keys if key not in keys and not any(key.startswith(f"{each}.") for each in keys)]
    if others:
        yield from ("", "What these do is not known here, and `check` says so where they are not at their default: "
                    + ", ".join(f"`{key}`" for key in others) + ".")  # fmt: skip


def _mind(rule: Any) -> str:
    instead = f" (instead `{rule.instead}`)" if rule.instead else ""
    where = _where(rule.when, rule.differ)
    return f"**{rule.verdict}**{where}: {rule.why}{instead}"


def _where(when: Mapping[str, Sequence[str]], differ: Sequence[str]) -> str:
    parts = [f"`{key}` {' or '.join(_WORDS.get(value, value) for value in wanted)}" for key, wanted in when.items()]
    parts += [f"{' and '.join(f'`{key}`' for key in differ)} differ"] if differ else []
    return f" where {', '.join(parts)}" if parts else ""


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "check.md": {"verl_check": verl_check, "frameworks_check": frameworks_check},
}
