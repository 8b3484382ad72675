"""The constructors of the drop-in: ranges by type, each one clear error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hostile import attempt
from mantissa.compat import ExtendedFP16Config, FP16TrainingConfig
from mantissa.training import PrecisionTrainer, ScalerConfig
from toys import mlp

NONSENSE: list[Any] = ["2", None, True, math.nan, -1, [], 1e300, 10**400]
SCALER = ("initial", "growth_factor", "backoff_factor", "growth_interval", "floor", "retries")
CONFIGS = ("loss_scale", "growth_factor", "backoff_factor", "growth_interval")
TRAINER = ("max_grad_norm", "accumulate", "probe_every")


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: str(value)[:9])
def test_nonsense(value: Any) -> None:
    for name in SCALER:
        assert attempt(ScalerConfig, **{name: value}), name
    for kind in (FP16TrainingConfig, ExtendedFP16Config):
        for name in CONFIGS:
            assert attempt(kind, **{name: value}), name
    model = mlp()
    for name in TRAINER:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert attempt(PrecisionTrainer, model, optimizer, "fp32", say=print, **{name: value}), name


@pytest.mark.parametrize(
    "values", [{"growth_factor": math.inf}, {"growth_interval": 1.5}, {"floor": 0.0}, {"retries": 0.5}]
)
def test_a_scaler_is_finite_and_counts_in_whole_numbers(values: dict[str, float]) -> None:
    assert attempt(ScalerConfig, **values)  # type: ignore[arg-type]
