"""Log-probs in files that are nobody's that is known: columns found by obvious names, and every one of them said.

A name is obvious where programs use it for one side and no other (``OBVIOUS``). Where two columns may be one side, or
where a name may be either side's (``EITHER``), nothing is guessed: the error says which, and ``--map SIDE=NAME``
decides. Three layouts become rows of the plain schema, which its own reader checks:

| layout | one column holds |
|---|---|
| a row a sequence (jsonl, json, parquet, csv) | lists; an OpenAI-style ``logprobs`` object is a list too |
| a row a token (the same) | numbers, and a column that tells sequences apart |
| a table (npz, a dictionary of tensors as .pt) | B,R arrays, padded, and a mask |

Without token ids each position has an id of its own, so that no test takes two tokens for the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.base.errors import MantissaError, nearest
from mantissa.base.readers.json import ROW, parse_json

Row = Mapping[str, Any]


class Part(StrEnum):
    """What a column is of. ``TOKENS``: prompt and response. ``MASK``: of the response, or of all tokens where log-probs
    are; ``ATTENTION``: of prompt and response, where they are padded. ``SEQUENCE``, ``POSITION``: of a row a token."""

    LEARNER = "learner"
    ROLLOUT = "rollout"
    TOKENS = "tokens"
    PROMPT = "prompt"
    RESPONSE = "response"
    MASK = "mask"
    ATTENTION = "attention"
    PROMPT_MASK = "prompt_mask"
    PROMPT_LENGTH = "prompt_length"
    GROUP = "group"
    SEQUENCE = "sequence"
    POSITION = "position"


OBVIOUS: dict[Part, tuple[str, ...]] = {
    Part.LEARNER: (
        "learner_logp", "learner_logps", "learner_logprobs", "learner_log_probs", "old_log_probs", "old_logprobs",
        "old_logps", "old_per_token_logps", "trainer_logprobs", "prev_logprobs", "action_log_probs", "actor_log_probs",
        "train_logprobs", "training_logprobs", "policy_logprobs", "policy_log_probs",
    ),
    Part.ROLLOUT: (
        "rollout_logp", "rollout_logps", "rollout_logprobs", "rollout_log_probs", "vllm_logprobs", "vllm_log_probs",
        "sglang_logprobs", "sampling_per_token_logps", "sampling_logps", "sampling_logprobs", "inference_logprobs",
        "generation_logprobs", "sampler_logprobs", "behavior_logprobs", "completion_logprobs",
    ),
    Part.TOKENS: ("tokens", "token_ids", "input_ids", "sequences", "token", "token_id"),
    Part.PROMPT: ("prompt_ids", "prompts", "prompt_token_ids"),
    Part.RESPONSE: ("response_ids", "completion_ids", "responses", "completion_token_ids", "response_token_ids"),
    Part.MASK: ("mask", "response_mask", "completion_mask", "loss_mask", "action_mask"),
    Part.ATTENTION: ("attention_mask",),
    Part.PROMPT_MASK: ("prompt_mask",),
    Part.PROMPT_LENGTH: ("prompt_length", "prompt_len"),
    Part.GROUP: ("group", "group_id", "uid"),
    Part.SEQUENCE: ("sequence", "sequence_id", "seq_id", "sample_id", "sample", "rollout_id"),
    Part.POSITION: ("position", "pos", "token_index"),
}  # fmt: skip
EITHER = ("logprobs", "log_probs", "logps", "logp", "logprob", "log_prob", "per_token_logps", "token_logprobs")
ANSWERS = "choices"  # of an engine's answers, as OpenAI's interface has them
_SCALAR = (int, float)  # a token's log-prob in a row of its own
# Whose one-sided files hold these, and how that program records both sides.
_TRL = "in TRL: mantissa.dropin.trl.record_logps(trainer, FOLDER) before trainer.train()"
_VERL = (
    "in verl: VERL_USE_EXTERNAL_MODULES=mantissa.launch.verl_logps MANTISSA_LOGPS=FOLDER, with "
    "actor_rollout_ref.rollout.calculate_log_probs=True"
)
_PRIME = "in prime-rl: enable_token_export = true under [trainer]"
_ANY = "in another trainer: mantissa.doctor.record.write_batch (docs/integrations.md)"
_HOW = {
    "old_per_token_logps": _TRL, "sampling_per_token_logps": _TRL, "old_log_probs": _VERL, "rollout_log_probs": _VERL,
    "inference_logprobs": _PRIME, "trainer_logprobs": _PRIME, "completion_logprobs": _PRIME,
    "generation_logprobs": "in NeMo-RL: train_data_stepN.jsonl of its log_dir holds both",
    "action_log_probs": "in SkyRL: trainer.dump_data_batch=true generator.sampling_params.logprobs=0",
}  # fmt: skip


def parse_mapping(text: str) -> dict[str, str]:
    """``SIDE=NAME,...`` as a dictionary; ``MantissaError`` for anything else."""
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        side, equals, name = (each.strip() for each in part.partition("="))
        if not (equals and side and name) or side in found:
            raise MantissaError(f"--map {part}: expected SIDE=NAME, each side once, as learner=old_logprobs")
        found[side] = name
    return found


def has_sides(names: Iterable[str]) -> bool:
    """Whether columns are log-probs rather than figures of steps."""
    return not {*OBVIOUS[Part.LEARNER], *OBVIOUS[Part.ROLLOUT], *EITHER, ANSWERS}.isdisjoint(names)


def mapped(where: object, columns: Sequence[str], names: Mapping[str, str]) -> dict[Part, str]:
    """Which column is which part: ``names`` first, the others by obvious names.

    ``MantissaError`` where two columns may be one part, where one may be either side's, and where a side is missing.
    """
    found = {_part(side): name for side, name in names.items()}
    for part, name in found.items():
        if name not in columns:
            raise MantissaError(f"{where}: --map {part}={name}: no such column{nearest(name, columns)}")
    for part, obvious in OBVIOUS.items():
        there = [name for name in obvious if name in columns and name not in found.values()]
        if part in found or not there:
            continue
        if len(there) > 1:
            raise MantissaError(
                f"{where}: {' and '.join(there)} may each be {part}'s; say which: --map {part}={there[0]}"
            )
        found[part] = there[0]
    _both(where, columns, found)
    return found


def _part(side: str) -> Part:
    if side not in set(Part):
        raise MantissaError(f"--map {side}: expected one of {', '.join(Part)}{nearest(side, list(Part))}")
    return Part(side)


def _both(where: object, columns: Sequence[str], found: Mapping[Part, str]) -> None:
    """Raise unless both sides are there; say what may be the missing one, or how it is recorded."""
    missing = [side for side in (Part.LEARNER, Part.ROLLOUT) if side not in found]
    if not missing:
        return
    either = [name for name in EITHER if name in columns and name not in found.values()]
    if either:
        which = f"{missing[0]}={either[0]}" if len(missing) == 1 else f"rollout={either[0]},learner=NAME"
        raise MantissaError(f"{where}: {' and '.join(either)} may be either side's; say whose: --map {which}")
    if len(missing) == 2 and ANSWERS in columns:
        raise MantissaError(one_side(where, {Part.ROLLOUT: ANSWERS}))
    if len(missing) == 2:
        there = ", ".join(sorted(columns)[:12])[:300]
        raise MantissaError(
            f"{where}: no log-probs by their names ({there}); say which: --map learner=NAME,rollout=NAME"
        )
    raise MantissaError(one_side(where, found))


def one_side(where: object, found: Mapping[Part, str]) -> str:
    """What is missing, and how both sides are recorded where the one was."""
    side = Part.LEARNER if Part.LEARNER in found else Part.ROLLOUT
    other = Part.ROLLOUT if side is Part.LEARNER else Part.LEARNER
    how = _HOW.get(found[side], f"{_TRL}; {_VERL}; {_ANY}")
    return f"{where} holds the {side}'s log-probs only ({found[side]}); the {other}'s are missing. Record both: {how}"


def said(found: Mapping[Part, str]) -> str:
    """The mapping, for whoever reads the verdict."""
    by_parts = ", ".join(f"{part} = {name}" for part, name in found.items())
    return f"columns: {by_parts}" + ("" if {Part.TOKENS, Part.RESPONSE} & found.keys() else "; no token ids")


# a row a sequence, or a token


def plain_rows(path: Path, rows: Iterable[Row], names: Mapping[str, str]) -> tuple[str, Iterator[dict[str, Any]]]:
    """What was mapped, and the rows as those of the plain schema. All rows must have the first one's columns."""
    rows = iter(rows)
    first = next(rows, None)
    if not isinstance(first, Mapping):
        raise MantissaError(f"{path}: expected rows with columns, got {type(first).__name__}")
    if "logprobs" in first and _is_openai(first["logprobs"]) and "rollout" not in names:
        names = {**names, "rollout": "logprobs"}  # only an engine writes such an object
    found = mapped(path, list(map(str, first)), names)
    every = itertools.chain([first], rows)
    values = [_value(first.get(found[side])) for side in (Part.LEARNER, Part.ROLLOUT)]
    by_token = all(isinstance(value, _SCALAR) for value in values)
    return said(found), (_of_tokens if by_token else _of_sequences)(path, every, found)


