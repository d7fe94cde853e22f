"""One scrape tells of all processes, with the identities that must hold; the dashboard asks only for what is there."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import watch_routes
from cluster.exposition_tables import GROUP_GAUGES
from tests.http.browser import MISSING, Browser
from tests.http.served import ServeProcess
from tests.http.test_whole_cluster import read, read_all, requests

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

GRAFANA = json.loads((watch_routes.FOLDER / "grafana.json").read_text(encoding="utf-8"))
# What only a group tells is checked by tests/pure/test_observation.py.
OF_GROUPS = {name for name, *_ in GROUP_GAUGES}
TARGETS = [target for panel in GRAFANA["panels"] for target in panel["targets"]]
TARGETS = [target for target in TARGETS if target["expr"] not in OF_GROUPS]
QUERIES = [target["expr"] for target in TARGETS]
NUM_PLACES = 4

Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServeProcess]:
    target = {
        "num_ranks": 2,
        "num_cpus": 0.1,
        "kv_cache_tokens": 32768,
        "max_running": NUM_PLACES,
    }
    process = ServeProcess("tests.http.cluster_process", json.dumps({"target": target}))
    process.until(lambda: process.ask("settled") == "True", 60)
    yield process
    process.quit()


def root(cluster: ServeProcess) -> str:
    return cluster.url.removesuffix("/v1")


def scrape(cluster: ServeProcess) -> Samples:
    answer = httpx.get(f"{root(cluster)}/metrics", timeout=30)
    assert answer.status_code == 200
    samples: Samples = defaultdict(list)
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            samples[sample.name].append((sample.labels, sample.value))
    return samples


def total(samples: Samples, name: str) -> float:
    return sum(value for _, value in samples[name])


def at(samples: Samples, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(v for _, v in sorted(labels.items())): value for labels, value in samples[name]}


@pytest.fixture(scope="module")
def served(cluster: ServeProcess) -> tuple[Samples, list[dict[str, Any]]]:
    """The metrics after a known run, and what its clients were told."""
    answers = asyncio.run(read_all(cluster.url, requests(16, seed=5)))
    cluster.until(lambda: cluster.ask("baseline") == "True", 20)
    asyncio.run(asyncio.sleep(1))  # the next look is a new one
    return scrape(cluster), answers


def test_every_draft_token_is_trimmed_accepted_or_rejected(served):
    samples, _ = served
    names = ("proposed", "trimmed", "scheduled", "accepted", "rejected")
    proposed, trimmed, scheduled, accepted, rejected = (
        at(samples, f"dspark:{name}_tokens_total") for name in names
    )
    assert len(proposed) == 10  # two ranks, five positions
    assert sum(trimmed.values()) > 0 and sum(rejected.values()) > 0
    for slot in proposed:
        assert proposed[slot] == trimmed[slot] + scheduled[slot]
        assert scheduled[slot] == accepted[slot] + rejected[slot]
        assert min(trimmed[slot], accepted[slot], rejected[slot]) >= 0


def test_the_scrape_agrees_with_what_clients_were_told(served):
    samples, answers = served
    told = [answer["usage"] for answer in answers]
    assert total(samples, "vllm:generation_tokens_total") == sum(
        usage["completion_tokens"] for usage in told
    )
    assert total(samples, "dspark:committed_tokens_total") == sum(
        usage["completion_tokens"] for usage in told
    )
    counts = [usage["dspark"] for usage in told]
    assert total(samples, "dspark:rounds_total") == sum(c["num_rounds"] for c in counts)
    assert total(samples, "dspark:scheduled_tokens_total") == sum(
        c["num_scheduled"] for c in counts
    )
    assert total(samples, "vllm:time_to_first_token_seconds_count") == len(answers)
    assert total(samples, "dspark:largest_gap_seconds_count") == len(answers)


def test_vllms_names_mean_what_they_mean_there(served):
    """As `vllm bench serve` adds them up: over all lines of a name, positions by their label."""
    samples, _ = served
    per_position: dict[int, float] = defaultdict(float)
    for labels, value in samples["vllm:spec_decode_num_accepted_tokens_per_pos_total"]:
        assert set(labels) == {"model_name", "engine", "position"}
        per_position[int(labels["position"])] += value
    accepted = total(samples, "vllm:spec_decode_num_accepted_tokens_total")
    drafts = total(samples, "vllm:spec_decode_num_drafts_total")
    assert sorted(per_position) == [0, 1, 2, 3, 4]
    assert sum(per_position.values()) == accepted == total(samples, "dspark:accepted_tokens_total")
    assert total(samples, "vllm:spec_decode_num_draft_tokens_total") == total(
        samples, "dspark:scheduled_tokens_total"
    )
    assert per_position[0] <= drafts <= total(samples, "dspark:rounds_total")
    assert 1 < 1 + accepted / drafts < 5


def test_forecast_and_foretold_stand_beside_what_came(served):
    samples, _ = served
    expected = at(samples, "dspark:expected_accepted_tokens_total")
    scheduled = at(samples, "dspark:scheduled_tokens_total")
    for slot, value in expected.items():
        assert 0 <= value <= scheduled[slot] + 1e-3
    assert total(samples, "dspark:predicted_step_seconds_total") > 0
    assert total(samples, "dspark:compared_step_seconds_total") > 0
    for name in ("dspark:budget_tokens", "dspark:price", "dspark:calibration_error"):
        assert {labels["rank"] for labels, _ in samples[name]} == {"target-0", "target-1"}
    assert {labels["member"] for labels, value in samples["dspark:member_up"] if value} == {
        "allocator",
        "drafter-0",
        "target-0",
        "target-1",
    }


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_the_dashboard_finds_what_it_asks_for(served, query):
    samples, _ = served
    names = re.findall(r"\b(?:vllm|dspark):\w+", query)
    assert names
    for name in names:
        assert samples[name], f"{name} is not exported"
        wanted = {part for by in re.findall(r"by \(([^)]*)\)", query) for part in by.split(", ")}
        for labels, _ in samples[name]:
            assert wanted <= set(labels), f"{name} has no label {wanted - set(labels)}"


@pytest.mark.parametrize(
    ("legend", "query"),
    [(target["legendFormat"], target["expr"]) for target in TARGETS],
)
def test_a_legend_names_labels_that_are_left(served, legend, query):
    samples, _ = served
    grouped = re.search(r"by \(([^)]*)\)", query)
    name = re.findall(r"\b(?:vllm|dspark):\w+", query)[0]
    left = set(grouped.group(1).split(", ")) if grouped else set(samples[name][0][0])
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= left


def test_a_recovery_is_counted_and_the_scrape_goes_on_meanwhile(cluster, served):
    assert total(served[0], "dspark:recoveries_total") == 0
    cluster.ask("kill drafter-0")
    assert scrape(cluster)["dspark:steps_total"]
    cluster.until(lambda: total(scrape(cluster), "dspark:recoveries_total") == 1, 60)
    cluster.until(lambda: cluster.ask("settled") == "True", 60)


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if MISSING:
        pytest.skip(MISSING)
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture
def crowd(cluster: ServeProcess) -> Iterator[None]:
    """More streams than there are places, until the test is over."""
    over = threading.Event()

    async def user(client: httpx.AsyncClient, seed: int) -> None:
        while not over.is_set():
            await read(client, [seed + 20, 30, 40], 300)

    async def all_users() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            await asyncio.gather(*(user(client, seed) for seed in range(4 * NUM_PLACES)))

    thread = threading.Thread(target=asyncio.run, args=(all_users(),))
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_newcomer_sees_which_rank_is_saturated_and_why_a_length_is_what_it_is(
    cluster, browser, crowd
):
    browser.open(f"{root(cluster)}/dashboard")
    browser.until("return document.querySelectorAll('.card.saturated').length == 2")
    assert "saturated: target-0, target-1" in browser.text("#status")
    assert re.search(
        r"\d+ requests? waiting: 4 of 4 places are taken", browser.text(".card.saturated")
    )
    browser.until("return document.querySelectorAll('#decisions .cell').length > 4")
    row = browser.text("#decisions li")
    assert re.search(r"length \d, accepted \d", row)
    assert re.search(r"whole block|price λ|budget K|no room|no block|too late|grow", row), row
    browser.until("return document.querySelectorAll('#curve .now').length == 1")
    browser.until("return document.querySelectorAll('#survival .bar.accepted').length == 5")
    browser.until("return document.querySelectorAll('#streams tr').length >= 16")
    browser.until("return document.querySelector('.facts').innerText.includes('tokens/s')")
    assert browser.problems() == []


@pytest.mark.parametrize(
    ("width", "scheme", "ground"),
    [(1280, "light", "rgb(246"), (1280, "dark", "rgb(18"), (390, "light", "rgb(246")],
)
def test_the_page_fits_its_window_in_both_schemes(cluster, browser, width, scheme, ground):
    browser.open(f"{root(cluster)}/dashboard", width, 800, scheme)
    browser.until("return document.querySelectorAll('.card').length == 2")
    shown = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert shown.startswith(ground)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.problems() == []
    browser.run("document.querySelector('#theme').click()")
    assert not browser.run("return getComputedStyle(document.body).backgroundColor").startswith(
        ground
    )


def test_a_prompt_is_tried_with_the_keyboard_alone_and_its_tokens_are_coloured(cluster, browser):
    browser.open(f"{root(cluster)}/dashboard")
    browser.until("return document.querySelectorAll('.card').length == 2")
    for _ in range(30):
        if browser.run("return document.activeElement.id") == "prompt":
            break
        browser.press("tab")
    assert browser.run("return document.activeElement.id") == "prompt"
    browser.press("ctrl+enter")
    browser.until("return document.querySelector('#answer-counts').innerText.includes('a round')")
    origins = browser.run(
        "return [...document.querySelectorAll('#answer .token')].map(token => token.title)"
    )
    assert {"accepted", "target"} <= set(origins) <= {"accepted", "recovered", "bonus", "target"}
    assert re.search(r"\d+ accepted · .*tokens a round", browser.text("#answer-counts"))
    rounds = browser.until("return document.querySelectorAll('#answer-rounds li').length")
    assert rounds == int(re.search(r"(\d+) rounds", browser.text("#answer-counts")).group(1))
    assert "length" in browser.text("#answer-rounds li .length")
    assert browser.problems() == []


def test_the_page_loads_nothing_from_elsewhere():
    for path in watch_routes.FOLDER.iterdir():
        if path.suffix in (".html", ".css", ".js"):
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text and "https://" not in text, path.name


@pytest.mark.parametrize("name", ["index.html", "page.js", "grafana.json", "favicon.svg"])
def test_its_files_are_served_and_no_others(cluster, name):
    answer = httpx.get(f"{root(cluster)}/dashboard/{name}")
    assert (
        answer.status_code == 200
        and answer.content == Path(watch_routes.FOLDER / name).read_bytes()
    )
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    for stray in ("nothing.js", "..%2Fapp.py", ".%2e/app.py"):
        refused = httpx.get(f"{root(cluster)}/dashboard/{stray}")
        assert refused.status_code == 404 and "error" in refused.json()
