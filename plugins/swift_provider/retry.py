"""Which failure is worth another try, how many times, and when: one budget per kind of failure.

``SWIFT_RETRY_DELAY_S`` in Airflow's environment replaces every pause between two tries; the numbers of tries stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from airflow.sdk import RetryDecision, RetryPolicy

from swift_provider import exceptions
from swift_provider.config.errors import ConfigError
from swift_provider.settings import retry_delay

#: What a task's ``retries`` must allow at least, so that the largest budget fits.
MOST_RETRIES = 48


@dataclass(frozen=True)
class Budget:
    """``tries`` counts all tries of the task, the first included; one means never again."""

    failures: tuple[type[BaseException], ...]
    tries: int
    delay: timedelta
    reason: str


_MINUTE = timedelta(minutes=1)

BUDGETS = (
    Budget((ConfigError,), 1, _MINUTE, "wrong configuration stays wrong"),
    Budget((exceptions.HostKeyUnknown,), 1, _MINUTE, "a person has to look at the host key"),
    Budget((exceptions.DeadlineExceeded,), 1, _MINUTE, "max_runtime is over"),
    Budget((exceptions.TrainingStopped,), 1, _MINUTE, "somebody stopped it"),
    Budget((exceptions.TrainingRefused,), 1, _MINUTE, "every other try would fail in the same way"),
    Budget((exceptions.NoProgress,), 1, _MINUTE, "restarts without a new checkpoint"),
    Budget((exceptions.NodeBusy,), MOST_RETRIES + 1, 5 * _MINUTE, "a node trains something else"),
    Budget((exceptions.NodeUnreachable,), 16, 2 * _MINUTE, "a node is out of reach"),
    Budget((exceptions.NodeLost,), 8, 2 * _MINUTE, "a node was lost; resume from the newest checkpoint"),
    Budget((exceptions.TrainingFailed,), 8, _MINUTE, "resume from the newest checkpoint"),
)
#: For everything else: an Airflow hiccup, an agent that did not answer, a bucket that refused.
OTHERS = Budget((BaseException,), 3, _MINUTE, "perhaps it passes")


class TrainingRetryPolicy(RetryPolicy):
    """Decides by the class of the exception and the number of tries so far; see :data:`BUDGETS`."""

    def evaluate(self, exception: BaseException, try_number: int, max_tries: int, context: Any = None) -> RetryDecision:
        """The decision, with the budget's reason."""
        budget = next((item for item in BUDGETS if isinstance(exception, item.failures)), OTHERS)
        if try_number >= budget.tries:
            return RetryDecision.fail(reason=f"{budget.reason} ({try_number} of {budget.tries} tries)")
        return RetryDecision.retry(delay=retry_delay(budget.delay), reason=budget.reason)

    def serialize(self) -> dict[str, Any]:
        """Nothing: the budgets are code."""
        return {"__type": f"{type(self).__module__}.{type(self).__qualname__}"}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> TrainingRetryPolicy:
        """See :meth:`serialize`."""
        return cls()
