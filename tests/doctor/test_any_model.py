"""``--model`` of a family that only transformers knows: causes are found by its own code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.qwen3_moe import modeling_qwen3_moe

import injected as made
from mantissa.base.errors import MantissaError
from mantissa.doctor import habits, words
from mantissa.doctor.consult import consult
from mantissa.doctor.diagnosis import CauseKind
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine, remedies_for
from mantissa.doctor.layers import by_layer
from mantissa.doctor.sides import AnyModel, Scores, Side, Softmax
from mantissa.doctor.substitution import _SOFTMAXES
from mantissa.model import byte_tokenizer
from mantissa.precision import BF16
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


def in_half(model: Any) -> Any:
    """As a model is loaded in bf16: rotary frequencies stay fp32."""
    half = copy.deepcopy(model).bfloat16()
    for name, buffer in model.named_buffers():
        home, _, own = name.rpartition(".")
        half.get_submodule(home).register_buffer(own, buffer, persistent=False)
    return half


def scored_in_half(
    model: Any, dump: Dump, law: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.log_softmax(x.float(), -1)
) -> Any:
    """Log-probs by the model as it is loaded in bf16, in the doctor's batches: each shape has its own roundings."""
    scores, half = Scores(AnyModel(model), dump.sequences), in_half(model)
    found = np.zeros(len(scores.of_sequence))
    for batch in scores.batches():
        with torch.no_grad():
            logits = half(input_ids=batch.tokens_BT, attention_mask=torch.ones_like(batch.tokens_BT),
                          position_ids=batch.positions_BT, use_cache=False).logits  # fmt: skip
        assert logits.dtype is torch.bfloat16
        found[batch.places] = law(batch.before(logits)).gather(1, batch.tokens[:, None])[:, 0].double().numpy()
    return found


# Kernels as other programs have them, written here once more and put into transformers' classes.


def fused_rotary(monkeypatch: pytest.MonkeyPatch) -> None:
    """q cos + rotate(q) sin with cos and sin of fp32 angles, all in fp32, rounded once."""

    def tables(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        frequencies = getattr(self, f"{layer_type}_inv_freq" if layer_type else "inv_freq").float()
        scale = getattr(self, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling")
        angles = position_ids[..., None].float() * frequencies
        both = torch.cat((angles, angles), -1)
        return both.cos() * scale, both.sin() * scale

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        def turned(x: torch.Tensor) -> torch.Tensor:
            wide, half = x.float(), x.shape[-1] // 2
            other = torch.cat((-wide[..., half:], wide[..., :half]), -1)
            return (wide * cos.unsqueeze(unsqueeze_dim) + other * sin.unsqueeze(unsqueeze_dim)).to(x.dtype)

        return turned(q), turned(k)

    monkeypatch.setattr(modeling_gemma3, "apply_rotary_pos_emb", rotate)
    monkeypatch.setattr(modeling_gemma3.Gemma3RotaryEmbedding, "forward", tables)


def fused_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """gelu(gate) * up in fp32, rounded once."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x).float(), self.up_proj(x).float()
        return self.down_proj((torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype))

    monkeypatch.setattr(modeling_gemma3.Gemma3MLP, "forward", forward)


def norm_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """x / rms(x) * (1 + weight), each step rounded."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)

    monkeypatch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", forward)


@pytest.mark.parametrize("which", ["rollout", "learner"])
@pytest.mark.parametrize(
    ("put_in", "kind", "key"),
    [
        (fused_rotary, CauseKind.ROTARY, "policy.megatron_cfg.apply_rope_fusion=false"),
        (fused_activation, CauseKind.ACTIVATION, "policy.megatron_cfg.bias_activation_fusion=false"),
        (norm_in_half, CauseKind.NORM, ""),
    ],
)
def test_a_fused_kernel_of_either_side_is_named_with_its_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, put_in: Any, kind: CauseKind, key: str, which: str
) -> None:
    model = plain(folder)
    dump = dump_of(model, model)
    usual = scored_in_half(model, dump)
    with monkeypatch.context() as patched:
        put_in(patched)
        other = scored_in_half(model, dump)
    learner, rollout = (usual, other) if which == "rollout" else (other, usual)
    sequences = made.with_logps(list(dump.sequences), learner, rollout)
    declared = Settings(1.0, rollout_format="bf16", learner_format="bf16")
    found = consulted(folder, replace(dump, framework="nemo-rl", sequences=sequences, settings=declared))
    cause = max(found.diagnosis.causes, key=lambda each: each.share)
    assert (cause.kind, cause.side) == (kind, which)
    assert cause.share > 0.5
    assert key in str(remedies_for(found.diagnosis))


def test_a_router_in_fp32_is_what_a_router_in_fp32_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AnyModel(families.make("qwen3_moe", vocab_size=258).eval())
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, 250, (4, 24)))
    places = torch.arange(24).expand(4, -1)
    sides = [Side("bf16"), Side("bf16", habits=frozenset({habits.ROUTER}))]
    with torch.no_grad():
        usual, habit = (model.logits_of(tokens, places, side, BF16) for side in sides)

        def forward(self: Any, x: torch.Tensor) -> Any:
            x, weight = x.reshape(-1, x.shape[-1]).float(), self.weight.to(torch.bfloat16).float()
            logits = x @ weight.T
            values, experts = torch.topk(torch.softmax(logits, -1), self.top_k, -1)
            return logits, values / values.sum(-1, keepdim=True) if self.norm_topk_prob else values, experts

        with monkeypatch.context() as patched:
            patched.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", forward)
            own = model.logits_of(tokens, places, Side("bf16"), BF16)
        assert torch.equal(habit, own)
        assert not torch.equal(habit, usual)
        assert torch.equal(usual, model.logits_of(tokens, places, Side("bf16"), BF16))  # nothing stays behind


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma3_text", {habits.ROPE, habits.ACTIVATION, habits.HALF_NORM, habits.HEAD}),
        ("deepseek_v3", {habits.ROPE, habits.ACTIVATION, habits.HALF_NORM, habits.HEAD}),
        ("gpt_oss", {habits.ROPE, habits.HALF_NORM, habits.HEAD, habits.ROUTER}),
        ("gpt2", {habits.HEAD}),
    ],
)
def test_only_habits_that_change_something_are_tried(family: str, expected: set[habits.Habit]) -> None:
    assert AnyModel(families.make(family, vocab_size=258).eval()).habits >= expected
    assert habits.ROUTER not in AnyModel(families.make("gpt2", vocab_size=258).eval()).habits


