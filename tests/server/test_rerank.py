"""Encoders behind the server: embeddings with the openai client, reranking and scores in the shapes
of vLLM, Jina and Cohere."""

import base64
import json

import httpx
import openai
import pytest
import torch

from tests.encoders import make_encoder, pooling_files, reference_embedding
from tests.server.conftest import KEYS, Server
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.server.generation.vectors import packed

DOCUMENTS = ["slow water turns the wheel", "the night is old", "a boat of stone"]


TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """One server with an embedding model and a cross-encoder, and their references."""
    moods = {"id2label": {0: "calm", 1: "rough", 2: "foggy"}}
    kinds = {
        "embedder": ("BertModel", {}),
        "reranker": ("BertForSequenceClassification", {"num_labels": 1}),
        "classifier": ("BertForSequenceClassification", moods),
    }
    paths = {name: tmp_path_factory.mktemp(name) for name in kinds}
    references = {
        name: make_encoder(paths[name], kind, **more) for name, (kind, more) in kinds.items()
    }
    pooling_files(paths["embedder"], max_length=64)
    settings = paths["embedder"] / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    named = (f"{name}={path}" for name, path in paths.items())
    running = Server(None, *named, "--max-queued", "64", "--api-key", KEYS[0]).wait()
    yield running, references, Tokenizer.load(paths["embedder"])
    running.stop()


def test_classify(encoders):
    running, references, _ = encoders
    made = post(running, "/classify", model="classifier", input=DOCUMENTS)
    assert made.status_code == 200, made.text
    raw = post(running, "/pooling", model="classifier", input=DOCUMENTS).json()["data"]
    for one, scores in zip(made.json()["data"], raw, strict=True):
        assert one["num_classes"] == 3
        assert torch.allclose(
            torch.tensor(one["probs"]), torch.tensor(scores["data"]).softmax(0), atol=1e-6
        )
        assert (
            one["label"]
            == references["classifier"].config.id2label[int(torch.tensor(scores["data"]).argmax())]
        )
    bare = post(
        running, "/classify", model="classifier", input=DOCUMENTS, use_activation=False
    ).json()["data"]
    assert [one["probs"] for one in bare] == [one["data"] for one in raw]
    (single,) = post(running, "/classify", model="reranker", input="the sea").json()["data"]
    assert (single["num_classes"], single["label"]) == (1, "LABEL_0")
    told = post(running, "/classify", model="classifier", input="the sea", pooling="none").json()[
        "error"
    ]["message"]
    assert "no embeddings" in told
    asked = post(running, "/v1/completions", model="classifier", prompt="the sea").json()["error"][
        "message"
    ]
    assert "classifies texts" in asked
    assert "/classify" in asked
    refused = post(running, "/classify", model="embedder", input="the sea")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "BadRequestError")


def post(running: Server, path: str, **body) -> httpx.Response:
    return httpx.post(running.url + path, json=body, headers={"Authorization": f"Bearer {KEYS[0]}"})


def test_ollamas_routes_know_encoders(encoders):
    running, *_ = encoders
    embedded = post(
        running, "/api/embed", model="embedder", input=["the sea", "", "the tide"]
    ).json()["embeddings"]
    expected = [
        post(running, "/v1/embeddings", model="embedder", input=text).json()
        for text in ("the sea", "", "the tide")
    ]
    assert embedded == [one["data"][0]["embedding"] for one in expected]
    shown = {
        name: post(running, "/api/show", model=name).json() for name in ("embedder", "reranker")
    }
    assert [one["capabilities"] for one in shown.values()] == [["embedding"], []]
    assert {one["details"]["family"] for one in shown.values()} == {"bert"}


def test_2048_inputs_in_one_call(encoders):
    """A request is not refused for its own inputs, whatever the queue has room for."""
    running, references, tokenizer = encoders
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEYS[0])
    texts = [f"the tide {'turns ' * (i % 40)}{'slow ' * (i % 7)}" for i in range(2048)]
    made = client.embeddings.create(model="embedder", input=texts)  # which asks for base64
    assert [one.index for one in made.data] == list(range(2048))
    assert made.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in texts)
    for i in (0, 39, 1000, 2047):
        expected = reference_embedding(references["embedder"], tokenizer.encode(texts[i]))
        assert (torch.tensor(made.data[i].embedding) - expected).abs().max() < 1e-5
    (alone,) = client.embeddings.create(model="embedder", input=texts[1000]).data
    assert alone.embedding == made.data[1000].embedding
    with pytest.raises(openai.BadRequestError, match="at most 2048"):
        client.embeddings.create(model="embedder", input=[*texts, "one more"])


