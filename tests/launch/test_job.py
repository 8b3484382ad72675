"""What is said of a job from what its framework saved, and what a hostile folder may do: be one clear error."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hostile import attempt
from mantissa.base.errors import MantissaError
from mantissa.cli.check import check
from mantissa.launch.check import Report
from mantissa.launch.facts import VERSIONS
from mantissa.launch.job import check_job, read_job
from mantissa.launch.settings import Answer, Checked
from mantissa.launch.verl_tree import defaults
from trl_facts import ARGUMENTS

N = "actor_rollout_ref."
FP16 = {N + "rollout.name": "vllm", N + "actor.fsdp_config.mixed_precision.param_dtype": "fp16",
        N + "rollout.dtype": "float16", N + "actor.grad_clip": 0.5, N + "actor.use_kl_loss": True,
        "algorithm.rollout_correction.rollout_is": "token"}  # fmt: skip
NEWER = "outputs/2026-01-02/00-00-01"


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in leaves.items():
        *path, last = key.split(".")
        node = root
        for part in path:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = value
    return root


def hydra(folder: Path, leaves: dict[str, Any], overrides: list[str], name: str = "main_ppo") -> Path:
    """What hydra leaves behind."""
    where = folder / ".hydra"
    where.mkdir(parents=True)
    (where / "config.yaml").write_text(yaml.safe_dump(nested(leaves)))
    (where / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    (where / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"job": {"name": name}}}))
    return folder


def active(answer: Answer) -> dict[str, str]:
    return {role.name: role.active for role in answer.roles}


@pytest.mark.parametrize(("version", "given"), [*zip(VERSIONS, (".", "outputs", NEWER), strict=True)])
def test_a_job_of_verl_s(version: str, given: str, tmp_path: Path) -> None:
    """The version is told by its keys, the verdicts are of what is not at its default, the roles of everything."""
    hydra(tmp_path / "outputs" / "2026-01-01" / "23-59-59", {}, [])
    newer = hydra(tmp_path / NEWER, defaults(version, "dp") | FP16, [f"+{key}={value}" for key, value in FP16.items()])
    lines, found = check_job(tmp_path / given)
    assert lines == [f"job: {newer / '.hydra' / 'config.yaml'}"]
    assert isinstance(found, Report)
    assert (found.version, found.engine, found.rollout, found.assumed) == (version, "fsdp", "vllm", ())
    assert [(str(each.given), each.verdict) for each in found.wrong] == [(f"{N}actor.grad_clip=0.5", "ignored")]
    roles = active(found)
    assert (roles["learner"], roles["rollout"], roles["reference"]) == ("fp16", "fp16", "bf16")
    assert roles["correction"] == ("none" if version == "0.8.0" else "by token, 2.0")  # its default keeps no log-probs


def test_a_job_of_verl_s_by_weights_and_biases(tmp_path: Path) -> None:
    """There every reference is resolved, and every value is below ``value``."""
    leaves = {key: value for key, value in (defaults("0.9.1", "dp") | FP16).items() if "${" not in str(value)}
    leaves[N + "rollout.qat.enable"] = False  # refers to the actor's
    config = {name: {"desc": None, "value": value} for name, value in nested(leaves).items()}
    for name in ("run-20260101_0101-aa", "run-20260102_0101-ab"):
        files = tmp_path / "wandb" / name / "files"
        files.mkdir(parents=True)
        (files / "config.yaml").write_text(yaml.safe_dump(config | {"_wandb": {"value": {"t": 1}}, "wandb_version": 1}))
    lines, found = check_job(tmp_path)
    assert lines[0].endswith("run-20260102_0101-ab/files/config.yaml")
    assert isinstance(found, Report)
    assert [each.given.key for each in found.wrong] == [N + "actor.grad_clip"]
    assert (found.assumed, active(found)["rollout"]) == ((), "fp16")


def test_a_fork_and_a_variable_that_no_file_has(tmp_path: Path) -> None:
    more = {"rollout.name": "vllm", "actor.grad_clip": 2, "rollout.quantization": "fp8"}
    leaves = defaults("0.9.1", "megatron") | {N + key: value for key, value in more.items()} | {"retriever.url": "x"}
    _, found = check_job(hydra(tmp_path / "a", leaves, []))
    assert isinstance(found, Report)
    assert "no verl known here has retriever.url" in found.assumed[0]
    assert {each.verdict for each in found.wrong} == {"unknown"}
    assert (found.fork, set(active(found).values())) == (True, {"not known (retriever.url)"})
    _, found = check_job(hydra(tmp_path / "b", leaves, ["+retriever.url=x"]))
    assert isinstance(found, Report)
    assert found.assumed == ()
    assert "no file of the job says" in found.that("unknown")[-1].why
    _, found = check_job(hydra(tmp_path / "c", defaults("0.9.1", "dp"), [], "main_flowrl"))
    assert "main_flowrl is none that is known" in found.text


def test_a_job_of_trl_s(tmp_path: Path) -> None:
    """The arguments that TRL itself saved, with what lies beside them."""
    checkpoint = tmp_path / "checkpoint-20"
    checkpoint.mkdir()
    shutil.copy(ARGUMENTS, checkpoint / "training_args.bin")
    (checkpoint / "trainer_state.json").write_text('{"global_step": 20, "max_steps": 200, "log_history": []}')
    (checkpoint / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    lines, found = check_job(tmp_path)
    assert lines[1:] == ["  arguments of the class trl.trainer.grpo_config.GRPOConfig",
                         "  the model was saved in bfloat16, which its weights are held in (config.json)",
                         "  at step 20 of 200 (trainer_state.json; mantissa doctor reads its curves)"]  # fmt: skip
    assert isinstance(found, Checked)
    assert (found.name, found.unknown) == ("trl", ())
    assert {each.given.key: each.verdict for each in found.wrong} == {"dtype": "harmful", "fp16": "harmful"}
    assert active(found) == {
        "learner": "fp16 under autocast, with a loss scaler", "masters": "bfloat16",
        "correction": "token_mask, up to 3.0",
        "rollout": "vLLM beside the trainer, in the checkpoint's format",
        "temperature": "0.9 on both sides"}  # fmt: skip
    (checkpoint / "adapter_config.json").write_text("{}")
    assert active(check_job(tmp_path)[1])["masters"].startswith("of adapters, fp32")
    for name in ("config.json", "adapter_config.json"):
        (checkpoint / name).unlink()
    assert active(check_job(tmp_path)[1])["masters"] == "not known"


class Enumeration:
    def __init__(self, value: str) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Enumeration, (self.value,)


class Arguments:
    """Stands for a class of a script that is not installed here."""


def written(path: Path, **more: Any) -> Path:
    held = Arguments()
    held.__dict__ |= {"per_device_train_batch_size": 8, "num_generations": 8, "use_vllm": False} | more
    path.write_bytes(pickle.dumps(held))
    return path


def test_objects_in_arguments_are_what_they_hold(tmp_path: Path) -> None:
    import torch

    written(tmp_path / "training_args.bin", optim=Enumeration("adamw"), model_init_kwargs={"dtype": torch.bfloat16},
            output_dir=tmp_path, deepspeed="ds.json", odd={1: {2: b"x"}})  # fmt: skip
    (tmp_path / "config.json").write_text('{"dtype": "float16"}')
    given = read_job(tmp_path).given
    assert (given.settings["optim"], given.settings["model_init_kwargs.dtype"]) == ("adamw", "bfloat16")
    assert (given.settings["odd.1.2"], "dtype" in given.settings) == ("bytes", False)
    assert "DeepSpeed's" in given.notes[0]


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def hostile(folder: Path) -> Iterator[str]:
    """A folder after the other is made in ``folder``; what its error says."""
    arguments, hydra_ = folder / "training_args.bin", folder / ".hydra"
    yield "no configuration in it"
    written(arguments, evil=Evil(os.system, f"touch {folder}/run"))
    yield "nothing of it was run"
    written(arguments, evil=Evil(exec, f"open('{folder}/run', 'w')"))
    yield "nothing of it was run"
    arguments.write_bytes(pickle.dumps([1]))
    yield "expected the arguments of a trainer"
    arguments.write_bytes(b"\x80\x04" + b"]\x94" * 3_000_000)
    yield "expected at most"
    arguments.write_bytes(b"".join(f"ca{n}\nB\n".encode() for n in range(600)) + b".")
    yield "objects of more than"
    arguments.unlink()
    arguments.mkdir()
    yield "no configuration in it"
    arguments.rmdir()
    os.mkfifo(arguments)
    yield "a pipe or a device"
    arguments.unlink()
    arguments.symlink_to("/proc/self/environ")
    yield "leads out of"
    arguments.unlink()
    hydra_.mkdir()
    (hydra_ / "overrides.yaml").write_text("[]")
    yield "no such file beside"
    bad = {"- " * 20_000 + "1": "config.yaml", "a: " + "[" * 3_000: "brackets", "a: &a [*a]": "inside of",
           "x" * 5_000_000: "expected at most", "5": "expected keys and values", "\x00": "YAML"}  # fmt: skip
    for text, said in bad.items():
        (hydra_ / "config.yaml").write_text(text)
        yield said
    (hydra_ / "config.yaml").unlink()
    (hydra_ / "config.yaml").symlink_to("/etc/hosts")
    yield "leads out of"
    (hydra_ / "config.yaml").unlink()
    (hydra_ / "config.yaml").write_text("actor_rollout_ref: {rollout: {name: vllm}}")
    (hydra_ / "overrides.yaml").write_text("a: 1")
    yield "hydra's list of overrides"


def test_a_hostile_folder_is_one_clear_error(tmp_path: Path) -> None:
    for said in hostile(tmp_path):
        error = attempt(check_job, tmp_path)
        assert error is not None, said
        assert said in str(error)
        assert "\n" not in str(error)
        assert not (tmp_path / "run").exists()
    assert "no such folder" in str(attempt(check_job, tmp_path / "none"))


@pytest.mark.parametrize("text", ["5", "[]", '{"global_step": "x", "max_steps": [1]}', "{", '{"dtype": {}}'])
def test_odd_files_beside_the_arguments(text: str, tmp_path: Path) -> None:
    written(tmp_path / "training_args.bin")
    for name in ("trainer_state.json", "config.json"):
        (tmp_path / name).write_text(text)
    error = attempt(check_job, tmp_path)
    assert (error is None) == isinstance(_loaded(text), dict)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_the_command(tmp_path: Path) -> None:
    leaves = defaults("0.9.1", "dp") | {N + "rollout.name": "vllm"}
    hydra(tmp_path / "good", leaves, [])
    hydra(tmp_path / "wrong", leaves | {N + "actor.grad_clip": 9}, [])
    for folder, code in (("good", 0), ("wrong", 1)):
        with pytest.raises(typer.Exit) if code else nullcontext() as ended:
            check(job=tmp_path / folder)
        assert ended is None or ended.value.exit_code == code
    for files, job in ((None, None), (["a.sh"], tmp_path / "good")):
        with pytest.raises(MantissaError, match="or --job DIR and no file"):
            check(files=files, job=job)


def test_what_is_no_trainer_of_rl_s(tmp_path: Path) -> None:
    held = Arguments()
    held.__dict__["per_device_train_batch_size"] = 8
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(held))
    with pytest.raises(MantissaError, match="which samples nothing"):
        check_job(tmp_path)


def test_a_job_of_trl_s_by_weights_and_biases(tmp_path: Path) -> None:
    """Trainer's callback puts the model's configuration, and its adapters', beside the arguments."""
    files = tmp_path / "files"
    files.mkdir()
    fields = {"per_device_train_batch_size": 8, "num_generations": 8, "use_vllm": False, "bf16": True, "fp16": False}
    for more, masters, wrong in (
        ({"dtype": "bfloat16"}, "bfloat16", {"dtype": "harmful"}), ({"dtype": "float32"}, "float32", {}),
        ({"dtype": "bfloat16", "peft_config": {"r": 8}}, "of adapters, fp32; the other weights are bfloat16", {}),
        ({"dtype": "bfloat16", "deepspeed": "x.json"}, "not known", {}),
    ):  # fmt: skip
        values = {name: {"value": value} for name, value in (fields | more).items()}
        (files / "config.yaml").write_text(yaml.safe_dump(values))
        _, found = check_job(tmp_path)
        assert (active(found)["masters"], {each.given.key: each.verdict for each in found.wrong}) == (masters, wrong)
