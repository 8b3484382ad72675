"""Write ``docs/recipes.md`` and ``docs/keys/*.md``, the reference of a recipe's keys, from the configuration's own
descriptions.

Run ``python docs/make_recipes.py``; a test holds the pages and the code together.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mantissa.algorithms import CORRECTION_PRESETS
from mantissa.guard import GuardConfig
from mantissa.precision import PRESETS
from mantissa.rl.config.run import RunConfig

DOCS = Path(__file__).parent
# Each page of keys: its title, and the sections of a recipe that it has.
KEYS = {
    "precision": ("precision", "loss_scaling"),
    "model": ("model", "warm_start"),
    "task": ("task", "perfectible", "grading"),
    "rollout": ("rollout",),
    "algorithm": ("algorithm",),
    "training": ("optimizer", "evaluation", "checkpoint", "guard", "doctor"),
    "waltz": ("waltz",),
}
RECIPES = Path(__file__).parents[1] / "recipes"
_WITH_TERMS = "`task` (`kind: running_sum`)"  # terms of a reward are the same for every task: listed once
_INTRO = """\
# Recipes

A recipe is one YAML file: everything a run does. Unknown keys are errors, and so are keys that would do nothing.
On the command line, `key=value` changes a key, dots reach inside: `mantissa train RECIPE steps=20 optimizer.lr=1e-4`.
The keys of a section are on a page of their own: {pages}.
"""


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The configuration models inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def default_of(field: FieldInfo) -> str:
    """A field's default as it would stand in YAML, or ``required``."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)


def section(title: str, model: type[BaseModel], told: dict[str, tuple[str, str]] | None = None) -> list[str]:
    """One section's table, then the sections inside it. ``told``: key -> default and meaning, as of a kind before it;
    such a key is named, and not explained again."""
    doc = " ".join((model.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
    lines = [f"\n## {title}\n", doc, ""]
    if model is GuardConfig:
        return [*lines[:-1], "", "Its keys: [Rollback](../production.md#settings)."]
    rows: list[str] = []
    again: list[str] = []
    inner: list[str] = []
    seen = told if told is not None else {}
    for name, field in model.model_fields.items():
        nested = models_in(field.annotation)
        described = nested and name == "reward" and title != _WITH_TERMS
        description = (field.description or "").replace("|", "\\|").replace("``", "`")
        meaning = description or (f"section `{name}`" if nested else "")
        if seen.get(name) == (default_of(field), meaning):
            again.append(f"`{name}`")
        elif meaning:  # the kind's own name stands in the title
            rows.append(f"| `{name}` | {default_of(field)} | {meaning} |")
        seen.setdefault(name, (default_of(field), meaning))
        kinds: dict[str, tuple[str, str]] = {}
        for option in [] if described else nested:
            kind = option.model_fields.get("kind")
            label = f" (`kind: {get_args(kind.annotation)[0]}`)" if kind and len(nested) > 1 else ""
            path = name if title == "The run" else f"{title.split(' ')[0].strip('`')}.{name}"
            inner += section(f"`{path}`{label}", option, kinds)
    if rows:
        lines += ["| key | default | what it does |", "|---|---|---|", *rows]
    if shared := [name for name in again if name != "`kind`"]:
        lines += [*([""] if rows else []), f"As above: {', '.join(shared)}."]
    return lines + inner


def shipped() -> list[str]:
    """The recipes of this repository, each with the first sentence that it says of itself."""
    lines = ["\n## Recipes that are here\n", "| recipe | what it is |", "|---|---|"]
    for path in sorted(RECIPES.rglob("*.yaml"), key=lambda path: (len(path.parts), path)):
        said = " ".join(line[2:] for line in path.read_text().partition("\nname:")[0].splitlines())
        lines.append(f"| `{path.relative_to(RECIPES.parent)}` | {said.partition('. ')[0].removesuffix('.')}. |")
    return lines


def pages() -> dict[str, str]:
    """Every page by its path below ``docs``."""
    text = "\n".join(section("The run", RunConfig))
    run, *rest = (f"\n## {part}" for part in text.split("\n## ")[1:])
    linked = ", ".join(f"[{', '.join(f'`{name}`' for name in names)}](keys/{page}.md)" for page, names in KEYS.items())
    made = {"recipes.md": "\n".join([_INTRO.format(pages=linked), *shipped(), run]) + "\n"}
    more = {"precision": _presets(), "algorithm": _corrections()}
    for page, names in KEYS.items():
        mine = [part.strip() for part in rest if re.split(r"[.`]", part)[1] in names]
        made[f"keys/{page}.md"] = "\n\n".join([f"# Keys: {', '.join(names)}", *mine, *more.get(page, ())]) + "\n"
    assert sum(text.count("\n## `") for text in made.values()) == len(rest), "a section that no page has"
    return made


def _presets() -> list[str]:
    lines = ["| preset | train | rollout |", "|---|---|---|"]
    lines += [f"| `{name}` | {policy.train} | {policy.rollout} |" for name, policy in PRESETS.items()]
    experts = "`NAME-experts` and `NAME-experts-rollout` of a scaled format: in the routed experts of a mixture alone."
    return ["## Presets of `precision`", "\n".join(lines), experts]


def _corrections() -> list[str]:
    lines = ["| name | fields |", "|---|---|"]
    for name, correction in CORRECTION_PRESETS.items():
        fields = correction.model_dump(exclude_defaults=True)
        lines.append(f"| `{name}` | {', '.join(f'`{key}: {value}`' for key, value in fields.items()) or 'weight 1'} |")
    return ["## Names for `algorithm.correction`", "Bounds are on r = learner / rollout.", "\n".join(lines)]


def main() -> None:
    for path, text in pages().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text)


if __name__ == "__main__":
    main()
