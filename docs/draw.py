"""Draws the pictures of the docs as SVG.

python docs/draw.py    writes docs/pictures/*.svg
"""

from __future__ import annotations

import math
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "pictures"
COLOURS = {
    "A": "#4878a8",
    "B": "#c0763a",
    "C": "#5a9560",
    "D": "#8d5a97",
    "empty": "#e4e4e4",
    "new": "#b03a48",
}
CELL = 18


class Picture:
    """Rectangles, text and arrows on a white ground."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, text: str = ""
    ) -> None:
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {shape} rx="2" fill="{colour}" stroke="#ffffff"/>')
        if text:
            dark = colour in (COLOURS["empty"], "#ffffff")
            self.text(
                x + width / 2, y + height / 2 + 4, text, "middle", "#222222" if dark else "#ffffff"
            )

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", colour: str = "#222222"
    ) -> None:
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"'
        self._parts.append(f"<text {place}>{escape(text)}</text>")

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self._parts.append(
            f'<line {ends} stroke="#555555" stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        width, height = self._size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        tip = (
            # In pixels, not in widths of the line: a tip must fit between two boxes.
            '<defs><marker id="tip" markerUnits="userSpaceOnUse" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            'orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" fill="#555555"/></marker></defs>'
        )
        ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        return "\n".join([f'{head} font-size="12">', tip, ground, *self._parts, "</svg>"]) + "\n"


def naive_and_cache() -> Picture:
    """What is computed for each new token: a triangle against its edge."""
    picture = Picture(520, 215)
    for left, title, cached in (
        (20, "naive: everything, every time", False),
        (280, "KV cache: only what is new", True),
    ):
        picture.text(left, 20, title)
        for token in range(8):
            for position in range(4 + token):
                is_new = not cached or token == 0 or position == 3 + token
                colour = COLOURS["new"] if is_new else COLOURS["empty"]
                picture.box(left + position * CELL, 32 + token * CELL, CELL, CELL, colour)
    picture.text(
        20,
        32 + 8 * CELL + 24,
        "One row per new token. Red: computed for it; grey: kept from before.",
    )
    return picture


def contiguous_and_paged() -> Picture:
    """Room for the longest against blocks as they are needed."""
    picture = Picture(520, 260)
    lengths = {"A": 5, "B": 14, "C": 8}
    picture.text(20, 20, "contiguous: room for 16 tokens each")
    for row, (name, length) in enumerate(lengths.items()):
        for token in range(16):
            colour = COLOURS[name] if token < length else COLOURS["empty"]
            picture.box(
                20 + token * CELL, 30 + row * 24, CELL, 20, colour, name if token == 0 else ""
            )
    picture.text(20, 130, "paged: blocks of 4 tokens, anywhere, numbered, as many as are needed")
    owners = ["B", "A", "B", "C", "A", "B", "C", "B", "", "", "", ""]
    filled = {"A": [4, 1], "B": [4, 4, 4, 2], "C": [4, 4]}
    for place, owner in enumerate(owners):
        count = filled[owner].pop(0) if owner else 0
        left, top = 20 + place % 6 * (4 * CELL + 8), 140 + place // 6 * 44
        # block 0 is nobody's
        picture.text(left + 2 * CELL, top + 33, str(place + 1), "middle", "#777777")
        for slot in range(4):
            colour = COLOURS[owner] if slot < count else COLOURS["empty"]
            picture.box(
                left + slot * CELL, top, CELL, 20, colour, owner if slot == 0 and owner else ""
            )
    notes = ("block tables:", "A → 2, 5", "B → 1, 3, 6, 8", "C → 4, 7", "free: 9 to 12")
    for x, note, name in zip((20, 120, 210, 330, 420), notes, ("", "A", "B", "C", ""), strict=True):
        picture.text(x, 245, note, colour=COLOURS.get(name, "#222222"))
    return picture


def static_and_continuous() -> Picture:
    """Who computes in which step."""
    picture = Picture(500, 225)
    lengths = {"A": 2, "B": 8, "C": 6, "D": 3}
    picture.text(20, 20, "static batches of two, a batch ends with its longest: 14 steps")
    start = 0
    for pair in ("AB", "CD"):
        longest = max(lengths[name] for name in pair)
        for row, name in enumerate(pair):
            for step in range(longest):
                colour = COLOURS[name] if step < lengths[name] else COLOURS["empty"]
                picture.box(
                    20 + (start + step) * 30,
                    30 + row * 26,
                    30,
                    24,
                    colour,
                    name if step == 0 else "",
                )
        start += longest
    picture.text(
        20, 120, "continuous, two at once, who waits joins where somebody is done: 11 steps"
    )
    rows = [[("A", 2), ("C", 6), ("D", 3)], [("B", 8)]]
    for row, turns in enumerate(rows):
        step = 0
        for name, length in turns:
            for i in range(length):
                picture.box(
                    20 + (step + i) * 30,
                    130 + row * 26,
                    30,
                    24,
                    COLOURS[name],
                    name if i == 0 else "",
                )
            step += length
    picture.text(20, 207, "Time runs to the right, one box a step. Grey: computed for nobody.")
    return picture


def prefix_sharing() -> Picture:
    """Two requests whose tables begin with the same blocks."""
    picture = Picture(560, 205)
    for i, text in enumerate(("You are a", "helpful as-", "sistant. An-")):
        picture.box(20 + i * 100, 70, 94, 30, COLOURS["A"], text)
    picture.box(340, 30, 94, 30, COLOURS["B"], "swer: 1+1?")
    picture.box(440, 30, 94, 30, COLOURS["B"], "2")
    picture.box(340, 110, 94, 30, COLOURS["C"], "swer: sky?")
    picture.box(440, 110, 94, 30, COLOURS["C"], "blue")
    picture.arrow(314, 80, 338, 50)
    picture.arrow(314, 90, 338, 122)
    picture.text(20, 40, "computed once, in both block tables")
    picture.text(20, 172, "A block's name is a hash of all tokens up to its end:")
    picture.text(20, 190, "equal names mean equal beginnings, not just equal blocks.")
    return picture


def attention_tiles() -> Picture:
    """Keys walked tile by tile with a running sum."""
    picture = Picture(560, 200)
    picture.text(20, 20, "keys and values, in tiles of a fixed size, wherever their blocks lie")
    for tile in range(4):
        left = 102 + tile * 112
        picture.box(left, 30, 90, 28, COLOURS["C"], f"tile {tile}")
        picture.box(left, 100, 90, 28, COLOURS["B"], "sum so far")
        picture.arrow(left + 45, 60, left + 45, 98)
        picture.arrow(left - 20, 114, left - 2, 114)
    picture.box(20, 100, 60, 28, COLOURS["A"], "query")
    picture.text(
        20,
        160,
        "Scores live for one tile only: memory does not grow with the length, and the order",
    )
    picture.text(20, 178, "of the additions is the same for one query or a thousand.")
    return picture


def weight_blocks() -> Picture:
    """A row of a weight in 8 bits with one scale, and a block of Q4_1."""
    picture = Picture(560, 235)
    picture.text(
        20, 20, "8 bits, a scale for the row: a byte a number, 127 or -127 for the largest"
    )
    for i, code in enumerate((12, -3, 41, -127, 7, 0, 66, -18)):
        picture.box(20 + i * 46, 30, 44, 22, COLOURS["A"], str(code))
    picture.text(20 + 8 * 46 + 6, 46, "…")
    picture.box(420, 30, 120, 22, COLOURS["new"], "scale, float32")
    picture.text(20, 92, "Q4_1: 32 numbers in 20 bytes, each is code × scale + minimum")
    picture.box(20, 102, 92, 22, COLOURS["new"], "scale")
    picture.box(114, 102, 92, 22, COLOURS["B"], "minimum")
    for i, (high, low) in enumerate(((9, 3), (15, 0), (4, 11), (7, 7), (2, 8))):
        picture.box(220 + i * 56, 102, 27, 22, COLOURS["C"], str(high))
        picture.box(248 + i * 56, 102, 27, 22, COLOURS["A"], str(low))
    picture.text(220 + 5 * 56 + 6, 118, "…")
    picture.text(66, 144, "float16", "middle", "#777777")
    picture.text(160, 144, "float16", "middle", "#777777")
    picture.text(220, 144, "16 bytes of two codes, 0 to 15 each", colour="#777777")
    picture.text(20, 182, "A product: integers times integers, added up exactly within a block;")
    picture.text(
        20, 202, "then one multiplication by both scales, and one rounded sum after the other:"
    )
    picture.text(
        20,
        222,
        "out = fma(scale × x_scale, Σ code × x_code, out), block after block",
        colour=COLOURS["new"],
    )
    return picture


def pipelined_steps() -> Picture:
    """The host's work hidden behind the device's."""
    picture = Picture(600, 235)
    for top, title, gap in (
        (30, "one step at a time: the device waits for the host", 40),
        (130, "two in flight", 0),
    ):
        picture.text(20, top - 10, title)
        picture.text(20, top + 20, "host")
        picture.text(20, top + 54, "device")
        time = 80.0
        for step in range(4):
            colour = list(COLOURS.values())[step]
            host = time if gap else 80 + max(0, step - 1) * 80 + (40 if step else 0)
            device = host + 40 if gap else 120 + step * 80
            picture.box(host, top + 4, 38, 24, colour, str(step))
            picture.box(device, top + 38, 78, 24, colour, str(step))
            time += 80 + gap
    picture.text(
        20,
        220,
        "Step 2 is prepared when step 0's tokens are back, while step 1 is computed. Time runs →",
    )
    return picture


def accepted_and_rejected() -> Picture:
    """One run of the rung's loop: SmolLM2 asked to repeat three sentences about a cat."""
    steps = (
        ("", "The", ""), ("", "cat", ""), ("", "sat", ""), ("", "on", ""),
        ("the", "mat", "bat . END"), (". The cat sat", "on", ""), ("the", "hat", "mat . The"),
        (". The cat sat", "on", ""), ("the", "bat", "hat . The"), (". END", "", ""),
    )  # fmt: skip
    picture = Picture(560, 64 + 22 * len(steps))
    picture.text(
        20,
        20,
        "Green: guessed and right. Blue: what the model says itself. Red: guessed and wrong.",
    )
    for number, (right, drawn, wrong) in enumerate(steps):
        top, left = 34 + 22 * number, 70.0
        picture.text(20, top + 14, f"step {number}")
        cells = [(word, "C") for word in right.split()] + [(word, "A") for word in drawn.split()]
        for word, colour in [*cells, *((word, "new") for word in wrong.split())]:
            picture.box(left, top, 44, 20, COLOURS[colour], word)
            left += 46 + (12 if colour == "A" else 0)
    picture.text(
        20,
        54 + 22 * len(steps),
        "22 tokens in 10 steps. Of the 22 guesses up to the end, 13 were right.",
    )
    return picture


