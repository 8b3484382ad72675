"""One rollout server of a verl job, without Ray and verl: requests in, sampled tokens out.

Requests that arrive one by one are sampled together: while a turn is sampled, in a thread of its own, others gather for
the next one. What a request gets depends on its prompt, its parameters and its draws' key alone, and (with exact
kernels) not on its company, so turns are a matter of speed.

The key is made of the job's seed, what the agent loop says of the request (``seed`` among its parameters: a function
of step, prompt and sample; ``rollout.py``) and the prompt's tokens. So a job that is run again, or resumed, samples the
same whatever the order of arrival. A request of another agent loop has no ``seed``: it is then keyed by how many with
the same prompt came before it, which only repeats where they arrive alike.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.base.hub import find_model
from mantissa.base.ranks import be_deterministic
from mantissa.base.seeds import derive_seed
from mantissa.kernels import ResolvedPrecision, ResolvedRole, probe, resolve, rollout_kernels
from mantissa.model import Tokenizer, load_tokenizer
from mantissa.model.config import ModelConfig, read_config
from mantissa.precision import E4M3, SQUARE, Fp8Policy, PrecisionPolicy, Quantized, dequantize, quantize
from mantissa.rl.engines import as_policy, on_grid
from mantissa.rl.policy import load_any, refused_by_ours
from mantissa.rollout import NativeEngine
from mantissa.rollout.sampling import Completion, Request, SamplingParams
from mantissa.rollout.transformers import PolicyEngine, any_config
from mantissa.verl.wire import Setup

_LOG = logging.getLogger(__name__)
# What verl and its agent loops send, with the one value that changes nothing, or None where any is honoured.
_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "n": 1,
    "best_of": 1,
}
_LENGTHS_AND_ENDS = ("max_tokens", "max_new_tokens", "stop", "stop_token_ids", "ignore_eos")
_KNOWN = ("temperature", "top_p", "top_k", "seed", "logprobs", *_LENGTHS_AND_ENDS)


@dataclass(frozen=True)
class Limits:
    """Of a server: tokens of prompt and response by verl's keys, rows decoded together, and the draws' first seed."""

    prompt: int
    response: int
    slots: int
    seed: int
    ignore_eos: bool = False
    most: int | None = None  # ``rollout.max_model_len``

    @property
    def longest(self) -> int:
        """Tokens of one sample, prompt and response together."""
        return min(self.prompt + self.response, self.most or self.prompt + self.response)


def sampling(given: Mapping[str, Any], prompt: int, limits: Limits, eos: Sequence[int]) -> SamplingParams:
    """The parameters of one request with ``prompt`` tokens, or ``MantissaError`` with the one that is not honoured.

    verl's defaults: as many tokens as ``response_length``, and as prompt and response may have together; end tokens are
    the model's own unless ``ignore_eos``. ``top_k`` of -1 is off.
    """
    for name, value in given.items():
        if name not in _KNOWN and name not in _NEUTRAL:
            raise MantissaError(f"rollout.name=mantissa: sampling parameter {name}={value!r} is not supported")
        if name in _NEUTRAL and value not in (None, _NEUTRAL[name]):
            raise MantissaError(
                f"rollout.name=mantissa: sampling parameter {name}={value!r} is not supported, for the learner's "
                f"log-probs know nothing of it; only {_NEUTRAL[name]} is"
            )
    wanted = given.get("max_tokens", given.get("max_new_tokens"))
    if wanted is None:
        wanted = min(limits.response, limits.prompt + limits.response - prompt)
    room = limits.longest - prompt
    if room < 1:
        raise MantissaError(
            f"a prompt of {prompt} tokens leaves no room in {limits.longest}; raise rollout.prompt_length, or shorten "
            "it"
        )
    ends = () if given.get("ignore_eos", limits.ignore_eos) else tuple(eos)
    stop = given.get("stop") or ()
    return SamplingParams(
        max_tokens=max(1, min(int(wanted), room)),
        temperature=float(given.get("temperature", 1.0)),
        top_k=max(int(given.get("top_k", -1)), 0),
        top_p=float(given.get("top_p", 1.0)),
        stop_token_ids=tuple(dict.fromkeys((*ends, *(given.get("stop_token_ids") or ())))),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def seed_of(fields: Mapping[str, Any]) -> int:
    """Of one sample, from what verl's trainer says of it: step, index, and its number in the group.

    The older trainer has no such number, and says the row's in the batch (``priority``).
    """
    sample = fields.get("session_id", fields.get("priority", 0))
    return derive_seed(*(str(value) for value in (fields.get("global_steps"), fields.get("index"), sample)))


def request_seed(first: int, seed: object, prompt: Sequence[int]) -> int:
    """Of a request's draws. ``first``: verl's ``rollout.seed``; ``seed``: the sample's, as it came with the request."""
    return derive_seed(first, "verl", str(seed), _digest(prompt).hex())


