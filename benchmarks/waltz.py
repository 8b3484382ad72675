"""What two policies learn from each other: recipes/waltz.yaml in several forms, each from the same warm start.

    python benchmarks/run.py waltz 0 1 2                     # seeds; every form of each
    python benchmarks/run.py waltz 0 --forms joint frozen    # some forms
    python benchmarks/run.py waltz_picture               # docs/images/waltz.svg, from the rows

A seed's warm start is made once, in fp32, by a run in which neither policy learns: its evaluation is the row ``start``.
Every rate is of the whole game on 256 held-out requests, sampled twice each at temperature 1.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rows import ROOT
from runner import Row, Rows, case

from mantissa.rl import load_recipe, start
from mantissa.rl.config.run import apply_overrides, make_config, parse_yaml
from mantissa.runs.directory import RunDirectory

RECIPE = ROOT / "recipes" / "waltz.yaml"
CONSTANT = ("precision=fp32", "optimizer.decay=none")  # the learning rate does not fall
FORMS: dict[str, tuple[str, ...]] = {
    "fp16-decay": ("precision=fp16",),  # the recipe
    "bf16-decay": ("precision=bf16",),
    "fp32-decay": ("precision=fp32",),
    "joint": CONSTANT,
    "frozen": (*CONSTANT, "waltz.feedback_frozen={steps}"),
    "ungated": (*CONSTANT, "waltz.gate=false"),
    "fp16": ("precision=fp16", "optimizer.decay=none"),
    "bf16": ("precision=bf16", "optimizer.decay=none"),
}
KEEP = Path(tempfile.gettempdir()) / "waltz"
COMMON = ("trackers=[]", "evaluation={every: 40, problems: 256, samples: 2}")
COLOURS = {
    "fp32-decay": "#3b3b3b",
    "fp16-decay": "#c2453d",
    "bf16-decay": "#2a6fdb",
    "frozen": "#9a9a9a",
}  # the picture's
RATES = (
    "attack_success", "over_refusal", "first_attack_success", "first_over_refusal", "triggered", "label_accuracy",
    "dir_mean", "format",
)  # fmt: skip


def run(folder: Path, seed: int, common: tuple[str, ...], *overrides: str, stages: int = 2) -> RunDirectory:
    """The finished run of the recipe with these overrides. ``stages``: 1 where the conversation never learns."""
    values = parse_yaml(RECIPE.read_text(), str(RECIPE))
    if stages == 1:  # there is no second one whose labels could count otherwise
        del values["waltz"]["label_later"]
    start(make_config(apply_overrides(values, [f"seed={seed}", f"run_dir={folder}", *common, *overrides]), str(RECIPE)))
    return RunDirectory.open(folder)


def row(form: str, seed: int, done: RunDirectory) -> Row:
    """What a run came to."""
    rows, inner = done.metrics.read(), done.inner_run
    assert inner is not None
    roles = {each["role"]: each for each in done.environment["precision"]}
    last = rows[-1]
    sides = {"conversation": rows, "feedback": inner.metrics.read()}
    return {
        "form": form, "seed": seed, "steps": len(rows),
        "requested": roles["learner"]["requested"], "active": roles["learner"]["active"],
        "rates": {name: last[f"waltz/eval_{name}"] for name in RATES}, "greedy_right": last["eval/greedy_accuracy"],
        "curve": [[each["step"], each["waltz/eval_attack_success"], each["waltz/eval_over_refusal"]]
                  for each in rows if "waltz/eval_attack_success" in each],
        "seconds": sum(each["time/step"] for each in rows),
        "overflows": {who: sum(each["precision/overflows"] for each in them) for who, them in sides.items()},
        "gap_abs_logp_diff_mean": {who: sum(each["gap/abs_logp_diff_mean"] for each in them) / len(them)
                                   for who, them in sides.items()},
    }  # fmt: skip


def measure(seed: int, forms: Sequence[str], keep: Path, common: tuple[str, ...]) -> Iterator[Row]:
    """Rows of one seed; its warm start is kept in ``keep``, and taken from there where it is."""
    warm = keep / f"warm-{seed}"
    steps = load_recipe(RECIPE, common).steps
    if not (warm / "feedback" / "policy").is_dir():
        still = ("precision=fp32", "steps=1", "waltz.conversation_frozen=1", "waltz.feedback_frozen=1")
        yield row("start", seed, run(warm, seed, common, *still, stages=1))
    given = [f"model={{path: {warm}}}", f"waltz.feedback.model={{path: {warm}/feedback}}"]
    given += ["warm_start=null", "waltz.feedback.warm_start=null"]
    for form in forms:
        with tempfile.TemporaryDirectory() as folder:
            how = [each.format(steps=steps) for each in FORMS[form]]
            yield row(form, seed, run(Path(folder) / "run", seed, common, *given, *how))


def draw() -> None:
    """Both rates by step, a panel a rate, a colour a form; thin lines are seeds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mantissa"
    import matplotlib.pyplot as plt

    found = [json.loads(line) for line in (ROOT / "results" / "waltz.jsonl").read_text().splitlines()]
    starts = {each["seed"]: each["curve"][0] for each in found if each["form"] == "start"}
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    for panel, (at, title) in zip(panels, ((1, "attack success"), (2, "over-refusal")), strict=True):
        for form, colour in COLOURS.items():
            mine = [each for each in found if each["form"] == form and each["seed"] in starts]
            lines = [[[0, *starts[each["seed"]][1:]], *each["curve"]] for each in mine]
            for line in lines:
                panel.plot([p[0] for p in line], [p[at] for p in line], color=colour, linewidth=0.7, alpha=0.5)
            if lines:
                points = [(each[0][0], sum(p[at] for p in each) / len(each)) for each in zip(*lines, strict=True)]
                panel.plot(*zip(*points, strict=True), color=colour, linewidth=2, label=form)
        panel.set_title(f"{title}, held out", fontsize=10)
        panel.set_xlabel("step")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, None)
    panels[0].set_ylabel("fraction of dialogues")
    panels[1].legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "docs" / "images" / "waltz.svg", metadata={"Date": None})


@case()
def waltz(seeds: Sequence[int], forms: Sequence[str] = tuple(FORMS), keep: Path = KEEP, common: str = "") -> Rows:
    """What two policies learn from each other: recipes/waltz.yaml in several forms, each from the same warm start.

    ``keep``: where warm starts are kept; ``common``: overrides of every run, with spaces.
    """
    for seed in seeds:
        yield from measure(seed, forms, keep, (*COMMON, *common.split()))


@case()
def waltz_picture() -> Rows:
    """The picture docs/images/waltz.svg, from the rows that there are."""
    draw()
    return iter(())