FORMATS = {
    "float32": (torch.float32, torch.int32),
    "float16": (torch.float16, torch.int16),
    "bfloat16": (torch.bfloat16, torch.int16),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}


@pytest.mark.parametrize("dtype", FORMATS)
def test_vectors_are_rounded_as_torch_does(dtype):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -9, 2, 4096
    )
    # the last two are ties of four bits
    vector = [*values.tolist(), 0.0, -0.0, 1.0, -1.0, 1.0625, 1.1875]
    little = torch.tensor(vector).to(FORMATS[dtype][0]).view(FORMATS[dtype][1])
    assert (
        packed(vector, dtype, "little")
        == packed(vector, dtype, "native")
        == little.numpy().tobytes()
    )
    assert packed(vector, dtype, "big") == little.numpy().byteswap().tobytes()


def test_embeddings_as_bytes_in_vllms_formats(encoders):
    running, _, _ = encoders
    ask = {"model": "embedder", "input": DOCUMENTS}
    plain = [one["embedding"] for one in post(running, "/v1/embeddings", **ask).json()["data"]]
    expected = b"".join(packed(vector, "bfloat16", "big") for vector in plain)
    ask |= {"embed_dtype": "bfloat16", "endianness": "big"}
    given = post(running, "/v1/embeddings", **ask, encoding_format="bytes")
    assert given.content == expected
    metadata = json.loads(given.headers["metadata"])
    size = 2 * len(plain[0])
    wanted = {
        "index": 2,
        "embed_dtype": "bfloat16",
        "endianness": "big",
        "start": 2 * size,
        "end": 3 * size,
    }
    assert metadata["data"][2] == wanted | {"shape": [len(plain[0])]}
    bare = post(running, "/v1/embeddings", **ask, encoding_format="bytes_only")
    assert bare.content == expected
    assert "metadata" not in bare.headers
    as_text = [
        one["embedding"]
        for one in post(running, "/v1/embeddings", **ask, encoding_format="base64").json()["data"]
    ]
    assert b"".join(map(base64.b64decode, as_text)) == expected
    many = post(
        running, "/v1/embeddings", model="embedder", input=["a"] * 401, encoding_format="bytes"
    )
    assert (many.status_code, "400 inputs" in many.json()["error"]["message"]) == (400, True)


def test_pooling_and_vectors_that_are_not_normalized(encoders):
    running, _, _ = encoders
    (plain,) = post(running, "/pooling", model="embedder", input=DOCUMENTS[0], task="embed").json()[
        "data"
    ]
    (same,) = post(running, "/v1/embeddings", model="embedder", input=DOCUMENTS[0]).json()["data"]
    assert plain == {"index": 0, "object": "pooling", "data": same["embedding"]}
    (longer,) = post(
        running, "/v1/embeddings", model="embedder", input=DOCUMENTS[0], use_activation=False
    ).json()["data"]
    vector = torch.tensor(longer["embedding"])
    assert abs(vector.norm() - 1) > 1e-2
    assert (vector / vector.norm() - torch.tensor(plain["data"])).abs().max() < 1e-6
    (scores,) = post(running, "/pooling", model="reranker", input=DOCUMENTS[0]).json()["data"]
    assert len(scores["data"]) == 1
    for wrong in (
        {"model": "embedder", "task": "classify"},
        {"model": "reranker", "task": "embed"},
    ):
        told = post(running, "/pooling", input="a", **wrong).json()["error"]
        assert told["message"].startswith(f"Unsupported task: {wrong['task']!r}")
        assert (told["type"], told["param"]) == ("BadRequestError", "task")  # vLLM's words
    plugin = post(running, "/pooling", input="a", model="embedder", task="plugin").json()["error"][
        "message"
    ]
    assert plugin.startswith("No IOProcessor plugin installed.")


