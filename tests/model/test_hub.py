"""Finding a model: folders, hub names, and what each way of failing says. No test touches the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from mantissa.base.errors import MantissaError
from mantissa.base.hub import find_model
from mantissa.model import load_model, load_tokenizer


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(tmp_path) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("org/name") == Path("org/name")  # a folder here goes before the hub
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/org") == tmp_path / "org"


@pytest.mark.parametrize("name", ["nowhere", "/no/such/place", "a/b/c", "../x", "org/na me", "runs/typo", ""])
def test_what_is_not_said_to_be_the_hubs_never_asks_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir("/")
    if name == "":
        assert find_model(name) == Path(".")
        return
    with pytest.raises(MantissaError, match="no such folder; check the path") as caught:
        find_model(name)
    assert ("say hub:runs/typo" in str(caught.value)) == (name == "runs/typo")


@pytest.mark.parametrize("name", ["hub:", "hub:name", "hub:a/b/c", "hub:../x", "hub:-/x", "hub:/etc"])
def test_what_is_no_name_of_the_hub_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(MantissaError, match="no name of the hub; expected hub:ORG/NAME"):
        find_model(name)


def test_a_hub_name_is_fetched_without_what_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_theirs: Callable[..., Any]
) -> None:
    _, folder = save_theirs("llama")
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("hub:org/name").config.family == "llama"
    with pytest.raises(MantissaError, match="no tokenizer files"):
        load_tokenizer("hub:org/name")
    (weights_name, weights), (tokenizer_name, tokenizer) = asked
    assert weights_name == tokenizer_name == "org/name"
    assert set(weights) - set(tokenizer) == {"*.safetensors"}
    assert not any("bin" in pattern for pattern in weights)


def test_the_hub_cannot_be_reached() -> None:
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)  # what HF_HUB_OFFLINE=1 sets at import
        with pytest.raises(
            MantissaError, match=r"mantissa-tests/absent: .*the hub gave no copy .*HF_HUB_OFFLINE"
        ) as caught:
            load_model("hub:mantissa-tests/absent")
    assert "\n" not in str(caught.value)


def _raises(error: Exception) -> Callable[..., Any]:
    def download(*_: Any, **__: Any) -> Any:
        raise error

    return download


def test_gated_and_unknown_repositories_and_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    cases = (
        (GatedRepoError.__new__(GatedRepoError), "accept this model's terms"),
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "no such model on the hub"),
        (ConnectionResetError("peer went away"), "peer went away"),
        (OSError(28, "No space left on device"), "No space left"),
    )
    for error, message in cases:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", _raises(error))
        with pytest.raises(MantissaError, match=message):
            find_model("hub:org/name")
