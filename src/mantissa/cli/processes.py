"""``mantissa train`` on several processes: starting them, and ending with one line whatever becomes of them.

With ``nproc=4`` the command starts itself four times, watched by torch's elastic multiprocessing (what ``torchrun``
watches its own with), and waits. A rank that fails takes the run down: the launcher stops the others. Which rank is to
blame is decided here, for all of them fail, most only because another one did: first one that a signal killed, then one
that says what was wrong, and last those that lost their connection.

Ranks find each other, and say what was wrong, through files in a folder that only this user can open, and that goes
when the run ends, however it does (but for a SIGKILL of this process). Torch's own rendezvous is not used: it listens
on every interface, and unpickles what anybody puts there.

Under ``torchrun`` itself a rank prints its own line, and torchrun its summary.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mantissa.base.environ import LAUNCHER, STORE, threads_each
from mantissa.base.errors import MantissaError, RankError, StoppedError, say

_LOST = 3  # exit code of a rank that lost another
_USER, _FAILED = 2, 1
RESUME = "mantissa train --resume"


def launch(arguments: Sequence[str], nproc: int, run_dir: str) -> None:
    """Run ``mantissa`` with these arguments in ``nproc`` processes, to the end; ``run_dir`` is what they write."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it tells of every process
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="mantissa-ranks-", ignore_cleanup_errors=True) as folder:
        common = {
            LAUNCHER: str(os.getpid()),
            STORE: f"{folder}/store",
            "OMP_NUM_THREADS": str(threads_each(nproc)),
            "TMPDIR": folder,  # a rank that is killed cannot delete what it has there
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
        }
        environments = {i: common | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(nproc)}
        commands = dict.fromkeys(environments, ("-P", "-m", "mantissa", *arguments))
        ranks = None
        try:
            ranks = start_processes("ranks", sys.executable, commands, environments, DefaultLogsSpecs(folder))
            result = ranks.wait(period=0.1)
        except (SignalException, KeyboardInterrupt) as stopped:
            signum = getattr(stopped, "sigval", signal.SIGINT)
            if ranks is not None:
                ranks.close(signum)
            how = "interrupted" if signum == signal.SIGINT else f"stopped by {signum.name}"
            raise StoppedError(f"{how}{go_on(run_dir)}") from None
        finally:
            if ranks is not None:
                ranks.close()
            _show_cursor()
        if result is not None and result.is_failed():
            for failure in result.failures.values():  # what they had started, which the launcher does not look for
                with suppress(OSError):
                    os.killpg(failure.pid, signal.SIGKILL)
            raise blame(result.failures, run_dir)


def blame(
    failures: Mapping[int, Any], run_dir: str, *, hosts: Mapping[int, str] | None = None, resume: str = RESUME
) -> MantissaError:
    """The error of the rank that failed by itself. ``failures``: torch's ``ProcessFailure``, or a node's, by rank.

    ``hosts``: the machine of each rank, where there are several; ``resume``: the command that continues the run.
    """

    def order(item: tuple[int, Any]) -> tuple[int, int]:
        rank, failure = item
        killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM  # that is how the launcher stops them
        return (0 if killed else 2 if failure.exitcode in (_LOST, -signal.SIGTERM) else 1), rank

    rank, failure = min(failures.items(), key=order)
    if failure.exitcode == _USER:
        return MantissaError(failure.message)
    if failure.exitcode == StoppedError.exit_code:
        return StoppedError(f"interrupted{go_on(run_dir, resume)}")
    if failure.exitcode < 0:
        what = f"was killed by {signal.Signals(-failure.exitcode).name}"
        if failure.exitcode == -signal.SIGKILL:
            what += " (as the system does where memory runs out)"
    elif failure.exitcode == _LOST:
        what = f"lost another one: {failure.message}"
    else:
        what = f"failed with exit code {failure.exitcode}; what it printed stands above"
    where = f" on {hosts[rank]}" if hosts else ""
    ended = f"process {rank} (pid {failure.pid}{where}) {what}; the others were stopped"
    return RankError(ended + go_on(run_dir, resume))


def go_on(run_dir: str, resume: str = RESUME) -> str:
    """The end of a message that a run is over: the command that continues it, where there is something to continue."""
    if not (Path(run_dir) / "config.yaml").is_file():
        return "; nothing was begun that needs to be resumed"
    return f"; continue with: {resume} {shlex.quote(run_dir)}"


@contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM is Ctrl-C within: what was started elsewhere is ended too. Ray's own handler would leave at once."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def as_rank() -> Iterator[None]:
    """Around the work of one rank: however it ends, this process ends here, with an exit code that ``blame`` knows.

    Python's own exit is not taken: gloo's threads abort it now and then.
    """
    code = _FAILED
    try:
        yield
        code = 0
    except MantissaError as error:
        code = error.exit_code
        _tell(str(error), code)
    except KeyboardInterrupt:
        code = StoppedError.exit_code
    except RuntimeError as error:
        if not _connection_lost(error):
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            code = _LOST
            _tell(" ".join(str(error).split()).partition(". This may indicate")[0], code)
    except Exception as error:  # noqa: BLE001 - printed whole; then this process must end, and not by unwinding
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _tell(message: str, code: int) -> None:
    """Leave the reason where the launcher looks for it; and print it where the launcher is not ours."""
    message = " ".join(message.split())
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message, "timestamp": str(int(time.time()))}))
    if LAUNCHER not in os.environ:
        say(f"mantissa: error: rank {os.environ.get('RANK')}: {message}", err=True)


def _connection_lost(error: RuntimeError) -> bool:
    import torch.distributed as dist

    text = str(error)
    return isinstance(error, dist.DistError) or any(
        phrase in text for phrase in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo")
    )


def _show_cursor() -> None:
    """A bar hides it, and a process that is stopped does not bring it back."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
