"""The documentation as a Markdown parser reads it: its blocks of code, its inline code, its links."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]

_PARSER = MarkdownIt().enable("table")


@dataclass(frozen=True)
class Block:
    """A fenced block of code: the page and line that it begins on, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.language}".strip()


def blocks(page: str) -> list[Block]:
    return [
        Block(page, token.map[0] + 1, token.info.strip(), token.content)
        for token in _tokens(page)
        if token.type in ("fence", "code_block") and token.map
    ]


def inline_code(page: str) -> list[str]:
    return [token.content for token in _tokens(page) if token.type == "code_inline"]


def links(page: str) -> list[str]:
    """Where the links and pictures of a page lead to."""
    attributes = {"link_open": "href", "image": "src"}
    return [str(token.attrs[attributes[token.type]]) for token in _tokens(page) if token.type in attributes]


def anchors(page: str) -> set[str]:
    """What a link may name after `#`: the headings, spelt as GitHub does."""
    tokens = list(_tokens(page))
    titles = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _tokens(page: str) -> Iterator[Token]:
    for token in _PARSER.parse((ROOT / page).read_text()):
        yield token
        yield from token.children or []
