"""What runs inside vLLM's worker process: says which numbers the worker computes with, for our process to compare.

Answers are dictionaries of plain values: a server turns anything else into text.

vLLM keeps matrices in forms of its own: query, key and value in one, and on a CPU packed for a library that does not
give them back (the parameter is then empty). So a matrix is read by what it does. Multiplied by the unit vectors it
returns its columns, and exactly: each sum holds one product by 1 and else zeros. What is read is therefore what is
multiplied in the next forward, and not a copy that nobody uses any more.

A matrix in fp8 comes back from its product rounded to half, so it is read where its kernel reads it, codes and scales
bit for bit; and what the product makes of the unit vectors must be their values, to that rounding.

Nothing here imports vLLM: it is found by name and mixed into vLLM's own worker class.

How a rollout in fp8 is handed to vLLM: as a checkpoint that is quantised already, with codes and scales of ours.

vLLM reads a block-quantised checkpoint as it stands: for each matrix its e4m3 codes and one fp32 scale for each
128 x 128 of them (``NAME.weight``, ``NAME.weight_scale_inv``), what is not quantised by name. So it never rounds a
weight itself: the learner's rule (``precision/schemes.py``) has made the codes, once, from the fp32 master.

Activations it quantises itself, at each product: e4m3, one fp32 scale for each 1 x 128, by the same rule but for blocks
that are nearly zero (below 1e-10 on a GPU), which share a least scale. Only kernels that do it where it can be looked
at are accepted; others leave activations in half, or give a whole row one scale, which is another computation.

vLLM multiplies q, k and v in one product, and gate and up in another, so what shares a product is quantised together
or not at all. Its kernels take whole blocks.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.base.tensors import digest, write_tensors
from mantissa.kernels.native import NativeKernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import E4M3, SQUARE, BlockScaled, Fp8Policy, quantize
from mantissa.precision.schemes import BLOCK

EXTENSION = "mantissa.rollout.vllm.worker.WeightReader"
FP8_CACHE = "fp8_e4m3 of scale 1"  # how an fp8 cache is named that is filled with keys and values as they are
FP8_PRODUCTS = "e4m3 in 1x128 and e4m3 in 128x128"  # activations and weights, a scale in fp32 for each block
_UNITS = 1024  # unit vectors multiplied at a time
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_HEAD = "lm_head.weight"
_SCALES = ".scales"  # of a copy's codes, after the weight's name


class CodeKernels(NativeKernels):
    """Native kernels whose copies of weights are codes on any device. Nothing is computed with them."""

    def copied(self, master: Tensor, layer: str = "") -> Tensor | BlockScaled:
        if self.fp8 is None or not self.fp8.quantizes(layer):
            return self.weight(master.detach())
        return quantize(master.detach(), E4M3, SQUARE, self.fp8.power_of_two, layer)


def coded(weights: Mapping[str, Tensor], fp8: Fp8Policy) -> dict[str, Tensor]:
    """Weights as a ``CopiedPolicy`` with ``CodeKernels`` keeps them."""
    made = {}
    for name, weight in weights.items():
        made[name] = weight
        if weight.ndim == 2 and fp8.quantizes(name.removesuffix(".weight")):
            scaled = quantize(weight, E4M3, SQUARE, fp8.power_of_two, name)
            made |= {name: scaled.codes, f"{name}{_SCALES}": scaled.scales}
    return made


def file_name(name: str) -> str:
    """What a copy's tensor is called in the folder."""
    weight = name.removesuffix(_SCALES)
    return name if weight == name else f"{weight}_scale_inv"


