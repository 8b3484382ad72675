"""Mutation testing: change one thing in the source, run the tests of its package, and see whether any fails.

    python tests/mutants.py [--count 96] [--seed 0] [--packages precision kernels ...] [--jobs 2] [--timeout 300]

A mutant differs in one place: a comparison or an operation is replaced, a number is another, a condition is turned
round, ``min`` is ``max``. Places are drawn evenly over the packages, the same ones for the same seed and source; those
in annotations, error messages and code that needs a GPU, Triton or vLLM are left out. Each mutant is tried in a copy of
the source, by the tests of its package, the likeliest first, and then of those that use it (``USERS``), up to the first
failure. Printed are each one's end, with its line, and how many were caught. A survivor may behave as the original
does; most are tests that are missing.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("precision", "kernels", "algorithms", "training", "rollout", "rl")
USERS = {"precision": ("kernels",), "kernels": (), "algorithms": (), "training": (), "rollout": (), "rl": ()}
NOT_HERE = ("kernels/triton/", "kernels/exact/native.py", "rollout/vllm/")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "clamp_min": "clamp_max", "floor": "ceil"}


@dataclass(frozen=True)
class Mutant:
    """One change: the ``index``-th place of ``file``."""

    file: Path
    index: int
    line: int
    what: str


class Places(ast.NodeTransformer):
    """Walks over the places of a module in order; changes the one numbered ``at``."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.found = at, list[tuple[int, str]]()

    def _here(self, node: ast.AST, what: str) -> bool:
        self.found.append((node.lineno, what))  # type: ignore[attr-defined]
        return len(self.found) - 1 == self.at

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_Raise = visit_JoinedStr = visit_Import = visit_ImportFrom = visit_AnnAssign = _leave

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(part) for part in node.body]  # neither annotations nor decorators nor defaults
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        new = SWAPS.get(type(node.ops[0]))
        if new and self._here(node, f"{type(node.ops[0]).__name__} -> {new.__name__}"):
            node.ops[0] = new()  # type: ignore[call-overload]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        new = SWAPS.get(type(node.op))
        text = any(
            isinstance(side, ast.JoinedStr | ast.Constant) and not _number(side) for side in (node.left, node.right)
        )
        if new and not text and self._here(node, f"{type(node.op).__name__} -> {new.__name__}"):
            node.op = new()  # type: ignore[assignment]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        new = SWAPS[type(node.op)]
        if self._here(node, f"{type(node.op).__name__} -> {new.__name__}"):
            node.op = new()  # type: ignore[assignment]
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if self._here(node, "if -> if not"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._here(node, f"{node.value} -> {not node.value}"):
                return ast.Constant(not node.value)
        elif isinstance(node.value, int | float) and self._here(node, f"{node.value} -> {_other(node.value)}"):
            return ast.Constant(_other(node.value))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        name = getattr(function, "id", getattr(function, "attr", None))
        if name in CALLS and self._here(node, f"{name} -> {CALLS[name]}"):
            if isinstance(function, ast.Name):
                function.id = CALLS[name]
            else:
                function.attr = CALLS[name]  # type: ignore[attr-defined]
        return node


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _other(value: float) -> float:
    return value + 1 if isinstance(value, int) else value * 1.5 + (value == 0)


def drawn(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, as many of each package."""
    draw, out = random.Random(seed), []
    for number, package in enumerate(packages):
        places = []
        for file in sorted((ROOT / "src/mantissa" / package).rglob("*.py")):
            if not any(part in file.as_posix() for part in NOT_HERE) and file.name != "__init__.py":
                walk = Places()
                walk.visit(ast.parse(file.read_text()))
                places += [Mutant(file.relative_to(ROOT), i, *place) for i, place in enumerate(walk.found)]
        share = count // len(packages) + (number < count % len(packages))
        out += draw.sample(places, min(share, len(places)))
    return out


def _files(package: str, mutated: Path) -> list[str]:
    """The package's tests; first those that name the mutated module, for they are the likelier to fail."""
    files = sorted((ROOT / "tests" / package).rglob("test_*.py"))
    return [str(file) for file in sorted(files, key=lambda file: mutated.stem not in file.name + file.read_text())]


def caught(mutant: Mutant, timeout: float) -> bool:
    """Whether a test fails (or does not end) with this mutant."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    changed = ast.fix_missing_locations(Places(mutant.index).visit(copy.deepcopy(tree)))
    package = mutant.file.parts[2]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        (source.parent / mutant.file).write_text(ast.unparse(changed))
        for tests in (package, *USERS[package]):
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                *_files(tests, mutant.file),
            ]
            environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
            try:
                ended = subprocess.run(
                    command, cwd=ROOT, env=environment, timeout=timeout, capture_output=True, check=False
                )
            except subprocess.TimeoutExpired:
                return True
            if ended.returncode not in (0, 5):
                return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), choices=PACKAGES)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0)
    given = parser.parse_args()
    mutants = drawn(given.packages, given.count, given.seed)
    table = {package: [0, 0] for package in given.packages}
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        tried = zip(mutants, pool.map(lambda one: caught(one, given.timeout), mutants), strict=True)
        for number, (mutant, found) in enumerate(tried, 1):
            row = table[mutant.file.parts[2]]
            row[0], row[1] = row[0] + 1, row[1] + found
            end = "caught" if found else "survives"
            print(f"{number} of {len(mutants)} {end}: {mutant.file}:{mutant.line}  {mutant.what}", flush=True)
    for package, (count, dead) in table.items():
        print(f"{package:<11} {dead} of {count} caught")
    print(f"{'all':<11} {sum(row[1] for row in table.values())} of {len(mutants)} caught")


if __name__ == "__main__":
    main()
