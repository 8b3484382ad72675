"""The oracle of this room: random models made, saved and run by transformers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
}


@contextmanager
def _outside() -> Iterator[None]:
    """Leave strict-promotion mode: transformers' code is the oracle, and it may mix dtypes."""
    with _disable_current_modes():
        yield


@pytest.fixture(scope="session")
def outside() -> Callable[[], AbstractContextManager[None]]:
    return _outside


@pytest.fixture(scope="session")
def make_theirs() -> Callable[..., Any]:
    """``make(family, **settings)``: a transformers model whose every parameter matters: no bias 0, no norm 1."""

    def make(family: str, **settings: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        with _outside():
            config = AutoConfig.for_model(family, **{**TINY, **settings})
            model = AutoModelForCausalLM.from_config(config).float().eval()
            generator = torch.Generator().manual_seed(7)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    if "norm" in name:
                        parameter.copy_(1 + 0.3 * noise)
                    elif name.endswith("bias"):
                        parameter.copy_(0.3 * noise)
                    else:
                        parameter.copy_(noise * (1.0 if "embed" in name else 1.5) / parameter.shape[-1] ** 0.5)
        return model

    return make


@pytest.fixture(scope="session")
def save_theirs(make_theirs: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``save(family, **settings)``: such a model and the folder that its own ``save_pretrained`` wrote."""

    def save(family: str, **settings: Any) -> tuple[Any, Path]:
        model, folder = make_theirs(family, **settings), tmp_path_factory.mktemp(family)
        with _outside():
            model.save_pretrained(folder)
        return model, folder

    return save


@pytest.fixture(scope="session")
def their_logits() -> Callable[[Any, Tensor], Tensor]:
    """Logits as transformers computes them for ``tokens_BT``, in the model's own dtype."""

    def logits(model: Any, tokens_BT: Tensor) -> Tensor:
        with _outside(), torch.no_grad():
            return model(tokens_BT).logits

    return logits


@pytest.fixture(name="tokens_BT")
def _tokens() -> Tensor:
    return torch.randint(0, TINY["vocab_size"], (2, 96), generator=torch.Generator().manual_seed(3))
