"""Weight sync: the right values, once rounded; and every way in which it can fail, closed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import compiled, cpu, learner_kernels, resolve, rollout_kernels
from mantissa.kernels.compiled import Laid
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import FP16, BlockScaled, PrecisionPolicy
from mantissa.rollout import NativeEngine, Request, SamplingParams

REQUESTS = [Request((1, 2, 3), seed=0)]
PARAMS = SamplingParams(max_tokens=2)
NAME = "model.layers.0.mlp.up_proj.weight"


def config(tied: bool = False) -> ModelConfig:
    return ModelConfig("llama", 16, 16, 24, 1, 2, 1, 8, tie_word_embeddings=tied)


def masters(tied: bool = False) -> dict[str, Tensor]:
    model = Decoder(config(tied)).initialize(torch.Generator().manual_seed(0))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def engine(precision: str = "fp16", backend: str = "auto", tied: bool = False) -> NativeEngine:
    resolved = resolve(PrecisionPolicy.parse({"preset": precision, "backend": backend}), "cpu")
    kernels = rollout_kernels(resolved)
    return NativeEngine(config(tied), kernels, kv_format=resolved.kv_cache.active, slots=2, max_length=16)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_stored_values_are_the_learners_compute_copy(precision: str, tied: bool) -> None:
    """What the rollout multiplies is, bit for bit, what the learner's kernels make of the master."""
    rollout, weights = engine(precision, tied=tied), masters(tied)
    rollout.sync(weights, 4)
    learner = learner_kernels(resolve(PrecisionPolicy.parse(precision), "cpu"))
    stored = dict(rollout.model.named_parameters())
    assert stored.keys() == weights.keys()
    for name, master in weights.items():
        assert torch.equal(stored[name], learner.weight(master)), name
    assert rollout.version == 4
    assert ("lm_head.weight" in stored) != tied


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_native_kernels_hold_the_half_itself_rounded_once(precision: str) -> None:
    rollout, weights = engine(precision, backend="native"), masters()
    rollout.sync(weights, 0)
    for name, parameter in rollout.model.named_parameters():
        assert parameter.dtype == rollout.kernels.format.dtype
        assert torch.equal(parameter, weights[name].to(parameter.dtype)), name


def put(value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights[NAME].index_put_((torch.tensor(3), torch.tensor(2)), torch.tensor(value))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda w: w.pop(NAME), "is missing"),
        (lambda w: w.update({NAME.replace("0", "7"): w[NAME]}), r"unknown weight model.layers.7.*did you mean"),
        (lambda w: w.update({NAME: w[NAME].t().contiguous()}), r"has shape \(16, 24\), expected \(24, 16\)"),
        (lambda w: w.update({NAME: w[NAME].bfloat16()}), "expected the fp32 master"),
        (put(float("nan")), "holds nan"), (put(float("-inf")), "holds inf"),
        (put(-70000.0), r"holds 70000, which fp16 cannot \(largest 65504\)"),
    ],
)  # fmt: skip
def test_a_bad_tensor_is_named_and_the_engine_then_refuses(spoil: Callable, said: str) -> None:
    rollout, weights = engine("fp16"), masters()
    rollout.sync(weights, 0)
    spoil(weights)
    with pytest.raises(MantissaError, match=said) as caught:
        rollout.sync(weights, 1)
    assert "mlp.up_proj.weight" in str(caught.value)
    assert rollout.version == -1
    for version in (-1, 0, 1):
        with pytest.raises(MantissaError, match="holds no weights"):
            rollout.generate(REQUESTS, PARAMS, version)
    rollout.sync(masters(), 2)  # a good one heals it
    assert len(rollout.generate(REQUESTS, PARAMS, 2)[0][0].tokens) == 2


