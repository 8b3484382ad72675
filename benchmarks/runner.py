"""Cases: what is measured, with which options, and where its rows go.

A case is a function below ``@case`` in any file of this folder. Its name is the case's and, if nothing else is said,
that of its file in ``results/``. Its parameters are the command's options: one without a default, or before a ``/``, is
given by its place; a sequence takes several values. It yields rows, one or a list at a time, which are printed and
appended as they come; a list is kept or refused as a whole. ``--dry`` takes the case's short form, and keeps no row but
in ``$OUT``; ``--seconds`` stops it at the first row after that time. A case is found by its text, and only its own file
imported: each needs its own packages. What it says of itself is its function's docstring or, where that has none, its
file's.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import append

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
Rows = Iterator[Row | list[Row]]
# What ``all`` runs, in this order: what a CPU measures in minutes. A GPU's part is in gpu.sh.
ALL: dict[str, tuple[str, ...]] = {
    "peak": (), "demo_memory": (), "rl_step": ("--rounds", "7"), "rollout_vs_generate": (),
    "simulated_step": ("--rounds", "9"), "fp8_step": ("--rounds", "9"), "exact_cost": ("--rounds", "5"),
    "amp_overhead": ("--rounds", "20"), "amp_loss": (), "allocator": ("--rounds", "5"), "waiting": ("--busy", "0"),
    "cost": (),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """``dry``: the options of its short form."""

    measure: Callable[..., Rows]
    file: str
    dry: Mapping[str, Any]


_imported: dict[str, Case] = {}


def case(file: str = "", **dry: Any) -> Callable[[Callable[..., Rows]], Callable[..., Rows]]:
    """Make a function a case whose rows go to ``results/FILE.jsonl``; ``dry``: options of its short form."""

    def register(measure: Callable[..., Rows]) -> Callable[..., Rows]:
        name = measure.__name__
        _imported[name] = Case(measure, f"{file or name}.jsonl", dry)
        return measure

    return register


def found() -> dict[str, tuple[str, str, str]]:
    """Every case, unimported: its module, the file of its rows, and the first sentence of what it says."""
    cases = {}
    for path in sorted(HERE.glob("*.py")):
        module = ast.parse(path.read_text())
        for node in module.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "case":
                    file = ast.literal_eval(mark.args[0]) if mark.args else node.name
                    said = ast.get_docstring(node) or ast.get_docstring(module) or ""
                    cases[node.name] = (path.stem, file, first_sentence(said))
    return cases


def first_sentence(said: str) -> str:
    return said.split("\n\n")[0].partition(". ")[0].replace("\n", " ").rstrip(".:")


def _option(parser: argparse.ArgumentParser, parameter: inspect.Parameter) -> None:
    kind, given = parameter.annotation, parameter.default
    if isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]
    several = typing.get_origin(kind) is Sequence
    kind = typing.get_args(kind)[0] if several else kind
    how: dict[str, Any] = {"default": argparse.SUPPRESS}
    if kind is bool:
        how["action"] = "store_true"
    else:
        how |= {"choices": typing.get_args(kind)} if typing.get_origin(kind) is typing.Literal else {"type": kind}
        how |= {"nargs": "*"} if several else {}
    if several and given is inspect.Parameter.empty and "choices" in how:
        how["type"] = _among(how.pop("choices"))  # argparse holds what is left out against choices as well
    if given is inspect.Parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
        parser.add_argument(parameter.name, **({"nargs": "?"} | how))
    else:
        parser.add_argument(f"--{parameter.name.replace('_', '-')}", help=f"by default {given!r}", **how)


def _among(choices: Sequence[str]) -> Callable[[str], str]:
    def chosen(word: str) -> str:
        if word not in choices:
            raise argparse.ArgumentTypeError(f"{word}: expected some of {', '.join(choices)}")
        return word

    return chosen


def among(words: Iterable[str], known: Iterable[str]) -> None:
    """End where a word is none of the known ones."""
    if wrong := [word for word in words if word not in (known := list(known))]:
        raise SystemExit(f"expected some of {', '.join(known)}, got {', '.join(wrong)}")


def options(name: str, case_: Case, words: list[str]) -> tuple[Row, bool, float]:
    """The function's arguments, whether this is the short form, and the seconds after which nothing more begins."""
    said = inspect.getdoc(case_.measure) or inspect.getmodule(case_.measure).__doc__
    looks = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"run.py {name}", description=said, formatter_class=looks)
    parameters = inspect.signature(case_.measure, eval_str=True).parameters
    for parameter in parameters.values():
        _option(parser, parameter)
    parser.add_argument("--dry", action="store_true", help="as short as can be; no row is kept but in $OUT")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end at the first row after them")
    given = vars(parser.parse_args(words))
    dry, seconds = given.pop("dry"), given.pop("seconds")
    values = {key: parameter.default for key, parameter in parameters.items()} | {**(case_.dry if dry else {}), **given}
    if missing := [key for key, value in values.items() if value is inspect.Parameter.empty]:
        parser.error(f"expected {', '.join(missing)}")
    return dict(values), dry, seconds


def shown(row: Row) -> str:
    """A row on one line; what is itself many values is left out."""
    words = {key: f"{value:.4g}" if isinstance(value, float) else str(value)[:150] for key, value in row.items()
             if not isinstance(value, (list, dict)) and value not in ("", None) and key != "benchmark"}  # fmt: skip
    return "  ".join(f"{key}={word}" for key, word in words.items())


def run(name: str, words: list[str]) -> None:
    """A case from its command's words."""
    importlib.import_module(found()[name][0])
    case_ = _imported[name]
    values, dry, seconds = options(name, case_, words)
    if isinstance(values.get("threads"), int):
        import torch

        torch.set_num_threads(values["threads"])
    began, path = time.perf_counter(), None
    bound = inspect.signature(case_.measure).bind_partial()
    bound.arguments |= values
    for made in case_.measure(*bound.args, **bound.kwargs) or ():
        rows = [{"benchmark": name} | row for row in (made if isinstance(made, list) else [made])]
        if not rows:
            continue
        for row in rows:
            print(shown(row), flush=True)
        if not dry or "OUT" in os.environ:
            path = append(case_.file, rows, values.get("device", "cpu"))
        if time.perf_counter() - began > seconds:
            print(f"ended: {seconds:g} s are over")
            break
    if path:
        print(path)


def run_all(threads: int) -> None:
    """Each in a process of its own. One that fails does not stop the others; the exit status says whether any did."""
    failed = []
    for name, given in {**ALL, "tables": ()}.items():
        more = [name, *given, *(["--threads", str(threads)] if name not in ("peak", "cost", "tables") else [])]
        script, words = ("tables.py", []) if name == "tables" else ("run.py", more)
        print(f"\n== {' '.join(more)}", flush=True)
        start = time.perf_counter()
        if subprocess.run([sys.executable, str(HERE / script), *words], check=False).returncode:
            failed.append(name)
        print(f"   {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main(words: Iterable[str] | None = None) -> None:
    name, *given = list(sys.argv[1:] if words is None else words) or ["--help"]
    cases = found()
    if name == "all":
        parser = argparse.ArgumentParser("run.py all", description=run_all.__doc__)
        parser.add_argument("--threads", type=int, default=2)
        run_all(parser.parse_args(given).threads)
    elif all(each in cases for each in name.split(",")):
        for each in name.split(","):
            run(each, given)
    else:
        print("\n".join(f"{each:<20} {said}" for each, (_, _, said) in cases.items()))
        if name not in ("--help", "-h"):
            raise SystemExit(f"expected a case, and not {name!r}")
