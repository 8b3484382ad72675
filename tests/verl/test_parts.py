"""The plugin's parts that need no verl: options, refusals, schedules, rows, the setup's way, a server's requests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.base.errors import MantissaError
from mantissa.base.seeds import generator
from mantissa.kernels import ExactBf16Kernels, NativeKernels, cpu, resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig, byte_tokenizer, save_model
from mantissa.precision import FP32, PrecisionPolicy
from mantissa.rl.assemble import exact_plan
from mantissa.rl.score import forward
from mantissa.rollout import NativeEngine
from mantissa.rollout.sampling import Request
from mantissa.verl import refusals
from mantissa.verl.batch import Rows, by_temperature
from mantissa.verl.options import EngineOptions, Schedule
from mantissa.verl.serving import Answer, Limits, Serving, sampling
from mantissa.verl.wire import TENSOR, Setup

LIMITS = Limits(prompt=8, response=6, slots=4, seed=42)
SHAPE = ModelConfig("qwen3", 258, 32, 48, 2, 4, 2, 8, qk_norm=True, initializer_range=0.3, max_position_embeddings=64)
EXACT = {"train": "fp16", "rollout": "fp16", "kernels": "exact"}


def optim(**fields: Any) -> SimpleNamespace:
    """verl's section ``actor.optim``, with its defaults."""
    defaults = {
        "lr": 2.0,
        "lr_scheduler_type": "constant",
        "total_training_steps": -1,
        "lr_warmup_steps": -1,
        "lr_warmup_steps_ratio": 0.0,
        "min_lr_ratio": None,
        "num_cycles": 0.5,
        "zero_indexed_step": True,
    }
    return SimpleNamespace(**defaults | fields)


# Options


