"""Mutation testing: change one thing in the source, run the tests of its package, and see whether any fails.

    python tests/mutants.py [--count 100] [--seed 0] [--packages precision kernels ...] [--timeout 300] [--out FILE]

A mutant differs in one place (``Places``): a comparison at its bound or turned round, another operation, a sign or a
``not`` dropped, ``and`` for ``or``, a clause or a whole check left out, a statement left out, a number that is another,
two arguments exchanged. A package has as many as its share of all places; within one, every kind is as likely. The
same ones are drawn for the same seed and source. Places in annotations, error messages and code that needs a GPU,
Triton, verl or vLLM are left out. Each mutant is tried in a copy of the source, one at a time: first by the test file
of its module, then by the others of its package, the likeliest first, and of those that use it (``USERS``), up to the
first failure. A line for each says how it ended: ``noticed`` and by which test, ``survives``, or ``time`` where no test
had failed when its time was over.

``--out``: a JSON line a mutant; those that are in it already are not tried again. A survivor may behave as the original
does; most are tests that are missing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(sorted(path.name for path in (ROOT / "src/mantissa").iterdir() if (path / "__init__.py").is_file()))
USERS = {"precision": ("kernels",), "bench": ("cli",)}
NOT_HERE = (
    *("kernels/triton/", "kernels/exact/gpu.py", "rollout/vllm/"),
    *(
        f"verl/{name}.py"
        for name in ("agents", "checkpoint", "engine", "flowrl", "fsdp", "platform", "rollout", "transfer")
    ),
)
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "clamp_min": "clamp_max", "floor": "ceil"}


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes from ``start`` to ``end`` of ``file`` are ``new``."""

    file: str
    line: int
    kind: str
    old: str
    new: str
    start: int
    end: int


class Places(ast.NodeVisitor):
    """The places of a module in order: the kind of change, the node, and what stands there instead."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.expr | ast.stmt, str]] = []

    def _skip(self, node: ast.AST) -> None:
        pass

    visit_Raise = visit_JoinedStr = visit_Import = visit_ImportFrom = visit_AnnAssign = visit_Assert = _skip

    def _add(self, kind: str, node: ast.expr, new: ast.expr) -> None:
        self.found.append((kind, node, f"({ast.unparse(new)})"))

    def _changed(self, kind: str, node: ast.expr, **fields: object) -> None:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        self._add(kind, node, new)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in node.body:  # neither annotations nor decorators nor defaults
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if all(isinstance(part, ast.Raise) for part in node.body):
            self._add("check", node.test, ast.Constant(False))
        else:
            self._add("condition", node.test, ast.UnaryOp(ast.Not(), node.test))
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add("condition", node.test, ast.UnaryOp(ast.Not(), node.test))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if new := SWAPS.get(type(node.ops[0])):
            self._changed("comparison", node, ops=[new(), *node.ops[1:]])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right))
        if isinstance(node.op, ast.BitAnd | ast.BitOr):
            self._add("clause", node, node.left)
            self._add("clause", node, node.right)
        elif (new := SWAPS.get(type(node.op))) and not text:
            self._changed("operation", node, op=new())
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._changed("and/or", node, op=SWAPS[type(node.op)]())
        for i in range(len(node.values)):
            rest = [*node.values[:i], *node.values[i + 1 :]]
            self._add("clause", node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self._add("not" if isinstance(node.op, ast.Not) else "sign", node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("truth", node, ast.Constant(not node.value))
        elif isinstance(node.value, int | float):
            new = node.value + 1 if isinstance(node.value, int) else node.value * 1.5 + (node.value == 0)
            self._add("number", node, ast.Constant(new))

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", getattr(node.func, "attr", None))
        if name in CALLS:
            field = "id" if isinstance(node.func, ast.Name) else "attr"
            other = copy.copy(node.func)
            setattr(other, field, CALLS[name])
            self._changed("function", node, func=other)
        arguments = node.args
        plain = len(arguments) > 1 and not any(isinstance(one, ast.Starred) for one in arguments[:2])
        if plain and name not in (*CALLS, "isinstance", "getattr", "cast"):
            self._changed("arguments", node, args=[arguments[1], arguments[0], *arguments[2:]])
        self.generic_visit(node)

    def _statement(self, node: ast.Expr | ast.Assign | ast.AugAssign) -> None:
        kept = isinstance(node, ast.Assign) and any(isinstance(name, ast.Name | ast.Tuple) for name in node.targets)
        if not kept and not (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call)):
            self.found.append(("statement", node, "pass"))
        self.generic_visit(node)

    visit_Expr = visit_Assign = visit_AugAssign = _statement


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and (isinstance(node.value, bool) or not isinstance(node.value, int | float))


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Every mutant of a module."""
    source = file.read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    walk = Places()
    walk.visit(ast.parse(source))
    for kind, node, new in walk.found:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
        yield Mutant(file.relative_to(ROOT).as_posix(), node.lineno, kind, source[start:end].decode(), new, start, end)


