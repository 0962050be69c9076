"""weft chat MODEL: a conversation on the terminal."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli import engine, terminal
from weft.cli.flags.command_flags import ChatArguments
from weft.cli.flags.declared import Flag, flags_of
from weft.cli.flags.flags import Sampling, sampling_options
from weft.cli.hints import did_you_mean
from weft.engine.core.params import SamplingParams
from weft.errors import ConfigError, RequestError, error_reason

if TYPE_CHECKING:
    from weft.engine.llm import LLM

WELCOME = "Chat with {model}. Type a message, or /help for the commands. Ctrl-C stops an answer, Ctrl-D ends the chat."
CTRL_C_HINT = "Ctrl-C once more ends the chat; so do Ctrl-D and /exit"
HELP_INDENT = 19  # columns before the explanation of a command
Messages = list[dict[str, str]]
SWITCH = {"on": True, "off": False}
FLAGS = {flag.dest: flag for flag in flags_of(Sampling)}

# Values in words, where the value alone says little.
NOT_SET = {"max_tokens": "up to the context's end", "seed": "random", "stop": "none", "top_k": "all tokens"}
NOTES = {("temperature", 0.0): "always the likeliest token", ("min_p", 0.0): "off", ("repetition_penalty", 1.0): "off"}


@dataclass
class Chat:
    """A conversation with an engine: the history, and the sampling parameters of the next answer."""

    llm: LLM
    options: dict[str, Any]  # sampling parameters by name, as in SamplingParams
    params: SamplingParams = field(init=False)
    system: str | None = None
    history: Messages = field(default_factory=list)  # without the system message
    ended: bool = False

    def __post_init__(self) -> None:
        self.params = self.llm.sampling_params(**self.options)

    @property
    def messages(self) -> Messages:
        """The conversation with its system message, in the form that chat APIs take."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.history]

    def handle(self, message: str) -> None:
        """Run a command, or answer a message."""
        name, _, argument = message.partition(" ")
        if not message.startswith("/"):
            self.answer(message)
        elif name in COMMANDS:
            try:
                COMMANDS[name].action(self, argument.strip())
            except (ConfigError, RequestError) as error:
                notify(f"weft: error: {error}")
        else:
            notify(f"unknown command {name}; the commands are:\n{help_text()}")

    def answer(self, question: str) -> bool:
        """Print the answer while it grows and add both to the history; return False if there is no answer."""
        messages = [*self.messages, {"role": "user", "content": question}]
        try:
            with terminal.silent_keyboard():
                answer = engine.print_stream(self.llm.stream(messages, self.params), stoppable=True)
        except RequestError as error:
            notify(f"weft: error: {error}; /reset starts a new conversation")
            return False
        if answer is None:
            return False
        self.history += [messages[-1], {"role": "assistant", "content": answer.outputs[0].text}]
        engine.print_speed(answer)
        return True

    def retry(self, _: str) -> None:
        """Answer the last message again; the old answer stays if there is no new one. Raises ConfigError."""
        if not self.history:
            raise ConfigError("there is no answer to repeat", code="no-answer-to-repeat")
        before = self.history
        self.history = before[:-2]
        if not self.answer(before[-2]["content"]):
            self.history = before

    def reset(self, _: str) -> None:
        """Start a new conversation with the same system message."""
        self.history = []
        notify("the conversation is forgotten")

    def set_system(self, text: str) -> None:
        """Set the system message; remove it if `text` is empty."""
        self.system = text or None
        notify(f"system message: {text}" if text else "no system message")

    def set_sampling(self, words: str) -> None:
        """Change a sampling parameter ("temperature 0.5"), and say it; without `words` list all of them.

        Raises ConfigError and RequestError.
        """
        if not words:
            notify("\n".join(f"  {setting_text(self.params, name)}" for name in FLAGS))
            return
        name, value = changed_setting(words)
        options = {**self.options, name: value}
        self.params = self.llm.sampling_params(**options)
        self.options = options
        notify(setting_text(self.params, name))

    def save(self, name: str) -> None:
        """Write the conversation as JSON to a new file. Raises ConfigError."""
        if not name:
            raise ConfigError("which file? As in: /save conversation.json", code="file-missing")
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(self.messages, file, ensure_ascii=False, indent=1)
        except FileExistsError:
            raise ConfigError(f"{path} exists already; give another name", code="file-exists") from None
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error_reason(error)}", code="cannot-write-output") from None
        notify(f"saved {len(self.messages)} messages as {path}")

    def help(self, _: str) -> None:
        """List the commands."""
        notify(help_text())

    def end(self, _: str) -> None:
        """End the chat."""
        self.ended = True


