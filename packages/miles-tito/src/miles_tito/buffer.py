"""Arrays that grow at the end and can be cut back: what a session stores is spans of these, never copies."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)


class GrowableArray(Generic[Scalar]):
    """Rows of one shape and dtype. Appending costs amortised O(rows added)."""

    def __init__(self, dtype: np.dtype[Scalar] | type[Scalar], row_shape: tuple[int, ...] = ()) -> None:
        self._data: NDArray[Scalar] = np.zeros((64, *row_shape), dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._data.shape[1:]

    def view(self, start: int = 0, end: int | None = None) -> NDArray[Scalar]:
        """Rows [start, end) without a copy; valid until the next change."""
        return self._data[: self._length][start:end]

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows of the array's shape; values are cast to its dtype, which they must fit."""
        end = self._length + len(rows)
        if end > len(self._data):
            grown = np.zeros((max(end, 2 * len(self._data)), *self.row_shape), dtype=self._data.dtype)
            grown[: self._length] = self.view()
            self._data = grown
        self._data[self._length : end] = rows
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on."""
        if not 0 <= length <= self._length:
            raise IndexError(f"cannot cut an array of {self._length} rows to {length}")
        self._length = length
