"""One rank of a scenario with verl's engines: ``python verl_engine_worker.py SCENARIO FOLDER``; what it saw as JSON.

A process of its own, since verl fixes its platform as it is imported and a process group is one a process.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Seen = dict[str, Any]
TOGETHER = {"agg": "seq-mean-token-mean", "use_kl_loss": True, "kl_loss_coef": 0.0}


def see(scenario: str, folder: Path, ranks: int = 1, seconds: float = 400) -> Seen:
    """Run a scenario on ``ranks`` processes; what rank 0 saw."""
    from verl_job import ROOT, make_inputs

    make_inputs(folder)
    (folder / "store").unlink(missing_ok=True)
    others = filter(None, [os.environ.get("PYTHONPATH")])
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "support"), *others])
    command = [sys.executable, "-W", "ignore", __file__, scenario, str(folder)]
    common = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    logs = [(folder / f"{scenario}-{rank}.log").open("w+") for rank in range(ranks)]
    processes = [
        subprocess.Popen(command, env=common | {"RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + seconds
    try:
        codes = [process.wait(max(1.0, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    for code, log in zip(codes, logs, strict=True):
        log.seek(0)
        assert code == 0, log.read()[-6000:]
        log.close()
    return json.loads((folder / f"{scenario}.json").read_text())


def _step(engine: Any, data: Any, loss: Callable[..., Any], times: float = 1.0) -> Seen:
    """One training step of an engine, with the loss multiplied by ``times``."""

    def louder(**arguments: Any) -> Any:
        value, metrics = loss(**arguments)
        return value * times, metrics

    before = _weights(engine)
    with engine.train_mode():
        found = engine.train_batch(data, louder)
    after, metrics = _weights(engine), found["metrics"]
    changed = [name for name in after if not after[name].equal(before[name])]
    finite = all(bool(value.isfinite().all()) for value in after.values())
    if "grad_norm" not in metrics:  # of a rank that verl does not ask
        return {"changed": len(changed), "of": len(after), "finite": finite}
    ours = {name: value for name, value in metrics.items() if name.startswith("mantissa/")}
    said = {name.partition("/")[2]: getattr(value, "values", value)[0] for name, value in ours.items()}
    return {"changed": len(changed), "of": len(after), "finite": finite, "norm": metrics["grad_norm"], **said}


def _weights(engine: Any) -> dict[str, Any]:
    found = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in engine.module.named_parameters()}
    return {name: p.detach().clone() for name, p in found.items()}


def _equal(one: Any, other: Any) -> bool:
    left, right = _weights(one), _weights(other)
    return all(left[name].equal(right[name]) for name in left)


def spikes(folder: Path, rank: int, world: int) -> Seen:
    """A loss 2^12 times too large for the first scale, as verl's engine takes it and as ours does."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    import verl_engines as ve

    loss, data = ve.loss_of(), [ve.batch(rank, world, seed=i) for i in range(4)]
    alone = ve.engine(folder, "fsdp2", param_dtype="fp16")
    seen: Seen = {"verl's scaler is on": alone.scaler.is_enabled()}
    theirs = ve.engine(folder, "fsdp2", param_dtype="fp16")
    theirs.scaler = ShardedGradScaler(device="cpu", growth_interval=400)  # as it is on a GPU
    seen["verl"] = [_step(theirs, each, loss, 256.0) for each in data]
    seen["verl's scale"] = theirs.scaler.get_scale()
    theirs.save_checkpoint(str(folder / f"theirs{world}"))
    again = ve.engine(folder, "fsdp2", param_dtype="fp16")
    again.scaler = ShardedGradScaler(device="cpu", growth_interval=400)
    again.load_checkpoint(str(folder / f"theirs{world}"))
    seen["verl's scale, resumed"] = again.scaler.get_scale()

    ours = ve.engine(folder, "mantissa_fsdp2", param_dtype="fp16")
    seen["ours"] = [_step(ours, each, loss, 256.0) for each in data]
    learner = ve.engine(folder, "mantissa", precision="fp16", length=32)
    seen["mantissa"] = [_step(learner, each, loss, 256.0) for each in data]
    lower = ve.engine(
        folder, "mantissa_fsdp2", param_dtype="fp16", loss_scaling={"initial": seen["ours"][0]["loss_scale"]}
    )
    for each in data:
        _step(lower, each, loss, 256.0)
    seen["as if the scale had been lower"] = _equal(ours, lower)
    seen["given up"] = _step(ours, data[0], loss, float("inf"))
    ours.save_checkpoint(str(folder / f"ours{world}"))
    resumed = ve.engine(folder, "mantissa_fsdp2", param_dtype="fp16")
    resumed.load_checkpoint(str(folder / f"ours{world}"))
    state = [engine.step.state_dict() for engine in (ours, resumed)]
    seen["state"], seen["state, resumed"] = state
    for engine in (ours, resumed):
        _step(engine, data[3], loss)
    seen["goes on equal"] = _equal(ours, resumed)
    return seen


