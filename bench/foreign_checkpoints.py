"""Folders that other libraries quantized, loaded here: their values, logits and greedy tokens
beside those of the same weights as that library dequantizes them, in float32.

    PYTHONPATH=PACKAGES python -m bench.foreign_checkpoints [--only gptq] [--results FILE.json]

PACKAGES has what is to be tried of llmcompressor, compressed-tensors, gptqmodel, autoawq and
bitsandbytes; COMPRESSED_0_12 in the environment names a folder with compressed-tensors 0.12. Each
row is a process of its own, as the libraries patch Transformers; a row whose library cannot run
says why. The model is a random Llama (or Qwen3 with experts) of 2 layers, with weights large enough
to give varied logits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.08, "head_dim": 32,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
PROMPTS, LENGTH, ANSWER = 6, 24, 24
TIE = 1e-3  # of logits
Weights = dict[str, torch.Tensor]


def plain_model(folder: Path, has_experts: bool) -> None:
    """With a tokenizer of bytes, which some libraries want."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from bench.small import byte_tokenizer

    torch.manual_seed(0)
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
        if has_experts
        else LlamaForCausalLM(LlamaConfig(**SIZES))
    )
    model.float().save_pretrained(folder)
    byte_tokenizer(folder)


def texts() -> list[list[int]]:
    source = torch.Generator().manual_seed(1)
    return [
        torch.randint(2, SIZES["vocab_size"], (64,), generator=source).tolist() for _ in range(16)
    ]


# ---- makers: each writes a folder, and gives the weights as its library dequantizes them


def llm_compressor(
    scheme: str, method: str = "rtn", **weights: Any
) -> Callable[[Path, Path], Weights]:
    """`weights`: changes of the scheme's arguments for weights."""

    def make(plain: Path, out: Path) -> Weights:
        from compressed_tensors.quantization import preset_name_to_scheme
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
        from transformers import AutoModelForCausalLM, AutoTokenizer

        how = preset_name_to_scheme(scheme, ["Linear"])
        how.weights = how.weights.model_copy(update=weights)
        chosen = GPTQModifier if method == "gptq" else QuantizationModifier
        recipe = chosen(config_groups={"group_0": how}, ignore=["lm_head", "re:.*mlp.gate$"])
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        rows = [
            {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids)).long()}
            for ids in texts()
        ]
        data: Any = torch.utils.data.DataLoader(rows, batch_size=1)  # type: ignore[arg-type]
        oneshot(
            model=model, tokenizer=AutoTokenizer.from_pretrained(plain), recipe=recipe, dataset=data
        )
        model.save_pretrained(out, save_compressed=True)
        return read_compressed(out)

    return make


def read_compressed(folder: Path) -> Weights:
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    how = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=how
    )
    return {
        name: values.float()
        for name, values in model.state_dict().items()
        if name.endswith(("weight", "bias", "_proj"))
    }


def gptq_model(bits: int, **how: Any) -> Callable[[Path, Path], Weights]:
    def make(plain: Path, out: Path) -> Weights:
        from gptqmodel import GPTQModel, QuantizeConfig

        how.setdefault("group_size", 32)
        settings = QuantizeConfig(bits=bits, device="cpu", **how)
        model = GPTQModel.load(str(plain), settings)
        model.quantize(
            [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts()], batch_size=1
        )
        model.save(str(out))
        return read_gptq(out)

    return make


def read_gptq(folder: Path) -> Weights:
    from gptqmodel import BACKEND, GPTQModel
    from safetensors.torch import load_file

    loaded = GPTQModel.load(str(folder), device="cpu", backend=BACKEND.TORCH)
    stored = load_file(next(folder.glob("*.safetensors")))
    for name, module in loaded.model.named_modules():  # it rounds scales to bfloat16 when it loads
        if hasattr(module, "qweight"):
            module.scales = stored[f"{name}.scales"].float()
    return dequantized(loaded.model, "qweight", lambda module: module.dequantize_weight().t())


