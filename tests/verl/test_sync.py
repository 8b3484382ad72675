"""Whether servers have the learner's weights: the gate's look after a sync, without verl and Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mantissa.base.errors import MantissaError
from mantissa.base.readers.safetensors import read_tensors
from mantissa.base.tensors import digest
from mantissa.doctor.held import held
from mantissa.doctor.sync import FIRST
from mantissa.doctor.weights import ARRIVED, compare
from mantissa.launch.rehearsal import write_policy
from mantissa.precision import E4M3, SQUARE, quantize
from mantissa.rollout.vllm.worker import WeightReader
from mantissa.verl import sync
from mantissa.verl.options import EngineOptions
from mantissa.verl.serving import Limits, Serving
from mantissa.verl.sync import SyncGate, _sum_of
from mantissa.verl.wire import Setup


class Actor:
    """A Ray actor's handle, whose answers are there at once."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.__ray_call__ = SimpleNamespace(remote=lambda function, *given: function(inside, *given))


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "_got", lambda refs: refs)


def model(seed: int = 0, tied: bool = False) -> nn.Module:
    draw, made = torch.Generator().manual_seed(seed), nn.Module()
    names = ["embed_tokens", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj", "layers.0.mlp.down_proj"]
    for name in [*names, *([] if tied else ["lm_head"])]:
        parent: nn.Module = made
        *path, last = name.split(".")
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        linear = nn.Linear(16, 16, bias=False)
        linear.weight.data = torch.randn(16, 16, generator=draw)
        parent.add_module(last, linear)
    return made


K, V, DOWN = (f"layers.0.{name}_proj.weight" for name in ("self_attn.k", "self_attn.v", "mlp.down"))


class Job:
    """A learner and servers that hold what it has, in bf16; ``spoil`` is done to what they are sent."""

    def __init__(self, servers: int = 1, stop: bool = True, every: int = 7, tied: bool = False) -> None:
        self.learner = model(tied=tied)
        engine = SimpleNamespace(module=self.learner)
        self.workers = [
            Actor(SimpleNamespace(worker_dict={"actor": SimpleNamespace(actor=SimpleNamespace(engine=engine))}))
        ]
        self.held = [model() for _ in range(servers)]
        self.replicas: list[Any] = [
            SimpleNamespace(servers=[Actor(SimpleNamespace(model=each.bfloat16()))]) for each in self.held
        ]
        self.said: list[str] = []
        self.gate = SyncGate(every, stop, "trainer.gate", self.said.append)
        self.step = -1
        self.sync()

    def sync(self, spoil: Callable[[dict[str, Tensor], dict[str, Tensor]], Any] = lambda new, old: None) -> None:
        """Train a little, send, look."""
        self.step += 1
        for parameter in self.learner.parameters():
            parameter.data = parameter.data + 0.1
        for number, each in enumerate(self.held):
            new = {name: w.bfloat16() for name, w in self.learner.state_dict().items()}
            new.setdefault("lm_head.weight", new["embed_tokens.weight"])
            if number == len(self.held) - 1:
                spoil(new, {name: w.clone() for name, w in each.state_dict().items()})
            each.load_state_dict(new)
        self.gate.after_sync(self.workers, self.replicas, self.step)


@pytest.mark.parametrize("tied", [False, True])
def test_healthy_syncs_are_said_once(tied: bool) -> None:
    job = Job(tied=tied)
    for _ in range(20):
        job.sync()
    (line,) = job.said
    assert "after syncs 5 tensors (1,280 weights) of the rollout are compared with the learner's, by digest" in line
    assert job.gate.metrics()["mantissa/sync_weights_lost"] == 0
    assert 0 < job.gate.metrics()["mantissa/sync_seconds"] < 60


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Tensor]], Any], str]] = {
    "stale": (lambda new, old: new.update(old), "5 of 5 tensors, 100.00% of the weights: stale: embed_tokens.weight"),
    "a layer": (lambda new, old: new.update({DOWN: old[DOWN]}), "stale: mlp.down_proj.weight of layer 0 (as at"),
    "swapped": (lambda new, old: new.update({K: new[V], V: new[K]}), f"k_proj.weight of layer 0 (those of {V}"),
    "asleep": (lambda new, old: new[DOWN].zero_(), "1 of 5 tensors, 20.00% of the weights: zero: mlp.down_proj.weight"),
    "scaled": (lambda new, old: new[DOWN].mul_(2), "scaled: mlp.down_proj.weight of layer 0 (by "),
    "turned": (lambda new, old: new.update({DOWN: new[DOWN].T}), "transposed: mlp.down_proj.weight of layer 0"),
    "twice": (lambda new, old: new[DOWN].copy_(new[DOWN].to(torch.float8_e4m3fn)), "1 of 5 tensors"),
    "a bit": (lambda new, old: new[DOWN].view(torch.int16)[3, 5:6].bitwise_xor_(1), "row 3 of 16 alone"),
}  # fmt: skip


