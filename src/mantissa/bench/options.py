"""The options of ``mantissa bench`` and ``mantissa gap``: a field with a description is one. No torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from mantissa.base.bounds import LARGEST_SEED
from mantissa.base.config import Section

# Two programs, as a learner and its serving engine are: there a gap shows on any processor. Our engine under the
# learner's own kernels (fp32, fp16, bf16) is not among them: some processors' products do not depend on the batch.
PAIRS = (*(f"{pair}+serving" for pair in ("fp32", "fp16", "bf16", "fp8", "bf16/fp8")), "exact")
VLLM_PAIRS = ("fp32", "fp16", "bf16", "fp8", "bf16/fp8")  # vLLM is the other program: no emulation, nothing exact
OWN_PROMPTS = 32  # that come with the package


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("one is named twice")
    return names


class BenchConfig(Section):
    """What is measured. ``device``: with its number, as torch writes it."""

    called: ClassVar[str] = "bench"

    device: str
    model: str | None = Field(
        None, description="Your model, PKG.MODULE:FACTORY; FACTORY() gives (model, make_batch, loss_fn)."
    )
    precision: tuple[Literal["fp32", "bf16", "fp16"], ...] = Field(
        ("fp32", "bf16", "fp16"), description="Of fp32, bf16, fp16."
    )
    backend: Literal["auto", "native", "simulated"] = Field(
        "auto", description="auto, native or simulated kernels for bf16 and fp16."
    )
    sizes: tuple[str, ...] | None = Field(
        None,
        description="Parameters of the built-in models, such as 10k,1M,1B; '' for none. By default 10k to 10M on a "
        "CPU, to 100M on CUDA.",
    )
    scenarios: tuple[Literal["warmup", "standard", "stress"], ...] = Field(
        ("warmup", "standard", "stress"),
        description="Of warmup (1 epoch, 128 samples), standard (3, 256), stress (5, 512); '' for none.",
    )
    batch: int | None = Field(
        None, ge=1, description="Samples a step. By default 32; over sizes 256 on a CPU, 4096 on CUDA."
    )
    out: Path | None = Field(None, description="Folder. By default runs/bench-TIME.")
    repeats: int = Field(7, ge=1, description="Interleaved repeats behind each median.")
    profile: bool = Field(False, description="Also trace where time and memory go.")

    _once = field_validator("precision", "scenarios")(_distinct)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if not self.precision:
            raise ValueError("precision: expected at least one of fp32, bf16, fp16")
        if self.model is not None and self.sizes:
            raise ValueError("--sizes belongs to the built-in models; a --model has the size that its factory gives it")
        return self


class GapConfig(Section):
    """What is measured. ``device``: as torch writes it; ``own``: how many of our own prompts."""

    called: ClassVar[str] = "gap"

    model: str
    device: str
    pairs: tuple[str, ...] = Field(
        (),
        description="Presets or TRAIN/ROLLOUT of two, with +exact for exact kernels (exact is bf16+exact), or +serving "
        f"or +SWITCH for a rollout that emulates a serving engine (docs/gap.md). By default {', '.join(PAIRS)}.",
    )
    prompts: Path | None = Field(None, description=f"A file, one prompt a line. By default {OWN_PROMPTS} of our own.")
    own: int = Field(OWN_PROMPTS, ge=1, le=OWN_PROMPTS)
    samples: int = Field(1, ge=1, description="Completions of each prompt.")
    max_tokens: int = Field(32, ge=1, description="Longest completion.")
    temperature: float = Field(1.0, description="Divides the logits, on both sides.")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="The same for every pair.")
    engine: Literal["native", "vllm"] = Field("native", description="What samples: native or vllm.")
    out: Path | None = Field(
        None, description="Folder; a run's: its report then begins with the gap. By default runs/gap-TIME."
    )

    _once = field_validator("pairs")(_distinct)

    @model_validator(mode="before")
    @classmethod
    def _usual_pairs(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("pairs"):
            return values
        return values | {"pairs": VLLM_PAIRS if values.get("engine") == "vllm" else PAIRS}
