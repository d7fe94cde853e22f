"""A configuration means the same on the machine it is deployed from and on those it is deployed to."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load, settings
from configs.schema import ClusterConfig


def test_settings_are_what_was_written_and_mean_the_same_elsewhere(tmp_path: Path) -> None:
    path = str(tmp_path / "serve.yaml")
    Path(path).write_text("model: {dtype: auto}\ntarget: {num_ranks: 2}\n")
    written = settings(path, ["target.num_ranks=3"])
    assert written["target"]["num_ranks"] == 3 and written["model"] == {"dtype": "auto"}
    assert ClusterConfig.model_validate(written) == load(path, ["target.num_ranks=3"])


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("0.0.0.0", "http://10.0.0.5:8000/v1"),
        ("10.0.0.9", "http://10.0.0.9:8000/v1"),
    ],
)
def test_a_client_reaches_a_wildcard_at_the_address_it_is_given(host: str, endpoint: str) -> None:
    config = load(overrides=[f"ingress.host={host}"], environment={})
    assert config.ingress.endpoint("10.0.0.5") == endpoint
