"""A job that runs or is over, by what its framework saved: the whole configuration, so that nothing is guessed.

| found in the folder, the first of | who writes it |
|---|---|
| ``.hydra/config.yaml``, also below ``outputs/DATE/TIME`` | hydra, for verl |
| ``training_args.bin``, also in ``checkpoint-N`` | TRL, and others on Hugging Face's Trainer |
| ``files/config.yaml`` of a run in ``wandb`` | Weights & Biases |
| ``config.yaml`` | NeMo-RL, AReaL, SkyRL |

Beside ``training_args.bin``, ``config.json`` has the format in which the model was held and ``trainer_state.json`` how
far the job is. Whoever sends a folder can put anything into it: links out of it are not followed, an object's class is
never looked up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mantissa.base.bounds import Limits, boundary, regular_file, require_size
from mantissa.base.errors import MantissaError
from mantissa.base.readers.json import read_json
from mantissa.base.readers.pickles import Record, load
from mantissa.base.readers.yaml import read_yaml
from mantissa.launch.check import check_verl_job
from mantissa.launch.scripts import Given, is_verl, leaves, plain, read_config
from mantissa.launch.settings import Answer, check_settings, not_at_default, whose

_HYDRA = (".", ".hydra", "*/*/.hydra", "outputs/*/*/.hydra")
_ARGUMENTS = ("training_args.bin", "checkpoint-*/training_args.bin")
_LOGGED = ("files/config.yaml", "wandb/latest-run/files/config.yaml", "wandb/run-*/files/config.yaml", "config.yaml")
_LARGEST_ARGUMENTS = 4_000_000  # bytes; TRL's have eight thousand
_STATE = Limits(200_000_000, 64, 20_000_000)  # trainer_state.json holds every logged step
_OVERRIDES = Limits(200_000, 1_000, 5_000)
_SEEN = 20_000  # entries of the folder that are looked at
_ADVICE = "expected a job's folder: hydra's outputs/DATE/TIME, TRL's output_dir, a run of W&B's"


@dataclass
class Job:
    """``source``: the file that holds the configuration. ``overrides``: as they were given to hydra. ``entry``: the
    program that hydra was started by. ``said``: what else the folder says, a line each."""

    source: Path
    given: Given
    overrides: tuple[str, ...] = ()
    entry: str = ""
    said: list[str] = field(default_factory=list)


def check_job(folder: Path, framework: str | None = None, version: str | None = None) -> tuple[list[str], Answer]:
    """What runs in the job of a folder, with a few lines about what was read. ``version``: verl's, told where None.

    Raises ``MantissaError`` for a folder without a configuration, and for one that is damaged or hostile.
    """
    job = read_job(folder)
    lines = [f"job: {job.source}", *(f"  {line}" for line in job.said)]
    if framework == "verl" or (framework is None and is_verl(job.given)):
        return lines, check_verl_job(job.given.settings, job.overrides, job.entry, version)
    name = whose(job.given, framework)
    job.given.asked = not_at_default(job.given, name)
    return lines, check_settings(job.given, name)


def read_job(folder: Path) -> Job:
    """What a job's folder says of its configuration."""
    if not folder.is_dir():
        raise MantissaError(f"{folder}: no such folder; {_ADVICE}")
    with boundary(folder, _ADVICE):
        if where := _newest(folder, [f"{each}/overrides.yaml" for each in _HYDRA]):
            return _of_hydra(folder, where)
        if where := _newest(folder, _ARGUMENTS):
            return _of_arguments(folder, where)
        if where := _newest(folder, _LOGGED):
            job = Job(where, Given(partial=True))
            _read(folder, where, job.given)
            if job.given.has("per_device_train_batch_size"):  # of Trainer's callback, which has adapters too
                adapters = any(key.startswith("peft_config.") for key in job.given.settings)
                job.given.settings |= {"use_peft": str(adapters).lower(), "trainer.model": "null"}
            _forget_deepspeed(job.given)
            return job
    raise MantissaError(f"{folder}: no configuration in it; {_ADVICE}")


def _newest(folder: Path, patterns: list[str] | tuple[str, ...]) -> Path | None:
    """The last by name, numbers by value, of what the first pattern that fits anything finds; None where none does."""
    for pattern in patterns:
        found = [each for each in _few(folder, pattern) if regular_file(_within(folder, each))]
        if found:
            return max(found, key=lambda each: [int(part) if part.isdigit() else -1 for part in _parts(each)])
    return None


