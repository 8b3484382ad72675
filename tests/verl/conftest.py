"""Tests inside the real verl, in the environment of ``make test-verl``; elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# verl's environment has no hypothesis; what needs it needs no verl.
collect_ignore = [] if importlib.util.find_spec("hypothesis") else ["test_parts.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """verl warns as it is imported and asked; those are not ours to fix."""
    absent = pytest.mark.skip(reason="needs the real verl: make test-verl")
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("verl"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if importlib.util.find_spec("verl") is None:
                item.add_marker(absent)
            elif item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason="needs verl and vLLM together: make test-verl-vllm"))


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """verl's own code mixes dtypes: no strict mode around it."""
