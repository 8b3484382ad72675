"""A decode step of a dense decoder's copies as one compiled call (``kernels/step.c``), where its parts are compiled.

It computes what ``Decoder.hidden`` does with the same kernels, call by call and to the bit. What it saves is their
entry from Python, some 300 times a step: of one row of SmolLM2 in bf16 a quarter of the time. Kernels that are traced,
or of another family, go through Python, and so do a cache in a format of its own and mixtures of experts.

Legend: B rows, E hidden size, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mantissa.kernels import Kernels, NativeKernels, Planned, SimulatedKernels, compiled
from mantissa.kernels.compiled import HELD, KINDS, Laid, library
from mantissa.kernels.cpu import activation_scheme
from mantissa.kernels.exact.bf16 import ExactBf16Kernels
from mantissa.kernels.exact.kernels import ExactKernels
from mantissa.model.decoder import MLP, Attention, Decoder, Layer, Norm, Projection
from mantissa.precision import BlockScaled, NumberFormat

_POINTER, _SIZE, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_uint, ctypes.c_float


class _Projection(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias", "scales")),
        *((name, _SIZE) for name in ("inputs", "outputs", "kind", "scheme", "per")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("norm", "query_norm", "key_norm", "second_norm")),
        ("qkv", _Projection * 3), ("o", _Projection), ("gate_up", _Projection * 2), ("down", _Projection),
    )  # fmt: skip


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", _POINTER), ("norm", _POINTER),
        *((name, _SIZE) for name in (
            "count", "hidden", "heads", "kv_heads", "size", "inner", "bytes", "format", "shared"
        )),
        ("eps", _FLOAT), ("scale", _FLOAT),
    )  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "out", "cos", "sin", "cache", "at", "seen")),
        ("rows", _SIZE), ("length", _SIZE), ("threads", _NUMBER), ("team", _POINTER), ("room", _POINTER),
    )  # fmt: skip


class _NotCompiledError(Exception):
    """Some part of the step has no compiled form here."""


class Step:
    """A step of ``decoder``, which holds copies made for ``kernels``; of the weights that it holds now."""

    def __init__(self, decoder: Decoder, kernels: NativeKernels | SimulatedKernels) -> None:
        self._kernels, self._dtype = kernels, kernels.dtype
        self._plan = kernels.plan if isinstance(kernels, Planned) else None
        self._kept: list[Tensor] = []  # what the tables below point to
        config = self._config = decoder.config
        self._embedding = decoder.model.embed_tokens.weight
        layers = [self._layer(layer) for layer in decoder.model.layers if isinstance(layer, Layer)]
        self._layers = (_Layer * len(layers))(*layers)
        self._decoder = _Decoder(
            ctypes.addressof(self._layers), self._norm(decoder.model.norm), len(layers), config.hidden_size,
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size,
            self._dtype.itemsize, compiled.FORMATS.index(kernels.format), compiled.SHARED, config.rms_norm_eps,
            config.head_dim**-0.5,
        )  # fmt: skip
        self._room = torch.empty(0, dtype=torch.uint8)

    def __call__(
        self, tokens_B: Tensor, positions_B: Tensor, seen_B: Tensor, cache: Sequence[int], length: int
    ) -> Tensor:
        """Final hidden states B,E of ``tokens_B`` at ``positions_B``, each of which sees ``seen_B`` positions. int64.

        ``cache``: where the keys and values of each layer lie (slots, key heads, ``length``, D), into which those of
        ``tokens_B`` are written.
        """
        cos_BD, sin_BD = self._config.rotary_angles(positions_B)
        x_BE = self._kernels.embedding(tokens_B, self._embedding).contiguous()  # becomes the residual stream
        positions_B, seen_B = positions_B.contiguous(), seen_B.contiguous()
        rows, at, threads = len(x_BE), ctypes.addressof(self._decoder), torch.get_num_threads()
        if self._plan is not None:
            self._plan.check_threads(threads)
            self._plan.check_length(length)
        needed = library().mantissa_room(at, rows) + compiled.LINE
        if len(self._room) < needed:
            self._room = torch.empty(needed, dtype=torch.uint8)
        out_BE, pointers = torch.empty_like(x_BE), (_POINTER * len(cache))(*cache)
        step = _Step(
            x_BE.data_ptr(), out_BE.data_ptr(), cos_BD.data_ptr(), sin_BD.data_ptr(), ctypes.addressof(pointers),
            positions_B.data_ptr(), seen_B.data_ptr(), rows, length, threads,
            compiled.team() if threads > 1 else None, -(-self._room.data_ptr() // compiled.LINE) * compiled.LINE,
        )  # fmt: skip
        if library().mantissa_step(at, ctypes.addressof(step)):
            raise MemoryError(f"a decode step of {rows} rows")
        return out_BE

    @property
    def holds(self) -> bool:
        """Whether the kernels compute as they did when it was made: exact ones may have been given another plan."""
        return self._plan is None or (isinstance(self._kernels, Planned) and self._kernels.plan is self._plan)

    def _layer(self, layer: Layer) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if not isinstance(mlp, MLP):
            raise _NotCompiledError
        norms = [self._norm(layer.input_layernorm), None, None, self._norm(layer.post_attention_layernorm)]
        if attention.qk_norm:
            norms[1:3] = self._norm(attention.q_norm), self._norm(attention.k_norm)
        qkv, gate_up = (_Projection * 3)(*self._alike(attention)), (_Projection * 2)(*self._alike(mlp))
        return _Layer(*norms, qkv, self._projection(attention.o_proj), gate_up, self._projection(mlp.down_proj))

    def _norm(self, norm: Norm) -> int:
        return self._pointer(self._kernels.weight(norm.weight))

    def _alike(self, block: Attention | MLP) -> list[_Projection]:
        """The projections of one input: a joined one stands first, and nothing in the places of the rest."""
        joined = block.joined
        if joined is None:
            return [self._projection(part) for part in block.alike]
        return [self._product(joined.weight, joined.bias, block.alike[0].name)]

    def _projection(self, part: Projection) -> _Projection:
        weight = part.weight if part.scales is None else BlockScaled(part.weight, part.scales)
        return self._product(weight, part.bias, part.name)

    def _product(self, weight: Tensor | BlockScaled, bias: Tensor | None, name: str) -> _Projection:
        codes, scales = (weight, None) if isinstance(weight, Tensor) else (weight.codes, weight.scales)
        if isinstance(codes, nn.Parameter):
            codes = codes.data
        kernels, scheme = self._kernels, -1
        if not isinstance(codes, Laid) or (codes.kind not in KINDS[:3]) != (self._dtype is torch.bfloat16):
            raise _NotCompiledError
        if kernels.fp8 is not None and kernels.fp8.quantizes(name) and codes.kind != "int8":
            activations = activation_scheme(kernels.fp8)
            scheme = -1 if activations is None else compiled.SCALED.index(activations)
        if bias is not None:
            bias = kernels.weight(bias).float()
        return _Projection(
            self._pointer(codes.held), None if bias is None else self._pointer(bias),
            None if scales is None else self._pointer(scales), codes.shape[1], codes.shape[0], HELD.index(codes.kind),
            scheme, codes.per,
        )  # fmt: skip

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()


def compiled_step(decoder: Decoder, kernels: Kernels, kv_format: NumberFormat) -> Step | None:
    """The step of these copies; None where a part of it is not compiled, or not measured to be the faster."""
    known = type(kernels) in (NativeKernels, SimulatedKernels, ExactBf16Kernels, ExactKernels)
    if not known or not isinstance(kernels, NativeKernels | SimulatedKernels) or kernels.format is not kv_format:
        return None
    head = torch.empty(0, decoder.config.head_dim, dtype=kernels.dtype)
    widths = decoder.config.hidden_size, decoder.config.intermediate_size, decoder.config.head_dim // 2
    with torch.no_grad():
        by_rows = all(kernels.compiles(head, width) for width in widths)
        if not by_rows or not kernels.compiles(head, part="attention"):
            return None
        try:
            return Step(decoder, kernels)
        except _NotCompiledError:
            return None
