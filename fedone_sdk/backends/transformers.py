"""Backend for models of the transformers library, masked and causal, run by torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from hashlib import file_digest, sha256
from importlib import import_module
from importlib.util import find_spec
from math import fsum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedone_sdk.backends.base import Answer, LocalBackend, Query, float32, one_query, setting_error
from fedone_sdk.backends.chat import ApplyTemplate
from fedone_sdk.backends.encoders import CausalEncoder, ClozeEncoder, read_json, read_max_length
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, MissingExtraError, SpecError
from fedone_sdk.files import user_path

__all__ = [
    "Checkpoint",
    "TransformersBackend",
    "WEIGHTS",
    "find_checkpoint",
    "hash_folder",
    "load_module",
]

_NEEDED_FILES = ("config.json", "tokenizer.json")
_TEMPLATE_FILE = "chat_template.jinja"
_SMALL_FILES = (*_NEEDED_FILES, "tokenizer_config.json", "special_tokens_map.json", _TEMPLATE_FILE)
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Patterns of weight files; the first pattern with a match is used."""

MAX_SEQUENCES = 256
"""Maximum sequences per forward pass. If a query has more, they are sorted by length and split."""

Encoder = ClozeEncoder | CausalEncoder

Pick = tuple[int, int, int]
"""A log-probability to compute: sequence index, position in the sequence, and the next token."""


class Plan(NamedTuple):
    """The forward passes of a query, planned without the weights."""

    sequences: list[list[int]]  # Each is the token ids of one sequence.
    picks: list[list[list[Pick]]]  # By input, then text to score, then token.
    worst: Usage  # Upper bound; exact if no text is generated.


