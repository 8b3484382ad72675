"""Weights as one side holds them, read one at a time: files of the programs that train and serve, or a live model.

| given | is read as |
|---|---|
| a Hugging Face folder, ``hub:ORG/NAME`` | its safetensors; TRL's ``checkpoint-N`` is one |
| an adapter's folder (peft's) | its base with the adapters merged in fp32 |
| a GGUF file, ``package:NAME`` | dequantised, by Hugging Face names |
| a run's ``step-N`` | ``policy.safetensors``, the masters |
| verl's ``global_step_N`` | ``actor/huggingface`` in it |
| ``.safetensors``, ``.pt``, ``.bin`` | a dictionary of tensors, or one within it |
| a module, a dictionary | what it holds now, peft's adapters merged in fp32 |
| ``http://127.0.0.1:PORT`` | a running vLLM's, as it computes with them |

Codes of fp8 come with their scales: ``X.weight`` in e4m3 beside ``X.weight_scale_inv`` or ``X.weight_scale``.

The weights of a vLLM that is running, as its worker computes with them (``rollout/vllm/worker.py``).

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls mantissa.rollout.vllm.worker.WeightReader

Asked are digests of all. Where one is another than the trainer's, the worker writes that tensor into a folder of this
process, which both see; of a server on another machine nothing but digests is asked.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from mantissa.base.bounds import boundary
from mantissa.base.errors import MantissaError
from mantissa.base.http import NOT_FOUND, OK, http_answer, is_this_machine, server_address
from mantissa.base.hub import find_model, is_gguf, read_object
from mantissa.base.readers.json import parse_json
from mantissa.base.readers.safetensors import open_tensors, read_tensors, tensor_shapes
from mantissa.base.readers.torch_files import read_torch
from mantissa.base.tensors import Digest
from mantissa.model.gguf import open_gguf
from mantissa.model.huggingface import weight_files
from mantissa.rollout.vllm.key import UNAUTHORIZED, known_key
from mantissa.rollout.vllm.worker import EXTENSION

_SCALES = ("_scale_inv", "_scale")
_DICTIONARIES = ("model_state_dict", "state_dict", "model", "module", "policy")  # of a file with more than weights
# Of a model with peft's adapters, what is not the model's own: what a copy that trains has taken the place of, too.
_BESIDE = re.compile(r"\.(lora_\w+|original_module)\.")
_ROTARY = "rotary_emb.inv_freq"  # computed, never learned


@dataclass(frozen=True)
class Stored:
    """One tensor. ``values``: as it is stored, codes multiplied by their scales; ``codes``, ``scales`` of fp8, spread
    to the codes' shape; ``grid``: of a GGUF file, else None; ``slack``: of adapters that were merged here, how far
    another order of the same fp32 sums may be off, for each value."""

    values: Tensor
    codes: Tensor | None = None
    scales: Tensor | None = None
    grid: str | None = None
    slack: Tensor | None = None


@dataclass(frozen=True)
class Held:
    """``where`` it is held, in words; ``shapes`` by name. ``base``, of adapters: the weights without them.

    ``digests``: of tensors that are known by them already; ``readable``: whether ``read`` gives them, too.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Stored]
    base: Held | None = None
    digests: Mapping[str, Digest] = field(default_factory=dict)
    readable: bool = True


Source = str | Path | nn.Module | Mapping[str, Tensor]


def held(source: Source, base: str | Path | None = None, remote: bool = False) -> Held:
    """The weights of ``source``; ``base``: of an adapter whose settings name no folder that is here. ``remote``: a
    server is known by digests alone, and may be on another machine.

    ``MantissaError``: nothing of the kinds above, a damaged file, shards that only their own program puts together, no
    server there.
    """
    if is_address(source):
        return _of_server(ServedWeights.at(str(source), remote))
    if isinstance(source, nn.Module):
        return _of_module(source)
    if isinstance(source, Mapping):
        return _of_dictionary("a dictionary", source)
    path = Path(source).expanduser()
    if is_gguf(str(source)):
        return _of_gguf(str(source))
    if path.is_file():
        return _of_file(path)
    if path.is_dir():
        return _of_folder(path, base)
    return _of_folder(find_model(source), base)


