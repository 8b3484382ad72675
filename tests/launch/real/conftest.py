"""The real verl: its configuration composed as hydra would compose it, in the environment of ``make test-verl``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """verl warns as it is imported and asked; those are not ours to fix."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """verl's own code mixes dtypes: no strict mode around it."""


@pytest.fixture(scope="session")
def verl_folder() -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verl = pytest.importorskip("verl", reason="needs the real verl: make test-verl")
    return Path(verl.__file__).parent


@pytest.fixture(scope="session")
def verl_version(verl_folder: Path) -> str:
    return (verl_folder / "version" / "version").read_text().strip()


@pytest.fixture(scope="session")
def compose(verl_folder: Path) -> Callable[[Sequence[str]], Any]:
    """Composes verl's configuration with overrides; hydra raises for what its tree does not have."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    def composed(overrides: Sequence[str]) -> Any:
        with initialize_config_dir(str(verl_folder / "trainer" / "config"), version_base=None):
            return hydra_compose("ppo_trainer", overrides=list(overrides))

    return composed
