"""Location and loading of models of the transformers library."""

from __future__ import annotations

import json
from functools import cache
from hashlib import file_digest, sha256
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from fedone_sdk.backends.base import setting_error
from fedone_sdk.backends.chat import ApplyTemplate
from fedone_sdk.errors import BackendError, SpecError
from fedone_sdk.files import user_path

__all__ = [
    "Checkpoint",
    "WEIGHTS",
    "find_checkpoint",
    "hash_folder",
    "load_module",
    "read_max_length",
]

_NEEDED_FILES = ("config.json", "tokenizer.json")
_TEMPLATE_FILE = "chat_template.jinja"
_SMALL_FILES = (*_NEEDED_FILES, "tokenizer_config.json", "special_tokens_map.json", _TEMPLATE_FILE)
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Files that hold weights, the first kind there."""


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
        folder = _fetch(model)
        checkpoint = Checkpoint(model, folder, folder.name)
    for name in _NEEDED_FILES:
        if not (checkpoint.folder / name).is_file():
            raise SpecError(f"needs {name}", source=model)
    return checkpoint


def _fetch(model: str) -> Path:
    hub = import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(model, allow_patterns=list(_SMALL_FILES)))
    except Exception as exc:  # Its own errors, those of its HTTP client, and ValueError.
        raise setting_error(
            f"model: {model!r} is no folder, and the hub does not give it: {first_line(exc)}"
        ) from exc


def chat_template(checkpoint: Checkpoint) -> ApplyTemplate | None:
    """Return the chat template of a model; None if it has none.

    The transformers library runs it in Jinja's sandbox, and loads its tokeniser on first use.
    """
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
        except Exception as exc:  # Jinja's, the template's own, and the library's.
            roles = ", ".join(message["role"] for message in messages)
            problem = f"the chat template refuses the task's messages ({roles})"
            raise BackendError(f"{checkpoint.name}: {problem}: {first_line(exc)}") from exc

    return apply


def read_max_length(folder: Path, *, causal: bool = False) -> int:
    """Return a model's maximum number of tokens per input, from its folder.

    A model that is not causal is of the RoBERTa family.
    """
    limits: list[int] = []
    stated = read_json(folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(stated, int) and stated < 2**31:  # transformers writes 1e30 for "unknown"
        limits.append(stated)
    config = read_json(folder / "config.json")
    positions = config.get("max_position_embeddings", config.get("n_positions"))  # GPT-2's name
    if isinstance(positions, int):
        # RoBERTa numbers positions from pad_token_id + 1.
        limits.append(positions if causal else positions - config.get("pad_token_id", 1) - 1)
    if not limits:
        raise SpecError(
            "the maximum length is unknown: needs tokenizer_config.json with model_max_length, "
            "or config.json with max_position_embeddings",
            source=str(folder),
        )
    return min(limits)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise SpecError(f"is not JSON: {exc}", source=str(file)) from exc
    return content if isinstance(content, dict) else {}


def is_causal(folder: Path) -> bool:
    """Whether the model in a folder is a causal one; else it is a masked one."""
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


def load_module(auto_class: str, checkpoint: Checkpoint, dtype: Any, device: str) -> Any:
    """Load a model for inference, without dropout and gradients of its weights."""
    torch, transformers = import_module("torch"), import_module("transformers")
    name = checkpoint.name
    place: dict[str, Any] = {"revision": checkpoint.commit}
    if checkpoint.commit is None:
        name, place = str(checkpoint.folder), {"local_files_only": True}
    logging = transformers.utils.logging
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # stderr is not ours.
    try:
        model, info = getattr(transformers, auto_class).from_pretrained(
            name, **place, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
        missing = sorted(info["missing_keys"])
        if missing:  # They would be random numbers.
            raise BackendError(f"{checkpoint.name}: the weights lack {', '.join(missing[:3])}")
        return model.to(device).eval().requires_grad_(False)
    except BackendError:
        raise
    except torch.OutOfMemoryError as exc:
        problem = f"does not fit into the memory of {device}"
        advice = "take dtype bfloat16 or a smaller model"
        raise BackendError(f"{checkpoint.name}: {problem}: {advice}") from exc
    except Exception as exc:  # No base class: OSError, ValueError, safetensors' own ...
        raise BackendError(f"{checkpoint.name}: cannot load the model: {first_line(exc)}") from exc
    finally:
        if bar:
            logging.enable_progress_bar()


def hash_folder(folder: Path) -> str:
    """Return the version of a local model: sha256 over its files, the first 16 hex digits."""
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
