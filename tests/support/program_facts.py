"""What other programs' options are: key, type and default, out of their sources, written as data by ``make facts``.

Most of them cannot be installed beside each other, or without a GPU, so their definitions are read by ``ast`` and
nothing of them is run: calls of ``add_argument``, and classes of fields (dataclasses, pydantic's, ``TypedDict``) from
the class of the whole configuration down. Kept are keys about precision, log-probs and sampling: those of which
``mantissa check`` must not say what it does not know. TRL's come from its own objects (``trl_facts.py``).
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mantissa.launch.facts import about_precision
from mantissa.launch.scripts import leaves, plain
from trl_facts import ANSWERS

FACTS = Path(__file__).parents[2] / "src" / "mantissa" / "launch" / "programs.json"
_DEEPEST = 8


class Source(NamedTuple):
    """Where a program defines its options: patterns of files; the class of the whole configuration, where it has one,
    and its file; a configuration whose values are the defaults of what the classes give none."""

    repository: str
    files: tuple[str, ...]
    classes: tuple[tuple[str, str], ...] = ()
    yaml: str = ""


_PRIME = "packages/prime-rl-configs/src/prime_rl/configs/"
_SWIFT = (
    "swift/arguments/*.py",
    "swift/trainers/arguments.py",
    "swift/rlhf_trainers/arg*.py",
    "swift/ray_utils/arg*.py",
)
PROGRAMS = {
    "openrlhf": Source("OpenRLHF/OpenRLHF", ("openrlhf/cli/train_ppo_ray.py",)),
    "nemo-rl": Source("NVIDIA-NeMo/RL", ("nemo_rl/*.py",), (("MasterConfig", "nemo_rl/algorithms/grpo.py"),),
                      "examples/configs/grpo_math_1B.yaml"),
    "skyrl": Source("NovaSky-AI/SkyRL", ("skyrl/train/config/config.py",), (("SkyRLTrainConfig", ""),)),
    "areal": Source("inclusionAI/AReaL", ("areal/api/cli_args.py",), (("GRPOConfig", ""),)),
    "ms-swift": Source("modelscope/ms-swift", _SWIFT, (("RLHFArguments", ""), ("GRPOConfig", ""))),
    "ms-swift-megatron": Source("modelscope/ms-swift", (*_SWIFT, "swift/megatron/arguments/*.py"),
                                (("MegatronRLHFArguments", ""),)),
    "slime": Source("THUDM/slime", ("slime/utils/arguments.py",)),
    "prime-rl": Source("PrimeIntellect-ai/prime-rl", (f"{_PRIME}*.py",), (("RLConfig", f"{_PRIME}rl.py"),)),
    "miles": Source("radixark/miles", ("miles/utils/arguments.py", "miles/backends/fsdp_utils/arguments.py"),
                    (("FSDPArgs", ""),)),
}  # fmt: skip

Facts = dict[str, list[Any]]  # key: type, default


class Class(NamedTuple):
    """A class of fields: its bases, and name, annotation and default of each field."""

    file: str
    bases: list[str]
    fields: list[tuple[str, ast.expr, ast.expr | None]]


def facts_of(source: Source, repository: Path) -> Facts:
    """The options that are about precision, by key."""
    names = _git(repository, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    files = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in source.files)]
    trees = {name: ast.parse(_git(repository, "show", f"HEAD:{name}")) for name in files if name.endswith(".py")}
    found = dict(itertools.chain.from_iterable(map(_arguments, trees.values()))) if not source.yaml else {}
    classes = _classes(trees)
    for name, file in source.classes:
        found |= dict(_fields(name, file, classes, "", _DEEPEST))
    if source.yaml:
        given = dict(leaves(yaml.safe_load(_git(repository, "show", f"HEAD:{source.yaml}"))))
        found = {key: ["", None] for key in given} | found
        found = {key: [row[0], given.get(key, row[1])] for key, row in found.items()}
    return {key: [row[0], plain(row[1])] for key, row in sorted(found.items()) if about_precision(key)}


def _git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *words], check=True, capture_output=True, text=True).stdout


def _arguments(tree: ast.AST) -> Iterator[tuple[str, list[Any]]]:
    """Of each ``add_argument``: the option's name without its dashes."""
    for node in ast.walk(tree):
        name = getattr(getattr(node, "func", None), "attr", getattr(getattr(node, "func", None), "id", ""))
        if not isinstance(node, ast.Call) or name not in ("add_argument", "reset_arg"):
            continue
        options = [_constant(each) for each in node.args]
        given = {each.arg: each.value for each in node.keywords}
        flag = str(_constant(given.get("action"))).startswith("store_")
        default = _constant(given.get("default")) if "default" in given else (False if flag else None)
        default = " ".join(map(str, ast.literal_eval(default))) if str(default).startswith("[") else default  # as typed
        kind = "bool" if flag else ast.unparse(given["type"]) if "type" in given else "str"
        yield from ((str(each)[2:], [kind, default]) for each in options if str(each).startswith("--"))