class TransformersBackend(LocalBackend[Plan, Encoder, "TorchModel"]):
    """Backend for a masked model of the RoBERTa family, or a causal model.

    A masked model answers at ``{mask}``, a causal model at the end of the input; the model's
    ``architectures`` decide which kind it is. A query of up to `MAX_SEQUENCES` sequences is one
    forward pass. The softmax over the vocabulary is computed in float32, at scored positions only.

    The constructor reads the small files, and downloads those of a hub model. A worker thread loads
    the weights on their first use. Code that comes with a model is never run.

    The arguments are keys of ``kind: transformers``.

    Attributes:
        answers: ``labels``; for a causal model also ``reference`` and ``text`` (greedy).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        multi_token_labels: bool = False,
    ) -> None:
        if any(find_spec(name) is None for name in ("torch", "transformers")):
            raise MissingExtraError("a model of the transformers library", extra="torch")
        self._checkpoint = find_checkpoint(str(model))
        folder = self._checkpoint.folder
        self._causal = is_causal(folder)
        if multi_token_labels and not self._causal:
            raise setting_error(
                "multi_token_labels: must be false for a masked language model, which predicts "
                "one token"
            )
        self.answers = frozenset({"labels", "reference", "text"} if self._causal else {"labels"})
        self.max_length = read_max_length(folder, causal=self._causal)
        self._device, self._dtype = device, dtype
        self._multi_token_labels = multi_token_labels
        self._template = chat_template(self._checkpoint) if self._causal else None
        super().__init__(
            "transformers", self._checkpoint.name, has_template=self._template is not None
        )

    @cached_property
    def fingerprint(self) -> str:
        """``transformers:<name>:<version>:<dtype>``, the version in 16 hex digits.

        The version of a hub model is its commit. The version of a folder is the sha256 of its
        configuration, tokeniser and weights; this takes about a second per gigabyte.
        """
        checkpoint = self._checkpoint
        version = (checkpoint.commit or hash_folder(checkpoint.folder))[:16]
        return f"transformers:{checkpoint.name}:{version}:{self._dtype}"

    def _plan(self, query: Query) -> Plan:
        return plan_of(self._loaded_encoder(), query)

    def _run(self, query: Query, plan: Plan) -> Answer:
        model = self._loaded()
        return model.write(plan, query.max_tokens) if query.want == "text" else model.score(plan)

    def _load_encoder(self) -> Encoder:
        file = self._checkpoint.folder / "tokenizer.json"
        if not self._causal:
            return ClozeEncoder(file, self.max_length)
        multi = self._multi_token_labels
        return CausalEncoder(file, self.max_length, self._template, multi_token_labels=multi)

    def _load_model(self) -> TorchModel:
        encoder = self._loaded_encoder()
        return TorchModel(self._checkpoint, encoder, device=self._device, dtype=self._dtype)


def plan_of(encoder: Encoder, query: Query) -> Plan:
    """Plan the forward passes of a query."""
    if isinstance(encoder, ClozeEncoder):
        labels = [token for (token,) in encoder.label_ids(query.label_words)]
        clozes = [encoder.encode(parts) for parts in query.inputs]
        picks = [
            [[(index, cloze.mask_index, token)] for token in labels]
            for index, cloze in enumerate(clozes)
        ]
        sequences = [cloze.ids for cloze in clozes]
        return Plan(sequences, picks, one_query(sum(map(len, sequences))))
    if query.want == "text":
        sequences = encoder.encode_for_text(query)
        num_written = query.max_tokens * len(sequences)
        return Plan(sequences, [], one_query(sum(map(len, sequences)), num_written))
    sequences, picks, num_tokens = [], [], 0
    for parts, endings in zip(query.inputs, encoder.endings(query), strict=True):
        # The last token of a text is scored, but is not part of the input.
        reserve = max(map(len, endings)) - 1
        start = encoder.encode(parts, reserve=reserve)
        num_tokens += len(start) + reserve
        picks.append(_add_sequences(sequences, start, endings))
    return Plan(sequences, picks, one_query(num_tokens))


def _add_sequences(
    sequences: list[list[int]], start: list[int], endings: Sequence[list[int]]
) -> list[list[Pick]]:
    """Add the sequences of one input; return the picks of each ending (a text to score)."""
    indices: dict[tuple[int, ...], int] = {}
    picks = []
    for ending in endings:
        # Endings that differ only in the last token share a sequence.
        index = indices.setdefault(tuple(ending[:-1]), len(sequences))
        if index == len(sequences):
            sequences.append([*start, *ending[:-1]])
        picks.append([(index, len(start) - 1 + at, token) for at, token in enumerate(ending)])
    return picks


class TorchModel:
    """The model and its tokeniser. All methods block, and are not thread-safe."""

    def __init__(
        self, checkpoint: Checkpoint, encoder: Encoder, *, device: str, dtype: str
    ) -> None:
        self._torch = torch = import_module("torch")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.encoder, self._device = encoder, device
        # Padding is masked out, so a causal model may be padded with any token.
        self._pad_id, self._options = 0, {"use_cache": False}
        auto_class = "AutoModelForCausalLM"
        if isinstance(encoder, ClozeEncoder):
            self._pad_id, self._options = encoder.pad_id, {}
            auto_class = "AutoModelForMaskedLM"
        self.module = load_module(auto_class, checkpoint, getattr(torch, dtype), device)
        # Maps hidden states to logits.
        self.head = getattr(self.module, "lm_head", None) or self.module.get_output_embeddings()
        if self.head is None:
            raise BackendError(f"{checkpoint.name}: the model has no language model head")
        if isinstance(encoder, CausalEncoder):
            # Greedy decoding replaces the sampling that the model recommends.
            self.module.generation_config = import_module("transformers").GenerationConfig(
                do_sample=False,
                pad_token_id=self._pad_id,
                eos_token_id=self.module.generation_config.eos_token_id,
            )

    def score(self, plan: Plan) -> Answer:
        """Return the log-probability of each text to score, for each input."""
        picks = dict.fromkeys(pick for texts in plan.picks for text in texts for pick in text)
        values: dict[Pick, float] = {}
        for batch in self._batches(plan.sequences):
            place = {index: at for at, index in enumerate(batch)}
            wanted = [pick for pick in picks if pick[0] in place]
            with self._failing_clearly(), self._torch.inference_mode():
                scored = self._forward(
                    [plan.sequences[index] for index in batch],
                    [(place[index], position, token) for index, position, token in wanted],
                )
                values.update(zip(wanted, scored.tolist(), strict=True))
        return Answer(
            log_probs=tuple(
                tuple(float32(fsum(values[pick] for pick in text)) for text in texts)
                for texts in plan.picks
            ),
            usage=plan.worst.without_queries(),
        )

    def write(self, plan: Plan, max_tokens: int) -> Answer:
        """Generate greedily up to the model's end token or `max_tokens`."""
        assert isinstance(self.encoder, CausalEncoder)
        ends = self.module.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        written: list[list[int]] = [[]] * len(plan.sequences)
        for batch in self._batches(plan.sequences):
            with self._failing_clearly(), self._torch.inference_mode():
                ids, mask = self._padded([plan.sequences[index] for index in batch], right=False)
                outputs = self.module.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens
                )[:, ids.shape[1] :].tolist()
            for index, tokens in zip(batch, outputs, strict=True):
                end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
                written[index] = tokens[: end + 1]
        return Answer(
            log_probs=((),) * len(written),
            texts=tuple(
                self.encoder.decode([token for token in tokens if token not in ends])
                for tokens in written
            ),
            usage=Usage(
                requests=1,
                prompt_tokens=plan.worst.prompt_tokens,
                completion_tokens=sum(map(len, written)),
            ),
        )

    @contextmanager
    def _failing_clearly(self) -> Iterator[None]:
        torch = self._torch
        try:
            yield
        except torch.OutOfMemoryError as exc:
            if str(self._device).startswith("cuda"):
                torch.cuda.empty_cache()
            raise BackendError(
                f"{self._device} is out of memory (a pass has up to {MAX_SEQUENCES} sequences): "
                "set dtype: bfloat16, or use a smaller model or batch_size"
            ) from exc
        except (RuntimeError, IndexError, ValueError) as exc:  # Raised by torch for a bad input.
            raise BackendError(f"torch failed: {first_line(exc)}") from exc

    def _batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield the indices of the sequences of each forward pass."""
        order = list(range(len(sequences)))
        if len(sequences) > MAX_SEQUENCES:
            order.sort(key=lambda index: len(sequences[index]), reverse=True)
        for begin in range(0, len(order), MAX_SEQUENCES):
            yield order[begin : begin + MAX_SEQUENCES]

    def _forward(self, sequences: Sequence[Sequence[int]], picks: Sequence[Pick]) -> Any:
        """Return the log-probability of each pick: float32, nats, over the whole vocabulary."""
        # The head is expensive, so it runs once per position.
        positions = list(dict.fromkeys((index, position) for index, position, _ in picks))
        place = {position: index for index, position in enumerate(positions)}
        with self._head_at(*zip(*positions, strict=True)):
            # Padding is on the right, so causal attention does not reach it.
            ids, mask = self._padded(sequences, right=True)
            logits = self.module(input_ids=ids, attention_mask=mask, **self._options).logits
        if logits.shape[:2] != (1, len(positions)):
            raise BackendError("this architecture is not supported: its logits have another shape")
        logits = logits[0].float()
        pairs = [(place[index, position], token) for index, position, token in picks]
        at, tokens = self._torch.tensor(pairs, device=self._device).unbind(1)
        return logits[at, tokens] - logits.logsumexp(1)[at]

    def _padded(self, sequences: Sequence[Sequence[int]], *, right: bool) -> tuple[Any, Any]:
        width = max(map(len, sequences))
        ids, mask = [], []
        for tokens in sequences:
            padding, zeros = [self._pad_id] * (width - len(tokens)), [0] * (width - len(tokens))
            ids.append([*tokens, *padding] if right else [*padding, *tokens])
            mask.append([1] * len(tokens) + zeros if right else zeros + [1] * len(tokens))
        tensor = self._torch.tensor
        return tensor(ids, device=self._device), tensor(mask, device=self._device)

    @contextmanager
    def _head_at(self, indices: Sequence[int], positions: Sequence[int]) -> Iterator[None]:
        """Restrict the head to M positions: its input then has the shape (1, M, hidden size)."""

        def pick(_: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0][list(indices), list(positions)].unsqueeze(0), *args[1:])

        hook = self.head.register_forward_pre_hook(pick)
        try:
            yield
        finally:
            hook.remove()


class Checkpoint(NamedTuple):
    """Name of a model, the folder of its small files, and the commit of a hub model."""

    name: str
    folder: Path
    commit: str | None


def find_checkpoint(model: str) -> Checkpoint:
    """Find a model, and download the small files of a hub model."""
    folder = user_path(model)
    if folder.is_dir():
        checkpoint = Checkpoint(folder.resolve().name, folder, None)
    elif model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise setting_error(f"model: there is no folder {model!r}")
    else:
        hub = import_module("huggingface_hub")
        try:
            folder = Path(hub.snapshot_download(model, allow_patterns=list(_SMALL_FILES)))
        except Exception as exc:  # Errors of the hub's client, of its HTTP client, and ValueError.
            problem = "is not a folder, and the hub does not have it"
            raise setting_error(f"model: {model!r} {problem}: {first_line(exc)}") from exc
        checkpoint = Checkpoint(model, folder, folder.name)
    for name in _NEEDED_FILES:
        if not (checkpoint.folder / name).is_file():
            raise SpecError(f"needs {name}", source=model)
    return checkpoint


def chat_template(checkpoint: Checkpoint) -> ApplyTemplate | None:
    """Return the chat template of a model, if it has one; it runs in Jinja's sandbox."""
    folder = checkpoint.folder
    in_config = read_json(folder / "tokenizer_config.json").get("chat_template")
    if in_config is None and not (folder / _TEMPLATE_FILE).is_file():
        return None

    @cache
    def tokenizer() -> Any:
        loader = import_module("transformers").AutoTokenizer
        return loader.from_pretrained(folder, local_files_only=True, use_fast=True)

    def apply(messages: list[dict[str, str]]) -> str:
        answered = messages[-1]["role"] == "assistant"
        flags = {"add_generation_prompt": not answered, "continue_final_message": answered}
        try:
            return str(tokenizer().apply_chat_template(messages, tokenize=False, **flags))
        except Exception as exc:  # Errors of Jinja, of the template, and of transformers.
            roles = ", ".join(message["role"] for message in messages)
            problem = f"the chat template refuses the task's messages ({roles})"
            raise BackendError(f"{checkpoint.name}: {problem}: {first_line(exc)}") from exc

    return apply


