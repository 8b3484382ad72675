"""Checkpoints that are damaged, tampered with or another run's: refused before anything is changed."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from hostile import attempt, fuzz, sizes
from mantissa.base.errors import MantissaError
from mantissa.dropin import PrecisionTrainer
from mantissa.model import load_model
from mantissa.rl import make_config
from mantissa.rl.assemble import Parts, assemble
from mantissa.rl.config.run import RunConfig, apply_overrides
from mantissa.rl.run import Run, restore
from mantissa.rl.session import resume, start
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live, Trackers
from mantissa.training import Checkpoint, load_checkpoint, save_checkpoint, saved_steps
from toys import cross_entropy, data, mlp

RECIPE = """
{name: small, steps: 2, device: cpu, precision: fp16, model: {fresh: {hidden_size: 16, layers: 1, heads: 1, kv_heads: 1,
head_dim: 16, intermediate_size: 16, max_positions: 32}, tokenizer: characters}, task: {kind: running_sum,
min_digits: 1, max_digits: 2, train_size: 20, heldout_size: 8, warm_start_size: 40},
rollout: {prompts: 4, samples: 2, max_tokens: 4, max_policy_lag: 1}, optimizer: {lr: 0.001}, evaluation: null,
checkpoint: {every: 1}, trackers: [], algorithm: {reference: {}, loss: flowrl}}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after the first of two steps, with a reference, a partition head and a batch sampled ahead."""
    path = tmp_path_factory.mktemp("run") / "run"
    start(config_of(path))
    shutil.rmtree(path / "checkpoints" / "step-2")
    return path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def config_of(path: Path) -> RunConfig:
    return make_config(apply_overrides(yaml.safe_load(RECIPE), [f"run_dir={path}"]), "recipe")


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    """What every damaged checkpoint is to be put into; none is, so one is enough."""
    made = assemble(config_of(Path("unused")))
    yield made
    made.close()


def signed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change ``state.json`` and sign it again, as an older program's or a forger's hand would."""
    from mantissa.base.files import digests_of
    from mantissa.training.checkpoint import _digest

    header = json.loads((folder / "state.json").read_text())
    header["files"] = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    header["sha256"] = digests_of(folder.glob("*.safetensors"))
    change(header)
    (folder / "state.json").write_text(json.dumps(header | {"digest": _digest(header)}))


def state(**values: Any) -> Callable[[Path], None]:
    return lambda folder: signed(folder, lambda header: header["state"].update(values))


