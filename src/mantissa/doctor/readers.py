"""Log-probs of both sides as the frameworks write them, each by its own field names.

| framework | file | one log-prob stands |
|---|---|---|
| Mantissa | a run's folder, or its rollouts/step-N.parquet | for each response token |
| NeMo-RL | train_data_step{n}.jsonl | at each token of the padded sequence; the first is 0 |
| prime-rl | token_exports/step_N/rank_R.jsonl | at each token of one sequence, prompt included |
| slime | train_data/{id}.pt, versions from rollout_data/{id}.pt | for each response token |
| miles | train_data/{id}_{rank}.pt | for each response token |
| SkyRL | dumped_data/{name}.pkl | for each response token, padded right; prompts are padded left |
| plain | jsonl or parquet | for each response token |

The file is looked at to find out whose it is. What cannot be read is named with its line or row; nothing is guessed:
two sides of different lengths are an error, and so are ids that are no tokens. A log-prob that is not finite
in fp32 is kept as NaN.
What verl, TRL, AReaL and ROLL dump by themselves holds no log-probs of the learner: it is known by its fields, and the
error says how to have them written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.base.bounds import LARGEST_FLOAT, Limits, boundary, number, regular_file
from mantissa.base.errors import MantissaError
from mantissa.base.readers import pickles
from mantissa.base.readers.csv import read_csv
from mantissa.base.readers.json import ROW, read_json, read_rows
from mantissa.base.readers.npz import read_npz
from mantissa.base.readers.parquet import open_parquet
from mantissa.doctor import columns
from mantissa.doctor.dump import Dump, Scored, Settings

FRAMEWORKS = ("mantissa", "nemo-rl", "prime-rl", "slime", "miles", "skyrl", "plain", "verl", "trl", "openrlhf", "areal",
              "roll")  # fmt: skip
MOST_TOKENS = 4_000_000  # response positions; more would only narrow intervals that are narrow already
_LINE = ROW
_TABLE = Limits(4 << 30, 100, 40 * MOST_TOKENS)
_LARGEST_TOKEN = 2**31 - 1
_SETTINGS = tuple(each.name for each in fields(Settings))
Row = Mapping[str, Any]

# Fields that only this framework's rows have together; the first that fits is it.
_KNOWN: dict[str, frozenset[str]] = {
    "nemo-rl": frozenset({"generation_logprobs", "prev_logprobs"}),
    "prime-rl": frozenset({"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"}),
    "mantissa": frozenset({"tokens", "rollout_logp", "learner_logp", "policy_version", "finish_reason", "advantage"}),
    "plain": frozenset({"tokens", "rollout_logp", "learner_logp"}),
    "verl": frozenset({"input", "output", "score"}),
    "trl": frozenset({"prompt", "completion", "advantage"}),
    "areal": frozenset({"head_version", "tail_version", "prompt_len", "completion"}),
}
_WRITE_THEM = (
    "Have them written where the trainer has both sides' log-probs of a batch: mantissa.doctor.record.write_batch, one "
    "call (docs/integrations.md)"
)
_NO_LOGPS = {
    "verl": "verl's rollout dump holds texts and scores and no log-probs. Have them recorded: start verl with "
    "VERL_USE_EXTERNAL_MODULES=mantissa.launch.verl_logps MANTISSA_LOGPS=FOLDER in its environment, and give this "
    "command the FOLDER (docs/doctor.md)",
    "trl": "TRL's completion log holds texts, rewards and advantages and no log-probs. Have them written: "
    "mantissa.dropin.trl.record_logps(trainer, FOLDER) before trainer.train(), and give this command the FOLDER "
    "(docs/doctor.md)",
    "areal": f"AReaL's trajectory dump (rollout.dump_to_file) holds texts and rewards and no log-probs. {_WRITE_THEM}",
    "roll": f"ROLL's rollout dump holds the engine's log-probs and not the learner's. {_WRITE_THEM}",
}


def read_dump(path: Path, framework: str | None = None, names: Mapping[str, str] | None = None) -> Dump:
    """Read a run, a file or a folder of files. ``framework``: whose it must be; None is found by looking. ``names``:
    of the sides' columns, in a file that is nobody's that is known (columns.py).

    Raises ``MantissaError`` for what is damaged, holds one side only, or is nobody's that is known.
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise MantissaError(f"--from {framework}: expected one of {', '.join(FRAMEWORKS)}")
    with boundary(path, "expected a run's folder, or a file of log-probs"):
        if not path.exists():
            raise MantissaError(f"{path}: no such file or folder; expected a run, or a dump of log-probs")
        if (path / "config.yaml").is_file() and (path / "rollouts").is_dir() and framework in (None, "mantissa"):
            from mantissa.doctor.runs import read_run  # a dump of others needs none of it

            dump = read_run(path, MOST_TOKENS)
        else:
            dump = _read_files(path, framework, names or {})
    both = (np.isfinite(each.rollout_logp) & np.isfinite(each.learner_logp) & each.mask for each in dump.sequences)
    if not any(each.any() for each in both):
        raise MantissaError(f"{path}: no response token has log-probs of both sides; nothing to compare")
    return dump


