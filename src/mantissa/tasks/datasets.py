"""Problems from files: read, deduplicated, split by a seeded hash, with an account of everything that was dropped.

Public sets repeat themselves: the DAPO file holds its 17 thousand prompts about a hundred times over, and a prompt
that stands in both the training and the held-out set makes the exam worthless. So problems are deduplicated by prompt
(white space collapsed) before they are split, the split is a property of the prompt and the seed alone (adding rows
moves no other prompt), and held-out prompts from a file of their own are taken out of the training set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mantissa.bounds import boundary
from mantissa.errors import MantissaError
from mantissa.tasks.answers import normalize_answer
from mantissa.tasks.rows import BadRow, Row, Schema, read_rows
from mantissa.tasks.types import Message, Problem, SplitName, Task, Verifier, as_prompt, prompt_text, stable_id

OnBadRow = Literal["error", "skip"]
DEFAULT_TEMPLATE = "{problem}\n\nThink step by step, then write the final answer in \\boxed{}."
DEFAULT_HELDOUT_FRACTION = 0.05


@dataclass(frozen=True)
class DatasetSummary:
    """What reading the files came to. ``rows`` = ``problems`` + ``duplicates`` + ``len(bad_rows)``.

    ``conflicting``: duplicates whose answer differs from the first one's after normalisation; the first is kept.
    """

    files: tuple[str, ...]
    rows: int
    problems: int
    duplicates: int
    conflicting: int
    bad_rows: tuple[BadRow, ...]

    def describe(self) -> str:
        """One line for the screen and the log; the first unreadable row is named."""
        text = (
            f"{', '.join(Path(f).name for f in self.files)}: {self.rows} rows, {self.problems} problems, "
            f"{self.duplicates} duplicates dropped ({self.conflicting} with another answer), "
            f"{len(self.bad_rows)} unreadable"
        )
        return f"{text} (the first: {self.bad_rows[0]})" if self.bad_rows else text


def read_problems(
    files: Sequence[str | Path],
    schema: Schema | None = None,
    template: str | None = None,
    chat: bool = False,
    on_bad_row: OnBadRow = "error",
) -> tuple[list[Problem], DatasetSummary]:
    """The distinct problems of ``files`` in file order, and the account of what was dropped.

    ``template``: the prompt of a plain row, with ``{problem}`` where its text goes; None is ``DEFAULT_TEMPLATE``.
    ``chat``: make it one user message instead of plain text. Rows of the DAPO schema bring their own messages, so both
    are errors there. ``on_bad_row``: ``error`` raises, naming the first; ``skip`` counts and lists them in the summary.
    """
    kept, summary = _read(files, schema, template, chat, on_bad_row)
    return list(kept.values()), summary


def _read(
    files: Sequence[str | Path], schema: Schema | None, template: str | None, chat: bool, on_bad_row: OnBadRow
) -> tuple[dict[str, Problem], DatasetSummary]:
    """``read_problems``, with each problem under its key: the text of its prompt before any template."""
    if template is not None and "{problem}" not in template:
        raise MantissaError(f"template {template!r} lacks {{problem}}: the place where each problem's text goes")
    kept: dict[str, Problem] = {}
    keys: dict[object, str] = {}  # prompt as read -> its key: repeated rows, the most of a large file, cost a look-up
    bad_rows: list[BadRow] = []
    rows = conflicting = 0
    with boundary("dataset", "expected the path of a .jsonl or .parquet file"):
        paths = [Path(f).expanduser() for f in files]
    for path in paths:
        for row in read_rows(path, schema):
            rows += 1
            if isinstance(row, BadRow):
                bad_rows.append(row)
                continue
            key = keys.get(row.prompt) or keys.setdefault(row.prompt, prompt_text(row.prompt))
            first = kept.get(key)
            if first is None:
                kept[key] = _problem(row, key, template, chat, path)
            elif first.answer != row.answer and normalize_answer(first.answer) != normalize_answer(row.answer):
                conflicting += 1
    if bad_rows and on_bad_row == "error":
        more = f" (and {len(bad_rows) - 1} more such rows)" if len(bad_rows) > 1 else ""
        raise MantissaError(f"dataset {bad_rows[0]}{more}; mend the file, or set on_bad_row: skip")
    summary = DatasetSummary(
        files=tuple(str(f) for f in files),
        rows=rows,
        problems=len(kept),
        duplicates=rows - len(kept) - len(bad_rows),
        conflicting=conflicting,
        bad_rows=tuple(bad_rows),
    )
    if not kept:
        raise MantissaError(f"the dataset holds no problem: {summary.describe()}")
    return kept, summary


def _problem(row: Row, key: str, template: str | None, chat: bool, path: Path) -> Problem:
    prompt = row.prompt
    if isinstance(prompt, str):
        asked = template or DEFAULT_TEMPLATE
        prompt = as_prompt(prompt.strip(), (Message("user", asked),) if chat else asked)
    elif template is not None or chat:
        raise MantissaError(
            f"dataset {path}: its rows are chat messages (DAPO schema), where template and chat do nothing; "
            "leave them out"
        )
    return Problem(stable_id(row.source, key), prompt, row.answer, row.source)


class DatasetTask(Task):
    """A math dataset with a verifier. ``summary`` and ``heldout_summary`` tell what reading the files came to.

    Held out are the problems of ``heldout_files``, or else the share ``heldout_fraction`` of prompts that a seeded hash
    chooses; ``overlap`` counts training problems dropped because they are held out. ``limit`` keeps the first so many
    training problems. There is no warm start: these files have answers, not solutions.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        seed: int,
        verifier: Verifier,
        heldout_files: Sequence[str | Path] = (),
        heldout_fraction: float | None = None,
        schema: Schema | None = None,
        template: str | None = None,
        chat: bool = False,
        on_bad_row: OnBadRow = "error",
        limit: int | None = None,
    ):
        if heldout_files and heldout_fraction is not None:
            raise MantissaError("heldout_files and heldout_fraction are both set; one of them would do nothing")
        self.name = "dataset"
        self.verifier = verifier
        self.alphabet = None
        self.heldout_summary: DatasetSummary | None = None
        problems, self.summary = _read(files, schema, template, chat, on_bad_row)
        if heldout_files:
            heldout, self.heldout_summary = _read(heldout_files, schema, template, chat, on_bad_row)
        else:
            fraction = DEFAULT_HELDOUT_FRACTION if heldout_fraction is None else heldout_fraction
            heldout = {key: problem for key, problem in problems.items() if _share(seed, key) < fraction}
        train = [problem for key, problem in problems.items() if key not in heldout]
        self.overlap = len(problems) - len(train) if heldout_files else 0
        if not train:
            raise MantissaError(f"no training problem is left: all {len(problems)} are held out; hold out fewer")
        self._train, self._heldout = tuple(train[:limit]), tuple(heldout.values())

    def _problems(self, name: SplitName) -> Sequence[Problem]:
        if name == "warm_start":
            raise MantissaError(
                "task dataset has no warm_start split: its files hold answers, not solutions to imitate; start from a "
                "trained policy, or use a generated task"
            )
        return self._train if name == "train" else self._heldout


def _share(seed: int, text: str) -> float:
    """A number in [0, 1), fixed by seed and text: the first 53 bits of a SHA-256."""
    digest = hashlib.sha256(f"{seed}\0{text}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53
