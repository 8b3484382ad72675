"""vLLM as the rollout engine, held to what Mantissa's own engine promises.

An engine written by others has kernels of its own, so its log-probs differ from the learner's by more than the rounding
of a format: that difference is what the run's gap metrics then measure. What must *not* differ is checked and stops the
run: the number format, the weights, the temperature, the distribution that log-probs are of.

- Formats. vLLM computes in a dtype (fp32, bf16, fp16) and says afterwards which; a head in fp32 (half operands, fp32
  logits) is asked for where the policy says ``logits: fp32``, vLLM's own default being half.
- Log-probs. By default vLLM's are of the raw logits, before the temperature. Processed ones are asked for, and proven:
  at temperature 2 the log-probs of two tokens must lie half as far apart as at 1.
- Weights. The masters are rounded once, written to a folder, and loaded in place; then every tensor is read back from
  the worker (``worker.py``) and compared by a hash of its bits. Keys and values of the old weights are dropped.
- Whose they are. The worker keeps a mark of the weights it loaded last, which is looked at after every batch: a server
  that was started again in between would otherwise go on with the weights it begins with.

Of several processes each has a vLLM of its own, which it loads and checks itself; or all have one server, which the
first of them loads and checks, while the others learn the mark and send their requests. Where one of them fails, all
stop there, with the words of the one that failed. Otherwise the rest would sample from weights that one of them does
not have, or wait for it.

How it is started, here or as a server: ``server.py``. It is spoken to through a link: to processes that this one starts
itself, or over HTTP to a server. Either samples token ids from token ids, calls methods of vLLM's worker by name, and
loads weights from a folder that both sides see.

The server is vLLM's own. Of its endpoints these are used: ``/inference/v1/generate``, whose log-probs come by token id
and unrounded, and those of its development mode: ``/collective_rpc``, ``/reset_prefix_cache``, ``/sleep``,
``/wake_up``.
"""

from __future__ import annotations

import fcntl
import importlib
import math
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlencode, urlsplit

import torch
from torch import Tensor

from mantissa.base.environ import changed_environment
from mantissa.base.errors import MantissaError, on_failure
from mantissa.base.http import NOT_FOUND, OK, http_answer, is_this_machine, server_address
from mantissa.base.ranks import ALONE, Ranks
from mantissa.base.readers.json import as_json, parse_json
from mantissa.kernels import Kernels
from mantissa.rollout.engine import CopiedPolicy, check_requests, check_version
from mantissa.rollout.generation import StopStrings
from mantissa.rollout.sampling import Completion, FinishReason, Request, SamplingParams, request_keys
from mantissa.rollout.support import MostProbable, Support, encode_ids
from mantissa.rollout.vllm.key import UNAUTHORIZED, known_key
from mantissa.rollout.vllm.server import MOST_TOLD, VllmStart, WeightFolder, dtype_name, require_vllm, sample_weights
from mantissa.rollout.vllm.worker import CodeKernels

LEAST_TEMPERATURE = 0.01  # below it vLLM samples at 0.01
_NOT_FINITE = -9999.0  # what vLLM's server sends in the place of NaN and of anything below
_TIES = 8  # tokens as probable as the last that top-k keeps, which vLLM keeps too
_MASS = 1e-4  # by which the kept tokens' probabilities, rounded to fp32, may add to another number than 1
_MOST_CONNECTIONS = 256  # to a server; samples beyond that wait here and not there


@dataclass(frozen=True)
class VllmOutput:
    """One sample: its tokens, for each of them log-probs by token id (its own and others asked for), why it ended."""

    tokens: tuple[int, ...]
    logprobs: Sequence[Mapping[int, float]]
    finish_reason: str | None


def asked_of(params: SamplingParams, seed: int, logprobs: int) -> dict[str, Any]:
    """vLLM's sampling parameters, by its own names; those of stop strings stay here."""
    draws = params.temperature > 0  # the most probable token is so whatever is left out beside it
    return {
        "n": 1,
        "temperature": params.temperature,
        "top_p": params.top_p if draws else 1.0,
        "top_k": params.top_k if draws else 0,
        "max_tokens": params.max_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,  # what ends a response is said here, not in the model's folder
        "logprobs": logprobs,
        "seed": seed,
        "detokenize": False,
    }


