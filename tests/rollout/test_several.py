"""Processes that agree, as threads: one vLLM of each, or one server, and what one of them finds out."""

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

from fake_vllm import LLM, Fault, install
from fake_vllm_server import FakeServer
from mantissa.errors import MantissaError
from mantissa.kernels import rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import FP32, PrecisionPolicy, resolve
from mantissa.precision.resolve import StrictPromotion
from mantissa.ranks import ALONE, Ranks
from mantissa.rollout import Request, SamplingParams, VllmEngine, VllmStart
from mantissa.rollout.vllm.worker import digest

T = TypeVar("T")
CONFIG = ModelConfig("llama", 40, 32, 56, 2, 4, 2, 8, initializer_range=0.25)
START = VllmStart(CONFIG, FP32, FP32, 5, 32, torch.device("cpu"))
PARAMS = SamplingParams(max_tokens=6, temperature=0.5, stop_token_ids=(3,))
KERNELS = rollout_kernels(resolve(PrecisionPolicy(), "cpu"))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Threads share what processes have each for themselves: what one puts back, another may have changed."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Crew:
    """Threads in the place of processes; each meets the others or, after ten seconds, nobody."""

    def __init__(self, size: int) -> None:
        self.size, self.meeting, self.board = size, threading.Barrier(size, timeout=10), [None] * size

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


def masters(seed: int) -> dict[str, torch.Tensor]:
    model = Decoder(CONFIG).initialize(torch.Generator().manual_seed(seed))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def words(results: Sequence[object]) -> list[str]:
    assert all(isinstance(result, MantissaError) for result in results), results
    return [str(result) for result in results]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_succeed_or_all_stop_with_the_words_of_one(size: int) -> None:
    def fails_on(bad: set[int], undone: list[int]) -> Callable[[Ranks], int]:
        def work(rank: int) -> int:
            if rank in bad:
                raise MantissaError(f"no room on {rank}")
            return rank * 10

        return lambda me: me.agreed(lambda: work(me.rank), undone.append)

    undone: list[int] = []
    assert Crew(size).each(fails_on(set(), undone)) == [rank * 10 for rank in range(size)]
    assert undone == []
    last = size - 1
    assert words(Crew(size).each(fails_on({last}, undone))) == [f"no room on {last}"] * size
    assert sorted(undone) == [rank * 10 for rank in range(last)]  # what the others had made
    assert words(Crew(size).each(fails_on(set(range(size)), undone))) == ["no room on 0"] * size


def test_one_process_agrees_with_itself() -> None:
    assert ALONE.rank0
    assert ALONE.broadcast("mark") == "mark"
    assert ALONE.first_of(None) is None
    mine = MantissaError("full")

    def work() -> None:
        raise mine

    with pytest.raises(MantissaError) as caught:
        ALONE.agreed(work)
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
    expected = {name: digest(weight) for name, weight in masters(3).items()}
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
    monkeypatch.setattr("mantissa.rollout.vllm.link.require_vllm", lambda: "0.32.0")

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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    install(monkeypatch)
    made = FakeServer(START, masters(0), tmp_path)
    yield made
    made.close()


def served(me: Ranks, server: FakeServer) -> VllmEngine:
    return VllmEngine(START, KERNELS, server=server.url, timeout_s=20.0, ranks=me)


def test_one_server_is_loaded_by_the_first_and_asked_by_all(server: FakeServer) -> None:
    """Three syncs, each by one process; every process's own requests are answered from them, as one alone would be."""
    requests = [Request((5, rank), seed=11 + rank, samples=2) for rank in range(3)]

    def work(me: Ranks) -> Any:
        engine = served(me, server)
        found = []
        for version in (4, 5, 6):
            engine.sync(masters(version), version)
            (group,) = engine.generate(requests[me.rank : me.rank + 1], PARAMS, version)  # type: ignore[attr-defined]
            found.append([(s.tokens, s.logp_T.tolist(), s.policy_version) for s in group])
            me.first_of(None)  # as the sampler's exchange: nobody loads while another samples
        engine.close()
        return engine.evidence, found

    results = Crew(3).each(work)
    assert [evidence for evidence, _ in results] == [results[0][0]] * 3
    assert "tensors read back as sent" in results[0][0]
    alone = served(ALONE, server)  # they have let go of it
    for version in (4, 5, 6):
        alone.sync(masters(version), version)
        groups = alone.generate(requests, PARAMS, version)
        expected = [[(s.tokens, s.logp_T.tolist(), s.policy_version) for s in group] for group in groups]
        assert [found[version - 4] for _, found in results] == expected
    alone.close()


def test_what_changes_the_server_is_asked_once(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    real = LLM.collective_rpc

    def calling(llm: LLM, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        called.append(method)
        return real(llm, method, kwargs)

    monkeypatch.setattr(LLM, "collective_rpc", calling)

    def work(me: Ranks) -> None:
        engine = served(me, server)
        for version in (1, 2):
            engine.sync(masters(version), version)
        engine.close()

    Crew(3).each(work)
    load = ["reload_weights", "mantissa_weights", "mantissa_mark"]
    changing = [method for method in called if method != "mantissa_facts"]
    assert changing == load * 3  # what it was tried with, and two versions
    assert server.asked.count("/reset_prefix_cache") == 3
    assert server.asked.count("/inference/v1/generate") == 2  # the proof's


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/reset_prefix_cache", "answered /reset_prefix_cache with 500"),
        ("/collective_rpc", "answered /collective_rpc with 500"),
    ],
)
def test_a_sync_that_fails_on_the_first_stops_all_with_its_words(server: FakeServer, path: str, message: str) -> None:
    def work(me: Ranks) -> None:
        engine = served(me, server)
        engine.sync(masters(1), 1)
        me.first_of(None)
        server.refuse[path] = 500
        try:
            engine.sync(masters(2), 2)
        finally:
            assert engine.version == -1
            engine.close()

    said = words(Crew(2).each(work))
    assert said[0] == said[1]
    assert message in said[0]


def test_a_server_that_is_held_stops_all_processes_of_a_second_run(server: FakeServer) -> None:
    holder = served(ALONE, server)
    said = words(Crew(2).each(lambda me: served(me, server)))
    assert said[0] == said[1]
    assert "is in use by another run" in said[0]
    holder.close()


def test_a_server_started_again_is_noticed_by_all(server: FakeServer) -> None:
    def work(me: Ranks) -> None:
        engine = served(me, server)
        engine.sync(masters(1), 1)
        if me.rank0:
            server.restart()
        me.first_of(None)
        try:
            engine.generate([Request((5,), seed=1)], PARAMS, 1)
        finally:
            engine.close()

    for text in words(Crew(2).each(work)):
        assert "no longer holds the weights that this run loaded" in text


def test_a_server_that_one_process_cannot_reach_stops_all(server: FakeServer) -> None:
    def work(me: Ranks) -> VllmEngine:
        url = server.url if me.rank0 else "http://127.0.0.1:1"
        return VllmEngine(START, KERNELS, server=url, ranks=me)

    said = words(Crew(2).each(work))
    assert said[0] == said[1]
    assert "cannot reach the vLLM server at http://127.0.0.1:1" in said[0]
    served(ALONE, server).close()  # and the one that had it let go


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