def _is_openai(value: Any) -> bool:
    return isinstance(value, Mapping) and bool({"content", "token_logprobs"} & value.keys())


def _value(value: Any) -> Any:
    """A cell: a list within a text, a number within a text, OpenAI's object as a list, anything else as it is."""
    if isinstance(value, str):
        try:
            value = parse_json(value, ROW)
        except ValueError:
            return value
    if _is_openai(value):
        content = value.get("content")
        return [each.get("logprob") for each in content] if isinstance(content, list) else value["token_logprobs"]
    return value


def _of_sequences(path: Path, rows: Iterable[Row], found: Mapping[Part, str]) -> Iterator[dict[str, Any]]:
    groups: dict[str, int] = {}
    for place, row in enumerate(rows, start=1):
        where = f"{path}, row {place}"
        cells = {part: _value(row[name]) for part, name in found.items() if row.get(name) is not None}
        for side in (Part.LEARNER, Part.ROLLOUT):
            if side not in cells:
                raise MantissaError(f"{where}: no {found[side]}; leave the row out")
            if not hasattr(cells[side], "__len__") or isinstance(cells[side], str):
                raise MantissaError(f"{where}: {found[side]} is no list of log-probs")
        yield _plain(where, cells, groups, place)


def _plain(where: str, cells: Mapping[Part, Any], groups: dict[str, int], place: int) -> dict[str, Any]:
    """One sequence in the plain schema."""
    learner, rollout = (list(cells[side]) for side in (Part.LEARNER, Part.ROLLOUT))
    if len(learner) != len(rollout):
        raise MantissaError(f"{where}: {len(rollout)} log-probs of the rollout and {len(learner)} of the learner")
    count = len(learner)
    prompt, response = (_list(where, part, cells.get(part)) for part in (Part.PROMPT, Part.RESPONSE))
    tokens = _list(where, Part.TOKENS, cells.get(Part.TOKENS))
    if response is not None:
        tokens = [*(prompt or []), *response]
    mask = cells.get(Part.MASK)
    if tokens is None:
        tokens = list(range(place * count, (place + 1) * count))  # no id stands twice
    before = len(tokens) - count
    if before < 0:
        raise MantissaError(f"{where}: {count} log-probs of {len(tokens)} tokens")
    if mask is not None and len(mask) == len(tokens) and before:
        mask = mask[before:]
    row: dict[str, Any] = {"tokens": tokens, "prompt_length": before, "rollout_logp": rollout, "learner_logp": learner}
    row |= {} if mask is None else {"mask": [bool(each) for each in mask]}
    start, given = before, cells.get(Part.PROMPT_LENGTH)
    if given is not None:
        start = int(given)
    elif before == 0 and mask is not None and any(mask):  # of all tokens: the prompt ends where the mask begins
        start = list(map(bool, mask)).index(True)
    if start != before and (before or not 0 <= start <= count):
        raise MantissaError(f"{where}: a prompt of {start} tokens, and {count} log-probs of {len(tokens)} tokens")
    if start != before:
        row |= {name: each[start:] for name, each in row.items() if name in ("rollout_logp", "learner_logp", "mask")}
        row["prompt_length"] = start
    if Part.GROUP in cells:
        row["group"] = groups.setdefault(str(cells[Part.GROUP]), len(groups))
    return row