def is_causal(folder: Path) -> bool:
    """Whether the model in a folder is causal (True) or masked (False)."""
    names = read_json(folder / "config.json").get("architectures") or []
    if any(name.endswith("ForMaskedLM") for name in names):
        return False
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return True
    raise SpecError(
        f"its architectures are {names}; "
        "needs a masked (...ForMaskedLM) or a causal (...ForCausalLM) language model",
        source=str(folder / "config.json"),
    )


def load_module(auto_class: str, checkpoint: Checkpoint, dtype: Any, device: str) -> Any:
    """Load a model for inference, without dropout and without gradients of its weights."""
    torch, transformers = import_module("torch"), import_module("transformers")
    options: dict[str, Any] = {"trust_remote_code": False, "output_loading_info": True}
    name = checkpoint.name
    if checkpoint.commit is None:
        name, options["local_files_only"] = str(checkpoint.folder), True
    else:
        options["revision"] = checkpoint.commit
    logging = transformers.utils.logging
    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # A library must not write to stderr.
    try:
        model_class = getattr(transformers, auto_class)
        model, info = model_class.from_pretrained(name, dtype=dtype, **options)
        if missing := sorted(info["missing_keys"]):  # They would be set at random.
            raise BackendError(f"{checkpoint.name}: the weights lack {', '.join(missing[:3])}")
        return model.to(device).eval().requires_grad_(False)
    except BackendError:
        raise
    except torch.OutOfMemoryError as exc:
        problem = f"does not fit into the memory of {device}"
        advice = "set dtype: bfloat16, or use a smaller model"
        raise BackendError(f"{checkpoint.name}: {problem}: {advice}") from exc
    except Exception as exc:  # OSError, ValueError, errors of safetensors: no common base class.
        raise BackendError(f"{checkpoint.name}: cannot load the model: {first_line(exc)}") from exc
    finally:
        if had_bar:
            logging.enable_progress_bar()


def hash_folder(folder: Path) -> str:
    """Return the version of a local model: the first 16 hex digits of sha256 over its files."""
    weights = next((files for kind in WEIGHTS if (files := sorted(folder.glob(kind)))), [])
    digest = sha256()
    template = [file] if (file := folder / _TEMPLATE_FILE).is_file() else []
    for file in [*(folder / name for name in _NEEDED_FILES), *weights, *template]:
        with file.open("rb") as content:
            file_digest(content, lambda: digest)
    return digest.hexdigest()[:16]


def first_line(exc: Exception) -> str:
    """Return the first line of an error's message, or the error's class."""
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
