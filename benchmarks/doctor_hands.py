"""The doctor on sets of dumps that others made: ``python benchmarks/run.py doctor_hands FOLDER ...``.

A set is a folder of dumps in the plain schema with ``truth.jsonl``, a row a dump: file, kind, healthy, size (small or
large), strength, family, formats, d_rms and healthy_d_rms. Each was written without a look at the doctor, by
another hand: engines and weights (a), recording, masking and bookkeeping (b), and of everything (c; and d to j, which
no mend has seen before their first rows). The sets are not in this repository; a row has the digest of what it is of.

Outcomes: ``named`` (a name that is true of the kind: ``RIGHT``), ``half`` (one of two names is), ``wrong``,
``undecided`` (not known, or too large without a name), ``hidden`` (healthy, and the size of u is below the fault that
the answer's own line says it would have seen), ``missed`` (healthy, and it is not), ``said`` (healthy, and the fault is
one that a remark names). Of healthy dumps: ``healthy``, ``few``, ``alarm``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import Rows, case

from mantissa.base.provenance import stamp
from mantissa.doctor.diagnosis import Basis, Diagnosis, Verdict
from mantissa.doctor.examine import examine
from mantissa.doctor.readers import read_dump

# What a remark or the first line must say of faults that leave the gap a healthy one.
SAID = {"bypass_copies_rollout": "copy", "learner_copied": "copy", "rows_duplicated": "twice",
        "samples_share_seed": "twice", "few_decimals": "rounded", "stored_in_low_precision": "rounded",
        "logp_rounded": "rounded"}  # fmt: skip
# Names that are true of each kind, kinds of all sets together: "NAMES: KINDS" each; a kind that is not here has none.
# Those of d, e, f and f2 were written down before the doctor had read a dump of theirs, of the kinds' names alone (and
# of f one sentence each), with what was expected: of d at most 6 of 180 faults named wrongly and one alarm of 60; of e
# at most 3.5% wrong, 30% named right, no alarm (by leaving one set out, 3 of 120 of a are wrong, 3 of 150 of b, 3 of
# 156 of c and 11 of 180 of d: a kind that no set had is the risk); of f 2%, 30% and none; of f2 1%, 30% and one, its
# risk a mixture, whose seven kinds of its own no dump of f was of. Since then ``capacity``, ``smoothed`` and ``turn``
# are names too, and after f2's first row ``unscored`` is one of learner_ignores_a_token: it is a 0 in place. Those of g
# (fifteen families of transformers, many hardly trained) were written by its maker, who had read no line of the doctor:
# of g and of g2 (its generator's other seeds, families and sizes, after the mends that g led to) 1% wrong, 30% named
# right and one alarm were expected; of h (SmolLM2 by transformers, chat and second turns, read by no mend) the same.
# Those of i (18 families, some recurrent, 102 kinds; its maker had read no line of the doctor) were written with its
# generator; expected before its first look: 1% wrong, 30% named right and one alarm; and the same of i2 (other seeds,
# families and formats, as many dumps as a half hour makes), after the mends that i led to.
# Those of j (seven families, one of experts, two with states for caches; and SmolLM2; by a third hand that had
# read this table and no line of the doctor) and of j2 (its second draw: other families and kinds, before any mend
# that j led to) were written with their generator; expected before their first looks: the same as of i.
TRUE = """\
weights unrelated stale: activation_fp8_engine activation_function_differs activation_variant activations_fp8
  adapter_scale adapter_scale_wrong adapter_wrong_slot async_lag_recorded attention_scale attention_scale_wrong
  attention_sinks_dropped attention_softcap_dropped attention_softcap_missing attention_softmax_bf16
  attn_softcap_missing biases_dropped embed_scale_wrong embedding_quantised embeddings_not_synced expert_not_synced
  experts_exchanged experts_permuted experts_swapped fp8_weight_scale_stale fused_projection_order gate_up_exchanged
  gate_up_swapped gqa_head_mapping gqa_heads_tiled head_int4 head_not_synced kv_heads_tiled layer_not_synced
  layers_not_synced layers_swapped lm_head_not_synced lora_merged_twice lora_not_applied lora_not_merged
  lora_partial_targets lora_scaled_twice moe_experts_permuted moe_replay_shift multiplier_missing norm_eps_differs
  norm_eps_wrong norm_plus_one_missing norm_topk_prob_differs norm_without_upcast norms_not_synced
  one_layer_not_synced part_of_weights_not_synced partial_weight_sync qk_norm_not_synced qk_norm_skipped
  qkv_bias_dropped qkv_layout quant_scale_stale quantized_rollout query_scale_head_dim rollout_stale_unknown
  rollout_weights_quantised router_not_renormalized router_weights_not_renormalised router_weights_not_synced
  stale_few_steps stale_many_steps stale_weights tied_head_out_of_sync tied_head_stale torn_sync
  tp_bias_added_per_rank tp_bias_added_twice tp_rank_stale tp_shard_layout turn_marker_embedding_lost weights_int4
  weights_quantised weights_quantised_unknown
