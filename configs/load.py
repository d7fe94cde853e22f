"""Preset or file, then environment, then `key=value` overrides → `ClusterConfig`.

The only module that reads configuration files and the environment. Later layers win: the defaults of the schema, the
preset or YAML file, `DSPARK__TARGET__NUM_RANKS=2`, `--set target.num_ranks=2`. Every value remembers the layer it came
from, so that a refusal can say where to look.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from configs.schema import ClusterConfig

PRESETS_DIR = Path(__file__).resolve().parent / "presets"
DEFAULT_PRESET = "laptop-cpu"
ENVIRONMENT_PREFIX = "DSPARK__"

Layer = tuple[str, dict[str, Any]]  # where it came from, nested values


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Attributes:
        field: dotted name of the offending key, '' when the source as a whole is unreadable.
        value: what was given.
        origin: file, variable or option it was given in.
        remedy: what to write instead.
    """

    def __init__(self, field: str, value: object, origin: str, problem: str, remedy: str) -> None:
        self.field, self.value, self.origin, self.remedy = field, value, origin, remedy
        subject = f"{field} = {value!r}" if field else repr(value)
        super().__init__(f"{subject} ({origin}): {problem}; {remedy}")


def load(
    source: str | dict[str, Any] = DEFAULT_PRESET,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ClusterConfig:
    """The effective configuration.

    Args:
        source: a preset name, the path of a YAML file, or the settings of a running cluster.
        overrides: `section.field=value` strings; values are read as YAML (so `null`, `3`, `0.5`, `text`).
        environment: variables to read, `os.environ` by default.

    Raises:
        ConfigError: naming field, value, where it came from and the remedy.
    """
    merged, origins = _merged(source, overrides, environment)
    try:
        return ClusterConfig.model_validate(merged)
    except ValidationError as error:
        raise _explain(error, merged, origins) from None


def settings(source: str = DEFAULT_PRESET, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What was set, nested and as it was written: a file with this content means the same on another machine.

    Raises:
        ConfigError: see `load`; values are not checked.
    """
    return _merged(source, overrides, None)[0]


def _merged(
    source: str | dict[str, Any], overrides: Sequence[str], environment: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The layers put together, and where each setting comes from."""
    variables = os.environ if environment is None else environment
    first = ("the running cluster", source) if isinstance(source, dict) else _read_source(source)
    layers = [first, *_read_environment(variables), *_read_overrides(overrides)]
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, values in layers:
        for path, value in _leaves(values):
            if _is_setting(path, value, origin):
                _put(merged, path, value)
                origins[".".join(path)] = origin
    return merged, origins


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS_DIR.glob("*.yaml")))


