"""Prefill on four ranks with blocks of 16 tokens, decode on two with blocks of 64: one sequence's cache goes over.

    torchrun --nproc-per-node 6 examples/disaggregated/run.py [--wire torch | nixl] [--mapped | --direct]
        [--devices cuda:0 cuda:1] [--tokens 2000]

Each process is a rank: 0 to 3 of prefill, 4 and 5 of decode.  Every element tells its layer, K or V, head, token and place, so that
decode can check what came without prefill's memory.  Without --devices all of it is in host memory.  With the torch wire and GPUs,
which NCCL connects, prefill and decode need a GPU each.  With --mapped chunks are packed straight into the memory of the receiver,
by CUDA IPC or memory that the processes share.  With --direct the receiver copies out of the sender's cache into its own.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch.distributed import rendezvous

import kvbm
from kvbm import reshard, wire

PREFILL, DECODE = 4, 2


def coded(layer: int, heads: range, tokens: range, model: kvbm.BlockShape) -> np.ndarray:
    """What K and V of some heads and tokens hold: by o, t, h, d."""
    o, t, h, d = np.ogrid[0 : model.no, tokens.start : tokens.stop, heads.start : heads.stop, 0 : model.hd]
    return (((layer * 2 + o) * 131 + h) * 8191 + t * 17 + d).astype(np.int16)


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", choices=("torch", "nixl"), default="torch")
    parser.add_argument("--mapped", action="store_true")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--devices", nargs=2, default=("cpu", "cpu"), metavar=("PREFILL", "DECODE"))
    parser.add_argument("--tokens", type=int, default=2000)
    given = parser.parse_args()

    store, number, _ = next(rendezvous("env://"))  # torchrun's own
    sends = number < PREFILL
    rank = number if sends else number - PREFILL

    # What each rank holds: heads in equal shares.
    model = kvbm.load_shape("llama-3.1-8b,nl=8,dtype=int16")
    prefill = reshard.vllm(model, tp=PREFILL, nt=16, name="prefill")
    decode = reshard.vllm(model, tp=DECODE, nt=64, name="decode")
    mine = prefill if sends else decode
    blocks = -(-given.tokens // mine.nt) + 3
    layout = kvbm.load("vllm/flash_attn_nhd" if sends else "vllm/flash_attn_hnd")
    device = torch.device(given.devices[not sends])
    if given.direct and device.type == "cpu":  # memory that processes share
        pool = kvbm.Pool.allocate(layout, mine.shape(rank), blocks, "shared")
        cache = [torch.from_numpy(array) for array in pool.arrays]
    else:
        arrays = layout.resolve(mine.shape(rank), blocks).allocations
        cache = [torch.zeros(array.shape, dtype=torch.int16, device=device) for array in arrays]
        pool = kvbm.Pool(layout, mine.shape(rank), cache)
    table = np.random.default_rng(sends).permutation(blocks)[: -(-given.tokens // mine.nt)]
    heads = range(rank * mine.shape(rank).nh, (rank + 1) * mine.shape(rank).nh)

    # An endpoint a rank; cards go by the store, which carries a few KB.
    name, backend = f"{mine.name}/{rank}", "gloo" if device.type == "cpu" else "nccl"
    carrier: wire.Wire = wire.nixl(name) if given.wire == "nixl" else wire.torch(name, store, backend=backend)
    if given.mapped or given.direct:
        carrier = wire.mapped(carrier)
    with reshard.Endpoint(mine.name, mine, rank, pool, wire=carrier, ring_bytes=64 << 20, direct=given.direct) as me:
        store.set(f"card of {number}", me.card())
        others = range(PREFILL, PREFILL + DECODE) if sends else range(PREFILL)
        link = me.meet([store.get(f"card of {other}") for other in others])

        written = None if device.type == "cpu" else torch.cuda.current_stream(device)  # what the copies wait for
        if sends:
            for layer, array in enumerate(cache):  # o b t h d
                values = coded(layer, heads, range(len(table) * mine.nt), model)
                values = values.reshape(2, len(table), mine.nt, len(heads), model.hd)
                array[:, table] = torch.from_numpy(values).to(device)
            link.send("request-17", kvbm.Span(table, range(given.tokens)), wait=written, timeout=60).synchronize()
            if given.mapped:
                chunks = link.stats()
                how = f"{chunks['chunks_mapped']} of {chunks['chunks_sent']} chunks packed there"
                print(f"prefill {rank}: {how}\n", end="", flush=True)
        else:
            begin = time.perf_counter()
            arrival = link.receive("request-17", kvbm.Span(table, range(given.tokens)), wait=written, timeout=60)
            arrival.synchronize()
            seconds = time.perf_counter() - begin
            for layer, array in enumerate(cache):  # o b h t d
                came = (
                    array[:, table].cpu().numpy().swapaxes(2, 3).reshape(2, -1, len(heads), model.hd)[:, : given.tokens]
                )
                assert np.array_equal(came, coded(layer, heads, range(given.tokens), model)), f"layer {layer} is wrong"
            size = link.stats()["bytes_received"] / 1e6
            took = f"{size:.0f} MB in {seconds * 1e3:.0f} ms"
            how = f", {', '.join(sorted(set(link.paths.values())))}" if given.direct else ""
            # Its end is a part of the text: lines of several ranks stay whole where the output has no buffer.
            print(f"decode {rank}: {given.tokens} tokens, {took}, digest {arrival.digest:#018x}{how}\n", end="", flush=True)
        store.set(f"done {number}", b"")
        store.wait([f"done {other}" for other in range(PREFILL + DECODE)])
    store.set(f"gone {number}", b"")
    if number == 0:  # it holds the store
        store.wait([f"gone {other}" for other in range(PREFILL + DECODE)])


if __name__ == "__main__":
    main()