def inner(key: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: signed(folder, lambda header: header["state"][key].update(values))


def ahead(**values: Any) -> Callable[[Path], None]:
    return lambda folder: signed(folder, lambda header: header["state"]["ahead"][0].update(values))


def tensors(file: str, work: Callable[[Tensor], Tensor], name: str = "") -> Callable[[Path], None]:
    """Change the first tensor of a file whose name ends in ``name``."""

    def damage(folder: Path) -> None:
        found = load_file(folder / f"{file}.safetensors")
        chosen = next(key for key in sorted(found) if key.endswith(name))
        found[chosen] = work(found[chosen]).contiguous()
        save_file(found, folder / f"{file}.safetensors")
        signed(folder, lambda header: None)

    return damage


def flip(file: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[-5] ^= 1
        (folder / file).write_bytes(content)

    return damage


def halved(tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) // 2]


def first_beyond(folder: Path) -> None:
    """The least token that the model has no embedding of."""
    weights = load_file(folder / "policy.safetensors")
    embeddings = max(len(weight) for name, weight in weights.items() if "embed" in name)
    tensors("ahead", lambda t: t.clamp(min=embeddings), "tokens")(folder)


def with_nan(tensor: Tensor) -> Tensor:
    return tensor.index_put((torch.zeros(1, dtype=torch.int64),), torch.tensor(float("nan"), dtype=tensor.dtype))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "moments of another shape": (tensors("optimizer", halved, "exp_avg"), "has shape"),
    "moments of int8": (tensors("optimizer", lambda t: t.to(torch.int8), "exp_avg"), "is int8, expected float32"),
    "moments of nan": (tensors("optimizer", with_nan, "exp_avg"), "not finite"),
    "negative squares": (tensors("optimizer", lambda t: t - 1, "exp_avg_sq"), "below 0"),
    "step of another shape": (tensors("optimizer", lambda t: t.repeat(3), "step"), "has shape"),
    "weights of int8": (tensors("policy", lambda t: t.to(torch.int8)), "is int8, expected float32"),
    "weights of nan": (tensors("policy", with_nan), "not finite"),
    "weights of another shape": (tensors("policy", halved), "has shape"),
    "reference of nan": (tensors("reference", with_nan), "not finite"),
    "partition of another shape": (tensors("partition", halved), "has shape"),
    "tokens below 0": (tensors("ahead", lambda t: t - 99, "tokens"), "wrong tokens"),
    "tokens beyond the model": (tensors("ahead", lambda t: t + 9999, "tokens"), "wrong tokens"),
    "the first token beyond the model": (first_beyond, "wrong tokens"),
    "lengths": (tensors("ahead", lambda t: t + 1, "lengths"), "wrong lengths"),
    "logp of fp64": (tensors("ahead", lambda t: t.double(), "logp"), "wrong logp"),
    "index of no problem": (ahead(indices=[-1]), "wrong indices"),
    "reasons": (ahead(finish_reasons=["x"]), "wrong finish_reasons"),
    "version of a batch": (ahead(version=-3), "version is -3"),
    "position": (state(position=-5), "position is -5"),
    "kept": (state(kept=[-1]), "kept prompts"),
    "kept beyond": (state(kept=[10**6]), "kept prompts"),
    "nothing kept": (state(kept=[]), "kept prompts"),
    "updates": (inner("step", updates=-1), "updates is -1"),
    "scaler": (inner("step", scaler={"scale": -1.0, "clean_steps": 0}), "loss scale -1.0"),
    "no scaler": (inner("step", scaler=5), "TypeError"),
    "reference's version": (inner("reference", version="x"), "reference's version is 'x'"),
    "fingerprint": (state(fingerprint="0" * 64), "another model, task or seed"),
    "step": (lambda folder: signed(folder, lambda header: header.update(step=7)), "wrong step"),
    "state of a list": (lambda folder: signed(folder, lambda header: header.update(state=[1])), "wrong state"),
    "a file elsewhere": (
        lambda folder: signed(folder, lambda header: header["files"].update({"../x.safetensors": 1})), "wrong files"
    ),
    "nested": (lambda folder: (folder / "state.json").write_text("[" * 10**5), "nested too deeply"),
    "digits": (lambda folder: (folder / "state.json").write_text('{"a": ' + "9" * 5000 + "}"), "no readable state"),
    "a flipped weight": (flip("policy.safetensors"), "policy.safetensors is damaged: its SHA-256"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name: str, run: Path, parts: Parts) -> None:
    damage, message = DAMAGE[name]
    damage(run / "checkpoints" / "step-1")
    metrics = (run / "metrics.jsonl").read_bytes()
    weights = {key: tensor.clone() for key, tensor in parts.learner.trained.items()}
    with RunDirectory.open(run, write=True) as folder, Live(2) as live:
        made = Run(config_of(run), parts, folder, Trackers([]), live)
        error = attempt(lambda: restore(made, load_checkpoint(run / "checkpoints", 1)))
    assert error is not None
    with pytest.raises(MantissaError, match=message):
        raise error
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert same(weights, parts.learner.trained)


def test_an_older_checkpoint_without_digests_is_taken_and_said_to_be(run: Path, capsys: Any) -> None:
    path = run / "checkpoints" / "step-1" / "state.json"
    header = json.loads(path.read_text())
    for key in ("sha256", "digest"):
        del header[key]
    del header["state"]["fingerprint"]
    path.write_text(json.dumps(header | {"version": 2}))
    resume(run)
    assert "written without digests: its files are taken as they are" in " ".join(capsys.readouterr().out.split())


def test_a_policy_that_was_changed_is_refused(run: Path) -> None:
    load_model(run / "policy")
    flip("model.safetensors")(run / "policy")
    with pytest.raises(MantissaError, match=r"model\.safetensors is damaged, or was changed since"):
        load_model(run / "policy")
    (run / "policy" / "digests.json").unlink()
    load_model(run / "policy")


@sizes(15, 700)
def test_any_flipped_byte_of_a_checkpoint(count: int, tmp_path: Path) -> None:
    weights = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2)}
    moments = {"a/step": torch.tensor(3.0), "a/exp_avg": torch.ones(3, 4)}
    path = save_checkpoint(tmp_path, Checkpoint(1, weights, moments, {"position": 4, "scale": 2.0}), keep=1)
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    before = load_checkpoint(tmp_path)

    def body(change: tuple[str, int, int]) -> None:
        name, at, bit = change
        content = bytearray(files[name])
        content[at % len(content)] ^= 1 << bit
        (path / name).write_bytes(content)
        error = attempt(load_checkpoint, tmp_path)
        if error is None:  # white space, or the case of a letter in an escape: what it says is the same
            found = load_checkpoint(tmp_path)
            assert found.state == before.state
            assert all(torch.equal(found.policy[key], weights[key]) for key in weights)
            assert name == "state.json"
        (path / name).write_bytes(files[name])

    fuzz(count, st.tuples(st.sampled_from(sorted(files)), st.integers(0, 10**4), st.integers(0, 7)), body)


