"""The overrides of public scripts that start verl's own trainer, as facts: key, mark and value, with the file's name.

Run over clones of verl and verl-recipe: ``python tests/support/verl_corpus.py OUT FOLDER...``; hydra's verdicts are
added by ``verl_facts.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.launch.check import check_verl
from mantissa.launch.scripts import read_overrides
from verl_facts import write


def facts(path: Path, name: str) -> dict[str, Any] | None:
    """One script's overrides; None for one that starts something else. What only a shell knows becomes ``x``."""
    try:
        words, report = read_overrides([str(path)]), check_verl([str(path)])
    except MantissaError:
        return None
    config = (words.config_name or "ppo_trainer").removesuffix(".yaml")
    if "verl.trainer.main_ppo" not in words.modules or config not in ("ppo_trainer", "ppo_megatron_trainer"):
        return None
    engine = words.value("model_engine") or ("megatron" if report.engine == "megatron" else "dp")
    texts = [f"{each.mark}{each.key}={_plain(each.value)}" for each in words.order if each.key != "model_engine"]
    return {"file": name, "engine": engine if "$" not in engine else "dp", "overrides": texts}


def _plain(value: str) -> str:
    kinds = {"[": "[x]", "{": "{}"}
    simple = all(each.isalnum() or each in "._-/" for each in value)
    return value if simple else kinds.get(value[:1], "x")


if __name__ == "__main__":
    found = [facts(path, f"{Path(root).name}/{path.relative_to(root)}")
             for root in sys.argv[2:] for path in sorted(Path(root).rglob("*.sh"))]  # fmt: skip
    write(Path(sys.argv[1]), {"scripts": [each for each in found if each]})