def _read_files(path: Path, framework: str | None, names: Mapping[str, str]) -> Dump:
    files, sequences, found, settings, tokens = _files(path), [], None, Settings(), 0
    notes, mapped, pairs = list[str](), list[str](), dict[str, Settings]()
    for number_, file in enumerate(files):
        whose, part, how, *said = _read_file(file, framework, names, pairs)
        mapped += [each for each in said if each not in mapped]
        if found is not None and whose != found:
            raise MantissaError(f"{path} holds files of {found} and of {whose}; give one of them")
        settings = how if found is None else _agreed(settings, how)
        found = whose
        sequences += part
        tokens += sum(len(each.rollout_logp) for each in part)
        if tokens > MOST_TOKENS and number_ + 1 < len(files):
            notes.append(f"the newest {number_ + 1} of {len(files)} files were read: {tokens:,} tokens")
            break
    assert found is not None
    if len(pairs) < 2 or any(each.pair is None for each in sequences):
        pairs, sequences = {}, [replace(each, pair=None) for each in sequences] if pairs else sequences
    return Dump(found, path, sequences, settings, None, tuple(notes), tuple(pairs.items()), tuple(mapped))


def _files(path: Path) -> list[Path]:
    """The files to read, newest first by the numbers in their names."""
    if regular_file(path):
        return [path]
    found = [each for each in path.rglob("*") if each.suffix in (".jsonl", ".parquet", ".pt", ".pkl")]
    found = [each for each in found if each.is_file() and each.parent.name != "rollout_data"]
    if not found:
        raise MantissaError(
            f"{path}: no .jsonl, .parquet, .pt or .pkl with log-probs of both sides in it; expected a run's folder or "
            "a dump"
        )
    return sorted(found, key=lambda each: [int(n) for n in _numbers(str(each.relative_to(path)))], reverse=True)


def _numbers(name: str) -> list[str]:
    return "".join(letter if letter.isascii() and letter.isdigit() else " " for letter in name).split()


_Read = tuple[str, list[Scored], Settings] | tuple[str, list[Scored], Settings, str]  # and which columns were taken


