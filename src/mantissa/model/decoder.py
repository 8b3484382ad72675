"""One decoder definition for the Llama, Qwen2 and Qwen3 families, used by the learner and by the rollout alike.

In their MoE variants some feed-forward blocks are mixtures of experts (``experts.py``).

Legend: B rows, T positions, E hidden size, H query heads, K key/value heads, D head size, V vocabulary.

The module holds weights and knows their order; what an operation computes, and in which precision, is the ``Kernels``
passed in. How a position sees the others is the ``Attend`` passed in: the learner's full causal attention, or a cache.
So the two policies share every line but those two arguments, and any difference between their numbers is the
kernels' own. Parameter names are Hugging Face's: ``state_dict()`` is the checkpoint. ``policy_weights`` are the numbers
that the policy multiplies: with low-rank adapters (``lora.py``) not the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from mantissa.base.ranks import Ranks, shard
from mantissa.kernels import Kernels, Traced
from mantissa.model.config import ExpertsShape, LoraShape, ModelConfig
from mantissa.model.experts import Mixture, Route, Router, mixed, quiet
from mantissa.precision import BlockScaled

Outputs = TypeVar("Outputs")
MATRICES = ("lora_A", "lora_B")  # of an adapter, by name


class Attend(Protocol):
    """How queries of layer ``layer`` see keys and values: q as B,H,T,D and k, v as B,K,T,D give an output like q."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Projection(nn.Module):
    """Weight and bias of a linear map; the kernels compute it.

    ``name``: its name in the decoder, by which an fp8 policy knows it. ``scales``: those of a weight held as 8-bit
    codes, in a policy that does not train; None where the weight is an ordinary tensor.
    """

    name: str = ""
    scales: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.register_buffer("scales", None, persistent=False)

    def forward(self, x: Tensor, kernels: Kernels) -> Tensor:
        weight = self.weight if self.scales is None else BlockScaled(self.weight, self.scales)
        return kernels.linear(x, weight, self.bias, self.name)


def merge(weight_FE: Tensor, a_RE: Tensor, b_FR: Tensor, scale: float) -> Tensor:
    """W + scale * B A in fp32: the one place that computes it, for the learner, the rollout and the export."""
    return torch.addmm(weight_FE, b_FR, a_RE, alpha=scale)


class AdaptedProjection(Projection):
    """A projection with adapters: the kernels see the merged weight as a master."""

    def __init__(self, plain: Projection, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.name = plain.weight, plain.bias, plain.name
        self.register_buffer("scales", None, persistent=False)
        outputs, inputs = plain.weight.shape
        self.scale = scale
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device=plain.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank, device=plain.weight.device))

    def merged(self) -> Tensor:
        """The fp32 weight that this projection stands for; F,E, differentiable in the adapters."""
        return merge(self.weight, self.lora_A, self.lora_B, self.scale)

    def forward(self, x: Tensor, kernels: Kernels) -> Tensor:
        return kernels.linear(x, self.merged(), self.bias, self.name)


@dataclass(frozen=True)
class Joined:
    """The weights of several projections of one input, in the layout of their one product (``CopiedPolicy`` makes it).

    ``widths``: output features of each, in order.
    """

    weight: Tensor | BlockScaled
    bias: Tensor | None
    widths: tuple[int, ...]


