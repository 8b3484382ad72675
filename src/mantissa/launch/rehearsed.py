"""What a rehearsal on verl learned: that its weights moved, arrived in the rollout, and are what the checkpoint holds.

The first is seen in the checkpoints. The others are seen in the tokens of the last step, which the gate wrote down with
the log-probs of both sides: the policy of the checkpoint before that step must score them as both sides did, and nearer
than the policy before it. The formats leave a distance in either case; weights that never came turn the two around.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.base.errors import RankError
from mantissa.base.readers.safetensors import read_tensors
from mantissa.doctor.dump import Scored
from mantissa.doctor.readers import read_dump

_SEQUENCES = 32


def policy_of(folder: Path, step: int) -> Path:
    """The Hugging Face folder in verl's checkpoint after ``step``."""
    return folder / f"global_step_{step}" / "actor" / "huggingface"


def learned_lines(folder: Path, model: Path, first: int, last: int) -> tuple[str, ...]:
    """What the steps after ``first`` to ``last`` learned, in words. ``model``: what step 1 began with.

    Raises ``RankError`` where no weight moved, or where the rollout of the last step, or its learner, did not have the
    weights of the checkpoint before it.
    """
    before, after = policy_of(folder, first) if first else model, policy_of(folder, last)
    missing = next((each for each in (before, after) if not list(each.glob("*.safetensors"))), None)
    if missing is not None:
        return (f"what it learned is not known: no safetensors in {missing}",)
    return _moved(before, after), _arrived(folder, model, last)


def _moved(before: Path, after: Path) -> str:
    old, new = _tensors(before), _tensors(after)
    shared = sorted(old.keys() & new.keys())
    apart = [float((old[name].float() - new[name].to(old[name].dtype).float()).abs().max()) for name in shared]
    if not any(apart):
        raise RankError(
            f"the job learned nothing: every weight in {after} is what the job began with. Say a higher optimizer.lr, "
            "or a task on which answers to one prompt differ in reward"
        )
    moved = sum(each > 0 for each in apart)
    return f"weights moved: {moved} of {len(shared)} tensors, by {max(apart):.2g} at most"


def _tensors(folder: Path) -> dict[str, Any]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in read_tensors(file).items()}


def _arrived(folder: Path, model: Path, last: int) -> str:
    rows, newest, older = folder / "looked_at" / f"step-{last}.jsonl", policy_of(folder, last - 1), model
    if last > 2 and policy_of(folder, last - 2).is_dir():
        older = policy_of(folder, last - 2)
    if not (rows.is_file() and newest.is_dir() and older.is_dir()):
        return "weights arrived: not known, for the last two checkpoints and what the gate saw are not all there"
    dump = read_dump(rows)
    sequences, temperature = dump.sequences[:_SEQUENCES], dump.settings.temperature or 1.0
    now, then = (_score(each, sequences, temperature) for each in (newest, older))
    rollout, learner = (_distance(sequences, now, side) for side in ("rollout_logp", "learner_logp"))
    stale = _distance(sequences, then, "rollout_logp")
    for side, found in (("rollout", rollout), ("learner", learner)):
        if not found < stale:
            raise RankError(
                f"the {side} of step {last} did not have the weights of checkpoint {last - 1}: its log-probs are "
                f"{found:.2g} nats from that policy's, and the rollout's {stale:.2g} from those of the policy before it"
            )
    return (
        f"weights arrived: checkpoint {last - 1} scores what step {last} sampled within {rollout:.2g} nats of the "
        f"rollout and {learner:.2g} of the learner; the policy before it within {stale:.2g} of the rollout"
    )


def _score(policy: Path, sequences: Sequence[Scored], temperature: float) -> list[np.ndarray]:
    """transformers' log-probs of each response, in fp32 [R]."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for each in sequences:
        tokens = torch.from_numpy(each.tokens)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, each.prompt_length - 1 : -1] / temperature
        logps = torch.log_softmax(logits, -1).gather(1, tokens[each.prompt_length :, None])[:, 0]
        found.append(logps.double().numpy())
    return found


def _distance(sequences: Sequence[Scored], logps: Sequence[np.ndarray], side: str) -> float:
    """The root of the mean square of a side's difference from ``logps`` over all sampled tokens, in nats."""
    pairs = zip(sequences, logps, strict=True)
    apart = np.concatenate([(getattr(each, side) - found)[each.mask] for each, found in pairs])
    return float(np.sqrt(np.nanmean(apart**2)))
