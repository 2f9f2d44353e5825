import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import load_model, make_llama
from tidemill.errors import CheckpointError, ConfigError, ModelNotFound
from tidemill.models.registry import model_class
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.locate import locate


@pytest.fixture
def folder(tmp_path):
    make_llama(tmp_path)
    return tmp_path


def edit_config(folder, **changes):
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def fails(folder, *words, error=CheckpointError):
    with pytest.raises(error) as caught:
        load_model(folder)
    for word in words:
        assert word in str(caught.value)


def test_half_precision_is_read(folder):
    def halve(weights):
        for name in list(weights):
            weights[name] = weights[name].to(torch.bfloat16)

    edit_weights(folder, halve)
    load_model(folder)


def test_missing_tensor(folder):
    edit_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    fails(folder, "model.layers.2.mlp.up_proj.weight is missing")


def test_surplus_tensor(folder):
    edit_weights(
        folder, lambda weights: weights.update({"model.layers.7.x.weight": torch.zeros(3)})
    )
    fails(folder, "model.layers.7.x.weight has no place")


def test_wrong_shape(folder):
    edit_config(folder, intermediate_size=100)
    fails(folder, "model.layers.0.mlp.down_proj.weight", "shape [64, 172]", "asks for [64, 100]")


def test_integer_tensor(folder):
    edit_weights(
        folder, lambda w: w.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)})
    )
    fails(folder, "model.norm.weight", "I32")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_key_has_the_familys_default(folder, key):
    edit_config(folder, **{key: None})
    fails(folder, "the configuration describes", "the tensors hold 152768")
    edit_config(folder, rms_norm_eps=None)
    checkpoint = open_checkpoint(folder)
    assert model_class(checkpoint).read_config(checkpoint).norm_eps == 1e-6


def test_wrong_type_of_key(folder):
    edit_config(folder, hidden_size="64")
    fails(folder, "key hidden_size is '64'")


def test_impossible_heads(folder):
    edit_config(folder, num_key_value_heads=3)
    fails(folder, "4 query heads over 3", error=ConfigError)


def test_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    fails(folder, "model.safetensors", "corrupt or truncated")


def test_missing_shard(tmp_path):
    make_llama().save_pretrained(tmp_path, max_shard_size="100KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    fails(tmp_path, "which is not there")


def test_pickled_weights_are_never_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fails(folder, "no safetensors", "unpickling")


def test_unknown_architecture(folder):
    edit_config(folder, architectures=["NoSuchModel"])
    fails(folder, "NoSuchModel", "LlamaForCausalLM")


def test_unsupported_activation_and_scaling(folder):
    edit_config(folder, hidden_act="mish")
    fails(folder, "mish")
    edit_config(folder, hidden_act="silu", rope_parameters={"rope_type": "spiral", "factor": 2.0})
    fails(folder, "spiral")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_scaling": ["x"], "rope_parameters": None}, "rope_scaling"),
        ({"rope_theta": "abc"}, "rope_theta"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2,
                    "original_max_position_embeddings": "8k",
                }
            },
            "original_max_position",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"quantization_config": "gptq"}, "gptq"),
        ({"head_dim": "16"}, "head_dim"),
    ],
)
def test_malformed_configurations_name_the_key(folder, changes, key):
    edit_config(folder, **changes)
    fails(folder, key)


def test_quantized_folder_is_refused_by_name(folder):
    edit_config(folder, quantization_config={"quant_method": "hqq"})
    fails(folder, "hqq")


def test_locate(folder, tmp_path, smollm2_path):
    assert locate(str(folder)) == folder
    assert locate("smollm2").name.endswith(".gguf")
    assert locate(str(smollm2_path)) == smollm2_path
    for wrong in ("no-such-model", str(tmp_path / "nowhere"), ""):
        with pytest.raises(ModelNotFound):
            locate(wrong)
    other = tmp_path / "file.bin"
    other.write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf"):
        locate(str(other))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        locate(str(empty))


def test_an_interrupted_download_is_not_taken_for_a_model(tmp_path):
    from tidemill.weights.locate import _is_complete

    make_llama().save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert _is_complete(tmp_path)
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()
    assert not _is_complete(tmp_path)


def test_a_hub_id_offline_says_what_to_do():
    with pytest.raises(ModelNotFound, match="offline"):
        locate("no-such-org/no-such-model")


def test_mistrals_own_files_beside_the_others_are_left_alone(folder):
    """Its repositories have both: the same weights under other names, in files that begin with
    consolidated."""
    weights = load_file(folder / "model.safetensors")
    save_file(
        {"tok_embeddings.weight": weights["model.embed_tokens.weight"]},
        folder / "consolidated.safetensors",
    )
    load_model(folder)
    (folder / "model.safetensors").unlink()
    fails(folder, "Mistral's own format alone", "model*.safetensors")


def test_buffers_of_rotations_are_no_weights(folder):
    """Older folders have them, under several names."""
    buffers = {
        f"model.{place}rotary_emb.inv_freq": torch.zeros(8) for place in ("", "layers.0.self_attn.")
    }
    edit_weights(folder, lambda weights: weights.update(buffers))
    load_model(folder)


def test_towers_are_named(folder):
    edit_weights(
        folder, lambda weights: weights.update({"vision_tower.patch.weight": torch.zeros(3)})
    )
    fails(folder, "vision_tower.patch.weight", "text model")


def test_a_file_that_is_cut_off_after_it_was_opened_is_an_error(folder):
    path = folder / "model.safetensors"
    tensors = list(open_checkpoint(folder).tensors())
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    last = tensors[-1]
    with pytest.raises(CheckpointError, match="ends before its last tensor"):
        last.read_into(torch.empty(last.shape))
