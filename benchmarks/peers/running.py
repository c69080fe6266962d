"""A subject on all hosts. Its processes stay in memory, and are stopped between their turns."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path

ROOT = Path(__file__).parents[2]
NETLAB = ROOT / "benchmarks" / "netlab"


class Running:
    """One subject, built and warmed up. `answer` says that it is ready, or why it cannot run.

    Packages are imported from `checkout` if it is given, and else from this checkout.
    """

    def __init__(self, ask: dict, port: int, timeout: int, checkout: Path | None = None) -> None:
        self.timeout, self.log = timeout, tempfile.TemporaryFile()  # noqa: SIM115 (open while the subject runs)
        self.ranks: list[Connection] = []
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "MASTER_PORT": str(port)}
        environment["PYTHONPATH"] = os.pathsep.join(str(root) for root in (checkout, ROOT) if root)
        with (
            tempfile.TemporaryDirectory() as folder,
            Listener(f"{folder}/runner", "AF_UNIX") as listener,
        ):
            python = [sys.executable, "-P", "-W", "ignore"]
            command = [NETLAB, "run", *python, "-m", "benchmarks.peers.rank", listener.address]
            streams = {"stdout": self.log, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True, **streams
            )
            with contextlib.suppress(TimeoutError, EOFError), _at_most(timeout):
                connections = {
                    (rank := listener.accept()).recv(): rank for _ in range(ask["ranks"])
                }
                self.ranks = [connections[k] for k in range(ask["ranks"])]
        self.answer = self.turn(ask)

    def turn(self, word: object = "go on") -> dict:
        """Let the processes run until all ranks have answered.

        Returns: rank 0's answer, with the mean loss of all ranks and the seconds of each step on its slowest rank; or
        the error of a rank that failed.
        """
        answers = [] if self.ranks else [{"failed": "its processes did not start"}]
        self._signal(signal.SIGCONT)
        try:
            with _at_most(self.timeout):
                for rank in self.ranks:
                    rank.send(word)
                for rank in self.ranks:
                    answers.append(rank.recv())
                    if _is_bad(answers[-1]):
                        break
        except TimeoutError:
            answers.append({"failed": f"not done in {self.timeout} s"})
        except (EOFError, ConnectionError):
            answers.append({"failed": "a rank died without an error"})
        self._signal(signal.SIGSTOP)
        if _is_bad(answers[-1]):
            self.stop()
            if "failed" in answers[-1]:
                self.log.seek(0)
                print(self.log.read().decode(errors="replace")[-2000:])
            return answers[-1]
        if "losses" not in answers[0]:
            return answers[0]
        losses, seconds = (zip(*(a[key] for a in answers)) for key in ("losses", "seconds"))
        return answers[0] | {
            "losses": [sum(e) / len(e) for e in losses],
            "seconds": [max(e) for e in seconds],
        }

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        self.process.terminate()  # netlab then ends the processes that it started
        self.process.wait()

    def _signal(self, which: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, which)


def _is_bad(answer: dict) -> bool:
    return "failed" in answer or "skipped" in answer


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
