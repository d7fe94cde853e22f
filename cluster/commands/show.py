"""`dspark config` and `dspark version`: what would run, without running it."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import yaml

from cluster.console import emit_json, say
from configs.load import allowed, describe, load, settings
from configs.schema import ClusterConfig

SHOWN_PACKAGES = ("dspark-cluster", "torch", "ray", "numpy", "pydantic", "fastapi")


def config(arguments: argparse.Namespace) -> int:
    effective = load(arguments.config, arguments.set)
    if arguments.serve:
        from cluster.serve_app import serve_config  # imports Serve's front

        written = serve_config(effective, settings(arguments.config, arguments.set))
        say(yaml.safe_dump(written, sort_keys=False).rstrip())
    elif arguments.json:
        emit_json(effective.model_dump(mode="json"))
    else:
        say("\n".join(_annotated_yaml(effective)))
    return 0


def _annotated_yaml(effective: ClusterConfig) -> Iterator[str]:
    """YAML that `--config FILE` reads back, each setting with its meaning and its range."""
    section = ""
    for name, value, info in describe(effective):
        head, field = name.split(".")
        if head != section:
            section = head
            yield f"\n{section}:  # {type(effective).model_fields[section].description}"
        yield f"  # {info.description} ({allowed(info)})"
        if isinstance(value, tuple):  # JSON is YAML, on one line
            yield f"  {field}: {json.dumps(effective.model_dump()[head][field])}"
        else:
            yield "  " + yaml.safe_dump({field: value}, default_flow_style=False).strip()


def show_version(arguments: argparse.Namespace) -> int:
    found = {"python": platform.python_version()}
    for name in SHOWN_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if arguments.json:
        emit_json(found)
    else:
        say("\n".join(f"{name:<15} {number}" for name, number in found.items()))
    return 0