def _digest(prompt: Sequence[int]) -> bytes:
    return hashlib.sha256(",".join(map(str, prompt)).encode()).digest()


@dataclass(frozen=True)
class Answer:
    """``stopped``: verl's word for why it ended. ``step``: the trainer's step whose weights sampled it."""

    tokens: list[int]
    logprobs: list[float] | None
    stopped: str
    step: int | None


def _stored(name: str, x: Tensor, dtype: torch.dtype, fp8: Fp8Policy | None) -> dict[str, Tensor]:
    """One tensor as its format stores it: simulated formats are kept as fp32 values that lie on their grid."""
    if x.dtype is not torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        return {name: x}
    if fp8 is not None and x.ndim == 2:  # codes and scales of values that were made of some are those
        made = quantize(x, E4M3, SQUARE, fp8.scale == "power_of_two", name)
        if torch.equal(dequantize(made, SQUARE), x):
            return {name: made.codes, f"{name}_scale_inv": made.scales}
    half = x.to(dtype)
    return {name: half if torch.equal(half.float(), x) else x}


@dataclass(frozen=True)
class _Waiting:
    request: Request
    params: SamplingParams
    future: asyncio.Future[Completion]


class Serving:
    """A server of one replica. ``load`` gives it weights; every method is of one event loop."""

    def __init__(self, model: str, limits: Limits, device: torch.device, replica: int = 0) -> None:
        self.folder = find_model(model)
        self.limits, self.device, self.replica = limits, device, replica
        self.refused = refused_by_ours(self.folder)  # then it runs by transformers' own code
        self.config = any_config(self.folder) if self.refused else read_config(self.folder)
        self.tokenizer: Tokenizer = load_tokenizer(self.folder, self.config.vocab_size)
        self.step: int | None = None
        self.evidence = ""
        self._twice: set[str] = set()  # names that verl's own engines send beside another of the same tensor's
        self._setup: Setup | None = None
        self._engine: NativeEngine | PolicyEngine | None = None
        self._role: ResolvedRole | None = None  # the engine's
        self._version = -1
        self._waiting: list[_Waiting] = []
        self._turns: asyncio.Task[None] | None = None
        self._open, self._stopping = asyncio.Event(), False
        self._open.set()
        self._rejecting = False
        self._seen: collections.Counter[bytes] = collections.Counter()
        self._warned = False
        # One thread for all that computes: torch's number of threads belongs to a thread, and the plan to that number.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mantissa-rollout")

    # weights

    async def load(self, setup: Setup, weights: Mapping[str, Tensor], step: int | None) -> None:
        """Take new weights: fp32 masters by name, rounded once to the rollout's format."""
        await self._in_thread(lambda: self._load(setup, weights))
        self.step = step if step is not None else self.step
        self._seen.clear()

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is sampled with, by name, in the rollout's format; codes beside their scales (``NAME_scale_inv``).

        ``MantissaError``: the rollout's format has other codes than fp8's.
        """
        if self._engine is None:
            return {}
        fp8 = self._role.fp8 if self._role is not None else None
        if isinstance(fp8, Quantized):
            raise MantissaError(f"the rollout's weights are codes of {fp8}, and of codes only fp8's are read")
        found: dict[str, Tensor] = {}
        for name, each in self._engine.weights.items():
            if name.endswith(".scales"):
                found[f"{name.removesuffix('.scales')}_scale_inv"] = each
            else:
                found |= _stored(name, each, self._engine.format.dtype, fp8)
        return found

    def _load(self, setup: Setup, weights: Mapping[str, Tensor]) -> None:
        if self._setup != setup or self._engine is None:
            self._engine = self._new_engine(setup)
            self._setup = setup
        self._version += 1
        weights = {name: tensor for name, tensor in weights.items() if name not in self._twice}
        self._engine.sync(weights, self._version)

    def _new_engine(self, setup: Setup) -> NativeEngine | PolicyEngine:
        torch.set_num_threads(setup.threads)
        be_deterministic(self.device)
        precision = resolve(PrecisionPolicy.parse(setup.policy), self.device)
        if precision.rollout.exact and setup.length < self.limits.longest:
            raise MantissaError(
                f"mixed_precision.length={setup.length}: prompt and response may have {self.limits.longest} tokens "
                "(rollout.prompt_length + rollout.response_length), and exact kernels are proven for fewer; raise it"
            )
        engine = self._transformers(setup) if self.refused else self._native(setup, precision)
        engine.interrupted = lambda: self._stopping
        return engine

    def _native(self, setup: Setup, precision: ResolvedPrecision) -> NativeEngine:
        assert isinstance(self.config, ModelConfig)
        self._role = precision.rollout
        kernels = rollout_kernels(precision, setup.plan)
        if self._setup != setup:  # proven here: this may be another machine than the learner's
            self.evidence = probe(kernels, self.device)
        if self.config.tie_word_embeddings:
            self._twice = {"lm_head.weight"}
        return NativeEngine(
            self.config,
            kernels,
            kv_format=precision.kv_cache.active,
            slots=self.limits.slots,
            max_length=self.limits.longest,
            device=self.device,
            decode_text=self.tokenizer.decode,
        )

    def _transformers(self, setup: Setup) -> PolicyEngine:
        """By transformers' own code, adopted as the learner's model is; compared here anew."""
        wanted, model = PrecisionPolicy.parse(setup.policy), load_any(self.folder, self.refused).requires_grad_(False)
        policy, precision = as_policy(wanted, model, self.device, setup.length, setup.plans)
        self._role = rollout = precision.rollout
        engine = PolicyEngine(policy, rollout, self.limits.slots, self.tokenizer.decode, alone=True)
        self.evidence = (
            on_grid("rollout", engine.model, rollout.active, self.device)
            if policy.adopted is None
            else f"{rollout.name}, {policy.adopted.lines[-1]}"
        )
        self._twice = set(model.state_dict()) - {name for name, _ in model.named_parameters()}
        return engine

    async def release(self) -> None:
        """Give weights and cache back; the next ``load`` makes them anew.

        On a CPU a model by transformers' own code stays: to read and compare it anew takes longer than it is worth.
        """

        def drop() -> None:
            if self.refused and self.device.type == "cpu":
                return
            self._engine = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

        await self._in_thread(drop)

    # requests

    async def generate(self, prompt: Sequence[int], given: Mapping[str, Any]) -> Answer:
        """Sample one response. After ``abort`` it waits for ``go_on``, or is turned away where that was asked for."""
        params = sampling(given, len(prompt), self.limits, self.tokenizer.eos_ids)
        request = Request(tuple(map(int, prompt)), self._key(prompt, given.get("seed")))
        while not self._open.is_set():
            if self._rejecting:
                return Answer([], [] if given.get("logprobs", False) else None, "aborted", self.step)
            await self._open.wait()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, params, future))
        if self._turns is None or self._turns.done():
            self._turns = asyncio.create_task(self._work())
        done = await future
        self.tokenizer.warn_of_unknown(done.tokens)
        logprobs = done.logp_T.tolist() if given.get("logprobs", False) else None
        return Answer(
            list(done.tokens), logprobs, "aborted" if done.finish_reason == "abort" else "completed", self.step
        )

    def _key(self, prompt: Sequence[int], seed: object) -> int:
        """The seed of a request's draws."""
        if seed is not None:
            return request_seed(self.limits.seed, seed, prompt)
        text = _digest(prompt)
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "requests come without a seed, from an agent loop that is not Mantissa's: their draws follow the order "
                "of arrival, and a second run may sample otherwise"
            )
        self._seen[text] += 1
        return derive_seed(self.limits.seed, "arrival", self.replica, str(self.step), self._seen[text], text.hex())

    async def _work(self) -> None:
        """Turns, until nothing waits."""
        await asyncio.sleep(0.005)  # what comes together is decoded together
        while self._waiting:
            turn = [each for each in self._waiting if each.params == self._waiting[0].params]
            self._waiting = [each for each in self._waiting if each.params != turn[0].params]
            turn = [each for each in turn if not each.future.done()]  # who cancelled a request waits for nothing
            if not turn:
                continue
            try:
                requests = [each.request for each in turn]
                found = await self._in_thread(self._sampler(requests, turn[0].params))
                answers = [completion for (completion,) in found]
            except Exception as error:  # noqa: BLE001 - it is the requests' own, which wait for it
                for each in turn:
                    if not each.future.done():
                        each.future.set_exception(error)
                continue
            for each, completion in zip(turn, answers, strict=True):
                if not each.future.done():  # cancelled meanwhile
                    each.future.set_result(completion)

    def _sampler(self, requests: list[Request], params: SamplingParams) -> Callable[[], list[list[Completion]]]:
        def run() -> list[list[Completion]]:
            if self._engine is None:
                raise MantissaError(
                    "the rollout server holds no weights: none came yet, or it sleeps; verl sends them with "
                    "update_weights"
                )
            return self._engine.generate(requests, params, self._version)

        return run

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # stopping and going on

    async def abort(self, reject: bool = False) -> None:
        """End every request with the tokens that it has, and hold (or turn away) what comes until ``go_on``."""
        self._open.clear()
        self._rejecting, self._stopping = reject, True
        try:
            await self.drained()
        finally:
            self._stopping = False

    async def drained(self) -> None:
        """Wait until what is being sampled is done. Who waits may be cancelled, and the sampling goes on."""
        if self._turns is not None:
            await asyncio.shield(self._turns)

    async def go_on(self) -> None:
        """The end of ``abort``."""
        self._rejecting = False
        self._open.set()
