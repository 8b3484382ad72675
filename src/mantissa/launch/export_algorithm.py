"""Advantage, loss, aggregation, correction, reference and KL in verl's words.

Two directions to mind. Bounds on weights are on learner / rollout in verl as here; bounds on k1, its rejection, are on
rollout / learner, so those are inverted and swapped. And a bound that is absent here is written as one that no ratio
reaches, since verl has defaults of its own: a dual clip of 3 even for plain PPO, a lower clip even for CISPO.

0.9's trainer reads ``rollout_correction.loss_type`` and, with ``bypass_mode``, ``rollout_rs`` nowhere: the loss reads
its own copy below ``policy_loss``, which the trainer before filled in. So the exporter fills it in.
"""

from __future__ import annotations

from mantissa.algorithms import CorrectionConfig, FlowRLConfig
from mantissa.launch.plan import NO_BOUND, Draft, finite

_IS = "algorithm.rollout_correction."
_BYPASSED = "actor.policy_loss.rollout_correction."
_NO_LOW = 1e-9  # below exp(-20), where every log-ratio is clamped
_UNITS = {
    "token": "token",
    "sequence_sum": "seq_sum",
    "sequence_mean": "seq_mean",
    "sequence_max": "seq_max",
}
# Read in lu-jun-yu/verl at d242388, recipe/flowrl/flowrl_actor.py and flowrl_fsdp_worker.py: a copy of verl 0.7.0.dev
# from before recipes moved to verl-project/verl-recipe, whose README at 0ad0455 has verl v0.4.0 for this one. The
# autocast stands in volcengine/verl at 40dc8ef too, and in Xuekai-Zhu/FlowRL at 6059a0b (dp_actor.py). What verl itself
# lacks is tested on the real one.
FLOWRL = (
    "flowrl: verl has no such loss. The published recipe, recipe.flowrl, is built on workers/fsdp_workers.py and "
    "workers/actor/dp_actor.py, which verl 0.8.0 took out; and on the verl that it needs, its actor computes under "
    "autocast to bf16, written into the code (fsdp_config.dtype=float16 starts a loss scaler around that and no more), "
    "as are beta and the ratio's bound, and no weight between rollout and learner enters its loss. Train it with "
    "mantissa train"
)


def algorithm(draft: Draft) -> None:
    """Write what is maximised, and how the gap between rollout and learner is corrected."""
    _advantage(draft)
    _loss(draft)
    _aggregation(draft)
    _correction(draft)
    _reference_and_kl(draft)


def _advantage(draft: Draft) -> None:
    source, kind = "algorithm.advantage", draft.config.algorithm.advantage
    if kind == "reinforce_pp":
        draft.refuse(
            source,
            "reinforce_pp: verl normalises over tokens, so that a long response counts more often; here each response "
            "counts once; use grpo, dr_grpo or rloo",
        )
        return
    if draft.config.rollout.samples == 1:
        draft.refuse(source, f"{kind} with rollout.samples=1: verl takes the reward itself for the advantage")
    draft.set("algorithm.adv_estimator", "rloo" if kind == "rloo" else "grpo", source)
    if kind != "rloo":
        draft.set("algorithm.norm_adv_by_std_in_grpo", kind == "grpo", source)


def _loss(draft: Draft) -> None:
    loss, source = draft.config.algorithm.loss, "algorithm.loss"
    draft.fixed("algorithm.loss.kind", "said by policy_loss.loss_mode")
    draft.set("actor.entropy_coeff", 0, source)
    if isinstance(loss, FlowRLConfig):
        draft.refuse(source, FLOWRL)
        return
    bypass = draft.config.algorithm.correction.bypass
    if bypass and loss.kind not in ("ppo_clip", "dapo"):
        draft.refuse(
            "algorithm.correction.bypass", f"with loss={loss.kind}: verl's bypass has the clipped loss of ppo_clip only"
        )
    mode = {"gspo": "gspo", "cispo": "cispo", "reinforce": "bypass_mode"}.get(loss.kind, "vanilla")
    draft.set("actor.policy_loss.loss_mode", "bypass_mode" if bypass else mode, "algorithm.loss.kind")
    if loss.kind == "reinforce":
        draft.set(_BYPASSED + "loss_type", "reinforce", source)
        return
    if loss.kind == "cispo":
        draft.set("actor.clip_ratio_low", 1.0, "algorithm.loss")  # the ratio is above 0, so this clips nothing
    else:
        draft.set("actor.clip_ratio_low", loss.clip_low, "algorithm.loss.clip_low")
    draft.set("actor.clip_ratio_high", loss.clip_high, "algorithm.loss.clip_high")
    if loss.kind == "dapo":
        draft.set("actor.clip_ratio_c", finite(loss.dual_clip), "algorithm.loss.dual_clip")
    elif loss.kind == "ppo_clip":
        draft.set("actor.clip_ratio_c", NO_BOUND, source)


def _aggregation(draft: Draft) -> None:
    config, source = draft.config.algorithm, "algorithm.aggregation"
    draft.set("actor.loss_agg_mode", config.aggregation.replace("_", "-"), source)
    if config.aggregation == "seq_mean_token_sum_norm":
        length = config.aggregation_length or draft.config.rollout.max_tokens
        if length != int(length):
            draft.refuse("algorithm.aggregation_length", f"{length}: verl takes whole tokens")
        draft.set("actor.loss_scale_factor", int(length), "algorithm.aggregation_length")
    else:
        draft.unused("algorithm.aggregation_length", f"belongs to seq_mean_token_sum_norm, not {config.aggregation}")


