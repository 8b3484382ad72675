"""Adapters against their formula in float64, and what they must leave alone."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call

from attention_oracle import attended
from mantissa.base.errors import MantissaError
from mantissa.kernels import NativeKernels, SimulatedKernels
from mantissa.model import (
    Decoder,
    FreshModelConfig,
    LoraConfig,
    LoraShape,
    attach,
    base_digest,
    base_parameters,
    character_tokenizer,
    is_adapter,
    load_adapter,
    load_model,
    policy_weights,
    read_shape,
    save_adapter,
    save_model,
    trained_parameters,
    training_base,
)
from mantissa.model.decoder import adapter_parameters
from mantissa.precision import BF16, FP16, FP32
from mantissa.training import adamw

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KERNELS = {"fp32": NativeKernels(FP32), "fp16": SimulatedKernels(FP16), "bf16": SimulatedKernels(BF16)}


def adapted(shape: LoraShape | None = None, trained: bool = True, seed: int = 0) -> Decoder:
    """A small decoder with adapters; ``trained``: B is not zero."""
    draw = torch.Generator().manual_seed(seed)
    fresh = FreshModelConfig(hidden_size=24, layers=2, heads=2, kv_heads=1, head_dim=12, intermediate_size=40)
    model = Decoder(fresh.model(30)).initialize(draw)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    attach(model, shape or LoraShape(3, 8.0), draw)
    if trained:
        with torch.no_grad():
            for name, parameter in adapter_parameters(model).items():
                if name.endswith("lora_B"):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model


@pytest.fixture(name="tokens_BT")
def _tokens() -> Tensor:
    return torch.randint(0, 30, (2, 9), generator=torch.Generator().manual_seed(3))


def plain_twin(model: Decoder) -> Decoder:
    """A decoder without adapters."""
    return Decoder(model.config)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_merged_weight_is_the_formula_in_float64(rslora: bool) -> None:
    model = adapted(LoraShape(3, 8.0, ALL, rslora))
    scale = 8 / math.sqrt(3) if rslora else 8 / 3
    own, merged = dict(model.named_parameters()), policy_weights(model)
    assert len(merged) == len(list(plain_twin(model).parameters()))
    changed = 0
    for name, weight in merged.items():
        a, b = (own.get(name.removesuffix("weight") + matrix) for matrix in ("lora_A", "lora_B"))
        if a is None or b is None:
            assert weight.data_ptr() == own[name].data_ptr()
            continue
        expected = own[name].double() + scale * (b.double() @ a.double())
        torch.testing.assert_close(weight.double(), expected, rtol=0, atol=4e-7)
        assert not torch.equal(weight, own[name])
        changed += 1
    assert changed == 14


@pytest.mark.parametrize("precision", list(KERNELS))
def test_the_forward_is_to_the_bit_that_of_the_merged_model(precision: str, tokens_BT: Tensor) -> None:
    """What no low-rank side path could promise, and what makes learner and rollout one policy."""
    model, kernels = adapted(), KERNELS[precision]
    plain = plain_twin(model)
    plain.load_state_dict(dict(policy_weights(model)))
    assert torch.equal(model(tokens_BT, kernels), plain(tokens_BT, kernels))


def test_a_new_adapter_changes_nothing_and_begins_as_pefts_does(tokens_BT: Tensor) -> None:
    model = adapted(LoraShape(4, 8.0, ("q_proj", "down_proj")), trained=False)
    plain = plain_twin(model)
    plain.load_state_dict({name: p.detach() for name, p in base_parameters(model).items()})
    assert torch.equal(model(tokens_BT, KERNELS["fp32"]), plain(tokens_BT, KERNELS["fp32"]))
    adapters = adapter_parameters(model)
    assert len(adapters) == 2 * 2 * 2
    for name, parameter in adapters.items():
        matrix = parameter.detach()
        if name.endswith("lora_B"):
            assert not matrix.any()
        else:
            limit = matrix.shape[1] ** -0.5  # kaiming_uniform_(a=sqrt(5)): sqrt(6 / (6 * fan_in))
            assert 0.9 * limit < float(matrix.abs().max()) <= limit
            assert abs(float(matrix.mean())) < 0.25 * limit


def gradients(model: Decoder, tokens_BT: Tensor, kernels: object) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    logits = model.logits(model(tokens_BT, kernels), kernels)  # type: ignore[arg-type]
    (-logits.log_softmax(-1)[:, :-1].gather(-1, tokens_BT[:, 1:, None]).mean() * 64).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Float64(NativeKernels):
    """The native operations in float64: for the oracle."""

    def __init__(self) -> None:
        super().__init__(FP32)
        self.dtype = torch.float64

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        return x_NE * torch.rsqrt(x_NE.square().mean(-1, keepdim=True) + eps) * weight_E

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        half = x_BHTD.shape[-1] // 2
        turned = torch.cat((-x_BHTD[..., half:], x_BHTD[..., :half]), -1)
        return x_BHTD * cos_BTD.double().unsqueeze(1) + turned * sin_BTD.double().unsqueeze(1)

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        return attended(q_BHTD, k_BKTD, v_BKTD)


def oracle_gradients(model: Decoder, tokens_BT: Tensor) -> dict[str, Tensor]:
    """Of A and B in float64, through a plain decoder whose weights are written out as W + s B A."""
    kernels, plain = Float64(), plain_twin(model).double()
    own = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    written = {
        name: own[name] + 8 / 3 * own[name[:-6] + "lora_B"] @ own[name[:-6] + "lora_A"]
        if name[:-6] + "lora_A" in own
        else own[name]
        for name in base_parameters(model)
    }

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, tokens_BT: Tensor) -> Tensor:
            return self.plain(tokens_BT, kernels) @ self.plain.head_weight.t()

    logits = functional_call(Whole(), {f"plain.{name}": weight for name, weight in written.items()}, (tokens_BT,))
    loss = -logits.log_softmax(-1)[:, :-1].gather(-1, tokens_BT[:, 1:, None]).mean() * 64
    names = list(adapter_parameters(model))
    return dict(zip(names, torch.autograd.grad(loss, [own[name] for name in names]), strict=True))


def test_gradients_are_those_of_float64_and_of_the_adapters_alone(tokens_BT: Tensor) -> None:
    model = adapted()
    found, expected = gradients(model, tokens_BT, KERNELS["fp32"]), oracle_gradients(model, tokens_BT)
    assert found.keys() == expected.keys() == trained_parameters(model).keys()
    for name, gradient in found.items():
        error = float((gradient.double() - expected[name]).norm() / expected[name].norm())
        assert error < 1e-5, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_gradient_is_the_projection_of_what_training_the_weight_would_get(precision: str, tokens_BT: Tensor) -> None:
    """s B^T G and s G A^T, G as the kernels round it for a weight that trains."""
    model, kernels = adapted(), KERNELS[precision]
    plain = plain_twin(model)
    plain.load_state_dict(dict(policy_weights(model)))
    full, found = gradients(plain, tokens_BT, kernels), gradients(model, tokens_BT, kernels)
    own = {name: p.detach() for name, p in model.named_parameters()}
    for name in found:
        stem, _, matrix = name.rpartition(".")
        g, a, b = (x.double() for x in (full[f"{stem}.weight"], own[f"{stem}.lora_A"], own[f"{stem}.lora_B"]))
        expected = 8 / 3 * (b.t() @ g if matrix == "lora_A" else g @ a.t())
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_frozen_weights_have_no_gradient_no_moments_and_keep_their_bits(tokens_BT: Tensor) -> None:
    model = adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    for parameter in base_parameters(model).values():
        assert not parameter.requires_grad
    gradients(model, tokens_BT, KERNELS["fp16"])
    optimizer.step()
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(optimizer.state) == 28
    for name, parameter in base_parameters(model).items():
        assert parameter.grad is None, name
        assert torch.equal(parameter, before[name]), name
    moved = [not torch.equal(p, before[name]) for name, p in adapter_parameters(model).items()]
    assert all(moved)


def test_the_base_trains_before_the_adapters_do_and_never_after(tokens_BT: Tensor) -> None:
    model = adapted(trained=False)
    with training_base(model):
        assert set(gradients(model, tokens_BT, KERNELS["fp32"])) == set(base_parameters(model))
        full = adamw(model, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
        assert sum(len(group["params"]) for group in full.param_groups) == len(base_parameters(model))
    assert all(p.grad is None for p in model.parameters())
    assert set(gradients(model, tokens_BT, KERNELS["fp32"])) == set(adapter_parameters(model))
    with pytest.raises(ValueError, match="adapters have been trained"), training_base(adapted()):
        pass


def test_the_digest_is_of_the_base_alone() -> None:
    model, digest = adapted(), base_digest(adapted())
    with torch.no_grad():
        for matrix in adapter_parameters(model).values():
            matrix.add_(1.0)
    assert base_digest(model) == digest == base_digest(adapted(trained=False))
    with torch.no_grad():
        weight = model.model.norm.weight
        weight[5] = torch.nextafter(weight[5], torch.tensor(9.0))
    assert base_digest(model) != digest


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, r"expected rank and alpha \(or path"),
        ({"rank": 4}, "expected alpha"),
        ({"rank": 4, "alpha": 8, "targets": ["q_prj"]}, "no projection is called 'q_prj'; did you mean 'q_proj'"),
        ({"rank": 4, "alpha": 8, "targets": ["embed"]}, "no projection is called 'embed'; expected some of q_proj"),
        ({"rank": 4, "alpha": 8, "targets": []}, "expected at least one of q_proj"),
        ({"rank": 4, "alpha": 8, "targets": ["q_proj", "q_proj"]}, "one is named twice"),
        ({"rank": 4, "alpha": 8, "dropout": 0.1}, "dropout=0.1: with dropout the learner would score"),
    ],
)
def test_what_cannot_be_attached_is_refused(fields: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LoraConfig(**fields)


def test_a_stored_adapter_and_the_recipe_must_agree() -> None:
    assert LoraConfig(rank=2, alpha=4).shape() == LoraShape(2, 4.0, ALL, False)
    stored = LoraShape(8, 16.0, ("q_proj", "v_proj"), True)
    agreeing: list[dict] = [{}, {"rank": 8}, {"targets": ["v_proj", "q_proj"], "alpha": 16, "rslora": True}]
    for fields in agreeing:
        assert LoraConfig(path="x", **fields).shape(stored, "x") == stored
    cases: list[tuple[dict, str]] = [
        ({"rank": 4}, "model.lora.rank=4, but the adapter in x has 8; leave rank out"),
        ({"alpha": 8}, "alpha=8.0, but the adapter in x has 16.0"),
        ({"targets": ["q_proj"]}, "targets=q_proj, but the adapter in x has q_proj, v_proj"),
        ({"rslora": False}, "rslora=False, but the adapter in x has True"),
    ]
    for fields, said in cases:
        with pytest.raises(MantissaError, match=said):
            LoraConfig(path="x", **fields).shape(stored, "x")


DATA = Path(__file__).parents[1] / "data" / "peft"


def open_theirs(folder: Path = DATA / "adapter") -> Decoder:
    model = load_model(DATA / "base")
    attach(model, read_shape(folder)[0], torch.Generator().manual_seed(0))
    load_adapter(model, folder)
    return model


@pytest.fixture(name="adapter")
def _adapter(tmp_path: Path) -> Path:
    """A copy of peft's folder, to be spoiled."""
    return Path(shutil.copytree(DATA / "adapter", tmp_path / "adapter"))


