"""verl's engines in this process, without Ray: built as verl's worker builds them, and given verl's kind of batch.

Imported in processes that were started for it (``verl_engine_worker``): verl fixes its platform as it is imported.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.utils.losses import ppo_loss

import mantissa.verl.plugin  # noqa: F401
import verl  # noqa: F401 - before its parts: it loads the plugin's platform


def join(folder: Path) -> tuple[int, int]:
    """Join the process group of RANK and WORLD_SIZE through a file in ``folder``."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    return rank, world


def engine(
    folder: Path,
    strategy: str,
    lr: float = 1e-3,
    clip: float = 1.0,
    section: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    **mixed_precision: Any,
) -> BaseEngine:
    """An actor's engine on the tiny model of ``folder``, initialised. ``section``, ``optim``: more of
    ``actor.fsdp_config`` and ``actor.optim``. Where ranks share a sequence, rows are packed, as verl wants it."""
    from verl.trainer.config import CheckpointConfig

    section = section or {}
    packed = section.get("ulysses_sequence_parallel_size", 1) > 1
    if packed:
        _attend_packed()
    model = HFModelConfig(
        path=str(folder / "model"),
        use_remove_padding=packed,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    config = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        use_dynamic_bsz=False,
        mixed_precision=mixed_precision,
        use_remove_padding=packed,
        **section,
    )
    object.__setattr__(config, "strategy", strategy)  # as verl's actor section does
    optimizer = FSDPOptimizerConfig(lr=lr, clip_grad=clip, total_training_steps=100, weight_decay=0.01, **(optim or {}))
    contents = ["model", "optimizer", "extra"]
    made = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=model,
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents),
    )
    made.initialize()
    return made


def _attend_packed() -> None:
    """Flash attention's part in verl's packed forward, for a processor, where there is none: the rows of a packed
    sequence apart, by their positions; and verl's own exchange of heads and positions around it."""
    from torch.nn.functional import scaled_dot_product_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from verl.models.transformers import monkey_patch

    def rows_apart(
        query: Any, key: Any, value: Any, *_: Any, position_ids: Any, softmax_scale: Any, **more: Any
    ) -> Any:
        row_T = (position_ids[0] == 0).cumsum(0)
        order_T = torch.arange(len(row_T))
        mask_TT = (row_T.unsqueeze(1) == row_T) & (order_T.unsqueeze(1) >= order_T)
        heads = (each.transpose(1, 2) for each in (query, key, value))
        out = scaled_dot_product_attention(*heads, attn_mask=mask_TT, scale=softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **more: Any) -> Any:
        first = [each.transpose(1, 2) for each in (query, key, value)]
        out = monkey_patch._ulysses_flash_attention_forward(
            *first, None, query.shape[2], position_ids=more["position_ids"], softmax_scale=scaling
        )
        return out, None

    monkey_patch._flash_attention_forward = rows_apart
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attention)


def loss_of(mode: str = "vanilla", agg: str = "token-mean", **settings: Any) -> Any:
    """verl's loss function of an actor with this policy loss."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    config: ActorConfig = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=8,
        policy_loss=PolicyLossConfig(loss_mode=mode),
        loss_agg_mode=agg,
        **settings,
    )
    return partial(ppo_loss, config=config)


def batch(rank: int = 0, world: int = 1, groups: int = 4, samples: int = 4, seed: int = 0, packed: bool = False) -> Any:
    """This rank's rows of a batch drawn from ``seed``: ragged, as verl's trainer hands it over."""
    draw = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> torch.Tensor:
        length = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(4, 60, (length,), generator=draw)

    prompts = [prompt for _ in range(groups) for prompt in [ids(3, 9)] * samples]
    responses = [ids(2, 12) for _ in prompts]

    def values(scale: float = 0.1, shift: float = -4.0) -> list[torch.Tensor]:
        return [torch.randn(len(r), generator=draw) * scale + shift for r in responses]

    reward = torch.randn(len(prompts), generator=draw).view(groups, samples)
    reward = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).flatten()
    columns = {
        "input_ids": [torch.cat(pair) for pair in zip(prompts, responses, strict=True)],
        "position_ids": [torch.arange(len(p) + len(r)) for p, r in zip(prompts, responses, strict=True)],
        "prompts": prompts,
        "responses": responses,
        "response_mask": [torch.ones(len(r), dtype=torch.int64) for r in responses],
        "loss_mask": [
            torch.cat([torch.zeros(len(p)), torch.ones(len(r))]).long() for p, r in zip(prompts, responses, strict=True)
        ],
        "old_log_probs": values(),
        "ref_log_prob": values(),
        "rollout_is_weights": values(0.1, 1.0),
        "advantages": [a.expand(len(r)).clone() for a, r in zip(reward, responses, strict=True)],
    }
    rows = slice(rank * len(prompts) // world, (rank + 1) * len(prompts) // world)
    nested = {
        name: torch.nested.as_nested_tensor(column[rows], layout=torch.jagged) for name, column in columns.items()
    }
    settings = {
        "temperature": 1.0,
        "calculate_entropy": False,
        "global_batch_size": len(prompts),
        "use_dynamic_bsz": False,
        "use_remove_padding": packed,
        "micro_batch_size_per_gpu": len(prompts) // world // 2,
        "use_fused_kernels": False,
    }
    return tu.get_tensordict(nested, settings)
