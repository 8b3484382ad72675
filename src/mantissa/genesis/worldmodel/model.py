"""The world model: from a state and the actions taken in it, how probably they succeed and what they gain.

Each member of the ensemble, with hidden width H:

    state  (S) -> Linear H, ReLU, Linear H ------.
    action (A) -> Linear H, ReLU, Linear H, each -+-> Linear 2H -> H, ReLU -> LSTM over the actions -> H
                                                                              `-> success logit, improvement

The value at action t speaks of the actions up to t. Every prefix of a trajectory learns its end, so a plan can be
judged while it is carried out. Loss: binary cross-entropy of the logit (trajectories of unknown outcome count for
nothing there, partial ones as no success) plus Huber's loss of the improvement, each the mean over a trajectory's
prefixes, then over trajectories.

The probability is sigmoid(logit / T) averaged over the members. T makes the negative log-likelihood least on tasks that
no member was trained on (Guo et al., "On Calibration of Modern Neural Networks", ICML 2017). The uncertainty is the
standard deviation of the members' probabilities: members differ by their initial weights alone (Lakshminarayanan et
al., "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles", NeurIPS 2017).

It trains through ``PrecisionTrainer``, one for the model's whole life, so a loss scale found once is kept. Predictions
are fp32, of the master weights as the last training left them: also while another one is at work in its thread.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.base.bounds import LARGEST_SEED, LARGEST_SIZE, boundary, check_values, number
from mantissa.base.errors import MantissaError
from mantissa.dropin import PrecisionTrainer
from mantissa.dropin.environment import FP16TrainingConfig
from mantissa.genesis.worldmodel.buffer import ReplayBuffer, open_buffer
from mantissa.genesis.worldmodel.scores import Array, Scores, auroc, counting, scored
from mantissa.genesis.worldmodel.trajectory import (
    LEAST_DIM,
    Trajectory,
    by_task,
    check_state,
    encode_actions,
    encode_state,
)
from mantissa.guard import GuardConfig
from mantissa.mismatch.intervals import Estimate, student_interval
from mantissa.training.checkpoint import read_file

LONGEST = 32  # actions of a trajectory that are looked at, the last ones
_LARGEST_DIM = 65_536
_TEMPERATURES = np.exp(np.linspace(math.log(0.1), math.log(10), 401))  # a grid fine enough: steps of 1.2%
_KIND = "mantissa world model, version 1"
Source = ReplayBuffer | Path | str | Sequence[Trajectory]


@dataclass(frozen=True)
class Prediction:
    """``success_probability`` in [0, 1], ``expected_improvement`` of the score, ``uncertainty`` (0: members agree)."""

    success_probability: float
    expected_improvement: float
    uncertainty: float


@dataclass(frozen=True)
class HistoryRow:
    """One epoch. ``loss``: mean over its trajectories; ``overflows``: batches whose gradients overflowed at least once;
    ``timestamp``: seconds since 1970, at its end."""

    epoch: int
    loss: float
    timestamp: float
    overflows: int
    batches: int


@dataclass(frozen=True)
class Encoded:
    """N trajectories as tensors: states_ND, actions_NTA (zeros behind each one's end), length_N, success_N (NaN where
    unknown), improvement_N."""

    states: Tensor
    actions: Tensor
    length: Tensor
    success: Tensor
    improvement: Tensor

    def rows(self, index: Tensor) -> Encoded:
        """Some of them, cut to the longest."""
        longest = int(self.length[index].max())
        return Encoded(
            self.states[index], self.actions[index, :longest], self.length[index], self.success[index],
            self.improvement[index],
        )  # fmt: skip


class Member(nn.Module):
    """One network; see the module."""

    def __init__(self, state_dim: int, action_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.state = nn.Sequential(nn.Linear(state_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim))
        self.action = nn.Sequential(nn.Linear(action_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim))
        self.fusion = nn.Sequential(nn.Linear(2 * hidden_dim, hidden_dim), nn.ReLU())
        self.sequence = nn.LSTM(hidden_dim, hidden_dim, batch_first=True)
        self.heads = nn.Linear(hidden_dim, 2)

    def forward(self, states_BS: Tensor, actions_BTA: Tensor) -> Tensor:
        """(B, T, 2): success logit and improvement after each action."""
        state_BTH = self.state(states_BS).unsqueeze(1).expand(-1, actions_BTA.shape[1], -1)
        both_BTH = self.fusion(torch.cat([state_BTH, self.action(actions_BTA)], dim=-1))
        out: Tensor = self.heads(self.sequence(both_BTH)[0])
        return out


class Ensemble(nn.Module):
    """``members`` networks on the same input: (members, B, T, 2)."""

    def __init__(self, state_dim: int, action_dim: int, hidden_dim: int, members: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(Member(state_dim, action_dim, hidden_dim) for _ in range(members))

    def forward(self, states_BS: Tensor, actions_BTA: Tensor) -> Tensor:
        return torch.stack([member(states_BS, actions_BTA) for member in self.members])


def loss_of(model: nn.Module, batch: Encoded) -> Tensor:
    """The sum over members of their losses, fp32; see the module."""
    out_MBT2 = model(batch.states, batch.actions).float()  # the loss is fp32, whatever the format
    prefix_BT = torch.arange(batch.actions.shape[1], device=batch.length.device) < batch.length.unsqueeze(1)
    weight_BT = torch.where(prefix_BT, 1 / batch.length.unsqueeze(1).float(), 0.0)
    known_B = torch.isfinite(batch.success)
    target_MBT = torch.where(known_B, batch.success, 0.0).unsqueeze(1).expand_as(out_MBT2[..., 0])
    success_MBT = F.binary_cross_entropy_with_logits(out_MBT2[..., 0], target_MBT, reduction="none")
    gain_MBT = F.huber_loss(
        out_MBT2[..., 1], batch.improvement.unsqueeze(1).expand_as(out_MBT2[..., 1]), reduction="none"
    )
    of_success = (success_MBT * torch.where(known_B.unsqueeze(1), weight_BT, 0.0)).sum() / known_B.sum().clamp(min=1)
    return of_success + (gain_MBT * weight_BT).sum() / len(batch.length)


class TrainingHistory(list[HistoryRow]):
    """The rows of one training, already done. It may be awaited, which gives it at once: ``await model.train(...)``."""

    def __await__(self) -> Generator[None, None, TrainingHistory]:
        return self
        yield  # what makes this a generator, as __await__ has to be


class WorldModel:
    """``state_dim``, ``action_dim``: of the encoded inputs; ``hidden_dim``: H. ``model_path``: a file of ``save`` to go
    on from, if it exists; else where ``save()`` writes.

    ``buffer``: what ``train`` reads, a buffer, its place (``open_buffer``) or a list. ``precision``: fp32, bf16 or
    fp16; by default what compat's environment says (``ENABLE_FP16_TRAINING``, and the loss scale's four variables:
    without any, fp16). ``backend``, ``fallback``, ``run_dir``, ``guard`` and ``say`` are ``PrecisionTrainer``'s.
    ``members``: of the ensemble. ``calibration``: share of the tasks that only the temperature is fitted to.
    """

    def __init__(
        self,
        state_dim: int = 128,
        action_dim: int = 128,
        hidden_dim: int = 256,
        model_path: Path | str | None = None,
        *,
        buffer: Source | None = None,
        precision: str | None = None,
        members: int = 3,
        seed: int = 0,
        lr: float = 1e-3,
        calibration: float = 0.2,
        backend: Any = "auto",
        fallback: Any = "error",
        device: torch.device | str = "cpu",
        run_dir: Path | str | None = None,
        guard: GuardConfig | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        sizes = {"state_dim": state_dim, "action_dim": action_dim, "hidden_dim": hidden_dim, "members": members}
        expected = f"a whole number from {LEAST_DIM} to {_LARGEST_DIM}"
        checks = {n: (number(v, LEAST_DIM, _LARGEST_DIM, whole=True), expected) for n, v in sizes.items()}
        checks["members"] = (number(members, 1, 64, whole=True), "a whole number from 1 to 64")
        checks["seed"] = (number(seed, 0, LARGEST_SEED, whole=True), "a whole number from 0 on")
        checks["calibration"] = (number(calibration, 0, 0.9), "a share from 0 to 0.9")
        check_values("WorldModel", {**sizes, "seed": seed, "calibration": calibration}, checks)
        self.sizes, self.seed, self.calibration = sizes, seed, calibration
        self.model_path = None if model_path is None else Path(model_path)
        self.buffer: Source | None = open_buffer(buffer) if isinstance(buffer, (str, Path)) else buffer
        self.device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = Ensemble(**sizes).to(self.device)
        config = FP16TrainingConfig.from_environment()
        self.trainer = PrecisionTrainer(
            network, torch.optim.Adam(network.parameters(), lr), precision or config.number_format, max_grad_norm=1.0,
            backend=backend, fallback=fallback, scale=config.scale, retries=4, run_dir=run_dir, guard=guard,
            on_nonfinite="skip", say=say,
        )  # fmt: skip
        self.history: list[HistoryRow] = []
        self.seen_tasks: set[str] = set()
        self.temperature = 1.0
        self._training = threading.Lock()
        self._served: nn.Module = copy.deepcopy(network).eval()
        if self.model_path is not None and self.model_path.exists():
            self.load(self.model_path)

    # learning

    def train(
        self,
        epochs: int = 3,
        batch_size: int = 32,
        source: Source | None = None,
        *,
        progress: Callable[[HistoryRow], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> TrainingHistory:
        """Learn from all of ``source`` (the model's own buffer), whole tasks kept apart for the calibration.

        Returns this call's rows of ``history``; with or without ``await``, they are there when it returns.
        ``train_async`` lets the event loop go on meanwhile. ``cancel``: set by another thread, ends the training after
        the batch at hand; what was learnt until then stays, and is calibrated like any other. One training at a time.
        """
        counted = {"epochs": epochs, "batch_size": batch_size}
        good = {n: (number(v, 1, LARGEST_SIZE, whole=True), "a whole number from 1 on") for n, v in counted.items()}
        check_values("WorldModel.train", counted, good)
        trajectories = self._read(source)
        if not self._training.acquire(blocking=False):
            raise MantissaError("this world model is being trained already: wait for that, or cancel it")
        try:
            learnt, apart = by_task(trajectories, self.calibration, self.seed)
            self.seen_tasks |= {each.task for each in trajectories}
            encoded = self.encode(learnt)
            rows = TrainingHistory()
            for _ in range(epochs):
                row = self._epoch(encoded, batch_size, cancel)
                if row is None:
                    break
                rows.append(row)
                if progress is not None:
                    progress(row)
            self._serve(apart)
            return rows
        finally:
            self._training.release()

    async def train_async(
        self,
        epochs: int = 3,
        batch_size: int = 32,
        source: Source | None = None,
        *,
        progress: Callable[[HistoryRow], None] | None = None,
    ) -> TrainingHistory:
        """``train`` in a thread, while the event loop goes on. Cancelling the task cancels the training, and waits for
        the batch at hand. ``progress`` is called in the event loop's thread."""
        loop, cancel = asyncio.get_running_loop(), threading.Event()

        def told(row: HistoryRow) -> None:
            if progress is not None:
                loop.call_soon_threadsafe(progress, row)

        work = loop.run_in_executor(None, lambda: self.train(epochs, batch_size, source, progress=told, cancel=cancel))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            cancel.set()
            await work
            raise

    def _read(self, source: Source | None) -> list[Trajectory]:
        source = self.buffer if source is None else source
        if source is None:
            raise MantissaError("WorldModel.train: give it trajectories: WorldModel(buffer=...) or train(source=...)")
        if isinstance(source, (str, Path)):
            with open_buffer(source) as opened:
                return self._read(opened)
        # Oldest first, so that the same rows are the same data whatever came in which order before.
        found = source.newest(source.capacity)[::-1] if isinstance(source, ReplayBuffer) else list(source)
        if not found:
            raise MantissaError("there are no trajectories to learn from: store some first")
        return found

    def encode(self, trajectories: Sequence[Trajectory]) -> Encoded:
        """The tensors of trajectories, on the model's device. The outcome goes into the targets and nowhere else."""
        states, actions, length = self._inputs([(t.initial_state, t.actions) for t in trajectories])
        outcomes = [
            math.nan if t.final_outcome == "unknown" else float(t.final_outcome == "success") for t in trajectories
        ]
        success = torch.tensor(outcomes, dtype=torch.float32, device=self.device)
        gained = torch.tensor([t.improvement for t in trajectories], dtype=torch.float32, device=self.device)
        return Encoded(states, actions, length, success, gained)

    def _inputs(self, pairs: Sequence[tuple[Mapping[str, Any], Sequence[str]]]) -> tuple[Tensor, Tensor, Tensor]:
        """States (N, S), actions (N, T, A) and lengths (N): what training and prediction both begin with."""
        dim = self.sizes["action_dim"]
        sequences = [encode_actions(actions, dim, LONGEST) for _, actions in pairs]
        padded = np.zeros((len(pairs), max(map(len, sequences)), dim), np.float32)
        for row, sequence in zip(padded, sequences, strict=True):
            row[: len(sequence)] = sequence
        states = np.stack([encode_state(state, self.sizes["state_dim"]) for state, _ in pairs])
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=self.device)
        return torch.from_numpy(states).to(self.device), torch.from_numpy(padded).to(self.device), lengths

    def _epoch(self, data: Encoded, batch_size: int, cancel: threading.Event | None) -> HistoryRow | None:
        """One epoch in an order that follows from the seed and the count of epochs; None where it was cancelled."""
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * (len(self.history) + 1))
        order = torch.randperm(len(data.length), generator=generator).to(self.device)
        total, overflows, batches = 0.0, 0, order.split(batch_size)
        for index in batches:
            if cancel is not None and cancel.is_set():
                return None
            outcome = self.trainer.step(data.rows(index), loss_of, weight=len(index) / batch_size)
            overflows += outcome.kind in ("retried", "skipped")
            total += float(outcome.loss) * len(index) if outcome.loss is not None else math.nan
        loss = total / len(order) / self.sizes["members"]
        self.history.append(HistoryRow(len(self.history) + 1, loss, time.time(), overflows, len(batches)))
        return self.history[-1]

    def _serve(self, apart: Sequence[Trajectory]) -> None:
        """Predict from now on with what was learnt, at the temperature that suits the tasks kept apart."""
        served = copy.deepcopy(self.trainer.model).eval()
        known = [each for each in apart if each.final_outcome != "unknown"]
        temperature = 1.0
        if known:
            data = self.encode(known)
            logits = _last(served, data.states, data.actions, data.length)[..., 0].double().cpu().numpy()
            success = data.success.double().cpu().numpy()
            temperature = min(_TEMPERATURES, key=lambda t: _nll(_sigmoid(logits / t).mean(0), success))
        self._served, self.temperature = served, float(temperature)

    # predicting

    def predict(self, state: Mapping[str, Any], action: str | Sequence[str]) -> Prediction:
        """What ``action`` does in ``state``; a list is the actions so far, the last of which is the one in question."""
        return self.predict_many([(state, action)])[0]

    def predict_many(self, questions: Sequence[tuple[Mapping[str, Any], str | Sequence[str]]]) -> list[Prediction]:
        """``predict`` for each, in one pass."""
        pairs = [(state, (action,) if isinstance(action, str) else tuple(action)) for state, action in questions]
        for state, actions in pairs:
            check_state(state)
            if not actions or not all(isinstance(action, str) for action in actions):
                raise MantissaError(f"predict: expected an action as text, or a list of them, got {actions!r}")
        if not pairs:
            return []
        served, temperature = self._served, self.temperature
        out_MB2 = _last(served, *self._inputs(pairs)).double().cpu().numpy()
        p_MB = _sigmoid(out_MB2[..., 0] / temperature)
        rows = zip(p_MB.mean(0), out_MB2[..., 1].mean(0), p_MB.std(0), strict=True)
        return [Prediction(*map(float, row)) for row in rows]

    def evaluate(self, trajectories: Sequence[Trajectory]) -> Scores | None:
        """How well it predicts these; None where no outcome is known."""
        found = self.predict_many([(each.initial_state, each.actions) for each in trajectories])
        probability = np.array([each.success_probability for each in found])
        return scored(trajectories, probability, np.array([each.expected_improvement for each in found]))

    # keeping

    def save(self, path: Path | str | None = None) -> Path:
        """Write all of it to one file, atomically; ``path`` None: ``model_path``."""
        path = self.model_path if path is None else Path(path)
        if path is None:
            raise MantissaError("WorldModel.save: name a file, here or as model_path")
        about = {
            "kind": _KIND, "sizes": self.sizes, "temperature": self.temperature, "seen_tasks": sorted(self.seen_tasks),
            "history": [asdict(row) for row in self.history],
        }  # fmt: skip
        return self.trainer.save_checkpoint(path, about)

    def load(self, path: Path | str) -> None:
        """Go on from a file of ``save``; ``MantissaError``, with nothing changed, for another kind or other sizes."""
        about = read_file(path)["extra"]
        with boundary(path, "it is damaged, or no world model; load another file"):
            if about.get("kind") != _KIND:
                raise MantissaError(f"{path} holds no world model; load a file that WorldModel.save wrote")
            sizes, temperature = dict(about["sizes"]), float(about["temperature"])
            history, tasks = [HistoryRow(**row) for row in about["history"]], set(map(str, about["seen_tasks"]))
            if not number(temperature, 1e-6):
                raise ValueError(f"temperature {temperature}")
        if sizes != self.sizes:
            raise MantissaError(f"{path} is a world model of {sizes}, this one is of {self.sizes}: make it so")
        self.trainer.load_checkpoint(path)
        self.history, self.seen_tasks, self.temperature = history, tasks, temperature
        self._served = copy.deepcopy(self.trainer.model).eval()


