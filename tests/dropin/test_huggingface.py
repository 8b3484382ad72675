"""transformers.Trainer on a CPU: telemetry of a real GradScaler, and training in fp16 as PrecisionTrainer does."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from launched import torchrun
from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines
from mantissa.training import ScalerConfig
from toys import OverflowsAbove, cross_entropy, data, fragile, mlp, quiet, same, state, trainer_of

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'mantissa-rl[accelerate]'")
from transformers import Trainer, TrainerCallback, TrainingArguments

import huggingface_worker
from mantissa.dropin import MantissaTrainerMixin, PrecisionTrainer, ScalerTelemetry, huggingface

Batches = list[tuple[Tensor, Tensor]]


class Model(nn.Module):
    """A toy network with the signature that Trainer expects: a loss from inputs and labels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class InOrder(Trainer):
    """Trainer on given batches, in order."""

    batches: Batches

    def get_train_dataloader(self) -> DataLoader:
        rows = [{"x": x, "labels": y} for x, y in self.batches]
        return DataLoader(rows, batch_size=1, collate_fn=lambda chosen: chosen[0])


class Scaled(InOrder):
    """With torch's own GradScaler, which Accelerate makes only for accelerators: here one for the CPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)


class Ours(MantissaTrainerMixin, InOrder):
    pass


class At(TrainerCallback):
    """Call ``work`` before the steps that have begun after ``step`` of them are done."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self.work = work

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.work(state.global_step)


def seeded(step: int) -> None:
    if step == 0:  # Trainer draws random numbers before the first batch
        torch.manual_seed(5)


def train(kind: type[Trainer], net: nn.Module, batches: Batches, path: Path, **options: Any) -> Trainer:
    callbacks = options.pop("callbacks", [])
    ours = {k: options.pop(k) for k in ("precision", "scale", "retries", "on_nonfinite", "say") if k in options}
    resume = options.pop("resume", None)
    fixed = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    usual = {"logging_steps": 1, "save_strategy": "no", "lr_scheduler_type": "constant", "max_grad_norm": 0}
    arguments = TrainingArguments(str(path), num_train_epochs=options.pop("epochs", 1), **{**usual, **options, **fixed})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    trainer = kind(model=Model(net), args=arguments, optimizers=(optimizer, None), callbacks=callbacks, **ours)
    trainer.batches = batches
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Trainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def test_telemetry_of_a_real_scaler(tmp_path: Path) -> None:
    """An inf in the second of four steps: GradScaler skips it and halves its scale; log and file both tell."""
    net, trap = fragile()
    telemetry = ScalerTelemetry(tmp_path / "metrics.jsonl", say=quiet)

    def inf_in_the_second(step: int) -> None:
        trap.limit = -1.0 if step == 1 else math.inf

    trainer = train(Scaled, net, data(4), tmp_path, callbacks=[telemetry, At(inf_in_the_second)], logging_steps=2)
    assert logged(trainer, "precision/loss_scale") == [2.0**9, 2.0**9]
    assert logged(trainer, "precision/skipped") == [1, 0]
    assert logged(trainer, "precision/overflow_rate") == [1 / 2, 1 / 4]
    rows = JsonLines(tmp_path / "metrics.jsonl").read()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["precision/skipped"] for row in rows] == [0, 1, 0, 0]
    assert [row["precision/loss_scale"] for row in rows] == [2.0**10, 2.0**9, 2.0**9, 2.0**9]
    assert [row["optim/updates"] for row in rows] == [1, 1, 2, 3]
    first, second = logged(trainer, "loss")
    assert [row.get("train/loss") for row in rows] == [None, first, None, second]


