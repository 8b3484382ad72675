"""How much disk a lab's cells take: computed from their recipes, before anything is run.

A finished run keeps its newest checkpoints (masters, Adam's moments, a reference), its policy, and a row of samples for
each completion; while it works it has room for one checkpoint more (``files.Reserve``).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from mantissa.base.errors import MantissaError
from mantissa.base.hub import find_model
from mantissa.lab.plan import Cell, Lab, warm_config
from mantissa.model import Decoder, ModelConfig
from mantissa.model.config import read_config
from mantissa.model.gguf import load_gguf
from mantissa.rl.config.run import RunConfig
from mantissa.rl.policy import locate, policy_folder

_BYTES = 1 << 19  # of a run beside all that is counted: report, metrics, tokenizer; of a gap all
_SAMPLE, _TOKEN = 60, 6  # bytes of a completion and of each of its tokens, compressed; measured on the demo's task
_VOCABULARY = {"characters": 32, "bytes": 259}  # of a fresh policy, about


def model_bytes(config: RunConfig) -> tuple[int, int]:
    """Weights of a cell's policy, and how many of them train."""
    source = config.model
    if source.path is None:
        assert source.fresh is not None
        shape: ModelConfig = source.fresh.model(_VOCABULARY[source.tokenizer or "bytes"])
    else:
        found = find_model(locate(policy_folder(source.path), source.lora)[0], weights=False)
        shape = read_config(found) if found.is_dir() else load_gguf(found)[0]
    if source.lora is None:
        return shape.parameters, shape.parameters
    with torch.device("meta"):
        layers = Decoder(shape)
    rank, targets = source.lora.rank or 16, source.lora.targets  # stored adapters: the usual rank
    trained = sum(
        rank * sum(parameter.shape)
        for name, parameter in layers.named_parameters()
        if name.endswith("_proj.weight") and (targets is None or name.split(".")[-2] in targets)
    )
    return shape.parameters, trained


def cell_bytes(cell: Cell) -> tuple[int, int]:
    """Bytes of the cell's folder once it is finished, and of one checkpoint more while it runs."""
    config = cell.config
    if config is None:
        return _BYTES, 0
    weights, trained = model_bytes(config)
    optimizer, policies = config.optimizer, 1 if config.waltz is None else 2
    masters = 4 if optimizer.masters != "bf16_stochastic" else 2
    moments = 2 if optimizer.moments == "8bit" else 8
    reference = 4 if config.algorithm.reference is not None else 0
    checkpoint = policies * trained * (masters + moments + reference)
    kept = min(config.checkpoint.keep, 1 + -(-config.steps // config.checkpoint.every))
    exported = policies * 4 * weights
    if config.model.lora is not None:
        exported += policies * 4 * (trained + (weights if config.model.path is None else 0))
    rollout = config.rollout
    samples = config.steps * rollout.prompts * rollout.samples * (_SAMPLE + _TOKEN * rollout.max_tokens)
    return kept * checkpoint + exported + policies * samples + _BYTES, checkpoint


def needed(lab: Lab, cells: Sequence[Cell], workers: int) -> int:
    """Bytes that these cells will add to the disk: less what is in their folders, with their shared warm starts."""
    total, most, warm = 0, 0, dict[str, int]()
    for cell in cells:
        size, more = cell_bytes(cell)
        there = sum(path.stat().st_size for path in (lab.folder / cell.folder).rglob("*") if path.is_file())
        total, most = total + max(size - there, 0), max(most, more)
        if cell.config is not None and (shared := warm_config(cell.config)) is not None:
            warm[shared.model_dump_json()] = 4 * model_bytes(shared)[0]
    return total + sum(warm.values()) + min(workers, len(cells)) * most


def free(lab: Lab) -> int:
    """Bytes that are free where the lab's runs are, or will be."""
    path = lab.folder.absolute()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free


def size_text(size: float) -> str:
    """Bytes in words."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def require_room(lab: Lab, cells: Sequence[Cell], workers: int) -> None:
    """``MantissaError`` where the disk has less room than these cells take."""
    wanted, there = needed(lab, cells, workers), free(lab)
    if wanted > there:
        raise MantissaError(
            f"lab {lab.name}: its {len(cells)} cells take about {size_text(wanted)} of disk, and {Path(lab.folder)} "
            f"has {size_text(there)}: free some space, run a part with --only, or try all the same with "
            "--no-space-check"
        )
