"""Every error this package raises.

RolloutError
├── RolloutConfigError (ValueError)       an option, or two that contradict each other
├── PluginError (ImportError)             an agent, grader or filter that cannot be loaded
├── PromptFileError (ValueError)          a malformed prompt file, with the line number
├── PromptFileMissingError (FileNotFoundError)
├── FrontierError (ValueError)            a saved data position that does not fit the prompts
├── GroupFormatError (ValueError)         bytes that are no group v1
├── LedgerError (RuntimeError)            a prompt that settled twice, or never
├── HistoryError (ValueError)             an events file that cannot be read
├── SessionCallError (RuntimeError)       a session that could not be created or collected in time
├── WorkerError (RuntimeError)
│   ├── ConsecutiveFailuresError          every group fails
│   ├── FilterRejectsEverythingError      every group is filtered out
│   ├── PromptsExhaustedError             no prompt is left and none is under way
│   └── StallError (TimeoutError)         no group was completed in the allowed time
├── GraderError (RuntimeError)            a grade that cannot be given at all
└── PortInUseError (OSError)
"""

from __future__ import annotations


class RolloutError(Exception):
    """Root of the errors of miles-rollout."""


class RolloutConfigError(RolloutError, ValueError):
    """An option is wrong, or two options contradict each other."""


class PluginError(RolloutError, ImportError):
    """A dotted path or entry point could not be loaded, or has the wrong signature."""


class PromptFileError(RolloutError, ValueError):
    """A prompt file is malformed."""


class PromptFileMissingError(RolloutError, FileNotFoundError):
    """A prompt file does not exist."""


class FrontierError(RolloutError, ValueError):
    """A saved data position names prompts that the source does not have."""


class GroupFormatError(RolloutError, ValueError):
    """Bytes are not a group v1, or a group cannot be written as one."""


class LedgerError(RolloutError, RuntimeError):
    """Prompts are not accounted for exactly once."""

    code = "ledger"


class HistoryError(RolloutError, ValueError):
    """An events file is missing or unreadable."""


class SessionCallError(RolloutError, RuntimeError):
    """The session server did not create or give back a session in time."""


class WorkerError(RolloutError, RuntimeError):
    """The rollout worker cannot go on."""


class ConsecutiveFailuresError(WorkerError):
    """Too many groups failed in a row; `__cause__` is the first failure."""


class FilterRejectsEverythingError(WorkerError):
    """Too many groups were filtered out in a row."""


class PromptsExhaustedError(WorkerError):
    """No prompt is left to draw and no group is under way."""


class StallError(WorkerError, TimeoutError):
    """No group was completed within the allowed time."""


class GraderError(RolloutError, RuntimeError):
    """A grader process could not be started, or a request cannot be sent to one."""


class PortInUseError(RolloutError, OSError):
    """The address to serve on is taken."""
