"""Two requests share chunks only where their KV is certain to be equal."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvdock.keys import chunk_keys
from kvdock_vllm.keys import ScopeReader

CHUNK = 8
DIGEST = "0123456789abcdef" * 4


def config(*, prefix_caching: bool = True, processor_cache: float = 4) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=processor_cache),
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


def request(**arguments: Any) -> Request:
    settings: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": list(range(40)),
        "sampling_params": SamplingParams(max_tokens=1),
        "pooling_params": None,
        **arguments,
    }
    return Request(**settings)


def image(identifier: str, offset: int = 10, length: int = 4) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def keys(wanted: Request, reader: ScopeReader | None = None) -> list[bytes]:
    """What the connector would make of a request."""
    scope = (reader or ScopeReader(config())).scope(wanted, CHUNK)
    limit = wanted.num_tokens if scope.limit is None else min(scope.limit, wanted.num_tokens)
    return chunk_keys(list(wanted.all_token_ids)[:limit], CHUNK, extras=scope.extras)


def adapter(folder: Path, rank: int, size: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    (folder / "adapter_model.safetensors").write_bytes(b"x" * size)
    os.utime(folder / "adapter_model.safetensors", ns=(0, 0))
    return str(folder)


ADAPTERS = Path(tempfile.mkdtemp(prefix="kvdock-adapters-"))
atexit.register(shutil.rmtree, ADAPTERS, ignore_errors=True)
SMALL = adapter(ADAPTERS / "small", rank=8, size=10)
LARGE = adapter(ADAPTERS / "large", rank=8, size=11)


def lora(name: str, path: str = SMALL, number: int = 1, **more: Any) -> LoRARequest:
    return LoRARequest(name, number, path, **more)


def embeds(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    noise = torch.randn(40, 6, generator=torch.Generator().manual_seed(seed))
    return noise.to(torch.bfloat16).to(dtype)


PLAIN = request


DIFFERENT: list[Callable[[], Request]] = [
    PLAIN,
    lambda: request(prompt_token_ids=list(range(1, 41))),
    lambda: request(cache_salt="a"),
    lambda: request(cache_salt="b"),
    lambda: request(lora_request=lora("a")),
    lambda: request(lora_request=lora("b")),
    lambda: request(lora_request=lora("a", path=LARGE)),
    lambda: request(lora_request=lora("a"), cache_salt="a"),
    lambda: request(mm_features=[image(DIGEST)]),
    lambda: request(mm_features=[image(DIGEST[::-1])]),
    lambda: request(mm_features=[image(DIGEST, offset=11)]),
    lambda: request(mm_features=[image(DIGEST, length=5)]),
    lambda: request(mm_features=[image("a:" + DIGEST)]),
    lambda: request(prompt_token_ids=None, prompt_embeds=embeds(1)),
    lambda: request(prompt_token_ids=None, prompt_embeds=embeds(2)),
]


def test_whatever_changes_the_kv_changes_the_keys() -> None:
    made = [keys(make()) for make in DIFFERENT]
    assert all(len(found) == 5 for found in made)
    # An item changes the keys from the chunk on in which it stands: compare the last.
    assert len({found[-1] for found in made}) == len(made)


def test_equal_requests_have_equal_keys_whatever_they_are_called() -> None:
    for make in DIFFERENT:
        one, other = make(), make()
        other.request_id = "s"
        assert keys(one) == keys(other)


def test_chunks_before_an_item_are_shared() -> None:
    assert keys(request(mm_features=[image(DIGEST)]))[0] == keys(PLAIN())[0]


def test_embeddings_count_as_the_model_sees_them() -> None:
    wide = request(prompt_token_ids=None, prompt_embeds=embeds(1, dtype=torch.float32))
    assert keys(wide) == keys(request(prompt_token_ids=None, prompt_embeds=embeds(1)))


def test_prompts_of_embeddings_share_a_common_beginning() -> None:
    first = embeds(1)
    second = first.clone()
    second[39] += 1
    one, other = (keys(request(prompt_token_ids=None, prompt_embeds=e)) for e in (first, second))
    assert one[:4] == other[:4]
    assert one[4] != other[4]


def test_tokens_and_embeddings_may_be_mixed() -> None:
    def mixed(seed: int) -> list[bytes]:
        is_token = [i not in range(12, 20) for i in range(40)]
        return keys(request(prompt_embeds=embeds(seed), prompt_is_token_ids=is_token))

    assert mixed(1)[0] == keys(PLAIN())[0]
    assert mixed(1)[1:] != mixed(2)[1:]
    assert mixed(1)[1] != keys(PLAIN())[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: request(sampling_params=None, pooling_params=PoolingParams(task="embed")),
        lambda: request(resumable=True),
    ],
    ids=["pooling", "resumable"],
)
def test_what_cannot_be_told_apart_is_not_cached(make: Callable[[], Request]) -> None:
    assert keys(make()) == []


@pytest.mark.parametrize("name", ["image-0", "renderer0-mm-1-image-0", "", "0123abc"])
def test_an_item_whose_name_is_no_digest_ends_what_is_cached(name: str) -> None:
    assert keys(request(mm_features=[image(name, offset=20)])) == keys(PLAIN())[:2]


def test_items_are_not_cached_where_vllm_only_counts_them() -> None:
    reader = ScopeReader(config(prefix_caching=False, processor_cache=0))
    assert keys(request(mm_features=[image(DIGEST)]), reader) == keys(PLAIN())[:1]
    for other in (config(prefix_caching=False), config(processor_cache=0)):
        assert len(keys(request(mm_features=[image(DIGEST)]), ScopeReader(other))) == 5


def test_an_adapter_is_its_files_and_not_its_place(tmp_path: Path) -> None:
    def of(path: str) -> bytes:
        return keys(request(lora_request=lora("a", path)))[0]

    first = adapter(tmp_path / "first", rank=8, size=10)
    assert of(first) == of(adapter(tmp_path / "copy", rank=8, size=10))
    assert of(first) != of(adapter(tmp_path / "other", rank=16, size=10))
    assert of(first) != of(adapter(tmp_path / "larger", rank=8, size=11))


def test_an_adapter_is_what_was_loaded(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", rank=8, size=10)
    reader = ScopeReader(config())

    def of(number: int) -> list[bytes]:
        return keys(request(lora_request=lora("a", path, number)), reader)

    loaded = of(1)
    assert loaded
    adapter(tmp_path / "a", rank=8, size=11)
    assert of(1) == loaded, "the engine still runs what it loaded"
    assert of(2) == [], "before or after the change?"


def test_an_adapter_that_is_loaded_with_its_request_is_what_its_files_are(tmp_path: Path) -> None:
    reader = ScopeReader(config())
    path = adapter(tmp_path / "a", rank=8, size=10)
    in_place = request(lora_request=lora("a", path, load_inplace=True))
    loaded = keys(in_place, reader)
    assert loaded
    assert keys(in_place, reader) == loaded


@pytest.mark.parametrize("known", [True, False])
def test_a_name_that_stood_for_other_weights_is_not_cached(known: bool, tmp_path: Path) -> None:
    """vLLM's own cache goes by the name, and may have KV of the other weights."""
    path = adapter(tmp_path / "a", rank=8, size=10)
    other = adapter(tmp_path / "b", rank=8, size=11)
    reader = ScopeReader(config())
    if not known:
        adapter(tmp_path / "a", rank=8, size=12)
    assert bool(keys(request(lora_request=lora("a", path)), reader)) is known
    assert keys(request(lora_request=lora("a", other)), reader) == []
    adapter(tmp_path / "a", rank=8, size=11)
    for more in ({"load_inplace": True}, {}):
        assert keys(request(lora_request=lora("a", path, **more)), reader) == []
    assert keys(request(lora_request=lora("new", other)), reader) != []


