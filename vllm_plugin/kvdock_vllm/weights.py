"""Which weights an engine has: what a checkpoint or an adapter is known by.

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

# vLLM's loaders that read a model's own files. Others make weights up or have them from elsewhere.
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

# Where samples are taken, modulo the size of all files, and how much.
_PLACES = tuple(int.from_bytes(hashlib.sha256(b"%d" % n).digest()[:8]) for n in range(256))
_SAMPLE_BYTES = 64

_COMMIT = re.compile(r"[0-9a-f]{40}")


def checkpoint(model: ModelConfig, load: LoadConfig) -> list[str]:
    """Identity of a model's weights: a repository and commit, or the files of a local folder.

    Where that says nothing of the weights (made up, streamed from elsewhere, in files of a kind
    that is not known here, of no known commit) they are no other engine's.
    """
    name = str(model.model)
    path = Path(name)
    why = _why_unknown(path, model, load)
    if why is None and path.exists():
        return ["files", files_digest(path)]
    if why is None and (commit := commit_of(model, load)) is not None:
        return ["repository", name, commit]
    _log.warning(
        "what this engine caches is for itself alone, also after its next start: the weights of "
        "%s %s, so nobody can tell whether another engine has the same",
        name,
        why or "are of no commit that is known here",
    )
    return of_this_engine()


def of_this_engine() -> list[str]:
    """An identity that nothing else has, and that is another one with each call."""
    return ["of this engine", secrets.token_hex(16)]


def _why_unknown(path: Path, model: Any, load: LoadConfig) -> str | None:
    if load.load_format == "dummy":
        return "are made up (load_format is dummy)"
    if load.load_format not in _FILE_FORMATS or bool(getattr(model, "model_weights", None)):
        return f"are streamed from elsewhere (load_format is {load.load_format})"
    if path.exists() and not _has_weights(path):
        return f"are in files of kinds that are not known here ({', '.join(_SUFFIXES)} are)"
    return None


def _has_weights(path: Path) -> bool:
    return path.is_file() or any(file.suffix in _SUFFIXES for file in path.iterdir())


def commit_of(model: ModelConfig, load: LoadConfig) -> str | None:
    """The commit of a repository's weights: the revision asked for, what the configuration came
    with, or what the hub's local copy is of. None if nobody says.
    """
    from vllm import envs

    anything: Any = model
    revision = getattr(anything, "revision", None)
    if revision and _COMMIT.fullmatch(revision):
        return str(revision)
    # The configuration may be another repository's.
    if not getattr(anything, "hf_config_path", None):
        commit = getattr(anything.hf_config, "_commit_hash", None)
        if commit:
            return str(commit)
    if envs.VLLM_USE_MODELSCOPE:
        return None  # whose repositories are others, perhaps of the same name
    # GGUF repositories are named with a file or a quantization behind them.
    repository = "/".join(str(anything.model).split(":")[0].split("/")[:2])
    folder = _hub_folder(repository, revision, getattr(load, "download_dir", None))
    return folder.name if folder is not None else None


def local_folder(path: str) -> Path | None:
    """Where vLLM finds an adapter (vllm/lora/utils.py): a folder, perhaps under ~, or a repository
    of Hugging Face's hub in its local copy. None if neither is there.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    return None if folder.is_absolute() else _hub_folder(path)


def _hub_folder(
    repository: str, revision: str | None = None, cache: str | None = None
) -> Path | None:
    """A repository in the hub's local copy: a folder that is named after the commit."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(repository, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except Exception as error:  # of the hub's many kinds: a bad name, nothing there
        _log.info("%s is not in the hub's local copies: %s", repository, error)
        return None


def files_digest(path: Path) -> str:
    """Identity of a checkpoint's or adapter's files, wherever they are and whatever ``path`` is
    called.

    In a folder their names; sizes and times of change: what is written anew is something else. And
    samples of their bytes, since images and archives may give all files one time. What an adapter
    applies to enters with its text; a model's own configuration enters the namespace as vLLM has
    read it.
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
    """Bytes of files of these sizes, from places that are the same ones for the same sizes.

    There are enough samples that two checkpoints of which a twentieth differs have equal ones in
    two cases of a million.
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
    """When the latest of a folder's files was written or put there, or the folder itself or a link
    on the way to it was, in seconds since 1970.
    """
    found = [file.stat() for file in (path, *path.iterdir())]
    found += [link.lstat() for link in _links(path.absolute())]
    # The hub's names for commits stand beside its folders of them.
    snapshots = path.resolve().parent
    if snapshots.name == "snapshots":
        found += [file.stat() for file in (snapshots.parent / "refs").rglob("*")]
    return max(max(status.st_mtime, status.st_ctime) for status in found)


def _links(path: Path) -> Iterator[Path]:
    """The symbolic links by which a path is found."""
    for part in (path, *path.parents):
        if part.is_symlink():
            yield part
            yield from _links(part.parent / part.readlink())


def canonical(value: object) -> bytes:
    """Equal for equal values, in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
