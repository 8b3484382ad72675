"""SIGKILL at random instants of a verl job on two Ray nodes: ``make test-verl-kills``; ``SEED=N`` draws others.

    PYTHONPATH=src:tests/support:benchmarks python tests/verl_kills.py [--seed N] [--kills K] [--victims ...] [--record]

A job with our learner and engine, one rank on each node, is first left alone. Then the same job is begun elsewhere and
killed over and over, K times each: a learner's worker, the whole second node, and the trainer, in turn (or of
``--victims``). After each kill the job is given again, and resumes from verl's checkpoint; it is killed at a random
instant after its next step was logged. Every step's metrics must be the undisturbed job's to the last bit (but times,
memory and throughput), and each kill must have ended the job within ``PATIENCE_S``. A row a kill, as soon as the job
that was resumed after it has ended, so that a run that is cut short is not lost; exit code 1 where it does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from verl_job import ACTOR, ROLLOUT, JobError, run_job
from verl_nodes import Nodes

PATIENCE_S = 120.0
OURS = (
    f"{ACTOR}.strategy=mantissa",
    f"+{ACTOR}.fsdp_config.mixed_precision={{precision:{{train:fp16,rollout:fp16,kernels:exact}},length:32}}",
    f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra]",
    "trainer.max_actor_ckpt_to_keep=2",
    "trainer.v1.sampler.custom_sampler.path=pkg://mantissa.verl.replay",
    "trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer",
    f"{ROLLOUT}.n=2",
)
VICTIMS = {
    "worker": "WorkerDict",
    "trainer": "TaskRunner",
    "node": "",
    "server": "Server",
    "storage": "SimpleStorageUnit",
}
TIMED = ("timing", "perf", "actor/perf", "actor/mfu")


def rows_of(folder: Path) -> dict[int, dict[str, Any]]:
    """By step, what a job's logger wrote last, less what the clock says."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("metrics-*.jsonl"), key=lambda each: each.stat().st_mtime_ns):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                row = json.loads(line)
                found[row["step"]] = {k: v for k, v in row["data"].items() if not k.startswith(TIMED)}
    return found


def job(folder: Path, nodes: Nodes, steps: int) -> None:
    run_job(
        folder, *OURS, steps=steps, ranks=2, rollout="mantissa", external_lib="mantissa.verl.plugin",
        address=nodes.address, environment=nodes.token, seconds=900 + 30 * steps,
    )  # fmt: skip


class Killer(threading.Thread):
    """Kills one part of the job that is running, ``after`` seconds after its next step was logged."""

    def __init__(self, folder: Path, nodes: Nodes, victim: str, after: float) -> None:
        super().__init__(daemon=True)
        self.folder, self.nodes, self.victim, self.after = folder, nodes, victim, after
        self.begun, self.killed_at, self.over = max(rows_of(folder), default=0), 0.0, threading.Event()

    def run(self) -> None:
        while max(rows_of(self.folder), default=0) <= self.begun:
            if self.over.wait(0.2):
                return
        time.sleep(self.after)
        if self.victim == "node":
            self.nodes.switch_off(self.nodes.other)
        else:
            found = self.nodes.processes(VICTIMS[self.victim])
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(found), signal.SIGKILL)
        self.killed_at = time.monotonic()


def killed(folder: Path, nodes: Nodes, victim: str, after: float, steps: int) -> float | None:
    """Give the job, and kill: seconds until it ended. None where it was not killed in time."""
    killer = Killer(folder, nodes, victim, after)
    killer.start()
    try:
        job(folder, nodes, steps)
    except JobError:
        ended = time.monotonic()
    else:
        ended = 0.0
    killer.over.set()
    killer.join()
    if victim == "node" and killer.killed_at:
        nodes.start_other()
    return ended - killer.killed_at if ended and killer.killed_at else None


def compared(place: Path) -> tuple[int, list[int]]:
    """How many steps the killed job has logged, and those of them that are not the undisturbed job's."""
    expected, found = rows_of(place / "undisturbed"), rows_of(place / "killed")
    return len(found), [step for step in found if found[step] != expected.get(step)]


def resumed(kills: list[dict[str, Any]], place: Path, record: bool) -> None:
    """Complete the last kill's row by what was logged since, and append it to results/verl_kills.jsonl."""
    if not kills:
        return
    steps, wrong = compared(place)
    kills[-1] |= {"steps": steps, "unlike": wrong}
    if record:
        from rows import append

        append("verl_kills.jsonl", [kills[-1]], "cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--victims", nargs="*", default=["worker", "node", "trainer"], choices=VICTIMS)
    parser.add_argument("--record", action="store_true", help="append rows to results/verl_kills.jsonl")
    given = parser.parse_args()
    draw, nodes = random.Random(given.seed), Nodes()
    order = [victim for _ in range(given.kills) for victim in draw.sample(given.victims, len(given.victims))]
    steps = 2 * len(order) + 2  # a kill comes one or two steps after the one before
    place = Path(tempfile.mkdtemp(prefix="verl-kills-"))
    print(f"seed {given.seed}: {len(order)} kills of a job of {steps} steps, in {place}", flush=True)
    kills: list[dict[str, Any]] = []
    try:
        begun = time.monotonic()
        job(place / "undisturbed", nodes, steps)
        print(f"undisturbed: {time.monotonic() - begun:.0f} s", flush=True)
        for victim in order:
            took = killed(place / "killed", nodes, victim, draw.uniform(0, 4), steps)
            if took is None:
                continue
            resumed(kills, place, given.record)
            kills.append({"benchmark": "verl_kills", "seed": given.seed, "victim": victim, "ended_s": took})
            at = max(rows_of(place / "killed"))
            print(f"{victim:<8} killed after step {at}; the job ended {took:.0f} s later", flush=True)
        job(place / "killed", nodes, steps)
        resumed(kills, place, given.record)
    finally:
        nodes.close()
    found, wrong = compared(place)
    longest = max((row["ended_s"] for row in kills), default=0.0)
    print(
        f"{dict(Counter(row['victim'] for row in kills))}; {found} steps, {len(wrong)} of them unlike the undisturbed "
        f"job's {wrong[:5]}; a kill ended the job within {longest:.0f} s"
    )
    unlike = any(row["unlike"] for row in kills)
    return int(bool(wrong) or unlike or longest > PATIENCE_S or found != steps)


if __name__ == "__main__":
    sys.exit(main())
