"""The first schema, which `schema.prepare` creates from the table definitions."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: there is no older schema."""
