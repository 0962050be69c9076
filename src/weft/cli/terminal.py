"""Input from a person, without echo while an answer is printed, and the answer's text in whole words on each line."""

from __future__ import annotations

import contextlib
import sys
import unicodedata
from collections.abc import Iterator

from rich.cells import cell_len

PROMPT, CONTINUATION = "> ", "... "
QUOTES = '"""'
FENCE = "```"  # begins and ends a block of code in Markdown
TAB_CELLS = 8


def load_line_editor() -> None:
    """Give `input` arrow keys and a history, if Python was built with readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401


def input_line(*, interactive: bool, prompt: str = PROMPT) -> str | None:
    """The next line without its newline; None at the end of input. KeyboardInterrupt passes."""
    try:
        return input(prompt if interactive else "")
    except EOFError:
        return None


def input_message(*, interactive: bool) -> str | None:
    '''The next message: one line, or several.

    A line that ends with a backslash continues on the next one. A line that begins with """ starts a message that ends
    with the line that ends with """. Returns None at the end of input; a message cut off by it is returned as it is.
    '''
    line = input_line(interactive=interactive)
    if line is None:
        return None
    if line.lstrip().startswith(QUOTES):
        return _read_quoted(line.lstrip().removeprefix(QUOTES), interactive=interactive)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        following = input_line(interactive=interactive, prompt=CONTINUATION)
        if following is None:
            break
        lines.append(following)
    return "\n".join(lines).strip()


def _read_quoted(first: str, *, interactive: bool) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        following = input_line(interactive=interactive, prompt=CONTINUATION)
        if following is None:
            return "\n".join(lines).strip()
        lines.append(following)
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip()


@contextlib.contextmanager
def silent_keyboard() -> Iterator[None]:
    """Hide keys that are pressed inside the block, and discard them at its end; Ctrl-C still works.

    They would be printed inside the answer and become the next prompt. Does nothing without a terminal.
    """
    if not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
        yield
    finally:
        termios.tcflush(descriptor, termios.TCIFLUSH)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


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
