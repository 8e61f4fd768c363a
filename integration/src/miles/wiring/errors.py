"""Errors across processes: a role's code becomes the class that the package which owns the identity defines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from miles.errors import MilesError, RoleError
from miles.run_folder import folder_error
from miles_rollout.errors import LedgerError, RolloutError
from miles_tito import ExpertIdentityError, IdentityViolation, TitoError, TokenIdentityError, VersionIdentityError
from miles_trainer.errors import TrainerError
from miles_weightsync import WeightIdentityError, WeightSyncError

LEDGER_CODE = "ledger"
WEIGHT_CODE = "weight_identity"

IDENTITY_ERRORS: Mapping[str, type[Exception]] = {
    "token_identity": TokenIdentityError,
    "expert_identity": ExpertIdentityError,
    "version_identity": VersionIdentityError,
    WEIGHT_CODE: WeightIdentityError,
    LEDGER_CODE: LedgerError,
}


def typed(error: Exception) -> Exception:
    """The identity error that `error` is or carries, or the run folder's; else `error` itself."""
    for cause in _causes(error):
        if isinstance(cause, RoleError) and cause.code in IDENTITY_ERRORS:
            return IDENTITY_ERRORS[cause.code](str(cause))
        if isinstance(cause, IdentityViolation | WeightIdentityError | LedgerError):
            return cause
    folder = folder_error(error) if isinstance(error, OSError) else None
    return error if folder is None else folder


def stopping_code(error: Exception) -> str:
    """The stable code of an error that ended a run."""
    for code, kind in IDENTITY_ERRORS.items():
        if isinstance(error, kind):
            return code
    return str(getattr(error, "code", type(error).__name__))


def user_errors() -> tuple[type[Exception], ...]:
    """What the command line shows as one message."""
    return (MilesError, TitoError, RolloutError, TrainerError, WeightSyncError)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