support cut_off: allowed_words_rollout_only banned_words grammar_rollout_only min_p_rollout_only
  tokens_banned_in_sampler top_k_renormalised top_k_rollout_only top_k_unrecorded top_p_renormalised
  top_p_rollout_only top_p_unrecorded vocab_padding_in_softmax
weights stale some_sequences: adapter_missing_some_rows async_lag one_rank_stale updated_between_minibatches
single_tokens: block_boundary_kernel
single_tokens position: chunk_edge_wrong_label
unrelated prompt padding onset: chunked_prefill_context_lost chunked_prefill_positions
clamped: clamped clamped_from_below logp_clamped logp_clipped logp_floor
weights unrelated stale position: conv1d_transposed experts_not_synced
weights unrelated stale experts: experts_per_token_differs experts_top_k_wrong replay_misaligned
  router_bias_not_synced router_low_precision router_replay_missing router_replay_shifted router_top_k_wrong
  router_topk router_weights_not_normed
unrelated single_tokens: cp_boundary_labels
summed: cumulative_recorded
unrelated position prompt onset: decode_position_off decode_positions_shifted
weights clipped_gap: difference_clipped
weights unrelated single_tokens: draft_logprobs draft_logprobs_recorded sp_border_label spec_decode_draft_logp
  spec_decode_residual_logp spec_draft_logp
weights unrelated: draft_logps_recorded
experts nondeterministic: dropout_left_on dropout_on dropout_on_in_learner moe_router_jitter router_jitter
  router_jitter_in_learner router_jitter_left_on router_jitter_on
experts nondeterministic capacity: capacity_drop_in_learner expert_capacity expert_capacity_drop expert_capacity_drops
  moe_capacity_drop
prompt padding onset first_token mid_sequence turn: earlier_span_stripped earlier_turn_stripped
  template_at_turn_border tool_text_differs
cut_off first_token unscored end_token not_logprobs: end_appended_unsampled first_token_no_logp forced_prefix_counted
  learner_tail_missing padding_counted sentinel_for_missing tool_mask_inverted
unscored: missing_filled_zero nan_to_zero tool_output_in_mask tool_tokens_unmasked
min_tokens: end_banned_early min_tokens
unrelated some_sequences argmax: entropy_instead
support min_tokens logit_bias: eos_suppressed
clamped coarse_logprobs: few_decimals stored_in_low_precision stored_with_few_digits
soft_cap temperature: final_logit_softcap_dropped final_softcap_wrong softcap_missing temp_before_softcap
unscored nonfinite: fp16_overflow
half_logits: fp32_claimed
support temperature repetition: generation_config_defaults top_p_learner_only vocab_shard_softmax
support cut_off temperature repetition unnormalised: padded_vocab_in_softmax vocabulary_padding_in_sum
weights stale onset mid_sequence: in_flight_update in_flight_update_mid_sequence inflight_update_unrecorded
  update_in_flight_unrecorded weights_change_midway weights_changed_mid_generation
some_sequences onset mid_sequence: kv_block_clobbered
stale some_sequences onset mid_sequence: kv_block_overwritten
weights position prompt onset: kv_cache_e5m2_coarse kv_cache_fp8 kv_cache_low_precision
position prompt onset: kv_fp8_scale longrope_table position_offset positions_continue_in_pack rope_config_wrong
  rope_dynamic_ntk_one_side rope_linear_scale_one_side rope_low_precision rope_scaling_ignored rope_table_bf16
  rope_theta rope_theta_differs sliding_window sliding_window_one_side sliding_window_wrong
weights unrelated stale position prompt onset: learned_position_offset longrope_switch partial_rotary_wrong
  rope_scaling_one_side rope_tables_low_precision rope_theta_wrong sliding_layers_swapped sliding_window_mismatch
  sliding_window_off
nondeterministic: learner_dropout
unrelated some_sequences shift moved_from: learner_label_shift learner_shift_by_one
unrelated shift: learner_logits_unshifted
coarse_logprobs half_logits: bf16_log_softmax coarse_record learner_logsoftmax_bf16 log_softmax_bf16
  log_softmax_in_bf16 logsoftmax_bf16_in_learner
