"""What runs inside vLLM's worker process: says which numbers the worker computes with, for our process to compare.

Answers are dictionaries of plain values: a server turns anything else into text.

vLLM keeps matrices in forms of its own: query, key and value in one, and on a CPU packed for a library that does not
give them back (the parameter is then empty). So a matrix is read by what it does. Multiplied by the unit vectors it
returns its columns, and exactly: each sum holds one product by 1 and else zeros. What is read is therefore what is
multiplied in the next forward, and not a copy that nobody uses any more.

Nothing here imports vLLM: it is found by name and mixed into vLLM's own worker class.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EXTENSION = "mantissa.rollout.vllm_worker.WeightReader"
_UNITS = 1024  # unit vectors multiplied at a time


def digest(tensor: Tensor) -> str:
    """Dtype, shape and a hash of a tensor's bits; -0 counts as 0, which a sum with zeros turns it into."""
    bits = (tensor.detach().cpu() + 0).contiguous().view(torch.uint8).numpy()
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {tuple(tensor.shape)} {hashlib.blake2b(bits.data, digest_size=16).hexdigest()}"


class WeightReader:
    """Methods of vLLM's worker, called by name. ``model_runner`` is the worker's own."""

    model_runner: Any
    _mark = ""

    def mantissa_facts(self) -> dict[str, str]:
        """What the worker holds to, as it says itself."""
        config = self.model_runner.model_config
        facts = {
            "dtype": config.dtype,
            "head_dtype": config.head_dtype,
            "kv_cache": self.model_runner.kv_cache_dtype,
            "logprobs_mode": config.logprobs_mode,
            "quantization": config.quantization,
            "release": getattr(sys.modules.get("vllm"), "__version__", "unknown"),
            "folder": config.model,
            "max_length": config.max_model_len,
        }
        return {name: str(value).removeprefix("torch.") for name, value in facts.items()}

    def mantissa_mark(self, mark: str | None = None) -> dict[str, str]:
        """The mark that was last given; empty in a worker that was started since."""
        if mark is not None:
            self._mark = mark
        return {"mark": self._mark}

    def mantissa_follow(self, owner: int) -> None:
        """End vLLM's processes with the one that started them, by its id: killed, it could not end them itself."""
        core, began = os.getppid(), _began(owner)

        def watch() -> None:
            while _began(owner) == began:
                time.sleep(0.5)
            if core != owner and os.getppid() == core:  # else this process is the core itself
                os.kill(core, signal.SIGKILL)
            os._exit(1)

        if began:
            threading.Thread(target=watch, name="mantissa-follow", daemon=True).start()

    def mantissa_memory(self) -> dict[str, int]:
        """Bytes of the device that are free, whoever holds the others."""
        return {"free": torch.cuda.mem_get_info()[0]}

    def mantissa_weights(self) -> dict[str, str]:
        """The digest of every weight that the worker computes with, by its name in a Hugging Face folder."""
        with torch.inference_mode():
            return {name: digest(tensor) for name, tensor in _weights(self.model_runner.model)}


def _began(process: int) -> str:
    """When a living process began, in Linux's ticks since the start of the machine; empty where it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and values; what vLLM has fused is taken apart."""
    fused = getattr(model, "packed_modules_mapping", {})
    dtype = model.model.embed_tokens.weight.dtype
    done = {"lm_head.weight"}
    for name, module in model.named_modules():
        if not hasattr(module, "quant_method") or name == "lm_head":
            continue
        done |= {f"{name}.weight", f"{name}.bias"}
        if hasattr(module, "org_vocab_size"):
            yield f"{name}.weight", module.weight[: module.org_vocab_size]
            continue
        parent, _, last = name.rpartition(".")
        parts = [f"{parent}.{part}" for part in fused.get(last, (last,))]
        sizes = list(module.output_sizes) if len(parts) > 1 else None
        matrix_EF = _multiplied(lambda x_NF, layer=module: layer.quant_method.apply(layer, x_NF), module, dtype)
        yield from _apart(parts, sizes, matrix_EF, "weight")
        if getattr(module, "bias", None) is not None:
            yield from _apart(parts, sizes, module.bias, "bias")
    yield "lm_head.weight", _multiplied(model.compute_logits, model.model.embed_tokens, dtype)
    for name, parameter in model.named_parameters():
        if name not in done:
            yield name, parameter


def _multiplied(product: Any, layer: Any, dtype: torch.dtype) -> Tensor:
    """The matrix of a product, (outputs, inputs), from what it makes of the unit vectors."""
    size = getattr(layer, "embedding_dim", None) or layer.input_size
    device = next(layer.parameters()).device
    columns = []
    for start in range(0, size, _UNITS):
        count = min(_UNITS, size - start)
        units_NF = torch.zeros(count, size, dtype=dtype, device=device)
        units_NF[torch.arange(count), torch.arange(start, start + count)] = 1
        columns.append(product(units_NF).to(dtype))  # a head in fp32 returns values of the weights' own dtype
    return torch.cat(columns).T


def _apart(names: list[str], sizes: list[int] | None, tensor: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
    parts = [tensor] if sizes is None else tensor.split(sizes)
    for name, part in zip(names, parts, strict=True):
        yield f"{name}.{kind}", part
