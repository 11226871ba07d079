"""A trainer that `syncstack launch` starts: does what it reads from a FIFO, one line at a time, and prints JSON.

usage: launched_trainer.py FIFO MODEL
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from syncstack import ModuleSource, Settings
from syncstack.fleet import Fleet
from syncstack.fleet.crew import placed
from tests.process.trainer import change, logprobs


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def serve(fleet: Fleet, fifo: Path, model: torch.nn.Module) -> None:
    fleet.attach(ModuleSource(model))
    say(ready=True, urls={state.name: fleet.url(state.name) for state in fleet.states()})
    version = 0
    while True:
        for line in fifo.read_text().split():
            if line == "refit":
                version += 1
                change(model, version)
                scores = logprobs(model)
                reports = fleet.refit(version)
                say(version=version, engines=sorted(report.engine for report in reports), logprobs=scores)
            elif line == "states":
                say(states={s.name: [s.state, s.version, s.reason] for s in fleet.states()}, current=fleet.current)
            else:
                return


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
    with placed(Settings.load()) as fleet:
        serve(fleet, Path(sys.argv[1]), model)
    say(end=True)


main()
