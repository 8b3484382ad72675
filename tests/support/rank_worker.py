"""What each process of tests/training/test_distributed.py does: ``torchrun rank_worker.py FOLDER KIND SCENARIO...``.

Every scenario leaves ``FOLDER/<KIND>-<scenario>-<rank>.pt``.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mantissa.base.ranks import unwrapped, whole
from mantissa.dropin import PrecisionTrainer
from mantissa.guard import GuardConfig
from mantissa.precision import BF16
from mantissa.training import ScalerConfig, adaptive_clip_, distribute, master_weights
from strict_promotion import StrictPromotion

GLOBAL = 12  # rows of a whole batch: divided by 1, 2 and 3 processes
Batch = tuple[Tensor, Tensor]


class Blocks(nn.Module):
    """Linear, LayerNorm and a trap: small, and with an odd size, so that shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(7, 3)
        self.limit = math.inf

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if x.requires_grad and self.limit < math.inf:
            x.register_hook(lambda grad: torch.where(grad.abs().max() > self.limit, math.inf, grad).to(grad.dtype))
        return self.head(x)


def make_model() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def batches(count: int, rows: int = GLOBAL) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 7, generator=generator), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(count)
    ]


def mine(batch: Batch, rank: int, world: int) -> Batch:
    share = len(batch[0]) // world
    rows = slice(rank * share, (rank + 1) * share)
    return batch[0][rows], batch[1][rows]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_trainer(kind: str | None, precision: str = "fp32", **options: Any) -> PrecisionTrainer:
    """A trainer over the processes there are; ``kind`` None: alone, for the tests' reference."""
    model: nn.Module = make_model()
    if kind is not None:
        model = distribute(model, kind)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return PrecisionTrainer(model, optimizer, precision, say=lambda line: None, **options)


def train(trainer: PrecisionTrainer, todo: list[Batch]) -> list[str]:
    ranks = trainer.ranks
    return [str(trainer.step(mine(batch, ranks.rank, ranks.world), loss_fn)) for batch in todo]


def result(trainer: PrecisionTrainer, **more: Any) -> dict[str, Any]:
    weights = whole(unwrapped(trainer.model).state_dict())
    return {"weights": dict(weights), "stats": trainer.stats(), **more}


def equal(kind: str | None, folder: Path) -> dict[str, Any]:
    trainer = make_trainer(kind, max_grad_norm=0.3)
    norms = []
    for batch in batches(5):
        outcome = trainer.step(mine(batch, trainer.ranks.rank, trainer.ranks.world), loss_fn)
        norms.append(outcome.grad_norm)
    return result(trainer, norms=norms)


def inf_on_one_rank(kind: str | None, folder: Path) -> dict[str, Any]:
    """Step 1: a gradient that is inf on rank 1 at any scale. Step 3: a loss of NaN on rank 1, its gradients finite.
    Step 5: an overflow on rank 1 above a scale of 2^12."""
    trainer = make_trainer(kind, "fp16", scale=ScalerConfig(initial=2.0**14, retries=4))
    model: Any = unwrapped(trainer.model)
    rows, kinds, scales = batches(7), [], []
    for i, batch in enumerate(rows):
        other = trainer.ranks.rank == 1
        model.limit = 0.0 if i == 1 and other else 2.0**9 / 6 if i == 5 and other else math.inf
        bad = i == 3 and other
        outcome = trainer.step(
            mine(batch, trainer.ranks.rank, trainer.ranks.world),
            lambda model, batch, bad=bad: loss_fn(model, batch) + (math.nan if bad else 0.0),
        )
        kinds.append(str(outcome))
        scales.append(outcome.scale)
    return result(trainer, kinds=kinds, scales=scales)


