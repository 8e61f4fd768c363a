"""Token identity for RL: exact sampled ids of multi-turn agent runs. Importing this needs neither torch nor
transformers."""

from .client import SessionHandle, SessionServerClient
from .codec import TrajectoryBatch, dumps, dumps_batch, loads, loads_batch
from .compare import Comparator, Mismatch
from .config import EngineConfig, FamilyConfig, ServerConfig, SessionConfig, TitoConfig
from .engines import SGLangEngine, check_reply
from .errors import (
    CodecError,
    ConfigurationError,
    EngineError,
    EngineReplyError,
    EngineStatusError,
    EngineUnreachableError,
    ExpertIdentityError,
    HistoryError,
    IdentityViolation,
    PortInUseError,
    RequestError,
    ServerError,
    SessionBusyError,
    SessionError,
    SessionLimitError,
    SessionNotFoundError,
    TemplateError,
    TitoError,
    TokenIdentityError,
    TokenizerError,
    TrajectoryError,
    TruncatedTurnError,
    VersionIdentityError,
)
from .families import Family, FamilyOptions, family_names, load_family
from .matching import MATCHERS, matcher_named
from .protocols import (
    EngineInfo,
    ExpertRows,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MoeInfo,
    SamplingParams,
    TokenEngine,
)
from .records import expert_digest, record_digest, verify_records
from .seeds import derive_seed
from .session import ChatTurn, Plan, Session
from .store import SessionStore
from .tokenizer import Tokenizer
from .trajectory import RoutedExperts, Trajectory, Turn
from .versions import VersionBounds, check_versions

__version__ = "0.1.0"

__all__ = [
    "MATCHERS",
    "ChatTurn",
    "CodecError",
    "Comparator",
    "ConfigurationError",
    "EngineConfig",
    "EngineError",
    "EngineInfo",
    "EngineReplyError",
    "EngineStatusError",
    "EngineUnreachableError",
    "ExpertIdentityError",
    "ExpertRows",
    "Family",
    "FamilyConfig",
    "FamilyOptions",
    "FinishReason",
    "GenerateReply",
    "GenerateRequest",
    "HistoryError",
    "IdentityViolation",
    "Mismatch",
    "MoeInfo",
    "Plan",
    "PortInUseError",
    "RequestError",
    "RoutedExperts",
    "SGLangEngine",
    "SamplingParams",
    "ServerConfig",
    "ServerError",
    "Session",
    "SessionBusyError",
    "SessionConfig",
    "SessionError",
    "SessionHandle",
    "SessionLimitError",
    "SessionNotFoundError",
    "SessionServerClient",
    "SessionStore",
    "TemplateError",
    "TitoConfig",
    "TitoError",
    "TokenEngine",
    "TokenIdentityError",
    "Tokenizer",
    "TokenizerError",
    "Trajectory",
    "TrajectoryBatch",
    "TrajectoryError",
    "TruncatedTurnError",
    "Turn",
    "VersionBounds",
    "VersionIdentityError",
    "check_reply",
    "check_versions",
    "derive_seed",
    "dumps",
    "dumps_batch",
    "expert_digest",
    "family_names",
    "load_family",
    "loads",
    "loads_batch",
    "matcher_named",
    "record_digest",
    "verify_records",
]