def _classes(trees: dict[str, ast.Module]) -> dict[str, list[Class]]:
    found: dict[str, list[Class]] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                fields = [(each.target.id, each.annotation, each.value) for each in node.body
                          if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]  # fmt: skip
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                found.setdefault(node.name, []).append(Class(file, bases, fields))
    return found


def _fields(name: str, file: str, classes: dict[str, list[Class]], under: str, left: int) -> Iterator[tuple[str, Any]]:
    """The leaves below a class; of several classes of one name, the one in ``file``."""
    if name not in classes or not left:
        return
    there = next((each for each in classes[name] if each.file == file), classes[name][0])
    for base in reversed(there.bases):  # of two that have a field, Python takes the first's
        yield from _fields(base, there.file, classes, under, left - 1)
    for field, annotation, default in there.fields:
        named = [each.id if isinstance(each, ast.Name) else str(getattr(each, "value", ""))
                 for each in ast.walk(annotation)
                 if isinstance(each, ast.Name | ast.Constant)]  # fmt: skip
        inner = [each for each in named if each in classes]
        for each in inner:
            yield from _fields(each, there.file, classes, f"{under}{field}.", left - 1)
        if not inner:
            yield f"{under}{field}", [ast.unparse(annotation).strip("'"), _default(default)]


def _default(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Call):
        named = {each.arg: each.value for each in node.keywords}
        first = named.get("default", node.args[0] if node.args else None)
        return _constant(first) if first is not None else None
    return _constant(node)


def _constant(node: ast.expr | None) -> Any:
    try:
        whole = isinstance(node, ast.Call) and ast.unparse(node.func) == "int"
        value = ast.literal_eval(node.args[0] if whole else node) if node is not None else None
        value = int(value) if whole else value
    except (ValueError, SyntaxError, TypeError):
        return ast.unparse(node) if node is not None else None
    return value if isinstance(value, bool | int | float | str | None) and value is not ... else str(value)


def _trl() -> dict[str, Any]:
    stored = json.loads(ANSWERS.read_text())
    fields = {
        key: [kind, plain(default)] for each in ("fields", "model") for key, (default, kind) in stored[each].items()
    }
    return {"version": stored["trl"], "keys": {k: row for k, row in sorted(fields.items()) if about_precision(k)}}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in after:
        old, new = (each.get(name, {}).get("keys", {}) for each in (before, after))
        yield from (f"{name} {key}: {old.get(key)} -> {new.get(key)}" for key in sorted({*old, *new})
                    if old.get(key) != new.get(key))  # fmt: skip


def main() -> None:
    """Write the options of TRL and of the programs whose repositories are at ``NAME=FOLDER``; print what changed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "programs", nargs="*", metavar="NAME=FOLDER", help=f"git repositories; of {', '.join(PROGRAMS)}"
    )
    before = json.loads(FACTS.read_text()) if FACTS.is_file() else {}
    after = before | {"trl": _trl()}
    for name, _, folder in (each.partition("=") for each in parser.parse_args().programs):
        version = _git(Path(folder), "log", "-1", "--format=%h of %cs", "--abbrev=8").strip()
        after[name] = {"version": version, "keys": facts_of(PROGRAMS[name], Path(folder))}
    print("\n".join(_changed(before, after)) or "nothing changed")
    rows = {name: {"version": each["version"], "keys": each["keys"]} for name, each in sorted(after.items())}
    FACTS.write_text(_lines(rows), encoding="utf-8")


def _lines(rows: dict[str, Any]) -> str:
    """A line for each key."""
    parts = []
    for name, each in rows.items():
        keys = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in each["keys"].items())
        parts.append(f'{json.dumps(name)}: {{"version": {json.dumps(each["version"])}, "keys": {{\n{keys}\n}}}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
