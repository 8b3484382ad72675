"""On-policy distillation: a teacher of another shape, an advantage of each token, against float64 and k2."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiences import dry_update, gradients, hugging_face, naive_sequences, of_samples
from mantissa.algorithms import reverse_kl
from mantissa.base.errors import MantissaError
from mantissa.model import Decoder, save_model
from mantissa.rl import resume
from mantissa.rl.assemble import Parts
from mantissa.rl.experience import Scored
from mantissa.rl.learner import weigh
from mantissa.runs.directory import RunDirectory
from small_run import configure, contents, stopped

Train = Callable[..., RunDirectory]
FP32 = ("precision=fp32", "warm_start=null", "optimizer.updates_per_batch=1")
REINFORCE = "loss: reinforce, advantage: distillation, correction: none"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of another shape with opinions of its own."""
    from mantissa.rl.assemble import assemble

    parts = assemble(configure("warm_start=null", "model.fresh.hidden_size=48", "model.fresh.layers=1"))
    model = Decoder(replace(parts.model.config, initializer_range=0.25)).initialize(torch.Generator().manual_seed(9))
    folder = tmp_path_factory.mktemp("teacher") / "model"
    save_model(model, parts.tokenizer, folder)
    parts.close()
    return folder


def drawn(parts: Parts) -> Scored:
    result = parts.sampler.sample(parts.task.split("train", 5), 4, parts.sampler.params(6, 1.0), 0, 0, "test")
    experience = of_samples(result, [0.0] * len(result))
    experience = experience.with_learner(*parts.learner.score(experience))
    assert parts.reference is not None
    return experience.having(ref_logp_BR=parts.reference.score(experience))


def test_the_gradient_is_that_of_float64_and_of_k2(made: Callable[..., Parts], teacher: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    parts = made(*FP32, f"algorithm={{{REINFORCE}, reference: {{path: {teacher}}}}}")
    experience = drawn(parts)
    found = gradients(parts.learner, experience)
    student: Any = hugging_face(parts, tmp_path / "hf")
    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64, attn_implementation="eager")
    total, kl = torch.zeros((), dtype=torch.float64), []
    pairs = zip(naive_sequences(student, experience), naive_sequences(other, experience), strict=True)
    for (_, logp, _), (_, taught, _) in pairs:
        total = total - ((taught - logp).detach() * logp).sum()
        kl.append((logp - taught).detach())
    (total / int(experience.mask_BR.sum())).backward()
    for name, parameter in student.named_parameters():
        if name in found and parameter.grad is not None:
            np.testing.assert_allclose(found[name].double(), parameter.grad, atol=3e-6, rtol=1e-3, err_msg=name)
    weighed = weigh(experience, parts.learner.algorithm)
    assert abs(float(weighed.tallies["reference/kl"].value()) - float(torch.cat(kl).mean())) < 1e-5

    penalty = "algorithm={loss: reinforce, correction: none, kl: {estimator: k2, coefficient: 1}"
    by_k2 = made(*FP32, f"{penalty}, reference: {{path: {teacher}}}}}")
    for name, gradient in gradients(by_k2.learner, drawn(by_k2)).items():  # all rewards are equal
        np.testing.assert_allclose(gradient, found[name], atol=1e-6, rtol=1e-4, err_msg=name)


