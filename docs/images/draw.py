"""Draw the pictures of the documentation: ``python docs/images/draw.py``. Colours are legible on white and on black."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

GREY, BLUE, ORANGE, GREEN = "#75859c", "#3f83e0", "#d9732b", "#2f9a68"
X = (110, 250, 390, 530)
"""Centres of the four links of a chain."""


class Drawing:
    """An SVG of 640 units in width.

    Args:
        height: in the same units.
        title: what a reader who cannot see it is given.
    """

    def __init__(self, height: int, title: str):
        self.height, self.title, self.parts = height, title, [""]

    def text(self, x: float, y: float, words: str, color: str = GREY, anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{words}</text>')

    def box(self, x: float, y: float, words: str, color: str = GREY, width: int = 56) -> None:
        """A box around the point (x, y)."""
        self.parts.append(
            f'<rect x="{x - width / 2}" y="{y - 15}" width="{width}" height="30" rx="5" fill="none" stroke="{color}"/>'
        )
        self.text(x, y + 5, words, color)

    def arrow(
        self, x0: float, y0: float, x1: float, y1: float, color: str, bend: float = 0, dash: bool = False
    ) -> None:
        """An arrow, a curve if ``bend`` is not zero."""
        style = ' stroke-dasharray="5 4"' if dash else ""
        path = f"M{x0} {y0} Q{(x0 + x1) / 2} {(y0 + y1) / 2 + bend} {x1} {y1}"
        head = f"url(#{color[1:]})"
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6"{style} marker-end="{head}"/>'
        )

    def bar(self, x: float, y: float, width: float, color: str, opacity: float = 0.35) -> None:
        shape = f'x="{x}" y="{y}" width="{width}" height="14" rx="3"'
        self.parts.append(f'<rect {shape} fill="{color}" fill-opacity="{opacity}" stroke="{color}"/>')

    def chain(self, y: float, name: str = "h", color: str = GREY) -> None:
        """Four states and the forward pass between them."""
        for i, x in enumerate(X):
            self.box(x, y, f"{name}<tspan font-size='10' dy='3'>{i + 1}</tspan>", color)
        for x0, x1 in itertools.pairwise(X):
            self.arrow(x0 + 30, y, x1 - 32, y, color)
        self.arrow(40, y, X[0] - 32, y, color)
        self.text(30, y + 5, "x", color)
        self.arrow(X[-1] + 30, y, 592, y, color)
        self.text(612, y + 5, "loss", color)

    def back(self, y: float, words: Callable[[int], str], color: str = BLUE, dash: bool = False) -> None:
        """Arrows from each state to the one before it."""
        for i in range(3, 0, -1):
            self.arrow(X[i] - 10, y, X[i - 1] + 12, y, color, 22, dash)
            self.text((X[i] + X[i - 1]) / 2, y + 28, words(i), color)

    def svg(self) -> str:
        """Return the picture."""
        marks = "".join(
            f'<marker id="{c[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8z" fill="{c}"/></marker>'
            for c in (GREY, BLUE, ORANGE, GREEN)
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {self.height}" role="img" '
        head += 'font-family="system-ui, sans-serif" font-size="14">'
        return "\n".join([head, f"<title>{self.title}</title>", f"<defs>{marks}</defs>", *self.parts, "</svg>", ""])


def backward(title: str, words: Callable[[int], str], below: str, dash: bool = False) -> Drawing:
    drawing = Drawing(120, title)
    drawing.chain(30)
    drawing.back(52, words, dash=dash)
    drawing.text(320, 110, below)
    return drawing


def one_pass() -> Drawing:
    """The nodes that an engine puts into autograd's graph."""
    drawing = Drawing(230, "One pass: each block has a separate graph; the engine finds the cotangents between them")
    drawing.text(60, 20, "forward", GREY)
    for i, x in enumerate(X[:3]):
        drawing.box(x + 30, 50, f"block {i + 1}", GREY, 66)
        drawing.arrow(x - 75 if i else 50, 50, x - 5, 50, GREY)
        drawing.text(x - 34, 38, "detach", ORANGE)
    drawing.arrow(X[2] + 70, 50, 520, 50, GREY)
    drawing.text(545, 55, "loss", GREY)
    drawing.text(60, 105, "backward", BLUE)
    drawing.arrow(545, 64, 545, 118, BLUE)
    drawing.text(538, 92, "loss.backward()", BLUE, "end")
    drawing.box(340, 135, "engine: all VJPs of an iteration in one torch.autograd.grad call", BLUE, 460)
    for x in X[:3]:
        drawing.arrow(x + 30, 118, x + 30, 70, BLUE)
        drawing.arrow(x + 50, 152, x + 50, 184, GREEN)
        drawing.text(x + 50, 204, "p.grad", GREEN)
    drawing.text(320, 224, "autograd adds the gradients to p.grad, as without an engine", GREY)
    return drawing


