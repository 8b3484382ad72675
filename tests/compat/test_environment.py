"""Environment variables: the old guides documented them and no code read them. Here each one is read."""

from __future__ import annotations

import dataclasses

import pytest

from mantissa import compat
from mantissa.compat import ENVIRONMENT, ExtendedFP16Config, ExtendedFP16Trainer, FP16Trainer, FP16TrainingConfig
from mantissa.errors import MantissaError
from old_trainers import sgd
from toys import mlp

GIVEN = {
    "ENABLE_FP16_TRAINING": ("false", False),
    "FP16_LOSS_SCALE": ("1024", 1024.0),
    "FP16_GROWTH_FACTOR": ("4.0", 4.0),
    "FP16_BACKOFF_FACTOR": ("0.25", 0.25),
    "FP16_GROWTH_INTERVAL": ("100", 100),
}


def test_the_table_of_variables_is_what_is_read() -> None:
    assert GIVEN.keys() == ENVIRONMENT.keys()
    assert compat.ENVIRONMENT is ENVIRONMENT


@pytest.mark.parametrize("variable", GIVEN)
def test_each_variable_is_read_by_both_trainers(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    text, value = GIVEN[variable]
    monkeypatch.setenv(variable, text)
    model = mlp()
    for trainer in (FP16Trainer(model, sgd(model)), ExtendedFP16Trainer(model, sgd(model), device="cpu")):
        plain = type(trainer.config)()
        assert trainer.config == dataclasses.replace(plain, **{ENVIRONMENT[variable]: value})
        assert trainer.config != plain
        if variable == "ENABLE_FP16_TRAINING":
            assert trainer.get_stats()["precision_in_use"] == "fp32"
        else:
            oracle = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
            oracle[ENVIRONMENT[variable].replace("loss_scale", "scale")] = value
            assert trainer.scaler.state_dict() == oracle | {"_growth_tracker": 0}
    given_config = FP16Trainer(model, sgd(model), FP16TrainingConfig())
    assert given_config.config == FP16TrainingConfig()  # who writes a configuration has the last word
    field = {ENVIRONMENT[variable]: getattr(FP16TrainingConfig(), ENVIRONMENT[variable])}
    assert FP16TrainingConfig.from_environment(**field) == FP16TrainingConfig()


BAD = [
    ("ENABLE_FP16_TRAINING", "maybe", "ENABLE_FP16_TRAINING='maybe': expected true or false"),
    ("FP16_LOSS_SCALE", "big", "FP16_LOSS_SCALE='big': expected a number"),
    ("FP16_LOSS_SCALE", "-1", r"loss_scale=-1.0: expected a finite number above 0 .*FP16_LOSS_SCALE='-1'"),
    ("FP16_LOSS_SCALE", "inf", r"loss_scale=inf: expected a finite number .*FP16_LOSS_SCALE='inf'"),
    ("FP16_GROWTH_FACTOR", "nan", r"growth_factor=nan: .*FP16_GROWTH_FACTOR='nan'"),
    ("FP16_BACKOFF_FACTOR", "2.0", r"backoff_factor=2.0: .*FP16_BACKOFF_FACTOR='2.0'"),
    ("FP16_GROWTH_INTERVAL", "2000.5", "FP16_GROWTH_INTERVAL='2000.5': expected a whole number"),
    ("FP16_GROWTH_INTERVAL", "0", r"growth_interval=0: .*FP16_GROWTH_INTERVAL='0'"),
]


@pytest.mark.parametrize(("variable", "text", "message"), BAD)
def test_a_bad_value_is_one_clear_error(
    variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    for config in (FP16TrainingConfig, ExtendedFP16Config):
        with pytest.raises(MantissaError, match=message) as caught:
            config.from_environment()
        assert "\n" not in str(caught.value)