def test_on_average_it_is_the_gradient_of_the_divergence() -> None:
    """Over every next token, weighed by how often it is drawn, in float64."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, generator=draw).requires_grad_()
    taught = torch.randn(7, dtype=torch.float64, generator=draw).log_softmax(-1)
    logp = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - taught)).sum(), logits, retain_graph=True)
    surrogate = -(logp.detach().exp() * (taught - logp).detach() * logp).sum()
    torch.testing.assert_close(torch.autograd.grad(surrogate, logits)[0], expected)


def kl_oracle(student: Any, other: Any, experience: Scored, support: int) -> torch.Tensor:
    """Of transformers' two models in float64, a mean over tokens; the teacher's other tokens as one."""
    total = torch.zeros((), dtype=torch.float64)
    pairs = zip(naive_sequences(student, experience), naive_sequences(other, experience), strict=True)
    for row, ((ours, _, _), (theirs, _, _)) in enumerate(pairs):
        here = slice(int(experience.prompt_length_B[row]) - 1, int(experience.length_B[row]) - 1)
        p, t = (m.lm_head(x[here]).softmax(-1) for m, x in ((student, ours), (other, theirs)))
        order = t.detach().argsort(-1, descending=True)
        p, t = p.gather(-1, order), t.detach().gather(-1, order)
        if support < p.shape[-1]:
            p, t = (torch.cat([x[:, :support], x[:, support:].sum(-1, keepdim=True)], -1) for x in (p, t))
        total = total + (p * (p / t).log()).sum()
    return total / int(experience.mask_BR.sum())


@pytest.mark.parametrize("support", [4, 13])
def test_the_whole_distribution_s_gradient_is_that_of_float64(
    made: Callable[..., Parts], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, support: int
) -> None:
    """Whatever the split: into micro-batches, and into parts of the vocabulary's logits."""
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64, attn_implementation="eager")
    asked = "" if support == 13 else f", support: {support}"
    algorithm = f"algorithm={{loss: {{kind: reverse_kl{asked}}}, reference: {{path: {teacher}}}}}"
    for tokens, at_once in ((4096, 1 << 25), (20, 1 << 25), (4096, 13 * 3)):
        monkeypatch.setattr("mantissa.rl.score._LOGITS_AT_ONCE", at_once)
        parts = made(*FP32, algorithm, f"optimizer.micro_batch_tokens={tokens}")
        experience = drawn(parts)
        student: Any = hugging_face(parts, tmp_path / f"hf-{tokens}-{at_once}")
        expected = kl_oracle(student, other, experience, support)
        expected.backward()
        found, update = dry_update(parts.learner, experience)
        for name, parameter in student.named_parameters():
            if name in found and parameter.grad is not None:
                np.testing.assert_allclose(found[name].double(), parameter.grad, atol=3e-6, rtol=1e-3, err_msg=name)
        seen = float(update.tallies["reference/reverse_kl"].value())
        assert seen == pytest.approx(expected.item(), rel=1e-4)
        assert float(update.tallies["policy/loss"].value()) == pytest.approx(seen, rel=1e-4)


def test_on_average_the_sampled_token_has_the_same_gradient() -> None:
    """The other distillation's advantage, over every next token: the gradient of the whole divergence."""
    draw = torch.Generator().manual_seed(1)
    student = torch.randn(1, 9, dtype=torch.float64, generator=draw).requires_grad_()
    taught = torch.randn(1, 9, dtype=torch.float64, generator=draw)
    (whole,) = torch.autograd.grad(reverse_kl(student, taught, 1.0).sum(), student)
    logp, log_t = student.log_softmax(-1), taught.log_softmax(-1)
    sampled = -(logp.detach().exp() * (log_t - logp).detach() * logp).sum()
    torch.testing.assert_close(torch.autograd.grad(sampled, student)[0], whole)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("algorithm.loss.support=3",),
        ("rollout.top_p=0.9",),
        ("precision=fp16",),
    ],
    ids=["whole", "support", "top-p", "fp16"],
)
def test_by_whole_distributions_it_comes_nearer_too(train: Train, teacher: Path, more: tuple[str, ...]) -> None:
    run = train(
        "warm_start=null", "precision=bf16", "steps=30", "optimizer.lr=5e-3", "evaluation=null",
        "checkpoint.every=30", "rollout.prompts=8", "rollout.samples=2",
        f"algorithm={{loss: {{kind: reverse_kl}}, reference: {{path: {teacher}}}}}", *more,
    )  # fmt: skip
    distances = [row["reference/reverse_kl"] for row in run.metrics.read()]
    assert statistics.fmean(distances[-5:]) < 0.6 * statistics.fmean(distances[:2]), distances


