"""Proof, after every refit, that each engine computes with the trainer's weights: both score one fixed text.

The digest already proves the bytes. This proves that they were loaded into the right places and that the engine uses
them. The trainer rounds its float32 weights as the refit does, runs the text through its own forward pass in float32,
and compares the log-probability of every token with the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from syncstack.errors import SyncstackError
from syncstack.run.recorder import Parity

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest |dlogprob| that passes, by the dtype in which the engine computes.

Float32 differs by the order of sums: 4e-5 was the largest measured over 25 versions, and one training step moved the
text by 0.02 to 0.6. Bfloat16 has 8 bits of mantissa in every activation: 0.17 was measured, which hides a step, so
there the check finds wrong tensors only. Float16 has 3 bits more; its value is scaled from bfloat16's, not measured.
"""


class ParityFailed(SyncstackError):
    """The engine's log-probabilities are not those of the weights that it was given."""


class Checker:
    """Keeps the fixed text and the trainer's scores of the version before."""

    def __init__(self, model: Any, tokens: Sequence[int], *, engine_dtype: str, weight_dtype: torch.dtype) -> None:
        self.tokens = list(tokens)
        self._model = model
        self._weight_dtype = weight_dtype
        self._tolerance = TOLERANCE[engine_dtype]
        self._previous: torch.Tensor | None = None

    def check(self, engines: Mapping[str, Sequence[float]]) -> list[Parity]:
        """Compare the scores of each engine, by its name (one for each token but the first). Raises ParityFailed.

        ``stale`` in the answer is the difference from the trainer's previous version (None for the first): what would
        have been measured if the refit had changed nothing. Where it is not clearly larger, the check sees nothing.
        """
        ours = scores(self._model, self.tokens, self._weight_dtype)
        found = [self._one(name, torch.tensor(theirs), ours) for name, theirs in engines.items()]
        self._previous = ours
        return found

    def _one(self, name: str, theirs: torch.Tensor, ours: torch.Tensor) -> Parity:
        stale = None if self._previous is None else (theirs - self._previous).abs().max().item()
        difference = (theirs - ours).abs()
        largest = difference.max().item()
        if not largest <= self._tolerance:  # also when it is not a number
            where = int(difference.argmax())
            raise ParityFailed(
                f"the log-probabilities of {name} differ from the trainer's by {largest:.3g} (at token {where + 1})",
                observed=f"{theirs[where].item():.4f}",
                expected=f"{ours[where].item():.4f} within {self._tolerance}",
                consequence="The engine does not compute with the weights that it was given; the run ends",
                next_step="compare the engine's model and dtype with the trainer's",
            )
        return Parity(max_abs_dlogprob=largest, stale=stale, tolerance=self._tolerance)


@torch.no_grad()
def scores(model: Any, tokens: Sequence[int], weight_dtype: torch.dtype) -> torch.Tensor:
    """Log-probability of each token but the first under the weights rounded to ``weight_dtype``, in float32."""
    rounded = {name: weight.to(weight_dtype).to(weight.dtype) for name, weight in model.named_parameters()}
    ids = torch.tensor([list(tokens)])
    logits = torch.func.functional_call(model, rounded, (ids,), {"use_cache": False}).logits[0, :-1].float()
    return -torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
