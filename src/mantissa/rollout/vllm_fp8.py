"""How a rollout in fp8 is handed to vLLM: as a checkpoint that is quantised already, with codes and scales of ours.

vLLM reads a block-quantised checkpoint as it stands: for each matrix its e4m3 codes and one fp32 scale for each
128 x 128 of them (``NAME.weight``, ``NAME.weight_scale_inv``), what is not quantised by name. So it never rounds a
weight itself: the learner's rule (``precision/blocks.py``) has made the codes, once, from the fp32 master.

Activations it quantises itself, at each product: e4m3, one fp32 scale for each 1 x 128, by the same rule but for blocks
that are nearly zero (below 1e-10 on a GPU), which share a least scale. Only kernels that do it where it can be looked
at are accepted; others leave activations in half, or give a whole row one scale, which is another computation.

vLLM multiplies q, k and v in one product, and gate and up in another, so what shares a product is quantised together
or not at all. Its kernels take whole blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.kernels.native import NativeKernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import E4M3, SQUARE, BlockScaled, Fp8Policy, quantize
from mantissa.precision.fp8 import BLOCK

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
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
