"""Turn a GGUF file, which many models are shipped as, into a Hugging Face folder that can be trained."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from dstrain.errors import UserError


def find_gguf(name: str) -> Path:
    """Return the GGUF file that `name` is, or that an installed package of that name ships.

    The package is not imported. Raises UserError if there is no such file, or several.
    """
    if Path(name).suffix == ".gguf":
        if not Path(name).is_file():
            raise UserError(f"{name}: no such file")
        return Path(name)
    try:
        found = [Path(str(file.locate())) for file in files(name) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        raise UserError(f"{name}: neither a .gguf file nor an installed package") from None
    if len(found) != 1:
        raise UserError(f"package {name}: ships {len(found)} .gguf files, expected one; give its path")
    return found[0]


def import_gguf(file: Path, output: Path) -> int:
    """Dequantize a GGUF file to bf16 and write the folder `output`. Returns the number of parameters."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return sum(parameter.numel() for parameter in model.parameters())
