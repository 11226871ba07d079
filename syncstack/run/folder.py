"""Whether a Hugging Face model folder can be trained and served. No torch, no tensor bytes are read."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from syncstack.errors import ModelFolderError
from syncstack.weights.checkpoint import read_metas

TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that passed :func:`validate`. ``bytes`` is the size of its tensors."""

    path: str
    name: str
    architecture: str
    parameters: int
    bytes: int
    dtype: str
    """The dtype of most bytes."""


def validate(path: Path) -> ModelFolder:
    """Check the config, every shard that the index names, each shard's header against its size, and the tokenizer.

    Raises ModelFolderError that names what is missing or broken. The folder is never written to.
    """
    if not path.is_dir():
        raise ModelFolderError(
            f"model folder {path} cannot be used: it is not a folder here",
            consequence="Nothing was started",
            next_step="give MODEL a Hugging Face folder, or prepare one: python -m examples.grpo.model --out DIR",
        )
    metas = read_metas(path)
    if not any(all((path / name).is_file() for name in names) for names in TOKENIZERS):
        raise ModelFolderError(
            f"model folder {path} cannot be used: it has no tokenizer",
            expected="tokenizer.json, or tokenizer.model, or vocab.json with merges.txt",
            next_step="give MODEL a complete Hugging Face folder",
        )
    config = json.loads((path / "config.json").read_bytes())
    architectures = config.get("architectures") or [config.get("model_type", "unknown")]
    sizes: dict[str, int] = {}
    for meta in metas:
        sizes[meta.dtype] = sizes.get(meta.dtype, 0) + meta.nbytes
    return ModelFolder(
        path=str(path),
        name=path.resolve().name,
        architecture=str(architectures[0]),
        parameters=sum(meta.numel for meta in metas),
        bytes=sum(sizes.values()),
        dtype=max(sizes, key=lambda dtype: sizes[dtype]),
    )
