"""What ``mantissa check`` says of scripts that others wrote: each rule speaks, and hostile files are one error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from hostile import attempt
from mantissa.base.errors import MantissaError
from mantissa.launch.check import check_verl
from mantissa.launch.facts import Rule, frameworks, programs
from mantissa.launch.scripts import Given, is_verl, read_given
from mantissa.launch.settings import Checked, check_settings, read_settings, same, whose

RULES = [(name, rule) for name, framework in frameworks().items() for rule in framework.rules]


def checked(path: Path, *more: str) -> Checked:
    given = read_settings([str(path), *more])
    return check_settings(given, whose(given, None))


def verdicts(found: Checked) -> dict[str, str]:
    return {each.given.key: each.verdict for each in found.wrong}


def _fitting(rule: Rule) -> dict[str, str]:
    """Settings under which the rule holds, by the meaning of its columns."""
    settings: dict[str, str] = {}
    for key, (wanted, *_) in rule.when.items():
        if wanted == "set":
            settings[key] = "7"
        elif wanted.startswith("not "):
            settings[key] = "0.25"
        elif wanted != "unset":
            settings[key] = wanted
    for place, key in enumerate(rule.differ):
        if rule.verdict != "missing" or key not in rule.about:
            settings.setdefault(key, f"0.{place + 3}")
    return settings


@pytest.mark.parametrize(("name", "rule"), RULES, ids=lambda value: value if isinstance(value, str) else value.why[:30])
def test_each_rule_can_speak(name: str, rule: Rule) -> None:
    for key in rule.about:
        settings = _fitting(rule)
        if rule.verdict == "missing":
            assert key not in settings or settings.pop(key) in ("false", "null")
        else:
            settings.setdefault(key, "null" if "unset" in rule.when.get(key, ()) else "0.75")
        found = {each.given.key: each for each in check_settings(Given(settings), name).settings}[key]
        assert (found.verdict, found.why) == (rule.verdict, rule.why)


def test_the_table_is_whole() -> None:
    """A rule's words are keys of the table; what is read has a file and a line; each framework is told by itself."""
    for name, framework in frameworks().items():
        for rule in framework.rules:
            assert rule.why
            assert ":" in rule.read
        for part in framework.roles:
            assert part.cases[-1].when == {}
        assert all(":" in fact.read for fact in framework.keys.values())
        sets = framework.known_by.keys
        assert all(whose(Given(dict.fromkeys(keys, "1")), None) == name for keys in sets)


def test_the_table_s_defaults_are_the_programs() -> None:
    """Each default that a program's sources give is the table's (``make facts`` reads them)."""
    differing = {}
    for name, framework in frameworks().items():
        known = programs()[name].keys
        shared = [key for key in framework.keys if key in known]
        assert len(shared) >= 4, name
        for key in shared:
            ours, theirs = framework.keys[key].default, known[key][1]
            if ours.startswith("${") and (theirs == "null" or theirs.startswith("${")):
                continue  # filled in by the program's code
            ours = framework.keys[ours[2:-1]].default if ours.startswith("${") else ours
            differing |= {} if same(ours, theirs) else {(name, key): (ours, theirs)}
    assert differing == {}


TRL = """
import torch
from trl import GRPOConfig, GRPOTrainer
RATE = 1e-6
more = {"beta": 0.0, "top_p": 0.9}
config = GRPOConfig("out", learning_rate=RATE, use_vllm=True, fp16=True, disable_dropout=False, temperature=0.8,
                    model_init_kwargs={"dtype": torch.bfloat16}, logging_dir=somewhere(), **more)
"""


