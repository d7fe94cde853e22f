"""What the configuration says about streams is what the front keeps to."""

from __future__ import annotations

from cluster.app import dispatch_limits
from cluster.live_stream import StreamLimits
from configs.load import load


def test_the_bounds_of_a_stream_are_those_of_the_configuration():
    overrides = ("stall_timeout_s=7", "replay_timeout_s=8", "max_fruitless_replays=9")
    config = load(overrides=[f"ingress.{override}" for override in overrides])
    assert dispatch_limits(config).stream == StreamLimits(7.0, 8.0, 9)
    assert dispatch_limits(load()).stream == StreamLimits()
