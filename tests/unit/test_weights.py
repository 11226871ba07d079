"""Names, shapes, ties, layout and digests of the weights."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncstack.errors import ManifestMismatch, ModelFolderError
from syncstack.weights.checkpoint import read_metas
from syncstack.weights.digest import Hasher, digest
from syncstack.weights.manifest import (
    ALIGNMENT,
    WHOLE,
    Share,
    TensorSlot,
    Wanted,
    check_share,
    check_slots,
    compare,
    divide,
    layout,
    part_of,
    resolve,
)
from syncstack.weights.meta import ParamMeta
from syncstack.weights.source import ModuleSource


def meta(name: str, *shape: int, dtype: str = "float32") -> ParamMeta:
    return ParamMeta(name=name, dtype=dtype, shape=shape)


class TestResolve:
    def test_d09_the_engines_dtype_wins_among_floats(self) -> None:
        (want,) = resolve([meta("w", 2)], [meta("w", 2, dtype="bfloat16")], {})
        assert want == Wanted(meta=meta("w", 2, dtype="bfloat16"), source="w")

    def test_an_integer_is_not_cast(self) -> None:
        with pytest.raises(ManifestMismatch, match=r"dtypes differ \(1\): w int8 for bfloat16"):
            resolve([meta("w", 2, dtype="int8")], [meta("w", 2, dtype="bfloat16")], {})

    def test_a_tied_name_that_the_engine_does_not_know_is_not_sent(self) -> None:
        wanted = resolve([meta("embed", 2)], [meta("embed", 2)], {"head": "embed"})
        assert [want.meta.name for want in wanted] == ["embed"]

    def test_a_tied_tensor_goes_under_the_name_that_the_engine_knows(self) -> None:
        (want,) = resolve([meta("embed", 2)], [meta("head", 2)], {"head": "embed"})
        assert (want.meta.name, want.source) == ("head", "embed")

    def test_an_engine_that_lists_both_gets_both_from_the_same_bytes(self) -> None:
        wanted = resolve([meta("embed", 4)], [meta("embed", 4), meta("head", 4)], {"head": "embed"})
        manifest = layout(wanted)
        assert [slot.offset for slot in manifest.tensors] == [0, 0]
        assert manifest.total_bytes == ALIGNMENT

    def test_d17_all_four_kinds_of_difference_are_listed_ten_at_most(self) -> None:
        source = [meta(f"extra{i}", 1) for i in range(12)] + [meta("shape", 2), meta("type", 1, dtype="int8")]
        expected = [meta(f"missing{i}", 1) for i in range(11)] + [meta("shape", 3), meta("type", 1)]
        with pytest.raises(ManifestMismatch) as caught:
            resolve(source, expected, {})
        text = str(caught.value)
        assert "missing (11): " in text
        assert "and 1 more" in text
        assert "extra (12): " in text
        assert "and 2 more" in text
        assert "shape [2] for [3]" in text
        assert "type int8 for float32" in text
        assert caught.value.exit_code == 2

    def test_d15_d16_a_renamed_model_matches_nothing_and_is_refused(self) -> None:
        with pytest.raises(ManifestMismatch, match="missing"):
            resolve([meta("model.language_model.x", 1)], [meta("model.x", 1)], {})


class TestLayout:
    @given(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=8))
    def test_slots_are_aligned_disjoint_and_inside(self, shapes: list[list[int]]) -> None:
        wanted = [Wanted(meta=meta(f"t{i}", *shape), source=f"t{i}") for i, shape in enumerate(shapes)]
        manifest = layout(wanted)
        check_slots(manifest.tensors, manifest.total_bytes)
        taken = sorted((slot.offset, slot.offset + slot.nbytes) for slot in manifest.tensors if slot.nbytes)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"dtype": "object"}, "may not travel"),
            ({"nbytes": 4}, "shape and dtype make 8"),
            ({"offset": 32}, "outside"),
            ({"offset": 64}, "outside"),
            ({"shape": (1 << 40, 1 << 40)}, "shape and dtype make"),
        ],
    )
    def test_c32_a_slot_that_lies_is_refused(self, change: dict[str, Any], match: str) -> None:
        good = {"name": "w", "dtype": "float32", "shape": (2,), "offset": 0, "nbytes": 8}
        check_slots([TensorSlot(**good)], 64)
        with pytest.raises(ValueError, match=match):
            check_slots([TensorSlot(**{**good, **change})], 64)

    def test_a_name_twice_is_refused(self) -> None:
        slot = TensorSlot(name="w", dtype="float32", shape=(), offset=0, nbytes=4)
        with pytest.raises(ValueError, match="named twice"):
            check_slots([slot, slot], 64)


class TestDigest:
    def test_it_does_not_depend_on_how_the_bytes_are_cut(self) -> None:
        data = bytes(range(256)) * 50
        hasher = Hasher()
        for at in range(0, len(data), 97):
            hasher.update(data[at : at + 97])
        assert hasher.hexdigest() == digest(data)

    def test_one_flipped_bit_and_two_swapped_bytes_are_seen(self) -> None:
        data = bytearray(b"\x01\x02" * 1000)
        good = digest(data)
        data[999] ^= 0x10
        assert digest(data) != good
        data[999] ^= 0x10
        data[0], data[1] = data[1], data[0]
        assert digest(data) != good


class TestModuleSource:
    def test_d11_tied_weights_are_one_tensor_with_two_names(self) -> None:
        module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
        module["head"].weight = module["embed"].weight
        source = ModuleSource(module)
        assert source.aliases() == {"head.weight": "embed.weight"}
        assert [m.name for m in source.metadata()] == ["embed.weight"] == [name for name, _ in source]

    def test_d14_overlapping_views_are_not_taken_for_one(self) -> None:
        module = torch.nn.Module()
        base = torch.arange(6.0)
        module.register_buffer("low", base[:4])
        module.register_buffer("high", base[2:])
        module.register_buffer("front", base[:3])
        source = ModuleSource(module)
        assert source.aliases() == {}
        assert {name: t.tolist() for name, t in source}["high"] == [2, 3, 4, 5]

    def test_d18_buffers_scalars_and_empty_tensors_are_included(self) -> None:
        module = torch.nn.Module()
        module.register_buffer("scale", torch.tensor(2.0))
        module.register_buffer("none", torch.empty(0, 4))
        module.register_buffer("also_none", torch.empty(0, 4))
        module.register_buffer("scratch", torch.zeros(3), persistent=False)
        metas = {m.name: m.shape for m in ModuleSource(module).metadata()}
        assert metas == {"scale": (), "none": (0, 4), "also_none": (0, 4)}


def write_folder(folder: Path, header: dict[str, Any], data: bytes = b"", *, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    raw = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return folder


GOOD = {"__metadata__": {"format": "pt"}, "w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}


class TestCheckpoint:
    def test_names_dtypes_and_shapes(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "m", GOOD, bytes(8))
        assert read_metas(folder) == (meta("w", 2, 2, dtype="bfloat16"),)
        assert read_metas(folder, dtype="float32") == (meta("w", 2, 2),)

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFolderError, match=r"has no config\.json"):
            read_metas(tmp_path)

    def test_no_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ModelFolderError, match=r"neither model\.safetensors nor"):
            read_metas(tmp_path)

    def test_missing_shards_are_named(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "m", GOOD, bytes(8), name="a.safetensors")
        index = {"weight_map": {"w": "a.safetensors", "x": "b.safetensors", "y": "c.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelFolderError, match="2 of 3 shards are missing: b.safetensors, c.safetensors"):
            read_metas(folder)

    def test_an_index_cannot_point_outside(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "m", GOOD, bytes(8))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../secret"}}))
        with pytest.raises(ModelFolderError, match="outside the folder"):
            read_metas(folder)

    @pytest.mark.parametrize(
        "entry",
        [
            {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 800]},
            {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 0]},
            {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 8]},
            {"dtype": "???", "shape": [2, 2], "data_offsets": [0, 8]},
            {"shape": [2, 2]},
            "w",
        ],
    )
    def test_a_header_that_lies_is_refused(self, tmp_path: Path, entry: object) -> None:
        folder = write_folder(tmp_path / "m", {"w": entry}, bytes(8))
        with pytest.raises(ModelFolderError, match="damaged"):
            read_metas(folder)

    def test_a_truncated_file_is_refused(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "m", GOOD, bytes(8))
        path = folder / "model.safetensors"
        for size in (0, 4, 20, len(path.read_bytes()) - 1):
            path.write_bytes(path.read_bytes()[:size])
            with pytest.raises(ModelFolderError, match="damaged"):
                read_metas(folder)


def test_the_engines_own_check_wants_exactly_its_tensors() -> None:
    compare([meta("w", 2)], [meta("w", 2)])
    with pytest.raises(ManifestMismatch, match="goes on serving its old weights"):
        compare([meta("w", 2), meta("v", 1)], [meta("w", 2)])


class TestShares:
    """What each of several trainer ranks sends."""

    @given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(1, 8), st.sets(st.integers(0, 39)))
    def test_every_tensor_is_sent_once_and_none_is_parted_from_its_tie(
        self, sizes: list[int], count: int, tied: set[int]
    ) -> None:
        wanted = [
            Wanted(meta=meta(f"w{i}", size), source="w0" if i in tied else f"w{i}") for i, size in enumerate(sizes)
        ]
        shares = divide(wanted, count)
        assert [share.index for share in shares] == list(range(count))
        parts = [part_of(wanted, share) for share in shares]
        assert sorted(want.meta.name for part in parts for want in part) == sorted(want.meta.name for want in wanted)
        for source in {want.source for want in wanted}:
            assert sum(any(want.source == source for want in part) for part in parts) == 1
        for share, part in zip(shares, parts, strict=True):
            check_share(share, len(part))
            assert layout(part, share).share == share

    @given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.integers(2, 8))
    def test_no_rank_has_more_than_its_part_and_one_tensor(self, sizes: list[int], count: int) -> None:
        wanted = [Wanted(meta=meta(f"w{i}", size), source=f"w{i}") for i, size in enumerate(sizes)]
        loads = [sum(want.meta.nbytes for want in part_of(wanted, share)) for share in divide(wanted, count)]
        assert max(loads) <= sum(loads) / count + 4 * max(sizes)

    @pytest.mark.parametrize(
        ("share", "num", "reason"),
        [
            (Share(index=2, count=2, places=(0,)), 1, "share 2 of 2"),
            (Share(index=0, count=2, places=(0, 1)), 1, "2 places for 1 tensors"),
            (Share(index=0, count=1, places=(0,)), 1, "1 places for 1 tensors"),
            (Share(index=0, count=2, places=(1, 1)), 2, "not in order"),
            (Share(index=0, count=2, places=(2, 1)), 2, "not in order"),
        ],
    )
    def test_a_share_that_makes_no_sense_is_refused(self, share: Share, num: int, reason: str) -> None:
        check_share(WHOLE, 7)
        with pytest.raises(ValueError, match=reason):
            check_share(share, num)
