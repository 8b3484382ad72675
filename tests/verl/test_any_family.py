"""The plugin's parts for a family that only transformers knows, without verl: the setup's way, and a server of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.model import byte_tokenizer
from mantissa.precision import PrecisionPolicy
from mantissa.rl.engines import as_policy
from mantissa.rl.experience import Sequences
from mantissa.rl.score import forward_transformers
from mantissa.rollout.transformers import TransformersPolicy, load_transformers
from mantissa.verl.options import EngineOptions
from mantissa.verl.refusals import refuse
from mantissa.verl.serving import Answer, Limits, Serving
from mantissa.verl.wire import TENSOR, Setup

LIMITS = Limits(prompt=8, response=6, slots=4, seed=42)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [5, 6, 7]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose embedding is its head; and one with experts and sinks."""
    path = tmp_path_factory.mktemp("models")
    for name in ("gemma3_text", "gpt_oss"):
        families.make(name, vocab_size=258, eos_token_id=257, pad_token_id=256).save_pretrained(path / name)
        byte_tokenizer().save(path / name)
    return path


@pytest.fixture
def folder(root: Path) -> Path:
    return root / "gemma3_text"


def learner(folder: Path, **precision: str) -> tuple[TransformersPolicy, Setup]:
    """A policy of other weights than the folder's, as after an update; and what it tells a server."""
    wanted = PrecisionPolicy.parse(precision)
    model = load_transformers(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    policy = as_policy(wanted, model, CPU, 16)[0]
    plans = None if policy.adopted is None else policy.adopted.plans
    return policy, Setup(precision, None, torch.get_num_threads(), 16, plans)


def weights_of(policy: TransformersPolicy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def served(
    folder: Path, setup: Setup, weights: dict[str, Tensor], work: Callable[[Serving], Coroutine[Any, Any, Any]]
) -> Any:  # fmt: skip
    """What ``work`` gives with a server that holds these weights."""

    async def run() -> Any:
        serving = Serving(str(folder), LIMITS, CPU)
        await serving.load(setup, weights, 3)
        return await work(serving)

    return asyncio.run(run())


async def ask(serving: Serving, order: tuple[int, ...] = (0, 1, 2, 3)) -> dict[int, Answer]:
    """Answers by number; some come while others are being sampled."""
    tasks = {}
    for number in order:
        tasks[number] = asyncio.create_task(serving.generate(PROMPTS[number], {"logprobs": True, "seed": number}))
        await asyncio.sleep(0.01)
    return {number: await task for number, task in tasks.items()}


def sampled(answers: dict[int, Answer]) -> list[float]:
    """The server's log-probs, in the order of the answers' numbers."""
    return [logp for number in sorted(answers) for logp in answers[number].logprobs or ()]


def scored(policy: TransformersPolicy, answers: dict[int, Answer]) -> list[float]:
    """The learner's log-probs, all answers in one batch."""
    pairs = [(PROMPTS[number], answers[number].tokens) for number in sorted(answers)]
    width = max(len(prompt) + len(tokens) for prompt, tokens in pairs)
    tokens_BT = torch.tensor([[*p, *t, *[0] * (width - len(p) - len(t))] for p, t in pairs])
    prompt_B, length_B = (torch.tensor(x) for x in zip(*((len(p), len(p) + len(t)) for p, t in pairs), strict=True))
    count_B = length_B - prompt_B
    rows = Sequences(tokens_BT, prompt_B, length_B, torch.arange(int(count_B.max())) < count_B.unsqueeze(1))
    with torch.no_grad():
        return forward_transformers(policy, rows, 1.0).logp_N.tolist()


@pytest.mark.parametrize(("family", "name"), [("gemma3_text", "bf16"), ("gpt_oss", "fp32")])
def test_a_server_s_log_probs_are_the_learner_s_to_the_bit(root: Path, family: str, name: str) -> None:
    folder = root / family
    policy, setup = learner(folder, train=name, rollout=name, kernels="exact")
    weights = weights_of(policy)
    answers = served(folder, setup, weights, ask)
    assert sampled(answers) == scored(policy, answers)
    assert served(folder, setup, weights, lambda s: ask(s, (3, 2, 1, 0))) == answers
    assert all(answer.step == 3 and answer.stopped == "completed" for answer in answers.values())
    read = dict(load_transformers(folder).named_parameters())
    assert served(folder, setup, {n: p.detach() for n, p in read.items()}, ask) != answers  # the weights are those sent
    assert answers[0] != answers[3]


def test_the_plans_of_an_adopted_model_travel(folder: Path) -> None:
    _, setup = learner(folder, train="bf16", rollout="bf16", kernels="exact")
    assert setup.plans
    assert Setup.from_json(setup.to_json()) == setup
    assert Setup.take_from({TENSOR: setup.to_tensor()}) == setup


def test_by_transformers_own_kernels_log_probs_are_near(folder: Path) -> None:
    policy, setup = learner(folder, train="fp32", rollout="bf16")
    assert Setup.from_json(setup.to_json()) == setup
    evidence = ""

    async def work(serving: Serving) -> dict[int, Answer]:
        nonlocal evidence
        evidence = serving.evidence
        return await ask(serving)

    answers = served(folder, setup, weights_of(policy), work)
    theirs, mine = sampled(answers), scored(policy, answers)
    assert theirs != mine
    assert max(abs(a - b) for a, b in zip(theirs, mine, strict=True)) < 0.1
    assert "on bf16's grid" in evidence


def test_weights_under_two_names_and_those_that_are_missing(folder: Path) -> None:
    """verl's own engines send a state dict: a table that is tied under both its names."""
    policy, setup = learner(folder, train="fp32")
    state = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    one, other = (served(folder, setup, weights, ask) for weights in (state, weights_of(policy)))
    for number, answer in one.items():  # torch's own sums depend on which requests came together
        assert answer.tokens == other[number].tokens
        assert answer.logprobs == pytest.approx(other[number].logprobs, abs=1e-5)
    state.popitem()
    first = next(iter(state))
    state.pop(first)
    with pytest.raises(MantissaError, match="weights of the policy"):
        served(folder, setup, state, ask)


def test_abort_ends_requests_with_what_they_have_and_sleeping_and_waking_changes_nothing(folder: Path) -> None:
    policy, setup = learner(folder, train="bf16", rollout="bf16", kernels="exact")
    weights = weights_of(policy)

    async def work(serving: Serving) -> tuple[Answer, dict[int, Answer]]:
        engine: Any = serving._engine
        drawn, at_second = engine._draw, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(rows: Any, *rest: Any) -> Any:
            if len(rows[0].tokens) == 2:
                loop.call_soon_threadsafe(at_second.set)
                while not serving._stopping:
                    pass
            return drawn(rows, *rest)

        engine._draw = slow
        task = asyncio.create_task(serving.generate(PROMPTS[0], {"logprobs": True, "seed": 0}))
        await at_second.wait()
        await serving.abort()
        engine._draw = drawn
        await serving.go_on()
        await serving.release()
        await serving.load(setup, weights, 4)
        return await task, await ask(serving)

    aborted, after = served(folder, setup, weights, work)
    whole = served(folder, setup, weights, ask)
    assert aborted.stopped == "aborted"
    assert aborted.tokens == whole[0].tokens[:3]
    assert aborted.logprobs == whole[0].logprobs[:3]
    assert {n: answer.tokens for n, answer in after.items()} == {n: answer.tokens for n, answer in whole.items()}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"flowrl": {}}, "whose hidden states are not told"),
        ({"precision": {"train": "bf16", "kernels": "exact", "logits": "bf16"}}, "its head too"),
        ({"precision": {"train": "bf16", "kv_cache": "bf16"}}, "its cache too"),
        ({"rows": 64}, "proven for any number"),
    ],
)
def test_what_such_a_model_does_not_have_is_refused(options: dict[str, Any], said: str) -> None:
    given = EngineOptions.of(options)
    with pytest.raises(MantissaError, match=said):
        refuse("actor.strategy=mantissa", given.by_transformers(given.policy("float32"), "no such family"))