def accumulate(kind: str | None, folder: Path) -> dict[str, Any]:
    """Four micro-batches a step; how often gradients were sent, against one micro-batch a step."""
    sent = {}
    for count in (1, 4):
        trainer = make_trainer(kind, accumulate=count)
        calls = _count_exchanges(trainer, kind)
        train(trainer, batches(8)[:count])  # the first step lets DDP settle its buckets
        before = len(calls)
        train(trainer, batches(8)[count : 2 * count])
        sent[count] = len(calls) - before
    return result(trainer, sent=sent)


def _count_exchanges(trainer: PrecisionTrainer, kind: str | None) -> list[int]:
    calls: list[int] = []
    if kind == "ddp":

        def hook(state, bucket):  # torch checks annotations, and these would be strings
            calls.append(1)
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        trainer.model.register_comm_hook(None, hook)  # type: ignore[operator]
    elif kind == "fsdp2":
        # FSDP2's one call for sending gradients; its name is the first from torch 2.13 on
        name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        original = getattr(dist, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return original(*args, **kwargs)

        setattr(dist, name, counting)
    return calls


def parts_of_uneven() -> list[list[int]]:
    """Rows of each batch, by rank: the ranks run out at different times, and the last batches are smaller."""
    return [[6, 6, 3], [6, 2]]


def uneven(kind: str | None, folder: Path) -> dict[str, Any]:
    trainer = make_trainer(kind, accumulate=2)
    sizes = parts_of_uneven()[trainer.ranks.rank]
    x, y = batches(1, 40)[0]
    start = 20 * trainer.ranks.rank
    loader = []
    for size in sizes:
        loader.append((x[start : start + size], y[start : start + size]))
        start += size
    kinds = []
    for batch in trainer.batches(loader):
        weight = 0.0 if batch is None else len(batch[0]) / 6
        kinds.append(str(trainer.step(batch, loss_fn, weight=weight)))
    kinds.append(str(trainer.flush()))
    return result(trainer, kinds=kinds)


def broken_window(kind: str | None, folder: Path) -> dict[str, Any]:
    """One micro-batch added, then an exception in the next: nothing of the first may reach a later step."""
    trainer = make_trainer(kind, accumulate=2)
    todo = batches(4)

    def broken(model: nn.Module, batch: Batch) -> Tensor:
        raise KeyError("answer")

    train(trainer, todo[:1])
    with contextlib.suppress(KeyError):
        trainer.step(todo[1], broken)
    kinds = train(trainer, todo[2:])
    return result(trainer, kinds=kinds)


def guarded(kind: str | None, folder: Path) -> dict[str, Any]:
    """A loss that is not finite, twice, on rank 1 alone: both fall back to the checkpoint of update 3."""
    run_dir = folder / f"{kind}-guarded"
    guard = GuardConfig(window=10, min_steps=5, to="bf16")
    trainer = make_trainer(kind, "fp16", run_dir=run_dir, guard=guard, good_every=3)
    kinds = []
    for i, batch in enumerate(batches(8)):
        bad = i in (4, 5) and trainer.ranks.rank == 1
        outcome = trainer.step(
            mine(batch, trainer.ranks.rank, trainer.ranks.world),
            lambda model, batch, bad=bad: loss_fn(model, batch) * (math.inf if bad else 1.0),
        )
        kinds.append(f"{outcome} {trainer.precision.active} {trainer.updates}")
    return result(trainer, kinds=kinds)


def save(kind: str | None, folder: Path) -> dict[str, Any]:
    """Three steps, a checkpoint, three more."""
    trainer = make_trainer(kind, "fp16")
    todo = batches(6)
    train(trainer, todo[:3])
    trainer.save_checkpoint(folder / f"{kind}.pt", {"next": 3})
    train(trainer, todo[3:])
    return result(trainer)


def crash(kind: str | None, folder: Path) -> dict[str, Any]:
    """As ``save``, but rank 1 dies in the middle of step 5: after its forward, before its backward."""
    trainer = make_trainer(kind, "fp16")
    todo = batches(6)
    train(trainer, todo[:3])
    trainer.save_checkpoint(folder / f"{kind}-crash.pt", {"next": 3})
    train(trainer, todo[3:4])

    def dying(model: nn.Module, batch: Batch) -> Tensor:
        loss = loss_fn(model, batch)
        if trainer.ranks.rank == 1:
            os._exit(9)
        return loss

    trainer.step(mine(todo[4], trainer.ranks.rank, trainer.ranks.world), dying)
    raise AssertionError("a step whose rank died must not return")


def resume(kind: str | None, folder: Path, name: str = "") -> dict[str, Any]:
    trainer = make_trainer(kind, "fp16")
    extra = trainer.load_checkpoint(folder / (name or f"{kind}.pt"))
    train(trainer, batches(6)[extra["next"] :])
    return result(trainer)


def resume_crashed(kind: str | None, folder: Path) -> dict[str, Any]:
    return resume(kind, folder, f"{kind}-crash.pt")


def unwrapped_is_refused(kind: str | None, folder: Path) -> dict[str, Any]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"error": _refused(lambda: PrecisionTrainer(model, optimizer, "fp32", say=lambda line: None))}


