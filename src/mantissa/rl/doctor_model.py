"""What the doctor scores a dump with: a policy and other versions of its weights, from a model's or a run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mantissa.base.errors import MantissaError
from mantissa.doctor.dump import Dump, routes
from mantissa.doctor.sides import AnyModel, Weights
from mantissa.doctor.substitution import adapter_versions, plain_policy
from mantissa.model import Decoder, Tokenizer, policy_weights, trained_parameters
from mantissa.rl.config.run import make_config
from mantissa.rl.policy import open_any, open_policy, policy_folder
from mantissa.runs.directory import RunDirectory
from mantissa.training import load_weights
from mantissa.training.checkpoint import load_checkpoint, saved_state


@dataclass(frozen=True)
class Diagnosed:
    """``model``: of plain weights, adapters merged in; of a family that our decoder does not know, transformers' own.
    ``versions``: others by name. ``dump``: what it can score."""

    model: Decoder | AnyModel
    tokenizer: Tokenizer
    versions: Mapping[str, Weights]
    dump: Dump


def open_model(path: str, dump: Dump, other: str | None, device: torch.device) -> Diagnosed:
    """The policy that ``path`` names, and one more as another version of its weights."""
    model, tokenizer = _opened(policy_folder(path))
    versions: dict[str, Weights] = {} if isinstance(model, AnyModel) else dict(adapter_versions(model))
    if other is not None:
        versions[other] = _weights_like(model, other)
    return Diagnosed(_placed(model, device), tokenizer, versions, dump)


def _opened(path: str) -> tuple[Decoder | AnyModel, Tokenizer]:
    model, tokenizer, refused = open_any(path)
    return (AnyModel(model) if refused else model), tokenizer


def open_plain(path: str, device: torch.device) -> tuple[Decoder | AnyModel, Tokenizer]:
    """The policy that ``path`` names, of plain weights, on a device, and its tokenizer."""
    model, tokenizer = _opened(policy_folder(path))
    return _placed(model, device), tokenizer


def open_run(dump: Dump, other: str | None, device: torch.device) -> Diagnosed:
    """A run's policy at the newest version that both a checkpoint and sampled sequences have, and the version before.

    The sequences are those that this version sampled and scored: of a run with a policy lag, none may be left.
    """
    assert dump.run is not None
    run = RunDirectory.open(dump.run)
    versions = {_version(run, step): step for step in run.checkpoint_steps()}
    sampled = {each.rollout_version for each in dump.sequences if each.learner_version in (None, each.rollout_version)}
    known = sorted(version for version in versions if version in sampled)
    if not known:
        raise MantissaError(
            f"{run.path}: no checkpoint holds weights that sampled what was kept (checkpoints are of versions "
            f"{_listed(versions)}, samples of {_listed(sampled)}); set checkpoint.every=1, or give --model"
        )
    newest = known[-1]
    model, tokenizer = _run_policy(run)
    others: dict[str, Weights] = {}
    earlier = [version for version in versions if version < newest]
    if earlier:
        _load(model, run, versions[max(earlier)])
        before = {name: weight.clone() for name, weight in _weights(model).items()}
        others[f"version {max(earlier)} (this is version {newest})"] = before
    _load(model, run, versions[newest])
    others |= {} if isinstance(model, AnyModel) else adapter_versions(model)
    if other is not None:
        others[other] = _weights_like(model, other)
    kept = [each for each in dump.sequences if each.rollout_version == newest == (each.learner_version or newest)]
    return Diagnosed(_placed(model, device), tokenizer, others, replace(dump, sequences=kept))


def _placed(model: Decoder | AnyModel, device: torch.device) -> Decoder | AnyModel:
    if isinstance(model, AnyModel):
        model.model.requires_grad_(False).to(device)
        return model
    return plain_policy(model).requires_grad_(False).to(device)


def _weights(model: Decoder | AnyModel) -> Weights:
    if isinstance(model, AnyModel):
        return {name: weight.detach() for name, weight in model.named_parameters()}
    return policy_weights(model)


def _listed(versions: object) -> str:
    return ", ".join(map(str, sorted(v for v in versions if v is not None))) or "none"  # type: ignore[attr-defined]


def _version(run: RunDirectory, step: int) -> int:
    return int(saved_state(run.path / "checkpoints", step)["step"]["updates"])


def _run_policy(run: RunDirectory) -> tuple[Decoder | AnyModel, Tokenizer]:
    """A decoder of the run's shape, with adapters where it trains some; its weights are not yet a checkpoint's."""
    config = make_config(run.config, str(run.path / "config.yaml"))
    if config.model.lora is not None:
        base = str(run.base_path) if config.model.fresh is not None else policy_folder(str(config.model.path))
        return open_policy(base, config.model.lora, config.seed)
    return _opened(policy_folder(str(run.path)))


def _load(model: Decoder | AnyModel, run: RunDirectory, step: int) -> None:
    trained = _weights(model) if isinstance(model, AnyModel) else trained_parameters(model)
    load_weights(trained, load_checkpoint(run.path / "checkpoints", step).policy)


def _weights_like(model: Decoder | AnyModel, path: str) -> Weights:
    """Another folder's weights, which must be of the same shape."""
    weights, wanted = _weights(_opened(policy_folder(path))[0]), _weights(model)
    odd = [name for name in wanted if name not in weights or weights[name].shape != wanted[name].shape]
    if odd or len(wanted) != len(weights):
        raise MantissaError(f"--other {path}: its weights have other names or shapes ({(odd or ['more of them'])[0]})")
    return weights


def open_for_doctor(path: str, dump: Dump, other: str | None, device: torch.device) -> Diagnosed:
    """By what ``--model`` names: the dump's own run, whose checkpoints are looked at, or any model."""
    own = dump.run is not None and Path(path).resolve() == dump.run.resolve()
    opened = open_run(dump, other, device) if own else open_model(path, dump, other, device)
    if (experts := routes(opened.model.config)) is None:
        return opened
    return replace(opened, dump=replace(opened.dump, settings=replace(opened.dump.settings, experts=experts)))