weights unrelated stale some_sequences: learner_moved_between_minibatches learner_moved_in_minibatches minibatch_drift
weights stale: learner_scored_after_update stale_rollout_weights
shift moved_from: learner_slice_one_early resume_repeats_a_logp rollout_first_logp_dropped
  stop_tokens_trimmed_logps_not
cut_off unscored end_token: learner_tail_zero mask_shifted pad_tokens_compared stop_token_zero tool_tokens_compared
  zero_fill
prompt padding: left_padding_attended pad_attended pads_attended_learner_left pads_seen
unrelated rows: length_sort_not_undone rows_in_group_rotated rows_permuted rows_reordered rows_swapped_in_group
  shards_joined_wrong
some_sequences units: log2_recorded log_base log_base_10
clamped not_logprobs raised: log_of_p_plus_eps probability_floor
logit_bias: logit_bias_engine logit_bias_one_side logit_bias_rollout_only
unnormalised: logit_minus_max
coarse_logprobs: logp_rounded recorded_coarsely
stale some_sequences: engine_rank_stale one_engine_stale one_replica_stale
prompt padding nondeterministic first_token: packed_rows_see_each_other
some_sequences prompt padding nondeterministic first_token mid_sequence: packing_leak
some_sequences prompt padding onset mid_sequence: pad_id_masks_real_tokens
support: min_p min_p_one_side min_p_unasked padded_vocab_counted top_k_from_generation_config top_k_one_side
  top_k_only_in_rollout top_p top_p_one_side top_p_only_in_rollout
unrelated prompt padding: padding_attended padding_counted_in_positions prompts_right_padded
some_sequences prompt padding onset first_token: pads_attended prefix_block_lost prompt_template_differs
  prompt_truncated stale_prefix_cache
stale some_sequences prompt padding onset first_token: prefix_block_collision
unrelated stale some_sequences prompt padding: prefix_cache_wrong_hit
repetition: frequency_penalty_unasked presence_frequency_penalty presence_penalty_rollout_only repetition_penalty
  repetition_penalty_engine repetition_penalty_in_rollout repetition_penalty_on repetition_penalty_one_side
  repetition_penalty_rollout_only repetition_penalty_unasked
clamped coarse_logprobs half_logits: prob_quantised
not_logprobs: probabilities probability_not_log sign_flipped
some_sequences prompt padding first_token mid_sequence: prompt_cut_in_learner
unrelated shift moved_from rows: prompt_logps_recorded retokenised_learner
prompt shift moved_from: prompt_seam_retokenised
temperature: engine_logs_before_temperature learner_temp_twice logit_scale_wrong_cohere logits_scale_wrong_granite
  raw_logprobs_recorded temp_scored_raw temperature temperature_ignored_by_learner temperature_learner_only
  temperature_not_divided temperature_not_in_learner temperature_only_in_rollout temperature_rollout_only
  temperature_twice temperature_twice_in_learner
unrelated mid_sequence shift moved_from: resume_shift
unrelated mid_sequence shift moved_from rows: retokenised retokenised_response retokenized tokens_encoded_again
unrelated moved_from rows: ring_chunks_out_of_order
unrelated some_sequences: rollout_from_other_step
repeated: mean_repeated sequence_mean_recorded
weights single_tokens: speculative_draft_logp
some_sequences position prompt onset: split_kv_merge_wrong
summed unscored end_token repeated: sum_at_last_token
prompt padding first_token mid_sequence: extra_or_missing_bos template_differs
single_tokens unscored: tool_mask_shifted
argmax: greedy_logp top1_logp_recorded
support cut_off unscored: top_p_set_recomputed
support cut_off single_tokens clamped: missing_from_top_list topk_floor_recorded
cut_off unscored: topn_missing_zero
unrelated: vocabulary_offset
weights stale mid_sequence: weights_updated_mid_generation
weights unrelated stale single_tokens: added_rows draft_logps
cut_off unscored end_token not_logprobs: appended_eos eos_appended_unsampled first_segment_logp_lost padding_scored
  tool_mask_off
