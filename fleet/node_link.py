"""A controller's link to one node: connects, checks the enrolment, and keeps asking how the node is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq.asyncio

from fleet.codec import PROTOCOL_VERSION
from fleet.control import ControlClient
from fleet.control_messages import (
    ControlReply,
    ControlRequest,
    Heartbeat,
    HeartbeatReply,
    Hello,
    NodeStatus,
    Welcome,
)
from fleet.discovery import Place, SeenNode
from fleet.enrolment import TokenStore
from fleet.errors import EnrolmentError, PacelineError, RefusedError, UnreachableError
from fleet.identity import Identity, node_id_of
from fleet.liveness import Liveness, LivenessSettings
from fleet.node import NodeId, PeerAddress
from fleet.trust import TrustStore
from fleet.views import NodeState, NodeView

HEARTBEAT_INTERVAL_S = 1.0
BUSY_HEARTBEAT_INTERVAL_S = 0.25
"""While something of ours is being deployed on the node, so that its progress is seen as it goes."""
SETTINGS = LivenessSettings(
    heartbeat_interval_s=HEARTBEAT_INTERVAL_S, suspect_after_s=3.0, lost_after_s=6.0, longest_retry_s=5.0
)
HEARTBEAT_TIMEOUT_S = 3.0
REQUEST_TIMEOUT_S = 10.0

_NODE_STATES: dict[str, NodeState] = {
    "unknown": "connecting",
    "connecting": "connecting",
    "authenticated": "connecting",
    "alive": "ready",
    "suspect": "suspect",
    "lost": "lost",
    "refused": "refused",
}
_log = logging.getLogger("paceline.controller")


class NodeLink:
    """One node of which an announcement was seen, or that is trusted already. Lives in one selector event loop.

    A node is connected to when it is trusted or claims to belong to this controller; the claim is then checked with
    the enrolment token that it must prove to hold. Others are only shown.

    Args:
        on_change: called after every change of ``view``.
        on_heartbeat: called with every status that the node sends, before ``on_change``.
        is_busy: tells whether the node is to be asked more often.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        identity: Identity,
        controller_name: str,
        public_key: str,
        name: str,
        trust: TrustStore,
        tokens: TokenStore,
        *,
        trusted: bool,
        on_change: Callable[[], None],
        on_heartbeat: Callable[[NodeLink, NodeStatus], None],
        is_busy: Callable[[NodeId], bool],
    ) -> None:
        self.public_key = public_key
        self.node_id: NodeId = node_id_of(public_key)
        self.name = name
        self.trusted = trusted
        self.welcome: Welcome | None = None
        self.status: NodeStatus | None = None
        self.seen: SeenNode | None = None
        self._context = context
        self._identity = identity
        self._controller_name = controller_name
        self._trust = trust
        self._tokens = tokens
        self._on_change = on_change
        self._on_heartbeat = on_heartbeat
        self._is_busy = is_busy
        self._liveness = Liveness(SETTINGS)
        self._client: ControlClient | None = None
        self._detail = ""
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._proven: Place | None = None
        self._inventory_number = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether the node answers."""
        return self._liveness.state == "alive"

    @property
    def gone(self) -> bool:
        """Whether the node was connected to and does not answer any more."""
        return self._liveness.state in ("lost", "suspect", "refused")

    @property
    def endpoint_host(self) -> str | None:
        """The address behind which the node proved its key."""
        if self._client is None or not self._client.endpoint:
            return None
        return self._client.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the node may be reached, the address that it answers at first."""
        seen = self.seen.addresses if self.seen is not None else ()
        host = self.endpoint_host
        return tuple(dict.fromkeys((host, *seen))) if host is not None else seen

    def update(self, seen: SeenNode | None) -> None:
        """An announcement was seen, changed, or (None) taken back."""
        changed = seen is not None and (self.seen is None or seen.places != self.seen.places)
        self.seen = seen
        if seen is not None and self.welcome is None:
            self.name = seen.name
        if seen is not None and (self.trusted or seen.fleet == self._identity.node_id):
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._run(), name=f"link {self.name}")
            if changed:
                self._liveness.on_seen(self._now())
                self._wake.set()
        self._on_change()

    async def request(self, message: ControlRequest) -> ControlReply:
        """Ask the node for something; the next heartbeat follows at once.

        Raises:
            UnreachableError: there is no connection, or no answer.
            RefusedError: the node did not do it; the text names the node and the reason.
        """
        async with self._turn:
            client = self._client
            if client is None:
                raise UnreachableError(f"There is no connection to {self.name}.")
            reply = await client.request(message, REQUEST_TIMEOUT_S)
        self.beat_now()
        return reply

    def beat_now(self) -> None:
        """Ask how the node is without waiting for the interval."""
        self._wake.set()

    def on_resumed(self) -> None:
        """This PC slept: the node must answer on a new connection before anything is believed of it."""
        if self._task is not None:
            self._liveness.on_resumed(self._now())
            self._wake.set()

    async def close(self) -> None:
        """End the link."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._disconnect()

    def view(self) -> NodeView:
        """The node as it is now; what it said of its stages holds only while it answers."""
        status = self.status if self.alive else None
        return NodeView(
            id=self.node_id,
            name=self.name,
            state=self._state(),
            detail=self._words(),
            addresses=self.addresses,
            public_key=self.public_key,
            inventory=self.welcome.inventory if self.welcome is not None else None,
            load=status.load if status is not None else None,
            stages=status.stages if status is not None else (),
            gateways=status.gateways if status is not None else (),
        )

    def _state(self) -> NodeState:
        if self._task is None:
            if self.trusted:
                return "lost"
            return "foreign" if self.seen is not None and self.seen.fleet else "found"
        state = _NODE_STATES[self._liveness.state]
        if state == "ready" and self.status is not None and self.status.paused:
            return "paused"
        return state

    def _words(self) -> str:
        if self._task is None:
            if self.trusted:
                return "not seen on the network"
            return "belongs to another controller" if self.seen is not None and self.seen.fleet else "not enrolled"
        if self._state() == "paused":
            return "paused by its owner: takes no new stages"
        return "" if self.alive else self._detail

    async def _run(self) -> None:
        while True:
            before = self._liveness.state
            match self._liveness.next_instruction(self._now()):
                case "connect":
                    await self._connect()
                case "heartbeat":
                    await self._beat()
                case "disconnect":
                    await self._disconnect()
                case None:
                    await self._wait()
            if self._liveness.state != before:
                self._on_change()

    async def _wait(self) -> None:
        """Until the liveness wants something, the connection breaks, or a heartbeat is wanted sooner."""
        delay_s = max(0.0, self._liveness.next_time_s() - self._now())
        busy = self._is_busy(self.node_id)
        if busy and self.alive:
            delay_s = min(delay_s, BUSY_HEARTBEAT_INTERVAL_S)
        waiting = [asyncio.ensure_future(self._wake.wait())]
        if self._client is not None:
            waiting.append(asyncio.ensure_future(self._client.disconnected.wait()))
        try:
            await asyncio.wait(waiting, timeout=delay_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
        if self._client is not None and self._client.disconnected.is_set():
            self._lost(f"The connection to {self.name} was lost.")
        elif self.alive and (self._wake.is_set() or busy):
            await self._beat()
        self._wake.clear()

    async def _connect(self) -> None:
        await self._disconnect()
        places = self._places()
        if not places:
            self._lost("not seen on the network")
            return
        # Anybody may announce a node's key at an address of his own, and say there that we are refused.
        errors: list[PacelineError] = []
        for place in places:
            error = await self._connect_to(place)
            if error is None:
                return
            errors.append(error)
        refusal = next((error for error in errors if isinstance(error, EnrolmentError | RefusedError)), None)
        if refusal is None:
            self._lost(str(errors[0]))
        else:
            self._detail = str(refusal)
            self._liveness.on_refused(self._now())

    def _places(self) -> tuple[Place, ...]:
        """Where the node proved its key the last time, which no announcement can take back, and where it is said to
        be."""
        proven = (self._proven,) if self._proven is not None else ()
        return tuple(dict.fromkeys((*proven, *(self.seen.places if self.seen is not None else ()))))

    async def _connect_to(self, place: Place) -> PacelineError | None:
        """Connect to the node where it may be; why not, if it comes to nothing."""
        peer = PeerAddress(self.name[:256], place.addresses, place.port, self.public_key)
        client = ControlClient(self._context, self._identity, peer, controller_name=self._controller_name[:256])
        try:
            welcome = await client.connect()
            await self._admit(client, welcome)
        except PacelineError as error:
            await client.close()
            return error
        except BaseException:
            await client.close()
            raise
        self._client = client
        self._proven = place
        self.welcome = welcome
        self.name = welcome.name
        self._inventory_number = 0
        self._liveness.on_authenticated(self._now())
        return None

    async def _admit(self, client: ControlClient, welcome: Welcome) -> None:
        """Trust the node if it proves to hold a token of ours, or if we do already.

        Raises:
            EnrolmentError: it does not.
        """
        if not self.trusted:
            await asyncio.to_thread(
                self._tokens.accept,
                welcome.token_id,
                welcome.token_proof,
                self.public_key,
                self._identity.public_key,
                client.nonce,
            )
            _log.info("%s joined the fleet", welcome.name)
        if not self.trusted or welcome.name != self.name:
            await asyncio.to_thread(self._trust.trust_node, self.public_key, welcome.name)
        self.trusted = True

    async def _beat(self) -> None:
        client = self._client
        if client is None:
            self._lost(self._detail)
            return
        try:
            async with self._turn:
                reply = await client.request(Heartbeat(number=0), HEARTBEAT_TIMEOUT_S)
            if isinstance(reply, HeartbeatReply):
                await self._renew_inventory(client, reply.status)
        except PacelineError as error:
            self._detail = str(error)
            if client.disconnected.is_set():
                self._lost(self._detail)
            return
        self._liveness.on_answer(self._now())
        if isinstance(reply, HeartbeatReply):
            self.status = reply.status
            self._on_heartbeat(self, reply.status)
            self._on_change()

    async def _renew_inventory(self, client: ControlClient, status: NodeStatus) -> None:
        """Another greeting brings the inventory when the node says that it has changed."""
        if status.inventory_number == self._inventory_number:
            return
        hello = Hello(
            number=0,
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            controller_name=self._controller_name[:256],
            nonce=client.nonce,
        )
        welcome = await client.request(hello, HEARTBEAT_TIMEOUT_S)
        if isinstance(welcome, Welcome):
            self.welcome = welcome
            self._inventory_number = status.inventory_number

    async def _disconnect(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            with contextlib.suppress(zmq.ZMQError):
                await client.close()

    def _lost(self, detail: str) -> None:
        self._detail = detail
        self._liveness.on_disconnected(self._now())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