def quantization_config(config: ModelConfig, fp8: Fp8Policy) -> dict[str, Any]:
    """``quantization_config`` of the folder's ``config.json``."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [*(name for name in _layers(config) if not fp8.quantizes(name)), "lm_head"],
    }


def check_layers(config: ModelConfig, fp8: Fp8Policy) -> None:
    """Refuse what vLLM cannot hold in fp8: parts of one product apart, layers that are not whole blocks."""
    if fp8.power_of_two:
        raise MantissaError(
            "precision.fp8.scale=power_of_two: vLLM gives activations fp32 scales, or quantises the weights anew; set "
            "scale=fp32, or rollout.engine=native"
        )
    shapes = _layers(config)
    for name, shape in shapes.items():
        parent, _, last = name.rpartition(".")
        for part in next((parts for parts in _TOGETHER if last in parts), ()):
            if fp8.quantizes(name) != fp8.quantizes(f"{parent}.{part}"):
                raise MantissaError(
                    f"precision.fp8.exclude: {parent} has {last} and {part} apart, which vLLM multiplies in one "
                    "product; exclude both or neither, or set rollout.engine=native"
                )
        if fp8.quantizes(name) and any(size % BLOCK for size in shape):
            raise MantissaError(
                f"precision.rollout=fp8: vLLM's fp8 products take whole blocks of {BLOCK}, and {name} is {shape[0]} by "
                f"{shape[1]}; put {last} into precision.fp8.exclude (with what shares its product), or set "
                "rollout.engine=native"
            )


def device_problem(device: torch.device) -> str | None:
    """Why a vLLM on ``device`` cannot multiply fp8 by fp8 with a scale for each 1 x 128; None where it may."""
    if device.type == "cpu":
        return "on a CPU vLLM leaves activations in half, or gives a whole row of them one scale (and wants AMX)"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"{torch.cuda.get_device_name(device)} has no fp8 products of that kind (they came with Hopper)"
    return None


def check_device(device: torch.device) -> None:
    """Refuse a device where vLLM would compute something else than was asked for."""
    if problem := device_problem(device):
        raise MantissaError(
            f"precision.rollout=fp8 with rollout.engine=vllm: {problem}; choose bf16 or fp16, or rollout.engine=native"
        )


def _layers(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear maps inside the decoder's layers."""
    with torch.device("meta"):
        decoder = Decoder(config)
    names = [name for name in decoder.projections if "layers" in name.split(".")]
    shapes = {name: decoder.get_parameter(f"{name}.weight").shape for name in names}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items()}


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
            "kv_cache": self._cache_kind(),
            "queries": self._query_kind(),
            "products": _product_kinds(self.model_runner.model),
            "product_kernels": ", ".join(sorted({type(k).__name__ for _, k in _in_fp8(self.model_runner.model)})),
            "logprobs_mode": config.logprobs_mode,
            "quantization": config.quantization,
            "release": getattr(sys.modules.get("vllm"), "__version__", "unknown"),
            "folder": config.model,
            "max_length": config.max_model_len,
        }
        return {name: str(value).removeprefix("torch.") for name, value in facts.items()}

    def _cache_kind(self) -> str:
        """The cache's dtype; where it holds 8-bit codes, each layer's own word on which, and their scales."""
        dtype = self.model_runner.kv_cache_dtype
        if dtype != torch.uint8:
            return str(dtype)
        layers = [module for module in self.model_runner.model.modules() if hasattr(module, "kv_cache_dtype")]
        scales = {layer.kv_cache_dtype: set[float]() for layer in layers}
        for layer in layers:
            scales[layer.kv_cache_dtype] |= {layer._k_scale_float, layer._v_scale_float}
        return ", ".join(f"{kind} of scale {'/'.join(f'{s:g}' for s in sorted(of))}" for kind, of in scales.items())

    def _query_kind(self) -> str:
        """What attention multiplies an fp8 cache by: a GPU's kernels want queries in fp8 too."""
        quantised = any(getattr(module, "query_quant", None) for module in self.model_runner.model.modules())
        return "fp8_e4m3" if quantised else str(self.model_runner.model_config.dtype)

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
            held = weights(self.model_runner.model)
            return {name: found if isinstance(found, str) else str(digest(found)) for name, found in held}

    def mantissa_write(self, names: list[str], path: str) -> dict[str, int]:
        """Write the weights of these names, as they are computed with, into a safetensors file of this machine."""
        wanted = set(names)
        with torch.inference_mode():
            held = weights(self.model_runner.model, wanted)
            found = {name: each for name, each in held if name in wanted and isinstance(each, Tensor)}
        write_tensors(Path(path), found)
        return {"written": len(found)}


def _began(process: int) -> str:
    """When a living process began, in Linux's ticks since the start of the machine; empty where it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _in_fp8(model: Any) -> list[tuple[Any, Any]]:
    """Layers whose products are fp8's, with the kernel that vLLM chose for each."""
    layers = [layer for layer in model.modules() if hasattr(getattr(layer, "quant_method", None), "fp8_linear")]
    return [(layer, layer.quant_method.fp8_linear) for layer in layers]


def _product_kinds(model: Any) -> str:
    """Which operands the fp8 products have; empty where there are none."""
    return ", ".join(sorted({_product_kind(kernel) for _, kernel in _in_fp8(model)}))


