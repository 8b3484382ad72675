"""``mantissa doctor``: is the gap between rollout and learner noise or a fault, which, and what to set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mantissa.base.errors import MantissaError, say
from mantissa.cli import Device, progress, screen, there

if TYPE_CHECKING:
    from mantissa.doctor.diagnosis import Diagnosis
    from mantissa.doctor.dump import Dump
    from mantissa.doctor.layers import ByLayer
    from mantissa.doctor.logs import Log
    from mantissa.runs.page import Block


_From = Annotated[
    str | None,
    typer.Option("--from", metavar="NAME", help="mantissa, nemo-rl, prime-rl, slime, miles, skyrl or plain; of a log "
                 "trl, verl and openrlhf too.", show_default="found by looking"),
]  # fmt: skip
_Out = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write a page with pictures and the numbers there.", show_default="nothing is"),
]
_Map = Annotated[
    str,
    typer.Option("--map", metavar="SIDE=NAME,...", help="Name columns: learner, rollout, tokens, ...; of a log "
                 "gap_abs, ...",
                 show_default="obvious names, and said"),
]  # fmt: skip
_MODEL = "Of the tokens: find causes by scoring them again. A run's own folder: its checkpoints."
_OTHER = "Weights that one side may have had in place of these."
_BY_LAYER = "Follow both sides, as found, through the layers."
_EXPERTS = "The policy is a mixture of experts, or is none, where the dump does not say it."
_PAIR = "Of a file of mantissa gap: the one pair to diagnose."
_ENGINE = "Ask a live server for the rollout's log-probs, with --model."

_there = there("a run, a dump of log-probs, or a training log")
_Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|DUMP|LOG|-",
        help="A run's folder, log-probs another framework saved, or a training log; - is standard input.",
        callback=lambda path: path if str(path) == "-" else _there(path),
    ),
]


def doctor(
    source: _Source,
    framework: _From = None,
    columns: _Map = "",
    experts: Annotated[bool | None, typer.Option("--experts/--dense", help=_EXPERTS, show_default="unknown")] = None,
    pair: Annotated[str | None, typer.Option(metavar="NAME", help=_PAIR, show_default="each")] = None,
    out: _Out = None,
    model: Annotated[str | None, typer.Option(help=_MODEL)] = None,
    other: Annotated[str | None, typer.Option(metavar="MODEL", help=_OTHER)] = None,
    engine: Annotated[str | None, typer.Option(metavar="URL", help=_ENGINE)] = None,
    by_layer: Annotated[bool, typer.Option("--by-layer", help=_BY_LAYER)] = False,
    sequences: Annotated[int, typer.Option(min=8, help="How many are scored with the model.")] = 48,
    explain: Annotated[bool, typer.Option("--explain", help="Show every test and what it explains.")] = False,
    device: Device = "auto",
) -> None:
    """Diagnose the log-probs of rollout and learner: noise or a fault, its name, and what to set.

    Reads runs of mantissa train, dumps of NeMo-RL, prime-rl, slime, miles and SkyRL, and the plain schema, jsonl or
    parquet: tokens, prompt_length, rollout_logp, learner_logp, optional mask, temperature and more (docs/doctor.md).
    Of a training log (trainer_state.json, verl's, TensorBoard's, W&B's and MLflow's) it says what curves show.
    Exit code: 0 healthy, 1 a fault or too large, 2 unreadable.

    [bold]Examples[/]

    mantissa doctor runs/demo

    mantissa doctor logs/exp_001/train_data_step3.jsonl

    mantissa doctor dump.jsonl --from plain

    mantissa doctor trainer_state.json

    mantissa doctor runs/demo --model runs/demo --by-layer

    mantissa doctor dump.jsonl --model FOLDER --engine http://127.0.0.1:8000
    """  # fmt: skip
    from mantissa.doctor.dump import Dump
    from mantissa.doctor.sources import given

    with given(source) as path:
        found = _read(path, framework, columns)
        if isinstance(found, Dump):
            with_model = (model, other, engine, by_layer, sequences, device)
            code = _diagnose(_parts(found, pair, experts), with_model, framework, out, explain)
        elif model is not None or pair is not None or experts is not None:
            raise MantissaError(
                f"{source}: a log holds no tokens: leave --model, --pair and --experts out, or give a dump"
            )
        else:
            code = _diagnose_log(found, out, explain)
    raise typer.Exit(code)


def _read(path: Path, framework: str | None, columns: str) -> Dump | Log:
    """What is in the file, read in a process of its own while this one imports the rest."""
    from mantissa.doctor.isolated import Reading

    reading = Reading(path, framework, columns, reader="mantissa.doctor.sources:read_source")
    import mantissa.doctor.examine  # noqa: F401

    found = reading.read(progress)
    progress("")
    return found


def _diagnose(
    parts: dict[str, Dump],
    with_model: tuple[str | None, str | None, str | None, bool, int, str],
    framework: str | None,
    out: Path | None,
    explain: bool,
) -> int:
    """Say what log-probs show; returns the exit code."""
    from mantissa.doctor.examine import examine

    model, other, engine, by_layer, sequences, device = with_model
    further = list["Block"]()
    for name, given in (("--engine", engine), ("--other", other), ("--by-layer", by_layer)):
        if given and model is None:
            raise MantissaError(f"{name} needs the model that the tokens are of: give --model too")
    if len(parts) > 1:
        if model is not None or out is not None:
            raise MantissaError(f"the file holds {len(parts)} pairs: say which, --pair {next(iter(parts))!r}")
        found = {name: examine(part) for name, part in parts.items()}
        for name, each in found.items():
            _show_pair(name, parts[name], each, framework, explain)
        return max(_code(each) for each in found.values())
    ((_, dump),) = parts.items()
    if model is None:
        diagnosis = examine(dump)
        _show(dump, diagnosis, framework, explain)
    else:
        scored = (model, other, engine, by_layer, sequences, device)
        dump, diagnosis, further = _with_model(dump, *scored, framework, explain)
    if out is not None:
        from mantissa.doctor.page import write_page

        say(f"page: {write_page(dump, diagnosis, out, further)}")
    return _code(diagnosis)


def _diagnose_log(log: Log, out: Path | None, explain: bool) -> int:
    """Say what curves show; returns the exit code."""
    from mantissa.doctor.curves import examine_log
    from mantissa.doctor.page import lines, write_log_page
    from mantissa.doctor.runs import in_its_formats

    log = in_its_formats(log)
    diagnosis = examine_log(log)
    console = screen(100)
    for number, line in enumerate(lines(log, diagnosis)):
        console.print(line, style="bold" if number == 0 else "", soft_wrap=True)
    if explain:
        _show_tests(diagnosis)
    if out is not None:
        say(f"page: {write_log_page(log, diagnosis, out)}")
    return _code(diagnosis)


def _code(diagnosis: Diagnosis) -> int:
    """The exit code of an answer."""
    from mantissa.doctor.diagnosis import Verdict

    return 0 if diagnosis.verdict in (Verdict.HEALTHY, Verdict.UNKNOWN) else 1


def _parts(dump: Dump, pair: str | None, experts: bool | None) -> dict[str, Dump]:
    """What is diagnosed by itself: each pair of a file that holds several, or the one asked for; else the whole."""
    parts = dump.by_pair()
    if pair is not None:
        if pair not in parts:
            known = ", ".join(parts) if dump.pairs else "none"
            raise MantissaError(f"--pair {pair}: {dump.path} holds {known}")
        parts = {pair: parts[pair]}
    if experts is None:
        return parts
    return {name: replace(part, settings=replace(part.settings, experts=experts)) for name, part in parts.items()}


def _show_pair(name: str, dump: Dump, diagnosis: Diagnosis, framework: str | None, explain: bool) -> None:
    """One pair of several: its answer, and the rest where something is wrong."""
    from rich.text import Text

    from mantissa.doctor.words import first_line

    console = screen(100)
    console.print(Text(f"pair {name}", style="bold"))
    if _code(diagnosis) or explain:
        _show(dump, diagnosis, framework, explain)
    else:
        console.print(f"{first_line(diagnosis)}\n{diagnosis.headline}")


def _with_model(
    dump: Dump,
    model: str,
    other: str | None,
    engine: str | None,
    by_layer: bool,
    sequences: int,
    device: str,
    framework: str | None,
    explain: bool,
) -> tuple[Dump, Diagnosis, list[Block]]:
    """Score the tokens again, say what was found, and return it with the page's further blocks."""
    from mantissa.base.ranks import be_deterministic, choose_device
    from mantissa.doctor.consult import blocks, consult
    from mantissa.doctor.examine import examine
    from mantissa.rl.doctor_model import open_for_doctor

    be_deterministic(chosen := choose_device(device))
    progress(f"loading {model}")
    policy = open_for_doctor(model, dump, other, chosen)
    dump = policy.dump
    if engine is not None:
        from mantissa.doctor.live import asked

        dump = asked(dump, engine, sequences, progress)
    scored = (dump, examine(dump), policy.model, policy.versions)
    found = consult(*scored, sequences=sequences, layers=by_layer, say=progress)
    progress("")

    def text(token: int) -> str:
        return repr(policy.tokenizer.decode([token]))

    _show(dump, found.diagnosis, framework, explain)
    if by_layer:
        _show_layers(found.layers, text)
    return dump, found.diagnosis, blocks(found, text)


