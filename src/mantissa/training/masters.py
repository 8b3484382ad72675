"""What an update leaves in the weights: fp32 masters, or weights of bf16 that are rounded so that updates still count.

A bf16 number has 8 significant bits, so to nearest every update below |w| / 512 is lost: at a rate of 3e-5 most of
Adam's are, and the weights stand still: that is ``bf16_nearest``, what an optimiser over a bf16 model does, to
compare with. Two known ways out, both without an fp32 copy of the weights. Let u be what
the optimiser would add in fp32, u = fp32(w + update) - w; its moments and the gradient are as they are with masters.

- ``bf16_stochastic``:  w' = bf16(w + u), up or down with a probability that is the distance from the other neighbour:
  E[w'] = w + u. What an update lacks in size it has in probability; the price is noise, of variance d (s - d) for a
  remainder d below a spacing s.
- ``bf16_kahan``:  y = u + c;  w' = bf16(w + y);  c' = bf16(y - (w' - w)). What rounding took is kept in c, also bf16,
  and added to the next update. That is not fp32's precision: c itself is rounded to nearest, so that updates below
  2^-18 |w| are lost once c is as large as it gets, half a spacing of w.

The random bits are a hash of the seed, the parameter's name, the count of updates and the element's number in the
whole tensor: no generator has a state that could be lost, ranks agree, and a shard draws what the whole would.

The weights are *simulated* bf16: values of bf16 in fp32 tensors, which gradients and kernels are made for. A bf16 or
fp32 learner multiplies exactly them. No memory is saved: it is the arithmetic of
training without masters, for those who want to know what that costs in learning. Only c, 2 bytes a weight, is bf16 in
memory too.

Sources: W. Kahan, "Further remarks on reducing truncation errors", CACM 8 (1965) 40; P. Zamirai, J. Zhang, C. R.
Aberger, C. De Sa, "Revisiting bfloat16 training" (2020), arXiv:2010.06192, algorithms 1 (stochastic) and 2 (Kahan).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import is_dtensor, local, shard_like
from mantissa.base.seeds import GOLDEN, mix, signed
from mantissa.base.tensors import check_tensor
from mantissa.precision import BF16, NumberFormat, round_stochastically, round_to_format

Masters = Literal["fp32", "bf16_nearest", "bf16_stochastic", "bf16_kahan"]
COMPENSATION = "compensation"
_PART = 1 << 16  # values rounded at a time, so that each part stays in the cache; whole words of random bits


def check_masters(masters: str, learner: NumberFormat, lora: bool = False) -> None:
    """``MantissaError`` where the learner would not see the weights that are stored.

    ``learner``: the format it computes in, of fp8 the base. ``lora``: whether adapters train.
    """
    if masters == "fp32":
        return
    if masters not in get_args(Masters):
        raise MantissaError(f"masters={masters!r}: expected {', '.join(get_args(Masters))}")
    if learner.exponent_bits < BF16.exponent_bits or learner.mantissa_bits < BF16.mantissa_bits:
        raise MantissaError(
            f"optimizer.masters={masters} with a {learner} learner: not every value of bf16 is one of {learner}, so "
            "it would learn with other weights than are stored; set precision.train=bf16 or fp32, or "
            "optimizer.masters=fp32"
        )
    if lora:
        raise MantissaError(
            f"optimizer.masters={masters} with model.lora: adapters are merged in fp32 and rounded once with their "
            "base, so the learner would not see what is stored; set optimizer.masters=fp32"
        )


class MasterWeights:
    """fp32 masters: what the optimiser does is what is kept. The others are subclasses."""

    kind: Masters = "fp32"
    reason = ""  # in the precision table

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}  # those whose updates are rounded
        self.compensation: dict[str, Tensor] = {}

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take these as the optimiser's: bf16 kinds round those that are new and train, and forget those that left."""

    def step(self, optimizer: torch.optim.Optimizer, update: int) -> None:
        """The optimiser's step, number ``update`` (0 for the first), and the rounding of what it did."""
        optimizer.step()

    def check_kind(self, kind: object) -> None:
        """``MantissaError`` where a checkpoint is of another kind of masters."""
        if kind != self.kind:
            raise MantissaError(
                f"checkpoint is of masters={kind}, this run has masters={self.kind}; set optimizer.masters={kind} "
                "(PrecisionTrainer: masters=), or start a new run from that one's weights"
            )

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's compensation by parameter, laid out as here, to be set as ``compensation``; or an error."""
        if not tensors or not self.compensation:
            if bool(tensors) != bool(self.compensation):
                self.check_kind("bf16_kahan" if tensors else "fp32, bf16_nearest or bf16_stochastic")
            return {}
        for name in self.compensation.keys() ^ tensors.keys():
            raise MantissaError(f"checkpoint's compensation does not fit this model: {name} is in one of them alone")
        for name, here in self.compensation.items():
            check_tensor(f"checkpoint's compensation of {name}", tensors[name], here.shape, torch.bfloat16)
        return {name: shard_like(tensors[name].clone(), here) for name, here in self.compensation.items()}


