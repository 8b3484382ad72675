"""The probe: what it chooses here, what it falls back on with libraries that sum otherwise, and when it gives up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from exact_policies import FAMILIES, Policies, exactly, make_model, ragged, shapes_of
from mantissa.base.errors import MantissaError
from mantissa.kernels import ModelShapes, cpu, plan_exact, resolve
from mantissa.kernels import exact_probe as probe_module
from mantissa.kernels.exact.kernels import ExactKernels
from mantissa.kernels.exact.plan import AttentionChoice, Choice, ExactPlan
from mantissa.kernels.exact_probe import threads
from mantissa.model import Decoder, LoraShape, attach
from mantissa.precision import FP32, PrecisionPolicy
from other_library import OtherLibrary

SHAPES = ModelShapes(
    (("layers.0.q_proj", 48, 32), ("layers.1.q_proj", 48, 32), ("lm_head", 48, 24)), 4, 2, 16, 24, 96, 128
)
ROLE = exactly("bf16", backend="simulated").learner


@pytest.fixture(autouse=True)
def _by_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned where nothing is compiled, whatever was measured on this machine."""
    monkeypatch.setattr(probe_module, "_compiled_parts", lambda table: ())


def ways(plan: ExactPlan) -> set[str]:
    return {choice.way for choice in plan.products.values()}


def test_some_way_holds_on_this_machine_and_the_lines_say_which() -> None:
    with threads(2):
        plan = plan_exact(SHAPES, ROLE, "cpu")
    lines = plan.lines()
    assert set(plan.products) == {(32, 48), (24, 48), (8, 8)}
    first, second = plan.products[32, 48], plan.products[24, 48]
    alike = (str(first), first.why) == (str(second), second.why)  # then one line says both
    said = "products q_proj 48x32; lm_head 48x24" if alike else "products q_proj 48x32"
    assert lines[0].startswith(f"{said}: {plan.products[32, 48]}: ")
    assert {2} <= set(plan.threads) <= {1, 2}
    assert lines[-2].startswith(f"attention: {plan.attention}: ")
    for what in (
        "rms_norm 16",
        "rms_norm 48",
        "swiglu 48",
        "token_logprob 24",
        "softmax of 16 to 128 keys",
        "rotation 8",
        f"{' and '.join(map(str, plan.threads))} threads",
    ):
        assert what in lines[-1]


def cut(*counts: int) -> Callable[[int, int], int]:
    """A library that cuts the sum of a call with one of these numbers of rows in two."""
    return lambda rows, terms: terms // 2 if rows in counts else terms


