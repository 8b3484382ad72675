"""Runs with adapters: one policy on both sides, a base that never moves, and the way out and back in again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from experiences import learned, of_samples
from gguf_files import gguf_decoder, write_gguf
from mantissa.base.errors import MantissaError
from mantissa.cli import app
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
from mantissa.model.decoder import adapter_parameters
from mantissa.rl.assemble import Parts
from mantissa.rl.config.run import RunConfig
from mantissa.rl.experience import Scored
from mantissa.rl.policy import locate, open_policy
from mantissa.rl.session import resume, start
from mantissa.runs.directory import RunDirectory
from small_run import QUICK, contents, stopped

LORA = "model.lora={rank: 4, alpha: 8}"
SHORT = (LORA, "optimizer.lr=2e-2", "task.reward=prefix", "warm_start.steps=10", "warm_start.evaluate_every=10")
Made = Callable[..., Parts]


def scored(parts: Parts, moved: bool = True) -> Scored:
    """Completions of 16 prompts with made-up rewards, scored; ``moved``: the adapters are not 0."""
    draw = torch.Generator().manual_seed(1)
    if moved:
        with torch.no_grad():
            for name, matrix in adapter_parameters(parts.model).items():
                if name.endswith("lora_B"):
                    matrix.copy_(0.1 * torch.randn(matrix.shape, generator=draw))
    parts.sampler.engine.sync(parts.learner.weights, 1)
    sampled = parts.sampler.sample(parts.task.split("train", 16), 4, parts.sampler.params(6, 1.0), 1, 0, "test")
    experience = of_samples(sampled, torch.randint(0, 2, (64,), generator=draw).tolist())
    return experience.with_learner(*parts.learner.score(experience))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_only_adapters_learn_and_the_rollout_multiplies_what_the_learner_multiplies(made: Made, precision: str) -> None:
    parts = made(f"precision={precision}", LORA, "optimizer.lr=1e-2")
    experience, learner, digest = scored(parts), parts.learner, base_digest(parts.model)
    before = {name: weight.clone() for name, weight in learner.trained.items()}
    assert all(outcome.applied for outcome in learned(learner, experience).outcomes)
    assert learner.version == 2
    assert base_digest(parts.model) == digest
    assert {name for name, weight in learner.trained.items() if not torch.equal(weight, before[name])} == set(before)
    assert {key.rpartition("/")[0] for key in learner.step.optimizer_tensors()} == set(before)
    assert all(p.grad is None and not p.requires_grad for p in base_parameters(parts.model).values())
    parts.sampler.engine.sync(learner.weights, learner.version)
    copy = dict(parts.sampler.engine.model.named_parameters())  # type: ignore[attr-defined]
    assert learner.weights.keys() == copy.keys()
    seen: list[torch.Tensor] = []
    linear = type(learner.kernels).linear

    def watch(self: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any = None, layer: str = "") -> torch.Tensor:
        seen.append(self.weight(weight).detach())
        return linear(self, x, weight, bias, layer)

    watched = type("Watched", (type(learner.kernels),), {"linear": watch})
    learner.logp(experience, watched(learner.kernels.format, learner.kernels.logits_format))
    adapted = [name for name in copy if "_proj." in name]
    assert len(adapted) == 14
    for name, used in zip(adapted, seen, strict=True):
        assert torch.equal(used, copy[name]), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_gap_is_that_of_a_run_without_adapters(made: Made, precision: str) -> None:
    """To the bit: the merged weights, being the masters of another run, go through the same kernels."""
    parts, plain = made(f"precision={precision}", LORA), made(f"precision={precision}")
    experience = scored(parts)
    with torch.no_grad():
        for name, weight in plain.model.named_parameters():
            weight.copy_(parts.learner.weights[name])
    score, mask = plain.learner.score(experience)[0], experience.mask_BR
    assert torch.equal(experience.old_logp_BR, score)
    gap = (score - experience.rollout_logp_BR)[mask].abs()
    assert float(gap.max()) < (2e-3 if precision != "bf16" else 2e-2)


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
        saved = load_file(run.checkpoints / f"step-{step}" / "policy.safetensors")
        moments = load_file(run.checkpoints / f"step-{step}" / "optimizer.safetensors")
        assert saved.keys() == trained_parameters(adapted).keys()
        assert {key.rpartition("/")[0] for key in moments} == (saved.keys() if step else set())
        state = json.loads((run.checkpoints / f"step-{step}" / "state.json").read_text())["state"]
        assert state["base"] == base_digest(base)
    assert all(torch.equal(saved[name], p) for name, p in trained_parameters(adapted).items())
    # the same bits after a resume from the step before the last
    again = stopped(run.path, 2, tmp_path / "again")
    resume(again)
    assert contents(again) == contents(run.path)
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
    assert [result.exit_code for result in sampled] == [0, 0], (sampled[0].output, sampled[0].exception)
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
        first = load_file(results[-1].checkpoints / "step-0" / "policy.safetensors")
        assert all(torch.equal(first[name], p) for name, p in trained_parameters(adapted).items())
    one, other = (contents(each.path) for each in results)
    assert one["rollouts"] == other["rollouts"]
    same = [name for name in one if name.endswith(".safetensors")]
    assert len(same) > 4
    assert all(one[name] == other[name] for name in same)


def test_a_given_base_is_frozen_from_the_start_and_its_digest_guards_it(
    train: Callable[..., RunDirectory], finished: Callable[..., RunDirectory], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(finished(*QUICK).policy_path, tmp_path / "base"))
    (base / "digests.json").unlink()
    stored = (base / "model.safetensors").read_bytes()
    lora = f"model={{path: {base}, lora: {{rank: 4, alpha: 8, targets: [q_proj, up_proj]}}}}"
    run = train(*SHORT[1:], lora, "steps=2", "checkpoint.every=1")
    assert len(load_file(run.checkpoints / "step-1" / "policy.safetensors")) == 8
    assert (base / "model.safetensors").read_bytes() == stored
    assert not run.base_path.exists()
    assert run.warm_start.read() != []
    shutil.rmtree(run.checkpoints / "step-2")
    changed = load_file(base / "model.safetensors")
    changed["model.norm.weight"][0] += 1e-3
    save_file(changed, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(MantissaError, match=r"model.path=.*base is not the base that .* put the original back"):
        resume(run.path)
    (base / "model.safetensors").write_bytes(stored)
    resume(run.path)


@pytest.mark.filterwarnings("ignore:tokenizer. a text has the ids")  # an untrained model, and 20 rows of padding
def test_a_gguf_base_from_training_to_sampling(
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
    again = stopped(run.path, 1, tmp_path / "again")
    resume(again)
    assert contents(again) == contents(run.path)
    config = json.loads((run.adapter_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(file)
    adapted, policy = open_policy(str(run.adapter_path), None, 0)[0], load_model(run.policy_path)
    weights = policy_weights(adapted)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in policy.named_parameters())
    assert adapted.config.weights_note == policy.config.weights_note == note
    with pytest.raises(MantissaError, match=r"base.gguf: no adapter_config.json there"):
        start(configure(f"run_dir={tmp_path / 'no'}", *short, "model={path: base.gguf, lora: {path: base.gguf}}"))
    write_gguf(file, gguf_decoder("llama", seed=1, num_hidden_layers=1), ("Q4_1",))
    shutil.rmtree(run.checkpoints / "step-2")
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
    gone = "adapts .*gone, which is not there; give its base as model.path and this as model.lora"
    cases = [
        (f"{{path: {adapter}}}", gone),
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
