"""The real thing once: `dspark serve` with the real model, asked over HTTP and by `dspark demo`, ended by Ctrl-C."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.weights,
    pytest.mark.timeout(900),  # the first start of a machine fetches and converts the model
]

ROOT = Path(__file__).parents[2]
MARK = "DSPARK_TEST_MARK"  # every process of one cluster inherits it
MODEL = "smollm2-135m-instruct"
STARTS_WITHIN_S = 600.0
EXIT_WITHIN_S = 60.0


@dataclass
class Command:
    """A served cluster, and `dspark` beside it."""

    process: subprocess.Popen[str]
    state_file: Path
    endpoint: str
    mark: str

    def run(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Exit status, and the object on the last line."""
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "cluster",
                *arguments,
                "--state",
                str(self.state_file),
                "--json",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    def processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("command")
    state_file, log, mark = folder / "running.json", folder / "serve.log", uuid.uuid4().hex
    # The home of the user, not of the other tests here: the converted model is cached in it.
    environment = os.environ | {MARK: mark, "HOME": pwd.getpwuid(os.getuid()).pw_dir}
    environment.pop("RAY_TMPDIR", None)
    command = [sys.executable, "-m", "cluster", "serve", "--json", "--state", str(state_file)]
    command += ["--set", f"ingress.port={free_port()}"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,  # its own group, as a terminal gives it
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # comes when it is ready, or '' when it has failed
        assert line, log.read_text()
        yield Command(process, state_file, json.loads(line)["endpoint"], mark)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(EXIT_WITHIN_S)
        if process.stdout is not None:
            process.stdout.close()


def ask(served: Command, **parameters: Any) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a Python function that adds two numbers."}],
        "max_tokens": 40,
        **parameters,
    }
    response = httpx.post(f"{served.endpoint}/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_model_answers_sensibly(served: Command) -> None:
    answer = ask(served, temperature=0)
    assert "def " in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["dspark"]["num_rounds"] > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_gives_the_same_text_with_speculation_on_and_off(served: Command, seed: int) -> None:
    texts = {
        ask(served, temperature=1.0, seed=seed, dspark={"speculation": on})["choices"][0][
            "message"
        ]["content"]
        for on in (True, True, False)
    }
    assert len(texts) == 1


def test_the_unmodified_openai_client_streams(served: Command) -> None:
    client = openai.OpenAI(base_url=served.endpoint, api_key="unused", max_retries=0)
    with client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count to five."}],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(text) > 5
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_status_shows_the_rank_ready(served: Command) -> None:
    code, report = served.run("status")
    assert code == 0
    assert report["phase"] == "ready"
    assert [rank["state"] for rank in report["health"]["ranks"]] == ["ready"]


def test_a_second_cluster_is_refused(served: Command) -> None:
    code, report = served.run("serve", "--set", f"ingress.port={free_port()}")
    assert code == 1
    assert f"already running at {served.endpoint}" in report["error"]


def test_the_demo_finds_equal_greedy_texts_and_accepted_drafts(served: Command) -> None:
    code, report = served.run("demo", "--num-predict", "24")
    assert code == 0
    assert report["greedy_equal"] is True
    assert (
        report["acceptance_length"] > 1.1
    )  # the drafter is loaded and trained, not merely present
    assert len(report["prompts"]) >= 6
    assert min(report["tokens_per_s"].values()) > 0


def test_ctrl_c_leaves_nothing_behind(served: Command) -> None:
    """Last in this file: it ends the cluster that the others share."""
    os.killpg(served.process.pid, signal.SIGINT)  # a terminal signals the whole group
    assert served.process.wait(EXIT_WITHIN_S) == 0
    deadline = time.monotonic() + 15
    while (left := served.processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    assert not served.state_file.exists()
