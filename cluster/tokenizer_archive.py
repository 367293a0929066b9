"""A served model's tokenizer as an archive of the files that Hugging Face's layout has for one.

It is written from what is served, not copied: a GGUF file holds no such files, and a chat template may be configured.
"""

from __future__ import annotations

import io
import json
import zipfile

from kvorum.cluster.model import ServedModel

# Equal models have equal archives.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


def tokenizer_archive(model: ServedModel) -> bytes:
    """Return a ZIP archive of tokenizer.json, tokenizer_config.json with the chat template, and the model's configs."""
    tokenizer = model.tokenizer
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.max_model_len,
        **tokenizer.special_tokens,
    }
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    end = {"eos_token_id": list(model.eos_token_ids)}
    files = {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(config),
        "generation_config.json": json.dumps(end),
        # A gateway that finds none looks for it elsewhere with each request.
        "config.json": json.dumps({"vocab_size": model.vocab_size, **end}),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name, _TIMESTAMP)
            archive.writestr(entry, text, compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
