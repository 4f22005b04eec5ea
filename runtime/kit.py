"""The one object most users need: this device's log, held by this process, with tools, scopes and a queue for people.

`AgentKit()` opens the device's file (`AMENDS_HOME`, else the platform's data folder). `AgentKit.in_memory()` promises
nothing beyond this process and is asked for by name. A forked child forgets what its parent drives.
"""

from __future__ import annotations

import atexit
import base64
import hmac
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..store.driver import Driver, alive, describe
from ..store.errors import AmendsError
from ..store.evidence import DatabaseError
from ..store.home import Home, in_words, new_id
from ..store.identity import open_log
from ..store.log import Log, MemoryLog
from .current import CURRENT
from .drive import BLOCKING, run
from .engine import Engine, Run
from .gate.freeze import freeze
from .gate.policy_file import Policy
from .hosts import Hosts
from .owner_key import owner_of
from .plain import named
from .pool import SHARED
from .reach import LiveReach
from .report import RollbackReport
from .state import State
from .tools import registered

if TYPE_CHECKING:
    from ..store.chain import Draft
    from .follow import Follower
    from .gate.rules import PreFlightGate
    from .perform import Call
    from .reconcile import Reconciled
    from .saga import Saga

NOT_CLAIMED = (
    "An effect that happens is happening once only if the other side honours the idempotency key.",
    "An effect that lands later than its settle time and has no probe stands until somebody looks.",
    "A tool that raises anything but a timeout, a broken connection or a 5xx is believed: it did not happen.",
    "A reversible step whose inverse lives in memory dies with its process.",
    "Such a step, where nothing is limited, claimed or asked about, is judged on the log as its process last read it.",
    "Whoever can write the home folder is the device.",
)


NAMED = 5
"""Sagas that one line names."""


