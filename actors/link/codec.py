"""Messages as frames of bytes: a pickle that can only ever make our own message classes.

Arrays above a few kilobytes travel as frames of their own (pickle protocol 5), everything else inside the header.
A message is encoded as its class and its field values, so that the receiver runs the constructor and its checks.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.core import messages
from actors.core.logit_rules import LogitRules, LogprobsOrder, TokenLogprobs
from actors.core.messages import Message
from actors.core.sampling import SamplingBatch, SamplingParams

OUT_OF_BAND_BYTES = 4096
_DTYPES = frozenset(
    np.dtype(t).str
    for t in ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
)


class RefusedMessageError(ValueError):
    """Bytes that are not one of our messages."""


def _array(dtype: str, shape: tuple[int, ...], data: bytes | bytearray) -> npt.NDArray[Any]:
    if dtype not in _DTYPES:
        raise RefusedMessageError(f"array of dtype {dtype!r}: only plain numbers travel")
    array = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
    # Receivers hand arrays to torch, which wants to own them.
    return array.reshape(shape) if array.flags.writeable else array.reshape(shape).copy()


def _number(value: int | float | bool) -> int | float | bool:
    return value


_PARTS: tuple[type, ...] = (
    *typing.get_args(Message),
    messages.Endpoint,
    messages.TokenDelta,
    messages.RankLoad,
    SamplingParams,
    SamplingBatch,
    LogitRules,
    LogprobsOrder,
    TokenLogprobs,
)
_MESSAGES: tuple[type, ...] = typing.get_args(Message)
_FIELDS = {cls: tuple(f.name for f in dataclasses.fields(cls)) for cls in _PARTS}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(part.__module__, part.__qualname__): part for part in _PARTS},
    (__name__, "_array"): _array,
    (__name__, "_number"): _number,
}


class _Encoder(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        fields = _FIELDS.get(type(obj))
        if fields is not None:
            return type(obj), tuple(getattr(obj, name) for name in fields)
        if isinstance(obj, np.ndarray):
            return _array, (obj.dtype.str, obj.shape, pickle.PickleBuffer(obj.tobytes()))
        if isinstance(obj, np.generic):
            return _number, (obj.item(),)
        if obj is _array or obj is _number or obj in _FIELDS:
            return NotImplemented
        raise TypeError(
            f"{type(obj).__name__} is no part of a message: see actors/core/messages.py"
        )


class _Decoder(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise RefusedMessageError(f"{module}.{name} is not part of a message") from None


def encode(message: Message) -> list[bytes]:
    """Frames of `message`: a copy, so its arrays may change afterwards."""
    header = io.BytesIO()
    frames = [b""]

    def place(buffer: Any) -> bool:
        raw: bytes = buffer.raw().obj
        if len(raw) < OUT_OF_BAND_BYTES:
            return True  # stays inside the header
        frames.append(raw)
        return False

    _Encoder(header, protocol=5, buffer_callback=place).dump(message)
    frames[0] = header.getvalue()
    return frames


def decode(frames: Sequence[bytes | bytearray | memoryview]) -> Message:
    """The message behind `frames`; its arrays are writable and belong to the caller.

    Raises:
        RefusedMessageError: the bytes are damaged or would make anything but a message.
    """
    if not frames:
        raise RefusedMessageError("a message of no frames")
    try:
        buffers = [bytearray(frame) for frame in frames[1:]]
        message = _Decoder(io.BytesIO(frames[0]), buffers=buffers).load()
    except RefusedMessageError:
        raise
    except Exception as error:  # damaged bytes can fail in any way; all of them mean the same
        raise RefusedMessageError(f"damaged message: {type(error).__name__}: {error}") from error
    if not isinstance(message, _MESSAGES):
        raise RefusedMessageError(f"{type(message).__name__} is not a message")
    return typing.cast(Message, message)
