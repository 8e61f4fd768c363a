"""The exception tree of miles-tito.

    TitoError
    ├── ConfigurationError        (ValueError)     options that cannot work together
    ├── TokenizerError            (ValueError)     a tokenizer folder, or a token that is missing or splits
    ├── TemplateError             (ValueError)     a template that fails, prints too much or runs too long
    ├── TrajectoryError           (ValueError)     a trajectory whose fields contradict each other
    │   └── CodecError                             bytes that are not a trajectory
    ├── IdentityViolation                          what is scored is not what was sampled
    │   ├── TokenIdentityError    (ValueError)
    │   ├── ExpertIdentityError   (ValueError)
    │   └── VersionIdentityError  (ValueError)
    ├── RequestError              (ValueError)     a client request that cannot be served
    │   └── HistoryError                           a conversation that does not continue the stored one
    ├── SessionError              (RuntimeError)
    │   ├── SessionNotFoundError  (LookupError)
    │   ├── SessionBusyError
    │   ├── SessionLimitError
    │   └── TruncatedTurnError
    ├── EngineError               (RuntimeError)
    │   ├── EngineUnreachableError (ConnectionError)
    │   ├── EngineStatusError                      the engine answered with an error
    │   └── EngineReplyError      (ValueError)     the engine's answer contradicts itself
    ├── ServerError               (RuntimeError)   a session server answered with an error
    └── PortInUseError            (OSError)

Every class has a stable `code`, which is what travels in `application/problem+json`.
"""

from __future__ import annotations

from typing import ClassVar


class TitoError(Exception):
    """Root of the errors that miles-tito raises on purpose."""

    default_code: ClassVar[str] = "tito_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.default_code


class ConfigurationError(TitoError, ValueError):
    default_code = "configuration"


class TokenizerError(TitoError, ValueError):
    default_code = "tokenizer"


class TemplateError(TitoError, ValueError):
    default_code = "template_failed"


class TrajectoryError(TitoError, ValueError):
    default_code = "trajectory_invalid"


class CodecError(TrajectoryError):
    default_code = "codec"


class IdentityViolation(TitoError):
    """A checked identity does not hold. The affected work stops; nothing is repaired or averaged away."""

    default_code = "identity_violation"


class TokenIdentityError(IdentityViolation, ValueError):
    default_code = "token_identity"


class ExpertIdentityError(IdentityViolation, ValueError):
    default_code = "expert_identity"


class VersionIdentityError(IdentityViolation, ValueError):
    default_code = "version_identity"


class RequestError(TitoError, ValueError):
    """A request that is refused with status 400. `message_index` and `field` say where, when known."""

    default_code = "invalid_request"

    def __init__(
        self, message: str, *, code: str | None = None, message_index: int | None = None, field: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.message_index = message_index
        self.field = field


class HistoryError(RequestError):
    default_code = "history"


class SessionError(TitoError, RuntimeError):
    default_code = "session"


class SessionNotFoundError(SessionError, LookupError):
    default_code = "session_not_found"


class SessionBusyError(SessionError):
    default_code = "session_busy"


class SessionLimitError(SessionError):
    default_code = "too_many_sessions"


class TruncatedTurnError(SessionError):
    default_code = "turn_truncated"


class EngineError(TitoError, RuntimeError):
    default_code = "engine"


class EngineUnreachableError(EngineError, ConnectionError):
    default_code = "engine_unreachable"


class EngineStatusError(EngineError):
    """The engine answered with an error status, which is passed on to the client."""

    default_code = "engine_status"

    def __init__(self, message: str, *, status: int, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status


class EngineReplyError(EngineError, ValueError):
    default_code = "engine_reply"


class ServerError(TitoError, RuntimeError):
    """A session server refused a call of its client; `status` is the HTTP status, 0 when there was no answer."""

    default_code = "session_server"

    def __init__(self, message: str, *, status: int, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status


class PortInUseError(TitoError, OSError):
    default_code = "port_in_use"


IDENTITY_ERRORS: dict[str, type[IdentityViolation]] = {
    error.default_code: error for error in (TokenIdentityError, ExpertIdentityError, VersionIdentityError)
}
"""From the code on the wire back to the class."""
