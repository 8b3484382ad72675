"""``mantissa data``: files of problems, made ready for training: a file in the DAPO schema, every row checked, every
prompt once, every answer one that can be reached.

    data_source, prompt: [{role, content}], ability, reward_model: {ground_truth, style}, extra_info: {index}

The public file holds about 1.8 million rows, its 17 thousand prompts a hundred times over. Rows are streamed and only
distinct prompts are held, as they will be in training, so memory does not grow with the rows.

What is dropped, each with its reason: rows that cannot be read; repeated prompts (white space collapsed); prompts whose
rows give different answers, since nobody can say which is right; and answers that no completion can be graded right
against, found by grading the answer itself as a completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from mantissa.base.errors import MantissaError, say
from mantissa.base.files import atomic_file
from mantissa.tasks import Grader
from mantissa.tasks.datasets import BadRow, Row, read_rows
from mantissa.tasks.rewards import normalize_answer, verifier_named
from mantissa.tasks.types import Message, Problem, Prompt, as_prompt, prompt_text, shortened, with_place

app = typer.Typer(help="Prepare files of problems for training.", rich_markup_mode="rich", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare files of problems for training."""


@app.command()
def dapo(
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="Parquet or jsonl; DAPO's schema or plain.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="The .parquet file to write.")],
    verifier: Annotated[
        str, typer.Option(help="Answers must be reachable for it: dapo, dapo_strict, math_verify or exact.")
    ] = "dapo",
    template: Annotated[
        str | None,
        typer.Option(help="Prompt of a plain row, with {problem} in it; the default asks for what the verifier reads."),
    ] = None,
) -> None:
    """Write FILES as one file in DAPO's schema: each prompt once, each answer consistent and gradable.

    Rows are checked one by one. Printed: how many were dropped, why, and the first of each kind.
    A plain row has problem (or question) and answer.

    [bold]Examples[/]

    mantissa data dapo dapo-math-17k.parquet -o dapo-clean.parquet

    mantissa data dapo math500.parquet aime.jsonl -o mixed.parquet --verifier math_verify
    """
    account = prepare_dapo(files, output, template=template, verifier=verifier)
    say(f"{output}: {account.describe()}")


DAPO_TEMPLATE = (
    "Solve this problem step by step. Close with a line of its own that reads Answer: X, where X is the final answer "
    "and nothing else.\n\n{problem}"
)
BOXED_TEMPLATE = "Solve this problem step by step and put the final answer in \\boxed{}.\n\n{problem}"
EXAMPLES = 3
_BATCH = 4096
_PERFECT = {"dapo": "Answer: {}", "dapo_strict": "\\boxed{{{}}}", "math_verify": "\\boxed{{{}}}", "exact": "{}"}

UNREADABLE = "cannot be read as a problem and its answer"
EMPTY = "its answer is empty once decoration is gone"
REPEATED = "repeats an earlier prompt"
CONFLICTING = "its prompt comes with different answers"
UNREACHABLE = "no completion is graded right against its answer"