@pytest.mark.parametrize(("asked", "active"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")])
def test_without_a_scaler_there_are_no_figures_of_one(asked: str, active: str, tmp_path: Path) -> None:
    """The third: Accelerate on a CPU computes in fp32 where fp16 was asked, without a word. This is the word."""
    lines: list[str] = []
    telemetry = ScalerTelemetry(tmp_path / "metrics.jsonl", say=lines.append)
    flags = {} if asked == "fp32" else {asked: True}
    net = nn.Sequential(nn.Linear(6, 3))
    trainer = train(InOrder, net, data(2), tmp_path, callbacks=[telemetry], **flags)
    assert lines == [
        f"precision: {asked} asked, {active} active; no loss scaler, so no scale and no overflows to report"
    ]
    rows = JsonLines(tmp_path / "metrics.jsonl").read()
    assert [(row["precision/requested"], row["precision/format"]) for row in rows] == [(asked, active)] * 2
    assert not [key for row in (*rows, *trainer.state.log_history) for key in row if "scale" in key or "skip" in key]


def test_attached_telemetry_comes_before_the_reporters(tmp_path: Path) -> None:
    seen: list[float] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                seen.append(logs.get("precision/loss_scale"))

    class Attached(Scaled):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            ScalerTelemetry(say=quiet).attach(self)
            return super().train(*args, **kwargs)

    train(Attached, mlp(), data(2), tmp_path, callbacks=[Reporter()])
    assert seen == [2.0**10] * 2


def reference(net: nn.Module, batches: Batches, precision: str = "fp16", **options: Any) -> Any:
    trainer = trainer_of(net, precision, **options)
    trainer.losses = [trainer.step(batch, cross_entropy).loss.item() for batch in batches]
    return trainer


@pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 4), ("bf16", 1), ("fp16", 4)])
def test_training_is_that_of_precision_trainer_to_the_last_bit(precision: str, accumulate: int, tmp_path: Path) -> None:
    ours, oracle, batches = mlp(dropout=0.3), mlp(dropout=0.3), data(8)
    options = {"gradient_accumulation_steps": accumulate, "max_grad_norm": 0.5, "precision": precision, "say": quiet}
    trainer = train(Ours, ours, batches, tmp_path, callbacks=[At(seeded)], **options)
    torch.manual_seed(5)
    expected = reference(oracle, batches, precision, accumulate=accumulate, max_grad_norm=0.5)
    assert same(state(ours), state(oracle))
    assert trainer.outcome.loss.item() == pytest.approx(expected.losses[-1], rel=1e-6)
    assert logged(trainer, "grad_norm")[-1] == pytest.approx(expected.stats()["grad_norm"], rel=1e-6)
    assert logged(trainer, "optim/updates")[-1] == 8 / accumulate


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_repeats_the_window_and_loses_nothing(accumulate: int, tmp_path: Path) -> None:
    (ours, trap), (oracle, other) = fragile(), fragile()
    trap.limit = other.limit = 40.0 / accumulate
    scale, batches = ScalerConfig(initial=2.0**10), data(4)
    options = {"gradient_accumulation_steps": accumulate, "scale": scale, "say": quiet}
    trainer = train(Ours, ours, batches, tmp_path, callbacks=[At(seeded)], **options)
    torch.manual_seed(5)
    expected = reference(oracle, batches, accumulate=accumulate, scale=scale)
    assert same(state(ours), state(oracle))
    assert sum(logged(trainer, "precision/retries")) >= expected.retried > 0
    assert sum(logged(trainer, "precision/skipped")) == 0
    assert trainer.scaler.scale == expected.scaler.scale < 2.0**10


def test_an_inf_costs_one_step_and_holds_the_schedule(tmp_path: Path) -> None:
    (ours, trap), (oracle, _) = fragile(dropout=0.0), fragile(dropout=0.0)

    def inf_in_the_second(step: int) -> None:
        trap.limit = -1.0 if step == 1 else math.inf

    batches = data(4)
    options = {"lr_scheduler_type": "linear", "retries": 0, "say": quiet}
    trainer = train(Ours, ours, batches, tmp_path, callbacks=[At(inf_in_the_second)], **options)
    expected = trainer_of(oracle, "fp16", scale=ScalerConfig(initial=2.0**15))  # 2^16 and 2^15 round alike here
    expected.scheduler = torch.optim.lr_scheduler.LambdaLR(expected.optimizer, lambda n: 1 - n / 4)
    for batch in (batches[0], *batches[2:]):
        expected.step(batch, cross_entropy)
    assert same(state(ours), state(oracle))
    assert logged(trainer, "precision/skipped") == [0, 1, 0, 0]
    assert logged(trainer, "precision/loss_scale") == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert math.isnan(logged(trainer, "grad_norm")[1])
    assert trainer.state.global_step == 4


