"""The first hour of four users, with real processes: what they type, and the words they see."""
