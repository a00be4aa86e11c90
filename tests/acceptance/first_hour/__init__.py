"""The first hour of four users, with real processes: commands and output."""
