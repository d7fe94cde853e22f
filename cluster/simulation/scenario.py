"""What is simulated, declared: machine, drafters, traffic, policies, sweep. Read from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.commands.simulate import PRESETS, preset_names
from cluster.console import CommandError

Kind = Literal["published", "compare", "random_configurations"]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class Curve(Part):
    """Seconds of one rank's step over its batch tokens: points, or a line cut into treads."""

    batch_tokens: list[float] = Field([], description="Ascending batch tokens of measured points.")
    step_time_s: list[float] = Field([], description="Seconds of a step at each point.")
    base_s: float = Field(0.0, ge=0, description="Line: seconds of a step of no tokens.")
    per_token_s: float = Field(0.0, ge=0, description="Line: seconds a token.")
    tread: int = Field(1, ge=1, description="Line: tokens a tread; a step is rounded up to one.")
    max_tokens: int = Field(4096, ge=1, description="Line: batch tokens of the last tread.")
    draft_base_s: float = Field(0.0, ge=0, description="Drafting: seconds of an empty pass.")
    draft_per_request_s: float = Field(0.0, ge=0, description="Drafting: seconds a request.")

    @model_validator(mode="after")
    def _one_form(self) -> Curve:
        points = bool(self.batch_tokens)
        if points == bool(self.base_s) or len(self.batch_tokens) != len(self.step_time_s):
            raise ValueError("give batch_tokens and step_time_s of equal length, or base_s")
        return self


class Shared(Part):
    """g: seconds that the group spends together, over all its tokens."""

    tokens: list[float] = Field([0.0, 1.0], description="Ascending tokens of the whole group.")
    seconds: list[float] = Field([0.0, 0.0], description="Seconds at each point.")


class Machine(Part):
    num_groups: int = Field(1, ge=1, description="Lockstep groups.")
    ranks_per_group: int = Field(1, ge=1, description="Ranks that step together.")
    max_requests: int = Field(4096, ge=1, description="Requests a rank runs at once; others wait.")
    max_prefill_tokens: int = Field(2048, ge=1, description="Prefill tokens of a rank's step.")
    curve: Curve
    shared: Shared = Shared()
    noise: float = Field(0.0, ge=0, lt=1, description="Deviation of a step's log time.")
    rank_speed: list[float] = Field([], description="Factor on the step time of each rank.")


class Acceptance(Part):
    """How confidences of a tenant's drafts are drawn; or a file of recorded ones, [rounds, gamma]."""

    trace: str = Field("", description="A .npy file of recorded confidences, [rounds, gamma].")
    means: list[list[float]] = Field(
        [], description="Mean conditional acceptance by position, one row a domain."
    )
    shares: list[float] = Field([], description="Share of each domain; equal when empty.")
    concentration: float = Field(4.0, gt=0, description="Beta concentration: low is decisive.")
    persistence: float = Field(0.0, ge=0, lt=1, description="Correlation from round to round.")


class Tenant(Part):
    name: str
    acceptance: Acceptance
    share: float = Field(1.0, ge=0, description="Share of requests.")
    rank_shares: list[float] = Field(
        [], description="Its relative share on each rank; flat if empty."
    )
    prompt_tokens: float = Field(0.0, ge=0, description="Mean prompt; 0 when prefilled elsewhere.")
    output_tokens: float = Field(256.0, ge=1, description="Mean output, geometric.")
    context_tokens: float = Field(0.0, ge=0, description="Context a request starts with.")
    weight: float = Field(1.0, gt=0, description="Worth of its tokens relative to others.")
    max_tpot_s: float | None = Field(None, gt=0, description="Deadline: mean seconds a token.")
    min_verify_len: int = Field(0, ge=0, description="Draft tokens always verified.")
    max_verify_len: int | None = Field(None, ge=0, description="Draft tokens verified at most.")


class Closed(Part):
    """Every rank holds its number of requests: one that ends is replaced at once."""

    kind: Literal["closed"] = "closed"
    requests_per_rank: int | list[int] = 64
    lifetime: Literal["tokens", "rounds"] = Field(
        "tokens",
        description="What output_tokens counts. Rounds give every policy the same drafts in every step: a paired run.",
    )


