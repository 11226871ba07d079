"""The digest: one tree of XXH3-64, by the xxhash library on a CPU and by a kernel on a GPU."""

from __future__ import annotations

import importlib.util
import os
import random
import struct
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from syncstack.errors import DeadlineExceeded, UsageError
from syncstack.weights.digest import BLOCK_BYTES, LEAF_BYTES, Hasher, digest, root
from syncstack.weights.digest_gpu import DeviceHasher, constants, leaf_table, leaf_targets, roots

MASK = (1 << 64) - 1
SIZES = (0, 1, 7, 8, 63, 64, 1023, 1024, 1025, 5000, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1)
EDGES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES]
DATA = random.Random(7).randbytes(3 * LEAF_BYTES)
WHOLE = digest(DATA)


def words(data: bytes, at: int, count: int = 8) -> np.ndarray:
    return np.frombuffer(data, dtype="<u8", count=count, offset=at)


def slow_leaf(data: bytes) -> int:
    """XXH3-64 of whole blocks as its specification says, in order, without the library."""
    numbers = constants().numpy().view(np.uint64)
    keys = numbers[:128].reshape(16, 8), numbers[128:256].reshape(16, 8)
    scramble, sums, merge = numbers[256:264], numbers[264:272].copy(), numbers[272:]
    for at in range(0, len(data), 64):
        last_block, stripe = at >= len(data) - BLOCK_BYTES, at // 64 % 16
        word = words(data, at)
        key = word ^ keys[last_block][stripe]
        sums += word.reshape(4, 2)[:, ::-1].reshape(8) + (key & np.uint64(0xFFFFFFFF)) * (key >> np.uint64(32))
        if stripe == 15 and not last_block:
            sums = (sums ^ (sums >> np.uint64(47)) ^ scramble) * np.uint64(0x9E3779B1)
    found = len(data) * 0x9E3779B185EBCA87
    for left, right in (sums ^ merge).reshape(4, 2).tolist():
        found += (left * right & MASK) ^ (left * right >> 64)
    found &= MASK
    found = (found ^ found >> 37) * 0x165667919E3779F9 & MASK
    return found ^ found >> 32


def slow(data: bytes) -> str:
    leaves = [data[at : at + LEAF_BYTES] for at in range(0, len(data), LEAF_BYTES)]
    padded = [leaf + bytes(-len(leaf) % BLOCK_BYTES) for leaf in leaves]
    return xxhash.xxh3_64_hexdigest(
        struct.pack("<Q", len(data)) + b"".join(struct.pack("<Q", slow_leaf(p)) for p in padded)
    )


def fed(data: bytes, cuts: list[int]) -> str:
    hasher = Hasher()
    for low, high in pairwise([0, *sorted(cuts), len(data)]):
        hasher.update(memoryview(data)[low:high])
    return hasher.hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_tree_that_its_page_draws(size: int) -> None:
    assert digest(DATA[:size]) == slow(DATA[:size])


@pytest.mark.parametrize(
    ("data", "known"),
    [
        (b"", "c77b3abb6f87acd9"),
        (b"a", "fd2cfdb97362ca2d"),
        (bytes(range(256)) * 4, "fb7aff41fd0d7f86"),
        (bytes(range(256)) * 4 + b"\0", "a1ddef38d6ca4e7e"),
        (bytes(LEAF_BYTES), "86eef81626a9f52d"),
        (bytes(range(256)) * 5000, "5c540cde4c1a9778"),
    ],
)
def test_known_answers(data: bytes, known: str) -> None:
    """Whoever changes one of these changes what goes over the wire: PROTOCOL_VERSION."""
    assert digest(data) == known


def test_a_leaf_is_plain_xxh3_and_the_root_is_that_of_the_leaves() -> None:
    data = DATA[: 2 * LEAF_BYTES]
    leaves = [xxhash.xxh3_64_intdigest(data[:LEAF_BYTES]), xxhash.xxh3_64_intdigest(data[LEAF_BYTES:])]
    assert digest(data) == root(len(data), struct.pack("<2Q", *leaves))


@given(st.lists(st.integers(0, len(DATA)) | st.sampled_from(EDGES), max_size=12), st.integers(0, len(DATA)))
def test_it_does_not_depend_on_how_the_bytes_are_cut(cuts: list[int], size: int) -> None:
    data = DATA[:size]
    assert fed(data, [min(cut, size) for cut in cuts]) == digest(data)


def test_it_may_be_asked_for_in_between() -> None:
    hasher = Hasher()
    for at in range(0, len(DATA), 300_007):
        hasher.update(DATA[at : at + 300_007])
        assert hasher.hexdigest() == digest(DATA[: at + 300_007])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7), (1 << 17,)])
def test_any_contiguous_buffer_will_do(shape: tuple[int, ...]) -> None:
    array = np.full(shape, 1.5, dtype=np.float32)
    assert digest(memoryview(array)) == digest(array.tobytes())


