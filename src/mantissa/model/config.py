"""The shape of a decoder: what a Hugging Face ``config.json`` says, reduced to what its families use.

A Hugging Face ``config.json`` to a ``ModelConfig`` and back, refusing what would silently change the numbers.

The file says more than sizes: each family hides biases and norms behind its ``model_type``, and rotary scaling, sliding
windows or quantised weights change what a forward pass computes without changing a tensor's name. So a setting that
transformers would act on and this decoder does not is an error that names it. Dropout is the exception: it acts only
in transformers' training mode, and a policy that learns must be the policy that sampled, so it is never applied here.

What each family's code does (transformers 5):

===========  ==============================  ============================  ==========  =========
model_type   bias on q, k, v                 bias on o                     MLP bias    q/k norm
===========  ==============================  ============================  ==========  =========
llama        ``attention_bias``              ``attention_bias``            mlp_bias    no
qwen2        always                          never                         never       no
qwen3        ``attention_bias``              ``attention_bias``            never       yes
qwen2_moe    ``qkv_bias``                    never                         never       no
qwen3_moe    ``attention_bias``              ``attention_bias``            never       yes
===========  ==============================  ============================  ==========  =========

In the last two some layers' feed-forward block is a mixture of experts (``experts.py``).

Rotary settings have two layouts: ``rope_theta`` beside ``rope_scaling`` (transformers 4), and both inside
``rope_parameters`` (transformers 5, which takes them inside ``rope_scaling`` too). All are read, and what a file says
twice must agree; both layouts are written, so that either version and vLLM read the same.

Without influence on a forward pass, whatever they say, are the keys of generation and tokenizer (``bos_token_id``,
``pad_token_id``, ...), of outputs (``use_cache``, ``output_attentions``, ...), of storage (``dtype``), of new weights
(``initializer_range``), of other heads (``num_labels``, ...) and of other rotary types (``beta_fast``, ...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mantissa.base.bounds import LARGEST_SIZE, MOST_EXPERTS, MOST_LAYERS, SMALLEST_FLOAT, boundary, number
from mantissa.base.config import Config
from mantissa.base.errors import MantissaError, nearest
from mantissa.base.hub import read_object

Family = Literal["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = get_args(Family)
_FAMILIES = f"{', '.join(FAMILIES[:-1])} or {FAMILIES[-1]}"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # what adapters may adapt


class OtherFamilyError(MantissaError):
    """A model of a family, or of a variant of one, that our decoder does not know: transformers' own code may run it.

    A configuration that is damaged, or that nothing here may run, is a plain ``MantissaError``.
    """


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched. ``linear``: all divided by ``factor``. ``llama3``: only the slow ones.

    For ``llama3``, with wavelength w = 2 pi / f and the original context length c: f is kept where
    w < c / high_freq_factor, divided by ``factor`` where w > c / low_freq_factor, and interpolated between.
    Source: the Llama 3.1 release.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class LoraShape:
    """Rank, scale and place of a policy's adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False

    @property
    def scale(self) -> float:
        """What the product B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class ExpertsShape:
    """The feed-forward blocks that are mixtures of experts. Names are Hugging Face's.

    ``norm_topk_prob``: the weights of the chosen experts are divided by their sum. ``decoder_sparse_step``: every so
    many layers one is a mixture, but those of ``mlp_only_layers``. ``shared_expert_intermediate_size``: of the expert
    that every token passes (qwen2_moe); 0: there is none.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_intermediate_size: int = 0

    def has(self, layer: int) -> bool:
        """Whether this layer (from 0) is a mixture."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def parameters(self, hidden: int) -> int:
        """Weights of one such block."""
        routed = self.num_experts * hidden * (3 * self.moe_intermediate_size + 1)
        shared = self.shared_expert_intermediate_size
        return routed + (hidden * (3 * shared + 1) if shared else 0)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. Names are Hugging Face's, so that the file and the code read alike.

    ``origin`` is the ``config.json`` that the shape was read from, kept for the way back: what it says beside the
    fields above it is no number of ours, and is written out again unchanged. It takes no part in equality.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    experts: ExpertsShape | None = None
    origin: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def weights_note(self) -> str:
        """What results must say of where the weights come from, such as a 4-bit grid; '' where there is nothing."""
        note = self.origin.get("weights_note", "")
        return note if isinstance(note, str) else ""

    @property
    def parameters(self) -> int:
        """How many weights a decoder of this shape has."""
        hidden, dim = self.hidden_size, self.head_dim
        queries, keys = self.num_attention_heads * dim, self.num_key_value_heads * dim
        layer = 2 * hidden * (queries + keys) + 2 * hidden
        layer += (queries + 2 * keys) * self.qkv_bias + hidden * self.o_bias + 2 * dim * self.qk_norm
        dense = 3 * hidden * self.intermediate_size + (2 * self.intermediate_size + hidden) * self.mlp_bias
        sparse = len(self.sparse_layers)
        blocks = (self.num_hidden_layers - sparse) * dense
        blocks += 0 if self.experts is None else sparse * self.experts.parameters(hidden)
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + blocks + tables * self.vocab_size * hidden + hidden

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers (from 0) whose feed-forward block is a mixture of experts."""
        experts = self.experts
        return () if experts is None else tuple(i for i in range(self.num_hidden_layers) if experts.has(i))

    def rotary_frequencies(self, device: torch.device) -> Tensor:
        """Angular frequency of each rotary pair, theta^(-2i/D) for i in 0..D/2, after scaling. Shape D/2, fp32."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device=device).float()
        frequencies = 1.0 / (self.rope_theta ** (pairs / self.head_dim))
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        wavelengths = 2 * math.pi / frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        blend = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
        return blend * frequencies + (1 - blend) * frequencies / scaling.factor

    def rotary_angles(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine by which ``positions_N`` (int64, any shape) turn a head's features. fp32, shape N,D."""
        angles_Nd = positions_N.unsqueeze(-1).float() * self.rotary_frequencies(positions_N.device)
        angles_ND = torch.cat((angles_Nd, angles_Nd), dim=-1)
        return angles_ND.cos(), angles_ND.sin()


