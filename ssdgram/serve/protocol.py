"""What goes over the socket: a hello, a welcome with four descriptors, and questions that are not asked in a step.

    client  HELLO  magic, version, layout, zero ─────────────────►  server
            ◄──── WELCOME  magic, version, status, text length, numbers; text; descriptors: store, plans, bell, share
            QUESTION  kind, number, batch row's seat, layer, waited ──►
            ◄──── ANSWER  kind, number, text length, zero; JSON

Messages keep their bounds (SOCK_SEQPACKET); each has exactly the size that its head says, or the connection ends. Little-endian.
It knows neither stores nor batches. Nothing that is received is believed before it was checked.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from dataclasses import dataclass, fields
from typing import Any

from ssdgram import errors
from ssdgram._plan_state import C_COUNT
from ssdgram.errors import ReadError, ReadTimeoutError, SSDGramError, UnavailableError
from ssdgram.stats import Stats

MAGIC = b"SSDGRAM\0"
VERSION = 1                                                  # of the messages; `share.layout_digest` stands for the shared memory
HELLO = struct.Struct("<8sIIII")
WELCOME = struct.Struct("<8sIIII16q")
QUESTION = struct.Struct("<IIqqd")
ANSWER = struct.Struct("<IIII")
ACCEPTED, REFUSED = 0, 1
ASK_STATS, ASK_ERROR, ASK_TIMING = 1, 2, 3
MOST_TEXT = 1 << 16
DESCRIPTORS = 4                                              # store, plans, bell, share


@dataclass(frozen=True)
class Welcome:
    """The numbers of a WELCOME, in their order: where things lie in the memory whose descriptors come with it."""

    rows: int                                                # seats of this client
    first: int                                               # batch row of its first seat
    layers: int
    orders: int
    positions: int                                           # most positions of a batch
    flat: int                                                # most tokens of a batch, lookbacks counted
    about: int                                               # bytes of the text in the share
    batch_rows: int                                          # of the whole server
    line: int                                                # int32 words of a batch row
    store_bytes: int                                         # size of the store's block ...
    words_at: int                                            # ... and the offsets of batch words, planner's control and slab in it
    control_at: int
    slab_at: int
    slots: int
    stride: int
    pid: int                                                 # the server's, for messages

    def packed(self) -> tuple[int, ...]:
        """The numbers."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def check(self) -> None:
        """UnavailableError unless the numbers are such that nothing computed from them leaves the memory."""
        small = {"rows": 1 << 12, "layers": 1 << 10, "orders": 16, "positions": 1 << 24, "flat": 1 << 26, "about": 1 << 28,
                 "batch_rows": 1 << 20, "line": 1 << 12, "slots": 1 << 30, "stride": 1 << 20}
        wrong = [name for name, most in small.items() if not 0 < getattr(self, name) <= most]
        for at, length in ((self.words_at, 4 * self.batch_rows * self.line), (self.control_at, 8 * C_COUNT),
                           (self.slab_at, self.slots * self.stride)):
            if at < 0 or at % 4096 or at + length > self.store_bytes:
                wrong.append(f"{length} bytes at {at}")
        if wrong or not 0 < self.first <= self.batch_rows - self.rows or self.flat < self.positions:
            raise UnavailableError(f"the server's welcome is wrong ({', '.join(wrong) or 'rows'}): is this a server of SSDGram?")


def peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other side, as the kernel knows them; pid 0: not of this PID namespace."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def may_speak(uid: int) -> bool:
    """Whether a process of that user may be at the other end: the own user, or root."""
    return uid in (os.geteuid(), 0)


def receive(connection: socket.socket, most: int, descriptors: int = 0) -> tuple[bytes, list[int]]:
    """A message of at most `most` bytes, and its descriptors; b"": the other side is gone. ConnectionError if it was cut."""
    room = socket.CMSG_SPACE(4 * max(descriptors, 1))
    data, control, flags, _ = connection.recvmsg(most + 1, room, socket.MSG_CMSG_CLOEXEC)
    received = array.array("i")
    for level, kind, part in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(part[:len(part) - len(part) % received.itemsize])
    if len(received) != descriptors and (len(received) > descriptors or (data[:8] == MAGIC and len(data) == WELCOME.size)):
        close_all(received)
        raise ConnectionError(f"{len(received)} descriptors came with a message of {len(data)} bytes, expected {descriptors}")
    if len(data) > most or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(received)
        raise ConnectionError(f"a message of more than {most} bytes")
    return data, list(received)


def close_all(descriptors: Any) -> None:
    """Close descriptors that were received."""
    for number in descriptors:
        os.close(number)


# ---------------------------------------------------------------- hello and welcome


def hello(layout: int) -> bytes:
    """A client's first message."""
    return HELLO.pack(MAGIC, VERSION, layout, 0, 0)