@pytest.mark.slow
def test_a_server_whose_vectors_are_of_tokens(tmp_path):
    """vLLM's token_embed and llama.cpp's --pooling none."""
    make_encoder(tmp_path, "BertModel")
    settings = tmp_path / "config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"matryoshka_dimensions": [8, 16]})
    )
    tokenizer = Tokenizer.load(tmp_path)
    running = Server(
        tmp_path, "--served-name", "embedder", "--pooler-config.task", "token_embed"
    ).wait()
    ask = {"model": "embedder", "input": DOCUMENTS[0]}
    (each,) = post(running, "/pooling", **ask, task="token_embed").json()["data"]
    rows = torch.tensor(each["data"])
    assert rows.shape == (len(tokenizer.encode(DOCUMENTS[0])), 48)
    assert torch.allclose(rows.norm(dim=1), torch.ones(len(rows)), atol=1e-6)
    # llama.cpp's are as the model has them
    (raw,) = post(running, "/embeddings", input=DOCUMENTS[0]).json()
    assert torch.allclose(
        torch.nn.functional.normalize(torch.tensor(raw["embedding"]), dim=1), rows, atol=1e-6
    )
    (text,) = post(running, "/pooling", **ask, encoding_format="base64", dimensions=8).json()[
        "data"
    ]
    assert len(base64.b64decode(text["data"])) == len(rows) * 8 * 4
    for path, wrong in (
        ("/pooling", ask | {"dimensions": 9}),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 24}),
    ):
        assert "Give one of 8, 16" in post(running, path, **wrong).json()["error"]["message"]
    assert "one vector" in post(running, "/v1/embeddings", **ask).json()["error"]["message"]
    assert post(running, "/v1/score", model="embedder", text_1="a", text_2="a").json()["data"][0][
        "score"
    ] == pytest.approx(1.0)
    told = post(running, "/pooling", **ask, task="embed").json()["error"]["message"]
    assert told.startswith("Try switching the model's pooling_task via --pooling auto")
    running.stop()


def test_a_vector_of_each_token(encoders):
    """In other servers, of requests that ask for it."""
    running, references, tokenizer = encoders
    ask = {"model": "embedder", "input": DOCUMENTS[0]}
    (each,) = post(running, "/pooling", **ask, pooling="none", use_activation=False).json()["data"]
    mean = torch.nn.functional.normalize(torch.tensor(each["data"]).mean(0), dim=0)
    assert (
        mean - reference_embedding(references["embedder"], tokenizer.encode(DOCUMENTS[0]))
    ).abs().max() < 1e-5
    told = post(running, "/pooling", **ask, task="token_embed").json()["error"]["message"]
    assert told.startswith("Try switching the model's pooling_task via --pooling none")
    many = post(
        running, "/pooling", model="embedder", input=[[5] * 60] * 1200, pooling="none"
    ).json()["error"]["message"]
    assert "3456000 values; at most 2097152" in many


def test_dimensions_base64_and_truncation(encoders):
    running, references, tokenizer = encoders
    whole = reference_embedding(references["embedder"], tokenizer.encode("the old mill"))
    short = torch.nn.functional.normalize(whole[:10], dim=0)
    for form in ("float", "base64"):
        ask = {
            "model": "embedder",
            "input": "the old mill",
            "dimensions": 10,
            "encoding_format": form,
        }
        (one,) = post(running, "/v1/embeddings", **ask).json()["data"]
        vector = one["embedding"]
        if form == "base64":
            vector = torch.frombuffer(
                bytearray(base64.b64decode(vector)), dtype=torch.float32
            ).tolist()
        assert (torch.tensor(vector) - short).abs().max() < 1e-5
    long = "water " * 500
    refused = post(running, "/v1/embeddings", model="embedder", input=long)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    cut = post(
        running,
        "/v1/embeddings",
        model="embedder",
        input=[long, "the sea"],
        truncate_prompt_tokens=-1,
    ).json()
    assert cut["usage"]["prompt_tokens"] == 64 + 4
    kept = tokenizer.encode("water " * 62)
    expected = reference_embedding(references["embedder"], kept)
    assert (torch.tensor(cut["data"][0]["embedding"]) - expected).abs().max() < 1e-5
    told = post(running, "/api/embed", model="embedder", input=long).json()
    assert (torch.tensor(told["embeddings"][0]) - expected).abs().max() < 1e-5


