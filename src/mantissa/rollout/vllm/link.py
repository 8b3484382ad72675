"""How the engine speaks to a vLLM: to one in processes that it starts itself, or over HTTP to a server.

Either link samples token ids from token ids, calls methods of vLLM's worker by name, and loads weights from a folder
that both sides see. What is believed of the answers is the engine's affair (``engine.py``).

The server is vLLM's own (``server.py`` starts it). Of its endpoints these are used: ``/inference/v1/generate``,
whose log-probs come by token id and unrounded, and those of its development mode: ``/collective_rpc``,
``/reset_prefix_cache``, ``/sleep``, ``/wake_up``.
"""

from __future__ import annotations

import fcntl
import http.client
import importlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from torch import Tensor

from mantissa.environ import changed_environment
from mantissa.errors import MantissaError
from mantissa.rollout.types import SamplingParams
from mantissa.rollout.vllm.server import VllmStart, WeightFolder, http_answer, require_vllm

_MOST_CONNECTIONS = 256  # to a server; samples beyond that wait here and not there


@dataclass(frozen=True)
class VllmOutput:
    """One sample: its tokens, for each of them log-probs by token id (its own and others asked for), why it ended."""

    tokens: tuple[int, ...]
    logprobs: Sequence[Mapping[int, float]]
    finish_reason: str | None


def asked_of(params: SamplingParams, seed: int, logprobs: int) -> dict[str, Any]:
    """vLLM's sampling parameters, by its own names; those of stop strings stay here."""
    return {
        "n": 1,
        "temperature": params.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": params.max_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,  # what ends a response is said here, not in the model's folder
        "logprobs": logprobs,
        "seed": seed,
        "detokenize": False,
    }


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
        except Exception as error:
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
        parts = urlsplit(url if "//" in url else f"//{url}")
        if parts.scheme not in ("", "http") or not parts.hostname or parts.path.strip("/"):
            raise MantissaError(f"rollout.vllm.server={url}: expected http://host:port")
        self._address = (parts.hostname, parts.port or 8000)
        self._pool = ThreadPoolExecutor(min(start.slots, _MOST_CONNECTIONS), "vllm")
        self._lock: int | None = None
        try:
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
        except BaseException:
            self.close()
            raise

    def _check_folder(self, start: VllmStart) -> None:
        path = self.folder.path / "config.json"
        try:
            found = json.loads(path.read_text())
        except OSError as error:
            raise MantissaError(
                f"{self.where} loads weights from {self.folder.path}, which this process cannot read "
                f"({error.strerror}); start it with --folder on a file system that both see"
            ) from error
        expected = json.loads(json.dumps(start.config_json()))
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
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        text = json.dumps({} if body is None else body)
        try:
            status, answer = http_answer(self._address, "POST", path, self._timeout, text, headers)
        except (OSError, http.client.HTTPException) as error:
            raise MantissaError(
                f"cannot reach {self.where}: {error or type(error).__name__}; start it with: mantissa serve RECIPE"
            ) from error
        if status != http.client.OK:
            missing = status == http.client.NOT_FOUND
            advice = "it must be one that mantissa serve started" if missing else "its own log says more"
            raise MantissaError(f"{self.where} answered {path} with {status}: {_first_line(answer)}; {advice}")
        return json.loads(answer)


VllmLink = LocalVllm | ServedVllm


def _first_line(problem: object) -> str:
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), repr(problem))[:300]
