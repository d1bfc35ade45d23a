"""The XML of OSS's replies and requests: plain elements, no namespace."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TypeAlias
from urllib.parse import quote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from local.oss_server.errors import OssError

# An element is its name and either its text or its children.
Element: TypeAlias = "tuple[str, str | Sequence[Element]]"

OWNER: Element = ("Owner", [("ID", "1000000000000000"), ("DisplayName", "1000000000000000")])


def render(name: str, content: str | Sequence[Element]) -> bytes:
    """Return the whole document whose root is ``name``, UTF-8."""
    return ('<?xml version="1.0" encoding="UTF-8"?>\n' + _render(name, content)).encode("utf-8", "surrogatepass")


def _render(name: str, content: str | Sequence[Element]) -> str:
    # A carriage return would be read back as a newline if it were written as itself.
    inner = (
        escape(content, {"\r": "&#13;"})
        if isinstance(content, str)
        else "".join(_render(child, inside) for child, inside in content)
    )
    return f"<{name}>{inner}</{name}>"


def optional(*pairs: tuple[str, str]) -> list[Element]:
    """Return only the elements that have text."""
    return [(name, text) for name, text in pairs if text]


def encoder(encoding_type: str) -> "Encoder":
    """Return how names are written for the request's ``encoding-type``.

    Raises:
        OssError: ``InvalidArgument`` for an encoding other than ``url``.
    """
    if encoding_type not in ("", "url"):
        raise OssError("InvalidArgument", "Invalid Encoding Method specified in Request", ArgumentName="encoding-type")
    return Encoder(encoding_type == "url")


class Encoder:
    """Writes keys, prefixes and markers, percent-encoded when the client asked for it."""

    def __init__(self, url: bool) -> None:
        self.url = url

    def __call__(self, text: str) -> str:
        """Return ``text`` as the client wants it written."""
        return quote(text, safe="") if self.url else text

    def declared(self) -> list[Element]:
        """Return the ``EncodingType`` element, if there is one to show."""
        return [("EncodingType", "url")] if self.url else []


def iso8601(moment: float) -> str:
    """Return a Unix time as OSS writes it in XML, to the second with ``.000Z``."""
    return datetime.fromtimestamp(int(moment), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def parse(document: bytes, root: str) -> ElementTree.Element:
    """Read a request body whose root must be ``root``; namespaces are dropped.

    Raises:
        OssError: ``MalformedXML``.
    """
    try:
        tree = ElementTree.fromstring(document)  # noqa: S314 - from a signed request, and expat bounds entity growth
    except (ElementTree.ParseError, ValueError) as error:
        raise OssError("MalformedXML") from error
    for node in tree.iter():
        node.tag = node.tag.rpartition("}")[2]
    if tree.tag != root:
        raise OssError("MalformedXML")
    return tree


def text(node: ElementTree.Element, path: str, default: str | None = None) -> str:
    """Return the text of a child; without ``default`` the child must be there.

    Raises:
        OssError: ``MalformedXML`` when it is missing.
    """
    child = node.find(path)
    if child is None:
        if default is None:
            raise OssError("MalformedXML")
        return default
    return child.text or ""


def error_document(error: OssError, request_id: str, host_id: str) -> bytes:
    """Return the ``<Error>`` body of a refused request."""
    usual: Iterable[Element] = [
        ("Code", error.code),
        ("Message", error.message),
        ("RequestId", request_id),
        ("HostId", host_id),
    ]
    return render("Error", [*usual, *error.details.items()])
