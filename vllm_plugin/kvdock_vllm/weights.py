"""The identity of an engine's weights: of a checkpoint, or of an adapter.

Their files are too large to be read whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

_log = logging.getLogger(__name__)

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

# vLLM's loaders that read a model's own files. Others make weights up, or get them elsewhere.
_FILE_FORMATS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
    "mistral",
    "npcache",
    "pt",
    "gguf",
    "bitsandbytes",
)

# Where samples are taken (modulo the size of all files together), and their length.
_PLACES = tuple(int.from_bytes(hashlib.sha256(b"%d" % n).digest()[:8]) for n in range(256))
_SAMPLE_BYTES = 64

_COMMIT = re.compile(r"[0-9a-f]{40}")


def checkpoint(model: ModelConfig, load: LoadConfig) -> list[str]:
    """The identity of a model's weights: a repository and commit, or the files of a local folder.

    Weights can be unknown: made up, streamed from elsewhere, in files of an unknown kind, or of an
    unknown commit. Then the identity is this engine's alone (:func:`of_this_engine`).
    """
    name = str(model.model)
    path = Path(name)
    why = _why_unknown(path, model, load)
    if why is None and path.exists():
        return ["files", files_digest(path)]
    if why is None and (commit := _commit_of(model, load)) is not None:
        return ["repository", name, commit]
    _log.warning(
        "what this engine caches is for itself alone, also after its next start: the weights of "
        "%s %s, so nobody can tell whether another engine has the same",
        name,
        why or "are of no commit that is known here",
    )
    return of_this_engine()


def of_this_engine() -> list[str]:
    """An identity that nothing else has. It differs with each call."""
    return ["of this engine", secrets.token_hex(16)]


def _why_unknown(path: Path, model: Any, load: LoadConfig) -> str | None:
    if load.load_format == "dummy":
        return "are made up (load_format is dummy)"
    if load.load_format not in _FILE_FORMATS or bool(getattr(model, "model_weights", None)):
        return f"are streamed from elsewhere (load_format is {load.load_format})"
    if path.is_dir() and not any(file.suffix in _SUFFIXES for file in path.iterdir()):
        return f"are in files of kinds that are not known here ({', '.join(_SUFFIXES)} are)"
    return None


def _commit_of(model: ModelConfig, load: LoadConfig) -> str | None:
    """The commit of a repository's weights, or None if nothing tells it. It is the revision asked
    for, the commit of the configuration, or the commit of the hub's local copy.
    """
    from vllm import envs

    anything: Any = model
    revision = getattr(anything, "revision", None)
    if revision and _COMMIT.fullmatch(revision):
        return str(revision)
    # With ``hf_config_path`` the configuration is of another repository.
    commit = getattr(anything.hf_config, "_commit_hash", None)
    if commit and not getattr(anything, "hf_config_path", None):
        return str(commit)
    if envs.VLLM_USE_MODELSCOPE:
        return None  # ModelScope may have another repository of the same name
    # The name of a GGUF repository is followed by a file or a quantization.
    repository = "/".join(str(anything.model).split(":")[0].split("/")[:2])
    folder = _hub_folder(repository, revision, getattr(load, "download_dir", None))
    return folder.name if folder is not None else None


def local_folder(path: str) -> Path | None:
    """The folder where vLLM finds an adapter (vllm/lora/utils.py), or None if it is not here.
    ``path`` is a folder, perhaps under ~, or a repository in the local copy of Hugging Face's hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    return None if folder.is_absolute() else _hub_folder(path)


def _hub_folder(
    repository: str, revision: str | None = None, cache: str | None = None
) -> Path | None:
    """A repository's folder in the hub's local copy, named after the commit; None if absent."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(repository, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except Exception as error:  # of the hub's many kinds: a bad name, nothing there
        _log.info("%s is not in the hub's local copies: %s", repository, error)
        return None


def files_digest(path: Path) -> str:
    """The identity of a checkpoint's or adapter's files, independent of what ``path`` is called.

    It commits to the files' names in their folder, their sizes and times of change: a file that is
    written anew gets another identity. It also commits to samples of their bytes, since images and
    archives may give all files one time.

    ``adapter_config.json`` enters with its whole text, since it says to what an adapter applies. A
    model's own configuration enters the namespace as vLLM has read it.
    """
    digest = hashlib.sha256()
    found: list[tuple[Path, int]] = []
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if file.name == "adapter_config.json":
            digest.update(canonical([file.name, file.read_text()]))
        elif file.suffix in _SUFFIXES:
            status = file.stat()
            name = file.name if file != path else file.suffix
            digest.update(canonical([name, status.st_size, status.st_mtime_ns]))
            found.append((file, status.st_size))
    for sample in _samples(found):
        digest.update(sample)
    return digest.hexdigest()


def _samples(files: Sequence[tuple[Path, int]]) -> Iterator[bytes]:
    """Bytes of the files, whose sizes are given. Files of the same sizes are read at the same
    places.

    Two checkpoints that differ in a twentieth of their bytes can have equal samples. This is as
    likely as two in a million.
    """
    total = sum(size for _, size in files)
    places = sorted(place % total for place in _PLACES) if total else []
    begin = 0
    for file, size in files:
        with file.open("rb", buffering=0) as stream:
            for place in places:
                if begin <= place < begin + size:
                    stream.seek(place - begin)
                    yield stream.read(_SAMPLE_BYTES)
        begin += size


def last_change(path: Path) -> float:
    """Latest change of a folder, its files, or a link on the way to it; seconds since 1970."""
    found = [file.stat() for file in (path, *path.iterdir())]
    found += [link.lstat() for link in _links(path.absolute())]
    # In the hub's local copy the names of commits are beside the folders of commits.
    snapshots = path.resolve().parent
    if snapshots.name == "snapshots":
        found += [file.stat() for file in (snapshots.parent / "refs").rglob("*")]
    return max(max(status.st_mtime, status.st_ctime) for status in found)


def _links(path: Path) -> Iterator[Path]:
    """The symbolic links on the way to a path."""
    for part in (path, *path.parents):
        if part.is_symlink():
            yield part
            yield from _links(part.parent / part.readlink())


def canonical(value: object) -> bytes:
    """The same bytes for equal values, in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
