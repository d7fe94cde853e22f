"""The link over plain actor calls does what every link does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from actors.link import Link
from actors.link.actor_link import ActorLink
from tests.link_behaviour import LinkBehaviour

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class TestActorLink(LinkBehaviour):
    @pytest.fixture
    def open_link(self, local_ray: None) -> Iterator[Callable[..., Link]]:
        opened: list[ActorLink] = []

        def open_one(name: str) -> ActorLink:
            opened.append(ActorLink(name, "target"))
            return opened[-1]

        yield open_one
        for link in opened:
            link.close()
