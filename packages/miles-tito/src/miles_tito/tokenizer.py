"""Text to ids and back, over a Hugging Face `tokenizer.json`. No other tokenizer code runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from .errors import TokenizerError


class Tokenizer:
    """A tokenizer with the few operations that token identity needs.

    `chat_template`, `eos_tokens` and `bos_token` are what the checkpoint's folder says, when it says so; only the
    family `default` uses them.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        eos_tokens: Sequence[str] = (),
        bos_token: str | None = None,
    ) -> None:
        self._backend = backend
        self.chat_template = chat_template
        self.eos_tokens = tuple(eos_tokens)
        self.bos_token = bos_token

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Load `tokenizer.json` of a checkpoint folder, and its template and end-of-turn tokens if present.

        Raises `TokenizerError` when the file is missing or is not a tokenizer.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist: give a Hugging Face folder that holds a tokenizer.json")
        try:
            backend = Backend.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the Rust library raises bare Exception for a malformed file
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        config = _read_json(path.parent / "tokenizer_config.json")
        template_file = path.parent / "chat_template.jinja"
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        eos = _token_text(config.get("eos_token"))
        return cls(
            backend,
            chat_template=template if isinstance(template, str) else None,
            eos_tokens=(eos,) if eos else (),
            bos_token=_token_text(config.get("bos_token")),
        )

    @classmethod
    def byte_level(cls, special: Sequence[str] = (), added: Sequence[str] = ()) -> Tokenizer:
        """A tokenizer of 256 bytes plus `special` and `added` (not flagged special) tokens. Lossless on any text."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
        return cls(backend)

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` into `folder`, which must exist."""
        (Path(folder) / "tokenizer.json").write_text(self._backend.to_str(), encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens that are flagged special."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches the text of any special token, longest first; never matches when there is none."""
        texts = sorted((self.token(i) for i in self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")

    @cached_property
    def _literal_backend(self) -> Backend:
        """The same tokenizer without added tokens: text that looks like a control token stays text."""
        config = json.loads(self._backend.to_str())
        config["added_tokens"] = []
        config["post_processor"] = None
        return Backend.from_str(json.dumps(config))

    def encode(self, text: str, *, literal: bool = False) -> list[int]:
        """Ids of `text`, nothing added at either end. With `literal`, control tokens in the text are encoded as plain
        text."""
        backend = self._literal_backend if literal else self._backend
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included. A character cut between two ids becomes U+FFFD; the ids stay
        exact."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token(self, token_id: int) -> str:
        """Text of one id. Raises `TokenizerError` when there is no such id."""
        if self._backend.id_to_token(token_id) is None:
            raise TokenizerError(f"the tokenizer has no token {token_id}; it has {self.vocab_size}")
        return self.decode([token_id])

    def token_id(self, text: str) -> int:
        """The one id of a structural token. Raises `TokenizerError` when it is missing or splits into several."""
        ids = self.encode(text)
        if len(ids) != 1:
            raise TokenizerError(
                f"the token {text!r} is {len(ids)} ids {ids[:8]} in this tokenizer; the chat family needs it to be "
                "one: "
                "choose the family of this checkpoint"
            )
        return ids[0]

    def normalize(self, text: str) -> str:
        """What the tokenizer's normaliser makes of `text` (NFC for Qwen): decoded ids compare to this."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(entry: object) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None
