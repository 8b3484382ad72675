"""A vLLM server against a stand-in over real HTTP: the same answers as in process, one run at a time, clear errors.

The real one is in ``real_vllm``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fake_vllm import LLM, Fault, install
from fake_vllm_server import FakeServer
from mantissa.environ import changed_environment
from mantissa.errors import MantissaError
from mantissa.kernels import rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import BF16, FP32, PrecisionPolicy, resolve
from mantissa.rollout import Request, SamplingParams, VllmEngine, VllmStart

CONFIG = ModelConfig("llama", 40, 32, 56, 2, 4, 2, 8, initializer_range=0.25)
START = VllmStart(CONFIG, FP32, FP32, 5, 32, torch.device("cpu"))
PARAMS = SamplingParams(max_tokens=6, temperature=0.5, stop_token_ids=(3,))
REQUESTS = [Request((5, 6), seed=11, samples=2), Request((7,), seed=12, samples=3)]
KERNELS = rollout_kernels(resolve(PrecisionPolicy(), "cpu"))


def masters(seed: int) -> dict[str, torch.Tensor]:
    model = Decoder(CONFIG).initialize(torch.Generator().manual_seed(seed))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    install(monkeypatch)
    made = FakeServer(START, masters(0), tmp_path)
    yield made
    made.close()


@pytest.fixture
def engine_on() -> Iterator[Callable[..., VllmEngine]]:
    made: list[VllmEngine] = []

    def build(url: str, start: VllmStart = START) -> VllmEngine:
        made.append(VllmEngine(start, KERNELS, server=url, timeout_s=20.0))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def test_a_server_answers_as_the_processes_here_do(server: FakeServer, engine_on: Callable[..., VllmEngine]) -> None:
    """The same seeds reach it, the same samples come back, in their places; its weights are those that were sent."""
    served, local = engine_on(server.url), VllmEngine(START, KERNELS)
    here = LLM.made[-1]
    for engine in (served, local):
        engine.sync(masters(3), 7)
    theirs, ours = (engine.generate(REQUESTS, PARAMS, 7) for engine in (served, local))
    assert [[(s.tokens, s.logp_T.tolist(), s.finish_reason, s.policy_version) for s in group] for group in theirs] == [
        [(s.tokens, s.logp_T.tolist(), s.finish_reason, s.policy_version) for s in group] for group in ours
    ]
    assert sorted(one.seed for one in server.llm.asked[-5:]) == sorted(one.seed for one in here.asked[-5:])
    assert server.llm.worker.mantissa_weights() == here.worker.mantissa_weights()
    assert served.evidence.startswith(f"vLLM 0.32.0 at {server.url} runs in float32, head float32; ")
    assert served.evidence.partition(";")[2] == local.evidence.partition(";")[2]
    local.close()


def test_one_run_at_a_time(server: FakeServer, engine_on: Callable[..., VllmEngine]) -> None:
    first = engine_on(server.url)
    with pytest.raises(MantissaError, match="is in use by another run"):
        engine_on(server.url)
    first.sync(masters(1), 1)
    assert first.generate(REQUESTS, PARAMS, 1)
    first.close()
    engine_on(server.url).sync(masters(2), 1)


def test_a_server_that_was_started_again_is_noticed(server: FakeServer, engine_on: Callable[..., VllmEngine]) -> None:
    engine = engine_on(server.url)
    engine.sync(masters(1), 4)
    server.restart()
    with pytest.raises(MantissaError, match=r"no longer holds the weights that this run loaded .* is not used"):
        engine.generate(REQUESTS, PARAMS, 4)
    assert engine.version == -1
    engine.sync(masters(1), 4)
    assert engine.generate(REQUESTS, PARAMS, 4)


def test_a_server_of_another_policy(server: FakeServer, engine_on: Callable[..., VllmEngine], tmp_path: Path) -> None:
    wider = dataclasses.replace(START, config=dataclasses.replace(CONFIG, intermediate_size=64))
    with pytest.raises(MantissaError, match=r"another policy: intermediate_size=56, and this recipe has 64; .*serve"):
        engine_on(server.url, wider)
    with pytest.raises(MantissaError, match="holds 32 positions, and the policy has 48"):
        engine_on(server.url, dataclasses.replace(START, max_length=48))
    with pytest.raises(MantissaError, match="another policy: dtype=float32, and this recipe has bfloat16"):
        engine_on(server.url, dataclasses.replace(START, format=BF16))
    (tmp_path / "config.json").unlink()
    with pytest.raises(MantissaError, match=r"cannot read \(No such file or directory\); start it with --folder on a"):
        engine_on(server.url)


def test_formats_are_the_workers_and_not_the_folders(server: FakeServer, engine_on: Callable[..., VllmEngine]) -> None:
    server.llm.worker.model_runner.model_config.logprobs_mode = "raw_logprobs"
    with pytest.raises(MantissaError, match="asked for logprobs_mode=processed_logprobs and runs with raw_logprobs"):
        engine_on(server.url)
    server.llm.worker.model_runner.model_config.logprobs_mode = "processed_logprobs"
    engine_on(server.url)  # the one that failed let go of it


def test_servers_that_do_not_answer(server: FakeServer, engine_on: Callable[..., VllmEngine]) -> None:
    engine = engine_on(server.url)
    engine.sync(masters(1), 1)
    server.refuse["/inference/v1/generate"] = 500
    with pytest.raises(MantissaError, match=r"answered /inference/v1/generate with 500: .*; its own log says more"):
        engine.generate(REQUESTS, PARAMS, 1)
    server.refuse = {"/collective_rpc": 404}
    with pytest.raises(MantissaError, match=r"with 404: .*; it must be one that mantissa serve started"):
        engine.sync(masters(1), 2)
    assert engine.version == -1
    server.close()
    with pytest.raises(
        MantissaError, match=r"cannot reach the vLLM server at .*refused; start it with: mantissa serve"
    ):
        VllmEngine(START, KERNELS, server=server.url)
    for url in ("ftp://x:1", "http://", "http://x:1/v1"):
        with pytest.raises(MantissaError, match="expected http://host:port"):
            VllmEngine(START, KERNELS, server=url)


def test_a_log_prob_that_json_cannot_hold(server: FakeServer, engine_on: Callable[..., VllmEngine]) -> None:
    engine = engine_on(server.url)
    engine.sync(masters(1), 1)
    server.llm.fault = Fault(nan=True)
    with pytest.raises(MantissaError, match="gave a log-prob that is not finite"):
        engine.generate(REQUESTS, PARAMS, 1)


def test_a_key_is_sent_where_there_is_one(
    server: FakeServer, engine_on: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    engine_on(server.url)
    assert set(server.headers) == {"Bearer secret"}


@pytest.mark.parametrize("served", [True, False])
def test_asleep_it_holds_nothing_and_sync_wakes_it(
    served: bool, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights come back before they are loaded, the cache after; the stand-in asserts that nothing is asked asleep."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    start = sleeping(monkeypatch)
    if served:
        server.start = start
    engine = VllmEngine(start, KERNELS, server=server.url if served else None)
    llm = server.llm if served else LLM.made[-1]
    assert "asleep it gives 1.0 GiB back" in engine.evidence
    assert engine.version == -1  # tried, and left asleep until the first sync
    engine.sync(masters(1), 1)
    engine.generate(REQUESTS, PARAMS, 1)
    engine.sleep()
    engine.sleep()
    with pytest.raises(MantissaError, match="holds no weights"):
        engine.generate(REQUESTS, PARAMS, 1)
    engine.sync(masters(1), 1)
    assert llm.slept == ["sleep 2", "wake weights", "wake kv_cache"] * 2
    assert engine.generate(REQUESTS, PARAMS, 1)
    assert server.asked or not served
    engine.close()


def test_one_that_does_not_sleep_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Fault(freed=1000))
    with pytest.raises(MantissaError, match=r"told to sleep and gave 0\.00 GiB back, its weights alone"):
        VllmEngine(sleeping(monkeypatch), KERNELS)
    assert LLM.made[-1].closed
    with pytest.raises(MantissaError, match=r"sleep=true: vLLM cannot sleep on a cpu"):
        dataclasses.replace(START, sleeps=True)


def sleeping(monkeypatch: pytest.MonkeyPatch) -> VllmStart:
    """A start that sleeps, though on a CPU: what the real one there would ignore, the stand-in does."""
    with monkeypatch.context() as patched:
        patched.setattr(VllmStart, "__post_init__", lambda self: None)
        return dataclasses.replace(START, sleeps=True)


def test_vllms_processes_do_not_take_our_ranks_for_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "5", "TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/h"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # the user's own choice
    wanted = START.environment()
    assert {name: wanted.get(name, "as it is") for name in given} == dict.fromkeys(given) | {"HOME": "as it is"}
    assert wanted["VLLM_LOGGING_LEVEL"] == "INFO"
    with changed_environment({"RANK": None, "NEW_ONE": "3"}):
        assert "RANK" not in os.environ
        assert os.environ["NEW_ONE"] == "3"
    assert os.environ["RANK"] == "1"
    assert "NEW_ONE" not in os.environ


def test_a_gpu_is_named_by_its_number_among_the_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    start = dataclasses.replace(START, device=torch.device("cuda", 1), sleeps=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert start.environment()["CUDA_VISIBLE_DEVICES"] == "6"
    assert start.environment()["PYTORCH_CUDA_ALLOC_CONF"] is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert start.environment()["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_folder_says_what_is_asked(server: FakeServer) -> None:
    said = json.loads((server.folder.path / "config.json").read_text())
    assert said["tie_word_embeddings"] is False
    assert said["dtype"] == "float32"
    assert said["num_hidden_layers"] == 2
