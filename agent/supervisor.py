"""Runs the agent's child processes: one per loaded stage and one per gateway.

What happens to a child is decided by :class:`agent.child_machine.ChildMachine`. Here threads read its pipes and hand
what they read to the event loop; all state is touched in the loop only.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Generic, TypeVar

import msgspec
import psutil

from agent.child_machine import ChildMachine, ChildState, CloseInput, Instruction, Kill, Spawn, Terminate
from fleet.child_process import describe_exit, start_child
from fleet.process import ChildStatus

LOG_TAIL_LINES = 40
LOG_LINE_BYTES = 500
MAX_STATUS_BYTES = 16 << 10
LOG_JOIN_S = 1.0

Key = TypeVar("Key")
_log = logging.getLogger("paceline.agent.children")


@dataclass(frozen=True)
class ChildSpec:
    """What to run. ``configuration`` makes the child's JSON line from the ports that it shall take (0: any)."""

    label: str
    """Names the child in the log, such as ``stage 1 of SmolLM2``."""
    module: str
    configuration: Callable[[int, int], bytes]
    port: int | None = None
    """The port it had before the agent itself was started again."""
    http_port: int | None = None


@dataclass(frozen=True)
class ChildView:
    """A child at one moment."""

    state: ChildState
    detail: str
    port: int | None
    http_port: int | None
    loaded: str
    restarts: int
    memory_bytes: int
    process_id: int | None


class Supervisor(Generic[Key]):
    """Children by key. All methods belong into the event loop.

    Args:
        on_change: called in the loop after every change of a child, with its key.
        start: starts the process of a module; replaced in tests.
    """

    def __init__(
        self,
        on_change: Callable[[Key], None],
        start: Callable[[str], subprocess.Popen[bytes]] = start_child,
    ) -> None:
        self._on_change = on_change
        self._start = start
        self._children: dict[Key, _Child] = {}

    def start(self, key: Key, spec: ChildSpec) -> None:
        """Run a child; without effect if it is there already and has not failed or stopped."""
        there = self._children.get(key)
        if there is not None and not there.machine.finished:
            return
        child = _Child(spec, self._start, lambda: self._changed(key))
        self._children[key] = child
        child.begin()

    def view(self, key: Key) -> ChildView | None:
        """The child as it is now; None if it was never started, or was stopped."""
        child = self._children.get(key)
        return None if child is None else child.view()

    @property
    def children(self) -> tuple[Key, ...]:
        """The keys of all children that are not stopped."""
        return tuple(self._children)

    async def stop(self, key: Key) -> None:
        """End a child and wait until it is gone; it is forgotten then."""
        child = self._children.get(key)
        if child is None:
            return
        await child.end()
        if self._children.get(key) is child:
            del self._children[key]
            self._on_change(key)

    async def close(self) -> None:
        """End all children, side by side."""
        await asyncio.gather(*(self.stop(key) for key in self.children))

    def _changed(self, key: Key) -> None:
        if key in self._children:
            self._on_change(key)


