"""The plugin without verl, and in a verl whose plugin points differ. Needs no verl."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

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
