"""A device's process and nothing else: one round through the gateway, then its peak memory.

python one_device.py URL TOKEN
"""

import asyncio
import resource
import sys

from fedone_sdk import EdgeClient


async def main() -> None:
    """Takes part in one round and prints megabytes."""
    data = [{"text": "a text", "label": 0}, {"text": "another", "label": 1}]
    async with EdgeClient(sys.argv[1], token=sys.argv[2], data=data) as client:
        await client.run_once()
    assert "numpy" not in sys.modules
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


asyncio.run(main())
