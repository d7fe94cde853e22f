"""`dspark upcycle`: make a mixture of experts of a dense model, with the same outputs."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.console import CommandError, emit_json, note, say
from configs.recipe import RecipeError, checked_recipe


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="the dense model, as model.path (default %(default)s)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="new directory")
    parser.add_argument("--experts", type=int, default=4, help="experts of a layer (default 4)")
    parser.add_argument("--top-k", type=int, default=2, help="experts a token visits (default 2)")
    parser.add_argument("--seed", type=int, default=1, help="of the routers (default 1)")
    parser.add_argument(
        "--skew",
        type=float,
        default=0.0,
        help="mean router logit of the first expert above the last one's; 0 = even load",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare logits and a greedy text with the dense model's; status 1 when the text differs",
    )


def upcycle(arguments: argparse.Namespace) -> int:
    try:
        recipe = checked_recipe(
            {
                "dense": arguments.model,
                "num_experts": arguments.experts,
                "top_k": arguments.top_k,
                "seed": arguments.seed,
                "skew": arguments.skew,
            }
        )
    except RecipeError as error:
        raise CommandError(str(error), exit_code=2) from None
    from actors.engine import upcycle as engine  # imports torch
    from actors.engine.weights import CheckpointError

    try:
        made = engine.upcycle(recipe, arguments.out.expanduser())
        report: dict[str, object] = {"model": str(made), **recipe.model_dump()}
        equal = True
        if arguments.check:
            found, equal = _check(arguments.model, made)
            report |= found
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        emit_json(report)
    else:
        say(f"{made}: {recipe.num_experts} experts a layer, {recipe.top_k} a token")
        say(f"serve it with: dspark serve --set model.path={made}")
    return 0 if equal else 1


def _check(dense: str, made: Path) -> tuple[dict[str, object], bool]:
    from actors.engine.checkpoint import find_model
    from actors.engine.router_probe import compare

    found = compare(find_model(dense), made)
    note(
        f"greedy: {found.num_equal} of {found.num_tokens} tokens as the dense model's; "
        f"logits differ by at most {found.max_logit_difference:.2g}"
    )
    report: dict[str, object] = {
        "num_tokens_compared": found.num_tokens,
        "num_tokens_equal": found.num_equal,
        "max_logit_difference": found.max_logit_difference,
    }
    return report, found.num_equal == found.num_tokens
