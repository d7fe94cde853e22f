"""A front with scripted ranks, for every test here."""

from __future__ import annotations

from functools import partial

import pytest

from tests.http.harness import byte_codec, launched


@pytest.fixture(scope="session")
def codec():
    return byte_codec()


@pytest.fixture
def launch(codec):
    """`async with launch(num_ranks=…, text=…, **limits) as server`."""
    return partial(launched, codec)
