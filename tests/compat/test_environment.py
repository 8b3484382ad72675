"""Environment variables: the old guides documented them and no code read them. Here each one is read."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mantissa import compat
from mantissa.compat import ENVIRONMENT, ExtendedFP16Config, ExtendedFP16Trainer, FP16Trainer, FP16TrainingConfig
from mantissa.errors import MantissaError
from old_trainers import sgd
from toys import cross_entropy, data, fragile, mlp

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
    assert (
        given_config.config == FP16TrainingConfig()
    )  # who writes a configuration has the last word, but for the switch
    field = {ENVIRONMENT[variable]: getattr(FP16TrainingConfig(), ENVIRONMENT[variable])}
    assert FP16TrainingConfig.from_environment(**field) == FP16TrainingConfig()


WORDS = [("true", True), ("1", True), ("YES", True), (" on", True), ("false", False), ("0", False), ("No", False)]


@pytest.mark.parametrize(("word", "on"), WORDS)
def test_the_switch_reaches_every_trainer(
    word: str, on: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those with a configuration too; it is left as it is, and nothing that the old guides read is missing."""
    monkeypatch.setenv("ENABLE_FP16_TRAINING", word)
    model, batch = mlp(), data(1)[0]
    for trainer in (
        FP16Trainer(model, sgd(model)),
        FP16Trainer(model, sgd(model), FP16TrainingConfig()),
        ExtendedFP16Trainer(model, sgd(model), ExtendedFP16Config("mixed_bf16"), device="cpu"),
        FP16Trainer(model, sgd(model), FP16TrainingConfig(enabled=False)),
    ):
        assert trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
        stats, asked = trainer.get_stats(), trainer.config
        low = on and asked.enabled
        assert stats["precision_in_use"] == (asked.number_format if low else "fp32")
        assert stats["current_scale"] == (65536.0 if stats["fp16_enabled"] else 1.0)
        assert trainer.effective_config == dataclasses.replace(asked, enabled=low)
    told = ["fp32, not in fp16", "fp32, not in bf16"]  # of the two that asked for more than they get
    assert [record.message.partition("training in ")[2] for record in caplog.records] == ([] if on else told)


def test_overflows_and_changes_of_scale_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ENABLE_FP16_TRAINING", raising=False)
    model, trap = fragile()
    trainer = FP16Trainer(model, sgd(model), FP16TrainingConfig(growth_interval=2))
    with caplog.at_level("INFO", "mantissa"):
        for i, batch in enumerate(data(4)):
            trap.limit = 0.0 if i == 1 else math.inf
            trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "after 1 updates: overflow at loss scale 65536: the batch is given up, the scale now 32768"),
        ("INFO", "after 3 updates: loss scale 32768, now 65536"),
    ]


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
