"""Which weight versions a reply may name (`contracts/README.md`, "Versions")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .errors import RequestError, VersionIdentityError
from .protocols import GenerateReply

Knowledge = Literal["checked", "unknown"]


@dataclass(frozen=True, slots=True)
class VersionBounds:
    """What the driver has said: the last version begun, and the last each engine acknowledged. Nothing known by
    default."""

    begun: int | None = None
    acknowledged: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        late = {engine: version for engine, version in self.acknowledged.items() if version > (self.begun or 0)}
        if self.begun is not None and late:
            raise RequestError(
                f"engines {late} acknowledged a version after {self.begun}, the last one begun", code="invalid_versions"
            )


def check_versions(where: str, reply: GenerateReply, at_dispatch: VersionBounds, at_reply: VersionBounds) -> Knowledge:
    """Each label must lie between what that engine had acknowledged at dispatch and what was begun at the reply.

    Rows of experts may be older than the dispatch (a prefix routed before), never newer than what was begun.
    Returns "unknown" when the bounds of this engine are not known, in which case what is known is still checked.
    Raises `VersionIdentityError`.
    """
    labels = {version for _, version in reply.version_spans}
    rows = {version for _, version in reply.experts.version_spans} if reply.experts else set()
    lowest = at_dispatch.acknowledged.get(reply.engine_id)
    highest = at_reply.begun
    early = {label for label in labels if lowest is not None and label < lowest}
    late = {label for label in labels | rows if highest is not None and label > highest}
    if early or late:
        raise VersionIdentityError(
            f"{where}: engine {reply.engine_id} labelled tokens with version {sorted(early | late)}; it had "
            "acknowledged "
            f"{lowest} at dispatch and {highest} was the last begun at the reply, so this work is dropped"
        )
    return "unknown" if lowest is None or highest is None else "checked"