def test_a_python_script_of_trl(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRL)
    found = checked(tmp_path / "train.py")
    assert found.name == "trl"
    assert verdicts(found) == {"fp16": "harmful", "disable_dropout": "harmful", "model_init_kwargs.dtype": "harmful",
                               "top_p": "harmful"}  # fmt: skip
    assert {role.name: role.active for role in found.roles} == {
        "learner": "fp16 under autocast, with a loss scaler", "masters": "bfloat16",
        "rollout": "vLLM beside the trainer, in the checkpoint's format", "correction": "sequence_mask, up to 3.0",
        "temperature": "0.8 on both sides"}  # fmt: skip
    assert found.notes == ("GRPOConfig(logging_dir=...) is no constant, and was not read",)
    text = found.text
    assert text.splitlines()[0] == "trl: 4 settings to look at (harmful)"
    assert "instead: top_p=1.0" in text


def test_what_does_nothing_with_generate(tmp_path: Path) -> None:
    """TRL's default sampler is transformers' generate, and vLLM's correction is then read by nobody."""
    (tmp_path / "grpo.yaml").write_text("num_generations: 8\nvllm_importance_sampling_mode: token_mask\nbf16: true\n")
    assert verdicts(checked(tmp_path / "grpo.yaml")) == {"vllm_importance_sampling_mode": "ignored"}
    assert verdicts(checked(tmp_path / "grpo.yaml", "use_vllm=true")) == {}


SHELL = """#!/bin/bash
TYPE=icepop
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path Qwen/Qwen3-4B --ds.param_dtype fp16 \\
   --rollout.top_p=0.9 --algo.advantage.is_correction_type $TYPE --vllm.enforce_eager \\
   --rollout.temperature 0.7
"""


def test_a_shell_script_of_openrlhf(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SHELL)
    found = checked(tmp_path / "run.sh")
    assert found.name == "openrlhf"
    assert verdicts(found) == {"ds.param_dtype": "refused", "algo.advantage.is_correction_type": "ignored"}
    on = "algo.advantage.is_correction_enable=true"
    assert verdicts(checked(tmp_path / "run.sh", on)) == {"ds.param_dtype": "refused", "rollout.top_p": "harmful"}


def test_skyrl_cap_that_turns_the_gradient(tmp_path: Path) -> None:
    """The old key's cap is -1 where it is not given, and weights are clamped to it."""
    command = "python -m skyrl.train.entrypoints.main_base trainer.algorithm.use_tis=true generator.n_samples=4"
    (tmp_path / "run.sh").write_text(command)
    assert verdicts(checked(tmp_path / "run.sh")) == {"trainer.algorithm.use_tis": "harmful"}
    assert verdicts(checked(tmp_path / "run.sh", "trainer.algorithm.tis_imp_ratio_cap=2.0")) == {}


AREAL = """
gconfig: {n_samples: 4, temperature: 0.6}
rollout: {backend: "vllm:d4"}
actor: {backend: "fsdp:d4", dtype: bfloat16, use_decoupled_loss: true, recompute_logprob: true}
vllm: {dtype: "${actor.dtype}"}
"""


def test_a_configuration_of_areal(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(AREAL)
    assert verdicts(checked(tmp_path / "a.yaml")) == {
        "gconfig.temperature": "harmful", "actor.dtype": "harmful", "actor.temperature": "missing",
        "actor.rejection_sampling": "missing"}  # fmt: skip
    mended = ("gconfig.temperature=1.0", "actor.dtype=float32", "actor.rejection_sampling={upper: 5.0}")
    assert verdicts(checked(tmp_path / "a.yaml", *mended)) == {}


def test_a_configuration_that_builds_on_another(tmp_path: Path) -> None:
    base = "grpo: {async_grpo: {enabled: true}}\npolicy: {precision: bfloat16}\n"
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "b.yaml").write_text("defaults: base.yaml\npolicy: {generation: {vllm_cfg: {precision: fp8}}}\n")
    found = checked(tmp_path / "b.yaml")
    assert verdicts(found) == {"policy.generation.vllm_cfg.precision": "refused",
                               "loss_fn.use_importance_sampling_correction": "missing"}  # fmt: skip
    (tmp_path / "base.yaml").unlink()
    found = checked(tmp_path / "b.yaml", "grpo.num_prompts_per_step=4")
    assert verdicts(found) == {}, "what was not read may hold it"
    assert {role.name: role.active for role in found.roles}["learner"] == "not known"
    assert "base.yaml, which was not read" in found.notes[0]
    (tmp_path / "base.yaml").write_text("defaults: b.yaml\ngrpo: {seed: 1}\n")
    assert attempt(checked, tmp_path / "b.yaml") is None, "files that build on each other end"


