"""What can be rolled out to a running cluster, who must start again for it, and who runs which revision."""

from __future__ import annotations

from typing import Any

import pytest

from configs.change import (
    AT_RUN_TIME,
    ON_RESTART,
    FixedSettingError,
    changes,
    require_rollable,
    restarted_by,
)
from configs.load import ConfigError, describe, load
from configs.revisions import Assignment, Revision
from configs.schema import ClusterConfig

RUNNING = load("laptop-cpu", environment={})


def wanted(*settings: str) -> ClusterConfig:
    return load(RUNNING.model_dump(mode="json"), settings, environment={})


@pytest.mark.parametrize(
    ("setting", "roles"),
    [
        ("policy.name=none", set()),
        ("autoscale.enabled=true", set()),
        ("target.max_running=3", {"target"}),
        ("calibration.online=false", {"target"}),
        ("model.drafter=ngram", {"drafter"}),
        ("drafter.gamma=2", {"drafter", "target"}),
    ],
)
def test_a_setting_restarts_whoever_reads_it_when_it_starts(setting: str, roles: set[str]) -> None:
    require_rollable(RUNNING, wanted(setting))
    assert restarted_by(RUNNING, wanted(setting)) == roles


def test_a_drafter_that_reads_other_layers_restarts_the_ranks_too() -> None:
    change = wanted("model.drafter=/elsewhere")
    assert restarted_by(RUNNING, change, other_taps=True) == {"drafter", "target"}


def test_settings_that_name_nothing_new_restart_nobody() -> None:
    assert changes(RUNNING, wanted()) == {}
    assert restarted_by(RUNNING, wanted()) == set()


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("model.path=other", "tokens they began with"),
        ("model.numerics=fast", "tokens they began with"),
        ("target.num_ranks=2", "where members are placed"),
        ("target.group_size=1", ""),
        ("drafter.num_actors=3", "where members are placed"),
        ("ingress.port=9000", "HTTP front"),
        ("link.kind=actor", "must speak the same"),
        ("telemetry.sample_share=0.5", "HTTP front"),
        ("policy.fairness=1", "HTTP front"),
        ("model.drafter=null", "room for drafters"),
    ],
)
def test_what_can_never_be_rolled_out_is_refused_with_its_name_and_the_remedy(
    setting: str, why: str
) -> None:
    if not why:
        require_rollable(RUNNING, wanted(setting))  # as it is already
        return
    with pytest.raises(FixedSettingError) as refused:
        require_rollable(RUNNING, wanted("target.max_running=3", setting))
    message = str(refused.value)
    assert setting.split("=")[0] in message and why in message
    assert "dspark stop" in message and "max_running" not in message


def test_every_setting_that_is_named_exists() -> None:
    names = {name for name, _, _ in describe(RUNNING)}
    assert set(ON_RESTART) <= names and set(AT_RUN_TIME) <= names
    assert not set(ON_RESTART) & set(AT_RUN_TIME)


def test_settings_of_a_running_cluster_are_changed_one_by_one_and_checked() -> None:
    with pytest.raises(ConfigError) as refused:
        wanted("drafter.gamma=0")
    assert refused.value.field == "drafter.gamma"
    running = RUNNING.model_dump(mode="json")
    with pytest.raises(ConfigError, match="the running cluster"):
        load({**running, "drafter": {**running["drafter"], "gamma": 99}}, environment={})


def config(**target: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"target": target})


def test_members_come_to_a_new_revision_one_by_one_and_the_old_one_is_forgotten() -> None:
    first = Assignment.first(config())
    assert first.of("target-0") == Revision(1, config())
    known, number = first.propose(config(max_running=7))
    assert number == 2 and known.of("target-0").number == 1
    half = known.give(["target-0"], number)
    assert half.of("target-0") == Revision(2, config(max_running=7))
    assert half.of("target-1").number == 1 and half.config == config()
    settled = half.settle(number)
    assert settled.number_of("target-1") == 2 and dict(settled.revisions) == {
        2: config(max_running=7)
    }
    assert settled.config == config(max_running=7)


def test_a_revision_that_is_known_keeps_its_number_and_a_new_one_never_takes_an_old_one() -> None:
    known, number = Assignment.first(config()).propose(config(max_running=7))
    assert known.propose(config()) == (known, 1)
    assert known.propose(config(max_running=7)) == (known, number)
    assert known.settle(2).propose(config())[1] == 3


def test_drained_members_are_named_until_they_are_let_go() -> None:
    drained = Assignment.first(config()).drain(["a", "b"], is_drained=True)
    assert drained.drained == {"a", "b"}
    assert drained.drain(["a"], is_drained=False).settle(1).drained == {"b"}


def test_a_parked_member_keeps_its_place_and_starts_with_what_is_current_then() -> None:
    known, number = Assignment.first(config()).propose(config(max_running=7))
    parked = known.give(["target-1"], -1)
    assert parked.of("target-1") == Revision(-1, config()) and parked.of("target-1").is_parked
    settled = parked.settle(number)
    assert settled.of("target-1") == Revision(-2, config(max_running=7))
    assert not settled.give(["target-1"], 2).of("target-1").is_parked
