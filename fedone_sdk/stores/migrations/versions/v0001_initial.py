"""The first schema, which `schema.prepare` creates from the tables themselves."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: there is no older schema."""
