"""Errors of the composed system.

MilesError
├── ConfigError (ValueError)        an option, file or combination that cannot work
├── ContextTooLongError (ValueError)
├── RoleError (RuntimeError)        a role failed; carries its name, code and message
│   └── RoleDiedError               its process ended or stopped answering
└── RunFolderError (OSError)        the run folder cannot be used
"""

from __future__ import annotations


class MilesError(Exception):
    """Root of the errors a user of `miles` meets; the command line prints them in one line."""


class ConfigError(MilesError, ValueError):
    """An option, a file or a combination of options that cannot work."""


class ContextTooLongError(MilesError, ValueError):
    """A sequence is longer than the batch-invariant mode was set up for."""


class RoleError(MilesError, RuntimeError):
    """A role answered with an error, or could not be reached."""

    def __init__(self, role: str, code: str, message: str) -> None:
        super().__init__(f"{role}: {message}")
        self.role = role
        self.code = code


class RoleDiedError(RoleError):
    """The process of a role ended, or it did not answer within its deadline."""


class RunFolderError(MilesError, OSError):
    """The run folder cannot be created or written."""


class ModelFetchError(MilesError, OSError):
    """The files of a model cannot be fetched."""
