"""The engines' OpenAI-compatible API, as the trainer uses it: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from syncstack.errors import EngineError, EngineUnreachable

log = logging.getLogger(__name__)

VERSION_HEADER = "X-Syncstack-Version"
MIN_VERSION_HEADER = "X-Syncstack-Min-Version"
BUSY = 503
PARALLEL_REQUESTS = 8


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion: its tokens and the log-probability with which the engine drew each of them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class EngineApi:
    """A connection to one engine's ``/v1`` routes. Safe to use from several threads."""

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        self._http = httpx.Client(base_url=url.rstrip("/"), timeout=timeout_s)
        self._url = url
        self._timeout_s = timeout_s
        self._model: str | None = None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def model(self) -> str:
        """The name under which the engine serves its model."""
        if self._model is None:
            self._model = str(self._call("GET", "/v1/models")[0]["data"][0]["id"])
        return self._model

    def sample(
        self, prompt: list[int], *, n: int, max_tokens: int, stop_tokens: list[int], seed: int, version: int | None
    ) -> list[Sample]:
        """``n`` completions of one prompt, at temperature 1 from the whole vocabulary.

        Nothing is cut from the distribution (no top-k, no top-p): the log-probabilities that come back are those of the
        distribution that was sampled, so the trainer may use them as behaviour policy. ``version``: see :meth:`_call`.
        """
        body = {
            "model": self.model(),
            "prompt": prompt,
            "n": n,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": stop_tokens,
        }
        answer = self._call("POST", "/v1/completions", body, version=version)[0]
        return [_sample(choice) for choice in sorted(answer["choices"], key=lambda c: int(c["index"]))]

    def prompt_logprobs(self, tokens: list[int], *, version: int | None) -> list[float]:
        """Log-probability of each token but the first, given those before it. ``len(tokens) - 1`` values."""
        body = {
            "model": self.model(),
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        answer = self._call("POST", "/v1/completions", body, version=version)[0]
        entries = answer["choices"][0]["prompt_logprobs"]
        return [float(entry[str(token)]["logprob"]) for token, entry in zip(tokens[1:], entries[1:], strict=True)]

    def _call(self, method: str, path: str, body: Any = None, *, version: int | None = None) -> tuple[Any, int | None]:
        """The JSON answer and the weights' version that the engine said it used.

        Waits while the engine says that its weights are moving (503 with Retry-After), up to the time limit. Raises
        EngineUnreachable, or EngineError for any other refusal and for a version other than ``version``.
        """
        deadline = time.monotonic() + self._timeout_s
        # An engine that was left behind refuses by itself then, before it has generated anything.
        headers = {} if version is None else {MIN_VERSION_HEADER: str(version)}
        while True:
            try:
                response = self._http.request(method, path, json=body, headers=headers)
            except httpx.HTTPError as error:
                raise EngineUnreachable(
                    f"the engine at {self._url} did not answer {path}",
                    observed=f"{type(error).__name__}: {error}",
                    consequence="The step was lost; the weights are those of the last refit",
                    next_step="look at the engine's log",
                ) from error
            retry_s = response.headers.get("Retry-After")
            if response.status_code != BUSY or retry_s is None or time.monotonic() > deadline:
                break
            time.sleep(float(retry_s) if retry_s.isdigit() else 1.0)
        if response.status_code != httpx.codes.OK:
            raise EngineError(f"the engine refused {path}", observed=f"{response.status_code} {response.text[:300]}")
        served = response.headers.get(VERSION_HEADER)
        if version is not None and served is not None and served != str(version):
            raise EngineError(
                f"the engine answered {path} with other weights", observed=f"version {served}", expected=str(version)
            )
        return response.json(), None if served is None else int(served)


class Engines:
    """All engines of a run, by name; the prompts of a step are spread over them. Used from one thread.

    An engine that does not answer, or whose weights are not those that were asked for, gets no more of this step: its
    prompts go to the others. That is said once for each engine. Names are those of the engines' control endpoints.
    """

    def __init__(self, apis: Mapping[str, EngineApi]) -> None:
        self._apis = dict(apis)
        self._told: set[str] = set()

    def close(self) -> None:
        """Close the connections."""
        for api in self._apis.values():
            api.close()

    def sample(
        self, prompts: Sequence[list[int]], *, names: Sequence[str], n: int, seed: int, **options: Any
    ) -> list[list[Sample]]:
        """``n`` completions for each prompt, in order, from the engines of these names: see :meth:`EngineApi.sample`.

        One request a prompt, so that each has its own noise; an engine batches its share. Blocks until all are done.
        Raises the last engine's error when none is left.
        """
        left = list(names)

        def one(index: int) -> list[Sample]:
            while True:
                with lock:
                    name = left[index % len(left)]
                try:
                    return self._apis[name].sample(prompts[index], n=n, seed=seed + index * n, **options)
                except EngineError as error:
                    # Checked and dropped together: another thread may have found out about another engine.
                    with lock:
                        if set(left) <= {name}:
                            raise
                        if name in left:
                            left.remove(name)
                        self._tell(name, error)

        lock = threading.Lock()
        with ThreadPoolExecutor(PARALLEL_REQUESTS * len(left)) as pool:
            return list(pool.map(one, range(len(prompts))))

    def _tell(self, name: str, error: Exception) -> None:
        if name not in self._told:
            self._told.add(name)
            log.warning("%s gets no more prompts of this step: %s", name, error)

    def prompt_logprobs(self, tokens: list[int], *, names: Sequence[str], version: int) -> dict[str, list[float]]:
        """:meth:`EngineApi.prompt_logprobs` of each of these engines that lives: a refusal is an error, and so is
        another version; somebody who went away is not, unless it was the last."""
        found, gone = dict[str, list[float]](), list[EngineUnreachable]()
        for name in names:
            try:
                found[name] = self._apis[name].prompt_logprobs(tokens, version=version)
            except EngineUnreachable as error:
                gone.append(error)
                self._tell(name, error)
        if not found:
            raise gone[0]
        return found


def _sample(choice: dict[str, Any]) -> Sample:
    tokens = choice.get("token_ids")
    if not tokens:
        raise EngineError("the engine's completion has no token ids", next_step="use an engine with return_token_ids")
    logprobs = choice["logprobs"]["token_logprobs"]
    if len(logprobs) != len(tokens):
        raise EngineError("tokens and log-probabilities differ in number", observed=f"{len(tokens)}, {len(logprobs)}")
    return Sample(tokens=tuple(map(int, tokens)), logprobs=tuple(map(float, logprobs)))
