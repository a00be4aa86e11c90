"""The weights of a GGUF file in other forms, for comparison."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def as_folder(model: Path, folder: Path) -> Path:
    """A folder for transformers and vLLM with the file's weights in float32."""
    torch, transformers = import_module("torch"), import_module("transformers")
    place = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # Else it would be saved as a quantised model, which it no longer is.
    loaded.is_quantized, loaded.hf_quantizer = False, None
    del loaded.config.quantization_config
    loaded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def as_float32(model: Path, target: Path) -> Path:
    """A GGUF file with the same weights in float32."""
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader(str(model))
    writer = gguf.GGUFWriter(str(target), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name in ("general.architecture", "general.file_type") or "GGUF." in field.name:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(0)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
