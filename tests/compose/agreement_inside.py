"""What runs inside the containers of test_agreement.py.

usage: agreement_inside.py prepare FOLDER           two models of one shape, what each answers, and a token
       agreement_inside.py refit ADDRESS URL FOLDER  one refit into the engine; prints one line of JSON
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Any

PROMPT = [5, 6, 7, 8]
NUM_TOKENS = 4


def prepare(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    answers = {}
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        model.save_pretrained(folder / name)
        answers[name] = logprobs(model)
    (folder / "answers.json").write_text(json.dumps(answers))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))


def logprobs(model: Any) -> list[float]:
    """What a greedy engine with these weights answers."""
    import torch

    ids, found = list(PROMPT), []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            scores = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1], dim=-1)
            ids.append(int(scores.argmax()))
            found.append(float(scores[ids[-1]]))
    return found


def ask(url: str) -> dict[str, Any]:
    """What the engine serves now."""
    import httpx

    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    if answer.status_code != 200:
        return {"status": answer.status_code, "text": answer.text}
    found = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return {"version": int(answer.headers["x-syncstack-version"]), "logprobs": found}


def refit(address: str, url: str, folder: Path) -> None:
    """One version of the new weights. What was really handed over is read off the wire, not out of a plan."""
    import torch
    from safetensors.torch import load_file

    from syncstack import Coordinator, EngineClient, ModuleSource, Settings
    from syncstack.wire.link import Link
    from syncstack.wire.messages import Offer

    class Weights(torch.nn.Module):
        """A checkpoint as it is: no need to wait for transformers to be imported."""

        def state_dict(self, **_: Any) -> Any:
            return load_file(folder / "new" / "model.safetensors")

    ways: set[str] = set()
    send = Link.send

    def watched(self: Link, message: Any, **options: Any) -> None:
        if isinstance(message, Offer) and options.get("fds"):
            ways.add("scm")
        elif isinstance(message, Offer) and message.handle.kind == "memfd-pidfd":
            ways.add("pidfd")
        send(self, message, **options)

    Link.send = watched  # type: ignore[method-assign]
    found: dict[str, Any] = {"before": ask(url)}
    settings = Settings.load(engine_ready_s=20)
    engine = EngineClient.connect(address, settings=settings)
    with Coordinator(source=ModuleSource(Weights()), engines=[engine], settings=settings) as coordinator:
        (report,) = coordinator.refit(engine.state().version + 1)
        found |= {"transport": report.transport, "why_not": report.why_not}
        found["proven"] = report.digests_equal == report.tensors > 0
        found |= {"ways": sorted(ways), "after": ask(url), "state_after": engine.state().step}
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        refit(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
