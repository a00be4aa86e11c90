"""A client with only the standard library, as a template for other languages.

FEDONE_TOKEN=... python examples/stdlib_client.py http://127.0.0.1:8080 rows.jsonl

It works for runs with `exchange: losses`, a cross-entropy over label words, and no `privacy`. It
prints the round and the HTTP status of each update (200: accepted), and at the end why there is no
more work. It declines work that the server refuses. Unlike `EdgeClient` it stores nothing, checks
no conditions, and renews no assignments.
"""

import base64
import json
import math
import os
import pathlib
import re
import string
import struct
import sys
import time
import unicodedata
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

PATH = "/v1/assignments"
PAUSE_S = 10
ROLES = ("system", "user", "assistant")
LABEL, FIELDS = "label", {"text"}  # the label's column; columns for the model

Row = Mapping[str, Any]


def call(server: str, token: str, method: str, path: str, body: Any = None) -> tuple[Any, ...]:
    """Return status, headers and JSON of the response; retry temporary failures."""
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


def templates(task: Row) -> list[str]:
    """Return the task's template, or the templates of its chat."""
    chat = task.get("chat")
    return [chat.get(role) or "" for role in ROLES] if chat else [task["template"]]


def columns(task: Row) -> set[str]:
    """Return the columns that the task shows to the model."""
    names = {one[1] or "" for text in templates(task) for one in string.Formatter().parse(text)}
    return names - {"", "prompt", "mask", *task.get("slots", ())}


def crc32(task: Row) -> int:
    """Return the checksum of the task, which must equal the server's `task_crc32`."""
    words = [text for one in task["labels"] for text in (one["value"], one["word"])]
    texts = [task["loss"], task["label_field"], *templates(task), *task.get("slots", ()), *words]
    packed = "".join(f"{text}\0" for text in texts).encode()
    return zlib.crc32(packed + struct.pack(f"<{len(task['bias'] or ())}d", *task["bias"] or ()))


def target(task: Row, row: Row) -> int:
    """Return the index of a row's label: an equal one, or the only similar one; else -1."""
    names, label = [one["value"] for one in task["labels"]], str(row[task["label_field"]])
    alike = [at for at, name in enumerate(names) if label_key(name) == label_key(label)]
    return names.index(label) if label in names else alike[0] if len(alike) == 1 else -1


def label_key(label: str) -> str:
    """Return a label in normal form: NFC, lower case, no outer spaces, no final ``.0``."""
    text = unicodedata.normalize("NFC", label).strip().lower()
    return text[:-2] if re.fullmatch(r"-?\d+\.0", text) else text


def draw(num_examples: int, batch_size: int, seed: int) -> list[int]:
    """Return the rows that a seed draws: SplitMix64 and a partial Fisher-Yates shuffle."""
    mask, rows = 2**64 - 1, list(range(num_examples))
    for i in range(min(batch_size, num_examples)):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        j = i + (((z ^ (z >> 31)) * (num_examples - i)) >> 64)
        rows[i], rows[j] = rows[j], rows[i]
    return rows[:batch_size]


def terms(log_probs: Sequence[float], target: int, bias: Sequence[float]) -> list[float]:
    """Add the bias; return loss, trace of the loss's Hessian, and each label's probability."""
    values = [value + more for value, more in zip(log_probs, bias, strict=True)]
    highest = max(values)
    odds = [math.exp(value - highest) for value in values]
    shares = [each / math.fsum(odds) for each in odds]
    loss = math.log(math.fsum(odds)) + highest - values[target]
    return [loss, 1 - math.fsum(share * share for share in shares), *shares]


def means(rows: Sequence[Sequence[float]], width: int) -> list[float]:
    """Return the mean of each column; 0 without rows."""
    columns = zip(*rows, strict=True) if rows else [()] * width
    return [math.fsum(column) / max(len(rows), 1) for column in columns]


def floats(array: Row) -> list[tuple[float, ...]]:
    """Return the last axis of a float32 array as tuples."""
    data = base64.b64decode(array["data"])
    return list(struct.iter_unpack(f"<{array['shape'][-1]}f", data))


