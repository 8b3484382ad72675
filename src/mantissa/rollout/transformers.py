"""A model of transformers as the policy that samples: its own code and cache, our sampler.

What our decoder does not know is sampled so: whole rows padded to the left, a token at a time from the model's cache,
each drawn by ``sampling.py`` from its own uniform. ``rl/score.py`` scores it (``forward_transformers``). With an
adopted model (``mantissa.adopt``) both give a token the same log-prob, to the last bit.

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
from mantissa.kernels import ResolvedRole
from mantissa.precision import BF16, FP16, FP32
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


def in_role(model: Any, role: ResolvedRole) -> Any:
    """The model with its parameters in the role's format, as a checkpoint is loaded in it: buffers stay.

    ``MantissaError`` for a format or kernels that transformers' own code does not have.
    """
    if role.emulation is not None or role.fp8 is not None or role.active not in (FP32, BF16, FP16):
        raise MantissaError(
            "this model runs by transformers' own code: in fp32, bf16 or fp16, or exact in one of them; other formats "
            "and an engine's habits are for the families that our decoder knows"
        )
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(role.active.dtype)
    return model


class TransformersEngine:
    """Samples from ``model`` as it is at that moment, a learner's own too; with ``adopted`` by its exact kernels.

    ``slots``: rows at a time.
    """

    def __init__(self, model: Any, adopted: Adopted | None = None, slots: int = 64) -> None:
        self.model, self.adopted, self.slots = model, adopted, slots
        self.device = next(model.parameters()).device
        self.version = 0  # of the weights, as their owner counts
        forwards = (vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
        forward = next(of for each in forwards if "input_ids" in (of := inspect.signature(each).parameters))
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in forward else {}

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """Completions of each request, in order, under the weights of ``version``. ``MantissaError``: stop strings, a
        filter or the most probable tokens are asked for, or a log-prob is not finite."""
        if params.stop or params.most_probable or params.truncates:
            raise MantissaError(
                "stop strings, top_k, top_p and the most probable tokens are not kept where transformers samples; "
                "leave them out"
            )
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
        tokens_BP, mask = _padded(prompts, self.device)
        fed, cache, keys_B = tokens_BP, None, keys_B.to(self.device)
        drawn: list[tuple[Tensor, Tensor]] = []
        stops = torch.tensor(params.stop_token_ids, dtype=torch.long, device=self.device)
        running_B = torch.ones(len(prompts), dtype=torch.bool, device=self.device)
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


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of tokens as one tensor, zeros to their left, and its mask; int64."""
    width = max(map(len, rows))
    tokens, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for each, own, row in zip(tokens, mask, rows, strict=True):
        each[width - len(row) :], own[width - len(row) :] = torch.tensor(row), 1
    return tokens.to(device), mask.to(device)
