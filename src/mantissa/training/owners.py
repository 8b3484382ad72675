"""Whose a parameter is: the optimiser's, by its name in the model; and those that only one of the two has.

Both may change while a training goes on (layers that are unfrozen and added as a group, an embedding that is replaced),
so this is asked again at each step, as torch's ``GradScaler`` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from mantissa.base.ranks import named_parameters


def held(optimizer: Any) -> list[nn.Parameter]:
    """The parameters in an optimiser's groups, as they are now."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named(
    optimizer: Any, before: Iterable[nn.Parameter], *names: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, nn.Parameter]:
    """The optimiser's parameters by name: those of ``before`` in its order, and then the others by their groups.

    A parameter has its name in the first of ``names`` that knows it and gives no other one that name, else its place in
    the groups.
    """
    owned = {id(parameter): parameter for parameter in held(optimizer)}
    known = {id(parameter): parameter for parameter in before if id(parameter) in owned}
    called: dict[int, str] = {}
    for source in names:
        taken = set(called.values())
        for name, parameter in source:
            if id(parameter) in owned and id(parameter) not in called and name not in taken:
                called[id(parameter)] = name
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            called.setdefault(id(parameter), f"optimizer.param_groups[{g}][{i}]")
    return {called[key]: parameter for key, parameter in (known | owned).items()}


def strays(model: nn.Module, optimizer: Any, others: Iterable[nn.Parameter] = ()) -> tuple[list[str], list[str]]:
    """Names of the model's parameters that train and are in no group, and of the optimiser's that are neither the
    model's nor ``others``."""
    owned, inside = {id(p) for p in held(optimizer)}, named_parameters(model)
    idle = [name for name, p in inside.items() if p.requires_grad and id(p) not in owned]
    known = {id(p) for p in (*inside.values(), *others)}
    foreign = [name for name, p in named(optimizer, (), inside.items()).items() if id(p) not in known]
    return idle, foreign


def listed(names: list[str]) -> str:
    """A few of many names."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