def _read_file(path: Path, framework: str | None, names: Mapping[str, str], pairs: dict[str, Settings]) -> _Read:
    """``pairs``: of the pairs that rows name, each one's settings; new ones are added."""
    if path.suffix in (".pt", ".pkl"):
        return _read_pickle(path, framework, names)
    if path.suffix == ".npz":
        return _by_columns(path, *columns.table_rows(path, read_npz(path), names))
    if path.suffix not in (".jsonl", ".parquet", ".csv", ".json"):
        raise MantissaError(
            f"{path}: unknown ending {path.suffix!r}; expected log-probs as .jsonl, .json, .parquet, .npz, .csv, .pt "
            "or .pkl, or a training log with figures in it"
        )
    if names or path.suffix in (".csv", ".json") or (framework is None and _is_nobodys(path)):
        return _by_columns(path, *columns.plain_rows(path, _all_rows(path, names), names))
    rows = read_rows(path, _LINE) if path.suffix == ".jsonl" else _parquet_rows(path)
    whose, settings, sequences, tokens, writer = framework, None, list[Scored](), 0, None
    before: tuple[Any, ...] = ()  # what the row before said of settings
    how = Settings()
    for line, row in enumerate(rows, start=1):
        where = f"{path}, {'line' if path.suffix == '.jsonl' else 'row'} {line}"
        with boundary(where, "leave the line out, or write the file again"):
            if not isinstance(row, Mapping):
                raise MantissaError(f"{where}: expected an object of fields, got {type(row).__name__}")
            whose = whose or _whose(where, row)
            if whose in _NO_LOGPS:
                raise MantissaError(f"{path}: {_NO_LOGPS[whose]}")
            missing = _KNOWN[whose] - row.keys() if whose in ("nemo-rl", "prime-rl", "plain") else set()
            if missing:
                raise MantissaError(f"{where}: no field {', '.join(sorted(missing))}, as {whose} writes; {_HINT}")
            found = _READERS[whose](where, row)
            says = tuple(map(row.get, _SETTINGS)) if whose == "plain" else ()
            if settings is None or says != before:
                how = Settings(**{name: each for name, each in zip(_SETTINGS, says, strict=False) if each is not None})
                settings, before = how if settings is None else _agreed(settings, how), says
            if whose == "plain" and "pair" in row:
                found = replace(found, pair=_pair(where, row["pair"], how, pairs))
            writer = row.get("framework", whose) if whose == "plain" else whose
            sequences.append(found)
            tokens += len(found.rollout_logp)
        if tokens > MOST_TOKENS:
            break
    if whose is None:
        raise MantissaError(f"{path} is empty; expected a row a sequence")
    return writer if writer in FRAMEWORKS else whose, sequences, checked(path, settings or Settings())


def _is_nobodys(path: Path) -> bool:
    """Whether the first row has no program's fields and has columns of log-probs."""
    with boundary(path, "write the file again"):
        first = next(iter(_all_rows(path, {})), None)
    return isinstance(first, Mapping) and whose_row(first) is None and columns.has_sides(map(str, first))


def _all_rows(path: Path, names: Mapping[str, str]) -> Iterator[Any]:
    if path.suffix == ".parquet":
        return _parquet_rows(path, names.values())
    if path.suffix == ".csv":
        return iter(read_csv(path))
    if path.suffix == ".json":
        value = read_json(path)
        return iter(value if isinstance(value, list) else [value])
    return read_rows(path, _LINE)


def _by_columns(path: Path, said: str, rows: Iterator[Row]) -> tuple[str, list[Scored], Settings, str]:
    """Rows that columns.py has put into the plain schema."""
    found, tokens = list[Scored](), 0
    for place, row in enumerate(rows, start=1):
        where = f"{path}, row {place}"
        with boundary(where, "leave it out, or write the file again"):
            found.append(_plain(where, row))
        tokens += len(found[-1].rollout_logp)
        if tokens > MOST_TOKENS:
            break
    if not found:
        raise MantissaError(f"{path}: no row with a response; expected a row a sequence")
    return "plain", found, Settings(), said


def _pair(where: str, name: Any, how: Settings, pairs: dict[str, Settings]) -> int:
    """The number of a row's pair; what the rows of one say alike of settings is the pair's."""
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise MantissaError(f"{where}: pair is {_describe(name)}, expected a pair's name")
    pairs[name] = _agreed(pairs.get(name, how), how)
    if len(pairs) > _MOST_PAIRS:
        raise MantissaError(f"{where}: more than {_MOST_PAIRS} pairs in one dump; give a part of it")
    return list(pairs).index(name)


_LONGEST_NAME, _MOST_PAIRS = 200, 64
_HINT = "--from says whose it is where that was not found by itself"


def whose_row(row: Row) -> str | None:
    """Whose row it is by its fields, None where nobody's that is known has them."""
    return next((whose for whose, needed in _KNOWN.items() if needed <= row.keys()), None)


def _whose(where: str, row: Row) -> str:
    if (whose := whose_row(row)) is not None:
        return whose
    raise MantissaError(
        f"{where}: nobody's fields that are known ({', '.join(sorted(map(str, row))[:12])}); expected those of "
        f"{', '.join(FRAMEWORKS[1:6])}, or of plain: tokens, prompt_length, rollout_logp, learner_logp"
    )


