"""The model that a Python script hands to its trainer, read by ``ast``: the format it is loaded in, and adapters.

A trainer takes a model's name, or a model that the script has loaded itself, by ``from_pretrained``. Of that one the
trainer's own configuration says nothing. Nothing is run: a model that comes about in a way that is not known here has a
format that is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

_TRAINERS = ("GRPOTrainer", "RLOOTrainer")
_ADAPTERS = "get_peft_model"
UNREAD = "$dtype"  # a value that no constant gives
_DEEPEST = 8  # names that stand for names
Constant = Callable[[ast.expr], str | None]


def model_settings(tree: ast.Module, constant: Constant) -> dict[str, str]:
    """``trainer.model`` (object), ``from_pretrained.dtype`` and ``use_peft`` of the trainer that a script makes; none
    where it makes none, or names the model. ``constant``: an expression's value as text, or None."""
    found: dict[str, str] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in _TRAINERS):
        given = {each.arg: each.value for each in call.keywords}
        model = given.get("model", call.args[0] if call.args else None)
        made = list(_made_by(model, list(_assigned(tree)), _DEEPEST)) if model is not None else []
        adapters = given.get("peft_config")
        if any(_name(each.func) == _ADAPTERS for each in made) or (adapters is not None and not _is_none(adapters)):
            found["use_peft"] = "true"
        loaded = next((each for each in made if _name(each.func) == "from_pretrained"), None)
        if loaded is not None:
            found |= {"trainer.model": "object", "from_pretrained.dtype": _format(loaded, constant)}
        elif made:
            found |= {"trainer.model": "object", "from_pretrained.dtype": UNREAD}
    return found


def _made_by(value: ast.expr, assigned: list[tuple[str, ast.expr]], left: int) -> Iterator[ast.Call]:
    """The calls that a model comes from, the last first; none for a text or for what is not assigned in the script."""
    if isinstance(value, ast.Name) and left:
        last = max((place for place, (name, _) in enumerate(assigned) if name == value.id), default=None)
        if last is not None:
            yield from _made_by(assigned[last][1], assigned[:last], left - 1)
    elif isinstance(value, ast.Call) and left:
        name = _name(value.func)
        if name == _ADAPTERS:
            yield value
            yield from _made_by(value.args[0], assigned, left - 1) if value.args else ()
        elif name == "from_pretrained" or _makes_a_model(value.func):
            yield value


def _makes_a_model(function: ast.expr) -> bool:
    """Whether a call's name says that it gives a model, and not the name of one: ``load_model(...)``, ``x.half()``."""
    name = _name(function)
    return name in ("to", "half", "bfloat16", "float") or ("model" in name.lower() and "name" not in name.lower())


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Each name that is assigned, in the script's order; ``model, tokenizer = ...`` gives the first."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1]
    for node in sorted(nodes, key=lambda each: each.lineno):
        target = node.targets[0]
        first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
        if isinstance(first, ast.Name):
            yield first.id, node.value


def _format(loaded: ast.Call, constant: Constant) -> str:
    given = {each.arg: each.value for each in loaded.keywords}
    dtype = given.get("dtype", given.get("torch_dtype"))
    if dtype is None:
        return UNREAD if None in given else "auto"  # of **more nothing is known
    return constant(dtype) or UNREAD


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