def drawn(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants: of each package its share of all places, of each kind in it as many, but for chance."""
    places: dict[str, dict[str, list[Mutant]]] = {}
    for package in packages:
        places[package] = {}
        for file in sorted((ROOT / "src/mantissa" / package).rglob("*.py")):
            if file.name != "__init__.py" and not any(part in file.as_posix() for part in NOT_HERE):
                for mutant in mutants_of(file):
                    places[package].setdefault(mutant.kind, []).append(mutant)
    sizes = {package: sum(map(len, kinds.values())) for package, kinds in places.items()}
    exact = {package: count * size / sum(sizes.values()) for package, size in sizes.items()}
    shares = {package: int(share) for package, share in exact.items()}
    for package in sorted(exact, key=lambda name: shares[name] - exact[name])[: count - sum(shares.values())]:
        shares[package] += 1
    out = []
    for package, kinds in places.items():
        draw = random.Random(f"{seed} {package}")
        for _ in range(min(shares[package], sizes[package])):
            among = kinds[draw.choice(sorted(kind for kind, left in kinds.items() if left))]
            out.append(among.pop(draw.randrange(len(among))))
    return out


def tests_of(mutant: Mutant) -> Iterator[list[str]]:
    """Its module's own test files; then all others of the package and its users, those first that name most of it."""
    file = Path(mutant.file)
    package, stem = file.parts[2], file.stem
    rooms = (ROOT / "tests" / name for name in (package, *USERS.get(package, ())))
    tests = [test for room in rooms for test in sorted(room.rglob("test_*.py"))]
    own = [test for test in tests if re.search(rf"(^|_){stem}(_|$)", test.stem.removeprefix("test_"))]
    body = ast.parse((ROOT / file).read_bytes()).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    known = re.compile(rf"\b({'|'.join([stem, *names])})\b")
    rest = sorted((test for test in tests if test not in own), key=lambda t: -len(set(known.findall(t.read_text()))))
    yield from ([str(test.relative_to(ROOT)) for test in part] for part in (own, rest) if part)


def first_failure(source: Path, tests: list[str], ends: float) -> str | None:
    """The first test that fails with this source, or what else there was to say; "" if none does, None out of time."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out = run.communicate(timeout=max(ends - time.monotonic(), 1.0))[0]
    except subprocess.TimeoutExpired:
        return None
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)  # it, and what it started
            run.wait()
    if run.returncode in (0, 5):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", out, re.MULTILINE)
    return failed[1] if failed else "pytest: " + " ".join(out[-200:].split())


SOUND: dict[str, bool] = {}  # of tests that failed by a mutant: whether they pass without


def tried(mutant: Mutant, timeout: float) -> tuple[str, str]:
    """How the mutant ended, and the first test that failed by it. One that fails without it as well is left out."""
    ends = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        file = source.parent / mutant.file
        text = file.read_bytes()
        file.write_bytes(text[: mutant.start] + mutant.new.encode() + text[mutant.end :])
        for tests in tests_of(mutant):
            while failed := first_failure(source, [*tests, *_without()], ends):
                if failed not in SOUND and "::" in failed:
                    SOUND[failed] = first_failure(ROOT / "src", [failed], time.monotonic() + timeout) == ""
                if SOUND.get(failed, True):
                    return "noticed", failed
            if failed is None:
                return "time", ""
    return "survives", ""


def _without() -> list[str]:
    return [part for test, sound in SOUND.items() if not sound for part in ("--deselect", test)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), choices=PACKAGES)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one mutant")
    parser.add_argument("--out", type=Path, help="JSON lines; what is in it is not tried again")
    given = parser.parse_args()
    mutants = drawn(given.packages, given.count, given.seed)
    before = given.out.read_text().splitlines() if given.out and given.out.exists() else []
    ends = {json.dumps(row["mutant"]): (row["end"], row["by"]) for row in map(json.loads, before)}
    table = {package: Counter[str]() for package in given.packages}
    for number, mutant in enumerate(mutants, 1):
        key = json.dumps(asdict(mutant))
        if key not in ends:
            began = time.monotonic()
            ends[key] = tried(mutant, given.timeout)
            if given.out:
                row = {"end": ends[key][0], "by": ends[key][1], "mutant": asdict(mutant)}
                with given.out.open("a") as lines:
                    lines.write(json.dumps(row | {"seconds": round(time.monotonic() - began, 1)}) + "\n")
        end, by = ends[key]
        table[Path(mutant.file).parts[2]][end] += 1
        change = " -> ".join(" ".join(text.split())[:100] for text in (mutant.old, mutant.new))
        where = f"{mutant.file}:{mutant.line}"
        print(f"{number} of {len(mutants)} {end}: {where} {mutant.kind}: {change}", by, flush=True)
    for package, count in table.items():
        print(f"{package:<11} {count['noticed']} of {count.total()} noticed, {count['time']} out of time")
    print(f"{'all':<11} {sum(count['noticed'] for count in table.values())} of {len(mutants)} noticed")


if __name__ == "__main__":
    main()
