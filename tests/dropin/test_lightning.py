"""The Lightning plugin in real fits on a CPU: as PrecisionTrainer to the last bit, overflows, clipping, resuming."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from launched import torchrun
from mantissa.base.errors import MantissaError
from mantissa.training import ScalerConfig
from toys import Batch, OverflowsAbove, cross_entropy, data, fragile, mlp, quiet, same, state, trainer_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Lightning's own, at import
    pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install 'mantissa-rl[lightning]'")
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import Precision

import lightning_worker
from mantissa.dropin import MantissaPrecision, PrecisionTrainer

pytestmark = [
    # Lightning speaks to torch's pytree in a way that torch 2.13 deprecates.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    # Advice about speed: these loaders have four batches of eight rows.
    pytest.mark.filterwarnings("ignore:.*does not have many workers which may be a bottleneck"),
]


class Seed(pl.Callback):
    """Lightning draws random numbers before the first batch; seeded there, dropout is the oracle's."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 0:
            torch.manual_seed(5)


class Module(pl.LightningModule):
    """The toy network under Lightning; ``seen`` notes what hooks and schedule saw."""

    def __init__(self, net: nn.Module, manual: bool = False, manual_clip: float = 0.0) -> None:
        super().__init__()
        self.net = net
        self.automatic_optimization = not manual
        self.manual_clip = manual_clip
        self.seen: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Batch, index: int) -> Tensor | None:
        loss = cross_entropy(self.net, batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if self.manual_clip:
            self.clip_gradients(optimizer, self.manual_clip, "norm")
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.net.parameters()])))
        self.rates.append(optimizer.param_groups[0]["lr"])


def loader(batches: list[Batch]) -> DataLoader:
    return DataLoader(batches, batch_size=None)


def fit(module: pl.LightningModule, batches: list[Batch], path: Path, plugin: Any, **options: Any) -> pl.Trainer:
    checkpoint = options.pop("ckpt_path", None)
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        plugins=[plugin],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        **options,
    )
    trainer.fit(module, loader(batches), ckpt_path=checkpoint)
    return trainer


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def reference(net: nn.Module, batches: list[Batch], precision: str = "fp16", **options: Any) -> Any:
    """PrecisionTrainer with the same optimiser, schedule and batches: the oracle."""
    trainer = trainer_of(net, precision, **options)
    trainer.scheduler = halving(trainer.optimizer)
    for batch in batches:
        trainer.step(batch, cross_entropy)
    return trainer


@pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 1), ("bf16", 1), ("fp16", 1), ("fp16", 3)])
def test_a_fit_is_that_of_precision_trainer_to_the_last_bit(precision: str, accumulate: int, tmp_path: Path) -> None:
    ours, oracle, batches = mlp(dropout=0.3), mlp(dropout=0.3), data(6)
    plugin = MantissaPrecision(precision, say=quiet)
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": accumulate}
    fit(Module(ours), batches, tmp_path, plugin, callbacks=[Seed()], **options)
    torch.manual_seed(5)
    trainer = reference(oracle, batches, precision, max_grad_norm=0.5, accumulate=accumulate)
    assert same(state(ours), state(oracle))
    assert plugin.outcome.grad_norm == trainer.stats()["grad_norm"]
    assert (plugin.scaler.scale, plugin.updates, plugin.steps) == (trainer.scaler.scale, *[6 // accumulate] * 2)
    assert plugin.role.active.name == precision


def test_an_overflow_repeats_the_batch_and_loses_nothing(tmp_path: Path) -> None:
    """The trap overflows at the first scale and not at the fourth; dropout and batch norm are put back for each try."""
    (ours, trap), (oracle, other) = fragile(), fragile()
    trap.limit = other.limit = 40.0
    scale, batches = ScalerConfig(initial=2.0**10), data(4)
    plugin = MantissaPrecision("fp16", scale=scale, say=quiet)
    trainer = fit(Module(ours), batches, tmp_path, plugin, callbacks=[Seed()])
    torch.manual_seed(5)
    expected = reference(oracle, batches, scale=scale)
    assert same(state(ours), state(oracle))
    assert plugin.retried == expected.retried > 0
    assert (plugin.skipped, plugin.updates, trainer.global_step) == (0, 4, 4)
    assert plugin.scaler.scale == expected.scaler.scale < 2.0**10


class Inf(pl.Callback):
    """Puts an inf into the loss's gradient of one batch, at whatever scale."""

    def __init__(self, trap: OverflowsAbove, batch: int) -> None:
        self.trap, self.batch = trap, batch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.trap.limit = -1.0 if index == self.batch else math.inf


def test_an_inf_costs_one_step_and_holds_the_schedule(tmp_path: Path) -> None:
    """Skipped: no hook, no weight, no rate, no running statistic moves, and the others go on as without that batch."""
    (ours, trap), (oracle, _) = fragile(dropout=0.0), fragile(dropout=0.0)
    plugin = MantissaPrecision("fp16", retries=0, say=quiet)
    module, batches = Module(ours), data(4)
    trainer = fit(module, batches, tmp_path, plugin, callbacks=[Inf(trap, 1)])
    half = ScalerConfig(initial=2.0**15)  # the scale after the overflow; 2^16 and 2^15 round alike here
    reference(oracle, [batches[0], *batches[2:]], scale=half)
    assert same(state(ours), state(oracle))
    assert module.rates == [0.05, 0.025, 0.0125]
    assert (plugin.steps, plugin.updates, plugin.skipped, trainer.global_step) == (4, 3, 1, 4)
    assert plugin.scaler.scale == 2.0**15


def test_metrics_tell_of_the_skipped_step(tmp_path: Path) -> None:
    net, trap = fragile()
    plugin = MantissaPrecision("fp16", retries=1, say=quiet)
    trainer = fit(Module(net), data(2), tmp_path, plugin, callbacks=[Inf(trap, 1)])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert math.isnan(metrics.pop("optim/grad_norm"))
    assert metrics == {
        "precision/loss_scale": 2.0**15,  # of the last try
        "precision/overflows": 2,
        "precision/retries": 1,
        "precision/skipped": 1,
        "precision/max_scaled_grad": math.inf,
        "optim/updates": 1,
    }


def test_an_overflow_in_a_window_skips_the_window(tmp_path: Path) -> None:
    net, trap = fragile(dropout=0.0)
    plugin = MantissaPrecision("fp16", say=quiet)
    before = state(net)
    fit(Module(net), data(2), tmp_path, plugin, accumulate_grad_batches=2, callbacks=[Inf(trap, 0)])
    assert same(state(net), before)
    assert (plugin.steps, plugin.skipped, plugin.outcome.overflows) == (1, 1, 1)


@pytest.mark.parametrize(("accumulate", "poisoned", "manual"), [(2, 2, False), (2, 3, False), (1, 2, True)])
def test_a_nan_loss_with_finite_gradients_is_skipped_wherever_in_its_window(
    accumulate: int, poisoned: int, manual: bool, tmp_path: Path
) -> None:
    class Poisoned(Module):
        def on_before_backward(self, loss: Tensor) -> None:
            with torch.no_grad():
                loss.add_(math.nan if len(seen) == poisoned else 0.0)
            seen.append(1)

    (ours, _), (oracle, _), seen, batches = fragile(dropout=0.0), fragile(dropout=0.0), [], data(6)
    plugin = MantissaPrecision("fp16", say=quiet)
    options = {} if manual else {"accumulate_grad_batches": accumulate}
    fit(Poisoned(ours, manual=manual), batches, tmp_path, plugin, **options)
    expected = trainer_of(oracle, "fp16", accumulate=accumulate, scale=ScalerConfig(initial=2.0**15))
    if not manual:
        expected.scheduler = halving(expected.optimizer)
    for index, batch in enumerate(batches):
        if index // accumulate != poisoned // accumulate:
            expected.step(batch, cross_entropy)
    assert (plugin.steps, plugin.skipped) == (6 // accumulate, 1)
    assert same(state(ours), state(oracle))


def test_a_nan_that_no_scale_cures_stops_and_names_the_module(tmp_path: Path) -> None:
    net, trap = fragile()
    trap.limit = -1.0
    plugin = MantissaPrecision("fp16", scale=ScalerConfig(initial=2.0), say=quiet)
    with pytest.raises(MantissaError, match=r"which is the floor.*the gradient of the output of net"):
        fit(Module(net), data(1), tmp_path, plugin)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_bounds_unscaled_gradients(algorithm: str, tmp_path: Path) -> None:
    """One step of plain SGD moves the weights by lr x the clipped gradient; hooks saw it unscaled and whole."""
    net = mlp()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    module = Module(net)
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    fit(module, data(1), tmp_path, MantissaPrecision("fp16", say=quiet), **options)
    moved = [(before[name] - p.detach()) / 0.05 for name, p in net.named_parameters()]
    order = 2.0 if algorithm == "norm" else math.inf
    assert float(torch.nn.utils.get_total_norm(moved, order)) == pytest.approx(0.01, rel=1e-4)
    plain = mlp()
    cross_entropy(plain, data(1)[0]).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    assert module.seen == [pytest.approx(expected, rel=1e-2)]  # fp32's norm, which fp16 meets to three digits


def test_a_bound_holds_for_the_step_it_was_asked_for(tmp_path: Path) -> None:
    class First(Module):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if self.global_step == 0:
                self.clip_gradients(optimizer, 1e-3, "norm")

    ours, oracle, batches = mlp(), mlp(), data(2)
    fit(First(ours), batches, tmp_path, MantissaPrecision("fp16", say=quiet))
    trainer = reference(oracle, batches[:1], max_grad_norm=1e-3)
    trainer.optimizer_step.max_grad_norm = math.inf
    trainer.step(batches[1], cross_entropy)
    assert same(state(ours), state(oracle))


def test_manual_optimisation_is_scaled_clipped_and_skipped_too(tmp_path: Path) -> None:
    (ours, trap), (oracle, _) = fragile(dropout=0.0), fragile(dropout=0.0)
    plugin = MantissaPrecision("fp16", say=quiet)
    batches = data(3)
    fit(Module(ours, manual=True, manual_clip=0.3), batches, tmp_path, plugin, callbacks=[Inf(trap, 1)])
    trainer = trainer_of(oracle, "fp16", max_grad_norm=0.3, scale=ScalerConfig(initial=2.0**15))
    for batch in (batches[0], batches[2]):
        trainer.step(batch, cross_entropy)
    assert same(state(ours), state(oracle))
    assert (plugin.updates, plugin.skipped) == (2, 1)


def test_manual_steps_in_one_training_step_see_each_others_weights(tmp_path: Path) -> None:
    """Autocast casts a weight once for each context, and the whole of ``training_step`` is one."""

    class Twice(Module):
        def training_step(self, batch: Batch, index: int) -> None:
            for _ in range(2):
                super().training_step(batch, index)

    ours, oracle, batches = mlp(), mlp(), data(2)
    fit(Twice(ours, manual=True), batches, tmp_path, MantissaPrecision("fp16", say=quiet))
    trainer = trainer_of(oracle, "fp16")
    for batch in batches:
        trainer.step(batch, cross_entropy)
        trainer.step(batch, cross_entropy)
    assert same(state(ours), state(oracle))


def test_a_resumed_fit_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    scale = ScalerConfig(initial=2.0**8, growth_interval=3)  # grows in the second epoch only if steps carry over
    whole, half, batches = mlp(), mlp(), data(4)
    plugin = MantissaPrecision("fp16", scale=scale, say=quiet)
    fit(Module(whole), batches, tmp_path, plugin, max_epochs=2)
    saved = tmp_path / "half.ckpt"
    fit(Module(half), batches, tmp_path, MantissaPrecision("fp16", scale=scale, say=quiet)).save_checkpoint(saved)
    resumed, again = mlp(seed=7), MantissaPrecision("fp16", scale=scale, say=quiet)
    fit(Module(resumed), batches, tmp_path, again, max_epochs=2, ckpt_path=saved)
    assert same(state(resumed), state(whole))
    assert again.state_dict() == plugin.state_dict()
    assert again.scaler.scale == 2.0**10


def test_a_checkpoint_of_another_format_starts_a_fresh_scaler_and_says_so(tmp_path: Path) -> None:
    saved = tmp_path / "bf16.ckpt"
    fit(Module(mlp()), data(2), tmp_path, MantissaPrecision("bf16", say=quiet)).save_checkpoint(saved)
    lines: list[str] = []
    plugin = MantissaPrecision("fp16", say=lines.append)
    fit(Module(mlp()), data(2), tmp_path, plugin, max_epochs=2, ckpt_path=saved)
    assert (plugin.scaler.scale, plugin.updates) == (2.0**16, 4)
    assert "written in bf16, goes on in fp16" in lines[-1]
    assert lines[0].startswith("precision: fp16 asked, fp16 active, simulated")


def test_validation_computes_in_the_precision(tmp_path: Path) -> None:
    outputs = []

    class Validated(Module):
        def validation_step(self, batch: Batch, index: int) -> None:
            outputs.append(self.net(batch[0]))

    net = nn.Linear(6, 3)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    trainer = pl.Trainer(plugins=[MantissaPrecision("bf16", say=quiet)], **options)
    trainer.validate(Validated(net), loader(data(1)), verbose=False)
    rounded = net.weight.bfloat16().double(), net.bias.bfloat16().double()
    expected = torch.nn.functional.linear(data(1)[0][0].bfloat16().double(), *rounded).bfloat16()
    assert torch.equal(outputs[0], expected)


def test_what_it_refuses(tmp_path: Path) -> None:
    class Two(Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(MantissaError, match="2 optimisers, and one loss scale serves one"):
        fit(Two(mlp(), manual=True), data(1), tmp_path, MantissaPrecision("fp16", say=quiet))
    with pytest.raises(MantissaError, match="loss scale 'dynamo'"):
        fit(Module(mlp()), data(1), tmp_path, MantissaPrecision("fp16", scale="dynamo", say=quiet))
    with pytest.raises(MantissaError, match="one device or DDP, not a model that is a Linear"):
        MantissaPrecision("fp16", say=quiet).connect(nn.Linear(2, 2), [], [])
    with pytest.raises(MantissaError, match="no model is connected yet"):
        MantissaPrecision("fp16", say=quiet).forward_context()


def test_ranks_decide_alike(tmp_path: Path) -> None:
    """Two processes under Lightning's DDP; rank 1 alone overflows, then meets an inf: both retry, and both skip."""
    done = torchrun(2, lightning_worker.__file__, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert same(first["weights"], second["weights"])
    assert first["told"] == second["told"]
    kinds = [kind for kind, _, _ in first["told"]]
    assert kinds == ["stepped", "stepped", "retried", "skipped"]
    assert first["state"] == second["state"]
    assert (first["state"]["updates"], first["state"]["skipped"]) == (3, 1)


class Unfreezes(BaseFinetuning):
    """The last layer first; the others join its optimiser in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(list(pl_module.net[:-1]))

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(list(pl_module.net[:-1]), optimizer, lr=0.02)


class Head(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


@pytest.mark.filterwarnings("ignore:.*trainable parameters.*:UserWarning")  # Lightning's, of the frozen epoch
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist.*")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_layers_unfrozen_by_lightnings_own_callback_are_those_of_precision_trainer(
    precision: str, tmp_path: Path
) -> None:
    ours = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    plain, oracle = copy.deepcopy(ours), copy.deepcopy(ours)
    batches, scale = data(3), ScalerConfig(initial=2.0**12)
    plugin = MantissaPrecision(precision, scale=scale, say=quiet)
    options = {"gradient_clip_val": 0.3, "max_epochs": 2, "callbacks": [Unfreezes()]}
    fit(Head(ours), batches, tmp_path, plugin, **options)
    fit(Head(plain), batches, tmp_path, Precision(), **options)  # Lightning's own, in fp32
    for name, value in state(ours).items():
        torch.testing.assert_close(value, state(plain)[name], rtol=0.02, atol=0.003)
    oracle[0].requires_grad_(False)
    optimizer = torch.optim.SGD(oracle[2].parameters(), lr=0.05, momentum=0.9)
    trainer = PrecisionTrainer(oracle, optimizer, precision, scale=scale, max_grad_norm=0.3, say=quiet)
    for epoch in range(2):
        if epoch == 1:
            oracle[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(oracle[0].parameters()), "lr": 0.02})
        for batch in batches:
            trainer.step(batch, cross_entropy)
    assert same(state(ours), state(oracle))
    assert plugin.outcome.grad_norm == trainer.latest.grad_norm


class Meddles(pl.Callback):
    """Calls ``work(trainer)`` before the batch of this index."""

    def __init__(self, index: int, work: Any) -> None:
        self.index, self.work = index, work

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == self.index:
            self.work(trainer)


def test_what_cannot_be_followed_in_a_fit_is_refused(tmp_path: Path) -> None:
    def other_scale(trainer: Any) -> None:
        trainer.precision_plugin.scaler.scale = 64.0

    def other_optimizer(trainer: Any) -> None:
        trainer.strategy.optimizers = [torch.optim.SGD(trainer.model.parameters(), lr=0.05)]

    def cast(trainer: Any) -> None:
        trainer.model.net.half()

    for work, message in (
        (other_scale, "loss scale was 65536 .* and is 64 now"),
        (other_optimizer, "the optimiser was replaced while fitting"),
        (cast, "master weights are fp32"),
    ):
        net = mlp()
        before = [parameter.detach().half() for parameter in net.parameters()]
        plugin, callbacks = MantissaPrecision("fp16", say=quiet), [Meddles(1, work)]
        with pytest.raises(MantissaError, match=message):
            fit(Module(net), data(2), tmp_path, plugin, callbacks=callbacks, accumulate_grad_batches=2)
        assert all(torch.equal(now.half(), then) for now, then in zip(net.parameters(), before, strict=True))