class FreshModelConfig(Config):
    """The shape of a policy that starts from random weights. Its vocabulary comes from the tokenizer it is given.

    The default has 0.8 million parameters beside its embedding and trains in minutes on four cores.
    """

    family: Literal["llama", "qwen3", "qwen3_moe"] = Field(
        "qwen3",
        description="which published family's definition to use; qwen3 normalises query and key heads, and in "
        "qwen3_moe every feed-forward block is a mixture of experts. A fresh qwen2 is not offered: transformers 5 "
        "replaces the tokenizer of any folder that says qwen2 by Qwen's own",
    )
    hidden_size: int = Field(128, ge=1, description="features of the residual stream")
    layers: int = Field(4, ge=1, le=MOST_LAYERS, description="attention and feed-forward blocks")
    heads: int = Field(4, ge=1, description="query heads")
    kv_heads: int = Field(2, ge=1, description="key/value heads; heads must be a multiple of it")
    head_dim: int = Field(32, ge=2, description="features of one head; even, because rotary positions turn pairs")
    intermediate_size: int = Field(384, ge=1, description="features inside the feed-forward block, or each expert")
    experts: int | None = Field(
        None, ge=2, le=MOST_EXPERTS, description="with qwen3_moe: experts of a feed-forward block; absent: 8"
    )
    experts_per_token: int | None = Field(
        None, ge=1, description="with qwen3_moe: experts that a token passes, the most probable; absent: 2"
    )
    max_positions: int = Field(4096, ge=1, description="longest sequence promised to whoever loads the model")
    rope_theta: float = Field(10000.0, gt=1, description="base of the rotary wavelengths; the longest is 2 pi times it")
    tie_embeddings: bool = Field(True, description="the output projection is the embedding table itself")
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of the first random weights")

    @model_validator(mode="after")
    def _sizes_fit(self) -> FreshModelConfig:
        # pydantic adds the place in the file, as to any ValueError
        if self.heads % self.kv_heads:
            raise MantissaError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; each key/value head serves the "
                "same number of query heads"
            )
        if self.head_dim % 2:
            raise MantissaError(f"head_dim={self.head_dim} is odd; rotary positions need an even one")
        self._experts_fit()
        if self.family == "llama" and self.hidden_size % self.heads:
            raise MantissaError(
                f"hidden_size={self.hidden_size} is not a multiple of heads={self.heads}, which transformers asks of "
                "a llama; change one or choose family qwen3"
            )
        return self

    def _experts_fit(self) -> None:
        shape = self._mixture
        if shape is None:
            if self.experts is not None or self.experts_per_token is not None:
                raise MantissaError(f"experts: a {self.family} has none; choose family qwen3_moe or leave them out")
            return
        if shape.num_experts_per_tok > shape.num_experts:
            raise MantissaError(f"experts_per_token={shape.num_experts_per_tok} of experts={shape.num_experts}")
        if self.layers * shape.num_experts > MOST_EXPERTS:
            raise MantissaError(f"layers times experts: at most {MOST_EXPERTS:,}")

    @property
    def _mixture(self) -> ExpertsShape | None:
        """As qwen3_moe's published models: every layer, the weights of the chosen experts normalised."""
        if self.family != "qwen3_moe":
            return None
        return ExpertsShape(self.experts or 8, self.experts_per_token or 2, self.intermediate_size, norm_topk_prob=True)

    def model(self, vocab_size: int) -> ModelConfig:
        """The decoder's shape for a tokenizer of ``vocab_size`` ids."""
        if vocab_size < 1:
            raise MantissaError(f"vocab_size={vocab_size}: expected at least 1; take it from the tokenizer")
        return ModelConfig(
            self.family, vocab_size, self.hidden_size, self.intermediate_size, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=self.head_dim,
            max_position_embeddings=self.max_positions, rope_theta=self.rope_theta, qk_norm=self.family != "llama",
            tie_word_embeddings=self.tie_embeddings, initializer_range=self.initializer_range, experts=self._mixture,
        )  # fmt: skip