def test_a_script_with_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("policy: {precision: float16}\ngrpo: {seed: 1}\n")
    (tmp_path / "run.sh").write_text("uv run examples/run_grpo.py --config c.yaml ++policy.precision=bfloat16")
    found = checked(tmp_path / "run.sh")
    assert {role.name: role.active for role in found.roles}["learner"] == "bfloat16, DTensor; masters are fp32"


def test_verl_goes_to_its_own_table(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text("actor_rollout_ref: {rollout: {dtype: float16}}\n")
    assert is_verl(read_settings([str(tmp_path / "v.yaml")]))
    megatron = check_verl(["actor_rollout_ref.actor.megatron.dtype=float16"])
    assert (megatron.engine, megatron.wrong) == ("megatron", [])
    assert "learner on Megatron" in megatron.assumed[0]


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRL)
    (tmp_path / "verl.sh").write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.dtype=float16")
    (tmp_path / "empty.sh").write_text("#!/bin/sh\n# nothing\n")
    expected = [("train.py", 1, "4 settings to look at"), ("verl.sh", 0, "verl 0.9.1, fsdp learner"),
                ("empty.sh", 2, "it sets nothing")]  # fmt: skip
    for name, code, said in expected:
        done = subprocess.run([sys.executable, "-m", "mantissa", "check", str(tmp_path / name)],
                              capture_output=True, text=True, timeout=600)  # fmt: skip
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), (name, done)
        assert len(done.stderr.splitlines()) == (code == 2)


HOSTILE = ["", "\n", "#!/bin/sh\n", "'", "\\", "--", "--=", "--x", "a=b", "$(", "[" * 5000, "-" * 9000 + "1",
           "{" * 900, "GRPOConfig(" * 3000, "GRPOConfig(**{1: 2}, **x, a=b.c.d, top_p={})", "a: &a [*a]",
           "defaults: [[]]", "defaults: /etc/passwd", "defaults: ../x.yaml", "? {}", "\x00\x01",
           "x = " + "(" * 400 + ")" * 400, "GRPOConfig(a=" + "-" * 4000 + "1)",
           "a: ${a}\nb: ${c}\nc: ${b}\ngconfig: 1\nactor: {x: 1}", "--config x.yaml\n" * 500, "\udcff"]  # fmt: skip
PIECES = ["GRPOConfig", "top_p=", "use_vllm=True", "\n", "(", ")", "{", "}", "[", "]", ",", ":", "'", '"', "--", "${",
          "actor:", "gconfig:", "\\", "policy.", "0.5", "null", "&", "*"]  # fmt: skip


@pytest.mark.parametrize("ending", ["sh", "py", "yaml", "json", "txt"])
def test_hostile_files_are_one_error_or_an_answer(ending: str, tmp_path: Path) -> None:
    random = Random(ending)
    texts = HOSTILE + ["".join(random.choice(PIECES) + " " * random.randrange(2) for _ in range(40)) for _ in range(60)]
    for text in texts:
        path = tmp_path / f"x.{ending}"
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        attempt(checked, path)


