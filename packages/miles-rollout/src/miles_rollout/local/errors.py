"""Errors of the local engine and its server.

RolloutError
└── EngineError                     any of the below; `code` and `status` go on the wire
    ├── EngineSetupError            (ValueError)    the model or the configuration cannot be served
    ├── RequestError                (ValueError)    a request that can never be served
    │   └── BodyTooLargeError                       its body is over the limit
    ├── EngineBusyError             (RuntimeError)  an operation that needs an idle engine
    ├── EnginePoisonedError         (RuntimeError)  weights are not to be trusted; no generation
    ├── EngineClosedError           (RuntimeError)  the engine is shutting down
    ├── EngineTimeoutError          (TimeoutError)  the engine thread did not answer in time
    ├── WeightStateError            (RuntimeError)  a weight operation out of order
    └── WeightTensorError           (ValueError)    a tensor with an unknown name or a wrong dtype, shape or size
"""

from __future__ import annotations

from miles_rollout.errors import RolloutError


class EngineError(RolloutError):
    """Anything the engine refuses. `code` is stable, `status` the HTTP status that carries it."""

    code = "engine_error"
    status = 500

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class EngineSetupError(EngineError, ValueError):
    """The model folder or the configuration cannot be served."""

    code = "engine_setup"
    status = 400


class RequestError(EngineError, ValueError):
    """A request that can never be served as it stands."""

    code = "invalid_request"
    status = 400


class BodyTooLargeError(RequestError):
    """The body of a request is over the limit."""

    code = "body_too_large"
    status = 413


class EngineBusyError(EngineError, RuntimeError):
    """An operation that needs an idle engine met running requests."""

    code = "engine_busy"
    status = 400


class EnginePoisonedError(EngineError, RuntimeError):
    """The weights are not to be trusted: nothing is generated until a full install was committed."""

    code = "engine_poisoned"
    status = 503


class EngineClosedError(EngineError, RuntimeError):
    """The engine is not running, or is shutting down."""

    code = "engine_closed"
    status = 503


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine thread did not carry out a command before its deadline."""

    code = "engine_timeout"
    status = 504


class WeightStateError(EngineError, RuntimeError):
    """A weight operation out of order: not paused, no session, version going backwards."""

    code = "weight_state"
    status = 400


class WeightTensorError(EngineError, ValueError):
    """A tensor with an unknown name, or a dtype, shape or size that does not fit. Nothing was stored."""

    code = "weight_tensor"
    status = 400