def change(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_what_peft_wrote_gives_pefts_logits() -> None:
    assert is_adapter(DATA / "adapter")
    assert not is_adapter(DATA / "base")
    shape, base = read_shape(DATA / "adapter")
    assert (shape, base) == (LoraShape(3, 7.0, ("q_proj", "o_proj", "down_proj"), True), None)
    stored, kernels = load_file(DATA / "logits.safetensors"), NativeKernels(FP32)
    logits = []
    for model in (open_theirs(), load_model(DATA / "base")):
        with torch.no_grad():
            logits.append(model.logits(model(stored["tokens"], kernels), kernels).double())
    torch.testing.assert_close(logits[0], stored["logits"], rtol=0, atol=5e-5)
    assert float((logits[1] - stored["logits"]).abs().max()) > 0.5  # the adapter matters


def test_what_is_written_is_what_peft_writes(tmp_path: Path) -> None:
    """Names, shapes and bits of the tensors; and each key of the configuration that is written."""
    save_adapter(open_theirs(), tmp_path / "mine", "some/base")
    ours, theirs = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "mine", DATA / "adapter"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    mine, config = (json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path / "mine", DATA / "adapter"))
    assert mine.keys() <= config.keys()
    assert mine.pop("base_model_name_or_path") == "some/base"
    assert mine.pop("task_type") == "CAUSAL_LM"
    assert set(mine.pop("target_modules")) == set(config["target_modules"])
    assert mine == {key: config[key] for key in mine}


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    model = load_model(DATA / "base")
    attach(model, LoraShape(2, 2.5), torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.normal_()
    for _ in range(2):  # the second replaces the first
        save_adapter(model, tmp_path / "a", "base")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    again = load_model(DATA / "base")
    attach(again, read_shape(tmp_path / "a")[0], torch.Generator())
    load_adapter(again, tmp_path / "a")
    with pytest.raises(ValueError, match="has adapters already"):
        attach(again, LoraShape(2, 2.0), torch.Generator())
    assert again.lora == model.lora == LoraShape(2, 2.5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name]), name


