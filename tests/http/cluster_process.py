"""A whole cluster as `dspark serve` starts it. Driven by lines on stdin.

Arguments: the port, and sections of the configuration as JSON. Engines are scripted; where `model.path` is a directory,
they are the real ones over that (tiny) model, and a step takes at least as long as a scripted one.

Commands: `kill NAME` ends an actor's process as a crash would, `settled` says whether every part is ready, `baseline`
says whether all ranks are idle, have every block back and found nothing wrong, `members` and `groups` print what the
supervisor knows of each part and what each rank says of its group as JSON, `address` names its Ray, `quit` ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray

from cluster import launch as launcher
from cluster.app import run_ingress, serve_environment, stop_ingress
from cluster.parts import Parts, drafter_engine
from configs.schema import ClusterConfig
from tests import ray_fakes


def main(port: int, more: str = "{}") -> None:
    sections: dict[str, Any] = {
        "model": {"dtype": "float32", "max_model_len": 2048},
        "target": {"num_ranks": 2, "num_cpus": 0.1, "kv_cache_tokens": 32768},
        "drafter": {"num_cpus": 0.1},
        **json.loads(more),
    }
    sections["ingress"] = {"port": port, **sections.get("ingress", {})}
    config = ClusterConfig.model_validate(sections)
    is_real = Path(config.model.path).is_dir()
    parts = Parts(
        target_engine=ray_fakes.paced_target if is_real else ray_fakes.FakeTarget,
        drafter_engine=drafter_engine if is_real else ray_fakes.FakeDrafter,
        measure_steps=ray_fakes.fake_step_times,
        run_ingress=run_ingress,
        stop_ingress=stop_ingress,
        environment=lambda config: serve_environment(config.ingress),
    )
    try:
        say(f"READY {launcher.launch(config, parts=parts).endpoint_url}")
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            say(answer(*line.split()))
    finally:
        launcher.shutdown()
    say("STOPPED")


def answer(command: str, *arguments: str) -> str:
    if command == "kill":
        ray.kill(ray.get_actor(arguments[0], namespace=launcher.NAMESPACE), no_restart=False)
        return "killed"
    if command == "address":
        return str(ray.get_runtime_context().gcs_address)
    supervisor = ray.get_actor("supervisor", namespace=launcher.NAMESPACE)
    if command in ("settled", "members"):
        status: dict[str, Any] = ray.get(supervisor.status.remote(), timeout=10)
        if command == "members":
            return json.dumps(status["members"])
        return str(status["is_settled"] and all(m["state"] == "ready" for m in status["members"]))
    stats: dict[str, Any] = ray.get(supervisor.stats.remote(), timeout=20)
    ranks = [of for name, of in stats.items() if name.startswith("target")]
    if command == "groups":
        return json.dumps([of["group"] for of in ranks])
    return str(
        all(
            of["is_idle"]
            and of["num_free_blocks"] == of["num_blocks"]
            and not of["num_idle_problems"]
            for of in ranks
        )
    )


def say(line: str) -> None:
    sys.stdout.write(f"> {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