def flowrl(folder: Path, rank: int, world: int) -> Seen:
    """One FlowRL step in fp32 against the native learner's on the same rows; then bf16, fp16, a retry, a resume."""
    import verl_engines as ve

    settings = {"partition_dropout": 0.0, "partition_lr": 3e-3}
    loss, data = ve.loss_of("flowrl", **TOGETHER), ve.batch(rank, world)
    mine = ve.engine(folder, "mantissa_fsdp2", param_dtype="fp32", flowrl=settings)
    with mine.train_mode():
        found = mine.train_batch(data, loss)
    moments = {name: mine.optimizer.state[p]["exp_avg"] for name, p in mine.step.parameters.items()}
    moments = {name: m.full_tensor() if hasattr(m, "full_tensor") else m for name, m in moments.items()}
    native, theirs = _native(folder, settings, ve.batch())
    exact = _oracle(folder, settings, ve.batch())
    total = torch_mean(sum(found["loss"]))
    seen: Seen = {
        "loss": total,
        "native": native,
        "norm": found["metrics"]["grad_norm"],
        "same names": sorted(moments) == sorted(theirs) == sorted(exact),
        "gap to native": _apart(moments, theirs),
        "gap to float64": _apart(moments, exact),
        "native's gap to float64": _apart(theirs, exact),
        "rates": [group["lr"] for group in mine.optimizer.param_groups],
    }
    for dtype in ("bf16", "fp16"):
        low = ve.engine(folder, "mantissa_fsdp2", param_dtype=dtype, flowrl={})
        seen[dtype] = _step(low, data, loss)
    head = low.flowrl.flow.weights  # of fp16
    seen["fp16, louder"] = _step(low, ve.batch(rank, world, seed=1), loss, 256.0)
    low.save_checkpoint(str(folder / f"flowrl{world}"))
    resumed = ve.engine(folder, "mantissa_fsdp2", param_dtype="fp16", flowrl={})
    resumed.load_checkpoint(str(folder / f"flowrl{world}"))
    for engine in (low, resumed):
        _step(engine, ve.batch(rank, world, seed=2), loss)
    after = resumed.flowrl.flow.weights
    seen["goes on equal"] = _equal(low, resumed) and all(after[name].equal(head[name]) for name in head)
    gathered: list[Any] = [None] * world
    import torch

    torch.distributed.all_gather_object(gathered, {name: value.clone() for name, value in after.items()})
    seen["one head"] = all(other[name].equal(gathered[0][name]) for other in gathered for name in after)
    return seen


def torch_mean(value: float) -> float:
    """The mean of a number over ranks."""
    import torch

    tensor = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(tensor)
    return float(tensor) / torch.distributed.get_world_size()


