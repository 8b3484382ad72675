"""``mantissa weights``: whether an engine has the trainer's weights, and what it has where it does not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mantissa.base.errors import MantissaError, say
from mantissa.cli import progress, screen

if TYPE_CHECKING:
    from mantissa.doctor.weights import Comparison, Update

_Place = Annotated[str, typer.Argument(show_default=False, metavar="TRAINER", help="Weights as the trainer has them.")]
_SHOWN = 24  # lines of faults


def weights(
    trainer: _Place,
    engine: Annotated[str, typer.Argument(show_default=False, metavar="ENGINE", help="As the engine has them.")],
    before: Annotated[
        str | None, typer.Option(metavar="WEIGHTS", help="The trainer's before the last update: names what is stale.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="WEIGHTS", help="Of adapters whose settings name no folder here.")
    ] = None,
    remote: Annotated[
        bool, typer.Option("--remote", help="Compare digests alone, of an engine that may be on another machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line a tensor.")] = False,
) -> None:
    """Say whether ENGINE has TRAINER's weights, tensor by tensor under the engine's own rounding, to the bit.

    Each is a model's folder, a run, an adapter's folder, a GGUF file, a run's or TRL's or verl's checkpoint, a file of
    tensors, or the address of a vLLM that was started with --worker-extension-cls
    mantissa.rollout.vllm.worker.WeightReader. What did not arrive is explained: stale, another tensor's, transposed,
    one rank's part, rounded twice, an adapter not merged. Exit code 1: something did not arrive.

    [bold]Examples[/]

    mantissa weights checkpoint-40 served-model --before checkpoint-39

    mantissa weights runs/mine/policy http://127.0.0.1:8000

    mantissa weights runs/mine/policy mine-q8_0.gguf
    """
    from mantissa.doctor.held import held, is_address
    from mantissa.doctor.weights import compare
    from mantissa.rl.policy import policy_folder

    given = [trainer, engine, *([] if before is None else [before])]
    mine, theirs, *rest = (held(each if is_address(each) else policy_folder(each), base, remote) for each in given)
    old = rest[0] if rest else None
    if not mine.readable or (old is not None and not old.readable):
        raise MantissaError(f"--remote: {trainer} gives digests alone; expected the trainer's weights in files here")
    found = compare(mine, theirs, old, progress)
    progress("")
    if as_json:
        for row in _rows(found):
            say(json.dumps(row))
    else:
        _show(found)
    raise typer.Exit(0 if found.arrived else 1)


def _rows(found: Comparison) -> list[dict[str, Any]]:
    whole: dict[str, Any] = {"trainer": found.trainer, "engine": found.engine, "arrived": found.arrived}
    if found.update is not None:
        whole["update"] = vars(found.update)
    return [whole, *(vars(each) | {"fate": each.fate.value} for each in found.outcomes)]


def _show(found: Comparison) -> None:
    from rich.text import Text

    from mantissa.doctor.weights import ARRIVED, DO, said_of

    console = screen()
    console.print(Text(_headline(found), style="bold"))
    lost = [each for each in found.outcomes if each.fate not in ARRIVED]
    if _another_model(found):
        return
    lines = said_of(lost)
    for line in lines[:_SHOWN]:
        console.print(f"  {line}")
    if len(lines) > _SHOWN:
        console.print(f"  and {len(lines) - _SHOWN} more kinds; --json has every tensor")
    if found.update is not None and (said := _update(found.update)):
        console.print(said)
    for named in dict.fromkeys(each.fate for each in sorted(lost, key=lambda each: -each.differing)):
        console.print(Text(f"  - {named.value}: {DO[named]}", style="dim"))


def _another_model(found: Comparison) -> bool:
    """Whether at most half of the tensors have a counterpart of their shape."""
    from mantissa.doctor.weights import Fate

    return 2 * sum(each.fate in (Fate.MISSING, Fate.EXTRA, Fate.SHAPE) for each in found.outcomes) >= len(
        found.outcomes
    )


def _headline(found: Comparison) -> str:
    from mantissa.doctor.weights import ARRIVED, Fate

    count = len(found.outcomes)
    kinds = " and ".join(sorted({each.dtype for each in found.outcomes if each.dtype}))
    total = sum(each.weights for each in found.outcomes)
    if found.arrived:
        grid = sum(each.fate is Fate.ON_GRID for each in found.outcomes)
        how = "to the bit" if not grid else f"{count - grid} to the bit, {grid} within their grid's rounding"
        return f"The weights arrived: {count} of {count} tensors, {total:,} weights in {kinds}, {how}"
    lost = [each for each in found.outcomes if each.fate not in ARRIVED]
    if _another_model(found):
        return f"Another model: most tensors of {found.trainer} are not in {found.engine} by their name and shape"
    share = sum(each.differing for each in lost) / max(1, total)
    if len({each.fate for each in lost}) == 1 and len(lost) == count:
        return f"Nothing arrived: all {count} tensors are {lost[0].fate.value}"
    return f"Not all weights arrived: {len(lost)} of {count} tensors did not ({share:.2%} of the weights, in {kinds})"


def _update(update: Update) -> str:
    moved, seen = update.moved, update.seen
    if not moved:
        return "The trainer's weights are those of before: there is no update to arrive"
    share, left = moved / update.weights, seen / update.weights
    return (
        f"The update moved {share:.2%} of the weights; once rounded as the engine rounds, {left:.2%} differ from before"
    )
