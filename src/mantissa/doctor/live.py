"""Sequences that no dump holds: sampled by our own engine, or scored by a server that is running.

A server is asked over the OpenAI-compatible interface that vLLM and SGLang speak: ``POST /v1/completions`` with the
sequence's token ids as the prompt, one token more, and ``prompt_logprobs``. What comes back is the log-prob of every
prompt token given those before it, which is what a learner computes; its kernels are those of a prefill. vLLM's are raw
whatever ``logprobs_mode`` says: before temperature, top-k and top-p, so they are compared at temperature 1.

Nothing is sent but token ids and the model's name. Of an answer a bounded part is read, in bounded time, and whatever
it holds that is no log-prob of the token asked for is an error.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from mantissa.base.bounds import boundary
from mantissa.base.errors import MantissaError
from mantissa.base.http import OK, http_answer, is_this_machine, server_address
from mantissa.base.readers.json import parse_json
from mantissa.doctor.dump import Dump, Scored
from mantissa.doctor.facts import ABOVE_ZERO
from mantissa.doctor.sides import AnyModel, Array, evenly_spaced
from mantissa.kernels import resolve, rollout_kernels
from mantissa.model import Decoder, policy_weights
from mantissa.precision import PrecisionPolicy
from mantissa.rollout import NativeEngine, Request, SamplingParams
from mantissa.rollout.transformers import TransformersEngine, in_role
from mantissa.rollout.vllm.key import known_key

_SLOTS = 64
_MOST_BYTES = 64 << 20  # of one answer
_TIMEOUT_S = 600.0


def sampled(
    model: Decoder | AnyModel,
    prompts: Sequence[Sequence[int]],
    *,
    format: str,
    max_tokens: int,
    seed: int,
    temperature: float = 1.0,
    stop: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> list[Scored]:
    """One completion of each prompt by our own engine in ``format``, its log-probs in place of both sides'; of a model
    that runs by transformers' code, from its own cache."""
    precision, slots = resolve(PrecisionPolicy(train=format, rollout=format), device), min(len(prompts), _SLOTS)
    engine: NativeEngine | TransformersEngine
    if isinstance(model, AnyModel):
        engine = TransformersEngine(in_role(copy.deepcopy(model.model), precision.rollout), slots=slots)
    else:
        engine = NativeEngine(
            model.config,
            rollout_kernels(precision),
            kv_format=precision.kv_cache.active,
            slots=slots,
            max_length=max(map(len, prompts)) + max_tokens,
            device=device,
        )
        engine.sync(policy_weights(model), 0)
    requests = [Request(tuple(prompt), seed + number) for number, prompt in enumerate(prompts)]
    answers = engine.generate(requests, SamplingParams(max_tokens, temperature, stop_token_ids=tuple(stop)), 0)
    found = []
    for number, (prompt, (answer,)) in enumerate(zip(prompts, answers, strict=True)):
        logp_R = answer.logp_T.double().numpy()
        tokens_T = np.array([*prompt, *answer.tokens], dtype=np.int64)
        found.append(Scored(tokens_T, len(prompt), logp_R, logp_R, np.ones(len(logp_R), dtype=bool), group=number))
    return found


def ask(
    url: str,
    sequences: Sequence[Scored],
    *,
    name: str | None = None,
    timeout_s: float = _TIMEOUT_S,
    tick: Callable[[str], None] = lambda line: None,
) -> list[Scored]:
    """The sequences with the server's log-probs in the rollout's place. ``name``: its model's; None: the only one."""
    server = _Server(url, timeout_s)
    name = name or server.only_model()
    found = []
    for number, each in enumerate(sequences, start=1):
        tick(f"asking {url}: sequence {number} of {len(sequences)}")
        found.append(replace(each, rollout_logp=server.scored(name, each), rollout_version=None))
    return found


def asked(dump: Dump, url: str, most: int, tick: Callable[[str], None]) -> Dump:
    """``dump``, some of its sequences, with a server's log-probs for the rollout's: raw ones, of temperature 1.

    The learner's stay the dump's where it scored at temperature 1; else they would be of another distribution.
    """
    if dump.settings.temperature not in (None, 1.0):
        raise MantissaError(
            f"--engine {url}: the dump's learner scored at temperature {dump.settings.temperature:g}, and a server's "
            "prompt_logprobs are of temperature 1; give a dump of temperature 1"
        )
    sequences = ask(url, evenly_spaced(dump.sequences, most), tick=tick)
    settings = replace(dump.settings, logprobs_mode="raw_logprobs", top_k=None, top_p=None)
    return replace(dump, sequences=sequences, settings=settings)


class _Server:
    def __init__(self, url: str, timeout_s: float) -> None:
        expected = f"--engine {url}: expected a server's address, such as http://127.0.0.1:8000"
        parts = server_address(url, expected)
        if parts.scheme != "http" or parts.path.strip("/") not in ("", "v1"):
            raise MantissaError(expected)
        self.url, self._root, self._timeout_s = url, f"http://{parts.netloc}", timeout_s

    def only_model(self) -> str:
        answer = self._answer("GET", "/v1/models")
        data = answer.get("data")
        names = [each.get("id") for each in data if isinstance(each, dict)] if isinstance(data, list) else []
        if len(names) != 1 or not isinstance(names[0], str):
            raise MantissaError(f"{self.url} serves {len(names)} models, and one is expected here")
        return names[0]

    def scored(self, name: str, each: Scored) -> Array:
        """The server's log-probs of the response tokens, float64 [R]."""
        tokens = each.tokens.tolist()
        body = {"model": name, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self._answer("POST", "/v1/completions", body)
        with boundary(f"{self.url}: an answer without the log-prob of each token of the prompt",
                      "expected prompt_logprobs as vLLM gives them, of the model whose tokens these are"):  # fmt: skip
            given = answer["choices"][0]["prompt_logprobs"]
            found = [float(at[str(token)]["logprob"]) for at, token in zip(given[1:], tokens[1:], strict=True)]
        if not all(math.isfinite(logp) and logp <= ABOVE_ZERO for logp in found):
            raise MantissaError(f"{self.url}: among its log-probs is one that is not finite, or above 0")
        return np.array(found[each.prompt_length - 1 :])

    def _answer(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """A server's JSON object; everything else is one error."""
        with boundary(f"{self.url}{path}", "expected an OpenAI-compatible server that is running there"):
            key = known_key(urlsplit(self._root).port or 80, is_this_machine(self._root))
            how: dict[str, Any] = {"timeout_s": self._timeout_s, "most_bytes": _MOST_BYTES, "key": key}
            status, text = http_answer(method, self._root + path, body, **how)
            if status != OK:
                raise MantissaError(f"{self.url}{path} answered {status}: {text[:200]}")
            answer = parse_json(text)
        if not isinstance(answer, dict):
            raise MantissaError(f"{self.url}{path} answered {text[:100]}: expected a JSON object")
        return answer
