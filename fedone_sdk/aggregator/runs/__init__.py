"""The runs that this process serves: their state, changes and reports."""
