"""GRPO in plain torch: advantages within a group, a clipped policy gradient, one optimiser step for each batch.

For each prompt the engine drew a group of samples. A sample's advantage is its reward against its group,
``(r - mean) / (std + 1e-4)``; a group whose rewards are all equal teaches nothing and is left out of the forward pass.
Every token of a sample carries its advantage A, and with ratio = p_trainer / p_engine the loss is the mean over tokens
of ``-min(ratio * A, clip(ratio, 1 - c, 1 + c) * A)``. Each batch is used once, right after it was drawn, so the ratio
would be exactly 1 if both sides computed alike. They do not (other kernels, perhaps another dtype): the ratio corrects
for that, and the clip bounds what one odd token can do. There is no KL term and no reference model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from examples.grpo.rollout import Sample

STD_FLOOR = 1e-4


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's tokens, its samples, and the reward of each."""

    prompt: tuple[int, ...]
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Groups packed for one forward pass; T is the number of completion tokens, in order of group, sample, token.

    ``row`` and ``column`` say where the hidden state that predicts each of the T tokens is.
    """

    ids: Tensor  # [rows, length] int64
    positions: Tensor  # [rows, length] int64
    mask: Tensor  # [rows, 1, length, length] bool, True: may be seen
    row: Tensor  # [T] int64
    column: Tensor  # [T] int64
    target: Tensor  # [T] int64
    behaviour: Tensor  # [T] float32
    advantage: Tensor  # [T] float32


def advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward against its group: mean 0, spread 1, or all 0 when the rewards are equal."""
    values = torch.tensor(rewards, dtype=torch.float64)
    centred = values - values.mean()
    if centred.abs().max() < STD_FLOOR:
        return [0.0] * len(rewards)
    return (centred / (values.std(correction=0) + STD_FLOOR)).tolist()  # type: ignore[no-any-return]


def pack(groups: Sequence[Group]) -> Batch:
    """Lay each group out as one row: its prompt once, then its samples, each of which sees the prompt and itself.

    The prompt is most of a short task's tokens; computing it once for the group instead of once for each sample is
    three times less work, and gives the same numbers. The last token of a sample predicts nothing and is left out.
    """
    lengths = [len(g.prompt) + sum(len(s.tokens) - 1 for s in g.samples) for g in groups]
    rows, length = len(groups), max(lengths)
    ids, positions = torch.zeros(2, rows, length, dtype=torch.int64)
    mask = torch.eye(length, dtype=torch.bool).repeat(rows, 1, 1)  # padding sees itself: no row of the softmax is empty
    row, column, target, behaviour, advantage = [], [], [], [], []
    for r, group in enumerate(groups):
        width = len(group.prompt)
        ids[r, :width] = torch.tensor(group.prompt)
        positions[r, :width] = torch.arange(width)
        mask[r, :width, :width] = torch.ones(width, width).tril().bool()
        start = width
        for sample, value in zip(group.samples, advantages(group.rewards), strict=True):
            count = len(sample.tokens) - 1
            end = start + count
            ids[r, start:end] = torch.tensor(sample.tokens[:-1], dtype=torch.int64)
            positions[r, start:end] = torch.arange(width, width + count)
            mask[r, start:end, :width] = True
            mask[r, start:end, start:end] = torch.ones(count, count).tril().bool()
            row += [r] * len(sample.tokens)
            column += [width - 1, *range(start, end)]
            target += sample.tokens
            behaviour += sample.logprobs
            advantage += [value] * len(sample.tokens)
            start = end
    return Batch(
        ids=ids,
        positions=positions,
        mask=mask[:, None],
        row=torch.tensor(row),
        column=torch.tensor(column),
        target=torch.tensor(target),
        behaviour=torch.tensor(behaviour, dtype=torch.float32),
        advantage=torch.tensor(advantage, dtype=torch.float32),
    )


def token_logprobs(model: Any, batch: Batch) -> Tensor:
    """The model's log-probability of each completion token, [T]. The output layer runs for these tokens only."""
    hidden = model.get_decoder()(
        input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    logits = model.get_output_embeddings()(hidden[batch.row, batch.column]).float()
    return -torch.nn.functional.cross_entropy(logits, batch.target, reduction="none")


def surrogate(new: Tensor, behaviour: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """The clipped loss of each token, [T]."""
    ratio = (new - behaviour).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimiser step did. ``groups`` is the number that had something to teach."""

    loss: float
    grad_norm: float
    groups: int


class Trainer:
    """A float32 model and its AdamW state. Weights change only in :meth:`update`."""

    def __init__(self, model: Any, *, learning_rate: float, clip: float = 0.2, max_grad_norm: float = 1.0) -> None:
        self.model = model
        self._clip = clip
        self._max_grad_norm = max_grad_norm
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )

    def update(self, groups: Sequence[Group]) -> Update:
        """One forward, one backward, one AdamW step on one batch. Without a usable group the weights stay."""
        useful = [group for group in groups if any(advantages(group.rewards))]
        if not useful:
            return Update(loss=0.0, grad_norm=0.0, groups=0)
        total = sum(len(sample.tokens) for group in groups for sample in group.samples)
        batch = pack(useful)
        new = token_logprobs(self.model, batch)
        loss = surrogate(new, batch.behaviour, batch.advantage, self._clip).sum() / total
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        return Update(loss=loss.item(), grad_norm=norm.item(), groups=len(useful))
