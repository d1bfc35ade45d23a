"""The only module that Airflow's plugin loader executes; everything else is imported as ``swift_provider.*``."""

from swift_provider.plugin import SwiftPlugin  # noqa: F401
