"""Who comes in, how often, and with how many streams."""

from __future__ import annotations

import hashlib

import pytest

from cluster.api_errors import ApiError
from cluster.api_keys import KeyLimits, KeyRing, key_limits
from configs.schema import ClusterConfig


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def refused(call, *args) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args)
    return caught.value


RING = [KeyLimits("alice", digest("sk-a"), 120.0, 3), KeyLimits("bob", digest("sk-b"))]


@pytest.mark.parametrize("header", ["Bearer sk-a", "bearer sk-a", "Bearer  sk-a "])
def test_a_known_key_opens_its_own_account(header):
    ring = KeyRing(RING)
    assert ring.account(header).limits.name == "alice"
    assert ring.account(header) is ring.account("Bearer sk-a")
    assert ring.account("Bearer sk-b").limits.name == "bob"
    assert ring.num_requests == {"alice": 3, "bob": 1}


@pytest.mark.parametrize(
    "header", [None, "", "sk-a", "Basic sk-a", "Bearer", "Bearer sk-A", f"Bearer {digest('sk-a')}"]
)
def test_anything_else_is_401_and_repeats_nothing_of_it(header):
    ring = KeyRing(RING)
    error = refused(ring.account, header)
    assert error.status == 401 and error.code == "invalid_api_key"
    assert error.headers == {"www-authenticate": "Bearer"}
    assert error.body["error"]["type"] == "authentication_error"
    assert "sk-" not in str(error) and ring.num_unknown == 1


def test_without_keys_everybody_comes_in_unlimited():
    account = KeyRing().account(None)
    for _ in range(1000):
        account.take_request(0.0)
    account.open_streams(10**6)


def test_a_burst_as_large_as_a_minute_then_the_rate():
    account = KeyRing(RING).account("Bearer sk-a")  # two a second
    for _ in range(120):
        account.take_request(10.0)
    error = refused(account.take_request, 10.0)
    assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", 1)
    refused(account.take_request, 10.4)
    account.take_request(10.5)
    refused(account.take_request, 10.9)
    account.take_request(11.0)
    refused(account.take_request, 5.0)  # a clock that jumps back gives nothing
    for _ in range(120):
        account.take_request(10_000.0)
    refused(account.take_request, 10_000.0)


def test_a_slow_rate_says_how_long_to_wait():
    account = KeyRing([KeyLimits("slow", digest("k"), 0.5)]).account("Bearer k")
    account.take_request(0.0)
    assert refused(account.take_request, 0.0).retry_after_s == 120
    assert refused(account.take_request, 60.0).retry_after_s == 60
    account.take_request(121.0)


def test_streams_count_until_they_are_given_back_once():
    account = KeyRing(RING).account("Bearer sk-a")
    first = account.open_streams(2)
    account.open_streams(1)
    error = refused(account.open_streams, 1)
    assert (error.status, error.code, error.retry_after_s) == (429, "share_exceeded", 1)
    first.give_back()
    first.give_back()
    assert account.num_streams == 1
    account.open_streams(2)


def test_what_never_fits_the_share_is_not_worth_a_retry():
    account = KeyRing(RING).account("Bearer sk-a")
    error = refused(account.open_streams, 4)
    assert (error.status, error.param, error.retry_after_s) == (400, "n", None)


def test_every_replica_gets_an_equal_part_of_a_keys_limits():
    keys = [
        {"name": "all", "sha256": digest("1")},
        {"name": "half", "sha256": digest("2"), "max_share": 0.5, "requests_per_minute": 30},
        {"name": "tiny", "sha256": digest("3"), "max_share": 0.001},
    ]
    config = ClusterConfig.model_validate(
        {
            "ingress": {"num_replicas": 2, "api_keys": keys},
            "target": {"num_ranks": 3, "max_running": 8},
        }
    )
    found = [(k.name, k.requests_per_minute, k.max_streams) for k in key_limits(config)]
    assert found == [("all", 0.0, 0), ("half", 15.0, 6), ("tiny", 0.0, 1)]


def test_limits_follow_the_places_and_replicas_there_are_and_what_was_used_stays_used():
    keys = [{"name": "a", "sha256": digest("k"), "max_share": 0.5, "requests_per_minute": 60}]
    config = ClusterConfig.model_validate(
        {"ingress": {"api_keys": keys}, "target": {"num_ranks": 2, "max_running": 4}}
    )
    ring = KeyRing(key_limits(config))
    account = ring.account("Bearer k")
    held = account.open_streams(4)
    account.take_request(0.0)
    assert refused(account.open_streams, 1).code == "share_exceeded"
    ring.adopt(key_limits(config, num_places=16))  # a rollout of max_running=8
    account.open_streams(4)
    assert refused(account.open_streams, 1).code == "share_exceeded"
    ring.adopt(key_limits(config, num_places=16, num_replicas=2))
    assert account.limits.requests_per_minute == 30 and account.limits.max_streams == 4
    held.give_back()
    assert refused(account.open_streams, 1).code == "share_exceeded", "four are open still"
    for _ in range(30):
        account.take_request(0.0)
    assert refused(account.take_request, 0.0).code == "rate_limit_exceeded"


def test_other_limits_give_back_no_request_that_was_made():
    keys = [{"name": "a", "sha256": digest("k"), "requests_per_minute": 60}]
    config = ClusterConfig.model_validate({"ingress": {"api_keys": keys}})
    ring = KeyRing(key_limits(config))
    account = ring.account("Bearer k")
    for _ in range(45):
        account.take_request(0.0)
    ring.adopt(key_limits(config, num_replicas=2))  # 30 a minute, and 15 are left
    for _ in range(15):
        account.take_request(0.0)
    assert refused(account.take_request, 0.0).code == "rate_limit_exceeded"
