"""What a cluster adds to a recipe: engines, machines, and how the model is laid out on them.

These knobs are not in a recipe, because they change nothing that a run computes. They come from a small YAML file
beside it (``NAME.launch.yml`` for ``NAME.yaml``) and from the command's options, which win.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from mantissa.base.bounds import boundary
from mantissa.base.config import Config, first_mistake
from mantissa.base.errors import MantissaError, nearest
from mantissa.base.readers.yaml import read_yaml
from mantissa.launch.facts import Engine, Version

Family = Literal["Ampere", "Ada", "Hopper", "Blackwell"]


_FAMILIES: dict[Family, tuple[str, ...]] = {
    "Ampere": ("a100", "a800", "a40", "a10", "rtx3090"),
    "Ada": ("l4", "l40", "l40s", "rtx4090"),
    "Hopper": ("h20", "h100", "h200", "h800", "gh200"),
    "Blackwell": ("b200", "b300", "gb200", "gb300"),
}
_FAMILY: dict[str, Family] = {name: family for family, names in _FAMILIES.items() for name in names}


class LaunchOptions(Config):
    """How a recipe is run on verl. Frozen; unknown keys are errors."""

    version: Version = Field("0.9.1", description="verl's version on the cluster.")
    engine: Engine = Field(
        "fsdp2",
        description="The learner's: fsdp, fsdp2, megatron, mantissa_fsdp2 or mantissa.",
    )
    rollout: Literal["vllm", "sglang", "mantissa"] = Field(
        "vllm", description="The rollout's: vllm, sglang or mantissa, which it is where the learner's is."
    )
    nodes: int = Field(1, ge=1, description="Machines.")
    gpus: int = Field(8, ge=1, description="GPUs of each machine; processes, where the hardware is cpu.")
    hardware: str | None = Field(None, description="The GPUs' name, such as h100; needed for fp8. Or cpu.")
    cuda: str | None = Field(None, description="The nodes' CUDA version, such as 12.9; needed for an fp8 learner.")
    max_prompt_tokens: int = Field(2048, ge=1, description="Longest prompt; problems with longer ones are left out.")
    rollout_tensor_parallel: int = Field(1, ge=1, description="GPUs that hold one rollout.")
    rollout_memory: float = Field(0.5, gt=0, lt=1, description="Share of GPU memory that the rollout takes.")
    tensor_parallel: int = Field(1, ge=1, description="Megatron: GPUs that share one layer.")
    pipeline_parallel: int = Field(1, ge=1, description="Megatron: stages of the model.")
    expert_parallel: int = Field(1, ge=1, description="Megatron: GPUs that share the experts.")
    context_parallel: int = Field(1, ge=1, description="Megatron: GPUs that share one sequence.")
    sequence_parallel: int = Field(1, ge=1, description="FSDP: GPUs that share one sequence (Ulysses).")
    offload: bool = Field(False, description="Weights and moments wait on the CPU while the rollout runs.")
    environment: dict[str, str] = Field({}, description="More environment variables for every node.")
    overrides: dict[str, Any] = Field({}, description="More keys of verl, as they are; none that the recipe decides.")

    @field_validator("overrides")
    @classmethod
    def _full_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        bare = next((key for key in value if "." not in key or "=" in key), None)
        if bare is not None:
            raise ValueError(f"{bare!r}: expected dotted keys of verl with their values")
        return value

    @model_validator(mode="before")
    @classmethod
    def _ours_on_both_sides(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("engine") == "mantissa":
            return {"rollout": "mantissa"} | values
        return values

    @model_validator(mode="after")
    def _of_its_engine(self) -> Self:
        megatron = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel")
        other: tuple[str, ...] = ("sequence_parallel",) if self.engine == "megatron" else megatron
        if self.engine == "mantissa":
            other = (*megatron, "sequence_parallel")
            if self.rollout != "mantissa":
                raise ValueError(f"engine=mantissa with rollout={self.rollout} is not exported; use rollout=mantissa")
        if self.engine == "megatron" and self.rollout == "mantissa":
            raise ValueError("engine=megatron with rollout=mantissa is not exported; use rollout=vllm or sglang")
        if self.hardware == "cpu" and (self.engine in ("fsdp", "megatron") or self.rollout != "mantissa"):
            raise ValueError(
                f"hardware=cpu with engine={self.engine} and rollout={self.rollout}: on a CPU the engine is fsdp2, "
                "mantissa_fsdp2 or mantissa, and the rollout mantissa"
            )
        wrong = next((name for name in other if getattr(self, name) != 1), None)
        if wrong is not None:
            raise ValueError(f"{wrong} does nothing with engine={self.engine}; leave it out")
        name = (self.hardware or "").lower()
        if name and name not in (*_FAMILY, "cpu"):
            expected = f"expected cpu, or one of {', '.join(_FAMILY)}{nearest(name, _FAMILY)}"
            raise ValueError(f"unknown hardware {self.hardware!r}: {expected}")
        if self.cuda and not re.fullmatch(r"\d+\.\d+", self.cuda):
            raise ValueError(f"cuda={self.cuda!r}: expected a version such as 12.9")
        if self.total_gpus % self.model_gpus:
            raise ValueError(
                f"{self.total_gpus} GPUs cannot be shared out {self.model_gpus} at a time to hold one model; change "
                "nodes, gpus or the parallel sizes"
            )
        if self.total_gpus % self.rollout_tensor_parallel:
            raise ValueError(
                f"rollout_tensor_parallel={self.rollout_tensor_parallel} does not divide {self.total_gpus} GPUs"
            )
        return self

    @property
    def family(self) -> Family | None:
        """The GPUs'; Hopper and later multiply fp8 operands that are scaled block by block."""
        return _FAMILY.get((self.hardware or "").lower())

    @property
    def cuda_version(self) -> tuple[int, ...] | None:
        return None if self.cuda is None else tuple(map(int, self.cuda.split(".")))

    @property
    def total_gpus(self) -> int:
        return self.nodes * self.gpus

    @property
    def sequence_gpus(self) -> int:
        """GPUs that share one sequence, each of which may hold a micro-batch's tokens."""
        return self.context_parallel if self.engine == "megatron" else self.sequence_parallel

    @property
    def model_gpus(self) -> int:
        """GPUs that work on one micro-batch together."""
        if self.engine == "megatron":
            return self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        return self.sequence_parallel

    @property
    def data_parallel(self) -> int:
        return self.total_gpus // self.model_gpus


def launch_file(recipe: Path) -> Path:
    """Where a recipe's launch options are looked for: ``NAME.launch.yml`` beside ``NAME.yaml``."""
    return recipe.with_name(recipe.stem + ".launch.yml")


def load_options(path: Path | None, given: dict[str, Any]) -> LaunchOptions:
    """Options of a file, where there is one, under those that were given; with one clear line for each mistake."""
    values: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            raise MantissaError(f"no launch options at {path}: expected a YAML file with keys such as engine and nodes")
        with boundary(path, "expected a YAML file of UTF-8 text"):
            values = read_yaml(path) or {}
        if not isinstance(values, dict):
            raise MantissaError(f"{path}: expected keys and values, got {type(values).__name__}")
        if given.get("engine") == "mantissa":  # whose rollout is its own, whatever the file's engine goes with
            values.pop("rollout", None)
    try:
        return LaunchOptions.model_validate(values | given)
    except ValidationError as error:
        key, text, _ = first_mistake(error, LaunchOptions.model_fields)
        where = f"{path}: " if path is not None and key.partition(".")[0] not in given else ""
        raise MantissaError(f"{where}{key + ': ' if key else ''}{text}") from None
