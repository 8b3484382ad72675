"""A rollout in fp8 for vLLM: the file's codes against numpy's, and what is refused of models, machines and kernels."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import block_reference
import fake_vllm
from fake_vllm import LLM, Fault, install
from mantissa.base.errors import MantissaError
from mantissa.base.tensors import digest
from mantissa.kernels import resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import BF16, FP32, Fp8Policy, PrecisionPolicy
from mantissa.rollout import VllmEngine, VllmStart
from mantissa.rollout.vllm.worker import check_device, check_layers, quantization_config

CONFIG = ModelConfig("qwen2", 40, 256, 384, 2, 2, 1, 128, qkv_bias=True, tie_word_embeddings=True)
QKV = ("q_proj", "k_proj", "v_proj")
Build = Callable[..., VllmEngine]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """``build(fault, **fp8)``: an engine on the stand-in, on a machine that could."""
    monkeypatch.setattr("mantissa.rollout.vllm.worker.device_problem", lambda device: None)
    made: list[VllmEngine] = []

    def make(fault: Fault | None = None, **fp8: Any) -> VllmEngine:
        install(monkeypatch, fault)
        resolved = resolve(PrecisionPolicy.parse({"preset": "fp8-rollout", "fp8": fp8}), "cpu")
        made.append(VllmEngine(asked(Fp8Policy(**fp8)), rollout_kernels(resolved)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def asked(fp8: Fp8Policy, config: ModelConfig = CONFIG, device: str = "cpu") -> VllmStart:
    return VllmStart(config, BF16, FP32, 5, 32, torch.device(device), fp8=fp8)


def masters(seed: int = 1) -> dict[str, Tensor]:
    """With zeros in a whole block, negative zeros, and a value far beyond its neighbours."""
    model = Decoder(CONFIG).initialize(torch.Generator().manual_seed(seed))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    up = weights["model.layers.0.mlp.up_proj.weight"]
    up[:128, :128] = 0.0
    up[200, 200] = 3e4
    up[128:200, 0] = -0.0
    return weights


def folder_of(engine: VllmEngine) -> Path:
    return Path(LLM.made[-1].options["model"])


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


@pytest.mark.parametrize("exclude", [(), ("down_proj",), (*QKV, "layers.1.mlp")])
def test_the_folder_holds_our_codes_and_scales(build: Build, exclude: tuple[str, ...]) -> None:
    """Codes and scales are numpy's, quantised from the master; the rest is rounded to the base."""
    engine = build(exclude=exclude)
    weights = masters()
    engine.sync(weights, 0)
    held, plain = load_file(folder_of(engine) / "model.safetensors"), set()
    for name, master in weights.items():
        layer, kind = name.rpartition(".")[::2]
        parts = layer.split(".")
        left_out = any(set(pattern.split(".")) <= set(parts) for pattern in exclude)
        if not layer.endswith("_proj") or kind == "bias" or left_out:
            plain.add(name)
            assert torch.equal(held.pop(name), master.bfloat16())
            continue
        codes, scales = block_reference.quantize(master.numpy(), "e4m3", (128, 128), False)
        found = held.pop(name)
        assert found.dtype == torch.float8_e4m3fn
        assert (bits(found) == codes).all()
        assert (held.pop(f"{layer}.weight_scale_inv").numpy() == scales).all()
    assert list(held) == ["lm_head.weight"]
    assert torch.equal(held["lm_head.weight"], weights["model.embed_tokens.weight"].bfloat16())
    said = json.loads((folder_of(engine) / "config.json").read_text())["quantization_config"]
    left = {name.removesuffix(".weight") for name in plain if name.endswith("_proj.weight")}
    assert set(said.pop("modules_to_not_convert")) == left | {"lm_head"}
    assert said == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }


def test_what_the_worker_holds_is_what_was_sent(build: Build) -> None:
    engine = build()
    weights = masters()
    engine.sync(weights, 0)
    held = LLM.made[-1].worker.mantissa_weights()
    sent = load_file(folder_of(engine) / "model.safetensors")
    assert held == {name: str(digest(tensor)) for name, tensor in sent.items()}
    assert len(held) == len(weights) + 2 * 7 + 1  # 14 matrices' scales, and the head
    assert "in bfloat16, products of e4m3 in 1x128 and e4m3 in 128x128 by TritonProduct, head float32" in (
        engine.evidence
    )
    worker = LLM.made[-1].worker
    down = worker.model_runner.model.get_submodule("model.layers.1.mlp.down_proj")
    for tensor, index in ((down.weight, (3, 5)), (down.weight_scale_inv, (1, 2))):
        before = bits(tensor).copy()
        bits(tensor)[index[0], 4 * index[1] if tensor.dtype == torch.float32 else index[1]] ^= 1
        other = {name for name, found in worker.mantissa_weights().items() if found != held[name]}
        assert len(other) == 1, other
        bits(tensor)[...] = before


