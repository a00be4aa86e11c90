"""Models of the transformers library, masked and causal, run by torch in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from math import fsum
from pathlib import Path
from struct import pack, unpack
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeVar

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.fitting import CausalEncoder, ClozeEncoder, read_json, read_max_length
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, LabelWordError, MissingExtraError, SpecError

__all__ = ["TransformersBackend"]

A = TypeVar("A")
R = TypeVar("R")

_NEEDED_FILES = ("config.json", "tokenizer.json")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


class TransformersBackend(LLMBackend):
    """Asks a masked language model of the RoBERTa family at ``{mask}``, or a causal one at the end.

    Which of the two a model is, its ``architectures`` say. Every query is one forward pass with
    its own padding, however many others wait; only a query of more than `max_batch` rows is split,
    sorted by length. The vocabulary is summed in float32, at the asked positions only.

    The small files are read here, those of a hub model over the network; the weights are loaded
    in a worker thread by the first call that needs them. Code that comes with a model is never run.

    Attributes:
        max_length: Tokens that the model takes per input, special tokens included.
        answers: ``labels``; of a causal model ``reference`` and ``text`` (greedy) too.

    Args:
        model: A folder, or a name on the hub. It needs ``config.json`` and ``tokenizer.json``.
        revision: Of the hub model; None is its newest.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``; ``auto`` is ``cuda`` where there is one, and
            else ``cpu``.
        dtype: Of weights and arithmetic.
        max_batch: The most rows of one forward pass: one per input, or one per input and label
            word where those are several tokens.
        multi_token_labels: Lets a causal model's label words be several tokens; each is scored by
            the sum of its tokens' log-probabilities.

    Raises:
        MissingExtraError: The extra ``torch`` is not installed.
        SpecError: There is no such model or device, or it is no such model.
    """

    bounds = frozenset(
        {"queries", "requests", "tokens", "prompt_tokens", "completion_tokens", "usd"}
    )

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        max_batch: int = 256,
        multi_token_labels: bool = False,
    ) -> None:
        if any(find_spec(name) is None for name in ("torch", "transformers")):
            raise MissingExtraError("a model of the transformers library", extra="torch")
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch}")
        self._source = _find(str(model), revision)
        folder = self._source.folder
        self._causal = _is_causal(folder)
        if multi_token_labels and not self._causal:
            raise SpecError(
                "backend.multi_token_labels: must be false for a masked language model, "
                "which has one token at the mask"
            )
        self.answers = frozenset({"labels", "reference", "text"} if self._causal else {"labels"})
        self.max_length = read_max_length(folder, causal=self._causal)
        if device not in ("auto", "cpu"):
            _check_device(device)
        self._device, self._dtype, self._max_batch = device, dtype, max_batch
        self._multi_token_labels = multi_token_labels
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="fedone-transformers")
        self._model: _CausalModel | _MaskedModel | None = None
        self._hashing = Lock()

    @cached_property
    def fingerprint(self) -> str:
        """``transformers:<name>:<version>:<dtype>``, the version in 16 hex digits.

        Of a hub model it is the commit's. Of a folder it is the sha256 over configuration,
        tokeniser and weights, read once in full (a gigabyte takes about a second) by the first
        call that loads the model; whoever asks before that waits here.
        """
        with self._hashing:
            return f"transformers:{self._source.name}:{self._version}:{self._dtype}"

    @cached_property
    def _version(self) -> str:
        if self._source.commit is not None:
            return self._source.commit[:16]
        return _hash(self._source.folder)

    async def score(self, query: Query) -> Answer:
        """Answers one query by one forward pass.

        A too long input loses the ends of its text fields, the longest field first; prompt,
        template text and mask stay whole.

        Returns:
            Log-probabilities as float32 numbers, so that the wire does not change them.
            ``prompt_tokens`` counts each input once, with its longest label word or reference.

        Raises:
            BackendError: An input does not fit the model, or the model cannot be loaded or run.
            LabelWordError: A label word is not one token.
            ValueError: The query has no inputs, no label words, or not one reference per input.
        """
        if not query.inputs:
            raise ValueError("a query needs at least one input")
        if query.want not in self.answers:
            kind = "causal" if self._causal else "masked"
            raise BackendError(f"a {kind} model answers {sorted(self.answers)}, not {query.want!r}")
        if query.want == "labels" and not query.label_words:
            raise ValueError("a query needs label words")
        if query.want == "reference" and len(query.references) != len(query.inputs):
            raise ValueError("a query needs one reference per input")
        return await self._in_worker(self._score, query)

    async def check(self, label_words: tuple[str, ...]) -> None:
        """Checks that every label word, with its leading space as given, is one token.

        Raises:
            BackendError: The model cannot be loaded.
            LabelWordError: A label word is not one token (or none, where it may be several).
        """
        await self._in_worker(self._label_ids, label_words)

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """One query of `batch_size` inputs of the maximum length; a local model costs no money."""
        return Usage(
            queries=1,
            requests=1,
            prompt_tokens=self.max_length * batch_size,
            completion_tokens=min(max_tokens, self.max_length) * batch_size,
        )

    async def aclose(self) -> None:
        """Ends the worker thread, after the queries that it holds, and frees the model."""
        await asyncio.to_thread(self._executor.shutdown)
        self._model = None

    async def _in_worker(self, call: Callable[[A], R], argument: A) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, call, argument)

    def _loaded(self) -> _CausalModel | _MaskedModel:
        if self._model is None:  # There is one worker only.
            kind = _CausalModel if self._causal else _MaskedModel
            self._model = kind(
                self._source, self.max_length, self._device, self._dtype, self._max_batch
            )
            _ = self.fingerprint  # Hashed here rather than on the event loop.
        return self._model

    def _label_ids(self, label_words: Sequence[str]) -> list[list[int]]:
        model = self._loaded()
        if self._multi_token_labels and isinstance(model, _CausalModel):
            ids = [model.encoder.continuation(word) for word in label_words]
            for word, tokens in zip(label_words, ids, strict=True):
                if not tokens:
                    raise LabelWordError(word, [])
            return ids
        return [[model.encoder.label_id(word)] for word in label_words]

    def _score(self, query: Query) -> Answer:
        model = self._loaded()
        if isinstance(model, _MaskedModel):
            return model.fill(query, self._label_ids(query.label_words))
        if query.want == "text":
            return model.write(query)
        if query.want == "labels":
            labels = self._label_ids(query.label_words)
            return model.go_on(query, [labels] * len(query.inputs))
        references = [model.encoder.continuation(text) for text in query.references]
        if not all(references):
            raise BackendError("a reference text is empty")
        return model.go_on(query, [[reference] for reference in references])


class _Source(NamedTuple):
    """Where a model lies: `folder` holds its small files, `commit` is None of a local one."""

    name: str
    folder: Path
    commit: str | None


class _Row(NamedTuple):
    """A sequence for the model, and the (position, next token) pairs that are asked about."""

    ids: list[int]
    asked: list[tuple[int, int]]


class _Model:
    """The loaded model: everything that blocks. For one thread only."""

    auto_class: str
    forward_options: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    pad_id: int

    def __init__(
        self, source: _Source, max_length: int, device: str, dtype: str, max_batch: int
    ) -> None:
        self._torch = torch = import_module("torch")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device, self._max_length, self._max_batch = device, max_length, max_batch
        self._model = _load(self.auto_class, source, getattr(torch, dtype), device)
        # RoBERTa's is the whole head: dense layer, norm and vocabulary.
        self._head = getattr(self._model, "lm_head", None) or self._model.get_output_embeddings()
        if self._head is None:
            raise BackendError(f"{source.name}: the model has no language model head")

    def log_probs(self, rows: Sequence[_Row]) -> list[list[float]]:
        """For each row the log-probabilities that it asks for, nats over the whole vocabulary."""
        order = list(range(len(rows)))
        if len(rows) > self._max_batch:
            order.sort(key=lambda index: len(rows[index].ids), reverse=True)
        found: list[list[float]] = [[]] * len(rows)
        for begin in range(0, len(order), self._max_batch):
            batch = order[begin : begin + self._max_batch]
            scored = self._forward([rows[index] for index in batch])
            for index, values in zip(batch, scored, strict=True):
                found[index] = values
        return found

    def _forward(self, rows: Sequence[_Row]) -> list[list[float]]:
        torch = self._torch
        # Each position once, however many tokens are asked about there: the head is dear.
        picks = list(
            dict.fromkeys(
                (row, position) for row, (_, asked) in enumerate(rows) for position, _ in asked
            )
        )
        place = {pick: index for index, pick in enumerate(picks)}
        asked = [
            (place[row, position], token)
            for row, (_, pairs) in enumerate(rows)
            for position, token in pairs
        ]
        with self._running(), self._only(*zip(*picks, strict=True)):
            # Padding lies on the right, where a causal model never looks back at it.
            ids, mask = self.padded([row.ids for row in rows], right=True)
            logits = self._model(input_ids=ids, attention_mask=mask, **self.forward_options).logits
            if logits.shape[:2] != (1, len(picks)):
                raise BackendError("this architecture computes its logits in a way not known here")
            logits = logits[0].float()
            at, tokens = torch.tensor(asked, device=self._device).unbind(1)
            values = iter((logits[at, tokens] - logits.logsumexp(1)[at]).tolist())
        return [[next(values) for _ in row.asked] for row in rows]

    def padded(self, sequences: Sequence[Sequence[int]], *, right: bool) -> tuple[Any, Any]:
        """Token ids and attention mask, shape (len(sequences), longest)."""
        width = max(map(len, sequences))
        ids, mask = [], []
        for sequence in sequences:
            padding = [self.pad_id] * (width - len(sequence))
            blank, seen = [0] * len(padding), [1] * len(sequence)
            ids.append([*sequence, *padding] if right else [*padding, *sequence])
            mask.append(seen + blank if right else blank + seen)
        tensor = self._torch.tensor
        return tensor(ids, device=self._device), tensor(mask, device=self._device)

    @contextmanager
    def _only(self, rows: Sequence[int], positions: Sequence[int]) -> Iterator[None]:
        """Lets the head see these positions only, in a batch of one; M picks give (1, M, ...)."""

        def pick(_: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0][list(rows), list(positions)].unsqueeze(0), *args[1:])

        hook = self._head.register_forward_pre_hook(pick)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def _running(self) -> Iterator[None]:
        torch = self._torch
        try:
            with torch.inference_mode():
                yield
        except torch.OutOfMemoryError as exc:
            if str(self._device).startswith("cuda"):
                torch.cuda.empty_cache()
            raise BackendError(
                f"{self._device} is out of memory: lower backend.max_batch "
                f"(now {self._max_batch}), or take dtype bfloat16 or a smaller model"
            ) from exc
        except (RuntimeError, IndexError, ValueError) as exc:  # What torch raises on a bad input.
            raise BackendError(f"torch failed: {_first_line(exc)}") from exc


class _MaskedModel(_Model):
    """A masked language model of the RoBERTa family."""

    auto_class = "AutoModelForMaskedLM"

    def __init__(self, source: _Source, max_length: int, *options: Any) -> None:
        self.encoder = ClozeEncoder(source.folder / "tokenizer.json", max_length)
        self.pad_id = self.encoder.pad_id
        super().__init__(source, max_length, *options)

    def fill(self, query: Query, labels: Sequence[Sequence[int]]) -> Answer:
        """The label words' log-probabilities at the mask."""
        clozes = [self.encoder.encode(rendered) for rendered in query.inputs]
        rows = [
            _Row(cloze.ids, [(cloze.mask_index, token) for (token,) in labels]) for cloze in clozes
        ]
        return Answer(
            log_probs=tuple(tuple(values) for values in self.log_probs(rows)),
            usage=Usage(requests=1, prompt_tokens=sum(len(row.ids) for row in rows)),
        )


