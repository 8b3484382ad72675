"""The probe of an ``Autocast``, which formats and devices it takes, and which one a role gets."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from mantissa.errors import MantissaError
from mantissa.kernels import Autocast, autocast_for, probe_autocast
from mantissa.kernels.autocast import Backend
from mantissa.kernels.rounded import rounding
from mantissa.precision import BF16, E4M3, FP16, FP32, NumberFormat, PrecisionPolicy, resolve

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]  # CUDA: not yet run on a GPU


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("backend", ["native", "simulated"])
def test_probe_names_what_it_saw(backend: Backend, fmt: NumberFormat, device: str) -> None:
    evidence = probe_autocast(Autocast(fmt, backend, device), device)
    assert "keeps 1+u; " in evidence
    assert "rounds a weight's gradient of 1+u/4 to 1" in evidence
    assert ("overflows a gradient of 120000 to inf" in evidence) == (fmt is FP16)


@dataclasses.dataclass
class Pretended:
    """An ``Autocast`` that says one format and computes in another."""

    format: NumberFormat
    real: Autocast

    def forward(self) -> object:
        return self.real.forward()

    def backward(self) -> object:
        return self.real.backward()


@pytest.mark.parametrize(("says", "does"), [(FP16, FP32), (BF16, FP32), (FP16, BF16), (BF16, FP16), (FP32, BF16)])
def test_probe_refuses_another_format_than_it_is_told(says: NumberFormat, does: NumberFormat) -> None:
    with pytest.raises(MantissaError, match=f"{says} is not active"):
        probe_autocast(Pretended(says, Autocast(does, "simulated", "cpu")), "cpu")  # type: ignore[arg-type]


def test_probe_takes_its_gradients_inside_backward() -> None:
    seen = []

    class Watched(Autocast):
        def backward(self):  # type: ignore[no-untyped-def]
            seen.append(1)
            return super().backward()

    probe_autocast(Watched(FP16, "simulated", "cpu"), "cpu")
    assert len(seen) == 10  # two gradients in each of five cases


def test_formats_and_devices_that_have_no_autocast_are_refused() -> None:
    with pytest.raises(MantissaError, match=r"precision=e4m3: modules run in fp32, fp16 or bf16, not in fp8"):
        Autocast(E4M3, "simulated", "cpu")
    with pytest.raises(MantissaError, match="device=meta: torch has no autocast"):
        Autocast(FP16, "native", "meta")


@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_autocast_for_a_role_takes_what_is_active(name: str, backend: str) -> None:
    policy = PrecisionPolicy(train=name, rollout=name, backend=backend)  # type: ignore[arg-type]
    role = resolve(policy, "cpu").learner
    autocast = autocast_for(role, torch.device("cpu"))
    assert (autocast.format, autocast.backend, autocast.device_type) == (role.active, role.backend, "cpu")
    assert repr(autocast) == f"Autocast({name}, {role.backend}, cpu)"
    with autocast.forward():
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == role.active.dtype
        assert (rounding() is not None) == (role.backend == "simulated")
