"""A date that a grammar lets through is a day of the calendar."""

from __future__ import annotations

import re
from datetime import date, datetime, timedelta
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.json_formats import PATTERNS, with_real_days
from cluster.structured_output import of_schema


def test_exactly_the_days_of_the_calendar_are_dates() -> None:
    pattern = re.compile(PATTERNS["date"])
    for year in (1, 4, 100, 400, 1900, 1996, 2000, 2022, 2023, 2024, 2100, 9999):
        days = [f"{year:04d}-{month:02d}-{day:02d}" for month in range(14) for day in range(33)]
        taken = [day for day in days if pattern.search(day)]
        first = date(year, 1, 1)
        length = (date(year, 12, 31) - first).days + 1
        assert taken == [(first + timedelta(n)).isoformat() for n in range(length)]


@pytest.mark.parametrize("year", [0, 4, 96, 100, 200, 300, 400, 1700, 1904, 2000, 2022, 2400])
def test_a_leap_day_is_one_of_a_leap_year(year: int) -> None:
    text = f"{year:04d}-02-29"
    try:
        is_day = date.fromisoformat(text).isoformat() == text
    except ValueError:
        is_day = False
    assert bool(re.search(PATTERNS["date"], text)) == is_day


@pytest.mark.parametrize("text", ["2024-1-01", "24-01-01", "2024-01-01 ", "x2024-01-01", ""])
def test_what_is_no_date_is_refused(text: str) -> None:
    assert not re.search(PATTERNS["date"], text)


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("2024-02-29T23:59:59Z", True),
        ("2024-12-31T00:00:00.123456+05:30", True),
        ("2023-02-29T00:00:00Z", False),
        ("2024-01-01T24:00:00Z", False),
        ("2024-01-01T00:60:00Z", False),
        ("2024-01-01T00:00:00", False),
        ("2024-01-01T00:00:00+24:00", False),
    ],
)
def test_a_moment_has_a_real_day_a_time_and_an_offset(text: str, is_taken: bool) -> None:
    assert bool(re.search(PATTERNS["date-time"], text)) == is_taken
    if is_taken:
        assert datetime.fromisoformat(text).tzinfo is not None


def test_formats_are_found_wherever_schemas_are_and_nowhere_else() -> None:
    day = {"type": "string", "format": "date"}
    real = {"type": "string", "pattern": PATTERNS["date"]}
    schema: dict[str, Any] = {
        "$defs": {"day": day},
        "properties": {"format": {"type": "string"}, "at": day, "days": {"items": day}},
        "anyOf": [day, {"type": "null"}],
        "const": {"format": "date"},
        "enum": [{"format": "date"}],
    }
    assert with_real_days(schema) == {
        "$defs": {"day": real},
        "properties": {"format": {"type": "string"}, "at": real, "days": {"items": real}},
        "anyOf": [real, {"type": "null"}],
        "const": {"format": "date"},
        "enum": [{"format": "date"}],
    }
    assert schema["$defs"]["day"] == day, "the caller's schema is left as it is"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date", "pattern": "^2024"},
        {"type": "string", "format": "email"},
        {"type": "object", "properties": {"a": {"enum": ["date"]}}},
    ],
)
def test_other_schemas_are_as_they_were(schema: dict[str, Any]) -> None:
    assert with_real_days(schema) == schema


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [('"2024-02-29"', True), ('"2022-02-29"', False), ('"2022-02-28"', True), ('"x"', False)],
)
def test_the_grammar_of_a_schema_ends_at_real_days_only(text: str, is_taken: bool) -> None:
    grammar = of_schema({"type": "string", "format": "date"})
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    matcher.try_consume_tokens(list(text.encode()))
    assert not matcher.is_error()
    assert matcher.is_accepting() == is_taken
