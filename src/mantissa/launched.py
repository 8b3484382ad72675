"""What a process that ``mantissa train`` started as a rank learns of its launcher, by the environment.

Imported before everything else, so it imports almost nothing.
"""

from __future__ import annotations

import os
import sys

LAUNCHER = "MANTISSA_LAUNCHER"  # its process id
STORE = "MANTISSA_STORE"  # the file through which the ranks find each other


def end_with_launcher() -> None:
    """On Linux: a rank whose launcher is killed is killed too, or it would go on writing a run that nobody watches.

    The launcher may have gone before this was asked for: then this process has another parent, and ends here.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(launcher):
        os._exit(1)
