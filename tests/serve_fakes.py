"""A cluster of scripted engines in a process of its own, started and ended as `dspark serve` or `deploy` does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

from cluster import launch as launcher
from cluster.commands.signals import interruptible, on_signal
from cluster.parts import Parts
from configs.schema import ClusterConfig
from tests import ray_fakes


def main(settings: str, address: str | None = None, outlives: str = "") -> None:
    parts = Parts(
        target_engine=ray_fakes.FakeTarget,
        drafter_engine=ray_fakes.FakeDrafter,
        measure_steps=ray_fakes.fake_step_times,
        run_ingress=run_ingress,
        stop_ingress=lambda: None,
    )
    config = ClusterConfig.model_validate(json.loads(settings))
    stop = threading.Event()
    with interruptible():
        try:
            stays = bool(outlives)
            launcher.launch(config, progress=say, address=address, parts=parts, outlives=stays)
            on_signal(stop.set)
            say("serving")
            if not stays:
                stop.wait()
        finally:
            on_signal(lambda: None)
            launcher.shutdown()
            say("ended")


def run_ingress(_config: ClusterConfig) -> str:
    """May leave an orphan behind, as a proxy does whose manager was killed."""
    if os.environ.get("LEAVE_AN_ORPHAN"):
        command = ["sh", "-c", "sleep 600 >/dev/null 2>&1 &"]
        subprocess.run(command, check=True, start_new_session=True)
    return "http://127.0.0.1:0/v1"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