@torch.inference_mode()
def expected_scores(encoders, query: str) -> list[float]:
    _, references, tokenizer = encoders
    made = []
    for text in DOCUMENTS:
        ids, start = tokenizer.encode_pair(query, text, max_tokens=64)
        types = torch.tensor([[int(i >= start) for i in range(len(ids))]])
        made.append(
            references["reranker"](torch.tensor([ids]), token_type_ids=types)
            .logits[0, 0]
            .sigmoid()
            .item()
        )
    return made


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking"])
def test_rerank(encoders, path):
    running, expected = encoders[0], expected_scores(encoders, "the mill")
    made = post(
        running, path, model="reranker", query="the mill", documents=DOCUMENTS, top_n=2
    ).json()
    order = sorted(range(3), key=lambda i: -expected[i])
    assert [one["index"] for one in made["results"]] == order[:2]
    for one in made["results"]:
        assert abs(one["relevance_score"] - expected[one["index"]]) < 1e-5
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    assert made["usage"]["total_tokens"] > 0
    ask = {
        "model": "reranker",
        "query": "the mill",
        "documents": [{"text": text} for text in DOCUMENTS],
    }
    bare = post(running, path, **ask, return_documents=False).json()["results"]
    assert [(one["index"], one["relevance_score"]) for one in bare[:2]] == [
        (one["index"], one["relevance_score"]) for one in made["results"]
    ]
    assert all(one.keys() == {"index", "relevance_score"} for one in bare)
    texts = post(
        running,
        path,
        model="reranker",
        query="the mill",
        texts=DOCUMENTS,
        top_n=2,
        return_text=True,
    ).json()
    assert [(one["index"], one["score"]) for one in texts] == [
        (one["index"], one["relevance_score"]) for one in bare[:2]
    ]
    assert [one["text"] for one in texts] == [DOCUMENTS[one["index"]] for one in texts]
    assert (
        post(
            running, path, model="reranker", query="the mill", texts=DOCUMENTS, documents=DOCUMENTS
        ).status_code
        == 400
    )


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_score(encoders, path):
    running, references, tokenizer = encoders
    made = post(running, path, model="reranker", text_1="the mill", text_2=DOCUMENTS).json()
    assert made["object"] == "list"
    assert [one["object"] for one in made["data"]] == ["score"] * 3
    scores = [one["score"] for one in made["data"]]
    assert torch.allclose(
        torch.tensor(scores), torch.tensor(expected_scores(encoders, "the mill")), atol=1e-5
    )
    each = post(running, path, model="reranker", text_1=["the mill"] * 3, text_2=DOCUMENTS).json()
    assert [one["score"] for one in each["data"]] == scores
    cosine = post(running, path, model="embedder", text_1="the mill", text_2=DOCUMENTS[0]).json()[
        "data"
    ]
    first, second = (
        reference_embedding(references["embedder"], tokenizer.encode(t))
        for t in ("the mill", DOCUMENTS[0])
    )
    assert abs(cosine[0]["score"] - float(first @ second)) < 1e-5


def test_vllms_names_of_scores(encoders):
    running = encoders[0]
    scores = [
        one["score"]
        for one in post(
            running, "/score", model="reranker", text_1="the mill", text_2=DOCUMENTS
        ).json()["data"]
    ]
    for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        for path in ("/score", "/invocations"):
            made = post(
                running, path, **{"model": "reranker", first: "the mill", second: DOCUMENTS}
            ).json()
            assert [one["score"] for one in made["data"]] == scores
    ask = {"model": "reranker", "query": "the mill", "documents": DOCUMENTS}
    ranked, invoked = (post(running, path, **ask).json() for path in ("/rerank", "/invocations"))
    assert invoked["results"] == ranked["results"]
    before = post(running, "/rerank", **ask, use_activation=False).json()["results"]
    assert torch.allclose(
        torch.tensor([one["relevance_score"] for one in before]).sigmoid(),
        torch.tensor([one["relevance_score"] for one in ranked["results"]]),
        atol=1e-6,
    )
    assert any(not 0 < one["relevance_score"] < 1 for one in before)
    for body in (
        {"text_1": "a", "queries": "a", "text_2": "b"},
        {"queries": "a", "items": [[5]]},
        {"queries": "a", "query": "b"},
    ):
        assert post(running, "/score", model="reranker", **body).status_code == 400


def test_documents_are_cut_to_so_many_tokens(encoders):
    running = encoders[0]
    ask = {"model": "reranker", "query": "the mill", "documents": ["water " * 20, "sea"]}
    whole, none, cut = (
        post(running, "/rerank", **ask, **more).json()
        for more in ({}, {"max_tokens_per_doc": 0}, {"max_tokens_per_doc": 4})
    )
    assert whole["results"] == none["results"]
    assert whole["usage"]["prompt_tokens"] - cut["usage"]["prompt_tokens"] == 16
    short = post(running, "/rerank", **ask | {"documents": ["water " * 4, "sea"]}).json()["results"]
    assert [one["relevance_score"] for one in cut["results"]] == [
        one["relevance_score"] for one in short
    ]
    wrong = post(running, "/rerank", **ask, max_tokens_per_doc=-5)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens_per_doc")