def untold_support(top_k: int, top_p: float) -> str:
    """Why vLLM would not tell what these leave to draw from; empty where it does."""
    if top_p < 1 and not top_k:
        return (
            f"top_p={top_p:g} alone: vLLM tells as many of the most probable tokens as it is asked for, and what top_p "
            f"keeps has no bound; set top_k too, to at most {MOST_TOLD - _TIES}"
        )
    return "" if top_k <= MOST_TOLD - _TIES else f"top_k={top_k}: it tells at most {MOST_TOLD - _TIES} tokens; lower it"


def others_told(params: SamplingParams, vocabulary: int) -> int:
    """How many tokens' log-probs are asked for besides the sampled one's: all that top-k may keep, ties included."""
    kept = params.top_k + _TIES if params.top_k and params.temperature > 0 else 0
    return min(max(kept, params.most_probable), vocabulary, MOST_TOLD)


class LocalVllm:
    """vLLM in processes that this one starts and ends. ``weights``: what it begins with.

    ``where`` names it in errors; ``folder`` is where it loads from.
    """

    def __init__(self, start: VllmStart, weights: Mapping[str, Tensor]) -> None:
        self.where = f"vLLM {require_vllm()}"
        self._temporary = tempfile.TemporaryDirectory(prefix="mantissa-vllm-")
        self.folder = WeightFolder(self._temporary.name, start)
        self._llm: Any = None
        try:
            self.folder.write_config()
            self.folder.write(weights)
            with changed_environment(start.environment()):
                options = start.options(self._temporary.name) | {"disable_log_stats": True}
                self._llm = importlib.import_module("vllm").LLM(**options)
            self.call("mantissa_follow", owner=os.getpid())
        except MantissaError:
            self.close()
            raise
        except Exception as error:  # foreign code, whose errors are of every kind
            self.close()
            raise MantissaError(
                f"{self.where} did not start: {_first_line(error)}; its own messages above say more"
            ) from error

    def outputs(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int], logprobs: int = 0
    ) -> list[VllmOutput]:
        """A sample of each prompt, in order, by its seed. ``logprobs``: of how many tokens besides the sampled."""
        vllm = importlib.import_module("vllm")
        asked = [vllm.SamplingParams(**asked_of(params, seed, logprobs)) for seed in seeds]
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        found = [result.outputs[0] for result in self._ask("generate", given, asked, use_tqdm=False)]
        steps = [[{token: one.logprob for token, one in step.items()} for step in one.logprobs or ()] for one in found]
        return [VllmOutput(tuple(f.token_ids), s, f.finish_reason) for f, s in zip(found, steps, strict=True)]

    def call(self, method: str, **arguments: Any) -> Any:
        """A method of the worker, by name. There is one worker."""
        return self._ask("collective_rpc", method, kwargs=arguments)[0]

    def reset_prefix_cache(self) -> bool:
        """Drop keys and values; whether all of them went."""
        return bool(self._ask("reset_prefix_cache"))

    def sleep(self) -> None:
        """Give back the memory of weights and cache; both are lost."""
        self._ask("sleep", level=2)

    def wake(self, tag: str) -> None:
        """Take back the memory of ``weights``, or of the ``kv_cache``; it holds nothing yet."""
        self._ask("wake_up", tags=[tag])

    def close(self) -> None:
        """End what was begun; may be called twice."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown(timeout=10.0)
            self._llm = None
        self._temporary.cleanup()

    def _ask(self, method: str, *given: Any, **arguments: Any) -> Any:
        """vLLM's own errors, of every kind, in one line: what went wrong is in its processes' output."""
        try:
            return getattr(self._llm, method)(*given, **arguments)
        except Exception as error:  # foreign code, whose errors are of every kind
            raise MantissaError(
                f"{self.where} failed: {_first_line(error)}; its own messages above say more (VLLM_LOGGING_LEVEL=INFO "
                "says all of them); resume the run"
            ) from error


class ServedVllm:
    """A vLLM server that ``mantissa serve`` started, held by one run at a time; asked for what ``LocalVllm`` is.

    ``timeout_s``: silence after which it is given up; a sample answers when it is whole. Every sample is a request of
    its own, with as many on the way as the server decodes together. ``leads``: of several processes of a run
    one holds it, and sees its folder.
    """

    def __init__(self, url: str, start: VllmStart, timeout_s: float, leads: bool = True) -> None:
        self.where, self._timeout = f"the vLLM server at {url}", timeout_s
        expected = f"rollout.vllm.server={url}: expected http://host:port"
        parts = server_address(url if "//" in url else f"http://{url}", expected)
        if parts.scheme != "http" or parts.path.strip("/"):
            raise MantissaError(expected)
        self._url = f"http://{parts.netloc}" + ("" if parts.port else ":8000")
        self._pool = ThreadPoolExecutor(min(start.slots, _MOST_CONNECTIONS), "vllm")
        self._lock: int | None = None
        with on_failure(self.close):
            facts = self.call("mantissa_facts")
            self.where = f"vLLM {facts['release']} at {url}"
            self.folder = WeightFolder(facts["folder"], start)
            if leads:
                self._check_folder(start)
            if int(facts["max_length"]) < start.max_length:
                raise MantissaError(
                    f"{self.where} holds {facts['max_length']} positions, and the policy has {start.max_length}; start "
                    "it with this recipe: mantissa serve RECIPE"
                )
            if leads:
                self._hold()

    def _check_folder(self, start: VllmStart) -> None:
        path = self.folder.path / "config.json"
        try:
            found = parse_json(path.read_bytes())
        except OSError as error:
            raise MantissaError(
                f"{self.where} loads weights from {self.folder.path}, which this process cannot read "
                f"({error.strerror}); start it with --folder on a file system that both see"
            ) from error
        expected = as_json(start.config_json())
        for name in [*expected, *found]:
            if expected.get(name) != found.get(name):
                raise MantissaError(
                    f"{self.where} was started for another policy: {name}={found.get(name)}, and this recipe has "
                    f"{expected.get(name)}; start it with this recipe: mantissa serve RECIPE"
                )

    def _hold(self) -> None:
        """Be its only run: two would load their weights over each other's."""
        self._lock = os.open(self.folder.path / "run.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MantissaError(f"{self.where} is in use by another run; wait for it, or start a second one") from error

    def outputs(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int], logprobs: int = 0
    ) -> list[VllmOutput]:
        def one(prompt: Sequence[int], seed: int) -> VllmOutput:
            body = {"token_ids": list(prompt), "sampling_params": asked_of(params, seed, logprobs)}
            choice = self._post("/inference/v1/generate", body)["choices"][0]
            content = (choice.get("logprobs") or {}).get("content") or []
            steps = [{one["token_id"]: one["logprob"] for one in [*step["top_logprobs"], step]} for step in content]
            return VllmOutput(tuple(choice["token_ids"]), steps, choice["finish_reason"])

        waiting = [self._pool.submit(one, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        try:
            return [future.result() for future in waiting]
        finally:  # after an error nobody waits for the others
            for future in waiting:
                future.cancel()

    def call(self, method: str, **arguments: Any) -> Any:
        return self._post("/collective_rpc", {"method": method, "kwargs": arguments})["results"][0]

    def reset_prefix_cache(self) -> bool:
        return bool(self._post("/reset_prefix_cache")["success"])

    def sleep(self) -> None:
        self._post("/sleep?" + urlencode({"level": 2}))

    def wake(self, tag: str) -> None:
        self._post("/wake_up?" + urlencode({"tags": tag}))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._lock is not None:
            os.close(self._lock)  # and with it the lock
            self._lock = None

    def _post(self, path: str, body: Any = None) -> Any:
        """The server's answer."""
        address = urlsplit(self._url)
        key = known_key(address.port or 80, is_this_machine(self._url))
        try:
            status, answer = http_answer("POST", self._url + path, body or {}, timeout_s=self._timeout, key=key)
        except OSError as error:
            raise MantissaError(f"cannot reach {self.where}: {error}; start it with: mantissa serve RECIPE") from error
        if status != OK:
            missing = status == NOT_FOUND
            advice = "it must be one that mantissa serve started" if missing else "its own log says more"
            if status == UNAUTHORIZED:
                advice = "set VLLM_API_KEY to the key that mantissa serve named the file of"
            raise MantissaError(f"{self.where} answered {path} with {status}: {_first_line(answer)}; {advice}")
        return parse_json(answer)


VllmLink = LocalVllm | ServedVllm


def _first_line(problem: object) -> str:
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), repr(problem))[:300]


