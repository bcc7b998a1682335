"""Finds how much of an Arrow IPC stream is safe to give to Arrow.

It ends at the first message that is cut off or claims too much. Arrow allocates claimed sizes, so these are first added
up from the bytes.

Reference: Apache Arrow's columnar format, "Serialization and Interprocess Communication", and its Message.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

ALLOWED_BYTES = 64 << 20  # to which any stream may unpack
MAX_EXPANSION = 20  # and times its own size; real rows take 2 to 5
MAX_BUFFERS = 64  # per batch; 9 columns with 3 buffers each need 27
CONTINUES = 0xFFFFFFFF
DICTIONARY, BATCH = 2, 3  # kinds of a message's header; 1 is the schema


class Refused(ValueError):
    """Raised for a bad message, with the reason in words."""


def find_whole_messages(data: bytes) -> tuple[int, str]:
    """Returns how many bytes are good messages, and the next message's fault or ""."""
    left, end = ALLOWED_BYTES + MAX_EXPANSION * len(data), 0
    try:
        for meta, body, after in _messages(data):
            left -= sum(_unpacked(data, meta, body, after))
            if left < 0:
                raise Refused("unpacks to more than its size allows")
            end = after
    except Refused as why:
        return end, str(why)
    except struct.error:
        return end, "is damaged"
    return len(data), ""


def _messages(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields the positions of each message's metadata, body and successor."""
    at = 0
    while at < len(data):
        if at + 8 > len(data):
            raise Refused("is cut off")
        mark, length = struct.unpack_from("<Ii", data, at)
        if mark != CONTINUES:
            raise Refused("is damaged")
        if length == 0 and at + 8 < len(data):
            raise Refused("continues after its end")
        if length == 0:
            return  # end of the stream
        meta, body = at + 8, at + 8 + length
        if length < 0 or body > len(data):
            raise Refused("is cut off")
        nbytes = _number(data, _field(data, _root(data, meta), 3), "<q")
        if nbytes < 0 or body + nbytes > len(data):
            raise Refused("is cut off")
        at = body + nbytes
        yield meta, body, at


def _unpacked(data: bytes, meta: int, body: int, after: int) -> Iterator[int]:
    """Yields each buffer's claimed bytes."""
    message = _root(data, meta)
    kind, header = _number(data, _field(data, message, 1), "<B"), _table(data, message, 2)
    if kind == DICTIONARY and header:
        header = _table(data, header, 1)
    if kind not in (DICTIONARY, BATCH) or not header:
        return
    packed = _field(data, header, 3)
    vector = _table(data, header, 2)
    count = _number(data, vector, "<I")
    if count > MAX_BUFFERS:
        raise Refused("has too many buffers")
    for i in range(count):
        offset, length = struct.unpack_from("<qq", data, vector + 4 + 16 * i)
        if offset < 0 or length < 0 or body + offset + length > after:
            raise Refused("has a buffer outside of it")
        if packed and length >= 8:
            (says,) = struct.unpack_from("<q", data, body + offset)
            if says < -1:
                raise Refused("is damaged")
            yield length if says == -1 else says
        else:
            yield length


def _root(data: bytes, at: int) -> int:
    return at + _number(data, at, "<I")


def _field(data: bytes, table: int, number: int) -> int:
    """The position of a table's field; 0 if absent."""
    vtable = table - _number(data, table, "<i")
    if vtable < 0:
        raise Refused("is damaged")
    size = _number(data, vtable, "<H")
    place = 4 + 2 * number
    found = _number(data, vtable + place, "<H") if place + 2 <= size else 0
    return table + found if found else 0


def _table(data: bytes, table: int, number: int) -> int:
    """The position of a field's table or vector; 0 if absent."""
    at = _field(data, table, number)
    return at + _number(data, at, "<I") if at else 0


def _number(data: bytes, at: int, form: str) -> int:
    """A number of the metadata; 0 if absent."""
    return int(struct.unpack_from(form, data, at)[0]) if at else 0
