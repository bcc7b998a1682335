"""Two ranks prove to each other that they know the run's secret, without sending it.

    called rank:  32 random bytes
    caller:       its rank, 32 random bytes of its own, HMAC(secret; "caller", who, whom, the door, both randoms)
    called rank:  HMAC(secret; "called", the same)

The door is the address that the caller used, so a man in the middle cannot forward the proofs. Until both proofs hold,
ranks read only the greeting and send no message. Each end is a generator that yields the memory to fill next.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Generator

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
HELLO_STRUCT = struct.Struct(f"<I{NONCE_BYTES}s{PROOF_BYTES}s")  # the caller's rank, its random bytes, its proof
_FACTS = struct.Struct(f"<6sII{NONCE_BYTES}s{NONCE_BYTES}s")

Fill = Generator[memoryview, None, None]
Say = Callable[[bytes], object]


class AuthenticationError(ConnectionError):
    """The other end does not know the run's secret."""


def greet_as_caller(secret: bytes, who: int, whom: int, door: str, say: Say) -> Fill:
    """Greets as rank `who`. Raises AuthenticationError if the other end is not rank `whom` of this run."""
    theirs, mine = bytearray(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    yield memoryview(theirs)
    say(HELLO_STRUCT.pack(who, mine, make_proof(secret, b"caller", who, whom, door, bytes(theirs), mine)))
    proof = bytearray(PROOF_BYTES)
    yield memoryview(proof)
    if not hmac.compare_digest(proof, make_proof(secret, b"called", who, whom, door, bytes(theirs), mine)):
        raise AuthenticationError(f"the process that answered at {door} is not rank {whom} of this run")


def greet_as_called(secret: bytes, whom: int, size: int, door: str, say: Say) -> Generator[memoryview, None, int]:
    """Greets as rank `whom` of `size`, and returns the caller's rank. Raises AuthenticationError."""
    mine, hello = secrets.token_bytes(NONCE_BYTES), bytearray(HELLO_STRUCT.size)
    say(mine)
    yield memoryview(hello)
    who, theirs, proof = HELLO_STRUCT.unpack(hello)
    good = hmac.compare_digest(proof, make_proof(secret, b"caller", who, whom, door, mine, theirs))
    if not good or who >= size or who == whom:
        raise AuthenticationError("a connecting process is not a rank of this run")
    say(make_proof(secret, b"called", who, whom, door, mine, theirs))
    return int(who)


def make_proof(secret: bytes, end: bytes, who: int, whom: int, door: str, called: bytes, caller: bytes) -> bytes:
    """Returns the proof of one end, b"caller" or b"called". `called` and `caller` are the random bytes of both ends."""
    return hmac.digest(secret, _FACTS.pack(end, who, whom, called, caller) + door.encode(), "sha256")
