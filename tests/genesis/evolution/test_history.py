"""What a proposal's history says, that it says nothing of its own end, and that training reads what prediction read."""

import json
import math
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mantissa.base.errors import MantissaError
from mantissa.genesis.evolution import Archive, Candidate, Evolution, EvolutionConfig, shipped
from mantissa.genesis.evolution.archive import History, changed, end_of
from mantissa.genesis.evolution.loop import promise, state_of
from mantissa.genesis.evolution.proposers import Edits, Proposal, ProposalRequest
from mantissa.genesis.worldmodel import WorldModel


def program(number: int, lines: str, passed: str, parent: int = 0, kept: bool = True) -> Candidate:
    """A program of one letter a line."""
    hits = tuple(c == "1" for c in passed)
    source = "".join(f"    {line}\n" for line in lines)
    parents = (parent,) if parent else ()
    return Candidate(
        "clamp", source, "revise", number, sum(hits) / 4, hits, "", (), kept, False, parents, number=number
    )


START = program(1, "abc", "1000")
KNOWN = [
    START,
    program(2, "aXc", "1100", 1),  # b -> X rose
    program(3, "abY", "1000", 1),  # c -> Y: as before
    program(4, "aXY", "0000", 2, kept=False),  # c -> Y fell
    program(5, "ZXc", "0111", 2),  # a -> Z rose
]


def test_a_change_is_the_lines_that_differ() -> None:
    assert changed("a\n  b\nb\n", "a\nb\n  c\n") == ({"b"}, {"c"})
    assert changed("a\n\n", "\n  a\n") == (set(), set())
    assert [end_of(child, KNOWN[child.parents[0] - 1]) for child in KNOWN[1:]] == ["rose", "same", "fell", "rose"]
    assert end_of(replace(KNOWN[2], kept=False), START) == "fell"


def test_facts_count_what_earlier_changes_did() -> None:
    found = History(KNOWN).facts(KNOWN[4], "    Z\n    X\n    Y\n    W\n")
    assert found == {
        "behind": 0, "parent_gained": 0.25, "executed": 5, "children": 0, "children_rose": 0,
        "changes_rose": 0, "changes_same": 0, "changes_fell": 0,  # c -> Y W is none of theirs
        "alike_rose": 0, "alike_same": 1, "alike_fell": 1, "new_tests": 1,  # of the third, which has Y
        "removed": 1, "added": 2, "grown": 0.1,
    }  # fmt: skip
    found = History(KNOWN).facts(START, "    a\n    b\n    Y\n")
    assert [found[f"changes_{end}"] for end in ("rose", "same", "fell")] == [0, 1, 1]
    assert (found["behind"], found["children"], found["children_rose"]) == (0.5, 2, 1)
    assert History(KNOWN).facts(START, "    Z\n    b\n    c\n")["new_tests"] == 3


def test_every_number_of_a_state_has_a_slot_of_its_own() -> None:
    facts = History([START]).facts(START, START.source)
    paths = [*(f".history.{name}" for name in facts), ".words", ".depth"]
    assert len({zlib.crc32(path.encode()) % (128 // 4) for path in paths}) == len(paths)


def test_a_model_that_reads_the_history_is_told_what_it_learnt_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state that ranked a program is the one that is stored with its end, and follows from what was known."""
    asked = set[tuple[str, tuple[str, ...]]]()
    predict_many = WorldModel.predict_many

    def listening(self: WorldModel, questions: Any) -> Any:
        asked.update((json.dumps(state, sort_keys=True), tuple(actions)) for state, actions in questions)
        return predict_many(self, questions)

    monkeypatch.setattr(WorldModel, "predict_many", listening)
    config = EvolutionConfig(
        tasks=("clamp",), executions=25, pool=12, retrain_every=2, hidden_dim=16, batch_size=8, seed=3
    )
    with Evolution(config, tmp_path) as evolution:
        evolution.run()
        known, learnt = evolution.archive.candidates(), evolution.archive.buffer.newest()
    ranked = {c.digest for c in known if c.probability == c.probability}
    assert len(ranked) >= 6
    by_digest = {c.digest: c for c in known}
    for each in learnt:
        child = by_digest[each.id.rpartition("-")[2]]
        parent = next(c for c in known if c.number == child.parents[0])
        before = History([c for c in known if c.generation < child.generation])
        assert each.initial_state["history"] == before.facts(parent, child.source)
        if child.digest in ranked:
            assert (json.dumps(each.initial_state, sort_keys=True), each.actions) in asked


def test_what_is_executed_beside_or_after_a_proposal_says_nothing() -> None:
    task = shipped()["clamp"]
    parent = replace(START, source=task.start)
    proposals = Edits().propose([ProposalRequest(task, "revise", parent, None, 8, 5)])
    before = [state_of(each, History([parent])) for each in proposals]
    rng = random.Random(0)
    for _ in range(3):  # whatever became of the generation, its states were written before
        ends = [
            Candidate("clamp", each.source, "revise", 1, rng.random(), (rng.random() < 0.5,) * 4, "", (), True, False,
                      (1,), each.actions, number=2 + n)
            for n, each in enumerate(proposals)
        ]  # fmt: skip
        assert [state_of(each, History([parent])) for each in proposals] == before
        assert state_of(proposals[0], History([parent, *ends])) != before[0]


def test_a_run_of_a_version_without_history_is_one_error(tmp_path: Path) -> None:
    config = EvolutionConfig(tasks=("clamp",), executions=2)
    archive = Archive(tmp_path / "archive.db", 10)
    archive.settle({"config": config.model_dump(mode="json")})
    archive.close()
    with pytest.raises(MantissaError, match=r"another version of mantissa.*name another folder"):
        Evolution(config, tmp_path)


def test_a_proposal_is_read_with_a_partner_as_without() -> None:
    lent = Proposal(
        ProposalRequest(shipped()["clamp"], "recombine", START, KNOWN[4], 1, 0), KNOWN[1].source, ("a",), ("a",)
    )
    assert state_of(lent, History(KNOWN))["history"]["changes_rose"] == 1


def test_a_success_above_a_weak_parent_goes_behind_one_above_the_best() -> None:
    assert promise(0.5, 0.5) == pytest.approx(5)
    assert promise(0.3, 0.75) - promise(0.3, 0.5) == pytest.approx(math.log(3))
    assert promise(0.8, 0.05) > promise(0.2, 0.5) > promise(0.2, 0.4)
    assert all(map(math.isfinite, (promise(1, 0), promise(1, 1))))
