"""``+trainer.gate``: whether each rollout server has the learner's weights after verl's sync (``doctor/sync.py``).

The trainer's process asks both sides and compares digests. A server says those of what it computes with: verl's vLLM by
its worker's products, ours by its copies, any other Ray actor that holds a module as ``model`` by its tensors. The
learner's ranks say those of their own slices, each rounded as the server has it, which add up; nothing is gathered.
Only tensors whose digests differ travel to the trainer's process.

What goes wrong in a look is said, and ends the looks, not the job. Not read are servers of several workers (tensor
parallel), SGLang's and TensorRT-LLM's, and learners with adapters or whose engine is neither ours nor FSDP2's;
``SyncGate`` says so before the first step.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mantissa.base.errors import MantissaError
from mantissa.base.readers.safetensors import read_tensors
from mantissa.base.tensors import Digest, digest, partial
from mantissa.doctor.held import held
from mantissa.doctor.sync import Seen, SyncProof, source_of, verdict, wanted, with_scales
from mantissa.doctor.weights import Outcome, compare, plain_name

Sums = dict[str, tuple[tuple[int, ...], dict[str, int]]]  # by plain name: a shape, and h in each dtype


class SyncGate:
    """Of one trainer. ``stop``: whether a fault raises. ``say`` gets each line. ``seconds`` of the last look,
    ``differing``: weights that did not arrive then."""

    def __init__(self, every: int, stop: bool, key: str, say: Callable[[str], None]) -> None:
        self.proof, self.stop, self.key, self.say = SyncProof(every), stop, key, say
        self.seconds = 0.0
        self.differing = 0
        self._off = self._begun = False

    def after_sync(self, workers: list[Any], replicas: list[Any], step: int | None) -> None:
        """Look, if it is time. ``workers``: the learner's, ``replicas``: verl's. ``MantissaError`` to stop the job."""
        due, before = self.proof.began()
        if self._off or not (due or before):
            return
        begun = time.perf_counter()
        try:
            lines = self._look(workers, replicas, due)
        except Exception as reason:  # noqa: BLE001 - whatever it is, a training of days must not end by it
            self._off = True
            self.say(f"mantissa doctor: after syncs only log-probs are compared, no weights: {reason}")
            return
        self.seconds = time.perf_counter() - begun
        for line in lines:
            said = f"mantissa doctor: after the sync of step {step}, {line}"
            self.say(said)
            if self.stop:
                raise MantissaError(f"{said}. {self.key}=warn goes on in spite of it")

    def metrics(self) -> dict[str, float]:
        """Of the last look: seconds it took, weights that did not arrive."""
        if self._off or not self._begun:
            return {}
        return {"mantissa/sync_seconds": self.seconds, "mantissa/sync_weights_lost": float(self.differing)}

    def _look(self, workers: list[Any], replicas: list[Any], due: bool) -> list[str]:
        servers = [_server(replica) for replica in replicas]
        engines = [_engine_digests(server) for server in servers]
        asked: dict[str, set[str]] = defaultdict(set)
        for engine in engines:
            for name, dtype in wanted(engine).items():
                asked[name].add(dtype)
        sums = _learned(workers, {name: sorted(kinds) for name, kinds in asked.items()})
        trainers = [_of_dtypes(sums, wanted(engine)) for engine in engines]
        lines, self.differing = list[str](), 0
        for number, (server, engine, trainer) in enumerate(zip(servers, engines, trainers, strict=True)):
            if not due:
                break
            seen = self.proof.look(trainer, engine)
            self._say_first(seen, len(servers))
            if seen.lost:
                outcomes = _explained(workers, server, engine, seen)
                which = "the rollout" if len(servers) == 1 else f"server {number + 1} of {len(servers)}"
                line = verdict(seen, outcomes, which)
                lines += [line] if line else []
                self.differing += sum(each.differing for each in seen.lost) if line else 0
        self.proof.keep(trainers[0])
        return lines

    def _say_first(self, seen: Seen, servers: int) -> None:
        if self._begun:
            return
        self._begun = True
        alone = f"; {len(seen.alone)} that one side alone names ({seen.alone[0]}, ...) are not" if seen.alone else ""
        of = "the rollout" if servers == 1 else f"{servers} servers"
        self.say(
            f"mantissa doctor: after syncs {seen.tensors} tensors ({seen.weights:,} weights) of {of} are compared with "
            f"the learner's, by digest{alone}"
        )


class _UnreadError(Exception):
    """What of a job's two sides cannot be read."""


