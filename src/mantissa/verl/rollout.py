"""``rollout.name=mantissa``: verl's rollout over the native engine, each server a Ray actor.

The replica is what verl starts servers with, beside the learner (hybrid) or on their own (standalone); the adapter is
what it hands weights to, in the learner's process or in a worker beside a standalone server. Weights go to the server
through Ray, as fp32 masters, once for each sync.

Each request has the key of its draws. verl gives a request a random name, so a server could only count arrivals. Its
agent loops know more: the trainer's step, the prompt's index in the data and the sample's number in its group. Those
become ``seed`` among the sampling parameters; a loop of one's own does the same with ``Seeded`` as its first base.

``rollout.checkpoint_engine.backend=mantissa_ray`` brings weights to standalone servers through Ray's object store.
verl's own ways (NCCL, NIXL and others) need a GPU or another library; this one needs Ray alone, and so serves a CPU.
The learner's first rank puts the weights into the store, a bucket at a time, and hangs each bucket's reference into a
mailbox, an actor that lives for one sync; each worker beside a server takes them out in order. Such a worker reads no
model configuration, so it has to be told of the plugin, whatever the backend:
``rollout.checkpoint_engine.custom_backend_module=mantissa.verl.plugin``.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from mantissa.base.errors import MantissaError, say
from mantissa.verl.refusals import get, of_model, of_rollout, refuse
from mantissa.verl.serving import Limits, Serving, sampling, seed_of
from mantissa.verl.wire import TENSOR, Setup

_CALLED = "rollout.name=mantissa"
_SLOTS = 1024  # rows decoded together at most, whatever verl's max_num_seqs


def limits_of(rollout: Any) -> Limits:
    """A server's, from verl's section ``actor_rollout_ref.rollout``."""
    return Limits(
        prompt=int(rollout.prompt_length),
        response=int(rollout.response_length),
        slots=min(int(rollout.max_num_seqs), _SLOTS),
        seed=int(get(rollout, "seed", 42)),
        ignore_eos=bool(get(rollout, "ignore_eos", False)),
        most=get(rollout, "max_model_len"),
    )


class Server:
    """The Ray actor: ``Serving`` behind the methods that verl calls."""

    def __init__(self, model: str, limits: Limits, replica: int, free: bool) -> None:
        device = torch.device("cpu" if get_device_name() == "cpu" else "cuda:0")
        self.serving = Serving(model, limits, device, replica)
        self.free = free

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        **more: Any,
    ) -> TokenOutput:
        """One response. ``MantissaError`` for what is not text."""
        if any(data is not None for data in (image_data, video_data, audio_data)):
            raise MantissaError(f"{_CALLED}: images, video and audio are not supported")
        answer = await self.serving.generate([int(token) for token in prompt_ids], sampling_params)
        return TokenOutput(
            token_ids=answer.tokens,
            log_probs=answer.logprobs,
            stop_reason=answer.stopped,
            num_preempted=0,
            extra_fields={"global_steps": answer.step},
        )

    async def load(self, setup: str, weights: dict[str, Tensor], step: int | None) -> None:
        """``Serving.load``, the setup as JSON."""
        evidence = self.serving.evidence
        await self.serving.load(Setup.from_json(setup), weights, step)
        if self.serving.evidence != evidence:
            node = ray.get_runtime_context().get_node_id()
            say(f"mantissa server {self.serving.replica} on node {node[:8]}: {self.serving.evidence}")

    async def set_global_steps(self, step: int) -> None:
        self.serving.step = step

    async def sleep(self) -> None:
        await self.serving.drained()
        if self.free:
            await self.serving.release()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self.serving.abort(reject_request)

    async def resume_generation(self) -> None:
        await self.serving.go_on()

    async def wait_for_requests_to_drain(self) -> None:
        await self.serving.drained()

    # Weights are made anew when they come, and the cache is part of a call: there is nothing else to give or to take.

    async def wake_up(self, tags: Any = None) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **kwargs: Any) -> None: ...

    async def stop_profile(self) -> None: ...


class MantissaReplica(RolloutReplica):
    """One server, on the node of its worker. What it cannot do is refused when verl makes it, before a step."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        refuse(_CALLED, of_rollout(self.config))
        refuse(_CALLED, of_model(model_config))
        other = self.is_reward_model or self.is_teacher_model
        refuse(_CALLED, iter([(other, "reward and teacher models are not supported")]))
        limits = limits_of(self.config)
        for section in (self.config, self.config.val_kwargs):
            given = {name: getattr(section, name) for name in ("temperature", "top_k", "top_p")}
            sampling(given, 1, limits, ())

    async def launch_servers(self) -> None:
        """Start the server, where its worker is and with that worker's device."""
        worker = self.workers[0]
        node, device = await worker.__ray_call__.remote(
            lambda self: (
                ray.get_runtime_context().get_node_id(),
                os.environ.get(get_platform().visible_devices_envvar(), ""),
            )
        )
        platform = get_platform()
        variables = dict.fromkeys(platform.ray_noset_envvars(), "1")
        if device:
            variables[platform.visible_devices_envvar()] = device
        server = (
            ray.remote(Server)
            .options(
                name=server_name(self.replica_rank, self.name_suffix),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                runtime_env={"env_vars": variables},
            )
            .remote(
                str(get(self.model_config, "local_path") or self.model_config.path),
                limits_of(self.config),
                self.replica_rank,
                bool(self.config.free_cache_engine),
            )
        )
        await server.wake_up.remote()  # it is there, or its error is
        self.servers, self._server_handle = [server], server
        self._server_address = f"ray:{self.replica_rank}"