def _list(where: str, part: Part, value: Any) -> list[Any] | None:
    if value is None:
        return None
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise MantissaError(f"{where}: {part} holds {type(value).__name__}; expected a list of token ids")
    return list(value)


def _of_tokens(path: Path, rows: Iterable[Row], found: Mapping[Part, str]) -> Iterator[dict[str, Any]]:
    """Rows of one token each, brought together by their sequence."""
    if Part.SEQUENCE not in found:
        raise MantissaError(f"{path}: a row a token, and no column that tells sequences apart: --map sequence=NAME")
    whole: dict[str, list[dict[Part, Any]]] = {}
    for place, row in enumerate(rows, start=1):
        cells = {part: _value(row.get(name)) for part, name in found.items()}
        if cells[Part.SEQUENCE] is None:
            raise MantissaError(f"{path}, row {place}: no {found[Part.SEQUENCE]}")
        whole.setdefault(str(cells[Part.SEQUENCE]), []).append(cells)
    groups: dict[str, int] = {}
    for place, (name, tokens) in enumerate(whole.items(), start=1):
        where = f"{path}, sequence {name[:40]}"
        if Part.POSITION in found:
            if not all(isinstance(each[Part.POSITION], _SCALAR) for each in tokens):
                raise MantissaError(f"{where}: {found[Part.POSITION]} is no number")
            tokens = sorted(tokens, key=lambda each: each[Part.POSITION])
        sides = (Part.LEARNER, Part.ROLLOUT, Part.MASK)
        cells = {part: [each[part] for each in tokens] for part in sides if part in found}
        one = Part.TOKENS if Part.TOKENS in found else Part.RESPONSE
        cells |= {Part.RESPONSE: [each[one] for each in tokens]} if one in found else {}
        cells |= {Part.GROUP: tokens[0][Part.GROUP]} if Part.GROUP in found else {}
        yield _plain(where, cells, groups, place)


