"""Models cut over ranks, which are threads here: the tokens of one process."""

import gguf
import pytest
import torch

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tests.models import test_bloom, test_families, test_moe, test_state_models
from tests.models.test_llama import prompts
from tests.parallel.near_ties import excused
from tests.parallel.threads import run_ranks
from tests.weights.test_gguf import write_gguf
from tidemill.config import EngineOptions
from tidemill.distributed.shard import Shard
from tidemill.distributed.stages import decide_stages
from tidemill.kernels import native
from tidemill.kernels.machine import detect
from tidemill.kernels.quantized_linear import QuantizedPanels
from tidemill.models.registry import model_class
from tidemill.quant import SCHEMES, WeightPlan
from tidemill.runner import make_cpu
from tidemill.runner.rank import world_of
from tidemill.weights.checkpoint import open_checkpoint

ODD = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 131,
    "attention_bias": True,
}


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch):
    """A recording belongs to the process, not to a thread."""
    monkeypatch.setattr(make_cpu, "record_forward", lambda *given: None)


def load_rank(path, shard: Shard, dtype: str = "float32", expert_parallel: bool = False):
    checkpoint = open_checkpoint(path)
    cls = model_class(checkpoint)
    return cls.load(
        checkpoint,
        cls.read_config(checkpoint),
        WeightPlan(SCHEMES[dtype], shard=shard, expert_parallel=expert_parallel),
    )


def make_rank(model, **options):
    """Every rank plans for itself here, and must plan the same: nothing that depends on time."""
    return make_core(model, speculate="off", **options)


def ask(num: int, num_tokens: int, vocab_size: int):
    return {
        name: (prompt, greedy(num_tokens, logprobs=2))
        for name, prompt in prompts(num, vocab_size).items()
    }


def check(
    path,
    size: int,
    num_prompts: int = 2,
    num_tokens: int = 6,
    dtype: str = "float32",
    expert_parallel: bool = False,
    **options,
):
    """Tokens of `size` ranks and of one process."""
    whole = load_model(path, dtype)
    requests = ask(num_prompts, num_tokens, whole.config.vocab_size)
    expected = run(make_rank(whole), requests)

    def work(shard):
        model = load_rank(path, shard, dtype, expert_parallel)
        return model, run(make_rank(model), requests)

    ranks = run_ranks(size, work)
    assert all(answers == ranks[0][1] for _, answers in ranks)
    assert excused(ranks[0][1], expected) <= 0.02 * num_prompts * num_tokens
    return whole, [model for model, _ in ranks]


def held(model) -> int:
    """Bytes of all tensors of a model, however they are wrapped."""
    seen, found, waiting = set[int](), 0, [model]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found += one.nbytes
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif type(one).__module__.startswith(("tidemill.", "torch.nn")) and one is not native.lib:
            waiting += vars(one).values() if hasattr(one, "__dict__") else []
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_three_kv_heads_on_two_ranks(tied, tmp_path):
    """And a vocabulary that two does not divide, and biases, of which one is added to a sum of
    ranks."""
    make_llama(tmp_path, **ODD, tie_word_embeddings=tied)
    _, (first, second) = check(tmp_path, 2)
    assert (first.config.num_kv_heads, second.config.num_kv_heads) == (1, 2)
    assert first.config.intermediate_size > second.config.intermediate_size