def auto_awq(plain: Path, out: Path) -> Weights:
    """The library's own module for the layout, with codes rounded to the nearest."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    group = 32

    def pack(values: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        groups = values.unflatten(1, (-1, group))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
        codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
        linear = torch.nn.Linear(values.shape[1], values.shape[0], bias=False)
        linear.weight.data = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
        made = WQLinear_GEMM.from_linear(
            linear, 4, group, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        return made.state_dict(), dequantize_gemm(
            made.qweight, made.qzeros, made.scales.float(), 4, group
        ).t()

    return by_matrix(
        plain, out, pack, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    )


def compressed_old(bits: int) -> Callable[[Path, Path], Weights]:
    """Codes that do not fill a word: compressed-tensors packed them with gaps until 0.12, of which
    COMPRESSED_0_12 has a copy."""

    def make(plain: Path, out: Path) -> Weights:
        from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
            pack_to_int32,
            unpack_from_int32,
        )

        def pack(values: torch.Tensor) -> tuple[Weights, torch.Tensor]:
            scales = values.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            codes = (values / scales).round().to(torch.int8)
            words = pack_to_int32(codes, bits)
            parts = {
                "weight_packed": words,
                "weight_scale": scales,
                "weight_shape": torch.tensor(values.shape),
            }
            return parts, unpack_from_int32(words, bits, values.shape).float() * scales

        group = {
            "weights": {"num_bits": bits, "type": "int", "strategy": "channel"},
            "targets": ["Linear"],
        }
        settings = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
        }
        return by_matrix(plain, out, pack, settings | {"version": "0.12.2"})

    return make


def sparse_old(plain: Path, out: Path) -> Weights:
    from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import (
        Sparse24BitMaskTensor,
    )

    def pack(values: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        fours = values.reshape(-1, 4)
        kept = torch.zeros_like(fours).scatter_(1, fours.abs().topk(2, 1).indices, 1.0)
        made = Sparse24BitMaskTensor.from_dense((fours * kept).view_as(values))
        return _ending(made.dict("x")), made.decompress().float()

    settings = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "sparsity_config": {"format": "sparse-24-bitmask"},
    }
    return by_matrix(plain, out, pack, settings)


def transformers_fp8(plain: Path, out: Path) -> Weights:
    """By the operation with which Transformers quantizes; itself it does so on GPUs only."""
    from types import SimpleNamespace

    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    how = FineGrainedFP8Config(weight_block_size=(64, 64))
    operation = Fp8Quantize(SimpleNamespace(quantization_config=how))
    by_matrix(
        plain,
        out,
        lambda values: (_ending(operation.convert({"x.weight": values})), values),
        how.to_dict(),
    )
    how = FineGrainedFP8Config(weight_block_size=(64, 64), dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=how)
    return {name: values.float() for name, values in model.state_dict().items()}


def _ending(parts: Weights) -> Weights:
    return {name.rpartition(".")[2]: values for name, values in parts.items()}


def by_matrix(
    plain: Path,
    out: Path,
    pack: Callable[[torch.Tensor], tuple[Weights, torch.Tensor]],
    settings: dict[str, Any],
) -> Weights:
    """`pack`: what is stored of a projection, and its values."""
    from safetensors.torch import load_file, save_file

    weights, made = load_file(plain / "model.safetensors"), dict[str, torch.Tensor]()
    reference = dict(weights)
    for name, values in weights.items():
        if "_proj" not in name:
            made[name] = values
            continue
        parts, reference[name] = pack(values)
        made |= {
            name.replace("weight", part, 1): tensor.contiguous() for part, tensor in parts.items()
        }
    save_file(made, out / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (out / "config.json").write_text(json.dumps(config))
    return {name: values.contiguous() for name, values in reference.items()}


def bits_and_bytes(**how: Any) -> Callable[[Path, Path], Weights]:
    def make(plain: Path, out: Path) -> Weights:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        model = AutoModelForCausalLM.from_pretrained(
            plain,
            dtype=torch.float32,
            quantization_config=BitsAndBytesConfig(**how),
            device_map="cpu",
        )
        model.save_pretrained(out)
        model = AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, device_map="cpu"
        ).dequantize()
        return {name: values.float() for name, values in model.state_dict().items()}

    return make


def dequantized(
    model: torch.nn.Module, part: str, values_of: Callable[[Any], torch.Tensor]
) -> Weights:
    """Of modules that have that part, what the function says; of others, what they have."""
    made, quantized = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if hasattr(module, part):
            quantized[f"{name}.weight"] = values_of(module).detach().float().contiguous()
    for name, values in model.state_dict().items():
        if f"{name.rpartition('.')[0]}.weight" not in quantized:
            made[name] = values.float()
    return made | quantized


_GPTQ_ORDERED = {"actorder": "static", "group_size": 32}
MAKERS: dict[str, Callable[[Path, Path], Weights]] = {
    "llm-compressor W4A16, groups of 32": llm_compressor("W4A16", group_size=32),
    "llm-compressor W4A16, GPTQ, act-order": llm_compressor("W4A16", "gptq", **_GPTQ_ORDERED),
    "llm-compressor W4A16 asymmetric": llm_compressor("W4A16_ASYM", group_size=32),
    "llm-compressor W4A16 of experts": llm_compressor("W4A16", group_size=32),
    "llm-compressor W2A16": llm_compressor("W2A16", group_size=32),
    "llm-compressor W3A16": llm_compressor("W3A16", group_size=32),
    "llm-compressor W6A16": llm_compressor("W6A16", group_size=32),
    "llm-compressor W8A16": llm_compressor("W8A16"),
    "llm-compressor W8A8": llm_compressor("W8A8"),
    "llm-compressor fp8, static": llm_compressor("FP8"),
    "llm-compressor fp8, dynamic": llm_compressor("FP8_DYNAMIC"),
    "llm-compressor fp8, blocks": llm_compressor("FP8_BLOCK"),
    "llm-compressor fp8 of experts": llm_compressor("FP8_DYNAMIC"),
    "llm-compressor mxfp4": llm_compressor("MXFP4A16"),
    "llm-compressor nvfp4": llm_compressor("NVFP4A16"),
    "compressed-tensors 0.12, 3 bits": compressed_old(3),
    "compressed-tensors 0.12, 6 bits": compressed_old(6),
    "compressed-tensors 0.12, sparse 2:4": sparse_old,
    "Transformers fp8, blocks": transformers_fp8,
    "gptqmodel 4 bits": gptq_model(4),
    "gptqmodel 4 bits, act-order": gptq_model(4, desc_act=True),
    "gptqmodel 4 bits, asymmetric, v2": gptq_model(4, sym=False, format="gptq_v2"),
    "gptqmodel 3 bits": gptq_model(3),
    "gptqmodel 2 bits": gptq_model(2),
    "autoawq gemm": auto_awq,
    "bitsandbytes NF4, nested": bits_and_bytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes FP4": bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bitsandbytes LLM.int8()": bits_and_bytes(load_in_8bit=True),
}


# ---- what is compared


def compare(plain: Path, folder: Path, weights: Weights) -> dict[str, Any]:
    from tidemill import LLM, SamplingParams
    from tidemill.compress.evaluate import prompt_logits

    found: dict[str, Any] = {"values": difference(folder, weights)}
    reference = reference_model(plain, weights)
    prompts = [ids[:LENGTH] for ids in texts()[:PROMPTS]]
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    for dtype in ("float32",) if "sparse" in folder.name else ("float32", "quantized"):
        llm = LLM(str(folder), progress=False, dtype=dtype, max_context=128)
        answers = [
            list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, progress=False)
        ]
        errors, equal = [], 0
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = prompt + answer
            with torch.no_grad():
                expected = reference(torch.tensor([ids])).logits[0][:-1]
            errors.append(float((prompt_logits(llm, ids) - expected).norm() / expected.norm()))
            top = expected[len(prompt) - 1 :]
            chosen = top.gather(1, torch.tensor(answer).unsqueeze(1))[:, 0]
            equal += int((top.amax(-1) - chosen <= TIE).sum())
        found[dtype] = {"error": max(errors), "tokens": equal, "of": PROMPTS * ANSWER}
    return found


def reference_model(plain: Path, weights: Weights) -> Any:
    """Transformers' model of these weights; those of experts may be one by one."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    save_file(
        {name: values.contiguous().clone() for name, values in weights.items()},
        plain / "model.safetensors",
    )
    model, found = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, output_loading_info=True
    )
    if found["missing_keys"] or found["unexpected_keys"]:
        raise ValueError(
            f"missing: {found['missing_keys']}; unexpected: {found['unexpected_keys']}"[:300]
        )
    return model.eval()


