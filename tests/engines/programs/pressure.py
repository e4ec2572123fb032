"""vLLM with a small pool; blocks in host memory are damaged between rounds: ``pressure.py SETTINGS``; prints JSON behind RESULT."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any, NotRequired, TypedDict

import numpy as np
from generate import arguments, prompt
from offload import connector


class Settings(TypedDict):
    """What is run.

    Attributes
    ----------
    llm : dict
        Arguments of `vllm.LLM`.
    lengths : list of int
        Tokens of the prompts.
    together : int
        Requests at a time.
    new : int
        Tokens that are generated.
    rounds : int
        Rounds of requests.  Before each the prefix cache is reset, and blocks in host memory are damaged.
    damage : str
        ``bit``, ``nan`` or ``inf``; empty: none.
    aborts : bool, optional
        Abort one request of each round when its load has failed, before it is computed again.
    """

    llm: dict[str, Any]
    lengths: list[int]
    together: int
    new: int
    rounds: int
    damage: str
    aborts: NotRequired[bool]


#: Steps without a result after which the engine counts as standing still; a load on the CPU takes two.
IDLE = 500


def damage(kind: str, rng: random.Random) -> None:
    """Change some blocks in host memory: one element of each layer."""
    for stores in connector().connector_worker.worker.copier.memory.stores:
        for store in stores:
            known = np.flatnonzero(store.known)
            for unit in rng.sample(known.tolist(), len(known) // 4):
                block = store.host.arrays[unit]
                words = block.reshape(block.shape[0], -1).view(np.uint8).view(np.uint32)  # float32
                column = words[:, rng.randrange(words.shape[1])]
                column[...] = column ^ (1 << 30) if kind == "bit" else {"nan": 0x7FC00000, "inf": 0x7F800000}[kind]


class Rounds:
    """Runs requests on one engine."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        usual = {
            "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True, "dtype": "float32", "block_size": 32,
            "enable_prefix_caching": True, "disable_log_stats": False, "max_num_seqs": settings["together"],
        }  # fmt: skip
        self.settings, self.rng = settings, random.Random(1)
        self.llm = LLM(**arguments(usual, settings["llm"]))
        self.engine = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.count = self.failed = self.aborted = 0

    def state(self) -> str:
        """What the scheduler holds."""
        scheduler = self.scheduler
        queues = {name: list(getattr(scheduler, name)) for name in ("running", "kv_holding_waiting", "waiting")}
        told = [
            f"{name}: {one.request_id} {one.status.name} of {one.num_tokens} tokens, "
            f"{[len(ids) for ids in scheduler.kv_cache_manager.get_block_ids(one.request_id)]} blocks"
            for name, queue in queues.items() for one in queue
        ]  # fmt: skip
        return "\n".join([f"{scheduler.kv_cache_manager.block_pool.get_num_free_blocks()} blocks are free", *told])

    def run(self, lengths: list[int]) -> dict[int, list[int]]:
        """The tokens after each prompt, without aborted ones."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=self.settings["new"], detokenize=False, ignore_eos=True)
        names: dict[str, int] = {}
        for length in lengths:
            self.count += 1
            self.engine.add_request(str(self.count), {"prompt_token_ids": prompt(length)}, sampling)
            names[str(self.count)] = length
        found: dict[int, list[int]] = {}
        idle, is_aborted = 0, False
        while self.engine.has_unfinished_requests():
            ended = self.engine.step()
            idle = 0 if ended else idle + 1
            assert idle < IDLE, f"the engine stands still:\n{self.state()}"
            for one in ended:
                if one.finished:
                    found[names[one.request_id]] = list(one.outputs[0].token_ids)
            failed = [one for one in self.scheduler.requests.values() if one.request_id in self.scheduler.failed_recving_kv_req_ids]
            self.failed += len(failed)
            if failed and self.settings.get("aborts") and not is_aborted:
                is_aborted = True
                self.aborted += 1
                self.scheduler.finish_requests([failed[0].request_id], type(failed[0].status).FINISHED_ABORTED)
                self.engine.output_processor.abort_requests([failed[0].request_id], internal=True)
        return found

    def settle(self) -> None:
        """Wait until what was offloaded is told, and reset the prefix cache."""
        time.sleep(0.05)
        self.run([40])
        assert self.llm.reset_prefix_cache()


def main(settings: Settings) -> None:
    rounds = Rounds(settings)
    wrong, first = [], {}
    for number in range(settings["rounds"]):
        if number and settings["damage"]:
            rounds.settle()
            damage(settings["damage"], rounds.rng)
        lengths = list(settings["lengths"])
        rounds.rng.shuffle(lengths)
        for at in range(0, len(lengths), settings["together"]):
            for length, tokens in rounds.run(lengths[at : at + settings["together"]]).items():
                if first.setdefault(length, tokens) != tokens:
                    wrong.append([number, length, first[length], tokens])
    print("RESULT", json.dumps({"first": first, "wrong": wrong, "failed": rounds.failed, "aborted": rounds.aborted}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