def stored_sizes(path: Path | str) -> dict[str, int]:
    """The sizes to make a ``WorldModel`` with before it loads ``path``."""
    about = read_file(path)["extra"]
    with boundary(path, "it is damaged, or no world model; load another file"):
        return {name: int(about["sizes"][name]) for name in ("state_dim", "action_dim", "hidden_dim", "members")}


def _last(model: nn.Module, states: Tensor, actions: Tensor, length: Tensor) -> Tensor:
    """(members, B, 2), after each one's last action, fp32."""
    with torch.no_grad():
        out: Tensor = model(states, actions)
    return out[:, torch.arange(len(length), device=length.device), length - 1]


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))  # beyond 60 it is 0 or 1 in float64 anyway


def _nll(p: Any, success: Any) -> float:
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return float(-np.mean(success * np.log(p) + (1 - success) * np.log(1 - p)))


# How well it predicts tasks that it has not seen: trained afresh for each fold, whole tasks left out


@dataclass(frozen=True)
class Validation:
    """What came of it. ``model``, ``baseline``: scores of the out-of-fold predictions. ``gain``: AUROC of the model
    less that of the baseline, with an interval over tasks. ``overflow_rate``: of batches."""

    model: Scores
    baseline: Scores
    gain: Estimate
    overflow_rate: float
    seconds: float


