"""What breaks around a training, and what a user does to it, through a real Airflow.

After each fault: which processes are on which node (from /proc), what Airflow's REST API says, and that a node never
trained twice. The order of the tests matters: runs that need nobody's hand start at the beginning and are looked at
later; the tests that kill parts of Airflow come last.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from local.airflow import AirflowClient
from local.laptop import Laptop
from tests.conftest import wait_for
from tests.e2e import faults
from tests.e2e.faults import DAG, NODES, PAIRS, Pair, Run, Watch, kill, kill_component, note, promised, stays, until
from trainer.protocol import Owner, Phase

pytestmark = pytest.mark.timeout(600)

HOUSEKEEPING = "swift_housekeeping"
#: Who has nodes that our runs want.
OTHER = Owner("other", "nightly", "train", origin="https://airflow.example")
GONE_S = 45.0  # what a cancel is promised to take at most, whatever is down
GONE_WITH_TRIGGERER_S = 10.0
GANG_STOP_S = 5.0  # from the death of a rank to the end of the last process of its gang


@pytest.fixture(scope="module")
def pairs(laptop: Laptop, client: AirflowClient) -> Iterator[dict[str, Pair]]:
    pairs = {name: Pair(laptop.folder, name) for name in PAIRS}
    client.wait_for_dag(HOUSEKEEPING)
    yield pairs
    for pair in pairs.values():
        pair.end_everything()


@pytest.fixture(scope="module")
def new_run(client: AirflowClient, pairs: dict[str, Pair]) -> Callable[..., Run]:
    return lambda pair, run_id: Run(client, pairs[pair], run_id)


@pytest.fixture(scope="module", autouse=True)
def watch(pairs: dict[str, Pair]) -> Iterator[Watch]:
    watch = Watch(pairs.values())
    watch.start()
    yield watch
    watch.stop()


@pytest.fixture(autouse=True)
def never_two_at_once(watch: Watch) -> Iterator[None]:
    yield
    assert watch.is_alive()
    assert watch.broken == []


@dataclass
class Early:
    """Runs that are started at once, so that their way through Airflow costs no waiting."""

    refused: Run
    overdue: Run
    broken: Run
    patient: Run
    chain: Run
    racers: list[Run]


@pytest.fixture(scope="module", autouse=True)
def early(new_run: Callable[..., Run], pairs: dict[str, Pair], laptop: Laptop) -> Early:
    listen = f"import socket, time; s = socket.create_server(('127.0.0.11', {port_of(laptop)})); time.sleep(600)"
    pairs["stand-in-5"].start_by_hand("node1", "listens", OTHER, ["python3", "-c", listen])
    refusal = laptop.folder / "refusal"
    refusal.write_text("Traceback (most recent call last):\nValueError: remaining_argv: ['--lerning_rate', '1']\n")
    return Early(
        patient=new_run("stand-in-5", "patient").trigger(max_steps=20),
        broken=new_run("stand-in-3", "rank-dies").trigger(max_steps=500, step_s=0.2, save_steps=40),
        refused=new_run("stand-in-4", "refused").trigger(max_steps=50, fail_rank=0, fail_step=1, dump=str(refusal)),
        overdue=new_run("stand-in-hurried", "overdue").trigger(max_steps=100_000, save_steps=100),
        chain=new_run("stand-in-6", "cancelled").trigger(max_steps=100_000, step_s=0.2, save_steps=100_000),
        racers=[new_run("stand-in-2", f"racer-{index}").trigger(max_steps=80) for index in (1, 2)],
    )


def port_of(laptop: Laptop) -> int:
    """Where the ranks of pair ``stand-in-5`` are to meet."""
    text = (laptop.config_dir / "clusters" / "local-stand-in-5.yaml").read_text()
    return int(yaml.safe_load(text)["master_port"])


# -- nodes that others have -------------------------------------------------------------------------------------------


def test_a_preflight_waits_for_nodes_that_train_and_hold_the_port(early: Early) -> None:
    """What comes next in this run is looked at later: node2 is taken when its train task begins."""
    run, pair = early.patient, early.patient.pair
    until(lambda: run.task("preflight")["try_number"] >= 2, 90, run.tell, pause=0.5)
    assert "NodeBusy: " in run.log(1, "preflight")
    pair.stop_by_hand("node1", "listens")
    until(lambda: run.task("stage")["state"] in ("queued", "running"), 60, run.tell)
    pair.start_by_hand("node2", "in-the-way", OTHER)


# -- a gang that ends by itself ---------------------------------------------------------------------------------------


def test_a_dead_rank_ends_the_gang_within_seconds_and_the_retry_resumes(early: Early) -> None:
    run = early.broken
    run.wait_for_gang(1, step=45)
    run.wait_until_followed()
    victim = run.pair.rank("node2")
    kill(victim)
    seconds = until(lambda: not run.pair.training(), 30, run.tell, pause=0.02)
    note(f"last process of the gang gone {seconds:.1f} s after the rank's death")
    assert seconds < promised(GANG_STOP_S)
    newest = run.newest_complete_checkpoint()
    until(lambda: run.train()[1] == 2, 60, run.tell)
    log = run.log(1)
    assert re.search(rf"TrainingFailed: rank killed on node2, rank 1.*: SIGKILL, pid {victim}", log), log[-3000:]
    run.wait_for_gang(2)
    until(lambda: len(run.segments()) == 2, 60, run.tell)
    first, second = run.segments()
    assert first[0] == 1
    assert second[0] == newest + 1, "resumes behind the newest complete checkpoint"
    assert newest >= 40
    assert run.generations() == {"node1": [1, 2], "node2": [1, 2]}


def test_a_dead_supervisor_is_a_lost_node_and_its_orphans_are_ended(early: Early) -> None:
    run = early.broken
    run.wait_until_followed(2)
    supervisors = run.wait_for_gang(2)
    orphans = run.pair.pids("node2")
    kill(supervisors["node2"][0])
    assert orphans <= run.pair.pids("node2"), "the training does not die with its supervisor"
    seconds = until(lambda: run.train()[1] == 3 or run.train()[0] == "up_for_retry", 60, run.tell)
    note(f"lost node known {seconds:.1f} s after its supervisor's death")
    if run.train() == ("up_for_retry", 2):
        assert not run.pair.training(), "nothing may train while the task waits for its next try"
    run.wait_for_gang(3)
    assert not orphans & run.pair.pids("node2")
    assert "NodeLost: " in run.log(2)
    assert "node2: its supervisor is gone" in run.log(2)
    until(lambda: len(run.segments()) == 3, 60, run.tell)


# -- a training that is not to be tried again -------------------------------------------------------------------------


def test_a_refused_argument_is_tried_once(early: Early) -> None:
    run = early.refused
    run.wait_for_end("failed")
    assert run.train() == ("failed", 1)
    assert "TrainingRefused: unknown argument on node1" in run.log()
    assert "remaining_argv: ['--lerning_rate', '1']" in run.log()
    assert run.generations() == {"node1": [1], "node2": [1]}
    assert run.pair.is_empty()


def test_a_run_that_is_over_its_time_ends_and_is_not_tried_again(early: Early) -> None:
    run = early.overdue
    run.wait_for_end("failed")
    assert run.train() == ("failed", 1)
    assert "DeadlineExceeded: " in run.log()
    assert run.generations() == {"node1": [1], "node2": [1]}
    assert len(run.segments()) <= 1
    assert run.pair.is_empty()


# -- two runs, one pair of nodes --------------------------------------------------------------------------------------


def test_two_runs_that_race_for_the_same_nodes_train_one_after_the_other(early: Early) -> None:
    for run in early.racers:
        run.wait_for_end(timeout=150)
        assert run.train()[0] == "success"
        assert run.steps() == list(range(1, 81)), "trained once, from the first step to the last"
    tries = {run.run_id: [run.task(task)["try_number"] for task in ("preflight", "train")] for run in early.racers}
    note(f"tries of preflight and train: {tries}")
    assert early.racers[0].pair.is_empty()


def test_a_run_that_waits_for_a_busy_node_has_made_no_attempt(early: Early) -> None:
    """It waits for longer than the three generations without progress that end a run: it has not begun."""
    run, pair = early.patient, early.patient.pair
    try:
        until(lambda: run.train()[1] >= 5, 120, run.tell, pause=0.5)
        for number in range(1, 5):
            assert "NodeBusy: node2: busy with dag other, run nightly of https://airflow.example" in run.log(number)
        assert not pair.pids("node1")
    finally:
        pair.stop_by_hand("node2", "in-the-way")
    run.wait_for_end()
    assert run.steps() == list(range(1, 21))
    assert pair.is_empty()


# -- a task process that dies -----------------------------------------------------------------------------------------


def test_a_task_process_killed_while_it_starts_the_gang_costs_nothing(new_run: Callable[..., Run]) -> None:
    run = new_run("stand-in", "task-dies").trigger(max_steps=60)
    task = wait_for_start(run)
    assert faults.command_line(task["pid"])[0].startswith("airflow worker -- ")
    kill(task["pid"])
    phases = faults.phases({node: run.pair.state(node, run.job()) for node in NODES})
    note(f"task process killed when the jobs were {phases}")
    run.wait_for_gang(1)
    run.wait_for_end()
    assert run.train() == ("success", 2)
    assert run.generations() == {"node1": [1], "node2": [1]}, "the second try took up what the first had begun"
    assert run.steps() == list(range(1, 61))
    assert run.pair.is_empty()


def wait_for_start(run: Run) -> dict[str, Any]:
    """The train task, at the moment when the first of its jobs appears on a node."""
    wait = time.monotonic() + 90
    while run.task()["state"] != "running" or not run.task()["pid"]:
        assert time.monotonic() < wait, run.tell()
        time.sleep(0.1)
    task = run.task()
    until(lambda: any(run.generations().values()), 60, run.tell, pause=0.005)
    return task


def test_a_task_process_killed_while_it_takes_the_result_costs_nothing(new_run: Callable[..., Run]) -> None:
    run = new_run("stand-in", "resume-dies").trigger(max_steps=40)
    run.wait_for_gang(1)
    run.wait_until_followed()
    first = run.task()["pid"]
    until(
        lambda: run.task()["state"] == "running" and run.task()["pid"] not in (None, first), 120, run.tell, pause=0.02
    )
    kill(run.task()["pid"])
    run.wait_for_end()
    assert run.train() == ("success", 2)
    assert run.generations() == {"node1": [1], "node2": [1]}, "the second try took what the first had trained"
    assert run.steps() == list(range(1, 41))
    assert run.pair.is_empty()


# -- what users do ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cleared(new_run: Callable[..., Run]) -> Run:
    return new_run("stand-in", "cleared").trigger(max_steps=200)


def test_a_cleared_training_ends_and_starts_again_from_its_checkpoint(cleared: Run) -> None:
    run = cleared
    old = run.wait_for_gang(1, step=25)
    run.wait_until_followed()
    run.clear()
    new = run.wait_for_gang(2)
    assert not {pid for pids in old.values() for pid in pids} & {pid for pids in new.values() for pid in pids}
    until(lambda: len(run.segments()) == 2, 60, run.tell)
    first, second = run.segments()
    assert 1 < second[0] <= first[1] + 1


@pytest.fixture(scope="module")
def chain(early: Early) -> Run:
    """One run that is cancelled in one way after another, and cleared in between.

    It never saves a checkpoint: what a user ends again and again is no run without progress.
    """
    return early.chain


def cancelled(run: Run, cancel: Callable[[], None], limit: float) -> None:
    cancel()
    seconds = until(lambda: not run.pair.training(), promised(limit), run.tell, pause=0.02)
    note(f"last process gone {seconds:.1f} s after the user's word")
    until(run.pair.is_empty, 5, run.tell)


def test_mark_failed_ends_the_training(chain: Run) -> None:
    chain.wait_for_gang(1)
    chain.wait_until_followed()
    cancelled(chain, lambda: chain.mark("failed"), GONE_WITH_TRIGGERER_S)
    chain.wait_for_end("failed")
    assert chain.train() == ("failed", 1)
    assert chain.pair.is_empty()


def test_mark_success_ends_the_training(chain: Run) -> None:
    chain.clear()
    chain.wait_for_gang(2)
    chain.wait_until_followed(2)
    cancelled(chain, lambda: chain.mark("success"), GONE_WITH_TRIGGERER_S)
    chain.wait_for_end("success")
    assert chain.train() == ("success", 2)
    assert chain.pair.is_empty()


def test_a_run_that_is_marked_failed_ends_its_training(chain: Run) -> None:
    chain.clear()
    chain.wait_for_gang(3)
    chain.wait_until_followed(3)
    cancelled(chain, lambda: chain.mark_run("failed"), GONE_WITH_TRIGGERER_S)
    assert (chain.state, *chain.train()) == ("failed", "failed", 3)


def test_a_cancel_while_the_next_try_is_awaited_is_the_end(chain: Run) -> None:
    chain.clear()
    chain.wait_for_gang(4)
    chain.wait_until_followed(4)
    kill(chain.pair.rank("node1"))
    until(lambda: chain.train() == ("up_for_retry", 4), 60, chain.tell, pause=0.05)
    chain.mark("failed")
    chain.wait_for_end("failed")
    stays(chain.pair.is_empty, 8, chain.tell)
    assert chain.train() == ("failed", 4)
    assert chain.generations() == {"node1": [1, 2, 3, 4], "node2": [1, 2, 3, 4]}


def test_runs_that_were_hit_earlier_have_ended_well(early: Early, cleared: Run) -> None:
    for run, tries, last in ((early.broken, 3, 500), (cleared, 2, 200)):
        run.wait_for_end()
        assert run.train() == ("success", tries)
        every = list(range(1, tries + 1))
        assert run.generations() == {"node1": every, "node2": every}
        assert len(run.segments()) == tries
        assert run.steps()[-1] == last
        assert run.pair.is_empty()


def test_a_cancel_while_one_node_is_prepared_and_the_other_is_not(new_run: Callable[..., Run]) -> None:
    """Of one run the task is marked, of the other the run; their second nodes let no start through until later."""
    runs = [new_run(pair, f"half-{pair}").trigger(max_steps=100_000) for pair in ("stand-in", "stand-in-4")]
    with contextlib.ExitStack() as blocks:
        for run in runs:
            blocks.enter_context(run.pair.starts_are_blocked("node2"))
        for run, mark in zip(runs, (runs[0].mark, runs[1].mark_run), strict=True):
            until(lambda run=run: run.pair.supervisors()["node1"], 90, run.tell)
            until(lambda run=run: run.pair.state("node1", run.job()), 10, run.tell)
            assert faults.phases({node: run.pair.state(node, run.job()) for node in NODES}) == {
                "node1": Phase.PREPARING,
                "node2": Phase.ABSENT,
            }
            mark("failed")
            seconds = until(lambda run=run: not run.pair.supervisors()["node1"], promised(10), run.tell)
            note(f"the prepared node was free {seconds:.1f} s after the user's word")
    for run in runs:
        run.wait_for_end("failed")
        assert run.train() == ("failed", 1)
    stays(lambda: all(run.pair.is_empty() for run in runs), 8, runs[0].tell)


# -- parts of Airflow that die ----------------------------------------------------------------------------------------


@dataclass
class Long:
    """A run that trains while one part of Airflow after another is killed, and its supervisors at the beginning."""

    run: Run
    supervisors: dict[str, list[int]]
    max_steps: int

    def is_untouched(self) -> bool:
        return self.run.gang() == self.supervisors


@pytest.fixture(scope="module")
def long(new_run: Callable[..., Run]) -> Long:
    steps = 1700
    run = new_run("stand-in-2", "long").trigger(max_steps=steps, save_steps=500)
    supervisors = run.wait_for_gang()
    run.wait_until_followed()
    return Long(run, supervisors, steps)


def test_housekeeping_tells_owners_orphans_and_strangers_apart(
    client: AirflowClient, pairs: dict[str, Pair], laptop: Laptop, long: Long
) -> None:
    assert laptop.airflow is not None
    pair = pairs["stand-in-3"]
    gone = Owner(DAG, "no-such-run", "train", try_number=1, origin=laptop.airflow.url)
    foreign = Owner(DAG, "no-such-run", "train", try_number=1, origin="https://airflow.example")
    pair.start_by_hand("node1", "orphan", gone)
    pair.start_by_hand("node2", "foreign", foreign)
    try:
        rows = keep_house(client, "report")
        assert rows == [
            {"cluster": "local-stand-in-3", "node": "node1", "job_id": "orphan", "reason": "its run is gone"}
        ]
        log = client.task_log(HOUSEKEEPING, "report", "housekeeping")
        assert re.search(r"foreign +local-stand-in-3 +node2 +foreign +running", log), log
        assert re.search(rf"owned +local-stand-in-2 +node1 +{re.escape(long.run.job())} +running", log), log
        assert {node: set(jobs) for node, jobs in pair.training().items()} == {
            "node1": {"orphan"},
            "node2": {"foreign"},
        }
        assert keep_house(client, "stop") == rows
        until(lambda: "node1" not in pair.training(), 10)
        assert set(pair.training()["node2"]) == {"foreign"}
        assert long.is_untouched()
    finally:
        pair.stop_by_hand("node2", "foreign")
        pair.stop_by_hand("node1", "orphan")


def keep_house(client: AirflowClient, policy: str) -> Any:
    client.trigger(HOUSEKEEPING, policy, {"policy": policy})
    state = wait_for(lambda: client.run_state(HOUSEKEEPING, policy), lambda state: state in ("success", "failed"), 90)
    assert state == "success", client.task_log(HOUSEKEEPING, policy, "housekeeping")
    return client.xcom(HOUSEKEEPING, policy, "housekeeping")


@dataclass
class Outage:
    """The steps of the long run when its triggerer was killed and when another one followed it."""

    killed: int
    followed: int
    seconds: float


@pytest.fixture(scope="module")
def outage(laptop: Laptop, chain: Run, long: Long) -> Outage:
    """A triggerer that is killed; before another one is started, a user marks another run's task failed."""
    assert laptop.airflow is not None
    generation, number = chain.generations()["node1"][-1] + 1, chain.train()[1] + 1
    chain.clear()
    chain.wait_for_gang(generation)
    chain.wait_until_followed(number)
    killed = long.run.steps()[-1]
    kill_component(laptop, "triggerer")
    cancelled(chain, lambda: chain.mark("failed"), GONE_S)
    time.sleep(1)
    laptop.airflow.start_component("triggerer")
    seen = long.run.client.xcom(DAG, long.run.run_id, "train", "progress")["updated_at"]

    def followed() -> bool:
        return bool(long.run.client.xcom(DAG, long.run.run_id, "train", "progress")["updated_at"] > seen)

    seconds = until(followed, 90, long.run.tell)
    note(f"followed again {seconds:.1f} s after the start of another triggerer")
    return Outage(killed, long.run.steps()[-1], seconds)


