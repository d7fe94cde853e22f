"""The configuration of a cluster: frozen, nothing extra, every field described with its unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from configs.access import key_conflicts
from configs.autoscale import AutoscaleConfig
from configs.calibration import CalibrationConfig
from configs.ingress import IngressConfig
from configs.machine import multiplies_bfloat16
from configs.policy import PolicyConfig
from configs.section import Section
from configs.target import TargetConfig

NGRAM_DRAFTER = "ngram"


class ModelConfig(Section):
    """The target and its drafter."""

    name: str = Field(
        "smollm2-135m-instruct", description="Model name that clients use in requests."
    )
    path: str = Field(
        "smollm2-135m",
        description="Folder name under configs/models/, a directory of safetensors, or a hub id (owner/name).",
    )
    drafter: str | None = Field(
        "bundled",
        description="Drafter checkpoint directory; 'bundled' = drafter/ beside the model; 'ngram' = prompt lookup, "
        "without a checkpoint; null = no speculation.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16",
        description="Number format of weights and activations; 'auto' or left out = bfloat16 on a GPU and on CPUs "
        "that multiply it, float32 elsewhere.",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the engines compute.")
    numerics: Literal["reproducible", "fast"] = Field(
        "reproducible",
        description="reproducible: a row's result does not depend on the rest of the batch, so the same seed gives the "
        "same tokens; fast: the same distribution up to rounding.",
    )
    max_model_len: int = Field(2048, ge=16, description="Longest prompt plus output, in tokens.")

    @model_validator(mode="before")
    @classmethod
    def _choose_dtype(cls, values: Any) -> Any:
        """Replace 'auto', so that every process of a cluster computes in the format of where it was started."""
        if not isinstance(values, dict) or values.get("dtype", "auto") != "auto":
            return values
        fits = values.get("device") == "cuda" or multiplies_bfloat16()
        return {**values, "dtype": "bfloat16" if fits else "float32"}


class DrafterConfig(Section):
    """Every drafter actor."""

    num_actors: int = Field(
        1, ge=1, le=1024, description="Drafter actors; ranks are spread over them evenly."
    )
    num_threads: int = Field(
        0, ge=0, description="CPU threads of one drafter; 0 = share the node's cores evenly."
    )
    num_cpus: float = Field(0.5, ge=0, description="CPUs Ray reserves for one drafter.")
    num_gpus: float = Field(0.0, ge=0, description="GPUs Ray reserves for one drafter.")
    gamma: int = Field(5, ge=1, le=32, description="Draft tokens a block offers for verification.")
    draft_top_k: int = Field(
        64, ge=1, le=1024, description="Support of the sparse draft distribution, in tokens."
    )
    max_wait_ms: float = Field(
        250.0,
        ge=0,
        description="Longest a rank waits for a proposal before it runs a plain step, in milliseconds.",
    )
    stop_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Share of the price below which the survival of a draft token ends its block: it and what follows "
        "are not drafted; 0 = always whole blocks.",
    )


class LinkConfig(Section):
    """Hot messages between actors."""

    kind: Literal["zmq", "actor"] = Field(
        "zmq", description="zmq sockets, or plain Ray actor calls."
    )
    drills: bool = Field(
        False,
        description="Whether `dspark chaos` may lose, repeat and delay messages and shift clocks here; never where "
        "people are served.",
    )


class TelemetryConfig(Section):
    """Traces. Metrics and the live page need no setting: `/metrics`, `/dashboard`."""

    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://\S+$",
        description="OTLP/HTTP collector that gets traces, e.g. http://127.0.0.1:4318; null = no process makes any.",
    )
    sample_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced (a probability); one that carries a traceparent follows that.",
    )
    service_name: str = Field(
        "dspark", min_length=1, description="`service.name` of every process in the traces."
    )


class ClusterConfig(Section):
    """Everything `dspark serve` needs to know."""

    model: ModelConfig = Field(
        default_factory=ModelConfig, description="The target and its drafter."
    )
    target: TargetConfig = Field(default_factory=TargetConfig, description="Target ranks.")
    drafter: DrafterConfig = Field(default_factory=DrafterConfig, description="Drafter actors.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="Verification budgets.")
    calibration: CalibrationConfig = Field(
        default_factory=CalibrationConfig, description="Confidences kept true while serving."
    )
    autoscale: AutoscaleConfig = Field(
        default_factory=AutoscaleConfig, description="How many ranks serve."
    )
    ingress: IngressConfig = Field(default_factory=IngressConfig, description="HTTP front.")
    link: LinkConfig = Field(default_factory=LinkConfig, description="Hot messages between actors.")
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig, description="Traces.")

    @model_validator(mode="after")
    def _parts_agree(self) -> ClusterConfig:
        for field, problem, remedy in self._conflicts():
            raise PydanticCustomError(
                "conflict",
                "{field}: {problem}; {remedy}",
                {"field": field, "problem": problem, "remedy": remedy},
            )
        return self

    def _conflicts(self) -> Iterator[tuple[str, str, str]]:
        """(field, problem, remedy) of each pair of settings that cannot both hold."""
        model, target, drafter = self.model, self.target, self.drafter
        if drafter.gamma > target.max_batch_tokens - 1:
            yield (
                "drafter.gamma",
                f"one round (gamma + 1 tokens) exceeds target.max_batch_tokens = {target.max_batch_tokens}",
                f"use at most {target.max_batch_tokens - 1}, or raise target.max_batch_tokens",
            )
        if target.num_ranks % target.group_size:
            yield (
                "target.group_size",
                f"target.num_ranks = {target.num_ranks} ranks do not make whole groups of it",
                "use a divisor of target.num_ranks, or change that",
            )
        usable = target.kv_cache_tokens // target.block_size * target.block_size
        if model.max_model_len > usable:
            yield (
                "model.max_model_len",
                f"one request of that length exceeds the {usable} tokens of a rank's KV cache",
                f"use at most {usable}, or raise target.kv_cache_tokens",
            )
        if self.policy.name == "static_length" and self.policy.static_length > drafter.gamma:
            yield (
                "policy.static_length",
                f"longer than the block of drafter.gamma = {drafter.gamma} tokens",
                f"use at most {drafter.gamma}, or raise drafter.gamma",
            )
        yield from self.policy.conflicts(target.num_ranks)
        yield from key_conflicts(self.ingress.api_keys)
        if self.ingress.reservation_timeout_s > self.ingress.request_timeout_s:
            yield (
                "ingress.reservation_timeout_s",
                f"longer than ingress.request_timeout_s = {self.ingress.request_timeout_s:g}",
                "use a shorter one",
            )
        for name, reserved in (("target", target.num_gpus), ("drafter", drafter.num_gpus)):
            if model.device == "cuda" and reserved == 0 and not self._idle(name):
                yield (
                    f"{name}.num_gpus",
                    "Ray hides every GPU from an actor that reserves none, but model.device = cuda",
                    "use 1, or a fraction to share one GPU",
                )

    def _idle(self, section: str) -> bool:
        return section == "drafter" and self.model.drafter is None
