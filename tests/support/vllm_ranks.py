"""What each process of tests/rollout/real_vllm/test_processes.py does: ``torchrun vllm_ranks.py FOLDER``.

Engines on the real vLLM, one of each process, given the masters whole and in slices; then one of them is spoiled.
Each leaves ``FOLDER/<rank>.pt``.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import Ranks
from mantissa.kernels import resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.model.decoder import place
from mantissa.precision import FP32, PrecisionPolicy
from mantissa.rollout import NativeEngine, Request, SamplingParams, VllmEngine, VllmStart
from mantissa.rollout.vllm.server import WeightFolder
from naive_engine import reference_gaps

SIZES = {"max_position_embeddings": 128, "initializer_range": 0.25, "qk_norm": True, "tie_word_embeddings": True}
CONFIG = ModelConfig("qwen3", 40, 64, 56, 2, 4, 2, 32, **SIZES)
REQUESTS = [Request((5, 6, 7), seed=1, samples=2), Request((9, 2), seed=2, samples=2)]
PARAMS = SamplingParams(max_tokens=10, temperature=0.8)


def model(seed: int) -> Decoder:
    return Decoder(CONFIG).initialize(torch.Generator().manual_seed(seed))


def spoil(real: Any) -> Any:
    """The weights of one process reach its vLLM with one bit changed."""
    name = "model.layers.1.self_attn.k_proj.weight"

    def write(folder: WeightFolder, copies: Any) -> dict[str, str]:
        sent = real(folder, copies)
        changed = dict(copies) | {name: copies[name].clone()}
        changed[name][5, 7] = torch.nextafter(changed[name][5, 7], torch.tensor(9.0))
        real(folder, changed)
        return sent

    return write


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    kernels = rollout_kernels(resolve(PrecisionPolicy(), "cpu"))
    found: dict[str, Any] = {}
    start = VllmStart(CONFIG, FP32, FP32, 4, 64, torch.device("cpu"))
    engine = VllmEngine(start, kernels, ranks=ranks)
    native = NativeEngine(CONFIG, kernels, kv_format=FP32, slots=4, max_length=64)
    for version, kind in enumerate(("ddp", "fsdp2")):
        whole = dict(model(version).named_parameters())
        held = place(model(version), torch.device("cpu"), dataclasses.replace(ranks, kind=kind))  # type: ignore[arg-type]
        engine.sync(dict(held.named_parameters()), version)
        native.sync(whole, version)
        mine = [REQUESTS[ranks.rank]]
        groups = engine.generate(mine, PARAMS, version)
        found[kind] = reference_gaps(native, mine, groups, PARAMS.temperature).tolist()
    if ranks.rank == 1:
        WeightFolder.write = spoil(WeightFolder.write)  # type: ignore[method-assign]
    try:
        engine.sync(dict(model(2).named_parameters()), 2)
    except MantissaError as error:
        found["error"], found["version"] = str(error), engine.version
    engine.close()
    torch.save(found, folder / f"{ranks.rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then


if __name__ == "__main__":
    main()
