"""How two ranks know each other: each proves that it has the run's secret, which itself never crosses a socket.

    who is called:  32 random bytes
    the caller:     its rank, 32 random bytes of its own, HMAC(secret; "caller", who, whom, the door, both randoms)
    who is called:  HMAC(secret; "called", the same)

The door is the address that was called, so that nobody in between can pass the proofs on. Until both have proved it no
byte is read beyond these, and none of a message is sent. Each end is a generator: it yields the memory that is to be
filled next and knows no selector.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Generator

RANDOM = 32  # bytes
PROOF = hashlib.sha256().digest_size
HELLO = struct.Struct(f"<I{RANDOM}s{PROOF}s")  # the caller's rank, its random bytes, its proof
_FACTS = struct.Struct(f"<6sII{RANDOM}s{RANDOM}s")

Fill = Generator[memoryview, None, None]
Say = Callable[[bytes], object]


class Stranger(ConnectionError):
    """Whoever is at the other end does not know the run's secret."""


def call(secret: bytes, who: int, whom: int, door: str, say: Say) -> Fill:
    """The caller's end; done once the other end is known to be a rank of this run. Raises Stranger."""
    theirs, mine = bytearray(RANDOM), secrets.token_bytes(RANDOM)
    yield memoryview(theirs)
    say(HELLO.pack(who, mine, proof_of(secret, b"caller", who, whom, door, bytes(theirs), mine)))
    proof = bytearray(PROOF)
    yield memoryview(proof)
    if not hmac.compare_digest(proof, proof_of(secret, b"called", who, whom, door, bytes(theirs), mine)):
        raise Stranger(f"whoever answered at {door} is not rank {whom} of this run")


def answer(secret: bytes, whom: int, size: int, door: str, say: Say) -> Generator[memoryview, None, int]:
    """The end of who is called, one of `size` ranks; returns the caller's rank. Raises Stranger."""
    mine, hello = secrets.token_bytes(RANDOM), bytearray(HELLO.size)
    say(mine)
    yield memoryview(hello)
    who, theirs, proof = HELLO.unpack(hello)
    good = hmac.compare_digest(proof, proof_of(secret, b"caller", who, whom, door, mine, theirs))
    if not good or who >= size or who == whom:
        raise Stranger("a caller is no rank of this run")
    say(proof_of(secret, b"called", who, whom, door, mine, theirs))
    return int(who)


def proof_of(secret: bytes, end: bytes, who: int, whom: int, door: str, called: bytes, caller: bytes) -> bytes:
    """What one end shows the other that it has the run's secret: of the bytes that were exchanged, for this door."""
    return hmac.digest(secret, _FACTS.pack(end, who, whom, called, caller) + door.encode(), "sha256")
