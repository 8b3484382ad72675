"""The tables of the pages about verl: from the exporter, from its list of silent habits, and from the rows of jobs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from measured import Row
from measured import rows as _rows
from tables import table

# cluster.md

_ENGINES = ("fsdp2", "megatron", "mantissa_fsdp2", "mantissa")


def _verl_plan(engine: str, *features: str) -> Any:
    """The exporter's plan for a recipe with these overrides, on H100s with CUDA 12.9; or the reasons why not."""
    from mantissa.base.errors import MantissaError
    from mantissa.launch import LaunchOptions
    from mantissa.launch.export import export
    from mantissa.rl import make_config
    from mantissa.rl.config.run import apply_overrides

    recipe = {
        "name": "table",
        "steps": 1,
        "model": {"path": "policy"},
        "task": {"kind": "dataset", "files": "train.parquet", "heldout_files": "heldout.parquet"},
        "rollout": {"prompts": 8, "samples": 8, "max_tokens": 1024},
        "algorithm": {"correction": "token_tis"},
        "optimizer": {"lr": 1e-6},
    }
    options = LaunchOptions(engine=engine, hardware="h100", cuda="12.9")  # type: ignore[arg-type]
    try:
        return export(make_config(apply_overrides(recipe, features), "table"), options)
    except MantissaError as error:
        return str(error)


def engines_by_precision() -> str:
    """Which preset runs on which learner's engine of verl, by the exporter itself; equal presets in one line."""
    from mantissa.precision import PRESETS

    def cell(plan: Any) -> str:
        if not isinstance(plan, str):
            return "yes"
        reason = plan.rpartition("precision.")[2].partition(": ")[2]  # the last one, after its field
        reason = re.sub(r"^\w+-?\w*: ", "", reason) if "simulated" in reason else reason.rpartition(": ")[2]
        return "no: " + re.split(r"; |, and no", reason)[0]

    found: dict[tuple[str, ...], list[str]] = {}
    for name in PRESETS:
        found.setdefault(tuple(cell(_verl_plan(engine, f"precision={name}")) for engine in _ENGINES), []).append(name)
    lines = [[", ".join(f"`{name}`" for name in names), *row] for row, names in found.items()]
    return table(("precision", *(f"`{engine}`" for engine in _ENGINES)), lines)


def keys_of_roles() -> str:
    """What the exporter writes of a recipe in fp16 for each role: of FlowRL where an engine has it, else of GRPO."""
    from mantissa.launch.facts import short

    flow = ("algorithm.loss=flowrl", "algorithm.reference={}")
    kl = ("algorithm.reference={}", "algorithm.kl={coefficient: 0.01}")
    options, lines = ".fsdp_config.mixed_precision.", []
    for engine in _ENGINES:
        plan = _verl_plan(engine, "precision=fp16", *(flow if "mantissa" in engine else kl))
        keys = {short(one.key): str(one).replace("actor_rollout_ref.", "") for one in plan.overrides}
        groups = [
            [f"actor{options}param_dtype", "actor.megatron.dtype", f"actor{options}precision"],
            [f"ref{options}param_dtype", "ref.megatron.dtype", f"ref{options}precision"],
            ["rollout.dtype"],
        ]
        said = [", ".join(f"`{keys[key]}`" for key in group if key in keys) for group in groups]
        lines.append([f"`{engine}`", *said[:2], said[2] or "as the learner's `precision` says"])
    return table(("engine", "learner", "reference", "rollout"), lines)


def verl_traps() -> str:
    """The precision keys of verl's FSDP engines and rollouts that surprise people; ``check-verl`` knows Megatron's."""
    from mantissa.launch.facts import FACTS, PRECISION_KEYS

    facts = [f for key, f in FACTS.items() if key in PRECISION_KEYS and f.trap and "fsdp2" in f.engines]
    return table(("key", "mind"), [[f"`{'+' if f.new else ''}{f.key}`", f.trap] for f in facts])


