"""vLLM held to the native engine: the same tokens where nothing is drawn, the same log-probs for what is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.kernels import resolve, rollout_kernels
from mantissa.precision import FP32, PrecisionPolicy
from mantissa.rollout import Request, SamplingParams, VllmEngine, VllmStart
from mantissa.rollout.sampling import filter_logits
from mantissa.rollout.vllm.server import WeightFolder
from naive_engine import reference_gaps, reference_logp

pytestmark = pytest.mark.vllm
PARAMS = SamplingParams(max_tokens=20, temperature=0.7, stop_token_ids=(3,))
FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_native_engines(
    pair_of: Callable[..., Any], requests: list[Request], family: str
) -> None:
    pair = pair_of(family)
    pair.sync(10)
    greedy = dataclasses.replace(PARAMS, temperature=0.0)
    theirs, ours = (engine.generate(requests, greedy, pair.version) for engine in (pair.vllm, pair.native))
    assert [[s.tokens for s in group] for group in theirs] == [[s.tokens for s in group] for group in ours]
    assert [[s.finish_reason for s in group] for group in theirs] == [[s.finish_reason for s in g] for g in ours]
    assert all((sample.logp_T == 0).all() for group in theirs for sample in group)


@pytest.mark.parametrize(("family", "temperature"), [*zip(FAMILIES, (0.7, 1.0, 1.6), strict=True)])
def test_log_probs_are_of_the_distribution_sampled_from(
    pair_of: Callable[..., Any], requests: list[Request], family: str, temperature: float
) -> None:
    """Seen: 5e-6 at most in fp32. Log-probs before the temperature would be away by several units."""
    pair = pair_of(family)
    pair.sync(20)
    params = dataclasses.replace(PARAMS, temperature=temperature)
    groups = pair.vllm.generate(requests, params, pair.version)
    found = reference_gaps(pair.native, requests, groups, temperature)
    assert len(found) > 100
    assert found.abs().max() < 3e-5


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_k": 12, "top_p": 0.8}], ids=["top-k", "top-k and top-p"])
def test_supports_are_what_the_native_engine_would_keep(
    pair_of: Callable[..., Any], requests: list[Request], filters: dict[str, Any]
) -> None:
    """And log-probs are renormalised over them; a cut that falls on a rounding error may differ by its one token."""
    pair = pair_of("llama")
    pair.sync(25)
    params = dataclasses.replace(PARAMS, most_probable=3, **filters)
    groups = pair.vllm.generate(requests, params, pair.version)
    tokens, unlike = 0, 0
    for request, sample in ((r, s) for r, group in zip(requests, groups, strict=True) for s in group):
        logp_TV = reference_logp(pair.native, request.prompt_tokens, sample.tokens, 1.0)
        kept_TV = filter_logits(logp_TV.float(), params) != -torch.inf
        support_TV = sample.support.mask(0, len(sample.tokens), logp_TV.shape[1])
        tokens, unlike = tokens + len(kept_TV), unlike + int((kept_TV != support_TV).any(1).sum())
        own = (logp_TV.masked_fill(~support_TV, -torch.inf) / params.temperature).log_softmax(-1)
        picked = own.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
        assert float((sample.logp_T.double() - picked).abs().max()) < 3e-5
        top = sample.most_probable
        best = own.topk(3, -1)
        known = best.values > -torch.inf  # fewer than three may be left
        assert torch.equal(top.ids_TK.long()[known], best.indices[known])
        torch.testing.assert_close(top.logp_TK.double(), best.values, rtol=0, atol=3e-5)
    assert tokens > 100
    assert unlike <= tokens // 50


@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_are_used_at_once(pair_of: Callable[..., Any], requests: list[Request], family: str) -> None:
    """Log-probs follow every sync, the head's and the embedding's of a tied policy included, and no cache stays."""
    pair = pair_of(family)
    for seed in (30, 31, 32):
        pair.sync(seed)
        sampled = pair.vllm.generate(requests, PARAMS, pair.version)
        assert reference_gaps(pair.native, requests, sampled, 0.7).abs().max() < 3e-5
        assert {sample.policy_version for group in sampled for sample in group} == {pair.version}
        now = {"version": pair.version, "sampled": sampled}
    pair.sync(33)
    assert (
        reference_gaps(pair.native, requests, now["sampled"], 0.7).abs().mean() > 0.1
    )  # the old ones are not the new policy's
    with pytest.raises(MantissaError, match=r"policy version \d+ was asked for, \d+ is loaded"):
        pair.vllm.generate(requests, PARAMS, now["version"])


def test_a_master_that_cannot_be_loaded_leaves_no_policy(pair_of: Callable[..., Any], requests: list[Request]) -> None:
    pair = pair_of("llama")
    pair.sync(40)
    weights = {name: tensor.detach().clone() for name, tensor in pair.native.model.named_parameters()}
    weights["model.norm.weight"][3] = float("nan")
    with pytest.raises(MantissaError, match=r"weight model\.norm\.weight holds nan"):
        pair.vllm.sync(weights, pair.version + 1)
    assert pair.vllm.version == -1
    with pytest.raises(MantissaError, match="holds no weights"):
        pair.vllm.generate(requests, PARAMS, pair.version)
    pair.sync(40)
    assert pair.vllm.generate(requests, PARAMS, pair.version)


def test_weights_that_did_not_arrive_are_noticed(
    pair_of: Callable[..., Any], requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight differs by one bit between what is written and what should have been."""
    pair = pair_of("qwen3")
    real = WeightFolder.write

    def spoiled(folder: WeightFolder, copies: Any) -> dict[str, str]:
        sent = real(folder, copies)
        name = "model.layers.1.self_attn.k_proj.weight"
        changed = dict(copies) | {name: copies[name].clone()}
        changed[name][5, 7] = torch.nextafter(changed[name][5, 7], torch.tensor(9.0))
        real(folder, changed)
        return sent

    monkeypatch.setattr(WeightFolder, "write", spoiled)
    with pytest.raises(MantissaError, match=r"other values of model\.layers\.1\.self_attn\.k_proj\.weight than were"):
        pair.sync(50)
    assert pair.vllm.version == -1
    monkeypatch.undo()
    pair.sync(50)


