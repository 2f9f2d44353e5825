"""Quantized Hugging Face folders, written here from the layouts' descriptions: what the readers are
held against."""

import json
import math

import torch
from safetensors.torch import load_file, save_file

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]
FP4 += [-value for value in FP4]


def words(values, bits):
    """Along the last dimension, without gaps, the lowest bits first: int32."""
    rows, num = values.shape
    total = torch.zeros(rows, math.ceil(num * bits / 32), dtype=torch.int64)
    for i in range(num):
        at, shift = divmod(i * bits, 32)
        total[:, at] |= (values[:, i].long() << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            total[:, at + 1] |= values[:, i].long() >> (32 - shift)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def words_with_gaps(values, bits):
    """As many codes to a word as fit, as compressed-tensors wrote them until 0.12."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word)).unflatten(
        1, (-1, per_word)
    )
    total = (padded.long() << torch.arange(0, per_word * bits, bits)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def affine(weight, bits, group, symmetric):
    """Codes from 0 on, scales (16 bits) and zero points of groups of columns, and the values they
    mean."""
    groups = weight.unflatten(1, (-1, group))
    top = 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(-1) / (2 ** (bits - 1) - 0.5)).half()
        zeros = torch.full_like(scales, 2 ** (bits - 1)).long()
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / top).half()
        zeros = (-low / scales.float()).round().long().clamp(1, top)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    values = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.flatten(1).long(), scales, zeros, values.flatten(1)


def gptq(weight, bits=4, group=32, symmetric=True, act_order=False, v2=False):
    width = weight.shape[1]
    group = width if group == -1 else group
    order = (
        torch.randperm(width, generator=torch.Generator().manual_seed(1))
        if act_order
        else torch.arange(width)
    )
    codes, scales, zeros, values = affine(weight[:, order], bits, group, symmetric)
    back = order.argsort()
    tensors = {
        "qweight": words(codes[:, back], bits).t().contiguous(),
        "qzeros": words((zeros - (0 if v2 else 1)).t(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": (back // group).to(torch.int32),
    }
    return tensors, values[:, back]


def awq(weight, group=32):
    codes, scales, zeros, values = affine(weight, 4, group, False)
    shuffled = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(rows):
        return words(rows.unflatten(1, (-1, 8))[:, :, shuffled].flatten(1), 4)

    return {
        "qweight": pack(codes.t()),
        "qzeros": pack(zeros.t()),
        "scales": scales.t().contiguous(),
    }, values


def packed_integers(weight, bits=4, group=32, symmetric=True, act_order=False, words=words):
    width = weight.shape[1]
    group = width if group == -1 else group
    order = (
        torch.randperm(width, generator=torch.Generator().manual_seed(2))
        if act_order
        else torch.arange(width)
    )
    codes, scales, zeros, values = affine(weight[:, order], bits, group, symmetric)
    back = order.argsort()
    tensors = {
        "weight_packed": words(codes[:, back], bits), "weight_scale": scales, "weight_shape": torch.tensor(list(weight.shape)),
    }  # fmt: skip
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    if act_order:
        tensors["weight_g_idx"] = (back // group).to(torch.int32)
    return tensors, values[:, back]


def byte_integers(weight, per="channel", static=False):
    largest = weight.abs().amax() if per == "tensor" else weight.abs().amax(1, keepdim=True)
    scales = (
        (largest / 127).to(torch.bfloat16).reshape(-1, 1)
        if per == "channel"
        else (largest / 127).reshape(1)
    )
    codes = (weight / scales.float()).round().clamp(-128, 127)
    tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
    if static:
        tensors["input_scale"] = torch.tensor([0.03])
    return tensors, codes * scales.float()


def fp8(weight, block=None, scale="weight_scale", channel=False):
    num_out, width = weight.shape
    rows, columns = block or ((1, width) if channel else (num_out, width))
    padded = torch.nn.functional.pad(weight, (0, -width % columns, 0, -num_out % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [a, rows, b, columns]
    scales = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (stored.float() * scales[:, None, :, None]).flatten(2).flatten(0, 1)[:num_out, :width]
    flat = stored.flatten(2).flatten(0, 1)[:num_out, :width].contiguous()
    return {"weight": flat, scale: scales if block or channel else scales.reshape(())}, values


def nf4(weight, kind="nf4", block=64, nested=True):
    table = torch.tensor(NF4 if kind == "nf4" else FP4)
    flat = weight.flatten().unflatten(0, (-1, block))
    largest = flat.abs().amax(1)
    numbers = (flat / largest[:, None])[..., None].sub(table).abs().argmin(-1).flatten()
    state = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    tensors = {
        "weight": (numbers[0::2] << 4 | numbers[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table,
        "weight.absmax": largest,
    }  # fmt: skip
    if nested:
        offset = float(largest.mean())
        map_ = torch.linspace(-1, 1, 256)
        parts = torch.nn.functional.pad(largest - offset, (0, -largest.numel() % 256)).unflatten(
            0, (-1, 256)
        )
        top = parts.abs().amax(1)
        codes = (parts / top[:, None])[..., None].sub(map_).abs().argmin(-1)
        largest = (map_[codes] * top[:, None]).flatten()[: largest.numel()] + offset
        tensors["weight.absmax"] = codes.flatten()[: largest.numel()].to(torch.uint8)
        tensors |= {"weight.nested_absmax": top, "weight.nested_quant_map": map_}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    values = table[numbers].unflatten(0, (-1, block)) * largest[:, None]
    return tensors, values.reshape(weight.shape)


def int8_rows(weight):
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round()
    tensors = {
        "weight": codes.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes * (largest[:, None] / 127)


def ternary(weight, inverse=True):
    scale = weight.abs().mean()
    codes = (weight / scale).round().clamp(-1, 1)
    quarter = weight.shape[0] // 4
    stored = torch.zeros(quarter, weight.shape[1], dtype=torch.uint8)
    for i in range(4):
        stored |= (codes[i * quarter : (i + 1) * quarter] + 1).to(torch.uint8) << (2 * i)
    kept = (1 / scale if inverse else scale).reshape(1)
    return {"weight": stored, "weight_scale": kept}, codes * (1 / kept if inverse else kept)


def sparse24(weight):
    fours = weight.unflatten(1, (-1, 4))
    kept = (
        torch.zeros_like(fours, dtype=torch.bool)
        .scatter_(2, fours.abs().topk(2).indices, True)
        .flatten(1)
    )
    bits = torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.uint8)
    for i in range(8):
        bits |= kept[:, i::8].to(torch.uint8) << i
    tensors = {
        "compressed": weight[kept].reshape(weight.shape[0], -1), "bitmask": bits,
        "shape": torch.tensor(list(weight.shape))[:, None],
    }  # fmt: skip
    return tensors, weight * kept


def gobo(weight, bits=3):
    """Centroids evenly spaced over what is no outlier."""
    flat = weight.flatten()
    is_outlier = flat.abs() > 2.5 * flat.std()
    centroids = torch.linspace(-2.4, 2.4, 2**bits) * flat.std()
    numbers = flat[:, None].sub(centroids).abs().argmin(1)
    values = torch.where(is_outlier, flat, centroids[numbers])
    places = is_outlier.nonzero()[:, 0]
    tensors = {
        "weight_packed": words(numbers.view(weight.shape), bits), "weight_shape": torch.tensor(list(weight.shape)),
        "weight_centroids": centroids, "weight_outliers": flat[places], "weight_places": places.to(torch.int32),
    }  # fmt: skip
    return tensors, values.view(weight.shape)


def compressed(layout="pack-quantized", bits=4, inputs=None, kind="int", **more):
    group = {
        "weights": {"num_bits": bits, "type": kind} | more,
        "input_activations": inputs,
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
# By name: a packer and the configuration.
LAYOUTS = {
    "gptq": (gptq, _GPTQ | {"sym": True}),
    "gptq act-order": (lambda w: gptq(w, act_order=True, symmetric=False), _GPTQ | {"desc_act": True}),
    "gptq v2 per channel": (
        lambda w: gptq(w, group=-1, symmetric=False, v2=True), _GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"},
    ),
    "gptq 8 bits": (lambda w: gptq(w, bits=8, group=64, symmetric=False), _GPTQ | {"bits": 8, "group_size": 64}),
    "gptq 3 bits": (lambda w: gptq(w, bits=3), _GPTQ | {"bits": 3}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "int4": (packed_integers, compressed()),
    "int4 asymmetric": (lambda w: packed_integers(w, symmetric=False), compressed()),
    "int4 act-order": (lambda w: packed_integers(w, group=64, act_order=True), compressed()),
    "int8 groups": (lambda w: packed_integers(w, bits=8, symmetric=False), compressed(bits=8)),
    "int3 with gaps": (lambda w: packed_integers(w, bits=3, words=words_with_gaps), compressed(bits=3)),
    "int6 asymmetric with gaps": (
        lambda w: packed_integers(w, bits=6, symmetric=False, words=words_with_gaps), compressed(bits=6),
    ),
    "w8a8": (byte_integers, compressed("int-quantized", 8, _DYNAMIC)),
    "w8a8 static": (lambda w: byte_integers(w, "tensor", True), compressed("int-quantized", 8, _STATIC)),
    "w8a16": (byte_integers, compressed("int-quantized", 8)),
    "fp8 tensor": (fp8, compressed("float-quantized", 8, kind="float")),
    "fp8 channel": (lambda w: fp8(w, channel=True), compressed("float-quantized", 8, kind="float")),
    "fp8 block": (
        lambda w: fp8(w, (48, 40)), compressed("float-quantized", 8, kind="float", strategy="block", block_structure=[48, 40]),
    ),
    "fp8 deepseek": (
        lambda w: fp8(w, (48, 40), "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [48, 40]},
    ),
    "nf4": (nf4, _BNB),
    "nf4 plain": (lambda w: nf4(w, nested=False), _BNB),
    "fp4": (lambda w: nf4(w, "fp4"), _BNB),
    "bnb int8": (int8_rows, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitnet": (ternary, {"quant_method": "bitnet", "linear_class": "bitlinear"}),
    "bitnet offline": (
        lambda w: ternary(w, False), {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
    ),
    "gobo": (gobo, {"quant_method": "gobo", "bits": 3}),
    "sparse 2:4": (
        sparse24, {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": {"format": "sparse-24-bitmask"}},
    ),
}  # fmt: skip


def quantize_folder(folder, layout, reference=None, values=None):
    """Replace the linears of a saved model by quantized ones. `reference`, `values`: get what they
    mean."""
    pack, settings = LAYOUTS[layout]
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        tensors, meant = pack(weights.pop(name).float())
        weights |= {
            f"{name.removesuffix('.weight')}.{part}": tensor.contiguous()
            for part, tensor in tensors.items()
        }
        if reference is not None:
            reference.get_parameter(name).data.copy_(meant)
        if values is not None:
            values[name] = meant.contiguous()
    save_file(weights, path)
    config = folder / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"quantization_config": settings})
    )
