"""A row is refused where its precision did not engage; a runner that engages really computes in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mantissa.bench.runner import RefusedError, Request, Runner
from mantissa.bench.workload import Source
from mantissa.precision import FP32, format_named, is_on_grid

SMALL = Source(parameters=5_000)


def request(precision: str, backend: str = "auto") -> Request:
    return Request(SMALL, precision, "cpu", backend)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_runner_learns_in_the_precision_it_names(precision: str) -> None:
    runner = Runner(request(precision), seed=0)
    seen: list[torch.Tensor] = []
    hook = runner.workload.model.first.register_forward_hook(lambda module, inputs, out: seen.append(out))  # type: ignore[union-attr]
    batches = runner.batches(4, 32, seed=1)
    before = runner.loss(batches)
    for _ in range(10):
        for batch in batches:
            runner.step(batch)
    hook.remove()
    assert runner.loss(batches) < 0.8 * before
    assert all(is_on_grid(out.detach().float(), format_named(precision)).all() for out in seen)
    if precision != "fp32":
        assert not all(
            is_on_grid(p.detach(), format_named(precision)).all() for p in runner.workload.model.parameters()
        )


def test_the_same_seed_gives_every_precision_the_same_weights_and_data() -> None:
    runners = [Runner(request(precision), seed=3) for precision in ("fp32", "fp16")]
    weights = [torch.nn.utils.parameters_to_vector(r.workload.model.parameters()) for r in runners]
    data = [r.batches(2, 8, seed=4)[1] for r in runners]
    assert torch.equal(*weights)
    assert torch.equal(data[0][0], data[1][0])
    assert torch.equal(data[0][1], data[1][1])


def test_the_loss_of_an_evaluation_is_the_mean_over_batches_in_float64() -> None:
    runner = Runner(request("fp32"), seed=0)
    batches = runner.batches(3, 16, seed=5)
    model = runner.workload.model.double()
    with torch.no_grad():
        expected = sum((model(x.double()) - y.double()).square().mean().item() for x, y in batches) / 3
    model.float()
    assert runner.loss(batches) == pytest.approx(expected, rel=1e-6)
    assert model.training


@pytest.mark.parametrize(
    ("asked", "lie", "said"),
    [
        (("fp16",), {"active": FP32, "reason": "a substitution"},
         r"row refused \(fp16, residual MLP of 5k, on cpu\): .* was requested and fp32 was active \(a substitution\)"),
        (("bf16",), {"evidence": ""}, "no evidence that bf16 is active"),
        (("bf16", "simulated"), {"backend": "native"}, "simulated kernels were requested and native ones were active"),
    ],
)  # fmt: skip
def test_what_did_not_engage_is_refused(asked: tuple, lie: dict, said: str, lying: Callable[..., None]) -> None:
    lying(asked[0], **lie)
    with pytest.raises(RefusedError, match=said):
        Runner(request(*asked), seed=0)
