"""The one guarded reader of each format that others may have written; nothing else in the package reads these formats.

| format | module | bounded |
|---|---|---|
| YAML | ``yaml`` | characters, brackets, values with every alias written out |
| TOML | ``toml`` | bytes, parts of a key, levels, values |
| JSON, a document or rows | ``json`` | bytes, levels, values, digits; text that UTF-8 cannot hold |
| pickles of tensors | ``pickles`` | apart; names, bytes, operations, values with every reference written out |
| NumPy's archives | ``npz`` | as zip's; numbers alone |
| zip | ``zips`` | bytes, entries; no compression |
| torch.save's files | ``torch_files`` | the same, and torch's own list of names |
| tables of text | ``csv`` | bytes, columns, rows, cells |
| event files of TensorBoard | ``events`` | bytes of a file and of a record, scalars |
| safetensors | ``safetensors`` | bytes of the header, tensors |
| parquet | ``parquet`` | apart; rows, values; bytes as they are unpacked, drawn |
| chat templates | ``templates`` | apart; two seconds, characters of a prompt |
| SQLite | ``sqlite`` | bytes of a value; seconds and bytes of rows, drawn; no views, triggers, virtual tables |
| tokenizers | ``tokenizers`` | bytes, added tokens, and how much longer a text may become |

Files and their bytes are drawn from the command's budget (``mantissa.base.bounds``), and so is what is said so above.
Apart: in a process of its own, with an address space, processor seconds and no way out but a pipe
(``child.py``), for there a library makes things that nobody can count meanwhile. What is at work here has
bounds of its own kind: weights are mapped, or read tensor by tensor against what the machine has left; a tokenizer is
in every step's loop, and has its growth, its tokens and seconds bounded; a database that a command works in has
SQLite's own limit of memory and a budget for each statement.
GGUF's is ``mantissa.model.gguf``: it knows the models that may be in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def readers() -> dict[str, Callable[[Path], Any]]:
    """Each reader by its format: it takes a file, or a model's folder, and gives what it holds or one MantissaError."""
    from mantissa.base.readers import (
        csv,
        events,
        json,
        npz,
        parquet,
        pickles,
        safetensors,
        sqlite,
        tokenizers,
        toml,
        torch_files,
        yaml,
        zips,
    )

    return {
        "yaml": yaml.read_yaml,
        "toml": toml.read_toml,
        "csv": lambda path: list(csv.read_csv(path)),
        "events": events.read_events,
        "npz": npz.read_npz,
        "json": json.read_json,
        "json rows": lambda path: list(json.read_rows(path)),
        "pickles": pickles.load,
        "pickles of objects": lambda path: pickles.load(path, records=True),
        "zips": zips.read_zip,
        "torch files": torch_files.read_torch,
        "safetensors": safetensors.read_tensors,
        "parquet": lambda path: list(parquet.read_rows(path)),
        "sqlite": sqlite.read_tables,
        "tokenizers": tokenizers.read_tokenizer,
    }
