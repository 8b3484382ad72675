"""A server asked over loopback, and what a hostile one may answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest

import injected as made
from mantissa.base.errors import MantissaError
from mantissa.doctor.dump import Scored
from mantissa.doctor.live import ask
from mantissa.doctor.sides import Scores, Side

POLICY = made.model()
MODELS = {"object": "list", "data": [{"id": "policy"}]}


class Answers(BaseHTTPRequestHandler):
    """As vLLM's completions: each prompt token's log-prob, and for the first none."""

    side = Side("fp16", logits="fp16")
    spoil: Any = None  # what a hostile server makes of an answer: bytes

    def do_GET(self) -> None:
        self._send(MODELS)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["model"], asked["max_tokens"], asked["prompt_logprobs"]) == ("policy", 1, 0)
        tokens = asked["prompt"]
        whole = made.longer(Scored(np.array(tokens), 1, *[np.zeros(len(tokens) - 1)] * 2, None), 0, 1)
        logps = Scores(POLICY, [whole])(self.side)
        given = [None, *({str(t): {"logprob": x, "rank": 3}} for t, x in zip(tokens[1:], logps, strict=True))]
        self._send({"choices": [{"text": "", "prompt_logprobs": given}]})

    def _send(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        status, body = (200, body) if self.spoil is None else type(self).spoil(body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def served(spoil: Any = None) -> Iterator[str]:
    handler = type("Spoiled", (Answers,), {"spoil": None if spoil is None else staticmethod(spoil)})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_servers_log_probs_take_the_rollouts_place() -> None:
    sequences = made.texts(3)
    with served() as url:
        found = ask(url, sequences)
        again = ask(f"{url}/v1/", sequences[:1], name="policy")
    expected = Scores(POLICY, sequences)(Answers.side)
    assert Scores(POLICY, found).rollout == pytest.approx(expected, abs=1e-3)  # a server sums in its order
    assert again[0].rollout_logp == pytest.approx(found[0].rollout_logp)
    assert [each.learner_logp.tolist() for each in found] == [each.learner_logp.tolist() for each in sequences]


def _changed(change: Any) -> Any:
    def spoil(body: bytes) -> tuple[int, bytes]:
        answer = json.loads(body)
        if "choices" in answer:
            change(answer["choices"][0]["prompt_logprobs"])
        return 200, json.dumps(answer).encode()

    return spoil


def _set(place: int, value: Any) -> Any:
    def change(given: list[Any]) -> None:
        for token in given[place]:
            given[place][token] = {"logprob": value}

    return change


HOSTILE = {
    "not JSON": lambda body: (200, b"<html>"),
    "nested": lambda body: (200, b"[" * 100_000),
    "no object": lambda body: (200, b"[]"),
    "an error": lambda body: (500, b'{"error": "x"}'),
    "not text": lambda body: (200, b"\xff\xfe"),
    "two models": lambda body: (200, json.dumps({"data": [{"id": "a"}, {"id": "b"}]}).encode()),
    "models of another kind": lambda body: (200, b'{"data": 3}'),
    "nothing": lambda body: (200, b""),
    "no log-probs": _changed(lambda given: given.clear()),
    "one too few": _changed(lambda given: given.pop()),
    "another token": _changed(lambda given: given.__setitem__(4, {"999999": {"logprob": -1.0}})),
    "a token without": _changed(lambda given: given.__setitem__(4, None)),
    "NaN": _changed(_set(4, float("nan"))),
    "above 0": _changed(_set(4, 3.0)),
    "text": _changed(_set(4, "much")),
    "a huge number": _changed(_set(4, 10**400)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_answer_is_one_error(kind: str) -> None:
    with served(HOSTILE[kind]) as url, pytest.raises(MantissaError, match="127"):
        ask(url, made.texts(1))


def test_an_endless_answer_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mantissa.doctor.live._MOST_BYTES", 1000)
    with served(lambda body: (200, b'{"data": "' + b"x" * 10_000_000)) as url, pytest.raises(MantissaError):
        ask(url, made.texts(1))


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1", "127.0.0.1:8000", "http://", "http://x:99999", "http://a/b/c", "http://[::1", ""]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(MantissaError, match="expected a server's address"):
        ask(url, made.texts(1))


def test_nobody_there_is_said() -> None:
    with served() as url:
        pass
    with pytest.raises(MantissaError, match="that is running there"):
        ask(url, made.texts(1))
