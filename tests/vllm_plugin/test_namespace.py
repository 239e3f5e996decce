"""One namespace for what is interchangeable, another for what is not."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from modelkit import Llama, make_checkpoint
from vllm import EngineArgs
from vllm.config import LoRAConfig, MultiModalConfig

from kvdock.types import GroupKind, Namespace
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.layout import UnsupportedLayoutError
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import GroupPages
from kvdock_vllm.metadata import WorkerDescription
from kvdock_vllm.namespace import derive_namespace, model_facts
from kvdock_vllm.weights import files_digest

SHAPE = GroupShape(None, GroupKind.FULL_ATTENTION, 32, ("layer.0",))
PAGES = GroupPages(4096, ("layer.0:4096:bfloat16[d1=2,d2=32,d3=64]:CPU_ATTN,vec",))
TINY = Llama(layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", TINY)


def describe(model: Path, **arguments: Any) -> Any:
    settings: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "dtype": "float32",
        "kv_transfer_config": {
            "kv_connector": "KVDockConnector",
            "kv_connector_module_path": "kvdock_vllm.connector",
            "kv_role": "kv_both",
        },
        **arguments,
    }
    return EngineArgs(**settings).create_engine_config()


def derive(
    config: Any,
    *,
    strategy: ParallelStrategy | None = None,
    shape: GroupShape = SHAPE,
    pages: Callable[[int], GroupPages] = lambda worker: PAGES,
    chunk_tokens: int = 256,
) -> Namespace:
    strategy = strategy or ParallelStrategy(False, 1, 1, 0)
    workers = {
        worker: WorkerDescription(worker, (pages(worker),), strategy.use_mla)
        for worker in range(strategy.world_size)
    }
    return derive_namespace(config, model_facts(config), strategy, [shape], workers, chunk_tokens)


def test_it_says_what_the_server_has_to_know(model: Path) -> None:
    namespace = derive(describe(model))
    assert namespace.name.startswith("llama@")
    assert namespace.labels["model"] == str(model)
    assert len(namespace.name) <= 256
    assert namespace.chunk_tokens == 256
    assert namespace.kv_world_size == 1
    (group,) = namespace.groups
    assert (group.kind, group.group_idx) == (GroupKind.FULL_ATTENTION, None)
    assert group.shard_bytes == (8 * 4096,)
    assert namespace.labels["kv_dtype"] == "float32"
    assert all(len(v) <= 256 for pair in namespace.labels.items() for v in pair)


def test_another_process_derives_the_same(model: Path) -> None:
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import test_namespace as t; from pathlib import Path\n"
        f"print('name', t.derive(t.describe(Path({str(model)!r}))).name)"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "17",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert output.split("name ")[1].strip() == derive(describe(model)).name


def test_whatever_makes_the_bytes_others_makes_another_namespace(
    model: Path, tmp_path: Path
) -> None:
    plain = describe(model)
    other_weights = make_checkpoint(tmp_path / "tiny", TINY, seed=1)
    found = [
        derive(plain),
        derive(describe(other_weights)),
        derive(describe(model, dtype="bfloat16")),
        derive(describe(model, kv_cache_dtype="fp8")),
        derive(describe(model, hf_overrides={"rope_theta": 500.0})),
        derive(plain, chunk_tokens=512),
        derive(plain, shape=GroupShape(None, GroupKind.FULL_ATTENTION, 64, ("layer.0",))),
        derive(plain, shape=GroupShape(None, GroupKind.SLIDING_WINDOW, 32, ("layer.0",), 512)),
        derive(plain, shape=GroupShape(None, GroupKind.SLIDING_WINDOW, 32, ("layer.0",), 513)),
        derive(plain, pages=lambda worker: GroupPages(4096, ("other order",))),
        derive(plain, strategy=ParallelStrategy(False, 2, 1, 0)),
        derive(plain, strategy=ParallelStrategy(False, 4, 1, 0)),
    ]
    assert len({namespace.name for namespace in found}) == len(found)


def adapted(config: Any, modules: list[str]) -> None:
    config.lora_config = LoRAConfig(target_modules=modules)


def media(config: Any, **settings: Any) -> None:
    config.model_config.multimodal_config = MultiModalConfig(**settings)


def loader(config: Any, extra: dict[str, Any]) -> None:
    config.load_config.model_loader_extra_config = extra


def llama4(config: Any, longest: int, **generation: Any) -> None:
    config.model_config.hf_config.model_type = "llama4_text"
    config.model_config.max_model_len = longest
    config.model_config.override_generation_config = generation


@pytest.mark.parametrize(
    "changes",
    [
        [lambda c: None, lambda c: adapted(c, ["q_proj"]), lambda c: adapted(c, ["v_proj"])],
        [
            lambda c: media(c),
            lambda c: media(c, mm_processor_kwargs={"fps": 1}),
            lambda c: media(c, mm_processor_kwargs={"fps": 4}),
            lambda c: media(c, media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}}),
            lambda c: media(c, video_pruning_rate=0.5),
        ],
        [lambda c: None, lambda c: loader(c, {"pattern": "a"})],
        [
            lambda c: llama4(c, 32768),
            lambda c: llama4(c, 131072),
            lambda c: llama4(c, 131072, attn_temperature_tuning=False),
        ],
    ],
)
def test_settings_of_the_engine_that_change_what_a_token_sees(
    model: Path, changes: list[Callable[[Any], None]]
) -> None:
    plain = describe(model)
    names = set()
    for change in changes:
        one, same = copy.deepcopy(plain), copy.deepcopy(plain)
        change(one)
        change(same)
        assert derive(one).name == derive(same).name
        names.add(derive(one).name)
    assert len(names) == len(changes)


def test_scales_that_an_engine_measures_are_its_own(model: Path) -> None:
    config = describe(model)
    object.__setattr__(config.cache_config, "calculate_kv_scales", True)
    config.kv_transfer_config.engine_id = "the same after its next start"
    assert derive(config).name != derive(config).name


def test_a_repository_is_the_commit_of_its_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--tuned"
    for name, commit in (("main", "1" * 40), ("v2", "2" * 40)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)

    def weights(name: str = "org/tuned", **settings: Any) -> list[str]:
        config = describe(model)
        config.model_config.model = name
        config.model_config.hf_config._commit_hash = settings.pop("commit", None)
        for setting, value in settings.items():
            setattr(config.model_config, setting, value)
        found: list[str] = model_facts(config)["weights"]
        return found

    assert weights(commit="3" * 40) == ["repository", "org/tuned", "3" * 40]
    assert weights() == ["repository", "org/tuned", "1" * 40]
    assert weights(revision="v2") == ["repository", "org/tuned", "2" * 40]
    assert weights(revision="4" * 40) == ["repository", "org/tuned", "4" * 40]
    elsewhere = {"hf_config_path": "org/base", "commit": "3" * 40}
    assert weights(**elsewhere) == ["repository", "org/tuned", "1" * 40]
    assert weights(revision="v2", **elsewhere) == ["repository", "org/tuned", "2" * 40]
    assert weights("org/tuned:Q4_K", **elsewhere) == ["repository", "org/tuned:Q4_K", "1" * 40]
    assert weights("org/nowhere") != weights("org/nowhere")


def test_what_does_not_matter_does_not_part_engines(model: Path, tmp_path: Path) -> None:
    name = derive(describe(model)).name
    mounted = tmp_path / "tiny"
    mounted.symlink_to(model)
    assert derive(describe(mounted)).name == name
    assert derive(describe(model, max_model_len=128)).name == name
    assert derive(describe(model, kv_cache_dtype="auto", block_size=64)).name == name
    assert derive(describe(model, max_num_seqs=3, served_model_name="x")).name == name


def test_a_checkpoint_is_the_same_under_another_name(model: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "somewhere" / "tuned-v2"
    shutil.copytree(model, renamed)
    one, other = derive(describe(model)), derive(describe(renamed))
    assert other.name == one.name
    assert other.labels["model"] == str(renamed)


def test_checkpoints_are_told_apart_where_all_files_have_one_time(tmp_path: Path) -> None:
    # As in images and archives that are made to be reproducible.
    folders = [make_checkpoint(tmp_path / f"seed{seed}", TINY, seed=seed) for seed in (0, 1)]
    for file in (file for folder in folders for file in folder.iterdir()):
        os.utime(file, ns=(0, 0))
    weights = [next(folder.glob("*.safetensors")).stat() for folder in folders]
    assert weights[0].st_size == weights[1].st_size
    assert len({derive(describe(folder)).name for folder in folders}) == 2


def test_a_model_of_one_file_is_the_same_under_another_name(tmp_path: Path) -> None:
    file, renamed, other = (tmp_path / f"{name}.gguf" for name in ("model", "renamed", "other"))
    file.write_bytes(b"weights " * 1000)
    shutil.copy2(file, renamed)
    other.write_bytes(b"others. " * 1000)
    os.utime(other, ns=(0, file.stat().st_mtime_ns))
    assert files_digest(renamed) == files_digest(file) != files_digest(other)


def test_no_sample_is_taken_of_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    (tmp_path / "b.bin").write_bytes(b"x")
    before = files_digest(tmp_path)
    (tmp_path / "b.bin").unlink()
    assert files_digest(tmp_path) != before


def test_rewritten_weights_are_others_even_at_their_old_place(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", TINY)
    before = derive(describe(folder)).name
    make_checkpoint(folder, TINY, seed=1)
    assert derive(describe(folder)).name != before


def test_weights_of_which_nothing_is_known_are_no_other_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path / "tiny", TINY)
    made_up = describe(model, load_format="dummy")
    streamed = describe(model)
    streamed.model_config.model_weights = "s3://somewhere/else"
    by_plugin = describe(model)
    by_plugin.load_config.load_format = "tensorizer"
    known = derive(describe(model)).name
    assert "itself alone" not in caplog.text
    for weights in model.glob("*.safetensors"):
        weights.rename(weights.with_suffix(".tensors"))
    for config, why in (
        (made_up, "made up"),
        (streamed, "streamed from elsewhere"),
        (by_plugin, "load_format is tensorizer"),
        (describe(model), "kinds that are not known"),
    ):
        caplog.clear()
        assert len({known, derive(config).name, derive(config).name}) == 3
        assert why in caplog.text


def test_rotary_embeddings_that_depend_on_the_longest_prompt(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", TINY)
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    long, short = (derive(describe(folder, max_model_len=n)).name for n in (256, 128))
    assert long != short


def test_tensor_parallelism_of_mla_shares_and_needs_equal_ranks(model: Path) -> None:
    config = describe(model)
    names = {derive(config, strategy=ParallelStrategy(True, tp, 1, 0)).name for tp in (1, 2, 4)}
    assert len(names) == 1
    with pytest.raises(UnsupportedLayoutError, match="workers 0 to 1"):
        derive(
            config,
            strategy=ParallelStrategy(True, 2, 1, 0),
            pages=lambda worker: GroupPages(4096, (f"of {worker}",)),
        )


def test_pipeline_stages_have_sizes_of_their_own(model: Path) -> None:
    namespace = derive(
        describe(model),
        strategy=ParallelStrategy(False, 1, 2, 0),
        pages=lambda worker: GroupPages(1024 * (worker + 1), (f"stage {worker}",)),
    )
    assert namespace.kv_world_size == 2
    assert namespace.groups[0].shard_bytes == (8 * 1024, 8 * 2048)
