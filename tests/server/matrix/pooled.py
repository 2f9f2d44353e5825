"""The APIs that make vectors and scores: how each writes a neutral request and is read, and what
every one promises."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import pytest
import torch

from tests.server.matrix.dialects import Body, Ignored, Lack, Refused, Untold
from tests.server.matrix.script import said

INPUTS = [f"a {said('text')}", f"b {said('other')}"]
LONG = "x" * 5000  # tokens, of 4096 that fit


@dataclass
class Rows:
    """A vector, or a list of one score, for each input. `num_prompt`: tokens; None: untold."""

    rows: list[list[float]]
    num_prompt: int | None = None
    are_base64: bool = False


class Pooled:
    name: ClassVar[str]
    path: ClassVar[str]
    server: ClassVar[str] = "plain"  # its fixture
    other: ClassVar[str] = "classifier"  # one whose model cannot do this
    lacks: ClassVar[dict[str, Lack]] = {}
    of_inputs: ClassVar[list[list[float]]] = [
        [3**-0.5] * 3
    ] * 2  # what it makes of INPUTS, without zeros

    def body(self, inputs: list[str]) -> Body:
        raise NotImplementedError

    def truncated(self, is_truncated: bool) -> Body:
        return {"truncate_prompt_tokens": -1} if is_truncated else {}

    def dimensions(self, num: int) -> Body:
        return {"dimensions": num}

    def as_base64(self) -> Body:
        return {"encoding_format": "base64"}

    def read(self, body: Any) -> Rows:
        raise NotImplementedError

    def refusal(self, body: Any) -> str:
        message: str = body["error"]["message"]
        return message


def _rows(values: list[Any], num_prompt: int | None = None) -> Rows:
    rows = [_floats(value) if isinstance(value, str) else value for value in values]
    return Rows(rows, num_prompt, any(isinstance(value, str) for value in values))


def _floats(text: str) -> list[float]:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).tolist()


class OpenAIEmbeddings(Pooled):
    name, path = "embeddings", "/v1/embeddings"

    def body(self, inputs: list[str]) -> Body:
        return {"input": inputs}

    def read(self, body: Any) -> Rows:
        assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
        return _rows([one["embedding"] for one in body["data"]], body["usage"]["prompt_tokens"])


class OllamaEmbed(Pooled):
    name, path = "ollama embed", "/api/embed"
    lacks: ClassVar[dict[str, Lack]] = {"base64": Ignored("encoding_format")}

    def body(self, inputs: list[str]) -> Body:
        return {"input": inputs}

    def truncated(self, is_truncated: bool) -> Body:
        return {"truncate": is_truncated}

    def read(self, body: Any) -> Rows:
        return _rows(body["embeddings"], body["prompt_eval_count"])

    def refusal(self, body: Any) -> str:
        message: str = body["error"]
        return message


class LlamaCppEmbedding(Pooled):
    name, path = "embedding", "/embedding"
    lacks: ClassVar[dict[str, Lack]] = {
        "dimensions": Refused("dimensions"),
        "base64": Refused("encoding_format"),
        "truncate": Refused("truncate_prompt_tokens"),
        "usage": Untold("token"),
    }

    def body(self, inputs: list[str]) -> Body:
        return {"content": inputs}

    def read(self, body: Any) -> Rows:
        return _rows([one["embedding"][0] for one in body])


class CohereEmbed(Pooled):
    name, path = "cohere embed", "/v2/embed"

    def body(self, inputs: list[str]) -> Body:
        return {"texts": inputs}

    def truncated(self, is_truncated: bool) -> Body:
        return {"truncate": "END" if is_truncated else "NONE"}

    def dimensions(self, num: int) -> Body:
        return {"output_dimension": num}

    def as_base64(self) -> Body:
        return {"embedding_types": ["base64"]}

    def read(self, body: Any) -> Rows:
        ((_, values),) = (
            (kind, one) for kind, one in body["embeddings"].items() if one is not None
        )
        return _rows(values, body["meta"]["billed_units"]["input_tokens"])


class Rerank(Pooled):
    """The mean of a text's tokens is its vector, so that a score counts the tokens in common."""

    name, path = "rerank", "/v1/rerank"
    of_inputs: ClassVar[list[list[float]]] = [[2 / 3], [1 / 3]]
    lacks: ClassVar[dict[str, Lack]] = {
        "dimensions": Refused("dimensions"),
        "base64": Refused("encoding_format"),
    }

    def body(self, inputs: list[str]) -> Body:
        return {"query": f"q {said('text')}", "documents": inputs}

    def read(self, body: Any) -> Rows:
        scores = {one["index"]: one["relevance_score"] for one in body["results"]}
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        return _rows([[scores[i]] for i in sorted(scores)], body["usage"]["prompt_tokens"])


