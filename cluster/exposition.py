"""One observation of the cluster as Prometheus text.

`vllm:` names mean what they mean in vLLM, so that its dashboards and `vllm bench serve` read them; `dspark:` names
are ours. Positions of a block are counted from 0 in labels, as vLLM does. Two identities hold at every position:
proposed = trimmed + scheduled, scheduled = accepted + rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from actors.core.prefix_scheduler import UNLIMITED
from cluster.observation import Observation

# name without _total, help, key of a rank's stats
RANK_COUNTERS = (
    ("dspark:steps", "Target forwards.", "num_steps"),
    ("dspark:committed_tokens", "Tokens that entered a stream.", "num_committed"),
    ("dspark:prefill_tokens", "Prompt tokens computed.", "num_prefill_tokens"),
    ("dspark:late_rounds", "Rounds whose block came too late, or not at all.", "num_late"),
    ("dspark:unasked_rounds", "Rounds without a block, as drafting did not pay.", "num_unasked"),
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
    ("dspark:drafter_refused_calibrations", "Of another pair.", "num_refused_calibrations"),
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


class Page(Collector):
    """Samples by family; a family exists once it has a sample."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def collect(self) -> Iterable[Metric]:
        return self._families.values()

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        self._family(CounterMetricFamily, name, text, labels).add_metric([*labels.values()], value)

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        self._family(GaugeMetricFamily, name, text, labels).add_metric([*labels.values()], value)

    def histogram(self, name: str, text: str, sums: dict[str, Any], **labels: str) -> None:
        """`sums`: `Histogram.snapshot`."""
        cumulated, total = [], 0
        for bound, count in zip((*map(str, sums["bounds"]), "+Inf"), sums["counts"], strict=True):
            total += count
            cumulated.append((bound, total))
        family = self._family(HistogramMetricFamily, name, text, labels)
        family.add_metric([*labels.values()], cumulated, sums["sum"])

    def _family(self, kind: Any, name: str, text: str, labels: dict[str, str]) -> Any:
        if name not in self._families:
            self._families[name] = kind(name, text, labels=[*labels])
        return self._families[name]


def exposition(observation: Observation, model: str) -> str:
    """Everything that was observed, in Prometheus' text format; a scrape of any replica covers all processes."""
    page = Page()
    for name, front in sorted(observation.fronts.items()):
        _front(page, name, front, model)
    for name, stats in observation.of_role("target"):
        _rank(page, name, stats, model)
        _acceptance(page, name, stats["acceptance"], model)
        _calibration(page, name, stats["calibration"])
    for name, stats in observation.of_role("drafter"):
        for metric, text, key in DRAFTER_COUNTERS:
            page.counter(metric, text, stats[key], drafter=name)
        page.gauge(
            "dspark:drafter_contexts", "Contexts held.", stats["open_requests"], drafter=name
        )
    for _, stats in observation.of_role("allocator"):
        for metric, text, key in ALLOCATOR_COUNTERS:
            page.counter(metric, text, stats[key])
        for rule, count in sorted(stats["num_by_rule"].items()):
            page.counter("dspark:published_budgets", "Budgets sent to ranks.", count, rule=rule)
        for load in stats["load"]["ranks"]:
            _load(page, load)
    _members(page, observation)
    return generate_latest(page).decode()


