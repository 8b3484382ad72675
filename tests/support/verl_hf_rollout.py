"""Another rollout for the tests' verl jobs: transformers' model in a Ray actor, its weights by Ray's object store."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

_Q, _K, _V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
_DOWN, _LAST = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
_EXPERTS = "model.layers.1.mlp.experts.down_proj"  # of a mixture, all of a layer's in one
_CHANGES: dict[str, Any] = {
    "swapped": lambda w: {_K: w[_V], _V: w[_K]},
    "asleep": lambda w: {_DOWN: torch.zeros_like(w[_DOWN])},
    "transposed": lambda w: {_Q: w[_Q].T},
    "scaled": lambda w: {_DOWN: w[_DOWN] * 1.01},
    "sign": lambda w: {_LAST: -w[_LAST]},
    "heads": lambda w: {_Q: w[_K], _K: w[_Q]},
    "expert": lambda w: {_EXPERTS: torch.stack([w[_EXPERTS][0], *w[_EXPERTS][:1], *w[_EXPERTS][2:]])},
}


def _packed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts that verl sends one by one, as transformers holds them: all of a layer's in one tensor."""
    found, experts = {}, dict[str, dict[tuple[int, str], torch.Tensor]]()
    for name, each in weights.items():
        layer, own, part = name.partition(".mlp.experts.")
        number, _, kind = part.partition(".")
        if own and number.isdecimal():
            experts.setdefault(layer + own, {})[int(number), kind.removesuffix("_proj.weight")] = each
        else:
            found[name] = each
    for place, parts in experts.items():
        numbers = sorted({number for number, _ in parts})
        found[f"{place}down_proj"] = torch.stack([parts[number, "down"] for number in numbers])
        both = [torch.cat([parts[number, "gate"], parts[number, "up"]]) for number in numbers]
        found[f"{place}gate_up_proj"] = torch.stack(both)
    return found


def _of_another_config(fault: str, path: str) -> dict[str, Any]:
    """What of a model's configuration a server has otherwise."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    if fault == "rope":
        config.rope_parameters = {**config.rope_parameters, "rope_theta": 100 * config.rope_parameters["rope_theta"]}
    if fault == "softcap":
        config.final_logit_softcapping = None
    return {"config": config}


_BUCKET = ".layers.1.mlp."  # what of the weights stays as it was, by its name


class Server:
    """Generates one request at a time, with a cache; the draws of a prompt's n-th request are the same in every run.

    ``MANTISSA_TEST_FAULT`` makes it wrong: ``unsynced``, weights of its own in the place of those it is sent;
    ``temperature``, log-probs from before the temperature; ``stale``, from step 1 on it keeps what it has; ``rank``,
    the second server alone does; ``bucket``, a part of the weights does, as if one of the messages were lost;
    ``layer``, a whole layer does; ``swapped``, a layer's keys and values change places; ``asleep``, a matrix is zeros,
    as memory that was given back; ``transposed``, a square matrix is turned; ``scaled``, a matrix is times 1.01;
    ``sign``, a layer's last matrix is negated; ``heads``, a layer's queries and keys change places; ``expert``, one
    expert of a layer has another's last matrix. From its start on: ``rope``, positions turn by another base;
    ``softcap``, logits are not capped. Several, with commas, come in turn, one a step.
    ``MANTISSA_TEST_HIDDEN``: its weights are nowhere to be read.
    """

    def __init__(self, path: str, response_length: int, dtype: str, replica: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        self.replica = replica
        self.faults = os.environ.get("MANTISSA_TEST_FAULT", "").split(",")
        self.fault = self.faults[0]
        torch.set_num_threads(1)
        own = _of_another_config(self.fault, path) if self.fault in ("rope", "softcap") else {}
        kind = getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, attn_implementation="sdpa", **own)
        self.model.eval()
        self.hidden, self.model = self.model, None if os.environ.get("MANTISSA_TEST_HIDDEN") else self.model
        self.length, self.step = response_length, None
        self.asked: dict[str, int] = {}

    def _generator(self, prompt: Sequence[int]) -> torch.Generator:
        key = f"{self.step} {list(prompt)}"
        self.asked[key] = self.asked.get(key, 0) + 1
        seed = int.from_bytes(hashlib.sha256(f"{key} {self.asked[key]}".encode()).digest()[:7], "big")
        return torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def _forward(self, tokens: Sequence[int], cache: Any = None) -> Any:
        return self.hidden(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)

    async def generate(self, request_id: str, prompt_ids: Any, sampling_params: Any, **_: Any) -> TokenOutput:
        prompt = [int(token) for token in prompt_ids]
        generator, tokens, logps = self._generator(prompt), [], []
        temperature = float(sampling_params.get("temperature", 1.0))
        out = self._forward(prompt)
        for _ in range(int(sampling_params.get("max_tokens") or self.length)):
            logits = out.logits[0, -1].float()
            logp = torch.log_softmax(logits / (temperature or 1.0), -1)
            greedy = temperature == 0
            token = int(logits.argmax() if greedy else torch.multinomial(logp.exp(), 1, generator=generator))
            tokens.append(token)
            logps.append(float((torch.log_softmax(logits, -1) if self.fault == "temperature" else logp)[token]))
            if token == self.hidden.config.eos_token_id:
                break
            out = self._forward([token], out.past_key_values)
            await asyncio.sleep(0)
        return TokenOutput(
            token_ids=tokens,
            log_probs=logps,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": self.step},
        )

    async def update_weights(self, weights: dict[str, torch.Tensor], step: int | None) -> None:
        self.fault = self.faults[(step or 0) % len(self.faults)]
        weights = _packed(weights)
        if step and (self.fault == "stale" or (self.fault == "rank" and self.replica == 1)):
            return
        if step and (part := {"bucket": _BUCKET, "layer": ".layers.1."}.get(self.fault or "")):
            kept = {name: each for name, each in self.hidden.state_dict().items() if part in name}
            assert kept
            weights = weights | kept
        if step and (change := _CHANGES.get(self.fault or "")):
            weights = weights | change(weights)
        self.step = step
        if self.fault == "unsynced":
            draw = torch.Generator().manual_seed(1)
            weights = {name: torch.randn(w.shape, generator=draw) * w.std() for name, w in weights.items()}
        missing, unexpected = self.hidden.load_state_dict(weights, strict=False)
        assert (missing, unexpected) == ([], [])

    async def nothing(self, *arguments: Any, **named: Any) -> None:
        """What a server with a cache of its own would do, when asked to free or to refill it."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = nothing


class HfReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        server = (
            ray.remote(Server)
            .options(
                name=f"hf_test_server_{self.replica_rank}",
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            )
            .remote(self.model_config.path, self.config.response_length, self.config.dtype, self.replica_rank)
        )
        await server.clear_kv_cache.remote()
        self.servers, self._server_handle, self._server_address = [server], server, f"ray:{self.replica_rank}"


class ServerAdapter(BaseRollout):
    """In the learner's process: hands its weights to the server of this rank's replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        size = config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
        self.replica, self.rank = divmod(int(os.environ["RANK"]), size)

    async def resume(self, tags: Any) -> None:
        return None

    async def release(self) -> None:
        return None

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], wire_format: str = "", global_steps: Any = None, **_: Any
    ) -> None:
        whole = {name: tensor.detach().cpu() for name, tensor in weights}  # on every rank: the gathering is collective
        if self.rank == 0:
            server = ray.get_actor(f"hf_test_server_{self.replica}")
            await server.update_weights.remote(whole, global_steps)