def test_a_saved_model_is_the_merged_one(tmp_path: Path) -> None:
    model = open_theirs()
    save_model(model, character_tokenizer("0123456789+="), tmp_path / "merged")
    merged = load_model(tmp_path / "merged")
    assert merged.lora is None
    weights = policy_weights(model)
    assert all(torch.equal(p, weights[name]) for name, p in merged.named_parameters())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_dora": True}, "use_dora=true is a feature of peft that is not supported"),
        ({"bias": "all"}, 'bias="all" is a feature of peft'),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save=\["lm_head"\] is a feature'),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights="pissa"'),
        ({"something_new": 0.5}, "something_new=0.5 is a feature of peft that is not supported here"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head.*expected a list of some of q_proj"),
        ({"target_modules": ".*_proj"}, "expected a list of some of q_proj"),
        ({"r": "8"}, "r='8': expected a whole number"),
    ],
)
def test_what_would_be_another_policy_is_refused(adapter: Path, fields: dict[str, Any], said: str) -> None:
    change(adapter, **fields)
    with pytest.raises(MantissaError, match=said) as caught:
        read_shape(adapter)
    assert "adapter_config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_off_or_only_for_training_passes(adapter: Path) -> None:
    change(adapter, lora_dropout=0.05, something_new=None, init_lora_weights="gaussian", layers_pattern=[])
    assert read_shape(adapter)[0].rank == 3


