"""``import vllm`` for processes that a test starts with this folder in ``PYTHONPATH``: the stand-in of ``fake_vllm``.

``STAND_IN_SEEN``: a folder, where ``<rank>.jsonl`` tells of each vLLM of a rank what it was started with and every set
of weights that was read back from it. ``STAND_IN_FAULTS``: JSON, the faults of each rank's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

import fake_vllm

__version__ = "0.32.0"
SamplingParams = SimpleNamespace


class LLM(fake_vllm.LLM):
    def __init__(self, **options: Any) -> None:
        self.rank = str(dist.get_rank() if dist.is_initialized() else 0)
        self.fault = fake_vllm.Fault(**json.loads(os.environ.get("STAND_IN_FAULTS", "{}")).get(self.rank, {}))
        launchers = sorted(name for name in os.environ if "RANK" in name or name.startswith(("TORCHEL", "MASTER_")))
        self.tell({"folder": options["model"], "launchers": launchers, "threads": os.environ["OMP_NUM_THREADS"]})
        super().__init__(**options)

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        results = super().collective_rpc(method, kwargs)
        if method == "mantissa_weights":
            self.tell({"weights": results[0]})
        return results

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.tell({"samples": len(prompts)})
        return super().generate(prompts, params, use_tqdm)

    def _shutdown(self, timeout: float) -> None:
        super()._shutdown(timeout)
        self.tell({"closed": True})

    def tell(self, what: dict[str, Any]) -> None:
        if "STAND_IN_SEEN" in os.environ:
            with (Path(os.environ["STAND_IN_SEEN"]) / f"{self.rank}.jsonl").open("a") as file:
                file.write(json.dumps(what) + "\n")