def _parquet_rows(path: Path, more: Iterable[str] = ()) -> Iterator[Any]:
    known = {"tokens", "prompt_length", "rollout_logp", "learner_logp", "mask", "group", "rollout_version",
             "learner_version", "policy_version", "finish_reason", "advantage", "completion", "step", "prompt",
             "framework", "kept", *_SETTINGS, *_EXPERTS, *more, *columns.EITHER,
             *(name for obvious in columns.OBVIOUS.values() for name in obvious)}  # fmt: skip
    with open_parquet(path, f"{path}: not a whole parquet file", _TABLE) as table:
        yield from table.rows([name for name in table.columns if name in known])


# values


def _array(where: str, name: str, values: Any) -> np.ndarray:
    """Numbers, whatever holds them, as float64 (ids keep their value up to 2^53); None becomes NaN."""
    if type(values) is list and values and set(map(type, values)) <= {int, float}:
        return np.array(values, dtype=np.float64)
    values = getattr(values, "array", values)
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "fiub":
            raise MantissaError(
                f"{where}: {name} has the shape {values.shape} of {values.dtype}, expected a row of numbers"
            )
        return values.astype(np.float64)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise MantissaError(f"{where}: {name} is {_describe(values)}, expected a list of numbers")
    if len(values) == 1 and isinstance(values[0], Sequence) and not isinstance(values[0], str):
        values = values[0]  # a batch of one
    if set(map(type, values)) <= {int, float}:
        return np.array(values, dtype=np.float64)
    odd = next((each for each in values if each is not None and not isinstance(each, bool | int | float)), None)
    if odd is not None:
        if all(each in _NON_FINITE for each in values if isinstance(each, str)) and isinstance(odd, str):
            values = [_NON_FINITE.get(each, each) if isinstance(each, str) else each for each in values]
            return _array(where, name, values)
        raise MantissaError(f"{where}: {name} holds {_describe(odd)}, expected numbers")
    return np.array([np.nan if each is None else float(each) for each in values], dtype=np.float64)


_NON_FINITE = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


def _describe(value: Any) -> str:
    return (
        f"{type(value).__name__} {str(value)[:40]!r}" if isinstance(value, str | int | float) else type(value).__name__
    )


def _ids(where: str, name: str, values: Any) -> np.ndarray:
    if type(values) is list and set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= _LARGEST_TOKEN:
        return np.array(values, dtype=np.int64)
    ids = _array(where, name, values)
    if len(ids) and not (np.all(ids == np.floor(ids)) and ids.min() >= 0 and ids.max() <= _LARGEST_TOKEN):
        raise MantissaError(f"{where}: {name} holds what is no token's id; expected whole numbers from 0 on")
    return ids.astype(np.int64)


def _logp(where: str, name: str, values: Any, length: int) -> np.ndarray:
    logp = _array(where, name, values)
    if len(logp) != length:
        raise MantissaError(f"{where}: {name} has {len(logp)} values for {length} tokens; the two must fit")
    if length and logp.min() >= -LARGEST_FLOAT and logp.max() <= LARGEST_FLOAT:  # no NaN either
        return logp
    return np.where(np.abs(logp) <= LARGEST_FLOAT, logp, np.nan)


def _mask(where: str, name: str, values: Any, length: int) -> np.ndarray:
    if values is None:
        return np.ones(length, dtype=bool)
    mask = _array(where, name, values)
    if len(mask) != length:
        raise MantissaError(f"{where}: {name} has {len(mask)} values for {length} tokens; the two must fit")
    return np.nan_to_num(mask) != 0


def _count(where: str, row: Row, name: str, default: int | None = None) -> int | None:
    value = row.get(name)
    if type(value) is int and 0 <= value <= 2**53:
        return value
    if value is None:
        return default
    value = getattr(value, "array", value)
    if isinstance(value, list | np.ndarray) and np.size(value) == 1:
        value = np.asarray(value).reshape(-1)[0].item()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        value = int(value)
    if value is None:
        return default
    if not number(value, 0, 2**53, whole=True):
        raise MantissaError(f"{where}: {name} is {_describe(value)}, expected a whole number from 0 on")
    return int(value)


# one row of each