@given(st.integers(0, 8 * len(DATA) - 1))
def test_every_bit_counts(bit: int) -> None:
    data = bytearray(DATA)
    data[bit // 8] ^= 1 << bit % 8
    assert digest(data) != WHOLE


@given(st.lists(st.integers(0, len(DATA) // 8 - 1), min_size=2, max_size=2, unique=True))
def test_the_place_of_every_word_counts(places: list[int]) -> None:
    data = np.frombuffer(DATA, dtype="<u8").copy()
    data[places] = data[places[::-1]]
    assert digest(data) != WHOLE


def test_the_places_of_blocks_and_leaves_and_the_length_count() -> None:
    swapped = [DATA[BLOCK_BYTES : 2 * BLOCK_BYTES] + DATA[:BLOCK_BYTES] + DATA[2 * BLOCK_BYTES :]]
    swapped.append(DATA[LEAF_BYTES : 2 * LEAF_BYTES] + DATA[:LEAF_BYTES] + DATA[2 * LEAF_BYTES :])
    zeros = [bytes(size) for size in (*SIZES, 2 * LEAF_BYTES, 1022)]
    known = [digest(data) for data in (DATA, *swapped, *zeros)]
    assert len(set(known)) == len(known)


def test_other_threads_run_while_it_reads() -> None:
    """The library's functions that hash all at once do not let them: there is 1 step then, and over 100 here."""
    data = bytes(256 << 20)
    worker = threading.Thread(target=digest, args=(data,))
    steps = 0
    worker.start()
    while worker.is_alive():
        steps += 1
        time.sleep(0)
    assert steps > 5


def test_the_leaves_of_the_table() -> None:
    spans = ((1 << 20, 0), (5 << 20, LEAF_BYTES + 3), (7, 9), (1 << 50, LEAF_BYTES))
    assert leaf_table(spans).tolist() == [
        [5 << 20, LEAF_BYTES], [(5 << 20) + LEAF_BYTES, 3], [7, 9], [1 << 50, LEAF_BYTES]
    ]  # fmt: skip
    assert leaf_table(()).tolist() == leaf_table(((0, 0),)).tolist() == []
    hashes = torch.tensor([1, -1, 3, 4])
    packed = [struct.pack(f"<{len(leaves)}q", *leaves) for leaves in ((), (1, -1), (3,), (4,))]
    assert roots(spans, hashes) == [root(nbytes, leaves) for (_, nbytes), leaves in zip(spans, packed, strict=True)]


def test_where_the_leaves_are_copied_to() -> None:
    room = torch.zeros(2 * LEAF_BYTES + 64, dtype=torch.uint8)
    room = room[-room.data_ptr() % 16 :]
    spans = ((5 << 20, LEAF_BYTES + 3), (7, 9))
    places = [room[: LEAF_BYTES + 3], room[LEAF_BYTES + 16 :][:9]]
    base = room.data_ptr()
    assert leaf_targets(spans, places).tolist() == [base, base + LEAF_BYTES, base + LEAF_BYTES + 16]
    for wrong in ([], places[:1], [places[0], room[LEAF_BYTES + 16 :][:8]], [places[0], room[LEAF_BYTES + 17 :][:9]]):
        with pytest.raises(UsageError, match="cannot be copied to these places .*expected: 524300 bytes in 2"):
            leaf_targets(spans, wrong)


INTERPRETED = """
import random, torch
from syncstack.weights.digest import LEAF_BYTES, digest
from syncstack.weights.digest_gpu import constants, launch, leaf_table, roots

data = torch.frombuffer(bytearray(random.Random(3).randbytes(LEAF_BYTES + 4096)), dtype=torch.uint8)
assert data.data_ptr() % 16 == 0
sizes = (0, 1, 7, 8, 9, 63, 1023, 1024, 1025, 2048, 9 * 1024, 20001)
parts = [data[at : at + size] for at in (0, 1, 2, 3, 4, 5, 6, 7, 8, 16) for size in sizes]
parts += [data[16 : 16 + LEAF_BYTES], data[3 : 4 + LEAF_BYTES]]
spans = tuple((part.data_ptr(), part.nbytes) for part in parts)
found = roots(spans, launch(leaf_table(spans), constants()))
assert found == [digest(part.numpy()) for part in parts]

wholes = [torch.zeros(-(-part.nbytes // 16) * 16 + 16, dtype=torch.uint8) for part in parts]
ends = tuple((whole.data_ptr() + -whole.data_ptr() % 16, part.nbytes) for whole, part in zip(wholes, parts))
assert [end for end, _ in ends] == [whole.data_ptr() for whole in wholes]
assert found == roots(spans, launch(leaf_table(spans), constants(), targets=leaf_table(ends)[:, 0].contiguous()))
for whole, part in zip(wholes, parts):
    assert torch.equal(whole[: part.nbytes], part) and not whole[part.nbytes :].any()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not here: 190 MB, part of torch's CUDA builds and not of the CPU's",
)
def test_the_kernel_interpreted_on_the_cpu() -> None:
    """In a process of its own: triton reads the variable when it is imported."""
    root_folder = Path(__file__).parents[2]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root_folder)}
    subprocess.run([sys.executable, "-W", "error", "-c", INTERPRETED], env=environ, check=True, timeout=110)


@pytest.fixture
def hasher() -> DeviceHasher:
    return DeviceHasher(torch.device("cuda"))


def within(seconds: float) -> float:
    return time.monotonic() + seconds


needs_gpu = pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@needs_gpu
class TestOnTheGpu:
    def test_odd_sizes_at_odd_places_are_the_cpus_to_the_bit(self, hasher: DeviceHasher) -> None:
        data = torch.frombuffer(bytearray(DATA), dtype=torch.uint8).cuda()
        parts = [data[at : at + size] for at in range(18) for size in SIZES]
        assert hasher.start(parts).wait(deadline=within(60)) == [digest(part.cpu().numpy()) for part in parts]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "bool"])
    def test_any_dtype(self, hasher: DeviceHasher, dtype: str) -> None:
        values = [torch.randn(shape).to(getattr(torch, dtype)) for shape in ((), (0, 3), (5, 7, 9), (700, 1001))]
        wanted = [digest(value.reshape(-1).view(torch.uint8).numpy()) for value in values]
        assert hasher.start([value.cuda() for value in values]).wait(deadline=within(60)) == wanted

    def test_new_contents_and_new_places_are_seen(self, hasher: DeviceHasher) -> None:
        tensor = torch.zeros(3 * LEAF_BYTES, dtype=torch.uint8, device="cuda")
        other = torch.zeros_like(tensor)
        pending = hasher.start([tensor])
        tensor[LEAF_BYTES + 5] = 1
        later, elsewhere = hasher.start([tensor]), hasher.start([other])
        wanted = [digest(bytes(len(tensor))), digest(tensor.cpu().numpy()), digest(bytes(len(tensor)))]
        found = [each.wait(deadline=within(60))[0] for each in (pending, later, elsewhere)]
        assert found == wanted
        assert found[0] != found[1]

    def test_a_copy_and_its_digests_in_one_pass(self, hasher: DeviceHasher) -> None:
        data = torch.frombuffer(bytearray(DATA), dtype=torch.uint8).cuda()
        for shift in range(3):  # the same places, with other tensors
            parts = [data[at : at + size] for at in (shift, 8 + shift, 16, 17) for size in SIZES]
            wholes = [torch.zeros(-(-part.nbytes // 16) * 16 + 16, dtype=torch.uint8, device="cuda") for part in parts]
            places = [whole[: part.nbytes] for whole, part in zip(wholes, parts, strict=True)]
            found = hasher.copy(parts, places).wait(deadline=within(60))
            assert found == [digest(part.cpu().numpy()) for part in parts]
            assert all(torch.equal(place, part) for place, part in zip(places, parts, strict=True))
            assert not any(whole[part.nbytes :].any() for whole, part in zip(wholes, parts, strict=True))
            assert hasher.start(places).wait(deadline=within(60)) == found

    def test_no_place_for_a_tensor_is_refused_before_anything_is_copied(self, hasher: DeviceHasher) -> None:
        tensor, room = torch.ones(100, device="cuda"), torch.zeros(202, device="cuda")
        for places in ([], [room[:99]]):
            with pytest.raises(UsageError, match="cannot be copied to these places"):
                hasher.copy([tensor], places)
        with pytest.raises(UsageError, match="not contiguous"):
            hasher.copy([tensor], [room[:200:2]])
        assert not room.any()

    def test_what_it_cannot_read_as_it_lies_is_refused(self, hasher: DeviceHasher) -> None:
        with pytest.raises(UsageError, match=r"observed: not contiguous, on cuda:0; expected: contiguous, on cuda:0"):
            hasher.start([torch.zeros(4, 4, device="cuda").t()])
        with pytest.raises(UsageError, match="observed: contiguous, on cpu"):
            hasher.start([torch.zeros(4)])
        assert hasher.start([]).wait(deadline=within(60)) == []

    def test_the_wait_ends_at_its_deadline(self, hasher: DeviceHasher) -> None:
        tensor = torch.zeros(100, device="cuda")
        hasher.start([tensor]).wait(deadline=within(60))
        torch.cuda._sleep(2_000_000_000)
        pending = hasher.start([tensor])
        with pytest.raises(DeadlineExceeded, match="1 tensors, 400 bytes"):
            pending.wait(deadline=within(0.05))
        assert pending.wait(deadline=within(60)) == [digest(bytes(400))]
