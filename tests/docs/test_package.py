"""PyPI's ``mantissa`` is somebody else's package: nothing of ours may advise anybody to install it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mantissa
from mantissa.base.errors import pip_install
from mantissa.base.readers.yaml import said_of, shipped_recipes

ROOT = Path(__file__).parents[2]
# "pip install mantissa", with options and quotes, or an extra of it: 'mantissa[ray]', mantissa\\[ray\\] in a pattern
ANOTHER = re.compile(
    r"pip3? install[^\n]*[ '\"`]mantissa(?![-\w./])|\bmantissa\\?\[(?:[a-z-]+(?:,[a-z-]+)*)\\?\]['\"`]"
)


def test_no_text_advises_another_package() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    texts = [
        ROOT / name for name in listed.splitlines() if name.endswith((".py", ".md", ".toml", ".yaml", ".yml", ".sh"))
    ]
    assert len(texts) > 400
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in texts
        if path != Path(__file__) and (found := ANOTHER.findall(path.read_text()))
    }
    assert not wrong


def test_the_hint_names_this_package_and_an_extra_that_it_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pip_install("ray") == f"pip install '{project['name']}[ray]'"
    hints = set()
    for path in (ROOT / "src").rglob("*.py"):
        hints |= set(re.findall(r"pip_install\([\"'](\w+)", path.read_text()))
        hints |= set(re.findall(r"mantissa-rl\[([\w-]+)\]", path.read_text()))
    assert {"ray", "gguf", "lowbit"} <= hints <= set(project["optional-dependencies"])


def test_each_recipe_that_comes_along_has_a_line_and_can_be_read() -> None:
    from mantissa.rl import load_recipe

    known = shipped_recipes()
    assert next(iter(known)) == "demo"
    assert len(known) > 20
    for name, path in known.items():
        assert 8 < len(said_of(path)) < 110, name
        assert load_recipe(name).name


def test_the_version_is_said_alike_everywhere() -> None:
    assert f"version: {mantissa.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {mantissa.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel of this checkout installs, without its dependencies, which are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    source, pip = folder / "source", [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("mantissa_rl-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_works_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}

    def run(*argv: str) -> str:
        command = [sys.executable, "-m", "mantissa", *argv]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import mantissa, pathlib; print(pathlib.Path(mantissa.__file__).parent)"
    said = subprocess.run([sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert Path(said.stdout.strip()) == installed / "mantissa"
    listed = run("recipes")
    assert all(name in listed for name in shipped_recipes())
    assert run("recipes", "demo") == (ROOT / "recipes" / "demo.yaml").read_text()
    short = ("steps=2", "warm_start.steps=4", "task.min_digits=2", "task.max_digits=3", "task.train_size=64",
             "task.warm_start_size=64", "rollout.prompts=4", "evaluation=null", "run_dir=run")  # fmt: skip
    assert "report: run/report.html" in run("train", "demo", *short)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    plan = run("launch", "cluster/qwen3-8b-fp16-fsdp2", "--dry-run")
    assert "actor_rollout_ref" in plan, "with the launch file beside the recipe"
    assert "healthy" in run("metrics")
    page = run("doctor", "run", "--out", "examined")
    assert "page: " in page
    assert run("check-verl", "--help")
