"""The drill: one head, three workers, a group of two ranks that spans two hosts and another on the third."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import traceback
from pathlib import Path
from typing import Any

import httpx
import yaml

from configs.load import load
from configs.schema import ClusterConfig
from tests.cluster import slow_host, tiny_mixture
from tests.cluster.hosts import ENVIRONMENT, Host, Network
from tests.cluster.one_process import greedy
from tests.cluster.operator_machine import Operator
from tests.cluster.steps import foretold, say, step
from tests.cluster.streams import Load, Stream, prompts

OPERATOR = "10.77.0.1"
HEAD, WORKERS = ("h0", "10.77.0.10"), {"h1": "10.77.0.11", "h2": "10.77.0.12", "h3": "10.77.0.13"}
CORES = {"h1": 1, "h2": 1, "h3": 2}  # as Ray counts them: two ranks fit on the third host only
PORT = 8000
READY_WITHIN_S, BACK_WITHIN_S = 300.0, 300.0


def run(arguments: argparse.Namespace, logs: Path) -> int:
    """All steps; returns the exit status."""
    folder = Path("/tmp/drill")
    folder.mkdir()
    network = Network(folder / "hosts", OPERATOR)
    try:
        Drill(arguments, folder, network, logs).steps()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        _keep_logs(network, logs)
        with step("take the hosts away"):
            network.remove()
    if status == 0:
        with step("nothing is left"):
            _check_nothing_left()
    shutil.rmtree(folder)
    return status


class Drill:
    """The steps in their order, and what they hand on."""

    def __init__(
        self, arguments: argparse.Namespace, folder: Path, network: Network, logs: Path
    ) -> None:
        self.arguments, self.folder, self.network, self.logs = arguments, folder, network, logs
        self.operator: Operator
        self.endpoint = ""
        self.settings = folder / "serve.yaml"
        self.config: ClusterConfig
        self.expected: list[list[int]] = []
        self.prompts = prompts(arguments.streams, 1, tiny_mixture.VOCAB_SIZE)

    def steps(self) -> None:
        with step("switch on one head and three workers"):
            self._boot()
        with step("dspark up: ray up on the four hosts"):
            up = self.operator.dspark("up", str(self.operator.file))
            assert len(up["nodes"]) == 1 + len(WORKERS), up
        if self.arguments.slow:
            self._slow_a_host()
        else:
            self._lose_a_host()
        with step("dspark down: no Ray on any host"):
            self.operator.dspark("down", str(self.operator.file))
            self._check_hosts_are_idle()

    def _lose_a_host(self) -> None:
        with step("the same prompts in one process, without speculation"):
            self.expected = greedy(self.config, self.prompts, self.arguments.tokens)
        with step("dspark deploy: two groups of two ranks, the model copied to the hosts"):
            deployed = self.operator.on_cluster("deploy", "--config", str(self.settings))
            self.endpoint = deployed["endpoint"]
            assert self.endpoint == f"http://{HEAD[1]}:{PORT}/v1"
            self._check_places()
        with step(f"{len(self.prompts)} streams from {OPERATOR}"):
            self._compare(self._load().finish())
        spanning, other = self._groups_by_spread()
        victim = self._hosts_of(spanning)[0]
        with step(f"power off {victim.name} under load"):
            self._lose(victim, other)
        with step(f"switch {victim.name} on again"):
            self.network.boot(victim)
            self._await_all_ready()
        with step("all ranks take part again"):
            self._compare(self._load().finish())
        self._end_deployment()

    def _slow_a_host(self) -> None:
        """A group, which waits for its slowest, spares it; of ranks on their own the slow one gets fewer streams."""
        slow = self.network.hosts["h1"]
        slow.limit_cpu(slow_host.CORES)
        with step(f"{slow.name} gets {slow_host.CORES} of a core; one group over all hosts"):
            rank = self._deploy_slow(slow, slow_host.GROUP)
            slow_host.check_profiles(self.operator, rank)
        with step("joint budgets against equal ones"):
            found = slow_host.compare(self.operator, self.endpoint, rank, slow_host.GROUP)
            foretold(found.slow < found.healthy, "the slow host is given the smaller budget")
            foretold(found.gain > 1, "that is faster than equal budgets")
        self._end_deployment()
        with step("the same model, a rank a host"):
            rank = self._deploy_slow(slow, slow_host.ALONE)
            slow_host.check_profiles(self.operator, rank)
        with step("each its own budget against equal ones"):
            found = slow_host.compare(self.operator, self.endpoint, rank, slow_host.ALONE)
            foretold(found.share < 1 / found.num_ranks, "streams go where they are faster")
        self._end_deployment()

    def _deploy_slow(self, slow: Host, case: slow_host.Case) -> str:
        """Deploy over all hosts; returns the rank on the slow one."""
        there = yaml.safe_load(self.settings.read_text(encoding="utf-8"))
        model = self.arguments.bundled
        if case.is_wide:
            model = str(tiny_mixture.write(self.folder / "wide", tiny_mixture.WIDE))
        values = slow_host.settings(model, there["ingress"], case)
        self.settings.write_text(yaml.safe_dump(values), encoding="utf-8")
        deployed = self.operator.on_cluster("deploy", "--config", str(self.settings))
        self.endpoint = deployed["endpoint"]
        ranks = {rank["node_ip"]: name for name, rank in self._ranks().items()}
        assert set(ranks) == set(WORKERS.values()), ranks
        return ranks[slow.address]

    def _end_deployment(self) -> None:
        with step("dspark stop"):
            self.operator.on_cluster("stop")
            assert not self.operator.on_cluster("status")["deployed"]

    # --- steps ------------------------------------------------------------------------------------------------------

    def _boot(self) -> None:
        for name, address in (HEAD, *WORKERS.items()):
            host = self.network.add(name, address)
            home = host.folder / "home" / "dspark"
            home.mkdir()
            (home / "env").symlink_to(
                ENVIRONMENT
            )  # an environment that is in place, as in an image
            if name in CORES:
                cores = 1 if self.arguments.slow else CORES[name]  # slow: a rank a host
                (home / "local.sh").write_text(f"DSPARK_RAY_OPTIONS=--num-cpus={cores}\n")
        for host in self.network.hosts.values():
            self.network.boot(host)
        self.operator = Operator(self.folder / "operator", self.network, self.logs)
        self.settings.write_text(yaml.safe_dump(self._settings()), encoding="utf-8")
        self.config = load(str(self.settings))

    def _settings(self) -> dict[str, Any]:
        model = {"path": "smollm2-135m-moe", "name": "drill", "dtype": "float32", "device": "cpu"}
        if self.arguments.model == "tiny":
            folder = tiny_mixture.write(self.folder / "model")
            model |= {"path": str(folder), "drafter": "ngram"}
        return {
            "model": model | {"max_model_len": 2048, "numerics": "reproducible"},
            "target": {
                "num_ranks": 4,
                "group_size": 2,
                "num_cpus": 1,
                "num_threads": 1,
                "node_resource": "target",
                "kv_cache_tokens": 16384,
                "max_running": 16,
                "max_batch_tokens": 128,
            },
            "drafter": {"num_actors": 2, "num_cpus": 0, "num_threads": 1},
            "ingress": {
                "host": "0.0.0.0",
                "port": PORT,
                "node_resource": "ingress",
                "replay_timeout_s": 120,
            },
        }

    def _load(self) -> Load:
        return Load(self.endpoint, "drill", self.prompts, self.arguments.tokens).start()

    def _compare(self, streams: list[Stream]) -> None:
        """Every text is that of the one process, to the last token."""
        pairs = zip(streams, self.expected, strict=True)
        changed = [stream.prompt for stream, expected in pairs if stream.tokens != expected]
        assert not changed, f"other tokens than in one process: {changed}"
        counts = {s.usage["completion_tokens"] for s in streams}
        assert counts == {self.arguments.tokens}, counts
        accepted = sum(s.usage["dspark"]["num_accepted"] for s in streams)
        pause_s = max(s.longest_pause_s for s in streams)
        say(
            f"equal to one process; {accepted} draft tokens accepted; longest pause {pause_s:.1f} s"
        )

    def _lose(self, victim: Host, others: tuple[str, ...]) -> None:
        """All streams run where the host is lost, and `others` are there to go on with them."""
        before = self._num_replayed()
        self.operator.on_cluster("drain", others[0])
        load = self._load()
        self.operator.until("streams began", lambda: load.num_begun == len(load.streams), 60)
        self.operator.on_cluster("undrain", others[0])
        assert load.num_done == 0, "the streams are too short for this drill: raise --tokens"
        victim.power_off()
        self._compare(load.finish())
        replayed = self._num_replayed() - before
        say(f"{replayed:.0f} streams had to move to another rank")
        assert replayed == len(load.streams), "a drained group was given streams"

    def _num_replayed(self) -> float:
        url = self.endpoint.removesuffix("/v1") + "/metrics"
        text = httpx.get(url, timeout=20, trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith("dspark:num_replayed_total")]
        return sum(float(line.split()[-1]) for line in lines)

    # --- what the cluster says of itself ----------------------------------------------------------------------------

    def _ranks(self) -> dict[str, dict[str, Any]]:
        members = self.operator.on_cluster("status")["members"]
        return {m["name"]: m for m in members if m["role"] == "target"}

    def _check_places(self) -> None:
        """One group lies on one host, the other on two."""
        hosts = {name: rank["node_ip"] for name, rank in self._ranks().items()}
        groups = [{hosts[f"target-{i}"] for i in pair} for pair in ((0, 1), (2, 3))]
        say(", ".join(f"{name} on {address}" for name, address in sorted(hosts.items())))
        assert sorted(map(len, groups)) == [1, 2], groups
        assert set(hosts.values()) == set(WORKERS.values()), hosts

    def _groups_by_spread(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The group that spans hosts, and the other one."""
        groups = (("target-0", "target-1"), ("target-2", "target-3"))
        spanning, other = sorted(groups, key=lambda group: -len(self._hosts_of(group)))
        return spanning, other

    def _hosts_of(self, group: tuple[str, ...]) -> list[Host]:
        ranks = self._ranks()
        addresses = {ranks[name]["node_ip"] for name in group}
        return [host for host in self.network.hosts.values() if host.address in addresses]

    def _await_all_ready(self) -> None:
        def is_back() -> bool:
            report = self.operator.on_cluster("status")
            states = {member["state"] for member in report.get("members", [])}
            return len(report["nodes"]) == 1 + len(WORKERS) and states == {"ready"}

        self.operator.until("all hosts and ranks are back", is_back, BACK_WITHIN_S)

    def _check_hosts_are_idle(self) -> None:
        """Only the sshd is left, and the sessions that ask."""
        for host in self.network.hosts.values():
            said = host.ssh("ps -eo comm=").split()
            rest = sorted(set(said) - {"sshd", "bash", "ps"})
            assert not rest, f"{host.name} still runs {rest}"


# --- keeping and cleaning ----------------------------------------------------------------------------------------


def _keep_logs(network: Network, logs: Path) -> None:
    """What Ray said on hosts that still run, and their sshd."""
    for host in network.hosts.values():
        kept = logs / host.name
        kept.mkdir(exist_ok=True)
        with contextlib.suppress(Exception):
            shutil.copy(host.folder / "sshd.log", kept)
            packed = "tar -C /tmp/ray -czf - session_latest/logs 2>/dev/null || true"
            command = ["ssh", "-q", "-i", str(host.key), "-o", "StrictHostKeyChecking=no"]
            command += ["-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=3"]
            with (kept / "ray.tar.gz").open("wb") as archive:
                subprocess.run(
                    [*command, f"root@{host.address}", packed], stdout=archive, timeout=30
                )


def _check_nothing_left() -> None:
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in links.stdout.splitlines()]
    assert names == ["lo"], f"links are left: {names}"
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not spaces.stdout.strip(), spaces.stdout
    processes = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    left = [p for p in processes if p != os.getpid() and _command(p)]
    assert not left, f"processes are left: {[_command(p) for p in left]}"


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return ""
