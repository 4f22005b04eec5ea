"""People hear of what needs them, wherever they are: an approval that is asked, a saga that was escalated or is stuck.

A follower looks at the same queue that `amends inbox` shows, after what put something there is durable, never from
inside a commit and never on the thread of an agent's work. Every process that asks has one, and so has the daemon; a
fact claims each message before it goes out (notices.py), so that each is told once per device whoever comes first. A
channel that fails is tried again a few times and is no reason to approve, to refuse or to fail anything.

The thread lives while something is to be told, or to be tried again; with no channel in config.toml there is none.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..store.errors import AmendsError, Closed
from ..store.evidence import DatabaseError
from ..store.log import FILED
from .channels import EVENTS, GRACE_S, WEBHOOKS, Channel, Message, send, unready
from .config_file import BadConfig, Config, current
from .drift import DRIFT
from .gate.approvals import left_ms
from .gate.limits import span
from .inbox import Item, commands, queue
from .notices import Address, Claim, outcome
from .openings import blob_at, known_as, raw_fields, when
from .plain import plain
from .report import REASONS
from .step import WAITING
from .story import step_fields
from .stuck import patience

if TYPE_CHECKING:
    from .kit import AgentKit
    from .state import State

LOOK_S = 60.0
"""Seconds between looks for what no record announces: a saga that is stuck."""
MOVED_S = 0.05
"""Seconds until another look where the agent's own threads changed what was looked at; each time twice as many."""
MOVED_MAX = 6
"""Looks in a row that fail so before it is said: by then it is no chance meeting."""
LEAVE_S = 3.0
"""Seconds that the end of a process waits for messages that are on their way."""
CUT_S = 1.0
"""Seconds after that in which programs that still run are ended, and that is recorded."""
LEFT_TO_OTHERS_S = 30.0
"""Seconds that a process which lacks a channel's secret leaves its messages to others before it says so."""
CLAIM_S = 10.0
"""Beside its channel's deadline, a claim holds for so long."""
NAMES_LEVEL = frozenset({"approval"})
OUTLIVE = frozenset({"review", DRIFT})
"""Kinds of items that are about a saga which may be over."""


_AS_BEFORE = "Until it is corrected, messages go where they went before."
_NOBODY = "Nobody is told from here until it is corrected."


class Due(NamedTuple):
    """One message to be sent now, or in so many seconds."""

    item: Item
    channel: Channel
    level: int
    in_s: float

    @property
    def place(self) -> tuple[str, str, int]:
        return self.item.id, self.channel.name, self.level


def event_of(kind: str) -> str:
    """What channels call an item of this kind."""
    if kind in REASONS:
        return "escalated"
    return "keys" if kind.startswith("key") else kind if kind in EVENTS else "other"


