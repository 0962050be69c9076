"""Input from a person: lines, messages of several lines, and no echo while an answer is printed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

PROMPT, CONTINUATION = "> ", "... "
QUOTES = '"""'


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