def _front(page: Page, name: str, front: dict[str, Any], model: str) -> None:
    vllm = {"model_name": model, "engine": name}
    page.gauge("vllm:num_requests_running", "Open streams.", front["num_streams"], **vllm)
    prompt, generated = front["num_prompt_tokens"], front["num_generated_tokens"]
    page.counter("vllm:prompt_tokens", "Prompt tokens of ended streams.", prompt, **vllm)
    page.counter("vllm:generation_tokens", "Generated tokens of ended streams.", generated, **vllm)
    who = {"member": name, "role": "ingress"}
    page.gauge("dspark:member_memory_bytes", MEMORY, front["memory_bytes"], **who)
    for reason, count in sorted(front["finished"].items()):
        labels = {**vllm, "finished_reason": reason}
        page.counter("vllm:request_success", "Ended streams.", count, **labels)
    for metric, text, key in FRONT_HISTOGRAMS:
        labels = vllm if metric.startswith("vllm:") else {"ingress": name}
        page.histogram(metric, text, front[key], **labels)
    for status, count in sorted(front["responses"].items()):
        page.counter("dspark:responses", "Answers.", count, ingress=name, status=str(status))
    for metric, text, key in FRONT_COUNTERS:
        page.counter(metric, text, front[key], ingress=name)
    for metric, text, key in FRONT_GAUGES:
        page.gauge(metric, text, front[key], ingress=name)
    for key, count in sorted(front["keys"].items()):
        page.counter("dspark:key_requests", "Of each key.", count, ingress=name, key=key)
    for key, count in front["dispatch"].items():
        page.counter(f"dspark:{key}", "Of the dispatcher.", count, ingress=name)


def _rank(page: Page, name: str, stats: dict[str, Any], model: str) -> None:
    for metric, text, key in RANK_COUNTERS:
        page.counter(metric, text, stats[key], rank=name)
    for metric, text, key in RANK_GAUGES:
        page.gauge(metric, text, stats[key], rank=name)
    for metric, text, key in RANK_SECONDS:
        page.counter(metric, text, stats["clock"][key], rank=name)
    vllm = {"model_name": model, "engine": name}
    used = 1.0 - stats["num_free_blocks"] / stats["num_blocks"]
    page.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use (0 to 1).", used, **vllm)
    asked, hit = stats["num_prefix_asked_tokens"], stats["num_prefix_hit_tokens"]
    page.counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", asked, **vllm)
    page.counter("vllm:prefix_cache_hits", "Prompt tokens not computed again.", hit, **vllm)
    waiting = stats["num_waiting"]
    page.gauge("vllm:num_requests_waiting", "Admitted, no place yet.", waiting, **vllm)
    step = stats["last_step"]
    if step is not None:
        budget, price = step["max_draft_tokens"], step["min_survival"]
        if budget < UNLIMITED:  # some rules set a price alone
            page.gauge("dspark:budget_tokens", "K of the last step.", budget, rank=name)
        page.gauge("dspark:price", "Lowest survival worth verifying (λ).", price, rank=name)
        page.gauge("dspark:batch_tokens", "Of the last step.", step["batch_tokens"], rank=name)
    if stats["group"] is not None:
        for metric, text, key in GROUP_COUNTERS:
            page.counter(metric, text, stats["group"][key], rank=name)
        for metric, text, key in GROUP_GAUGES:
            if stats["group"][key] is not None:
                page.gauge(metric, text, stats["group"][key], rank=name)
    predicted = stats["clock"]["last_predicted_s"]
    if predicted is not None:
        text = "Foretold time of the last step."
        page.gauge("dspark:last_predicted_step_time_seconds", text, predicted, rank=name)


def _load(page: Page, load: dict[str, Any]) -> None:
    """What the allocator thinks of a rank."""
    rank, budget, error = load["rank"], load["budget"], load["prediction_error"]
    if budget is not None:
        most, price = budget["max_draft_tokens"], budget["min_survival"]
        if most < UNLIMITED:
            page.gauge("dspark:rank_budget_tokens", "K as last published.", most, rank=rank)
        page.gauge("dspark:rank_price", "λ as last published.", price, rank=rank)
    if error is not None:
        text = "Mean relative error of foretold step times."
        page.gauge("dspark:rank_prediction_error", text, error, rank=rank)
    text = "Steps decided without a search: the curve is flat, or was wrong about what came."
    page.counter("dspark:fallback_steps", text, load["num_fallback_steps"], rank=rank)


