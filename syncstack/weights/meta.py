"""What a tensor is, without its bytes. No torch here: the plan, the wire and the engine's front end use it too."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes per element of every dtype that may travel, by torch's name without the ``torch.``."""

CASTABLE = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Dtypes that the source may cast among, to the one the engine holds."""


class ParamMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Name, dtype and shape of one tensor. The field names are those of vLLM's type of the same name."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 48)], ...], Meta(max_length=16)]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes; KeyError for a dtype that may not travel."""
        return self.numel * DTYPE_BYTES[self.dtype]