@pytest.mark.parametrize("family", ["olmo2", "phi3"])
def test_a_rollout_with_its_own_cache_is_no_fused_kernel(tmp_path: Path, family: str) -> None:
    """Both sides by transformers' own code in bf16: less rounding explains nothing here."""
    made_here = families.make(family, vocab_size=258, eos_token_id=257, pad_token_id=256)
    with torch.no_grad():
        for parameter in made_here.parameters():
            if parameter.dim() == 2:
                parameter.mul_(2.0)
    made_here.save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    model = plain(tmp_path)
    dump = dump_of(model, in_half(model))
    rollout = Scores(AnyModel(model), dump.sequences).rollout
    sequences = made.with_logps(list(dump.sequences), scored_in_half(model, dump), rollout)
    declared = Settings(1.0, rollout_format="bf16", learner_format="bf16")
    found = consulted(tmp_path, replace(dump, sequences=sequences, settings=declared))
    fused = {CauseKind.ROTARY, CauseKind.ACTIVATION, CauseKind.NORM, CauseKind.HEAD, CauseKind.SOFTMAX}
    assert found.substitution is not None
    assert fused.isdisjoint(cause.kind for cause in found.diagnosis.causes)


@pytest.mark.parametrize("softmax", ["divided", "lse", "half"])
def test_a_log_softmax_that_is_half_in_a_half_format_is_named(folder: Path, softmax: str) -> None:
    model = plain(folder)
    dump = dump_of(model, model, temperature=0.8)

    def narrow(logits: torch.Tensor) -> torch.Tensor:
        divided = logits / 0.8
        return {
            "divided": torch.log_softmax(divided.float(), -1),
            "lse": divided.float() - torch.logsumexp(divided.float(), -1, keepdim=True).bfloat16().float(),
            "half": torch.log_softmax(divided.float(), -1).bfloat16().float(),  # as on a GPU: rounded once
        }[softmax]

    learner = scored_in_half(model, dump, narrow)
    rollout = scored_in_half(model, dump, lambda logits: torch.log_softmax(logits.float() / 0.8, -1))
    sequences = made.with_logps(list(dump.sequences), learner, rollout)
    declared = Settings(0.8, rollout_format="bf16", learner_format="bf16")
    found = consulted(folder, replace(dump, sequences=sequences, settings=declared))
    cause = max(found.diagnosis.causes, key=lambda each: each.share)
    assert (cause.kind, cause.side) == (CauseKind.SOFTMAX, "learner")
    assert cause.name == words.cause(CauseKind.SOFTMAX, "learner", {}, _SOFTMAXES[Softmax(softmax)])
    assert cause.share > 0.5


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
