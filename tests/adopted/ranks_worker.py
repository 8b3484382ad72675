"""Run by test_ranks.py on two processes: an adopted model under FSDP2 and DDP, against the same one on one process."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from families import make

import mantissa

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
tokens = torch.randint(3, 500, (4, 40), generator=torch.Generator().manual_seed(1))
for precision in ("fp32", "bf16"):
    models = [make("gpt_oss") for _ in range(3)]
    for model in models:
        mantissa.adopt(model, precision, length=128)
    alone, sharded, replicated = models
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    with torch.no_grad():
        expected = alone(input_ids=tokens, use_cache=False).logits[2 * rank : 2 * rank + 2]
    for model in (sharded, DistributedDataParallel(replicated, find_unused_parameters=True)):
        logits = model(input_ids=tokens[2 * rank : 2 * rank + 2], use_cache=False).logits
        assert torch.equal(logits, expected), (precision, type(model))
        torch.log_softmax(logits, -1)[..., 5].sum().backward()
        assert next(model.parameters()).grad is not None
print(f"rank {rank}: equal")
dist.destroy_process_group()
