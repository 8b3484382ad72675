"""What every section of a configuration is: frozen, unknown keys fatal, and its numbers numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any, ClassVar, LiteralString, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from mantissa.base.bounds import LARGEST_SIZE, representable
from mantissa.base.errors import MantissaError, nearest

Refusals = Iterator[tuple[Any, str]]  # whether something is refused, and what to say then
PLAIN: LiteralString = "plain_value"  # the kind of its errors, whose message begins with the field


class Config(BaseModel):
    """Base of every section.

    A number is finite, unless its field says otherwise (``allow_inf_nan=True``), and one that fp32 holds; what is
    counted is below 2^31, unless its field has a bound of its own. ``true`` and ``"3"`` are no numbers. No text has a
    NUL in it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        for name in cls.model_fields.keys() & values.keys() if isinstance(values, dict) else ():
            field, value = cls.model_fields[name], values[name]
            for each in value if isinstance(value, (list, tuple)) else (value,):
                expected = _unlike(each, _kinds(field.annotation), field)
                if expected:
                    raise PydanticCustomError(PLAIN, "{field}: {text}", {"field": name, "text": expected})
        return values


class Section(Config):
    """A section that is also made by hand, where its first mistake is a ``MantissaError`` that ``called`` begins.

    Inside of another section its mistakes are that one's, with its path.
    """

    called: ClassVar[str]

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            name, text, first = first_mistake(error, type(self).model_fields)
            said = f"{name}={first['input']!r}: {text}" if name else text
            if first["type"] == "extra_forbidden":
                said = f"unknown setting {name!r}{nearest(name, type(self).model_fields)}"
            raise MantissaError(f"{self.called}: {said}") from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # else an outer section would call it


def first_mistake(error: ValidationError, known: Iterable[str]) -> tuple[str, str, Any]:
    """Key, text and pydantic's own record of one mistake: an unknown key if there is one, for the others often follow
    from it. ``known``: the keys that it may have been meant for."""
    mistakes = error.errors(include_url=False)
    first = next((each for each in mistakes if each["type"] == "extra_forbidden"), mistakes[0])
    text = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if first["type"] == "extra_forbidden":
        text = f"unknown key{nearest(str(first['loc'][-1]), known)}"
    if first["type"] == "missing":
        text = "expected this key, which is not there; add it"
    return ".".join(map(str, first["loc"])), text, first


def _kinds(annotation: Any) -> set[type]:
    """The plain types that are somewhere in an annotation."""
    inner = [] if isinstance(annotation, type) else [_kinds(each) for each in get_args(annotation)]
    return {annotation} if isinstance(annotation, type) else set().union(*inner)


def _unlike(value: Any, kinds: set[type], field: FieldInfo) -> str | None:
    """What was expected in a field of these types and ``value`` is not; None where it may be."""
    if isinstance(value, str) and "\0" in value:
        return "expected text without a NUL, which is part of no name and no prompt"
    text = isinstance(value, str) and kinds <= {int, float, NoneType}
    if not kinds & {int, float} or not (text or isinstance(value, (int, float))):
        return None
    if text or (isinstance(value, bool) and bool not in kinds):
        return f"expected a number{', without quotes' if text else ''}, got {value!r}"
    if isinstance(value, (bool, str)) or value != value or abs(value) == math.inf:
        return None  # what is not finite is the field's own affair
    if float in kinds:
        return None if representable(value) else f"expected a number that fp32 holds, 1.2e-38 to 3.4e38, got {value!r}"
    bounded = any(hasattr(each, "le") or hasattr(each, "lt") for each in field.metadata)
    return None if bounded or abs(value) <= LARGEST_SIZE else f"expected at most {LARGEST_SIZE:,}, got {value!r}"
