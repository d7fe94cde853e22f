"""Which proxy stands in front of the ingress."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import serve_proxy
from cluster.serve_proxy import (
    IngressStartError,
    node_environment,
    remove_proxy_files,
    serve_environment,
)
from configs.ingress import IngressConfig


def test_haproxy_gets_a_folder_and_ports_of_its_own(monkeypatch):
    first, second = serve_environment(IngressConfig()), serve_environment(IngressConfig())
    assert first["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    for name in ("HAPROXY_SERVER_STATE_BASE", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT"):
        assert first[f"RAY_SERVE_{name}"] != second[f"RAY_SERVE_{name}"]
    for environment in (first, second):
        folder = Path(environment["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"])
        assert folder.stat().st_mode & 0o077 == 0
        monkeypatch.setenv("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", str(folder))
        remove_proxy_files()
        assert not folder.exists()


def test_a_second_cluster_of_a_process_gets_what_serve_has_read_for_the_first(monkeypatch):
    first = serve_environment(IngressConfig())
    for name, value in first.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "ray.serve", object())
    remove_proxy_files()  # the first cluster has ended
    second = serve_environment(IngressConfig())
    assert second == first
    assert subprocess.run([second["RAY_SERVE_HAPROXY_BINARY_PATH"], "-v"], check=True)
    remove_proxy_files()


def test_the_starter_turns_splicing_off(monkeypatch):
    environment = serve_environment(IngressConfig())
    starter = Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert " -dS " in starter.read_text()
    version = subprocess.run([starter, "-v"], capture_output=True, text=True, check=True).stdout
    assert "HAProxy" in version
    monkeypatch.setenv("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", str(starter.parent))
    remove_proxy_files()


def test_the_starter_has_haproxy_say_in_openais_shape_that_nobody_answers(monkeypatch, tmp_path):
    """Serve has written its own page before it starts HAProxy, and before each reload."""
    environment = serve_environment(IngressConfig())
    starter = Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
    page, config = tmp_path / "500.http", tmp_path / "haproxy.cfg"
    page.write_text("HTTP/1.1 500 Internal Server Error\r\n\r\n")
    config.write_text(
        "defaults\n  mode http\n  timeout connect 1s\n  timeout client 1s\n  timeout server 1s\n"
        f"  errorfile 502 {page}\n  errorfile 503 {page}\nlisten a\n  bind 127.0.0.1:1\n"
    )
    checked = subprocess.run([starter, "-c", "-f", config], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    head, _, body = page.read_bytes().decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 503 ") and "retry-after: 1" in head
    assert f"content-length: {len(body)}" in head
    assert json.loads(body)["error"]["code"] == "not_ready"
    monkeypatch.setenv("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", str(starter.parent))
    remove_proxy_files()


def test_a_missing_haproxy_is_said_once_and_the_python_proxy_serves(monkeypatch, caplog):
    def no_module(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(serve_proxy, "import_module", no_module)
    with caplog.at_level(logging.WARNING):
        environment = serve_environment(IngressConfig())
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in environment
    assert len(caplog.records) == 1 and "Python proxy" in caplog.text
    with pytest.raises(IngressStartError, match=r"ingress\.proxy='haproxy'"):
        serve_environment(IngressConfig(proxy="haproxy"))


def test_the_python_proxy_can_be_asked_for():
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in serve_environment(IngressConfig(proxy="python"))


def test_only_our_own_folder_is_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", str(tmp_path))
    remove_proxy_files()
    assert tmp_path.exists()


def test_haproxy_accepts_the_length_of_every_socket_of_a_node():
    environment = node_environment()
    sockets = [path for path in environment.values() if path.endswith(".sock")]
    assert len(sockets) == 2
    for path in map(Path, sockets):  # Serve puts the node's id in between
        assert len(str(path.parent / ("0" * 56) / path.name)) <= 97


def test_the_sockets_of_a_node_are_for_its_user_alone(tmp_path):
    folder = tmp_path / "run"
    environment = node_environment(tmp_path / "kept", folder)
    assert environment["RAY_SERVE_HAPROXY_SOCKET_PATH"] == f"{folder}/admin.sock"
    assert Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent == tmp_path / "kept"
    assert folder.stat().st_mode & 0o077 == 0
    node_environment(tmp_path / "kept", folder)  # a second start finds its own
    folder.chmod(0o770)
    with pytest.raises(IngressStartError, match="remove it"):
        node_environment(tmp_path / "kept", folder)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "kept")
    with pytest.raises(IngressStartError, match="remove it"):
        node_environment(tmp_path / "kept", link)
