"""The weights of a vLLM that is running, as its worker computes with them (``rollout/vllm/worker.py``).

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls mantissa.rollout.vllm.worker.WeightReader

Asked are digests of all. Where one is another than the trainer's, the worker writes that tensor into a folder of this
process, which both see; of a server on another machine nothing but digests is asked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from mantissa.base.bounds import boundary
from mantissa.base.errors import MantissaError
from mantissa.base.http import NOT_FOUND, OK, http_answer, is_this_machine, server_address
from mantissa.base.readers.json import parse_json
from mantissa.base.readers.safetensors import open_tensors
from mantissa.base.tensors import Digest
from mantissa.rollout.vllm.key import UNAUTHORIZED, known_key
from mantissa.rollout.vllm.worker import EXTENSION

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
