"""Enrolment tokens, clients that may be revoked, who waits, and names of commits."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add tables and columns; clients and runs stay unchanged."""
    op.create_table(
        "tokens",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("token_sha256", sa.String, nullable=False, unique=True),
        sa.Column("runs", sa.Text),
        sa.Column("uses_left", sa.Integer),
        sa.Column("expires_at", sa.Double),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
    )
    for name in ("enrolment_sha256", "token", "previous_sha256"):
        op.add_column("clients", sa.Column(name, sa.String))
    op.add_column("clients", sa.Column("runs", sa.Text))
    op.add_column("clients", sa.Column("revoked_at", sa.Double))
    for name in ("credential_sha256", "previous_sha256"):
        op.create_index(f"clients_{name}", "clients", [name])
    op.create_index("clients_enrolment_sha256", "clients", ["enrolment_sha256"], unique=True)
    op.create_table(
        "members",
        sa.Column("client_index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("num_examples", sa.Integer, nullable=False),
        sa.Column("run_id", sa.String),
        sa.Column("until", sa.Double, nullable=False),
    )
    op.add_column(
        "runs", sa.Column("commits", sa.Text, nullable=False, server_default=sa.text("''"))
    )
    # A fedone-sdk before Alembic looks here, and then refuses the database.
    op.execute("UPDATE meta SET value = 2 WHERE key = 'schema_version'")
