"""A training in ms-swift's place: same command line, same environment, same files, no torch.

:func:`install` makes a folder that, on ``PYTHONPATH``, turns ``python -m swift.cli.main sft swift.yaml`` into this
file: a launcher that starts one rank per slot, as torchrun does, and ranks that step, log, write ``logging.jsonl`` and
save checkpoints. What shall go wrong is said by the argument ``model_kwargs`` of the recipe.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Script:
    """What the ranks do beyond stepping. ``fail_rank`` −1 means none; ``dump`` is a file whose bytes become output.

    ``{node}`` in ``dump`` stands for the node's name.
    """

    step_s: float = 0.05
    fail_rank: int = -1
    fail_step: int = 3
    launcher_patience_s: float = 0.2
    ignore_term: bool = False
    escape: bool = False  # a child in a session of its own, as dataloaders and daemons have it
    dump: str = ""
    dump_pause_s: float = 0.0
    once: str = ""  # a file; when it is there, nothing fails any more


def install(folder: Path) -> Path:
    """Makes the package ``swift`` in ``folder`` and returns ``folder``, for ``PYTHONPATH``."""
    package = folder / "swift" / "cli"
    package.mkdir(parents=True)
    (folder / "swift" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "main.py").symlink_to(Path(__file__).resolve())
    return folder


def arguments(**script: Any) -> dict[str, Any]:
    """The recipe arguments that carry ``script``."""
    return {"model_kwargs": asdict(Script(**script))}  # an argument that ms-swift really has, and that holds anything


# -- on the node ------------------------------------------------------------------------------------------------


def safetensors(size: int = 64) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\1" * size


def launch(file: str) -> int:
    """torchrun's part: one process per slot, and when one fails, the end of all."""
    slots, node = int(os.environ.get("NPROC_PER_NODE", "1")), int(os.environ.get("NODE_RANK", "0"))
    world = slots * int(os.environ.get("NNODES", "1"))
    script = load(file)[1]
    if script.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", file],
            env={**os.environ, "RANK": str(node * slots + local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world)},
        )
        for local in range(slots)
    ]
    while any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks):
            time.sleep(script.launcher_patience_s)
            for rank in ranks:
                rank.terminate()
            return 1
        time.sleep(0.05)
    return int(any(rank.returncode for rank in ranks))


def load(file: str) -> tuple[dict[str, Any], Script]:
    import yaml

    args = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    return args, Script(**args.get("model_kwargs") or {})


def train(file: str) -> int:
    args, script = load(file)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if script.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script.escape:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    if script.dump:
        dump(script)
    output, last = Path(args["output_dir"]), int(args["max_steps"])
    output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for step in range(first_step(args), last + 1):
        time.sleep(script.step_s)
        say(f"step {step}/{last} 损失 {1 / step:.4f}")
        if rank == script.fail_rank and step == script.fail_step and not (script.once and Path(script.once).exists()):
            if script.once:
                Path(script.once).touch()
            say(f"RuntimeError: rank {rank} has had enough")
            return 1
        if rank == 0:
            log_step(output, step, last, time.monotonic() - began)
        if step % int(args.get("save_steps", 1 << 30)) == 0:
            save(output / f"checkpoint-{step}", step, rank, world, int(os.environ.get("LOCAL_RANK", "0")))
    return 0


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def first_step(args: dict[str, Any]) -> int:
    source = args.get("resume_from_checkpoint")
    if not source:
        return 1
    state = json.loads(Path(source, "trainer_state.json").read_text())
    say(f"resumed from {source}")
    return int(state["global_step"]) + 1


def dump(script: Script) -> None:
    """The file's bytes in pieces that end in the middle of lines and characters."""
    data, piece = Path(script.dump.replace("{node}", node_name())).read_bytes(), 65537
    for start in range(0, len(data), piece):
        os.write(1, data[start : start + piece])
        time.sleep(script.dump_pause_s)


def node_name() -> str:
    return f"node{int(os.environ.get('NODE_RANK', '0')) + 1}"


def log_step(output: Path, step: int, last: int, elapsed: float) -> None:
    row = {
        "loss": 1 / step,
        "epoch": step / 10,
        "global_step/max_steps": f"{step}/{last}",
        "elapsed_time": f"{elapsed:.0f}s",
        "train_speed(s/it)": round(elapsed / step, 4),
    }
    with open(output / "logging.jsonl", "a") as stream:
        stream.write(json.dumps(row) + "\n")


def save(folder: Path, step: int, rank: int, world: int, local_rank: int) -> None:
    """A checkpoint as DDP leaves it: each rank its random state, the first rank of each node what is common."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rng_state_{rank}.pth" if world > 1 else "rng_state.pth"
    (folder / name).write_bytes(b"r")
    if local_rank == 0:
        history = [{"step": step, "loss": 1 / step}, {"step": step, "eval_loss": 2 / step}]
        files: dict[str, bytes] = {
            "args.json": json.dumps({"global_world_size": world, "save_only_model": False}).encode(),
            "config.json": b"{}",
            "model.safetensors": safetensors(),
            "optimizer.pt": b"o",
            "scheduler.pt": b"s",
            "training_args.bin": b"x",
            "trainer_state.json": json.dumps({"global_step": step, "epoch": 0.1, "log_history": history}).encode(),
        }
        for name, content in files.items():
            (folder / f"{name}.{rank}").write_bytes(content)
            (folder / f"{name}.{rank}").replace(folder / name)


if __name__ == "__main__":
    if sys.argv[1] == "export":
        sys.exit(0)  # and has made nothing
    sys.exit(train(sys.argv[2]) if sys.argv[1] == "rank" else launch(sys.argv[2]))