@pytest.mark.parametrize("at", [2, 7, 28])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_at_the_first_look_after_it(fault: str, at: int) -> None:
    spoil, said = FAULTS[fault]
    job = Job()
    while job.step < at - 2:  # the first sync was number 1
        job.sync()
    with pytest.raises(MantissaError) as error:
        job.sync(spoil)
    line = str(error.value)
    assert line.startswith(f"mantissa doctor: after the sync of step {at - 1}, the rollout does not have the trainer's")
    assert said in line
    assert "What helps: " in line
    assert line.endswith("trainer.gate=warn goes on in spite of it")
    assert job.gate.metrics()["mantissa/sync_weights_lost"] > 0


def test_one_server_of_several_is_named_and_warn_goes_on() -> None:
    job = Job(servers=3, stop=False)
    job.sync(lambda new, old: new.update(old))
    job.sync()
    assert len(job.said) == 2
    assert "after the sync of step 1, server 3 of 3 does not have the trainer's weights" in job.said[1]


def test_between_looks_nothing_is_asked() -> None:
    job = Job(every=10)
    while job.gate.proof.count < FIRST:
        job.sync()
    asked: list[int] = []
    for each in (*job.workers, *(server for replica in job.replicas for server in replica.servers)):
        call = each.__ray_call__.remote
        each.__ray_call__.remote = lambda *given, call=call: (asked.append(job.gate.proof.count), call(*given))[1]
    while job.gate.proof.count < 20:
        job.sync()
    assert sorted(set(asked)) == [9, 10, 19, 20]


def vllm_server(results: Any) -> Any:
    """verl's server of a vLLM, whose workers answer ``results``: a function of a method and its arguments."""
    actor = Actor(SimpleNamespace())
    actor.collective_rpc = SimpleNamespace(remote=lambda method, kwargs=None: results(method, **(kwargs or {})))  # type: ignore[attr-defined]
    return SimpleNamespace(servers=[actor])


def test_verls_vllm_is_read_by_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    from mantissa.rollout.vllm import worker

    job = Job()
    (own,) = job.held
    monkeypatch.setattr(worker, "weights", lambda model, wanted=None: iter(model.state_dict().items()))
    reader = WeightReader()
    reader.model_runner = SimpleNamespace(model=own)
    job.replicas = [vllm_server(lambda method, **given: [getattr(reader, method)(**given)])]
    job.sync()
    with pytest.raises(MantissaError, match=r"scaled: mlp.down_proj.weight of layer 0 \(by 2\)"):
        job.sync(lambda new, old: new[DOWN].mul_(2))


