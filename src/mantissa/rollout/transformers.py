"""A model of transformers as a policy: its own code and cache, our sampler and log-prob, on both sides.

What our decoder does not know is sampled and scored so: whole rows padded to the left, a token at a time from the
model's cache, each drawn by ``sampling.py`` from its own uniform; and scored in one forward. With an adopted model
(``mantissa.adopt``) both give a token the same log-prob, to the last bit.

Legend: B rows, P prompt tokens, R response tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.adopted import Adopted
from mantissa.base.errors import MantissaError
from mantissa.precision.numerics import token_logprob
from mantissa.rollout.sampling import Completion, FinishReason, Request, SamplingParams, request_keys, sample, uniforms


def load_transformers(folder: Path) -> Any:
    """The causal language model of a folder, by transformers' own code, in fp32 and eval mode.

    No code of the folder's own is run, no pickle read, nothing asked of a hub. ``MantissaError``: what transformers
    does not load so.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise MantissaError("transformers is not installed; pip install 'mantissa-rl[train]'") from None
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, local_files_only=True
        ).eval()
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise MantissaError(
            f"{folder}: transformers does not load it ({type(error).__name__}: {first:.200})"
        ) from error
    finally:
        if shown:
            logging.enable_progress_bar()


def positions_of(model: Any) -> int:
    """Of the longest sequence; a million where its configuration does not say, as where positions are no embedding."""
    text = model.config.get_text_config()
    return int(getattr(text, "max_position_embeddings", None) or 1 << 20)


def in_format(model: Any, dtype: torch.dtype) -> Any:
    """The model with its parameters in ``dtype``, as a checkpoint is loaded in it: buffers stay."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


class TransformersEngine:
    """Samples from ``model``; with ``adopted`` by its exact kernels. At most ``slots`` rows at a time."""

    def __init__(self, model: Any, adopted: Adopted | None = None, slots: int = 64) -> None:
        self.model, self.adopted, self.slots = model, adopted, slots
        forwards = (vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
        forward = next(of for each in forwards if "input_ids" in (of := inspect.signature(each).parameters))
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in forward else {}

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """Completions of each request, in order. ``MantissaError``: stop strings, or a logit that is not finite."""
        if params.stop or params.most_probable:
            raise MantissaError("stop strings and most probable tokens are not known where transformers samples")
        prompts = [request.prompt_tokens for request in requests for _ in range(request.samples)]
        keys = request_keys(requests)
        completions: list[Completion] = []
        keeping = contextlib.nullcontext() if self.adopted is None else self.adopted.keeping()
        with keeping, torch.no_grad():
            for start in range(0, len(prompts), self.slots):
                rows = slice(start, start + self.slots)
                completions += self._batch(prompts[rows], keys[rows], params, version)
        each = iter(completions)
        return [[next(each) for _ in range(request.samples)] for request in requests]

    def _batch(
        self, prompts: Sequence[Sequence[int]], keys_B: Tensor, params: SamplingParams, version: int
    ) -> list[Completion]:
        device = next(self.model.parameters()).device
        tokens_BP, mask = padded(prompts, device, left=True)
        fed, cache, keys_B = tokens_BP, None, keys_B.to(device)
        drawn: list[tuple[Tensor, Tensor]] = []
        stops = torch.tensor(params.stop_token_ids, dtype=torch.long, device=device)
        running_B = torch.ones(len(prompts), dtype=torch.bool, device=device)
        for at in range(params.max_tokens):
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -fed.shape[1] :]
            out = self.model(
                input_ids=fed, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                **self._last,
            )  # fmt: skip
            uniform_B = uniforms(keys_B, torch.full_like(keys_B, at))
            token_B, logp_B = sample(out.logits[:, -1].float(), params, uniform_B)
            if not bool(logp_B[running_B].isfinite().all()):
                raise MantissaError(
                    f"token {at + 1} of a completion has a log-prob that is not finite; look at the model"
                )
            drawn.append((token_B.cpu(), logp_B.cpu()))
            running_B &= ~torch.isin(token_B, stops)
            if not bool(running_B.any()):
                break
            fed, cache, mask = token_B.unsqueeze(1), out.past_key_values, torch.cat((mask, mask[:, :1] * 0 + 1), 1)
        return [_completion(row, drawn, params, version, int(key)) for row, key in enumerate(keys_B.tolist())]


def _completion(
    row: int, drawn: Sequence[tuple[Tensor, Tensor]], params: SamplingParams, version: int, key: int
) -> Completion:
    tokens = [int(token_B[row]) for token_B, _ in drawn]
    ends = [at for at, token in enumerate(tokens, start=1) if token in params.stop_token_ids]
    count, reason = (ends[0], "stop") if ends else (len(tokens), "length")
    finish: FinishReason = "stop" if reason == "stop" else "length"
    logp_T = torch.stack([logp_B[row] for _, logp_B in drawn[:count]])
    return Completion(tuple(tokens[:count]), logp_T, finish, version, key)


def padded(rows: Sequence[Sequence[int]], device: torch.device, left: bool) -> tuple[Tensor, Tensor]:
    """Rows of tokens as one tensor, zeros on one side, and its mask; int64."""
    width = max(map(len, rows))
    tokens, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for each, own, row in zip(tokens, mask, rows, strict=True):
        place = slice(width - len(row), None) if left else slice(len(row))
        each[place], own[place] = torch.tensor(row), 1
    return tokens.to(device), mask.to(device)


def score_transformers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    temperature: float,
    micro_batch: int,
) -> list[Tensor]:
    """Log-probs of each completion's tokens, fp32 on the CPU, from one forward over prompt and response.

    ``micro_batch``: padded tokens of one forward. No gradient.
    """
    found: list[Tensor] = []
    pairs = list(zip(prompts, completions, strict=True))
    longest = max(len(prompt) + len(completion.tokens) for prompt, completion in pairs)
    rows = max(1, micro_batch // longest)
    for start in range(0, len(pairs), rows):
        found += _scored(model, pairs[start : start + rows], temperature)
    return found


def _scored(model: Any, pairs: Sequence[tuple[Sequence[int], Completion]], temperature: float) -> list[Tensor]:
    device = next(model.parameters()).device
    tokens, mask = padded([(*prompt, *each.tokens) for prompt, each in pairs], device, left=False)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        scored = []
        for row, (prompt, completion) in enumerate(pairs):
            own = slice(len(prompt) - 1, len(prompt) - 1 + len(completion.tokens))
            response = tokens[row, own.start + 1 : own.stop + 1]
            scored.append(token_logprob(logits[row, own].float(), response, temperature).cpu())
    return scored
