"""What training computes in, against optimisers of which it is known; and that nothing of them is touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mantissa import audit
from mantissa.precision import BF16, FP32, round_to_format
from mantissa.training import OptimizerStep, ScalerConfig, adamw, master_weights, scaler_for


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to(dtype)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 16).to(next(model.parameters()).dtype)).sum().backward()
    optimizer.step()


def cells(found: object) -> dict[str, tuple[str, str]]:
    return {row.role: (row.dtype, row.holds) for row in found.rows}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 24), (torch.bfloat16, 9), (torch.float16, 12)])
def test_the_smallest_update_is_half_a_spacing_of_the_weights_dtype(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype, bits: int
) -> None:
    """A weight of 1 that falls: below 1 the spacing is 2^(1 - bits), whose half is a tie, which goes to 1 or not."""
    model = network(dtype)
    found = audit(model, kind(model.parameters(), lr=1e-3))
    assert found.smallest is not None
    assert 2.0 ** -(bits + 0.8) < found.smallest < 2.0 ** -(bits - 1.5), found.update
    assert found.adds_up is False
    assert any("are lost" in text for text in found.warnings) == (dtype != torch.float32)


def test_adamw_over_bf16_weights_says_so_of_every_tensor() -> None:
    model = network(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    trained(model, optimizer)
    found = audit(model, optimizer)
    both = ("bfloat16", "bf16")
    roles = ("weights", "gradients", "moment exp_avg", "moment exp_avg_sq")
    assert cells(found) == dict.fromkeys(roles, both)
    assert sum("decay of 1 - beta" in text for text in found.warnings) == 2
    assert "moment exp_avg  " in str(found)


def test_fp32_tensors_of_bf16_values_are_found_out() -> None:
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(round_to_format(parameter, BF16))
    found = audit(model)
    assert cells(found) == {"weights": ("float32", "bf16")}
    assert found.warnings == ("weights are float32 tensors, but all their values are bf16's: they were rounded",)
    assert found.update == "not probed: no optimiser was given"


def test_masters_that_are_not_the_models_weights_have_a_row() -> None:
    model = network(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float() + 1e-4) for p in model.parameters()]
    found = audit(model, torch.optim.AdamW(masters, lr=1e-3))
    assert cells(found) == {"weights": ("bfloat16", "bf16"), "masters": ("float32", "fp32")}
    assert found.smallest == pytest.approx(2.0**-24, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "adds_up"), [("fp32", False), ("bf16_nearest", False), ("bf16_kahan", True), ("bf16_stochastic", True)]
)
def test_our_own_step_is_probed_with_what_it_does_to_weights(kind: str, adds_up: bool) -> None:
    model = network()
    parameters = dict(model.named_parameters())
    masters = master_weights(kind, parameters, BF16)  # type: ignore[arg-type]
    scaler = scaler_for(ScalerConfig(), FP32)
    step = OptimizerStep(parameters, adamw(model), scaler, BF16, lambda n: 1e-3, 1.0, lambda b: "", masters=masters)
    found = audit(model, step)
    assert found.adds_up is adds_up
    assert found.smallest is not None
    assert (found.smallest == pytest.approx(2.0**-24, rel=1e-6)) == (kind == "fp32")
    assert cells(found)["weights"] == ("float32", "fp32" if kind == "fp32" else "bf16")


class Strange(torch.optim.SGD):
    def step(self, closure: object = None) -> None:
        raise RuntimeError("needs a mesh")


def test_an_optimiser_that_cannot_be_probed_says_why() -> None:
    model = network()
    found = audit(model, Strange(model.parameters(), lr=0.1))
    assert found.update == "not probed: Strange over one parameter raised RuntimeError: needs a mesh"


class Stochastic(torch.optim.Optimizer):
    """Steps of lr against the gradient; with ``by_chance``, which no group says, rounded up or down by chance."""

    def __init__(self, params: Any, lr: float = 1e-3, by_chance: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.by_chance = by_chance

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                exact = p.double() - group["lr"] * p.grad.double()
                if self.by_chance and p.dtype == torch.bfloat16:
                    bits = exact.float().view(torch.int32)
                    exact = (bits + torch.randint_like(bits, 1 << 16) & ~0xFFFF).view(torch.float32)
                p.copy_(exact)


@pytest.mark.parametrize("by_chance", [False, True])
def test_what_an_optimiser_keeps_beside_its_groups_is_probed_too(by_chance: bool) -> None:
    model = network().bfloat16()
    found = audit(model, Stochastic(model.parameters(), by_chance=by_chance))
    assert found.adds_up == by_chance
    assert any("are lost" in text for text in found.warnings) != by_chance


def test_an_optimiser_is_probed_with_all_that_it_was_made_with() -> None:
    """Adafactor's own default, a relative step, is refused together with a rate."""
    from transformers.optimization import Adafactor

    model = network().bfloat16()
    found = audit(model, Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False))
    assert found.adds_up is False, found
    assert found.smallest is not None


def test_nothing_is_touched() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random = torch.get_rng_state()
    audit(model, optimizer)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
