"""Problems from files: read, deduplicated, split by a seeded hash, with an account of everything that was dropped.

Public sets repeat themselves: the DAPO file holds its 17 thousand prompts about a hundred times over, and a prompt
that stands in both the training and the held-out set makes the exam worthless. So problems are deduplicated by prompt
(white space collapsed) before they are split, the split is a property of the prompt and the seed alone (adding rows
moves no other prompt), and held-out prompts from a file of their own are taken out of the training set.

Rows of jsonl, json and parquet files come in three schemas, and a row that cannot be read is named, with the reason:

- ``plain``: ``problem``, ``question``, ``prompt``, ``messages`` or ``conversations`` (ShareGPT), the first there is,
  and ``answer``, ``ground_truth`` or ``solution``, which may be a list of one; or the two columns that ``columns``
  names. Text or a chat, whose last turn by the assistant is no part of the prompt. An answer with ``####`` in it
  (GSM8K) counts from there on, a solution (MATH) by its last ``\\boxed{}``; a chat without either by that of its last
  turn.
- ``labelled``: ``prompt`` (text) and ``label``, ``unsafe`` or ``benign``: requests to be judged, asked as they stand.
- ``dapo``: ``prompt`` as a list of ``{role, content}``, ``reward_model.ground_truth``, and ``data_source``.

Other columns are kept where a reward function is to see them (``Problem.row``), and else ignored.
"""

from __future__ import annotations

import decimal
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mantissa.base.bounds import boundary, describe_error, regular_file
from mantissa.base.config import Config
from mantissa.base.errors import MantissaError
from mantissa.base.readers.json import ROW, parse_json, read_json, read_lines
from mantissa.base.readers.parquet import open_parquet
from mantissa.tasks.rewards import last_boxed, normalize_answer, verifier_named
from mantissa.tasks.types import (
    Message,
    OwnReward,
    Problem,
    Prompt,
    Role,
    SplitName,
    Task,
    VerifierName,
    as_prompt,
    prompt_text,
    shortened,
    stable_id,
    with_place,
)

Schema = Literal["plain", "dapo", "labelled"]
OnBadRow = Literal["error", "skip"]
_BARE = ("problem", "question")  # columns of a text that a template asks; others hold what is asked
_PROMPTS = (*_BARE, "prompt", "messages", "conversations")
_CHATS = ("messages", "conversations")
_ANSWERS = ("answer", "ground_truth", "solution")
_COLUMNS = (*_PROMPTS, *_ANSWERS, "label", "reward_model", "data_source", "ability", "extra_info")
_SHAREGPT = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_LONGEST_PLAIN_SOLUTION = 100  # characters of a solution without a box, which is then the answer itself
_ROLES = get_args(Role)
_FORMATS = "a .jsonl, .json or .parquet file"
_LIMITS = ROW._replace(rows=100_000_000)


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_Files = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class Columns(Config):
    """Which columns of a file hold what."""

    problem: str = Field(description="The column of what is asked: a text, or a chat.")
    answer: str = Field(description="The column of the right answer.")


