"""The sandbox server: a small process that owns all sandboxes of one provider.

One thread, one epoll loop: requests come in over a socket (protocol.py), commands run as child
processes (commands.py). It is separate from the provider's process because it locks itself into
namespaces of its own (isolation.py) and because starting programs from a process full of tensors is
slow. It ends, and everything in it with it, when its provider does.
"""

import collections
import contextlib
import os
import resource  # Also what os.wait4 loads on first use, when it would be out of reach.
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from headrace.sandbox import isolation, kernel, protocol, workfolder
from headrace.sandbox.commands import Command, family
from headrace.sandbox.launch import Launcher, make_launcher
from headrace.sandbox.protocol import Close, Done, Failed, Kill, Listing, Open, Run, Tree
from headrace.sandbox.types import EndReason

MOST_BOXES = 1024
MOST_RUNNING = 64
"""Commands alive at once; more wait, because each gets a share of the same cores."""
MOST_WAITING = 4096
LONGEST_WAIT_S = 60.0
"""Seconds a command may wait for its turn."""
_PARENT_CHECK_S = 2.0
_UNSENT_BYTES = 32 * 2**20
"""Replies not yet taken by the provider, above which no further request is read."""


class _Box:
    """One sandbox: its folder, its commands, and what waits for them to end."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.running: dict[int, Command] = {}
        self.when_idle: list[Callable[[], None]] = []


class Server:
    """The loop. `serve` returns when the provider is gone."""

    def __init__(
        self, channel: socket.socket, config: protocol.ServerConfig, launcher: Launcher
    ) -> None:
        self._channel = channel
        self._config = config
        self._launcher = launcher
        self._reader = protocol.FrameReader(protocol.largest_frame(config.limits))
        self._unsent = bytearray()
        self._boxes: dict[int, _Box] = {}
        self._running: dict[int, Command] = {}
        self._waiting: collections.OrderedDict[int, tuple[Run, float]] = collections.OrderedDict()
        self._handlers: dict[int, Callable[[], None]] = {}
        # Numbers given up while one batch of events is handled: later events of that batch that
        # carry them belong to what was closed, not to what may have the number now.
        self._unwatched: set[int] = set()
        self._epoll = select.epoll()
        self._epoll.register(channel, select.EPOLLIN)
        self._devnull = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._open = True

    def lock_in(self) -> None:
        """Leave the host, or, without isolation, at least root.

        Raises:
            isolation.IsolationError: see there.
        """
        kernel.adopt_orphans()
        if self._launcher.isolated:
            script = isolation.limits_script(
                self._config.limits, own_processes=self._launcher.own_processes
            )
            isolation.lock_in(script, self._config.parent_pid)
        else:
            isolation.drop_root()
        os.umask(0o022)
        # Commands get their own, much lower limit of open files.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def serve(self) -> None:
        """Answer requests until the provider closes its end or dies."""
        self._send(protocol.Ready())
        channel = self._channel.fileno()
        next_parent_check = time.monotonic() + _PARENT_CHECK_S
        while self._open:
            for fd, events in self._epoll.poll(self._wait_s(next_parent_check)):
                if fd == channel:
                    self._serve_channel(events)
                elif fd not in self._unwatched:
                    self._handlers[fd]()
            self._unwatched.clear()
            now = time.monotonic()
            if now >= next_parent_check:
                next_parent_check = now + _PARENT_CHECK_S
                self._open = self._open and self._parent_lives()
            self._check_commands(now)

    def _parent_lives(self) -> bool:
        """Without isolation there is no keeper to see to it; see isolation.lock_in."""
        return self._launcher.isolated or os.getppid() == self._config.parent_pid

    def _wait_s(self, next_parent_check: float) -> float:
        due = min((c.next_check for c in self._running.values()), default=next_parent_check)
        return max(0.0, min(due, next_parent_check) - time.monotonic())

    # --- the channel ---

    def _serve_channel(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            try:
                data = self._channel.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._open = False
                return
            for body in self._reader.feed(data):
                self._handle(protocol.decode_request(body))

    def _send(self, reply: protocol.Reply) -> None:
        self._unsent += protocol.frame(reply)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._channel.send(memoryview(self._unsent)[: 1 << 18])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._open = False
            return
        events = 0 if len(self._unsent) > _UNSENT_BYTES else select.EPOLLIN
        if self._unsent:
            events |= select.EPOLLOUT
        self._epoll.modify(self._channel, events)

    # --- requests ---

    def _handle(self, request: protocol.Request) -> None:
        if isinstance(request, Run):
            self._enqueue(request)
        elif isinstance(request, Kill):
            self._kill(request.run_id)
        elif isinstance(request, Tree):
            self._attempt(request.id, lambda: self._tree(request))
        elif isinstance(request, Open):
            self._when_idle(request.sandbox, lambda: self._open_box(request))
        else:
            self._when_idle(request.sandbox, lambda: self._close_box(request))

    def _attempt(self, request_id: int, work: Callable[[], protocol.Reply]) -> None:
        """Answer with what `work` returns, or with its failure."""
        try:
            reply = work()
        except (OSError, ValueError) as error:
            reply = Failed(request_id, str(error))
        self._send(reply)

    def _when_idle(self, number: int, work: Callable[[], None]) -> None:
        """Do `work` once nothing runs in sandbox `number`; what runs there is killed."""
        for run_id in [r for r, (run, _) in self._waiting.items() if run.sandbox == number]:
            self._kill(run_id)
        box = self._boxes.get(number)
        if box is None or not box.running:
            work()
            return
        box.when_idle.append(work)
        for command in box.running.values():
            command.end(EndReason.TIME)

    def _open_box(self, request: Open) -> None:
        self._attempt(request.id, lambda: self._make_box(request))

    def _make_box(self, request: Open) -> Done:
        number = request.sandbox
        limits = self._config.limits
        self._remove_box(number)
        if len(self._boxes) >= MOST_BOXES:
            raise OSError(f"{MOST_BOXES} sandboxes are open already")
        folder = isolation.box_folder(number, self._config.workshop)
        isolation.make_box(
            folder, limits, isolated=self._launcher.isolated, own_root=self._launcher.own_root
        )
        self._boxes[number] = _Box(folder)
        try:
            workfolder.write_tree(f"{folder}/work", request.files)
        except BaseException:
            self._remove_box(number)
            raise
        return Done(request.id)

    def _close_box(self, request: Close) -> None:
        def work() -> Done:
            self._remove_box(request.sandbox)
            return Done(request.id)

        self._attempt(request.id, work)

    def _remove_box(self, number: int) -> None:
        box = self._boxes.pop(number, None)
        if box is not None:
            isolation.remove_box(box.folder, isolated=self._launcher.isolated)

    def _tree(self, request: Tree) -> Listing:
        files = workfolder.read_tree(
            f"{self._box(request.sandbox).folder}/work",
            most_bytes=self._config.limits.disk_mb * 2**20,
        )
        return Listing(request.id, files)

    def _box(self, number: int) -> _Box:
        box = self._boxes.get(number)
        if box is None:
            raise ValueError(f"sandbox {number} is not open")
        return box

    # --- commands ---

    def _enqueue(self, request: Run) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._send(Failed(request.id, f"{MOST_WAITING} commands are waiting already"))
            return
        self._waiting[request.id] = (request, time.monotonic() + LONGEST_WAIT_S)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < MOST_RUNNING:
            _, (request, _) = self._waiting.popitem(last=False)
            try:
                self._start(request, self._box(request.sandbox))
            except (OSError, ValueError) as error:
                self._send(Failed(request.id, str(error)))

    def _start(self, request: Run, box: _Box) -> None:
        command = Command(request, box.folder, self._launcher, self._config.limits, self._devnull)
        box.running[command.id] = command
        self._running[command.id] = command

        def leader_ended() -> None:
            self._unwatch(command.pid_fd)
            command.leader_ended()
            if command.orphan_fd >= 0:
                self._watch(command.orphan_fd, orphan_ended)
            self._settle(command)

        def orphan_ended() -> None:
            self._unwatch(command.orphan_fd)
            command.orphan_ended()
            self._settle(command)

        def readable() -> None:
            if not command.readable():
                self._unwatch(command.output_fd)

        self._watch(command.pid_fd, leader_ended)
        self._watch(command.output_fd, readable)

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            self._unwatched.add(fd)

    def _settle(self, command: Command) -> None:
        """If `command` is over: answer, and go on with what waited for it."""
        if not command.finished:
            return
        self._unwatch(command.output_fd)
        command.release()
        del self._running[command.id]
        box = self._boxes[command.sandbox]
        del box.running[command.id]
        self._send(command.reply())
        if not box.running:
            works, box.when_idle = box.when_idle, []
            for work in works:
                work()
        self._start_waiting()

    def _kill(self, run_id: int) -> None:
        if self._waiting.pop(run_id, None) is not None:
            self._send(Failed(run_id, "ended before its turn came"))
        elif run_id in self._running:
            self._running[run_id].end(EndReason.TIME)

    def _check_commands(self, now: float) -> None:
        for command in list(self._running.values()):
            if now >= command.next_check:
                command.check(now)
        while self._waiting:
            run_id, (_, last) = next(iter(self._waiting.items()))
            if now < last:
                break
            del self._waiting[run_id]
            self._send(Failed(run_id, f"no turn within {LONGEST_WAIT_S:.0f} s: too many commands"))


def main() -> None:
    """Run a server: arguments are the number of the socket's descriptor and the configuration."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    config = msgspec.json.decode(sys.argv[2], type=protocol.ServerConfig)
    try:
        limits_file = ""
        if config.workshop:
            limits_file = f"{config.workshop}/limits.sh"
        launcher = make_launcher(config.kind, limits_file)
        server = Server(channel, config, launcher)
        server.lock_in()
    except (isolation.IsolationError, OSError) as error:
        channel.sendall(protocol.frame(Failed(0, str(error))))
        return
    channel.setblocking(False)
    try:
        server.serve()
    finally:
        # In namespaces the kernel does all this.
        if config.workshop:
            for pid in family(os.getpid())[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                isolation.remove_box(config.workshop, isolated=False)
