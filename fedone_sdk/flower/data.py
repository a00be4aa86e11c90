"""A node's examples: from a file that its node config names, or a shard of a run's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedone_sdk.data import load_examples
from fedone_sdk.errors import DataError
from fedone_sdk.task import Example

if TYPE_CHECKING:
    from fedone_sdk.local import Federation

_FILE = "data"
_PARTITION = "partition-id"


class NodeContext(Protocol):
    """The part of Flower's ``Context`` that is used."""

    @property
    def node_config(self) -> Mapping[str, object]:
        """The SuperNode's ``--node-config``."""
        ...


def node_file(context: NodeContext) -> Sequence[Example]:
    """Load the examples of the file in a SuperNode's node config.

    ``flower-supernode --node-config 'data="/srv/rows.jsonl"'``

    Args:
        context: The node's context.

    Raises:
        DataError: The node config names no file, or the file is invalid.
    """
    path = context.node_config.get(_FILE)
    if not isinstance(path, str) or not path:
        raise DataError(
            f"node config: {_FILE!r} is missing; start the SuperNode with "
            f"--node-config '{_FILE}=\"/path/to/rows.jsonl\"'"
        )
    return load_examples(Path(path))


def node_shard(federation: Federation, context: NodeContext) -> Sequence[Example]:
    """Return the shard of a run's data with a node's ``partition-id``, for simulations.

    Args:
        federation: The run with its data.
        context: The node's context.

    Raises:
        DataError: The node has no ``partition-id``, or there is no such shard.
    """
    number, count = partition_of(context), len(federation.shards)
    if number is None:
        raise DataError(f"node config: {_PARTITION!r} is missing; it is 0 to {count - 1}")
    if not 0 <= number < count:
        raise DataError(
            f"node config: {_PARTITION!r} is {number}; the run's data has {count} shards "
            "(data.num_clients), so it must be 0 to "
            f"{count - 1}"
        )
    return federation.shards[number]


def partition_of(context: NodeContext) -> int | None:
    """Return the node's ``partition-id``; None if it has none.

    Raises:
        DataError: It is not a number.
    """
    found = context.node_config.get(_PARTITION)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int):
        raise DataError(f"node config: {_PARTITION!r} is {found!r}, and must be a whole number")
    return found
