"""A stand-in for vLLM's server: its endpoints over HTTP, on the stand-in for vLLM itself."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fake_vllm import LLM
from mantissa.rollout.vllm.server import VllmStart, WeightFolder, sample_weights


class _Listening(http.server.ThreadingHTTPServer):
    request_queue_size = 256  # connections that wait at once: every slot's, of several processes
    daemon_threads = True


class FakeServer:
    """What ``mantissa serve`` would have started, on a port of its own. ``refuse``: paths answered with an error."""

    def __init__(self, start: VllmStart, shapes: dict[str, Any], folder: Path) -> None:
        self.start, self.folder = start, WeightFolder(folder, start)
        self.folder.write_config()
        self.folder.write(sample_weights(shapes))
        self.asked: list[str] = []
        self.headers: list[str | None] = []
        self.refuse: dict[str, int] = {}
        self.restart()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                parts = urlsplit(self.path)
                server.asked.append(self.path)
                server.headers.append(self.headers.get("Authorization"))
                status = server.refuse.get(parts.path, 200)
                answer = server.answer(parts.path, parse_qs(parts.query), body) if status == 200 else {"detail": "no"}
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self.http = _Listening(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def restart(self) -> None:
        """As if its process had been started again: weights from the folder, no mark."""
        self.llm = LLM(**self.start.options(str(self.folder.path)))

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Any:
        if path == "/collective_rpc":
            results = self.llm.collective_rpc(body["method"], body["kwargs"])
            return {"results": [one if one is None or isinstance(one, dict | list) else str(one) for one in results]}
        if path == "/reset_prefix_cache":
            return {"success": self.llm.reset_prefix_cache()}
        if path == "/sleep":
            self.llm.sleep(level=int(query["level"][0]))
            return {}
        if path == "/wake_up":
            self.llm.wake_up(query["tags"])
            return {}
        assert path == "/inference/v1/generate"
        asked = SimpleNamespace(**body["sampling_params"])
        (result,) = self.llm.generate([{"prompt_token_ids": body["token_ids"]}], [asked], use_tqdm=False)
        output = result.outputs[0]
        content = []
        for token, table in zip(output.token_ids, output.logprobs, strict=True):
            near = [{"token_id": other, "logprob": _clamped(one.logprob)} for other, one in table.items()]
            own = {"token_id": token, "logprob": _clamped(table[token].logprob)}
            content.append(own | {"top_logprobs": near[: max(asked.logprobs, 1)]})
        choice = {"index": 0, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
        return {"choices": [choice | {"logprobs": {"content": content}}]}


def _clamped(logprob: float) -> float:
    """As vLLM's server sends it: JSON has no NaN."""
    return max(logprob, -9999.0) if logprob == logprob else -9999.0
