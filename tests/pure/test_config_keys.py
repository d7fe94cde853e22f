"""API keys and origins in the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.load import ConfigError, allowed, describe, load
from configs.schema import ClusterConfig

DIGEST = "a" * 64
KEYS = f"""
ingress:
  api_keys:
    - {{name: alice, sha256: {DIGEST}, requests_per_minute: 30}}
    - {{name: bob, sha256: {"b" * 64}, max_share: 0.25}}
  cors_origins: [https://page.example]
"""


def test_api_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(KEYS)
    ingress = load(str(path), environment={}).ingress
    assert [(k.name, k.requests_per_minute, k.max_share) for k in ingress.api_keys] == [
        ("alice", 30.0, 1.0),
        ("bob", 0.0, 0.25),
    ]
    assert ingress.cors_origins == ("https://page.example",)
    fields = {name: info for name, _, info in describe(ClusterConfig())}
    assert allowed(fields["ingress.api_keys"]).startswith("allowed: a list of {name, sha256, ")
    assert allowed(fields["ingress.cors_origins"]) == "allowed: a list"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([{"name": "a", "sha256": "sk-very-secret"}], "sha256: string should match"),
        ([{"name": "a"}], "sha256: field required"),
        ([{"name": "a", "sha256": DIGEST, "key": "sk-very-secret"}], "key: extra inputs"),
        ("sk-very-secret", "tuple"),
        ([{"name": "a", "sha256": DIGEST}, {"name": "a", "sha256": "b" * 64}], "same name"),
        ([{"name": "a", "sha256": DIGEST}, {"name": "b", "sha256": DIGEST}], "same sha256"),
    ],
)
def test_a_bad_key_is_refused_without_showing_it(keys: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"ingress": {"api_keys": keys}}))
    with pytest.raises(ConfigError, match=says) as caught:
        load(str(path), environment={})
    assert caught.value.field == "ingress.api_keys" and "sk-very-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "allowed_hosts", "names"),
    [
        ("127.0.0.1", (), ("localhost",)),
        ("127.0.1.1", (), ("localhost",)),
        ("Localhost", (), ("localhost",)),
        ("::1", ("box.example",), ("box.example", "localhost")),
        ("0.0.0.0", (), None),
        ("box.lan", (), None),
        ("0.0.0.0", ("box.example",), ("box.example", "localhost")),
        ("box.lan", ("box.example",), ("box.example", "localhost")),
        ("127.0.0.1", ("*",), None),
    ],
)
def test_host_names_are_open_only_where_others_reach_the_endpoint(host, allowed_hosts, names):
    ingress = ClusterConfig.model_validate(
        {"ingress": {"host": host, "allowed_hosts": allowed_hosts}}
    ).ingress
    assert ingress.host_names == (names and (*names, host))


def test_the_url_of_an_endpoint_on_an_ipv6_address_has_brackets():
    ingress = ClusterConfig.model_validate({"ingress": {"host": "::1", "port": 9}}).ingress
    assert ingress.endpoint() == "http://[::1]:9/v1"
