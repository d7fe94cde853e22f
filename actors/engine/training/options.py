"""Options of the stages, without torch: the module's command and `dspark` offer the same ones."""

from __future__ import annotations

import argparse
from pathlib import Path

# As `drafters.config` and `losses` have them, which import torch.
KINDS = ("dspark", "dflash", "eagle3", "mtp")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
WEIGHTINGS = ("paper", "code", "blend")
DRAFT_VOCAB_SIZE = 8192


def add_work(parser: argparse.ArgumentParser) -> None:
    """Add what every stage needs."""
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default 1)")


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about training text."""
    parser.add_argument("--tokens", type=int, default=1_000_000, help="answer tokens to write")
    parser.add_argument("--rows", type=int, default=48, help="answers written at once (default 48)")
    parser.add_argument("--max-prompt-len", type=int, default=208, help="longer ones are left out")
    parser.add_argument("--max-answer-len", type=int, default=224, help="tokens (default 224)")
    parser.add_argument("--worker", type=int, default=0, help="this process, of --workers")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the prompts")


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the drafter itself; a run that is continued keeps what it began with."""
    new = parser.add_argument_group("a new drafter")
    new.add_argument("--kind", choices=KINDS, default="dspark")
    new.add_argument("--gamma", type=int, default=7, help="draft tokens a block (MTP: 1)")
    new.add_argument("--layers", type=int, default=2, help="draft layers of DSpark and DFlash")
    new.add_argument("--rank", type=int, default=128, help="of DSpark's sequential head")
    new.add_argument("--head", choices=MARKOV_HEADS, default="vanilla", help="DSpark's")
    new.add_argument(
        "--draft-vocab", type=int, default=DRAFT_VOCAB_SIZE, help="most frequent ids; 0: all"
    )
    new.add_argument(
        "--taps",
        type=int,
        nargs="+",
        metavar="LAYER",
        help="target layers, from 0 (default: those of the text, else five spread over the depth)",
    )
    new.add_argument(
        "--mask-token", type=int, metavar="ID", help="a token no text has (default: padding)"
    )
    new.add_argument("--qk-norm", action=argparse.BooleanOptionalAction, default=True)
    new.add_argument(
        "--warm-start",
        type=Path,
        metavar="DIR",
        help="begin with this drafter's weights; of the options here only --kind, --gamma and --qk-norm then count",
    )
    new.add_argument("--weighting", choices=WEIGHTINGS, default="blend", help="of the loss")


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the run."""
    parser.add_argument("--steps", type=int, default=5_500, help="where the cosine ends")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--minutes", type=float, default=90.0, help="stop training after")
    parser.add_argument("--sequences", type=int, default=8, help="answers a step (default 8)")
    parser.add_argument("--anchors", type=int, default=32, help="blocks of each answer")
    parser.add_argument(
        "--validate", type=int, default=6, help="held-out answers of each domain; 0: none"
    )
    parser.add_argument("--validate-every", type=int, default=200, help="steps between")
    parser.add_argument(
        "--checkpoint-seconds", type=float, default=240.0, help="between checkpoints (default 240)"
    )
    parser.add_argument(
        "--refresh", action="store_true", help="take in text generated since the run began"
    )
    parser.add_argument(
        "--online",
        type=Path,
        metavar="FILE",
        help='train on {"ids": […], "prompt_len": n} a line; the target gives features as they are needed',
    )
    parser.add_argument(
        "--run", dest="run_name", metavar="NAME", help="of several runs (default: the kind)"
    )
    add_shape_options(parser)
