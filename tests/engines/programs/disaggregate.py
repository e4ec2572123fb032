"""One engine of two: ``disaggregate.py prefill|decode SETTINGS FOLDER``; the folder is where they wait for each other.

Settings are JSON: ``llm`` (arguments of `vllm.LLM`) and ``steps``, each a prompt that one prefills and the other decodes, which it
does again by itself at the end, for comparison (``again``: twice, the second time from its prefix cache); ``port`` and ``tp`` are
those of the engine that prefills; ``counts`` are those of kvbm at vLLM's Prometheus endpoint before that; ``dump``: the blocks of
each sequence are written to the folder, by who sends and who receives:

- ``length`` and ``seed`` of the prompt (those of one seed begin alike);
- ``again``: the prefix cache of the engine that decodes is kept;
- ``params``: what is changed in what the engine that prefills says;
- ``other``: the engine that prefills is given another prompt; ``lie``: its hash is replaced by that of the right one;
- ``kill``: it is killed before the other one decodes;
- ``push``: both are asked at once, and the prompt is sent while it is computed; ``also`` is the length of another one of the same
  steps; ``abort``: the request that prefills is aborted behind its first step, and ``die``: its engine is killed in the second one,
  in the middle of its layers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from generate import arguments, logprobs, prompt

from kvbm.integrations.vllm.identity import inputs_of

#: Tokens that are generated.
NEW = 12


def told(out: Any) -> dict[str, Any]:
    [one] = out.outputs
    found = {"tokens": list(one.token_ids), "logprobs": logprobs(one), "cached": out.num_cached_tokens}
    return {**found, "reason": one.finish_reason}


def wanted(_: Any) -> set[str]:
    """In a worker: requests that the other engine has asked for, and that are not there yet."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return {name.partition("/")[2].rpartition("#")[0] for name in get_kv_transfer_group()._of_worker.holds._wanted}