def test_what_overflows_one_format_fits_another() -> None:
    weights = masters()
    put(-70000.0)(weights)
    engine("bf16").sync(weights, 0)
    weights[NAME][3, 2] = 65519.0  # below the midpoint to the next step: rounds to 65504
    rollout = engine("fp16")
    rollout.sync(weights, 0)
    assert dict(rollout.model.named_parameters())[NAME][3, 2] == FP16.largest


def test_the_head_of_a_tied_model_is_refused() -> None:
    weights = masters(tied=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with pytest.raises(MantissaError, match=r"unknown weight lm_head.weight; the head is tied"):
        engine(tied=True).sync(weights, 0)


def test_a_tensor_that_was_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check after the copy sees poison that is left, even where every name and shape was right."""
    rollout = engine("fp32")
    target = dict(rollout.model.named_parameters())[NAME]
    copy = Tensor.copy_

    def skipping(self: Tensor, source: Tensor, *rest: object) -> Tensor:
        return self if self is target else copy(self, source, *rest)

    monkeypatch.setattr(Tensor, "copy_", skipping)
    with pytest.raises(MantissaError, match=r"up_proj\.weight was not written in full"):
        rollout.sync(masters(), 0)
    assert rollout.version == -1


def test_stale_versions_are_refused() -> None:
    rollout = engine("fp32")
    with pytest.raises(MantissaError, match="call sync first"):
        rollout.generate(REQUESTS, PARAMS, 0)
    rollout.sync(masters(), 5)
    with pytest.raises(MantissaError, match="policy version 4 was asked for, 5 is loaded"):
        rollout.generate(REQUESTS, PARAMS, 4)
    with pytest.raises(ValueError, match="policy version -1"):
        rollout.sync(masters(), -1)


@pytest.mark.skipif(not {"int8", "codes"} <= {*compiled.parts()}, reason="no compiled products of codes here")
@pytest.mark.parametrize("fmt", ["int8", "fp8", "mxfp8", "nvfp4", "int4"])
def test_codes_that_are_laid_out_come_back_and_are_replaced_whole(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wide model's projections, joined or not; a failed sync leaves nothing to sample with."""
    monkeypatch.setattr(cpu, "products", lambda: cpu.CpuProducts(0.5, 0.5, compiled=compiled.parts()))
    resolved = resolve(PrecisionPolicy.parse({"train": "bf16", "rollout": fmt}), "cpu")
    assert resolved.rollout.fp8 is not None
    assert resolved.rollout.backend == "native"
    wide = ModelConfig("qwen3", 64, 256, 768, 1, 8, 4, 32, qk_norm=True)
    rollout = NativeEngine(wide, rollout_kernels(resolved), kv_format=resolved.kv_cache.active, slots=2, max_length=16)
    for seed in (0, 1):
        model = Decoder(wide).initialize(torch.Generator().manual_seed(seed))
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        rollout.sync(weights, seed)
        for name in weights:
            if "proj" in name:
                made = cpu.quantized_copy(weights[name], resolved.rollout.fp8, cpu.Products("bf16"))
                assert isinstance(made, BlockScaled)
                assert rollout.weights[name].dtype is made.codes.dtype
                assert torch.equal(rollout.weights[name].float(), made.codes.float())
                assert torch.equal(rollout.weights[f"{name}.scales"], made.scales)
    mlp = rollout.model.model.layers[0].mlp
    assert isinstance(mlp.joined.weight.codes, Laid)
    assert isinstance(mlp.down_proj.weight, Laid)
    before = rollout.generate(REQUESTS, PARAMS, 1)[0][0].tokens
    with pytest.raises(MantissaError, match=r"down_proj.weight holds nan"):
        rollout.sync(weights | {NAME.replace("up", "down"): torch.full((256, 768), torch.nan)}, 2)
    with pytest.raises(MantissaError, match="holds no weights"):
        rollout.generate(REQUESTS, PARAMS, 2)
    rollout.sync(weights, 3)
    assert rollout.generate(REQUESTS, PARAMS, 3)[0][0].tokens == before