class AgentKit:
    """A process's hold on one device log.

    home: the folder; AMENDS_HOME or the platform's by default. recover: undo what dead agents left, first. name and
    on_behalf_of say who asks: neither may approve. seal_key: the source of a sealed log's key (owner_key.py). gate:
    rules and limits in code, beside the home's policy.toml.
    """

    _default: AgentKit | None = None
    _lock = threading.Lock()
    _all: weakref.WeakSet[AgentKit] = weakref.WeakSet()
    _bare = False  # whether a sealed log without its key may be written to, as far as that takes no key

    def __init__(
        self,
        name: str = "agent",
        *,
        home: str | os.PathLike[str] | None = None,
        recover: bool = False,
        gate: PreFlightGate | None = None,
        on_behalf_of: str = "",
        warn: Callable[[str], None] | None = None,
        seal_key: str = "",
    ) -> None:
        self.name, self.on_behalf_of = name, named(on_behalf_of) if on_behalf_of else ""
        self.home: Home | None = Home(Home.find(home))
        log = open_log(self.home, State(), warn=warn, owner=owner_of(self.home, seal_key), bare=self._bare)
        identity: Any = log.identity  # the log's port names what a log needs of it; a device has more
        self._hold(log, identity, self._handlers(self.home), self._rules(self.home, gate))
        if self.home.config.exists():
            from .retention import capped

            self.engine.room = capped(log, self.home.config)
        self.dead = _dead_sagas(self)
        if recover and self.dead:
            from .daemon import recover_dead

            recover_dead(self)
            self.dead = _dead_sagas(self)
        if self.dead:
            count = len(self.dead)
            sys.stderr.write(
                f"amends: {count} saga{'s' if count > 1 else ''} of a dead agent wait{'' if count > 1 else 's'} to be "
                "undone; run `amends recoverd --once`\n"
            )

    def _handlers(self, home: Home) -> Hosts:
        return _configured(home)

    def _rules(self, home: Home, gate: PreFlightGate | None) -> Policy:
        return Policy(home.policy, gate)

    def _hold(self, log: Log, names: Names, hosts: Hosts, policy: Policy) -> None:
        self.log, self.hosts = log, hosts
        self._driver: Driver | None = None
        self._memory_driver = new_id()
        self._again: dict[str, str | None] = {}
        self.meter = names.meter
        self.engine = Engine(
            log, driver=self._drives, hide=names.hide, fingerprint=names.fingerprint, known=self._known,
            meter=names.meter, policy=policy, agent=self.name, on_behalf_of=self.on_behalf_of,
        )  # fmt: skip
        self.engine.after_landing = self._landed
        self.engine.needs_people = self._needs_people
        self._follower: Follower | None = None
        AgentKit._all.add(self)
        atexit.register(_close_quietly, weakref.ref(self))

    @classmethod
    def in_memory(
        cls, name: str = "agent", *, gate: PreFlightGate | None = None, on_behalf_of: str = "", clock: Any = None
    ) -> AgentKit:
        """A kit whose log lives and dies with this process."""
        kit = cls.__new__(cls)
        kit.name, kit.on_behalf_of, kit.home, kit.dead = name, named(on_behalf_of) if on_behalf_of else "", None, []
        view = State()
        log = MemoryLog(view, clock=clock)
        view.archive = log
        kit._hold(log, _Unkept(), Hosts(), Policy(None, gate))
        return kit

    @classmethod
    def default(cls) -> AgentKit:
        """This process's kit on the device's own home, opened when first needed."""
        with cls._lock:
            if cls._default is None or cls._default._closed:
                cls._default = cls()
            return cls._default

    # -- as a driver --------------------------------------------------------------------------------------------------

    _closed = False

    def _drives(self) -> str:
        if self.home is None:
            return self._memory_driver
        if self._driver is None:
            with AgentKit._lock_driver:
                if self._driver is None:
                    with in_words(self.home.path):
                        self._driver = Driver.start(self.home.run)
        return self._driver.id

    _lock_driver = threading.Lock()

    def lives(self, driver: str) -> bool:
        """Whether somebody holds the lock of this driver."""
        if not driver:
            return False
        if self._driver is not None and driver == self._driver.id:
            return False  # ourselves: what we still drive is in engine.runs
        return self.home is not None and alive(self.home.run, driver)

    def who(self, driver: str) -> str:
        """A driver in words."""
        if self.home is None or driver == (self._driver.id if self._driver else ""):
            return "this process"
        told = describe(self.home.run, driver)
        return f"process {told.get('pid', '?')}{' (stopped)' if told.get('stopped') else ''}"

    def _known(self, handler: str) -> str | None:
        if handler not in self._again:
            self._again[handler] = self.hosts.again(handler)
        return self._again[handler]

    def reach(self, made: Run | None = None) -> LiveReach:
        """How this process runs compensations."""
        return LiveReach(self.engine, self.hosts, made)

    def _landed(self, made: Run, call: Call, untold: Draft | None) -> None:
        """A late effect ended. untold: the fact that its saga, having ended, could not take."""
        from .followup import follow_landed, undo_landed

        if untold is None:
            undo_landed(self, made)
        else:
            follow_landed(self, made, call.number, untold)

    def _needs_people(self) -> None:
        """Something waits for a person, and that is durable: tell those who want to be told. Blocks nobody."""
        if self.home is None or not self.home.config.exists():
            return
        with AgentKit._lock_driver:
            if self._follower is None:
                from .follow import Follower

                self._follower = Follower(self)
        self._follower.nudge()

    # -- tools and scopes ---------------------------------------------------------------------------------------------

    def safe_tool(
        self, fn: Callable[..., Any], *, semantics: Any, name: str | None = None, **options: Any
    ) -> Callable[..., Any]:
        """A function as a tool of this kit; options as `execute`. Inside a saga a call is a step."""
        from .semantics import semantics_of
        from .tools import check_name
        from .wrap import wrapped

        return wrapped(fn, check_name(name or fn.__name__, "tool"), {"semantics": semantics_of(semantics), **options})

    def transaction(self, id: str | None = None, **options: Any) -> Any:
        """`saga_scope` on this kit."""
        from .scope import saga_scope

        return saga_scope(id, kit=self, **options)

    def undo(
        self, saga: str, *, by: str, reason: str, step: int | None = None, dry_run: bool = False
    ) -> RollbackReport:
        """Undo a committed saga later, as a follow-up saga. dry_run tells what would run and changes nothing."""
        from .followup import undo_committed

        return run(undo_committed(BLOCKING, self, saga, by=by, reason=reason, step=step, dry_run=dry_run))

    # -- for people ---------------------------------------------------------------------------------------------------

    def inbox(self) -> list[dict[str, Any]]:
        """Everything that needs a person, oldest first (keys: PROMISES 12.1)."""
        from .inbox import items

        return items(self)

    def approve(self, item: str, *, by: str, note: str = "", break_glass: bool = False, reason: str = "") -> None:
        """Let a step happen that waits for people, by name; keys sign through `amends approve` and the page. Raises
        NotFound, Refused: decided by another first, expired, or more than a name is asked. break_glass, with a reason,
        sets aside how many people and which role are asked, and is looked at by somebody else afterwards."""
        from .inbox import answer

        answer(self, item, "approve", by, note, break_glass=break_glass, reason=reason)

    def deny(self, item: str, *, by: str, note: str = "") -> None:
        """Keep a step from happening that waits for people. A no wins until the approval is spent."""
        from .inbox import answer

        answer(self, item, "deny", by, note)

    def accept(self, item: str, *, by: str, reason: str) -> None:
        """Account for what stands, in a person's name; or say that a broken glass was looked at."""
        from .inbox import accept

        accept(self, item, by, reason)

    def retry(self, item: str, *, by: str) -> RollbackReport:
        """Try an escalated saga again from where it stopped."""
        from .inbox import retry

        return retry(self, item, by)

    def reconcile(self, *sagas: str, tool: str = "", timeout: float = 10.0) -> Reconciled:
        """Ask the world whether effects are as the log says: of these sagas, of this tool, or all. Reconcilers of this
        process are asked here, others in their hosts, one after the other, each for at most `timeout` seconds."""
        from .followup import resolve
        from .reconcile import Scope, reconcile

        meant = frozenset(resolve(self, saga).id for saga in sagas)
        return reconcile(self, Scope(meant, tool), timeout=timeout)

    def guarantees(self) -> Mapping[str, Any]:
        """What holds here, as data: versioned, with what is not claimed."""
        return {
            "version": 1,
            "durable": self.home is not None,
            "survives": self._survives(),
            "barriers": {"strict": "2n+1 commits", "merged": "n+1 commits, never for IRREVERSIBLE"},
            "handlers": {name: bool(handler.again) for name, handler in sorted(registered().items())},
            "not_claimed": list(NOT_CLAIMED),
        }

    def _survives(self) -> str:
        if self.home is None:
            return "nothing: this log lives in memory"
        if self.home.volatile:
            return "kill, until reboot (the home is in memory)"
        return "kill and power cut, as far as the disk is honest"

    def status(self) -> dict[str, Any]:
        """What runs and what waits, and how every part of the gate stands. Where it could not be read, `readable` is
        False and `switch` is UNKNOWN: never RUNNING."""
        from .levers import UNKNOWN

        try:
            self.log.refresh()
            return self._status()
        except (AmendsError, DatabaseError) as error:
            return {"readable": False, "switch": UNKNOWN, "error": str(error)}

    def _status(self) -> dict[str, Any]:
        from .levers import standing

        roots = list(self.engine.state.roots())
        return {
            "readable": True,
            "home": str(self.home.path) if self.home else None,
            "records": self.log.size,
            "open": len(roots),
            "dead": _dead_sagas(self),
            "escalated": sum(1 for saga in roots if saga.escalated),
            "frozen": [saga.id for saga in roots if self._frozen(saga)],
            "waiting": len(self.inbox()),
            "seal": self._seal(),
            "pool_saturated": SHARED.saturated,
            **standing(self),
        }

    def _seal(self) -> dict[str, Any]:
        """The id of the key that the log is sealed under, None for none; whether it is at hand; how many records are
        still to be gone through."""
        log: Any = self.log
        if self.home is None:
            return {"key": None, "at_hand": True, "left": 0}
        from ..store.sealing import left

        in_force = log.keeping.seal
        return {"key": in_force or None, "at_hand": not in_force or log.vault.has(in_force), "left": left(log)}

    def _frozen(self, root: Saga) -> str:
        state = self.engine.state
        return freeze(state, state.family(root), self.log.now())

    def holds(self, driver: str) -> bool:
        """Whether a driver is alive, ourselves included."""
        return driver == (self._driver.id if self._driver else self._memory_driver) or self.lives(driver)

    def close(self) -> None:
        """Sign and anchor the head, let go of the driver's lock. Open sagas become the daemon's."""
        if self._closed:
            return
        self._closed = True
        if self._follower is not None:
            self._follower.close()
        try:
            self._say_what_stands()
            self.log.close()
        finally:
            self.hosts.close()
            if self._driver is not None:
                self._driver.release()
                self._driver = None

    def _say_what_stands(self) -> None:
        """The last line of an agent: what it left standing, for a person to settle."""
        state, resting = self.engine.state, list(self.engine.resting.items())
        open_still = [(state.sagas[id], made.name) for id, made in resting if id in state.sagas]
        left = [name for saga, name in open_still if saga is state.root(saga)]
        if left and self.home is not None:
            names = ", ".join(left[:NAMED]) + (f" and {len(left) - NAMED} more" if len(left) > NAMED else "")
            sys.stderr.write(f"amends: left standing, for a person to settle: {names}; run `amends inbox`\n")

    def __enter__(self) -> AgentKit:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _forked(self) -> None:
        self._driver = self._follower = None
        self._memory_driver = new_id()
        self.engine.runs.clear()
        self.engine.resting.clear()