def _got(refs: Any) -> Any:
    import ray

    return ray.get(refs)


# the rollout


def _server(replica: Any) -> Any:
    servers = replica.servers
    if len(servers) != 1:
        raise _UnreadError(f"a replica of {len(servers)} servers")
    return servers[0]


def _engine_digests(server: Any) -> dict[str, Digest]:
    found = _asked(server)
    try:
        return {name: Digest.parse(str(text)) for name, text in found.items()}
    except MantissaError as error:
        raise _UnreadError(f"the rollout's: {error}") from error


def _asked(server: Any, *names: str) -> Any:
    """A server's digests, or its tensors of these names: by verl's way to vLLM's workers, or in its own process."""
    if not hasattr(server, "collective_rpc"):
        found = _got(server.__ray_call__.remote(_held_by, list(names)))
        if found is None or isinstance(found, str):
            raise _UnreadError(found or "this rollout's servers hold no model that is known here")
        return found
    if not names:
        return _of_one_worker(_got(server.collective_rpc.remote("mantissa_weights")))
    path = _got(server.__ray_call__.remote(_new_file))
    given = {"names": list(names), "path": path}
    _of_one_worker(_got(server.collective_rpc.remote("mantissa_write", kwargs=given)))
    return _got(server.__ray_call__.remote(_taken_file, path))


def _of_one_worker(results: Any) -> dict[str, Any]:
    if not isinstance(results, list):
        raise _UnreadError("this version of verl's rollout gives no answers of its workers")
    if len(results) != 1:
        raise _UnreadError(
            f"the rollout's lie in {len(results)} workers, and of several none is read (tensor parallel)"
        )
    return dict(results[0])


def _new_file(actor: Any) -> str:
    """In a vLLM server's process, which sees its worker's files: a path in a folder of its own."""
    return str(Path(tempfile.mkdtemp(prefix="mantissa-weights-")) / "read.safetensors")


def _taken_file(actor: Any, path: str) -> dict[str, Tensor]:
    """What its worker wrote there; the folder is removed."""
    try:
        return read_tensors(Path(path))
    finally:
        shutil.rmtree(Path(path).parent)


def _held_by(actor: Any, names: list[str]) -> dict[str, Any] | str | None:
    """In a server's process: digests of all its tensors, or the tensors of these names; why there are none. None: it
    holds no model."""
    serving, model = getattr(actor, "serving", None), getattr(actor, "model", None)
    if serving is not None:
        try:
            tensors: Mapping[str, Tensor] = serving.weights
        except MantissaError as error:
            return str(error)
    elif isinstance(model, nn.Module):
        tensors = model.state_dict()
    else:
        return None
    if names:
        return {name: tensors[name].detach().cpu() for name in names}
    return {name: str(digest(each)) for name, each in tensors.items()}


# the learner


def _learned(workers: list[Any], asked: dict[str, list[str]]) -> Sums:
    """Of each of the learner's tensors by plain name: its shape, and h of it once rounded to each dtype."""
    parts = _got([worker.__ray_call__.remote(_slices_of, asked) for worker in workers])
    if any(isinstance(part, str) for part in parts):
        raise _UnreadError(next(part for part in parts if isinstance(part, str)))
    found: Sums = {}
    for part in parts:
        for name, (shape, sums) in part.items():
            kept = found.setdefault(name, (shape, dict.fromkeys(sums, 0)))[1]
            for dtype, total in sums.items():
                kept[dtype] = (kept[dtype] + total) % (1 << 64)
    return found


