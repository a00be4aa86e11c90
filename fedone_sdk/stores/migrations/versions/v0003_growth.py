"""Runs that were deleted, when clients were last seen, and an index to find a run's work by."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add a table, a column and an index; all clients count as seen now."""
    op.create_table(
        "deleted_runs",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("deleted_at", sa.Double, nullable=False),
    )
    op.create_index("closed_work_run_id", "closed_work", ["run_id"])
    op.add_column("clients", sa.Column("seen_at", sa.Double))
    # When they really were is not known: none is to be retired for that.
    clients = sa.table("clients", sa.column("seen_at", sa.Double))
    op.execute(clients.update().values(seen_at=time.time()))