class Follower:
    """Tells people what the queue holds, on threads of its own. One per kit; safe to nudge from any thread."""

    def __init__(self, kit: AgentKit, say: Callable[[str], None] | None = None) -> None:
        self._kit = kit
        self._say = say or (lambda text: sys.stderr.write(f"amends: {text}\n") and None)
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = self._stopped = False
        self._busy: set[str] = set()  # channels with a message on its way
        self._seen: dict[tuple[str, str, int], float] = {}  # messages left to others, and since when
        self._config, self._trouble = Config(), ""
        self._news, self._again, self._waiting = -1, 0.0, False
        self._programs: set[threading.Thread] = set()  # that wait for a program of a channel
        self._moved = 0  # looks in a row under which the fold moved

    # -- from other threads -------------------------------------------------------------------------------------------

    def nudge(self) -> None:
        """Something may need a person: look. Returns at once."""
        if self._nothing_new() or not self.channels():
            return
        with self._lock:
            self._woken.set()
            if self._thread is None and not self._ending:
                self._thread = threading.Thread(target=self._run, name="amends-follow", daemon=True)
                self._thread.start()

    def _nothing_new(self) -> bool:
        return self._kit.engine.state.notices.news == self._news and time.monotonic() < self._again

    def channels(self) -> tuple[Channel, ...]:
        """The channels of config.toml as it is now; of a broken file those it had before."""
        if self._kit.home is None:
            return self._config.channels
        try:
            self._config, self._trouble = current(self._kit.home.config), ""
        except BadConfig as bad:
            if bad.message != self._trouble:
                self._trouble = bad.message
                before = self._config.channels
                self._say(f"{bad.message} {_AS_BEFORE if before else _NOBODY}")
        return self._config.channels

    def close(self, seconds: float = LEAVE_S) -> None:
        """Send what is due and wait for it, but not for long: what is cut off, another process sends again."""
        with self._lock:
            self._ending, thread = True, self._thread
        if thread is not None:
            self._woken.set()
            thread.join(seconds)
        self._stopped = True
        self._woken.set()
        until = time.monotonic() + CUT_S
        for waits in list(self._programs):  # they end their programs: a child of ours does not outlive us
            waits.join(max(0.0, until - time.monotonic()))

    # -- on its own thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Until nothing is left to tell, or to try again."""
        try:
            self._follow()
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _follow(self) -> None:
        while not self._stopped:
            self._woken.clear()
            wait = self._turn()
            with self._lock:
                idle = not self._waiting or self._ending
                if not self._busy and idle and not self._woken.is_set():
                    self._thread = None  # under the lock: who nudges from here on starts another
                    return
            self._woken.wait(wait)

    def _turn(self) -> float:
        try:
            return self._look()
        except (KeyError, RuntimeError) as error:  # the fold moved on under our feet, as other threads committed
            return self._once_more(error)
        except Closed:
            self._stopped = True
        except (AmendsError, DatabaseError) as error:  # a log that is held, a full disk: said, and tried again
            self._say(f"nobody can be told just now: {error}")
            self._news, self._again = self._kit.engine.state.notices.news, time.monotonic() + LOOK_S
        return LOOK_S

    def _once_more(self, error: Exception) -> float:
        """Soon, and later each time: what lasts is a bug of ours, and is said once."""
        self._moved += 1
        if self._moved == MOVED_MAX:
            self._say(f"nobody can be told just now, which is a bug of amends: {type(error).__name__}: {error}")
        wait = min(LOOK_S, MOVED_S * 2.0 ** (self._moved - 1)) if self._moved < 32 else LOOK_S
        self._again, self._waiting = time.monotonic() + wait, True
        return wait

    def _look(self) -> float:
        """Start what is due; seconds until something else will be."""
        kit = self._kit
        kit.log.refresh()
        now = time.monotonic()
        if self._nothing_new() and not self._ending:
            return self._again - now
        news, soonest = kit.engine.state.notices.news, min(LOOK_S, max(1.0, patience(kit) or LOOK_S))
        waiting = list(self.due(self.channels()))
        self._seen = {due.place: self._seen.get(due.place, now) for due in waiting}
        for due in waiting:
            if due.in_s <= 0 and self._left_to_others(due, now):
                soonest = min(soonest, self._seen[due.place] + LEFT_TO_OTHERS_S - now)
            elif due.in_s <= 0:
                self._start(due)
            else:
                soonest = min(soonest, due.in_s)
        self._news, self._again, self._waiting, self._moved = news, now + soonest, bool(waiting), 0
        return soonest

    def due(self, channels: Iterable[Channel]) -> Iterator[Due]:
        """Every message that is not told yet."""
        kit = self._kit
        channels = tuple(channels)
        items = queue(kit) if channels else []
        now = kit.log.now()
        for item in items:
            reached = levels(kit, item)
            for channel in channels:
                level = meant(channel, event_of(item.kind), reached)
                if level is None:
                    continue
                in_ms = kit.engine.state.notices.due_in(item.id, channel.name, level, now)
                if in_ms is not None:
                    yield Due(item, channel, level, in_ms / 1000)

    def _left_to_others(self, due: Due, now: float) -> bool:
        return bool(unready(due.channel)) and now < self._seen[due.place] + LEFT_TO_OTHERS_S

    def _start(self, due: Due) -> None:
        """One message at a time through a channel: a slow one holds up no other."""
        name = due.channel.name
        if name in self._busy or self._stopped:
            return
        self._busy.add(name)
        thread = threading.Thread(target=self._tell, args=(due,), name=f"amends-tell-{name}", daemon=True)
        if due.channel.kind not in WEBHOOKS:
            self._programs.add(thread)
        thread.start()

    def _tell(self, due: Due) -> None:
        try:
            tell(self._kit, due, lambda: self._stopped)
        except (AmendsError, DatabaseError) as error:
            if not isinstance(error, Closed):
                self._say(f"what became of a message through {due.channel.name} is not recorded: {error}")
        finally:
            self._programs.discard(threading.current_thread())
            self._busy.discard(due.channel.name)
            self._again = 0.0
            self._woken.set()


