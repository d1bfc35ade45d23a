"""Why a gang ended: the first cause by node, rank, time and log line. Pure, over states and the ends of the logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from swift_provider.planning.gang import describe_end, first_failure
from swift_provider.planning.signatures import CASCADES, CAUSES, Signature
from trainer.protocol import JobState, StopReason

_RANK_PREFIX = re.compile(r"^\[rank(?P<rank>\d+)\]:\s*")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt)\b")
# Progress, warnings and argument dumps may hold any word; a cause stands in a line that reports an error.
_ERROR_LINE = re.compile(r"Error\b|Exception\b|\berror: |killed by signal|EADDRINUSE")
_DIED = re.compile(r"rank (?P<rank>\d+) \(pid (?P<pid>\d+)\) died: (?P<how>.+)")
_REPORT_FIELD = re.compile(r"^\s*(?P<name>time|rank|exitcode)\s*:\s*(?P<value>.+?)\s*$")


@dataclass(frozen=True)
class Cause:
    """The first cause. ``line`` is the evidence; ``permanent`` says that trying again does not help."""

    node: str
    kind: str
    line: str
    rank: int | None = None
    time: str = ""
    advice: str = ""
    permanent: bool = False

    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.rank is not None else ""
        when = f", {self.time}" if self.time else ""
        text = f"{self.kind} on {self.node}{rank}{when}: {self.line}"
        return f"{text}\n  {self.advice}" if self.advice else text


@dataclass(frozen=True)
class _Report:
    """torchrun's ``Root Cause (first observed failure)`` of one node."""

    rank: int | None
    time: str
    exit_code: int | None


def diagnose(states: Mapping[str, JobState], tails: Mapping[str, Sequence[str]]) -> Cause | None:
    """The first cause of a gang's end.

    What counts, in this order: a rank that was killed or died by itself, as its supervisor saw it; a line that is a
    cause; the last exception that is no consequence; a consequence. Between nodes, the one whose job ended first.

    Args:
        states: how each node's job ended.
        tails: the last lines of each node's log.
    """
    first = first_failure(states)
    if first is None:
        return None
    order = sorted(states, key=lambda name: (name != first[0], states[name].ended_at or float("inf")))
    for find in (_by_cause, _by_killed_rank, _by_exception, _by_cascade):
        for node in order:
            cause = find(node, states[node], tails.get(node, ()))
            if cause is not None:
                return cause
    return Cause(first[0], "unknown", describe_end(*first))


def _by_killed_rank(node: str, state: JobState, tail: Sequence[str]) -> Cause | None:
    report = _torchrun_report(tail)
    seen = _DIED.search(state.error or "")
    if seen and not seen["how"].startswith("exit code"):
        when = report.time if report else ""
        line = f"{seen['how']}, pid {seen['pid']}"
        return Cause(node, "rank killed", line, int(seen["rank"]), when, _killed_advice(seen["how"]))
    if report and report.exit_code is not None and report.exit_code < 0:
        line = f"signal {-report.exit_code}"
        return Cause(node, "rank killed", line, report.rank, report.time, _killed_advice(line))
    return None


def _killed_advice(how: str) -> str:
    if "KILL" in how or how == "signal 9":
        return "somebody or the kernel's out-of-memory killer did it; dmesg of that node tells"
    return ""


def _by_cause(node: str, state: JobState, tail: Sequence[str]) -> Cause | None:
    return _by_signature(node, state, tail, CAUSES)


def _by_cascade(node: str, state: JobState, tail: Sequence[str]) -> Cause | None:
    return _by_signature(node, state, tail, CASCADES)


def _by_signature(node: str, state: JobState, tail: Sequence[str], signatures: Sequence[Signature]) -> Cause | None:
    if state.stop_reason is not None and state.stop_reason != StopReason.RANK_FAILED:
        return None  # it was told to stop: what it said while dying is no evidence
    report = _torchrun_report(tail)
    for signature in signatures:
        for line in tail:
            if _ERROR_LINE.search(line) and signature.pattern.search(line):
                text = _without_prefix(line)
                # A wrong "never again" costs a night: only an exception's own line may say it, not its echo.
                permanent = signature.permanent and _EXCEPTION.match(text) is not None
                when = report.time if report else ""
                return Cause(node, signature.name, text, _rank_of(line, report), when, signature.advice, permanent)
    return None


def _by_exception(node: str, state: JobState, tail: Sequence[str]) -> Cause | None:
    if state.stop_reason is not None and state.stop_reason != StopReason.RANK_FAILED:
        return None
    report = _torchrun_report(tail)
    lines = [line for line in tail if _EXCEPTION.match(_without_prefix(line))]
    for line in lines:
        if not any(signature.pattern.search(line) for signature in CASCADES):
            return Cause(
                node, "exception", _without_prefix(line), _rank_of(line, report), report.time if report else ""
            )
    return None


def _torchrun_report(tail: Sequence[str]) -> _Report | None:
    reports = list(_reports(tail))
    return reports[-1] if reports else None


def _reports(tail: Sequence[str]) -> Iterator[_Report]:
    for index, line in enumerate(tail):
        if "Root Cause (first observed failure)" in line:
            found = {}
            for below in tail[index + 1 : index + 9]:
                match = _REPORT_FIELD.match(below)
                if match:
                    found[match["name"]] = match["value"]
            yield _Report(_number(found.get("rank")), found.get("time", ""), _number(found.get("exitcode")))


def _number(text: str | None) -> int | None:
    match = re.match(r"-?\d+", text or "")
    return int(match[0]) if match else None


def _without_prefix(line: str) -> str:
    return _RANK_PREFIX.sub("", line).strip()


def _rank_of(line: str, report: _Report | None) -> int | None:
    match = _RANK_PREFIX.match(line)
    if match:
        return int(match["rank"])
    return report.rank if report else None
