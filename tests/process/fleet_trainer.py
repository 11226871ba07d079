"""A trainer of several engines: for each empty line on its stdin it changes its weights, says what they answer, refits,
and says how that ended. Other lines: `spoil` (change the weights only), `who` (who serves the last version), `join
ADDRESS` and `part NAME`.

usage: fleet_trainer.py LAST_VERSION MODEL ADDRESS...
"""

from __future__ import annotations

import json
import sys
import time

import msgspec
import torch
from transformers import AutoModelForCausalLM

from syncstack import Coordinator, EngineClient, ModuleSource, Settings
from syncstack.errors import SyncstackError
from tests.process.trainer import change, logprobs


def say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


def other(words: list[str], coordinator: Coordinator, model: torch.nn.Module, settings: Settings) -> None:
    if words[0] == "spoil":
        change(model, -1)
    elif words[0] == "join":
        coordinator.join(EngineClient.connect(words[1], settings=settings))
    elif words[0] == "part":
        coordinator.part(words[1])
    say(current=coordinator.current, left=coordinator.left_behind)


def main() -> None:
    settings = Settings.load()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
    engines = [EngineClient.connect(address, settings=settings) for address in sys.argv[3:]]
    with Coordinator(source=ModuleSource(model), engines=engines, settings=settings) as coordinator:
        say(ready=True)
        version = int(sys.argv[1])
        for line in sys.stdin:
            if line.strip():
                other(line.split(), coordinator, model, settings)
                continue
            version += 1
            change(model, version)
            say(logprobs=logprobs(model))
            begin = time.monotonic()
            try:
                reports = coordinator.refit(version)
            except SyncstackError as error:
                say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - begin)
                continue
            say(
                reports={report.engine: msgspec.to_builtins(report) for report in reports},
                left=coordinator.left_behind,
                seconds=time.monotonic() - begin,
            )


main()