def _acceptance(page: Page, name: str, counts: dict[str, Any], model: str) -> None:
    vllm = {"model_name": model, "engine": name}
    scheduled, accepted = counts["scheduled"], counts["accepted"]
    # What vLLM calls a draft is a round in which draft tokens were verified.
    drafts = scheduled[0] if scheduled else 0
    prefix = "vllm:spec_decode_num"
    page.counter(f"{prefix}_drafts", "Rounds with draft tokens.", drafts, **vllm)
    page.counter(f"{prefix}_draft_tokens", "Draft tokens verified.", sum(scheduled), **vllm)
    page.counter(f"{prefix}_accepted_tokens", "Of those, accepted.", sum(accepted), **vllm)
    page.counter("dspark:rounds", "With a draft or without.", counts["num_rounds"], rank=name)
    for position, of_position in enumerate(
        zip(counts["proposed"], scheduled, accepted, counts["expected"], strict=True)
    ):
        proposed, sent, kept, expected = of_position
        at = {"rank": name, "position": str(position)}
        page.counter(
            f"{prefix}_accepted_tokens_per_pos", "Accepted.", kept, **vllm, position=str(position)
        )
        page.counter("dspark:proposed_tokens", "Draft tokens proposed.", proposed, **at)
        page.counter("dspark:trimmed_tokens", "Proposed, not verified.", proposed - sent, **at)
        page.counter("dspark:scheduled_tokens", "Draft tokens verified.", sent, **at)
        page.counter("dspark:accepted_tokens", "Verified and accepted.", kept, **at)
        page.counter("dspark:rejected_tokens", "Verified and refused.", sent - kept, **at)
        text = "Forecast survivals of the verified tokens, summed."
        page.counter("dspark:expected_accepted_tokens", text, expected, **at)


def _calibration(page: Page, name: str, seen: dict[str, Any]) -> None:
    text = "Rounds verified beyond their budget, to see what becomes of such slots."
    page.counter("dspark:explored_rounds", text, seen["num_explored"], rank=name)
    text = "Draft tokens verified beyond a budget."
    page.counter("dspark:explored_tokens", text, seen["num_explored_tokens"], rank=name)
    text = "Times confidences were found to have drifted from what is accepted."
    page.counter("dspark:calibration_alarms", text, seen["num_alarms"], rank=name)
    for rule, of_rule in seen["by_rule"].items():
        for position, (shift, error) in enumerate(
            zip(of_rule["shifts"], of_rule["ece"], strict=True)
        ):
            at = {"rank": name, "rule": rule, "position": str(position)}
            text = "What is added to the drafter's confidence, in logits."
            page.gauge("dspark:calibration_shift", text, shift, **at)
            if error is not None:
                text = "Expected calibration error of recent survivals, corrected for what was not verified."
                page.gauge("dspark:calibration_error", text, error, **at)


def _members(page: Page, observation: Observation) -> None:
    for member in observation.members:
        who = {"member": member["name"], "role": member["role"]}
        page.gauge("dspark:member_up", "Ready.", float(member["state"] == "ready"), **who)
        text = "Of the settings it runs; a rollout raises it."
        page.gauge("dspark:member_revision", text, member["revision"], **who)
        page.gauge("dspark:member_memory_bytes", MEMORY, member["memory_bytes"], **who)
        draining = float(member["state"] == "draining")
        page.gauge("dspark:member_draining", "It takes no new streams.", draining, **who)
        text = "Times it came back after its process had ended."
        page.counter("dspark:recoveries", text, member["num_restarts"], **who)
        stats = observation.stats.get(member["name"])
        age = observation.stale_s.get(member["name"], 0.0 if stats else float("nan"))
        page.gauge("dspark:member_stats_age_seconds", "0: it answered this time.", age, **who)
        for key, count in stats["link"].items() if stats else ():
            name = f"dspark:link_{key.removeprefix('num_')}_messages"
            page.counter(name, "Messages of its link.", count, **who)
    killed, failed = observation.num_killed, observation.num_failed_looks
    page.counter("dspark:killed_members", "Ended because their loop stood still.", killed)
    page.counter("dspark:failed_looks", "The supervisor gave no answer.", failed)
