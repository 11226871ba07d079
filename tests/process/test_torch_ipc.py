"""The torch drop-in between two processes, the consumer under the real restrictive filter. The driver is a fake, whose
memory is memfds; tests/unit/test_torch_ipc_gpu.py has a real one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from syncstack.compat.lender import Entry, Lender
from syncstack.compat.ticket import Ticket, pack
from syncstack.transports import pidfd
from tests.unit.fake_gpu import CHUNK, DEVICE, FakeGpu, tensor_at

ROOT = Path(__file__).parents[2]

CONSUMER = """
import sys
from syncstack.compat.borrower import Borrower
from syncstack.compat.ticket import unpack
from tests.unit.fake_gpu import FakeGpu
borrower, ticket = Borrower(FakeGpu), unpack(bytes.fromhex(sys.argv[1]))
native = borrower.works_natively(ticket)
tensor = borrower.open(ticket)
tensor[0] = 99
print(native, int(tensor.sum()), borrower._warned)
"""


@pytest.mark.parametrize(("profile", "native"), [("restrictive", False), ("permissive", True)])
def test_what_cannot_be_taken_out_of_the_producer_is_handed_over_by_it(
    tmp_path: Path, profile: str, native: bool
) -> None:
    tmp_path.chmod(0o700)
    gpu, released = FakeGpu(), list[int]()
    lender = Lender(tmp_path, gpu)
    mine = tensor_at(gpu.expandable(3) + 100, 2 * CHUNK).fill_(1)
    entry = lender.lend(Entry(mine.data_ptr(), mine.nbytes, DEVICE, lambda: released.append(1)))
    ticket = Ticket(
        native=b"\1e", pidfd=True, process=pidfd.numbers(), fd=lender.fd, socket=str(lender.path), entry=entry,
        device=DEVICE, nbytes=mine.nbytes,
    )  # fmt: skip
    run = [sys.executable, "-m", "syncstack.cli", "seccomp", "run", profile, "--", sys.executable, "-c", CONSUMER]
    run[1:3] = ["-c", "from syncstack.cli import main; main()"]
    found = subprocess.run([*run, pack(ticket).hex()], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == [str(native), str(2 * CHUNK - 1 + 99), "False"]
    assert mine[0] == 99  # one memory
    deadline = time.monotonic() + 5
    while not released:  # the consumer's end gives everything back
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lender.close()
