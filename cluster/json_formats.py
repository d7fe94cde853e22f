"""Days that exist: the grammar library's `date` and `date-time` take a 29th of February in every year."""

from __future__ import annotations

from typing import Any

_LEAP = r"(\d{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d{2}|[1-9]\d{3})"
_DAY = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP}-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{_TIME}$"}

# What holds values, not schemas: a text in there that reads like a schema is none.
_VALUES = frozenset({"const", "enum", "default", "examples", "required"})


def with_real_days(schema: Any) -> Any:
    """The schema with a pattern in place of each `format` of days. One that has a pattern of its own is left alone."""
    if isinstance(schema, list):
        return [with_real_days(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: part if key in _VALUES else with_real_days(part) for key, part in schema.items()}
    pattern = PATTERNS.get(found["format"]) if isinstance(found.get("format"), str) else None
    if pattern is None or "pattern" in found:
        return found
    return {key: part for key, part in found.items() if key != "format"} | {"pattern": pattern}
