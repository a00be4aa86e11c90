"""The settings of a study, and the files with its declarations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from fedone_sdk import assets
from fedone_sdk.backends.transformers import WEIGHTS, find_checkpoint
from fedone_sdk.data import load_examples
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import write_whole


@cache
def declared(name: str = "studies") -> Mapping[str, Any]:
    """Return the contents of `studies.yaml`, or of another YAML file of this package."""
    import yaml

    text = (files("fedone_paper") / f"{name}.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = yaml.safe_load(text)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of the command that studies use.

    Attributes:
        model: Folder of a model for onnxruntime or the transformers library, or a GGUF file; None
            for the model in the SDK.
        data: Folder with TASK/train.jsonl and TASK/dev.jsonl for GLUE, or the study's other data.
        seeds: Number of seeds; the seeds are 0, 1, ...
        quick: Whether to run a small version, which only tests the installation.
        tasks: GLUE tasks to run instead of the study's tasks; None for the study's tasks.
        options: Settings that only some studies have (`Study.options`), as text.
        cap_queries: Cap on training queries of a whole study with a paid model.
        cap_usd: Cap on the cost of the whole study, US dollars.
        backend_file: YAML file of a paid model, with the keys of ``backend`` in RUN.yaml.
        only_report: Whether to report existing results without running trials.
    """

    model: Path | None = None
    data: Path | None = None
    seeds: int = 3
    quick: bool = False
    tasks: tuple[str, ...] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    cap_queries: int | None = None
    cap_usd: float | None = None
    backend_file: Path | None = None
    only_report: bool = False

    @property
    def model_folder(self) -> Path:
        """The model's folder; without `model`, the folder of the SDK's model."""
        return assets.path("roberta_mini") if self.model is None else self.model

    @property
    def is_gguf(self) -> bool:
        """Whether the model is a causal model for llama.cpp."""
        return self.model is not None and self.model.suffix == ".gguf"

    @property
    def is_onnx(self) -> bool:
        """Whether onnxruntime runs the model; if not, the transformers library does."""
        return any(self.model_folder.glob("*.onnx"))

    @property
    def has_weights(self) -> bool:
        """Whether the folder has the files that the transformers library loads."""
        folder = self.model_folder
        weights = any(any(folder.glob(kind)) for kind in WEIGHTS)
        return (folder / "config.json").is_file() and weights

    def preset(self, task: str) -> str:
        """Return the built-in task for the model: with a mask, or with a text to continue."""
        return f"{task}/causal" if self.is_gguf else task

    def backend(self, kind: Literal["onnx", "transformers"] | None = None) -> dict[str, Any]:
        """Return ``backend`` of a run with this model; paths are relative to the model's folder.

        Args:
            kind: The library that runs the model; None prefers onnxruntime if the folder has its
                files. Soft prompts need ``transformers``.

        Raises:
            SpecError: The folder has no model.
        """
        if self.is_gguf:
            return {"kind": "llama_cpp", "model": ".", "threads": 1}
        if kind == "onnx" or (kind is None and self.is_onnx):
            # One thread, because trials run in parallel.
            return {"kind": "onnx", "model": ".", "threads": 1}
        if not self.has_weights:
            raise ArgumentError(
                f"--model: {self.model_folder} has no config.json with weights, which the "
                "transformers library needs"
            )
        return {"kind": "transformers", "model": "."}

    def inputs(self, task: str) -> dict[str, Path]:
        """Return the input files of a trial on a GLUE task: ``train``, ``dev`` and ``model``.

        Raises:
            SpecError: There is no data for the task.
        """
        if self.data is None:
            raise ArgumentError(
                "--data: is required: hf:glue, or a folder with TASK/train.jsonl and "
                "TASK/dev.jsonl for GLUE's tasks (sst2 ...)"
            )
        found = {name: self.data / task / f"{name}.jsonl" for name in ("train", "dev")}
        for file in found.values():
            if not file.is_file():
                raise ArgumentError(f"--data: there is no {file}")
        return {**found, "model": self.model_folder}


def fetch_model(name: str) -> Path:
    """Return a model's path: `name`, or the cache folder of a model on the Hugging Face hub.

    Raises:
        SpecError: The model cannot be downloaded.
    """
    path = Path(name)
    if path.exists() or path.is_absolute() or name.count("/") != 1:
        return path
    found, hub = find_checkpoint(name), import_module("huggingface_hub")
    # The weights go into the folder of the small files.
    hub.snapshot_download(name, revision=found.commit, allow_patterns=["*.safetensors"])
    return found.folder


def fetch_data(source: str, tasks: Iterable[str], folder: Path) -> Path:
    """Return a data folder; for ``hf:glue``, first write its rows to `folder`.

    Raises:
        DataError: The rows cannot be downloaded.
        MissingExtraError: The package `datasets` is not installed.
    """
    if not source.startswith("hf:"):
        return Path(source)
    for task in tasks:
        dev = "validation_matched" if task == "mnli" else "validation"
        for name, split in ("train", "train"), ("dev", dev):
            if not (file := folder / task / f"{name}.jsonl").exists():
                rows = load_examples(f"{source}/{task}", split=split)
                write_whole(file, "".join(f"{json.dumps(row)}\n" for row in rows))
    return folder
