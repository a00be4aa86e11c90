"""Practice mails with their fields, one JSON line each: python mails.py SEED ROWS."""

from __future__ import annotations

import calendar
import json
import random
import sys

NAMES = ["Miriam", "Oskar", "Jana", "Tariq", "Ines"]


def main(seed: str, rows: str) -> None:
    """Print the mails."""
    rng = random.Random(seed)
    for _ in range(int(rows)):
        letter, number = rng.choice("ABCD"), rng.randrange(1000, 10_000)
        month, day, cents = rng.randrange(1, 13), rng.randrange(1, 29), rng.randrange(500, 9000)
        text = (
            f"Hello, about my order {letter.lower()} {number} that I made on the {day} "
            f"{calendar.month_name[month]} with you: I want my {cents / 100:.2f} EUR back. "
            f"{rng.choice(NAMES)}"
        )
        fields = {"order": f"{letter}-{number}", "date": f"2026-{month:02}-{day:02}"}
        print(json.dumps({"text": text, "fields": {**fields, "amount": cents / 100}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