# a table


def table_rows(path: Path, data: Row, names: Mapping[str, str]) -> tuple[str, Iterator[dict[str, Any]]]:
    """A batch of arrays as rows of the plain schema; ``data``: B,R arrays, or lists of B rows."""
    columns = {str(name): each for name, each in data.items() if hasattr(each, "__len__") and not isinstance(each, str)}
    found = mapped(path, list(columns), names)
    sides = {part: columns[name] for part, name in found.items()}
    if not all(isinstance(sides[side], np.ndarray) and sides[side].ndim == 2 for side in (Part.LEARNER, Part.ROLLOUT)):
        rows = len(sides[Part.LEARNER])
        lists = {name: each for name, each in columns.items() if len(each) == rows}
        return plain_rows(path, ({name: each[n] for name, each in lists.items()} for n in range(rows)), names)
    shape = sides[Part.LEARNER].shape
    if sides[Part.ROLLOUT].shape != shape:
        raise MantissaError(
            f"{path}: {found[Part.ROLLOUT]} is {sides[Part.ROLLOUT].shape}, {found[Part.LEARNER]} {shape}"
        )
    if not {Part.MASK, Part.ATTENTION} & found.keys():
        raise MantissaError(f"{path}: padded rows and no mask: which positions are real? --map mask=NAME")
    for part in (Part.MASK, Part.ATTENTION, Part.PROMPT, Part.PROMPT_MASK, Part.RESPONSE, Part.TOKENS):
        if part in sides and (np.ndim(sides[part]) != 2 or len(sides[part]) != shape[0]):
            raise MantissaError(f"{path}: {found[part]} is {np.shape(sides[part])}; expected {shape[0]} rows")
    return said(found), _of_table(path, sides, shape)


def _of_table(path: Path, sides: Mapping[Part, Any], shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    rows, width = shape
    groups: dict[str, int] = {}
    for n in range(rows):
        where = f"{path}, row {n}"
        attention = sides[Part.ATTENTION][n] != 0 if Part.ATTENTION in sides else None
        mask = sides[Part.MASK][n][-width:] != 0 if Part.MASK in sides else None
        if (attention is not None and len(attention) < width) or (mask is not None and len(mask) != width):
            raise MantissaError(f"{where}: a mask that is shorter than its {width} log-probs")
        real = attention[-width:] if attention is not None else mask
        assert real is not None
        length = int(real.nonzero()[0].max(initial=-1)) + 1
        if not length:
            continue
        cells: dict[Part, Any] = {side: sides[side][n, :length] for side in (Part.LEARNER, Part.ROLLOUT)}
        cells[Part.MASK] = (mask if mask is not None else real)[:length]
        cells |= _ids(sides, n, width, length, attention)
        if Part.GROUP in sides and len(sides[Part.GROUP]) == rows:
            cells[Part.GROUP] = sides[Part.GROUP][n]
        row = _plain(where, {part: _listed(each) for part, each in cells.items()}, groups, n + 1)
        yield row


def _ids(sides: Mapping[Part, Any], n: int, width: int, length: int, attention: Any) -> dict[Part, Any]:
    """The ids of one row, its padding left out; the prompt's by its own mask, or by the attention's beginning."""
    if Part.RESPONSE not in sides:
        if Part.TOKENS not in sides or sides[Part.TOKENS].shape[1] < width:
            return {}
        whole = sides[Part.TOKENS][n]
        prompt, response = whole[: len(whole) - width], whole[len(whole) - width :]
    else:
        response = sides[Part.RESPONSE][n]
        prompt = sides[Part.PROMPT][n] if Part.PROMPT in sides else np.empty(0, dtype=np.int64)
    if Part.PROMPT_MASK in sides and len(prompt) == sides[Part.PROMPT_MASK].shape[1]:
        prompt = prompt[sides[Part.PROMPT_MASK][n] != 0]
    elif attention is not None and len(attention) == len(prompt) + width:
        prompt = prompt[attention[: len(prompt)]]
    return {Part.PROMPT: prompt, Part.RESPONSE: response[:length]}


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