_ORIGINAL = "original_max_position_embeddings"
_DEFAULT_THETA = 10000.0  # what transformers takes where a config names no rope_theta
_QWEN3_HEAD_DIM = 128  # likewise for qwen3 and head_dim
# Settings of other definitions: named here because a file that has them asks for numbers we would not produce. The
# last line names other files, other settings and other names of settings, which transformers would read instead.
_UNSUPPORTED = str.split("""
    quantization_config compression_config
    configuration_files transformers_weights text_config decoder generator attribute_map _rope_type_labels
""")
# Likewise, but of whole definitions, which transformers has code for.
_VARIANTS = str.split("""
    attn_logit_softcapping final_logit_softcapping logit_scale logits_scaling residual_multiplier embedding_multiplier
    attention_multiplier per_layer_config no_rope_layers attention_chunk_size kv_sharing_modes
""")
# Fields of ``ModelConfig`` that a file has under the same name.
_WRITTEN = str.split("""
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings rms_norm_eps rope_theta tie_word_embeddings initializer_range
""")


def read_config(path: Path | str) -> ModelConfig:
    """The decoder's shape from ``config.json``, given the file or its folder.

    Raises ``MantissaError``: file or key missing, a value of the wrong type, or a setting that nothing here runs; and
    ``OtherFamilyError``: a family other than those above, or a variant that this decoder does not implement.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    return parse_config(read_object(file), str(file))


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """``read_config`` on the file's content; ``where`` names it in errors."""
    with boundary(where, f"expected the settings of a model of {_FAMILIES}"):
        return _parsed(Fields(raw, where))