def test_mark_failed_without_a_triggerer_ends_the_training_for_good(chain: Run, outage: Outage) -> None:
    assert chain.train()[0] == "failed"
    chain.wait_for_end("failed")
    assert chain.pair.is_empty(), "the new triggerer has started something"


def test_another_triggerer_takes_over_and_the_training_goes_on(long: Long, outage: Outage) -> None:
    assert long.is_untouched()
    assert long.run.train() == ("deferred", 1)


def test_a_killed_scheduler_leaves_the_training_alone(laptop: Laptop, long: Long, outage: Outage) -> None:
    assert laptop.airflow is not None
    kill_component(laptop, "scheduler")
    stays(long.is_untouched, 2, long.run.tell)
    laptop.airflow.start_component("scheduler")
    stays(long.is_untouched, 5, long.run.tell)
    assert long.run.train() == ("deferred", 1)


def test_an_api_server_that_is_down_leaves_the_training_alone(laptop: Laptop, long: Long, outage: Outage) -> None:
    assert laptop.airflow is not None
    began = time.monotonic()
    kill_component(laptop, "api-server")
    stays(long.is_untouched, 50, lambda: "the training is not what it was")  # and it takes a while to come up
    laptop.airflow.start_component("api-server")
    until(laptop.airflow.healthy, 120)
    note(f"the API server was down for {time.monotonic() - began:.1f} s")
    assert long.is_untouched()


def test_the_run_ends_in_success_at_its_first_try(long: Long, outage: Outage) -> None:
    run = long.run
    run.wait_for_end(timeout=180)
    assert run.train() == ("success", 1)
    assert run.generations() == {"node1": [1], "node2": [1]}
    assert run.steps() == list(range(1, long.max_steps + 1))
    assert run.pair.is_empty()


def test_no_line_is_missing_and_lines_repeat_around_the_takeover_only(long: Long, outage: Outage) -> None:
    shown = Counter(long.run.log().splitlines())
    for node in NODES:
        path = long.run.pair.workdir(node) / "jobs" / long.run.job() / "log"
        lines = faults.lines_of(path.read_bytes())
        assert [line for line in lines if not shown[f"[{node}] {line}"]] == []
        again = [int(line.split()[1].partition("/")[0]) for line in lines if shown[f"[{node}] {line}"] > 1]
        note(f"{node}: {len(again)} of {len(lines)} lines twice, killed at {outage.killed}: {again[:1]}…{again[-1:]}")
        assert all(outage.killed - 80 <= step <= outage.killed + 80 for step in again)
        assert max(shown[f"[{node}] {line}"] for line in lines) <= 2
