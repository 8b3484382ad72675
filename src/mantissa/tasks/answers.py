r"""Answers as text: finding them in a completion and bringing them to one spelling.

A policy writes the same number in many ways: ``$1,\!657$``, ``1657.0``, ``\boxed{1657}``, ``x = 1657``.
``normalize_answer`` maps such spellings to one; two answers then agree when their texts do. It only rewrites spelling
and drops decoration (dollars, units, degrees, text commands); it computes nothing, so ``2/4`` and ``1/2`` stay apart.

The set of rewrites follows what is commonly done for MATH-style answers (Lewkowycz et al., "Solving Quantitative
Reasoning Problems with Language Models", 2022, appendix D), with two differences: a left-hand side goes only where it
is one symbol (``x=5``, not the ``a=1,`` of ``a=1,b=5``), and numbers lose leading and trailing zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_UNITS = (
    "degrees? dollars? cents? percent points? units? hours? minutes? seconds? days? weeks? months? years? feet foot ft "
    "inch(?:es)? miles? mph yards? meters? metres? centimeters? kilometers? km cm mm grams? kg liters? litres? "
    "ways? people students? square cubic sq"
).replace(" ", "|")
# Possessive (++): a row of units that leads to nothing is given up at once, not split in exponentially many other ways.
_AFTER_UNIT = r"(?:\s*\^\s*\{?[23]\}?)?\.?\s*"
_END = rf"(?![A-Za-z]){_AFTER_UNIT}"
# Bare, 2m is a product; as text, 2\text{ m} is a length.
_BARE_UNITS = rf"(?<=[0-9}}])\s*+(?:(?:{_UNITS}){_END})++"
_TEXT_COMMAND = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|boxed|fbox)\s*\{"
_TEXT_UNITS = rf"(?<=[0-9}}])\s*+{_TEXT_COMMAND}\s*+(?:(?:{_UNITS}|[mgsh]|in){_END})++\}}{_AFTER_UNIT}$"


def _at_end(row: re.Match[str]) -> str:
    """Nothing for a row of units that ends the text. A ``$`` would try a row that does not again from its middle."""
    return "" if row.end() == len(row.string) else row[0]


# Applied in this order. Each takes one decoration away or one spelling to another.
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle)(?![A-Za-z])", ""),
        (r"\\[!,;:> ]|~|\\q?quad(?![A-Za-z])", " "),  # spacing commands
        (r"\\[()\[\]]|\\?\$", ""),  # math delimiters and dollars
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (_TEXT_UNITS, ""),
        (_TEXT_COMMAND + r"([^{}]*)\}", r"\1"),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|°", ""),
        (r"\\?%", ""),
        (_BARE_UNITS, _at_end),  # 32 square cm^2
        (r"^\s*[A-Za-z](?:_[A-Za-z0-9]|_\{[A-Za-z0-9]+\}|\([A-Za-z]\))?\s*=(?=[^=]*$)", ""),  # x=, x_1=, f(x)=
        (r"\s+", ""),
        (r"(?:(?<=[^.])|(?<=^\.))\.++$", ""),  # the full stop of the sentence; from the first of a row of dots alone
        (r"\\frac([0-9A-Za-z])([0-9A-Za-z])", r"\\frac{\1}{\2}"),  # \frac12
        (r"\\frac\{([^{}]*)\}([0-9A-Za-z])", r"\\frac{\1}{\2}"),  # \frac{40}7
        (r"\\frac([0-9A-Za-z])\{", r"\\frac{\1}{"),  # \frac4{7}
        (r"\\frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2"),
        (r"\\sqrt([0-9A-Za-z])", r"\\sqrt{\1}"),
    )
)


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}`` in ``text``, its braces balanced; None where there is none.

    One pass over the braces, so that a completion of thousands of unclosed boxes costs no more than its length.
    """
    content: str | None = None
    stack: list[int | None] = []  # for each open brace: where the box's content starts, None for a plain brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.startswith("\\boxed"):
            stack.append(match.end())
        elif token == "{":
            stack.append(None)
        elif token == "}" and stack:
            start = stack.pop()
            if start is not None:
                content = text[start : match.start()]
    return content


def plain_number(text: str) -> str | None:
    """A plain decimal number in one spelling (``025`` and ``25.0`` give ``25``); None where ``text`` is not one."""
    text = text.strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    match = _NUMBER.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return None
    whole, fraction = match[2].lstrip("0") or "0", (match[3] or "").rstrip("0")
    digits = f"{whole}.{fraction}" if fraction else whole
    return f"-{digits}" if match[1] == "-" and digits != "0" else digits


def normalize_answer(text: str) -> str:
    """One spelling for an answer: decoration, units and white space gone, fractions and numbers written one way."""
    text = text.strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    number = plain_number(text)
    return text if number is None else number
