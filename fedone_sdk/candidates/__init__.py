"""Candidates of a slot (a part of the prompt): their sources, and the placeholders in them.

The functions here are pure; their callers read files and query models.
"""

from fedone_sdk.candidates.placeholders import fill, forms_of, label_checks, no_prompt, prompt_of

__all__ = ["fill", "forms_of", "label_checks", "no_prompt", "prompt_of"]
