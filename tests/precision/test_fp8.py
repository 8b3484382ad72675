"""The fp8 block of a policy: which layers it names, what it refuses, and what a device makes of it."""

from __future__ import annotations

import pytest

from mantissa.errors import MantissaError
from mantissa.precision import BF16, E4M3, E5M2, FP16, PRESETS, Fp8Policy, PrecisionPolicy, resolve

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


def test_formats() -> None:
    assert Fp8Policy().forward_format is E4M3
    assert [Fp8Policy(backward=b).backward_format for b in ("e4m3", "e5m2", "high")] == [E4M3, E5M2, None]
    assert [str(Fp8Policy(backward=b)) for b in ("e4m3", "high")] == [  # type: ignore[arg-type]
        "e4m3, base bf16",
        "e4m3, gradients bf16, base bf16",
    ]


def test_the_presets_and_the_block() -> None:
    assert PRESETS["fp8"] == PrecisionPolicy(train="fp8", rollout="fp8", fp8=Fp8Policy())
    assert PRESETS["fp8-rollout"] == PrecisionPolicy(train="bf16", rollout="fp8")
    given = PrecisionPolicy.parse({"preset": "fp8", "fp8": {"base": "fp16", "exclude": ["down_proj"]}})
    assert given.fp8 == Fp8Policy(base="fp16", exclude=("down_proj",))
    assert (given.format_of("fp8"), given.format_of("bf16")) == (FP16, BF16)
    assert PrecisionPolicy.parse({"preset": "fp8", "train": "fp16", "rollout": "fp16"}) == PRESETS["fp16"]


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
