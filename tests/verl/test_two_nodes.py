"""verl's own trainer on two real Ray nodes of one machine, with our learner and engine: every log-prob equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_job import ACTOR, ROLLOUT, run_job
from verl_nodes import Nodes

pytestmark = [pytest.mark.verl, pytest.mark.slow]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


VARIANT = pytest.mark.variants


@pytest.mark.parametrize("name", [pytest.param("fp32", marks=VARIANT), pytest.param("bf16", marks=VARIANT), "fp16"])
def test_rollout_old_and_update_have_equal_log_probs_on_two_nodes(tmp_path: Path, nodes: Nodes, name: str) -> None:
    """A rank and a server on each node, the weights in slices over both."""
    job = run_job(
        tmp_path,
        f"{ACTOR}.strategy=mantissa",
        f"+{ACTOR}.fsdp_config.mixed_precision={{precision:{{train:{name},rollout:{name},kernels:exact}},length:32}}",
        "data.train_batch_size=32",
        f"{ACTOR}.ppo_mini_batch_size=32",
        f"{ROLLOUT}.n=12",
        rollout="mantissa",
        external_lib="mantissa.verl.plugin",
        ranks=2,
        address=nodes.address,
        environment=nodes.token,
    )
    compared = sum(row["actor/mantissa/logprobs_compared"] for row in job.metrics.values())
    unlike = [row[f"actor/mantissa/logprobs_unlike_{of}"] for row in job.metrics.values() for of in ("rollout", "old")]
    print(f"{name}, two nodes: {unlike} of {compared:.0f} log-probs differ; {job.seconds:.0f} s")
    assert sorted(job.metrics) == [1, 2]
    assert compared >= 10_000
    assert unlike == [0.0] * 4
    assert {f"mantissa server {rank} on node " in job.log for rank in (0, 1)} == {True}
    on = {line.split("on node ")[1][:8] for line in job.log.splitlines() if "mantissa server " in line}
    assert len(on) == 2, "a server on each node"