@pytest.mark.parametrize("quantized", [False, True])
def test_a_rank_reads_and_holds_its_share(quantized, tmp_path):
    """Sizes in the proportions of real models; 3 KV heads, so that heads are not shared out evenly."""
    sizes = ODD | {
        "hidden_size": 192,
        "intermediate_size": 1536,
        "vocab_size": 2048,
        "num_hidden_layers": 1,
    }
    reference = make_llama(None if quantized else tmp_path, **sizes)
    path = tmp_path
    if quantized:
        path = write_gguf(tmp_path / "m.gguf", reference, quantize=gguf.GGMLQuantizationType.Q4_1)
    dtype = "quantized" if quantized and native.lib else "float32"
    whole = load_model(path, dtype)
    for size in (2, 4) if not quantized else (2,):
        models = run_ranks(size, lambda shard: load_rank(path, shard, dtype))
        assert max(model.num_bytes_read for model in models) <= 1.05 * whole.num_bytes_read / size
        assert max(map(held, models)) <= 1.05 * held(whole) / size


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_reads_and_holds_its_share(tied, tmp_path):
    """Both ends of a pipeline have a table that is embedding and head: then an even share is half
    of the weights and of it."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "vocab_size": 768,
        "num_hidden_layers": 8,
    }
    make_llama(tmp_path, **sizes, tie_word_embeddings=tied)
    whole, table = load_model(tmp_path), 4 * 768 * 128
    options = EngineOptions(model=str(tmp_path), pipeline_parallel=2)
    world = world_of(options, whole.whole, decide_stages(options, whole.whole, detect())[0])
    checkpoint = open_checkpoint(tmp_path)
    models = [
        type(whole).load(
            checkpoint, whole.whole, WeightPlan(SCHEMES["float32"]), stage=world.stage(rank)
        )
        for rank in range(2)
    ]
    assert sum(model.num_bytes_read for model in models) == whole.num_bytes_read + (
        table if tied else 0
    )
    for measure in (lambda model: model.num_bytes_read, held):
        assert max(map(measure, models)) <= 1.05 * (measure(whole) + (table if tied else 0)) / 2


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts(expert_parallel, tmp_path):
    """With a shared expert, and a dense layer in between."""
    test_moe.make("Qwen2Moe").save_pretrained(tmp_path)
    check(tmp_path, 2, expert_parallel=expert_parallel)


def test_tokens_do_not_depend_on_the_company(tmp_path):
    """Within a layout, bit for bit: alone, among others, in chunks."""
    test_moe.make("Mixtral", num_hidden_layers=1).save_pretrained(tmp_path)

    def work(shard):
        model = load_rank(tmp_path, shard, expert_parallel=True)
        requests = ask(4, 4, model.config.vocab_size)
        together, chunked = (
            run(make_rank(model, **more), requests)
            for more in ({}, {"token_budget": 7, "max_requests": 2})
        )
        alone = {
            name: run(make_rank(model), {name: request})[name] for name, request in requests.items()
        }
        assert together == alone
        assert together == chunked
        return together

    first, second = run_ranks(2, work)
    assert first == second


def test_adapters(tmp_path):
    """A pair for a layer cut by rows and one for a layer cut by columns: the sums of one process."""
    from tidemill.layers.lora import Loras
    from tidemill.weights.lora import LoraPair

    make_llama(tmp_path, **ODD, num_hidden_layers=1)
    torch.manual_seed(1)
    names = [
        f"model.layers.0.{name}"
        for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    x_TH = torch.randn(3, ODD["hidden_size"])

    @torch.inference_mode()
    def outputs(model, given):
        import numpy as np

        loras = Loras(model.lora_places(), 1, 8)
        loras.put(0, {name: given[name] for name in names})
        block = model.blocks[0]
        with loras.on(np.zeros(3, np.int64)):
            return block.attn.qkv(x_TH), block.mlp(x_TH), loras.shapes

    whole = load_model(tmp_path)
    shapes = Loras(load_model(tmp_path).lora_places(), 1, 8).shapes
    pairs = {
        name: LoraPair(torch.randn(4, shapes[name][1]), torch.randn(shapes[name][0], 4), 0.01)
        for name in names
    }
    qkv, fed, _ = outputs(whole, pairs)
    (own, fed_0, shapes_0), (_, fed_1, _) = run_ranks(
        2, lambda shard: outputs(load_rank(tmp_path, shard), pairs)
    )
    assert shapes_0 == shapes
    assert torch.equal(fed_0, fed_1)
    assert (fed_0 - fed).abs().max() < 1e-4
    dim = 16
    keys = slice(6 * dim, 7 * dim)  # of the first rank: 2 query heads, 1 KV head
    assert (own[:, 2 * dim : 3 * dim] - qkv[:, keys]).abs().max() < 1e-5


def test_random_weights(tmp_path):
    """Ranks agree about what all of them have, and so about tokens."""
    test_moe.make("Mixtral", num_hidden_layers=1).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    cls = model_class(checkpoint)

    def work(shard):
        model = cls.load(
            checkpoint, cls.read_config(checkpoint), WeightPlan(shard=shard), random=True
        )
        return run(make_rank(model), ask(2, 4, model.config.vocab_size))

    first, second = run_ranks(2, work)
    assert first == second


# ---- the matrix

STATES = {
    "Mamba": {"intermediate_size": 256},
    "Mamba with biases": {"intermediate_size": 256},
    "Qwen3Next": {},
    "Mamba2": {},
}


def saved(kind: str, name: str, path):
    if kind in ("safetensors", "gguf"):
        return test_families.save(name, kind, path)[1]
    if kind == "states":
        test_state_models.make_reference(name, path, **STATES[name])
    elif kind == "experts":
        test_moe.make(name).save_pretrained(path)
    elif kind == "bloom":
        test_bloom.make().save_pretrained(path)
    return path


MATRIX = [
    *((how, family) for family, how in test_families.ALL),
    *(("experts", name) for name in test_moe.FAMILIES),
    *(("states", name) for name in STATES),
    ("bloom", "Bloom"),
]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("kind", "name"), MATRIX, ids=lambda value: value)
def test_every_family(kind, name, size, tmp_path):
    path = saved(kind, name, tmp_path)
    check(path, size, num_prompts=4, num_tokens=16)
    if kind == "experts":
        check(path, size, num_prompts=4, num_tokens=16, expert_parallel=True)


@pytest.mark.slow
@pytest.mark.skipif(native.lib is None, reason="quantized weights need the compiled kernels")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantized(kind, size, tmp_path):
    sizes = ODD | {"intermediate_size": 512, "hidden_size": 192}
    path = write_gguf(
        tmp_path / "m.gguf", make_llama(None, **sizes), quantize=gguf.GGMLQuantizationType[kind]
    )
    check(path, size, num_prompts=4, num_tokens=16)


@pytest.mark.skipif(native.lib is None, reason="quantized weights need the compiled kernels")
def test_quantized_matrices_keep_their_codes(tmp_path):
    """Activations are rounded in groups that no cut goes through: the sums of one process, but for
    their order."""
    reference = make_llama(
        None, **ODD | {"intermediate_size": 512, "hidden_size": 192, "num_hidden_layers": 1}
    )
    path = write_gguf(tmp_path / "m.gguf", reference, quantize=gguf.GGMLQuantizationType.Q4_1)
    x_TH = torch.randn(3, 192)

    @torch.inference_mode()
    def fed(model):
        block = model.blocks[0]
        assert {type(linear.weight) for linear in (block.mlp.down, block.attn.out)} == {
            QuantizedPanels
        }
        return block.mlp(x_TH)

    expected = fed(load_model(path, "quantized"))
    for size in (2, 4):
        for got in run_ranks(size, lambda shard: fed(load_rank(path, shard, "quantized"))):
            assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