def _plain(where: str, row: Row) -> Scored:
    tokens = _ids(where, "tokens", row["tokens"])
    given = _count(where, row, "prompt_length")
    prompt = len(tokens) - len(_array(where, "rollout_logp", row["rollout_logp"])) if given is None else given
    if not 0 <= prompt <= len(tokens):
        raise MantissaError(f"{where}: prompt_length {prompt} of {len(tokens)} tokens")
    length = len(tokens) - prompt
    both = [_logp(where, name, row[name], length) for name in ("rollout_logp", "learner_logp")]
    mask = _mask(where, "mask", row.get("mask"), length)
    version = _count(where, row, "rollout_version", _count(where, row, "policy_version"))
    group = (
        _count(where, row, "group") if "group" in row else row["prompt"] if isinstance(row.get("prompt"), int) else None
    )
    sides = [row.get(name) for name in _EXPERTS]
    flipped = None
    if all(side is not None for side in sides):
        with boundary(where, "expected rollout_experts and learner_experts as lists, one a response token"):
            ours, theirs = (np.array(side, dtype=np.int64).reshape(length, -1) for side in sides)
            flipped = (np.sort(ours, 1) != np.sort(theirs, 1)).any(1)
    return Scored(
        tokens, prompt, both[0], both[1], mask, rollout_version=version,
        learner_version=_count(where, row, "learner_version"), group=group, flipped=flipped,
        kept=None if row.get("kept") is None else _kept(where, row["kept"], tokens[prompt:]),
    )  # fmt: skip


def _kept(where: str, rows: Any, sampled: np.ndarray) -> list[np.ndarray | None]:
    """The ids that top-k and top-p left at each response position, the sampled one among them."""
    if not isinstance(rows, list) or len(rows) != len(sampled):
        raise MantissaError(f"{where}: kept is no list of ids for each of {len(sampled)} response tokens")
    kept = [None if row is None else _ids(where, "kept", row) for row in rows]
    for token, ids in zip(sampled, kept, strict=True):
        if ids is not None and token not in ids:
            raise MantissaError(f"{where}: token {token} was sampled and is not in its kept ids; null is all of them")
    return kept


_EXPERTS = ("rollout_experts", "learner_experts")


def _whole_sequence(
    where: str, tokens: np.ndarray, logps: tuple[Any, Any], names: tuple[str, str], mask: np.ndarray
) -> Scored:
    """Log-probs at every token of a sequence: the prompt ends where the mask begins."""
    both = [_logp(where, name, values, len(tokens)) for name, values in zip(names, logps, strict=True)]
    prompt = int(mask.argmax()) if mask.any() else len(tokens)
    return Scored(tokens, prompt, both[0][prompt:], both[1][prompt:], mask[prompt:])


def _nemo(where: str, row: Row) -> Scored:
    if "token_ids" not in row:
        raise MantissaError(
            f"{where}: no token_ids; NeMo-RL writes them since 0.5: with an older one, add them to log_data"
        )
    length = _count(where, row, "input_lengths")
    ids, cut = _ids(where, "token_ids", row["token_ids"]), slice(0, length)
    names = ("generation_logprobs", "prev_logprobs")
    logps = [_logp(where, name, row[name], len(ids))[cut] for name in names]
    mask = _mask(where, "token_loss_mask", row.get("token_loss_mask"), len(ids))[cut]
    sample = row.get("sample_loss_mask", 1)
    mask = mask & bool(np.all(_array(where, "sample_loss_mask", sample if isinstance(sample, list) else [sample])))
    return _whole_sequence(where, ids[cut], (logps[0], logps[1]), names, mask)


def _prime(where: str, row: Row) -> Scored:
    ids = _ids(where, "token_ids", row["token_ids"])
    mask = _mask(where, "loss_mask", row["loss_mask"], len(ids))
    names = ("inference_logprobs", "trainer_logprobs")
    return _whole_sequence(where, ids, (row[names[0]], row[names[1]]), names, mask)


def _rollout_row(where: str, row: Row) -> Scored:
    """A row of a run's parquet: its tokens are the response's."""
    if row.get("learner_logp") is None:
        raise MantissaError(
            f"{where}: learner_logp is empty: an exact run's step that was not checked; give another step"
        )
    return _plain(where, {**row, "prompt_length": 0, "prompt": None})


