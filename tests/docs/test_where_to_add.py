"""The rows "where to add" of docs/architecture.md, done: a toy of each kind, in a copy of the package.

Each touches only the places that its row names, and then a run of it by the command ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "docs" / "architecture.md").read_text()
RECIPE = """\
name: toy
steps: 2
device: cpu
precision: {precision}
model:
  fresh: {{family: qwen3, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, intermediate_size: 32}}
  tokenizer: characters
task: {task}
rollout: {{prompts: 4, samples: 4, max_tokens: 3, engine: {engine}}}
algorithm: {{loss: {loss}}}
optimizer: {{lr: 1.0e-3}}
evaluation: null
"""
TASK = "{kind: addition, digits: 1, train_size: 8, heldout_size: 0, warm_start_size: 0}"


class Copy:
    """A copy of the package, its edits, and which files they touched."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.touched = folder, set[str]()
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))

    def write(self, name: str, text: str) -> None:
        self.touched.add(name)
        path = self.folder / "src" / "mantissa" / name
        assert not path.exists()
        path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        self.touched.add(name)
        path = self.folder / "src" / "mantissa" / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name}: {old!r}"
        path.write_text(text.replace(old, new))

    def train(self, **given: str) -> str:
        values = {"precision": "fp32", "task": TASK, "engine": "native", "loss": "ppo_clip"} | given
        recipe = self.folder / "toy.yaml"
        recipe.write_text(RECIPE.format(**values))
        command = [sys.executable, "-m", "mantissa", "train", str(recipe), f"run_dir={self.folder}/run"]
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout


def a_loss(copy: Copy) -> str:
    copy.write(
        "algorithms/losses/toy.py",
        '''"""``toy``: the plain ratio."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import TokenLoss, bounded_ratio


class ToyConfig(TokenLoss):
    """``-w * ratio * A``."""

    kind: Literal["toy"] = Field("toy", description="The ratio, never clipped.")
    source = "nowhere"

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, None]:
        return -weight_BT * bounded_ratio(logp_BT - old_logp_BT) * advantage_BT, None
''',
    )
    registry = "algorithms/losses/__init__.py"
    copy.edit(registry, "from mantissa.algorithms.losses.base import", "from mantissa.algorithms.losses.toy import "
              "ToyConfig\nfrom mantissa.algorithms.losses.base import")  # fmt: skip
    copy.edit(registry, "ReinforceConfig | PPOClipConfig", "ToyConfig | ReinforceConfig | PPOClipConfig")
    return copy.train(loss="toy")


def a_format(copy: Copy) -> str:
    copy.edit("precision/formats.py", "for e in (8, 5)", "for e in (8, 6, 5)")
    said = copy.train(precision="e6m9")
    assert "active e6m9 (simulated kernels)" in said
    return said


def an_engine(copy: Copy) -> str:
    copy.write(
        "rollout/toy.py",
        '''"""An engine that always says the end token, with the log-prob of a coin: the protocol and nothing else."""

import math

import torch

from mantissa.rollout.sampling import Completion


class ToyEngine:
    release = evidence = ""
    format_name = "fp32"

    def __init__(self) -> None:
        self.version = -1

    def sync(self, weights, version):
        self.version = version

    def generate(self, requests, params, version):
        print(f"toy engine: {len(requests)} requests")
        end = params.stop_token_ids[0]
        coin = Completion((end,), torch.full((1,), math.log(0.5)), "stop", version)
        return [[coin] * request.samples for request in requests]

    def pause(self): ...

    def close(self): ...
''',
    )
    copy.edit("rl/config/sections.py", 'engine: Literal["native", ', 'engine: Literal["native", "toy", ')
    copy.edit("rl/assemble.py", "    return NativeEngine(\n        model,",
              '    if rollout.engine == "toy":\n        from mantissa.rollout.toy import ToyEngine\n\n'
              "        return ToyEngine()\n    return NativeEngine(\n        model,")  # fmt: skip
    said = copy.train(engine="toy")
    assert said.count("toy engine: 4 requests") == 2
    return said


