"""Other frameworks' batches in the plain schema, one file a batch: for hooks in trainers that save no log-probs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mantissa.base.files import disk_errors, write_atomically

Table = Any  # a tensor of rows: torch's


@dataclass(frozen=True)
class ScoredBatch:
    """What a trainer compares. ``prompts``: B lists of token ids, empty where they are not known.

    ``responses``, ``mask``, ``rollout``, ``learner``: B,R tensors, padded on the right; ``mask``: 1 at tokens that the
    policy sampled. ``settings``: what every row shares (``temperature``, ``framework``, ...); None: not known.
    """

    prompts: Sequence[Sequence[int]]
    responses: Table
    mask: Table
    rollout: Table
    learner: Table
    settings: Mapping[str, Any]


def write_batch(path: str | Path, batch: ScoredBatch) -> None:
    """One jsonl file, a row a sequence, whole or not at all. Rows of one prompt are a group; without prompts there are
    no groups."""
    path, lines = Path(path), []
    first = zlib.crc32(path.name.encode()) << 20  # another batch has other weights, so its groups are others
    groups = {tuple(prompt): first + place for place, prompt in enumerate(batch.prompts) if len(prompt)}
    settings = {name: value for name, value in batch.settings.items() if value is not None}
    tables = (batch.responses, batch.mask.bool(), batch.rollout.float(), batch.learner.float())
    columns = [each.detach().cpu() for each in tables]
    for prompt, tokens, real, x, y in zip(batch.prompts, *columns, strict=True):
        length = int(real.nonzero().max()) + 1 if bool(real.any()) else 0
        if length:
            row = {"tokens": [*prompt, *tokens[:length].tolist()], "prompt_length": len(prompt),
                   "rollout_logp": _finite(x[:length]), "learner_logp": _finite(y[:length]),
                   "mask": real[:length].tolist()}  # fmt: skip
            row |= {"group": groups[tuple(prompt)]} if len(prompt) else {}
            lines.append(json.dumps(row | settings, allow_nan=False) + "\n")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(lines))


def _finite(values: Table) -> list[float | None]:
    return [value if value - value == 0 else None for value in values.tolist()]