def dies(_: Any) -> None:
    """In a worker: it is killed in the second step of a prompt, when two layers are computed."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    holds = get_kv_transfer_group()._of_worker.holds
    saved, known = holds.saved, []

    def save(layer: str) -> None:
        saved(layer)
        known.append(layer)
        if known.count(layer) == 2 and len(set(known)) + 2 == len(known):
            end = time.monotonic() + 60
            while not any(one.has_ended for held in holds._requests.values() for one in held.sendings):
                assert time.monotonic() < end, "nothing was sent"
            os.kill(os.getpid(), signal.SIGKILL)

    holds.saved = save


def dumps(role: str, folder: Path) -> None:
    """Write the bits of what is sent, and of what has come, to files with the number of tokens in their name: b h l o t d."""
    import numpy as np

    import kvbm
    from kvbm.link.handle import Arrival
    from kvbm.reshard import Link

    def dump(link: Link, group: str, span: kvbm.Span) -> None:
        pool = link.endpoint.groups[group][1]
        blocks = [int(block) for block in span.table[: -(-span.tokens.stop // pool.shape.nt)]]
        copy = kvbm.Pool.allocate("universal", pool.shape, len(blocks))
        kvbm.convert(pool, copy, blocks, range(len(blocks)))
        np.save(folder / f"{role}.{span.tokens.stop}.npy", np.stack([np.asarray(array).view("uint8") for array in copy.arrays]))

    if role == "prefill":
        send = Link.send

        def sent(self: Link, key: str, span: kvbm.Span, *, group: str = "", **rest: Any) -> Any:
            dump(self, group, span)
            return send(self, key, span, group=group, **rest)

        Link.send = sent
        return
    settle = Arrival.settle

    def came(self: Arrival) -> None:
        if not self.has_failed and len(self.span.tokens):
            dump(self.link, sorted(self.link.endpoint.groups)[self.identity[0]], self.span)
        settle(self)

    Arrival.settle = came


def main(role: str, settings: dict[str, Any], folder: Path) -> None:
    from vllm import LLM, SamplingParams

    if settings.get("dump"):
        dumps(role, folder)

    usual = {
        "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True, "max_num_seqs": 4, "dtype": "float32",
        "enable_prefix_caching": True, "disable_log_stats": False,
    }  # fmt: skip
    llm = LLM(**arguments(usual, settings["llm"]))

    def run_all(prompts: list[list[int]], new: int, params: list[dict[str, Any] | None]) -> Any:
        sampling = [
            SamplingParams(
                temperature=0, max_tokens=new, detokenize=False, ignore_eos=True, logprobs=3,
                extra_args={"kv_transfer_params": one} if one else None,
            )
            for one in params
        ]  # fmt: skip
        return llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)

    def run(tokens: list[int], new: int, params: dict[str, Any] | None = None) -> Any:
        return run_all([tokens], new, [params])[0]

    def prefilled(tokens: list[list[int]], names: list[str], step: dict[str, Any]) -> None:
        """Prompts of which the other engine has asked for the names already."""
        end = time.monotonic() + 180
        while not all(set(names) <= known for known in llm.collective_rpc(wanted)):
            assert time.monotonic() < end, f"{names}: nobody has asked"
            time.sleep(0.005)
        if step.get("die"):
            llm.collective_rpc(dies)
        for one, name in zip(tokens, names, strict=True):
            extra = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": name}}
            sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True, extra_args=extra)
            llm.llm_engine.add_request(name, {"prompt_token_ids": one}, sampling)
        if step.get("abort"):
            llm.llm_engine.step()
            llm.llm_engine.abort_request(names)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()

    def wait(name: str) -> Any:
        end = time.monotonic() + 180
        while not (folder / name).exists():
            assert time.monotonic() < end, f"{name}: not there"
            time.sleep(0.02)
            if role == "prefill":
                run([5, 6, 7], 1)  # an engine without requests stands still
        return json.loads((folder / name).read_text())

    def put(name: str, value: Any) -> None:
        (folder / f"{name}.part").write_text(json.dumps(value))
        (folder / f"{name}.part").rename(folder / name)

    results: list[dict[str, Any]] = []
    if role == "prefill":
        put("pid", os.getpid())
    else:
        run(prompt(64), 2)  # the first step of a process may not be one of a single token
    for number, step in enumerate(settings["steps"]):
        tokens = prompt(step["length"], step.get("seed"))
        lengths = [step["length"], *([step["also"]] if step.get("also") else [])]
        names = [f"{number}/{length}" for length in lengths]
        if step.get("push") and role == "prefill":
            prefilled([prompt(length) for length in lengths], names, step)
            wait(f"{number}.done")
            continue
        if role == "prefill":
            if step.get("other"):
                tokens = [token % 1000 + 3 for token in tokens]
            put(f"{number}", run(tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False}).kv_transfer_params)
            wait(f"{number}.done")
            continue
        if step.get("push"):
            wait("pid")  # it listens
            assert llm.reset_prefix_cache()
            there = {"do_remote_prefill": True, "remote_host": "127.0.0.1"}
            there |= {"remote_port": settings["port"], "remote_workers": settings["tp"]}
            given = [there | {"transfer_id": name} for name in names]
            found, *more = run_all([prompt(length) for length in lengths], NEW, given)
            results.append(told(found) | {"also": [told(one) for one in more]})
            put(f"{number}.done", True)
            if step.get("die"):
                break
            continue
        params = wait(f"{number}")
        if step.get("lie"):
            params["remote_inputs"] = inputs_of(SimpleNamespace(prompt_token_ids=tokens), params["remote_num_tokens"])
        if step.get("kill"):
            os.kill(wait("pid"), signal.SIGKILL)
        if not step.get("again"):
            assert llm.reset_prefix_cache()
        of_this = {"remote_prefill_cached_tokens": None}  # else vLLM counts those of the other engine
        loaded = told(run(tokens, NEW, {**params, **of_this, **step.get("params", {})}))
        results.append(loaded)
        put(f"{number}.done", True)
        if step.get("kill"):
            break
    counts = {one.name: one.value for one in llm.get_metrics() if one.name.startswith("vllm:kvbm_")}
    if role == "decode":
        for step, found in zip(settings["steps"], results, strict=True):
            assert llm.reset_prefix_cache()
            found["alone"] = told(run(prompt(step["length"], step.get("seed")), NEW))
            if settings.get("again"):
                found["again"] = told(run(prompt(step["length"], step.get("seed")), NEW))
            for one in found.get("also", ()):
                one["alone"] = told(run(prompt(step["also"]), NEW))
            found["counts"] = counts
    else:
        results = [counts]
    print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
