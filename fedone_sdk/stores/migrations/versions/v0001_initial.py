"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _run_key(*, primary_key: bool = True) -> sa.Column[str]:
    return sa.Column(
        "run_id", sa.String, sa.ForeignKey("runs.run_id"), primary_key=primary_key, nullable=False
    )


def upgrade() -> None:
    """Create the tables."""
    meta = op.create_table(
        "meta",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("value", sa.Integer, nullable=False),
    )
    op.bulk_insert(meta, [{"key": "num_clients", "value": 0}])
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
    op.create_table(
        "clients",
        sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("client_id", sa.String, nullable=False, unique=True),
        sa.Column("credential_sha256", sa.String, nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("enrolled_at", sa.Double, nullable=False),
        sa.Column("enrolment_sha256", sa.String),
        sa.Column("token", sa.String),
        sa.Column("runs", sa.Text),
        sa.Column("previous_sha256", sa.String),
        sa.Column("revoked_at", sa.Double),
        sa.Column("seen_at", sa.Double),
    )
    op.create_index("clients_credential_sha256", "clients", ["credential_sha256"])
    op.create_index("clients_previous_sha256", "clients", ["previous_sha256"])
    op.create_index("clients_enrolment_sha256", "clients", ["enrolment_sha256"], unique=True)
    op.create_table(
        "members",
        sa.Column("client_index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("num_examples", sa.Integer, nullable=False),
        sa.Column("run_id", sa.String),
        sa.Column("until", sa.Double, nullable=False),
    )
    op.create_table(
        "runs",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.String, nullable=False, unique=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("commits", sa.Text, nullable=False, server_default=sa.text("''")),
    )
    op.create_table(
        "run_data",
        _run_key(),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("candidates", sa.Text, nullable=False),
        sa.Column("arrays", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "closed_work",
        sa.Column("assignment_id", sa.String, primary_key=True),
        _run_key(primary_key=False),
        sa.Column("client_index", sa.Integer, nullable=False),
        sa.Column("outcome", sa.String, nullable=False),
        sa.Column("body_sha256", sa.String),
        sa.Column("receipt", sa.Text),
    )
    op.create_index("closed_work_run_id", "closed_work", ["run_id"])
    op.create_table(
        "log",
        _run_key(),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "memories",
        _run_key(),
        sa.Column("client_index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("round", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "deleted_runs",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("deleted_at", sa.Double, nullable=False),
    )
