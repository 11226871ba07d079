"""One rank of a trainer of several, whose weights are sharded by FSDP2: for each line on its stdin it changes them,
refits together with the others, and says how that ended.

usage: ranks_trainer.py STORE WORLD RANK MODEL ADDRESS...    (STORE: a file that the ranks meet in)
A line is ``refit VERSION SEED``, or ``stop VERSION SEED`` for a source that fails in its middle on this rank.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from syncstack import Coordinator, EngineClient, Follower, ModuleSource, Ranks, Settings
from syncstack.errors import SyncstackError
from tests.process.trainer import logprobs


class Source(ModuleSource):
    """Fails after two tensors when it is told to."""

    fail = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = super().__iter__()
        for number, given in enumerate(tensors):
            if self.fail and number == 2:
                self.fail = False
                for _ in tensors:  # what the others gather
                    pass
                raise ValueError("the source is told to fail")
            yield given


def say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    store, world, rank, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    settings = Settings.load()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    source, ranks = Source(model), Ranks()
    refitter: Coordinator | Follower
    if rank:
        refitter = Follower(source=source, settings=settings, ranks=ranks)
    else:
        engines = [EngineClient.connect(address, settings=settings) for address in sys.argv[5:]]
        refitter = Coordinator(source=source, engines=engines, settings=settings, ranks=ranks)
    say(ready=True)
    for line in sys.stdin:
        what, version, seed = line.split()
        torch.manual_seed(int(seed))
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
                own = model.get_parameter(name)
                shard = distribute_tensor(parameter.detach(), own.device_mesh, own.placements, src_data_rank=None)
                own.to_local().copy_(shard.to_local())
        source.fail = what == "stop"
        begin = time.monotonic()
        try:
            reports = refitter.refit(int(version))
        except (SyncstackError, ValueError) as error:
            say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - begin)
            continue
        say(reports=msgspec.to_builtins(reports), logprobs=logprobs(whole), seconds=time.monotonic() - begin)
    refitter.close()


main()