def verl_ignored() -> str:
    """Keys that verl accepts and that nobody reads; several of a section in one line."""
    from mantissa.launch.facts import ENGINES, IGNORED, ROLLOUTS

    found: dict[tuple[str, str], list[str]] = {}
    names: dict[tuple[str, str], list[str]] = {}
    for row in IGNORED:
        section, _, name = row.key.rpartition(".")
        where = ("every engine",) if row.engines == ENGINES else row.engines
        key = ("+" if row.new else "") + section, row.why
        names.setdefault(key, []).append(name)
        found.setdefault(key, []).extend(where if row.rollouts == ROLLOUTS else row.rollouts)
    lines = []
    for (section, why), where in found.items():
        given = list(dict.fromkeys(names[section, why]))
        key = f"{section}.{given[0]}" if len(given) == 1 else f"{section}.{{{','.join(given)}}}"
        on = "" if where[0] == "every engine" else f" ({', '.join(dict.fromkeys(where))})"
        lines.append([f"`{key}`{on}", why])
    return table(("key", "why nothing happens"), lines)


def rehearsals() -> str:
    """The newest rehearsal of each kind."""
    found = {row["kind"]: row for row in _rows("verl_rehearsals")}
    lines = []
    for row in found.values():
        what = row["what"] + (f" (`{row['recipe']}`)" if row["recipe"] else "")
        lines.append([what, f"`{row['engine']}`", f"{row['seconds']:.0f}", f"{row['probability_difference']:.1g}"])
    return table(("recipe", "engine", "seconds", "differ by at most"), lines)


def verl_variables() -> str:
    """Environment variables that fp8 needs on every node."""
    from mantissa.launch.facts import NEEDED

    header = ("variable", "where", "without it")
    return table(header, [[f"`{row.name}={row.value}`", f"`{row.key}={row.values[0]}`", row.without] for row in NEEDED])


def launch_options() -> str:
    """What a launch file may hold; Megatron's sizes in one line."""
    from mantissa.launch import LaunchOptions

    lines, sizes = [], []
    for name, field in LaunchOptions.model_fields.items():
        default = "" if field.default in (None, {}) else f" ({str(field.default).lower()})"
        if str(field.description).startswith("Megatron: "):
            sizes.append(f"`{name}`")
        else:
            lines.append([f"`{name}`{default}", str(field.description)])
    return table(("option", "what it says"), [*lines, [", ".join(sizes), "Megatron's layout (1 each)."]])


# verl.md

_VERL = {"verl alone": "fsdp2", "`mantissa_fsdp2`": "mantissa_fsdp2", "`mantissa`": "mantissa"}


def _verl_rows() -> dict[str, Row]:
    """The newest row of each kind of job."""
    return {row["kind"]: row for row in _rows("verl")}


def verl_gains() -> str:
    """What each way of a job comes to: verl's engine, ours over it, our own learner and engine."""
    rows = _verl_rows()
    spikes, overhead = rows["spikes"], rows["overhead"]
    lost = {"fsdp2": "verl", "mantissa_fsdp2": "ours", "mantissa": "mantissa"}
    lines = [
        ["batches lost, of four whose loss is 256 times too large for fp16"]
        + [f"{spikes['lost'][lost[way]]} of {spikes['batches'][lost[way]]}" for way in _VERL.values()]
    ]
    for name in ("fp32", "bf16", "fp16"):
        of = [rows.get(f"{way}-{name}") for way in _VERL.values()]
        if all(of):
            found = [row for row in of if row]
            lines.append([f"{name}: log-probs of rollout and learner that differ"]
                         + [f"{row['unlike']:,} of {row['tokens']:,}" for row in found])  # fmt: skip
            most = [f"{row['probs_diff_max']:.1g}" if row["probs_diff_max"] else "0" for row in found]
            lines.append([f"{name}: largest difference of a probability", *most])
    low, high = overhead["quartile_low"], overhead["quartile_high"]
    took = f"{overhead['value']:.2f} ({low:.2f} to {high:.2f})"
    lines.append(["an optimiser step in fp32, times verl's (quartiles)", "1", took, "another learner"])
    return table(["", *_VERL], lines)


