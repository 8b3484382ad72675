"""Batches ahead of their step: sampled beside learning, and kept in a checkpoint.

In turn, the learner waits for the sampler and the sampler for the learner. Ahead, step k is sampled by the weights
after step ``max(0, k - 1 - behind)`` while the learner works on the steps before k: its completions are old, by a lag
that is known and bounded. Nothing else changes: the learner's own log-probs are taken under its weights at the update,
the rollout's are those of the weights that sampled, and the correction works on their ratio, which now holds the lag
beside the gap.

The schedule is fixed: with whatever weights are newest when a sample begins, no run could be repeated. What it costs is
waiting where the two are unequal: a step takes as long as the slower of sampling and learning.

``behind`` counts RL steps, ``rollout.max_policy_lag`` policy versions, that is optimiser steps: a batch is learned from
in ``optimizer.updates_per_batch`` of them, so ``behind = max_policy_lag // updates_per_batch``. A skipped step makes no
version, so the lag is at most that, and is checked for every completion.

A checkpoint after step k holds the batches of the ``behind`` steps after it, for which the loop waits: the weights that
made them are gone. The one batch that the checkpoint's own weights sample is not in it; a resume samples it again.

One Python thread samples: on a CPU with a third of torch's threads (vLLM's processes then get that third), on a GPU on
a stream of its own. Evaluation uses the same engine, between two batches.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mantissa.base.bounds import boundary, count, number
from mantissa.base.errors import MantissaError
from mantissa.rl.batch import Batch, Collector, Completions, Sample, Sampler, SyncSource, Weights
from mantissa.rollout import RolloutEngine
from mantissa.tasks import Problem, Reward


def shares(threads: int) -> tuple[int, int]:
    """Of ``threads`` of a CPU, the learner's and the sampler's: a third for the sampler, and one at least for each."""
    sampler = max(1, threads // 3)
    return max(1, threads - sampler), sampler


@dataclass(frozen=True)
class _Order:
    """A batch to be sampled by a snapshot of the weights; ``ready`` is when the snapshot is (on a GPU)."""

    step: int
    weights: Weights
    version: int
    ready: torch.cuda.Event | None
    result: Future[Batch]


class AsyncSource(SyncSource):
    """Samples ``behind`` steps ahead, to ``last`` at most, in a thread; see the module for the schedule."""

    def __init__(
        self, collector: Collector, engine: RolloutEngine, behind: int, last: int, device: torch.device
    ) -> None:
        assert behind >= 1
        super().__init__(collector, engine)
        self._behind, self._last = behind, last
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._batches: dict[int, Future[Batch]] = {}
        self._engine_lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="rollout", daemon=True)

    def start(self, step: int, weights: Weights, version: int, ahead: Sequence[Batch]) -> None:
        if self._stream is None:
            torch.set_num_threads(shares(self._threads)[0])
        held, due = [batch.step for batch in ahead], list(range(step + 1, min(step + self._behind, self._last) + 1))
        if held and held != due:  # none: the run begins, or its guard has fallen back; else the weights are gone
            raise MantissaError(
                f"the checkpoint of step {step} holds batches of the steps {held} and not those that were sampled "
                f"ahead, {due}: it is damaged, or another run's; delete it to go on from an earlier one"
            )
        for batch in ahead:
            self._batches[batch.step] = Future()
            self._batches[batch.step].set_result(batch)
        self._thread.start()
        self._order(range(step + len(ahead) + 1, step + self._behind + 2), weights, version)

    def take(self, step: int) -> Batch:
        return self._batches.pop(step).result()

    def again(self, position: int) -> None:
        raise AssertionError("a batch that was sampled ahead is not sampled again")

    def hand_over(self, step: int, weights: Weights, version: int) -> None:
        self._order([step + self._behind + 1], weights, version)

    def pending(self, step: int) -> list[Batch]:
        return [self._batches[later].result() for later in sorted(self._batches) if later <= step + self._behind]

    @contextmanager
    def engine(self, weights: Weights, version: int) -> Iterator[None]:
        with self._engine_lock:
            self._load(weights, version, self._event())
            with self._on_stream():
                yield

    def close(self) -> None:
        self._stopped.set()
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join()
        if self._stream is None:
            torch.set_num_threads(self._threads)

    def _order(self, steps: Sequence[int], weights: Weights, version: int) -> None:
        steps = [step for step in steps if step <= self._last]
        if not steps:
            return
        snapshot = {name: weight.detach().clone() for name, weight in weights.items()}  # the masters go on changing
        event = self._event()
        for step in steps:
            self._batches[step] = Future()
            self._orders.put(_Order(step, snapshot, version, event, self._batches[step]))

    def _work(self) -> None:
        """The thread: one order after another. An error goes to whoever asks for the batch, and to those after it."""
        if self._stream is None:
            torch.set_num_threads(shares(self._threads)[1])  # of this thread; the learner's stay as they are
        failure: BaseException | None = None
        while (order := self._orders.get()) is not None and not self._stopped.is_set():
            if failure is None:
                try:
                    with self._engine_lock:
                        self._load(order.weights, order.version, order.ready)
                        with self._on_stream():
                            batch = self._collector.collect(order.step, order.version)
                    order.result.set_result(batch)
                    continue
                except BaseException as error:  # noqa: BLE001 - re-raised in the learner's thread, where it is awaited
                    failure = error
            order.result.set_exception(failure)

    def _load(self, weights: Weights, version: int, ready: torch.cuda.Event | None) -> None:
        if self._engine.version == version:
            return
        with self._on_stream():
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            self._engine.sync(weights, version)

    def _event(self) -> torch.cuda.Event | None:
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


# in a checkpoint


def pack(batches: Iterable[Batch]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Batches as tensors and plain values, for a checkpoint. ``seconds`` are left out: a resume spends none."""
    tensors: dict[str, Tensor] = {}
    plain = []
    for batch in batches:
        packed = Completions.of([s.prompt for s in batch.samples], [s.completion for s in batch.samples])
        tensors |= {f"ahead/{batch.step}/{name}": tensor for name, tensor in packed.tensors.items()}
        plain.append(
            {
                "step": batch.step,
                "version": batch.version,
                "position": batch.position,
                "indices": list(batch.indices),
                "finish_reasons": packed.finish_reasons,
                "keys": packed.keys,
                "rewards": [[r.value, r.correct, r.error, dict(r.parts), r.terms, r.found] for r in batch.rewards],
                "metrics": dict(batch.metrics),
            }
        )
    return tensors, plain