class DatasetConfig(Config):
    """Problems from jsonl, json or parquet files, in the plain, the labelled or the DAPO schema."""

    kind: Literal["dataset"]
    files: _Files = Field(min_length=1, description="One .jsonl, .json or .parquet file, or several.")
    heldout_files: _Files = Field(
        (), description="Files whose problems are held out, instead of a fraction of `files`."
    )
    heldout_fraction: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of prompts held out by a seeded hash; 0.05 where no heldout_files are given.",
    )
    verifier: VerifierName | None = Field(
        None,
        description="How an answer is graded; math_verify where not given, which runs in processes of its own. code "
        "runs the program that was written, in a sandbox, on the tests that the answer holds.",
    )
    reward: OwnReward = None
    row_schema: Schema | None = Field(None, description="Schema of the rows; detected by their columns if null.")
    columns: Columns | None = Field(
        None, description="Names of the columns of a plain row, where they have others than the usual ones."
    )
    template: Annotated[str | None, AfterValidator(with_place)] = Field(
        None,
        description="Prompt of a row of text, with {problem} in it; a plain row asks for steps and a \\boxed{} by "
        "default where its column is problem or question; others are asked as they stand.",
    )
    chat: bool = Field(
        False, description="Make the prompt of a plain row a user message, for the policy's chat template."
    )
    on_bad_row: OnBadRow = Field(
        "error", description="A row that cannot be read: error names file and row and stops, skip counts and reports."
    )
    on_long_prompt: OnBadRow = Field(
        "error",
        description="A prompt that leaves the model's positions no room for rollout.max_tokens: error names it and "
        "stops, skip leaves such problems out and says how many.",
    )
    limit: int | None = Field(None, ge=1, description="Keep only so many training problems, in file order.")

    @model_validator(mode="after")
    def _consistent(self) -> DatasetConfig:
        if self.heldout_files and self.heldout_fraction is not None:
            raise ValueError("heldout_files and heldout_fraction are both set; one of them would do nothing")
        if self.columns is not None and self.row_schema not in (None, "plain"):
            raise ValueError(f"columns does nothing for row_schema {self.row_schema}; leave one of them out")
        uses_own = self.reward is None or any(term.verifier == "task" for term in self.reward)
        if self.verifier is not None and not uses_own:
            raise ValueError("verifier does nothing beside a reward without {verifier: task}; leave it out")
        return self


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read. ``row`` counts from 1: the line of a jsonl file, the row of a parquet file."""

    file: str
    row: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.why}"


@dataclass(frozen=True)
class Row:
    """A row that was read: the bare problem text or its chat messages, the answer as text, where it comes from.

    ``number`` is the row's, as in ``BadRow``. ``ability``, ``style`` and ``index`` are the DAPO schema's, as they stand
    there; None where a row lacks them. ``asked``: the template where none is given. ``rest``: all columns, as they
    stand, where they were asked for.
    """

    prompt: Prompt
    answer: str
    source: str
    number: int
    ability: str | None = None
    style: str | None = None
    index: str | None = None
    asked: str | None = None
    rest: Mapping[str, Any] = field(default_factory=dict, hash=False)


class _UnreadableError(ValueError):
    """Why one row cannot be read."""


def read_rows(
    path: Path, schema: Schema | None = None, columns: Columns | None = None, whole: bool = False
) -> Iterator[Row | BadRow]:
    """Every row of a ``.jsonl``, ``.json`` or ``.parquet`` file in order, read or reported. ``schema`` None: detected
    by columns, or plain with the ``columns`` given. ``whole``: with all columns, as ``Row.rest``.

    Raises ``MantissaError`` for a missing file, an unknown extension, a file that is not what its extension says, and
    columns of neither schema.
    """
    with boundary(f"dataset {path}", f"expected {_FORMATS}"):
        there = regular_file(path)
    if not there:
        what = "a folder" if path.is_dir() else "not there"
        raise MantissaError(f"dataset {path} is {what}: expected {_FORMATS}")
    if path.suffix not in _FILES:
        raise MantissaError(
            f"dataset {path}: unknown extension {path.suffix!r}: expected .jsonl (one JSON object a line), .json (a "
            "list of objects) or .parquet"
        )
    for number, raw in _FILES[path.suffix](path, schema, columns, whole):
        if isinstance(raw, BadRow):
            yield raw
        elif not isinstance(raw, dict):
            yield BadRow(str(path), number, f"expected a JSON object, found {type(raw).__name__}")
        else:
            schema = schema or _schema_of(list(raw), None, path, columns)
            row = _row_or_report(raw, schema, path, number, columns)
            yield replace(row, rest=raw) if whole and isinstance(row, Row) else row


_Rows = Iterator[tuple[int, Any]]


def _of_parquet(path: Path, schema: Schema | None, columns: Columns | None, whole: bool) -> _Rows:
    with open_parquet(path, f"dataset {path}: not a readable parquet file") as table:
        _schema_of(table.columns, schema, path, columns)  # a file without rows has columns too
        ours = table.columns if whole else (*_COLUMNS, *(columns.model_dump().values() if columns else ()))
        yield from enumerate(table.rows([c for c in ours if c in table.columns]), start=1)


def _of_jsonl(path: Path, *_: Any) -> _Rows:
    for number, line in read_lines(path, _LIMITS):
        try:
            raw = parse_json(line)
        except ValueError as error:
            raw = BadRow(str(path), number, f"not JSON ({describe_error(error)})")
        yield number, raw


def _of_json(path: Path, *_: Any) -> _Rows:
    rows = read_json(path, "expected a list of objects; objects one a line are a .jsonl file")
    if not isinstance(rows, list):
        raise MantissaError(f"dataset {path}: expected a list of objects, found {type(rows).__name__}")
    yield from enumerate(rows, start=1)


_FILES = {".parquet": _of_parquet, ".jsonl": _of_jsonl, ".json": _of_json}


def _schema_of(columns: Sequence[str], schema: Schema | None, path: Path, named: Columns | None) -> Schema:
    """The schema that the columns hold, or the one asked for if they hold it."""
    found = ", ".join(columns) or "(none)"
    if named is not None:
        if absent := [name for name in named.model_dump().values() if name not in columns]:
            raise MantissaError(f"dataset {path}: task.columns names {', '.join(absent)}; its columns are {found}")
        return "plain"
    held: list[Schema] = []
    if "prompt" in columns and "reward_model" in columns:
        held.append("dapo")
    answered = any(c in columns for c in _ANSWERS)
    if answered and any(c in columns for c in _BARE):
        held.append("plain")
    if "prompt" in columns and "label" in columns:
        held.append("labelled")
    chats = any(c in columns for c in _CHATS)
    if "plain" not in held and (chats or (answered and "prompt" in columns)):
        held.append("plain")
    if schema in held or (schema is None and held):
        return schema or held[0]
    needed = {
        "plain": "'problem' (or 'question', 'prompt', 'messages') and 'answer' (or 'ground_truth', 'solution')",
        "dapo": "'prompt' and 'reward_model'",
        "labelled": "'prompt' and 'label'",
    }
    if schema is None:
        expected = f"expected {', or '.join(needed.values())}, or names of columns in task.columns"
        raise MantissaError(f"dataset {path}: columns {found} fit no schema: {expected}")
    raise MantissaError(f"dataset {path}: schema {schema} needs columns {needed[schema]}, found {found}")


def _row_or_report(raw: Any, schema: Schema, path: Path, number: int, columns: Columns | None) -> Row | BadRow:
    try:
        if schema == "plain":
            return _plain_row(raw, path, number, columns)
        return _READERS[schema](raw, path, number)
    except _UnreadableError as error:
        return BadRow(str(path), number, str(error))
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        return BadRow(str(path), number, describe_error(error))


def _plain_row(raw: Mapping[str, Any], path: Path, number: int, named: Columns | None = None) -> Row:
    column = named.problem if named else next((c for c in _PROMPTS if c in raw), _PROMPTS[0])
    asked = None if named or column in _BARE else "{problem}"
    value = raw.get(column)
    if not isinstance(value, list) and column not in _CHATS:
        return Row(_text(value, column), _right(raw, named), path.stem, number, asked=asked)
    turns = _chat(value, column)
    question = turns[:-1] if turns[-1].role == "assistant" else turns
    if not question:
        raise _UnreadableError(f"'{column}' is an answer alone: expected a turn of the user before it")
    answered = turns if question is not turns else ()
    return Row(question, _right(raw, named, answered), path.stem, number)


def _right(raw: Mapping[str, Any], named: Columns | None, turns: Sequence[Message] = ()) -> str:
    """The answer: its column's, else of the last of ``turns``."""
    column = named.answer if named else next((c for c in _ANSWERS if c in raw), None)
    if column is None:
        return _solution(turns[-1].content, "the last turn") if turns else _answer(None, "answer")
    value = raw.get(column)
    return _solution(value, column) if column == "solution" and isinstance(value, str) else _answer(value, column)


