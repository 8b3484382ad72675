"""One flipped bit in any file of a run or of a model's folder: refused, said or harmless; never another end in silence.

A run is gone on with from a checkpoint in its middle. What it then leaves is compared, to the last bit, with what the
undisturbed one leaves; a folder's model, with its weights, its settings and what its tokenizer makes of texts.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from mantissa.base.readers.yaml import read_yaml
from mantissa.model import load_model, load_tokenizer
from mantissa.rl import session
from small_run import QUICK, REPORT, configure, contents, no_report, stopped

TEXTS = ("1+2=", "0123456789", "+=")


class SilentError(AssertionError):
    """A flipped bit that changed what came of it, and nobody said so."""


@cache
def _run() -> tuple[Path, dict[str, Any]]:
    """A run that was stopped after the first of two steps, and what there is of it once it has gone on."""
    folder = Path(tempfile.mkdtemp(prefix="flips-"))
    with mock.patch(REPORT, no_report), contextlib.redirect_stdout(io.StringIO()):
        session.start(configure(*QUICK, "checkpoint.every=1", f"run_dir={folder / 'whole'}"))
    run = stopped(folder / "whole", 1, folder / "stopped")
    shutil.copytree(run, folder / "again")
    _gone_on(folder / "again")
    return run, left(folder / "again")


def left(run: Path) -> dict[str, Any]:
    """What a run has left; of its recipe what it says, for ``Null`` is ``null``."""
    return contents(run) | {"config.yaml": read_yaml(run / "config.yaml")}


def _gone_on(run: Path) -> str:
    """What a resume prints and warns of."""
    said = io.StringIO()
    with (
        mock.patch(REPORT, no_report), warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(said), contextlib.redirect_stderr(said),
    ):  # fmt: skip
        warnings.simplefilter("always")
        session.resume(run)
    return said.getvalue() + "".join(str(each.message) for each in warned)


def _flip(random: Random, folder: Path) -> None:
    """One bit of one file; each file is as likely as any, and of a file each bit."""
    file = random.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    (folder.parent / f"{folder.name}.flipped").write_text(str(file.relative_to(folder)))


def run_with_a_flipped_bit(random: Random, path: Path) -> None:
    shutil.copytree(_run()[0], path)
    _flip(random, path)


def go_on(path: Path) -> None:
    """Resume; ``SilentError`` where it ends otherwise and has said nothing."""
    where = path.with_name(f"{path.name}.flipped").read_text()
    said = _gone_on(path)
    found, expected = left(path), _run()[1]
    odd = [name for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name)]
    if odd and Path(where).name not in said:
        raise SilentError(f"{where}: {', '.join(odd)} differ; said: {said[-200:]!r}")


def model_with_a_flipped_bit(random: Random, path: Path) -> None:
    shutil.copytree(_run()[0].with_name("whole") / "policy", path)
    _flip(random, path)


def _model(path: Path) -> tuple[Any, ...]:
    model, tokenizer = load_model(path), load_tokenizer(path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, model.config, [tokenizer.encode(text) for text in TEXTS], tokenizer.eos_ids, tokenizer.pad_id


@cache
def _expected() -> tuple[Any, ...]:
    return _model(_run()[0].with_name("whole") / "policy")


def load(path: Path) -> None:
    """Load the model and its tokenizer; ``SilentError`` where they are others."""
    where = path.with_name(f"{path.name}.flipped").read_text()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        (weights, *rest), (known, *others) = _model(path), _expected()
    same = weights.keys() == known.keys() and all(torch.equal(weights[name], known[name]) for name in known)
    if not (same and rest == others) and not any(Path(where).name in str(each.message) for each in warned):
        raise SilentError(f"{where}: the weights are {'the' if same else 'no longer the'} same; {rest} for {others}")
