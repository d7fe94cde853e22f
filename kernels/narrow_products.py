"""Products of 32-bit integers in a compiled kernel: where an address overflows once a cache or a vocabulary is large.

A pool of 2**31 elements is 4 GiB in bf16, so a block's number times its size, or a row's number times its width, has to
be a 64-bit product. Read from the first intermediate form (TTIR), where the types that Triton inferred are written out.
"""

from __future__ import annotations

import re

_DEFINED = re.compile(r'^\s*(%[\w#]+)(?::\d+)? = "?([\w.]+)"? ?(.*)$', re.M)
_NAME = re.compile(r"%[\w#]+")
_MOVES = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "arith.extsi", "arith.trunci"}
_SIGNS = {
    "addi": "+", "subi": "-", "muli": "*", "divsi": "/", "remsi": "%", "minsi": "min", "maxsi": "max",
}  # fmt: skip
_SMALL = re.compile(r"-?\d+|range\(\d+\)|program_id_[xyz]")
_MIXES = 1 << 24  # constants of hashes, whose overflow is meant
# What else is multiplied in 32 bits, and why that is enough.
SAFE = {
    r"(\(program_id_z\+1\)|program_id_z) \* split_keys": "positions of a context",
    r"\(.*/(\d+)\) \* \1": "a number rounded down",
    r"load \* (32|64|128)": "a token, from its block of at most 8,192",
    r"(range\(\d+\)|reduce) \* support": "slots of a block times the support of q",
    r"(range\(\d+\)|\(program_id_x\*\d+\+range\(\d+\)\)) \* gamma": "requests times slots",
    r"range\(\d+\) \* num_rows": "slots times requests",
    r"\(program_id_x-reduce\) \* \d+": "rows of a step",
}


def narrow_products(ttir: str) -> list[str]:
    """The 32-bit products that no rule and no line of `SAFE` accounts for, as "factor * factor"."""
    definitions = {m[1]: (m[2], m[3]) for m in _DEFINED.finditer(ttir)}
    found = set()
    for operation, rest in definitions.values():
        if operation in ("arith.muli", "arith.shli") and re.search(
            r": (tensor<[\dx]*)?i32\b", rest
        ):
            factors = [_origin(name, definitions) for name in _NAME.findall(rest)[:2]]
            if not _is_safe(*factors):
                found.add(" * ".join(factors))
    return sorted(found)


def _is_safe(left: str, right: str) -> bool:
    if any(f.lstrip("-").isdigit() and abs(int(f)) >= _MIXES for f in (left, right)):
        return True
    if _SMALL.fullmatch(left) and _SMALL.fullmatch(right):
        return True
    return any(re.fullmatch(known, f"{left} * {right}") for known in SAFE)


def _origin(name: str, definitions: dict[str, tuple[str, str]], depth: int = 0) -> str:
    """Where a value comes from, in the kernel's own words: arguments keep their names."""
    if name not in definitions:
        return name[1:]
    operation, rest = definitions[name]
    used = _NAME.findall(rest)
    kind = operation.split(".")[1]
    if operation in _MOVES:
        return _origin(used[0], definitions, depth)
    if operation == "arith.constant":
        value = re.match(r"dense<([^>]*)>|(\S+)", rest)
        return (value[1] or value[2]) if value else kind
    if operation == "tt.get_program_id":
        return f"program_id_{rest[0]}"
    if operation == "tt.make_range":
        end = re.search(r"end = (\d+)", rest)
        return f"range({end[1]})" if end else kind
    if kind in _SIGNS and depth < 6:
        left, right = (_origin(n, definitions, depth + 1) for n in used[:2])
        joined = f"{left}{_SIGNS[kind]}{right}"
        return joined if kind == "muli" else f"({joined})"
    return kind
