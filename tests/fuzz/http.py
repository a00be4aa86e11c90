"""Bad HTTP against a live server with open work: no 5xx, no change, and the run continues.

    python -m tests.fuzz.http [--inputs 10000] [--seed 0]

Every input is wrong in some way, so nothing that the server keeps may change: its database is
compared row by row, but for the counters of traffic. In the end the runs are played to their end,
and must end at the same alpha as on an undisturbed server.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from fedone_sdk.aggregator.http.requests import check_json
from fedone_sdk.errors import PROBLEMS, SpecError
from fedone_sdk.messages import (
    PROTOCOL_HEADER,
    TENSORS,
    UPDATE,
    AlphaUpdate,
    Claim,
    Decline,
    Enrol,
    Message,
    NewToken,
    Problem,
    Quarantine,
    RollBack,
    Score,
    decode,
)
from fedone_sdk.messages.tensors import Apart, Tensor, dump_tensors
from fedone_sdk.spec import RunSpec, validate_spec
from tests.fuzz.mutate import EVIL_TEXTS, damaged, damaged_bytes, damaged_file, vectors
from tests.fuzz.target import ADMIN, ENROLMENT, RUNS, Target, target
from tests.fuzz.wire import Answer, Waits, request

AT_ONCE = 32
PATIENCE_S = 1.0
"""How long a server may wait for more before we hang up."""

CLOSED, WAITS = 0, 1


_NAMES = {CLOSED: "closed", WAITS: "waits for more"}


@dataclass(slots=True)
class Bad:
    """One bad input.

    Attributes:
        kind: What is wrong with it.
        data: The bytes.
        open_ended: Whether the server may wait for more after them.
        harmless: Whether an answer that is no refusal is right too.
    """

    kind: str
    data: bytes
    open_ended: bool = False
    harmless: bool = False


@dataclass(slots=True)
class Report:
    """What became of the inputs.

    Attributes:
        inputs: How many there were.
        statuses: Answers by (kind, status); `CLOSED` and `WAITS` are none.
        broken: What must not be: 5xx, silence, an answer that is no problem document.
        taken: Bad inputs that were taken for good ones.
        slowest_s: The longest wait for an answer.
        peak_rss: The server's memory at most, bytes.
        plain: Refusals that are no problem documents, by status: of aiohttp's parser.
        changed: Rows of the server's database that are not as they were.
        same_alpha: Whether the runs ended at the alpha of an undisturbed server.
        logged: What the server wrote on standard error.
    """

    inputs: int = 0
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    plain: Counter[int] = field(default_factory=Counter)
    slowest_s: float = 0.0
    peak_rss: int = 0
    changed: list[str] = field(default_factory=list)
    same_alpha: bool | None = None
    logged: str = ""

    @property
    def good(self) -> bool:
        """Whether all is as it must be."""
        return not (self.broken or self.taken or self.changed) and self.same_alpha is not False

    def judge(self, bad: Bad, answer: Answer | None, took_s: float) -> None:
        """Notes the answer to an input."""
        self.inputs += 1
        self.slowest_s = max(self.slowest_s, took_s)
        status = CLOSED if answer is None else answer.status
        self.statuses[bad.kind, status] += 1
        shown = f"{bad.kind}: {bad.data[:300]!r} ({len(bad.data)} bytes) -> "
        if answer is None:
            return
        if status >= 500:
            self.broken.append(f"{shown}{status} {answer.body[:300]!r}")
        elif status >= 400:
            self._judge_refusal(answer, shown)
        elif not bad.harmless:
            self.taken.append(f"{shown}{status} {answer.body[:300]!r}")

    def _judge_refusal(self, answer: Answer, shown: str) -> None:
        if answer.content_type != "application/problem+json":
            # Refused by the HTTP parser, before there is a request that a handler could answer.
            self.plain[answer.status] += 1
            return
        try:
            problem = Problem.model_validate_json(answer.body)
        except pydantic.ValidationError as exc:
            self.broken.append(f"{shown}no problem document: {exc}")
            return
        if PROBLEMS[problem.code][0] != answer.status:
            self.broken.append(f"{shown}{problem.code} with status {answer.status}")


def main() -> None:
    """Bombards a server and prints the figures; exit 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="where the server's standard error is kept")
    parser.add_argument("--gateway", action="store_true", help="the server scores for clients")
    args = parser.parse_args()
    began = time.perf_counter()
    report = asyncio.run(attack(args.inputs, args.seed, gateway=args.gateway))
    if args.log is not None:
        args.log.write_text(report.logged, encoding="utf-8")
    kinds: dict[str, Counter[int]] = {}
    for (kind, status), count in report.statuses.items():
        kinds.setdefault(kind, Counter())[status] += count
    print("| what is wrong | inputs | answers |\n|---|---|---|")
    for kind, counts in sorted(kinds.items()):
        answers = ", ".join(f"{_NAMES.get(s, s)}: {n}" for s, n in sorted(counts.items()))
        print(f"| {kind} | {counts.total()} | {answers} |")
    errors = sum(n for (_, status), n in report.statuses.items() if status >= 500)
    print(f"\ninputs: {report.inputs} (seed {args.seed}), {time.perf_counter() - began:.0f} s")
    print(f"answers of 5xx: {errors}; other broken answers: {len(report.broken) - errors}")
    print(f"taken for good: {len(report.taken)}; refused by the HTTP parser: {dict(report.plain)}")
    print(f"slowest answer: {report.slowest_s:.2f} s; server's peak: {report.peak_rss >> 20} MiB")
    print(f"tracebacks in the server's log: {report.logged.count('Traceback (most')}")
    print(f"rows of the database that changed: {len(report.changed)}")
    print(f"same alpha as undisturbed: {report.same_alpha}")
    for line in (*report.broken[:40], *report.taken[:40], *report.changed[:10]):
        print("!", line)
    sys.exit(0 if report.good else 1)


