"""Alembic environment: runs the migrations on the given connection, in its transaction."""

from alembic import context

from fedone_sdk.stores.sql.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
