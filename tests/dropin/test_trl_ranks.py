"""What the hooks in TRL do on several ranks, and with what TRL's own objects lack; TRL itself is not needed for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mantissa.dropin import trl


def trainer(processes: int, others: list[bool]) -> Any:
    def gather(mine: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine, torch.tensor(others, dtype=torch.bool)])

    accelerator = SimpleNamespace(num_processes=processes, device=torch.device("cpu"), gather=gather)
    return SimpleNamespace(accelerator=accelerator)


def test_what_one_rank_found_all_ranks_know() -> None:
    """A rank that stops alone, or that alone makes one forward more, leaves the others waiting for ever."""
    assert trl._on_any_rank(trainer(1, []), True)
    assert not trl._on_any_rank(trainer(1, [True]), False)
    assert trl._on_any_rank(trainer(3, [False, True]), False)
    assert not trl._on_any_rank(trainer(3, [False, False]), False)


def test_a_processor_that_fails_lets_the_sampling_go_on() -> None:
    seen, scores = trl._Sampled(), torch.zeros(2, 5)
    seen.begin(SimpleNamespace(temperature=0.5))
    assert seen(torch.zeros(2, 1, dtype=torch.long), scores) is scores
    assert seen(None, scores) is scores  # no ids to gather from
    assert seen.why
    assert seen.table(torch.zeros(2, 1, dtype=torch.long)) is None


def test_the_format_of_vllm_where_it_says_it() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float16))
    engine = SimpleNamespace(llm=SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config)))
    assert trl._vllm_format(SimpleNamespace(vllm_generation=engine)) == "fp16"
    assert trl._vllm_format(SimpleNamespace(vllm_generation=SimpleNamespace())) is None
    assert trl._vllm_format(SimpleNamespace()) is None
