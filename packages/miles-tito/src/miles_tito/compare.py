"""Does a stored id buffer still say what a fresh rendering of its messages says?

Both sides are cut at special tokens into segments, and the segments are compared as text. Text that a model sampled
may differ from its canonical rendering (`assistant_text`, soft); anything else is a bug of the template, the splice
or the buffer (hard).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from .tokenizer import Tokenizer

Mode = Literal["first", "resync"]
Kind = Literal[
    "special_token_count",
    "special_token_type",
    "non_assistant_text",
    "assistant_text",
    "retokenized_only",
    "boundary_open",
]
SOFT: frozenset[Kind] = frozenset({"assistant_text", "retokenized_only", "boundary_open"})


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One difference. `segment_index` counts segments of the expected side (-1: the structure as a whole);
    `block_index` counts message blocks, None where the family's opener is unknown."""

    type: Kind
    segment_index: int
    expected_text: str
    actual_text: str
    detail: str = ""
    block_index: int | None = None

    @property
    def hard(self) -> bool:
        """Whether this is a bug rather than a sampled spelling."""
        return self.type not in SOFT


@dataclass(frozen=True, slots=True)
class _Segment:
    special: bool
    text: str
    ids: tuple[int, ...] | None = None


class Comparator:
    """Compares expected with actual ids, or expected text with actual ids (which needs no encoding)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        assistant_start: str | None,
        trim_texts: Sequence[str] = (),
        trim_ids: Sequence[int] | None = None,
        special_ids: frozenset[int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.assistant_start = assistant_start
        self.trim_texts = tuple(trim_texts)
        encoded = [tokenizer.encode(text) for text in trim_texts]
        self.trim_ids = frozenset(trim_ids if trim_ids is not None else (ids[0] for ids in encoded if len(ids) == 1))
        self.special_ids = tokenizer.special_ids if special_ids is None else special_ids
        opener = tokenizer.special_pattern.match(assistant_start) if assistant_start else None
        self._opener = opener.group() if opener else None

    def compare(self, expected_ids: Sequence[int], actual_ids: Sequence[int], mode: Mode = "resync") -> list[Mismatch]:
        """Differences between two id sequences. `first` stops where the structure of special tokens differs; `resync`
        goes on."""
        expected, actual = self._cut(expected_ids), self._cut(actual_ids)
        return self._first(expected, actual) if mode == "first" else self._resync(expected, actual)

    def compare_text(self, expected_text: str, actual_ids: Sequence[int], *, cut: bool = False) -> list[Mismatch]:
        """`resync` against a rendered text. With `cut`, the last turn was truncated: its missing stop is
        `boundary_open`."""
        text = self.tokenizer.normalize(expected_text)
        return self._resync(self._cut_text(text), self._cut(actual_ids), cut=cut)

    def _cut(self, ids: Sequence[int]) -> list[_Segment]:
        kept = list(ids)
        while kept and kept[-1] in self.trim_ids:
            kept.pop()
        segments: list[_Segment] = []
        run: list[int] = []
        for token in kept:
            if token not in self.special_ids:
                run.append(token)
                continue
            segments += self._content(run)
            run = []
            segments.append(_Segment(True, self.tokenizer.token(token), (token,)))
        return segments + self._content(run)

    def _content(self, run: list[int]) -> list[_Segment]:
        return [_Segment(False, self.tokenizer.decode(run), tuple(run))] if run else []

    def _cut_text(self, text: str) -> list[_Segment]:
        while any(text.endswith(tail) for tail in self.trim_texts):
            text = next(text.removesuffix(tail) for tail in self.trim_texts if text.endswith(tail))
        segments: list[_Segment] = []
        at = 0
        for found in self.tokenizer.special_pattern.finditer(text):
            if found.start() > at:
                segments.append(_Segment(False, text[at : found.start()]))
            segments.append(_Segment(True, found.group()))
            at = found.end()
        return segments + ([_Segment(False, text[at:])] if at < len(text) else [])

    def _first(self, expected: list[_Segment], actual: list[_Segment]) -> list[Mismatch]:
        if [segment.special for segment in expected] != [segment.special for segment in actual]:
            return [Mismatch("special_token_count", -1, _structure(expected), _structure(actual))]
        found = []
        for index in range(len(expected)):
            mismatch = self._pair(expected, index, actual, index)
            if mismatch is not None and mismatch.type != "retokenized_only":
                found.append(mismatch)
        return found

    def _pair(self, expected: list[_Segment], i: int, actual: list[_Segment], j: int) -> Mismatch | None:
        """Compare segment i with segment j, both special or both content."""
        one, other = expected[i], actual[j]
        block = self._block(expected, i)
        if one.special:
            same = one.text == other.text
            return None if same else Mismatch("special_token_type", i, one.text, other.text, block_index=block)
        if one.text == other.text:
            if one.ids is None or other.ids is None or one.ids == other.ids:
                return None
            detail = f"{len(one.ids)} ids against {len(other.ids)}"
            return Mismatch("retokenized_only", i, one.text, other.text, detail, block)
        assistant = self._is_assistant(expected, i) and self._is_assistant(actual, j)
        kind: Kind = "assistant_text" if assistant else "non_assistant_text"
        return Mismatch(kind, i, one.text, other.text, _divergence(one.text, other.text), block)

    def _is_assistant(self, segments: list[_Segment], index: int) -> bool:
        if self.assistant_start is None or index == 0 or not segments[index - 1].special:
            return False
        return (segments[index - 1].text + segments[index].text).startswith(self.assistant_start)

    def _block(self, segments: list[_Segment], index: int) -> int | None:
        if self._opener is None:
            return None
        return sum(segment.special and segment.text == self._opener for segment in segments[: index + 1]) - 1

    def _resync(self, expected: list[_Segment], actual: list[_Segment], *, cut: bool = False) -> list[Mismatch]:
        """Align the special tokens, compare what lies between aligned ones, and report the rest as hard."""
        keys = [[segment.text if segment.special else None for segment in side] for side in (expected, actual)]
        found: list[Mismatch] = []
        for op, i0, i1, j0, j1 in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes():
            if op == "equal":
                pairs = (self._pair(expected, i, actual, j) for i, j in zip(range(i0, i1), range(j0, j1), strict=True))
                found += [mismatch for mismatch in pairs if mismatch is not None]
                continue
            found.append(self._structural(expected, actual, (i0, i1), (j0, j1), cut=cut))
        return found

    def _structural(
        self, expected: list[_Segment], actual: list[_Segment], i: tuple[int, int], j: tuple[int, int], *, cut: bool
    ) -> Mismatch:
        one, other = expected[slice(*i)], actual[slice(*j)]
        block = self._block(expected, min(i[0], len(expected) - 1))
        only_stop = i == (len(expected) - 1, len(expected)) and not other and one[0].special
        if cut and only_stop:
            return Mismatch("boundary_open", i[0], one[0].text, "", "the last turn was truncated", block)
        if len(one) == len(other) == 1 and one[0].special and other[0].special:
            return Mismatch("special_token_type", i[0], one[0].text, other[0].text, block_index=block)
        return Mismatch("special_token_count", i[0], _structure(one), _structure(other), block_index=block)


def _structure(segments: Sequence[_Segment]) -> str:
    return " ".join(segment.text if segment.special else "…" for segment in segments)


def _divergence(one: str, other: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"first difference at character {at}: {one[at : at + 20]!r} against {other[at : at + 20]!r}"
