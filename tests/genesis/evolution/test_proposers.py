"""Proposers: what they are shown, what they give, and a server that misbehaves."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from evolution_references import REFERENCES
from mantissa.base.errors import MantissaError
from mantissa.genesis.evolution import Candidate, shipped
from mantissa.genesis.evolution.edits import normal
from mantissa.genesis.evolution.proposers import Edits, OpenAI, ProposalRequest, from_answer, prompt_for
from processes import free_port

TASK = shipped()["clamp"]
PARENT = Candidate(
    "clamp", normal(TASK.start) or "", "start", 0, 0.25, (True,) * 8, "clamp(5, 0, 10) gave 0, expected 5", (),
    True, False, number=1,
)  # fmt: skip


def request(count: int = 3, partner: Candidate | None = None) -> ProposalRequest:
    return ProposalRequest(TASK, "revise" if partner is None else "recombine", PARENT, partner, count, 7)


def test_edits_are_a_function_of_the_request() -> None:
    found = Edits().propose([request(20)])
    assert found == Edits().propose([request(20)])
    assert 15 <= len(found) <= 20
    assert all(each.source != PARENT.source and len(each.actions) == len(each.patterns) in (1, 2) for each in found)
    lent = Candidate(
        "clamp", normal(REFERENCES["clamp"]) or "", "start", 0, 1, (True,) * 8, "", (), True, False, number=2
    )
    assert any("max(low" in each.source for each in Edits().propose([request(20, lent)]))


def test_a_prompt_shows_the_failure_and_no_hidden_test() -> None:
    text = prompt_for(request())
    assert PARENT.source.rstrip() in text
    assert "clamp(5, 0, 10) gave 0, expected 5" in text
    for arguments, _ in (*TASK.held_out, *TASK.canary):
        assert ", ".join(map(str, arguments)) not in text
    assert REFERENCES["clamp"] in prompt_for(
        request(1, Candidate("clamp", REFERENCES["clamp"], "start", 0, 1, (), "", (), True, False))
    )


def test_an_answer_is_a_program_or_nothing() -> None:
    made = from_answer(request(), f"Sure:\n```python\n{REFERENCES['clamp']}\n```\nDone.")
    assert made is not None
    assert made.source == normal(REFERENCES["clamp"])
    assert made.actions[0].startswith("revise -")
    for answer in (
        "",
        "no code",
        "```python\ndef clamp(:\n```",
        f"```\n{PARENT.source}```",
        "```\ndef f(x): return x\n```",
    ):
        assert from_answer(request(), answer) is None, answer


class Handler(BaseHTTPRequestHandler):
    reply: Any = b""
    status = 200
    seen: tuple[Any, ...] = ()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen = (self.path, self.headers.get("Authorization"), body)
        data = self.reply if isinstance(self.reply, bytes) else json.dumps(self.reply).encode()
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/v1"
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_server_is_asked_and_its_programs_are_taken(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    contents = [f"```python\n{REFERENCES['clamp']}\n```", "nothing", None]
    Handler.status, Handler.reply = 200, {"choices": [{"message": {"content": c}} for c in contents]}
    found = OpenAI(server, "some-model", 64, 0.5, 5.0).propose([request(3)])
    assert [each.source for each in found] == [normal(REFERENCES["clamp"])]
    path, key, body = Handler.seen
    assert (path, key, body["model"], body["n"], body["max_tokens"]) == (
        "/v1/chat/completions", "Bearer secret", "some-model", 3, 64,
    )  # fmt: skip
    assert body["messages"][0]["content"] == prompt_for(request(3))


@pytest.mark.parametrize(
    ("status", "reply", "said"),
    [
        (500, b"broken", "status 500: broken"),
        (404, {"error": "no such model"}, "status 404.*no such model"),
        (200, b"<html>", "no JSON"),
        (200, {"answer": 1}, "no chat completion"),
        (200, {"choices": [{"message": {"content": [1]}}]}, "a message is no text"),
        (200, b"[" * 100_000, "no JSON"),
        (200, b" " * (2**22 + 10), "more than 4,194,304 bytes.*max_tokens low enough"),
    ],
    ids=["500", "404", "html", "shape", "content", "deep", "large"],
)
def test_a_server_that_misbehaves_is_one_error(server: str, status: int, reply: Any, said: str) -> None:
    Handler.status, Handler.reply = status, reply
    with pytest.raises(MantissaError, match=said):
        OpenAI(server, "m", 64, 0.5, 5.0).propose([request(1)])


def test_no_server_and_no_url() -> None:
    with pytest.raises(MantissaError, match=r"is the server running there"):
        OpenAI(f"http://127.0.0.1:{free_port()}/v1", "m", 64, 0.5, 5.0).propose([request(1)])
    wrong = [("ftp://x", "m"), ("127.0.0.1:80", "m"), ("http://x/v1", ""), ("http://[", "m"), ("http://x:y", "m")]
    for url, model in wrong:
        with pytest.raises(MantissaError, match=r"expected http\(s\)"):
            OpenAI(url, model, 64, 0.5, 5.0)