def _product_kind(kernel: Any) -> str:
    """Of a kernel that quantises activations before its product, in the one place that vLLM's own have in common."""
    name, quantiser = type(kernel).__name__, getattr(kernel, "quant_fp8", None)
    plain = next((cls for cls in type(kernel).__mro__ if "apply_weights" in vars(cls)), object)
    if quantiser is None or not kernel.apply_input_quant or plain.__name__ != "Fp8BlockScaledMMLinearKernel":
        return f"{name}, which takes activations in half"
    if quantiser.static or quantiser.use_ue8m0:
        return f"{name}, whose activations have scales {'of their own' if quantiser.static else 'of powers of two'}"
    rows, columns = ("x".join(map(str, of)) for of in (quantiser.group_shape, kernel.weight_group_shape))
    return f"e4m3 in {rows} and e4m3 in {columns}"


def weights(model: Any, wanted: Set[str] | None = None) -> Iterator[tuple[str, Tensor | str]]:
    """Names and values, or what is wrong with them; what vLLM has fused is taken apart. ``wanted``: of ``model``'s
    modules, only those that hold one of these names are read."""
    fused = getattr(model, "packed_modules_mapping", {})
    embedding = next(module for module in model.modules() if hasattr(module, "org_vocab_size"))
    dtype, done = embedding.weight.dtype, {_HEAD}
    for name, module in model.named_modules():
        if not hasattr(module, "quant_method") or not hasattr(module, "weight") or name == "lm_head":
            continue
        parent, _, last = name.rpartition(".")
        parts = [f"{parent}.{part}" for part in fused.get(last, (last,))]
        done |= {f"{name}.weight", f"{name}.bias"}
        if wanted is not None and not any(each.startswith(f"{part}.") for part in parts for each in wanted):
            continue
        if hasattr(module, "org_vocab_size"):
            yield f"{name}.weight", module.weight[: module.org_vocab_size]
            continue
        sizes = list(module.output_sizes) if len(parts) > 1 else None
        matrix_EF = _multiplied(lambda x_NF, layer=module: layer.quant_method.apply(layer, x_NF), module, dtype)
        if hasattr(module.quant_method, "fp8_linear"):
            done.add(f"{name}.weight_scale_inv")
            yield from _codes(parts, sizes, matrix_EF, module)
        else:
            yield from _apart(parts, sizes, matrix_EF, "weight")
        if getattr(module, "bias", None) is not None:
            yield from _apart(parts, sizes, module.bias, "bias")
    if wanted is None or _HEAD in wanted:
        yield _HEAD, _multiplied(_head(model), embedding, dtype)
    for name, parameter in model.named_parameters():
        if name not in done and (wanted is None or name in wanted):
            yield name, parameter


def _head(model: Any) -> Any:
    """The product that makes logits: the class's own, for an instance's may leave tokens out (verl's do); where that
    scales or caps them, the matrix's alone."""
    made = getattr(model, "logits_processor", None)
    if getattr(made, "scale", 1.0) == 1.0 and getattr(made, "soft_cap", None) is None:
        return functools.partial(type(model).compute_logits, model)
    head = model.lm_head
    return lambda x_NF: head.quant_method.apply(head, x_NF)[:, : head.org_vocab_size]


def _codes(
    parts: list[str], sizes: list[int] | None, matrix_EF: Tensor, layer: Any
) -> Iterator[tuple[str, Tensor | str]]:
    """Codes and scales as they lie there. ``matrix_EF``: what the layer's product made of the unit vectors."""
    codes, scales = layer.weight, getattr(layer, "weight_scale_inv", None)
    blocks = tuple(-(-size // BLOCK) for size in matrix_EF.shape)
    if codes.shape != matrix_EF.shape or scales is None or scales.shape != blocks:
        yield from ((f"{part}.weight", "another layout") for part in parts)
        return
    spread = scales.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    values_EF = codes.float() * spread[: codes.shape[0], : codes.shape[1]]
    if not torch.allclose(matrix_EF.float(), values_EF, rtol=2.0**-7, atol=2.0**-24):  # a half's rounding, or two
        yield from ((f"{part}.weight", "a product by other values than are stored") for part in parts)
        return
    yield from _apart(parts, sizes, codes, "weight")
    yield from _apart(parts, sizes and [-(-size // BLOCK) for size in sizes], scales, "weight_scale_inv")


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
