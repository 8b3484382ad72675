"""A run's policy: where it comes from, fresh or opened, and what keeps the base of its low-rank adapters the same.

Checkpoints hold the adapters and their optimiser alone. The base is

- the model that the recipe names, where it names one: read again at a resume, and known again by its digest;
- what the warm start made of a fresh policy's random weights, all of which it trains: saved once, as ``base/`` in the
  run, before the first checkpoint.

So a checkpoint and its base belong together or the resume says that they do not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mantissa.base.bounds import require_memory
from mantissa.base.config import Config
from mantissa.base.errors import MantissaError
from mantissa.base.hub import cached, find_model, hub_name
from mantissa.base.seeds import generator
from mantissa.model import (
    Decoder,
    FreshModelConfig,
    LoraConfig,
    Tokenizer,
    attach,
    base_digest,
    base_parameters,
    byte_tokenizer,
    character_tokenizer,
    is_adapter,
    load_adapter,
    load_model,
    load_tokenizer,
    read_shape,
    save_adapter,
    save_model,
    training_base,
)
from mantissa.model.config import OtherFamilyError, read_config
from mantissa.runs.directory import RunDirectory
from mantissa.tasks import Task
from mantissa.training import load_weights


class ModelSource(Config):
    """Where the policy comes from: exactly one of ``path`` and ``fresh``."""

    path: str | None = Field(
        None,
        description="Hugging Face folder, a run's folder, an adapter's folder, FILE.gguf, package:NAME (an installed "
        "package that ships one GGUF file), or hub:ORG/NAME, a model of the Hugging Face hub.",
    )
    fresh: FreshModelConfig | None = Field(None, description="A new policy of this shape with random weights.")
    tokenizer: Literal["bytes", "characters"] | None = Field(
        None, description="A fresh policy's: every byte (the default), or the characters of a generated task."
    )
    lora: LoraConfig | None = Field(None, description="None: every weight trains, and there are no adapters.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.fresh is None):
            raise ValueError("expected exactly one of model.path and model.fresh; set the other to null")
        if self.path is not None and self.tokenizer is not None:
            raise ValueError("model.tokenizer does nothing beside model.path, which brings its own; leave it out")
        if self.fresh is not None and self.lora is not None and self.lora.path is not None:
            raise ValueError("model.lora.path belongs to a base: give that as model.path, not model.fresh")
        return self


def policy_folder(path: str) -> str:
    """A run's folder stands for the policy it trained."""
    inside = Path(path) / "policy"
    if (Path(path) / "config.yaml").is_file():
        if not inside.is_dir():
            raise MantissaError(f"{path} is a run without a policy yet: it is written at the end; resume the run first")
        return str(inside)
    return path


def open_policy(path: str, lora: LoraConfig | None, seed: int) -> tuple[Decoder, Tokenizer]:
    """The policy that ``path`` names, an adapter's folder or what ``find_model`` knows, with ``lora``'s adapters."""
    base, adapter = locate(path, lora)
    stored = None if adapter is None else read_shape(adapter)[0]
    shape = None
    if lora is not None:
        shape = lora.shape(stored, str(adapter))  # before the weights are read: a mistake shows at once
    elif stored is not None:
        shape = stored
    model = load_model(base)
    tokenizer = load_tokenizer(base, model.config.vocab_size)
    if shape is not None:
        attach(model, shape, generator(seed, "lora"))
    if adapter is not None:
        load_adapter(model, adapter)
    return model, tokenizer


def open_any(path: str) -> tuple[Any, Tokenizer, str]:
    """The policy that ``path`` names, its tokenizer, and ""; or a causal language model of transformers, by its own
    code, and why our decoder does not take it. ``MantissaError``: neither, or a folder that is damaged."""
    folder = find_model(path, weights=False)
    if not (refused := refused_by_ours(folder)):
        return *open_policy(path, None, 0), ""
    model = load_any(find_model(path), refused)
    return model, load_tokenizer(folder, model.config.get_text_config().vocab_size), refused


def refused_by_ours(folder: Path) -> str:
    """Why our decoder does not take a folder's model; "" where it does, or it is no whole model of transformers'."""
    try:
        if folder.is_dir() and not is_adapter(folder):
            read_config(folder)
    except OtherFamilyError as refused:
        return str(refused)
    return ""


def load_any(folder: Path, refused: str) -> Any:
    """The model of a folder by transformers' own code, fp32. ``refused``: why not by our decoder, for the error where
    transformers does not load it either."""
    from mantissa.rollout.transformers import load_transformers

    try:
        return load_transformers(folder)
    except MantissaError as theirs:
        raise MantissaError(f"{refused}; and {theirs}") from None


