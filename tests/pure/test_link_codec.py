"""Encoding of messages, and what the decoder refuses."""

from __future__ import annotations

import dataclasses
import os
import pickle
import typing
from typing import Any

import numpy as np
import pytest

from actors.core import messages
from actors.core.messages import (
    AbortRequest,
    AdmittedRequest,
    Endpoint,
    LoadView,
    Message,
    RankLoad,
    TokenDelta,
    TokenDeltas,
    VerifyBudget,
)
from actors.core.sampling import SamplingParams
from actors.link import RefusedMessageError, decode, encode
from tests.link_behaviour import commit_batch, same

ENDPOINT = Endpoint("a", "target", "tcp://127.0.0.1:1", "key", "epoch")


def round_trip(message: Message) -> Message:
    return decode(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        AbortRequest("r", 3),
        AdmittedRequest(
            "r", 1, ENDPOINT, np.arange(5, dtype=np.int32), 0, 7, SamplingParams(seed=4), (1, 2)
        ),
        TokenDeltas(
            "t", "e", 3, (TokenDelta("r", 1, 0, (5, 6), "stop"), TokenDelta("s", 1, 2, ()))
        ),
        LoadView(4, (RankLoad("t", 1, 2, 3, 4, 0.5, 0.1),)),
        commit_batch(ENDPOINT, 0),
        commit_batch(ENDPOINT, 500),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert same(round_trip(message), message)


def test_every_message_class_may_travel() -> None:
    def sample(annotation: str) -> Any:
        return {"str": "x", "int": 1, "float": 0.5, "bool": True, "Endpoint": ENDPOINT}.get(
            annotation, np.zeros((2, 3), np.float32)
        )

    for cls in typing.get_args(Message):
        values = {f.name: sample(str(f.type)) for f in dataclasses.fields(cls)}
        if cls is VerifyBudget:
            values |= {"based_on_step": 1, "for_step": 3}
        assert same(round_trip(cls(**values)), cls(**values)), cls


def test_numpy_scalars_become_plain_numbers() -> None:
    got = round_trip(TokenDeltas("t", "e", 1, (TokenDelta("r", 1, 0, (np.int32(5),)),)))  # type: ignore[arg-type]
    assert isinstance(got, TokenDeltas) and type(got.deltas[0].token_ids[0]) is int


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (), (2, 3)])
def test_arrays_of_any_shape_and_order_travel(shape: tuple[int, ...]) -> None:
    array = np.asfortranarray(np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape))
    got = round_trip(AdmittedRequest("r", 1, ENDPOINT, array, 0, 1, SamplingParams()))
    assert isinstance(got, AdmittedRequest) and same(got.prompt_ids, array)


def test_large_arrays_travel_as_frames_of_their_own() -> None:
    message = commit_batch(ENDPOINT, 500)
    frames = encode(message)
    assert len(frames) == 2 and len(frames[1]) == message.features.nbytes
    assert len(frames[0]) < 4096


def test_constructor_checks_run_on_receipt() -> None:
    """A budget that looks into the future cannot be smuggled past its own check."""
    budget = VerifyBudget("t", "e", 1, 3, 9, 4, 0.5)
    object.__setattr__(budget, "based_on_step", 2)
    with pytest.raises(RefusedMessageError, match="AnticipatingBudget"):
        round_trip(budget)


def test_what_is_no_message_part_is_not_even_sent() -> None:
    with pytest.raises(TypeError, match="object is no part of a message"):
        encode(AbortRequest(object(), 1))  # type: ignore[arg-type]


class _Poison:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_poisoned_pickle_is_refused_and_runs_nothing(tmp_path: Any) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(RefusedMessageError, match="system is not part of a message"):
        decode([pickle.dumps(_Poison(str(marker)), protocol=5)])
    assert not marker.exists()


@pytest.mark.parametrize(
    "thing", [getattr, eval, np.ndarray, np.dtype, pickle.loads, messages.AnticipatingBudgetError]
)
def test_no_other_global_can_be_reached(thing: Any) -> None:
    with pytest.raises(RefusedMessageError):
        decode([pickle.dumps(thing, protocol=5)])


def test_dotted_names_do_not_reach_through_an_allowed_class() -> None:
    header = b"\x80\x05\x8c\x14actors.core.messages\x8c\x15AbortRequest.__init__\x93."
    header = header.replace(b"\x15AbortRequest.__init__", b"\x15AbortRequest.__init__")
    with pytest.raises(RefusedMessageError):
        decode([header])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x80\x05"],
        [b"garbage"],
        [pickle.dumps({"a": 1}, protocol=5)],
        [pickle.dumps(ENDPOINT.name, protocol=5)],
    ],
)
def test_bytes_that_are_no_message_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(RefusedMessageError):
        decode(frames)


def test_a_missing_or_short_array_frame_is_refused() -> None:
    frames = encode(commit_batch(ENDPOINT, 500))
    with pytest.raises(RefusedMessageError):
        decode(frames[:1])
    with pytest.raises(RefusedMessageError):
        decode([frames[0], frames[1][:-2]])


def test_arrays_of_objects_are_refused() -> None:
    array = np.array([None], dtype=object)
    with pytest.raises(RefusedMessageError, match="only plain numbers"):
        round_trip(AdmittedRequest("r", 1, ENDPOINT, array, 0, 1, SamplingParams()))
