"""Files that are small and ask for much: what reading them makes is bounded, and said in one line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mantissa.base.errors import MantissaError
from mantissa.launch import check_verl
from mantissa.launch.settings import read_settings


def _doubling(first: str, each: str) -> str:
    lines = [f"a{i + 1} = {each.format(i)}" for i in range(40)]
    return "\n".join([f"a0 = {first}", *lines, "GRPOConfig(bf16=True, model_init_kwargs=a40, top_p=a3)"])


@pytest.mark.parametrize(
    ("first", "each"),
    [("[1]", "[a{0}, a{0}]"), ("{'x': 1}", "{{'l': a{0}, 'r': a{0}}}"), ("{'x': f()}", "dict(l=a{0}, r=a{0})"),
     ("{'x': 1}", "[a{0}, {{'k': a{0}}}]"), ("'x'", "{{'k': [a{0}, a{0}]}}")],
)  # fmt: skip
def test_a_constant_that_grows_without_end_is_not_read(first: str, each: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_doubling(first, each))
    began = time.process_time()
    given = read_settings([str(path)])
    assert given.settings["bf16"] == "true"
    assert sum(map(len, given.settings.values())) < 1_000_000
    assert time.process_time() - began < 2


def test_a_variable_used_without_end(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("V=" + "x" * 99_000 + "\nrun a.b=1 " + "$V " * 1_000)
    for read in (check_verl, read_settings):
        with pytest.raises(MantissaError, match="more than 16,000,000 bytes in memory"):
            read([str(path)])


@pytest.mark.parametrize("kind", ["sh", "yaml"])
def test_files_that_name_files_without_end(kind: str, tmp_path: Path) -> None:
    for i in range(9):
        named = f"f{i + 1}.{kind}"
        text = (
            f"bash {named}\n" * 40 + "run --a.b=1\n"
            if kind == "sh"
            else f"defaults: [{', '.join([named] * 40)}]\na: 1\n"
        )
        (tmp_path / f"f{i}.{kind}").write_text(text)
    with pytest.raises(MantissaError, match="more than 64 files"):
        read_settings([str(tmp_path / f"f0.{kind}")])
