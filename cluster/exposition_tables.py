"""What is exported as it is: names of metrics, their help, and where their values stand."""

from __future__ import annotations

# name without _total, help, key of a rank's stats
RANK_COUNTERS = (
    ("dspark:steps", "Target forwards.", "num_steps"),
    ("dspark:committed_tokens", "Tokens that entered a stream.", "num_committed"),
    ("dspark:prefill_tokens", "Prompt tokens computed.", "num_prefill_tokens"),
    ("dspark:late_rounds", "Rounds whose block came too late, or not at all.", "num_late"),
    ("dspark:unasked_rounds", "Rounds without a block, as drafting did not pay.", "num_unasked"),
    ("dspark:undrafted_tokens", "Slots of blocks not worth drafting.", "num_undrafted"),
    ("dspark:draft_pauses", "Times drafting was paused, as it did not pay.", "num_draft_pauses"),
    ("dspark:rank_finished_requests", "Requests that met a stop condition.", "num_finished"),
    ("dspark:rank_aborted_requests", "Requests ended from outside.", "num_aborted"),
    ("dspark:rank_failed_requests", "Requests the rank could not go on with.", "num_failed"),
    ("dspark:prefix_hits", "Prompts whose beginning was known.", "num_prefix_hits"),
    ("dspark:prefix_evictions", "Known blocks given up for others.", "num_prefix_evictions"),
    ("dspark:preempted_requests", "Requests that gave their KV up for a while.", "num_preempted"),
    ("dspark:failed_steps", "Steps the engine could not compute.", "num_engine_failures"),
    ("dspark:idle_problems", "Things not back at their baseline when idle.", "num_idle_problems"),
    ("dspark:refused_budgets", "Budgets too fresh, too old or not ours.", "num_budgets_refused"),
)
RANK_GAUGES = (
    ("dspark:running_requests", "Requests in prefill or decoding.", "num_running"),
    ("dspark:waiting_requests", "Admitted requests without a place in the batch.", "num_waiting"),
    ("dspark:max_running_requests", "Places in the batch.", "max_running"),
    ("dspark:kv_blocks", "KV blocks of the rank.", "num_blocks"),
    ("dspark:kv_free_blocks", "KV blocks nobody holds.", "num_free_blocks"),
    ("dspark:kv_cached_blocks", "Those kept for prompts to come.", "num_cached_blocks"),
    ("dspark:step_time_seconds", "Recent mean time of a step.", "step_time_s"),
)
RANK_SECONDS = (
    ("dspark:step_seconds", "Time spent in steps.", "step_s"),
    ("dspark:draft_wait_seconds", "Time the rank stood waiting for blocks.", "draft_wait_s"),
    ("dspark:predicted_step_seconds", "Foretold time of the compared steps.", "predicted_s"),
    ("dspark:compared_step_seconds", "Measured time of the compared steps.", "compared_s"),
    ("dspark:compared_steps", "Steps whose time was foretold.", "num_compared"),
)
MEMORY = "Resident memory of the process."
GROUP_COUNTERS = (
    ("dspark:group_steps", "Steps of the rank's group, its own or others'.", "num_steps"),
    ("dspark:group_collectives", "Collectives the rank has been through.", "num_collectives"),
    ("dspark:rebalances", "Times experts moved to other ranks.", "num_rebalances"),
    ("dspark:failed_rebalances", "New experts it could not read.", "num_failed_rebalances"),
    ("dspark:uncaptured_steps", "Launched, though a GPU could replay them.", "num_uncaptured"),
)
GROUP_GAUGES = (
    ("dspark:group_epoch", "Rises with every formation of the group.", "epoch"),
    ("dspark:group_wait_seconds", "In the collective under way.", "waited_s"),
    ("dspark:worst_token_imbalance", "Fullest rank of a step over the mean.", "most_imbalance"),
    ("dspark:expert_imbalance", "Copies of the hottest rank over the mean.", "expert_imbalance"),
)
DRAFTER_COUNTERS = (
    ("dspark:drafter_batches", "Batches advanced.", "num_batches"),
    ("dspark:drafter_blocks", "Blocks proposed.", "num_blocks"),
    ("dspark:drafter_seconds", "Time spent drafting.", "draft_time_s"),
    ("dspark:drafter_failures", "Batches that failed.", "num_failed"),
    ("dspark:drafter_expired_contexts", "Contexts nobody asked for any more.", "num_expired"),
    ("dspark:drafter_missed_closes", "Ends learnt of late: word was lost.", "num_missed_closes"),
    (
        "dspark:drafter_refused_calibrations",
        "Calibrations not used: made for another target or drafter.",
        "num_refused_calibrations",
    ),
)
ALLOCATOR_COUNTERS = (
    ("dspark:fallback_budgets", "Budgets for which no plan could be made.", "num_fallbacks"),
    ("dspark:stale_reports", "Reports repeated, late or of an earlier life.", "num_stale_reports"),
    ("dspark:refused_curves", "Cost curves that could not be used.", "num_refused_curves"),
)
FRONT_COUNTERS = (
    ("dspark:disconnects", "Clients that left before an answer.", "num_disconnected"),
    ("dspark:ignored_fields", "Unknown fields of requests.", "num_ignored_fields"),
    ("dspark:unknown_keys", "Requests without a known key.", "num_unknown_keys"),
)
FRONT_GAUGES = (
    ("dspark:ingress_busy_share", "Of a core, by its event loop.", "busy_share"),
    ("dspark:ingress_lag_seconds", "Mean lateness of its event loop.", "lag_s"),
)
FRONT_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token.", "first_token_s"),
    ("vllm:request_time_per_output_token_seconds", "Mean after the first.", "token_interval_s"),
    ("vllm:e2e_request_latency_seconds", "Arrival to the end.", "duration_s"),
    ("dspark:largest_gap_seconds", "Longest pause inside a stream.", "largest_gap_s"),
)
