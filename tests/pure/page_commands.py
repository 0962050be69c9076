"""Commands on the pages under docs/, and the ways to test each kind."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BLOCKS = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CONSOLES = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
LOCAL = re.compile(r"http://(?:localhost|127\.0\.0\.1):8000")
# They read this machine, and measure nothing.
LOOKS = ("topo --no-measure", "hardware --no-measure", "doctor --no-measure", "cluster status", "ps", "ls", "glossary")


class PageCommand(NamedTuple):
    """A command of a page: its words, and the lines that it prints according to the page."""

    page: str
    words: tuple[str, ...]
    printed: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return shlex.join(self.words)

    @property
    def name(self) -> str:
        """ "plan" for `weft plan …`; "curl"; "" for what is neither."""
        program, *rest = [word for word in self.words if not re.fullmatch(r"[A-Z_]+=\S*", word)] or [""]
        return rest[0] if program == "weft" and rest else program if program == "curl" else ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words behind `weft`."""
        return self.words[self.words.index("weft") + 1 :]

    @property
    def briefly(self) -> tuple[str, ...]:
        """`arguments`, of a shorter simulation than the page's."""
        return (*self.arguments, "--duration", "5s", "--warmup", "1s") if self.name == "simulate" else self.arguments

    @property
    def is_predicted(self) -> bool:
        """True if it needs nothing but the planner: the hardware is described."""
        described = bool({"--gpus", "--nodes", "--check"} & {*self.words})
        if self.name == "simulate":  # a search, or a curve, is minutes of work
            return described and "--rate" in self.words and "--find" not in self.words
        # A file that is not here, one to be written, and a simulation.
        others = {"--infernet-config", "--json", "--users"} & {*self.words}
        return self.name in ("plan", "cost") and described and not others

    @property
    def is_look(self) -> bool:
        return self.name != "" and " ".join(self.arguments if self.name != "curl" else ()) in LOOKS

    @property
    def is_call(self) -> bool:
        """True if it calls a server on this machine that everybody may reach, or looks at those that there are."""
        if self.name in ("curl", "profile"):
            return bool(LOCAL.search(self.line)) and "/rm" not in self.line
        return self.name == "top" and ("--once" in self.words or "--json" in self.words) and "--url" not in self.words


def commands_of(page: Path) -> list[PageCommand]:
    """Commands in the sh and bash blocks of a page, and those behind $ in its console blocks."""
    text, found = page.read_text(), []
    for block in BLOCKS.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if words := words_of(line):
                found.append(PageCommand(page.name, words))
    for block in CONSOLES.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, *printed = part.splitlines()
            found.append(PageCommand(page.name, words_of(line), tuple(printed)))
    return found


def words_of(line: str) -> tuple[str, ...]:
    """Words of a shell line without its comment and without what it is piped or written to."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quotation of several lines, as in a curl command with a body
        return ()
    ends = [number for number, word in enumerate(words) if word in ("|", ">", "&", "&&", ";")]
    return tuple(words[: ends[0]] if ends else words)


COMMANDS = [command for page in PAGES for command in commands_of(page)]
