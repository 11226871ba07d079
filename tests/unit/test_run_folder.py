"""Model folders: what a run refuses to start on, and the reference model's cache."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from examples.grpo import model
from syncstack.errors import ModelFolderError
from syncstack.run.folder import validate


def shard(path: Path, *names: str, cut: int = 0) -> None:
    """A safetensors file of 2 x 3 bfloat16 tensors; ``cut`` bytes are missing at its end."""
    header = {n: {"dtype": "BF16", "shape": [2, 3], "data_offsets": [12 * i, 12 * i + 12]} for i, n in enumerate(names)}
    raw = json.dumps(header).encode()
    data = struct.pack("<Q", len(raw)) + raw + bytes(12 * len(names))
    path.write_bytes(data[: len(data) - cut])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good folder of two shards."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (path / "tokenizer.json").write_text("{}")
    shard(path / "a.safetensors", "x", "y")
    shard(path / "b.safetensors", "z")
    index = {"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_a_good_folder_is_described(folder: Path) -> None:
    found = validate(folder)
    assert (found.name, found.architecture, found.dtype) == ("model", "LlamaForCausalLM", "bfloat16")
    assert (found.parameters, found.bytes) == (18, 36)


def test_a_single_file_is_enough(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    shard(folder / "model.safetensors", "x")
    assert validate(folder).parameters == 6


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "a.safetensors", "b.safetensors"])
def test_what_is_missing_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelFolderError, match=name):
        validate(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFolderError, match=r"model\.safetensors"):
        validate(folder)


@pytest.mark.parametrize("size", [0, 4, 8, 30])
def test_a_truncated_header_is_named(folder: Path, size: int) -> None:
    file = folder / "b.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelFolderError, match=r"b\.safetensors"):
        validate(folder)


def test_missing_tensor_bytes_are_seen(folder: Path) -> None:
    shard(folder / "b.safetensors", "z", cut=1)
    with pytest.raises(ModelFolderError, match=r"b\.safetensors"):
        validate(folder)


def test_an_index_cannot_point_outside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../a.safetensors"}}')
    with pytest.raises(ModelFolderError, match=r"\.\./a\.safetensors"):
        validate(folder)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        validate(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="not a folder"):
        validate(tmp_path / "nowhere")


def test_the_command_line_checks_a_given_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main(["--out", "/nonexistent/x", "--model", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)
    (folder / "config.json").unlink()
    assert model.main(["--out", "/nonexistent/x", "--model", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def mark(folder: Path) -> None:
    """What the end of a preparation writes."""
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / model.MARKER).write_text(json.dumps({"source": "test", "files": files}))


def test_a_prepared_folder_is_taken_as_it_is(folder: Path) -> None:
    mark(folder)
    assert model.prepare(folder).parameters == 18


def test_a_prepared_folder_that_lost_bytes_is_not_complete(folder: Path) -> None:
    mark(folder)
    assert model.is_complete(folder)
    shard(folder / "b.safetensors", "z", cut=1)
    assert not model.is_complete(folder)


def test_somebody_elses_folder_is_left_alone(folder: Path) -> None:
    before = sorted(file.name for file in folder.iterdir())
    with pytest.raises(ModelFolderError, match="left alone"):
        model.prepare(folder)
    assert sorted(file.name for file in folder.iterdir()) == before


def test_a_failed_preparation_leaves_nothing_but_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / ".m.tmp-killed"
    stale.mkdir()

    def fail(gguf: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("disk full")

    monkeypatch.setattr(model, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        model.prepare(tmp_path / "m")
    assert [entry.name for entry in tmp_path.iterdir()] == [".m.lock"]