def test_folders_that_are_no_steps(tmp_path: Path) -> None:
    for name in ("step-²", "step-٣", "step-007", "step--1", "step-1e3", "step-" + "9" * 40, "step-"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-5").write_text("a file")
    assert saved_steps(tmp_path) == []
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_checkpoint(elsewhere, Checkpoint(3, {"a": torch.ones(1)}, {}, {}), keep=1)
    (tmp_path / "step-3").symlink_to(elsewhere / "step-3")
    assert load_checkpoint(tmp_path).step == 3
    save_checkpoint(tmp_path, Checkpoint(4, {"a": torch.ones(1)}, {}, {}), keep=1)
    assert saved_steps(tmp_path) == [4]  # the link is gone, and not what it led to
    assert saved_steps(elsewhere) == [3]


def trained(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **more: Any) -> PrecisionTrainer:
    model = mlp(dropout=0.1)
    made = optimizer(model.parameters(), lr=0.01, **more)  # type: ignore[call-arg]
    trainer = PrecisionTrainer(
        model, made, "fp16", scheduler=torch.optim.lr_scheduler.StepLR(made, 5), say=lambda line: None
    )
    for batch in data(3):
        trainer.step(batch, cross_entropy)
    return trainer


def moment(work: Callable[[Tensor], Tensor], name: str = "exp_avg") -> Callable[[dict[str, Any]], None]:
    def damage(content: dict[str, Any]) -> None:
        fields = content["optimizer_state_dict"]["state"][0]
        fields[name] = work(fields[name])

    return damage


def at(*keys: Any, value: Any = None) -> Callable[[dict[str, Any]], None]:
    def damage(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return damage


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "moments of another shape": moment(halved),
    "moments of int8": moment(lambda t: t.to(torch.int8)),
    "infinite step": moment(lambda t: t / 0, "step"),
    "no group": at("optimizer_state_dict", "param_groups", value=[]),
    "groups of a number": at("optimizer_state_dict", "param_groups", value=5),
    "rate of nan": at("optimizer_state_dict", "param_groups", 0, "lr", value=float("nan")),
    "betas of text": at("optimizer_state_dict", "param_groups", 0, "betas", value="ab"),
    "state of nobody": at("optimizer_state_dict", "state", 99, value={"step": torch.tensor(1.0)}),
    "state of a list": at("optimizer_state_dict", "state", value=[1]),
    "weights of int8": at("model_state_dict", "0.weight", value=torch.zeros(16, 6, dtype=torch.int8)),
    "weights of nan": at("model_state_dict", "0.weight", value=torch.full((16, 6), float("nan"))),
    "counts": at("training_steps", value=-1),
    "no counters": at("counters", value={}),
    "updates": at("counters", "updates", value=2.5),
    "scale": at("scaler_state_dict", "scale", value=float("inf")),
    "generator": at("generators", value=[{"cpu": torch.zeros(3, dtype=torch.uint8)}]),
    "scheduler": at("scheduler_state_dict", "last_epoch", value=float("nan")),
    "scheduler of nothing": at("scheduler_state_dict", value={}),
    "extra": at("extra", value=5),
    "precision": at("precision", value=5),
}


def everything(trainer: PrecisionTrainer) -> Any:
    whole = [trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.scaler.state_dict(), trainer.steps]
    return copy.deepcopy([*whole, trainer.updates, trainer.scheduler.last_epoch, torch.get_rng_state()])


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("name", WRONG)
def test_a_trainers_file_is_checked_before_anything_is_changed(name: str, tmp_path: Path) -> None:
    trained().save_checkpoint(tmp_path / "file")
    content = torch.load(tmp_path / "file", weights_only=True)
    WRONG[name](content)
    torch.save(content, tmp_path / "file")
    trainer = trained()
    trainer.step(data(1)[0], cross_entropy)
    before = everything(trainer)
    assert attempt(trainer.load_checkpoint, tmp_path / "file") is not None
    assert same(before, everything(trainer))
    trainer.step(data(1)[0], cross_entropy)


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.RMSprop, torch.optim.ASGD])
def test_other_optimisers_still_load(optimizer: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    trainer = trained(optimizer)
    trainer.save_checkpoint(tmp_path / "file")
    trained(optimizer).load_checkpoint(tmp_path / "file")
    fresh = mlp()
    other = PrecisionTrainer(fresh, optimizer(fresh.parameters(), lr=0.1), "fp32", say=lambda line: None)
    other.load_checkpoint(tmp_path / "file")
    assert same(other.optimizer.state_dict()["state"], trainer.optimizer.state_dict()["state"])


@sizes(25, 700)
def test_any_flipped_byte_of_a_trainers_file(count: int, tmp_path: Path) -> None:
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "file")
    content = (tmp_path / "file").read_bytes()

    def body(change: tuple[int, int]) -> None:
        damaged = bytearray(content)
        damaged[change[0] % len(damaged)] ^= 1 << change[1]
        (tmp_path / "file").write_bytes(damaged)
        attempt(trainer.load_checkpoint, tmp_path / "file")

    fuzz(count, st.tuples(st.integers(0, len(content) - 1), st.integers(0, 7)), body)
