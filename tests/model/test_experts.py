"""A mixture of experts against transformers' own block and a sum in float64; its choice noted and replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from mantissa.kernels import Kernels, ModelShapes, NativeKernels, SimulatedKernels, learner_kernels, plan_exact, resolve
from mantissa.model import Decoder, LoraShape, ModelConfig, Recorded, Replayed, attach, policy_weights
from mantissa.model.config import ExpertsShape
from mantissa.model.decoder import SparseMLP
from mantissa.model.experts import Routing
from mantissa.precision import BF16, FP16, FP32, NumberFormat, PrecisionPolicy, round_to_format

HIDDEN = 33
SHAPES = {
    "3 of 7, normalised": ExpertsShape(7, 3, 20, norm_topk_prob=True),
    "8 of 64": ExpertsShape(64, 8, 9),
    "all of 5": ExpertsShape(5, 5, 12, norm_topk_prob=True),
    "2 of 6, a shared one": ExpertsShape(6, 2, 20, shared_expert_intermediate_size=24),
}
CONFIG = ModelConfig(
    "qwen3_moe", 40, 32, 48, 2, 4, 2, 16, qk_norm=True, initializer_range=0.25, experts=ExpertsShape(6, 2, 24, True)
)
Outside = Callable[[], AbstractContextManager[None]]


def block_of(shape: ExpertsShape) -> SparseMLP:
    block, draw = SparseMLP(HIDDEN, shape, 0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / parameter.shape[-1] ** 0.5)
    return block


def rows() -> Tensor:
    return torch.randn(3, 41, HIDDEN, generator=torch.Generator().manual_seed(2))


def theirs_of(block: SparseMLP, shape: ExpertsShape) -> Any:
    """Transformers' block with the same weights; in it an expert's gate and up are one matrix."""
    from transformers import AutoConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    shared = shape.shared_expert_intermediate_size
    config = AutoConfig.for_model(
        "qwen2_moe" if shared else "qwen3_moe", hidden_size=HIDDEN, num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_tok, moe_intermediate_size=shape.moe_intermediate_size,
        norm_topk_prob=shape.norm_topk_prob, **({"shared_expert_intermediate_size": shared} if shared else {}),
    )  # fmt: skip
    config._experts_implementation = "eager"
    theirs = (Qwen2MoeSparseMoeBlock if shared else Qwen3MoeSparseMoeBlock)(config)
    state = {name: value for name, value in block.state_dict().items() if not name.startswith("experts.")}
    each = list(block.experts)
    state["experts.gate_up_proj"] = torch.stack([torch.cat((e.gate_proj.weight, e.up_proj.weight)) for e in each])
    state["experts.down_proj"] = torch.stack([e.down_proj.weight for e in each])
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize("name", SHAPES)
def test_output_and_gradients_are_those_of_transformers(name: str, outside: Outside) -> None:
    """To the last digits: their gate and up are one product, whose library may add in another order."""
    shape = SHAPES[name]
    block, x, seed = block_of(shape), rows(), torch.randn(3, 41, HIDDEN)
    given = x.clone().requires_grad_()
    ours = block(given, None, NativeKernels(FP32))
    ours.backward(seed)
    with outside():
        theirs, taken = theirs_of(block, shape), x.clone().requires_grad_()
        expected = theirs(taken)
        expected.backward(seed)
    assert (ours - expected).abs().max() <= 1e-6 * expected.abs().max()
    pairs = [(given.grad, taken.grad), (block.gate.weight.grad, theirs.gate.weight.grad)]
    ups, downs = theirs.experts.gate_up_proj.grad, theirs.experts.down_proj.grad
    for expert, up, down in zip(block.experts, ups, downs, strict=True):
        pairs += [(torch.cat((expert.gate_proj.weight.grad, expert.up_proj.weight.grad)), up)]
        pairs += [(expert.down_proj.weight.grad, down)]
    largest = [float(want.abs().max()) for _, want in pairs]
    for (got, want), size in zip(pairs, largest, strict=True):
        assert got is not None
        assert (got - want).abs().max() <= 2e-6 * max(size, *largest[:1])


def in_float64(block: SparseMLP, shape: ExpertsShape, x_NE: Tensor, fmt: NumberFormat, kept_NK: Tensor) -> Tensor:
    """The formula, position by position, of weights rounded to ``fmt``; experts as given."""

    def of(parameter: Tensor) -> Tensor:
        return round_to_format(parameter.detach(), fmt).double()

    def expert(e: Any, x: Tensor) -> Tensor:
        gate, up = of(e.gate_proj.weight) @ x, of(e.up_proj.weight) @ x
        return of(e.down_proj.weight) @ (gate * torch.sigmoid(gate) * up)

    out = []
    for x, kept in zip(x_NE.double(), kept_NK, strict=True):
        p = torch.softmax(of(block.gate.weight) @ x, -1)
        w = p[kept] / (p[kept].sum() if shape.norm_topk_prob else 1)
        y = sum(weight * expert(block.experts[e], x) for weight, e in zip(w, kept.tolist(), strict=True))
        if shape.shared_expert_intermediate_size:
            y = y + torch.sigmoid(of(block.shared_expert_gate.weight) @ x) * expert(block.shared_expert, x)
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize(
    "kernels", [NativeKernels(FP32), SimulatedKernels(BF16), SimulatedKernels(FP16)], ids=("fp32", "bf16", "fp16")
)
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_formula_in_float64_to_the_formats_rounding(name: str, kernels: Kernels) -> None:
    shape = SHAPES[name]
    block, x = block_of(shape), round_to_format(rows(), kernels.format)
    route = Recorded(with_weights=False)
    with torch.no_grad():
        got = block(x, route, kernels).flatten(0, 1).double()
    kept_NK = route.take()[0][:, 0].long()
    expected = in_float64(block, shape, x.flatten(0, 1), kernels.format, kept_NK)
    # Seven roundings lie between, and one more for each further expert.
    bound = (7 + shape.num_experts_per_tok) * kernels.format.epsilon / 2 * 4 + 2e-6
    assert (got - expected).abs().max() <= bound * expected.abs().max()
    p_NX = torch.softmax(x.flatten(0, 1).double() @ round_to_format(block.gate.weight, kernels.format).double().t(), -1)
    chosen, largest = p_NX.gather(-1, kept_NK), p_NX.topk(shape.num_experts_per_tok).values
    torch.testing.assert_close(chosen, largest.detach(), rtol=1e-5, atol=1e-7)  # none but by a tie


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero() -> None:
    shape = SHAPES["8 of 64"]
    block, route = block_of(shape), Recorded(with_weights=False)
    block(rows()[:1, :2], route, SimulatedKernels(BF16)).sum().backward()
    chosen = set(route.take()[0].flatten().tolist())
    for number, expert in enumerate(block.experts):
        gradient = expert.up_proj.weight.grad
        assert gradient is not None
        assert bool(gradient.any()) == (number in chosen)


def exact_kernels(config: ModelConfig, fmt: str) -> Kernels:
    precision = resolve(PrecisionPolicy(train=fmt, rollout=fmt, kernels="exact"), "cpu")
    weights = dict(Decoder(config).named_parameters())
    shapes = ModelShapes.of(weights, config.num_attention_heads, config.num_key_value_heads, config.head_dim, 64, 128)
    return learner_kernels(precision, plan_exact(shapes, precision.learner, "cpu"))


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "own bf16"])
@pytest.mark.parametrize("shared", [0, 40])
def test_with_exact_kernels_a_position_s_bits_are_its_own(
    fmt: str, shared: int, request: pytest.FixtureRequest
) -> None:
    if fmt == "own bf16":
        request.getfixturevalue("bf16_is_own")
    shape = ExpertsShape(6, 2, 24, True, shared_expert_intermediate_size=shared)
    config = ModelConfig(
        "qwen2_moe" if shared else "qwen3_moe", 40, 32, 48, 1, 4, 2, 16, qk_norm=not shared, qkv_bias=bool(shared),
        initializer_range=0.25, experts=shape,
    )  # fmt: skip
    kernels, model = exact_kernels(config, fmt.removeprefix("own ")), Decoder(config).initialize()
    tokens_BT = torch.randint(0, 40, (5, 37))
    with torch.no_grad():
        whole = model(tokens_BT, kernels)
        for row, length in ((0, 1), (3, 2), (4, 17), (1, 37)):
            alone = model(tokens_BT[row : row + 1, :length], kernels)
            assert torch.equal(alone[0], whole[row, :length])


def test_a_replayed_choice_takes_those_experts_and_counts_flips() -> None:
    shape = SHAPES["3 of 7, normalised"]
    block, x, kernels = block_of(shape), rows()[:1, :20], NativeKernels(FP32)
    note = Recorded(with_weights=True)
    own = block(x, note, kernels)
    ids_NLK, weights_NLK = note.take()
    assert weights_NLK is not None
    assert (ids_NLK.dtype, ids_NLK.shape, weights_NLK.dtype) == (torch.int16, (20, 1, 3), torch.float32)

    same = Replayed(ids_NLK, None)
    assert torch.equal(block(x, same, kernels), own)
    assert (int(same.flips), same.choices) == (0, 20)
    backwards = Replayed(ids_NLK.flip(-1), weights_NLK.flip(-1))  # the same set: no flip, and summed by number
    assert torch.equal(block(x, backwards, kernels), own)
    assert int(backwards.flips) == 0

    other_NLK = ids_NLK.clone()
    other_NLK[4] = (ids_NLK[4] + 1) % 7
    moved = Replayed(other_NLK, None)
    out = block(x, moved, kernels)
    assert int(moved.flips) == int(set(other_NLK[4, 0].tolist()) != set(ids_NLK[4, 0].tolist()))
    expected = in_float64(block, shape, x[0], FP32, other_NLK[:, 0].long())
    torch.testing.assert_close(out[0].double(), expected.detach(), rtol=1e-5, atol=1e-6)
    counted = Replayed(other_NLK, None, only_count=True)
    assert torch.equal(block(x, counted, kernels), own)
    assert counted.flips == moved.flips


def test_replayed_weights_have_their_value_and_the_gradient_of_the_own() -> None:
    class Probe:
        def __init__(self, weights: Tensor) -> None:
            self.weights = weights

        def own(self, probs_NX: Tensor) -> Routing:
            return Routing(probs_NX.topk(2, -1).indices, self.weigh(probs_NX, probs_NX.topk(2, -1).indices))

        def weigh(self, probs_NX: Tensor, experts_NK: Tensor) -> Tensor:
            return probs_NX.gather(-1, experts_NK)

    probs = torch.tensor([[0.5, 0.3, 0.2]], requires_grad=True)
    recorded = torch.tensor([[[0.625, 0.125]]])
    routing = Replayed(torch.tensor([[[0, 2]]], dtype=torch.int16), recorded)(0, Probe(recorded), probs)
    assert torch.equal(routing.weights_NK, recorded[:, 0])
    (routing.weights_NK * torch.tensor([[2.0, 3.0]])).sum().backward()
    assert torch.equal(probs.grad, torch.tensor([[2.0, 0.0, 3.0]]))


def test_adapters_sit_on_every_expert_and_merge() -> None:
    model = Decoder(CONFIG).initialize(torch.Generator().manual_seed(3))
    attach(model, LoraShape(2, 4.0, ("up_proj", "down_proj")), torch.Generator().manual_seed(4))
    names = [name for name, _ in model.named_parameters() if name.endswith("lora_B")]
    assert len(names) == 2 * 2 * 6  # layers, targets, experts
    assert not any(".gate.lora" in name for name in names)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0, 0.1)
    plain = Decoder(CONFIG)
    plain.load_state_dict(policy_weights(model))
    tokens_BT = torch.randint(0, 40, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BT, NativeKernels(FP32)), plain(tokens_BT, NativeKernels(FP32)))
