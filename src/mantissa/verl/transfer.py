"""``rollout.checkpoint_engine.backend=mantissa_ray``: weights to standalone servers through Ray's object store.

verl's own ways (NCCL, NIXL and others) need a GPU or another library; this one needs Ray alone, and so serves a CPU.
The learner's first rank puts the weights into the store, a bucket at a time, and hangs each bucket's reference into a
mailbox, an actor that lives for one sync; each worker beside a server takes them out in order.

Such a worker reads no model configuration, so it has to be told of the plugin, whatever the backend:
``rollout.checkpoint_engine.custom_backend_module=mantissa.verl.plugin``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

Bucket = list[tuple[str, Tensor]]


class Mailbox:
    """References to buckets, in order, for any number of readers; ``None`` is the end."""

    def __init__(self) -> None:
        self._refs: list[Any] = []
        self._more = asyncio.Condition()

    async def put(self, refs: list[Any]) -> None:
        """Hang in one reference (in a list, or Ray would resolve it), or ``[None]``."""
        async with self._more:
            self._refs += refs
            self._more.notify_all()

    async def get(self, number: int) -> list[Any]:
        """The reference of this number, in a list, as soon as it is there."""
        async with self._more:
            await self._more.wait_for(lambda: len(self._refs) > number)
            return [self._refs[number]]


class RayCheckpointEngine(CheckpointEngine):
    """One end of a sync, in a learner's rank or in a worker beside a server. ``is_master``: the learner's first."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self._mailbox: Any = None
        self._made = False

    def prepare(self) -> dict[str, Any]:
        """Make the mailbox, on the master alone."""
        if not self.is_master:
            return {}
        name = f"mantissa_weights_{uuid.uuid4().hex}"
        self._mailbox, self._made = ray.remote(Mailbox).options(name=name, num_cpus=0).remote(), True
        ray.get(self._mailbox.put.remote([]))  # it is there before its name is told
        return {"mailbox": name}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[dict[str, Any]]) -> tuple[Any, Any]:
        """The mailbox's name for each of both."""
        name = next(each["mailbox"] for each in metadata if each)
        return {"mailbox": [name] * actors}, {"mailbox": [name] * rollouts}

    def init_process_group(self, mailbox: str) -> None:
        self._mailbox = self._mailbox or ray.get_actor(mailbox)

    def finalize(self) -> None:
        if self._made:
            ray.kill(self._mailbox)
        self._mailbox, self._made = None, False

    async def send_weights(self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Every rank goes through ``weights``, for each may be gathered from all; the master sends."""
        bucket: Bucket = []
        size = 0
        for name, tensor in weights:
            if not self.is_master:
                continue
            bucket.append((name, tensor.detach().to("cpu", copy=True)))
            size += tensor.numel() * tensor.element_size()
            if size >= self.bucket_size:
                await self._mailbox.put.remote([ray.put(bucket)])
                bucket, size = [], 0
        if self.is_master:
            await self._mailbox.put.remote([*([ray.put(bucket)] if bucket else []), None])

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """What was sent, one by one."""
        number = 0
        while True:
            (ref,) = await self._mailbox.get.remote(number)
            if ref is None:
                return
            for name, tensor in await ref:
                yield name, tensor
            number += 1


CheckpointEngineRegistry.register("mantissa_ray")(RayCheckpointEngine)
