"""Where a node's examples are: in a file that its node config names, or in a shard of a run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedone_sdk.data import load_examples
from fedone_sdk.errors import DataError
from fedone_sdk.task import Example

if TYPE_CHECKING:
    from fedone_sdk.simulation import Federation

__all__ = ["NodeContext", "node_file", "node_shard", "partition_of"]

_FILE = "data"
_PARTITION = "partition-id"


class NodeContext(Protocol):
    """What is needed of Flower's ``Context``."""

    @property
    def node_config(self) -> Mapping[str, object]:
        """What the SuperNode was started with (``--node-config``)."""
        ...


def node_file(context: NodeContext) -> Sequence[Example]:
    """The examples of the file that a deployed SuperNode was told.

    ``flower-supernode --node-config 'data="/srv/rows.jsonl"'``

    Args:
        context: Flower's, of the node.

    Raises:
        DataError: The node config names no file, or the file cannot be used.
    """
    path = context.node_config.get(_FILE)
    if not isinstance(path, str) or not path:
        raise DataError(
            f"node config: {_FILE!r} is missing; start the SuperNode with "
            f"--node-config '{_FILE}=\"/path/to/rows.jsonl\"'"
        )
    return load_examples(Path(path))


def node_shard(federation: Federation, context: NodeContext) -> Sequence[Example]:
    """The shard of a run's own data that is a node's ``partition-id``: for simulations.

    Args:
        federation: The run with its data.
        context: Flower's, of the node.

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
    """The node's ``partition-id``, if it has one.

    Raises:
        DataError: It is no number.
    """
    found = context.node_config.get(_PARTITION)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int):
        raise DataError(f"node config: {_PARTITION!r} is {found!r}, and must be a whole number")
    return found
