"""``custom``: a function of the user's own, named in the recipe, with a contract that is checked before the first step.

    def my_loss(logp, old_logp, advantage, weight, mask):
        ratio = (logp - old_logp).exp()
        return -weight * ratio * advantage            # or (losses, clipped)

All arguments and the result are (B, T): sequences by response tokens, floats of one dtype (fp32 in a run), ``mask``
bool, everything 0 where it is False. ``logp`` is the current policy's and carries the gradient, the others do not.
``old_logp``: the policy's before the update, or with ``correction.bypass`` the rollout's. ``weight``: the correction's;
multiply by it, or the gap between rollout and learner stays uncorrected. What comes back is each token's loss, before
aggregation; with a second tensor (bool), where a bound took its gradient, for ``policy/clip_fraction``.

Checked on a small batch in float64, fp32 and with padding: shape, dtype, finite values, a gradient for ``logp``; that
the weight matters; that arguments are left as they are; that the answer is the same twice, and that of a sequence by
itself, for otherwise micro-batches and ranks would change it. The function runs in the process that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import TokenLoss
from mantissa.base.errors import MantissaError
from mantissa.base.functions import IMPORT_PATH, load_function

_ROWS, _COLUMNS = 4, 6


class CustomLossConfig(TokenLoss):
    """A loss by the token of one's own: ``algorithm.loss: package.module:function``; see the module for its contract.

    Its value and gradient are the function's; masks, aggregation, corrections, micro-batches and ranks stay Mantissa's.
    """

    kind: Literal["custom"] = Field("custom", description="A function of one's own, checked before the first step.")
    function: str = Field(
        pattern=f"^{IMPORT_PATH}$", description="package.module:function, also looked for in the current folder."
    )

    source = "the recipe's own"

    def prepare(self) -> None:
        """Load and check the function; raises ``MantissaError`` with what its contract says and what it did."""
        check_contract(self._tokens, f"loss {self.function}")

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        losses, held = self._tokens(logp_BT, old_logp_BT, advantage_BT, weight_BT, mask_BT)
        return losses, held

    def _tokens(self, *given: Tensor) -> tuple[Tensor, Tensor | None]:
        found = load_function(self.function, "loss")(*given)
        return found if isinstance(found, tuple) and len(found) == 2 else (found, None)


_Tokens = Callable[..., tuple[Any, Any]]


def check_contract(of_tokens: _Tokens, name: str) -> None:
    """Raise ``MantissaError`` that begins with ``name`` where ``of_tokens`` is no loss by the token."""
    given = _batch(torch.float64)
    before = [x.detach().clone() for x in given]
    losses = _value(of_tokens, given, name)
    if not all(torch.equal(x.detach(), was) for x, was in zip(given, before, strict=True)):
        raise MantissaError(f"{name} changes its arguments in place: expected new tensors")
    gradient = torch.autograd.grad(losses.sum(), given[0], retain_graph=True)[0] if losses.requires_grad else None
    if gradient is None or not bool((gradient != 0).any()):
        raise MantissaError(f"{name} has no gradient for logp, its first argument: nothing would be learned")
    if not bool(gradient.isfinite().all()):
        raise MantissaError(f"{name} has a gradient that is not finite, of log-probs from -3 to 0")
    _same(_value(of_tokens, given, name), losses, f"{name} gives another answer for the same arguments")
    unweighted = _value(of_tokens, [*given[:3], torch.zeros_like(given[3]), given[4]], name)
    if torch.equal(unweighted, losses):
        raise MantissaError(f"{name} does not depend on weight, so that no correction would act: multiply by it")
    for row in range(_ROWS):
        alone = _value(of_tokens, [x[row : row + 1] for x in given], name)
        _same(alone, losses[row : row + 1], f"{name} looks at other sequences, so that micro-batches would change it")
    padded = [torch.nn.functional.pad(x, (0, 2)) for x in given]
    _same(_value(of_tokens, padded, name)[:, :_COLUMNS], losses, f"{name} changes with padding where mask is False")
    _value(of_tokens, _batch(torch.float32), name)


def _batch(dtype: torch.dtype) -> list[Tensor]:
    """Log-probs from -3 to 0 with small gaps, advantages of both signs, rows of several lengths. Dense and fixed."""
    place = torch.arange(_ROWS * _COLUMNS, dtype=torch.float64).view(_ROWS, _COLUMNS)
    mask = torch.arange(_COLUMNS) < torch.tensor([6, 4, 3, 5])[:, None]
    logp = -1.5 + 1.4 * torch.sin(1 + place)
    advantage = torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64)[:, None].expand(_ROWS, _COLUMNS)
    floats = (logp, logp - 0.05 * torch.cos(place), advantage, 1 + 0.3 * torch.cos(2 * place))
    made = [torch.where(mask, x, 0.0).to(dtype) for x in floats]
    return [made[0].requires_grad_(), *made[1:], mask]


def _value(of_tokens: _Tokens, given: list[Tensor], name: str) -> Tensor:
    """The losses, checked by themselves."""
    mask = given[-1]
    try:
        losses, held = of_tokens(*given)
    except Exception as error:  # noqa: BLE001 - the user's own code may raise anything
        text = " ".join(str(error).split())[:200]
        raise MantissaError(f"{name} raised {type(error).__name__}: {text}; it is called with {_FIVE}") from None
    if not isinstance(losses, Tensor) or losses.shape != mask.shape or losses.dtype != given[0].dtype:
        got = f"{losses.dtype} of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise MantissaError(
            f"{name} returned {got}: expected the loss of each token, {given[0].dtype} of shape {tuple(mask.shape)}"
        )
    if held is not None and not (isinstance(held, Tensor) and held.dtype == torch.bool and held.shape == mask.shape):
        raise MantissaError(f"{name} returned a second value that is no bool tensor of shape {tuple(mask.shape)}")
    if not bool(losses[mask].isfinite().all()):
        raise MantissaError(f"{name} returned a loss that is not finite, of log-probs from -3 to 0")
    return torch.where(mask, losses, 0.0)


_FIVE = "five tensors (B, T): logp, old_logp, advantage, weight, mask"


def _same(found: Tensor, wanted: Tensor, otherwise: str) -> None:
    if not torch.allclose(found, wanted, rtol=1e-10, atol=1e-12):
        raise MantissaError(otherwise)
