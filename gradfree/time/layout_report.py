"""What packed sequences ran as: figures by path of the module, and sentences from them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradfree.chains.report import path_name
from gradfree.chains.solving import Figures, offer_figure
from gradfree.devices.packed_costs import Layout
from gradfree.wording import count

_SENTENCES = {
    "packed as a whole": "as a whole, by torch",
    "packed in runs": "in runs, {calls} for each layer and direction",
    "packed as a grid": "as a grid, padded to one length",
}
"""By the name of the figure."""
_FIGURES: dict[Layout, str] = dict(zip(("whole", "runs", "grid"), _SENTENCES, strict=True))


def offer_layout(path: str, layout: Layout, calls: int) -> None:
    """Report the layout of the recurrent module at ``path``, and of "runs" the calls of each layer and direction."""
    offer_figure(path, _FIGURES[layout], lambda: torch.tensor(float(calls if layout == "runs" else 1)))


def layout_notes(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each recurrent module among ``figures`` that had packed sequences of several lengths."""
    for path, own in figures.items():
        for name, calls in own.items():
            if name in _SENTENCES:
                how = _SENTENCES[name].format(calls=count(int(calls), "call"))
                yield f"{path_name(path)} runs packed sequences of several lengths {how}."