def _native(folder: Path, settings: Seen, data: Any) -> tuple[Seen, dict[str, Any]]:
    """The native learner's FlowRL step on the whole batch in one process: its numbers, and the first moments."""
    import torch

    from mantissa.kernels import NativeKernels
    from mantissa.model import load_model
    from mantissa.precision import FP32
    from mantissa.rl.config.sections import AlgorithmConfig, OptimizerConfig
    from mantissa.rl.experience import Sequences, Weighed
    from mantissa.rl.learner import Learner
    from mantissa.rl.score import ReferencePolicy
    from mantissa.rollout import CopiedPolicy
    from mantissa.training import LossScaler

    algorithm = AlgorithmConfig(loss={"kind": "flowrl", **settings}, reference={}, advantage="grpo")
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=1.0, weight_decay=0.01, betas=(0.9, 0.999), warmup=0)
    model, kernels = load_model(folder / "model"), NativeKernels(FP32)
    copies = CopiedPolicy(model.config, kernels, torch.device("cpu"), "reference")
    reference = ReferencePolicy(copies, kernels, temperature=1.0, micro_batch_tokens=4096)
    learner = Learner(
        model, kernels, algorithm, optimizer, LossScaler.disabled(),
        temperature=1.0, aggregation_length=1.0, seed=42, steps=100, reference=reference,
    )  # fmt: skip
    prompts, responses = ([row.tolist() for row in data[name].unbind()] for name in ("prompts", "responses"))
    whole = Sequences.build(prompts, responses, torch.device("cpu"))

    def padded(name: str) -> Any:
        return torch.nested.to_padded_tensor(data[name], 0.0)

    rows = len(whole)
    experience = Weighed(
        **{name: getattr(whole, name) for name in ("tokens_BT", "prompt_length_B", "length_B", "mask_BR")},
        rollout_logp_BR=padded("old_log_probs"),
        reward_B=torch.zeros(rows),
        terms_BK=torch.zeros(rows, 1),
        term_weights_BK=torch.ones(rows, 1),
        group_B=torch.arange(rows) // 4,
        version_B=torch.zeros(rows, dtype=torch.int64),
        old_logp_BR=padded("old_log_probs"),
        columns={"ref_logp_BR": padded("ref_log_prob")},
        advantage_B=padded("advantages")[:, 0],
        advantage_BR=padded("advantages"),
        weight_BR=padded("rollout_is_weights"),
        valid_BR=whole.mask_BR,
    )
    update = learner.learn(experience, 0)
    outcome = update.outcomes[0]
    loss = float(update.tallies["policy/loss"].value())
    moments = {name: learner.step.optimizer.state[p]["exp_avg"] for name, p in learner.step.parameters.items()}
    return {"loss": loss, "norm": outcome.grad_norm}, copy.deepcopy(moments)


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """||one - other|| / ||other|| over all tensors."""
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in other)
    return (apart / sum(float(other[name].double().square().sum()) for name in other)) ** 0.5


def _oracle(folder: Path, settings: Seen, data: Any) -> dict[str, Any]:
    """Adam's first moments after FlowRL's step, everything in float64 through transformers' model, row by row."""
    import torch
    from transformers import AutoModelForCausalLM

    from mantissa.algorithms.losses.flowrl import FlowRLConfig
    from mantissa.base.seeds import generator
    from mantissa.model import LogPartition

    config = FlowRLConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="eager")
    head = LogPartition(64, 0.0).initialize(generator(42, "partition")).double()
    total = torch.zeros((), dtype=torch.float64)
    columns = ("input_ids", "prompts", "old_log_probs", "ref_log_prob", "rollout_is_weights", "advantages")
    for ids, prompt, old, ref, weight, advantage in zip(*(data[name].unbind() for name in columns), strict=True):
        hidden = model.model(input_ids=ids.unsqueeze(0)).last_hidden_state[0]
        logp = torch.log_softmax(model.lm_head(hidden[len(prompt) - 1 : -1]), -1)
        logp = logp.gather(1, ids[len(prompt) :].unsqueeze(1)).squeeze(1)
        delta = head(hidden[: len(prompt)].mean(0, keepdim=True))[0] + (logp - ref.double()).mean()
        delta = delta - config.beta * advantage[0].double()
        ratio = (logp.detach() - old.double()).mean().exp().clamp(*config.bounds)
        total = total + ratio * weight.double().mean() * delta.square() / len(data)
    total.backward()
    parameters = dict(model.named_parameters()) | {f"partition.{n}": p for n, p in head.named_parameters()}
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values()])
    return {name: 0.1 * p.grad / norm.clamp(min=1) for name, p in parameters.items()}