class Open(Part):
    """Requests arrive whatever the cluster does."""

    kind: Literal["open"] = "open"
    rate_per_s: float = Field(gt=0, description="Mean arrivals of the cluster.")
    burstiness: float = Field(1.0, gt=0, description="1 is Poisson; below, gaps vary more.")
    rank_shares: list[float] = Field([], description="Relative arrivals of each rank.")
    routing: Literal["shares", "least_loaded"] = "shares"
    trace: str = Field("", description="A CSV of time_s,tenant,prompt,output instead.")


Load = Annotated[Closed | Open, Field(discriminator="kind")]


class System(Part):
    """One column of the comparison."""

    name: str
    policy: Literal["none", "static_length", "static_threshold", "algorithm1", "lagged", "joint"]
    gamma: int = Field(7, ge=1, description="Tokens drafted a round.")
    length: int = Field(0, ge=0, description="Length of static_length.")
    threshold: float = Field(0.5, ge=0, le=1, description="Threshold of static_threshold.")
    pad_to_max: bool = Field(False, description="Every rank runs as many tokens as the fullest.")
    min_predicted_gain: float = Field(0.0, ge=0, description="Margin over the best length.")
    acceptance: Acceptance | None = Field(None, description="Its own drafter's acceptance.")
    drafting: float = Field(1.0, ge=0, description="Factor on the machine's drafting time.")
    learn: bool = Field(True, description="Step times are learned from served steps.")
    split_profile: bool = Field(
        True, description="Joint: also profiled with one rank loaded alone."
    )
    classes: bool = Field(False, description="Joint: weights, deadlines, lengths of tenants hold.")
    fairness: float = Field(0.0, ge=0, description="With classes: 0 throughput, 1 proportional.")


class Measure(Part):
    warmup_steps: int = Field(20, ge=0, description="Steps of each group left out.")
    steps: int = Field(100, ge=1, description="Steps of each group measured.")


class Published(Part):
    """Figures to compare with; never an input of the simulation."""

    source: str
    sla_tps: float = Field(description="Tokens a second and user at which throughput is compared.")
    gain_at_sla: float
    budget_by_concurrency: dict[int, float]
    throughput_by_concurrency: dict[int, dict[str, float]] = {}


class Scenario(Part):
    name: str
    title: str
    kind: Kind = "compare"
    assumptions: list[str] = []
    machine: Machine
    tenants: list[Tenant]
    load: Load = Closed()
    sweep: list[int] = Field([], description="Requests a rank to run one after another.")
    systems: list[System]
    measure: Measure = Measure()
    published: Published | None = None
    num_configurations: int = Field(0, ge=0, description="Random configurations to compare on.")
    skew: float = Field(0.0, ge=0, description="Random ones: deviation of a rank's log load.")
    compare: tuple[str, str] | None = Field(None, description="Systems whose ratio is reported.")
    seed: int = 0


def load(source: str, overrides: list[str] | None = None) -> Scenario:
    """A preset by name, or a YAML file; `overrides` are `measure.steps=50` strings.

    Raises:
        CommandError: naming the source or the key, and the remedy.
    """
    path = PRESETS / f"{source}.yaml" if source in preset_names() else Path(source)
    if not path.is_file():
        known = ", ".join(preset_names())
        raise CommandError(f"--preset {source}: no such preset or file; presets: {known}", 2)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        for override in overrides or []:
            _override(values, override)
        return Scenario.model_validate(values)
    except yaml.YAMLError as error:
        raise CommandError(f"{path.name}: not YAML: {error}".replace("\n", " "), 2) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"{path.name}: {where} = {first['input']!r}: {first['msg']}"
        raise CommandError(message.replace("\n", " "), 2) from None


def _override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise CommandError(f"--set {override}: write KEY=VALUE, such as measure.steps=50", 2)
    *parents, last = key.split(".")
    at: Any = values
    try:
        for parent in parents:
            at = at[int(parent)] if isinstance(at, list) else at.setdefault(parent, {})
        at[int(last) if isinstance(at, list) else last] = yaml.safe_load(text)
    except (IndexError, ValueError, TypeError, AttributeError):
        raise CommandError(f"--set {override}: the preset has no {key}", 2) from None