def _show(dump: Dump, diagnosis: Diagnosis, framework: str | None, explain: bool) -> None:
    """The answer, in the order in which it is needed."""
    from rich.text import Text

    from mantissa.doctor.diagnosis import Basis, Open
    from mantissa.doctor.examine import remedies_for
    from mantissa.doctor.facts import facts
    from mantissa.doctor.words import first_line, inferred

    console = screen(100)
    console.print(Text(first_line(diagnosis), style="bold"))
    console.print(diagnosis.headline)
    f = diagnosis.figures
    console.print(
        f"{f['tokens']:,} tokens of {f['sequences']:,} sequences ({dump.whose}"
        f"{''.join(', ' + note for note in diagnosis.notes)}): d, the learner's less the rollout's, of "
        f"{f['d_rms']:.2g} nats (root mean square); u = d / (1 - p), the logits' error, of {f['u_rms']:.2g}; "
        f"{f['equal']:.1%} equal to the last bit; KL of {f['k3']:.2g} (k3)"
    )
    if granted := inferred(dump, diagnosis, framework):
        console.print(Text(f"taken for granted: {'; '.join(granted)}", style="dim"))
    if diagnosis.fault is not None and diagnosis.basis not in (Basis.CAUSE, Basis.SIDE, Basis.LIKELY):
        console.print(facts().faults[diagnosis.fault.name].means)
    if diagnosis.second is not None:
        console.print(facts().faults[diagnosis.second.name].means)
    for said in diagnosis.remarks:
        console.print(Text(f"by the way: {said}", style="dim"))
    for cause in diagnosis.causes:
        said = ": ".join(filter(None, (cause.name, cause.note)))
        console.print(f"  {cause.share:6.1%}  ({cause.low:.1%} to {cause.high:.1%})  {said}")
    settings = remedies_for(diagnosis)
    if settings:
        console.print("What to set:")
    for do, keys in settings:
        console.print(f"  - {do}" + "".join(f"\n      {key}" for key in keys))
    console.print(Text("What this cannot know:", style="dim"))
    for each in diagnosis.unknown:
        if each.kind is not Open.UNTESTED:
            console.print(Text(f"  - {each.said}", style="dim"))
    if untested := [each.name for each in diagnosis.findings if not each.tested]:
        why = "" if explain else "; --explain says why"
        console.print(Text(f"  - for want of tokens or fields, whether it is {', '.join(untested)}{why}", style="dim"))
    if explain:
        _show_tests(diagnosis)


def _show_tests(diagnosis: Diagnosis) -> None:
    """Every test: whether it was found, the share of the squared gap that it explains, and what it says."""
    from mantissa.runs.page import terminal

    rows = [
        (each.name, "found" if each.found else "no" if each.tested else "not tested",
         f"{each.share:.1%}" if each.found and each.share else "", f"{each.p:.1g}" if each.tested else "", each.said)
        for each in sorted(diagnosis.findings, key=lambda each: (not each.found, not each.tested, -each.share))
    ]  # fmt: skip
    screen(100).print(terminal(("signature", "result", "explains", "p", "what it says"), rows))


def _show_layers(found: ByLayer | None, text: Callable[[int], str]) -> None:
    from mantissa.doctor.consult import LAYER_COLUMNS, WORST_COLUMNS, layer_lines, worst_lines
    from mantissa.runs.page import terminal

    console = screen(100)
    if found is None:
        console.print("By layer: nothing to follow, for the two sides compute alike as far as causes were found.")
        return
    console.print(terminal(LAYER_COLUMNS, layer_lines(found)))
    console.print(terminal(WORST_COLUMNS, worst_lines(found, text)))
