"""TRL's gate and the weights of another engine that samples, without TRL: what did not arrive is named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fake_vllm
from mantissa.base.errors import MantissaError
from mantissa.dropin.trl import _Syncs

NAMES = ("embed_tokens", "q_proj", "k_proj", "down_proj", "lm_head")


class Adapted(nn.Module):
    """As peft's linear layer."""

    def __init__(self, inside: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.active_adapters = inside, {"default": 2.0}, ["default"]
        low, high = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": low}), nn.ModuleDict({"default": high})
        self.merged = self.disable_adapters = self.fan_in_fan_out = False


def model(adapter: str = "") -> nn.Module:
    torch.manual_seed(0)
    made = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in NAMES})
    if adapter:
        made[adapter] = Adapted(made[adapter])  # type: ignore[arg-type]
    return made


class Training:
    """A trainer whose ``rollout_func`` samples from ``engine``, in bf16; ``send`` says what that then holds."""

    def __init__(self, adapter: str = "", **more: Any) -> None:
        self.model, self.engine, self.adapter = model(adapter), model().bfloat16(), adapter
        self.said: list[str] = []
        self.trainer = SimpleNamespace(
            args=SimpleNamespace(use_vllm=more.get("use_vllm", False)),
            model=self.model,
            rollout_func=more.get("rollout_func", print),
            state=SimpleNamespace(global_step=-1),
            accelerator=SimpleNamespace(num_processes=more.get("processes", 1), unwrap_model=lambda each: each),
            _generate_and_score_completions=self.sampled,
        )
        engine = more.get("engine", self.engine)
        self.syncs = _Syncs(self.trainer, 10, engine, self.said.append)
        self.syncs.watch()

    def whole(self) -> dict[str, Tensor]:
        """The trained weights, the adapter merged in the order that peft has."""
        found = {
            name.replace(".base_layer", ""): w for name, w in self.model.state_dict().items() if "lora" not in name
        }
        if self.adapter:
            layer: Any = self.model[self.adapter]  # type: ignore[index]
            low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            found[f"{self.adapter}.weight"] = (found[f"{self.adapter}.weight"] + high @ low * 2.0).detach()
        return {name: w.clone() for name, w in found.items()}

    def sampled(self, inputs: Any) -> Any:
        new = {name: w.bfloat16() for name, w in self.whole().items()}
        self.spoil(new, {name: w.clone() for name, w in self.engine.state_dict().items()})
        self.engine.load_state_dict(new)
        return inputs

    def step(self, spoil: Callable[[dict[str, Tensor], dict[str, Tensor]], Any] = lambda new, old: None) -> None:
        self.spoil = spoil
        self.trainer.state.global_step += 1
        for parameter in self.model.parameters():
            parameter.data = parameter.data + 0.05 * torch.randn_like(parameter)
        assert self.trainer._generate_and_score_completions(3) == 3
        self.trainer._generate_and_score_completions(3)  # a batch more of the same weights


@pytest.mark.parametrize("adapter", ["", "q_proj"])
def test_nothing_is_said_of_healthy_syncs(adapter: str) -> None:
    training = Training(adapter)
    for _ in range(21):
        training.step()
    assert training.said == []
    assert not training.syncs.lost
    assert 0 < training.syncs.seconds < 60
    assert training.syncs.proof.count == 21


Q, K, DOWN = "q_proj.weight", "k_proj.weight", "down_proj.weight"
FAULTS: dict[str, tuple[str, Callable[[dict[str, Tensor], dict[str, Tensor]], Any], str]] = {
    "stale": ("", lambda new, old: new.update(old), "5 of 5 tensors, 100.00% of the weights: stale: "),
    "skipped": ("", lambda new, old: new.update({DOWN: old[DOWN]}), "stale: down_proj.weight (as at the sync before)"),
    "swapped": ("", lambda new, old: new.update({Q: new[K], K: new[Q]}), "q_proj.weight (those of k_proj.weight)"),
    "asleep": ("", lambda new, old: new[DOWN].zero_(), "zero: down_proj.weight"),
    "scaled": ("", lambda new, old: new[DOWN].mul_(1.5), "scaled: down_proj.weight"),
}


@pytest.mark.parametrize("at", [2, 10, 20])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_at_the_first_look_after_it(fault: str, at: int) -> None:
    adapter, spoil, said = FAULTS[fault]
    training = Training(adapter)
    for _ in range(at - 1):
        training.step()
    training.step(spoil)
    (line,) = training.said
    assert line.startswith(f"mantissa doctor: step {at - 1}: the engine does not have the trainer's weights: ")
    assert said in line
    assert training.syncs.lost


@pytest.mark.parametrize(
    ("times", "named"), [(0, "adapter not merged: q_proj.weight"), (2, "adapter merged twice: q_proj.weight")]
)
def test_an_adapter_that_is_dropped_or_merged_twice_is_named(times: int, named: str) -> None:
    training = Training("q_proj")
    training.step()

    def spoil(new: dict[str, Tensor], old: dict[str, Tensor]) -> None:
        layer: Any = training.model["q_proj"]  # type: ignore[index]
        low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        new[Q] = (layer.base_layer.weight + times * (high @ low * 2.0)).detach().bfloat16()

    training.step(spoil)
    (line,) = training.said
    assert f"1 of 5 tensors, 20.00% of the weights: {named}" in line


def test_a_vllm_in_the_trainers_process_is_read_by_its_products() -> None:
    masters = {name: each.contiguous() for name, each in fake_vllm.masters(3).items()}

    class Policy(nn.Module):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            return dict(masters)

    training = Training(engine=None, use_vllm=True, rollout_func=None)
    assert "a vLLM server's are not known; give its address as gate(trainer, engine=...)" in training.said.pop()
    held = fake_vllm.Model(masters)
    runner = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=held)))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=runner))
    training.trainer.vllm_generation = SimpleNamespace(llm=llm)
    training.trainer.model, training.trainer._generate_and_score_completions = Policy(), lambda inputs: inputs
    syncs = _Syncs(training.trainer, 10, None, training.said.append)
    syncs.watch()
    for step in range(3):
        training.trainer.state.global_step = step
        training.trainer._generate_and_score_completions(1)
    assert training.said == []
    assert syncs.proof.count == 3
    masters["model.norm.weight"] = masters["model.norm.weight"] * 2
    training.trainer.state.global_step = 3
    training.trainer._generate_and_score_completions(1)
    assert "stale: norm.weight (as at the sync before)" in training.said[0]


def test_what_is_not_compared_is_said_at_the_start_and_a_wrong_engine_is_an_error() -> None:
    unknown = Training(engine=None)
    assert "what a rollout_func samples from is not known" in unknown.said[0]
    assert Training(engine=None, rollout_func=None).said == [], "the trained model itself samples"
    assert "the trainer runs in several processes" in Training(processes=2).said[0]
    with pytest.raises(MantissaError, match="no vLLM answers"):
        Training(engine="http://127.0.0.1:9")


def test_an_engine_that_goes_away_is_one_line_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()

    def gone(due: bool) -> str:
        raise OSError("gone")

    monkeypatch.setattr(training.syncs, "_compared", gone)
    training.step()
    training.step()
    assert training.said == ["mantissa doctor: step 0: no weights are compared any more: gone"]
    assert not training.syncs.lost