def full_disk(kind: str | None, folder: Path) -> dict[str, Any]:
    """Rank 0 cannot write: every rank is told, and none waits."""
    trainer = make_trainer(kind)
    path = folder / "rank_worker_result" / "x.pt" if trainer.ranks.rank else "/proc/x.pt"
    return {"error": _refused(lambda: trainer.save_checkpoint(path))}


def clipping(kind: str | None, folder: Path) -> dict[str, Any]:
    """Adaptive clipping of whole tensors, and of the same ones sharded by rows or replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)
    shapes = {(5, 4): Shard(0), (3, 2, 2): Shard(0), (7,): Shard(0), (4, 2): Replicate(), (1, 6): Shard(0)}
    whole_ones, split = [], []
    for shape, placement in (shapes | {(3,): Replicate()}).items():
        weight = torch.randn(shape, generator=generator)
        spread = torch.exp2(4 * torch.randn(shape[0], generator=generator)).reshape(-1, *[1] * (len(shape) - 1))
        grad = torch.randn(shape, generator=generator) * spread * 0.02
        whole_ones.append(nn.Parameter(weight.clone()))
        split.append(nn.Parameter(distribute_tensor(weight, mesh, [placement])))
        whole_ones[-1].grad, split[-1].grad = grad.clone(), distribute_tensor(grad, mesh, [placement])
    fractions = [float(adaptive_clip_(tensors, 0.01)) for tensors in (whole_ones, split)]
    columns = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    columns.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    gradients = {"whole": [p.grad for p in whole_ones], "split": [p.grad.full_tensor() for p in split]}
    return gradients | {"fractions": fractions, "error": _refused(lambda: adaptive_clip_([columns], 0.01))}


def unusual(kind: str | None, folder: Path) -> dict[str, Any]:
    """Gradients whose squares leave fp32, and tiny ones; then a loss of none of the optimiser's parameters."""
    norms, weights = [], {}
    for factor in (1e25, 1e-22):
        trainer = make_trainer(kind, max_grad_norm=0.5)
        batch = mine(batches(1)[0], trainer.ranks.rank, trainer.ranks.world)
        norms.append(trainer.step(batch, lambda model, batch, by=factor: loss_fn(model, batch) * by).grad_norm)
        weights[str(factor)] = result(trainer)["weights"]
    aside = nn.Parameter(torch.ones(()))
    error = _refused(lambda: trainer.step(batch, lambda model, batch: aside * 2))
    return {"norms": norms, "weights": weights, "error": error}


