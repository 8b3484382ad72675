"""Log-probs of two sides as other frameworks write them, small, and with a healthy gap or a mistake."""

from __future__ import annotations

import json
import pickle
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mantissa.doctor.dump import Dump, Scored, Settings


def healthy(prompts: int = 24, samples: int = 4, length: int = 16, size: float = 0.05, seed: int = 0) -> list[Scored]:
    """Softmax policies with a logit error: x = log p(v), y = log softmax(z + size * e)(v), v drawn from p.

    Samples of a prompt share a context where their tokens so far are alike, as a model's would.
    """
    draw, words = np.random.default_rng(seed), 12
    known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
    made = []
    for group in range(prompts):
        for _ in range(samples):
            tokens, x, y = [], [], []
            for _ in range(length):
                key = (group, *tokens)
                if key not in known:
                    z = draw.normal(0, 2.5, words)
                    both = z, z + size * draw.normal(0, 1, words)
                    known[key] = tuple(each - np.logaddexp.reduce(each) for each in both)  # type: ignore[assignment]
                rollout, learner = known[key]
                token = int(draw.choice(words, p=np.exp(rollout) / np.exp(rollout).sum()))
                tokens.append(token)
                x.append(rollout[token])
                y.append(learner[token])
            made.append(
                Scored(np.array([1, 2, 3, *tokens]), 3, np.array(x), np.array(y), np.ones(length, bool), group=group)
            )
    return made


def dump_of(sequences: Sequence[Scored], **settings: Any) -> Dump:
    return Dump("plain", Path("dump"), list(sequences), Settings(**settings))