def by_class(prompts: Sequence[Any], targets: Sequence[int], labels: int) -> dict[str, Any]:
    """Return the means of `terms` per prompt and label; with over 4 labels, per prompt."""
    size = labels if labels <= 4 else 1
    groups = [[at for at, t in enumerate(targets) if size == 1 or t == g] for g in range(size)]
    cells = [means([rows[at] for at in g], 2 + labels) for rows in prompts for g in groups]
    data = base64.b64encode(b"".join(struct.pack(f"<{2 + labels}f", *cell) for cell in cells))
    shape = [len(prompts), size, 2 + labels]
    array = {"dtype": "float32", "shape": shape, "data": data.decode()}
    return {"by_class": array, "class_counts": [targets.count(i) for i in range(labels)]}


def update(run: Row, work: Row, batch: Sequence[Row], scores: Row, held: int) -> dict[str, Any]:
    """Return an update: per prompt, the mean loss over the examples without a failure."""
    task, failed = run["task"], {row for _, row in scores["failed"]}
    count, size, labels = scores["log_probs"]["shape"]
    table = floats(scores["log_probs"])
    kept = [b for b in range(size) if b not in failed]
    targets = [target(task, batch[b]) for b in kept]
    calibrates = run["calibration"]["kind"] == "labels"
    biases: Any = [task.get("bias") or [0] * labels] * count
    biases = floats(work["biases"]) if calibrates else biases
    pairs = list(zip(kept, targets, strict=True))
    prompts = [[terms(table[size * i + b], t, biases[i]) for b, t in pairs] for i in range(count)]
    counts = {"scored": len(kept), "failed": len(failed)}
    head = {"exchange": "losses", "num_examples": held, "usage": {}, "model": scores["model"]}
    losses = [means(rows, 1)[0] for rows in prompts]
    more = by_class(prompts, targets, labels) if calibrates else {}
    return head | {"scored": counts, "losses": losses} | more


def perform(server: str, me: str, work: Row, held: Sequence[Row]) -> tuple[Any, ...]:
    """Do an assignment; return status, headers and JSON of the last response."""
    answer = call(server, me, "GET", f"/v1/runs/{work['run_id']}/task")
    if answer[0] == 200:
        run = answer[2]
        task = run["task"]
        shown = columns(task)
        fits = (
            (work["exchange"], task["loss"], run["privacy"]) == ("losses", "cross_entropy", None)
            and work["prompts"]["shape"][0] <= work["leased_queries"]
            and run["task_crc32"] == crc32(task)
            and (task["label_field"], shown - FIELDS) == (LABEL, set())
            and all(target(task, row) >= 0 for row in held)
        )
        if not fits:
            return 422, None, {"detail": "the run does not fit this device"}
        rows = draw(len(held), run["method"]["batch_size"], work["minibatch_seed"])
        texts = [{name: held[i][name] for name in shown} for i in rows]
        ask = {"assignment_id": work["assignment_id"], "examples": texts}
        answer = call(server, me, "POST", "/v1/score", ask)
        if answer[0] == 200:
            sent = update(run, work, [held[i] for i in rows], answer[2], len(held))
            answer = call(server, me, "POST", f"{PATH}/{work['assignment_id']}/update", sent)
    return answer


def main(server: str, token: str, file: str) -> None:
    """Work until the server's runs have ended."""
    held = [json.loads(line) for line in pathlib.Path(file).read_text("utf-8").splitlines()]
    me = call(server, token, "POST", "/v1/clients", {})[2]["credential"]
    claim = {"num_examples": len(held), "wait_s": 25}
    while True:
        status, headers, work = call(server, me, "POST", f"{PATH}/claim", claim)
        if status == 204:
            time.sleep(float(headers["Retry-After"]))
        elif status != 200:
            return print(work["detail"])
        else:
            status, _, answer = perform(server, me, work, held)
            print(work["round"], status, flush=True)
            if status != 200:  # another device may succeed; wait before the next claim
                why = {"reason": answer["detail"][:500]}
                call(server, me, "POST", f"{PATH}/{work['assignment_id']}/decline", why)
                time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], os.environ["FEDONE_TOKEN"], sys.argv[2])
