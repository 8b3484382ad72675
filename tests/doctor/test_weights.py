"""Did the weights arrive: each fault put into an engine's tensors is named, and nothing else is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gguf_files import gguf_decoder, write_gguf
from mantissa.base.errors import MantissaError
from mantissa.doctor.held import held
from mantissa.doctor.weights import ARRIVED, DO, Fate, Outcome, compare
from mantissa.model import character_tokenizer, save_model
from mantissa.precision import E4M3, SQUARE, quantize

State = dict[str, Tensor]
Q, K, V, OUT = (f"model.layers.1.self_attn.{one}_proj.weight" for one in "qkvo")
UP, GATE, DOWN = (f"model.layers.1.mlp.{one}_proj.weight" for one in ("up", "gate", "down"))
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def trained(seed: int = 0, tied: bool = False) -> State:
    """Two layers' weights, fp32."""
    draw = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (96, 64), NORM: (64,)}
    for layer in (0, 1):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (64 if one in "qo" else 32, 64) for one in "qkvo"}
        shapes |= {f"{at}.mlp.{one}_proj.weight": (128, 64) for one in ("up", "gate")}
        shapes |= {f"{at}.mlp.down_proj.weight": (64, 128), f"{at}.input_layernorm.weight": (64,)}
    if not tied:
        shapes[HEAD] = (96, 64)
    return {name: torch.randn(shape, generator=draw) * 0.05 for name, shape in shapes.items()}


NOW = trained()
BEFORE = {name: w + 1e-3 * torch.sign(w) for name, w in NOW.items()}


def sent(weights: State = NOW, dtype: torch.dtype = torch.bfloat16) -> State:
    return {name: w.to(dtype) for name, w in weights.items()}


def lost(engine: State, trainer: State = NOW, before: State | None = None) -> list[Outcome]:
    found = compare(held(trainer), held(engine), None if before is None else held(before))
    assert found.arrived == all(each.fate in ARRIVED for each in found.outcomes)
    return [each for each in found.outcomes if each.fate not in ARRIVED]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_rounded_once_arrived(dtype: torch.dtype) -> None:
    found = compare(held(NOW), held(sent(dtype=dtype)))
    assert found.arrived
    assert len(found.outcomes) == len(NOW)
    assert {each.fate for each in found.outcomes} == {Fate.EQUAL}


def _interleaved(w: Tensor) -> Tensor:
    return w.view(-1, 2, 8, 64).transpose(1, 2).reshape(64, 64).contiguous()