def locate(path: str, lora: LoraConfig | None) -> tuple[str, Path | None]:
    """The base (a name for ``find_model``) and the folder of the stored adapter, if there is one to continue from."""
    folder = find_model(path, weights=False)
    given = None if lora is None or lora.path is None else _adapter_folder(lora.path)
    if not is_adapter(folder):
        if given is None and (folder / "adapter_config.json").is_file():
            raise MantissaError(
                f"{path} holds both a model and an adapter: give model.lora.path={path} too to continue from both, or "
                "move adapter_config.json away"
            )
        return path, given
    if given is not None:
        raise MantissaError(f"model.path={path} is an adapter, and so is model.lora.path: give its base as model.path")
    adapter = find_model(path)
    base = read_shape(adapter)[1]
    if base is None or (Path(base).is_absolute() and not Path(base).exists()):
        where = "does not say what it adapts" if base is None else f"adapts {base}, which is not there"
        raise MantissaError(f"{path}: the adapter {where}; give its base as model.path and this as model.lora.path")
    if Path(base).exists() or not (own := cached(base)):
        return base, adapter  # which ``find_model`` refuses where it is neither there nor named as it wants
    return str(own), adapter


def _adapter_folder(path: str) -> Path:
    """A run's folder stands for the adapter it trained."""
    if (Path(path) / "config.yaml").is_file():
        if not (Path(path) / "adapter").is_dir():
            raise MantissaError(f"{path} is a run without an adapter: it was not trained with lora, or is not finished")
        return Path(path) / "adapter"
    return find_model(path)


class FrozenBase:
    """The base of one run's policy. Where it has no adapters there is nothing to freeze: nothing happens."""

    def __init__(self, source: ModelSource, model: Decoder, tokenizer: Tokenizer, run: RunDirectory) -> None:
        self._source, self._model, self._tokenizer, self._run = source, model, tokenizer, run
        self._digest: str | None = None

    def warming(self) -> AbstractContextManager[None]:
        """Around the warm start: a fresh policy's trains the base, any other one what RL trains."""
        return training_base(self._model) if self._own else nullcontext()

    def keep(self) -> None:
        """After the warm start: save the base where nothing else could give it back."""
        if self._own:
            save_model(self._model, self._tokenizer, self._run.base_path, weights=base_parameters(self._model))

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of the base: its digest."""
        if self._model.lora is None:
            return {}
        self._digest = self._digest or base_digest(self._model)
        return {"base": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Put the base back that a checkpoint's adapters were trained on; ``MantissaError`` where it is another one."""
        if self._model.lora is None:
            return
        saved = load_model(self._run.base_path) if self._own else self._model
        if base_digest(saved) != state.get("base"):
            where = self._run.base_path if self._own else f"model.path={self._source.path}"
            raise MantissaError(
                f"{where} is not the base that this run's adapters were trained on: its weights differ; put the "
                "original back to resume, or start a new run"
            )
        if self._own:
            load_weights(base_parameters(self._model), base_parameters(saved))

    def export(self) -> None:
        """Write the adapters in peft's format, naming their base."""
        if self._model.lora is not None:
            save_adapter(self._model, self._run.adapter_path, self._name())

    @property
    def _own(self) -> bool:
        """Whether the run made its base itself."""
        return self._model.lora is not None and self._source.fresh is not None

    def _name(self) -> str:
        if self._source.path is None:
            return str(self._run.base_path.resolve())
        base = locate(policy_folder(self._source.path), self._source.lora)[0]
        return str(Path(base).resolve()) if Path(base).exists() else hub_name(base)


_BYTES_A_WEIGHT = 10  # fp32, its gradient, and two moments of 8 bits


def load_policy(source: ModelSource, task: Task, seed: int) -> tuple[Decoder, Tokenizer]:
    """The policy's fp32 masters, adapters attached where the recipe asks for them, and its tokenizer."""
    if source.path is not None:
        try:
            return open_policy(policy_folder(source.path), source.lora, seed)
        except OtherFamilyError as error:
            raise MantissaError(f"{error}; rollout.engine=transformers runs it by transformers' own code") from None
    assert source.fresh is not None  # the configuration's own check
    tokenizer = byte_tokenizer()
    if source.tokenizer == "characters":
        if task.alphabet is None:
            raise MantissaError(f"model.tokenizer=characters: task {task.name} has no alphabet of its own; use bytes")
        tokenizer = character_tokenizer(task.alphabet)
    shape = source.fresh.model(tokenizer.vocab_size)
    what = f"model.fresh: {shape.parameters:,} parameters with gradients and moments"
    require_memory(_BYTES_A_WEIGHT * shape.parameters, what, "make it smaller")
    model = Decoder(shape).initialize(generator(seed, "weights"))
    if source.lora is not None:
        attach(model, source.lora.shape(), generator(seed, "lora"))
    return model, tokenizer
