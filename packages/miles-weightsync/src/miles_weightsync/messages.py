"""The control protocol between publisher and receiver: one JSON object a message, one answer a request.

A connection starts with `hello`. Answers are {"ok": true, "result": {…}} or {"ok": false, "error": {"code", "message",
"names"}}. A bucket over tcp or gloo is announced first; {"ready": true} asks for its bytes, the answer follows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from miles_weightsync.config import VerifyMode
from miles_weightsync.errors import ProtocolError
from miles_weightsync.protocols import PauseMode

PROTOCOL: Literal["miles-weightsync/1"] = "miles-weightsync/1"
MAX_HELLO_NBYTES = 64 * 1024

Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Hello(_Message):
    """Opens a connection. `owner` names the publisher in messages about the lock."""

    op: Literal["hello"] = "hello"
    protocol: Literal["miles-weightsync/1"] = PROTOCOL
    token: str
    owner: Name


class Describe(_Message):
    """Ask for state, version, manifest digest and expected tensors."""

    op: Literal["describe"] = "describe"


class Acquire(_Message):
    """Take the engine's update lock; answers with the fencing token."""

    op: Literal["acquire"] = "acquire"


class Release(_Message):
    """Give the update lock back."""

    op: Literal["release"] = "release"
    token: Count


class Pause(_Message):
    """Stop generating."""

    op: Literal["pause"] = "pause"
    mode: PauseMode


class Flush(_Message):
    """Drop cached prefixes."""

    op: Literal["flush"] = "flush"


class Begin(_Message):
    """Open an update session."""

    op: Literal["begin"] = "begin"
    token: Count
    session: Name
    target: Count
    buckets: Count
    full: bool


class TcpPayload(_Message):
    """The whole frame follows on this connection once the receiver is ready."""

    kind: Literal["tcp"] = "tcp"
    frame_nbytes: Count


class ShmPayload(_Message):
    """The whole frame lies at the start of a shared segment."""

    kind: Literal["shm"] = "shm"
    segment: Name
    frame_nbytes: Count


class GlooPayload(_Message):
    """The payload is broadcast to a group that was joined; the header travels here."""

    kind: Literal["gloo"] = "gloo"
    group: Name
    header: dict[str, Any]


Payload = Annotated[TcpPayload | ShmPayload | GlooPayload, Field(discriminator="kind")]


class Bucket(_Message):
    """One bucket of the open session. `digest` is the xxh3-128 of its payload."""

    op: Literal["bucket"] = "bucket"
    token: Count
    session: Name
    index: Count
    digest: Digest
    payload: Payload


class Join(_Message):
    """Join a broadcast group of `world_size` whose store listens at host and port; the source is rank 0."""

    op: Literal["join"] = "join"
    group: Name
    host: Name
    port: Annotated[int, Field(ge=1, le=65535)]
    rank: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]
    timeout_s: Annotated[float, Field(gt=0)]


class Leave(_Message):
    """Leave the broadcast group, if any."""

    op: Literal["leave"] = "leave"


class Commit(_Message):
    """Verify the stored tensors against the manifest and take the version."""

    op: Literal["commit"] = "commit"
    token: Count
    session: Name
    version: Count
    manifest: dict[str, Any]
    verify: VerifyMode


class Abort(_Message):
    """End the session."""

    op: Literal["abort"] = "abort"
    token: Count
    session: Name


class Resume(_Message):
    """Generate again."""

    op: Literal["resume"] = "resume"


class Digests(_Message):
    """Ask for the digest of every tensor as stored now."""

    op: Literal["digests"] = "digests"


class Poison(_Message):
    """Take the engine out of service until a full install."""

    op: Literal["poison"] = "poison"
    reason: str


Request = Annotated[
    Hello
    | Describe
    | Acquire
    | Release
    | Pause
    | Flush
    | Begin
    | Bucket
    | Join
    | Leave
    | Commit
    | Abort
    | Resume
    | Digests
    | Poison,
    Field(discriminator="op"),
]

_REQUEST: TypeAdapter[Request] = TypeAdapter(Request)


def parse_request(message: dict[str, Any]) -> Request:
    """Check a message. Raises ProtocolError that names the first field that is wrong."""
    try:
        return _REQUEST.validate_python(message)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "message"
        raise ProtocolError(f"a control message is not acceptable at {where}: {first['msg']}") from None
