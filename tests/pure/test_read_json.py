"""JSON of strangers: how deep it may be, however it is written."""

from __future__ import annotations

import json

import pytest

from cluster.openai_schema import MAX_NESTING, read_json


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("encoding", [None, "utf-8", "utf-16"])
def test_a_text_may_be_so_deep_and_no_deeper(encoding: str | None) -> None:
    def written(text: str) -> str | bytes:
        return text if encoding is None else text.encode(encoding)

    assert read_json(written(nested(MAX_NESTING))) == json.loads(nested(MAX_NESTING))
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        read_json(written(nested(MAX_NESTING + 1)))
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        read_json(written('{"a":' * (MAX_NESTING + 1) + "1" + "}" * (MAX_NESTING + 1)))
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        read_json(written(nested(100_000)))


def test_a_text_of_many_brackets_that_is_not_deep_is_read() -> None:
    wide = [[i] for i in range(10 * MAX_NESTING)]
    assert read_json(json.dumps(wide)) == wide
