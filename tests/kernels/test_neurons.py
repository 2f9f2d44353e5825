"""Feed-forwards by the neurons that are not zero, against plain torch, with fewer slots than
neurons."""

import pytest
import torch

from tidemill.kernels import native
from tidemill.kernels.linear import pack_linear
from tidemill.kernels.memory import PAGE
from tidemill.kernels.neurons import NeuronWeights, lay_out, neurons_reference
from tidemill.layers.streamed import Stream
from tidemill.weights.prepared import Folder

pytestmark = pytest.mark.skipif(native.lib is None, reason=native.why)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_in", "num_inner", "num_out"), [(64, 40, 64), (37, 51, 45)])
def test_outputs_are_those_of_the_whole_feed_forward_to_the_bit(
    dtype, num_in, num_inner, num_out, tmp_path
):
    torch.manual_seed(num_in)
    up, down = torch.randn(num_inner, num_in).to(dtype), torch.randn(num_out, num_inner).to(dtype)
    biases = torch.randn(num_inner), torch.randn(num_out)
    layout, made = lay_out(up, down, PAGE)
    writer = Folder(tmp_path, 2**30).write("key", 2**20)
    writer.put("neurons", [made], {})
    file = writer.finish()
    offset = file.items["neurons"].offset
    pieces = torch.tensor(
        [[offset + i * layout.num_bytes, layout.num_bytes, 0] for i in range(num_inner)]
    ).numpy()
    stream = Stream(file, pieces, range(num_inner + 1), num_slots=num_inner)
    weights = NeuronWeights(layout, *biases)
    weights.read_from(stream.address, 0)
    whole_up, whole_down = pack_linear(up, biases[0]), pack_linear(down, biases[1])
    for num_rows in (1, 2, 9):
        x, gate = torch.randn(num_rows, num_in), torch.randn(num_rows, num_inner) - 1
        found = weights(x, gate)
        assert torch.equal(found, whole_down(gate.clamp(min=0) * whole_up(x)))
        for row in range(num_rows):
            assert torch.equal(weights(x[row : row + 1], gate[row : row + 1])[0], found[row])
    assert torch.equal(weights(x, -gate.abs()), biases[1].expand(num_rows, -1))  # all are zero
    plain = NeuronWeights(layout, None, None)
    plain.read_from(stream.address, 0)
    torch.testing.assert_close(
        plain(x, gate), neurons_reference(x, gate, up, down), rtol=1e-4, atol=1e-4
    )
    assert stream.figures.num_read <= num_inner
