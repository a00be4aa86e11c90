"""A practice model for docs/tutorials/support-mails.md: it extracts fields, and reflects."""

from __future__ import annotations

import calendar
import json
import re

from tests.fake_openai.model import FakeModel

MONTHS = [*calendar.month_name]
RULES = {
    "order": "Write the order in capital letters with a dash.",
    "date": "Write the date as year-month-day.",
    "amount": "Write the amount as a number without its currency.",
}


class Mails(FakeModel):
    """Copies fields as the mail has them where the instruction has no rule for their form."""

    def write(self, text: str, num_tokens: int) -> str:
        if text.startswith("You improve one part of a prompt."):
            return self._reflected(text)
        order, day, month, amount = re.findall(
            r"order (\w \d+) .*? (\d+) (\w+) .*? ([\d.]+ EUR)", text, re.DOTALL
        )[-1]
        fields = {"order": order, "date": f"{day} {month}", "amount": amount}
        if RULES["order"] in text:
            fields["order"] = order.upper().replace(" ", "-")
        if RULES["date"] in text:
            fields["date"] = f"2026-{MONTHS.index(month):02}-{int(day):02}"
        if RULES["amount"] in text:
            fields["amount"] = float(amount.split()[0])
        return json.dumps(fields)

    @staticmethod
    def _reflected(text: str) -> str:
        """Add the rule for one field that was wrong."""
        (current,) = re.findall(r'The current text at .*?: (?:"(.*)"|none)\n', text)
        missing = [
            rule
            for name, rule in RULES.items()
            if f"{name}: expected" in text and rule not in current
        ]
        return json.dumps([" ".join([current, *missing[:1]])])
