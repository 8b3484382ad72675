"""The plugin without verl, and in a verl whose plugin points differ. Needs no verl."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mantissa.base.errors import MantissaError
from mantissa.verl.version import check_version


def test_the_package_alone_imports_neither_verl_nor_torch() -> None:
    program = "import sys, mantissa.verl; print(sorted({'verl', 'torch', 'ray', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("version", ["0.9.0", "0.9.1", "0.9.1.post1"])
def test_versions_with_the_plugin_points_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert check_version() == version


@pytest.mark.parametrize("version", ["0.8.0", "0.10.0", "1.0.0"])
def test_another_version_is_one_error_that_says_which(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(
        MantissaError, match=rf"verl {version} is installed: expected 0\.9\.x.*install \"verl==0\.9\.1\""
    ):
        check_version()


def test_no_verl_is_an_error_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(MantissaError, match=r"pip install mantissa-rl\[verl\]"):
        check_version()


@pytest.mark.parametrize(("module", "shown"), [("plugin", "MantissaError: mantissa.verl: "), ("platform", "")])
def test_a_verl_whose_plugin_points_moved_is_one_error_that_is_seen(tmp_path: Path, module: str, shown: str) -> None:
    """A made-up 0.9.7 without platforms and engines: as external library, and as verl loads its plugins, which swallows
    what they raise."""
    (tmp_path / "verl").mkdir()
    load = "try:\n    import mantissa.verl.platform\nexcept Exception:\n    pass\n" if module == "platform" else ""
    (tmp_path / "verl" / "__init__.py").write_text(load)
    (tmp_path / "verl-0.9.7.dist-info").mkdir()
    (tmp_path / "verl-0.9.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.9.7\n")
    program = "import verl" if module == "platform" else "import mantissa.verl.plugin"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stderr.splitlines()[-1]
    assert "verl 0.9.7 is not as the plugin knows it (No module named 'verl." in said
    assert said.endswith('it is tested with 0.9.0 and 0.9.1: install "verl==0.9.1", or another version of mantissa-rl')
    assert shown in said