def test_a_nan_loss_with_finite_gradients_is_skipped_wherever_in_its_window(tmp_path: Path) -> None:
    class Poisoned(Ours):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            seen.append(1)
            return loss + (math.nan if len(seen) == 3 else 0.0)

    (ours, _), (oracle, _), seen, batches = fragile(dropout=0.0), fragile(dropout=0.0), [], data(6)
    trainer = train(Poisoned, ours, batches, tmp_path, gradient_accumulation_steps=2, say=quiet)
    expected = trainer_of(oracle, "fp16", accumulate=2, scale=ScalerConfig(initial=2.0**15))
    for batch in (*batches[:2], *batches[4:]):
        expected.step(batch, cross_entropy)
    assert logged(trainer, "precision/skipped") == [0, 1, 0]
    assert same(state(ours), state(oracle))


def test_telemetry_writes_the_file_of_our_trainer_too(tmp_path: Path) -> None:
    net, trap = fragile()
    lines: list[str] = []
    telemetry = ScalerTelemetry(tmp_path / "metrics.jsonl", say=lines.append)

    def inf_in_the_second(step: int) -> None:
        trap.limit = -1.0 if step == 1 else math.inf

    options = {"retries": 1, "say": quiet, "logging_steps": 3, "callbacks": [telemetry, At(inf_in_the_second)]}
    trainer = train(Ours, net, data(3), tmp_path, **options)
    rows = JsonLines(tmp_path / "metrics.jsonl").read()
    assert [row["precision/format"] for row in rows] == ["fp16"] * 3
    assert [row["precision/overflows"] for row in rows] == [0, 2, 0]
    assert [row["precision/retries"] for row in rows] == [0, 1, 0]
    assert [row["precision/skipped"] for row in rows] == [0, 1, 0]
    assert [row["precision/loss_scale"] for row in rows] == [2.0**16, 2.0**15, 2.0**14]
    assert [row["optim/updates"] for row in rows] == [1, 1, 2]
    assert rows[2]["train/loss"] == logged(trainer, "loss")[0]
    assert logged(trainer, "precision/overflows") == [2]
    assert lines == []  # it is the trainer that tells its precision


def test_a_resumed_training_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """Trainer restores torch's generators, so with dropout, too."""
    options = {"scale": ScalerConfig(initial=2.0**8, growth_interval=3), "say": quiet, "epochs": 2}
    whole, resumed, batches = mlp(dropout=0.3), mlp(dropout=0.3), data(4)
    first = train(Ours, whole, batches, tmp_path, save_strategy="steps", save_steps=2, **options)
    again = train(Ours, resumed, batches, tmp_path, resume=str(tmp_path / "checkpoint-6"), **options)
    assert same(state(resumed), state(whole))
    assert again.scaler.state_dict() == first.scaler.state_dict()
    assert again.scaler.scale == 2.0**10
    assert logged(again, "optim/updates") == logged(first, "optim/updates")


def test_resumed_in_another_precision_it_has_a_fresh_scale(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "epochs": 2}
    train(Ours, mlp(), data(2), tmp_path, precision="bf16", say=quiet, **options)
    said: list[str] = []
    path = str(tmp_path / "checkpoint-2")
    again = train(Ours, mlp(), data(2), tmp_path / "fp16", precision="fp16", say=said.append, resume=path, epochs=2)
    assert "checkpoint: written in bf16, goes on in fp16, with a fresh loss scaler" in said
    assert again.scaler.scale == 2.0**16
    assert logged(again, "optim/updates")[-1] == 4


def test_evaluation_computes_in_the_precision(tmp_path: Path) -> None:
    net = nn.Linear(6, 3)
    trainer = train(Ours, net, data(1), tmp_path, precision="bf16", say=quiet)
    x, labels = data(1)[0]
    with torch.no_grad():
        loss, logits, _ = trainer.prediction_step(trainer.model, {"x": x, "labels": labels}, False)
    weight, bias = net.weight.detach().bfloat16().double(), net.bias.detach().bfloat16().double()
    assert torch.equal(logits, F.linear(x.bfloat16().double(), weight, bias).bfloat16())
    assert loss.item() == pytest.approx(F.cross_entropy(logits.float(), labels).item())


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match="leave fp16 and bf16 False there"):
        train(Ours, mlp(), data(1), tmp_path, bf16=True, say=quiet)
    net = nn.Sequential(mlp(), trap := OverflowsAbove())
    trap.limit = -1.0
    with pytest.raises(MantissaError, match=r"the gradient of the output of net\.1"):
        train(Ours, net, data(1), tmp_path, scale=ScalerConfig(initial=1.0), say=quiet)


