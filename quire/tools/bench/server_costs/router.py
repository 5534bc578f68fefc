"""What the router of `quire serve --replicas N` costs and gains, without a model.

    python -m quire.tools.bench.server_costs.router  # all of it
    python -m quire.tools.bench.server_costs.router chat  # 50 conversations, against round robin and one engine
    python -m quire.tools.bench.server_costs.router cost  # per request, by the length of its prompt
    python -m quire.tools.bench.server_costs.router load  # at 10,000 requests a second, simulated
    python -m quire.tools.bench.server_costs.router memory  # with a million cached blocks

Times are those of the processor. `chat` runs the real scheduler, prefix cache and router in virtual
time; a step takes 10 ms and 0.1 ms for each token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.observe.block_names import BlockNamer, pack_names
from quire.server.link.messages import pack_tokens
from quire.server.link.replicas.block_table import BlockTable
from quire.server.link.replicas.router import Assignment, PrefixRouter
from quire.tools.bench.server_costs.router_chat import show_chat

# What a choice costs


def show_cost(num_replicas: int = 8) -> None:
    """The choice with all that belongs to it; and beside it what a message to an engine costs
    anyway.
    """
    print(
        f"one request among {num_replicas} replicas that have 10,000 blocks each, µs (medians of 200):"
    )
    print(
        "its choice, for a prompt of new text, one that a replica has cached, one that all have; the news that a"
    )
    print(
        "replica has computed it, and for that given up as many blocks; packing its tokens, once for all processes"
    )
    print("(msgpack of them, which that stands for: encoding and decoding)")
    columns = ("tokens", "new", "cached", "by all", "news", "packing", "msgpack")
    print("".join(f"{name:>9}" for name in columns))
    source = random.Random(0)
    for length in (100, 500, 1000, 2000, 4000, 8000, 32_000):
        router = new_router(num_replicas, 10_000)
        namer = BlockNamer(16)
        for number in range(num_replicas):
            router.note_blocks(
                number, pack_names([source.getrandbits(64) for _ in range(10_000)]), b""
            )
        spent: dict[str, list[float]] = {name: [] for name in columns[1:]}
        for number in range(200):
            tokens = tuple(source.randrange(30_000) for _ in range(length))
            began = time.thread_time()
            prompt = pack_tokens(tokens)
            spent["packing"].append(time.thread_time() - began)
            began = time.thread_time()
            msgspec.msgpack.decode(msgspec.msgpack.encode(tokens), type=tuple[int, ...])
            spent["msgpack"].append(time.thread_time() - began)
            spent["new"].append(choose(router, namer, prompt))
            names = pack_names(namer.names(prompt))
            others = pack_names([source.getrandbits(64) for _ in range(len(names) // 8)])
            which = number % num_replicas
            router.note_blocks(which, others, b"")
            began = time.thread_time()
            router.note_blocks(which, names, others)
            spent["news"].append(time.thread_time() - began)
            spent["cached"].append(choose(router, namer, prompt))
            for other in range(num_replicas):
                router.note_blocks(other, names, b"")
            spent["by all"].append(choose(router, namer, prompt))
            for other in range(num_replicas):
                router.note_blocks(other, b"", names)
        print(
            f"{length:>9}"
            + "".join(f"{1e6 * statistics.median(spent[name]):>9.1f}" for name in columns[1:])
        )


def new_router(num_replicas: int, num_blocks: int) -> PrefixRouter:
    router = PrefixRouter(num_replicas)
    for number in range(num_replicas):
        router.join(number, 16, num_blocks, 256)
    return router


def choose(router: PrefixRouter, namer: BlockNamer, prompt: bytes) -> float:
    began = time.thread_time()
    assignment = router.place(namer.names(prompt), len(prompt) // 4, 1, None)
    router.computed(assignment)
    router.close(assignment)
    return time.thread_time() - began


def show_load(rate: int = 10_000, seconds: float = 3.0, num_replicas: int = 8) -> None:
    """Everything the router does for a request: its choice, the news of its blocks and of those
    that went for them, its first token, its end. Each takes a second, so `rate` of them are under
    way.
    """
    source = random.Random(0)
    router = new_router(num_replicas, 20_000)
    namer = BlockNamer(16)
    system = [source.randrange(30_000) for _ in range(256)]
    chats = [system + [source.randrange(30_000) for _ in range(64)] for _ in range(5000)]
    under_way: deque[Assignment] = deque()
    cached: list[deque[int]] = [deque() for _ in range(num_replicas)]
    spent = []
    prompt_tokens = 0
    cached_tokens = 0
    every = range(num_replicas)
    for _ in range(int(rate * seconds)):
        chat = source.choice(chats)
        if len(chat) > 1500:
            del chat[320:]
        chat += [source.randrange(30_000) for _ in range(source.randint(20, 120))]
        prompt = pack_tokens(chat)
        began = time.thread_time()
        names = namer.names(prompt)
        assignment = router.place(names, len(chat), 1, every)
        under_way.append(assignment)
        spent.append(time.thread_time() - began)
        replica = assignment.replica
        new = names[assignment.num_cached // 16 :].tolist()
        prompt_tokens += len(chat)
        cached_tokens += assignment.num_cached
        cached[replica].extend(new)
        old = [cached[replica].popleft() for _ in range(max(0, len(cached[replica]) - 20_000))]
        stored = pack_names(new)
        removed = pack_names(old)
        began = time.thread_time()
        router.note_blocks(replica, stored, removed)
        router.computed(assignment)
        if len(under_way) > rate:
            router.close(under_way.popleft())
        spent[-1] += time.thread_time() - began
    spent.sort()
    mean = statistics.mean(spent)
    last = spent[int(0.99 * len(spent))]
    length = prompt_tokens // len(spent)
    part = cached_tokens / prompt_tokens
    print(
        f"{rate} requests/s over {num_replicas} replicas: prompts of {length} tokens in the mean, {part:.2f} cached"
    )
    times = ("mean", mean), ("median", statistics.median(spent)), ("p99", last)
    print("per request: " + ", ".join(f"{name} {1e6 * value:.1f} µs" for name, value in times))
    print(f"so a second of such load takes {mean * rate:.2f} s of one core")


# Many engines


def show_many(num_blocks: int = 40_000, length: int = 1000) -> None:
    """Choices, news, and engines that come and go, from one engine to a thousand; their caches are
    full.
    """
    print(
        f"prompts of {length:,} tokens among engines of {num_blocks:,} blocks, processor time in µs"
    )
    print("(the least and the median of 200):")
    print(
        "the choice for a prompt of new text, one that an engine has cached, one that all have; the news of 16"
    )
    print(
        "blocks that come and 16 that go; an engine that leaves and joins; memory of the process, MiB"
    )
    columns = ("new", "cached", "by all", "news", "rejoin")
    print(f"{'engines':>9}" + "".join(f"{name:>16}" for name in columns) + f"{'MiB':>9}")
    source = np.random.default_rng(0)
    for num_replicas in (1, 8, 100, 256, 1000):
        router = new_router(num_replicas, num_blocks)
        namer = BlockNamer(16)
        for number in range(num_replicas):
            router.note_blocks(
                number, source.integers(0, 2**64, num_blocks - 200, np.uint64).tobytes(), b""
            )
        spent: dict[str, list[float]] = {name: [] for name in columns}
        for number in range(200):
            prompt = source.integers(0, 30_000, length, np.int32).tobytes()
            names = pack_names(namer.names(prompt))
            which = number * 7 % num_replicas
            spent["new"].append(choose(router, namer, prompt))
            router.note_blocks(which, names, b"")
            spent["cached"].append(choose(router, namer, prompt))
            if number % 10 == 0:
                for other in range(num_replicas):
                    router.note_blocks(other, names, b"")
                spent["by all"].append(choose(router, namer, prompt))
                for other in range(num_replicas):
                    router.note_blocks(other, b"", names)
            router.note_blocks(which, b"", names)
            come, go = (source.integers(0, 2**64, 16, np.uint64).tobytes() for _ in range(2))
            router.note_blocks(which, go, b"")
            spent["news"].append(timed(router.note_blocks, which, come, go))
            router.note_blocks(which, b"", come)
        for number in range(min(num_replicas, 50)):
            spent["rejoin"].append(timed(rejoin, router, number, num_blocks))
        shown = [
            f"{1e6 * min(one):>9.1f} {1e6 * statistics.median(one):>6.1f}" for one in spent.values()
        ]
        print(f"{num_replicas:>9}" + "".join(shown) + f"{resident_mib():>9,.0f}", flush=True)


def rejoin(router: PrefixRouter, number: int, num_blocks: int) -> None:
    router.leave(number)
    router.join(number, 16, num_blocks, 256)


def timed(call: Callable[..., None], *arguments: Any) -> float:
    began = time.thread_time()
    call(*arguments)
    return time.thread_time() - began


def resident_mib() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20


# Its memory


def show_memory(num_blocks: int = 1_000_000, num_replicas: int = 4) -> None:
    source = random.Random(0)
    names = [source.getrandbits(64) for _ in range(num_blocks)]
    each = num_blocks // num_replicas
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    router = new_router(num_replicas, each)
    for number in range(num_replicas):
        for first in range(number * each, (number + 1) * each, 1000):
            router.note_blocks(number, pack_names(names[first : first + 1000]), b"")
    taken = tracemalloc.get_traced_memory()[0] - before
    assert sum(router.num_cached_blocks(number) for number in range(num_replicas)) == num_blocks
    before = tracemalloc.get_traced_memory()[0]
    plain = {name + 1 - 1 for name in names}
    usual = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(plain) == num_blocks
    print(
        f"{num_blocks} cached blocks over {num_replicas} replicas: {taken / 2**20:.1f} MiB, {taken / num_blocks:.1f} "
        f"bytes a block (a Python set of the same: {usual / 2**20:.1f} MiB)"
    )
    for count in (1, 16, 512):
        table = BlockTable()
        table.join()
        pieces = [
            np.array(names[first : first + count], np.uint64)
            for first in range(0, each - count, count)
        ]
        times = []
        for change in (table.add, table.discard):
            began = time.thread_time()
            for piece in pieces:
                change(0, piece)
            times.append(1e6 * (time.thread_time() - began) / (count * len(pieces)))
        print(
            f"blocks that come or go {count} at a time: {times[0]:.2f} and {times[1]:.2f} µs each"
        )


PARTS = {
    "chat": show_chat,
    "cost": show_cost,
    "load": show_load,
    "many": show_many,
    "memory": show_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all, if none is given")
    for number, name in enumerate(parser.parse_args().parts or PARTS):
        if name not in PARTS:
            parser.error(f"there is no {name!r}; choose from {', '.join(PARTS)}")
        if number:
            print()
        PARTS[name]()


if __name__ == "__main__":
    main()
