"""Run Accelerate's example as one of torchrun's processes: ``torchrun accelerate_worker.py``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"

if __name__ == "__main__":
    sys.argv = [str(EXAMPLE)]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then, which is not what is tested here