@pytest.mark.parametrize(("precision", "said"), [("fp8-rollout", ""), ("mxfp8-rollout", "only fp8's are read")])
def test_simulated_codes_are_read_as_codes_or_said_not_to_be(tmp_path: Path, precision: str, said: str) -> None:
    """Our own server on a CPU holds values on fp8's grid in fp32: a healthy sync is none of what was rounded twice."""
    write_policy(tmp_path, answers=())
    masters = {name: w.float() for name, w in read_tensors(tmp_path / "model.safetensors").items()}
    serving = Serving(str(tmp_path), Limits(8, 8, 4, 1), torch.device("cpu"))
    policy = EngineOptions.of({"precision": precision}).policy("bfloat16")
    asyncio.run(serving.load(Setup(policy.model_dump(), None, 1, 32), masters, 0))
    if said:
        with pytest.raises(MantissaError, match=said):
            _ = serving.weights
        return
    found = compare(held(masters), held(serving.weights))
    assert {each.fate for each in found.outcomes} <= ARRIVED


def test_scales_of_another_layer_are_named() -> None:
    job = Job()
    (own,) = job.held
    made = quantize(job.learner.state_dict()[DOWN], E4M3, SQUARE, False, DOWN)
    wrong = {DOWN: made.codes, f"{DOWN}_scale_inv": made.scales}
    tensors = {name: w for name, w in own.state_dict().items() if name != DOWN} | wrong
    job.replicas = [SimpleNamespace(servers=[Actor(SimpleNamespace(serving=SimpleNamespace(weights=tensors)))])]
    job.gate.after_sync(job.workers, job.replicas, 0)
    tensors[f"{DOWN}_scale_inv"] = made.scales * 1.25
    with pytest.raises(MantissaError, match=r"another's scales: mlp.down_proj.weight of layer 0"):
        job.gate.after_sync(job.workers, job.replicas, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda job: setattr(job.replicas[0].servers[0].inside, "model", None), "hold no model that is known here"),
        (lambda job: job.replicas.__setitem__(0, vllm_server(lambda _: [{}, {}])), "lie in 2 workers"),
        (lambda job: job.replicas.__setitem__(0, vllm_server(lambda _: None)), "gives no answers"),
        (lambda job: job.replicas.__setitem__(0, vllm_server(lambda _: [{"a": "another layout"}])), "another layout"),
        (lambda job: job.learner.add_module("lora_A", nn.Linear(2, 2)), "the learner trains adapters"),
        (lambda job: job.learner.register_parameter("_flat_param", nn.Parameter(torch.ones(2))), "fsdp2's are read"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_once_and_stops_nothing(change: Callable[[Job], Any], said: str) -> None:
    job = Job()
    job.said.clear()
    change(job)
    job.gate.after_sync(job.workers, job.replicas, 1)
    job.gate.after_sync(job.workers, job.replicas, 2)
    assert len(job.said) == 1
    assert job.said[0].startswith("mantissa doctor: after syncs only log-probs are compared, no weights: ")
    assert said in job.said[0]
    assert job.gate.metrics() == {}


@pytest.mark.parametrize(
    ("shape", "mesh", "places"),
    [
        ((5, 6), (2,), [Shard(0)]),
        ((5, 6), (2,), [Shard(1)]),
        ((7,), (2,), [Shard(0)]),
        ((1, 6), (2,), [Shard(0)]),
        ((5, 6), (2,), [Replicate()]),
        ((5, 6), (2, 2), [Replicate(), Shard(0)]),
        ((5, 6), (2, 2), [Shard(0), Shard(1)]),
    ],
)
def test_slices_of_ranks_add_to_the_whole(shape: tuple[int, ...], mesh: tuple[int, ...], places: list[Any]) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    world, total = torch.Size(mesh).numel(), 0
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            made = init_device_mesh("cpu", mesh)
            part, at = whole, made.get_coordinate() or []
            for here, size, place in zip(at, mesh, places, strict=True):
                if isinstance(place, Shard):
                    chunks = part.chunk(size, place.dim)
                    part = chunks[here] if here < len(chunks) else part.narrow(place.dim, 0, 0)
            tensor = DTensor.from_local(part, made, places, run_check=False, shape=whole.shape, stride=whole.stride())
            total += _sum_of(tensor, torch.bfloat16)
        finally:
            dist.destroy_process_group()
    assert total % (1 << 64) == digest(whole.bfloat16()).total
