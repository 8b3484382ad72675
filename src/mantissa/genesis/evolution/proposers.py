"""Who proposes programs: edits of the syntax tree, a policy of ours, or an OpenAI-compatible server.

A proposer is a function of requests: the same requests, and the same seed in each, give the same proposals (a server's
are its own affair). It sees the task's text, parents and how they failed in development; no held-out test, no canary.

Source of the operators: J. Lin et al., "SE-Agent" (2025), arXiv:2508.02085.
"""

from __future__ import annotations

import difflib
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mantissa.base.bounds import boundary, describe_error
from mantissa.base.errors import MantissaError
from mantissa.base.http import OK, http_answer, server_address
from mantissa.base.readers.json import parse_json
from mantissa.genesis.evolution import edits
from mantissa.genesis.evolution.archive import Candidate
from mantissa.genesis.evolution.programs import Task
from mantissa.tasks.code import last_block

Operator = Literal["revise", "recombine", "refine"]
_TWICE = 0.3  # share of edits that are two at once
_LARGEST_ANSWER = 2**22  # bytes
_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class ProposalRequest:
    """``count`` proposals of ``operator`` on ``parent``, with ``partner`` where it recombines."""

    task: Task
    operator: Operator
    parent: Candidate
    partner: Candidate | None
    count: int
    seed: int


@dataclass(frozen=True)
class Proposal:
    """A program, and what was done to the parent to get it, in words; ``patterns``: as a world model reads it."""

    request: ProposalRequest
    source: str
    actions: tuple[str, ...]
    patterns: tuple[str, ...]


class Proposer(Protocol):
    """Where new programs come from: edits, a policy of ours, or a server."""

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Proposals for all requests, in order; fewer where what came is no program."""
        ...


class Edits:
    """Changes drawn by ``edits.draw``: one, or two in a row; with a partner, what the other one has at a place."""

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        found = []
        for request in requests:
            rng = random.Random(request.seed)
            for _ in range(request.count):
                made = self._one(request, rng)
                if made is not None:
                    found.append(made)
        return found

    def _one(self, request: ProposalRequest, rng: random.Random) -> Proposal | None:
        source, actions, patterns = request.parent.source, list[str](), list[str]()
        lender = None if request.partner is None else request.partner.source
        for _ in range(1 + (rng.random() < _TWICE)):
            drawn = edits.draw(source, rng, lender)
            if drawn is not None:
                change, source = drawn
                action, pattern = change.described()
                actions.append(action)
                patterns.append(f"{pattern} {request.task.name}_{change.place}")
            lender = None  # the second change is the child's own
        return Proposal(request, source, tuple(actions), tuple(patterns)) if actions else None


def prompt_for(request: ProposalRequest) -> str:
    """What a language model is asked: the task, the program, its failure, and one block of code as the answer."""
    parent, lines = request.parent, [f"Write a Python function `{request.task.name}`. {request.task.text}"]
    if request.operator == "recombine" and request.partner is not None:
        lines += ["Two programs pass different tests. Combine what is right in each.", _fenced(request.partner.source)]
    elif request.operator == "refine":
        lines.append("This is the best program so far. Improve it.")
    else:
        lines.append("This program is wrong. Correct it.")
    lines.append(_fenced(parent.source))
    if parent.failure:
        lines.append(f"It fails: {parent.failure}")
    lines.append("Answer with the whole corrected function in one ```python block, and nothing else.")
    return "\n\n".join(lines)


def _fenced(source: str) -> str:
    return f"```python\n{source.rstrip()}\n```"


def from_answer(request: ProposalRequest, answer: str) -> Proposal | None:
    """The program in a model's answer, as its tree is written; None where there is none, or the parent's."""
    source = edits.normal(last_block(answer))
    if source is None or source == request.parent.source or f"def {request.task.name}(" not in source:
        return None
    lines = difflib.unified_diff(request.parent.source.splitlines(), source.splitlines(), n=0, lineterm="")
    changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    action = f"{request.operator} {' '.join(changed)}"[:2000]
    return Proposal(request, source, (action,), (action,))


class Policy:
    """A model of ours, or any Hugging Face folder, through the native rollout engine."""

    def __init__(self, model: str, precision: str, max_tokens: int, temperature: float) -> None:
        from mantissa.base.ranks import choose_device
        from mantissa.kernels import resolve, rollout_kernels
        from mantissa.model import policy_weights
        from mantissa.precision import PrecisionPolicy
        from mantissa.rl.assemble import prove
        from mantissa.rl.policy import open_policy, policy_folder
        from mantissa.rollout import NativeEngine, SamplingParams

        place = choose_device("auto")
        resolved = resolve(PrecisionPolicy.parse(precision), place)
        prove(resolved, place)
        policy, self._tokenizer = open_policy(policy_folder(model), None, 0)
        longest = policy.config.max_position_embeddings
        self._engine = NativeEngine(
            policy.config, rollout_kernels(resolved), kv_format=resolved.kv_cache.active, slots=16,
            max_length=min(longest, 4096), device=place,
        )  # fmt: skip
        self._engine.sync(policy_weights(policy), 0)
        self._params = SamplingParams(max_tokens, temperature, stop_token_ids=self._tokenizer.eos_ids)

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        from mantissa.rollout import Request as Asked

        asked = []
        for request in requests:
            chat = self._tokenizer.encode_prompt([{"role": "user", "content": prompt_for(request)}])
            asked.append(Asked(tuple(chat), request.seed, request.count))
        groups = self._engine.generate(asked, self._params, 0)
        answers = [
            from_answer(request, self._tokenizer.decode(completion.tokens))
            for request, group in zip(requests, groups, strict=True)
            for completion in group
        ]
        return [answer for answer in answers if answer is not None]


class OpenAI:
    """A server that answers ``POST <url>/chat/completions`` as OpenAI's does; its key in ``OPENAI_API_KEY``, if any."""

    def __init__(self, url: str, model: str, max_tokens: int, temperature: float, timeout_s: float) -> None:
        expected = f"openai: url={url!r}, model={model!r}: expected http(s)://HOST[:PORT]/v1 and a model"
        server_address(url, expected)
        if not model:
            raise MantissaError(expected)
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        found = []
        for request in requests:
            for answer in self._ask(request):
                made = from_answer(request, answer)
                if made is not None:
                    found.append(made)
        return found

    def _ask(self, request: ProposalRequest) -> list[str]:
        messages = [{"role": "user", "content": prompt_for(request)}]
        body = self._body | {"messages": messages, "n": request.count, "seed": request.seed % 2**31}
        reply = self._post(body)
        with boundary(f"{self._url} answered what is no chat completion", "is it an OpenAI-compatible server?"):
            answers = [choice["message"]["content"] or "" for choice in reply["choices"]]
            if not all(isinstance(answer, str) for answer in answers):
                raise ValueError("a message is no text")
        return answers

    def _post(self, body: dict[str, Any]) -> Any:
        url, key = f"{self._url}/chat/completions", os.environ.get(_KEY) or None
        try:
            wait = self._timeout_s
            status, text = http_answer("POST", url, body, timeout_s=wait, most_bytes=_LARGEST_ANSWER, key=key)
        except OSError as error:
            advice = "is the server running there, and max_tokens low enough?"
            raise MantissaError(f"{self._url}: {describe_error(error)}; {advice}") from None
        if status != OK:
            raise MantissaError(f"{self._url}: status {status}: {text[:300]}; check model, url and {_KEY}")
        with boundary(f"{self._url} answered what is no JSON", "is it an OpenAI-compatible server?"):
            return parse_json(text)
