"""A stand-in for vLLM with a policy of its own: what is asked of it is kept, and its worker runs our extension.

Its model is one embedding, one fused and one plain matrix, a norm and a head, loaded from the folder's file; its
distribution does not depend on the prompt. Enough to see what the engine asks for, and what it refuses to believe.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mantissa.kernels import resolve, rollout_kernels
from mantissa.model import ModelConfig
from mantissa.precision import FP32, PrecisionPolicy
from mantissa.rollout import SamplingParams, VllmStart
from mantissa.rollout.vllm.worker import WeightReader
from naive_engine import master_model

CONFIG = ModelConfig("llama", 40, 32, 56, 2, 4, 2, 8, initializer_range=0.25)
START = VllmStart(CONFIG, FP32, FP32, 5, 32, torch.device("cpu"))
KERNELS = rollout_kernels(resolve(PrecisionPolicy(), "cpu"))
PARAMS = SamplingParams(max_tokens=6, temperature=0.5, stop_token_ids=(3,))


def masters(seed: int, config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    """Weights of ``config``."""
    return {name: parameter.detach() for name, parameter in master_model(config, seed).named_parameters()}


class Product:
    """How vLLM keeps a matrix on a CPU: packed, out of sight."""

    def __init__(self, weight: Tensor) -> None:
        self.packed = weight.clone()

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, self.packed, bias)


class Linear(nn.Module):
    def __init__(self, parts: list[Tensor], biases: list[Tensor]) -> None:
        super().__init__()
        whole = torch.cat(parts)
        self.quant_method, self.input_size = Product(whole), whole.shape[1]
        self.output_sizes = [len(part) for part in parts]
        self.weight = nn.Parameter(torch.empty(0, dtype=whole.dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None


class Fp8BlockScaledMMLinearKernel:
    """As vLLM's: quantises activations in one place for all its kinds, and multiplies what the layer holds."""

    apply_input_quant = True
    weight_group_shape = (128, 128)

    def __init__(self) -> None:
        self.quant_fp8 = SimpleNamespace(static=False, use_ue8m0=False, group_shape=(1, 128))

    def apply_weights(self, layer: nn.Module, x: Tensor) -> Tensor:
        scales = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return nn.functional.linear(x.float(), layer.weight.float() * scales).to(x.dtype)


class TritonProduct(Fp8BlockScaledMMLinearKernel):
    pass


class HalfProduct(Fp8BlockScaledMMLinearKernel):
    apply_input_quant = False


class HiddenProduct(Fp8BlockScaledMMLinearKernel):
    def apply_weights(self, layer: nn.Module, x: Tensor) -> Tensor:
        return super().apply_weights(layer, x)


class PowersProduct(Fp8BlockScaledMMLinearKernel):
    def __init__(self) -> None:
        super().__init__()
        self.quant_fp8.use_ue8m0 = True


class RowProduct(Fp8BlockScaledMMLinearKernel):
    def __init__(self) -> None:
        super().__init__()
        self.quant_fp8.group_shape = (1, -1)