LIBRARIES: dict[str, tuple[Callable[[int, int], int], tuple[int, ...], str]] = {
    # few rows by another routine: what is filled up never meets it
    "gemv": (cut(1, 2, 3), (4, 8, 16, 32, 48, 64, 96, 128, 192), "decode rows by 4, keys by 16"),
    # attention's few rows need more filling up than four
    "few": (cut(*range(1, 16)), (16, 32, 48, 64, 96, 128, 192), "decode rows by 16, keys by 16"),
    # as seen on a two-core Intel machine: equal after 1 to 36 rows, and others at these (of attention's: 32 positions)
    "seen": (cut(64, 96, 128, 192), (4, 8, 16, 32, 48), "heads, 16 positions or decode rows by 4, keys by 16"),
    # 16 rows by another routine than more of them
    "sixteen": (lambda rows, terms: terms if rows > 16 else terms // 2, (64, 96, 128, 192), "decode rows by 32"),
    # a cut that depends on the number of rows: only tiles of one size hold
    "rows": (lambda rows, terms: 1 + rows // 16 % terms, (64,), "16 positions or decode rows by 32, keys by 16"),
    # a cut that depends on the number of terms: short blocks of keys have sums of their own
    "terms": (lambda rows, terms: max(terms - 120, terms // 4), (4, 8, 16, 32, 48, 64, 96, 128, 192), "keys by 128"),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_sums_otherwise_gets_the_shapes_that_agree(name: str) -> None:
    cut_at, products, attention = LIBRARIES[name]
    with OtherLibrary(cut_at) as library:
        plan = plan_exact(SHAPES, ROLE, "cpu")
    assert library.calls > 100
    assert ways(plan) == {"tiles"}
    assert plan.products[32, 48].sizes == products
    assert attention in str(plan.attention)


@pytest.mark.skipif(not cpu._ONEDNN, reason="torch without oneDNN")
@pytest.mark.parametrize("layout", ["plain", "packed", "both"])
def test_a_onednn_whose_rows_depend_on_their_place_is_not_taken(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Every second row is another number: in one layout only, or in each where the other's hides it."""
    whole = cpu.onednn

    def placed(x: torch.Tensor, weight: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        out = whole(x, weight, *more)
        if layout == "both" or weight.is_mkldnn == (layout == "packed"):
            first = int(weight.is_mkldnn)
            out[first::2] = torch.nextafter(out[first::2], torch.tensor(9e9))
        return out

    monkeypatch.setattr(cpu, "onednn", placed)
    shapes = ModelShapes((("gate_proj", 288, 256), ("lm_head", 288, 40)), 2, 1, 16, 40, 32, 256)
    choice = plan_exact(shapes, ROLE, "cpu").product((256, 288))
    assert not choice.onednn
    assert choice.why.startswith("tiles of 16 rows by oneDNN differ; tiles of 64 rows by oneDNN differ; ")


class Unsteady(OtherLibrary):
    """A library whose sums are cut elsewhere at every call, as by threads that share the work as they come."""

    def __init__(self) -> None:
        super().__init__(lambda rows, terms: 1 + self.calls * 7 % terms)


def test_where_nothing_repeats_fp64_still_does_and_the_reason_is_told() -> None:
    with Unsteady():
        plan = plan_exact(SHAPES, ROLE, "cpu")
    assert ways(plan) == {"fp64"}
    assert plan.attention.way == "fp64"
    why = plan.products[32, 48].why
    assert why.startswith("tiles of 16 rows differ; tiles of 64 rows differ; one tile of 64 rows differ")
    assert why.endswith("a row is the same at every place")


def test_with_such_a_library_log_probs_are_equal_all_the_same() -> None:
    """End to end on the fallbacks that the probe chose; the fast family, on the same library, is not equal."""
    requests = ragged(6, samples=2)
    with OtherLibrary(LIBRARIES["rows"][0]):
        model, resolved = make_model(FAMILIES["qwen2"]), exactly("bf16")
        plan = plan_exact(shapes_of(model), resolved.learner, "cpu")
        exact = Policies(model, resolved, plan=plan)
        assert ways(plan) == {"tiles"}
        sampled = exact.sample(requests, tokens=12)
        for micro in (None, 1):
            assert exact.different(sampled, micro=micro) == 0
        fast = Policies(exact.model, resolve(PrecisionPolicy(), "cpu"))  # bf16 would round nearly all of it away
        sampled = fast.sample(requests, tokens=12)
        assert len(sampled.logp_N) > 60
        assert fast.different(sampled, micro=1) > 0


def test_where_not_even_fp64_repeats_the_run_does_not_start() -> None:
    message = (
        r"precision.kernels=exact: on this CPU no way of computing the product q_proj 48x32 gives a row the same bits "
        r"wherever it stands, in bf16 \(tiles of 16 rows differ; tiles of 64 rows differ; one tile of 64 rows differ; "
        r"fp64 of 64 rows differ\); choose kernels=fast, or another torch build"
    )
    with OtherLibrary(lambda rows, terms: terms, error=1e-3), pytest.raises(MantissaError, match=message):
        plan_exact(SHAPES, ROLE, "cpu")


def test_the_number_of_threads_is_restored_whatever_happens() -> None:
    with threads(2):
        with pytest.raises(MantissaError), OtherLibrary(lambda rows, terms: terms, error=1e-3):
            plan_exact(SHAPES, ROLE, "cpu")
        assert torch.get_num_threads() == 2


def test_an_operation_with_one_way_only_must_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's SwiGLU is on many a CPU: its exponential for what is left over from whole vectors is another one."""

    class Careless(ExactKernels):
        def swiglu(self, gate_NE: torch.Tensor, up_NE: torch.Tensor) -> torch.Tensor:
            whole_NE = super().swiglu(gate_NE, up_NE)
            return whole_NE if whole_NE.numel() % 64 else whole_NE * 1.0625

    monkeypatch.setattr(probe_module, "ExactKernels", Careless)
    with pytest.raises(MantissaError, match=r"on this CPU swiglu 48 gives a row other bits among \d+ rows than among"):
        plan_exact(SHAPES, ROLE, "cpu")


@pytest.mark.usefixtures("bf16_is_simulated")
def test_a_role_that_is_not_exact_or_not_on_a_cpu_is_a_programmers_error() -> None:
    with pytest.raises(ValueError, match="an exact role on a CPU, not for simulated learner on cpu"):
        plan_exact(SHAPES, resolve(PrecisionPolicy(train="bf16"), "cpu").learner, "cpu")
    with pytest.raises(ValueError, match="not for exact simulated learner on cuda"):
        plan_exact(SHAPES, ROLE, "cuda")
    with pytest.raises(ValueError, match="fastest='padded': expected one of in order, tiles, one tile, fp64"):
        plan_exact(SHAPES, ROLE, "cpu", "padded")  # type: ignore[arg-type]


def test_shapes_of_a_model_are_its_products() -> None:
    """A tied head multiplies the embedding; an untied one is a matrix of its own, and the embedding no product."""
    sizes = {name: shapes_of(make_model(config)).sizes for name, config in FAMILIES.items()}
    assert sizes["qwen2"] == {
        (96, 48): "lm_head (tied)",
        (128, 48): "q_proj",
        (32, 48): "k_proj, v_proj",
        (48, 128): "o_proj",
        (72, 48): "gate_proj, up_proj",
        (48, 72): "down_proj",
    }
    assert sizes["llama"][96, 32] == "lm_head"
    shapes = shapes_of(make_model(FAMILIES["llama"]))
    assert (shapes.vocabulary, shapes.heads, shapes.kv_heads, shapes.head_dim) == (96, 2, 1, 16)


def test_adapters_are_no_products() -> None:
    model = Decoder(dataclasses.replace(FAMILIES["qwen3"], tie_word_embeddings=True)).initialize()
    plain = ModelShapes.of(dict(model.named_parameters()), 2, 2, 64)
    attach(model, LoraShape(rank=2, alpha=4.0), torch.Generator().manual_seed(0))
    assert ModelShapes.of(dict(model.named_parameters()), 2, 2, 64).sizes == plain.sizes


def test_what_was_not_probed_is_refused() -> None:
    """A softmax was tried over so many keys; more of them are no guess."""
    plan = plan_exact(SHAPES, ROLE, "cpu")
    kernels = ExactKernels(FP32, plan)
    heads, size, most = SHAPES.heads, SHAPES.head_dim, plan.length
    assert SHAPES.length <= most < SHAPES.length + 128
    q, k = torch.randn(1, heads, most + 1, size), torch.randn(1, SHAPES.kv_heads, most + 1, size)
    kernels.causal_attention(q[:, :, :most], k[:, :, :most], k[:, :, :most])
    with pytest.raises(MantissaError, match=f"sequences of {most} positions at most, and here are {most + 1}"):
        kernels.causal_attention(q, k, k)
    with pytest.raises(MantissaError, match="at most"):
        kernels.cached_attention(q[:, :, 0], k, k, torch.tensor([most + 1]))


@pytest.mark.parametrize(("products", "attention"), [(True, True), (False, True), (True, False), (False, False)])
def test_another_number_of_threads_is_proven_only_if_products_and_attention_hold_with_it(
    products: bool, attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was chosen with two threads is tried once more with one; where anything differs, the plan is for two."""
    monkeypatch.setattr(probe_module._Product, "holds", lambda *_: products)
    monkeypatch.setattr(probe_module._Attention, "holds", lambda *_: attention)
    monkeypatch.setattr(probe_module._Product, "choose", lambda *_: Choice("one tile", (64,)))
    chosen = AttentionChoice("one tile", (16,), 32, (16,), 128)
    monkeypatch.setattr(
        probe_module, "_planned_attention", lambda *_: (object.__new__(probe_module._Attention), chosen)
    )
    monkeypatch.setattr(probe_module, "_check_rest", lambda *_: "nothing")
    with threads(2):
        plan = plan_exact(SHAPES, ROLE, "cpu")
    assert plan.threads == ((1, 2) if products and attention else (2,))