class VllmEngine:
    """A ``RolloutEngine`` on vLLM. ``close`` ends its processes, or lets go of the server.

    ``copies``: the policy as it was last sent to vLLM, rounded once and held as ``kernels`` hold it, whose format is
    the engine's. ``start``: what vLLM is asked to be. ``server``: the URL of one that ``mantissa serve`` started; None
    starts one here.
    ``evidence``: what was seen of vLLM at the start, on weights made for that; ``release``: which vLLM it is.
    ``ranks``: the run's processes, each of which has such an engine; making one and ``sync`` are collective.

    A sample's draws depend on its prompt, its seed and its index. Its logits do not quite: vLLM's sums depend on the
    batch, and two likely tokens may change places, so a run on vLLM repeats itself only nearly.
    """

    def __init__(
        self,
        start: VllmStart,
        kernels: Kernels,
        *,
        server: str | None = None,
        timeout_s: float = 3600.0,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.start, self.config = start, start.config
        self._decode_text, self._ranks = decode_text, ranks
        self.served = bool(server)
        self._leads = ranks.rank0 or not self.served
        if start.fp8 is not None and start.device.type == "cpu":  # where this package's hold values and no codes
            kernels = CodeKernels(start.format, start.logits, start.fp8)
        self.copies = CopiedPolicy(start.config, kernels, start.device, "sync")
        self._version, self._mark, self._asleep, self.evidence, self.release = -1, "", False, "", ""
        self.copied_version = -1  # of ``copies``; an engine asleep has it too
        begun_with = sample_weights(self.copies.weights, start.fp8)

        def link() -> VllmLink:
            return ServedVllm(server, start, timeout_s, self._leads) if server else LocalVllm(start, begun_with)

        self._link = ranks.agreed(link, lambda made: made.close())
        with on_failure(self.close):
            self._lead(lambda: self._prove(begun_with))
        if not ranks.alone:
            each = "one server for" if self.served else "one such vLLM for each of"
            self.evidence = f"{self.evidence}; {each} {ranks.world} processes"

    @property
    def version(self) -> int:
        """The policy version of the weights now loaded; -1 before the first ``sync``, asleep, and after one that
        failed."""
        return self._version

    def close(self) -> None:
        """End what was started here and delete the weights on disk; the engine is of no use afterwards."""
        self._version = -1
        self._link.close()

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load fp32 masters by name, rounded once, and stamp them ``version``. See ``RolloutEngine.sync``.

        Fails closed: until every tensor read back from the worker has the very bits that were sent, the engine refuses
        to generate. Wakes an engine that sleeps.
        """
        if version < 0:
            raise ValueError(f"policy version {version}: expected 0 or more")
        self._version = self.copied_version = -1
        self._ranks.agreed(lambda: self._take(weights))
        self._lead(lambda: self._load(self.copies.weights))
        self._version = self.copied_version = version

    @property
    def format_name(self) -> str:
        return self.start.format.name if self.start.fp8 is None else f"fp8 on {self.start.format}"

    def pause(self) -> None:
        """``sleep``, where the run asked for it."""
        if self.start.sleeps:
            self.sleep()

    def sleep(self) -> None:
        """Give the memory of weights and cache back to the learner, until the next ``sync``.

        To be called by every process, when all of them have sampled.
        """
        self._version = -1
        if not self._asleep and self._leads:
            self._link.sleep()
        self._asleep = True

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """Sample every request; result[i][j] is sample j of request i. See ``RolloutEngine.generate``."""
        check_version(version, self._version)
        limits = (self.config.vocab_size, self.start.max_length)
        check_requests(requests, params, *limits, decodes=self._decode_text is not None)
        _check_params(params)
        prompts = [request.prompt_tokens for request in requests for _ in range(request.samples)]
        seeds = [key & ((1 << 63) - 1) for key in request_keys(requests).tolist()]
        outputs = self._link.outputs(prompts, params, seeds, others_told(params, self.config.vocab_size))
        held = self._link.call("mantissa_mark")["mark"]
        if held != self._mark:
            self._version = -1
            raise MantissaError(
                f"{self._link.where} no longer holds the weights that this run loaded (it was started again, or others "
                "loaded theirs): what it sampled is not used; resume the run"
            )
        done = iter([self._completion(output, params) for output in outputs])
        return [[next(done) for _ in range(request.samples)] for request in requests]

    def _completion(self, output: VllmOutput, params: SamplingParams) -> Completion:
        tokens, where = output.tokens, self._link.where
        if output.finish_reason not in ("stop", "length"):
            why = f"for another reason than its end or its length: {output.finish_reason}"
            raise MantissaError(f"{where} ended a sample {why}")
        reason = cast(FinishReason, output.finish_reason)
        pairs = list(zip(output.logprobs, tokens, strict=False))  # a length too short is found in the next line
        if len(output.logprobs) != len(tokens) or not all(token in step for step, token in pairs):
            raise MantissaError(f"{where} gave no log-prob for each token; Mantissa works with 0.32")
        logp = [step[token] for step, token in pairs]
        if params.stop and self._decode_text is not None:
            found = StopStrings(params.stop, self._decode_text)
            ends = (end for end in range(1, len(tokens) + 1) if found.completed(tokens[:end]))
            if (end := next(ends, None)) is not None:
                tokens, logp, reason = tokens[:end], logp[:end], "stop"
        steps = output.logprobs[: len(tokens)]
        logp_T = torch.tensor(logp, dtype=torch.float32)
        if params.temperature == 0:
            logp_T = torch.zeros_like(logp_T)  # a point mass; vLLM's are of temperature 1 then
        if not (torch.isfinite(logp_T) & (logp_T > _NOT_FINITE)).all():
            raise MantissaError(
                f"{where} gave a log-prob that is not finite: its {self.start.format} overflowed; use bf16"
            )
        support = self._support(steps) if params.truncates and params.temperature > 0 else None
        told = MostProbable.of([_known(step) for step in steps], params.most_probable) if params.most_probable else None
        return Completion(tokens, logp_T, reason, self._version, support=support, most_probable=told)

    def _support(self, steps: Sequence[Mapping[int, float]]) -> Support:
        """What each token was drawn from: the tokens that have a probability, which must be all that have one."""
        words = []
        for step in steps:
            kept = _known(step)
            mass = math.fsum(map(math.exp, kept.values()))
            if abs(mass - 1) > _MASS:
                raise MantissaError(
                    f"{self._link.where} kept tokens of {mass:.6f} of the probability that it drew from and told of no "
                    "others: more are tied than were asked for, or its log-probs are not of what top-k and top-p left; "
                    "set rollout.engine=native, or leave both out"
                )
            words.append(encode_ids(list(kept), self.config.vocab_size))
        return Support.of(words)

    # weights

    def _lead(self, work: Callable[[], object]) -> None:
        """Work on a vLLM: each process on its own, or the first on the server of all; then all know how it stands."""
        self._ranks.agreed(lambda: work() if self._leads else None)
        if self.served:
            state = (self._mark, self._asleep, self.evidence, self.release)
            self._mark, self._asleep, self.evidence, self.release = self._ranks.broadcast(state)

    def _take(self, masters: Mapping[str, Tensor]) -> None:
        """Round every master once: every process, for each may hold a part of them."""
        self.copies.take(masters)
        if self._asleep:
            torch.cuda.empty_cache()  # what this process keeps for later is not there for vLLM's

    def _load(self, copies: Mapping[str, Tensor]) -> int:
        """Write, load in place, read back, drop the old keys and values; returns how many tensors it were."""
        link = self._link
        if self._asleep:
            link.wake("weights")
        sent = link.folder.write(copies)
        link.call("reload_weights", weights_path=str(link.folder.path))
        self._compare(sent, link.call("mantissa_weights"))
        if self._asleep:
            link.wake("kv_cache")
            self._asleep = False
        if not link.reset_prefix_cache():
            raise MantissaError(f"sync: {link.where} kept keys and values of the weights before these; resume the run")
        self._mark = link.call("mantissa_mark", mark=uuid.uuid4().hex)["mark"]
        return len(sent)

    def _compare(self, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
        for name in [*sent, *held]:
            if sent.get(name) != held.get(name):
                raise MantissaError(
                    f"sync: {self._link.where} computes with other values of {name} than were sent (sent "
                    f"{sent.get(name, 'nothing')}, held {held.get(name, 'nothing')}); nothing is sampled from them"
                )

    # what is seen at the start

    def _prove(self, weights: Mapping[str, Tensor]) -> None:
        """Try everything that is promised, on ``weights``."""
        start = self.start
        facts = self._check_facts()
        self.release = f"vLLM {facts.get('release', '')}".rstrip()
        tensors = self._load(weights)
        apart = self._prove_processed()
        slept = self._prove_sleep(weights) if start.sleeps else ""
        fp8 = "" if start.fp8 is None else f", products of {facts['products']} by {facts['product_kernels']}"
        runs_in = f"{dtype_name(start.format)}{fp8}, head {dtype_name(start.logits)}{_cache_of(facts)}"
        self.evidence = (
            f"{self._link.where} runs in {runs_in}; {tensors} tensors read back as sent, bit for bit; {apart}{slept}"
        )

    def _check_facts(self) -> dict[str, str]:
        """What the worker says of itself, where that is what was asked for."""
        facts = self._link.call("mantissa_facts")
        for name, value in self.start.facts().items():
            if facts.get(name) != value:
                role = "kv_cache" if name == "kv_cache" else "rollout"
                raise MantissaError(
                    f"{self._link.where} was asked for {name}={value} and runs with {facts.get(name) or None}; choose "
                    f"another precision.{role}, or rollout.engine=native"
                )
        return facts

    def _prove_processed(self) -> str:
        """Log-probs must be of the distribution sampled from: at temperature 2 half as far apart as at 1."""
        tables = []
        for temperature in (1.0, 2.0):
            (output,) = self._link.outputs([(0,)], SamplingParams(1, temperature), [0], logprobs=8)
            tables.append(output.logprobs[0])
        shared = sorted(set(tables[0]) & set(tables[1]), key=lambda token: tables[0][token])
        at_1, at_2 = (table[shared[-1]] - table[shared[0]] if shared else 0.0 for table in tables)
        said = f"log-probs {at_1:.4f} apart at temperature 1 are {at_2:.4f} apart at 2"
        if not at_1 > 1e-3 or abs(at_2 - at_1 / 2) > 0.1 * at_1:
            raise MantissaError(
                f"{self._link.where} gives log-probs that are not of the distribution sampled from: {said}; Mantissa "
                "works with 0.32"
            )
        return said

    def _prove_sleep(self, loaded: Mapping[str, Tensor]) -> str:
        """Asleep, the device must have at least the weights' memory free that it had not before."""
        widest = self.start.format.dtype.itemsize
        weights = sum(tensor.numel() * min(tensor.dtype.itemsize, widest) for tensor in loaded.values())
        before = self._link.call("mantissa_memory")["free"]
        self.sleep()
        freed = int(self._link.call("mantissa_memory")["free"]) - int(before)
        if freed < weights:
            raise MantissaError(
                f"{self._link.where} was told to sleep and gave {freed / 2**30:.2f} GiB back, its weights alone are "
                f"{weights / 2**30:.2f}; set rollout.vllm.sleep=false"
            )
        return f"; asleep it gives {freed / 2**30:.1f} GiB back"


def _cache_of(facts: Mapping[str, str]) -> str:
    """What the evidence says of a cache that is not in the rollout's format."""
    if facts["kv_cache"] == facts["dtype"]:
        return ""
    queries = "" if facts["queries"] == facts["dtype"] else f", queries in {facts['queries']}"
    return f", cache {facts['kv_cache']}{queries}"


def _known(step: Mapping[int, float]) -> dict[int, float]:
    """Tokens that could be drawn; a server says what has no probability by a number."""
    return {token: logp for token, logp in step.items() if logp > _NOT_FINITE}


def _check_params(params: SamplingParams) -> None:
    if untold := untold_support(params.top_k, params.top_p):
        raise MantissaError(f"vLLM as a rollout engine with {untold}")
    if 0 < params.temperature < LEAST_TEMPERATURE:
        raise MantissaError(
            f"temperature={params.temperature:g}: vLLM would sample at {LEAST_TEMPERATURE}; raise it to that, or use 0"
        )
