"""How a deployment comes to life, as a synchronous state machine: reports of nodes go in, what to ask goes out.

The order is: every node fetches its stage; when all have theirs, every stage is started; when all are ready, the
gateway is started on the node of stage 0; the deployment is ready when the gateway is, which sends a token through
every stage first. The machine looks at what *is* (each heartbeat carries a node's whole state) and asks for what is
missing, so a node that was restarted in between is simply asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.control_messages import GatewayStatus, StageStatus
from fleet.node import NodeId
from fleet.views import DeploymentState

LOST_NODE_PATIENCE_S = 60.0
"""How long a deployment waits for a node that went away while it was being deployed."""
STALLED_S = 120.0
"""A node that is alive and has received nothing for so long will not get any further."""

_FINAL: frozenset[DeploymentState] = frozenset({"failed", "cancelled", "stopped"})
_HELD = frozenset({"received", "starting", "ready", "restarting"})


@dataclass(frozen=True)
class StageTarget:
    """Where a stage shall run."""

    stage: int
    node: NodeId
    node_name: str


@dataclass(frozen=True)
class AskPrepare:
    """Ask the stage's node to fetch it."""

    stage: int


@dataclass(frozen=True)
class AskStart:
    """Ask the stage's node to run it."""

    stage: int


@dataclass(frozen=True)
class AskGateway:
    """Ask the node of stage 0 to run the gateway."""


@dataclass(frozen=True)
class AskUndeploy:
    """Ask a node to stop whatever it does for the deployment."""

    node: NodeId


Ask = AskPrepare | AskStart | AskGateway | AskUndeploy