def hello_fault(data: bytes, layout: int) -> str:
    """What is wrong with a client's first message, "" if nothing."""
    if len(data) != HELLO.size or data[:8] != MAGIC:
        return "that was no hello of an SSDGram client"
    _, version, theirs, *rest = HELLO.unpack(data)
    if version != VERSION:
        return f"the client speaks version {version}, this server {VERSION}: install the same SSDGram on both sides"
    if theirs != layout:
        return f"the client lays shared memory out as {theirs:08x}, this server as {layout:08x}: install the same SSDGram on both sides"
    return "" if rest == [0, 0] else "the hello's reserved words are not zero"


def refusal(layout: int, text: str) -> bytes:
    """A WELCOME that is none."""
    data = text.encode()[:1024]
    return WELCOME.pack(MAGIC, VERSION, layout, REFUSED, len(data), *[0] * 16) + data


def welcome(layout: int, numbers: Welcome) -> bytes:
    """The answer to a hello; four descriptors go with it."""
    return WELCOME.pack(MAGIC, VERSION, layout, ACCEPTED, 0, *numbers.packed())


def read_welcome(data: bytes, layout: int) -> Welcome:
    """The numbers of a WELCOME. UnavailableError if it is none, of another version, or a refusal."""
    if len(data) < WELCOME.size or data[:8] != MAGIC:
        raise UnavailableError(f"what answered with {len(data)} bytes is no SSDGram server")
    _, version, theirs, status, length, *numbers = WELCOME.unpack(data[:WELCOME.size])
    if len(data) != WELCOME.size + length:
        raise UnavailableError(f"the server's welcome has {len(data)} bytes, expected {WELCOME.size + length}")
    if status != ACCEPTED:
        raise UnavailableError(f"the server refused: {data[WELCOME.size:].decode(errors='replace')}")
    if (version, theirs) != (VERSION, layout):
        raise UnavailableError(f"the server speaks version {version}, layout {theirs:08x}, this client {VERSION}, {layout:08x}: install "
                               f"the same SSDGram on both sides")
    result = Welcome(*numbers)
    result.check()
    return result


# ---------------------------------------------------------------- answers


def answer(kind: int, number: int, body: Any) -> bytes:
    """An ANSWER."""
    text = json.dumps(body).encode()
    if len(text) > MOST_TEXT - ANSWER.size:
        text = json.dumps(None).encode()
    return ANSWER.pack(kind, number, len(text), 0) + text


def read_answer(data: bytes, kind: int, number: int) -> Any:
    """The body of an ANSWER to that question. ConnectionError if it is none."""
    if len(data) < ANSWER.size or ANSWER.unpack(data[:ANSWER.size]) != (kind, number, len(data) - ANSWER.size, 0):
        raise ConnectionError(f"an answer of {len(data)} bytes to question {number} is malformed")
    return json.loads(data[ANSWER.size:])


_READ_FIELDS = ("layer", "file", "page", "rows", "positions")


def error_to_json(error: Exception) -> dict[str, Any]:
    """A typed error in words that the other side makes the same error of."""
    names = {"BatchTooLargeError": ("need", "have"), "StoreBusyError": ("tickets",), "ReadTimeoutError": ("layer", "outstanding", "age_s")}
    kind = type(error).__name__
    kept = names.get(kind, _READ_FIELDS if isinstance(error, ReadError) else ())
    return {"error": kind, "text": str(error), "errno": getattr(error, "errno", None), **{name: getattr(error, name) for name in kept}}


def error_from_json(body: Any) -> SSDGramError:
    """The error; a StoreError with its text if this side does not know its class."""
    kind, text = str(body.get("error")), str(body.get("text"))
    known = getattr(errors, kind, None)
    if kind == "BatchTooLargeError":
        return errors.BatchTooLargeError(int(body["need"]), int(body["have"]))
    if kind == "StoreBusyError":
        return errors.StoreBusyError(text, [int(ticket) for ticket in body["tickets"]])
    if kind == "ReadTimeoutError":
        return ReadTimeoutError(text, layer=body["layer"], outstanding=body["outstanding"], age_s=body["age_s"])
    if isinstance(known, type) and issubclass(known, ReadError):
        error = known(text, **{name: body[name] for name in _READ_FIELDS})
        if body.get("errno") is not None:
            error.errno = int(body["errno"])
        return error
    if isinstance(known, type) and issubclass(known, SSDGramError):
        return known(text)
    return errors.StoreError(text)


def stats_to_json(stats: Stats) -> dict[str, Any]:
    """The statistics, dictionaries as {"pairs": [[key, value], ...]} (JSON's keys are text)."""
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    return {name: {"pairs": list(entry.items())} if isinstance(entry, dict) else entry for name, entry in values.items()}


def stats_from_json(body: Any) -> Stats:
    """The statistics of `stats_to_json`."""

    def whole(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    values: dict[str, Any] = {name: {whole(key): whole(value) for key, value in entry["pairs"]} if isinstance(entry, dict) else whole(entry)
                              for name, entry in body.items()}
    return Stats(**values)
