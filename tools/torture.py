#!/usr/bin/env python3
"""Copies with injected faults, each judged by digests and by the oracles; tests/helpers/torturing.py has the kinds and the words.

    tools/torture.py [--time S] [--rounds N] [--device D] [--kind KIND]    goes on where the state says that it was
    tools/torture.py --device D --kind KIND --number N [--seed S]          one round again
    tools/torture.py soak [--copies N] [--device D]                        what a process holds stays as it is
    tools/torture.py links [--transfers N] [--seed S]                      the same of engines that are linked by wires with faults

Devices: host, fake (a driver that is not one) and cuda:N, which needs torch; without one, host and fake in turns. A round is a
device, a kind, a seed and a number. The state is JSON, with counts and failures. The exit status is 1 where a round failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "helpers"), *sorted({str(path.parent) for path in TESTS.glob("*/test_*.py")})]
os.environ.setdefault("KVBM_NVRTC", "0")
os.environ.setdefault("KVBM_TUNE", "0")

#: Seconds that a batch of rounds may take, and between two lines of progress.
LIMIT, LINES = 180, 30

#: Samples of a soak; of these the first part is left out: pools of memory, caches and imports fill up in it.
SAMPLES, WARM = 40, 0.25

#: By how much the line through the samples may rise: bytes, and allocations on a GPU, of which tables of 1 MiB in all, counted as
#: 512 bytes or more each, wait to be freed together.  Other numbers of things may not grow.
ROOM = {"rss": 4 << 20, "device": 4 << 20, "allocations": 1 << 11}


def main() -> int:
    """Run what the words of the command line say."""
    from kvbm.kernels import is_using_stubs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("rounds", "soak", "links", "worker"), default="rounds")
    parser.add_argument("--time", type=float, help="seconds; without it and --rounds: an hour")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--device", action="append")
    parser.add_argument("--kind", action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int)
    parser.add_argument("--copies", type=int, default=1_000_000)
    parser.add_argument("--transfers", type=int, default=100_000)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "torture.json")
    given = parser.parse_args()
    devices, without = given.device or ["host", "fake"], "kvbm was built without CUDA kernels, and the fake driver launches them"
    if given.what == "links":
        return links(given.transfers, given.seed, given.state.with_name("torture-links.json"))
    if given.device and "fake" in devices and is_using_stubs():
        parser.error(f"--device fake: {without}: make dev, without KVBM_CUDA=0")
    if given.what == "worker":
        return work(devices[0], given.seed)
    if given.what == "soak":
        with_driver(devices[0], given.device is not None)
        return soak(devices[0] if given.device else "host", given.copies, given.state.with_name("torture-soak.json"))
    if given.number is not None:
        if len(devices) != 1 or len(given.kind or ()) != 1:
            parser.error("--number wants one --device and one --kind")
        with_driver(devices[0], True)
        return again(devices[0], given.kind[0], given.seed, given.number)
    if "fake" in devices and is_using_stubs():
        print(f"{without}: rounds on the host only", file=sys.stderr)
        devices.remove("fake")
    return Campaign(devices, given.kind, given.seed, given.state).run(given.time, given.rounds)


# ---- a round again ---------------------------------------------------------------------------------------------------


def folder_of_driver() -> Path:
    """Of the fake driver, compiled."""
    import processes

    if processes.COMPILER is None:
        raise SystemExit("no C compiler for the fake driver: --device host")
    folder = ROOT / "build" / "torture-driver"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:  # others may load it at this moment
        processes.compile_fake_driver(Path(made))
        for file in Path(made).iterdir():
            file.replace(folder / file.name)
    return folder


def with_driver(device: str, chosen: bool) -> None:
    """Start this program anew with the fake driver, where that is what is wanted."""
    if device == "fake" and chosen and "KVBM_TORTURE_DRIVER" not in os.environ:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder_of_driver()), "KVBM_TORTURE_DRIVER": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606


def again(device: str, kind: str, seed: int, number: int) -> int:
    """One round, with its traceback."""
    import torturing

    try:
        print(dict(torturing.one_round(device, kind, seed, number)))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


# ---- the campaign ----------------------------------------------------------------------------------------------------


class Campaign:
    """Rounds of all kinds in turns, each device's in a process of its own."""

    def __init__(self, devices: list[str], kinds: list[str] | None, seed: int, path: Path) -> None:
        import torturing

        self.kinds = torturing.KINDS
        if unknown := set(kinds or ()) - set(self.kinds):
            raise SystemExit(f"--kind: expected some of {', '.join(self.kinds)}, got {', '.join(unknown)}")
        self.path, self.seed = path, seed
        self.turns = [
            (device, kind)
            for device in devices
            for kind, of in self.kinds.items()
            if device.partition(":")[0] in of.devices and (not kinds or kind in kinds)
        ]
        if not self.turns:
            raise SystemExit("there is no such kind of round on this device")
        self.state: dict[str, Any] = {"seed": seed, "seconds": 0, "next": {}, "counts": {}, "failed": []}
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["seed"] == seed:
                self.state = before
        self.workers: dict[str, Worker] = {}
        self.spent: dict[tuple[str, str], float] = dict.fromkeys(self.turns, 0.0)

    def run(self, seconds: float | None, rounds: int | None) -> int:
        """Until the time is over, or so many rounds were done in this run."""
        seconds = 3600.0 if seconds is None and rounds is None else seconds
        start = line = time.monotonic()
        before, done, failed = self.state["seconds"], 0, len(self.state["failed"])
        try:
            while (seconds is None or time.monotonic() - start < seconds) and (rounds is None or done < rounds):
                turn = min(self.turns, key=lambda turn: self.spent[turn] / self.kinds[turn[1]].share)
                done += self.batch(*turn)
                self.state["seconds"] = round(before + time.monotonic() - start)
                self.save()
                if time.monotonic() - line > LINES:
                    line = time.monotonic()
                    print(self.line(), flush=True)
        except KeyboardInterrupt:
            print("stopped")
        finally:
            for worker in self.workers.values():
                worker.close()
        self.save()
        print(self.table())
        print(self.line())
        return int(len(self.state["failed"]) > failed)

    def batch(self, device: str, kind: str) -> int:
        name = f"{device.partition(':')[0]} {kind}"
        counts = collections.Counter(self.state["counts"].get(name, {}))
        first, start = self.state["next"].get(name, 0), time.monotonic()
        worker = self.workers.get(device)
        if worker is None or worker.process.poll() is not None:
            worker = self.workers[device] = Worker(device, self.seed)
        numbers = list(range(first, first + self.kinds[kind].batch))
        reached = first
        for number, found, error in worker.batch(kind, numbers):
            reached = number + 1
            counts["rounds"] += 1
            counts.update(found)
            if error:
                counts["failed"] += 1
                self.state["failed"].append([device, kind, number, error])
                print(f"failed: --device {device} --kind '{kind}' --seed {self.seed} --number {number}\n{error}", flush=True)
        self.state["next"][name] = reached
        self.state["counts"][name] = dict(sorted(counts.items()))
        self.spent[device, kind] += time.monotonic() - start
        return reached - first

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.state, indent=1), encoding="utf-8")
        part.replace(self.path)

    def line(self) -> str:
        total: collections.Counter[str] = collections.Counter()
        for counts in self.state["counts"].values():
            total.update(counts)
        words = ("rounds", "right", "injected", "found", "stated error", "harmless", "late", "done", "failed")
        return f"{self.state['seconds']} s: " + ", ".join(f"{total[word]:,} {word}" for word in words)

    def table(self) -> str:
        return json.dumps(self.state["counts"], indent=1)


