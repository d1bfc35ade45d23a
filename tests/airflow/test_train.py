"""The train operator and its trigger against real nodes, with a dictionary for Airflow's task state."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred
from airflow.serialization.serialized_objects import BaseSerialization

from swift_provider import exceptions
from swift_provider.operators.gang import Gang
from swift_provider.operators.train import STATE_KEY, TrainOperator
from swift_provider.planning.gang import cancel_reason
from swift_provider.planning.plan import LaunchPlan
from swift_provider.triggers import gang as trigger_module
from swift_provider.triggers.gang import GangTrigger
from tests.cluster import stand_in
from tests.cluster.sites import Site, until
from trainer.protocol import Phase, to_dict

NODES = ("node1", "node2")


class Store:
    """Airflow's task state, which survives retries and clears."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value


class Task:
    """One task instance over its tries."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan, self.store, self.xcom, self.try_number = plan, Store(), dict[str, Any](), 1

    @property
    def identity(self) -> SimpleNamespace:
        return SimpleNamespace(
            dag_id=self.plan.dag_id,
            run_id=self.plan.run_id,
            task_id="train",
            map_index=-1,
            try_number=self.try_number,
            id="ti",
            xcom_push=self.xcom.__setitem__,
        )

    @property
    def context(self) -> Any:
        run = SimpleNamespace(dag_id=self.plan.dag_id, run_id=self.plan.run_id)
        return {"ti": self.identity, "task_instance": self.identity, "task_state_store": self.store, "dag_run": run}

    @property
    def operator(self) -> TrainOperator:
        return TrainOperator(task_id="train", plan=self.plan.model_dump(mode="json"), poll_interval=0.2)

    def execute(self) -> GangTrigger:
        """One try up to its deferral."""
        with pytest.raises(TaskDeferred) as deferred:
            self.operator.execute(self.context)
        assert deferred.value.method_name == "execute_complete"
        assert deferred.value.timeout is None
        trigger = deferred.value.trigger
        assert isinstance(trigger, GangTrigger)
        return trigger

    def follow(self, trigger: GangTrigger, limit: float = 40.0) -> dict[str, Any]:
        """The trigger's one event."""
        trigger.task_instance = self.identity  # type: ignore[assignment]

        async def first() -> dict[str, Any]:
            async with asyncio.timeout(limit), contextlib.aclosing(trigger.run()) as events:  # type: ignore[type-var]
                async for event in events:
                    payload = dict(event.payload)
                    break
            await trigger.cleanup()
            return payload

        return asyncio.run(first())

    def complete(self, event: dict[str, Any]) -> Any:
        return self.operator.execute_complete(self.context, event)

    @property
    def handle(self) -> dict[str, Any]:
        return dict(self.store.values[STATE_KEY])


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no scheduler here that an early event could overtake."""
    monkeypatch.setattr(trigger_module, "FIRST_EVENT_AFTER_S", 0.0)


def children(site: Site, job: str) -> dict[str, Any]:
    return {name: site.state(name, job).child for name in NODES}


def test_a_run_from_the_first_try_to_its_result(site: Site) -> None:
    task = Task(site.plan(max_steps=4, save_steps=2))
    trigger = task.execute()
    assert task.handle["job_id"] == trigger.job_id
    assert task.handle["generation"] == 1
    event = task.follow(trigger)
    assert event["status"] == "ended"
    result = task.complete(event)
    assert (result["job_id"], result["generation"], result["step"]) == (trigger.job_id, 1, 4)
    assert task.handle["finished"]


def test_a_second_try_attaches_and_starts_nothing(site: Site) -> None:
    task = Task(site.plan(max_steps=10**6))
    first = task.execute()
    before, supervisors = children(site, first.job_id), {name: site.supervisors(name) for name in NODES}
    task.try_number = 2
    second = task.execute()
    assert second.job_id == first.job_id
    assert children(site, first.job_id) == before
    assert {name: site.supervisors(name) for name in NODES} == supervisors


def test_a_try_that_lost_its_task_state_still_finds_the_gang(site: Site) -> None:
    """Between the start and the store a worker may die: the job id alone must lead back."""
    task = Task(site.plan(max_steps=10**6))
    first = task.execute()
    before = children(site, first.job_id)
    task.store.values.clear()
    assert task.execute().job_id == first.job_id
    assert children(site, first.job_id) == before


def test_a_try_after_the_success_returns_the_result_and_starts_nothing(site: Site) -> None:
    task = Task(site.plan(max_steps=4, save_steps=2))
    task.follow(task.execute())  # the worker dies before it hears the event
    result = task.operator.execute(task.context)
    assert (result["generation"], result["step"]) == (1, 4)
    assert not site.processes("node1") | site.processes("node2")
    assert not site.supervisors("node1") + site.supervisors("node2")


def test_a_try_after_a_failure_resumes_from_the_newest_whole_checkpoint(site: Site, tmp_path: Path) -> None:
    once = stand_in.arguments(fail_rank=1, fail_step=5, once=str(tmp_path / "failed"), step_s=0.25)
    task = Task(site.plan(max_steps=14, save_steps=2, **once))
    trigger = task.execute()
    event = task.follow(trigger)
    with pytest.raises(exceptions.TrainingFailed) as caught:
        task.complete(event)
    text = str(caught.value)
    assert "node2" in text.splitlines()[0]
    assert text.index("node2") < text.index("node1")
    assert "rank 1 has had enough" in text
    torn = Path(task.plan.nodes[0].output_dir) / "checkpoint-6"
    torn.mkdir(exist_ok=True)  # newer, but not whole: rank 1 never came there
    task.try_number = 2
    second = task.execute()
    assert task.handle["generation"] == 2
    assert second.job_id != trigger.job_id
    result = task.complete(task.follow(second))
    assert (result["generation"], result["step"]) == (2, 14)
    for node in task.plan.nodes:
        log = site.log(node.name, second.job_id).decode()
        assert f"resumed from {node.output_dir}/checkpoint-4\n" in log
        assert "step 4/14" not in log


def test_a_slower_process_of_the_same_try_keeps_what_the_faster_one_has_noted(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees checkpoints of the very generation that it is about to start."""
    once = stand_in.arguments(fail_rank=1, fail_step=5, once=str(tmp_path / "failed"), step_s=0.25)
    task = Task(site.plan(max_steps=10**6, save_steps=2, grace=1.0, **once))
    with pytest.raises(exceptions.TrainingFailed):
        task.complete(task.follow(task.execute()))
    task.try_number = 2
    look, faster = Gang.newest_complete_checkpoint, []

    async def look_late(gang: Gang) -> Any:
        if not faster:
            faster.append(None)
            faster.append(await asyncio.to_thread(task.execute))
            newer = Path(task.plan.nodes[0].output_dir) / "checkpoint-8"
            while not newer.exists():
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.5)
        return await look(gang)

    monkeypatch.setattr(Gang, "newest_complete_checkpoint", look_late)
    slower = task.execute()
    assert slower.job_id == faster[1].job_id
    assert task.handle["generation"] == 2
    assert task.handle["resumed_step"] == 4


