"""Plans and reports as plain text: one line for each override, remark, setting and role."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import mantissa
from mantissa.launch.check import Report
from mantissa.launch.plan import Kind, Plan
from mantissa.launch.ray_job import runtime_env

PACKAGE = Path(mantissa.__file__).parent
_WIDE = 96  # an override longer than this has its source on a line of its own
_HEADINGS: dict[Kind, str] = {
    "differs": "verl does nearly this",
    "unused": "not used on verl",
    "fixed": "verl does just this, by no key",
}


def environment_of(plan: Plan, working_dir: Path | None) -> dict[str, object]:
    """The job's ``runtime_env``: the variables that precision needs, and this package for the reward workers."""
    return runtime_env({one.name: one.value for one in plan.environment}, working_dir, [PACKAGE])


def submit_command(plan: Plan, address: str | None, working_dir: Path | None) -> str:
    """The same submission by Ray's own command line."""
    environment = json.dumps(environment_of(plan, working_dir))
    words = ["ray", "job", "submit", "--address", address or "URL", "--runtime-env-json", environment, "--"]
    return shlex.join([*words, *plan.arguments])


def dry_run(plan: Plan, address: str | None, working_dir: Path | None) -> str:
    """Everything that a launch would do, and where each part of it comes from."""
    options = plan.options
    machine = ", ".join(part for part in (options.hardware, options.cuda and f"CUDA {options.cuda}") if part)
    lines = [
        f"{plan.name} on verl {options.version}: {options.engine} learner, {options.rollout} rollout, "
        f"{options.nodes} x {options.gpus} GPUs" + (f" ({machine})" if machine else ""),
        "",
        "overrides, and the field that each says",
        *_two_columns([(str(one), one.source) for one in plan.overrides]),
        "",
        "environment of every node (runtime_env)",
        *_two_columns([(f"{one.name}={one.value}", one.source) for one in plan.environment]),
        *_two_columns([("py_modules: mantissa", "task.verifier")]),
    ]
    for kind, heading in _HEADINGS.items():
        remarks = plan.of(kind)
        if remarks:
            lines += ["", heading, *_two_columns([(remark.field, remark.text) for remark in remarks])]
    lines += ["", "command", "  " + submit_command(plan, address, working_dir)]
    return "\n".join(lines)


def report_text(report: Report) -> str:
    """What ``check-verl`` prints."""
    lines = [f"verl {report.version}, {report.engine} learner, {report.rollout} rollout"]
    lines += [f"  taken for granted: {said}" for said in report.assumed]
    for title, settings in (
        ("precision settings without effect", report.wrong),
        ("precision settings that take effect", [s for s in report.settings if s.verdict == "takes effect"]),
        ("handed to another program as they are", [s for s in report.settings if s.verdict == "handed on"]),
    ):
        if not settings:
            continue
        lines += ["", title]
        for setting in settings:
            verdict = "" if setting.verdict in ("takes effect", "handed on") else f"{setting.verdict}: "
            lines += [f"  {setting.given}", f"      {verdict}{setting.why}"]
            if setting.instead:
                lines.append(f"      instead: {setting.instead}")
    lines += ["", "what runs"]
    width = max(len(role.name) for role in report.roles)
    lines += [f"  {role.name:<{width}}  {role.active}  ({role.why})" for role in report.roles]
    lines += ["", "what is cast on the way", *(f"  {cast}" for cast in report.casts)]
    if report.meant:
        lines += ["", "for the format that was asked for, in every role", *(f"  {one}" for one in report.meant)]
    if report.others:
        lines += ["", f"{report.others} other settings are not about precision"]
    return "\n".join(lines)


def _two_columns(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Rows with their second column aligned, but for those whose first is too long for that."""
    width = max((len(first) for first, _ in rows if len(first) <= _WIDE), default=0)
    for first, second in rows:
        yield f"  {first:<{width}}  {second}".rstrip()
