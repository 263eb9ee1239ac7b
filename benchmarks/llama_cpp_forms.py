"""The forms of a GGUF file that llama.cpp multiplies fastest: Q8_0, Q4_0, BF16.

    python -m benchmarks.llama_cpp_forms MODEL.gguf FOLDER [--forms Q8_0 Q4_0 BF16]

Every matrix is written in the form, from its values in MODEL; what has one dimension stays as it
is. llama.cpp repacks Q8_0 and Q4_0 for the processor at hand, and multiplies BF16 where the
processor does. For Q4_1, the form of SmolLM2's published file, it has no such kernels. Values of
another form are rounded once more, so quality is not compared with these files, only time.
"""

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

FORMS = ("Q8_0", "Q4_0", "BF16")
# Keys that the writer sets itself.
_OWN_KEYS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def write(source: Path, folder: Path, form: str) -> Path:
    """Write the model at `source` in `form`; returns the file."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    path = folder / f"{source.stem.partition('.')[0]}.{form}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in reader.fields.items():
        if not key.startswith(_OWN_KEYS):
            kind, *items = field.types
            writer.add_key_value(key, field.contents(), kind, items[-1] if items else None)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{form}"])
    for tensor in reader.tensors:
        data, kind = _converted(tensor, gguf.GGMLQuantizationType[form])
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(tensor: Any, form: gguf.GGMLQuantizationType) -> tuple[np.ndarray, Any]:
    """A tensor's data and its form: `form` if it is a matrix."""
    if len(tensor.shape) < 2:
        return np.array(tensor.data), tensor.tensor_type
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    return quantize(values, form), form


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for form in options.forms:
        path = write(options.model, options.folder, form)
        print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
