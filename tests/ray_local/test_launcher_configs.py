"""The launcher files, the Kubernetes manifest and the Serve file are what Ray itself accepts."""

from __future__ import annotations

import copy
import subprocess
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.serve_app import IMPORT_PATH, serve_config
from configs.load import load, preset_names, settings
from configs.schema import ClusterConfig

CONFIGS = Path(__file__).parents[2] / "configs"
LAUNCHER_FILES = ("onprem", "aws", "gcp")
CLOUDS = ("aws", "gcp")


def accepted_by_serve(values: Any) -> Any:
    """What Serve makes of a file; it warns of its own use of pydantic when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.serve.schema import ServeDeploySchema
    return ServeDeploySchema.model_validate(values)


def launcher_file(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CONFIGS / "ray_up" / f"{name}.yaml").read_text())
    return values


def manifest() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CONFIGS / "kuberay" / "rayservice.yaml").read_text())
    return values


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_ray_accepts_a_launcher_file(name: str) -> None:
    validate_config(prepare_config(launcher_file(name)))


def test_ray_refuses_a_launcher_file_with_a_slip() -> None:
    values = launcher_file("aws")
    values["available_node_types"]["target"]["min_worker"] = 1
    with pytest.raises(jsonschema.ValidationError, match="min_worker"):
        validate_config(prepare_config(copy.deepcopy(values)))


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_nobody_gets_in_without_the_token_and_no_dashboard_is_public(name: str) -> None:
    values = launcher_file(name)
    assert "~/.ray/auth_token" in values["file_mounts"]
    assert "RAY_AUTH_MODE=token" in (CONFIGS / "ray_up" / "node.sh").read_text()
    head, worker = (values[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker"))
    assert "--include-dashboard=false" in head and "--dashboard-host=127.0.0.1" in head
    for command in (head, worker):
        assert command.startswith(". ~/dspark/setup/node.sh;")
        # Every port that others must reach is named, so that a firewall can be written.
        for port in ("node-manager", "object-manager", "dashboard-agent-listen", "max-worker"):
            assert f"--{port}-port=" in command


@pytest.mark.parametrize("name", CLOUDS)
def test_clouds_run_the_commands_that_the_drill_runs(name: str) -> None:
    ours, tried = launcher_file(name), launcher_file("onprem")
    for commands in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        assert ours[commands] == tried[commands]


@pytest.mark.parametrize("name", CLOUDS)
def test_a_cloud_has_a_limit_and_private_addresses(name: str) -> None:
    values = launcher_file(name)
    types = values["available_node_types"]
    assert 0 < types["target"]["min_workers"] <= types["target"]["max_workers"]
    assert types["target"]["max_workers"] <= values["max_workers"]
    assert values["provider"]["use_internal_ips"] is True
    assert "ingress" in types["head"]["resources"] and "target" in types["target"]["resources"]


@pytest.mark.parametrize("script", ["node.sh", "setup_node.sh"])
def test_the_scripts_of_a_node_are_shell(script: str) -> None:
    subprocess.run(["bash", "-n", str(CONFIGS / "ray_up" / script)], check=True)


@pytest.mark.parametrize("preset", preset_names())
def test_serve_accepts_the_file_that_is_written_for_it(preset: str) -> None:
    config = load(preset, (), {})
    written = yaml.safe_load(yaml.safe_dump(serve_config(config, settings(preset))))
    accepted = accepted_by_serve(written)
    (application,) = accepted.applications
    assert application.import_path == IMPORT_PATH
    assert ClusterConfig.model_validate(application.args["settings"]) == config
    assert (accepted.http_options.host, accepted.http_options.port) == (
        config.ingress.host,
        config.ingress.port,
    )


def test_the_kubernetes_manifest_serves_what_its_pods_can_hold() -> None:
    spec = manifest()["spec"]
    accepted = accepted_by_serve(yaml.safe_load(spec["serveConfigV2"]))
    config = ClusterConfig.model_validate(accepted.applications[0].args["settings"])
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    target, drafter = config.target, config.drafter
    wanted = target.num_ranks * target.num_gpus + drafter.num_actors * drafter.num_gpus
    assert wanted <= gpus * group["minReplicas"]
    assert group["minReplicas"] <= group["maxReplicas"]
    assert target.node_resource in group["rayStartParams"]["resources"]
    head = spec["rayClusterConfig"]["headGroupSpec"]
    assert str(config.ingress.node_resource) in head["rayStartParams"]["resources"]
    assert head["serviceType"] == "ClusterIP"
    for pod in (head["template"], group["template"]):
        variables = {v["name"]: v for v in pod["spec"]["containers"][0]["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert "secretKeyRef" in variables["RAY_AUTH_TOKEN"]["valueFrom"]
