"""``mantissa launch RECIPE --on verl --local``: what the exporter writes for a recipe, at a size for this machine, and
the job on this machine alone.

The job is verl's own, with every key that the recipe exports. What a processor cannot bear is replaced before the
export, and what was replaced is said: the model and the problems by tiny ones, sizes, steps, machines, and the
rollout's engine by Mantissa's, which needs no GPU. An override of the command wins over each of them.

It runs with a Ray of its own, of which nothing is left when ``run_local`` returns. Ray listens on every interface, so
the job gets a network of its own where the kernel gives one (``mantissa.launch.loopback``), and asks for a token in any
case. Every process carries a tag in its environment, by which it is found and ended, however the job or this command
ends.

What it learned is said when it ends: that its weights moved is seen in the checkpoints. That they arrived is seen in
the tokens of the last step, which the gate wrote down with the log-probs of both sides: the policy of the checkpoint
before that step must score them as both sides did, and nearer than the policy before it. The formats leave a distance
in either case; weights that never came turn the two around.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import secrets
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.base.errors import MantissaError, RankError, pip_install
from mantissa.base.files import disk_errors
from mantissa.base.hub import find_model
from mantissa.base.readers.json import parse_json
from mantissa.base.readers.safetensors import read_tensors
from mantissa.doctor.dump import Scored
from mantissa.doctor.readers import read_dump
from mantissa.launch import loopback
from mantissa.launch.export import Plan, export, hydra_value
from mantissa.launch.options import load_options
from mantissa.rl import RunConfig, load_recipe
from mantissa.runs.directory import default_path
from mantissa.verl.gate import ROWS

STEPS = 2
_SEQUENCES = 32  # of the last step, scored again
_LR = 1e-3  # of a rehearsal: a cluster's rate and warm-up leave two steps' weights where they were
_PROMPT_TOKENS = 64
_HERE = {  # of verl and its Ray: as few processes as there can be
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "ray_kwargs.ray_init.num_cpus": 8,
    "+ray_kwargs.ray_init.include_dashboard": False,
    "+ray_kwargs.ray_init.object_store_memory": 200_000_000,
}
# One machine, on which the model lies whole.
_ALONE: dict[str, Any] = {"nodes": 1, "cuda": None, "offload": False, "rollout_tensor_parallel": 1} | dict.fromkeys(
    ("tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel", "sequence_parallel"), 1
)


@dataclass(frozen=True)
class Rehearsal:
    """``plan``: of the job on this machine. ``folder``: where verl writes its checkpoints, and this command its log and
    metrics. ``replaced``: what is otherwise than the recipe says, and what it is here. ``made``: whether model and
    problems are made in the folder. ``model``: the folder of the policy that the job begins with."""

    plan: Plan
    folder: Path
    steps: int
    replaced: tuple[tuple[str, str], ...]
    made: tuple[str, ...]
    model: Path

    def write_inputs(self) -> None:
        """Make the tiny policy and problems, unless an earlier job of this folder has."""
        inputs = self.folder / "inputs"
        with disk_errors(self.folder):
            inputs.mkdir(parents=True, exist_ok=True)
            if "model" in self.made and not (inputs / "model" / "config.json").exists():
                write_policy(inputs / "model")
            if "problems" in self.made and not (inputs / "heldout.parquet").exists():
                write_problems(inputs / "train.parquet", inputs / "heldout.parquet")

    def text(self) -> str:
        """What is other than in the recipe, to be read before the job starts."""
        width = max(len(name) for name, _ in self.replaced)
        lines = ["rehearsal on this machine's processor; other than in the recipe:"]
        return "\n".join([*lines, *(f"  {name:<{width}}  {value}" for name, value in self.replaced)])


def rehearse(recipe: Path, overrides: Sequence[str], options: Path | None, given: Mapping[str, Any]) -> Rehearsal:
    """The rehearsal of a recipe. ``overrides``: of the command; ``options``: the recipe's launch file, under ``given``.

    Raises ``MantissaError`` for what the exporter refuses, and for engines that need a GPU.
    """
    asked = load_recipe(recipe, overrides)
    keys = {item.partition("=")[0] for item in overrides}
    processes = given.get("gpus", 1)
    alone = dict(given) | _ALONE | {"gpus": processes}
    there = load_options(options, alone)
    if there.engine in ("megatron", "fsdp"):
        raise MantissaError(
            f"--local runs on a processor, and verl's engine {there.engine} needs GPUs: rehearse the recipe with "
            "--engine fsdp2, mantissa_fsdp2 or mantissa"
        )
    folder = Path(asked.run_dir or default_path(f"{asked.name}-on-verl")).absolute()
    sizes = _sizes(asked, folder, keys)
    mine = {key: value for key, value in there.overrides.items() if ".megatron." not in key}
    machine: dict[str, Any] = {"engine": there.engine, "rollout": "mantissa", "hardware": "cpu"}
    machine["overrides"] = {"+trainer.gate": "warn"} | mine | _HERE | {"+ray_kwargs.ray_init.num_gpus": processes}
    if "task.files" in sizes:
        machine["max_prompt_tokens"] = _PROMPT_TOKENS
    if str(asked.model.path).startswith("hub:") and "model.path" not in sizes:
        sizes["model.path"] = str(find_model(str(asked.model.path)))  # the job itself has no network
        overrides = [item for item in overrides if not item.startswith("model.path=")]
    config = load_recipe(recipe, [*(f"{key}={value}" for key, value in sizes.items()), *overrides])
    plan = export(config, load_options(options, alone | machine))
    replaced = [(key, _short(value, folder)) for key, value in sizes.items() if key not in keys]
    replaced.append(("machine", f"{processes} process{'es' if processes > 1 else ''} on cpu, rollout=mantissa"))
    inputs = {"model": sizes.get("model.path", ""), "problems": sizes.get("task.files", "")}
    made = [name for name, value in inputs.items() if str(folder / "inputs") in value]
    return Rehearsal(plan, folder, config.steps, tuple(replaced), tuple(made), Path(str(config.model.path)))


def _sizes(asked: RunConfig, folder: Path, keys: set[str]) -> dict[str, str]:
    """Overrides of the recipe that make it small; none that the command says itself."""
    updates, inputs = asked.optimizer.updates_per_batch, folder / "inputs"
    sizes: dict[str, Any] = {"run_dir": folder, "steps": STEPS, "trackers": "[]", "checkpoint.every": 1}
    if asked.task.kind == "dataset":
        sizes |= {"model.path": inputs / "model"}
        sizes |= {"task.files": f"[{inputs}/train.parquet]", "task.heldout_files": f"[{inputs}/heldout.parquet]"}
        sizes |= {"task.limit": "null"}
    sizes |= {"rollout.prompts": updates * max(2, math.ceil(12 / updates)), "rollout.samples": 8}  # the gate wants 12
    if asked.optimizer.warmup:
        sizes["optimizer.warmup"] = 0
    if asked.optimizer.lr < _LR:
        sizes["optimizer.lr"] = _LR
    sizes |= {"rollout.max_tokens": 16, "optimizer.micro_batch_tokens": 4096, "grading.workers": 1}
    if asked.rollout.overlong is not None:
        sizes["rollout.overlong.buffer"] = 4
    if asked.evaluation is not None:
        sizes |= {"evaluation.problems": 4, "evaluation.samples": min(asked.evaluation.samples, 2)}
    theirs = any(key == "task" or key.startswith("task.files") for key in keys)
    said = {key for key in sizes if any(key == own or key.startswith(f"{own}.") for own in keys)}
    said |= {key for key in sizes if theirs and key.startswith("task.")}
    return {key: str(value) for key, value in sizes.items() if key not in said}


def _short(value: str, folder: Path) -> str:
    return value.replace(f"{folder}/", "")


# A policy and problems small enough: random weights that are right now and then. A random policy that never earns
# anything has no gradient, and dynamic sampling would wait for it for ever. So a tenth of the vocabulary are whole
# answers, in every form that a verifier reads, and problems are sums of one digit: a response of sixteen tokens is
# right in one of some twelve times.


_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
_CHARACTERS = string.digits + string.ascii_letters + " +-*/=.?!:\n"
ANSWERS = tuple(f"\nAnswer: \\boxed{{{digit}}}\n" for digit in range(10))


def write_policy(
    folder: Path, *, answers: Sequence[str] = ANSWERS, head_dim: int = 16, family: str = "qwen3"
) -> None:  # fmt: skip
    """A Hugging Face folder: a model of two layers and 64 features, and a tokenizer of characters and answers.

    ``family``: transformers' name of it.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *_CHARACTERS, *answers))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    wrapped.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    wrapped.save_pretrained(folder)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        # transformers makes the pad token's row zero, and a random policy samples it as any other.
        model.get_input_embeddings().weight.data[0].normal_(0, 0.02)
    model.save_pretrained(folder)