_READERS = {"plain": _plain, "nemo-rl": _nemo, "prime-rl": _prime, "mantissa": _rollout_row}


# pickles

_DATA_PROTO = (
    "a DataProto of verl, a class of its own that is not made here; save its tensors: "
    "torch.save(dict(data.batch.items()), FILE)"
)


def _read_pickle(path: Path, framework: str | None, names: Mapping[str, str]) -> _Read:
    try:
        data = pickles.load(path)
    except MantissaError as error:
        module = error.__cause__.module if isinstance(error.__cause__, pickles.UnknownClassError) else ""
        if module == "roll.distributed.scheduler.protocol":
            raise MantissaError(f"{path}: {_NO_LOGPS['roll']}") from None
        if module == "verl.protocol" or module.partition(".")[0] == "tensordict":
            raise MantissaError(f"{path}: {_DATA_PROTO}") from None
        raise
    with boundary(path, "expected slime's or miles' train_data, or SkyRL's dumped_data"):
        if not isinstance(data, dict):
            raise MantissaError(f"{path} holds a {type(data).__name__}; expected slime's or SkyRL's dictionary")
        if names:
            return _by_columns(path, *columns.table_rows(path, data, names))
        if {"sequences", "response_mask"} <= data.keys() and framework in (None, "skyrl"):
            return "skyrl", _skyrl(path, data), Settings()
        if {"rollout_data", "cp_size"} <= data.keys() and framework in (None, "miles"):
            return "miles", _miles(path, data), Settings()
        if ({"samples"} <= data.keys() or "rollout_data" in data) and framework in (None, "slime"):
            return "slime", _slime(path, data), Settings()
        if framework in (None, "plain") and columns.has_sides(map(str, data)):
            return _by_columns(path, *columns.table_rows(path, data, names))
    fields_ = ", ".join(sorted(map(str, data))[:12])
    raise MantissaError(
        f"{path}: fields {fields_}; expected slime's samples, miles' rollout_data or SkyRL's sequences"
        + ("" if framework is None else f", as --from {framework} says")
    )


def _miles(path: Path, data: Row) -> list[Scored]:
    """One rank's columns, whole: what context parallelism cut is refused."""
    if data["cp_size"] != 1:
        raise MantissaError(
            f"{path}: of {_describe(data['cp_size'])} ranks that share each sequence (context parallelism); expected "
            "whole log-probs: record with --context-parallel-size 1"
        )
    return _slime(path, data)


def _slime(path: Path, data: Row) -> list[Scored]:
    """``samples`` (format 2), or the columns of ``rollout_data`` before it; versions from the rollout's own dump."""
    samples = data.get("samples")
    if samples is None:
        columns = data["rollout_data"]
        count = len(columns["tokens"])
        lists = {name: each for name, each in columns.items() if isinstance(each, list) and len(each) == count}
        samples = [{name: each[number_] for name, each in lists.items()} for number_ in range(count)]
    if samples and not any("log_probs" in each for each in samples):
        raise MantissaError(
            f"{path} holds the rollout's log-probs only; the learner's are in slime's train_data/{path.stem}.pt "
            "(--save-debug-train-data, or --dump-details for both)"
        )
    versions = _slime_versions(path, samples)
    found = []
    for place, sample in enumerate(samples):
        where = f"{path}, sample {place}"
        tokens = _ids(where, "tokens", sample["tokens"])
        length = _count(where, sample, "response_lengths", _count(where, sample, "response_length"))
        if length is None or length > len(tokens):
            raise MantissaError(f"{where}: response_length {length} of {len(tokens)} tokens")
        names = ("rollout_log_probs", "log_probs")
        missing = [name for name in names if sample.get(name) is None]
        if missing:
            raise MantissaError(f"{where}: no {missing[0]}; slime writes it with --use-rollout-logprobs or --use-tis")
        both = [_logp(where, name, sample[name], length) for name in names]
        mask = _mask(where, "loss_mask", sample.get("loss_masks", sample.get("loss_mask")), length)
        version = versions.get(_count(where, sample, "rollout_position", _count(where, sample, "sample_index", place)))
        found.append(Scored(tokens, len(tokens) - length, both[0], both[1], mask, version))
    return found


