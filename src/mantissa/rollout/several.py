"""Several processes of one run and their vLLMs: one of each process's own, or one server for them all.

What an engine has to know of the other processes is little: which of them is the first, and what the others came to.
A vLLM is started and loaded by all of them at once, or by the first for all; where one of them fails, all stop there,
with the words of the one that failed. Otherwise the rest would sample from weights that one of them does not have, or
wait for it.

Whoever starts the processes says what they are (``rl``'s ``Team`` fits ``Processes``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from mantissa.errors import MantissaError

T = TypeVar("T")


class Processes(Protocol):
    """The processes of a run, as one of them sees them. Its methods are collective: all call them, in one order."""

    @property
    def first(self) -> bool:
        """Whether this is the one that acts for all."""
        ...

    def decided(self, value: T) -> T:
        """The first's ``value``, in every process."""
        ...

    def said(self, text: str | None) -> str | None:
        """The first text that any of them has; None where none has one."""
        ...


class _OneProcess:
    first = True

    def decided(self, value: T) -> T:
        return value

    def said(self, text: str | None) -> str | None:
        return text


ONE_PROCESS: Processes = _OneProcess()  # a run of one


def agreed(processes: Processes, work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """What ``work`` gives here, once it has succeeded in every process.

    Where it raised ``MantissaError`` in one, it raises that one's message in all; what it gave here goes to ``undo``
    first. Other exceptions are faults: they end their process, and the others lose it.
    """
    problem: MantissaError | None = None
    result: list[T] = []
    try:
        result.append(work())
    except MantissaError as error:
        problem = error
    said = processes.said(None if problem is None else str(problem))
    if said is None:
        return result[0]
    for made in result:
        if undo is not None:
            undo(made)
    if problem is not None and str(problem) == said:
        raise problem
    raise MantissaError(said) from problem
