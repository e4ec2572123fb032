"""transformers' continuous batching with kvbm: a request waits in host memory, another one changes managers, a cache is too small.

    python examples/transformers_batching.py [--device cpu | cuda] [--model NAME_OR_PATH] [--prompt TEXT] [--new 96]
        [--dtype float32] [--spoil]

Needs pip install '.[demo]' in a checkout, with transformers 5.19 to 5.24.  Each part prints tokens beside those of a manager that
nobody touched: they must be the same, and so must all bits of their log probabilities where a request is alone in its batch.
--spoil changes a byte of what waits in host memory: digests find it, and the request is computed again.

The model is a small Llama with random weights, made on the spot, or the one that --model names; the prompt is random, or --prompt.
In bfloat16 the engine by itself generates other tokens where a batch is composed otherwise, as the last part's are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers

from kvbm.integrations.transformers import batching as batching


def make_model(name: str | None, device: str, dtype: str) -> Any:
    """The model that was asked for, or a small Llama."""
    if name is not None:
        found = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
        return found.to(device).eval()
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=4096, initializer_range=0.2, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device=device, dtype=getattr(torch, dtype)).eval()


def settings(page: int, blocks: int) -> Any:
    """A cache of so many blocks; log probabilities, to compare."""
    return transformers.ContinuousBatchingConfig(
        page_size=page, num_blocks=blocks, max_batch_tokens=256, return_logprobs=True, auto_switch_to_flash=False
    )


@contextmanager
def manager(model: Any, new: int, page: int) -> Iterator[Any]:
    """A manager that generates greedily."""
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=new)
    found = model.init_continuous_batching(
        generation_config=greedy, continuous_batching_config=settings(page, 1024 // page)
    )
    found.start()
    try:
        yield found
    finally:
        found.stop()


def begin(found: Any, prompt: list[int], new: int, count: int) -> str:
    """A request that has `count` tokens or a few more."""
    name = str(found.add_request(prompt, max_new_tokens=new, streaming=True, eos_token_id=-1))
    for result in found.request_id_iter(name):
        if len(result.generated_tokens) >= count:
            return name
    sys.exit("the manager ended")


def end(found: Any, name: str) -> tuple[list[int], list[float]]:
    """All its tokens and their log probabilities."""
    result = next(result for result in found.request_id_iter(name) if result.is_finished())
    if result.error:
        sys.exit(result.error)
    return result.generated_tokens, result.logprobs


def compare(what: str, found: Any, expected: Any, bits: bool = True) -> None:
    """Say whether they are the same; end the program if not."""
    right = found == expected if bits else found[0] == expected[0]
    print(f"{what}: tokens {found[0][:6]} …, {'the same' if right else 'OTHERS'}")
    if not right:
        sys.exit(1)


def main() -> None:
    """Run the three parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model")
    parser.add_argument("--prompt")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--spoil", action="store_true")
    given = parser.parse_args()
    model = make_model(given.model, given.device, given.dtype)
    prompt = np.random.default_rng(1).integers(1, 1000, 150).tolist()
    if given.prompt:
        prompt = transformers.AutoTokenizer.from_pretrained(given.model)(given.prompt)["input_ids"]

    expected = {}
    for page in (16, 64):
        with manager(model, given.new, page) as alone:
            expected[page] = end(alone, begin(alone, prompt, given.new, 1))

    # 1. A request waits in host memory, in kvbm's universal layout, while its blocks are used for something else.
    with manager(model, given.new, 16) as engine:
        ours = batching.Batching(engine)
        host = batching.Host(ours.groups, 32)
        name = begin(engine, prompt, given.new, 8)
        parked = ours.offload(name, host)
        if given.spoil:
            first = host.pools["full_attention"].arrays[parked.held.ids["full_attention"][0]]
            first.reshape(-1).view(np.uint8)[1] ^= 0x40
        other = engine.add_request(prompt[::-1], max_new_tokens=8, eos_token_id=-1)
        end(engine, other)
        right = ours.restore(parked, host)
        print(f"host memory: {host.stats}, {'as it left' if right else 'computed again'}")
        compare("offloaded and restored", end(engine, name), expected[16], bits=right)

    # 2. One manager reads the prompt, in blocks of 16, another one generates, in blocks of 64.
    with manager(model, given.new, 16) as prefill, manager(model, given.new, 64) as decode:
        go_on = batching.HandOver(batching.Batching(prefill), batching.Batching(decode))
        name = begin(prefill, prompt, given.new, 1)
        compare("prefill here, decode there", end(decode, go_on(name, "moved")), expected[64])

    # 3. A cache that is too small for its requests, and one `with` around the engine's own call.
    prompts = [prompt[i : i + 40] for i in range(6)]
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=32)

    def tokens(blocks: int) -> list[list[int]]:
        found = model.generate_batch(prompts, greedy, settings(16, blocks), warmup=False)
        return [one.generated_tokens for one in found.values()]

    with batching.offloading(64) as made:
        few = tokens(16)
    print(f"a full cache: {made[0]}")
    compare("generate_batch", few, tokens(256))


if __name__ == "__main__":
    main()
