"""Exact kernels over a processor's own products of bf16: the probe, libraries that add otherwise, and both policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from exact_policies import FAMILIES, Policies, exactly, make_model, ragged, shapes_of
from mantissa.kernels import (
    ExactBf16Kernels,
    ExactKernels,
    ExactPlan,
    ModelShapes,
    NativeKernels,
    cpu,
    learner_kernels,
    plan_exact,
    probe,
    reference_kernels,
    resolve,
    rollout_kernels,
)
from mantissa.kernels import exact_probe as probe_module
from mantissa.kernels.cpu import packed
from mantissa.kernels.exact.kernels import product
from mantissa.kernels.exact.plan import Choice
from mantissa.model import Decoder, LoraShape, ModelConfig, attach, trained_parameters
from mantissa.precision import BF16, FP32, PrecisionPolicy
from other_library import OtherLibrary

pytestmark = pytest.mark.usefixtures("bf16_is_own")
SHAPES = ModelShapes((("layers.0.q_proj", 48, 32), ("layers.0.mlp.gate", 48, 4), ("lm_head", 48, 24)), 4, 2, 16, 24)
SMOLLM2 = ModelConfig("llama", 512, 576, 1536, 2, 9, 3, 64, tie_word_embeddings=True, initializer_range=0.04)
Cut = Callable[[int, int], int]


@pytest.fixture(autouse=True)
def _by_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned where nothing is compiled, whatever was measured on this machine."""
    monkeypatch.setattr(probe_module, "_compiled_parts", lambda table: ())