def fixed_point(folder: Path, rank: int, world: int) -> Seen:
    """Many steps on one batch, by each engine in each format: delta goes to 0 where the reference, tilted by the
    reward, is what the policy says; and there the gradient is 0."""
    import verl_engines as ve

    data, loss = ve.batch(rank, world), ve.loss_of("flowrl", **TOGETHER)
    settings = {"flowrl": {"beta": 1.0, "partition_dropout": 0.0}}
    found: Seen = {}
    for strategy in ("mantissa_fsdp2", "mantissa"):
        for name in ("fp32", "bf16", "fp16"):
            given = {"param_dtype": name} if strategy == "mantissa_fsdp2" else {"precision": name, "length": 32}
            engine = ve.engine(folder, strategy, lr=3e-3, **given, **settings)
            delta, norm = [], []
            for _ in range(120):
                with engine.train_mode():
                    seen = engine.train_batch(data, loss)
                values = seen["metrics"]["flowrl/delta_abs_mean"].values
                delta.append(sum(values) / len(values))
                norm.append(seen["metrics"]["grad_norm"])
            found[f"{strategy} {name}"] = {"delta": delta, "norm": norm}
    return found


def refusals(folder: Path, rank: int, world: int) -> Seen:
    """What each mistake is answered with."""
    import verl_engines as ve
    from mantissa.base.errors import MantissaError

    data = ve.batch()
    flow = ve.engine(folder, "mantissa_fsdp2", param_dtype="fp32", flowrl={})
    verls = ve.engine(folder, "fsdp2", param_dtype="fp32")
    lacking = data.exclude("ref_log_prob")
    uneven = data.clone()
    uneven["advantages"].values()[0] += 1
    ours = "mantissa_fsdp2"
    attempts: dict[str, Callable[[], Any]] = {
        "unknown": lambda: ve.engine(folder, ours, param_dtpye="fp16"),
        "nested": lambda: ve.engine(folder, ours, param_dtype="fp16", loss_scaling={"growth": 3}),
        "no effect": lambda: ve.engine(folder, ours, param_dtype="bf16", loss_scaling={"initial": 4.0}),
        "no head": lambda: _step(verls, data, ve.loss_of("flowrl", **TOGETHER)),
        "no reference": lambda: _step(flow, lacking, ve.loss_of("flowrl", **TOGETHER)),
        "another loss": lambda: _step(flow, data, ve.loss_of()),
        "another mean": lambda: _step(flow, data, ve.loss_of("flowrl")),
        "not grpo": lambda: _step(flow, uneven, ve.loss_of("flowrl", **TOGETHER)),
        "a penalty": lambda: _step(flow, data, ve.loss_of("flowrl", **(TOGETHER | {"kl_loss_coef": 0.1}))),
        "a clip": lambda: _step(flow, data, ve.loss_of("flowrl", **(TOGETHER | {"clip_ratio_high": 0.28}))),
    }
    seen: Seen = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            seen[name] = "nothing"
        except MantissaError as error:
            seen[name] = str(error)
    return seen


def overhead(folder: Path, rank: int, world: int) -> Seen:
    """Seconds of a step by verl's engine and by ours in fp32, interleaved, on one batch; and whether they agree."""
    import verl_engines as ve

    data, loss = ve.batch(groups=8), ve.loss_of()
    engines = {name: ve.engine(folder, name, param_dtype="fp32") for name in ("fsdp2", "mantissa_fsdp2")}
    taken: Seen = {name: [] for name in engines}
    for turn in range(60):
        for name in sorted(engines, reverse=bool(turn % 2)):
            with engines[name].train_mode():
                begun = time.perf_counter()
                engines[name].train_batch(data, loss)
                taken[name].append(time.perf_counter() - begun)
        if turn == 2:
            taken["same bits"] = _equal(*engines.values())
    return taken