class Worker:
    """A process that runs rounds of a device; see `work`."""

    def __init__(self, device: str, seed: int) -> None:
        environment = dict(os.environ)
        if device == "fake":
            environment["LD_LIBRARY_PATH"] = str(folder_of_driver())
        self.process = subprocess.Popen(
            [sys.executable, __file__, "worker", "--device", device, "--seed", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.lines = b""

    def batch(self, kind: str, numbers: list[int]) -> Any:
        """Number, counts and error of each round; one that ends the process ends the batch."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([kind, numbers]) + "\n")
        self.process.stdin.flush()
        number, end = numbers[0], time.monotonic() + LIMIT + 30
        while (answer := self.answer(end)) is not None:
            if "start" in answer:
                number = answer["start"]
            elif "end" in answer:
                return
            else:
                yield number, answer["found"], answer["error"]
                if answer["over"]:
                    return
        self.process.kill()
        status = self.process.wait()
        yield number, {}, f"the process did not answer: exit status {status}"

    def answer(self, end: float) -> Any:
        """A line of the worker; None where it ended, or there is none in time."""
        assert self.process.stdout is not None
        handle = self.process.stdout.fileno()
        while b"\n" not in self.lines:
            if not select.select([handle], [], [], max(end - time.monotonic(), 0))[0]:
                return None
            if not (more := os.read(handle, 1 << 16)):
                return None
            self.lines += more
        line, _, self.lines = self.lines.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def work(device: str, seed: int) -> int:
    """Rounds as the standard input says; each batch is a child, so that none sees what another left, but on a GPU."""
    import torturing

    say = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def answer(**words: Any) -> None:
        say.write(json.dumps(words) + "\n")

    def rounds(kind: str, numbers: list[int]) -> None:
        for number in numbers:
            answer(start=number)
            try:
                found, error = dict(torturing.one_round(device, kind, seed, number)), ""
            except Exception as raised:
                last = traceback.extract_tb(raised.__traceback__)[-1]
                found, error = {}, f"{type(raised).__name__}: {raised!s:.2000} ({Path(last.filename).name}:{last.lineno})"
            answer(found=found, error=error, over=False)

    for line in sys.stdin:
        kind, numbers = json.loads(line)
        if device.startswith("cuda"):
            rounds(kind, numbers)
            answer(end=True)
            continue
        begin, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(begin)
            signal.alarm(LIMIT)
            say = os.fdopen(write, "w", buffering=1, encoding="utf-8")
            status = 1
            try:
                rounds(kind, numbers)
                status = 0
            finally:
                say.flush()
                os._exit(status)
        os.close(write)
        last = ""
        with os.fdopen(begin, encoding="utf-8") as lines:
            for last in lines:
                say.write(last)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            why = "no answer in time" if status == -signal.SIGALRM else f"exit status {status}"
            answer(found={}, error=f"the process ended: {why}", over=True)
        else:
            answer(end=True)
    return 0


# ---- soak ------------------------------------------------------------------------------------------------------------


def soak(device: str, copies: int, path: Path) -> int:
    """So many copies in one process, and whether what it holds grows."""
    import torturing

    with tempfile.TemporaryDirectory(prefix="kvbm-soak-") as folder:
        held = torturing.Soak(device, Path(folder))
        samples: list[dict[str, int]] = []
        every, start = max(copies // SAMPLES, 1), time.monotonic()
        for number in range(copies):
            held.step(number)
            if (number + 1) % every == 0:
                samples.append({"copies": number + 1, **held.sample()})
                if len(samples) % 8 == 0:
                    print(f"{number + 1:,} copies in {time.monotonic() - start:.0f} s: {samples[-1]}", flush=True)
        held.check()
    return written(path, {"device": device, "copies": copies, "seconds": round(time.monotonic() - start)}, samples)


def links(transfers: int, seed: int, path: Path) -> int:
    """So many sequences over wires with faults, and whether what the process holds between two lives grows."""
    import soaking

    held, samples, line, start = soaking.Links(seed), [], 0.0, time.monotonic()
    while held.counts["transfers"] < transfers:
        held.life()
        samples.append({"copies": held.counts["transfers"], **held.sample()})
        if time.monotonic() - line > LINES:
            line = time.monotonic()
            print(f"{line - start:.0f} s: {dict(held.counts)}, {samples[-1]}", flush=True)
    counts = dict(sorted(held.counts.items()))
    print(json.dumps(counts, indent=1))
    return written(path, {"seed": seed, "seconds": round(time.monotonic() - start), "counts": counts}, samples)


def written(path: Path, result: dict[str, Any], samples: list[dict[str, int]]) -> int:
    """Judge the samples, and keep what was found."""
    told = judged(samples)
    result |= {"grows": told, "samples": samples}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    for name, of in told.items():
        print(f"{name}: {of['first']:,} to {of['last']:,}, {of['slope']:+.3f} a step: {'flat' if of['flat'] else 'GROWS'}")
    return int(not all(of["flat"] for of in told.values()))


def judged(samples: list[dict[str, int]]) -> dict[str, dict[str, Any]]:
    """By name: its slope by least squares over the samples behind the warm-up, and whether that is flat.

    What `ROOM` names may rise by that over all of these samples; other numbers of things may not be larger in the second half of
    these samples than in the first.
    """
    rest = samples[int(len(samples) * WARM) :]
    at = [one["copies"] for one in rest]
    told = {}
    for name in rest[0]:
        if name == "copies":
            continue
        of = [one[name] for one in rest]
        mean, middle = sum(at) / len(at), sum(of) / len(of)
        spread = sum((x - mean) ** 2 for x in at)
        slope = sum((x - mean) * (y - middle) for x, y in zip(at, of, strict=True)) / spread if spread else 0.0
        half = len(of) // 2
        rises = slope * (at[-1] - at[0])
        flat = rises <= ROOM[name] if name in ROOM else max(of[half:]) <= max(of[:half] or of)
        told[name] = {"first": of[0], "last": of[-1], "slope": slope, "flat": flat}
    return told


if __name__ == "__main__":
    sys.exit(main())
