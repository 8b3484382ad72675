"""``--model`` of a family that only transformers knows: causes are found by its own code."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch

import injected as made
from mantissa.base.errors import MantissaError
from mantissa.doctor.consult import consult
from mantissa.doctor.diagnosis import CauseKind
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine
from mantissa.doctor.layers import by_layer
from mantissa.doctor.sides import AnyModel, Scores, Side
from mantissa.model import byte_tokenizer
from mantissa.rl.doctor_model import open_model
from mantissa.rollout import Request, SamplingParams
from mantissa.rollout.transformers import TransformersEngine

SEQUENCES, PROMPT, RESPONSE = 40, 8, 24


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: transformers' own code mixes dtypes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    model = families.make("gemma3_text", vocab_size=258, eos_token_id=257, pad_token_id=256)
    with torch.no_grad():
        for parameter in model.parameters():  # of some size: a law with an opinion
            if parameter.dim() == 2:
                parameter.mul_(2.0)
    model.save_pretrained(path)
    byte_tokenizer().save(path)
    return path


def dump_of(learner: Any, rollout: Any, temperature: float = 1.0, declared: float = 1.0) -> Dump:
    """Sampled by one model at a temperature, and scored by the other as declared."""
    draw = np.random.default_rng(3)
    prompts = [tuple(draw.integers(3, 250, PROMPT).tolist()) for _ in range(SEQUENCES)]
    requests = [Request(prompt, number) for number, prompt in enumerate(prompts)]
    answers = TransformersEngine(rollout).generate(requests, SamplingParams(RESPONSE, temperature), 0)
    sequences = []
    for group, (prompt, (answer,)) in enumerate(zip(prompts, answers, strict=True)):
        tokens = np.array([*prompt, *answer.tokens], dtype=np.int64)
        with torch.no_grad():
            logits = learner(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0, PROMPT - 1 : -1]
        logp = torch.log_softmax(logits.double() / declared, -1)
        own = logp.gather(1, torch.from_numpy(tokens[PROMPT:])[:, None])[:, 0].numpy()
        mask = np.ones(len(own), dtype=bool)
        sequences.append(Scored(tokens, PROMPT, answer.logp_T.double().numpy(), own, mask, 1, 1, group))
    settings = Settings(declared, rollout_format="fp32", learner_format="fp32")
    return Dump("plain", Path("dump"), sequences, settings)


def consulted(folder: Path, dump: Dump, other: str | None = None, **more: Any) -> Any:
    opened = open_model(str(folder), dump, other, torch.device("cpu"))
    assert isinstance(opened.model, AnyModel)
    return consult(opened.dump, examine(opened.dump), opened.model, opened.versions, **more)


def plain(folder: Path) -> Any:
    return open_model(str(folder), Dump("plain", folder, [], Settings()), None, torch.device("cpu")).model.model


def test_a_temperature_that_was_applied_on_one_side(folder: Path) -> None:
    model = plain(folder)
    found = consulted(folder, dump_of(model, model, temperature=1.0, declared=0.7))
    cause = max(found.diagnosis.causes, key=lambda each: each.share)
    assert cause.kind is CauseKind.TEMPERATURE
    assert cause.share > 0.95


def test_older_weights_that_another_folder_holds(folder: Path, tmp_path: Path) -> None:
    model = plain(folder)
    older = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(0.02 * parameter.std().nan_to_num() * torch.randn(parameter.shape, generator=generator))
    older.save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    found = consulted(folder, dump_of(model, older), other=str(tmp_path))
    cause = max(found.diagnosis.causes, key=lambda each: each.share)
    assert cause.kind is CauseKind.WEIGHTS
    assert cause.share > 0.95


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
def test_a_format_is_transformers_own(folder: Path, fmt: str) -> None:
    model = plain(folder)
    dump = dump_of(model, model)
    scores = Scores(AnyModel(model), dump.sequences)
    half = copy.deepcopy(model).to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[fmt])
    one = scores(Side(fmt))
    with torch.no_grad():
        for row in (0, 7, 39):
            each = dump.sequences[row]
            logits = half(input_ids=torch.from_numpy(each.tokens)[None], use_cache=False).logits[0, PROMPT - 1 : -1]
            own = torch.log_softmax(logits.float(), -1).gather(1, torch.from_numpy(each.tokens[PROMPT:])[:, None])[:, 0]
            assert np.abs(one[scores.of_sequence == row] - own.double().numpy()).max() < (
                1e-5 if fmt == "fp32" else 0.1
            )
    assert not scores.computes(Side("bf16", habits=frozenset({("norm", "fused")})))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"format": "fp8", "base": "bf16"}, CauseKind.FORMAT),
        ({"eager": True}, CauseKind.KERNELS),
    ],
)
def test_a_rollout_in_fp8_or_with_another_attention_is_found(
    folder: Path, change: dict[str, Any], kind: CauseKind
) -> None:
    model = plain(folder)
    dump = dump_of(model, model)
    scores = Scores(AnyModel(model), dump.sequences)
    learner, rollout = scores.all([Side("bf16"), replace(Side("bf16"), **change)])
    sequences = made.with_logps(list(dump.sequences), learner, rollout)
    declared = Settings(1.0, rollout_format="bf16", learner_format="bf16")
    found = consulted(folder, replace(dump, sequences=sequences, settings=declared))
    cause = max(found.diagnosis.causes, key=lambda each: each.share)
    assert cause.kind is kind
    assert cause.share > 0.95
    assert cause.side == "rollout"


def test_what_the_dump_says_is_fp8_is_scored_so(folder: Path) -> None:
    model = plain(folder)
    dump = dump_of(model, model)
    scores = Scores(AnyModel(model), dump.sequences)
    sequences = made.with_logps(list(dump.sequences), *scores.all([Side("bf16"), Side("fp8")]))
    declared = Settings(1.0, rollout_format="fp8", learner_format="bf16")
    found = consulted(folder, replace(dump, sequences=sequences, settings=declared)).substitution
    assert found.rms["rollout base"] == 0
    assert found.causes[-1].share == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_neox", "gpt2", "olmo2"])
def test_layers_pass_a_difference_on_and_their_shares_add_up(name: str) -> None:
    """A fault in one layer's weights is new there and nowhere else; what rounds is new everywhere."""
    model = AnyModel(families.make(name, vocab_size=64, eos_token_id=2).requires_grad_(False))
    first = next(n for n, _ in model.named_parameters() if ".1." in n and n.endswith("weight") and "norm" not in n)
    other = {n: p.detach() for n, p in model.named_parameters()}
    other[first] = other[first] + 0.01 * torch.randn(other[first].shape, generator=torch.Generator().manual_seed(1))
    scores = Scores(model, made.texts(12), {"other": other})
    found = by_layer(scores, Side(), Side(weights="other"))
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["embedding", "layer 0", "layer 1", "log-probs"]
    assert rows["embedding"].new == rows["layer 0"].new == 0
    assert rows["layer 1"].new > 1e-5
    assert rows["layer 1"].share == pytest.approx(1.0)
    assert rows["log-probs"].new == 0
    d = scores(Side()) - scores(Side(weights="other"))
    assert rows["log-probs"].difference == pytest.approx(np.sqrt(np.square(d).mean()))
    rounded = by_layer(scores, Side(), Side("bf16")).rows
    assert all(row.new > 1e-4 for row in rounded)
    assert sum(row.share for row in rounded) == pytest.approx(1.0)