def test_an_adapter_whose_path_leads_elsewhere_since_the_start_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    one, other = (adapter(tmp_path / name, rank=8, size=10) for name in ("one", "other"))
    renamed, instead = (adapter(tmp_path / name, rank=8, size=10) for name in ("c", "d"))
    (tmp_path / "current").symlink_to("one")
    (tmp_path / "stable").symlink_to(tmp_path / "current")
    (tmp_path / "all").symlink_to(tmp_path)
    repository = tmp_path / "models--user--sql"
    for commit in "12":
        adapter(repository / "snapshots" / (commit * 40), rank=8, size=10)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    reader = ScopeReader(config())
    paths = [str(tmp_path / "stable"), str(tmp_path / "all" / "one"), renamed, "user/sql", other]
    before = [keys(request(lora_request=lora("a", path))) for path in paths]
    assert all(before)
    time.sleep(0.02)
    for link, target in (("current", "other"), ("all", str(tmp_path))):
        (tmp_path / "new").symlink_to(target)
        (tmp_path / "new").replace(tmp_path / link)
    Path(renamed).rename(tmp_path / "old")
    Path(instead).rename(renamed)
    (repository / "refs" / "main").write_text("2" * 40)
    found = [
        keys(request(lora_request=lora(str(number), path)), reader)
        for number, path in enumerate(paths)
    ]
    assert found[:4] == [[]] * 4
    assert found[4]
    assert one


def test_an_adapter_whose_files_changed_before_its_first_request_is_not_cached(
    tmp_path: Path,
) -> None:
    """vLLM may have loaded it at the start."""
    path = adapter(tmp_path / "a", rank=8, size=10)
    reader = ScopeReader(config())
    adapter(tmp_path / "a", rank=8, size=11)
    assert keys(request(lora_request=lora("a", path)), reader) == []
    assert len(keys(request(lora_request=lora("a", path)), ScopeReader(config()))) == 5


@pytest.mark.parametrize("named", ["~/adapters/sql", "user/sql-adapter", "/nowhere"])
def test_an_adapter_is_its_files_wherever_vllm_finds_them(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    repository = hub / "models--user--sql-adapter"
    found = []
    for commit, size in (("1" * 40, 10), ("2" * 40, 11)):
        adapter(tmp_path / "adapters" / "sql", rank=8, size=size)
        adapter(repository / "snapshots" / commit, rank=8, size=size)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        found.append(keys(request(lora_request=lora("sql", named))))
    if named == "/nowhere":
        assert found == [[], []]
    else:
        assert found[0]
        assert found[1]
        assert found[0] != found[1]
