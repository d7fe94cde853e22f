"""`dspark environment`: what Ray's processes on a node of a cluster must find in their environment, for the shell."""

from __future__ import annotations

import argparse
import shlex

from cluster.console import CommandError, emit_json, say
from cluster.serve_proxy import IngressStartError, node_environment


def environment(arguments: argparse.Namespace) -> int:
    try:
        variables = node_environment()
    except IngressStartError as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        emit_json(variables)
    else:
        say("\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))
    return 0