def test_layers_are_followed_where_it_is_asked(folder: Path) -> None:
    model = plain(folder)
    dump = dump_of(model, model)
    scores = Scores(AnyModel(model), dump.sequences)
    sequences = made.with_logps(list(dump.sequences), *scores.all([Side("bf16"), Side("fp8")]))
    declared = Settings(1.0, rollout_format="bf16", learner_format="bf16")
    found = consulted(folder, replace(dump, sequences=sequences, settings=declared), layers=True).layers
    assert [row.name for row in found.rows] == ["embedding", "layer 0", "layer 1", "log-probs"]
    assert found.rows[0].new == 0
    assert found.rows[1].new > 1e-3


def test_layers_that_pass_more_on_than_one_stream_are_refused() -> None:
    model = families.make("olmo2", vocab_size=64, eos_token_id=2).requires_grad_(False)
    first, second = model.model.layers  # the second reads what the first leaves beside the stream, once
    kept: list[torch.Tensor] = []
    first.register_forward_hook(lambda _, __, out: kept.append(out))
    second.register_forward_hook(lambda _, __, out: out + kept.pop() if kept else out)
    with pytest.raises(MantissaError, match="do not pass one stream on"):
        by_layer(Scores(AnyModel(model), made.texts(12)), Side(), Side("bf16"))
