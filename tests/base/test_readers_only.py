"""Each file format has one reader, in ``mantissa.base.readers``; nothing else in the package parses it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "mantissa"
# The last two names of a call, or the last alone where the one before may be any.
PARSING = {
    "json": {"json.load", "json.loads", "json.JSONDecoder", "JSONDecoder"},
    "yaml": {"yaml.load", "yaml.load_all", "yaml.safe_load", "yaml.safe_load_all", "yaml.full_load", "yaml.unsafe_load",
             "yaml.compose", "yaml.parse"},
    "toml": {"tomllib.load", "tomllib.loads"},
    "pickle": {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "numpy.load", "np.load"},
    "csv": {"csv.reader", "csv.DictReader", "DictReader"},
    "npz": {"format.read_array", "np.fromfile", "numpy.fromfile"},
    "zip": {"zipfile.ZipFile", "ZipFile", "zipfile.is_zipfile", "tarfile.open"},
    "sqlite": {"sqlite3.connect"},
    "safetensors": {"safe_open", "load_file", "safetensors.safe_open", "torch.load_file"},
    "parquet": {"ParquetFile", "parquet.ParquetFile", "parquet.read_table", "pq.read_table", "parquet.ParquetDataset"},
    "tokenizer": {"Tokenizer.from_file", "Tokenizer.from_str", "Tokenizer.from_buffer", "Tokenizer.from_pretrained",
                  "AutoTokenizer.from_pretrained", "PreTrainedTokenizerFast.from_pretrained", "loader.from_pretrained",
                  "Backend.from_file", "Backend.from_str", "Backend.from_buffer"},
}  # fmt: skip
# File, call, and why it is sound.
EXCEPTIONS = {
    ("base/jail.py", "json.loads"): "runs alone in the jail, without a package; what it reads is the parent's",
    ("tasks/sandbox/pool.py", "pickle.loads"): "between our own processes; a policy's programs hold no end of the pipe",
}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a chain of names; what is before it left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def parsed(tree: ast.Module) -> Iterator[str]:
    """Every mention of a function that parses a format, by whichever name it was imported."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {alias.asname or alias.name: before + alias.name for alias in node.names}
    known = set().union(*PARSING.values())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        first, _, rest = dotted(node).partition(".")
        full = ".".join(filter(None, (names.get(first, first), rest)))
        if full.startswith("mantissa."):
            continue  # a reader of ours
        yield from {".".join(full.split(".")[-2:]), full.split(".")[-1]} & known


def found() -> set[tuple[str, str]]:
    files = [path for path in SOURCE.rglob("*.py") if path.parent.name != "readers"]
    assert len(files) > 150
    return {
        (str(path.relative_to(SOURCE)), call) for path in files for call in parsed(ast.parse(path.read_text("utf-8")))
    }


def test_nothing_else_parses_and_each_exception_is_still_there() -> None:
    assert found() == set(EXCEPTIONS)


@pytest.mark.parametrize(
    "line",
    [
        "import json\njson.loads(x)", "from json import loads\nloads(x)", "from json import loads as l\nl(x)",
        "import json as j\nj.load(f)", "import sqlite3\nsqlite3.connect(p)", "import torch\ntorch.load(p)",
        "from safetensors.torch import load_file\nload_file(p)", "from safetensors import safe_open as s\ns(p)",
        "import pyarrow.parquet\npyarrow.parquet.read_table(p)", "import pyarrow.parquet as pq\npq.ParquetFile(p)",
        "from zipfile import ZipFile\nZipFile(p)", "class R(pickle.Unpickler): ...", "import yaml\nyaml.safe_load(t)",
        "from tokenizers import Tokenizer as B\nB.from_file(p)", "parse = json.loads",
    ],
)  # fmt: skip
def test_a_call_is_found_by_whichever_name(line: str) -> None:
    assert set(parsed(ast.parse(line)))


def test_each_format_is_parsed_in_its_reader() -> None:
    """The names above are those that are used: a format that no reader parses would be looked for by wrong names."""
    calls = {
        call
        for path in (SOURCE / "base" / "readers").glob("*.py")
        for call in parsed(ast.parse(path.read_text("utf-8")))
    }
    assert {kind for kind, names in PARSING.items() if names & calls} == PARSING.keys()
