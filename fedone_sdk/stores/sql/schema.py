"""Schema versions and migrations."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, select

from fedone_sdk.stores.sql.tables import meta

HEAD = "0003"
"""Schema version of this code; a test compares it with the migrations."""

_BEFORE_ALEMBIC = "0001"


class SchemaRefused(Exception):
    """The schema of the database is not supported; the message has the reason and a remedy."""


def current(connection: Connection) -> str | None:
    """Return the schema version of a database; None if it is empty.

    Raises:
        SchemaRefused: It belongs to another program or a newer fedone-sdk.
    """
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    if "meta" not in tables:
        raise SchemaRefused("another program's database")
    found = None
    if "alembic_version" in tables:
        found = MigrationContext.configure(connection).get_current_revision()
    else:
        version = select(meta.c.value).where(meta.c.key == "schema_version")
        if connection.execute(version).scalar() == 1:
            found = _BEFORE_ALEMBIC
    if found is None:
        raise SchemaRefused("another program's database")
    known = [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]
    if found not in known:
        raise SchemaRefused(
            f"it has schema {found} and this fedone-sdk knows schemas up to {HEAD}; "
            "upgrade fedone-sdk"
        )
    return found


def prepare(connection: Connection, *, upgrading: bool) -> None:
    """Create the tables of an empty database; upgrade or refuse an old one.

    Runs within the open transaction.

    Raises:
        SchemaRefused: It belongs to another program or a newer fedone-sdk, or is old and must not
            be upgraded.
    """
    found = current(connection)
    if found == HEAD:
        return
    if found is not None and not upgrading:
        raise SchemaRefused(
            f"it has schema {found} and this fedone-sdk needs schema {HEAD}; "
            "run `fedone db upgrade`"
        )
    config = _config()
    config.attributes["connection"] = connection
    if found == _BEFORE_ALEMBIC and "alembic_version" not in inspect(connection).get_table_names():
        command.stamp(config, _BEFORE_ALEMBIC)
    command.upgrade(config, HEAD)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "fedone_sdk.stores:migrations")
    return config
