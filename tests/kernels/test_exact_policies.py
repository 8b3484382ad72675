"""The claim itself: what the engine said of a token when it sampled it is, in every bit, what the learner says of it.

The engine is the real one: a cache, slots that fall free and are filled again, prompts computed once for all samples,
a batch that shrinks. The learner is the real forward over packed sequences, with its graph. What is compared is fp32
log-probs as integers, so that not even the sign of a zero passes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import exact_worker
from exact_policies import FAMILIES, FORMATS, Policies, exactly, make_model, ragged
from launched import torchrun
from mantissa.kernels import ExactKernels
from mantissa.kernels.exact.plan import WAYS
from mantissa.model import Decoder, LoraShape, attach, trained_parameters
from mantissa.rollout import Request


@pytest.mark.parametrize(("prompts", "least"), [(8, 9_000), pytest.param(80, 1_000_000, marks=pytest.mark.variants)])
def test_a_million_log_probs_are_equal(prompts: int, least: int, tmp_path: Path) -> None:
    run_worker(["many", str(prompts), *FORMATS], tmp_path, {"OMP_NUM_THREADS": "1"})
    compared, different = zip(*torch.load(tmp_path / "0.pt").values(), strict=True)
    assert sum(compared) >= least
    assert sum(different) == 0


@pytest.mark.parametrize(("family", "precision"), [("llama", "fp32"), ("qwen2", "bf16"), ("qwen3", "fp8")])
def test_whatever_the_batch_a_token_has_one_log_prob(family: str, precision: str) -> None:
    """Batches of 1 to 64 in the engine draw the same tokens at the same log-probs; micro-batches of 1 and 2 agree."""
    plan, samples = None, []
    for slots in (1, 3, 64):
        policies = Policies(make_model(FAMILIES[family]), exactly(precision), slots=slots, plan=plan)
        plan = policies.plan
        samples.append(policies.sample(ragged(5), tokens=12))
    for other in samples[1:]:
        assert other.responses == samples[0].responses
        assert torch.equal(other.logp_N, samples[0].logp_N)
    assert len(samples[0].logp_N) > 60
    for micro in (None, 2, 1):
        assert policies.different(samples[0], micro=micro) == 0


@pytest.mark.parametrize(("way", "precision"), list(zip(WAYS[1:], FORMATS, strict=True)))
def test_every_way_is_equal_from_end_to_end(way: Any, precision: str) -> None:
    policies = Policies(make_model(FAMILIES["llama"]), exactly(precision), fastest=way)
    assert policies.plan is not None
    used = {policies.plan.attention.way, *(choice.way for choice in policies.plan.products.values())}
    assert used <= set(WAYS[WAYS.index(way) :])  # a library may need safer ones: attention's calls are small
    sampled = policies.sample(ragged(9), tokens=30)
    assert len(sampled.logp_N) > 200
    for micro in (None, 2):
        assert policies.different(sampled, micro=micro) == 0


@pytest.mark.parametrize("precision", ["fp16", "fp8", "e5m5"])
def test_equal_after_every_update_and_at_any_temperature(precision: str) -> None:
    """The compared log-probs are the very ones that the gradient is taken of."""
    policies = Policies(make_model(FAMILIES["qwen3"]), exactly(precision))
    optimizer = torch.optim.AdamW(policies.model.parameters(), lr=0.01)
    first = policies.score(policies.sample(ragged(4), tokens=5)).detach()
    for update, temperature in enumerate((1.0, 1.3, 0.25)):
        sampled = policies.sample(ragged(6, seed=update), tokens=20, temperature=temperature)
        scored_N = policies.score(sampled, temperature=temperature)
        assert scored_N.requires_grad
        assert torch.equal(scored_N, sampled.logp_N)
        optimizer.zero_grad()
        (-1024 * (scored_N * torch.linspace(-1, 1, len(scored_N))).mean()).backward()
        optimizer.step()
        policies.sync()
    assert not torch.equal(policies.score(policies.sample(ragged(4), tokens=5)).detach()[:8], first[:8])


@pytest.mark.parametrize(("precision", "cache"), [("fp32", "bf16"), ("fp16", "fp8"), ("e8m4", "e8m2")])
def test_a_coarser_cache_is_the_learners_too(precision: str, cache: str) -> None:
    policies = Policies(make_model(FAMILIES["llama"]), exactly(precision, kv_cache=cache))
    sampled = policies.sample(ragged(8), tokens=30)
    for micro in (None, 1):
        assert policies.different(sampled, micro=micro) == 0
    assert isinstance(policies.learner, ExactKernels)
    policies.learner.kv_format = policies.learner.format  # a learner that forgets the cache
    assert policies.different(sampled) > len(sampled.logp_N) // 2


def test_logits_in_half_and_adapters_merged() -> None:
    model = Decoder(FAMILIES["qwen2"]).initialize(torch.Generator().manual_seed(2))
    attach(model, LoraShape(rank=3, alpha=6.0), torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.normal_(0.0, 0.3, generator=generator)
    policies = Policies(model, exactly("fp16", logits="bf16"))
    sampled = policies.sample(ragged(8), tokens=30)
    for micro in (None, 1):
        scored_N = policies.score(sampled, micro=micro)
        assert scored_N.requires_grad
        assert torch.equal(scored_N, sampled.logp_N)


class Changed:
    """One side with one operation another: each of these is a change that equality must notice."""

    @staticmethod
    def silu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @staticmethod
    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    @staticmethod
    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden.bfloat16().float() @ weight.bfloat16().float().t()).bfloat16().float()

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        cut = x.shape[-1] // 2  # the sum in two parts: another order, whatever the library's is
        return F.linear(x[..., :cut], weight[:, :cut]) + F.linear(x[..., cut:], weight[:, cut:], bias)


@pytest.mark.parametrize(
    ("operation", "change", "side"),
    [
        ("swiglu", Changed.silu, "learner"),
        ("causal_attention", Changed.sdpa, "learner"),
        ("logits", Changed.head, "learner"),
        ("product", Changed.product, "rollout"),
    ],
)
def test_one_operation_changed_on_one_side_is_noticed(
    operation: str, change: Any, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = Policies(make_model(FAMILIES["qwen3"]), exactly("fp32"), slots=3)
    requests = [*ragged(3), Request((5,), seed=1, samples=4)]
    sampled = policies.sample(requests, tokens=20)
    assert policies.different(sampled, micro=1) == 0
    monkeypatch.setattr(getattr(policies, side), operation, change)
    if side == "rollout":
        sampled = policies.sample(requests, tokens=20)
    assert policies.different(sampled, micro=1) > 0


def test_whatever_the_threads_a_token_has_one_log_prob(tmp_path: Path) -> None:
    run_worker(["threads", "fp32"], tmp_path, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"})
    compared, different = torch.load(tmp_path / "0.pt")["fp32"]
    assert compared > 1500
    assert different == 0


def test_two_ranks_with_sharded_weights(tmp_path: Path) -> None:
    """FSDP2 on gloo: each rank's own samples, weights gathered for each layer, before and after an update."""
    done = torchrun(2, exact_worker.__file__, tmp_path, "fp32", "bf16")
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        for precision, (compared, different, moved) in torch.load(tmp_path / f"{rank}.pt").items():
            assert compared > 300
            assert different == 0, f"rank {rank}, {precision}"
            assert moved > 0.005


def run_worker(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, exact_worker.__file__, str(folder), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
