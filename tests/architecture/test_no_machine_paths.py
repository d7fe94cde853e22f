"""A clean clone knows nothing of the machine it was written on, nor of any package registry."""

from __future__ import annotations

import re
from pathlib import Path

# Spelled in parts, so that this file does not name what it forbids.
FORBIDDEN = re.compile(
    r"(?<![\w.}])/(?:" + "|".join(["wo" + "rk", "ro" + "ot"]) + r")(?:/|\b)"
    r"|\b(?:"
    + "|".join(["pypi" + r"\.org", "python" + "hosted", "npm" + "js", "deb" + r"\.debian"])
    + ")"
)
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".cfg", ".html", ".js", ".css", ""}


def test_no_tracked_text_names_a_path_of_one_machine_or_a_registry(
    project_files: list[Path], root: Path
) -> None:
    found = []
    for path in project_files:
        if path.suffix not in TEXT:
            continue
        for number, line in enumerate((root / path).read_text(encoding="utf-8").splitlines(), 1):
            if match := FORBIDDEN.search(line):
                found.append(f"{path}:{number}: {match.group()}")
    assert not found, "\n".join(found)