def difference(folder: Path, weights: Weights) -> float:
    """The largest of all values that are read here, as a part of the matrix's largest."""
    from tidemill.weights.checkpoint import open_checkpoint

    worst = 0.0
    for tensor in open_checkpoint(folder).tensors():
        if tensor.name in weights:
            values = torch.empty(tensor.shape)
            tensor.read_into(values)
            expected = weights[tensor.name]
            worst = max(worst, float((values - expected).abs().max() / expected.abs().max()))
    return worst


def measure(name: str, out: Path) -> dict[str, Any]:
    has_experts = "experts" in name
    with tempfile.TemporaryDirectory(prefix="foreign-") as temporary:
        plain, folder = Path(temporary) / "plain", out
        plain_model(plain, has_experts)
        folder.mkdir(parents=True, exist_ok=True)
        weights = MAKERS[name](plain, folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_text((plain / file).read_text())
        return compare(plain, folder, weights)


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| | values | logits, float32 | tokens, float32 | logits, packed | tokens, packed |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        if "why" in one:
            lines.append(f"| {name} | {one['why']} | | | | |")
            continue
        cells = [f"{one['values']:.1e}"]
        for dtype in sorted(one.keys() & {"float32", "quantized"}):
            cells += [f"{one[dtype]['error']:.1e}", f"{one[dtype]['tokens']} of {one[dtype]['of']}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="rows whose name contains one of these, separated by commas"
    )
    parser.add_argument(
        "--results", type=Path, help="a JSON file; what is in it is not measured again"
    )
    parser.add_argument("--keep", type=Path, help="where the folders are written, to be looked at")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        print(f"\n{json.dumps(measure(given.row, given.keep))}")
        return
    found: dict[str, dict[str, Any]] = (
        json.loads(given.results.read_text()) if given.results and given.results.exists() else {}
    )
    with tempfile.TemporaryDirectory(prefix="foreign-") as temporary:
        for number, name in enumerate(MAKERS):
            if name in found or not any(part.strip() in name for part in given.only.split(",")):
                continue
            out = (
                given.keep or Path(temporary)
            ) / f"{number}-{'sparse' if 'sparse' in name else 'packed'}"
            command = [
                sys.executable,
                "-m",
                "bench.foreign_checkpoints",
                "--row",
                name,
                "--keep",
                str(out),
            ]
            old = [os.environ.get("COMPRESSED_0_12", "")] if "0.12" in name else []
            paths = os.pathsep.join([*old, os.environ.get("PYTHONPATH", "")])
            more = {
                "PYTHONPATH": paths,
                "GPTQMODEL_CPU_WORKERS": "2",
                "GPTQMODEL_DISABLE_PACK_EXT": "1",
            }
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=os.environ | more
            )
            last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[
                -1:
            ] or [""]
            one = json.loads(last[0]) if done.returncode == 0 else {"why": last[0][:200]}
            print(name, json.dumps(one), flush=True)
            if "why" not in one:
                found[name] = one
            if given.results:
                given.results.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
