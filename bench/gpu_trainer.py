"""The trainer of ``bench.gpu_engine``: a Hugging Face model on the GPU, and a Coordinator as in anybody's trainer.

``python -m bench.gpu_trainer ADDRESS MODEL SOCKETS PROFILE``. The profile is applied before torch is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.serve import Answer, confine, serve


class Trainer:
    """Random weights of the model's shapes; what an engine says with them is judged by the model itself."""

    def __init__(self, address: str, model: str, sockets: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from syncstack import Coordinator, EngineClient, ModuleSource, Settings

        config = AutoConfig.from_pretrained(model)
        with torch.device("cuda"):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
        settings = Settings.load(socket_dir=Path(sockets))
        engine = EngineClient.connect(address, settings=settings)
        self.coordinator = Coordinator(source=ModuleSource(self.model), engines=[engine], settings=settings)

    def seed(self, seed: int) -> Answer:
        """New weights, as an optimiser's step leaves them: on the GPU, and not waited for."""
        import torch

        random = torch.Generator("cuda").manual_seed(seed)
        spread = 0.8 / float(self.model.config.hidden_size) ** 0.5  # with more, attention saturates in bf16
        for name, parameter in self.model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=random)
            else:
                parameter.normal_(0, spread, generator=random)
        return {"bytes": sum(one.nbytes for one in self.model.parameters())}

    def refit(self, version: int) -> Answer:
        """One version, as the report tells it."""
        import msgspec

        (report,) = self.coordinator.refit(version)
        found: Answer = msgspec.to_builtins(report)
        return found

    def judge(self, prompts: list[list[int]], outputs: list[list[int]]) -> Answer:
        """How far below this model's own best logit the worst of an engine's greedy tokens lies, in standard deviations
        of the logits, on the engine's own text: rounding differs, so near ties part."""
        import torch

        worst = 0.0
        for prompt, output in zip(prompts, outputs, strict=True):
            text = torch.tensor([prompt + output], device="cuda")
            logits = self.model(text).logits[0, len(prompt) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(output, device="cuda")[:, None])[:, 0]
            worst = max(worst, float((logits.max(1).values - chosen).max() / logits.std()))
        return {"worst": worst}


def main() -> None:
    """Serve commands until stdin ends."""
    address, model, sockets, profile = sys.argv[1:]
    confine(profile)
    side: Any = Trainer(address, model, sockets)
    serve(side, {})


if __name__ == "__main__":
    main()
