"""The arguments that the installed ms-swift takes, read from its source: nothing is imported, no GPU is needed.

``HfArgumentParser`` looks at the annotated attributes of dataclasses and of their bases, so the syntax trees are
enough: about a second instead of the half minute that importing ms-swift takes, on any Python from 3.9 on. Bases that
come from other packages (transformers' ``TrainingArguments``, trl) are read from their own files in the same way.
"""

from __future__ import annotations

import ast
import os
import sysconfig
from typing import Any, Dict, Iterator, List, Optional, Tuple

from trainer.protocol import ArgumentsReply, ArgumentsRequest

#: Where the argument class of each command is: file below site-packages, class name.
COMMANDS = {
    "sft": ("swift/arguments/sft_args.py", "SftArguments"),
    "pt": ("swift/arguments/pretrain_args.py", "PretrainArguments"),
    "rlhf": ("swift/arguments/rlhf_args.py", "RLHFArguments"),
    "export": ("swift/arguments/export_args.py", "ExportArguments"),
    "megatron sft": ("swift/megatron/arguments/sft_args.py", "MegatronSftArguments"),
    "megatron pt": ("swift/megatron/arguments/pretrain_args.py", "MegatronPretrainArguments"),
    "megatron rlhf": ("swift/megatron/arguments/rlhf_args.py", "MegatronRLHFArguments"),
}
_NO_CLASS = (None, "object", "ABC", "Generic")
_DEEPEST_IMPORT = 8

Argument = Dict[str, Any]
Class = Tuple[str, ast.ClassDef]


class SourceError(ValueError):
    """The package is not there, or not laid out as expected; the message names the file."""


def arguments(request: ArgumentsRequest) -> ArgumentsReply:
    """The ``arguments`` verb: what the ms-swift of this interpreter's environment takes."""
    site_packages = sysconfig.get_paths()["purelib"]
    try:
        known = extract(site_packages, (request.command,))[request.command]
        return ArgumentsReply(version=version(site_packages), arguments=known)
    except (SourceError, KeyError) as error:
        return ArgumentsReply(error=f"the arguments of `{request.command}` cannot be read: {error}")


def extract(site_packages: str, commands: Tuple[str, ...] = tuple(COMMANDS)) -> Dict[str, Dict[str, Argument]]:
    """For each command its arguments: name → ``{"type", "choices"?, "default"?, "required"?}``.

    Args:
        site_packages: the folder that holds the package ``swift``.
        commands: which commands; see :data:`COMMANDS`.

    Raises:
        SourceError: ms-swift is not there, or too different.
    """
    reader = _Reader(site_packages)
    return {command: reader.arguments(*COMMANDS[command]) for command in commands}


def version(site_packages: str) -> str:
    """The version of the ms-swift in ``site_packages``.

    Raises:
        SourceError: there is none.
    """
    for node in _Reader(site_packages).tree("swift/version.py").body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
            return str(ast.literal_eval(node.value))
    raise SourceError(f"{site_packages}/swift/version.py names no version")