def cross_validate(
    trajectories: Sequence[Trajectory],
    make: Callable[[], WorldModel],
    *,
    folds: int = 5,
    epochs: int = 3,
    batch_size: int = 32,
    seed: int = 0,
) -> Validation:
    """Train ``make()`` on the tasks of all folds but one, predict that one's, for each fold; seeded."""
    known = [each for each in trajectories if each.final_outcome != "unknown"]
    tasks = sorted({each.task for each in known})
    if not 2 <= folds <= len(tasks):
        raise MantissaError(
            f"folds={folds} over {len(tasks)} tasks: expected at least 2 and no more than there are tasks; "
            + (f"--folds {len(tasks)} divides these" if len(tasks) > 1 else "trajectories of more tasks are needed")
        )
    random.Random(seed).shuffle(tasks)
    began, overflows, batches = time.perf_counter(), 0, 0
    rows, predicted, counted, improved = list[Trajectory](), list[float](), list[float](), list[float]()
    for fold in range(folds):
        apart = set(tasks[fold::folds])
        rest = [each for each in known if each.task not in apart]
        held_out = [each for each in known if each.task in apart]
        model = make()
        for row in model.train(epochs, batch_size, rest):
            overflows, batches = overflows + row.overflows, batches + row.batches
        found = model.predict_many([(each.initial_state, each.actions) for each in held_out])
        rate = counting(rest)
        rows += held_out
        predicted += [each.success_probability for each in found]
        improved += [each.expected_improvement for each in found]
        counted += [rate(each) for each in held_out]
    p, q, gained = np.array(predicted), np.array(counted), np.array(improved)
    ours, theirs = scored(rows, p, gained), scored(rows, q, np.zeros(len(q)))
    assert ours is not None, "unknown outcomes were left out"
    assert theirs is not None, "these are the same"
    return Validation(ours, theirs, _gain(rows, p, q), overflows / max(batches, 1), time.perf_counter() - began)


def _gain(rows: Sequence[Trajectory], p: Array, q: Array) -> Estimate:
    """AUROC of p less AUROC of q, with the interval of the jackknife that leaves out one task at a time."""
    success = np.array([each.final_outcome == "success" for each in rows], np.float64)
    task = np.unique([each.task for each in rows], return_inverse=True)[1]
    tasks = int(task.max()) + 1

    def difference(kept: Array) -> float:
        areas = auroc(success[kept], p[kept]), auroc(success[kept], q[kept])
        return float("nan") if None in areas else float(areas[0]) - float(areas[1])  # type: ignore[arg-type]

    value = difference(np.ones(len(rows), bool))
    without = np.array([difference(task != t) for t in range(tasks)])
    if not np.isfinite([value, *without]).all():
        return Estimate(value, None, None, "outcomes are all alike")
    error = float(np.sqrt((tasks - 1) / tasks * np.square(without - without.mean()).sum()))
    return Estimate(value, *student_interval(value, error, tasks - 1), f"jackknife over {tasks} tasks")