def _slime_versions(path: Path, samples: Sequence[Row]) -> dict[int | None, int]:
    """Each sample's last ``weight_versions``: its own, or from rollout_data/{id}.pt beside train_data/{id}.pt."""
    beside = path.parent.parent / "rollout_data" / path.name
    if not any("weight_versions" in sample for sample in samples):
        if not beside.is_file():
            return {}
        samples = pickles.load(beside).get("samples", ())
    found: dict[int | None, int] = {}
    for place, sample in enumerate(samples):
        last = list(sample.get("weight_versions") or ())[-1:]
        if last and str(last[0]).isascii() and str(last[0]).isdigit():
            found[place] = int(last[0])
    return found


def _skyrl(path: Path, data: Row) -> list[Scored]:
    names = ("rollout_logprobs", "action_log_probs")
    missing = [name for name in names if data.get(name) is None]
    if missing:
        raise MantissaError(
            f"{path}: no {missing[0]}; SkyRL writes it with generator.sampling_params.logprobs=0 (the engine's) and "
            "after its forward pass (the policy's)"
        )
    sequences, response = data["sequences"], data["response_mask"]
    if any(getattr(each, "ndim", 0) != 2 for each in (sequences, response, *(data[name] for name in names))):
        raise MantissaError(f"{path}: expected tables, a row a sequence")
    rows, width = response.shape
    if any(data[name].shape != (rows, width) for name in names) or len(sequences) != rows or sequences.shape[1] < width:
        shapes = ", ".join(f"{name} {data[name].shape}" for name in ("sequences", "response_mask", *names))
        raise MantissaError(f"{path}: shapes that do not fit: {shapes}")
    attention, loss = data.get("attention_mask"), data.get("loss_mask")
    attention = np.ones_like(sequences) if attention is None else attention
    uids = (data.get("metadata") or {}).get("uids") if isinstance(data.get("metadata"), dict) else None
    groups = {uid: place for place, uid in enumerate(dict.fromkeys(uids))} if isinstance(uids, list) else {}
    found = []
    for place in range(rows):
        where = f"{path}, row {place}"
        real = _mask(where, "attention_mask", attention[place], sequences.shape[1])
        length = int(_mask(where, "response_mask", response[place], width).nonzero()[0].max(initial=-1)) + 1
        before = sequences.shape[1] - width
        prompt = _ids(where, "sequences", sequences[place, :before][real[:before]])
        answer = _ids(where, "sequences", sequences[place, before : before + length])
        both = [_logp(where, name, data[name][place, :length], length) for name in names]
        mask = _mask(where, "loss_mask", (response if loss is None else loss)[place, :length], length)
        group = groups.get(uids[place]) if isinstance(uids, list) and len(uids) == rows else None
        found.append(Scored(np.concatenate([prompt, answer]), len(prompt), both[0], both[1], mask, group=group))
    return found


# settings


def _agreed(one: Settings, other: Settings) -> Settings:
    """What two rows or files say alike; None where they do not."""
    if one == other:
        return one
    kept = {name: getattr(one, name) for name in _SETTINGS if getattr(one, name) == getattr(other, name)}
    return Settings(**kept)


def checked(path: Path, settings: Settings) -> Settings:
    """``settings``, where they are such as a sampler can have; else ``MantissaError``, which ``path`` begins."""
    checks = {
        "temperature": number(settings.temperature or 0.0, 0.0),
        "healthy_size": number(settings.healthy_size or 0.0, 0.0),
        "top_p": number(settings.top_p or 0.0, 0.0, 1.0),
        "top_k": number(settings.top_k or 0, -1, 2**31, whole=True),
        "renormalised": isinstance(settings.renormalised, bool),
        "experts": isinstance(settings.experts, bool | None),
        **{name: getattr(settings, name) is None or isinstance(getattr(settings, name), str)
           for name in ("logprobs_mode", "rollout_format", "learner_format")},
    }  # fmt: skip
    for name, good in checks.items():
        if not good:
            raise MantissaError(f"{path}: {name} is {_describe(getattr(settings, name))}, which no sampling has")
    return settings
