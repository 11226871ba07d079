"""What a Hugging Face model folder holds, read from its safetensors headers. No torch, no tensor bytes.

An engine that was started from a folder expects exactly the folder's names and shapes in a refit: the loader of every
engine takes checkpoint names, while the names inside the engine (fused, sharded, packed) are its own business.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from syncstack.errors import ModelFolderError
from syncstack.weights.manifest import MAX_LISTED
from syncstack.weights.meta import CASTABLE, DTYPE_BYTES, ParamMeta

MAX_HEADER_BYTES = 100 << 20
"""The format's own limit for a header."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "U16": "uint16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def read_metas(folder: Path, *, dtype: str | None = None) -> tuple[ParamMeta, ...]:
    """Every tensor of the folder's checkpoint, in file order; ``dtype`` replaces the floating-point dtypes.

    Raises ModelFolderError when there is no readable ``config.json``, when a shard that the index names is missing,
    or when a header is damaged or announces more bytes than its file has.
    """
    folder = Path(folder)
    _read_config(folder)
    metas = [meta for shard in _shards(folder) for meta in _read_header(shard)]
    if not metas:
        raise _bad(folder, "its safetensors files hold no tensors")
    if dtype is None:
        return tuple(metas)
    return tuple(ParamMeta(name=m.name, dtype=dtype if m.dtype in CASTABLE else m.dtype, shape=m.shape) for m in metas)


def _bad(folder: Path, what: str, **parts: str) -> ModelFolderError:
    parts.setdefault("next_step", "give MODEL a complete Hugging Face folder with safetensors weights")
    return ModelFolderError(f"model folder {folder} cannot be used: {what}", **parts)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise _bad(folder, "it has no config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(folder, f"config.json cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise _bad(folder, "config.json is not an object")
    return config


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise _bad(folder, "it has neither model.safetensors nor model.safetensors.index.json")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _bad(folder, f"model.safetensors.index.json cannot be read ({error})") from None
    foreign = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if foreign:
        raise _bad(folder, f"the index names files outside the folder: {foreign[:MAX_LISTED]}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        listed = ", ".join(missing[:MAX_LISTED])
        more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
        raise _bad(folder, f"{len(missing)} of {len(names)} shards are missing: {listed}{more}")
    return [folder / name for name in names]


def _read_header(path: Path) -> list[ParamMeta]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return [_entry(name, entry, size - 8 - length) for name, entry in header.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise _bad(path.parent, f"{path.name} is damaged ({error})") from None


def _entry(name: str, entry: dict[str, Any], data_bytes: int) -> ParamMeta:
    begin, end = entry["data_offsets"]
    meta = ParamMeta(name=name, dtype=_DTYPES[entry["dtype"]], shape=tuple(int(n) for n in entry["shape"]))
    if not 0 <= begin <= end <= data_bytes or end - begin != meta.numel * DTYPE_BYTES[meta.dtype]:
        raise ValueError(f"{name}: bytes {begin}..{end} of {data_bytes} do not fit {entry['dtype']} {entry['shape']}")
    return meta
