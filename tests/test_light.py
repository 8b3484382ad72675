"""What reads numbers, logs and scripts runs with the package's own dependencies alone: no torch, no pyarrow, no plots.

What is not installed is made so: an import of anything that those dependencies do not bring fails, in a process of its
own. The last test does the same with a real environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "pyarrow",
    "matplotlib",
    "tensorboard",
    "math_verify",
    "httpx2",
}
BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from mantissa.cli import main
sys.argv = ["mantissa", *{arguments!r}]
main()
"""


def named(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def closure(names: list[str]) -> set[str]:
    """The distributions that these bring, with what they need themselves."""
    found: set[str] = set()
    waiting = [named(each) for each in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system or an older Python
        found.add(name)
        waiting += [named(each) for each in needs if "extra ==" not in each]
    return found


def absent() -> set[str]:
    """Modules that an environment of the plain dependencies would not have."""
    light = closure(PROJECT["dependencies"]) | {"mantissa-rl", "pip", "setuptools"}
    modules = importlib.metadata.packages_distributions()
    return {module for module, owners in modules.items() if not {named(each) for each in owners} & light}


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = BLOCKED.format(absent=absent(), arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True)


def test_what_counts_as_absent_is_what_trains() -> None:
    assert absent() >= HEAVY
    assert not absent() & {"numpy", "scipy", "pydantic", "yaml", "typer", "rich", "jinja2"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.sh").write_text("python -m verl.trainer.main_ppo actor_rollout_ref.model.path=x\n")
    lines = [
        {"tokens": [5, 6, 7, 8], "prompt_length": 1, "rollout_logp": [-1.0, -0.5, -2.0 - i / 7],
         "learner_logp": [-1.0, -0.5, -2.0 - i / 7]}
        for i in range(8)
    ]  # fmt: skip
    (tmp_path / "dump.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("a", "b"):
        run_folder = tmp_path / name
        run_folder.mkdir()
        (run_folder / "config.yaml").write_text("name: drop-in\n")
        rows = [{"step": step, "train/loss": 1.0 / step, "optim/grad_norm": 0.5} for step in (1, 2, 3)]
        (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(
    "command",
    ["--help", "--version", "metrics", "recipes", "doctor dump.jsonl", "doctor a/metrics.jsonl", "check job.sh"],
)
def test_a_light_command_needs_no_more(command: str, folder: Path) -> None:
    done = run(*command.split(), cwd=folder)
    assert done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    assert "not installed" not in done.stderr


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("train demo", "train"),
        ("precision bf16", "train"),
        ("gap .", "train"),
        ("sample . hello", "train"),
        ("lab job.sh", "train"),
    ],
)
def test_a_command_that_lacks_an_extra_names_it(command: str, extra: str, folder: Path) -> None:
    done = run(*command.split(), cwd=folder)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"pip install 'mantissa-rl[{extra}]'" in done.stderr


def test_comparing_runs_says_its_numbers_and_which_extra_draws_the_page(folder: Path) -> None:
    done = run("compare", "a", "b", cwd=folder)
    assert "overflow/retry/skip" in done.stdout, done.stderr
    assert "pip install 'mantissa-rl[draw]'" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_needs_torch_says_so(folder: Path) -> None:
    program = BLOCKED.format(absent=absent(), arguments=["--version"]).replace("main()\n", "")
    program += "import mantissa\ntry:\n    mantissa.PrecisionTrainer\nexcept ImportError as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert (
        "mantissa.PrecisionTrainer: this needs torch, which is not installed: pip install 'mantissa-rl[train]'"
        in done.stdout
    )


@pytest.mark.slow
def test_an_environment_of_the_plain_dependencies(folder: Path) -> None:
    """What pip installs without extras: minutes of downloads are not, a few seconds to half a minute."""
    base, pip = folder / "environment", ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", str(base)], check=True)
    python = str(base / "bin" / "python")
    subprocess.run([python, *pip, "--constraint", str(ROOT / "constraints.txt"), str(ROOT)], check=True)
    listed = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    assert not {named(each) for each in listed.splitlines()} & {each.replace("_", "-") for each in HEAVY}

    def mantissa(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(base / "bin" / "mantissa"), *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    assert mantissa("doctor", "dump.jsonl").returncode == 0
    assert "verl" in mantissa("check", "job.sh").stdout
    (folder / "dump.parquet").write_bytes(b"PAR1" * 8)  # its reader is a process of its own
    assert "mantissa-rl[parquet]" in mantissa("doctor", "dump.parquet").stderr
    assert "gap/k3_kl" in mantissa("metrics").stdout
    assert "mantissa-rl[draw]" in mantissa("compare", "a", "b").stderr
    assert "mantissa-rl[train]" in mantissa("train", "demo").stderr