class Names(Protocol):
    """How a device hides names in headers (store/keys.py)."""

    def hide(self, name: str) -> str:
        """The header id of a name the user gave, 26 characters."""

    def meter(self, name: str) -> str:
        """The header name of what a limit or a lock is keyed by, 16 hex digits."""

    def fingerprint(self, value: bytes) -> str:
        """What stands in the log for a secret."""


class _Unkept:
    """Names hidden under a key that lives and dies with this process."""

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def hide(self, name: str) -> str:
        return self.fingerprint(name.encode())

    def meter(self, name: str) -> str:
        return hmac.digest(self._key, b"meter\0" + name.encode(), "sha256").hex()[:16]

    def fingerprint(self, value: bytes) -> str:
        return base64.b32encode(hmac.digest(self._key, value, "sha256")).decode().lower()[:26]


def _configured(home: Home) -> Hosts:
    from .handlers_file import load

    return Hosts(configured=load(home.handlers).specs)


def _dead_sagas(kit: AgentKit) -> list[str]:
    return [
        saga.id
        for saga in kit.engine.state.roots()
        if saga.driver and not kit.holds(saga.driver) and not kit._frozen(saga)
    ]


def _close_quietly(kit: Callable[[], AgentKit | None]) -> None:
    held = kit()
    if held is not None and not held._closed:
        held.close()


def _in_child() -> None:
    """After a fork: the parent's sagas, locks and context are the parent's."""
    CURRENT.set(None)
    AgentKit._lock = threading.Lock()
    AgentKit._lock_driver = threading.Lock()
    for kit in list(AgentKit._all):
        kit._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