def _correction(draft: Draft) -> None:
    correction, source = draft.config.algorithm.correction, "algorithm.correction"
    inside = correction.bypass or draft.config.algorithm.loss.kind == "reinforce"
    draft.set("rollout.calculate_log_probs", True, source)
    draft.set(_IS + "bypass_mode", inside, source + ".bypass")
    if correction.bypass:
        draft.set(_BYPASSED + "loss_type", "ppo_clip", source + ".bypass")
    _weights(draft, correction, _BYPASSED if inside else _IS)
    _rejection(draft, correction, _BYPASSED if inside else _IS)
    if correction.veto_below is not None:
        draft.refuse(
            source + ".veto_below",
            f"{correction.veto_below}: verl has no veto any more; reject by sequence_max of k3 instead",
        )
    else:
        draft.fixed(source + ".veto_below", "verl has no veto")


def _weights(draft: Draft, correction: CorrectionConfig, where: str) -> None:
    """The weights' level and bounds. A mask's ``low_high`` zeroes what lies outside, as here."""
    source = "algorithm.correction."
    if correction.mode == "none":
        draft.set(where + "rollout_is", None, source + "mode")
        for name in ("level", "truncate_at", "mask_low", "mask_high", "normalize"):
            draft.unused(source + name, "mode=none has no weights")
        return
    draft.set(where + "rollout_is", correction.level, f"{source}mode, {source}level")
    bounds = f"{source}truncate_at, {source}mask_low, {source}mask_high"
    if correction.mode == "truncate":
        assert correction.truncate_at is not None
        draft.set(where + "rollout_is_threshold", finite(correction.truncate_at), bounds)
    else:
        low = correction.mask_low or _NO_LOW
        high = finite(correction.mask_high) if correction.mask_high is not None else NO_BOUND
        draft.set(where + "rollout_is_threshold", f"{low!r}_{high!r}", bounds)
    draft.set(where + "rollout_is_batch_normalize", correction.normalize, source + "normalize")


def _rejection(draft: Draft, correction: CorrectionConfig, where: str) -> None:
    source = "algorithm.correction."
    names = ("reject_unit", "reject_by", "reject_low", "reject_high")
    if correction.reject_unit is None:
        draft.set(where + "rollout_rs", None, ", ".join(source + name for name in names))
        return
    unit, by = _UNITS[correction.reject_unit], correction.reject_by
    if (unit, by) == ("seq_max", "k1"):
        draft.refuse(source + "reject_unit", "sequence_max by k1: verl has seq_max of k2 and k3 only; use one of them")
        for name in names[1:]:
            draft.unused(source + name, "the rejection is refused")
        return
    draft.set(where + "rollout_rs", f"{unit}_{by}", f"{source}reject_unit, {source}reject_by")
    bound: float | str
    if by == "k1":  # on rollout / learner there
        low = 1 / correction.reject_high if correction.reject_high is not None else 1 / _FAR
        high = 1 / correction.reject_low if correction.reject_low is not None else _FAR
        bound = f"{low!r}_{high!r}"
    else:
        assert correction.reject_high is not None
        bound = correction.reject_high
    draft.set(where + "rollout_rs_threshold", bound, f"{source}reject_low, {source}reject_high")
    draft.differs(
        source + "reject_unit", "what is dropped leaves the loss here; verl keeps it in the loss's denominator"
    )


_FAR = 1e300  # a sum over a sequence is not clamped in verl


def _reference_and_kl(draft: Draft) -> None:
    reference, kl = draft.config.algorithm.reference, draft.config.algorithm.kl
    if reference is None:
        draft.unused("algorithm.reference", "there is none")
    elif reference.refresh_every is not None:
        draft.refuse("algorithm.reference.refresh_every", "verl's reference is the policy as training began, for good")
    elif kl is None and not isinstance(draft.config.algorithm.loss, FlowRLConfig):
        draft.unused("algorithm.reference.refresh_every", "verl measures no distance that no penalty uses")
    else:
        draft.fixed("algorithm.reference.refresh_every", "the reference is the policy as training began")
    in_loss, in_reward = (kl is not None and kl.where == where for where in ("loss", "reward"))
    draft.set("actor.use_kl_loss", in_loss, "algorithm.kl")
    draft.set("algorithm.use_kl_in_reward", in_reward, "algorithm.kl")
    if kl is None:
        return
    source = "algorithm.kl."
    draft.fixed(source + "where", "said by use_kl_loss and use_kl_in_reward")
    if in_loss:
        draft.set("actor.kl_loss_type", kl.estimator, source + "estimator")
        draft.set("actor.kl_loss_coef", kl.coefficient, source + "coefficient")
        if draft.config.algorithm.correction.mode != "none":
            draft.differs(source + "where", "the correction weighs the penalty here, and not in verl")
    else:
        draft.set("algorithm.kl_penalty", kl.estimator, source + "estimator")
        draft.set("algorithm.kl_ctrl.type", "fixed", source + "coefficient")
        draft.set("algorithm.kl_ctrl.kl_coef", kl.coefficient, source + "coefficient")
    if kl.estimator == "k3":
        draft.differs(source + "estimator", "k3 is clamped to 10 nats a token in verl")
