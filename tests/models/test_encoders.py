"""Encoders against Transformers in float32, on small random models: embeddings, scores, and equal
bits alone and among others."""

import dataclasses
import json

import pytest
import torch

from tests.encoders import make_encoder, pooling_files, reference_embedding, word_piece
from tests.helpers import engine_config, load_model, make_core, run
from tidemill.engine.llm import LLM
from tidemill.errors import CheckpointError, ConfigError, ContextTooLong, InvalidRequest
from tidemill.frontend.scoring import check_scores
from tidemill.frontend.tokenizer import Tokenizer, _fitted
from tidemill.kernels.glu import activate, activate_reference
from tidemill.kernels.norm import add_layer_norm, add_layer_norm_reference
from tidemill.models.registry import model_class
from tidemill.types.inputs import second_text
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.weights.checkpoint import open_checkpoint

MORE = {
    "Electra": {"embedding_size": 32},
    "Albert": {"embedding_size": 32, "num_hidden_layers": 4, "num_hidden_groups": 2},
}


def prompts() -> list[list[int]]:
    """Around the kernels' blocks of 32 keys and tiles of queries, and as long as the model takes."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(4, 90, (num,), generator=generator).tolist()
        for num in (1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 128)
    ]


def pooled(
    core, asked: dict[str, list[int]], how: str, pair_start: int = 0, **more
) -> dict[str, list[float]]:
    params = SamplingParams(max_tokens=1, pooling=how, **more)
    answers = run(
        core,
        {name: (ids, params, second_text(pair_start, len(ids))) for name, ids in asked.items()},
    )
    return {name: answer.last.embedding for name, answer in answers.items()}


ENCODERS = [
    "BertModel", "RobertaModel", "MPNetModel", "BertForMaskedLM", "DistilBertModel", "DistilBertForMaskedLM", "ElectraModel",
    "ElectraForPreTraining", "AlbertModel", "AlbertForMaskedLM", "CamembertModel",
]  # fmt: skip


@pytest.fixture(scope="module", params=ENCODERS)
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    reference = make_encoder(
        path, request.param, **MORE.get(request.param.partition("For")[0].removesuffix("Model"), {})
    )
    return getattr(reference, reference.base_model_prefix, reference), path


def test_embeddings_equal_transformers_alone_and_among_others(saved, backend):
    reference, path = saved
    model, asked = load_model(path), {str(i): ids for i, ids in enumerate(prompts())}
    core = make_core(model, token_budget=200, max_requests=16)  # several steps: some inputs wait
    together = pooled(core, asked, "mean")
    for name, ids in asked.items():
        assert (
            torch.tensor(together[name]) - reference_embedding(reference, ids)
        ).abs().max() < 1e-5
    for name in ("0", "3", "5", "10"):
        assert (
            pooled(make_core(model, max_requests=16), {name: asked[name]}, "mean")[name]
            == together[name]
        )
    assert all(item.samples for item in _plans(core, asked)), "an input was computed in parts"


def _plans(core, asked):
    for name, ids in asked.items():
        core.submit(
            Submit(name, ids, SamplingParams(max_tokens=1, pooling="mean"), priority=1_000_000)
        )
    while core.has_work:
        plan = core.scheduler.plan()
        result = core.runner.collect(core.runner.launch(plan))
        core.scheduler.commit(plan, result.tokens)
        yield from plan.items


def test_a_forward_pass_is_recorded(saved):
    assert make_core(load_model(saved[1])).runner.fallback == ""


def test_cls_pooling_and_vectors_that_are_not_normalized(tmp_path, backend):
    reference = make_encoder(tmp_path, "BertModel")
    pooling_files(tmp_path, "cls_token", normalize=False, max_length=64)
    model = load_model(tmp_path)
    assert (model.config.pooler.how, model.config.max_context) == ("cls", 64)
    for how in ("cls", "mean"):
        made = pooled(make_core(model), {"x": prompts()[5]}, how)["x"]
        expected = reference_embedding(reference, prompts()[5], how, normalize=False)
        assert (torch.tensor(made) - expected).abs().max() < 1e-5 * expected.abs().max()


WITHOUT_TYPES = ["DistilBert", "MPNet"]
CROSS_ENCODERS = ["Bert", "XLMRoberta", "Electra", "Albert", "Camembert", *WITHOUT_TYPES]


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_scores_of_pairs_equal_transformers(family, tmp_path, backend):
    more = {} if family in WITHOUT_TYPES else {"type_vocab_size": 2}
    reference = make_encoder(
        tmp_path, f"{family}ForSequenceClassification", num_labels=1, **more | MORE.get(family, {})
    )
    llm = LLM(str(tmp_path), progress=False)
    first, second = "the old mill", ["slow water turns the wheel", "night", "a boat of stone " * 20]
    made = llm.score(first, second)
    assert [one.outputs.score for one in llm.score([first] * 3, second)] == [
        one.score for one in made
    ]
    for text, one in zip(second, made, strict=True):
        ids, start = llm.tokenizer.encode_pair(first, text, max_tokens=128)
        types = torch.tensor([[int(i >= start) for i in range(len(ids))]])
        with torch.inference_mode():
            more = {"token_type_ids": types} if family not in WITHOUT_TYPES else {}
            expected = reference(torch.tensor([ids]), **more).logits[0].sigmoid()
        assert one.prompt_token_ids == ids
        assert abs(one.score - expected.item()) < 1e-5
    with pytest.raises(InvalidRequest, match="scores pairs of texts"):
        llm.embed("text")


def test_a_classifier_of_several_labels_has_no_score(tmp_path):
    make_encoder(tmp_path, "BertForSequenceClassification", num_labels=3)
    with pytest.raises(InvalidRequest, match="classifier of 3 labels"):
        check_scores(load_model(tmp_path).config)


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_probabilities_of_a_classifiers_labels(tmp_path, problem):
    reference = make_encoder(
        tmp_path, "BertForSequenceClassification", num_labels=3, problem_type=problem
    )
    llm = LLM(str(tmp_path), progress=False)
    texts = ["the old mill", "night"]
    made, tensors = llm.classify(texts), llm.encode(texts)
    with pytest.raises(InvalidRequest, match="no embeddings"):
        llm.encode(texts, pooling_task="embed")
    for text, one, other in zip(texts, made, tensors, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([llm.tokenizer.encode(text)])).logits[0]
        expected = logits.softmax(-1) if problem.startswith("single") else logits.sigmoid()
        assert one.outputs.num_classes == 3
        assert one.outputs.probs == pytest.approx(expected.tolist(), abs=1e-5)
        assert other.outputs.data.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_truncated_pairs_are_those_of_the_tokenizer(tmp_path):
    from tokenizers import Tokenizer as Backend

    word_piece(tmp_path)
    backend, ours = Backend.from_file(str(tmp_path / "tokenizer.json")), Tokenizer.load(tmp_path)
    texts = ["sea", "the tide turns " * 3, "old stone mill " * 8]
    for most in (5, 8, 16, 33):
        backend.enable_truncation(most)
        for one in texts:
            assert ours.encode_cut(one, most) == backend.encode(one).ids
            for other in texts:
                expected = backend.encode(one, other)
                ids, start = ours.encode_pair(one, other, max_tokens=most, truncate=True)
                assert ids == expected.ids
                assert start == expected.type_ids.index(1)
    ids, _ = ours.encode_pair("the sea " * 10**5, "old mill " * 10**5, max_tokens=16, truncate=True)
    assert len(ids) == 16
    assert ours.encode_cut(texts[2], 5, side="left")[-2:] == ours.encode("mill")[-2:]
    assert _fitted(10, 2, 8) == (6, 2)


def test_llm_embeds_many_texts_and_scores_by_cosine(tmp_path):
    reference = make_encoder(tmp_path, "BertModel")
    pooling_files(tmp_path, max_length=32)
    llm = LLM(str(tmp_path), progress=False)
    texts = [f"the tide {'turns ' * (i % 7)}{'old ' * (i % 3)}" for i in range(2500)]
    made = llm.embed(texts)
    assert len(made) == 2500
    for i in (0, 20, 2499):
        assert made[i].embedding == made[i % 21].embedding
        expected = reference_embedding(reference, llm.tokenizer.encode(texts[i]))
        assert (torch.tensor(made[i].outputs.embedding) - expected).abs().max() < 1e-5
    (scored,) = llm.score(texts[5], texts[8])
    cosine = torch.nn.functional.cosine_similarity(
        *(torch.tensor(made[i].embedding).double() for i in (5, 8)), dim=0
    )
    assert abs(scored.score - cosine.item()) < 1e-6
    long = "sea " * 40
    with pytest.raises(ContextTooLong, match="42 tokens, and this model takes 32"):
        llm.embed(long)
    assert len(llm.embed(long, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 32
    with pytest.warns(UserWarning, match="1 of 2 prompts failed"):
        assert [one.error is None for one in llm.embed([long, "water"])] == [False, True]
    with pytest.raises(InvalidRequest, match="generates no text"):
        llm.generate("the tide")
    with pytest.raises(InvalidRequest, match="not a cross-encoder"):
        llm.core.submit(Submit("x", [5], SamplingParams(max_tokens=1, pooling="score")))
    with pytest.raises(InvalidRequest, match="first has 2 texts and second 3"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(InvalidRequest, match="second is empty"):
        llm.score("a", [])


def test_options_of_an_encoder(tmp_path):
    make_encoder(tmp_path, "BertModel")
    model = load_model(tmp_path)
    config = engine_config(model)
    assert not config.prefix_caching
    assert config.token_budget >= config.max_context == 130
    assert config.kv_bytes == config.num_pages * config.page_size * 2 * 48 * 4, (
        "layers share one place for keys and values"
    )
    with pytest.raises(ConfigError, match="must hold 130 tokens"):
        engine_config(model, token_budget=100)
    for policy in ("splitfuse", "static", "none", "prefill-first"):  # none of them cuts an input
        core = make_core(model, token_budget=140, policy=policy)
        assert pooled(core, {"a": prompts()[10], "b": prompts()[9]}, "mean") == pooled(
            make_core(model), {"a": prompts()[10], "b": prompts()[9]}, "mean"
        )


def test_stored_position_ids_are_no_weights(tmp_path):
    from safetensors.torch import load_file, save_file

    make_encoder(tmp_path, "BertModel")
    file = tmp_path / "model.safetensors"
    save_file(
        load_file(file) | {"embeddings.position_ids": torch.arange(130)[None]},
        file,
        {"format": "pt"},
    )
    model = load_model(tmp_path)
    config = engine_config(model, dtype="auto")
    assert (config.dtype, config.kv_dtype) == ("float32", "float32")


def test_an_encoder_takes_a_gpu_that_is_there(tmp_path):
    from tidemill.config import EngineOptions, resolve
    from tidemill.kernels import machine

    make_encoder(tmp_path, "BertModel")
    here = dataclasses.replace(machine.detect(), gpu="a GPU", gpu_bytes=2**36, gpu_free_bytes=2**36)
    config = resolve(EngineOptions(), load_model(tmp_path).config, here)
    assert (config.device, config.dtype, config.prefix_caching) == ("cuda", "bfloat16", False)
    in_two_steps = 2 * (config.token_budget // config.page_size)
    assert config.num_pages > in_two_steps, "the next step could not be gathered"


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("config.json", {"hidden_act": "mish"}, "hidden_act"),
        ("config.json", {"is_decoder": True}, "is_decoder"),
        ("config.json", {"num_attention_heads": 7}, "7 heads"),
        ("config.json", {"max_position_embeddings": 2**30}, "values"),
        ("config.json", {"num_hidden_layers": 4}, "layer.3"),
        ("config.json", {"num_hidden_layers": 2}, "layer.2"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length"),
    ],
)
def test_a_wrong_folder_is_refused_by_name(name, change, problem, tmp_path):
    make_encoder(tmp_path, "BertModel")
    pooling_files(tmp_path, max_length=32)
    file = tmp_path / name
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=problem):
        load_model(tmp_path)


def test_other_modules_are_refused(tmp_path):
    make_encoder(tmp_path, "BertModel")
    for listed in (
        '[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]',
        "{}x",
        '["a"]',
    ):
        (tmp_path / "modules.json").write_text(listed)
        checkpoint = open_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match=r"modules\.json"):
            model_class(checkpoint).read_config(checkpoint)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("width", [8, 13, 4096])
def test_activations_and_layer_norm_by_row(act, width):
    """As torch computes them; a row alone has the bits of a row among others."""
    x = torch.randn(37, width, generator=torch.Generator().manual_seed(0)) * 4
    expected = {
        "gelu": torch.nn.functional.gelu(x), "gelu_tanh": torch.nn.functional.gelu(x, approximate="tanh"), "relu": x.relu(),
        "silu": torch.nn.functional.silu(x),
    }[act]  # fmt: skip
    for function in (activate, activate_reference):
        made = function(x, act)
        assert (made - expected).abs().max() < 2e-6
        assert torch.equal(function(x[5:6].clone(), act), made[5:6])
    weight, bias, residual = x[0] + 1, x[1], x[2:] * 3 + 7
    for function in (add_layer_norm, add_layer_norm_reference):
        total = residual.clone()
        made = function(x[2:], total, weight, bias, 1e-12)
        assert torch.allclose(total, residual + x[2:])
        assert torch.allclose(
            made, torch.nn.functional.layer_norm(total, (width,), weight, bias, 1e-12), atol=1e-4
        )
        assert torch.equal(function(None, total[4:5].clone(), weight, bias, 1e-12), made[4:5])
