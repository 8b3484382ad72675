"""The tables of the pages about the drop-in trainer and its metrics, and the alert rules."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Callable

from measured import rows as _rows
from tables import table

# trainer.md


def environment() -> str:
    """The compat interface's environment variables."""
    from mantissa.dropin.compat import ENVIRONMENT, FP16TrainingConfig

    fields = {field.name: field for field in dataclasses.fields(FP16TrainingConfig)}
    kinds = {bool: "`true` or `false`; `1`, `0`, `yes`, `no`, `on`, `off`", float: "a number",
             int: "a whole number, or `auto`"}  # fmt: skip
    lines = [
        [f"`{variable}`", f"`{name}`", kinds[type(fields[name].default)], f"`{str(fields[name].default).lower()}`"]
        for variable, name in ENVIRONMENT.items()
    ]
    return table(("variable", "field of the configuration", "value", "where not set"), lines)


def overhead() -> str:
    """A step against torch's AMP on the same model."""
    newest = {(r["case"], r["requested"]): r for r in _rows("amp_overhead") if r["metric"] == "step_time_over_amp"}
    lines = [
        [case, f"`{fmt}`", f"{r['value']:.3f} ({r['quartile_low']:.3f} to {r['quartile_high']:.3f})"]
        for (case, fmt), r in newest.items()
    ]
    return table(("model", "native on a CPU", "step time over torch AMP's (quartiles)"), lines)


# production.md

_STEP_PREFIXES = ("precision/", "train/")
_STEP_NAMES = ("optim/lr", "optim/grad_norm", "optim/clipped_fraction", "optim/updates", "time/step")
COUNTED = ("precision/overflows", "precision/retries", "precision/skipped")


def prometheus_name(name: str) -> str:
    """A metric's name as Prometheus takes it."""
    return "mantissa_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def metric_lines(of_trainer: bool) -> str:
    """The metrics of a trainer's rows, or those that an RL run has beside them."""
    from mantissa.runs.catalogue import METRICS

    lines = []
    for metric in METRICS:
        trainers = metric.name.startswith(_STEP_PREFIXES) or metric.name in _STEP_NAMES
        if trainers != of_trainer:
            continue
        lines.append([f"`{metric.name}`", metric.formula, metric.unit, metric.healthy_text])
    return table(("metric (and TensorBoard tag)", "formula", "unit", "healthy"), lines)


@dataclasses.dataclass(frozen=True)
class Alert:
    """One rule: a Prometheus expression, how long it must hold, and what it says to whom is woken."""

    name: str
    watch: str
    threshold: str
    expression: str
    hold: str
    severity: str
    meaning: str
    action: str