def _parsed(fields: Fields) -> ModelConfig:
    raw = fields.raw
    family = _family(fields)
    _refuse_unsupported(fields)
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    # Only llama may leave this out (its first configs predate grouped queries); elsewhere transformers assumes 32.
    kv_heads = heads if family == "llama" and raw.get("num_key_value_heads") is None else None
    kv_heads = kv_heads or fields.size("num_key_value_heads")
    bias = fields.flag("attention_bias", False) if not family.startswith("qwen2") else False
    qkv_bias = fields.flag("qkv_bias", True) if family == "qwen2_moe" else family == "qwen2" or bias
    theta, scaling = _rotary(fields)
    config = ModelConfig(
        family, fields.size("vocab_size"), hidden, fields.size("intermediate_size"),
        num_hidden_layers=fields.size("num_hidden_layers", MOST_LAYERS), num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=_head_dim(fields, family, hidden, heads),
        max_position_embeddings=fields.size("max_position_embeddings"), rms_norm_eps=fields.positive("rms_norm_eps"),
        rope_theta=theta, rope_scaling=scaling, tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias, o_bias=bias, qk_norm=family.startswith("qwen3"), origin=dict(raw),
        mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
        initializer_range=fields.positive("initializer_range", 0.02), experts=_experts(fields, family),
    )  # fmt: skip
    if heads % config.num_key_value_heads:
        raise fields.error(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if config.head_dim % 2:
        raise fields.error(f"head_dim={config.head_dim} is odd, and rotary positions need an even one")
    return config


def config_fields(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """What ``config.json`` says of a decoder stored in ``dtype`` (torch's name): the inverse of ``parse_config``.

    Fields of ``config.origin`` that carry no number of ours are kept. ``MantissaError`` where the family's definition
    in transformers has no switch for what the config asks (a llama with q/k norms).
    """
    _require_expressible(config)
    fields = {k: v for k, v in config.origin.items() if k not in ("rope_scaling", _ORIGINAL, "_name_or_path")}
    fields |= {name: getattr(config, name) for name in _WRITTEN}
    if config.family == "qwen2_moe":
        fields["qkv_bias"] = config.qkv_bias
    elif config.family != "qwen2":
        fields["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if config.experts is not None:
        shape = asdict(config.experts)
        fields |= {name: list(value) if isinstance(value, tuple) else value for name, value in shape.items()}
        fields.pop("num_local_experts", None)  # another name of num_experts
        if not config.experts.shared_expert_intermediate_size:
            fields.pop("shared_expert_intermediate_size", None)
    scaling = _scaling_fields(config.rope_scaling)
    fields["rope_parameters"] = {"rope_type": "default", **scaling, "rope_theta": config.rope_theta}
    if scaling:
        fields["rope_scaling"] = scaling
    architectures = [f"{config.family.title().replace('_', '')}ForCausalLM"]
    fields.update(architectures=architectures, model_type=config.family, hidden_act="silu")
    fields.update(dtype=dtype, torch_dtype=dtype)
    # Absent would mean 1 and 2 to a llama, whatever its tokenizer says.
    fields.setdefault("bos_token_id", None)
    fields.setdefault("eos_token_id", None)
    return fields


class Fields:
    """Typed reading of a config's keys, with errors that name file, key and value."""

    def __init__(
        self, raw: Mapping[str, Any], where: str, what: str = f"the settings of a model of {_FAMILIES}"
    ) -> None:
        self.raw, self.where, self.what = raw, where, what

    def error(self, message: str) -> MantissaError:
        return MantissaError(f"{self.where}: {message}")

    def other(self, message: str) -> OtherFamilyError:
        return OtherFamilyError(f"{self.where}: {message}")

    def required(self, key: str) -> Any:
        if self.raw.get(key) is None:
            raise self.error(f"{key} is missing; expected {self.what}")
        return self.raw[key]

    def size(self, key: str, most: int = LARGEST_SIZE) -> int:
        value = self.required(key)
        if not number(value, 1, most, whole=True):
            raise self.error(f"{key}={value!r}: expected a whole number of at least 1 and at most {most:,}")
        return int(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = default if default is not None and self.raw.get(key) is None else self.required(key)
        if not number(value, SMALLEST_FLOAT):
            raise self.error(f"{key}={value!r}: expected a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = default if self.raw.get(key) is None else self.raw[key]
        if not isinstance(value, bool):
            raise self.error(f"{key}={value!r}: expected true or false")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.error(f"{key}={value!r}: expected an object")
        return value


def _family(fields: Fields) -> Family:
    name = fields.required("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        refusal = fields.other if isinstance(name, str) else fields.error
        raise refusal(
            f"model_type {name!r} is not supported; expected one of {', '.join(FAMILIES)}{nearest(str(name), FAMILIES)}"
        )
    return next(family for family in FAMILIES if family == name)


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    if fields.raw.get("head_dim") is not None:
        return fields.size("head_dim")
    if family == "qwen3":  # transformers' qwen3_moe has no such default
        return _QWEN3_HEAD_DIM
    if hidden % heads:
        raise fields.error(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}; head_dim is needed")
    return hidden // heads


def _experts(fields: Fields, family: Family) -> ExpertsShape | None:
    """The mixtures' shape; None for a family without."""
    raw = fields.raw
    if not family.endswith("_moe"):
        return None
    if raw.get("num_experts") is None and raw.get("num_local_experts") is not None:  # transformers 5 writes this name
        fields = Fields({**raw, "num_experts": raw["num_local_experts"]}, fields.where)
    elif raw.get("num_local_experts") not in (None, raw.get("num_experts")):
        raise fields.error("num_experts and num_local_experts disagree; remove one")
    if raw.get("output_router_logits"):
        raise fields.error(
            "output_router_logits is true, but no balancing loss of the router is trained here; set false"
        )
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(number(layer, 0, MOST_LAYERS, whole=True) for layer in dense):
        raise fields.error(f"mlp_only_layers={dense!r}: expected a list of layers' numbers from 0")
    shape = ExpertsShape(
        fields.size("num_experts", MOST_EXPERTS), fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"), fields.flag("norm_topk_prob", False),
        1 if raw.get("decoder_sparse_step") is None else fields.size("decoder_sparse_step"), tuple(dense),
        fields.size("shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
    )  # fmt: skip
    if shape.num_experts_per_tok > shape.num_experts:
        raise fields.error(f"num_experts_per_tok={shape.num_experts_per_tok} of num_experts={shape.num_experts}")
    layers = fields.size("num_hidden_layers", MOST_LAYERS)
    if layers * shape.num_experts > MOST_EXPERTS:
        raise fields.error(f"{layers} layers of {shape.num_experts} experts are more than {MOST_EXPERTS:,} together")
    return shape


def _refuse_unsupported(fields: Fields) -> None:
    raw = fields.raw
    if not str(raw.get("model_type")).endswith("_moe"):
        for key in ("num_experts", "num_local_experts"):
            if raw.get(key) is not None:
                raise fields.error(
                    f"{key} is set, and a {raw.get('model_type')} has no experts; did you mean qwen3_moe?"
                )
    for key in (*_UNSUPPORTED, *_VARIANTS):
        if raw.get(key) is not None:
            why = f"{key} is set, which this decoder does not implement; use a plain, unquantised model"
            raise fields.error(why) if key in _UNSUPPORTED else fields.other(why)
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # one function, two names
        refusal = fields.other if isinstance(activation, str) else fields.error
        raise refusal(f"hidden_act {activation!r} is not supported; expected 'silu'")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        raise fields.error(f"pretraining_tp={raw['pretraining_tp']}: only 1 is supported")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise fields.error(f"layer_types={layer_types!r}: expected a list with the kind of each layer")
    other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if other or _slides(raw):
        kinds = f"layer_types has {', '.join(other)}" if other else _WINDOW[raw.get("model_type") == "llama"]
        raise fields.other(f"{kinds}, but only full attention is supported; sliding windows would change the numbers")
    if layer_types and len(layer_types) != raw.get("num_hidden_layers"):
        raise fields.error(f"layer_types has {len(layer_types)} entries for {raw.get('num_hidden_layers')} layers")
    if raw.get("is_causal", True) is not True:
        raise fields.error("is_causal is false: this is an encoder, and only causal language models are supported")
    if "AutoModelForCausalLM" in fields.table("auto_map"):
        raise fields.error("auto_map asks for modelling code of its own, which is never run here; use a plain model")


_WINDOW = ("use_sliding_window is true", "sliding_window is set")


def _slides(raw: Mapping[str, Any]) -> bool:
    """Whether some layer slides its window; absent keys mean what transformers takes for them.

    A llama's forward knows no window, yet its cache (and vLLM) keeps only what ``sliding_window`` says.
    """
    family, asked = raw.get("model_type"), bool(raw.get("use_sliding_window"))
    if family == "llama":
        return raw.get("sliding_window") is not None
    window = raw.get("sliding_window", 4096) is not None
    if family == "qwen3_moe":  # all layers would, whatever layer_types says
        return asked and window
    if raw.get("layer_types") or not asked:
        return False
    first = raw.get("max_window_layers", 28)
    # qwen2_moe slides every second layer before that one, the others all layers from it on
    return first > 0 if family == "qwen2_moe" else window and first < raw.get("num_hidden_layers", 0)


def _rotary(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling, wherever the file says them; what it says twice must agree.

    transformers reads ``rope_parameters`` only where there is no ``rope_scaling``, and a base beside them last.
    """
    tables = {key: table for key in ("rope_scaling", "rope_parameters") if (table := fields.table(key))}
    for key, table in tables.items():
        nested = next((name for name, value in table.items() if isinstance(value, Mapping)), None)
        if nested is not None:  # transformers takes the default for such a llama, and fails on such a qwen3
            raise fields.error(f"{key} has settings for {nested!r} alone; expected one for all layers")
    for table in (fields.raw, *tables.values()):
        if table.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
            raise fields.other(
                "partial_rotary_factor below 1 is not supported; every feature of a head is rotated here"
            )
    base = Fields({"rope_theta": _theta(fields, tables)}, fields.where).positive("rope_theta")
    found = [_scaling(table, fields) for table in tables.values()]
    if len(found) == 2 and found[0] != found[1]:
        raise fields.error("rope_scaling and rope_parameters disagree; remove one")
    return base, found[0] if found else None


def _theta(fields: Fields, tables: Mapping[str, Mapping[str, Any]]) -> Any:
    """The base of the wavelengths. ``tables``: the rotary ones that the file has."""
    of_tables = {key: table["rope_theta"] for key, table in tables.items() if table.get("rope_theta") is not None}
    alone = fields.raw.get("rope_theta")
    known = [] if alone is None else [("rope_theta is", alone)]
    known += [(f"{key} says", value) for key, value in of_tables.items()]
    if "rope_scaling" in tables and alone is None and [*of_tables] == ["rope_parameters"]:
        known.insert(0, ("without one beside it rope_scaling means a rope_theta of", _DEFAULT_THETA))
    first, theta = known[0] if known else ("", _DEFAULT_THETA)
    for other, differing in known[1:]:
        if differing != theta:
            raise fields.error(f"{first} {theta} but {other} {differing}; remove one")
    return theta


def _scaling(table: Mapping[str, Any], fields: Fields) -> RopeScaling | None:
    kind = table.get("rope_type", table.get("type", "default"))
    inner = Fields(table, f"{fields.where}: rotary scaling")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", inner.positive("factor"))
    if kind != "llama3":
        refusal = fields.other if isinstance(kind, str) else fields.error
        raise refusal(f"rotary scaling of type {kind!r} is not supported; expected default, linear or llama3")
    low, high = inner.positive("low_freq_factor"), inner.positive("high_freq_factor")
    if high <= low:
        raise inner.error(f"high_freq_factor={high} must be above low_freq_factor={low}")
    said, outer = table.get(_ORIGINAL), fields.raw.get(_ORIGINAL)  # transformers prefers the one beside the table
    if said is not None and outer is not None and said != outer:
        raise fields.error(f"{_ORIGINAL} is {outer} but the rotary scaling says {said}; remove one")
    original = next((one for one in (said, outer) if one is not None), fields.raw.get("max_position_embeddings"))
    context = Fields({_ORIGINAL: original}, inner.where)
    return RopeScaling("llama3", inner.positive("factor"), low, high, context.size(_ORIGINAL))


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {}
    fields = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return fields
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = {_ORIGINAL: scaling.original_context}
    return fields | {"low_freq_factor": low, "high_freq_factor": high} | original


def _require_expressible(config: ModelConfig) -> None:
    """A folder says family and switches; any other mixture of biases and norms would load as a different model."""
    family = config.family
    checks = (
        ("qk_norm", config.qk_norm == family.startswith("qwen3")),
        ("o_bias", config.o_bias == (config.qkv_bias if not family.startswith("qwen2") else False)),
        ("qkv_bias", config.qkv_bias or family != "qwen2"),
        ("mlp_bias", not config.mlp_bias or family == "llama"),
        ("experts", (config.experts is not None) == family.endswith("_moe")),
    )
    for name, good in checks:
        if not good:
            raise MantissaError(
                f"model: {name}={getattr(config, name)} is not what transformers' {family} does; "
                "change it or the family"
            )
