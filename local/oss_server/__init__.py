"""A small server that speaks Alibaba Cloud OSS's HTTP protocol, for the demo and for tests.

It checks signatures (V1 and V4, headers and presigned URLs), keeps objects on disk across restarts, and breaks on
request: faults are posted to ``/_faults``. Clients are the ordinary ones, unchanged.

Limits: one account, private buckets, no versioning, no lifecycle; server-side encryption is told with the object, whose
bytes stay as they are. What is not there answers ``NotImplemented`` rather than pretending.
"""

from local.oss_server.app import create_app
from local.oss_server.auth import Credential
from local.oss_server.serving import RunningServer, running_server

__all__ = ["Credential", "RunningServer", "create_app", "running_server"]
