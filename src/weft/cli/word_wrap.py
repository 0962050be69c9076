"""Streamed text for a terminal: whole words on each line, no control characters."""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len

FENCE = "```"  # begins and ends a block of code in Markdown
TAB_CELLS = 8


class WordWrap:
    """Break streamed text at word boundaries, into lines of `width` cells.

    A word is held back until its end is known, so that it never has to be broken at the edge. Lines of a Markdown code
    block are left as they are, because a line break inside them would change the code. Control characters other than
    newline and tab are dropped: the text comes from a model and must not steer the terminal.
    """

    def __init__(self, width: int) -> None:
        self.width = max(width, 1)
        self._column = 0
        self._line = ""  # the line so far, as the model wrote it
        self._blanks = ""  # spaces before the held-back word
        self._word = ""
        self._in_code = False

    def push(self, text: str) -> str:
        """Add streamed text; return the part that can be written now."""
        return "".join(self._character(character) for character in text)

    def flush(self) -> str:
        """Return the text that is still held back."""
        return self._end_word()

    def _character(self, character: str) -> str:
        if character == "\n":
            return self._end_line()
        if character != "\t" and unicodedata.category(character) == "Cc":
            return ""
        self._line += character
        if self._in_code:
            return character
        if character in " \t":
            written = self._end_word()
            self._blanks += character
            return written
        if cell_len(character) == 2:  # CJK text and emoji: a line may end after any of them
            written = self._end_word()
            self._word = character
            return written + self._end_word()
        self._word += character
        # A word wider than the terminal has no better place to be broken than the edge.
        return self._end_word() if cell_len(self._word) >= self.width else ""

    def _end_word(self) -> str:
        if not self._word:
            return ""
        blanks, word = self._blanks, self._word
        self._blanks = self._word = ""
        cells = sum(TAB_CELLS if blank == "\t" else 1 for blank in blanks)
        if self._column and self._column + cells + cell_len(word) > self.width:
            self._column = cell_len(word)
            return f"\n{word}"
        self._column += cells + cell_len(word)
        return blanks + word

    def _end_line(self) -> str:
        written = self._end_word()
        if self._line.lstrip().startswith(FENCE):
            self._in_code = not self._in_code
        self._line = self._blanks = ""
        self._column = 0
        return f"{written}\n"