def write_problems(train: Path, heldout: Path) -> None:
    """The 55 sums of one digit in DAPO's columns, some of them held out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sums = [(a, b) for a in range(10) for b in range(10 - a)]
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"{a}+{b}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, (a, b) in enumerate(sums)
    ]
    pq.write_table(pa.Table.from_pylist(rows[7:]), train)
    pq.write_table(pa.Table.from_pylist(rows[:7]), heldout)


TAG = "MANTISSA_LOCAL_JOB"  # the variable by which every process of a job is found
_HOST = "127.0.0.2"  # Ray puts the machine's outward address in the place of 127.0.0.1
_LOOK_S = 0.5
_ERROR = re.compile(
    r"^(?:\(.*?\) )?(?:ray\.exceptions\.\w+: )?((?:\w+\.)*\w*(?:Error|Exception)(?:\(\w+\))?: .+)$", re.M
)
_SHOWN = {
    "critic/score/mean": "score",
    "actor/grad_norm": "grad_norm",
    "rollout_corr/k3_kl": "gap k3_kl",
    "actor/mantissa/loss_scale": "loss scale",
    "actor/mantissa/skipped": "skipped",
}


@dataclass(frozen=True)
class LocalEnd:
    """How a job ended well. ``metrics``: by step, as verl logged them. ``policy``: the last one's folder. ``learned``:
    that its weights moved, arrived in the rollout and are what the checkpoint holds, in numbers."""

    metrics: dict[int, dict[str, Any]]
    policy: Path
    learned: tuple[str, ...]
    seconds: float


def listens() -> list[str]:
    """What would listen beyond the loopback interface; empty where the job gets a network of its own."""
    asked = [sys.executable, "-I", loopback.__file__, sys.executable, "-I", "-c", ""]
    if subprocess.run(asked, check=False, capture_output=True).returncode == 0:
        return []
    return [
        "this kernel gives a process no network of its own, so the Ray of this launch listens on every interface of "
        "this machine, on ports that it chooses; it asks for a token that only its own processes have (Ray 2.52 and "
        "newer), and verl's own connections ask for nothing"
    ]


def resumed_from(folder: Path) -> int:
    """The step of verl's last checkpoint in ``folder``, 0 where there is none: verl itself goes on from there."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "latest_checkpointed_iteration.txt").read_text())
    return 0