def variants(folder: Path, rank: int, world: int) -> Seen:
    """Ways of verl's own to hold and share the learner, each beside the engine without it and beside verl's."""
    import importlib.util

    import verl_engines as ve

    loss = ve.loss_of()
    shared = {"ulysses_sequence_parallel_size": world}
    ways: dict[str, tuple[Seen, Seen]] = {
        "plain": ({}, {}),
        "ulysses": (shared, {}),
        "offload": ({"param_offload": True, "optimizer_offload": True}, {}),
        "a sum a micro-batch": ({"use_no_sync_for_gradient_accumulation": False}, {}),
    }
    if importlib.util.find_spec("torchao"):
        import torch

        torch.compile = lambda function, **_: (
            function
        )  # torchao's step, compiled, wants slices of one size on all ranks
        ways["8-bit AdamW"] = ({}, {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"})
    engines: dict[str, Any] = {}
    seen: Seen = {}
    # the packed forward comes last: its attention takes the place of the other in this process
    for way in sorted(ways, key="ulysses".__eq__):
        section, optim = ways[way]
        together = bool(section.get("ulysses_sequence_parallel_size"))
        data = [ve.batch(*((0, 1) if together else (rank, world)), seed=i, packed=together) for i in range(3)]

        def made(strategy: str, name: str, section: Seen = section, optim: Seen = optim) -> Any:
            return ve.engine(folder, strategy, section=section, optim=optim, param_dtype=name)

        ours, theirs = made("mantissa_fsdp2", "fp32"), made("fsdp2", "fp32")
        for each in data:
            _step(ours, each, loss)
            _step(theirs, each, loss)
        engines[way] = ours
        half = made("mantissa_fsdp2", "fp16")
        louder = [_step(half, each, loss, 256.0) for each in data]
        half.save_checkpoint(str(folder / f"{way}{world}"))
        resumed = made("mantissa_fsdp2", "fp16")
        resumed.load_checkpoint(str(folder / f"{way}{world}"))
        for engine in (half, resumed):
            _step(engine, data[0], loss)
        seen[way] = {
            "verl's bits": _equal(ours, theirs),
            "gap": _apart(_weights(ours), _weights(engines["plain"])),
            "louder": louder,
            "goes on equal": _equal(half, resumed),
            "collects": ours.is_mp_src_rank_with_outputs(),
        }
    start = ve.engine(folder, "mantissa_fsdp2", param_dtype="fp32")
    seen["moved"] = _apart(_weights(engines["plain"]), _weights(start))
    return seen


def sync(folder: Path, rank: int, world: int) -> Seen:
    """What ranks say of their slices, beside what each engine sends: the digests, and the tensors themselves. With the
    processor time of the digests and of a training step."""
    from types import SimpleNamespace

    import torch

    import verl_engines as ve
    from mantissa.base.tensors import digest
    from mantissa.verl.sync import _slices_of, _whole_of

    data, loss, seen = ve.batch(rank, world), ve.loss_of(), {}
    for name in ("fsdp2", "mantissa_fsdp2", "mantissa"):
        engine = ve.engine(folder, name, **({} if name == "mantissa" else {"param_dtype": "fp32"}))
        begun = time.process_time()
        with engine.train_mode():
            engine.train_batch(data, loss)
        trained = time.process_time()
        worker = SimpleNamespace(worker_dict={"actor": SimpleNamespace(actor=SimpleNamespace(engine=engine))})
        sent = {key: tensor.detach().cpu() for key, tensor in engine.get_per_tensor_param(base_sync_done=True)[0]}
        asked = {key.removeprefix("model."): ["float32", "bfloat16"] for key in sent}
        begun, step = time.process_time(), trained - begun
        parts = [None] * world
        torch.distributed.all_gather_object(parts, _slices_of(worker, asked))
        took = time.process_time() - begun
        wrong = []
        for key, tensor in sent.items():
            for kind in ("float32", "bfloat16"):
                total = sum(part[key.removeprefix("model.")][1][kind] for part in parts) % (1 << 64)
                if total != digest(tensor.to(getattr(torch, kind))).total:
                    wrong.append((key, kind))
        whole = _whole_of(worker, list(asked))
        same = rank != 0 or all(whole[key.removeprefix("model.")].equal(sent[key]) for key in sent)
        seen[name] = {"tensors": len(sent), "wrong": wrong, "whole": same, "step": step, "took": took}
    return seen


SCENARIOS = {each.__name__: each for each in (spikes, variants, flowrl, fixed_point, refusals, overhead, sync)}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    import verl_engines as ve

    rank, world = ve.join(folder)
    seen = SCENARIOS[name](folder, rank, world)
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(seen))
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
