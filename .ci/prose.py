"""What README, docs and messages must keep: short sentences, usual words, links that lead somewhere; ``make lint``.

``python .ci/prose.py --code`` lists odd words in docstrings, strings and names of tests in all rooms.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG, SHARE = 30, 0.05
"""Words of a sentence that is too long, and how many of all sentences may be."""

# What was written in place of the usual word, which stands behind it.
ODD = {
    r"\btold\b|\btells? (of|it|them|those|which|how|what|layer)\b": "reports, says, metric",
    r"\bgo(es)? (by|past)\b": "uses, depends on; bypasses",
    r"\ba look\b|\bis looked\b|\blooked at\b": "a check",
    r"\bways? (to|of|in|that)\b": "method, path",
    r"\bstands? in for\b": "wrapper, replaces",
    r"\bhand(s|ed)? (\w+ )?on\b": "passes",
    r"\bled back\b": "retracted, projected",
    r"\baside\b|\bapart\b": "extra output; excluded; into layers",
    r"\balone\b": "only, by itself",
    r"\b(has|have) it\b": "contains",
    r"\b(is|are|be) held to\b|\bholds (it|them) to\b": "checked against",
    r"\bof (its|their) own\b": "separate",
    r"\bcomes? home\b|\bso it is\b": "is returned; the same is true",
    r"\bat first weights\b": "untrained",
    r"\bpull(s|ed|ing)?\b": "VJP",
    r"\bplain backprop\b": "autograd",
}
# Of these some have a usual sense in code: a matrix alone, a process of its own, `Chain.pull`.
CODE = {pattern: ODD[pattern] for pattern in ODD if not re.search(r"alone|\(its|apart|\bways|pull", pattern)}
CODE_ROOMS = ("gradfree", "algorithms", "models", "benchmarks", "tests", ".ci")
"""Where docstrings, strings and names of tests contain no odd words."""


def pages() -> list[Path]:
    """Return what readers read, without pages that a script makes."""
    made = {"support.md", "models.md"}
    docs = [p for p in (ROOT / "docs").rglob("*.md") if p.name not in made and "reports" not in p.parts]
    return [ROOT / "README.md", *sorted(docs)]


def prose(text: str) -> str:
    """Return ``text`` without code, tables, markup and addresses; a list item and a heading are paragraphs."""
    text = re.sub(r"^(```|~~~).*?^\1|<!--.*?-->|^\|[^\n]*$|^ {4}[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^#+ (.*)$", r"\n\1.\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*([-*]|\d+\.) ", r"\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`", "code", re.sub(r"<[^>]+>", "", text))


def sentences(text: str) -> list[str]:
    """Return the sentences of a page."""
    found = []
    for paragraph in re.split(r"\n\s*\n", prose(text)):
        found += re.split(r"(?<=[.!?:])\s+(?=[A-Z*(\"]|code\b)", " ".join(paragraph.split()))
    return [sentence for sentence in found if re.search(r"\w", sentence)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> list[str]:
    """Return the links of a page to files and headings that are not there."""
    dead = []
    for target, heading in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        there = (page.parent / target) if target else page
        if not there.exists() or (heading and there.suffix == ".md" and heading not in anchors(there)):
            dead.append(f"{target}#{heading}" if heading else target)
    return dead


def odd_words(text: str, odd: Mapping[str, str] = ODD) -> Iterator[str]:
    """Yield the odd words of a text, each with what stands around it."""
    for pattern, better in odd.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            around = text[max(0, match.start() - 40) : match.end() + 30]
            yield f"{match[0]!r} for {better!r}: ...{around}..."


def messages(path: Path) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings: messages, most of them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def odd_in_code(rooms: Iterable[str]) -> Iterator[str]:
    """Yield the odd words in strings, docstrings and names of tests."""
    for path in sorted(path for room in rooms for path in (ROOT / room).rglob("*.py") if path.name != "prose.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = node.name.replace("_", " ")
            if " " in text:
                yield from (f"{path.relative_to(ROOT)}: {odd}" for odd in odd_words(" ".join(text.split()), CODE))


def problems() -> list[str]:
    """Return everything that is wrong, one line each."""
    found, long, count = [*odd_in_code(CODE_ROOMS)], [], 0
    for room in ("gradfree", "algorithms", "models"):
        for path in sorted((ROOT / room).rglob("*.py")):
            said = (odd for text in messages(path) if " " in text for odd in odd_words(text))
            found += [f"{path.relative_to(ROOT)}: {odd}" for odd in said]
    for page in pages():
        text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT)
        found += [f"{name}: dead link {link}" for link in dead_links(page, text)]
        plain = " ".join(prose(text).split())
        found += [f"{name}: {odd}" for odd in odd_words(plain)]
        for sentence in sentences(text):
            count += 1
            if len(sentence.split()) > LONG:
                long.append(f"{name}: {len(sentence.split())} words: {sentence[:90]}...")
    if len(long) > SHARE * count:
        found += [*long, f"{len(long)} of {count} sentences have more than {LONG} words; {SHARE:.0%} may"]
    return found


if __name__ == "__main__":
    wrong = list(odd_in_code(CODE_ROOMS)) if "--code" in sys.argv else problems()
    print("\n".join(wrong))
    sys.exit(bool(wrong))
