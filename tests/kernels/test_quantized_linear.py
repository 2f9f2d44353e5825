"""4- and 8-bit matmuls: right, the same bits at every number of rows, and every GGUF type unpacked
as the package does it."""

import gguf
import numpy as np
import pytest
import torch

from tidemill.kernels import native, quantized_linear
from tidemill.kernels.quantized_linear import (
    GROUP,
    MX4_CODES,
    Activations,
    Codes,
    Outliers,
    QuantizedPanels,
    concat,
    quantize,
    quantized_linear_reference,
)
from tidemill.types.weight_types import HELD
from tidemill.weights.gguf_codes import _READERS, read_codes

needs_library = pytest.mark.skipif(native.lib is None, reason=native.why)
KINDS = ["Q4", "S4", "Q8", "Q8M", "MX4"]
# Kinds with float scales: the group of each, 0 for whole rows.
GROUPED = {
    "G4": 64,
    "GS4": 128,
    "G8": 0,
    "G8M": 32,
    "GT4": 64,
    "GT4 sparse": 0,
    "G4 ordered": 96,
    "W8": 0,
    "W8 static": 0,
    "W8 split": 0,
    "T2": 0,
    "T2 grouped": 64,
}
HOW = {"static": Activations(0.03), "split": Activations(threshold=1.5)}
SHAPES = [(960, 576), (576, 1536), (24, 32), (13, 96), (1, 64)]