def _solution(text: str, column: str) -> str:
    """What a worked solution comes to."""
    if (boxed := last_boxed(text)) is not None:
        return _answer(boxed, column)
    if "####" in text or len(text) <= _LONGEST_PLAIN_SOLUTION:
        return _answer(text.strip().strip("$"), column)
    raise _UnreadableError(f"'{column}' has no \\boxed{{}} and no ####, and is too long to be an answer itself")


def _chat(value: Any, column: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _UnreadableError(f"'{column}' is {_describe(value)}: expected a list of messages")
    return tuple(_message(_of_sharegpt(turn), column) for turn in value)


def _of_sharegpt(turn: Any) -> Any:
    """A turn of ``from`` and ``value`` as one of ``role`` and ``content``."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    return {"role": _SHAREGPT.get(turn["from"], turn["from"]), "content": turn.get("value")}


def _labelled_row(raw: Mapping[str, Any], path: Path, number: int) -> Row:
    label = raw.get("label")
    if label not in ("unsafe", "benign"):
        raise _UnreadableError(f"'label' is {_describe(label)}: expected unsafe or benign")
    return Row(_text(raw.get("prompt"), "prompt"), label, path.stem, number, asked="{problem}")


def _dapo_row(raw: Mapping[str, Any], path: Path, number: int) -> Row:
    messages = _chat(raw.get("prompt"), "prompt")
    reward_model = raw.get("reward_model")
    if not isinstance(reward_model, dict):
        raise _UnreadableError(f"'reward_model' is {_describe(reward_model)}: expected an object with 'ground_truth'")
    answer = _answer(reward_model.get("ground_truth"), "reward_model.ground_truth")
    extra = raw.get("extra_info")
    return Row(
        messages,
        answer,
        str(raw.get("data_source") or path.stem),
        number,
        _named(raw.get("ability")),
        _named(reward_model.get("style")),
        _named(extra.get("index")) if isinstance(extra, dict) else None,
    )


_READERS = {"dapo": _dapo_row, "labelled": _labelled_row}


def _named(value: Any) -> str | None:
    return None if value is None else str(value)


def _message(raw: Any, column: str) -> Message:
    if not isinstance(raw, dict):
        raise _UnreadableError(
            f"a message of '{column}' is {_describe(raw)}: expected an object with 'role' and 'content'"
        )
    if raw.get("role") not in _ROLES:
        expected = f"expected one of {', '.join(_ROLES)}"
        raise _UnreadableError(f"a message's role is {_describe(raw.get('role'))}: {expected}")
    return Message(raw["role"], _text(raw.get("content"), "content"))


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _UnreadableError(f"'{column}' is {_describe(value)}: expected text")
    return value


def _answer(value: Any, column: str) -> str:
    """An answer as text, or a list of one. A number that is whole loses its point: a column of doubles has no spelling
    to keep. Several are refused: whether one of them would do or all are asked for, a list does not say."""
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise _UnreadableError(f"'{column}' is a list of {len(value)} answers: expected one")
        (value,) = value
    if isinstance(value, str):
        value = value.rpartition("####")[2].strip()
        if value:
            return str(value)
    elif isinstance(value, (int, float, decimal.Decimal)) and not isinstance(value, bool) and math.isfinite(value):
        return str(int(value)) if value == int(value) else str(value)
    raise _UnreadableError(f"'{column}' is {_describe(value)}: expected text or a finite number")


def _describe(value: Any) -> str:
    return "missing or null" if value is None else shortened(repr(value))


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
    columns: Columns | None = None,
    whole: bool = False,
) -> tuple[dict[str, Problem], DatasetSummary]:
    """The distinct problems of ``files`` in file order, each under the text of its prompt before any template, and the
    account of what was dropped.

    ``template``: the prompt of a plain row, with ``{problem}`` where its text goes; None is ``DEFAULT_TEMPLATE``.
    ``chat``: make it one user message instead of plain text. Rows that are chats bring their own messages, so both
    are errors there. ``columns``: of plain rows with other names. ``on_bad_row``: ``error`` raises, naming the first;
    ``skip`` counts and lists them in the summary. ``whole``: with all columns of a row, for a reward function.
    """
    with_place(template)
    kept: dict[str, Problem] = {}
    keys: dict[object, str] = {}  # prompt as read -> its key: repeated rows, the most of a large file, cost a look-up
    bad_rows: list[BadRow] = []
    rows = conflicting = 0
    with boundary("dataset", f"expected the path of {_FORMATS}"):
        paths = [Path(f).expanduser() for f in files]
    for path in paths:
        for row in read_rows(path, schema, columns, whole):
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
        asked = template or row.asked or DEFAULT_TEMPLATE
        prompt = as_prompt(prompt.strip(), (Message("user", asked),) if chat else asked)
    elif template is not None or chat:
        raise MantissaError(
            f"dataset {path}: its rows are chat messages, where template and chat do nothing; leave them out"
        )
    return Problem(stable_id(row.source, key), prompt, row.answer, row.source, row=row.rest)


class DatasetTask(Task):
    """A math dataset with a verifier. ``summary`` and ``heldout_summary`` tell what reading the files came to.

    Held out are the problems of ``heldout_files``, or else the share ``heldout_fraction`` of prompts that a seeded hash
    chooses; a problem that is held out is no training problem. There is no warm start: these files have answers, not
    solutions.
    """

    name = "dataset"

    def __init__(self, config: DatasetConfig, seed: int):
        self.verifier = verifier_named(config.verifier or "math_verify")
        self.heldout_summary: DatasetSummary | None = None
        of_ones_own = any(term.function is not None for term in config.reward or ())
        how = (config.row_schema, config.template, config.chat, config.on_bad_row, config.columns, of_ones_own)
        problems, self.summary = read_problems(config.files, *how)
        if config.heldout_files:
            heldout, self.heldout_summary = read_problems(config.heldout_files, *how)
        else:
            fraction = DEFAULT_HELDOUT_FRACTION if config.heldout_fraction is None else config.heldout_fraction
            shares = {key: _share(seed, key) for key in problems}
            least = min(shares.values())  # of a small file at least one, where some are to be held out
            heldout = {key: problems[key] for key, x in shares.items() if x < fraction or (fraction and x == least)}
        train = [problem for key, problem in problems.items() if key not in heldout]
        read = [self.summary, *([self.heldout_summary] if self.heldout_summary else [])]
        self.notes = tuple(f"dataset {summary.describe()}" for summary in read)
        if not train:
            raise MantissaError(f"no training problem is left: all {len(problems)} are held out; hold out fewer")
        self._train, self._heldout = tuple(train[: config.limit]), tuple(heldout.values())

    def leave_out(self, too_long: Callable[[Problem], bool]) -> None:
        """Leave out the problems whose prompts are ``too_long``, and note how many."""
        was = len(self._train), len(self._heldout)
        self._train, self._heldout = (
            tuple(problem for problem in problems if not too_long(problem)) for problems in (self._train, self._heldout)
        )
        gone = was[0] - len(self._train), was[1] - len(self._heldout)
        if not self._train:
            raise MantissaError(f"dataset: all {was[0]} training prompts are too long; lower rollout.max_tokens")
        if any(gone):
            each = f"{gone[0]} of {was[0]} training problems, {gone[1]} of {was[1]} held out"
            self.notes = (*self.notes, f"dataset: left out for prompts that are too long: {each}")

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