def a_task(copy: Copy) -> str:
    copy.write(
        "tasks/toy.py",
        '''"""Say the digit that comes next."""

from typing import Literal

from mantissa.tasks.generated import GeneratedTask, text_match, new_problem
from mantissa.tasks.types import GeneratedConfig


class NextConfig(GeneratedConfig):
    """The next digit."""

    kind: Literal["next"]
    reward: Literal["exact"] = "exact"


class Next(GeneratedTask):
    def __init__(self, config, seed):
        super().__init__(config, seed, text_match("exact"), "0123456789=")

    def draw(self, rng):
        digit = rng.randrange(9)
        return new_problem(self.name, f"{digit}=", str(digit + 1))
''',
    )
    copy.edit("tasks/__init__.py", "TaskConfig = Annotated[\n    Run", "TaskConfig = Annotated[\n    NextConfig | Run")
    copy.edit(
        "tasks/__init__.py", '    "running_sum": RunningSum,', '    "next": Next,\n    "running_sum": RunningSum,'
    )
    types = "from mantissa.tasks.types import"
    copy.edit("tasks/__init__.py", types, f"from mantissa.tasks.toy import Next, NextConfig\n{types}")
    return copy.train(task="{kind: next, train_size: 8, heldout_size: 0, warm_start_size: 0}")


def a_term(copy: Copy) -> str:
    """An objective of another kind than a loss of log-probs: of the logits themselves, in the policy's own forward."""
    copy.write(
        "rl/terms/toy.py",
        '''"""Keeps the logits' log-partition near 0: ``1e-2 * sum scale * logsumexp(logits)^2``."""

from mantissa.precision import Accumulator
from mantissa.precision import masked_sum
from mantissa.rl.terms.base import Term


class ZLoss(Term):
    numbers = 1

    def of_logits(self, batch):
        return lambda start, logits_nV: logits_nV.logsumexp(-1, keepdim=True)

    def adds(self, micro, numbers_BRM):
        value = 1e-2 * masked_sum(micro.scale_BR * numbers_BRM[..., 0].square(), micro.batch.valid_BR)
        print(f"z-loss {float(value):.9f}")
        return value, {"policy/entropy_bonus": Accumulator.of("sum", value)}
''',
    )
    copy.edit("rl/learner.py", "    terms: list[Term] = []\n", "    terms: list[Term] = [ZLoss()]\n")
    base = "from mantissa.rl.terms.base import"
    copy.edit("rl/learner.py", base, f"from mantissa.rl.terms.toy import ZLoss\n{base}")
    said = copy.train(loss="{kind: reinforce, centering: 2}")  # beside another that asks for numbers of the logits
    rows = [json.loads(row) for row in (copy.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [float(value) for value in re.findall(r"^z-loss (\S+)$", said, re.M)]
    learned = [row for row in rows if "policy/entropy_bonus" in row]
    assert learned
    assert [round(row["policy/entropy_bonus"], 6) for row in learned] == [round(value, 6) for value in told]
    assert all(row["policy/centering"] >= 0 for row in learned)
    return said


TOYS = {"loss": a_loss, "term": a_term, "number format": a_format, "rollout engine": an_engine, "task": a_task}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOYS)
def test_a_toy_runs_and_touches_only_the_places_of_its_row(kind: str, tmp_path: Path) -> None:
    add: Callable[[Copy], str] = TOYS[kind]
    copy = Copy(tmp_path)
    assert re.search(r"step 2/2 .* done", add(copy))
    (row,) = re.findall(rf"^\| {kind} \| ([^|]*) \|", MAP, re.M)
    named = {name.replace("NAME", "toy") for name in re.findall(r"`([\w/]+\.py)`", row)}
    assert copy.touched <= named, f"the row of {kind} names {sorted(named)}"
