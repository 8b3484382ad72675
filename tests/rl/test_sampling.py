"""From problems to graded completions: group order, success rates, accuracy, and seeded draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mantissa.errors import MantissaError
from mantissa.model import character_tokenizer
from mantissa.rl.assemble import Parts
from mantissa.rl.collect import Sample, Sampler, success_rates
from mantissa.rl.config import RunConfig
from mantissa.rollout import Completion
from mantissa.tasks import Grader, Message, Problem, Reward


@pytest.fixture
def parts(configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]) -> Parts:
    parts = parts_of(configure("precision=fp32", "model.fresh.initializer_range=0.2"))
    parts.sampler.engine.sync(parts.learner.weights, 0)
    return parts


def test_a_completion_depends_on_seed_problem_index_and_sample_alone(parts: Parts) -> None:
    sampler, problems = parts.sampler, parts.task.split("train", 6)
    params = sampler.params(6, 1.0)
    whole = sampler.sample(problems, 4, params, 0, 7, "test")
    again = sampler.sample(problems[:2], 3, params, 0, 7, "test")
    for number, same in enumerate(again):
        sample = whole[4 * (number // 3) + number % 3]
        assert (sample.group, sample.prompt, sample.completion.tokens) == (
            same.group, same.prompt, same.completion.tokens,
        )  # fmt: skip
        # to rounding: batches of another size go through other kernels of the matrix product
        torch.testing.assert_close(sample.completion.logp_T, same.completion.logp_T, rtol=0, atol=1e-5)
    other = sampler.sample(problems, 4, params, 0, 8, "test")
    assert [s.completion.tokens for s in other] != [s.completion.tokens for s in whole]
    assert len({s.completion.tokens for s in whole[:4]}) > 1  # the samples of one prompt are draws of their own


def test_texts_are_flat_in_group_order_without_end_tokens(parts: Parts) -> None:
    problems = parts.task.split("train", 3)
    sampled = parts.sampler.sample(problems, 2, parts.sampler.params(6, 1.0), 0, 7, "test")
    letters = parts.task.alphabet
    assert letters is not None
    for number, sample in enumerate(sampled):
        problem = problems[number // 2]
        spelled = "".join(letters[t - 2] for t in sample.completion.tokens if t >= 2)  # 0 pad, 1 eos
        assert (sample.problem, sample.group, sample.text) == (problem, number // 2, spelled)
        assert list(sample.prompt) == [letters.index(c) + 2 for c in str(problem.prompt)]


def test_success_rates_belong_to_their_own_problem() -> None:
    completion, problem = Completion((1,), torch.zeros(1), "stop", 0), Problem("p", "1=", "1", "s")
    sampled = [Sample(problem, group, (1,), completion, "") for group in (0, 0, 3, 3, 3, 3, 4)]
    verdicts = [True, False, True, False, False, False, True]
    rewards = [Reward(-1.0 if correct else 9.0, correct) for correct in verdicts]  # rates count verdicts, not rewards
    assert success_rates(sampled, rewards) == [0.5, 0.25, 1.0]


def test_accuracy_is_the_mean_over_problems_of_what_the_verifier_says(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = parts.task.split("heldout", 8)
    params = parts.sampler.params(6, 1.0)
    seen: list[bool] = []

    def verdict(pairs: list[tuple[Problem, str]]) -> list[Reward]:
        seen[:] = [len(text) % 2 == 0 for _, text in pairs]
        return [Reward(0.0, correct) for correct in seen]

    monkeypatch.setattr(parts.sampler.grader, "grade", verdict)
    accuracy = parts.sampler.accuracy(problems, 3, params, 0, 1, "test")
    assert len(seen) == 24
    assert accuracy == pytest.approx(sum(seen) / 24)
    assert 0 < accuracy < 1


def test_greedy_accuracy_does_not_depend_on_the_seed(parts: Parts) -> None:
    problems = parts.task.split("train", 4)
    greedy = parts.sampler.params(6, 0.0)
    first, second = (parts.sampler.sample(problems, 1, greedy, 0, seed) for seed in (1, 2))
    assert [s.text for s in first] == [s.text for s in second]


def test_a_prompt_that_cannot_be_written_names_its_problem(parts: Parts) -> None:
    sampler = Sampler(parts.sampler.engine, character_tokenizer("0123"), Grader(parts.task.verifier))
    with pytest.raises(MantissaError, match="problem p-7: tokenizer: '19=' holds '9='"):
        sampler.encode(Problem("p-7", "19=", "1", "s"))
    with pytest.raises(MantissaError, match=r"problem p-8: .*no chat template"):
        sampler.encode(Problem("p-8", (Message("user", "12"),), "1", "s"))