support logit_bias: banned_tokens banned_tokens_one_side
some_sequences mid_sequence shift moved_from: cursor_shift
prompt padding first_token mid_sequence turn: history_rewritten
some_sequences single_tokens argmax: first_dict_entry recorded_top1
single_tokens position prompt onset first_token: first_token_chunk
some_sequences position prompt onset mid_sequence: kv_slot_lost
not_logprobs raised smoothed: label_smoothing
weights unrelated stale some_sequences prompt padding: prompt_kv_of_old_weights
unrelated some_sequences rows: rows_exchanged rows_out_of_order
support cut_off temperature repetition: padded_vocab_in_normaliser vocab_padding
support cut_off not_logprobs temperature repetition unnormalised: shard_own_logsumexp vocab_shard
  vocab_shard_lost_in_lse
weights unrelated stale some_sequences experts: router_replay_of_other_step
support cut_off unscored nonfinite: learner_top_p_differs
unrelated some_sequences prompt padding onset mid_sequence: chunked_prefill_border chunked_prefill_bug
some_sequences prompt padding onset first_token mid_sequence: bos_doubled_learner bos_missing_learner
  extra_bos_in_learner generation_prompt_missing kv_page_of_other_request prompt_truncated_in_learner
  system_prompt_added system_prompt_missing_learner template_whitespace
unrelated some_sequences prompt rows: prompt_of_other_group
weights coarse_logprobs half_logits: format_declared_wrong format_not_as_said
position prompt padding: left_pad_positions_absolute positions_ignore_padding
smoothed: label_smoothing_in_learner
some_sequences prompt padding nondeterministic first_token: packing_without_isolation
some_sequences onset mid_sequence shift moved_from: resume_duplicates_token
some_sequences prompt padding onset first_token mid_sequence turn: double_bos_learner hidden_system_prompt
  history_stripped positions_after_tool prompt_token_differs prompt_truncated_learner second_turn_history_stripped
  second_turn_newline tool_answer_rerendered turn_marker_masked_as_pad
some_sequences prompt padding onset first_token mid_sequence turn unscored: learner_ignores_a_token
first_token shift: first_token_from_pad
support some_sequences logit_bias: grammar_mask_some_groups
stale some_sequences prompt padding onset first_token mid_sequence: kv_block_lost_after_preemption
some_sequences temperature: temp_other_on_one_worker temperature_of_some_rows
support end_token min_tokens: min_tokens_bans_end min_tokens_engine
some_sequences position prompt padding onset: packing_positions_run_on pad_positions_counted
some_sequences turn shift moved_from: misgather_after_finish shift_after_tool_turn shift_in_stopped_rows
unscored end_token: eos_unscored stop_token_logp_zero
prompt padding first_token onset some_sequences stale weights: prefix_cache_stale
support logit_bias repetition: no_repeat_ngram_engine
position onset prompt unrelated weights: positions_restart_at_response positions_scaled
prompt padding first_token some_sequences nondeterministic mid_sequence position unrelated: packed_without_block_mask
onset position mid_sequence prompt unrelated: context_parallel_half_lost
nondeterministic unrelated: dropout_in_learner
units: base_two
shift moved_from unrelated: first_logp_missing_shift labels_off_by_one
moved_from shift some_sequences: shift_in_some_rows
unscored end_token single_tokens turn: first_turn_end_unscored
argmax unrelated not_logprobs: entropy_logged
unscored not_logprobs cut_off clamped: sentinel_outside_top
single_tokens end_token: end_forced_on_truncated
nonfinite coarse_logprobs half_logits unnormalised: logsumexp_half_no_max
support cut_off temperature: typical_p_rollout_only
some_sequences onset mid_sequence position unrelated: kv_block_lost_mid_sequence
weights unrelated stale position prompt onset: decode_positions_off_rope
onset position prompt mid_sequence unrelated weights padding first_token: conv_state_lost_at_decode
position onset prompt weights mid_sequence: recurrent_state_fp8
weights unrelated stale single_tokens logit_bias: vocab_shard_of_head_stale
weights unrelated stale: early_exit_logps
weights unrelated stale position prompt onset: sliding_window_off_by_some
position onset prompt weights unrelated stale padding: alibi_slopes_wrong
weights unrelated stale: residual_scale_missing
weights unrelated stale experts: expert_blocks_rolled
weights unrelated stale experts: router_stale
rows some_sequences unrelated repeated moved_from: micro_batch_repeated
unrelated temperature smoothed raised not_logprobs weights clamped: double_softmax
unscored cut_off: loss_chunk_lost
weights unrelated stale: reference_column
coarse_logprobs half_logits clamped: recorded_as_float8
units temperature summed repeated some_sequences unrelated: normalised_by_length
some_sequences temperature: temperature_per_request_averaged
support cut_off temperature: epsilon_cutoff_rollout_only top_nsigma_rollout_only
support cut_off temperature unnormalised: renormalised_over_returned_list
repetition logit_bias: frequency_counts_prompt_one_side
repetition logit_bias temperature: presence_before_temperature
repetition support single_tokens: dry_penalty_engine
logit_bias end_token min_tokens support position: length_penalty_exponential
single_tokens unscored end_token cut_off mid_sequence position: thinking_budget_forced
logit_bias weights unrelated single_tokens support: watermark_green_list
weights unrelated temperature prompt: guidance_one_side
weights unrelated single_tokens unscored not_logprobs raised clamped: spec_acceptance_recorded
weights unrelated stale: averaged_over_two_engines ema_weights_in_learner layer_skipped lora_rslora_scale
not_logprobs repeated raised unrelated: advantage_column
not_logprobs raised unrelated: ratio_column whitened_logps
not_logprobs raised unrelated units: reference_subtracted
shift moved_from unrelated some_sequences unscored rows: right_aligned_rows
unrelated shift moved_from rows: reversed_in_time
rows some_sequences unrelated moved_from: graph_padding_rows
weights unrelated stale temperature: final_norm_skipped
temperature: logit_scale_wrong
position prompt onset weights unrelated stale: rope_interleaved_for_half
onset position prompt first_token unrelated weights: sink_evicted
weights unrelated position prompt onset: kv_cache_int4
weights stale onset mid_sequence some_sequences: partial_rollout_resumed
some_sequences prompt padding onset first_token mid_sequence turn: newline_after_role role_token_differs
  think_token_prefilled_one_side