def verl_jobs() -> str:
    """Every kind of job that was run: log-probs of rollout and learner that differ, and its seconds."""
    lines = []
    for kind, row in sorted(_verl_rows().items()):
        if "verdicts" in row:
            looked = row["tokens"] > 0  # by the gate; else by the engine itself
            unlike, of = (
                row[name]
                for name in (("unlike", "tokens") if looked else ("logprobs_unlike_rollout", "logprobs_compared"))
            )
            seconds = (f"{row['step_seconds']:.0f}", f"{row['job_seconds']:.0f}")
            lines.append([f"`{kind}`", row["verl"], f"{unlike:,.0f} of {of:,.0f}", *seconds])
    return table(["job", "verl", "log-probs that differ", "two steps, s", "whole job, s"], lines)


def verl_kills() -> str:
    """Kills of each kind, how many were resumed to the undisturbed job's bits, and the longest that a job lived on."""
    lines = []
    victims = {"worker": "a learner's worker", "node": "a whole node", "trainer": "the trainer",
               "storage": "verl's storage unit"}  # fmt: skip
    for name, what in victims.items():
        if not (rows := [row for row in _rows("verl_kills") if row["victim"] == name]):
            continue
        whole, longest = sum(not row["unlike"] for row in rows), max(row["ended_s"] for row in rows)
        lines.append([what, str(len(rows)), str(whole), f"{longest:.0f}"])
    return table(["killed", "times", "resumed with every metric of an undisturbed job", "ended within, s"], lines)


def verl_gate() -> str:
    """The newest job of each fault: from which weights on, and at which step what stopped it; then faults in turn."""
    newest = {(row["fault"], row["look"], row.get("seed", 0)): row for row in _rows("verl_gate")}
    kinds = {"transformers": "", "mantissa": " (our engine)", "vllm": " (vLLM)"}
    jobs, turns = [], dict[str, list[Any]]()
    for (_, look, _), row in newest.items():
        if look == "both":
            for name, seen in row["seen"].items():
                turns.setdefault(name, []).append(seen)
            continue
        stopped = (
            "goes on"
            if row["seen"] is None
            else f"{'sync' if row['by'] == 'weights' else 'batch'} of step {row['seen']}"
        )
        after = row["injected"]
        since = "" if after is None else f"the sync of step {after}" if after else "the start"
        said = row["said"].partition("% of the weights: ")[2].partition(". What helps")[0] or row["named"] or ""
        jobs.append([f"{row['what']}{kinds[row['rollout']]}", since, stopped, said.partition(";")[0]])
    counted = []
    for name, seen in turns.items():
        sizes = [size for each in seen for size in each["size_of_u"]]
        sums = [str(sum(each[of] for each in seen)) for of in ("looks", "weights", "logprobs")]
        counted.append([name, *sums, f"{min(sizes):.2g} to {max(sizes):.2g}"])
    return "\n".join([
        table(("fault in a job under `stop`", "from", "stopped at", "named"), jobs), "",
        table(("in turn, under `warn:1`", "steps", "seen by weights", "by log-probs", "size of u"), counted),
    ])  # fmt: skip


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "verl.md": {"gains": verl_gains, "jobs": verl_jobs, "kills": verl_kills, "gate": verl_gate},
    "cluster.md": {
        "rehearsals": rehearsals,
        "engines": engines_by_precision,
        "roles": keys_of_roles,
        "traps": verl_traps,
        "ignored": verl_ignored,
        "variables": verl_variables,
        "launch_options": launch_options,
    },
}
