"""Every test runs in strict-promotion mode, warnings being errors (pyproject), on at most two threads, seeded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mantissa.kernels import cpu
from other_library import asked_library, asked_processor
from strict_promotion import StrictPromotion

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a script that put the suite in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or the runs that tests interrupt would ignore it too

# The real math sets are not part of the project: a folder data/ in the checkout, or the one that the variable names.
SHARED_DATA = Path(os.environ.get("MANTISSA_DATA", Path(__file__).resolve().parents[1] / "data"))


@pytest.fixture(scope="session", autouse=True)
def _products() -> Iterator[None]:
    """For fixtures of any scope."""
    with asked_library(), asked_processor():
        yield


@pytest.fixture
def bf16_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this processor too, for tests of what roles become on one that does not multiply bf16 itself."""
    monkeypatch.setattr(cpu, "products", lambda: cpu.CpuProducts(1.0))


@pytest.fixture
def bf16_is_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that multiplies bf16 itself; by this one's library, where it has such products."""
    if not cpu.has_bf16():
        pytest.skip("no products of bf16 tensors here")
    monkeypatch.setattr(cpu, "products", lambda: cpu.CpuProducts(0.5))


@pytest.fixture(autouse=True)
def _strict_promotion() -> Iterator[None]:
    torch.manual_seed(0)
    with StrictPromotion():
        yield


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    # libgomp spins: more threads than cores make small products a hundred times slower; OMP_NUM_THREADS=1 asks for less
    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _threads_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)  # two in each of two workers, left by one test, made those after it ten times slower


@pytest.fixture
def shared_data() -> Path:
    """The folder of the real math sets."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the real math sets in {SHARED_DATA}; MANTISSA_DATA=FOLDER names another")
    return SHARED_DATA


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
