"""Secrets: the keys and tokens of this machine's servers, and texts without them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.regular_files import open_regular

REMOVED = "[removed]"
SHORTEST = 6  # characters of a secret that is searched for in texts; a shorter one would remove parts of words
SHORTEST_WORD = 10  # the same for the words of a file of keys, which may have comments
LARGEST = 1 << 16  # bytes of a file with keys that are read
# Words of the names of flags, variables and fields whose values are secrets.
WORDS = {
    "key",
    "keys",
    "apikey",
    "token",
    "secret",
    "secrets",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "credentials",
    "authorization",
}
PLACES = {"file", "path", "dir", "directory", "folder"}  # last words of names whose value only says where a secret is
# Secrets that are known by their form, wherever they stand: the group before them stays.
NAMED = r"(?:api|admin|cluster|access|private)[-_]?key|secret|passw(?:or)?d|(?:hf|auth|access|refresh)[-_]?token"
ACCOUNT = re.compile(r"://([^/@\s]+)@")
FORMS = (
    re.compile(r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?i)(\bauthorization['\"]?\s*[=:]\s*['\"]?(?:bearer|basic)\s+|\bbearer\s+)(?!\[removed)[^\s'\"]+"),
    re.compile(r"()\b(?:hf_|sk-|gh[pousr]_|AKIA|xox[bp]-)[\w-]{12,}"),
    re.compile(r"(://)(?!\[removed)[^/@\s]+(?=@)"),
    re.compile(rf"(?i)(\b[\w-]*(?:{NAMED})['\"]?\s*[=:]\s*['\"]?)(?!\[removed|null\b)[^\s'\",;&\[\]{{}}]+"),
    re.compile(rf"(?i)(--[\w-]*(?:{NAMED})\s+)(?!-|\[removed)[^\s'\",;&]+"),
)


def names_secret(name: str) -> bool:
    """Return True if the value of a flag, variable or field of this name is a secret, as for `--api-key`."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1-\2", name).lower())
    return bool(WORDS & {*words}) and words[-1] not in PLACES


class Secrets:
    """Secrets that were found, and texts, commands and settings without them."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def learn(self, value: object) -> None:
        """Note a secret, or each of several."""
        if isinstance(value, Mapping):
            value = [*value, *value.values()]
        if isinstance(value, list | tuple):
            for one in value:
                self.learn(one)
        elif value is not None and not isinstance(value, bool):
            text = f"{value}".strip()
            # "Bearer KEY" holds the key as its last word.
            self._known |= {secret for secret in (text, text.split(" ")[-1]) if len(secret) >= SHORTEST}

    def learn_address(self, value: str) -> None:
        """Note user and password of a URL, as in https://USER:PASSWORD@HOST."""
        for account in ACCOUNT.findall(value):
            self.learn([account, account.partition(":")[2]])

    def learn_file(self, path: Path) -> None:
        """Note every word of a file of keys, if it can be read."""
        try:
            with open_regular(path) as file:
                text = file.read(LARGEST).decode(errors="replace")
        except OSError:
            return
        words = {*text.split(), *re.split(r"[\s,:=\"']+", text)}
        self.learn([word for word in words if len(word) >= SHORTEST_WORD])

    def clean(self, text: str) -> str:
        """The text without the known secrets, and without anything that has the form of a secret."""
        # The longest first: one secret may be a part of another.
        for secret in sorted(self._known, key=lambda one: (-len(one), one)):
            text = text.replace(secret, REMOVED)
        for form in FORMS:
            text = form.sub(rf"\1{REMOVED}", text)
        return text

    def clean_variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Variables of an environment, of which the secret ones are noted and have no value."""
        for name, value in variables.items():
            self.learn_address(value)
            if names_secret(name):
                self.learn(value)
        return {name: REMOVED if names_secret(name) else value for name, value in sorted(variables.items())}

    def clean_command(self, words: Sequence[str], folder: Path) -> list[str]:
        """Words of a command, of which the secret values are noted and replaced.

        Files of keys that it names, relative to `folder`, are read for their secrets.
        """
        cleaned: list[str] = []
        flag = ""
        for word in words:
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                flag = "" if equals else name
                cleaned.append(f"{name}={self._clean_value(name, value, folder)}" if equals else word)
            else:
                cleaned.append(self._clean_value(flag, word, folder) if flag else word)
                flag = ""
        return cleaned

    def clean_fields(self, content: Any, folder: Path) -> Any:
        """Settings of a file, of which the secret fields are noted and have no value."""
        if isinstance(content, Mapping):
            return {name: self._clean_field(f"{name}", value, folder) for name, value in content.items()}
        if isinstance(content, list | tuple):
            return [self.clean_fields(one, folder) for one in content]
        if isinstance(content, str):
            self.learn_address(content)
        return content

    def _clean_field(self, name: str, value: Any, folder: Path) -> Any:
        if names_secret(name):
            self.learn(value)
            return REMOVED
        return self._clean_value(name, value, folder) if isinstance(value, str) else self.clean_fields(value, folder)

    def _clean_value(self, name: str, value: str, folder: Path) -> str:
        self.learn_address(value)
        if names_secret(name):
            self.learn(value)
            self.learn_file(folder / value)  # the value of --keys may be a file
            return REMOVED
        if names_secret(re.sub(r"[-_]?(?:file|path)$", "", name)):
            self.learn_file(folder / value)
        return value


def hub_token_files(environ: Mapping[str, str]) -> Iterable[Path]:
    """Files in which the hub's own program keeps its tokens."""
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    folder = Path(home).expanduser()
    named = environ.get("HF_TOKEN_PATH")
    return [folder / "token", folder / "stored_tokens", *([Path(named)] if named else [])]
