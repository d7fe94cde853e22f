"""For `serve deploy` and KubeRay: the whole cluster as one Serve application.

Serve calls `build` on the cluster with what stands under `args`. It starts supervisor, allocator, drafters, ranks, and
returns the ingress, which Serve runs. `serve_config` writes the file.
"""

from __future__ import annotations

from typing import Any

from cluster.app import APPLICATION, application
from cluster.parts import Parts
from configs.schema import ClusterConfig

IMPORT_PATH = "cluster.serve_app:build"


def build(args: dict[str, Any]) -> Any:
    """The application of `args["settings"]` (sections of the configuration); what runs already is left as it is.

    Raises:
        LaunchError: a part could not start, or another configuration is deployed.
    """
    from cluster.launch import start_members

    config = ClusterConfig.model_validate(args["settings"])
    return application(start_members(config, Parts.real()))


def serve_config(config: ClusterConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """What `serve deploy` reads (Serve's `ServeDeploySchema`).

    Args:
        config: the configuration.
        settings: the same as it was written (`configs.load.settings`), so that every node decides its own defaults.
    """
    ingress = config.ingress
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": ingress.host, "port": ingress.port},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": {"settings": settings},
                # A number here would take the place of the autoscaling that the application declares.
                "deployments": [{"name": "Ingress", "num_replicas": ingress.num_replicas}]
                if ingress.max_replicas is None
                else [],
            }
        ],
    }
