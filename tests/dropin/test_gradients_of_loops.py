"""Every loop on gradients that are unusual: sparse ones, none at all, and such as fp32 cannot square."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.dropin import PrecisionTrainer
from mantissa.dropin.compat import ExtendedFP16Config, ExtendedFP16Trainer
from mantissa.training import ScalerConfig
from toys import quiet, same, state

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # torch's own
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers which may be a bottleneck"),
    pytest.mark.filterwarnings("ignore:FP16 .*:UserWarning"),
    pytest.mark.filterwarnings("ignore:parameters that this training does not change"),  # ``aside``, on purpose
]
FORMATS = ("fp32", "bf16", "fp16")
SCALE = ScalerConfig(initial=2.0**8)
Batch = tuple[Tensor, Tensor]


class Words(nn.Module):
    """An embedding and a product, with ``factor`` on what it gives; ``aside`` is a parameter of no optimiser."""

    def __init__(self, sparse: bool = True, factor: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.table = nn.Embedding(20, 4, sparse=sparse, _weight=torch.randn(20, 4, generator=generator))
        self.head = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(1, 4, generator=generator))
        self.aside = nn.Parameter(torch.ones(()))
        self.factor, self.nothing = factor, False

    def trained(self) -> list[nn.Parameter]:
        return [self.table.weight, self.head.weight]

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.nothing:
            return {"loss": self.aside * 2.0}
        values = self.head(self.table(x)).squeeze(-1).float()
        return {"loss": (values - labels).square().mean() * self.factor}


def batches(count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 20, (12,), generator=generator) // 3, torch.randn(12, generator=generator))
        for _ in range(count)
    ]


def optimizer_of(model: Words) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.trained(), lr=0.1, momentum=0.9)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(*batch)["loss"]
    return loss


def ours(model: Words, precision: str, bound: float, path: Path) -> list[float]:
    options = {"scale": SCALE, "say": quiet, "max_grad_norm": bound}
    trainer = PrecisionTrainer(model, optimizer_of(model), precision, **options)
    return [trainer.step(batch, loss_fn).grad_norm for batch in batches()]


def older(model: Words, precision: str, bound: float, path: Path) -> list[float]:
    mode = {"fp32": "fp32", "bf16": "bfloat16", "fp16": "fp16"}[precision]
    config = ExtendedFP16Config(mode, backend="simulated", loss_scale=2.0**8, max_grad_norm=bound)
    trainer = ExtendedFP16Trainer(model, optimizer_of(model), config)
    norms = []
    for batch in batches():
        assert trainer.backward_and_step(trainer.training_step(batch, loss_fn))
        norms.append(float(trainer._trainer.latest.grad_norm))
    return norms


def transformers(model: Words, precision: str, bound: float, path: Path) -> list[float]:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'mantissa-rl[accelerate]'")
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainingArguments

    from mantissa.dropin import MantissaTrainerMixin

    class Loop(MantissaTrainerMixin, Trainer):
        def get_train_dataloader(self) -> DataLoader:
            rows = [{"x": x, "labels": y} for x, y in batches()]
            return DataLoader(rows, batch_size=1, collate_fn=lambda chosen: chosen[0])

    arguments = TrainingArguments(
        str(path), num_train_epochs=1, use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        logging_steps=1, save_strategy="no", lr_scheduler_type="constant",
        max_grad_norm=bound if bound < math.inf else 0,
    )  # fmt: skip
    options = {"precision": precision, "scale": SCALE, "say": quiet}
    loop = Loop(model=model, args=arguments, optimizers=(optimizer_of(model), None), **options)
    loop.train()
    return [row["grad_norm"] for row in loop.state.log_history if "grad_norm" in row]


def lightning(model: Words, precision: str, bound: float, path: Path, algorithm: str = "norm") -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, at import
        pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install 'mantissa-rl[lightning]'")
    from torch.utils.data import DataLoader

    from mantissa.dropin import MantissaPrecision

    norms = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return loss_fn(self.net, batch)

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.net)

        def on_train_batch_end(self, *args: Any) -> None:
            norms.append(plugin.outcome.grad_norm)

    plugin = MantissaPrecision(precision, scale=SCALE, say=quiet)
    trainer = pl.Trainer(
        plugins=[plugin], accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
        logger=False, enable_checkpointing=False, default_root_dir=path, gradient_clip_algorithm=algorithm,
        gradient_clip_val=bound if bound < math.inf else None,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(batches(), batch_size=None))
    return norms


Loop = Callable[[Words, str, float, Path], list[float]]
LOOPS = [ours, older, transformers, lightning]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("bound", [math.inf, 0.2])
def test_sparse_gradients_teach_what_dense_ones_do(loop: Loop, precision: str, bound: float, tmp_path: Path) -> None:
    """SGD with momentum, whose rows without a gradient go on by their momentum in both."""
    sparse, dense = Words(), Words(sparse=False)
    norms = [loop(model, precision, bound, tmp_path) for model in (sparse, dense)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0][0] > 0.2
    for name, value in sparse.state_dict().items():
        torch.testing.assert_close(value, dense.state_dict()[name], rtol=1e-4, atol=1e-6)
    assert not same(state(sparse), state(Words()))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("bound", [math.inf, 1.0])
def test_a_step_without_a_gradient_is_refused_alike(loop: Loop, precision: str, bound: float, tmp_path: Path) -> None:
    model = Words()
    model.nothing = True
    before = state(model)
    with pytest.raises(MantissaError, match="no parameter of the optimiser has a gradient"):
        loop(model, precision, bound, tmp_path)
    assert same(state(model), before)


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_that_fp32_cannot_square_are_clipped_to_their_bound(loop: Loop, tmp_path: Path) -> None:
    model, small = Words(factor=1e25), Words()
    norms, usual = loop(model, "fp32", 0.01, tmp_path), loop(small, "fp32", 0.01, tmp_path)
    assert norms[0] == pytest.approx(1e25 * usual[0], rel=1e-5)
    for name, value in model.state_dict().items():  # a direction is what clipping leaves of either
        torch.testing.assert_close(value, small.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_lightning_clips_sparse_gradients_by_value_too(tmp_path: Path) -> None:
    sparse, dense = Words(), Words(sparse=False)
    for model in (sparse, dense):
        lightning(model, "fp32", 0.05, tmp_path, "value")
    for name, value in sparse.state_dict().items():
        torch.testing.assert_close(value, dense.state_dict()[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", FORMATS)
def test_accumulation_probe_adaptive_clipping_and_a_checkpoint_take_sparse_gradients(
    precision: str, tmp_path: Path
) -> None:
    left = []
    for sparse in (True, False):
        model = Words(sparse)
        options = {"accumulate": 2, "adaptive_clip": 0.05, "max_grad_norm": 1.0, "probe_every": 1, "say": quiet}
        trainer = PrecisionTrainer(model, optimizer_of(model), precision, scale=SCALE, **options)
        fractions = []
        for number, batch in enumerate(batches(6)):
            outcome = trainer.step(batch, loss_fn)
            fractions += [outcome.clipped, trainer.flushed_fraction]
            if number == 3:
                trainer.save_checkpoint(tmp_path / "at.pt")
                trainer.load_checkpoint(tmp_path / "at.pt")
        left.append((fractions, state(model)))
    (fractions, weights), (dense_fractions, dense_weights) = left
    assert fractions == pytest.approx(dense_fractions)
    for name, value in weights.items():
        torch.testing.assert_close(value, dense_weights[name], rtol=1e-4, atol=1e-6)
