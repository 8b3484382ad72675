"""The engine against the naive one, against transformers, and against itself under every way of batching; its stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from mantissa.base.errors import MantissaError
from mantissa.kernels import learner_kernels, resolve
from mantissa.model import Decoder
from mantissa.precision import PrecisionPolicy, token_logprob
from mantissa.rollout import Completion, NativeEngine, Request, SamplingParams
from mantissa.rollout.generation import Generation, StopStrings
from naive_engine import (
    reference_distribution,
    reference_generate,
    reference_logits,
    reference_uniform,
)
from other_library import OtherLibrary

Build = Callable[..., tuple[NativeEngine, Decoder]]
FAMILIES = ("llama", "qwen2", "qwen3")
Work = dict[str, list[int]]
PARAMS = SamplingParams(max_tokens=12, stop_token_ids=(7,))
# How far the CDF at a token's borders may move: the reduction order's effect on logits, per format.
CDF_TOLERANCE = {"fp32": 2e-6, "fp16": 4e-3, "bf16": 3e-2}


def with_families(names: str, values: dict[str, tuple[object, ...]]) -> pytest.MarkDecorator:
    """Every family with every value; each of both once in the fast suite, the other pairs are ``variants``."""
    fast = {(FAMILIES[i % 3], name) for i, name in enumerate(values)}
    pairs = [(family, name) for family in FAMILIES for name in values]
    marks = [() if pair in fast else pytest.mark.variants for pair in pairs]
    rows = [pytest.param(f, *values[n], id=f"{f}-{n}", marks=m) for (f, n), m in zip(pairs, marks, strict=True)]
    return pytest.mark.parametrize(f"family, {names}", rows)


def flat(completions: list[list[Completion]]) -> list[Completion]:
    return [completion for group in completions for completion in group]


def assert_same(got: list[list[Completion]], expected: list[list[Completion]], tolerance: float = 2e-5) -> None:
    assert [len(group) for group in got] == [len(group) for group in expected]
    for ours, theirs in zip(flat(got), flat(expected), strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.finish_reason == theirs.finish_reason
        torch.testing.assert_close(ours.logp_T, theirs.logp_T, atol=tolerance, rtol=0)


@with_families(
    "fields",
    {"plain": ({},), "filters": ({"temperature": 0.7, "top_k": 9, "top_p": 0.8},), "greedy": ({"temperature": 0.0},)},
)
def test_fp32_equals_the_naive_engine(build: Build, requests: list[Request], family: str, fields: dict) -> None:
    engine, _ = build(family, slots=5)
    params = SamplingParams(max_tokens=12, stop_token_ids=(7,), **fields)
    expected = reference_generate(engine.model, engine.kernels, engine.kv_format, requests, params, 1)
    assert {c.finish_reason for c in flat(expected)} == {"stop", "length"} or fields
    assert_same(engine.generate(requests, params, 1), expected)


@with_families(
    "precision",
    {name: (name,) for name in ("fp32", "fp16", "bf16")}
    | {"mixed": ({"preset": "bf16", "rollout": "fp32", "kv_cache": "fp16"},)},
)
def test_every_token_is_the_one_its_uniform_selects(
    build: Build, requests: list[Request], family: str, precision: str | dict
) -> None:
    """In a half a flipped rounding may move the CDF's steps across the uniform: two engines' tokens may differ.

    But each must be the one that the naive CDF, given the same prefix, selects: its interval holds the uniform, up to
    the reduction order's effect. A wrong position, cache row, uniform or filter misses by far more.
    """
    engine, _ = build(family, precision, slots=6)
    params = SamplingParams(max_tokens=10, temperature=0.9, top_k=30)
    tolerance = CDF_TOLERANCE[engine.kernels.format.name if isinstance(precision, str) else "fp16"]
    for request, group in zip(requests, engine.generate(requests, params, 1), strict=True):
        for number, completion in enumerate(group):
            sequence = [*request.prompt_tokens, *completion.tokens]
            logits = reference_logits(engine.model, engine.kernels, engine.kv_format, sequence).numpy()
            for step, token in enumerate(completion.tokens):
                distribution = reference_distribution(logits[len(request.prompt_tokens) - 1 + step], params)
                u, upper = reference_uniform(request.seed, number, step), distribution[: token + 1].sum()
                assert upper - distribution[token] - tolerance < u < upper + tolerance
                assert abs(np.exp(completion.logp_T[step].item()) - distribution[token]) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(build: Build, requests: list[Request], family: str) -> None:
    import transformers

    engine, master = build(family, slots=4)
    c = engine.config
    sizes = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    )
    names = [*sizes.split(), "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
    shape = {name: getattr(c, name) for name in names} | {"attn_implementation": "eager"}
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config_class, model_class = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    ours = engine.generate(requests, SamplingParams(max_tokens=14, temperature=0.0), 1)
    with _disable_current_modes(), torch.no_grad():
        oracle = model_class(config_class(**shape)).eval()
        missing, unexpected = oracle.load_state_dict(master.state_dict(), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        oracle.tie_weights()
        for request, group in zip(requests, ours, strict=True):
            prompt = torch.tensor([request.prompt_tokens])
            how = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None}
            out = oracle.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
            for completion in group:
                assert completion.tokens == tuple(out[0, prompt.shape[1] :].tolist())
                assert not completion.logp_T.any()


@with_families(
    "precision, smallest_mean, largest_mean",
    {"bf16": ("bf16", 0.0, 6e-2), "fp32": ("fp32", 0.0, 2e-6), "fp16": ("fp16", 1e-5, 8e-3)},
)
def test_the_gap_to_the_learner(
    build: Build, family: str, precision: str, smallest_mean: float, largest_mean: float
) -> None:
    """The learner's full forward on the sampled tokens: fp32 agrees, fp16 differs by flipped roundings, and does.

    Prototypes of this size whose products were summed in another order had mean |dlogp| of 2e-4 to 1e-3 (fp16) and
    1e-3 to 8e-3 (bf16): the upper bounds leave room for that. Here the engine's products are summed in two halves and
    the learner's whole, on every CPU; a bf16 sum is seldom near enough to a tie to flip: there may be no gap in bf16.
    """
    engine, master = build(family, precision, slots=24, max_length=60, wide=True)
    prompts = torch.randint(0, 40, (24, 6), generator=torch.Generator().manual_seed(8)).tolist()
    params = SamplingParams(max_tokens=48, temperature=1.2)
    with OtherLibrary(lambda rows, terms: terms // 2):
        completions = flat(engine.generate([Request(tuple(p), seed=i) for i, p in enumerate(prompts)], params, 1))
    kernels = learner_kernels(resolve(PrecisionPolicy.parse(precision), "cpu"))
    tokens_BT = torch.tensor([[*p, *c.tokens] for p, c in zip(prompts, completions, strict=True)])
    with torch.no_grad(), OtherLibrary(lambda rows, terms: terms):
        logits_BTV = master.logits(master(tokens_BT, kernels), kernels)
    learner_BT = token_logprob(logits_BTV[:, 5:-1], tokens_BT[:, 6:], 1.2)
    gap_BT = (learner_BT - torch.stack([c.logp_T for c in completions])).abs()
    assert smallest_mean <= gap_BT.mean() < largest_mean
    if precision == "fp32":
        assert gap_BT.max() < 1e-5


def test_slots_do_not_change_the_samples(build: Build, requests: list[Request], work: Work) -> None:
    """Fewer slots than samples, than one group, one alone: refills, compaction and prefill ahead change nothing."""
    expected = build("qwen3", slots=15)[0].generate(requests, PARAMS, 1)
    for slots in (1, 3, 64):
        engine, _ = build("qwen3", slots=slots)
        work["prefill"].clear()
        work["decode"].clear()
        assert_same(engine.generate(requests, PARAMS, 1), expected)
        assert sum(work["prefill"]) == sum(len(r.prompt_tokens) for r in requests)
        assert sum(work["decode"]) == sum(len(c.tokens) - 1 for c in flat(expected))
        assert max(work["decode"]) <= slots
    assert_same(engine.generate(requests, PARAMS, 1), expected)  # what the cache holds from before does not matter


def test_a_sample_depends_on_prompt_seed_and_index_only(build: Build, requests: list[Request]) -> None:
    engine, _ = build("llama", slots=6)
    together = engine.generate(requests, PARAMS, 1)
    assert_same(engine.generate(requests[::-1], PARAMS, 1)[::-1], together)
    for request, group in zip(requests, together, strict=True):
        assert_same(engine.generate([request], PARAMS, 1), [group])
        fewer = Request(request.prompt_tokens, request.seed, samples=1)
        assert_same(engine.generate([fewer], PARAMS, 1), [group[:1]])
    reseeded = [Request(r.prompt_tokens, r.seed + 1, r.samples) for r in requests]
    assert [c.tokens for c in flat(engine.generate(reseeded, PARAMS, 1))] != [c.tokens for c in flat(together)]
    four = flat([together[0]])
    assert len({c.tokens for c in four}) == 4  # the samples of a group differ


def test_a_shorter_prompts_padding_is_zeros_in_the_cache(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """What padding gives could be infinite in a half, and 0 times that, in attention, is NaN."""
    prefill, made = Generation._prefill_forward, []

    def kept(self: Generation, *given: Any) -> Any:
        made.append((given[1], prefill(self, *given)))
        return made[-1][1]

    monkeypatch.setattr(Generation, "_prefill_forward", kept)
    engine, _ = build(slots=4)
    engine.generate([Request((3, 1, 4, 1, 5), 1), Request((2, 7), 2)], PARAMS, 1)
    ((lengths, (kv, _)),) = made
    for row, length in enumerate(lengths.tolist()):
        assert kv[:, :, row, :, :length].abs().amin(-1).max() > 0
        assert not kv[:, :, row, :, length:].any()


def test_equal_prompts_are_prefilled_once(build: Build, work: Work) -> None:
    engine, _ = build(slots=4)
    prompt = (3, 1, 4, 1, 5)
    out = engine.generate([Request(prompt, 1, 6), Request((2, 7), 2), Request(prompt, 3, 5)], PARAMS, 1)
    assert sum(work["prefill"]) == 7
    assert_same(engine.generate([Request(prompt, 3, 5)], PARAMS, 1), [out[2]])


def test_slots_are_refilled_at_once(build: Build, work: Work) -> None:
    """With more samples than slots, none idles until the queue is empty: the fewest steps possible, and a tail."""
    engine, _ = build(slots=4)
    requests = [Request((i % 40, 3), seed=i) for i in range(40)]
    out = flat(engine.generate(requests, SamplingParams(max_tokens=16, stop_token_ids=tuple(range(4))), 1))
    decoded = sum(len(c.tokens) - 1 for c in out)
    assert len({len(c.tokens) for c in out}) > 5  # ragged indeed
    assert len(work["decode"]) <= -(-decoded // 4) + 15
    assert sum(work["decode"]) == decoded


def test_stop_tokens_are_kept_and_lengths_are_exact(build: Build, requests: list[Request], work: Work) -> None:
    engine, _ = build()
    out = flat(engine.generate(requests, PARAMS, 1))
    for completion in out:
        assert len(completion.tokens) == len(completion.logp_T)
        assert 7 not in completion.tokens[:-1]
        if completion.finish_reason == "stop":
            assert completion.tokens[-1] == 7
        else:
            assert len(completion.tokens) == 12
            assert completion.tokens[-1] != 7
    assert {c.finish_reason for c in out} == {"stop", "length"}
    work["decode"].clear()
    one = flat(engine.generate(requests, SamplingParams(max_tokens=1), 1))
    assert [c.tokens for c in one] == [c.tokens[:1] for c in out]
    assert work["decode"] == []


def test_stop_strings_end_at_the_token_that_completes_them(build: Build, requests: list[Request]) -> None:
    """Tokens decode to one or two letters, so that the string straddles them; the free run says where it must end."""
    words = ["a", "b", "ab", "ba", "c"] * 8

    def decode(tokens: object) -> str:
        return "".join(words[t] for t in tokens)  # type: ignore[attr-defined]

    engine, _ = build(decode_text=decode)
    free = flat(engine.generate(requests, SamplingParams(max_tokens=24), 1))
    stopped = flat(engine.generate(requests, SamplingParams(max_tokens=24, stop=("abb", "ca")), 1))
    straddled = 0
    for whole, cut in zip(free, stopped, strict=True):
        ends = [n for n in range(1, 25) if any(s in decode(whole.tokens[:n]) for s in ("abb", "ca"))]
        assert cut.tokens == whole.tokens[: ends[0] if ends else 24]
        assert cut.finish_reason == ("stop" if ends else "length")
        straddled += bool(ends)
    assert straddled >= 5


def test_results_can_be_saved_for_backward(build: Build) -> None:
    """They are constants of a loss: fp32, on the CPU, no inference tensors, no views of a buffer that is used again."""
    engine, _ = build(slots=2)
    first = engine.generate([Request((1, 2), 0, 4)], PARAMS, 1)[0]
    kept = [c.logp_T.clone() for c in first]
    engine.generate([Request((5,), 9, 8)], PARAMS, 1)
    for completion, before in zip(first, kept, strict=True):
        assert completion.logp_T.dtype == torch.float32
        assert torch.equal(completion.logp_T, before)
        weight = torch.ones_like(before, requires_grad=True)
        (weight * completion.logp_T).sum().backward()
        assert torch.equal(weight.grad, before)


def test_keys_and_values_are_rounded_before_they_are_seen(build: Build) -> None:
    """A coarser cache changes the log-probs by its rounding, as it does in the naive engine."""
    requests = [Request(tuple(range(10)), 0)]
    params = SamplingParams(max_tokens=4)
    fine, _ = build("llama", "fp32")
    coarse, _ = build("llama", {"preset": "fp32", "kv_cache": "bf16"})
    exact, rounded = (e.generate(requests, params, 1)[0][0] for e in (fine, coarse))
    assert exact.tokens == rounded.tokens
    gap = (exact.logp_T - rounded.logp_T).abs()
    assert 1e-5 < gap.max() < 0.1
    expected = reference_generate(coarse.model, coarse.kernels, coarse.kv_format, requests, params, 1)
    assert_same([[rounded]], expected)


def test_an_overflowing_activation_is_an_error_and_leaves_no_trace(build: Build) -> None:
    engine, master = build("llama", "fp16", slots=4)
    before = engine.generate([Request((1, 2), 0, 4)], PARAMS, 1)
    weights = {name: parameter.detach().clone() for name, parameter in master.named_parameters()}
    for name in weights:
        if name.endswith(("v_proj.weight", "o_proj.weight")):
            weights[name] *= 5e4
    engine.sync(weights, 2)
    with pytest.raises(MantissaError, match="policy version 2 gives non-finite logits in fp16"):
        engine.generate([Request((1, 2), 0, 4)], PARAMS, 2)
    engine.sync(dict(master.named_parameters()), 3)
    after = engine.generate([Request((1, 2), 0, 4)], PARAMS, 3)
    assert [c.tokens for c in flat(after)] == [c.tokens for c in flat(before)]


@pytest.mark.parametrize(
    ("request_fields", "params", "said"),
    [
        (((), 0), {}, "request 1: the prompt is empty"),
        (((1, 40), 0), {}, r"request 1: token 40 is outside the vocabulary 0\.\.39"),
        (((-1, 4), 0), {}, "token -1 is outside"),
        (((1,) * 60, 0), {}, "60 prompt tokens and max_tokens=12 exceed max_length=64"),
        (((1,), 0, 0), {}, "samples=0"),
        (((1,), 0), {"stop_token_ids": (99,)}, "stop token 99"),
        (((1,), 0), {"stop": ("x",)}, "give the engine decode_text"),
    ],
)
def test_impossible_requests_are_refused(build: Build, request_fields: tuple, params: dict, said: str) -> None:
    engine, _ = build()
    with pytest.raises(MantissaError, match=said):
        engine.generate([Request((1, 2), 0), Request(*request_fields)], SamplingParams(max_tokens=12, **params), 1)


def test_the_first_and_the_last_token_of_a_vocabulary_may_be_in_a_prompt(build: Build) -> None:
    engine, _ = build()
    assert len(engine.generate([Request((0, 39), 0)], PARAMS, 1)) == 1


def test_impossible_engines_are_refused(build: Build) -> None:
    with pytest.raises(MantissaError, match="slots=0"):
        build(slots=0)
    with pytest.raises(MantissaError, match="the model has 32768 positions"):
        build(max_length=40_000)


def test_nothing_to_do(build: Build) -> None:
    engine, _ = build()
    assert engine.generate([], PARAMS, 1) == []


def test_the_longest_sample_that_fits(build: Build) -> None:
    """A prompt and response of exactly max_length, where the cache has no spare position."""
    engine, _ = build("qwen2", slots=3, max_length=40)
    requests = [Request(tuple(range(30)), 0, 2), Request((1,), 1, 2)]
    params = SamplingParams(max_tokens=10)
    expected = reference_generate(engine.model, engine.kernels, engine.kv_format, requests, params, 1)
    assert_same(engine.generate(requests, params, 1), expected)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens=0"), ({"max_tokens": 4, "temperature": -0.1}, "temperature=-0.1"),
        ({"max_tokens": 4, "top_k": -1}, "top_k=-1"), ({"max_tokens": 4, "top_p": 0.0}, "top_p=0.0"),
        ({"max_tokens": 4, "top_p": 1.5}, "top_p=1.5"), ({"max_tokens": 4, "stop": ("a", "")}, "empty string"),
    ],
)  # fmt: skip
def test_impossible_sampling_is_refused_by_name(fields: dict, named: str) -> None:
    with pytest.raises(MantissaError, match=named):
        SamplingParams(**fields)


# stop strings, found at the token that completes them, wherever the tokens' borders lie

PIECES = ["a", "b", "ab", "</", "answer", ">", "", " ", "é", "</answer>"]


def decode(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def decode_stripped(tokens: Sequence[int]) -> str:
    """As tokenizers do that drop the space in front of the first token."""
    return decode(tokens).lstrip(" ")


def decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=60),
    stop=st.sampled_from([("</answer>",), ("ab",), ("ba", "é é"), ("  ",), ("b</",)]),
)
def test_equals_a_search_of_the_whole_text_after_every_token(tokens: list[int], stop: tuple[str, ...]) -> None:
    strings = StopStrings(stop, decode)
    for size in range(1, len(tokens) + 1):
        expected = any(text in decode(tokens[:size]) for text in stop)
        assert strings.completed(tokens[:size]) == expected
        if expected:
            return


def test_characters_of_several_byte_tokens() -> None:
    tokens = list("The answer is 5 → done ✓ and more".encode())
    strings = StopStrings(("→ done ✓",), decode_bytes)
    found = next(size for size in range(1, len(tokens) + 1) if strings.completed(tokens[:size]))
    assert bytes(tokens[:found]).decode() == "The answer is 5 → done ✓"


def test_tokens_without_text_do_not_hide_a_string() -> None:
    empty = [6] * 200
    tokens = [3, *empty, 4, *empty, 5]
    strings = StopStrings(("</answer>",), decode)
    assert not strings.completed(tokens[:-1])
    assert strings.completed(tokens)


def test_a_space_at_the_border_of_the_tail() -> None:
    strings = StopStrings((" a",), decode_stripped)
    tokens = [1] * 50 + [7, 0]
    assert not strings.completed(tokens[:-1])
    assert strings.completed(tokens)


def test_only_a_tail_is_decoded() -> None:
    seen: list[int] = []

    def counting(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return decode(tokens)

    assert not StopStrings(("</answer>",), counting).completed([0] * 5000)
    assert max(seen) < 50


@pytest.mark.parametrize("piece", [9, 4])
def test_a_find_that_only_the_tail_has_does_not_count(piece: int) -> None:
    """A decoder that renders a cut text otherwise: the whole text decides."""

    def cutting(tokens: Sequence[int]) -> str:
        return "#" * len(tokens) if len(tokens) > 20 else decode([piece] * len(tokens))

    assert not StopStrings((PIECES[piece],), cutting).completed([0] * 100)


def test_an_interrupted_call_ends_with_the_tokens_that_it_had(build: Build) -> None:
    """Those are the first of what the whole call gives; what never began has none, and the engine serves on."""
    engine, _ = build(slots=2)
    requests = [Request((1, 2, 3), seed, 2) for seed in range(3)]
    params = SamplingParams(max_tokens=12)
    whole = flat(engine.generate(requests, params, 1))
    left = iter(range(5))
    engine.interrupted = lambda: next(left, None) is None
    cut = flat(engine.generate(requests, params, 1))
    assert [completion.finish_reason for completion in cut] == ["abort"] * 6
    assert sorted(len(completion.tokens) for completion in cut) == [0, 0, 0, 0, 6, 6]  # the first, and five steps
    for ours, theirs in zip(cut, whole, strict=True):
        assert ours.tokens == theirs.tokens[: len(ours.tokens)]
        assert torch.equal(ours.logp_T, theirs.logp_T[: len(ours.tokens)])
        assert ours.key == theirs.key
    engine.interrupted = lambda: False
    assert flat(engine.generate(requests, params, 1))[0].tokens == whole[0].tokens