def test_a_deadline_that_is_over_starts_nothing(site: Site) -> None:
    task = Task(site.plan(max_steps=4, max_runtime=0.01))
    task.store.values[STATE_KEY] = None
    with contextlib.suppress(TaskDeferred):
        task.operator._load_handle(task.context, task.plan)
    time.sleep(0.05)
    with pytest.raises(exceptions.DeadlineExceeded):
        task.operator.execute(task.context)
    assert not list(site.folder("node1").glob("jobs/*"))


def test_a_deadline_during_the_training_ends_it_everywhere(site: Site) -> None:
    task = Task(site.plan(max_steps=10**6, max_runtime=15.0, grace=1.0))
    event = task.follow(task.execute())
    assert event["status"] in ("deadline", "ended")  # the trigger's clock or the supervisors', whichever is first
    with pytest.raises(exceptions.DeadlineExceeded):
        task.complete(event)
    until(lambda: not site.processes("node1") | site.processes("node2"))


def test_the_deadline_holds_over_all_tries(site: Site) -> None:
    task = Task(site.plan(max_steps=10**6, max_runtime=3600.0))
    first = task.execute()
    task.try_number = 2
    assert task.execute().deadline == first.deadline == task.handle["deadline"]


def test_a_cancel_stops_every_process_although_it_is_cancelled_itself(site: Site) -> None:
    task = Task(site.plan(max_steps=10**6, grace=1.0))
    trigger = task.execute()
    trigger.task_instance = task.identity  # type: ignore[assignment]

    async def cancel() -> None:
        following = asyncio.create_task(anext(trigger.run()))  # type: ignore[call-overload]
        await asyncio.sleep(1.5)
        following.cancel()
        kill = asyncio.create_task(trigger.on_kill())
        for _ in range(3):  # as Airflow does, about once a second
            await asyncio.sleep(0.05)
            kill.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await kill
        await trigger.cleanup()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(cancel())
    until(lambda: not site.processes("node1") | site.processes("node2"))
    until(lambda: site.state("node1", trigger.job_id).phase == Phase.KILLED)


