"""Run by test_ranks.py on two processes: transformers' own code in slices, its masters cast where they are used."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from families import make

from mantissa.base.ranks import Ranks
from mantissa.precision import BF16
from mantissa.rollout.transformers import TransformersPolicy, place_transformers

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, cpu = dist.get_rank(), torch.device("cpu")
tokens = torch.randint(3, 500, (4, 40), generator=torch.Generator().manual_seed(1))
own = tokens[2 * rank : 2 * rank + 2]
alone, sharded = (TransformersPolicy(make("olmo2"), BF16) for _ in range(2))
place_transformers(sharded, cpu, Ranks(rank, 2, cpu, "fsdp2"))


def loss(policy: TransformersPolicy, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = policy(input_ids=rows, use_cache=False).logits
    return logits, torch.log_softmax(logits.float(), -1)[..., 5].sum()


whole = sum(loss(alone, tokens[row : row + 2])[1] for row in (0, 2))
whole.backward()
logits, value = loss(sharded, own)
value.backward()
assert torch.equal(logits, loss(alone, own)[0])
for (name, one), two in zip(alone.named_parameters(), sharded.parameters(), strict=True):
    found = two.grad.full_tensor()
    assert found.dtype is torch.float32, name
    assert (found - one.grad).abs().max() <= 0.02 * one.grad.abs().max(), name
print(f"rank {rank}: equal")
dist.destroy_process_group()