class _CausalModel(_Model):
    """A causal language model."""

    auto_class = "AutoModelForCausalLM"
    forward_options = {"use_cache": False}  # noqa: RUF012 (never changed)
    pad_id = 0  # Masked out, so any token will do.

    def __init__(self, source: _Source, max_length: int, *options: Any) -> None:
        self.encoder = CausalEncoder(source.folder / "tokenizer.json", max_length)
        super().__init__(source, max_length, *options)
        # Greedy, whatever the model's authors recommend for chatting.
        self._model.generation_config = import_module("transformers").GenerationConfig(
            do_sample=False,
            pad_token_id=self.pad_id,
            eos_token_id=self._model.generation_config.eos_token_id,
        )

    def go_on(self, query: Query, texts: Sequence[Sequence[list[int]]]) -> Answer:
        """The log-probability of each text of an input as what follows it."""
        rows: list[_Row] = []
        ends: list[list[tuple[int, int, int]]] = []  # Per text: row, begin, end in its `asked`.
        num_tokens = 0
        for rendered, follow in zip(query.inputs, texts, strict=True):
            # The last token of a text is only asked about, the model never reads it.
            reserve = max(map(len, follow), default=1) - 1
            start = self.encoder.encode(rendered, reserve=reserve)
            num_tokens += len(start) + reserve
            row_of: dict[tuple[int, ...], int] = {}
            spans = []
            for text in follow:
                # Texts that differ in the last token only share a row: so do all single tokens.
                row = row_of.setdefault(tuple(text[:-1]), len(rows))
                if row == len(rows):
                    rows.append(_Row([*start, *text[:-1]], []))
                asked = rows[row].asked
                spans.append((row, len(asked), len(asked) + len(text)))
                asked += [(len(start) - 1 + index, token) for index, token in enumerate(text)]
            ends.append(spans)
        values = self.log_probs(rows)
        return Answer(
            log_probs=tuple(
                tuple(_float32(fsum(values[row][begin:end])) for row, begin, end in spans)
                for spans in ends
            ),
            usage=Usage(requests=1, prompt_tokens=num_tokens),
        )

    def write(self, query: Query) -> Answer:
        """The likeliest next tokens, one by one, up to the model's end or `max_tokens`."""
        if query.max_tokens < 1:
            raise BackendError("a query for a text needs max_tokens of at least 1")
        starts = [
            self.encoder.encode(rendered, reserve=query.max_tokens) for rendered in query.inputs
        ]
        ends = self._model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        written: list[list[int]] = [[]] * len(starts)
        order = sorted(range(len(starts)), key=lambda index: len(starts[index]), reverse=True)
        for begin in range(0, len(order), self._max_batch):
            batch = order[begin : begin + self._max_batch]
            with self._running():
                ids, mask = self.padded([starts[index] for index in batch], right=False)
                found = self._model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=query.max_tokens
                )[:, ids.shape[1] :].tolist()
            for index, tokens in zip(batch, found, strict=True):
                end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
                written[index] = tokens[: end + 1]
        return Answer(
            log_probs=((),) * len(starts),
            texts=tuple(
                self.encoder.decode([token for token in tokens if token not in ends])
                for tokens in written
            ),
            usage=Usage(
                requests=1,
                prompt_tokens=sum(map(len, starts)),
                completion_tokens=sum(map(len, written)),
            ),
        )


