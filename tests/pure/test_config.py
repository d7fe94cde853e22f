"""Loading a configuration: layers in order, and a refusal that names field, value, origin and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.cli import main
from configs.load import DEFAULT_PRESET, ConfigError, allowed, describe, load, preset_names
from configs.schema import ClusterConfig, DrafterConfig
from configs.target import TargetConfig


def refusal(*overrides: str, **environment: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(overrides=overrides, environment=environment)
    return caught.value


@pytest.fixture
def yaml_file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "cluster.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_default_preset_is_the_schema_default() -> None:
    assert load(environment={}) == load(DEFAULT_PRESET, environment={}) == ClusterConfig()


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str) -> None:
    assert isinstance(load(name, environment={}), ClusterConfig)


def test_presets_are_the_announced_ones() -> None:
    assert preset_names() == ("laptop-cpu", "laptop-moe", "multi-node-ep", "single-node-gpu")


def test_later_layers_win(yaml_file: Callable[[str], str]) -> None:
    path = yaml_file("target: {num_ranks: 2, max_running: 7, max_waiting: 9}\n")
    environment = {"DSPARK__TARGET__NUM_RANKS": "3", "DSPARK__TARGET__MAX_RUNNING": "8"}
    config = load(path, ["target.num_ranks=4"], environment)
    assert (config.target.num_ranks, config.target.max_running, config.target.max_waiting) == (
        4,
        8,
        9,
    )


def test_last_of_two_equal_overrides_wins() -> None:
    assert load(overrides=["drafter.gamma=2", "drafter.gamma=3"], environment={}).drafter.gamma == 3


def test_values_are_read_as_yaml() -> None:
    config = load(
        overrides=["model.drafter=null", "ingress.request_timeout_s=30", "target={num_ranks: 2}"],
        environment={"PATH": "ignored", "DSPARK__MODEL__NAME": "some-model"},
    )
    assert config.model.drafter is None
    assert config.ingress.request_timeout_s == 30.0
    assert config.target.num_ranks == 2
    assert config.model.name == "some-model"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK__DRAFTER__GAMMA", "4")
    assert load().drafter.gamma == 4


@pytest.mark.parametrize("text", ["", "# nothing set\n", "target:\ndrafter: {}\n"])
def test_empty_files_and_sections_change_nothing(
    text: str, yaml_file: Callable[[str], str]
) -> None:
    assert load(yaml_file(text), environment={}) == ClusterConfig()


@pytest.mark.parametrize(
    ("override", "field", "value", "remedy"),
    [
        ("target.num_rank=2", "target.num_rank", 2, "did you mean target.num_ranks?"),
        ("num_ranks=2", "num_ranks", 2, "did you mean target.num_ranks?"),
        ("target.zzzzzz=2", "target.zzzzzz", 2, "known settings: target.num_ranks"),
        ("targt.num_ranks=2", "targt.num_ranks", 2, "did you mean target.num_ranks?"),
        ("zzzzzz.a=2", "zzzzzz.a", 2, "sections: model, target, drafter"),
        ("target.num_ranks.x=2", "target.num_ranks.x", 2, "give target.num_ranks a single value"),
        ("target=3", "target", 3, "its fields: num_ranks"),
        ("target.num_ranks=x", "target.num_ranks", "x", "allowed: integer, ≥ 1, ≤ 1024"),
        ("target.num_ranks=0", "target.num_ranks", 0, "allowed: integer, ≥ 1, ≤ 1024"),
        ("target.num_ranks=1.5", "target.num_ranks", 1.5, "allowed: integer"),
        ("target.num_ranks=yes", "target.num_ranks", True, "allowed: integer"),
        ("target.num_ranks='2'", "target.num_ranks", "2", "allowed: integer"),
        ("ingress.port=70000", "ingress.port", 70000, "allowed: integer, ≥ 1, ≤ 65535"),
        ("telemetry.otlp_endpoint=h:1", "telemetry.otlp_endpoint", "h:1", "allowed: text or null"),
        ("ingress.request_timeout_s=0", "ingress.request_timeout_s", 0, "allowed: number, > 0"),
        ("ingress.request_timeout_s=.inf", "ingress.request_timeout_s", float("inf"), "number"),
        ("model.drafter=3", "model.drafter", 3, "allowed: text or null"),
        ("model.dtype=fp16", "model.dtype", "fp16", "allowed: 'float32', 'bfloat16'"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_origin_and_remedy(
    override: str, field: str, value: object, remedy: str
) -> None:
    error = refusal(override)
    assert (error.field, error.value, error.origin) == (field, value, f"--set {override}")
    assert remedy in error.remedy
    for part in (field, repr(value), override, error.remedy):
        assert part in str(error)


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        (["target.max_batch_tokens=8", "drafter.gamma=8"], "drafter.gamma", "use at most 7"),
        (["target.kv_cache_tokens=2047"], "model.max_model_len", "use at most 2032"),
        (["target.num_ranks=3", "target.group_size=2"], "target.group_size", "use a divisor"),
        (
            ["policy.name=static_length", "policy.static_length=3", "drafter.gamma=2"],
            "policy.static_length",
            "use at most 2",
        ),
        (["ingress.request_timeout_s=1"], "ingress.reservation_timeout_s", "use a shorter one"),
        (["model.device=cuda", "drafter.num_gpus=1"], "target.num_gpus", "use 1"),
        (["model.device=cuda", "target.num_gpus=1"], "drafter.num_gpus", "use 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    overrides: list[str], field: str, remedy: str
) -> None:
    error = refusal(*overrides)
    assert error.field == field
    assert remedy in error.remedy
    given = [text for text in overrides if text.startswith(f"{field}=")]
    assert error.origin in ([f"--set {given[0]}"] if given else ["default", "preset laptop-cpu"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["target.max_batch_tokens=8", "drafter.gamma=7"],
        ["target.kv_cache_tokens=2048"],
        ["drafter.gamma=2"],  # static_length = 5 is not in use
        ["model.device=cuda", "target.num_gpus=1", "model.drafter=null"],
    ],
)
def test_the_edge_of_every_contradiction_is_allowed(overrides: list[str]) -> None:
    load(overrides=overrides, environment={})


def test_contradictions_cannot_be_built_in_code_either() -> None:
    with pytest.raises(ValidationError, match=r"drafter\.gamma: one round"):
        ClusterConfig(target=TargetConfig(max_batch_tokens=8), drafter=DrafterConfig(gamma=8))


TWO = "[{name: a, weight: 2},{name: b, max_tpot_ms: 40, max_verify_len: 2}]"


def test_classes_of_service_are_a_list_and_config_prints_what_it_reads_back(
    capsys: pytest.CaptureFixture[str], yaml_file: Callable[[str], str]
) -> None:
    given = ["--set", "policy.name=joint", "--set", f"policy.classes={TWO}"]
    assert main(["config", *given]) == 0
    printed = yaml_file(capsys.readouterr().out)
    config = load(printed, environment={})
    assert [known.name for known in config.policy.classes] == ["a", "b"]
    assert (config.policy.classes[0].weight, config.policy.classes[1].max_tpot_ms) == (2.0, 40.0)
    assert config == load(overrides=given[1::2], environment={})


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        ("[{name: a, weight: 0}]", "0.weight: input should be greater than 0"),
        ("[{name: a},{nme: b}]", "1.name: field required"),
        ("[{name: a},{name: a}]", "two are named 'a'"),
        ("[{name: a, min_verify_len: 3, max_verify_len: 2}]", "max_verify_len is below"),
        ("3", "a list of {name, weight, max_tpot_ms, min_verify_len, max_verify_len}"),
    ],
)
def test_a_bad_class_is_refused_with_its_place(classes: str, problem: str) -> None:
    error = refusal("policy.name=joint", f"policy.classes={classes}")
    assert error.field == "policy.classes" and problem in str(error)


def test_classes_are_refused_where_nothing_weighs_them() -> None:
    assert "weighs no classes" in str(refusal("policy.classes=[{name: a}]"))


def test_a_group_takes_a_whole_number_of_times_to_make_all_ranks() -> None:
    assert "no multiple" in str(refusal("target.num_ranks=3", "policy.group_size=2"))
    config = load(overrides=["target.num_ranks=4", "policy.group_size=2"], environment={})
    assert config.target.rank_names == ("target-0", "target-1", "target-2", "target-3")


def test_environment_is_named_as_the_origin() -> None:
    error = refusal(DSPARK__TARGET__NUM_RANKS="none")
    assert error.origin == "environment DSPARK__TARGET__NUM_RANKS"
    assert refusal(DSPARK__NONSENSE="1").field == "nonsense"


@pytest.mark.parametrize("text", ["target.num_ranks", "=3"])
def test_an_override_needs_a_key_and_a_value(text: str) -> None:
    error = refusal(text)
    assert (error.value, error.origin) == (text, "--set")


def test_a_broken_yaml_value_is_refused() -> None:
    assert "YAML" in str(refusal("model.name=[unclosed"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("target: [unclosed", "not readable as YAML"),
        ("- a\n- b\n", "not a mapping of sections"),
        ("target: 3\n", "a section, not a setting"),
        ("target: {num_ranks: 0}\n", "greater than or equal to 1"),
    ],
)
def test_a_bad_file_is_named(text: str, problem: str, yaml_file: Callable[[str], str]) -> None:
    path = yaml_file(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        load(path, environment={})
    assert caught.value.origin == f"file {path}"


def test_unknown_preset_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean laptop-cpu"):
        load("laptop-cp", environment={})
    with pytest.raises(ConfigError, match="presets: laptop-cpu, laptop-moe, multi-node-ep"):
        load("somewhere/else.yaml", environment={})


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        ClusterConfig().target.num_ranks = 2  # type: ignore[misc]


def test_describe_lists_every_setting_once_with_its_effective_value() -> None:
    config = load(overrides=["drafter.gamma=3"], environment={})
    listed = {name: value for name, value, _ in describe(config)}
    assert listed["drafter.gamma"] == 3
    assert len(listed) == sum(
        len(type(getattr(config, section)).model_fields) for section in type(config).model_fields
    )


def test_allowed_values_are_words() -> None:
    fields = {name: info for name, _, info in describe(ClusterConfig())}
    assert allowed(fields["ingress.host"]) == "allowed: text"
    assert allowed(fields["policy.static_threshold"]) == "allowed: number, ≥ 0, ≤ 1"