def _of_module(model: nn.Module) -> Held:
    """Parameters and saved buffers; peft's adapters merged in fp32, as its forward adds them."""
    where, state = type(model).__name__, model.state_dict()
    own = {_plain(name): name for name in state if not _BESIDE.search(f".{name}") and isinstance(state[name], Tensor)}
    base = _of_dictionary(where, {name: state[inside] for name, inside in own.items()})
    layers: Any = {
        f"{_plain(f'{name}.base_layer')}.weight": each
        for name, each in model.named_modules()
        if hasattr(each, "lora_A")
    }
    if not layers:
        return base
    for name, layer in layers.items():
        if name not in base.shapes or len(layer.lora_A) == 0 or any(getattr(layer, "use_dora", {}).values()):
            raise MantissaError(
                f"{where}: {name} has adapters that are not B A (DoRA, an embedding's); merge them first"
            )

    def read(name: str) -> Stored:
        layer, stored = layers.get(name), base.read(name)
        if layer is None or layer.merged or layer.disable_adapters:
            return stored
        parts = [
            (layer.lora_B[each].weight.detach().cpu(), layer.lora_A[each].weight.detach().cpu(), layer.scaling[each])
            for each in layer.active_adapters if each in layer.lora_A
        ]  # fmt: skip
        return _merged(stored.values, parts, layer.fan_in_fan_out)

    return Held(where, base.shapes, read, base)


def _of_server(server: ServedWeights) -> Held:
    digests = server.digests()
    made = _with_scales(server.url, {name: each.shape for name, each in digests.items()}, server.read)
    return replace(made, digests=digests, readable=server.files)


def _of_dictionary(where: str, tensors: Mapping[str, Tensor]) -> Held:
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    return _with_scales(where, shapes, lambda name: tensors[name].detach().cpu())


def _of_gguf(name: str) -> Held:
    found, read = open_gguf(find_model(name))
    shapes = {each: shape for each, (_, shape) in found.items()}
    return Held(name, shapes, lambda each: Stored(read(each), grid=found[each][0]))


def _of_file(path: Path) -> Held:
    if path.suffix == ".safetensors":
        return _of_safetensors(str(path), [path])
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        raise MantissaError(
            f"{path}: expected weights: a model's folder, .safetensors, .gguf, .pt, .pth, .bin or .ckpt"
        )
    found: Any = read_torch(path)
    for name in _DICTIONARIES:
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    tensors = {str(k): v for k, v in found.items() if isinstance(v, Tensor)} if isinstance(found, dict) else {}
    if not tensors:
        raise MantissaError(f"{path}: no weights by name in it; expected a state dict, or one under {_DICTIONARIES[0]}")
    return _of_dictionary(str(path), tensors)


def _of_folder(folder: Path, base: str | Path | None) -> Held:
    for inside in ("actor/huggingface", "huggingface"):  # of verl, above the folder and in it
        if (folder / inside).is_dir():
            return _of_folder(folder / inside, base)
    if (folder / "policy.safetensors").is_file():
        return _of_safetensors(str(folder), [folder / "policy.safetensors"])
    if (folder / "adapter_config.json").is_file() and not list(folder.glob("model*.safetensors")):
        return _with_adapters(folder, base)
    if not list(folder.glob("*.safetensors")):
        for pattern, what in _SHARDS.items():
            if any(folder.glob(pattern)) or any(folder.glob(f"*/{pattern}")):
                raise MantissaError(f"{folder}: no safetensors, but {what}")
        if (folder / "pytorch_model.bin").is_file():
            return _of_file(folder / "pytorch_model.bin")
    return _of_safetensors(str(folder), weight_files(folder))


_SHARDS = {
    "model_world_size_*_rank_*.pt": "verl's shards; merge them (python -m verl.model_merger merge), or save "
    "actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    "*.distcp": "a distributed checkpoint; turn it into one file (torch.distributed.checkpoint.format_utils)",
    "*model_states.pt": "DeepSpeed's shards; merge them with the zero_to_fp32.py that lies beside them",
}


def _of_safetensors(where: str, files: list[Path]) -> Held:
    shapes, places = dict[str, tuple[int, ...]](), dict[str, Path]()
    for file in files:
        with boundary(f"{file}: truncated or damaged", "fetch the file again"):
            found = tensor_shapes(file)
        shapes |= found
        places |= dict.fromkeys(found, file)

    def read(name: str) -> Tensor:
        file = places[name]
        with boundary(f"{file}: truncated or damaged", "fetch the file again"), open_tensors(file, name) as (_, one):
            return next(one)[1]

    return _with_scales(where, shapes, read)


