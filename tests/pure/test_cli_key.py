"""An API key on the command line comes from a file."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cluster.cli import main
from cluster.client import EndpointClient
from cluster.console import CommandError

URL = "http://127.0.0.1:1/v1"


def test_a_key_is_read_from_a_file_and_sent(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("sk-a\n")

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer sk-a"
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    keyed = EndpointClient(URL, httpx.MockTransport(handler), str(path))
    assert keyed.models() == ["m"]
    with pytest.raises(CommandError, match="--api-key-file"):
        EndpointClient(URL, key_file=str(tmp_path / "absent"))


def test_chat_takes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = str(tmp_path / "absent")
    assert main(["chat", "--url", URL, "--api-key-file", absent]) == 1
    assert "--api-key-file" in capsys.readouterr().err
