"""A transformers model reads the prompt in two processes and generates in a third: its logits keep every bit.

    torchrun --nproc-per-node 3 examples/disaggregated/generation.py [--wire torch | nixl] [--devices cuda:0 cuda:1]
        [--model NAME_OR_PATH] [--prompt TEXT] [--tokens 203] [--new 16] [--spoil]

Processes 0 and 1 are the ranks of prefill (tp 2, pages of 16 tokens), process 2 is decode (tp 1, blocks of 64 in the model's own
cache).  transformers computes the whole model in each process: of it a rank of prefill keeps half of the KV heads, which is what a
rank of an engine has, and sends each layer as soon as it is computed.  Decode continues from what came.  Then it does all of it by
itself, from the prompt on, and compares: each step's logits must have the same bits.  --spoil changes one element of what came: the
logits must differ then.

The model is a small Llama with random weights, made on the spot, or the one that --model names; the prompt is random, or --prompt.
With GPUs each side's model is on its own one; both must be of one kind, since different GPUs compute different bits.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import numpy as np
import torch
import transformers
from torch.distributed import rendezvous

import kvbm
from kvbm import reshard, wire

#: Ranks, tokens of a block, name.
PREFILL, DECODE = (2, 16, "prefill"), (1, 64, "decode")
KEY = "request-17"


def make_model(name: str | None, device: torch.device) -> Any:
    """The model that was asked for, or a small Llama, the same in each process."""
    if name is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to(device).eval()
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=4096, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16).eval()


def make_cache(model: Any, tokens: int) -> Any:
    """The model's cache, which stays where it is: of as many tokens as are whole blocks on both sides."""
    config, most = model.config, math.lcm(PREFILL[1], DECODE[1])
    cache = transformers.StaticCache(config=config, max_cache_len=-(-tokens // most) * most)
    if any(layer.is_sliding for layer in cache.layers):
        sys.exit("this example takes models whose layers all attend to all tokens")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, head_dim, model.dtype, model.device)
    return cache


def step(model: Any, cache: Any, tokens: list[int]) -> torch.Tensor:
    """The next token's logits; the tokens' keys and values are in the cache then."""
    given = torch.tensor([tokens], device=model.device)
    return model(input_ids=given, past_key_values=cache, use_cache=True).logits[0, -1].clone()


def generate(model: Any, cache: Any, token: int, count: int) -> tuple[list[int], list[torch.Tensor]]:
    """Take the likeliest token each time: tokens, and the logits that chose them."""
    chosen, found = [], []
    for _ in range(count):
        found.append(step(model, cache, [token]))
        token = int(found[-1].argmax())
        chosen.append(token)
    return chosen, found


def stream_of(device: torch.device) -> Any:
    """What copies wait for: the model's work so far."""
    return None if device.type == "cpu" else torch.cuda.current_stream(device)


def prefill(model: Any, cache: Any, prompt: list[int], pool: kvbm.Pool, heads: range, link: reshard.Link) -> int:
    """Read the prompt; each layer goes as soon as it is computed.  Returns the first new token."""
    whole = kvbm.Pool.from_transformers(cache, tokens_per_block=pool.shape.nt)
    used = -(-len(prompt) // pool.shape.nt)
    pages = np.random.default_rng(heads.start).permutation(pool.num_blocks)[:used]
    span = kvbm.Span(pages, range(len(prompt)))
    sendings = []

    def is_computed(layer: int) -> None:
        moves[layer].copy(range(used), pages)  # from the model's cache into this rank's pages, on the model's stream
        some, written = range(layer, layer + 1), stream_of(model.device)
        sendings.append(link.send(KEY, span, layers=some, wait=written, timeout=60))

    layers = range(pool.shape.nl)
    moves = [kvbm.Transfer(whole.section(l=[layer], h=heads), pool.section(l=[layer])) for layer in layers]
    for number, layer in enumerate(model.get_decoder().layers):
        layer.register_forward_hook(lambda *_, number=number: is_computed(number))
    first = int(step(model, cache, prompt).argmax())
    for sending in sendings:
        sending.synchronize()  # it came, and was found right
    print(
        f"prefill: {len(prompt)} tokens, KV heads {[*heads]} of {whole.shape.nh}, {len(sendings)} layers one by one",
        flush=True,
    )
    return first


def main() -> None:
    """Run one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", choices=("torch", "nixl"), default="torch")
    parser.add_argument("--devices", nargs=2, default=("cpu", "cpu"), metavar=("PREFILL", "DECODE"))
    parser.add_argument("--model", metavar="NAME_OR_PATH")
    parser.add_argument(
        "--prompt", metavar="TEXT", help="what to read, with the model's tokenizer; random tokens if not given"
    )
    parser.add_argument("--tokens", type=int, default=203, help="of a random prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate")
    parser.add_argument("--spoil", action="store_true", help="change one element of what came: logits must differ then")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    store, number, count = next(rendezvous("env://"))  # torchrun's own
    world = PREFILL[0] + DECODE[0]
    if count != world:
        sys.exit(f"expected torchrun --nproc-per-node {world}: {PREFILL[0]} ranks of prefill, {DECODE[0]} of decode")
    sends = number < PREFILL[0]
    rank = number if sends else number - PREFILL[0]
    device = torch.device(given.devices[not sends])
    if device.type == "cuda":
        torch.cuda.set_device(device)

    model = make_model(given.model, device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model) if given.prompt else None
    if tokenizer is not None:
        prompt = tokenizer(given.prompt)["input_ids"]
    else:
        prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, given.tokens).tolist()

    # What each rank holds.  Decode's pool is the model's cache itself; prefill has pages, as engines do.
    cache = make_cache(model, len(prompt) + given.new)
    pool = kvbm.Pool.from_transformers(cache, tokens_per_block=DECODE[1])
    sides = [reshard.vllm(pool.shape, tp=tp, nt=nt, name=name) for tp, nt, name in (PREFILL, DECODE)]
    mine, theirs = sides if sends else sides[::-1]
    shape = mine.shape(rank)
    if sends:
        layout, pages = kvbm.load("vllm/flash_attn_nhd"), -(-len(prompt) // mine.nt) + 3
        memory = [
            torch.zeros(one.shape, dtype=model.dtype, device=device) for one in layout.resolve(shape, pages).allocations
        ]
        pool = kvbm.Pool(layout, shape, memory)

    # An endpoint a rank; cards and the first token go by the store.
    name, backend = f"{mine.name}/{rank}", "gloo" if device.type == "cpu" else "nccl"
    carrier = wire.nixl(name) if given.wire == "nixl" else wire.torch(name, store, backend=backend)
    with reshard.Endpoint(mine.name, mine, rank, pool, model=str(given.model), wire=carrier, ring_bytes=64 << 20) as me:
        store.set(name, me.card())
        link = me.meet([store.get(f"{theirs.name}/{other}") for other in range(theirs.world)])
        with torch.inference_mode():
            if sends:
                heads = range(rank * shape.nh, (rank + 1) * shape.nh)
                store.set(f"first token of {rank}", str(prefill(model, cache, prompt, pool, heads, link)))
            else:
                span = kvbm.Span(range(-(-len(prompt) // mine.nt)), range(len(prompt)))
                arrival = link.receive(KEY, span, wait=stream_of(device), timeout=60)
                arrival.synchronize()  # only now may the model read the cache
                size, digest = link.stats()["bytes_received"] / 1e6, arrival.digest
                print(f"decode: {size:.1f} MB came, digest {digest:#018x}", flush=True)
                token = int(store.get("first token of 0"))
                require_the_same(model, cache, prompt, token, given, tokenizer)
        store.set(f"done {number}", b"")
        store.wait([f"done {other}" for other in range(world)])
    store.set(f"gone {number}", b"")
    if number == 0:  # it holds the store
        store.wait([f"gone {other}" for other in range(world)])


def require_the_same(model: Any, cache: Any, prompt: list[int], token: int, given: Any, tokenizer: Any) -> None:
    """Generate from the cache that came, then from the prompt on: ends the process where a bit of a logit differs."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(len(prompt))  # the cache holds the prompt
    if given.spoil:
        cache.layers[0].values[0, 0, len(prompt) // 2, 3] += 1
    chosen, found = generate(model, cache, token, given.new)

    alone = make_cache(model, len(prompt) + given.new)
    first = step(model, alone, prompt)
    wanted, logits = generate(model, alone, int(first.argmax()), given.new)
    differ = [number for number, pair in enumerate(zip(found, logits, strict=True)) if not torch.equal(*pair)]
    if token != int(first.argmax()) or chosen != wanted or differ:
        sys.exit(f"decode: {len(differ)} of {given.new} logits differ from those of one process that does it all")
    print(f"decode: tokens {[token, *chosen]}", flush=True)
    print(
        f"decode: {given.new} of {given.new} logits have the same bits as in one process that does it all", flush=True
    )
    if tokenizer is not None:
        print(tokenizer.decode([token, *chosen]), flush=True)


if __name__ == "__main__":
    main()