def life_of_a_request() -> Picture:
    """Down once, up once."""
    picture = Picture(560, 330)
    stages = [
        ("border", "LLM, CLI, server: text and parameters are checked", "A"),
        ("frontend", "template, tokenizer → token ids", "A"),
        ("engine", "Scheduler.schedule() → Step", "B"),
        ("runner", "rows, batch: a step's tensors", "C"),
        ("model", "one decoder", "C"),
        ("kernels", "reference, cpu, triton", "C"),
    ]
    for i, (name, what, colour) in enumerate(stages):
        picture.box(60, 20 + i * 50, 90, 32, COLOURS[colour], name)
        picture.text(165, 40 + i * 50, what)
        if i:
            picture.arrow(105, 2 + i * 50, 105, 20 + i * 50)
    ups = (
        "text deltas",
        "detokenizer, stop strings",
        "Scheduler.commit(): append, stop, free, log",
        "sampled tokens",
        "logits",
    )
    picture.arrow(30, 302, 30, 20)
    for i, text in enumerate(ups):
        picture.text(165, 56 + i * 50, "↑ " + text, colour="#777777")
    return picture


def rotation() -> Picture:
    """RoPE: a pair of dimensions is a point, turned by the token's position."""
    picture = Picture(600, 250)
    picture.text(20, 20, "two coordinates of a query or key, turned by position × speed")
    for row, (name, speed) in enumerate((("first pair: fast", 0.9), ("a late pair: slow", 0.08))):
        top = 95 + row * 105
        picture.text(20, top + 4, name)
        for position in range(5):
            left, angle = 180 + position * 80, speed * position
            picture.box(left - 30, top - 30, 60, 60, COLOURS["empty"])
            picture.arrow(left, top, left + 26 * math.cos(angle), top - 26 * math.sin(angle))
            if not row:
                picture.text(left, top - 42, f"token {position}", "middle", "#777777")
    picture.text(
        20,
        242,
        "Between two tokens the angle depends on their distance alone, so the product does, too.",
    )
    return picture


PICTURES = {
    "rotation": rotation,
    "naive_and_cache": naive_and_cache,
    "contiguous_and_paged": contiguous_and_paged,
    "static_and_continuous": static_and_continuous,
    "prefix_sharing": prefix_sharing,
    "attention_tiles": attention_tiles,
    "weight_blocks": weight_blocks,
    "pipelined_steps": pipelined_steps,
    "accepted_and_rejected": accepted_and_rejected,
    "life_of_a_request": life_of_a_request,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
        print(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main()