def test_ranks_repeat_a_window_alike(tmp_path: Path) -> None:
    """Two processes under DDP; one overflows, both repeat, and end as if the scale had been right at once."""
    done = torchrun(2, huggingface_worker.__file__, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    ends = {}
    for name in ("troubled", "calm"):
        first, second = (torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1))
        assert same(first["weights"], second["weights"])
        assert (first["retries"], first["scale"]) == (second["retries"], second["scale"])
        ends[name] = first
    assert ends["troubled"]["retries"][0] >= 2
    assert ends["calm"]["retries"] == [0, 0]
    for key, value in ends["troubled"]["weights"].items():
        torch.testing.assert_close(value, ends["calm"]["weights"][key], rtol=2e-3, atol=1e-4)


def test_a_group_that_a_callback_adds_is_unscaled_and_retried(tmp_path: Path) -> None:
    """As by PrecisionTrainer with the same groups, in a run whose scale overflows in the new layer alone."""
    batches, late = data(4), [0]

    def made() -> tuple[nn.Sequential, torch.optim.Optimizer, Callable[[int], None], list[Any]]:
        net, scaler = mlp(), list[Any]()
        net[0].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)

        def unfreeze(step: int) -> None:
            if step == 2:
                net[0].requires_grad_(True)
                above = torch.full_like(net[0].bias, math.inf)
                net[0].bias.register_hook(lambda grad: above if scaler[0].scale > 2.0**9 else grad)
                optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.02})

        return net, optimizer, unfreeze, scaler

    options = {"scale": ScalerConfig(initial=2.0**10), "say": quiet}
    ours, optimizer, unfreeze, scaler = made()
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        dataloader_pin_memory=False, lr_scheduler_type="constant", max_grad_norm=0, logging_steps=1,
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = Ours(
        model=Model(ours), args=arguments, optimizers=(optimizer, constant), callbacks=[At(unfreeze)],
        precision="fp16", **options,
    )  # fmt: skip
    scaler.append(trainer.scaler)
    trainer.batches = batches
    trainer.train()
    other, same_optimizer, unfreeze, scaler = made()
    oracle = PrecisionTrainer(other, same_optimizer, "fp16", **options)
    scaler.append(oracle.scaler)
    for step, batch in enumerate(batches):
        unfreeze(step)
        late[0] += oracle.step(batch, cross_entropy).overflows
    assert late[0] == 1
    assert sum(logged(trainer, "precision/retries")) == 1
    assert same(state(ours), state(other))


def test_a_scale_changed_between_a_windows_batches_is_refused(tmp_path: Path) -> None:
    class Meddles(Ours):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            self.scaler.load_state_dict({"scale": 4.0, "clean_steps": 0})
            return loss

    net = mlp()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(MantissaError, match=r"loss scale was 65536 .* and is 4 now"):
        train(Meddles, net, data(2), tmp_path, precision="fp16", gradient_accumulation_steps=2, say=quiet)
    assert all(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize(
    ("fsdp", "deepspeed", "gpus"),
    [(False, False, 0), (False, False, 1), (True, False, 1), (False, True, 0), (False, False, 2)],
)
def test_where_one_process_holds_no_whole_model_or_several_copies_it_is_refused(
    fsdp: bool, deepspeed: bool, gpus: int
) -> None:
    arguments = types.SimpleNamespace(fp16=False, bf16=False, n_gpu=gpus)
    asked = types.SimpleNamespace(args=arguments, is_fsdp_enabled=fsdp, is_deepspeed_enabled=deepspeed)
    if not (fsdp or deepspeed) and gpus < 2:
        huggingface._check_trainer(asked)
        return
    with pytest.raises(MantissaError, match="not FSDP, DeepSpeed or DataParallel"):
        huggingface._check_trainer(asked)