class _Reader:
    """Syntax trees and classes of one site-packages folder, each file parsed once."""

    def __init__(self, site_packages: str) -> None:
        self._site = site_packages
        self._trees: Dict[str, ast.Module] = {}

    def tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            full = os.path.join(self._site, path)
            try:
                with open(full, encoding="utf-8") as stream:
                    self._trees[path] = ast.parse(stream.read())
            except (OSError, SyntaxError) as error:
                raise SourceError(f"{full}: {error}") from None
        return self._trees[path]

    # -- classes ----------------------------------------------------------------------------------------------

    def find(self, path: str, name: str, depth: int = 0) -> Optional[Class]:
        """The class of that name as seen from the file: there, imported, or behind a package's lazy names."""
        if depth > _DEEPEST_IMPORT:
            return None
        for node in ast.walk(self.tree(path)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return path, node
        origin = self._imported(path, name)
        if origin is not None:
            return self.find(*origin, depth=depth + 1)
        return self._in_package(os.path.dirname(path), name) if path.endswith("__init__.py") else None

    def _imported(self, path: str, name: str) -> Optional[Tuple[str, str]]:
        package = os.path.dirname(path).split("/")
        for node in ast.walk(self.tree(path)):
            if isinstance(node, ast.ImportFrom):
                for item in node.names:
                    if (item.asname or item.name) == name:
                        base = package[: len(package) - (node.level - 1)] if node.level else []
                        found = self._module_file(".".join(base + ([node.module] if node.module else [])))
                        if found is not None:
                            return found, item.name
        return None

    def _module_file(self, module: str) -> Optional[str]:
        path = module.replace(".", "/")
        candidates = (path + ".py", path + "/__init__.py")
        return next((item for item in candidates if os.path.isfile(os.path.join(self._site, item))), None)

    def _in_package(self, folder: str, name: str) -> Optional[Class]:
        for root, _, files in os.walk(os.path.join(self._site, folder)):
            for file in sorted(files):
                path = os.path.relpath(os.path.join(root, file), self._site)
                if file.endswith(".py"):
                    try:
                        body = self.tree(path).body
                    except SourceError:
                        continue
                    for node in body:
                        if isinstance(node, ast.ClassDef) and node.name == name:
                            return path, node
        return None

    def _bases(self, path: str, node: ast.ClassDef) -> List[Class]:
        names = (base.id if isinstance(base, ast.Name) else getattr(base, "attr", None) for base in node.bases)
        found = (self.find(path, name) for name in names if name not in _NO_CLASS)
        return [item for item in found if item is not None]

    def linearize(self, path: str, node: ast.ClassDef) -> List[Class]:
        """Python's method resolution order (C3): whose annotation of a name wins."""
        bases = self._bases(path, node)
        sequences = [self.linearize(*base) for base in bases] + [bases]
        order = [(path, node)]
        while any(sequences):
            sequences = [sequence for sequence in sequences if sequence]
            head = next(
                sequence[0]
                for sequence in sequences
                if not any(sequence[0][1] is other[1] for rest in sequences for other in rest[1:])
            )
            order.append(head)
            sequences = [[item for item in sequence if item[1] is not head[1]] for sequence in sequences]
        return order

    # -- arguments --------------------------------------------------------------------------------------------

    def arguments(self, path: str, name: str) -> Dict[str, Argument]:
        found = self.find(path, name)
        if found is None:
            raise SourceError(f"{self._site}/{path} has no class {name}")
        result: Dict[str, Argument] = {}
        for file, node in reversed(self.linearize(*found)):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    self._add(result, file, field.target.id, field)
        return dict(sorted(result.items()))

    def _add(self, result: Dict[str, Argument], path: str, name: str, field: ast.AnnAssign) -> None:
        annotation = self._alias(path, field.annotation)
        text = ast.unparse(annotation).strip("'\"")
        if "ClassVar" in text:
            return
        argument: Argument = {"type": text}
        choices = list(self._choices(path, annotation))
        if choices:
            argument["choices"] = choices
        value = _Default(field.value)
        if value.is_hidden:
            result.pop(name, None)
            return
        argument.update(value.facts())
        result[name] = argument

    def _alias(self, path: str, node: ast.expr) -> ast.expr:
        """What a module-level name such as ``Kind = Literal['a']`` stands for."""
        if isinstance(node, ast.Name):
            for item in self.tree(path).body:
                if isinstance(item, ast.Assign) and any(getattr(t, "id", None) == node.id for t in item.targets):
                    return item.value
        return node

    def _choices(self, path: str, annotation: ast.expr) -> Iterator[Any]:
        for node in ast.walk(annotation):
            inner = self._alias(path, node) if isinstance(node, ast.Name) and node is not annotation else node
            for literal in ast.walk(inner) if inner is not node else (node,):
                if isinstance(literal, ast.Subscript) and _name(literal.value) == "Literal":
                    items = literal.slice.elts if isinstance(literal.slice, ast.Tuple) else [literal.slice]
                    yield from (_value(item) for item in items)


class _Default:
    """What stands on the right of an annotated attribute."""

    def __init__(self, node: Optional[ast.expr]) -> None:
        self._node = node
        self._keywords: Optional[Dict[Optional[str], ast.expr]] = None
        if isinstance(node, ast.Call) and _name(node.func) == "field":
            self._keywords = {item.arg: item.value for item in node.keywords}

    @property
    def is_hidden(self) -> bool:
        """``field(init=False)``: no argument."""
        return self._keywords is not None and "init" in self._keywords and _value(self._keywords["init"]) is False

    def facts(self) -> Argument:
        if self._node is None:
            return {"required": True}
        if self._keywords is None:
            return {"default": _value(self._node)}
        if "default" in self._keywords:
            return {"default": _value(self._keywords["default"])}
        if "default_factory" in self._keywords:
            factory = ast.unparse(self._keywords["default_factory"])
            return {"default": {"list": [], "dict": {}}.get(factory, {"expr": factory})}
        return {"required": True}


def _name(node: ast.expr) -> Optional[str]:
    return getattr(node, "id", getattr(node, "attr", None))


def _value(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return {"expr": ast.unparse(node)}
    return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else {"expr": ast.unparse(node)}