def segments() -> Drawing:
    drawing = Drawing(
        170, "Segments: guess the states at the borders, run all segments at once, compare ends with starts"
    )
    for row, words in ((30, "guess"), (75, "run"), (130, "backward")):
        drawing.text(20, row + 12, words, GREY, "start")
    for i in range(4):
        x = 110 + 130 * i
        if i < 3:
            drawing.bar(x + 78, 30, 44, ORANGE)
            drawing.arrow(x + 122, 46, x + 130, 72, ORANGE)
        drawing.bar(x, 75, 122, BLUE)
        drawing.bar(x, 130, 122, GREEN)
        drawing.text(x + 61, 104, f"segment {i + 1}", BLUE)
    for i in range(3):
        drawing.text(240 + 130 * i - 4, 124, "=?", ORANGE)
    drawing.text(370, 164, "each row at once; again where an end differs from the next start", GREY)
    return drawing


def tree() -> Drawing:
    drawing = Drawing(130, "deeppcr: Jacobians are multiplied in pairs, in log L rounds")
    for i, x in enumerate(X):
        drawing.box(x, 25, f"F{i + 1}")
    for i, x in enumerate((180, 460)):
        drawing.box(x, 72, f"F{2 * i + 2} F{2 * i + 1}", BLUE, 80)
        drawing.arrow(X[2 * i], 40, x - 14, 56, BLUE)
        drawing.arrow(X[2 * i + 1], 40, x + 14, 56, BLUE)
    drawing.box(320, 112, "F4 F3 F2 F1", BLUE, 110)
    drawing.arrow(180, 88, 264, 105, BLUE)
    drawing.arrow(460, 88, 376, 105, BLUE)
    return drawing


def highway() -> Drawing:
    drawing = backward(
        "highway_bp: one scan along the skip connections, then iterations through the blocks", lambda i: "J", ""
    )
    for i in range(3, 0, -1):
        drawing.arrow(X[i], 48, X[i - 1], 48, ORANGE, 92)
    drawing.text(320, 116, "orange: skip connections K, one scan · blue: the rest J, all blocks at once, k times")
    return drawing


def truncated() -> Drawing:
    drawing = Drawing(120, "truncated: each cotangent passes a window of links")
    drawing.chain(30)
    for i in (3, 2):
        drawing.arrow(X[i] - 6, 50, X[i - 2] + 10, 50, BLUE, 44 if i == 3 else 74)
    drawing.text(320, 112, "window = 3: each e reaches its own state and the two before it")
    return drawing


def direct(title: str, below: str) -> Drawing:
    drawing = Drawing(120, title)
    drawing.chain(30)
    for i, x in enumerate(X):
        drawing.arrow(606, 42, x, 48, BLUE, 66 + 6 * (3 - i))
    drawing.text(320, 112, below, BLUE)
    return drawing


def two_passes(title: str, entry: str) -> Drawing:
    drawing = Drawing(172, title)
    drawing.chain(30)
    drawing.chain(90, "h̃", BLUE)
    for x in X:
        drawing.arrow(x, 48, x, 74, GREEN)
    drawing.arrow(612, 40, 30, 104, ORANGE, 118)
    drawing.text(320, 146, f"orange: the error enters the second pass {entry}")
    drawing.text(320, 166, "green: the differences of both passes are the updates")
    return drawing


def newton() -> Drawing:
    drawing = Drawing(156, "newton: all steps at once, corrected by a scan until nothing changes")
    for row, words in enumerate(("guess", "sweep 1", "sweep 2")):
        drawing.text(20, 30 + 42 * row, words, GREY, "start")
        for x in X:
            drawing.box(x + 20, 25 + 42 * row, "h", (GREY, BLUE, GREEN)[row])
            if row:
                drawing.arrow(x + 20, 42 * row, x + 20, 8 + 42 * row, BLUE)
        if row:
            for x0, x1 in itertools.pairwise(X):
                drawing.arrow(x0 + 50, 25 + 42 * row, x1 - 10, 25 + 42 * row, ORANGE)
    drawing.text(340, 148, "blue: one cell step of all states · orange: one scan with K")
    return drawing