# -- what each event becomes ----------------------------------------------------------------------------------------


def state(job: str, phase: str = Phase.EXITED, **more: Any) -> dict[str, Any]:
    from trainer.protocol import JobState

    return dict(to_dict(JobState(job_id=job, phase=phase, **more)))


GOOD = {"phase": Phase.EXITED, "exit_code": 0}


@pytest.mark.parametrize(
    ("status", "node1", "solo", "wanted", "words"),
    [
        ("ended", {"phase": Phase.EXITED, "exit_code": 1, "ended_at": 1.0}, [], "TrainingFailed", "exit status 1"),
        ("ended", {"phase": Phase.KILLED, "signal": 9, "ended_at": 1.0}, [], "TrainingFailed", "signal 9"),
        ("ended", {"phase": Phase.LOST, "error": "rebooted"}, [], "NodeLost", "rebooted"),
        ("ended", {"phase": Phase.KILLED, "stop_reason": "by hand", "ended_at": 1.0}, [], "TrainingStopped", "by hand"),
        ("ended", {"phase": Phase.KILLED, "stop_reason": "deadline", "ended_at": 1.0}, [], "DeadlineExceeded", "node1"),
        ("ended", GOOD, ["node2"], "TrainingFailed", "did not form one world"),
        ("lost", {"phase": Phase.RUNNING}, [], "NodeLost", "the cable"),
        ("deadline", {"phase": Phase.RUNNING}, [], "DeadlineExceeded", "max_runtime of 60 s"),
    ],
    ids=["failed", "signal", "lost-supervisor", "stopped", "deadline-on-node", "solo", "lost", "deadline"],
)
def test_each_event_becomes_its_exception(
    site: Site, status: str, node1: dict[str, Any], solo: list[str], wanted: str, words: str
) -> None:
    task = Task(site.plan(max_steps=2, max_runtime=60.0))
    event = {
        "status": status,
        "job_id": "job",
        "states": {"node1": state("job", **node1), "node2": state("job", **GOOD)},
        "tails": {"node1": ["last words"], "node2": []},
        "problems": {"node1": "node1: the cable"} if status == "lost" else {},
        "lost_nodes": ["node1"] if status == "lost" else [],
        "solo_world": solo,
        "progress": None,
    }
    with pytest.raises(exceptions.TrainingError) as caught:
        task.complete(event)
    assert type(caught.value).__name__ == wanted
    assert words in str(caught.value)


def test_a_cancel_that_was_meant_for_an_earlier_try_starts_the_next_generation(site: Site) -> None:
    task = Task(site.plan(max_steps=10**6, grace=1.0))
    trigger = task.execute()
    site.with_group(task.plan, lambda group: site.gang(task.plan, group).stop(trigger.job_id, cancel_reason(1)))
    event = task.follow(trigger)
    task.try_number = 2
    with pytest.raises(TaskDeferred) as deferred:
        task.complete(event)
    assert deferred.value.trigger.job_id != trigger.job_id
    assert task.handle["generation"] == 2


# -- the trigger ----------------------------------------------------------------------------------------------------


def test_the_trigger_survives_the_way_through_the_database() -> None:
    nodes = [{"name": "node1", "ssh_conn_id": "c", "address": "a", "rank": 0, "slots": 1, "workdir": "/w"}]
    trigger = GangTrigger(
        nodes=[{**nodes[0], "output_dir": "/w/out"}],
        python="/env/bin/python",
        job_id="dag.0123.g1",
        owner={"dag_id": "dag", "run_id": "run", "task_id": "train", "map_index": -1, "try_number": 2, "origin": "o"},
        deadline=123.5,
        poll_interval=2.0,
        unreachable_grace=60.0,
    )
    path, kwargs = trigger.serialize()
    assert path == f"{GangTrigger.__module__}.{GangTrigger.__qualname__}"
    there = BaseSerialization.deserialize(BaseSerialization.serialize(kwargs))
    assert there == kwargs
    assert GangTrigger(**there).serialize() == (path, kwargs)
