"""The one HTTP client: a request as JSON to a server of ours or to an OpenAI-compatible one, and its answer as text."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

from mantissa.base.errors import MantissaError

OK, NOT_FOUND = 200, 404


def http_answer(
    method: str,
    url: str,
    body: object = None,
    *,
    timeout_s: float | None,
    most_bytes: int | None = None,
    key: str | None = None,
) -> tuple[int, str]:
    """Status and text of the answer to ``body``, sent as JSON (None: nothing is).

    ``timeout_s``: of connecting and of each wait for data, in seconds; None waits for ever. ``key``: sent as a bearer
    token. A redirect is not followed, since it would take the key elsewhere: it is an answer with its status. Proxies
    of the environment are used, but for this machine itself. A connection for each request, which takes far longer than
    connecting.

    ``OSError``: no server there, no HTTP, or an answer of more than ``most_bytes`` once decompressed.
    """
    import httpx2  # here, since it takes longer to import than most commands do that never ask a server

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    local = is_this_machine(url)
    verify = not (local and url.startswith("http:"))  # reading certificates that nothing needs takes 45 ms a request
    try:
        with (
            httpx2.Client(timeout=timeout_s, trust_env=not local, verify=verify, headers=headers) as client,
            client.stream(method, url, json=body) as response,
        ):
            data = bytearray()
            for part in response.iter_bytes():
                data += part
                if most_bytes is not None and len(data) > most_bytes:
                    raise OSError(f"an answer of more than {most_bytes:,} bytes")
            return response.status_code, data.decode("utf-8", "replace")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise OSError(str(error) or type(error).__name__) from error


def server_address(url: str, expected: str) -> SplitResult:
    """The parts of ``http[s]://HOST[:PORT][/PATH]``; ``MantissaError(expected)`` where ``url`` is anything else."""
    with suppress(ValueError):  # of a port that is no number, of half a bracket
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if known and not parts.query and not parts.fragment:
            return parts
    raise MantissaError(expected)


def is_this_machine(url: str) -> bool:
    """Whether a URL is of a loopback address."""
    host = ""
    with suppress(ValueError):  # of what is no URL, which the client says; of a name, which is no address
        host = urlsplit(url).hostname or ""
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