def describe(
    config: BaseModel, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[str, object, FieldInfo]]:
    """(dotted name, effective value, field) of every setting, in the order of the schema."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        path = (*prefix, name)
        if isinstance(value, BaseModel):
            yield from describe(value, path)
        else:
            yield ".".join(path), value, info


# --- reading the layers -----------------------------------------------------------------------------------------------


def _read_source(source: str) -> Layer:
    path = PRESETS_DIR / f"{source}.yaml"
    origin = f"preset {source}"
    if source not in preset_names():
        path, origin = Path(source).expanduser(), f"file {source}"
        if not path.is_file():
            raise _unknown_source(source)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(
            "", source, origin, f"not readable as YAML: {problem}", "correct the file"
        ) from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            "", values, origin, "not a mapping of sections", "write `section:` then its fields"
        )
    return origin, values


def _unknown_source(source: str) -> ConfigError:
    near = difflib.get_close_matches(source, preset_names(), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ConfigError(
        "",
        source,
        "--config",
        "neither a preset nor a file",
        f"{hint}presets: {', '.join(preset_names())}",
    )


def _read_environment(variables: Mapping[str, str]) -> Iterator[Layer]:
    for name in sorted(variables):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = name[len(ENVIRONMENT_PREFIX) :].lower().split("__")
            yield f"environment {name}", _nest(path, _scalar(variables[name], name))


def _read_overrides(overrides: Sequence[str]) -> Iterator[Layer]:
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                "",
                text,
                "--set",
                "not of the form section.field=value",
                "write for example --set target.num_ranks=2",
            )
        path = key.strip().split(".")
        yield f"--set {text}", _nest(path, _scalar(value, f"--set {text}"))


def _scalar(text: str, origin: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            "", text, origin, "not readable as a YAML value", "quote the value"
        ) from error


def _nest(path: Sequence[str], value: object) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def _leaves(
    values: Mapping[Any, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        path = (*prefix, str(key))
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _put(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    *sections, name = path
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


# --- refusing ---------------------------------------------------------------------------------------------------------


def _is_setting(path: Sequence[str], value: object, origin: str) -> bool:
    """Whether `path` names a setting (True) or an empty section (False); anything else is refused."""
    dotted = ".".join(path)
    level: type[BaseModel] | None = ClusterConfig
    for depth, name in enumerate(path):
        if level is None:
            parent = ".".join(path[:depth])
            raise ConfigError(
                dotted, value, origin, f"{parent} has no parts", f"give {parent} a single value"
            )
        fields = level.model_fields
        if name not in fields:
            raise ConfigError(dotted, value, origin, "no such setting", _nearest(path, depth))
        level = _section_type(fields[name])
    if level is None:
        return True
    if value in (None, {}):
        return False
    names = ", ".join(level.model_fields)
    raise ConfigError(dotted, value, origin, "a section, not a setting", f"its fields: {names}")


def _section_type(info: FieldInfo) -> type[BaseModel] | None:
    kind: Any = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _nearest(path: Sequence[str], depth: int) -> str:
    known = {name: name.split(".")[-1] for name, _, _ in describe(ClusterConfig())}
    siblings = [name for name in known if depth and name.startswith(f"{path[0]}.")]
    pool = siblings or list(known)
    near = difflib.get_close_matches(path[-1], [known[name] for name in pool], 1)
    if near:
        return f"did you mean {next(name for name in pool if known[name] == near[0])}?"
    if siblings:
        return "known settings: " + ", ".join(siblings)
    return "sections: " + ", ".join(ClusterConfig.model_fields)


def _explain(
    error: ValidationError, merged: Mapping[str, Any], origins: Mapping[str, str]
) -> ConfigError:
    first = error.errors()[0]
    if first["type"] == "conflict":
        context = first["ctx"]
        field, problem, remedy = context["field"], context["problem"], context["remedy"]
        value = _effective(merged, field)
    else:
        field = ".".join(
            str(part) for part in first["loc"][:2]
        )  # section, field; then union branches
        problem = first["msg"][0].lower() + first["msg"][1:]
        inside = first["loc"][2:]
        if inside and isinstance(inside[0], int):  # an entry of a list
            problem = ".".join(map(str, inside)) + f": {problem}"
        remedy, value = allowed(_field_info(field)), first["input"]
        if field == "ingress.api_keys":  # somebody may have put the key itself there
            value = "(not shown)"
            remedy = "give name, sha256, requests_per_minute and max_share of every key"
    return ConfigError(field, value, origins.get(field, "default"), problem, remedy)


def _effective(merged: Mapping[str, Any], field: str) -> object:
    section, name = field.split(".")
    return merged.get(section, {}).get(name, _field_info(field).default)


def _field_info(field: str) -> FieldInfo:
    return next(info for name, _, info in describe(ClusterConfig()) if name == field)


def allowed(info: FieldInfo) -> str:
    """The values a field takes, in words: 'allowed: integer, ≥ 1, ≤ 65535'."""
    choices = [repr(choice) for choice in get_args(info.annotation) if isinstance(choice, str)]
    if choices:
        return "allowed: " + ", ".join(choices)
    for kind in get_args(info.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return "allowed: a list of {" + ", ".join(kind.model_fields) + "}"
    if get_origin(info.annotation) is tuple:
        return "allowed: a list"
    words = {int: "integer", float: "number", str: "text", bool: "true or false"}
    kinds = [words.get(kind, "null") for kind in get_args(info.annotation) or (info.annotation,)]
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [
        f"{sign} {getattr(rule, name):g}"
        for rule in info.metadata
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
    return "allowed: " + ", ".join([" or ".join(kinds), *limits])
