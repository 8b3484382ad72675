"""Preparing a file in the DAPO schema: every row checked, every prompt once, every answer one that can be reached.

    data_source, prompt: [{role, content}], ability, reward_model: {ground_truth, style}, extra_info: {index}

The public file holds about 1.8 million rows, its 17 thousand prompts a hundred times over. Rows are streamed, and of
each prompt only two hashes are remembered, of the prompt and of its answer, so that memory does not grow with the rows.
The first row of each prompt goes to a file beside the output; when all are read, that small file is read again without
the prompts whose rows disagree, and their answers are checked.

What is dropped, each with its reason: rows that cannot be read; repeated prompts (white space collapsed); prompts whose
rows give different answers, since nobody can say which is right; and answers that no completion can be graded right
against, found by grading the answer itself as a completion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mantissa.errors import MantissaError
from mantissa.files import atomic_file
from mantissa.tasks.datasets import BadRow, Row, Schema, read_rows
from mantissa.tasks.rewards import normalize_answer, verifier_named
from mantissa.tasks.sandbox.pool import Grader
from mantissa.tasks.types import Message, Problem, SplitName, Task, Verifier, prompt_text

DAPO_TEMPLATE = (
    "Solve this problem step by step. Close with a line of its own that reads Answer: X, where X is the final answer "
    "and nothing else.\n\n{problem}"
)
BOXED_TEMPLATE = "Solve this problem step by step and put the final answer in \\boxed{}.\n\n{problem}"
EXAMPLES = 3
_BATCH = 4096
_ABILITY, _STYLE = "MATH", "rule"
_PERFECT = {"dapo": "Answer: {}", "dapo_strict": "\\boxed{{{}}}", "math_verify": "\\boxed{{{}}}", "exact": "{}"}


@dataclass
class Dropped:
    """Rows dropped for one reason: how many, and the first few as ``file, row N: what``."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str) -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(example)


@dataclass
class Preparation:
    """The account: ``rows`` = ``kept`` + the sum of all counts in ``dropped``."""

    rows: int = 0
    kept: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def drop(self, reason: str, example: str) -> None:
        self.dropped.setdefault(reason, Dropped()).add(example)

    def describe(self) -> str:
        """The summary: one line, then one for each reason, its examples below it."""
        lines = [f"{self.rows:,} rows, {self.kept:,} kept"]
        for reason, dropped in sorted(self.dropped.items(), key=lambda item: -item[1].count):
            lines.append(f"{dropped.count:>12,} dropped: {reason}")
            lines += [f"{'':14}{example}" for example in dropped.examples]
        return "\n".join(lines)


UNREADABLE = "cannot be read as a problem and its answer"
EMPTY = "its answer is empty once decoration is gone"
REPEATED = "repeats an earlier prompt"
CONFLICTING = "its prompt comes with different answers"
UNREACHABLE = "no completion is graded right against its answer"


def prepare_dapo(
    files: Sequence[str | Path],
    output: str | Path,
    schema: Schema | None = None,
    template: str | None = None,
    verifier: str = "dapo",
) -> Preparation:
    """Write the distinct, consistent, gradable problems of ``files`` to ``output`` (parquet), atomically.

    ``template``: the prompt of a plain row, with ``{problem}`` in it; by default one that asks for what ``verifier``
    (``dapo``, ``dapo_strict``, ``math_verify`` or ``exact``) looks for. Order is that of the first appearance. Raises
    ``MantissaError`` for files of neither schema, for an output that is an input, and where nothing is left.
    """
    output, paths = Path(output).expanduser(), [Path(f).expanduser() for f in files]
    _check(paths, output, template, verifier)
    if template is None:
        template = DAPO_TEMPLATE if verifier == "dapo" else BOXED_TEMPLATE
    account = Preparation()
    with atomic_file(output) as final:
        first = final.with_name(final.name.replace(".tmp", ".first.tmp"))  # swept like any leftover of a killed writer
        try:
            conflicts = _first_pass(paths, schema, template, first, account)
            _second_pass(first, final, conflicts, verifier, account)
        finally:
            first.unlink(missing_ok=True)
        if not account.kept:
            raise MantissaError(f"no problem is left to write: {'; '.join(account.describe().split(chr(10)))}")
    return account


def _check(paths: Sequence[Path], output: Path, template: str | None, verifier: str) -> None:
    if verifier not in _PERFECT:
        raise MantissaError(f"verifier {verifier!r}: expected one of {', '.join(_PERFECT)}")
    if template is not None and "{problem}" not in template:
        raise MantissaError(f"template {template!r} lacks {{problem}}: the place where each problem's text goes")
    if output.suffix != ".parquet":
        raise MantissaError(f"output {output}: expected a name that ends in .parquet")
    if not output.parent.is_dir():
        raise MantissaError(f"output {output}: there is no folder {output.parent}; make it first")
    if output.exists() and any(path.exists() and path.samefile(output) for path in paths):
        raise MantissaError(f"output {output} is one of the files to read; choose another name")


