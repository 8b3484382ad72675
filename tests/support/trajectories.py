"""Trajectories whose outcome follows from the action, by a rule that every task shares."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mantissa.genesis.worldmodel import Trajectory

GOOD, BAD = ("fix the bound", "add a guard", "sort the input"), ("delete the return", "rename a call", "drop the loop")


def planted(count: int, seed: int = 0, tasks: int = 8) -> list[Trajectory]:
    """Nine in ten of ``GOOD`` succeed, one in ten of ``BAD``; a success gains 0.3, a failure loses 0.2."""
    rng = random.Random(seed)

    def one(number: int) -> Trajectory:
        good = rng.random() < 0.5
        success = rng.random() < (0.9 if good else 0.1)
        score = rng.uniform(0.3, 0.7)
        return Trajectory(
            initial_state={"metrics": {"overall_score": score}, "text": f"task {number % tasks}"},
            actions=(rng.choice(GOOD + BAD), rng.choice(GOOD if good else BAD)),
            final_outcome="success" if success else "failure",
            final_reward=score + (0.3 if success else -0.2),
            task=f"task-{number % tasks}",
            agent=f"agent-{number % 3}",
            id=f"{seed}-{number}",
            created=1000.0 + number,
        )

    return [one(number) for number in range(count)]


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A real server of its own, on a socket in ``folder``; its URL."""
    path = folder / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--dir", str(folder), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while not path.exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        yield f"unix://{path}"
    finally:
        process.terminate()
        process.wait()
