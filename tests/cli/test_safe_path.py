"""No process imports what happens to lie in the current folder: neither ours nor those that it starts."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHERS = "mantissa numpy torch rich typer yaml pydantic safetensors sympy math_verify plotly own_reward_helper"
CODE = {
    "kind": "code",
    "variables": 1,
    "train_size": 40,
    "heldout_size": 4,
    "warm_start_size": 4,
    "reward": [{"verifier": "task"}, {"function": "own_reward:score"}],
}


@pytest.fixture
def trapped(recipe: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder with a module of every name that could be imported by mistake; each leaves its name in ``sprung``."""
    for name in {*sys.stdlib_module_names, *OTHERS.split()} - {"own_reward_helper"}:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'a').write('{name} ')\n")
    (tmp_path / "own_reward.py").write_text(
        "import own_reward_helper, wave\ndef score(problem, completion): return own_reward_helper.VALUE\n"
    )
    (tmp_path / "own_reward_helper.py").write_text("VALUE = 0.5\n")
    recipe(steps=1, precision="fp32", task=CODE, warm_start=None, evaluation={})
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    ["train recipe.yaml run_dir=run",
     pytest.param("train recipe.yaml nproc=2 run_dir=run", marks=pytest.mark.variants),
     pytest.param("bench --device cpu --sizes 2k --precision fp32 --scenarios warmup --repeats 1",
                  marks=pytest.mark.variants)],
)  # fmt: skip
def test_a_folder_full_of_traps(trapped: Path, arguments: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    as_installed = "import sys; del sys.path[0]; from mantissa.cli import main; main()"
    command = [sys.executable, "-c", as_installed, *arguments.split()]
    done = subprocess.run(command, cwd=trapped, env=environment, capture_output=True, text=True, check=False)
    sprung = trapped / "sprung"
    assert not sprung.exists(), sprung.read_text()
    assert done.returncode == 0, done.stderr


def test_every_command_of_ours_says_so() -> None:
    """``-P`` or ``-I`` comes first, but for a script that is named by its path: its folder is then its own."""
    found = 0
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                found += 1
                following = ast.unparse(node.elts[1])
                assert following in ("'-P'", "'-I'") or following.startswith("str(HERE /"), f"{path}: {following}"
    assert found >= 6
