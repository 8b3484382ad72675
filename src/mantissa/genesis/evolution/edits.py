"""Small changes of a Python function, by its syntax tree: mutations of one program, and parts that another one lends.

``changes`` lists every single change of a program; nothing is drawn there and nothing is run. A change is described by
its kind, what was and what becomes, and where: words that a world model can learn from.

Programs are text from anywhere, so parsing is bounded: what is too long, too large or nested too deeply is no program.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import keyword
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MOST_NODES = 1500
_MOST_CHARACTERS = 20_000
_COMPARE = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_MEMBER = (ast.In, ast.NotIn)
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Div)
_CALLS = (("min", "max", "sum", "len"), ("list", "sorted", "set", "reversed", "tuple"), ("str", "int", "abs", "bool"))
_METHODS = (
    ("append", "extend", "insert"), ("upper", "lower"), ("split", "strip"), ("isdigit", "isalpha", "isalnum"),
)  # fmt: skip
_WRAPS = ("abs", "sorted", "set", "len", "str", "list")
_NAME = re.compile(r"\b[A-Za-z_]\w*")
Path = tuple[tuple[str, int], ...]  # fields from the root; -1: not a list


@dataclass(frozen=True)
class Change:
    """``node`` takes the place of ``old`` at ``path``; None deletes it; ``insert``: it goes in before."""

    kind: str
    path: Path
    old: ast.AST
    node: ast.AST | None
    insert: bool = False

    @property
    def place(self) -> str:
        return "_".join(f"{field}{index}" if index >= 0 else field for field, index in self.path)

    def described(self) -> tuple[str, str]:
        """In words, and as a pattern that programs share: its kind, the fields it is in, the texts without names."""
        before, after = ("" if self.insert else _text(self.old)), ("" if self.node is None else _text(self.node))
        fields, what = [field for field, _ in self.path[-2:]], f"{before[:80]} -> {after[:80]}"
        where = f"{self.kind}_{fields[-1]} {self.kind}_{'_'.join(fields)} depth{len(self.path)}"
        return f"{self.kind} at {self.place}: {what}", f"{self.kind} {where} {_NAME.sub(_nameless, what)}"


def parse(source: str) -> ast.Module | None:
    """The tree of a program; None for what is none, or is too large."""
    if len(source) > _MOST_CHARACTERS:
        return None
    try:
        tree = ast.parse(source)
        return tree if sum(1 for _ in ast.walk(tree)) <= MOST_NODES else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def normal(source: str) -> str | None:
    """A program as its tree is written, so that two that differ in spaces and comments alone are one; or None."""
    tree = parse(source)
    return None if tree is None else ast.unparse(tree) + "\n"


@functools.lru_cache(maxsize=32)  # of one program it is some 50 KB, and asked for again within a generation
def changes(source: str, lender: str | None = None) -> tuple[Change, ...]:
    """Every single change of the program ``source``; with ``lender``, every part of that which could take a place.

    Some say the same, and some nothing: ``draw`` leaves out what changes nothing.
    """
    tree = parse(source)
    other = None if lender is None else parse(lender)
    if tree is None or (lender is not None and other is None):
        return ()
    return tuple(_own(tree) if other is None else _lent(tree, other))


def apply(source: str, change: Change) -> str | None:
    """The program after a change; None where no statement would be left, or Python cannot write it."""
    tree = parse(source)
    assert tree is not None, "changes come from a program"
    *way, (field, index) = change.path
    parent: Any = tree
    for name, number in way:
        parent = getattr(parent, name) if number < 0 else getattr(parent, name)[number]
    new = copy.deepcopy(change.node)
    if index < 0:
        setattr(parent, field, new)
    elif change.insert:
        getattr(parent, field).insert(index, new)
    elif new is None:
        del getattr(parent, field)[index]
        if not getattr(parent, field) and field == "body":
            return None
    else:
        getattr(parent, field)[index] = new
    try:
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    except (ValueError, RecursionError):
        return None


def draw(source: str, rng: random.Random, lender: str | None = None) -> tuple[Change, str] | None:
    """One change, drawn by its kind first so that kinds with many places do not crowd out the others; and the program
    after it."""
    by_kind: dict[str, list[Change]] = {}
    for change in changes(source, lender):
        by_kind.setdefault(change.kind, []).append(change)
    if not by_kind:
        return None
    change = rng.choice(by_kind[rng.choice(sorted(by_kind))])
    made = apply(source, change)
    return None if made is None or made == source else (change, made)


def _nameless(found: re.Match[str]) -> str:
    return found[0] if keyword.iskeyword(found[0]) or hasattr(builtins, found[0]) else "v"


# what there is to change


def _places(node: ast.AST, path: Path = ()) -> Iterator[tuple[Path, ast.AST, ast.AST]]:
    """Every node below, its path and its parent."""
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(-1, value)]:
            if isinstance(child, ast.AST):
                where = (*path, (field, index))
                yield where, child, node
                yield from _places(child, where)


def _names(tree: ast.Module) -> list[str]:
    """What the program stores or takes, but not the function's own name."""
    found = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return sorted(found)


def _own(tree: ast.Module) -> Iterator[Change]:
    names = _names(tree)
    texts = sorted({n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)})
    for path, node, parent in _places(tree):
        for kind, new in _variants(node, parent, path[-1][0], names, texts):
            yield Change(kind, path, node, new)
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef):
            yield from _statements(path, node)


def _text(node: ast.AST) -> str:
    # A copy: parts of a tree are shared between variants, and positions are written into them.
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))