def run_local(rehearsal: Rehearsal, show: Callable[[str], None], *, isolated: bool) -> LocalEnd:
    """Run the job to its end; ``show`` gets a line for each step.

    Raises ``MantissaError`` where verl is not installed here or the folder has all steps already, ``RankError`` with
    the job's own last error where it fails, and with what is wrong where its weights did not move or arrive; and lets
    Ctrl-C through. In every case nothing is left running.
    """
    if importlib.util.find_spec("verl") is None:
        raise MantissaError(f"--local runs verl here, and it is not installed: {pip_install('verl')}")
    folder, first = rehearsal.folder, resumed_from(rehearsal.folder)
    if first >= rehearsal.steps:
        raise MantissaError(
            f"{folder} holds {first} steps, and steps={rehearsal.steps}: say more steps to go on, or another run_dir"
        )
    rehearsal.write_inputs()
    if first:
        show(f"going on from verl's checkpoint of step {first}")
    log, metrics = folder / "job.log", folder / f"metrics-from-{first + 1}.jsonl"
    metrics.unlink(missing_ok=True)
    begun, seen = time.monotonic(), 0
    with _job(rehearsal, log, metrics, isolated) as job:
        while job.poll() is None:
            time.sleep(_LOOK_S)
            seen = _tell(metrics, seen, show)
    _tell(metrics, seen, show)
    if job.returncode != 0:
        raise RankError(f"the job failed: {_last_error(log)}; its log: {log}")
    rows = dict(_rows(metrics))
    policy = policy_of(folder, rehearsal.steps)
    learned = learned_lines(folder, rehearsal.model, first, rehearsal.steps)
    return LocalEnd(rows, policy, learned, time.monotonic() - begun)