def turns() -> Drawing:
    drawing = Drawing(90, "auto: the exact engines take turns over the first steps; the fastest stays")
    names = (("backprop", GREY), ("autograd", GREY), ("newton", BLUE), ("shooting", GREEN))
    for i, (name, color) in enumerate(names):
        drawing.box(70 + 100 * i, 30, name, color, 88)
    drawing.text(484, 18, "one turn each")
    drawing.arrow(420, 30, 548, 30, GREY)
    drawing.box(594, 30, "shooting", GREEN, 80)
    drawing.text(320, 78, "steps of the optimizer, every one with exact gradients")
    return drawing


def retraction() -> Drawing:
    drawing = backward(
        "orthogonal_backprop: exact gradients, then weights are projected to orthogonal ones", lambda i: "F", ""
    )
    drawing.text(320, 110, "after the step: each weight that drifted is projected to W Wᵀ = I", GREEN)
    return drawing


def along(title: str, below: str) -> Drawing:
    drawing = Drawing(110, title)
    drawing.chain(30)
    for x0, x1 in zip((40, *X), (*X, 606), strict=True):
        drawing.arrow(x0, 56, x1 - 6, 56, BLUE, 20)
    drawing.text(320, 98, below)
    return drawing


def two_losses() -> Drawing:
    drawing = Drawing(140, "mezo: the loss of the whole model at two points of its parameters")
    for row, words, color in ((30, "θ + εz", BLUE), (80, "θ - εz", GREEN)):
        drawing.box(90, row, words, color, 90)
        drawing.box(320, row, "the model", color, 110)
        drawing.arrow(136, row, 263, row, color)
        drawing.arrow(376, row, 520, row, color)
        drawing.text(552, row + 5, "loss", color)
    drawing.text(320, 130, "the update is the difference of both losses, by 2ε, times z")
    return drawing


DRAWINGS = {
    "one-pass": one_pass(),
    "segments": segments(),
    "auto": turns(),
    "backprop": backward(
        "backprop: link by link, from the last to the first",
        lambda i: f"{4 - i}. F",
        "each arrow waits for the one on its right",
    ),
    "deeppcr": tree(),
    "dfa": direct(
        "dfa: the last cotangent through a random matrix to each link",
        "each link: the last cotangent times a random matrix B",
    ),
    "drtp": direct(
        "drtp: the target through a random matrix to each layer", "each layer: the target times a random matrix B"
    ),
    "dsf": backward(
        "dsf: one constant diagonal for every link", lambda i: "a", "a: one diagonal for all links; one scan"
    ),
    "eprop": backward(
        "eprop: errors pass each unit's own memory only",
        lambda i: "gate",
        "one scan along the gates; nothing passes the recurrent weights",
    ),
    "fa": backward(
        "fa: other weights in place of the transposed ones",
        lambda i: "B",
        "B in place of the layer's own weights, all else exact",
    ),
    "fixed_point": backward(
        "fixed_point: all links at once, k times",
        lambda i: "F",
        "all arrows at once, k times: each iteration carries one link further",
        True,
    ),
    "forward_gradient": along(
        "forward_gradient: a random direction travels along in the forward pass",
        "blue: JVP of a random direction v; the update is (gradient · v) v",
    ),
    "foton": two_passes("foton: two forward passes", "through the transposed weights"),
    "highway_bp": highway(),
    "mezo": two_losses(),
    "newton": newton(),
    "orthogonal_backprop": retraction(),
    "pepita": two_passes("pepita: two forward passes", "through a random matrix"),
    "predictive_coding": backward(
        "predictive_coding: as fixed_point, by small steps",
        lambda i: "rate · F",
        "all arrows at once; each iteration moves a part of the distance",
        True,
    ),
    "rtrl": along(
        "rtrl: the influence of the parameters travels along with the state",
        "blue: P, the derivative of the state with respect to the parameters; the gradient is e P",
    ),
    "snap": backward(
        "snap: the diagonal of each link's Jacobian", lambda i: "diag F", "one scan along the diagonals of F"
    ),
    "target_propagation": backward(
        "target_propagation: learned inverses send targets back", lambda i: "g", "g: the learned inverse of a layer"
    ),
    "truncated": truncated(),
    "uoro": along(
        "uoro: the influence of the parameters as one random product",
        "blue: a vector s and a vector θ, whose product is P in expectation",
    ),
}

if __name__ == "__main__":
    for name, drawing in DRAWINGS.items():
        (Path(__file__).parent / f"{name}.svg").write_text(drawing.svg(), encoding="utf-8")