class OtherOneDNN:
    """In the place of oneDNN's product of bf16 tensors: sums cut in two where ``cut(rows, terms)`` says.

    Each part is added in float64 and rounded to ``kept``, so are both together, and the result once more to bf16.
    """

    def __init__(self, cut: Cut, kept: torch.dtype = torch.float32) -> None:
        self.cut, self.kept, self.calls, self._own = cut, kept, 0, cpu.onednn

    def __call__(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
        if x_NE.dtype is not torch.bfloat16:
            return self._own(x_NE, weight_FE, bias_F)
        self.calls += 1
        x, w = x_NE.double(), (weight_FE.to_dense() if weight_FE.is_mkldnn else weight_FE).double()
        at = min(max(self.cut(x[..., 0].numel(), x.shape[-1]), 1), x.shape[-1])
        total = (x[..., :at] @ w[:, :at].t()).to(self.kept) + (x[..., at:] @ w[:, at:].t()).to(self.kept)
        return (total.float() if bias_F is None else total.float() + bias_F.float()).bfloat16()


def planned(monkeypatch: pytest.MonkeyPatch | None = None, library: OtherOneDNN | None = None) -> ExactPlan:
    if monkeypatch is not None:
        monkeypatch.setattr(cpu, "onednn", library)
    return plan_exact(SHAPES, exactly("bf16").learner, "cpu")


def test_each_product_is_planned_by_what_its_result_is() -> None:
    """Logits and a router's are fp32 results, and so fp32 products; the rest is bf16's own, and the lines say so."""
    plan = planned()
    assert (set(plan.products), set(plan.bf16)) == ({(24, 48), (4, 48), (8, 8)}, {(32, 48), (8, 8)})
    choice = plan.product((32, 48), bf16=True)
    assert choice.bf16
    assert 16 in choice.sizes
    lines = "\n".join(plan.lines())
    tiles = f"tiles of {choice.sizes[0]} to {choice.sizes[-1]} rows by bf16 products"
    assert f"products q_proj 48x32: {tiles}: all shapes tried agree" in lines
    assert "lm_head 48x24: tiles" in lines
    with pytest.raises(ValueError, match="made for another model"):
        plan.product((32, 48))


# A library, and how the product of 48 terms is then computed: its sizes, whether by bf16 products, and why.
LIBRARIES: dict[str, tuple[Cut, torch.dtype, tuple[int, ...] | None, bool, str]] = {
    "few rows otherwise": (
        lambda rows, terms: terms // 2 if rows == 16 else terms,
        torch.float32,
        (4, 8, 64, 96, 128, 192),
        True,
        "all shapes tried agree",
    ),
    "some rows otherwise": (
        lambda rows, terms: terms // 2 if rows in (64, 96) else terms,
        torch.float32,
        (4, 8, 16, 32, 48, 128, 192),
        True,
        "all shapes tried agree but 64, 96",
    ),
    "one term elsewhere": (  # the least that an order can differ in
        lambda rows, terms: terms - 1 if rows == 32 else terms,
        torch.float32,
        (4, 8, 16, 48, 64, 96, 128, 192),
        True,
        "all shapes tried agree but 32",
    ),
    "sums in bf16": (
        lambda rows, terms: terms // 2,
        torch.bfloat16,
        None,
        False,
        "tiles of 16 rows by bf16 products add in less than fp32; tiles of 64 rows by bf16 products add in less",
    ),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_adds_otherwise_is_seen_through_bf16(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cut, kept, sizes, own, why = LIBRARIES[name]
    shapes = dataclasses.replace(SHAPES, rows=128)
    monkeypatch.setattr(cpu, "onednn", OtherOneDNN(cut, kept))
    choice = plan_exact(shapes, exactly("bf16").learner, "cpu").product((32, 48), bf16=True)
    assert choice.bf16 == own
    assert sizes is None or choice.sizes == sizes
    assert choice.why.startswith(why)


def test_random_sums_would_have_hidden_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why half of the sums tried cancel: of those that do not, a few in a thousand show one term added elsewhere."""
    library = OtherOneDNN(lambda rows, terms: terms - 1 if rows == 32 else terms)
    x_ME, placed, _ = probe_module._drawn_bf16(64, (32, 48), torch.Generator().manual_seed(0))
    weight_FE = placed[0][1]
    whole, parts = library(x_ME, weight_FE), torch.cat([library(x_RE, weight_FE) for x_RE in x_ME.split(32)])
    cancelling, others = ((whole != parts)[row::2].float().mean().item() for row in (0, 1))
    assert cancelling > 0.2
    assert others < 0.02


def test_a_bias_that_is_added_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the sum for some numbers of rows: without a bias they are all alike."""
    own = cpu.onednn

    def biased(x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
        out = own(x_NE, weight_FE, bias_F)
        return out if bias_F is None or len(x_NE) != 32 else (own(x_NE, weight_FE) + bias_F)

    monkeypatch.setattr(cpu, "onednn", biased)
    choice = planned().product((32, 48), bf16=True)
    assert choice.bf16
    assert 32 not in choice.sizes


@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_a_library_whose_rows_depend_on_their_place_is_not_taken(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    whole = cpu.onednn

    def placed(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
        out = whole(x, weight, *more)
        if x.dtype is torch.bfloat16 and weight.is_mkldnn == (layout == "packed"):
            out[1::2] = torch.nextafter(out[1::2].float(), torch.tensor(9e9)).mul_(1 + 2.0**-7).bfloat16()
        return out

    monkeypatch.setattr(cpu, "onednn", placed)
    shapes = ModelShapes((("gate_proj", 288, 256), ("lm_head", 288, 40)), 2, 1, 16, 40, 32, 256)
    choice = plan_exact(shapes, exactly("bf16").learner, "cpu").product((256, 288), bf16=True)
    assert not choice.bf16
    assert choice.why.startswith("tiles of 16 rows by bf16 products differ; tiles of 64 rows by bf16 products differ; ")


def test_without_products_of_bf16_tensors_the_widened_ones_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a run that began on another machine, whose table it goes on with."""
    monkeypatch.setattr(cpu, "has_bf16", lambda: False)
    plan = planned()
    choice = plan.product((32, 48), bf16=True)
    assert not choice.bf16
    assert choice.why.startswith("this processor has no products of bf16 tensors; ")
    assert not plan.attention.bf16


class Unsteady(OtherOneDNN):
    def __init__(self) -> None:
        super().__init__(lambda rows, terms: 1 + self.calls * 7 % terms)


class UnsteadyWhereSwitched(OtherLibrary):
    """torch's products of heads, cut elsewhere at every call while oneDNN may multiply them as bf16."""

    def __init__(self) -> None:
        super().__init__(lambda rows, terms: 1 + self.calls * 7 % terms if self.switched() else terms)

    @staticmethod
    def switched() -> bool:
        return str(torch.backends.mkldnn.matmul.fp32_precision) == "bf16"  # type: ignore[attr-defined]


def test_attention_falls_back_to_fp32_products() -> None:
    choice = planned().attention
    assert (choice.bf16, choice.way) == (True, "tiles")
    assert "by bf16 products" in str(choice)
    with UnsteadyWhereSwitched():
        choice = planned().attention
    assert (choice.bf16, choice.way) == (False, "tiles")
    assert choice.why.startswith("tiles by bf16 products differ; ")
    assert not UnsteadyWhereSwitched.switched()  # and is put back


def test_a_plan_of_bf16_attention_is_not_for_operands_in_fp32() -> None:
    with pytest.raises(ValueError, match="attention is for operands in bf16"):
        ExactKernels(FP32, planned())
    both = plan_exact(SHAPES, exactly("bf16").learner, "cpu", simulated_too=True)
    assert not both.attention.bf16
    assert (32, 48) in both.products


@pytest.mark.parametrize("library", ["own", "unsteady"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_equal_on_the_products_that_hold_and_on_what_replaces_them(
    monkeypatch: pytest.MonkeyPatch, family: str, library: str
) -> None:
    """From the engine's cache and batches against the learner's sequences. Whether the fast family differs is the
    processor's: on one with AMX this model's does not. So the counting is tried by a log-prob moved by an ulp."""
    if library == "unsteady":
        monkeypatch.setattr(cpu, "onednn", Unsteady())
    model, resolved = make_model(FAMILIES[family]), exactly("bf16")
    plan = plan_exact(shapes_of(model), resolved.learner, "cpu")
    assert {choice.bf16 for choice in plan.bf16.values()} == {library == "own"}
    policies = Policies(model, resolved, plan=plan)
    assert isinstance(policies.learner, ExactBf16Kernels)
    assert isinstance(policies.rollout, ExactBf16Kernels)
    sampled = policies.sample(ragged(9), tokens=30)
    assert len(sampled.logp_N) > 200
    for micro in (None, 2, 1):
        assert policies.different(sampled, micro=micro) == 0
    sampled.logp[0][0] = torch.nextafter(sampled.logp[0][0], torch.tensor(0.0))
    assert policies.different(sampled) == 1


def test_equal_after_every_update_on_a_real_models_shape() -> None:
    """SmolLM2's layers, on packed weights in the rollout; and gradients are the fast family's."""
    model = Decoder(SMOLLM2).initialize(torch.Generator().manual_seed(0))
    policies = Policies(model, exactly("bf16"), length=96)
    weight = policies.engine._copies.decoder.model.layers[0].self_attn.q_proj.weight
    assert (weight.is_mkldnn, weight.dtype) == (True, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    fast = learner_kernels(resolve(PrecisionPolicy.parse("bf16"), "cpu"))
    for update in range(2):
        sampled = policies.sample(ragged(6, seed=update, samples=5), tokens=20)
        scored_N = policies.score(sampled)
        assert scored_N.requires_grad
        assert torch.equal(scored_N, sampled.logp_N)
        assert policies.different(sampled, micro=1) == 0
        gradients = []
        for kernels in (fast, policies.learner):
            optimizer.zero_grad()
            (policies.score(sampled, kernels=kernels) * torch.linspace(-1, 1, len(scored_N))).sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        similar = torch.nn.functional.cosine_similarity(*gradients, dim=0)
        assert similar > 0.999
        assert 0.98 < gradients[0].norm() / gradients[1].norm() < 1.02
        optimizer.step()
        policies.sync()


def test_adapters_a_coarser_cache_and_logits_in_bf16() -> None:
    model = Decoder(FAMILIES["qwen2"]).initialize(torch.Generator().manual_seed(2))
    attach(model, LoraShape(rank=3, alpha=6.0), torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.normal_(0.0, 0.3, generator=generator)
    policies = Policies(model, exactly("bf16", logits="bf16", kv_cache="fp8"))
    sampled = policies.sample(ragged(8), tokens=30)
    for micro in (None, 1):
        assert policies.different(sampled, micro=micro) == 0
    assert isinstance(policies.learner, ExactBf16Kernels)
    policies.learner.kv_format = BF16  # a learner that forgets the cache
    assert policies.different(sampled) > len(sampled.logp_N) // 2


def test_the_only_operation_of_a_kind_must_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(ExactBf16Kernels):
        def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
            whole_NE = super().swiglu(gate_NE, up_NE)
            return whole_NE if whole_NE.numel() % 64 else whole_NE * 1.0625

    monkeypatch.setattr(probe_module, "ExactBf16Kernels", Careless)
    with pytest.raises(Exception, match=r"on this CPU swiglu 48 gives a row other bits among \d+ rows than among"):
        planned()


def test_roles_get_these_kernels_and_prove_to_be_bf16() -> None:
    plan = planned()
    resolved = exactly("bf16")
    assert resolved.learner.kernels == "exact native"
    for make in (learner_kernels, rollout_kernels):
        kernels = make(resolved, plan)
        assert isinstance(kernels, ExactBf16Kernels)
        assert "holds logits in fp32" in probe(kernels, "cpu")


@pytest.mark.parametrize(("train", "reference"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", None)])
def test_a_reference_beside_them_has_a_plan(train: str, reference: str | None) -> None:
    policy = PrecisionPolicy(train=train, rollout=train, reference=reference, kernels="exact")
    resolved = resolve(policy, "cpu", reference=True)
    other = reference is not None
    plan = plan_exact(SHAPES, resolved.learner, "cpu", simulated_too=other)
    kernels = reference_kernels(resolved, plan)
    assert isinstance(kernels, ExactKernels if other else ExactBf16Kernels)
    x, weight = torch.ones(3, 48, dtype=kernels.dtype), torch.ones(32, 48)
    assert torch.equal(kernels.linear(x, weight).float(), torch.full((3, 32), 48.0))


def test_a_product_in_tiles_is_the_rounded_sum_with_its_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 288, generator=generator).bfloat16() for n in (70, 256))
    bias = torch.randn(256, generator=generator).bfloat16()
    choice = Choice("tiles", (16, 32), onednn=True, bf16=True)
    got = product(x, weight, choice, bias)
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-8, atol=1e-4)
    assert torch.equal(product(x.view(7, 10, 288), packed(weight), choice, bias).view(70, 256), got)


def test_no_rows_are_a_product_too() -> None:
    """An expert that no token chose: its weights have a gradient of zeros."""
    kernels = ExactBf16Kernels(planned())
    x = torch.zeros(0, 48, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(32, 48))
    out = kernels.linear(x, weight)
    assert out.shape == (0, 32)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 48)
    assert weight.grad is not None
    assert not weight.grad.any()
    with torch.no_grad():
        assert kernels.linear(x, weight).shape == (0, 32)


def test_operations_are_the_fast_familys_but_for_the_last_bit() -> None:
    """Forward and gradients of what is not a product, against the native family's autograd."""
    generator = torch.Generator().manual_seed(0)
    exact, fast = ExactBf16Kernels(planned()), NativeKernels(BF16)
    x, y = (torch.randn(50, 48, generator=generator).bfloat16() for _ in range(2))
    weight = torch.rand(48, generator=generator) + 0.5
    operations: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
        "rms_norm": lambda kernels, a, _: kernels.rms_norm(a, weight, 1e-6),
        "swiglu": lambda kernels, a, b: kernels.swiglu(a, b),
        "sigmoid": lambda kernels, a, _: kernels.sigmoid(a),
    }
    for name, operation in operations.items():
        results = []
        for kernels in (exact, fast):
            a, b = (t.clone().requires_grad_() for t in (x, y))
            out = operation(kernels, a, b)
            (out.float() * torch.linspace(-1, 1, 48)).sum().backward()
            results.append((out, a.grad, *([b.grad] if name == "swiglu" else [])))
        for one, other in zip(*results, strict=True):
            assert one is not None
            assert other is not None
            assert one.dtype is torch.bfloat16
            torch.testing.assert_close(one.float(), other.float(), rtol=2.0**-6, atol=2.0**-8, msg=name)


def test_fp32_is_never_its_own_bf16() -> None:
    plan = plan_exact(SHAPES, exactly("fp32").learner, "cpu")
    assert not plan.bf16
    assert learner_kernels(exactly("fp32"), plan).format is FP32