def test_by_whole_distributions_resumed_it_has_the_same_bits(train: Train, teacher: Path, tmp_path: Path) -> None:
    algorithm = f"algorithm={{loss: {{kind: reverse_kl, support: 4}}, reference: {{path: {teacher}}}}}"
    run = train("warm_start=null", "precision=fp16", "evaluation=null", algorithm)
    again = stopped(run.path, 2, tmp_path / "again")
    resume(again)
    assert contents(again) == contents(run.path)


def test_the_split_into_micro_batches_does_not_show(made: Callable[..., Parts], teacher: Path) -> None:
    clipped = f"algorithm={{loss: ppo_clip, advantage: distillation, reference: {{path: {teacher}}}}}"
    one = made(*FP32, clipped)
    whole = dry_update(one.learner, drawn(one))[0]
    other = made(*FP32, clipped, "optimizer.micro_batch_tokens=20")
    for name, gradient in dry_update(other.learner, drawn(other))[0].items():
        np.testing.assert_allclose(gradient, whole[name], atol=1e-6, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("rollout.top_p=0.9",), marks=pytest.mark.slow),
        ("precision=fp16",),
    ],
    ids=["bf16", "top-p", "fp16"],
)
def test_a_student_comes_nearer_to_its_teacher(train: Train, teacher: Path, more: tuple[str, ...]) -> None:
    run = train(
        "warm_start=null", "precision=bf16", "steps=60", "optimizer.lr=5e-3", "evaluation=null",
        "checkpoint.every=60", "rollout.prompts=16", "rollout.samples=2",
        f"algorithm={{loss: ppo_clip, advantage: distillation, reference: {{path: {teacher}}}}}", *more,
    )  # fmt: skip
    distances = [row["reference/kl"] for row in run.metrics.read()]
    # A batch has some hundred tokens, so its mean is off by a tenth or more: ten batches' is not.
    assert statistics.fmean(distances[-10:]) < 0.75 * statistics.fmean(distances[:4]), distances
    row = run.read_rollouts(1)[0]
    assert math.isfinite(row["advantage"])


def test_resumed_it_has_the_same_bits_and_no_other_teacher(train: Train, teacher: Path, tmp_path: Path) -> None:
    mine = tmp_path / "teacher"
    shutil.copytree(teacher, mine)
    algorithm = f"algorithm={{loss: ppo_clip, advantage: distillation, reference: {{path: {mine}}}}}"
    run = train("warm_start=null", "precision=fp32", "evaluation=null", algorithm)
    assert not list(run.path.glob("checkpoints/*/reference.safetensors"))
    again = stopped(run.path, 2, tmp_path / "again")
    resume(again)
    assert contents(again) == contents(run.path)
    third = stopped(run.path, 2, tmp_path / "third")
    weights = mine / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.01
    save_file(tensors, weights, {"format": "pt"})
    (mine / "digests.json").unlink(missing_ok=True)
    with pytest.raises(MantissaError):
        resume(third)


def test_what_does_not_go_together_is_refused(teacher: Path, made: Callable[..., Parts]) -> None:
    def algorithm(text: str) -> None:
        configure(f"algorithm={{{text}}}")

    with pytest.raises(MantissaError, match="advantage=distillation needs a teacher"):
        algorithm("advantage: distillation")
    with pytest.raises(MantissaError, match="refresh_every makes the policy its own reference"):
        algorithm("reference: {path: x, refresh_every: 3}")
    for loss in ("gspo", "gmpo", "clip_cov"):
        with pytest.raises(MantissaError, match="is of each token, and loss="):
            algorithm(f"advantage: distillation, loss: {loss}, correction: none, reference: {{path: x}}")
    with pytest.raises(MantissaError, match=r"exact with algorithm\.reference\.path"):
        configure("precision.kernels=exact", "algorithm={advantage: distillation, reference: {path: x}}")
    with pytest.raises(MantissaError, match=r"its vocabulary \(\d+ rows\) is not the policy's"):
        made(*FP32, "model.tokenizer=bytes", f"algorithm={{{REINFORCE}, reference: {{path: {teacher}}}}}")