@contextlib.contextmanager
def _job(rehearsal: Rehearsal, log: Path, metrics: Path, isolated: bool) -> Iterator[subprocess.Popen[bytes]]:
    """The job's first process; when this is left, all of them are ended."""
    tag, short = secrets.token_hex(16), tempfile.mkdtemp(prefix="mverl", dir="/tmp")  # sockets want a short path
    ray = {"_node_ip_address": _HOST, "_temp_dir": short}
    command = [sys.executable, "-P", *rehearsal.plan.arguments[1:]]
    command += [f"+ray_kwargs.ray_init.{name}={value}" for name, value in ray.items()]
    command += [f"hydra.run.dir={hydra_value(str(rehearsal.folder / 'hydra'))}"]  # else it makes outputs/ here
    if isolated:
        command = [sys.executable, "-P", loopback.__file__, *command]
    variables = {one.name: one.value for one in rehearsal.plan.environment}
    variables[ROWS] = str(rehearsal.folder / "looked_at")
    try:
        with log.open("wb") as out:
            job = subprocess.Popen(
                command,
                # What libraries leave in the temporary folder when they are killed goes with it.
                env=_environment(variables | {TAG: tag, "TMPDIR": short, "VERL_FILE_LOGGER_PATH": str(metrics)}),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            yield job
    finally:
        end_processes(tag)
        with contextlib.suppress(NameError, UnboundLocalError):
            job.wait()
        shutil.rmtree(short, ignore_errors=True)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    package = str(Path(__file__).parents[2])
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VERL_"))}
    return own | {
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **variables,
    }


def end_processes(tag: str) -> None:
    """Kill every process whose environment has the tag, until none is left: Ray's, too, which leave their sessions."""
    for _ in range(50):
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _tagged(pid, tag)]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    raise RankError(f"processes {', '.join(map(str, left))} of the job do not end; end them by hand")


def _tagged(pid: int, tag: str) -> bool:
    try:
        return f"{TAG}={tag}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _rows(metrics: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    for row in map(parse_json, lines):
        yield int(row["step"]), row["data"]


def _tell(metrics: Path, seen: int, show: Callable[[str], None]) -> int:
    """Show the rows after the first ``seen``; how many there are."""
    rows = list(_rows(metrics))
    for step, row in rows[seen:]:
        said = [f"{name} {row[key]:.3g}" for key, name in _SHOWN.items() if isinstance(row.get(key), (int, float))]
        show("  ".join([f"step {step}", *said]))
    return len(rows)


def _last_error(log: Path) -> str:
    """The last error that the log names, in one line; Ray repeats one in many words."""
    text = log.read_text(errors="replace")
    found = _ERROR.findall(text)
    ours = [line.partition("MantissaError: ")[2] for line in found if "MantissaError: " in line]
    return (ours or found or ["it names no error"])[-1].strip()[:600]


