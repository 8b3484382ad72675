"""What every engine refuses before it samples: prompts and limits that it cannot serve."""

from __future__ import annotations

from collections.abc import Sequence

from mantissa.errors import MantissaError
from mantissa.rollout.types import Request, SamplingParams


def check_requests(
    requests: Sequence[Request], params: SamplingParams, vocabulary: int, max_length: int, decodes: bool
) -> None:
    """Raise ``MantissaError`` at the first request that cannot be sampled as asked.

    ``vocabulary``: how many tokens there are. ``max_length``: prompt and response tokens of one sample together.
    ``decodes``: whether the engine can turn tokens into text, which stop strings need.
    """
    if params.stop and not decodes:
        raise MantissaError("stop strings need text: give the engine decode_text, or use stop_token_ids")
    for token in params.stop_token_ids:
        if not 0 <= token < vocabulary:
            raise MantissaError(f"stop token {token}: the vocabulary is 0..{vocabulary - 1}")
    for index, request in enumerate(requests):
        prompt = request.prompt_tokens
        if not prompt:
            raise MantissaError(f"request {index}: the prompt is empty; give at least one token, such as BOS")
        if request.samples < 1:
            raise MantissaError(f"request {index}: samples={request.samples}, expected at least 1")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            bad = next(token for token in prompt if not 0 <= token < vocabulary)
            raise MantissaError(f"request {index}: token {bad} is outside the vocabulary 0..{vocabulary - 1}")
        if len(prompt) + params.max_tokens > max_length:
            raise MantissaError(
                f"request {index}: {len(prompt)} prompt tokens and max_tokens={params.max_tokens} exceed "
                f"max_length={max_length}; shorten the prompt, lower max_tokens or raise max_length"
            )
