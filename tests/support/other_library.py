"""A stand-in for the library that multiplies: torch's products, summed in an order that a test chooses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.kernels import cpu


class OtherLibrary(TorchDispatchMode):
    """Products of a library that adds in an order of its own: the sum of a row is cut where ``cut(rows, terms)`` says.

    Each part is summed in float64, so that no other order, of this machine's library, comes in. Only of fp32:
    what it does to float64 vanishes when the sum is rounded, unless ``error`` is more than a rounding.
    """

    def __init__(self, cut: Callable[[int, int], int], error: float = 0.0) -> None:
        super().__init__()
        self.cut, self.error, self.calls = cut, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        whole = name in ("aten::mm", "aten::bmm")
        if (whole or name == "aten::baddbmm_") and args[0].dtype not in (torch.float32, torch.float64):
            return func(*args, **kwargs)  # halves and complex numbers stay the machine's
        if whole:
            self.calls += 1
            total = self._product(*args)
            return kwargs["out"].resize_(total.shape).copy_(total) if "out" in kwargs else total
        if name == "aten::baddbmm_":
            self.calls += 1
            return args[0].add_(self._product(args[1], args[2]).mul_(kwargs.get("alpha", 1)))
        return func(*args, **kwargs)

    def _product(self, x: Tensor, y: Tensor) -> Tensor:
        terms = x.shape[-1]
        cut = min(max(self.cut(x.shape[-2], terms), 1), terms) if terms else 0
        total = (x[..., :cut].double() @ y[..., :cut, :].double()).to(x.dtype)
        if cut < terms:
            total = total + (x[..., cut:].double() @ y[..., cut:, :].double()).to(x.dtype)
        return total * (1 + self.error * (self.calls % 7)) if self.error else total


# What tests/machines.py asks for: products whose rows never depend on the batch, and products whose rows always do.
PRODUCTS: dict[str, Callable[[int, int], int]] = {
    "steady": lambda rows, terms: terms,
    "by-rows": lambda rows, terms: 1 + rows % terms,
}


@contextmanager
def asked_processor() -> Iterator[None]:
    """A processor that does not multiply bf16 itself, whatever this one does, so that bf16 is simulated; one that does
    where the environment asks for it (``MANTISSA_TEST_BF16=own``)."""
    ratio = 0.5 if os.environ.get("MANTISSA_TEST_BF16") == "own" else 1.0
    with mock.patch.object(cpu, "products", return_value=cpu.CpuProducts(ratio)):
        yield


@contextmanager
def asked_library() -> Iterator[None]:
    """The products that the environment asks for, in every thread: a mode is a thread's own, and both sides of a run
    need the same library. Ranks in processes of their own ask again."""
    asked = os.environ.get("MANTISSA_TEST_PRODUCTS")
    if not asked:
        yield
        return
    run = threading.Thread.run

    def with_products(thread: threading.Thread) -> None:
        with OtherLibrary(PRODUCTS[asked]):
            run(thread)

    with mock.patch.object(threading.Thread, "run", with_products), OtherLibrary(PRODUCTS[asked]):
        yield
