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
from cluster.exposition_tables import (
    ALLOCATOR_COUNTERS,
    DRAFTER_COUNTERS,
    FRONT_COUNTERS,
    FRONT_GAUGES,
    FRONT_HISTOGRAMS,
    GROUP_COUNTERS,
    GROUP_GAUGES,
    MEMORY,
    RANK_COUNTERS,
    RANK_GAUGES,
    RANK_SECONDS,
)
from cluster.observation import Observation


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
        text = "Streams and messages of the dispatcher."
        page.counter(f"dspark:{key}", text, count, ingress=name)


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
    page.counter(
        "dspark:rounds", "Rounds, with a draft or without.", counts["num_rounds"], rank=name
    )
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
        text = "Times it was given up although its process lived."
        page.counter("dspark:silences", text, member["num_silences"], **who)
        stats = observation.stats.get(member["name"])
        age = observation.stale_s.get(member["name"], 0.0 if stats else float("nan"))
        page.gauge("dspark:member_stats_age_seconds", "0: it answered this time.", age, **who)
        for key, count in stats["link"].items() if stats else ():
            name = f"dspark:link_{key.removeprefix('num_')}_messages"
            page.counter(name, "Messages of its link.", count, **who)
    killed, failed = observation.num_killed, observation.num_failed_looks
    page.counter("dspark:killed_members", "Ended because their loop stood still.", killed)
    page.counter("dspark:failed_looks", "The supervisor gave no answer.", failed)
