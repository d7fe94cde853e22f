"""Serve's hands in scaling the ingress: what a replica says of itself comes to Serve's controller, which asks our
policy for the number of replicas, starts them, and drains those that are to end.

Which number is decided by `actors.core.ingress_scale`. Serve carries the policy by value to its controller, so what is
below may import only what every process of the cluster has.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from typing import Any

from actors.core.ingress_scale import FrontDecision, FrontLimits, FrontLoad, IngressScaler
from cluster.names import NAMESPACE, SUPERVISOR
from configs.ingress import IngressConfig

LOOK_S = 1.0  # Serve asks ten times as often
REPORT_S, AVERAGE_S = 2.0, 6.0  # how often a replica reports, and over how long Serve averages
DRAIN_MARGIN_S = 30.0
STOP_S = 10.0  # for a replica that ends where the number is fixed: the server stops, and its streams have been told


def replica_options(ingress: IngressConfig) -> dict[str, Any]:
    """Options of the Serve deployment that say how many replicas there are, and how long one may take to end."""
    if ingress.max_replicas is None:
        return {"num_replicas": ingress.num_replicas, "graceful_shutdown_timeout_s": STOP_S}
    with warnings.catch_warnings():
        # It points to an environment variable which nothing in this version of Serve reads.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {
            "autoscaling_config": autoscaling(ingress),
            # No stream of a replica that ends is younger than its longest: each may come to its end.
            "graceful_shutdown_timeout_s": ingress.request_timeout_s + DRAIN_MARGIN_S,
        }


def autoscaling(ingress: IngressConfig) -> Any:
    """Serve's `AutoscalingConfig`: bounds, and our policy with its own delays in the place of Serve's."""
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    limits = FrontLimits(
        least=ingress.num_replicas,
        most=ingress.most_replicas,
        target_lag_s=ingress.target_lag_ms / 1000,
        up_after_s=ingress.up_after_s,
        down_after_s=ingress.down_after_s,
    )
    return AutoscalingConfig(
        min_replicas=limits.least,
        max_replicas=limits.most,
        upscale_delay_s=0,  # beside our own Serve would wait ten minutes before it ends one
        downscale_delay_s=0,
        metrics_interval_s=REPORT_S,
        look_back_period_s=AVERAGE_S,
        policy=AutoscalingPolicy(policy_function=IngressPolicy, policy_kwargs=asdict(limits)),
    )


class IngressPolicy:
    """Lives in Serve's controller, which calls it about ten times a second."""

    def __init__(self, **limits: Any) -> None:
        self._scaler = IngressScaler(FrontLimits(**limits))
        self._last: FrontDecision | None = None
        self._looked_at = float("-inf")
        self._supervisor: Any = None

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """How many replicas shall serve; `context` is Serve's `AutoscalingContext`."""
        now = time.monotonic()
        if self._last is None or now - self._looked_at >= LOOK_S:
            self._looked_at = now
            loads = loads_of(context.aggregated_metrics or {})
            if context.current_num_replicas != context.target_num_replicas:
                loads = []  # one starts or ends: what the others say will not last
            self._last = self._scaler.decide(loads, context.target_num_replicas, now)
            self._tell(self._last)
        return self._last.num_replicas, {}

    def _tell(self, decision: FrontDecision) -> None:
        """For `dspark status` and the metrics. Nobody waits for it, and nothing depends on it."""
        import ray

        try:
            if self._supervisor is None:
                self._supervisor = ray.get_actor(SUPERVISOR, namespace=NAMESPACE)
            self._supervisor.note_ingress.remote(asdict(decision))
        except (ValueError, ray.exceptions.RayError):  # it starts again, or the deployment ends
            self._supervisor = None


def loads_of(metrics: dict[str, dict[Any, float]]) -> list[FrontLoad]:
    """The replicas that have reported everything (`IngressReplica.record_autoscaling_stats`)."""
    names = ("busy_share", "lag_s", "num_streams")
    columns = [metrics.get(name, {}) for name in names]
    known = [replica for replica in columns[0] if all(replica in column for column in columns)]
    return [FrontLoad(*(column[replica] for column in columns)) for replica in known]