def _few(folder: Path, pattern: str) -> Iterator[Path]:
    if "*" not in pattern:
        yield folder / pattern
        return
    for count, each in enumerate(folder.glob(pattern)):
        if count >= _SEEN:
            raise MantissaError(f"{folder}: more than {_SEEN:,} of {pattern}; give the folder of one job")
        yield each


def _parts(path: Path) -> list[str]:
    return re.findall(r"\d{1,15}", str(path))


def _within(folder: Path, path: Path) -> Path:
    """``path``, where what it leads to lies in the folder."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise MantissaError(f"{path} leads out of {folder}, and is not followed; give the folder that holds it")
    return path


def _beside(folder: Path, path: Path) -> Path | None:
    return path if regular_file(_within(folder, path)) else None


def _read(folder: Path, path: Path, given: Given) -> None:
    require_size(_within(folder, path), 4_000_000)
    read_config(path, given)


def _of_hydra(folder: Path, overrides: Path) -> Job:
    """hydra's folder has the composed configuration, the overrides as given, and what started the job."""
    config = overrides.with_name("config.yaml")
    if not _beside(folder, config):
        raise MantissaError(f"{config}: no such file beside {overrides.name}; hydra writes both")
    job = Job(config, Given())
    _read(folder, config, job.given)
    given = read_yaml(overrides, _OVERRIDES)
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise MantissaError(f"{overrides}: expected hydra's list of overrides, got {type(given).__name__}")
    job.overrides = tuple(given)
    if hydra := _beside(folder, overrides.with_name("hydra.yaml")):
        about = Given()
        _read(folder, hydra, about)
        job.entry = about.settings.get("hydra.job.name", "")
    return job


def _of_arguments(folder: Path, path: Path) -> Job:
    require_size(path, _LARGEST_ARGUMENTS)
    record = load(path, records=True)
    if not isinstance(record, Record) or "per_device_train_batch_size" not in record:
        raise MantissaError(
            f"{path}: expected the arguments of a trainer, got {getattr(record, 'of', 'something else')}"
        )
    if "num_generations" not in record:
        raise MantissaError(f"{path}: expected the arguments of GRPO or RLOO, got {record.of}, which samples nothing")
    held = {name: _value(value) for name, value in record.items() if not name.startswith("_") and name != "arguments"}
    job = Job(path, Given(dict(leaves(held)), record.of.split("."), partial=True))
    job.said.append(f"arguments of the class {record.of}")
    _model(folder, path.with_name("config.json"), job)
    _progress(folder, path.with_name("trainer_state.json"), job)
    _forget_deepspeed(job.given)
    return job


def _value(value: Any) -> Any:
    """A field as its trainer's script would have it: an enumeration's value, a format's name."""
    if isinstance(value, type):  # a name that was not looked up, such as torch.bfloat16
        return getattr(value, "of", "object").rpartition(".")[2]
    if isinstance(value, Record) and value.get("arguments"):
        return _value(value["arguments"][0])
    if isinstance(value, dict):
        return {str(name): _value(inner) for name, inner in value.items() if name != "arguments"}
    return value if isinstance(value, (str, int, float, bool, type(None), list, tuple)) else type(value).__name__


def _model(folder: Path, path: Path, job: Job) -> None:
    """The format in which the model was held, as transformers wrote it with the model."""
    if _beside(folder, path.with_name("adapter_config.json")):
        job.given.settings["use_peft"] = "true"
        return
    held = _json(folder, path)
    dtype = held.get("dtype", held.get("torch_dtype"))
    if isinstance(dtype, str):
        job.given.settings["dtype"] = plain(dtype)
        job.given.settings |= {"use_peft": "false", "trainer.model": "null"}  # whose it was changes nothing of this
        job.said.append(f"the model was saved in {plain(dtype)}, which its weights are held in (config.json)")


def _progress(folder: Path, path: Path, job: Job) -> None:
    held = _json(folder, path)
    step, most = held.get("global_step"), held.get("max_steps")
    if isinstance(step, int) and isinstance(most, int):
        job.said.append(f"at step {step} of {most} (trainer_state.json; mantissa doctor reads its curves)")


def _json(folder: Path, path: Path) -> Mapping[str, Any]:
    if not _beside(folder, path):
        return {}
    held = read_json(path, limits=_STATE)
    if not isinstance(held, dict):
        raise MantissaError(f"{path}: expected an object, got {type(held).__name__}; restore the file")
    return held


def _forget_deepspeed(given: Given) -> None:
    """DeepSpeed holds masters of its own beside the model's weights: the model's format says nothing of them."""
    if given.settings.get("deepspeed", "null") != "null" and "dtype" in given.settings:
        del given.settings["dtype"]
        given.notes.append("masters are DeepSpeed's, which its own configuration says")