def _project(x: Tensor, parts: Sequence[Projection], joined: Joined | None, kernels: Kernels) -> Sequence[Tensor]:
    """``x`` through each of ``parts``; by one product where they are ``joined``."""
    if joined is None:
        return [part(x, kernels) for part in parts]
    return kernels.linear(x, joined.weight, joined.bias, parts[0].name).split(joined.widths, -1)


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, kernels: Kernels) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, y: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """The residual stream x + y, and its norm; ``y`` None: nothing has been added yet."""
        return (x, self(x, kernels)) if y is None else kernels.add_norm(x, y, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; Qwen3 normalises each query and key head first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = Projection(config.hidden_size, width, config.qkv_bias)
        self.k_proj = Projection(config.hidden_size, kv_width, config.qkv_bias)
        self.v_proj = Projection(config.hidden_size, kv_width, config.qkv_bias)
        self.o_proj = Projection(width, config.hidden_size, config.o_bias)
        if config.qk_norm:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.joined: Joined | None = None

    @property
    def alike(self) -> tuple[Projection, ...]:
        """The projections of one input, which may be joined."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(self, x_BTE: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend, kernels: Kernels) -> Tensor:
        heads = (*x_BTE.shape[:-1], -1, self.head_dim)
        if self.joined is not None and not self.qk_norm:  # queries and keys lie side by side: turned by one call
            qkv = kernels.linear(x_BTE, self.joined.weight, self.joined.bias, self.q_proj.name).view(heads)
            queries, keys = (width // self.head_dim for width in self.joined.widths[:2])
            turned, v = qkv.transpose(1, 2).split((queries + keys, keys), 1)
            q, k = kernels.rotate(turned, cos, sin).split((queries, keys), 1)
        else:
            q, k, v = (part.view(heads) for part in _project(x_BTE, self.alike, self.joined, kernels))
            if self.qk_norm:
                q, k = self.q_norm(q, kernels), self.k_norm(k, kernels)
            q, k = kernels.rotate(q.transpose(1, 2), cos, sin), kernels.rotate(k.transpose(1, 2), cos, sin)
            v = v.transpose(1, 2)
        out_BHTD = attend(layer, q, k, v)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2), kernels)


class MLP(nn.Module):
    """SwiGLU feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Projection(hidden, inner, bias)
        self.up_proj = Projection(hidden, inner, bias)
        self.down_proj = Projection(inner, hidden, bias)
        self.joined: Joined | None = None

    @property
    def alike(self) -> tuple[Projection, ...]:
        """The projections of one input, which may be joined."""
        return self.gate_proj, self.up_proj

    def forward(self, x_BTE: Tensor, kernels: Kernels) -> Tensor:
        return self.down_proj(kernels.swiglu(*_project(x_BTE, self.alike, self.joined, kernels)), kernels)


class SparseMLP(nn.Module):
    """A mixture of experts in place of an MLP; see ``experts.py``. ``number``: of the model's mixtures, from 0."""

    def __init__(self, hidden: int, shape: ExpertsShape, number: int) -> None:
        super().__init__()
        self.number, self.mixture = number, Mixture(shape.num_experts_per_tok, shape.norm_topk_prob)
        self.gate = Router(hidden, shape.num_experts)
        self.experts = nn.ModuleList(MLP(hidden, shape.moe_intermediate_size, False) for _ in range(shape.num_experts))
        self.shared = shape.shared_expert_intermediate_size > 0
        if self.shared:
            self.shared_expert = MLP(hidden, shape.shared_expert_intermediate_size, False)
            self.shared_expert_gate = Router(hidden, 1)

    def forward(self, x_BTE: Tensor, route: Route | None, kernels: Kernels) -> Tensor:
        probs_NX = torch.softmax(kernels.router(x_BTE, self.gate.weight), dim=-1).flatten(0, -2)
        routing = self.mixture.own(probs_NX) if route is None else route(self.number, self.mixture, probs_NX)
        inside, x_NE = quiet(kernels), x_BTE.flatten(0, -2)
        total_NE = mixed(x_NE, routing, self.experts, inside)
        if self.shared:
            open_N = inside.sigmoid(inside.linear(x_NE, self.shared_expert_gate.weight)).squeeze(-1)
            total_NE = inside.add(total_NE, inside.scale(self.shared_expert(x_NE, inside), open_N.float()))
        out_BTE = total_NE.view(x_BTE.shape)
        if isinstance(kernels, Traced):
            kernels.note("experts", out_BTE)
        return out_BTE


class Layer(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x)).

    The second sum is left to the next norm, for a kernel may compute both at once: in and out go the stream and what
    has yet to be added to it.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, sparse = config.hidden_size, config.sparse_layers
        self.input_layernorm = Norm(hidden, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(hidden, config.rms_norm_eps)
        self.mlp: MLP | SparseMLP = MLP(hidden, config.intermediate_size, config.mlp_bias)
        if config.experts is not None and layer in sparse:
            self.mlp = SparseMLP(hidden, config.experts, sparse.index(layer))

    def forward(
        self,
        x_BTE: Tensor,
        added_BTE: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        layer: int,
        attend: Attend,
        route: Route | None,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor]:
        x_BTE, normed_BTE = self.input_layernorm.of_sum(x_BTE, added_BTE, kernels)
        mixed_BTE = self.self_attn(normed_BTE, cos, sin, layer, attend, kernels)
        x_BTE, normed_BTE = self.post_attention_layernorm.of_sum(x_BTE, mixed_BTE, kernels)
        if isinstance(self.mlp, SparseMLP):
            added_BTE = self.mlp(normed_BTE, route, kernels)
        else:
            added_BTE = self.mlp(normed_BTE, kernels)
        warned = added_BTE.requires_grad and added_BTE._is_view()  # FSDP2 warns of a module's view
        return x_BTE, added_BTE.clone() if warned else added_BTE


class Backbone(nn.Module):
    """Embedding, layers and final norm; named ``model`` in a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model. Parameters are fp32 masters in the learner, rounded copies in a rollout engine."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.lora: LoraShape | None = None  # set where adapters were attached (``lora.attach``)
        self.padding_row: int | None = None  # a token whose embedding learns nothing, as Hugging Face's padding_idx
        self.packed_head: Tensor | None = None  # a tied head in its product's layout, beside the embedding
        self.model = Backbone(config)
        self.lm_head = None if config.tie_word_embeddings else Projection(config.hidden_size, config.vocab_size, False)
        for name, module in self.named_modules():
            if isinstance(module, Projection):
                module.name = name

    def initialize(self, generator: torch.Generator | None = None) -> Decoder:
        """Fill the weights: norms 1, biases 0, matrices normal with ``initializer_range``. Returns self."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                elif name.endswith("bias"):
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, self.config.initializer_range, generator=generator)
        return self

    @property
    def projections(self) -> list[str]:
        """The names of its linear maps."""
        return [name for name, module in self.named_modules() if isinstance(module, Projection)]

    @property
    def head_weight(self) -> Tensor:
        """The output projection, V by E: its own, or the embedding table where the two are tied."""
        if self.packed_head is not None:
            return self.packed_head
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden(
        self,
        tokens_BT: Tensor,
        kernels: Kernels,
        positions_BT: Tensor,
        attend: Attend,
        route: Route | None = None,
    ) -> Tensor:
        """Final hidden states B,T,E of ``tokens_BT`` at ``positions_BT`` (int64), seeing others through ``attend``.

        ``route``: how positions (in the order of B,T) choose experts, where the model has some; None: as it does.
        """
        cos, sin = self.config.rotary_angles(positions_BT)
        x_BTE = kernels.embedding(tokens_BT, self.model.embed_tokens.weight)
        if self.padding_row is not None and x_BTE.requires_grad:
            x_BTE = torch.where((tokens_BT == self.padding_row).unsqueeze(-1), x_BTE.detach(), x_BTE)
        added_BTE: Tensor | None = None
        for index, layer in enumerate(self.model.layers):
            x_BTE, added_BTE = layer(x_BTE, added_BTE, cos, sin, index, attend, route, kernels)
        return self.model.norm.of_sum(x_BTE, added_BTE, kernels)[1]

    def forward(self, tokens_BT: Tensor, kernels: Kernels) -> Tensor:
        """Final hidden states of whole sequences, right-padded: what follows a position never reaches it."""
        positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).unsqueeze(0)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return kernels.causal_attention(q, k, v)

        return self.hidden(tokens_BT, kernels, positions_BT, attend)

    def within(self, work: Callable[[], Outputs]) -> Outputs:
        """Call ``work``, which uses this decoder's parts; returns the tensors it returns.

        One call from outside, whatever is used inside: where the weights are sharded (FSDP2) it is this method at
        which those of no layer are gathered, and by its results that the backward knows when to gather them again.
        """
        return work()

    def logits(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """Logits (fp32) of hidden states of any leading shape."""
        return kernels.logits(hidden, self.head_weight)


def adapter_parameters(decoder: nn.Module) -> dict[str, nn.Parameter]:
    """A and B of every adapter, by name; empty where there are none."""
    return {name: p for name, p in decoder.named_parameters() if name.rpartition(".")[2] in MATRICES}


def base_parameters(decoder: nn.Module) -> dict[str, nn.Parameter]:
    """The decoder's parameters less its adapters: Hugging Face's names."""
    return {name: p for name, p in decoder.named_parameters() if name.rpartition(".")[2] not in MATRICES}


def trained_parameters(decoder: nn.Module) -> dict[str, nn.Parameter]:
    """What RL moves, and a checkpoint holds: the adapters where there are some, else every parameter."""
    return adapter_parameters(decoder) or base_parameters(decoder)


def policy_weights(decoder: Decoder) -> Mapping[str, Tensor]:
    """The fp32 weights that the policy multiplies, by Hugging Face's names: masters, adapters merged in.

    Where there are adapters the mapping merges a matrix anew each time it is asked for, so that one is held at a time.
    """
    weights = {name: parameter.detach() for name, parameter in base_parameters(decoder).items()}
    return weights if decoder.lora is None else _Merged(decoder, weights)


class _Merged(Mapping[str, Tensor]):
    def __init__(self, decoder: Decoder, weights: dict[str, Tensor]) -> None:
        self._weights = weights
        self._adapted = {
            f"{name}.weight": module
            for name, module in decoder.named_modules()
            if isinstance(module, AdaptedProjection)
        }

    def __getitem__(self, name: str) -> Tensor:
        module = self._adapted.get(name)
        if module is None:
            return self._weights[name]
        with torch.no_grad():
            return module.merged()

    def __contains__(self, name: object) -> bool:
        return name in self._weights  # the inherited one would merge to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def place(model: Decoder, device: torch.device, ranks: Ranks) -> Decoder:
    """The learner's model, whole on ``device`` or with a slice of each tensor there. Before its optimiser is made.

    A layer is gathered for its forward and again for its backward; what belongs to no layer (embedding, last norm,
    head) likewise around ``Decoder.within``.
    """
    if not ranks.sharded:
        return model.to(device)
    from torch.distributed.fsdp import register_fsdp_forward_method

    shard((*model.model.layers, model), device, ranks)
    register_fsdp_forward_method(model, "within")
    return model