def tell(kit: AgentKit, due: Due, leaving: Callable[[], bool] = lambda: False) -> str | None:
    """Claim a message and send it; "" or why it could not be sent, None if somebody else has it. leaving() says that
    this process ends. Raises what the log raises."""
    address = address_of(due)
    within_ms = int((due.channel.timeout_s + GRACE_S + CLAIM_S) * 1000)
    claim = Claim(address, within_ms, lambda state: still(state, due.item))
    kit.log.commit(claim, FILED)
    if not claim.attempt:
        return None
    why = unready(due.channel) or send(due.channel, message(kit, due), leaving)
    kit.log.commit(outcome(address, claim.attempt, why), FILED)
    return why


def address_of(due: Due) -> Address:
    """A message as the log knows it. A review and a drift outlive their saga, and end with a record of their own."""
    item = due.item
    of = "" if item.saga is None or item.kind in OUTLIVE else item.saga.id
    return Address(item.id, due.channel.name, due.level, of, item.step.number if item.step and of else 0, item.seq)


def still(state: State, item: Item) -> bool:
    """Whether an item, seen a moment ago, is still one."""
    if item.kind == DRIFT:
        return any(one.seq == item.seq for one in state.drifts.open)
    if item.saga is None or item.kind == "review":
        return True
    saga = state.sagas.get(item.saga.id)
    step = saga.steps.get(item.step.number) if saga and item.step else None
    if item.kind == "approval":
        return step is not None and step.state == WAITING and step.asked_seq == item.seq
    if item.kind in REASONS:
        return saga is not None and (item.step.number if item.step else 0) in saga.escalated
    return saga is not None


# ---- who hears of what ----------------------------------------------------------------------------------------------

Levels = tuple[tuple[int, tuple[str, ...]], ...]
"""The levels of escalation that an item has reached, each with the targets it names."""


def levels(kit: AgentKit, item: Item) -> Levels:
    """How far up an item has gone. Level 0 is where everything begins, and names nobody in particular."""
    raised = kit.engine.state.notices.raised.get(item.asked.request, ()) if item.asked else ()
    return ((0, ()), *((level, _targets(kit, seq)) for level, seq in list(raised)))


def _targets(kit: AgentKit, seq: int) -> tuple[str, ...]:
    raw = raw_fields(blob_at(kit.log, seq)).get("targets")
    return tuple(map(str, msgspec.json.decode(raw))) if raw else ()


def meant(channel: Channel, event: str, reached: Levels) -> int | None:
    """The highest level at which this channel is to hear of an item; None if it is not."""
    if channel.events and event not in channel.events:
        return None
    if event not in NAMES_LEVEL:
        return 0
    return max((level for level, targets in reached if _named(channel, targets)), default=None)


def _named(channel: Channel, targets: tuple[str, ...]) -> bool:
    """A level without targets is for the channels without; a target is one of a channel's, or its name."""
    return bool({channel.name, *channel.targets} & set(targets)) if targets else not channel.targets


# ---- what they hear -------------------------------------------------------------------------------------------------


def message(kit: AgentKit, due: Due) -> Message:
    """What is said of an item: who, where, what to run next; arguments only if the channel asks for them."""
    item = due.item
    saga = known_as(kit.log, item.saga.id) if item.saga else ""
    return Message(
        event=event_of(item.kind),
        item=item.id,
        saga=plain(saga),
        step=item.step.number if item.step else 0,
        tool=plain(item.step.tool) if item.step else "",
        reason=plain(item.reason),
        since=when(item.at),
        level=due.level,
        commands=tuple(map(plain, commands(item))),
        show=plain(f"amends show {item.saga.id}") if item.saga else "amends inbox",
        device=kit.log.origin,
        left=_left(kit, item),
        args=_args(kit, item) if due.channel.include_args else "",
    )


def _left(kit: AgentKit, item: Item) -> str:
    """How long a question is still open, in words."""
    return span(left_ms(item.asked, kit.log.now().lived)) if item.asked else ""


def _args(kit: AgentKit, item: Item) -> str:
    raw = step_fields(kit, item.saga.id, item.step.number).get("args") if item.saga and item.step else None
    return plain(raw.decode()) if raw else ""