def policy_of(folder: Path, step: int) -> Path:
    """The Hugging Face folder in verl's checkpoint after ``step``."""
    return folder / f"global_step_{step}" / "actor" / "huggingface"


def learned_lines(folder: Path, model: Path, first: int, last: int) -> tuple[str, ...]:
    """What the steps after ``first`` to ``last`` learned, in words. ``model``: what step 1 began with.

    Raises ``RankError`` where no weight moved, or where the rollout of the last step, or its learner, did not have the
    weights of the checkpoint before it.
    """
    before, after = policy_of(folder, first) if first else model, policy_of(folder, last)
    missing = next((each for each in (before, after) if not list(each.glob("*.safetensors"))), None)
    if missing is not None:
        return (f"what it learned is not known: no safetensors in {missing}",)
    return _moved(before, after), _arrived(folder, model, last)


def _moved(before: Path, after: Path) -> str:
    old, new = _tensors(before), _tensors(after)
    shared = sorted(old.keys() & new.keys())
    apart = [float((old[name].float() - new[name].to(old[name].dtype).float()).abs().max()) for name in shared]
    if not any(apart):
        raise RankError(
            f"the job learned nothing: every weight in {after} is what the job began with. Say a higher optimizer.lr, "
            "or a task on which answers to one prompt differ in reward"
        )
    moved = sum(each > 0 for each in apart)
    return f"weights moved: {moved} of {len(shared)} tensors, by {max(apart):.2g} at most"


def _tensors(folder: Path) -> dict[str, Any]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in read_tensors(file).items()}


def _arrived(folder: Path, model: Path, last: int) -> str:
    rows, newest, older = folder / "looked_at" / f"step-{last}.jsonl", policy_of(folder, last - 1), model
    if last > 2 and policy_of(folder, last - 2).is_dir():
        older = policy_of(folder, last - 2)
    if not (rows.is_file() and newest.is_dir() and older.is_dir()):
        return "weights arrived: not known, for the last two checkpoints and what the gate saw are not all there"
    dump = read_dump(rows)
    sequences, temperature = dump.sequences[:_SEQUENCES], dump.settings.temperature or 1.0
    now, then = (_score(each, sequences, temperature) for each in (newest, older))
    rollout, learner = (_distance(sequences, now, side) for side in ("rollout_logp", "learner_logp"))
    stale = _distance(sequences, then, "rollout_logp")
    for side, found in (("rollout", rollout), ("learner", learner)):
        if not found < stale:
            raise RankError(
                f"the {side} of step {last} did not have the weights of checkpoint {last - 1}: its log-probs are "
                f"{found:.2g} nats from that policy's, and the rollout's {stale:.2g} from those of the policy before it"
            )
    return (
        f"weights arrived: checkpoint {last - 1} scores what step {last} sampled within {rollout:.2g} nats of the "
        f"rollout and {learner:.2g} of the learner; the policy before it within {stale:.2g} of the rollout"
    )


def _score(policy: Path, sequences: Sequence[Scored], temperature: float) -> list[np.ndarray]:
    """transformers' log-probs of each response, in fp32 [R]."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for each in sequences:
        tokens = torch.from_numpy(each.tokens)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, each.prompt_length - 1 : -1] / temperature
        logps = torch.log_softmax(logits, -1).gather(1, tokens[each.prompt_length :, None])[:, 0]
        found.append(logps.double().numpy())
    return found


def _distance(sequences: Sequence[Scored], logps: Sequence[np.ndarray], side: str) -> float:
    """The root of the mean square of a side's difference from ``logps`` over all sampled tokens, in nats."""
    pairs = zip(sequences, logps, strict=True)
    apart = np.concatenate([(getattr(each, side) - found)[each.mask] for each, found in pairs])
    return float(np.sqrt(np.nanmean(apart**2)))
