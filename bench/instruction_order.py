"""Looks for quicker orders of the instructions in quire/backends/cpu/quantized_neon.h, on the ARM
machine it runs on.

    python bench/instruction_order.py EightByFour --seconds 60          # prints what was found
    python bench/instruction_order.py FourByEight --seconds 60 --write  # and puts it into the file

The loop of that struct is taken as it stands. Each round moves some instructions, as far as the
registers they read and write allow, in two dozen copies; these are compiled and run in turn, and
the quickest is where the next round begins. The results are those of before, bit for bit: every
instruction still has the operands it had.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEADER = Path(__file__).resolve().parents[1] / "quire/backends/cpu/quantized_neon.h"
COPIES, UNITS = 24, 18
MAIN = """
#include <cstdio>
#include <ctime>
#include <vector>
static double now() { timespec t; clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
template <class Call> void measure() {
  static std::vector<char> memory(1 << 20, 1);
  alignas(16) static const int first[4] = {};
  static float totals[128];
  Call call{};
  for (size_t r = 0; r < sizeof call.rows / 8; ++r) {
    call.rows[r] = reinterpret_cast<const int8_t*>(&memory[r * 4160]);
    call.factors[r] = reinterpret_cast<const float*>(&memory[65536 + r * 4160]);
  }
  call.quants = reinterpret_cast<const uint8_t*>(&memory[131072]);
  call.scales = reinterpret_cast<decltype(call.scales)>(&memory[196608]);
  OTHERS
  call.units = UNITS, call.first_sums = first, call.totals = totals;
  double best = 1;
  for (int i = 0; i < 8; ++i) {
    const double begin = now();
    for (int j = 0; j < 400; ++j) call.run();
    const double took = now() - begin;
    best = took < best ? took : best;
  }
  std::printf("%.3f\\n", best / 400 / UNITS * 1e9);
}
int main() { CALLS }
"""
OTHERS = {
    "EightByFour": "call.ahead = call.quants;",
    "FourByEight": "call.minima = call.scales + 8192;",
}


@dataclass(frozen=True)
class Instruction:
    text: str
    reads: frozenset[str]
    writes: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Instruction:
        name, _, operands = text.partition(" ")
        registers = [re.sub("^[qd]", "v", one) for one in re.findall(r"\b[xvqd]\d+\b", operands)]
        if name == "prfm":
            return cls(text, frozenset(registers), frozenset())
        writes = {registers[0]} | ({registers[1]} if re.search(r"\], #", operands) else set())
        reads = set(registers if name in ("sdot", "fmla") else registers[1:])
        return cls(text, frozenset(reads), frozenset(writes))

    def must_stay_before(self, other: Instruction) -> bool:
        return bool(
            self.writes & other.reads or self.reads & other.writes or self.writes & other.writes
        )


Order = list[Instruction]


def struct_text(name: str) -> tuple[str, str, str]:
    """What comes before the struct's loop in the file, the loop, and what comes after it."""
    whole = HEADER.read_text()
    marker = "QUIRE_BEGIN_LOOP\n"
    begin = whole.index(marker, whole.index(f"struct {name} ")) + len(marker)
    end = whole.index('      "subs', begin)
    return whole[:begin], whole[begin:end], whole[end:]


def loop_text(order: Order) -> str:
    lines = [""]
    for instruction in order:
        if len(lines[-1]) + len(instruction.text) > 102:
            lines.append("")
        lines[-1] += instruction.text + "\\n"
    return "".join(f'      "{line}"\n' for line in lines)


def moved(order: Order) -> Order:
    """A copy in which some instructions, or two or three neighbours, stand elsewhere."""
    order = list(order)
    for _ in range(random.choice((1, 2, 3, 5, 8, 13))):
        place, count = random.randrange(len(order)), random.choice((1, 1, 1, 1, 2, 3))
        taken, rest = order[place : place + count], order[:place] + order[place + count :]
        first = last = place
        while first > 0 and not any(rest[first - 1].must_stay_before(one) for one in taken):
            first -= 1
        while last < len(rest) and not any(one.must_stay_before(rest[last]) for one in taken):
            last += 1
        target = random.randint(first, last)
        order = rest[:target] + taken + rest[target:]
    return order


def measure(name: str, orders: Sequence[Order], folder: Path) -> list[float]:
    """Nanoseconds for each unit of 32 numbers."""
    before, _, after = struct_text(name)
    struct = before[before.index(f"struct {name} ") :], after[: after.index("\n};\n") + 4]
    vectors = before[before.index("#define") : before.index("// Eight rows")]
    copies = [
        f"namespace c{i} {{ {struct[0]}{loop_text(order)}{struct[1]} }}"
        for i, order in enumerate(orders)
    ]
    calls = " ".join(f"measure<c{i}::{name}>();" for i in range(len(orders)))
    main = MAIN.replace("OTHERS", OTHERS[name]).replace("CALLS", calls).replace("UNITS", str(UNITS))
    source = folder / "orders.cpp"
    source.write_text("#include <cstdint>\n" + vectors + "\n".join(copies) + main)
    subprocess.run(
        ["g++", "-O1", "-std=c++17", "-mcpu=native", source, "-o", folder / "orders"], check=True
    )
    return [float(line) for line in subprocess.check_output(folder / "orders", text=True).split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("struct", choices=list(OTHERS))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--write", action="store_true", help="put what was found into the file")
    options = parser.parse_args()
    before, loop, after = struct_text(options.struct)
    best = [
        Instruction.parse(one)
        for line in re.findall('"(.*)"', loop)
        for one in line.split("\\n")
        if one
    ]
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            orders = [best, *(moved(best) for _ in range(COPIES))]
            times = measure(options.struct, orders, Path(folder))
            if min(times[1:]) < times[0]:
                print(f"{times[0]:.2f} -> {min(times[1:]):.2f} ns a unit", flush=True)
                best = orders[times.index(min(times[1:]))]
    if options.write:
        HEADER.write_text(before + loop_text(best) + after)
    else:
        print(loop_text(best))


if __name__ == "__main__":
    main()
