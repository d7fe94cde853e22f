"""`dspark chat`: talk to the model. Works on a terminal and with piped input (one turn a line)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

from cluster.client import Answer, EndpointClient, collect
from cluster.commands.control import require_running
from cluster.console import dim, note, say

PROMPT = "› "
HELP = "/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"

Message = dict[str, str]
Ask = Callable[[list[Message]], Answer]


def chat(arguments: argparse.Namespace) -> int:
    url = arguments.url or require_running(arguments.state).endpoint
    with EndpointClient(url, key_file=arguments.api_key_file) as client:
        model = client.choose_model(arguments.model)
        note(dim(f"{model} at {url}; {HELP}"))
        converse(_turns(), _asker(client, model, arguments), arguments.system)
    return 0


def converse(turns: Iterator[str], ask: Ask, system: str | None = None) -> None:
    """Run the conversation: each turn of the user is answered with everything said before it."""
    opening = [{"role": "system", "content": system}] if system else []
    history = list(opening)
    for turn in turns:
        if turn in ("/quit", "/exit"):
            return
        if turn == "/reset":
            history = list(opening)
            note(dim("forgotten"))
        elif turn.startswith("/"):
            note(dim(HELP))
        elif turn:
            answer = ask([*history, {"role": "user", "content": turn}])
            history += [
                {"role": "user", "content": turn},
                {"role": "assistant", "content": answer.text},
            ]


def _asker(client: EndpointClient, model: str, arguments: argparse.Namespace) -> Ask:
    def ask(messages: list[Message]) -> Answer:
        stream = client.stream_chat(
            model,
            messages,
            speculation=not arguments.no_speculation,
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
            seed=arguments.seed,
        )
        answer = Answer()
        try:
            with closing(stream):  # leaving early closes the connection, which cancels the request
                collect(stream, lambda text: say(text, end=""), into=answer)
        except KeyboardInterrupt:
            note(dim(" (stopped)"))
        else:
            say()
            note(dim(_cost(answer)))
        return answer

    return ask


def _cost(answer: Answer) -> str:
    speed = f"{answer.completion_tokens} tokens, {answer.tokens_per_s:.1f} tokens/s"
    return f"{speed}, {answer.acceptance_length:.2f} tokens a round"


def _turns() -> Iterator[str]:
    """Lines of the user; on a terminal with a prompt and line editing."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  (importing it gives `input` editing and history)

    while True:
        try:
            yield input(PROMPT).strip()
        except EOFError:
            say()
            return
        except KeyboardInterrupt:
            say()