def _find(model: str, revision: str | None) -> _Source:
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise SpecError("backend.revision: is for names on the hub, not for a folder")
        source = _Source(folder.resolve().name, folder, None)
    elif model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise SpecError(f"backend.model: there is no folder {model!r}")
    else:
        folder = _fetch(model, revision)
        source = _Source(model, folder, folder.name)
    for name in _NEEDED_FILES:
        if not (source.folder / name).is_file():
            raise SpecError(f"needs {name}", source=model)
    return source


def _fetch(model: str, revision: str | None) -> Path:
    """Brings a hub model's small files; their folder is named by the commit."""
    hub = import_module("huggingface_hub")
    try:
        return Path(
            hub.snapshot_download(
                model, revision=revision, allow_patterns=[*_NEEDED_FILES, "tokenizer_config.json"]
            )
        )
    except Exception as exc:  # Its own errors, those of its HTTP client, and ValueError.
        raise SpecError(
            f"backend.model: {model!r} is no folder, and the hub does not give it: "
            f"{_first_line(exc)}"
        ) from exc


def _is_causal(folder: Path) -> bool:
    names = read_json(folder / "config.json").get("architectures") or []
    if any(name.endswith("ForMaskedLM") for name in names):
        return False
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return True
    raise SpecError(
        f"its architectures are {names}, "
        "it must be a masked (...ForMaskedLM) or a causal (...ForCausalLM) language model",
        source=str(folder / "config.json"),
    )


