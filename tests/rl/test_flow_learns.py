"""FlowRL from the warm start on, in fp16: held-out accuracy rises, for every seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mantissa.runs.directory import RunDirectory


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_flowrl_raises_held_out_accuracy(
    train: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Sums mod 5 of four digits, 30 steps: from 0.39 to 0.69 after the warm start, by 0.15 or more (0.21 to 0.27 seen).

    ``beta: 5``: with the published 15 and so few steps these runs gain less, and less surely. The first loss scale is
    low because a squared delta of several nats has gradients far above those of a clipped ratio.
    """
    monkeypatch.setattr("mantissa.rl.session.build_report", lambda run: run.report_path)
    run = train(
        "steps=30",
        f"seed={seed}",
        "task={kind: running_sum, min_digits: 4, max_digits: 4, modulus: 5, train_size: 2000, heldout_size: 64, "
        "warm_start_size: 4096}",
        "model.fresh={hidden_size: 64, layers: 2, heads: 4, kv_heads: 2, head_dim: 16, intermediate_size: 64, "
        "max_positions: 64}",
        "warm_start={steps: 300, batch: 64, lr: 5e-3, evaluate_every: 10, problems: 64, target_accuracy: 0.35}",
        "rollout={prompts: 32, samples: 8, max_tokens: 6, slots: 256}",
        "algorithm={reference: {}, correction: token_tis, loss: {kind: flowrl, beta: 5}}",
        "optimizer={lr: 5e-4, updates_per_batch: 2}",
        "loss_scaling.initial=2048",
        "evaluation={every: 30, problems: 64, samples: 4}",
    )
    before, rows = run.read_warm_start()[-1]["warm_start/accuracy"], run.read_metrics()
    assert 0.35 <= before < 0.75
    assert rows[-1]["eval/avg_at_k"] > before + 0.15
    assert rows[-1]["flowrl/delta_abs_mean"] < rows[0]["flowrl/delta_abs_mean"]
    assert rows[-1]["reference/k3_kl"] > 0
    assert sum(row["precision/skipped"] for row in rows) == 0