class DeploymentMachine:
    """One deployment as its controller drives it.

    Call ``observe`` with each node's heartbeat, ``lost`` when a node stops answering, ``answered`` with what became of
    each request, and ``tick`` now and then. Each returns what to ask now; an Ask is not repeated before it was
    answered. A heartbeat that is observed after an answer must have been asked for after it.

    Attributes:
        state: see :data:`fleet.views.DeploymentState`.
        detail: why, in words, naming the node.
    """

    def __init__(self, targets: Sequence[StageTarget], now_s: float) -> None:
        self.targets = tuple(targets)
        self.state: DeploymentState = "sending"
        self.detail = ""
        self._now_s = now_s
        self._stages: dict[int, StageStatus | None] = {}
        self._gateway: GatewayStatus | None = None
        self._lost_since: dict[NodeId, float] = {}
        self._progress_at: dict[int, float] = {target.stage: now_s for target in targets}
        self._asked: set[Ask] = set()
        self._taken: set[Ask] = set()  # answered, and what came of them not seen yet
        self._was_ready = False

    @property
    def finished(self) -> bool:
        """Whether the deployment has ended; its nodes may still have to be told."""
        return self.state in _FINAL

    @property
    def stages(self) -> Mapping[int, StageStatus | None]:
        """What is known of each stage."""
        return self._stages

    @property
    def gateway(self) -> GatewayStatus | None:
        """What is known of the gateway."""
        return self._gateway

    def observe(
        self, node: NodeId, stages: Sequence[StageStatus], gateway: GatewayStatus | None, now_s: float
    ) -> list[Ask]:
        """A node's heartbeat: what it does for this deployment."""
        self._now_s = now_s
        self._lost_since.pop(node, None)
        self._taken = {ask for ask in self._taken if self._node_of(ask) != node}
        by_number = {status.stage: status for status in stages}
        if self.finished:
            return self._take([AskUndeploy(node)] if stages or gateway is not None else [])
        for target in self.targets:
            if target.node != node:
                continue
            before, after = self._stages.get(target.stage), by_number.get(target.stage)
            if before is None or after is None or before.progress != after.progress or before.state != after.state:
                self._progress_at[target.stage] = now_s
            self._stages[target.stage] = after
        if node == self.targets[0].node:
            self._gateway = gateway
        return self._decide()

    def lost(self, node: NodeId, now_s: float) -> list[Ask]:
        """A node does not answer any more."""
        self._now_s = now_s
        self._lost_since.setdefault(node, now_s)
        return [] if self.finished else self._decide()

    def answered(self, ask: Ask, refusal: str | None, now_s: float) -> list[Ask]:
        """A request was taken, or refused with a sentence that names the node."""
        self._now_s = now_s
        self._asked.discard(ask)
        if refusal is None:
            self._taken.add(ask)
        if refusal is None or self.finished:
            return []
        return self._fail(refusal)

    def unanswered(self, ask: Ask, now_s: float) -> None:
        """A request got no answer; it is made again when the node's next heartbeat shows that it had no effect."""
        self._now_s = now_s
        self._asked.discard(ask)

    def tick(self, now_s: float) -> list[Ask]:
        """Time has passed."""
        self._now_s = now_s
        return [] if self.finished else self._decide()

    def cancel(self, state: DeploymentState = "cancelled") -> list[Ask]:
        """The person wants no more of it."""
        if self.finished:
            return []
        self.state = state
        self.detail = ""
        return self._undeploy_everywhere()

    def fail(self, detail: str) -> list[Ask]:
        """It cannot go on, for a reason on the controller's side."""
        return [] if self.finished else self._fail(detail)

    def _decide(self) -> list[Ask]:
        asks: list[Ask] = []
        failure = self._failure()
        if failure is not None:
            if not self._was_ready:
                return self._fail(failure)
            self.state, self.detail = "degraded", failure
            return []
        known = [target for target in self.targets if target.stage in self._stages]
        statuses = [self._stages.get(target.stage) for target in self.targets]
        for target in known:
            if self._stages[target.stage] is None and target.node not in self._lost_since:
                asks.append(AskPrepare(target.stage))
        held = [status for status in statuses if status is not None and status.state in _HELD]
        ready = [status for status in statuses if status is not None and status.state == "ready"]
        if len(held) == len(self.targets):
            asks += [AskStart(status.stage) for status in held if status.state == "received"]
        if len(ready) == len(self.targets) and self._gateway is None:
            asks.append(AskGateway())
        self._name_state(len(held), len(ready))
        return self._take(asks)

    def _name_state(self, held: int, ready: int) -> None:
        count = len(self.targets)
        if self._gateway is not None and self._gateway.state == "ready" and ready == count and not self._lost_since:
            self._was_ready = True
            self.state, self.detail = "ready", ""
        elif self._was_ready:
            self.state, self.detail = "degraded", self._trouble()
        elif held < count:
            self.state, self.detail = "sending", self._waiting_for() or f"{held} of {count} stages received"
        elif ready < count:
            self.state, self.detail = "starting", self._waiting_for() or f"{ready} of {count} stages ready"
        else:
            detail = self._gateway.detail if self._gateway is not None else ""
            self.state, self.detail = "probing", self._waiting_for() or detail

    def _failure(self) -> str | None:
        """Why this cannot become ready any more, if so."""
        for target in self.targets:
            status = self._stages.get(target.stage)
            where = f"Stage {target.stage} on {target.node_name}"
            if status is not None and status.state == "failed":
                return f"{where} failed: {status.detail}"
            stalled_s = self._now_s - self._progress_at[target.stage]
            receiving = status is not None and status.state == "receiving" and target.node not in self._lost_since
            if receiving and stalled_s >= STALLED_S:
                return f"{where} has received nothing for {STALLED_S:.0f} s."
        if self._gateway is not None and self._gateway.state == "failed":
            return f"The gateway on {self.targets[0].node_name} failed: {self._gateway.detail}"
        for target in self.targets:
            since_s = self._lost_since.get(target.node)
            if since_s is not None and self._now_s - since_s >= LOST_NODE_PATIENCE_S:
                return f"{target.node_name} has not answered for {LOST_NODE_PATIENCE_S:.0f} s."
        return None

    def _waiting_for(self) -> str:
        names = [target.node_name for target in self.targets if target.node in self._lost_since]
        return f"waiting for {', '.join(dict.fromkeys(names))}, which does not answer" if names else ""

    def _trouble(self) -> str:
        waiting = self._waiting_for()
        if waiting:
            return waiting
        for target in self.targets:
            status = self._stages.get(target.stage)
            if status is None or status.state != "ready":
                state = "is missing" if status is None else f"is {status.state}"
                reason = f": {status.detail}" if status is not None and status.detail else ""
                return f"stage {target.stage} on {target.node_name} {state}{reason}"
        return self._gateway.detail if self._gateway is not None else "the gateway is missing"

    def _fail(self, detail: str) -> list[Ask]:
        self.state, self.detail = "failed", detail
        return self._undeploy_everywhere()

    def _undeploy_everywhere(self) -> list[Ask]:
        nodes = dict.fromkeys(target.node for target in self.targets)
        return self._take([AskUndeploy(node) for node in nodes])

    def _take(self, asks: Sequence[Ask]) -> list[Ask]:
        new = [ask for ask in asks if ask not in self._asked and ask not in self._taken]
        self._asked.update(new)
        return new

    def _node_of(self, ask: Ask) -> NodeId:
        match ask:
            case AskPrepare(stage) | AskStart(stage):
                return next(target.node for target in self.targets if target.stage == stage)
            case AskUndeploy(node):
                return node
            case AskGateway():
                return self.targets[0].node
