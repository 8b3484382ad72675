"""The key of a vLLM server that ``mantissa serve`` started: without it no path answers, but the one that says it lives.

Loopback keeps other machines out, and no other user of this one; vLLM's own key guards sampling alone, and its
development mode lets whoever asks call any method of the worker. The key is ``VLLM_API_KEY`` where that is set, else
made for the server; it lies in a file of mode 0600, where a run of the same user on the same machine finds it.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.base.files import disk_errors

KEY_FILE = "MANTISSA_SERVE_KEY"  # the environment variable that tells the server where its key lies
MIDDLEWARE = "mantissa.rollout.vllm.key.Guard"
OPEN_PATH = "/health"
UNAUTHORIZED = 401


def key_path(port: int) -> Path:
    """Where the key of this user's server at a port of this machine lies."""
    home = os.environ.get("XDG_RUNTIME_DIR") or Path.home() / ".cache"
    return Path(home) / "mantissa" / f"serve-{port}.key"


@contextmanager
def written_key(port: int) -> Iterator[Path]:
    """The file with the key of a server, for as long as it runs."""
    path = key_path(port)
    with disk_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "w") as text:
            text.write(os.environ.get("VLLM_API_KEY") or secrets.token_urlsafe(32))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def known_key(port: int, here: bool) -> str | None:
    """The key for a server: ``VLLM_API_KEY``, or what lies here for one on this machine (``here``); None: none known.

    A key that was made here is for no other machine, which would else learn it by being asked."""
    if (key := os.environ.get("VLLM_API_KEY")) or not here:
        return key or None
    path = key_path(port)
    with suppress(OSError):
        if path.stat().st_uid != os.getuid():
            raise MantissaError(f"{path} is another user's: set VLLM_API_KEY to the server's key")
        return path.read_text().strip() or None
    return None


class Guard:
    """ASGI middleware that answers 401 to what comes without the key."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {Path(os.environ[KEY_FILE]).read_text().strip()}".encode()

    async def __call__(
        self, scope: dict[str, Any], receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        """Let through what brings the key, the server's own beginning and end, and the path that says it lives."""
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        opened = scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == OPEN_PATH)
        if opened or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": UNAUTHORIZED, "headers": []})
            await send({"type": "http.response.body", "body": b"the key is missing or another"})
        else:
            await send({"type": "websocket.close", "code": 1008})