def _variants(
    node: ast.AST, parent: ast.AST, field: str, names: Sequence[str], texts: Sequence[str]
) -> Iterator[tuple[str, ast.AST]]:
    """What could stand in the place of an expression."""
    if isinstance(node, ast.Compare):
        for group in (_COMPARE, _MEMBER):
            for op in group if isinstance(node.ops[0], group) else ():
                yield "compare", ast.Compare(node.left, [op(), *node.ops[1:]], node.comparators)
        yield "swap", ast.Compare(node.comparators[0], node.ops[:1], [node.left, *node.comparators[1:]])
    elif isinstance(node, ast.BinOp):
        for arithmetic in _ARITHMETIC:
            yield "operator", ast.BinOp(node.left, arithmetic(), node.right)
        yield "swap", ast.BinOp(node.right, node.op, node.left)
        yield from (("part", side) for side in (node.left, node.right))
    elif isinstance(node, ast.BoolOp):
        yield "boolean", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        yield from (("part", value) for value in node.values)
    elif isinstance(node, ast.UnaryOp):
        yield "part", node.operand
    elif isinstance(node, ast.Constant):
        yield from _constants(node.value, texts)
        if type(node.value) is int:
            yield from (("name", ast.Name(name, ast.Load())) for name in names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and field != "func":
        yield from (("name", ast.Name(name, ast.Load())) for name in names)
        if node.id in names:
            yield from (("constant", ast.Constant(value)) for value in (0, 1))
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield "part", node.value
        if isinstance(node.slice, ast.Slice):
            yield "slice", ast.Subscript(node.value, ast.Constant(0), ast.Load())
    elif isinstance(node, ast.Slice):
        one, low, high, step = ast.Constant(1), node.lower, node.upper, node.step
        back = ast.UnaryOp(ast.USub(), one)
        for new in ((None, high, step), (low, None, step), (low, high, None), (low, high, back), (one, high, step)):
            yield "slice", ast.Slice(*new)
        if low is None or high is None:
            yield "slice", ast.Slice(high, low, step)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        if field == "test" or (field == "value" and isinstance(parent, ast.Return)):
            yield "negate", ast.UnaryOp(ast.Not(), node)
        if field in ("args", "slice", "value", "elts", "right") and not isinstance(node, (ast.Constant, ast.Slice)):
            for sign in (ast.Add(), ast.Sub()):
                yield "step", ast.BinOp(node, sign, ast.Constant(1))
        if field in ("args", "iter", "value") and isinstance(node, (ast.Name, ast.Call, ast.Subscript)):
            yield from (("wrap", ast.Call(ast.Name(f, ast.Load()), [node], [])) for f in _WRAPS)


def _constants(value: Any, texts: Sequence[str]) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int):
        for number in (value + 1, value - 1, 0, 1, 2):
            positive = ast.Constant(abs(number))
            yield "constant", positive if number >= 0 else ast.UnaryOp(ast.USub(), positive)
        yield "constant", ast.UnaryOp(ast.USub(), ast.Constant(value))
    elif isinstance(value, str):
        yield from (("constant", ast.Constant(text)) for text in (*texts, "", " "))


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.func, ast.Name):
        for group in _CALLS:
            for name in group if node.func.id in group else ():
                yield "call", ast.Call(ast.Name(name, ast.Load()), node.args, node.keywords)
    if isinstance(node.func, ast.Attribute):
        for methods in _METHODS:
            for name in methods if node.func.attr in methods else ():
                new = ast.Attribute(node.func.value, name, ast.Load())
                yield "method", ast.Call(new, node.args, node.keywords)
    for index, argument in enumerate(node.args):
        if not isinstance(argument, ast.Starred):
            yield "part", argument
        yield "argument", ast.Call(node.func, node.args[:index] + node.args[index + 1 :], node.keywords)


def _statements(path: Path, node: ast.stmt) -> Iterator[Change]:
    """A statement deleted, freed from its condition, doing its sum in place or anew."""
    yield Change("delete", path, node, None)
    if isinstance(node, ast.AugAssign):
        for arithmetic in _ARITHMETIC:
            yield Change("operator", path, node, ast.AugAssign(node.target, arithmetic(), node.value))
        yield Change("assign", path, node, ast.Assign([node.target], node.value))
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        yield Change("assign", path, node, ast.AugAssign(node.targets[0], ast.Add(), node.value))
    if isinstance(node, ast.If) and len(node.body) == 1:
        yield Change("unguard", path, node, node.body[0])


def _lent(tree: ast.Module, other: ast.Module) -> Iterator[Change]:
    """Crossover: what ``other`` has at the same place, and its statements as further ones of the same block."""
    theirs = {path: node for path, node, _ in _places(other) if isinstance(node, (ast.stmt, ast.expr))}
    for path, node, _ in _places(tree):
        new = theirs.get(path)
        if isinstance(node, ast.FunctionDef) or not isinstance(node, (ast.stmt, ast.expr)):
            continue
        stored = isinstance(getattr(node, "ctx", ast.Load()), ast.Store)
        if new is not None and not stored and isinstance(node, ast.stmt) == isinstance(new, ast.stmt):
            yield Change("transfer", path, node, new)
        if isinstance(node, ast.stmt):
            for where, lent in theirs.items():
                if isinstance(lent, ast.stmt) and (where[:-1], where[-1][0]) == (path[:-1], path[-1][0]):
                    yield Change("transfer", path, node, lent, insert=True)