prompt shift moved_from first_token onset some_sequences: token_healing_engine
nondeterministic weights unrelated some_sequences: layer_drop_in_learner
nondeterministic weights unrelated: embedding_noise_on
weights unrelated stale experts: one_expert_zero
support cut_off temperature single_tokens: xtc_rollout_only
temperature weights unrelated smoothed: dynamic_temperature_engine
temperature soft_cap smoothed weights unrelated: quadratic_smoothing_engine
unrelated rows: ranks_joined_interleaved
first_token unrelated single_tokens prompt: packed_row_border_label
end_token single_tokens unscored: end_token_of_other_id
"""
RIGHT: dict[str, tuple[str, ...]] = {
    kind: tuple(names.split())
    for names, kinds in (line.split(":") for line in TRUE.replace("\n  ", " ").splitlines())
    for kind in kinds.split()
}


def outcome(truth: dict[str, Any], found: Diagnosis) -> str:
    """What an answer is worth."""
    if truth["healthy"]:
        return {Verdict.HEALTHY: "healthy", Verdict.UNKNOWN: "few"}.get(found.verdict, "alarm")
    right = RIGHT.get(truth["kind"], ())
    if found.verdict is Verdict.FAULT:
        assert found.fault is not None
        names = [found.fault.name, *found.fault.also, *([found.second.name] if found.second else [])]
        return "named" if names[0] in right else "half" if set(names) & set(right) else "wrong"
    if found.verdict is not Verdict.HEALTHY:
        return "undecided"
    if SAID.get(truth["kind"], "\0") in " ".join((found.headline, *found.remarks)):
        return "said"
    size = next(each.detectable for each in found.findings if each.name == "too_large")
    sized = found.basis is Basis.ROUNDING and size is not None
    return "missed" if found.figures["u_rms"] > (size if sized and size else 1.0) else "hidden"


@case(folders=())
def doctor_hands(folders: Sequence[Path] = ()) -> Rows:
    """One row a set: how often each outcome is seen, and each wrong or missed answer by kind."""
    for folder in map(Path, folders):
        text = (folder / "truth.jsonl").read_text()
        truths, digest = [json.loads(line) for line in text.splitlines()], hashlib.sha256(text.encode())
        for truth in truths:
            digest.update((folder / truth["file"]).read_bytes())
        told = [(outcome(truth, examine(read_dump(folder / truth["file"]))), truth) for truth in truths]
        bad = Counter(f"{what}: {truth['kind']}" for what, truth in told if what in ("wrong", "missed", "alarm"))
        yield {"benchmark": "doctor_hands", "set": folder.parent.name, "dumps": len(truths),
               "digest": digest.hexdigest()[:16], "outcomes": dict(Counter(what for what, _ in told)),
               "small": dict(Counter(what for what, truth in told if truth["size"] == "small")),
               "bad": dict(sorted(bad.items()))} | stamp("cpu")  # fmt: skip