def sparse_rows(kind: str | None, folder: Path) -> dict[str, Any]:
    """An embedding whose ranks meet other rows, and some of the same."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 1))
    if kind == "fsdp2":
        return {"error": _refused(lambda: distribute(model, "fsdp2"))}
    model = distribute(model, "ddp") if kind else model
    trainer = PrecisionTrainer(
        model, torch.optim.SGD(model.parameters(), lr=0.5), "fp32", max_grad_norm=0.1, say=lambda line: None
    )
    ids = mine((torch.tensor([0, 1, 1, 2, 1, 5, 6, 6]), torch.zeros(8)), trainer.ranks.rank, trainer.ranks.world)
    norm = trainer.step(ids, lambda model, batch: model(batch[0]).square().mean()).grad_norm
    return result(trainer, norm=norm)


def masters(kind: str | None, folder: Path) -> dict[str, Any]:
    """Updates of bf16 weights, whole and sharded by rows (one row, and none, on a rank among them) or replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = {(5, 3): Shard(0), (1, 6): Shard(0), (7,): Shard(0), (4, 2): Replicate()}
    found: dict[str, Any] = {}
    for rule in ("bf16_stochastic", "bf16_kahan"):
        generator = torch.Generator().manual_seed(3)
        whole_ones, split = {}, {}
        for i, (shape, placement) in enumerate(shapes.items()):
            weight = torch.randn(shape, generator=generator)
            whole_ones[str(i)] = nn.Parameter(weight.clone())
            split[str(i)] = nn.Parameter(distribute_tensor(weight, mesh, [placement]))
        kept = [master_weights(rule, named, BF16, 5) for named in (whole_ones, split)]
        for update in range(3):
            for name, parameter in whole_ones.items():
                parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
                grad = distribute_tensor(parameter.grad, mesh, split[name].placements)  # type: ignore[attr-defined]
                split[name].grad = grad
            for named, each in zip((whole_ones, split), kept, strict=True):
                each.step(torch.optim.SGD(named.values(), lr=1.0), update)
        sides = [whole({"w": {k: p.detach() for k, p in named.items()}, "c": each.compensation})
                 for named, each in zip((whole_ones, split), kept, strict=True)]  # fmt: skip
        again = whole(kept[1].checked(sides[0]["c"]))  # what a checkpoint gives back
        found[rule] = {"whole": sides[0], "split": sides[1], "again": again}
    columns = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    return found | {"error": _refused(lambda: master_weights("bf16_stochastic", {"w": columns}, BF16))}


def changing(kind: str | None, folder: Path) -> dict[str, Any]:
    """The body joins the head's optimiser after two steps, each after an evaluation, which leaves FSDP2's root whole.

    ``error``: of a trainer whose model was wrapped while the body was frozen, which DDP goes on to believe.
    """
    model: Any = make_model()
    trained = distribute(model, kind) if kind is not None else model  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = PrecisionTrainer(trained, optimizer, "fp32", scale=1024.0, say=lambda line: None)
    todo = batches(5)
    for i, batch in enumerate(todo):
        if i == 2:
            optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": 0.05})
        with torch.no_grad():
            trainer.model(batch[0])
        train(trainer, [batch])
    found = result(trainer, told=[str(each.message) for each in told], names=list(trainer.optimizer_step.parameters))
    late = make_model()
    late.blocks.requires_grad_(False)
    wrapped = distribute(late, kind) if kind is not None else late  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(late.head.parameters(), lr=0.1)
    trainer = PrecisionTrainer(wrapped, optimizer, "fp32", say=lambda line: None)
    train(trainer, todo[:1])
    late.blocks.requires_grad_(True)
    optimizer.add_param_group({"params": list(late.blocks.parameters())})
    return found | {"error": _refused(lambda: train(trainer, todo[1:2]))}


def _refused(work: Callable[[], object]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


SCENARIOS = {
    f.__name__: f
    for f in (equal, inf_on_one_rank, accumulate, uneven, broken_window, guarded, save, crash, resume, resume_crashed)
} | {f.__name__: f for f in (unwrapped_is_refused, full_disk, clipping, masters, changing, unusual, sparse_rows)}


def main() -> None:
    folder, kind, *names = sys.argv[1:]
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    for name in names:
        with StrictPromotion():
            content = SCENARIOS[name](kind, Path(folder))
        torch.save(content, Path(folder) / f"{kind}-{name}-{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then, which is not what is tested here


if __name__ == "__main__":
    main()
