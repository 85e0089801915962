"""Processes that stay alive between jobs, so that torch is imported once and not for every test."""

import os
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch.multiprocessing as mp

SECONDS = 120


class JobFailed(AssertionError):
    """A rank raised; the message holds every rank's traceback."""


class Pool:
    """Up to ``size`` ranks; the processes start at the first job, and anew after one that hung.

    Args:
        size: The most ranks of a job.
        backend: For ``torch.distributed``.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self.workers = []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        for _ in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self.backend), daemon=True)
            process.start()
            self.workers.append((process, here))
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before

    def run(self, world, function, *args):
        """Run a function on the ranks of one process group; a function of a module, as it travels by name."""
        if not self.workers:
            self._start()
        chosen = self.workers[:world]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(chosen):
                pipe.send((function, args, rank, world, str(Path(folder) / "store")))
            if not all(pipe.poll(SECONDS) for _, pipe in chosen):
                self.close()
                raise JobFailed(f"{function.__name__} did not end within {SECONDS} s")
            try:
                answers = [pipe.recv() for _, pipe in chosen]
            except EOFError:
                self.close()
                raise JobFailed(f"a process died in {function.__name__}; see its stderr") from None
            for (good, _), (_, pipe) in zip(answers, chosen):
                if good:
                    pipe.send("all ranks are done")
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            raise JobFailed("\n".join(failed))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self.workers:
            pipe.close()
            process.terminate()
            process.join()
        self.workers = []


def _serve(pipe, backend) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, world, store = pipe.recv()
        except EOFError:
            return
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        if answer[0]:
            # A rank that closes its connections while another still makes its own would break that one's.
            pipe.send(answer)
            pipe.recv()
            dist.destroy_process_group()
        else:  # at once, so that ranks which wait for this one notice
            dist.destroy_process_group()
            pipe.send(answer)