def alerts() -> list[Alert]:
    """The alerts; thresholds are the guard's defaults and the metrics' healthy ranges."""
    from mantissa.guard import GuardConfig

    guard = GuardConfig()
    rate = "increase(mantissa_overflowed_steps_total[30m]) / increase(mantissa_steps_total[30m])"
    return [
        Alert("MantissaGuardActed", "`action` in `guard.jsonl`", "fall back or stop",
              "increase(mantissa_guard_fall_backs_total[30m]) > 0 or mantissa_guard_severity == 4",
              "0m", "page", "the run left low precision, or wanted to and could not",
              "`mantissa guard RUN` says why; see [Rollback](#rollback)"),
        Alert("MantissaGuardAlert", "`action` in `guard.jsonl`", "alert", "mantissa_guard_severity == 2", "10m",
              "ticket", "a threshold of the guard is passed; beyond the next one the run falls back",
              "`mantissa guard RUN` names the rule and its numbers"),
        Alert("MantissaOverflowing", "steps with `precision/overflows` > 0 / steps",
              f"{guard.overflow_alert:.0%} of 30 minutes", f"{rate} > {guard.overflow_alert:g}", "0m", "ticket",
              "gradients grow faster than the scale falls, or their tail is heavy",
              "look at `optim/grad_norm`; `scale=\"auto\"`, a lower rate, or bf16"),
        Alert("MantissaBatchesLost", "`precision/skipped`", "any in 30 minutes",
              "increase(mantissa_precision_skipped_total[30m]) > 0", "0m", "ticket",
              "a batch was given up: its retries all overflowed, or the loss was not finite",
              "a row with `precision/retries` 0 and a loss that is not finite is a forward problem, not one of scale"),
        Alert("MantissaLossNotFinite", "`train/loss`", "NaN or infinite",
              "mantissa_train_loss != mantissa_train_loss or abs(mantissa_train_loss) > 3.4e38", "0m", "page",
              "the forward left the format",
              "the step was skipped; find the module (see [Troubleshooting](troubleshooting.md))"),
        Alert("MantissaScaleLow", "`precision/loss_scale`", "below 16",
              'mantissa_precision_loss_scale{format="fp16"} < 16',
              "10m", "ticket", "a few halvings from the floor of 1, where an overflow ends the run",
              "bf16, or lower the loss's own scale (a sum where a mean is meant)"),
        Alert("MantissaGradientsSmall", "`precision/max_scaled_grad`", "below 2^-12 for an hour",
              'mantissa_precision_max_scaled_grad{format="fp16"} < 0.000244', "1h", "ticket",
              "the largest gradient is 12 binades below the limit: that much of the small ones is flushed for nothing",
              "a shorter `growth_interval`, or `scale=\"auto\"`"),
        Alert("MantissaSlow", "`speed` in the guard's numbers", f"below {guard.slow_warn:g} x the reference",
              f"mantissa_guard_speed < {guard.slow_warn:g}", "1h", "ticket", "low precision does not pay here",
              "`mantissa guard RUN --reference RUN2`; `mantissa bench` on this device"),
        Alert("MantissaStalled", "age of the newest row", "20 steps' time",
              "mantissa_row_age_seconds > 20 * mantissa_time_step", "0m", "page",
              "the process hangs or is gone; on several ranks one may have died",
              "look at the processes; resume from the checkpoint"),
    ]  # fmt: skip


def alert_table() -> str:
    header = ("alert", "metric", "threshold", "meaning", "action")
    return table(header, [[f"`{a.name}`", a.watch, a.threshold, a.meaning, a.action] for a in alerts()])


def alert_rules() -> str:
    """The same as a file of Prometheus rules."""
    lines = ["# Written by docs/make_tables.py.", "groups:", "  - name: mantissa", "    rules:"]
    for a in alerts():
        lines += [f"      - alert: {a.name}", *_folded("        expr", a.expression), f"        for: {a.hold}"]
        lines += [f"        labels: {{severity: {a.severity}}}", "        annotations:"]
        lines += _folded("          summary", a.meaning)
    return "\n".join([*lines, ""])


def _folded(key: str, text: str) -> list[str]:
    """A key of YAML and its text, folded into lines that fit the page."""
    indent = " " * (len(key) - len(key.lstrip()) + 2)
    return [f"{key}: >-", *textwrap.wrap(text, 78, initial_indent=indent, subsequent_indent=indent)]


# the guard


def guard_rules() -> str:
    """The guard's rules with the default thresholds, by severity."""
    from mantissa.guard import GuardConfig
    from mantissa.guard.rules import GATE, RULES

    config = GuardConfig()
    lines = []
    for rule in (*RULES, GATE):
        bounds = rule.bounds(config)
        lines.append([rule.name, rule.what, *(bounds.get(action, "") for action in ("warn", "alert", "fall back"))])
        if not bounds:
            lines[-1][-1] = "off"
    return table(("rule", f"over the last {config.window} steps", "warn", "alert", "fall back"), lines)


def guard_settings() -> str:
    """Every field of ``GuardConfig``."""
    from mantissa.guard import GuardConfig

    fields = GuardConfig.model_fields.items()
    lines = [[f"`{name}`", f"`{json.dumps(field.default)}`", str(field.description)] for name, field in fields]
    return table(("setting", "default", "what it does"), lines)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "trainer.md": {"overhead": overhead},
    "migration.md": {"environment": environment},
    "production.md": {"alerts": alert_table, "guard_rules": guard_rules, "guard_settings": guard_settings},
    "metrics.md": {"trainer_metrics": lambda: metric_lines(True), "rl_metrics": lambda: metric_lines(False)},
}
