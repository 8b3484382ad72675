"""The claim itself: what the engine said of a token when it sampled it is, in every bit, what the learner says of it.

The engine is the real one: a cache, slots that fall free and are filled again, prompts computed once for all samples,
a batch that shrinks. The learner is the real forward over packed sequences, with its graph. What is compared is fp32
log-probs as integers, so that not even the sign of a zero passes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from exact_policies import FAMILIES, FORMATS, Policies, Sampled, exactly, make_model, ragged, threads
from torch import Tensor

from mantissa.kernels import ExactKernels, plan_exact, rollout_kernels
from mantissa.kernels.exact_attention import causal
from mantissa.model import Decoder, LoraShape, attach
from mantissa.precision import FP16, PrecisionPolicy, resolve
from mantissa.rollout import Request

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.slow
def test_a_million_log_probs_are_equal() -> None:
    """Every family in every format: ragged prompts, shared ones, more jobs than slots, long caches, four batchings."""
    compared = 0
    for family, config in FAMILIES.items():
        for precision in FORMATS:
            policies = Policies(make_model(config), exactly(precision), slots=128)
            import time
            t=time.process_time()
            sampled = policies.sample(ragged(72, samples=8), tokens=220)
            t2=time.process_time()
            assert policies.engine.stats.prefills > 1
            assert policies.engine.stats.occupancy < 1
            for micro in (None, 64, 16):
                assert policies.different(sampled, micro=micro) == 0, f"{family} {precision} {micro}"
                compared += len(sampled.logp_N)
            print(family,precision,len(sampled.logp_N),t2-t,time.process_time()-t2)
    print(compared)
    assert compared >= 1_000_000
