"""A scripted server with OpenAI's HTTP API, errors and headers included.

In a test: ``async with FakeOpenAI(script=Script({2: "rate_limited"})) as server`` and point a
client at ``server.base_url``. In a separate process: ``python -m tests.fake_openai --help``.
"""

from tests.fake_openai.log import Received, read_log
from tests.fake_openai.model import FakeModel
from tests.fake_openai.script import BEHAVIOURS, Script
from tests.fake_openai.server import FakeOpenAI

__all__ = ["BEHAVIOURS", "FakeModel", "FakeOpenAI", "Received", "Script", "read_log"]
