"""Decode attention a split at once against the block by block one: bits, then times."""
import sys, time
import numpy as np, torch
from bench.gpu_checks import Scene
from tidemill.kernels.cuda import attention, elementwise, records
from tidemill.kernels.kv_cache import Angles
from tidemill.runner.cuda_work import make_work, padded

BIG = 10**9
KEPT = []


def num_singles(n):
    return max(2 * n, min(64 * n, 512))


def prepare(scene, items, programs=None, at_once=1, alone=False):
    group = scene.heads // scene.kv_heads
    work = make_work(np.array(items, np.int32), np.ones(len(items), bool), [scene.pages], 64 // group, 32, at_once)
    size = work.rows.size
    num = programs or max(len(work.singles), 1)
    words = np.zeros(2**20, np.int32)
    work.write(words, size, 0, (num, len(work.shared), 0))
    device = torch.from_numpy(words).cuda()
    parts = size * int(work.positions.max() // attention.SPLIT + 1)
    partial = torch.full((parts, scene.heads, scene.dim + 2), float("nan"), device="cuda")
    done = torch.zeros(size, scene.kv_heads, dtype=torch.int32, device="cuda")
    lists = attention.Lists(device, device[records.HEADER + 2 * padded(size):], num, len(work.shared), 0, partial, done, None, True)
    lists.alone = alone
    return work, lists


def run(scene, items, few, layer=1, **how):
    work, lists = prepare(scene, items, **how)
    attention.at_once = lambda *_: bool(few)
    qkv = scene.qkv[torch.from_numpy(scene.first[work.rows] + work.positions).cuda()]
    out = qkv.new_full((len(qkv), scene.heads * scene.dim), float("nan"))
    attention.attend(qkv, scene.cache, layer, scene.table, lists, out, scene.spec, torch.from_numpy(work.positions).cuda())
    torch.cuda.synchronize()
    assert not lists.done.any(), "counters are left"
    return out


def tell(name, a, b):
    same = torch.equal(a, b)
    more = "" if same else f" {(a != b).any(1).sum().item()} of {len(a)} rows, nan {a.isnan().any(1).sum().item()}, most {(a.float() - b.float()).abs().max().item():.3g}, first {(a != b).any(1).nonzero()[:4].flatten().tolist()}"
    print(f"  {name}: {'same bits' if same else 'DIFFER' + more}", flush=True)


def bits(heads, kv_heads, dim):
    t = time.time()
    print(f"bits {heads}/{kv_heads}x{dim}", flush=True)
    lengths = [1, 2, 5, 63, 64, 65, 100, 128, 129, 200, 384, 385, 448, 511, 512, 513, 577, 700, 1024, 1025, 1301, 2070, 4097]
    scene = Scene(lengths, heads, kv_heads, dim)
    items = [(row, length - 1, 1) for row, length in enumerate(lengths)]
    old = run(scene, items, 0)
    print(f"  (compiled old {time.time() - t:.0f} s)", flush=True)
    tell("one launch", run(scene, items, BIG), old)
    print(f"  (compiled new {time.time() - t:.0f} s)", flush=True)
    tell("3 programs", run(scene, items, BIG, programs=3), old)
    tell("alone", torch.cat([run(scene, [item], BIG, alone=True, programs=64) for item in items]), old)
    every = [(row, at, 1) for row in (15, 18, 20) for at in range(lengths[row])]
    tell("every position", run(scene, every, BIG, programs=5), run(scene, every, 0, programs=512))
    group = heads // kv_heads
    drafts = [(row, at, 1) for row, length in enumerate(lengths) for at in range(max(length - 7, 0), length)]
    tell("with drafts", run(scene, drafts, BIG, at_once=max(16 // group, 1)), run(scene, drafts, 0))
    scene = Scene([1100] * 12 + [700, 2000], heads, kv_heads, dim, family=(*range(12), 13), common=1024)
    items = [(row, length - 1, 1) for row, length in enumerate(scene.lengths)]
    tell("a shared prefix", run(scene, items, BIG), run(scene, items, 0))
    in_graph(heads, kv_heads, dim)
    print(f"  ({time.time() - t:.0f} s)", flush=True)


def layers_of(scene, lists, positions, slots, angles, src, num_layers, few, early, flush=None, what=3):
    """A graph: each layer enters its heads and attends."""
    attention.at_once, elementwise.FEW = (lambda *_: bool(few)), early
    torch.cuda.synchronize()
    qkv = src.clone()
    outs = [src.new_zeros(len(src), scene.heads * scene.dim) for _ in range(num_layers)]

    def once():
        for layer in range(num_layers):
            if flush is not None:
                flush.add_(1)
            else:
                qkv.copy_(src)
            if what & 1:
                elementwise.enter_heads(qkv, scene.cache, layer, positions, slots, angles, scene.heads)
            if what & 2:
                attention.attend(qkv, scene.cache, layer, scene.table, lists, outs[layer], scene.spec, positions)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    KEPT.append((graph, qkv, outs, flush))  # what the graph uses
    return graph, outs


def given(scene, batch, alone, programs):
    items = [(row, scene.lengths[row] - 1, 1) for row in range(batch)]
    work, lists = prepare(scene, items, programs=programs, alone=alone)
    positions = torch.from_numpy(work.positions).cuda()
    page = scene.table[torch.arange(batch, device="cuda"), positions.long() // 64].long()
    angle = torch.randn(max(scene.lengths), scene.dim // 2, device="cuda")
    return lists, positions, page * 64 + positions % 64, Angles(angle.cos(), angle.sin()), scene.qkv[:batch].contiguous()


def in_graph(heads, kv_heads, dim):
    """With the kernel that writes the new keys just before it, many times: nothing may be read too early."""
    for lengths, alone in (([385], True), ([512], True), ([513], True), ([65], True), ([1400], True), ([385, 64, 700, 1], False)):
        scene = Scene(lengths, heads, kv_heads, dim, layers=8)
        lists, positions, slots, angles, src = given(scene, len(lengths), alone, 64)
        found, wrongs = [], []
        for few, early in ((0, 0), (0, 0), (BIG, 0), (BIG, BIG)):
            which = len(wrongs)
            torch.manual_seed(1)
            graph, outs = layers_of(scene, lists, positions, slots, angles, src, 8, few, early)
            wrong = 0
            for i in range(100):
                src.copy_(torch.randn(src.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(i)))
                graph.replay()
                torch.cuda.synchronize()
                made = torch.stack(outs).clone()
                if which == 0:
                    found.append(made)
                else:
                    wrong += not torch.equal(made, found[i])
            wrongs.append(wrong)
        print(f"  in a graph {lengths}: {'same bits' if not any(wrongs) else f'DIFFER: old again, new, new early {wrongs[1:]} of 100'}", flush=True)


def us_of(graph, num=8):
    times = []
    for _ in range(num):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record(); b.synchronize()
        times.append(a.elapsed_time(b) * 1000)
    return sorted(times)[len(times) // 2]


def timing():
    """Microseconds a layer of entering heads and attending, the cache cold; in brackets attention with a warm one, no flush."""
    variants = {"old": (0, 0), "old early": (0, BIG), "new early": (BIG, BIG)}
    flush = torch.zeros(40 * 2**20, device="cuda")
    num_layers = 16
    begun = time.time()
    for name, heads, kv_heads in (("llama8b", 32, 8), ("qwen30b", 32, 4)):
        print(f"{name}: {'batch x context':16}" + "".join(f"{v:>17}" for v in variants) + f"{'new, not alone':>17}", flush=True)
        for batch, contexts in ((1, (128, 256, 384, 512, 1024, 4096, 16384)), (2, (384, 4096) if kv_heads == 4 else ())):
            for context in contexts:
                if time.time() - begun > 40:
                    print("no more time"); return
                scene = Scene([context] * batch, heads, kv_heads, 128, layers=num_layers)
                cells = []
                for label, (few, early) in (variants | {"na": (BIG, BIG)}).items():
                    if (label == "na" and batch > 1):
                        continue
                    how = given(scene, batch, batch == 1 and label != "na", num_singles(batch))
                    cold = us_of(layers_of(scene, *how, num_layers, few, early, flush)[0])
                    none = us_of(layers_of(scene, *how, num_layers, few, early, flush, what=0)[0])
                    warm = us_of(layers_of(scene, *how, num_layers, few, early, what=2)[0]) - us_of(layers_of(scene, *how, num_layers, few, early, what=0)[0])
                    cells.append(f"{(cold - none) / num_layers:7.2f} ({warm / num_layers:5.2f})")
                print(f"  {batch:3} x {context:5}           " + "".join(f"{c:>17}" for c in cells), flush=True)
                del scene
                KEPT.clear()


if __name__ == "__main__":
    if sys.argv[1] == "bits":
        bits(*map(int, sys.argv[2:]))
    else:
        timing()
