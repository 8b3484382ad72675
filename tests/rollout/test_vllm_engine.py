"""What vLLM is asked for, what it is not believed, and what is refused: against a stand-in, everywhere.

The real one is in ``real_vllm``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch

from fake_vllm import LLM, Fault, install, masters
from mantissa.base.errors import MantissaError
from mantissa.base.tensors import digest
from mantissa.kernels import ResolvedPrecision, resolve, rollout_kernels
from mantissa.model import ModelConfig
from mantissa.precision import PrecisionPolicy
from mantissa.rollout import Request, SamplingParams, VllmEngine, VllmStart
from mantissa.rollout.sampling import stream_keys

CONFIG = ModelConfig("qwen2", 40, 32, 56, 2, 4, 2, 8, qkv_bias=True, tie_word_embeddings=True, initializer_range=0.25)
PARAMS = SamplingParams(max_tokens=6, temperature=0.5, stop_token_ids=(3,))
Build = Callable[..., VllmEngine]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """``build(precision, fault, ...)``: an engine on the stand-in."""
    made: list[VllmEngine] = []

    def make(
        precision: object = "fp32",
        fault: Fault | None = None,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        **more: object,
    ) -> VllmEngine:
        install(monkeypatch, fault)
        resolved = resolve(PrecisionPolicy.parse(precision), "cpu")
        start = asked(resolved, **more)
        made.append(VllmEngine(start, rollout_kernels(resolved), decode_text=decode_text))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def asked(resolved: ResolvedPrecision, config: ModelConfig = CONFIG, **more: object) -> VllmStart:
    limits = {"slots": 5, "max_length": 32, "device": torch.device("cpu")} | more
    return VllmStart(config, resolved.rollout.active, resolved.logits.active, cache=resolved.kv_cache.active, **limits)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_what_vllm_is_started_with(build: Build, precision: str, dtype: str) -> None:
    engine = build(precision)
    options = LLM.made[-1].options
    expected = {
        "dtype": dtype,
        "hf_overrides": {"head_dtype": "float32"},
        "kv_cache_dtype": "auto",
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": 5,
        "max_model_len": 32,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
    }
    assert {name: options[name] for name in expected} == expected
    # keys and values, 2 layers, 2 heads of 8, two blocks of 128 tokens, five slots
    assert options["kv_cache_memory_bytes"] == 2 * 2 * 2 * 8 * (4 if dtype == "float32" else 2) * 256 * 5
    folder = json.loads((Path(options["model"]) / "config.json").read_text())
    assert folder["tie_word_embeddings"] is False
    assert folder["dtype"] == dtype
    assert "tensors read back as sent" in engine.evidence
    ours = {"VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_CPU_OMP_THREADS_BIND"}
    assert not ours & os.environ.keys()  # said to its processes, and taken back


def test_logits_in_half_are_asked_for(build: Build) -> None:
    engine = build({"preset": "bf16", "logits": "bf16"})
    assert LLM.made[-1].options["hf_overrides"] == {"head_dtype": "bfloat16"}
    assert "head bfloat16" in engine.evidence


WIDE = dataclasses.replace(CONFIG, hidden_size=128, head_dim=32)
FP8_CACHE = {"preset": "bf16", "kv_cache": "fp8"}


def test_a_cache_in_fp8_is_asked_for_and_looked_at(build: Build) -> None:
    engine = build(FP8_CACHE, config=WIDE)
    options = LLM.made[-1].options
    assert (options["dtype"], options["kv_cache_dtype"]) == ("bfloat16", "fp8_e4m3")
    assert options["kv_cache_memory_bytes"] == 2 * 2 * 2 * 32 * 1 * 256 * 5  # one byte a value
    assert "runs in bfloat16, head float32, cache fp8_e4m3 of scale 1; " in engine.evidence
    assert (
        "cache fp8_e4m3 of scale 1, queries in fp8_e4m3; "
        in build(FP8_CACHE, Fault(query_quant=True), config=WIDE).evidence
    )
    asked_for = r"was asked for kv_cache=fp8_e4m3 of scale 1 and runs with fp8_"
    with pytest.raises(MantissaError, match=asked_for + "e5m2 of scale 1"):
        build(FP8_CACHE, Fault(cache="fp8_e5m2"), config=WIDE)
    with pytest.raises(MantissaError, match=asked_for + r"e4m3 of scale 0\.5"):
        build(FP8_CACHE, Fault(cache_scale=0.5), config=WIDE)


def test_where_vllm_has_no_cache_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    resolved = resolve(PrecisionPolicy.parse(FP8_CACHE), "cpu")
    with pytest.raises(MantissaError, match=r"kv_cache=fp8: on a CPU .* a multiple of 32 wide, these are 8; leave"):
        asked(resolved)
    asked(resolved, device=torch.device("cuda", 0))  # a GPU's kernels say themselves
    start = asked(resolved, WIDE)
    for name in ("_is_avx512_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    with pytest.raises(MantissaError, match=r"kv_cache=fp8: .* wants AVX-512 or AMX, which this one has not"):
        VllmEngine(start, rollout_kernels(resolved))
    assert not LLM.made


def test_a_shape_that_vllm_reads_otherwise() -> None:
    resolved = resolve(PrecisionPolicy(), "cpu")
    wide = dataclasses.replace(CONFIG, head_dim=16)
    with pytest.raises(MantissaError, match=r"head_dim=16: vLLM takes a qwen2's heads to be .* wide, here 8"):
        asked(resolved, wide)


def test_each_sample_has_a_seed_of_its_own_and_comes_back_in_its_place(build: Build) -> None:
    engine = build()
    engine.sync(masters(1, CONFIG), 4)
    llm = LLM.made[-1]
    llm.asked.clear()
    llm.prompts.clear()
    requests = [Request((5, 6), seed=11, samples=2), Request((7,), seed=12, samples=3)]
    groups = engine.generate(requests, PARAMS, 4)
    keys = stream_keys([11, 11, 12, 12, 12], [0, 1, 0, 1, 2]).tolist()
    seeds = [key % 2**63 for key in keys]
    assert [one.seed for one in llm.asked] == seeds
    assert len(set(seeds)) == 5
    assert llm.prompts == [[5, 6], [5, 6], [7], [7], [7]]
    asked = llm.asked[0]
    assert (asked.n, asked.temperature, asked.max_tokens, asked.stop_token_ids) == (1, 0.5, 6, [3])
    assert (asked.top_p, asked.top_k, asked.ignore_eos, asked.logprobs, asked.detokenize) == (1.0, 0, True, 0, False)
    assert [len(group) for group in groups] == [2, 3]
    weights = [math.exp(-token / 0.5) for token in range(4)]
    for seed, sample in zip(seeds, chain(*groups), strict=True):
        assert sample.tokens == tuple(range(seed % 4, 4))  # up to the stop token, which is kept
        assert sample.finish_reason == "stop"
        assert sample.policy_version == 4
        expected = [math.log(weights[token] / sum(weights)) for token in sample.tokens]
        assert sample.logp_T.tolist() == pytest.approx(expected, abs=1e-6)
        assert sample.logp_T.dtype == torch.float32


def test_length_greedy_and_stop_strings(build: Build) -> None:
    engine = build(decode_text=lambda tokens: "".join("abcd"[token] for token in tokens))
    engine.sync(masters(1, CONFIG), 0)
    request = Request((5,), seed=3)
    free = dataclasses.replace(PARAMS, stop_token_ids=())
    ((full,),) = engine.generate([request], free, 0)
    assert full.finish_reason == "length"
    assert len(full.tokens) == 6
    stop = "".join("abcd"[token] for token in full.tokens[2:4])
    ((cut,),) = engine.generate([request], dataclasses.replace(free, stop=(stop,)), 0)
    assert (cut.tokens, cut.finish_reason) == (full.tokens[:4], "stop")
    assert torch.equal(cut.logp_T, full.logp_T[:4])
    ((greedy,),) = engine.generate([request], dataclasses.replace(free, temperature=0.0), 0)
    assert greedy.logp_T.tolist() == [0.0] * 6


def test_what_the_worker_holds_is_what_was_sent(build: Build) -> None:
    """Every tensor, fused ones apart, rounded once; the tied head as a tensor of its own."""
    engine = build("bf16")
    weights = masters(1, CONFIG)
    engine.sync(weights, 0)
    held = LLM.made[-1].worker.mantissa_weights()
    rounded = {name: str(digest(tensor.bfloat16())) for name, tensor in weights.items()}
    assert held == rounded | {"lm_head.weight": rounded["model.embed_tokens.weight"]}
    assert len(held) == len(weights) + 1


@pytest.mark.parametrize(
    ("keeps", "named"),
    [
        ("lm_head", "lm_head.weight"),
        ("model.embed_tokens", "model.embed_tokens.weight"),
        ("model.layers.1.self_attn.qkv_proj", r"model.layers.1.self_attn.[qkv]_proj.(weight|bias)"),
        ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj.weight"),
        ("model.layers.0.input_layernorm", "model.layers.0.input_layernorm.weight"),
    ],
)
def test_a_part_that_loading_did_not_renew_is_named(build: Build, keeps: str, named: str) -> None:
    engine = build(fault=Fault(keeps=keeps))
    with pytest.raises(MantissaError, match=f"computes with other values of {named} than were sent"):
        engine.sync(masters(1, CONFIG), 1)
    assert engine.version == -1
    with pytest.raises(MantissaError, match="holds no weights"):
        engine.generate([Request((5,), seed=1)], PARAMS, 1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(facts={"dtype": "bfloat16"}), "asked for dtype=float32 and runs with bfloat16"),
        (Fault(facts={"head_dtype": "bfloat16"}), "asked for head_dtype=float32 and runs with bfloat16"),
        (Fault(facts={"logprobs_mode": "raw_logprobs"}), "logprobs_mode=processed_logprobs and runs with raw_logprobs"),
        (Fault(facts={"quantization": "fp8"}), "asked for quantization=None and runs with fp8"),
        (Fault(raw_logprobs=True), "not of the distribution sampled from: log-probs 3.0000 apart at temperature 1 are"),
        (Fault(fails="head size 7\nand more"), "did not start: head size 7; its own messages"),
    ],
)
def test_a_vllm_that_is_not_as_asked_is_not_used(build: Build, fault: Fault, message: str) -> None:
    with pytest.raises(MantissaError, match=message):
        build(fault=fault)
    assert all(llm.closed for llm in LLM.made)


def test_answers_that_are_not_believed(build: Build) -> None:
    engine = build()
    engine.sync(masters(1, CONFIG), 1)
    llm, request = LLM.made[-1], Request((5,), seed=1)
    llm.fault.keeps_cache = True
    with pytest.raises(MantissaError, match="kept keys and values of the weights before these"):
        engine.sync(masters(2, CONFIG), 2)
    llm.fault.keeps_cache = False
    engine.sync(masters(2, CONFIG), 2)
    llm.fault.finish = "abort"
    with pytest.raises(MantissaError, match="for another reason than its end or its length: abort"):
        engine.generate([request], PARAMS, 2)
    llm.fault.finish, llm.fault.nan = "", True
    with pytest.raises(MantissaError, match="gave a log-prob that is not finite"):
        engine.generate([request], PARAMS, 2)


def test_a_vllm_that_dies_is_one_line(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    engine.sync(masters(1, CONFIG), 1)

    def dies(*_: object, **__: object) -> None:
        raise RuntimeError("EngineCore encountered an issue.\nSee stack trace above")

    monkeypatch.setattr(LLM, "generate", dies)
    with pytest.raises(
        MantissaError, match=r"^vLLM 0\.32\.0 failed: EngineCore encountered an issue\.; its own .*resume"
    ):
        engine.generate([Request((5,), seed=1)], PARAMS, 1)
    monkeypatch.setattr(LLM, "collective_rpc", dies)
    with pytest.raises(MantissaError, match=r"^vLLM 0\.32\.0 failed: EngineCore"):
        engine.sync(masters(1, CONFIG), 2)
    assert engine.version == -1


def test_what_is_refused_before_vllm_is_asked(build: Build) -> None:
    engine = build()
    request = Request((5,), seed=1)
    engine.sync(masters(1, CONFIG), 1)
    cases = (
        (request, dataclasses.replace(PARAMS, top_k=249), "it tells at most 248"),
        (request, dataclasses.replace(PARAMS, top_p=0.9), "top_p=0.9 alone"),
        (request, dataclasses.replace(PARAMS, temperature=0.005), r"vLLM would sample at 0\.01"),
        (request, dataclasses.replace(PARAMS, stop=("x",)), "stop strings need text"),
        (Request((), seed=1), PARAMS, "the prompt is empty"),
        (Request((5,) * 30, seed=1), PARAMS, "exceed max_length=32"),
    )
    for asked, params, message in cases:
        with pytest.raises(MantissaError, match=message):
            engine.generate([asked], params, 1)
    with pytest.raises(MantissaError, match="policy version 7 was asked for, 1 is loaded"):
        engine.generate([request], PARAMS, 7)


def test_closing_ends_vllm_and_deletes_the_weights(build: Build) -> None:
    engine = build()
    llm = LLM.made[-1]
    assert (Path(llm.options["model"]) / "model.safetensors").is_file()
    engine.close()
    assert llm.closed
    assert not Path(llm.options["model"]).exists()
    engine.close()


REQUEST = Request((5, 6), seed=7, samples=3)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_k": 2}, 2), ({"top_k": 3, "top_p": 0.8}, 1), ({"top_k": 3, "top_p": 0.99}, 3), ({"top_k": 30}, 4)],
)
def test_what_top_k_and_top_p_left_is_kept_with_each_token(build: Build, filters: dict[str, float], kept: int) -> None:
    engine = build()
    engine.sync(masters(1, CONFIG), 1)
    params = dataclasses.replace(PARAMS, stop_token_ids=(), **filters)
    for completion in engine.generate([REQUEST], params, 1)[0]:
        support = completion.support
        assert support is not None
        assert support.fits(completion.tokens, CONFIG.vocab_size)
        mask = support.mask(0, len(completion.tokens), CONFIG.vocab_size)
        assert mask.sum(1).tolist() == [kept] * 6
        assert bool(mask[:, :kept].all())
        scaled = (-torch.arange(float(kept)) / 0.5).log_softmax(-1)
        torch.testing.assert_close(completion.logp_T, scaled[list(completion.tokens)])
    asked_for = LLM.made[-1].asked[-1]
    assert (asked_for.top_k, asked_for.top_p) == (filters["top_k"], filters.get("top_p", 1.0))
    assert asked_for.logprobs == min(filters["top_k"] + 8, CONFIG.vocab_size)


def test_the_most_probable_tokens_come_with_each(build: Build) -> None:
    engine = build()
    engine.sync(masters(1, CONFIG), 1)
    params = dataclasses.replace(PARAMS, most_probable=3, top_k=2, stop_token_ids=())
    (completion, *_) = engine.generate([REQUEST], params, 1)[0]
    top = completion.most_probable
    assert top is not None
    assert top.fits(6, CONFIG.vocab_size)
    assert top.ids_TK[:, :2].tolist() == [[0, 1]] * 6
    expected = (-torch.arange(2.0) / 0.5).log_softmax(-1)
    torch.testing.assert_close(top.logp_TK[:, :2], expected.expand(6, 2))
    assert bool((top.logp_TK[:, 2] == -torch.inf).all())


def test_greedy_is_greedy_whatever_is_left_out(build: Build) -> None:
    engine = build()
    engine.sync(masters(1, CONFIG), 1)
    (completion, *_) = engine.generate([REQUEST], dataclasses.replace(PARAMS, temperature=0.0, top_k=2), 1)[0]
    assert completion.support is None
    assert LLM.made[-1].asked[-1].top_k == 0


def test_log_probs_that_are_not_of_what_was_kept_are_not_believed(build: Build) -> None:
    """Of the whole vocabulary, of which fewer are told than there are: their mass is not 1."""
    engine = build(fault=Fault(whole_logprobs=True, few=2))
    engine.sync(masters(1, CONFIG), 1)
    with pytest.raises(MantissaError, match=r"kept tokens of 0\.98.* of the probability"):
        engine.generate([REQUEST], dataclasses.replace(PARAMS, top_k=2, stop_token_ids=()), 1)
