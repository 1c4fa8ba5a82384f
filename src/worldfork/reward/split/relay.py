"""Between the tests' fork and the candidate's: every frame is looked at here, and nothing else passes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
from collections.abc import Mapping
from typing import Any

from worldfork.core.clock import Clock
from worldfork.core.errors import OutOfSpace, SandboxDied, SandboxError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.reward.arguments import WALL_FACTOR
from worldfork.reward.blame import Looks, is_most, look_until
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.split.frames import VALUE_MODULES, Frame, FrameStream, new_token, program_argument, program_input
from worldfork.reward.split.use import Use, sandbox_use
from worldfork.reward.split.values import FROM_TESTS_ONLY, Malformed, scan

MAX_CANDIDATE_BYTES = 64 << 20
"""What a candidate may answer in one grading, in bytes."""
MAX_CANDIDATE_FRAMES = 200_000
MAX_STARTS = 500
"""Processes of a candidate in one grading: each that ends is followed by another, so that other tests go on."""
MAX_REPORT_BYTES = 16 << 20

_FIRST_LOOK_S = 0.25
_LATER_LOOKS_S = 1.0
_SHORT_S = 0.25
_END_S = 20.0


class CandidateFailed(Exception):
    """A call cannot be answered, and that is the candidate's doing."""


class Candidate:
    """The candidate's side: one process at a time, in a sandbox of its own."""

    def __init__(self, sandbox: AsyncSandbox, env: Mapping[str, str], cpu_s: float) -> None:
        self._sandbox = sandbox
        self._env = env
        self._left_cpu_s = cpu_s
        self._stream: FrameStream | None = None
        self._starts = self._frames = self._bytes = 0
        self._gone = ""
        self.cpu_s = 0.0
        self.looks = Looks()
        self._tests: AsyncSandbox | None = None

    async def begin(self) -> None:
        """Start its process ahead of the first call; what stands in the way is told then."""
        with contextlib.suppress(CandidateFailed, SandboxDied, BrokenPipeError):
            await self._start()

    async def exchange(self, kind: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Send a frame and return the kind and body of its answer, which is one well-formed value.

        Raises:
            CandidateFailed: it gave none.
        """
        try:
            stream = self._stream or await self._start()
            token = new_token()
            await stream.send(Frame(kind, token, body))
            answer = await stream.next()
            if answer is None:
                raise CandidateFailed("the candidate's process ended in a call")
            self._check(answer, token, stream)
        except (SandboxDied, OutOfSpace) as error:
            if isinstance(error, OutOfSpace) and error.scope != "sandbox":
                raise
            self._stream, self._gone = None, "the candidate's sandbox is gone"
            raise CandidateFailed(self._gone) from None
        except (CandidateFailed, Malformed, BrokenPipeError) as error:
            await self.end()
            raise CandidateFailed(str(error)) from None
        return answer.kind, answer.body

    def _check(self, answer: Frame, token: bytes, stream: FrameStream) -> None:
        self._frames += 1
        if self._bytes + stream.received_bytes > MAX_CANDIDATE_BYTES or self._frames > MAX_CANDIDATE_FRAMES:
            self._gone = "the candidate answered more than a grading may bring"
            raise CandidateFailed(self._gone)
        if answer.token != token or answer.kind not in (b"R", b"E", b"K"):
            raise CandidateFailed("the candidate answered what nobody asked")
        scan(answer.body, 0, FROM_TESTS_ONLY)

    async def _start(self) -> FrameStream:
        if not self._gone and (self._starts >= MAX_STARTS or self._left_cpu_s <= 0):
            self._gone = "the candidate used up its CPU time"
        if self._gone:
            raise CandidateFailed(self._gone)
        self._starts += 1
        cpu_s = math.ceil(self._left_cpu_s)
        process = await self._sandbox.stream(
            ["python", "-B", "-s", "-c", program_argument()],
            env=self._env,
            working_dir=TASK_DIRECTORY,
            stdin=True,
            rlimits=((resource.RLIMIT_CPU, cpu_s, cpu_s + 1), (resource.RLIMIT_CORE, 0, 0)),
        )
        stream = FrameStream(process)
        self._stream = stream
        await process.write_stdin(candidate_program())
        return stream

    async def end(self) -> None:
        """End its process; the next call is made to another one."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        self._bytes += stream.received_bytes
        # Until it is gone, and not for ever: with everything in it stopped or dying that takes its time.
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_END_S):
                stream.process.kill()
                async for _ in stream.process:
                    pass
                result = await stream.process.wait()
            self.cpu_s += result.cpu_s
            self._left_cpu_s -= result.cpu_s

    async def watch(self, tests: AsyncSandbox, wall_s: float, clock: Clock, part_wall_s: float | None) -> None:
        """Look at its sandbox, and at that of the tests it takes turns with, until some time is over."""
        self._tests, self.looks = tests, Looks(clock)
        await look_until((self._sandbox, tests), wall_s, self.looks, clock, part_wall_s)

    async def is_starved(self, use: Use, before: Use, since_s: float, wall_s: float) -> bool:
        """Whether for the most part of some time others had the CPU that it, or the tests, wanted.

        Args:
            use, before: its use of the CPU now, and when that time began.
            since_s: when it began at the earliest, on the clock.
            wall_s: how long it is.
        """
        if self._tests is not None:
            await self.looks.count(self._sandbox, self._tests)
        if not self.looks.counted:
            return use.is_starved(before, wall_s)
        return is_most(await in_thread(self.looks.missed_s, wall_s, since_s), wall_s)

    async def use(self) -> Use:
        """Return how its process has used the CPU; zeros where there is none."""
        if self._stream is None:
            return Use()
        return await sandbox_use(self._sandbox, self._stream.process.pid)


