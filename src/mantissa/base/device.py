"""Which device a run is on, and that it gives the same bits every time."""

from __future__ import annotations

import os
import sys

import torch

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import world_size


def choose_device(name: str) -> torch.device:
    """``auto`` is cuda where there is one; cuda where there is none is an error, never a CPU.

    One of several processes gets a GPU to itself, by its number on this machine.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise MantissaError(f"device={name}: expected auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise MantissaError("device=cuda, but torch sees no CUDA device here; use device=cpu or device=auto")
    if name == "cpu" or world_size() is None:
        return torch.device(name)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank >= torch.cuda.device_count():
        raise MantissaError(
            f"nproc: process {rank + 1} of this machine has no GPU, for torch sees {torch.cuda.device_count()}; lower "
            "nproc, or set device=cpu"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def be_deterministic(device: torch.device) -> None:
    """Ask torch for kernels that give the same bits every time; an operation that has none raises when it is used.

    On CUDA also: half products are accumulated in fp32 throughout (torch lets cuBLAS combine partial sums in half).
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS makes its handle
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(True)
    else:  # the same without importing torch's compiler, which takes longer than all else at a command's start
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # read if it is imported later
        torch.set_deterministic_debug_mode("error")
    # That mode also fills every new tensor with NaN before the operation that made it writes it: a tenth of the time of
    # a simulated step, and no operation here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
