"""A vLLM server against a stand-in over real HTTP: the same answers as in process, one run at a time, clear errors.

And several processes, as threads: a vLLM of each, or one server for all. The real one is in ``real_vllm``.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from fake_vllm import CONFIG, KERNELS, LLM, PARAMS, START, Fault, install, masters
from fake_vllm_server import FakeServer
from mantissa.base.environ import changed_environment
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import ALONE, Ranks
from mantissa.base.tensors import digest
from mantissa.precision import BF16
from mantissa.rollout import Request, VllmEngine, VllmStart
from strict_promotion import StrictPromotion

REQUESTS = [Request((5, 6), seed=11, samples=2), Request((7,), seed=12, samples=3)]
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Threads share what processes have each for themselves: what one puts back, another may have changed."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


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


def test_a_server_tells_what_was_kept_as_the_processes_here_do(
    server: FakeServer, engine_on: Callable[..., VllmEngine]
) -> None:
    """What top-k left, and the most probable tokens; a server sends a number for what has no probability."""
    served, local = engine_on(server.url), VllmEngine(START, KERNELS)
    params = dataclasses.replace(PARAMS, top_k=3, top_p=0.95, most_probable=4)
    told: list[list[Any]] = []
    for engine in (served, local):
        engine.sync(masters(3), 7)
        told.append([s for group in engine.generate(REQUESTS, params, 7) for s in group])
    local.close()
    for theirs, ours in zip(*told, strict=True):
        assert theirs.support.fits(theirs.tokens, CONFIG.vocab_size)
        for mine, other in ((theirs.support, ours.support), (theirs.most_probable, ours.most_probable)):
            assert all(torch.equal(getattr(mine, name), value) for name, value in vars(other).items())


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
    for url in ("ftp://x:1", "http://", "http://x:1/v1", "http://[", "http://x:y"):
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


def test_asleep_it_holds_nothing_and_sync_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come back before they are loaded, the cache after; the stand-in asserts that nothing is asked asleep."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    install(monkeypatch)
    engine = VllmEngine(sleeping(monkeypatch), KERNELS)
    llm = LLM.made[-1]
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


# several processes: one vLLM of each, or one server, and what one of them finds out


class Crew:
    """Threads in the place of processes; each meets the others or, after ten seconds, nobody."""

    def __init__(self, size: int) -> None:
        self.size, self.meeting, self.board = size, threading.Barrier(size, timeout=300), [None] * size

    def member(self, rank: int) -> Member:
        return Member(self, rank)

    def each(self, work: Callable[[Ranks], T]) -> list[T | MantissaError]:
        """What ``work`` came to in each; an error of the user's is a result."""

        def one(rank: int) -> T | MantissaError:
            try:
                with StrictPromotion():
                    return work(self.member(rank))
            except MantissaError as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


class Member(Ranks):
    """A thread in the place of a rank: only how values travel is its own."""

    def __init__(self, crew: Crew, rank: int) -> None:
        super().__init__(rank, crew.size)
        object.__setattr__(self, "crew", crew)

    def gather(self, value: Any) -> list[Any]:
        crew: Crew = self.crew  # type: ignore[attr-defined]
        crew.board[self.rank] = value
        crew.meeting.wait()
        gathered = list(crew.board)
        crew.meeting.wait()
        return gathered


def words(results: Sequence[object]) -> list[str]:
    assert all(isinstance(result, MantissaError) for result in results), results
    return [str(result) for result in results]


@pytest.mark.parametrize("size", [1, 3])
def test_all_succeed_or_all_stop_with_the_words_of_one(size: int) -> None:
    def fails_on(bad: set[int]) -> Callable[[Ranks], int]:
        def work(rank: int) -> int:
            if rank in bad:
                raise MantissaError(f"no room on {rank}")
            return rank * 10

        return lambda me: me.agreed(lambda: work(me.rank), undone.append)

    undone: list[int] = []
    assert Crew(size).each(fails_on(set())) == [rank * 10 for rank in range(size)]
    assert undone == []
    last = size - 1
    assert words(Crew(size).each(fails_on({last}))) == [f"no room on {last}"] * size
    assert sorted(undone) == [rank * 10 for rank in range(last)]  # what the others had made
    assert words(Crew(size).each(fails_on(set(range(size))))) == ["no room on 0"] * size
    mine = MantissaError("full")

    def full() -> None:
        raise mine

    with pytest.raises(MantissaError) as caught:
        ALONE.agreed(full)
    assert caught.value is mine


def test_each_process_loads_and_proves_a_vllm_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    request = Request((5, 6), seed=11, samples=3)

    def work(me: Ranks) -> Any:
        engine = VllmEngine(START, KERNELS, ranks=me)
        engine.sync(masters(3), 7)
        samples = engine.generate([request], PARAMS, 7)[0]
        engine.close()
        return engine.evidence, [(s.tokens, s.logp_T.tolist(), s.policy_version) for s in samples]

    first, second = Crew(2).each(work)
    assert first == second
    assert "tensors read back as sent, bit for bit" in first[0]
    expected = {name: str(digest(weight)) for name, weight in masters(3).items()}
    assert [llm.worker.mantissa_weights() for llm in LLM.made] == [expected, expected]
    assert len({llm.options["model"] for llm in LLM.made}) == 2  # a folder of its own
    assert [llm.closed for llm in LLM.made] == [True, True]


