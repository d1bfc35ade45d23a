"""A small real training in ms-swift's place: torchrun, gloo, one all-reduce per step; in the trainer environment.

It is started as ``main.py sft swift.yaml``, as ms-swift's command is, and starts torchrun from the same variables.
Rank 0 writes ``$LOOP_RESULT`` after ``$LOOP_SECONDS``: the steps and their times in seconds.
"""

import json
import os
import sys
import time


def launch() -> None:
    env = os.environ
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={env['NPROC_PER_NODE']}"]
    if "NNODES" in env:
        command += [f"--nnodes={env['NNODES']}", f"--node_rank={env['NODE_RANK']}"]
        command += [f"--master_addr={env['MASTER_ADDR']}"]
    command += [f"--master_port={env['MASTER_PORT']}", __file__, "rank"]
    os.execv(command[0], command)  # noqa: S606


def train() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layer, data = torch.nn.Linear(512, 512), torch.randn(256, 512)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    times: list[float] = []
    began = time.perf_counter()
    while True:
        step = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(4):
            layer(data).square().mean().backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        over = torch.tensor(float(time.perf_counter() - began > float(os.environ.get("LOOP_SECONDS", "1e9"))))
        dist.all_reduce(over)
        times.append(time.perf_counter() - step)
        if len(times) % 100 == 0:
            print(f"step {len(times)}", flush=True)
        if over:
            break
    if dist.get_rank() == 0 and "LOOP_RESULT" in os.environ:
        with open(os.environ["LOOP_RESULT"], "w") as stream:
            json.dump(times[len(times) // 10 :], stream)
    dist.destroy_process_group()


if __name__ == "__main__":
    train() if sys.argv[1] == "rank" else launch()
