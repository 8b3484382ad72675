"""Batches as tensors: every token, mask and log-prob where a naive loop over single sequences finds it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiences import experience_of
from mantissa.rl.experience import Sequences
from mantissa.rollout import Completion

CPU = torch.device("cpu")
TOKENS = st.lists(st.integers(1, 99), min_size=1, max_size=7)
PAIRS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6)


@settings(deadline=None)
@given(PAIRS)
def test_response_tokens_are_those_of_a_loop(pairs: list[tuple[list[int], list[int]]]) -> None:
    sequences = Sequences.build([p for p, _ in pairs], [r for _, r in pairs], CPU)
    width = sequences.tokens_BT.shape[1]
    expected = [
        (row * width + len(prompt) + j - 1, token)  # the position that predicts response token j
        for row, (prompt, response) in enumerate(pairs)
        for j, token in enumerate(response)
    ]
    position_N, token_N = sequences.response_tokens()
    assert list(zip(position_N.tolist(), token_N.tolist(), strict=True)) == expected
    for row, (prompt, response) in enumerate(pairs):
        whole = [*prompt, *response]
        assert sequences.tokens_BT[row].tolist() == whole + [0] * (width - len(whole))
        assert sequences.length_B[row] == len(whole)
        assert sequences.mask_BR[row].tolist() == [j < len(response) for j in range(sequences.mask_BR.shape[1])]


@settings(deadline=None)
@given(PAIRS, st.data())
def test_selected_rows_are_what_building_them_alone_gives(
    pairs: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=6))
    sequences = Sequences.build([p for p, _ in pairs], [r for _, r in pairs], CPU)
    alone = Sequences.build([pairs[i][0] for i in rows], [pairs[i][1] for i in rows], CPU)
    selected = sequences.select(torch.tensor(rows))
    for name in ("tokens_BT", "prompt_length_B", "length_B", "mask_BR"):
        assert torch.equal(getattr(selected, name), getattr(alone, name)), name


@settings(deadline=None)
@given(PAIRS, st.integers(1, 40))
def test_micro_batches_partition_the_rows_within_the_budget(
    pairs: list[tuple[list[int], list[int]]], budget: int
) -> None:
    sequences = Sequences.build([p for p, _ in pairs], [r for _, r in pairs], CPU)
    rows = torch.arange(len(pairs)).flip(0)
    parts = sequences.micro_batches(rows, budget)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(pairs)))
    for part in parts:
        padded = len(part) * int(sequences.length_B[part].max())
        assert padded <= budget or len(part) == 1
    lengths = [int(sequences.length_B[row]) for part in parts for row in part.tolist()]
    assert lengths == sorted(lengths, reverse=True)


def test_groups_are_flattened_in_order_with_their_own_log_probs() -> None:
    prompts = [[5, 6, 7], [8]]
    groups = [
        [Completion((1, 2), torch.tensor([-0.1, -0.2]), "stop", 3), Completion((9,), torch.tensor([-0.3]), "stop", 3)],
        [Completion((4, 4, 4), torch.tensor([-1.0, -2.0, -3.0]), "length", 3)],
    ]
    experience = experience_of(prompts, groups, [1.0, 0.0, 0.5])
    assert experience.version_B.tolist() == [3, 3, 3]
    assert experience.tokens_BT.tolist() == [[5, 6, 7, 1, 2], [5, 6, 7, 9, 0], [8, 4, 4, 4, 0]]
    assert experience.group_B.tolist() == [0, 0, 1]
    assert experience.reward_B.tolist() == [1.0, 0.0, 0.5]
    expected = torch.tensor([[-0.1, -0.2, 0.0], [-0.3, 0.0, 0.0], [-1.0, -2.0, -3.0]])
    assert torch.equal(experience.rollout_logp_BR, expected)
    assert experience.old_logp_BR is None
    scored = experience.with_learner(expected - 1, expected.abs())
    assert scored.old_logp_BR is not None
    assert torch.equal(scored.old_logp_BR, expected - 1)
    assert scored.group_B is experience.group_B
