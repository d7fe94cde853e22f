"""The `dspark` command. Parsing only: each command lives in its own module and is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from cluster.commands.bench import add_options as add_bench_options
from cluster.commands.chaos import add_options as add_chaos_options
from cluster.commands.evaluate import add_calibrate_options, add_evaluate_options
from cluster.commands.export import add_options as add_export_options
from cluster.commands.rollout import add_options as add_rollout_options
from cluster.commands.simulate import add_options as add_simulate_options
from cluster.commands.training import add_generate_options, add_train_options
from cluster.commands.upcycle import add_options as add_upcycle_options
from cluster.console import CommandError, emit_json, note
from cluster.run_state import DEFAULT_STATE_FILE
from configs.load import DEFAULT_PRESET, ConfigError, preset_names

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 success, 1 failure, 2 bad arguments or configuration)."""
    arguments = _parser().parse_args(argv)
    module, function = arguments.run.split(":")
    try:
        code: int = getattr(importlib.import_module(module), function)(arguments)
    except ConfigError as error:
        return _fail(arguments, str(error), EXIT_USAGE)
    except CommandError as error:
        return _fail(arguments, str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail(arguments, "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone (`dspark config | head`)
        return 1
    return code


def _fail(arguments: argparse.Namespace, message: str, code: int) -> int:
    note(f"dspark: {message}")
    if getattr(arguments, "json", False):
        emit_json({"error": message})
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark",
        description="Serve a language model with DSpark: speculative decoding scheduled by confidence.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = _add(commands, "serve", "cluster.commands.serve:serve", "start a cluster and stay")
    _add_config(serve)
    serve.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)
    stop = _add(commands, "stop", "cluster.commands.control:stop", "end the running cluster")
    stop.add_argument("--timeout", type=float, default=90.0, help="seconds to wait (default 90)")
    _add_cluster(stop)
    status = _add(commands, "status", "cluster.commands.control:status", "show the running cluster")
    _add_cluster(status)

    _add_many_machines(commands)
    _add_changes(commands)
    _add_chat(commands)
    _add_explain(commands)
    _add_profile(commands)
    _add_upcycle(commands)
    demo = _add_key(_add(commands, "demo", "cluster.demo:demo", "speculation on against off"))
    _add_config(demo)
    demo.add_argument("--num-predict", type=int, default=128, help="tokens an answer (default 128)")
    demo.add_argument(
        "--fast",
        action=argparse.BooleanOptionalAction,
        help="measure `fast` numerics too (default: when the demo starts its own cluster)",
    )

    bench = _add(commands, "bench", "cluster.bench:bench", "measure tokens per second")
    _add_config(bench)
    add_bench_options(bench)
    chaos = _add(commands, "chaos", "cluster.commands.chaos:chaos", "faults at random under load")
    _add_config(chaos)
    add_chaos_options(chaos)
    _add_drafter_commands(commands)
    simulate = _add(commands, "simulate", "cluster.simulate:simulate", "compare policies offline")
    add_simulate_options(simulate)

    show = _add(commands, "config", "cluster.commands.show:config", "show what would run")
    _add_config(show)
    show.add_argument("--serve", action="store_true", help="as a file for `serve deploy`")
    _add(commands, "version", "cluster.commands.show:show_version", "show versions")
    return parser


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chat = _add(commands, "chat", "cluster.chat:chat", "talk to the model", json=False)
    _add_endpoint(chat)
    chat.add_argument("--system", help="system prompt")
    chat.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    chat.add_argument("--max-tokens", type=int, default=512, help="longest answer (default 512)")
    chat.add_argument("--seed", type=int, help="same seed, same answer")
    chat.add_argument("--no-speculation", action="store_true", help="plain decoding")


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = _add(
        commands, "profile", "cluster.profile:profile", "measure what steps cost on this machine"
    )
    _add_config(profile)
    _add_cluster(profile)
    profile.add_argument("--refresh", action="store_true", help="measure again what is known")
    profile.add_argument(
        "--repeats", type=int, default=5, help="measurements of every point (default 5)"
    )
    profile.add_argument(
        "--out", metavar="DIR", help="folder for the plot (default: beside the kept measurements)"
    )


def _add_many_machines(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """What speaks to a cluster of several machines."""
    for name, summary in (
        ("up", "start Ray on the machines of a launcher file"),
        ("down", "end the deployment and Ray on all machines"),
    ):
        command = _add(commands, name, f"cluster.commands.remote:{name}", summary)
        command.add_argument("file", help="the file of `ray up`; see configs/ray_up/")
    _add(
        commands,
        "environment",
        "cluster.commands.environment:environment",
        "what to export before `ray start` on a node",
    )
    deploy = _add(commands, "deploy", "cluster.commands.remote:deploy", "serve on a running Ray")
    _add_cluster(deploy, required=True)
    _add_config(deploy)
    deploy.add_argument(
        "--room-seconds",
        type=float,
        default=30.0,
        help="how long to wait for room: a machine that Ray rents takes minutes (default 30)",
    )


def _add_changes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """What changes a cluster while it serves."""
    rollout = _add(
        commands,
        "rollout",
        "cluster.commands.rollout:rollout",
        "change settings or drafter weights member by member, without a failed stream",
    )
    _add_cluster(rollout)
    add_rollout_options(rollout)
    for name, summary in (
        ("drain", "send no new streams to a rank"),
        ("undrain", "send streams to a drained rank again"),
    ):
        command = _add(commands, name, f"cluster.commands.drain:{name}", summary)
        command.add_argument("member", help="name of the rank, such as target-1")
        _add_cluster(command)


def _add_cluster(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument(
        "--cluster",
        metavar="FILE|ADDRESS",
        required=required,
        help="a cluster of several machines: its launcher file, or the address of its Ray (`auto` on one of them)",
    )


def _add_drafter_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """What makes, measures and moves drafters."""
    generate = _add(
        commands,
        "generate",
        "cluster.commands.training:generate",
        "let the target write training text for a drafter",
    )
    _add_config(generate)
    add_generate_options(generate)
    train = _add(commands, "train", "cluster.commands.training:train", "train a drafter")
    _add_config(train)
    add_train_options(train)
    export = _add(commands, "export", "cluster.commands.export:export", "write a drafter elsewhere")
    _add_config(export)
    add_export_options(export)
    evaluate = _add(
        commands,
        "evaluate",
        "cluster.commands.evaluate:evaluate",
        "measure drafters on held-out text",
    )
    _add_config(evaluate)
    add_evaluate_options(evaluate)
    calibrate = _add(
        commands,
        "calibrate",
        "cluster.commands.evaluate:calibrate",
        "make a drafter's confidences true",
    )
    _add_config(calibrate)
    add_calibrate_options(calibrate)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = _add(
        commands, "explain", "cluster.commands.explain:explain", "why a request got its lengths"
    )
    explain.add_argument("id", help="the `id` of an answer")
    _add_endpoint(explain, model=False)


def _add_upcycle(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    upcycle = _add(
        commands,
        "upcycle",
        "cluster.commands.upcycle:upcycle",
        "make a dense model a mixture of experts",
    )
    add_upcycle_options(upcycle)


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: str,
    summary: str,
    *,
    json: bool = True,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--state",
        default=str(DEFAULT_STATE_FILE),
        metavar="FILE",
        help="where the running cluster is recorded (default %(default)s)",
    )
    if json:
        parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        default=DEFAULT_PRESET,
        metavar="PRESET|FILE",
        help=f"{', '.join(preset_names())}, or a YAML file (default {DEFAULT_PRESET})",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one setting, such as target.num_ranks=2; may be repeated",
    )


def _add_endpoint(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    parser.add_argument("--url", help="an endpoint (…/v1); default: the running cluster's")
    _add_key(parser)
    if model:
        parser.add_argument("--model", help="model name; default: the one that is served")


def _add_key(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="file with the API key, where the endpoint wants one"
    )
    return parser