def test_codes_that_are_not_what_is_multiplied(build: Build) -> None:
    """A kernel that keeps a copy of its own would go on multiplying the old one."""
    engine = build()
    engine.sync(masters(), 0)
    worker = LLM.made[-1].worker
    layer = worker.model_runner.model.get_submodule("model.layers.0.self_attn.qkv_proj")
    kernel, old = layer.quant_method.fp8_linear, layer.weight.detach().clone()
    apply, before = kernel.apply_weights, worker.mantissa_weights()
    kernel.apply_weights = lambda of, x: apply(layer_like(of, old), x)
    assert worker.mantissa_weights() == before
    layer.weight.data = layer.weight.data.view(torch.uint8).flip(0).view(torch.float8_e4m3fn)
    found = worker.mantissa_weights()
    wrong = {name for name, said in found.items() if said == "a product by other values than are stored"}
    assert wrong == {f"model.layers.0.self_attn.{name}.weight" for name in QKV}
    layer.weight_scale_inv = torch.nn.Parameter(layer.weight_scale_inv.T.contiguous(), requires_grad=False)
    kernel.apply_weights = lambda of, x: torch.zeros(len(x), len(of.weight), dtype=x.dtype)
    found = worker.mantissa_weights()
    assert {name for name, said in found.items() if said == "another layout"} == wrong


def layer_like(layer: Any, weight: Tensor) -> Any:
    """The layer with another weight."""
    return SimpleNamespace(weight=weight, weight_scale_inv=layer.weight_scale_inv)


@pytest.mark.parametrize("keeps", ["model.layers.1.mlp.gate_up_proj", "model.layers.0.self_attn.o_proj"])
def test_a_part_that_loading_did_not_renew_is_named(build: Build, keeps: str) -> None:
    engine = build(Fault(keeps=keeps))
    named = keeps.replace("gate_up", "(gate|up)")
    with pytest.raises(MantissaError, match=rf"other values of {named}\.weight(_scale_inv)? than were sent"):
        engine.sync(masters(), 1)
    assert engine.version == -1


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (fake_vllm.HalfProduct, "HalfProduct, which takes activations in half"),
        (fake_vllm.HiddenProduct, "HiddenProduct, which takes activations in half"),
        (fake_vllm.PowersProduct, "PowersProduct, whose activations have scales of powers of two"),
        (fake_vllm.RowProduct, "e4m3 in 1x-1 and e4m3 in 128x128"),
    ],
)
def test_products_of_another_kind_are_not_used(build: Build, kernel: Any, message: str) -> None:
    with pytest.raises(MantissaError, match=f"products=e4m3 in 1x128 and e4m3 in 128x128 and runs with {message}"):
        build(Fault(kernel=kernel))
    assert [llm.closed for llm in LLM.made] == [True]


def test_a_vllm_that_does_not_quantise_is_not_used(build: Build) -> None:
    with pytest.raises(MantissaError, match="asked for quantization=fp8 and runs with None"):
        build(Fault(facts={"quantization": None}))


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (["k_proj"], r"exclude: model\.layers\.0\.self_attn has q_proj and k_proj apart"),
        (["layers.1.mlp.gate_proj"], r"exclude: model\.layers\.1\.mlp has gate_proj and up_proj apart"),
    ],
)
def test_parts_of_one_product_go_together(exclude: list[str], message: str) -> None:
    with pytest.raises(MantissaError, match=message):
        asked(Fp8Policy(exclude=tuple(exclude)))


def test_layers_that_are_not_whole_blocks() -> None:
    narrow = dataclasses.replace(CONFIG, intermediate_size=320)
    with pytest.raises(MantissaError, match=r"blocks of 128, and model\.layers\.0\.mlp\.gate_proj is 320 by 256; put"):
        asked(Fp8Policy(), narrow)
    check_layers(narrow, Fp8Policy(exclude=("mlp",)))
    with pytest.raises(MantissaError, match=r"fp8\.scale=power_of_two: vLLM gives activations fp32 scales"):
        asked(Fp8Policy(scale="power_of_two"))


def test_where_vllm_has_no_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    resolved = resolve(PrecisionPolicy.parse("fp8-rollout"), "cpu")
    with pytest.raises(MantissaError, match=r"precision\.rollout=fp8 .* on a CPU vLLM leaves activations in half"):
        VllmEngine(asked(Fp8Policy()), rollout_kernels(resolved))
    assert not LLM.made
    for capability, known in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
        if known:
            check_device(torch.device("cuda", 0))
        else:
            with pytest.raises(MantissaError, match="some GPU has no fp8 products of that kind"):
                check_device(torch.device("cuda", 0))


def test_its_processes_are_told_which_kernels() -> None:
    environment = asked(Fp8Policy()).environment()
    assert environment["VLLM_USE_DEEP_GEMM_E8M0"] == environment["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] == "0"
    assert "VLLM_USE_DEEP_GEMM_E8M0" not in VllmStart(CONFIG, BF16, FP32, 5, 32, torch.device("cpu")).environment()
    assert quantization_config(CONFIG, Fp8Policy())["modules_to_not_convert"] == ["lm_head"]