def test_verl_s_dtype_is_the_format_of_what_the_options_do_not_name() -> None:
    exact = EngineOptions.of(None).policy("float16")
    assert (exact.train, exact.rollout, exact.kernels) == ("fp16", "fp16", "exact")
    mixed = EngineOptions.of({"precision": {"rollout": "fp16"}}).policy("bfloat16")
    assert (mixed.train, mixed.rollout, mixed.kernels) == ("bf16", "fp16", "fast")
    one = EngineOptions.of({"precision": {"train": "fp16", "kernels": "exact"}}).policy("bfloat16")
    assert (one.train, one.rollout) == ("fp16", "fp16")
    assert EngineOptions.of({"precision": "bf16-train-fp16-rollout"}).policy("float32").rollout == "fp16"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lenght": 32}, "unknown setting 'lenght'; did you mean 'length'?"),
        ({"precision": 16}, "precision"),
        ({"param_dtype": "fp16"}, "precision.train"),
        ({"shard": "zero3"}, "shard"),
        ({"rows": 0}, "rows"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(MantissaError, match="mixed_precision") as caught:
        EngineOptions.of(given)
    assert said in str(caught.value)


def test_a_wrong_key_of_the_precision_is_named() -> None:
    with pytest.raises(MantissaError, match="trian"):
        EngineOptions.of({"precision": {"trian": "fp16"}}).policy("float32")


# Schedules


def test_warm_up_rises_from_nothing_and_stays() -> None:
    schedule = Schedule.of(optim(lr_warmup_steps=4))
    assert [schedule.rate(step) for step in range(6)] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    assert Schedule.of(optim(lr_warmup_steps_ratio=0.1, total_training_steps=20)).warmup == 2
    assert Schedule.of(optim(lr_warmup_steps=None)).rate(0) == 2.0


def test_a_cosine_falls_to_its_least() -> None:
    schedule = Schedule.of(
        optim(lr_scheduler_type="cosine", total_training_steps=10, lr_warmup_steps=2, min_lr_ratio=0.1)
    )
    assert schedule.rate(2) == pytest.approx(2.0)
    assert schedule.rate(6) == pytest.approx(2.0 * 0.55)
    assert schedule.rate(10) == pytest.approx(0.2)
    assert schedule.rate(4) == pytest.approx(2.0 * (0.45 * math.cos(math.pi / 4) + 0.55))


def test_a_cosine_without_an_end_is_refused() -> None:
    with pytest.raises(MantissaError, match=r"trainer\.total_training_steps"):
        Schedule.of(optim(lr_scheduler_type="cosine"))


# Refusals


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        (refusals.of_model, {"lora_rank": 8}, "lora_rank"),
        (refusals.of_model, {"lora": {"rank": 8}}, "lora.rank=8: expected 0"),
        (refusals.of_model, {"lora_adapter_path": "x"}, "lora_adapter_path"),
        (refusals.of_model, {"hf_config": SimpleNamespace(vision_config={})}, "multimodal"),
        (refusals.of_model, {"mtp": {"enable": True}}, "mtp"),
        (refusals.of_model, {"use_liger": True}, "use_liger"),
        (refusals.of_model, {"override_config": {"attn_implementation": "sdpa", "rope_theta": 1}}, "rope_theta"),
        (refusals.of_optimizer, {"optimizer": "SGD"}, "SGD"),
        (refusals.of_optimizer, {"override_optimizer_config": {"eps": 1}}, "mixed_precision.eps"),
        (refusals.of_checkpoint, {"async_save": True}, "async_save"),
        (refusals.of_checkpoint, {"save_contents": ["model", "weights"]}, "weights"),
        (refusals.of_rollout, {"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2"),
        (refusals.of_rollout, {"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2"),
        (refusals.of_rollout, {"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        (refusals.of_rollout, {"quantization": "torchao"}, "quantization=torchao: expected fp8"),
        (refusals.of_rollout, {"enable_rollout_routing_replay": True}, "routing_replay"),
        (refusals.of_rollout, {"disaggregation": {"enabled": True}}, "disaggregation"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(section: Any, fields: dict[str, Any], said: str) -> None:
    for form in (fields, SimpleNamespace(**fields)):
        with pytest.raises(MantissaError, match="here: ") as caught:
            refusals.refuse("here", section(form))
        assert said in str(caught.value)
    refusals.refuse("here", section({}))


@pytest.mark.parametrize("fields", [{"param_offload": True}, {"ulysses_sequence_parallel_size": 2}, {"fsdp_size": 2}])
def test_ways_to_shard_that_are_not_ours_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(MantissaError, match=next(iter(fields))):
        refusals.refuse("here", refusals.of_engine(fields, ranks=4))
    refusals.refuse("here", refusals.of_engine({"fsdp_size": 4}, ranks=4))


def test_a_batch_of_another_kind_is_refused() -> None:
    whole = {"prompts", "responses"}
    refusals.refuse("here", refusals.of_batch({}, whole))
    with pytest.raises(MantissaError, match="SFT"):
        refusals.refuse("here", refusals.of_batch({}, {"input_ids"}))
    with pytest.raises(MantissaError, match="router replay"):
        refusals.refuse("here", refusals.of_batch({}, whole | {"routed_experts"}))


# Rows


def nested(rows: list[list[int]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6))
def test_a_value_stands_one_place_before_its_token(lengths: list[tuple[int, int]]) -> None:
    """verl reads the log-prob of the token at place i of a row at place i - 1."""
    prompts = [[10 * row + j for j in range(size)] for row, (size, _) in enumerate(lengths)]
    responses = [[100 * row + j + 7 for j in range(size)] for row, (_, size) in enumerate(lengths)]
    ids = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    rows = Rows.of({"input_ids": nested(ids), "prompts": nested(prompts), "responses": nested(responses)})
    position_N, token_N = rows.sequences.response_tokens()
    assert token_N.tolist() == [token for response in responses for token in response]
    values = token_N.float().requires_grad_()
    got = rows.jagged(values)
    for row, prompt, response in zip(got.unbind(), prompts, responses, strict=True):
        expected = [0.0] * (len(prompt) - 1) + [float(token) for token in response] + [0.0]
        assert row.tolist() == expected
    got.values().sum().backward()
    assert values.grad is not None
    assert values.grad.eq(1).all()
    assert len(position_N) == len(token_N)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([[1], [1, 2], [3, 4, 5]]), st.lists(st.integers(0, 9), max_size=4)),
        min_size=1,
        max_size=5,
    )
)
def test_a_row_has_its_own_log_probs_whatever_aborted_ones_are_beside_it(
    pairs: list[tuple[list[int], list[int]]],
) -> None:
    """An aborted request gives a response of no token. Against each row by itself, without padding or packing."""
    model = Decoder(ModelConfig("qwen3", 13, 16, 24, 1, 2, 1, 8, initializer_range=0.3))
    model.initialize(torch.Generator().manual_seed(2))
    kernels = NativeKernels(FP32)
    ids = [prompt + response for prompt, response in pairs]
    given_rows = {
        "input_ids": nested(ids),
        "prompts": nested([p for p, _ in pairs]),
        "responses": nested([r for _, r in pairs]),
    }
    rows = Rows.of(given_rows)
    logp = rows.jagged(forward(model, kernels, rows.sequences, 1.0).logp_N)
    for row, (prompt, response) in zip(logp.unbind(), pairs, strict=True):
        law = model.logits(model(torch.tensor([[*prompt, *response]]), kernels)[0], kernels).log_softmax(-1)
        own = [float(law.detach()[len(prompt) + j - 1, token]) for j, token in enumerate(response)]
        expected = torch.tensor([0.0] * (len(prompt) - 1) + own + [0.0])
        torch.testing.assert_close(row.detach(), expected, rtol=0, atol=2e-5)
    logp.values().sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_an_empty_prompt_is_refused() -> None:
    empty = torch.nested.nested_tensor_from_jagged(torch.tensor([1]), torch.tensor([0, 0, 1]))
    with pytest.raises(MantissaError, match="empty"):
        Rows.of({"input_ids": nested([[1], [2, 3]]), "prompts": empty, "responses": nested([[1], [2]])})


def test_rows_go_by_their_temperature() -> None:
    assert [(value, rows.tolist()) for value, rows in by_temperature(0.7, 3)] == [(0.7, [0, 1, 2])]
    mixed = by_temperature(torch.tensor([1.0, 0.5, 1.0]), 3)
    assert [(value, rows.tolist()) for value, rows in mixed] == [(0.5, [1]), (1.0, [0, 2])]
    with pytest.raises(MantissaError, match=r"rollout\.temperature=0"):
        by_temperature(0.0, 2)
    with pytest.raises(MantissaError, match="2 temperatures of 3 rows"):
        by_temperature(torch.tensor([1.0, 0.5]), 3)


# What a request may ask


def test_verl_s_defaults_of_a_request() -> None:
    params = sampling({"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0}, 5, LIMITS, (2, 3))
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (6, 0.5, 0, 0.9)
    assert params.stop_token_ids == (2, 3)
    assert sampling({}, 10, LIMITS, ()).max_tokens == 4  # prompt and response share 14
    assert sampling({"max_tokens": 3}, 10, LIMITS, ()).max_tokens == 3
    assert sampling({"max_new_tokens": 99}, 10, LIMITS, ()).max_tokens == 4
    assert sampling({"ignore_eos": True, "stop_token_ids": [9], "stop": "x"}, 5, LIMITS, (2,)).stop_token_ids == (9,)
    assert sampling({}, 5, dataclasses.replace(LIMITS, most=7), ()).max_tokens == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"n": 2}, "n=2"),
        ({"guided_json": "{}"}, "guided_json"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_a_request_may_not_ask_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(MantissaError) as caught:
        sampling(given, 5, LIMITS, ())
    assert said in str(caught.value)


def test_a_prompt_that_fills_everything_is_refused() -> None:
    with pytest.raises(MantissaError, match="no room"):
        sampling({}, 14, LIMITS, ())


# The setup's way, and a server


@pytest.fixture(scope="module")
def policy() -> Decoder:
    return Decoder(SHAPE).initialize(generator(3, "weights"))


@pytest.fixture(scope="module")
def setup(policy: Decoder) -> Setup:
    precision = resolve(EngineOptions.of({"precision": EXACT}).policy("float32"), "cpu")
    plan = exact_plan(precision, policy, torch.device("cpu"), 16, 64)
    return Setup(EXACT, plan, torch.get_num_threads(), 16)


def test_the_setup_travels_as_text_and_as_bytes(setup: Setup) -> None:
    assert Setup.from_json(setup.to_json()) == setup
    weights = {TENSOR: setup.to_tensor(), "w": torch.zeros(1)}
    assert Setup.take_from(weights) == setup
    assert list(weights) == ["w"]
    with pytest.raises(MantissaError, match="two versions"):
        Setup.from_json(json.dumps({"plan": {}}))


@pytest.mark.usefixtures("bf16_is_own")
def test_a_plan_of_a_processors_own_bf16_travels_and_makes_its_kernels(
    policy: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rollout's processor has no such products of its own that are faster: the plan is the learner's."""
    wanted = {"train": "bf16", "rollout": "bf16", "kernels": "exact"}
    precision = resolve(PrecisionPolicy.parse(wanted), "cpu")
    setup = Setup(wanted, exact_plan(precision, policy, torch.device("cpu"), 16, 64), torch.get_num_threads(), 16)
    again = Setup.from_json(setup.to_json())
    assert again == setup
    monkeypatch.setattr(cpu, "products", lambda: cpu.CpuProducts(1.0))
    kernels = rollout_kernels(resolve(PrecisionPolicy.parse(wanted), "cpu"), again.plan)
    assert isinstance(kernels, ExactBf16Kernels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, policy: Decoder) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    save_model(policy, byte_tokenizer(), path)
    return path


def served(
    folder: Path,
    setup: Setup,
    policy: Decoder,
    work: Callable[[Serving], Coroutine[Any, Any, Any]],
    limits: Limits = LIMITS,
) -> Any:
    """What ``work`` gives with a server that holds the policy."""

    async def run() -> Any:
        serving = Serving(str(folder), limits, torch.device("cpu"))
        await serving.load(setup, {name: p.detach() for name, p in policy.named_parameters()}, 3)
        return await work(serving)

    return asyncio.run(run())


PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12], [5, 6, 7]]


async def ask(serving: Serving, order: list[int], **given: Any) -> dict[int, Answer]:
    """Answers by number, the requests sent in this order; each with a seed of its own."""
    tasks = {}
    for number in order:
        params = {"logprobs": True, "seed": number, **given}
        tasks[number] = asyncio.create_task(serving.generate(PROMPTS[number], params))
        await asyncio.sleep(0.01)  # some come while others are being sampled
    return {number: await task for number, task in tasks.items()}


def test_what_a_request_gets_does_not_depend_on_the_order_of_arrival(
    folder: Path, setup: Setup, policy: Decoder
) -> None:
    """Same seeds, same draws, to the last bit of each log-prob; samples of one prompt are not each other's."""
    forward = served(folder, setup, policy, lambda s: ask(s, [0, 1, 2, 3, 4]))
    backward = served(folder, setup, policy, lambda s: ask(s, [4, 2, 3, 0, 1]))
    assert forward == backward
    assert len({tuple(forward[number].tokens) for number in (0, 2, 4)}) > 1
    assert all(answer.step == 3 and answer.stopped == "completed" for answer in forward.values())
    assert all(len(answer.logprobs or ()) == len(answer.tokens) > 0 for answer in forward.values())
    without = served(folder, setup, policy, lambda s: ask(s, [0], logprobs=False))
    assert without[0].logprobs is None
    assert without[0].tokens == forward[0].tokens


def test_a_request_without_a_seed_is_keyed_by_its_number_of_its_prompt(
    folder: Path, setup: Setup, policy: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    async def unseeded(serving: Serving) -> list[list[int]]:
        return [(await serving.generate(PROMPTS[0], {})).tokens for _ in range(4)]

    first = served(folder, setup, policy, unseeded)
    assert served(folder, setup, policy, unseeded) == first
    assert len(set(map(tuple, first))) > 1
    assert "order of arrival" in caplog.text


def test_an_abort_ends_what_is_sampled_and_holds_what_comes(folder: Path, setup: Setup, policy: Decoder) -> None:
    async def work(serving: Serving) -> tuple[Answer, Answer, Answer, int]:
        running = asyncio.create_task(serving.generate(PROMPTS[0], {"seed": 1, "logprobs": True, "ignore_eos": True}))
        await asyncio.sleep(0.05)
        await serving.abort(reject=True)
        aborted = await running
        turned_away = await serving.generate(PROMPTS[0], {"seed": 1})
        await serving.abort()
        held = asyncio.create_task(serving.generate(PROMPTS[1], {"seed": 1, "max_tokens": 2, "ignore_eos": True}))
        await asyncio.sleep(0.05)
        waiting = int(not held.done())
        await serving.go_on()
        return aborted, turned_away, await held, waiting

    long = dataclasses.replace(LIMITS, response=50)
    longer = dataclasses.replace(setup, length=64, plan=dataclasses.replace(setup.plan, length=64))
    aborted, turned_away, held, waiting = served(folder, longer, policy, work, long)
    assert aborted.stopped == "aborted"
    assert len(aborted.tokens) == len(aborted.logprobs or ()) < 50
    assert (turned_away.stopped, turned_away.tokens) == ("aborted", [])
    assert waiting == 1
    assert (held.stopped, len(held.tokens)) == ("completed", 2)


class Gated:
    """A server whose turns wait in their thread until ``go_on``. ``sampled``: of each turn, how many requests it had.
    ``fails``: the first of them raises."""

    def __init__(self, serving: Serving, fails: bool = False) -> None:
        self.begun, self.go_on, self.fails = threading.Event(), threading.Event(), fails
        self.sampled: list[int] = []
        self._sample = serving._sampler
        serving._sampler = self._sampler  # type: ignore[method-assign]

    def _sampler(self, requests: list[Any], params: Any) -> Callable[[], Any]:
        def run() -> Any:
            self.sampled.append(len(requests))
            self.begun.set()
            assert self.go_on.wait(60)
            if self.fails and len(self.sampled) == 1:
                raise MantissaError("the engine broke")
            return self._sample(requests, params)()

        return run


def asked(serving: Serving, number: int, **given: Any) -> asyncio.Task[Answer]:
    return asyncio.create_task(serving.generate(PROMPTS[number], {"logprobs": True, "seed": number, **given}))


@pytest.mark.parametrize("when", ["waiting", "sampled"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_request_leaves_the_others_and_the_server_as_they_were(
    folder: Path, setup: Setup, policy: Decoder, when: str, fails: bool
) -> None:
    """Cancelled before its turn or within it, of one turn that succeeds or fails: the others get what they would get,
    draining, sleeping, new weights and an abort work, and later requests are answered."""

    async def work(serving: Serving) -> tuple[list[Any], list[int], Answer]:
        gated = Gated(serving, fails)
        tasks = [asked(serving, number) for number in (0, 1, 3)]
        if when == "waiting":
            await asyncio.sleep(0)  # they wait, and no turn has begun
        else:
            await asyncio.to_thread(gated.begun.wait, 60)
        tasks[1].cancel()
        await asyncio.sleep(0)
        gated.go_on.set()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        await asyncio.wait_for(serving.drained(), 60)
        await asyncio.wait_for(serving.release(), 60)
        await asyncio.wait_for(serving.load(setup, {n: p.detach() for n, p in policy.named_parameters()}, 4), 60)
        await asyncio.wait_for(serving.abort(), 60)
        await serving.go_on()
        return found, gated.sampled, await asyncio.wait_for(asked(serving, 1), 60)

    found, sampled, later = served(folder, setup, policy, work)
    expected = served(folder, setup, policy, lambda s: ask(s, [0, 1, 3]))
    assert isinstance(found[1], asyncio.CancelledError)
    assert sampled[0] == (2 if when == "waiting" else 3)  # what was cancelled before its turn is not sampled
    if fails:
        assert [str(found[place]) for place in (0, 2)] == ["the engine broke"] * 2
    else:
        assert [found[0], found[2]] == [expected[0], expected[3]]
    assert (later.tokens, later.step) == (expected[1].tokens, 4)


def test_a_turn_of_cancelled_requests_alone_is_left_out(folder: Path, setup: Setup, policy: Decoder) -> None:
    """Requests of other parameters have a turn of their own, and it comes."""

    async def work(serving: Serving) -> tuple[Answer, list[int]]:
        gated = Gated(serving)
        gated.go_on.set()
        first, other = asked(serving, 0, max_tokens=3), asked(serving, 1)
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.wait_for(other, 60), gated.sampled

    expected = served(folder, setup, policy, lambda s: ask(s, [1]))[1]
    assert served(folder, setup, policy, work) == (expected, [1])


@pytest.mark.parametrize("what", ["drained", "abort"])
def test_who_stops_waiting_for_the_server_stops_no_request(
    folder: Path, setup: Setup, policy: Decoder, what: str
) -> None:
    """A trainer that gives up on draining, or on an abort, has its requests answered all the same."""

    async def work(serving: Serving) -> tuple[Answer, bool]:
        gated = Gated(serving)
        task = asked(serving, 0)
        await asyncio.to_thread(gated.begun.wait, 60)
        waits = asyncio.create_task(getattr(serving, what)())
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait([waits], timeout=60)
        stopping = serving._stopping
        gated.go_on.set()
        return await asyncio.wait_for(task, 60), stopping

    expected = served(folder, setup, policy, lambda s: ask(s, [0]))[0]
    assert served(folder, setup, policy, work) == (expected, False)


def test_one_turned_away_has_no_log_prob_and_a_list_of_them_where_they_were_asked_for(
    folder: Path, setup: Setup, policy: Decoder
) -> None:
    """verl looks at the first row of a batch to know whether there are log-probs."""

    async def work(serving: Serving) -> list[Answer]:
        await serving.abort(reject=True)
        return [await serving.generate(PROMPTS[0], {"seed": 1, "logprobs": asked}) for asked in (True, False)]

    assert [answer.logprobs for answer in served(folder, setup, policy, work)] == [[], None]


def test_a_server_without_weights_says_so(folder: Path, setup: Setup, policy: Decoder) -> None:
    async def work(serving: Serving) -> None:
        await serving.release()
        await serving.generate(PROMPTS[0], {"seed": 1})

    with pytest.raises(MantissaError, match="holds no weights"):
        served(folder, setup, policy, work)


def test_a_plan_for_shorter_sequences_than_the_job_s_is_refused(folder: Path, setup: Setup, policy: Decoder) -> None:
    with pytest.raises(MantissaError, match=r"mixed_precision\.length=16: .* 28 tokens"):
        served(folder, setup, policy, lambda s: ask(s, [0]), dataclasses.replace(LIMITS, response=20))


@pytest.mark.parametrize(
    ("dtype", "quantization", "formats"),
    [("float16", None, ("fp16", "fp16")), ("bfloat16", "fp8", ("fp8", "bf16")), ("float32", None, ("fp32", "fp32"))],
)
def test_beside_a_learner_of_verl_s_own_the_formats_are_those_of_verl_s_keys(
    dtype: str, quantization: str | None, formats: tuple[str, str], folder: Path, policy: Decoder
) -> None:
    """Sampled by the native engine itself in that format, whose log-probs the server gives."""
    setup = Setup.of_keys(dtype, quantization, 14)
    asked = PrecisionPolicy.parse(dict(setup.policy))
    assert (asked.rollout, asked.logits) == formats
    (answer,) = served(folder, setup, policy, lambda serving: ask(serving, [1])).values()
    precision = resolve(asked, "cpu")
    engine = NativeEngine(
        SHAPE, rollout_kernels(precision), kv_format=precision.kv_cache.active, slots=4, max_length=14
    )
    engine.sync({name: p.detach() for name, p in policy.named_parameters()}, 1)
    seed = Serving(str(folder), LIMITS, torch.device("cpu"))._key(PROMPTS[1], 1)
    params = sampling({}, 1, LIMITS, byte_tokenizer().eos_ids)
    ((one,),) = engine.generate([Request(tuple(PROMPTS[1]), seed)], params, 1)
    assert answer.tokens == list(one.tokens)
    assert answer.logprobs == one.logp_T.tolist()