def _of_dtypes(sums: Sums, dtypes: Mapping[str, str]) -> dict[str, Digest]:
    return {
        name: Digest(dtypes[name], shape, totals[dtypes[name]])
        for name, (shape, totals) in sums.items()
        if dtypes.get(name) in totals
    }


def _engine_of(worker: Any) -> Any:
    """The actor's training engine in a worker's process."""
    inside = (*getattr(worker, "worker_dict", {}).values(), *getattr(worker, "fused_worker_dict", {}).values())
    for each in (worker, *inside):
        engine = getattr(getattr(each, "actor", None), "engine", None)
        if engine is not None:
            return engine
    return None


def _tensors_of(worker: Any) -> dict[str, Tensor] | str:
    """In a learner's process: its tensors by plain names, in slices; or why there are none."""
    engine = _engine_of(worker)
    module = getattr(engine, "module", None)
    if not isinstance(module, nn.Module):
        return f"the learner's engine {type(engine).__name__} holds no module of torch's"
    if any("lora_" in name for name, _ in module.named_parameters()):
        return "the learner trains adapters"
    own = engine.weights() if hasattr(engine, "weights") else module.state_dict()
    found = {plain_name(name): each.detach() for name, each in own.items() if isinstance(each, Tensor)}
    if any("_flat_param" in name for name in found):
        return "the learner's weights are flattened (fsdp); fsdp2's are read"
    return found


def _slices_of(worker: Any, asked: dict[str, list[str]]) -> Sums | str:
    """In a learner's process: h of its slices of the tensors that are asked for."""
    own = _tensors_of(worker)
    if isinstance(own, str):
        return own
    found = {}
    with torch.no_grad():
        for name, dtypes in asked.items():
            tensor = own.get(source_of(name, own))
            if tensor is None:
                continue
            sums = {}
            for dtype in dtypes:
                sums[dtype] = _sum_of(tensor, getattr(torch, dtype))
            found[name] = (tuple(tensor.shape), sums)
    return found


def _sum_of(tensor: Tensor, dtype: torch.dtype) -> int:
    """h of this rank's slice, 0 where another rank has the same one."""
    if not isinstance(tensor, DTensor):
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        return partial(tensor.to(dtype)) if first else 0
    mesh, places = tensor.device_mesh, tensor.placements
    coordinates: list[int] = list(mesh.get_coordinate() or ())
    copies = [at for at, place in zip(coordinates, places, strict=True) if isinstance(place, Replicate)]
    if any(copies):
        return 0
    offsets = _offsets(tensor, [place for place in places if not isinstance(place, Replicate)])
    return partial(tensor.to_local().to(dtype), *offsets)


def _offsets(tensor: DTensor, cut: list[Any]) -> tuple[int, int]:
    """Where a slice begins: by rows, and by columns of a matrix."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    plain = all(type(each) is Shard and (each.dim == 0 or (each.dim == 1 and tensor.ndim == 2)) for each in cut)
    if not plain:
        raise MantissaError(f"a tensor that is cut as {tensor.placements}: expected slices of rows or of columns")
    _, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return int(begins[0]), int(begins[1]) if tensor.ndim == 2 else 0


def _whole_of(worker: Any, names: list[str]) -> dict[str, Tensor]:
    """In a learner's process: these tensors, whole; a collective of all ranks."""
    own = _tensors_of(worker)
    assert not isinstance(own, str)
    found = {}
    for name in names:
        tensor = own[source_of(name, own)]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = whole.cpu()
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return found if first else {}


# both


def _explained(workers: list[Any], server: Any, engine: Mapping[str, Digest], seen: Seen) -> dict[str, Outcome]:
    """What became of the tensors of which digests do not say it, from the values of both sides."""
    if not seen.unknown:
        return {}
    names = list(seen.unknown)
    mine = _got([worker.__ray_call__.remote(_whole_of, names) for worker in workers])
    theirs = _asked(server, *with_scales(names, engine))
    trainer = {name: each for part in mine for name, each in part.items()}
    found = compare(held(trainer), held({plain_name(name): each for name, each in theirs.items()}))
    return {each.name: each for each in found.outcomes}