# What is done to the engine's tensors, which one is named, and what is said of it.
FAULTS: dict[str, tuple[Callable[[State], Any], str, Fate, str]] = {
    "one bit": (lambda e: e[DOWN].view(torch.int16)[3, 5:6].bitwise_xor_(1), DOWN, Fate.OTHER, "row 3 of 64"),
    "missing": (lambda e: e.pop(OUT), OUT, Fate.MISSING, ""),
    "zero": (lambda e: e[OUT].zero_(), OUT, Fate.ZERO, ""),
    "zero rows": (lambda e: e[OUT][16:32].zero_(), OUT, Fate.ZERO, "rows 16 to 31 of 64"),
    "a norm of zeros": (lambda e: e[NORM].zero_(), NORM, Fate.ZERO, ""),
    "NaN": (lambda e: e[OUT][:2].fill_(float("nan")), OUT, Fate.NOT_FINITE, "128 values"),
    "transposed": (lambda e: e.update({Q: e[Q].T.contiguous()}), Q, Fate.TRANSPOSED, "square"),
    "transposed, not square": (lambda e: e.update({DOWN: e[DOWN].T.contiguous()}), DOWN, Fate.TRANSPOSED, "(64, 128)"),
    "reversed": (lambda e: e.update({Q: e[Q].flip(0)}), Q, Fate.ROWS, "64 of 64"),
    "halves swapped": (lambda e: e.update({Q: e[Q].roll(32, 0)}), Q, Fate.ROWS, "halves are swapped"),
    "rotary pairs": (lambda e: e.update({Q: _interleaved(e[Q])}), Q, Fate.ROWS, "16 rows are interleaved"),
    "columns": (lambda e: e.update({OUT: e[OUT].roll(32, 1).contiguous()}), OUT, Fate.COLUMNS, "halves are swapped"),
    "one rank's rows": (lambda e: e.update({UP: e[UP][64:]}), UP, Fate.SHARD, "part 2 of 2 by rows"),
    "one rank's columns": (lambda e: e.update({DOWN: e[DOWN][:, :32]}), DOWN, Fate.SHARD, "part 1 of 4 by columns"),
    "another shape": (lambda e: e.update({UP: torch.zeros(7, 64)}), UP, Fate.SHAPE, "(7, 64)"),
    "sign": (lambda e: e[DOWN].neg_(), DOWN, Fate.SCALED, "by -1"),
    "scaled": (lambda e: e.update({DOWN: (NOW[DOWN] * 1.02).bfloat16()}), DOWN, Fate.SCALED, "by 1.0"),
    "through fp16": (lambda e: e.update({DOWN: NOW[DOWN].half().bfloat16()}), DOWN, Fate.TWICE, "fp16 on the way"),
    "another layer's": (
        lambda e: e.update({DOWN: e[DOWN.replace("1", "0")].clone()}), DOWN, Fate.ELSEWHERE, DOWN.replace("1", "0")
    ),
    "noise": (lambda e: e[DOWN].mul_((1 + 0.02 * torch.randn(64, 128)).bfloat16()), DOWN, Fate.OTHER, "near them"),
    "other weights": (lambda e: e.update({DOWN: trained(7)[DOWN].bfloat16()}), DOWN, Fate.OTHER, "cosine of"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_named_and_no_other_tensor(kind: str) -> None:
    torch.manual_seed(1)
    change, name, fate, detail = FAULTS[kind]
    engine = {key: w.clone() for key, w in sent().items()}
    change(engine)
    (found,) = lost(engine)
    assert (found.name, found.fate) == (name, fate), found
    assert detail in found.detail


def test_every_fate_has_its_advice() -> None:
    assert set(DO) == set(Fate) - ARRIVED


@pytest.mark.parametrize("rows", [slice(None), slice(0, 32)])
def test_what_is_stale_is_named_by_the_weights_before(rows: slice) -> None:
    engine = sent()
    engine[DOWN][rows] = BEFORE[DOWN].bfloat16()[rows]
    (found,) = lost(engine, before=BEFORE)
    assert (found.name, found.fate) == (DOWN, Fate.STALE)
    assert ("rows 0 to 31" in found.detail) == (rows.stop is not None)
    (found,) = lost(engine)
    assert found.fate is not Fate.STALE, "nobody can know it without them"


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_part_of_the_update_is_measured(share: float) -> None:
    engine = sent()
    engine[DOWN] = (BEFORE[DOWN] + share * (NOW[DOWN] - BEFORE[DOWN])).bfloat16()
    (found,) = lost(engine, before=BEFORE)
    assert (found.fate, float(found.detail.split()[0])) == (Fate.PART, pytest.approx(share, abs=0.1))


def test_an_update_that_rounding_swallows_is_counted() -> None:
    begin = {name: w.bfloat16().float() for name, w in NOW.items()}  # a checkpoint in bf16: on its grid
    after = {name: w * (1 + 1e-4) for name, w in begin.items()}
    update = compare(held(after), held(sent(after)), held(begin)).update
    assert update is not None
    assert (update.moved, update.seen) == (update.weights, 0)
    update = compare(held(after), held(after), held(begin)).update
    assert update is not None
    assert update.seen == update.weights == sum(w.numel() for w in NOW.values())


def test_names_of_wrapped_models_and_parts_of_fused_ones_are_found() -> None:
    engine = {f"module._orig_mod.{name}": w for name, w in sent().items()}
    assert not lost(engine)
    engine = {name.replace("model.layers", "model.language_model.layers"): w for name, w in sent().items()}
    assert not lost(engine)
    engine = sent()
    engine["model.layers.1.self_attn.qkv_proj.weight"] = torch.cat([engine.pop(each) for each in (Q, K, V)])
    engine["model.layers.1.mlp.gate_up_proj.weight"] = torch.cat([engine.pop(each) for each in (UP, GATE)])
    assert {(each.name, each.fate) for each in lost(engine)} == {(UP, Fate.ELSEWHERE), (GATE, Fate.ELSEWHERE)}
    assert {each.fate for each in lost({f"another.{name}": w for name, w in NOW.items()})} == {Fate.MISSING, Fate.EXTRA}


def test_experts_in_one_tensor_are_those_in_many() -> None:
    stem = "model.layers.0.mlp.experts"
    many = {f"{stem}.{n}.{one}_proj.weight": torch.randn(8, 16) for n in range(3) for one in ("gate", "up")}
    fused = torch.stack(
        [torch.cat([many[f"{stem}.{n}.{one}_proj.weight"] for one in ("gate", "up")]) for n in range(3)]
    )
    assert not lost({f"{stem}.gate_up_proj": fused.bfloat16()}, many)
    fused[1] = fused[2]
    found = {each.name: (each.fate, each.detail) for each in lost({f"{stem}.gate_up_proj": fused.bfloat16()}, many)}
    assert found == {
        f"{stem}.1.{one}_proj.weight": (Fate.ELSEWHERE, f"those of {stem}.2.{one}_proj.weight")
        for one in ("gate", "up")
    }


def test_a_tied_head_is_the_embedding() -> None:
    tied = trained(tied=True)
    assert not lost(sent(tied), tied)
    assert not lost(sent(tied) | {HEAD: tied[EMBEDDING].bfloat16()}, tied)
    (found,) = lost(sent(tied) | {HEAD: trained(3)[HEAD].bfloat16()}, tied)
    assert (found.fate, "tied" in found.name) == (Fate.OTHER, True)
    engine = sent()
    del engine[HEAD]  # an engine that ties what the trainer does not
    (found,) = lost(engine)
    assert (found.name, found.fate, found.detail) == (HEAD, Fate.ELSEWHERE, f"those of {EMBEDDING}")


def test_fp8_codes_and_scales() -> None:
    engine = sent()
    for name in (UP, DOWN):
        scaled = quantize(NOW[name], E4M3, SQUARE, False, name)
        engine |= {name: scaled.codes, f"{name}_scale_inv": scaled.scales}
    assert not lost(engine)
    (found,) = lost(engine | {f"{DOWN}_scale_inv": engine[f"{UP}_scale_inv"] * 1.5})
    assert (found.name, found.fate) == (DOWN, Fate.SCALES)
    amax = NOW[UP].abs().amax(1, keepdim=True) / 448  # one scale a row
    engine |= {UP: (NOW[UP] / amax).to(torch.float8_e4m3fn), f"{UP}_scale": amax}
    del engine[f"{UP}_scale_inv"]
    assert not lost(engine)
    with pytest.raises(MantissaError, match="expected one scale, one a row, or"):
        lost(engine | {f"{UP}_scale": torch.ones(3, 5)})
    twice = quantize(NOW[OUT], E4M3, SQUARE, False, OUT)
    (found,) = lost(sent() | {OUT: (twice.codes.float() * twice.scales).bfloat16()})
    assert (found.fate, found.detail) == (Fate.TWICE, "fp8 on the way")


@pytest.mark.parametrize("kinds", [("F32",), ("F16",), ("Q8_0", "Q4_1"), ("Q4_K",)])
def test_a_gguf_file_holds_the_folder_it_was_made_from(kinds: tuple[str, ...], tmp_path: Path) -> None:
    decoder = gguf_decoder("llama")
    path = write_gguf(tmp_path / "model.gguf", decoder, kinds)
    save_model(decoder, character_tokenizer("ab"), tmp_path / "model")
    found = compare(held(tmp_path / "model"), held(path))
    if kinds == ("Q4_K",):  # the gguf package cannot write it: random blocks
        assert {each.fate for each in found.outcomes if each.dtype == "Q4_K"} == {Fate.OTHER}
    else:
        assert found.arrived, [each for each in found.outcomes if each.fate not in ARRIVED]
    assert {each.dtype for each in found.outcomes} >= set(kinds)


def adapters(folder: Path, base: Path, **settings: Any) -> Path:
    """peft's files of one adapter, on ``DOWN``, and of a norm that was trained whole."""
    folder.mkdir()
    tensors = {f"base_model.model.{DOWN[:-7]}.lora_{one}.weight": torch.randn(shape) * 0.05
               for one, shape in (("A", (4, 128)), ("B", (64, 4)))}  # fmt: skip
    tensors[f"base_model.model.{NORM}"] = torch.ones(64)
    save_file(tensors, folder / "adapter_model.safetensors")
    how = {"r": 4, "lora_alpha": 8, "base_model_name_or_path": str(base)} | settings
    (folder / "adapter_config.json").write_text(json.dumps(how))
    return folder


def test_adapters_not_merged_merged_twice_and_merged_in_half(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file(NOW, base / "model.safetensors")
    trainer = held(adapters(tmp_path / "adapter", base))
    w, b = trainer.read(DOWN).values, NOW[DOWN]
    cases = {
        Fate.EQUAL: w.bfloat16(),
        Fate.BASE: b.bfloat16(),
        Fate.ADAPTED_TWICE: (2 * w - b).bfloat16(),
        Fate.COARSE: b.bfloat16() + (w - b).bfloat16(),
    }
    for fate, engine in cases.items():
        after = sent() | {DOWN: engine, NORM: torch.ones(64)}
        found = {each.name: each for each in compare(trainer, held(after)).outcomes}
        assert found[DOWN].fate is fate
        assert found[NORM].fate is Fate.EQUAL
        assert ("lost" in found[DOWN].detail) == (fate is Fate.COARSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_by_sums_in_another_order_arrived(dtype: torch.dtype, tmp_path: Path) -> None:
    """No library's order of sums is presumed: fp32 from the last product to the first, and float64, both arrived."""
    base = tmp_path / "base"
    base.mkdir()
    save_file(NOW, base / "model.safetensors")
    folder = adapters(tmp_path / "adapter", base)
    stored = load_file(folder / "adapter_model.safetensors")
    low, high = (stored[f"base_model.model.{DOWN[:-7]}.lora_{one}.weight"] for one in "AB")
    backwards = torch.zeros(64, 128)
    for r in reversed(range(4)):
        backwards = backwards + 2.0 * high[:, r : r + 1] * low[r : r + 1]
    exact = (NOW[DOWN].double() + 2.0 * (high.double() @ low.double())).to(dtype)
    after = sent(dtype=dtype) | {NORM: torch.ones(64, dtype=dtype)}
    for engine in ((NOW[DOWN] + backwards).to(dtype), exact):
        assert compare(held(folder), held(after | {DOWN: engine})).arrived
    wrong = exact.clone()
    wrong[3, 5] += 0.01 * exact.abs().max()
    assert not compare(held(folder), held(after | {DOWN: wrong})).arrived


def test_a_grid_that_cannot_be_written_here_is_known_to_its_rounding(tmp_path: Path) -> None:
    engine = held(write_gguf(tmp_path / "model.gguf", gguf_decoder("llama"), ("Q4_K",)))
    torch.manual_seed(0)
    for noise, fate in ((0.05, Fate.ON_GRID), (0.5, Fate.OTHER)):
        near = {
            name: engine.read(name).values * (1 + noise * torch.randn(shape)) for name, shape in engine.shapes.items()
        }
        found = compare(held(near), engine)
        assert {each.fate for each in found.outcomes if each.dtype == "Q4_K"} == {fate}


class Adapted(nn.Module):
    """A projection as peft has it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.active_adapters, self.scaling = layer, ["default"], {"default": 2.0}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, layer.out_features, bias=False)})
        self.merged = self.disable_adapters = self.fan_in_fan_out = False


@pytest.mark.parametrize("state", ["active", "merged", "disabled"])
def test_a_live_model_with_adapters_is_what_its_forward_computes(state: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 6)
    model = nn.ModuleDict({"q_proj": Adapted(layer), "norm": nn.LayerNorm(6)})
    adapted: Any = model["q_proj"]
    low = 2.0 * adapted.lora_B["default"].weight.detach() @ adapted.lora_A["default"].weight.detach()
    b = layer.weight.detach().clone()
    adapted.merged, adapted.disable_adapters = state == "merged", state == "disabled"
    if adapted.merged:
        layer.weight.data += low
    engine = {"q_proj.weight": b + low, "q_proj.bias": layer.bias.detach(), "norm.weight": torch.ones(6),
              "norm.bias": torch.zeros(6)}  # fmt: skip
    if state == "disabled":
        engine["q_proj.weight"] = b
    assert compare(held(model), held(sent(engine))).arrived
    found = {each.name: each.fate for each in compare(held(model), held(sent(engine | {"q_proj.weight": b}))).outcomes}
    assert found["q_proj.weight"] is {"active": Fate.BASE, "disabled": Fate.EQUAL}.get(state, Fate.OTHER)
    adapted.use_dora = {"default": True}
    with pytest.raises(MantissaError, match="merge them first"):
        held(model)


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file({name: w[:8].clone() if name == DOWN else w for name, w in NOW.items()}, base / "model.safetensors")
    with pytest.raises(MantissaError, match=r"adapters of \(64, 4\) and \(4, 128\), and .* a weight of \(8, 128\)"):
        held(adapters(tmp_path / "adapter", base))


def test_counters_and_empty_tensors_are_compared_as_they_are() -> None:
    odd = {"steps": torch.tensor(3), "none": torch.zeros(0, 4), "one": torch.tensor(0.5), "ids": torch.arange(4)}
    assert not lost(dict(odd), odd)
    found = {each.name: each.fate for each in lost(odd | {"steps": torch.tensor(4), "one": torch.tensor(0.25)}, odd)}
    assert found == dict.fromkeys(("steps", "one"), Fate.OTHER)


def test_files_of_each_kind_and_a_live_model(tmp_path: Path) -> None:
    torch.save({"model_state_dict": sent(), "step": 3}, tmp_path / "checkpoint.pt")
    save_file(sent(), tmp_path / "some.safetensors")
    (tmp_path / "global_step_3" / "actor" / "huggingface").mkdir(parents=True)
    shutil.copy(tmp_path / "some.safetensors", tmp_path / "global_step_3/actor/huggingface/model.safetensors")
    (tmp_path / "step-3").mkdir()
    save_file(NOW, tmp_path / "step-3" / "policy.safetensors")
    for name in ("checkpoint.pt", "some.safetensors", "global_step_3", "global_step_3/actor", "step-3"):
        assert compare(held(NOW), held(tmp_path / name)).arrived, name
    layer = nn.Linear(4, 3)
    assert compare(held(layer), held({name: w.bfloat16() for name, w in layer.state_dict().items()})).arrived


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f: f.mkdir(), "no weights; expected model.safetensors"),
        (lambda f: [f.mkdir(), (f / "model_world_size_2_rank_0.pt").touch()], "verl.model_merger merge"),
        (lambda f: [f.mkdir(), (f / "x.distcp").touch()], "torch.distributed.checkpoint.format_utils"),
        (lambda f: [f.mkdir(), (f / "model.safetensors").write_bytes(b"\xff" * 99)], "truncated or damaged"),
        (lambda f: torch.save({"step": 3}, f.with_suffix(".pt")), "no weights by name"),
        (lambda f: f.with_suffix(".txt").write_text("a"), "expected weights: a model's folder"),
        (lambda f: adapters(f, f.parent / "none"), "adapters, whose base is needed"),
        (lambda f: adapters(f, f.parent / "none", use_dora=True), "whose base is needed"),
    ],
)
def test_what_is_no_weights_is_refused(make: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    make(tmp_path / "made")
    (path,) = (each for each in tmp_path.iterdir())
    with pytest.raises(MantissaError, match=said):
        held(path)