def _with_scales(where: str, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> Held:
    """Scales go with their codes."""
    scales = {f"{name}{end}": name for name in shapes for end in _SCALES if f"{name}{end}" in shapes}
    of = {name: scale for scale, name in scales.items()}

    def stored(name: str) -> Stored:
        tensor = read(name)
        if name not in of:
            return Stored(tensor)
        spread = _spread(f"{where}: {of[name]}", read(of[name]).float(), tensor.shape)
        return Stored(tensor.float() * spread, tensor, spread)

    names = [name for name in shapes if name not in scales and not name.endswith(_ROTARY)]
    return Held(where, {name: shapes[name] for name in names}, stored)


def _spread(what: str, scales: Tensor, shape: torch.Size) -> Tensor:
    """One scale for each code: of a tensor, of rows, or of square blocks of 128."""
    if scales.numel() == 1:
        return scales.reshape(()).expand(shape)
    if scales.shape[0] == shape[0] and scales.numel() == shape[0]:
        return scales.reshape(-1, *([1] * (len(shape) - 1))).expand(shape)
    blocks = tuple(-(-size // 128) for size in shape[-2:])
    if tuple(scales.shape[-2:]) != blocks or len(shape) < 2:
        raise MantissaError(
            f"{what} has shape {tuple(scales.shape)}: expected one scale, one a row, or {blocks} blocks"
        )
    return scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]


def _with_adapters(folder: Path, base: str | Path | None) -> Held:
    """W + s B A in fp32, of peft's files."""
    settings = read_object(folder / "adapter_config.json")
    named = base or settings.get("base_model_name_or_path") or ""
    try:
        below = held(named)
    except MantissaError as error:
        raise MantissaError(f"{folder}: adapters, whose base is needed ({error}); give it by --base") from None
    scale = _scale(folder, settings)
    tensors = {_plain(name): each for name, each in read_tensors(folder / "adapter_model.safetensors").items()}
    pairs = {name.removesuffix(".lora_A.weight"): each for name, each in tensors.items() if "lora_A" in name}
    missing = [name for name in pairs if f"{name}.lora_B.weight" not in tensors or f"{name}.weight" not in below.shapes]
    if not pairs:
        raise MantissaError(f"{folder}: no adapter in it; expected lora_A and lora_B of projections")
    if missing:
        raise MantissaError(
            f"{folder}: {missing[0]} has no lora_B, or no weight in the base; is {below.where} its base?"
        )
    for name, low in pairs.items():
        high, shape = tensors[f"{name}.lora_B.weight"].shape, below.shapes[f"{name}.weight"]
        if len(high) != 2 or low.ndim != 2 or (high[0], low.shape[1]) != shape or high[1] != low.shape[0]:
            raise MantissaError(
                f"{folder}: {name} has adapters of {tuple(high)} and {tuple(low.shape)}, and {below.where} a weight of "
                f"{shape}; give the base that they were trained on"
            )

    trained = {name: each for name, each in tensors.items() if "lora_" not in name}  # whole, as modules_to_save

    def read(name: str) -> Stored:
        if name in trained:
            return Stored(trained[name])
        module = name.removesuffix(".weight")
        weight = below.read(name)
        if module not in pairs:
            return weight
        return _merged(weight.values, [(tensors[f"{module}.lora_B.weight"], pairs[module], scale)])

    return Held(str(folder), below.shapes, read, below)


def _merged(w: Tensor, adapters: list[tuple[Tensor, Tensor, float]], turned: bool = False) -> Stored:
    """W + s B A of (B, A, s), rounded once to fp32, and the bound of what fp32 makes of it in any order.

    A sum of r products, their scaling and the addition to W: (r + 2) roundings of 2^-24 each (N. Higham, "Accuracy and
    stability of numerical algorithms", 2002, section 3.1), and those of what is here; ``turned``: B A is transposed.
    """
    whole, size, steps = w.double(), w.double().abs(), 3
    for high, low, scale in adapters:
        product, magnitude = high.double() @ low.double(), high.double().abs() @ low.double().abs()
        whole = whole + scale * (product.T if turned else product)
        size = size + abs(scale) * (magnitude.T if turned else magnitude)
        steps += low.shape[0] + 2
    return Stored(whole.float(), slack=(steps * 2.0**-24 * size).float())


def _plain(name: str) -> str:
    """A tensor's name without what peft puts into it."""
    name = re.sub(r"\.modules_to_save\.\w+\.", ".", name.removeprefix("base_model.model."))
    return name.replace(".base_layer", "").replace(".default.", ".")


def _scale(folder: Path, settings: Mapping[str, Any]) -> float:
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)) or rank < 1:
        raise MantissaError(f"{folder}/adapter_config.json: r={rank!r}, lora_alpha={alpha!r}; expected two numbers")
    if settings.get("use_dora") or settings.get("rank_pattern") or settings.get("alpha_pattern"):
        raise MantissaError(f"{folder}: DoRA, or ranks by layer; merge it first (model.merge_and_unload())")
    return float(alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank)


