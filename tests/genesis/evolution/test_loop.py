"""The loop: it improves, repeats itself, resumes what was killed, and says what came of it."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evolution_references import REFERENCES
from html_page import Page
from mantissa.base.errors import MantissaError
from mantissa.genesis.evolution import Archive, Candidate, Evolution, EvolutionConfig, Task, parent_weights, shipped
from mantissa.genesis.evolution.archive import best_of, draw_parent, partner_of
from mantissa.genesis.evolution.compare import compare_rankings, configured, curve, profiles
from mantissa.genesis.evolution.edits import normal
from mantissa.genesis.evolution.page import predicted, write_comparison, write_page
from mantissa.genesis.evolution.proposers import Proposal, ProposalRequest

QUICK: dict[str, Any] = {
    "tasks": ("clamp", "flatten"), "executions": 24, "run": 6, "pool": 12, "retrain_every": 2, "hidden_dim": 16,
    "batch_size": 16, "seed": 3,
}  # fmt: skip


def candidate(
    number: int, score: float, parents: tuple[int, ...] = (), kept: bool = True, passed: str = ""
) -> Candidate:
    hits = tuple(c == "1" for c in passed)
    return Candidate("t", str(number), "revise", 1, score, hits, "", (), kept, False, parents, number=number)


def test_parents_are_drawn_as_published() -> None:
    known = [candidate(1, 0.5), candidate(2, 0.9, (1,)), candidate(3, 0.2, (1, 2)), candidate(4, 1.0, kept=False)]
    expected = [0.5 / 3, 1 / (1 + math.exp(-4)), 1 / (1 + math.exp(3)), 0]
    assert parent_weights(known) == pytest.approx(expected)
    rng = random.Random(0)
    drawn = [draw_parent(known, rng).number for _ in range(4000)]
    for each, weight in zip(known, expected, strict=True):
        assert drawn.count(each.number) / 4000 == pytest.approx(weight / sum(expected), abs=0.03)


def test_a_partner_passes_what_the_parent_fails_and_the_reverse() -> None:
    known = [candidate(n, 0.5, passed=p) for n, p in enumerate(("1100", "1000", "1110", "0011", "0111"))]
    rng = random.Random(0)
    assert {partner_of(known[0], known, rng).number for _ in range(30)} == {3, 4}  # type: ignore[union-attr]
    assert partner_of(known[2], known[:3], rng) is None
    assert best_of(known).number == 0


def shown(path: Path) -> str:
    page = Page(path.read_text())
    page.assert_self_contained(path.read_text())
    return page.text


def fingerprint(folder: Path) -> list[tuple[Any, ...]]:
    archive = Archive(folder / "archive.db", 10_000)
    found = [(c.number, c.source, c.score, c.parents, c.actions, repr(c.probability)) for c in archive.candidates()]
    learnt = [(t.id, t.actions, t.final_reward) for t in archive.buffer.newest()]
    rows = archive.generations()
    archive.close()
    return [*found, *learnt, *(tuple(row.values()) for row in rows)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("evolve")
    with Evolution(EvolutionConfig(**QUICK), folder) as evolution:
        results = evolution.run()
        write_page(folder, evolution.config, results, evolution.archive)
    return folder, results


def test_results_count_what_the_archive_holds(finished: tuple[Path, list[Any]]) -> None:
    """Of each task: its programs, the generations that made them, and the first that reached the target."""
    folder, results = finished
    archive = Archive(folder / "archive.db", 10_000)
    made = {r.task: [row["generation"] for row in archive.generations() if row["task"] == r.task] for r in results}
    known = {r.task: archive.candidates(r.task) for r in results}
    archive.close()
    assert max(map(len, made.values())) > 2
    for each in results:
        assert each.generations == max(made[each.task])
        assert each.executions == len(known[each.task])
        assert (each.start, each.best) == (known[each.task][0].score, max(c.score for c in known[each.task]))


def test_a_run_improves_and_spends_what_it_may(finished: tuple[Path, list[Any]]) -> None:
    folder, results = finished
    assert [r.task for r in results] == ["clamp", "flatten"]
    assert all(r.best >= r.start for r in results)
    assert any(r.best > r.start for r in results)
    assert all(r.executions == 24 or r.best == 1 for r in results)
    archive = Archive(folder / "archive.db", 10_000)
    known = archive.candidates()
    assert len({(c.task, c.source) for c in known}) == len(known)
    by_number = {c.number: c for c in known}
    assert all(by_number[p].kept and p < c.number for c in known for p in c.parents)
    assert sum(math.isfinite(c.probability) for c in known) >= 6  # the world model chose some
    for each in archive.buffer.newest():
        child = next(c for c in known if c.digest == each.id.rpartition("-")[2])
        parent = by_number[child.parents[0]]
        assert each.final_reward == child.score
        assert each.initial_state["metrics"]["overall_score"] == parent.score
        assert (each.final_outcome == "success") == (child.score > parent.score)
        assert "source" not in each.initial_state
    archive.close()


def test_the_page_says_what_the_archive_holds(finished: tuple[Path, list[Any]]) -> None:
    folder, results = finished
    text = shown(folder / "evolution.html")
    for each in results:
        assert f"{each.held_out:.2f}" in text
    assert f"{sum(r.executions for r in results)}" in text
    assert "def clamp" in text


@pytest.mark.variants
def test_killed_at_any_instant_it_goes_on_with_the_same_programs(
    finished: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    code = (
        "import sys, json\nfrom pathlib import Path\n"
        "from mantissa.genesis.evolution import Evolution, EvolutionConfig\n"
        "with Evolution(EvolutionConfig(**json.loads(sys.argv[2])), sys.argv[1], progress=lambda line: print(line, "
        "flush=True)) as evolution:\n    evolution.run()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), json.dumps(QUICK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _, _line in zip(range(5), process.stdout, strict=False):
            pass
        os.kill(process.pid, signal.SIGKILL)
    assert len(fingerprint(tmp_path)) < len(fingerprint(finished[0]))
    with Evolution(EvolutionConfig(**QUICK), tmp_path) as evolution:
        assert evolution.run() == finished[1]
    assert fingerprint(tmp_path) == fingerprint(finished[0])


def test_another_configuration_does_not_go_on_with_a_run(finished: tuple[Path, list[Any]]) -> None:
    with pytest.raises(MantissaError, match=r"another run, seed: give the same"):
        Evolution(EvolutionConfig(**(QUICK | {"seed": 4, "run": 2})), finished[0])
    with pytest.raises(MantissaError, match="unknown setting 'colour'"):
        EvolutionConfig(colour="red")
    with pytest.raises(MantissaError, match="needs a model"):
        Evolution(EvolutionConfig(tasks=("clamp",), proposer="policy"), finished[0].parent / "policy")


class Scripted:
    """A proposer that gives these programs, whatever is asked."""

    def __init__(self, *sources: str) -> None:
        self.sources, self.requests = sources, list[ProposalRequest]()

    def propose(self, requests: list[ProposalRequest]) -> list[Proposal]:
        self.requests += requests
        return [Proposal(requests[0], normal(each) or each, ("scripted",), ("scripted",)) for each in self.sources]


def table_of(task: Task) -> str:
    pairs = ", ".join(f"({tuple(arguments)!r}, {value!r})" for arguments, value in task.development)
    return f"def {task.name}(*a):\n    return dict([{pairs}])[a]\n"


def test_a_cheater_earns_nothing_and_the_right_program_ends_it(tmp_path: Path) -> None:
    config = EvolutionConfig(**(QUICK | {"tasks": ("clamp",), "rank": "random", "generations": 3}))
    task = shipped()["clamp"]
    scripted = Scripted(table_of(task), "def clamp(x, low, high):\n    return 1 +")
    with Evolution(config, tmp_path / "cheat", scripted) as evolution:  # type: ignore[arg-type]
        (result,) = evolution.run()
        assert (result.cheats, result.best, result.solved_at) == (1, 0.25, None)
        assert [c.kept for c in evolution.archive.candidates()] == [True, False, False]
    assert all(r.parent.score == 0.25 and r.parent.kept for r in scripted.requests)
    with Evolution(config, tmp_path / "right", Scripted(REFERENCES["clamp"])) as evolution:  # type: ignore[arg-type]
        (result,) = evolution.run()
        assert (result.best, result.held_out, result.solved_at, result.generations) == (1, 1, 2, 1)


def test_a_start_that_does_not_run_is_one_error(tmp_path: Path) -> None:
    tests = "development: [[[1], 1]], held_out: [[[2], 2]], canary: [[[3], 3]]"
    (tmp_path / "tasks.yaml").write_text(f"same: {{text: t, start: 'while 1: x = 1', {tests}}}")
    config = EvolutionConfig(tasks_file=str(tmp_path / "tasks.yaml"), timeout_s=0.2)
    with Evolution(config, tmp_path / "run") as evolution, pytest.raises(MantissaError, match="start does not run"):
        evolution.run()


def test_the_comparison_pairs_by_seed(tmp_path: Path) -> None:
    config = EvolutionConfig(**(QUICK | {"tasks": ("flatten",), "executions": 12}))
    found = compare_rankings(config, tmp_path, 2)
    assert compare_rankings(config, tmp_path, 2).rows == found.rows  # what is there is read again
    assert found.curves["world"].shape == (2, 12)
    assert found.area.value == pytest.approx(found.curves["world"].mean() - found.curves["random"].mean())
    assert found.verdict in shown(write_comparison(tmp_path, config, found))
    known = [candidate(n, s) for n, s in enumerate((0.2, 0.1, 0.6))]
    assert curve(known, 5).tolist() == [0.2, 0.2, 0.6, 0.6, 0.6]
    ranked = [
        candidate(1, 0.5),
        Candidate("t", "x", "revise", 1, 0.7, (), "", (), True, False, (1,), (), 0.3, number=2),
    ]
    assert predicted([ranked]) == [(0.3, 1.0)]


@pytest.mark.parametrize(("word", "wanted"), [(None, "fp32"), ("true", "fp16"), ("false", "fp32")])
def test_the_switch_of_the_environment_chooses_the_world_model_s_precision(
    word: str | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENABLE_FP16_TRAINING", raising=False)
    if word is not None:
        monkeypatch.setenv("ENABLE_FP16_TRAINING", word)
    with Evolution(EvolutionConfig(tasks=("clamp",)), tmp_path / "run") as evolution:
        assert evolution.world is not None
        assert evolution.world.trainer.precision.active.name == wanted
    assert EvolutionConfig(precision="bf16").precision == "bf16"


def test_profiles_are_fifteen_whole_configurations() -> None:
    assert len(profiles()) == 15
    for name in profiles():
        config = configured(name, {"seed": 1})
        assert config.seed == 1
        assert set(config.tasks) <= set(shipped())
    with pytest.raises(MantissaError, match="did you mean 'qa'"):
        configured("qaa", {})
