"""What each process of tests/compat/test_processes.py does: ``torchrun compat_worker.py FOLDER SCENARIO``.

Code as it was written for the old utility: join, make the extended trainer with use_ddp, train, save, leave. Every
scenario leaves ``FOLDER/<scenario>-<rank>.pt``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from mantissa.base.ranks import unwrapped
from mantissa.dropin.compat import ExtendedFP16Config, ExtendedFP16Trainer, cleanup_distributed, init_distributed
from strict_promotion import StrictPromotion
from toys import Batch, cross_entropy, data, mlp, state


def make(rank: int | None, world: int | None, **fields: Any) -> ExtendedFP16Trainer:
    model = mlp()
    model.eval()  # batch norm of half a batch is not that of the whole one
    config = ExtendedFP16Config(**({"use_ddp": True, "backend": "simulated"} | fields))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return ExtendedFP16Trainer(model, optimizer, config, device="cpu", rank=rank, world_size=world)


def part(batch: Batch, rank: int, world: int) -> Batch:
    share = len(batch[0]) // world
    return tuple(t[rank * share : (rank + 1) * share] for t in batch)  # type: ignore[return-value]


def train(trainer: ExtendedFP16Trainer, todo: list[Batch]) -> list[bool]:
    answers = []
    for batch in todo:
        loss = trainer.training_step(part(batch, trainer.rank, trainer.world_size), cross_entropy)
        answers.append(trainer.backward_and_step(loss))
    return answers


def result(trainer: ExtendedFP16Trainer, **more: Any) -> dict[str, Any]:
    return {"weights": state(unwrapped(trainer.model)), "stats": trainer.get_stats(), **more}


def learn(rank: int | None, world: int | None, folder: Path) -> dict[str, Any]:
    """And every rank calls save_checkpoint, each with a file of its own name: only rank 0 may write."""
    trainer = make(rank, world, precision_mode="fp32", gradient_accumulation_steps=2)
    answers = train(trainer, data(8))
    trainer.save_checkpoint(folder / f"rank{trainer.rank}.pt")
    return result(trainer, answers=answers)


def options(rank: int | None, world: int | None, folder: Path) -> dict[str, Any]:
    errors = []
    for given, fields in (((rank, world), {"use_ddp": False}), ((1 - (rank or 0), world), {})):
        try:
            make(*given, **fields)
        except ValueError as error:
            errors.append(str(error))
    trainer = make(None, None, find_unused_parameters=True, broadcast_buffers=False)
    ddp: Any = trainer.model
    seen = (type(ddp).__name__, ddp.find_unused_parameters, ddp.broadcast_buffers)
    wrapped = ExtendedFP16Trainer(ddp, trainer.optimizer, trainer.config, "cpu").model
    return {"errors": errors, "ddp": seen, "wrapped_once": wrapped is ddp}


def failing(rank: int | None, world: int | None, folder: Path) -> dict[str, Any]:
    """Rank 1's loss function raises, rank 0 waits for its gradients; both leave through ``finally``."""
    trainer = make(rank, world)
    train(trainer, data(2))
    if trainer.rank == 1:
        raise KeyError("answer")
    train(trainer, data(2))
    raise AssertionError("a step whose other rank is gone must not return")


SCENARIOS = {f.__name__: f for f in (learn, options, failing)}


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        rank, world = init_distributed("gloo")
        for name in sys.argv[2:]:
            with StrictPromotion():
                content = SCENARIOS[name](rank, world, folder)
            torch.save(content, folder / f"{name}-{rank}.pt")
    finally:
        cleanup_distributed()


if __name__ == "__main__":
    main()