@dataclass(frozen=True)
class ChatCommand:
    """One `/command`; `action` gets the chat and the words after the command's name."""

    usage: str
    about: str
    action: Callable[[Chat, str], None]


COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        ChatCommand("/retry", "answer the last message again", Chat.retry),
        ChatCommand("/reset", "forget the conversation", Chat.reset),
        ChatCommand("/system TEXT", "set the system message; without TEXT, remove it", Chat.set_system),
        ChatCommand("/set NAME VALUE", "change a sampling parameter; without NAME, list them", Chat.set_sampling),
        ChatCommand("/save FILE", "write the conversation as JSON", Chat.save),
        ChatCommand("/help", "show this list", Chat.help),
        ChatCommand("/exit", "end the chat; so do /quit and /bye", Chat.end),
    )
}
COMMANDS |= dict.fromkeys(("/quit", "/bye"), COMMANDS["/exit"])


def main(arguments: ChatArguments) -> int:
    """Answer messages until the user ends the chat or input ends."""
    options = sampling_options(arguments, max_tokens=None)
    interactive = sys.stdin.isatty()
    with engine.start_engine(arguments, objective="latency", **engine.random_seed(arguments.engine)) as llm:
        chat = Chat(llm, options, system=arguments.system_prompt)
        if interactive:
            terminal.load_line_editor()
            notify(wrapped(WELCOME.format(model=llm.plan.model)))
        converse(chat, interactive=interactive)
    return 0


def converse(chat: Chat, *, interactive: bool) -> None:
    """Handle messages until the chat ends. Ctrl-C at the prompt discards the line; twice in a row it ends the chat."""
    interrupted = False
    while not chat.ended:
        try:
            message = terminal.input_message(interactive=interactive)
        except KeyboardInterrupt:
            if interrupted or not interactive:
                return
            interrupted = True
            notify(f"\n({CTRL_C_HINT})")
            continue
        if message is None:
            return
        interrupted = False
        if message:
            chat.handle(message)


def help_text() -> str:
    """The commands, and the ways to type a message of several lines; wrapped to the terminal's width."""
    commands = dict.fromkeys(COMMANDS.values())
    entries = [(command.usage, command.about) for command in commands]
    entries += [(terminal.QUOTES, "begins and ends a message of several lines"), ("\\", "at the end continues a line")]
    return "\n".join(wrapped(f"  {usage:{HELP_INDENT - 3}} {about}", HELP_INDENT) for usage, about in entries)


def wrapped(text: str, indent: int = 0) -> str:
    """The text in lines that fit the terminal, all but the first with an indent."""
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, max(columns, indent + 20), subsequent_indent=" " * indent, break_long_words=False)


def notify(text: str) -> None:
    """Print on standard error, since standard output has only the conversation."""
    print(text, file=sys.stderr, flush=True)


def changed_setting(words: str) -> tuple[str, Any]:
    """The parameter that `words` change, as in "temperature 0.5", and its value. Raises ConfigError."""
    name, _, text = words.partition(" ")
    flag = FLAGS.get(name.lstrip("-").replace("-", "_"))
    if flag is None:
        names = sorted(FLAGS)
        hint = did_you_mean(name, names)
        raise ConfigError(
            f"unknown parameter {name!r}; {f'{hint} ' * bool(hint)}the parameters are {', '.join(names)}",
            code="unknown-parameter",
        )
    if not text.strip():
        raise ConfigError(f"{flag.dest} needs a value: {flag.help}", code="flag-needs-value")
    return flag.dest, _parse_value(flag, text.strip())


def _parse_value(flag: Flag, text: str) -> Any:
    if flag.parse is None:
        if text not in SWITCH:
            raise ConfigError(f"{flag.dest} is {text!r}; it must be on or off", code="flag-needs-boolean")
        return SWITCH[text]
    try:
        value = flag.parse(text)
    except (ValueError, ArgumentTypeError) as error:
        reason = error if isinstance(error, ArgumentTypeError) else f"{text!r} is not a number"
        raise ConfigError(f"{flag.dest}: {reason}", code="invalid-flag-value") from None
    return (value,) if flag.repeated else value


def setting_text(params: SamplingParams, name: str) -> str:
    """A parameter and its value, as in "temperature 0 (always the likeliest token)"."""
    value = getattr(params, name)
    if value in (None, ()) or (name == "top_k" and value == 0):
        shown = NOT_SET.get(name, "none")
    elif isinstance(value, bool):
        shown = "on" if value else "off"
    elif isinstance(value, tuple):
        shown = ", ".join(map(repr, value))
    else:
        shown = f"{value:g}" if isinstance(value, float) else str(value)
    note = NOTES.get((name, value)) if isinstance(value, float) else None
    return f"{name} {shown}{f' ({note})' if note else ''}"
