"""verl's nested rows as sequences, and values of their response tokens back as nested rows.

Legend: B rows, T tokens of a row right-padded, R response tokens right-padded, N response tokens flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.rl.experience import Sequences


@dataclass(frozen=True)
class Rows:
    """``sequences``: the rows. ``offsets``: where each begins among all their tokens (B+1). ``place_N``: where the
    value of each response token stands among those, which is one before it."""

    sequences: Sequences
    offsets: Tensor
    place_N: Tensor

    @staticmethod
    def of(data: Any) -> Rows:
        """From verl's nested ``input_ids``, ``prompts`` and ``responses``."""
        ids, prompts, responses = (data[name] for name in ("input_ids", "prompts", "responses"))
        if not (ids.is_nested and prompts.is_nested and responses.is_nested):
            raise MantissaError(
                "actor.strategy=mantissa: expected nested rows without padding, as verl's trainer V1 has"
            )
        length_B, prompt_B, response_B = (nested.offsets().diff() for nested in (ids, prompts, responses))
        if not torch.equal(prompt_B + response_B, length_B) or bool((prompt_B < 1).any()):
            raise MantissaError("a row's tokens are not its prompt and its response, or its prompt is empty")
        columns = torch.arange(int(response_B.max()), device=response_B.device)
        mask_BR = columns < response_B.unsqueeze(1)
        row_N, column_N = mask_BR.nonzero(as_tuple=True)
        place_N = ids.offsets()[:-1][row_N] + prompt_B[row_N] + column_N - 1
        padded_BT = torch.nested.to_padded_tensor(ids, 0)
        return Rows(Sequences(padded_BT, prompt_B, length_B, mask_BR), ids.offsets(), place_N)

    def jagged(self, value_N: Tensor) -> Tensor:
        """Nested rows as long as the tokens', with ``value_N`` one position early and 0 elsewhere; differentiable."""
        flat = torch.zeros(int(self.offsets[-1]), dtype=torch.float32, device=value_N.device)
        return torch.nested.nested_tensor_from_jagged(flat.index_put((self.place_N,), value_N), self.offsets)


def by_temperature(temperature: Any, rows: int) -> list[tuple[float, Tensor]]:
    """Each temperature that occurs, with its rows (indices). ``temperature``: a number, or one for each row."""
    if not isinstance(temperature, Tensor):
        values = [float(temperature)] * rows
    else:
        values = [float(each) for each in temperature.flatten().tolist()]
        values = values * rows if len(values) == 1 else values
    if len(values) != rows:
        raise MantissaError(f"{len(values)} temperatures of {rows} rows: expected one, or one for each row")
    if min(values) <= 0:
        raise MantissaError(
            f"rollout.temperature={min(values)}: the learner needs the density that was drawn from, and a greedy "
            "choice has none; set a temperature above 0"
        )
    found = sorted(set(values))
    return [(value, torch.tensor([row for row in range(rows) if values[row] == value])) for value in found]