def test_files_that_are_no_files(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.sh")
    (tmp_path / "long.sh").write_bytes(b"a=" * 300_000)
    for name in ("pipe.sh", "long.sh", "none.sh", "."):
        with pytest.raises(MantissaError):
            read_given([str(tmp_path / name)], ())


def test_a_command_in_quotes_and_what_is_printed(tmp_path: Path) -> None:
    script = tmp_path / "slurm.sh"
    script.write_text(
        'echo "ds.param_dtype=fp32 is for GPUs alone" >&2\nprintf --rollout.temperature=3\n'
        'srun bash -c "pip install x && python3 -m openrlhf.cli.train_ppo_ray --ds.param_dtype bf16"\n'
    )
    given = read_settings([str(script)])
    assert whose(given, None) == "openrlhf"
    assert given.settings == {"ds.param_dtype": "bf16"}


def test_a_script_that_calls_another(tmp_path: Path) -> None:
    (tmp_path / "base.sh").write_text("python -m skyrl.train.entrypoints.main_base trainer.strategy=fsdp a.b=1 $@\n")
    script = tmp_path / "run.sh"
    script.write_text('HERE="$(dirname "$0")"\nbash "$HERE/base.sh" a.b=2 generator.sampling_params.temperature=1.0\n')
    found = read_settings([str(script)])
    assert (found.settings["trainer.strategy"], found.settings["a.b"], found.partial) == ("fsdp", "2", False)
    (tmp_path / "base.sh").write_text('bash "$HERE/run.sh" c.d=1\n')  # one another
    assert read_settings([str(script)]).settings["c.d"] == "1"
    (tmp_path / "base.sh").unlink()
    found = read_settings([str(script), "trainer.algorithm.policy_loss_type=gspo"])
    assert found.partial
    assert "base.sh" in found.notes[0]


def test_references_of_omegaconf(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(
        "grpo: {a: 1}\npolicy:\n  precision: bfloat16\n  generation:\n    d: 4\n    vllm_cfg:\n"
        "      precision: ${...precision}\n      b: ${.precision}\n      c: ${..d}\n"
    )
    settings = read_settings([str(path)]).settings
    under = "policy.generation.vllm_cfg."
    assert [settings[under + name] for name in ("precision", "b", "c")] == ["bfloat16", "bfloat16", "4"]
    assert not checked(path).wrong
    path.write_text(path.read_text().replace("bfloat16", "${oc.env:FORMAT}"))
    assert not checked(path).wrong  # what is not known differs from nothing
    path.write_text(path.read_text().replace("${...precision}", "float16").replace("${oc.env:FORMAT}", "bfloat16"))
    assert "policy.precision" in verdicts(checked(path))


def test_a_script_whose_settings_are_on_its_command_line(tmp_path: Path) -> None:
    script = tmp_path / "grpo.py"
    script.write_text("parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))\nx = parser.parse_args()\n")
    with pytest.raises(MantissaError, match=r"takes GRPOConfig from its command line: give that too"):
        checked(script)
    found = checked(script, "fp16=true", "bf16=false")
    assert (found.name, len(found.settings)) == ("trl", 2)
    assert "not known" in found.text


def test_verls_defaults_of_positions_and_its_reference(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("ENGINE=${1:-vllm}\necho 'ENGINE=trtllm is for GPUs'\npython3 -m verl.trainer.main_ppo "
                      "model_engine=megatron actor_rollout_ref.rollout.name=$ENGINE "
                      "actor_rollout_ref.ref.megatron.use_mbridge=True\n")  # fmt: skip
    report = check_verl([str(script)])
    assert not report.wrong


def roles(found: Checked) -> dict[str, str]:
    return {role.name: role.active for role in found.roles}


AREAL_FP8 = """
gconfig: {n_samples: 4}
actor: {backend: "megatron:d4", use_decoupled_loss: true, rejection_sampling: {upper: 5.0},
        megatron: {fp8_config: {mode: hybrid, recipe: blockwise, param: true}}}
"""
SHAPES = {
    "areal.yaml": (AREAL_FP8, "areal", {"its products": "fp8 (hybrid, blockwise)"}),
    "skyrl.sh": ("python -m skyrl.train.entrypoints.main_base "
                 "generator.inference_engine.engine_init_kwargs.quantization=fp8", "skyrl",
                 {"rollout": "fp8 on bfloat16; log-probs: raw_logprobs"}),
    "nemo.yaml": ("{grpo: {a: 1}, policy: {megatron_cfg: {enabled: true, fp8_cfg: {enabled: true}}}}", "nemo-rl",
                  {"its products": "fp8 (e4m3, blockwise)"}),
    "backend.yaml": ("{grpo: {a: 1}, policy: {generation: {backend: megatron}}}", "nemo-rl",
                     {"rollout": "not known (policy.generation.backend=megatron)"}),
    "swift.sh": ("swift rlhf --rlhf_type grpo --use_vllm true --torch_dtype float32 --tuner_type full", "ms-swift",
                 {"learner": "fp16 under autocast, with a loss scaler (torch_dtype is float32)", "masters": "float32",
                  "correction": "none"}),
    "megatron.sh": ("megatron rlhf --rlhf_type grpo --torch_dtype bfloat16 --fp8_format e4m3", "ms-swift-megatron",
                    {"learner": "bf16, Megatron", "its products": "fp8 (e4m3, delayed)"}),
    "slime.sh": ("python3 train.py --actor-num-gpus-per-node 8 --hf-checkpoint X --use-tis --fp8-format e4m3", "slime",
                 {"learner": "bf16, Megatron; masters are fp32", "its products": "fp8 (e4m3, delayed)",
                  "correction": "by token, 0 to 2.0"}),
    "int4.sh": ("ray job submit --runtime-env-json='{\"env_vars\": {\"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\": \"1\"}}' -- "
                "python3 train.py --actor-num-gpus-per-node 8 --hf-checkpoint X", "slime",
                {"its products": "of weights rounded to 4 bits"}),
    "miles.sh": ("python3 train.py --hf-checkpoint X --train-backend fsdp --fp16", "miles",
                 {"learner": "fp16, FSDP; gradients are reduced in fp32", "rollout": "SGLang in float16"}),
    "prime.toml": ("[orchestrator]\nbatch_size = 8\n[trainer.model.quantization]\ntype = 'mxfp8'\n", "prime-rl",
                   {"learner": "bf16, FSDP", "its products": "mxfp8", "masters": "float32"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_format_is_said_where_its_key_is_known(name: str, tmp_path: Path) -> None:
    text, framework, wanted = SHAPES[name]
    (tmp_path / name).write_text(text)
    found = checked(tmp_path / name)
    assert (found.name, found.unknown) == (framework, ())
    assert {role: roles(found)[role] for role in wanted} == wanted


@pytest.mark.parametrize(("name", "key", "role"), [
    ("swift.sh", "--fp4_mode on", "learner"), ("slime.sh", "--sglang-fp8-gemm-backend x", "rollout"),
    ("int4.sh", "--runtime-env-json='{env_vars: {NEW_FP8_MODE: 1}}'", "learner"),
    ("prime.toml", "inference.vllm.new_dtype = 'x'", "rollout"),
    ("skyrl.sh", "trainer.policy.amp_dtype=fp16", "learner"),
])  # fmt: skip
def test_a_format_is_not_said_where_a_key_about_it_is_not_known(name: str, key: str, role: str, tmp_path: Path) -> None:
    text = SHAPES[name][0]
    (tmp_path / name).write_text(f"{key}\n{text}" if name.endswith("toml") else f"{text} {key}")
    found = checked(tmp_path / name)
    assert roles(found)[role].startswith("not known (")
    assert found.state in ("unknown", "wrong")
    assert "itself defines" in found.text


def test_a_key_at_its_program_s_default_is_nothing_to_ask_about(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(AREAL_FP8 + "critic: {dtype: bfloat16}\n")
    assert (checked(tmp_path / "a.yaml").unknown, checked(tmp_path / "a.yaml").state) == ((), "good")
    (tmp_path / "a.yaml").write_text(AREAL_FP8 + "critic: {dtype: float16}\n")
    found = checked(tmp_path / "a.yaml")
    assert (found.unknown, found.state) == (("critic.dtype",), "unknown")
    assert "areal has it: str, by default bfloat16" in found.text


def test_a_script_in_a_folder_that_a_variable_names(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text("MODEL_ARGS=(\n  --moe-router-dtype fp32\n)\n")
    script = tmp_path / "run.sh"
    script.write_text('HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"\nsource "${HERE}/models/m.sh"\n'
                      "python3 train.py --hf-checkpoint X --prompt-data Y ${MODEL_ARGS[@]}\n")  # fmt: skip
    found = read_settings([str(script)])
    assert (found.partial, found.settings["moe-router-dtype"]) == (False, "fp32")
    script.write_text(script.read_text().replace("/models/", "/../models/"))
    assert read_settings([str(script)]).partial


@pytest.mark.parametrize("text", [
    "a = " + "[" * 5_000, "a." * 5_000 + "b = 1", "x = [" + "1," * 30_000 + "]", "[a\n", "a = 1\na = 2",
    "[orchestrator" + ".a" * 60 + "]\nx = 1\n", "a = " + "9" * 5_000,
])  # fmt: skip
def test_hostile_toml(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    error = attempt(checked, tmp_path / "x.toml")
    assert (error is None) == text.startswith("[orchestrator")


LOADED = """
import torch
from trl import GRPOConfig, GRPOTrainer
DTYPE = torch.bfloat16
{load}
trainer = GRPOTrainer({given}, args=GRPOConfig({config}), train_dataset=data)
"""
LOADS = [
    ("model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.bfloat16)", "model=model", "bf16=True", "bfloat16",
     {"from_pretrained.dtype": "harmful"}),
    ("model = M.from_pretrained('x', torch_dtype=DTYPE)", "model", "model_init_kwargs={'dtype': 'float16'}", "bfloat16",
     {"from_pretrained.dtype": "harmful", "model_init_kwargs.dtype": "ignored"}),
    ("", "model=M.from_pretrained('x', dtype='float16')", "fp16=True", "float16",
     {"from_pretrained.dtype": "refused", "fp16": "refused"}),
    ("model = M.from_pretrained('x', dtype=torch.float32)", "model=model", "fp16=True", "float32", {}),
    ("model = M.from_pretrained('x')", "model=model", "", "the checkpoint's format", {}),
    ("model = M.from_pretrained('x', **more)", "model=model", "", "not known", {}),
    ("model = M.from_pretrained('x', dtype=DTYPE)\nmodel = get_peft_model(model, c)", "model=model", "",
     "of adapters, fp32; the other weights are bfloat16", {}),
    ("model, tokenizer = M.from_pretrained('x', dtype=None)", "model=model, peft_config=c", "",
     "of adapters, fp32; the other weights are not known", {}),
    ("model = load_model(cfg)", "model=model", "", "not known", {}),
    ("model = 'Qwen/Qwen3-0.6B'", "model=model", "", "float32", {}),
    ("", "model=args.model_name_or_path, peft_config=None", "", "float32", {}),
    ("model = model\nmodel = get_peft_model(model)", "model=model", "",
     "of adapters, fp32; the other weights are not known", {}),
]  # fmt: skip


@pytest.mark.parametrize(("load", "given", "config", "masters", "wrong"), LOADS, ids=range(len(LOADS)))
def test_a_model_that_the_script_loads(
    load: str, given: str, config: str, masters: str, wrong: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOADED.format(load=load, given=given, config="'out', disable_dropout=True, " + config))
    found = checked(path)
    assert (roles(found)["masters"], verdicts(found)) == (masters, wrong)