class SecondFails(LLM):
    """The vLLM that is made last has a fault."""

    bad = Fault()
    lock = threading.Lock()
    begun = 0

    def __init__(self, **options: Any) -> None:
        with SecondFails.lock:
            SecondFails.begun += 1
            if SecondFails.begun % 2 == 0:
                self.fault = self.bad
        super().__init__(**options)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Fault(fails="no memory"), "vLLM 0.32.0 did not start: no memory; its own messages above say more"),
        (Fault(raw_logprobs=True), "gives log-probs that are not of the distribution sampled from"),
        (Fault(keeps="lm_head"), "sync: vLLM 0.32.0 computes with other values of lm_head.weight than were sent"),
    ],
)
def test_a_fault_of_one_vllm_stops_all(monkeypatch: pytest.MonkeyPatch, bad: Fault, message: str) -> None:
    """At the start or at a sync; none is left running, and none samples."""
    install(monkeypatch)
    monkeypatch.setattr(SecondFails, "bad", bad)
    monkeypatch.setattr(sys.modules["vllm"], "LLM", SecondFails)
    monkeypatch.setattr("mantissa.rollout.vllm.engine.require_vllm", lambda: "0.32.0")

    def work(me: Ranks) -> None:
        engine = VllmEngine(START, KERNELS, ranks=me)
        try:
            engine.sync(masters(3), 7)
        finally:
            assert engine.version == -1
            engine.close()

    said = words(Crew(2).each(work))
    assert said[0] == said[1]
    assert message in said[0]
    assert LLM.made
    assert all(llm.closed for llm in LLM.made)


def test_masters_that_one_process_cannot_round_stop_all(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    spoiled = masters(3)
    spoiled["model.norm.weight"][3] = float("nan")

    def work(me: Ranks) -> None:
        engine = VllmEngine(START, KERNELS, ranks=me)
        try:
            engine.sync(masters(3) if me.rank0 else spoiled, 7)
        finally:
            engine.close()

    said = words(Crew(2).each(work))
    assert said[0] == said[1]
    assert "weight model.norm.weight holds nan" in said[0]


def served(me: Ranks, server: FakeServer) -> VllmEngine:
    return VllmEngine(START, KERNELS, server=server.url, timeout_s=20.0, ranks=me)


def test_one_server_is_loaded_by_the_first_and_asked_by_all(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two syncs, each by one process; every process's own requests are answered from them, as one alone would be."""
    requests = [Request((5, rank), seed=11 + rank, samples=2) for rank in range(3)]
    called: list[str] = []
    real = LLM.collective_rpc
    monkeypatch.setattr(
        LLM, "collective_rpc", lambda llm, method, kwargs=None: called.append(method) or real(llm, method, kwargs)
    )

    def work(me: Ranks) -> Any:
        engine = served(me, server)
        found = []
        for version in (4, 5):
            engine.sync(masters(version), version)
            (group,) = engine.generate(requests[me.rank : me.rank + 1], PARAMS, version)
            found.append([(s.tokens, s.logp_T.tolist(), s.policy_version) for s in group])
            me.first_of(None)  # as the sampler's exchange: nobody loads while another samples
        engine.close()
        return engine.evidence, found

    results = Crew(3).each(work)
    changing = [method for method in called if method not in ("mantissa_facts", "mantissa_mark")]
    assert changing == ["reload_weights", "mantissa_weights"] * 3  # what it was tried with, and two versions
    assert server.asked.count("/reset_prefix_cache") == 3
    assert [evidence for evidence, _ in results] == [results[0][0]] * 3
    assert "tensors read back as sent" in results[0][0]
    alone = served(ALONE, server)  # they have let go of it
    for version in (4, 5):
        alone.sync(masters(version), version)
        groups = alone.generate(requests, PARAMS, version)
        expected = [[(s.tokens, s.logp_T.tolist(), s.policy_version) for s in group] for group in groups]
        assert [found[version - 4] for _, found in results] == expected
    alone.close()


def test_a_sync_that_fails_on_the_first_stops_all_with_its_words(server: FakeServer) -> None:
    def work(me: Ranks) -> None:
        engine = served(me, server)
        engine.sync(masters(1), 1)
        me.first_of(None)
        server.refuse["/reset_prefix_cache"] = 500
        try:
            engine.sync(masters(2), 2)
        finally:
            assert engine.version == -1
            engine.close()

    said = words(Crew(2).each(work))
    assert said[0] == said[1]
    assert "answered /reset_prefix_cache with 500" in said[0]


def test_it_sleeps_and_wakes_once_for_all(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tells it to; the others know that it sleeps, and that it is awake."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(VllmStart, "__post_init__", lambda self: None)  # on a CPU, where the real one ignores it
    start = dataclasses.replace(START, sleeps=True)
    server.start = start

    def work(me: Ranks) -> list[str]:
        engine = VllmEngine(start, KERNELS, server=server.url, ranks=me)
        for version in (1, 2):
            engine.sync(masters(version), version)
            assert engine.generate([Request((5,), seed=1)], PARAMS, version)
            me.first_of(None)
            engine.sleep()
            assert engine.version == -1
            me.first_of(None)
        engine.close()
        return [engine.evidence]

    (first,), (second,) = Crew(2).each(work)
    assert "asleep it gives 1.0 GiB back" in first
    assert first == second
    assert server.llm.slept == ["sleep 2", "wake weights", "wake kv_cache"] * 2 + ["sleep 2"]


@pytest.mark.parametrize(("length", "elsewhere"), [(60, False), (70, False), (71, True), (200, True)])
def test_sockets_whose_names_would_be_too_long_lie_elsewhere(
    monkeypatch: pytest.MonkeyPatch, length: int, elsewhere: bool
) -> None:
    """107 characters, of which a slash and a UUID are 37; each rank's temporary folder lies in its launcher's."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/" + "t" * (length - 1))
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    assert START.environment().get("VLLM_RPC_BASE_PATH") == ("/tmp" if elsewhere else None)
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/mine")
    assert START.environment().get("VLLM_RPC_BASE_PATH") == ("/mine" if elsewhere else None)
