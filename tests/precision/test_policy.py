"""The policy: what can be asked for, what each device makes of it, and every error's wording."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mantissa.errors import MantissaError
from mantissa.precision import BF16, E4M3, E5M2, FP16, FP32, PRESETS, Fp8Policy, PrecisionPolicy, resolve


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
    assert PrecisionPolicy.parse(preset) == PrecisionPolicy.parse({"preset": preset}) == expected
    assert (expected.logits, expected.backend, expected.fallback) == ("fp32", "auto", "error")


def test_fields_override_the_preset_and_without_one_fp32() -> None:
    asked = {"preset": "bf16", "rollout": "float16", "kv_cache": "bf16", "fallback": "warn"}
    mixed = PrecisionPolicy.parse(asked)
    assert mixed == PrecisionPolicy(train="bf16", rollout="fp16", kv_cache="bf16", fallback="warn")
    assert asked["rollout"] == "float16"  # the caller's mapping stays as it was
    assert PrecisionPolicy.parse({"train": "fp16"}) == PrecisionPolicy(train="fp16", rollout="fp32")
    assert PrecisionPolicy.parse({"preset": "fp8", "train": "fp16", "rollout": "fp16"}) == PRESETS["fp16"]


def test_the_fp8_block() -> None:
    given = PrecisionPolicy.parse({"preset": "fp8", "fp8": {"base": "fp16", "exclude": ["down_proj"]}})
    assert given.fp8 == Fp8Policy(base="fp16", exclude=("down_proj",))
    assert (given.format_of("fp8"), given.format_of("bf16")) == (FP16, BF16)
    assert Fp8Policy().forward_format is E4M3
    assert [Fp8Policy(backward=b).backward_format for b in ("e4m3", "e5m2", "high")] == [E4M3, E5M2, None]
    assert str(Fp8Policy(backward="e4m3")) == "e4m3, base bf16"
    assert str(Fp8Policy(backward="high")) == "e4m3, gradients bf16, base bf16"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("fp61", "unknown precision preset 'fp61': expected one of fp32, bf16, fp16, fp8, bf16-train-fp16-rollout"),
        ({"preset": 16}, "unknown precision preset 16: expected one of"),
        ({"train": "e4m3"}, "precision.train=e4m3: say fp8, and choose gradients by precision.fp8.backward; expected"),
        ({"train": "e4m3fn"}, "precision.train=e4m3fn: say fp8"),
        ({"kv_cache": "e5m2"}, "precision.kv_cache=e5m2: say fp8"),
        ({"logits": "fp8"}, "precision.logits=fp8: it is never fp8; expected one of fp32, bf16, fp16"),
        ({"fp8": {"base": "fp16"}}, "precision.fp8 does nothing where no role is fp8"),
        ({"preset": "fp8", "fp8": {"base": "fp32"}}, "precision.fp8.base='fp32': expected one of bf16, fp16"),
        ({"preset": "fp8", "fp8": {"backward": "fp16"}}, "precision.fp8.backward='fp16': expected one of e4m3, e5m2"),
        ({"preset": "fp8", "fp8": {"scale": 2}}, "precision.fp8.scale=2: expected one of fp32, power_of_two"),
        ({"preset": "fp8", "fp8": {"exclude": "down_proj"}}, "precision.fp8.exclude='down_proj': expected a list"),
        ({"preset": "fp8", "fp8": {"bass": "fp16"}}, "unknown key precision.fp8.bass; did you mean 'base'?"),
        ({"preset": "fp8", "fp8": "bf16"}, "precision.fp8='bf16': expected fields"),
        ({"kernels": "exakt"}, "precision.kernels='exakt': expected one of fast, exact"),
        ({"on_mismatch": "warn"}, "precision.on_mismatch does nothing with kernels=fast"),
        ({"check_every": 2}, "precision.check_every does nothing with kernels=fast"),
        ({"kernels": "exact", "check_every": 0}, "precision.check_every=0: expected a number of steps"),
        ({"kernels": "exact", "on_mismatch": "go"}, "precision.on_mismatch='go': expected one of replan, stop, warn"),
        ({"preset": "fp8-rollout", "kernels": "exact"}, "precision.kernels=exact: train=bf16 and rollout=fp8 round to"),
        ({"reference": 16}, "precision.reference=16: expected a format's name"),
        ({"train": "fp61"}, "precision.train: unknown number format 'fp61'"),
        ({"train": None}, "precision.train=None: expected a format's name, one of fp32, bf16, fp16"),
        ({"logits": 32}, "precision.logits=32: expected a format's name"),
        ({"backend": "cuda"}, "precision.backend='cuda': expected one of auto, native, simulated"),
        ({"fallback": True}, "precision.fallback=True: expected one of error, warn"),
        ({"rolout": "fp16"}, "unknown key precision.rolout; did you mean 'rollout'? (keys: preset, train, rollout, "),
        ({"reference": "fp32", "backend": "simulated"}, "precision.backend=simulated: train and rollout are fp32"),
        ({"backend": "simulated"}, "precision.backend=simulated: train and rollout are fp32, which is never simulated"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for(asked: Any, message: str) -> None:
    assert error_of(lambda: PrecisionPolicy.parse(asked)).startswith(message)


def test_a_misspelt_preset_and_format_get_a_hint() -> None:
    assert error_of(lambda: PrecisionPolicy.parse("bf16-train")).endswith("did you mean 'bf16-train-fp16-rollout'?")
    assert error_of(lambda: PrecisionPolicy(train="bfloat61")).endswith("did you mean 'bfloat16'?")


# ---- resolving on a CPU


ROLES = ("fp32", "bf16", "fp16")
ONCE_MORE = "asked for: keys and values are rounded once more into the cache"


@pytest.mark.parametrize("train", ROLES)
@pytest.mark.parametrize("rollout", ROLES)
@pytest.mark.parametrize("backend", ["auto", "native", "simulated"])
def test_every_combination_on_a_cpu(train: str, rollout: str, backend: Any) -> None:
    if backend == "simulated" and train == rollout == "fp32":
        return  # refused: see above
    resolved = resolve(PrecisionPolicy(train=train, rollout=rollout, backend=backend), "cpu")
    for role, asked in ((resolved.learner, train), (resolved.rollout, rollout)):
        assert role.requested == asked == role.active.name
        assert role.backend == ("native" if asked == "fp32" or backend == "native" else "simulated")
        assert (asked in role.reason) == (role.backend == "simulated" or asked == "fp32")
    assert resolved.master.active is FP32
    assert resolved.logits.active is FP32
    assert resolved.kv_cache.active is resolved.rollout.active
    assert resolved.kv_cache.backend == resolved.logits.backend == resolved.rollout.backend
    assert resolved.device == "cpu"


def test_the_table_is_plain_strings_one_line_a_role() -> None:
    rows = resolve(PrecisionPolicy(train="bf16", rollout="fp16", logits="bf16", kv_cache="bf16"), "cpu").rows()
    assert [r["role"] for r in rows] == ["learner", "rollout", "master", "logits", "kv_cache"]
    assert [r["requested"] for r in rows] == ["bf16", "fp16", "fp32", "bf16", "bf16"]
    assert [r["active"] for r in rows] == ["bf16", "fp16", "fp32", "bf16", "bf16"]
    assert [r["kernels"] for r in rows] == ["simulated", "simulated", "native", "simulated", "simulated"]
    assert all(isinstance(v, str) and v and "\n" not in v for r in rows for v in r.values())
    assert "rounded to bf16 on both sides" in rows[3]["reason"]


@pytest.mark.parametrize("reference", [None, *ROLES])
@pytest.mark.parametrize("train", ROLES)
def test_a_reference_is_as_the_learner_unless_asked_for(train: str, reference: str | None) -> None:
    resolved = resolve(PrecisionPolicy(train=train, reference=reference), "cpu", reference=True)
    role = resolved.reference
    assert role is not None
    assert [r["role"] for r in resolved.rows()] == ["learner", "rollout", "reference", "master", "logits", "kv_cache"]
    assert role.requested == (reference or "as learner")
    assert role.active.name == (reference or train)
    assert role.backend == ("native" if role.active is FP32 else "simulated")
    assert ("differ by rounding" in role.reason) == (role.active is not resolved.learner.active)
    assert resolve(PrecisionPolicy(train=train, reference=reference), "cpu").reference == (role if reference else None)


def test_a_simulated_reference_alone_is_something_to_simulate() -> None:
    role = resolve(PrecisionPolicy(reference="fp16", backend="simulated"), "cpu").reference
    assert role is not None
    assert role.backend == "simulated"


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


# ---- resolving on a GPU, which these tests only pretend to have


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Test GPU")
    return monkeypatch


@pytest.mark.parametrize("train", ROLES)
@pytest.mark.parametrize("backend", ["auto", "native", "simulated"])
def test_every_combination_on_a_gpu(gpu: pytest.MonkeyPatch, train: str, backend: Any) -> None:
    resolved = resolve(PrecisionPolicy(train=train, rollout="fp16", backend=backend), "cuda:1")
    assert resolved.device == "cuda:1"
    assert resolved.learner.active.name == train
    assert resolved.learner.backend == ("simulated" if backend == "simulated" and train != "fp32" else "native")
    assert resolved.rollout.backend == ("simulated" if backend == "simulated" else "native")
    assert ("rounded in fp32 on the GPU" in resolved.learner.reason) == (resolved.learner.backend == "simulated")


class TestAGpuWithoutBf16:
    @pytest.fixture(autouse=True)
    def _old(self, gpu: pytest.MonkeyPatch) -> None:
        gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))

    def test_refuses_bf16_and_says_what_to_do(self) -> None:
        message = error_of(lambda: resolve(PRESETS["bf16"], "cuda"))
        assert message == (
            "precision: learner asked for bf16, but Test GPU has no bf16 arithmetic (it came with compute capability "
            "8.0); choose another format, or precision.backend=simulated, or precision.fallback=warn to use fp32"
        )

    def test_runs_fp16_and_simulated_bf16(self) -> None:
        assert resolve(PRESETS["fp16"], "cuda").learner.backend == "native"
        simulated = resolve(PrecisionPolicy(train="bf16", rollout="bf16", backend="simulated"), "cuda")
        assert (simulated.learner.active, simulated.learner.backend) == (BF16, "simulated")

    def test_falls_back_with_a_warning_and_keeps_what_was_asked(self) -> None:
        policy = PrecisionPolicy(train="bf16", rollout="fp16", fallback="warn")
        with pytest.warns(UserWarning, match="learner asked for bf16, but Test GPU has no bf16.*; it runs in fp32"):
            resolved = resolve(policy, "cuda")
        learner = resolved.learner
        assert (learner.requested, learner.active, learner.backend) == ("bf16", FP32, "native")
        assert learner.reason.startswith("fallback: warn, because Test GPU has no bf16 arithmetic")
        assert resolved.rollout.active is FP16

    def test_the_cache_is_judged_by_what_the_rollout_really_uses(self) -> None:
        policy = PrecisionPolicy(rollout="bf16", kv_cache="fp32", fallback="warn")
        with pytest.warns(UserWarning, match="rollout asked for bf16"):
            assert resolve(policy, "cuda").kv_cache.active is FP32


@pytest.mark.parametrize(
    "policy", [PRESETS["fp32"], PRESETS["fp16"], PrecisionPolicy(train="fp16", backend="simulated")]
)
@pytest.mark.parametrize("fallback", ["error", "warn"])
def test_no_fallback_replaces_a_device(monkeypatch: pytest.MonkeyPatch, policy: PrecisionPolicy, fallback: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = dataclasses.replace(policy, fallback=fallback)
    message = error_of(lambda: resolve(asked, "cuda"))
    assert message == "device=cuda: this machine has no CUDA device that torch can use; choose cpu"


def test_other_devices_are_errors(gpu: pytest.MonkeyPatch) -> None:
    assert error_of(lambda: resolve(PRESETS["fp32"], "mps")) == "device=mps: expected cpu or cuda"
    assert error_of(lambda: resolve(PRESETS["fp32"], "gpu")) == "device='gpu': expected cpu, cuda or cuda:N"
    assert error_of(lambda: resolve(PRESETS["fp32"], "cuda:2")).startswith("device=cuda:2: this machine has 2 CUDA")


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


def test_a_role_on_a_cpu_is_simulated_on_its_base() -> None:
    resolved = resolve(PrecisionPolicy.parse({"preset": "fp8", "fp8": {"base": "fp16"}}), "cpu")
    role = resolved.learner
    assert (role.requested, role.active, role.backend, role.fp8) == ("fp8", FP16, "simulated", Fp8Policy(base="fp16"))
    assert (role.name, role.kernels, role.exact) == ("fp8 on fp16", "simulated", False)
    assert resolved.rows()[0]["active"] == "fp8 on fp16"
    assert resolved.kv_cache.active is FP16
    assert resolve(PRESETS["fp8-rollout"], "cpu").learner.fp8 is None
    reference = resolve(PrecisionPolicy(train="bf16", rollout="bf16", reference="fp8"), "cpu").reference
    assert reference is not None
    assert (reference.name, reference.fp8) == ("fp8 on bf16", Fp8Policy())


def test_a_native_backend_on_a_cpu_is_refused() -> None:
    with pytest.raises(MantissaError, match=r"precision\.backend=native: learner asked for fp8, and cpu has no fp8"):
        resolve(PrecisionPolicy.parse({"preset": "fp8", "backend": "native"}), "cpu")


@pytest.mark.parametrize("rollout", ["fp32", "bf16", "fp16", "fp8"])
def test_a_cache_in_fp8_may_serve_any_rollout(rollout: str) -> None:
    cache = resolve(PrecisionPolicy(train=rollout, rollout=rollout, kv_cache="fp8"), "cpu").kv_cache
    assert (cache.requested, cache.active) == ("fp8", E4M3)
    assert "a scale of its own" in cache.reason


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_exact_roles_say_so(precision: str) -> None:
    resolved = resolve(PrecisionPolicy(train=precision, rollout=precision, kernels="exact"), "cpu")
    assert resolved.learner.exact
    assert resolved.rollout.exact
    assert resolved.learner.kernels == f"exact {'native' if precision == 'fp32' else 'simulated'}"


def test_exact_native_halves_on_a_cpu_are_refused() -> None:
    with pytest.raises(MantissaError, match=r"native bf16 kernels, which have no exact form; leave precision\.backend"):
        resolve(PrecisionPolicy(train="bf16", rollout="bf16", kernels="exact", backend="native"), "cpu")
