"""The HTTP client against servers that mean harm, or are none."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mantissa.base.errors import MantissaError
from mantissa.base.http import http_answer, server_address

SEEN: list[tuple[str, str, dict[str, str], bytes]] = []


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        SEEN.append((self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        status, headers, data = 200, {}, b"{}"
        if self.path == "/moved":
            status, headers = 302, {"Location": "/elsewhere"}
        elif self.path == "/bomb":
            headers, data = {"Content-Encoding": "gzip"}, gzip.compress(bytes(1 << 22))
        elif self.path == "/latin":
            data = b"\xff{}"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    SEEN.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def silent() -> Iterator[str]:
    """Listens, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_json_and_the_key_are_sent(url: str) -> None:
    assert http_answer("POST", f"{url}/v1?a=b", {"n": [1.5, None]}, timeout_s=5, key="secret") == (200, "{}")
    method, path, headers, body = SEEN[0]
    assert (method, path, json.loads(body)) == ("POST", "/v1?a=b", {"n": [1.5, None]})
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Bearer secret"


def test_without_a_body_or_a_key_none_is_sent(url: str) -> None:
    http_answer("GET", f"{url}/health", timeout_s=5)
    assert SEEN[0][3] == b""
    assert "authorization" not in SEEN[0][2]
    http_answer("POST", f"{url}/call", {}, timeout_s=5)
    assert SEEN[1][3] == b"{}"


def test_a_redirect_does_not_take_the_key_elsewhere(url: str) -> None:
    assert http_answer("POST", f"{url}/moved", {}, timeout_s=5, key="secret")[0] == 302
    assert [path for _, path, _, _ in SEEN] == ["/moved"]


def test_an_answer_is_bounded_once_decompressed(url: str) -> None:
    with pytest.raises(OSError, match="more than 1,048,576 bytes"):
        http_answer("GET", f"{url}/bomb", timeout_s=5, most_bytes=1 << 20)
    assert len(http_answer("GET", f"{url}/bomb", timeout_s=5, most_bytes=1 << 22)[1]) == 1 << 22


def test_bytes_that_are_no_text_stay_visible(url: str) -> None:
    assert http_answer("GET", f"{url}/latin", timeout_s=5) == (200, "�{}")


def test_silence_ends(silent: str) -> None:
    with pytest.raises(OSError, match="timed out"):
        http_answer("GET", silent, timeout_s=0.1)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/v1", "http://127.0.0.1:99999", "ftp://127.0.0.1/", "http://\x00/", "http://["]
)
def test_no_server_is_an_oserror(url: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 (each library's own words)
        http_answer("GET", url, timeout_s=1)


def test_what_speaks_no_http_is_an_oserror() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError):  # noqa: PT011 (the library's own words)
            http_answer("GET", f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=5)
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_proxy_is_not_asked_for_this_machine(url: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert http_answer("GET", url.replace("127.0.0.1", host), timeout_s=5)[0] == 200


@pytest.mark.parametrize(
    "text",
    ["", "localhost:8000", "ftp://h", "file:///etc/passwd", "http://", "http://:80", "http://h:0", "http://h:99999",
     "http://h:x", "http://[::1", "http://h?a=b", "http://h/v1#part"],
)  # fmt: skip
def test_what_is_no_servers_address(text: str) -> None:
    with pytest.raises(MantissaError, match=r"^expected so$"):
        server_address(text, "expected so")


def test_a_servers_address() -> None:
    parts = server_address("https://[::1]:8000/v1", "")
    assert (parts.scheme, parts.hostname, parts.port, parts.path) == ("https", "::1", 8000, "/v1")