def _check_device(device: str) -> None:
    torch = import_module("torch")
    if device == "mps":
        if torch.backends.mps.is_available():
            return
        raise SpecError("backend.device: 'mps', but there is no Apple GPU that torch can use")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.partition(":")[2] or 0) >= count:
        raise SpecError(
            f"backend.device: {device!r}, but torch sees {count} CUDA devices here; "
            "allowed: cpu, auto"
        )


def _load(auto_class: str, source: _Source, dtype: Any, device: str) -> Any:
    torch, transformers = import_module("torch"), import_module("transformers")
    place = (
        {"pretrained_model_name_or_path": source.folder, "local_files_only": True}
        if source.commit is None
        else {"pretrained_model_name_or_path": source.name, "revision": source.commit}
    )
    logging = transformers.utils.logging
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # stderr is not ours.
    try:
        model, info = getattr(transformers, auto_class).from_pretrained(
            **place, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
        missing = sorted(info["missing_keys"])
        if missing:  # They would be random numbers.
            raise BackendError(f"{source.name}: the weights lack {', '.join(missing[:3])}")
        return model.to(device).eval()
    except BackendError:
        raise
    except torch.OutOfMemoryError as exc:
        raise BackendError(
            f"{source.name}: does not fit into the memory of {device}: "
            "take dtype bfloat16 or a smaller model"
        ) from exc
    except Exception as exc:  # No base class: OSError, ValueError, safetensors' own ...
        raise BackendError(f"{source.name}: cannot load the model: {_first_line(exc)}") from exc
    finally:
        if bar:
            logging.enable_progress_bar()


def _hash(folder: Path) -> str:
    weights = next((found for kind in _WEIGHTS if (found := sorted(folder.glob(kind)))), [])
    digest = sha256()
    for file in [*(folder / name for name in _NEEDED_FILES), *weights]:
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def _float32(value: float) -> float:
    return float(unpack("<f", pack("<f", value))[0])


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