def spoil(adapter: Path, work: Callable[[dict[str, torch.Tensor], str], object]) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    work(tensors, "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight")
    save_file(tensors, path)


def test_damage_is_named(adapter: Path) -> None:
    cases: list[tuple[Callable[[dict[str, torch.Tensor], str], object], str]] = [
        (lambda tensors, name: tensors.pop(name), "down_proj.lora_B.weight is missing"),
        (lambda tensors, name: tensors.update({name + "x": tensors[name].clone()}), r"unexpected tensor .*weightx"),
        (lambda tensors, name: tensors.update({name: torch.zeros(16, 4)}), r"shape \(16, 4\), but .* for \(16, 3\)"),
        (
            lambda tensors, name: tensors.update({name: tensors[name] / 0}),
            "down_proj.lora_B.weight has 48 values that are",
        ),
        (lambda tensors, name: tensors.update({name: tensors[name].double()}), "stored as float64; expected float32"),
    ]
    for work, said in cases:
        shutil.copy(DATA / "adapter" / "adapter_model.safetensors", adapter)
        spoil(adapter, work)
        with pytest.raises(MantissaError, match=said):
            open_theirs(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"12345")
    with pytest.raises(MantissaError, match="truncated or damaged"):
        open_theirs(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(MantissaError, match=r"no adapter_model\.safetensors; expected an adapter in peft's format"):
        open_theirs(adapter)


def test_a_rank_that_is_not_the_tensors_is_an_error(adapter: Path) -> None:
    change(adapter, r=4)
    with pytest.raises(MantissaError, match=r"shape \(3, \d+\), but the base and the rank in .* for \(4, \d+\)"):
        open_theirs(adapter)
