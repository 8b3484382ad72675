"""PyPI's ``mantissa`` is somebody else's package: nothing of ours may advise anybody to install it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from mantissa.base.errors import pip_install

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
