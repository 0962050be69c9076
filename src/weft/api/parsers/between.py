"""Between: text around marks, without the spaces that belong to the marks."""

from __future__ import annotations

from weft.api.parsers.reader import Reader, Take


class Trimmed:
    """Passes text on to `say`, without the spaces at its beginning and its end."""

    def __init__(self, say: Take) -> None:
        self._say = say
        self._spaces = ""  # that have come, and are said if text follows
        self._begun = False

    def say(self, text: str) -> None:
        """Pass on a part of the text, but its last spaces only once more text follows."""
        body = text.rstrip()
        if not body:
            self._spaces += text
            return
        content = self._spaces + body
        self._say(content if self._begun else content.lstrip())
        self._begun = True
        self._spaces = text[len(body) :]


class Between:
    """Says the text around tool calls: without the spaces before, between and behind calls."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._spaces = ""  # that have come, and are said if text follows
        self._said = False
        self._called = False  # a call has come, and no text since

    def say(self, text: str) -> None:
        """Say a part of the text, but its last spaces only once more text follows."""
        body = text.rstrip()
        if not body:
            self._spaces += text
            return
        content = self._spaces + body
        self._reader.content(content.lstrip() if self._called and not self._said else content)
        self._said, self._called = True, False
        self._spaces = text[len(body) :]

    def call(self) -> None:
        """Note that a call comes next."""
        self._spaces, self._called = "", True

    def end(self) -> None:
        """Say what is left at the end of the answer."""
        if not self._called:
            self._reader.content(self._spaces)
        self._spaces = ""