class Fp8Linear(nn.Module):
    """A matrix as codes and scales, which stay where the kernel reads them."""

    kernel: type[Fp8BlockScaledMMLinearKernel] = TritonProduct

    def __init__(self, parts: list[Tensor], scales: list[Tensor], biases: list[Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([part.view(torch.uint8) for part in parts]), requires_grad=False)
        self.weight.data = self.weight.data.view(torch.float8_e4m3fn)
        self.weight_scale_inv = nn.Parameter(torch.cat(scales), requires_grad=False)
        self.input_size, self.output_sizes = self.weight.shape[1], [len(part) for part in parts]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.quant_method = SimpleNamespace(fp8_linear=self.kernel(), apply=self._apply_codes)

    @staticmethod
    def _apply_codes(layer: nn.Module, x: Tensor) -> Tensor:
        return layer.quant_method.fp8_linear.apply_weights(layer, x)


class Embedding(nn.Module):
    """Padded to a multiple of 64 rows, as vLLM's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.org_vocab_size, self.embedding_dim = weight.shape
        padding = torch.zeros(-len(weight) % 64, weight.shape[1], dtype=weight.dtype)
        self.weight = nn.Parameter(torch.cat([weight, padding]), requires_grad=False)
        self.quant_method = Product(self.weight)


class Norm(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Model(nn.Module):
    """What a worker holds after loading ``tensors``."""

    packed_modules_mapping = FUSED

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        rest = dict(tensors)
        self.lm_head = Embedding(rest.pop("lm_head.weight"))
        self._put("model.embed_tokens", Embedding(rest.pop("model.embed_tokens.weight")))
        for name in sorted({name.rpartition(".")[0] for name in rest}):
            parent, _, last = name.rpartition(".")
            whole = next((fused for fused, parts in FUSED.items() if last in parts), last)
            if last not in FUSED.get(whole, [last])[0]:
                continue  # made with the first of its parts
            parts = [f"{parent}.{part}" for part in FUSED.get(whole, [last])]
            if last.endswith("norm"):
                self._put(name, Norm(rest[f"{name}.weight"]))
                continue
            biases = [rest[f"{part}.bias"] for part in parts if f"{part}.bias" in rest]
            weights = [rest[f"{part}.weight"] for part in parts]
            scales = [rest[f"{part}.weight_scale_inv"] for part in parts if f"{part}.weight_scale_inv" in rest]
            made = Fp8Linear(weights, scales, biases) if scales else Linear(weights, biases)
            self._put(f"{parent}.{whole}", made)

    def _put(self, path: str, module: nn.Module) -> None:
        parent: nn.Module = self
        *names, last = path.split(".")
        for name in names:
            if name not in dict(parent.named_children()):
                parent.add_module(name, nn.Module())
            parent = getattr(parent, name)
        parent.add_module(last, module)

    def compute_logits(self, x: Tensor) -> Tensor:
        return self.lm_head.quant_method.apply(self.lm_head, x)[:, : self.lm_head.org_vocab_size].float()


class Attention(nn.Module):
    """What a layer says of its cache."""

    def __init__(self, kind: str, scale: float) -> None:
        super().__init__()
        self.kv_cache_dtype, self._k_scale_float, self._v_scale_float = kind, scale, scale
        self.query_quant: object = None


@dataclass
class Fault:
    """What the stand-in does wrong."""

    facts: dict[str, str] = field(default_factory=dict)  # another dtype than asked, ...
    raw_logprobs: bool = False
    few: int = 4  # of how many tokens it tells
    whole_logprobs: bool = False  # of what was there before top-k and top-p
    keeps: str = ""  # a module that loading in place does not renew
    keeps_cache: bool = False
    fails: str = ""  # on starting
    finish: str = ""
    nan: bool = False
    breaks: str = ""  # on sampling, once it was proven
    freed: int = 1 << 30  # asleep
    cache: str = ""  # another than asked for
    cache_scale: float = 1.0
    query_quant: bool = False  # as on a GPU
    kernel: type[Fp8BlockScaledMMLinearKernel] = TritonProduct  # of fp8 products


class Worker(WeightReader):
    """Ours, on a device whose free memory is a number."""

    free = 0
    follows = 0

    def mantissa_follow(self, owner: int) -> None:
        self.follows = owner

    def mantissa_memory(self) -> dict[str, int]:
        return {"free": self.free}


class LLM:
    made: list[LLM] = []  # noqa: RUF012 - the tests' window
    fault = Fault()

    def __init__(self, **options: Any) -> None:
        if self.fault.fails:
            raise RuntimeError(self.fault.fails)
        self.options, self.asked, self.prompts, self.closed = options, [], [], False
        self.awake = {"weights", "kv_cache"}
        self.slept: list[str] = []
        dtype = getattr(torch, options["dtype"])
        told = {
            "dtype": dtype,
            "head_dtype": getattr(torch, options["hf_overrides"]["head_dtype"]),
            "logprobs_mode": options["logprobs_mode"],
            "quantization": (_config(options["model"]).get("quantization_config") or {}).get("quant_method"),
            "model": options["model"],
            "max_model_len": options["max_model_len"],
        } | self.fault.facts
        self.worker = Worker()
        cache = {"auto": dtype, "fp8_e4m3": torch.uint8}[options["kv_cache_dtype"]]
        self.attention = Attention(self.fault.cache or options["kv_cache_dtype"], self.fault.cache_scale)
        self.attention.query_quant = object() if self.fault.query_quant else None
        self.worker.model_runner = SimpleNamespace(model_config=SimpleNamespace(**told), kv_cache_dtype=cache)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shutdown))
        self.reload_weights(options["model"])
        self.made.append(self)

    def _shutdown(self, timeout: float) -> None:
        self.closed = True

    def reload_weights(self, weights_path: str) -> None:
        model = Model(load_file(str(Path(weights_path) / "model.safetensors")))
        runner = self.worker.model_runner
        if self.fault.keeps and getattr(runner, "model", None) is not None:
            model._put(self.fault.keeps, runner.model.get_submodule(self.fault.keeps))
        model.add_module("attention", self.attention)
        runner.model = model

    def sleep(self, level: int) -> None:
        self.slept.append(f"sleep {level}")
        self.awake.clear()
        self.worker.free += self.fault.freed
        self.worker.model_runner.model = None  # level 2: it is gone

    def wake_up(self, tags: list[str]) -> None:
        self.slept += [f"wake {tag}" for tag in tags]
        self.awake |= set(tags)

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        owner = self if method == "reload_weights" else self.worker
        assert "weights" in self.awake or method == "mantissa_memory", f"{method} asleep"
        return [getattr(owner, method)(**kwargs or {})]

    def reset_prefix_cache(self) -> bool:
        assert "kv_cache" in self.awake, "reset asleep"
        return not self.fault.keeps_cache

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}, "generate asleep"
        if self.fault.breaks and len(self.asked) >= 2:
            raise RuntimeError(self.fault.breaks)
        self.asked += params
        self.prompts += [prompt["prompt_token_ids"] for prompt in prompts]
        return [SimpleNamespace(outputs=[self._sampled(one)]) for one in params]

    def _sampled(self, asked: Any) -> Any:
        """Tokens count up from the seed's; log-probs are of logits that fall by 1 a token, 4 tokens in all."""
        temperature = 1.0 if self.fault.raw_logprobs or not asked.temperature else asked.temperature
        logp = (-torch.arange(4.0) / temperature).log_softmax(-1)
        kept = min(asked.top_k or 4, int((logp.exp().cumsum(0) < asked.top_p - 1e-6).sum()) + 1)
        if not self.fault.whole_logprobs:
            logp = torch.where(torch.arange(4) < kept, logp, -torch.inf).log_softmax(-1)
        logp = logp.tolist()
        tokens, finish = [], "length"
        for step in range(asked.max_tokens):
            tokens.append((asked.seed + step) % kept)
            if tokens[-1] in asked.stop_token_ids:
                finish = "stop"
                break
        told = range(self.fault.few)
        table = {token: SimpleNamespace(logprob=float("nan") if self.fault.nan else logp[token]) for token in told}
        return SimpleNamespace(
            token_ids=tokens, logprobs=[table for _ in tokens], finish_reason=self.fault.finish or finish
        )


def _config(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())


def install(monkeypatch: pytest.MonkeyPatch, fault: Fault | None = None) -> type[LLM]:
    """Put the stand-in where ``import vllm`` finds it; returns its ``LLM``, with the ones made so far forgotten."""
    module = ModuleType("vllm")
    module.__spec__ = SimpleNamespace(name="vllm")  # type: ignore[assignment] - what find_spec looks at
    module.__version__ = "0.32.0"  # type: ignore[attr-defined]
    module.LLM, module.SamplingParams = LLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)  # what its fp8 cache wants
    monkeypatch.setattr(LLM, "fault", fault or Fault())
    monkeypatch.setattr(Fp8Linear, "kernel", LLM.fault.kernel)
    monkeypatch.setattr(LLM, "made", [])
    return LLM
