"""Small models for this room, and a trainer that lies about its precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from mantissa.bench import runner
from mantissa.bench.rows import stamp
from mantissa.bench.runner import Setting
from mantissa.training.trainer import PrecisionTrainer


@pytest.fixture
def setting() -> Callable[..., tuple[Setting, list[str]]]:
    """A setting on the CPU, and the list of what was refused."""

    def make(**changes: Any) -> tuple[Setting, list[str]]:
        refused: list[str] = []
        fields: dict[str, Any] = {
            "precisions": ("fp32", "bf16", "fp16"),
            "device": "cpu",
            "backend": "auto",
            "repeats": 2,
            "common": stamp("cpu"),
            "refuse": refused.append,
            "say": lambda line: None,
        }
        return Setting(**(fields | changes)), refused

    return make


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes trainers of one precision report ``changes`` of their role, or ``evidence``, that are not as asked."""

    def lie(precision: str, evidence: str | None = None, **changes: Any) -> None:
        class Lying(PrecisionTrainer):
            def __init__(self, model: Any, optimizer: Any, asked: str, **options: Any) -> None:
                super().__init__(model, optimizer, asked, **options)
                if asked == precision:
                    self.precision = dataclasses.replace(self.precision, **changes)
                    self.evidence = self.evidence if evidence is None else evidence

        monkeypatch.setattr(runner, "PrecisionTrainer", Lying)

    return lie
