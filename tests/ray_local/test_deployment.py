"""A deployment outlives whoever made it, is found by others, and ends when one of them says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster import launch as launcher
from cluster.deployment import find
from cluster.members import Members
from cluster.model_share import Manifest, RaySource, local_folder
from configs.schema import ClusterConfig
from tests.ray_local.conftest import FAKE_PARTS, small_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS = {"ingress": {"host": "0.0.0.0", "port": 8123}}


def deploy(config: ClusterConfig, home: Path) -> subprocess.CompletedProcess[str]:
    address = ray.get_runtime_context().gcs_address
    return subprocess.run(
        [sys.executable, "-m", "tests.serve_fakes", config.model_dump_json(), address, "outlives"],
        env=os.environ | {"HOME": str(home)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def deployed(private_home: Path, local_ray: None) -> Iterator[ClusterConfig]:
    launcher.shutdown()
    config = small_config(2, 1, **SETTINGS)
    done = deploy(config, private_home)
    assert done.returncode == 0, done.stderr
    yield config
    found = find(FAKE_PARTS)
    if found is not None:
        found.end()


def states() -> dict[str, str]:
    found = find(FAKE_PARTS)
    assert found is not None
    return {member["name"]: member["state"] for member in found.ask("status")["members"]}


def test_it_is_found_after_its_maker_has_gone_and_ends_without_a_trace(
    deployed: ClusterConfig, private_home: Path
) -> None:
    found = find(FAKE_PARTS)
    assert found is not None
    about = found.deployment
    address = ray.util.get_node_ip_address()
    assert about.endpoint == f"http://{address}:8123/v1" and about.model == "fake"
    assert ClusterConfig.model_validate(about.settings) == deployed
    assert set(states().values()) == {"ready"} and len(states()) == 4
    # Its links can be reached from other machines.
    uris = [rank.endpoint.uri for rank in ray.get(found.supervisor.routing.remote()).ranks]
    assert all(uri.startswith(f"tcp://{address}:") for uri in uris), uris

    again = deploy(deployed, private_home)
    assert again.returncode != 0 and "a deployment runs on this Ray already" in again.stderr
    assert set(states().values()) == {"ready"}

    found.end()
    assert find(FAKE_PARTS) is None
    assert not [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]


def test_a_builder_leaves_alone_what_runs_with_its_settings(deployed: ClusterConfig) -> None:
    before = states()
    assert launcher.start_members(deployed, FAKE_PARTS) == deployed
    assert states() == before
    other = deployed.model_copy(
        update={"drafter": deployed.drafter.model_copy(update={"gamma": 3})}
    )
    with pytest.raises(launcher.LaunchError, match="dspark stop --cluster"):
        launcher.start_members(other, FAKE_PARTS)


def test_a_model_travels_through_ray_and_is_checked(local_ray: None, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(os.urandom(40 << 20))  # several chunks
    (model / "config.json").write_text("{}")
    digest = Manifest.of(model).digest
    members = Members(FAKE_PARTS)
    members.share({digest: str(model)})

    class Elsewhere(RaySource):
        """As on a machine that has no such folder."""

        def describe(self, digest: str) -> tuple[str, Manifest]:
            return "nowhere", super().describe(digest)[1]

    def fetch(store: str) -> tuple[str, str]:
        copy = local_folder(digest, Elsewhere(), Path(store))
        return str(copy), Manifest.of(copy).digest

    try:
        task: Any = ray.remote(num_cpus=0)(fetch)
        store = str(tmp_path / "store")
        assert ray.get(task.remote(store), timeout=60) == (f"{store}/{digest}", digest)
    finally:
        members.stop()
