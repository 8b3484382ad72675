"""Which files of the package a program enters: run by ``tests/docs/test_core.py`` in a process of its own.

    python entered.py OUT (example.py | a command of mantissa) [arguments]

Writes a JSON list of paths in the package. A file is entered when a function of it is called; what only defines
something as it is imported does not count. The looking ends at the first step of an optimiser.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

import mantissa

PACKAGE = str(Path(mantissa.__file__).parent) + "/"
entered: set[str] = set()


def imports(frame: FrameType | None) -> bool:
    """Whether some module of the package is being imported below this frame."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(PACKAGE) and "__main__" not in code.co_filename:
            return True
        frame = frame.f_back
    return False


def look(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if event == "call" and code.co_flags & CO_OPTIMIZED and code.co_filename.startswith(PACKAGE):
        name = code.co_filename.removeprefix(PACKAGE)
        if name not in entered and not imports(frame):
            entered.add(name)


class Enough(BaseException):
    """The first update is about to be made."""


def stop(*_: Any) -> None:
    """At a step of an optimiser, but those by which the audit tries one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("/training/audit.py"):
            return
        frame = frame.f_back
    raise Enough


register_optimizer_step_pre_hook(stop)
out, *sys.argv = sys.argv[1:]
threading.setprofile(look)
sys.setprofile(look)
try:
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.argv.insert(0, "mantissa")
        runpy.run_module("mantissa", run_name="__main__")
except Enough:
    pass
finally:
    sys.setprofile(None)
Path(out).write_text(json.dumps(sorted(entered)))
