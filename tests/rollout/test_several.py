"""Processes that agree, as threads: one vLLM of each, or one server, and what one of them finds out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from fake_vllm import LLM, Fault, install
from mantissa.errors import MantissaError
from mantissa.kernels import rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import FP32, PrecisionPolicy, resolve
from mantissa.precision.strict import StrictPromotion
from mantissa.rollout import Request, SamplingParams, VllmEngine, VllmStart
from mantissa.rollout.several import ONE_PROCESS, Processes, agreed
from mantissa.rollout.vllm_worker import digest

T = TypeVar("T")
CONFIG = ModelConfig("llama", 40, 32, 56, 2, 4, 2, 8, initializer_range=0.25)
START = VllmStart(CONFIG, FP32, FP32, 5, 32, torch.device("cpu"))
PARAMS = SamplingParams(max_tokens=6, temperature=0.5, stop_token_ids=(3,))
KERNELS = rollout_kernels(resolve(PrecisionPolicy(), "cpu"))


class Crew:
    """Threads in the place of processes; each meets the others or, after ten seconds, nobody."""

    def __init__(self, size: int) -> None:
        self.size, self.meeting, self.board = size, threading.Barrier(size, timeout=10), [None] * size

    def member(self, rank: int) -> Member:
        return Member(self, rank)

    def each(self, work: Callable[[Processes], T]) -> list[T | MantissaError]:
        """What ``work`` came to in each; an error of the user's is a result."""

        def one(rank: int) -> T | MantissaError:
            try:
                with StrictPromotion():
                    return work(self.member(rank))
            except MantissaError as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


class Member:
    def __init__(self, crew: Crew, rank: int) -> None:
        self.crew, self.rank = crew, rank

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        self.crew.board[self.rank] = value
        self.crew.meeting.wait()
        gathered = list(self.crew.board)
        self.crew.meeting.wait()
        return gathered

    def decided(self, value: T) -> T:
        return self.gather(value)[0]

    def said(self, text: str | None) -> str | None:
        return next((other for other in self.gather(text) if other is not None), None)


def masters(seed: int) -> dict[str, torch.Tensor]:
    model = Decoder(CONFIG).initialize(torch.Generator().manual_seed(seed))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def words(results: Sequence[object]) -> list[str]:
    assert all(isinstance(result, MantissaError) for result in results), results
    return [str(result) for result in results]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_succeed_or_all_stop_with_the_words_of_one(size: int) -> None:
    def fails_on(bad: set[int], undone: list[int]) -> Callable[[Processes], int]:
        def work(rank: int) -> int:
            if rank in bad:
                raise MantissaError(f"no room on {rank}")
            return rank * 10

        return lambda me: agreed(me, lambda: work(me.rank), undone.append)  # type: ignore[attr-defined]

    undone: list[int] = []
    assert Crew(size).each(fails_on(set(), undone)) == [rank * 10 for rank in range(size)]
    assert undone == []
    last = size - 1
    assert words(Crew(size).each(fails_on({last}, undone))) == [f"no room on {last}"] * size
    assert sorted(undone) == [rank * 10 for rank in range(last)]  # what the others had made
    assert words(Crew(size).each(fails_on(set(range(size)), undone))) == ["no room on 0"] * size


def test_one_process_agrees_with_itself() -> None:
    assert ONE_PROCESS.first
    assert ONE_PROCESS.decided("mark") == "mark"
    assert ONE_PROCESS.said(None) is None
    mine = MantissaError("full")

    def work() -> None:
        raise mine

    with pytest.raises(MantissaError) as caught:
        agreed(ONE_PROCESS, work)
    assert caught.value is mine


def test_each_process_loads_and_proves_a_vllm_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    request = Request((5, 6), seed=11, samples=3)

    def work(me: Processes) -> Any:
        engine = VllmEngine(START, KERNELS, processes=me)
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
    import sys

    install(monkeypatch)
    monkeypatch.setattr(SecondFails, "bad", bad)
    monkeypatch.setattr(sys.modules["vllm"], "LLM", SecondFails)
    monkeypatch.setattr("mantissa.rollout.vllm_link.require_vllm", lambda: "0.32.0")

    def work(me: Processes) -> None:
        engine = VllmEngine(START, KERNELS, processes=me)
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

    def work(me: Processes) -> None:
        engine = VllmEngine(START, KERNELS, processes=me)
        try:
            engine.sync(masters(3) if me.first else spoiled, 7)
        finally:
            engine.close()

    said = words(Crew(2).each(work))
    assert said[0] == said[1]
    assert "weight model.norm.weight holds nan" in said[0]