def test_draws_depend_on_seed_and_index(pair_of: Callable[..., Any]) -> None:
    """In fp32 and where no two probabilities are close: the same seed draws the same, alone or among others."""
    pair = pair_of("llama")
    pair.sync(60)
    one, other = Request((5, 6, 7), seed=1, samples=4), Request((9, 2), seed=2, samples=3)
    (alone,) = pair.vllm.generate([one], PARAMS, pair.version)
    _, among = pair.vllm.generate([other, one], PARAMS, pair.version)
    assert [sample.tokens for sample in alone] == [sample.tokens for sample in among]
    assert len({sample.tokens for sample in alone}) == 4
    (elsewhere,) = pair.vllm.generate([dataclasses.replace(one, seed=3)], PARAMS, pair.version)
    assert not {sample.tokens for sample in alone} & {sample.tokens for sample in elsewhere}


def test_stop_strings_end_a_response_at_the_token_that_completes_them(
    pair_of: Callable[..., Any], requests: list[Request]
) -> None:
    pair = pair_of("llama")
    pair.sync(70)
    full = pair.vllm.generate(requests, PARAMS, pair.version)
    stop = str(full[0][0].tokens[4])
    cut = pair.vllm.generate(requests, dataclasses.replace(PARAMS, stop=(stop,)), pair.version)
    for before, after in zip(chain(*full), chain(*cut), strict=True):
        ends = [n + 1 for n, token in enumerate(before.tokens) if stop in str(token)]
        size = ends[0] if ends else len(before.tokens)
        assert after.tokens == before.tokens[:size]
        assert len(after.logp_T) == size
        assert after.finish_reason == ("stop" if ends else before.finish_reason)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_gap_of_a_half_is_its_rounding(
    pair_of: Callable[..., Any], requests: list[Request], precision: str
) -> None:
    """Nothing but rounding: in bf16 some 8 times fp16's, and both far from fp32's."""
    bound = {"bf16": 0.1, "fp16": 0.1 / 4}[precision]
    pair = pair_of("qwen3", precision)
    pair.sync(80)
    found = reference_gaps(pair.native, requests, pair.vllm.generate(requests, PARAMS, pair.version), 0.7)
    assert 1e-4 < found.abs().mean() < bound
    assert found.mean().abs() < bound / 2


def test_more_prompts_than_one_step_takes(pair_of: Callable[..., Any]) -> None:
    """vLLM would cut the last prompt of a full step in two, and then, on a CPU, die of the generator it sets back."""
    pair = pair_of("llama")
    pair.sync(90)
    start = dataclasses.replace(pair.vllm.start, slots=1024)
    engine = VllmEngine(start, rollout_kernels(resolve(PrecisionPolicy(), "cpu")))
    try:
        engine.sync(dict(pair.native.model.named_parameters()), 1)
        many = [Request(tuple(range(1, 38)), seed=seed) for seed in range(700)]
        assert sum(len(request.prompt_tokens) for request in many) > 3 * 8192
        assert len(engine.generate(many, dataclasses.replace(PARAMS, max_tokens=2), 1)) == 700
    finally:
        engine.close()


def test_another_dtype_than_asked_is_an_error(
    pair_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM is started in bf16 behind the engine's back, as where it falls back to a format by itself."""
    vllm = pytest.importorskip("vllm")
    real, config = vllm.LLM, pair_of("llama").native.config
    monkeypatch.setattr(vllm, "LLM", lambda **given: real(**given | {"dtype": "bfloat16"}))
    kernels = rollout_kernels(resolve(PrecisionPolicy(), "cpu"))
    start = VllmStart(config, FP32, FP32, 4, 64, torch.device("cpu"))
    with pytest.raises(MantissaError, match="was asked for dtype=float32 and runs with bfloat16"):
        VllmEngine(start, kernels)
    monkeypatch.setattr(vllm, "LLM", lambda **given: real(**given | {"logprobs_mode": "raw_logprobs"}))
    with pytest.raises(MantissaError, match="asked for logprobs_mode=processed_logprobs and runs with raw_logprobs"):
        VllmEngine(start, kernels)