class Score(Rerank):
    name, path = "score", "/v1/score"

    def body(self, inputs: list[str]) -> Body:
        return {"text_1": f"q {said('text')}", "text_2": inputs}

    def read(self, body: Any) -> Rows:
        assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
        return _rows([[one["score"]] for one in body["data"]], body["usage"]["prompt_tokens"])


class Classify(Pooled):
    name, path = "classify", "/classify"
    server, other = "classifier", "plain"
    of_inputs: ClassVar[list[list[float]]] = [[0.75, 0.25], [0.5, 0.5]]
    lacks = Rerank.lacks

    def body(self, inputs: list[str]) -> Body:
        return {"input": inputs}

    def read(self, body: Any) -> Rows:
        return _rows([one["probs"] for one in body["data"]], body["usage"]["prompt_tokens"])


POOLED: list[Pooled] = [
    OpenAIEmbeddings(), OllamaEmbed(), LlamaCppEmbedding(), CohereEmbed(), Rerank(), Score(), Classify(),
]  # fmt: skip


# ---- what every one promises


@dataclass(frozen=True)
class PooledAPI:
    url: str
    dialect: Pooled

    def post(self, inputs: list[str], **more: Any) -> httpx.Response:
        body = {"model": "tiny"} | self.dialect.body(inputs) | more
        return httpx.post(self.url + self.dialect.path, json=body)

    def ask(self, inputs: list[str], **more: Any) -> Rows:
        response = self.post(inputs, **more)
        assert response.status_code == 200, response.text
        return self.dialect.read(response.json())

    def refused(self, status: int, inputs: list[str], **more: Any) -> str:
        response = self.post(inputs, **more)
        assert response.status_code == status, response.text
        return self.dialect.refusal(response.json())


def several_inputs(api: PooledAPI) -> None:
    rows = api.ask(INPUTS).rows
    assert rows == [api.ask([one]).rows[0] for one in INPUTS]
    for row, expected in zip(rows, api.dialect.of_inputs, strict=True):
        assert [value for value in row if value] == pytest.approx(expected, abs=1e-3)


def dimensions(api: PooledAPI) -> None:
    """Of the vector of two tokens, 2 and a large one, the first dimensions have one."""
    (row,) = api.ask([f"!{said('text')}"], **api.dialect.dimensions(10)).rows
    assert row == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


def as_base64(api: PooledAPI) -> None:
    told = api.ask(INPUTS, **api.dialect.as_base64())
    assert told.are_base64
    assert told.rows == [pytest.approx(row, abs=1e-6) for row in api.ask(INPUTS).rows]


def truncate(api: PooledAPI) -> None:
    told = api.ask([LONG], **api.dialect.truncated(True))
    assert told.num_prompt in (4096, 4096 + len("q ") + 1)  # with the query


def too_long(api: PooledAPI) -> None:
    message = api.refused(400, [INPUTS[0], LONG], **api.dialect.truncated(False))
    assert "too large" in message


def usage(api: PooledAPI) -> None:
    short, long = (api.ask([text]).num_prompt for text in ("a", "a" * 11))
    assert short is not None
    assert long == short + 10


def no_such_model(api: PooledAPI) -> None:
    assert "nonesuch" in api.refused(404, INPUTS, model="nonesuch")


def wrong_kind(api: PooledAPI) -> None:
    """The server's only model cannot do it."""
    assert api.refused(400, INPUTS)


POOLED_ROWS: dict[str, Callable[[PooledAPI], None]] = {
    "several inputs": several_inputs,
    "dimensions": dimensions,
    "base64": as_base64,
    "truncate": truncate,
    "too long": too_long,
    "usage": usage,
    "no such model": no_such_model,
    "wrong kind of model": wrong_kind,
}


def check_pooled_lack(api: PooledAPI, feature: str, lack: Lack) -> None:
    made = Pooled()
    sent = {"dimensions": made.dimensions(10), "base64": made.as_base64(), "usage": {}}
    more = sent.get(feature, made.truncated(True))
    if isinstance(lack, Refused):
        assert lack.field in api.refused(400, INPUTS, **more)
        return
    response = api.post(INPUTS, **more)
    assert not api.dialect.read(response.json()).are_base64
    if isinstance(lack, Ignored):
        assert lack.field in response.headers["x-tidemill-ignored"].split(", ")
    elif isinstance(lack, Untold):
        assert lack.word not in response.text
