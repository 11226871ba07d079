"""The training job: ``syncstack run examples.grpo.job:main``.

Refit once at the start, then for each step: samples from the engines, rewards, one update, a refit, and proof that
each engine now computes with the new weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from examples.grpo.grpo import Group, Trainer
from examples.grpo.parity import Checker
from examples.grpo.rollout import EngineApi, Engines, Sample
from examples.grpo.task import Additions, Prompt, Task
from syncstack import ModuleSource
from syncstack.errors import UsageError
from syncstack.run.context import Refits, RunContext
from syncstack.run.schema import StepRecord

PROMPTS_PER_STEP = 6
SAMPLES_PER_PROMPT = 8
LEARNING_RATE = 5e-6


class Text:
    """Turns a task's prompts into tokens, and tokens into the text that is rewarded."""

    def __init__(self, tokenizer: Any, task: Task) -> None:
        self._tokenizer = tokenizer
        self._task = task
        ends = tokenizer.encode(task.end, add_special_tokens=False)
        # An end of several tokens cannot be a stop token; the model's own end token is left.
        self.stop_tokens = [t for t in (tokenizer.eos_token_id, *(ends if len(ends) == 1 else ())) if t is not None]
        if not self.stop_tokens:
            raise UsageError("the model's tokenizer has no end token", next_step="give MODEL another model")

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens, with whatever the model wants at a text's beginning."""
        return list(self._tokenizer.encode(prompt.text))

    def fixed_text(self) -> list[int]:
        """The task's example with its right answer and the end of it."""
        example = self._task.example
        answer = self._tokenizer.encode(example.answer, add_special_tokens=False)
        return [*self.encode(example), *answer, self.stop_tokens[-1]]

    def decode(self, sample: Sample) -> str:
        """The completion without the token that ended it; a special token elsewhere stays in and costs the reward."""
        tokens = sample.tokens[:-1] if sample.tokens[-1] in self.stop_tokens else sample.tokens
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


class Run:
    """One run's parts and its loop."""

    def __init__(self, ctx: RunContext, task: Task, engines: Engines) -> None:
        self.ctx, self.task, self.engines = ctx, task, engines
        with ctx.recorder.phase("load model"):
            torch.manual_seed(ctx.seed)
            self.text = Text(AutoTokenizer.from_pretrained(ctx.model), task)
            # eval(): no dropout, so that the ratio of trainer to engine is 1 up to rounding.
            self.model = AutoModelForCausalLM.from_pretrained(ctx.model, dtype=torch.float32).eval()
        self.trainer = Trainer(self.model, learning_rate=LEARNING_RATE)
        engine = ctx.engines[0].info
        self.checker = Checker(
            self.model,
            self.text.fixed_text(),
            engine_dtype=engine.dtype,
            weight_dtype=getattr(torch, engine.tensors[0].dtype),
        )

    def loop(self, coordinator: Refits) -> None:
        """All steps. Version v + 1 is the weights after step v."""
        self.refit(coordinator, 1)
        for step in range(1, self.ctx.steps + 1):
            self.step(step, coordinator.current)
            self.refit(coordinator, step + 1)

    def refit(self, coordinator: Refits, version: int) -> None:
        """Move the weights, then prove it."""
        with self.ctx.recorder.phase("refit"):
            reports = coordinator.refit(version)
        names = [report.engine for report in reports]
        with self.ctx.recorder.phase("parity"):
            scores = self.engines.prompt_logprobs(self.checker.tokens, names=names, version=version)
            parity = dict(zip(scores, self.checker.check(scores), strict=True))
        self.ctx.recorder.refit(reports, parity)

    def step(self, step: int, names: Sequence[str]) -> None:
        """Samples from version ``step``, which the engines of these names have, and one update."""
        begin = time.perf_counter()
        with self.ctx.recorder.phase("rollout"):
            groups = self.rollout(step, names)
        middle = time.perf_counter()
        with self.ctx.recorder.phase("train"):
            update = self.trainer.update(groups)
        tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
        rewards = [reward for group in groups for reward in group.rewards]
        self.ctx.recorder.step(
            StepRecord(
                step=step,
                version=step,
                reward=sum(rewards) / len(rewards),
                tokens=tokens,
                tokens_per_s=tokens / (middle - begin),
                rollout_s=middle - begin,
                train_s=time.perf_counter() - middle,
                loss=update.loss,
            )
        )

    def rollout(self, step: int, names: Sequence[str]) -> list[Group]:
        """A group of samples for each of the step's prompts, with rewards."""
        # One stream of seeds for all steps of a run, none shared between runs of neighbouring seeds.
        seed = self.ctx.seed * 1_000_000 + step * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
        prompts = self.task.prompts(seed, PROMPTS_PER_STEP)
        encoded = [self.text.encode(prompt) for prompt in prompts]
        drawn = self.engines.sample(
            encoded,
            names=names,
            n=SAMPLES_PER_PROMPT,
            max_tokens=self.task.max_tokens,
            stop_tokens=self.text.stop_tokens,
            seed=seed,
            version=step,
        )
        return [self.group(*each) for each in zip(prompts, encoded, drawn, strict=True)]

    def group(self, prompt: Prompt, tokens: Sequence[int], samples: Sequence[Sample]) -> Group:
        """Samples and what each earned."""
        rewards = tuple(self.task.reward(prompt, self.text.decode(sample)) for sample in samples)
        return Group(prompt=tuple(tokens), samples=tuple(samples), rewards=rewards)


def main(ctx: RunContext) -> None:
    """Train on additions for ``ctx.steps`` steps. Raises what the refit raises, EngineError, and ParityFailed."""
    transformers_logging.disable_progress_bar()
    names = [engine.name for engine in ctx.engines]
    engines = Engines({name: EngineApi(url) for name, url in zip(names, ctx.engine_urls, strict=True)})
    try:
        run = Run(ctx, Additions(), engines)
        with ctx.coordinator(ModuleSource(run.model)) as coordinator:
            run.loop(coordinator)
    finally:
        engines.close()
