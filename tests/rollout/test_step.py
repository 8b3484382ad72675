"""A decode step as one compiled call: the bits of the same kernels called one by one, and where it is not taken."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mantissa.kernels import Planned, Traced, compiled, cpu, learner_kernels, resolve, rollout_kernels
from mantissa.kernels.emulated import Emulation
from mantissa.kernels.roles import emulated
from mantissa.model import Decoder, ModelConfig
from mantissa.model.config import ExpertsShape
from mantissa.precision import PrecisionPolicy
from mantissa.rl.assemble import exact_plan
from mantissa.rl.experience import Sequences
from mantissa.rl.score import forward
from mantissa.rollout import NativeEngine, Request, SamplingParams
from naive_engine import master_model

pytestmark = pytest.mark.skipif(not compiled.kinds(), reason=f"nothing is compiled here: {compiled.why_not()}")
SHAPE = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3}
FAMILIES = {
    "llama": ModelConfig("llama", 192, **SHAPE, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "qwen2": ModelConfig(
        "qwen2", 192, **SHAPE, num_attention_heads=6, num_key_value_heads=2, head_dim=64, qkv_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3": ModelConfig(
        "qwen3", 192, **SHAPE, num_attention_heads=4, num_key_value_heads=4, head_dim=32, qk_norm=True
    ),
}  # fmt: skip
FORMATS = (
    "fp32", "bf16", "fp16", {"train": "bf16", "rollout": "bf16", "backend": "simulated"}, "int8-rollout",
    "mxfp8-rollout", "mxfp4-rollout", "nvfp4-rollout", "int4-rollout", "fp8-rollout",
    {"train": "bf16", "rollout": "fp8", "fp8": {"scale": "power_of_two", "exclude": ["down_proj"]}},
)  # fmt: skip
PARAMS = SamplingParams(max_tokens=20)
REQUESTS = [Request(tuple(range(1, 4 + 9 * i)), samples=2, seed=i) for i in range(4)]


def engine_of(config: ModelConfig, precision: object, exact: bool = False) -> tuple[NativeEngine, Decoder]:
    """An engine for whatever is compiled here, measured to be faster or not, and the masters that it holds."""
    table = dataclasses.replace(cpu.products(), compiled=compiled.parts())
    resolved = resolve(PrecisionPolicy.parse(precision), "cpu", products=table)
    master = master_model(dataclasses.replace(config, initializer_range=0.1), 5)
    plan = exact_plan(resolved, master, torch.device("cpu"), 64, 512) if exact else None
    kernels = rollout_kernels(resolved, plan)
    given = {"kv_format": resolved.kv_cache.active, "slots": 5, "max_length": 64}
    engine = NativeEngine(master.config, kernels, **given)  # type: ignore[arg-type]
    engine.sync(dict(master.named_parameters()), 1)
    return engine, master


def answers(engine: NativeEngine) -> list[tuple[tuple[int, ...], list[float]]]:
    results = engine.generate(REQUESTS, PARAMS, engine.version)
    return [(each.tokens, each.logp_T.tolist()) for group in results for each in group]


def one_by_one(engine: NativeEngine) -> list[tuple[tuple[int, ...], list[float]]]:
    """What the same engine answers without the step."""
    step, engine._step = engine._step, None
    try:
        return answers(engine)
    finally:
        engine._step = step


@pytest.mark.parametrize("precision", FORMATS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_has_the_bits_of_its_operations(family: str, precision: object, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine, _ = engine_of(FAMILIES[family], precision)
        assert engine._step is not None
        got = answers(engine)
        assert got == one_by_one(engine)
        assert len({tokens for tokens, _ in got}) > 4
    finally:
        torch.set_num_threads(before)


def test_it_is_of_the_weights_that_came_last() -> None:
    engine, master = engine_of(FAMILIES["llama"], "bf16")
    first = answers(engine)
    with torch.no_grad():
        for parameter in master.parameters():
            parameter.mul_(1.25)
    engine.sync(dict(master.named_parameters()), 2)
    assert answers(engine) == one_by_one(engine) != first


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_kernels_take_it_and_stay_the_learner_s(family: str, precision: str) -> None:
    policy = {"train": precision, "rollout": precision, "kernels": "exact"}
    engine, master = engine_of(FAMILIES[family], policy, exact=True)
    assert engine._step is not None
    got = answers(engine)
    assert got == one_by_one(engine)
    prompts = [list(request.prompt_tokens) for request in REQUESTS for _ in range(request.samples)]
    batch = Sequences.build(prompts, [tokens for tokens, _ in got], torch.device("cpu"))
    table = dataclasses.replace(cpu.products(), compiled=compiled.parts())
    resolved = resolve(PrecisionPolicy.parse(policy), "cpu", products=table)
    kernels = learner_kernels(resolved, engine.kernels.plan)  # type: ignore[attr-defined]
    logp_N = forward(master, kernels, batch, 1.0).logp_N  # with a graph, as it trains
    assert logp_N.requires_grad
    assert logp_N.tolist() == [number for _, numbers in got for number in numbers]


def test_exact_kernels_of_another_plan_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, master = engine_of(FAMILIES["llama"], {"train": "fp16", "rollout": "fp16", "kernels": "exact"}, exact=True)
    resolved = resolve(PrecisionPolicy.parse({"train": "fp16", "rollout": "fp16", "kernels": "exact"}), "cpu")
    expected = answers(engine)
    plan = exact_plan(resolved, master, torch.device("cpu"), 64, 512, "tiles")
    assert isinstance(engine.kernels, Planned)
    engine.kernels.plan = plan
    monkeypatch.setattr("mantissa.rollout.step.Step.__call__", None)
    assert len(answers(engine)) == len(expected)


@pytest.mark.parametrize(
    ("precision", "changed"),
    [
        pytest.param({"train": "bf16", "rollout": "bf16", "kv_cache": "fp8"}, {}, id="a cache of its own"),
        pytest.param("e8m5", {}, id="a format that nothing is compiled for"),
        pytest.param("bf16", {"hidden_size": 120}, id="a width that is no whole vectors"),
        pytest.param("bf16", {"family": "qwen3_moe", "experts": ExpertsShape(4, 2, 64)}, id="mixtures"),
    ],
)
def test_others_go_operation_by_operation(precision: object, changed: dict[str, object]) -> None:
    engine, _ = engine_of(dataclasses.replace(FAMILIES["qwen3"], **changed), precision)  # type: ignore[arg-type]
    assert engine._step is None
    assert len(answers(engine)) == 8


def test_an_emulated_engine_and_a_replay_go_operation_by_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = emulated(resolve(PrecisionPolicy.parse("bf16"), "cpu"), Emulation.model_validate({"norm": "fused"}))
    config = FAMILIES["llama"]
    habits = NativeEngine(config, rollout_kernels(resolved), kv_format=resolved.kv_cache.active, slots=5, max_length=64)
    master = master_model(config, 5)
    habits.sync(dict(master.named_parameters()), 1)
    assert habits._step is None
    engine, _ = engine_of(config, "bf16")
    engine.keeps_calls = True
    expected = answers(engine)

    def refuses(*_: object) -> None:
        raise AssertionError("a replay notes every operation")

    monkeypatch.setattr("mantissa.rollout.step.Step.__call__", refuses)
    again = engine.replay(engine.calls[0], Traced(engine.kernels), 3)
    assert (again.tokens, again.logp_T.tolist()) == expected[3]
