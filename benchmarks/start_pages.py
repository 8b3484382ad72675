"""How long the commands of the pages docs/start/*.md take, each page's run whole in an empty folder.

    python benchmarks/start_pages.py laptop own-loop format

Nothing is expected of the times but minutes at most. Rows have the load of the machine beside them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import ROOT, append

START = ROOT / "docs" / "start"


def commands(page: Path) -> str:
    """The page's shell blocks, in order."""
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S))


def run(script: str, folder: Path, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in a new folder in ``folder``, where ``mantissa`` and ``python`` are this checkout's."""
    bin_, there = folder / "bin", folder / "there"
    bin_.mkdir()
    there.mkdir()
    for name, what in (("mantissa", "-m mantissa"), ("python", "")):
        (bin_ / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {what} "$@"\n')
        (bin_ / name).chmod(0o755)
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-euc", script], cwd=there, env=environment, capture_output=True, text=True, timeout=timeout
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", choices=sorted(path.stem for path in START.glob("*.md")))
    for name in parser.parse_args().pages:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            done = run(commands(START / f"{name}.md"), Path(folder))
            seconds = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr}")
        load = os.getloadavg()[0]
        row = {"benchmark": "start_page", "page": name, "seconds": seconds, "load_average": load}
        print(append("start_pages.jsonl", [row], "cpu"), name, f"{seconds:.0f} s, load {load:.1f}")


if __name__ == "__main__":
    main()
