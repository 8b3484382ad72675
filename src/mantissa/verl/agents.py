"""verl's own agent loops, each request with the key of its draws.

verl gives a request a random name, so a server could only count arrivals. The loops know more: the trainer's step, the
prompt's index in the data and the sample's number in its group. Those become ``seed`` among the sampling parameters,
for ``rollout.name=mantissa`` alone; a loop of one's own does the same with ``Seeded`` as its first base.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from mantissa.base.seeds import derive_seed


def seed_of(fields: dict[str, Any]) -> int:
    """Of one sample, from what verl's trainer says of it: step, index, and its number in the group.

    The older trainer has no such number, and says the row's in the batch (``priority``).
    """
    sample = fields.get("session_id", fields.get("priority", 0))
    return derive_seed(*(str(value) for value in (fields.get("global_steps"), fields.get("index"), sample)))


class Seeded:
    """A base that adds ``seed`` to what an agent loop is run with."""

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any:
        if self.rollout_config.name == "mantissa":  # type: ignore[attr-defined]
            sampling_params = {**sampling_params, "seed": seed_of(fields)}
        return await super().run(sampling_params, **fields)  # type: ignore[misc]


class SeededSingleTurn(Seeded, SingleTurnAgentLoop):
    """verl's ``single_turn_agent``."""


class SeededTool(Seeded, ToolAgentLoop):
    """verl's ``tool_agent``."""


def register() -> None:
    """Put these in the place of verl's two, by their names."""
    agent_loop.register("single_turn_agent")(SeededSingleTurn)
    agent_loop.register("tool_agent")(SeededTool)
