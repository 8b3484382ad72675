"""``mantissa tune`` of a family that only transformers knows: its own code, the products chosen in fp8."""

from __future__ import annotations

import families
import numpy as np
import pytest

import injected as made
from mantissa.base.errors import MantissaError
from mantissa.doctor.sides import AnyModel, Scores, Side
from mantissa.doctor.tune import check, groups, tune


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: transformers' own code mixes dtypes."""


def of_family(name: str) -> AnyModel:
    return AnyModel(families.make(name, vocab_size=64, eos_token_id=2).requires_grad_(False))


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("gpt_neox", ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]),
        ("phi3", ["self_attn.qkv_proj", "o", "mlp.gate_up_proj", "down"]),
        ("olmo2", ["qkv", "o", "gate_up", "down"]),
    ],
)
def test_a_family_of_transformers_own_is_tuned(family: str, kinds: list[str]) -> None:
    model = of_family(family)
    scores = Scores(model, made.texts(16))
    found = tune(scores, budget=0.01, base="bf16", blocks=2)
    assert sorted({group.kind for group in found.sensitivity}) == sorted(kinds)
    check(found, model.projections)
    assert found.recipe()["rollout"] == {"engine": "transformers"}
    everything, nothing = found.rows[3:]
    d = scores(Side("bf16")) - scores(Side("fp8"))
    own = d[np.isin(scores.of_sequence, range(0, 16, 2))]
    assert everything.chosen == pytest.approx(np.std([d[scores.of_sequence == b].mean() for b in range(0, 16, 2)]))
    assert 0 < found.floor < np.square(own).mean()  # transformers' eager and split products are another engine
    assert nothing.measured.value > 0
    taken = {name for group in found.rows[0].taken for name in group.projections}
    assert set(found.kept()) == {*model.projections, found.head} - taken
    kept = tuple(name.removeprefix("model.") for name in model.projections if name not in taken)
    whole = scores(Side("bf16")) - scores(Side("fp8", exclude=tuple(f"layers.{n.split('layers.')[1]}" for n in kept)))
    means = [whole[scores.of_sequence == b].mean() for b in range(0, 16, 2)]
    assert found.rows[0].chosen == pytest.approx(np.std(means))


def test_experts_of_a_family_are_one_product_each() -> None:
    every = groups(of_family("gpt_oss"), 1)
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= {group.kind for group in every}
    assert not any("router" in group.kind for group in every)


def test_a_family_whose_layers_have_another_name_is_refused() -> None:
    with pytest.raises(MantissaError, match="no product of this model is of a weight inside layers so named"):
        tune(Scores(of_family("gpt2"), made.texts(8)), budget=0.1)
