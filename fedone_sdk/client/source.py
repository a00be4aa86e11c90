"""The source of a device's examples."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any

from fedone_sdk.errors import DataError
from fedone_sdk.task import Example

Data = (
    Iterable[Example]
    | AsyncIterable[Example]
    | Callable[[], "Iterable[Example] | Awaitable[Iterable[Example]]"]
)

_MOST = 100_000
"""Examples that a device holds at most; of a stream, the latest ones."""


class Source:
    """The current examples of a device.

    Raises:
        DataError: The iterable has no examples, or its items are not examples.
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        self._examples: list[Example] = []
        self._reader: asyncio.Task[None] | None = None
        if not callable(data) and not isinstance(data, AsyncIterable):
            self._examples = _examples(data)
            if not self._examples:
                raise DataError("data: this client has no examples; it needs at least one")

    def open(self) -> None:
        """Start to read an async iterable; idempotent."""
        if isinstance(self._data, AsyncIterable) and self._reader is None:
            reading = self._read(aiter(self._data))
            self._reader = asyncio.create_task(reading, name="edge client data")

    async def aclose(self) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    async def held(self) -> Sequence[Example]:
        """Return the current examples.

        Raises:
            Exception: Any exception of the app's own iterator or function.
        """
        self.open()
        if self._reader is not None and not self._examples:
            await asyncio.sleep(0)  # lets the reader start
        if not callable(self._data):
            if self._reader is not None and self._reader.done() and not self._reader.cancelled():
                self._reader.result()
            return self._examples
        found: Any = self._data()
        if inspect.isawaitable(found):
            found = await found
        return _examples(found)

    async def _read(self, examples: AsyncIterator[Example]) -> None:
        async for example in examples:
            self._examples.append(_example(example, len(self._examples)))
            # Bounds the memory of an endless stream.
            del self._examples[:-_MOST]


def _examples(data: Any) -> list[Example]:
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
        hint = "; load_examples reads a file" if isinstance(data, str) else ""
        raise DataError(f"data: is {type(data).__name__}; it must be an iterable of rows{hint}")
    rows = enumerate(itertools.islice(data, _MOST), 1)
    return [_example(row, number) for number, row in rows]


def _example(row: Any, number: int) -> Example:
    if not isinstance(row, Mapping):
        raise DataError(
            f"data: row {number} is {type(row).__name__}; it must map fields to values, such as "
            "{'text': ..., 'label': ...}"
        )
    return row
