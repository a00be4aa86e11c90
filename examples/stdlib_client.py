"""A device in the standard library alone: what a client in any language must do.

python examples/stdlib_client.py http://127.0.0.1:8080 ENROLMENT_TOKEN rows.jsonl

For runs with `exchange: losses` and label words. Prints for each piece of work its round and the
status of the answer (200: taken), and in the end why there is no more. It forgets who it is, and
leaves out what `EdgeClient` has beyond the protocol: a state folder, conditions, renewals.
"""

import base64
import json
import math
import pathlib
import string
import struct
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def call(server: str, token: str, method: str, path: str, body: Any = None) -> tuple[Any, ...]:
    """Status, headers and JSON of the answer; what may pass is tried again."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    while True:
        request = urllib.request.Request(server + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=700) as answer:
                return answer.status, answer.headers, json.loads(answer.read() or "null")
        except urllib.error.HTTPError as refusal:
            if refusal.code < 500 and refusal.code != 429:
                return refusal.code, refusal.headers, json.loads(refusal.read())
        except OSError:
            pass
        time.sleep(2)


def draw(num_examples: int, batch_size: int, seed: int) -> list[int]:
    """The rows that a seed stands for: SplitMix64 and a partial Fisher-Yates shuffle."""
    mask, rows = 2**64 - 1, list(range(num_examples))
    for i in range(min(batch_size, num_examples)):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        j = i + (((z ^ (z >> 31)) * (num_examples - i)) >> 64)
        rows[i], rows[j] = rows[j], rows[i]
    return rows[:batch_size]


def update(task: Row, batch: Sequence[Row], scores: Row, held: int) -> dict[str, Any]:
    """Per prompt the mean cross-entropy over the examples that every prompt was scored on."""
    failed, losses = {row for _, row in scores["failed"]}, []
    _, rows, labels = scores["log_probs"]["shape"]
    table = struct.iter_unpack(f"<{labels}f", base64.b64decode(scores["log_probs"]["data"]))
    names, key = list(task["labels"]), task["label_field"]
    for prompt in zip(*[table] * rows, strict=True):
        pairs = [pair for b, pair in enumerate(zip(prompt, batch, strict=True)) if b not in failed]
        each = [math.log(sum(map(math.exp, p))) - p[names.index(str(row[key]))] for p, row in pairs]
        losses.append(sum(each) / len(each))
    counts = {"scored": rows - len(failed), "failed": len(failed)}
    head = {"exchange": "losses", "num_examples": held, "usage": {}, "model": scores["model"]}
    return head | {"scored": counts, "losses": losses}


def main(server: str, token: str, file: str) -> None:
    """Works until the server says that its runs have ended."""
    held = [json.loads(line) for line in pathlib.Path(file).read_text("utf-8").splitlines()]
    me = call(server, token, "POST", "/v1/clients", {})[2]["credential"]
    claim = {"num_examples": len(held), "wait_s": 25}
    while True:
        status, headers, work = call(server, me, "POST", "/v1/assignments/claim", claim)
        if status == 204:
            time.sleep(float(headers["Retry-After"]))
        elif status != 200:
            return print(work["detail"])
        else:
            run = call(server, me, "GET", f"/v1/runs/{work['run_id']}/task")[2]
            rows = draw(len(held), run["method"]["batch_size"], work["minibatch_seed"])
            names = {name for _, name, _, _ in string.Formatter().parse(run["task"]["template"])}
            texts = [{name: held[i][name] for name in names & held[i].keys()} for i in rows]
            ask = {"assignment_id": work["assignment_id"], "examples": texts}
            status, _, scores = call(server, me, "POST", "/v1/score", ask)
            if status == 200:
                sent = update(run["task"], [held[i] for i in rows], scores, len(held))
                path = f"/v1/assignments/{work['assignment_id']}/update"
                print(work["round"], call(server, me, "POST", path, sent)[0], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
