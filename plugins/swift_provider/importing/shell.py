"""Splits a pasted shell script into commands, as a shell would, without running anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?::?-(?P<default>[^{}]*))?\})")
_REDIRECTION = re.compile(r"(?:\d|&)?(?:>>|>\||>|<)(?P<to>&(?:\d|-)?)?")
_KEYWORDS = frozenset({"then", "do", "else", "time", "nohup", "sudo", "exec", "env"})
_DISPLAYS = frozenset({"\xa0", "\u3000"})  # blanks of web pages, which a shell would not take for blanks


class ShellError(ValueError):
    """The text is no shell script: a quote that does not end."""


@dataclass
class Command:
    """One simple command: the assignments before it, those exported earlier, and its words."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def commands_of(script: str) -> list[Command]:
    """The simple commands of ``script``, in order, with the variables that are known filled in.

    ``$NAME`` that nothing in the script sets and ``$(…)`` stay as they are.

    Raises:
        ShellError: a quote does not end.
    """
    text = script.replace("\r\n", "\n")
    for character in _DISPLAYS:
        text = text.replace(character, " ")
    # A comment between continued lines ends a command in a shell; guides have them all the same.
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    text = re.sub(r"(?<!\\)\\[ \t]*\n(?:[ \t]*\n)*", " ", "\n".join(lines) + "\n")
    known: dict[str, str] = {}
    exported: dict[str, str] = {}
    found = []
    for words in _Splitter(text, known):
        own: dict[str, str] = {}
        while words:
            match = _ASSIGNMENT.fullmatch(words[0])
            if match:
                own[match["name"]] = match["value"]
            elif words[0] not in _KEYWORDS:
                break
            words = words[1:]
        if words and words[0] == "export":
            pairs = {m["name"]: m["value"] for m in map(_ASSIGNMENT.fullmatch, words[1:]) if m}
            pairs |= {name: known[name] for name in words[1:] if name in known}
            known.update(pairs)
            exported.update(pairs)
        elif words:
            found.append(Command(words, {**exported, **own}))
        else:
            known.update(own)
            exported.update({name: value for name, value in own.items() if name in exported})
    return found


class _Splitter:
    """Iterates over the words of each command; reads ``known`` when a word is reached, not before."""

    def __init__(self, text: str, known: dict[str, str]) -> None:
        self.text, self.known, self.place = text, known, 0
        self.words: list[str] = []
        self.word: str | None = None
        self.skip_next = False

    def __iter__(self) -> _Splitter:
        return self

    def __next__(self) -> list[str]:
        while self.place < len(self.text):
            if self._step():
                words, self.words, self.skip_next = self.words, [], False
                if words:
                    return words
        if self.words or self.word is not None:
            self._end_word()
            words, self.words = self.words, []
            return words
        raise StopIteration

    def _step(self) -> bool:
        """One character, word part or operator; ``True`` at the end of a command."""
        character = self.text[self.place]
        redirection = _REDIRECTION.match(self.text, self.place) if self.word is None or character in "<>" else None
        if character in " \t":
            self._end_word()
        elif character in "\n;|":
            self._end_word()
            self.place += 1
            return True
        elif redirection:
            self._end_word()
            self.skip_next = len(redirection["to"] or "") < 2
            self.place = redirection.end()
            return False
        elif character == "&":
            self._end_word()
            self.place += 1
            return True
        elif character == "#" and self.word is None:
            self.place = self.text.index("\n", self.place) if "\n" in self.text[self.place :] else len(self.text)
            return False
        else:
            self._part(character)
            return False
        self.place += 1
        return False

    def _part(self, character: str) -> None:
        if character == "'":
            self._add(self._until("'"))
        elif character == '"':
            self._double_quoted()
        elif character == "\\":
            self._add(self.text[self.place + 1 : self.place + 2])
            self.place += 2
        elif character == "$" or character == "`":
            value, literal = self._expansion()
            pieces = [value] if literal or self._is_assignment() else value.split()
            for index, piece in enumerate(pieces):
                if index:
                    self._end_word()
                self._add(piece)
        else:
            self._add(character)
            self.place += 1

    def _is_assignment(self) -> bool:
        return self.word is not None and _ASSIGNMENT.fullmatch(self.word) is not None

    def _until(self, quote: str) -> str:
        end = self.text.find(quote, self.place + 1)
        if end < 0:
            line = self.text.count("\n", 0, self.place) + 1
            raise ShellError(f"line {line}: the quote {quote} does not end")
        part = self.text[self.place + 1 : end]
        self.place = end + 1
        return part

    def _double_quoted(self) -> None:
        begin = self.place
        self._add("")
        self.place += 1
        while self.place < len(self.text):
            character = self.text[self.place]
            if character == '"':
                self.place += 1
                return
            if character == "\\" and self.text[self.place + 1 : self.place + 2] in ('"', "\\", "$", "`"):
                self._add(self.text[self.place + 1])
                self.place += 2
            elif character in "$`":
                self._add(self._expansion()[0])
            else:
                self._add(character)
                self.place += 1
        self.place = begin
        self._until('"')  # says where
        raise ShellError("a quote does not end")

    def _expansion(self) -> tuple[str, bool]:
        """What ``$…`` at this place stands for, and whether it is the text itself because nobody knows."""
        begin = self.place
        match = _VARIABLE.match(self.text, begin)
        if match:
            self.place = match.end()
            value = self.known.get(match["plain"] or match["name"], match["default"])
            return (match[0], True) if value is None else (value, False)
        if self.text.startswith("$(", begin):
            depth, end = 0, begin + 1
            while end < len(self.text):
                depth += {"(": 1, ")": -1}.get(self.text[end], 0)
                end += 1
                if depth == 0:
                    break
            self.place = end
            result = _arithmetic(self.text[begin:end], self.known)
            if result is not None:
                return result, False
        elif self.text[begin] == "`":
            self._until("`")
        else:
            self.place += 1
        return self.text[begin : self.place], True

    def _add(self, part: str) -> None:
        self.word = (self.word or "") + part

    def _end_word(self) -> None:
        if self.word is not None and not self.skip_next:
            self.words.append(self.word)
        if self.word is not None:
            self.skip_next = False
        self.word = None


def _arithmetic(text: str, known: Mapping[str, str]) -> str | None:
    """The value of ``$(expr 32 / $n / 2)`` or ``$((32 / n))``; ``None`` for any other command."""
    match = re.fullmatch(r"\$\(\((?P<double>.*)\)\)|\$\(\s*expr\s(?P<expr>.*)\)", text, re.DOTALL)
    if match is None:
        return None
    term = (match["double"] or match["expr"] or "").replace("\\", "")
    term = _VARIABLE.sub(lambda found: known.get(found["plain"] or found["name"], found[0]), term)
    if match["double"]:
        term = re.sub(r"[A-Za-z_]\w*", lambda found: known.get(found[0], found[0]), term)
    if len(term) > 200 or not re.fullmatch(r"[\d\s+*/()%-]+", term):
        return None
    try:
        return str(_evaluate(ast.parse(term.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, (ast.Div, ast.FloorDiv)):
            return left // right
        if isinstance(node.op, ast.Mod):
            return left % right
    raise ValueError("is no whole number's arithmetic")