@dataclass
class Dropped:
    """Rows dropped for one reason: how many, and the first few as ``file, row N: what``."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Preparation:
    """The account: ``rows`` = ``kept`` + the sum of all counts in ``dropped``."""

    rows: int = 0
    kept: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def drop(self, reason: str, example: str) -> None:
        dropped = self.dropped.setdefault(reason, Dropped())
        dropped.count += 1
        if len(dropped.examples) < EXAMPLES:
            dropped.examples.append(example)

    def describe(self) -> str:
        """The summary: one line, then one for each reason, its examples below it."""
        lines = [f"{self.rows:,} rows, {self.kept:,} kept"]
        for reason, dropped in sorted(self.dropped.items(), key=lambda item: -item[1].count):
            lines.append(f"{dropped.count:>12,} dropped: {reason}")
            lines += [f"{'':14}{example}" for example in dropped.examples]
        return "\n".join(lines)


@dataclass
class _Kept:
    """The first row of a prompt. ``conflicting``: a later one gives another answer."""

    row: Row
    where: str
    answer: str  # normalised
    conflicting: bool = False


def prepare_dapo(
    files: Sequence[str | Path],
    output: str | Path,
    template: str | None = None,
    verifier: str = "dapo",
) -> Preparation:
    """Write the distinct, consistent, gradable problems of ``files`` to ``output`` (parquet), atomically.

    ``template``: the prompt of a plain row, with ``{problem}`` in it; by default one that asks for what ``verifier``
    (``dapo``, ``dapo_strict``, ``math_verify`` or ``exact``) looks for. Order is that of the first appearance. Raises
    ``MantissaError`` for files of neither schema, for an output that is an input, and where nothing is left.
    """
    output, paths = Path(output).expanduser(), [Path(f).expanduser() for f in files]
    _check(paths, output, verifier)
    template = with_place(template) or (DAPO_TEMPLATE if verifier == "dapo" else BOXED_TEMPLATE)
    account = Preparation()
    with atomic_file(output) as file:
        rows = list(_reachable(list(_consistent(paths, account)), verifier, account))
        account.kept = len(rows)
        if not rows:
            raise MantissaError(f"no problem is left to write: {'; '.join(account.describe().splitlines())}")
        _write(file, [_record(row, template, place) for place, row in enumerate(rows)])
    return account


def _check(paths: Sequence[Path], output: Path, verifier: str) -> None:
    if verifier not in _PERFECT:
        raise MantissaError(f"verifier {verifier!r}: expected one of {', '.join(_PERFECT)}")
    if output.suffix != ".parquet":
        raise MantissaError(f"output {output}: expected a name that ends in .parquet")
    if not output.parent.is_dir():
        raise MantissaError(f"output {output}: there is no folder {output.parent}; make it first")
    if output.exists() and any(path.exists() and path.samefile(output) for path in paths):
        raise MantissaError(f"output {output} is one of the files to read; choose another name")


def _consistent(paths: Sequence[Path], account: Preparation) -> Iterator[_Kept]:
    """The first row of each prompt whose rows agree on the answer."""
    kept: dict[str, _Kept] = {}  # by its prompt
    for path in paths:
        for row in read_rows(path):
            account.rows += 1
            if isinstance(row, BadRow):
                account.drop(UNREADABLE, str(row))
                continue
            where, answer = f"{path}, row {row.number}", normalize_answer(row.answer)
            if not answer:
                account.drop(EMPTY, f"{where}: {row.answer!r}")
                continue
            text = prompt_text(row.prompt)
            first = kept.get(text)
            if first is None:
                kept[text] = _Kept(row, where, answer)
                continue
            account.drop(REPEATED, f"{where}: {_one_line(text)}")
            first.conflicting |= first.answer != answer
    for first in kept.values():
        if first.conflicting:
            account.drop(CONFLICTING, f"{first.where}: {_one_line(_messages(first.row.prompt)[-1].content)}")
        else:
            yield first


def _reachable(kept: Sequence[_Kept], verifier: str, account: Preparation) -> Iterator[Row]:
    """The rows on whose answers a completion can be right that holds nothing but the answer."""
    perfect = [(Problem("", "", one.row.answer, ""), _PERFECT[verifier].format(one.row.answer)) for one in kept]
    with Grader(verifier_named(verifier)) as grader:
        for one, reward in zip(kept, grader.grade(perfect), strict=True):
            if reward.correct:
                yield one.row
            else:
                why = f" ({reward.error})" if reward.error else ""
                account.drop(UNREACHABLE, f"{one.where}: {_one_line(one.row.answer)}{why}")


def _one_line(text: str) -> str:
    return shortened(" ".join(text.split()), 80)


def _messages(prompt: Prompt, template: str = "{problem}") -> tuple[Message, ...]:
    return (Message("user", str(as_prompt(prompt.strip(), template))),) if isinstance(prompt, str) else prompt


def _record(row: Row, template: str, place: int) -> dict[str, Any]:
    """A row of the file. An index that the row lacks is its place there."""
    return {
        "data_source": row.source,
        "prompt": [{"role": turn.role, "content": turn.content} for turn in _messages(row.prompt, template)],
        "ability": row.ability or "MATH",
        "reward_model": {"ground_truth": row.answer, "style": row.style or "rule"},
        "extra_info": {"index": str(place) if row.index is None else row.index},
    }


def _write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    schema = pyarrow.schema(
        [
            ("data_source", text),
            ("prompt", pyarrow.list_(pyarrow.struct([("role", text), ("content", text)]))),
            ("ability", text),
            ("reward_model", pyarrow.struct([("ground_truth", text), ("style", text)])),
            ("extra_info", pyarrow.struct([("index", text)])),
        ]
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records, schema=schema), path, row_group_size=_BATCH)
