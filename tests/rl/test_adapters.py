"""Runs with adapters: one policy on both sides, a base that never moves, and the way out and back in again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from experiences import learned, of_samples
from gguf_files import gguf_decoder, write_gguf
from mantissa.cli import app
from mantissa.errors import MantissaError
from mantissa.model import (
    LoraShape,
    attach,
    base_digest,
    base_parameters,
    load_model,
    policy_weights,
    save_adapter,
    save_model,
    trained_parameters,
)
from mantissa.model.lora import adapter_parameters
from mantissa.rl.adapters import locate, open_policy
from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.rl.experience import Experience
from mantissa.rl.session import resume, start
from mantissa.runs.directory import RunDirectory
from mantissa.runs.metrics import deterministic

LORA = "model.lora={rank: 4, alpha: 8}"
SHORT = (LORA, "optimizer.lr=2e-2", "task.reward=prefix", "warm_start.steps=10", "warm_start.evaluate_every=10")
Learn = Callable[..., tuple[Parts, Experience]]


@pytest.fixture
def learn(configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]) -> Learn:
    """Parts, and completions of 32 prompts with made-up rewards, scored by the learner."""

    def build(*overrides: str, moved: bool = True) -> tuple[Parts, Experience]:
        parts = parts_of(configure("model.fresh.initializer_range=0.2", *overrides))
        draw = torch.Generator().manual_seed(1)
        if moved:
            with torch.no_grad():
                for name, matrix in adapter_parameters(parts.model).items():
                    if name.endswith("lora_B"):
                        matrix.copy_(0.1 * torch.randn(matrix.shape, generator=draw))
        parts.sampler.engine.sync(parts.learner.weights, 0)
        sampled = parts.sampler.sample(parts.task.split("train", 32), 4, parts.sampler.params(6, 1.0), 0, 0, "test")
        rewards = torch.randint(0, 2, (128,), generator=draw).float()
        experience = of_samples(sampled, rewards.tolist())
        return parts, experience.with_learner(*parts.learner.score(experience))

    return build


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_rollout_multiplies_what_the_learner_multiplies(learn: Learn, precision: str) -> None:
    parts, experience = learn(f"precision={precision}", LORA, "optimizer.lr=1e-2")
    learner = parts.learner
    for step in (1, 2):
        assert all(outcome.applied for outcome in learned(learner, experience, step).outcomes)
        parts.sampler.engine.sync(learner.weights, learner.version)
        experience = experience.with_learner(*learner.score(experience))
    merged, copy = learner.weights, dict(parts.sampler.engine.model.named_parameters())
    assert merged.keys() == copy.keys()
    seen: dict[str, torch.Tensor] = {}
    linear = type(learner.kernels).linear

    def watch(self: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any = None, layer: str = "") -> torch.Tensor:
        seen[str(len(seen))] = self.weight(weight).detach()
        return linear(self, x, weight, bias, layer)

    kernels = type("Watched", (type(learner.kernels),), {"linear": watch})(*_made_of(learner.kernels))
    learner.logp(experience, kernels)
    adapted = [name for name in copy if "_proj." in name]
    assert len(seen) == len(adapted) == 14
    for name, used in zip(adapted, seen.values(), strict=True):
        assert torch.equal(used, copy[name]), name


def _made_of(kernels: Any) -> tuple[Any, ...]:
    return (kernels.format, kernels.logits_format)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_gap_is_that_of_a_run_without_adapters(learn: Learn, precision: str) -> None:
    """Same magnitude and about as many equal tokens as the merged weights give when they are the masters."""
    gaps, equal = [], []
    parts, experience = learn(f"precision={precision}", LORA)
    plain, _ = learn(f"precision={precision}", moved=False)
    with torch.no_grad():
        for name, weight in plain.model.named_parameters():
            weight.copy_(parts.learner.weights[name])
    plain.sampler.engine.sync(plain.learner.weights, 0)
    scores = [parts.learner.score(experience)[0], plain.learner.score(experience)[0]]
    assert torch.equal(*scores)  # to the bit: the same values through the same kernels
    mask = experience.mask_BR
    for score in scores:
        gap = (score - experience.rollout_logp_BR)[mask].abs()
        gaps.append(float(gap.max()))
        equal.append(float((gap == 0).float().mean()))
    assert gaps[0] == gaps[1] < 2e-3 if precision != "bf16" else gaps[0] == gaps[1] < 2e-2
    assert equal[0] == equal[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_only_adapters_learn(learn: Learn, precision: str) -> None:
    parts, experience = learn(f"precision={precision}", LORA)
    learner, digest = parts.learner, base_digest(parts.model)
    before = {name: weight.clone() for name, weight in learner.trained.items()}
    learned(learner, experience)
    assert learner.version == 2
    assert base_digest(parts.model) == digest
    assert {name for name, weight in learner.trained.items() if not torch.equal(weight, before[name])} == set(before)
    assert {key.rpartition("/")[0] for key in learner.step.optimizer_tensors()} == set(before)
    assert all(p.grad is None and not p.requires_grad for p in base_parameters(parts.model).values())


def everything(folder: Path) -> dict[str, Any]:
    """Rows less the clock's, and files but the one that names the run's own folder and its digest."""
    run = RunDirectory.open(folder)
    files = [p for name in ("checkpoints/*", "policy", "base", "adapter") for p in folder.glob(f"{name}/*")]
    plain = [deterministic(row) for row in run.read_metrics()]
    named = ("adapter", ".json")
    kept = [path for path in files if (path.parent.name, path.suffix) != named]
    whole: dict[str, Any] = {str(path.relative_to(folder)): path.read_bytes() for path in kept}
    for path in filter(lambda name: name.endswith("state.json"), whole):  # less the fingerprint: a recipe names paths
        whole[path] = json.loads(whole[path])["state"] | {"fingerprint": None}
    return {"metrics": plain} | whole


def test_a_run_from_beginning_to_its_continuations(
    train: Callable[..., RunDirectory], configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = train(*SHORT)
    base, policy = load_model(run.base_path), load_model(run.policy_path)
    adapted, tokenizer = open_policy(str(run.adapter_path), None, 0)
    assert base_digest(adapted) == base_digest(base)
    weights, frozen = policy_weights(adapted), dict(base.named_parameters())
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, weights[name]), name
        assert torch.equal(parameter, frozen[name]) != ("_proj." in name), name
    # checkpoints: adapters and their moments alone, all on one base
    for step in run.checkpoint_steps():
        saved = load_file(run.checkpoint_path(step) / "policy.safetensors")
        moments = load_file(run.checkpoint_path(step) / "optimizer.safetensors")
        assert saved.keys() == trained_parameters(adapted).keys()
        assert {key.rpartition("/")[0] for key in moments} == (saved.keys() if step else set())
        state = json.loads((run.checkpoint_path(step) / "state.json").read_text())["state"]
        assert state["base"] == base_digest(base)
    assert all(torch.equal(saved[name], p) for name, p in trained_parameters(adapted).items())
    # the same bits after a resume from the step before the last
    before = everything(run.path)
    again = Path(shutil.copytree(run.path, tmp_path / "again"))
    shutil.rmtree(again / "checkpoints" / "step-4")
    shutil.rmtree(again / "policy")
    resume(again)
    assert everything(again) == before
    # a changed base is found out
    shutil.rmtree(again / "checkpoints" / "step-4")
    with torch.no_grad():
        base.model.norm.weight[0] += 1e-3
    shutil.rmtree(again / "base")
    save_model(base, tokenizer, again / "base")
    with pytest.raises(MantissaError, match=r"again/base is not the base that this run's adapters were trained on"):
        resume(again)
    # what it trained is sampled, reported, and continued
    sampled = [
        CliRunner().invoke(app, ["sample", str(p), "12=", "--max-tokens", "9"]) for p in (run.path, run.adapter_path)
    ]
    assert [result.exit_code for result in sampled] == [0, 0], sampled[0].output
    assert sampled[0].stdout == sampled[1].stdout  # merged when it was saved, or merged now
    assert CliRunner().invoke(app, ["report", str(run.path)]).exit_code == 0
    continued = (
        f"model={{path: {run.adapter_path}}}",
        f"model={{path: {run.base_path}, lora: {{path: {run.path}, rank: 4}}}}",
    )
    results = []
    for number, model in enumerate(continued):
        folder = tmp_path / f"continued-{number}"
        start(configure("trackers=[]", f"run_dir={folder}", model, "steps=1", "warm_start=null", "evaluation=null"))
        results.append(RunDirectory.open(folder))
        assert not results[-1].base_path.exists()  # it is where it was
        config = json.loads((results[-1].adapter_path / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(run.base_path.resolve())
        first = load_file(results[-1].checkpoint_path(0) / "policy.safetensors")
        assert all(torch.equal(first[name], p) for name, p in trained_parameters(adapted).items())
    assert everything(results[0].path) == everything(results[1].path)


def test_a_given_base_is_frozen_from_the_start_and_its_digest_guards_it(
    train: Callable[..., RunDirectory], tmp_path: Path
) -> None:
    plain = train("steps=1", "warm_start.steps=2", "evaluation=null")
    base = Path(shutil.copytree(plain.policy_path, tmp_path / "base"))
    stored = (base / "model.safetensors").read_bytes()
    run = train(*SHORT[1:], f"model={{path: {base}, lora: {{rank: 4, alpha: 8, targets: [q_proj, up_proj]}}}}")
    first = load_file(run.checkpoint_path(2) / "policy.safetensors")
    assert len(first) == 8
    assert (base / "model.safetensors").read_bytes() == stored
    assert not run.base_path.exists()
    assert run.read_warm_start() != []
    for step in run.checkpoint_steps()[1:]:
        shutil.rmtree(run.checkpoint_path(step))
    (base / "digests.json").unlink()
    shutil.copy(
        train("steps=1", "seed=1", "warm_start=null", "evaluation=null").policy_path / "model.safetensors", base
    )
    with pytest.raises(MantissaError, match=r"model.path=.*base is not the base that .* put the original back"):
        resume(run.path)
    (base / "model.safetensors").write_bytes(stored)
    resume(run.path)


@pytest.mark.usefixtures("with_report")
def test_a_gguf_base_from_training_to_report(
    train: Callable[..., RunDirectory],
    configure: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_gguf(tmp_path / "base.gguf", gguf_decoder("llama", num_hidden_layers=1), ("Q4_1",))
    short = ("warm_start=null", "steps=2", "evaluation=null", "checkpoint.every=1")
    run = train(*short, "model={path: base.gguf, lora: {rank: 4, alpha: 8}}")
    note = "dequantised from GGUF: Q4_1 (a 4-bit grid) 100%"
    assert f"weights {note}" in " ".join(capsys.readouterr().out.split())
    assert run.environment["weights"] == note
    assert f"weights {note}" in run.report_path.read_text()
    before = everything(run.path)
    for name in ("checkpoints/step-2", "policy"):
        shutil.rmtree(run.path / name)
    resume(run.path)
    assert everything(run.path) == before
    config = json.loads((run.adapter_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(file)
    adapted, policy = open_policy(str(run.adapter_path), None, 0)[0], load_model(run.policy_path)
    weights = policy_weights(adapted)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in policy.named_parameters())
    assert adapted.config.weights_note == policy.config.weights_note == note
    sampled = CliRunner().invoke(app, ["sample", str(run.path), "12=", "--max-tokens", "2"])
    assert f"weights {note}" in sampled.stderr
    with pytest.raises(MantissaError, match=r"base.gguf: no adapter_config.json there"):
        start(configure(f"run_dir={tmp_path / 'no'}", *short, "model={path: base.gguf, lora: {path: base.gguf}}"))
    write_gguf(file, gguf_decoder("llama", seed=1, num_hidden_layers=1), ("Q4_1",))
    shutil.rmtree(run.checkpoint_path(2))
    with pytest.raises(MantissaError, match=r"model.path=base.gguf is not the base that .* put the original back"):
        resume(run.path)
    file.unlink()
    with pytest.raises(MantissaError, match=r"adapts .*base.gguf, which is not there"):
        open_policy(str(run.adapter_path), None, 0)


def test_mistakes_leave_no_folder_behind(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], tmp_path: Path
) -> None:
    parts = parts_of(configure())
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_model(parts.model, parts.tokenizer, base)
    attach(parts.model, LoraShape(3, 6.0, ("v_proj",)), torch.Generator())
    save_adapter(parts.model, adapter, str(tmp_path / "gone"))
    both = Path(shutil.copytree(base, tmp_path / "both"))
    shutil.copy(adapter / "adapter_config.json", both)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("steps: 1\n")
    cases = [
        (
            f"{{path: {adapter}}}",
            "adapts .*gone, which is not there; give its base as model.path and this as model.lora",
        ),
        (f"{{path: {both}}}", "holds both a model and an adapter"),
        (f"{{path: {adapter}, lora: {{path: {adapter}}}}}", "is an adapter, and so is model.lora.path"),
        (f"{{path: {base}, lora: {{path: {adapter}, rank: 8}}}}", "model.lora.rank=8, but the adapter in .* has 3"),
        (f"{{path: {base}, lora: {{path: {tmp_path / 'run'}}}}}", "is a run without an adapter"),
        (f"{{path: {base}, lora: {{path: {tmp_path / 'absent'}}}}}", "absent"),
        (f"{{path: {base}, lora: {{path: {base}}}}}", "no adapter_config.json there"),
    ]
    for number, (model, said) in enumerate(cases):
        folder = tmp_path / f"run-{number}"
        with pytest.raises(MantissaError, match=said) as caught:
            start(configure(f"run_dir={folder}", "warm_start=null", f"model={model}"))
        assert "\n" not in str(caught.value)
        assert not folder.exists(), said
    assert locate(str(base), None) == (str(base), None)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.lora={rnk: 4}"], "unknown key 'model.lora.rnk'; did you mean 'rank'"),
        (["model.lora={rank: 4}"], "model.lora: expected alpha"),
        (
            ["model.lora={rank: 4, alpha: 8, targets: [q_prj]}"],
            "no projection is called 'q_prj'; did you mean 'q_proj'",
        ),
        (["model.lora={rank: 4, alpha: 8, dropout: 0.05}"], "with dropout the learner would score"),
        (["model.lora={path: somewhere}"], "model.lora.path belongs to a base"),
    ],
)
def test_a_recipe_says_what_is_wrong_with_it(
    configure: Callable[..., RunConfig], overrides: list[str], said: str
) -> None:
    with pytest.raises(MantissaError, match=said):
        configure(*overrides)
