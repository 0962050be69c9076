"""weft chat MODEL."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli import engine, terminal
from weft.cli.chat_settings import changed_setting, settings_text
from weft.cli.flags import sampling
from weft.core.params import SamplingParams
from weft.errors import RequestError, error_reason

if TYPE_CHECKING:
    from weft.llm import LLM

WELCOME = "Type a message, or /help for the commands. Ctrl-C stops an answer, Ctrl-D ends."
CTRL_C_HINT = "Ctrl-C once more ends the chat; so do Ctrl-D and /exit"
Messages = list[dict[str, str]]


class ChatError(Exception):
    """A command of the chat that cannot be carried out, in one line."""


@dataclass
class Chat:
    """A conversation with an engine: what was said, and how the next answer is sampled."""

    llm: LLM
    wanted: dict[str, Any]  # sampling parameters by name, as in SamplingParams
    params: SamplingParams = field(init=False)
    system: str | None = None
    history: Messages = field(default_factory=list)  # without the system message
    ended: bool = False

    def __post_init__(self) -> None:
        self.params = self.llm.sampling_params(**self.wanted)

    @property
    def messages(self) -> Messages:
        """The conversation with its system message, in the form that chat APIs take."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.history]

    def take(self, message: str) -> None:
        """Carry out a command, or answer a message."""
        name, _, argument = message.partition(" ")
        if not message.startswith("/"):
            self.answer(message)
        elif name in COMMANDS:
            try:
                COMMANDS[name].action(self, argument.strip())
            except ChatError as error:
                tell(f"weft: error: {error}")
        else:
            tell(f"unknown command {name}; the commands are:\n{help_text()}")

    def answer(self, question: str) -> bool:
        """Print the answer as it comes and add both to the history; False if there is no answer."""
        asked = [*self.messages, {"role": "user", "content": question}]
        try:
            with terminal.silent_keyboard():
                answer = engine.show(self.llm.stream(asked, self.params), stoppable=True)
        except RequestError as error:
            tell(f"weft: error: {error}; /reset starts anew")
            return False
        if answer is None:
            return False
        self.history += [asked[-1], {"role": "assistant", "content": answer.outputs[0].text}]
        engine.tell_speed(answer)
        return True

    def retry(self, _: str) -> None:
        if not self.history:
            raise ChatError("there is no answer to try again")
        before = self.history
        self.history = before[:-2]
        if not self.answer(before[-2]["content"]):
            self.history = before

    def reset(self, _: str) -> None:
        self.history = []
        tell("forgotten")

    def set_system(self, text: str) -> None:
        self.system = text or None
        tell(f"system message: {text}" if text else "no system message")

    def set_sampling(self, words: str) -> None:
        if words:
            try:
                wanted = changed_setting(self.wanted, words)
                self.params = self.llm.sampling_params(**wanted)
            except (ValueError, RequestError) as error:
                raise ChatError(str(error)) from None
            self.wanted = wanted
        tell(settings_text(self.params))

    def save(self, name: str) -> None:
        if not name:
            raise ChatError("which file? As in: /save conversation.json")
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(self.messages, file, ensure_ascii=False, indent=1)
        except FileExistsError:
            raise ChatError(f"{path} is there already; give another name") from None
        except OSError as error:
            raise ChatError(f"cannot write {path}: {error_reason(error)}") from None
        tell(f"saved {len(self.messages)} messages as {path}")

    def help(self, _: str) -> None:
        tell(help_text())

    def end(self, _: str) -> None:
        self.ended = True


@dataclass(frozen=True)
class ChatCommand:
    """One `/command`; `action` gets the words after its name."""

    usage: str
    about: str
    action: Callable[[Chat, str], None]


COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        ChatCommand("/retry", "answer the last message again", Chat.retry),
        ChatCommand("/reset", "forget the conversation", Chat.reset),
        ChatCommand("/system TEXT", "set the system message; without TEXT remove it", Chat.set_system),
        ChatCommand("/set NAME VALUE", "change a sampling parameter; without NAME show them", Chat.set_sampling),
        ChatCommand("/save FILE", "write the conversation as JSON", Chat.save),
        ChatCommand("/help", "show this list", Chat.help),
        ChatCommand("/exit", "end the chat; so do /quit and /bye", Chat.end),
    )
}
COMMANDS |= dict.fromkeys(("/quit", "/bye"), COMMANDS["/exit"])


def main(arguments: Namespace) -> int:
    """Answer messages until the user ends the chat or input ends."""
    wanted = sampling(arguments, max_tokens=None)
    interactive = sys.stdin.isatty()
    with engine.start(arguments) as llm:
        chat = Chat(llm, wanted, system=getattr(arguments, "system_prompt", None))
        if interactive:
            terminal.load_line_editor()
            tell(WELCOME)
        converse(chat, interactive=interactive)
    return 0


def converse(chat: Chat, *, interactive: bool) -> None:
    """Take messages until the end. At an idle prompt Ctrl-C discards the line; twice in a row it ends the chat."""
    interrupted = False
    while not chat.ended:
        try:
            message = terminal.input_message(interactive=interactive)
        except KeyboardInterrupt:
            if interrupted or not interactive:
                return
            interrupted = True
            tell(f"\n({CTRL_C_HINT})")
            continue
        if message is None:
            return
        interrupted = False
        if message:
            chat.take(message)


def help_text() -> str:
    """The commands, and how a message of several lines is typed."""
    shown = dict.fromkeys(COMMANDS.values())
    lines = [f"  {command.usage:16} {command.about}" for command in shown]
    return "\n".join([*lines, f"  {terminal.QUOTES} begins and ends a message of several lines; so does \\ at the end"])


def tell(text: str) -> None:
    """Print beside the conversation, which alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)
