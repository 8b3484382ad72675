"""Submitting a job to a Ray cluster, following its log, and how it ended.

Through Ray's own client, which is imported only here: everything else about a launch works without Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mantissa.base.errors import MantissaError, StoppedError, pip_install

RECONNECT_S = 30.0  # how long a head may be gone before it is given up
_POLL_S = 1.0


class JobLostError(MantissaError):
    """The head is gone, and with it what is known of the job."""


@dataclass(frozen=True)
class JobEnd:
    """How a job ended. ``code``: its exit code, 0 where it succeeded; ``message``: Ray's word on why, in one line."""

    job: str
    status: str
    code: int
    message: str


def connect(address: str) -> Any:
    """Ray's client for the cluster at ``address``.

    Raises ``MantissaError`` where Ray is not installed, the address is none, nobody answers there, or who answers asks
    for a token that this process does not send.
    """
    if not address.startswith(("http://", "https://")):
        raise MantissaError(f"address {address!r}: expected the head's dashboard, such as http://head:8265")
    try:
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise MantissaError(
            f"submitting needs Ray's client, which is not installed: {pip_install('ray')}; --dry-run works without it"
        ) from None
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, OSError):  # requests' own errors are OSErrors
        raise MantissaError(
            f"no Ray head answers at {address}: is it running, and is that its dashboard's address?"
        ) from None
    except RayError:  # a token that is missing or wrong; ray start asks for one wherever ~/.ray/auth_token lies
        raise MantissaError(
            f"the Ray head at {address} asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN as its nodes "
            "have it unless ~/.ray/auth_token here is theirs"
        ) from None
    except RuntimeError as error:
        raise MantissaError(f"what answers at {address} is no Ray head that takes jobs: {_line(error)}") from None


def submit(client: Any, entrypoint: str, environment: dict[str, Any], name: str) -> str:
    """Submit a job; returns its id. Raises ``MantissaError`` with Ray's reason where it is refused."""
    try:
        return str(client.submit_job(entrypoint=entrypoint, runtime_env=environment, metadata={"name": name}))
    except OSError as error:
        raise MantissaError(f"the Ray head went away while the job was being submitted: {_line(error)}") from None
    except (RuntimeError, ValueError, TypeError) as error:
        raise MantissaError(f"Ray refused the job: {_line(error)}") from None


def follow(client: Any, job: str, show: Callable[[str], None]) -> JobEnd:
    """Show the job's log as it is written, until it ends.

    A connection that breaks is made again, and what was shown is not shown twice. Raises ``JobLostError`` where the
    head stays away for ``RECONNECT_S``, ``StoppedError`` on Ctrl-C: the job itself goes on.
    """
    shown = 0
    try:
        gone = 0.0
        while True:
            shown = asyncio.run(_tail(client, job, show, shown))
            try:
                end = _ended(client, job)
                gone = 0.0
            except (OSError, RuntimeError) as error:
                gone += _POLL_S
                if gone >= RECONNECT_S:
                    raise JobLostError(
                        f"the Ray head has not answered for {RECONNECT_S:g} s, and whether {job} runs is not known: "
                        f"{_line(error)}"
                    ) from None
                end = None
            if end is not None:
                return end
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        raise StoppedError(
            f"no longer following {job}, which goes on; ray job logs --follow {job} shows it, ray job stop {job} "
            "ends it"
        ) from None


async def _tail(client: Any, job: str, show: Callable[[str], None], shown: int) -> int:
    """One connection to the job's log, until it closes for whatever reason: it is sent from its beginning, and shown
    from character ``shown`` on. Returns how much was shown by then."""
    import aiohttp  # Ray's client has it

    seen = 0
    # Whether the job has ended is asked next, and whether the head is there.
    with suppress(aiohttp.ClientError, OSError, RuntimeError):
        async for text in client.tail_job_logs(job):
            if new := text[max(shown - seen, 0) :]:
                show(new)
                shown += len(new)
            seen += len(text)
    return shown


def _ended(client: Any, job: str) -> JobEnd | None:
    info = client.get_job_info(job)
    status = str(getattr(info.status, "value", info.status))
    if status not in ("SUCCEEDED", "FAILED", "STOPPED"):
        return None
    code = 0 if status == "SUCCEEDED" else (info.driver_exit_code or 1)
    return JobEnd(job, status, code, _line(info.message or ""))


def _line(error: object) -> str:
    """What an error says in one line: of a traceback, only its last."""
    lines = [line.strip() for line in str(error).replace("\\n", "\n").splitlines() if line.strip(" \"'.")]
    text = lines[-1] if lines and "Traceback" in str(error) else " ".join(lines)
    return text[:500].strip(" \"'")
