"""``mantissa certify``: that a policy's rollout, rescoring and update have the same log-probs; anyone can check it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mantissa.base.errors import MantissaError, say
from mantissa.cli import Device, progress, screen, there

if TYPE_CHECKING:
    from mantissa.bench.certify import Checked, Finding


def certify(
    policy: Annotated[
        str | None,
        typer.Argument(
            metavar="POLICY",
            show_default=False,
            help="A run, its step-N, a verl job's checkpoints, or a model as mantissa gap takes it.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the certificate goes.")] = Path("certificate.json"),
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check this certificate here.", callback=there("a certificate")),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="POLICY", help="With --check: the policy, as above.")] = None,
    tokens: Annotated[int, typer.Option(min=1, max=65536, help="Log-probs at least, or of a check's sample.")] = 256,
    precision: Annotated[
        str | None, typer.Option(metavar="PAIR", help="Of a model, as in mantissa gap --pairs; by default exact.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One prompt a line; by default the run's, or some of our own.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest completion; by default the run's, or 32.")
    ] = None,
    allow_gap: Annotated[bool, typer.Option("--allow-gap", help="A gap of the usual size is enough.")] = False,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON, one field a line.")] = False,
) -> None:
    """Certify that rollout, rescoring and the update's own forward give each sampled token the same log-prob, as bits.

    --check computes a sample of a certificate again on this machine: bits where the machine is as the certificate's,
    the usual size elsewhere. Exit code 1: it does not hold.

    [bold]Examples[/]

    mantissa certify runs/mine --out cert.json

    mantissa certify --check cert.json --model runs/mine/policy
    """
    if check is not None:
        if policy is not None or model is None:
            raise MantissaError("--check FILE needs --model POLICY, and no other argument")
        _check(check, model, tokens, device, allow_gap, as_json)
    if policy is None or model is not None:
        raise MantissaError(
            "expected the folder of a run or of a verl job, or a model, to certify; --model goes with --check FILE"
        )
    _make(policy, out, (tokens, precision, prompts, max_tokens), device, allow_gap, as_json)


def _make(
    policy: str,
    out: Path,
    how: tuple[int, str | None, Path | None, int | None],
    device: str,
    allow_gap: bool,
    as_json: bool,
) -> None:
    from mantissa.base.files import write_atomically
    from mantissa.base.ranks import choose_device
    from mantissa.bench.certify import certify, findings_of
    from mantissa.bench.sides import asked_of, open_policy_of, prompts_of

    if out.is_dir() or not out.absolute().parent.is_dir():
        raise MantissaError(f"--out {out}: expected a file in a folder that is there")
    tokens, precision, prompts, max_tokens = how
    progress(f"loading {policy}")
    opened = open_policy_of(policy)
    asked = asked_of(opened, precision, max_tokens)
    made = certify(opened, asked, prompts_of(opened, prompts, tokens), tokens, choose_device(device), progress)
    write_atomically(out, made.model_dump_json(indent=1) + "\n")
    progress("")
    findings = findings_of(made, allow_gap)
    holds = all(each.holds is not False for each in findings)
    if as_json:
        _rows(findings, {"certificate": str(out), "holds": holds})
    else:
        _show(f"{'Certified' if holds else 'Not certified'}: {policy}", findings)
        say(f"certificate: {out}")
    raise typer.Exit(0 if holds else 1)


def _check(path: Path, model: str, tokens: int, device: str, allow_gap: bool, as_json: bool) -> None:
    from mantissa.bench.certificate import read_certificate

    certificate = read_certificate(path)  # before torch is there

    from mantissa.base.ranks import choose_device
    from mantissa.bench.certify import check

    found = check(certificate, model, tokens, choose_device(device), progress, allow_gap)
    progress("")
    if as_json:
        _rows(found.findings, {"certificate": str(path), "holds": found.holds, "bits": found.bits,
                               "recomputed": found.recomputed, "tokens": found.tokens})  # fmt: skip
    else:
        _show(f"{'Holds' if found.holds else 'Does not hold'}: {path}, {_how(found)}", found.findings)
    raise typer.Exit(0 if found.holds else 1)


def _how(found: Checked) -> str:
    if not found.recomputed:
        return "nothing was computed again"
    by = "by their bits" if found.bits else "by their size, since machine or kernels are other ones"
    return f"{found.recomputed} of {found.tokens} log-probs computed again on this machine and compared {by}"


def _rows(findings: Any, whole: dict[str, Any]) -> None:
    say(json.dumps(whole))
    for each in findings:
        say(json.dumps(vars(each)))


def _show(headline: str, findings: tuple[Finding, ...]) -> None:
    from rich.text import Text

    console = screen()
    console.print(Text(headline, style="bold"))
    marks = {True: "holds", False: "does not hold", None: "not compared"}
    for each in findings:
        console.print(f"  {each.field}: {marks[each.holds]}: {each.said}")
