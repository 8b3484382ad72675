"""A verl job on this machine alone: with a Ray of its own, of which nothing is left when this returns.

Ray listens on every interface, so the job gets a network of its own where the kernel gives one
(``mantissa.base.loopback``), and asks for a token in any case. Every process carries a tag in its environment, by which
it is found and ended, however the job or this command ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mantissa.base import loopback
from mantissa.base.errors import MantissaError, RankError, pip_install
from mantissa.base.readers.json import parse_json
from mantissa.launch.export import hydra_value
from mantissa.launch.rehearsal import Rehearsal

TAG = "MANTISSA_LOCAL_JOB"  # the variable by which every process of a job is found
_HOST = "127.0.0.2"  # Ray puts the machine's outward address in the place of 127.0.0.1
_LOOK_S = 0.5
_ERROR = re.compile(
    r"^(?:\(.*?\) )?(?:ray\.exceptions\.\w+: )?((?:\w+\.)*\w*(?:Error|Exception)(?:\(\w+\))?: .+)$", re.M
)
_SHOWN = {
    "critic/score/mean": "score",
    "actor/grad_norm": "grad_norm",
    "rollout_corr/k3_kl": "gap k3_kl",
    "actor/mantissa/loss_scale": "loss scale",
    "actor/mantissa/skipped": "skipped",
}


@dataclass(frozen=True)
class LocalEnd:
    """How a job ended well. ``metrics``: by step, as verl logged them. ``policy``: the last one's folder."""

    metrics: dict[int, dict[str, Any]]
    policy: Path
    seconds: float


def listens() -> list[str]:
    """What would listen beyond the loopback interface; empty where the job gets a network of its own."""
    asked = [sys.executable, "-I", loopback.__file__, sys.executable, "-I", "-c", ""]
    if subprocess.run(asked, check=False, capture_output=True).returncode == 0:
        return []
    return [
        "this kernel gives a process no network of its own, so the Ray of this launch listens on every interface of "
        "this machine, on ports that it chooses; it asks for a token that only its own processes have (Ray 2.52 and "
        "newer), and verl's own connections ask for nothing"
    ]


def resumed_from(folder: Path) -> int:
    """The step of verl's last checkpoint in ``folder``, 0 where there is none: verl itself goes on from there."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "latest_checkpointed_iteration.txt").read_text())
    return 0


def run_local(rehearsal: Rehearsal, show: Callable[[str], None], *, isolated: bool) -> LocalEnd:
    """Run the job to its end; ``show`` gets a line for each step.

    Raises ``MantissaError`` where verl is not installed here or the folder has all steps already, ``RankError`` with
    the job's own last error where it fails; and lets Ctrl-C through. In every case nothing is left running.
    """
    if importlib.util.find_spec("verl") is None:
        raise MantissaError(f"--local runs verl here, and it is not installed: {pip_install('verl')}")
    folder, first = rehearsal.folder, resumed_from(rehearsal.folder)
    if first >= rehearsal.steps:
        raise MantissaError(
            f"{folder} holds {first} steps, and steps={rehearsal.steps}: say more steps to go on, or another run_dir"
        )
    rehearsal.write_inputs()
    if first:
        show(f"going on from verl's checkpoint of step {first}")
    log, metrics = folder / "job.log", folder / f"metrics-from-{first + 1}.jsonl"
    metrics.unlink(missing_ok=True)
    begun, seen = time.monotonic(), 0
    with _job(rehearsal, log, metrics, isolated) as job:
        while job.poll() is None:
            time.sleep(_LOOK_S)
            seen = _tell(metrics, seen, show)
    _tell(metrics, seen, show)
    if job.returncode != 0:
        raise RankError(f"the job failed: {_last_error(log)}; its log: {log}")
    rows = dict(_rows(metrics))
    policy = folder / f"global_step_{rehearsal.steps}" / "actor" / "huggingface"
    return LocalEnd(rows, policy, time.monotonic() - begun)


@contextlib.contextmanager
def _job(rehearsal: Rehearsal, log: Path, metrics: Path, isolated: bool) -> Iterator[subprocess.Popen[bytes]]:
    """The job's first process; when this is left, all of them are ended."""
    tag, short = secrets.token_hex(16), tempfile.mkdtemp(prefix="mverl", dir="/tmp")  # sockets want a short path
    ray = {"_node_ip_address": _HOST, "_temp_dir": short}
    command = [sys.executable, "-P", *rehearsal.plan.arguments[1:]]
    command += [f"+ray_kwargs.ray_init.{name}={value}" for name, value in ray.items()]
    command += [f"hydra.run.dir={hydra_value(str(rehearsal.folder / 'hydra'))}"]  # else it makes outputs/ here
    if isolated:
        command = [sys.executable, "-P", loopback.__file__, *command]
    variables = {one.name: one.value for one in rehearsal.plan.environment}
    try:
        with log.open("wb") as out:
            job = subprocess.Popen(
                command,
                # What libraries leave in the temporary folder when they are killed goes with it.
                env=_environment(variables | {TAG: tag, "TMPDIR": short, "VERL_FILE_LOGGER_PATH": str(metrics)}),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            yield job
    finally:
        end_processes(tag)
        with contextlib.suppress(NameError, UnboundLocalError):
            job.wait()
        shutil.rmtree(short, ignore_errors=True)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    package = str(Path(__file__).parents[2])
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VERL_"))}
    return own | {
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **variables,
    }


def end_processes(tag: str) -> None:
    """Kill every process whose environment has the tag, until none is left: Ray's, too, which leave their sessions."""
    for _ in range(50):
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _tagged(pid, tag)]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    raise RankError(f"processes {', '.join(map(str, left))} of the job do not end; end them by hand")


def _tagged(pid: int, tag: str) -> bool:
    try:
        return f"{TAG}={tag}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _rows(metrics: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    for row in map(parse_json, lines):
        yield int(row["step"]), row["data"]


def _tell(metrics: Path, seen: int, show: Callable[[str], None]) -> int:
    """Show the rows after the first ``seen``; how many there are."""
    rows = list(_rows(metrics))
    for step, row in rows[seen:]:
        said = [f"{name} {row[key]:.3g}" for key, name in _SHOWN.items() if isinstance(row.get(key), (int, float))]
        show("  ".join([f"step {step}", *said]))
    return len(rows)


def _last_error(log: Path) -> str:
    """The last error that the log names, in one line; Ray repeats one in many words."""
    text = log.read_text(errors="replace")
    found = _ERROR.findall(text)
    ours = [line.partition("MantissaError: ")[2] for line in found if "MantissaError: " in line]
    return (ours or found or ["it names no error"])[-1].strip()[:600]
