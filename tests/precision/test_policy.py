"""The policy: what can be asked for, what each device makes of it, and every error's wording."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.kernels import resolve
from mantissa.precision import BF16, E4M3, E5M2, FP16, FP32, PRESETS, Fp8Policy, PrecisionPolicy


def error_of(action: Any) -> str:
    with pytest.raises(MantissaError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- asking


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("fp32", PrecisionPolicy()),
        ("bf16", PrecisionPolicy(train="bf16", rollout="bf16")),
        ("half", PrecisionPolicy(train="fp16", rollout="fp16")),
        ("fp8", PrecisionPolicy(train="fp8", rollout="fp8", fp8=Fp8Policy())),
        ("bf16-train-fp16-rollout", PrecisionPolicy(train="bf16", rollout="fp16")),
        ("fp8-rollout", PrecisionPolicy(train="bf16", rollout="fp8")),
    ],
)
def test_presets(preset: str, expected: PrecisionPolicy) -> None:
    given = PrecisionPolicy.parse(preset)
    assert given == PrecisionPolicy.parse({"preset": preset})
    assert given.model_copy(update={"preset": None}) == expected
    assert (expected.logits, expected.backend, expected.fallback) == ("fp32", "auto", "error")


def test_fields_override_the_preset_and_without_one_fp32() -> None:
    asked = {"preset": "bf16", "rollout": "float16", "kv_cache": "bf16", "fallback": "warn"}
    mixed = PrecisionPolicy.parse(asked)
    assert mixed.model_copy(update={"preset": None}) == PrecisionPolicy(
        train="bf16", rollout="fp16", kv_cache="bf16", fallback="warn"
    )
    assert mixed.model_dump() == asked | {"rollout": "fp16"}  # what was asked for is what is recorded
    assert PrecisionPolicy(**mixed.model_dump()) == mixed
    assert asked["rollout"] == "float16"  # the caller's mapping stays as it was
    assert PrecisionPolicy.parse({"train": "fp16"}) == PrecisionPolicy(train="fp16", rollout="fp32")
    overridden = PrecisionPolicy.parse({"preset": "fp8", "train": "fp16", "rollout": "fp16"})
    assert overridden.model_copy(update={"preset": None}) == PRESETS["fp16"]


def test_the_fp8_block() -> None:
    given = PrecisionPolicy.parse({"preset": "fp8", "fp8": {"base": "fp16", "exclude": ["down_proj"]}})
    assert given.fp8 == Fp8Policy(base="fp16", exclude=("down_proj",))
    assert (given.format_of("fp8"), given.format_of("bf16")) == (FP16, BF16)
    assert [Fp8Policy(backward=b).backward_format for b in ("e4m3", "e5m2", "high")] == [E4M3, E5M2, None]
    assert str(Fp8Policy(backward="e4m3")) == "e4m3, base bf16"
    assert str(Fp8Policy(backward="high")) == "e4m3, gradients bf16, base bf16"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("fp61", "unknown precision preset 'fp61': expected one of fp32, bf16, fp16, fp8, bf16-train-fp16-rollout"),
        ({"preset": 16}, "precision: preset=16: expected a valid string"),
        (
            "e8m11",
            "unknown precision preset 'e8m11': expected one of fp32, bf16, fp16, fp8, bf16-train-fp16-rollout, "
            "fp8-rollout, mxfp8, ",
        ),
        (
            {"train": "e4m3"},
            "precision: train='e4m3': say fp8, and choose gradients by precision.fp8.backward; expected",
        ),
        ({"train": "e4m3fn"}, "precision: train='e4m3fn': say fp8"),
        ({"kv_cache": "e4m3"}, "precision: kv_cache='e4m3': say fp8"),
        ({"logits": "e8m4"}, "precision: logits='e8m4': it is for a role or its cache, and simulated"),
        ({"train": "e8m11"}, "precision: train='e8m11': unknown number format, expected one of fp32, bf16"),
        ({"logits": "fp8"}, "precision: logits='fp8': it is never fp8; expected one of fp32, bf16, fp16"),
        ({"fp8": {"base": "fp16"}}, "precision: fp8 does nothing where no role is fp8"),
        ({"preset": "fp8", "fp8": {"base": "fp32"}}, "precision: fp8.base='fp32': expected 'bf16' or 'fp16'"),
        ({"preset": "fp8", "fp8": {"backward": "fp16"}}, "precision: fp8.backward='fp16': expected 'e4m3', 'e5m2' or"),
        ({"preset": "fp8", "fp8": {"scale": 2}}, "precision: fp8.scale=2: expected 'fp32' or 'power_of_two'"),
        (
            {"preset": "fp8", "fp8": {"exclude": "down_proj"}},
            "precision: fp8.exclude='down_proj': expected a valid tuple",
        ),
        ({"preset": "fp8", "fp8": {"bass": "fp16"}}, "precision: unknown setting 'fp8.bass'"),
        ({"preset": "fp8", "fp8": "bf16"}, "precision: fp8='bf16': expected a valid dictionary"),
        ({"kernels": "exakt"}, "precision: kernels='exakt': expected 'fast' or 'exact'"),
        ({"on_mismatch": "warn"}, "precision: on_mismatch does nothing with kernels=fast"),
        ({"check_every": 2}, "precision: check_every does nothing with kernels=fast"),
        ({"kernels": "exact", "check_every": 0}, "precision: check_every=0: expected greater than or equal to 1"),
        ({"kernels": "exact", "on_mismatch": "go"}, "precision: on_mismatch='go': expected 'replan', 'stop' or 'warn'"),
        (
            {"preset": "fp8-rollout", "kernels": "exact"},
            "precision: kernels=exact: train=bf16 and rollout=fp8 round to",
        ),
        ({"reference": 16}, "precision: reference=16: expected a valid string"),
        ({"train": "fp61"}, "precision: train='fp61': unknown number format"),
        ({"train": None}, "precision: train=None: expected a valid string"),
        ({"logits": 32}, "precision: logits=32: expected a valid string"),
        ({"backend": "cuda"}, "precision: backend='cuda': expected 'auto', 'native' or 'simulated'"),
        ({"fallback": True}, "precision: fallback=True: expected 'error' or 'warn'"),
        ({"rolout": "fp16"}, "precision: unknown setting 'rolout'; did you mean 'rollout'?"),
        ({"reference": "fp32", "backend": "simulated"}, "precision: backend=simulated: train and rollout are fp32"),
        (
            {"backend": "simulated"},
            "precision: backend=simulated: train and rollout are fp32, which is never simulated",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for(asked: Any, message: str) -> None:
    assert error_of(lambda: PrecisionPolicy.parse(asked)).startswith(message)


def test_a_format_of_the_dial_is_a_preset_a_role_and_a_cache() -> None:
    dialled = PrecisionPolicy.parse("e8m4")
    assert (dialled.train, dialled.rollout) == ("e8m4", "e8m4")
    given = PrecisionPolicy.parse({"rollout": "e5m6", "kv_cache": "e5m3", "reference": "e5m2"})
    resolved = resolve(given, "cpu")
    assert [(role.name, role.backend) for role in resolved.roles] == [
        ("fp32", "native"), ("e5m6", "simulated"), ("e5m2", "simulated"), ("fp32", "native"), ("fp32", "simulated"),
        ("e5m3", "simulated"),
    ]  # fmt: skip
    native = PrecisionPolicy.parse({"rollout": "e8m4", "backend": "native"})
    assert error_of(lambda: resolve(native, "cpu")).startswith("precision.backend=native: rollout asked for e8m4, wh")
    finer = PrecisionPolicy(rollout="e8m4", kv_cache="e8m5")
    assert error_of(lambda: resolve(finer, "cpu")).startswith(
        "precision.kv_cache=e8m5 is finer than the rollout's e8m4"
    )


def test_a_misspelt_preset_and_format_get_a_hint() -> None:
    assert error_of(lambda: PrecisionPolicy.parse("bf16-train")).endswith("did you mean 'bf16-train-fp16-rollout'?")
    assert error_of(lambda: PrecisionPolicy(train="bfloat61")).endswith("did you mean 'bfloat16'?")


# ---- resolving on a CPU


ROLES = ("fp32", "bf16", "fp16")
ONCE_MORE = "asked for: keys and values are rounded once more into the cache"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs, which these tests only pretend to have."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Test GPU")
    return monkeypatch


def of(gpu: pytest.MonkeyPatch, *capability: int) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


EXACT = {"kernels": "exact"}
# Fields beside train and rollout; a GPU's compute capability, none for a CPU; what learner and rollout become, and the
# cache where its line says more than the rollout's.
TABLE: list[tuple[str, str, dict[str, Any], tuple[int, ...], tuple[str, ...]]] = [
    ("fp32", "fp32", {}, (), ("fp32 native", "fp32 native")),
    ("bf16", "fp16", {}, (), ("bf16 simulated", "fp16 simulated")),
    ("fp32", "fp16", {"backend": "simulated"}, (), ("fp32 native", "fp16 simulated")),
    ("bf16", "fp32", {"backend": "native"}, (), ("bf16 native", "fp32 native")),
    ("bf16", "fp16", {"kv_cache": "bf16"}, (), ("bf16 simulated", "fp16 simulated", "bf16 simulated")),
    ("fp8", "fp8", {"fp8": {"base": "fp16"}}, (), ("fp8 on fp16 simulated", "fp8 on fp16 simulated", "fp16 simulated")),
    ("bf16", "fp8", {}, (), ("bf16 simulated", "fp8 on bf16 simulated", "bf16 simulated")),
    ("fp32", "fp32", EXACT, (), ("fp32 exact native", "fp32 exact native", "fp32 native")),
    ("bf16", "bf16", EXACT, (), ("bf16 exact simulated", "bf16 exact simulated", "bf16 simulated")),
    ("fp8", "fp8", EXACT, (), ("fp8 on bf16 exact simulated", "fp8 on bf16 exact simulated", "bf16 simulated")),
    ("bf16", "fp16", {}, (8, 0), ("bf16 native", "fp16 native")),
    ("bf16", "fp32", {"backend": "simulated"}, (8, 0), ("bf16 simulated", "fp32 native")),
    ("fp16", "bf16", {"backend": "simulated"}, (7, 5), ("fp16 simulated", "bf16 simulated")),
    ("fp16", "fp32", {"backend": "native"}, (7, 5), ("fp16 native", "fp32 native")),
    ("fp8", "fp8", {}, (9, 0), ("fp8 on bf16 native", "fp8 on bf16 native", "bf16 native")),
    ("fp8", "fp8", {"backend": "native"}, (10, 0), ("fp8 on bf16 native", "fp8 on bf16 native", "bf16 native")),
    ("bf16", "fp8", {"backend": "simulated"}, (9, 0), ("bf16 simulated", "fp8 on bf16 simulated", "bf16 simulated")),
    ("fp8", "fp8", {}, (8, 9), ("fp8 on bf16 simulated", "fp8 on bf16 simulated", "bf16 simulated")),
    ("fp16", "fp16", EXACT, (8, 0), ("fp16 exact native", "fp16 exact native", "fp16 native")),
    ("fp8", "fp8", EXACT, (9, 0), ("fp8 on bf16 exact native", "fp8 on bf16 exact native", "bf16 native")),
]  # fmt: skip


@pytest.mark.usefixtures("bf16_is_simulated")
@pytest.mark.parametrize(("train", "rollout", "fields", "capability", "active"), TABLE, ids=str)
def test_what_roles_become(
    gpu: pytest.MonkeyPatch, train: str, rollout: str, fields: dict[str, Any], capability: tuple[int, ...], active: Any
) -> None:
    of(gpu, *capability)
    device = "cuda:1" if capability else "cpu"
    resolved = resolve(PrecisionPolicy.parse({"train": train, "rollout": rollout, **fields}), device)
    assert resolved.device == device
    rows = {row["role"]: row for row in resolved.rows()}
    assert list(rows) == ["learner", "rollout", "master", "logits", "kv_cache"]
    assert [rows[role]["requested"] for role in ("learner", "rollout")] == [train, rollout]
    found = [f"{rows[role]['active']} {rows[role]['kernels']}" for role in ("learner", "rollout", "kv_cache")]
    assert found == [*active, *([active[1]] if len(active) == 2 else [])]
    assert (rows["master"]["active"], rows["master"]["kernels"]) == ("fp32", "native")
    assert (rows["logits"]["active"], rows["logits"]["kernels"]) == ("fp32", resolved.rollout.backend)
    assert all(row["reason"] and "\n" not in row["reason"] for row in rows.values())


def test_logits_in_half_are_so_on_both_sides() -> None:
    row = resolve(PrecisionPolicy(train="bf16", rollout="fp16", logits="bf16"), "cpu").rows()[3]
    assert (row["requested"], row["active"]) == ("bf16", "bf16")
    assert "rounded to bf16 on both sides" in row["reason"]


@pytest.mark.usefixtures("bf16_is_simulated")
@pytest.mark.parametrize(("train", "reference"), [("bf16", None), ("bf16", "bf16"), ("fp16", "fp32"), ("bf16", "fp8")])
def test_a_reference_is_as_the_learner_unless_asked_for(train: str, reference: str | None) -> None:
    policy = PrecisionPolicy(train=train, reference=reference)
    resolved = resolve(policy, "cpu", reference=True)
    role = resolved.reference
    assert role is not None
    assert [r["role"] for r in resolved.rows()] == ["learner", "rollout", "reference", "master", "logits", "kv_cache"]
    assert role.requested == (reference or "as learner")
    assert role.name == ("fp8 on bf16" if reference == "fp8" else reference or train)
    assert role.fp8 == (Fp8Policy() if reference == "fp8" else None)
    assert role.backend == ("native" if role.active is FP32 else "simulated")
    assert ("differ by rounding" in role.reason) == (reference in ("fp32", "fp8"))
    assert resolve(policy, "cpu").reference == (role if reference else None)
    assert PrecisionPolicy(reference="fp16", backend="simulated").reference == "fp16"  # something to simulate


@pytest.mark.parametrize(
    ("rollout", "cache", "reason"),
    [
        ("fp32", "fp16", f"{ONCE_MORE}, and become inf beyond 65504"),
        ("fp32", "bf16", ONCE_MORE),
        ("fp16", "bf16", ONCE_MORE),
        *(
            (fmt, fmt, "asked for, and the rollout's own format: keys and values are already on its grid")
            for fmt in ROLES
        ),
    ],
)
def test_a_cache_may_be_coarser_than_the_rollout(rollout: str, cache: str, reason: str) -> None:
    role = resolve(PrecisionPolicy(rollout=rollout, kv_cache=cache), "cpu").kv_cache
    assert (role.requested, role.active.name, role.reason) == (cache, cache, reason)


@pytest.mark.parametrize(
    ("rollout", "cache", "harm"),
    [
        ("fp16", "fp32", "it would change nothing; leave it out or choose fp16"),
        ("bf16", "fp32", "it would change nothing; leave it out or choose bf16"),
        ("bf16", "fp16", "it would add no digit, and keys and values beyond 65504 would become inf; leave it out or"),
    ],
)
def test_a_cache_may_not_be_finer(rollout: str, cache: str, harm: str) -> None:
    message = error_of(lambda: resolve(PrecisionPolicy(rollout=rollout, kv_cache=cache), "cpu"))
    assert message.startswith(f"precision.kv_cache={cache} is finer than the rollout's {rollout}: {harm}")


def test_a_gpu_without_bf16_refuses_it_or_falls_back_with_a_warning(gpu: pytest.MonkeyPatch) -> None:
    of(gpu, 7, 5)
    assert error_of(lambda: resolve(PRESETS["bf16"], "cuda")) == (
        "precision: learner asked for bf16, but Test GPU has no bf16 arithmetic (it came with compute capability "
        "8.0); choose another format, or precision.backend=simulated, or precision.fallback=warn to use fp32"
    )
    policy = PrecisionPolicy(train="fp16", rollout="bf16", kv_cache="fp32", fallback="warn")
    with pytest.warns(UserWarning, match="rollout asked for bf16, but Test GPU has no bf16.*; it runs in fp32"):
        resolved = resolve(policy, "cuda")
    rollout = resolved.rollout
    assert (rollout.requested, rollout.active, rollout.backend) == ("bf16", FP32, "native")
    assert [role.role for role in resolved.roles if role.fell_back] == ["rollout"]
    assert rollout.reason.startswith("fallback: warn, because Test GPU has no bf16 arithmetic")
    assert resolved.kv_cache.active is FP32  # judged by what the rollout really uses


@pytest.mark.parametrize("fallback", ["error", "warn"])
def test_no_fallback_replaces_a_device(monkeypatch: pytest.MonkeyPatch, fallback: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = error_of(lambda: resolve(PrecisionPolicy(train="fp16", fallback=fallback), "cuda"))
    assert message == "device=cuda: this machine has no CUDA device that torch can use; choose cpu"


def test_other_devices_are_errors(gpu: pytest.MonkeyPatch) -> None:
    assert error_of(lambda: resolve(PRESETS["fp32"], "mps")) == "device=mps: expected cpu or cuda"
    assert error_of(lambda: resolve(PRESETS["fp32"], "gpu")) == "device='gpu': expected cpu, cuda or cuda:N"
    assert error_of(lambda: resolve(PRESETS["fp32"], "cuda:2")).startswith("device=cuda:2: this machine has 2 CUDA")


@pytest.mark.parametrize(
    ("fields", "capability", "said"),
    [
        ({"preset": "fp8", "backend": "native"}, (), "backend=native: learner asked for fp8, and cpu has no fp8"),
        ({"preset": "fp8", "backend": "native"}, (8, 9), "backend=native: learner asked for fp8, and cuda has no fp8"),
        ({"preset": "fp16", "backend": "native", **EXACT}, (), "kernels=exact: on cpu the learner would run on native"),
        ({"preset": "bf16", "backend": "simulated", **EXACT}, (9, 0), "kernels=exact: on cuda the learner would run"),
        ({"preset": "fp16", **EXACT}, (7, 5), "kernels=exact: Test GPU is older than the exact kernels are for"),
    ],
)
def test_what_a_device_cannot_do(gpu: pytest.MonkeyPatch, fields: Any, capability: Any, said: str) -> None:
    of(gpu, *capability)
    message = error_of(lambda: resolve(PrecisionPolicy.parse(fields), "cuda" if capability else "cpu"))
    assert message.startswith(f"precision.{said}")


LAYERS = [
    f"model.layers.{n}.{part}" for n in (0, 1, 11) for part in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
]
NAMES = [*LAYERS, "lm_head"]


@pytest.mark.parametrize(
    ("exclude", "kept"),
    [
        ((), []),
        (("down_proj",), [n for n in LAYERS if n.endswith("down_proj")]),
        (("layers.1",), [n for n in LAYERS if ".1." in n]),  # and not layer 11
        (("layers.1.mlp", "self_attn"), [n for n in LAYERS if "layers.1.mlp" in n or "self_attn" in n]),
        (("model.layers.0.mlp.up_proj",), ["model.layers.0.mlp.up_proj"]),
    ],
)
def test_only_projections_in_layers_and_none_that_is_excluded(exclude: tuple[str, ...], kept: list[str]) -> None:
    policy = Fp8Policy(exclude=exclude)
    policy.check(NAMES)
    assert [name for name in LAYERS if not policy.quantizes(name)] == kept
    assert not any(policy.quantizes(name) for name in ("", "lm_head", "model.embed_tokens", "model.norm"))


@pytest.mark.parametrize(
    ("exclude", "said"),
    [
        (("down_porj",), r"precision\.fp8\.exclude: 'down_porj' matches no layer.*did you mean 'down_proj'"),
        (("layers.2",), r"'layers\.2' matches no layer"),
        (("proj",), r"'proj' matches no layer"),  # whole parts of a name, not pieces of them
        (("lm_head",), r"'lm_head' matches no layer"),
        (("layers",), r"leaves no layer in fp8; ask for bf16 instead"),
    ],
)
def test_an_exclusion_without_effect_or_without_remainder(exclude: tuple[str, ...], said: str) -> None:
    with pytest.raises(MantissaError, match=said):
        Fp8Policy(exclude=exclude).check(NAMES)


@pytest.mark.parametrize("rollout", ["fp32", "bf16", "fp16", "fp8"])
def test_a_cache_in_fp8_may_serve_any_rollout(rollout: str) -> None:
    cache = resolve(PrecisionPolicy(train=rollout, rollout=rollout, kv_cache="fp8"), "cpu").kv_cache
    assert (cache.requested, cache.active) == ("fp8", E4M3)
    assert "a scale of its own" in cache.reason


@pytest.mark.parametrize("section", ["fp8", "quantized"])
def test_first_and_last_layers_are_named_once_the_model_is_known(section: str) -> None:
    preset = "fp8" if section == "fp8" else "nvfp4"
    policy = PrecisionPolicy.parse({"preset": preset, section: {"first": 2, "last": 1, "exclude": ["o_proj"]}})
    known = policy.of_layers(30)
    role = known.fp8 if section == "fp8" else known.quantized and known.quantized.of("nvfp4")
    assert isinstance(role, Fp8Policy)
    assert role.exclude == ("o_proj", "layers.0", "layers.1", "layers.29")
    assert [role.quantizes(f"model.layers.{i}.mlp.up_proj") for i in (0, 1, 2, 20, 28, 29)] == [
        False, False, True, True, True, False,
    ]  # fmt: skip
    assert known.of_layers(30) == known
    assert PrecisionPolicy.parse(preset).of_layers(2) == PrecisionPolicy.parse(preset)
    with pytest.raises(MantissaError, match="first=2 and last=1 leave none of the model's 3 layers"):
        policy.of_layers(3)
    unknown = policy.fp8 if section == "fp8" else policy.quantized and policy.quantized.of("nvfp4")
    assert isinstance(unknown, Fp8Policy)
    with pytest.raises(MantissaError, match="number of layers is not known here"):
        unknown.quantizes("model.layers.0.mlp.up_proj")


MIXTURE = [f"model.layers.{n}.{part}" for n in (0, 1) for part in (
    "self_attn.q_proj", "mlp.experts.0.up_proj", "mlp.experts.11.down_proj", "mlp.shared_expert.up_proj",
)]  # fmt: skip
EVERY_SCHEME = ["fp8", "mxfp8", "mxfp4", "nvfp4", "int8", "int4", "int4-32"]


@pytest.mark.parametrize("name", EVERY_SCHEME)
@pytest.mark.parametrize("suffix", ["", "-rollout"])
def test_routed_experts_alone(name: str, suffix: str) -> None:
    """By a preset or by the key that it stands for; shared experts, attention and the router stay in the base."""
    section = "fp8" if name == "fp8" else "quantized"
    policy = PrecisionPolicy.parse(f"{name}-experts{suffix}")
    plain = PrecisionPolicy.parse({"preset": f"{name}{suffix}", section: {"only": ["experts"]}})
    assert PrecisionPolicy(**policy.model_dump()) == policy
    for each in (policy, plain):
        assert (each.train, each.rollout) == ("bf16" if suffix else name, name)
        role = resolve(each, "cpu").rollout
        assert role.fp8 is not None
        role.fp8.check([*MIXTURE, "lm_head"])
        assert [layer for layer in MIXTURE if role.fp8.quantizes(layer)] == [m for m in MIXTURE if ".experts." in m]
        assert not any(map(role.fp8.quantizes, ("", "lm_head", "model.layers.0.mlp.gate", "experts")))
        assert "in experts alone" in role.reason


def test_layers_chosen_beside_layers_left_out() -> None:
    policy = PrecisionPolicy.parse({"preset": "nvfp4-experts", "quantized": {"first": 1, "base": "fp16"}}).of_layers(2)
    role = resolve(policy, "cpu").learner
    assert role.fp8 is not None
    assert [layer for layer in MIXTURE if role.fp8.quantizes(layer)] == MIXTURE[5:7]
    own = PrecisionPolicy.parse({"preset": "nvfp4-experts", "quantized": {"only": ["self_attn"]}})
    assert own.quantized is not None
    assert own.quantized.only == ("self_attn",)


def test_a_choice_of_layers_that_are_not_there() -> None:
    with pytest.raises(MantissaError, match=r"precision\.fp8\.only: 'experts' matches no layer.*no mixture of experts"):
        Fp8Policy(only=("experts",)).check(NAMES)
    with pytest.raises(MantissaError, match=r"precision\.fp8\.only: 'down_porj'.*did you mean 'down_proj'"):
        Fp8Policy(only=("down_porj",)).check(NAMES)
    with pytest.raises(MantissaError, match="leaves no layer in fp8"):
        Fp8Policy(only=("up_proj",), exclude=("mlp",)).check(NAMES)
