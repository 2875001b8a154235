"""Small pieces of HTML. Everything that is not written here or in its callers goes through ``text``."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from gradalign.runs.untrusted import shown_text

_MOST_LINES = 15
COLOURS = 8
"""How many colours the page has; further groups have them again with other line styles."""


def text(content: object) -> str:
    """Return text as HTML, safe between tags and in quoted attributes."""
    return html.escape(shown_text(content), quote=True)


def text_lines(lines: Iterable[str]) -> str:
    """Return lines as HTML, each escaped by itself so that the breaks between them stay."""
    return "\n".join(text(line) for line in lines)


def swatch(number: int) -> str:
    """Return a short line in a group's colour and style."""
    look = f'class="swatch d{number // COLOURS % 4}" style="--c: var(--c{number % COLOURS})"'
    return f'<span {look} aria-hidden="true"></span>'


def wide_table(label: str, content: str, kind: str = "") -> str:
    """Return a table that scrolls sideways by itself where it does not fit, also by keyboard."""
    return (
        f'<div class="wide" role="region" aria-label="{text(label)}" tabindex="0">'
        f'<table class="{kind}">{content}</table></div>'
    )


def heads(*names: str, left: int = 1) -> str:
    """Return a table's head; the first ``left`` columns are text."""
    cells = (f'<th scope="col"{" class=text" * (place < left)}>{text(name)}</th>' for place, name in enumerate(names))
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def folded(label: str, content: str, lines: int) -> str:
    """Return content as it is, or behind a word to click on when it is long."""
    return content if lines <= _MOST_LINES else f"<details><summary>{text(label)}</summary>{content}</details>"


def table_of(value: Any) -> Mapping[str, Any]:
    """Return a value that should be a table, or an empty one."""
    return value if isinstance(value, Mapping) else {}