class Relay:
    """Passes on calls and answers until the tests are over."""

    def __init__(self, tests: FrameStream, candidate: Candidate, test_cpu_s: float | None, clock: Clock) -> None:
        self._tests = tests
        self._candidate = candidate
        self._every_cpu_s = self._test_cpu_s = test_cpu_s
        self._clock = clock
        self._asked_s = self._began_s = 0.0
        self._held_s = 0.0
        self._before: Use | None = None
        self._next_look_s = math.inf
        self._coming: asyncio.Future[Frame | None]
        self.lines: list[bytes] = []
        self._lines_bytes = 0

    async def run(self) -> None:
        """Serve the tests' process until it has ended.

        Raises:
            Malformed: it wrote what it never writes, or more than it may report. SandboxDied: its sandbox is gone.
        """
        self._coming = asyncio.ensure_future(self._tests.next())
        try:
            while (frame := await self._coming) is not None:
                self._coming = asyncio.ensure_future(self._tests.next())
                if self._is_told(frame):
                    continue
                if frame.kind == b"A":
                    await self._candidate.end()
                    await self._tell(Frame(b"A", frame.token, b""))
                elif frame.kind in (b"C", b"V", b"W"):
                    await self._pass_on(frame)
                else:
                    raise Malformed("the tests' side sent what it never sends")
        finally:
            await _settle(self._coming)

    def _is_told(self, frame: Frame) -> bool:
        """Take a frame that nobody waits for the answer of; returns whether it is one."""
        if frame.kind == b"J":
            self._keep(frame.body)
        elif frame.kind == b"B":
            self._begin_test(frame.body)
        else:
            return False
        return True

    def _gave_up(self) -> bool:
        """Whether what has come from the tests ends their wait; what a thread beside the call tells does not."""
        frame = self._coming.result()
        if frame is None or not self._is_told(frame):
            return True
        self._coming = asyncio.ensure_future(self._tests.next())
        return False

    def _keep(self, line: bytes) -> None:
        self._lines_bytes += len(line)
        if self._lines_bytes > MAX_REPORT_BYTES:
            raise Malformed("more reports than tests can make")
        self.lines.append(line)

    def _begin_test(self, own_cpu_s: bytes) -> None:
        """Start the candidate's clock; a test may have a limit of its own."""
        self._test_cpu_s = float(own_cpu_s) if own_cpu_s else self._every_cpu_s
        self._held_s, self._before = 0.0, None
        self._began_s = self._clock.monotonic_s()
        looks = self._test_cpu_s is not None
        self._next_look_s = self._clock.monotonic_s() + _FIRST_LOOK_S if looks else math.inf

    async def _pass_on(self, frame: Frame) -> None:
        """Have one frame answered, unless the tests give up waiting or the candidate's time is over."""
        self._asked_s = self._clock.monotonic_s()
        asked = asyncio.ensure_future(self._candidate.exchange(frame.kind, frame.body))
        try:
            while not asked.done():
                left_s = max(0.0, self._next_look_s - self._clock.monotonic_s())
                timeout_s = None if math.isinf(left_s) else left_s
                await asyncio.wait((asked, self._coming), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    break
                if self._coming.done():
                    if self._gave_up():
                        return
                    continue
                why = await self._overrun()
                if why and not asked.done():
                    await _settle(asked)
                    await self._candidate.end()
                    await self._tell(Frame(b"X", frame.token, why.encode()))
                    return
            try:
                kind, body = asked.result()
            except CandidateFailed as error:
                kind, body = b"X", str(error).encode("utf-8", "replace")
            await self._tell(Frame(kind, frame.token, body))
        finally:
            await _settle(asked)
            self._held_s += self._holding_s()

    def _holding_s(self) -> float:
        """Return how long the call at hand takes. Short ones count nothing: their time is the way to and fro."""
        return max(0.0, self._clock.monotonic_s() - self._asked_s - _SHORT_S)

    async def _tell(self, frame: Frame) -> None:
        # Tests that are over read no more; their end is seen where their frames are read.
        with contextlib.suppress(BrokenPipeError):
            await self._tests.send(frame)

    async def _overrun(self) -> str:
        """Say why the present test's candidate has to be ended, if it has."""
        now_s = self._clock.monotonic_s()
        if self._test_cpu_s is None or now_s < self._next_look_s:
            return ""
        try:
            use = await self._candidate.use()
        except (SandboxDied, OutOfSpace):
            # What waits for the answer meets that too.
            return ""
        except SandboxError:
            # Processes inside that kill whoever looks win nothing but the limits that hold in any case.
            self._next_look_s = now_s + _LATER_LOOKS_S
            return ""
        if self._before is None or use.cpu_s < self._before.cpu_s:
            self._before = use
        cpu_s = use.cpu_s - self._before.cpu_s
        wall_s = self._held_s + self._holding_s()
        self._next_look_s = now_s + min(_LATER_LOOKS_S, max(_FIRST_LOOK_S, self._test_cpu_s - cpu_s))
        if cpu_s >= self._test_cpu_s:
            return f"the candidate used more than {self._test_cpu_s:g} s of CPU time"
        late = wall_s >= WALL_FACTOR * self._test_cpu_s
        if late and not await self._candidate.is_starved(use, self._before, self._began_s, wall_s):
            # One that had no CPU goes on to its limit in CPU seconds, or to the wall limit of the whole grading.
            return f"the candidate did not answer within {wall_s:.0f} s"
        return ""


def read_shapes(lines: list[bytes]) -> tuple[dict[str, list[str]], list[str]]:
    """Return where objects stood, and why tests failed apart from what they assert, as the tests' side told it."""
    for line in reversed(lines):
        facts: Any = json.loads(line)
        if "shapes" in facts:
            return facts["shapes"], facts["notes"]
    return {}, []


async def _settle(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def candidate_program() -> bytes:
    """Return what the first lines of the candidate's program read."""
    return program_input(*VALUE_MODULES, "worldfork.reward.split.likeness", "worldfork.reward.split.candidate")
