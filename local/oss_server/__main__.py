"""The server as a command.

Secrets come from the environment: ``OSS_SERVER_ACCESS_KEY_SECRET``, for a temporary key also
``OSS_SERVER_SECURITY_TOKEN``, and ``OSS_SERVER_ADMIN_TOKEN`` to open ``/_faults`` and ``/_stats``.
When it listens it prints one line: its endpoint.
"""

import argparse
import os
import sys
from pathlib import Path

from local.oss_server.app import create_app
from local.oss_server.auth import Credential
from local.oss_server.multipart import MIN_PART_SIZE
from local.oss_server.serving import Server, bind, endpoint_of


def main(argv: list[str] | None = None) -> int:
    """Run until interrupted and return the exit status.

    Args:
        argv: arguments, those of the process by default.
    """
    options = _parser().parse_args(argv)
    secret = os.environ.get("OSS_SERVER_ACCESS_KEY_SECRET", "")
    if not secret:
        print("OSS_SERVER_ACCESS_KEY_SECRET is not set", file=sys.stderr)
        return 2
    credential = Credential(secret, os.environ.get("OSS_SERVER_SECURITY_TOKEN", ""))
    app = create_app(
        options.root,
        {options.access_key_id: credential},
        buckets=options.bucket,
        region=options.region,
        min_part_size=options.min_part_size,
        admin_token=os.environ.get("OSS_SERVER_ADMIN_TOKEN", ""),
    )
    with bind(options.host, options.port) as listener:
        endpoint = endpoint_of(listener)
        Server(app, lambda: print(endpoint, flush=True)).run([listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m local.oss_server", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of everything kept")
    parser.add_argument("--port", type=int, required=True, help="TCP port; 0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--access-key-id", required=True)
    parser.add_argument(
        "--bucket", action="append", default=[], metavar="NAME", help="make this bucket; may be repeated"
    )
    parser.add_argument("--region", default="cn-hangzhou", help="that V4 signatures must name (default: %(default)s)")
    parser.add_argument("--min-part-size", type=int, default=MIN_PART_SIZE, metavar="BYTES")
    return parser


if __name__ == "__main__":
    sys.exit(main())
