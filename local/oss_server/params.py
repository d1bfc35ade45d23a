"""Query parameters that are numbers."""

from local.oss_server.errors import invalid_argument
from local.oss_server.request import OssRequest


def number(request: OssRequest, name: str, *, default: int, least: int = 0, most: int) -> int:
    """Return a parameter as a whole number.

    Args:
        request: the request.
        name: the parameter.
        default: what an absent or empty parameter means.
        least: smallest value taken.
        most: largest value taken.

    Raises:
        OssError: ``InvalidArgument``.
    """
    text = request.param(name)
    if not text:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        raise invalid_argument(f"Argument {name} must be an integer between {least} and {most}.", name, text)
    return int(text)