def server_name(replica: int, suffix: str = "") -> str:
    """The name by which a replica's server is found in its Ray namespace."""
    return f"mantissa_server_{replica}{suffix}"


class ServerAdapter(BaseRollout):
    """Hands weights to the server of this process's replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        refuse(_CALLED, of_rollout(self.config))
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None

    @property
    def server(self) -> Any:
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None:
        await self.server.sleep.remote()

    async def update_weights(
        self, weights: Iterator[tuple[str, Tensor]], wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Collect every weight (each may be a collective of the learner's ranks) and send them at once."""
        if wire_format != "named_tensors":
            raise MantissaError(
                f"{_CALLED}: weights as {wire_format} are not supported; set another rollout.checkpoint_engine.backend"
            )
        found: dict[str, Tensor] = {}
        async for name, tensor in _each(weights):
            found[name] = tensor.detach().to("cpu", copy=True)
        setup = setup_of(found, self.config)
        await self.server.load.remote(setup.to_json(), found, kwargs.get("global_steps"))


async def _each(weights: Any) -> Any:
    """The pairs of an iterator, or of an asynchronous one: verl's checkpoint engines are either."""
    if hasattr(weights, "__aiter__"):
        async for pair in weights:
            yield pair
        return
    for pair in weights:
        yield pair
        await asyncio.sleep(0)


def setup_of(weights: dict[str, Tensor], rollout: Any) -> Setup:
    """What came with the weights, or what the learner of this process left; where the learner is one of verl's own, the
    formats of verl's keys ``rollout.dtype`` and ``rollout.quantization``. ``rollout``: that section.
    """
    from mantissa.verl.engine import LEARNER

    setup = Setup.take_from(weights) if TENSOR in weights else LEARNER.get("setup")
    quantization = get(rollout, "quantization")
    if setup is None:
        return Setup.of_keys(str(get(rollout, "dtype", "bfloat16")), quantization, limits_of(rollout).longest)
    if quantization is not None:
        raise MantissaError(
            f"rollout.quantization={quantization}: with actor.strategy=mantissa the learner's precision says the "
            "rollout's format; set mixed_precision.precision.rollout, and leave it out"
        )
    return setup


class Seeded:
    """A base that adds ``seed`` to what an agent loop is run with."""

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any:
        if self.rollout_config.name == "mantissa":  # type: ignore[attr-defined]
            sampling_params = {**sampling_params, "seed": seed_of(fields)}
        return await super().run(sampling_params, **fields)  # type: ignore[misc]


class SeededSingleTurn(Seeded, SingleTurnAgentLoop):
    """verl's ``single_turn_agent``."""


class SeededTool(Seeded, ToolAgentLoop):
    """verl's ``tool_agent``."""


_Bucket = list[tuple[str, Tensor]]


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
        bucket: _Bucket = []
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


def register() -> None:
    """Tell verl of this rollout and of its way to send weights, and put its agent loops in the place of verl's two."""
    agent_loop.register("single_turn_agent")(SeededSingleTurn)
    agent_loop.register("tool_agent")(SeededTool)
    CheckpointEngineRegistry.register("mantissa_ray")(RayCheckpointEngine)
    RolloutReplicaRegistry.register("mantissa", lambda: MantissaReplica)
    _ROLLOUT_REGISTRY["mantissa", "async"] = f"{ServerAdapter.__module__}.{ServerAdapter.__qualname__}"