_MOST_BYTES = 64 << 20  # of one answer
_TIMEOUT_S = 600.0  # of silence: to read a model of billions by its products takes a while
_START = f"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls {EXTENSION}"


def is_address(source: object) -> bool:
    """Whether ``source`` is written as a server's address."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


@dataclass(frozen=True)
class ServedWeights:
    """``url``: of the server; ``files``: whether its tensors may come by way of this machine's files."""

    url: str
    files: bool
    timeout_s: float = _TIMEOUT_S

    @staticmethod
    def at(url: str, remote: bool = False) -> ServedWeights:
        """``MantissaError``: no address, or another machine's where ``remote`` is not asked for."""
        expected = f"{url}: expected a vLLM's address, such as http://127.0.0.1:8000"
        parts = server_address(url, expected)
        if parts.scheme != "http" or parts.path.strip("/") not in ("", "v1"):
            raise MantissaError(expected)
        if not remote and not is_this_machine(url):
            raise MantissaError(
                f"{url} is another machine; run mantissa weights there, or give --remote, which compares digests alone"
            )
        return ServedWeights(f"http://{parts.netloc}", files=not remote)

    def digests(self) -> dict[str, Digest]:
        """Of every tensor, by its name. ``MantissaError``: no such server, or it cannot read one of them."""
        found = {}
        for name, text in self._ask("mantissa_weights").items():
            try:
                found[name] = Digest.parse(str(text))
            except MantissaError:
                raise MantissaError(f"{self.url}: its {name} cannot be read: {str(text)[:100]}") from None
        return found

    def read(self, name: str) -> Tensor:
        """One tensor, by way of a file. ``MantissaError`` where the engine does not see this machine's files."""
        with tempfile.TemporaryDirectory(prefix="mantissa-weights-") as folder:
            path = Path(folder) / "read.safetensors"
            self._ask("mantissa_write", names=[name], path=str(path))
            if not path.is_file():
                raise MantissaError(
                    f"{self.url} wrote {name} to {path}, and it is not there: the engine has another file system; run "
                    "mantissa weights beside it, or give --remote, which compares digests alone"
                )
            with boundary(f"{path}: truncated or damaged", "ask again"), open_tensors(path, name) as (_, one):
                return next(one)[1].clone()

    def _ask(self, method: str, **arguments: Any) -> Mapping[str, Any]:
        address = urlsplit(self.url)
        key = known_key(address.port or 80, is_this_machine(self.url))
        how: dict[str, Any] = {"timeout_s": self.timeout_s, "most_bytes": _MOST_BYTES, "key": key}
        body = {"method": method, "kwargs": arguments}
        try:
            status, text = http_answer("POST", f"{self.url}/collective_rpc", body, **how)
        except OSError as error:
            raise MantissaError(f"{self.url}: no vLLM answers ({error}); start one: {_START}") from error
        if status == UNAUTHORIZED:
            raise MantissaError(f"{self.url} wants its key; set VLLM_API_KEY to it")
        if status == NOT_FOUND:
            raise MantissaError(
                f"{self.url} lets no worker be asked (it has no /collective_rpc); start it so: {_START}"
            )
        if status != OK:
            raise MantissaError(
                f"{self.url}: its worker has no {method}, or failed ({status}; its own log says more); start it so: "
                f"{_START}"
            )
        with boundary(f"{self.url}: no answer of vLLM's", f"expected one that was started so: {_START}"):
            results = parse_json(text)["results"]
            if len(results) != 1 or not isinstance(results[0], dict):
                raise MantissaError(
                    f"{self.url}: its weights lie in {len(results)} workers, and one is expected; start it with "
                    "--tensor-parallel-size 1 --pipeline-parallel-size 1"
                )
            return dict(results[0])
