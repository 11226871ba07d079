"""One look at an engine: a token is generated, because a server whose workers hang still takes connections."""

from __future__ import annotations

import httpx
import msgspec

from syncstack.refit.gate import VERSION_HEADER

PROMPT = [1]
BUSY = 503


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine said."""

    version: int
    serves: bool
    """Whether it generated; else it waits for its first version, or one is on its way."""
    dirty: str = ""
    """Why its weights may be mixed, in its own words."""


class _Error(msgspec.Struct):
    message: str = ""
    type: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


class NoAnswer(Exception):
    """The probe failed; the text says how."""


class Probe:
    """One engine's own server, asked over and over from one thread."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)
        self._model: str | None = None

    def ask(self) -> Answer:
        """Have one token generated. Blocks for the timeout at most, twice at the first time; raises NoAnswer."""
        try:
            body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0.0}
            if self._model is None:
                self._model = self._served_model()
            if self._model:
                body["model"] = self._model
            response = self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from None
        version = response.headers.get(VERSION_HEADER.decode(), "")
        if not version.isdigit():
            raise NoAnswer(f"status {response.status_code} without a version: {response.text[:200]}")
        if response.status_code == httpx.codes.OK:
            return Answer(version=int(version), serves=True)
        if response.status_code == BUSY:
            return self._refusal(response, int(version))
        raise NoAnswer(f"status {response.status_code}: {response.text[:200]}")

    def _served_model(self) -> str:
        """The name to ask for; "" for an engine that has no such route."""
        response = self._http.get("/v1/models")
        if response.status_code == httpx.codes.NOT_FOUND:
            return ""
        try:
            return str(response.raise_for_status().json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise NoAnswer(f"/v1/models: {error!r}") from None

    @staticmethod
    def _refusal(response: httpx.Response, version: int) -> Answer:
        try:
            error = msgspec.json.decode(response.content, type=_Refusal).error
        except msgspec.DecodeError:
            raise NoAnswer(f"status {BUSY}: {response.text[:200]}") from None
        dirty = error.message if error.type == "engine_dirty" else ""
        return Answer(version=version, serves=False, dirty=dirty)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