async def attack(inputs: int, seed: int, *, gateway: bool = False) -> Report:
    """Send that many bad inputs to a separate server."""
    with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as folder:
        async with target(Path(undisturbed), gateway=gateway) as reference:
            expected = await reference.finish()
        async with target(Path(folder), gateway=gateway) as found:
            before = found.content()
            report = await bombard(found, inputs, seed)
            report.peak_rss = peak_rss(found.process.pid)
            after = found.content()
            report.changed = [
                f"{table}: {row[:300]}"
                for table in before.keys() | after.keys()
                for row in set(before.get(table, ())) ^ set(after.get(table, ()))
            ]
            report.same_alpha = await found.finish() == expected
            log = (Path(folder) / "server.log").read_text(encoding="utf-8", errors="replace")
            report.logged = log
    return report


def peak_rss(pid: int) -> int:
    """The most memory that a process had, bytes."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


async def bombard(found: Target, inputs: int, seed: int) -> Report:
    """Sends bad inputs to a server, a few at once."""
    report = Report()
    makers = sources(found)
    weights = [weight for weight, _ in makers]
    rng = random.Random(seed)
    numbers = iter(range(inputs))

    async def sender() -> None:
        wire = found.wire()
        for number in numbers:
            one = random.Random(seed << 32 | number)
            make = rng.choices(makers, weights)[0][1]
            bad = make(one)
            while bad is None:
                bad = make(one)
            began = time.perf_counter()
            try:
                patience_s = PATIENCE_S if bad.open_ended else None
                answer = await wire.ask(bad.data, more_follows_s=patience_s)
            except Waits:
                report.inputs += 1
                report.statuses[bad.kind, WAITS] += 1
                continue
            except TimeoutError:
                report.broken.append(f"{bad.kind}: {bad.data[:300]!r} -> no answer")
                continue
            report.judge(bad, answer, time.perf_counter() - began)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(sender())
    alive = await found.ask("GET", "/readyz")
    if alive.status != 200:
        report.broken.append(f"not ready afterwards: {alive}")
    return report


Maker = Callable[[random.Random], Bad | None]


def sources(found: Target) -> list[tuple[int, Maker]]:
    """What makes bad inputs for this server, with weights."""
    return [
        (50, _Messages(found)),
        (12, _Files(found)),
        (8, _WrongWork(found)),
        (10, _Heads(found)),
        (8, _Framing(found)),
        (6, _Encodings(found)),
        (8, _Paths(found)),
        (8, _Strangers(found)),
        (2, _Halves(found)),
        (6, _Signatures(found)),
        (4, _Archives(found)),
    ]


def _run_document() -> dict[str, Any]:
    return {**RUNS[0], "name": "posted"}


def _is_run(body: bytes) -> bool:
    try:
        validate_spec(RunSpec, json.loads(body), source="run")
    except (SpecError, ValueError, RecursionError, TypeError):
        return False
    return True


def _is_json(body: bytes) -> bool:
    try:
        check_json(body)
    except ValueError:
        return False
    return True


def _parses(parse: Callable[[bytes], object]) -> Callable[[bytes], bool]:
    def check(body: bytes) -> bool:
        try:
            parse(body)
        except pydantic.ValidationError:
            return False
        return True

    return check


class _Messages:
    """Invalid messages from callers that may send valid ones."""

    def __init__(self, found: Target) -> None:
        holders = found.holders()
        stranger = next(d for d in found.devices if d.held is None)
        enrol = [v["body"].encode() for v in vectors("Enrol")]
        claims = [v["body"].encode() for v in vectors("Claim")]
        scores = [v["body"].encode() for v in vectors("Score")]
        declines = [v["body"].encode() for v in vectors("Decline")]
        self._targets: list[tuple[str, str, list[bytes], str, str, Callable[[bytes], bool]]] = [
            (
                "enrol",
                "/v1/clients",
                enrol,
                ENROLMENT,
                "no-token",
                _parses(Enrol.model_validate_json),
            ),
            (
                "run",
                "/v1/runs",
                [json.dumps({**run, "name": "posted"}).encode() for run in RUNS],
                ADMIN,
                stranger.credential,
                _is_run,
            ),
        ]
        steering: list[tuple[str, type[Message], str, dict[str, Any]]] = [
            ("rollback", RollBack, "/v1/runs/alpha/rollback", {"to_round": 1, "reason": "x"}),
            (
                "quarantine",
                Quarantine,
                f"/v1/runs/alpha/clients/{stranger.client_id}/quarantine",
                {"reason": "x"},
            ),
            (
                "token",
                NewToken,
                "/v1/enrolment-tokens",
                {"name": "n", "runs": ["a*"], "uses": 1, "expires_in_s": 60.5},
            ),
        ]
        for kind, message, path, document in steering:
            good = [json.dumps(document).encode()]
            parses = _parses(message.model_validate_json)
            self._targets.append((kind, path, good, ADMIN, stranger.credential, parses))
        claim = _parses(Claim.model_validate_json)
        for device in (holders[0], stranger):
            path = "/v1/assignments/claim"
            self._targets.append(("claim", path, claims, device.credential, ENROLMENT, claim))
        for device in holders:
            work = device.held
            assert work is not None
            path = f"/v1/assignments/{work['assignment_id']}"
            update = json.dumps(device.update(work)).encode()
            parses = _parses(UPDATE.validate_json)
            mine, other = device.credential, stranger.credential
            updates = [
                update,
                *(v["body"].encode() for v in vectors("AlphaUpdate", "LossesUpdate")),
            ]
            for _ in range(2):
                self._targets.append(("update", f"{path}/update", updates, mine, other, parses))
            parses = _parses(Decline.model_validate_json)
            self._targets.append(("decline", f"{path}/decline", declines, mine, other, parses))
            named = [body.replace(_id_in(body), work["assignment_id"].encode()) for body in scores]
            parses = _parses(Score.model_validate_json)
            self._targets.append(("score", "/v1/score", named, mine, other, parses))

    def __call__(self, rng: random.Random) -> Bad | None:
        kind, path, bodies, insider, outsider, parses = rng.choice(self._targets)
        body = rng.choice(bodies)
        for _ in range(rng.choice((1, 1, 1, 2))):
            body = damaged(rng, body)
        # A message that is still valid comes from a caller without the permission.
        token = outsider if _is_json(body) and parses(body) else insider
        return Bad(f"message: {kind}", request("POST", path, body, token=token))


def _id_in(body: bytes) -> bytes:
    found: str = json.loads(body)["assignment_id"]
    return found.encode()


class _Files:
    """Updates as files of tensors with something wrong."""

    def __init__(self, found: Target) -> None:
        self._outsider = next(d for d in found.devices if d.held is None).credential
        self._good: list[tuple[str, bytes, str]] = []
        for device in found.holders():
            assert device.held is not None
            update = UPDATE.validate_python(device.update(device.held))
            if isinstance(update, AlphaUpdate):
                alpha = update.alpha
                tensors = {"alpha": Tensor(alpha.dtype, alpha.shape, alpha.to_bytes())}
                text = update.model_dump_json(context=Apart(tensors))
                path = f"/v1/assignments/{device.held['assignment_id']}/update"
                file = dump_tensors(tensors, {"message": text})
                self._good.append((path, file, device.credential))

    def __call__(self, rng: random.Random) -> Bad | None:
        path, file, insider = rng.choice(self._good)
        file = damaged_file(rng, file)
        try:
            decode(UPDATE.validate_json, file, TENSORS, check=check_json)
        except ValueError:
            token = insider
        else:
            token = self._outsider  # It is still a good message.
        headers = {"Content-Type": TENSORS}
        return Bad("file of tensors", request("POST", path, file, token=token, headers=headers))


class _WrongWork:
    """Well-formed messages that do not fit the work that they are for."""

    def __init__(self, found: Target) -> None:
        self._holders = found.holders()

    def __call__(self, rng: random.Random) -> Bad | None:
        device = rng.choice(self._holders)
        assert device.held is not None
        work, update = device.held, device.update(device.held)
        match rng.randrange(6):
            case 0 if update["exchange"] == "losses":
                size = rng.choice((2, 3, 5, 100, 60_000))
                update["losses"] = [rng.uniform(-1, 1) for _ in range(size)]
            case 1 if update["exchange"] == "alpha":
                update["alpha"] = _other_array(rng, update["alpha"])
            case 2:
                update["scored"] = {"scored": 0, "failed": rng.choice((0, 2, 2**31))}
            case 3:
                update["scored"] = {"scored": 1, "failed": 1, "vetoed": rng.choice((0, 1, 5))}
            case 4 if update["exchange"] == "alpha":
                update["memory"] = {"stray": update["alpha"]}
            case _:
                other = rng.choice([d for d in self._holders if d.run != device.run])
                assert other.held is not None
                if other.held["exchange"] == work["exchange"]:
                    return None
                update = other.update(other.held)
        path = f"/v1/assignments/{work['assignment_id']}/update"
        body = json.dumps(update).encode()
        return Bad("update that does not fit", request("POST", path, body, token=device.credential))


def _other_array(rng: random.Random, array: dict[str, Any]) -> dict[str, Any]:
    height, width = array["shape"]
    zeros = "A" * len(array["data"].rstrip("="))
    return rng.choice(
        (
            {**array, "shape": [width, height]} if width != height else {**array, "shape": [9]},
            {**array, "shape": [height * width]},
            {**array, "shape": [1, 1, height, width]},
            {**array, "dtype": "float64", "shape": [0, 5], "data": ""},
            {**array, "data": zeros + array["data"][len(zeros) :]},
            {"dtype": "uint8", "shape": [1 << 22], "data": "AAAA" * ((1 << 22) // 3) + "AA=="},
        )
    )


class _Heads:
    """Request lines and headers that no client would send."""

    def __init__(self, found: Target) -> None:
        self._device = found.holders()[0]

    def __call__(self, rng: random.Random) -> Bad | None:
        token = self._device.credential
        body = b'{"num_examples":0}'
        good = request("POST", "/v1/assignments/claim", body, token=token)
        evil = rng.choice(EVIL_TEXTS)[:3000].encode("utf-8", "replace")
        name = bytes(rng.choices(range(256), k=rng.choice((0, 1, 5, 300))))
        huge = rng.choice((100, 8_000, 9_000, 70_000, 1_000_000))
        lines = [
            good.replace(
                b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"http", b"")), 1
            ),
            good.replace(
                b"POST", rng.choice((b"", b"P\x00ST", b"post", b"PRI", evil, b"X" * huge)), 1
            ),
            good.replace(b"Host: localhost\r\n", b"", 1),
            good.replace(b"Host: localhost", b"Host: a\r\nHost: " + evil, 1),
            good.replace(
                b"\r\n", rng.choice((b"\n", b"\r", b"\r\r\n", b"\n\r")), rng.choice((1, 2, -1))
            ),
            good.replace(b"\r\nHost", b"\r\n" + name + b": x\r\nHost", 1),
            good.replace(b"\r\nHost", b"\r\nX: " + name + b"\r\nHost", 1),
            good.replace(b"\r\nHost", b"\r\nX: " + b"y" * huge + b"\r\nHost", 1),
            good.replace(b"\r\nHost", b"\r\n" + b"Z" * huge + b": y\r\nHost", 1),
            good.replace(b"\r\nHost", b"\r\n" + b"A: b\r\n" * min(huge, 20_000) + b"Host", 1),
            good.replace(b"\r\nHost", b"\r\n folded: x\r\nHost", 1),
            good.replace(b"application/json", evil, 1),
            good.replace(b"application/json", b"application/json; charset=" + evil, 1),
            good.replace(
                b"application/json", rng.choice((b"text/plain", b"multipart/form-data", b"")), 1
            ),
            good.replace(
                b"Bearer", rng.choice((b"Basic", b"bearer  ", b"", b"Bearer Bearer", evil)), 1
            ),
            good.replace(b"/claim", b"/claim?" + b"q" * huge, 1),
            good.replace(b"/claim", b"/claim" + name, 1),
            good.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n", 1),
            good.replace(b"\r\n\r\n", b"\r\nExpect: " + evil[:50] + b"\r\n\r\n", 1),
            good.replace(b"\r\n\r\n", b"\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", 1),
            good.replace(b"\r\n\r\n", b"\r\nConnection: " + evil[:50] + b"\r\n\r\n", 1),
            good.replace(b"\r\n\r\n", b"\r\nRange: bytes=0-,5-1\r\nIf-None-Match: *\r\n\r\n", 1),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(100),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            rng.randbytes(rng.choice((1, 10, 1000))) + b"\r\n\r\n",
            b"\r\n" * rng.choice((1, 2, 1000)) + good,
            good.replace(b"{", rng.choice((b"\xef\xbb\xbf{", b"\xff\xfe{", b"\0{")), 1),
            damaged_bytes(rng, good),
        ]
        return Bad("head", rng.choice(lines), open_ended=True)


class _Framing:
    """False lengths and chunks, and pipelined requests."""

    def __init__(self, found: Target) -> None:
        self._device = found.holders()[0]

    def __call__(self, rng: random.Random) -> Bad | None:
        body = b'{"num_examples":0}'
        token = self._device.credential
        path = "/v1/assignments/claim"
        good = request("POST", path, body, token=token)
        length = b"Content-Length: %d" % len(body)
        chunked = good.replace(length, b"Transfer-Encoding: chunked").removesuffix(body)
        piece = b"%x\r\n%b\r\n" % (len(body), body)
        sizes = (0, 1, len(body) - 1, len(body) + 1, 10**6, 2**31, 2**63, 2**64, 10**40)
        lengths = (b"-1", b"+5", b"0x10", b"1e3", b"", b" ", b"5, 5", b"\xd9\xa5", b"18 18", b"nan")
        pieces = (
            b"zz\r\n" + body,
            b"-1\r\n\r\n",
            b"ffffffffffffffff\r\n" + body,
            b"7fffffff\r\n" + body + b"\r\n0\r\n\r\n",
            piece,
            piece.replace(b"\r\n", b"\n") + b"0\n\n",
            piece + b"0\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
            piece + b"0\r\n" + b"X: y\r\n" * 5_000 + b"\r\n",
            b"1;" + b"e" * 70_000 + b"\r\n{\r\n0\r\n\r\n",
            b"0\r\n\r\n",
            b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n",
            b"1\r\n{\r\n" * 2_000 + b"0\r\n\r\n",
        )
        both = b"\r\nTransfer-Encoding: chunked\r\n" + length
        streams = [
            good.replace(length, b"Content-Length: %d" % rng.choice(sizes)),
            good.replace(length, b"Content-Length: " + rng.choice(lengths)),
            good.replace(length, length + b"\r\nContent-Length: %d" % rng.choice(sizes)),
            chunked + rng.choice(pieces),
            chunked + rng.choice(pieces),
            chunked.replace(b"chunked", rng.choice((b"identity", b"chunked, chunked", b"xchunked")))
            + piece,
            good.replace(b"\r\n" + length, both),
            good.replace(b"\r\n" + length, both).removesuffix(body) + piece + b"0\r\n\r\n",
            good * rng.choice((2, 10, 200)),
            good + rng.randbytes(50),
            good + b"GET / HTTP/1.1\r\n",
            request("GET", "/v1/runs", body, token="x"),
            request("POST", path, None, token=token),
        ]
        return Bad("framing", rng.choice(streams), open_ended=True)


class _Encodings:
    """Bodies that are compressed, or say that they are."""

    def __init__(self, found: Target) -> None:
        self._device = found.holders()[0]
        self._bombs = [gzip.compress(fill * (80 << 20), 9) for fill in (b" ", b"[")]

    def __call__(self, rng: random.Random) -> Bad | None:
        body = b'{"num_examples":0}'
        encodings = (
            "gzip",
            "deflate",
            "br",
            "zstd",
            "compress",
            "x-gzip",
            "identity",
            "gzip, gzip",
            "é",
        )
        raw = zlib.compressobj(wbits=-15)
        packed = rng.choice(
            (
                body,
                gzip.compress(body),
                gzip.compress(body)[:-4],
                gzip.compress(gzip.compress(body)),
                gzip.compress(body) + gzip.compress(b" " * 1000),
                damaged_bytes(rng, gzip.compress(body)),
                zlib.compress(body),
                raw.compress(body) + raw.flush(),
                damaged_bytes(rng, zlib.compress(body)),
                rng.choice(self._bombs),
                b"",
            )
        )
        headers = {"Content-Encoding": rng.choice(encodings)}
        device = self._device
        assert device.held is not None
        path = rng.choice(
            ("/v1/assignments/claim", f"/v1/assignments/{device.held['assignment_id']}/update")
        )
        data = request("POST", path, packed, token=device.credential, headers=headers)
        return Bad("encoding", data, open_ended=True)


class _Paths:
    """Paths and methods that there are not."""

    _EVIL = (
        "%2e%2e/%2e%2e/etc/passwd",
        "../../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "%00",
        "a%00b",
        "%c0%ae%c0%ae",
        "%ff%fe",
        "%ed%a0%80",
        "%",
        "%zz",
        "%25%32%65",
        "{run_id}",
        "%7Brun_id%7D",
        "a" * 5_000,
        "a%0d%0aX-Injected: y",
        "%E2%80%AE",
        "losses%20",
        "losses/",
        "Losses",
        "losses%2ftask",
        "losses;x",
        "*",
        "'",
        "\xff",
        "1E+999999",
        "-1",
    )
    _ENDS = (
        "",
        "/task",
        "/vocabulary",
        "/prompt",
        "/log",
        "/events",
        "/stop",
        "/resume",
        "/rollback",
    )
    _METHODS = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")

    def __init__(self, found: Target) -> None:
        self._device = found.holders()[0]

    def __call__(self, rng: random.Random) -> Bad | None:
        device = self._device
        assert device.held is not None
        evil, token = rng.choice(self._EVIL), rng.choice((ADMIN, device.credential, None))
        work = device.held["assignment_id"]
        calls = [
            ("GET", f"/v1/runs/{evil}{rng.choice(self._ENDS)}"),
            ("POST", f"/v1/runs/{evil}{rng.choice(self._ENDS[-4:])}"),
            ("POST", f"/v1/assignments/{evil}/{rng.choice(('update', 'renew', 'decline'))}"),
            ("GET", f"/{evil}"),
            ("GET", f"//{evil}"),
            ("GET", evil),
            ("GET", f"http://elsewhere.example/{evil}"),
            ("GET", f"/docs/{evil}"),
            ("GET", f"/v1/runs/losses/log?{evil}={evil}"),
            (rng.choice(self._METHODS), "/v1/assignments/claim"),
            (rng.choice(self._METHODS), f"/v1/assignments/{work}/update"),
            (rng.choice(self._METHODS), "/v1/clients"),
            (rng.choice(self._METHODS[1:]), "/healthz"),
        ]
        method, path = rng.choice(calls)
        body = rng.choice((None, b"", b"{}", b"[]", b"null"))
        data = request(method, path, body, token=token)
        return Bad("path or method", data, open_ended=True, harmless=True)


class _Strangers:
    """Valid requests from callers without the permission."""

    def __init__(self, found: Target) -> None:
        self._found = found
        self._holders = found.holders()

    def __call__(self, rng: random.Random) -> Bad | None:
        device = rng.choice(self._holders)
        assert device.held is not None
        work = f"/v1/assignments/{device.held['assignment_id']}"
        update = json.dumps(device.update(device.held)).encode()
        claim = b'{"num_examples":4,"wait_s":0}'
        calls: list[tuple[str, str, bytes | None]] = [
            ("POST", f"{work}/update", update),
            ("POST", f"{work}/renew", None),
            ("POST", f"{work}/decline", b'{"reason":"no"}'),
        ]
        others = [d for d in self._found.devices if d is not device]
        tokens: list[str | None] = [rng.choice(others).credential]
        if rng.random() < 0.7:
            calls += [
                ("POST", "/v1/assignments/claim", claim),
                ("POST", "/v1/clients", b"{}"),
                ("POST", "/v1/runs", json.dumps(_run_document()).encode()),
                ("POST", "/v1/runs/losses/stop", None),
                ("POST", "/v1/runs/alpha/resume", None),
                ("POST", "/v1/runs/alpha/budget", b'{"queries":1000000}'),
                ("POST", "/v1/runs/alpha/rollback", b'{"to_round":0,"reason":"x"}'),
                ("GET", "/v1/runs/losses/log", None),
                ("GET", "/v1/runs/losses", None),
            ]
            tokens = [
                None,
                "",
                " ",
                device.credential[:-1],
                device.credential + "x",
                device.credential.upper(),
                device.client_id,
                "é" * 20,
                "a" * 7_000,
                "null",
                rng.randbytes(20).hex(),
                device.credential.encode().hex(),
            ]
        method, path, body = rng.choice(calls)
        data = request(method, path, body, token=rng.choice(tokens))
        return Bad("stranger", data, open_ended=True)


class _Signatures:
    """Requests of a device that must sign, with something else in place of the signature."""

    def __init__(self, found: Target) -> None:
        assert found.signer is not None
        self._signer = found.signer

    def __call__(self, rng: random.Random) -> Bad | None:
        # The body is bad too: a signature that is right after all must not make a claim.
        path, body = "/v1/assignments/claim", b'{"num_examples":0}'
        headers = self._signer.headers("POST", path, body)
        for _ in range(rng.choice((1, 1, 2))):
            name = rng.choice(list(headers))
            match rng.randrange(5):
                case 0:
                    del headers[name]
                    break
                case 1:
                    headers[name] = rng.choice(EVIL_TEXTS)[:2000]
                case 2:
                    headers[name] = f"{headers[name]}, {headers[name]}"
                case 3:
                    headers[name] += rng.choice((";created=1", ";x", ")", '"', ":", ";nonce=1e9"))
                case _:
                    headers[name] = damaged_bytes(rng, headers[name].encode()).decode("latin-1")
        if rng.random() < 0.1:
            headers[PROTOCOL_HEADER] = rng.choice(("0", "2", "-1", "1.0", "x", "9" * 5_000, "٣"))
        token = self._signer.credential
        data = request("POST", path, body, token=token, headers=headers)
        return Bad("signature", data, open_ended=True)


class _Archives:
    """Archives of runs that are damaged before or after they are packed."""

    def __init__(self, found: Target) -> None:
        assert found.archive is not None
        self._packed = found.archive
        self._lines = gzip.decompress(found.archive).splitlines()

    def __call__(self, rng: random.Random) -> Bad | None:
        lines = list(self._lines)
        match rng.randrange(5):
            case 0:
                packed = damaged_bytes(rng, self._packed)
            case 1:
                packed = gzip.compress(damaged_bytes(rng, b"\n".join(lines)), 1)
            case 2:
                packed = gzip.compress(rng.choice((b" ", b"[", b"\n")) * (80 << 20), 9)
            case _:
                # The digest is right again, so that what lies behind it is read.
                at = rng.randrange(len(lines) - 1)
                lines[at] = damaged(rng, lines[at]).replace(b"\n", b" ")
                digest = hashlib.sha256(b"".join(line + b"\n" for line in lines[:-1])).hexdigest()
                lines[-1] = json.dumps({**json.loads(lines[-1]), "sha256": digest}).encode()
                packed = gzip.compress(b"".join(line + b"\n" for line in lines), 1)
        kind = {"Content-Type": rng.choice(("application/gzip", "application/gzip", "text/plain"))}
        data = request("POST", "/v1/runs/import", packed, token=ADMIN, headers=kind)
        return Bad("archive", data)


class _Halves:
    """Requests that end in the middle: the device died, or the network did."""

    def __init__(self, found: Target) -> None:
        self._holders = found.holders()

    def __call__(self, rng: random.Random) -> Bad | None:
        device = rng.choice(self._holders)
        assert device.held is not None
        path = f"/v1/assignments/{device.held['assignment_id']}/update"
        body = json.dumps(device.update(device.held)).encode()
        data = request("POST", path, body, token=device.credential)
        return Bad("cut off", data[: rng.randrange(1, len(data))], open_ended=True)


if __name__ == "__main__":
    main()