def write_plain(path: Path, sequences: Sequence[Scored], **more: Any) -> Path:
    rows = [
        {"tokens": s.tokens.tolist(), "prompt_length": s.prompt_length, "rollout_logp": s.rollout_logp.tolist(),
         "learner_logp": s.learner_logp.tolist(), "mask": s.mask.tolist(), "group": s.group} | more
        for s in sequences
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _padded(rows: Sequence[Sequence[float]], left: bool = False, fill: float = 0) -> torch.Tensor:
    width = max(map(len, rows))
    padded = [[fill] * (width - len(r)) + list(r) if left else list(r) + [fill] * (width - len(r)) for r in rows]
    return torch.tensor(padded)


def write_nemo(path: Path, sequences: Sequence[Scored]) -> Path:
    """train_data_step{n}.jsonl: a batch of one a line, padded right, a log-prob at every token, the first 0."""
    width = max(len(s.tokens) for s in sequences)
    with path.open("w") as file:
        for number, s in enumerate(sequences):
            pad = [0.0] * (width - len(s.tokens))
            full = {name: [0.0] * s.prompt_length + side.tolist() + pad
                    for name, side in (("generation_logprobs", s.rollout_logp),
                                       ("prev_logprobs", s.learner_logp))}  # fmt: skip
            row = {"idx": number, "token_ids": [s.tokens.tolist() + [0] * len(pad)], "input_lengths": [len(s.tokens)],
                   "token_loss_mask": [[0.0] * s.prompt_length + [1.0] * len(s.mask) + pad], "sample_loss_mask": [1.0],
                   "advantages": [[0.0] * width], **{name: [values] for name, values in full.items()}}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    return path


def write_prime(folder: Path, sequences: Sequence[Scored]) -> Path:
    """token_exports/step_N/rank_R.jsonl: one sequence a line, as long as its tokens, null for what is not finite."""
    path = folder / "token_exports" / "step_3" / "rank_0.jsonl"
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        for s in sequences:
            before = [0.0] * s.prompt_length
            row = {"schema_version": 1, "step": 3, "token_ids": s.tokens.tolist(),
                   "position_ids": list(range(len(s.tokens))),
                   "loss_mask": [False] * s.prompt_length + s.mask.tolist(), "entropy": [0.1] * len(s.tokens),
                   "inference_logprobs": before + s.rollout_logp.tolist(),
                   "trainer_logprobs": [None] * s.prompt_length + s.learner_logp.tolist()}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    return folder


def write_slime(folder: Path, sequences: Sequence[Scored]) -> Path:
    """train_data/{id}.pt in format 2, and rollout_data/{id}.pt with the versions, as torch.save writes them."""
    for name in ("train_data", "rollout_data"):
        (folder / name).mkdir(parents=True)
    samples = [
        {"data_parallel_rank": 0, "rollout_position": n, "tokens": torch.tensor(s.tokens),
         "response_lengths": len(s.mask),
         "loss_masks": torch.tensor(s.mask.astype(np.int64)), "rollout_log_probs": torch.tensor(s.rollout_logp).float(),
         "log_probs": torch.tensor(s.learner_logp).float()}
        for n, s in enumerate(sequences)
    ]  # fmt: skip
    torch.save({"format_version": 2, "rollout_id": 7, "samples": samples, "dp_shards": []}, folder / "train_data/7.pt")
    sampled = [{"tokens": s.tokens.tolist(), "response_length": len(s.mask), "weight_versions": ["4", "5"],
                "rollout_log_probs": s.rollout_logp.tolist(), "status": "completed"} for s in sequences]  # fmt: skip
    torch.save({"rollout_id": 7, "samples": sampled}, folder / "rollout_data/7.pt")
    return folder


def write_miles(folder: Path, sequences: Sequence[Scored], cp_size: int = 1) -> Path:
    """train_data/{id}_{rank}.pt, two ranks, each with its sequences' columns."""
    (folder / "train_data").mkdir(parents=True)
    for rank in range(2):
        own = sequences[rank::2]
        columns = {
            "partition": list(range(rank, len(sequences), 2)), "tokens": [torch.tensor(s.tokens) for s in own],
            "response_lengths": [len(s.mask) for s in own], "total_lengths": [len(s.tokens) for s in own],
            "loss_masks": [torch.tensor(s.mask).int() for s in own], "weight_versions": [["4", "5"] for _ in own],
            "rollout_log_probs": [torch.tensor(s.rollout_logp).float() for s in own],
            "log_probs": [torch.tensor(s.learner_logp).float() for s in own], "raw_reward": [0.5] * len(sequences),
        }  # fmt: skip
        content = {"rollout_id": 7, "rank": rank, "rollout_data": columns, "cp_rank": 0, "cp_size": cp_size,
                   "qkv_format": "thd"}  # fmt: skip
        torch.save(content, folder / f"train_data/7_{rank}.pt")
    return folder


def write_skyrl(path: Path, sequences: Sequence[Scored], more: Any = None) -> Path:
    """dumped_data/NAME.pkl: a TrainingInputBatch, whose state is a file of torch.save's for each field.

    ``more``: something beside the uids. The class stands in SkyRL's module for the moment of pickling, with the state
    that SkyRL's own writes.
    """
    module, parent = types.ModuleType("skyrl_train.training_batch"), types.ModuleType("skyrl_train")

    class TrainingInputBatch(dict[str, Any]):
        metadata: Any = None

        def __getstate__(self) -> dict[str, Any]:
            import io

            fields = {}
            for name, value in self.items():
                buffer = io.BytesIO()
                torch.save(value, buffer)
                fields[name] = buffer.getvalue()
            return {"batch_dict": fields, "batch_size": 1, "device": torch.device("cpu"), "metadata": self.metadata}

        def __reduce__(self) -> Any:
            import copyreg

            return copyreg.__newobj__, (type(self),), self.__getstate__(), None, iter(self.items())  # type: ignore[attr-defined]

    TrainingInputBatch.__module__, TrainingInputBatch.__qualname__ = module.__name__, "TrainingInputBatch"
    module.TrainingInputBatch = TrainingInputBatch  # type: ignore[attr-defined]
    prompts = [s.tokens[: s.prompt_length].tolist() for s in sequences]
    answers = [s.tokens[s.prompt_length :].tolist() for s in sequences]
    batch = TrainingInputBatch(
        sequences=torch.cat([_padded(prompts, left=True, fill=9), _padded(answers, fill=9)], 1),
        attention_mask=torch.cat(
            [_padded([[1] * len(p) for p in prompts], left=True), _padded([[1] * len(a) for a in answers])], 1
        ),
        response_mask=_padded([[1] * len(a) for a in answers]),
        loss_mask=_padded([s.mask.astype(float) for s in sequences]),
        rollout_logprobs=_padded([s.rollout_logp for s in sequences]).float(),
        action_log_probs=_padded([s.learner_logp for s in sequences]).float(),
    )  # fmt: skip
    batch.metadata = {"uids": [f"prompt-{s.group}" for s in sequences]} | ({"more": more} if more is not None else {})
    sys.modules |= {parent.__name__: parent, module.__name__: module}
    try:
        path.write_bytes(pickle.dumps(batch))
    finally:
        del sys.modules[parent.__name__], sys.modules[module.__name__]
    return path


@dataclass
class Call:
    """What a pickle runs where somebody lets it: a function and its arguments."""

    function: Any
    arguments: tuple[Any, ...]

    def __reduce__(self) -> Any:
        return self.function, self.arguments
