"""``mantissa sample``: completions of one prompt, with their log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mantissa.base.errors import say
from mantissa.cli import Device, Model, progress

if TYPE_CHECKING:
    from mantissa.model import Tokenizer
    from mantissa.rollout import NativeEngine
    from mantissa.rollout.transformers import TransformersEngine

_TEXT_COLUMN = 20  # where the text of a completion begins; its further lines are indented to there


def sample(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    n: Annotated[int, typer.Option("-n", min=1, help="How many completions.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1 is off.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a completion; may be repeated.")] = None,
    precision: Annotated[str, typer.Option(help="A preset; the rollout's part of it is used.")] = "fp32",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same completions.")] = 0,
    device: Device = "auto",
    chat: Annotated[bool, typer.Option(help="Render the prompt as a user message with the chat template.")] = False,
) -> None:
    """Sample completions of PROMPT.

    Printed for each: total log-prob under the sampling distribution, why it ended, text.
    """
    progress("loading torch")
    from mantissa.base.seeds import derive_seed
    from mantissa.rollout import Request, SamplingParams

    progress(f"loading {model}")
    engine, tokenizer, notes = _opened(model, precision, device, min(n, 256))
    tokens = tokenizer.encode_prompt([{"role": "user", "content": prompt}] if chat else prompt)
    params = SamplingParams(max_tokens, temperature, top_k, top_p, tokenizer.eos_ids, tuple(stop or ()))
    requests = [Request(tuple(tokens), derive_seed(seed, "sample"), n)]
    progress("sampling")
    (group,) = engine.generate(requests, params, 0)
    progress("")
    for note in notes:
        say(note, err=True)
    for completion in group:
        text = tokenizer.decode(completion.tokens).replace("\n", "\n" + " " * _TEXT_COLUMN)
        say(f"{float(completion.logp_T.double().sum()):10.4f}  {completion.finish_reason:6}  {text}")


def _opened(
    model: str, precision: str, device: str, slots: int
) -> tuple[NativeEngine | TransformersEngine, Tokenizer, list[str]]:
    """An engine with the model's weights, its tokenizer, and what is to be said of how it computes."""
    from mantissa.base.ranks import choose_device
    from mantissa.kernels import resolve, rollout_kernels
    from mantissa.model import policy_weights
    from mantissa.precision import PrecisionPolicy
    from mantissa.rl.assemble import prove
    from mantissa.rl.policy import open_any, policy_folder
    from mantissa.rollout import NativeEngine
    from mantissa.rollout.transformers import TransformersEngine, in_role

    chosen = choose_device(device)
    resolved = resolve(PrecisionPolicy.parse(precision), chosen)
    role = resolved.rollout
    policy, tokenizer, refused = open_any(policy_folder(model))
    if refused:
        engine = TransformersEngine(in_role(policy, role).to(chosen), decode_text=tokenizer.decode)
        return engine, tokenizer, [f"rollout in {role.name} by transformers' own code: {refused}"]
    prove(resolved, chosen)
    native = NativeEngine(
        policy.config,
        rollout_kernels(resolved),
        kv_format=resolved.kv_cache.active,
        slots=slots,
        max_length=policy.config.max_position_embeddings,
        device=chosen,
        decode_text=tokenizer.decode,
    )
    native.sync(policy_weights(policy), 0)
    notes = [f"rollout in {role.name} ({role.backend} kernels): {role.reason}"]
    return native, tokenizer, notes + ([f"weights {policy.config.weights_note}"] if policy.config.weights_note else [])
