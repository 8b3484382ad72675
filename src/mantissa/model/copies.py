"""Policies that do not train: a decoder whose weights are copies of a learner's masters, in their kernels' own form.

A copy is made once from the fp32 master: rounded to the format, or for a layer in fp8 quantised to codes and scales.
What is kept is what the kernels multiply: fp32 values on the grid (simulated), a half dtype (native), or the codes
themselves with their scales beside them (native fp8). A policy that only samples may keep its projections, and once
more its tied head, in the layout that its products read fastest (``kernels/products.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError, nearest
from mantissa.kernels import Kernels
from mantissa.kernels.products import packed
from mantissa.model.config import ModelConfig
from mantissa.model.decoder import Decoder, Projection
from mantissa.precision import BlockScaled


class CopiedPolicy:
    """A decoder that holds copies. ``who`` begins its errors: ``sync``, ``reference``.

    ``pack``: keep matrices in their products' layout, where the kernels read it.

    It holds NaN until ``take`` has succeeded: a policy with half its weights is nobody's policy.
    """

    def __init__(
        self, config: ModelConfig, kernels: Kernels, device: torch.device | str, who: str, pack: bool = False
    ) -> None:
        self.kernels, self.who = kernels, who
        self._pack = pack and kernels.packs
        with torch.device("meta"):  # neither memory nor random values for what ``take`` overwrites
            decoder = Decoder(config).requires_grad_(False)
        self.decoder = decoder.to(kernels.dtype).to_empty(device=torch.device(device))
        self._poison()

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is kept, by parameter name, in its own dtype; the scales of codes as ``NAME.scales``."""
        kept: dict[str, Tensor] = {}
        for name, owner, parameter in self._parameters():
            kept[name] = parameter.detach().to_dense() if parameter.is_mkldnn else parameter.detach()
            if isinstance(owner, Projection) and owner.scales is not None and parameter is owner.weight:
                kept[f"{name}.scales"] = owner.scales
        return kept

    def take(self, masters: Mapping[str, Tensor]) -> None:
        """Become a copy of the policy with these fp32 masters, each rounded or quantised once.

        Sharded masters are made whole one at a time; every rank that holds a shard must call this.
        Fails closed: the destination is filled with NaN first and checked after. A missing, unknown, misshapen or
        non-finite tensor, one that is not fp32, and one beyond the format's largest value are errors that name it.
        """
        self._poison()
        self._check_names(masters)
        names, peaks = [], []
        with torch.no_grad():
            for name, owner, parameter in self._parameters():
                master = _whole(masters[name].detach()).to(parameter.device)
                kept = self._keep(owner, parameter, master)
                names.append(name)
                # The largest magnitude of the master and of what is now stored; NaN wins a maximum, so one that was
                # not written shows. One transfer to the host for all tensors.
                peaks.append(torch.stack((_peak(master), _peak(kept.float()))))
            self.decoder.packed_head = self._tied_head() if self._pack and self.decoder.lm_head is None else None
            peaks_N2 = torch.stack(peaks).cpu()
        for name, (master_peak, stored_peak) in zip(names, peaks_N2.tolist(), strict=True):
            self._check_peak(name, master_peak, stored_peak)

    def _keep(self, owner: nn.Module, parameter: nn.Parameter, master: Tensor) -> Tensor:
        """Copy one master into its place; returns what now lies there."""
        weight_of = isinstance(owner, Projection) and parameter is owner.weight
        copy = self.kernels.copied(master, owner.name if isinstance(owner, Projection) and weight_of else "")
        if isinstance(copy, Tensor):
            laid = packed(copy) if self._pack and weight_of else copy
            if not laid.is_mkldnn:
                return parameter.copy_(copy)
            owner.weight = nn.Parameter(laid, requires_grad=False)
            return copy
        assert isinstance(owner, Projection)  # nothing else has a name, and only what has one is quantised
        self._make_room(owner, copy)
        assert owner.scales is not None
        owner.weight.copy_(copy.codes)
        owner.scales.copy_(copy.scales)
        return torch.stack((owner.weight.float().abs().amax(), owner.scales.amax()))

    def _tied_head(self) -> Tensor | None:
        """A tied head in its product's layout, beside the embedding; None where there is none for it."""
        tied = self.decoder.head_weight
        head = packed(tied.float()) if tied.device.type == "cpu" else tied  # logits are an fp32 product there
        return head if head.is_mkldnn else None

    @staticmethod
    def _make_room(owner: Projection, copy: BlockScaled) -> None:
        """The first time that a weight comes as codes; from then on they are copied into the same place."""
        if owner.scales is None:
            owner.weight = nn.Parameter(torch.empty_like(copy.codes), requires_grad=False)
            owner.scales = torch.empty_like(copy.scales)

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Before ``weights`` are overwritten by those of another such policy: hold codes wherever that one did."""
        for name, owner, parameter in self._parameters():
            scales = tensors.get(f"{name}.scales")
            if scales is not None and isinstance(owner, Projection):
                device = parameter.device
                self._make_room(owner, BlockScaled(tensors[name].to(device), scales.to(device)))

    def _parameters(self) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
        """Every parameter with its name and the module it belongs to."""
        for prefix, module in self.decoder.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                yield f"{prefix}.{name}", module, parameter

    @torch.no_grad()
    def _poison(self) -> None:
        self.decoder.packed_head = None
        for _, owner, parameter in self._parameters():
            if parameter.is_mkldnn:  # is replaced, not written to
                owner.weight = nn.Parameter(torch.full((1, 1), float("nan")).expand_as(parameter), requires_grad=False)
            else:
                parameter.fill_(float("nan"))
            if isinstance(owner, Projection) and owner.scales is not None:
                owner.scales.fill_(float("nan"))

    def _error(self, name: str, what: str) -> MantissaError:
        return MantissaError(f"{self.who}: weight {name} {what}")

    def _check_names(self, masters: Mapping[str, Tensor]) -> None:
        expected = {name: parameter for name, _, parameter in self._parameters()}
        for name in (name for name in expected if name not in masters):
            raise self._error(name, f"is missing{nearest(name, masters)}; send every parameter")
        for name, master in masters.items():
            if name not in expected:
                tied = "; the head is tied to the embedding and is not sent" if name == "lm_head.weight" else ""
                raise MantissaError(f"{self.who}: unknown weight {name}{tied or nearest(name, expected)}")
            if master.shape != expected[name].shape:
                raise self._error(name, f"has shape {tuple(master.shape)}, expected {tuple(expected[name].shape)}")
            if master.dtype != torch.float32:
                raise self._error(
                    name, f"is {master.dtype}, expected the fp32 master: a second rounding changes values"
                )

    def _check_peak(self, name: str, master_peak: float, stored_peak: float) -> None:
        fmt = self.kernels.format
        if not math.isfinite(master_peak):
            raise self._error(name, f"holds {master_peak}: expected finite values; training diverged")
        if math.isnan(stored_peak):
            raise self._error(name, "was not written in full: NaN is left after the copy")
        if not math.isfinite(stored_peak):
            cannot = f"which {fmt} cannot (largest {fmt.largest:g}): use bf16 or fp32"
            raise self._error(name, f"holds {master_peak:g}, {cannot}")


def _whole(master: Tensor) -> Tensor:
    """All of a tensor that several processes hold shards of; any other tensor itself."""
    gather = getattr(master, "full_tensor", None)
    return master if gather is None else gather()


def _peak(x: Tensor) -> Tensor:
    """The largest magnitude, NaN where there is one, in one pass over the memory: ``x.abs().amax()`` makes three."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)