class _Child:
    """One child: its machine, and its process while it runs."""

    def __init__(
        self, spec: ChildSpec, start: Callable[[str], subprocess.Popen[bytes]], on_change: Callable[[], None]
    ) -> None:
        self.machine = ChildMachine(spec.port, spec.http_port)
        self._spec = spec
        self._start = start
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._last_line = ""

    def begin(self) -> None:
        self._carry_out(self.machine.start(self._loop.time()))

    async def end(self) -> None:
        self._carry_out(self.machine.stop(self._loop.time()))
        await self._gone.wait()

    def view(self) -> ChildView:
        machine = self.machine
        process = self._process
        memory_bytes = 0
        if process is not None:
            with contextlib.suppress(psutil.Error):
                memory_bytes = int(psutil.Process(process.pid).memory_info().rss)
        return ChildView(
            machine.state,
            machine.detail,
            machine.port,
            machine.http_port,
            machine.loaded,
            machine.restarts,
            memory_bytes,
            None if process is None else process.pid,
        )

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Spawn():
                    self._spawn(instruction)
                case CloseInput():
                    self._close_input()
                case Terminate() if self._process is not None:
                    _log.warning("%s does not end by itself", self._spec.label)
                    self._process.terminate()
                case Kill() if self._process is not None:
                    self._process.kill()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.machine.wake_at is not None:
            self._timer = self._loop.call_at(self.machine.wake_at, self._tick)
        if self.machine.finished:
            self._gone.set()
        self._on_change()

    def _tick(self) -> None:
        self._timer = None
        # The loop may wake a timer a clock tick early.
        self._carry_out(self.machine.tick(max(self._loop.time(), self.machine.wake_at or 0.0)))

    def _spawn(self, spawn: Spawn) -> None:
        self._last_line = ""
        try:
            process = self._start(self._spec.module)
        except OSError as error:
            # As an event of its own, so that a machine that answers with a timer is not called from within itself.
            why = f"the process cannot be started: {error.strerror}"
            self._loop.call_soon(lambda: self._carry_out(self.machine.not_started(why, self._loop.time())))
            return
        self._process = process
        configuration = self._spec.configuration(spawn.port or 0, spawn.http_port or 0)
        _log.info("%s started as process %d", self._spec.label, process.pid)
        threading.Thread(
            target=self._attend, args=(process, configuration), name=f"child-{process.pid}", daemon=True
        ).start()

    def _close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            # In a thread: closing waits for a write that is under way, and a child that hangs does not read.
            threading.Thread(target=_close_quietly, args=(self._process.stdin,), name="child-stop", daemon=True).start()

    def _attend(self, process: subprocess.Popen[bytes], configuration: bytes) -> None:
        """In a thread: write the configuration, read status lines, wait for the end."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        tail: collections.deque[str] = collections.deque(maxlen=LOG_TAIL_LINES)
        log_reader = threading.Thread(
            target=self._read_log, args=(process, tail), name=f"child-{process.pid}-log", daemon=True
        )
        log_reader.start()
        with contextlib.suppress(OSError, ValueError):  # it died, or was stopped, before it had read all
            process.stdin.write(configuration + b"\n")
            process.stdin.flush()
        decoder = msgspec.json.Decoder(ChildStatus)
        while line := process.stdout.readline(MAX_STATUS_BYTES):
            try:
                status = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # a driver may print to standard output
            self._post(lambda status=status: self._status(process, status))  # type: ignore[misc]
        code = process.wait()
        log_reader.join(LOG_JOIN_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            _close_quietly(stream)
        last_lines = [line for line in tail if line.strip()]
        self._post(lambda: self._exited(process, code, last_lines))

    def _read_log(self, process: subprocess.Popen[bytes], tail: collections.deque[str]) -> None:
        assert process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while line := process.stderr.readline(LOG_LINE_BYTES):
                text = line.decode(errors="replace").rstrip()
                tail.append(text)
                _log.debug("%s: %s", self._spec.label, text)

    def _post(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            self._loop.call_soon_threadsafe(callback)

    def _status(self, process: subprocess.Popen[bytes], status: ChildStatus) -> None:
        if process is self._process:
            self._carry_out(self.machine.status(status, self._loop.time()))

    def _exited(self, process: subprocess.Popen[bytes], code: int, last_lines: list[str]) -> None:
        if process is not self._process:
            return
        self._process = None
        why = describe_exit(code)
        if self.machine.state not in ("stopping", "stopped"):
            _log.warning("%s: %s; the end of its log:\n%s", self._spec.label, why, "\n".join(last_lines))
        if last_lines:
            why = f"{why} (its last words: {last_lines[-1]})"
        self._carry_out(self.machine.exited(why, self._loop.time()))


def _close_quietly(stream: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # what is left in its buffer has no reader any more
        stream.close()