class _Bf16(MasterWeights):
    """Weights on bf16's grid. ``parameters`` that train are rounded to it once, to nearest, when they come in."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.follow(parameters)

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name in [name for name, mine in self.parameters.items() if parameters.get(name) is not mine]:
            del self.parameters[name]
            self.compensation.pop(name, None)
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in self.parameters:
                self._adopt(name, parameter)
                self.parameters[name] = parameter

    @torch.no_grad()
    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        here = local(parameter)
        here.copy_(round_to_format(here, BF16))

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, update: int) -> None:
        moved = {name: p for name, p in self.parameters.items() if p.grad is not None}
        before = {name: local(p).to(torch.bfloat16) for name, p in moved.items()}  # exact: they are on the grid
        optimizer.step()
        for name, parameter in moved.items():
            here = local(parameter)
            flat, old = here.reshape(-1), before.pop(name).reshape(-1)  # a copy where it is not contiguous
            for start in range(0, len(flat), _PART):
                part = slice(start, start + _PART)
                flat[part] = self._kept(name, part, old[part].float(), flat[part], update)
            if flat.data_ptr() != here.data_ptr():
                here.copy_(flat.view_as(here))

    def _kept(self, name: str, part: slice, old: Tensor, new: Tensor, update: int) -> Tensor:
        """What becomes of a part of a tensor that the optimiser took from ``old`` to ``new``, all fp32."""
        raise NotImplementedError


class _Nearest(_Bf16):
    kind: Masters = "bf16_nearest"
    reason = "values of bf16 in fp32 tensors (no memory saved); an update below half a spacing is lost"

    def _kept(self, name: str, part: slice, old: Tensor, new: Tensor, update: int) -> Tensor:
        return round_to_format(new, BF16)


class _Stochastic(_Bf16):
    kind: Masters = "bf16_stochastic"
    reason = "values of bf16 in fp32 tensors (no memory saved); fp32 updates, rounded up or down by chance"

    def __init__(self, parameters: Mapping[str, nn.Parameter], seed: int) -> None:
        self._seed = seed
        self._keys: dict[str, int] = {}
        self._first: dict[str, int] = {}
        super().__init__(parameters)

    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        self._first[name] = first_element(name, parameter)
        self._keys[name] = _key(self._seed, name)
        super()._adopt(name, parameter)

    def _kept(self, name: str, part: slice, old: Tensor, new: Tensor, update: int) -> Tensor:
        key = signed(self._keys[name] + (update + 1) * GOLDEN)
        return round_stochastically(new, random_bits(key, self._first[name] + part.start, len(new), new.device))


class _Kahan(_Bf16):
    kind: Masters = "bf16_kahan"
    reason = "values of bf16 in fp32 tensors (no memory saved), and 2 bytes a weight for what rounding took"

    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        super()._adopt(name, parameter)
        self.compensation[name] = torch.zeros_like(
            parameter.detach(), dtype=torch.bfloat16, memory_format=torch.contiguous_format
        )

    def _kept(self, name: str, part: slice, old: Tensor, new: Tensor, update: int) -> Tensor:
        c = local(self.compensation[name]).view(-1)[part]
        y = (new - old) + c.float()  # the names of the formula, above
        kept = round_to_format(old + y, BF16)
        c.copy_((y - (kept - old)).to(torch.bfloat16))
        return kept


def master_weights(
    kind: Masters, parameters: Mapping[str, nn.Parameter], learner: NumberFormat, seed: int = 0
) -> MasterWeights:
    """The rule of this ``kind`` for these named parameters, which bf16 kinds round at once. ``seed``: of the draws.

    ``learner`` and errors: ``check_masters``.
    """
    check_masters(kind, learner)
    if kind == "bf16_nearest":
        return _Nearest(parameters)
    if kind == "bf16_stochastic":
        return _Stochastic(parameters, seed)
    return _Kahan(parameters) if kind == "bf16_kahan" else MasterWeights()


def _key(seed: int, name: str) -> int:
    """63 bits of SHA-256: names of parameters are text, and the hash of the draws is of integers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def random_bits(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """16 random bits for each of the elements ``start`` to ``start + count`` of a key's stream: int32, 0 to 65535.

    Element i has the (i mod 4)-th quarter of word i // 4, which is mix(mix(key) + (i // 4 + 1) g) of ``base/seeds.py``.
    """
    first, end = start // 4, -(-(start + count) // 4)
    word = mix(torch.arange(first + 1, end + 1, device=device) * GOLDEN + mix(torch.tensor(key, device=device)))
    return word.view(torch.int16)[start - 4 * first :][:count].to(torch.int32) & 0xFFFF


def first_element(name: str, parameter: Any) -> int:
    """The number, in the whole tensor, of the first element that this rank holds; its others follow in order."""
    if not is_dtensor(parameter):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements, mesh = parameter.placements, parameter.device_mesh
    if not all(placement.is_shard(0) or placement.is_replicate() for placement in placements):
        raise MantissaError(
            f"optimizer.masters=bf16_stochastic: {name} is placed {placements}; expected shards of dimension 0, whose "
            "elements follow each other; shard on dimension 0, or set optimizer.masters=bf16_kahan"
        )
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return int(offset[0]) * math.prod(parameter.shape[1:]) if offset else 0
