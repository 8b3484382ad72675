"""The integrations cost nothing until asked for, and a missing library is one clear line."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mantissa.dropin
from mantissa.base.errors import MantissaError
from mantissa.dropin.window import HeldScheduler, require


def test_importing_the_room_loads_none_of_the_libraries() -> None:
    code = "import mantissa.dropin, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"lightning", "accelerate", "transformers"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("name", "hidden", "library"),
    [("MantissaPrecision", "lightning.pytorch", "lightning"), ("MantissaTrainerMixin", "accelerate", "accelerate")],
)
def test_a_missing_library_names_its_extra(
    name: str, hidden: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, hidden, None)
    for module in ("lightning", "huggingface"):
        monkeypatch.delitem(sys.modules, f"mantissa.dropin.{module}", raising=False)
    with pytest.raises(MantissaError) as missing:
        getattr(mantissa.dropin, name)
    expected = f"{library} is not installed; this integration needs it: pip install 'mantissa-rl[{library}]'"
    assert str(missing.value) == expected


def test_a_library_that_is_there_but_broken_is_not_called_missing(tmp_path, monkeypatch) -> None:
    (tmp_path / "halfway.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        require("halfway", "halfway")
    with pytest.raises(MantissaError, match=r"nowhere is not installed.*mantissa-rl\[some\]"):
        require("nowhere", "some")


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Precision'"):
        mantissa.dropin.Precision  # noqa: B018 (looking it up is the test)


def test_a_held_schedule_waits_and_is_otherwise_the_schedule() -> None:
    class Schedule:
        def __init__(self) -> None:
            self.steps = 0

        def step(self, by: int = 1) -> None:
            self.steps += by

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

    applied = False
    held = HeldScheduler(Schedule(), lambda: applied)
    held.step()
    assert held.state_dict() == {"steps": 0}
    applied = True
    held.step(by=2)
    assert held.steps == 2
    with pytest.raises(AttributeError, match="absent"):
        held.absent  # noqa: B018