def _first_pass(
    paths: Sequence[Path], schema: Schema | None, template: str, first: Path, account: Preparation
) -> set[bytes]:
    """Write the first row of each prompt to ``first``; the hashes of prompts whose rows disagree."""
    answers: dict[bytes, bytes] = {}  # hash of the prompt -> hash of its normalised answer
    conflicts: set[bytes] = set()
    with _Writer(first, kept_for_check=True) as writer:
        for path in paths:
            for row in read_rows(path, schema):
                account.rows += 1
                if isinstance(row, BadRow):
                    account.drop(UNREADABLE, str(row))
                    continue
                key = _hash(prompt_text(row.prompt), 16)
                normalized = normalize_answer(row.answer)
                answer = _hash(normalized, 8)
                where = f"{path}, row {row.number}"
                if not normalized:
                    account.drop(EMPTY, f"{where}: {row.answer!r}")
                    continue
                known = answers.setdefault(key, answer)
                if known is not answer:  # another object: it was there before
                    account.drop(REPEATED, f"{where}: {_shown(prompt_text(row.prompt))}")
                    if known != answer:
                        conflicts.add(key)
                    continue
                writer.add(_record(row, template), key, where)
    return conflicts


def _second_pass(first: Path, final: Path, conflicts: set[bytes], verifier: str, account: Preparation) -> None:
    """Copy ``first`` to ``final`` without the prompts in ``conflicts`` and without answers that cannot be reached."""
    import pyarrow.parquet

    grader = Grader(_Check(verifier_named(verifier)))
    with grader, pyarrow.parquet.ParquetFile(first) as file, _Writer(final) as writer:
        for batch in file.iter_batches(batch_size=_BATCH):
            records = []
            for record in batch.to_pylist():
                key, where = record.pop("key"), record.pop("where")
                if key in conflicts:
                    account.drop(CONFLICTING, f"{where}: {_shown(record['prompt'][-1]['content'])}")
                else:
                    records.append((record, where))
            rewards = grader.grade([_perfect(record, verifier) for record, _ in records])
            for (record, where), reward in zip(records, rewards, strict=True):
                if reward.correct:
                    account.kept += 1
                    writer.add(record)
                else:
                    why = f" ({reward.error})" if reward.error else ""
                    account.drop(UNREACHABLE, f"{where}: {_shown(record['reward_model']['ground_truth'])}{why}")


def _perfect(record: dict[str, Any], verifier: str) -> tuple[Problem, str]:
    """A problem, and the completion that nothing but its answer stands in."""
    answer = record["reward_model"]["ground_truth"]
    return Problem("", "", answer, ""), _PERFECT[verifier].format(answer)


class _Check(Task):
    """No problems, only a verifier: what ``Grader`` needs."""

    name = "dapo data"

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    def _problems(self, name: SplitName) -> Sequence[Problem]:
        return ()


def _record(row: Row, template: str) -> dict[str, Any]:
    prompt = row.prompt
    if isinstance(prompt, str):
        prompt = (Message("user", template.replace("{problem}", prompt.strip())),)
    return {
        "data_source": row.source,
        "prompt": [{"role": message.role, "content": message.content} for message in prompt],
        "ability": row.ability or _ABILITY,
        "reward_model": {"ground_truth": row.answer, "style": row.style or _STYLE},
        "extra_info": {"index": row.index},
    }


def _hash(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


class _Writer:
    """Records to a parquet file, a row group of ``_BATCH`` at a time; ``kept_for_check`` adds hash and origin."""

    def __init__(self, path: Path, kept_for_check: bool = False) -> None:
        import pyarrow
        import pyarrow.parquet

        text = pyarrow.string()
        message = pyarrow.struct([("role", text), ("content", text)])
        fields = [
            ("data_source", text),
            ("prompt", pyarrow.list_(message)),
            ("ability", text),
            ("reward_model", pyarrow.struct([("ground_truth", text), ("style", text)])),
            ("extra_info", pyarrow.struct([("index", text)])),
        ]
        self._schema = pyarrow.schema(fields + ([("key", pyarrow.binary()), ("where", text)] if kept_for_check else []))
        self._table = pyarrow.Table.from_pylist
        self._file = pyarrow.parquet.ParquetWriter(path, self._schema)
        self._records: list[dict[str, Any]] = []
        self._written = 0

    def add(self, record: dict[str, Any], key: bytes | None = None, where: str | None = None) -> None:
        """One more. An index that the row lacks is its place in this file."""
        if key is not None:
            record |= {"key": key, "where": where}
        elif record["extra_info"]["index"] is None:
            record["extra_info"] = {"index": str(self._written)}
        self._written += 1
        self._records.append(record)
        if len(self._records) == _BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._records:
            self._file.write_table(self._table(self._records, schema=self._schema))
            self._records = []

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
        self._file.close()
