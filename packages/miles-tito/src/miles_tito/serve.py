"""From a configuration to a running session server."""

from __future__ import annotations

from collections.abc import Callable

from .config import TitoConfig
from .engines import SGLangEngine
from .errors import ConfigurationError
from .families import Family, FamilyOptions, load_family
from .server import create_app, run_server
from .tokenizer import Tokenizer


def configured_family(config: TitoConfig) -> Family:
    """The tokenizer and chat family of a configuration. Raises `ConfigurationError` or `TokenizerError`."""
    if config.tokenizer is None:
        raise ConfigurationError("tokenizer is not set: give the folder that holds the model's tokenizer.json")
    roles = config.family.append_roles
    options = FamilyOptions(config.family.default_system, None if roles is None else frozenset(roles))
    return load_family(config.family.name, Tokenizer.load(config.tokenizer), options)


def serve(
    config: TitoConfig,
    *,
    engine_token: str | None = None,
    control_token: str | None = None,
    announce: Callable[[int], None] | None = None,
) -> None:
    """Run the session server until SIGTERM. Raises an error of ours when something needed is missing or the port is
    taken."""
    if config.engine.url is None:
        raise ConfigurationError("engine.url is not set: give the base URL of an engine or a router")
    family = configured_family(config)
    engine = SGLangEngine.from_config(config.engine, url=config.engine.url, token=engine_token)
    app = create_app(config, engine=engine, tokenizer=family.tokenizer, family=family, control_token=control_token)
    server = config.server
    run_server(app, server.host, server.port, announce, drain_timeout_s=server.drain_timeout_s)
