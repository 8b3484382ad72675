"""peft's format on disk: what the real peft wrote is read to the same logits, and it reads what is written here.

``tests/data/peft`` was made by peft 0.21.2 (its ``make.py``). Where peft is installed the way back runs too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mantissa.errors import MantissaError
from mantissa.kernels import NativeKernels
from mantissa.model import (
    Decoder,
    LoraShape,
    attach,
    character_tokenizer,
    is_adapter,
    load_adapter,
    load_model,
    policy_weights,
    read_shape,
    save_adapter,
    save_model,
)
from mantissa.model.lora import adapter_parameters
from mantissa.precision import FP32

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
        ({"layers_to_transform": [0]}, "layers_to_transform="),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights="pissa"'),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=true"),
        ({"something_new": 0.5}, "something_new=0.5 is a feature of peft that is not supported here"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head.*expected a list of some of q_proj"),
        ({"target_modules": ".*_proj"}, "expected a list of some of q_proj"),
        ({"r": "8"}, "r='8': expected a rank"),
        ({"lora_alpha": 0}, "lora_alpha=0: expected a number above 0"),
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
        (
            lambda tensors, name: tensors.update({name: torch.zeros(16, 4)}),
            r"shape \(16, 4\), but .* ask for \(16, 3\)",
        ),
        (
            lambda tensors, name: tensors.update({name: tensors[name] / 0}),
            "down_proj.lora_B.weight has 48 values that are",
        ),
        (
            lambda tensors, name: tensors.update({name: tensors[name].double()}),
            "is stored as float64; expected float32",
        ),
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
    with pytest.raises(
        MantissaError, match=r"has shape \(3, \d+\), but the base and the rank in .* ask for \(4, \d+\)"
    ):
        open_theirs(adapter)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_real_peft_reads_what_is_written_here(
    tmp_path: Path, outside: Callable[[], AbstractContextManager[None]], rslora: bool
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model, draw = load_model(DATA / "base"), torch.Generator().manual_seed(5)
    attach(model, LoraShape(4, 6.0, rslora=rslora), draw)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if name.endswith("lora_B"):
                parameter.normal_(0, 0.1, generator=draw)
    save_adapter(model, tmp_path / "adapter", str(DATA / "base"))
    tokens_BT, kernels = torch.randint(0, 20, (2, 10), generator=draw), NativeKernels(FP32)
    with torch.no_grad():
        ours = model.logits(model(tokens_BT, kernels), kernels).double()
        with outside():
            base = AutoModelForCausalLM.from_pretrained(DATA / "base", dtype=torch.float64)
            theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").double()
            expected = theirs(tokens_BT).logits
            merged = theirs.merge_and_unload().state_dict()
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-5)
    for name, weight in policy_weights(model).items():
        torch.testing.assert_close(weight.double(), merged[name], rtol=0, atol=1e-6)
