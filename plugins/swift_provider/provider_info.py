"""What Airflow reads about this distribution: see the ``apache_airflow_provider`` entry point in pyproject.toml."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """The provider's name, connection form and modules."""
    text = {"type": ["string", "null"]}
    secret = {"type": ["string", "null"], "format": "password"}
    return {
        "package-name": "swift-provider",
        "name": "Swift on Airflow",
        "description": "Nightly multi-node training of large language models with ms-swift.",
        "hooks": [{"integration-name": "OSS", "python-modules": ["swift_provider.hooks.oss"]}],
        "connection-types": [
            {
                "connection-type": "oss",
                "hook-class-name": "swift_provider.hooks.oss.OSSHook",
                "hook-name": "Alibaba Cloud OSS",
                "conn-fields": {
                    "auth_type": {"label": "Kind of credentials", "schema": {"type": "string", "default": "AK"}},
                    "access_key_id": {"label": "Access key id", "schema": text},
                    "access_key_secret": {"label": "Access key secret", "schema": secret},
                    "security_token": {"label": "Security token (STS)", "schema": secret},
                    "region": {"label": "Region, e.g. cn-hangzhou", "schema": text},
                    "endpoint": {"label": "Endpoint (default: the region's public one)", "schema": text},
                },
                "ui-field-behaviour": {"hidden-fields": ["port", "schema", "host", "login", "password"]},
            }
        ],
    }