def unpack(
    tensors: Mapping[str, Tensor],
    plain: Sequence[dict[str, Any]],
    problems: Sequence[Problem],
    sampler: Sampler,
    embeddings: int,
) -> list[Batch]:
    """The batches that ``pack`` was given; prompts and texts are made again by the sampler's tokenizer.

    ``embeddings``: the model's vocabulary. ``MantissaError`` where they are not such batches.
    """
    with boundary("checkpoint's batches of later steps", "they are damaged"):
        return [_one_unpacked(tensors, state, problems, sampler, embeddings) for state in plain]


def _one_unpacked(
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    problems: Sequence[Problem],
    sampler: Sampler,
    embeddings: int,
) -> Batch:
    step, version, position = (count(state[name], name) for name in ("step", "version", "position"))
    here = f"ahead/{step}/"
    columns = {name.removeprefix(here): tensor for name, tensor in tensors.items() if name.startswith(here)}
    tokens, lengths, logp = (columns.pop(name) for name in ("tokens", "lengths", "logp"))
    indices, rewards = state["indices"], state["rewards"]
    keys = state.get("keys", [None] * len(lengths))  # those of earlier versions have none
    packed = Completions(tokens, lengths, logp, state["finish_reasons"], version, keys, columns)
    checks = {
        "indices": all(number(index, 0, len(problems) - 1, whole=True) for index in indices),
        "groups": len(indices) > 0 and len(lengths) % len(indices) == 0,
        "rewards": len(rewards) == len(lengths) and all(number(each[0], -math.inf, math.inf) for each in rewards),
        "metrics": all(isinstance(value, (int, float)) for value in state["metrics"].values()),
    }
    wrong = next((name for name, good in checks.items() if not good), None)
    if wrong is None:
        size = len(lengths) // len(indices)
        encoded = [sampler.encode(problems[index]) for index in indices]
        prompts = [prompt for prompt in encoded for _ in range(size)]
        wrong = packed.wrong(prompts, embeddings)
    if wrong is not None:
        raise MantissaError(f"checkpoint's batch of step {step} has wrong {wrong}; it is damaged")
    samples = []
    for place, completion in enumerate(packed.split(prompts)):
        group, text = place // size, sampler.tokenizer.decode(completion.tokens)
        samples.append(Sample(problems[indices[group]], group, prompts[place], completion, text))
    return Batch(step, version, position, indices, samples, [_reward(*each) for each in rewards], state["metrics"], {})


def _reward(
    value: float,
    correct: bool,
    error: str | None,
    parts: dict[str, float],
    terms: Any = (),
    found: bool | None = None,
) -> Reward:
    """A reward as a checkpoint holds it; those of earlier versions lack the terms and what was found."""
    return Reward(value, correct, error, parts, tuple((float(term), float(weight)) for term, weight in terms), found)