def test_a_conversation_as_the_input_of_an_encoder(encoders):
    """Without the tokens that are put around a text, unless they are asked for: a template writes
    those it wants."""
    running, _, _ = encoders
    ask = {"model": "embedder", "messages": [{"role": "user", "content": "the sea"}]}
    made, invoked = (
        post(running, path, **ask).json() for path in ("/v1/embeddings", "/invocations")
    )
    assert invoked["data"] == made["data"]
    for more, input in (({}, {"add_special_tokens": False}), ({"add_special_tokens": True}, {})):
        of_text = post(
            running, "/v1/embeddings", model="embedder", input="user: the sea ", **input
        ).json()
        assert post(running, "/v1/embeddings", **ask, **more).json()["data"] == of_text["data"]
    refused = post(
        running, "/v1/embeddings", **ask, continue_final_message=True, add_generation_prompt=True
    )
    assert refused.json()["error"]["param"] == "continue_final_message"
    more = post(running, "/v1/embeddings", model="embedder", input="sea", truncate_prompt_tokens=65)
    words = "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."
    assert more.json()["error"] == {
        "message": words, "type": "BadRequestError", "param": "truncate_prompt_tokens", "code": None,
        "truncate_prompt_tokens": 65, "max_model_len": 64,
    }  # fmt: skip


def test_what_cannot_be_scored(encoders):
    running = encoders[0]
    rerank = {"model": "reranker", "query": "the mill"}
    for path, body, words in (
        ("/v1/rerank", rerank | {"documents": []}, "documents is empty"),
        ("/v1/rerank", rerank | {"documents": ["x"] * 2049}, "documents"),
        ("/v1/rerank", rerank | {"documents": ["x"], "top_n": -1}, "top_n"),
        ("/v1/rerank", rerank | {"documents": [{"image": "x"}]}, "documents"),
        ("/v1/rerank", {"model": "reranker", "documents": ["x"]}, "query"),
        ("/v1/rerank", rerank | {"documents": ["sea", "water " * 500]}, "130 tokens"),
        ("/v1/rerank", rerank | {"documents": ["sea", "x " * 10**5]}, "cannot fit"),
        (
            "/v1/score",
            {"model": "reranker", "text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
            "text_1 has 2 texts",
        ),
        ("/v1/score", {"model": "reranker", "text_1": [], "text_2": "a"}, "text_1 is empty"),
        ("/v1/embeddings", {"model": "reranker", "input": "a"}, "scores pairs of texts"),
        ("/v1/embeddings", {"model": "embedder", "input": ""}, ""),
    ):
        reply = post(running, path, **body)
        if not words:
            assert reply.status_code == 200  # [CLS] and [SEP]
            continue
        assert reply.status_code == 400, (path, body, reply.text)
        assert words in reply.json()["error"]["message"]
    cut = post(
        running,
        "/v1/rerank",
        **rerank,
        documents=["sea", "water " * 500],
        truncate_prompt_tokens=-1,
    ).json()
    assert cut["usage"]["total_tokens"] == 130 + 6


def test_an_encoder_generates_nothing(encoders):
    running = encoders[0]
    messages = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "the tide"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 5}),
        ("/api/generate", {"prompt": "the tide", "stream": False}),
        ("/v1/prompt_caches", {"name": "a", "prompt": "the tide"}),
        ("/v1/prompt_caches", {"name": "a", "messages": messages}),
    ):
        reply = post(running, path, model="embedder", **body)
        assert reply.status_code == 400, (path, reply.text)
        assert "generates no text" in reply.text
    assert httpx.get(f"{running.url}/ready").status_code == 200


def test_a_causal_model_ranks_by_cosine(server):
    ask = {"model": "tiny", "query": "abc", "documents": ["xyz", "abc", "abd"], "top_n": 0}
    results = post(server, "/v1/rerank", **ask).json()["results"]
    assert results[0]["index"] == 1
    assert abs(results[0]["relevance_score"] - 1) < 1e-6
    assert len(results) == 3