def sparse(num: int) -> Outliers:
    places = torch.randperm(num)[: num // 20].sort().values
    return Outliers(places, torch.randn(places.numel()) * 0.3)


def grouped_codes(kind: str, num_out: int, num_in: int) -> Codes:
    name, _, how = kind.partition(" ")
    group = GROUPED[kind] or num_in
    scales = torch.rand(num_out, -(-num_in // group)) * 0.02 - 0.01
    low, high = {"T2": (-1, 2), "G8": (-128, 128), "G8M": (-128, 128), "W8": (-128, 128)}.get(
        name, (0, 16)
    )
    zeros = {
        "G4": torch.randint(0, 17, scales.shape).float(),
        "GS4": torch.full_like(scales, 8.0),
    }.get(name)
    return Codes(
        2 if name == "T2" else 4 if "4" in name else 8,
        torch.randint(low, high, (num_out, num_in), dtype=torch.int8),
        scales, None, group=group,
        zeros_NG=torch.randint(-9, 9, scales.shape).float() if name == "G8M" else zeros,
        table=torch.arange(-8, 8).float() / 8 if name == "GT4" else None,
        order_K=torch.randperm(num_in) if how == "ordered" else None,
        outliers=sparse(num_out * num_in) if how == "sparse" else None,
        activations=HOW.get(how, Activations()) if name in ("W8", "T2") else None,
    )  # fmt: skip


def random_codes(kind: str, num_out: int, num_in: int) -> Codes:
    if kind in GROUPED:
        return grouped_codes(kind, num_out, num_in)
    low, high = (0, 16) if kind in ("Q4", "S4") else (-128, 128)
    scales = (torch.rand(num_out, num_in // GROUP) * 0.02 - 0.01).to(torch.float16)
    offsets = (
        None
        if kind in ("Q8", "MX4")
        else torch.randn(num_out, num_in // GROUP).to(torch.float16) * 0.05
    )
    if kind == "S4":
        offsets = scales * -8
    codes = torch.randint(low, high, (num_out, num_in), dtype=torch.int8)
    if kind == "MX4":
        codes = torch.from_numpy(MX4_CODES)[codes.to(torch.int64) & 15]
    return Codes(4 if "4" in kind else 8, codes, scales, offsets)


@pytest.fixture(autouse=True)
def on_every_machine(monkeypatch):
    monkeypatch.setattr(quantized_linear, "_HAS_S4", True)


def test_codes_whose_offsets_are_those_of_signed_ones_are_held_signed():
    centred, other = random_codes("S4", 16, 64), random_codes("Q4", 16, 64)
    assert quantized_linear.kind_of([centred, centred]) == "S4"
    assert (
        quantized_linear.kind_of([centred, other])
        == quantized_linear.kind_of([concat([centred, other])])
        == "Q4"
    )


@needs_library
@pytest.mark.parametrize("kind", [*KINDS, *GROUPED])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_multiplies_and_looks_up(kind, shape):
    """With a bias by turns, so that each kind and each shape is with one and without."""
    bias = ([*KINDS, *GROUPED].index(kind) + SHAPES.index(shape)) % 2
    torch.manual_seed(0)
    weight, x = random_codes(kind, *shape), torch.randn(33, shape[1])
    x[3] = 0.0
    x[4] *= 1e-20
    x[5] *= 1e20
    offset = torch.randn(shape[0]) if bias else None
    linear = QuantizedPanels(weight, offset)
    for rows in (1, 2, 3, 4, 7, 8, 33):
        expected = quantized_linear_reference(x[:rows], weight, offset)
        out = linear(x[:rows].clone())
        assert (
            (out - expected).abs() <= 1e-5 * expected.abs().amax(1, keepdim=True) + 1e-6
        ).all(), rows
    ids = torch.randint(0, shape[0], (9,))
    torch.testing.assert_close(
        linear.rows(ids),
        weight.dequantize()[ids],
        rtol=0 if kind in KINDS else 1e-5,
        atol=0 if kind in KINDS else 1e-7,
    )
    assert quantized_linear.kind_of([weight]) == kind.split()[0]


@needs_library
@pytest.mark.parametrize("kind", [*KINDS, *GROUPED])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_keeps_its_bits(kind, shape):
    torch.manual_seed(1)
    linear, x = QuantizedPanels(random_codes(kind, *shape), None), torch.randn(300, shape[1])
    whole = linear(x)
    for num_threads in (1, 2, 3):
        native.lib.set_threads(num_threads)
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 255):
            for start in {0, 1, 300 - rows}:
                assert torch.equal(
                    linear(x[start : start + rows].clone()), whole[start : start + rows]
                ), (rows, start)
    native.lib.set_threads(2)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size", [1e-42, 1e-37, 1e-20, 1e20, 1e33, 1e34, float("inf"), float("nan")]
)
def test_a_row_of_odd_values_keeps_its_bits(kind, size):
    torch.manual_seed(3)
    linear, x = QuantizedPanels(random_codes(kind, 24, 256), None), torch.randn(23, 256)
    x[2, 70], x[9], x[21, 5] = size, x[9] * size, -size
    whole = linear(x)
    for rows in (1, 3, 5, 16, 18):
        for start in range(24 - rows):
            part = linear(x[start : start + rows].clone())
            assert torch.allclose(
                part, whole[start : start + rows], rtol=0, atol=0, equal_nan=True
            ), (rows, start)
    assert whole[[0, 1, 3, 8, 10, 22]].isfinite().all()  # nobody else's row


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_rows_keep_their_bits_where_few_panels_and_rows_are_computed_at_once(kind):
    """Wide matrices: unpacked panels and the rows they are multiplied by stay in a core's cache."""
    torch.manual_seed(2)
    linear, x = QuantizedPanels(random_codes(kind, 76, 9216), None), torch.randn(50, 9216)
    whole = linear(x)
    for start, rows in ((0, 1), (3, 4), (7, 16), (11, 21), (1, 49)):
        assert torch.equal(linear(x[start : start + rows].clone()), whole[start : start + rows]), (
            rows,
            start,
        )


@needs_library
def test_matrices_of_unlike_kinds_are_joined_unchanged():
    torch.manual_seed(2)
    parts = [random_codes(kind, 16, 64) for kind in KINDS]
    assert torch.equal(concat(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))
    x = torch.randn(5, 64)
    together = QuantizedPanels(concat(parts), None)(x)
    apart = torch.cat([QuantizedPanels(part, None)(x) for part in parts], dim=1)
    assert torch.allclose(together, apart, atol=1e-4, rtol=1e-5)


def test_rounding_to_8_bits_is_fine():
    torch.manual_seed(3)
    values = torch.randn(40, 256)
    values[1] = 0
    error = (quantize(values).dequantize() - values).abs()
    assert (
        error
        <= values.unflatten(1, (-1, GROUP)).abs().amax(-1).repeat_interleave(GROUP, 1) / 127 * 0.51
        + 1e-7
    ).all()


@pytest.mark.parametrize("name", list(_READERS))
def test_codes_are_what_the_package_dequantizes(name):
    kind = gguf.GGMLQuantizationType[name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    raw = rng.integers(0, 256, (6, 3 * block_bytes), dtype=np.uint8)
    blocks = raw.reshape(-1, block_bytes)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 140, len(blocks))
    for at in (
        () if name == "MXFP4" else (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
    ):  # scales of a sensible size
        blocks[:, at : at + 2] = (
            rng.uniform(0.01, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
        )
    expected = gguf.quants.dequantize(raw, kind)
    codes = read_codes(name, raw)
    # K types: two scales multiplied and rounded to float16
    tolerance = 0 if name[-1] in "014" else 2e-3
    assert np.allclose(
        codes.dequantize().numpy(),
        expected,
        rtol=tolerance,
        atol=tolerance * np.abs(expected).max(),
    )
    if codes.bits == 4 and codes.offsets_NG is not None:
        assert codes.codes_NK.min() >= 0
        assert codes.codes_NK.max() <= 15


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_stay_ternary(name):
    kind = gguf.GGMLQuantizationType[name]
    values = torch.randint(-1, 2, (40, 512)).numpy() * np.repeat(
        np.array([[0.25, 0.5]], np.float32), 256, axis=1
    )
    raw = gguf.quants.quantize(values, kind)
    codes = quantized_linear.fit(read_codes(name, raw))
    assert codes.bits == 2
    assert np.array_equal(codes.dequantize().numpy(), values)
    if native.lib is not None:
        # the scale of activations
        held = QuantizedPanels(read_codes(name, raw[:32]), None).num_bytes - 32
        assert held == 32 * 512 * HELD["quantized", "cpu"].bytes_of(name, True)


@needs_library
def test_what_the_budget_says_is_what_is_allocated():
    for name in _READERS:
        _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        weight = QuantizedPanels(read_codes(name, np.zeros((16, 4 * block_bytes), np.uint8)), None)
        num_values = weight.rows(torch.arange(16)).numel()
        assert weight.num_bytes == num_values * HELD["quantized", "cpu"].bytes_of(name, True), name


@needs_library
def test_a_row_that_is_not_there_is_an_error():
    linear = QuantizedPanels(random_codes("Q8", 12, 64), None)
    for row in (-1, 12, 2**40):
        with pytest.raises(IndexError):
            linear.rows(torch.tensor([0, row]))
